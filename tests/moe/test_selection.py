"""Selections: against one token or expert after the other in fp64, in layers, in graphs; properties.

next: tests/moe/test_quantile.py
"""

import warnings
from collections import Counter
from dataclasses import replace

import pytest
import router_policies as plain
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiers import slow_but
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tmoe.cli.parse import parse
from tmoe.config.check import ConfigError
from tmoe.config.compare import differences
from tmoe.config.model import ModelConfig, MoEConfig
from tmoe.config.routing_choices import SELECTIONS
from tmoe.config.run import Config, ParallelConfig, TrainConfig
from tmoe.model.parallelize import apply_ep
from tmoe.model.transformer import Transformer
from tmoe.moe.balance import Balancer, stack
from tmoe.moe.layer import MoE
from tmoe.moe.router import Router, without_identity
from tmoe.moe.select import selection
from tmoe.parallel import build_mesh

D = 8


def config(**kw) -> MoEConfig:
    return replace(MoEConfig(experts=8, top_k=2, ffn_dim=4, tile=4), **kw)


def layer(cfg: MoEConfig, dim: int = D) -> MoE:
    """A layer whose weights are as large as its inputs."""
    moe = MoE(dim, cfg, init=False)
    with torch.no_grad():
        for p in moe.parameters():
            p.normal_(0, 0.5)
        if moe.router.choice_bias is not None:
            moe.router.choice_bias.normal_(0, 0.1)
    return moe


def of_logits(cfg: MoEConfig) -> Router:
    """A router whose logits are its input."""
    router = Router(cfg.outputs, cfg)
    with torch.no_grad():
        router.weight.copy_(torch.eye(cfg.outputs))
    return router


def pairs(routing, t: int) -> dict[int, float]:
    """A token's experts and their weights."""
    found = zip(routing.ids_TK[t].tolist(), routing.weights_TK[t].tolist(), strict=True)
    found = [(e, w) for e, w in found if e >= 0]
    assert len({e for e, _ in found}) == len(found), "an expert twice"
    return dict(found)


def counts(routing, E: int) -> list[int]:
    return [int((routing.ids_TK == e).sum()) for e in range(E)]


