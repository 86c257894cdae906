"""Forms and tiles of quantised products of few rows, timed in CUDA graphs for benchmarks/quantised.py.

A form is kernels.few_rows (Triton), the same with parts of the length for a single matrix, or
fragments.few_rows_direct (Gluon). The products are those of a layer: experts' up and down, and attention's
qkv and out. A tile is compared with plain torch before it is timed. Experts have more codes than L2 holds. A
single matrix is timed with copies of it in turn, so that its codes are read from memory too.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tmoe.base.quantised import dequantise, quantise, stored
from tmoe.config.model import ModelConfig
from tmoe.ops import moe_mlp
from tmoe.ops.experts.gpu import LayerLaunches
from tmoe.ops.experts.pair_order import route
from tmoe.ops.launch.kernel_launch import compile_only
from tmoe.ops.quantised import gpu
from tmoe.ops.quantised.gpu import Matrix, Tile
from tmoe.ops.quantised.op import quantised_moe_mlp

# (rows of the weight, rows of x, step along the length, warps, stages); a group is int4's and nf4's step
WIDE = [(64, 8, 256, 2, 3), (64, 8, 128, 2, 4), (32, 8, 256, 1, 4), (64, 8, 256, 2, 4)]
GROUPS = [(64, 8, 128, 2, 5), (32, 8, 128, 1, 5), (64, 8, 128, 2, 7), (128, 16, 128, 2, 4)]
# rows of the weight, rows of x, bytes of a row in a step, warps, stages; of int4 a step is 64 bytes
DIRECT = [(32, 8, 256, 2, 1)]
DIRECT_GROUPS = [(64, 8, 64, 4, 1), (64, 8, 64, 4, gpu.DEEP), (32, 8, 64, 2, gpu.DEEP)]
DIRECT_GROUPS += [(128, 8, 64, 8, gpu.DEEP), (128, 8, 64, 4, gpu.DEEP)]
# a single matrix: rows of the weight, rows of x, step, warps, stages, direct, parts
ONE = [(32, 64, 128, 4, 4, False, 1), (32, 64, 256, 4, 3, False, 1), (32, 64, 128, 4, 4, False, 2)]
ONE += [(16, 64, 128, 2, 4, False, 1), (16, 64, 256, 4, 3, False, 1), (64, 64, 128, 8, 3, False, 1)]
ONE += [(128, 64, 128, 8, 3, False, 2), (128, 64, 128, 8, 3, False, 4), (32, 64, 128, 2, 4, False, 2)]
ONE_DIRECT = [(64, 32, 64, 4, 1, True, 4)]
COPIES = 16  # of a single matrix: more bytes than L2 has
SMS = 132  # of an H100 or H200, whose tiles are compiled before this process has a GPU


def ms(run: Callable[[int], Any], rounds: int = 2 * COPIES) -> float:
    """Ms of a call, as in a replayed CUDA graph: without the host's time for launches. run: gets 0, 1, ..."""
    run(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(rounds):
            run(i)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / (2 * rounds)


def wrong_by(got: Tensor, want: Tensor) -> float:
    """The relative error of a tensor, in the Euclidean norm."""
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def packed(weight: Tensor, kind: str) -> Matrix:
    return Matrix(kind, tuple(weight.shape), quantise(weight, kind))


def random_matrix(device: str, kind: str, shape: tuple[int, ...]) -> Matrix:
    (_, size, dtype), *rest = stored(kind, shape)
    codes = torch.randint(0, 100, size, device=device, dtype=torch.uint8).view(dtype)
    return Matrix(kind, shape, (codes, *[torch.ones(s, device=device, dtype=of) for _, s, of in rest]))


# ---- products of a layer ----


class Work(NamedTuple):
    """A product to time: its name, rows of x, matrices in turn, further arguments of few_rows."""

    name: str
    x: Tensor
    matrices: list[Matrix]
    how: dict[str, Any]

    @property
    def one(self) -> bool:
        """Whether it is of a single matrix."""
        return "layer" not in self.how


def products(cfg: ModelConfig, kind: str, slots: int, device: str = "cuda") -> Iterator[Work]:
    """The products of a layer: of experts, and of attention's matrices."""
    moe, D = cfg.moe, cfg.dim
    E, width, K = moe.experts, moe.ffn_dim, moe.top_k
    make = lambda *shape: torch.randn(*shape, device=device, dtype=torch.bfloat16)  # noqa: E731
    matrix = functools.partial(random_matrix, device, kind)
    x, act = make(slots, D), make(slots * K, width)
    ids = torch.rand(slots, E, device=device).topk(K).indices.int()
    layer = LayerLaunches(x, (E, D, width), K, route(ids, E), None, (), moe.activation)
    up: dict[str, Any] = dict(activation=moe.activation, layer=layer, gather=True)
    yield Work("up", x, [matrix((E, 2 * width, D))], up)
    yield Work("down", act, [matrix((E, D, width))], dict(layer=layer, routed=True))
    for name, (W, L) in dense_shapes(cfg).items():
        yield Work(name, make(slots, L), [matrix((W, L)) for _ in range(COPIES)], {})


def dense_shapes(cfg: ModelConfig) -> dict[str, tuple[int, int]]:
    """Attention's matrices, [W, L]."""
    heads = cfg.heads * cfg.head_dim
    return dict(qkv=(heads + 2 * cfg.kv_heads * cfg.head_dim, cfg.dim), out=(cfg.dim, heads))


def every_tile(kind: str, work: Work) -> list[Tile]:
    """The tile that the op uses, other tiles of the Triton form, and the direct tiles that fit."""
    group = kind in ("int4", "nf4")
    T, (W, L) = len(work.x), work.matrices[0].shape[-2:]
    if work.one:
        tiles = [gpu.in_parts(kind, T, W, L, SMS), *(Tile(*t) for t in ONE)]
        direct = [Tile(*t) for t in ONE_DIRECT]
    else:
        tiles = [Tile(*t) for t in (GROUPS if group else WIDE)]
        direct = [Tile(*t, True) for t in (DIRECT_GROUPS if group else DIRECT)]
    tiles = [t for t in tiles if L % (128 * t.parts) == 0 or t.parts == 1]
    direct = [t for t in direct if gpu.fits_direct(work.x, work.matrices[0], t)]
    return list(dict.fromkeys(tiles + direct))


# ---- compilation on all cores ----


def tasks(cfg: ModelConfig, kinds: Sequence[str], slots: int) -> list[tuple]:
    """Arguments of `compiled`: of every tile, and of the comparison of each."""
    out = []
    with compile_only("cuda:90", lambda *_: None):
        for kind in kinds:
            for work in products(cfg, kind, slots, "meta"):
                out += [(cfg, kind, slots, work.name, tile) for tile in every_tile(kind, work)]
    return out


def compiled(task: tuple) -> int:
    """Compiles a tile into triton's cache, in another process; the number of binaries."""
    cfg, kind, slots, name, tile = task
    count = 0

    def visit(kernel: str, key: str, compile: Callable[[], Any]) -> None:
        nonlocal count
        if kernel.startswith("few_rows"):
            with contextlib.suppress(Exception):  # it does not fit, which the timing states
                compile()
                count += 1

    with compile_only("cuda:90", visit):
        for work in products(cfg, kind, slots, "meta"):
            if work.name == name:
                for captured in (True, False) if tile.direct else (False,):
                    gpu.settled = lambda device, captured=captured: captured
                    gpu.few_rows(work.x, work.matrices[0], None, tile, **work.how)
        call_both(kind, tile, name in dense_shapes(cfg), cfg.moe.top_k, "meta")
    return count


def in_processes(run: Callable[[Any], int], work: Sequence[Any]) -> int:
    """The sum of run's results, one process for each core. Call it before this process has a GPU."""
    begun = time.monotonic()
    with multiprocessing.get_context("fork").Pool(min(len(work), os.cpu_count() or 1)) as pool:
        count = sum(pool.map(run, work, chunksize=1))
    print(f"{count} kernels compiled in {time.monotonic() - begun:.0f} s", flush=True)
    return count


# ---- is a tile right? ----


def call_both(
    kind: str, tile: Tile, one: bool, K: int, device: str, rows: int = 70
) -> tuple[list, list, Any]:
    """Results of a tile, those of plain torch (empty on meta), and whether a row alone has the same bits."""
    D, width, E = 512, 256, 2 * K
    torch.manual_seed(1)
    make = lambda *shape: torch.randn(*shape, device=device, dtype=torch.bfloat16)  # noqa: E731
    x, act = make(rows, D), make(rows * K, width)
    if one:
        rows = min(rows, 64)
        x, bias = make(rows, 2048), make(D)
        matrix = packed(make(D, 2048), kind) if device != "meta" else random_matrix(device, kind, (D, 2048))
        got = gpu.few_rows(x, matrix, bias, tile)
        if device == "meta":
            return [got], [], None
        values = dequantise(matrix.parts, kind, matrix.shape).double()
        alone = gpu.few_rows(x[:1].contiguous(), matrix, bias, tile)
        return [got], [F.linear(x.double(), values, bias.double())], torch.equal(got[:1], alone)
    shapes = (E, 2 * width, D), (E, D, width)
    if device == "meta":
        up, down = (random_matrix(device, kind, shape) for shape in shapes)
    else:
        up, down = (packed(make(*shape), kind) for shape in shapes)
    ids = torch.rand(rows, E, device=device).topk(K).indices.int()
    ids[: rows // 2, 0] = 3  # more rows than a tile has

    def call(n: int) -> tuple[list[Tensor], Tensor]:
        layer = LayerLaunches(x[:n], (E, D, width), K, route(ids[:n], E), None, (), "swiglu")
        ups = gpu.few_rows(x[:n], up, None, tile, "swiglu", layer, gather=True)
        downs = gpu.few_rows(act[: n * K], down, None, tile, None, layer, routed=True)
        return [ups, downs], layer.meta.order[: n * K]

    got, order = call(rows)
    if device == "meta":
        return got, [], None
    mine = order.long()
    own = ids.flatten()[mine].long()
    of_up, of_down = (dequantise(m.parts, kind, m.shape).double() for m in (up, down))
    h = torch.einsum("nd,nfd->nf", x[mine // K].double(), of_up[own]).bfloat16().double()
    want = [F.silu(h[:, :width]) * h[:, width:], torch.einsum("nf,ndf->nd", act.double(), of_down[own])]
    return got, want, torch.equal(got[0][mine // K == 0], call(1)[0][0])


@functools.cache
def is_right(kind: str, tile: Tile, one: bool, K: int) -> bool:
    """Whether a tile's results equal plain torch's, and, of the direct form, a row's bits its bits alone."""
    try:
        got, want, same = call_both(kind, tile, one, K, "cuda")
        errors = [wrong_by(a, b) for a, b in zip(got, want, strict=True)]
    except Exception as error:  # it does not fit
        print(f"{kind} {tuple(tile)}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return False
    right = max(errors) < 0.015 and (same or not tile.direct)
    if not right or not same:
        print(
            f"{kind} {tuple(tile)}: {'' if right else 'WRONG, '}errors {errors}, row alone: {same}",
            flush=True,
        )
    return right


def same_in_a_graph(run: Callable[[int], Tensor]) -> bool:
    """Whether a replayed graph of two calls gives a call's bits."""
    want = run(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(1)
        got = run(0)
    graph.replay()
    return torch.equal(got, want)


# ---- times ----

Chosen = dict[tuple[str, int, int], Tile]  # by kind and the shape of a matrix


def fastest(cfg: ModelConfig, kind: str, slots: int, deadline: float) -> tuple[Chosen, list[dict[str, Any]]]:
    """The fastest tile of each product of a layer, and all times."""
    found, times = {}, []
    for work in products(cfg, kind, slots):
        best: tuple[float, Tile | None] = 1e9, None
        nbytes = work.matrices[0].codes.nbytes + work.matrices[0].scales.nbytes
        for tile in every_tile(kind, work):
            if time.monotonic() > deadline and best[1]:
                break
            if not is_right(kind, tile, work.one, cfg.moe.top_k):
                continue

            def run(i: int) -> Tensor:
                matrix = work.matrices[i % len(work.matrices)]  # noqa: B023
                return gpu.few_rows(work.x, matrix, None, tile, **work.how)  # noqa: B023

            if not same_in_a_graph(run):
                print(f"{kind} {work.name} {tuple(tile)}: WRONG in a graph", flush=True)
                continue
            took = ms(run)
            print(f"{kind} {work.name} {tuple(tile)}: {took * 1e3:.1f} us, {nbytes / took / 1e9:.2f} TB/s")
            speed = dict(us=took * 1e3, tb_s=nbytes / took / 1e9)
            times.append(dict(kind=kind, product=work.name, tile=tuple(tile), **speed))
            best = min(best, (took, tile), key=lambda pair: pair[0])
        if best[1] is not None:
            found[kind, work.matrices[0].shape[-2], work.matrices[0].shape[-1]] = best[1]
    return found, times


def plain_times(cfg: ModelConfig, slots: int) -> list[dict[str, Any]]:
    """The same products in bf16, a layer of experts with its routing, and a read of 4 GiB."""
    moe, D = cfg.moe, cfg.dim
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    x, big = make(slots, D), torch.empty(2**30, device="cuda")
    up, down = make(moe.experts, 2 * moe.ffn_dim, D), make(moe.experts, D, moe.ffn_dim)
    ids = torch.rand(slots, moe.experts, device="cuda").topk(moe.top_k).indices.int()
    weights = torch.rand(slots, moe.top_k, device="cuda")
    calls: dict[str, tuple[Callable[[int], Any], int]] = {
        "read": (lambda i: big.sum(), big.nbytes),
        "layer": (lambda i: moe_mlp(x, up, down, weights, ids), up.nbytes + down.nbytes),
    }
    for name, (W, L) in dense_shapes(cfg).items():
        matrices, rows = [make(W, L) for _ in range(COPIES)], make(slots, L)
        run = lambda i, m=matrices, r=rows: F.linear(r, m[i % COPIES])  # noqa: E731
        calls[name] = run, matrices[0].nbytes
    times = []
    with torch.no_grad():
        for name, (run, nbytes) in calls.items():
            took = ms(run)
            times.append(dict(kind="bf16", product=name, tile=None, us=took * 1e3, tb_s=nbytes / took / 1e9))
            print(f"bf16 {name}: {took * 1e3:.1f} us, {times[-1]['tb_s']:.2f} TB/s", flush=True)
    return times


def layer_times(cfg: ModelConfig, kind: str, slots: int) -> list[dict[str, Any]]:
    """A layer of experts with routing and combination, with and without early starts of its launches."""
    moe, D = cfg.moe, cfg.dim
    x = torch.randn(slots, D, device="cuda", dtype=torch.bfloat16)
    up = random_matrix("cuda", kind, (moe.experts, 2 * moe.ffn_dim, D))
    down = random_matrix("cuda", kind, (moe.experts, D, moe.ffn_dim))
    ids = torch.rand(slots, moe.experts, device="cuda").topk(moe.top_k).indices.int()
    weights = torch.rand(slots, moe.top_k, device="cuda")
    times, early = [], gpu.early
    for name, starts in (("layer", early), ("layer, no early starts", lambda device: {})):
        gpu.early = starts
        took = ms(lambda i: quantised_moe_mlp(x, up, down, weights, ids, None, moe.activation))
        nbytes = sum(m.codes.nbytes + m.scales.nbytes for m in (up, down))
        times.append(dict(kind=kind, product=name, tile=None, us=took * 1e3, tb_s=nbytes / took / 1e9))
        print(f"{kind} {name}: {took * 1e3:.1f} us, {times[-1]['tb_s']:.2f} TB/s", flush=True)
        for one, (W, L) in dense_shapes(cfg).items():
            matrices = [random_matrix("cuda", kind, (W, L)) for _ in range(COPIES)]
            rows = torch.randn(slots, L, device="cuda", dtype=torch.bfloat16)
            took = ms(lambda i, m=matrices, r=rows: gpu.linear(r, m[i % COPIES], None))
            said = name.replace("layer", one)
            times.append(dict(kind=kind, product=said, tile=None, us=took * 1e3))
            print(f"{kind} {said}: {took * 1e3:.1f} us", flush=True)
    gpu.early = early
    return times


def use(chosen: Chosen) -> None:
    """Products of few rows have the chosen tiles from now on; prompts and other shapes keep theirs."""
    plain = gpu.few_rows

    def few_rows(
        x: Tensor, matrix: Matrix, bias: Tensor | None, tile: Tile, *more: Any, **how: Any
    ) -> Tensor:
        ours = chosen.get((matrix.kind, matrix.shape[-2], matrix.shape[-1]))
        layer = more[1] if len(more) > 1 else how.get("layer")
        few = tile.BM <= 16 if layer is not None else 16 < len(x) <= 64
        if ours and few and (not ours.direct or gpu.fits_direct(x, matrix, ours)):
            tile = ours
        return plain(x, matrix, bias, tile, *more, **how)

    gpu.few_rows = few_rows
