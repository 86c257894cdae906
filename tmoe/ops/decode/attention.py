"""decode_attention: one query a sequence over keys and values in pages, in an order that only the row fixes.

A sequence's keys are split into chunks of CHUNK tokens, counted from its first token. A program handles one
chunk; a second kernel adds the chunks up, from first to last. So the bits of a row do not depend on the
batch, the other rows, the pages of a sequence or the width of the table. A single sequence uses as many
multiprocessors as it has chunks times heads of keys. The only cost of chunks, compared with one long program,
is the fp32 sums between the two kernels: 3% of the bytes of keys and values if 8 heads share a key.

next: tmoe/generate/
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.ops.argument_checks import INTS, check_device, require
from tmoe.ops.experts.pair_order import power_of_2
from tmoe.ops.launch.kernel_launch import cdiv, device_facts, empty, launch
from tmoe.ops.launch.shapes import DecodeShapes
from tmoe.ops.register import register

CHUNK = 512  # tokens
LOG2E = math.log2(math.e)


def decode_attention(
    q_BHC: Tensor,
    k_PTGC: Tensor,
    v_PTGC: Tensor,
    table_BM: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v of each sequence's last token, whose own key is in its pages already.

    Args:
        q_BHC: [B, H, C], contiguous; bfloat16, float16 or float32 (float64 on a CPU). B may be 0.
        k_PTGC: [P, T, G, C], P pages of T tokens; H is a multiple of G, and heads h with equal h // (H / G)
            share a key. T is a power of 2 from 16 on (128 in tmoe). Any strides, but contiguous channels.
        v_PTGC: [P, T, G, channels of a value]. It may be a view of the first channels of k, as with latents.
            On a GPU these channels are then read only once, if their number is a power of 2 and more than
            half of k's channels.
        table_BM: [B, M] int32, rows contiguous: page m of sequence b holds its tokens m T to (m + 1) T - 1.
            Entries for pages after a sequence's length, or before its window, may be any number. Unused
            tokens of pages may have any value, even NaN.
        lengths_B: [B] int32 or int64: tokens of each sequence, including the query's own; 0: the result is 0.
            At most M T: a larger length is an error on a CPU. On a GPU it is reduced to M T, because the host
            does not wait to check it.
        scale: factor of the scores.
        window: number of tokens that the query sees, including itself; None: all.
        sinks_H: a logit for each head that takes part in the softmax and has no value, as in gpt-oss.
        softcap: scores become softcap * tanh(score / softcap).

    Returns o_BHC: [B, H, channels of a value], of q's type. Sums are in fp32 (fp64 for fp64). It is not
    differentiable. On a GPU it launches one kernel, or two if a table is wider than a chunk, and allocates
    B H (M T / CHUNK) sums in fp32. The host does not wait for the GPU, so the op can be captured in a graph.
    Raises ValueError for arguments that do not fit.
    """
    check(q_BHC, k_PTGC, v_PTGC, table_BM, lengths_B)
    H = q_BHC.shape[1]
    if sinks_H is not None:
        require(tuple(sinks_H.shape) == (H,), "sinks", f"shape {tuple(sinks_H.shape)}", f"[H={H}]")
        check_device(q_BHC, sinks=sinks_H)
    if window is not None:
        require(window > 0, "window", window, "a whole number above 0, or None")
    if softcap is not None:
        require(softcap > 0, "softcap", softcap, "above 0, or None")
    how = float(scale), window or 0, sinks_H, float(softcap or 0)
    return torch.ops.tmoe.decode_attention(*Query(q_BHC, k_PTGC, v_PTGC, table_BM, lengths_B, *how))


