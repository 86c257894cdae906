"""Types of floating-point numbers, by their names in settings."""

from __future__ import annotations

import torch

FLOATS = dict(bf16=torch.bfloat16, fp16=torch.float16, fp32=torch.float32)
