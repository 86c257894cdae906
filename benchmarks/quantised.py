"""Decoding with quantised weights on a GPU: are kernels right, which tiles are fastest, and tokens/s.

    python -m benchmarks.quantised --json FILE                  qwen3-30b-a3b whole, 64 slots, 512 tokens
    python -m benchmarks.quantised --device cpu --tiny          does it run?

1. Kernels against plain torch in fp64, on the GPU: codes, values, products of few and of many rows, gpt-oss's
   biases and activation, odd widths, and a replayed CUDA graph. A wrong result ends the command.
2. Forms and tiles of the products of a layer (benchmarks/quantised_forms.py), each compared with plain torch
   and then timed; the same products in bf16; the fastest is used below. With --tiles 0 the tiles of
   tmoe/ops/quantised/gpu.py are used.
3. The engine decodes with random weights in bf16, int8, int4 and fp8, as in benchmarks.engine. The bars are
   1.65 times bf16 for int8 and 2.4 times for int4. With --kernels a table lists each kernel's time in a step.

"floor" is the time in which the memory's measured bandwidth reads what a step reads: matrices of experts that
some token has, dense matrices, router, head, and keys and values at half of the longest length.
The JSON line is written after each part, so that a command that is stopped leaves its results.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import quantised_forms
from benchmarks.engine import TINY, empty, first_s, free, ours, step_ms
from benchmarks.quantised_forms import Chosen, packed, wrong_by
from benchmarks.train import write_line
from tmoe.base.quantised import dequantise, stored
from tmoe.base.versions import versions
from tmoe.config.model import ModelConfig
from tmoe.config.presets import presets
from tmoe.generate import Engine, Sampling
from tmoe.generate.cache import bytes_a_token
from tmoe.model.quantised import make_room
from tmoe.model.transformer import Transformer
from tmoe.ops import reference
from tmoe.ops.launch.kernel_launch import compile_only
from tmoe.ops.quantised import gpu
from tmoe.ops.quantised.gpu import KINDS, Matrix
from tmoe.ops.quantised.op import quantised_linear, quantised_moe_mlp, quantised_values

BARS = {"int8": 1.65, "int4": 2.4}


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


def compiled(task: tuple[str, Case]) -> int:
    """Compiles the kernels of `check_layer` into triton's cache, in another process; their number."""
    kind, (T, D, F, E, K, activation, biased) = task
    count = 0

    def visit(kernel: str, key: str, compile: Callable[[], Any]) -> None:
        nonlocal count
        with contextlib.suppress(Exception):  # the check below states it
            compile()
            count += 1

    halves = 2
    make = lambda *shape: torch.empty(*shape, device="meta", dtype=torch.bfloat16)  # noqa: E731
    up, down, one = (
        quantised_forms.random_matrix("meta", kind, shape)
        for shape in ((E, halves * F, D), (E, D, F), (D, F))
    )
    routed = torch.empty(T, K, device="meta"), torch.empty(T, K, device="meta", dtype=torch.int32)
    gpu.device_facts = lambda device: ("cuda:90", quantised_forms.SMS, True)
    with compile_only("cuda:90", visit):
        bias = make(E, halves * F) if biased else None
        gpu.moe_mlp(make(T, D), up, down, routed, bias, activation, T * K)
        if gpu.reads(one):
            gpu.linear(make(min(T, gpu.FEW), F), one, None)
        for matrix in (up, down, one):
            if gpu.reads(matrix):
                gpu.values(matrix, torch.bfloat16)
    return count


# ---- 2: the engine ----


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
        total, launches = (sum(row[name] for row in kernels) for name in ("us", "launches"))
        said = f"{launches:.0f} kernels of a step at a short context take {total / 1e3:.2f} ms"
        print(f"{kind}: {said}", flush=True)
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


