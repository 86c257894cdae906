"""Expert groups stay inside nodes unless asked otherwise, which every rank says before any collective.

And a run over two real hosts.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
import two_hosts
from runs import SMALL, lines

import train
from tmoe.cli.parse import parse
from tmoe.config.axes import Axes
from tmoe.parallel import build_mesh, launcher
from tmoe.parallel.mesh import require_inside_nodes
from tmoe.post import task


def on_nodes(rank: int, sizes: list[int]) -> dict[str, str]:
    """torchrun's environment of a rank on nodes that hold these numbers of processes."""
    node = next(n for n in range(len(sizes)) if rank < sum(sizes[: n + 1]))
    return dict(
        GROUP_RANK=str(node),
        GROUP_WORLD_SIZE=str(len(sizes)),
        LOCAL_WORLD_SIZE=str(sizes[node]),
        LOCAL_RANK=str(rank - sum(sizes[:node])),
    )


def mesh_or_error(
    rank: int, world: int, sizes: list[int], ep: int, across: bool, without: tuple[str, ...] = ()
):
    """Members of the rank's expert group, or the text of the error; no collective may have run before."""
    os.environ.update(on_nodes(rank, sizes))
    for name in without:
        del os.environ[name]
    for name in ("all_reduce", "barrier", "all_gather_object", "new_group"):
        if not across:
            setattr(dist, name, lambda *_, name=name, **__: pytest.fail(f"{name} before the check"))
    try:
        mesh = build_mesh(ep=ep, ep_across_nodes=across)
    except ValueError as error:
        return str(error)
    return mesh.ep.mesh.tolist()


@pytest.mark.parametrize(
    ("sizes", "ep", "valid"),
    [
        ([1, 1], 2, "[1]"),
        ([2, 2], 4, "[1, 2]"),
        ([3, 3], 2, "[1, 3]"),  # two groups would fit into a node, the third spans both
        ([2, 4], 3, "[1, 2]"),
        ([4, 2], 3, "[1, 2]"),  # the first node holds a whole group and learns of the others' trouble
        ([3, 1], 2, "[1]"),
        ([1, 2, 1], 2, "[1]"),  # ranks 1 and 2 share a node, but not a group
    ],
    ids=str,
)
def test_groups_that_span_nodes_are_refused_on_every_rank(gloo, sizes, ep, valid):
    for said in gloo(sum(sizes), mesh_or_error, sizes, ep, False):
        assert said.startswith(f"--parallel.ep={ep}: ") and "span nodes" in said
        assert f"(of {sorted(set(sizes))} processes)" in said
        assert f"valid: {valid}, or --parallel.ep-across-nodes" in said


