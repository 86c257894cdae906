"""The world that a launcher announces (torchrun, mpiexec, srun): this process's place in it, how to join it.

Each launcher sets environment variables, from which a process reads its place:

    torchrun, or any launcher that sets the same variables
        rank, world             RANK, WORLD_SIZE
        on this node            LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK
        address of the store    MASTER_ADDR, MASTER_PORT
    mpiexec of Open MPI
        rank, world             OMPI_COMM_WORLD_RANK, _SIZE
        on this node            OMPI_COMM_WORLD_LOCAL_RANK, _LOCAL_SIZE
        address of the store    on one node 127.0.0.1; on several nodes MASTER_ADDR
    mpiexec of MPICH or Intel MPI
        rank, world             PMI_RANK, PMI_SIZE
        on this node            MPI_LOCALRANKID, MPI_LOCALNRANKS
        address of the store    as with Open MPI
    mpiexec of MVAPICH or of Cray's PALS, jsrun, flux run
        rank, world             the variables in RANKS (below)
        on this node            the variables in RANKS; without them MASTER_ADDR must be set
        address of the store    as with Open MPI
    srun
        rank, world             SLURM_PROCID, SLURM_STEP_NUM_TASKS
        on this node            SLURM_LOCALID, SLURM_NODEID
        address of the store    the first node of SLURM_STEP_NODELIST

Launchers higher in this list take precedence: torchrun may run inside an srun task, and mpiexec starts its
own daemons with srun.

next: parallel/mesh.py
"""

import json
import logging
import os
import re
import time
import uuid
import zlib
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = timedelta(minutes=10)  # time limit of a collective, and of the first connection of all ranks
PORT = 29500  # torch's default port, if no variable distinguishes this job from others on the same host
# Slurm numbers interactive, batch and external steps from this number on. Such steps start no ranks.
SPECIAL_STEP = 2**32 - 6
# Only srun sets these variables. A shell of sbatch or salloc has just SLURM_PROCID=0 and SLURM_NTASKS.
STEP_MARKS = (
    "SLURM_STEP_ID",
    "SLURM_STEPID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_LAUNCH_NODE_IPADDR",
)
PARTS = "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"
Names = tuple[tuple[str, ...], ...]
# For each launcher, the names of the variables of PARTS, in order; the first name that is set is used. PMIx
# and ALPS have no variable for the size.
RANKS: tuple[tuple[str, Names], ...] = (
    ("mpiexec", tuple((f"OMPI_COMM_WORLD_{part}",) for part in PARTS)),
    ("mpiexec", tuple((f"MV2_COMM_WORLD_{part}",) for part in PARTS)),
    ("mpiexec", tuple((f"MVP_COMM_WORLD_{part}",) for part in PARTS)),
    ("jsrun", tuple((f"JSM_NAMESPACE_{part}",) for part in PARTS)),
    ("flux", (("FLUX_TASK_RANK",), ("FLUX_JOB_SIZE",), ("FLUX_TASK_LOCAL_ID",), ())),
    (
        "mpiexec",
        (
            ("PMI_RANK",),
            ("PMI_SIZE",),
            ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
            ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
        ),
    ),
    ("mpiexec", (("PALS_RANKID",), ("PALS_SIZE",), ("PALS_LOCAL_RANKID",), ("PALS_LOCAL_SIZE",))),
    ("mpiexec", (("PMIX_RANK",), (), (), ())),
    ("aprun", (("ALPS_APP_PE",), (), (), ())),
)
TOLD_WHOLE = ("", "torchrun", "environment")  # with these, MASTER_ADDR and MASTER_PORT must be set; "": none
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class World:
    """This process's place in the world. None: the launcher does not announce this value.

    rank, size: of this process, and of the world.
    local_rank, local_size: of this process among the ranks of its node, and their number.
    node: name of the node, equal on ranks that share a node.
    nodes: number of nodes.
    launcher: "torchrun", "srun" or a launcher of RANKS; "": no launcher.
        "environment": RANK and WORLD_SIZE are set, but not by torchrun.
    told: the variables that rank and size were read from, with their values, for messages.
    """

    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None
    node: str | None = None
    nodes: int | None = None
    launcher: str = ""
    told: str = ""


