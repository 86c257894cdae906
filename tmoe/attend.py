"""Softmax attention over earlier tokens of the same document: the mask, and the fastest kernel that takes it.

next: moe.py
"""

import torch.nn.functional as F
from torch import Tensor


def document_mask(documents_BS: Tensor) -> Tensor:
    """[B, 1, S, S] bool, True where a query may look: earlier or itself, in its own document."""
    same = documents_BS[:, :, None] == documents_BS[:, None, :]
    return same.tril()[:, None]


def attend(q_BSHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """softmax(scale q k^T) v, causal, [B, S, H, C of v]; G key/value heads serve H query heads (Ainslie et al. 2023).

    mask: None for plain causal attention, else document_mask's. scale: None gives 1/sqrt(C).
    """
    H, G = q_BSHC.shape[2], k_BSGC.shape[2]
    if mask is not None and q_BSHC.is_cuda:  # with a mask only the unfused backend takes grouped heads: [B, H, S, S]
        k_BSGC, v_BSGC = (t.repeat_interleave(H // G, 2) for t in (k_BSGC, v_BSGC))
    y_BHSC = F.scaled_dot_product_attention(
        q_BSHC.transpose(1, 2),
        k_BSGC.transpose(1, 2),
        v_BSGC.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=k_BSGC.shape[2] != H,
    )
    return y_BHSC.transpose(1, 2)
