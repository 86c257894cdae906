"""Every table runs to its end, with the bubble of its formula; blocks are cut as evenly as can be."""

import bisect
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from tmoe.parallel import pipeline_posts, pipeline_schedule
from tmoe.parallel.pipeline_cut import PARTS, cut, divide
from tmoe.parallel.pipeline_schedule import (
    EVEN,
    EXPERTS,
    Action,
    Bounds,
    Message,
    Simulation,
    StageCost,
    Table,
    homes,
    messages,
    simulate,
    source,
    table,
    validate,
)

KINDS = [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("interleaved", 4), ("v", 2)]


def settings(ranks: list[int], micros: list[int]) -> Iterator[tuple]:
    """(schedule, pp, micro-batches, chunks, deferred) that there are tables for."""
    for (kind, chunks), pp, micro, deferred in itertools.product(KINDS, ranks, micros, (False, True)):
        if kind != "interleaved" or micro % pp == 0:
            yield kind, pp, micro, chunks, deferred


def run(made: Table) -> None:
    """Ranks that see only their own row and read each edge as a queue, keeping what comes before its turn.

    As the runtime will: an assertion unless all come to their ends and all that was sent was used.
    """
    sends = messages(made)
    queues: dict[tuple[int, int], deque[Message]] = {edge: deque() for edge in sends}
    expected = {
        edge: deque(sent) for edge, sent in sends.items()
    }  # what the receiver's copy of the table says
    done: set[Action] = set()
    sent_by: set[Message] = set()

    def work(rank: int) -> Iterator[bool]:
        """Yields whether it came further."""
        here: set[Message] = set()
        for action in made.ranks[rank]:
            op, chunk, micro = action
            if op in "BIW":
                assert Action("I" if op == "W" else "F", chunk, micro) in done
            for need in made.needs(action):
                edge = source(made, need), rank
                while edge[0] != rank and need not in here:
                    while not queues[edge]:
                        yield False
                    assert queues[edge][0] == expected[edge].popleft(), "not the message that was expected"
                    here.add(queues[edge].popleft())
                here.discard(need)
                assert need in sent_by
            assert action not in done
            done.add(action)
            for result in made.results(action):
                sent_by.add(result)
                if made.places[result.chunk] != rank:
                    queues[rank, made.places[result.chunk]].append(result)
            yield True
        assert not here

    running = [work(rank) for rank in range(len(made.ranks))]
    while running:
        steps = [next(one, None) for one in running]
        assert any(step is not False for step in steps), "a deadlock"
        running = [one for one, step in zip(running, steps, strict=True) if step is not None]
    assert not any(queues.values()) and not any(expected.values())
    count = {op: sum(action.op == op for action in done) for op in "FBIW"}
    assert count["F"] == count["B"] + count["I"] and count["I"] == count["W"]


def check(kind: str, pp: int, micros: int, chunks: int, deferred: bool) -> Simulation:
    """One table: complete, without deadlock, within its limits; its bubble, where there is a formula."""
    made = table(kind, pp, micros, chunks, deferred=deferred)
    run(made)
    for row in made.ranks:
        assert len(row) == micros * chunks * (3 if deferred else 2)
        assert {op for op, *_ in row} == set("FIW" if deferred else "FB")
    found = simulate(made, EXPERTS if deferred else EVEN)
    if kind != "v" and not deferred:
        assert found.bubble == (pp - 1) / (chunks * micros + pp - 1)  # exactly: whole numbers are divided
        assert not any(found.kept)
    limits = {
        "1f1b": lambda r: pp - r,
        "interleaved": lambda r: 2 * (pp - r - 1) + (chunks - 1) * pp + 1,
        "v": lambda r: 2 * pp,
    }[kind]
    assert all(held <= min(limits(r), micros * chunks) for r, held in enumerate(found.held))
    if kind != "v":
        assert all(held == min(limits(r), micros * chunks) for r, held in enumerate(found.held))
    assert max(found.kept) <= pp * chunks
    assert max(found.stashed) <= 2 * pp
    return found


