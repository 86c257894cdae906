"""Checkpoints under every layout and every way to break them: what loads is bit for bit what was saved, or an error says why not."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import pickle
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo import WorkerError
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tmoe import manifest as files
from tmoe import shards
from tmoe.checkpoint import CheckpointError, Checkpoints, MismatchError, read_manifest, verify

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected pickle protocol")
INFO = {"preset": "tiny", "torch": torch.__version__}


def checkpoints(folder: Path, keep: int = 0, mode: str = "sync") -> Checkpoints:
    return Checkpoints(folder, keep=keep, mode=mode, info=INFO)


class Model(nn.Module):
    """Six experts, a 7-row layer that no even number of ranks divides, a 3-element norm that leaves ranks without a row."""

    def __init__(self, seed: int, mesh):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.experts = nn.Module()
        gate_up = distribute_tensor(torch.randn(6, 4, 3, generator=g), mesh["ep"], [Shard(0)])
        self.experts.gate_up = nn.Parameter(gate_up)
        self.dense = nn.Parameter(torch.randn(7, 5, generator=g))
        self.norm = nn.Parameter(torch.randn(3, generator=g))


def sharded(world: int, ep: int, seed: int) -> dict[str, Tensor]:
    """What a trainer would save, its values fixed by the seed whatever the layout."""
    mesh = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("dp", "ep"))
    model = Model(seed, mesh)
    fully_shard(model.experts, mesh=mesh["dp"])
    fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("world",)))
    named = dict(model.named_parameters())
    moments = {f"optim.exp_avg.{name}": (p.detach() * 0.5).bfloat16() for name, p in named.items()}
    return {f"model.{n}": p for n, p in named.items()} | moments | {"optim.step": torch.tensor(float(seed))}


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: (t.detach().full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in tensors.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), name


# ---- layouts ----


def save_layout(rank, world, folder, ep, seed, mode="sync"):
    torch.manual_seed(100 + rank)
    store, tensors = checkpoints(folder, mode=mode), sharded(world, ep, seed)
    store.save(seed, tensors, {"step": seed, "tokens": 4096}, {"cpu": torch.get_rng_state()})
    store.finish()
    return whole(tensors), torch.get_rng_state()


def load_layout(rank, world, folder, ep):
    store, tensors = checkpoints(folder), sharded(world, ep, seed=0)
    path = store.find("auto")
    state, rng = store.load(path, tensors)
    stock = sharded(world, ep, seed=0)
    dcp.load(stock, checkpoint_id=path)  # PyTorch's own reader understands the folder
    return whole(tensors), state, rng, whole(stock), {n: t.placements for n, t in tensors.items() if "gate" in n}


@pytest.mark.parametrize(("world", "ep", "mode"), [(1, 1, "sync"), (2, 2, "async"), (4, 2, "sync")])
def test_any_layout_loads_into_any_other(gloo, tmp_path, world, ep, mode):
    saved = gloo(world, save_layout, tmp_path, ep, 11, mode)
    assert verify(tmp_path / "step-11") == []
    for other_world, other_ep in [(world, ep), (4, 1), (2, 1), (1, 1), (4, 2)]:
        for rank, (found, state, rng, stock, _) in enumerate(gloo(other_world, load_layout, tmp_path, other_ep)):
            assert_same(found, saved[0][0])
            assert_same(stock, saved[0][0])
            assert state == {"step": 11, "tokens": 4096}
            assert torch.equal(rng["cpu"], saved[rank][1]) if other_world == world else rng is None


def test_manifest_says_what_is_in_the_folder(gloo, tmp_path):
    gloo(4, save_layout, tmp_path, 2, 3)
    manifest = read_manifest(tmp_path / "step-3")
    assert (manifest.step, manifest.world, manifest.tokens, manifest.info) == (3, 4, 4096, INFO)
    experts = manifest.tensors["model.experts.gate_up"]
    assert (experts.shape, experts.dtype) == ((6, 4, 3), "float32")
    assert experts.placement == "dp=2: _StridedShard(dim=0, sf=2), ep=2: Shard(dim=0)"
    assert sorted(c.offset[0] for c in experts.chunks) == [
        0,
        2,
        3,
        5,
    ]  # three experts a rank of ep, split 2 + 1 over dp
    assert manifest.tensors["optim.step"].placement == "replicated"
    assert manifest.tensors["rng.2.cpu"].placement == "rank 2"
    on_disk = {p.name: p.stat().st_size for p in (tmp_path / "step-3").iterdir() if p.name != files.NAME}
    assert on_disk == {name: entry.size for name, entry in manifest.files.items()}


def test_weights_alone_load_by_prefix(gloo, tmp_path):
    expected = gloo(2, save_layout, tmp_path, 2, 5)[0][0]
    for found in gloo(2, load_weights, tmp_path / "step-5"):
        assert_same(found, {n: t for n, t in expected.items() if n.startswith("model.")})


def load_weights(rank, world, path):
    tensors = {n: t for n, t in sharded(world, 1, seed=0).items() if n.startswith("model.")}
    _, rng = checkpoints(path.parent).load(path, tensors, only="model.")
    assert rng is None
    return whole(tensors)


# ---- one process, offline: values, damage, hostility ----


def plain(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "model.w": torch.randn(64, 8, generator=g),
        "model.t": torch.randn(8, 6, generator=g).bfloat16().t()[1:4],
        "model.f8": torch.randn(5, generator=g).to(torch.float8_e4m3fn),
        "model.none": torch.empty(0, 4),
        "optim.step": torch.tensor(7.0),
        "optim.mask": torch.rand(9, generator=g) > 0.5,
    }


def empty_like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()}


@pytest.fixture
def two_steps(tmp_path):
    store = checkpoints(tmp_path)
    for step in (10, 20):
        store.save(step, plain(step), {"step": step, "loss": float("nan")}, {"cpu": torch.get_rng_state()})
    return tmp_path


def test_every_dtype_and_stride_round_trips(two_steps):
    found = empty_like(plain())
    state, rng = checkpoints(two_steps).load(two_steps / "step-20", found)
    assert_same(found, {n: t.contiguous() for n, t in plain(20).items()})
    assert state["step"] == 20 and state["loss"] != state["loss"]
    assert torch.equal(rng["cpu"], torch.get_rng_state())


def test_pytorchs_own_converter_reads_the_folder(two_steps, tmp_path):
    dcp_to_torch_save(two_steps / "step-20", tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    assert_same({n: found[n] for n in plain()}, {n: t.contiguous() for n, t in plain(20).items()})


def flip(file: Path, position: int) -> None:
    with open(file, "r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ 0x40]))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_a_flipped_byte_is_named_and_older_step_used(two_steps, caplog, name, where):
    file = two_steps / "step-20" / name
    store = checkpoints(two_steps)
    assert store.find("auto") == two_steps / "step-20"  # whole before: what was learnt then must not hide the damage
    flip(file, int(where * (file.stat().st_size - 1)))
    tensors = empty_like(plain())
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        store.load(file.parent, tensors)
    assert not any(t.float().any() for t in tensors.values())
    with pytest.raises(CheckpointError, match="damaged"):
        store.find(str(file.parent))
    assert store.find("auto") == two_steps / "step-10"
    assert str(file) in caplog.text
    assert len(verify(file.parent)) == 1


def test_every_byte_of_the_manifest_counts(two_steps):
    file = two_steps / "step-20" / files.NAME
    for position in range(file.stat().st_size):
        flip(file, position)
        with pytest.raises(CheckpointError, match="damaged"):
            read_manifest(file.parent)
        flip(file, position)
    assert verify(file.parent) == []


def test_truncated_missing_and_extra_files(two_steps, caplog):
    step = two_steps / "step-20"
    shard = step / "__0_0.distcp"
    raw = shard.read_bytes()
    shutil.copy(shard, step / "__9_0.distcp")
    assert verify(step) == [] and "__9_0.distcp" in caplog.text
    os.truncate(shard, len(raw) // 2)
    assert "__0_0.distcp: damaged: " in verify(step)[0]
    shard.unlink()
    assert verify(step) == [f"{shard}: missing"]
    assert checkpoints(two_steps).find("auto") == two_steps / "step-10"


def test_nothing_whole_is_an_error_and_nothing_at_all_is_not(two_steps, tmp_path):
    assert checkpoints(tmp_path / "new").find("auto") is None
    assert checkpoints(two_steps).find("none") is None
    for step in ("step-10", "step-20"):
        (two_steps / step / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"no whole checkpoint(.|\n)*step-20(.|\n)*step-10"):
        checkpoints(two_steps).find("auto")
    with pytest.raises(CheckpointError, match=r"step-30/manifest\.json: missing"):
        checkpoints(two_steps).find(str(two_steps / "step-30"))


def test_every_mismatch_is_listed_and_nothing_changes(two_steps):
    asked = empty_like(plain())
    del asked["optim.mask"]
    asked |= {"model.w": torch.zeros(64, 9), "model.t": torch.zeros(3, 8), "model.new": torch.zeros(2)}
    asked["optim.step"] = torch.zeros((), device="meta")
    with pytest.raises(MismatchError) as error:
        checkpoints(two_steps).load(two_steps / "step-20", asked)
    for line in (
        "5 differences",
        "model.w: shape (64, 8) in the checkpoint, (64, 9) asked for",
        "model.t: bfloat16 in the checkpoint, float32 asked for",
        "model.new: not in the checkpoint",
        "optim.mask: in the checkpoint, but not asked for",
        "optim.step: asked for on the meta device",
    ):
        assert line in str(error.value)
    assert isinstance(error.value, ValueError) and not asked["model.f8"].float().any()


class Hostile:
    def __init__(self, sentinel: Path):
        self.sentinel = sentinel

    def __reduce__(self):
        return (os.system, (f"touch {self.sentinel}",))


def forge(step: Path, name: str, raw: bytes, tensor: str | None = None) -> None:
    """Replace a file, or the payload of a tensor, and make the manifest agree, as an attacker would."""
    manifest = read_manifest(step)
    if tensor:
        chunk = manifest.tensors[tensor].chunks[0]
        old = (step / name).read_bytes()
        forged = dataclasses.replace(chunk, at=len(old), size=len(raw))
        manifest.tensors[tensor] = dataclasses.replace(manifest.tensors[tensor], chunks=(forged,))
        raw = old + raw
    (step / name).write_bytes(raw)
    with files.HashedFile(step / "copy") as copy:
        copy.write(raw)
    manifest.files[name] = copy.entry()
    (step / "copy").unlink()
    (step / files.NAME).unlink()
    files.write_manifest(step, manifest)


@pytest.mark.parametrize("place", ["metadata", "plain pickle", "torch.save"])
@pytest.mark.parametrize("tensor", ["model.w", "rng.0.cpu"])
def test_hostile_pickles_do_not_run(two_steps, tmp_path, place, tensor):
    step, sentinel, tensors = two_steps / "step-20", tmp_path / "pwned", empty_like(plain())
    hostile = pickle.dumps(Hostile(sentinel))
    if place == "metadata":
        forge(step, ".metadata", hostile)
        checkpoints(two_steps).load(checkpoints(two_steps).find("auto"), tensors)  # never opened: loads as before
        assert_same(tensors, {n: t.contiguous() for n, t in plain(20).items()})
    else:
        saved = io.BytesIO()
        torch.save({"w": Hostile(sentinel)}, saved)
        forge(step, "__0_0.distcp", hostile if place == "plain pickle" else saved.getvalue(), tensor)
        assert verify(step) == []
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp at byte \d+: unreadable"):
            checkpoints(two_steps).load(step, tensors)
    assert not sentinel.exists()
    pickle.loads(hostile)
    assert sentinel.exists()  # the file was hostile


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": {"../x": files.FileEntry(0, "")}}, "leaves the folder"),
        ({"tensors": {"a": files.TensorEntry((2,), "float32", "", "", ())}}, "chunks hold 0 of 2 elements"),
        ({"tensors": {"a": files.TensorEntry((), "load", "", "", ())}}, "dtype 'load' is unknown"),
        ({"world": 2, "tensors": {"a": 3}}, "malformed"),
    ],
)
def test_manifests_that_agree_with_themselves_but_lie(two_steps, change, message):
    step = two_steps / "step-20"
    manifest = dataclasses.replace(read_manifest(step), **change)
    (step / files.NAME).unlink()
    files.write_manifest(step, manifest)
    with pytest.raises(CheckpointError, match=message):
        read_manifest(step)
    assert checkpoints(two_steps).find("auto") == two_steps / "step-10"


# ---- which steps stay, and which one is the newest ----


def steps_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_retention_counts_verified_steps_only(two_steps, caplog):
    (two_steps / "step-900").mkdir()  # no manifest: somebody else's, or another trainer's partial step
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


def dies_at(folder: Path, step: int, seed: int, count: int) -> bool:
    """Save in a child that is killed at its count-th write, sync, rename, mkdir or unlink; False if it lived to the end."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    done = 0

    def guard(call):
        def guarded(*args, **kwargs):
            nonlocal done
            done += 1
            if done == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return guarded

    for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
        setattr(os, name, guard(getattr(os, name)))
    files.HashedFile.write = guard(files.HashedFile.write)
    try:
        checkpoints(folder, keep=2).save(step, {"w": plain(seed)["model.w"]}, {"seed": seed}, {})
    finally:
        os._exit(0)


