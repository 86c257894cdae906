"""The chunked cross-entropy against F.cross_entropy, and what it never allocates.

next: tests/moe/test_router.py
"""

import pytest
import torch
import torch.nn.functional as F
from held import MostHeld
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tmoe import Transformer
from tmoe.config.model import ModelConfig, MoEConfig
from tmoe.model import loss as loss_module
from tmoe.model.loss import cross_entropy_sum


def batch(T, D, V, dtype=torch.float64, ignored=0.2):
    h = torch.randn(T, D, dtype=dtype)
    weight = torch.randn(V, D, dtype=dtype) / D**0.5
    targets = torch.randint(V, (T,))
    targets[torch.rand(T) < ignored] = -100
    return h, weight, targets


def reference(h, weight, targets, scale):
    """Value and gradients of scale * sum of losses, in fp64."""
    h, weight = (t.detach().double().requires_grad_() for t in (h, weight))
    loss = F.cross_entropy(h @ weight.T, targets, reduction="sum")
    return loss, *torch.autograd.grad(scale * loss, (h, weight))


def far(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300)).item()


class LargestOutput(TorchDispatchMode):
    """Remembers the most elements that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [
            t.untyped_storage().nbytes() // t.element_size()
            for t in tree_leaves(out)
            if isinstance(t, torch.Tensor)
        ]
        self.numel = max([self.numel, *sizes])
        return out


@pytest.mark.parametrize("rows", [1, 3, 7, 23, 100])  # borders inside, at the end of and beyond T = 23
def test_value_and_gradients_at_any_chunk_border(monkeypatch, rows):
    h, weight, targets = batch(T=23, D=8, V=17)
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", rows * 17 + 5)
    h.requires_grad_(), weight.requires_grad_()
    loss = cross_entropy_sum(h, weight, targets)
    assert loss.dtype == torch.float32 and loss.dim() == 0
    grad_h, grad_w = torch.autograd.grad(0.37 * loss, (h, weight))
    want, want_h, want_w = reference(h, weight, targets, 0.37)
    # softmax is fp32 by contract: 6e-8 a logit, whatever the type of h
    assert far(loss, want) < 1e-6 and far(grad_h, want_h) < 1e-6 and far(grad_w, want_w) < 1e-6
    assert (grad_h[targets == -100] == 0).all()


def test_large_logits_stay_finite():
    h, weight, targets = batch(T=11, D=4, V=9, ignored=0)
    h = (h * 1e3).float().requires_grad_()
    loss = cross_entropy_sum(h, weight.float(), targets)
    loss.backward()
    want, want_h, _ = reference(h, weight.float(), targets, 1.0)
    assert far(loss, want) < 1e-5 and far(h.grad, want_h) < 1e-4


def test_bf16_inputs(monkeypatch):
    """bf16 h and W: logits are rounded once (2^-9 relative).

    So the loss is off by far less than a logit's rounding.
    """
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", 512 * 100)
    h, weight, targets = batch(T=700, D=64, V=512, dtype=torch.bfloat16)
    h.requires_grad_(), weight.requires_grad_()
    loss = cross_entropy_sum(h, weight, targets)
    grad_h, grad_w = torch.autograd.grad(loss / 700, (h, weight))
    assert grad_h.dtype == grad_w.dtype == torch.bfloat16
    want, want_h, want_w = reference(h, weight, targets, 1 / 700)
    assert far(loss, want) < 2e-4
    # three roundings of 2^-9 at most on the way to a gradient, none of them repeated over the seven chunks
    assert far(grad_h, want_h) < 6e-3 and far(grad_w, want_w) < 6e-3


def test_head_gradient_accumulates_in_fp32(monkeypatch):
    """512 chunks of one row, each of which adds about the same.

    A bf16 sum would stop growing at 256 times a term.
    """
    h = torch.ones(512, 1, dtype=torch.bfloat16)
    weight = torch.zeros(4, 1, dtype=torch.bfloat16, requires_grad=True)
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", 4)
    cross_entropy_sum(h, weight, torch.zeros(512, dtype=torch.long)).backward()
    torch.testing.assert_close(weight.grad.float().flatten(), 512 * torch.tensor([-0.75, 0.25, 0.25, 0.25]))


def test_no_gradient_is_scaled_by_a_rounded_number():
    """1/1539 in bf16 is 0.2% off, by the same amount for every token of a step."""
    h, weight, targets = batch(T=1539, D=32, V=50)
    sides = [t.bfloat16().requires_grad_() for t in (h, weight)]
    cross_entropy_sum(*sides, targets).mul(1 / 1539).backward()
    _, *exact = reference(*sides, targets, 1 / 1539)
    for got, want in zip(sides, exact, strict=True):
        assert (got.grad.double() * want).sum() / want.square().sum() == pytest.approx(1, abs=5e-4)


@pytest.mark.parametrize("T", [0, 5])
def test_nothing_to_predict(T):
    h, weight, _ = batch(T, D=3, V=6, dtype=torch.float32)
    h.requires_grad_(), weight.requires_grad_()
    loss = cross_entropy_sum(h, weight, torch.full((T,), -100))
    loss.backward()
    assert loss.item() == 0 and h.grad.shape == (T, 3)
    assert h.grad.count_nonzero() == 0 and weight.grad.count_nonzero() == 0


def test_one_side_alone():
    h, weight, targets = batch(T=9, D=4, V=7)
    _, want_h, want_w = reference(h, weight, targets, 1.0)
    assert (
        far(torch.autograd.grad(cross_entropy_sum(h.requires_grad_(), weight, targets), h)[0], want_h) < 1e-6
    )
    h = h.detach()
    assert (
        far(torch.autograd.grad(cross_entropy_sum(h, weight.requires_grad_(), targets), weight)[0], want_w)
        < 1e-6
    )
    assert not cross_entropy_sum(h, weight.detach(), targets).requires_grad


def test_logits_of_all_tokens_never_exist():
    """At the real chunk size T x V is 39M, and the limit is 33.5M; forward and backward both."""
    T, D, V = 600, 2, 65536
    h, weight, targets = batch(T, D, V, dtype=torch.float32)
    h.requires_grad_(), weight.requires_grad_()
    with LargestOutput() as seen:
        cross_entropy_sum(h, weight, targets).backward()
    assert V * D < seen.numel <= loss_module.CHUNK_LOGITS < T * V


@pytest.mark.parametrize("grad", [True, False])
# a chunk is more than the head's gradient, and less
@pytest.mark.parametrize(("D", "rows"), [(4, 100), (200, 10)])
def test_one_chunk_of_logits_and_one_gradient_of_the_head_are_held(monkeypatch, grad, D, rows):
    V, T = 1000, 4 * rows
    h, weight, targets = batch(T, D, V, dtype=torch.float32)
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", rows * V)
    with MostHeld(h, weight, targets) as seen:
        loss_module.loss_and_gradients(h, weight, targets, grad, grad)
    want = rows * V + (V * D + T * D if grad else 0)
    assert 4 * want <= seen.bytes < 4 * (want + 0.1 * max(rows * V, V * D))


@pytest.mark.parametrize("needs_w", [True, False])
def test_a_compilers_loss_takes_a_head_that_lies_by_columns(needs_w):
    h, weight, targets = batch(T=6, D=8, V=17, dtype=torch.float32)
    weight = weight.t().contiguous().t()
    given = [t.clone().requires_grad_() for t in (h, weight)] if needs_w else [h.requires_grad_(), weight]
    half = torch.compile(lambda *given: cross_entropy_sum(*given) * 0.5, fullgraph=True)(*given, targets)
    grads = torch.autograd.grad(half, given[: 1 + needs_w])
    for got, want in zip((2 * half, *grads), reference(h, weight, targets, 0.5), strict=False):
        assert far(got, want) < 1e-6


def test_without_gradients_none_are_made(monkeypatch):
    """Validation holds no fp32 gradient of the head, and nothing larger than a chunk of logits."""
    T, D, V = 6, 50, 40
    h, weight, targets = batch(T, D, V, dtype=torch.float32)
    want = cross_entropy_sum(h, weight, targets)
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", 2 * V)
    for t in (h, weight):
        t.requires_grad_()
    with torch.no_grad(), LargestOutput() as seen:
        loss = cross_entropy_sum(h, weight, targets)
    torch.testing.assert_close(loss, want)
    # transposing or detaching the head returns the head itself, already there
    assert seen.numel <= max(2 * V, V * D) and not loss.requires_grad
    calls = count_products(h, weight, targets)
    assert calls == {False: 3, True: 9}  # a product a chunk, against three with both gradients


def count_products(h, weight, targets):
    class Products(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default)
            return func(*args, **(kwargs or {}))

    calls = {}
    for grad in (False, True):
        with torch.set_grad_enabled(grad), Products() as products:
            cross_entropy_sum(h, weight, targets)
        calls[grad] = products.seen
    return calls


def test_wrong_shapes_are_named():
    h, weight, targets = batch(T=4, D=3, V=5)
    with pytest.raises(ValueError, match=r"targets: shape \(3,\) must be \(4,\)"):
        cross_entropy_sum(h, weight, targets[:3])


@pytest.mark.parametrize("scaled", [True, False])
def test_a_second_derivative_is_refused(scaled):
    h, weight, targets = batch(7, 8, 11)
    loss = cross_entropy_sum(h.requires_grad_(), weight, targets)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss.square() if scaled else loss, h, create_graph=True)


def test_under_autocast_products_are_in_its_type():
    """As F.linear and F.cross_entropy: logits of rounded operands, gradients in the operands' own types."""
    h, weight, targets = (t.float() if t.is_floating_point() else t for t in batch(T=23, D=8, V=17))
    h.requires_grad_(), weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy_sum(h, weight, targets)
    grads = torch.autograd.grad(loss, (h, weight))
    want = cross_entropy_sum(h.bfloat16(), weight.bfloat16(), targets)
    wants = torch.autograd.grad(want, (h, weight))
    assert torch.equal(loss, want) and all(torch.equal(a, b) for a, b in zip(grads, wants, strict=True))
    assert [g.dtype for g in grads] == [torch.float32] * 2
    assert far(loss, reference(h, weight, targets, 1.0)[0]) < 1e-2


