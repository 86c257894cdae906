"""Capacity: which pairs full experts drop, by hand and by a plain twin; what drops cost; the traps of others.

next: tests/moe/test_padded.py
"""

import json
import math
from dataclasses import replace

import forked
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import slow_but
from tiny_models import MODEL, SEQ
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from tmoe.config.check import ConfigError
from tmoe.config.model import MoEConfig
from tmoe.config.run import Config, ParallelConfig, TrainConfig
from tmoe.model.transformer import Transformer
from tmoe.moe.balance import Balancer, measure, stack
from tmoe.moe.layer import MoE
from tmoe.moe.router import Routing
from tmoe.moe.select.capacity import capacity, limited
from tmoe.ops import softmax_topk
from tmoe.ops.experts import cpu
from tmoe.parallel import build_mesh, parallelize

FIXED = [[1.0, 2.0, 0.0, -1.0], [0.5, 0.0, 1.5, 1.0], [2.0, 1.9, -1.0, 0.0], [0.0, 0.0, 3.0, 1.0]]
DROPS = ("probs", "position", "choice", "priority")
BASE = MoEConfig(experts=4, top_k=2, ffn_dim=5)


def routed(logits: Tensor, top_k: int = 2) -> Routing:
    return Routing(*softmax_topk(logits, top_k, False), logits)


def bounded(routing: Routing, factor: float, drop: str, **kw) -> Routing:
    cfg = replace(BASE, experts=routing.logits_TE.shape[1], capacity_factor=factor, drop=drop, **kw)
    return limited(routing, capacity(*routing.ids_TK.shape, cfg), cfg)


def kept_by(routing: Routing) -> dict[int, set[int]]:
    """The tokens of each expert."""
    found: dict[int, set[int]] = {}
    for t, row in enumerate(routing.ids_TK.tolist()):
        for e in row:
            if e >= 0:
                found.setdefault(e, set()).add(t)
    return found


def twin(weights, ids, logits, most: int, drop: str) -> list[list[int]]:
    """Experts fill up one pair after the other. The order is a sort by plain tuples."""
    T, K = len(ids), len(ids[0])
    best = [max(row) - math.log(sum(math.exp(v) for v in row)) for row in logits]
    key = dict(
        probs=lambda t, k: (-weights[t][k], t),
        position=lambda t, k: (t,),
        choice=lambda t, k: (k, t),
        priority=lambda t, k: (k, -best[t], t),
    )[drop]
    left = [row[:] for row in ids]
    seen: dict[int, int] = {}
    for t, k in sorted(((t, k) for t in range(T) for k in range(K) if ids[t][k] >= 0), key=lambda p: key(*p)):
        seen[ids[t][k]] = seen.get(ids[t][k], 0) + 1
        if seen[ids[t][k]] > most:
            left[t][k] = -1
    return left


def test_fixed_values():
    """What Megatron-Core keeps of these logits, and what its counts become."""
    routing = routed(torch.tensor(FIXED))
    by_weight = kept_by(bounded(routing, 0.5, "probs"))
    assert by_weight == {1: {0}, 3: {1}, 0: {2}, 2: {3}}
    assert kept_by(bounded(routing, 0.5, "position")) == {0: {0}, 1: {0}, 2: {1}, 3: {1}}

    ids = torch.tensor([[0, 1], [0, 1], [0, 2], [0, 2]], dtype=torch.int32)  # counts 4, 2, 2, 0
    weights = torch.full((4, 2), 0.5)
    left = bounded(Routing(weights, ids, torch.zeros(4, 4)), 1.0, "probs")
    assert torch.bincount(left.ids_TK[left.ids_TK >= 0], minlength=4).tolist() == [2, 2, 2, 0]


