"""What a benchmark cannot work with ends it at once with one line, and never with code 0."""

import sys
from importlib import import_module

import pytest
import torch

from tmoe.ops import table


@pytest.mark.parametrize("name", ["train", "scaling", "policies", "layouts"])
@pytest.mark.parametrize("gpus", ["0", "-4", "two"])
def test_no_gpus_is_an_error_not_a_pass(monkeypatch, capsys, name, gpus):
    monkeypatch.setattr(sys, "argv", [name, "--gpus", gpus, "--", "tiny"])
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("something was started"))
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 2
    assert f"{gpus}: must be 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["moe_layer", "shapes", "tune", "exchange"])
def test_no_gpu_is_one_line(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        import_module(f"benchmarks.{name}").main()
    assert "error: no GPU here" in capsys.readouterr().err


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
        ("model --constants /nonexistent -- tiny", "--constants=/nonexistent: "),
        ("tune --merge EMPTY", "holds no records of this benchmark"),
        ("tune --merge EMPTY --arch nonsense", "--arch=nonsense: must be cuda:NN"),
        ("tune --merge /nonexistent", "--merge=/nonexistent: "),
    ],
)
def test_a_word_that_cannot_work_is_named(monkeypatch, capsys, tmp_path, words, says):
    """And the shipped table of configurations stays as it is."""
    (tmp_path / "empty.json").write_text("{}")
    name, *rest = words.replace("EMPTY", str(tmp_path / "empty.json")).split()
    before = table.PATH.read_bytes()
    monkeypatch.setattr(sys, "argv", [name, *rest])
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 2 and says in capsys.readouterr().err
    assert table.PATH.read_bytes() == before
