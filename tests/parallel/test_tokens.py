"""Tokens between the ranks of a sequence: results and gradients are those of one process, eager and compiled.

The one process is plain PyTorch on whole tensors, in fp64.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.utils import counters

from tmoe.parallel.collectives import name_of
from tmoe.parallel.token_exchange import (
    exchange,
    gather,
    gathered_linear,
    in_key_order,
    key_order,
    linear_scattered,
    positions,
    scatter_sum,
)

B, S, D, H, C = 2, 24, 10, 8, 3  # 24 tokens: 12 or 6 a rank, in pieces of unequal length
O = H * C


def whole() -> dict[str, torch.Tensor]:
    """Inputs of one process: tokens x, heads q, and for `scatter_sum` an addend y of each of 4 ranks."""
    draw = torch.Generator().manual_seed(3)
    shapes = dict(x=(B, S, D), q=(B, S, H, C), y=(4, B, S, D), w=(O, D), b=(O,), v=(D, O), grad=(4, B, S, D))
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def part(x: torch.Tensor, dim: int, rank: int, world: int) -> torch.Tensor:
    return x.chunk(world, dim)[rank]


# name: (inputs as this rank holds them, what it computes of them)
def local(name: str, rank: int, world: int, dtype: torch.dtype):
    """This rank's inputs that want a gradient, and a function of them."""
    given, group = whole(), name_of(dist.group.WORLD)
    x, q = part(given["x"], 1, rank, world), part(given["q"], 1, rank, world)
    w, b, v = (
        part(given["w"], 0, rank, world),
        part(given["b"], 0, rank, world),
        part(given["v"], 1, rank, world),
    )
    heads = (
        given["q"].flatten(2).unflatten(-1, (world, -1))[:, :, rank]
    )  # [B, S, O/n]: this rank's, of all tokens
    cases = {
        "gather": ((x,), lambda x: gather(x * 2, group)),
        "scatter_sum": ((given["y"][rank],), lambda y: scatter_sum(y * 2, group)),
        "exchange": ((q,), lambda q: exchange(q * 2, group, True)),
        "exchange back": ((heads.unflatten(-1, (-1, C)),), lambda q: exchange(q * 2, group, False)),
        "gathered_linear": ((x, w, b), lambda x, w, b: gathered_linear(x * 2, w, b, group)),
        "gathered_linear, no bias": ((x, w), lambda x, w: gathered_linear(x * 2, w, None, group, 2)),
        "gathered_linear, 2 chunks": ((x, w, b), lambda x, w, b: gathered_linear(x * 2, w, b, group, 2)),
        "gathered_linear, 5 chunks": ((x, w, b), lambda x, w, b: gathered_linear(x * 2, w, b, group, 5)),
        "linear_scattered": ((heads, v), lambda y, v: linear_scattered(y * 2, v, group)),
        "linear_scattered, 2 chunks": ((heads, v), lambda y, v: linear_scattered(y * 2, v, group, 2)),
        "linear_scattered, 5 chunks": ((heads, v), lambda y, v: linear_scattered(y * 2, v, group, 5)),
    }
    tensors, run = cases[name]
    return [t.to(dtype).clone().requires_grad_() for t in tensors], run


NAMES = (
    *("gather", "scatter_sum", "exchange", "exchange back"),
    *(
        "gathered_linear",
        "gathered_linear, no bias",
        "gathered_linear, 2 chunks",
        "gathered_linear, 5 chunks",
    ),
    *("linear_scattered", "linear_scattered, 2 chunks", "linear_scattered, 5 chunks"),
)


def one_process(name: str, world: int) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """By rank: what it should get, and the gradients of its inputs, when every rank's loss is `loss_of`."""
    given = {name: tensor.clone().requires_grad_() for name, tensor in whole().items()}
    x, q, y, w, b, v = (given[key] for key in "xqywbv")
    kind = name.split(",")[0]
    bias = None if "no bias" in name else b
    results = {
        "gather": lambda: [2 * x] * world,
        "scatter_sum": lambda: list((2 * y[:world].sum(0)).chunk(world, 1)),
        "exchange": lambda: list((2 * q).chunk(world, 2)),
        "exchange back": lambda: list((2 * q).chunk(world, 1)),
        "gathered_linear": lambda: list(F.linear(2 * x, w, bias).chunk(world, 2)),
        "linear_scattered": lambda: list(F.linear(2 * q.flatten(2), v).chunk(world, 1)),
    }[kind]()
    sum(loss_of(result, rank) for rank, result in enumerate(results)).backward()
    grads = {
        "gather": lambda r: [part(x.grad, 1, r, world)],
        "scatter_sum": lambda r: [y.grad[r]],
        "exchange": lambda r: [part(q.grad, 1, r, world)],
        "exchange back": lambda r: [part(q.grad, 2, r, world)],
        "gathered_linear": lambda r: [
            part(x.grad, 1, r, world),
            part(w.grad, 0, r, world),
            *([part(b.grad, 0, r, world)] if bias is not None else []),
        ],
        "linear_scattered": lambda r: [part(q.grad.flatten(2), 2, r, world), part(v.grad, 1, r, world)],
    }[kind]
    return [result.detach() for result in results], [grads(rank) for rank in range(world)]


