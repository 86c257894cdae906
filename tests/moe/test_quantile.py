"""Quantile balancing: quantiles and bias against plain loops, a load that evens out, layouts, padding.

next: tests/moe/test_balancing_loss.py
"""

from dataclasses import replace

import pytest
import router_policies as plain
import torch

from tmoe.config.model import ModelConfig, MoEConfig
from tmoe.model.transformer import Transformer
from tmoe.moe.balance import Balancer, stack
from tmoe.moe.layer import MoE
from tmoe.moe.select.quantile import quantiles

CFG = MoEConfig(experts=8, top_k=2, ffn_dim=4, selection="quantile", balance="none", z_coeff=0.0)


def layer(cfg: MoEConfig = CFG, dim: int = 8) -> MoE:
    """A layer whose logits are its input."""
    moe = MoE(dim, cfg)
    with torch.no_grad():
        moe.router.weight.copy_(torch.eye(cfg.outputs))
    return moe


def step(moe: MoE, *calls: tuple, taken: torch.Tensor | None = None) -> None:
    """A step of these micro-batches, (x, padding) each."""
    balancer = Balancer(moe.router.cfg)
    for x, padding in calls:
        moe(x, padding)
        balancer.record(stack([moe.load]))
    balancer.update_bias([moe.router], taken)


@pytest.mark.parametrize(("T", "K"), [(64, 2), (40, 1), (24, 3), (8, 7), (33, 2), (1, 1)])
def test_quantiles_are_megatrons(T, K):
    """qb_dual_update's, which wants T K divisible by E; here the quotient is rounded down."""
    torch.manual_seed(T)
    moe = layer(replace(CFG, top_k=K, renormalize=K > 1))
    moe.router.choice_bias.normal_(0, 0.3)
    logits = torch.randn(T, 8)
    routing = moe.router(logits)
    beta = (-moe.router.choice_bias).tolist()
    wanted = (logits + moe.router.choice_bias).topk(K).indices
    assert torch.equal(routing.ids_TK.long(), wanted)
    got = quantiles(logits, routing.noted_TX, K, 1, None)
    assert got[0].tolist() == pytest.approx(plain.quantile(logits.tolist(), K, beta), abs=1e-6)


def test_padding_is_no_token():
    torch.manual_seed(0)
    logits = torch.randn(3 * 20, 8)
    padding = torch.rand(60) < 0.4
    padding[40:] = True  # a sequence without tokens
    cutoffs = layer().router(logits, padding).noted_TX
    got = quantiles(logits, cutoffs, 2, 3, padding)
    for b in range(2):
        rows = slice(20 * b, 20 * b + 20)
        live = ~padding[rows]
        want = quantiles(logits[rows][live], cutoffs[rows][live], 2, 1, None)
        torch.testing.assert_close(got[b], want[0])
    assert got[2].tolist() == [0] * 8


def test_the_bias_is_minus_the_steps_mean_quantile_about_its_mean():
    """Over all sequences of all micro-batches; with ema, a share of the old one stays."""
    torch.manual_seed(0)
    moe = layer(replace(CFG, quantile_ema=0.25))
    moe.router.choice_bias.normal_(0, 0.3)
    beta = (-moe.router.choice_bias).double()
    xs = [torch.randn(2, 16, 8) for _ in range(2)]
    want = torch.tensor(
        [plain.quantile(rows.tolist(), 2, beta.tolist()) for x in xs for rows in x], dtype=torch.float64
    ).mean(0)
    step(moe, *((x, None) for x in xs))
    want = 0.25 * beta + 0.75 * want
    torch.testing.assert_close(moe.router.choice_bias.double(), -(want - want.mean()), atol=1e-6, rtol=0)


def test_micro_batches_change_nothing():
    torch.manual_seed(1)
    x, padding = torch.randn(4, 16, 8), torch.rand(4, 16) < 0.3
    whole, parts = layer(), layer()
    step(whole, (x, padding))
    step(parts, (x[:1], padding[:1]), (x[1:], padding[1:]))
    torch.testing.assert_close(whole.router.choice_bias, parts.router.choice_bias)


def test_skipped_steps_evaluations_and_steps_without_tokens_leave_the_bias():
    moe = layer()
    x, padding = torch.randn(2, 16, 8), torch.ones(2, 16, dtype=torch.bool)
    for calls, taken in (([(x, None)], torch.tensor(0)), ([(x, padding)], None), ([], None)):
        step(moe, *calls, taken=taken)
        assert not moe.router.choice_bias.any()
    step(moe, (x, None), taken=torch.tensor(1))
    assert moe.router.choice_bias.any()


def violation(moe: MoE, x: torch.Tensor) -> float:
    """How much the hottest expert has above its share."""
    counts = torch.bincount(moe.router(x.flatten(0, -2)).ids_TK.flatten(), minlength=8)
    return (counts.max() / counts.double().mean() - 1).item()


def test_an_uneven_load_evens_out():
    torch.manual_seed(2)
    moe = layer()
    skew = torch.randn(8)
    draw = lambda: torch.randn(4, 1024, 8) + skew  # noqa: E731
    held_out = draw()
    before = violation(moe, held_out)
    for _ in range(8):
        step(moe, (draw(), None))
    assert before > 0.5 and violation(moe, held_out) < 0.15


def test_it_trains_a_model_and_its_bias_stays_fp32():
    model = Transformer(ModelConfig(vocab=32, dim=16, layers=2, heads=2, kv_heads=1, head_dim=8, moe=CFG))
    tokens = torch.randint(32, (2, 16))
    model(tokens, tokens.roll(-1, 1)).backward()
    model.update_bias()
    biases = [block.moe.router.choice_bias for block in model.blocks]
    assert all(bias.any() and abs(bias.mean().item()) < 1e-6 for bias in biases)
    assert "blocks.0.moe.router.choice_bias" in model.state_dict()
    assert model.bfloat16().blocks[0].moe.router.choice_bias.dtype == torch.float32


def one_rank(rank: int, world: int) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(4, 16, 8)
    moe = layer()
    balancer = Balancer(CFG)
    balancer.all_reduce = lambda t: summed(t)
    moe(x[rank * 4 // world : (rank + 1) * 4 // world])
    balancer.record(stack([moe.load]))
    balancer.update_bias([moe.router])
    return moe.router.choice_bias.clone()


def summed(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    torch.distributed.all_reduce(t)
    return t


def test_ranks_change_nothing(gloo):
    (alone,), both = gloo(1, one_rank), gloo(2, one_rank)
    assert torch.equal(*both)
    torch.testing.assert_close(alone, both[0])
