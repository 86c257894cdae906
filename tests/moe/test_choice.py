"""Which experts a token may choose: groups, sigmoid scores, and the choice bias from rule to checkpoint.

next: tmoe/moe/router.py
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from router_references import reference_loss
from runs import SMALL, assert_equal_state, load, numbers, run
from tiers import slow_but
from torch._dynamo.utils import counters

from tmoe.checkpoint.manifest import dtype_of, read_manifest
from tmoe.checkpoint.tools import main as offline
from tmoe.config.check import ConfigError
from tmoe.config.model import MLAConfig, ModelConfig, MoEConfig
from tmoe.config.run import Config, OptimConfig, ParallelConfig, TrainConfig
from tmoe.model.transformer import Transformer
from tmoe.moe.balance import Balancer, Totals, measure, stack
from tmoe.moe.layer import MoE
from tmoe.moe.router import Router, Routing
from tmoe.optim.adamw import build_optimizer
from tmoe.parallel import build_mesh, clip_grad_norm_, parallelize
from tmoe.parallel.layout import BUFFERS

V3 = dict(score="sigmoid", choice_bias=True, group_score="top2")
ROUTERS = {
    "V2": MoEConfig(experts=12, top_k=3, groups=4, top_groups=2, renormalize=False, scaling=16.0),
    "V2, one group of many": MoEConfig(experts=6, top_k=2, groups=3, top_groups=1),
    "V3": MoEConfig(experts=12, top_k=4, groups=3, top_groups=2, scaling=2.5, **V3),
    "V3, every group, weights as they are": MoEConfig(
        experts=6, top_k=2, groups=2, top_groups=2, renormalize=False, **V3
    ),
    "softmax with a choice bias": MoEConfig(experts=5, top_k=2, choice_bias=True),
    "sigmoid alone": MoEConfig(experts=5, top_k=1, score="sigmoid"),
}


def filled(cfg: MoEConfig, dim: int = 7) -> Router:
    torch.manual_seed(0)
    router = Router(dim, cfg)
    torch.nn.init.normal_(router.weight)
    if router.choice_bias is not None:
        router.choice_bias.normal_(0, 0.3)
    return router


def choose(cfg: MoEConfig, logits: list[float], bias: list[float]) -> dict[int, float]:
    """For one token, its experts and their weights: DeepSeek's rule in words."""
    row = torch.tensor(logits)
    scores = (row.sigmoid() if cfg.score == "sigmoid" else row.softmax(0)).tolist()
    wanted = [s + b for s, b in zip(scores, bias, strict=True)]
    size = cfg.experts // cfg.groups
    groups = [range(g * size, (g + 1) * size) for g in range(cfg.groups)]
    best = 1 if cfg.group_score == "max" else 2
    groups.sort(key=lambda group: -sum(sorted((wanted[e] for e in group), reverse=True)[:best]))
    open_to = [e for group in groups[: cfg.top_groups] for e in group]
    chosen = sorted(open_to, key=lambda e: -wanted[e])[: cfg.top_k]
    total = sum(scores[e] for e in chosen) if cfg.renormalize else 1.0
    return {e: scores[e] / total * cfg.scaling for e in chosen}


@pytest.mark.parametrize("name", ROUTERS)
def test_choice_and_weights(name):
    cfg = ROUTERS[name]
    router = filled(ROUTERS[name])
    routing = router(torch.randn(200, 7))
    bias = [0.0] * cfg.experts if router.choice_bias is None else router.choice_bias.tolist()
    changed = 0
    for logits, ids, weights in zip(
        *(t.tolist() for t in (routing.logits_TE, routing.ids_TK, routing.weights_TK)), strict=True
    ):
        want = choose(cfg, logits, bias)
        assert dict(zip(ids, weights, strict=True)) == pytest.approx(want, rel=1e-5)
        changed += (
            want.keys() != choose(replace(cfg, groups=1, top_groups=1), logits, [0.0] * cfg.experts).keys()
        )
    assert changed > 20 or name == "sigmoid alone", (
        "neither groups nor bias decided anything: the test lost its point"
    )


def test_the_bias_has_no_gradient_and_weighs_nothing():
    cfg = ROUTERS["V3, every group, weights as they are"]
    router = filled(cfg)
    x = torch.randn(50, 7)
    routing = router(x)
    assert torch.equal(routing.weights_TK, routing.logits_TE.sigmoid().gather(1, routing.ids_TK.long()))
    assert dict(router.named_parameters()).keys() == {"weight"}
    routing.weights_TK.sum().backward()
    got = router.weight.grad.clone()
    router.weight.grad = None
    (router(x).logits_TE.sigmoid().gather(1, routing.ids_TK.long())).sum().backward()
    assert torch.equal(got, router.weight.grad)