def test_first_choices_come_before_second_ones():
    """Tutel: token 3's first choice is expert 2, which token 1 wants too and token 0 does not."""
    routing = routed(torch.tensor(FIXED))
    # first choices: 1, 2, 0, 2; of two tokens for expert 2 the first, or the one with the better score
    assert bounded(routing, 0.5, "choice").ids_TK.tolist() == [[1, -1], [2, 3], [0, -1], [-1, -1]]
    assert bounded(routing, 0.5, "priority").ids_TK.tolist() == [[1, -1], [-1, -1], [0, -1], [2, 3]]


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "factor", "megatron", "tutel"),
    [
        (4, 2, 4, 0.5, 1, 0),
        (10, 2, 4, 1.0, 5, 6),  # 5, 2 int(3)
        (10, 2, 4, 1.25, 7, 6),  # ceil(6.25), 2 int(3.75)
        (10, 2, 4, -1.25, 7, 6),
        (10, 2, 4, 0.0, 10, 10),
        (10, 2, 4, 9.0, 10, 10),  # an expert gets a token once
        (1, 8, 64, 1.0, 1, 1),  # 1; 8 int(1), and there is one token
        (0, 2, 4, 1.0, 0, 0),
        (4096, 8, 64, 1.1, 564, 560),  # ceil(563.2), 8 int(70.4)
    ],
)
def test_rounding(tokens, top_k, experts, factor, megatron, tutel):
    cfg = replace(BASE, experts=experts, top_k=top_k, capacity_factor=factor)
    assert capacity(tokens, top_k, cfg) == megatron
    assert capacity(tokens, top_k, replace(cfg, rounding="tutel")) == tutel


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    tokens=st.integers(0, 24),
    top_k=st.integers(1, 4),
    most=st.integers(0, 12),
    drop=st.sampled_from(DROPS),
    ties=st.booleans(),
)
def test_equals_the_twin(seed, tokens, top_k, most, drop, ties):
    """With many equal weights, and with padding, as well.

    Equal tokens have equal scores in every bit. Rounded logits have not: a row and the same row plus 1 tie in
    exact numbers alone.
    """
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, 5, generator=draw, dtype=torch.float64)
    logits = logits[torch.randint(max(1, tokens // 3), (tokens,), generator=draw)] if ties else logits
    routing = routed(logits, top_k)
    hidden = torch.rand(tokens, generator=draw) < 0.2
    routing = routing._replace(ids_TK=routing.ids_TK.masked_fill(hidden[:, None], -1))
    cfg = replace(BASE, experts=5, drop=drop)
    left = limited(routing, torch.tensor(most), cfg)
    if tokens:
        want = twin(*(t.tolist() for t in routing[:3]), most, drop)
        assert left.ids_TK.tolist() == want
        whole = limited(routing, most, cfg)  # from T on nothing is done
        assert whole.ids_TK.tolist() == want
    counts = torch.bincount(left.ids_TK[left.ids_TK >= 0].flatten(), minlength=5)
    before = torch.bincount(routing.ids_TK[routing.ids_TK >= 0].flatten(), minlength=5)
    assert counts.tolist() == before.clamp(max=most).tolist()
    assert left.weights_TK is routing.weights_TK


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), most=st.integers(1, 6), drop=st.sampled_from(DROPS))
def test_padding_and_order_change_nothing(seed, most, drop):
    """Padding anywhere leaves the others' drops; by weight, permuting tokens permutes them."""
    draw = torch.Generator().manual_seed(seed)
    routing, cfg = routed(torch.randn(12, 4, generator=draw)), replace(BASE, drop=drop)
    left = limited(routing, most, cfg).ids_TK
    at = torch.randperm(17, generator=draw)[:12].sort().values
    wide = Routing(torch.rand(17, 2), torch.full((17, 2), -1, dtype=torch.int32), torch.randn(17, 4))
    for mine, theirs in zip(wide, routing[:3], strict=False):
        mine[at] = theirs
    assert torch.equal(limited(wide, most, cfg).ids_TK[at], left)
    if drop == "probs":
        mixed = torch.randperm(12, generator=draw)
        moved = Routing(*(t[mixed] for t in routing[:3]))
        assert torch.equal(limited(moved, most, cfg).ids_TK, left[mixed])


# ---- the layer ----


def layer(seed: int = 0, dim: int = 6, **kw) -> MoE:
    torch.manual_seed(seed)
    moe = MoE(dim, replace(BASE, **kw))
    moe.router.weight.data.mul_(30)  # uneven
    return moe


def by_hand(moe: MoE, x_TD: Tensor, most: int, top_k: int) -> Tensor:
    """The layer in fp64, pair by pair."""
    cfg = moe.router.cfg
    gate_up, down = moe.experts.gate_up.double(), moe.experts.down.double()
    logits = x_TD.double() @ moe.router.weight.double().T
    weights, ids = logits.softmax(-1).topk(top_k, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    left = twin(weights.tolist(), ids.tolist(), logits.tolist(), most, cfg.drop)
    rows = []
    for t, x in enumerate(x_TD.double()):
        y = torch.zeros_like(x)
        for k, e in enumerate(left[t]):
            if e >= 0:
                gate, up = (gate_up[e] @ x).chunk(2)
                y = y + weights[t, k] * (down[e] @ (torch.nn.functional.silu(gate) * up))
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("drop", DROPS)
def test_layer_equals_fp64_twin(drop, pad):
    """Output and gradients, and the calls that change k and the factor."""
    moe = layer(drop=drop, pad=pad, capacity_factor=0.75)
    x = torch.randn(3, 5, 6)
    for top_k, factor in ((None, None), (3, None), (1, 2.0), (None, 0.0), (2, -0.5)):
        k = top_k or 2
        most = capacity(15, k, moe.router.cfg, factor)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        y = moe(ours, top_k=top_k, capacity_factor=factor)
        want = by_hand(moe, theirs.flatten(0, 1), most, k).view_as(x)
        torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-6)
        dy = torch.randn(x.shape)
        params = [ours, *moe.parameters()], [theirs, *moe.parameters()]
        for ours_d, theirs_d in zip(
            torch.autograd.grad(y, params[0], dy),
            torch.autograd.grad(want, params[1], dy.double()),
            strict=True,
        ):
            torch.testing.assert_close(ours_d, theirs_d.to(ours_d.dtype), rtol=1e-3, atol=2e-6)


def test_a_call_leaves_the_layer_as_it_was():
    moe, x = layer(capacity_factor=0.5), torch.randn(4, 6)
    before = moe(x)
    moe(x, top_k=1, capacity_factor=3.0)
    assert torch.equal(moe(x), before)


def test_drops_are_counted():
    """Routed pairs count before drops, drops by expert and sequence; both add up to what is multiplied."""
    moe, x = layer(capacity_factor=0.5), torch.randn(2, 16, 6)
    done = products(lambda: moe(x))
    load = moe.load
    assert load.counts_BE.sum() == 2 * 16 * 2
    taken = (load.counts_BE - load.dropped_BE).sum(0)
    assert taken.tolist() == load.counts_BE.sum(0).clamp(max=8).tolist() and load.dropped_BE.sum() > 0
    assert done == taken.sum()
    balancer = Balancer(moe.router.cfg)
    balancer.record(stack([load]))
    assert balancer.read_log().dropped_L.tolist() == [load.dropped_BE.sum().item()]


def products(call) -> int:
    """How many pairs the CPU's path multiplies."""
    done, forward = [], cpu.moe_mlp_forward

    def counting(x, experts, weights, order, ends, h):
        done.append(order.numel())
        return forward(x, experts, weights, order, ends, h)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "moe_mlp_forward", counting)
        call()
    return sum(done)


