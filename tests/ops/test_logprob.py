"""Log-probs and losses of tokens against their definition, and what they never hold.

next: test_logprob_kernels.py
"""

import pytest
import torch
from held import MostHeld
from tiers import slow_but
from torch.utils._python_dispatch import TorchDispatchMode

from tmoe import ops
from tmoe.config.model import IGNORE
from tmoe.ops import reference
from tmoe.ops.loss import logprob


def batch(T=23, D=8, V=17, dtype=torch.float64, ignored=0.2):
    draw = torch.Generator().manual_seed(T + V)
    h = torch.randn(T, D, dtype=torch.float64, generator=draw).to(dtype)
    weight = torch.randn(V, D, dtype=torch.float64, generator=draw).to(dtype)
    targets = torch.randint(V, (T,), generator=draw)
    targets[torch.rand(T, generator=draw) < ignored] = IGNORE
    return h, weight, targets


def dapo(logp, old, advantage):
    ratio = (logp - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)


def with_bonus(logp, entropy, old, advantage):
    return dapo(logp, old, advantage) - 0.1 * entropy


def extras(h, weight, targets):
    """Old log-probs near the policy's, and advantages."""
    draw = torch.Generator().manual_seed(1)
    logp, _ = reference.logprobs(h.double(), weight.double(), targets)
    old = logp + 0.3 * torch.randn(len(h), generator=draw, dtype=torch.float64)
    return [t.to(torch.promote_types(h.dtype, torch.float32)) for t in (old, old.sin())]


def far(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300)).item()


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(logprob, "CHUNK_BYTES", 4 * 17 * 8)  # 4 rows of fp64


