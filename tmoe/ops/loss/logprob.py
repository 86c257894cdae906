"""Log-probs of given tokens, and losses computed from them, without ever storing logits of [T, V].

`logprobs` keeps h, W and a number a row, and recomputes the logits in backward: 8 TVD floating-point
operations with both gradients. `token_loss` is given a function of each token's log-prob and differentiates
it while the token's logits exist: 6 TVD. Both store one chunk of logits at a time.

next: logprob_kernels.py
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from tmoe.ops.argument_checks import FLOATS, INTS, autocasts, check_device, check_tensors, require
from tmoe.ops.gradient_sums import find_table
from tmoe.ops.loss import logprob_kernels as kernels
from tmoe.ops.loss.head import add_product, summed_type, times, to_autograd, wide_products, widened
from tmoe.ops.register import register

IGNORE = -100  # the target of a token that does not count, as in torch
# Bytes of logits stored at a time: 1024 rows of 152k columns in bf16. With 4096 rows the time falls by a
# tenth (390 ms in place of 433 on an H200), because the sum of the head's gradient is cheaper, but it needs
# 1.2 GiB.
CHUNK_BYTES = 304 * 2**20


def logprobs(
    h_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    fp32_logits: bool = False,
) -> Any:
    """ln softmax(h W^T / temperature)[target] of each row, and with `entropy` the softmax's entropy, in nats.

    Differentiable once in h and weight, through both results. Under autocast its products are in autocast's
    dtype. Definition: `tmoe.ops.reference.logprobs`.

    Args:
        h_TD: final hidden states, the head's input. T may be 0.
        weight_VD: the head, of h's type and any V.
        targets_T: int64 or int32. At -100 the results are 0 and have no gradient. Any other target outside of
            0 .. V - 1 raises torch's index error on a CPU, and gives NaN on a GPU.
        temperature: above 0.
        entropy: also return the entropy.
        fp32_logits: do not round logits to h's type. In bf16 a logit of 20 has an error of up to 0.06.

    Returns logp_T, or (logp_T, entropy_T): fp32, or fp64 for fp64 inputs. Raises ValueError for arguments
    that do not fit.
    """
    _check(h_TD, weight_VD, targets_T, temperature, entropy, fp32_logits)
    options = float(temperature), entropy, fp32_logits
    logp, H, _ = _autocast(h_TD, weight_VD, lambda h, w: torch.ops.tmoe.logprobs(h, w, targets_T, *options))
    return (logp, H) if entropy else logp


class TokenLoss(NamedTuple):
    """The results of token_loss. Only the loss has a gradient."""

    loss: Tensor  # 0-dim fp32 (fp64 for fp64)
    logp_T: Tensor
    entropy_T: Tensor | None  # None unless `entropy` is True


def token_loss(
    h_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    f: Callable[..., Tensor],
    inputs: Sequence[Tensor] = (),
    temperature: float = 1.0,
    entropy: bool = False,
    fp32_logits: bool = False,
) -> TokenLoss:
    """The sum over tokens of f(log-prob, *inputs), or with `entropy` of f(log-prob, entropy, *inputs).

    The result equals f(logprobs(h, W, targets), ...).sum(). But f is called with the tokens of one chunk, and
    autograd differentiates it while the chunk's logits exist, which saves a quarter of the products.
    Differentiable once, in h and weight, and by one backward. If a compiler traces it, f is called once with
    all tokens, after `logprobs`.

    Args:
        f: elementwise function from vectors of R tokens to their R losses. Its values at targets of -100 are
            ignored, even NaN.
        inputs: further arguments of f: tensors whose first dimension is T, without gradient.
        h_TD, weight_VD, targets_T, temperature, fp32_logits: as for `logprobs`.

    Raises ValueError for arguments that do not fit, and for losses of another shape.
    """
    _check(h_TD, weight_VD, targets_T, temperature, entropy, fp32_logits)
    for i, t in enumerate(inputs):
        name = f"inputs[{i}]"
        check_tensors(**{name: t})
        require(t.dim() and t.shape[0] == len(h_TD), name, f"shape {tuple(t.shape)}", f"[T={len(h_TD)}, ...]")
        require(not t.requires_grad, name, "a tensor that requires grad", "one without: detach it")
        check_device(h_TD, **{name: t})
    if torch.compiler.is_compiling():
        outputs = logprobs(h_TD, weight_VD, targets_T, temperature, entropy, fp32_logits)
        logp, *more = outputs if entropy else (outputs,)
        losses = _losses(f, logp, more, inputs, targets_T != IGNORE)
        return TokenLoss(losses.sum(), logp.detach(), more[0].detach() if entropy else None)
    if not torch.is_grad_enabled():  # needs_input_grad would stay True, and validation would make gradients
        h_TD, weight_VD = h_TD.detach(), weight_VD.detach()
    options = float(temperature), entropy, fp32_logits
    loss, logp, H = _autocast(
        h_TD, weight_VD, lambda h, w: _TokenLoss.apply(h, w, targets_T, options, f, tuple(inputs))
    )
    return TokenLoss(loss, logp, H if entropy else None)


def _check(
    h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, temperature: float, entropy: bool, fp32_logits: bool
) -> None:
    """Raise ValueError unless the arguments fit the contract of `logprobs`."""
    check_tensors(h=h_TD, weight=weight_VD, targets=targets_T)
    require(h_TD.dim() == 2, "h", f"shape {tuple(h_TD.shape)}", "[T, D]")
    T, D = h_TD.shape
    fits = weight_VD.dim() == 2 and weight_VD.shape[1] == D and weight_VD.shape[0] > 0
    require(fits, "weight", f"shape {tuple(weight_VD.shape)}", f"[V, D={D}], V at least 1")
    require(targets_T.shape == (T,), "targets", f"shape {tuple(targets_T.shape)}", f"[T={T}]")
    require(targets_T.dtype in INTS, "targets", targets_T.dtype, "int32 or int64")
    valid = (*FLOATS, torch.float64) if h_TD.device.type in ("cpu", "meta") else FLOATS
    require(h_TD.dtype in valid, "h", h_TD.dtype, f"one of {valid} on {h_TD.device.type}")
    same = weight_VD.dtype == h_TD.dtype or autocasts(h_TD)
    require(same, "weight", weight_VD.dtype, f"h's {h_TD.dtype}")
    check_device(h_TD, weight=weight_VD, targets=targets_T)
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    ok = number and 0 < temperature < float("inf")
    require(ok, "temperature", repr(temperature)[:80], "a number above 0")
    for name, flag in (("entropy", entropy), ("fp32_logits", fp32_logits)):
        require(type(flag) is bool, name, repr(flag)[:80], "True or False")


def _autocast(h: Tensor, weight: Tensor, run: Callable[[Tensor, Tensor], tuple]) -> tuple:
    """run(h, weight); under autocast both are first cast to autocast's dtype, as for F.linear."""
    if not autocasts(h) or h.dtype == torch.float64:
        return run(h, weight)
    kind = h.device.type
    dtype = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        return run(h.to(dtype), weight.to(dtype))


