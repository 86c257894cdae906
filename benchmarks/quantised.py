"""Decoding with quantised weights on a GPU: are kernels right, which tiles are fastest, and tokens/s.

    python -m benchmarks.quantised --json FILE                  qwen3-30b-a3b whole, 64 slots, 512 tokens
    python -m benchmarks.quantised --device cpu --tiny          does it run?

1. Kernels against plain torch in fp64, on the GPU: codes, values, products of few and of many rows, gpt-oss's
   biases and activation, odd widths, and a replayed CUDA graph. A wrong result ends the command.
2. Tiles of the experts' kernel for this model's shapes, timed; the fastest is used below. With --tiles 0 the
   tiles of tmoe/ops/quantised/gpu.py are used.
   The forms are kernels.few_rows (Triton) and fragments.few_rows_direct (a last field True in a tile). A
   direct tile is first compared with the Triton form, and a row's bits with the same row alone.
3. The engine decodes with random weights in bf16, int8, int4 and fp8, as in benchmarks.engine. The bars are
   1.65 times bf16 for int8 and 2.4 times for int4. With --kernels a table lists each kernel's time in a step.

Expected on an H100 (2.9 TB/s): 61 GB of weights take 21 ms in bf16, 10.5 ms in int8 and fp8, and 5.5 ms in
int4; 2 ms a step for everything else. The table is printed last.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.engine import TINY, empty, first_s, free, ours, step_ms
from benchmarks.train import write_line
from tmoe.base.quantised import dequantise, quantise, stored
from tmoe.base.versions import versions
from tmoe.config.model import ModelConfig
from tmoe.config.presets import presets
from tmoe.generate import Engine, Sampling
from tmoe.model.quantised import make_room
from tmoe.model.transformer import Transformer
from tmoe.ops import reference
from tmoe.ops.experts.gpu import LayerLaunches
from tmoe.ops.experts.pair_order import route
from tmoe.ops.launch.kernel_launch import compile_only
from tmoe.ops.quantised import gpu
from tmoe.ops.quantised.gpu import KINDS, Matrix, Tile
from tmoe.ops.quantised.op import quantised_linear, quantised_moe_mlp, quantised_values

BARS = {"int8": 1.65, "int4": 2.4}
# (rows of the weight, rows of x, step along the length, warps, stages); a group is int4's and nf4's step
WIDE = [(64, 16, 128, 2, 4), (64, 8, 128, 2, 4), (128, 8, 128, 2, 3), (64, 8, 128, 2, 3), (64, 8, 256, 2, 3)]
WIDE += [(32, 8, 256, 1, 4), (32, 8, 128, 1, 6), (64, 16, 128, 4, 4)]
GROUPS = [
    (64, 16, 128, 2, 5),
    (64, 8, 128, 2, 5),
    (128, 8, 128, 2, 4),
    (64, 8, 128, 2, 3),
    (32, 8, 128, 1, 5),
]
GROUPS += [(256, 8, 128, 4, 3), (128, 16, 128, 2, 4)]
# rows of the weight, rows of x, bytes of a row in a step, warps; of int4 a step is 64 bytes
DIRECT = [
    (64, 8, 128, 4),
    (128, 8, 64, 4),
    (64, 8, 64, 2),
    (64, 8, 128, 2),
    (64, 16, 128, 4),
    (32, 8, 256, 2),
]
DIRECT_GROUPS = [(64, 8, 64, 4), (128, 8, 64, 4), (64, 8, 64, 2), (32, 8, 64, 2), (64, 16, 64, 4)]
DIRECT_LINEAR = [(64, 16, 64, 4), (32, 16, 64, 2), (32, 32, 64, 2)]


# ---- 1: are the kernels right? ----


class Case(NamedTuple):
    """A layer of experts."""

    T: int
    D: int
    F: int
    E: int
    K: int
    activation: str = "swiglu"
    biased: bool = False


CASES = [
    Case(64, 2048, 768, 128, 8),
    Case(1, 2048, 768, 128, 8),
    Case(9, 200, 72, 5, 2),
    Case(48, 2880, 2880, 32, 4, "clamped:alpha=1.702,limit=7", True),
    Case(40, 256, 384, 4, 2),
    Case(700, 256, 384, 4, 2),  # many rows
]


def packed(weight: Tensor, kind: str) -> Matrix:
    return Matrix(kind, tuple(weight.shape), quantise(weight, kind))


def wrong_by(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def check_layer(kind: str, case: Case, device: str) -> str:
    """A line about a layer whose weights are quantised; raises where it is wrong."""
    T, D, F, E, K, activation, biased = case
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(*shape, device=device, dtype=torch.bfloat16)  # noqa: E731
    gate_up, down = make(E, 2 * F, D) / D**0.5, make(E, D, F) / F**0.5
    bias = make(E, 2 * F) if biased else None
    ids = torch.rand(T, E, device=device).topk(K).indices.int()
    if T > 1:
        ids[0, 0], ids[: T // 2, 1] = -1, 0  # a slot without an expert, and an expert with many rows
    weights, x = torch.rand(T, K, device=device), make(T, D)
    up, dn = packed(gate_up, kind), packed(down, kind)
    values = [dequantise(t.parts, kind, t.shape) for t in (up, dn)]
    for matrix, value in zip((up, dn), values, strict=True):
        got = quantised_values(matrix, torch.bfloat16)
        assert torch.equal(got, value.to(torch.bfloat16)), f"{kind} {case}: values differ"
    want = _layer(x, values, weights, ids, bias, activation)
    got = quantised_moe_mlp(x, up, dn, weights, ids, bias, activation)
    error = wrong_by(got, want)
    assert error < 0.01, f"{kind} {case}: wrong by {error}"
    again = quantised_moe_mlp(x, up, dn, weights, ids, bias, activation)
    assert torch.equal(got, again), f"{kind} {case}: two calls differ"
    one, rows = packed(down[0], kind), make(T, F)
    want = rows.double() @ dequantise(one.parts, kind, one.shape).double().T
    linear = wrong_by(quantised_linear(rows, one), want)
    assert linear < 0.01, f"{kind} {case}: linear wrong by {linear}"
    return f"{kind} {tuple(case)}: layer {error:.4f}, one matrix {linear:.4f}, values equal"


def _layer(
    x: Tensor, values: list[Tensor], weights: Tensor, ids: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """The definition in fp32, an expert at a time."""
    y = torch.zeros_like(x, dtype=torch.float32)
    for e in range(len(values[0])):
        rows = (ids == e).any(1).nonzero().flatten()
        if len(rows):
            own = torch.where(ids[rows] == e, 0, -1)
            up, down = (value[e : e + 1] for value in values)
            extra = None if bias is None else bias[e : e + 1].float()
            y[rows] += reference.moe_mlp(x[rows].float(), up, down, weights[rows], own, extra, activation)
    return y


def check_codes(kind: str, device: str) -> None:
    """Every code of a byte gives the number of plain torch."""
    codes = torch.arange(256, device=device, dtype=torch.int32).to(torch.uint8).repeat(2, 4)
    if kind == "fp8":
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    width = codes.shape[1] * (2 if kind == "int4" else 1)
    (_, _, kept), (_, shape, dtype) = stored(kind, (2, width))
    scales = torch.ones(shape, dtype=dtype, device=device)
    matrix = Matrix(kind, (2, width), (codes.view(kept), scales))
    want = dequantise(matrix.parts, kind, (2, width))
    assert torch.equal(quantised_values(matrix, torch.bfloat16).float(), want), kind
    for eye in torch.eye(width, device=device, dtype=torch.bfloat16).split(gpu.FEW):
        found = torch.cat([quantised_linear(rows, matrix) for rows in eye.split(60)])
        assert torch.equal(found.float(), want.T[eye.any(0)]), kind


def check_graph(kind: str) -> None:
    """A replayed graph follows routing and rows that have changed since it was captured."""
    case = Case(16, 256, 128, 8, 2)
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    up, down = packed(make(8, 256, 256), kind), packed(make(8, 256, 128), kind)
    x, weights = make(case.T, case.D), torch.rand(case.T, 2, device="cuda")
    ids = torch.rand(case.T, 8, device="cuda").topk(2).indices.int()
    call = lambda: quantised_moe_mlp(x, up, down, weights, ids)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    ids.copy_(torch.zeros_like(ids) + torch.tensor([3, 5], device="cuda"))
    x.copy_(make(case.T, case.D))
    graph.replay()
    assert torch.equal(y, call()), f"{kind}: a replayed graph differs"


# ---- 2: tiles ----


def ms(run: Callable[[], Any], rounds: int = 20) -> float:
    """Ms of a call, as in a replayed CUDA graph: without the host's time for launches."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            run()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / rounds


