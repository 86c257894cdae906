"""Times AdamW's step alone, with each type of moments and weights, on one GPU.

    python -m benchmarks.optimizer_step
    python -m benchmarks.optimizer_step --layers 6 --json states.jsonl

The parameters are those of layers of Qwen3-30B-A3B: 128 experts of width 768, attention, router and norms.
Gradients are bf16, as a rank has them for weights that it holds whole. Each row has milliseconds of a step,
the bytes that the step must move, bytes/s, and the time relative to fp32's step. With bf16 masters no copy
is written for the compute; the other rows write one in bf16.
"""

import argparse
import itertools
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import nn

from benchmarks.moe_layer import require_gpu
from benchmarks.sft import about
from benchmarks.train import at_least_one, write_line
from tmoe.config.run import OptimConfig
from tmoe.optim.adamw import AdamW, build_optimizer, init_state
from tmoe.optim.states import States
from tmoe.parallel.copies import WorkingCopy

LAYER = dict(
    gate_up=(128, 1536, 2048), down=(128, 2048, 768), qkv=(5120, 2048), o=(2048, 4096), router=(128, 2048)
)
LAYER |= dict(norm=(2048,), head_norm=(128,))
Masters = Literal["fp32", "bf16"]
KINDS = list(itertools.product(get_args(Masters), get_args(States)))
BYTES = dict(fp32=8.0, bf16=4.0, int8=2 + 8 / 256)  # of an element's moments, which are read and written


def prepared(layers: int, states: States, masters: Masters, device: torch.device) -> AdamW:
    """An optimizer whose parameters have gradients."""
    dtype = torch.bfloat16 if masters == "bf16" else torch.float32
    named = {}
    for layer in range(layers):
        for name, shape in LAYER.items():
            p = nn.Parameter(torch.randn(shape, device=device, dtype=dtype) * 0.02)
            named[f"{layer}.{name}"] = p
            if masters == "fp32":
                vars(p)["working_copy"] = WorkingCopy(p, torch.bfloat16)
    cfg = OptimConfig(states=states, masters=masters)
    optimizer = build_optimizer(named.items(), cfg, device, keeps_fresh=True)
    init_state(optimizer)
    for p in named.values():
        p.grad = torch.randn(p.shape, device=device, dtype=torch.bfloat16) * 1e-3
    return optimizer


def milliseconds(optimizer: AdamW, steps: int) -> float:
    """The median time of a step on the GPU."""
    one = torch.ones((), device="cuda")
    times = []
    for step in range(steps + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        optimizer.decide(one, one, 1.0)
        begin.record()
        optimizer.step()
        end.record()
        torch.cuda.synchronize()
        times += [begin.elapsed_time(end)] if step >= 3 else []
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=at_least_one, default=2)
    parser.add_argument("--steps", type=at_least_one, default=20)
    parser.add_argument("--json", type=Path, help="append a line for every row to this file")
    args = parser.parse_args()
    require_gpu(parser)
    first = None
    print("| moments | masters | ms | bytes an element | TB/s | of fp32's time |")
    print("| --- | --- | --- | --- | --- | --- |")
    for masters, states in KINDS:
        optimizer = prepared(args.layers, states, masters, torch.device("cuda"))
        count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        ms = milliseconds(optimizer, args.steps)
        first = first or ms
        width = 2 * BYTES[states] + (2 * 4 + 2 if masters == "fp32" else 2 * 2) + 2
        rate = width * count / ms / 1e9
        print(
            f"| {states} | {masters} | {ms:.2f} | {width:.1f} | {rate:.2f} | {ms / first:.2f} |", flush=True
        )
        if args.json:
            row = dict(states=states, masters=masters, ms=ms, elements=count)
            write_line(args.json, row | about("optimizer_step"))
        del optimizer
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
