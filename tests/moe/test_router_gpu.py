"""The router's product on a GPU: the kernel's pieces bit by bit, values and gradients, graphs, no host sync.

Values and gradients are compared with fp64.

next: test_moe_gpu.py
"""

import pytest
import torch
from router_operands import ORDERS, TYPES, assert_right, bf16, every_exponent, fp32, operands, step
from torch.utils.checkpoint import checkpoint

from tmoe.config.model import MoEConfig
from tmoe.moe import router as router_module
from tmoe.moe.router import Router
from tmoe.ops.router.product import router_product, side_by_side, stacked

pytestmark = pytest.mark.gpu

MATRIX_UNITS = (
    1e-6  # they cut off what they add: more than an fp32 sum's 3e-7 of the norms, and less than this
)


@pytest.mark.parametrize("shape", [(1000, 60), (128, 512), (60, 61), (1, 8), (7, 2048)], ids=str)
def test_the_kernels_pieces_are_the_definitions(shape):
    a = torch.cat([every_exponent(), torch.tensor([float("inf"), -float("inf")])])
    a = a[torch.randint(a.numel(), shape)]
    a.flatten()[:2] = torch.tensor([torch.finfo(fp32).max, float("inf")])
    for source in (a, a.bfloat16(), a.half(), a.double()):
        for order in ORDERS:
            for lay in (side_by_side, stacked):
                assert torch.equal(lay(source.cuda(), order).cpu(), lay(source, order))


SHAPES = [
    (16384, 2048, 128),
    (512, 2048, 128),
    (1, 2048, 128),
    (3000, 512, 60),
    (700, 201, 61),
    (4096, 1024, 256),
    (64, 8, 1),
]


@TYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers(shape, dtype):
    x, w, g = operands(*shape, dtype, "cuda")
    assert_right(step(x, w, g), x, w, g, MATRIX_UNITS)


@pytest.mark.parametrize("power", [-80, -20, 40, 100])
def test_extreme_magnitudes(power):
    x, w, g = operands(500, 256, 12, fp32, "cuda")
    with torch.no_grad():
        w.mul_(2.0**power)
        x[3], w[5], g[7] = 0, 0, 0
    g = g * 2.0 ** -min(power, 90)
    assert_right(step(x, w, g), x, w, g, MATRIX_UNITS)


@TYPES
def test_no_tokens(dtype):
    x, w, g = operands(0, 64, 8, dtype, "cuda")
    y, dx, dw = step(x, w, g)
    assert y.shape == (0, 8) and dx.shape == (0, 64) and dw.shape == (8, 64) and not dw.any()


@pytest.fixture
def tf32():
    """tf32 is allowed for torch's own products.

    torch's property is no attribute that monkeypatch can restore.
    """
    before = torch.backends.cuda.matmul.allow_tf32

    def allow() -> None:
        torch.backends.cuda.matmul.allow_tf32 = True

    yield allow
    torch.backends.cuda.matmul.allow_tf32 = before


def test_tf32_autocast_and_strides_change_nothing(tf32):
    x, w, g = operands(400, 128, 24, fp32, "cuda")
    g = g[:, :1].expand(400, 24)
    want = step(x, w, g)
    tf32()
    with torch.autocast("cuda", torch.float16):
        got = step(x, w, g)
    again = step(x, w, g.contiguous(), lambda x, w: checkpoint(router_product, x, w, use_reentrant=False))
    for a, b, c in zip(want, got, again, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@TYPES
def test_a_graph_replays_it(dtype):
    x, w, g = operands(700, 512, 60, dtype, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(x, w, g)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = step(x, w, g)
    for _ in range(2):
        with torch.no_grad():
            x.normal_()
            w.normal_()
            g.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert_right(out, x, w, g, MATRIX_UNITS)


def test_compiled_for_every_T_without_sync():
    _, w, _ = operands(1, 256, 32, bf16, "cuda")
    compiled = torch.compile(router_product, fullgraph=True, dynamic=True)
    for i, T in enumerate((40, 33, 1000)):
        x, _, g = operands(T, 256, 32, bf16, "cuda")
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = step(x, w, g, compiled)
        assert_right(got, x, w, g, MATRIX_UNITS)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(x, w, g)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [bf16, fp32], ids=["bf16", "fp32"])
def test_a_router_takes_it_and_keeps_no_copy(monkeypatch, dtype):
    T, D, E = 2048, 1024, 64
    router = Router(D, MoEConfig(experts=E, top_k=8, router_bias=True)).cuda().to(dtype)
    for p in router.parameters():
        torch.nn.init.normal_(p, 0, 0.1)
    x = torch.randn(T, D, device="cuda").bfloat16().requires_grad_()
    kept = {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        got = router(x)
    assert sum(t.untyped_storage().nbytes() for t in kept.values()) < T * D * 2 + E * D * 4 + 8 * T * E * 4
    monkeypatch.setattr(router_module, "on_matrix_units", lambda x: False)
    want = router(x)
    with torch.no_grad():
        scale = x.float().norm(dim=1)[:, None] * router.weight.float().norm(dim=1)
        assert ((got.logits_TE - want.logits_TE).abs() <= 2 * MATRIX_UNITS * scale).all()
    assert (got.ids_TK != want.ids_TK).float().mean() < 1e-3, "only ties may be chosen otherwise"
    for a, b in zip(
        *(torch.autograd.grad(r.weights_TK.square().sum(), [x, router.weight]) for r in (got, want)),
        strict=True,
    ):
        assert (a.float() - b.float()).norm() <= 1e-2 * b.float().norm()
