"""The fp8 kernels of experts without a GPU: in triton's interpreter against the twin, and compiled for sm_90.

The interpreter's test starts this file once in a process with TRITON_INTERPRET=1, which must be set before
the kernels are defined:
    TRITON_INTERPRET=1 python tests/ops/test_fp8_kernels.py

next: test_ops_kernels.py
"""

import os

import forked
import pytest
import torch
from chips import CHIPS, measure
from interpreter import poison, repair_interpreter, rounds_to_nearest, small_tiles
from tiers import slow_but

from tmoe.base.activations import activation as named
from tmoe.ops.experts import fp8_gpu, fp8_table
from tmoe.ops.experts.fp8_codes import encode_gpu
from tmoe.ops.launch.kernel_launch import compile_only

LIMITED = "clamped:alpha=1.702,limit=7.0"
CASTS = "cast_rows_kernel", "encode_kernel"
FORMS = dict(
    plain=fp8_gpu.CONFIGS | {name: cfg._replace(outs=0) for name, cfg in fp8_gpu.WEIGHTS.items()},
    hopper=fp8_gpu.HOPPER | fp8_gpu.WEIGHTS,
)
PRODUCTS = dict(
    plain={"up_fp8_kernel", "dh_fp8_kernel", "rows_fp8_kernel"},
    hopper={"fp8_specialised", "turned_kernel"},
)
# Bytes that epilogues may store and load, with 8 KB of sums in registers; for two consumers in the last one.
SPILLED = dict(up_fp8_kernel=288, dh_fp8_kernel=96, fp8_specialised=1024)


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    ran = forked.run([__file__], env=os.environ | dict(TRITON_INTERPRET="1"))
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert ran.stdout.splitlines()[-1] == "all right"


SHAPES = [
    (2048, 768, "swiglu", False),  # Qwen3-30B-A3B
    (2880, 2880, "clamped:alpha=1.702,limit=7.0", True),  # gpt-oss: 22.5 blocks
    (2048, 1408, "relu2", False),
    (4096, 14336, "geglu", False),
]


def test_one_row_is_multiplied_by_codes(monkeypatch):
    """The kernel of one token in bf16 reads values, which are freed where experts are frozen."""
    found = set()
    x, gate_up, down = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta")
        for shape in ((1, 64), (4, 128, 64), (4, 64, 64))
    )
    weights, ids = torch.empty(1, 2, device="meta"), torch.empty(1, 2, dtype=torch.int32, device="meta")
    monkeypatch.setattr(fp8_table, "forced", FORMS["plain"])
    with compile_only("cuda:90", lambda name, key, compile: found.add(name)):
        codes = encode_gpu(gate_up, 2), encode_gpu(down, 1)
        fp8_gpu.forward(x, gate_up, down, weights, ids, None, *codes, "swiglu", 2, False)
    assert {"up_fp8_kernel", "rows_fp8_kernel"} <= found and not any("token" in name for name in found), found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("D, F, activation, biased", slow_but(SHAPES[:1], SHAPES))
def test_compiled_kernels_fit(D, F, activation, biased, form, monkeypatch):
    found = {}

    def visit(name, key, compile):
        if key not in found and ("fp8" in name or name in (*CASTS, "turned_kernel")):
            found[key] = measure("cuda:90", name, compile)

    monkeypatch.setattr(fp8_table, "forced", FORMS[form])
    with compile_only("cuda:90", visit):
        fp8_gpu.trace((8192, D, F, 16, 4), torch.bfloat16, None, (activation, biased, True))
    names = {binary.name for binary in found.values()}
    assert names - {*CASTS} == PRODUCTS[form] and names > {*CASTS}
    for binary in found.values():
        assert binary.spilled <= SPILLED.get(binary.name, 0) and not binary.serialised, binary
        assert binary.shared <= CHIPS["cuda:90"].shared and binary.registers <= 256, binary