def test_tables_run_to_their_ends():
    for setting in settings([2, 3, 4, 7, 8], [1, 2, 3, 4, 8, 12, 14]):
        check(*setting)
    for setting in settings([16], [5, 32]):
        check(*setting)


@pytest.mark.slow
def test_tables_of_any_size_run_to_their_ends():
    """A draw from 2 to 16 ranks and 1 to 64 micro-batches. Another schedule.py draws other settings."""
    everything = list(settings(list(range(2, 17)), list(range(1, 65))))
    source = Path(pipeline_schedule.__file__).read_bytes()
    for setting in random.Random(source).sample(everything, 120):
        check(*setting)


# PARALLEL.md's table of the first greedy V, in percent, whose W were not limited
@pytest.mark.parametrize(
    ("pp", "micros", "percent", "better"), [(4, 8, 11.8, 8.9), (8, 32, 12.1, 5.4), (8, 64, 3.9, 2.8)]
)
def test_v_with_deferred_weights(pp, micros, percent, better):
    found = check("v", pp, micros, 2, True)
    assert 100 * found.bubble <= percent and max(found.held) <= 2 * pp and max(found.kept) <= 2 * pp
    more = simulate(table("v", pp, micros, 2, deferred=True, bounds=Bounds(waiting=4 * pp)), EXPERTS)
    assert 100 * more.bubble <= better
    assert found.time < simulate(table("1f1b", pp, micros, deferred=True), StageCost(200, 310, 90)).time


def test_deferred_weights_shorten_every_schedule():
    for kind, chunks in KINDS:
        plain, deferred = (
            simulate(table(kind, 4, 16, chunks, deferred=d), EXPERTS).time for d in (False, True)
        )
        assert deferred < plain


HEADS = [("1f1b", 1, (0, 1)), ("1f1b", 1, (2,)), ("interleaved", 2, (0, 1, 2)), ("v", 2, (1, 2))]


@pytest.mark.parametrize(("kind", "chunks", "heads"), HEADS)
@pytest.mark.parametrize("deferred", [False, True])
def test_a_divided_head_runs_to_its_end(kind, chunks, heads, deferred):
    """Pieces of the head on any ranks: complete, without deadlock, within 1F1B's memory and one more."""
    for pp, micros in itertools.product((3, 4), (4 * 3, 24)):
        made = table(kind, pp, micros, chunks, deferred=deferred, heads=heads)
        run(made)
        found = simulate(made)
        ops = [action for row in made.ranks for action in row]
        assert sum(action.op == "H" for action in ops) == micros * len(heads)
        most = {"1f1b": pp + 1, "interleaved": 2 * (pp - 1) + pp + 1, "v": 2 * pp}[kind]
        assert max(found.held) <= most
        for rank, row in enumerate(pipeline_posts.posts(made, [EVEN] * len(made.places))):
            posted: list[Message] = []
            for action, due in zip(made.ranks[rank], row, strict=True):
                posted += due
                here = [m for m in made.needs(action) if source(made, m) != rank]
                assert set(here) <= set(posted), "a receive that was not posted before its use"
            for (_, target), sent in messages(made).items():
                if target == rank:
                    assert [m for m in posted if m in set(sent)] == list(sent), "not the sender's order"