# rows of a chunk: the largest power of two within these
@pytest.mark.parametrize("rows", [1, 7, 16, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_both_are_their_definition_at_any_chunk_border(monkeypatch, rows, temperature):
    monkeypatch.setattr(logprob, "CHUNK_BYTES", rows * 17 * 8)
    h, weight, targets = batch()
    given = [h.requires_grad_(), weight.requires_grad_()]
    old = extras(h.detach(), weight.detach(), targets)
    factors = torch.rand(2, 23, dtype=torch.float64)
    for entropy in (False, True):
        got = ops.logprobs(h, weight, targets, temperature, entropy=entropy)
        want = reference.logprobs(h, weight, targets, temperature)
        got, want = (got, want) if entropy else ((got,), want[:1])
        totals = [sum((t * f).sum() for t, f in zip(side, factors, strict=False)) for side in (got, want)]
        f = with_bonus if entropy else dapo
        fused = ops.token_loss(h, weight, targets, f, old, temperature, entropy=entropy)
        plain = reference.token_loss(h, weight, targets, f, old, temperature, entropy=entropy)
        assert all(torch.equal(t, g) for t, g in zip(fused[1:], got, strict=False))
        assert (fused.entropy_T is not None) == entropy
        pairs = [*zip(got, want, strict=True), totals, (fused.loss, plain)]
        for a, b in (totals, (0.37 * fused.loss, 0.37 * plain)):
            pairs += zip(torch.autograd.grad(a, given), torch.autograd.grad(b, given), strict=True)
        assert all(far(a, b) < 1e-12 for a, b in pairs)
        assert (got[0][targets == IGNORE] == 0).all() and (got[-1][targets == IGNORE] == 0).all()


def test_gradcheck(small_chunks):
    h, weight, targets = batch(T=7, D=3)
    given = h.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda h, w: ops.logprobs(h, w, targets, 0.7, entropy=True), given)
    old = extras(h.detach(), weight.detach(), targets)
    f = lambda *given: with_bonus(*given).square()  # noqa: E731
    fused = lambda: ops.token_loss(*given, targets, f, old, 0.7, entropy=True).loss  # noqa: E731
    # gradcheck would differentiate one loss several times
    for got, t in zip(torch.autograd.grad(fused(), given), given, strict=True):
        for i in range(t.numel()):
            sides = []
            for step in (1e-6, -1e-6):
                with torch.no_grad():
                    t.view(-1)[i] += step
                    sides.append(fused())
                    t.view(-1)[i] -= step
            assert abs((sides[0] - sides[1]) / 2e-6 - got.view(-1)[i]) < 1e-6


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_lower_types(dtype, limit, monkeypatch):
    monkeypatch.setattr(logprob, "CHUNK_BYTES", 64 * 512 * 4)
    h, weight, targets = batch(T=300, D=64, V=512, dtype=dtype)
    h, weight = h / 8, weight
    given = [h.requires_grad_(), weight.requires_grad_()]
    old = extras(h.detach(), weight.detach(), targets)
    got = ops.logprobs(h, weight, targets, entropy=True)
    exact = [t.detach().double().requires_grad_() for t in given]
    want = reference.logprobs(*exact, targets)
    assert got[0].dtype == got[1].dtype == torch.float32
    assert all(far(a, b) < limit / 2 for a, b in zip(got, want, strict=True))
    loss = ops.token_loss(*given, targets, with_bonus, old, entropy=True).loss
    plain = reference.token_loss(*exact, targets, with_bonus, [t.double() for t in old], entropy=True)
    for a, b in zip(torch.autograd.grad(loss, given), torch.autograd.grad(plain, exact), strict=True):
        assert a.dtype == dtype and far(a, b) < 2 * limit


def test_fp32_logits_are_not_rounded():
    """bf16 operands whose logits are around 20, where bf16 steps by 0.125."""
    h, weight, targets = batch(T=64, D=64, V=100, dtype=torch.bfloat16)
    h = h * 3
    want, _ = reference.logprobs(h.double(), weight.double(), targets)
    rounded, exact = (ops.logprobs(h, weight, targets, fp32_logits=wide) for wide in (False, True))
    assert (exact - want).abs().max() < 1e-4 < 0.02 < (rounded - want).abs().max()
    given = [h.requires_grad_(), weight.requires_grad_()]
    old = extras(h.detach(), weight.detach(), targets)
    grads = [
        torch.autograd.grad(ops.token_loss(*given, targets, dapo, old, fp32_logits=wide).loss, given)
        for wide in (False, True)
    ]
    exact = [t.detach().double().requires_grad_() for t in given]
    loss = reference.token_loss(*exact, targets, dapo, [t.double() for t in old])
    wants = torch.autograd.grad(loss, exact)
    for rounded, got, want in zip(*grads, wants, strict=True):
        assert far(got, want) < 6e-3 < far(rounded, want)


def test_a_vocabulary_of_any_size():
    """granite's, which no power of two divides, and one of a single token."""
    for V in (49155, 1):
        h, weight, targets = batch(T=5, D=4, V=V, dtype=torch.float32, ignored=0)
        got, want = ops.logprobs(h, weight, targets), reference.logprobs(h, weight, targets)[0]
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("T", [0, 5])
def test_nothing_to_predict(T):
    h, weight, _ = batch(T, D=3, V=6, dtype=torch.float32)
    given = [h.requires_grad_(), weight.requires_grad_()]
    nothing = torch.full((T,), IGNORE)
    logp, entropy = ops.logprobs(*given, nothing, entropy=True)
    fused = ops.token_loss(*given, nothing, lambda lp: lp.log())  # NaN in value and derivative
    for loss in ((logp + entropy).sum(), fused.loss):
        grads = torch.autograd.grad(loss, given)
        assert loss.item() == 0 and all(g.shape == t.shape for g, t in zip(grads, given, strict=True))
        assert all(g.count_nonzero() == 0 for g in grads)


class Apart(torch.autograd.Function):
    """`logprobs` without the dispatcher, below which modes see nothing."""

    @staticmethod
    def forward(ctx, h, weight, targets):
        logp, H, lse = logprob._forward(h, weight, targets, 1.0, False, False)
        ctx.save_for_backward(h, weight, targets, lse, H)
        return logp

    @staticmethod
    def backward(ctx, g):
        needs = ctx.needs_input_grad[:2]
        call = logprob.LogprobsBackward(g, g.new_empty(0), *ctx.saved_tensors, 1.0, False, *needs)
        grads = logprob._backward(call)
        return *(t if need else None for t, need in zip(grads, needs, strict=True)), None


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("frozen", "fused", "apart"), [(None, 3, 4), ("h", 2, 3), ("weight", 2, 3)])
def test_what_is_frozen_costs_no_product(frozen, fused, apart):
    """Products of 2 TVD operations each: 6 TVD for a loss at once, 8 where logits are made again."""
    h, weight, targets = batch()
    given = [t.requires_grad_() for name, t in (("h", h), ("weight", weight)) if name != frozen]
    want = torch.autograd.grad(reference.token_loss(h, weight, targets, torch.square), given)
    once = lambda: ops.token_loss(h, weight, targets, torch.square).loss  # noqa: E731
    later = lambda: Apart.apply(h, weight, targets).square().sum()  # noqa: E731
    for loss, count in ((once, fused), (later, apart)):
        with Products() as products:
            got = torch.autograd.grad(loss(), given)
        assert products.count == count
        assert all(far(a, b) < 1e-12 for a, b in zip(got, want, strict=True))
        with torch.no_grad(), Products() as products:
            assert not loss().requires_grad
        assert products.count == 1