@functools.cache
def is_right(kind: str, tile: Tile, one: bool) -> bool:
    """Whether a direct tile equals the Triton form, and a row does not depend on other rows."""
    T, D, F, E, K = 70, 512, 256, 8, 2
    torch.manual_seed(1)
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    x, ids = make(T, D), torch.rand(T, E, device="cuda").topk(K).indices.int()
    ids[:50, 0] = 3  # more rows than a tile has, also where they do not fill the last one
    errors: list[float] = []
    first = x
    try:
        up, down, act = packed(make(E, 2 * F, D), kind), packed(make(E, D, F), kind), make(T * K, F)
        single, bias = packed(make(D, F), kind), make(D)
        for form in ("all", "alone"):
            rows = T if form == "all" else 1
            layer = LayerLaunches(x[:rows], (E, D, F), K, route(ids[:rows], E), None, (), "swiglu")
            usual = Tile(64, 16, 128, 4, 3)
            found = []
            for how in (usual, tile):
                if one:
                    found.append([gpu.few_rows(act[:rows], single, bias, how)])
                    continue
                ups = gpu.few_rows(x[:rows], up, None, how, "swiglu", layer, gather=True)
                found.append([ups, gpu.few_rows(act[: rows * K], down, None, how, None, layer)])
            errors += [wrong_by(got, want) for want, got in zip(*found, strict=True)]
            if form == "all":
                order = layer.meta.order[: T * K] // K
                first = found[1][0][:1] if one else found[1][0][order == 0]
        same = torch.equal(first, found[1][0])
    except Exception as error:  # it does not fit
        print(f"{kind} {tuple(tile)}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return False
    right = same and max(errors) < 0.01
    if not right:
        print(f"{kind} {tuple(tile)}: WRONG, errors {errors}, same bits alone: {same}", flush=True)
    return right


def random_matrix(device: str, kind: str, shape: tuple[int, ...]) -> Matrix:
    (_, size, dtype), *rest = stored(kind, shape)
    codes = torch.randint(0, 100, size, device=device, dtype=torch.uint8).view(dtype)
    return Matrix(kind, shape, (codes, *[torch.ones(s, device=device, dtype=of) for _, s, of in rest]))


class Work(NamedTuple):
    """A product to time: its name, rows of x, matrix, further arguments of few_rows, direct tiles."""

    name: str
    x: Tensor
    matrix: Matrix
    how: dict[str, Any]
    direct: Sequence[tuple[int, int, int, int]]


def products(cfg: ModelConfig, kind: str, slots: int, device: str = "cuda") -> Iterator[Work]:
    """The products of a layer: of experts, and of attention's matrices."""
    moe, D = cfg.moe, cfg.dim
    E, F, K = moe.experts, moe.ffn_dim, moe.top_k
    make = lambda *shape: torch.randn(*shape, device=device, dtype=torch.bfloat16)  # noqa: E731
    x, act = make(slots, D), make(slots * K, F)
    ids = torch.rand(slots, E, device=device).topk(K).indices.int()
    layer = LayerLaunches(x, (E, D, F), K, route(ids, E), None, (), moe.activation)
    direct = DIRECT_GROUPS if kind == "int4" else DIRECT
    up: dict[str, Any] = dict(activation=moe.activation, layer=layer, gather=True)
    yield Work("up", x, random_matrix(device, kind, (E, 2 * F, D)), up, direct)
    yield Work("down", act, random_matrix(device, kind, (E, D, F)), dict(layer=layer), direct)
    heads = cfg.heads * cfg.head_dim
    qkv = heads + 2 * cfg.kv_heads * cfg.head_dim
    yield Work("qkv", x, random_matrix(device, kind, (qkv, D)), {}, DIRECT_LINEAR)
    yield Work("out", make(slots, heads), random_matrix(device, kind, (D, heads)), {}, DIRECT_LINEAR)


def every_tile(kind: str, work: Work) -> list[Tile]:
    """The direct tiles that fit, then those of the Triton form."""
    usual = [Tile(*sizes) for sizes in (GROUPS if kind in ("int4", "nf4") else WIDE)]
    if "layer" not in work.how:
        usual = [gpu.tile_of_one(kind, len(work.x), work.matrix.shape[0], work.x)]
    sizes = [Tile(BN, BM, BL, warps, 1, True) for BN, BM, BL, warps in work.direct]
    return [tile for tile in sizes if gpu.fits_direct(work.x, work.matrix, tile)] + usual


def compiled(task: tuple[ModelConfig, str, int, str]) -> int:
    """Compiles the tiles of a product into triton's cache, in another process; the number of binaries."""
    cfg, kind, slots, name = task
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
                for tile in every_tile(kind, work):
                    gpu.few_rows(work.x, work.matrix, None, tile, **work.how)
    return count


def compile_all(cfg: ModelConfig, kinds: Sequence[str], slots: int) -> None:
    """Compiles all tiles in one process for each core, before this process has a GPU."""
    tasks = [(cfg, kind, slots, name) for kind in kinds for name in ("up", "down", "qkv", "out")]
    begun = time.monotonic()
    with multiprocessing.get_context("fork").Pool(min(len(tasks), os.cpu_count() or 1)) as pool:
        counts = pool.map(compiled, tasks, chunksize=1)
    print(f"{sum(counts)} kernels compiled in {time.monotonic() - begun:.0f} s", flush=True)


Chosen = dict[tuple[str, int, int], Tile]  # by kind and the shape of a matrix


def fastest(cfg: ModelConfig, kind: str, slots: int, deadline: float) -> tuple[Chosen, list[dict]]:
    """The fastest tile of each product of a layer, and all times. Each product follows a cold L2."""
    found, times = {}, []
    cold = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    for work in products(cfg, kind, slots):
        matrix, first = work.matrix, None
        one = "layer" not in work.how
        best = (1e9, None)
        tiles = [t for t in every_tile(kind, work) if not t.direct or is_right(kind, t, one)]
        flush = ms(lambda: cold.zero_()) if one else 0.0  # experts have more codes than L2 holds
        for tile in tiles:
            if time.monotonic() > deadline and best[1]:
                break

            def run() -> Tensor:
                if one:  # noqa: B023
                    cold.zero_()
                return gpu.few_rows(work.x, matrix, None, tile, **work.how)  # noqa: B023

            try:
                first = run() if first is None else first
                took, error = ms(run) - flush, wrong_by(run(), first)
            except Exception as error:  # it does not fit
                print(f"{kind} {work.name} {tuple(tile)}: {type(error).__name__}: {str(error)[:80]}")
                continue
            assert error < 0.01, f"{kind} {work.name} {tuple(tile)}: differs from the first tile by {error}"
            speed = (matrix.codes.nbytes + matrix.scales.nbytes) / took / 1e9
            print(f"{kind} {work.name} {tuple(tile)}: {took * 1e3:.1f} us, {speed:.2f} TB/s", flush=True)
            times.append(dict(kind=kind, product=work.name, tile=tuple(tile), us=took * 1e3, tb_s=speed))
            best = min(best, (took, tile), key=lambda pair: pair[0])
        assert best[1] is not None
        found[kind, matrix.shape[-2], matrix.shape[-1]] = best[1]
    return found, times


# ---- 3: the engine ----


def model_in(cfg: ModelConfig, kind: str, device: str) -> Transformer:
    """A model with random weights, drawn a tensor at a time. kind: "bf16" or of quantised matrices."""
    torch.manual_seed(0)
    draw = lambda name, t: t.fill_(1.0) if "norm" in name else t.normal_(0, 0.02)  # noqa: E731
    if kind == "bf16":
        model = empty(cfg, device)
        for name, t in model.state_dict().items():
            draw(name, t)
        return model
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device("meta"):
        model = Transformer(cfg).to(dtype)
    wanted = model.state_dict()
    slots = make_room(model, kind)
    model = model.to_empty(device=device).eval()
    state = model.state_dict()
    for name, like in wanted.items():
        if name in slots:
            slots[name].put(draw(name, torch.empty_like(like, device=device)))
        else:
            draw(name, state[name])
    return model


@torch.no_grad()
def decode(cfg: ModelConfig, kind: str, asked: argparse.Namespace) -> dict[str, Any]:
    """The time of a step, and the memory of the weights."""
    model = model_in(cfg, kind, asked.device)
    held = sum(t.nbytes for t in model.state_dict().values())
    made = torch.Generator().manual_seed(1)
    prompts = torch.randint(5, cfg.vocab, (asked.slots, asked.prompt), generator=made).tolist()
    run = ours(model, graphs=asked.device == "cuda")
    run(prompts, 4, False)
    answers = run(prompts, asked.tokens, False)
    step = step_ms(answers)
    kernels: list[dict[str, Any]] = []
    if asked.kernels and asked.device == "cuda":
        kernels = kernels_of_a_step(model, prompts)
        total = sum(row["us"] for row in kernels)
        print(f"{kind}: kernels of a step at a short context take {total / 1e3:.2f} ms", flush=True)
        for row in kernels[: asked.kernels]:
            print(f"  {row['us']:9.1f} us {row['launches']:7.1f} x  {row['kernel']}")
    tokens_s = 1e3 * asked.slots / step
    line = dict(kind=kind, gib=held / 2**30, step_ms=step, tokens_s=tokens_s, first_s=first_s(answers))
    return line | (dict(kernels=kernels[:40]) if kernels else {})


def kernels_of_a_step(model: Transformer, prompts: list[list[int]], steps: int = 8) -> list[dict[str, Any]]:
    """The kernels of a decoded step: time in us and launches, the longest first."""
    skipped = 8
    engine = Engine(model, eos=(), slots=len(prompts), graphs=True)
    pieces = engine.stream(prompts, 1, Sampling(max_tokens=2 * skipped + steps + 8))
    for _ in itertools.islice(pieces, len(prompts) * 2 * skipped):
        pass
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in itertools.islice(pieces, len(prompts) * steps):
            pass
        torch.cuda.synchronize()
    for _ in pieces:
        pass
    rows = [(event.self_device_time_total, event.count, event.key) for event in seen.key_averages()]
    return [
        dict(us=us / steps, launches=count / steps, kernel=key[:90])
        for us, count, key in sorted(rows, reverse=True)
        if us > 0
    ]


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'weights':8}{'GiB':>8}{'ms a step':>12}{'tokens/s':>10}{'x bf16':>8}  bar"
    base = next((line["tokens_s"] for line in lines if line["kind"] == "bf16"), None)
    for line in lines:
        times = line["tokens_s"] / base if base else float("nan")
        bar = BARS.get(line["kind"])
        judged = "" if bar is None else f"{bar} {'reached' if times >= bar else 'MISSED'}"
        speed = f"{line['step_ms']:12.2f}{line['tokens_s']:10,.0f}{times:8.2f}"
        yield f"{line['kind']:8}{line['gib']:8.1f}{speed}  {judged}"


