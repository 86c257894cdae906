"""Which steps stay, what a kill leaves, and what one rank's failure means for the others.

The result is the old step or the new one, and every rank is told.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import time

import pytest
import torch
import torch.distributed as dist
from gloo import WorkerError
from steps import (
    assert_same,
    checkpoints,
    empty_like,
    load_layout,
    plain,
    save_layout,
    sharded,
    steps_of,
)
from steps import two_steps as two_steps  # a fixture
from tiers import slow_but
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks.inject import die_at
from tmoe.checkpoint import dcp as shards
from tmoe.checkpoint import manifest as files
from tmoe.checkpoint.checkpoints import CheckpointError, read_manifest

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected pickle protocol"
)


# ---- which steps stay, and which one is the newest ----


def test_retention_counts_verified_steps_only(two_steps, caplog):
    (two_steps / "step-900").mkdir()  # no manifest: not ours, or another trainer's partial step
    (two_steps / "step-30.backup").mkdir()  # a user's
    (two_steps / f"step-40.tmp-{'0' * 32}").mkdir()  # what a killed save leaves
    os.truncate(two_steps / "step-20" / "__0_0.distcp", 5)
    store = checkpoints(two_steps, keep=2)
    store.save(30, plain(30), {}, {})
    assert steps_of(two_steps) == {"step-10", "step-20", "step-30", "step-900", "step-30.backup"}
    assert "step-20/__0_0.distcp: damaged" in caplog.text
    store.save(50, plain(50), {}, {})
    assert steps_of(two_steps) == {"step-30", "step-50", "step-900", "step-30.backup"}
    assert checkpoints(two_steps, keep=1).find("auto") == two_steps / "step-50"


def test_after_a_rollback_the_step_saved_last_is_the_newest(two_steps, monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: 5)  # even if the clock was set back
    checkpoints(two_steps).save(15, plain(15), {}, {})
    assert checkpoints(two_steps).find("auto") == two_steps / "step-15"
    checkpoints(two_steps, keep=2).save(10, plain(99), {}, {})
    assert steps_of(two_steps) == {"step-10", "step-15"}
    found = empty_like(plain())
    checkpoints(two_steps).load(two_steps / "step-10", found)
    assert_same(found, {n: t.contiguous() for n, t in plain(99).items()})


@pytest.mark.parametrize("again", slow_but([False], [False, True]), ids=["fresh", "same step"])
def test_killed_at_any_write_sync_or_rename(tmp_path, again):
    step = 10 if again else 20
    count = 1
    outcomes = []
    while True:
        folder = tmp_path / str(count)
        checkpoints(folder).save(10, {"w": plain(1)["model.w"]}, {"seed": 1}, {})
        killed = die_at(
            count,
            lambda at=folder: checkpoints(at, keep=2).save(step, {"w": plain(2)["model.w"]}, {"seed": 2}, {}),
        )
        store = checkpoints(folder, keep=1)
        found = {"w": torch.zeros(64, 8)}
        seed = store.load(store.find("auto"), found)[0]["seed"]
        assert torch.equal(found["w"], plain(seed)["model.w"])
        outcomes.append(seed)
        assert store.find(str(folder / "step-10")) or seed == 2
        store.save(step, {"w": plain(3)["model.w"]}, {"seed": 3}, {})  # no cleaning up is needed
        assert store.load(store.find("auto"), found)[0]["seed"] == 3
        assert steps_of(folder) == {f"step-{step}"}
        if not killed:
            break
        count += 1
    assert count > 20 and outcomes == sorted(outcomes) and set(outcomes) == {1, 2}


# ---- several ranks ----


def failing(rank, world, folder, mode, sabotage):
    """Saves step 10, then step 20 with one rank sabotaged; returns what each rank was told."""
    shards.SMALL = 100  # several files and threads a rank, small as the tensors are
    store = checkpoints(folder, keep=1, mode=mode)
    tensors = sharded(world, 2, 10)
    tensors["model.table"] = distribute_tensor(
        torch.ones(512, 8), init_device_mesh("cpu", (world,)), [Shard(0)]
    )
    store.save(10, tensors, {"step": 10}, {})
    store.finish()
    state = sabotage(rank, world) or {"step": 20}
    told = None
    try:
        store.save(20, tensors, state, {})
        while mode == "async" and store._pending:
            store.poll()
            time.sleep(0.01)
    except CheckpointError as error:
        told = str(error)
    dist.barrier()  # every rank goes on; none hangs
    return told, store.find("auto")


def disk_full(rank, world):
    if rank == 1:  # python ignores SIGXFSZ, so a write past the limit fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))


def helper_thread_fails(rank, world):
    original = files.write_chunk
    calls = []

    def fails(file, tensor, offset):
        calls.append(file)
        if rank == 1 and file.path.name == "__1_1.distcp":
            raise OSError(28, "No space left on device", str(file.path))
        return original(file, tensor, offset)

    files.write_chunk = fails


def manifest_fails(rank, world):
    def fails(folder, manifest):
        raise PermissionError(13, "Permission denied", str(folder / files.NAME))

    files.write_manifest = fails


def state_differs(rank, world):
    return {"step": 20 + rank}


def state_is_no_json(rank, world):
    return {"step": {1, 2}} if rank == 1 else None


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("sabotage", "message"),
    [
        (disk_full, ("rank 1", "[Errno 27]", "__1_")),
        (helper_thread_fails, ("rank 1", "[Errno 28]", "__1_1.distcp")),
        (manifest_fails, ("rank 0", "[Errno 13]", "manifest.json")),
        (state_differs, ("rank 0's state differs from that of ranks [1]",)),
        (state_is_no_json, ("rank 1", "not JSON serializable")),
    ],
)
def test_one_ranks_failure_is_everyones(gloo, tmp_path, mode, sabotage, message):
    for told, found in gloo(2, failing, tmp_path, mode, sabotage):
        assert told and all(part in told for part in message), told
        assert found == tmp_path / "step-10"  # kept: retention never ran
    assert steps_of(tmp_path) == {"step-10"}


def killed_while_writing(rank, world, folder, mode):
    store = checkpoints(folder, mode=mode)
    tensors = sharded(world, 2, 20)
    if rank == 1:
        files.write_chunk = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    store.save(20, tensors, {}, {})
    store.finish()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_kill_of_a_rank_in_the_middle_of_a_save(gloo, tmp_path, mode):
    expected = gloo(2, save_layout, tmp_path, 2, 10)[0][0]
    with pytest.raises(WorkerError, match="rank 1 died by SIGKILL"):
        gloo(2, killed_while_writing, tmp_path, mode)
    found, state, *_ = gloo(2, load_layout, tmp_path, 2)[0]
    assert state["step"] == 10
    assert_same(found, expected)
    gloo(2, save_layout, tmp_path, 2, 20, mode)
    assert steps_of(tmp_path) == {"step-10", "step-20"}


def partly_blind(rank, world, folder):
    original = files._file_problem
    if rank == 1:
        files._file_problem = lambda file, *a: (
            f"{file}: missing" if "step-20" in str(file) else original(file, *a)
        )
    logged = []
    logging.getLogger("tmoe.checkpoint").addHandler(handler := logging.Handler())
    handler.emit = lambda record: logged.append(record.getMessage())
    return checkpoints(folder).find("auto"), logged


def test_ranks_that_see_different_files_agree(gloo, tmp_path):
    for seed in (10, 20):
        gloo(2, save_layout, tmp_path, 2, seed)
    results = gloo(2, partly_blind, tmp_path)
    assert [path for path, _ in results] == [tmp_path / "step-10"] * 2
    assert any("step-20" in line and "missing" in line for line in results[0][1]) and not results[1][1]


def train_on(rank, world, folder):
    """Async saves of steps 1 to 3 while the tensors change at once.

    And the same three steps saved synchronously.
    """
    write_chunk = files.write_chunk
    files.write_chunk = lambda *args: (time.sleep(0.01), write_chunk(*args))[1]
    tensors = sharded(world, 2, 1)
    overlapped = False
    background, foreground = checkpoints(folder / "async", mode="async"), checkpoints(folder / "sync")
    for step in (1, 2, 3):
        foreground.save(step, tensors, {"step": step}, {"cpu": torch.get_rng_state()})
        background.save(step, tensors, {"step": step}, {"cpu": torch.get_rng_state()})
        for tensor in tensors.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().add_(1.0)
        overlapped |= not (folder / "async" / f"step-{step}").exists()
        torch.rand(3)
        background.poll()
    background.finish()
    return overlapped


def test_async_saves_what_was_there_when_save_returned(gloo, tmp_path):
    assert any(gloo(2, train_on, tmp_path))
    for step in (1, 2, 3):
        found, expected = (
            read_manifest(tmp_path / mode / f"step-{step}").tensors for mode in ("async", "sync")
        )
        assert {n: t.sha256 for n, t in found.items()} == {n: t.sha256 for n, t in expected.items()}
    assert (
        found["model.dense"].sha256
        != read_manifest(tmp_path / "sync" / "step-2").tensors["model.dense"].sha256
    )
