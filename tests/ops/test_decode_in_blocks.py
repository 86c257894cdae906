"""Attention of one query in flex attention's order: that kernel's arithmetic in torch, bits, chips.

next: tests/ops/test_decoding_kernels.py
"""

import os

import pytest
import torch
from chips import CHIPS, assert_fits, measure
from interpreter import poison, repair_interpreter

from tmoe.ops.decode import in_blocks as module
from tmoe.ops.decode.in_blocks import BLOCK, decode_in_blocks
from tmoe.ops.launch.kernel_launch import compile_only

INTERPRETED = "TRITON_INTERPRET" in os.environ  # read where kernels are defined
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs inside test_decoding_kernels")
compiled = pytest.mark.skipif(INTERPRETED, reason="compiles")
fp32, bf16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module", autouse=INTERPRETED)
def _interpreter():
    repair_interpreter()
    poison()


def pages(lengths, H=4, G=2, C=16, M=3, dtype=fp32):
    """Queries and pages in a random order; NaN wherever no token of a sequence lies."""
    draw = torch.Generator().manual_seed(0)
    B = len(lengths)
    k, v = (torch.full((B * M + 2, BLOCK, G, C), float("nan"), dtype=dtype) for _ in range(2))
    q = torch.randn(B, H, C, generator=draw).to(dtype)
    table = torch.randperm(len(k), generator=draw)[: B * M].view(B, M).int()
    for b, n in enumerate(lengths):
        for m in range(M):
            rows = max(0, min(BLOCK, n - m * BLOCK))
            for t in (k, v):
                t[table[b, m], :rows] = torch.randn(rows, G, C, generator=draw).to(dtype)
            if not rows:
                table[b, m] = -7  # nobody may look there
    return q, k, v, table, torch.tensor(lengths)


def in_flex_order(q, k, v, table, lengths, scale, tokens):
    """Tiles of keys in the order of flex attention's kernel, each step in fp32: the diagonal block first."""
    out = torch.zeros_like(q)
    R = q.shape[1] // k.shape[2]
    for b, n in enumerate(lengths.tolist()):
        full = (n - 1) // BLOCK
        for h in range(q.shape[1] if n else 0):
            top, total, acc = torch.tensor(float("-inf")), torch.tensor(0.0), torch.zeros(q.shape[2])
            for m in [full, *range(full)]:
                for start in range(0, min(BLOCK, n - m * BLOCK), tokens):
                    rows = slice(start, min(start + tokens, n - m * BLOCK))
                    keys, values = (t[table[b, m], rows, h // R].float() for t in (k, v))
                    score = keys @ q[b, h].float() * scale * 1.44269504
                    higher = torch.maximum(top, score.max())
                    p = torch.exp2(score - higher)
                    shrink = torch.exp2(top - higher)
                    total = total * shrink + p.sum()
                    acc = acc * shrink + p.to(q.dtype).float() @ values
                    top = higher
            if n:
                out[b, h] = (acc / total).to(q.dtype)
    return out


LENGTHS = [1, 0, 64, 128, 129, 300, 384]


@pytest.mark.parametrize("run", [decode_in_blocks, pytest.param(module.forward, marks=interpreted)])
@pytest.mark.parametrize("dtype", [fp32, bf16])
def test_it_is_flex_attentions_arithmetic(run, dtype):
    inputs = pages(LENGTHS, dtype=dtype)
    how = dict(scale=0.3)
    tokens = module.tile("cuda:90", 16, inputs[0].element_size()).tokens
    got, want = run(*inputs, **how), in_flex_order(*inputs, 0.3, tokens)
    assert got.dtype == dtype and not got[1].any()
    # sums of 384 in two orders; the interpreter cuts to bf16 where a GPU rounds
    torch.testing.assert_close(got, want, rtol=0, atol=4e-6 if dtype == fp32 else 2**-6)


@interpreted
@pytest.mark.slow
def test_a_row_depends_on_itself_alone():
    """Not on the batch, the width of the table, or the pages' numbers."""
    q, k, v, table, lengths = pages(LENGTHS, H=40)
    whole = module.forward(q, k, v, table, lengths, 0.3)
    for b in (2, 5):
        one = slice(b, b + 1)
        M = -(-int(lengths[b]) // BLOCK)
        moved = torch.arange(M).int()[None]
        k2, v2 = (t[table[b, :M].long()] for t in (k, v))
        assert torch.equal(module.forward(q[one], k2, v2, moved, lengths[one].int(), 0.3), whole[one])


@interpreted
def test_the_diagonal_block_is_added_first():
    """Of 2^30 in the last block and ones before it, fp32 keeps the ones only where they come first."""
    q, k, v, table, lengths = pages([385], H=1, G=1, M=4)
    v.fill_(1.0)
    v[table[0, 3], 0] = 2.0**30
    assert module.forward(torch.zeros_like(q), k, v, table, lengths, 1.0).eq(2.0**30 / 385).all()


def test_tiles_are_flex_attentions():
    """torch's tables are no interface; where they change, so do training's bits."""
    heuristics = pytest.importorskip("torch._inductor.template_heuristics.triton")  # so named from 2.9 on
    found = heuristics.CUDAConfigHeuristic()
    tables = {"cuda:90": found.h100_default_flex_config, "cuda:80": found.a100_default_flex_config}
    for arch, table in tables.items():
        for C in (64, 128):
            assert module.tile(arch, C, 2).tokens == table[bf16, C].block_n
    assert module.tile("cuda:90", 128, 4).tokens == tables["cuda:90"][fp32, 128].block_n


def test_what_does_not_fit_is_named():
    q, k, v, table, lengths = pages([3])
    with pytest.raises(ValueError, match="pages of 64 tokens, valid is 128"):
        decode_in_blocks(q, k[:, :64], v[:, :64], table, lengths, scale=1.0)
    with pytest.raises(ValueError, match="v: got shape"):
        decode_in_blocks(q, k, v[..., :8], table, lengths, scale=1.0)


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("arch", CHIPS)
def test_the_kernel_fits(arch):
    found = []
    with compile_only(arch, lambda name, key, compile: found.append(measure(arch, name, compile))):
        for H, G, C in [(32, 4, 128), (16, 16, 128)]:  # Qwen3, OLMoE
            module.trace(H, G, C, C**-0.5, bf16)
    for binary in found:
        assert_fits(binary, CHIPS[arch])
