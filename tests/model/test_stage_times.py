"""A pipeline is cut by seconds that depend on the settings alone; what does not fit is refused by name."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tmoe.checkpoint import resume
from tmoe.config.axes import Axes
from tmoe.config.check import ConfigError
from tmoe.config.presets import presets
from tmoe.config.run import Config, require_cut
from tmoe.model.stage_times import block_cost, chunk_costs, division, ends_cost, h200, stage_table
from tmoe.parallel.pipeline_schedule import simulate

QWEN = presets()["qwen3-30b-a3b"]
AXES = Axes(pp=2)


def laid(layers: int = 6, base: Config = QWEN, **parallel) -> Config:
    model = replace(base.model, layers=layers)
    train = replace(base.train, batch=2, accumulate=8)
    return replace(base, model=model, train=train, parallel=replace(base.parallel, pp=2, **parallel))


def loads(cfg: Config) -> list[float]:
    """Seconds of each stage in one micro-batch, the head's included."""
    found = division(cfg, AXES)
    places = stage_table(cfg, AXES).places
    ranks = [0.0] * AXES.pp
    for rank, cost in zip(places, chunk_costs(cfg, AXES, found), strict=True):
        ranks[rank] += sum(cost)
    embedding, head = ends_cost(cfg, AXES, h200())
    ranks[0] += embedding
    if not found.pieces:
        ranks[places[-1]] += sum(head)
    return ranks


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "v"])
def test_a_divided_head_makes_stages_equal(schedule):
    last, divided = (loads(laid(schedule=schedule, head=head)) for head in ("last", "divided"))
    assert max(divided) <= 1.02 * sum(divided) / 2  # to a part of the head
    assert max(divided) < 0.98 * max(last)
    assert sum(divided) == pytest.approx(sum(last))
    cfg = laid(schedule=schedule, head="divided")
    table = stage_table(cfg, AXES)
    assert simulate(table, chunk_costs(cfg, AXES, division(cfg, AXES))).time > 8 * max(divided) - 1e-9


def test_a_head_counts_its_time_not_its_numbers():
    """The head has 5.5 times the active parameters of a block, but 2.3 to 3.2 times its time."""
    cfg = laid()
    block = sum(block_cost(cfg, AXES, 0, h200()))
    _, head = ends_cost(cfg, AXES, h200())
    assert 2.3 < sum(head) / block < 3.2
    assert [len(span) for span in division(cfg, AXES).spans] == [4, 2]


def test_dense_blocks_are_cheaper_than_sparse_ones():
    base = presets()["deepseek-v3"]
    cfg = laid(8, base)
    dense, sparse = (sum(block_cost(cfg, AXES, layer, h200())) for layer in (0, 7))
    assert dense < 0.9 * sparse  # the first three blocks have no experts
    mixed = replace(cfg, model=replace(cfg.model, dense_layers=5, vocab=1024))
    costs = [sum(block_cost(mixed, AXES, layer, h200())) for layer in range(8)]
    best = min(range(1, 8), key=lambda n: max(sum(costs[:n]), sum(costs[n:])))
    assert best == 5 and [len(span) for span in division(mixed, AXES).spans] == [5, 3]


def test_recomputed_blocks_and_adapters_change_the_cut():
    plain, again = (laid(checkpoint=policy) for policy in ("none", "block"))
    costs = [sum(block_cost(cfg, AXES, 0, h200())) for cfg in (plain, again)]
    assert costs[1] > 1.2 * costs[0]
    lora = replace(plain, lora=replace(plain.lora, rank=8))
    assert block_cost(lora, AXES, 0, h200()).weights == 0


def test_a_given_cut_is_taken_and_said():
    assert str(division(laid(cut=(5, 1)), AXES)) == "5,1 blocks"
    divided = str(division(laid(cut=(3, 3), head="divided"), AXES))
    assert divided.startswith("3,3 blocks and the head on stages 0 (")
    assert str(division(laid(), Axes())) == "6 blocks"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            dict(cut=(5,)),
            "parallel.cut=5: must be 2 whole numbers from 1 on, one for each part, whose sum is",
        ),
        (dict(cut=(5, 2)), "parallel.cut=5 2: must be 2 whole numbers"),
        (dict(cut=(6, 0)), "parallel.cut=6 0: must be 2 whole numbers"),
        (dict(cut=(4, 2), pp=1), "parallel.cut=4 2: needs --parallel.pp above 1"),
        (dict(head="divided", pp=1), "parallel.head=divided: needs --parallel.pp above 1; valid: last"),
        (dict(head="divided", task="preference"), "divided: --task=preference compares whole sequences"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(change, said):
    cfg, task = laid(), change.pop("task", "pretrain")
    with pytest.raises(ConfigError, match=re.escape(said)):
        require_cut(replace(cfg, task=task, parallel=replace(cfg.parallel, **change)))


def test_a_resumed_run_says_where_its_cut_differs(monkeypatch):
    def cut_of(info):
        monkeypatch.setattr(resume, "read_manifest", lambda _: SimpleNamespace(info=info))
        return [resume.other_cut("step-1", cut) for cut in ("4,2 blocks", "5,1 blocks", "")]

    said = "the pipeline is cut into 4,2 blocks (was 5,1 blocks)"
    assert cut_of({"cut": "5,1 blocks"}) == [[said], [], []]
    assert cut_of({}) == [[], [], []]  # of an older version, or of a run without a pipeline
