"""Rows padded to capacity: values and gradients of the layer without, on one rank and on several.

next: tests/moe/test_dispatch.py
"""

from dataclasses import replace

import pytest
import torch
from tiers import slow_but

from tmoe.config.model import MoEConfig
from tmoe.config.run import Config, ParallelConfig
from tmoe.moe.exchange.padded import PaddedDispatcher, PaddedRouting
from tmoe.moe.experts import LocalExperts
from tmoe.moe.layer import MoE
from tmoe.moe.select.capacity import capacity, limited
from tmoe.ops.experts import cpu
from tmoe.parallel import build_mesh, collectives, parallelize

D, E, K, T = 6, 4, 2, 12
BASE = MoEConfig(experts=E, top_k=K, ffn_dim=8, shared_dim=4)


def test_fixed_values():
    """Counts 2, 2, 2, 0 are padded to 2, 2, 2, 2: the slots of the last expert are empty."""
    ids_TK = torch.tensor([[0, 1], [0, 1], [-1, 2], [-1, 2]], dtype=torch.int32)
    x_TD = torch.arange(1.0, 5.0)[:, None].repeat(1, D)
    weights_TK = torch.arange(8.0).view(4, 2)
    rows, plan = PaddedDispatcher(E).dispatch(x_TD, PaddedRouting(weights_TK, ids_TK, 2))
    assert rows.x_RD[:, 0].tolist() == [1, 2, 1, 2, 3, 4, 0, 0]
    assert rows.ids_RK.flatten().tolist() == [0, 0, 1, 1, 2, 2, -1, -1]
    assert rows.weights_RK.flatten().tolist() == [0, 2, 1, 3, 5, 7, 0, 0]
    assert plan.slots_TK.tolist() == [[0, 2], [1, 3], [8, 4], [8, 5]]
    # the round trip with drops: a copy comes back for each pair that stayed
    assert PaddedDispatcher(E).combine(rows.x_RD, plan)[:, 0].tolist() == [2, 4, 3, 4]


@pytest.mark.parametrize("tokens", [7, 0])
def test_gradcheck(tokens):
    """Of x, weights and experts, in fp64, with pairs dropped and an expert without any."""
    draw = torch.Generator().manual_seed(3)
    ids_TK = torch.stack([torch.randperm(3, generator=draw)[:K] for _ in range(7)]).int()[:tokens]
    ids_TK[torch.rand(tokens, K, generator=draw) < 0.3] = -1

    def apply(x_TD, weights_TK, gate_up, down):
        routing = PaddedRouting(weights_TK, ids_TK, max(tokens, 1))
        return PaddedDispatcher(E)(x_TD, routing, LocalExperts(gate_up, down))

    shapes = (tokens, 3), (tokens, K), (E, 4, 3), (E, 3, 2)
    leaves = [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]
    assert torch.autograd.gradcheck(apply, leaves)


def built(kw: dict) -> MoE:
    torch.manual_seed(0)
    moe = MoE(D, replace(BASE, **kw))
    moe.router.weight.data.mul_(30)  # uneven
    return moe


