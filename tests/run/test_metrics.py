"""The run folder: config.json, metrics.jsonl over restarts, throughput by a fake clock, sinks, progress.

And that a full disk does not end a run.
"""

import contextlib
import dataclasses
import errno
import json
import os
import re
import resource
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from run_logs import config, routers, start, stats, step

from tmoe.base import optional as onlookers
from tmoe.base import versions
from tmoe.cli.parse import parse
from tmoe.config.check import ConfigError
from tmoe.config.run import ParallelConfig
from tmoe.log import metrics as module
from tmoe.log import metrics_file as lines_module
from tmoe.log import progress, report
from tmoe.log.metrics import max_violation, to_host

ROOT = Path(__file__).parents[2]
KEYS = "step loss grad_norm lr tokens_per_s tflops mfu peak_gib tokens skipped seconds recompiles"
KEYS = {*KEYS.split(), "expert_counts", "max_violation", "entropy", "dropped", "router_losses"}


@pytest.fixture
def clock(monkeypatch):
    """time.perf_counter of the log, set by hand."""
    now = types.SimpleNamespace(time=1000.0)
    for part in (module, progress):
        monkeypatch.setattr(part.time, "perf_counter", lambda: now.time)
    return now


@pytest.fixture
def pictures():
    """For the tests that need report.png: drawing takes a second."""


@pytest.fixture(autouse=True)
def no_pictures_unasked(request, monkeypatch):
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(report, "draw", lambda path: path)


def lines(path) -> list[dict]:
    def refuse(word):
        raise AssertionError(f"{word} is not strict JSON")

    texts = (path / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(text, parse_constant=refuse) for text in texts]
    assert all(line.pop("from") == 1 for line in found)  # the mark of steps that are counted from 1
    return found


def steps(path):
    """The lines of each step as one, as every reader of the file takes them."""
    return [line for _, line in lines_module.read_steps(path / "metrics.jsonl")]


def test_a_line_holds_every_key_and_the_given_values(tmp_path):
    with start(config(tmp_path), peak=1e12) as log:
        step(log, 0, val_loss=2.5, skipped=3, recompiles=2)
    line, validated = lines(tmp_path)
    assert validated == {"step": 1, "val_loss": 2.5}
    assert set(line) == KEYS
    want = routers(0)
    assert line["expert_counts"] == want.counts_LE.int().tolist()
    assert all(isinstance(count, int) for row in line["expert_counts"] for count in row)
    fullest = want.counts_LE.double().max(1).values / want.counts_LE.double().mean(1) - 1
    assert line["max_violation"] == pytest.approx(fullest.tolist())
    assert line["entropy"] == pytest.approx(want.entropy_L.tolist())
    assert line["dropped"] == [0, 1, 2]
    assert (line["loss"], line["grad_norm"], line["lr"]) == (10.0, 1.5, 1e-3)
    assert (line["tokens"], line["skipped"], line["recompiles"]) == (100, 3, 2)
    assert 0.01 < line["peak_gib"] < 100  # this process imported torch


def test_what_is_not_finite_is_null_and_the_file_strict_json(tmp_path):
    seen = stats(torch.zeros(3, 6), torch.tensor([1.0, float("nan"), float("inf")]), torch.zeros(3))
    with start(config(tmp_path)) as log:
        step(log, 0, loss=torch.tensor(float("nan")), grad_norm=float("inf"), router=seen)
    (line,) = lines(tmp_path)
    assert line["loss"] is None and line["grad_norm"] is None
    assert line["entropy"] == [1.0, None, None]
    assert line["max_violation"] == [None] * 3  # nothing was routed


def test_max_violation_by_hand():
    assert max_violation([5, 5, 5, 5]) == 0.0
    assert max_violation([8, 0, 0, 0]) == 3.0
    assert max_violation([1, 2, 3]) == 0.5


