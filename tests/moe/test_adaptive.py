"""adaptive_r: weights travel or tokens do, experts are divided or not; outputs and gradients are the same.

next: tests/moe/test_padded.py
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tiers import slow_but

from tmoe.config.check import ConfigError
from tmoe.config.model import MoEConfig
from tmoe.config.run import ParallelConfig
from tmoe.moe.exchange.adaptive import MACHINES, LayerCost, Machine
from tmoe.moe.experts import LocalExperts
from tmoe.moe.layer import MoE
from tmoe.parallel import build_mesh, parallelize

D, E, K = 6, 4, 2
BASE = MoEConfig(experts=E, top_k=K, ffn_dim=8, shared_dim=4)


def built(kw: dict) -> MoE:
    torch.manual_seed(0)
    moe = MoE(D, replace(BASE, **kw))
    moe.router.weight.data.mul_(30)  # uneven
    return moe


def ways_of(axes: dict[str, int]) -> list[int]:
    etp = axes.get("etp", 1)
    return [0, *(d for d in range(1, etp + 1) if etp % d == 0)]


def every_way(rank: int, world: int, axes: dict[str, int], kw: dict) -> dict[int, dict]:
    """y, dx and the gradients of all parameters by each r, of one layer in fp32, one call after another."""
    moe = built(kw)
    parallelize(moe, build_mesh(**axes))
    held = {name: (p.device_mesh, p.placements) for name, p in moe.experts.named_parameters()}
    found = {}
    for r in [*ways_of(axes), 0]:  # 0 a second time: a way leaves nothing behind
        draw = torch.Generator().manual_seed(rank)
        T = 0 if kw.get("pad") is None and rank == 1 else 10  # one rank without tokens
        x = torch.randn(T, D, generator=draw).requires_grad_()
        dy = torch.randn(T, D, generator=draw)
        y = moe(x, adaptive_r=r)
        y.backward(dy)
        grads = {name: p.grad.full_tensor() for name, p in moe.named_parameters()}
        moe.zero_grad()
        found[r] = dict(y=y.detach(), dx=x.grad, **grads)
        assert held == {name: (p.device_mesh, p.placements) for name, p in moe.experts.named_parameters()}
    return found


LAYOUTS = [
    (1, {}),
    (2, dict(ep=2)),
    (2, dict(ep=1, etp=2)),
    (4, dict(ep=4)),
    (4, dict(ep=2)),  # dp 2
    (4, dict(ep=2, replicate=2)),
    (4, dict(ep=2, etp=2)),
    (4, dict(ep=1, etp=4)),
    (8, dict(ep=2, etp=2)),  # dp 2
]
KINDS = [{}, dict(bias=True, activation="clamped"), dict(capacity_factor=0.5, pad=True)]
PLAIN = dict(bias=True, activation="relu2")  # experts without a gate
CASES = [(*layout, kind) for layout in LAYOUTS for kind in KINDS]
FAST = [CASES[i] for i in (3, 12, 19, 21)]
CASES += [(*LAYOUTS[i], PLAIN) for i in (1, 2, 6)]


@pytest.mark.parametrize(("world", "axes", "kw"), slow_but(FAST, CASES), ids=str)
def test_every_way_gives_the_same(gloo, world, axes, kw):
    """To 1e-6 of r = 1, which other tests compare with one process; gradients are sums, over dp as well."""
    for found in gloo(world, every_way, axes, kw):
        assert list(found) == ways_of(axes)
        for got in found.values():
            for name, want in found[1].items():
                scale = want.abs().max().item() if want.numel() else 1.0
                torch.testing.assert_close(got[name], want, rtol=1e-6, atol=1e-6 * max(scale, 1.0))


def test_one_rank_sums_all(gloo):
    """r = 0 on two ranks: each expert's gradient is that of one process that has all tokens."""
    parts = gloo(2, every_way, dict(ep=2), {})
    moe = built({})
    for rank in range(2):
        draw = torch.Generator().manual_seed(rank)
        T = 0 if rank == 1 else 10
        x = torch.randn(T, D, generator=draw)
        moe(x).backward(torch.randn(T, D, generator=draw))
    for name, p in moe.named_parameters():
        torch.testing.assert_close(parts[0][0][name], p.grad, rtol=1e-5, atol=1e-6)


def moved(rank: int, world: int) -> dict:
    """Elements of rows and of experts that this rank hands to collectives in a forward, by r."""
    moe = built(dict(shared_dim=0))
    parallelize(moe, build_mesh(ep=world))
    x = torch.randn(50, D)
    sent = {"rows": 0, "experts": 0}
    a2a, gather = dist.all_to_all_single, LocalExperts.gathered

    def exchanging(out, given, *args, **kwargs):
        if given.dtype == torch.float32 and given.shape[-1] == D:
            sent["rows"] += given.numel()
        return a2a(out, given, *args, **kwargs)

    def gathering(self, group):
        sent["experts"] += self.gate_up.numel() + self.down.numel()
        return gather(self, group)

    dist.all_to_all_single, LocalExperts.gathered = exchanging, gathering
    found = {}
    for r in (0, 1):
        sent.update(rows=0, experts=0)
        with torch.no_grad():
            moe(x, adaptive_r=r)
        found[r] = dict(sent)
    return found