def test_targets_with_strides_and_elsewhere():
    """What a kernel reads by address.

    A column of a matrix counts as its elements do; another device's memory is refused.
    """
    h, weight, targets = batch(T=23, D=8, V=17)
    column = torch.stack([targets.roll(3), targets], 1)[:, 1]
    seen = []
    real = loss_module.softmax_and_gradient
    loss_module.softmax_and_gradient = lambda logits, t, *rest: (
        seen.append(t.stride()) or real(logits, t, *rest)
    )
    try:
        assert torch.equal(cross_entropy_sum(h, weight, column), cross_entropy_sum(h, weight, targets))
    finally:
        loss_module.softmax_and_gradient = real
    assert seen == [(1,), (1,)]
    with pytest.raises(ValueError, match="targets: on meta, must be on cpu"):
        cross_entropy_sum(h, weight, targets.to("meta"))


@pytest.mark.parametrize("frozen", [None, "h", "weight", "both"])
def test_compiled_whole_it_is_one_operator(monkeypatch, frozen):
    """However many chunks there are, and whichever side needs no gradient."""
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", 5 * 17)
    h, weight, targets = batch(T=23, D=8, V=17, dtype=torch.float32)
    wanted = [
        t.requires_grad_() for name, t in (("h", h), ("weight", weight)) if frozen not in (name, "both")
    ]
    called = []

    def counting(graph, args):
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    def half(*sides):
        return cross_entropy_sum(*sides).mul(0.5)

    want = half(h, weight, targets)
    for backend in (counting, "inductor"):
        got = torch.compile(half, fullgraph=True, backend=backend)(h, weight, targets)
        assert got.requires_grad == (frozen != "both") and torch.equal(got, want)
        if wanted:
            pairs = zip(
                torch.autograd.grad(got, wanted),
                torch.autograd.grad(want, wanted, retain_graph=True),
                strict=True,
            )
            assert all(torch.equal(a, b) for a, b in pairs)
    assert sum("cross_entropy" in name for name in called) == 1 and len(called) < 5


def test_the_operator_is_registered_as_torch_asks():
    h, weight, targets = batch(T=5, D=8, V=17, dtype=torch.float32)
    for needs in ((True, True), (False, True), (False, False)):
        sides = h.clone().requires_grad_(needs[0]), weight.clone().requires_grad_(needs[1])
        torch.library.opcheck(torch.ops.tmoe.cross_entropy.default, (*sides, targets, *needs))


@pytest.mark.slow
def test_a_whole_model_with_targets_compiles_to_one_graph():
    cfg = ModelConfig(
        layers=2, dim=32, heads=2, kv_heads=1, vocab=50, moe=MoEConfig(experts=4, top_k=2, ffn_dim=16)
    )
    model = Transformer(cfg)
    model.init_weights(0)
    tokens = torch.randint(50, (2, 9))
    runs = []
    for run in (model, torch.compile(model, fullgraph=True)):
        loss = run(tokens[:, :-1], tokens[:, 1:])
        runs.append([loss, *torch.autograd.grad(loss, [p for p in model.parameters()])])
    assert all(far(a, b) < 1e-5 for a, b in zip(*runs, strict=True))