def test_throughput_leaves_out_the_first_line_and_validation(tmp_path, clock):
    with start(config(tmp_path), peak=8e12) as log:
        clock.time += 60  # compilation
        step(log, 0, tokens=4000)
        clock.time += 2
        step(log, 1, tokens=8000)
        clock.time += 1
        with log.paused():
            clock.time += 30
        clock.time += 3
        step(log, 3, tokens=16000)
        with log.paused():
            clock.time += 50
        log.validated(1.0)
        clock.time += 4
        step(log, 4, tokens=20000)
    first, second, validated, last = steps(tmp_path)
    assert (first["tokens_per_s"], first["tflops"], first["mfu"]) == (None, None, None)
    assert second["tokens_per_s"] == 2000  # 4000 tokens in 2 s
    assert second["tflops"] == pytest.approx(1.0)  # 500 tokens/s a rank, 2 GFLOP a token
    assert second["mfu"] == pytest.approx(0.125)
    assert validated["tokens_per_s"] == 2000  # 8000 tokens in 1 + 3 s
    assert last["tokens_per_s"] == 1000
    assert [line["seconds"] for line in (first, second, validated, last)] == [60, 62, 96, 150]


def test_no_peak_no_mfu(tmp_path, clock):
    with start(config(tmp_path)) as log:
        step(log, 0)
        clock.time += 1
        step(log, 1)
    assert lines(tmp_path)[1]["mfu"] is None and lines(tmp_path)[1]["tflops"] > 0


