"""Bad input ends a benchmark at once with one line, and never with code 0.

A benchmark that has ended leaves no run.
"""

import json
import runpy
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch
from orphans import descendants
from orphans import no_orphans as no_orphans  # a fixture

from tmoe.ops.experts import table

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["train", "scaling", "policies", "layouts"])
@pytest.mark.parametrize("gpus", ["0", "-4", "two"])
def test_no_gpus_is_an_error_not_a_pass(monkeypatch, capsys, name, gpus):
    monkeypatch.setattr(sys, "argv", [name, "--gpus", gpus, "--", "tiny"])
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("something was started"))
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 2
    assert f"{gpus}: must be 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["moe_layer", "activations", "shapes", "tune", "exchange", "policies", "adapter_kernels"]
)
def test_no_gpu_is_one_line(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        import_module(f"benchmarks.{name}").main()
    assert "error: no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["curve", "layouts"])
def test_no_gpu_is_said_where_a_cpu_does_as_well(monkeypatch, capsys, words):
    def stop(*_, **__):
        raise InterruptedError

    monkeypatch.setattr(sys, "argv", [words])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("subprocess.Popen", stop)  # what comes before the first run
    with pytest.raises(InterruptedError):
        import_module(f"benchmarks.{words}").main()
    assert capsys.readouterr().err.startswith("no GPU here: ")


@pytest.mark.parametrize(("more", "gib"), [([], 1.0), (["--gib", "0.001"], 0.001)])
def test_a_save_without_a_gpu_is_small_and_says_so(monkeypatch, capsys, tmp_path, more, gib):
    from benchmarks import save

    monkeypatch.setattr(save, "PIECE", 2**24)
    lines = tmp_path / "save.jsonl"
    randn = torch.randn
    asked = []
    monkeypatch.setattr(torch, "randn", lambda n, device: asked.append(n) or randn(min(n, 64), device=device))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["save", "--folder", str(tmp_path), "--json", str(lines), *more])
    save.main()
    assert sum(asked) == round(gib * 2**28) and json.loads(lines.read_text())["gpu"] is None
    assert f"no GPU here: {gib:g} GiB" in capsys.readouterr().err


@pytest.mark.slow
def test_a_curve_that_is_ended_ends_its_runs(no_orphans):
    before = descendants()
    curve = subprocess.Popen([sys.executable, "-m", "benchmarks.curve"], cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(descendants() - before) < 4 and time.monotonic() < deadline:  # it and its three
        time.sleep(0.05)
    time.sleep(0.5)  # the last one's Popen has returned by then
    curve.send_signal(signal.SIGTERM)
    assert curve.wait() != 0


def test_the_trace_readers_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["trace", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "benchmarks/trace.py"), run_name="__main__")
    assert ended.value.code == 0 and "python -m benchmarks.trace runs/x/trace" in capsys.readouterr().out


def test_the_exchange_wants_torchrun(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["exchange"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        import_module("benchmarks.exchange").main()
    assert "WORLD_SIZE is not set: start it with torchrun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("save --gib 0", "--gib=0.0: must be a positive number"),
        ("save --gib nan", "--gib=nan: must be a positive number"),
        ("save --folder /nonexistent/x", "--folder=/nonexistent/x: must be a folder"),
        ("curve --steps 0", "--steps=0: must be 20 or more"),
        ("layouts --timeout -1", "--timeout=-1.0: must be a positive number of seconds"),
        ("model --constants EMPTY -- tiny", "lacks attention_rate"),
        ("model --constants KIND -- tiny", "attention_rate: 5.0 must be of the kind of [["),
        ("model --constants /nonexistent -- tiny", "--constants=/nonexistent: "),
        ("curve -- --optim.offload", "--optim.offload: not here"),
        ("tune --merge EMPTY", "holds no records of this benchmark"),
        ("tune --merge EMPTY --arch nonsense", "--arch=nonsense: must be cuda:NN"),
        ("tune --merge /nonexistent", "--merge=/nonexistent: "),
        ("model --tokens inf -- olmoe-1b-7b", "--tokens inf: must be above 0 and finite"),
    ],
)
def test_a_word_that_cannot_work_is_named(monkeypatch, capsys, tmp_path, words, says):
    """And the shipped table of configurations stays as it is."""
    (tmp_path / "empty.json").write_text("{}")
    constants = json.loads((ROOT / "tmoe/model/h200.json").read_text())
    (tmp_path / "kind.json").write_text(json.dumps(constants | {"attention_rate": {"value": 5.0}}))
    files = {"EMPTY": "empty.json", "KIND": "kind.json"}
    name, *rest = [str(tmp_path / files[word]) if word in files else word for word in words.split()]
    before = table.PATH.read_bytes()
    monkeypatch.setattr(sys, "argv", [name, *rest])
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 2 and says in capsys.readouterr().err
    assert table.PATH.read_bytes() == before
