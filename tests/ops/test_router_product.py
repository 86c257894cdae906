"""The router's product out of bf16 pieces: the pieces are exact, values and gradients are compared with fp64.

And what compiling and keeping see. As a test it starts itself once in a process with TRITON_INTERPRET=1,
where triton's interpreter runs the kernel that splits.

next: tests/moe/test_router_gpu.py
"""

import os
from pathlib import Path

import forked
import pytest
import torch
import torch.nn.functional as F
from router_operands import (
    ORDERS,
    TYPES,
    assert_right,
    bf16,
    every_exponent,
    fp32,
    fp64,
    operands,
    step,
    truth,
)
from tiers import slow_but
from torch.utils.checkpoint import checkpoint

from tmoe.config.model import MoEConfig
from tmoe.moe import router as router_module
from tmoe.moe.router import Router
from tmoe.ops.launch.kernel_launch import compile_only
from tmoe.ops.router import product as module
from tmoe.ops.router.product import (
    HI,
    LO,
    MID,
    router_product,
    side_by_side,
    split_gpu,
    stacked,
    three_pieces,
)

ROOT = Path(__file__).parents[2]


def plain(x, w):
    """What the router does elsewhere."""
    return F.linear(x.float(), w.float())


def test_three_pieces_are_exact():
    a = every_exponent()
    hi, mid, lo = three_pieces(a)
    assert hi.dtype == mid.dtype == lo.dtype == bf16
    assert all(t.isfinite().all() for t in (hi, mid, lo))
    exact = a.abs() >= 2.0**-110
    total = hi.double() + mid.double() + lo.double()
    assert torch.equal(total[exact], a[exact].double()) and exact.sum() > 5e4
    assert ((total - a.double()).abs()[~exact] <= 2.0**-134).all() and (~exact).sum() > 1e3
    two = (hi.double() + mid.double() - a.double()).abs()
    plain_range = exact & (a.abs() < module.LARGEST)
    assert (two <= 2.0**-17 * a.double().abs())[plain_range].all()
    assert (two > 2.0**-19 * a.double().abs())[plain_range].any(), "two pieces are not three"


def test_infinity_and_nan_stay_in_the_first_piece():
    hi, mid, lo = three_pieces(torch.tensor([float("inf"), -float("inf"), float("nan")]))
    assert hi.tolist()[:2] == [float("inf"), -float("inf")] and hi[2].isnan()
    assert not mid.any() and not lo.any()


@pytest.mark.parametrize("shape", [(5, 3), (8, 16), (1, 61)], ids=str)
def test_where_pieces_lie(shape):
    (R, C) = shape
    a = torch.randn(shape)
    pieces = three_pieces(a)
    for order in ORDERS:
        columns, rows = (C + 7) // 8 * 8, (R + 7) // 8 * 8
        wide = side_by_side(a, order).view(R, len(order), columns)
        tall = stacked(a, order).view(len(order), rows, C)
        assert not wide[:, :, C:].any() and not tall[:, R:].any()
        for i, piece in enumerate(order):
            assert torch.equal(wide[:, i, :C], pieces[piece]) and torch.equal(tall[i, :R], pieces[piece])


@TYPES
@pytest.mark.parametrize(
    "shape", [(512, 1024, 128), (1, 16, 60), (33, 7, 5), (300, 40, 8), (64, 128, 256)], ids=str
)
def test_numbers(shape, dtype):
    x, w, g = operands(*shape, dtype)
    assert_right(step(x, w, g), x, w, g)
    assert_right(step(x, w, g, plain), x, w, g)


def test_an_fp64_weight_counts_as_fp32():
    x, w, g = operands(40, 24, 6, fp64)
    assert_right(step(x, w, g), x, w, g)


@TYPES
def test_gradients_that_cancel(dtype):
    """Experts whose rows nearly agree: 2^-10 of its terms remains of dx.

    With one piece of dlogits their rounding would remain.
    """
    x, w, g = operands(200, 64, 32, dtype)
    with torch.no_grad():
        w.copy_(torch.randn(64) + 2**-8 * torch.randn(32, 64))
    want, scale = truth(x, w, g)[1]
    assert want.abs().mean() < 2**-6 * scale.mean()
    assert_right(step(x, w, g), x, w, g)
    _, dx, _ = step(x, w, g.bfloat16().float())
    assert not ((dx.double() - want).abs() <= 2**-8 * want.abs() + 2**-16 * scale).all(), (
        "the test cannot see one piece"
    )


@pytest.mark.parametrize("power", [-80, -20, 40, 100])
def test_extreme_magnitudes(power):
    x, w, g = operands(50, 32, 12, fp32)
    with torch.no_grad():
        w.mul_(2.0**power)
        x[3], w[5], g[7] = 0, 0, 0
        g[:, 2] = 0
    g = g * 2.0 ** -min(power, 90)
    got = step(x, w, g)
    assert all(t.isfinite().all() for t in got)
    assert_right(got, x, w, g)
    assert not got[0][3].any() and not got[0][:, 5].any() and not got[1][7].any() and not got[2][2].any()