def test_a_line_costs_one_copy_to_the_host(monkeypatch, tmp_path):
    copies = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: copies.append(t.numel()) or cpu(t))
    for name in ("item", "__float__", "__int__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, lambda t: pytest.fail("a second host sync"))
    with start(config(tmp_path)) as log:
        step(log, 0)
    assert copies == [2 + 3 * (6 + 1 + 1) + 3 * (6 + 6 + 2)]


def test_counts_beyond_fp32_integers_survive():
    counts = torch.tensor([[2**24 + 1, 2**31 + 1]])
    assert to_host({"counts": counts, "lr": 0.5}, torch.device("cpu")) == {
        "counts": [[2**24 + 1, 2**31 + 1]],
        "lr": 0.5,
    }


def test_other_ranks_write_and_read_nothing(tmp_path):
    class Untouchable:
        def __getattr__(self, name):
            raise AssertionError(f"{name} was read on a rank that writes nothing")

    path = tmp_path / "run"
    with start(config(path), rank=1) as log:
        step(log, 0, loss=Untouchable(), router=Untouchable())
        with log.paused():
            log.note("unseen")
    assert not path.exists()


def test_evaluation_alone_leaves_the_run_folder_as_it_was(tmp_path, capsys):
    with start(config(tmp_path)) as log:
        for number in (1, 2, 3):
            step(log, number)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with start(dataclasses.replace(config(tmp_path, progress=True), eval_only=True), start_step=1) as log:
        log.note("validation loss 1.0")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert capsys.readouterr().out == "validation loss 1.0\n"


def test_lines_for_the_first_every_nth_the_last_and_validated_steps(tmp_path, monkeypatch):
    copies = []
    monkeypatch.setattr(module, "to_host", lambda values, device: copies.append(1) or to_host(values, device))
    cfg = config(tmp_path, steps=12, eval_every=7, every=4)
    with start(cfg, start_step=2) as log:
        for number in range(2, 12):
            step(log, number, val_loss=1.0 if number == 6 else None)
    assert [line["step"] for line in steps(tmp_path)] == [3, 4, 7, 8, 12]
    assert len(copies) == 5  # no tensor is read for the others
    other = start(cfg, rank=1, start_step=2)
    assert [number for number in range(2, 12) if other.due(number)] == [2, 3, 6, 7, 11]


def test_a_validations_loss_is_a_line_of_its_own(tmp_path):
    with start(config(tmp_path)) as log:
        step(log, 0)
        step(log, 1)
        before = lines(tmp_path)
        log.validated(-1.2345678901234567e-123)
        assert lines(tmp_path) == [*before, {"step": 2, "val_loss": -1.2345678901234567e-123}]
        step(log, 2, val_loss=float("nan"))
        assert lines(tmp_path)[-1] == {"step": 3, "val_loss": None}
    joined = steps(tmp_path)
    assert joined[:2] == [before[0], before[1] | {"val_loss": -1.2345678901234567e-123}]
    assert joined[2].keys() == KEYS | {"val_loss"} and len(joined) == 3


@pytest.mark.parametrize("harm", ["cut", "replaced", "full", "line failed"])
def test_a_validations_loss_harms_no_line(tmp_path, capsys, harm):
    """Whatever became of its step's line, and of the file."""
    path = tmp_path / "metrics.jsonl"
    val_line = b'{"step":2,"val_loss":2.5,"from":1}\n'
    with start(config(tmp_path)) as log:
        step(log, 0)
        with room_for(path, 100) if harm == "line failed" else contextlib.nullcontext():
            step(log, 1)
        if harm == "cut":  # by logrotate, say
            os.truncate(path, 0)
        elif harm == "replaced":
            path.write_bytes(path.read_bytes().replace(b'"step":2', b'"step": 2'))
        before = path.read_bytes()
        with room_for(path, 10) if harm == "full" else contextlib.nullcontext():
            log.validated(2.5)
        assert path.read_bytes() == before + (b"" if harm == "full" else val_line)
    told = "metrics.jsonl: could not be written, training continues without it: "
    assert capsys.readouterr().out.count(told) == (harm in ("full", "line failed"))
    assert [line["step"] for line in steps(tmp_path)] == ([2] if harm == "cut" else [1, 2])


def test_a_kill_in_the_line_of_a_validation_costs_that_number_alone(tmp_path, capsys):
    with start(config(tmp_path)) as log:
        step(log, 0, val_loss=3.0)
        step(log, 1)
    whole = steps(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step":2,"val_lo')
    assert steps(tmp_path) == whole
    with start(config(tmp_path), start_step=2) as log:
        assert steps(tmp_path) == whole and "dropped 1 lines" in capsys.readouterr().out
        step(log, 2, val_loss=1.0)
    found = [(line["step"], line.get("val_loss")) for line in steps(tmp_path)]
    assert found == [(1, 3.0), (2, None), (3, 1.0)]


def test_going_back_drops_the_validations_of_later_steps_too(tmp_path):
    with start(config(tmp_path)) as log:
        for number in range(4):
            step(log, number, val_loss=float(number))
    with start(config(tmp_path), start_step=2) as log:
        want = [("loss", 1), ("val_loss", 1), ("loss", 2), ("val_loss", 2)]
        got = [("val_loss" if "val_loss" in line else "loss", line["step"]) for line in lines(tmp_path)]
        assert got == want
        step(log, 2, val_loss=20.0)
    assert [line["val_loss"] for line in steps(tmp_path)] == [0.0, 1.0, 20.0]


def test_steps_of_every_kind_of_file(tmp_path):
    """An older run has val_loss in the step's line, and a blank behind one that was never known.

    It counts steps from 0; a line that says so counts them from 1.
    """
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step":0,"loss":3.0,"val_loss":null                    }\n'
        '{"step":1,"loss":2.0,"val_loss":2.5                     }\n'
        "torn\n"
        '{"step":2,"loss":1.0}\n'
        '{"step":2,"val_loss":1.5}\n'
        '{"step":3,"val_loss":1.4}\n'  # its step's line was lost
        '{"step":4,"loss":0.5}\n'
        '{"step":4,"loss":0.6}\n'  # never written by a run, and not hidden
        '{"step":6,"loss":0.4,"from":1}\n'  # of the run that went on from it
        '{"step":6,"val_loss":1.3,"from":1}\n'
    )
    assert list(lines_module.read_steps(path)) == [
        (1, {"step": 1, "loss": 3.0, "val_loss": None}),
        (2, {"step": 2, "loss": 2.0, "val_loss": 2.5}),
        (4, {"step": 3, "loss": 1.0, "val_loss": 1.5}),
        (6, {"step": 4, "val_loss": 1.4}),
        (7, {"step": 5, "loss": 0.5}),
        (8, {"step": 5, "loss": 0.6}),
        (9, {"step": 6, "loss": 0.4, "val_loss": 1.3}),
    ]
    before = list(lines_module.read_lines(path))
    assert lines_module.rewind(path, 5) == (0.0, 3)  # renewed: nothing counts from 0 any more
    assert list(lines_module.read_lines(path)) == [line for line in before[:-2] if line]
    assert path.read_text().count('"from":1') == 7
    assert list(lines_module.read_steps(tmp_path / "none")) == []


def test_resume_leaves_each_step_once_and_goes_on(tmp_path, clock, capsys):
    with start(config(tmp_path)) as log:
        for number in range(6):
            clock.time += 5
            step(log, number)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step":7,"loss":1.')  # the kill came in the middle of a line
    clock.time += 10_000  # the time between does not count
    with start(config(tmp_path), start_step=4) as log:
        assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]  # before anything is written
        for number in range(4, 8):
            clock.time += 5
            step(log, number, lr=2e-3)
    written = lines(tmp_path)
    assert [line["step"] for line in written] == list(range(1, 9))
    assert [line["lr"] for line in written] == [1e-3] * 4 + [2e-3] * 4
    assert [line["seconds"] for line in written] == [5.0 * number for number in range(1, 9)]
    assert written[4]["tokens_per_s"] is None  # a new process compiles anew
    assert "dropped 3 lines" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.tmp"))


