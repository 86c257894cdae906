"""The step's own kernels in Triton's interpreter: AdamW in one pass, the loss and its gradient in place, scaling with rounding.

next: test_step_gpu.py
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tmoe.ops import adamw, cross_entropy

INTERPRETED = "TRITON_INTERPRET" in os.environ  # read where kernels are defined
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs inside test_in_the_interpreter")


@pytest.mark.skipif(INTERPRETED, reason="starts the others")
def test_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", __file__]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, env=env, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0 and "11 passed" in ran.stdout, ran.stdout[-4000:] + ran.stderr[-2000:]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


@interpreted
@pytest.mark.parametrize("finite", [1.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw(dtype, finite):
    n = 2500  # two blocks and a part
    grad = torch.randn(n).to(dtype)
    weight, mean, square = torch.randn(n), torch.randn(n), torch.rand(n)
    before = [t.clone() for t in (weight, mean, square)]
    copy, step = torch.full((n,), 7.0, dtype=torch.bfloat16), torch.tensor(3.0)
    factor = torch.tensor(0.25)
    adamw.adamw_(weight, grad, mean, square, copy, step, factor, torch.tensor(finite), 1e-2, (0.9, 0.95), 1e-8, 0.1)
    if not finite:
        assert all(torch.equal(a, b) for a, b in zip((weight, mean, square), before, strict=True))
        assert (copy == 7).all()
        return
    # Loshchilov & Hutter 2017, algorithm 2
    w, m, v, g = (t.double() for t in (*before, grad.double() * 0.25))
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    w = w * (1 - 1e-2 * 0.1) - 1e-2 * (m / (1 - 0.9**3)) / ((v / (1 - 0.95**3)).sqrt() + 1e-8)
    for got, want in zip((weight, mean, square), (w, m, v), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(copy.float(), weight, rtol=2**-7, atol=0)


@interpreted
@pytest.mark.parametrize("V", [50, 8192, 9001])
@pytest.mark.parametrize("grad", [True, False])
def test_cross_entropy(V, grad):
    logits = torch.randn(5, V) * 4
    targets = torch.tensor([0, V - 1, -100, V // 2, 7])
    before, keep = logits.clone(), targets != -100
    got = cross_entropy.cross_entropy_(logits, targets, -100, grad)
    torch.testing.assert_close(got, F.cross_entropy(before, targets, reduction="none"), rtol=1e-5, atol=1e-6)
    want = before.softmax(-1)
    want[keep, targets[keep]] -= 1
    want[~keep] = 0
    torch.testing.assert_close(logits, want if grad else before, rtol=1e-5, atol=1e-7)


@interpreted
def test_scaled():
    x = torch.randn(3, 1000)
    got = cross_entropy.scaled(x, torch.tensor(0.3), torch.bfloat16)
    torch.testing.assert_close(got.float(), x * 0.3, rtol=2**-7, atol=0)  # the interpreter cuts where a GPU rounds
