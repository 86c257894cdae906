"""Ranks that share a GPU: their surroundings, what they run, and when `benchmarks.layouts` lets them."""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import torch
from tiers import slow_but

from benchmarks import layouts, shared

ROOT = Path(__file__).parents[2]
RANK = """
import os, sys, torch
sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
torch.cuda.device_count = lambda: {gpus}
from benchmarks import shared
shared.main()
"""
TARGET = """
import json, os, sys
from tmoe.moe.exchange import symm
names = ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "NCCL_HOSTID"]
names += ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "TORCH_SYMM_MEM_DISABLE_MULTICAST"]
said = [os.environ.get(name) for name in names]
print(json.dumps([__name__, sys.argv[1:], said, symm._obstacle_here([("host", "gpu")] * 4)]))
"""


@pytest.mark.parametrize(
    ("gpus", "module"), slow_but([(2, True)], [(0, False), (0, True), (2, False), (2, True)])
)
def test_a_rank_and_what_it_runs(tmp_path, module, gpus):
    (tmp_path / "target.py").write_text(TARGET)
    what = ["-m", "target"] if module else [tmp_path / "target.py"]
    environment = {**os.environ, "RANK": "5", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(tmp_path)])
    ran = forked.run(["-c", RANK.format(gpus=gpus), *what, "--gpus", "x y"], env=environment)
    assert ran.returncode == 0, ran.stderr
    name, argv, said, obstacle = json.loads(ran.stdout)
    assert name == "__main__" and argv == ["--gpus", "x y"]
    if gpus:
        assert said == ["1", "2", "rank 5", "1", "1"] and not obstacle
    else:  # on a CPU there is nothing to share
        assert said == ["3", "4", None, None, None] and obstacle == "ranks share a GPU"


@pytest.mark.parametrize(
    ("environment", "words"), [({"RANK": "0"}, []), ({"RANK": "0"}, ["-m"]), ({}, ["target.py"])]
)
def test_a_start_without_torchrun_or_work_is_one_line(monkeypatch, environment, words):
    monkeypatch.delenv("RANK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["shared", *words])
    with pytest.raises(SystemExit, match="error: torchrun starts this"):
        shared.main()


@pytest.mark.parametrize(("gpus", "sharing"), [(0, []), (1, [2, 4]), (2, [4]), (4, [])])
def test_layouts_share_what_there_is(monkeypatch, tmp_path, capsys, gpus, sharing):
    commands = []

    def running(command):
        commands.append(command)
        return nullcontext(SimpleNamespace(wait=lambda timeout: 0))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(layouts, "running", running)
    layouts.start([1, 2, 4], tmp_path, ["--steps", "3"], 1)
    for world, command in zip((1, 2, 4), commands, strict=True):
        through = ["-m", "benchmarks.shared"] if world in sharing else []
        inside = ["-m", "benchmarks.layouts", "--inside", f"{world}:{tmp_path}", "--", "--steps", "3"]
        assert command[command.index("--nproc-per-node") + 1 :] == [str(world), *through, *inside]
    assert capsys.readouterr().err.count("processes share") == len(sharing)
