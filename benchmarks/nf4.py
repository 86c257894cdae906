"""Adapters on a base in NF4 on a GPU: right, within the dry run's memory, and how fast.

    python -m benchmarks.nf4 --json FOLDER               # one GPU of 80 GB, at most 9 minutes, the table last
    python -m benchmarks.nf4 --parts check walk          # correctness alone, 2 minutes
    python -m benchmarks.nf4 --device cpu --tiny         # does it run?

check: a weight's values against plain torch, to the bit; the ops against adapters on a whole base of these
values, to the bit and four times, so that launches are replayed; few rows by the kernels that read codes;
CUDA graphs; a compiled model; the memory that a forward leaves; times against those of a base in bf16.

walk: train.py and tmoe.generate as a user starts them, on a small model: a base, adapters on it in NF4,
a resume, the same on a whole base, without compilation, GRPO, two ranks if there are two GPUs, and answers.

train: qwen3-30b-a3b cut to 12 layers, rank 8 on each expert, on a base in bf16 and on the same base in NF4:
tokens/s, losses, and peak memory against the dry run's.

whole: qwen3-30b-a3b whole in NF4, rank 1 on each expert (r/K), where the process may allocate no more than a
GPU of 24 GB has: peak memory against the dry run's.

decode: a step of 64 sequences of qwen3-30b-a3b whole in NF4, with adapters and with adapters off; log-probs
of answers against those of the model's own forward.

grpo: the part of benchmarks.adapters: the whole moe-pilot-14b with adapters, groups of 256 and of 8.

The bases of `train`, `whole` and `decode` are drawn on the GPU, since a folder of 16 GB takes longer to write
than the run. `walk` loads a folder. Each part is a process with a time limit. A check that fails is named,
and all later checks still run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import adapters, figures
from benchmarks.engine import free, in_words, now, ours, step_ms, tiny
from benchmarks.figures import Figure, at_least, at_most
from benchmarks.moe_layer import require_gpu
from benchmarks.nf4_checks import CHECKS, compiled_ahead
from benchmarks.nf4_walk import walk
from benchmarks.sft import TINY
from benchmarks.train import random_tokens, running
from tmoe.cli.parse import parse
from tmoe.config.axes import Axes
from tmoe.config.gpus import GPUS
from tmoe.config.presets import presets
from tmoe.config.run import LoraConfig
from tmoe.generate.load import empty
from tmoe.log.metrics_file import read_steps
from tmoe.model.lora import is_adapter, off
from tmoe.model.nf4 import slots_of
from tmoe.model.transformer import Transformer
from tmoe.parallel.mesh import local_part
from tmoe.plan.memory import memory_per_rank, peak_bytes

GIB = 2**30
LIMITS = dict(check=90.0, walk=140.0, train=170.0, whole=110.0, decode=80.0, grpo=220.0)  # seconds
CARD = GPUS["rtx4090"]
STEPS = 8
SLOTS, PROMPT, TOKENS = 64, 16, 128


def keep(args: argparse.Namespace, part: str, found: dict[str, Any]) -> None:
    figures.keep(args, "nf4", part, found)


def guarded(part: str, what: str, run: Callable[[], Iterable[Figure]]) -> Iterator[Figure]:
    """The figures of a check; an error becomes a figure."""
    try:
        yield from run()
    except Exception as error:
        yield Figure(part, what, in_words(error), "no error", False)


def check(args: argparse.Namespace) -> Iterator[Figure]:
    if args.device == "cuda":
        yield from guarded("check", "kernels compiled ahead", compiled_ahead)
    for name, run in CHECKS.items():
        found = list(guarded("check", name, lambda run=run: run(args)))
        keep(args, "check", dict(check=name, figures=found))
        yield from found
        free()


# ---- runs on a drawn base ----


@torch.no_grad()
def fill(model: Transformer, adapted: float = 0.0) -> None:
    """Draws the weights of a base: the same for a base in bf16 and in NF4.

    adapted: standard deviation of the adapters' factors; 0: they are left as they are.
    """
    slots, state = slots_of(model), model.state_dict()
    like = model.head_weight
    with torch.device("meta"):
        wanted = Transformer(model.cfg).to(like.dtype).state_dict()
    down = 0.02 / (2 * model.cfg.layers) ** 0.5
    for number, (name, shape) in enumerate((name, t.shape) for name, t in wanted.items()):
        draw = torch.Generator(like.device).manual_seed(number)
        t = torch.empty(shape, device=like.device, dtype=like.dtype)
        if t.dim() == 1:
            t.fill_(float("norm" in name))
        else:
            t.normal_(0, down if name.endswith(("o.weight", "down", "down.weight")) else 0.02, generator=draw)
        if name in slots:
            slots[name].put(t)
        else:
            local_part(state[name]).copy_(t)
    for name, t in state.items():
        if adapted and is_adapter(name):
            t.normal_(0, adapted, generator=torch.Generator(t.device).manual_seed(len(name)))


def drawn_run(out: Path, room: float, argv: list[str]) -> None:
    """Trains by train.py in this process, on a drawn base; writes the peak allocations of its steps.

    room: GiB that torch may allocate; 0: all.
    """
    import train
    from tmoe.run.start import Start

    cuda = torch.cuda.is_available()

    def restore(self: Start) -> None:
        if cuda and room:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, room * GIB / total))
        began = now()
        fill(self.model)  # pyrefly: ignore
        print(f"base drawn: {now() - began:.1f} s", flush=True)
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    Start.restore = restore  # pyrefly: ignore
    try:
        train.main(argv)
    finally:
        if cuda:
            peaks = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
            out.write_text(json.dumps(dict(allocated=peaks[0], reserved=peaks[1])))


def words_of(args: argparse.Namespace, layers: int, rank: int, base: str) -> list[str]:
    """train.py's words for a run on a drawn base. layers: 0: all."""
    words = ["qwen3-30b-a3b", *(["--model.layers", str(layers)] if layers else [])]
    sizes = ["--train.seq", "4096", "--train.batch", "1"]
    if args.tiny:
        words = ["qwen3-30b-a3b", *TINY.split(), "--model.layers", "2"]
        rank, sizes = 4, ["--train.seq", "64", "--train.batch", "1"]
    words += [*sizes, "--parallel.checkpoint", "block", "--lora.rank", str(rank), "--lora.base", base]
    words += ["--train.dtype", "bf16", "--optim.warmup", "0", "--optim.lr", "1e-4"]
    return [*words, "--train.eval-batches", "1", "--checkpoint.mode", "off", "--resume", "none"]


