"""Cross-entropy through the output head without ever holding logits of [T, V]; the type of an objective."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from tmoe.config.model import IGNORE
from tmoe.ops.argument_checks import autocasts
from tmoe.ops.gradient_sums import find_table
from tmoe.ops.loss.cross_entropy import cross_entropy_
from tmoe.ops.loss.head import add_product, summed_type, times, to_autograd, widened
from tmoe.ops.register import register

Given = dict[str, Tensor]
"""The inputs that a task gives its objective besides the targets, by name: a value for each token, or
a tensor of another shape."""


class Objective(Protocol):
    """A training objective: this rank's share of a sum, before the division by the step's count."""

    def __call__(self, h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, given: Given, /) -> Tensor:
        """0-dim fp32, differentiable in h and weight.

        h_TD: final hidden states of this rank's own tokens, the input of the head.
        weight_VD: the head.
        targets_T: the token that follows each token, -100 where nothing is trained.
        given: values of these tokens [T], or other tensors as the task gave them.

        Under tp and cp the ranks of a group have different tokens of the same rows, and the objective is
        called on all of them.
        """
        ...


CHUNK_LOGITS = 2**25  # logits held at once on a CPU: 128 MiB in fp32
# On a GPU: 4096 rows at V = 152k. With 1024 rows, adding up the head's gradient takes 25% of its product's
# time; with 4096 it takes none.
CHUNK_LOGITS_GPU = 2**30


@record_function("loss")  # benchmarks/trace.py separates its products from the blocks' by this name
def loss_and_gradients(
    h_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    needs_h: bool,
    needs_w: bool,
    best_T: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The loss, and its gradients with respect to h (in h's type) and to the weight (fp32).

    A gradient that is not needed is None. Gradients are computed while a chunk's logits exist. With p =
    softmax(h W^T): d loss / d logits = p - onehot(target). Products are in the type of h and W, softmax is in
    fp32, and the head's gradient accumulates in fp32. best_T: see `cross_entropy_sum`.
    """
    V = weight_VD.shape[0]
    rows = chunk_rows(V, h_TD.is_cuda)
    weight = widened(weight_VD)
    grad_h = torch.empty_like(h_TD) if needs_h else None
    grad_w = None
    loss = torch.zeros((), device=h_TD.device)
    for i in range(0, h_TD.shape[0], rows):
        h = h_TD[i : i + rows]
        targets = targets_T[i : i + rows]
        logits = h @ weight.t()
        if best_T is not None:
            best_T[i : i + rows] = logits[:, :V].argmax(-1)
        losses, grad = softmax_and_gradient(logits, targets, V, needs_h or needs_w)
        del logits
        loss += losses.sum()
        if grad_h is not None:
            grad_h[i : i + rows] = grad @ weight
        if needs_w:
            grad_w = add_product(grad_w, grad.t(), h)
        del grad  # frees a chunk of logits (on a GPU) before the next is made
    if needs_w and grad_w is None:  # no rows
        grad_w = weight.new_zeros(weight.shape, dtype=summed_type(weight.dtype))
    return loss, grad_h, grad_w if grad_w is None else grad_w[:V]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The loss in eager code; its backward only multiplies the gradients by the incoming factor."""

    @staticmethod
    def forward(
        ctx: Any, h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, best_T: Tensor | None
    ) -> Tensor:
        loss, *gradients = loss_and_gradients(h_TD, weight_VD, targets_T, *ctx.needs_input_grad[:2], best_T)
        ctx.save_for_backward(*gradients)
        ctx.weight_dtype = weight_VD.dtype
        ctx.owner = find_table(weight_VD)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        if torch.is_grad_enabled():  # the logits are freed
            raise RuntimeError("the loss has no second derivative: no create_graph")
        grad_h, grad_w = ctx.saved_tensors
        if grad_h is not None:
            grad_h = times(grad_h, grad_loss, grad_h.dtype)
        if grad_w is not None:
            grad_w = to_autograd(ctx.owner, grad_w, grad_loss, ctx.weight_dtype)
        return grad_h, grad_w, None, None


# The same as an op: without it a compiler would trace every chunk, and on a GPU every launch of a kernel.
def _forward(h: Tensor, weight: Tensor, targets: Tensor, needs_h: bool, needs_w: bool) -> tuple[Tensor, ...]:
    """loss_and_gradients with empty tensors instead of None, since an op returns tensors."""
    gradients = loss_and_gradients(h, weight, targets, needs_h, needs_w)
    return tuple(h.new_empty(0) if t is None else t for t in gradients)


def _forward_fake(
    h: Tensor, weight: Tensor, targets: Tensor, needs_h: bool, needs_w: bool
) -> tuple[Tensor, ...]:
    grad_h = torch.empty_like(h) if needs_h else h.new_empty(0)
    # contiguous, whatever the layout of the weight
    wide = summed_type(weight.dtype)
    grad_w = weight.new_empty(weight.shape, dtype=wide) if needs_w else h.new_empty(0)
    return h.new_empty((), dtype=torch.float32), grad_h, grad_w


def _backward_fake(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(grad, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.needs = inputs[3:]
    ctx.weight_dtype = inputs[1].dtype
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _differentiate(ctx: Any, grad_loss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_loss is None:
        return (None,) * 5
    grad_h, grad_w = ctx.saved_tensors
    needs_h, needs_w = ctx.needs
    gradient_of = torch.ops.tmoe.cross_entropy_backward
    by_h = gradient_of(grad_h, grad_loss, grad_h.dtype) if needs_h else None
    by_w = gradient_of(grad_w, grad_loss, ctx.weight_dtype) if needs_w else None
    return by_h, by_w, None, None, None


register(
    "cross_entropy_backward",
    "(Tensor grad, Tensor factor, ScalarType dtype) -> Tensor",
    cpu=times,
    cuda=times,
    fake=_backward_fake,
)
register(
    "cross_entropy",
    "(Tensor h, Tensor weight, Tensor targets, bool needs_h, bool needs_w) -> (Tensor, Tensor, Tensor)",
    cpu=_forward,
    cuda=_forward,
    fake=_forward_fake,
    save=_save,
    differentiate=_differentiate,
)


def chunk_rows(V: int, gpu: bool) -> int:
    """Rows of logits held at once; on a GPU a power of two, so that tiles keep all matrix units busy."""
    return 1 << max(0, (CHUNK_LOGITS_GPU // V).bit_length() - 1) if gpu else max(1, CHUNK_LOGITS // V)


def softmax_and_gradient(
    logits: Tensor, targets_R: Tensor, V: int, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """-log p[target] [R] in fp32, and p - onehot(target) in the type of logits.

    Both are 0 where a target is ignored. The function overwrites the logits: [R, V], on a GPU possibly with
    more columns, whose gradient is 0.
    """
    if logits.is_cuda:
        return cross_entropy_(logits, targets_R, V, IGNORE, needs_grad), logits
    logits, dtype = logits.float(), logits.dtype
    keep = targets_R != IGNORE
    index = targets_R.where(keep, 0)[:, None]
    lse = logits.logsumexp(-1, keepdim=True)
    losses = (lse - logits.gather(1, index))[:, 0].where(keep, 0.0)
    if needs_grad:
        logits = logits.sub_(lse).exp_().scatter_add_(1, index, torch.full_like(lse, -1.0))
        logits = logits.masked_fill_(~keep[:, None], 0.0).to(dtype)
    return losses, logits


def cross_entropy(h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, given: Given) -> Tensor:
    """The objective of pretraining: `cross_entropy_sum`. `given` is not used."""
    return cross_entropy_sum(h_TD, weight_VD, targets_T)


def cross_entropy_sum(
    h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, best_T: Tensor | None = None
) -> Tensor:
    """Sum over tokens of -log softmax(h W^T)[target], nats, 0-dim fp32; targets of -100 are not counted.

    It is differentiable in h and weight, once: the gradient is computed in forward. Under autocast its
    products are in autocast's dtype. Any other target outside of 0 .. V - 1 raises torch's index error on a
    CPU. On a GPU such a target makes the loss and the gradients NaN, so that the host need not wait.
    best_T: int64, overwritten with each row's token of the largest logit; not in compiled code. Raises
    ValueError if the targets have another length than h, or are on another device.
    """
    if targets_T.shape != h_TD.shape[:1]:
        raise ValueError(
            f"targets: shape {tuple(targets_T.shape)} must be {tuple(h_TD.shape[:1])}, one for each row of h"
        )
    if targets_T.device != h_TD.device:
        raise ValueError(f"targets: on {targets_T.device}, must be on {h_TD.device}, where h is")
    # the kernel needs them contiguous; flatten keeps a matrix column strided
    targets_T = targets_T.contiguous()
    if not torch.is_grad_enabled():  # else needs_input_grad is true, and validation computes gradients
        h_TD = h_TD.detach()
        weight_VD = weight_VD.detach()
    if autocasts(h_TD) and h_TD.dtype != torch.float64:  # as for F.linear
        kind = h_TD.device.type
        dtype = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            return _loss(h_TD.to(dtype), weight_VD.to(dtype), targets_T, best_T)
    return _loss(h_TD, weight_VD, targets_T, best_T)


def _loss(h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, best_T: Tensor | None) -> Tensor:
    if torch.compiler.is_compiling():
        needs = h_TD.requires_grad, weight_VD.requires_grad
        return torch.ops.tmoe.cross_entropy(h_TD, weight_VD, targets_T, *needs)[0]
    return _ChunkedCrossEntropy.apply(h_TD, weight_VD, targets_T, best_T)


@torch.no_grad()
def largest_logits(h_TD: Tensor, weight_VD: Tensor, best_T: Tensor) -> None:
    """Overwrites best_T, int64, with each row's token of the largest logit; a chunk of rows at a time."""
    rows = chunk_rows(len(weight_VD), h_TD.is_cuda)
    for i in range(0, len(h_TD), rows):
        best_T[i : i + rows] = (h_TD[i : i + rows] @ weight_VD.t()).argmax(-1)
