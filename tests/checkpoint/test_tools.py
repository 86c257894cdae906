"""The offline tools write, bit for bit, what a run would have saved in that layout.

Whole or absent, in little memory.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import itertools
import math
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from steps import (
    ROOT,
    Hostile,
    assert_same,
    checkpoints,
    forge,
    load,
    plain,
    refused,
    run,
    save,
    sharded,
    whole,
)
from steps import step as step  # a fixture
from tiers import slow_but

from benchmarks.inject import die_at, flip
from tmoe.base import disk
from tmoe.base.disk import FileEntry
from tmoe.checkpoint import dcp as shards
from tmoe.checkpoint import manifest as files
from tmoe.checkpoint import plans, rewrite
from tmoe.checkpoint.checkpoints import CheckpointError, Checkpoints, read_manifest, verify
from tmoe.checkpoint.manifest import ShardChunk, TensorEntry
from tmoe.checkpoint.rewrite import read_boxes
from tmoe.config.axes import Axes
from tmoe.config.model import ModelConfig, MoEConfig
from tmoe.model.parallelize import parallelize
from tmoe.model.transformer import Transformer
from tmoe.parallel.layout import Box, lay_out
from tmoe.parallel.mesh import build_mesh, local_part

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected pickle protocol"
)


# ---- layouts ----


def model_config(experts: int) -> ModelConfig:
    moe = MoEConfig(experts=experts, top_k=2, ffn_dim=20, shared_dim=8)
    return ModelConfig(
        vocab=37, dim=24, layers=2, heads=2, kv_heads=1, head_dim=8, dense_layers=1, ffn_dim=32, moe=moe
    )


def model_tensors(experts, ep, seed):
    """The tensors that train.py saves: parameters and moments as DTensors, step counts plain."""
    torch.manual_seed(seed)
    model = parallelize(Transformer(model_config(experts)), build_mesh(ep=ep))
    tensors = {f"model.{n}": p for n, p in model.named_parameters()}
    for n, p in model.named_parameters():
        tensors |= {f"optim.exp_avg.{n}": p.detach() * 0.5, f"optim.step.{n}": torch.tensor(float(seed))}
    return tensors


def save_model(rank, world, folder, experts, ep):
    store = Checkpoints(folder, keep=0, mode="sync", info={})
    store.save(7, model_tensors(experts, ep, 1), {"step": 7}, {"cpu": torch.get_rng_state()})


def load_model(rank, world, path, experts, ep):
    """Names of tensors that differ from what was saved, and the files that this rank opened."""
    opened = set()
    original = files.read_chunk
    files.read_chunk = lambda folder, chunk, dtype: (opened.add(chunk.file), original(folder, chunk, dtype))[
        1
    ]
    found, expected = model_tensors(experts, ep, 2), model_tensors(experts, ep, 1)
    checkpoints(path.parent).load(path, found)
    return [n for n in found if not torch.equal(local_part(found[n]), local_part(expected[n]))], opened


def contents(step: Path) -> dict[str, tuple]:
    """Placement, and (rank, offset, shape, hash) of each chunk with elements.

    Where replicated tensors lie is free.
    """
    return {
        name: (
            entry.placement,
            sorted(
                (c.file.split("_")[2], c.offset, c.shape, c.sha256)
                for c in entry.chunks
                if entry.placement != "replicated" and 0 not in c.shape
            ),
        )
        for name, entry in read_manifest(step).tensors.items()
        if not name.startswith("rng.")
    }


@pytest.mark.parametrize(
    ("world", "ep", "experts"),
    slow_but([(2, 1, 6), (4, 2, 8)], [(2, 1, 6), (4, 2, 6), (4, 2, 8), (4, 1, 6), (4, 4, 8)]),
)
def test_resharded_files_are_what_that_world_would_have_saved(gloo, tmp_path, world, ep, experts):
    gloo(world, save_model, tmp_path / "there", experts, ep)
    gloo(1, save_model, tmp_path / "here", experts, 1)
    run("reshard", tmp_path / "here/step-7", tmp_path / "dst", "--world", world, "--ep", ep)
    assert contents(tmp_path / "dst") == contents(tmp_path / "there/step-7")
    for rank, (wrong, opened) in enumerate(gloo(world, load_model, tmp_path / "dst", experts, ep)):
        assert not wrong and opened == {f"__{rank}_0.distcp", "__0_0.distcp"}  # its own, and the step counts
    run("reshard", tmp_path / "there/step-7", tmp_path / "back", "--world", 1)
    assert contents(tmp_path / "back") == contents(tmp_path / "here/step-7")


@pytest.mark.parametrize("seed", range(20))
def test_boxes_fill_every_tensor_once(seed):
    draw = random.Random(seed)
    ep, dp = draw.choice([1, 2, 3]), draw.choice([1, 2, 5])
    shapes = {f"model.{i}.w": tuple(draw.randint(1, 9) for _ in range(draw.randint(0, 3))) for i in range(6)}
    shapes |= {
        f"model.{i}.experts.w": (ep * draw.randint(1, 4), draw.choice([4, 5, 10]), 2) for i in range(6)
    }
    for name, (_, boxes) in lay_out(shapes, Axes(dp=dp, ep=ep)).items():
        filled = torch.zeros(shapes[name])
        for box in boxes:
            filled[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] += 1
        assert filled.eq(1).all(), name


def load_sharded(rank, world, path, ep):
    tensors = sharded(world, ep, seed=0)
    state, rng = checkpoints(path.parent).load(path, tensors)
    return whole(tensors), state, rng


def save_sharded(rank, world, folder, ep):
    torch.manual_seed(rank)
    tensors = sharded(world, ep, seed=5)
    checkpoints(folder).save(5, tensors, {"step": 5, "tokens": 20}, {"cpu": torch.get_rng_state()})
    return whole(tensors)


def test_one_to_four_to_two_ranks_is_bit_equal(gloo, tmp_path):
    expected = gloo(1, save_sharded, tmp_path, 1)[0]
    run("reshard", tmp_path / "step-5", tmp_path / "four", "--world", 4, "--ep", 2)
    run("reshard", tmp_path / "four", tmp_path / "two", "--world", 2, "--ep", 2)
    for name, world, ep in [("four", 4, 2), ("two", 2, 2), ("four", 2, 1), ("two", 4, 2)]:
        results = gloo(world, load_sharded, tmp_path / name, ep)
        for found, state, rng in results:
            assert_same(found, expected)
            assert state == {"step": 5, "tokens": 20} and rng is None
    manifest = read_manifest(tmp_path / "two")
    assert (manifest.step, manifest.tokens, manifest.world) == (5, 20, 2)
    assert [entry["world"] for entry in manifest.info["history"]] == [4, 2]
    assert not any(name.startswith("rng.") for name in manifest.tensors)


def test_generator_states_stay_with_the_same_world(gloo, tmp_path):
    gloo(2, save_sharded, tmp_path, 1)
    run("reshard", tmp_path / "step-5", tmp_path / "dst", "--world", 2, "--ep", 2)
    for rank, (_, _, rng) in enumerate(gloo(2, load_sharded, tmp_path / "dst", 2)):
        torch.manual_seed(rank)
        assert torch.equal(rng["cpu"], torch.get_rng_state())


def grid_cuts(draw: random.Random, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, shape) of boxes that cut a tensor at random places of each axis."""
    boxes = [((), ())]
    for n in shape:
        cuts = sorted({0, n, *(draw.randint(0, n) for _ in range(draw.randint(0, 3)))})
        spans = [(a, b - a) for a, b in itertools.pairwise(cuts)]
        boxes = [((*o, a), (*s, m)) for o, s in boxes for a, m in spans]
    return boxes