def launcher_world() -> World:
    """This process's place according to the environment; rank and size from the default group if it exists.

    ValueError, in one line, if variables are incomplete, hold no valid number, or contradict each other.
    """
    rank = env_number("RANK")
    size = env_number("WORLD_SIZE", least=1)
    if dist.is_initialized():
        try:
            other = world_of_mpiexec_or_srun()
        except ValueError:  # the process group exists in spite of the wrong variables
            other = None
        launcher = other.launcher if other else ""
        world = World(
            dist.get_rank(), dist.get_world_size(), launcher="environment" if rank is not None else launcher
        )
        return with_places(world, other)
    both_set = rank is not None and size is not None
    try:
        other = world_of_mpiexec_or_srun()
    except ValueError:
        if not both_set:
            raise
        other = None
    if rank is not None and size is not None:
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "environment"
        world = World(rank, size, launcher=launcher, told=f"RANK={rank} and WORLD_SIZE={size}")
    elif other:
        require_agreement(rank, size, other)
        world = other
    else:
        world = World()
    require_whole(rank, size, world)
    return with_places(world, other)


def with_places(world: World, other: World | None) -> World:
    """`world` with its place on the node, from torchrun's variables, or from `other` if it is equal."""
    same = other if other and (other.rank, other.size) == (world.rank, world.size) else World()
    local_rank = env_number("LOCAL_RANK")
    local_size = env_number("LOCAL_WORLD_SIZE", least=1)
    return World(
        world.rank,
        world.size,
        same.local_rank if local_rank is None else local_rank,
        same.local_size if local_size is None else local_size,
        os.environ.get("GROUP_RANK") or same.node,
        env_number("GROUP_WORLD_SIZE", least=1) or same.nodes,
        world.launcher,
        world.told,
    )


def require_whole(rank: int | None, size: int | None, world: World) -> None:
    """Raises ValueError if only one of RANK and WORLD_SIZE is known, or if the rank is outside the world.

    It is also raised if LOCAL_RANK or LOCAL_WORLD_SIZE is set without both.
    """
    half = not world.launcher and (rank is not None or (size or 1) > 1)
    if half or (world.launcher in ("torchrun", "environment") and world.rank >= world.size):
        variables = f"RANK={os.environ.get('RANK', '')} and WORLD_SIZE={os.environ.get('WORLD_SIZE', '')}"
        raise ValueError(
            f"{variables} in the environment: RANK must be from 0 to WORLD_SIZE - 1; "
            "start with torchrun, which sets both, or unset both"
        )
    alone = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if env_number(name) is not None]
    if alone and not world.launcher and size is None:
        variables = " and ".join(f"{name}={os.environ[name]}" for name in alone)
        raise ValueError(
            f"{variables} in the environment without RANK and WORLD_SIZE: each process would train alone; "
            f"start with torchrun, which sets them all, or unset {' and '.join(alone)}"
        )
    if world.rank >= world.size:
        raise ValueError(
            f"{world.told} in the environment: the rank must be from 0 to the number of ranks - 1"
        )


def require_agreement(rank: int | None, size: int | None, other: World) -> None:
    """ValueError if RANK or WORLD_SIZE is set alone and differs from the launcher's value."""
    for name, ours, theirs in (("RANK", rank, other.rank), ("WORLD_SIZE", size, other.size)):
        if ours not in (None, theirs):
            raise ValueError(
                f"{name}={ours} in the environment, but {other.launcher} says {other.told}: unset {name}, "
                f"or set RANK and WORLD_SIZE both"
            )