@pytest.mark.parametrize(
    ("kw", "word"),
    [
        (
            dict(groups=3),
            r"--model\.moe\.groups=3: must divide --model\.moe\.experts=8; valid: \[1, 2, 4, 8\]",
        ),
        (dict(groups=4, top_groups=5), r"--model\.moe\.top-groups=5: must be 1 to --model\.moe\.groups=4"),
        (dict(groups=4, top_k=3), r"--model\.moe\.top-k=3: 1 groups of 2 experts hold only 2"),
        (
            dict(groups=8, top_groups=8, group_score="top2"),
            r"--model\.moe\.group-score=top2: needs two experts a group",
        ),
        (dict(softmax="after", score="sigmoid"), r"--model\.moe\.softmax=after: not with"),
        (dict(softmax="after", choice_bias=True), r"--model\.moe\.softmax=after: not with"),
        (dict(bias_speed=-1.0), r"--model\.moe\.bias-speed=-1\.0"),
        (dict(score="tanh"), r"--model\.moe\.score=tanh: must be one of softmax, sigmoid"),
    ],
)
def test_settings_are_checked(kw, word):
    with pytest.raises(ConfigError, match=word):
        MoEConfig(**kw)


# ---- balance ----


def test_sigmoid_scores_are_shares_in_the_balancing_loss():
    """DeepSeek-V3 (2024), eq. 17 to 19.

    Shares stay shares where every sigmoid is nearly zero, and z is computed from the logits.
    """
    torch.manual_seed(0)
    logits = torch.randn(24, 6)
    logits[:5] -= 100.0
    ids = logits.topk(2).indices.int()
    load = measure(Routing(torch.ones(24, 2), ids, logits), 1, None, "sigmoid")
    shares = logits.double().sigmoid() / logits.double().sigmoid().sum(-1, keepdim=True)
    torch.testing.assert_close(load.probs_BE[0].double(), shares.sum(0), rtol=1e-5, atol=1e-6)
    assert load.probs_BE.sum().item() == pytest.approx(24, rel=1e-6)
    torch.testing.assert_close(load.z_B[0], logits.logsumexp(-1).square().sum())
    cfg = MoEConfig(experts=6, top_k=2, balance_coeff=1.0, z_coeff=0.0, score="sigmoid")
    loss = Balancer(cfg).loss(stack([load]), None)
    assert loss.item() == pytest.approx(reference_loss(shares.log().float(), ids).item(), rel=1e-5)


def test_counts_stay_exact_beyond_what_fp32_counts():
    cfg = MoEConfig(experts=3, top_k=1)
    routing = Routing(torch.ones(4097, 1), torch.full((4097, 1), 1, dtype=torch.int32), torch.zeros(4097, 3))
    load = measure(routing, 1, None)
    balancer = Balancer(cfg)
    for _ in range(4200):  # 17.2 million pairs: 2^24 is 16.8
        balancer.record(stack([load]))
    assert balancer.read_log().counts_LE.tolist() == [[0, 4200 * 4097, 0]]


def test_an_expert_that_is_switched_off_leaves_the_entropy_a_number():
    logits = torch.tensor([[0.0, 0.0, float("-inf")]])
    load = measure(Routing(torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32), logits), 1, None)
    assert load.entropy_B.item() == pytest.approx(np.log(2))


def small(**kw) -> ModelConfig:
    moe = MoEConfig(
        experts=8, top_k=2, ffn_dim=16, shared_dim=16, groups=4, top_groups=2, bias_speed=0.02, **V3
    )
    mla = MLAConfig(q_rank=12, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=6)
    kw = dict(vocab=64, dim=32, layers=2, heads=2, attention="mla", mla=mla, moe=moe) | kw
    return ModelConfig(**kw)


def biases(model: Transformer) -> torch.Tensor:
    return torch.stack([block.moe.router.choice_bias for block in model.blocks if block.moe is not None])


