"""The table of benchmarks.axes: measured beside predicted, by layout, and what each axis stands on."""

import json
import sys

import pytest

from benchmarks import axes
from benchmarks.cost import constants
from benchmarks.cost.points import RESULTS

LINES = RESULTS / "axes/2xH100-olmoe-4-layers.jsonl"
SHIPPED = json.loads(constants.CONSTANTS.read_text())


def test_the_table_has_prediction_and_ratio_beside_each_measured_step(monkeypatch, capsys, tmp_path):
    """The shipped steps once more, without running them: 114.6 ms with tp 2, 106.3 predicted (the docs)."""
    by_layout = {line["layout"]: line for line in map(json.loads, LINES.read_text().splitlines())}

    def measured(gpus, steps, words, out, timeout):
        if "--parallel.pp" in words:
            raise SystemExit("no step within 300 s")
        return dict(by_layout["tp2" if "--parallel.tp" in words else "dp2"])

    monkeypatch.setattr(axes, "measure", measured)
    to = tmp_path / "lines.jsonl"
    words = ["--only", "dp2", "tp2", "pp2 v", "--json", str(to), "--", "olmoe-1b-7b", "--train.batch", "4"]
    monkeypatch.setattr(sys, "argv", ["axes", *words])
    axes.main()
    table = capsys.readouterr().out.split(axes.HEAD)[1].strip().splitlines()
    assert table[0].split()[:4] == ["dp2", "105.0", "101.0", "0.962"] and table[0].endswith("dp measured")
    assert table[1].split()[:4] == ["tp2", "114.6", "106.3", "0.928"]
    assert table[1].endswith("tp assumed: tp_factor")
    assert table[2].split(maxsplit=2)[2] == "failed: no step within 300 s"
    written = [json.loads(line) for line in to.read_text().splitlines()]
    assert [round(line.get("predicted_ms", 0)) for line in written] == [101, 106, 0]


def test_a_step_that_the_model_is_not_for_says_so():
    line = json.loads(LINES.read_text().splitlines()[0])
    line["command"] += " --train.dtype fp32"
    result = line | axes.prediction(line, SHIPPED)
    assert result["predicted_ms"] is None and "--train.dtype=fp32" in axes.row("dp2", result)


@pytest.mark.parametrize(("gpus", "batch"), [(2, 4), (2, 1), (4, 3)])
def test_every_layout_has_the_same_global_batch(gpus, batch):
    from tmoe.cli.parse import parse
    from tmoe.config.axes import Axes

    for name, words in axes.layouts(gpus, batch):
        cfg = parse(["olmoe-1b-7b", *words], "", world=gpus)
        readers = Axes.of(cfg.parallel, gpus).readers
        assert readers * cfg.train.batch * cfg.train.accumulate == gpus * batch, name


def test_an_unknown_layout_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["axes", "--only", "tp3", "--", "tiny"])
    with pytest.raises(SystemExit):
        axes.main()
    assert "--only tp3: valid: dp2, ep2, tp2" in capsys.readouterr().err


def test_each_axis_says_what_it_stands_on():
    said = constants.standing(SHIPPED)
    assert said["dp"] == said["ep"] == "measured" and said["pp"] == "assumed: message"
    measured = SHIPPED | {"tp_factor": SHIPPED["tp_factor"] | {"how": "fitted"}}
    assert constants.standing(measured) == said | {"tp": "fitted"}
