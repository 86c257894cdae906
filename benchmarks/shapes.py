"""Times the layer at the widths of published models, from few tokens to many: is grouped_mm ever faster?

    python -m benchmarks.shapes                                          # all, two minutes on an H200
    python -m benchmarks.shapes dbrx granite-1b --tokens 512 8192 --json shapes.jsonl

The widths are those of published models and a few others. The tuned table has few of them, so this mostly
times the rule that interpolates between its entries. tmoe's layer and torch's grouped_mm both run eagerly,
with the same
routing, and the host gets a head start: only GPU time is compared, because compiling grouped_mm for each
shape would take an hour. The gradients of the two are compared. benchmarks/moe_layer.py has the full
comparison of a shape, `--shapes T,D,F,E,K`.

next: tune.py
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import rivals
from benchmarks.moe_layer import CYCLES_PER_MS, both, make, prepare, require_gpu, time_all
from tmoe.commands.warmup import local_arch
from tmoe.ops.experts.op import trace
from tmoe.ops.launch.precompile import precompile
from tmoe.ops.router.topk import trace as trace_router

MODELS = {  # name: (D, F, E, K)
    "granite-1b": (1024, 512, 32, 8),
    "granite-3b": (1536, 512, 40, 8),
    "qwen1.5": (2048, 1408, 60, 4),
    "qwen3-next": (2048, 512, 512, 10),
    "gpt-oss-120b": (2880, 2880, 128, 4),
    "qwen3-235b": (4096, 1536, 128, 8),
    "glm-4.5-air": (4096, 1408, 128, 8),
    "hunyuan": (4096, 3072, 64, 8),
    "phi-3.5": (4096, 6400, 16, 2),
    "llama-4": (5120, 8192, 16, 1),
    "dbrx": (6144, 10752, 16, 4),
    "mixtral-8x22b": (6144, 16384, 8, 2),
    "arctic/2": (7168, 4864, 64, 2),
    "switch": (1024, 4096, 64, 1),
    "small": (512, 256, 16, 2),
    "gpt2-upcycled": (768, 3072, 8, 2),
    "one-expert": (4096, 11008, 1, 1),
}
TOKENS = (64, 512, 2048, 8192, 32768)
# Cycles of GPU idle time before each call, for the host: grouped_mm's forward and backward take it 2 to 3 ms.
HEAD_START = 5 * CYCLES_PER_MS
ROOM = 110e9  # most bytes of an H200 that a shape may use


def measure(T: int, D: int, F: int, E: int, K: int) -> tuple[float, ...]:
    """ms of tmoe's forward and forward + backward, the same for grouped_mm, and the difference of the two.

    The difference is the largest relative difference of their gradients.
    """
    torch.manual_seed(1)
    x, logits, gate_up, down, dy = make((T, D, F, E, K), "cuda")
    x.requires_grad_()
    logits.requires_grad_()
    calls: list[Callable[[], Any]] = []
    for name in ("tmoe", "grouped_mm"):
        layer, weights, _ = rivals.CONTESTANTS[name][1](gate_up, down, K)
        calls.append(functools.partial(layer, x, logits))
        calls.append(functools.partial(both, layer, (x, logits), weights, dy))
    del gate_up, down
    apart = max(
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(calls[1](), calls[3](), strict=True)
    )
    return *time_all(calls, 5, begin=functools.partial(prepare, HEAD_START)), apart


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("models", nargs="*", help=f"any of {', '.join(MODELS)}; default: all")
    p.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    p.add_argument("--json", type=Path, help="append each line to this file as a JSON object")
    args = p.parse_args()
    if unknown := [name for name in args.models if name not in MODELS]:
        p.error(f"model {unknown[0]!r}: valid are {', '.join(MODELS)}")
    if min(args.tokens) < 1:
        p.error(f"--tokens={min(args.tokens)}: must be at least 1")
    require_gpu(p)

    # Leave out the shapes that do not fit, and compile the kernels first.
    shapes = [(name, (T, *MODELS[name])) for name in args.models or MODELS for T in args.tokens]
    fits = [12 * s[0] * s[4] * (s[1] + 3 * s[2]) + 30 * s[3] * s[1] * s[2] < ROOM for _, s in shapes]
    for (name, s), ok in zip(shapes, fits, strict=True):
        if not ok:
            print(f"{name} at T={s[0]}: left out, it takes more than {ROOM / 1e9:.0f} GB")
    shapes = [shape for shape, ok in zip(shapes, fits, strict=True) if ok]
    layers = [(trace, *shape, torch.bfloat16) for _, shape in shapes]
    precompile(local_arch(), layers + [(trace_router, T, E, K, False) for _, (T, _, _, E, K) in shapes], 8)
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    about |= {"date": str(date.today()), "command": " ".join(["python -m benchmarks.shapes", *sys.argv[1:]])}
    print(about)
    print(
        f"{'model':>14} {'T':>6} {'rows/expert':>11} | forward ms, grouped_mm | f + b ms, grouped_mm | "
        "TFLOP/s   apart"
    )
    for name, shape in shapes:
        T, D, F, E, K = shape
        fwd, f_b, their_fwd, their_f_b, apart = measure(*shape)
        print(
            f"{name:>14} {T:6d} {T * K / E:11.1f} | {fwd:8.3f} {their_fwd:8.3f} {their_fwd / fwd:4.2f}x | "
            f"{f_b:8.3f} {their_f_b:8.3f} {their_f_b / f_b:4.2f}x | "
            f"{18 * T * K * D * F / f_b / 1e9:4.0f} {apart:8.1e}",
            flush=True,
        )
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            line = {
                "model": name,
                "shape": shape,
                "tmoe": [fwd, f_b],
                "grouped_mm": [their_fwd, their_f_b],
                "apart": apart,
            }
            with args.json.open("a") as file:
                file.write(json.dumps(line | about) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
