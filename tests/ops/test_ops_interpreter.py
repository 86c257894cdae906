"""The Triton kernels themselves, run by triton's CPU interpreter: values against fp64, buffers, metadata.

Buffers are poisoned before. The test starts this file once in a process with TRITON_INTERPRET=1, which
must be set before the kernels are defined:
    TRITON_INTERPRET=1 python tests/ops/test_ops_interpreter.py
The kernels of kernels.py are interpreted with and without tensor descriptors; those of hopper.py (Gluon)
have no interpreter.

next: test_ops_kernels.py
"""

import os
from pathlib import Path

import forked
import pytest
import torch
from interpreter import poison, repair_interpreter, small_tiles

from tmoe.base.activations import activation as named

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    ran = forked.run([__file__], env=os.environ | dict(TRITON_INTERPRET="1"))
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert ran.stdout.splitlines()[-1] == "all right"


FEW_SLOTS = [  # tokens, experts, K, the smallest id: of one launch
    (700, 16, 4, 0),
    (513, 33, 8, -3),
    (300, 8, 2, 5),
    (97, 64, 6, -64),
    (1, 1, 1, 0),
    (0, 4, 2, 0),
]
# Three launches sort blocks of 512 slots: here three blocks, more blocks than experts, one block or none.
MANY_SLOTS = [(129, 33, 8, -3), (515, 2, 2, 0), (300, 8, 2, 5), (97, 64, 6, -64), (1, 1, 1, 0), (0, 4, 2, 0)]


def check_metadata(routing, cases):
    for T, E, K, low in cases:
        ids = torch.randint(low, E, (T, K))
        # what is allocated holds the largest integers, no zeros by luck
        torch.use_deterministic_algorithms(True)
        flat = ids.flatten()
        ids = torch.where(ids == low, E + 7, ids) if low < 0 else ids  # absent in either way
        meta = routing.route(ids, E)
        pairs = routing.route(ids, E, 128)
        sorted_already = routing.group(meta.ends.clone(), T * K)
        for m in (meta, pairs, pairs.window(128), sorted_already):
            assert len(m.ready) == E and not m.ready.any() and m.counter.tolist() == [0]
        torch.use_deterministic_algorithms(False)
        want = torch.argsort(flat, stable=True)[(flat < 0).sum() :]
        counts = torch.bincount(flat[flat >= 0], minlength=E)
        n = int(counts.sum())
        assert torch.equal(meta.order[:n].long(), want)
        assert torch.equal(
            meta.offsets.long(), torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
        )
        assert torch.equal(meta.row_of[want].long(), torch.arange(n)) and (meta.row_of[flat < 0] == -1).all()
        assert torch.equal(counts[meta.by_size.long()], counts.sort(descending=True).values)
        for bm, table in meta.tiles.items():
            tiles = (counts + bm - 1) // bm
            m = int(table[0])
            capacity = meta.capacity(T * K, E, bm)
            assert m == tiles.sum() and m <= capacity
            expert = table[4 : 4 + m].long()
            assert torch.equal(expert, torch.repeat_interleave(torch.arange(E), tiles))
            nth = torch.arange(m) - (tiles.cumsum(0) - tiles)[expert]
            assert torch.equal(
                table[4 + capacity : 4 + capacity + m].long(), meta.offsets[expert].long() + nth * bm
            )


def compare(names, got, want, tolerance):
    for name, g, w in zip(names, got, want, strict=True):
        error = float((g.double() - w).norm() / w.norm().clamp(min=1e-30))
        assert error < tolerance, (name, error)