def test_a_call_of_a_layer_says_what_is_wrong():
    moe, x = layer(groups=2, top_groups=1), torch.randn(4, 6)
    for bad in (0, 3, 2.0, True):
        with pytest.raises(ValueError, match=r"top_k: got .*, valid is a whole number from 1 to 2"):
            moe(x, top_k=bad)
    for bad in ("1", math.inf, math.nan):
        with pytest.raises(ValueError, match=r"capacity_factor: got .*, valid is a finite number"):
            moe(x, capacity_factor=bad)
    with pytest.raises(ConfigError, match=r"--model.moe.pad: needs --model.moe.capacity-factor"):
        MoEConfig(pad=True)
    with pytest.raises(ConfigError, match=r"--model.moe.capacity-factor=inf: must be finite"):
        MoEConfig(capacity_factor=math.inf)
    with pytest.raises(ConfigError, match=r"--model.moe.drop=last: must be one of probs, position"):
        MoEConfig(drop="last")


# ---- traps that others fell into ----


@pytest.mark.parametrize("drop", DROPS)
def test_trap_tie_order_dependent_drops(drop):
    """Equal weights and scores: the first tokens stay, on every machine."""
    routing = routed(torch.zeros(64, 4)[:, :1].expand(64, 4).clone())
    routing = routing._replace(ids_TK=torch.tensor([0, 1], dtype=torch.int32).expand(64, 2).clone())
    left = bounded(routing, 0.5, drop).ids_TK
    assert (left[:16] == torch.tensor([0, 1])).all() and (left[16:] == -1).all()


