"""One rank's failure and one rank's facts reach all ranks."""

import pytest
import torch.distributed as dist

from tmoe.parallel import agree


def fails_on_rank_1(rank, world):
    def work():
        if rank:
            raise ValueError("no such file")
        return "done"

    result, error, failures = agree.attempt(work, dist.group.WORLD)
    lines = agree.differing_facts(dict(seed=0, lr=0.1 * rank), dist.group.WORLD)
    return result, error and str(error), failures, lines, agree.gathered(rank, dist.group.WORLD)


def test_what_one_rank_meets_all_hear(gloo):
    failures = {1: "ValueError: no such file"}
    lines = ["lr: 0.1 on rank [1], 0.0 on rank 0; must be the same on all"]
    assert gloo(2, fails_on_rank_1) == [
        ("done", None, failures, lines, [0, 1]),
        (None, "no such file", failures, lines, [0, 1]),
    ]


def test_without_a_group_a_process_is_alone():
    assert agree.attempt(lambda: 7, None) == (7, None, {})
    assert agree.attempt(lambda: int("x"), None, words=lambda error: "")[2] == {0: ""}
    assert agree.differing_facts(dict(seed=0), None) == []
    with pytest.raises(ZeroDivisionError):
        agree.attempt(lambda: 1 / 0, None, errors=(ValueError,))


def test_ranks_of_one_reason_are_named_together():
    assert agree.by_reason({0: "a", 2: "b", 3: "a"}) == {"a": [0, 3], "b": [2]}
