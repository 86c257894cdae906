"""Reads folders that stock torch.distributed.checkpoint wrote, without trust: description and tensors.

`.metadata` is a pickle. The unpickler of this file knows only the few names that a checkpoint needs, and
replaces each by an inert value: no code of torch or of the file runs. Any other name is refused. If several
ranks saved without collectives, their files (`__0.metadata`, `__1.metadata`) are merged into one description.

next: manifest.py
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tmoe.base.listing import listed
from tmoe.checkpoint.manifest import CheckpointError

METADATA = ".metadata"
MEGATRON = "metadata.json"
PAIRWISE = 4096  # most chunks of a tensor for which overlaps are looked for


class StockChunk(NamedTuple):
    """A box of a tensor, and the position of its bytes."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StockTensor:
    """A tensor of the folder."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StockChunk, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StockFolder:
    """The tensors of a folder, by name. CheckpointError if something is missing, malformed or not allowed.

    objects: names of the saved objects that are not tensors; they are never read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        files = [path / METADATA] if (path / METADATA).is_file() else sorted(path.glob("__*.metadata"))
        if not files:
            raise CheckpointError(f"{path / METADATA}: missing; {path} is no DCP folder")
        self.tensors: dict[str, StockTensor] = {}
        self.objects: set[str] = set()
        for file in files:
            described, objects = _description(file)
            self.objects |= objects
            for name, stored in described.items():
                self.tensors[name] = _joined(self.tensors.get(name), stored, file)
        needed = sorted({chunk.file for stored in self.tensors.values() for chunk in stored.chunks})
        missing = [f"{name}: missing" for name in needed if not (path / name).is_file()]
        if missing:
            head = (
                f"{path} is not whole; where each node wrote to its own disk, put the files of all into one:"
            )
            raise CheckpointError(listed(head, missing))
        for stored in self.tensors.values():
            _require_whole(path, stored)

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Reads a whole tensor, or one row of its first dimension, for which only the row's chunks are read.

        Raises CheckpointError if the bytes do not match the description.
        """
        stored = self.tensors[name]
        rows = stored.shape[:1] if row is None else (1,)
        whole = torch.empty(rows + stored.shape[1:], dtype=stored.dtype)
        for chunk in stored.chunks:
            if row is not None and not chunk.offset[0] <= row < chunk.offset[0] + chunk.shape[0]:
                continue
            read = self._read_chunk(stored, chunk)
            offset = chunk.offset
            if row is not None:
                read = read[row - chunk.offset[0]][None]
                offset = (0, *chunk.offset[1:])
            whole[tuple(slice(o, o + n) for o, n in zip(offset, read.shape, strict=True))] = read
        return whole if row is None else whole[0]

    def _read_chunk(self, stored: StockTensor, chunk: StockChunk) -> Tensor:
        where = f"{self.path / chunk.file}: {stored.name} at byte {chunk.start}"
        with open(self.path / chunk.file, "rb") as file:
            file.seek(chunk.start)
            raw = file.read(chunk.length)
        if len(raw) < chunk.length:
            raise CheckpointError(f"{where}: truncated: {len(raw)} of {chunk.length} bytes are there")
        try:
            tensor = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        except Exception as error:  # zip, pickle and torch raise many kinds
            raise CheckpointError(f"{where}: damaged: {str(error).splitlines()[0][:200]}") from None
        good = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        if not good or tensor.dtype != stored.dtype or tensor.numel() != math.prod(chunk.shape):
            content = (
                f"{tensor.dtype} {tuple(tensor.shape)}"
                if isinstance(tensor, Tensor)
                else type(tensor).__name__
            )
            raise CheckpointError(f"{where}: holds {content}, described as {stored.dtype} {chunk.shape}")
        return tensor.detach().reshape(chunk.shape)

    def stamps(self) -> tuple[str, ...]:
        """Strings that change when a file of the folder changes: name, size and time of each."""
        files = sorted({chunk.file for stored in self.tensors.values() for chunk in stored.chunks})
        stats = ((name, (self.path / name).stat()) for name in files)
        return tuple(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)


def backend_of(path: Path) -> str:
    """The format of a Megatron checkpoint folder: torch_dist, zarr, ...; "" if it is not Megatron's."""
    try:
        metadata: Any = json.loads((path / MEGATRON).read_text())
        return str(metadata["sharded_backend"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


# ---- the description ----


class Held:
    """An inert stand-in for an object of a description: holds only the object's arguments and attributes."""

    args: tuple = ()
    state: Any = None

    def __new__(cls, *args: Any) -> Held:
        held = super().__new__(cls)
        held.args = args
        return held

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, dict) else None


def _inert(name: str) -> type[Held]:
    return type(name, (Held,), {})


_DCP = "torch.distributed.checkpoint"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_MCORE = "megatron.core.dist_checkpointing.strategies.torch"
ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    **{
        (f"{_DCP}.metadata", name): _inert(name)
        for name in (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("MetadataIndex", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        )
    },
    (f"{_DCP}.filesystem", "_StorageInfo"): _inert("_StorageInfo"),
    (_OLD, "TensorProperties"): _inert("TensorProperties"),
    (_OLD, "MEM_FORMAT_ENCODING"): _inert("_MEM_FORMAT_ENCODING"),
    (_MCORE, "MCoreMetadata"): _inert("MCoreMetadata"),
    (_MCORE, "MCoreSavePlan"): _inert("MCoreSavePlan"),
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): _inert("PosixPath"),
    ("pathlib._local", "PosixPath"): _inert("PosixPath"),
}


