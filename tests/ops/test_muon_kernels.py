"""Muon's kernels: two passes over memory and the symmetric product, in Triton's interpreter and compiled.

next: tests/optim/test_muon.py
"""

import os
from dataclasses import replace

import forked
import pytest
import torch
from chips import CHIPS, assert_fits, measure
from interpreter import repair_interpreter
from tiers import slow_but

from tmoe.commands.warmup import traces
from tmoe.config.presets import presets
from tmoe.config.run import OptimConfig
from tmoe.ops import muon_op, newton_schulz, symmetric
from tmoe.ops.launch.kernel_launch import compile_only
from tmoe.ops.muon_op import look_ahead_, write_
from tmoe.ops.newton_schulz import by_launches, orthogonal
from tmoe.ops.symmetric import Terms, commuting_product, symmetric_product
from tmoe.optim.adamw import build_optimizer
from tmoe.optim.matrices import Rows
from tmoe.parallel.copies import WorkingCopy

INTERPRETED = "TRITON_INTERPRET" in os.environ  # read where kernels are defined
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs inside test_in_the_interpreter")
BF16, FP32 = torch.bfloat16, torch.float32
CPU, NAMES = torch.device("cpu"), ("experts", "qkv")


@pytest.fixture(scope="module", autouse=INTERPRETED)
def _interpreter():
    repair_interpreter()
    symmetric.TILE, symmetric.INNER = 16, 16


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="starts the others")
def test_in_the_interpreter():
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", __file__]
    ran = forked.run(command, env=os.environ | dict(TRITON_INTERPRET="1"))
    assert ran.returncode == 0 and "23 passed" in ran.stdout, ran.stdout[-4000:] + ran.stderr[-2000:]