@pytest.mark.parametrize("pad", [False, True])
def test_trap_bias_frozen_by_padding(pad):
    """Counts behind the drop are the same for full experts; the bias still follows the load before it."""
    moe = layer(capacity_factor=0.25, pad=pad, choice_bias=True)
    moe(torch.randn(40, 6))
    counts_E = moe.load.counts_BE[0]
    assert len(set((counts_E - moe.load.dropped_BE[0]).tolist())) == 1, "not all experts are full"
    moe.router.update_bias(counts_E)
    want = 0.001 * (counts_E.mean() - counts_E).sign()
    torch.testing.assert_close(moe.router.choice_bias, want)
    assert moe.router.choice_bias.abs().sum() > 0


@pytest.mark.parametrize("pad", [False, True])
def test_trap_capacity_above_t_with_padding_sends_all_tokens(pad):
    moe, x = layer(capacity_factor=50.0, pad=pad), torch.randn(9, 6)
    assert products(lambda: moe(x)) == 9 * 2
    assert moe.load.dropped_BE.sum() == 0
    torch.testing.assert_close(moe(x), layer()(x))


@pytest.mark.parametrize("factor", [0.0, 0.5, -0.5])
@pytest.mark.parametrize("pad", [False, True])
def test_trap_data_dependent_shapes(factor, pad):
    """No size needs a value: the whole layer is traced with tensors that have none. (The host reads none.)"""
    with FakeTensorMode():
        moe = MoE(6, replace(BASE, capacity_factor=factor, pad=pad), init=False)
        y = moe(torch.randn(3, 8, 6))
        moe(torch.randn(3, 8, 6), top_k=1, capacity_factor=1.0)
        assert y.shape == (3, 8, 6)


def graphs_of(moe: MoE, whole: bool) -> tuple[MoE, list]:
    """The layer with `route` or the whole of it compiled, and a list to which each graph is added."""
    graphs = []

    def count(gm, inputs):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    if whole:
        return torch.compile(moe, fullgraph=True, backend=count), graphs
    moe.route = torch.compile(moe.route, fullgraph=True, backend=count)
    return moe, graphs