def use(chosen: Chosen) -> None:
    """Products of few rows have the chosen tiles; prompts and other shapes keep theirs."""
    plain = gpu.few_rows

    def few_rows(
        x: Tensor, matrix: Matrix, bias: Tensor | None, tile: Tile, *more: Any, **how: Any
    ) -> Tensor:
        ours = chosen.get((matrix.kind, matrix.shape[-2], matrix.shape[-1]))
        layer = more[1] if len(more) > 1 else how.get("layer")
        if (
            ours
            and (layer is None or tile.BM == 16)
            and (not ours.direct or gpu.fits_direct(x, matrix, ours))
        ):
            tile = ours
        return plain(x, matrix, bias, tile, *more, **how)

    gpu.few_rows = few_rows


def parsed() -> argparse.Namespace:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    flags.add_argument("preset", nargs="?", default="qwen3-30b-a3b")
    flags.add_argument("--slots", type=int, default=64)
    flags.add_argument("--prompt", type=int, default=16)
    flags.add_argument("--tokens", type=int, default=512)
    flags.add_argument("--layers", type=int, default=0, help="0: all")
    flags.add_argument("--kinds", nargs="+", default=["bf16", "int8", "int4", "fp8", "nf4"])
    flags.add_argument("--tiles", type=float, default=75, help="most seconds for timing tiles")
    flags.add_argument("--kernels", type=int, default=0, help="rows of the table of a step's kernels")
    flags.add_argument("--seconds", type=float, default=250, help="after these no further kind begins")
    flags.add_argument("--device", default="cuda")
    flags.add_argument("--tiny", action="store_true")
    flags.add_argument("--json", type=Path)
    return flags.parse_args()


