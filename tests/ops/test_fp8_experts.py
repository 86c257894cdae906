"""A layer of experts with fp8 products on the CPU: codes, accuracy, values that no scale fits, kinds of op.

next: test_fp8_kernels.py
"""

import pytest
import torch
from gradient_sum import Sum

from tmoe.base.activations import activation as named
from tmoe.ops import gradient_sums, reference
from tmoe.ops.experts import cpu, fp8_codes, fp8_cpu, fp8_gpu, fp8_table
from tmoe.ops.experts.deferred import collecting
from tmoe.ops.experts.fp8_codes import (
    Codes,
    KeptH,
    coded,
    decoded,
    encode,
    rounded_blocks,
    rounded_rows,
    rounded_tiles,
    sided,
)
from tmoe.ops.experts.op import moe_mlp, moe_mlp_deferred, moe_mlp_summed

bf16, fp32 = torch.bfloat16, torch.float32


def error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def power_of_two(t):
    return bool((t.view(torch.int32) & 0x7FFFFF == 0).all())


@pytest.mark.parametrize("rows, columns", [(1, 300), (64, 128), (128, 128)])
def test_codes_are_the_nearest_numbers(rows, columns):
    """At most 2^-4 of a number's own size, and no scale is twice as large as needed."""
    draw = torch.Generator().manual_seed(0)
    t = torch.randn(200, 300, generator=draw) * torch.randn(200, 1, generator=draw).exp()
    codes, scales = coded(t, rows, columns)
    assert codes.shape == t.shape and power_of_two(scales)
    largest = codes.float().abs()
    for i in range(0, 200, rows):
        for j in range(0, 300, columns):
            assert 224 <= largest[i : i + rows, j : j + columns].max() <= 448
    back = decoded(codes, scales, rows, columns)
    normal = codes.float().abs() > 2.0**-6  # numbers of e4m3 with all of its bits
    assert ((back - t).abs()[normal] <= t.abs()[normal] / 16).all() and normal.float().mean() > 0.9
    assert torch.equal(back, back.bfloat16().float())  # exact in bf16


@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 1e30])
def test_zero_tiny_and_huge_rows_stay_finite(size):
    t = torch.randn(3, 256) * size
    t[1] = 0
    for rounded in (rounded_rows(t), rounded_tiles(t)):
        assert rounded.isfinite().all() and (rounded[1] == 0).all()
        assert size == 0 or error(rounded, t) < 4e-2


def test_nan_stays_nan_and_spoils_no_neighbour():
    t = torch.randn(70, 256)
    t[1, 3] = float("nan")
    for rounded in (rounded_rows(t), rounded_tiles(t)):
        assert rounded[1, 3].isnan() and rounded.isnan().sum() == 1
    t[1, 3] = float("inf")
    assert not rounded_rows(t)[1, 3].isfinite()


@pytest.mark.parametrize("limit", [7.0, 5.3, 0.04, 1.0])
def test_codes_of_h_stay_on_their_side_of_a_limit(limit):
    """7 and 1 are numbers of e4m3, 5.3 and 0.04 are not: they lie between 5 and 5.5, 5/128 and 5.5/128."""
    activation = f"clamped:limit={limit}"
    t = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * limit * 0.2
    t[:, :32] += limit
    t[:, 32:64] -= limit
    t[0, :3] = torch.tensor([limit, -limit, float("nan")])
    back, plain = rounded_tiles(sided(t, activation)), rounded_tiles(t)
    assert torch.equal(back.abs() > limit, t.abs() > limit) and back[0, 2].isnan()
    assert not torch.equal(plain.abs() > limit, t.abs() > limit)
    away = back.nan_to_num() != plain.nan_to_num()
    assert 0 < away.sum() < 0.2 * t.numel() and ((back - t)[away].abs() <= limit / 8).all()
    assert sided(t, "swiglu") is t


