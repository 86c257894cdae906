"""Balancing losses one by one: closed formulas, Tutel's functions, layouts, and traps that others fell into.

next: tests/moe/test_balancing_loss.py
"""

import copy
import math
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from router_references import reference_loss
from tiers import slow_but
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import tmoe
from tmoe.cli.parse import parse
from tmoe.config.check import ConfigError
from tmoe.config.compare import build_config
from tmoe.config.model import MoEConfig
from tmoe.config.presets import presets
from tmoe.moe.balance import Balancer, Load, Totals, measure, stack
from tmoe.moe.exchange.dispatch import LocalDispatcher
from tmoe.moe.losses import LOSSES
from tmoe.moe.router import Router, Routing

# FEATURES, section 3
FIXED = torch.tensor([[1.0, 2, 0, -1], [0.5, 0, 1.5, 1], [2, 1.9, -1, 0], [0, 0, 3, 1]])
ALL = ("sequence:0.3", "batch:0.2", "global:0.1", "gshard:0.4", "importance:0.5")


def config(*balance: str, **kw) -> MoEConfig:
    return MoEConfig(**dict(experts=4, top_k=2, ffn_dim=4, z_coeff=0.0, noise=0.5) | kw, balance=balance)


def routed(logits_TE: Tensor, cfg: MoEConfig, padding_T: Tensor | None = None, noise: bool = True) -> Routing:
    """A routing by these logits, with the noise of the config: always the same draw."""
    draw = torch.Generator().manual_seed(5)
    noise_TE = torch.randn(logits_TE.shape, generator=draw, dtype=torch.float64).to(logits_TE.dtype)
    noisy_TE = logits_TE + cfg.noise / cfg.experts * noise_TE * noise
    ids_TK = noisy_TE.detach().topk(cfg.top_k).indices.int()
    if padding_T is not None:
        ids_TK = ids_TK.masked_fill(padding_T[:, None], -1)
    return Routing(torch.ones(ids_TK.shape), ids_TK, noisy_TE, logits_TE)


def loss_of(cfg: MoEConfig, routing: Routing, sequences: int = 1, padding_T: Tensor | None = None) -> Tensor:
    return Balancer(cfg).loss(stack([measure(routing, sequences, padding_T, cfg.score, cfg=cfg)]), None)


# ---- settings ----


def test_a_list_with_coefficients_on_the_command_line():
    for words, losses in (
        ("sequence --model.moe.balance-coeff 0.03", {"sequence": 0.03}),
        ("sequence:0.01 global:0.001", {"sequence": 0.01, "global": 0.001}),
        ("sequence:0.01 batch --model.moe.balance-coeff 0.2", {"sequence": 0.01, "batch": 0.2}),
        ("none", {}),
        ("gshard:0", {"gshard": 0.0}),
    ):
        cfg = parse(f"tiny --dry-run --model.moe.balance {words}".split(), "")
        assert cfg.model.moe.losses == losses


def test_what_runs_have_written_stays_valid():
    """One loss is a bare name next to balance_coeff, when read and when written."""
    settings = dict(balance="global", balance_coeff=0.02)
    old = build_config(dict(moe=settings)).moe
    assert old.losses == {"global": 0.02} and asdict(old).items() >= settings.items()
    for spelling in ("global:0.02", ["global:0.02"], ("global:0.02",)):
        assert build_config(dict(moe=dict(balance=spelling))).moe == old
    both = build_config(dict(moe=dict(balance=["sequence:0.1", "global"]))).moe
    assert (
        both.balance == ("sequence:0.1", "global")
        and replace(both, balance_coeff=3.0).losses["global"] == 3.0
    )
    assert all(list(cfg.model.moe.losses) == ["sequence"] for cfg in presets().values())


