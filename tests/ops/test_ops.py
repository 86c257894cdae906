"""moe_mlp and grouped_mm on the CPU: values and gradients against the definition, torch.compile, errors.

next: test_launch.py
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tmoe import ops
from tmoe.base.activations import ACTIVATIONS
from tmoe.ops import reference
from tmoe.ops.experts import table
from tmoe.ops.register import on_any_device

# bf16 keeps 8 bits of mantissa, fp16 11, fp32 24: a few roundings in a row each
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def layer(T, D, F, E, K, dtype=torch.float32, absent=0.2, ids_dtype=torch.int64):
    x = torch.randn(T, D).to(dtype)
    gate_up = (torch.randn(E, 2 * F, D) * D**-0.5).to(dtype)
    down = (torch.randn(E, D, F) * F**-0.5).to(dtype)
    weights = torch.rand(T, K).to(torch.float64 if dtype == torch.float64 else torch.float32)
    ids = torch.randint(0, E, (T, K))
    ids[torch.rand(T, K) < absent] = -1
    return x, gate_up, down, weights, ids.to(ids_dtype)


def run(fn, args, dtype=None):
    """y and the gradients of every floating argument, for one random dy."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() if t.is_floating_point() else t for t in args]
    y = fn(*leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(t.grad for t in leaves if t.is_floating_point())]


def assert_near(got, want, tolerance):
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        assert (g.double() - w).norm() <= tolerance * max(w.norm(), 1e-30)


@pytest.mark.parametrize("absent", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    "shape",
    [(37, 24, 16, 5, 3), (0, 8, 8, 3, 2), (1, 8, 8, 4, 4), (64, 16, 32, 16, 2), (5, 8, 8, 1, 1)],
    ids=str,
)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_moe_mlp(dtype, shape, absent):
    args = layer(*shape, dtype=dtype, absent=absent, ids_dtype=torch.int32 if shape[0] % 2 else torch.int64)
    assert_near(run(ops.moe_mlp, args), run(reference.moe_mlp, args, torch.float64), TOLERANCE[dtype])


