"""Values to the bytes of one of ggml's types, and back.

The gguf package encodes and decodes; K-quants, which it only decodes, are encoded by kquants.py.

next: extras/gguf/kquants.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from tmoe.checkpoint.manifest import CheckpointError
from tmoe.extras.gguf.kquants import ENCODERS, VALUES

CHUNK = 2**22  # values that are encoded at a time; K-quants need some 20 times their memory


def encode(values: Tensor, kind: str, name: str, device: str = "cpu") -> np.ndarray:
    """Bytes of a tensor [..., n] fp32 in the type `kind`, uint8 [..., bytes of a row].

    device: where K-quants are computed. CheckpointError, with `name`, for values that fp16 does not hold.
    """
    values = values.detach().contiguous()
    if kind == "F16" and bool(((values.abs() > 65504) & values.isfinite()).any()):
        most = float(values.abs().max())
        raise CheckpointError(f"{name} has weights up to {most:.3g}, float16 holds 65504: use --type bf16")
    if kind in ENCODERS:
        blocks = values.view(-1, VALUES)
        rows = CHUNK // VALUES
        parts = [ENCODERS[kind](part.to(device)).cpu() for part in blocks.split(rows)]
        return torch.cat(parts).view(*values.shape[:-1], -1).numpy()
    array: Any = values.numpy()
    found = quants.quantize(array, GGMLQuantizationType[kind])
    return np.ascontiguousarray(found).view(np.uint8)


def decode(raw: Any, kind: GGMLQuantizationType) -> Tensor:
    """The values [..., n] fp32 of rows of a file, arrays as gguf's reader has them.

    NotImplementedError for a type that the package does not decode.
    """
    return torch.from_numpy(np.array(quants.dequantize(raw, kind), dtype=np.float32))