@pytest.mark.parametrize(
    ("balance", "says"),
    [
        ("even", "balance=even: must be NAME or NAME:COEFFICIENT.*gshard"),
        ("sequence:x", "balance=sequence:x: the coefficient must be a number, at least 0"),
        ("sequence:-1", "balance=sequence:-1: the coefficient"),
        ("sequence:inf", "balance=sequence:inf: the coefficient"),
        (("batch:1", "batch:2"), "batch is given twice"),
        (("none", "batch"), "none must be the only name"),
        ((), "must be NAME"),
        (("importance", "importance-tutel"), "not both importance and importance-tutel"),
    ],
)
def test_lists_that_say_nothing_are_refused(balance, says):
    with pytest.raises(ConfigError, match=says):
        MoEConfig(balance=balance, noise=1.0)


def test_importance_needs_noise():
    with pytest.raises(ConfigError, match=r"--model\.moe\.balance=importance: needs --model\.moe\.noise"):
        MoEConfig(balance="importance")


# ---- values ----


def test_fixed_values():
    """aux at coefficient 1 is 1.0, z is 7.2472."""
    cfg = config("batch:1", noise=0.0)
    assert loss_of(cfg, routed(FIXED, cfg)).item() == pytest.approx(1.0, abs=5e-5)
    cfg = config("none", z_coeff=1.0)
    assert loss_of(cfg, routed(FIXED, cfg, noise=False)).item() == pytest.approx(7.2472, abs=5e-5)


def tutel(clean_TE: Tensor, noisy_TE: Tensor, ids_TK: Tensor, noise: float, of_scores: bool = True) -> Tensor:
    """Tutel's load_importance_loss (its formula), with the router's logits instead of scores if asked."""
    E = clean_TE.shape[1]
    scores_TE = clean_TE.softmax(1)
    last_T1 = noisy_TE.gather(1, ids_TK.long())[:, -1:]
    normal = torch.distributions.Normal(torch.zeros(1).to(clean_TE), torch.full((1,), noise / E).to(clean_TE))
    load_E = normal.cdf((scores_TE if of_scores else clean_TE) - last_T1).sum(0)
    return sum(v.var() / (v.mean() ** 2 + 1e-10) for v in (scores_TE.sum(0), load_E)) / 2


@pytest.mark.parametrize("name", ["importance", "importance-tutel"])
def test_importance_and_load_are_tutels(name):
    cfg = config(f"{name}:0.7", experts=6, top_k=3)
    logits = torch.randn(20, 6, dtype=torch.float64, requires_grad=True)
    routing = routed(logits, cfg)
    want = 0.7 * tutel(logits, routing.logits_TE, routing.ids_TK, 0.5, name == "importance-tutel")
    got = loss_of(cfg, routing, 4)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(v, logits, retain_graph=True)[0] for v in (got, want)]
    torch.testing.assert_close(*grads)


def test_gshard_counts_the_first_choice_alone():
    """E sum mean(score) mean(top-1 mask), as in Tutel; with one choice it is Switch's loss."""
    cfg = config("gshard:1", experts=6, top_k=3)
    logits = torch.randn(20, 6, dtype=torch.float64)
    routing = routed(logits, cfg)
    scores = routing.logits_TE.softmax(1)
    mask = nn.functional.one_hot(scores.argmax(1), 6).double()
    torch.testing.assert_close(loss_of(cfg, routing), 6 * (scores.mean(0) * mask.mean(0)).sum())
    cfg = config("gshard:1", top_k=1)
    routing = routed(FIXED, cfg)
    torch.testing.assert_close(loss_of(cfg, routing), loss_of(config("batch:1", top_k=1), routing))


def test_a_list_is_the_sum_of_its_losses():
    logits = torch.randn(12, 4, dtype=torch.float64)
    routing = routed(logits, config(*ALL))
    each = sum(loss_of(config(one), routing, 3) for one in ALL)
    torch.testing.assert_close(loss_of(config(*ALL), routing, 3), each)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gradcheck(score):
    cfg = config(*ALL, score=score, z_coeff=0.1)
    padding = torch.arange(12) % 5 == 1
    logits = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)
    ids = routed(logits, cfg, padding)

    def loss(x):
        routing = routed(x, cfg, padding)._replace(ids_TK=ids.ids_TK)
        return loss_of(cfg, routing, 3, padding)

    assert torch.autograd.gradcheck(loss, logits)