def test_h_is_kept_in_half_of_the_bytes():
    """Gate and up of each expert's rows in tiles from the expert's first row on."""
    E, D, F, N = 3, 256, 192, 500
    packed = torch.zeros(KeptH.size(N, (E, D, F), "swiglu"), dtype=torch.uint8)
    assert 2 * N * F < len(packed) < 1.02 * 2 * N * F
    h, at = torch.randn(N, 2 * F), KeptH.of(packed, N, (E, D, F), "swiglu")
    ends = [130, 130, 500]
    for _, lo, hi, tile in fp8_cpu.tiled(ends):
        at.keep(h[lo:hi], lo, tile, "swiglu")
    for (_, lo, hi, tile), first in zip(fp8_cpu.tiled(ends), (0, 4), strict=True):
        assert tile == first  # 130 rows have two tiles of 128
        want = [rounded_tiles(half) for half in h[lo:hi].chunk(2, 1)]
        assert torch.equal(at.rows(lo, hi, tile), torch.cat(want, 1))


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
def test_the_transposed_copy_has_the_same_codes(halves, dtype):
    """Of matrices that end in half a block; gate and up share no block."""
    w = torch.randn(3, halves * 144, 208).to(dtype)
    w[:, :144] *= 100
    packed = encode(w, halves)
    assert packed.shape == (Codes.size((3, halves * 144, 208), halves),)
    codes = Codes.of(packed, tuple(w.shape), halves)
    assert torch.equal(codes.turned.view(torch.uint8), codes.codes.mT.contiguous().view(torch.uint8))
    assert codes.scales.shape == (3 * halves, 2, 2)
    back = torch.stack([codes.value(m) for m in range(3 * halves)])
    for part, whole in zip(back, w.view(3 * halves, 144, 208), strict=True):
        assert error(part, whole) < 4e-2


def layer(outliers, activation="swiglu", dtype=bf16, T=512, D=512, F=256, E=2, K=2, biased=False):
    """Operands of one layer. Outliers: 8 features 20 times as large, tokens of log-normal size."""
    draw = torch.Generator().manual_seed(1)

    def randn(*shape):
        return torch.randn(*shape, generator=draw)

    x, dy = randn(T, D), randn(T, D) * 1e-3
    if outliers:
        x[:, :8] *= 20
        x *= (0.7 * randn(T, 1)).exp()
        dy *= (1.5 * randn(T, 1)).exp()
    rows = named(activation).halves * F
    gate_up, down = randn(E, rows, D) * D**-0.5, randn(E, D, F) * F**-0.5
    bias = randn(E, rows).to(dtype) if biased else None
    weights, ids = torch.rand(T, K, generator=draw), torch.randint(0, E, (T, K), generator=draw)
    x, dy, gate_up, down = (t.to(dtype) for t in (x, dy, gate_up, down))
    return (x, gate_up, down, weights, ids, bias), dy


