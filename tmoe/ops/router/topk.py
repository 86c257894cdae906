"""softmax_topk: a router's choice of experts as one differentiable op that keeps no probabilities.

In eager mode softmax and topk write the probabilities and keep them for backward: 16 MiB and 0.5 ms for a
layer of 64 experts and 32768 tokens. This op recomputes them from the logits in backward.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from tmoe.ops import reference
from tmoe.ops.argument_checks import FLOATS, check_tensors, require
from tmoe.ops.experts.pair_order import power_of_2
from tmoe.ops.launch.eager import unwatched
from tmoe.ops.launch.kernel_launch import cdiv, early, launch
from tmoe.ops.launch.shapes import LayerShapes
from tmoe.ops.register import Backward, register_differentiable


def softmax_topk(logits_TE: Tensor, K: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The K largest of softmax(logits[t]), in decreasing order, and their experts.

    If logits are equal, the lower expert is first (on a GPU; on a CPU the order is torch.topk's). NaN counts
    as largest, and its token's weights are NaN.

    Args:
        logits_TE: [T, E], any float type (fp64 on a CPU only). T may be 0.
        K: 1 <= K <= E.
        renormalize: divide the K weights by their sum, which gives the softmax over the K largest logits.

    Returns weights_TK fp32 (fp64 for fp64 logits), differentiable, and ids_TK int32. Raises ValueError for
    shapes or types that do not fit. Definition: `tmoe.ops.reference.softmax_topk`.
    """
    check_tensors(logits=logits_TE)
    require(logits_TE.dim() == 2, "logits", f"shape {tuple(logits_TE.shape)}", "[T, E]")
    require(
        logits_TE.dtype in (*FLOATS, torch.float64),
        "logits",
        logits_TE.dtype,
        "a floating type of 16 bits or more",
    )
    ok = not (logits_TE.is_cuda and logits_TE.dtype == torch.float64)
    require(ok, "logits", logits_TE.dtype, "at most 32 bits wide on a GPU")
    require(
        type(K) is int and 1 <= K <= logits_TE.shape[1],
        "K",
        repr(K),
        f"a whole number from 1 to E={logits_TE.shape[1]}",
    )
    if type(renormalize) is not bool:
        require(False, "renormalize", repr(renormalize)[:80], "True or False")
    if logits_TE.is_cuda and unwatched(logits_TE):
        return _Straight.apply(logits_TE, K, renormalize)
    return torch.ops.tmoe.softmax_topk(logits_TE, K, renormalize)