def chunk_rows(columns: int, width: int) -> int:
    """Rows of logits stored at a time. columns: of a row. width: bytes for each logit.

    It is a power of two, so that the tiles of a product use all matrix units.
    """
    return 1 << max(0, (CHUNK_BYTES // (columns * width)).bit_length() - 1)


class _Chunks:
    """The head's products, chunk by chunk of rows: logits, and the gradients by h and by the weight."""

    def __init__(
        self, h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, temperature: float, fp32_logits: bool
    ) -> None:
        self.h, self.V = h_TD, weight_VD.shape[0]
        self.targets = targets_T.long().contiguous()  # targets may be strided, as a column of a matrix is
        self.scale = 1.0 / temperature
        self.weight = widened(weight_VD)
        self.wide = fp32_logits and h_TD.element_size() == 2
        self.unrounded = self.wide and wide_products(h_TD)
        self.head = self.weight.float() if self.wide and not self.unrounded else self.weight

    def slices(self, gradient: bool) -> Iterator[slice]:
        """The rows of each chunk.

        gradient: whether the gradient of logits will be computed. For fp32 logits of 16-bit inputs, the
            gradient needs memory in addition to the logits.
        """
        width = 4 + 2 * gradient if self.wide else self.h.element_size()
        rows = chunk_rows(self.weight.shape[0], width)
        return (slice(i, min(i + rows, len(self.h))) for i in range(0, len(self.h), rows))

    def logits(self, at: slice) -> Tensor:
        """Logits [R, W] of these rows, which the caller may overwrite. W may exceed V."""
        if self.unrounded:
            return torch.mm(self.h[at], self.head.t(), out_dtype=torch.float32)
        return self.h[at].to(self.head.dtype) @ self.head.t()

    def measure(self, logits: Tensor, at: slice, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probs, log-sum-exps, entropies), [R] each; entropies are empty unless `entropy` is True."""
        targets = self.targets[at]
        if logits.is_cuda:
            return kernels.measure(logits, targets, self.V, IGNORE, self.scale, entropy)
        z = logits.to(summed_type(logits.dtype)) * self.scale
        keep = targets != IGNORE
        lse = z.logsumexp(-1)
        logp = (z.gather(1, targets.where(keep, 0)[:, None])[:, 0] - lse).where(keep, 0.0)
        H = torch.special.entr(z.sub_(lse[:, None]).exp_()).sum(-1) if entropy else z.new_empty(0)
        return logp, lse.where(keep, 0.0), H.where(keep, 0.0) if entropy else H

    def gradient(
        self, logits: Tensor, at: slice, found: tuple[Tensor, Tensor], by: tuple[Tensor, Tensor | None]
    ) -> Tensor:
        """The gradient of the logits, in h's type. It may overwrite the logits; see `kernels.gradient`."""
        targets = self.targets[at]
        if logits.is_cuda:
            dtype = self.h.dtype
            return kernels.gradient(logits, targets, self.V, IGNORE, self.scale, found, by, dtype)
        (lse, H), (by_logp, by_entropy) = found, by
        keep = (targets != IGNORE)[:, None]
        z = (logits.to(lse.dtype) * self.scale).sub_(lse[:, None])
        p = z.exp()
        d = p * -by_logp[:, None]
        d.scatter_add_(1, targets.where(keep[:, 0], 0)[:, None], by_logp[:, None])
        if by_entropy is not None:
            d -= by_entropy[:, None] * (p * (z + H[:, None])).masked_fill_(p == 0, 0.0)
        return d.mul_(self.scale).masked_fill_(~keep, 0.0).to(self.h.dtype)


class _Gradients:
    """The gradients by h (h's type) and by the weight (a sum in fp32), accumulated chunk by chunk.

    A gradient that is not needed is None.
    """

    def __init__(self, chunks: _Chunks, needs_h: bool, needs_w: bool) -> None:
        self.chunks, self.needs_w = chunks, needs_w
        self.h = torch.empty_like(chunks.h) if needs_h else None
        self.weight: Tensor | None = None

    def add(self, at: slice, by_logits: Tensor) -> None:
        if self.h is not None:
            self.h[at] = by_logits @ self.chunks.weight
        if self.needs_w:
            self.weight = add_product(self.weight, by_logits.t(), self.chunks.h[at])

    def of_weight(self) -> Tensor | None:
        """The gradient of the weight [V, D], without the rows of padding."""
        if not self.needs_w:
            return None
        if self.weight is None:  # no rows
            weight = self.chunks.weight
            self.weight = weight.new_zeros(weight.shape, dtype=summed_type(weight.dtype))
        return self.weight[: self.chunks.V]


# ---- log-probs, which a backward differentiates later ----


@record_function("loss")  # benchmarks/trace.py distinguishes the loss's products from those of the blocks
def _forward(
    h: Tensor, weight: Tensor, targets: Tensor, temperature: float, entropy: bool, fp32_logits: bool
) -> tuple[Tensor, Tensor, Tensor]:
    chunks = _Chunks(h, weight, targets, temperature, fp32_logits)
    out = _forward_fake(h, weight, targets, temperature, entropy, fp32_logits)
    for at in chunks.slices(gradient=False):
        logp, lse, H = chunks.measure(chunks.logits(at), at, entropy)
        for whole, part in zip(out, (logp, H, lse), strict=True):
            whole[at] = part  # copies nothing if the entropies are empty
    return out


def _forward_fake(
    h: Tensor, weight: Tensor, targets: Tensor, temperature: float, entropy: bool, fp32_logits: bool
) -> tuple[Tensor, Tensor, Tensor]:
    T = h.shape[0]
    logp, H, lse = (h.new_empty(n, dtype=summed_type(h.dtype)) for n in (T, T if entropy else 0, T))
    return logp, H, lse


class LogprobsBackward(NamedTuple):
    """The arguments of the op logprobs_backward: gradients, and the inputs and kept results of `logprobs`."""

    by_logp: Tensor
    by_entropy: Tensor  # empty if the loss has no gradient with respect to the entropy
    h: Tensor
    weight: Tensor
    targets: Tensor
    lse: Tensor
    entropy: Tensor
    temperature: float
    fp32_logits: bool
    needs_h: bool
    needs_w: bool


@record_function("loss")
def _backward(call: LogprobsBackward) -> tuple[Tensor, Tensor]:
    """The gradients by h and weight, in their types."""
    by_logp, by_entropy, h, weight, targets, lse, H, temperature, fp32_logits, needs_h, needs_w = call
    chunks = _Chunks(h, weight, targets, temperature, fp32_logits)
    sums = _Gradients(chunks, needs_h, needs_w)
    by_logp = by_logp.to(lse.dtype).contiguous()
    by_entropy = by_entropy.to(lse.dtype).contiguous()
    with_entropy = len(by_entropy) > 0
    for at in chunks.slices(gradient=True):
        by = by_logp[at], by_entropy[at] if with_entropy else None
        sums.add(at, chunks.gradient(chunks.logits(at), at, (lse[at], H[at]), by))
    by_h, by_weight = sums.h, sums.of_weight()
    none = h.new_empty(0)
    return none if by_h is None else by_h, none if by_weight is None else by_weight.to(weight.dtype)


def _backward_fake(call: LogprobsBackward) -> tuple[Tensor, Tensor]:
    h, weight = call.h, call.weight
    # contiguous, whatever the strides of the weight
    by_weight = weight.new_empty(weight.shape) if call.needs_w else h.new_empty(0)
    return torch.empty_like(h) if call.needs_h else h.new_empty(0), by_weight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    h, weight, targets, ctx.temperature, entropy, ctx.fp32_logits = inputs
    _, H, lse = output
    ctx.mark_non_differentiable(*((lse,) if entropy else (lse, H)))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(h, weight, targets, lse, H)


def _differentiate(
    ctx: Any, by_logp: Tensor | None, by_entropy: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    needs_h, needs_w = ctx.needs_input_grad[:2]
    if (by_logp is None and by_entropy is None) or not (needs_h or needs_w):
        return (None,) * 6
    h, weight, targets, lse, H = ctx.saved_tensors
    by_h, by_weight = torch.ops.tmoe.logprobs_backward(
        torch.zeros_like(lse) if by_logp is None else by_logp,
        lse.new_empty(0) if by_entropy is None else by_entropy,
        h, weight, targets, lse, H, ctx.temperature, ctx.fp32_logits, needs_h, needs_w,
    )  # fmt: skip
    return by_h if needs_h else None, by_weight if needs_w else None, *(None,) * 4


register(
    "logprobs_backward",
    LogprobsBackward,
    results=2,
    cpu=_backward,
    cuda=_backward,
    fake=_backward_fake,
)
register(
    "logprobs",
    "(Tensor h, Tensor weight, Tensor targets, float temperature, bool entropy, bool fp32_logits) "
    "-> (Tensor, Tensor, Tensor)",
    cpu=_forward,
    cuda=_forward,
    fake=_forward_fake,
    save=_save,
    differentiate=_differentiate,
)


# ---- losses of tokens, differentiated at once ----


def _losses(
    f: Callable[..., Tensor],
    logp: Tensor,
    entropies: Sequence[Tensor],
    inputs: Sequence[Tensor],
    keep: Tensor,
) -> Tensor:
    """The losses that f returns for these tokens, 0 at ignored tokens."""
    losses = f(logp, *entropies, *inputs)
    if not isinstance(losses, Tensor) or losses.shape != logp.shape:
        got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else repr(losses)[:80]
        require(False, "f", got, f"a loss for each of its tokens, shape {tuple(logp.shape)}")
    return losses.where(keep, 0.0)


class _TokenLoss(torch.autograd.Function):
    """The loss in eager code; its backward only multiplies by the incoming gradient.

    The gradients are not saved tensors: a backward removes them from ctx, so that the gradient by h is not
    stored twice.
    """

    @staticmethod
    @record_function("loss")
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        targets: Tensor,
        options: tuple[float, bool, bool],
        f: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        temperature, entropy, fp32_logits = options
        needs = ctx.needs_input_grad[:2]
        chunks = _Chunks(h, weight, targets, temperature, fp32_logits)
        sums = _Gradients(chunks, *needs)
        logps, entropies, _ = _forward_fake(h, weight, targets, *options)
        loss = logps.new_zeros(())
        for at in chunks.slices(gradient=any(needs)):
            logits = chunks.logits(at)
            logp, lse, H = chunks.measure(logits, at, entropy)
            logps[at], entropies[at] = logp, H
            keep = chunks.targets[at] != IGNORE
            values = [t.requires_grad_(any(needs)) for t in ((logp, H) if entropy else (logp,))]
            with torch.set_grad_enabled(any(needs)):
                total = _losses(f, values[0], values[1:], [t[at] for t in inputs], keep).sum()
            loss += total.detach()
            if any(needs):
                by = _derivatives(total, values, keep)
                sums.add(at, chunks.gradient(logits, at, (lse, H.detach()), by))
            del logits  # otherwise two chunks would be in memory
        ctx.made = sums.h, sums.of_weight()
        ctx.weight_dtype = weight.dtype
        ctx.owner = find_table(weight)
        ctx.mark_non_differentiable(logps, entropies)
        ctx.set_materialize_grads(False)
        return loss, logps, entropies

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # the logits no longer exist
            raise RuntimeError("the loss has no second derivative: no create_graph")
        if by_loss is None:
            return (None,) * 6
        if ctx.made is None:
            raise RuntimeError("token_loss: was differentiated before; it allows one backward only")
        (by_h, by_weight), ctx.made = ctx.made, None
        if by_h is not None:
            by_h = times(by_h, by_loss, by_h.dtype, in_place=True)
        if by_weight is not None:
            by_weight = to_autograd(ctx.owner, by_weight, by_loss, ctx.weight_dtype)
        return by_h, by_weight, *(None,) * 4


def _derivatives(total: Tensor, values: Sequence[Tensor], keep: Tensor) -> tuple[Tensor, Tensor | None]:
    """The derivatives of f by log-probs and entropies, [R] each. None for entropies that f does not use.

    They are 0 at ignored tokens, because f may have an infinite derivative there.
    """
    gradients = [None] * len(values)
    if total.requires_grad:
        gradients = list(torch.autograd.grad(total, values, allow_unused=True))
    by_logp, by_entropy = (None if g is None else g.where(keep, 0.0) for g in (*gradients, None)[:2])
    return torch.zeros_like(values[0]) if by_logp is None else by_logp, by_entropy