def test_what_travels(gloo):
    for found in gloo(2, moved):
        assert found[0] == dict(rows=0, experts=E // 2 * 3 * 8 * D)
        assert found[1]["rows"] >= 50 * D and found[1]["experts"] == 0


def compiled(rank: int, world: int, axes: dict[str, int]) -> list:
    """After each of several calls, how many graphs there are, and how far it is from eager."""
    moe, eager = built({}), built({})
    parallelize(moe, build_mesh(**axes))
    parallelize(eager, build_mesh(**axes))
    graphs = []

    def count(gm, inputs):
        graphs.append(gm)
        return gm.forward

    moe.route = torch.compile(moe.route, fullgraph=True, backend=count)
    used = []
    for step in range(3):
        for r in ways_of(axes):
            x = torch.randn(12, D, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()
            y, want = moe(x, adaptive_r=r), eager(x.detach(), adaptive_r=r)
            used.append((len(graphs), (y - want).abs().max().item()))
    return used


@pytest.mark.parametrize("axes", slow_but([dict(ep=2)], [dict(ep=2), dict(ep=1, etp=2)]), ids=str)
def test_nothing_is_compiled_after_the_first_use_of_each(gloo, axes):
    n = len(ways_of(axes))
    for used in gloo(2, compiled, axes):
        counts = [count for count, _ in used]
        assert counts[:n] == list(range(1, n + 1)) or axes.get("ep") == 1
        assert set(counts[n:]) == {counts[n - 1]}
        assert max(far for _, far in used) < 1e-6


def compiled_gradients(rank: int, world: int) -> list:
    """By inductor, eager beside it."""
    found = []
    for compile in (False, True):
        moe = built({})
        parallelize(moe, build_mesh(ep=world))
        if compile:
            moe.route = torch.compile(moe.route, fullgraph=True, dynamic=False)
        x = torch.randn(12, D, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        y = moe(x, adaptive_r=0)
        y.backward(torch.ones_like(y))
        found.append([y.detach(), x.grad, *(p.grad.full_tensor() for p in moe.parameters())])
    return found


@pytest.mark.slow
def test_compiled_gradients(gloo):
    for eager, ours in gloo(2, compiled_gradients):
        for a, b in zip(eager, ours, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# ---- the choice ----

COST = LayerCost(MACHINES["nvlink"], 64, 8, 2048, 1024, ep=8, element=2, waits=True, backward=True)


def test_cost_is_its_formula():
    """r = 0: 7/8 of 64 experts, three times; r = 1: 4 times the rows that leave; both by hand."""
    cost = replace(COST, machine=Machine(1e-9, 0, 0, 0, 0))
    experts = 64 * 3 * 2048 * 1024 * 2
    assert cost.seconds(0, 4096) == pytest.approx(3 * 7 / 8 * experts / 1e9)
    rows = 4096 * 7 * (1 - (7 / 8) ** 8)
    assert cost.seconds(1, 4096) == pytest.approx(4 * rows * 2048 * 2 / 1e9)
    here = 4096 * 8 * (1 - (7 / 8) ** 8)
    assert cost.seconds(2, 4096) == pytest.approx(4 * (rows + here) * 2048 * 2 / 1e9)
    inference = replace(cost, backward=False)
    assert inference.seconds(0, 4096) == pytest.approx(7 / 8 * experts / 1e9)
    assert inference.seconds(1, 4096) == pytest.approx(2 * rows * 2048 * 2 / 1e9)


def test_tokens_travel_where_they_are_few():
    """One crossover: tokens up to some number of them, weights from there on; experts are divided never."""
    chosen = [COST.cheapest([1, 0, 2], tokens) for tokens in (1, 64, 4096, 2**20, 2**24)]
    assert chosen[0] == 1 and chosen[-1] == 0
    assert chosen == sorted(chosen, reverse=True) and 2 not in chosen


def automatic(rank: int, world: int) -> list[str | None]:
    moe = built(dict(ffn_dim=2**16))
    parallelize(moe, build_mesh(ep=world))
    keys = [moe.call(torch.empty(n, D), None, None, "auto").way for n in (1, 10**7)]
    torch.testing.assert_close(moe(torch.ones(3, D), adaptive_r="auto"), moe(torch.ones(3, D)))
    return keys


def test_auto(gloo):
    assert gloo(2, automatic) == [["1", "0"]] * 2


def test_errors():
    moe, x = built({}), torch.randn(4, D)
    assert torch.equal(moe(x, adaptive_r=0), moe(x)) and torch.equal(moe(x, adaptive_r="auto"), moe(x))
    for bad in (2, -1, "best", True, 1.0):
        with pytest.raises(ValueError, match=r"adaptive_r: got .*, valid is 'auto' or one of \[0, 1\]"):
            moe(x, adaptive_r=bad)
    with pytest.raises(ConfigError, match=r"--parallel.adaptive-r=3: must be auto or one of \[0, 1, 2, 4\]"):
        ParallelConfig(etp=4, adaptive_r=3)
    assert ParallelConfig(etp=4, adaptive_r=2).adaptive_r == 2
