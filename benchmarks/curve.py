"""Compares the loss curve in bf16 with everything fast on with that of the plainest PyTorch.

    python -m benchmarks.curve --steps 300 --json curve.json

Is the difference within noise? The reference path: eager blocks, experts one by one (ops/reference.py), a
dense document mask, logits whole, torch's AdamW. It runs in bf16 and in fp32; what rounding alone does to a
curve is the difference between those two. Without a GPU it says so and compares what runs on the CPU: no
kernel of tmoe's is in that.
"""

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.train import running
from tmoe.run.cli import parse

MODEL = """tiny --model.dim 256 --model.layers 4 --model.heads 8 --model.kv-heads 4 --model.moe.ffn-dim 128
    --model.moe.experts 16 --train.seq 256 --train.batch 16 --train.eval-every 0 --train.eval-batches 1
    --checkpoint.mode off --resume none --log.no-progress"""
RUNS = {
    "fast bf16": ("fast", "bf16"),
    "reference bf16": ("reference", "bf16"),
    "reference fp32": ("reference", "fp32"),
}
WINDOW = 20  # steps that are averaged before curves are compared


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path, help="write the curves to this file")
    parser.add_argument("train", nargs=argparse.REMAINDER, help="-- --section.field value ... for every run")
    args = parser.parse_args()
    if args.steps < WINDOW:
        parser.error(
            f"--steps={args.steps}: must be {WINDOW} or more, which are averaged before curves are compared"
        )
    more = [w for w in args.train if w != "--"]
    if parse([*MODEL.split(), *more], "").optim.offload:
        parser.error(
            "--optim.offload: not here, for the reference path keeps the optimizer's state on the GPU"
        )
    if not torch.cuda.is_available():
        print(
            "no GPU here: three runs on the CPU, without tmoe's kernels (fewer --steps are quicker)",
            file=sys.stderr,
        )
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
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def train(path: str, words: list[str]) -> None:
    """One run, in a process of its own. path: "fast" or "reference"."""
    import train as entry

    if path == "reference":
        words = [*words, "--no-compile"]
        become_plain()
    entry.main(words)


def become_plain() -> None:
    """Replaces every fast path of this process by its definition."""
    from tmoe.model import transformer as model
    from tmoe.model.attention_backend import document_mask
    from tmoe.moe import experts, router
    from tmoe.ops import reference
    from tmoe.optim import adamw as optim

    def whole_loss(h_TD, weight_VD, targets_T):
        return F.cross_entropy(F.linear(h_TD, weight_VD).float(), targets_T, reduction="sum")

    def dense_mask(documents_BS, window, S, device, width, sinks=False):
        return None if documents_BS is None else document_mask(documents_BS)

    def torchs_step(self):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in params:
            p.grad = p.grad.float()
        if self.finite:
            if self.factor is not None:
                torch._foreach_mul_([p.grad.to_local() for p in params], self.factor)
            torch.optim.AdamW.step(self)

    def plain_mlp(*args, **_):
        return reference.moe_mlp(*args[:7])

    experts.moe_mlp = plain_mlp
    model.make_mask = dense_mask
    model.cross_entropy_sum = whole_loss
    optim.AdamW._step_in_one_pass = torchs_step
    router.softmax_topk = reference.softmax_topk
    router.on_matrix_units = lambda x_TD: False


if __name__ == "__main__":
    main()