def measured(
    args: argparse.Namespace, part: str, words: list[str], folder: Path, room: float = 0.0
) -> dict[str, Any]:
    """Figures of a run of train.py on a drawn base. RuntimeError if it fails."""
    cfg = parse(words, "", world=1)
    memory = memory_per_rank(cfg, Axes.of(cfg.parallel, 1))
    data = random_tokens(folder / "random", cfg.model.vocab, 2**16 if args.tiny else 2**22)
    out = folder / f"run-{cfg.lora.base}-{cfg.lora.rank}"
    peaks = folder / f"{out.name}.json"
    argv = [*words, "--steps", str(STEPS), "--out", str(out), "--data.path", str(data)]
    command = [sys.executable, "-m", "benchmarks.nf4", "--drawn", str(peaks), "--room", str(room), "--"]
    began = now()
    with running([*command, *argv], dict(os.environ)) as process:
        try:
            code = process.wait(LIMITS[part] - 10)
        except subprocess.TimeoutExpired:
            code = None
    log = out / "metrics.jsonl"
    lines = [line for _, line in read_steps(log)] if log.exists() else []
    found: dict[str, Any] = dict(words=argv, code=code, seconds=now() - began)
    found |= dict(estimate_gib=(peak_bytes(memory) - memory["exchange"]) / GIB)
    found |= dict(losses=[line["loss"] for line in lines])
    rates = [line["tokens_per_s"] for line in lines[STEPS // 2 : -1] if line["tokens_per_s"]]
    found |= dict(tokens_per_s=statistics.median(rates) if rates else 0.0)
    found |= dict(peaks=json.loads(peaks.read_text()) if peaks.exists() else {})
    keep(args, part, found)
    if code != 0 or len(lines) < STEPS:
        raise RuntimeError(f"train.py ended with code {code} after {len(lines)} of {STEPS} steps")
    return found


def peak_figure(part: str, what: str, run: dict[str, Any]) -> Iterator[Figure]:
    """The peak of a run's steps against the dry run's; nothing where there is no GPU."""
    if peak := run["peaks"].get("allocated"):
        estimate = run["estimate_gib"]
        text = f"{what}: peak {peak:.2f} GiB, dry run {estimate:.2f}, off by"
        yield at_most(part, text, abs(estimate / peak - 1), 0.05)


def train(args: argparse.Namespace) -> Iterator[Figure]:
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as made:
        for base in ("nf4", "whole"):

            def run(base: str = base) -> Iterator[Figure]:
                words = words_of(args, 12, 64, base)
                found = runs[base] = measured(args, "train", words, Path(made))
                what = f"12 layers, rank 8 an expert, base {base}"
                yield from peak_figure("train", what, found)
                yield Figure("train", f"{what}: tokens/s", f"{found['tokens_per_s']:,.0f}")

            yield from guarded("train", f"12 layers, base {base}", run)
    if len(runs) == 2:
        pairs = list(zip(*(runs[base]["losses"] for base in ("whole", "nf4")), strict=True))
        text = ", ".join(f"{whole:.4f} {nf4:.4f}" for whole, nf4 in pairs)
        apart = max(abs(whole - nf4) for whole, nf4 in pairs)
        yield at_most("train", f"losses of a base in bf16 and in NF4: {text}; apart by", apart, 0.05)
        rates = [runs[base]["tokens_per_s"] for base in ("nf4", "whole")]
        if all(rates):
            yield at_least("train", "tokens/s on NF4, of those on bf16", rates[0] / rates[1], None)


def whole(args: argparse.Namespace) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as made:
        room = CARD.room / GIB
        run = measured(args, "whole", words_of(args, 0, 8, "nf4"), Path(made), room)
        what = f"all layers in NF4, rank 1 an expert, of {room:.1f} GiB"
        yield from peak_figure("whole", what, run)
        if reserved := run["peaks"].get("reserved"):
            yield at_most("whole", f"{what}: allocated with fragments", reserved, round(room, 2), " GiB")
        yield Figure("whole", f"{what}: tokens/s", f"{run['tokens_per_s']:,.0f}")
        losses = " ".join(f"{loss:.3f}" for loss in run["losses"])
        yield Figure("whole", "losses", losses, "finite", all(loss == loss for loss in run["losses"]))


# ---- generation ----


@torch.no_grad()
def decode(args: argparse.Namespace) -> Iterator[Figure]:
    gpu = args.device == "cuda"
    cfg = presets()["qwen3-30b-a3b"].model
    cfg = replace(tiny(cfg), layers=2) if args.tiny else cfg
    slots, prompt, tokens = (3, 5, 12) if args.tiny else (SLOTS, PROMPT, TOKENS)
    lora = LoraConfig(rank=4 if args.tiny else 8, base="nf4")
    dtype = torch.bfloat16 if gpu else torch.float32
    model = empty(cfg, torch.device(args.device), dtype, lora).eval()
    began = now()
    fill(model, adapted=0.02)
    print(f"model drawn: {now() - began:.1f} s", flush=True)
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(5, cfg.vocab, (slots, prompt), generator=draw).tolist()
    ms: dict[str, list[float]] = {"with": [], "off": []}
    for i in range(3):
        for name, each in ms.items():
            with off(model) if name == "off" else nullcontext():
                answers = ours(model, gpu)(prompts, tokens if i else 8, False)
            each += [step_ms(answers)] if i else []  # the first round compiles
    best = {name: min(each) for name, each in ms.items()}
    keep(args, "decode", dict(slots=slots, tokens=tokens, step_ms=ms))
    for name, step in best.items():
        what = f"{slots} sequences, {cfg.layers} layers in NF4, adapters {name}: {step:.2f} ms a step"
        yield Figure("decode", what, f"{slots / step * 1e3:,.0f} tokens/s")
    yield at_least(
        "decode", "speed with adapters, of that with adapters off", best["off"] / best["with"], 0.9
    )
    apart = {"nf4": log_probs_apart(model, prompts)}
    del model
    free()
    model = empty(cfg, torch.device(args.device), dtype, replace(lora, base="whole")).eval()
    fill(model, adapted=0.02)
    apart["whole"] = log_probs_apart(model, prompts)
    keep(args, "decode", dict(log_probs_apart={base: t.tolist() for base, t in apart.items()}))
    what = "log-probs of answers, of the model's own forward, apart"
    for name, of in (("on average", Tensor.mean), ("at most", Tensor.amax)):
        whole, nf4 = (float(of(apart[base])) for base in ("whole", "nf4"))
        yield at_most("decode", f"{what} {name}, base in bf16", whole, None)
        yield at_most("decode", f"{what} {name}, base in NF4", nf4, max(3 * whole, 1e-4))


def log_probs_apart(model: Transformer, prompts: list[list[int]]) -> Tensor:
    """Differences of log-probs of answers, by a decoding step's kernels, from those of a forward.

    On NF4 these kernels read codes, and a forward computes values. Both round: with random weights, errors of
    48 layers add up, also in bf16.
    """
    from tmoe.generate import Engine, Sampling

    few = prompts[:8]
    answers = Engine(model, eos=(), slots=8).generate(few, 1, Sampling(temperature=1.0, max_tokens=24))
    rows = [torch.tensor([*ids, *answer[0].ids.tolist()]) for ids, answer in zip(few, answers, strict=True)]
    tokens = torch.stack(rows).to(model.head_weight.device)
    logits = model(tokens[:, :-1]).float().log_softmax(-1)
    want = logits.gather(-1, tokens[:, 1:, None])[:, len(few[0]) - 1 :, 0].cpu()
    got = torch.stack([answer[0].logprobs for answer in answers])
    return (got - want).abs()


def grpo(args: argparse.Namespace) -> Iterator[Figure]:
    yield from adapters.grpo(args)


PARTS: figures.Parts = dict(check=check, walk=walk, train=train, whole=whole, decode=decode, grpo=grpo)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    figures.flags(p, PARTS, list(PARTS), 520)
    p.add_argument("--grpo-seconds", type=float, default=110, help="seconds of a run of part grpo")
    p.add_argument("--train", nargs="*", default=[], help=argparse.SUPPRESS)  # read by benchmarks.adapters
    p.add_argument("--drawn", type=Path, help=argparse.SUPPRESS)  # the process of a run on a drawn base
    p.add_argument("--room", type=float, default=0.0, help=argparse.SUPPRESS)
    p.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.drawn:
        return drawn_run(args.drawn, args.room, args.words)
    if args.device == "cuda":
        require_gpu(p)
    figures.run("benchmarks.nf4", args, PARTS, LIMITS)


if __name__ == "__main__":
    main()