def test_lines_of_a_run_that_is_asked_to_go_back_are_kept_aside(tmp_path, capsys):
    """Its later checkpoints stay until others push them out, and a run may go on from them."""
    with start(config(tmp_path)) as log:
        for number in range(4):
            step(log, number)
    before = lines(tmp_path)
    for n, again in enumerate(("elsewhere/step-2", "none", "none")):
        cfg = dataclasses.replace(config(tmp_path), resume=again)
        with start(cfg, start_step=0 if again == "none" else 2) as log:
            assert f"metrics.before-{n + 1}.jsonl has all" in capsys.readouterr().out
            step(log, log.start_step)
    kept = [len((tmp_path / f"metrics.before-{n}.jsonl").read_text().splitlines()) for n in (1, 2, 3)]
    assert kept == [4, 3, 1]
    assert [json.loads(text) for text in (tmp_path / "metrics.before-1.jsonl").read_text().splitlines()] == [
        line | {"from": 1} for line in before
    ]
    with start(dataclasses.replace(config(tmp_path), resume="elsewhere/step-9"), start_step=9):
        assert "metrics.before" not in capsys.readouterr().out
    assert [len(list(tmp_path.glob(f"{name}.before-*"))) for name in ("metrics", "routing")] == [3, 3]


def test_a_crash_while_rewinding_leaves_the_old_file(tmp_path, monkeypatch):
    with start(config(tmp_path)) as log:
        for number in (1, 2, 3):
            step(log, number)
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def crash(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="no space"):
        lines_module.rewind(tmp_path / "metrics.jsonl", 1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@contextlib.contextmanager
def room_for(path, more: int):
    """A disk on which no file grows beyond the size of `path` plus `more` bytes.

    (Python ignores SIGXFSZ: writes fail.)
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_lines_and_no_training(tmp_path, capsys):
    """It is told once until it works again; nothing stays of a line that was cut short."""
    with start(config(tmp_path, steps=20)) as log:
        step(log, 0)
        for first in (1, 11):
            with room_for(tmp_path / "metrics.jsonl", 100):
                step(log, first)
                step(log, first + 1)
            step(log, first + 2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 4, 14]
    told = (
        f"{tmp_path}/metrics.jsonl: could not be written, training continues without it: "
        f"{os.strerror(errno.EFBIG)}"
    )
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "routing.bin" not in line] == [told, told]


def test_a_sink_that_fails_ends_no_training(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    sink = types.SimpleNamespace(where=tmp_path / "tensorboard", write=full, close=full)
    monkeypatch.setattr(module, "make_sinks", lambda *_: [sink])
    with start(config(tmp_path)) as log:
        step(log, 0)
        step(log, 1)
    assert (
        len(lines(tmp_path)) == 2
        and capsys.readouterr().out.count("tensorboard: could not be written, ") == 1
    )


def test_no_report_draws_none_and_a_later_start_may(tmp_path, monkeypatch):
    """A run goes on with the other value of the setting."""
    drawn = []
    monkeypatch.setattr(report, "draw", lambda path: drawn.append(path))
    assert parse(["tiny"], "").log.report
    for number, words in enumerate((["--log.no-report"], ["--log.report"])):
        wanted = parse(["tiny", *words], "").log.report
        with start(config(tmp_path, report=wanted), start_step=number) as log:
            step(log, number)
        assert drawn == [tmp_path] * number
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_a_picture_that_cannot_be_drawn_ends_no_training(tmp_path, capsys, pictures, monkeypatch):
    with start(config(tmp_path)) as log:
        step(log, 0)
    whole = (tmp_path / "report.png").read_bytes()

    def full(figure, path, **_):
        path.write_bytes(b"half a picture")
        raise OSError(errno.ENOSPC, "No space left on device")  # as PIL's, it names no file

    monkeypatch.setattr(report.Figure, "savefig", full)
    with start(config(tmp_path), start_step=1) as log:
        step(log, 1)
    said = (
        f"{tmp_path}/report.png: could not be written, training continues without it: "
        "No space left on device\n"
    )
    assert said in capsys.readouterr().out
    assert (tmp_path / "report.png").read_bytes() == whole and not list(tmp_path.glob("*.tmp"))
    with pytest.raises(OSError, match=r"No space left on device: '.*report\.png'"):
        report.draw(tmp_path)


def test_progress_on_a_full_disk_ends_no_training(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(onlookers, "print", full, raising=False)
    with start(config(tmp_path, progress=True)) as log:
        step(log, 0)
    assert len(lines(tmp_path)) == 1


def test_config_json_resolves_the_run_and_lists_its_starts(tmp_path):
    cfg = config(tmp_path)
    start(cfg, facts={"unigram_entropy": 3.3}).close()
    start(dataclasses.replace(cfg, parallel=ParallelConfig(ep=1)), start_step=5).close()
    start(cfg, start_step=5).close()
    kept = json.loads((tmp_path / "config.json").read_text())
    assert kept["config"] == json.loads(json.dumps(dataclasses.asdict(cfg)))
    assert kept["mesh"] == {"dp": 2, "ep": 2} and kept["world"] == 4
    assert kept["versions"] == {"torch": "x"}
    # the second start finished no step before the third took its place
    assert [(start["step"], start["mesh"]["ep"]) for start in kept["starts"]] == [(0, 2), (5, 2)]
    assert not (tmp_path / "report.png").exists()  # nothing was logged


def test_versions_and_git_state(tmp_path, monkeypatch):
    found = versions.versions()
    assert found["torch"] == torch.__version__ and found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"triton", "tmoe", "git"} <= set(found)
    source = tmp_path / "tmoe" / "base" / "versions.py"
    source.parent.mkdir(parents=True)
    source.write_text("pass\n")
    monkeypatch.setattr(versions, "__file__", str(source))
    assert versions.git_state() is None  # no repository at all

    def git(*args):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *args], check=True, capture_output=True, text=True
        )

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    revision = git("rev-parse", "HEAD").stdout.strip()
    assert versions.git_state() == {"revision": revision, "dirty": False}
    source.write_text("changed\n")
    assert versions.git_state() == {"revision": revision, "dirty": True}
    elsewhere = (
        tmp_path / "venv" / "tmoe" / "base" / "versions.py"
    )  # installed inside someone else's repository
    elsewhere.parent.mkdir(parents=True)
    monkeypatch.setattr(versions, "__file__", str(elsewhere))
    assert versions.git_state() is None


def test_tensorboard_gets_the_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with start(config(tmp_path, tensorboard=True)) as log:
        step(log, 0)
        step(log, 1, val_loss=0.5, loss=torch.tensor(float("nan")))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 10.0)]
    assert [(e.step, e.value) for e in events.Scalars("val_loss")] == [(2, 0.5)]
    worst = max(lines(tmp_path)[1]["max_violation"])
    assert events.Scalars("router/max_violation_max")[1].value == pytest.approx(worst)


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_wandb_is_named_on_every_rank(tmp_path, rank, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--log\.wandb=mine.*pip install wandb"):
        start(config(tmp_path / "run", wandb="mine"), rank=rank)
    assert not (tmp_path / "run").exists()


def test_wandb_goes_on_under_the_same_id_when_resumed(tmp_path, monkeypatch):
    calls = []
    session = types.SimpleNamespace(
        define_metric=lambda *a, **k: None, log=lambda n: calls.append(n), finish=lambda: calls.append("end")
    )
    fake = types.ModuleType("wandb")
    fake.__spec__ = types.SimpleNamespace()
    fake.init = lambda **k: calls.append(k) or session
    monkeypatch.setitem(sys.modules, "wandb", fake)
    cfg = config(tmp_path, wandb="mine")
    for first in (0, 1, 0):
        with start(cfg, start_step=first) as log:
            step(log, first)
    opened = [call for call in calls if isinstance(call, dict) and "project" in call]
    assert opened[0]["project"] == "mine" and opened[0]["config"]["steps"] == 10
    assert opened[0]["id"] == opened[1]["id"] != opened[2]["id"]
    assert calls[1]["step"] == 1 and calls[1]["loss"] == 10.0 and calls[2] == "end"


def test_without_a_terminal_lines_come_now_and_then(tmp_path, clock, capsys):
    cfg = dataclasses.replace(config(tmp_path, steps=1000, progress=True), compile=True)
    with start(cfg) as log:
        for number in range(100):
            clock.time += 0.5
            step(log, number, val_loss=1.25 if number == 29 else None)
    first, *out = capsys.readouterr().out.splitlines()
    assert first == "first step: compiling"
    assert [int(re.match(r"step (\d+)/1000  loss ", line)[1]) for line in out] == [1, 21, 30, 50, 70, 90]
    assert "val 1.2500" in out[2]
    assert out[1].endswith("200 tokens/s  left 0:08:10")  # 979 steps of 0.5 s


def test_progress_off_keeps_the_lines(tmp_path, monkeypatch):
    """On a terminal it takes the bar away, nothing else."""
    monkeypatch.setattr(progress.Console, "is_terminal", True)
    for asked, shown in ((True, progress.Bar), (False, progress.Lines)):
        cfg = config(tmp_path, progress=asked)
        assert isinstance(progress.Display(cfg, 0).choose(), shown)
    only = dataclasses.replace(config(tmp_path), eval_only=True)
    assert isinstance(progress.Display(only, 0).choose(), progress.Silent)


END = "\0the end\0"


def read_all(terminal: int) -> str:
    """Text written to a pseudo-terminal up to `END`. A reader cannot wait for the close: Linux may drop
    whatever was not read by then."""
    text = b""
    while END.encode() not in text:
        text += os.read(terminal, 1 << 16)
    return text.decode()


def test_a_terminal_gets_one_bar_with_notes_above(tmp_path, monkeypatch):
    master, slave = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with open(slave, "w") as terminal, ThreadPoolExecutor(1) as reader:
        monkeypatch.setattr(sys, "stdout", terminal)
        written = reader.submit(read_all, master)
        with start(config(tmp_path, progress=True)) as log:
            step(log, 0)
            log.note("[saved] checkpoint")
            step(log, 1)
        print(END, file=terminal, flush=True)
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.result())
    os.close(master)
    assert "[saved] checkpoint" in shown
    assert re.search(r"step 2/10 .*loss 5\.0000 .*tokens/s left \S", shown)


def test_an_exception_still_ends_the_bar_and_draws(tmp_path, pictures):
    with pytest.raises(KeyboardInterrupt), start(config(tmp_path)) as log:
        step(log, 0)
        raise KeyboardInterrupt
    assert (tmp_path / "report.png").exists()
    log.close()  # again: nothing
