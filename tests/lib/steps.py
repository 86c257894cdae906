"""Common to tests of step folders: small tensors in every layout, saving, loading, damage, offline tools.

It also makes hostile files.

next: tests/checkpoint/test_checkpoint.py
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tmoe.base import disk
from tmoe.checkpoint import manifest as files
from tmoe.checkpoint import tools as offline
from tmoe.checkpoint.checkpoints import Checkpoints, read_manifest

ROOT = Path(__file__).parents[2]
INFO = {"preset": "tiny", "torch": torch.__version__}


def checkpoints(folder: Path, keep: int = 0, mode: str = "sync") -> Checkpoints:
    return Checkpoints(folder, keep=keep, mode=mode, info=INFO)


class Model(nn.Module):
    """Six experts and two parameters that are sharded unevenly over ranks.

    The 7-row layer cannot be divided evenly; the 3-element norm leaves some ranks without a row.
    """

    def __init__(self, seed: int, mesh):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.experts = nn.Module()
        gate_up = distribute_tensor(torch.randn(6, 4, 3, generator=g), mesh["ep"], [Shard(0)])
        self.experts.gate_up = nn.Parameter(gate_up)
        self.dense = nn.Parameter(torch.randn(7, 5, generator=g))
        self.norm = nn.Parameter(torch.randn(3, generator=g))


def sharded(world: int, ep: int, seed: int) -> dict[str, Tensor]:
    """The tensors that a trainer would save; only the seed determines the values, whatever the layout."""
    mesh = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("dp", "ep"))
    model = Model(seed, mesh)
    fully_shard(model.experts, mesh=mesh["dp"])
    fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("world",)))
    named = dict(model.named_parameters())
    moments = {f"optim.exp_avg.{name}": (p.detach() * 0.5).bfloat16() for name, p in named.items()}
    return {f"model.{n}": p for n, p in named.items()} | moments | {"optim.step": torch.tensor(float(seed))}


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        n: (t.detach().full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in tensors.items()
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), name


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


class Hostile:
    def __init__(self, sentinel: Path):
        self.sentinel = sentinel

    def __reduce__(self):
        return (os.system, (f"touch {self.sentinel}",))


def forge(step: Path, name: str, raw: bytes, tensor: str | None = None) -> None:
    """Replaces a file, or the payload of a tensor, and adapts the manifest, as an attacker would."""
    manifest = read_manifest(step)
    if tensor:
        chunk = manifest.tensors[tensor].chunks[0]
        old = (step / name).read_bytes()
        forged = dataclasses.replace(chunk, at=len(old), size=len(raw))
        manifest.tensors[tensor] = dataclasses.replace(manifest.tensors[tensor], chunks=(forged,))
        raw = old + raw
    (step / name).write_bytes(raw)
    with disk.HashedFile(step / "copy") as copy:
        copy.write(raw)
    manifest.files[name] = copy.entry()
    (step / "copy").unlink()
    (step / files.NAME).unlink()
    files.write_manifest(step, manifest)


def steps_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def save_layout(rank, world, folder, ep, seed, mode="sync"):
    torch.manual_seed(100 + rank)
    store = checkpoints(folder, mode=mode)
    tensors = sharded(world, ep, seed)
    store.save(seed, tensors, {"step": seed, "tokens": 4096}, {"cpu": torch.get_rng_state()})
    store.finish()
    return whole(tensors), torch.get_rng_state()


def load_layout(rank, world, folder, ep):
    store = checkpoints(folder)
    tensors = sharded(world, ep, seed=0)
    path = store.find("auto")
    state, rng = store.load(path, tensors)
    stock = sharded(world, ep, seed=0)
    dcp.load(stock, checkpoint_id=path)  # PyTorch's own reader understands the folder
    return (
        whole(tensors),
        state,
        rng,
        whole(stock),
        {n: t.placements for n, t in tensors.items() if "gate" in n},
    )


def run(*words: object) -> None:
    offline.main([str(word) for word in words])


def refused(*words: object) -> str:
    with pytest.raises(SystemExit) as end:
        run(*words)
    code = end.value.code
    assert code == 2 or isinstance(code, str), "2, or the text of a fault of the machine"
    return str(end.value)


def save(
    folder: Path, step: int, tensors: dict[str, Tensor], info: dict | None = None, state: dict | None = None
) -> Path:
    store = Checkpoints(folder, keep=0, mode="sync", info=info or {})
    store.save(step, tensors, state or {"step": step, "tokens": step * 100}, {"cpu": torch.get_rng_state()})
    return folder / f"step-{step}"


def load(path: Path) -> dict[str, Tensor]:
    """Every tensor of a step except the generator states, as loaded by Checkpoints.load."""
    saved = read_manifest(path).tensors
    tensors = {
        name: torch.zeros(entry.shape, dtype=files.dtype_of(entry.dtype))
        for name, entry in saved.items()
        if not name.startswith("rng.")
    }
    checkpoints(path.parent).load(path, tensors)
    return tensors


@pytest.fixture
def step(tmp_path) -> Path:
    return save(tmp_path, 20, plain(20))