def main() -> None:
    asked = parsed()
    cfg = presets()[asked.preset].model
    if asked.tiny:
        moe = replace(cfg.moe, experts=8, top_k=2, ffn_dim=16)
        cfg, asked.tokens, asked.slots = replace(cfg, layers=2, moe=moe, **TINY), 20, 3
    if asked.layers:
        cfg = replace(cfg, layers=asked.layers)
    cuda = asked.device == "cuda"
    begun = started = time.monotonic()
    if cuda and asked.tiles:
        compile_all(cfg, [kind for kind in KINDS if kind in asked.kinds], asked.slots)
    for kind in [kind for kind in KINDS if kind in asked.kinds]:
        if kind != "nf4":
            check_codes(kind, asked.device)
        for case in CASES if cuda else CASES[2:3]:
            print(check_layer(kind, case, asked.device), flush=True)
        if cuda:
            check_graph(kind)
    print(f"kernels are right, {time.monotonic() - begun:.0f} s", flush=True)
    tiles: list[dict] = []
    chosen: Chosen = {}
    if cuda and asked.tiles:
        begun = time.monotonic()
        timed = [kind for kind in KINDS if kind in asked.kinds]
        for i, kind in enumerate(timed, 1):
            found, times = fastest(cfg, kind, asked.slots, begun + asked.tiles * i / len(timed))
            chosen |= found
            tiles += times
            free()
        use(chosen)
    lines = []
    for kind in asked.kinds:
        begun = time.monotonic()
        if begun - started > asked.seconds:
            print(f"{kind}: not measured, {begun - started:.0f} s are over")
            continue
        try:
            lines.append(decode(cfg, kind, asked))
            print(
                f"{kind}: {lines[-1]['step_ms']:.2f} ms a step, {time.monotonic() - begun:.0f} s", flush=True
            )
        except torch.cuda.OutOfMemoryError as error:
            print(f"{kind}: {str(error)[:100]}")
        free()
    name = torch.cuda.get_device_name() if cuda else "cpu"
    sizes = f"{cfg.layers} layers, {asked.slots} slots of {asked.prompt} + {asked.tokens} tokens"
    print(f"{asked.preset}, {sizes}, {name}")
    for (kind, W, L), tile in chosen.items():
        print(f"fastest tile of {kind} [{W}, {L}]: {tuple(tile)}")
    print("\n".join(table(lines)))
    if asked.json:
        what = dict(command=" ".join(sys.argv), preset=asked.preset, layers=cfg.layers, gpu=name)
        write_line(
            asked.json, what | dict(date=str(date.today()), versions=versions(), decode=lines, tiles=tiles)
        )


if __name__ == "__main__":
    main()
