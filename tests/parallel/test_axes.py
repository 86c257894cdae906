"""The degrees of all axes: what follows from them, and what cannot be."""

from dataclasses import FrozenInstanceError

import pytest

from tmoe.config.axes import ALONE, Axes
from tmoe.config.check import ConfigError
from tmoe.config.model import ModelConfig, MoEConfig
from tmoe.config.run import Config, ParallelConfig, TrainConfig


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
    with pytest.raises(
        ValueError, match=r"cp=2 x --parallel.tp=4 = 8: must divide dp x ep x etp = 4; valid: \[1, 2, 4\]"
    ):
        Axes(dp=2, ep=2, tp=4, cp=2)
    with pytest.raises(ValueError, match=r"--parallel.etp=0: must be a whole number from 1 on"):
        Axes(etp=0)


def test_places_are_those_of_the_picture_in_mesh():
    axes = Axes(pp=2, dp=2, ep=4, cp=2, tp=2)
    rows = {name: [getattr(axes.place(rank), name) for rank in range(8)] for name in axes.place(0)._fields}
    assert rows["dp"] == [0, 0, 0, 0, 1, 1, 1, 1] and rows["ep"] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert rows["reader"] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert rows["cp"] == [0, 0, 1, 1, 0, 0, 1, 1] and rows["tp"] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert all(axes.place(8 + rank) == axes.place(rank)._replace(pp=1) for rank in range(8))


@pytest.mark.parametrize(
    "axes", [Axes(replicate=2, dp=2, etp=3, ep=2, tp=2, cp=3), Axes(pp=3, etp=2, ep=2, cp=4)]
)
def test_places_are_one_to_one(axes):
    places = [axes.place(rank) for rank in range(axes.world)]
    for names in (("pp", "replicate", "dp", "etp", "ep"), ("pp", "reader", "cp", "tp")):
        assert len({tuple(getattr(place, name) for name in names) for place in places}) == axes.world
    assert {place.reader for place in places} == set(range(axes.readers))


LAYOUTS = [
    (
        dict(heads=4, kv_heads=2),
        dict(tp=3),
        r"--parallel.tp=3: must divide --model.heads=4 .* valid: \[1, 2, 4\]",
    ),
    (
        dict(heads=12, kv_heads=3),
        dict(tp=2),
        r"--parallel.tp=2: must .* fit 3 key heads; valid: \[1, 3, 6, 12\]",
    ),
    (
        dict(heads=4),
        dict(tp=2, cp=4, cp_exchange="heads"),
        r"--parallel.cp=4: must divide the 2 heads .* valid: \[1, 2\]",
    ),
    (dict(), dict(cp=8), r"--train.seq=24: must be a multiple of 16, into which --parallel.cp=8 divides"),
    (dict(), dict(schedule="v", chunks=3), r"--parallel.chunks=3: --parallel.schedule=v has 2"),
    (dict(), dict(chunks=2), r"--parallel.chunks=2: --parallel.schedule=1f1b has 1; use interleaved"),
    (dict(), dict(pp=4, schedule="v"), r"--parallel.pp=4 x 2 chunks: more than --model.layers=4"),
    (dict(), dict(pp=4), r"--train.accumulate=3: --parallel.pp=4 needs 4 micro-batches or more"),
    (
        dict(),
        dict(pp=2, schedule="interleaved"),
        r"accumulate=3: --parallel.schedule=interleaved needs a multiple",
    ),
    (dict(), dict(etp=5), r"--parallel.etp=5: must divide --model.moe.ffn-dim=96; valid: \[1, 2, 3, 4,"),
    (
        dict(),
        dict(etp=2, ep=2, dispatch="symm"),
        r"--parallel.dispatch=symm: --parallel.etp=2 needs auto or nccl",
    ),
]


@pytest.mark.parametrize(("model", "parallel", "says"), LAYOUTS)
def test_what_cannot_be_divided_is_named_before_any_process_group(model, parallel, says):
    model = dict(heads=8, kv_heads=4, layers=4) | model
    model = ModelConfig(moe=MoEConfig(experts=8, ffn_dim=96), **{"kv_heads": model["heads"]} | model)
    with pytest.raises(ConfigError, match=says):
        Config(model=model, train=TrainConfig(seq=24, accumulate=3), parallel=ParallelConfig(**parallel))
