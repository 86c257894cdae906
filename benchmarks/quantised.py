"""Decoding with quantised weights on a GPU: are kernels right, which tiles are fastest, and tokens/s.

    python -m benchmarks.quantised --json FILE                  qwen3-30b-a3b whole, 64 slots, 512 tokens
    python -m benchmarks.quantised --device cpu --tiny          does it run?

1. Kernels against plain torch in fp64, on the GPU: codes, values, products of few and of many rows, gpt-oss's
   biases and activation, odd widths, and a replayed CUDA graph. A wrong result ends the command.
2. Tiles of the experts' kernel for this model's shapes, timed; the fastest is used below. With --tiles 0 the
   tiles of tmoe/ops/quantised/gpu.py are used.
3. The engine decodes with random weights in bf16, int8, int4 and fp8, as in benchmarks.engine. The bars are
   1.65 times bf16 for int8 and 2.4 times for int4.

Expected on an H100 (2.9 TB/s): 61 GB of weights take 21 ms in bf16, 10.5 ms in int8 and fp8, and 5.5 ms in
int4; 2 ms a step for everything else. The table is printed last.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from functools import partial
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
from tmoe.model.quantised import make_room
from tmoe.model.transformer import Transformer
from tmoe.ops import reference
from tmoe.ops.experts.gpu import LayerLaunches
from tmoe.ops.experts.pair_order import route
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
    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(rounds):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / rounds


def fastest(cfg: ModelConfig, kind: str, slots: int, deadline: float) -> tuple[dict[int, Tile], list[dict]]:
    """The fastest tile by the length of the product, and all times. The products are those of a layer."""
    moe, D = cfg.moe, cfg.dim
    E, F, K = moe.experts, moe.ffn_dim, moe.top_k
    x = torch.randn(slots, D, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(slots, E, device="cuda").topk(K).indices.int()
    layer = LayerLaunches(x, (E, D, F), K, route(ids, E), None, (), moe.activation)
    act = torch.randn(slots * K, F, device="cuda", dtype=torch.bfloat16)
    found, times = {}, []
    for name, rows, shape in (("up", x, (E, 2 * F, D)), ("down", act, (E, D, F))):
        (_, size, dtype), *rest = stored(kind, shape)
        codes = torch.randint(0, 100, size, device="cuda", dtype=torch.uint8).view(dtype)
        scales = [torch.ones(scale, device="cuda", dtype=of) for _, scale, of in rest]
        matrix = Matrix(kind, shape, (codes, *scales))
        best, first = (1e9, None), None
        for sizes in GROUPS if kind in ("int4", "nf4") else WIDE:
            if time.monotonic() > deadline and best[1]:
                break
            tile = Tile(*sizes)
            up = name == "up"
            how: dict[str, Any] = dict(activation=moe.activation if up else None, layer=layer, gather=up)
            try:
                run = partial(gpu.few_rows, rows, matrix, None, tile, **how)
                first = run() if first is None else first
                took, error = ms(run), wrong_by(run(), first)
            except Exception as error:  # it does not fit
                print(f"{kind} {name} {tuple(tile)}: {type(error).__name__}: {str(error)[:80]}")
                continue
            assert error < 0.01, f"{kind} {name} {tuple(tile)}: differs from the first tile by {error}"
            speed = (codes.nbytes + matrix.scales.nbytes) / took / 1e9
            print(f"{kind} {name} {tuple(tile)}: {took * 1e3:.0f} us, {speed:.2f} TB/s", flush=True)
            times.append(dict(kind=kind, product=name, tile=tuple(tile), us=took * 1e3, tb_s=speed))
            best = min(best, (took, tile), key=lambda pair: pair[0])
        assert best[1] is not None
        found[shape[-1]] = best[1]
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
    return dict(
        kind=kind, gib=held / 2**30, step_ms=step, tokens_s=1e3 * asked.slots / step, first_s=first_s(answers)
    )


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'weights':8}{'GiB':>8}{'ms a step':>12}{'tokens/s':>10}{'x bf16':>8}  bar"
    base = next((line["tokens_s"] for line in lines if line["kind"] == "bf16"), None)
    for line in lines:
        times = line["tokens_s"] / base if base else float("nan")
        bar = BARS.get(line["kind"])
        judged = "" if bar is None else f"{bar} {'reached' if times >= bar else 'MISSED'}"
        speed = f"{line['step_ms']:12.2f}{line['tokens_s']:10,.0f}{times:8.2f}"
        yield f"{line['kind']:8}{line['gib']:8.1f}{speed}  {judged}"


def parsed() -> argparse.Namespace:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    flags.add_argument("preset", nargs="?", default="qwen3-30b-a3b")
    flags.add_argument("--slots", type=int, default=64)
    flags.add_argument("--prompt", type=int, default=16)
    flags.add_argument("--tokens", type=int, default=512)
    flags.add_argument("--layers", type=int, default=0, help="0: all")
    flags.add_argument("--kinds", nargs="+", default=["bf16", "int8", "int4", "fp8", "nf4"])
    flags.add_argument("--tiles", type=float, default=75, help="most seconds for timing tiles")
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
    for kind in KINDS:
        if kind != "nf4":
            check_codes(kind, asked.device)
        for case in CASES if cuda else CASES[2:3]:
            print(check_layer(kind, case, asked.device), flush=True)
        if cuda:
            check_graph(kind)
    print(f"kernels are right, {time.monotonic() - begun:.0f} s", flush=True)
    tiles: list[dict] = []
    plain = gpu.tile_of
    chosen: dict[tuple[str, int], Tile] = {}

    def tile_of(kind: str, rows: float, L: int, arch: str, dtype: torch.dtype) -> Tile:
        usual = plain(kind, rows, L, arch, dtype)
        return chosen.get((kind, L), usual) if rows <= 16 else usual

    if cuda and asked.tiles:
        begun = time.monotonic()
        for i, kind in enumerate(KINDS, 1):
            found, times = fastest(cfg, kind, asked.slots, begun + asked.tiles * i / len(KINDS))
            chosen |= {(kind, L): tile for L, tile in found.items()}
            tiles += times
            free()
        gpu.tile_of = tile_of
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
    for (kind, L), tile in chosen.items():
        print(f"fastest tile of {kind}, length {L}: {tuple(tile)}")
    print("\n".join(table(lines)))
    if asked.json:
        what = dict(command=" ".join(sys.argv), preset=asked.preset, layers=cfg.layers, gpu=name)
        write_line(
            asked.json, what | dict(date=str(date.today()), versions=versions(), decode=lines, tiles=tiles)
        )


if __name__ == "__main__":
    main()