def world_of_mpiexec_or_srun() -> World | None:
    """The world that mpiexec or srun announces, None if neither started this process.

    ValueError if the variables of mpiexec and srun contradict each other, or those of one are inconsistent.
    """
    srun = world_of_srun()
    mpi = world_of_ranks(srun)
    if mpi is None or srun is None:
        return mpi or srun
    if (mpi.rank, mpi.size) == (srun.rank, srun.size):  # srun itself speaks PMI to MPI programs
        return srun
    if mpi.size == 1 and srun.size > 1:  # left over from an outer shell: each task would train alone
        settings = mpi.told.replace(" and ", " ").split()
        unset = " ".join("-u " + word.partition("=")[0] for word in settings)
        raise ValueError(
            f"{mpi.told} in the environment, but srun says {srun.told}: unset what does not hold "
            f"(srun env {unset} python ...)"
        )
    return mpi  # mpiexec starts its daemons with srun: the tasks of this step are not the ranks


def world_of_ranks(srun: World | None) -> World | None:
    """The world of the first launcher of RANKS that sets both rank and size; None without such variables.

    ValueError if only one of the two is set, because each rank would then train alone. Inside srun this is
    not an error: srun sets some of these variables for MPI programs.
    """
    half = ""
    for launcher, names in RANKS:
        rank = first_number(names[0], sets=launcher)
        size = first_number(names[1], least=1, sets=launcher)
        given = " and ".join(
            f"{name}={os.environ.get(name, '')}" for name in [group[0] for group in names[:2] if group]
        )
        if rank is not None and size is not None:
            one_node = launcher == "flux" and os.environ.get("FLUX_JOB_NNODES") == "1"
            local_size = size if one_node else first_number(names[3], least=1, sets=launcher)
            return World(
                rank, size, first_number(names[2], sets=launcher), local_size, None, None, launcher, given
            )
        if not half and (rank is not None or (size is not None and launcher == "mpiexec")):
            half = f"{given} in the environment: {launcher} sets both; start with it, or unset both"
            if not names[1]:
                half = (
                    f"{given} in the environment without the number of ranks, which {launcher} does not set: "
                    f"start with torchrun, set RANK=${names[0][0]} and WORLD_SIZE for each rank, or unset it"
                )
    # a shell of srun --pty, which sets PMIX_RANK as well
    shell = any(os.environ.get(name) for name in STEP_MARKS)
    if half and srun is None and not (shell and "PMIX_RANK=0 " in half):
        raise ValueError(half)
    return None