def test_what_is_not_finite_stays_so():
    x, w, g = operands(6, 16, 4, fp32)
    with torch.no_grad():
        w[1, 0], x[2, 3] = float("inf"), float("nan")
    got, want = step(x, w, g), step(x, w, g, plain)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.isfinite(), b.isfinite()) and not b.isfinite().all()


@TYPES
def test_no_tokens(dtype):
    x, w, g = operands(0, 16, 4, dtype)
    y, dx, dw = step(x, w, g)
    assert (
        y.shape == (0, 4) and y.dtype == fp32 and dx.shape == (0, 16) and not dw.any() and dw.shape == (4, 16)
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            (torch.zeros(2, 3, 4, dtype=bf16), torch.zeros(5, 4)),
            r"x: got shape \(2, 3, 4\), valid is \[T, D\]",
        ),
        ((torch.zeros(2, 4), torch.zeros(5, 4)), "x: got torch.float32, valid is torch.bfloat16"),
        (
            (torch.zeros(2, 4, dtype=bf16), torch.zeros(5, 6)),
            r"weight: got shape \(5, 6\), valid is \[E, D=4\]",
        ),
        ((torch.zeros(2, 4, dtype=bf16), torch.zeros(5, 4, dtype=torch.int8)), "weight: got torch.int8"),
    ],
)
def test_bad_input_is_named(args, message):
    with pytest.raises(ValueError, match=message):
        router_product(*args)


@TYPES
def test_the_op_is_well_formed(dtype):
    x, w, _ = operands(9, 16, 6, dtype)
    torch.library.opcheck(torch.ops.tmoe.router_product.default, (x, w))
    torch.library.opcheck(
        torch.ops.tmoe.router_product_backward.default, (torch.randn(9, 6), x.detach(), w.detach())
    )


