"""Which world torchrun, mpiexec and srun announce, and what is refused; build_mesh and train.py join it."""

import json
import os
import shutil
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import forked
import pytest
import torch
import torch.distributed as dist

from tmoe.base import disk as folders
from tmoe.cli.parse import parse
from tmoe.parallel import build_mesh, launcher
from tmoe.parallel.launcher import first_host, job_port, launcher_world, meeting_place
from tmoe.run import process as runtime

ROOT = Path(__file__).parents[2]
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC", "OMPI_", "PMI", "MPI_", "SLURM")
NAMES += ("MV2_", "JSM_", "FLUX_", "PALS_", "ALPS_")

TORCHRUN = dict(
    RANK="3",
    WORLD_SIZE="4",
    LOCAL_RANK="1",
    LOCAL_WORLD_SIZE="2",
    GROUP_RANK="1",
    GROUP_WORLD_SIZE="2",
    MASTER_ADDR="node0",
    MASTER_PORT="1234",
    TORCHELASTIC_RUN_ID="x",
)
OPEN_MPI = dict(
    OMPI_COMM_WORLD_RANK="1",
    OMPI_COMM_WORLD_SIZE="2",
    OMPI_COMM_WORLD_LOCAL_RANK="1",
    OMPI_COMM_WORLD_LOCAL_SIZE="2",
    PMIX_NAMESPACE="77",
)
MPICH = dict(PMI_RANK="1", PMI_SIZE="2", MPI_LOCALRANKID="1", MPI_LOCALNRANKS="2")
MVAPICH = {name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items() if "WORLD" in name}
JSRUN = {name.replace("OMPI_COMM_WORLD", "JSM_NAMESPACE"): value for name, value in OPEN_MPI.items()}
PALS = dict(PALS_RANKID="5", PALS_SIZE="8", PALS_LOCAL_RANKID="1", PALS_LOCAL_SIZE="4")
FLUX = dict(FLUX_TASK_RANK="3", FLUX_JOB_SIZE="4", FLUX_TASK_LOCAL_ID="3", FLUX_JOB_NNODES="1")
SRUN = dict(  # the sixth of nine tasks on nodes of 4, 4 and 1
    SLURM_PROCID="5",
    SLURM_NTASKS="9",
    SLURM_STEP_NUM_TASKS="9",
    SLURM_LOCALID="1",
    SLURM_NODEID="1",
    SLURM_STEP_ID="2",
    SLURM_JOB_ID="100",
    SLURM_STEP_NUM_NODES="3",
    SLURM_STEP_TASKS_PER_NODE="4(x2),1",
    SLURM_STEP_NODELIST="gpu[07-08,12]",
    SLURM_LAUNCH_NODE_IPADDR="10.0.0.9",
)
ONE_NODE = SRUN | dict(SLURM_STEP_NUM_NODES="1", SLURM_STEP_NODELIST="gpu07", SLURM_STEP_TASKS_PER_NODE="9")
BATCH = dict(SLURM_PROCID="0", SLURM_NTASKS="4", SLURM_LOCALID="0", SLURM_NODEID="0", SLURM_JOB_ID="100")


@pytest.fixture
def environment(monkeypatch):
    """Sets these variables of launchers, and removes all others."""

    def put(**values: str) -> None:
        for name in [name for name in os.environ if name.startswith(NAMES)]:
            monkeypatch.delenv(name)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    put()
    return put