def check_layer(
    gpu,
    reference,
    T,
    D,
    F,
    E,
    K,
    mode="random",
    dtype=torch.float32,
    pairs=None,
    biased=False,
    activation="swiglu",
):
    x, dy = torch.randn(T, D).to(dtype), torch.randn(T, D).to(dtype)
    rows = named(activation).halves * F
    gate_up = (torch.randn(E, rows, D) * D**-0.5).to(dtype)
    down = (torch.randn(E, D, F) * F**-0.5).to(dtype)
    bias = torch.randn(E, rows).to(dtype) if biased else None
    if "clamped" in activation:
        gate_up *= 6  # far enough for the clamps to act
    ids = torch.randint(0, E, (T, K))
    ids[torch.rand(T, K) < 0.2] = -1
    if mode == "one":
        ids[:] = 1
    elif mode == "empty":
        ids[ids == 0] = 1
    weights = torch.rand(T, K)
    weights[ids < 0] = float("nan")  # may not be looked at
    x[(ids < 0).all(1)] = float("nan")  # nor may these rows
    how = bias, activation, T * K if pairs is None else pairs
    y, h, packed = gpu.forward(x, gate_up, down, weights, ids, *how, True)
    got = y, *gpu.backward(dy, x, gate_up, down, weights, h, packed, *how)
    dx, d_weights, d_bias, *kept = gpu.backward_of_x(dy, x, gate_up, down, weights, h, packed, *how)
    operands = gate_up, down, dy, x, weights, packed, *kept, bias
    of_matrices = gpu.backward_of_matrices(*operands, None, None, *how[1:])
    for whole, part in zip(got[1:], (dx, *of_matrices, d_weights, d_bias), strict=True):
        assert part is None if whole is None else torch.equal(part, whole)
    check_sums(gpu, (dy, x, gate_up, down, weights, h, packed, bias), operands, how[1:], got[2:4])
    leaves = [t.double().requires_grad_() for t in (x, gate_up, down, weights)]
    leaves += [bias.double().requires_grad_()] if biased else []
    want = reference.moe_mlp(*leaves[:4], ids, *leaves[4:], activation=activation)
    want.backward(dy.double())
    want = want.detach(), *(t.grad.nan_to_num() for t in leaves)
    # the interpreter cuts fp32 off to bf16 instead of rounding: twice the error of a GPU
    names = ("y", "x", "gate_up", "down", "weights", "bias")[: len(want)]
    compare(names, got[: len(want)], want, 1e-5 if dtype == torch.float32 else 2e-2)
    assert torch.equal(gpu.forward(x, gate_up, down, weights, ids, *how, False)[0], y)


def check_sums(gpu, tensors, operands, how, rounded):
    """Gradients of matrices in fp32 sums, written and added, by the whole backward and by its second part."""
    sums = [torch.full(t.shape, float("nan")) for t in rounded]
    dx, *of_matrices, _, _ = gpu.backward_into(*tensors, *sums, *how, ("write", "write"))
    assert of_matrices == [None, None] and dx is not None
    for total, part in zip(sums, rounded, strict=True):
        assert total.isfinite().all()
        compare(("sum",), (total,), (part.double(),), 1e-5 if part.dtype == torch.float32 else 2e-2)
    once = [total.clone() for total in sums]
    assert gpu.backward_of_matrices(*operands, *sums, *how, ("add", "add")) == (None, None)
    for total, one in zip(sums, once, strict=True):
        compare(("sum",), (total,), (2 * one.double(),), 1e-5)
    gpu.backward_into(*tensors, *sums, *how, ("write", "add"))
    for total, one, times in zip(sums, once, (1, 3), strict=True):
        compare(("sum",), (total,), (times * one.double(),), 1e-5)


def check_topk(topk, T, E, K, renormalize, hard=False):
    logits = torch.randn(T, E)
    if hard:  # equal logits, infinite ones, fewer than K finite ones, NaN
        logits = logits.round()
        logits[1, K - 1 :] = float("-inf")
        logits[2, 3] = float("nan")
    weights, ids = topk.forward(logits, K, renormalize)
    chosen = logits.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    want = chosen.sort(dim=-1, descending=True, stable=True).indices[:, :K]
    assert torch.equal(ids.long(), want)
    leaf = logits.double().requires_grad_()
    picked = leaf.softmax(-1).gather(1, want)
    picked = picked / picked.sum(-1, keepdim=True) if renormalize else picked
    assert torch.allclose(weights.double(), picked, rtol=1e-5, atol=1e-30, equal_nan=True)
    dw = torch.randn(T, K)
    if not hard:
        picked.backward(dw.double())
        compare(("logits",), (topk.backward(dw, logits, weights, ids, renormalize),), (leaf.grad,), 1e-5)