def drawn(*shape: int, dtype=FP32, seed: int = 0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@interpreted
@pytest.mark.parametrize("finite", [1.0, 0.0])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_look_ahead_is_nesterovs(finite, dtype):
    """Shapes beyond one program and with a remainder; a skipped step leaves the momentum, NaN included."""
    for shape in ((3, 5, 150), (7, 5), (2, 128), (0, 8)):
        grad, momentum = drawn(*shape, dtype=dtype), drawn(*shape, seed=1)
        if not finite and grad.numel():
            grad.view(-1)[0] = torch.nan
        before, g = momentum.clone(), grad.float() * 0.5
        new = before + 0.05 * (g - before)
        ahead, squares = look_ahead_(grad, momentum, torch.tensor(0.5), torch.tensor(finite), 0.95, dtype)
        assert ahead.dtype == dtype and squares.shape == shape[:-1]
        torch.testing.assert_close(momentum, new if finite else before, rtol=1e-6, atol=1e-7)
        if finite:
            near = dict(rtol=2**-7, atol=1e-3) if dtype == BF16 else dict(rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(ahead.float(), g + 0.95 * (new - g), **near)
            torch.testing.assert_close(squares, ahead.float().square().sum(-1), rtol=1e-5, atol=1e-6)


@interpreted
@pytest.mark.parametrize("finite", [1.0, 0.0])
@pytest.mark.parametrize("copied", [None, BF16])
def test_a_weight_and_its_copy_are_written_together(finite, copied):
    for shape in ((3, 5, 150), (7, 5)):
        weight, update = drawn(*shape), drawn(*shape, dtype=BF16, seed=1)
        copy = None if copied is None else torch.full(shape, 7.0, dtype=copied)
        before, scales = weight.clone(), torch.rand(shape[-2]) + 1
        write_(weight, update, copy, scales, torch.tensor(finite), 1e-2, 0.1)
        want = before * (1 - 1e-3) - 1e-2 * scales[:, None] * update.float()
        torch.testing.assert_close(weight, want if finite else before, rtol=1e-6, atol=1e-6)
        if copy is not None:
            want = weight if finite else torch.full_like(weight, 7.0)
            torch.testing.assert_close(copy.float(), want, rtol=2**-7, atol=0)  # the interpreter truncates


@interpreted
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("rows", [16, 40])
def test_half_of_the_tiles_give_the_whole_product(tall, dtype, rows):
    """Against fp64; 40 rows are three tiles of 16 a side, the last of them partly filled."""
    fused = drawn(3, 2 * rows, 50, dtype=dtype) / 8
    x, scales = fused[:, :rows], torch.tensor([1.0, 0.5, 2.0])  # its matrices do not follow one another
    wide, s = x.double(), scales.double()[:, None, None]
    near = dict(rtol=2**-7, atol=0.02) if dtype == BF16 else dict(rtol=1e-5, atol=1e-5)
    stored = x.mT.contiguous() if tall else x
    gram = symmetric_product(stored, scales, Terms(1.0), tall=tall)
    torch.testing.assert_close(gram.double(), s * wide @ wide.mT, **near)
    found, wide = symmetric_product(gram, scales, Terms(0.5, -2.0, 3.0)), gram.double()
    want = s * (0.5 * wide @ wide.mT - 2.0 * wide + 3.0 * torch.eye(rows).double())
    torch.testing.assert_close(found.double(), want, **near)
    other = drawn(3, rows, rows, dtype=dtype, seed=1)
    other = other + other.mT  # does not commute with the first: the halves of the product differ
    product, wide = commuting_product(gram, other, scales, FP32), s * wide @ other.double()
    tile = torch.arange(rows) // 16
    want = torch.where(tile[:, None] == tile[None, :], wide, wide.tril() + wide.tril(-1).mT)
    torch.testing.assert_close(product.double(), want, rtol=1e-5, atol=1e-5)
    for t in (gram, found):
        torch.testing.assert_close(t, t.mT.contiguous())


@interpreted
@pytest.mark.parametrize("pairs", [False, True])
def test_newton_schulz_in_launches(pairs):
    """Five iterations of matrices [24, 40] and [40, 24]; the interpreter truncates to bf16, torch rounds."""
    for tall in (False, True):
        stack = drawn(2, 40, 24) if tall else drawn(2, 24, 40)
        stack[1] *= 1e-6
        want = orthogonal(stack)
        scales = 1 / (torch.linalg.vector_norm(stack, dim=(-2, -1)) * 1.01 + 1e-7)
        for dtype, near in ((FP32, 1e-4), (BF16, 8e-2)):
            found = torch.empty(2, 80, stack.shape[-1], dtype=dtype)[:, : stack.shape[-2]]
            by_launches(stack.to(dtype), scales, 5, found, pairs)
            for got, right in zip(found.float(), want, strict=True):
                assert (got - right).norm() < near * right.norm()


@interpreted
@pytest.mark.parametrize("finite", [1.0, 0.0])
@pytest.mark.parametrize("products", [FP32, BF16])
def test_a_step_by_kernels_is_a_step_in_plain_torch(finite, products, monkeypatch):
    """Two steps, the second clipped or skipped; a stack with a working copy, and a fused matrix.

    With kernels each stack is computed where it lies, by the sums of squares that the first kernel found.
    """
    found = []
    for kernels in (False, True):
        named = dict(experts=drawn(3, 24, 40), qkv=drawn(16, 8, seed=1), norm=drawn(8, seed=2))
        named = {name: torch.nn.Parameter(t) for name, t in named.items()}
        named["experts"].working_copy = copy = WorkingCopy(named["experts"], BF16)
        cfg, parts = OptimConfig(lr=1e-2, muon="experts|qkv"), dict(qkv=[Rows(0, 10), Rows(10, 6)])
        optimizer = build_optimizer(named.items(), cfg, CPU, True, parts=parts, products=products)
        optimizer.muon.on_gpu = kernels
        monkeypatch.setattr("tmoe.optim.muon.LARGE", 0 if kernels else 2**24)
        for step in range(2):
            copy.refresh()  # as a forward does
            for i, p in enumerate(named.values()):
                p.grad = drawn(*p.shape, seed=10 * step + i)
            optimizer.decide(torch.tensor(finite if step else 1.0), torch.tensor(2.0 if step else 0.5), 1.0)
            optimizer.step()
        assert copy.fresh == kernels
        if kernels:
            torch.testing.assert_close(copy.tensor.float(), named["experts"].data, rtol=2**-7, atol=0)
        found.append(named | {f"momentum.{name}": optimizer.state[named[name]]["momentum"] for name in NAMES})
        assert [optimizer.state[named[name]]["step"].item() for name in NAMES] == [1 + finite] * 2
    for name, want in found[0].items():
        near = (
            dict(rtol=1e-4, atol=1e-5) if products == FP32 or "momentum" in name else dict(rtol=0, atol=3e-3)
        )
        torch.testing.assert_close(found[1][name], want, msg=name, **near)


@interpreted
def test_other_tensors_are_refused():
    one = torch.ones(())
    with pytest.raises(ValueError, match=r"look_ahead_: grad, momentum .* momentum fp32"):
        look_ahead_(drawn(4, 4), drawn(4, 4, dtype=BF16), one, one, 0.9, FP32)
    with pytest.raises(ValueError, match="write_: weight, update, copy, scales"):
        write_(drawn(4, 6), drawn(4, 6), None, torch.ones(6), one, 0.1, 0.1)
    for x, scales in ((drawn(2, 6, 4).mT, torch.ones(2)), (drawn(2, 6, 4), torch.ones(3))):
        with pytest.raises(ValueError, match=r"symmetric_product: x, scales .* contiguous rows"):
            symmetric_product(x, scales, Terms(1.0))
    x, scales = drawn(2, 4, 4), torch.ones(2)
    for a, b, factors in ((x, x[:, :2], scales), (x, x.to(BF16), scales), (x, x.mT, scales), (x, x, one)):
        with pytest.raises(ValueError, match=r"commuting_product: a, b, scales .* contiguous \[E, m, m\]"):
            commuting_product(a, b, factors)


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("arch", slow_but(["cuda:90"], CHIPS))
def test_the_kernels_fit(arch):
    kernels = {}

    def visit(name, key, compile):
        if (name, str(key)) not in kernels:
            kernels[name, str(key)] = measure(arch, name, compile)

    with compile_only(arch, visit):
        muon_op.trace(BF16)
        newton_schulz.trace(BF16)
    found = list(kernels.values())
    names = [binary.name for binary in found]
    assert names.count("look_ahead_kernel") == names.count("write_kernel") == 4
    hopper = arch == "cuda:90"
    assert names.count("stacked_kernel") == (11 if hopper else 0)
    assert names.count("symmetric_kernel") == (0 if hopper else 8)
    for binary in found:
        assert_fits(binary, CHIPS[arch])


@pytest.mark.skipif(INTERPRETED, reason="compiles")
def test_the_warm_up_compiles_them_with_muon_alone():
    tiny = presets()["tiny"]
    cfg = replace(tiny, train=replace(tiny.train, dtype="bf16"))

    def names(cfg):
        found = set()
        with compile_only("cuda:90", lambda name, key, compile: found.add(name)):
            for trace, *args in traces(cfg):
                if trace in (muon_op.trace, newton_schulz.trace):
                    trace(*args)
        return found

    assert names(cfg) == set()
    wanted = {"look_ahead_kernel", "write_kernel", "stacked_kernel"}
    assert names(replace(cfg, optim=replace(cfg.optim, muon="."))) == wanted