@pytest.mark.parametrize("seed", range(12))
def test_any_cut_reads_as_any_other_and_each_chunk_once(tmp_path, seed, monkeypatch):
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 7) for _ in range(draw.randint(0, 4)))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()

    def part(offset, lengths):
        return tensor[tuple(slice(o, o + n) for o, n in zip(offset, lengths, strict=True))]

    with disk.HashedFile(tmp_path / "f") as file:
        chunks = [files.write_chunk(file, part(*cut), cut[0]) for cut in grid_cuts(draw, shape)]
    entry = files.tensor_entry(shape, tensor.dtype, "", draw.sample(chunks, len(chunks)))
    reads: list[ShardChunk] = []
    monkeypatch.setattr(
        rewrite, "read_chunk", lambda *args: (reads.append(args[1]), files.read_chunk(*args))[1]
    )
    boxes = tuple(Box(0, *cut) for cut in grid_cuts(draw, shape))
    for box, found in zip(boxes, read_boxes(tmp_path, entry, boxes), strict=True):
        assert torch.equal(found, part(box.offset, box.shape))
    assert len(reads) == len(set(reads)) == len(chunks)


# ---- casts and parts ----


def nearest_even(values: np.ndarray) -> np.ndarray:
    """bf16 bits of fp32 numbers, rounded by integers.

    Add half a unit less one, and the bit that would stay last.
    """
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def test_bf16_is_rounded_to_nearest_even_and_moments_are_left_alone(tmp_path):
    raw = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    raw[: 1 << 14] = (raw[: 1 << 14] & 0xFFFF0000) | 0x8000  # ties
    raw[1 << 14 : 1 << 15] = (raw[1 << 14 : 1 << 15] & 0xFFFF0000) | 0x7FFF  # just below
    values = raw.view(np.float32)
    values = np.where(np.isnan(values), np.float32(1e-40), values)  # the payload of a NaN is free
    w = torch.from_numpy(values.copy()).reshape(256, 256)
    tensors = {
        "model.w": w,
        "ema.w": w * 0.5,
        "optim.exp_avg.w": w,
        "model.nan": torch.tensor([math.nan, math.inf]),
    }
    tensors |= {
        "model.ids": torch.arange(5),
        "model.half": torch.randn(9).bfloat16(),
        "optim.step.w": torch.tensor(2.0),
    }
    run("reshard", save(tmp_path, 1, tensors), tmp_path / "dst", "--world", 3, "--dtype", "bf16")
    found = load(tmp_path / "dst")
    entries = read_manifest(tmp_path / "dst").tensors
    assert np.array_equal(
        found["model.w"].view(torch.int16).numpy().view(np.uint16).ravel(), nearest_even(values)
    )
    assert torch.equal(found["ema.w"], (w * 0.5).bfloat16()) and found["model.nan"].isnan().tolist() == [
        True,
        False,
    ]
    for name in ("optim.exp_avg.w", "optim.step.w", "model.ids", "model.half"):
        assert_same({name: found[name]}, {name: tensors[name]})
    assert {n: e.dtype for n, e in entries.items()}["model.w"] == "bfloat16" and entries[
        "model.ids"
    ].dtype == "int64"
    assert read_manifest(tmp_path / "dst").info["history"][0]["dtype"] == "bf16"
    run("reshard", tmp_path / "dst", tmp_path / "wide", "--world", 1, "--dtype", "fp32", "--only", "model")
    assert torch.equal(load(tmp_path / "wide")["model.w"], found["model.w"].float())


