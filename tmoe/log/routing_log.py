"""The records of routing.bin: the load of the experts over time, layer x expert x step.

A record is 12 bytes of head (mark, length, CRC-32), then one line of JSON and the arrays, compressed by zlib.
Each record can be read on its own. A record that a crash cut short or a disk damaged is skipped: the
reader continues at the next mark.

next: tmoe/log/routing_report.py
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tmoe.log.metrics_file import COUNTED

MARK = b"tmoR"
HEAD = struct.Struct("<4sII")  # mark, length of the body in bytes, CRC-32 of the body
LARGEST = 2**28  # most bytes of an uncompressed body; all arrays of 4096 layers of 2048 experts are smaller
WHOLE_NUMBERS = tuple(np.dtype(f"<u{size}") for size in (1, 2, 4, 8))


class RoutingRecord(NamedTuple):
    """The routers' numbers for one line of the log: sums over the steps since the previous line.

    L: the MoE layers only, without dense layers.
    """

    step: int  # from 1
    losses: tuple[str, ...]  # names of the columns of losses_LX
    counts_LE: np.ndarray  # routed pairs, before any is dropped
    dropped_LE: np.ndarray  # routed pairs that were dropped
    bias_LE: np.ndarray  # the choice bias at the end of the step; 0 if the router has none
    entropy_L: np.ndarray  # mean over tokens, nats
    losses_LX: np.ndarray  # means over the steps, without coefficients


ARRAYS = RoutingRecord._fields[2:]


def pack(record: RoutingRecord) -> bytes:
    """The bytes of a record.

    An array of whole numbers has the smallest type that holds its largest number.
    """
    arrays = {name: np.asarray(value) for name, value in zip(ARRAYS, record[2:], strict=True)}
    for name in ("counts_LE", "dropped_LE"):
        largest = arrays[name].max(initial=0)
        arrays[name] = arrays[name].astype(next(t for t in WHOLE_NUMBERS if largest <= np.iinfo(t).max))
    for name in ("bias_LE", "entropy_L", "losses_LX"):
        arrays[name] = arrays[name].astype("<f4")
    header = dict(
        step=record.step,
        **COUNTED,
        losses=list(record.losses),
        arrays={name: [array.dtype.str, *array.shape] for name, array in arrays.items()},
    )
    parts = [json.dumps(header).encode() + b"\n", *(array.tobytes() for array in arrays.values())]
    body = zlib.compress(b"".join(parts))
    return HEAD.pack(MARK, len(body), zlib.crc32(body)) + body


def read_records(path: Path) -> Iterator[RoutingRecord]:
    """Yields the intact records of a file in order; nothing if the file does not exist."""
    for _, record in _records(path):
        yield record


def rewind(path: Path, done: int, keep: Path | None = None) -> int:
    """Cuts the file after the last intact record of the first `done` steps; returns the bytes removed.

    If any byte is removed, the whole file is first copied to `keep`.
    """
    if not path.exists():
        return 0
    end = 0
    for behind, record in _records(path):
        if record.step > done:
            break
        end = behind
    gone = path.stat().st_size - end
    if gone and keep:
        shutil.copyfile(path, keep)
    if gone:
        os.truncate(path, end)
    return gone


def _records(path: Path) -> Iterator[tuple[int, RoutingRecord]]:
    """Yields each intact record with the position of its end."""
    if not path.exists() or not path.stat().st_size:
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        at = mapped.find(MARK)
        while at >= 0:
            end, record = _read(mapped, at)
            if record is not None:
                yield end, record
            at = mapped.find(MARK, end)


def _read(mapped: mmap.mmap, at: int) -> tuple[int, RoutingRecord | None]:
    """(end, record) for the mark at `at`; (position to search on from, None) if there is no intact record."""
    begin = at + HEAD.size
    if begin > len(mapped):
        return at + 1, None
    _, length, crc = HEAD.unpack(mapped[at:begin])
    body = mapped[begin : begin + length]
    if len(body) < length or zlib.crc32(body) != crc:
        return at + 1, None
    try:
        return begin + length, _unpacked(body)
    except (zlib.error, ValueError, TypeError, KeyError, RecursionError):
        return at + 1, None


def _unpacked(body: bytes) -> RoutingRecord:
    line, _, rest = zlib.decompressobj().decompress(body, LARGEST).partition(b"\n")
    header: dict[str, Any] = json.loads(line)
    arrays = {}
    at = 0
    for name, (kind, *shape) in header["arrays"].items():
        dtype, size = np.dtype(kind), int(np.prod(shape))
        if dtype.kind not in "uf":
            raise ValueError(f"{name}: no numbers")
        arrays[name] = np.frombuffer(rest, dtype, size, at).reshape(shape)
        at += size * dtype.itemsize
    losses = tuple(str(name) for name in header["losses"])
    record = RoutingRecord(int(header["step"]) + 1 - int(header.get("from", 0)), losses, **arrays)
    layers, experts = record.counts_LE.shape
    shapes = dict(dropped_LE=(layers, experts), bias_LE=(layers, experts), entropy_L=(layers,))
    shapes["losses_LX"] = layers, len(losses)
    if any(getattr(record, name).shape != shape for name, shape in shapes.items()):
        raise ValueError("arrays of different models")
    return record
