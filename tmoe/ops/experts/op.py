"""moe_mlp: a whole layer of SwiGLU experts as one differentiable op, forward and backward each one opaque custom op.

Opaque (custom_op, not triton_op): inductor would otherwise re-trace the launches, and it models neither the ragged tensor
descriptors nor the choice of kernels. Output shapes follow from input shapes alone, so nothing here makes a graph break,
needs the host, or keeps a CUDA graph from being captured.
"""

import torch

from tmoe.activations import ACTIVATIONS
from tmoe.ops.check import check_device, check_moe_mlp, check_tensors, require
from tmoe.ops.experts import cpu, gpu
from tmoe.ops.experts.routing import Metadata
from tmoe.ops.launch.eager import mapped, no_second_derivative, unwatched
from tmoe.ops.launch.replay import remembered


def moe_mlp(
    x_TD, gate_up_E2FD, down_EDF, weights_TK, ids_TK, gate_up_bias_E2F=None, activation="swiglu", pairs=None
):
    """Each token through its K experts: y[t] = sum_k weights[t, k] * down[e] act(gate[e] x[t], up[e] x[t]), e = ids[t, k].

    Args:
        x_TD: tokens [T, D]; float32, bfloat16 or float16 (float64 on the CPU). T may be 0 and may change without recompilation.
        gate_up_E2FD: [E, 2F, D], gate rows first, then up; dtype of x.
        down_EDF: [E, D, F]; dtype of x.
        weights_TK: routing weights [T, K]; float32 or the dtype of x.
        ids_TK: experts [T, K]; int32 or int64 in 0..E-1, or -1 for a slot that is not here and adds nothing. Any routing: empty
            experts, all tokens on one, an expert twice for one token. On a GPU an id outside the range counts as -1 (checking it
            would stall the stream); on the CPU it raises. The row of a token whose slots are all -1 is not read.
        gate_up_bias_E2F: [E, 2F] or None, added to gate and up; dtype of x.
        activation: "swiglu": silu(gate) * up; "clamped": that of gpt-oss, see `tmoe.activations.clamped`.
        pairs: on a GPU, how many (token, expert) pairs to allocate memory for at once; None: all T*K. When more are here, as
            only the device knows, they pass in further rounds of `pairs` whose pre-activations are computed again in
            backward: any routing stays right, with memory that follows `pairs` (an expert group receives T of each rank's
            tokens at most, but on average only one share of their pairs).

    Returns:
        y_TD [T, D] in the dtype of x. Products accumulate in float32; a token's experts are added in float32 in slot order,
        so equal inputs give equal bits. (Between two rounds of `pairs` sums are rounded to the dtype of x: y's, and those of the
        matrices' gradients, which in bf16 are off by 0.4% in one round and by up to 1% in sixty.)

    Differentiable in all but ids. Between forward and backward it keeps, beyond its inputs, the pre-activations H
    [min(pairs, T*K), 2F] and 8 bytes a routed row of metadata. Raises ValueError for shapes, dtypes or devices that do not fit
    together. Definition: `tmoe.ops.reference.moe_mlp`; scheme of what is kept: SonicMoE, Guo et al. 2025.
    """
    tensors = (x_TD, gate_up_E2FD, down_EDF, weights_TK, ids_TK, gate_up_bias_E2F)
    biased = {} if gate_up_bias_E2F is None else {"gate_up_bias": gate_up_bias_E2F}
    check_tensors(x=x_TD, gate_up=gate_up_E2FD, down=down_EDF, weights=weights_TK, ids=ids_TK, **biased)
    if not isinstance(activation, str):
        require(False, "activation", repr(activation), " or ".join(map(repr, ACTIVATIONS)))
    keep = torch.is_grad_enabled() and any(t is not None and (t.requires_grad or mapped(t)) for t in tensors)
    if pairs is None:
        pairs = ids_TK.numel()
    else:
        if not (isinstance(pairs, (int, torch.SymInt)) and pairs is not True and pairs > 0):
            require(False, "pairs", repr(pairs), "a positive whole number or None")
        pairs = min((pairs + 127) // 128 * 128, ids_TK.numel())  # windows start on 16 bytes
    if x_TD.is_cuda and unwatched(*tensors):
        return _Straight.apply(*tensors, activation, pairs, keep)
    return torch.ops.tmoe.moe_mlp(*tensors, activation, pairs, keep)[0]


# Library.define instead of @custom_op: the decorator's own checks take 0.3 ms a call on the host, as long as a whole forward.
_lib = torch.library.Library("tmoe", "FRAGMENT")
_lib.define(
    "moe_mlp(Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor ids, Tensor? bias, str activation, SymInt pairs, "
    "bool keep) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_lib.define(
    "moe_mlp_backward(Tensor dy, Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor h, Tensor packed, "
    "Tensor? bias, str activation, SymInt pairs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


# Compiled graphs on disk hold the shapes that fakes gave, but are not named by them: an older tmoe's graph must not be found again.
torch.compiler.config.cache_key_tag += f" tmoe.moe_mlp {Metadata.sections(4000, 300, 2000)}"


def _rows(x, ids, pairs):
    """Rows of H: the CPU has room for all of them, since pages that nobody touches cost nothing."""
    return ids.numel() if x.device.type == "cpu" else pairs


def _forward_cpu(x, gate_up, down, weights, ids, bias, activation, pairs, keep):
    """y, H (empty unless keep) and the packed metadata."""
    check_moe_mlp(x, gate_up, down, weights, ids, bias, activation)
    N, (E, F2, _) = ids.numel(), gate_up.shape
    order, ends = cpu.route(ids, E)
    h = x.new_empty(N, F2)
    y = cpu.moe_mlp_forward(x, gate_up, down, weights, order, ends, bias, activation, h)
    meta = Metadata(ids.new_zeros(Metadata.size(N, E), dtype=torch.int32), N, E)
    meta.ends[:] = torch.tensor(ends, dtype=torch.int32)
    meta.order[: order.numel()] = order
    return y, h if keep else h.new_empty(0, F2), meta.packed


def _forward_gpu(x, gate_up, down, weights, ids, bias, activation, pairs, keep):
    check_moe_mlp(x, gate_up, down, weights, ids, bias, activation)
    with torch.cuda.device(x.device):
        return remembered(gpu.forward, (x, gate_up, down, weights, ids, bias), activation, pairs, keep)


@torch.library.register_fake("tmoe::moe_mlp", lib=_lib)
def _forward_fake(x, gate_up, down, weights, ids, bias, activation, pairs, keep):
    biased = {} if bias is None else {"gate_up_bias": bias}
    check_device(x, gate_up=gate_up, down=down, weights=weights, ids=ids, **biased)
    N, (E, F2, _) = ids.numel(), gate_up.shape
    rows = _rows(x, ids, pairs)
    return x.new_empty(x.shape), x.new_empty(rows if keep else 0, F2), Metadata.fake(N, E, rows, x)


def _backward_cpu(dy, x, gate_up, down, weights, h, packed, bias, activation, pairs):
    """The gradients of x, gate_up, down, weights and the bias (empty without one)."""
    meta = Metadata(packed, weights.numel(), gate_up.shape[0])
    ends = meta.ends.tolist()
    order = meta.order[: ends[-1]].to(torch.int64)
    with torch.autocast("cpu", enabled=False):  # whoever calls backward inside of it
        *grads, d_bias = cpu.moe_mlp_backward(dy, x, gate_up, down, weights, h, order, ends, bias, activation)
    return *grads, x.new_empty(0) if d_bias is None else d_bias


def _backward_gpu(dy, x, gate_up, down, weights, h, packed, bias, activation, pairs):
    with torch.cuda.device(x.device):
        tensors = dy, x, gate_up, down, weights, h, packed, bias
        *grads, d_bias = remembered(gpu.backward, tensors, activation, pairs)
    return *grads, x.new_empty(0) if d_bias is None else d_bias


@torch.library.register_fake("tmoe::moe_mlp_backward", lib=_lib)
def _backward_fake(dy, x, gate_up, down, weights, h, packed, bias, activation, pairs):
    return *(t.new_empty(t.shape) for t in (x, gate_up, down, weights)), x.new_empty(
        0 if bias is None else bias.shape
    )


_lib.impl("moe_mlp", _forward_cpu, "CPU")
_lib.impl("moe_mlp", _forward_gpu, "CUDA")
_lib.impl("moe_mlp_backward", _backward_cpu, "CPU")
_lib.impl("moe_mlp_backward", _backward_gpu, "CUDA")


def _save(ctx, inputs, output):
    x, gate_up, down, weights, _, bias, ctx.activation, ctx.pairs, _ = inputs
    _, h, packed = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, gate_up, down, weights, h, packed, bias)


def _differentiate(ctx, dy, *_):
    if dy is None:
        return (None,) * 9
    check_tensors(dy=dy)
    *saved, bias = ctx.saved_tensors  # once: a checkpoint recomputes for each look
    *grads, d_bias = torch.ops.tmoe.moe_mlp_backward(dy, *saved, bias, ctx.activation, ctx.pairs)
    return *grads, None, d_bias if bias is not None else None, None, None, None


torch.library.register_autograd("tmoe::moe_mlp", _differentiate, setup_context=_save, lib=_lib)
torch.library.register_autograd("tmoe::moe_mlp_backward", no_second_derivative, lib=_lib)


class _Straight(torch.autograd.Function):
    """The op on a GPU, without the dispatcher."""

    @staticmethod
    def forward(ctx, x, gate_up, down, weights, ids, bias, activation, pairs, keep):
        y, h, packed = _forward_gpu(x, gate_up, down, weights, ids, bias, activation, pairs, keep)
        ctx.activation, ctx.pairs = activation, pairs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, gate_up, down, weights, h, packed, bias)
        return y

    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 9
        check_tensors(dy=dy)
        x, gate_up, down, weights, h, packed, bias = ctx.saved_tensors
        # else batched, counted, compiled, or to be differentiated again
        alone = unwatched(dy) and not torch.is_grad_enabled()
        run = _backward_gpu if alone else torch.ops.tmoe.moe_mlp_backward
        *grads, d_bias = run(dy, x, gate_up, down, weights, h, packed, bias, ctx.activation, ctx.pairs)
        return *grads, None, d_bias if bias is not None else None, None, None, None
