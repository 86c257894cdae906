"""Times the backward of an MoE layer's experts with trained and with frozen matrices.

    python -m benchmarks.frozen                     # Qwen3's and OLMoE's layer, bf16
    python -m benchmarks.frozen --shapes qwen3 pilot --json benchmarks/results/frozen/h200.jsonl

With frozen matrices, the products for their gradients are left out: two of the backward's four products.
Expected on Qwen3's shape: at most 0.60 of the backward with trained matrices. Shapes are those of moe_layer,
inputs are random, and both backwards compute the gradients of x and the routing weights. Times are medians
over rounds, in which the two alternate.
"""

import argparse
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.moe_layer import ALL, make, require_gpu, time_all
from benchmarks.train import write_line
from tmoe.ops import moe_mlp


def backward(inputs: list[torch.Tensor], ids_TK: torch.Tensor, dy_TD: torch.Tensor) -> Callable[[], Any]:
    """A function that repeats the backward of one forward, for the inputs that require gradients."""
    x, gate_up, down, weights = inputs
    y = moe_mlp(x, gate_up, down, weights, ids_TK)
    wanted = [t for t in inputs if t.requires_grad]
    return lambda: torch.autograd.grad(y, wanted, dy_TD, retain_graph=True)


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of both backwards for one shape; raises RuntimeError if their gradients differ."""
    torch.manual_seed(0)
    x, logits, gate_up, down, dy = make(ALL[name], "cuda")
    weights, ids = logits.softmax(-1).topk(ALL[name][-1], dim=-1)
    inputs = [x.requires_grad_(), gate_up, down, weights.detach().requires_grad_()]
    frozen = backward(inputs, ids, dy)
    for matrix in (gate_up, down):
        matrix.requires_grad_()
    trained = backward(inputs, ids, dy)
    few, all_ = frozen(), trained()
    if not (torch.equal(few[0], all_[0]) and torch.equal(few[1], all_[3])):
        raise RuntimeError(f"{name}: frozen matrices change the gradients of x or the weights")
    times = time_all([trained, frozen], rounds)
    return dict(shape=name, trained_ms=times[0], frozen_ms=times[1], share=times[1] / times[0])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shapes", nargs="+", default=["qwen3", "olmoe"], choices=list(ALL))
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--json", type=Path, help="append a line for each shape to this file")
    args = p.parse_args()
    require_gpu(p)
    rows = []
    for name in args.shapes:
        rows.append(measure(name, args.rounds))
        if args.json:
            made = dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__)
            write_line(args.json, rows[-1] | made | dict(date=date.today().isoformat()))
    print("| shape | backward, trained, ms | frozen | frozen / trained |\n| --- | --- | --- | --- |")
    for row in rows:
        print(f"| {row['shape']} | {row['trained_ms']:.3f} | {row['frozen_ms']:.3f} | {row['share']:.2f} |")


if __name__ == "__main__":
    main()
