"""Times each kernel of adapters alone, so that one call shows where the time of a layer and of a step is.

    python -m benchmarks.adapter_kernels --json FOLDER     # one GPU, at most 8 minutes
    python -m benchmarks.adapter_kernels --parts kernels sweep --shapes qwen3

check: y and every gradient of the op against merged weights in fp32, ranks 16, 8 and 1; and the op for dense
layers. A wrong result ends the call, because its times mean nothing.

kernels: microseconds of each launch of a layer with rank 16 on both matrices, forward and backward, and of
the same launch without adapters. GB/s counts gathered rows once a slot, as if nothing were in L2.

sweep: the tiles of the narrow kernels and of the low-rank step, one after another, the present choice first.

few: a layer's forward for 64 tokens, and its parts, in CUDA graphs; the adapter of a dense layer by one
launch and by cuBLAS.

step: a decode step of four layers of qwen3-30b-a3b with 64 sequences, with and without adapters, and its
kernels by torch.profiler, microseconds a step.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.adapters import LORAS, adapted_copy, largest_error, with_adapters
from benchmarks.engine import drawn, free, ours, step_ms
from benchmarks.moe_layer import ALL, Shape, make, require_gpu, time_all
from benchmarks.sft import about
from benchmarks.train import write_line
from tmoe.commands.warmup import local_arch
from tmoe.config.presets import presets
from tmoe.model.adapted import Adapted
from tmoe.ops import moe_mlp
from tmoe.ops.decode import low_rank
from tmoe.ops.experts import adapted_gpu, gpu
from tmoe.ops.experts.adapted import moe_mlp_adapted
from tmoe.ops.experts.adapted_gpu import AdaptedLaunches, Chunk
from tmoe.ops.experts.cpu import ExpertWeights
from tmoe.ops.experts.pair_order import route
from tmoe.ops.launch.precompile import precompile

Call = Callable[[], Any]
RANK = 16
FEW_TOKENS = 64
REPEATS = 20  # calls in a graph
STEPS = 72  # decode steps that the profiler sees
CHECKED_RANKS = (16, 8, 1, 40)
CHECKED_ROWS = (48, 1024)  # experts with few rows and with many
DENSE = ((2048, 5120), (4096, 2048))  # columns and rows of Qwen3-30B-A3B's qkv and o


class Timed(NamedTuple):
    """A launch, and the bytes of the operand that a narrow kernel reads."""

    call: Call
    nbytes: int = 0


class Choices(NamedTuple):
    """Sizes with which a launch is timed, the present ones first."""

    kernel: str  # a name in Layer.calls
    owner: Any  # its attribute `attribute` chooses the sizes
    attribute: str
    sizes: list[Any]


class Layer:
    """The tensors of an adapted layer, and its launches.

    calls: every launch of forward and backward, in their order; "plain" are those without adapters.
    """

    def __init__(self, shape: Shape, device: str = "cuda") -> None:
        T, D, F, E, K = shape
        torch.manual_seed(0)
        dtype = torch.bfloat16
        x, logits, gate_up, down, dy = make(shape, device)
        weights, ids = logits.softmax(-1).topk(K, dim=-1)
        self.adapters = with_adapters(shape, RANK, device, dtype)
        up_a, up_b, down_a, down_b = map(present, self.adapters)
        operands = gate_up, down, up_a, up_b, down_a, down_b
        run = AdaptedLaunches(x, (E, D, F), K, route(ids, E), weights, operands)
        N = T * K
        h, act, u, rows = (torch.randn(N, w, device=device, dtype=dtype) for w in (2 * F, F, RANK, D))
        self.x, self.gate_up, self.down, self.weights, self.ids, self.run = (
            x,
            gate_up,
            down,
            weights,
            ids,
            run,
        )
        wide, half, gathered = h.nbytes, act.nbytes, rows.nbytes
        r = RANK
        self.calls = {
            "narrow of x": Timed(lambda: run.narrow(x, up_a, 1.0, True), gathered),
            "up, plain": Timed(lambda: run.up(gate_up, None, h)),
            "up": Timed(lambda: run.up_with(gate_up, None, u, up_b, h)),
            "up without H, plain": Timed(lambda: run.up(gate_up, None, None)),
            "up without H": Timed(lambda: run.up_with(gate_up, None, u, up_b, None)),
            "narrow of act": Timed(lambda: run.narrow(act, down_a, 1.0), half),
            "down, plain": Timed(lambda: run.rows("down", act, down, True)),
            "down": Timed(lambda: run.rows_with("down", act, down, True, u, down_b)),
            "combine": Timed(lambda: run.combine(rows, weights)),
            "v and d_b of dy": Timed(lambda: run.narrow_and_factor(dy, down_b, u, 1.0, True, None), gathered),
            "dh, plain": Timed(lambda: run.dh(dy if run.config("dh").gather else rows, down, h)),
            "dh": Timed(lambda: run.dh_with(dy, down, h, u, down_a)),
            "d_a of act": Timed(lambda: run.factor(u, act, r, False, None), half),
            "v and d_b of dh": Timed(lambda: run.narrow_and_factor(h, up_b, u, 1.0, False, None), wide),
            "dx, plain": Timed(lambda: run.rows("dx", h, gate_up, False)),
            "dx": Timed(lambda: run.rows_with("dx", h, gate_up, False, u, up_a)),
            "d_a of x": Timed(lambda: run.factor(u, x, r, True, None), gathered),
        }

    def choices(self) -> Iterator[Choices]:
        """The sizes that are compared."""
        run = self.run
        for kernel, gather in (("narrow of x", True), ("narrow of act", False)):
            L = self.x.shape[1] if gather else self.down.shape[2]
            cfg, spread = run.narrow_config(L, gather)
            changes: list[dict[str, Any]] = [
                dict(stages=5),
                dict(ctas=3),
                dict(ctas=2),
                dict(ctas=1),
                dict(BL=128, stages=3),
                dict(BM=64),
            ]
            changes += [dict(BM=64, ctas=4), dict(BM=64, BL=128), dict(warps=8)]
            sizes = [(cfg, spread), *((cfg._replace(**one), spread) for one in changes)]
            sizes += [(cfg, False)] * gather
            yield Choices(kernel, run, "narrow_config", [*dict.fromkeys(sizes)])
        sizes = [
            (256, 128, 8, 3),
            (256, 64, 8, 4),
            (256, 64, 8, 2, 2),
            (256, 64, 4, 2, 2),
            (128, 128, 8, 2, 2),
        ]
        chunks = [run.chunk(RANK), *(Chunk(*one) for one in [*sizes, (128, 64, 4, 3, 3)])]
        for kernel in ("v and d_b of dy", "v and d_b of dh"):
            yield Choices(kernel, run, "chunk", [*dict.fromkeys(chunks)])
        tile = run.tile(RANK)
        changes: list[dict[str, Any]] = [
            dict(slab=1),
            dict(slab=4),
            dict(slab=16),
            dict(BN=64),
            dict(BN=256, ctas=1),
        ]
        changes += [dict(BL=128, stages=3), dict(BL=64, stages=4), dict(BL=32), dict(ctas=3), dict(warps=8)]
        for kernel in ("d_a of x", "d_a of act"):
            tiles = [tile, *(tile._replace(**one) for one in changes)]
            yield Choices(kernel, run, "tile", [*dict.fromkeys(tiles)])
        for kernel in ("up", "down", "dh", "dx"):
            yield Choices(kernel, gpu, "low_rank", [16, 64])


def launched(name: str) -> None:
    """Every launch of this program for a shape, on meta tensors, inside compile_only."""
    T, D, F, E, K = ALL[name]
    for shape in (ALL[name], (FEW_TOKENS, D, F, E, K)):
        layer = Layer(shape, "meta")
        for one in layer.calls.values():
            one.call()
        for choices in layer.choices():
            for size in choices.sizes:
                chosen(choices, size, layer.calls[choices.kernel].call)
    for rows in CHECKED_ROWS:
        for r in CHECKED_RANKS:
            small = min(T, rows), D, F, min(E, 8), min(K, 2)
            adapted_gpu.trace(small, (r, r), torch.bfloat16)
    for L, W in DENSE:
        low_rank.trace(L, W, RANK, torch.bfloat16, FEW_TOKENS)


def present(factor: Tensor | None) -> Tensor:
    assert factor is not None
    return factor


def check(args: argparse.Namespace) -> Iterator[dict]:
    for name in args.shapes:
        T, D, F, E, K = ALL[name]
        errors = {}
        for r in CHECKED_RANKS:
            for rows in CHECKED_ROWS:
                errors[f"rank {r}, {rows} tokens"] = largest_error((min(T, rows), D, F, E, K), r, "cuda")
        yield dict(shape=name, errors=errors)
        if not max(errors.values()) < 0.02:
            with mock.patch.object(gpu, "low_rank", lambda R, BL: BL):  # is it the narrow step?
                wide = largest_error((1024, D, F, min(E, 8), min(K, 2)), RANK, "cuda")
            raise SystemExit(f"the op is wrong: {errors}; with low-rank steps of 64 numbers: {wide}")
    new = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    for B, L, W, r in ((64, 2048, 5120, 16), (3, 4096, 2048, 64)):
        y, x, a, b = new(B, W), new(B, L), new(r, L) * L**-0.5, new(W, r)
        got = low_rank.add_low_rank(y, x, a, b, 0.5).float()
        want = y.float() + 0.5 * (x.float() @ a.float().T) @ b.float().T
        error = float((got - want).norm() / want.norm())
        yield dict(dense=(B, L, W, r), error=error)
        if not error < 0.01:
            raise SystemExit("add_low_rank is wrong")


def kernels(args: argparse.Namespace) -> Iterator[dict]:
    for name in args.shapes:
        calls = Layer(ALL[name]).calls
        ms = dict(zip(calls, time_all([one.call for one in calls.values()], args.rounds), strict=True))
        rates = {what: round(one.nbytes / 1e6 / ms[what]) for what, one in calls.items() if one.nbytes}
        yield dict(shape=name, us={what: round(1e3 * value, 1) for what, value in ms.items()}, GB_s=rates)
        del calls
        free()


def chosen(choices: Choices, size: Any, call: Call) -> None:
    """One call with this size."""
    with mock.patch.object(choices.owner, choices.attribute, lambda *_: size):
        call()


def sweep(args: argparse.Namespace) -> Iterator[dict]:
    for name in args.shapes:
        layer = Layer(ALL[name])
        for choices in layer.choices():
            call = layer.calls[choices.kernel].call
            tries: dict[str, Call] = {}
            for size in choices.sizes:
                one = functools.partial(chosen, choices, size, call)
                try:
                    one()
                    tries[words(size)] = one
                except Exception as error:  # too much shared memory
                    print(f"{choices.kernel}: {words(size)}: {type(error).__name__}", flush=True)
            ms = time_all(list(tries.values()), 5)
            us = {size: round(1e3 * value, 1) for size, value in zip(tries, ms, strict=True)}
            yield dict(shape=name, kernel=choices.kernel, us=us)
        del layer
        free()


def words(size: Any) -> str:
    """A size with the names of its fields."""
    if isinstance(size, int):
        return str(size)
    cfg, *spread = size if isinstance(size[0], tuple) else (size,)
    fields = {name: value for name, value in cfg._asdict().items() if name not in ("SUB", "GROUP", "outs")}
    return " ".join(f"{name} {value}" for name, value in fields.items()) + "".join(
        f" spread {s}" for s in spread
    )


def each_us(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Microseconds of one call of each, from graphs of REPEATS calls; L2 is cold before a graph."""
    graphs = []
    for call in calls.values():
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(REPEATS):
                call()
        graphs.append(graph.replay)
    times = time_all(graphs, rounds)
    return {what: round(1e3 * ms / REPEATS, 2) for what, ms in zip(calls, times, strict=True)}


