"""The content of a step folder: manifest and hashed shard files; no process group, no pickle.

A step folder `step-N` holds
    `__RANK_I.distcp`  shard files: torch.save payloads one after another, as DCP writes them
    `.metadata`        DCP's own, for stock readers; tmoe hashes it and never opens it
    `manifest.json`    the commit mark: a folder without it is not a finished step
Every byte of the folder is covered by a hash. The manifest holds each file's size and SHA-256. Its first line
holds the manifest's own SHA-256, computed with that digest replaced by zeros.

next: checkpoint/folders.py
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
import re
import stat
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from tmoe.base.disk import FileEntry, HashedFile, no_folder_words
from tmoe.base.listing import listed
from tmoe.checkpoint.errors import CheckpointError

log = logging.getLogger(__name__)

NAME = "manifest.json"
FORMAT = 1
READERS = 8  # number of files hashed at once; sha256 releases the GIL
_HEAD = b'{\n"sha256": "'
_BLANK = b"0" * 64
_SAVED = re.compile(rb'\n"saved_ns": (\d+),\n')
# Types whose elements are stored in whole bytes.
_DTYPE = re.compile(r"bool|u?int(8|16|32|64)|bfloat16|float(8_\w+|16|32|64)|complex(32|64|128)")
_MOST = 1 << 58  # most elements whose bytes torch can count, whatever their type


@dataclass(frozen=True)
class ShardChunk:
    """A box of a tensor, and the position of its torch.save payload.

    offset, shape: where the box starts and how long it is in each dimension.
    file, at, size: the payload's file, its first byte and its length in bytes.
    sha256: of the elements' bytes in row-major order, without the payload's framing, so that equal content
        has an equal hash.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    at: int
    size: int
    sha256: str


@dataclass(frozen=True)
class TensorEntry:
    """A whole tensor: shape, dtype ("bfloat16"), how it was placed, and the chunks that fill it exactly once.

    sha256 covers the chunks' offsets, shapes and hashes: it can be compared between checkpoints of one
    layout.
    """

    shape: tuple[int, ...]
    dtype: str
    placement: str
    sha256: str
    chunks: tuple[ShardChunk, ...]


@dataclass(frozen=True)
class Manifest:
    """All that a step folder records about itself.

    saved_ns increases with every save into a run's folder, whatever the step number.
    """

    step: int
    tokens: int | None
    world: int
    saved_ns: int
    info: dict[str, Any]
    state: dict[str, Any]
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]


# ---- manifest ----


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write and sync `folder/manifest.json`.

    Each field, file and tensor has its own line, so that grep and diff work on it.
    """
    fields: dict[str, Any] = {"format": FORMAT, **vars(manifest)}
    lines = [
        f'"{key}": ' + (_table(v) if key in ("files", "tensors") else json.dumps(v))
        for key, v in fields.items()
    ]
    body = b'",\n' + ",\n".join(lines).encode() + b"\n}\n"
    digest = hashlib.sha256(_HEAD + _BLANK + body).hexdigest().encode()
    with HashedFile(folder / NAME) as file:
        file.write(_HEAD + digest + body)


def is_step(folder: Path) -> bool:
    """Whether the folder has a manifest of tmoe, damaged or not.

    Other programs also write a manifest.json.
    """
    try:
        with open(folder / NAME, "rb") as file:
            return file.read(len(_HEAD)) == _HEAD
    except OSError:
        return False


def _table(entries: dict[str, Any]) -> str:
    rows = (f"  {json.dumps(name)}: {json.dumps(entry, default=vars)}" for name, entry in entries.items())
    return "{\n" + ",\n".join(rows) + "\n}"


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of the step folder `path`.

    Raises CheckpointError if the manifest is missing, damaged, malformed or of another format.
    """
    file = Path(path) / NAME
    try:
        return _parse(json.loads(_read_bytes(file)))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: malformed: {type(error).__name__}: {error}") from error


def read_saved_ns(path: Path) -> int:
    """The saved_ns of an undamaged manifest, read from its line without parsing the rest.

    Parsing the manifest of a large model takes a second of Python. In a background save, that second would be
    taken from training.
    """
    if not (line := _SAVED.search(_read_bytes(path / NAME))):
        raise CheckpointError(f"{path / NAME}: malformed: no saved_ns")
    return int(line[1])


def _read_bytes(file: Path) -> bytes:
    try:
        _require_regular(file)
        raw = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if not file.parent.is_dir():
            raise CheckpointError(f"{file.parent}: {no_folder_words(file.parent)}") from None
        hugging_face = file.parent.joinpath("config.json").is_file()
        raise CheckpointError(
            f"{file}: missing; {file.parent} is no step folder, or was never finished"
            f"{'; python -m tmoe.hf import makes one of a Hugging Face folder' if hugging_face else ''}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{file}: {error}") from error
    digest = raw[len(_HEAD) :][:64]
    body = raw[len(_HEAD) + 64 :]
    if not raw.startswith(_HEAD) or hashlib.sha256(_HEAD + _BLANK + body).hexdigest().encode() != digest:
        raise CheckpointError(f"{file}: damaged: its bytes do not match its own SHA-256")
    return raw