def test_one_expert_is_always_even():
    cfg = config(*ALL, experts=1, top_k=1)
    logits = torch.randn(6, 1, dtype=torch.float64, requires_grad=True)
    loss = loss_of(cfg, routed(logits, cfg), 2)
    assert loss.item() == pytest.approx(0.3 + 0.2 + 0.1 + 0.4)
    assert torch.equal(torch.autograd.grad(loss, logits)[0], torch.zeros(6, 1).double())


# ---- properties ----


@st.composite
def cases(draw):
    """Logits of B sequences of S tokens, padding, K."""
    B, S, E = (draw(st.integers(1, top)) for top in (3, 5, 6))
    seed = draw(st.integers(0, 2**31))
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(B * S, E, generator=g, dtype=torch.float64) * draw(st.sampled_from([0.1, 1.0, 8.0]))
    return logits, torch.rand(B * S, generator=g) < 0.3, B, draw(st.integers(1, E)), seed


@settings(max_examples=40, deadline=None)
@given(cases())
def test_properties_of_every_loss(case):
    """Counts add up, padding changes nothing, the order of tokens and of experts neither."""
    logits, padding, B, K, seed = case
    cfg = config(*ALL, experts=logits.shape[1], top_k=K)
    routing = routed(logits, cfg, padding)
    load = measure(routing, B, padding, cfg=cfg)
    assert load.counts_BE.sum() == K * (~padding).sum() and load.dropped_BE.sum() == 0
    assert torch.equal(load.choices_B, load.counts_BE.sum(1)) and load.first_BE.sum() == (~padding).sum()
    want = loss_of(cfg, routing, B, padding)

    garbage = routing._replace(
        logits_TE=torch.where(padding[:, None], 1e3 * torch.ones_like(logits), routing.logits_TE),
        clean_TE=torch.where(padding[:, None], -1e3 * torch.ones_like(logits), logits),
    )
    torch.testing.assert_close(loss_of(cfg, garbage, B, padding), want)

    g = torch.Generator().manual_seed(seed)
    S = len(logits) // B
    order = torch.cat([b * S + torch.randperm(S, generator=g) for b in torch.randperm(B, generator=g)])
    shuffled = Routing(*(t[order] for t in routing[:4]))
    torch.testing.assert_close(loss_of(cfg, shuffled, B, padding[order]), want)

    new = torch.randperm(logits.shape[1], generator=g)  # expert e becomes new[e]
    ids = torch.where(routing.ids_TK < 0, -1, new[routing.ids_TK.long()].int())
    back = new.argsort()
    renamed = Routing(routing.weights_TK, ids, routing.logits_TE[:, back], logits[:, back])
    torch.testing.assert_close(loss_of(cfg, renamed, B, padding), want)


# ---- layouts and micro-batches ----

D, ROWS, S = 6, 16, 5


class Two(nn.Module):
    """Two layers, one after the other."""

    def __init__(self, cfg: MoEConfig):
        super().__init__()
        self.first, self.second = tmoe.MoE(D, cfg), tmoe.MoE(D, cfg)

    def forward(self, x, padding):
        return self.second(x + self.first(x, padding), padding)


def made(cfg: MoEConfig) -> tuple[Two, Tensor, Tensor]:
    torch.manual_seed(3)
    model = Two(cfg)
    for moe in model.first, model.second:
        moe.router.weight.data.mul_(20)  # uneven
    return model, torch.randn(ROWS, S, D), torch.rand(ROWS, S) < 0.2


