"""moe_mlp: a whole layer of SwiGLU experts as one differentiable op, forward and backward each one opaque custom op.

Opaque (custom_op, not triton_op): inductor would otherwise re-trace the launches, and it models neither the ragged tensor
descriptors nor the choice of kernels. Output shapes follow from input shapes alone, so nothing here makes a graph break,
needs the host, or keeps a CUDA graph from being captured.
"""

import torch

from tmoe.ops import cpu, gpu
from tmoe.ops.check import check_moe_mlp
from tmoe.ops.routing import Metadata


def moe_mlp(x_TD, gate_up_E2FD, down_EDF, weights_TK, ids_TK):
    """Each token through its K experts: y[t] = sum_k weights[t, k] * down[e] (silu(gate[e] x[t]) * (up[e] x[t])), e = ids[t, k].

    Args:
        x_TD: tokens [T, D]; float32, bfloat16 or float16 (float64 on the CPU). T may be 0 and may change without recompilation.
        gate_up_E2FD: [E, 2F, D], gate rows first, then up; dtype of x.
        down_EDF: [E, D, F]; dtype of x.
        weights_TK: routing weights [T, K]; float32 or the dtype of x.
        ids_TK: experts [T, K]; int32 or int64 in 0..E-1, or -1 for a slot that is not here and adds nothing. Any routing: empty
            experts, all tokens on one, an expert twice for one token. On a GPU an id outside the range counts as -1 (checking it
            would stall the stream); on the CPU it raises.

    Returns:
        y_TD [T, D] in the dtype of x. Products accumulate in float32; a token's experts are added in float32 in slot order,
        so equal inputs give equal bits.

    Differentiable in all but ids. Between forward and backward it keeps, beyond its inputs, the pre-activations H [T*K, 2F] and
    8 bytes a routed row of metadata. Raises ValueError for shapes, dtypes or devices that do not fit together.
    Definition: `tmoe.ops.reference.moe_mlp`; scheme of what is kept: SonicMoE, Guo et al. 2025.
    """
    differentiable = (x_TD, gate_up_E2FD, down_EDF, weights_TK)
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in differentiable)
    return _forward(*differentiable, ids_TK, keep)[0]


@torch.library.custom_op("tmoe::moe_mlp", mutates_args=(), device_types="cpu")
def _forward(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns y, H (empty unless keep) and the packed metadata."""
    check_moe_mlp(x, gate_up, down, weights, ids)
    (T, K), (E, F2, _) = ids.shape, gate_up.shape
    order, ends = cpu.route(ids, E)
    h = x.new_empty(T * K, F2)
    y = cpu.moe_mlp_forward(x, gate_up, down, weights, order, ends, h)
    meta = Metadata(ids.new_zeros(Metadata.size(T * K, E), dtype=torch.int32), T * K, E)
    meta.offsets[1:] = torch.tensor(ends, dtype=torch.int32)
    meta.order[: order.numel()] = order
    return y, h if keep else h.new_empty(0, F2), meta.packed


@_forward.register_kernel("cuda")
def _(x, gate_up, down, weights, ids, keep):
    check_moe_mlp(x, gate_up, down, weights, ids)
    return gpu.forward(x, gate_up, down, weights, ids, keep)


@_forward.register_fake
def _(x, gate_up, down, weights, ids, keep):
    (T, K), (E, F2, _) = ids.shape, gate_up.shape
    return (
        torch.empty_like(x),
        x.new_empty(T * K if keep else 0, F2),
        Metadata.fake(T * K, E, x),
    )


@torch.library.custom_op("tmoe::moe_mlp_backward", mutates_args=(), device_types="cpu")
def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    h: torch.Tensor,
    packed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of x, gate_up, down and weights."""
    meta = Metadata(packed, weights.numel(), gate_up.shape[0])
    ends = meta.offsets[1:].tolist()
    order = meta.order[: ends[-1]].to(torch.int64)
    return cpu.moe_mlp_backward(dy, x, gate_up, down, weights, h, order, ends)


_backward.register_kernel("cuda")(gpu.backward)


@_backward.register_fake
def _(dy, x, gate_up, down, weights, h, packed):
    return tuple(torch.empty_like(t) for t in (x, gate_up, down, weights))


def _save(ctx, inputs, output):
    x, gate_up, down, weights, _, _ = inputs
    _, h, packed = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, gate_up, down, weights, h, packed)


def _differentiate(ctx, dy, *_):
    if dy is None:
        return (None,) * 6
    return *_backward(dy, *ctx.saved_tensors), None, None


_forward.register_autograd(_differentiate, setup_context=_save)
