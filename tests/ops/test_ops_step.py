"""The step's own kernels, compiled and in Triton's interpreter: AdamW, the loss, scaling with rounding.

AdamW takes one pass, and the loss writes its gradient in place.

next: tests/model/test_step_gpu.py
"""

import os
from dataclasses import replace

import forked
import pytest
import torch
import torch.nn.functional as F
from chips import CHIPS, assert_fits, measure
from tiers import slow_but

from tmoe.commands.warmup import traces
from tmoe.config import model
from tmoe.config.presets import presets
from tmoe.model import loss
from tmoe.ops import adamw_op
from tmoe.ops import sum_parts as parts
from tmoe.ops.launch.kernel_launch import compile_only
from tmoe.ops.loss import cross_entropy

INTERPRETED = "TRITON_INTERPRET" in os.environ  # read where kernels are defined
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs inside test_in_the_interpreter")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="starts the others")
def test_in_the_interpreter():
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", __file__]
    ran = forked.run(command, env=os.environ | dict(TRITON_INTERPRET="1"))
    assert ran.returncode == 0 and "36 passed" in ran.stdout, ran.stdout[-4000:] + ran.stderr[-2000:]


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_warm_up_knows_what_a_step_launches(dtype):
    tiny = presets()["tiny"]
    cfg = replace(tiny, train=replace(tiny.train, dtype="bf16" if dtype == torch.bfloat16 else "fp32"))
    V = 50304
    D = 2048
    cfg = replace(cfg, model=replace(cfg.model, vocab=V, dim=D))

    def launched(what):
        found = {}
        with compile_only("cuda:90", lambda name, key, compile: found.setdefault(key, name)):
            what()
        return found

    def step():
        one = torch.ones(())
        copy = None if dtype == torch.float32 else dtype
        tensors = [
            parameter(n, grad, low, 1)
            for n in (64, 100, 7)
            for grad in (torch.float32, dtype)
            for low in (None, copy)
        ]
        for lr in (1e-2, 1e-3):
            adamw_op.adamw_(tensors, one, one, lr, (0.9, 0.95), 1e-8, 0.1)
        for rows, grad in ((8, True), (6, False)):
            logits = torch.empty(rows, cross_entropy.aligned(V, dtype.itemsize), dtype=dtype, device="meta")
            cross_entropy.cross_entropy_(
                logits, torch.empty(rows, dtype=torch.int64, device="meta"), V, -100, grad
            )
        for grad in (dtype, torch.float32):
            cross_entropy.scaled(
                torch.empty(V, D, dtype=grad, device="meta"), torch.empty((), device="meta"), dtype
            )
            parts.sum_parts(torch.empty(4, 8, 128, D, dtype=grad, device="meta"))

    wanted = launched(step)
    assert set(wanted.values()) == {
        "adamw_kernel",
        "cross_entropy_kernel",
        "scale_kernel",
        "sum_parts_kernel",
    }
    assert len(wanted) == (8 if dtype == torch.bfloat16 else 2) + 2 + (4 if dtype == torch.bfloat16 else 2)
    assert not set(wanted) - set(launched(lambda: [trace(*args) for trace, *args in traces(cfg)]))


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("arch", slow_but(["cuda:90"], CHIPS))
def test_the_kernels_fit(arch):
    found = []
    with compile_only(arch, lambda name, key, compile: found.append(measure(arch, name, compile))):
        adamw_op.trace(torch.bfloat16)
        parts.trace(torch.bfloat16)
        for dtype in (torch.bfloat16, torch.float32):
            cross_entropy.trace(50304, 2048, -100, dtype)
    assert len(found) == 17
    for binary in found:
        assert_fits(binary, CHIPS[arch])


def parameter(n: int, dtype, copy, step: float, offset: int = 0):
    """weight, grad, mean, square, copy and step.

    `offset`: the number of elements by which all of them miss 16-byte alignment.
    """
    grad, weight, mean, square, low = (
        torch.empty(n + offset, dtype=t)[offset:]
        for t in (dtype, *[torch.float32] * 3, copy or torch.float32)
    )
    for t in (grad, weight, mean):
        t.normal_()
    return weight, grad, mean, square.uniform_(), low.fill_(7.0) if copy else None, torch.tensor(float(step))