@pytest.mark.parametrize(
    ("whole", "pad"), slow_but([(False, False)], [(False, False), (True, False), (False, True)])
)
def test_one_graph_for_each_k(whole, pad):
    """Each k compiles once. So does the factor: as a tensor at once, as a symbol when it changes first."""
    moe, graphs = graphs_of(layer(capacity_factor=1.0, pad=pad), whole)
    eager, x = layer(capacity_factor=1.0, pad=pad), torch.randn(2, 8, 6)
    for k in (2, 1, 3):
        torch.testing.assert_close(
            moe(x, top_k=k, capacity_factor=0.5), eager(x, top_k=k, capacity_factor=0.5)
        )
    first = len(graphs)
    assert first == 3
    for factor in (0.25, 1.0, -0.75, 0.6):
        for k in (2, 3, 1):
            call = dict(top_k=k, capacity_factor=factor)
            torch.testing.assert_close(moe(x * factor, **call), eager(x * factor, **call))
    if not whole and not pad:
        assert len(graphs) == first
    assert len(graphs) <= 3 * first


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.slow
def test_compiled_layer_has_eager_gradients(padded):
    """By inductor, with capacity from the settings."""
    x, dy = torch.randn(2, 8, 6), torch.randn(2, 8, 6)
    found = []
    for compiled in (False, True):
        moe = layer(capacity_factor=0.75, drop="priority", pad=padded)
        if compiled:
            moe.route = torch.compile(moe.route, fullgraph=True, dynamic=False)
        leaf = x.clone().requires_grad_()
        y = moe(leaf)
        y.backward(dy)
        found.append([y.detach(), leaf.grad, *(p.grad for p in moe.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_load_counts_what_was_chosen():
    """`measure` with a routing after drops: counts of before, drops of the difference."""
    routing = routed(torch.tensor(FIXED))
    load = measure(routing, 2, None, taken=bounded(routing, 0.5, "position"))
    assert load.counts_BE.tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]
    assert load.dropped_BE.tolist() == [[0, 0, 0, 0], [1, 1, 1, 1]]


# ---- a model ----


def model_of(compiled: bool, pad: bool, ep: int) -> Transformer:
    moe = replace(MODEL.moe, capacity_factor=0.75, drop="priority", pad=pad)
    cfg = Config(
        compile=compiled,
        model=replace(MODEL, moe=moe),
        train=TrainConfig(seq=SEQ, dtype="fp32"),
        parallel=ParallelConfig(ep=ep),
    )
    mesh = build_mesh(ep=ep)
    with torch.device("meta"):
        net = Transformer(cfg.model)
    parallelize(net, mesh, cfg)
    net.to_empty(device="cpu")
    net.init_weights(0)
    return net


def compiled_and_eager(rank: int, world: int, pad: bool) -> list:
    """Losses and gradients of both, drops, and how many graphs five routings took."""
    draw = torch.Generator().manual_seed(rank)
    tokens = torch.randint(MODEL.vocab, (5, 2, SEQ), generator=draw)
    found = []
    for compiled in (False, True):
        net = model_of(compiled, pad, world)
        graphs = []
        for part in tokens:
            loss = net(part, part.roll(-1, 1))
            loss.backward()
            graphs.append(counters["stats"]["unique_graphs"])
        grads = {name: p.grad.full_tensor() for name, p in net.named_parameters()}
        found.append((loss.detach(), grads, net.read_log().dropped_L, graphs))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("world", "pad"), [(1, False), (2, False), (2, True)])
def test_compiled_model(gloo, world, pad):
    for (want, grads, drops, _), (got, ours, our_drops, graphs) in gloo(world, compiled_and_eager, pad):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        for name, grad in grads.items():
            assert (ours[name] - grad).norm() <= 1e-5 * grad.norm().clamp(min=1e-6), name
        assert drops.min() > 0 and torch.equal(drops, our_drops)
        assert len(set(graphs)) == 1, "a routing compiled anew"


@pytest.mark.slow
def test_flags_of_a_run(tmp_path):
    """Two steps from the command line: drops are in the run's log."""
    flags = dict(drop="position", rounding="tutel").items()
    settings = ["--model.moe.capacity-factor", "-0.5", "--model.moe.pad"]
    settings += [word for name, value in flags for word in (f"--model.moe.{name}", value)]
    words = ["train.py", "tiny", "--steps", "2", "--no-compile", "--out", str(tmp_path), *settings]
    done = forked.run(words)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any(min(line.get("dropped") or [0]) > 0 for line in lines), lines[-1]