def layer_of_few(name: str, rounds: int) -> dict[str, float]:
    """Microseconds of a layer's forward and of its launches for FEW_TOKENS tokens."""
    layer = Layer((FEW_TOKENS, *ALL[name][1:]))
    experts = ExpertWeights(layer.gate_up, layer.down, None, "swiglu")
    routed = layer.weights, layer.ids
    calls: dict[str, Call] = {
        "the layer, plain": lambda: moe_mlp(layer.x, layer.gate_up, layer.down, *routed),
        "the layer": lambda: moe_mlp_adapted(layer.x, experts, layer.adapters, *routed),
        "routing": lambda: route(layer.ids, len(layer.down)),
    }
    launched = "narrow of x", "up without H", "up without H, plain", "narrow of act", "down", "down, plain"
    calls |= {what: layer.calls[what].call for what in (*launched, "combine")}
    cfg, spread = layer.run.narrow_config(layer.x.shape[1], True)
    for BL, stages in ((128, 3), (128, 5), (256, 4), (512, 2)):
        size = cfg._replace(BL=BL, stages=stages), spread
        choices = Choices("narrow of x", layer.run, "narrow_config", [size])
        call = functools.partial(chosen, choices, size, layer.calls["narrow of x"].call)
        calls[f"narrow of x, BL {BL} stages {stages}"] = call
    return each_us(calls, rounds)