@pytest.mark.parametrize(
    ("set_", "place", "local", "nodes", "by"),
    [
        ({}, (0, 1), (None, None), (None, None), ""),
        (TORCHRUN, (3, 4), (1, 2), ("1", 2), "torchrun"),
        (dict(RANK="1", WORLD_SIZE="2"), (1, 2), (None, None), (None, None), "environment"),
        (OPEN_MPI, (1, 2), (1, 2), (None, None), "mpiexec"),
        (MPICH, (1, 2), (1, 2), (None, None), "mpiexec"),
        (SRUN, (5, 9), (1, 4), ("1", 3), "srun"),
        (
            SRUN | dict(SLURM_PROCID="8", SLURM_LOCALID="0", SLURM_NODEID="2"),
            (8, 9),
            (0, 1),
            ("2", 3),
            "srun",
        ),
        (ONE_NODE, (5, 9), (1, 9), ("1", 1), "srun"),
        (SRUN | TORCHRUN, (3, 4), (1, 2), ("1", 2), "torchrun"),
        (OPEN_MPI | TORCHRUN, (3, 4), (1, 2), ("1", 2), "torchrun"),
        (SRUN | OPEN_MPI, (1, 2), (1, 2), (None, None), "mpiexec"),  # whose daemons srun has started
        (SRUN | dict(PMI_RANK="5", PMI_SIZE="9"), (5, 9), (1, 4), ("1", 3), "srun"),  # srun --mpi=pmi2
        (SRUN | dict(PMI_RANK="5"), (5, 9), (1, 4), ("1", 3), "srun"),
        # the job's, kept by --preserve-env
        (
            SRUN | dict(SLURM_NTASKS="64"),
            (5, 9),
            (1, 4),
            ("1", 3),
            "srun",
        ),
        (SRUN | dict(WORLD_SIZE="9"), (5, 9), (1, 4), ("1", 3), "srun"),
        (SRUN | dict(RANK="5", WORLD_SIZE="9"), (5, 9), (1, 4), ("1", 3), "environment"),
        (BATCH, (0, 1), (None, None), (None, None), ""),
        (
            dict(SLURM_NTASKS="4", SLURM_NNODES="2", SLURM_JOB_ID="100"),
            (0, 1),
            (None, None),
            (None, None),
            "",
        ),
        (SRUN | dict(SLURM_PROCID="0", SLURM_STEP_ID="4294967290"), (0, 1), (None, None), (None, None), ""),
        (SRUN | dict(SLURM_PROCID="0", SLURM_STEP_ID="4294967291"), (0, 1), (None, None), (None, None), ""),
        (BATCH | TORCHRUN, (3, 4), (1, 2), ("1", 2), "torchrun"),
        (BATCH | OPEN_MPI, (1, 2), (1, 2), (None, None), "mpiexec"),
        (MVAPICH, (1, 2), (1, 2), (None, None), "mpiexec"),
        (PALS, (5, 8), (1, 4), (None, None), "mpiexec"),
        (PALS | dict(PMI_RANK="5", PMI_SIZE="8"), (5, 8), (1, 4), (None, None), "mpiexec"),
        (FLUX, (3, 4), (3, 4), (None, None), "flux"),
        (
            FLUX | dict(FLUX_JOB_NNODES="2", PMI_RANK="3", PMI_SIZE="4"),
            (3, 4),
            (3, None),
            (None, None),
            "flux",
        ),
        (JSRUN, (1, 2), (1, 2), (None, None), "jsrun"),
        (FLUX | TORCHRUN, (3, 4), (1, 2), ("1", 2), "torchrun"),
        (OPEN_MPI | dict(PMIX_RANK="1"), (1, 2), (1, 2), (None, None), "mpiexec"),
        (SRUN | dict(PMIX_RANK="5"), (5, 9), (1, 4), ("1", 3), "srun"),
        (dict(PMIX_RANK="1", RANK="1", WORLD_SIZE="2"), (1, 2), (None, None), (None, None), "environment"),
    ],
)
def test_the_world_of_an_environment(environment, set_, place, local, nodes, by):
    environment(**set_)
    world = launcher_world()
    assert (world.rank, world.size) == place and world.launcher == by
    assert (world.local_rank, world.local_size) == local and (world.node, world.nodes) == nodes