@pytest.mark.parametrize("again", [False, True], ids=["fresh", "same step"])
def test_killed_at_any_write_sync_or_rename(tmp_path, again):
    step, count, outcomes = (10 if again else 20), 1, []
    while True:
        folder = tmp_path / str(count)
        checkpoints(folder).save(10, {"w": plain(1)["model.w"]}, {"seed": 1}, {})
        killed = dies_at(folder, step, 2, count)
        store, found = checkpoints(folder, keep=1), {"w": torch.zeros(64, 8)}
        seed = store.load(store.find("auto"), found)[0]["seed"]
        assert torch.equal(found["w"], plain(seed)["model.w"])
        outcomes.append(seed)
        assert store.find(str(folder / "step-10")) or seed == 2
        store.save(step, {"w": plain(3)["model.w"]}, {"seed": 3}, {})  # nobody has to clean up
        assert store.load(store.find("auto"), found)[0]["seed"] == 3
        assert steps_of(folder) == {f"step-{step}"}
        if not killed:
            break
        count += 1
    assert count > 20 and outcomes == sorted(outcomes) and set(outcomes) == {1, 2}


# ---- several ranks ----


def failing(rank, world, folder, mode, sabotage):
    """Save step 10, then step 20 with one rank sabotaged; what each rank was told."""
    shards.SMALL = 100  # several files and threads a rank, small as the tensors are
    store, tensors = checkpoints(folder, keep=1, mode=mode), sharded(world, 2, 10)
    tensors["model.table"] = distribute_tensor(torch.ones(512, 8), init_device_mesh("cpu", (world,)), [Shard(0)])
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
    dist.barrier()  # every rank goes on; nobody hangs
    return told, store.find("auto")


def disk_full(rank, world):
    if rank == 1:  # python ignores SIGXFSZ, so a write past the limit fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))


def helper_thread_fails(rank, world):
    original, calls = files.write_chunk, []

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
    store, tensors = checkpoints(folder, mode=mode), sharded(world, 2, 20)
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
        files._file_problem = lambda file, *a: f"{file}: missing" if "step-20" in str(file) else original(file, *a)
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
    """Async saves of steps 1 to 3 while the tensors change at once, and the same three saved synchronously."""
    write_chunk = files.write_chunk
    files.write_chunk = lambda *args: (time.sleep(0.01), write_chunk(*args))[1]
    tensors, overlapped = sharded(world, 2, 1), False
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
        found, expected = (read_manifest(tmp_path / mode / f"step-{step}").tensors for mode in ("async", "sync"))
        assert {n: t.sha256 for n, t in found.items()} == {n: t.sha256 for n, t in expected.items()}
    assert found["model.dense"].sha256 != read_manifest(tmp_path / "sync" / "step-2").tensors["model.dense"].sha256
