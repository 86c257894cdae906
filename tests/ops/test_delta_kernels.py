"""The delta rule's kernels: in triton's interpreter against the plain form, and compiled for chips.

next: tests/ops/test_decoding_kernels.py
"""

import os

import pytest
import torch
import torch.nn.functional as F
from chips import CHIPS, assert_fits, measure
from interpreter import poison, repair_interpreter, round_to_bf16
from rounded_products import RoundedProducts
from tiers import slow_but

from tmoe.ops.delta import conv_kernels, gpu, short_conv
from tmoe.ops.delta.rule import delta_rule, delta_rule_step, plain, plain_back
from tmoe.ops.delta.runs import runs_of
from tmoe.ops.launch.kernel_launch import compile_only
from tmoe.ops.launch.shapes import LinearShapes

INTERPRETED = "TRITON_INTERPRET" in os.environ  # read where kernels are defined
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs inside test_decoding_kernels")
compiled = pytest.mark.skipif(INTERPRETED, reason="compiles")
fp32, bf16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module", autouse=INTERPRETED)
def _interpreter():
    repair_interpreter()
    round_to_bf16()


def inputs(S, H, G, K, V, dtype, decay):
    gen = torch.Generator().manual_seed(0)

    def r(*shape):
        return torch.randn(1, S, *shape, generator=gen, dtype=torch.float64)

    q, k = F.normalize(r(G, K), dim=-1), F.normalize(r(G, K), dim=-1)
    made = [q.to(dtype), k.to(dtype), r(H, V).to(dtype), (-decay * F.softplus(r(H))).float()]
    return [*made, r(H).sigmoid().float()]


def far(a, b) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


CASES = {  # lengths of documents, H, G, K, V, type, decay
    "several documents a chunk": ([30, 1, 58, 40], 2, 1, 8, 12, fp32, 0.3),
    "one document, strong decays": ([70], 1, 1, 16, 16, fp32, 20.0),
    "of bf16": ([80], 2, 2, 24, 40, bf16, 0.1),
}
MAMBA2 = {"mamba2, several documents a chunk": ([30, 1, 45], 2, 1, 8, 12, fp32, 0.3)}
MAMBA2 |= {"mamba2, of bf16": ([80], 2, 2, 24, 40, bf16, 0.1)}
CASES |= MAMBA2


@interpreted
@pytest.mark.parametrize("name", slow_but(["several documents a chunk", next(iter(MAMBA2))], CASES))
def test_the_kernels_are_the_plain_form(name, monkeypatch):
    """Outputs and gradients against fp64; every buffer begins as NaN.

    For bf16 errors are at most twice those of the plain form whose products take operands of bf16.
    """
    monkeypatch.setattr(torch, "empty", torch.empty)  # which `poison` replaces
    lengths, H, G, K, V, dtype, decay = CASES[name]
    correct = name not in MAMBA2
    given = inputs(sum(lengths), H, G, K, V, dtype, decay)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    run = runs_of(documents, None, 0).number_BS if len(lengths) > 1 else None
    exact = [t.double().requires_grad_() for t in given]
    want = delta_rule(*exact, run, correct)
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    want_g = torch.autograd.grad(want, exact, weight.double())
    bound = 2e-6 if decay < 1 else 5e-5  # differences of large sums
    bounds = [bound] * 6
    if dtype == bf16:
        with torch.no_grad(), RoundedProducts() as rounded:
            twin = plain(*given, run, correct), *plain_back(weight, tuple(given), run, correct)
        bounds = [2 * far(t, e.detach()) for t, e in zip(twin, (want, *want_g), strict=True)]
        assert rounded.products > 20 and max(bounds) < 1e-2
    poison()
    o, *kept = gpu.forward(tuple(given), run, correct)
    assert [(tuple(t.shape), t.dtype) for t in kept] == [*gpu.kept(given[0], given[2], correct)]
    found = o, *gpu.backward(weight, tuple(given), run, *kept, correct)
    for got, exactly, most in zip(found, (want.detach(), *want_g), bounds, strict=True):
        assert far(got, exactly) < most


@interpreted
@pytest.mark.parametrize("correct", [True, False])
def test_what_is_not_finite_stays_in_its_run(correct):
    """In q, k, v, g and beta; in the same chunk, in a later chunk of the run, and in its gradients."""
    given = inputs(150, 2, 1, 16, 16, fp32, 0.3)
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor([40, 65, 30, 15]))[None]
    run = runs_of(documents, None, 0).number_BS
    weight = torch.ones(given[2].shape)
    o, *kept = gpu.forward(tuple(given), run, correct)
    want = o, *gpu.backward(weight, tuple(given), run, *kept, correct)
    for which, value in ((0, "inf"), (1, "nan"), (2, "-inf"), (3, "nan"), (4, "inf")):
        broken = [t.clone() for t in given]
        broken[which][0, 50, 0 if which < 2 else 1].fill_(float(value))
        o, *kept = gpu.forward(tuple(broken), run, correct)
        lost = torch.zeros(1, 150, 2, dtype=torch.bool)
        lost[0, 50:105, slice(None) if which < 2 else 1] = True
        assert torch.equal(o.isnan().all(-1), lost) and torch.equal(o.isnan().any(-1), lost)
        assert torch.equal(kept[1].bool(), lost)
        found = (
            o,
            *gpu.backward(
                weight.masked_fill(lost[..., None], float("nan")), tuple(broken), run, *kept, correct
            ),
        )
        others = documents[0] != 1
        for got, plain_one in zip(found, want, strict=True):
            torch.testing.assert_close(got[:, others], plain_one[:, others], rtol=1e-4, atol=1e-5)
        assert all(t.isfinite().all() for t in found[1:])
        assert all((t[0, 50:105, -1].abs() < 1e-5).all() for t in found[3:])  # of v, g, beta


