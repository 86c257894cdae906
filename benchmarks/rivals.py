"""The layers that tmoe is compared with, each set up as its users would, with the same inputs, routing, work.

A contestant is a function (gate_up [E, 2F, D], down [E, D, F], K) -> Entry. An Entry's layer computes y [T,
D] from x [T, D] and the router's fp32 logits [T, E] by softmax, top-k (no renormalisation) and the experts.
Weights are stored as the layer's authors store them, so no contestant pays for another's layout. A contestant
that is not installed raises ImportError, which `enter` raises too.

next: shapes.py
"""

from collections.abc import Callable
from importlib import metadata
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tmoe import ops
from tmoe.ops import reference


class Inputs(NamedTuple):
    """The inputs of every contestant."""

    x: Tensor  # [T, D]
    logits: Tensor  # [T, E], fp32
    gate_up: Tensor  # [E, 2F, D]
    down: Tensor  # [E, D, F]
    dy: Tensor  # [T, D]


class Entry(NamedTuple):
    """One contestant's layer, ready to run."""

    layer: Callable[[Tensor, Tensor], Tensor]  # (x, logits) -> y
    weights: list[Tensor]  # the weights whose gradients are computed, besides those of x and the logits
    standard: Callable[..., tuple[Tensor, ...]]  # gradients of weights -> gradients of gate_up and down


Contestant = Callable[[Tensor, Tensor, int], Entry]  # (gate_up, down, K) -> its layer


