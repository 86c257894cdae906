"""Muon on a GPU: a step by kernels and in plain torch, the products, a skipped step without the host.

next: tests/ops/test_muon_kernels.py
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.muon_step import CANDIDATES
from tmoe.config.run import OptimConfig
from tmoe.ops import symmetric
from tmoe.ops.newton_schulz import by_launches, orthogonal
from tmoe.ops.symmetric import Terms, commuting_product, stacked_product, symmetric_product
from tmoe.optim.adamw import build_optimizer, init_state, optimizer_tensors
from tmoe.optim.matrices import Rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SHAPES = dict(embedding=(64, 32), qkv=(192, 128), experts=(6, 96, 200), tall=(3, 200, 96), norm=(32,))
BF16, FP16 = torch.bfloat16, torch.float16


def drawn(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def trained(
    device: torch.device, products: torch.dtype, grads: torch.dtype, **optim
) -> dict[str, torch.Tensor]:
    """Weights and state after three steps: the second is clipped, the third skipped, with NaN in it."""
    params = {name: nn.Parameter(t.to(device)) for name, t in drawn(0).items()}
    cfg = OptimConfig(lr=1e-2, muon=".", **optim)
    parts = dict(qkv=[Rows(0, 128), Rows(128, 64)])
    optimizer = build_optimizer(params.items(), cfg, device, parts=parts, products=products, seed=1)
    init_state(optimizer)
    for step in range(3):
        for name, grad in drawn(10 + step).items():
            params[name].grad_dtype = None
            params[name].grad = grad.to(device, grads)
        if step == 2:
            params["experts"].grad[0, 0, 0] = torch.nan
        finite = torch.tensor(float(step < 2), device=device)
        optimizer.decide(finite, torch.tensor(4.0 if step == 1 else 0.5, device=device), 1.0)
        optimizer.step()
    state = optimizer_tensors(optimizer, params)
    return {name: t.detach().float().cpu() for name, t in (params | state).items()}


@pytest.mark.parametrize("optim", [{}, dict(offload=True), dict(states="bf16"), dict(states="int8")])
def test_a_gpu_takes_the_cpus_steps(optim):
    want = trained(CPU, torch.float32, torch.float32, **optim)
    found = trained(CUDA, torch.float32, torch.float32, **optim)
    assert found.keys() == want.keys()
    for name, t in want.items():
        near = 2e-2 if optim.get("states") and "momentum" in name else 1e-4
        assert (found[name] - t).norm() <= near * t.norm().clamp(min=1), name


def test_bf16_products_stay_near():
    want, found = (trained(CUDA, kind, BF16) for kind in (torch.float32, BF16))
    for name in ("qkv", "experts", "tall"):
        moved = want[name] - drawn(0)[name]
        assert (found[name] - want[name]).norm() < 5e-2 * moved.norm(), name
        assert torch.equal(found[f"momentum.{name}"], want[f"momentum.{name}"])


SHORT = [(768, 2048), (2048, 768), (1408, 2048), (200, 136), (136, 1000), (64, 64), (100, 60)]


@pytest.mark.parametrize(("rows", "columns"), SHORT)
@pytest.mark.parametrize("portable", [False, True])
def test_products_by_kernels_are_the_same_iteration(rows, columns, portable, monkeypatch):
    """Within 2e-2 of the fp32 iteration, as torch's products in bf16 are; also of rows of larger matrices.

    The shapes that are longer than wide have pairs of iterations.
    """
    if portable:
        monkeypatch.setattr(symmetric, "on_hopper", lambda *stacks: False)
    fused = torch.randn(5, 2 * rows, columns, device=CUDA, generator=torch.Generator(CUDA).manual_seed(0))
    fused[1] = 0
    x, results = fused.to(BF16)[:, rows:], torch.full_like(fused, 7.0, dtype=BF16)
    want = orthogonal(x.float())
    squares = x.float().square().sum((-2, -1))
    for found in (orthogonal(x), orthogonal(x, 5, squares, results[:, :rows]), results[:, :rows]):
        assert (found.float() - want).norm() < 2e-2 * want.norm(), (found.float() - want).norm() / want.norm()
        assert found[1].eq(0).all()
    assert results[:, rows:].eq(7).all()


@pytest.mark.parametrize("portable", [False, True])
def test_fp16_between_is_not_farther_than_bf16(portable, monkeypatch):
    """Matrices of few directions and noise: single iterations and pairs; bf16 is ten times as far."""
    if portable:
        monkeypatch.setattr(symmetric, "on_hopper", lambda *stacks: False)
    draw = torch.Generator(CUDA).manual_seed(0)
    few = torch.randn(2, 768, 24, device=CUDA, generator=draw) @ torch.randn(
        2, 24, 2048, device=CUDA, generator=draw
    )
    noise = torch.randn(2, 768, 2048, device=CUDA, generator=draw)
    x = (few / few.norm() + 0.01 * noise / noise.norm()).to(BF16)
    want = orthogonal(x.float())
    scales = 1 / (torch.linalg.vector_norm(x, dim=(-2, -1), dtype=torch.float32) * 1.01 + 1e-7)

    def far(**options) -> float:
        found = torch.empty_like(x)
        by_launches(x, scales, 5, found, **options)
        return ((found.float() - want).norm() / want.norm()).item()

    before = far(pairs=False, between=BF16)
    assert far(pairs=False) < 0.5 * before and far(pairs=True) < 0.5 * before


@pytest.mark.parametrize("kind", ["gram", "mix", "commuting", "update"])
@pytest.mark.parametrize(("m", "n"), [(768, 2048), (1408, 712), (128, 128), (200, 136), (2880, 2880)])
@pytest.mark.parametrize("tall", [False, True])
def test_each_product_of_hoppers_kernel(kind, m, n, tall, monkeypatch):
    """Each tile of the benchmark's choice, against fp32 products of the same numbers, to bf16's rounding."""
    draw = torch.Generator(CUDA).manual_seed(0)
    x = torch.randn(5, m, n, device=CUDA, generator=draw).to(BF16) / n**0.5
    scales = torch.rand(5, device=CUDA, generator=draw) + 0.5
    gram = symmetric_product(x, scales, Terms(1.0))
    wide, s, stored = x.float(), scales[:, None, None], x.mT.contiguous() if tall else x
    one = torch.eye(m, device=CUDA)
    half, other = symmetric_product(x, scales, Terms(1.0), dtype=FP16), (0.5 * gram + 1.0).to(FP16)
    below = torch.arange(m, device=CUDA) // 128
    below = below[:, None] >= below[None, :]
    for tile in CANDIDATES[kind]:
        monkeypatch.setitem(symmetric.TILES, kind, tile)
        if kind == "gram":
            found, want = symmetric_product(stored, scales, Terms(2.0), tall), 2 * s * (wide @ wide.mT)
        elif kind == "mix":
            found = symmetric_product(gram, scales, Terms(0.5, -2.0, 3.0))
            g = gram.float()
            want = s * (0.5 * g @ g - 2.0 * g + 3.0 * one)
        elif kind == "commuting":
            found = commuting_product(half, other, scales, BF16 if tall else FP16)
            want = s * (half.float() @ other.float())
            want = torch.where(below, want, want.mT)
        elif tall:
            found, want = stacked_product(stored, gram, torch.empty_like(stored)), wide.mT @ gram.float()
        else:
            found, want = stacked_product(gram, x, torch.empty_like(x)), gram.float() @ wide
        if kind in ("gram", "mix"):
            assert torch.equal(found, found.mT), tile
        torch.testing.assert_close(found.float(), want, rtol=2**-7, atol=2e-3, msg=str(tile))


def test_the_host_does_not_wait():
    params = {name: nn.Parameter(t.to(CUDA)) for name, t in drawn(0).items()}
    optimizer = build_optimizer(params.items(), OptimConfig(muon="."), CUDA, products=BF16)
    init_state(optimizer)
    for step in range(2):
        for name, p in params.items():
            p.grad = drawn(step)[name].to(CUDA)
        finite, norm = torch.ones((), device=CUDA), torch.ones((), device=CUDA)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            optimizer.decide(finite, norm, 1.0)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