@pytest.mark.parametrize(
    ("set_", "says"),
    [
        (
            dict(LOCAL_RANK="1", LOCAL_WORLD_SIZE="2"),
            "LOCAL_RANK=1 and LOCAL_WORLD_SIZE=2 in the environment without RANK and WORLD_SIZE",
        ),
        (dict(LOCAL_RANK="0"), "LOCAL_RANK=0 in the environment without RANK and WORLD_SIZE"),
        (
            dict(OMPI_COMM_WORLD_RANK="0"),
            "OMPI_COMM_WORLD_RANK=0 and OMPI_COMM_WORLD_SIZE= in the environment",
        ),
        (
            dict(PMIX_RANK="0"),
            "PMIX_RANK=0 in the environment without the number of ranks, which",
        ),
        (
            dict(PMIX_RANK="3"),
            "PMIX_RANK=3 in the environment without the number of ranks, which",
        ),
        (
            dict(ALPS_APP_PE="3"),
            "ALPS_APP_PE=3 in the environment without the number of ranks, which aprun",
        ),
        (dict(FLUX_TASK_RANK="1"), "FLUX_TASK_RANK=1 and FLUX_JOB_SIZE= in the environment: flux sets both"),
        (dict(PALS_RANKID="1"), "PALS_RANKID=1 and PALS_SIZE= in the environment: mpiexec sets both"),
        (dict(MV2_COMM_WORLD_RANK="1"), "MV2_COMM_WORLD_RANK=1 and MV2_COMM_WORLD_SIZE= in the environment"),
        (
            FLUX | dict(FLUX_JOB_NNODES="2", FLUX_TASK_LOCAL_ID="1"),
            "FLUX_TASK_RANK=3 and FLUX_JOB_SIZE=4 in the environment, on more than one node as far as flux",
        ),
        (dict(PMI_SIZE="2"), "PMI_RANK= and PMI_SIZE=2 in the environment: mpiexec sets both"),
        (
            OPEN_MPI | dict(OMPI_COMM_WORLD_RANK="2"),
            "OMPI_COMM_WORLD_RANK=2 and OMPI_COMM_WORLD_SIZE=2 in the",
        ),
        (
            OPEN_MPI | dict(OMPI_COMM_WORLD_SIZE="two"),
            "OMPI_COMM_WORLD_SIZE='two' in the environment: must be a whole",
        ),
        (
            SRUN | dict(SLURM_PROCID="9"),
            "SLURM_PROCID=9 and SLURM_STEP_NUM_TASKS=9 in the environment: the rank must",
        ),
        (
            SRUN | dict(SLURM_PROCID="-1"),
            "SLURM_PROCID='-1' in the environment: must be a whole number from 0 on, as srun",
        ),
        (BATCH | dict(SLURM_PROCID="1"), "SLURM_PROCID=1 in the environment without SLURM_STEP_ID"),
        (SRUN | dict(RANK="4"), "RANK=4 in the environment, but srun says SLURM_PROCID=5"),
        (
            OPEN_MPI | dict(WORLD_SIZE="8"),
            "WORLD_SIZE=8 in the environment, but mpiexec says OMPI_COMM_WORLD_RANK=1",
        ),
        (
            SRUN | dict(PMI_RANK="0", PMI_SIZE="1"),
            "PMI_RANK=0 and PMI_SIZE=1 in the environment, but srun says",
        ),
        (
            MPICH | dict(MPI_LOCALNRANKS="1"),
            "PMI_RANK=1 and PMI_SIZE=2 in the environment, on more than one node",
        ),
        (
            dict(PMI_RANK="0", PMI_SIZE="2"),
            "PMI_RANK=0 and PMI_SIZE=2 in the environment, on more than one node",
        ),
    ],
)
def test_what_cannot_be_a_world_is_one_line_for_train_and_build_mesh(environment, capsys, set_, says):
    environment(**set_)
    with pytest.raises(SystemExit) as ended:
        runtime.launched()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith(f"error: {says}") and said.count("\n") == 1
    with pytest.raises(ValueError) as error:
        launcher.join()
    assert str(error.value) == said.removeprefix("error: ").rstrip() and not dist.is_initialized()


@pytest.mark.parametrize(
    ("set_", "where"),
    [
        (TORCHRUN, ("node0", 1234)),
        (OPEN_MPI | dict(MASTER_ADDR="node5"), ("node5", None)),
        (OPEN_MPI, ("127.0.0.1", None)),
        (MPICH, ("127.0.0.1", 29500)),
        ({k: v for k, v in MPICH.items() if k != "MPI_LOCALNRANKS"}, ("127.0.0.1", 29500)),
        (SRUN, ("gpu07", None)),
        (SRUN | dict(MASTER_ADDR="node5", MASTER_PORT="7"), ("node5", 7)),
        (ONE_NODE, ("127.0.0.1", None)),
        ({k: v for k, v in SRUN.items() if k != "SLURM_STEP_NODELIST"}, ("10.0.0.9", None)),
    ],
)
def test_where_ranks_meet(environment, set_, where):
    environment(**set_)
    world = launcher_world()
    assert meeting_place(world) == (where[0], where[1] or job_port(world))