def tokens_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(2, T // 2, D, generator=draw), torch.randn(2, T // 2, D, generator=draw)


def on_ranks(rank: int, world: int, axes: dict[str, int], kw: dict) -> dict:
    """A layer spread over ranks: y, gradients, and what was exchanged and multiplied here."""
    moe = built(kw)
    parallelize(moe, build_mesh(**axes))
    moved, multiplied = [], []
    all_to_all, forward = collectives.all_to_all, cpu.moe_mlp_forward

    def moving(rows, send, receive, group):
        if rows.shape[1:] == (D,):
            moved.append(sum(send))
        return all_to_all(rows, send, receive, group)

    def multiplying(x, experts, weights, order, ends, h):
        multiplied.append(order.numel())
        return forward(x, experts, weights, order, ends, h)

    collectives.all_to_all, cpu.moe_mlp_forward = moving, multiplying
    x, dy = tokens_of(rank)
    x.requires_grad_()
    y = moe(x)
    moved_there = moved[:1]
    y.backward(dy)
    grads = {name: p.grad.full_tensor() for name, p in moe.named_parameters()}
    load = moe.load
    counts = (load.counts_BE.sum().item(), load.dropped_BE.sum().item())
    return dict(
        y=y.detach(), dx=x.grad, grads=grads, moved=moved_there, multiplied=sum(multiplied), counts=counts
    )


def one_process(world: int, kw: dict) -> dict:
    """Each rank's tokens by themselves, as capacity is a rank's and a micro-batch's; gradients add up."""
    moe = built(kw)
    ys, dxs = [], []
    for rank in range(world):
        x, dy = tokens_of(rank)
        x.requires_grad_()
        y = moe(x)
        y.backward(dy)
        ys.append(y.detach())
        dxs.append(x.grad)
    return dict(y=ys, dx=dxs, grads={name: p.grad for name, p in moe.named_parameters()})


LAYOUTS = [
    (1, {}),
    (2, dict(ep=2)),
    (2, dict(ep=1)),
    (4, dict(ep=4)),
    (4, dict(ep=2)),
    (4, dict(ep=2, etp=2)),
]
POLICIES = [
    dict(capacity_factor=0.5),
    dict(capacity_factor=0.5, pad=True, drop="position"),
    dict(capacity_factor=1.0, rounding="tutel", drop="choice"),
    dict(capacity_factor=-0.75, pad=True, drop="priority", rounding="tutel"),
    dict(capacity_factor=0.0, pad=True),
    dict(capacity_factor=9.0, pad=True, bias=True),
]
CASES = [(*layout, policy) for layout in LAYOUTS for policy in POLICIES]
FAST = [CASES[i] for i in (6, 7, 19, 34)]


@pytest.mark.parametrize(("world", "axes", "kw"), slow_but(FAST, CASES), ids=str)
def test_layouts(gloo, world, axes, kw):
    parts, want = gloo(world, on_ranks, axes, kw), one_process(world, kw)
    for rank, part in enumerate(parts):
        for name in ("y", "dx"):
            torch.testing.assert_close(part[name], want[name][rank], rtol=1e-4, atol=1e-6)
        for name, grad in part["grads"].items():
            torch.testing.assert_close(
                grad,
                want["grads"][name.removeprefix("0.")],
                rtol=1e-4,
                atol=2e-5,
            )
    routed, dropped = map(sum, zip(*(part["counts"] for part in parts), strict=True))
    if kw["capacity_factor"] in (0.0, 9.0):
        assert dropped == 0
    else:
        assert dropped > 0
    etp = axes.get("etp", 1)
    assert sum(part["multiplied"] for part in parts) == etp * (routed - dropped), "products of dropped pairs"


def test_dropped_pairs_are_not_exchanged(gloo):
    """ep=2: rows that leave ranks, with most pairs dropped and with none, are what the routings say."""
    found = {}
    for factor in (None, 0.25):
        parts = gloo(2, on_ranks, dict(ep=2), dict(capacity_factor=factor))
        found[factor] = sum(part["moved"][0] for part in parts)
        moe, wanted = built({}), 0
        for rank in range(2):
            x, _ = tokens_of(rank)
            routing = moe.router(x.flatten(0, 1))
            if factor is not None:
                cfg = replace(BASE, capacity_factor=factor)
                routing = limited(routing, capacity(T, K, cfg), cfg)
            wanted += sum(len({e // 2 for e in row if e >= 0}) for row in routing.ids_TK.tolist())
        assert found[factor] == wanted
    assert found[0.25] < 0.7 * found[None]


def unequal(rank: int, world: int) -> str:
    moe = built(dict(capacity_factor=1.0, pad=True))
    parallelize(moe, build_mesh(ep=2))
    with pytest.raises(ValueError) as error:
        moe(torch.randn(1, T + rank * 8, D))
    return str(error.value)


def test_ranks_with_other_numbers_of_tokens_are_told(gloo):
    found = gloo(2, unequal)
    assert all("--model.moe.pad" in words and "24 to 40 in the group" in words for words in found), found


def test_pad_has_an_exchange_of_its_own():
    moe = replace(BASE, capacity_factor=1.0, pad=True)
    model = replace(Config().model, moe=moe)
    for flags, words in (
        (dict(dispatch="symm"), "dispatch=symm"),
        (dict(dispatch_dtype="fp8"), "dispatch-dtype=fp8"),
    ):
        with pytest.raises(ValueError, match=f"--parallel.{words}: not with --model.moe.pad"):
            Config(model=model, parallel=ParallelConfig(ep=2, **flags))
