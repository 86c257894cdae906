"""What whole-step benchmarks write down: the line and trace of benchmarks/train.py, and a table.

The table is that of benchmarks/scaling.py.

next: cost/test_step_time.py
"""

import contextlib
import json
import math
import subprocess
import sys
from pathlib import Path

import forked
import pytest

from benchmarks import scaling
from benchmarks import train as steps
from benchmarks.cost.points import read_points
from tmoe.config.axes import ALONE, Axes

ROOT = Path(__file__).parents[2]


def test_busiest_rank_worked_by_hand():
    """Ranks of two experts: 60 and 40 of 100 pairs, then 10 and 90; a rank alone is its own mean."""
    counts = [[50, 10, 40, 0], [10, 0, 30, 60]]
    assert steps.busiest_rank(counts, 2) == pytest.approx((1.2 + 1.8) / 2)
    assert steps.busiest_rank(counts, 4) == pytest.approx((2.0 + 2.4) / 2)
    assert steps.busiest_rank(counts, 1) == steps.busiest_rank(None, 4) == 1.0


@pytest.mark.parametrize("killed", [False, True])
def test_a_step_is_written_down_before_its_trace_is_read(tmp_path, monkeypatch, capsys, killed):
    """A run that ends while it reads the trace has left table and line.

    Otherwise the trace joins the line, which stays one line.
    """
    record = json.loads((ROOT / "benchmarks/results/steps-4xH200/bench.jsonl").read_text().splitlines()[0])
    keys = "command tflops_gpu mfu start_s first_loss last_loss".split()
    result = {key: record[key] for key in keys}
    result |= dict(gpus=4, tokens_per_s_gpu=31200.0, peak_gib=85.2)
    out = tmp_path / "deep" / "out.jsonl"

    def read(path):
        last = json.loads(out.read_text().splitlines()[-1])
        assert last["tokens_per_s_gpu"] == 31200.0 and "trace_ms" not in last
        assert "| 4 | 31,200 |" in capsys.readouterr().out
        if killed:
            raise KeyboardInterrupt
        return {"ms": 2.0, "GPU idle": 1.0}, [("kernel", 7.4, 3)], {"kernel": 1.0}

    monkeypatch.setattr(steps, "measure", lambda *args: result)
    monkeypatch.setattr(steps, "read", read)
    monkeypatch.setattr(sys, "argv", ["train", "--trace", "--json", str(out), "--", "tiny"])
    for count in (1, 2):
        if killed:
            with pytest.raises(KeyboardInterrupt):
                steps.main()
        else:
            steps.main()
            assert (
                "| GPU idle | 1.00 | 50.0% |\n| idle before `kernel` | 1.00 | 50.0% |"
                in capsys.readouterr().out
            )
        lines = [json.loads(text) for text in out.read_text().splitlines()]
        assert len(lines) == count
        assert all(("kernels" in line) is not killed for line in lines)
    assert killed or lines[0]["kernels"] == [["kernel", 7, 3]]


def test_scaling_layouts_and_table():
    assert scaling.layouts(1) == [(1, 1)]
    assert scaling.layouts(3) == [(1, 1), (2, 2)]
    assert scaling.layouts(8) == [(1, 1), (2, 2), (4, 4), (4, 2), (8, 8), (8, 2)]
    done = dict(mfu=0.4, peak_gib=10.0, start_s=3.0)
    results = [
        dict(gpus=1, ep=1, tokens_per_s_gpu=2000.0, **done),
        dict(gpus=2, ep=2, failure="train.py ended with code 1"),
        dict(gpus=4, ep=2, tokens_per_s_gpu=1500.0, **done),
    ]
    table = scaling.table(results)
    assert "| 2 | 1 x 2 | train.py ended with code 1 |" in table
    assert "| 4 | 2 x 2 | 1,500 | 75.0% | 40.0% | 10.0 | 3.0 |" in table


@pytest.mark.slow
def test_scaling_on_two_processes(tmp_path):
    """One process, then two with the experts between them, from one command.

    Its lines are what the cost model checks.
    """
    words = (
        "tiny --no-compile --log.no-progress --log.no-report --model.layers 1 --train.eval-batches 1".split()
    )
    out = tmp_path / "scaling.jsonl"
    options = "--gpus 2 --steps 12 --json".split()
    done = forked.run(["-m", "benchmarks.scaling", *options, out, "--", *words])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| 1 | 1 x 1 |" in done.stdout and "| 2 | 1 x 2 |" in done.stdout
    records = [json.loads(text) for text in out.read_text().splitlines()]
    assert [(r["gpus"], r["ep"]) for r in records] == [(1, 1), (2, 2)]
    assert records[1]["tokens_per_step"] == 2 * records[0]["tokens_per_step"], "weak: the same tokens a GPU"
    points = read_points([out])
    assert [p.axes for p in points] == [ALONE, Axes(ep=2)] and all(math.isfinite(p.seconds) for p in points)


def test_a_run_that_does_not_end_is_given_up(monkeypatch, tmp_path):
    """It counts as failed, and the runs after it are still started."""

    @contextlib.contextmanager
    def endless(command, env=None):
        (tmp_path / "metrics.jsonl").write_text("{}\n{}\n")
        with subprocess.Popen(["sleep", "60"]) as process:
            try:
                yield process
            finally:
                process.kill()

    monkeypatch.setattr(steps, "running", endless)
    with pytest.raises(SystemExit, match=r"not done within 1\.5 s, after 2 lines"):
        steps.launch(1, 12, ["tiny"], tmp_path, 1.5, None)


def test_scaling_goes_on_after_a_failure(monkeypatch, capsys, tmp_path):
    def measure(gpus, steps, words, out, timeout):
        if gpus == 2:
            raise SystemExit("train.py ended with code 1")
        return dict(tokens_per_s_gpu=100.0, mfu=None, peak_gib=1.0, start_s=1.0, words=words)

    monkeypatch.setattr(scaling, "measure", measure)
    monkeypatch.setattr(
        sys, "argv", ["scaling", "--gpus", "4", "--json", str(tmp_path / "s.jsonl"), "--", "tiny"]
    )
    with pytest.raises(SystemExit) as ended:
        scaling.main()
    assert ended.value.code == 1
    assert "| 2 | 1 x 2 | train.py ended with code 1" in capsys.readouterr().out
    kept = [json.loads(text) for text in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [(r["gpus"], r["words"]) for r in kept] == [
        (1, ["tiny", "--parallel.ep", "1"]),
        (4, ["tiny", "--parallel.ep", "4"]),
        (4, ["tiny", "--parallel.ep", "2"]),
    ]
