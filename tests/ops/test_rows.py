"""gather_rows and scatter_rows: values by hand and against plain loops, gradients of any order, compilation.

As a script it runs the kernels in triton's interpreter, which must be chosen before they are defined:
    TRITON_INTERPRET=1 python tests/ops/test_rows.py
"""

import os
from dataclasses import replace
from pathlib import Path

import forked
import pytest
import torch
from tiers import slow_but
from torch import tensor

from tmoe import ops
from tmoe.commands.warmup import traces
from tmoe.config.presets import presets
from tmoe.ops import reference
from tmoe.ops.experts import gather_scatter as rows
from tmoe.ops.launch.kernel_launch import compile_only

ROOT = Path(__file__).parents[2]
SHAPES = [(5, 9, 3), (0, 4, 3), (6, 0, 2), (0, 0, 1), (70, 700, 40), (1, 33, 1)]  # T, N, D


def looped(y_ND, ids_N, T):
    """The sums, one row after the other, in fp64."""
    out = torch.zeros(T, y_ND.shape[1], dtype=torch.float64)
    for y, t in zip(y_ND.double(), ids_N.tolist(), strict=True):
        if 0 <= t < T:
            out[t] += y
    return out


def draw(T, N, D, dtype=torch.float32):
    """x [T, D], y [N, D], ids [N] with -1 and numbers beyond the last row among them."""
    torch.manual_seed(T + N + D)
    return torch.randn(T, D).to(dtype), torch.randn(N, D).to(dtype), torch.randint(-2, T + 2, (N,))


