"""Experts with fp8 products on a Hopper GPU: the twin's numbers, bits of casts, windows, kinds of op, replay.

next: tests/ops/test_fp8_experts.py
"""

import pytest
import torch

from tmoe.base.activations import activation as named
from tmoe.ops.experts import fp8_gpu, fp8_table
from tmoe.ops.experts.deferred import collecting
from tmoe.ops.experts.fp8_codes import E4M3, coded, encode
from tmoe.ops.experts.op import moe_mlp, moe_mlp_deferred
from tmoe.ops.launch import replay
from tmoe.ops.launch.kernel_launch import device_facts

pytestmark = pytest.mark.gpu
LIMITED = "clamped:alpha=1.702,limit=7"
CASES = [  # T, D, F, E, K, activation, bias, rows of a window (None: all)
    (700, 384, 192, 5, 2, "swiglu", False, None),
    (2000, 512, 320, 8, 4, LIMITED, True, None),
    (900, 256, 128, 3, 2, "relu2", False, 512),
    (300, 64, 64, 4, 2, "geglu", False, None),  # sums shorter than the ring of operands
]


@pytest.fixture(autouse=True)
def hopper():
    arch = device_facts(torch.device("cuda", 0))[0]
    if arch != "cuda:90":
        pytest.skip(f"{arch} has no fp8 kernels of experts")


FORMS = dict(
    plain=fp8_gpu.CONFIGS | {name: cfg._replace(outs=0) for name, cfg in fp8_gpu.WEIGHTS.items()},
    hopper=fp8_gpu.HOPPER | {name: cfg._replace(outs=0) for name, cfg in fp8_gpu.WEIGHTS.items()},
    six=fp8_gpu.HOPPER | fp8_gpu.WEIGHTS,
)


@pytest.fixture(autouse=True, params=FORMS)
def form(request, monkeypatch):
    """Plain Triton's kernels; those of fp8_hopper.py, and with six products in fp8."""
    monkeypatch.setattr(fp8_table, "forced", FORMS[request.param])
    replay._programs.clear()
    yield request.param
    replay._programs.clear()


def layer(T, D, F, E, K, activation, biased):
    draw = torch.Generator().manual_seed(T)
    n = named(activation).halves
    shapes = (T, D), (E, n * F, D), (E, D, F), (T, D), (E, n * F)
    x, gate_up, down, dy, bias = (torch.randn(s, generator=draw).bfloat16() for s in shapes)
    x *= torch.randn(T, 1, generator=draw).exp().bfloat16()
    x[1] = 0
    ids = torch.randint(-1, E, (T, K), generator=draw)
    ids = ids.where(ids != 1, 0)  # an expert without rows
    weights = torch.rand(T, K, generator=draw)
    return [x, gate_up * D**-0.5, down * F**-0.5, weights, ids, bias if biased else None], dy * 1e-3


def gradients(tensors, dy, activation, pairs=None, op=moe_mlp):
    codes = encode(tensors[1], named(activation).halves), encode(tensors[2])
    leaves = [t.detach().requires_grad_() for t in tensors[:4]]
    y = op(*leaves, *tensors[4:], activation, pairs, codes)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def on_gpu(tensors):
    return [t if t is None else t.cuda() for t in tensors]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_the_twin(case):
    *sizes, activation, biased, pairs = case
    tensors, dy = layer(*sizes, activation, biased)
    want = gradients(tensors, dy, activation)
    got = gradients(on_gpu(tensors), dy.cuda(), activation, pairs)
    # codes differ where sums of another order round to another code; a window groups other rows together
    bar = 3e-2 if pairs is None else 6e-2
    for name, ours, theirs in zip("y dx d_gate_up d_down d_weights".split(), got, want, strict=True):
        error = float((ours.cpu().double() - theirs.double()).norm() / theirs.double().norm())
        assert ours.isfinite().all() and error < bar, (name, error)


def test_casts_have_the_bits_of_plain_torch():
    x = torch.randn(300, 2880).bfloat16()
    x[1], x[2], x[3] = 0, x[2] * 1e-30, x[3] * 1e30
    x[4, 7] = float("nan")
    codes, scales = torch.empty(300, 2880, dtype=E4M3, device="cuda"), torch.empty(300, device="cuda")
    fp8_gpu.cast_rows(x.cuda(), codes, scales)
    want, of_rows = coded(x, 1, 2880)
    assert torch.equal(codes.cpu().view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scales.cpu(), of_rows[:, 0])
    w = torch.randn(3, 416, 2880).bfloat16()
    assert torch.equal(encode(w.cuda(), 2).cpu(), encode(w, 2))


def test_nan_reaches_the_result_and_the_gradients():
    """So the step's finite check sees it."""
    tensors, dy = layer(300, 256, 128, 3, 2, "swiglu", False)
    tensors[0][5, 3] = float("nan")
    tensors[4][5] = 0
    y, dx, d_gate_up, *_ = gradients(on_gpu(tensors), dy.cuda(), "swiglu")
    assert y[5].isnan().any() and dx[5].isnan().any() and d_gate_up[0].isnan().any()
    assert d_gate_up[2].isfinite().all()


def test_calls_are_replayed_with_equal_bits():
    """From the third call on no decision is made on the host."""
    tensors, dy = layer(700, 384, 192, 5, 2, "swiglu", False)
    tensors, dy = on_gpu(tensors), dy.cuda()
    first, *others = [gradients(tensors, dy, "swiglu") for _ in range(4)]
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a, b)
    programs = [program for kind, program in replay._programs.items() if kind[0] is fp8_gpu.forward]
    assert programs and all(isinstance(program, replay.Program) for program in programs)


def test_deferred_gradients_are_those_of_one_backward():
    tensors, dy = layer(700, 384, 192, 5, 2, "swiglu", False)
    tensors, dy = on_gpu(tensors), dy.cuda()
    _, dx, d_gate_up, d_down, d_weights = gradients(tensors, dy, "swiglu")
    codes = encode(tensors[1], 2), encode(tensors[2])
    x, weights = (tensors[i].detach().requires_grad_() for i in (0, 3))
    with collecting() as left:
        moe_mlp_deferred(x, *tensors[1:3], weights, *tensors[4:], "swiglu", None, codes).backward(dy)
    (later,) = left
    for ours, theirs in zip(
        (x.grad, weights.grad, *later.gradients()), (dx, d_weights, d_gate_up, d_down), strict=True
    ):
        assert torch.equal(ours, theirs)
