"""Packages import their public names at the first use, and what a command does not need is not imported."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import tmoe

ROOT = Path(__file__).parents[1]
READS = "tmoe/"  # every public name: lib/inputs.py
PACKAGES = "tmoe checkpoint config data generate hf model moe ops parallel".split()
COMPILERS = {"torch._dynamo", "torch._inductor", "triton", "sympy"}
HEAVY = {"torch", *COMPILERS}
# Imports, and commands that show their help, one after the other in one process: each also answers for those
# before it.
ABSENT = {
    "tmoe": HEAVY,
    "tmoe report --help": HEAVY,
    "tmoe routing --help": HEAVY,
    "tmoe migrate --help": HEAVY,
    "tmoe checkpoint inspect --help": HEAVY,
    "tmoe data --help": HEAVY,
    "tmoe rollouts --help": HEAVY,
    "tmoe hf --help": HEAVY,
    "tmoe.config.run": COMPILERS,
    "tmoe warmup --help": COMPILERS,
    "tmoe generate --help": COMPILERS,
    "tmoe eval --help": COMPILERS,
    "tmoe.data.convert": COMPILERS,
    "tmoe.hf.architectures": COMPILERS - {"sympy"},
    "tmoe.checkpoint.inspect": COMPILERS - {"sympy"},  # DTensor's own import loads it
}
LOADS = """
import contextlib, importlib, io, json, runpy, sys
found = {}
*names, heavy = sys.argv[1:]
for name in names:
    sys.argv = name.split()
    if sys.argv[1:]:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            runpy.run_module("tmoe", run_name="__main__", alter_sys=True)
        assert len(shown.getvalue()) > 200, (name, shown.getvalue())
    else:
        importlib.import_module(name)
    found[name] = [module for module in heavy.split() if module in sys.modules]
print(json.dumps(found))
"""


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_is_there(name):
    package = tmoe if name == "tmoe" else importlib.import_module(f"tmoe.{name}")
    for public in package.__all__:
        assert getattr(package, public).__name__.rpartition(".")[2] == public
    assert set(package.__all__) <= set(dir(package))


def test_a_module_of_a_package_is_found_and_another_name_is_not():
    assert tmoe.post.task.Task.__name__ == "Task"
    with pytest.raises(AttributeError, match=r"module 'tmoe\.ops' has no attribute 'moe_mpl'"):
        _ = tmoe.ops.moe_mpl


def test_an_import_loads_what_it_needs():
    command = [sys.executable, "-c", LOADS, *ABSENT, " ".join(HEAVY)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, loaded in json.loads(done.stdout).items():
        assert not ABSENT[name] & set(loaded), (name, loaded)
