"""decode_in_blocks: one query a sequence over paged keys, in the order and arithmetic of flex attention.

Training uses flex attention. Its program visits blocks of 128 keys: first the blocks that the mask covers
partly, which for a causal mask without a window is the diagonal block, then the full blocks, from first to
last. In this op the rows of a product are the heads that share a key. The products run tile by tile in the
same order, with the same scaling and powers of 2. So a decoded token has the same bits as the same token in
training, if in training its sequence begins at a block's start and the row's length is a multiple of a block.
tmoe/ops/decode/attention.py handles the chunks of a sequence in parallel, so it is faster for few long
sequences, with other bits.

next: tmoe/model/attention_backend.py
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.ops.argument_checks import require
from tmoe.ops.decode.attention import LOG2E, check
from tmoe.ops.experts.pair_order import power_of_2
from tmoe.ops.launch.kernel_launch import cdiv, device_facts, empty, launch
from tmoe.ops.launch.shapes import DecodeShapes
from tmoe.ops.register import register

BLOCK = 128  # tokens of a page, and of a side of a block in flex attention's mask
AHEAD = 16  # pages whose page numbers are read at once


def decode_in_blocks(
    q_BHC: Tensor,
    k_PTGC: Tensor,
    v_PTGC: Tensor,
    table_BM: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
) -> Tensor:
    """softmax(scale * q k^T) v of each sequence's last token, whose own key is in its pages already.

    Arguments and result are as in `decode_attention`, with pages of 128 tokens, and keys and values of equal
    width. Raises ValueError for arguments that do not fit.
    """
    check(q_BHC, k_PTGC, v_PTGC, table_BM, lengths_B)
    require(q_BHC.dtype != torch.float64, "q", q_BHC.dtype, "bfloat16, float16 or float32")
    require(k_PTGC.shape[1] == BLOCK, "k", f"pages of {k_PTGC.shape[1]} tokens", f"{BLOCK}")
    require(v_PTGC.shape == k_PTGC.shape, "v", f"shape {tuple(v_PTGC.shape)}", f"k's {tuple(k_PTGC.shape)}")
    return torch.ops.tmoe.decode_in_blocks(q_BHC, k_PTGC, v_PTGC, table_BM, lengths_B, float(scale))


def tiles_in_order(
    q_HMC: Tensor, tiles: Iterable[tuple[Tensor, Tensor, Tensor | None]], scale: float
) -> Tensor:
    """Attention of M queries over tiles of keys and values [H, N, C], one after the other, in plain torch.

    tiles: (keys, values, mask of visible pairs [M, N]); mask None: all pairs are visible.
    Sums are fp32. Differentiable; the highest score has no gradient, since it does not affect the result.
    """
    H, M, C = q_HMC.shape
    q, wide = q_HMC.float(), dict(dtype=torch.float32, device=q_HMC.device)
    top, total = torch.full((H, M, 1), float("-inf"), **wide), torch.zeros(H, M, 1, **wide)
    acc = torch.zeros(H, M, C, **wide)
    for k_HNC, v_HNC, seen_MN in tiles:
        score = (q @ k_HNC.float().mT) * (scale * LOG2E)
        if seen_MN is not None:
            score = score.masked_fill(~seen_MN, float("-inf"))
        higher = torch.maximum(top, score.detach().amax(-1, keepdim=True))
        base = higher.masked_fill(higher == float("-inf"), 0.0)
        p, shrink = torch.exp2(score - base), torch.exp2(top - base)
        total = total * shrink + p.sum(-1, keepdim=True)
        acc = acc * shrink + p.to(v_HNC.dtype).float() @ v_HNC.float()
        top = higher
    return (acc / total.masked_fill(total == 0, 1.0)).to(q_HMC.dtype)


def _plain(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """The op in plain torch, one sequence at a time. Its query is a row of a block of 128, as in training."""
    H, C = q.shape[1:]
    R = H // k.shape[2]
    out = torch.zeros_like(q)
    for b, n in enumerate(lengths.tolist()):
        if n == 0:
            continue
        require(n <= table.shape[1] * BLOCK, "lengths", n, f"at most M T = {table.shape[1] * BLOCK}")
        last, row = divmod(n - 1, BLOCK)
        tiles: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for m in [last, *range(last)]:
            k_HNC, v_HNC = (t[int(table[b, m])].transpose(0, 1).repeat_interleave(R, 0) for t in (k, v))
            seen = torch.arange(BLOCK) <= row
            if m == last:  # the tokens after the query are not written yet
                k_HNC, v_HNC = (t.masked_fill(~seen[:, None], 0.0) for t in (k_HNC, v_HNC))
            tiles.append((k_HNC, v_HNC, seen.expand(BLOCK, BLOCK) if m == last else None))
        block = q.new_zeros(H, BLOCK, C)
        block[:, row] = q[b]
        out[b] = tiles_in_order(block, tiles, scale)[:, row]
    return out


def _fake(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, scale: float) -> Tensor:
    return torch.empty_like(q)


@triton.jit
def tile_of_keys(
    q, k, v, k_token, v_token, token, seen, cut, acc, total, top,
    C: tl.constexpr, CP: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(acc, total, top) after one more tile, with the same steps as flex attention's forward_block_mn.

    k, v: pointers to the first token of a page.
    seen: tokens that the query sees; other tokens are not read.
    cut: whether the mask covers this block only partly. In such a block of flex attention, a mask separates
        the scaling from the subtraction, so they round twice. In full blocks the compiler fuses both into one
        instruction, and so does this function.
    """
    RCP_LN2: tl.constexpr = 1.44269504  # pyrefly: ignore[bad-assignment]
    c = tl.arange(0, CP)
    mask = seen[:, None] & (c < C)[None, :]
    k_NC = tl.load(k + token[:, None] * k_token + c[None, :], mask, 0.0)
    score = tl.dot(q, tl.trans(k_NC), input_precision=PRECISION) * SCALE
    masked = tl.where(seen[None, :], score * RCP_LN2, float("-inf"))
    higher = tl.maximum(top, tl.max(masked, 1))
    base = tl.where(higher == float("-inf"), 0, higher)
    shrink = tl.math.exp2(top - base)
    power = tl.where(cut, masked - base[:, None], tl.fma(score, RCP_LN2, -base[:, None]))
    p = tl.math.exp2(power)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    v_NC = tl.load(v + token[:, None] * v_token + c[None, :], mask, 0.0)
    acc = tl.dot(p.to(v_NC.dtype), v_NC, acc, input_precision=PRECISION)
    return acc, total, higher


