"""A wheel holds every file of tmoe, and its commands and presets work where no checkout is.

It is built from a copy of what a build needs and installed without dependencies; a .pth file names the folder
of this interpreter's packages, of which Python then reads no .pth file: an editable checkout stays unseen.

next: pyproject.toml
"""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import tmoe

ROOT = Path(__file__).parents[1]
COMMANDS = ("checkpoint", "hf", "data", "report", "upcycle", "warmup")
# What each command says of itself, as a module and as `tmoe NAME`, each in a fork of one process
HELPS = """
import json, os, runpy, sys, tempfile, torch
script, *commands = sys.argv[1:]

def said(run, words):
    with tempfile.TemporaryFile("w+") as out:
        if (child := os.fork()) == 0:
            os.dup2(out.fileno(), 1)
            sys.argv = words
            try:
                run()
            finally:
                sys.stdout.flush()
                os._exit(0 if getattr(sys.exception(), "code", 1) in (None, 0) else 1)
        assert os.waitpid(child, 0)[1] == 0, words
        out.seek(0)
        return out.read()

def module(name):
    runpy.run_module(name, run_name="__main__", alter_sys=True)

print(json.dumps({
    command: [
        said(lambda: module(f"tmoe.{command}"), ["", "--help"]),
        said(lambda: runpy.run_path(script, run_name="__main__"), [script, command, "--help"]),
    ]
    for command in commands
}))
"""
PRESETS = """
import sys, torch, tmoe
from tmoe.ops.experts import table
assert table.entries("cuda:90")
for name, cfg in tmoe.presets().items():
    with torch.device("meta"):
        model = tmoe.Transformer(cfg.model)
    print(name, sum(p.numel() for p in model.parameters()))
print(tmoe.__version__, tmoe.__file__)
"""

pytestmark = pytest.mark.slow


def run(*command, **how):
    """stdout of a command that must end with 0 and sees nothing of this checkout."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run([*map(str, command)], env=env, capture_output=True, text=True, **how)
    assert ran.returncode == 0, f"{command}\n{ran.stdout[-2000:]}{ran.stderr[-4000:]}"
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "tmoe", source / "tmoe", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--no-build-isolation", "--wheel-dir", source / "dist", source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """(interpreter of a new environment that has the wheel and the packages beside it, an empty folder)."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True, with_pip=False)
    python = home / "bin/python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
    )
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "beside.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return python, tmp_path_factory.mktemp("empty")


def test_every_file_is_inside(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    held = {path.relative_to(ROOT) for path in (ROOT / "tmoe").rglob("*") if path.is_file()}
    wanted = {path.as_posix() for path in held if "__pycache__" not in path.parts}
    assert wanted > {"tmoe/ops/experts/table.json", "tmoe/__init__.py"}
    info = f"tmoe-{tmoe.__version__}.dist-info"
    assert {name for name in names if not name.startswith(info)} == wanted
    assert f"{info}/licenses/LICENSE" in names


def test_commands_and_presets_work_in_an_empty_folder(installed):
    python, empty = installed
    script, first = python.parent / "tmoe", COMMANDS[0]
    helps = json.loads(run(python, "-c", HELPS, script, *COMMANDS, cwd=empty))
    assert list(helps) == list(COMMANDS)
    for command, (of_module, of_script) in helps.items():
        assert f"tmoe.{command}" in of_module and of_script == of_module, of_module
    assert run(python, "-m", f"tmoe.{first}", "--help", cwd=empty) == helps[first][0]
    assert run(script, first, "--help", cwd=empty) == helps[first][0]
    *presets, where = run(python, "-c", PRESETS, cwd=empty).splitlines()
    assert [line.split()[0] for line in presets] == list(tmoe.presets())
    version, file = where.split()
    assert version == tmoe.__version__ and Path(file).is_relative_to(python.parents[1])
    assert not list(empty.iterdir())


def test_train_copied_out_of_a_checkout_runs_with_it(installed):
    """The wheel has no train.py: who trains copies it, or works in a checkout."""
    python, empty = installed
    shutil.copy(ROOT / "train.py", empty)
    said = run(python, "train.py", "tiny", "--dry-run", "--world", "2", "--parallel.ep", "2", cwd=empty)
    assert "GiB" in said or "MiB" in said, said