def test_weights_are_rescued_from_a_step_whose_optimizer_state_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SMALL", 2000)  # several files
    tensors = {
        f"{part}.{i}": torch.randn(400) for part in ("model", "optim.exp_avg", "ema") for i in range(3)
    }
    step = save(tmp_path, 1, tensors)
    of = {name: entry.chunks[0] for name, entry in read_manifest(step).tensors.items()}
    alone = {chunk.file for name, chunk in of.items() if not name.startswith("optim.")}
    victim = next(chunk for name, chunk in of.items() if name.startswith("optim."))
    if victim.file in alone:
        flip(step / victim.file, victim.at + victim.size // 2)
    else:
        (step / victim.file).unlink()
    message = refused("reshard", step, tmp_path / "all", "--world", 2)
    assert victim.file in message and not (tmp_path / "all").exists()
    run("reshard", step, tmp_path / "dst", "--world", 2, "--only", "model", "ema")
    assert_same(load(tmp_path / "dst"), {n: t for n, t in tensors.items() if not n.startswith("optim.")})
    assert "holds no tensor of optim" in refused(
        "reshard", tmp_path / "dst", tmp_path / "x", "--world", 1, "--only", "optim"
    )


def test_every_dtype_and_shape_survives(tmp_path):
    run("reshard", save(tmp_path, 20, plain(20)), tmp_path / "dst", "--world", 5)
    assert_same(load(tmp_path / "dst"), {n: t.contiguous() for n, t in plain(20).items()})


# ---- damage, kills, full disks ----


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "manifest"])
def test_damaged_sources_are_named_and_nothing_is_published(step, tmp_path, damage):
    file = step / "__0_0.distcp"
    if damage == "flipped":
        chunk = read_manifest(step).tensors["model.w"].chunks[0]
        flip(file, chunk.at + chunk.size // 2)
    elif damage == "truncated":
        os.truncate(file, 50)
    elif damage == "missing":
        file.unlink()
    else:
        flip(file := step / files.NAME, 200)
    for words in (
        ("reshard", step, tmp_path / "dst", "--world", 2),
        ("average", step, step, tmp_path / "dst"),
    ):
        assert str(file) in refused(*words)
    assert {p.name for p in tmp_path.iterdir()} == {"step-20"}


@pytest.mark.parametrize("tool", ["reshard", "average", "inspect"])
@pytest.mark.parametrize("kind", ["plain pickle", "torch.save"])
def test_hostile_payloads_do_not_run(step, tmp_path, tool, kind):
    sentinel = tmp_path / "pwned"
    saved = io.BytesIO()
    torch.save({"w": Hostile(sentinel)}, saved)
    forge(
        step,
        "__0_0.distcp",
        pickle.dumps(Hostile(sentinel)) if kind == "plain pickle" else saved.getvalue(),
        "model.w",
    )
    forge(step, ".metadata", pickle.dumps(Hostile(sentinel)))
    words = dict(
        reshard=("reshard", step, tmp_path / "dst", "--world", 2),
        average=("average", step, tmp_path / "dst"),
        inspect=("inspect", step, "--tensor", "model.w"),
    )[tool]
    assert "unreadable" in refused(*words)
    run("verify", step)
    run("inspect", step)
    assert not sentinel.exists() and not (tmp_path / "dst").exists()


def lie(step: Path, changes: dict) -> None:
    manifest = replace(read_manifest(step), **changes)
    (step / files.NAME).unlink()
    files.write_manifest(step, manifest)


def halves(*offsets: int) -> dict[str, TensorEntry]:
    chunks = [ShardChunk((offset, 0), (2, 3), "__0_0.distcp", 0, 8, "") for offset in offsets]
    return {"a": TensorEntry((4, 3), "float32", "", "", tuple(chunks))}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(tensors=halves(0, 0)), "chunks at (0, 0) and (0, 0) overlap"),
        (dict(tensors=halves(1, 2)), "chunks at (1, 0) and (2, 0) overlap"),
        (dict(tensors={"a": TensorEntry((-2, -3), "float32", "", "", ())}), "must be counts"),
        (dict(tensors={"a": TensorEntry((0, 1 << 70), "float32", "", "", ())}), "is none of a tensor"),
        (dict(tensors={"a": TensorEntry((0,), "qint8", "", "", ())}), "dtype 'qint8' is unknown"),
        (dict(files={"z": FileEntry(cast(Any, None), "")}, tensors={}), "size None is not a count"),
        (dict(files={"z\0": FileEntry(0, "")}, tensors={}), "leaves the folder"),
        (dict(tensors={"a": replace(halves(0, 2)["a"], shape=(4.0, 3))}), "must be counts"),
        (dict(saved_ns=1 << 80), "is not a time in ns"),
        (dict(world=0), "world 0 is not a positive number"),
        (dict(step="7"), "step '7' is not a count"),
        (dict(state=[1]), "state [1] is not an object"),
        (dict(tensors={"a": replace(halves(0, 2)["a"], placement=None)}), "placement None is no text"),
    ],
)
def test_manifests_that_lie_are_refused_by_every_tool(step, tmp_path, changes, message):
    lie(step, changes)
    for words in (("inspect", step), ("verify", step), ("reshard", step, tmp_path / "dst", "--world", 2)):
        with pytest.raises(SystemExit):
            run(*words)
    with pytest.raises(CheckpointError, match="malformed") as error:
        read_manifest(step)
    assert message in str(error.value)


