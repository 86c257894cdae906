"""The exchange's buffers without a GPU: which rank makes room when, and what outlives a mode or a graph.

Processes share the sections of their memory through files, in place of GPUs that map each other's.

next: test_dispatch.py
"""

import contextlib
import datetime
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gloo import shared
from torch.distributed.distributed_c10d import _get_process_group_store

from tmoe.moe.exchange import symm
from tmoe.moe.exchange.dispatch import pairs_bound
from tmoe.ops import exchange
from tmoe.ops.experts.op import trace
from tmoe.ops.launch.kernel_launch import compile_only
from tmoe.parallel import agree

D, K = 8, 2


@contextlib.contextmanager
def shared_files(folder):
    """Symmetric memory of CPU processes, and the answers that torch.cuda would give."""
    made = []

    def file(rank, n, size):
        return torch.from_file(f"{folder}/{rank}-{n}", shared=True, size=size, dtype=torch.uint8)

    def empty(size, dtype, device):
        made.append(size)
        return file(dist.get_rank(), len(made), size)

    def rendezvous(memory, group):
        dist.barrier(group)
        peers = [memory if q == group.rank() else file(q, len(made), made[-1]) for q in range(group.size())]
        at = [p.data_ptr() for p in peers]
        return SimpleNamespace(buffer_ptrs=at, get_buffer=lambda q, shape, dtype: peers[q])

    with contextlib.ExitStack() as stack:
        for where, name, fake in (
            (symm.symmetric, "empty", empty),
            (symm.symmetric, "rendezvous", rendezvous),
            (torch.cuda, "Stream", mock.Mock()),
            (torch.cuda, "synchronize", lambda: None),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
        ):
            stack.enter_context(mock.patch.object(where, name, fake))
        yield


def push(ex):
    """What a push does to the peers' states; the meeting that it waits for is the next one."""
    for q, peer in enumerate(ex.peers):
        state = ex.sections["main"] if q == ex.rank else peer[ex.starts["main"] :][:256]
        state.view(torch.int32)[ex.rank] += 1


def met(ex):
    ex.sections["main"].view(torch.int32)[exchange.MET.value] += 1


def asks(rank, world, folder, tokens, late=0.0):
    """One reserve for each list of tokens, followed by a meeting.

    Returns the capacities, then what was raised and after how long.
    """
    with shared_files(folder):
        ex = symm.Exchange(dist.group.WORLD)
        got = []
        for of_ranks in tokens:
            dist.barrier()
            time.sleep(late * rank)
            began = time.monotonic()
            try:
                ex.reserve(of_ranks[rank], D * 4, K)
            except (ValueError, TimeoutError) as error:
                return [*got, str(error), time.monotonic() - began]
            push(ex)
            if any(t > ex.capacity for t in of_ranks):
                return got  # a real push would wait for those that stay away
            dist.barrier()
            met(ex)
            got.append(ex.capacity)
        dist.barrier()
        store = _get_process_group_store(dist.group.WORLD)
        prefix = f"tmoe room of {list(range(world))}"
        left = any(store.check([f"{prefix} {call}{end}"]) for call in range(9) for end in ("", " 0"))
        return [*got, left, int(ex.sections["x"].numel()), ex.ahead()]


@pytest.mark.parametrize("late", [0.0, 0.4])
def test_room_grows_where_all_ask(gloo, tmp_path, late):
    """In the first call for the largest rank, later only for more; a rank that comes late is waited for."""
    for got in gloo(3, asks, tmp_path, [[5, 0, 9], [2, 9, 1], [12, 10, 11], [12, 12, 0]], late):
        assert got == [9, 9, 12, 12, False, symm._up(3 * 12 * D * 4), []]


def test_a_rank_that_asks_alone_says_so_at_once(gloo, tmp_path):
    goes, asked, goes_too = gloo(3, asks, tmp_path, [[8, 8, 8], [3, 20, 8]])
    assert goes == goes_too == [8]
    room, said, seconds = asked
    assert room == 8 and seconds < shared(5)
    assert "rank 0 of" in said or "rank 2 of" in said
    assert all(part in said for part in ("20 tokens", "room for 8", "train.batch * train.seq", "apply_ep"))


def test_counts_wrap(gloo, tmp_path):
    """Which rank is ahead is told from a difference of int32."""
    assert all(gloo(2, wrapped, tmp_path))


def wrapped(rank, world, folder):
    with shared_files(folder):
        ex = symm.Exchange(dist.group.WORLD)
        ex.reserve(4, D * 4, K)
        state = ex.sections["main"].view(torch.int32)
        state[: exchange.MET.value + 1] = 2**31 - 1
        quiet = ex.ahead() == []
        state[1] += 1
        main = ex.ahead()
        state[1] -= 1
        # beside a shared expert ranks meet there first
        ex.sections["side"].view(torch.int32)[0] += 1
        return quiet and main == [1][rank:] and ex.ahead() == [0] * rank