@pytest.mark.parametrize("ends", [[3, 3, 10], [0, 0, 0], [12, 12, 12], [1, 5, 12]], ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_grouped_mm(dtype, ends):
    args = (
        torch.randn(12, 24).to(dtype),
        torch.randn(3, 16, 24).to(dtype),
        torch.tensor(ends, dtype=torch.int32),
    )
    got = run(ops.grouped_mm, args)
    assert_near(got, run(reference.grouped_mm, args, torch.float64), TOLERANCE[dtype])
    assert (got[0][ends[-1] :] == 0).all()


def test_weights_in_the_dtype_of_x_and_one_expert_twice():
    x, gate_up, down, weights, ids = layer(9, 16, 8, 4, 3, torch.bfloat16)
    ids[:, 1] = ids[:, 0]
    args = x, gate_up, down, weights.bfloat16(), ids
    assert_near(
        run(ops.moe_mlp, args), run(reference.moe_mlp, args, torch.float64), TOLERANCE[torch.bfloat16]
    )


ROUTINGS = {  # T, E, K -> ids
    "all on one": lambda T, E, K: torch.full((T, K), E - 1),
    "empty experts": lambda T, E, K: torch.randint(0, E, (T, K)) // 2 * 2,
    "one expert K times": lambda T, E, K: torch.randint(0, E, (T, 1)).expand(T, K),
    "every expert": lambda T, E, K: torch.rand(T, E).argsort(1)[:, :K],
}


@pytest.mark.parametrize("shape", [(127, 20, 12, 4, 4), (128, 8, 72, 6, 2), (129, 200, 24, 3, 3)], ids=str)
@pytest.mark.parametrize("mode", ROUTINGS)
def test_routings(mode, shape):
    T, _, _, E, K = shape
    args = (*layer(*shape)[:4], ROUTINGS[mode](T, E, K))
    assert_near(run(ops.moe_mlp, args), run(reference.moe_mlp, args, torch.float64), TOLERANCE[torch.float32])


def strided(t):
    """The same numbers, as every other element of a larger tensor with another order of dimensions."""
    wide = torch.empty(*(2 * n for n in reversed(t.shape)), dtype=t.dtype).permute(*reversed(range(t.dim())))
    return wide[tuple(slice(None, None, 2) for _ in t.shape)].copy_(t)


def test_strides_of_arguments_and_of_dy_do_not_matter():
    args = layer(37, 24, 16, 5, 3)
    scattered = [strided(t) for t in args]
    assert not any(t.is_contiguous() for t in scattered)
    assert all(
        torch.equal(a, b) for a, b in zip(run(ops.moe_mlp, scattered), run(ops.moe_mlp, args), strict=True)
    )
    a = torch.randn(12, 24)
    b = torch.randn(3, 16, 24)
    ends = torch.tensor([1, 5, 12], dtype=torch.int32)
    scattered = strided(a), strided(b), ends
    assert_near(run(ops.grouped_mm, scattered), run(reference.grouped_mm, (a, b, ends), torch.float64), 3e-6)
    # the gradient of a sum has no strides at all
    for op, inputs in (
        (ops.moe_mlp, args),
        (ops.grouped_mm, (a, b, ends)),
    ):
        x = inputs[0].clone().requires_grad_()
        (got,) = torch.autograd.grad(op(x, *inputs[1:]).sum(), x)
        y = op(x, *inputs[1:])
        assert torch.equal(got, *torch.autograd.grad(y, x, torch.ones_like(y)))


def test_duplicate_scores():
    """Equal logits give K different experts; what the layer makes of them follows the definition."""
    logits = torch.randint(0, 2, (50, 8)).float()
    logits[0] = float("-inf")
    logits[0, 3] = 0
    weights, ids = ops.softmax_topk(logits, 4, False)
    assert all(row.unique().numel() == 4 for row in ids) and (ids >= 0).all() and (ids < 8).all()
    assert torch.equal(weights, logits.softmax(-1).gather(1, ids.long()))
    args = (*layer(50, 16, 8, 8, 4)[:3], weights, ids)
    assert_near(run(ops.moe_mlp, args), run(reference.moe_mlp, args, torch.float64), TOLERANCE[torch.float32])


def test_a_slot_that_is_not_here_adds_nothing_whatever_its_weight():
    x, gate_up, down, weights, ids = layer(20, 16, 8, 4, 3)
    weights[ids < 0] = float("nan")
    y, *_, d_weights = run(ops.moe_mlp, (x, gate_up, down, weights, ids))
    assert y.isfinite().all() and (d_weights[ids < 0] == 0).all()


def test_gradcheck():
    args = layer(7, 8, 4, 3, 2, torch.float64)
    assert torch.autograd.gradcheck(
        lambda *a: ops.moe_mlp(*a, args[4]), [t.requires_grad_() for t in args[:4]]
    )


def opcheck(op, *args, **kwargs):
    torch.library.opcheck(getattr(torch.ops.tmoe, op).default, args, **kwargs)


def test_opcheck():
    *leaves, ids = layer(37, 16, 8, 4, 2, absent=0)  # with absent slots the end of H is not written
    how = None, None, None, "swiglu", 74
    opcheck("moe_mlp", *[t.requires_grad_() for t in leaves], ids, *how, True)
    with torch.no_grad():
        _, h, packed = torch.ops.tmoe.moe_mlp(*leaves, ids, *how, True)
        opcheck("moe_mlp_backward", torch.randn(37, 16), *(t.detach() for t in leaves), h, packed, *how)
    a, b = torch.randn(20, 8, requires_grad=True), torch.randn(3, 4, 8, requires_grad=True)
    ends = torch.tensor([5, 5, 17], dtype=torch.int32)
    opcheck("grouped_mm", a, b, ends)
    opcheck("grouped_mm_backward", torch.randn(20, 4), a.detach(), b.detach(), ends)


def test_the_compiler_does_not_look_into_an_op_of_any_device():
    """Not even where a frame that is left to Python calls it, whose callees the compiler looks at."""
    compiling, graphs = [], []

    def fake(x):
        return torch.empty_like(x)

    @on_any_device("seen_by_the_compiler", fake=fake)
    def op(x: torch.Tensor) -> torch.Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x.sin() + 1

    def caller(x):
        for _ in range(2):
            torch._dynamo.graph_break()  # in a loop: the compiler leaves the whole frame to Python
            x = op(x)
        return x

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    x = torch.ones(3)
    assert torch.equal(torch.compile(caller, backend=keep)(x), (x.sin() + 1).sin() + 1)
    assert compiling == [False, False] and graphs == []
    torch.compiler.reset()


@torch.library.custom_op("tmoe_test::first_rows", mutates_args=())
def first_rows(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """As many rows as a tensor says: the number that arrives from other ranks is known to no graph."""
    return x[: int(n)].clone()


@first_rows.register_fake
def _(x, n):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), *x.shape[1:])