def test_a_divided_head_by_hand():
    """Two stages of 2 + 4 s a micro-batch, a head of 4 s: halves run where they find the first free moment.

    Rank 0 waits for h from 4 on (two forwards ahead), computes its half until 6, then the third forward.
    """
    blocks, half = StageCost(2, 2, 2), StageCost(2, 0, 0)
    made = table("1f1b", 2, 1, cost=(blocks, blocks, half, half), heads=(0, 1))
    assert made.ranks[0] == (Action("F", 0, 0), Action("H", 2, 0), Action("B", 0, 0))
    assert made.ranks[1] == (Action("F", 1, 0), Action("H", 3, 0), Action("B", 1, 0))
    assert messages(made)[1, 0] == (Message("F", 2, 0), Message("B", 0, 0))
    assert messages(made)[0, 1] == (Message("F", 1, 0), Message("B", 1, 0, 0))
    assert simulate(made, (blocks, blocks, half, half)).time == 2 + 2 + 2 + 4 + 4
    many = (blocks, blocks, half, half)
    divided = simulate(table("1f1b", 2, 16, cost=many, heads=(0, 1)), many).time
    last = simulate(table("1f1b", 2, 16), (blocks, StageCost(6, 2, 2))).time
    assert last == 16 * 10 + 6 and divided <= 16 * 8 + 12


def test_receives_are_posted_in_the_action_in_which_they_are_due():
    """1F1B of two stages: stage 1 takes 2 s for F and 4 for B, stage 0 half as long.

    Stage 0: F0 0-1, F1 1-2, then it is idle until B0 is sent at 1 + 2 + 4 = 7.
    """
    made = table("1f1b", 2, 2)
    rows = pipeline_posts.posts(made, [StageCost(1, 1, 1), StageCost(2, 2, 2)])
    assert [op for op, *_ in made.ranks[0]] == ["F", "F", "B", "B"]
    # stage 0 is idle when each gradient arrives: no kernel of its own runs beside the receives
    assert rows[0] == ((), (), (Message("B", 0, 0),), (Message("B", 0, 1),))
    assert [op for op, *_ in made.ranks[1]] == ["F", "B", "F", "B"]
    # F1 arrives at 2, while stage 1 computes F0
    assert rows[1] == ((Message("F", 1, 0), Message("F", 1, 1)), (), (), ())


def test_1f1b_by_hand():
    made = table("1f1b", 2, 3)
    assert ["".join(f"{op}{m}" for op, _, m in row) for row in made.ranks] == ["F0F1B0F2B1B2", "F0B0F1B1F2B2"]
    assert made.home == (0, 1)
    assert messages(made) == {
        (0, 1): tuple(Message("F", 1, m) for m in range(3)),
        (1, 0): tuple(Message("B", 0, m) for m in range(3)),
    }
    assert simulate(made) == Simulation(12, 0.25, (2, 1), (0, 0), (0, 1))


def test_homes():
    assert table("v", 3, 1, 2).home == (0, 1, 2, 2, 1, 0)
    assert table("interleaved", 3, 3, 2).home == (0, 1, 2, 0, 1, 2)
    assert (2, 2) not in messages(table("v", 3, 4, 2))


def test_a_table_for_16_ranks_is_quick():
    table.cache_clear()
    for kind, chunks in (("interleaved", 4), ("v", 2)):
        start = time.process_time()
        table(kind, 16, 64, chunks, deferred=True)
        assert time.process_time() - start < 3  # 0.3 to 0.5 s where nothing else runs


def test_limits_of_v_are_kept():
    for limit, waiting in itertools.product((2, 3, 5, 8), (1, 3)):
        made = table("v", 4, 9, 2, deferred=True, bounds=Bounds(limit, waiting))
        run(made)
        found = simulate(made)
        assert max(found.held) <= limit and max(found.kept) <= waiting


def test_each_chunk_has_its_own_cost():
    made = table("1f1b", 2, 2)
    found = simulate(made, [StageCost(1, 1, 1), StageCost(2, 3, 1)])
    assert found.time == 1 + 2 * 6 + 2 and found.bubble == pytest.approx(1 - 18 / 30)
    assert simulate(made, latency=5).time == simulate(made).time + 2 * 5
    with pytest.raises(ValueError, match="3 costs for 2 chunks"):
        simulate(made, [EVEN] * 3)


def changed(made: Table, rank: int, *row: Action) -> Table:
    return made._replace(ranks=(*made.ranks[:rank], row, *made.ranks[rank + 1 :]))


