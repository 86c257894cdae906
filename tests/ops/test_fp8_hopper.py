"""The Gluon kernels of experts in fp8 without a GPU, in threads: numbers of the twin, and barriers that end.

next: test_fp8_kernels.py
"""

from pathlib import Path
from types import SimpleNamespace

import gluon_threads
import pytest
import torch

from tmoe.base.activations import activation as named
from tmoe.ops.experts import cpu, fp8_cpu, fp8_gpu, gpu
from tmoe.ops.experts import kernels as first_file
from tmoe.ops.experts.fp8_codes import KeptH, encode, rounded_blocks, rounded_rows, rounded_tiles, sided
from tmoe.ops.experts.pair_order import Metadata

FOLDER = Path(first_file.__file__).parent
FILES = [FOLDER / f"{name}.py" for name in ("kernels", "fp8_kernels", "hopper", "fp8_hopper")]
BF16 = 3e-3  # bound of the error of numbers in bf16


@pytest.fixture
def threads(monkeypatch):
    """Launches run in threads, on three multiprocessors."""

    def use(change=("", "")):
        space = gluon_threads.kernels_of(*FILES, change=change)

        def launch(kernel, grid, *args, **options):
            name = kernel if isinstance(kernel, str) else kernel.__name__
            gluon_threads.run(space[name], grid, *args)

        monkeypatch.setattr(fp8_gpu, "launch", launch)

    names = SimpleNamespace(fp8_specialised="fp8_specialised")
    monkeypatch.setattr(fp8_gpu, "fp8_hopper", names)
    monkeypatch.setattr(gpu, "device_facts", lambda device: ("cuda:90", 3, True))
    monkeypatch.setattr(gpu, "has_tma", lambda *args: True)
    use()
    return use


def metadata(ids, E):
    """The tables that kernels of fp8 read, from the CPU's routing."""
    order, ends = cpu.route(ids, E)
    meta = Metadata(torch.zeros(Metadata.size(ids.numel(), E), dtype=torch.int32), ids.numel(), E)
    bounds = torch.tensor([0, *ends], dtype=torch.int32)
    meta.offsets.copy_(bounds)
    meta.by_size.copy_(bounds.diff().argsort(descending=True))
    meta.order[: len(order)] = order
    tiles = [(e, row) for e in range(E) for row in range(int(bounds[e]), int(bounds[e + 1]), 128)]
    table, capacity = meta.tiles[128], meta.capacity(ids.numel(), E, 128)
    table[0] = len(tiles)
    for i, numbers in enumerate(zip(*tiles, strict=True)):
        table[4 + i * capacity :][: len(tiles)] = torch.tensor(numbers)
    return meta, order, ends


class Layer:
    """Operands of a layer in bf16, and its launches."""

    def __init__(self, T, D, F, E, K, activation="swiglu", biased=False):
        draw = torch.Generator().manual_seed(T)
        randn = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
        self.n, self.K, self.of, self.activation = named(activation).halves, K, named(activation), activation
        self.x = (randn(T, D) * randn(T, 1).exp()).bfloat16()
        self.x[1] = 0
        self.dy = (randn(T, D) * 1e-3).bfloat16()
        self.gate_up = (randn(E, self.n * F, D) * D**-0.5).bfloat16()
        self.down = (randn(E, D, F) * F**-0.5).bfloat16()
        self.bias = randn(E, self.n * F).bfloat16() if biased else None
        ids = torch.randint(-1, E, (T, K), generator=draw)
        ids = ids.where(ids != 1, 0)  # expert 1 has no rows
        self.weights = torch.rand(T, K, generator=draw)
        codes = encode(self.gate_up, self.n), encode(self.down)
        self.meta, self.order, self.ends = metadata(ids, E)
        shape, matrices = (E, D, F), (self.gate_up, self.down)
        self.launches = fp8_gpu.Fp8Launches(
            self.x, shape, K, self.meta, self.weights, matrices, activation, codes=codes, casts={}
        )
        experts = cpu.ExpertWeights(*matrices, self.bias, activation)
        self.matrices = fp8_cpu.Matrices(experts, codes)


def check(name, got, want, bar):
    error = float((got.double() - want.double()).norm() / want.double().norm())
    assert got.isfinite().all() and error < bar, (name, error)


CLAMPED = "clamped:alpha=1.702,limit=7.0"
CASES = [  # T, D, F, E, K, activation, bias; gather, columns, stages, buffers
    ((140, 192, 160, 3, 2), True, 256, 4, 2),  # D and F end in parts of blocks
    ((140, 192, 160, 3, 2), False, 256, 3, 4),
    ((300, 64, 64, 4, 2, "geglu"), True, 128, 6, 2),  # a sum of one block, six stages
    ((200, 320, 320, 3, 2, CLAMPED, True), False, 256, 4, 2),
    ((200, 320, 448, 3, 2, "relu2"), True, 256, 4, 2),
    ((200, 320, 448, 3, 2, "relu2"), True, 128, 5, 4),
]