def check_grouped(gpu, reference, ends, dtype=torch.float32):
    a = torch.randn(130, 40).to(dtype)
    b = torch.randn(3, 72, 40).to(dtype)
    dc = torch.randn(130, 72).to(dtype)
    ends = torch.tensor(ends, dtype=torch.int32)
    got = gpu.grouped_mm(a, b, ends), *gpu.grouped_mm_backward(dc, a, b, ends)
    leaves = [t.double().requires_grad_() for t in (a, b)]
    c = reference.grouped_mm(*leaves, ends)
    c.backward(dc.double())
    compare(("c", "a", "b"), got, (c.detach(), *(t.grad for t in leaves)), 1e-5)


def main():
    repair_interpreter()
    from tmoe.ops import reference
    from tmoe.ops.experts import gpu
    from tmoe.ops.experts import pair_order as routing
    from tmoe.ops.router import topk

    poison()
    torch.manual_seed(0)
    few = routing.FEW
    check_metadata(routing, FEW_SLOTS)
    routing.FEW = 0  # three launches instead of the one for few slots
    check_metadata(routing, MANY_SLOTS)
    routing.FEW = few  # layers, whose launches read the same tables, route in one
    # the last in two tiles a row
    for T, E, K in [
        (70, 8, 2),
        (33, 60, 7),
        (5, 1, 1),
        (9, 16, 16),
        (2050, 40, 3),
    ]:
        for renormalize in (True, False):
            check_topk(topk, T, E, K, renormalize)
    check_topk(topk, 40, 16, 5, True, hard=True)
    check_topk(topk, 2050, 40, 5, True, hard=True)
    for tma, gather, sub, *shape in [
        (True, True, 2, 70, 64, 64, 4, 2),
        (False, True, 2, 70, 64, 64, 4, 2),
        (True, False, 1, 70, 64, 64, 4, 2),
        (True, True, 4, 70, 64, 64, 4, 2, "one"),
        (False, True, 1, 70, 40, 24, 5, 3, "empty"),
        (False, True, 1, 33, 40, 24, 3, 3, "random", torch.bfloat16),
        (True, True, 2, 70, 64, 64, 4, 2, "random", torch.float32, None, True, "clamped"),
        (False, True, 1, 70, 40, 24, 5, 3, "empty", torch.float32, None, True, "clamped"),
        # windows of 64 of up to 140 rows
        (
            True,
            True,
            2,
            70,
            64,
            64,
            4,
            2,
            "random",
            torch.float32,
            64,
            True,
        ),
        (False, True, 1, 70, 40, 24, 5, 3, "one", torch.float32, 64),
        (True, False, 1, 40, 64, 64, 4, 2, "empty", torch.float32, 256),
        # the other activations, by turns with descriptors and without
        (False, True, 1, 20, 40, 24, 3, 2, "random", torch.float32, None, False, "geglu"),
        (True, True, 2, 20, 64, 64, 3, 2, "random", torch.float32, None, True, "clamped_silu:limit=4"),
        (False, True, 1, 20, 40, 24, 3, 2, "random", torch.float32, None, True, "clamped:alpha=1.2,limit=3"),
        (True, True, 2, 70, 64, 64, 3, 2, "random", torch.float32, 64, True, "relu2"),
        (False, True, 1, 20, 40, 24, 3, 2, "random", torch.float32, None, True, "relu"),
        (True, False, 1, 20, 64, 64, 3, 2, "random", torch.float32, None, False, "gelu"),
        (False, False, 1, 33, 40, 24, 3, 3, "random", torch.bfloat16, None, True, "relu2"),
    ]:  # fmt: skip
        small_tiles(gpu, tma, gather, sub)
        check_layer(gpu, reference, *shape)
    small_tiles(gpu, False, False, 1)
    for ends in ([3, 3, 100], [0, 0, 0], [70, 130, 130]):
        check_grouped(gpu, reference, ends)
    print("all right")


if __name__ == "__main__":
    main()