def trained(rank: int, world: int, ep: int, micros: int, balance: tuple[str, ...]) -> tuple[float, Tensor]:
    """The step's loss and a router's gradient: rows spread over ranks, then over micro-batches."""
    model, x, padding = made(config(*balance, noise=0.0, z_coeff=0.01))
    model = tmoe.parallel.parallelize(model, tmoe.parallel.build_mesh(ep=ep))
    total = torch.zeros(())
    counts = ((~padding).sum(), torch.tensor(float(ROWS)))
    for i, rows in enumerate(torch.arange(ROWS).chunk(micros)):
        mine = rows.chunk(world)[rank]
        model.set_requires_gradient_sync(i + 1 == micros)
        y = model(x[mine], padding[mine])
        share = tmoe.balancing_loss(model, *counts)
        (share + 0 * y.sum()).backward()
        total += share.detach()
    dist.all_reduce(total)
    return total.item(), model.first.router.weight.grad.full_tensor()


@pytest.mark.parametrize(
    ("world", "ep", "micros", "balance"),
    slow_but(
        [(4, 2, 2, ("sequence:0.3",)), (2, 2, 1, ("sequence:0.3", "global:0.2"))],
        [(world, min(world, 2), micros, ("sequence:0.3",)) for world in (1, 2, 4) for micros in (1, 2, 4)]
        + [(world, world, 1, ("sequence:0.3", "global:0.2")) for world in (2, 4)],
    ),
)
def test_no_layout_and_no_micro_batch_changes_a_list(gloo, world, ep, micros, balance):
    model, x, padding = made(config(*balance, noise=0.0, z_coeff=0.01))
    model(x, padding)
    want = tmoe.balancing_loss(model)
    want.backward()
    for loss, grad in gloo(world, trained, ep, micros, balance):
        assert loss == pytest.approx(want.item(), rel=1e-5)
        torch.testing.assert_close(grad, model.first.router.weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["batch", "gshard", "importance", "importance-tutel"])
def test_what_is_of_a_micro_batch_weighs_them_by_tokens(name):
    """The step's loss is the mean over ranks and micro-batches, by tokens: what their help says."""
    cfg = config(f"{name}:1")
    logits, padding = torch.randn(12, 4), torch.arange(12) % 5 == 1
    parts = [(logits[:3], padding[:3], 1), (logits[3:], padding[3:], 3)]
    loads = [stack([measure(routed(x, cfg, p), n, p, cfg=cfg)]) for x, p, n in parts]
    tokens = torch.stack([load.tokens_B.sum() for load in loads])
    totals = Totals(tokens.sum(), tokens.sum(), torch.tensor(4.0))
    got = sum(Balancer(cfg).loss(load, totals) for load in loads)
    alone = torch.stack([Balancer(cfg).loss(load, None) for load in loads])
    torch.testing.assert_close(got, (alone * tokens).sum() / tokens.sum())


@pytest.mark.parametrize("packed", [False, True])
def test_no_part_of_a_load_is_a_view(packed):
    """A block returns the load. An in-place op on a view removes FSDP2's hook, so FSDP2 warns of views."""
    names = set(LOSSES) - {"importance-tutel"}  # not next to importance
    cfg = config(*(f"{name}:1" for name in sorted(names)), z_coeff=0.1)
    logits = torch.randn(12, 4, requires_grad=True)
    members = torch.ones(2, 6, 3) if packed else None
    load = measure(routed(logits, cfg), 2, None, cfg=cfg, members_BSN=members)
    trained = {name for name, t in load._asdict().items() if t is not None and t.requires_grad}
    assert {name for name in trained if getattr(load, name)._base is not None} == set()
    assert ("probs_NE" in trained) == packed and {"probs_BE", "z_B", "smooth_BE"} <= trained


class SumsWithoutOnes(torch.fx.Interpreter):
    """Runs a graph with sums that lack their dimensions of size 1, as some kernels of torch 2.11 do."""

    def call_function(self, target, args, kwargs):
        result = super().call_function(target, args, kwargs)
        return result.squeeze() if target is torch.ops.aten.sum.dim_IntList else result