@triton.jit(do_not_specialize=["M", "row"])
def blocks_kernel(
    q, k, v, table, lengths, out, M, row, k_page, k_token, k_head, v_page, v_token, v_head,
    SCALE: tl.constexpr, H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    ROWS: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Handles one sequence, for up to ROWS of the heads that share its keys. `row`: the table's stride."""
    R: tl.constexpr = H // G
    BLOCKS: tl.constexpr = (R + ROWS - 1) // ROWS
    g = tl.program_id(0) // BLOCKS
    b = tl.program_id(1)
    length = tl.minimum(tl.load(lengths + b).to(tl.int32), M * PAGE)
    r = tl.program_id(0) % BLOCKS * ROWS + tl.arange(0, ROWS)
    in_group = r < R
    c = tl.arange(0, CP)
    at = (b.to(tl.int64) * H + g * R + r)[:, None] * C + c[None, :]
    there = in_group[:, None] & (c < C)[None, :]
    q_RC = tl.load(q + at, there, 0.0)
    table += b.to(tl.int64) * row
    k += g * k_head
    v += g * v_head

    top = tl.zeros((ROWS,), tl.float32) - float("inf")
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, CP), tl.float32)
    n = tl.arange(0, BN)
    nth = tl.arange(0, AHEAD)
    diagonal = tl.maximum(length - 1, 0) // PAGE  # the query's block; all blocks before it are full
    blocks = tl.where(length > 0, diagonal + 1, 0)
    for first in range(0, blocks, AHEAD):
        # page numbers are read before the loop: a load that depends on another load is not prefetched
        block = tl.where(first + nth == 0, diagonal, first + nth - 1)
        pages = tl.load(table + block, first + nth < blocks, 0)
        for start in range(0, tl.minimum(blocks - first, AHEAD) * PAGE, BN):
            page = tl.sum(tl.where(nth == start // PAGE, pages, 0)).to(tl.int64)
            token = start % PAGE + n  # pyrefly: ignore
            cut = first == 0 and start < PAGE
            end = tl.where(cut, length - diagonal * PAGE, PAGE)
            acc, total, top = tile_of_keys(
                q_RC, k + page * k_page, v + page * v_page, k_token, v_token, token, token < end,
                cut, acc, total, top, C, CP, SCALE, PRECISION,
            )  # fmt: skip
    total = tl.where(total == 0.0, 1, total)
    acc = acc / total[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), there)


class BlockTile(NamedTuple):
    """Sizes of a program."""

    rows: int  # heads that share a key
    tokens: int  # equal to flex attention's BLOCK_N, because it determines the order of sums
    warps: int
    stages: int


def tile(arch: str, C: int, itemsize: int) -> BlockTile:
    """The tile for keys of C channels.

    tokens: torch's BLOCK_N for flex attention. rows: 16 for each warp, as in flex attention, and enough rows
    that all warps divide the rows of both products, not the columns (on Hopper four warps are one
    instruction; elsewhere this needs as many rows as channels). So a row's sums run over the same threads as
    in flex attention. Heads of 64 channels spill 16 bytes on Hopper.
    """
    hopper = arch == "cuda:90"
    if itemsize == 4:
        tokens = 64 if hopper and C == 128 else 32
    else:
        tokens = 128 if hopper and C == 64 else 32 if hopper and C == 256 else 64
    rows = 128 if arch.startswith("cuda") and not hopper else 64
    return BlockTile(rows, tokens, rows // 16, 1 if arch.startswith("hip") else 3 if hopper else 2)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    cut: BlockTile | None = None,
) -> Tensor:
    """The op on a GPU. cut: sizes of a program; None: those of `tile`."""
    B, H, C = q.shape
    G = k.shape[2]
    out = empty(q.shape, q.dtype, q.device)
    if not B:
        return out
    arch = device_facts(q.device)[0] if q.device.type != "cpu" else "cuda:90"  # cpu: triton's interpreter
    rows, tokens, warps, stages = tile(arch, C, q.element_size()) if cut is None else cut
    CP = max(16, power_of_2(C))
    launch(
        blocks_kernel, (G * cdiv(H // G, rows), B), q, k, v, table, lengths, out, table.shape[1],
        table.stride(0), *k.stride()[:3], *v.stride()[:3], scale, H, G, C, CP, rows, tokens, BLOCK, AHEAD,
        "ieee" if q.element_size() == 4 else "tf32", num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def trace(H: int, G: int, C: int, scale: float, dtype: torch.dtype) -> None:
    """Launch the kernel on meta tensors, inside compile_only."""
    q, k = (torch.empty(1, *shape, C, dtype=dtype, device="meta") for shape in ((H,), (BLOCK, G)))
    table, lengths = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((1, 2), (1,)))
    forward(q, k, torch.empty_like(k), table, lengths, scale)


def _of_decoding(step: DecodeShapes) -> Iterable[tuple]:
    if step.in_blocks:
        for layer in step.layers:
            yield trace, layer.queries, layer.keys, layer.key_dim, layer.scale, step.dtype


register(
    "decode_in_blocks",
    "(Tensor q, Tensor k, Tensor v, Tensor table, Tensor lengths, float scale) -> Tensor",
    cpu=_plain,
    cuda=forward,
    fake=_fake,
    traces={DecodeShapes: _of_decoding},
)
