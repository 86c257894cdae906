"""The checks of benchmarks.nf4: kernels and ops of adapters on a base in NF4, in one process.

A check yields figures. On a CPU the same checks run on small shapes, without graphs and times.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.adapters import with_adapters
from benchmarks.figures import Figure, at_least, at_most
from benchmarks.moe_layer import ALL, Shape, make, time_all
from benchmarks.quantised import packed, wrong_by
from tmoe.base.quantised import dequantise, quantise
from tmoe.commands.warmup import local_arch
from tmoe.config.model import ModelConfig
from tmoe.config.presets import presets
from tmoe.config.run import LoraConfig
from tmoe.model.lora import adapt, is_adapter
from tmoe.model.nf4 import slots_of
from tmoe.model.transformer import Transformer
from tmoe.ops import moe_mlp
from tmoe.ops.experts import adapted_gpu
from tmoe.ops.experts.adapted import Adapters, moe_mlp_adapted
from tmoe.ops.experts.cpu import ExpertWeights
from tmoe.ops.launch.precompile import precompile
from tmoe.ops.quantised.adapted import Nf4Weights, moe_mlp_nf4, nf4_linear
from tmoe.ops.quantised.op import quantised_values

SCALES = 0.5, 2.0
CALLS = 4  # the launches of a third call are replayed
ROWS = (64, 1024, 4096)  # tokens of a layer
RANKS = (8, 1)
TINY: Shape = (24, 64, 64, 4, 2)


def compiled_ahead() -> Iterator[Figure]:
    """Compiles the kernels of a layer on all cores."""
    traces = [
        (adapted_gpu.trace, (rows, *ALL["qwen3"][1:]), (r, r), torch.bfloat16)
        for rows in (*ROWS, ALL["qwen3"][0])
        for r in RANKS
    ]
    compiled, wanted = precompile(local_arch(), traces, 16)
    yield Figure("check", "kernels compiled ahead", f"{compiled} of {wanted}")


def shape_of(args: argparse.Namespace, tokens: int) -> Shape:
    return TINY if args.tiny else (tokens, *ALL["qwen3"][1:])  # pyrefly: ignore


def type_of(args: argparse.Namespace) -> torch.dtype:
    return torch.bfloat16 if args.device == "cuda" else torch.float32


def equal(part: str, pairs: dict[str, tuple[Tensor, Tensor]]) -> Figure:
    """A figure about tensors that must have the same bits."""
    wrong = {
        name: f"{name} wrong by {wrong_by(got, want):.1e} in {float((got != want).float().mean()):.2%}"
        for name, (got, want) in pairs.items()
        if not torch.equal(got, want)
    }
    said = "; ".join(wrong.values()) or "equal"
    return Figure("check", part, said, "equal", not wrong)


# ---- values ----


def values(args: argparse.Namespace) -> Iterator[Figure]:
    shapes = (
        [(3, 4, 64), (3, 5, 7)] if args.tiny else [(128, 1536, 2048), (5120, 2048), (8, 192, 160), (3, 7)]
    )
    for shape in shapes:
        torch.manual_seed(0)
        matrix = packed(torch.randn(shape, device=args.device).to(type_of(args)) * 0.02, "nf4")
        for dtype in (torch.bfloat16, torch.float32):
            want = dequantise(matrix.parts, "nf4", shape, dtype)
            found = {"values": (quantised_values(matrix, dtype), want)}
            yield equal(f"values of {shape} in {dtype}, of plain torch", found)
    if args.device == "cuda":
        matrix = packed(torch.randn(128, 1536, 2048, device="cuda").bfloat16(), "nf4")
        (ms,) = time_all([lambda: quantised_values(matrix, torch.bfloat16)])
        n = 128 * 1536 * 2048
        rate = (2 + 0.516) * n / ms / 1e9
        yield at_least("check", f"values of {n:,} numbers: {ms * 1e3:.0f} us, TB/s", rate, None)


def codes(args: argparse.Namespace) -> Iterator[Figure]:
    """Codes that a GPU computes, against those of a CPU. The mean of the maxima may differ in a bit."""
    torch.manual_seed(0)
    weight = torch.randn(512, 1024) * 0.02
    here, there = (quantise(weight.to(device), "nf4") for device in ("cpu", args.device))
    share = min(float((a == b.cpu()).float().mean()) for a, b in zip(here[:2], there[:2], strict=True))
    yield at_least("check", "codes and maxima equal to those of a CPU", share, 0.999)


# ---- ops ----


def layer_of(args: argparse.Namespace, tokens: int, r: int) -> dict[str, Any]:
    """A layer: its calls on NF4, on a whole base that has its values, and without adapters; leaves; bytes.

    held: the bytes of the values.
    """
    shape, dtype = shape_of(args, tokens), type_of(args)
    torch.manual_seed(0)
    x, logits, gate_up, down, dy = make(shape, args.device, dtype)
    weights, ids = logits.softmax(-1).topk(shape[-1], dim=-1)
    matrices = packed(gate_up, "nf4"), packed(down, "nf4")
    up, down = (dequantise(matrix.parts, "nf4", matrix.shape, dtype) for matrix in matrices)
    adapters = with_adapters(shape, r, args.device, dtype)
    leaves = [t.detach().requires_grad_() for t in (x, weights, *adapters)]
    factors = Adapters(*leaves[2:])
    nf4 = Nf4Weights(*matrices, None, "swiglu")
    plain = ExpertWeights(up, down, None, "swiglu")

    def ours(of: Adapters | None = factors) -> Tensor:
        return moe_mlp_nf4(leaves[0], nf4, of, leaves[1], ids, scales=SCALES)

    def theirs() -> Tensor:
        return moe_mlp_adapted(leaves[0], plain, factors, leaves[1], ids, scales=SCALES)

    def base() -> Tensor:
        return moe_mlp(leaves[0], up, down, leaves[1], ids)

    held = up.nbytes + down.nbytes
    return dict(ours=ours, theirs=theirs, base=base, leaves=leaves, dy=dy, held=held)


def both_ways(call: Callable[[], Tensor], leaves: list[Tensor], dy: Tensor) -> list[Tensor]:
    y = call()
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def layer(args: argparse.Namespace) -> Iterator[Figure]:
    names = ["y", "dx", "d_weights", "d_gate_up_a", "d_gate_up_b", "d_down_a", "d_down_b"]
    for tokens in ROWS[:1] if args.tiny else ROWS:
        for r in RANKS:
            one = layer_of(args, tokens, r)
            want = both_ways(one["theirs"], one["leaves"], one["dy"])
            for i in range(CALLS):
                got = both_ways(one["ours"], one["leaves"], one["dy"])
                if i in (0, CALLS - 1):
                    pairs = dict(zip(names, zip(got, want, strict=True), strict=True))
                    yield equal(f"{tokens} tokens, rank {r}, call {i + 1}: of a whole base", pairs)
            with torch.no_grad():
                error = wrong_by(one["ours"](), want[0])
                yield at_most(
                    "check", f"{tokens} tokens, rank {r}: without a backward, wrong by", error, 0.01
                )
                error = wrong_by(one["ours"](None), one["base"]())
                yield at_most("check", f"{tokens} tokens: adapters off, wrong by", error, 0.01)


def memory(args: argparse.Namespace) -> Iterator[Figure]:
    """Between forward and backward no values are in memory."""
    if args.device != "cuda":
        return
    one = layer_of(args, 1024, 8)
    both_ways(one["ours"], one["leaves"], one["dy"])
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = one["ours"]()
    left, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    torch.autograd.grad(y, one["leaves"], one["dy"])
    again = torch.cuda.max_memory_allocated() - before
    held = one["held"]
    yield at_most("check", "bytes that a forward leaves, of the values'", left / held, 0.1)
    yield at_most("check", "bytes of a forward at most, of the values'", peak / held, 1.2)
    yield at_most("check", "bytes of a backward at most, of the values'", again / held, 1.3)


def linear(args: argparse.Namespace) -> Iterator[Figure]:
    """One matrix: few rows by the kernel that reads codes, many by values; and an odd width."""
    for shape in ((48, 64), (24, 72)) if args.tiny else ((5120, 2048), (2048, 4096), (192, 160)):
        torch.manual_seed(0)
        matrix = packed(torch.randn(shape, device=args.device).to(type_of(args)), "nf4")
        weight = quantised_values(matrix, type_of(args))
        for rows in (1, 64, 128, 129, 1000):
            x = torch.randn(rows, shape[1], device=args.device, dtype=type_of(args), requires_grad=True)
            dy = torch.randn(rows, shape[0], device=args.device, dtype=type_of(args))
            got = both_ways(partial(nf4_linear, x, matrix), [x], dy)
            want = both_ways(partial(F.linear, x, weight), [x], dy)
            error = max(map(wrong_by, got, want))
            yield at_most("check", f"one matrix {shape}, {rows} rows: wrong by", error, 0.01)


@torch.no_grad()
def graphs(args: argparse.Namespace) -> Iterator[Figure]:
    """A replayed CUDA graph follows rows that have changed; also of widths that 64 does not divide."""
    if args.device != "cuda":
        return
    for D, width in ((128, 64), (192, 160)):
        shape = (16, D, width, 8, 2)
        x, logits, gate_up, down, _ = make(shape, "cuda")
        weights, ids = logits.softmax(-1).topk(2, dim=-1)
        one = packed(torch.randn(D, D, device="cuda").bfloat16(), "nf4")
        nf4 = Nf4Weights(packed(gate_up, "nf4"), packed(down, "nf4"), None, "swiglu")
        adapters = with_adapters(shape, 2, "cuda", torch.bfloat16)

        def call(x=x, one=one, nf4=nf4, adapters=adapters, weights=weights, ids=ids) -> Tensor:
            return moe_mlp_nf4(nf4_linear(x, one), nf4, adapters, weights, ids, scales=SCALES)

        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = call()
        ids.copy_((ids + 3) % 8)
        x.copy_(torch.randn_like(x))
        graph.replay()
        yield equal(f"a replayed graph, widths {D} and {width}", {"y": (y, call())})


# ---- a model ----


def small_model(args: argparse.Namespace, dtype: torch.dtype) -> Transformer:
    """A model of two layers with adapters on NF4, with a shared expert whose width 64 does not divide."""
    cfg: ModelConfig = presets()["tiny"].model
    moe = replace(cfg.moe, experts=8, top_k=2, ffn_dim=64, shared_dim=72)
    cfg = replace(cfg, layers=2, dim=128, heads=2, kv_heads=1, head_dim=64, moe=moe)
    with torch.device("meta"):
        model = Transformer(cfg)
        adapt(model, LoraConfig(rank=8, base="nf4"), "bf16" if dtype == torch.bfloat16 else "fp32")
        for p in model.parameters():
            p.data = p.data.to(dtype)
    model.to_empty(device=args.device).init_weights(0)
    for name, slot in slots_of(model).items():
        torch.manual_seed(len(name))
        module: Any = slot.module
        shape = (module.out_features, module.in_features) if hasattr(module, "in_features") else None
        shape = shape or module.shapes[name.endswith("down")]
        slot.put(torch.randn(shape, device=args.device) * 0.1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if is_adapter(name) and name.endswith("b"):
                p.normal_(0, 0.1)
    return model


def compiled(args: argparse.Namespace) -> Iterator[Figure]:
    """Blocks compiled as whole graphs, with and without a gradient, against eager blocks.

    A compiled block rounds otherwise in bf16. So a token's expert may change, and with it a gradient; the bar
    of gradients is that of fp32.
    """
    for dtype in dict.fromkeys((type_of(args), torch.float32)):
        yield from compiled_in(args, dtype)


def compiled_in(args: argparse.Namespace, dtype: torch.dtype) -> Iterator[Figure]:
    model = small_model(args, dtype)
    tokens = torch.randint(0, 256, (2, 129), device=args.device)

    def run() -> dict[str, Tensor]:
        for p in model.parameters():
            p.grad = None
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        with torch.no_grad():
            found = {"loss": loss.detach(), "evaluated": model(tokens[:, :-1], tokens[:, 1:])}
        return found | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    want = run()
    for block in model.blocks:
        block.compute = torch.compile(  # pyrefly: ignore
            block.compute, fullgraph=True, backend="inductor" if args.device == "cuda" else "aot_eager"
        )
    got = run()
    moved = [name for name, t in got.items() if t.dim() and not t.any()]
    what = f"compiled in {dtype}"
    yield Figure(
        "check", f"{what}: adapters without a gradient", " ".join(moved) or "none", "none", not moved
    )
    for name in ("loss", "evaluated"):
        yield at_most("check", f"{what}: {name}, apart by", float((got[name] - want[name]).abs()), 0.02)
    worst = max((wrong_by(got[name], t), name) for name, t in want.items() if t.dim())
    bar = 0.02 if dtype == torch.float32 else None
    yield at_most("check", f"{what}: gradients, wrong by at most ({worst[1]})", worst[0], bar)


def times(args: argparse.Namespace) -> Iterator[Figure]:
    """Forward and backward of a layer on NF4, of the same on a whole base."""
    if args.device != "cuda":
        return
    for tokens in (4096, ALL["qwen3"][0]):
        one = layer_of(args, tokens, 8)
        calls = [partial(both_ways, one[name], one["leaves"], one["dy"]) for name in ("ours", "theirs")]
        ours, theirs = time_all(calls)
        what = f"a layer of {tokens} tokens, rank 8: {ours:.2f} ms on NF4, {theirs:.2f} in bf16, ratio"
        yield at_most("check", what, ours / theirs, None)


CHECKS: dict[str, Callable[[argparse.Namespace], Iterator[Figure]]] = dict(
    values=values,
    codes=codes,
    linear=linear,
    layer=layer,
    memory=memory,
    graphs=graphs,
    compiled=compiled,
    times=times,
)
