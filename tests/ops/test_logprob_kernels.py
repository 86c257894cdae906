"""The kernels of log-probs in Triton's interpreter, and compiled for three chips.

next: tests/model/test_loss.py
"""

import os
from dataclasses import replace

import forked
import pytest
import torch
from chips import CHIPS, assert_fits, measure
from tiers import slow_but

from tmoe import ops
from tmoe.commands.warmup import traces
from tmoe.config.model import IGNORE
from tmoe.config.presets import presets
from tmoe.ops import reference
from tmoe.ops.launch.kernel_launch import compile_only
from tmoe.ops.loss import logprob
from tmoe.ops.loss import logprob_kernels as kernels

INTERPRETED = "TRITON_INTERPRET" in os.environ  # read where kernels are defined
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs inside test_in_the_interpreter")
compiled = pytest.mark.skipif(INTERPRETED, reason="compiles")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="starts the others")
def test_in_the_interpreter():
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", __file__]
    ran = forked.run(command, env=os.environ | dict(TRITON_INTERPRET="1"))
    assert ran.returncode == 0 and "22 passed" in ran.stdout, ran.stdout[-4000:] + ran.stderr[-2000:]


def block(V, W=None, dtype=torch.float32):
    """Five rows of logits, of which one is to be ignored, and gradients by its results."""
    draw = torch.Generator().manual_seed(V)
    logits = torch.randn(5, V if W is None else W, generator=draw) * 4
    logits[:, V:] = 100.0
    targets = torch.tensor([0, V - 1, IGNORE, V // 2, 7])
    return logits.to(dtype), targets, *torch.randn(2, 5, generator=draw)


def definition(logits, targets, V, scale, by):
    """(log-prob, entropy, gradient by all logits) in fp64; the head is the unit matrix."""
    x = logits.double().requires_grad_()
    logp, H = reference.logprobs(x[:, :V], torch.eye(V, dtype=torch.float64), targets, 1 / scale)
    loss = sum((g.double() * t).sum() for g, t in zip(by, (logp, H), strict=False))
    return logp.detach(), H.detach(), torch.autograd.grad(loss, x)[0]


@interpreted
@pytest.mark.parametrize(("V", "W"), [(50, 50), (4096, 4096), (9001, 9004)])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1.7])
def test_kernels_are_the_definition(V, W, entropy, scale):
    logits, targets, *by = block(V, W)
    if not entropy:
        by = by[:1]
    want, wanted_H, wanted = definition(logits, targets, V, scale, by)
    logp, lse, H = kernels.measure(logits, targets, V, IGNORE, scale, entropy)
    torch.testing.assert_close(logp.double(), want, rtol=1e-5, atol=1e-5)
    assert len(H) == (5 if entropy else 0)
    if entropy:
        torch.testing.assert_close(H.double(), wanted_H, rtol=1e-5, atol=1e-5)
    got = kernels.gradient(
        logits, targets, V, IGNORE, scale, (lse, H), (by[0], by[1] if entropy else None), torch.float32
    )
    assert got is logits and (got[:, V:] == 0).all() and (got[2] == 0).all()
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_may_have_a_type_of_its_own(dtype):
    """fp32 logits of bf16 operands keep them; logits of the gradient's own type become it."""
    logits, targets, *by = block(50, dtype=dtype)
    before = logits.clone()
    _, _, want = definition(logits, targets, 50, 1.0, by)
    _, lse, H = kernels.measure(logits, targets, 50, IGNORE, 1.0, True)
    got = kernels.gradient(logits, targets, 50, IGNORE, 1.0, (lse, H), tuple(by), torch.bfloat16)
    assert got.dtype == torch.bfloat16 and (got is logits) == (dtype == torch.bfloat16)
    assert dtype == torch.bfloat16 or torch.equal(logits, before)
    # the interpreter cuts where a GPU rounds
    torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=1e-6)


@interpreted
@pytest.mark.parametrize("masked", [slice(0, 4096), slice(0, 4099), slice(4096, None)], ids=str)
def test_logits_of_minus_infinity_have_no_share(masked):
    """A whole block of them, first or last: 0 ln 0 is 0, and no subtraction has infinity on both sides."""
    V = 4104
    logits = torch.randn(3, V)
    targets = torch.tensor([4103, 0, 4100])
    logits[:, masked] = float("-inf")
    logits[1, 0] = 1.0
    logits[:2, 4103] = logits[2, 4100] = 0.5
    left = logits.isfinite()
    low = logits.where(left, -1e4)  # e^-1e4 is 0 as well
    by = torch.randn(2, 3)
    want, wanted_H, wanted = definition(low, targets, V, 1.0, by)
    logp, lse, H = kernels.measure(logits, targets, V, IGNORE, 1.0, True)
    torch.testing.assert_close(torch.stack([logp, H]).double(), torch.stack([want, wanted_H]))
    got = kernels.gradient(logits, targets, V, IGNORE, 1.0, (lse, H), tuple(by), torch.float32)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)


