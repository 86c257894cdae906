"""Softmax attention over earlier tokens of the same document: masks, and the fastest kernel for each.

next: moe/layer.py
"""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from tmoe.base.private_torch import find_or_note
from tmoe.ops.decode.in_blocks import tiles_in_order

_PADDED = "values narrower than queries are padded before attention"
no_dispatch = find_or_note("torch.utils._mode_utils.no_dispatch", _PADDED)
no_transforms = find_or_note("torch._C._DisableFuncTorch", _PADDED)
choice = find_or_note("torch._fused_sdp_choice", _PADDED)


class InOrder(NamedTuple):
    """A mask whose blocks are processed in flex attention's order on a CPU."""

    mask: BlockMask


Mask = Tensor | BlockMask | InOrder | None  # the mask argument of `attend`, see make_mask

# Flex attention's kernels. Below 128 tokens torch would use its decoding kernel, which does not compile where
# S * H / G, rounded up to a power of two, is above the mask's 128: KERNEL selects the other kernel. torch
# chooses tiles by queries' width and type alone. `tiles` uses smaller tiles where torch's need more shared
# memory than an H200 has (fp32 144: 280 KB of 227; 16 bits 288: 256; values wider than queries) or an A100
# has (fp32 72 to 127, for which torch uses larger tiles than for 128: 177 of 163).
KERNEL: Any = {"BACKEND": "TRITON"}
SMALL: Any = KERNEL | {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 2}
BACKWARD: Any = {f"bwd_BLOCK_{side}": 32 for side in ("M1", "N1", "M2", "N2")} | {"bwd_num_stages": 1}
SMALLER: Any = KERNEL | {"fwd_BLOCK_M": 16, "fwd_BLOCK_N": 16, "fwd_num_stages": 2}
# Latent attention's heads of 192 and 128 channels in 16 bits on an H200, forward and backward: 1.10 and 3.73
# ms; with torch's tiles 1.37 and 6.43. For heads of 64 and of 128 no tiles that were tried were more than 6%
# faster than torch's.
LATENT: Any = KERNEL | {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_stages": 3, "fwd_num_warps": 8}
LATENT |= {
    "bwd_BLOCK_M1": 64,
    "bwd_BLOCK_N1": 128,
    "bwd_BLOCK_M2": 128,
    "bwd_BLOCK_N2": 64,
    "bwd_num_stages": 2,
    "bwd_num_warps": 8,
}
BLOCK = 128  # tokens per side of a mask's blocks
NARROWEST = 16  # fewest channels of a head that flex attention supports
# How blocks are compiled. Without this option, inductor lengthens strides above 1024 to multiples of 128
# bytes. In torch 2.11, if a graph has a pad, a view may then be read with the longer strides of a buffer that
# was written with the shorter strides, without an error (pytorch issue 194281;
# docs/decisions/020-no-comprehensive-padding.md). On an H200, heads of 8 padded to 16 in fp32 had gradients
# of queries and keys up to 5000 times too large at S=127.
COMPILE: Any = dict(dynamic=False, options={"comprehensive_padding": False})


@functools.cache
def _compiled(fn: Any, *sizes: Any) -> Callable:
    """A compiled copy of fn for each size and mode.

    Dynamo compiles a function for eight kinds of calls. For the ninth it runs the function eager, and flex
    attention then holds all of [B, H, S, S] in fp32. For one size and mode there are at most six kinds: two
    windows, and documents of two types or none.
    """
    copy = FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return torch.compile(copy, **COMPILE)  # at first use: importing the compiler takes two seconds


def fused(fn: Callable, *sizes: Any) -> Callable:
    """fn for flex attention: in eager blocks it is compiled separately, for these sizes and this mode.

    In a compiled block fn itself becomes part of the graph.
    """
    # checked before the mode is read, because torch 2.11's Dynamo cannot trace the reading
    if torch.compiler.is_compiling():
        return fn
    return _compiled(fn, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *sizes)


@torch.compiler.assume_constant_result
def on_hopper() -> bool:
    """Whether the current GPU is an H100, H200 or another GPU of compute capability 9.0."""
    return (
        torch.cuda.is_available() and not torch.version.hip and torch.cuda.get_device_capability() == (9, 0)
    )


@functools.cache
def _cudnn(width: int, values: int, dtype: torch.dtype, *settings: Any) -> bool:
    """The result of `unequal`, cached for each combination of torch's settings that it depends on."""
    if no_dispatch is None or no_transforms is None or choice is None:
        return False
    # Tensors of a tracer or a transform have no memory. torch is asked for the kernel of training, whatever
    # the first call is for.
    with no_dispatch(), no_transforms(), torch.inference_mode(False):
        shapes = [(1, 1, BLOCK, n) for n in (width, width, values)]
        q, k, v = (torch.empty(s, dtype=dtype, device="cuda", requires_grad=True) for s in shapes)
        return choice(q, k, v, is_causal=True) == SDPBackend.CUDNN_ATTENTION.value


@torch.compiler.assume_constant_result
def unequal(width: int, values: int, dtype: torch.dtype) -> bool:
    """Whether torch uses cuDNN's kernels for queries and values of these two widths.

    torch is asked for one head of 128 tokens. (H200, 192 and 128: 2.70 ms, and 4.13 for both of 192.)
    """
    if not torch.cuda.is_available():  # a tracer's tensor on a GPU that does not exist
        return False
    settings = (
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.cuda.current_device(),
    )
    return _cudnn(width, values, dtype, *settings)


def tiles(dtype: torch.dtype, width: int, values: int, hopper: bool) -> Any:
    """Options of flex attention's kernel for heads with these numbers of channels."""
    wide = max(width, values)
    if hopper and dtype.itemsize == 2 and values <= 128 < width < 256:
        return LATENT
    if wide > 256:
        return SMALLER if dtype == torch.float32 else SMALL | BACKWARD
    if dtype == torch.float32 and 64 < width < 128:
        return SMALL
    return SMALL if (dtype == torch.float32 or values > width) and wide > 128 else KERNEL


def make_mask(
    documents_BS: Tensor | None,
    window: int,
    S: int,
    device: torch.device,
    width: int,
    sinks: bool = False,
    queries_Q: Tensor | None = None,
    in_blocks: bool = False,
) -> Mask:
    """The mask argument of `attend` for a layer of this window (0: no window).

    With documents_BS, tokens attend only within their document.
    width: channels of a head's queries or values, whichever are fewer; flex attention supports 16 and more.
    sinks: whether the layer has sinks. On a GPU only flex attention and masked kernels support them (64 heads
        of 64, 4 x 4096 tokens, H200: 7.4 and 28.3 ms forward and backward).
    queries_Q: positions of the queries among the S keys, if there are fewer queries than keys; the mask then
        includes the window. None: all positions.
    in_blocks: use blocks of 128 in flex attention's order even if another kernel is faster, on a CPU too.
    """
    if in_blocks:
        blocks = block_mask(documents_BS, window, S, device, queries_Q)
        return InOrder(blocks) if device.type == "cpu" else blocks
    if device.type == "cpu" or width < NARROWEST:
        if queries_Q is not None:
            return position_mask(documents_BS, window, S, queries_Q)
        return None if documents_BS is None else document_mask(documents_BS)
    plain = documents_BS is None and not 0 < window < S and not sinks and queries_Q is None
    return None if plain else block_mask(documents_BS, window, S, device, queries_Q)


def block_mask(
    documents_BS: Tensor | None,
    window: int,
    S: int,
    device: torch.device,
    queries_Q: Tensor | None = None,
) -> BlockMask:
    """Which blocks of 128 x 128 contain a visible pair.

    queries_Q: as in make_mask; the rows of the mask are then these queries. The number of these blocks
    changes with the documents, but no shape does, so nothing recompiles. On an H200 with S=4096 and C=128 it
    has 73% of the speed of cuDNN's plain causal kernel, and three times that of its masked one.
    FlashAttention 2 with sequences of variable length is equally fast at 16 documents, and three times as
    slow with room for 1024. torch's create_block_mask is not used: it evaluates all S x S pairs, and needs a
    compiler for that. With it gpt-oss's first step finished after 94 s, without it after 46.
    """
    reach = window if 0 < window < S else S
    # positions of the queries, and their documents
    at_Q = torch.arange(S, device=device) if queries_Q is None else queries_Q
    rows = at_Q.shape[0]
    documents_BQ = documents_BS
    if documents_BS is not None and queries_Q is not None:
        documents_BQ = documents_BS[:, queries_Q]

    def visible(b: Tensor, h: Tensor, q: Tensor, j: Tensor) -> Tensor:
        i = q if queries_Q is None else queries_Q[q]
        seen = (i >= j) & (i - j < reach) if reach < S else i >= j
        if documents_BS is None or documents_BQ is None:
            return seen
        return seen & (documents_BQ[b, q] == documents_BS[b, j])

    # Extreme positions of each block of queries and of keys; a block at the end may exceed the sequence.
    first_q, last_q = (edge[0][:, None] for edge in _extremes(at_Q[None]))
    full_q = torch.arange(BLOCK, rows + BLOCK, BLOCK, device=device)[:, None] <= rows
    first_k = torch.arange(0, S, BLOCK, device=device)
    last_k = first_k + BLOCK - 1
    some = (last_q >= first_k) & (first_q - last_k < reach)
    whole = (first_q >= last_k) & (last_q - first_k < reach) & full_q
    some, whole = some[None, None], whole[None, None]
    if documents_BS is not None and documents_BQ is not None:
        low_q, high_q = (edge[:, None, :, None] for edge in _extremes(documents_BQ))
        low_k, high_k = (edge[:, None, None] for edge in _extremes(documents_BS))
        # Two blocks can have a pair of the same document only if their ranges of ids overlap. If ids recur or
        # are not sorted, overlapping ranges do not imply such a pair.
        some = some & (low_q <= high_k) & (low_k <= high_q)
        whole = whole & (low_q == high_k) & (low_k == high_q)
    part = some & ~whole
    kv = (*ordered(part), *ordered(whole))
    q = (*ordered(part.mT), *ordered(whole.mT))
    return BlockMask((rows, S), *kv, *q, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=visible)


def _extremes(documents_BS: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and the highest id of each block, each [B, blocks]."""
    short = -documents_BS.shape[1] % BLOCK
    filled_BS = torch.cat([documents_BS, documents_BS[:, -1:].expand(-1, short)], 1)
    blocks = rearrange(filled_BS, "b (block token) -> b block token", token=BLOCK)
    return blocks.amin(-1), blocks.amax(-1)


def ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The number of marked blocks of each row, and all blocks of a row with the marked blocks first.

    Contiguous, because flex attention's kernels ignore strides: a transposed order gives wrong gradients of
    keys, without an error.
    """
    blocks = blocks.contiguous()
    order = blocks.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)


def document_mask(documents_BS: Tensor) -> Tensor:
    """[B, 1, S, S] bool, True where a query may attend: to itself and earlier tokens of its document."""
    same = documents_BS[:, :, None] == documents_BS[:, None, :]
    return same.tril()[:, None]


def position_mask(documents_BS: Tensor | None, window: int, S: int, queries_Q: Tensor) -> Tensor:
    """[B or 1, 1, Q, S] bool, True where the query at a position may attend; window 0: to all before it."""
    i = queries_Q[:, None]
    j = torch.arange(S, device=queries_Q.device)
    seen = (i >= j) & (i - j < window) if 0 < window < S else i >= j
    seen = seen[None]
    if documents_BS is not None:
        seen = seen & (documents_BS[:, queries_Q, None] == documents_BS[:, None])
    return seen[:, None]


def dense_mask(mask: BlockMask | InOrder, rows: int, keys: int) -> Tensor:
    """[B or 1, 1, rows, keys] bool, True where a query may attend by a mask of blocks."""
    blocks = mask.mask if isinstance(mask, InOrder) else mask
    device = blocks.kv_num_blocks.device
    at_B, at_Q, at_J = (torch.arange(n, device=device) for n in (len(blocks.kv_num_blocks), rows, keys))
    seen = blocks.mask_mod(at_B[:, None, None, None], torch.zeros_like(at_B[:1]), at_Q[:, None], at_J)
    return seen.expand(-1, 1, -1, -1) if seen.ndim == 4 else seen[None, None]


def window_mask(S: int, window: int, device: torch.device) -> Tensor:
    """[S, S] bool, True where a query may attend: to itself or one of the window - 1 tokens before it.

    (Beltagy et al. 2020)
    """
    return torch.ones(S, S, dtype=torch.bool, device=device).tril().triu(1 - window)


def attend(
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    mask: Mask,
    scale: float | None = None,
    window: int = 0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v, causal, [B, S, H, C of v].

    G key/value heads serve H query heads (Ainslie et al. 2023).

    mask: None for plain causal attention, else from document_mask, or from make_mask for this window.
    scale: None: 1/sqrt(C).
    window: see window_mask; 0: none.
    sinks_H: a logit for each query head that is part of every token's softmax and whose value is zero, so
        that a head can attend to nothing (gpt-oss, OpenAI 2025; Xiao et al. 2023).
    """
    S, H, C = q_BSHC.shape[1:]
    if isinstance(mask, InOrder):
        assert sinks_H is None
        q, k, v = (t.transpose(1, 2) for t in (q_BSHC, k_BSGC, v_BSGC))
        return plain_in_blocks(q, k, v, mask.mask, C**-0.5 if scale is None else scale).transpose(1, 2)
    if isinstance(mask, BlockMask):
        return attend_in_blocks(q_BSHC, k_BSGC, v_BSGC, mask, C**-0.5 if scale is None else scale, sinks_H)
    if 0 < window < S:
        near = window_mask(S, window, q_BSHC.device)
        mask = near if mask is None else mask & near
    if sinks_H is not None:
        scale = C**-0.5 if scale is None else scale
        mask = window_mask(S, S, q_BSHC.device) if mask is None else mask
        q_BSHC, k_BSGC, v_BSGC, mask = add_sinks(q_BSHC, k_BSGC, v_BSGC, mask, sinks_H / scale)

    G = k_BSGC.shape[2]
    C = q_BSHC.shape[-1]
    width = v_BSGC.shape[-1]
    gpu = q_BSHC.is_cuda
    if width < C and not (gpu and (mask is not None or (G == H and unequal(C, width, q_BSHC.dtype)))):
        # Latent attention, sinks: flash kernels need values as wide as keys. Any other backend stores the
        # scores [B, H, S, S] (CPU: 2.5 times as slow).
        v_BSGC = add_zeros(v_BSGC, C - width, -1)
    if mask is not None and gpu:
        # with a mask only the unfused backend supports grouped heads: [B, H, S, S]
        k_BSGC, v_BSGC = (t.repeat_interleave(H // G, 2) for t in (k_BSGC, v_BSGC))
    y_BHSC = F.scaled_dot_product_attention(
        q_BSHC.transpose(1, 2),
        k_BSGC.transpose(1, 2),
        v_BSGC.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=k_BSGC.shape[2] != H,
    )
    return y_BHSC.transpose(1, 2)[..., :width]


def attend_in_blocks(
    q_BSHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, mask: BlockMask, scale: float, sinks_H: Tensor | None
) -> Tensor:
    """`attend` through torch's flex attention, which skips blocks without visible pairs.

    (Dong et al. 2024)
    """
    q, k, v = (t.transpose(1, 2) for t in (q_BSHC, k_BSGC, v_BSGC))
    aux = AuxRequest(lse=True) if sinks_H is not None else None
    kernel = tiles(q.dtype, q.shape[-1], v.shape[-1], on_hopper())
    how = dict(scale=scale, enable_gqa=k.shape[1] != q.shape[1], return_aux=aux, kernel_options=kernel)
    sizes = *q.shape, *v.shape, mask.kv_num_blocks.shape[0], q.dtype
    out: Any = fused(flex_attention, *sizes)(q, k, v, block_mask=mask, **how)
    if sinks_H is None:
        y = out
    else:  # exp(lse) / (exp(lse) + exp(sink)): the share of the softmax left for tokens
        y, lse = out[0], out[1].lse
        y = y * (lse - sinks_H[:, None]).sigmoid().unsqueeze(-1).to(y.dtype)
    return y.transpose(1, 2)


def add_sinks(
    q_BSHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, mask: Tensor, sinks_H: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Adds a key whose product with every query of head h is sinks_H[h] and whose value is zero.

    Any kernel then computes sinks. Returns q, k, v and the mask. The H/G query heads of a key head have
    different sinks. Therefore each query and key gets H/G more channels (rounded up to a multiple of 8,
    which fused kernels require). In these channels a query has a one at its head's place and zeros elsewhere,
    the new key has the sinks, and all other keys have zeros.
    """
    B, S, H, C = q_BSHC.shape
    G = k_BSGC.shape[2]
    P = H // G
    more = P + -(C + P) % 8
    place_HP = torch.eye(P, more, dtype=q_BSHC.dtype, device=q_BSHC.device).repeat(G, 1)
    q = torch.cat([q_BSHC, place_HP.expand(B, S, H, more)], -1)
    sink_GC = torch.cat([k_BSGC.new_zeros(G, C), sinks_H.to(k_BSGC.dtype).view(G, P)], -1)
    sink_B1GC = add_zeros(sink_GC, more - P, -1).expand(B, 1, G, C + more)
    k = torch.cat([add_zeros(k_BSGC, more, -1), sink_B1GC], 1)
    v = add_zeros(v_BSGC, 1, 1)
    return q, k, v, torch.cat([mask, mask.new_ones(*mask.shape[:-1], 1)], -1)


def add_zeros(t: Tensor, n: int, dim: int) -> Tensor:
    """t with n more zeros along dim.

    This is not F.pad: the gradient of a pad is a pad by a negative amount, which inductor may compute
    wrongly, without an error, if a norm precedes it (pytorch issue 195582).
    """
    shape = list(t.shape)
    shape[dim] = n
    return torch.cat([t, t.new_zeros(shape)], dim)


def plain_in_blocks(q_BHSC: Tensor, k_BGNC: Tensor, v_BGNC: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """Attention in flex attention's order on a CPU, where torch's kernel processes whole rows: [B, H, S, C].

    The bits of a row depend on its document alone, as in ops/decode/in_blocks.py.
    """
    B, H, S, _ = q_BHSC.shape
    short_q, short_k = -S % BLOCK, -k_BGNC.shape[2] % BLOCK
    q = add_zeros(q_BHSC, short_q, 2)
    k, v = (add_zeros(t, short_k, 2).repeat_interleave(H // t.shape[1], 1) for t in (k_BGNC, v_BGNC))
    (counts, order), (full_counts, full_order) = (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
    )
    assert full_counts is not None and full_order is not None
    zero = torch.zeros((), dtype=torch.int64)
    rows = []
    for b in range(B):
        at = min(b, counts.shape[0] - 1)
        blocks = []
        for m in range(q.shape[2] // BLOCK):
            i = torch.arange(m * BLOCK, (m + 1) * BLOCK)
            tiles: list[tuple[Tensor, Tensor, Tensor | None]] = []
            for n in order[at, 0, m, : counts[at, 0, m]].tolist():
                j = torch.arange(n * BLOCK, (n + 1) * BLOCK)
                inside = (i < S)[:, None] & (j < k_BGNC.shape[2])
                i_in, j_in = i.clamp(max=S - 1)[:, None], j.clamp(max=k_BGNC.shape[2] - 1)
                seen = mask.mask_mod(zero + at, zero, i_in, j_in) & inside
                tiles.append((k[b, :, j], v[b, :, j], seen))
            for n in full_order[at, 0, m, : full_counts[at, 0, m]].tolist():
                keys = slice(n * BLOCK, (n + 1) * BLOCK)
                tiles.append((k[b, :, keys], v[b, :, keys], None))
            blocks.append(tiles_in_order(q[b, :, i], tiles, scale))
        rows.append(torch.cat(blocks, 1)[:, :S])
    return torch.stack(rows)
