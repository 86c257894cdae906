"""moe_mlp: a whole layer of experts as one differentiable op, opaque to compilers.

The op is opaque, not a triton_op: inductor would re-trace the launches of a triton_op, and it models neither
the ragged tensor descriptors nor the choice of kernels. Output shapes depend on input shapes alone, so the op
makes no graph break, does not wait for the host, and can be captured in a CUDA graph.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tmoe.base.activations import ACTIVATIONS
from tmoe.base.activations import activation as named
from tmoe.ops.argument_checks import check_device, check_moe_mlp, check_tensors, require
from tmoe.ops.experts import cpu, fp8_cpu, fp8_gpu, fp8_table, gpu
from tmoe.ops.experts.deferred import DeferredGradients, leave, require_collecting
from tmoe.ops.experts.fp8_codes import KeptH, check_codes
from tmoe.ops.experts.pair_order import Metadata
from tmoe.ops.gradient_sums import GradientSum, Target, sum_of
from tmoe.ops.launch.eager import mapped, unwatched
from tmoe.ops.launch.kernel_launch import cdiv
from tmoe.ops.launch.replay import remembered
from tmoe.ops.launch.shapes import LayerShapes
from tmoe.ops.register import Backward, register_differentiable

NO_CODES = (None, None)


def moe_mlp(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    gate_up_bias_E2F: Tensor | None = None,
    activation: str = "swiglu",
    pairs: int | None = None,
    codes: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Applies to each token its K experts, e = ids[t, k].

        y[t] = sum_k weights[t, k] * down[e] act(gate[e] x[t], up[e] x[t])

    Args:
        x_TD: tokens [T, D]; float32, bfloat16 or float16 (float64 on the CPU). T may be 0 and may change
            without recompilation.
        gate_up_E2FD: [E, 2F, D], gate rows first, then up; dtype of x.
        down_EDF: [E, D, F]; dtype of x.
        weights_TK: routing weights [T, K]; float32 or the dtype of x.
        ids_TK: experts [T, K]; int32 or int64 in 0..E-1, or -1 for a slot without an expert on this rank,
            which adds nothing. Any routing is valid: experts without tokens, all tokens on one expert, an
            expert twice for one token. On a GPU an id outside the range counts as -1 (checking it would stall
            the stream); on the CPU it raises ValueError. The row of a token whose slots are all -1 is not
            read.
        gate_up_bias_E2F: [E, 2F] or None, added to gate and up; dtype of x.
        activation: "swiglu", which is silu(gate) * up, or another activation of tmoe/base/activations.py.
            Some have constants: "clamped:alpha=1.702,limit=7" is that of gpt-oss. For activations without a
            gate ("relu2", "relu", "gelu") gate_up is [E, F, D], its bias [E, F], and H has F columns.
        pairs: on a GPU, the number of (token, expert) pairs for which memory is allocated at a time; None:
            all T*K. If more pairs are routed to this rank, which only the device knows, they are computed in
            further rounds of `pairs`, whose pre-activations are recomputed in backward. So every routing is
            computed correctly, with memory proportional to `pairs`. (An expert group receives at most T of
            each rank's tokens, but on average only one rank's share of their pairs.)
        codes: None, or the codes of gate_up and down (`fp8_codes.encode`, of gate_up with the activation's
            number of halves): the products of the forward, and those of the gradients of x and of the
            activation, are then in fp8. The gradients of the matrices are in fp8 where fp8_configs.json names
            them, and computed as without codes elsewhere. H is kept in fp8. x is float32 or bfloat16.

    Returns y_TD [T, D] in the dtype of x. Products accumulate in float32. A token's experts are added in
    float32 in slot order, so equal inputs give equal bits. (Between two rounds of `pairs` the sums of y and
    of the matrices' gradients are rounded to the dtype of x. In bf16 these gradients have an error of 0.4% in
    one round, and of up to 1% in sixty.)

    Differentiable in all arguments but ids. If neither gate_up nor down needs a gradient, the backward does
    not compute their gradients, which are half of its products. Between forward and backward it keeps, in
    addition to its inputs, the pre-activations H [min(pairs, T*K), 2F] and 8 bytes of metadata for each
    routed row. Raises ValueError for shapes, dtypes or devices that do not fit together. Definition:
    `tmoe.ops.reference.moe_mlp`. The choice of kept tensors is that of SonicMoE, Guo et al. 2025.
    """
    tensors = (x_TD, gate_up_E2FD, down_EDF, weights_TK, ids_TK, gate_up_bias_E2F, *(codes or NO_CODES))
    trained = any(isinstance(t, Tensor) and (t.requires_grad or mapped(t)) for t in tensors[1:3])
    return _run(
        "moe_mlp" if trained or not torch.is_grad_enabled() else "moe_mlp_frozen", tensors, activation, pairs
    )