@pytest.mark.parametrize(("sizes", "ep"), [([2, 2], 2), ([4], 4), ([4, 2], 2), ([1, 3], 1)], ids=str)
def test_groups_inside_nodes(gloo, sizes, ep):
    """ep joins neighbours on one node and dp crosses nodes, without a word from the user."""
    world = sum(sizes)
    for rank, group in enumerate(gloo(world, real_mesh, sizes, ep, False)):
        assert group == list(range(rank // ep * ep, rank // ep * ep + ep))


@pytest.mark.parametrize(("sizes", "ep"), [([2, 2], 4), ([3, 1], 2)], ids=str)
def test_asked_for_across_nodes(gloo, sizes, ep):
    for rank, group in enumerate(gloo(sum(sizes), real_mesh, sizes, ep, True)):
        assert group == list(range(rank // ep * ep, rank // ep * ep + ep))


def real_mesh(rank: int, world: int, sizes: list[int], ep: int, across: bool) -> list[int]:
    os.environ.update(on_nodes(rank, sizes))
    build_mesh(ep=1)  # a second mesh in one process group meets under keys of its own
    return build_mesh(ep=ep, ep_across_nodes=across).ep.mesh.tolist()


@pytest.mark.parametrize(
    ("sizes", "ep", "valid"), [([2, 2], 4, "[1, 2]"), ([1, 2, 1], 2, "[1]"), ([1, 1], 2, "[1]")], ids=str
)
def test_launchers_that_set_the_local_rank_alone(gloo, sizes, ep, valid):
    for said in gloo(
        sum(sizes), mesh_or_error, sizes, ep, False, ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
    ):
        assert f"--parallel.ep={ep}" in said and f"valid: {valid}" in said


def test_launchers_that_set_ranks_alone(gloo):
    for said in gloo(4, by_hosts, [2, 2], 4):
        assert "--parallel.ep=4" in said and "valid: [1, 2]" in said
    assert gloo(4, by_hosts, [2, 2], 2) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def by_hosts(rank: int, world: int, sizes: list[int], ep: int):
    node = on_nodes(rank, sizes)["GROUP_RANK"]
    socket.gethostname = lambda: f"host{node}"
    for name in on_nodes(rank, sizes):
        os.environ.pop(name, None)
    try:
        return build_mesh(ep=ep).ep.mesh.tolist()
    except ValueError as error:
        return str(error)


def test_without_a_launcher_nothing_is_refused(gloo):
    names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
    assert gloo(2, without_launcher, names) == [[0, 1]] * 2


def without_launcher(rank: int, world: int, names: tuple[str, ...]) -> list[int]:
    for name in names:
        os.environ.pop(name, None)
    return build_mesh(ep=world).ep.mesh.tolist()


def test_large_worlds_are_checked_quickly():
    """512 nodes of 8: the decision of each rank, on facts that the store has collected."""
    nodes = [str(r // 8) for r in range(4096)]
    require_inside_nodes(Axes(dp=512, ep=8), nodes, False)
    with pytest.raises(ValueError, match=r"256 of 256 expert groups.*\[8\] processes.*valid: \[1, 2, 4, 8\]"):
        require_inside_nodes(Axes(dp=256, ep=16), nodes, False)
    require_inside_nodes(Axes(dp=256, ep=16, tp=8), nodes, True)
    with pytest.raises(ValueError, match=r"--parallel.tp=16: 256 of 256 groups.*valid: \[1, 2, 4, 8\]"):
        require_inside_nodes(Axes(dp=4096, tp=16), nodes, True)
    with pytest.raises(ValueError, match=r"--parallel.etp=4 x --parallel.ep=4 = 16: 256 of 256 groups"):
        require_inside_nodes(Axes(dp=256, etp=4, ep=4), nodes, True)


@pytest.mark.parametrize("rank", [0, 3, 7])
def test_command_line_refuses_before_a_process_group_exists(monkeypatch, capsys, rank):
    """That there are more nodes than expert groups is certain on every rank alike.

    So nothing is compiled or joined first.
    """
    for name, value in dict(on_nodes(rank, [4, 4]), RANK=str(rank), WORLD_SIZE="8").items():
        monkeypatch.setenv(name, value)
    assert parse(["tiny", "--parallel.ep", "4"], "", rank=rank, world=8).parallel.ep == 4
    assert parse(["tiny", "--parallel.ep", "8", "--parallel.ep-across-nodes"], "", rank=rank, world=8)
    assert parse(["tiny", "--parallel.ep", "8", "--dry-run", "--world", "16"], "", rank=rank, world=8)
    with pytest.raises(SystemExit) as ended:
        parse(["tiny", "--parallel.ep", "8"], "", rank=rank, world=8)
    assert ended.value.code == 2 and not dist.is_initialized()
    said = capsys.readouterr().err
    assert (
        "--parallel.ep=8: 1 expert groups on 2 nodes" in said and "--parallel.ep-across-nodes" in said
    ) == (rank == 0)


def run_train(rank: int, world: int, sizes: list[int], argv: list[str], folder: Path) -> tuple[int, str]:
    os.environ.update(on_nodes(rank, sizes), RANK=str(rank), WORLD_SIZE=str(world))
    task.open_data = lambda *_: pytest.fail("data was opened before the layout was refused")
    with (folder / str(rank)).open("w+") as said:
        with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as ended:
            train.main(argv)
        said.seek(0)
        return ended.value.code, said.read()


def test_train_ends_with_code_2_on_every_rank(gloo, tmp_path):
    """Nodes of 3 and 1: only the store can tell.

    So train.py refuses right after the process group has met.
    """
    argv = ["tiny", "--no-compile", "--parallel.ep", "2", "--out", str(tmp_path / "run")]
    ends = gloo(4, run_train, [3, 1], argv, tmp_path)
    assert [code for code, _ in ends] == [2] * 4
    assert ends[0][1].startswith(
        "error: --parallel.ep=2: 1 of 2 expert groups would span nodes (of [1, 3] processes)"
    )
    assert [said for _, said in ends[1:]] == ["", "", ends[0][1]], "said once on each node"
    assert not (tmp_path / "run").exists()


def test_each_life_meets_under_a_name_of_its_own(monkeypatch):
    """Workers that torchrun started again share its store with the dead ones, and one of them comes late."""
    agents = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(agents, 0, 1)]))

    def join(rank: int, world: int, late: int) -> dist.Store:
        time.sleep(0.2 * (rank == late))
        return launcher.meet(rank, world)

    lives = []
    for world, late in ((3, 0), (3, 1), (2, 0), (4, 3), (1, None)):
        with ThreadPoolExecutor(world) as pool:
            stores = [
                joined.result(300) for joined in [pool.submit(join, r, world, late) for r in range(world)]
            ]
        stores[0].set("address", f"of life {len(lives)}")
        assert {store.get("address").decode() for store in stores} == {f"of life {len(lives)}"}
        lives.append(stores[-1])
    assert [life.get("address").decode() for life in lives] == [f"of life {n}" for n in range(5)]


DIES_ONCE = """
import os, sys
from pathlib import Path
import train

dead, compute = Path(sys.argv[1]), train.Trainer.forward_backward

def dying(self, *args):
    if self.step == 3 and os.environ["RANK"] == "1" and not dead.exists():
        dead.write_text(os.environ["TORCHELASTIC_USE_AGENT_STORE"])
        os._exit(9)
    return compute(self, *args)

train.Trainer.forward_backward = dying
train.main(sys.argv[2:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("agents", [1, 2])
def test_torchrun_starts_dead_workers_again(tmp_path, agents):
    """--max-restarts works as it is: rank 1 dies in its first life, the second goes on from the checkpoint.

    Two gloo workers under one agent. With two agents only one of them counts the restart.
    """
    (tmp_path / "worker.py").write_text(DIES_ONCE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = tmp_path / "run"
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(agents), "--max-restarts", "1"]
    agent += [
        "--nproc-per-node",
        str(2 // agents),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
    ]
    agent += [
        "--rdzv-id",
        "x",
        "--local-addr",
        "127.0.0.1",
        str(tmp_path / "worker.py"),
        str(tmp_path / "dead"),
    ]
    flags = [
        *SMALL,
        "--steps",
        "6",
        "--checkpoint.every",
        "2",
        "--checkpoint.mode",
        "sync",
        "--out",
        str(out),
    ]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(Path(train.__file__).parent),
    }
    env.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
    logs = [(tmp_path / f"log-{i}").open("w+") for i in range(agents)]
    runs = [subprocess.Popen([*agent, *flags], env=env, stdout=log, stderr=log) for log in logs]
    try:
        codes = [run.wait(800) for run in runs]
    finally:
        for run in runs:
            run.kill()
    said = "".join(Path(log.name).read_text() for log in logs)
    assert codes == [0] * agents, said
    assert (tmp_path / "dead").read_text() == "True", "the agent's store is what this is about"
    assert "resumed after step 2" in said
    assert [line["step"] for line in lines(out)] == list(range(1, 7))


@pytest.mark.slow
def test_two_hosts_lose_one_and_go_on():
    """tests/lib/two_hosts.py: torchrun meets between network namespaces, a host is killed, the run resumes.

    dp crosses the hosts and ep stays inside them.
    """
    if reason := two_hosts.obstacle():
        pytest.skip(reason)
    before = subprocess.check_output(["ip", "netns", "list"]), set(os.listdir("/sys/class/net"))
    done = subprocess.run([sys.executable, two_hosts.__file__], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in (
        "one host: 16 steps",
        "rank 2 is silent for",
        "rank 3 is silent for",
        "dp 2 across, ep 2 inside: 16 steps",
    ):
        assert text in done.stdout
    assert before == (subprocess.check_output(["ip", "netns", "list"]), set(os.listdir("/sys/class/net"))), (
        "left behind"
    )