def dense_of_few(L: int, W: int, rounds: int) -> dict[str, float]:
    """Microseconds of a dense layer for FEW_TOKENS tokens."""
    x = torch.randn(FEW_TOKENS, L, device="cuda", dtype=torch.bfloat16)
    plain = nn.Linear(L, W, bias=False, device="cuda", dtype=torch.bfloat16)
    dense = Adapted(plain, RANK, 2.0).bfloat16()
    for p in (dense.a, dense.b):
        nn.init.normal_(p, std=0.02)

    def by_cublas() -> Tensor:
        with mock.patch.object(low_rank, "MOST_ROWS", 0):
            return dense(x)

    calls = {"plain": lambda: plain(x), "by cuBLAS": by_cublas, "by add_low_rank": lambda: dense(x)}
    return each_us(calls, rounds)


@torch.no_grad()
def few(args: argparse.Namespace) -> Iterator[dict]:
    for name in args.shapes:
        yield dict(shape=name, tokens=FEW_TOKENS, us=layer_of_few(name, args.rounds))
        free()
    for L, W in DENSE:
        yield dict(dense=(L, W), tokens=FEW_TOKENS, us=dense_of_few(L, W, args.rounds))


def step(args: argparse.Namespace) -> Iterator[dict]:
    whole = presets()["qwen3-30b-a3b"].model
    model = drawn(replace(whole, layers=4), "cuda")
    models = {"without": model} | {name: adapted_copy(model, lora) for name, lora in LORAS.items()}
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(whole.vocab, (FEW_TOKENS, 512), generator=draw).tolist()
    for name, one in models.items():
        decoder = ours(one, True)
        decoder(prompts, 8, False)
        ms = [step_ms(decoder(prompts, 96, False)) for _ in range(3)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            decoder(prompts, STEPS, False)
        times: dict[str, list[float]] = {}
        for event in seen.events() or ():
            times.setdefault(event.name.split("(")[0][:70], []).append(event.device_time)
        # launches of a step and their median; those of the prompts are few
        steps = {k: (len(v) / STEPS, sorted(v)[len(v) // 2]) for k, v in times.items() if 2 * len(v) > STEPS}
        top = sorted(steps.items(), key=lambda pair: -pair[1][0] * pair[1][1])[:24]
        yield dict(model=name, step_ms=ms, launches_and_us={k: (round(n, 1), us) for k, (n, us) in top})
        free()


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[dict]]] = dict(
    check=check, kernels=kernels, few=few, step=step, sweep=sweep
)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    p.add_argument("--shapes", nargs="+", choices=list(ALL), default=["qwen3", "pilot"])
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--json", type=Path, help="a folder, to which lines are appended")
    args = p.parse_args()
    require_gpu(p)
    began = time.monotonic()
    compiled, _ = precompile(local_arch(), [(launched, name) for name in args.shapes], 16)
    print(f"{compiled} kernels compiled: {time.monotonic() - began:.0f} s", flush=True)
    for part in args.parts:
        began = time.monotonic()
        for figures in PARTS[part](args):
            print(part, json.dumps(figures), flush=True)
            if args.json:
                line = dict(part=part) | figures | about("adapter_kernels")
                write_line(args.json / "adapter_kernels.jsonl", line)
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
