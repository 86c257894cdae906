"""moe_mlp and grouped_mm on a GPU, against fp64 of the same rounded inputs, under every kind of routing.

Two calls give the same bits.

next: test_ops.py
"""

from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch
from gradient_sum import Sum

from tmoe import ops
from tmoe.base.activations import ACTIVATIONS
from tmoe.ops import reference
from tmoe.ops.experts import gpu, table
from tmoe.ops.experts.deferred import collecting
from tmoe.ops.experts.op import moe_mlp_deferred, moe_mlp_summed
from tmoe.ops.experts.pair_order import route
from tmoe.ops.launch import replay

pytestmark = pytest.mark.gpu
NAMES = ("y", "x", "gate_up", "down", "weights")


def routing(T, E, K, mode):
    ids = torch.rand(T, E).argsort(1)[:, :K]
    if mode == "one":
        ids[:] = E // 2
    elif mode == "zipf":
        ids = torch.multinomial(1 / torch.arange(1, E + 1).float(), T * K, replacement=True).view(T, K)
    elif mode == "absent":
        ids[torch.rand(T, K) < 0.7] = -1
    elif mode == "none":
        ids[:] = -1
    return ids


def layer(T, D, F, E, K, mode="random", dtype=torch.bfloat16):
    torch.manual_seed(T + D + F)
    x = torch.randn(T, D)
    gate_up = torch.randn(E, 2 * F, D) * D**-0.5
    down = torch.randn(E, D, F) * F**-0.5
    ids = routing(T, E, K, mode)
    weights = torch.rand(T, K) + 0.1
    dy = torch.randn(T, D)
    return [t.cuda().to(dtype) for t in (x, gate_up, down)] + [
        weights.cuda(),
        ids.cuda(),
        dy.cuda().to(dtype),
    ]


def run(fn, args, dtype=None):
    *leaves, ids, dy = args
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in leaves]
    y = fn(*leaves, ids)
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(t.grad for t in leaves)]


def errors(got, want):
    return [
        float((g.double() - w).norm() / w.norm().clamp(min=1e-30)) for g, w in zip(got, want, strict=True)
    ]