def loss_of(result: torch.Tensor, rank: int) -> torch.Tensor:
    """A loss that is another one on every rank, and whose gradient depends on the result."""
    draw = torch.Generator().manual_seed(10 + rank)
    weights = torch.randn(result.shape, generator=draw, dtype=torch.float64).to(result.dtype)
    return (result * weights + 0.1 * result.square()).sum()


def evaluate(rank: int, world: int, dtype: torch.dtype, backend: str | None) -> dict:
    found = {}
    for name in NAMES:
        counters.clear()
        torch._dynamo.reset()
        inputs, run = local(name, rank, world, dtype)
        got = (torch.compile(run, fullgraph=True, dynamic=False, backend=backend) if backend else run)(
            *inputs
        )
        loss_of(got, rank).backward()
        found[name] = (
            got.detach(),
            [t.grad for t in inputs],
            counters["stats"]["unique_graphs"],
            got.is_contiguous(),
        )
    return found


@pytest.mark.parametrize(
    ("world", "dtype", "backend", "tolerance"),
    [
        (2, torch.float64, None, 1e-12),
        (4, torch.float64, None, 1e-12),
        (4, torch.float32, None, 1e-6),
        (4, torch.bfloat16, None, 2e-2),  # 8 bits, of every rank's addend and of the sums
        (2, torch.float64, "aot_eager", 1e-12),
        (4, torch.bfloat16, "aot_eager", 2e-2),
    ],
    ids=str,
)
def test_equals_one_process(gloo, world, dtype, backend, tolerance):
    ranks = gloo(world, evaluate, dtype, backend)
    for name in NAMES:
        results, grads = one_process(name, world)
        for rank, found in enumerate(ranks):
            got, got_grads, graphs, dense = found[name]
            assert dense and got.dtype == dtype and graphs == (1 if backend else 0)
            for value, want in zip([got, *got_grads], [results[rank], *grads[rank]], strict=True):
                assert value.dtype == dtype
                away = (value.double() - want).norm() / want.norm()
                assert value.shape == want.shape and away < tolerance, (name, rank, away)


@pytest.mark.slow
def test_inductor_makes_one_graph_of_each(gloo):
    for rank, found in enumerate(gloo(2, evaluate, torch.float32, "inductor", timeout=300)):
        for name in NAMES:
            results, grads = one_process(name, 2)
            got, got_grads, graphs, _ = found[name]
            assert graphs == 1
            for value, want in zip([got, *got_grads], [results[rank], *grads[rank]], strict=True):
                torch.testing.assert_close(value.double(), want, rtol=1e-4, atol=1e-4)


def attention_like(
    x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, rank: int, world: int, group: str, chunks: int
) -> torch.Tensor:
    """All of them, one after the other: heads by slice, tokens for heads and back, keys of all tokens."""
    w, v = w.chunk(world)[rank], v.chunk(world, 1)[rank]
    q = gathered_linear(x, w, None, group, chunks).unflatten(-1, (-1, C))  # my heads of all tokens
    q = exchange(q, group, False)  # all heads of mine
    k = gather(q.tanh(), group)
    q = torch.einsum("bshc,bthc,bthd->bshd", q, k, k) / 50
    return scatter_sum(
        linear_scattered(exchange(q, group, True).flatten(2), v, group, chunks).repeat(1, 2, 1), group
    )


def directional(rank: int, world: int, chunks: int) -> list[tuple[float, float]]:
    """The derivative of all ranks' loss along random directions: by autograd, and by central differences."""
    group, given = name_of(dist.group.WORLD), whole()
    point = [
        part(given["x"], 1, rank, world),
        given["w"],
        given["v"],
    ]
    leaves = [t.clone().requires_grad_() for t in point]

    def total(*inputs: torch.Tensor) -> torch.Tensor:
        return loss_of(attention_like(*inputs, rank, world, group, chunks), rank)

    def everywhere(value: torch.Tensor) -> float:
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item()

    total(*leaves).backward()
    draw, pairs, step = torch.Generator().manual_seed(50 + rank), [], 1e-5
    for _ in range(3):
        ways = [torch.randn(t.shape, generator=draw, dtype=torch.float64) for t in point]
        slope = everywhere(sum((t.grad * way).sum() for t, way in zip(leaves, ways, strict=True)))
        ahead, behind = (
            everywhere(total(*(t + sign * step * way for t, way in zip(point, ways, strict=True))))
            for sign in (1, -1)
        )
        pairs.append((slope, (ahead - behind) / (2 * step)))
    return pairs


