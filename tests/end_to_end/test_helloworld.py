"""The examples that users of Tutel look for: three ways to the same losses, by torchrun and by mpiexec."""

import os
import re
import socket
from pathlib import Path

import forked
import pytest
from tiers import slow_but

ROOT = Path(__file__).parents[2]
SIZES = "--batch_size 2 --num_tokens 12 --model_dim 16 --hidden_size 8".split()
WORDS = [*SIZES, *"--num_steps 3 --l_aux_wt 0.5 --lr 30 --use_tensorcore".split()]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_COMPILE_DISABLE": "1"}
NAMES = ("helloworld", "helloworld_ddp", "helloworld_fsdp2")


def losses(said: str) -> list[float]:
    assert re.search(r"\[Summary\] Average synchronized step_time = [\d.]+ sec", said), said
    return [float(loss) for loss in re.findall(r"STEP-\d+: loss = ([\d.]+), step_time = [\d.]+ sec", said)]


def torchrun(world: int, name: str, *more: str) -> list[float]:
    done = forked.torchrun(world, [f"examples/{name}.py", *WORDS, *more], env=ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(done.stdout)


def mpiexec(world: int, name: str, *more: str) -> list[float]:
    """Two processes with what Open MPI's mpiexec tells them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    envs = []
    for rank in range(world):
        given = dict(RANK=rank, SIZE=world, LOCAL_RANK=rank, LOCAL_SIZE=world)
        envs.append(ENV | meet | {f"OMPI_COMM_WORLD_{key}": str(value) for key, value in given.items()})
    ranks = forked.together([[f"examples/{name}.py", *WORDS, *more]] * world, ROOT, envs)
    assert [rank.returncode for rank in ranks] == [0] * world, ranks
    return losses(ranks[0].stdout)


@pytest.mark.parametrize("name", slow_but(["helloworld_ddp"], NAMES))
def test_runs_by_mpiexec(name):
    found = mpiexec(2, name)
    assert len(found) == 3 and found[0] > found[1] > found[2]


@pytest.mark.slow
def test_three_ways_are_one():
    """parallelize, DDP and FSDP2, on two ranks by either launcher, take the same steps."""
    dropless = "--capacity_factor", "0"  # as the other two are
    by = {name: torchrun(2, name, *(dropless if name == "helloworld" else ())) for name in NAMES}
    by["mpiexec"] = mpiexec(2, "helloworld", *dropless)
    assert len(by["mpiexec"]) == 3
    assert mpiexec(2, "helloworld", "--capacity_factor", "0.5") != by["mpiexec"], "some are dropped"
    for name, found in by.items():
        assert found == pytest.approx(by["mpiexec"], abs=2e-5), name
    assert len(torchrun(1, "helloworld", "--eval", "--dtype", "float64")) == 3