def test_the_rule_counts_the_step_and_nothing_else():
    """Up for less than the mean load, down for more, unmoved at the mean.

    Micro-batches add up; padding and validation do not count.
    """
    torch.manual_seed(0)
    model = Transformer(small())
    tokens = torch.randint(64, (2, 4, 16))
    padding = torch.zeros(4, 16, dtype=torch.bool)
    padding[2:] = True
    model.eval()
    model(tokens[0], tokens[0])
    model.train()
    model.update_bias()
    assert not biases(model).any(), "validation trained the bias"
    counts = 0
    for batch, mask in zip(tokens, (None, padding), strict=True):
        model(batch, batch, padding_BS=mask).backward()
        _, load = model.hidden(batch, None, mask)
        counts = counts + load.counts_BE.sum(1)
    assert counts.sum(-1).tolist() == [2 * (64 + 32)] * 2
    model.balancer.routed_YE //= 2  # the second look at every batch, above, was recorded as well
    model.update_bias()
    assert torch.equal(biases(model), 0.02 * (counts.mean(-1, keepdim=True) - counts).sign())
    before = biases(model)
    for not_taken in (model.balancer.start_step, lambda: model.update_bias(torch.tensor(0.0))):
        model(tokens[0], tokens[0])
        not_taken()
        model.update_bias()
        assert torch.equal(biases(model), before)
    model.blocks[0].moe.router.update_bias(torch.full((8,), 7))
    assert torch.equal(biases(model), before), "at the mean load nothing moves"
    model.blocks[0].moe.router.update_bias(torch.tensor([1, 2, 3, 4, 5, 6, 7, 10**9], dtype=torch.int32))
    moved = biases(model)[0] - before[0]
    assert torch.equal(moved.sign(), torch.tensor([1.0] * 7 + [-1.0])), (
        "E loads of the fullest expert pass int32"
    )


def test_it_evens_the_load_out():
    """60 steps of the rule on frozen weights.

    The fullest expert goes from more than twice its share to within a fifth of it.
    """
    router = filled(MoEConfig(experts=16, top_k=2, score="sigmoid", choice_bias=True, bias_speed=0.01), 32)
    router.weight.data *= 0.1
    x = torch.randn(2048, 32) + 0.5
    violation = []
    for _ in range(60):
        counts = measure(router(x), 1, None).counts_BE[0]
        violation.append((counts.max() / counts.mean() - 1).item())
        router.update_bias(counts.long())
    assert violation[0] > 1 and violation[-1] < 0.2, violation[::20]


def test_it_stays_fp32_and_follows_the_device():
    with torch.device("meta"):
        model = Transformer(small())
    model.to_empty(device="cpu")
    model.init_weights(0)
    assert not biases(model).any()
    model.blocks[0].moe.router.choice_bias.fill_(0.501)
    model.bfloat16()
    assert model.blocks[0].moe.router.weight.dtype == torch.bfloat16
    assert biases(model).dtype == torch.float32 and biases(model)[0, 0] == torch.tensor(0.501)
    x = torch.randint(64, (2, 8))
    assert model(x, x).isfinite()


# ---- layouts, compile, checkpoints ----

STEPS, SEQUENCES, SEQ = 6, 8, 16


def train(rank: int, world: int, ep: int, micro: int, compile: bool = False):
    """As test_layouts.train, with the bias.

    Returns (losses, biases, parameters, graphs after two steps and after the last).
    """
    cfg = Config(
        compile=compile,
        model=small(),
        train=TrainConfig(seq=SEQ, dtype="fp32"),
        parallel=ParallelConfig(ep=ep),
        optim=OptimConfig(lr=3e-3, eps=1e-4),
    )
    with torch.device("meta"):
        model = Transformer(cfg.model)
    parallelize(model, build_mesh(ep=ep), cfg)
    model.to_empty(device="cpu")
    model.init_weights(0)
    optimizer = build_optimizer(model.named_parameters(), cfg.optim, torch.device("cpu"))
    draw = torch.Generator().manual_seed(1)
    losses, graphs = [], []
    totals = Totals(*(torch.tensor(float(n)) for n in (SEQUENCES * SEQ, SEQUENCES * SEQ, SEQUENCES)))
    for _ in range(STEPS):
        tokens = torch.randint(64, (SEQUENCES, SEQ), generator=draw)
        model.balancer.start_step()
        loss = torch.zeros(())
        per = SEQUENCES // world // micro
        for a in range(micro):
            model.set_requires_gradient_sync(a == micro - 1)
            mine = slice((a * world + rank) * per, (a * world + rank + 1) * per)
            part = model(tokens[mine], tokens.roll(-1, 1)[mine], totals=totals)
            part.backward()
            loss += part.detach()
        dist.all_reduce(loss)
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        model.update_bias()
        optimizer.zero_grad()
        losses.append(loss.item())
        graphs.append(counters["stats"]["unique_graphs"])
    return losses, biases(model), {name: p.full_tensor() for name, p in model.named_parameters()}, graphs


@pytest.fixture(scope="module")
def one_process(gloo):
    return gloo(1, train, 1, 1)[0]


def same(result, reference):
    torch.testing.assert_close(torch.tensor(result[0]), torch.tensor(reference[0]), rtol=1e-5, atol=0)
    assert torch.equal(result[1], reference[1]) and result[1].abs().amax() > 0.03
    for name, want in reference[2].items():
        assert (result[2][name] - want).norm() <= 1e-5 * want.norm(), name


