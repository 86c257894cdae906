"""all_to_all_v and all_gather_v: Tutel's golden values, other groups, empty ranks, gradients, one graph."""

import pytest
import torch
import torch.distributed as dist

from tmoe.parallel import all_gather_v, all_to_all_v


def golden(rank, world):
    """The example of Tutel: rank 0 has five rows of 10, rank 1 three of 20."""
    x = torch.full((5, 1), 10.0) if rank == 0 else torch.full((3, 1), 20.0)
    y, come = all_to_all_v(x, [1, 4] if rank == 0 else [2, 1])
    z, counts = all_gather_v(x)
    return y.flatten().tolist(), come.tolist(), z.flatten().tolist(), counts.tolist()


def test_golden(gloo):
    one, other = gloo(2, golden)
    assert one[:2] == ([10, 20, 20], [1, 2])
    assert other[:2] == ([10, 10, 10, 10, 20], [4, 1])
    for gathered in (one, other):
        assert gathered[2:] == ([10] * 5 + [20] * 3, [5, 3])


COUNTS = torch.tensor([[2, 0, 3, 1], [0, 0, 0, 0], [1, 4, 0, 2], [5, 0, 0, 1]])  # [from, to]
PAIR = torch.tensor([[2, 1], [0, 3]])  # every rank has rows, as a compiled graph wants


def rows_of(rank):
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(int(COUNTS[rank].sum()) or 3, 2, 3, generator=draw, dtype=torch.float64)


def moved(rank, world, in_pairs, compiled):
    """Both in a group: results, and the gradients of sum(result * g) with a g of this rank's own."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])] if in_pairs else []
    group = next((g for g in groups if isinstance(g, dist.ProcessGroup)), None)
    mine = list(range(rank % 2, world, 2) if in_pairs else range(world))
    counts = (PAIR if compiled else COUNTS)[rank][mine]
    x = rows_of(rank)[: int(counts.sum())].requires_grad_()

    def to_all(x):
        return all_to_all_v(x * 2, counts, group)[0] * 1

    def of_all(x):
        return all_gather_v(x * 2, group)[0] * 1

    draw = torch.Generator().manual_seed(100 + rank)
    found = []
    for run in (to_all, of_all):
        out = torch.compile(run, fullgraph=True)(x) if compiled else run(x)
        g = torch.randn(out.shape, generator=draw, dtype=out.dtype)
        found += [out.detach(), g, *torch.autograd.grad(out, x, g)]
    return x.detach(), counts, mine, found


@pytest.mark.parametrize(
    ("world", "in_pairs", "compiled"),
    [(4, False, False), (4, True, False), pytest.param(2, False, True, marks=pytest.mark.slow)],
)
def test_rows_and_gradients_are_those_of_whole_tensors(gloo, world, in_pairs, compiled):
    ranks = gloo(world, moved, in_pairs, compiled)
    for rank, (_, _, mine, (y, _, dy, z, _, dz)) in enumerate(ranks):
        peers = [ranks[p] for p in mine]
        me = mine.index(rank)
        blocks = [peer[0].split(peer[1].tolist()) for peer in peers]  # [from][to]
        assert torch.equal(y, 2 * torch.cat([sent[me] for sent in blocks]))
        assert torch.equal(z, 2 * torch.cat([peer[0] for peer in peers]))
        # what went to rank p gets that part of its gradient back
        back = []
        for to, peer in enumerate(peers):
            came = [sent[to].shape[0] for sent in blocks]
            back.append(peer[3][1].split(came)[me])
        assert torch.equal(dy, 2 * torch.cat(back))
        lengths = [len(peer[0]) for peer in peers]
        torch.testing.assert_close(dz, 2 * sum(peer[3][4].split(lengths)[me] for peer in peers))


def empty(rank, world):
    for run in (lambda x: all_to_all_v(x, [0])[0], lambda x: all_gather_v(x)[0]):
        with pytest.raises(Exception, match="got no rows in a compiled graph"):
            torch.compile(run, fullgraph=True, backend="eager")(torch.zeros(0, 2, requires_grad=True))
    return True


def test_no_rows_in_a_compiled_graph_are_refused(gloo):
    """Inductor leaves out what makes an empty gradient, the exchange as well, and peers would wait for it."""
    assert gloo(1, empty) == [True]


def second(rank, world):
    """d/dx of |dL/dx|^2 for L = sum(y^3): the product of gradients passes both ways twice."""
    x = rows_of(rank)[: int(COUNTS[rank].sum()), 0].requires_grad_()
    found = []
    for y, _ in (all_to_all_v(x, COUNTS[rank]), all_gather_v(x)):
        (dx,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (ddx,) = torch.autograd.grad((dx**2).sum(), x)
        found.append(ddx)
    return x.detach(), *found


def test_second_derivatives(gloo):
    for x, of_all_to_all, of_gather in gloo(4, second):
        torch.testing.assert_close(of_all_to_all, 36 * x**3)  # (3 x^2)^2
        torch.testing.assert_close(of_gather, 4**2 * 36 * x**3)  # each of four ranks gives 3 x^2


def types(rank, world):
    found = []
    for dtype in (torch.bfloat16, torch.int64, torch.bool):
        x = (torch.arange(3) + rank).to(dtype)
        found.append((all_to_all_v(x, torch.tensor([3 - rank, rank]))[0], all_gather_v(x)[0], dtype))
    return found


def test_rows_of_any_type_without_columns(gloo):
    for rank, found in enumerate(gloo(2, types)):
        for y, z, dtype in found:
            want = torch.tensor([[0, 1, 2, 1, 2], [3]][rank]).to(dtype)
            assert y.dtype == dtype and torch.equal(y, want)
            assert torch.equal(z, torch.tensor([0, 1, 2, 1, 2, 3]).to(dtype))


def wrong(rank, world):
    said = []
    for counts in ([1, 2] if rank == 0 else [1, 1], [2, 0] if rank == 0 else [3, -1]):
        try:
            all_to_all_v(torch.zeros(2, 1), counts)
        except ValueError as error:
            said.append(str(error))
    return said


def test_counts_that_do_not_fit_raise_on_every_rank(gloo):
    """A rank alone that raised would leave its peers waiting."""
    own = "all_to_all_v: send_counts: got {}, valid is counts from 0 on that add up to 2, this rank's rows"
    peer = "all_to_all_v: send_counts: got counts that do not fit, on ranks [{}] of the group"
    first, last = gloo(2, wrong)
    assert first[0] == own.format([1, 2]) and last[0].startswith(peer.format(0))
    assert first[1].startswith(peer.format(1)) and last[1] == own.format([3, -1])


def alone(rank, world):
    for args, said in (
        ((torch.zeros(()), [0]), "x: got a number, valid is rows"),
        ((3, [0]), "x: got 3, valid is rows"),
        ((torch.zeros(1), [1, 0]), r"send_counts: got torch.int64 \(2,\), valid is a whole number for each"),
        ((torch.zeros(1), [0.5]), "send_counts: got torch.float32"),
        ((torch.zeros(1), [1], "ep"), "group: got 'ep', valid is a process group that this rank is in"),
    ):
        with pytest.raises(ValueError, match=said):
            all_to_all_v(*args)
    y, counts = all_to_all_v(torch.ones(2), [2])
    return torch.equal(y, torch.ones(2)) and counts.tolist() == [2]


def test_bad_input_is_named(gloo):
    assert gloo(1, alone) == [True]
    with pytest.raises(ValueError, match="group: got no process group, valid is one"):
        all_gather_v(torch.ones(2))