@pytest.mark.parametrize("sequences", [1, 2])
def test_a_compiled_load_keeps_its_shapes_where_sums_lose_ones(sequences):
    """Compiled by torch 2.11, a load of one sequence of 65,536 tokens and 128 experts had the shape [128]."""
    names = sorted(set(LOSSES) - {"importance-tutel"})
    cfg = config(*(f"{name}:1" for name in names), z_coeff=0.1)
    routing = routed(torch.randn(12, 4, requires_grad=True), cfg)
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(SumsWithoutOnes(graph).run))
    compiled = torch.compile(measure, backend=backend, fullgraph=True)(routing, sequences, None, cfg=cfg)
    want = measure(routing, sequences, None, cfg=cfg)
    for name, t in want._asdict().items():
        if t is not None:
            torch.testing.assert_close(getattr(compiled, name), t)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", list(LOSSES))
def test_ranks_that_divide_a_sequence_add_up_to_it(name, packed):
    """Values and gradients of the parts add up to those of whole sequences, under tp and cp too."""
    cfg = config(f"{name}:1", z_coeff=0.1)
    documents = torch.tensor([[0, 0, 0, 0, 1, 2], [0, 0, 1, 1, 1, 1]])  # the third sequence is one of padding
    members = (documents[..., None] == torch.arange(3)).float() if packed else None
    logits = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)
    padding = torch.arange(12) % 5 == 1
    routing = routed(logits, cfg, padding)
    if members is not None:
        members *= ~padding.view(2, 6, 1)
    whole = measure(routing, 2, padding, cfg=cfg, members_BSN=members)
    halves = [torch.arange(12).view(2, 6)[:, half].flatten() for half in (slice(0, 3), slice(3, 6))]
    shared = [None if members is None else members.flatten(0, 1)[own].view(2, 3, 3) for own in halves]
    loads = [
        stack([measure(Routing(*(t[own] for t in routing[:4])), 2, padding[own], cfg=cfg, members_BSN=part)])
        for own, part in zip(halves, shared, strict=True)
    ]
    tokens = whole.tokens_B.sum()
    totals = Totals(tokens, tokens, torch.tensor(5.0 if packed else 2.0))

    def summed(sent: list[Tensor]) -> Tensor:
        return sum(sent)

    shares = []
    for rank, load in enumerate(loads):
        balancer = Balancer(cfg)
        balancer.all_reduce = lambda _: whole.counts_BE.sum(0)[None]
        other = loads[1 - rank]

        def over_parts(own, other=other):
            # what the other rank sends at the same call, found by making its sums the same way
            caught = []
            twin = Balancer(cfg)
            twin.over_parts = lambda t: caught.append(t) or t
            twin._of_whole_sequences(other)
            return summed([own, *caught])

        balancer.over_parts = over_parts
        shares.append(balancer.loss(load, totals))
    want = loss_of(cfg, routing, 2, padding)
    if packed and name == "sequence":  # each sequence alone, and the z loss of all
        parts = [
            (documents[row] == i).nonzero()[:, 0] + 6 * row
            for row, some in enumerate((range(3), range(2)))
            for i in some
        ]
        alone = [
            loss_of(config("sequence:1"), Routing(*(t[at] for t in routing[:4])), 1, padding[at])
            for at in parts
        ]
        want = want - loss_of(config("sequence:1"), routing, 2, padding) + sum(alone) / 5
    torch.testing.assert_close(sum(shares), want)
    grads = [torch.autograd.grad(v, logits, retain_graph=True)[0] for v in (sum(shares), want)]
    torch.testing.assert_close(*grads)


# ---- traps that others fell into ----