@interpreted
def test_a_target_outside_of_the_vocabulary_is_nan_and_others_stay_bitwise():
    """It is not a neighbouring row's logit, nor what lies around the logits."""
    targets = torch.tensor([-1, 7, 50, -101, IGNORE, 2**40, 49])
    outside = torch.tensor([0, 2, 3, 5])
    inside = targets.clone()
    inside[outside] = 3
    logits = torch.randn(7, 50)
    by = torch.randn(2, 7)
    found = []
    for t in (targets, inside):
        x = logits.clone()
        logp, lse, H = kernels.measure(x, t, 50, IGNORE, 1.0, True)
        kernels.gradient(x, t, 50, IGNORE, 1.0, (lse, H), tuple(by), torch.float32)
        found.append((logp, x))
    for got, want in zip(*found, strict=True):
        want[outside] = float("nan")
        assert torch.equal(got.nan_to_num(7), want.nan_to_num(7))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide", [True, False])
def test_a_gpus_way_with_an_odd_vocabulary(dtype, wide, monkeypatch):
    """Rows of logits that begin at multiples of 16 bytes, in chunks, of which the last is shorter."""
    T, D, V = 23, 16, 51
    h, w = (torch.randn(n, D).to(dtype) * 0.5 for n in (T, V))
    targets = torch.randint(V, (T,))
    targets[::5] = IGNORE
    f = lambda logp, H: (logp - 0.1 * H).square()  # noqa: E731
    given = [t.clone().requires_grad_() for t in (h, w)]

    def run():
        logp, H = ops.logprobs(*given, targets, 0.8, entropy=True, fp32_logits=wide)
        fused = ops.token_loss(*given, targets, f, (), 0.8, entropy=True, fp32_logits=wide)
        both = torch.autograd.grad(fused.loss, given), torch.autograd.grad(f(logp, H).sum(), given)
        return [logp.detach(), H.detach(), fused.logp_T, fused.loss.detach(), *both[0], *both[1]]

    want = run()
    seen = []

    def measured(self, logits, at, entropy):
        seen.append(logits.shape)
        return kernels.measure(logits, self.targets[at], self.V, IGNORE, self.scale, entropy)

    def gradient(self, logits, at, found, by):
        return kernels.gradient(logits, self.targets[at], self.V, IGNORE, self.scale, found, by, self.h.dtype)

    width = {torch.float32: 52, torch.bfloat16: 56}[dtype]
    monkeypatch.setattr(logprob._Chunks, "measure", measured)
    monkeypatch.setattr(logprob._Chunks, "gradient", gradient)
    monkeypatch.setattr(logprob, "CHUNK_BYTES", 8 * width * 6)
    monkeypatch.setattr(logprob, "widened", lambda w: torch.cat([w, w.new_zeros(width - V, D)]))
    got = run()
    assert (7, width) in seen and len(set(seen)) > 1
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        # the interpreter cuts where a GPU rounds
        assert (a - b).norm() < (1e-5 if dtype == torch.float32 else 2**-6) * b.norm()


@compiled
@pytest.mark.parametrize("arch", slow_but(["cuda:90"], CHIPS))
def test_the_kernels_fit(arch):
    found = []
    with compile_only(arch, lambda name, key, compile: found.append(measure(arch, name, compile))):
        for dtype in (torch.bfloat16, torch.float32):
            kernels.trace(50304, IGNORE, dtype)
    assert len(found) == 12
    for binary in found:
        assert_fits(binary, CHIPS[arch])


@compiled
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_warm_up_knows_what_is_launched(dtype):
    tiny = presets()["tiny"]
    sizes = dict(train=replace(tiny.train, dtype=dtype), model=replace(tiny.model, vocab=50304))
    cfg = replace(tiny, task="preference", **sizes)
    tensor = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]

    def launched(what):
        found = {}
        with compile_only("cuda:90", lambda name, key, compile: found.setdefault(key, name)):
            what()
        return found

    def step():
        targets = torch.empty(8, dtype=torch.int64, device="meta")
        for of in (tensor, torch.float32):
            logits = torch.empty(8, 50304, dtype=of, device="meta")
            for entropy, temperature in ((True, 1.0), (False, 0.6)):
                given = logits, targets, 50304, IGNORE, 1 / temperature
                logp, lse, H = kernels.measure(*given, entropy)
                kernels.gradient(*given, (lse, H), (logp, H if entropy else None), tensor)

    wanted = launched(step)
    assert set(wanted.values()) == {"logprob_kernel", "logprob_gradient_kernel"}
    assert len(wanted) == (8 if dtype == "bf16" else 4)
    assert not set(wanted) - set(launched(lambda: [trace(*args) for trace, *args in traces(cfg)]))