def moe_mlp_deferred(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    gate_up_bias_E2F: Tensor | None = None,
    activation: str = "swiglu",
    pairs: int | None = None,
    codes: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """moe_mlp with a backward that defers the gradients of gate_up and down (deferred.py).

    The matrices must not need a gradient from autograd. The caller collects the deferred gradients
    (`collecting`), and finds the tensor to which a gradient belongs by its address. Until then dH, the
    weighted activation, copies of x and of y's gradient, and metadata are kept in addition to the matrices:
    N (3F elements + 8 bytes) and 2 T D elements. (Copies are needed because a compiled graph reuses the
    memory of x and of y's gradient.)

    Raises ValueError as moe_mlp does, and for matrices that need a gradient.
    """
    _check_untrained(gate_up_E2FD, down_EDF, "since it is deferred")
    tensors = (x_TD, gate_up_E2FD, down_EDF, weights_TK, ids_TK, gate_up_bias_E2F, *(codes or NO_CODES))
    return _run("moe_mlp_deferred", tensors, activation, pairs)


def moe_mlp_summed(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    gate_up_bias_E2F: Tensor | None = None,
    activation: str = "swiglu",
    pairs: int | None = None,
    codes: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """moe_mlp with a backward that adds the gradients of gate_up and down to their sums (gradient_sums.py).

    The matrices must not need a gradient from autograd, and x must, or there is no backward. Each matrix must
    have an owner of its sum (`offer`), which backward finds by the matrix's address. Into a wider sum the
    products are added unrounded, also those of further rounds of `pairs`.

    Raises ValueError as moe_mlp does, and for matrices that need a gradient; in backward RuntimeError for a
    matrix without a sum.
    """
    _check_untrained(gate_up_E2FD, down_EDF, "since its sum gets it")
    tensors = (x_TD, gate_up_E2FD, down_EDF, weights_TK, ids_TK, gate_up_bias_E2F, *(codes or NO_CODES))
    return _run("moe_mlp_summed", tensors, activation, pairs)


def _check_untrained(gate_up: Tensor, down: Tensor, why: str) -> None:
    """Raises ValueError, which ends with `why`, for a matrix that needs a gradient from autograd."""
    for name, t in (("gate_up", gate_up), ("down", down)):
        if isinstance(t, Tensor) and t.requires_grad:
            require(False, name, "a tensor that needs a gradient", f"one without, {why}")


def _run(name: str, tensors: tuple[Any, ...], activation: str, pairs: int | None) -> Tensor:
    """Checks the arguments of moe_mlp, and calls the op of this name."""
    x, gate_up, down, weights, ids, bias, *_ = tensors
    biased = {} if bias is None else {"gate_up_bias": bias}
    check_tensors(x=x, gate_up=gate_up, down=down, weights=weights, ids=ids, **biased)
    if not isinstance(activation, str):
        require(False, "activation", repr(activation), f"one of {', '.join(ACTIVATIONS)}")
    keep = torch.is_grad_enabled() and any(t is not None and (t.requires_grad or mapped(t)) for t in tensors)
    if pairs is None:
        pairs = ids.numel()
    else:
        if not (isinstance(pairs, (int, torch.SymInt)) and pairs is not True and pairs > 0):
            require(False, "pairs", repr(pairs), "a positive whole number or None")
        pairs = min((pairs + 127) // 128 * 128, ids.numel())  # so that windows are aligned to 16 bytes
    if x.is_cuda and unwatched(*tensors):
        return _STRAIGHT[name].apply(*tensors, activation, pairs, keep)
    return getattr(torch.ops.tmoe, name)(*tensors, activation, pairs, keep)[0]


class MlpCall(NamedTuple):
    """The arguments of the op moe_mlp and of its kinds, which end in _frozen, _deferred and _summed."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    weights: Tensor
    ids: Tensor
    bias: Tensor | None
    up_codes: Tensor | None
    down_codes: Tensor | None
    activation: str
    pairs: int
    keep: bool  # whether to keep H and the metadata for a backward

    @property
    def experts(self) -> cpu.ExpertWeights:
        """The experts' parameters, without codes."""
        return cpu.ExpertWeights(self.gate_up, self.down, self.bias, self.activation)


class MlpBackward(NamedTuple):
    """The arguments of the op moe_mlp_backward and of the backwards of the other kinds."""

    dy: Tensor
    x: Tensor
    gate_up: Tensor
    down: Tensor
    weights: Tensor
    h: Tensor
    packed: Tensor
    bias: Tensor | None
    up_codes: Tensor | None
    down_codes: Tensor | None
    activation: str
    pairs: int

    @property
    def experts(self) -> cpu.ExpertWeights:
        """The experts' parameters, without codes."""
        return cpu.ExpertWeights(self.gate_up, self.down, self.bias, self.activation)


class Coded(Protocol):
    """The arguments of an op that may have codes."""

    @property
    def x(self) -> Tensor: ...
    @property
    def gate_up(self) -> Tensor: ...
    @property
    def down(self) -> Tensor: ...
    @property
    def activation(self) -> str: ...
    @property
    def up_codes(self) -> Tensor | None: ...
    @property
    def down_codes(self) -> Tensor | None: ...


def packed_codes(call: Coded) -> tuple[Tensor, Tensor] | None:
    """The codes of gate_up and down; None if the products are not in fp8."""
    if call.up_codes is None or call.down_codes is None:
        return None
    return call.up_codes, call.down_codes


# Compiled graphs on disk contain the shapes from fake implementations, but their cache keys do not. With the
# tag, a graph of an older tmoe whose metadata or codes of H had another layout is not used.
_SIZES = Metadata.sections(4000, 300, 2000), KeptH.size(4000, (300, 64, 64), "swiglu")
torch.compiler.config.cache_key_tag += f" tmoe.moe_mlp {_SIZES}"


def _rows(x: Tensor, ids: Tensor, pairs: int) -> int:
    """Rows of H. On the CPU they are all rows, since memory pages that are never used cost nothing."""
    return ids.numel() if x.device.type == "cpu" else pairs


def room_for_h(call: Coded, rows: int, keep: bool = True) -> Tensor:
    """A new tensor for H: [rows, 2F] in x's type, or uint8 [`KeptH.size`] with codes; empty unless keep."""
    if call.up_codes is None or not keep:
        return call.x.new_empty(rows if keep else 0, call.gate_up.shape[1])
    size = KeptH.size(rows, tuple(call.down.shape), call.activation)
    return call.x.new_empty(size, dtype=torch.uint8)


def check_arguments(call: Any) -> None:
    """Raises ValueError for arguments that do not fit the contract of moe_mlp.

    call: the arguments of an op that has those of moe_mlp.
    """
    tensors = call.x, call.gate_up, call.down, call.weights, call.ids, call.bias
    check_moe_mlp(*tensors, call.activation)
    if call.up_codes is not None or call.down_codes is not None:
        codes = dict(gate_up=(call.gate_up, call.up_codes), down=(call.down, call.down_codes))
        check_codes(call.x, call.activation, **codes)


def _forward_cpu(call: MlpCall) -> tuple[Tensor, Tensor, Tensor]:
    """y, H (empty unless keep) and the packed metadata."""
    x, weights, ids, gate_up, keep = call.x, call.weights, call.ids, call.gate_up, call.keep
    check_arguments(call)
    N = ids.numel()
    E = len(gate_up)
    order, ends = cpu.route(ids, E)
    h = room_for_h(call, N)
    codes = packed_codes(call)
    if codes is None:
        y = cpu.moe_mlp_forward(x, call.experts, weights, order, ends, h)
    else:
        with torch.autocast("cpu", enabled=False):
            y = fp8_cpu.forward(x, call.experts, codes, weights, order, ends, h)
    meta = Metadata(ids.new_zeros(Metadata.size(N, E), dtype=torch.int32), N, E)
    meta.ends[:] = torch.tensor(ends, dtype=torch.int32)
    meta.order[: order.numel()] = order
    return y, h if keep else room_for_h(call, N, False), meta.packed


def _forward_gpu(call: MlpCall) -> tuple[Tensor, Tensor, Tensor]:
    check_arguments(call)
    how = call.activation, call.pairs, call.keep
    if call.up_codes is None:
        return remembered(gpu.forward, call[:6], *how)
    return remembered(fp8_gpu.forward, call[:8], *how)


def _forward_fake(call: MlpCall) -> tuple[Tensor, Tensor, Tensor]:
    x, gate_up, down, weights, ids, bias, *_, pairs, keep = call
    biased = {} if bias is None else {"gate_up_bias": bias}
    check_device(x, gate_up=gate_up, down=down, weights=weights, ids=ids, **biased)
    rows = _rows(x, ids, pairs)
    h = room_for_h(call, rows, keep)
    return x.new_empty(x.shape), h, Metadata.fake(ids.numel(), len(gate_up), rows, x)


def _backward_cpu(call: MlpBackward) -> tuple[Tensor | None, ...]:
    """The gradients of x, gate_up, down, weights and the bias (None without one)."""
    rows, kept, ends = _of_x_cpu(call)
    dx, d_weights, d_bias = rows
    with torch.autocast("cpu", enabled=False):
        matrices = cpu.gradients_of_matrices(call.gate_up, call.down, *kept, ends=ends)
    return dx, *matrices, d_weights, d_bias


def _backward_gpu(call: MlpBackward) -> tuple[Tensor | None, ...]:
    """The gradients of `_backward_cpu`, on the GPU."""
    how = call.activation, call.pairs
    if call.up_codes is None:
        return remembered(gpu.backward, call[:8], *how)
    return remembered(fp8_gpu.backward, call[:10], *how)


def _backward_summed_cpu(call: MlpBackward) -> tuple[Tensor | None, ...]:
    """The gradients of x, weights and the bias (None without one); sums get those of the matrices."""
    matrices = call.gate_up, call.down
    sums = sum_of(call.gate_up), sum_of(call.down)
    rows, kept, ends = _of_x_cpu(call)
    into = opened(sums, matrices)
    with torch.autocast("cpu", enabled=False):
        grads = cpu.gradients_of_matrices(*matrices, *kept, ends=ends, into=into)
    for total, target, grad in zip(sums, into, grads, strict=True):
        total.close(target, grad)
    return rows


def _backward_summed_gpu(call: MlpBackward) -> tuple[Tensor | None, ...]:
    """The gradients of `_backward_summed_cpu`, on the GPU."""
    sums = sum_of(call.gate_up), sum_of(call.down)
    into = opened(sums, (call.gate_up, call.down))
    totals, how = [target.tensor for target in into], (call.activation, call.pairs, hows(into))
    if call.up_codes is None:
        results = remembered(gpu.backward_into, (*call[:8], *totals), *how)
    else:
        codes = call.up_codes, call.down_codes
        results = remembered(fp8_gpu.backward_into, (*call[:8], *totals, *codes), *how)
    dx, *grads, d_weights, d_bias = results
    for total, target, grad in zip(sums, into, grads, strict=True):
        total.close(target, whichever(target, grad))
    return dx, d_weights, d_bias


def opened(sums: Sequence[GradientSum], matrices: Sequence[Tensor]) -> tuple[Target, Target]:
    """The targets of the gradients of gate_up and down, with their tensors."""
    up, down = (total.open().allocated(matrix) for total, matrix in zip(sums, matrices, strict=True))
    return up, down


def hows(into: Sequence[Target]) -> tuple[str, ...]:
    """`how` of gpu.backward_into: whether the values of each target are added to or overwritten."""
    return tuple("add" if target.add else "write" for target in into)


def whichever(target: Target, grad: Tensor | None) -> Tensor:
    """The target's tensor, or without one the new tensor."""
    found = target.tensor if grad is None else grad
    assert found is not None
    return found


def _of_x_cpu(call: MlpBackward) -> tuple[tuple[Any, ...], tuple[Tensor, ...], list[int]]:
    """The gradients of x, weights and the bias (None without one); the rest for those of the matrices.

    The rest are the tensors of `cpu.gradients_of_matrices` from dy on, and its ends.
    """
    dy, x, weights = call.dy, call.x, call.weights
    meta = Metadata(call.packed, weights.numel(), call.gate_up.shape[0])
    ends = meta.ends.tolist()
    order = meta.order[: ends[-1]].to(torch.int64)
    codes = packed_codes(call)
    with torch.autocast("cpu", enabled=False):  # autocast may be on where backward is called
        if codes is None:
            results = cpu.gradient_of_x(dy, x, call.experts, weights, call.h, order, ends)
        else:
            results = fp8_cpu.gradient_of_x(dy, x, call.experts, codes, weights, call.h, order, ends)
    *rows, dh, act = results
    kept = dy, x, order // max(weights.shape[1], 1), dh, act
    if codes is not None and fp8_table.codes_of_gradients():
        kept = fp8_cpu.operands_of_matrices(*kept, ends)
    return tuple(rows), kept, ends


def _backward_frozen_cpu(call: MlpBackward) -> tuple[Tensor | None, ...]:
    """The gradients of x, weights and the bias (None without one)."""
    return _of_x_cpu(call)[0]


def _backward_frozen_gpu(call: MlpBackward) -> tuple[Tensor | None, ...]:
    """The gradients of `_backward_frozen_cpu`, on the GPU."""
    return _of_x_gpu(call)[:3]


def _of_x_gpu(call: MlpBackward) -> tuple[Any, ...]:
    """The results of gpu.backward_of_x."""
    how = call.activation, call.pairs
    if call.up_codes is None:
        return remembered(gpu.backward_of_x, call[:8], *how)
    return remembered(fp8_gpu.backward_of_x, call[:10], *how)


def _backward_of_x_cpu(call: MlpBackward) -> tuple[Tensor | None, ...]:
    """The gradients of x, weights and the bias (None without one); defers those of the matrices."""
    require_collecting()
    gradients, (dy, x, *rest), ends = _of_x_cpu(call)
    kept = _own(dy), _own(x), *rest
    leave(
        DeferredGradients(call.gate_up.detach(), call.down.detach(), kept, partial(_matrices_cpu, ends=ends))
    )
    return gradients


@torch.no_grad()
def _matrices_cpu(*tensors: Tensor, ends: list[int], into: tuple[Target, Target]) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", enabled=False):
        return cpu.gradients_of_matrices(*tensors, ends=ends, into=into)


def _backward_of_x_gpu(call: MlpBackward) -> tuple[Tensor | None, ...]:
    """The gradients of `_backward_of_x_cpu`, on the GPU."""
    require_collecting()
    dy, x, gate_up, down, weights, _, packed, bias, *_, activation, pairs = call
    *gradients, dh, act = _of_x_gpu(call)
    kept = *map(_own, (dy, x, weights, packed)), dh, act
    bias = None if bias is None else bias.detach()
    work = partial(_matrices_gpu, bias=bias, how=(activation, pairs), codes=packed_codes(call))
    leave(DeferredGradients(gate_up.detach(), down.detach(), kept, work))
    return tuple(gradients)


@torch.no_grad()
def _matrices_gpu(
    *tensors: Tensor,
    bias: Tensor | None,
    how: tuple[str, int],
    codes: tuple[Tensor, Tensor] | None,
    into: tuple[Target, Target],
) -> tuple[Tensor, Tensor]:
    every = (*tensors, bias, *(target.tensor for target in into))
    run = gpu.backward_of_matrices if codes is None else fp8_gpu.backward_of_matrices
    with torch.cuda.device(tensors[0].device):
        grads = remembered(run, (*every, *(codes or ())), *how, hows(into))
    d_gate_up, d_down = map(whichever, into, grads)
    return d_gate_up, d_down


def _own(t: Tensor) -> Tensor:
    """A contiguous copy."""
    return t.detach().clone(memory_format=torch.contiguous_format)


def trace(
    T: int,
    D: int,
    F: int,
    E: int,
    K: int,
    dtype: torch.dtype,
    pairs: int | None = None,
    activation: str = "swiglu",
    biased: bool = False,
    trained: bool = True,
    summed: bool = False,
) -> None:
    """Run moe_mlp's forward (for training and without) and backward on meta tensors, inside compile_only.

    T, D, F, E, K: tokens, width of tokens, width of an expert, number of experts, experts of a token.
    pairs: most (token, expert) pairs of this rank in an expert group; None: no expert group.
    trained: False: only the forward without training.
    summed: also a backward that writes gradients of matrices into fp32 sums, and one that adds to them.
    """
    x = torch.empty(T, D, dtype=dtype, device="meta")
    rows = named(activation).halves * F
    gate_up = torch.empty(E, rows, D, dtype=dtype, device="meta")
    down = torch.empty(E, D, F, dtype=dtype, device="meta")
    bias = torch.empty(E, rows, dtype=dtype, device="meta") if biased else None
    weights = torch.empty(T, K, device="meta")
    ids = torch.empty(T, K, dtype=torch.int32, device="meta")
    how = bias, activation, T * K if pairs is None else pairs
    _, _, packed = gpu.forward(x, gate_up, down, weights, ids, *how, False)
    if trained:
        _, h, packed = gpu.forward(x, gate_up, down, weights, ids, *how, True)
        gpu.backward(x, x, gate_up, down, weights, h, packed, *how)
        for way in ("write", "add") if summed else ():
            up, out = (torch.empty_like(t, dtype=torch.float32) for t in (gate_up, down))
            gpu.backward_into(x, x, gate_up, down, weights, h, packed, bias, up, out, *how[1:], (way, way))
    if pairs is None:
        return
    # in an expert group the sums of symm.py do not write unused rows
    layer = gpu.LayerLaunches(x, down.shape, K, Metadata(packed, T * K, E, pairs), weights, (gate_up, down))
    rows = layer.empty(pairs, D)
    layer.combine(rows, weights, x, add=False, fill=False)
    if trained:
        ds = layer.empty(cdiv(F, layer.config("dh").BN), pairs, dtype=torch.float32)
        layer.combine(rows, None, x, ds, weights, add=False, fill=False)


def _of_layer(layer: LayerShapes) -> Iterable[tuple]:
    how = layer.activation, layer.biased, layer.trained, layer.summed
    for rows, slots, pairs in layer.passes:
        sizes = rows, layer.width, layer.ffn_dim, layer.experts, slots
        yield trace, *sizes, layer.dtype, pairs, *how
        if layer.fp8:
            yield fp8_gpu.trace, sizes, layer.dtype, pairs, how[:3]


_FORWARD: dict[str, Any] = dict(
    schema=MlpCall, returns="y", keeps="h packed", cpu=_forward_cpu, cuda=_forward_gpu, fake=_forward_fake
)

_BACKWARD_OF_X: dict[str, Any] = dict(schema=MlpBackward, gradients="x weights bias")
_Straight = register_differentiable(
    "moe_mlp",
    **_FORWARD,
    backward=Backward(
        MlpBackward,
        gradients="x gate_up down weights bias",
        cpu=_backward_cpu,
        cuda=_backward_gpu,
    ),
    traces={LayerShapes: _of_layer},
)
_STRAIGHT = dict(
    moe_mlp=_Straight,
    moe_mlp_deferred=register_differentiable(
        "moe_mlp_deferred",
        **_FORWARD,
        backward=Backward(**_BACKWARD_OF_X, cpu=_backward_of_x_cpu, cuda=_backward_of_x_gpu),
    ),
    moe_mlp_summed=register_differentiable(
        "moe_mlp_summed",
        **_FORWARD,
        backward=Backward(**_BACKWARD_OF_X, cpu=_backward_summed_cpu, cuda=_backward_summed_gpu),
    ),
    # neither gate_up nor down needs a gradient
    moe_mlp_frozen=register_differentiable(
        "moe_mlp_frozen",
        **_FORWARD,
        backward=Backward(**_BACKWARD_OF_X, cpu=_backward_frozen_cpu, cuda=_backward_frozen_gpu),
    ),
)