@pytest.mark.parametrize(("world", "chunks"), [(2, 1), (4, 2)])
def test_gradients_are_slopes(gloo, world, chunks):
    for slope, measured in gloo(world, directional, chunks)[0]:
        assert slope == pytest.approx(measured, rel=1e-6) and abs(slope) > 1e-3


def block(rank: int, world: int, backend: str | None) -> tuple:
    counters.clear()
    group, given = name_of(dist.group.WORLD), whole()
    inputs = [
        part(given["x"], 1, rank, world),
        given["w"],
        given["v"],
    ]
    inputs = [t.float().clone().requires_grad_() for t in inputs]
    run = (
        torch.compile(attention_like, fullgraph=True, dynamic=False, backend=backend)
        if backend
        else attention_like
    )
    for _ in range(2):
        got = run(*inputs, rank, world, group, 2)
        loss_of(got, rank).backward()
    return (
        got.detach(),
        [t.grad for t in inputs],
        counters["stats"]["unique_graphs"],
        dict(counters["graph_break"]),
    )


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_block_of_them_is_one_graph(gloo, backend):
    for (want, want_grads, *_), (got, grads, graphs, breaks) in zip(
        gloo(2, block, None), gloo(2, block, backend, timeout=240), strict=True
    ):
        assert graphs == 1 and not breaks
        for a, b in zip([got, *grads], [want, *want_grads], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def saved(rank: int, world: int) -> list[tuple[int, ...]]:
    """Shapes of what autograd keeps of a gathered_linear."""
    shapes = []
    inputs, run = local("gathered_linear", rank, world, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        run(*inputs)
    return shapes


def test_the_gathered_tokens_are_not_kept(gloo):
    shapes = gloo(2, saved)[0]
    assert (B, S // 2, D) in shapes and (B, S, D) not in shapes


def alone(rank: int, world: int) -> bool:
    group = name_of(dist.group.WORLD)
    x, q = torch.randn(B, S, D), torch.randn(B, S, H, C)
    same = [
        gather(x, group) is x,
        scatter_sum(x, group) is x,
        exchange(q, group, True) is q,
        exchange(q, group, False) is q,
    ]
    w, b, v = torch.randn(O, D), torch.randn(O), torch.randn(D, O)
    assert torch.equal(gathered_linear(x, w, b, group, 2), F.linear(x, w, b))
    assert torch.equal(linear_scattered(q.flatten(2), v, group, 2), F.linear(q.flatten(2), v))
    return all(same)


def test_alone_nothing_moves(gloo):
    assert gloo(1, alone) == [True]


def refused(rank: int, world: int) -> None:
    group = name_of(dist.group.WORLD)
    for call in (
        lambda: scatter_sum(torch.zeros(1, 5, 2), group),
        lambda: exchange(torch.zeros(1, 4, 3, 2), group, True),
        lambda: exchange(torch.zeros(1, 3, 4, 2), group, False),
        lambda: linear_scattered(torch.zeros(1, 5, 2), torch.zeros(3, 2), group, 2),
    ):
        with pytest.raises(ValueError, match="must be a multiple of the group's 2 ranks"):
            call()


def test_what_does_not_divide_is_refused_before_it_travels(gloo):
    gloo(2, refused)


@pytest.mark.parametrize(("cp", "tp"), [*itertools.product((1, 2, 4), (1, 2, 3))])
def test_positions_are_a_head_and_a_tail(cp, tp):
    seq = 24 * cp
    held = [[positions(seq, cp, c, tp, t) for t in range(tp)] for c in range(cp)]
    assert sorted(torch.cat([torch.cat(parts) for parts in held]).tolist()) == list(range(seq))
    assert len({part.numel() for parts in held for part in parts}) == 1
    work = {torch.cat(parts).add(1).sum().item() for parts in held}  # keys that a rank's queries see
    assert len(work) == 1
    gathered = torch.cat([torch.cat(parts) for parts in held])  # over tp, then over cp
    assert torch.equal(in_key_order(gathered[None], cp), torch.arange(seq)[None])


def test_rank_1_of_2():
    assert positions(8, 2, 1).tolist() == [2, 3, 4, 5] and positions(8, 2, 0, 2, 1).tolist() == [6, 7]
    assert key_order(2) == (0, 2, 3, 1) and key_order(1) == (0,)


def test_positions_name_the_flags():
    with pytest.raises(
        ValueError, match=r"--train.seq=20 .*--parallel.cp=2 .*--parallel.tp=2: .* 8; valid: 16 or 24"
    ):
        positions(20, 2, 0, 2, 0)
    with pytest.raises(ValueError, match=r"rank 2 of --parallel.cp=2: must be from 0 to 1"):
        positions(16, 2, 2)
