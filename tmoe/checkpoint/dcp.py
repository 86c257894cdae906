"""Moves shards between DCP and the disk: the planner, writer and reader that checkpoints.py gives to DCP.

DCP decides which rank writes and which rank reads each box of each tensor; these classes write and read the
boxes. DCP's own file system classes are not used: the writer loses the errors of its helper threads
(pytorch#191391) and does not hash, and the reader unpickles `.metadata`. Stock DCP can still read the files.

next: checkpoint/manifest.py
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor

from tmoe.base import disk
from tmoe.base.disk import FileEntry
from tmoe.base.private_torch import find_or_note
from tmoe.checkpoint import manifest as files
from tmoe.checkpoint.manifest import Manifest, ShardChunk, TensorEntry

# Stock FileSystemReader finds payloads in .metadata by this class, the only name here that DCP does not
# export.
_StorageInfo: Any = find_or_note(
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "stock readers of checkpoints find no data in .metadata",
)

WRITERS = 8  # most shard files that a rank writes at once, each hashed by its own thread
READERS = 8
SMALL = 64 << 20  # a further shard file is worth its fsync only above this many bytes
Tensors = dict[str, TensorEntry]
Files = dict[str, FileEntry]
RNG = "rng."  # names of generator states: rng.RANK.NAME


@dataclass(frozen=True)
class WrittenChunk:
    """The report of a rank about one chunk that it wrote."""

    chunk: ShardChunk
    file: FileEntry
    placement: str


class Planner(DefaultSavePlanner):
    """Plans with the live tensors, and writes the staged parts `local`.

    Only the layout of the live tensors is read, because training may be changing their values.
    """

    def __init__(self, local: dict[str, Tensor]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)  # names are flat already
        self.local = local

    def placement(self, name: str) -> str:
        """How the tensor is placed, in words for the manifest.

        "rank 3" (a generator state), "replicated", or "axis=size: placement" for each mesh axis.
        """
        tensor = self.state_dict[name]
        if not isinstance(tensor, DTensor):
            return f"rank {name.split('.')[1]}" if name.startswith(RNG) else "replicated"
        mesh = tensor.device_mesh
        axes = mesh.mesh_dim_names or range(mesh.ndim)
        return ", ".join(f"{axis}={mesh.size(i)}: {tensor.placements[i]!r}" for i, axis in enumerate(axes))


class ShardWriter(StorageWriter):
    """Writes a rank's items in parallel files; rank 0 calls `publish(tensors, files)` for all ranks' items.

    DCP sends an error of any rank, in write_data or in publish, to all ranks.
    """

    def __init__(self, folder: Path, rank: int, planner: Planner, publish: Callable[[Tensors, Files], None]):
        self.folder = folder
        self.rank = rank
        self.planner = planner
        self.publish = publish

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        with ThreadPoolExecutor(WRITERS) as pool:
            parts = list(pool.map(self._write_file, itertools.count(), _split(plan.items)))
        done: torch.futures.Future = torch.futures.Future()
        done.set_result([result for part in parts for result in part])
        return done

    def _write_file(self, number: int, items: list[WriteItem]) -> list[WriteResult]:
        boxes = [(self.planner.local[item.index.fqn], _box(item).offsets) for item in items]
        with disk.HashedFile(self.folder / f"__{self.rank}_{number}.distcp") as file:
            chunks = [files.write_chunk(file, tensor, offset) for tensor, offset in boxes]
        entry = file.entry()
        return [
            WriteResult(
                item.index, chunk.size, WrittenChunk(chunk, entry, self.planner.placement(item.index.fqn))
            )
            for item, chunk in zip(items, chunks, strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: join the chunks of all ranks into one entry for each tensor, and publish them."""
        records: dict[str, list[WrittenChunk]] = {}
        for result in itertools.chain(*results):
            records.setdefault(result.index.fqn, []).append(result.storage_data)
        entries = {r.chunk.file: r.file for r in itertools.chain(*records.values())}
        planned = cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)
        self.publish({name: _tensor_entry(planned[name], records[name]) for name in sorted(records)}, entries)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def _planned(item: WriteItem) -> TensorWriteData:
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn} is no tensor; everything else belongs into the state")
    return item.tensor_data


def _box(item: WriteItem) -> ChunkStorageMetadata:
    return _planned(item).chunk


def _split(items: list[WriteItem]) -> list[list[WriteItem]]:
    """Divides the items into at most WRITERS lists of about equal bytes.

    Items are assigned in order of decreasing size, each to the list with the fewest bytes so far.
    """

    def size(item: WriteItem) -> int:
        return math.prod(_box(item).sizes) * _planned(item).properties.dtype.itemsize

    count = min(WRITERS, 1 + sum(map(size, items)) // SMALL)
    parts: list[list[WriteItem]] = [[] for _ in range(count)]
    held = [0] * count
    for item in sorted(items, key=size, reverse=True):
        least = held.index(min(held))
        parts[least].append(item)
        held[least] += size(item)
    return [part for part in parts if part]


def _tensor_entry(planned: TensorStorageMetadata, records: list[WrittenChunk]) -> TensorEntry:
    chunks = [record.chunk for record in records]
    return files.tensor_entry(planned.size, planned.properties.dtype, records[0].placement, chunks)


def dcp_metadata(tensors: dict[str, TensorEntry]) -> Metadata:
    """DCP's metadata for a folder, made from its manifest."""
    layout: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        name: TensorStorageMetadata(
            TensorProperties(dtype=files.dtype_of(entry.dtype)),
            torch.Size(entry.shape),
            [ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.shape)) for c in entry.chunks],
        )
        for name, entry in tensors.items()
    }
    places = {
        MetadataIndex(name, c.offset): _StorageInfo(c.file, c.at, c.size)
        for name, entry in tensors.items()
        for c in (entry.chunks if _StorageInfo else ())
    }
    return Metadata(layout, storage_data=places)


def write_stock_metadata(folder: Path, tensors: dict[str, TensorEntry]) -> FileEntry:
    """Write `.metadata`, with which torch.distributed.checkpoint.load and its converters read the folder.

    tmoe itself never opens it.
    """
    with disk.HashedFile(folder / ".metadata") as file:
        pickle.dump(dcp_metadata(tensors), file)
    return file.entry()


class Reader(StorageReader):
    """Serves DCP's load plans from the manifest.

    It opens no metadata file, and no entry of the manifest is pickled, so nothing is unpickled.
    """

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder = folder
        self.manifest = manifest
        self.chunks = {(name, c.offset): c for name, entry in manifest.tensors.items() for c in entry.chunks}

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def read_metadata(self) -> Metadata:
        return dcp_metadata(self.manifest.tensors)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        wanted: dict[tuple[str, tuple[int, ...]], list[ReadItem]] = {}
        for item in plan.items:
            key = (item.storage_index.fqn, tuple(item.storage_index.offset or ()))
            wanted.setdefault(key, []).append(item)
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(lambda pair: self._read_chunk(pair[0], pair[1], planner), wanted.items()))
        done: torch.futures.Future = torch.futures.Future()
        done.set_result(None)
        return done

    @torch.no_grad()
    def _read_chunk(
        self, key: tuple[str, tuple[int, ...]], items: list[ReadItem], planner: LoadPlanner
    ) -> None:
        dtype = files.dtype_of(self.manifest.tensors[key[0]].dtype)
        whole = files.read_chunk(self.folder, self.chunks[key], dtype)
        for item in items:
            part = whole
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True
