"""Log-probs and losses of tokens on a GPU: against fp64, and the memory that they take at full size.

next: test_logprob_kernels.py
"""

import pytest
import torch

from tmoe import ops
from tmoe.config.model import IGNORE
from tmoe.ops import reference
from tmoe.ops.loss import logprob

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
GIB = 2**30


def far(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300)).item()


def batch(T, D, V, dtype):
    h = torch.randn(T, D, device=CUDA, dtype=dtype)
    w = (torch.randn(V, D, device=CUDA) / D**0.5).to(dtype)
    targets = torch.randint(V, (T,), device=CUDA)
    targets[::5] = IGNORE
    return h.requires_grad_(), w.requires_grad_(), targets


def dapo(logp, old, advantage):
    ratio = (logp - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)


@pytest.mark.parametrize(
    ("T", "D", "V"), [(300, 64, 512), (257, 128, 50304), (33, 64, 1001), (1, 64, 7), (0, 64, 32)]
)
@pytest.mark.parametrize(
    ("dtype", "fp32"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_both_are_their_definition(T, D, V, dtype, fp32, monkeypatch):
    monkeypatch.setattr(logprob, "CHUNK_BYTES", 128 * 4 * V)
    h, w, targets = batch(T, D, V, dtype)
    exact = [t.detach().double().requires_grad_() for t in (h, w)]
    f = lambda logp, H, x: (logp * x).square() - 0.1 * H  # noqa: E731
    x = torch.rand(T, device=CUDA)
    got = ops.logprobs(h, w, targets, 0.7, entropy=True, fp32_logits=fp32)
    want = reference.logprobs(*exact, targets, 0.7)
    fused = ops.token_loss(h, w, targets, f, (x,), 0.7, entropy=True, fp32_logits=fp32).loss
    plain = f(*want, x.double()).where(targets != IGNORE, 0.0).sum()
    limit = 1e-5 if dtype == torch.float32 else 6e-3
    pairs = [*zip(got, want, strict=True), (fused, plain)]
    wants = torch.autograd.grad(0.37 * plain, exact)
    for loss in (fused, f(*got, x).where(targets != IGNORE, 0.0).sum()):
        pairs += zip(torch.autograd.grad(0.37 * loss, (h, w)), wants, strict=True)
    assert all(far(a, b) < limit for a, b in pairs)
    if fp32:
        assert all(far(a, b) < 1e-5 for a, b in pairs[:3])


def test_nothing_waits_for_the_host():
    h, w, targets = batch(300, 64, 512, torch.bfloat16)
    old = torch.randn(2, 300, device=CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            logp, H = ops.logprobs(h, w, targets, entropy=True)
            (logp.square() + H).sum().backward()
            ops.token_loss(h, w, targets, dapo, tuple(old)).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.whole_gpu
@pytest.mark.parametrize("sequences", [8, 32, 256])
def test_extra_memory_at_full_size_is_one_chunk(sequences):
    """At most 0.3 GiB beside what is given and, with gradients, what is made: at any number of sequences."""
    T, D, V = 512 * sequences, 2048, 151936
    h, w, targets = batch(T, D, V, torch.bfloat16)
    old = [torch.full((T,), -12.0, device=CUDA), torch.randn(T, device=CUDA)]

    def extra(run):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / GIB

    few = h.detach()[:64].requires_grad_(), w, targets[:64]  # cuBLAS takes its workspace at the first call
    ops.token_loss(*few, dapo, [t[:64] for t in old]).loss.backward()
    ops.logprobs(*few, entropy=True)[0].sum().backward()
    w.grad = None
    made = (T * D * 2 + V * D * 4) / GIB  # dh, and dW's sum in fp32
    rounded = V * D * 2 / GIB  # dW in bf16
    with torch.no_grad():
        assert extra(lambda: ops.logprobs(h, w, targets, entropy=True)) <= 0.3
    found = []
    assert extra(lambda: found.append(ops.token_loss(h, w, targets, dapo, old).loss)) <= made + 0.3
    assert extra(lambda: torch.autograd.grad(found.pop(), (h, w))) <= rounded + 0.01
    logp = ops.logprobs(h, w, targets)
    most = made + max(0.3, rounded) + 0.01
    assert extra(lambda: torch.autograd.grad(dapo(logp, *old).sum(), (h, w))) <= most
