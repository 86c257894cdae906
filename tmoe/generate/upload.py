"""Copies small values from the host to the device. The host does not wait for work on the device.

next: generate/slots.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def upload(
    values: Sequence[Any] | np.ndarray, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """A tensor of `values` on the device.

    torch.tensor(values, device="cuda") copies from pageable memory. It returns only after all earlier kernels
    of the stream, so that the device has no work while the host launches the next.
    """
    t = torch.tensor(values, dtype=dtype)
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)