def test_a_second_backward_is_refused():
    """The gradients were scaled where they lie."""
    h, weight, targets = batch()
    loss = ops.token_loss(h.requires_grad_(), weight, targets, torch.square).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="token_loss: was differentiated before"):
        loss.backward()


def test_a_loss_that_is_constant_has_no_gradient():
    h, weight, targets = batch()
    loss = ops.token_loss(h.requires_grad_(), weight, targets, lambda lp: torch.ones_like(lp)).loss
    assert loss == (targets != IGNORE).sum() and not torch.autograd.grad(loss, h)[0].any()


@pytest.mark.parametrize("sequences", slow_but([8, 32], [8, 32, 256]))
@pytest.mark.parametrize("fused", [True, False])
def test_what_is_held_does_not_grow_with_the_sequences(monkeypatch, sequences, fused):
    """Beyond h's gradient and some numbers a token there are a chunk's logits and the head's gradient."""
    T, D, V, rows = 512 * sequences, 2, 1024, 256
    monkeypatch.setattr(logprob, "CHUNK_BYTES", rows * V * 4)
    h, weight, targets = batch(T, D, V, dtype=torch.float32)
    given = [h.requires_grad_(), weight.requires_grad_()]
    old = extras(h[:1].detach(), weight.detach(), targets[:1])
    old = [t.expand(T) for t in old]
    with MostHeld(*given, targets, *old) as seen:
        if fused:
            torch.autograd.grad(ops.token_loss(*given, targets, dapo, old).loss, given)
        else:
            torch.autograd.grad(dapo(Apart.apply(*given, targets), *old).sum(), given)
    a_token = 4 * (2 * D + 30)  # h's gradient twice, vectors of dapo's forward and backward
    chunks = 5 * 4 * rows * V  # CPU code keeps logits, their softmax, the gradient
    assert seen.bytes < a_token * T + chunks + 4 * 4 * V * D < 4 * T * V


@pytest.mark.slow
def test_largest_tensor_is_a_chunk_at_the_real_size():
    """At V = 2^20 a chunk is 64 rows: 268 MB, where all 200 rows would be 839."""
    T, D, V = 200, 2, 2**20
    h, weight, targets = batch(T, D, V, dtype=torch.float32)
    with MostHeld(h, weight, targets) as seen:
        logprob._forward(h, weight, targets, 1.0, False, False)
    assert seen.bytes < 2 * logprob.CHUNK_BYTES < 4 * T * V


def test_strides_and_index_types():
    h, weight, targets = batch()
    want = ops.logprobs(h, weight, targets)
    column = torch.stack([targets.roll(3), targets], 1)[:, 1]
    for given in (column, targets.int()):
        assert torch.equal(ops.logprobs(h, weight, given), want)
    by_columns = weight.t().contiguous().t()
    got = ops.logprobs(h.t().contiguous().t().requires_grad_(), by_columns.requires_grad_(), targets)
    assert far(got, want) < 1e-14
    got.sum().backward()  # a gradient of stride 0


def test_under_autocast_products_are_in_its_type():
    h, weight, targets = batch(dtype=torch.float32)
    given = [h.requires_grad_(), weight.requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16):
        got = ops.logprobs(*given, targets)
        fused = ops.token_loss(*given, targets, torch.square).loss
    low = [t.bfloat16() for t in given]
    assert torch.equal(got, ops.logprobs(*low, targets)) and got.dtype == torch.float32
    grads = torch.autograd.grad(fused, given)
    wants = torch.autograd.grad(ops.token_loss(*low, targets, torch.square).loss, given)
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(grads, wants, strict=True))


