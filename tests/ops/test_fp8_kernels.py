"""The fp8 kernels of experts without a GPU: in triton's interpreter against the twin, and compiled for sm_90.

The interpreter's test starts this file once in a process with TRITON_INTERPRET=1, which must be set before
the kernels are defined:
    TRITON_INTERPRET=1 python tests/ops/test_fp8_kernels.py

next: test_ops_kernels.py
"""

import os
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import torch
from chips import CHIPS, measure
from interpreter import poison, repair_interpreter, rounds_to_nearest, small_tiles
from tiers import slow_but

from tmoe.base.activations import activation as named
from tmoe.ops.experts import fp8_gpu, fp8_table
from tmoe.ops.launch.kernel_launch import compile_only

LIMITED = "clamped:alpha=1.702,limit=7.0"
BAR = 6e-3  # of bf16 results
CASTS = "cast_rows_kernel", "encode_kernel"
PRODUCTS = dict(CONFIGS={"up_fp8_kernel", "dh_fp8_kernel", "rows_fp8_kernel"}, HOPPER={"fp8_specialised"})
# Bytes that epilogues may store and load, with 8 KB of sums in registers; for two consumers in the last one.
SPILLED = dict(up_fp8_kernel=96, dh_fp8_kernel=96, fp8_specialised=700)


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


@pytest.mark.parametrize("form", ["CONFIGS", "HOPPER"])
@pytest.mark.parametrize("D, F, activation, biased", slow_but(SHAPES[:1], SHAPES))
def test_compiled_kernels_fit(D, F, activation, biased, form, monkeypatch):
    found = {}

    def visit(name, key, compile):
        if key not in found and ("fp8" in name or name in CASTS):
            found[key] = measure("cuda:90", name, compile)

    monkeypatch.setattr(fp8_table, "forced", getattr(fp8_gpu, form))
    with compile_only("cuda:90", visit):
        fp8_gpu.trace((8192, D, F, 16, 4), torch.bfloat16, None, (activation, biased, True))
    names = {binary.name for binary in found.values()}
    assert names - {*CASTS} == PRODUCTS[form] and names > {*CASTS}
    for binary in found.values():
        assert binary.spilled <= SPILLED.get(binary.name, 0) and not binary.serialised, binary
        assert binary.shared <= CHIPS["cuda:90"].shared and binary.registers <= 256, binary


def hopper_in_threads():
    """Makes launches of fp8_hopper.py run in threads, for the rest of this process."""
    from gluon_threads import kernel_of, run

    from tmoe.ops.experts import kernels

    folder, in_interpreter = Path(kernels.__file__).parent, fp8_gpu.launch
    files = [folder / f"{name}.py" for name in ("kernels", "fp8_kernels", "hopper", "fp8_hopper")]
    kernel = kernel_of(*files, name="fp8_specialised")

    def launch(which, grid, *args, **options):
        if which is kernel:
            run(kernel, grid, *args)
        else:
            in_interpreter(which, grid, *args, **options)

    fp8_gpu.launch, fp8_gpu.fp8_hopper = launch, SimpleNamespace(fp8_specialised=kernel)
    fp8_gpu.Fp8Launches.own = lambda self, kernel: fp8_table.forced[kernel]
    fp8_gpu.Fp8Launches.weights_config = lambda self, kernel: fp8_table.forced.get(kernel)


def check_layer(
    T, D, F, E, K, activation="swiglu", biased=False, pairs=None, gather=True, empty=False, hopper=None
):
    """Forward and backward by kernels and by the twin, from the same codes.

    hopper: fields of the configurations of fp8_hopper.py, which has bf16 rows; None: fp8_kernels.py, float32.
    """
    from tmoe.ops.experts import cpu, fp8_codes, fp8_cpu
    from tmoe.ops.experts.pair_order import Metadata

    for name in fp8_gpu.CONFIGS:
        forms = fp8_gpu.CONFIGS if hopper is None else fp8_gpu.HOPPER
        fp8_table.forced[name] = forms[name]._replace(gather=gather, **(hopper or {}))
    if hopper and named(activation).gated:
        fp8_table.forced["up"] = fp8_gpu.HOPPER["up"]._replace(gather=gather)
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
    if hopper is not None:
        x, dy, gate_up, down = (t.bfloat16() for t in (x, dy, gate_up, down))
        bias = None if bias is None else bias.bfloat16()
    codes = [fp8_codes._encode_plain(gate_up, n), fp8_codes._encode_plain(down, 1)]
    for plain, matrix, halves in zip(codes, (gate_up, down), (n, 1), strict=True):
        assert torch.equal(fp8_codes.encode_gpu(matrix, halves), plain)
    how = activation, pairs or T * K
    tensors = x, gate_up, down, weights
    y, h, packed = fp8_gpu.forward(*tensors, ids, bias, *codes, *how, True)
    got = y, *fp8_gpu.backward(dy, *tensors, h, packed, bias, *codes, *how)

    order, ends = cpu.route(ids, E)
    experts = cpu.ExpertWeights(gate_up, down, bias, activation)
    h = torch.empty(len(order), n * F, dtype=x.dtype)
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
        error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
        # tiles begin at the first row of a window, so windows round other groups of rows together
        bar = 5e-2 if pairs else 1e-3 if hopper is None else BAR
        assert ours.isfinite().all() and error < bar, (activation, name, error)


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
    hopper_in_threads()
    check_special_values()
    check_layer(140, 192, 160, 3, 2, empty=True)
    check_layer(90, 128, 144, 2, 1, LIMITED, biased=True, gather=False)
    check_layer(140, 128, 128, 3, 2, "relu2", pairs=128)
    check_layer(140, 192, 160, 3, 2, empty=True, hopper=dict(BN=256, stages=4))
    check_layer(
        200, 320, 320, 3, 2, LIMITED, biased=True, gather=False, hopper=dict(BN=256, stages=3, outs=4)
    )
    check_layer(200, 320, 448, 3, 2, "relu2", pairs=128, hopper=dict(BN=128, stages=5, outs=4))
    check_layer(300, 64, 64, 4, 2, "geglu", hopper=dict(BN=128, stages=6))
    print("all right")
