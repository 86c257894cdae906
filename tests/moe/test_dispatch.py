"""Tokens reach their experts and come back, forward and backward, whatever the routing: as in one process."""

import pytest
import torch
import torch.distributed as dist

from tmoe.config.model import MoEConfig
from tmoe.model.parallelize import apply_ep
from tmoe.moe.exchange.dispatch import AllToAllDispatcher
from tmoe.moe.layer import MoE
from tmoe.moe.router import Routing
from tmoe.parallel import build_mesh
from tmoe.parallel.agree import gathered_by_store

D, E, K = 16, 8, 3


def routing(kind: str, tokens: int, draw: torch.Generator) -> torch.Tensor:
    """ids [T, K]: distinct experts of a token, or -1."""
    ids = torch.stack(
        [torch.randperm(E, generator=draw)[:K] for _ in range(tokens)] or [torch.empty(K).long()]
    )[:tokens]
    if kind == "one expert":
        ids = torch.full((tokens, K), -1)
        ids[:, 1] = 5
    elif kind == "first rank":
        ids = ids % 2
        ids[:, 2] = -1
    elif kind == "nowhere":
        ids = torch.full((tokens, K), -1)
    elif kind == "holes":
        ids = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.5, -1)
    return ids.int()


def layer(rank: int, world: int, kind: str, tokens: list[int]) -> dict[str, torch.Tensor]:
    """One MoE layer's experts under expert parallelism with the given routing.

    Returns what this rank gets, and its gradients.
    """
    draw = torch.Generator().manual_seed(rank)
    T = tokens[rank]
    ids_TK = routing(kind, T, draw)
    x_TD = torch.randn(T, D, generator=draw).requires_grad_()
    weights_TK = torch.rand(T, K, generator=draw).requires_grad_()
    dy_TD = torch.randn(T, D, generator=draw)
    torch.manual_seed(0)
    moe = MoE(D, MoEConfig(experts=E, top_k=K, ffn_dim=8))
    if world > 1:
        apply_ep(moe, build_mesh(ep=world), "auto")

    def forward(experts):
        rows, plan = moe.dispatcher.dispatch(x_TD, Routing(weights_TK, ids_TK, torch.empty(0)))
        if world > 1:
            assert rows.x_RD.shape[0] <= sum(tokens), "more than one row for a (token, rank)"
        return moe.dispatcher.combine(experts(rows), plan)

    y_TD = moe.experts(forward)
    y_TD.backward(dy_TD)
    grads = {
        name: p.grad.full_tensor() if world > 1 else p.grad for name, p in moe.experts.named_parameters()
    }
    return dict(
        x=x_TD.detach(),
        ids=ids_TK,
        w=weights_TK.detach(),
        dy=dy_TD,
        y=y_TD.detach(),
        dx=x_TD.grad,
        dw=weights_TK.grad,
        **grads,
    )


def whole(rank: int, world: int, parts: list[dict]) -> dict[str, torch.Tensor]:
    """The same on one process that holds every rank's tokens."""
    torch.manual_seed(0)
    moe = MoE(D, MoEConfig(experts=E, top_k=K, ffn_dim=8))
    x, w = (torch.cat([p[name] for p in parts]).requires_grad_() for name in ("x", "w"))
    ids = torch.cat([p["ids"] for p in parts])
    rows, _ = moe.dispatcher.dispatch(x, Routing(w, ids, torch.empty(0)))
    y = moe.experts(lambda experts: experts(rows))
    y.backward(torch.cat([p["dy"] for p in parts]))
    return dict(
        y=y.detach(), dx=x.grad, dw=w.grad, gate_up=moe.experts.gate_up.grad, down=moe.experts.down.grad
    )


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("random", [33, 33]),
        ("random", [17, 0, 5, 40]),
        ("random", [0, 0]),
        ("one expert", [9, 31, 0, 3]),
        ("first rank", [20, 20, 20, 20]),
        ("nowhere", [6, 6]),
        ("holes", [12, 0, 64, 1, 5, 5, 5, 5]),
    ],
    ids=str,
)
def test_equals_one_process(gloo, kind, tokens):
    parts = gloo(len(tokens), layer, kind, tokens)
    want = gloo(1, whole, parts)[0]
    for name in ("y", "dx", "dw"):
        torch.testing.assert_close(torch.cat([p[name] for p in parts]), want[name], rtol=1e-5, atol=1e-6)
    for part in parts:
        for name in ("gate_up", "down"):
            torch.testing.assert_close(part[name], want[name], rtol=1e-5, atol=1e-6)


def wire(rank: int, world: int) -> tuple:
    """Rows that leave each rank.

    bf16 passes bit for bit; a plan is enough to combine, in any order of use.
    """
    draw = torch.Generator().manual_seed(rank)
    dispatcher = AllToAllDispatcher(dist.group.WORLD, E // world)
    xs = [torch.randn(n, D, generator=draw).bfloat16() for n in (21, 8)]
    sent, back = [], []
    for x in xs:
        ids = routing("random", len(x), draw)
        rows, plan = dispatcher.dispatch(x, Routing(torch.ones(len(x), K), ids, torch.empty(0)))
        owners = [set((row // (E // world)).tolist()) for row in ids]
        assert plan.splits_2P[0].tolist() == [sum(p in o for o in owners) for p in range(world)]
        sent.append((rows, plan, torch.tensor([len(o) for o in owners])))
    for (rows, plan, copies), x in zip(reversed(sent), reversed(xs), strict=True):
        # each copy of a token comes back: the sum is copies * x
        y = dispatcher.combine(rows.x_RD.float(), plan)
        back.append(torch.equal(y, x.float() * copies[:, None]))
    return back


def test_one_row_for_each_token_and_rank(gloo):
    assert all(all(back) for back in gloo(4, wire))


def odd_calls(rank: int, world: int) -> tuple:
    """A sum in fp64, and the error of the call after one that another rank never came to."""
    dispatcher = AllToAllDispatcher(dist.group.WORLD, E // world)
    x = torch.randn(0 if rank else 9, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(E, dtype=torch.int32).repeat(len(x), 1)  # every rank is asked
    rows, plan = dispatcher.dispatch(x, Routing(torch.ones(ids.shape), ids, torch.empty(0)))
    back = dispatcher.combine(rows.x_RD / 3, plan)
    if rank == 0:
        assert gathered_by_store(dist.group.WORLD, "odd", 1, lambda: [1]) is None
    dist.barrier()
    words = gathered_by_store(dist.group.WORLD, "odd", rank, lambda: [])
    return torch.equal(back, sum([x / 3] * world, torch.zeros(()))), words


def test_odd_calls(gloo):
    for exact, words in gloo(2, odd_calls):
        assert exact and words == [0, 1]


def parts_of_a_token(rank: int, world: int) -> torch.Tensor:
    dispatcher = AllToAllDispatcher(dist.group.WORLD, 2)
    ids_TK = torch.arange(2 * world, dtype=torch.int32).repeat(5, 1)
    routing = Routing(torch.ones(5, 2 * world), ids_TK, torch.empty(0))
    rows, plan = dispatcher.dispatch(torch.ones(5, 4).bfloat16(), routing)
    return dispatcher.combine(rows.x_RD * (1.0 if rank else 256.0), plan)


def test_ranks_are_added_in_fp32(gloo):
    for y_TD in gloo(4, parts_of_a_token):
        assert (y_TD == 260).all()  # 259, rounded once; in bf16 256 + 1 is 256