def top_k(logits: Tensor, K: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Weights [T, K] and ids [T, K], for contestants without their own top-k."""
    weights, ids = logits.softmax(-1).topk(K, dim=-1)
    return weights.to(dtype), ids


def leaf(t: Tensor) -> torch.nn.Parameter:
    """A copy that is a leaf and gets its own gradient."""
    return torch.nn.Parameter(t.detach().clone(memory_format=torch.contiguous_format))


def compiled(contestant: Contestant) -> Contestant:
    """The same contestant with its layer compiled."""

    def make(gate_up: Tensor, down: Tensor, K: int) -> Entry:
        entry = contestant(gate_up, down, K)
        return entry._replace(layer=torch.compile(entry.layer, fullgraph=True, dynamic=False))

    return make


def tmoe(gate_up: Tensor, down: Tensor, K: int) -> Entry:
    gate_up = leaf(gate_up)
    down = leaf(down)

    def layer(x: Tensor, logits: Tensor) -> Tensor:
        return ops.moe_mlp(x, gate_up, down, *ops.softmax_topk(logits, K, False))

    return Entry(layer, [gate_up, down], lambda *grads: grads)


def grouped_mm(gate_up: Tensor, down: Tensor, K: int) -> Entry:
    """PyTorch's own functions: sort, gather, two torch._grouped_mm, gather back, weighted sum."""
    gate_up = leaf(gate_up)
    down = leaf(down)
    E = down.shape[0]

    def layer(x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = top_k(logits, K, x.dtype)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        ends = torch.histc(flat.float(), E, 0, E - 1).cumsum(0).to(torch.int32)
        gate, up = torch._grouped_mm(x[order // K], gate_up.mT, ends).chunk(2, dim=-1)
        out = torch._grouped_mm(F.silu(gate) * up, down.mT, ends)
        rows = torch.empty_like(out).index_copy(0, order, out).view(*ids.shape, -1)
        return (rows * weights[..., None]).sum(1)

    return Entry(layer, [gate_up, down], lambda *grads: grads)


def transformers(gate_up: Tensor, down: Tensor, K: int) -> Entry:
    """The experts of transformers' Qwen3-MoE block, in the implementation that it recommends for training."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    E, D, width = down.shape
    config = Qwen3MoeConfig(hidden_size=D, moe_intermediate_size=width, num_experts=E, num_experts_per_tok=K)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    experts.gate_up_proj = leaf(gate_up)
    experts.down_proj = leaf(down)

    def layer(x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = top_k(logits, K, x.dtype)
        return experts(x, ids, weights)

    return Entry(layer, [experts.gate_up_proj, experts.down_proj], lambda *grads: grads)


def torchtitan(gate_up: Tensor, down: Tensor, K: int) -> Entry:
    """torchtitan's routed experts without expert parallelism, to be compiled like its block."""
    from torchtitan.models.common import token_dispatcher  # pyrefly: ignore[missing-import]
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts  # pyrefly: ignore[missing-import]

    E, D, width = down.shape
    experts = GroupedExperts.Config(dim=D, hidden_dim=width, num_experts=E)
    dispatcher = token_dispatcher.LocalTokenDispatcher.Config(num_experts=E, top_k=K)
    routed = RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher).build()
    inner = routed.inner_experts
    inner.w1_EFD = leaf(gate_up[:, :width])
    inner.w3_EFD = leaf(gate_up[:, width:])
    inner.w2_EDF = leaf(down)

    def layer(x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = top_k(logits[None], K)  # its router's scores are fp32
        counts = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, ids[0], True).sum(0)
        return routed(x[None], weights, ids, counts)[0]

    return Entry(
        layer,
        [inner.w1_EFD, inner.w3_EFD, inner.w2_EDF],
        lambda gate, up, down: (torch.cat([gate, up], 1), down),
    )


def scattermoe(gate_up: Tensor, down: Tensor, K: int) -> Entry:
    from scattermoe.mlp import GLUMLP  # pyrefly: ignore[missing-import]

    E, D, width = down.shape
    with torch.device("meta"):
        mlp = GLUMLP(D, width, E, K)
    mlp.experts.weight = leaf(torch.cat([gate_up[:, width:], gate_up[:, :width]], 1))  # up rows first
    mlp.output_experts.weight = leaf(down)

    def layer(x: Tensor, logits: Tensor) -> Tensor:
        return mlp(x, *top_k(logits, K, x.dtype))

    return Entry(
        layer,
        [mlp.experts.weight, mlp.output_experts.weight],
        lambda up_gate, down: (up_gate.roll(width, 1), down),
    )


def megablocks(gate_up: Tensor, down: Tensor, K: int) -> Entry:
    """MegaBlocks' dropless MLP in the grouped implementation (the sparse one refuses triton >= 3.2)."""
    from megablocks.layers.arguments import Arguments  # pyrefly: ignore[missing-import]
    from megablocks.layers.dmoe import ParallelDroplessMLP  # pyrefly: ignore[missing-import]

    E, D, width = down.shape
    args = Arguments(
        hidden_size=D,
        ffn_hidden_size=width,
        moe_num_experts=E,
        moe_top_k=K,
        mlp_type="glu",
        mlp_impl="grouped",
        activation_fn=F.silu,
        bias=False,
        fp16=False,
        bf16=True,
        device=down.device,
    )
    experts = ParallelDroplessMLP(args)
    gate, up, out = (leaf(w.reshape(E * width, D)) for w in (gate_up[:, :width], gate_up[:, width:], down.mT))
    experts.mlp.w1 = gate
    experts.mlp.v1 = up
    experts.mlp.w2 = out

    def layer(x: Tensor, logits: Tensor) -> Tensor:
        return experts.forward_once(x, *top_k(logits, K, x.dtype))[0]

    def standard(*grads: Tensor) -> tuple[Tensor, ...]:
        gate, up, out = (g.view(E, width, D) for g in grads)
        return torch.cat([gate, up], 1), out.mT

    return Entry(layer, [gate, up, out], standard)


def sonicmoe(gate_up: Tensor, down: Tensor, K: int) -> Entry:
    """SonicMoE's layer after its router's product: `moe_TC_softmax_topk_layer` line for line."""
    from sonicmoe import functional as sonic  # pyrefly: ignore[missing-import]
    from sonicmoe.enums import ActivationType  # pyrefly: ignore[missing-import]

    E, D, width = down.shape
    # rows of gate and up alternate
    w1 = leaf(gate_up.view(E, 2, width, D).transpose(1, 2).reshape(E, 2 * width, D))
    w2 = leaf(down)

    def layer(x: Tensor, logits: Tensor) -> Tensor:
        T = x.shape[0]
        N = T * K
        # softmax, then top-k
        weights, ids = sonic.TC_Softmax_Topk_Router_Function.apply(logits, E, K, False, False)
        empty = {"dtype": torch.int32, "device": x.device}
        count = torch.empty(E, **empty)
        offset = torch.empty(E + 1, **empty)
        gather, scatter, reverse = (torch.empty(N, **empty) for _ in range(3))
        sonic.TC_topk_router_metadata_triton(ids, E, count, offset, gather, scatter, reverse)
        indices = gather, scatter, reverse, None, False
        act, h = sonic._UpProjection.apply(
            x,
            w1.permute(1, 2, 0),
            None,
            offset,
            N,
            K,
            *indices,
            ActivationType.SWIGLU,
            not torch.is_grad_enabled(),
        )
        return sonic._DownProjection.apply(
            act, h, w2.permute(1, 2, 0), None, weights, offset, T, K, *indices, ActivationType.SWIGLU
        )

    def standard(d_w1: Tensor, d_w2: Tensor) -> tuple[Tensor, ...]:
        return d_w1.view(E, width, 2, D).transpose(1, 2).reshape(E, 2 * width, D), d_w2

    return Entry(layer, [w1, w2], standard)


CONTESTANTS: dict[str, tuple[str, Contestant]] = {  # name: (package, the contestant)
    "tmoe": ("tmoe", tmoe),
    "grouped_mm": ("torch", grouped_mm),
    "grouped_mm compiled": ("torch", compiled(grouped_mm)),
    "sonicmoe": ("sonic-moe", sonicmoe),
    "transformers": ("transformers", compiled(transformers)),
    "torchtitan": ("torchtitan", compiled(torchtitan)),
    "scattermoe": ("scattermoe", scattermoe),
    "megablocks": ("megablocks", megablocks),
}


def version(name: str) -> str:
    """The installed version of a contestant's package; "source" if it is not an installed package."""
    try:
        return metadata.version(CONTESTANTS[name][0])
    except metadata.PackageNotFoundError:
        return "source"


def exact(inputs: Inputs, K: int) -> tuple[Tensor, ...]:
    """y and the gradients of x, logits, gate_up and down by the definition: float32 of the rounded inputs."""
    leaves = [t.detach().float().requires_grad_() for t in inputs[:4]]
    x, logits, gate_up, down = leaves
    weights, ids = top_k(logits, K)
    y = reference.moe_mlp(x, gate_up, down, weights, ids)  # tf32 is off unless a program asks for it
    return y.detach(), *torch.autograd.grad(y, leaves, inputs.dy.float())


def enter(
    name: str, inputs: Inputs, K: int, want: tuple[Tensor, ...], limit: float = 2e-2
) -> tuple[Entry, list[float]]:
    """The contestant's Entry, and its relative errors against `want`, the result of `exact`.

    Raises ImportError with the reason if it is not installed, any error of the contestant's code, and
    ArithmeticError
    if an error is above the limit, because its time would then mean nothing.
    """
    x, logits, gate_up, down, dy = inputs
    entry = CONTESTANTS[name][1](gate_up, down, K)
    y = entry.layer(x, logits)
    dx, dlogits, *grads = torch.autograd.grad(y, [x, logits, *entry.weights], dy)
    got = y.detach(), dx, dlogits, *entry.standard(*grads)
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]
    if not max(errors) < limit:  # NaN is not below any limit
        raise ArithmeticError(
            f"relative errors {', '.join(f'{e:.1e}' for e in errors)}, at most {limit} is right"
        )
    return entry, errors
