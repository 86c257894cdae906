"""Finetuning on given tokens, with what is added to it: weights, DFT, NEFTune's noise."""

import torch
from torch import Tensor


def sft(logp: Tensor, dft: bool = False) -> Tensor:
    """-lp, nats, of each token: cross-entropy. With `dft` -sg(e^lp) lp, sg without gradient.

    DFT (Wu et al. 2025, arXiv 2508.05629) weighs a token by its own probability: tokens that the
    model does not expect at all move it little, as in a policy gradient with reward 1.

    The step's loss is sum(w m loss) / sum(w m) over its trained tokens, w weights of rows or tokens:
    `sums.token_weights` with mask_T = w m. Its values depend on the layout by rounding alone.
    """
    return -logp.detach().exp() * logp if dft else -logp


def neftune(x_TD: Tensor, lengths_T: Tensor, noise_TD: Tensor, alpha: float = 5.0) -> Tensor:
    """Embeddings with noise: x + noise alpha / sqrt(n D), where n is the length of a token's own document.

    noise_TD: uniform on (-1, 1); drawn by the caller, by (seed, step, sample), so that no layout changes it.
    lengths_T: n of each token (`document_lengths`): of its document and not of its row, so that packing
    changes nothing. For training alone. Jain et al. 2023, arXiv 2310.05914, algorithm 1.
    """
    scale = alpha / (lengths_T.float() * x_TD.shape[-1]).sqrt()
    return x_TD + (noise_TD * scale[:, None]).to(x_TD.dtype)


def document_lengths(documents_BS: Tensor) -> Tensor:
    """How many tokens the document of each token has, int64 [B, S].

    documents_BS: number of the document within the row, as batches have it; equal numbers are neighbours.
    """
    B, S = documents_BS.shape
    index = documents_BS - documents_BS.amin(1, keepdim=True)
    index = index.clamp(max=S - 1) + S * torch.arange(B, device=documents_BS.device)[:, None]
    return torch.bincount(index.flatten(), minlength=B * S)[index]
