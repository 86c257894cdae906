"""The installed command: each word runs its module, and train the train.py of the folder.

next: tmoe/__main__.py
"""

import sys
from pathlib import Path

import pytest

from tmoe import __main__ as command

ROOT = Path(__file__).parents[1]


@pytest.fixture
def ran(monkeypatch):
    """The programs that a process would have become."""
    found = []

    def become(path, words):
        found.append((path, words))
        raise SystemExit(0)

    monkeypatch.setattr(command.os, "execv", become)
    return found


def call(monkeypatch, *words: str) -> int | str | None:
    """What the command ends with."""
    monkeypatch.setattr(sys, "argv", ["tmoe", *words])
    with pytest.raises(SystemExit) as ended:
        command.main()
    return ended.value.code


@pytest.mark.parametrize("name", command.MODULES)
def test_each_module_is_there(name):
    """Packages have a __main__ of their own, files begin where they are run."""
    folder, file = ROOT / "tmoe" / name, ROOT / "tmoe" / f"{name}.py"
    assert (folder / "__main__.py").is_file() or '__name__ == "__main__"' in file.read_text()


def test_no_module_is_left_out():
    files = [path.stem for path in (ROOT / "tmoe").glob("*.py") if '== "__main__"' in path.read_text()]
    folders = [path.parent.name for path in (ROOT / "tmoe").glob("*/__main__.py")]
    assert sorted({*files, *folders} - {"__main__"}) == sorted(command.MODULES)


def test_a_module_gets_its_words(monkeypatch, capsys):
    assert call(monkeypatch, "hf", "--help") == 0
    assert "usage: python -m tmoe.hf" in capsys.readouterr().out


def test_train_is_that_of_the_folder(monkeypatch, tmp_path, ran, capsys):
    monkeypatch.chdir(ROOT)
    assert call(monkeypatch, "train", "tiny", "--steps", "2") == 0
    assert ran == [(sys.executable, [sys.executable, "train.py", "tiny", "--steps", "2"])]
    monkeypatch.chdir(tmp_path)
    for text in (None, "import lightning\n"):  # no file, and one of another program
        if text:
            (tmp_path / "train.py").write_text(text)
        assert call(monkeypatch, "train") == 2
        assert f"no train.py of tmoe in {tmp_path}; it is a file of tmoe's" in capsys.readouterr().err
    assert len(ran) == 1


def test_help_has_a_line_for_each_command(monkeypatch, capsys):
    assert call(monkeypatch, "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    for name, line in zip(("train", *command.MODULES), lines[2:], strict=True):
        assert line.startswith(f"  tmoe {name} ") and len(line.split()) > 5


@pytest.mark.parametrize("name", command.MODULES)
def test_each_command_has_help(monkeypatch, capsys, name):
    assert call(monkeypatch, name, "--help") in (0, None)
    assert len(capsys.readouterr().out.splitlines()) > 3


def test_train_has_help_where_no_train_py_is(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "train", "--task", "sft", "--help") == 0
    assert "The settings most used with --task sft" in capsys.readouterr().out


def test_other_words(monkeypatch, capsys):
    assert call(monkeypatch) == 2 and call(monkeypatch, "--help") == 0
    assert capsys.readouterr().out.count("usage: tmoe {train,checkpoint,") == 2
    assert call(monkeypatch, "checkpiont") == 2
    assert "error: tmoe checkpiont: no such command; did you mean tmoe checkpoint?" in capsys.readouterr().err
