"""The picture of a run: what log/report.py gathers and draws, and says of files that no run wrote.

next: test_metrics.py
"""

import json
import os
import re
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
import tyro
from run_logs import config, routers, start, stats, step

from tmoe.commands import report as command
from tmoe.log import report

ROOT = Path(__file__).parents[2]


def is_picture(path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 20_000


def test_load_gathers_series_and_the_last_window(tmp_path):
    with start(config(tmp_path, steps=70)) as log:
        for number in range(70):
            step(log, number, val_loss=0.1 if number == 69 else None, lr=number / 100)
    run = report.load(tmp_path)
    assert run.steps.tolist() == list(range(1, 71))
    assert run.series["lr"].tolist() == [number / 100 for number in range(70)]
    assert np.isfinite(run.series["val_loss"]).sum() == 1
    want = sum(routers(number).counts_LE for number in range(20, 70))
    assert np.array_equal(run.counts, want.numpy())
    assert run.violation.shape == (70, 3)


def test_a_step_whose_line_was_lost_is_not_called_infinite(tmp_path):
    """A full disk may take a step's line and leave the one of its validation."""
    with start(config(tmp_path)) as log:
        for number in range(3):
            step(log, number, val_loss=2.0 + number, grad_norm=float("nan") if number == 0 else 1.0)
    file = tmp_path / "metrics.jsonl"
    kept = [text for text in file.read_text().splitlines(True) if not text.startswith('{"step":2,"tokens"')]
    file.write_text("".join(kept))
    run = report.load(tmp_path)
    assert run.steps.tolist() == [1, 2, 3] and run.series["val_loss"].tolist() == [2.0, 3.0, 4.0]
    titles = [axis.get_title(loc="left") for axis in report.paint(run).axes]
    assert "Gradient norm, 1 not finite" in titles


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("kind", ["one line", "resumed", "dense", "nulls", "idle layer"])
def test_every_kind_of_run_draws_without_warnings(tmp_path, kind):
    cfg = config(tmp_path, steps=12)
    nan = float("nan")
    changes = {
        "dense": dict(router=None),
        "nulls": dict(loss=nan, grad_norm=nan),
        "idle layer": dict(router=stats(torch.zeros(3, 6), torch.zeros(3), torch.zeros(3))),
    }.get(kind, {})
    for first, last in {"one line": [(0, 1)], "resumed": [(0, 8), (6, 12)]}.get(kind, [(0, 12)]):
        with start(cfg, start_step=first, peak=8e12) as log:
            for number in range(first, last):
                step(log, number, **changes)
    assert is_picture(tmp_path / "report.png")


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    "lines", [[(0.0, 5.0), (0.0, 5.0)], [(0.3, None), (None, 5.0)], [(0.0, 0.0), (0.0, 5.0)]], ids=str
)
def test_no_second_scale_without_a_ratio(tmp_path, lines):
    """The ratio is that of MFU to tokens a second: MFU is 0, or no line has both."""
    with start(config(tmp_path)) as log:
        for number in range(len(lines)):
            step(log, number)
    texts = (tmp_path / "metrics.jsonl").read_text().splitlines()
    changed = [json.loads(t) | dict(mfu=m, tokens_per_s=r) for t, (m, r) in zip(texts, lines, strict=True)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    (tmp_path / "report.png").unlink()
    report.draw(tmp_path)
    assert is_picture(tmp_path / "report.png")


def test_command_line_draws_a_bare_metrics_file(tmp_path, capsys):
    with start(config(tmp_path)) as log:
        step(log, 0)
        step(log, 1)
    (tmp_path / "report.png").unlink()
    (tmp_path / "config.json").unlink()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step":3,"lo')  # a run that is being written, or was killed
    tyro.cli(command.main, args=[str(tmp_path)])
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.png")
    assert is_picture(tmp_path / "report.png")


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"metrics\.jsonl: missing"):
        report.draw(tmp_path)


LINE = '{"step":0,"loss":1.0,"lr":0.1,"max_violation":[0.5],"expert_counts":[[1,2]]}\n'


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", "[]", "config.json: not of the run in metrics.jsonl: "),
        ("config.json", '{"parameters": 3}', "config.json: not of the run in metrics.jsonl: "),
        ("config.json", '{"starts": [3]}', "config.json: not of the run in metrics.jsonl: "),
        ("config.json", "{bad", "config.json: no config.json of a run: "),
        ("config.json", "[" * 200_000, "config.json: no config.json of a run: "),
        ("metrics.jsonl", LINE + LINE.replace("1.0", '"x"'), "metrics.jsonl:2: no line of a run: "),
        ("metrics.jsonl", LINE.replace("1.0", "1" * 400), "metrics.jsonl:1: no line of a run: "),
        ("metrics.jsonl", LINE.replace("[0.5]", "7"), "metrics.jsonl:1: no line of a run: "),
        (
            "metrics.jsonl",
            LINE + LINE.replace("[0.5]", "[0.5,1]"),
            "metrics.jsonl: lines of different models: ",
        ),
        ("metrics.jsonl", "[" * 200_000, "metrics.jsonl: holds no line to draw"),
        ("metrics.jsonl", None, "metrics.jsonl: missing; name a run folder"),
        ("report.png", None, "Is a directory: "),
    ],
)
def test_what_no_run_wrote_is_one_line(tmp_path, file, content, says):
    (tmp_path / "metrics.jsonl").write_text(LINE)
    if content is not None:
        (tmp_path / file).write_text(content)
    elif file == "report.png":
        (tmp_path / file).mkdir()
    else:
        (tmp_path / file).unlink()
    with pytest.raises((ValueError, OSError), match=re.escape(says)):
        report.draw(tmp_path)


def test_report_ends_with_one_line():
    done = forked.run(["-m", "tmoe.report", "/nope"])
    assert done.returncode == 2 and done.stderr == "error: /nope/metrics.jsonl: missing; name a run folder\n"


def test_names_that_are_no_text_or_look_like_formulas(tmp_path):
    for name in (b"costs $5_and_$6", b"\xffrun"):
        run = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
        run.mkdir()
        (run / "metrics.jsonl").write_text(LINE)
        ended = forked.run(["-m", "tmoe.report", run])
        assert ended.returncode == 0 and is_picture(run / "report.png"), ended.stderr
        assert ended.stdout == f"{tmp_path}/{name.decode(errors='replace')}/report.png\n"


def test_smoothing_ignores_spikes_and_gaps():
    values = np.full(200, 2.0)
    values[50] = 1e6
    values[60] = np.nan
    steps, smoothed = report.smooth(np.arange(200.0), values)
    assert (smoothed == 2.0).all() and 60 not in steps
    ramp = np.arange(1000.0)
    steps, smoothed = report.smooth(ramp, ramp)
    assert len(steps) == 400 and np.abs(smoothed - steps)[20:-20].max() <= 0.5