@pytest.mark.parametrize(
    ("set_", "how"),
    [
        (
            PALS | dict(PMI_RANK="5", PMI_SIZE="8"),
            "to meet at: MASTER_ADDR=NODE MASTER_PORT=29500 in the env",
        ),
        (dict(PMI_RANK="5", PMI_SIZE="8"), "to meet at: mpiexec -genv MASTER_ADDR NODE -genv MASTER_PORT"),
    ],
)
def test_how_an_address_is_set_is_the_launchers_own_way(environment, set_, how):
    """mpiexec of Cray's PALS has no -genv, though it sets PMI's variables as MPICH's does."""
    environment(**set_)
    with pytest.raises(ValueError, match=how):
        meeting_place(launcher_world())


def test_jobs_and_steps_meet_on_ports_of_their_own(environment):
    ports = set()
    for step in range(20):
        environment(**SRUN | dict(SLURM_STEP_ID=str(step)))
        ports.add(job_port(launcher_world()))
    assert len(ports) > 15 and all(20000 <= port < 29000 for port in ports)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node3", "node3"),
        ("node3,node7", "node3"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu[3,5]-ib", "gpu3-ib"),
        ("rack[1-2]n[03-04]", "rack1n03"),
        ("a1,b[2-3]", "a1"),
        ("10.0.0.3", "10.0.0.3"),
    ],
)
def test_the_first_host_of_slurms_list(nodes, first):
    assert first_host(nodes) == first


def test_a_shell_on_a_terminal_of_srun_is_alone(environment, monkeypatch):
    """`srun -n 9 --pty bash`: the other eight shells have ended long ago.

    What that shell starts by srun has no terminal.
    """
    environment(**SRUN | dict(SLURM_PROCID="0", SLURM_PTY_PORT="44263"))
    monkeypatch.setattr(os, "isatty", lambda fd: fd == 0)
    assert launcher_world().size == 1
    monkeypatch.setattr(os, "isatty", lambda fd: False)
    assert launcher_world().size == 9