def test_by_hand():
    x = tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    got = ops.gather_rows(x, tensor([2, -1, 0, 2]))
    assert got.tolist() == [[5, 6], [0, 0], [1, 2], [5, 6]]
    got = ops.scatter_rows(x, tensor([1, -1, 1]), 3)
    assert got.tolist() == [[0, 0], [6, 8], [0, 0]]


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape, kind):
    x, y, ids = draw(*shape)
    ids = ids.to(kind)
    got = ops.gather_rows(x, ids)
    assert got.shape == y.shape and got.is_contiguous()
    for row, t in zip(got, ids.tolist(), strict=True):
        assert torch.equal(row, x[t] if 0 <= t < len(x) else torch.zeros(shape[2]))
    sums = ops.scatter_rows(y, ids, shape[0]).double()
    torch.testing.assert_close(sums, looped(y, ids, shape[0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_once(dtype):
    """The fp32 sum of thousands of rows, rounded at the end."""
    y = torch.randint(-99, 99, (4000, 5)).to(dtype)  # whose fp32 sums are exact
    ids = torch.arange(4000) % 3
    want = looped(y, ids, 3)
    assert torch.equal(ops.scatter_rows(y, ids, 3), want.to(torch.float32).to(dtype))


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_gradients_of_first_and_second_order(shape):
    x, y, ids = draw(*shape, torch.float64)
    for op, of in ((ops.gather_rows, (x, ids)), (ops.scatter_rows, (y, ids, shape[0]))):
        leaf = of[0].requires_grad_()
        assert torch.autograd.gradcheck(op, of) and torch.autograd.gradgradcheck(op, of)
        leaf.requires_grad_(False)


def test_rows_that_go_nowhere_may_hold_anything():
    """NaN neither goes forward nor comes back, and a NaN row that nobody takes stays where it is."""
    x = tensor([[float("nan")], [2.0]]).requires_grad_()
    y = ops.gather_rows(x, tensor([-1, 1]))
    assert y.tolist() == [[0.0], [2.0]]
    y.sum().backward()
    assert x.grad.tolist() == [[0.0], [1.0]]
    assert ops.scatter_rows(tensor([[float("nan")], [2.0]]), tensor([-1, 0]), 2).tolist() == [[2.0], [0.0]]


def test_odd_strides():
    x, y, ids = draw(7, 20, 6)
    wide = torch.stack([ids, ids], 1)[:, 0]
    columns = x.t().contiguous().t()
    assert torch.equal(ops.gather_rows(columns, wide), ops.gather_rows(x, ids))
    assert torch.equal(ops.scatter_rows(y.t().contiguous().t(), wide, 7), ops.scatter_rows(y, ids, 7))


def there_and_back(x, ids):
    return ops.scatter_rows(ops.gather_rows(x * 2, ids).relu(), ids, x.shape[0])


def test_one_graph_whatever_the_ids():
    compiled = torch.compile(there_and_back, fullgraph=True, dynamic=True)
    for i, (T, N) in enumerate(((9, 20), (11, 31), (4, 17))):
        x, _, ids = draw(T, N, 6)
        x.requires_grad_()
        g = torch.randn_like(x)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = compiled(x, ids)
            (dx,) = torch.autograd.grad(got, x, g)
        want = there_and_back(x, ids)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(dx, *torch.autograd.grad(want, x, g))


def test_opcheck():
    x, y, ids = draw(5, 9, 3)
    torch.library.opcheck(torch.ops.tmoe.gather_rows.default, (x.requires_grad_(), ids))
    torch.library.opcheck(torch.ops.tmoe.scatter_rows.default, (y.requires_grad_(), ids, 5))


@pytest.mark.parametrize(
    ("op", "args", "said"),
    [
        ("gather_rows", (torch.ones(3), tensor([0])), "x: got 1 dimensions"),
        ("gather_rows", (torch.ones(3, 2), tensor([0.0])), "ids: got torch.float32, valid is int32 or int64"),
        ("gather_rows", (torch.ones(3, 2), tensor([[0]])), "ids: got 2 dimensions"),
        ("gather_rows", (torch.ones(3, 2, dtype=torch.int32), tensor([0])), "x: got torch.int32"),
        ("gather_rows", (None, tensor([0])), "x: got None, valid is a tensor"),
        ("scatter_rows", (torch.ones(3, 2), tensor([0]), 4), r"ids: got shape \(1,\), valid is \[N=3\]"),
        ("scatter_rows", (torch.ones(1, 2), tensor([0]), -1), "rows: got -1, valid is a whole number from 0"),
        ("scatter_rows", (torch.ones(1, 2), tensor([0]), True), "rows: got True"),
        ("scatter_rows", (torch.ones(1, 2), tensor([0]), 2.0), "rows: got 2.0"),
    ],
)
def test_bad_input_is_named(op, args, said):
    with pytest.raises(ValueError, match=said):
        getattr(ops, op)(*args)


# ---- the kernels ----


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 32768, 2048), (9, 40, 1500)], ids=str)
def test_a_gpu_gives_the_bits_of_a_cpu(shape, dtype):
    """Values and gradients: both add a row's sum in the same order, in fp32."""
    x, y, ids = draw(*shape, dtype)
    found = []
    for device in ("cpu", "cuda"):
        a, b, i = (t.to(device) for t in (x, y, ids))
        a, b = a.requires_grad_(), b.requires_grad_()
        gathered, summed = ops.gather_rows(a, i), ops.scatter_rows(b, i, shape[0])
        grads = torch.autograd.grad([gathered, summed], [a, b], [b.detach(), a.detach()])
        found.append([t.cpu() for t in (gathered, summed, *grads)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("arch", slow_but(["cuda:90"], ["cuda:90", "cuda:80", "hip:gfx942"]))
def test_the_kernels_compile(monkeypatch, tmp_path, arch):
    """One binary each for a width and a type, whatever the numbers of rows."""
    for D, dtype in ((2048, torch.bfloat16), (1, torch.float32), (200, torch.float16)):
        wanted = {}
        with compile_only(
            arch, lambda name, key, compile, wanted=wanted: wanted.setdefault((name, key), compile)
        ):
            rows.trace(4096, 32768, D, dtype)
            rows.trace(100, 77, D, dtype)
            names = sorted(name for name, _ in wanted)
            assert names == ["gather_rows_kernel", "scatter_rows_kernel"]
            assert all(compile().asm for compile in wanted.values())


def test_warm_up_knows_them():
    """Where weights apply before the experts, their kernels, of a rank's width, are compiled ahead."""
    tiny = presets()["tiny"]
    found = {}
    for weigh in ("activation", "before"):
        moe = replace(tiny.model.moe, weigh=weigh, latent_dim=64)
        cfg = replace(tiny, model=replace(tiny.model, moe=moe))
        names = found[weigh] = set()
        with compile_only("cuda:90", lambda name, *_, names=names: names.add(name)):
            for run, *args in traces(cfg):
                run(*args)
    assert found["before"] - found["activation"] == {"gather_rows_kernel", "scatter_rows_kernel"}


@pytest.mark.slow
def test_the_kernels_in_the_interpreter():
    ran = forked.run([__file__], env=os.environ | dict(TRITON_INTERPRET="1"))
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert ran.stdout.splitlines()[-1] == "all right"


def main():
    from interpreter import poison, repair_interpreter

    repair_interpreter()
    poison()
    for shape in (*SHAPES, (9, 40, 1500)):
        for dtype in (torch.float32, torch.bfloat16):
            x, y, ids = draw(*shape, dtype)
            x = torch.cat([x, torch.full((1, shape[2]), float("nan")).to(dtype)])[: len(x)]  # behind: NaN
            for kind in (torch.int32, torch.int64):
                assert torch.equal(rows.gather_gpu(x, ids.to(kind)), reference.gather_rows(x, ids))
                got = rows.scatter_gpu(y, ids.to(kind), shape[0]).float()
                want = reference.scatter_rows(y, ids, shape[0]).float()
                # fp32 sums in one order; the interpreter cuts bf16 off instead of rounding
                assert (
                    torch.equal(got, want)
                    if dtype == torch.float32
                    else (got - want).norm() <= (2e-2 * want.norm())
                )
    print("all right")


if __name__ == "__main__":
    main()
