"""Writes Megatron's indexed data sets byte for byte as Megatron's writer does: a .bin and its .idx."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

CODES = dict(uint8=1, int8=2, int16=3, int32=4, int64=5, float64=6, float32=7, uint16=8)


def write(prefix: Path, documents: list[list[int]], dtype: str = "uint16", per: int = 1) -> Path:
    """Writes PREFIX.bin and PREFIX.idx.

    per: sequences per document; Megatron's --split-sentences gives more than one.
    """
    sequences: list[np.ndarray] = []
    firsts = [0]
    for ids in documents:
        sequences += np.array_split(np.array(ids, dtype), per)
        firsts.append(len(sequences))
    lengths = [len(s) for s in sequences]
    size = np.dtype(dtype).itemsize
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * size
    prefix.with_name(prefix.name + ".bin").write_bytes(b"".join(s.tobytes() for s in sequences))
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(firsts))
    index += np.array(lengths, "<i4").tobytes() + np.array(pointers, "<i8").tobytes()
    index += np.array(firsts, "<i8").tobytes()
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    return prefix