def test_each_rank_needs_a_gpu_that_it_knows(environment, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    environment(PMI_RANK="1", PMI_SIZE="2", MASTER_ADDR="localhost")
    with pytest.raises(ValueError, match="PMI_SIZE=2 in the environment without LOCAL_RANK: set it"):
        launcher.require_a_gpu_each(launcher_world())
    environment(**ONE_NODE)
    with pytest.raises(
        ValueError, match=r"9 processes on this host, which shows 2 GPUs.*srun without --gpus-per-task"
    ):
        launcher.require_a_gpu_each(launcher_world())


# ---- real processes ----

MESH = """
import torch.distributed as dist, tmoe
mesh = tmoe.parallel.build_mesh(ep=2)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {mesh.ep.mesh.tolist()}", flush=True)
"""
SMALL = "tiny --model.layers 1 --model.dim 32 --model.heads 2 --model.kv-heads 2 --model.head-dim 16"
SMALL += " --train.seq 32 --train.batch 2 --steps 2 --no-compile --train.eval-batches 1"
SMALL += " --log.no-progress --log.no-report --parallel.ep 2"


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def announced(by: str, rank: int, port: str) -> dict[str, str]:
    """What a launcher sets for a rank of two on this host."""
    r = str(rank)
    return {
        "torchrun": dict(RANK=r, WORLD_SIZE="2", LOCAL_RANK=r, MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
        "mpiexec": OPEN_MPI
        | dict(OMPI_COMM_WORLD_RANK=r, OMPI_COMM_WORLD_LOCAL_RANK=r, PMIX_NAMESPACE=f"{port}{os.getpid()}"),
        "pmi": MPICH | dict(PMI_RANK=r, MPI_LOCALRANKID=r, MASTER_PORT=port),
        "srun": BATCH
        | dict(SLURM_PROCID=r, SLURM_LOCALID=r, SLURM_NTASKS="2", SLURM_STEP_NUM_TASKS="2", SLURM_STEP_ID="0")
        | dict(SLURM_STEP_NODELIST="localhost", SLURM_JOB_ID=f"{port}{os.getpid()}"),
    }[by]


def run_both(words: list[str], by: str) -> list[str]:
    """What two processes print that a launcher `by` would have started; both must end with 0."""
    port = free_port()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(NAMES)}
    clean |= dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    ranks = forked.together([words, words], envs=[clean | announced(by, rank, port) for rank in range(2)])
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    return [rank.stdout + rank.stderr for rank in ranks]


@pytest.mark.parametrize("by", ["torchrun", "mpiexec", "pmi", "srun"])
def test_build_mesh_joins_the_world_that_is_announced(by):
    """Otherwise each process would train a model of its own, and nothing would say so."""
    for rank, said in enumerate(run_both(["-c", MESH], by)):
        assert f"rank {rank} of 2: [0, 1]" in said


@pytest.mark.parametrize("by", ["mpiexec", "srun"])
def test_train_joins_the_world_that_is_announced(tmp_path, by):
    said = run_both(["train.py", *SMALL.split(), "--out", str(tmp_path / by)], by)
    assert "mesh dp 1 x ep 2" in said[0]
    lines = [json.loads(line) for line in (tmp_path / by / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]


def test_build_mesh_alone_without_a_launcher(environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(NAMES)}
    done = forked.run(["-c", MESH.replace("ep=2", "ep=1")], env=clean | BATCH)
    assert "rank 0 of 1" in done.stdout and "trains alone (SLURM_NTASKS=4)" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("mpiexec"), reason="needs mpiexec")
def test_a_real_mpiexec():
    clean = {name: value for name, value in os.environ.items() if not name.startswith(NAMES)}
    clean |= dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), OMPI_ALLOW_RUN_AS_ROOT="1")
    clean |= dict(OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_rmaps_base_oversubscribe="1")
    done = subprocess.run(
        ["mpiexec", "-n", "2", sys.executable, "-c", MESH],
        env=clean,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    assert all(f"rank {rank} of 2: [0, 1]" in done.stdout for rank in range(2))


def test_a_rank_that_never_comes_is_one_line(environment):
    environment(**announced("torchrun", 0, free_port()))
    with pytest.raises(
        ValueError, match=r"rank 0 of 2 found no other at 127.0.0.1:\d+ \(MASTER_ADDR, MASTER_PORT\)"
    ):
        launcher.join(timedelta(seconds=1))
    assert not dist.is_initialized()


# ---- flags ----


def patient(rank: int, world: int) -> tuple[timedelta, timedelta]:
    """The timeouts of the default group and of a mesh's, in a group of one that runtime.start makes."""
    dist.destroy_process_group()
    run = runtime.start(0, timeout=77.0)
    return runtime.patience(), build_mesh().ep.get_group()._get_backend(run.device).options._timeout


def test_collectives_wait_for_as_long_as_asked(gloo):
    assert gloo(1, patient)[0] == (timedelta(seconds=77), timedelta(seconds=77))


@pytest.mark.parametrize("seconds", ["0", "-1", "0.5", "1e99", "nan", "inf", "many"])
def test_a_collective_timeout_that_cannot_be(capsys, seconds):
    with pytest.raises(SystemExit) as ended:
        parse(["tiny", f"--train.collective-timeout={seconds}"], "")
    assert ended.value.code == 2 and "collective-timeout" in "".join(capsys.readouterr())


def test_home_in_every_path_of_a_command_line(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    words = "tiny --out=~/run --init ~/step --resume=~/other --data.path ~/a.txt:0.5 ~/b"
    words += " --data.tokenizer=~/t.json"
    cfg = parse(words.split(), "")
    home = str(tmp_path)
    assert (cfg.out, cfg.init, cfg.resume) == (f"{home}/run", f"{home}/step", f"{home}/other")
    assert cfg.data.path == (f"{home}/a.txt:0.5", f"{home}/b") and cfg.data.tokenizer == f"{home}/t.json"
    assert folders.expand_home(["a~b", "--like=~/x", "~", "-x", "--a=b~"]) == [
        "a~b",
        f"--like={home}/x",
        home,
        "-x",
        "--a=b~",
    ]


@pytest.mark.parametrize(
    "tool", ["checkpoint verify {}", "hf import {} /tmp/none", "report {}", "data {} --out=~/y"]
)
def test_home_in_offline_tools(tmp_path, tool):
    words = ["-m", *f"tmoe.{tool.format('~/nothing-here')}".split()]
    done = forked.run(words, env=os.environ | dict(HOME=str(tmp_path)))
    assert done.returncode and f"{tmp_path}/nothing-here" in done.stdout + done.stderr