def test_trap_the_losss_map_ignores_groups_and_bias():
    """Megatron #2767: counts must be of what is dispatched, not of the plain top-k of the scores."""
    cfg = config("batch:1", "gshard:1", groups=2, top_groups=1, choice_bias=True, noise=0.0)
    moe = tmoe.MoE(D, cfg)
    moe.router.weight.data.mul_(20)
    moe.router.choice_bias.copy_(torch.tensor([0.0, 0.0, 0.6, 0.6]))
    sent = []

    class Seen(LocalDispatcher):
        def __call__(self, x_TD, routing, experts):
            sent.append(routing.ids_TK)
            return super().__call__(x_TD, routing, experts)

    moe.dispatcher = Seen()
    x = torch.randn(30, D)
    moe(x)
    (ids,) = sent
    plain = moe.router(x).logits_TE.topk(2).indices
    assert (plain.sort().values != ids.sort().values).any()  # the test can see the difference
    assert torch.equal(moe.load.counts_BE[0], ids.flatten().bincount(minlength=4).float())
    assert torch.equal(moe.load.first_BE[0], ids[:, 0].bincount(minlength=4).float())


def test_trap_padding_to_capacity_freezes_the_bias():
    """Megatron (router.py:835): after dropping and padding all counts are equal; its bias never moves."""
    cfg = config("none", choice_bias=True, noise=0.0)
    ids = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 3]], dtype=torch.int32)
    routing = Routing(torch.ones(4, 2), ids, torch.zeros(4, 4))
    kept = ids.clone()
    kept[2:, 0] = -1  # room for two tokens an expert
    load = measure(routing, 1, None, taken=routing._replace(ids_TK=kept), cfg=cfg)
    assert load.counts_BE.tolist() == [[4, 2, 1, 1]] and load.dropped_BE.tolist() == [[2, 0, 0, 0]]
    balancer = Balancer(cfg)
    balancer.record(stack([load]))
    router = Router(D, cfg)
    balancer.update_bias([router])
    assert router.choice_bias.tolist() == pytest.approx([-0.001, 0.0, 0.001, 0.001])
    stats = balancer.read_log([router])
    assert stats.counts_LE.tolist() == [[4, 2, 1, 1]] and stats.dropped_LE.tolist() == [[2, 0, 0, 0]]
    assert stats.dropped_L.tolist() == [2] and stats.bias_LE[0].tolist() == router.choice_bias.tolist()


def shares_of_global(rank: int, world: int) -> tuple[float, Tensor]:
    return trained(rank, world, 1, 1, ("global:1",))


def test_trap_the_global_loss_is_divided_by_dp(gloo):
    """Megatron #3672: on two data-parallel ranks the gradient is that of one process, not half of it."""
    model, x, padding = made(config("global:1", noise=0.0, z_coeff=0.01))
    model(x, padding)
    tmoe.balancing_loss(model).backward()
    want = model.first.router.weight.grad
    for _, grad in gloo(2, shares_of_global):
        assert (grad.norm() / want.norm()).item() == pytest.approx(1.0, rel=1e-4)


def test_trap_padding_masks_of_opposite_sign():
    """True is left out, in the router, the sums, the layer and the model (Megatron's helpers disagree)."""
    padding = torch.tensor([False, True, False, True])
    cfg = config("batch:1", noise=0.0)
    moe = tmoe.MoE(D, cfg)
    x = torch.randn(4, D)
    routing = moe.router(x, padding)
    assert ((routing.ids_TK < 0).all(1) == padding).all()
    load = measure(routing, 1, padding, cfg=cfg)
    assert load.tokens_B.item() == 2 and load.counts_BE.sum().item() == 4
    y = moe(x, padding)
    assert torch.equal((y == 0).all(1), padding) and moe.load.tokens_B.item() == 2

    model = tmoe.Transformer(replace(presets()["tiny"].model, layers=1))
    tokens = torch.randint(256, (1, 4))
    model(tokens, tokens, padding_BS=padding[None])
    assert model.balancer.log.tokens_L.tolist() == [2]