def gradients(op, tensors, dy, *how, **more):
    """y and the gradients of x, gate_up, down and weights."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors[:4]]
    y = op(*leaves, *tensors[4:], *how, **more)
    y.backward(dy)
    return y.detach(), *(t.grad for t in leaves)


def codes_of(tensors, activation="swiglu"):
    return encode(tensors[1], named(activation).halves), encode(tensors[2])


NAMES = "y", "dx", "d_gate_up", "d_down", "d_weights"


@pytest.mark.parametrize("products", [4, 6])
@pytest.mark.parametrize("outliers", [False, True], ids=["normal", "outliers"])
@pytest.mark.parametrize("activation", ["swiglu", "relu2", "geglu"])
def test_accuracy(activation, outliers, products, monkeypatch):
    """The bars: 8e-2 on normal data, 1e-1 with outliers, against fp64 of the same operands.

    bf16 has 4e-3 here. relu2 squares the error of H, and has twice its slope. Six products: gradients of
    matrices too.
    """
    if products == 6:
        monkeypatch.setattr(fp8_table, "forced", fp8_gpu.WEIGHTS)
    tensors, dy = layer(outliers, activation)
    got = gradients(moe_mlp, tensors, dy, activation, codes=codes_of(tensors, activation))
    exact = [None if t is None else t.double() for t in tensors]
    exact[4] = tensors[4]
    want = gradients(reference.moe_mlp, exact, dy.double(), activation)
    bar = 1e-1 if outliers else 8e-2
    for name, ours, theirs in zip(NAMES, got, want, strict=True):
        assert 1e-2 < error(ours, theirs) < bar, (name, error(ours, theirs))


def test_gradients_of_matrices_are_of_rounded_blocks(monkeypatch):
    """Each expert's rows have blocks of 128 x 128, from the expert's first row on."""
    tensors, dy = layer(True, dtype=fp32, T=300, D=144, F=80, E=2)
    codes = codes_of(tensors)
    seen = {}
    product = cpu.gradients_of_matrices

    def look(gate_up, down, *operands, **more):
        seen[len(seen)] = [t.detach() for t in operands]
        return product(gate_up, down, *operands, **more)

    monkeypatch.setattr(cpu, "gradients_of_matrices", look)
    gradients(moe_mlp, tensors, dy, codes=codes)
    monkeypatch.setattr(fp8_table, "forced", fp8_gpu.WEIGHTS)
    gradients(moe_mlp, tensors, dy, codes=codes)
    (dy_TD, x_TD, tokens, dh, act), (*rows, numbers, dh8, act8) = seen[0], seen[1]
    assert torch.equal(numbers, torch.arange(len(tokens)))
    ends = torch.bincount(tensors[4].flatten(), minlength=2).cumsum(0).tolist()
    for lo, hi in zip([0, *ends], ends, strict=False):
        for plain, got in zip((dy_TD[tokens], x_TD[tokens], dh, act), (*rows, dh8, act8), strict=True):
            assert torch.equal(got[lo:hi], rounded_blocks(plain[lo:hi]))
            assert 1e-2 < error(got[lo:hi], plain[lo:hi]) < 4e-2


def test_clamps_near_outliers_miss_the_bar_by_their_mask_alone():
    """gpt-oss's clamps: H's error moves values over the limit, where the gradient is 0. y holds the bar.

    The cast of H moves none: with H in bf16 the error of dx is 0.110. dx and the gradient of gate_up hold the
    bar against fp64 that clamps the same elements as fp8's H.
    """
    tensors, dy = layer(True, "clamped:alpha=1.702,limit=7")
    packed = codes_of(tensors, "clamped")
    got = gradients(moe_mlp, tensors, dy, "clamped", codes=packed)
    codes, x8_TD = Codes.of(packed[0], tuple(tensors[1].shape), 2), rounded_rows(tensors[0])

    def clamped(x, gate_up, down, weights, ids, own_mask):
        y = torch.zeros_like(x)
        for e in range(2):
            t, k = torch.where(ids == e)
            halves = gate, up = (x[t] @ gate_up[e].T).chunk(2, 1)
            if not own_mask:
                halves = ((x8_TD[t] @ codes.value(2 * e + half).T).to(bf16) for half in range(2))
            g8, u8 = halves
            g = torch.where(g8 > 7, 7.0, gate)
            u = torch.where(u8.abs() > 7, 7.0 * u8.sign(), up)
            act = (u + 1) * g * torch.sigmoid(1.702 * g)
            y = y.index_add(0, t, act @ down[e].T * weights[t, k, None])
        return y

    exact = [*(t.double() for t in tensors[:4]), tensors[4]]
    errors, of_one_mask = (
        dict(zip(NAMES, map(error, got, gradients(clamped, exact, dy.double(), own)), strict=True))
        for own in (True, False)
    )
    assert max(of_one_mask.values()) < 1e-1, of_one_mask
    assert errors["y"] < 1e-1 and errors["d_down"] < 1e-1
    assert 1e-1 < errors["dx"] < 1.2e-1 and 1e-1 < errors["d_gate_up"] < 2e-1, errors
    want = gradients(reference.moe_mlp, [*exact, None], dy.double(), "clamped")
    for name, ours, theirs in zip(NAMES, gradients(clamped, exact, dy.double(), True), want, strict=True):
        assert error(ours, theirs) < 1e-12, name


def test_each_rounding_point():
    """One expert by hand, with scales by log2: x, matrices, act, H, dy and dH are rounded once, no more."""
    (x, gate_up, down, *_), dy = layer(True, dtype=fp32, T=100, D=144, F=80, E=1, K=1)
    ones, ids = torch.ones(100, 1), torch.zeros(100, 1, dtype=torch.long)

    def rounded(t, rows, columns):
        out = t.clone()
        for i in range(0, t.shape[0], rows):
            for j in range(0, t.shape[1], columns):
                part = t[i : i + rows, j : j + columns]
                scale = 2.0 ** torch.ceil(torch.log2(part.abs().max().double() / 448))
                out[i : i + rows, j : j + columns] = (part / scale).to(torch.float8_e4m3fn).float() * scale
        return out

    wg, wu = (rounded(t, 128, 128) for t in gate_up[0].chunk(2))
    wd = rounded(down[0], 128, 128)
    x8, dy8 = rounded(x, 1, 144), rounded(dy, 1, 144)
    g, u = x8 @ wg.T, x8 @ wu.T
    act = torch.nn.functional.silu(g) * u
    y = rounded(act, 64, 128) @ wd.T
    g, u = rounded(g, 64, 128), rounded(u, 64, 128)
    act = torch.nn.functional.silu(g) * u
    da, sig = dy8 @ wd, torch.sigmoid(g)
    dg, du = da * u * sig * (1 + g * (1 - sig)), da * g * sig
    dx = rounded(dg, 64, 128) @ wg + rounded(du, 64, 128) @ wu
    want = y, dx, torch.cat([dg.T @ x, du.T @ x])[None], (dy.T @ act)[None], (da * act).sum(1, keepdim=True)
    tensors = x, gate_up, down, ones, ids, None
    got = gradients(moe_mlp, tensors, dy, codes=codes_of(tensors))
    for name, ours, theirs in zip(NAMES, got, want, strict=True):
        # sums of another order may round to another code: 1 of 16 of a number, of few numbers
        assert error(ours, theirs) < 1e-3, (name, error(ours, theirs))


def test_all_kinds_of_op_have_the_same_gradients():
    """Trained, summed, deferred and frozen, with a bias and slots without an expert."""
    tensors, dy = layer(False, T=70, D=64, F=48, E=3, biased=True)
    tensors[4][::5] = -1
    codes = codes_of(tensors)
    y, dx, d_gate_up, d_down, d_weights = gradients(moe_mlp, tensors, dy, codes=codes)
    x, gate_up, down, weights, ids, bias = tensors
    others = x, gate_up, down, weights

    def run(op):
        rows = [x.clone().requires_grad_(), gate_up, down, weights.clone().requires_grad_()]
        out = op(*rows, ids, bias, codes=codes)
        out.backward(dy)
        assert torch.equal(out, y) and torch.equal(rows[0].grad, dx)
        assert torch.equal(rows[3].grad, d_weights)

    run(moe_mlp)
    with collecting() as left:
        run(moe_mlp_deferred)
    (later,) = left
    for ours, theirs in zip(later.gradients(), (d_gate_up, d_down), strict=True):
        assert torch.equal(ours, theirs)
    sums = [Sum(t) for t in others[1:3]]
    for total in sums:
        gradient_sums.offer(total)
    run(moe_mlp_summed)
    for total, theirs in zip(sums, (d_gate_up, d_down), strict=True):
        assert error(total.total, theirs) < 4e-3


def test_the_op_is_one_graph_and_what_its_schema_says():
    tensors, dy = layer(False, T=70, D=64, F=48, E=3)
    codes = codes_of(tensors)
    compiled = torch.compile(moe_mlp, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(
        gradients(compiled, tensors, dy, codes=codes),
        gradients(moe_mlp, tensors, dy, codes=codes),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    leaves = [t.clone().requires_grad_() for t in tensors[:4]]
    args = *leaves, tensors[4], None, *codes, "swiglu", tensors[4].numel(), True
    torch.library.opcheck(torch.ops.tmoe.moe_mlp.default, args)
    torch.library.opcheck(torch.ops.tmoe.fp8_encode.default, (tensors[1], 2))


def test_empty_inputs():
    tensors, dy = layer(False, T=0, D=64, F=48, E=3)
    y, *grads = gradients(moe_mlp, tensors, dy, codes=codes_of(tensors))
    assert y.shape == (0, 64) and not any(grad.any() for grad in grads)


def test_codes_that_do_not_fit_are_refused():
    tensors, _ = layer(False, T=4, D=64, F=48, E=3)
    up, down = codes_of(tensors)
    with pytest.raises(ValueError, match=r"gate_up's codes: got torch.uint8 \(18444,\)"):
        moe_mlp(*tensors, codes=(down, down))
    with pytest.raises(ValueError, match="down's codes: got None"):
        moe_mlp(*tensors, codes=(up, None))
    half = [None if t is None else t.half() if t.is_floating_point() else t for t in tensors]
    with pytest.raises(ValueError, match=r"x: got torch\.float16"):
        moe_mlp(*half, codes=(up, down))
    with pytest.raises(ValueError, match="matrix: got shape"):
        encode(torch.randn(2, 24, 16), 2)
    assert fp8_codes.blank(tensors[1], 2).shape == up.shape
