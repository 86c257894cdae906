"""Compares the bf16 loss curve with all fast paths on with the curve of the plainest PyTorch.

    python -m benchmarks.curve --steps 300 --json curve.json

The question is whether the difference is within noise. The reference path: eager blocks, experts one by one
(ops/reference.py), a dense document mask, all logits at once, torch's AdamW. It runs in bf16 and in fp32; the
difference between these two curves is the effect of rounding alone. Without a GPU, the script prints that and
compares the paths that run on the CPU, without any kernel of tmoe.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.train import running
from tmoe.cli.parse import parse
from tmoe.log.metrics_file import read_steps
from tmoe.model import transformer
from tmoe.model.attention_backend import document_mask
from tmoe.model.dense_sums import SummedLinear
from tmoe.moe import experts, router
from tmoe.ops import reference
from tmoe.optim.adamw import AdamW

MODEL = """tiny --model.dim 256 --model.layers 4 --model.heads 8 --model.kv-heads 4 --model.moe.ffn-dim 128
    --model.moe.experts 16 --train.seq 256 --train.batch 16 --train.eval-every 0 --train.eval-batches 1
    --checkpoint.mode off --resume none --log.no-progress"""
RUNS = {
    "fast bf16": ("fast", "bf16"),
    "reference bf16": ("reference", "bf16"),
    "reference fp32": ("reference", "fp32"),
}
WINDOW = 20  # number of steps that are averaged before curves are compared


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path, help="write the curves to this file")
    parser.add_argument("train", nargs=argparse.REMAINDER, help="-- --section.field value ... for every run")
    args = parser.parse_args()

    # Errors are reported before the first run.
    if args.steps < WINDOW:
        parser.error(
            f"--steps={args.steps}: must be {WINDOW} or more: averages over that many steps are compared"
        )
    more = [w for w in args.train if w != "--"]
    if parse([*MODEL.split(), *more], "").optim.offload:
        parser.error("--optim.offload: not here: the reference path keeps the optimizer's state on the GPU")
    if not torch.cuda.is_available():
        print(
            "no GPU here: three runs on the CPU, without tmoe's kernels (fewer --steps are quicker)",
            file=sys.stderr,
        )

    # Three runs at the same time, each in its own process.
    started = {}
    with tempfile.TemporaryDirectory() as out, ExitStack() as stack:
        for name, (path, dtype) in RUNS.items():
            words = [*MODEL.split(), "--steps", str(args.steps), "--train.dtype", dtype]
            words += ["--out", f"{out}/{name}", *more]
            code = f"from benchmarks.curve import train; train({path!r}, {words!r})"
            started[name] = stack.enter_context(running([sys.executable, "-c", code]))
        for name, process in started.items():
            if process.wait():
                raise SystemExit(f"{name}: train.py ended with code {process.returncode}")
        curves = {name: read(Path(out, name, "metrics.jsonl")) for name in RUNS}

    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(curves) + "\n")
    print(
        "| curve | first loss | last mean | largest, mean difference from reference bf16 |\n|---|---|---|---|"
    )
    means = {name: torch.tensor(curve).unfold(0, WINDOW, 1).mean(-1) for name, curve in curves.items()}
    for name, mean in means.items():
        far = (mean - means["reference bf16"]).abs()
        print(f"| {name} | {curves[name][0]:.4f} | {mean[-1]:.4f} | {far.max():.4f}, {far.mean():.4f} |")


def read(path: Path) -> list[float]:
    """The losses of a metrics.jsonl."""
    return [line["loss"] for _, line in read_steps(path)]


def train(path: str, words: list[str]) -> None:
    """One run, in its own process. path: "fast" or "reference"."""
    import train as entry

    if path == "reference":
        words = [*words, "--no-compile"]
        become_plain()
    entry.main(words)


class Plain(NamedTuple):
    """A definition that replaces a fast path."""

    owner: Any
    """the module, or class, that looks the fast path up by `name` when it runs"""
    name: str
    plain: Callable[..., Any]


def become_plain() -> None:
    """Replaces every fast path of this process by its definition."""
    for part in plain_parts():
        getattr(part.owner, part.name)  # AttributeError if a name has moved: setattr would create a new one
        setattr(part.owner, part.name, part.plain)


def plain_parts() -> list[Plain]:
    """The definitions, and where each is set: in the module that uses the fast path, not in its own."""
    return [
        Plain(experts, "moe_mlp", plain_mlp),
        Plain(experts.LocalExperts, "sums_for", no_sums),
        Plain(SummedLinear, "forward", plain_linear),
        Plain(transformer, "rows_of", plain_rows),
        Plain(transformer, "make_mask", dense_mask),
        Plain(transformer, "cross_entropy_sum", whole_loss),
        Plain(AdamW, "_step_in_one_pass", torchs_step),
        Plain(router, "softmax_topk", reference.softmax_topk),
        Plain(router, "on_matrix_units", never),
    ]


def plain_mlp(*args: Any) -> Tensor:
    """ops/reference.py's layer, which does not need `pairs`."""
    return reference.moe_mlp(*args[:7])


def no_sums(self: experts.LocalExperts, x: Tensor) -> bool:
    """Always False: autograd gets the gradients of all weights."""
    return False


def plain_linear(self: SummedLinear, x: Tensor) -> Tensor:
    """torch's linear layer."""
    return F.linear(x, self.weight, self.bias)


def plain_rows(embedding: nn.Embedding, tokens_BS: Tensor) -> Tensor:
    """torch's embedding."""
    return embedding(tokens_BS)


def dense_mask(
    documents_BS: Tensor | None,
    window: int,
    S: int,
    device: torch.device,
    width: int,
    sinks: bool = False,
    queries_Q: Tensor | None = None,
    in_blocks: bool = False,
) -> Tensor | None:
    """Every pair of positions, on any device; a window is applied by the attention."""
    return None if documents_BS is None else document_mask(documents_BS)


def whole_loss(h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, best_T: Tensor | None = None) -> Tensor:
    """torch's loss from all logits at once. best_T: None, since the presets predict one token."""
    assert best_T is None
    return F.cross_entropy(F.linear(h_TD, weight_VD).float(), targets_T, reduction="sum")


def torchs_step(self: AdamW) -> None:
    """A step of torch's AdamW on fp32 gradients.

    Gradients are clipped and steps are skipped as `decide` says; the host reads its result.
    """
    params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
    for p in params:
        p.grad = p.grad.float()
    if self.finite:
        if self.factor is not None:
            torch._foreach_mul_([p.grad.to_local() for p in params], self.factor)
        torch.optim.AdamW.step(self)


def never(x_TD: Tensor) -> bool:
    """Always False, as for fp32: products never run on matrix units without conversion."""
    return False


if __name__ == "__main__":
    main()