def test_trap_softmax_of_a_softmax():
    """Hugging Face's loss took its softmax of scores that were one already (transformers #28255)."""
    cfg = config("batch:1", noise=0.0)
    router = Router(D, cfg)
    nn.init.normal_(router.weight, 1.0)
    routing = router(torch.randn(40, D) + 0.3)
    right = reference_loss(routing.logits_TE, routing.ids_TK)
    wrong = reference_loss(routing.logits_TE.softmax(-1), routing.ids_TK)
    assert loss_of(cfg, routing).item() == pytest.approx(right.item(), rel=1e-5)
    assert abs(right - wrong).item() > 1e-2


def test_the_bias_follows_softmax_scores_too_and_stays_fp32():
    """Each step is bias_speed, in fp32 whatever the model's type (Megatron #1482, #1971)."""
    cfg = config("none", score="softmax", choice_bias=True, bias_speed=0.001, noise=0.0)
    moe = tmoe.MoE(D, cfg).bfloat16()
    moe.router.weight.data.mul_(50)
    balancer = Balancer(cfg)
    for step in range(1, 4):
        moe(torch.randn(64, D, dtype=torch.bfloat16))
        counts_E = moe.load.counts_BE.sum(0)
        before = moe.router.choice_bias.clone()
        balancer.start_step()
        balancer.record(stack([moe.load]))
        balancer.update_bias([moe.router])
        moved = moe.router.choice_bias - before
        assert moe.router.choice_bias.dtype == torch.float32
        torch.testing.assert_close(moved, 0.001 * (counts_E.mean() - counts_E).sign())
        assert moe.router.choice_bias.abs().max() <= 0.001 * step + 1e-7


# ---- the log ----


def test_losses_of_the_log_are_means_over_its_steps():
    """Without coefficients, over micro-batches summed; an evaluation in between counts nowhere."""
    cfg = config("sequence:0.3", "gshard:0.1", noise=0.0, z_coeff=0.2)
    balancer = Balancer(cfg)
    want = torch.zeros(1, 3, dtype=torch.float64)
    steps = [[torch.randn(6, 4) for _ in range(2)] for _ in range(3)]
    for step in steps:
        balancer.start_step()
        totals = Totals(*map(torch.tensor, (12.0, 12.0, 4.0)))
        whole = routed(torch.cat(step), cfg)
        want[0, 0] += loss_of(config("sequence:1"), whole, 4)
        for logits in step:
            load = stack([measure(routed(logits, cfg), 2, None, cfg=cfg)])
            balancer.record(load)
            balancer.loss(load, totals)
            want[0, 1] += loss_of(config("gshard:1"), routed(logits, cfg)) / 2
            with torch.no_grad():
                balancer.loss(load, totals)
        want[0, 2] += loss_of(config("none", z_coeff=1.0), whole)
    torch.testing.assert_close(balancer.read_log().losses_LX, want / 3, rtol=1e-5, atol=0)
    balancer.record(load)
    assert balancer.read_log().losses_LX.tolist() == [[0, 0, 0]]


def test_nothing_waits_for_the_host(monkeypatch):
    """A step without a log line reads no tensor: on a GPU each would be a sync."""
    cfg = config(*ALL, choice_bias=True)
    balancer = Balancer(cfg)
    load = stack([measure(routed(torch.randn(12, 4), cfg), 3, None, cfg=cfg)])
    totals = Totals(*map(torch.tensor, (12.0, 12.0, 3.0)))
    router = Router(D, cfg)

    def read(*_):
        raise AssertionError("a tensor was read")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, name, read)
    for _ in range(2):
        balancer.start_step()
        balancer.record(load)
        balancer.loss(load, totals)
        balancer.update_bias([router])


def test_a_load_survives_a_copy():
    moe = tmoe.MoE(D, config(*ALL))
    moe(torch.randn(2, 3, D))
    assert isinstance(moe.load, Load) and copy.deepcopy(moe).load is None
    assert math.isfinite(tmoe.balancing_loss(moe).item())