def _forward_cpu(logits: Tensor, K: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    weights, ids = reference.softmax_topk(logits, K, renormalize)
    return weights.contiguous(), ids.contiguous()


def _forward_fake(logits: Tensor, K: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    T = logits.shape[0]
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(T, K, dtype=wide), logits.new_empty(T, K, dtype=torch.int32)


def _backward_cpu(dw: Tensor, logits: Tensor, weights: Tensor, ids: Tensor, renormalize: bool) -> Tensor:
    """w_k (dw_k - <w, dw>) at chosen experts; without renormalize all others get -p_e <w, dw>."""
    weighted = weights * dw
    pull = weighted.sum(-1, keepdim=True)
    if renormalize:
        return torch.zeros_like(logits).scatter_(1, ids.long(), (weighted - weights * pull).to(logits.dtype))
    everywhere = logits.to(weights.dtype).softmax(-1) * -pull
    return everywhere.scatter_add_(1, ids.long(), weighted).to(logits.dtype)


@triton.jit(do_not_specialize=["T"])
def topk_kernel(
    logits, weights, ids, T,
    E: tl.constexpr, EP: tl.constexpr, W: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Chooses K experts for each of R tokens, by taking the largest key K times.

    The upper bits of a key are the logit's order-preserving bits; the lower bits are EP - 1 - expert. A row
    is divided into EP / W tiles of W columns. A thread first finds the largest key in its columns of all
    tiles, and then compares with other threads.
    """
    if EARLY:
        gdc_launch_dependents()
    r = tl.program_id(0) * R + tl.arange(0, R)
    lanes = tl.arange(0, W)
    rows = logits + r.to(tl.int64)[:, None] * E
    x = ()
    most = tl.full((R, W), float("-inf"), tl.float32)
    for c in tl.static_range(EP // W):
        e = c * W + lanes
        x = x + (
            tl.load(rows + e[None, :], (r < T)[:, None] & (e < E)[None, :], float("-inf")).to(tl.float32),
        )
        most = tl.maximum(most, x[c])
    most = tl.max(most, 1)
    # The softmax's sum is in whole numbers, so that its order does not matter: R and W depend on T.
    parts = tl.zeros((R, W), tl.int64)
    bad = tl.zeros((R, W), tl.int32)  # the row has NaN or +inf
    keys = ()
    taken = -(1 << 63)  # below every logit, -inf too, so that K different experts are chosen
    for c in tl.static_range(EP // W):
        e = c * W + lanes
        share = tl.exp(x[c] - most[:, None])
        bad |= (share != share).to(tl.int32)
        parts += (tl.where(share == share, share, 0.0) * 1099511627776.0).to(tl.int64)  # 2^40
        # + 0.0 turns -0.0 into 0.0
        bits = tl.where(x[c] == x[c], x[c] + 0.0, float("inf")).to(tl.int32, bitcast=True)
        bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        keys = keys + (tl.where(e[None, :] < E, (bits.to(tl.int64) << 32) | (EP - 1 - e)[None, :], taken),)
    total = tl.sum(parts, 1).to(tl.float32) * 9.094947017729282e-13
    total = tl.where(tl.max(bad, 1) > 0, float("nan"), total)
    k = tl.arange(0, KP)
    chosen = tl.zeros((R, KP), tl.int64)
    of_chosen = tl.zeros((R,), tl.float32)
    for j in tl.static_range(K):
        largest = tl.full((R, W), taken, tl.int64)
        for c in tl.static_range(EP // W):
            largest = tl.maximum(largest, keys[c])
        largest = tl.max(largest, 1)
        chosen = tl.where(k[None, :] == j, largest[:, None], chosen)
        if RENORMALIZE:  # added sequentially: the order of a sum over lanes would depend on R
            bits = (largest >> 32).to(tl.int32)
            value = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
            of_chosen += tl.exp(value - most)
        i = EP - 1 - (largest & 0xFFFFFFFF).to(tl.int32)
        left = ()
        for c in tl.static_range(EP // W):
            left = left + (tl.where((c * W + lanes)[None, :] == i[:, None], taken, keys[c]),)
        keys = left
    bits = (chosen >> 32).to(tl.int32)
    value = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    w = tl.where(k[None, :] < K, tl.exp(value - most[:, None]), 0.0)
    if RENORMALIZE:
        total = tl.where(total == total, of_chosen, total)
    w = w / total[:, None]
    at = r.to(tl.int64)[:, None] * K + k[None, :]
    stored = (r < T)[:, None] & (k < K)[None, :]
    tl.store(weights + at, w, mask=stored)
    tl.store(ids + at, EP - 1 - (chosen & 0xFFFFFFFF).to(tl.int32), mask=stored)


@triton.jit(do_not_specialize=["T"])
def topk_backward_kernel(
    dw, logits, weights, ids, d_logits, T,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """The gradient of `_backward_cpu`. At a chosen expert it is w (dw - <w, dw>) with renormalize or without.

    The gradients of chosen experts are stored separately.
    """
    r = tl.program_id(0) * R + tl.arange(0, R)
    e = tl.arange(0, EP)
    k = tl.arange(0, KP)
    mask_K = (r < T)[:, None] & (k < K)[None, :]
    at = r.to(tl.int64)[:, None] * K + k[None, :]
    w = tl.load(weights + at, mask_K, 0.0)
    g = tl.load(dw + at, mask_K, 0.0)
    i = tl.load(ids + at, mask_K, 0)
    pull = tl.sum(w * g, 1)
    row = r.to(tl.int64)[:, None] * E
    mask = (r < T)[:, None] & (e < E)[None, :]
    is_chosen = tl.zeros((R, EP), tl.int1)
    for j in tl.static_range(K):
        is_chosen |= e[None, :] == tl.load(ids + r.to(tl.int64) * K + j, r < T, 0)[:, None]
    d = tl.zeros((R, EP), tl.float32)
    if not RENORMALIZE:
        x = tl.load(logits + row + e[None, :], mask, float("-inf")).to(tl.float32)
        p = tl.exp(x - tl.max(x, 1)[:, None])
        d = p * (-pull / tl.sum(p, 1))[:, None]
    tl.store(d_logits + row + e[None, :], d.to(d_logits.dtype.element_ty), mask=mask & ~is_chosen)
    tl.store(d_logits + row + i, (w * (g - pull[:, None])).to(d_logits.dtype.element_ty), mask=mask_K)


def rows_a_program(E: int, T: int) -> int:
    """Tokens a program: their logits fill at most 16 registers of each of 128 threads.

    A program handles fewer tokens if there would be fewer than about 128 programs (512 tokens of 128 experts:
    8.3 us became 2.9).
    """
    return max(1, min(2048 // power_of_2(E), power_of_2(T) // 128))


def tile_width(E: int, K: int, R: int) -> int:
    """Columns of a tile.

    32 columns are 8 threads a row, which exchange values 3 times; 32 threads a row exchange 5 times. With few
    rows a tile needs more columns; otherwise several threads would do the same work. The program is unrolled,
    so the number of tiles times K is at most 128 (or K).
    """
    EP = power_of_2(E)
    return min(EP, max(32, 512 // R, EP * power_of_2(K) // 128))


def forward(logits: Tensor, K: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The op on the GPU."""
    logits = logits.contiguous()
    T, E = logits.shape
    weights = logits.new_empty(T, K, dtype=torch.float32)
    ids = logits.new_empty(T, K, dtype=torch.int32)
    R = rows_a_program(E, T)
    if T:
        launch(
            topk_kernel, (cdiv(T, R),), logits, weights, ids, T, E, power_of_2(E), tile_width(E, K, R), K,
            power_of_2(K), R, renormalize,
            bool(early(logits.device)), num_warps=4,
        )  # fmt: skip
    return weights, ids


def backward(dw: Tensor, logits: Tensor, weights: Tensor, ids: Tensor, renormalize: bool) -> Tensor:
    """The op's gradient on the GPU."""
    dw, logits, weights, ids = (t.contiguous() for t in (dw, logits, weights, ids))
    T, E = logits.shape
    d_logits = torch.empty_like(logits)
    R = rows_a_program(E, T)
    if T:
        launch(
            topk_backward_kernel, (cdiv(T, R),), dw, logits, weights, ids, d_logits, T, E, power_of_2(E),
            ids.shape[1], power_of_2(ids.shape[1]), R, renormalize, num_warps=4,
        )  # fmt: skip
    return d_logits


def trace(T: int, E: int, K: int, renormalize: bool) -> None:
    """Run softmax_topk forward and backward on meta tensors, inside compile_only."""
    logits = torch.empty(T, E, device="meta")
    weights, ids = forward(logits, K, renormalize)
    backward(weights, logits, weights, ids, renormalize)


def _of_layer(layer: LayerShapes) -> Iterable[tuple]:
    outputs, chosen, renormalize, _ = layer.router
    yield trace, layer.tokens, outputs, chosen, renormalize


_Straight = register_differentiable(
    "softmax_topk",
    "(Tensor logits, int K, bool renormalize) -> (Tensor, Tensor)",
    returns="weights ids",
    cpu=_forward_cpu,
    cuda=forward,
    fake=_forward_fake,
    backward=Backward(
        "(Tensor dw, Tensor logits, Tensor weights, Tensor ids, bool renormalize) -> Tensor",
        gradients="logits",
        cpu=_backward_cpu,
        cuda=backward,
    ),
    traces={LayerShapes: _of_layer},
)