class Query(NamedTuple):
    """The arguments of the op, as in `decode_attention`; 0 means no window, or no softcap."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor
    scale: float
    window: int
    sinks: Tensor | None
    softcap: float


def check(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> None:
    """Raise ValueError unless queries, pages and their table fit each other."""
    require(q.dim() == 3 and q.is_contiguous(), "q", f"shape {tuple(q.shape)}", "[B, H, C], contiguous")
    types = torch.bfloat16, torch.float16, torch.float32
    fits = q.dtype in types or (q.dtype == torch.float64 and q.device.type == "cpu")
    require(fits, "q", q.dtype, "bfloat16, float16 or float32; float64 on a CPU")
    B, H, C = q.shape
    fits = k.dim() == 4 and k.shape[3] == C and k.stride(3) == 1 and k.shape[2] and H % k.shape[2] == 0
    require(fits, "k", f"shape {tuple(k.shape)}", f"[P, T, G, C={C}], G a divisor of H={H}")
    T = k.shape[1]
    require(T >= 16 and power_of_2(T) == T, "k", f"pages of {T} tokens", "a power of 2 from 16 on")
    fits = v.dim() == 4 and v.shape[:3] == k.shape[:3] and v.stride(3) == 1
    require(fits, "v", f"shape {tuple(v.shape)}", f"{tuple(k.shape[:3])} and channels next to each other")
    for name, t in (("k", k), ("v", v)):
        require(t.dtype == q.dtype, name, t.dtype, f"q's {q.dtype}")
    fits = table.dim() == 2 and table.shape[0] == B and table.stride(1) == 1 and table.shape[1] > 0
    require(fits, "table", f"shape {tuple(table.shape)}", f"[B={B}, M > 0], rows contiguous")
    require(table.dtype == torch.int32, "table", table.dtype, "int32")
    require(tuple(lengths.shape) == (B,), "lengths", f"shape {tuple(lengths.shape)}", f"[B={B}]")
    require(lengths.dtype in INTS, "lengths", lengths.dtype, "int32 or int64")
    check_device(q, k=k, v=v, table=table, lengths=lengths)


# ---- the op in plain PyTorch ----


def plain(query: Query) -> Tensor:
    """The op by its definition, one sequence at a time, so that a row's bits do not depend on other rows."""
    q, k, v, table, lengths, scale, window, sinks, softcap = query
    T, G = k.shape[1:3]
    most = table.shape[1] * T
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[3])
    for b, n in enumerate(lengths.tolist()):
        require(0 <= n <= most, "lengths", n, f"at most M T = {most}")
        if n == 0:
            continue
        first = max(0, n - window) if window else 0
        pages = table[b, first // T : cdiv(n, T)].long()
        seen = slice(first % T, n - first // T * T)
        k_GNC, v_GNC = (t[pages].flatten(0, 1)[seen].transpose(0, 1).to(wide) for t in (k, v))
        scores_GRN = q[b].to(wide).unflatten(0, (G, -1)) @ k_GNC.mT * scale
        if softcap:
            scores_GRN = softcap * (scores_GRN / softcap).tanh()
        if sinks is not None:
            scores_GRN = torch.cat([scores_GRN, sinks.to(wide).view(G, -1, 1)], -1)
        weights_GRN = scores_GRN.softmax(-1)[..., : n - first]
        out[b] = (weights_GRN @ v_GNC).flatten(0, 1)
    return out


def _fake(query: Query) -> Tensor:
    return query.q.new_empty(*query.q.shape[:2], query.v.shape[3])


# ---- kernels ----


@triton.jit
def chunks_of(length, window, CHUNK: tl.constexpr, WINDOW: tl.constexpr):
    """(the first visible token, the chunk that contains it, the number of chunks from that chunk on)."""
    start = 0
    if WINDOW:
        start = tl.maximum(length - window, 0)
    first = start // CHUNK
    return start, first, (length + CHUNK - 1) // CHUNK - first


@triton.jit
def over_total(acc, top, total, sink, SINKS: tl.constexpr):
    """acc / total, with the sink's weight in total; 0 if there are no keys. top, total: [R], acc: [R, C].

    Weights are powers of 2; sink is in the same units as top.
    """
    if SINKS:
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)  # 0 without keys: then top is -inf, and a sink is finite
        total = total * shrink + tl.exp2(sink - higher)
        acc = acc * shrink[:, None]
    return acc / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
def scores_of(
    q1, q2, k_rows, seen, c1, c2, scale, softcap,
    C: tl.constexpr, C2: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(scores of a block of keys, -inf at tokens that are not visible; the keys' first channels)."""
    k1 = tl.load(k_rows + c1[None, :], seen[:, None] & (c1 < C)[None, :], 0.0)
    score = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
    if C2:
        k2 = tl.load(k_rows + c2[None, :], seen[:, None] & (c2 < C)[None, :], 0.0)
        score = tl.dot(q2, tl.trans(k2), score, input_precision=PRECISION)
    if SOFTCAP:  # tanh x = 1 - 2 / (e^2x + 1)
        score = 1 - 2 / (tl.exp2(score * (scale * 2)) + 1)
        score *= softcap
    else:
        score *= scale
    return tl.where(seen[None, :], score, float("-inf")), k1


@triton.jit
def store_rows(
    out, sums, edges, sinks, acc, top, total, to, h, mine,
    CV: tl.constexpr, CVP: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Stores the result in rows `to`, for the heads h, or with SPLIT the sums of this chunk."""
    cv = tl.arange(0, CVP)
    stored = mine[:, None] & (cv < CV)[None, :]
    if SPLIT:
        to = to * tl.num_programs(2) + tl.program_id(2)
        tl.store(sums + to[:, None] * CV + cv[None, :], acc, stored)
        tl.store(edges + to * 2, top, mine)
        tl.store(edges + to * 2 + 1, total, mine)
    else:
        sink = top
        if SINKS:
            sink = tl.load(sinks + h, mine, 0.0).to(tl.float32) * 1.4426950408889634
        result = over_total(acc, top, total, sink, SINKS)
        tl.store(out + to[:, None] * CV + cv[None, :], result.to(out.dtype.element_ty), stored)


@triton.jit(do_not_specialize=["scale", "softcap", "window", "M", "row"])
def decode_kernel(
    q, k, v, table, lengths, sinks, out, sums, edges, scale, softcap, window, M, row,
    k_page, k_token, k_head, v_page, v_token, v_head,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr,
    CV: tl.constexpr, CVP: tl.constexpr,
    ROWS: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr,
    SHARED: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Handles one chunk of one sequence, for up to ROWS of the heads that share its keys.

    Keys have C1 + C2 channels, of which the last are padding; values have CVP. `row`: the table's stride. A
    chunk has PAGES pages. With SPLIT the weighted sum is stored in `sums`, and the highest score and the sum
    of weights in `edges` (scores as exponents of 2). Otherwise the result is stored in `out`.
    """
    R: tl.constexpr = H // G
    BLOCKS: tl.constexpr = (R + ROWS - 1) // ROWS
    CHUNK: tl.constexpr = PAGE * PAGES
    g = tl.program_id(0) // BLOCKS
    b = tl.program_id(1)
    length = tl.minimum(tl.load(lengths + b).to(tl.int32), M * PAGE)
    start, first, _ = chunks_of(length, window, CHUNK, WINDOW)
    chunk = first + tl.program_id(2)
    begin = tl.maximum(chunk * CHUNK, start) // BN * BN
    end = tl.minimum(chunk * CHUNK + CHUNK, length)
    if SPLIT:
        if begin >= end:
            return

    r = tl.program_id(0) % BLOCKS * ROWS + tl.arange(0, ROWS)
    h = g * R + r
    in_group = r < R
    c1 = tl.arange(0, C1)
    q_rows = q + (b.to(tl.int64) * H + h)[:, None] * C
    q1 = tl.load(q_rows + c1[None, :], in_group[:, None] & (c1 < C)[None, :], 0.0)
    c2, q2 = c1, q1
    if C2:
        c2 = C1 + tl.arange(0, C2)
        q2 = tl.load(q_rows + c2[None, :], in_group[:, None] & (c2 < C)[None, :], 0.0)
    cv = tl.arange(0, CVP)
    # all page numbers are read before the loop: a load that depends on another load is not prefetched
    nth = tl.arange(0, PAGES)
    used = ((chunk * PAGES + nth) * PAGE < end) & ((chunk * PAGES + nth + 1) * PAGE > start)
    pages = tl.load(table + b.to(tl.int64) * row + chunk * PAGES + nth, used, 0)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, CVP), tl.float32)
    n = tl.arange(0, BN)
    for at in range(begin, end, BN):
        page = tl.sum(tl.where(nth == at // PAGE - chunk * PAGES, pages, 0)).to(tl.int64)
        token = at % PAGE + n  # pyrefly: ignore
        seen = at + n < end
        if WINDOW:
            seen &= at + n >= start
        k_rows = (k + page * k_page + g * k_head) + token[:, None] * k_token
        score, k1 = scores_of(
            q1, q2, k_rows, seen, c1, c2, scale, softcap, C, C2, SOFTCAP, PRECISION
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(score, 1))  # finite: each block has a visible token
        p = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        acc *= shrink[:, None]
        if SHARED:
            acc = tl.dot(p.to(k1.dtype), k1, acc, input_precision=PRECISION)
        else:
            v_rows = (v + page * v_page + g * v_head) + token[:, None] * v_token
            x = tl.load(v_rows + cv[None, :], seen[:, None] & (cv < CV)[None, :], 0.0)
            acc = tl.dot(p.to(x.dtype), x, acc, input_precision=PRECISION)
        top = higher

    to = b.to(tl.int64) * H + h
    store_rows(out, sums, edges, sinks, acc, top, total, to, h, in_group, CV, CVP, SINKS, SPLIT)


@triton.jit(do_not_specialize=["window", "M", "parts"])
def decode_sum_kernel(
    sums, edges, lengths, sinks, out, window, M, parts,
    CV: tl.constexpr, CVP: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Adds up the chunks of one head of one sequence, from first to last."""
    h = tl.program_id(0)
    b = tl.program_id(1)
    length = tl.minimum(tl.load(lengths + b).to(tl.int32), M * PAGE)
    _, _, count = chunks_of(length, window, CHUNK, WINDOW)
    head = b.to(tl.int64) * tl.num_programs(0) + h
    at = head * parts
    zero = tl.arange(0, 1)
    c = tl.arange(0, CVP)
    top = tl.full((1,), float("-inf"), tl.float32)
    for i in range(0, count):
        top = tl.maximum(top, tl.load(edges + (at + i) * 2 + zero))
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, CVP), tl.float32)
    for i in range(0, count):
        share = tl.exp2(tl.load(edges + (at + i) * 2 + zero) - top)
        total += share * tl.load(edges + (at + i) * 2 + 1 + zero)
        acc += share[:, None] * tl.load(sums + (at + i) * CV + c[None, :], c[None, :] < CV, 0.0)
    sink = top
    if SINKS:
        sink = tl.load(sinks + h + zero).to(tl.float32) * 1.4426950408889634
    result = over_total(acc, top, total, sink, SINKS)
    tl.store(out + head * CV + c[None, :], result.to(out.dtype.element_ty), c[None, :] < CV)


class PageTile(NamedTuple):
    """Sizes of a program. `tokens` alone fixes the order of summation, so it must not depend on the batch."""

    rows: int  # heads that share a key, which are the rows of a product
    tokens: int
    warps: int
    stages: int


def tile(arch: str, R: int, C: int, CV: int, itemsize: int) -> PageTile:
    """The tile for R heads that share keys of C channels and values of CV channels.

    On an H100 three programs of 128 channels fit on a multiprocessor, so its loads in flight are 190 KB. Only
    fp32 latents of 512 channels spill registers, because their queries alone fill the registers.
    """
    hip = arch.startswith("hip")
    wide = max(C, CV) > 256
    rows = 16 if R <= 16 or (wide and hip) else 32 if wide else 64
    tokens = 64 // (1 + wide) // (1 + (itemsize == 4))
    warps = 8 if wide or rows * itemsize > 128 else 4
    return PageTile(rows, tokens, warps, 1 if hip else 3)


def views_alike(k: Tensor, v: Tensor) -> bool:
    """Whether v is a view of the first channels of k, by storages, since meta tensors have no addresses."""
    a, b = ((t.untyped_storage()._cdata, t.storage_offset(), t.stride()) for t in (k, v))
    return a == b


def forward(query: Query) -> Tensor:
    """The op on a GPU."""
    q, k, v, table, lengths, scale, window, sinks, softcap = query
    B, H, C = q.shape
    (_, T, G, CV), M = v.shape, table.shape[1]
    out = empty((B, H, CV), q.dtype, q.device)
    if not B:
        return out
    pages = max(1, CHUNK // T)
    chunk = pages * T
    parts = cdiv(M * T, chunk)
    if window:  # the most chunks that can contain tokens of the window
        parts = min(parts, cdiv(window - 1, chunk) + 1)
    arch = device_facts(q.device)[0] if q.device.type != "cpu" else "cuda:90"  # cpu: triton's interpreter
    rows, tokens, warps, stages = tile(arch, H // G, C, CV, q.element_size())
    tokens = min(tokens, T)
    C1 = max(16, power_of_2(C + 1) // 2)
    C2 = max(16, power_of_2(C - C1)) if C > C1 else 0
    CVP = max(16, power_of_2(CV))
    shared = CV == C1 and views_alike(k, v)
    sums, edges = out, out
    if parts > 1:
        sums = empty((B, H, parts, CV), torch.float32, q.device)
        edges = empty((B, H, parts, 2), torch.float32, q.device)
    to_powers_of_2 = LOG2E / softcap if softcap else LOG2E
    precision = "ieee" if arch.startswith("hip") else "tf32x3"  # fp32: tf32x3 is as exact, on tensor cores
    launch(
        decode_kernel, (G * cdiv(H // G, rows), B, parts), q, k, v, table, lengths,
        out if sinks is None else sinks, out, sums, edges, scale * to_powers_of_2, softcap * LOG2E, window, M,
        table.stride(0), *k.stride()[:3], *v.stride()[:3], H, G, C, C1, C2, CV, CVP, rows, tokens, T, pages,
        shared, window > 0, sinks is not None, softcap > 0, parts > 1, precision, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    if parts > 1:
        launch(
            decode_sum_kernel, (H, B), sums, edges, lengths, out if sinks is None else sinks, out, window, M,
            parts, CV, CVP, T, chunk, window > 0, sinks is not None, num_warps=1 if CVP <= 128 else 4,
        )  # fmt: skip
    return out


def trace(
    H: int,
    G: int,
    C: int,
    CV: int,
    window: int,
    dtype: torch.dtype,
    sinks: bool = False,
    latent: bool | None = None,
) -> None:
    """Launch the kernels on meta tensors, inside compile_only, for tables of one chunk and of more chunks.

    latent: whether values are views of the keys; None: True if their widths differ.
    """
    q, k = (torch.empty(1, *shape, C, dtype=dtype, device="meta") for shape in ((H,), (128, G)))
    latent = C != CV if latent is None else latent
    v = k[..., :CV] if latent else k.new_empty(*k.shape[:3], CV)
    lengths = torch.empty(1, dtype=torch.int32, device="meta")
    for M in (1, 2 * CHUNK // 128):
        table = torch.empty(1, M, dtype=torch.int32, device="meta")
        forward(Query(q, k, v, table, lengths, 1.0, window, q[0, :, 0] if sinks else None, 0.0))


def _of_decoding(step: DecodeShapes) -> Iterable[tuple]:
    if not step.in_blocks:
        for layer in step.layers:
            sizes = layer.queries, layer.keys, layer.key_dim, layer.value_dim
            yield trace, *sizes, layer.window, step.dtype, layer.sinks, layer.latent


register(
    "decode_attention",
    Query,
    cpu=plain,
    cuda=forward,
    fake=_fake,
    traces={DecodeShapes: _of_decoding},
)
