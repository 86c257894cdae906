"""Checkpoints under every layout and every way to break them: what loads is bit for bit what was saved.

Or an error says why not.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import shutil

import pytest
import torch
from steps import (
    INFO,
    Hostile,
    assert_same,
    checkpoints,
    empty_like,
    forge,
    load_layout,
    plain,
    save_layout,
    sharded,
    whole,
)
from steps import two_steps as two_steps  # a fixture
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from benchmarks.inject import flip
from tmoe.base import disk
from tmoe.checkpoint import manifest as files
from tmoe.checkpoint.checkpoints import CheckpointError, read_manifest, verify
from tmoe.checkpoint.errors import MismatchError

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected pickle protocol"
)


# ---- layouts ----


@pytest.mark.parametrize(("world", "ep", "mode"), [(1, 1, "sync"), (2, 2, "async"), (4, 2, "sync")])
def test_any_layout_loads_into_any_other(gloo, tmp_path, world, ep, mode):
    saved = gloo(world, save_layout, tmp_path, ep, 11, mode)
    assert verify(tmp_path / "step-11") == []
    for other_world, other_ep in [(world, ep), (4, 1), (2, 1), (1, 1), (4, 2)]:
        for rank, (found, state, rng, stock, _) in enumerate(
            gloo(other_world, load_layout, tmp_path, other_ep)
        ):
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
    # three experts a rank of ep, split 2 + 1 over dp
    assert sorted(c.offset[0] for c in experts.chunks) == [
        0,
        2,
        3,
        5,
    ]
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


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_a_flipped_byte_is_named_and_older_step_used(two_steps, caplog, name, where):
    file = two_steps / "step-20" / name
    store = checkpoints(two_steps)
    # whole before: what was learnt then must not hide the damage
    assert store.find("auto") == two_steps / "step-20"
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
    with pytest.raises(CheckpointError, match=r"step-30: no such folder"):
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


@pytest.mark.parametrize("place", ["metadata", "plain pickle", "torch.save"])
@pytest.mark.parametrize("tensor", ["model.w", "rng.0.cpu"])
def test_hostile_pickles_do_not_run(two_steps, tmp_path, place, tensor):
    step = two_steps / "step-20"
    sentinel = tmp_path / "pwned"
    tensors = empty_like(plain())
    hostile = pickle.dumps(Hostile(sentinel))
    if place == "metadata":
        forge(step, ".metadata", hostile)
        # never opened: loads as before
        checkpoints(two_steps).load(checkpoints(two_steps).find("auto"), tensors)
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
        ({"files": {"../x": disk.FileEntry(0, "")}}, "leaves the folder"),
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
