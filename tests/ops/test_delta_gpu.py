"""The delta rule's kernels on a GPU: against fp64, with poisoned memory, and the same bits each time.

next: tests/ops/test_delta_kernels.py
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from rounded_products import RoundedProducts

from tmoe.ops import reference
from tmoe.ops.delta import gpu
from tmoe.ops.delta.rule import delta_rule, plain, plain_back
from tmoe.ops.delta.runs import runs_of

pytestmark = pytest.mark.gpu
bf16, fp32 = torch.bfloat16, torch.float32
CASES = [  # lengths of documents, H, G, K, V, type, decay
    ([300], 4, 2, 128, 128, bf16, 0.1),
    ([70, 1, 129, 200], 4, 2, 128, 128, bf16, 0.1),
    ([64, 64], 2, 2, 64, 96, bf16, 1.0),
    ([333], 2, 1, 24, 40, bf16, 8.0),
    ([200], 2, 1, 256, 256, bf16, 0.01),
    ([5, 130], 2, 2, 32, 16, fp32, 0.3),
]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    """The kernels are used on this GPU, also before they are measured."""
    monkeypatch.setattr(gpu, "MEASURED", {gpu._arch(torch.device("cuda"))})


def inputs(lengths, H, G, K, V, dtype, decay):
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


@pytest.mark.parametrize("correct", [True, False], ids=["delta", "mamba2"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_errors_are_within_twice_those_of_the_plain_form(case, correct, monkeypatch):
    """Outputs and all gradients, 50 times with the same bits; every buffer begins as NaN.

    For bf16 the plain form's products take operands of bf16, as the kernels' do; its errors are then 2e-3 to
    5e-3, so the bar finds a product with one operand of less precision, or a missing term.
    """
    lengths, *_, dtype, _ = case
    given, run = inputs(*case)
    exact = [t.double().requires_grad_() for t in given]
    parts = zip(*(t.split(lengths, 1) for t in exact), strict=True)
    want = torch.cat([reference.delta_rule(*part, correct) for part in parts], 1)
    weight = torch.randn(want.shape, device="cuda").to(dtype)
    want_g = torch.autograd.grad(want, exact, weight.double())
    with torch.no_grad(), RoundedProducts() if dtype == bf16 else contextlib.nullcontext():
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
    least = 2e-6 if dtype == fp32 else 0.0
    for name, got, plain_one, exactly in zip(
        ("o", "q", "k", "v", "g", "beta"), first, twin, (want.detach(), *want_g), strict=True
    ):
        error, bar = far(got, exactly), far(plain_one, exactly)
        assert error <= max(2 * bar, least) and bar < 8e-3, (name, error, bar)


def test_what_is_not_finite_stays_in_its_document():
    given, run = inputs([50, 60, 40], 2, 1, 64, 64, bf16, 0.1)
    want = delta_rule(*given, run)
    given[2][0, 70, 0, 3] = float("nan")
    got = delta_rule(*given, run)
    assert got[0, 70:110, 0].isnan().all()
    clean = ~got.isnan()
    assert torch.equal(got[clean], want[clean]) and (~clean).sum() == 40 * 64
