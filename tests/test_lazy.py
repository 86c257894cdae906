"""Packages import their public names at the first use, and what a command does not need is not imported."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import tmoe

ROOT = Path(__file__).parents[1]
PACKAGES = "tmoe checkpoint config data generate hf model moe ops parallel".split()
COMPILERS = {"torch._dynamo", "triton", "sympy"}
# One after the other in one process, so each also answers for those before it.
ABSENT = {
    "tmoe": {"torch", *COMPILERS},
    "tmoe.report": {"torch", *COMPILERS},
    "tmoe.config.run": COMPILERS,
    "tmoe.routing": COMPILERS,
    "tmoe.data.convert": COMPILERS,
    "tmoe.checkpoint.inspect": COMPILERS - {"sympy"},  # DTensor's own import loads it
}
LOADS = """
import importlib, json, sys
found = {}
heavy = ("torch", "torch._dynamo", "triton", "sympy")
for name in sys.argv[1:]:
    importlib.import_module(name)
    found[name] = [module for module in heavy if module in sys.modules]
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
    command = [sys.executable, "-c", LOADS, *ABSENT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, loaded in json.loads(done.stdout).items():
        assert not ABSENT[name] & set(loaded), (name, loaded)
