"""Words that a benchmark of whole steps cannot use end it at once, and never with code 0."""

import sys
from importlib import import_module

import pytest


@pytest.mark.parametrize("name", ["train", "scaling", "policies", "layouts"])
@pytest.mark.parametrize("gpus", ["0", "-4"])
def test_no_gpus_is_an_error_not_a_pass(monkeypatch, capsys, name, gpus):
    monkeypatch.setattr(sys, "argv", [name, "--gpus", gpus, "--", "tiny"])
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("something was started"))
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 2
    assert f"{gpus}: must be 1 or more" in capsys.readouterr().err