@pytest.mark.parametrize(
    ("world", "ep", "micro"), slow_but([(1, 1, 4), (4, 2, 2)], [(1, 1, 4), (2, 1, 1), (4, 2, 2)])
)
def test_no_layout_changes_it(gloo, one_process, world, ep, micro):
    results = gloo(world, train, ep, micro)
    for result in results:
        assert torch.equal(result[1], one_process[1])
    same(results[0], one_process)


@pytest.mark.slow
def test_compiled(gloo, one_process):
    """Latent attention, groups and a bias that changes under the graph.

    Eager's numbers, and no new graph.
    """
    result = gloo(1, train, 1, 1, True)[0]
    same(result, one_process)
    assert result[3][0] == result[3][-1] == 1


FLAGS = """--model.attention mla --model.mla.kv-rank 8 --model.mla.nope-dim 8 --model.mla.rope-dim 4
    --model.mla.v-dim 8 --model.moe.score sigmoid --model.moe.choice-bias --model.moe.bias-speed 0.01
    --model.moe.groups 2 --optim.ema 0.9 --model.moe.top-groups 1 --model.moe.group-score top2
    --model.qk-norm none --train.batch 2""".split()


def test_a_run_keeps_it(gloo, tmp_path):
    """The straight run equals the resumed one, bit for bit.

    Other layouts load the same bits; offline tools carry the bias whole, in fp32.
    """
    flags = [*SMALL, *FLAGS, "--steps", "4", "--checkpoint.every", "2", "--checkpoint.keep", "0"]
    straight = gloo(2, run, [*flags, "--parallel.ep", "2", "--out", str(tmp_path / "a")])
    for rank in straight[1:]:
        assert_equal_state(rank, straight[0])
    step2, step4 = (str(tmp_path / f"a/checkpoints/step-{n}") for n in (2, 4))
    argv = [*flags, "--parallel.ep", "2", "--out", str(tmp_path / "b"), "--resume", step2]
    resumed = gloo(2, run, argv)[0]
    assert_equal_state(resumed, straight[0])
    assert numbers(tmp_path / "b", 2) == numbers(tmp_path / "a", 2)
    names = [name for name in straight[0] if BUFFERS.fullmatch(name)]
    assert names == [f"model.blocks.{i}.moe.router.choice_bias" for i in (0, 1)]
    assert any(straight[0][name].any() for name in names)

    offline(["reshard", step4, str(tmp_path / "half"), "--world", "3", "--dtype", "bf16"])
    offline(["average", step4, str(tmp_path / "ema"), "--ema"])
    for path in ("half", "ema"):
        found = read_manifest(tmp_path / path).tensors
        for name in names:
            assert dtype_of(found[name].dtype) == torch.float32 and found[name].placement == "replicated"
    argv = [*flags, "--out", str(tmp_path / "c"), "--init", str(tmp_path / "ema")]
    for rank in gloo(4, load, argv):
        assert all(torch.equal(rank[name], straight[0][name]) for name in names)


def test_a_layers_load_is_of_its_own_scores():
    moe = MoE(16, MoEConfig(experts=6, top_k=2, ffn_dim=8, score="sigmoid"))
    moe.router.weight.data.normal_()
    x_TD = torch.randn(9, 16)
    moe(x_TD)
    scores_TE = (x_TD @ moe.router.weight.T).sigmoid()
    want = (scores_TE / scores_TE.sum(-1, keepdim=True)).sum(0)
    torch.testing.assert_close(moe.load.probs_BE[0], want)


def test_sigmoids_that_are_all_zero():
    router = Router(4, MoEConfig(experts=6, top_k=2, score="sigmoid"))
    router.weight.data.fill_(-100.0)
    assert router(torch.ones(3, 4)).weights_TK.isfinite().all()


@pytest.mark.parametrize("training", [True, False])
def test_an_evaluation_between_micro_batches_changes_no_gradient(training):
    """No gradient of the global-batch loss, which adds up the counts of a step's micro-batches."""
    moe = MoEConfig(experts=8, top_k=2, ffn_dim=16, balance="global", balance_coeff=0.1)
    model = Transformer(ModelConfig(vocab=64, dim=32, layers=2, heads=2, kv_heads=1, head_dim=16, moe=moe))
    model.init_weights(0)
    tokens = torch.randint(64, (2, 2, 16))
    tokens[1] //= 8
    totals = Totals(*map(torch.tensor, (64.0, 64.0, 4.0)))
    grads = []
    for between in (False, True):
        model.zero_grad()
        model.balancer.start_step()
        for part in tokens:
            model(part, part.roll(-1, 1), totals=totals).backward()
            if between:
                model.train(training)
                with torch.no_grad():
                    model(part // 2, part.roll(-1, 1))
                model.train()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())
    assert model.balancer.seen_YE.sum() == 2 * 2 * tokens.numel()
