"""The kernels of adapted experts in fp8: in triton's interpreter against the twin, and compiled for sm_90.

The test starts this file in the interpreter:
    TRITON_INTERPRET=1 python tests/ops/test_adapted_fp8_kernels.py

next: test_adapted_fp8.py
"""

import os

import forked
import pytest
import torch
from chips import CHIPS, measure
from interpreter import poison, repair_interpreter, rounds_to_nearest, small_tiles

from tmoe.base.activations import activation as named

KERNELS = {"up_fp8_adapted", "rows_fp8_adapted", "dh_fp8_adapted"}
SPILLED = 160  # bytes a thread that the epilogues of up and dh may store and load


@pytest.mark.slow
def test_in_the_interpreter():
    ran = forked.run([__file__], env=os.environ | dict(TRITON_INTERPRET="1"))
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert ran.stdout.splitlines()[-1] == "all right"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 16, 64])
def test_compiled_kernels_fit(rank):
    from tmoe.ops.experts import adapted_fp8_gpu
    from tmoe.ops.launch.kernel_launch import compile_only

    found = {}

    def visit(name, key, compile):
        if name in KERNELS and key not in found:
            found[key] = measure("cuda:90", name, compile)

    with compile_only("cuda:90", visit):
        adapted_fp8_gpu.trace((4096, 2048, 768, 32, 4), (rank, rank), torch.bfloat16, biased=rank == 16)
    assert {binary.name for binary in found.values()} == KERNELS
    for binary in found.values():
        allowed = 0 if binary.name == "rows_fp8_adapted" else SPILLED
        assert binary.spilled <= allowed and not binary.serialised, binary
        assert binary.shared <= CHIPS["cuda:90"].shared and binary.registers <= 256, binary


def check(T, D, F, ranks, activation="swiglu", biased=False, pairs=None):
    """Forward and backward by kernels and by the twin, from the same codes; float32 rows."""
    from tmoe.ops.experts import adapted_fp8_cpu as twin
    from tmoe.ops.experts import adapted_fp8_gpu, cpu, fp8_codes
    from tmoe.ops.experts.adapted_cpu import AdaptedRows, Adapters, Kept

    E, K, n = 3, 2, named(activation).halves
    draw = torch.Generator().manual_seed(T)

    def new(*shape):
        return torch.randn(*shape, generator=draw) * shape[-1] ** -0.5

    x, dy = new(T, D) * D**0.5, new(T, D)
    gate_up, down, bias = new(E, n * F, D), new(E, D, F), new(E, n * F) if biased else None
    r, q = ranks
    factors = [new(E, r, D), new(E, n * F, r)] if r else [None, None]
    factors += [new(E, q, F), new(E, D, q)] if q else [None, None]
    ids, weights = torch.randint(-1, E, (T, K), generator=draw), torch.rand(T, K, generator=draw)
    codes = fp8_codes._encode_plain(gate_up, n), fp8_codes._encode_plain(down, 1)
    how, scales = (activation, pairs or T * K), (0.5, 2.0)
    call = x, gate_up, down, weights, ids, bias, *factors, *codes, *how
    y, *kept = adapted_fp8_gpu.forward(*call, True, *scales)
    assert torch.equal(adapted_fp8_gpu.forward(*call, False, *scales)[0], y)
    got = (
        y,
        *adapted_fp8_gpu.backward(
            dy, x, gate_up, down, weights, *kept, bias, *factors, *codes, *how, *scales
        ),
    )

    rows, adapters = AdaptedRows(*cpu.route(ids, E)), Adapters(*factors)
    base = twin.Base(cpu.ExpertWeights(gate_up, down, bias, activation), codes)
    h = torch.empty(fp8_codes.KeptH.size(T * K, (E, D, F), activation), dtype=torch.uint8)
    room = Kept(h, *(torch.empty(len(rows.order), rank) for rank in (r, q)))
    y = twin.forward(x, base, adapters, weights, rows, room, scales)
    want = y, *twin.backward(dy, x, base, adapters, weights, rows, room, scales)
    names = "y x weights bias up_a up_b down_a down_b".split()
    for name, ours, theirs in zip(names, got, want, strict=True):
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            error = float((ours - theirs).norm() / theirs.norm())
            # tiles begin at the first row of a window, so windows round other groups of rows together
            assert ours.isfinite().all() and error < (5e-2 if pairs else 1e-3), (
                activation,
                ranks,
                name,
                error,
            )


if __name__ == "__main__":
    repair_interpreter()
    rounds_to_nearest()
    poison()
    from tmoe.ops.experts import gpu

    small_tiles(gpu, True, True, 1)
    check(140, 192, 160, (3, 5))
    check(90, 128, 144, (0, 4), "clamped:alpha=1.702,limit=7.0", biased=True)
    check(90, 128, 128, (20, 0), "relu2")
    check(140, 128, 128, (2, 2), pairs=128)
    print("all right")