@interpreted
@pytest.mark.parametrize("correct", [True, False])
def test_one_token(correct):
    """Several sequences; their states are overwritten."""
    given = [t[0, :, None].contiguous() for t in inputs(3, 4, 2, 24, 40, fp32, 0.5)]
    state = torch.randn(3, 4, 24, 40)
    want = state.double()
    o = delta_rule_step(tuple(t.double() for t in given), want, correct)
    got = state.clone()
    assert far(gpu.step(tuple(given), got, correct), o) < 1e-6 and far(got, want) < 1e-6
    assert far(state, want) > 0.01


@interpreted
@pytest.mark.parametrize("dtype", [fp32, bf16])
@pytest.mark.parametrize("runs", [False, True])
def test_the_convolutions_plain_form(runs, dtype):
    """Several rows that are a part of wider rows, channels and tokens that no tile divides, gaps."""
    torch.manual_seed(0)
    wide, weight = torch.randn(2, 70, 90).to(dtype), torch.randn(81, 4)
    bias = torch.randn(81) if runs else None
    u, dy = wide[:, :, 3:84], torch.randn(2, 70, 81).to(dtype)
    documents = torch.arange(140).view(2, 70) // 23
    tables = runs_of(documents, torch.arange(70).expand(2, 70) % 11 == 4, 3) if runs else None
    back, ahead = (tables.back_BSJ, tables.ahead_BSJ) if tables else (None, None)
    want = short_conv.forward(u, weight, bias, back, ahead)
    want_g = short_conv.backward(dy, u, weight, bias, back, ahead)
    y = conv_kernels.forward(u, weight, bias, back)
    found = conv_kernels.backward(dy, u, weight, bias, back, ahead)
    bound = 2e-6 if dtype == fp32 else 2**-7
    pairs = [(y, want), *zip(found, want_g, strict=True)]
    assert (pairs.pop() == (None, None)) if bias is None else len(pairs) == 4
    for got, exactly in pairs:
        assert far(got, exactly.double()) < bound and got.dtype == exactly.dtype


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("arch", CHIPS)
def test_the_kernels_fit(arch, monkeypatch):
    """Qwen3-Next's widths, and narrower heads."""
    monkeypatch.setattr(gpu, "MEASURED", {arch})
    found = []
    with compile_only(arch, lambda name, key, compile: found.append(measure(arch, name, compile))):
        gpu.trace(LinearShapes(16, 32, 128, 128, 4, bf16, True), runs=True)
        gpu.trace(LinearShapes(4, 4, 64, 64, 4, bf16, True), runs=False)
        conv_kernels.trace(8192, 4, bf16, runs=True, trained=True)
        gpu.trace_step(LinearShapes(16, 32, 128, 128, 4, bf16, False))
    assert len(found) == 24
    mamba2 = LinearShapes(1, 48, 128, 64, 4, bf16, True, correct=False, conv_bias=True)  # Granite-4-H-Tiny's
    with compile_only(arch, lambda name, key, compile: found.append(measure(arch, name, compile))):
        gpu.trace(mamba2, runs=True)
        gpu.trace_step(mamba2)
        conv_kernels.trace(3328, 4, bf16, runs=True, trained=True, biased=True)
    assert len(found) == 24 + 14
    for binary in found:
        assert_fits(binary, CHIPS[arch])


def test_what_kernels_take(monkeypatch):
    """No kernel is used, or compiled ahead, on a GPU on which none was measured."""
    shapes = LinearShapes(16, 32, 128, 128, 4, bf16, True)
    monkeypatch.setattr(gpu, "device_facts", lambda device: ("cuda:90", 132, True))
    monkeypatch.setattr(gpu, "MEASURED", frozenset())
    with compile_only("cuda:90", lambda name, key, compile: pytest.fail(name)):
        for run, *args in (*gpu.of_linear(shapes), *short_conv.of_linear(shapes)):
            run(*args)
    assert not gpu.measured(torch.device("cuda"))
    monkeypatch.setattr(gpu, "MEASURED", {"cuda:90"})
    assert gpu.measured(torch.device("cuda")) and not gpu.measured(torch.device("cpu"))
    assert gpu.fits(128, 128, True, True) and not gpu.fits(128, 128, False, True)
    assert gpu.fits(128, 64, True, False) and not gpu.fits(24, 40, True, True)
    assert [gpu.padded(n) for n in (6, 16, 24, 128)] == [16, 16, 32, 128]
    traced = list(gpu.of_linear(shapes))
    assert [runs for _, _, runs in traced] == [False, True]