SHAPES = [  # every D, F, T of KERNELS' list at least once; T over 128-row tiles and 64-row tiles
    (300, 512, 64, 8, 2, "random"),
    (257, 576, 192, 16, 4, "zipf"),
    (1000, 512, 704, 8, 2, "one"),
    (129, 2048, 768, 4, 4, "random"),
    (1, 512, 128, 4, 1, "random"),
    (127, 512, 128, 1, 1, "random"),
    (2000, 512, 256, 64, 8, "absent"),
    (300, 512, 128, 8, 2, "none"),
    (700, 200, 72, 5, 3, "random"),
    (4096, 1536, 256, 128, 8, "random"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_matches_fp64(shape, dtype):
    args = layer(*shape, dtype=dtype)
    want = run(reference.moe_mlp, args, torch.float64)
    got, plain = errors(run(ops.moe_mlp, args), want), errors(run(reference.moe_mlp, args), want)
    for name, ours, theirs in zip(NAMES, got, plain, strict=True):
        assert ours <= max(1.5 * theirs, 3e-6), (name, ours, theirs)


@pytest.mark.parametrize("E", [16, 64])
def test_equal_bits_and_untouched_rest(E):
    args = layer(1000, 512, 256, E, 4, "zipf")
    first = run(ops.moe_mlp, args)
    torch.cuda.empty_cache()
    with torch.cuda.stream(torch.cuda.Stream()):
        second = run(ops.moe_mlp, args)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nan_stays_with_its_experts():
    args = layer(512, 512, 128, 8, 2)
    args[0][7] = float("nan")
    y, dx, d_gate_up, d_down, d_weights = run(ops.moe_mlp, args)
    touched = args[4][7]
    clean = torch.ones(8, dtype=torch.bool, device="cuda")
    clean[touched] = False
    rows = torch.arange(512, device="cuda") != 7
    assert y[rows].isfinite().all() and dx[rows].isfinite().all() and d_weights[rows].isfinite().all()
    assert d_gate_up[clean].isfinite().all() and d_down[clean].isfinite().all()


# 64: one launch for both products; each replay must find its counters cleared
@pytest.mark.parametrize("E", [16, 64])
def test_graph_replays_with_new_routing(E):
    args = layer(2000, 512, 256, E, 4)
    x, gate_up, down, weights, ids, dy = args

    def step():
        y, h, meta = gpu.forward(x, gate_up, down, weights, ids, None, "swiglu", 8000, True)
        return y, *gpu.backward(dy, x, gate_up, down, weights, h, meta, None, "swiglu", 8000)[:4]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for mode in ("zipf", "absent", "one"):
        ids.copy_(routing(2000, E, 4, mode))
        x.normal_()
        graph.replay()
        assert all(
            torch.equal(a, b)
            for a, b in zip(out, run(ops.moe_mlp, [x, gate_up, down, weights, ids, dy]), strict=True)
        )


@pytest.mark.parametrize(
    "shape",
    [(500, 512, 256, 64, 4), (257, 576, 192, 16, 4), (1000, 512, 704, 8, 2), (700, 200, 72, 5, 3)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("share", [1, 3])
def test_remembered_calls_equal_decided_ones(shape, dtype, share, monkeypatch):
    """Five calls of a kind, each with other tensors and another routing.

    Then a graph captured from the sixth, replayed with others.
    """
    monkeypatch.setattr(replay, "_programs", {})
    slots = shape[0] * shape[4]
    pairs = -(-slots // share // 128) * 128 if share > 1 else slots

    def decided(x, gate_up, down, weights, ids, dy):
        y, h, meta = gpu.forward(x, gate_up, down, weights, ids, None, "swiglu", pairs, True)
        return y, *gpu.backward(dy, x, gate_up, down, weights, h, meta, None, "swiglu", pairs)[:4]

    def remembered(x, gate_up, down, weights, ids, dy):
        leaves = [t.detach().requires_grad_() for t in (x, gate_up, down, weights)]
        y = ops.moe_mlp(*leaves, ids, pairs=None if share == 1 else pairs)
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    modes = ("random", "zipf", "absent", "one", "random")
    kept = []
    for mode in modes:
        args = layer(*shape, mode, dtype)
        for t in args[:3]:
            t.mul_(torch.randn_like(t))
        kept.append(args)  # or each would find the memory of the one before
        assert all(torch.equal(a, b) for a, b in zip(remembered(*args), decided(*args), strict=True)), mode
    assert [type(p) for p in replay._programs.values()] == [replay.Program] * 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = remembered(*args)
    for mode in modes[1:3]:
        args[4].copy_(routing(shape[0], shape[3], shape[4], mode))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(out, decided(*args), strict=True)), mode


@pytest.mark.whole_gpu
def test_what_one_gpu_remembers_runs_on_no_other():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    args = layer(500, 512, 256, 16, 4)
    want = [run(ops.moe_mlp, args) for _ in range(3)][-1]
    there = [t.to("cuda:1") for t in args]
    for _ in range(3):
        got = run(ops.moe_mlp, there)
        assert all(
            a.device.index == 1 and torch.equal(a.to(b.device), b) for a, b in zip(got, want, strict=True)
        )


def test_launches_from_a_thread_that_never_called_cuda():
    """Autograd's thread may be one.

    The binaries are there already, from another thread, and no call has made its context current.
    """
    # dh gathers at this shape, so what the thread launches first is a kernel with tensor maps
    x, gate_up, down, weights, ids, dy = layer(2000, 512, 256, 16, 4)
    _, h, packed = gpu.forward(x, gate_up, down, weights, ids, None, "swiglu", 8000, True)

    def call():
        return gpu.backward(dy, x, gate_up, down, weights, h, packed, None, "swiglu", 8000)[0]

    want = call()
    for _ in range(3):  # what is let go here serves the thread, so that not even its allocations call CUDA
        call()
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(call).result(), want)


def test_no_host_sync():
    args = layer(512, 512, 128, 8, 2)
    run(ops.moe_mlp, args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(ops.moe_mlp, args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_equals_eager():
    args = layer(300, 512, 128, 8, 2)
    compiled = torch.compile(lambda *a: ops.moe_mlp(*a), fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(run(compiled, args), run(ops.moe_mlp, args), strict=True))


@pytest.mark.parametrize("D, F", [(512, 256), (200, 72)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_grouped_mm(dtype, D, F):
    torch.manual_seed(0)
    a, b, dc = torch.randn(1000, D), torch.randn(5, F, D), torch.randn(1000, F)
    a, b, dc = (t.cuda().to(dtype) for t in (a, b, dc))
    ends = torch.tensor([300, 300, 301, 700, 900], dtype=torch.int32, device="cuda")

    def grads(fn, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (a, b)]
        c = fn(*leaves, ends)
        return c, *torch.autograd.grad(c, leaves, dc.to(c.dtype))

    want = grads(reference.grouped_mm, torch.float64)
    for ours, theirs in zip(
        errors(grads(ops.grouped_mm, dtype), want),
        errors(grads(reference.grouped_mm, dtype), want),
        strict=True,
    ):
        assert ours <= max(1.5 * theirs, 3e-6)


@pytest.mark.whole_gpu
def test_more_than_2_to_the_31_elements():
    """N * D = 2^31 + 2^20: offsets of rows do not fit 32 bits."""
    T, D, F, E, K = 131136, 2048, 64, 8, 8
    args = layer(T, D, F, E, K)
    y = ops.moe_mlp(*args[:5])
    tail = [t[-256:] if i in (0, 3, 4) else t for i, t in enumerate(args[:5])]
    # other tiles may be chosen for 256 rows
    assert errors([y[-256:]], [ops.moe_mlp(*tail).double()])[0] < 4e-3


def opcheck(op, *args, **kwargs):
    """torch's checks of a registered op. `ops` loads a module, which registers its op, on first use."""
    torch.library.opcheck(getattr(torch.ops.tmoe, op).default, args, **kwargs)


def test_opcheck():
    *leaves, ids, dy = layer(300, 512, 128, 8, 2)
    how = None, None, None, "swiglu", 600
    # not test_aot_dispatch: it compares whole outputs, and the unused ends of the tile tables are not
    # written (the CPU test runs it)
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    opcheck("moe_mlp", *[t.requires_grad_() for t in leaves], ids, *how, True, test_utils=checks)
    with torch.no_grad():
        _, h, packed = torch.ops.tmoe.moe_mlp(*leaves, ids, *how, True)
        opcheck("moe_mlp_backward", dy, *(t.detach() for t in leaves), h, packed, *how)
    a, b, dc = (torch.randn(s, device="cuda").bfloat16() for s in ((200, 512), (3, 128, 512), (200, 128)))
    ends = torch.tensor([50, 50, 170], dtype=torch.int32, device="cuda")
    assert ops.grouped_mm and ops.softmax_topk
    opcheck("grouped_mm", a.clone().requires_grad_(), b.clone().requires_grad_(), ends)
    opcheck("grouped_mm_backward", dc, a, b, ends)
    logits = torch.randn(33, 60, device="cuda", requires_grad=True)
    for renormalize in (True, False):
        opcheck("softmax_topk", logits, 7, renormalize)


@pytest.mark.parametrize("pairs", [None, 768])
def test_combine_leaves_rows_of_absent_tokens_alone(pairs):
    """fill=False, for one rank's part of an expert group.

    Rows of tokens with a slot are written as usual, in every window; the other rows keep what they hold.
    """
    x, gate_up, down, weights, ids, _ = layer(1000, 512, 256, 16, 8, "absent")
    ids[::3] = -1
    here = (ids >= 0).any(1)
    want = ops.moe_mlp(x, gate_up, down, weights, ids)
    y = torch.full_like(x, float("nan"))
    for i, window in enumerate(gpu.windows(route(ids, 16, pairs), ids.numel())):
        part = gpu.LayerLaunches(x, down.shape, 8, window, weights, (gate_up, down))
        part.combine(
            part.rows("down", part.up(gate_up, None, None), down, True), weights, y, add=i > 0, fill=False
        )
    assert y[~here].isnan().all()
    if pairs is None:
        assert torch.equal(y[here], want[here])
    else:
        assert errors([y[here]], [want[here].double()])[0] < 4e-3


FEW_SHAPES = [(512, 2048, 768, 128, 8), (37, 512, 192, 16, 4), (1, 64, 64, 4, 2), (300, 320, 448, 33, 3)]
FEW_ROWS = [1, 64, 128]


def few_calls(gate_up, slots):
    """Bias, activation, pairs and keep of each call of gpu.forward that the test below makes."""
    for biased, activation in ((False, "swiglu"), (True, "clamped")):
        bias = torch.randn_like(gate_up[..., 0]) if biased else None
        for pairs, keep in ((slots, True), (slots, False), (slots // 3 + 1, True)):
            yield bias, activation, pairs, keep


def trace_few(T, D, F, E, K, dtype, rows):
    """The test's launches on meta tensors, so that fifteen tests share what is compiled."""
    gate_up = torch.empty(E, 2 * F, D, dtype=dtype, device="meta")
    x, down = (torch.empty(*shape, dtype=dtype, device="meta") for shape in ((T, D), (E, D, F)))
    weights, ids = (torch.empty(T, K, dtype=kind, device="meta") for kind in (torch.float32, torch.int32))
    for choice in (table.few("cuda:90", rows, True), None):
        with patch.object(gpu, "few", lambda *a, choice=choice: choice):
            for call in few_calls(gate_up, T * K):
                gpu.forward(x, gate_up, down, weights, ids, *call)


@pytest.mark.parametrize("mode", ["random", "zipf", "one", "absent", "none"])
@pytest.mark.parametrize("rows", FEW_ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", FEW_SHAPES, ids=str)
def test_one_launch_for_few_rows_equals_two(shape, dtype, rows, mode, monkeypatch):
    x, gate_up, down, weights, ids, _ = layer(*shape, mode, dtype)
    cut = table.few("cuda:90", rows, True)
    here = int((ids >= 0).sum())
    for bias, activation, pairs, keep in few_calls(gate_up, ids.numel()):
        got, want = [], []
        for choice, out in ((cut, got), (cut, got), (None, want)):
            monkeypatch.setattr(gpu, "few", lambda *a, choice=choice: choice)
            y, h, _ = gpu.forward(x, gate_up, down, weights, ids, bias, activation, pairs, keep)
            out += [y, h[: min(here, pairs)]]
        assert all(torch.equal(a, b) for a, b in zip(got, want * 2, strict=True)), (activation, pairs, keep)


@pytest.mark.parametrize("entry", sorted({(e[0], e[4]) for e in table.entries("cuda:90")}), ids=str)
def test_every_tuned_configuration(entry, monkeypatch):
    kernel, config = entry
    args = layer(700, 512, 256, 8, 4, "zipf")
    want = run(reference.moe_mlp, args, torch.float64)
    pick = gpu.pick
    monkeypatch.setattr(gpu, "pick", lambda k, *a: config if k == kernel else pick(k, *a))
    monkeypatch.setattr(gpu, "few", lambda *a: None)
    monkeypatch.setattr(replay, "_programs", {})
    got, plain = errors(run(ops.moe_mlp, args), want), errors(run(reference.moe_mlp, args), want)
    assert all(ours <= 1.5 * theirs for ours, theirs in zip(got, plain, strict=True)), (got, plain)


# a gate at the clamp may fall on either side
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] > 200], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bias_and_activation(shape, activation):
    x, gate_up, down, weights, ids, dy = layer(*shape)
    gate_up = gate_up[:, : ACTIVATIONS[activation].halves * down.shape[2]].contiguous()
    bias = torch.randn(gate_up.shape[:2], device="cuda").to(x.dtype)
    args = [x, gate_up * (1 if activation == "swiglu" else 4), down, weights, bias, ids, dy]

    def call(fn):
        return lambda x, gate_up, down, weights, bias, ids: fn(
            x, gate_up, down, weights, ids, bias, activation
        )

    want = run(call(reference.moe_mlp), args, torch.float64)
    got, plain = (errors(run(call(fn), args), want) for fn in (ops.moe_mlp, reference.moe_mlp))
    for name, ours, theirs in zip((*NAMES, "bias"), got, plain, strict=True):
        assert ours <= max(1.5 * theirs, 3e-6), (name, ours, theirs)


@pytest.mark.parametrize("mode", ["random", "zipf", "one", "absent", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("D, F", [(512, 256), (200, 72)])
def test_windows_of_pairs_change_nothing(mode, dtype, D, F):
    args = layer(1000, D, F, 16, 4, mode, dtype)
    want = run(reference.moe_mlp, args, torch.float64)
    whole = errors(run(ops.moe_mlp, args), want)
    cut = errors(run(lambda *a: ops.moe_mlp(*a, pairs=700), args), want)
    for name, ours, theirs in zip(NAMES, cut, whole, strict=True):
        assert ours <= max(1.5 * theirs, 3e-6), (name, ours, theirs)


@pytest.mark.parametrize("pairs", [None, 700])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("D, F", [(512, 256), (200, 72)])
@pytest.mark.parametrize("compile", [False, True])
def test_a_backward_in_two_parts_is_the_whole_one(compile, D, F, dtype, biased, pairs):
    """Three calls each: decided, recorded, repeated."""
    x, gate_up, down, weights, ids, dy = layer(1000, D, F, 16, 4, "zipf", dtype)
    bias = torch.randn(16, 2 * F, device="cuda", dtype=dtype) if biased else None

    def call(op, leaves):
        y = op(x_ := leaves[0] * 1, *leaves[1:4], ids, bias, "swiglu", pairs)
        return y + x_

    def gradients(op, which):
        leaves = [t.detach().clone() for t in (x, gate_up, down, weights)]
        for i in which:
            leaves[i].requires_grad_()
        if compile:
            torch.compiler.reset()  # else the cases are recompilations of one function
        run = torch.compile(call, fullgraph=True) if compile else call
        run(op, leaves).backward(dy)
        return [leaves[i].grad for i in which]

    for _ in range(3):
        dx, d_gate_up, d_down, d_weights = gradients(ops.moe_mlp, [0, 1, 2, 3])
        with collecting() as left:
            got = gradients(moe_mlp_deferred, [0, 3])
        for ours, theirs in zip(
            [*got, *left[0].gradients()], [dx, d_weights, d_gate_up, d_down], strict=True
        ):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("pairs", [None, 700])
@pytest.mark.parametrize("how", ["add", "red"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("D, F", [(2048, 768), (512, 256), (200, 72)])
@pytest.mark.parametrize("op", [moe_mlp_summed, moe_mlp_deferred], ids=lambda op: op.__name__)
def test_sums_of_weight_gradients(op, D, F, dtype, how, pairs, monkeypatch):
    """Five micro-batches: written, added by decided, recorded and repeated launches; twice the same bits."""
    monkeypatch.setattr(gpu, "SUMS", how)
    monkeypatch.setattr(replay, "_programs", {})  # a recorded call does not read SUMS again
    micros = [layer(1000, D, F, 16, 4, mode, dtype) for mode in ("zipf", "random", "absent", "one", "zipf")]
    for i, micro in enumerate(micros):
        micro[0] = micro[0].roll(i, 0)
    _, gate_up, down, *_ = micros[0]
    rounded = [torch.zeros_like(t, dtype=torch.float32) for t in (gate_up, down)]
    want = [torch.zeros_like(t, dtype=torch.float64) for t in (gate_up, down)]
    for x, _, _, weights, ids, dy in micros:
        for fn, kind, totals in ((ops.moe_mlp, dtype, rounded), (reference.moe_mlp, torch.float64, want)):
            for total, grad in zip(
                totals, run(fn, (x, gate_up, down, weights, ids, dy), kind)[2:4], strict=True
            ):
                total += grad
    found = []
    for _ in range(2):
        sums = [Sum(gate_up), Sum(down)]
        for x, _, _, weights, ids, dy in micros:
            with collecting() as left:
                op(x.clone().requires_grad_(), gate_up, down, weights, ids, None, "swiglu", pairs).backward(
                    dy
                )
            for one in left:
                into = sums[0].open(), sums[1].open()
                for total, target, grad in zip(sums, into, one.gradients(into), strict=True):
                    total.close(target, grad)
        assert [total.count for total in sums] == [len(micros)] * 2
        found.append([total.total for total in sums])
    assert all(map(torch.equal, *found))
    for ours, theirs in zip(errors(found[0], want), errors(rounded, want), strict=True):
        assert ours < (0.99 * theirs if dtype == torch.bfloat16 else max(1.5 * theirs, 3e-6))


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    "shape", [(1000, 128, 8), (33, 60, 7), (5, 1, 1), (64, 512, 16), (0, 8, 2), (129, 16, 16)], ids=str
)
def test_softmax_topk(shape, renormalize):
    T, E, K = shape
    logits = torch.randn(T, E, device="cuda", requires_grad=True)
    weights, ids = ops.softmax_topk(logits, K, renormalize)
    want, want_ids = reference.softmax_topk(logits.double(), K, renormalize)
    assert torch.equal(ids, want_ids)
    dw = torch.randn(T, K, device="cuda")
    got = weights, *torch.autograd.grad(weights, logits, dw)
    assert all(e < 1e-5 for e in errors(got, [want, *torch.autograd.grad(want, logits, dw.double())]))


def test_strides_of_arguments_and_of_dy_do_not_matter():
    args = layer(300, 512, 128, 8, 2)
    scattered = [t.mT.contiguous().mT for t in args]
    assert not any(t.is_contiguous() for t in scattered)
    assert all(
        torch.equal(a, b) for a, b in zip(run(ops.moe_mlp, scattered), run(ops.moe_mlp, args), strict=True)
    )
    x = args[0].requires_grad_()
    # the gradient of a sum has no strides at all
    (got,) = torch.autograd.grad(ops.moe_mlp(*args[:5]).sum(), x)
    y = ops.moe_mlp(*args[:5])
    assert torch.equal(got, *torch.autograd.grad(y, x, torch.ones_like(y)))


@pytest.mark.parametrize("shape", [(0, 512, 128, 4, 2), (129, 512, 128, 4, 4), (300, 512, 64, 1, 1)], ids=str)
@pytest.mark.parametrize("twice", [False, True])
def test_edges_of_routing(shape, twice):
    """No token, every expert for every token, a single expert; an expert K times for one token."""
    args = layer(*shape)
    if twice:
        args[4] = args[4][:, :1].expand(-1, shape[4]).contiguous()
    want = run(reference.moe_mlp, args, torch.float64)
    got, plain = errors(run(ops.moe_mlp, args), want), errors(run(reference.moe_mlp, args), want)
    assert all(ours <= max(1.5 * theirs, 3e-6) for ours, theirs in zip(got, plain, strict=True)), (got, plain)


@pytest.mark.whole_gpu
def test_gradients_beyond_2_to_the_31_elements():
    """N * D = 2^31 + 2^20.

    The gradients of the first and the last tokens equal those of these tokens alone, and the weights'
    gradients are the sum of two halves.
    """
    T, D, F, E, K = 131136, 2048, 64, 8, 8
    args = layer(T, D, F, E, K)
    _, dx, d_gate_up, d_down, d_weights = run(ops.moe_mlp, args)

    def part(rows):
        return run(ops.moe_mlp, [t[rows] if i in (0, 3, 4, 5) else t for i, t in enumerate(args)])

    halves = [part(slice(0, T // 2)), part(slice(T // 2, T))]
    for i, whole in ((1, dx), (4, d_weights)):
        assert errors([whole], [torch.cat([half[i] for half in halves]).double()])[0] < 4e-3
    for i, whole in ((2, d_gate_up), (3, d_down)):
        assert errors([whole], [halves[0][i].double() + halves[1][i].double()])[0] < 4e-3


def test_compiled_with_changing_routing_equals_eager_and_never_recompiles():
    torch.compiler.reset()
    compiled = torch.compile(ops.moe_mlp, fullgraph=True)
    args = layer(300, 512, 128, 8, 2)
    args[4] = args[4].contiguous()
    run(compiled, args)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for mode in ("zipf", "absent", "one", "none"):
            args[4] = routing(300, 8, 2, mode).cuda().contiguous()
            assert all(
                torch.equal(a, b) for a, b in zip(run(compiled, args), run(ops.moe_mlp, args), strict=True)
            )


def test_of_equal_logits_the_lower_experts_are_chosen():
    logits = torch.randint(0, 2, (500, 64), device="cuda").float()
    _, ids = ops.softmax_topk(logits, 8, False)
    assert torch.equal(ids.long(), logits.sort(dim=-1, descending=True, stable=True).indices[:, :8])
