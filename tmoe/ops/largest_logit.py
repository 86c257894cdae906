"""The largest magnitude of each attention head's logits, recorded during a forward.

Attention's kernels do not return it for every mask, and flex attention returns the largest logit, not the
largest magnitude. So the products of queries and keys are computed once more, in chunks of queries.

next: model/qk_clip.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from tmoe.ops.register import on_any_device

CHUNK = 2**26  # most logits that exist at a time


def _same(q_BSHC: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q_BSHC, memory_format=torch.contiguous_format)


def _pass_on(ctx: object, grad_BSHC: Tensor) -> tuple[Tensor | None, ...]:
    return grad_BSHC, None, None, None, None, None, None


@on_any_device("largest_logit", fake=_same, differentiate=_pass_on)
def largest_logit(
    q_BSHC: Tensor,
    k_BJGC: Tensor,
    mask: Tensor | None,
    largest_H: Tensor,
    first: int,
    window: int,
    scale: float,
) -> Tensor:
    """Raises largest_H[h] to the largest |scale q k| of head h over visible pairs; returns a copy of q.

    The write is not declared in the op's schema, so that a checkpointed block may contain the op: no other
    operation of a graph reads largest_H, and a second write of the same logits changes nothing. The copy
    makes the op a part of the graph.

    mask: bool [B or 1, 1, S, J], True where a query may attend; None: itself and earlier tokens.
    largest_H: fp32, for all heads. first: the first head of q in it.
    window: tokens that a token attends to, itself included, if the mask does not say; 0: all.
    """
    B, S, H = q_BSHC.shape[:3]
    J, G = k_BJGC.shape[1:3]
    wide = torch.float32 if q_BSHC.dtype == torch.float16 else q_BSHC.dtype  # a logit may exceed fp16's range
    k_BGCJ = k_BJGC.detach().permute(0, 2, 3, 1).to(wide)
    rows = max(1, CHUNK // max(1, B * H * J))
    at_J = torch.arange(J, device=q_BSHC.device)
    for begin in range(0, S, rows):
        part = q_BSHC.detach()[:, begin : begin + rows].to(wide)
        n = part.shape[1]
        q_BGXC = part.unflatten(2, (G, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        logits = (q_BGXC @ k_BGCJ).unflatten(2, (-1, n)).flatten(1, 2).abs()
        if mask is None or window:
            i = torch.arange(begin, begin + n, device=q_BSHC.device)[:, None]
            seen = i >= at_J
            seen = seen & (i - at_J < window) if 0 < window < J else seen
            logits = logits.masked_fill(~seen, 0)
        if mask is not None:
            logits = logits.masked_fill(~mask[:, :, begin : begin + n], 0)
        most_H = logits.amax((0, 2, 3)).float() * scale
        own_H = largest_H[first : first + H]
        own_H.copy_(torch.maximum(own_H, most_H))
    return q_BSHC.clone(memory_format=torch.contiguous_format)
