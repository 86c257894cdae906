"""Other versions of torch and triton: a start says only what is for the user; private names may be missing.

next: tests/end_to_end/test_train.py
"""

import collections
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import forked
import pytest
import torch
import torch.distributed as dist

from tmoe.base import private_torch as stack
from tmoe.parallel import build_mesh, mesh
from tmoe.parallel.mesh import local_slices

ROOT = Path(__file__).parents[1]
# Runs train.py on a torch without any private name, except those that have no replacement. It comes
# before `import tmoe`.
STRANGER = """
import importlib.util, runpy, sys
spec = importlib.util.spec_from_file_location("tmoe.base.private_torch", "tmoe/base/private_torch.py")
stack = sys.modules["tmoe.base.private_torch"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stack)
there = stack.find
stack.find = lambda path: there(path) if path in stack.NEEDED else None
sys.path.insert(0, ".")
runpy.run_path("train.py", run_name="__main__")
"""


# train.py in a process that has imported torch already.
FORKED = """
import runpy, warnings
warnings.simplefilter("error", FutureWarning)
runpy.run_path("train.py", run_name="__main__")
"""


def train(world: int, out: Path, *words: str, fresh: bool = True) -> tuple[list[float], str]:
    """Losses of two steps, and what was written to stderr. A FutureWarning ends the run.

    words: the program, which is forked unless it is `fresh`, and flags.
    """
    words = (*words, "--steps", "2", "--train.batch", "2", "--log.no-report", "--out", str(out))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::FutureWarning"}
    if fresh:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(world)] if world > 1 else []
        command = [sys.executable, *launcher, *words]
        ran = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=800)
    else:
        ran = forked.torchrun(world, words, env=env)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line], ran.stderr


@pytest.mark.slow
def test_a_start_says_nothing_that_is_not_for_the_user(tmp_path):
    """One process that compiles: torch and its compiler would have warnings of their own to give."""
    assert train(1, tmp_path, "train.py", "tiny")[1] == ""


@pytest.mark.slow
def test_without_private_names_a_run_computes_the_same(tmp_path):
    """Two processes, the experts spread over them.

    Each note comes once, from rank 0. Where no name is missing, nothing is said at all.
    """
    flags = "tiny", "--no-compile", "--parallel.ep", "2"
    script = tmp_path / "stranger.py"
    script.write_text(STRANGER)
    want, said = train(2, tmp_path / "own", "-c", FORKED, *flags, fresh=False)
    assert said == "" and len(want) == 2
    got, said = train(2, tmp_path / "stranger", str(script), *flags)
    assert got == want
    notes = collections.Counter(said.splitlines())
    assert set(notes.values()) == {1} and all(stack.TESTED in note for note in notes), said
    for name in ("_get_default_store", "_len_torch_dispatch_stack", "queue_callback", "counters"):
        assert any(f"torch {torch.__version__} has no torch." in note and name in note for note in notes), (
            name
        )


def meet(rank, world, gone):
    """nodes_of_ranks twice, what a store of the group keeps, and the timeout of build_mesh's groups."""
    given = []
    if gone:
        mesh._get_default_store = None
        dist.distributed_c10d.__dict__.pop("_set_pg_timeout", None)
        dist.__dict__.pop("set_timeout", None)
    else:
        dist.set_timeout = lambda limit, group: given.append(limit)
    grid = build_mesh(ep=2)
    store = mesh.default_store()
    store.set(f"rank {rank}", str(rank))
    said = [store.get(f"rank {r}").decode() for r in range(world)]
    dist.barrier()  # rank 0 holds the store
    return said, mesh.nodes_of_ranks(), grid.ep.size(), given


@pytest.mark.parametrize("gone", [False, True])
def test_ranks_meet_without_the_groups_store(gloo, gone):
    for said, nodes, ep, given in gloo(2, meet, gone):
        assert said == ["0", "1"] and len(nodes) == 2 and len({*nodes}) == 1 and ep == 2
        assert len(given) == (0 if gone else 3) and len({*given}) <= 1
        assert all(isinstance(limit, timedelta) for limit in given)


def slices(rank, world):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    full = torch.arange(5 * 3).view(5, 3)
    t = distribute_tensor(full, init_device_mesh("cpu", (world,)), [Shard(0)])
    return full[local_slices(t)].tolist(), t.to_local().tolist()


def test_local_slices_need_no_private_name(gloo):
    """Five rows on four ranks: 2, 2, 1 and none."""
    found = gloo(4, slices)
    assert [len(mine) for mine, _ in found] == [2, 2, 1, 0]
    assert all(mine == held for mine, held in found)


def test_what_a_path_leads_to():
    assert stack.find("torch.distributed.distributed_c10d._get_default_store") is not None
    assert stack.find("torch.Tensor._version") is not None and stack.find("json.dumps") is json.dumps
    for gone in ("torch._no_such", "torch.no.such.module", "no_such_package.name", "torch.Tensor._no.such"):
        assert stack.find(gone) is None


def test_a_note_comes_once_and_from_rank_0(monkeypatch, caplog):
    stack.note.cache_clear()
    for _ in range(3):
        assert stack.find_or_note("torch._no_such", "it takes longer") is None
    (record,) = caplog.records
    words = (
        f"torch {torch.__version__} has no torch._no_such: it takes longer "
        f"(tmoe was tested with {stack.TESTED})"
    )
    assert record.getMessage() == words
    monkeypatch.setenv("RANK", "1")
    stack.find_or_note("torch._no_such", "something else")
    assert len(caplog.records) == 1


def test_what_has_no_other_way_ends_a_start_in_one_line(monkeypatch, capsys):
    from tmoe.run import process as runtime

    assert stack.lacks() == ""
    monkeypatch.setitem(stack.NEEDED, "torch._foreach_gone_", "the optimizer")
    want = (
        f"torch {torch.__version__} has no torch._foreach_gone_ (the optimizer): "
        f"tmoe was tested with {stack.TESTED}"
    )
    assert stack.lacks() == want
    with pytest.raises(SystemExit) as ended:
        runtime.launched()
    assert ended.value.code == 2 and capsys.readouterr().err == f"error: {want}\n"
    with pytest.raises(RuntimeError, match=r"torch\._foreach_gone_"):
        build_mesh()
    with pytest.raises(RuntimeError, match=r"--optim.offload: torch .* has no int._spec"):
        stack.need(3, "_spec", "--optim.offload")


def test_readme_names_the_tested_stacks():
    assert stack.TESTED in (ROOT / "README.md").read_text()