# ---- expert choice ----


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize(("T", "K", "padded"), [(24, 2, False), (25, 3, True), (3, 1, True), (1, 2, False)])
def test_expert_choice_is_each_experts_best_tokens(score, T, K, padded):
    cfg = config(selection="expert-choice", score=score, top_k=K)
    torch.manual_seed(T)
    logits = 2 * torch.randn(T, 8)
    padding = torch.rand(T) < 0.3 if padded else None
    live = [True] * T if padding is None else (~padding).tolist()
    got = of_logits(cfg)(logits, padding)
    assert got.ids_TK.shape == (T, 8)
    for t, want in enumerate(plain.expert_choice(logits.tolist(), live, cfg)):
        assert pairs(got, t) == pytest.approx(want, rel=1e-5)
    capacity = -(-sum(live) * K // 8)
    assert counts(got, 8) == [capacity] * 8


def test_expert_choice_in_fewer_columns_keeps_a_tokens_best():
    logits = 2 * torch.randn(40, 8)
    every = of_logits(config(selection="expert-choice"))(logits)
    few = of_logits(config(selection="expert-choice", max_top_k=3))(logits)
    assert few.ids_TK.shape == (40, 3)
    scores = logits.softmax(-1)
    for t in range(40):
        chosen = [e for e in every.ids_TK[t].tolist() if e >= 0]
        best = sorted(chosen, key=lambda e: -scores[t, e].item())[:3]
        assert [e for e in few.ids_TK[t].tolist() if e >= 0] == best


def test_expert_choice_warns_where_tokens_must_not_see_later_ones(capsys):
    moe = config(selection="expert-choice")
    model = ModelConfig(vocab=16, dim=8, layers=1, heads=1, kv_heads=1, head_dim=8, moe=moe)
    with pytest.warns(UserWarning, match="selection=expert-choice: a token's experts depend on later tokens"):
        Transformer(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Transformer(replace(model, moe=config()))
        MoE(8, moe)  # the layer alone may be part of any model
    parse(["tiny", "--model.moe.selection", "expert-choice"], "")
    assert capsys.readouterr().err.count("note: --model.moe.selection=expert-choice: a token's experts") == 1


def test_columns_that_stay_open_cost_no_memory_of_pairs():
    """E columns hold T K pairs: that is what is allocated for, not T E."""
    rows, _ = layer(config(selection="expert-choice")).dispatcher.dispatch(
        torch.zeros(64, D), None_routing(64)
    )
    assert rows.pairs == 64 * 2 * 9 // 8
    assert layer(config()).dispatcher.dispatch(torch.zeros(64, D), None_routing(64))[0].pairs is None


def None_routing(T: int):
    return of_logits(config(selection="expert-choice"))(torch.zeros(T, 8))


# ---- token rounding ----


@pytest.mark.parametrize("how", ["nearest", "up", "down"])
@pytest.mark.parametrize("padded", [False, True])
def test_counts_are_rounded_to_tiles(how, padded):
    cfg = config(selection="tiles", tile_rounding=how)
    torch.manual_seed(0)
    logits = 2 * torch.randn(61, 8) + torch.randn(8)
    padding = torch.rand(61) < 0.3 if padded else None
    live = list(range(61)) if padding is None else (~padding).nonzero()[:, 0].tolist()
    got = of_logits(cfg).train()(logits, padding)
    before = [plain.best(row, 2) for row in logits.tolist()]
    loads = [sum(e in before[t] for t in live) for e in range(8)]
    want = plain.tile_counts(loads, len(live), 4, how)
    assert counts(got, 8) == want and all(n % 4 == 0 for n in want) and loads != want

    # an expert gives up the tokens for which it counts least, and takes those that want it most
    shares = logits.double().softmax(-1)
    share = [
        {e: shares[t, e].item() / sum(shares[t, i].item() for i in before[t]) for e in before[t]}
        for t in range(61)
    ]
    for e in range(8):
        chose = sorted((t for t in live if e in before[t]), key=lambda t: -share[t][e])
        others = sorted((t for t in live if e not in before[t]), key=lambda t: -shares[t, e].item())
        assert {t for t in live if e in pairs(got, t)} == set([*chose, *others][: want[e]])
    for t in live:
        chosen = list(pairs(got, t))
        if chosen:
            assert pairs(got, t) == pytest.approx(plain.weigh(logits[t].tolist(), chosen, cfg), rel=1e-5)


def test_evaluation_is_plain_top_k_for_tiles_and_sinkhorn():
    logits = torch.randn(30, 8)
    want = of_logits(config(renormalize=False)).eval()(logits)
    for name in ("tiles", "sinkhorn"):
        got = of_logits(config(selection=name, renormalize=False)).eval()(logits)
        assert torch.equal(got.ids_TK, want.ids_TK) and torch.equal(got.weights_TK, want.weights_TK)


def test_no_tile_is_larger_than_an_experts_share():
    words = (
        "--model.moe.selection tiles --model.moe.experts 8 --model.moe.top-k 2 --train.batch 4 --train.seq 64"
    )
    parse(["tiny", *words.split(), "--model.moe.tile", "64"], "")
    with pytest.raises(ConfigError, match=r"--model\.moe\.tile=128: an expert gets 64 of a rank's tokens on"):
        Config(model=ModelConfig(moe=config(selection="tiles", tile=128)), train=TrainConfig(batch=4, seq=64))


# ---- Sinkhorn ----


@pytest.mark.parametrize("K", [1, 2, 3])
def test_sinkhorn_chooses_by_the_plan_and_weighs_by_the_logits(K):
    """S-BASE: top-k of the plan; weights sigmoid for K=1, else softmax over all experts, of the logits."""
    torch.manual_seed(1)
    logits = 2 * torch.randn(48, 8) + torch.randn(8)
    got = of_logits(config(selection="sinkhorn", top_k=K, sinkhorn_iterations=64)).train()(logits)
    plan = logits.double().exp()
    for _ in range(2000):
        plan = plan / (48 * plan.sum(1, keepdim=True))
        plan = plan / (8 * plan.sum(0))
    assert got.ids_TK.tolist() == plan.topk(K).indices.tolist()
    scores = logits.sigmoid() if K == 1 else logits.softmax(-1)
    torch.testing.assert_close(got.weights_TK, scores.gather(1, got.ids_TK.long()))
    assert got.noted_TX.shape == (48, 1) and got.noted_TX.max() < 1e-3
    even = [n / (48 * K / 8) for n in counts(got, 8)]
    skewed = [n / (48 * K / 8) for n in Counter(logits.topk(K).indices.flatten().tolist()).values()]
    assert max(even) < max(skewed)


def test_sinkhorns_residual_is_in_the_load():
    moe = layer(config(selection="sinkhorn", sinkhorn_iterations=2))
    x, padding = torch.randn(3, 10, D), torch.rand(3, 10) < 0.3
    moe(x, padding)
    mean = moe.load.noted_BX.sum() / moe.load.tokens_B.sum()
    assert mean.item() == pytest.approx(
        moe.router(x.flatten(0, 1), padding.flatten()).noted_TX[0].item(), rel=1e-5
    )


def test_the_log_has_sinkhorns_residual():
    cfg = config(selection="sinkhorn", sinkhorn_iterations=2)
    moe, balancer = layer(cfg), Balancer(cfg)
    residuals = []
    for _ in range(2):  # of equal size, so that the mean over tokens is that of both
        x = torch.randn(30, D)
        moe(x)
        balancer.record(stack([moe.load]))
        balancer.loss(stack([moe.load]), None)
        residuals.append(moe.router(x).noted_TX[0].item())
    place = cfg.logged.index("residual")
    got = balancer.read_log().losses_LX[0, place].item()
    assert got == pytest.approx(sum(residuals) / 2, rel=1e-5) and got > 0
    assert config(selection="topk").logged == (*cfg.losses, "z")


def test_sinkhorn_trains_its_router_with_one_expert_a_token():
    moe = layer(config(selection="sinkhorn", top_k=1))
    assert not moe.router.cfg.untrained
    moe(torch.randn(20, D)).square().sum().backward()
    assert moe.router.weight.grad.abs().sum() > 0


# ---- ranks ----


LIMITS = (0, 2, 1)


def rows_that_arrive(rank: int, world: int) -> list[tuple[int, list[int]]]:
    """For each limit: rows that this rank receives, and how many ranks each of its tokens goes to."""
    found = []
    for most in LIMITS:
        torch.manual_seed(0)
        moe = layer(MoEConfig(experts=16, top_k=4, ffn_dim=4, top_devices=most))
        apply_ep(moe, build_mesh(ep=world), "nccl")
        x = torch.randn(world, 100, D)[rank]
        routing = moe.router(x)
        rows, _ = moe.dispatcher.dispatch(x, routing)
        ranks = [len({e // (16 // world) for e in ids}) for ids in routing.ids_TK.tolist()]
        found.append((len(rows.x_RD), ranks))
    return found


def test_device_limited_tokens_reach_few_ranks_and_fewer_rows_travel(gloo):
    """Of 4 ranks: at most M of them a token, so at most M rows of it."""
    arrived = {}
    for most, *results in zip(LIMITS, *gloo(4, rows_that_arrive), strict=True):
        arrived[most] = sum(rows for rows, _ in results)
        assert max(max(ranks) for _, ranks in results) == (most or 4)
        assert arrived[most] == sum(sum(ranks) for _, ranks in results)
    assert arrived[1] == 400 and arrived[2] <= 800 and arrived[0] > 1.3 * arrived[2]


@pytest.mark.parametrize("group_score", ["max", "top2", "top"])
def test_a_tokens_ranks_are_its_best_ones(group_score):
    cfg = MoEConfig(experts=16, top_k=4, ffn_dim=4, top_devices=2, group_score=group_score)
    router = of_logits(cfg)
    router.devices = 4
    logits = 2 * torch.randn(50, 16)
    got = router(logits)
    for t, row in enumerate(logits.tolist()):
        assert pairs(got, t) == pytest.approx(plain.top_k(row, cfg, devices=4), rel=1e-5)


def test_ranks_that_do_not_hold_enough_experts_are_refused():
    moe = MoEConfig(experts=8, top_k=4, ffn_dim=4, top_devices=1)
    with pytest.raises(
        ConfigError, match=r"--model\.moe\.top-k=4: --model\.moe\.top-devices=1 of --parallel\.ep=4"
    ):
        Config(model=ModelConfig(moe=moe), parallel=ParallelConfig(ep=4))
    Config(model=ModelConfig(moe=moe), parallel=ParallelConfig(ep=2))


# ---- identity experts ----


@pytest.mark.parametrize("name", [name for name in SELECTIONS if name != "sinkhorn"])
def test_identity_experts_return_the_token(name):
    """LongCat-Flash: y = sum over chosen experts of weight * expert(x), where some return x."""
    cfg = config(selection=name, identity_experts=4, top_k=3, shared_dim=3)
    moe = layer(cfg)
    x = torch.randn(40, D, requires_grad=True)
    y = moe(x)
    routing = moe.router(x)
    every = layer(config(top_k=12, experts=12, shared_dim=3))
    want = moe.shared(x)
    gate_up, down = moe.experts.gate_up, moe.experts.down
    for t in range(40):
        for e, w in pairs(routing, t).items():
            gate, up = (gate_up[e] @ x[t]).chunk(2) if e < 8 else (None, None)
            out = x[t] if e >= 8 else down[e] @ (torch.nn.functional.silu(gate) * up)
            want = want + torch.nn.functional.pad((w * out)[None], (0, 0, t, 39 - t))
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    assert len(every.experts.gate_up) == 12 and len(gate_up) == 8 and moe.router.weight.shape == (12, D)
    grads = torch.autograd.grad(y.square().sum(), [x, moe.router.weight, gate_up])
    wants = torch.autograd.grad(
        want.square().sum(), [x, moe.router.weight, gate_up], allow_unused=True
    )  # weights were read as numbers: x alone, through the experts and past them
    torch.testing.assert_close(grads[2], wants[2], rtol=1e-3, atol=1e-4)
    assert moe.load.counts_BE.shape == (1, 12) and moe.load.counts_BE[0, 8:].sum() > 0


def spread(rank: int, world: int) -> tuple[int, int, list[str]]:
    """With identity experts: rows that arrive, those wanted; which selections differ from ep=1."""
    torch.manual_seed(0)
    x, padding = torch.randn(world, 2, 25, D)[rank], (torch.rand(world, 2, 25) < 0.2)[rank]
    wrong = []
    for name in SELECTIONS:
        results = []
        for ranks in (1, world):
            torch.manual_seed(1)
            moe = layer(config(selection=name, identity_experts=3, shared_dim=3))
            if ranks > 1:
                apply_ep(moe, build_mesh(ep=world), "nccl")
            leaf = x.clone().requires_grad_()
            y = moe(leaf, padding)
            y.square().sum().backward()
            results.append((y.detach(), leaf.grad, moe.router.weight.grad, moe.load.counts_BE))
        close = [torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*results, strict=True)]
        wrong += [] if all(close) else [name]

    torch.manual_seed(0)
    moe = layer(MoEConfig(experts=4, identity_experts=12, top_k=2, ffn_dim=4))
    apply_ep(moe, build_mesh(ep=world), "nccl")
    routing = moe.router(x.flatten(0, 1))
    rows, _ = moe.dispatcher.dispatch(x.flatten(0, 1), without_identity(routing, moe.router.cfg)[0])
    return len(rows.x_RD), sum(len({e // 2 for e in ids if e < 4}) for ids in routing.ids_TK.tolist()), wrong


def test_ranks_compute_what_one_process_does_and_identity_experts_cost_no_exchange(gloo):
    results = gloo(2, spread)
    assert [wrong for *_, wrong in results] == [[], []]
    assert sum(rows for rows, *_ in results) == sum(wanted for _, wanted, _ in results) < 2 * 100 * 0.6


def test_the_choice_bias_leaves_identity_experts_alone():
    router = of_logits(config(choice_bias=True, identity_experts=2))
    router.update_bias(torch.tensor([9, 1, 5, 5, 5, 5, 5, 5, 9, 1]))
    want = torch.tensor([-1.0, 1.0, 0, 0, 0, 0, 0, 0, 0, 0]) * 0.001
    torch.testing.assert_close(router.choice_bias, want)


# ---- forced routings ----


@pytest.mark.parametrize("name", ["topk", "quantile", "sinkhorn"])
@pytest.mark.parametrize(("E", "K"), [(8, 2), (12, 5), (64, 8)])
def test_forced_even_loads(name, E, K):
    cfg = config(selection=name, experts=E, top_k=K, force="even")
    padding = torch.rand(100) < 0.25
    got = of_logits(cfg)(5 * torch.randn(100, E), padding)
    loads = counts(got, E)
    assert max(loads) - min(loads) <= (1 if name != "sinkhorn" else 100)
    assert all(len(set(row)) == K for row in got.ids_TK[~padding].tolist())


def test_forced_skew_is_the_same_on_every_rank_and_as_uneven_as_asked():
    loads = {}
    for skew in (0.0, 1.0, 2.0):
        router = of_logits(config(experts=16, force="skew", force_skew=skew))
        loads[skew] = counts(router(torch.zeros(4000, 16)), 16)
        again = counts(router(torch.zeros(4000, 16)), 16)
        assert max(abs(a - b) for a, b in zip(loads[skew], again, strict=True)) < 150
    assert max(loads[0.0]) < 600 < 0.8 * max(loads[1.0]) < 0.8 * max(loads[2.0])


@pytest.mark.parametrize("force", ["even", "skew"])
def test_forced_logits_pass_their_gradient_on(force):
    logits = torch.randn(20, 8, requires_grad=True)
    got = of_logits(config(force=force))(logits)
    values = got.logits_TE.detach().requires_grad_()
    want = values.softmax(-1).gather(1, got.ids_TK.long())
    want = want / want.sum(-1, keepdim=True)
    c = torch.randn(20, 2)
    (gradient,) = torch.autograd.grad((got.weights_TK * c).sum(), logits)
    (wanted,) = torch.autograd.grad((want * c).sum(), values)
    torch.testing.assert_close(gradient, wanted)
    assert gradient.abs().sum() > 0


# ---- replay ----


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_recorded_choice_is_replayed_with_live_weights(name):
    cfg = config(selection=name, top_k=3)
    router = layer(cfg).router
    x = torch.randn(30, D)
    recorded = router(x)
    same = router(x, ids=recorded.ids_TK)
    assert torch.equal(same.ids_TK, recorded.ids_TK)
    torch.testing.assert_close(same.weights_TK, recorded.weights_TK, rtol=1e-5, atol=1e-7)
    other = torch.randn(30, D, requires_grad=True)
    live = router(other, ids=recorded.ids_TK)
    assert torch.equal(live.ids_TK, recorded.ids_TK)
    own = SELECTIONS[name].weighs
    for t, row in enumerate(live.logits_TE.tolist()):
        chosen = [e for e in recorded.ids_TK[t].tolist() if e >= 0]
        want = plain.weigh(row, chosen, replace(cfg, selection="topk", renormalize=not own)) if chosen else {}
        assert pairs(live, t) == pytest.approx(want, rel=1e-5)
    (gradient,) = torch.autograd.grad(live.weights_TK.square().sum(), other)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_layer_replays_and_recomputes_with_given_ids(name):
    """`moe(x, ids=...)`: the same output and gradients as the recorded call, under a checkpoint too."""
    moe = layer(config(selection=name, identity_experts=2))
    x, padding = torch.randn(2, 12, D), torch.rand(2, 12) < 0.2
    ids = moe.router(x.flatten(0, 1), padding.flatten()).ids_TK.view(2, 12, -1)
    calls = [
        lambda x: moe(x, padding),
        lambda x: moe(x, padding, ids=ids),
        lambda x: checkpoint(lambda x: moe(x, padding, ids=ids), x, use_reentrant=False),
    ]
    results = []
    for call in calls:
        leaf = x.clone().requires_grad_()
        moe.zero_grad()
        y = call(leaf)
        y.square().sum().backward()
        results.append((y.detach(), leaf.grad, moe.router.weight.grad.clone(), moe.load.counts_BE))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"ids: got shape .*, valid is \[2, 12, K\]"):
        moe(x, ids=ids.flatten(0, 1))


def test_replayed_ids_may_lack_experts_and_be_as_many_as_one_likes():
    router = of_logits(config())
    logits = torch.tensor([[0.0, 1, 2, 3, 4, 5, 6, 7]]).repeat(3, 1)
    ids = torch.tensor([[7, 6, 5], [7, -1, -1], [-1, -1, -1]])
    got = router(logits, torch.tensor([False, False, True]), ids=ids.short())
    assert got.ids_TK.tolist() == ids.tolist() and got.ids_TK.dtype == torch.int32
    assert got.weights_TK.isfinite().all() and got.weights_TK[1].tolist() == [1, 0, 0]
    assert got.weights_TK[2].tolist() == [0, 0, 0]
    for bad in (ids.float(), ids[:2], ids[0], ids > 0, [[1, 2]] * 3):
        with pytest.raises(ValueError, match=r"ids: got .*, valid is whole numbers"):
            router(logits, ids=bad)


def recomputed(part, x: torch.Tensor) -> None:
    """Forward and backward of a checkpointed part, which runs twice, to its end."""
    with set_checkpoint_early_stop(False):
        checkpoint(part, x, use_reentrant=False).square().sum().backward()


def test_replayed_ids_hold_in_recomputation_too():
    """The same ids in the forward and in the recomputed one, which are not what the router would choose."""
    router = layer(config()).router
    x = torch.randn(10, D, requires_grad=True)
    ids = router(x).ids_TK.flip(0)
    seen = []

    def part(x):
        routing = router(x, ids=ids)
        seen.append(routing.ids_TK)
        return routing.weights_TK

    recomputed(part, x)
    assert len(seen) == 2 and torch.equal(seen[0], seen[1]) and torch.equal(seen[0], ids)


@pytest.mark.parametrize("name", SELECTIONS)
def test_recomputation_chooses_the_same(name):
    """With noise, jitter and dropped-out columns: the generators are wound back."""
    router = layer(config(selection=name, noise=1.0, jitter=0.1)).router
    x = torch.randn(30, D, requires_grad=True)
    seen = []

    def part(x):
        routing = router(x)
        seen.append((routing.ids_TK, routing.weights_TK.detach()))
        return routing.weights_TK

    recomputed(part, x)
    (ids, weights), (ids2, weights2) = seen
    assert torch.equal(ids, ids2) and torch.equal(weights, weights2)


# ---- one graph ----

GRAPHS = [
    *(dict(selection=name) for name in SELECTIONS),
    dict(selection="tiles", identity_experts=3, score="sigmoid", choice_bias=True),
    dict(score="cosine", cosine_dim=4, noise=1.0, jitter=0.1),
    dict(score="sqrtsoftplus", groups=4, top_groups=2, group_score="top", router_dtype="fp64"),
    dict(force="even"),
    dict(force="skew"),
]


@pytest.mark.parametrize("kw", slow_but([GRAPHS[1]], GRAPHS), ids=str)
def test_trap_data_dependent_shapes(kw):
    """Every policy is one graph, forward and backward, and no routing recompiles it or asks the host."""
    torch._dynamo.reset()
    moe = layer(config(**kw))
    route = torch.compile(moe.route, fullgraph=True, backend="aot_eager", dynamic=False)
    for i in range(3):
        x = (1 + 3 * i) * torch.randn(2, 16, D)
        padding = torch.rand(2, 16) < 0.2 * i
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            torch.manual_seed(i)
            y, load = moe.experts(route, x, padding)
            y.square().sum().backward()
        if not moe.router.cfg.noise and moe.router.cfg.force != "skew":  # draws differ between graphs
            want, other = moe.experts(moe.route, x, padding)
            torch.testing.assert_close(y, want)
            torch.testing.assert_close(load.counts_BE, other.counts_BE)


# ---- properties ----

POLICIES = st.fixed_dictionaries(
    dict(
        selection=st.sampled_from(list(SELECTIONS)),
        top_k=st.integers(1, 6),
        renormalize=st.booleans(),
        identity_experts=st.sampled_from([0, 3]),
        scaling=st.sampled_from([1.0, 2.5]),
    )
)


def has_ties(moe: MoE, tokens: int) -> bool:
    """Whether the choice hangs on rounding: Sinkhorn's plan for few tokens gives all experts the same."""
    return moe.router.cfg.selection == "sinkhorn" and tokens < 2 * moe.router.cfg.outputs


@settings(max_examples=25, deadline=None)
@given(kw=POLICIES, T=st.integers(1, 40), seed=st.integers(0, 1000))
def test_permuting_tokens_permutes_outputs(kw, T, seed):
    torch.manual_seed(seed)
    moe = layer(config(**kw))
    x = torch.randn(T, D)
    order = torch.randperm(T)
    assume(not has_ties(moe, T))
    y = moe(x)
    load = moe.load
    torch.testing.assert_close(moe(x[order]), y[order], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moe.load.counts_BE, load.counts_BE)


@settings(max_examples=25, deadline=None)
@given(kw=POLICIES, T=st.integers(1, 40), seed=st.integers(0, 1000))
def test_trap_padding_masks_of_opposite_sign(kw, T, seed):
    """True is padding, everywhere: it gets 0, changes nothing, and counts nowhere."""
    torch.manual_seed(seed)
    moe = layer(config(**kw))
    padding = torch.rand(1, T) < 0.4
    x = torch.randn(1, T, D)
    y = moe(x, padding)
    load = moe.load
    assert not y[padding].any()
    moe(x.where(~padding[..., None], 100 * torch.randn(1, T, D)), padding)
    for a, b in zip(load, moe.load, strict=True):
        assert a is None or torch.equal(a, b)
    if padding.all() or has_ties(moe, int((~padding).sum())):
        return
    torch.testing.assert_close(moe(x[~padding]), y[~padding], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moe.load.counts_BE, load.counts_BE)


@settings(max_examples=25, deadline=None)
@given(kw=POLICIES, T=st.integers(1, 40), seed=st.integers(0, 1000))
def test_trap_the_losses_map_is_the_dispatched_one(kw, T, seed):
    """Megatron's auxiliary loss ignores bias and groups: here its counts are those of the ids that travel."""
    torch.manual_seed(seed)
    moe = layer(config(**kw))
    x, padding = torch.randn(1, T, D), torch.rand(1, T) < 0.3
    moe(x, padding)
    routing = moe.router(x[0], padding[0])
    assert moe.load.counts_BE[0].tolist() == counts(routing, moe.router.cfg.outputs)
    name, K, E = kw["selection"], kw["top_k"], moe.router.cfg.outputs
    live = int((~padding).sum())
    if name == "expert-choice":
        assert moe.load.counts_BE[0].tolist() == [-(-live * K // E)] * E
    elif name != "tiles":
        assert moe.load.counts_BE.sum() == live * K


@pytest.mark.parametrize("kw", [dict(groups=4, top_groups=1), dict(choice_bias=True)], ids=str)
def test_trap_aux_map_ignoring_groups_and_bias(kw):
    cfg = config(**kw)
    moe = layer(cfg)
    if cfg.choice_bias:
        moe.router.choice_bias.copy_(torch.tensor([9.0, 9, 0, 0, 0, 0, 0, 0]))
    x = torch.randn(50, D)
    moe(x)
    plain_ids = moe.router(x).logits_TE.topk(2).indices
    ids = moe.router(x).ids_TK
    assert moe.load.counts_BE[0].tolist() == [int((ids == e).sum()) for e in range(8)]
    assert moe.load.counts_BE[0].tolist() != [int((plain_ids == e).sum()) for e in range(8)]


@pytest.mark.parametrize("name", ["expert-choice", "tiles"])
def test_trap_tie_order(name):
    """Of equal tokens the first are taken, on every machine: a stable sort, no top-k over tokens."""
    cfg = config(selection=name, top_k=1, experts=2, tile=4, tile_rounding="down", renormalize=False)
    got = of_logits(cfg).train()(torch.tensor([[1.0, 0.0]]).repeat(10, 1))
    taken = [t for t in range(10) if 0 in pairs(got, t)]
    assert taken == list(range(5 if name == "expert-choice" else 8))


def test_trap_bias_frozen_by_padding():
    """Padding counts nowhere, so the bias moves by the loads of real tokens, and moves at all."""
    cfg = config(choice_bias=True, top_k=1, experts=2, renormalize=False)
    moe = MoE(2, cfg)
    with torch.no_grad():
        moe.router.weight.copy_(torch.eye(2))
    x = torch.tensor([[[1.0, 0.0]] * 3 + [[0.0, 1.0]] * 3])  # three each, but for padding
    moe(x, torch.tensor([[False] * 3 + [True] * 3]))
    moe.router.update_bias(moe.load.counts_BE.sum(0))
    torch.testing.assert_close(moe.router.choice_bias, torch.tensor([-0.001, 0.001]))


# ---- settings ----

CLASHES = [
    (dict(selection="best"), "--model.moe.selection=best: must be one of topk, sinkhorn, quantile, "),
    (
        dict(selection="sinkhorn", score="sigmoid"),
        "--model.moe.selection=sinkhorn: has its own weights; not",
    ),
    (
        dict(selection="sinkhorn", softmax="after"),
        "--model.moe.selection=sinkhorn: has its own weights; not",
    ),
    (
        dict(selection="sinkhorn", choice_bias=True),
        "--model.moe.selection=sinkhorn: not with --model.moe.choice",
    ),
    (
        dict(selection="quantile", choice_bias=True),
        "--model.moe.selection=quantile: not with --model.moe.choice",
    ),
    (
        dict(selection="expert-choice", groups=2),
        "--model.moe.selection=expert-choice: not with --model.moe.groups",
    ),
    (
        dict(selection="quantile", top_devices=1),
        "--model.moe.selection=quantile: not with --model.moe.top-devices",
    ),
    (
        dict(selection="quantile", top_k=8),
        "--model.moe.selection=quantile: --model.moe.top-k=8 must be below --m",
    ),
    (dict(groups=4, top_groups=2, top_devices=1), "--model.moe.top-devices=1: not with --model.moe.groups=4"),
    (dict(max_top_k=4), "--model.moe.max-top-k=4: only for --model.moe.selection expert-choice or tiles"),
    (
        dict(selection="tiles", max_top_k=1),
        "--model.moe.max-top-k=1: must be --model.moe.top-k=2 to --model.moe.exp",
    ),
    (
        dict(selection="tiles", max_top_k=9),
        "--model.moe.max-top-k=9: must be --model.moe.top-k=2 to --model.moe.exp",
    ),
    (dict(tile=0), "--model.moe.tile=0: must be at least 1"),
    (dict(sinkhorn_iterations=0), "--model.moe.sinkhorn-iterations=0: must be at least 1"),
    (
        dict(sinkhorn_iterations=5000),
        "--model.moe.sinkhorn-iterations=5000: must be at least 1 and at most 4096",
    ),
    (dict(quantile_ema=1.0), "--model.moe.quantile-ema=1.0: must be at least 0 and below 1"),
    (dict(identity_experts=-1), "--model.moe.identity-experts=-1: must be at least 0"),
    (dict(top_k=9), "--model.moe.top-k=9: must be 1 to --model.moe.experts=8"),
    (
        dict(top_k=11, identity_experts=2),
        "--model.moe.top-k=11: must be 1 to --model.moe.experts=8 + --model.",
    ),
    (dict(force="balance"), "--model.moe.force=balance: must be one of none, even, skew"),
]


@pytest.mark.parametrize(("kw", "words"), CLASHES, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_what_does_not_go_together_is_one_error_that_names_flags(kw, words):
    with pytest.raises(ConfigError) as error:
        config(**kw)
    assert str(error.value).startswith(words) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("name", SELECTIONS)
def test_what_only_training_selects_is_the_model_of_plain_top_k(name):
    """So it is exported as one, and its weights start one; other selections are other models."""
    shape = dict(vocab=16, dim=8, layers=1, heads=1, kv_heads=1, head_dim=8)
    one, other = (ModelConfig(**shape, moe=config(selection=s, renormalize=False)) for s in (name, "topk"))
    same = not differences(one, other)
    assert same == (name in ("topk", "tiles", "sinkhorn"))
    x = torch.randn(40, 8)
    routers = [of_logits(model.moe).eval() for model in (one, other)]
    assert not same or torch.equal(*(router(x).ids_TK for router in routers))


def test_every_line_of_the_table_has_its_file():
    for name in SELECTIONS:
        assert selection.selection(name).__name__ == "choose"