@pytest.mark.parametrize("shape, gather, columns, stages, buffers", CASES, ids=str)
def test_products(threads, monkeypatch, shape, gather, columns, stages, buffers):
    layer = Layer(*shape)
    run = layer.launches

    def own(self, kernel):
        cfg = fp8_gpu.HOPPER[kernel]._replace(gather=gather, stages=stages, outs=buffers, BN=columns)
        paired = kernel == "up" and layer.n == 2  # 128 columns of each half
        return cfg._replace(BN=256, stages=3) if paired else cfg

    monkeypatch.setattr(fp8_gpu.Fp8Launches, "own", own)
    h = run.room_for_h()
    of_h = KeptH.of(h, run.N, (run.E, run.D, run.F), layer.activation)
    y = run.products(layer.gate_up, layer.bias, h, layer.down)
    dh, act, ds = run.dh(layer.dy, layer.down, h)
    dx = run.rows("dx", dh, layer.gate_up, False)

    x8, dy8, m = rounded_rows(layer.x), rounded_rows(layer.dy), layer.matrices
    for e, lo, hi, tile in fp8_cpu.tiled(layer.ends):
        tokens, w = layer.order[lo:hi] // layer.K, layer.weights.view(-1)[layer.order[lo:hi], None]
        want = x8[tokens] @ m.gate_up_2FD(e).T
        if layer.bias is not None:
            want += layer.bias[e].float()
        kept = of_h.rows(lo, hi, tile)
        halves = [rounded_tiles(sided(half, layer.activation)) for half in want.chunk(layer.n, 1)]
        check("h", kept, torch.cat(halves, 1), BF16)
        check("y", y[lo:hi], rounded_tiles(layer.of.of(want)) @ m.down_DF(e).T, BF16)
        d_act = dy8[tokens] @ m.down_DF(e)
        check("act", act[lo:hi], layer.of.of(kept) * w, BF16)
        check("ds", ds[:, lo:hi].sum(0), torch.linalg.vecdot(d_act, layer.of.of(kept)), 1e-5)
        want = torch.empty_like(kept)
        layer.of.gradient_of(kept, d_act * w, want)
        check("dh", dh[lo:hi], want, BF16)
        coded = torch.cat([rounded_tiles(half) for half in dh[lo:hi].float().chunk(layer.n, 1)], 1)
        check("dx", dx[lo:hi], coded @ m.gate_up_2FD(e), BF16)


@pytest.mark.parametrize("columns", [256, 128])
@pytest.mark.parametrize("sums", ["", "write", "add"])
def test_gradients_of_matrices(threads, monkeypatch, sums, columns):
    """In bf16, and written or added to a sum in fp32."""
    layer = Layer(300, 320, 448, 5, 2)
    run, stages = layer.launches, 4 if columns == 256 else 6
    config = fp8_gpu.WEIGHTS["dw_up"]._replace(BN=columns, stages=stages)
    monkeypatch.setattr(fp8_gpu.Fp8Launches, "weights_config", lambda self, kernel: config)
    dh, act = torch.randn(run.N, run.H).bfloat16(), torch.randn(run.N, run.F).bfloat16()
    before = [torch.randn(m.shape) for m in (layer.down, layer.gate_up)] if sums else [None, None]
    want = [torch.zeros(m.shape) for m in (layer.down, layer.gate_up)]
    if sums == "add":
        want = [t.clone() for t in before]
    for e, lo, hi in cpu.spans(layer.ends):
        tokens = layer.order[lo:hi] // layer.K
        want[0][e] += rounded_blocks(layer.dy[tokens]).T @ rounded_blocks(act[lo:hi])
        want[1][e] += rounded_blocks(dh[lo:hi]).T @ rounded_blocks(layer.x[tokens])
    got = [
        run.dw("dw_down", layer.dy, act, "a", before[0], sums or "again"),
        run.dw("dw_up", dh, layer.x, "b", before[1], sums or "again"),
    ]
    for name, ours, theirs in zip(("down", "gate_up"), got, want, strict=True):
        assert ours.dtype == (torch.float32 if sums else torch.bfloat16)
        check(name, ours, theirs, 1e-5 if sums else BF16)


FAULTS = [
    ("        mbarrier.arrive(empty.index(s), count=1)\n", "", "never reached"),
    ("count=129 if GATHER else 1", "count=128 if GATHER else 1", "arrival too many"),
    ("(NB if GATHER else NB + 1) * 128 * 128", "NB * 128 * 64", "never reached"),
    ("    tma.store_wait(pendings=0)\n\n", "\n", "no wait has ended"),
]


@pytest.mark.parametrize("what, instead, said", FAULTS, ids=[said for *_, said in FAULTS])
def test_faults_are_seen(threads, monkeypatch, what, instead, said):
    """Threads notice an arrival that lacks or is one too many, wrong bytes, and a store that nothing ends."""
    monkeypatch.setattr(gluon_threads, "PATIENCE", 0.5)
    monkeypatch.setattr(fp8_gpu.Fp8Launches, "own", lambda self, kernel: fp8_gpu.HOPPER[kernel])
    assert what in FILES[3].read_text()
    threads((what, instead))
    layer = Layer(140, 640, 160, 3, 2)
    with pytest.raises(AssertionError, match=said):
        layer.launches.up_cast(None, None)
