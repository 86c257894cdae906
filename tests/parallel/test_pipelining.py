"""Messages between pipeline stages: pairs in rounds, and a first pass from host to host."""

import functools

import layouts
import pytest

from tmoe.parallel import pipelining
from tmoe.parallel.schedule import messages, table


@pytest.mark.parametrize(
    ("schedule", "pp", "chunks"),
    [("1f1b", 2, 1), ("1f1b", 5, 1), ("interleaved", 4, 2), ("interleaved", 3, 2), ("v", 4, 2), ("v", 5, 2)],
)
def test_rounds_have_every_pair_once_and_each_stage_once_a_round(schedule, pp, chunks):
    made = table(schedule, pp, 2 * pp, chunks)
    found = pipelining.rounds(made)
    pairs = [pair for one in found for pair in one]
    assert sorted(pairs) == sorted({(min(edge), max(edge)) for edge in messages(made)})
    for one in found:
        stages = [stage for pair in one for stage in pair]
        assert len(stages) == len(set(stages))


def first_pass_by_host(rank: int, world: int, **how) -> layouts.Curve:
    """Trains as layouts.train does; the first pass takes the way that it takes on GPUs."""
    pipelining.first_by_host = lambda: True
    return layouts.train(rank, world, **how)


def test_a_first_pass_from_host_to_host_is_the_same(gloo):
    how = dict(axes=dict(pp=2), micros=4, parallel=dict(schedule="interleaved"))
    plain = gloo(2, functools.partial(layouts.train, **how))[0]
    found = gloo(2, functools.partial(first_pass_by_host, **how))[0]
    layouts.assert_same(found, plain, limit=1e-9)
