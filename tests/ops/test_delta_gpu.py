"""The delta rule's kernels on a GPU: against fp64, with poisoned memory, and the same bits each time.

next: tests/ops/test_delta_kernels.py
"""

import pytest
import torch
import torch.nn.functional as F
from rounded_products import RoundedProducts

from tmoe.ops import reference
from tmoe.ops.delta import gpu, short_conv
from tmoe.ops.delta.rule import delta_rule, delta_rule_step, plain, plain_back
from tmoe.ops.delta.runs import runs_of

pytestmark = pytest.mark.gpu
bf16 = torch.bfloat16
WIDTHS = [(correct, *heads) for correct, pairs in gpu.HEADS.items() for heads in sorted(pairs)]
# H and G of published models, whole and with tp, are numbers in the compiled kernels
PUBLISHED = [
    (True, 32, 16, 128, 128),  # Qwen3-Next, Qwen3.5
    (True, 16, 8, 128, 128),
    (True, 8, 4, 128, 128),
    (False, 64, 8, 128, 64),  # Nemotron-3-Nano
    (False, 32, 4, 128, 64),
    (False, 48, 1, 128, 64),  # Granite-4-H
    (False, 128, 1, 128, 64),
]
LENGTHS = [[300], [70, 1, 129, 200]]
CASES = [  # correct, H, G, K, V, lengths of documents, decay
    *((*heads, lengths, 0.1) for heads in PUBLISHED for lengths in LENGTHS),
    *((correct, 4, 2, K, V, lengths, 1.0) for correct, K, V in WIDTHS for lengths in LENGTHS),
    *((correct, 2, 1, K, V, [333], decay) for correct, K, V in WIDTHS for decay in (8.0, 0.01)),
]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    """The kernels are used on this GPU, also before they are measured."""
    monkeypatch.setattr(gpu, "MEASURED", {gpu._arch(torch.device("cuda"))})


def inputs(H, G, K, V, lengths, decay, dtype=bf16):
    gen = torch.Generator("cuda").manual_seed(0)

    def r(*shape):
        return torch.randn(1, sum(lengths), *shape, generator=gen, dtype=torch.float64, device="cuda")

    q, k = F.normalize(r(G, K), dim=-1), F.normalize(r(G, K), dim=-1)
    made = [q.to(dtype), k.to(dtype), r(H, V).to(dtype), (-decay * F.softplus(r(H))).float()]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].cuda()
    run = runs_of(documents, None, 0).number_BS if len(lengths) > 1 else None
    return [*made, r(H).sigmoid().float()], run


def far(a, b) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_errors_are_within_twice_those_of_the_plain_form(case, monkeypatch):
    """Outputs and all gradients, 50 times with the same bits; every buffer begins as NaN.

    The plain form's products take operands of bf16, as the kernels' do; its errors are then 2e-3 to 5e-3, so
    the bar finds a product with one operand of less precision, or a missing term.
    """
    correct, *sizes, lengths, _ = case
    given, run = inputs(*case[1:])
    assert gpu.fits(*sizes[2:], True, correct)
    exact = [t.double().requires_grad_() for t in given]
    parts = zip(*(t.split(lengths, 1) for t in exact), strict=True)
    want = torch.cat([reference.delta_rule(*part, correct) for part in parts], 1)
    weight = torch.randn(want.shape, device="cuda").to(bf16)
    want_g = torch.autograd.grad(want, exact, weight.double())
    with torch.no_grad(), RoundedProducts():
        twin = plain(*given, run, correct), *plain_back(weight, tuple(given), run, correct)
    empty = gpu.empty

    def poisoned(*args):
        t = empty(*args)
        return t.fill_(float("nan") if t.is_floating_point() else 77)

    monkeypatch.setattr(gpu, "empty", poisoned)
    leaves = [t.requires_grad_() for t in given]
    first = None
    for _ in range(50):
        o = delta_rule(*leaves, run, correct)
        found = o.detach(), *torch.autograd.grad(o, leaves, weight)
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
    for name, got, plain_one, exactly in zip(
        ("o", "q", "k", "v", "g", "beta"), first, twin, (want.detach(), *want_g), strict=True
    ):
        error, bar = far(got, exactly), far(plain_one, exactly)
        assert error <= 2 * bar and bar < 8e-3, (name, error, bar)


def test_what_is_not_finite_stays_in_its_document():
    given, run = inputs(2, 1, 64, 64, [50, 60, 40], 0.1)
    want = delta_rule(*given, run)
    given[2][0, 70, 0, 3] = float("nan")
    got = delta_rule(*given, run)
    assert got[0, 70:110, 0].isnan().all()
    clean = ~got.isnan()
    assert torch.equal(got[clean], want[clean]) and (~clean).sum() == 40 * 64


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize(
    ("H", "G", "K", "V"), [(32, 16, 128, 128), (48, 1, 128, 64), (4, 2, 24, 40), (2, 1, 256, 256)]
)
def test_one_token(H, G, K, V, correct):
    """A step of 70 sequences with states against fp64; heads of any width."""
    given, _ = inputs(H, G, K, V, [70], 0.1)
    given = [t[0, :, None].contiguous() for t in given]
    state = torch.randn(70, H, K, V, device="cuda")
    want = state.double()
    o = delta_rule_step(tuple(t.double() for t in given), want, correct)
    assert far(delta_rule_step(tuple(given), state, correct), o) < 4e-3 and far(state, want) < 1e-6


@pytest.mark.parametrize("dtype", [bf16, torch.float16, torch.float32])
@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("X", [8192, 81])
def test_the_convolution(X, runs, dtype):
    torch.manual_seed(0)
    wide, weight = torch.randn(2, 300, X + 9, device="cuda").to(dtype), torch.randn(X, 4, device="cuda")
    bias = torch.randn(X, device="cuda") if runs else None
    u, dy = wide[:, :, 3 : 3 + X], torch.randn(2, 300, X, device="cuda").to(dtype)
    documents = (torch.arange(600, device="cuda") // 23).view(2, 300)
    tables = runs_of(documents, torch.zeros_like(documents, dtype=torch.bool), 3) if runs else None
    back, ahead = (tables.back_BSJ, tables.ahead_BSJ) if tables else (None, None)
    exact = short_conv.forward(u.double(), weight.double(), bias, back, ahead)
    exact_g = short_conv.backward(dy.double(), u.double(), weight.double(), bias, back, ahead)
    found = (
        short_conv.forward_on_gpu(u, weight, bias, back, ahead),
        *short_conv.backward_on_gpu(dy, u, weight, bias, back, ahead),
    )
    for got, want in zip(found, (exact, *exact_g), strict=True):
        assert want is None or far(got, want) < (2e-6 if dtype == torch.float32 else 4e-3)
