"""moe_mlp: a whole layer of SwiGLU experts as one differentiable op, opaque to compilers.

Opaque, not a triton_op: inductor would otherwise re-trace the launches, and it models neither the ragged
tensor descriptors nor the choice of kernels. Output shapes follow from input shapes alone, so nothing here
makes a graph break, needs the host, or keeps a CUDA graph from being captured.
"""

from typing import Any

import torch
from torch import Tensor

from tmoe.activations import ACTIVATIONS
from tmoe.ops.check import check_device, check_moe_mlp, check_tensors, require
from tmoe.ops.experts import cpu, gpu
from tmoe.ops.experts.routing import Metadata
from tmoe.ops.launch.eager import mapped, unwatched
from tmoe.ops.launch.replay import remembered
from tmoe.ops.register import Backward, register_differentiable


def moe_mlp(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    gate_up_bias_E2F: Tensor | None = None,
    activation: str = "swiglu",
    pairs: int | None = None,
) -> Tensor:
    """Each token through its K experts, e = ids[t, k].

        y[t] = sum_k weights[t, k] * down[e] act(gate[e] x[t], up[e] x[t])

    Args:
        x_TD: tokens [T, D]; float32, bfloat16 or float16 (float64 on the CPU). T may be 0 and may change
            without recompilation.
        gate_up_E2FD: [E, 2F, D], gate rows first, then up; dtype of x.
        down_EDF: [E, D, F]; dtype of x.
        weights_TK: routing weights [T, K]; float32 or the dtype of x.
        ids_TK: experts [T, K]; int32 or int64 in 0..E-1, or -1 for a slot that is not here and adds nothing.
            Any routing: empty experts, all tokens on one, an expert twice for one token. On a GPU an id
            outside the range counts as -1 (checking it would stall the stream); on the CPU it raises. The row
            of a token whose slots are all -1 is not read.
        gate_up_bias_E2F: [E, 2F] or None, added to gate and up; dtype of x.
        activation: "swiglu": silu(gate) * up; "clamped": that of gpt-oss, see `tmoe.activations.clamped`.
        pairs: on a GPU, how many (token, expert) pairs to allocate memory for at once; None: all T*K. When
            more are here, as only the device knows, they pass in further rounds of `pairs` whose
            pre-activations are computed again in backward. Any routing stays right, with memory that follows
            `pairs`. (An expert group receives T of each rank's tokens at most, but on average only one share
            of their pairs.)

    Returns y_TD [T, D] in the dtype of x. Products accumulate in float32; a token's experts are added in
    float32 in slot order, so equal inputs give equal bits. (Between two rounds of `pairs` sums are rounded to
    the dtype of x: y's, and those of the matrices' gradients, which in bf16 are off by 0.4% in one round and
    by up to 1% in sixty.)

    Differentiable in all but ids. Between forward and backward it keeps, beyond its inputs, the
    pre-activations H [min(pairs, T*K), 2F] and 8 bytes a routed row of metadata. Raises ValueError for
    shapes, dtypes or devices that do not fit together. Definition: `tmoe.ops.reference.moe_mlp`; scheme of
    what is kept: SonicMoE, Guo et al. 2025.
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


# Compiled graphs on disk hold the shapes that fakes gave, but are not named by them: an older tmoe's graph
# must not be found again.
torch.compiler.config.cache_key_tag += f" tmoe.moe_mlp {Metadata.sections(4000, 300, 2000)}"


def _rows(x: Tensor, ids: Tensor, pairs: int) -> int:
    """Rows of H. The CPU has room for all of them, since pages that are never touched cost nothing."""
    return ids.numel() if x.device.type == "cpu" else pairs


def _forward_cpu(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    activation: str,
    pairs: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, H (empty unless keep) and the packed metadata."""
    check_moe_mlp(x, gate_up, down, weights, ids, bias, activation)
    N = ids.numel()
    E, F2, _ = gate_up.shape
    order, ends = cpu.route(ids, E)
    h = x.new_empty(N, F2)
    y = cpu.moe_mlp_forward(x, cpu.Experts(gate_up, down, bias, activation), weights, order, ends, h)
    meta = Metadata(ids.new_zeros(Metadata.size(N, E), dtype=torch.int32), N, E)
    meta.ends[:] = torch.tensor(ends, dtype=torch.int32)
    meta.order[: order.numel()] = order
    return y, h if keep else h.new_empty(0, F2), meta.packed


def _forward_gpu(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    activation: str,
    pairs: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    check_moe_mlp(x, gate_up, down, weights, ids, bias, activation)
    return remembered(gpu.forward, (x, gate_up, down, weights, ids, bias), activation, pairs, keep)


def _forward_fake(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    activation: str,
    pairs: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    biased = {} if bias is None else {"gate_up_bias": bias}
    check_device(x, gate_up=gate_up, down=down, weights=weights, ids=ids, **biased)
    N = ids.numel()
    E, F2, _ = gate_up.shape
    rows = _rows(x, ids, pairs)
    return x.new_empty(x.shape), x.new_empty(rows if keep else 0, F2), Metadata.fake(N, E, rows, x)


def _backward_cpu(
    dy: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    h: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    activation: str,
    pairs: int,
) -> tuple[Tensor | None, ...]:
    """The gradients of x, gate_up, down, weights and the bias (None without one)."""
    meta = Metadata(packed, weights.numel(), gate_up.shape[0])
    ends = meta.ends.tolist()
    order = meta.order[: ends[-1]].to(torch.int64)
    experts = cpu.Experts(gate_up, down, bias, activation)
    with torch.autocast("cpu", enabled=False):  # which may be on where backward is called
        return cpu.moe_mlp_backward(dy, x, experts, weights, h, order, ends)


def _backward_gpu(*args: Any) -> tuple[Tensor | None, ...]:
    """As _backward_cpu."""
    *tensors, activation, pairs = args
    return remembered(gpu.backward, tensors, activation, pairs)


_Straight = register_differentiable(
    "moe_mlp",
    "(Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor ids, Tensor? bias, str activation, "
    "SymInt pairs, bool keep) -> (Tensor, Tensor, Tensor)",
    returns="y",
    keeps="h packed",
    cpu=_forward_cpu,
    cuda=_forward_gpu,
    fake=_forward_fake,
    backward=Backward(
        "(Tensor dy, Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor h, Tensor packed, "
        "Tensor? bias, str activation, SymInt pairs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        gradients="x gate_up down weights bias",
        cpu=_backward_cpu,
        cuda=_backward_gpu,
    ),
)