def test_a_wrong_table_is_found():
    made = table("1f1b", 2, 2)
    first = made.ranks[0]
    one_by_one = changed(made, 0, *(first[i] for i in (0, 2, 1, 3)))
    simulate(one_by_one)
    with pytest.raises(ValueError, match="a deadlock: rank 0 before B0 of 0, rank 1 before F1 of 1"):
        simulate(changed(one_by_one, 1, *(made.ranks[1][i] for i in (2, 3, 0, 1))))
    for row in (first[:-1], (*first, first[0]), (first[2], *first[:2], first[3])):
        with pytest.raises(ValueError, match="valid: FB or FIW, in this order"):
            simulate(changed(made, 0, *row))
    with pytest.raises(ValueError, match="chunk 1 is rank 1's"):
        simulate(changed(made, 0, *made.ranks[1]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("zigzag", 2, 4, 1), r"--parallel.schedule=zigzag: valid: 1f1b, interleaved, v"),
        (("1f1b", 0, 4, 1), r"--parallel.pp=0: must be a whole number from 1 on"),
        (("1f1b", 2, 2.0, 1), r"--train.accumulate=2.0: must be a whole number"),
        (("1f1b", 2, 4, True), r"--parallel.chunks=True: must be a whole number"),
        (("1f1b", 2, 4, 2), r"--parallel.schedule=1f1b with --parallel.chunks=2: valid: 1"),
        (("interleaved", 2, 4, 1), r"--parallel.schedule=interleaved with --parallel.chunks=1: .* from 2 on"),
        (("interleaved", 4, 6, 2), r"--parallel.pp=4: --train.accumulate=6 must be .* pp; valid: 4 or 8"),
        (("interleaved", 4, 3, 2), r"--parallel.pp=4: --train.accumulate=3 must be .* pp; valid: 4$"),
        (("v", 2, 4, 1), r"--parallel.schedule=v with --parallel.chunks=1: valid: 2"),
        (("v", 1, 4, 2), r"--parallel.schedule=v with --parallel.pp=1: valid: --parallel.pp from 2 on"),
        (("v", 4, 4, 2, 7), r"--parallel.pp=4 x --parallel.chunks=2: more chunks than --model.layers=7"),
    ],
)
def test_what_cannot_be_is_refused_by_flag(given, message):
    with pytest.raises(ValueError, match=message):
        validate(*given)
    if len(given) == 4:
        with pytest.raises(ValueError, match=message):
            table(*given)


def test_what_can_be_is_not():
    validate("1f1b", 1, 1, 1, 1)
    validate("v", 4, 1, 2, 8)
    run(table("1f1b", 1, 3))


def all_cuts(layers: int, chunks: int) -> Iterator[list[range]]:
    for inner in itertools.combinations(range(1, layers), chunks - 1):
        yield [range(a, b) for a, b in itertools.pairwise((0, *inner, layers))]


def test_cuts_are_the_best_there_are():
    draw = random.Random(0)
    for layers, trial in itertools.product(range(1, 10), range(12)):
        chunks = draw.randint(1, layers)
        costs = [draw.choice((0, 1, 2, 5)) if trial % 2 else draw.random() for _ in range(layers)]
        first, last = draw.choice((0, 1.5, 9)), draw.choice((0, 3))

        def loads(spans, costs=costs, first=first, last=last):
            found = [sum(costs[i] for i in span) for span in spans]
            found[0] += first
            found[-1] += last
            return found

        got = cut(layers, chunks, costs, first, last)
        assert [i for span in got for i in span] == list(range(layers)) and all(got) and len(got) == chunks
        options = [loads(spans) for spans in all_cuts(layers, chunks)]
        most = min(map(max, options))
        squares = min(sum(x * x for x in one) for one in options if max(one) <= most + 1e-9)
        assert max(loads(got)) == pytest.approx(most)
        assert sum(x * x for x in loads(got)) == pytest.approx(squares)