first_rows.register_autograd(
    lambda ctx, g: (torch.nn.functional.pad(g, (0, 0, 0, ctx.rows - g.shape[0])), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "rows", inputs[0].shape[0]),
)


@pytest.mark.parametrize("how", ["static", "unbacked"])
def test_compiled_equals_eager(how):
    args = layer(37, 16, 8, 4, 2)
    for T in (37, 20, 0) if how == "unbacked" else (37,):
        n = torch.tensor(T)

        def unbacked(x, gate_up, down, weights, ids, n=n):
            x = first_rows(x, n)
            # a slice of unknown length has a gradient that inductor of torch 2.11 cannot place
            rows = torch.arange(x.shape[0])
            return 2 * ops.moe_mlp(
                1.5 * x, gate_up, down, weights.index_select(0, rows), ids.index_select(0, rows)
            )

        def static(x, gate_up, down, weights, ids):
            return 2 * ops.moe_mlp(1.5 * x, gate_up, down, weights, ids)

        fn = unbacked if how == "unbacked" else static
        assert_near(run(torch.compile(fn, fullgraph=True), args), [t.double() for t in run(fn, args)], 1e-6)
        torch.compiler.reset()


def test_routing_does_not_recompile():
    """Neither forward nor backward, whichever experts are empty; both equal eager bit for bit."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fn = torch.compile(ops.moe_mlp, backend=counter, fullgraph=True)
    x, gate_up, down, weights, _ = layer(16, 8, 8, 4, 2)
    for low, high in [(-1, 4), (0, 4), (2, 3), (-1, 0), (-1, 2)]:
        args = x, gate_up, down, weights, torch.randint(low, high, (16, 2))
        assert all(torch.equal(a, b) for a, b in zip(run(fn, args), run(ops.moe_mlp, args), strict=True))
    assert counter.frame_count == 1


BAD = {  # argument: (position, how it is spoilt, what the message must name)
    "x": (0, lambda t: t[0], "x: got shape"),
    "gate_up": (1, lambda t: t[:, 1:], "gate_up: got shape"),
    "down": (2, lambda t: t.double(), "down: got torch.float64"),
    "weights": (3, lambda t: t.half(), "weights: got torch.float16"),
    "ids": (4, lambda t: t.float(), "ids: got torch.float32"),
    "ids' range": (4, lambda t: t + 4, "ids: got"),
    "weights' device": (3, lambda t: t.to("meta"), "weights: got meta"),
}


@pytest.mark.parametrize("argument", BAD)
def test_errors_name_the_argument(argument):
    position, spoil, message = BAD[argument]
    args = list(layer(5, 8, 8, 4, 2))
    args[position] = spoil(args[position])
    with pytest.raises(ValueError, match=message):
        ops.moe_mlp(*args) if argument != "weights' device" else ops.check.check_moe_mlp(
            *args, None, "swiglu"
        )


@pytest.mark.parametrize(
    "position, name", list(enumerate(["x", "gate_up", "down", "weights", "ids", "gate_up_bias"]))
)
def test_what_is_no_tensor_is_named(position, name):
    args = [*layer(5, 8, 8, 4, 2), torch.randn(4, 16)]
    args[position] = [1.0]
    with pytest.raises(ValueError, match=rf"{name}: got \[1.0\], valid is a tensor"):
        ops.moe_mlp(*args)


@pytest.mark.parametrize("position, name", [(1, "gate_up"), (2, "down"), (3, "weights"), (4, "ids")])
def test_one_argument_on_meta_gives_no_numbers(position, name):
    """torch then runs the fake: what it gives on the CPU was never written."""
    args = list(layer(5, 8, 8, 4, 2))
    args[position] = args[position].to("meta")
    with pytest.raises(ValueError, match=f"{name}: got meta, valid is the input's cpu"):
        ops.moe_mlp(*args)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("learns", [(0,), (1,), (0, 3)], ids=str)
def test_a_mapped_op_keeps_what_backward_needs(learns):
    """Inside torch.vmap a tensor says that it needs no gradient."""
    args = list(layer(5, 8, 6, 4, 2, absent=0.0))
    args[0] = torch.randn(3, 5, 8)
    for i in learns:
        args[i].requires_grad_()
    y = torch.vmap(ops.moe_mlp, (0, None, None, None, None))(*args)
    got = torch.autograd.grad(y.square().sum(), [args[i] for i in learns])
    y = torch.stack([reference.moe_mlp(x, *args[1:]) for x in args[0]])
    for g, w in zip(got, torch.autograd.grad(y.square().sum(), [args[i] for i in learns]), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


def test_widths_of_nothing_are_named():
    """Kernels divide by them."""
    for shape in ((5, 8, 8, 0, 2), (5, 0, 8, 2, 2), (5, 8, 0, 2, 2)):
        args = list(layer(5, 8, 8, 4, 2))
        _, D, F, E, _ = shape
        args[:3] = torch.randn(5, D), torch.randn(E, 2 * F, D), torch.randn(E, D, F)
        with pytest.raises(ValueError, match=r"down: got shape .* none of them 0"):
            ops.moe_mlp(*args)
    with pytest.raises(ValueError, match=r"b: got shape .* none of them 0"):
        ops.grouped_mm(torch.randn(3, 8), torch.randn(0, 4, 8), torch.zeros(0, dtype=torch.int32))
    with pytest.raises(ValueError, match="ends: got \\[1, 2\\], valid is a tensor"):
        ops.grouped_mm(torch.randn(3, 8), torch.randn(2, 4, 8), [1, 2])


@pytest.mark.parametrize("how", ["dual", "jvp"])
def test_forward_mode_is_refused(how):
    """torch would take the tangents for zeros."""
    args = layer(5, 8, 8, 4, 2)
    b = torch.randn(3, 16, 8)
    ends = torch.tensor([1, 2, 3], dtype=torch.int32)
    for name, call, x in (
        ("x", lambda x: ops.moe_mlp(x, *args[1:5]), args[0]),
        ("a", lambda a: ops.grouped_mm(a, b, ends), torch.randn(5, 8)),
        ("logits", lambda logits: ops.softmax_topk(logits, 2, True)[0], torch.randn(5, 4)),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=f"{name}: got a forward-mode tangent"):
            if how == "jvp":
                torch.func.jvp(call, (x,), (x,))
            else:
                with torch.autograd.forward_ad.dual_level():
                    call(torch.autograd.forward_ad.make_dual(x, x))


def test_backward_inside_autocast_is_no_less_exact():
    args = layer(37, 24, 16, 5, 3)
    want = run(ops.moe_mlp, args)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(ops.moe_mlp, args)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_grouped_mm_errors_name_the_argument():
    a = torch.randn(12, 24)
    b = torch.randn(3, 16, 24)
    ends = torch.tensor([1, 2, 3], dtype=torch.int32)
    bad = [((a, b[:, :, 1:], ends), "b: got shape"), ((a, b, ends.long()), "ends: got torch.int64")]
    for wrong in ([5, 2, 7], [1, 2, 13], [-1, 2, 3]):
        bad.append(((a, b, torch.tensor(wrong, dtype=torch.int32)), r"ends: got .*non-decreasing, 0 to N=12"))
    for args, message in bad:
        with pytest.raises(ValueError, match=message):
            ops.grouped_mm(*args)


@pytest.mark.parametrize("shape", [(37, 24, 16, 5, 3), (0, 8, 8, 3, 2), (64, 16, 32, 16, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bias_activation_and_bound(dtype, shape, activation):
    """Gates beyond the clamp, a bias with gradient, and a bound on pairs that changes nothing."""
    args = [*layer(*shape, dtype=dtype), torch.randn(shape[3], 2 * shape[2]).to(dtype)]
    args[1].mul_(5)
    if not ACTIVATIONS[activation].gated:
        args[1], args[5] = args[1][:, : shape[2]].contiguous(), args[5][:, : shape[2]]

    def fused(*a):
        return ops.moe_mlp(*a, activation=activation, pairs=16)

    want = run(lambda *a: reference.moe_mlp(*a, activation=activation), args, torch.float64)
    assert_near(run(fused, args), want, TOLERANCE[dtype])


@pytest.mark.parametrize("pairs, rows", [(None, 160), (16, 128), (130, 160), (10**6, 160)])
def test_a_bound_on_pairs_never_takes_more_memory_than_all_of_them(pairs, rows):
    x, gate_up, down, weights, ids = (t.to("meta") for t in layer(40, 64, 64, 4, 4))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        ops.moe_mlp(x.requires_grad_(), gate_up, down, weights, ids, pairs=pairs)
    assert (rows, 128) in kept


def test_large_routing_weights_in_fp16():
    """65504 is fp16's largest number; what a weight is multiplied with need not be large."""
    x, gate_up, down, weights, ids = layer(9, 8, 8, 4, 2)
    args = [t.half() for t in (x, gate_up * 0.1, down * 1e-3)] + [weights.float() * 0 + 7e4]
    args = [t.requires_grad_() for t in args]
    for grad in torch.autograd.grad(ops.moe_mlp(*args, ids).float().sum() * 1e-4, args):
        assert grad.isfinite().all()