def check_layer(T, D, F, E, K, activation="swiglu", biased=False, pairs=None, gather=True, empty=False):
    """Forward and backward by kernels and by the twin, from the same codes; float32 rows."""
    from tmoe.ops.experts import cpu, fp8_codes, fp8_cpu
    from tmoe.ops.experts.pair_order import Metadata

    for name in ("up", "dh"):
        fp8_gpu.CONFIGS[name] = fp8_gpu.CONFIGS[name]._replace(gather=gather)
    draw = torch.Generator().manual_seed(T)
    x, dy = torch.randn(T, D, generator=draw), torch.randn(T, D, generator=draw) * 1e-3
    x *= torch.randn(T, 1, generator=draw).exp()
    x[1] = 0
    n = named(activation).halves
    gate_up = torch.randn(E, n * F, D, generator=draw) * D**-0.5
    down = torch.randn(E, D, F, generator=draw) * F**-0.5
    bias = torch.randn(E, n * F, generator=draw) if biased else None
    ids = torch.randint(-1, E, (T, K), generator=draw)
    ids = ids.where(ids != 1, 0) if empty else ids
    weights = torch.rand(T, K, generator=draw)
    codes = [fp8_codes._encode_plain(gate_up, n), fp8_codes._encode_plain(down, 1)]
    for plain, matrix, halves in zip(codes, (gate_up, down), (n, 1), strict=True):
        assert torch.equal(fp8_codes.encode_gpu(matrix, halves), plain)
    how = activation, pairs or T * K
    tensors = x, gate_up, down, weights
    y, h, packed = fp8_gpu.forward(*tensors, ids, bias, *codes, *how, True)
    got = y, *fp8_gpu.backward(dy, *tensors, h, packed, bias, *codes, *how)

    order, ends = cpu.route(ids, E)
    experts = cpu.ExpertWeights(gate_up, down, bias, activation)
    h = torch.empty(fp8_codes.KeptH.size(T * K, (E, D, F), activation), dtype=torch.uint8)
    y = fp8_cpu.forward(x, experts, codes, weights, order, ends, h)
    dx, dw, d_bias, dh, act = fp8_cpu.gradient_of_x(dy, x, experts, codes, weights, h, order, ends)
    matrices = cpu.gradients_of_matrices(gate_up, down, dy, x, order // K, dh, act, ends=ends)
    want = y, dx, *matrices, dw, d_bias
    meta = Metadata(packed, T * K, E, how[1])
    assert int(meta.ends[-1]) == len(order)
    for name, ours, theirs in zip("y dx gate_up down weights bias".split(), got, want, strict=True):
        if theirs is None:
            assert ours is None
            continue
        error = float((ours - theirs).norm() / theirs.norm())
        # tiles begin at the first row of a window, so windows round other groups of rows together
        assert ours.isfinite().all() and error < (5e-2 if pairs else 1e-3), (activation, name, error)


def check_special_values():
    """Rows of zeros, 1e-30 and 1e30, and NaN, which stays NaN in its row alone."""
    from tmoe.ops.experts.fp8_codes import coded

    x = torch.randn(6, 192)
    x[1], x[2], x[3] = 0, x[2] * 1e-30, x[3] * 1e30
    x[4, 7] = float("nan")
    codes, scales = torch.empty(6, 192, dtype=torch.float8_e4m3fn), torch.empty(6)
    fp8_gpu.fp8_kernels.cast_rows_kernel[(6,)](x, codes, scales, 192, 256)
    want, want_scales = coded(x, 1, 192)
    assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scales, want_scales[:, 0])
    assert codes.float().isnan().sum() == 1 and codes.float()[4, 7].isnan()


if __name__ == "__main__":
    repair_interpreter()
    rounds_to_nearest()
    poison()
    from tmoe.ops.experts import gpu

    small_tiles(gpu, True, True, 1)
    check_special_values()
    check_layer(140, 192, 160, 3, 2, empty=True)
    check_layer(90, 128, 144, 2, 1, LIMITED, biased=True, gather=False)
    check_layer(140, 128, 128, 3, 2, "relu2", pairs=128)
    print("all right")
