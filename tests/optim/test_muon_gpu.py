"""Muon on a GPU: a step by kernels and in plain torch, symmetric products, a skipped step without the host.

next: tests/ops/test_muon_kernels.py
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tmoe.config.run import OptimConfig
from tmoe.ops import newton_schulz
from tmoe.ops.newton_schulz import orthogonal
from tmoe.optim.adamw import build_optimizer, init_state, optimizer_tensors
from tmoe.optim.matrices import Rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SHAPES = dict(embedding=(64, 32), qkv=(192, 128), experts=(6, 96, 200), tall=(3, 200, 96), norm=(32,))
BF16 = torch.bfloat16


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


@pytest.mark.parametrize(("rows", "columns"), [(768, 2048), (2048, 768), (1408, 2048), (200, 136)])
def test_symmetric_products_are_the_same_iteration(rows, columns, monkeypatch):
    """Within 2e-2 of the fp32 iteration, as the plain products in bf16 are."""
    x = torch.randn(4, rows, columns, device=CUDA)
    want = orthogonal(x)
    for least in (None, 1):
        monkeypatch.setattr(newton_schulz, "SYMMETRIC", least)
        found = orthogonal(x.to(BF16)).float()
        assert (found - want).norm() < 2e-2 * want.norm(), (least, (found - want).norm() / want.norm())


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