def every_division(blocks: int, chunks: int) -> Iterator[tuple[int, ...]]:
    for spans in all_cuts(blocks, chunks):
        yield tuple(len(span) for span in spans)


@pytest.mark.parametrize("divided", [False, True])
def test_the_busiest_rank_has_the_least_work_that_whole_blocks_allow(divided):
    draw = random.Random(1)
    for _ in range(40):
        pp, chunks = draw.choice([(2, 1), (2, 2), (3, 1), (3, 2)])
        kind = draw.choice(["interleaved", "v"] if chunks == 2 else ["1f1b"])
        place = homes(kind, pp, chunks)
        blocks = draw.randint(pp * chunks, 9)
        costs, first, head = (100,) * blocks, draw.randint(0, 30), draw.randint(0, 700)

        def most(sizes, place=place, first=first, head=head, pp=pp):
            loads = [0] * pp
            for rank, size in zip(place, sizes, strict=True):
                loads[rank] += 100 * size
            loads[place[0]] += first
            if not divided:
                loads[place[-1]] += head
                return max(loads)

            # the lowest level at which all of the head has room
            def reaches(level, loads=loads, head=head):
                return sum(max(0, level - x) for x in loads) >= head and level >= max(loads)

            return bisect.bisect_left(range(3000), True, key=reaches)

        got = divide(costs, place, first, head, divided=divided)
        sizes = tuple(len(span) for span in got.spans)
        assert sum(sizes) == blocks and min(sizes) > 0
        assert most(sizes) == min(map(most, every_division(blocks, pp * chunks)))
        assert divided or not got.pieces
        if divided:
            assert sum(n for _, n in got.pieces) == PARTS
            tokens = got.tokens(100)
            assert [t for piece in tokens for t in piece] == list(range(100))


def test_a_head_that_outweighs_a_stage_is_divided_by_hand():
    """Six blocks of 10 and a head of 30 on two ranks: 45 each, so the first computes half of the head."""
    got = divide((10,) * 6, (0, 1), 0, 30, divided=True)
    assert [len(span) for span in got.spans] == [3, 3] and got.pieces == ((0, 32), (1, 32))
    given = divide((10,) * 6, (0, 1), 0, 30, divided=True, sizes=(4, 2))
    assert given.pieces == ((0, 11), (1, 53))  # 5 and 25 of 30, in 64ths
    assert [len(span) for span in divide((10,) * 6, (0, 1), 0, 30).spans] == [4, 2]
    # in a V the first rank has the last chunk too
    assert [len(span) for span in divide((10,) * 6, (0, 1, 1, 0), 0, 30).spans] == [1, 2, 2, 1]


def test_what_is_left_goes_to_later_chunks():
    assert [len(span) for span in cut(10, 4)] == [2, 2, 3, 3]
    assert [len(span) for span in cut(8, 4)] == [2, 2, 2, 2]
    assert [len(span) for span in cut(48, 8, last=2.5)] == [6, 6, 6, 6, 6, 7, 7, 4]
    assert [len(span) for span in cut(6, 3, first=1, last=1)] == [1, 3, 2]
    assert [len(span) for span in cut(3, 3, [9, 1, 1], last=50)] == [1, 1, 1]


def test_a_large_cut_is_quick():
    start = time.process_time()
    spans = cut(512, 64, [1 + i % 7 for i in range(512)], 3, 9)
    assert time.process_time() - start < 2 and len(spans) == 64


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((3, 4), r"4 chunks .*--parallel.pp times --parallel.chunks.*: more chunks than --model.layers=3"),
        ((3, 0), r"0 chunks"),
        ((3, 2, [1, 2]), r"2 costs: must be one for each of --model.layers=3 blocks"),
        ((2, 2, [1, -2]), r"must be finite and at least 0"),
        ((2, 2, [1, math.nan]), r"must be finite and at least 0"),
        ((2, 2, None, math.inf), r"must be finite and at least 0"),
    ],
)
def test_cuts_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        cut(*given)