def test_a_second_derivative_is_refused():
    h, weight, targets = batch()
    h.requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(ops.token_loss(h, weight, targets, torch.square).loss, h, create_graph=True)
    first = torch.autograd.grad(ops.logprobs(h, weight, targets).square().sum(), h, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(first[0].sum(), h)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(h=torch.ones(3, 4, 5)), r"h: got shape \(3, 4, 5\), valid is \[T, D\]"),
        (dict(weight=torch.ones(17, 9)), r"weight: got shape \(17, 9\), valid is \[V, D=8\]"),
        (dict(targets=torch.ones(3, dtype=torch.long)), r"targets: got shape \(3,\), valid is \[T=23\]"),
        (dict(targets=torch.ones(23)), "targets: got torch.float32, valid is int32 or int64"),
        (dict(targets=torch.ones(23, dtype=torch.long, device="meta")), "targets: got meta"),
        (dict(weight=torch.ones(17, 8).bfloat16()), "weight: got torch.bfloat16, valid is h's"),
        (dict(temperature=0.0), "temperature: got 0.0, valid is a number above 0"),
        (dict(temperature=True), "temperature: got True"),
        (dict(entropy=1), "entropy: got 1, valid is True or False"),
        (dict(fp32_logits="yes"), "fp32_logits: got 'yes'"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    h, weight, targets = batch(dtype=torch.float32)
    given = dict(h=h, weight=weight, targets=targets) | change
    call = [given.pop(name) for name in ("h", "weight", "targets")]
    with pytest.raises(ValueError, match=message):
        ops.logprobs(*call, **given)
    with pytest.raises(ValueError, match=message):
        ops.token_loss(*call, torch.square, **given)


def test_what_a_function_of_tokens_may_not_do_is_named():
    h, weight, targets = batch()
    with pytest.raises(ValueError, match=r"f: got shape \(\), valid is a loss for each of its tokens"):
        ops.token_loss(h, weight, targets, torch.sum)
    with pytest.raises(ValueError, match="f: got None"):
        ops.token_loss(h, weight, targets, lambda lp: None)
    with pytest.raises(ValueError, match=r"inputs\[1\]: got shape \(22,\), valid is \[T=23, ...\]"):
        ops.token_loss(h, weight, targets, dapo, (torch.ones(23), torch.ones(22)))
    with pytest.raises(ValueError, match=r"inputs\[0\]: got a tensor that requires grad"):
        ops.token_loss(h, weight, targets, torch.mul, (torch.ones(23, requires_grad=True),))


@pytest.mark.parametrize(
    ("frozen", "backend"),
    slow_but(
        [(None, "aot_eager")],
        [(frozen, how) for frozen in (None, "h", "weight") for how in ("aot_eager", "inductor")],
    ),
)
def test_compiled_whole_there_is_no_break(small_chunks, frozen, backend):
    h, weight, targets = batch(dtype=torch.float32)
    wanted = [t.requires_grad_() for name, t in (("h", h), ("weight", weight)) if name != frozen]
    old = extras(h.detach(), weight.detach(), targets)

    def loss(h, weight):
        logp, entropy = ops.logprobs(h, weight, targets, 0.6, entropy=True)
        fused, seen, _ = ops.token_loss(h, weight, targets, with_bonus, old, 0.6, entropy=True)
        return logp.square().sum() + entropy.sum() + 2 * fused + (logp - seen).sum()

    want = torch.autograd.grad(loss(h, weight), wanted)
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend=backend)(h, weight), wanted)
    assert all(far(a, b) < 1e-5 for a, b in zip(got, want, strict=True))


def test_the_ops_are_registered_as_torch_asks():
    h, weight, targets = batch(T=5, dtype=torch.float32)
    for entropy, needs in ((True, (True, True)), (False, (False, True)), (False, (False, False))):
        given = h.clone().requires_grad_(needs[0]), weight.clone().requires_grad_(needs[1])
        torch.library.opcheck(torch.ops.tmoe.logprobs.default, (*given, targets, 0.6, entropy, False))