def test_compiled_equals_eager_for_every_T():
    _, w, _ = operands(1, 16, 6, bf16)
    compiled = torch.compile(lambda x, w: router_product(x * 2, w).sigmoid(), fullgraph=True, dynamic=True)
    for i, T in enumerate((40, 33, 8, 64)):
        x, _, g = operands(T, 16, 6, bf16)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = step(x, w, g, compiled)
        want = step(x, w, g, lambda x, w: router_product(x * 2, w).sigmoid())
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [bf16, fp32], ids=["bf16", "fp32"])
def test_autocast_and_recomputation_change_nothing(dtype):
    x, w, g = operands(30, 16, 6, dtype)
    want = step(x, w, g)
    with torch.autocast("cpu", bf16):
        inside = step(x, w, g)
    again = step(x, w, g, lambda x, w: checkpoint(router_product, x, w, use_reentrant=False))
    for a, b, c in zip(want, inside, again, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@TYPES
def test_a_second_derivative_is_refused(dtype):
    """F.linear, which other devices use here, has one.

    This would leave its terms out without a word.
    """
    x, w, g = operands(30, 16, 6, dtype)
    y = router_product(x, w)
    dx, dw = torch.autograd.grad((y * y * g).sum(), (x, w), create_graph=True)
    assert torch.equal(dx, step(x, w, (2 * y * g).detach())[1])
    for grad in dx, dw:
        with pytest.raises(RuntimeError, match="no second derivative"):
            grad.float().square().sum().backward(retain_graph=True)


def every_layout(T=40, D=16, E=6):
    xs = (
        torch.randn(D, T).bfloat16().t(),
        torch.randn(1, D).bfloat16().expand(T, D),
        torch.randn(T, 2 * D).bfloat16()[:, ::2],
    )
    ws = torch.randn(E, D), torch.randn(D, E).t(), torch.randn(1, D).expand(E, D)
    return [(x, w) for x in xs for w in ws]


@pytest.mark.parametrize(("x", "w"), every_layout())
def test_any_strides_and_either_gradient_alone(x, w):
    x = x.detach().requires_grad_()
    w = w.detach().requires_grad_()
    g = torch.randn(len(x), 1).expand(-1, len(w))
    want = step(
        x.detach().contiguous().requires_grad_(), w.detach().contiguous().requires_grad_(), g.contiguous()
    )
    for got, same in zip(step(x, w, g), want, strict=True):
        torch.testing.assert_close(got, same)
    for one, other, same in ((x, w, want[1]), (w, x, want[2])):
        other.requires_grad_(False)
        (alone,) = torch.autograd.grad(router_product(x, w), one, g)
        other.requires_grad_()
        torch.testing.assert_close(alone, same)


@TYPES
def test_it_keeps_its_inputs_and_nothing_else(dtype):
    x, w, _ = operands(30, 16, 6, dtype)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        router_product(x, w)
    assert kept == [x.data_ptr(), w.data_ptr()]


# ---- in the router ----


@pytest.mark.parametrize(
    "kw", [{}, {"router_bias": True}, {"score": "sigmoid", "choice_bias": True}], ids=str
)
@pytest.mark.parametrize("dtype", [bf16, fp32], ids=["bf16", "fp32"])
def test_a_router_gives_the_same_either_way(monkeypatch, dtype, kw):
    router = Router(64, MoEConfig(experts=32, top_k=4, **kw)).to(dtype)
    with torch.no_grad():
        for p in router.parameters():
            p.normal_(0, 0.3)
    x = torch.randn(200, 64).bfloat16().requires_grad_()
    padding = torch.rand(200) < 0.3
    calls = []
    spy = lambda x, w: calls.append(x.dtype) or router_product(x, w)  # noqa: E731
    monkeypatch.setattr(router_module, "router_product", spy)

    def run():
        routing = router(x, padding)
        grads = torch.autograd.grad(routing.weights_TK.square().sum(), [x, *router.parameters()])
        return [*routing, *grads]

    want = run()
    assert not calls, "x is on the CPU"
    monkeypatch.setattr(router_module, "on_matrix_units", lambda x: x.dtype == bf16)
    got = run()
    assert calls == [bf16]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        if a.dtype == torch.int32:
            assert torch.equal(a, b)
        else:
            assert (a - b).norm() <= (1e-5 if a.dtype == fp32 else 2**-9) * b.norm()


def test_jitter_stays_fp32(monkeypatch):
    monkeypatch.setattr(router_module, "on_matrix_units", lambda x: x.dtype == bf16)
    calls = []
    monkeypatch.setattr(router_module, "router_product", lambda x, w: calls.append(1) or router_product(x, w))
    router = Router(8, MoEConfig(experts=4, top_k=2, jitter=0.1)).bfloat16()
    torch.nn.init.normal_(router.weight)
    x = torch.randn(20, 8).bfloat16()
    jittered = router.train()(x).logits_TE
    assert not calls and not torch.equal(jittered, plain(x, router.weight))
    assert torch.equal(router.eval()(x).logits_TE, router_product(x, router.weight)) and calls


# ---- the kernel ----


@pytest.mark.parametrize("arch", slow_but(["cuda:90"], ["cuda:90", "cuda:80", "hip:gfx942"]))
def test_the_kernel_compiles(monkeypatch, tmp_path, arch):
    """What `trace` names: one binary for dlogits, and one for each way that W is laid out."""
    for dtype, binaries in ((bf16, 2), (fp32, 3)):
        wanted = {}
        with compile_only(
            arch, lambda name, key, compile, wanted=wanted: wanted.setdefault((name, key), compile)
        ):
            module.trace(4096, 2048, 60, dtype)
            module.trace(512, 2048, 60, dtype)
            assert len(wanted) == binaries and {name for name, _ in wanted} == {"split_kernel"}
            assert all(compile().asm for compile in wanted.values())


def test_the_kernel_in_the_interpreter():
    ran = forked.run([__file__], env=os.environ | dict(TRITON_INTERPRET="1"))
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert ran.stdout.splitlines()[-1] == "all right"


def main():
    """The interpreter cuts fp32 off to bf16 instead of rounding.

    The pieces are others, but their sum is the number all the same.
    """
    torch.manual_seed(0)
    a = every_exponent(2**14)
    a = a[a.abs() >= 2.0**-100]  # nor does it round to bf16's subnormal numbers as a GPU does
    for R, C in [(a.numel() // 60, 60), (3, 300), (60, 61), (1, 8), (0, 8)]:
        source = a[: R * C].view(R, C)
        rows, columns = (R + 7) // 8 * 8, (C + 7) // 8 * 8
        for order in ORDERS:
            wide = torch.full((R, len(order), columns), float("nan"), dtype=bf16)
            split_gpu(source, order, wide.transpose(0, 1))
            tall = torch.full((len(order), rows, C), float("nan"), dtype=bf16)
            split_gpu(source, order, tall)
            assert not wide[:, :, C:].any() and not tall[:, R:].any()
            assert torch.equal(wide[:, :, :C].transpose(0, 1), tall[:, :R])
            last = {piece: tall[i, :R].double() for i, piece in enumerate(order)}
            if len(last) == 3:
                assert torch.equal(last[HI] + last[MID] + last[LO], source.double())
            elif set(last) == {HI, MID}:
                assert (
                    (last[HI] + last[MID] - source.double()).abs() <= 2.0**-14 * source.double().abs()
                ).all()
    odd = torch.tensor([[float("inf"), -float("inf"), float("nan"), torch.finfo(fp32).max]])
    out = torch.empty(3, 8, 4, dtype=bf16)
    split_gpu(odd, (HI, MID, LO), out)
    assert (
        out[0, 0, :2].tolist() == [float("inf"), -float("inf")]
        and out[0, 0, 2].isnan()
        and not out[1:, 0, :3].any()
    )
    assert out[:, 0, 3].double().sum() == torch.finfo(fp32).max
    half = torch.randn(8, 16).bfloat16()
    out = torch.empty(2, 8, 16, dtype=bf16)
    split_gpu(half, (HI, HI), out)
    assert torch.equal(out[0], half) and torch.equal(out[1], half)
    print("all right")


if __name__ == "__main__":
    main()