def test_torch_func_is_refused_by_name():
    x, *rest = layer(5, 8, 8, 4, 2)
    with pytest.raises(NotImplementedError, match=r"x: got a tensor of torch\.func's grad"):
        torch.func.grad(lambda x: ops.moe_mlp(x, *rest).sum())(x)


def test_unknown_activation_and_bound_are_named():
    args = layer(5, 8, 8, 4, 2)
    with pytest.raises(ValueError, match="activation: got 'silu', must be one of swiglu, clamped"):
        ops.moe_mlp(*args, activation="silu")
    with pytest.raises(ValueError, match="activation: got None, valid is one of swiglu, clamped"):
        ops.moe_mlp(*args, activation=None)
    for pairs in (0, 1.5, "3", True):
        with pytest.raises(
            ValueError, match=f"pairs: got {pairs!r}, valid is a positive whole number or None"
        ):
            ops.moe_mlp(*args, pairs=pairs)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("shape", [(37, 24, 5), (0, 8, 2), (9, 1, 1), (16, 8, 8)], ids=str)
def test_softmax_topk(shape, renormalize):
    T, E, K = shape
    logits = torch.randn(T, E, dtype=torch.float64, requires_grad=True)
    weights, ids = ops.softmax_topk(logits, K, renormalize)
    want, want_ids = reference.softmax_topk(logits, K, renormalize)
    assert torch.equal(ids, want_ids) and ids.dtype == torch.int32 and not ids.requires_grad
    dw = torch.randn(T, K, dtype=torch.float64)
    assert_near(
        [weights, *torch.autograd.grad(weights, logits, dw)],
        [want, *torch.autograd.grad(want, logits, dw)],
        1e-12,
    )


def test_softmax_topk_compiles_and_names_bad_input():
    logits = torch.randn(20, 8, requires_grad=True)
    torch.library.opcheck(torch.ops.tmoe.softmax_topk.default, (logits, 3, True))
    torch.library.opcheck(torch.ops.tmoe.softmax_topk.default, (logits, 3, False))
    for args, message in [
        ((logits, 9, True), "K: got 9, valid is a whole number from 1 to E=8"),
        ((logits[0], 2, True), "logits: got shape"),
        ((logits, 2.0, True), "K: got 2.0, valid is a whole number from 1 to E=8"),
        ((None, 2, True), "logits: got None, valid is a tensor"),
        ((logits, 2, "no"), "renormalize: got 'no', valid is True or False"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.softmax_topk(*args)


def test_one_launch_for_few_rows_is_for_few_rows():
    assert (
        table.few("cuda:90", 64, True)
        and not table.few("cuda:90", 193, True)
        and not table.few("cuda:90", 64, False)
    )
    assert table.few("cuda:80", 64, True) is None is table.few("hip:gfx942", 64, True)
