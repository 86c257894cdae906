"""Cross-entropy through the output head without ever holding logits of [T, V]."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_LOGITS = 2**25  # logits held at once: 128 MiB in fp32, enough rows to fill a GPU's matrix units at any V
IGNORE = -100  # target that counts in no loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Works out the gradient while a chunk's logits exist, so backward only multiplies by the incoming scale.

    With p = softmax(h W^T): d loss / d logits = p - onehot(target). Products in the type of h and W, softmax in fp32,
    the head's gradient accumulates in fp32.
    """

    @staticmethod
    def forward(ctx, h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
        rows = max(1, CHUNK_LOGITS // weight_VD.shape[0])
        needs_h, needs_w = ctx.needs_input_grad[:2]
        grad_h = torch.empty_like(h_TD) if needs_h else None
        grad_w = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_w else None
        loss = torch.zeros((), device=h_TD.device)
        for i in range(0, h_TD.shape[0], rows):
            h, targets = h_TD[i : i + rows], targets_T[i : i + rows]
            logits = (h @ weight_VD.t()).float()
            keep = targets != IGNORE
            index = targets.where(keep, 0)[:, None]
            lse = logits.logsumexp(-1, keepdim=True)
            loss += ((lse - logits.gather(1, index))[:, 0]).where(keep, 0.0).sum()
            if grad_h is None and grad_w is None:
                continue
            grad = logits.sub_(lse).exp_()
            grad.scatter_add_(1, index, torch.full_like(lse, -1.0))
            grad = grad.masked_fill_(~keep[:, None], 0.0).to(h.dtype)
            if grad_h is not None:
                grad_h[i : i + rows] = grad @ weight_VD
            if grad_w is not None:
                grad_w += grad.t() @ h
        ctx.save_for_backward(grad_h, grad_w)
        ctx.weight_dtype = weight_VD.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor):
        grad_h, grad_w = ctx.saved_tensors
        if grad_h is not None:
            grad_h = grad_h * grad_loss.to(grad_h.dtype)
        if grad_w is not None:
            grad_w = (grad_w * grad_loss).to(ctx.weight_dtype)
        return grad_h, grad_w, None


def cross_entropy_sum(h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    """Sum over tokens of -log softmax(h W^T)[target], nats, 0-dim fp32; targets of -100 count nothing.

    Differentiable in h and weight (once: the gradient is made in forward).
    """
    if targets_T.shape != h_TD.shape[:1]:
        raise ValueError(
            f"targets: shape {tuple(targets_T.shape)} must be {tuple(h_TD.shape[:1])}, one for each row of h"
        )
    if not torch.is_grad_enabled():  # needs_input_grad stays true under no_grad: validation would make gradients
        h_TD, weight_VD = h_TD.detach(), weight_VD.detach()
    return _ChunkedCrossEntropy.apply(h_TD, weight_VD, targets_T)
