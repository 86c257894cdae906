"""ops/muon_hopper.py on a CPU, loader and consumers in threads, against the products in fp64.

next: tests/ops/gluon_threads.py
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gluon_threads import kernels_of, run
from tiers import slow_but

from tmoe.ops import symmetric
from tmoe.ops.symmetric import Terms, Tile, commuting_product, stacked_product, symmetric_product

BF16, FP16, FP64 = torch.bfloat16, torch.float16, torch.float64
FILES = [
    Path(symmetric.__file__).parent / f"{name}.py"
    for name in ("experts/kernels", "experts/hopper", "muon_hopper")
]


@pytest.fixture
def hopper(monkeypatch):
    """Launches of a GPU with three multiprocessors run in threads."""
    kernel = kernels_of(*FILES)["stacked_kernel"]

    def launch(which, grid, *args, **options) -> None:
        assert which is kernel
        run(kernel, grid, *args)

    monkeypatch.setattr(symmetric, "launch", launch)
    monkeypatch.setattr(symmetric, "muon_hopper", SimpleNamespace(stacked_kernel=kernel))
    monkeypatch.setattr(symmetric, "device_facts", lambda device: ("cuda:90", 3, True))
    monkeypatch.setattr(symmetric, "on_hopper", symmetric.describable)


def drawn(*shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) / shape[-1] ** 0.5).to(BF16)


TILES = [Tile(256, 3, 64, 2), Tile(256, 2, 32, 2), Tile(128, 2, 64, 2)]
WHOLE = [Tile(256, 3, 128, 2), Tile(128, 2, 64, 1)]
NEAR = dict(rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("number", slow_but([0], [0, 1, 2]))
@pytest.mark.parametrize(("m", "k", "tall"), [(64, 72, False), (384, 200, False), (456, 136, True)])
def test_symmetric_products(hopper, monkeypatch, number, m, k, tall):
    """Rows of larger matrices; sides of even and odd numbers of tiles, filled and partly filled."""
    for kind in ("gram", "mix"):
        monkeypatch.setitem(symmetric.TILES, kind, TILES[number])
    x, scales = drawn(3, 2 * m, k)[:, m:], torch.tensor([1.0, 0.5, 2.0])
    stored = torch.cat([x.mT] * 2, 1)[:, :k] if tall else x
    gram = symmetric_product(stored, scales, Terms(2.0), tall)
    wide, s = x.to(FP64), scales.to(FP64)[:, None, None]
    torch.testing.assert_close(gram.to(FP64), 2 * s * wide @ wide.mT, **NEAR)
    found, wide = symmetric_product(gram, scales, Terms(0.5, -2.0, 3.0)), gram.to(FP64)
    want = s * (0.5 * wide @ wide - 2.0 * wide + 3.0 * torch.eye(m, dtype=FP64))
    torch.testing.assert_close(found.to(FP64), want, **NEAR)
    for t in (gram, found):
        torch.testing.assert_close(t, t.mT, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("number", slow_but([0], [0, 1]))
@pytest.mark.parametrize(("m", "k", "n"), [(64, 72, 64), (200, 200, 520), (392, 136, 136)])
def test_updates(hopper, monkeypatch, number, m, k, n):
    monkeypatch.setitem(symmetric.TILES, "update", WHOLE[number])
    a, b, results = drawn(3, m, k), drawn(3, 2 * k, n)[:, k:], torch.full((3, 2 * m, n), 7.0, dtype=BF16)
    found = stacked_product(a, b, results[:, :m])
    torch.testing.assert_close(found.to(FP64), a.to(FP64) @ b.to(FP64), **NEAR)
    assert results[:, m:].eq(7).all()


@pytest.mark.parametrize("number", slow_but([0], [0, 1, 2]))
@pytest.mark.parametrize("m", [64, 200, 456])
def test_commuting_products(hopper, monkeypatch, number, m):
    """Products of fp16 in fp16 and bf16: the half on and below the diagonal, and its transpose above."""
    monkeypatch.setitem(symmetric.TILES, "commuting", TILES[number])
    some, scales = drawn(3, m, m).float(), torch.tensor([1.0, 0.5, 2.0])
    a, b = (t.to(FP16) for t in (some + some.mT, some * some.mT))  # they do not commute: the halves differ
    wide = scales.to(FP64)[:, None, None] * (a.to(FP64) @ b.to(FP64))
    tile = torch.arange(m) // 128
    same = tile[:, None] == tile[None, :]  # tiles on the diagonal are whole
    for dtype in (FP16, BF16):
        found = commuting_product(a, b, scales, dtype)
        want = torch.where(same, wide, wide.tril() + wide.tril(-1).mT)
        assert found.dtype == dtype
        torch.testing.assert_close(found.to(FP64), want, **NEAR)


def test_results_of_another_type(hopper):
    """A of bf16 into fp16, and the products with X that go from bf16 to fp16 and back."""
    x, one = drawn(2, 136, 200), torch.ones(2)
    gram = symmetric_product(x, one, Terms(1.0), dtype=FP16)
    mix = symmetric_product(gram, one, Terms(0.5, -2.0, 3.0), dtype=BF16)
    first = stacked_product(mix, x, torch.empty_like(x, dtype=FP16))
    last = stacked_product(gram, first, torch.empty_like(x))
    assert [t.dtype for t in (gram, mix, first, last)] == [FP16, BF16, FP16, BF16]
    g = gram.to(FP64)
    for found, want in (
        (gram, x.to(FP64) @ x.mT.to(FP64)),
        (mix, 0.5 * g @ g - 2.0 * g + 3.0 * torch.eye(136, dtype=FP64)),
        (first, mix.to(FP64) @ x.to(FP64)),
        (last, g @ first.to(FP64)),
    ):
        torch.testing.assert_close(found.to(FP64), want, **NEAR)