def world_of_srun() -> World | None:
    """The world of the srun step that this process is a task of, None if it is not a task.

    A batch script and a shell of salloc are not tasks. A process started from a terminal of `srun --pty` is
    not treated as a task either, because the other tasks of that step do not start the program.
    """
    rank = env_number("SLURM_PROCID", sets="srun")
    if rank is None:
        return None
    step = os.environ.get("SLURM_STEP_ID") or os.environ.get("SLURM_STEPID") or "0"
    marked = any(os.environ.get(name) for name in STEP_MARKS)
    if marked and (not step.isdecimal() or int(step) >= SPECIAL_STEP):
        return None
    size = first_number(("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), least=1, sets="srun")
    if rank and not marked:
        raise ValueError(
            f"SLURM_PROCID={rank} in the environment without SLURM_STEP_ID, which srun sets: "
            "start with srun, or unset SLURM_PROCID"
        )
    if not marked or (os.environ.get("SLURM_PTY_PORT") and on_a_terminal()):
        return None
    if size is None:
        raise ValueError(
            f"SLURM_PROCID={rank} in the environment without SLURM_STEP_NUM_TASKS: "
            "start with srun, or unset SLURM_PROCID"
        )
    counted = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in os.environ else "SLURM_NTASKS"
    return World(
        rank,
        size,
        env_number("SLURM_LOCALID", sets="srun"),
        tasks_on_this_node(size),
        os.environ.get("SLURM_NODEID") or None,
        nodes_of_step(),
        "srun",
        f"SLURM_PROCID={rank} and {counted}={size}",
    )


def on_a_terminal() -> bool:
    """Whether this process reads from a terminal."""
    try:
        return os.isatty(0)
    except OSError:
        return False


def nodes_of_step() -> int | None:
    """The number of nodes of the srun step."""
    return first_number(("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), least=1, sets="srun")


def tasks_on_this_node(size: int) -> int | None:
    """The number of tasks on this node, from SLURM_STEP_TASKS_PER_NODE.

    The variable is "4(x2),3" for nodes with 4, 4 and 3 tasks.
    """
    if nodes_of_step() == 1:
        return size
    counts: list[int] = []
    for part in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            counts += [int(match[1])] * int(match[2] or 1)
    node = env_number("SLURM_NODEID", sets="srun")
    return counts[node] if node is not None and node < len(counts) else None


def env_number(name: str, least: int = 0, sets: str = "torchrun") -> int | None:
    """The number in an environment variable, None if the variable is not set.

    name: of the variable.
    least: smallest valid number.
    sets: the launcher that sets the variable, for the message.
    ValueError if the variable does not hold a whole number of at least `least`.
    """
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or int(text) < least:
        raise ValueError(
            f"{name}={text!r} in the environment: must be a whole number from {least} on, as {sets} sets it"
        )
    return int(text)


def first_number(names: tuple[str, ...], least: int = 0, sets: str = "mpiexec") -> int | None:
    """The `env_number` of the first variable of `names` that is set, None if none is set."""
    return next((env_number(name, least, sets) for name in names if name in os.environ), None)


def require_a_gpu_each(world: World) -> None:
    """ValueError if this node has more ranks than GPUs, or if no variable determines this rank's GPU."""
    gpus = torch.cuda.device_count()
    processes = max((world.local_rank or 0) + 1, world.local_size or 1)
    if 0 < gpus < processes:
        srun = "; srun without --gpus-per-task and --gpu-bind, but with --gpus-per-node" * (
            world.launcher == "srun"
        )
        raise ValueError(
            f"{processes} processes on this host, which shows {gpus} GPU{'s' * (gpus > 1)}, and each needs a "
            f"separate GPU: start {gpus} (torchrun --nproc-per-node {gpus}), or let every process see all of "
            f"the host's GPUs (CUDA_VISIBLE_DEVICES{srun})"
        )
    if gpus > 1 and world.launcher and world.size > 1 and world.local_rank is None:
        raise ValueError(
            f"{world.told} in the environment without LOCAL_RANK: set it to this rank's number among those "
            "of its node, which is the number of its GPU"
        )


def meeting_place(world: World) -> tuple[str, int]:
    """Address and port of rank 0's store, through which the ranks of a world connect.

    ValueError, with the command to type, if no variable determines them.
    """
    address = os.environ.get("MASTER_ADDR")
    port = env_number("MASTER_PORT", least=1)
    if world.launcher in TOLD_WHOLE:
        if not address or port is None:
            missing = "MASTER_PORT" if address else "MASTER_ADDR"
            raise ValueError(
                f"{world.told} in the environment without {missing}: start with torchrun, "
                f"or export MASTER_ADDR=NODE MASTER_PORT={PORT} with the name of rank 0's node"
            )
        return address, port

    unknown = world.local_size is None
    on_one_node = world.local_rank == world.rank if unknown else world.local_size == world.size
    if not address and on_one_node:
        address = "127.0.0.1"
    if not address and world.launcher == "srun":
        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
        address = first_host(nodes) if nodes else None
    if not address:
        how = f"mpiexec -genv MASTER_ADDR NODE -genv MASTER_PORT {PORT} ..."
        if world.launcher == "srun":
            how = f"MASTER_ADDR=NODE MASTER_PORT={PORT} srun ..."
        elif world.launcher != "mpiexec" or world.told.startswith("MV") or "PALS_RANKID" in os.environ:
            how = f"MASTER_ADDR=NODE MASTER_PORT={PORT} in the environment of every rank"
        elif "OMPI_COMM_WORLD_RANK" in os.environ:
            how = f"mpiexec -x MASTER_ADDR=NODE -x MASTER_PORT={PORT} ..."
        raise ValueError(
            f"{world.told} in the environment, on more than one node as far as {world.launcher} says, and "
            f"without an address to meet at: {how} with the name of rank 0's node"
        )
    return address, port or job_port(world)


def job_port(world: World) -> int:
    """A port that is the same for all ranks of this job, and rarely the same for two jobs on a host."""
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "FLUX_JOB_ID", "PALS_APID")
    if world.launcher == "srun":
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    job = ".".join(os.environ[name] for name in names if os.environ.get(name))
    return 20000 + zlib.crc32(job.encode()) % 9000 if job else PORT  # below the systems' ephemeral ports


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: gpu07 for gpu[07-09,12],login1."""
    return re.split(r",(?![^\[]*\])", re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes))[0]


def join(patience: timedelta = PATIENCE) -> World:
    """Makes the default process group of the world that the launcher announces, and selects this rank's GPU.

    Without a launcher the group contains only this process.

    patience: how long the ranks wait for each other, to connect and in each collective.
    ValueError, in one line, if that cannot work.
    """
    world = launcher_world()
    require_a_gpu_each(world)
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if not world.launcher and tasks != "1":
        log.warning("note: not started by srun, so this process trains alone (SLURM_NTASKS=%s)", tasks)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(world.local_rank or 0)
    dist.init_process_group(
        "cuda:nccl,cpu:gloo" if cuda else "gloo",
        store=store_of(world, patience),
        rank=world.rank,
        world_size=world.size,
        timeout=patience,
    )
    return world


def store_of(world: World, patience: timedelta) -> dist.Store:
    """The store through which the ranks connect. ValueError if rank 0 does not open it in time."""
    if world.size == 1:  # needs no address
        return dist.HashStore()
    if shares_store():
        return meet(world.rank, world.size, patience)
    address, port = meeting_place(world)
    try:
        return dist.TCPStore(address, port, world.size, world.rank == 0, patience, multi_tenant=True)
    except (RuntimeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(
            f"rank {world.rank} of {world.size} found no other at {address}:{port} "
            f"(MASTER_ADDR, MASTER_PORT): {why}"
        ) from None


def shares_store() -> bool:
    """Whether torchrun's agent holds the store, which then outlives restarts of workers (--max-restarts)."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meet(rank: int, world: int, patience: timedelta = PATIENCE) -> dist.Store:
    """The agent's store, under a prefix that is used only until the next restart of the workers.

    Under a constant prefix gloo would look up the addresses of dead workers. The environment does not
    distinguish restarts: RESTART_COUNT grows only on the agent whose worker died. So each rank stores a
    random name. Rank 0 stores all names that it reads, together with a prefix for this start of the workers.
    A rank that finds its own name among them knows that they are from rank 0 of the same start.

    RuntimeError if not all ranks connect within `patience`.
    """
    agents, _, _ = next(dist.rendezvous("env://", rank, world, timeout=patience))
    store = dist.PrefixStore("tmoe lives", agents)
    me = uuid.uuid4().hex
    end = time.monotonic() + patience.total_seconds()
    store.set(f"{rank}", me)
    life = me
    missing = [f"{me} {r}" for r in range(1, world)]
    while rank == 0 and missing:
        # a name may be a dead worker's until the new worker has stored its own
        names = [name.decode() for name in store.multi_get([f"{r}" for r in range(world)])]
        store.set("life", json.dumps([life, names]))
        missing = [key for key in missing if not store.check([key])]
        if missing and time.monotonic() > end:
            raise RuntimeError(
                f"ranks {[int(key.split()[1]) for key in missing]} did not come within {patience}"
            )
        time.sleep(0.02)
    while rank > 0:
        life, names = json.loads(store.get("life"))
        if names[rank : rank + 1] == [me]:
            store.set(f"{life} {rank}", "")
            break
        if time.monotonic() > end:
            raise RuntimeError(f"rank 0 did not come within {patience}")
        time.sleep(0.02)
    return dist.PrefixStore(life, store)