def capture_first(rank, world, folder):
    with shared_files(folder):
        ex = symm.Exchange(dist.group.WORLD)
        said = []
        for capturing, tokens in ((True, 4), (False, 4), (True, 3), (False, 5)):
            with mock.patch.object(
                torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing
            ):
                try:
                    ex.reserve(tokens, D * 4, K)
                    said.append(ex.capacity)
                except RuntimeError as error:
                    said.append(str(error))
        return said


def test_a_capture_that_came_too_early_may_be_tried_again(gloo, tmp_path):
    """What the error asks for, a run before the capture, must then work.

    Only a captured graph fixes the buffers.
    """
    for early, run, captured, larger in gloo(2, capture_first, tmp_path):
        assert "before capturing" in early and run == captured == 4 and "no room for 5" in larger


def different_layers(rank, world, folder):
    with shared_files(folder), pytest.raises(ValueError) as error:
        symm.Exchange(dist.group.WORLD).reserve(4, D * 4, K + rank)
    return str(error.value)


def test_different_layers_are_told(gloo, tmp_path):
    first, second = gloo(2, different_layers, tmp_path)
    assert first == second and "different layers" in first and "[4, 32, 2, False], [4, 32, 3, False]" in first


def stay_away(rank, world):
    if rank == 0:
        store = mock.Mock(wraps=_get_process_group_store(dist.group.WORLD), timeout=mock.Mock())
        store.timeout.total_seconds.return_value = 0.2
        with (
            mock.patch.object(agree, "_get_process_group_store", lambda group: store),
            pytest.raises(TimeoutError, match=r"room: ranks \[1\] did not come"),
        ):
            agree.gathered_by_store(dist.group.WORLD, "room", 1, list)
    dist.barrier()


def test_nobody_waits_for_ever(gloo):
    gloo(2, stay_away)


