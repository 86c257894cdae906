"""What a benchmark cannot work with ends it at once with one line, and never with code 0."""

import sys
from importlib import import_module

import pytest
import torch


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
