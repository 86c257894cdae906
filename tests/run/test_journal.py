"""Collectives are compared within their group: other groups may differ, and a rank that strays is named."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tmoe.run import process as runtime
from tmoe.run.watch import DivergenceError
from tmoe.run.watch.failure_messages import explain
from tmoe.run.watch.heartbeat import Heartbeat
from tmoe.run.watch.journal import METHODS, Journal, attach, detach, parting, spell

HALVES = " among ranks 0, 1", " among ranks 2, 3"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((3,), "3"),
        ((0, 5), "0, 5"),
        ((4, 5, 6), "4 to 6"),
        ((1, 5, 9, 13), "1 to 13 by 4"),
        ((0, 1, 3), "0, 1, 3"),
    ],
)
def test_ranks_in_words_name_the_ranks(ranks, words):
    """What `spell` writes, `parting` reads: a rank of the group that lacks the call is named."""
    assert spell(ranks) == words
    line = f"a{'' if len(ranks) < 2 else ' among ranks ' + words}"
    journals = {rank: [line] for rank in ranks} | {99: []}
    assert len(ranks) < 2 or parting(journals) is None
    journals[ranks[-1]] = []
    assert len(ranks) < 2 or f"rank {ranks[-1]}: nothing yet" in str(parting(journals))


def test_the_first_other_path_is_named():
    """By hand: rank 1 skips a call of its half, and then waits for the world with the others."""
    first, second = (f"x{half}" for half in HALVES)
    right = {0: [first, "w"], 1: [first, "w"], 2: [second, second, "w"], 3: [second, second, "w"]}
    assert parting(right) is None
    says = parting(right | {1: ["w"]})
    assert says == f"the ranks' collectives part at number 1: rank 0: {first}; rank 1: w"
    says = parting(right | {3: [second, "w"]})
    assert says == f"the ranks' collectives part at number 2: rank 2: {second}; rank 3: w"
    # a rank that has made fewer calls may only be late, or gone
    late = right | {2: [second], 3: [second, second]}
    assert "rank 2: nothing yet" in str(parting(late)) and parting(late, skipped=False) is None


def halves(rank: int, world: int, how: str) -> str:
    """A step in which each half of the ranks adds up vectors of lengths of its own."""
    watch = runtime.start(0).watch
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    with watch:
        for step in watch.watched_steps(range(2)):
            dist.all_reduce(torch.ones(3 + 2 * (rank // 2)), group=mine)
            for _ in range(rank // 2):  # one half has more to add up than the other
                dist.all_reduce(torch.ones(2), group=mine)
            if how == "skips" and rank == 3:
                pass
            elif how == "kinds" and rank == 0 and step:
                dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX, group=mine)
            else:
                dist.all_reduce(torch.ones(2), group=mine)
            if how == "skips" and rank == 3:
                dist.all_reduce(torch.full((2,), 7.0), group=mine)
            dist.all_reduce(torch.ones(4))
            try:
                watch.compare_calls()
            except DivergenceError as error:
                watch.heart.begin_journal()
                return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("", ""),
        ("skips", "step 1: the ranks' collectives part at number 3: rank 2: all_reduce of 2 float32 sum at"),
        ("kinds", "step 2: the ranks' collectives part at number 2: rank 0: all_reduce of 2 float32 max at"),
    ],
)
def test_groups_may_differ_and_their_members_may_not(gloo, how, says):
    for said in gloo(4, halves, how):
        assert said.startswith(says) and bool(said) == bool(says), said
        assert not says or ("among ranks 2, 3" if how == "skips" else "among ranks 0, 1") in said


def test_a_jump_of_the_wall_clock_is_no_silence_and_hides_none(monkeypatch):
    """Rank 1 was last heard of 3 s ago, and rank 2 a moment ago, whatever date it is."""
    store = dist.HashStore()
    hearts = [Heartbeat(rank, 3, Journal(rank, 3)) for rank in range(3)]
    jumps = iter(range(0, 10**9, 10**7))
    monkeypatch.setattr(time, "time", lambda: 1.7e9 + (-1) ** next(jumps) * next(jumps))
    for heart in hearts:
        heart.store = store
        heart.begin_journal()
    hearts[1].began += 3.0  # it wrote at an earlier time
    for heart in hearts:
        heart.publish()
    before = hearts[0].hear()
    hearts[2].publish()
    text = explain(0, 3, before, hearts[0].hear(), hearts[0].now(), "rank 0 ended")
    assert text[0].startswith("rank 1 is silent for 3.0 s"), text
    assert not any("rank 2 is silent" in line for line in text), text


def test_detach_restores_what_attach_replaced():
    before = {name: method for name, method in vars(dist.ProcessGroup).items() if name in METHODS}
    originals = attach(lambda *heard: None)
    try:
        assert before and originals == before
        assert not any(vars(dist.ProcessGroup)[name] is method for name, method in before.items())
    finally:
        detach(originals)
    assert {name: vars(dist.ProcessGroup)[name] for name in before} == before