def bytes_of(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a matrix: codes and scales, or of 16 bits."""
    if kind == "bf16":
        return 2 * math.prod(shape)
    return sum(math.prod(size) * dtype.itemsize for _, size, dtype in stored(kind, shape))


def read_bytes(cfg: ModelConfig, kind: str, slots: int, tokens: int) -> dict[str, float]:
    """Bytes that a step of a model with experts in each layer reads. tokens: of each sequence, on average."""
    moe, D = cfg.moe, cfg.dim
    touched = 1 - (1 - moe.top_k / moe.experts) ** slots
    experts = [(moe.experts, 2 * moe.ffn_dim, D), (moe.experts, D, moe.ffn_dim)]
    dense = quantised_forms.dense_shapes(cfg).values()
    return dict(
        experts=cfg.layers * touched * sum(bytes_of(kind, shape) for shape in experts),
        dense=cfg.layers * sum(bytes_of(kind, shape) for shape in dense),
        router=cfg.layers * 2.0 * moe.experts * D,
        head=2.0 * cfg.vocab * D,
        keys=float(slots * tokens * bytes_a_token(cfg, torch.bfloat16)),
    )


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'weights':8}{'GiB':>8}{'ms a step':>12}{'floor':>8}{'tokens/s':>10}{'x bf16':>8}  bar"
    base = next((line["tokens_s"] for line in lines if line["kind"] == "bf16"), None)
    for line in lines:
        times = line["tokens_s"] / base if base else float("nan")
        bar = BARS.get(line["kind"])
        judged = "" if bar is None else f"{bar} {'reached' if times >= bar else 'MISSED'}"
        floor = line.get("floor_ms", float("nan"))
        speed = f"{line['step_ms']:12.2f}{floor:8.2f}{line['tokens_s']:10,.0f}{times:8.2f}"
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
    flags.add_argument("--kernels", type=int, default=0, help="rows of the table of a step's kernels")
    flags.add_argument("--seconds", type=float, default=250, help="after these no further kind begins")
    flags.add_argument("--device", default="cuda")
    flags.add_argument("--tiny", action="store_true")
    flags.add_argument("--json", type=Path)
    return flags.parse_args()


def check_all(cfg: ModelConfig, kinds: list[str], cuda: bool, asked: argparse.Namespace) -> None:
    """Part 1, after all kernels of parts 1 and 2 were compiled on all cores."""
    cases = CASES if cuda else CASES[2:3]
    if cuda and kinds:
        quantised_forms.in_processes(compiled, [(kind, case) for kind in kinds for case in cases])
    if cuda and kinds and asked.tiles:
        tasks = quantised_forms.tasks(cfg, kinds, asked.slots)
        quantised_forms.in_processes(quantised_forms.compiled, tasks)
    begun = time.monotonic()
    for kind in kinds:
        if kind != "nf4":
            check_codes(kind, asked.device)
        for case in cases:
            print(check_layer(kind, case, asked.device), flush=True)
        if cuda:
            check_graph(kind)
    print(f"kernels are right, {time.monotonic() - begun:.0f} s", flush=True)


def time_forms(
    cfg: ModelConfig, kinds: list[str], asked: argparse.Namespace
) -> tuple[Chosen, list[dict[str, Any]]]:
    """Part 2: the fastest tiles, which are used from now on, and all times."""
    begun = time.monotonic()
    chosen: Chosen = {}
    times = quantised_forms.plain_times(cfg, asked.slots)
    for i, kind in enumerate(kinds, 1):
        times += quantised_forms.layer_times(cfg, kind, asked.slots)
        found, more = quantised_forms.fastest(cfg, kind, asked.slots, begun + asked.tiles * i / len(kinds))
        chosen |= found
        times += more
        free()
    quantised_forms.use(chosen)
    for kind in kinds:
        again = quantised_forms.layer_times(cfg, kind, asked.slots)
        times += [time | dict(product=f"{time['product']}, fastest tiles") for time in again]
        free()
    return chosen, times


def main() -> None:
    asked = parsed()
    cfg = presets()[asked.preset].model
    if asked.tiny:
        moe = replace(cfg.moe, experts=8, top_k=2, ffn_dim=16)
        cfg, asked.tokens, asked.slots = replace(cfg, layers=2, moe=moe, **TINY), 20, 3
    if asked.layers:
        cfg = replace(cfg, layers=asked.layers)
    cuda = asked.device == "cuda"
    started = time.monotonic()
    kinds = [kind for kind in KINDS if kind in asked.kinds]
    check_all(cfg, kinds, cuda, asked)
    lines: list[dict[str, Any]] = []
    name = torch.cuda.get_device_name() if cuda else "cpu"
    result: dict[str, Any] = dict(
        command=" ".join(sys.argv), preset=asked.preset, layers=cfg.layers, gpu=name
    )
    result |= dict(date=str(date.today()), versions=versions(), decode=lines, tiles=[])
    at: int | None = None

    def save() -> None:
        nonlocal at
        if asked.json:
            at = write_line(asked.json, result, at)

    chosen: Chosen = {}
    if cuda and asked.tiles:
        chosen, result["tiles"] = time_forms(cfg, kinds, asked)
    rate = next((time["tb_s"] for time in result["tiles"] if time["product"] == "read"), None)
    save()
    for kind in asked.kinds:
        begun = time.monotonic()
        if begun - started > asked.seconds:
            print(f"{kind}: not measured, {begun - started:.0f} s are over")
            continue
        try:
            line = decode(cfg, kind, asked)
        except torch.cuda.OutOfMemoryError as error:
            print(f"{kind}: {str(error)[:100]}")
        else:
            line["read_bytes"] = read_bytes(cfg, kind, asked.slots, asked.prompt + asked.tokens // 2)
            if rate:
                line["floor_ms"] = sum(line["read_bytes"].values()) / rate / 1e9
            lines.append(line)
            print(f"{kind}: {line['step_ms']:.2f} ms a step, {time.monotonic() - begun:.0f} s", flush=True)
            save()
        free()
    sizes = f"{cfg.layers} layers, {asked.slots} slots of {asked.prompt} + {asked.tokens} tokens"
    print(f"{asked.preset}, {sizes}, {name}")
    for (kind, W, L), tile in chosen.items():
        print(f"fastest tile of {kind} [{W}, {L}]: {tuple(tile)}")
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()
