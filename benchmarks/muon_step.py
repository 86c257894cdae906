"""Times Newton-Schulz on a stack of experts, and a step of Muon and of AdamW, on one GPU.

    python -m benchmarks.muon_step
    python -m benchmarks.muon_step --layers 2 --json muon.jsonl

The first table has five iterations in bf16 of stacks [E, out, in], by batched products and by products that
compute half of a symmetric result: milliseconds, TFLOP/s of the whole products, and the distance of the
result from an iteration in fp32. Expected on an H200 for [512, 768, 2048]: 21 ms, and 16 by halves.

The second has a step of `--layers` layers of Qwen3-30B-A3B (bf16 gradients and copies): AdamW's, Muon's, and
Muon's without the products, which should be at most 1.3 times AdamW's.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.moe_layer import require_gpu
from benchmarks.optimizer_step import LAYER, milliseconds
from benchmarks.train import at_least_one
from tmoe.config.run import OptimConfig
from tmoe.ops import newton_schulz
from tmoe.ops.newton_schulz import flops, orthogonal
from tmoe.optim.adamw import AdamW, build_optimizer, init_state
from tmoe.optim.matrices import Rows
from tmoe.parallel.copies import WorkingCopy

STACKS = [(512, 768, 2048), (512, 2048, 768), (192, 1024, 2048), (128, 1408, 2048), (16, 4096, 14336)]
STACKS += [(96, 2880, 2880), (8, 2048, 4096)]


def timed(run: Callable[[], object], rounds: int) -> float:
    """The median milliseconds of a call on the GPU."""
    times = []
    for i in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times += [begin.elapsed_time(end)] if i >= 2 else []
    return sorted(times)[len(times) // 2]


def of_stack(shape: tuple[int, int, int], halves: bool, rounds: int) -> dict:
    """A row of the first table."""
    newton_schulz.SYMMETRIC = 1 if halves else None
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    some = x[:2].float()
    want = orthogonal(some)
    far = ((orthogonal(x)[:2].float() - want).norm() / want.norm()).item()
    ms = timed(lambda: orthogonal(x), rounds)
    rate = shape[0] * flops(*shape[1:]) / ms / 1e9
    return dict(stack=list(shape), products="halves" if halves else "batched", ms=ms, tflops=rate, far=far)


def prepared(layers: int, muon: bool) -> AdamW:
    """An optimizer whose parameters have gradients and working copies."""
    named, parts = {}, {}
    for layer in range(layers):
        for name, shape in LAYER.items():
            p = nn.Parameter(torch.randn(shape, device="cuda") * 0.02)
            named[f"{layer}.{name}"] = p
            vars(p)["working_copy"] = WorkingCopy(p, torch.bfloat16)
        parts[f"{layer}.gate_up"] = [Rows(0, 768), Rows(768, 768)]
        parts[f"{layer}.qkv"] = [Rows(0, 4096), Rows(4096, 512), Rows(4608, 512)]
    cfg = OptimConfig(muon="." if muon else None)
    device = torch.device("cuda")
    optimizer = build_optimizer(named.items(), cfg, device, True, parts=parts, products=torch.bfloat16)
    init_state(optimizer)
    for p in named.values():
        p.grad = torch.randn(p.shape, device="cuda", dtype=torch.bfloat16) * 1e-3
    return optimizer


def of_steps(layers: int, rounds: int) -> list[dict[str, Any]]:
    """The rows of the second table."""
    newton_schulz.SYMMETRIC = None
    rows: list[dict[str, Any]] = []
    for name, muon, products in (("AdamW", False, True), ("Muon", True, True), ("Muon, passes", True, False)):
        optimizer = prepared(layers, muon)
        real = newton_schulz._iterated
        if not products:
            newton_schulz._iterated = lambda stack, iterations: stack
        try:
            rows.append(dict(step=name, layers=layers, ms=milliseconds(optimizer, rounds)))
        finally:
            newton_schulz._iterated = real
        del optimizer
        torch.cuda.empty_cache()
    return [row | dict(of_adamw=row["ms"] / rows[0]["ms"]) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=at_least_one, default=1)
    parser.add_argument("--rounds", type=at_least_one, default=10)
    parser.add_argument("--json", type=Path, help="append a line for every row to this file")
    args = parser.parse_args()
    require_gpu(parser)
    found = []
    print("| stack | products | ms | TFLOP/s | distance |\n| --- | --- | --- | --- | --- |")
    for shape in STACKS:
        for halves in (False, True):
            row = of_stack(shape, halves, args.rounds)
            found.append(row)
            values = f"{row['ms']:.2f} | {row['tflops']:.0f} | {row['far']:.4f}"
            print(f"| {row['stack']} | {row['products']} | {values} |", flush=True)
    print("\n| step | ms | of AdamW's time |\n| --- | --- | --- |")
    for row in of_steps(args.layers, args.rounds):
        found.append(row)
        print(f"| {row['step']} | {row['ms']:.2f} | {row['of_adamw']:.2f} |", flush=True)
    if args.json:
        with args.json.open("a") as file:
            for row in found:
                file.write(json.dumps(row | dict(gpu=torch.cuda.get_device_name())) + "\n")


if __name__ == "__main__":
    main()
