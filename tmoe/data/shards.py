"""Writes and opens token shards: files with a header of one line of JSON, followed by token ids.

next: data/dataset.py
"""

from __future__ import annotations

import itertools
import json
import operator
import os
import shutil
import uuid
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_type_hints

import numpy as np

from tmoe.base.disk import naming, unwritable_words
from tmoe.config.check import fits
from tmoe.data.corpus import TokenRun
from tmoe.data.tokenizer import DataError, Tokenizer, own_files

HEADER_BYTES = 1024


@dataclass(frozen=True)
class ShardHeader:
    """First line of a shard, as JSON."""

    dtype: Literal["uint16", "uint32"]
    tokens: int
    max_id: int
    """largest id: `open_shard` compares it with the model's vocabulary, without reading the ids"""
    max_at: int
    """index of the first token that is max_id, for the error message"""
    tokenizer: str
    """the tokenizer's fingerprint"""
    vocab: int
    eos: int
    magic: str = "tmoe-shard"
    version: int = 1
    documents: int = -1
    """number of documents; -1 if an older version wrote the shard without counting them"""

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize


def open_shard(path: Path, vocab: int) -> tuple[ShardHeader, TokenRun]:
    """Memory-maps a shard after checking its header, size and largest id. DataError names file and offset."""
    header = read_header(path)
    size = path.stat().st_size
    promised = HEADER_BYTES + header.tokens * header.itemsize
    if size != promised:
        what = "truncated" if size < promised else "too long"
        raise DataError(
            f"{path}: {what}: ends at byte {size}, its header promises {header.tokens} tokens, {promised}"
        )
    if header.tokens == 0:
        raise DataError(f"{path}: empty shard: no tokens after the header (byte {HEADER_BYTES})")
    mapped = np.memmap(path, dtype=f"<u{header.itemsize}", mode="r", offset=HEADER_BYTES)
    run = TokenRun(mapped, str(path), HEADER_BYTES)
    if header.max_id >= vocab:
        raise run.bad_id(header.max_at, vocab)
    return header, run


def read_header(path: Path) -> ShardHeader:
    """A shard's header. DataError if there is no header of this version, or if its values are impossible."""
    # Opening a pipe would block until something writes to it.
    if not path.is_file():
        raise DataError(f"{path}: no regular file, or a link to nothing")
    with path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
    megatron = "" if raw.startswith(b"{") else f"; a Megatron data set needs {path.stem}.idx in its folder"
    if len(raw) < HEADER_BYTES:
        what = "truncated" if raw else "empty shard"
        raise DataError(
            f"{path}: {what}: ends at byte {len(raw)}, inside the header of {HEADER_BYTES}{megatron}"
        )
    try:
        fields = json.loads(raw)
        if (fields["magic"], fields["version"]) != (ShardHeader.magic, ShardHeader.version):
            raise ValueError(f"magic {fields['magic']!r}, version {fields['version']!r}")
        header = ShardHeader(**fields)
        for name, kind in get_type_hints(ShardHeader).items():
            if not fits(value := getattr(header, name), kind):
                raise ValueError(f"{name} {value!r}")
        tokens = header.tokens
        if min(tokens, header.max_id, header.max_at) < 0 or (tokens and header.max_at >= tokens):
            raise ValueError(f"max_id {header.max_id} at token {header.max_at} of {tokens}")
        if not 0 <= header.eos < header.vocab:
            raise ValueError(f"eos {header.eos} of {header.vocab} ids")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(
            f"{path}: byte 0 begins no {ShardHeader.magic} header of version {ShardHeader.version}: "
            f"{error!r}; `python -m tmoe.data` makes shards{megatron}"
        ) from error
    return header


def write_shards(out: Path, documents: Iterable[np.ndarray], tokenizer: Tokenizer, shard_tokens: int) -> int:
    """Writes documents (ids that end with eos) as shards into the new folder `out`; returns the token count.

    A shard holds whole documents, at most `shard_tokens` tokens unless one document alone is longer. The
    folder appears complete or not at all: it is written and synced under another name, then renamed. The
    tokenizer's files are written into the same folder, so that the export of a model that was trained on
    the shards includes them.
    """
    total = 0
    with _publish(out) as folder:
        for number, group in itertools.groupby(_number(documents, shard_tokens), key=operator.itemgetter(0)):
            total += _write_shard(folder / f"{number:05}.bin", (ids for _, ids in group), tokenizer)
        for name, content in own_files(tokenizer).items():
            (folder / name).write_bytes(content)
        if total == 0:
            raise DataError("the sources hold no text: nothing to write")
    return total


def _number(documents: Iterable[np.ndarray], shard_tokens: int) -> Iterator[tuple[int, np.ndarray]]:
    """Pairs each document with the number of its shard."""
    number = filled = 0
    for ids in documents:
        if filled and filled + len(ids) > shard_tokens:
            number += 1
            filled = 0
        filled += len(ids)
        yield number, ids


def _write_shard(path: Path, documents: Iterable[np.ndarray], tokenizer: Tokenizer) -> int:
    """Writes documents as one shard and returns its number of tokens.

    The header is written last, into the bytes left free for it at the start of the file.
    """
    dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab <= 1 << 16 else "uint32"
    tokens = 0
    count = 0
    max_id, max_at = -1, 0
    with naming(path), path.open("xb") as file:
        file.seek(HEADER_BYTES)
        for ids in documents:
            highest = int(ids.argmax())
            if ids[highest] > max_id:
                max_id, max_at = int(ids[highest]), tokens + highest
            file.write(ids.astype("<u2" if dtype == "uint16" else "<u4").tobytes())
            tokens += len(ids)
            count += 1
        header = ShardHeader(
            dtype,
            tokens,
            max_id,
            max_at,
            tokenizer.fingerprint,
            tokenizer.vocab,
            tokenizer.eos,
            documents=count,
        )
        file.seek(0)
        file.write(json.dumps(asdict(header)).encode().ljust(HEADER_BYTES - 1) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return tokens


@contextmanager
def _publish(out: Path) -> Generator[Path, None, None]:
    """A temporary folder to write into; it is renamed to `out` at the end, or removed on any error."""
    if os.path.lexists(out):
        raise DataError(f"--out={out}: exists already; name a new folder")
    if wrong := unwritable_words(out):
        raise DataError(f"--out={out}: {wrong}")
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex[:12]}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        _sync_folder(temporary)
        temporary.rename(out)  # fails if a folder with content appeared there meanwhile
        _sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