def _require_regular(file: Path) -> None:
    """Raises OSError unless it is a plain file or a link to one: reading a pipe or /dev/zero never ends."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(f"{file}: no regular file")


def _parse(fields: dict[str, Any]) -> Manifest:
    del fields["sha256"]
    if (stated := fields.pop("format")) != FORMAT:
        raise ValueError(f"format {stated}, this tmoe reads format {FORMAT}")
    for name, (valid, says) in _FIELDS.items():
        if not valid(fields[name]):
            raise ValueError(f"{name} {fields[name]!r} is not {says}")
    files = {name: FileEntry(**entry) for name, entry in fields.pop("files").items()}
    tensors = {name: _parse_tensor(entry) for name, entry in fields.pop("tensors").items()}
    for name, file in files.items():
        if Path(name).name != name or name in ("", ".", "..", NAME) or "\0" in name:
            raise ValueError(f"file name {name!r} leaves the folder")
        if not _is_count(file.size):
            raise ValueError(f"file {name}: size {file.size!r} is not a count")
    for name, entry in tensors.items():
        _check_tensor(name, entry, files)
    return Manifest(files=files, tensors=tensors, **fields)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


_FIELDS = dict(  # fields that tools and training compute with or index; the other fields are only shown
    step=(_is_count, "a count"),
    tokens=(lambda value: value is None or _is_count(value), "a count or null"),
    world=(lambda value: _is_count(value) and value > 0, "a positive number"),
    saved_ns=(lambda value: _is_count(value) and value < 1 << 63, "a time in ns"),
    info=(lambda value: isinstance(value, dict), "an object"),
    state=(lambda value: isinstance(value, dict), "an object"),
)


def _parse_tensor(entry: dict[str, Any]) -> TensorEntry:
    chunks = tuple(ShardChunk(**_tuples(chunk)) for chunk in entry["chunks"])
    return TensorEntry(**_tuples(entry) | {"chunks": chunks})


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _check_tensor(name: str, entry: TensorEntry, files: dict[str, FileEntry]) -> None:
    """Raises ValueError if chunks exceed their tensor or their file, overlap, or do not fill the tensor.

    Without this check such chunks would load without an error.
    """
    dtype_of(entry.dtype)
    if not isinstance(entry.placement, str):
        raise ValueError(f"tensor {name}: placement {entry.placement!r} is no text")
    if not all(map(_is_count, entry.shape)) or math.prod(n or 1 for n in entry.shape) > _MOST:
        raise ValueError(
            f"tensor {name}: shape {entry.shape} is none of a tensor, its lengths must be counts"
        )
    for chunk in entry.chunks:
        if not all(map(_is_count, (*chunk.offset, *chunk.shape, chunk.at, chunk.size))):
            raise ValueError(f"tensor {name}: shape, offset and position must be counts")
        inside = all(o + s <= n for o, s, n in zip(chunk.offset, chunk.shape, entry.shape, strict=True))
        if not inside or chunk.at + chunk.size > files[chunk.file].size:
            raise ValueError(f"tensor {name}: chunk at {chunk.offset} lies outside the tensor or its file")
    filled = sum(math.prod(c.shape) for c in entry.chunks)
    volume = math.prod(entry.shape)
    if filled != volume:
        raise ValueError(f"tensor {name}: chunks hold {filled} of {volume} elements")
    # The chunks hold as many elements as the tensor; if some overlap, other elements are missing.
    if entry.shape and (pair := _overlap(entry.chunks)):
        raise ValueError(f"tensor {name}: chunks at {pair[0].offset} and {pair[1].offset} overlap")


def _overlap(chunks: tuple[ShardChunk, ...]) -> tuple[ShardChunk, ShardChunk] | None:
    """Two chunks with an element in common, or None.

    This is a sweep along dim 0: each chunk is compared only with the chunks that have not ended before it
    starts.
    """
    running: list[ShardChunk] = []
    for chunk in sorted((c for c in chunks if math.prod(c.shape)), key=lambda c: c.offset):
        running = [c for c in running if c.offset[0] + c.shape[0] > chunk.offset[0]]
        for other in running:
            sides = zip(chunk.offset, chunk.shape, other.offset, other.shape, strict=True)
            if all(max(a, b) < min(a + m, b + n) for a, m, b, n in sides):
                return other, chunk
        running.append(chunk)
    return None


def tensor_entry(
    shape: tuple[int, ...], dtype: torch.dtype, placement: str, chunks: list[ShardChunk]
) -> TensorEntry:
    """The entry of a tensor, made from its chunks in any order."""
    ordered = sorted(chunks, key=lambda chunk: chunk.offset)
    digest = hashlib.sha256("".join(f"{c.offset}{c.shape}{c.sha256}\n" for c in ordered).encode()).hexdigest()
    return TensorEntry(tuple(shape), str(dtype).removeprefix("torch."), placement, digest, tuple(ordered))


def dtype_of(name: str) -> torch.dtype:
    """torch.bfloat16 for "bfloat16".

    Raises ValueError if the name is no dtype, or a dtype whose elements are not plain (qint8, int4).
    """
    dtype = getattr(torch, name, None) if _DTYPE.fullmatch(name) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name!r} is unknown to torch {torch.__version__}")
    return dtype


# ---- verification ----


def verify(
    path: str | Path,
    share: tuple[int, int] | None = (0, 1),
    *,
    names: Collection[str] | None = None,
    advance: Callable[[int], None] | None = None,
) -> list[str]:
    """The problems of the step folder `path`, each with its file's name; none if the folder is whole.

    share: (i, n) hashes every n-th file from the i-th on, so that n processes can divide the work; None
        checks only sizes. Sizes are checked for every file.
    names: check only these files.
    advance: called with the number of bytes hashed since its last call, from several threads.
    Files that the manifest does not list only cause a warning.
    """
    path = Path(path)
    try:
        manifest = read_manifest(path)
        extra = {entry.name for entry in os.scandir(path)} - set(manifest.files) - {NAME}
    except (CheckpointError, OSError) as error:
        return [str(error)]
    if extra and share and share[0] == 0:
        log.warning("%s", listed(f"{path}: ignoring files that its manifest does not know:", sorted(extra)))
    names = sorted(manifest.files if names is None else names)
    hashed = set(names[share[0] :: share[1]]) if share else set()
    with ThreadPoolExecutor(READERS) as pool:
        problems = pool.map(
            lambda name: _file_problem(path / name, manifest.files[name], name in hashed, advance), names
        )
        return [problem for problem in problems if problem]


def _file_problem(
    file: Path, entry: FileEntry, content: bool, advance: Callable[[int], None] | None = None
) -> str | None:
    try:
        _require_regular(file)
        size = file.stat().st_size
        if size != entry.size:
            return f"{file}: damaged: {size} bytes, the manifest says {entry.size}"
        if content and _digest(file, advance) != entry.sha256:
            return f"{file}: damaged: SHA-256 differs from the manifest's"
    except FileNotFoundError:
        return f"{file}: missing"
    except OSError as error:
        return f"{file}: {error}"
    return None


def _digest(file: Path, advance: Callable[[int], None] | None) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    with open(file, "rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            if advance:
                advance(count)
    return digest.hexdigest()


def stamp(path: Path) -> tuple | None:
    """Name, size, time and inode of every file; None if the folder cannot be read.

    A folder that was verified need not be read again while its stamp is the same.
    """
    try:
        stats = [(entry.name, entry.stat()) for entry in os.scandir(path)]
    except OSError:
        return None
    return tuple(sorted((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in stats))


# ---- payloads ----


def write_chunk(file: HashedFile, tensor: Tensor, offset: tuple[int, ...]) -> ShardChunk:
    """Append `tensor` (any device and strides) as the box at `offset` of its whole."""
    tensor = tensor.detach().to("cpu").contiguous()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:  # torch.save would write the whole storage
        tensor = tensor.clone()
    at = file.size
    digest = _content_hash(tensor)
    torch.save(tensor, cast(IO[bytes], file))
    return ShardChunk(tuple(offset), tuple(tensor.shape), file.path.name, at, file.size - at, digest)


class _Window(io.RawIOBase):
    """`size` bytes of a file from `at` on, presented as a file.

    torch.load reads from it directly into the tensor, without an intermediate copy.
    """

    def __init__(self, file: io.FileIO, at: int, size: int):
        self._file = file
        self._at = at
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._position)]
        self._file.seek(self._at + self._position)
        filled = 0
        while filled < len(view) and (count := self._file.readinto(view[filled:])):
            filled += count  # Linux reads at most 2 GiB in one call, and torch makes only one
        self._position += filled
        return filled


def read_chunk(folder: Path, chunk: ShardChunk, dtype: torch.dtype) -> Tensor:
    """The chunk as a CPU tensor, checked against its shape, dtype and hash.

    Raises CheckpointError, which names file and byte, if the chunk differs.
    """
    where = f"{folder / chunk.file} at byte {chunk.at}"
    try:
        _require_regular(folder / chunk.file)
        with open(folder / chunk.file, "rb", buffering=0) as file:
            window = cast(IO[bytes], _Window(file, chunk.at, chunk.size))
            tensor = torch.load(window, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes make torch.load raise errors of any kind
        raise CheckpointError(f"{where}: unreadable: {type(error).__name__}: {error}") from error
    if type(tensor) is not Tensor or tensor.dtype != dtype or tuple(tensor.shape) != chunk.shape:
        raise CheckpointError(f"{where}: holds something else than {dtype} of shape {chunk.shape}")
    if _content_hash(tensor) != chunk.sha256:
        raise CheckpointError(f"{where}: damaged: SHA-256 differs from the manifest's")
    return tensor


def _content_hash(tensor: Tensor) -> str:
    array: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(array).hexdigest()
