"""The gloo workers themselves: results, errors, deaths and hangs reach the test.

Nothing outlives a call.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import forked
import gloo as gloo_module
import pytest
import torch
import torch.distributed as dist


def total(rank, world, factor):
    x = torch.full((3,), float(rank)) * factor
    dist.all_reduce(x)
    return rank, os.getpid(), x, torch.rand(1).item()


def raises_on_rank_1(rank, world):
    if rank == 1:
        raise KeyError("only here")
    dist.barrier()


def unpicklable(rank, world):
    error = ValueError("cannot travel")
    error.handle = lambda: None
    raise error


def dies_on_rank_1(rank, world):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hangs_on_rank_0(rank, world, pid_file):
    if rank == 0:
        child = subprocess.Popen(["sleep", "300"])
        pid_file.write_text(f"{os.getpid()} {child.pid}")
        time.sleep(300)


def running(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("world", [1, 2, 5])
def test_results_in_order_of_rank_and_no_process_left(gloo, world):
    results = gloo(world, total, 2.0)
    assert [rank for rank, *_ in results] == list(range(world))
    assert all(x.tolist() == [world * (world - 1.0)] * 3 for _, _, x, _ in results)
    assert len({number for *_, number in results}) == 1, "ranks start from one seed"
    assert not any(running(pid) for _, pid, *_ in results)


def test_error_keeps_type_and_names_rank(gloo):
    start = time.monotonic()
    with pytest.raises(KeyError, match="only here") as caught:
        gloo(3, raises_on_rank_1)
    assert "raised on rank 1" in caught.value.__notes__[0] and "raises_on_rank_1" in caught.value.__notes__[0]
    assert time.monotonic() - start < gloo_module.shared(10), "peers in a barrier must not hold the test up"


def test_unpicklable_error_arrives_as_text(gloo):
    with pytest.raises(gloo_module.WorkerError, match=r"(?s)rank .*cannot travel"):
        gloo(2, unpicklable)


def test_death_names_rank_and_signal(gloo):
    with pytest.raises(gloo_module.WorkerError, match="rank 1 died by SIGKILL"):
        gloo(3, dies_on_rank_1)


def test_hang_names_ranks_and_ends_their_children(gloo, tmp_path):
    with pytest.raises(gloo_module.WorkerError, match=r"ranks \[0\] of 2 did not return within 5 s"):
        gloo(2, hangs_on_rank_0, tmp_path / "pids", timeout=5)
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    end = time.monotonic() + 60
    while any(running(pid) for pid in pids):
        assert time.monotonic() < end, pids
        time.sleep(0.02)


STRAYS = """
import os, time
if os.environ["RANK"] == "1":
    raise SystemExit(3)
print(os.getpid(), flush=True)
time.sleep(300)
"""


def test_a_forked_rank_that_fails_ends_the_others(monkeypatch):
    monkeypatch.setattr(forked, "FAREWELL_S", 0.5)
    ended = forked.torchrun(2, ["-c", STRAYS])
    assert ended.returncode == 3 and not running(ended.stdout.strip())


STANDS = """
import os, subprocess, sys
from pathlib import Path

import forked

def test_stands():
    here = Path(__file__).parent
    subprocess.Popen(["sh", "-c", f"sleep 300 & echo $! > {here}/sleeper; wait"])
    rank = "import os, time; open(os.environ['RANK'], 'w').write(str(os.getpid())); time.sleep(300)"
    (here / "pytest").write_text(str(os.getpid()))
    forked.torchrun(2, ["-c", rank], cwd=here)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_of_a_test_outlives_pytest(tmp_path, number):
    """Also not what a test starts by itself, if the signal can be caught."""
    (tmp_path / "test_stands.py").write_text(STANDS)
    (tmp_path / "conftest.py").write_text(
        "import orphans\n\n\ndef pytest_configure():\n    orphans.end_with_pytest()\n"
    )
    with ThreadPoolExecutor(1) as beside:
        words = ["-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path / "test_stands.py"]
        run = beside.submit(forked.run, words, cwd=tmp_path)
        files = [tmp_path / name for name in ("pytest", "0", "1", "sleeper")]
        while not all(file.exists() and file.read_text().strip() for file in files):
            assert not run.done(), run.result()
            time.sleep(0.02)
        pids = [int(file.read_text()) for file in files]
        os.kill(pids[0], number)
    assert run.result().returncode == -number
    left = pids if number == signal.SIGTERM else pids[:3]
    end = time.monotonic() + 60
    while any(running(pid) for pid in left):
        assert time.monotonic() < end, pids
        time.sleep(0.02)
    if running(pids[3]):
        os.kill(pids[3], signal.SIGKILL)


def test_forked_ranks_know_their_world():
    ended = forked.torchrun(2, ["-c", "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])"])
    assert ended.returncode == 0 and ended.stdout.splitlines() == ["0 2", "1 2"]