def split_groups(rank, world):
    """Two pairs of ranks with one store, as split_group leaves them, one pair after the other."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    store = _get_process_group_store(dist.group.WORLD)
    with mock.patch.object(agree, "_get_process_group_store", lambda group: store):
        time.sleep(rank // 2 * 0.3)
        return agree.gathered_by_store(groups[rank // 2], "room", rank, list)


def test_groups_that_share_a_store(gloo):
    assert gloo(4, split_groups) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def after_inference(rank, world, folder):
    """Buffers that an evaluation in inference mode makes first.

    A backward copies into them later, where autograd counts versions.
    """
    with shared_files(folder):
        ex = symm.Exchange(dist.group.WORLD)
        with torch.inference_mode():
            ex.reserve(2, D * 4, K)
        rows = torch.full((2, D), 1.0 + rank)
        ex.copy_x({"x": rows})
        dist.barrier()
        return ex.rows("x", D, torch.float32).clone()


def test_copies_after_an_evaluation_in_inference_mode(gloo, tmp_path):
    for got in gloo(2, after_inference, tmp_path):
        assert torch.equal(got, torch.tensor([1.0, 1, 2, 2])[:, None].expand(4, D))


def test_a_graphs_table_is_not_kept(monkeypatch):
    """Under capture nothing is computed: a kept table would give addresses before the first replay."""
    ex = object.__new__(symm.Exchange)
    ex.rank = 0
    ex.world = 2
    ex.capacity = 3
    ex.tables = {}
    ex.sections = {name: torch.zeros(2 * 3 * D * 4, dtype=torch.uint8) for name in ("y", "sums")}
    y = mock.Mock(wraps=ex.rows("y", D, torch.float32), is_cuda=True, device="cpu", itemsize=4)
    y.__getitem__ = lambda self, i: torch.zeros(D)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = ex.table("y", y)
    assert not ex.tables
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert ex.table("y", y) is ex.table("y", y) is not captured
    assert torch.equal(ex.table("y", y), captured)


@pytest.mark.parametrize(
    ("T", "world", "dim", "F", "E", "top_k", "dtype", "biased"),
    [
        (16384, 4, 2048, 768, 128, 8, torch.bfloat16, False),
        (4096, 2, 4096, 14336, 8, 2, torch.bfloat16, True),
        (512, 8, 128, 64, 16, 4, torch.float32, False),
    ],
)
def test_the_warm_up_knows_every_kernel_of_the_experts(T, world, dim, F, E, top_k, dtype, biased):
    """`trace` of ops/experts/op.py names all that a rank's share of a layer launches.

    So no rank compiles while its peers wait.
    """
    L = E // world
    pairs = pairs_bound(T, top_k, world, E // world)
    ex = object.__new__(symm.Exchange)
    ex.rank = 0
    ex.world = world
    ex.capacity = T
    widths = dict.fromkeys(("x", "dy", "y"), dim * dtype.itemsize) | dict.fromkeys(
        ("ids", "weights", "d_weights"), 4 * top_k
    )
    ex.sections = {
        name: torch.empty(world * T * w, dtype=torch.uint8, device="meta") for name, w in widths.items()
    }
    gate_up, down, bias, h = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape in ((L, 2 * F, dim), (L, dim, F), (L, 2 * F), (pairs, 2 * F))
    )

    def experts():
        mine = symm.ReceivedExperts(
            ex, gate_up, down, bias if biased else None, "swiglu", top_k, dtype, pairs
        )
        mine.forward(None)
        mine.forward(h)
        mine.backward(h, lambda: None, lambda: None)

    def warm_up():
        trace(T * world, dim, F, L, top_k, dtype, pairs, "swiglu", biased)

    launched, compiled = ({}, {})
    for run, found in ((experts, launched), (warm_up, compiled)):
        with compile_only("cuda:90", lambda name, key, compile, found=found: found.setdefault(key, name)):
            run()
    assert len(launched) > 10
    assert not {name for key, name in launched.items() if key not in compiled}


def refusals(rank, world):
    from tmoe import MoE, MoEConfig
    from tmoe.model.parallelize import apply_ep
    from tmoe.moe.exchange.dispatch import AllToAllDispatcher
    from tmoe.parallel import build_mesh

    moe = MoE(16, MoEConfig(experts=4, top_k=2, ffn_dim=8))
    mesh = build_mesh(ep=world)
    said = []
    for dispatch, wire in (("symm", "same"), ("auto", "fp8")):
        with pytest.raises(ValueError) as error:
            apply_ep(moe, mesh, dispatch, 8, wire)
        said.append(str(error.value))
    moe = MoE(16, MoEConfig(experts=4, top_k=2, ffn_dim=8))
    apply_ep(moe, mesh, "auto")
    assert isinstance(moe.dispatcher, AllToAllDispatcher)
    return said


def test_without_gpus(gloo):
    """auto falls back without a word from the user; what cannot work is refused alike on all ranks."""
    first, second = gloo(2, refusals)
    assert first == second
    assert all(part in first[0] for part in ("--parallel.dispatch=symm", "GPU", "auto or nccl"))
    assert all(
        part in first[1]
        for part in ("--parallel.dispatch-dtype=fp8", "symm", "--parallel.dispatch-dtype same")
    )


def one_after_another(rank, world):
    """What each rank heard in calls that follow each other without a pause."""
    return [agree.gathered_by_store(dist.group.WORLD, "room", [call, rank], list) for call in range(20)]


def test_a_call_hears_no_word_of_another(gloo):
    assert gloo(3, one_after_another) == [[[[call, q] for q in range(3)] for call in range(20)]] * 3


def refused_then_equal(rank, world, folder):
    """Unlike rows are refused on both ranks; what both ask for afterwards is granted."""
    with shared_files(folder):
        ex = symm.Exchange(dist.group.WORLD)
        with pytest.raises(ValueError, match="different layers"):
            ex.reserve(4, D * (4 + rank), K)
        ex.reserve(4, D * 4, K)
        return ex.capacity


def test_a_refusal_leaves_nothing_behind(gloo, tmp_path):
    assert gloo(2, refused_then_equal, tmp_path) == [4, 4]


def test_who_went_on_is_found_though_its_word_of_a_later_call_is_there(gloo):
    """The rank asks for more already, and waits for what this rank never does."""
    assert gloo(2, late_for_one_call) == [[1], None]


def late_for_one_call(rank, world):
    if rank:
        return agree.gathered_by_store(dist.group.WORLD, "room", 1, lambda: [0])
    store = _get_process_group_store(dist.group.WORLD)
    store.set("tmoe room of [0, 1] 0 0", "1")
    return [1]


def ahead_of_its_gpu(rank, world):
    """Rank 1's host asks for more already, and its GPU is 0.3 s behind.

    The GPU then comes to what rank 0, which waits for a word, never does.
    """
    _get_process_group_store(dist.group.WORLD).set_timeout(datetime.timedelta(seconds=1))
    dist.barrier()
    begin = time.monotonic()
    if rank == 0:
        return agree.gathered_by_store(dist.group.WORLD, "room", 1, lambda: time.monotonic() - begin > 0.3)
    with pytest.raises(TimeoutError, match=r"room: ranks \[0\] did not come within 0:00:01"):
        agree.gathered_by_store(dist.group.WORLD, "room", 1, lambda: time.sleep(0.6))


def test_a_word_is_not_out_before_its_ranks_own_work_is_done(gloo):
    assert gloo(2, ahead_of_its_gpu) == [None, None]