@interpreted
@pytest.mark.parametrize("finite", [1.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw(dtype, finite):
    """Tensors of many lengths, types and alignments in one call; each counts its own steps."""
    bf16, fp32 = torch.bfloat16, torch.float32
    tensors = [
        parameter(2500, dtype, bf16, 3),
        parameter(1, dtype, bf16, 1),
        parameter(0, dtype, bf16, 9),
        parameter(16, dtype, bf16, 2),
        parameter(1024, dtype, None, 3),
        parameter(33, bf16, None, 4),
        parameter(3100, dtype, bf16, 5, offset=1),
        parameter(5000, fp32, bf16, 3),
        parameter(1025, dtype, bf16, 7),
    ]
    before = [[t.clone() for t in (weight, mean, square)] for weight, _, mean, square, _, _ in tensors]
    adamw_op.adamw_(tensors, torch.tensor(0.25), torch.tensor(finite), 1e-2, (0.9, 0.95), 1e-8, 0.1)
    for (weight, grad, mean, square, copy, step), was in zip(tensors, before, strict=True):
        if not finite:
            assert all(torch.equal(a, b) for a, b in zip((weight, mean, square), was, strict=True))
            assert copy is None or (copy == 7).all()
            continue
        # Loshchilov & Hutter 2017, algorithm 2
        w, m, v, g = (t.double() for t in (*was, grad.double() * 0.25))
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * g * g
        n = step.item()
        w = w * (1 - 1e-2 * 0.1) - 1e-2 * (m / (1 - 0.9**n)) / ((v / (1 - 0.95**n)).sqrt() + 1e-8)
        for got, want in zip((weight, mean, square), (w, m, v), strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
        if copy is not None:
            torch.testing.assert_close(copy.float(), weight, rtol=2**-7, atol=0)


@interpreted
@pytest.mark.parametrize(
    ("at", "change", "message"),
    [
        (0, lambda t: t.repeat(2)[::2], r"by \(2,\)"),
        (1, lambda t: t[:8], r"float32 \[8\]"),
        (2, lambda t: t.bfloat16(), "bfloat16"),
        (3, lambda t: t.repeat(2)[::2], r"by \(2,\)"),
        (1, lambda t: t.int(), "int32"),
        (4, lambda t: t.repeat(2), r"\[128\]"),
        (5, lambda t: t.long(), "int64"),
        (2, lambda t: t.to("meta"), "meta"),
    ],
)
def test_adamw_takes_no_other_tensors(at, change, message):
    """It gets addresses alone, so the memory behind them must be what it is taken for."""
    tensors = list(parameter(64, torch.float32, torch.bfloat16, 1))
    tensors[at] = change(tensors[at])
    one = torch.ones(())
    before = [t.clone() for t in tensors]
    with pytest.raises(ValueError, match=rf"adamw_: .*{message}"):
        adamw_op.adamw_([tensors], one, one, 1e-2, (0.9, 0.95), 1e-8, 0.1)
    assert all(a.is_meta or torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@interpreted
@pytest.mark.parametrize("V", [50, 8192, 9001])
@pytest.mark.parametrize("grad", [True, False])
def test_cross_entropy(V, grad):
    logits = torch.randn(5, V) * 4
    targets = torch.tensor([0, V - 1, -100, V // 2, 7])
    before = logits.clone()
    keep = targets != -100
    got = cross_entropy.cross_entropy_(logits, targets, V, -100, grad)
    torch.testing.assert_close(got, F.cross_entropy(before, targets, reduction="none"), rtol=1e-5, atol=1e-6)
    want = before.softmax(-1)
    want[keep, targets[keep]] -= 1
    want[~keep] = 0
    torch.testing.assert_close(logits, want if grad else before, rtol=1e-5, atol=1e-7)


@interpreted
@pytest.mark.parametrize("grad", [True, False])
def test_further_columns_of_logits_have_no_share(grad):
    V = 9001
    targets = torch.tensor([0, 9000, -100, 9001, 9003])
    logits = torch.randn(5, 9004) * 4
    logits[:, V:] = 100.0
    before = logits.clone()
    got = cross_entropy.cross_entropy_(logits, targets, V, -100, grad)
    inside = [0, 1, 2]
    want = F.cross_entropy(before[inside, :V], targets[inside], reduction="none")
    torch.testing.assert_close(got[inside], want, rtol=1e-5, atol=1e-6)
    assert got[3:].isnan().all()
    assert (logits[inside, V:] == 0).all() if grad else torch.equal(logits, before)
    assert not grad or abs(logits[inside, :V].sum(1)).max() < 1e-4


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_of_an_odd_vocabulary(dtype, monkeypatch):
    """A GPU's way: rows of logits that begin at multiples of 16 bytes.

    They come in chunks, of which the last is shorter.
    """
    T, D, V = 23, 16, 51
    h, w = (torch.randn(n, D).to(dtype) * 0.5 for n in (T, V))
    targets = torch.randint(V, (T,))
    targets[::5] = -100
    want = loss.loss_and_gradients(h, w, targets, True, True)
    seen = []

    def softmax_and_gradient(logits, targets, V, needs):
        seen.append(logits.shape)
        return cross_entropy.cross_entropy_(logits, targets, V, model.IGNORE, needs), logits

    monkeypatch.setattr(loss, "softmax_and_gradient", softmax_and_gradient)
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 8 * V)
    wide = torch.cat([w, w.new_zeros(cross_entropy.aligned(V, dtype.itemsize) - V, D)])
    monkeypatch.setattr(loss, "widened", lambda _: wide)
    got = loss.loss_and_gradients(h, w, targets, True, True)
    width = {torch.float32: 52, torch.bfloat16: 56}[dtype]
    assert seen == [(8, width), (8, width), (7, width)]
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous()
        torch.testing.assert_close(a, b, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-3)


@interpreted
@pytest.mark.parametrize("masked", [slice(0, 8192), slice(0, 8195), slice(8192, None)], ids=str)
def test_logits_of_minus_infinity_have_no_share(masked):
    """A whole block of them, first or last; no subtraction has infinity on both sides."""
    logits = torch.randn(3, 8200)
    targets = torch.tensor([8199, 0, 8195])
    logits[:, masked] = float("-inf")
    logits[1, 0] = 1.0
    logits[:2, 8199] = logits[2, 8195] = 0.5
    before = logits.clone()
    got = cross_entropy.cross_entropy_(logits, targets, 8200, -100, True)
    torch.testing.assert_close(got, F.cross_entropy(before, targets, reduction="none"), rtol=1e-5, atol=1e-6)
    want = before.softmax(-1)
    want[torch.arange(3), targets] -= 1
    torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-7)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [True, False])
def test_a_target_outside_of_the_vocabulary_is_nan_and_others_stay_bitwise(dtype, grad):
    """It is not a neighbouring row's logit, nor what lies around the logits."""
    V = 50
    outside = torch.tensor([0, 2, 3, 5])
    targets = torch.tensor([-1, 7, 50, -101, -100, 2**40, 49])
    inside = targets.clone()
    inside[outside] = 3
    logits = torch.randn(len(targets), V).to(dtype)
    same = logits.clone()
    got, want = (
        cross_entropy.cross_entropy_(x, t, V, -100, grad) for x, t in ((logits, targets), (same, inside))
    )
    want[outside] = float("nan")
    if grad:
        same[outside] = float("nan")
    assert torch.equal(got.nan_to_num(7), want.nan_to_num(7)) and torch.equal(
        logits.nan_to_num(7), same.nan_to_num(7)
    )


@interpreted
def test_scaled():
    x = torch.randn(3, 1000)
    got = cross_entropy.scaled(x, torch.tensor(0.3), torch.bfloat16)
    # the interpreter cuts where a GPU rounds
    torch.testing.assert_close(got.float(), x * 0.3, rtol=2**-7, atol=0)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 3, 8, 16), (3, 5000), (8, 1)])
def test_sum_of_parts(dtype, shape, monkeypatch):
    monkeypatch.setattr(parts, "BLOCK", 256)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    want = x[0].float()
    for part in x[1:]:
        want = want + part.float()
    assert torch.equal(parts.sum_parts(x), want)
