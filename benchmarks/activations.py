"""Times the experts' fused op with each activation against SwiGLU, with equal products.

    python -m benchmarks.activations                                 # Qwen3's and OLMoE's shapes, a minute
    python -m benchmarks.activations --json benchmarks/results/activations/h200.jsonl
    python -m benchmarks.activations --shapes 8192,4096,1408,128,8   # any shape of moe_layer: T,D,F,E,K

An expert with a gate has 3 D F weights, and one without has 2 D F. So activations without a gate get F' =
3F/2, which makes the products of forward and backward the same number of FLOPs. The limit is 3% above SwiGLU.

All activations of tmoe/base/activations.py get the same tokens, routing and dy, random normal, bf16;
gradients are computed for x, the routing weights and both matrices. The activations alternate in rounds, in a
new order in each round, with a cold L2. New inputs are drawn --draws times. A figure is the median over the
draws of medians over rounds; a ratio is computed within a draw, because the clock slows down under load.
"swiglu again" times the same calls a second time, so its difference from SwiGLU is noise.

next: tune.py
"""

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.moe_layer import (
    ALL,
    CYCLES_PER_MS,
    Shape,
    both,
    make,
    prepare,
    require_gpu,
    rivals,
    shape,
    time_all,
)
from tmoe.base.activations import ACTIVATIONS
from tmoe.ops import moe_mlp
from tmoe.ops.experts.op import trace
from tmoe.ops.launch.kernel_launch import device_facts
from tmoe.ops.launch.precompile import precompile

AGAIN = "swiglu again"
NAMES = ["swiglu", *(name for name in ACTIVATIONS if name != "swiglu"), AGAIN]
HEAD_START = 3 * CYCLES_PER_MS  # for the host, which needs a millisecond for forward and backward


def named(name: str) -> str:
    """The activation of a timed entry, which may be AGAIN."""
    return name.removesuffix(" again")


def width(name: str, F: int) -> int:
    """The hidden width that gives an entry the same products as a gated expert of width F."""
    return F if ACTIVATIONS[named(name)].gated else 3 * F // 2


def measure(given: Shape, draws: int, rounds: int) -> dict[str, tuple[float, ...]]:
    """Each entry's ms of forward and of forward + backward, and both relative to swiglu's."""
    _, D, F, E, K = given
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    for draw in range(draws):
        torch.manual_seed(draw)
        inputs = make(given, "cuda")
        x, dy = inputs.x.requires_grad_(), inputs.dy
        weights, ids = rivals.top_k(inputs.logits, K)
        weights.requires_grad_()
        gated = [inputs.gate_up.requires_grad_(), inputs.down.requires_grad_()]
        wide = 3 * F // 2
        plain = [
            (gated[0].new_empty(E, wide, D).normal_() * D**-0.5).requires_grad_(),
            (gated[1].new_empty(E, D, wide).normal_() * wide**-0.5).requires_grad_(),
        ]
        calls: list[Callable[[], Any]] = []
        for name in NAMES:
            matrices = gated if ACTIVATIONS[named(name)].gated else plain
            op = functools.partial(_experts, named(name), ids, matrices)
            calls.append(functools.partial(op, x, weights))
            calls.append(functools.partial(both, op, (x, weights), matrices, dy))
        times = time_all(calls, rounds, begin=functools.partial(prepare, HEAD_START))
        for i, name in enumerate(NAMES):
            seen[name].append((times[2 * i], times[2 * i + 1]))
        del inputs, x, dy, weights, ids, gated, plain, calls
    medians = {}
    for name, pairs in seen.items():
        beside = [(f / f0, b / b0) for (f, b), (f0, b0) in zip(pairs, seen["swiglu"], strict=True)]
        medians[name] = tuple(
            statistics.median(column) for table in (pairs, beside) for column in zip(*table, strict=True)
        )
    return medians


def _experts(name: str, ids: Tensor, matrices: list[Tensor], x: Tensor, weights: Tensor) -> Tensor:
    """The op with the order of arguments that `both` expects."""
    gate_up, down = matrices
    return moe_mlp(x, gate_up, down, weights, ids, activation=name)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shapes", nargs="+", default=["qwen3", "olmoe"], type=shape, metavar="SHAPE")
    p.add_argument("--draws", type=int, default=5, help="how often new inputs are drawn")
    p.add_argument("--rounds", type=int, default=7, help="rounds over all activations in each draw")
    p.add_argument("--json", type=Path, help="append each shape's result to this file as a JSON object")
    args = p.parse_args()
    if odd := [name for name in args.shapes if ALL[name][2] % 2]:
        p.error(f"--shapes {odd[0]}: F={ALL[odd[0]][2]} must be even, for 3F/2 without a gate")
    if min(args.draws, args.rounds) < 1:
        p.error(f"--draws={args.draws} --rounds={args.rounds}: must be 1 or more")
    require_gpu(p)

    # Compile all kernels first, in as many processes as there are activations.
    layers: list[tuple[Any, ...]] = []
    for T, D, F, E, K in (ALL[name] for name in args.shapes):
        layers += [(trace, T, D, width(a, F), E, K, torch.bfloat16, None, a) for a in ACTIVATIONS]
    precompile(device_facts(torch.device("cuda", 0))[0], layers, len(ACTIVATIONS))
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    about |= {
        "date": str(date.today()),
        "command": " ".join(["python -m benchmarks.activations", *sys.argv[1:]]),
    }
    print(about)
    lines = [
        f"{'shape':>10} {'activation':>13} {'F':>6} {'fwd ms':>8} {'of swiglu':>9} "
        f"{'f+b ms':>8} {'of swiglu':>9} {'TF/s':>5}"
    ]
    for name in args.shapes:
        T, D, F, E, K = ALL[name]
        medians = measure(ALL[name], args.draws, args.rounds)
        torch.cuda.empty_cache()
        for who, (fwd, f_b, fwd_beside, f_b_beside) in medians.items():
            lines.append(
                f"{name:>10} {who:>13} {width(who, F):6d} {fwd:8.3f} {fwd_beside:8.3f}x {f_b:8.3f} "
                f"{f_b_beside:8.3f}x {18 * T * K * D * F / f_b / 1e9:5.0f}"
            )
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            results = {
                who: dict(zip(("fwd", "both", "fwd_beside", "both_beside"), times, strict=True))
                for who, times in medians.items()
            }
            line = {"shape": name, "sizes": ALL[name], "draws": args.draws, "rounds": args.rounds}
            with args.json.open("a") as file:
                file.write(json.dumps(line | {"results": results} | about) + "\n")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
