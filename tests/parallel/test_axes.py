"""The degrees of all axes: what follows from them, and what cannot be."""

from dataclasses import FrozenInstanceError

import pytest

from tmoe.config.axes import ALONE, Axes
from tmoe.config.run import ParallelConfig


def test_counts_of_ranks_worked_by_hand():
    axes = Axes(pp=2, replicate=3, dp=2, ep=4, etp=2, tp=4, cp=2)
    assert axes.shard == 2 * 4 * 2 and axes.world == 2 * 3 * 16
    assert axes.readers == 3 * 16 // 8, "tp and cp share sequences, and so do the stages of a pipeline"
    assert Axes() == ALONE and (ALONE.world, ALONE.shard, ALONE.readers) == (1, 1, 1)


def test_a_value_that_can_be_a_key_and_cannot_change():
    assert len({Axes(dp=2), Axes(dp=2), Axes(ep=2)}) == 2
    with pytest.raises(FrozenInstanceError):
        ALONE.dp = 2


def test_words_name_what_is_more_than_1():
    assert str(ALONE) == "dp 1 x ep 1"
    assert f"{Axes(dp=2, ep=4)}" == "dp 2 x ep 4"
    assert str(Axes(dp=2, ep=4, pp=2, tp=8)) == "dp 2 x ep 4 x pp 2 x tp 8"


@pytest.mark.parametrize("world", [1, 2, 12])
@pytest.mark.parametrize("ep", [1, 2])
def test_settings_and_a_world_make_axes(world, ep):
    parallel = ParallelConfig(ep=ep)
    if world % ep:
        with pytest.raises(ValueError, match=r"ep=2: must divide the world of 1 processes; valid: \[1\]"):
            Axes.of(parallel, world)
    else:
        assert Axes.of(parallel, world) == Axes(dp=world // ep, ep=ep)


def test_what_tp_and_cp_must_divide():
    assert Axes(dp=2, ep=2, tp=2, cp=2).readers == 1
    with pytest.raises(ValueError, match=r"cp=2 x --parallel.tp=4: must divide dp x ep x etp = 4"):
        Axes(dp=2, ep=2, tp=4, cp=2)
    with pytest.raises(ValueError, match=r"--parallel.etp=0: must be a whole number from 1 on"):
        Axes(etp=0)