class _Unpickler(pickle.Unpickler):
    """Replaces the names in ALLOWED by inert values and allows torch's dtypes; refuses every other name."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__(file)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise CheckpointError(f"{self.path}: refers to {module}.{name}, which no checkpoint needs: refused")


def _description(file: Path) -> tuple[dict[str, StockTensor], set[str]]:
    """The tensors of a .metadata file, and the names of the entries that are not tensors."""
    try:
        with open(file, "rb") as stream:
            metadata = _Unpickler(stream, file).load()
        return _tensors(metadata)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # a pickle can raise any kind
        raise CheckpointError(f"{file}: malformed: {type(error).__name__}: {str(error)[:200]}") from None


def _tensors(metadata: Any) -> tuple[dict[str, StockTensor], set[str]]:
    """The result of _description, from the unpickled object. ValueError if it does not describe tensors."""
    if type(metadata).__name__ != "Metadata" or not isinstance(metadata, Held):
        raise ValueError("holds no Metadata")
    places: dict[tuple[str, tuple[int, ...] | None], Held] = {}
    for index, info in (metadata.get("storage_data") or {}).items():
        offset = index.get("offset")
        places[str(index.get("fqn")), None if offset is None else _sizes(offset)] = info
    tensors: dict[str, StockTensor] = {}
    objects: set[str] = set()
    for name, entry in metadata.get("state_dict_metadata").items():
        if not isinstance(name, str) or not isinstance(entry, Held):
            raise ValueError(f"{name!r} is described by {type(entry).__name__}")
        if type(entry).__name__ == "BytesStorageMetadata":
            objects.add(name)
            continue
        state = entry.get("properties").state
        dtype = state.get("dtype") if isinstance(state, dict) else state[0]
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name}: no dtype but {dtype!r}")
        chunks = [_chunk(name, chunk, places) for chunk in entry.get("chunks")]
        tensors[name] = StockTensor(name, dtype, _sizes(entry.get("size")), tuple(chunks))
    return tensors, objects


def _chunk(name: str, described: Held, places: dict[tuple[str, tuple[int, ...] | None], Held]) -> StockChunk:
    offset, shape = _sizes(described.get("offsets")), _sizes(described.get("sizes"))
    info = places.get((name, offset))
    if info is None:
        raise ValueError(f"{name}: nothing says where its part at {offset} is stored")
    if info.get("transform_descriptors"):
        raise ValueError(
            f"{name}: stored through {info.get('transform_descriptors')}, which is not known here"
        )
    file = info.get("relative_path")
    if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
        raise ValueError(f"{name}: stored in {file!r}, which is no name of a file in the folder")
    start, length = _sizes((info.get("offset"), info.get("length")))
    return StockChunk(offset, shape, file, start, length)


def _sizes(sizes: Any) -> tuple[int, ...]:
    """The sizes as a tuple of whole numbers >= 0. Raises ValueError for any other value."""
    if not isinstance(sizes, tuple | list) or not all(type(n) is int and 0 <= n < 2**62 for n in sizes):
        raise ValueError(f"{sizes!r} are no sizes")
    return tuple(sizes)


def _joined(before: StockTensor | None, now: StockTensor, file: Path) -> StockTensor:
    """A tensor whose parts are described by several ranks: the chunks of `before` and `now`."""
    if before is None:
        return now
    if (before.dtype, before.shape) != (now.dtype, now.shape):
        here, there = f"{now.dtype} {now.shape}", f"{before.dtype} {before.shape}"
        raise CheckpointError(f"{file}: {now.name} is {here}, {there} in the file of another rank")
    chunks = {chunk.offset: chunk for chunk in (*before.chunks, *now.chunks)}
    return StockTensor(now.name, now.dtype, now.shape, tuple(chunks.values()))


def _require_whole(path: Path, stored: StockTensor) -> None:
    """Raises CheckpointError unless the chunks lie inside the tensor and cover each element once."""
    rank = len(stored.shape)
    inside = all(
        len(c.offset) == len(c.shape) == rank
        and all(o + n <= m for o, n, m in zip(c.offset, c.shape, stored.shape, strict=True))
        for c in stored.chunks
    )
    held = sum(math.prod(c.shape) for c in stored.chunks)
    if not inside or held != math.prod(stored.shape) or _overlap(stored.chunks):
        raise CheckpointError(
            f"{path}: {stored.name} of {stored.shape}: its {len(stored.chunks)} parts hold {held} elements "
            "and do not cover it once each; if each rank wrote its own description, all must be there"
        )


def _overlap(chunks: Iterable[StockChunk]) -> bool:
    boxes = [chunk for chunk in chunks if math.prod(chunk.shape)]
    if len(boxes) > PAIRWISE or len(boxes) < 2 or not boxes[0].shape:
        return len(boxes) > 1 and not boxes[0].shape
    low = np.array([chunk.offset for chunk in boxes])
    high = low + np.array([chunk.shape for chunk in boxes])
    for i in range(len(boxes) - 1):
        if ((low[i] < high[i + 1 :]) & (low[i + 1 :] < high[i])).all(1).any():
            return True
    return False