def test_a_manifest_nested_too_deep_is_an_error_and_no_crash(step):
    raw = (step / files.NAME).read_bytes()
    body = raw[len(files._HEAD) + 64 :].replace(
        b'"info": {}', b'"info": {"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    )
    digest = hashlib.sha256(files._HEAD + files._BLANK + body).hexdigest().encode()
    (step / files.NAME).write_bytes(files._HEAD + digest + body)
    assert "malformed: RecursionError" in refused("inspect", step)


class Slow(io.RawIOBase):
    """A file that gives 5 bytes a call, as Linux gives 2 GiB."""

    def __init__(self, raw: bytes):
        self.file = io.BytesIO(raw)

    def seek(self, *args):
        return self.file.seek(*args)

    def readinto(self, buffer):
        return self.file.readinto(memoryview(buffer)[:5])


def test_short_reads_are_no_end_of_file():
    saved = io.BytesIO()
    tensor = torch.randn(50)
    torch.save(tensor, saved)
    window = files._Window(Slow(b"x" * 13 + saved.getvalue() + b"y" * 9), 13, len(saved.getvalue()))
    assert torch.equal(torch.load(window, weights_only=True), tensor)


def reshard_alone(step: Path, dst: Path) -> None:
    """One group after the other, so that counts mean the same in every child process."""
    os.cpu_count = lambda: 1
    rewrite.rewrite(plans.plan_reshard(step, Axes(dp=2)), dst)


@pytest.mark.slow
def test_killed_anywhere_it_is_whole_or_absent_and_the_same_command_finishes(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SMALL", 500)  # several groups
    step = save(
        tmp_path, 20, {k: t for k, t in plain(20).items() if k in ("model.w", "model.t", "optim.step")}
    )
    expected = load(step)
    count = 1
    published = []
    resumed = 0
    stride = 3
    while True:
        dst = tmp_path / f"dst{count}"
        killed = die_at(count, lambda dst=dst: reshard_alone(step, dst))
        published.append(dst.exists())
        if published[-1]:
            assert verify(dst) == []
        else:
            kept = {p: p.stat().st_ino for p in rewrite.work_folder(dst).glob("group-*/*.distcp")}
            finished = {p for p in kept if (p.parent / files.NAME).exists() and not verify(p.parent)}
            run("reshard", step, dst, "--world", 2)
            again = {p.name: p.stat().st_ino for p in dst.iterdir()}
            assert all(again[p.name] == kept[p] for p in finished)  # not written a second time
            resumed += bool(finished)
        assert_same(load(dst), expected)
        assert not rewrite.work_folder(dst).exists()
        if not killed:
            break
        count += stride
    assert published == sorted(published) and published.count(False) > 20 and resumed > 3


def test_what_another_command_left_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SMALL", 500)
    step, other = save(tmp_path, 1, plain(1)), save(tmp_path, 2, plain(2))
    for count in range(1, 1000, 7):
        die_at(count, lambda: reshard_alone(step, tmp_path / "dst"))
        if list((tmp_path / "dst.partial").glob(f"group-*/{files.NAME}")):
            break
    run("reshard", other, tmp_path / "dst", "--world", 2)
    assert_same(load(tmp_path / "dst"), {n: t.contiguous() for n, t in plain(2).items()})


def full_disk(rank, world, step, dst):
    # python ignores SIGXFSZ: writes fail
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
    with pytest.raises(SystemExit) as end:
        run("reshard", step, dst, "--world", 2)
    return end.value.code


def test_a_full_disk_is_named_with_path_and_errno_and_dst_is_absent(gloo, tmp_path):
    step = save(tmp_path, 1, {"model.w": torch.randn(600, 4), "model.v": torch.randn(3)})
    message = gloo(1, full_disk, step, tmp_path / "dst")[0]
    assert f"[Errno {errno.EFBIG}]" in message and "dst.partial/group-0/__0_0.distcp" in message
    assert {p.name for p in tmp_path.iterdir()} == {"step-1"}
    run("reshard", step, tmp_path / "dst", "--world", 2)
    assert_same(load(tmp_path / "dst"), load(step))


def test_what_does_not_read_back_is_not_published(step, tmp_path, monkeypatch):
    original = rewrite._read_back

    def damaged(parts):
        flip(next(parts[0].glob("*.distcp")), 100)
        original(parts)

    monkeypatch.setattr(rewrite, "_read_back", damaged)
    message = refused("reshard", step, tmp_path / "dst", "--world", 2)
    assert (
        "does not read back" in message and "SHA-256 differs" in message and not (tmp_path / "dst").exists()
    )
    monkeypatch.undo()
    run("reshard", step, tmp_path / "dst", "--world", 2)


def test_two_at_once_are_refused_and_so_is_an_existing_folder(step, tmp_path):
    (tmp_path / "dst.partial").mkdir()
    lock = os.open(tmp_path / "dst.partial", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert "another process is writing it" in refused("reshard", step, tmp_path / "dst", "--world", 2)
    os.close(lock)
    for path in (step, tmp_path):
        assert f"{path}: exists already" in refused("reshard", step, path, "--world", 2)
    assert f"{step / 'in'}: lies inside {step}" in refused("reshard", step, step / "in", "--world", 2)
    (tmp_path / "file").write_text("")
    below = tmp_path / "file/new"
    wrong = f"{below}: {tmp_path / 'file'} must be a folder that can be written"
    assert wrong in refused("reshard", step, below, "--world", 2)


def test_too_little_space_is_said_before_the_first_byte(step, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 0, 1234))
    before = set(tmp_path.rglob("*"))
    for words in (("reshard", step, tmp_path / "a/b", "--world", 2), ("average", step, tmp_path / "dst")):
        message = refused(*words)
        assert "needs" in message and "(1234) free" in message
    assert set(tmp_path.rglob("*")) == before


def test_a_dry_run_writes_nothing_and_its_bytes_suffice(step, tmp_path, capsys):
    before = set(tmp_path.rglob("*"))
    run("reshard", step, tmp_path / "dst", "--world", 3, "--dry-run")
    run("average", step, step, tmp_path / "mean", "--dry-run")
    assert set(tmp_path.rglob("*")) == before
    assert "6 tensors" in capsys.readouterr().out
    needed, free = rewrite.check_space(plans.plan_reshard(step, Axes(dp=3)), tmp_path / "dst")
    run("reshard", step, tmp_path / "dst", "--world", 3)
    assert rewrite.size_on_disk(tmp_path / "dst") <= needed < free


RSS = """
import re, sys
from pathlib import Path
from tmoe.checkpoint import plans, rewrite
from tmoe.config.axes import Axes

rewrite.MEMORY = int(sys.argv[2])
# not getrusage: its peak starts at the parent's size, which exec hands on
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
reshard = lambda s: plans.plan_reshard(s, Axes(dp=2, ep=2))
average = lambda s: plans.plan_average([s, s])
for tool, plan in (("reshard", reshard), ("average", average)):
    before = peak()
    rewrite.rewrite(plan(Path(sys.argv[1])), Path(sys.argv[1] + tool))
    print(tool, (peak() - before) * 1024)
"""


@pytest.mark.slow
def test_memory_is_that_of_a_few_tensors(tmp_path):
    tensors = {f"model.{i}.{'experts.w' if i % 2 else 'w'}": torch.randn(8, 512, 512) for i in range(32)}
    step = save(tmp_path, 1, tensors)
    size = sum(t.nbytes for t in tensors.values())
    del tensors
    memory = 64 << 20  # eight tensors, so one group at a time
    # Else malloc keeps freed blocks of up to 32 MB, some 200 MB of them whatever the checkpoint's size.
    malloc = {"MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RSS, step, str(memory)]
    told = subprocess.run(
        command, cwd=ROOT, env=os.environ | malloc, capture_output=True, text=True, check=True
    ).stdout
    growth = {line.split()[0]: int(line.split()[1]) for line in told.splitlines()}
    assert growth.keys() == {"reshard", "average"}
    # the rest: code paged in, buffers for hashing
    assert sum(growth.values()) < memory + (16 << 20) < size / 3, growth
