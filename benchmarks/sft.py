"""Times SFT against pretraining and a DPO step against TRL's, and computes how full packed rows are.

    python -m benchmarks.sft --json benchmarks/results/post/h100.jsonl
    python -m benchmarks.sft --parts packing                              # needs no GPU
    python -m benchmarks.sft --device cpu --tiny --rounds 1               # does it run?

speed: olmoe-1b-7b with 8 layers, by train.py as benchmarks.train starts it, SFT and pretraining alternating.
"full": each row is one conversation, and one document. "chat": several share a row, with the same lengths in
SFT and pretraining. A quarter of a conversation is its prompt, which is not trained. tokens/s counts the
slots of rows; "fill" is the share of slots that hold a token. Expected: SFT at least 0.95 of pretraining.

packing: rows packed by best fit decreasing, from 50,000 conversations with lognormal lengths; conversations
that are too long are left out, as in train.py. Expected: tokens of prompts and answers fill at least 97% of
the slots.

dpo: a step of the sigmoid loss on qwen3-30b-a3b cut to --layers, with the same weights, pairs and batch. All
answers have the same length, so that TRL pads nothing. Both sides compute the reference's log-probs before
the first step, and use bf16 and no recomputing. tmoe keeps fp32 master weights; TRL's model is bf16
throughout, its fastest setting. TRL processes --micro pairs at a time, where each number is a contestant, and
uses its Liger option if that is installed. TRL 1.16 has no padding-free DPO: it switches that off.

Each finished part is written to the file at once, so that a run that is ended keeps it. The first steps are
left out of the medians.
"""

import argparse
import importlib.util
import statistics
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from benchmarks.moe_layer import require_gpu
from benchmarks.train import RandomIds, launch, measure, write_line
from benchmarks.trl_rivals import run_rival, words, write_model, write_rows, write_tokenizer
from tmoe.base.versions import versions
from tmoe.cli.parse import parse
from tmoe.data.chat.packing import plan
from tmoe.data.shards import write_shards
from tmoe.log.metrics_file import read_steps

PARTS = "packing", "dpo", "speed"
LENGTHS = "full", "chat"
MEDIAN, SIGMA = 400, 1.0  # median and sigma of the lognormal lengths
CHATS = 50_000
ENOUGH = 20  # a run of the speed part has tokens for this many steps before it repeats them
TINY = """--model.vocab 300 --model.dim 32 --model.heads 4 --model.kv-heads 2 --model.head-dim 8
    --model.moe.experts 8 --model.moe.top-k 2 --model.moe.ffn-dim 16 --no-compile"""
EPISODE = "--optim.lr 1e-6 --optim.schedule constant --optim.warmup 0 --train.eval-batches 1"


class Job(NamedTuple):
    """The arguments, the folder and the facts that all parts use."""

    args: argparse.Namespace
    folder: Path
    about: dict[str, Any]

    def keep(self, part: str, found: dict[str, Any]) -> None:
        if self.args.json:
            write_line(self.args.json, {"part": part} | found | self.about)

    def words(self, preset: str, layers: int) -> list[str]:
        return [preset, "--model.layers", str(layers), *(TINY.split() if self.args.tiny else [])]


# ---- packing ----


def chat_lengths(seed: int, count: int, most: int, median: int = MEDIAN) -> np.ndarray:
    """Token counts of random conversations, without those above `most`."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), SIGMA, count)
    lengths = np.maximum(np.rint(drawn), 8).astype(np.int64)
    return lengths[lengths <= most]


def fill(lengths: np.ndarray, size: int) -> float:
    """Share of the slots of packed rows that hold a token."""
    return float(lengths.sum() / (plan(lengths, size).rows * size))


def packing(job: Job) -> list[str]:
    lines = ["", f"packing, {CHATS:,} conversations, lognormal, median {MEDIAN}, sigma {SIGMA}", ""]
    lines += [
        "| tokens a row | left out | fill, least of the seeds | most | expected |",
        "| --- |" + " --- |" * 4,
    ]
    for size in job.args.sizes:
        by_seed = [chat_lengths(seed, CHATS, size) for seed in job.args.seeds]
        fills = [fill(lengths, size) for lengths in by_seed]
        out = 1 - statistics.mean(len(lengths) for lengths in by_seed) / CHATS
        figures = dict(row=size, seeds=job.args.seeds, left_out=out, fill=fills, median=MEDIAN, sigma=SIGMA)
        job.keep("packing", figures | dict(expected=0.97))
        lines.append(f"| {size} | {out:.1%} | {min(fills):.2%} | {max(fills):.2%} | 97% |")
    return lines


# ---- SFT and pretraining ----


def speed_data(job: Job, lengths: np.ndarray, name: str, vocab: int) -> dict[str, Path]:
    """Conversations and documents of these lengths, of random tokens."""
    rng = np.random.default_rng(0)
    rows = []
    for n in lengths.tolist():
        prompt = n // 4
        rows.append(dict(prompt=words(rng, prompt, vocab)[1:], completion=words(rng, n - prompt - 1, vocab)))
    documents = (np.append(rng.integers(1, vocab, n - 1), 0).astype(np.uint32) for n in lengths.tolist())
    shards = job.folder / f"{name}-documents"
    write_shards(shards, documents, RandomIds(vocab), 2**23)
    return dict(sft=write_rows(job.folder / f"{name}.jsonl", rows), pretrain=shards)


def speed(job: Job) -> list[str]:
    args = job.args
    model = job.words("olmoe-1b-7b", 1 if args.tiny else 8)
    vocab = parse(model, "", world=1).model.vocab
    tokenizer = job.folder / "words"
    write_tokenizer(tokenizer, vocab)
    lines = ["", " ".join(["train.py", *model]), ""]
    lines += ["| lengths | task | tokens/s | runs | peak GiB | fill | SFT / pretraining | expected |"]
    lines += ["| --- |" + " --- |" * 7]
    for kind in args.lengths:
        slots = ENOUGH * args.batch * args.seq
        lengths = np.full(slots // args.seq, args.seq)
        if kind == "chat":
            median = min(MEDIAN, args.seq // 8)
            lengths = chat_lengths(0, 2 * slots // median, args.seq, median)
            lengths = lengths[: int(np.searchsorted(lengths.cumsum(), slots))]
        data = speed_data(job, lengths, kind, vocab)
        runs: dict[str, list[dict[str, Any]]] = dict(pretrain=[], sft=[])
        for i in range(args.rounds):
            for task, measured in runs.items():
                more = ["--task", task, "--data.path", str(data[task]), "--data.val-fraction", "0.1"]
                more += ["--train.eval-batches", "1"]
                more += ["--data.tokenizer", str(tokenizer)] if task == "sft" else []
                sizes = ["--train.seq", str(args.seq), "--train.batch", str(args.batch)]
                out = job.folder / f"{kind}-{task}-{i}"
                measured.append(measure(1, args.steps, [*model, *sizes, *more], out, args.timeout))
                figures = measured[-1] | dict(tokens_per_s=measured[-1]["tokens_per_s_gpu"])
                del figures["tokens_per_s_gpu"]  # the cost model's steps have this key: cost/points.py
                job.keep("speed run", dict(lengths=kind, task=task) | figures)
        rates = {task: [run["tokens_per_s_gpu"] for run in measured] for task, measured in runs.items()}
        medians = {task: statistics.median(measured) for task, measured in rates.items()}
        ratio = medians["sft"] / medians["pretrain"]
        filled = dict(pretrain=1.0, sft=fill(lengths, args.seq))
        job.keep("speed", dict(lengths=kind, tokens_per_s=rates, fill=filled, ratio=ratio, expected=0.95))
        for task, measured in runs.items():
            each = ", ".join(f"{rate:,.0f}" for rate in rates[task])
            peak, last = max(run["peak_gib"] for run in measured), task == "sft"
            cells = f"{peak:.1f} | {filled[task]:.1%} | {f'{ratio:.3f} | 0.95' if last else ' |'}"
            lines.append(f"| {kind} | {task} | {medians[task]:,.0f} | {each} | {cells} |")
    return lines


# ---- DPO ----


def steps_of(out: Path, warmup: int) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl after the first steps, each with `step_s`, the seconds of that step."""
    lines = [line for _, line in read_steps(out / "metrics.jsonl")]
    for before, line in zip([dict(tokens=0), *lines], lines, strict=False):
        rate = line["tokens_per_s"]
        line["step_s"] = (line["tokens"] - before["tokens"]) / rate if rate else None
    timed = [line for line in lines[warmup:] if line["step_s"]]
    if not timed:
        raise SystemExit(f"{len(lines)} steps: too few; {warmup} warm up and are not timed")
    return timed


def dpo(job: Job) -> list[str]:
    args = job.args
    model = job.words("qwen3-30b-a3b", args.layers)
    cfg = parse(model, "", world=1).model
    folder = job.folder / "model"
    write_model(folder, cfg, args.device)
    rng = np.random.default_rng(0)
    half = args.answer // 2
    rows = [
        dict(
            prompt=words(rng, args.answer - half, cfg.vocab)[1:],
            chosen=words(rng, half - 1, cfg.vocab),
            rejected=words(rng, half - 1, cfg.vocab),
        )
        for _ in range(args.pairs * 12)
    ]
    path = write_rows(job.folder / "pairs.jsonl", rows)

    results: dict[str, dict[str, Any]] = {}
    out = job.folder / "dpo"
    in_row = 4  # pairs
    more = ["--task", "preference", "--init", str(folder), "--data.path", str(path), *EPISODE.split()]
    sizes = ["--train.seq", str(2 * args.answer * in_row), "--train.batch", str(args.pairs // in_row)]
    launch(1, args.dpo_steps, [*model, *more, *sizes], out, args.timeout)
    lines = steps_of(out, args.warmup)[:-1]  # the last step validates
    each = [line["step_s"] for line in lines]
    first = next(line for _, line in read_steps(out / "metrics.jsonl"))
    peak = max(line["peak_gib"] for line in lines)
    results["tmoe"] = dict(
        step_s=statistics.median(each), steps_s=each, first_loss=first["loss"], peak_gib=peak
    )
    job.keep("dpo run", dict(contestant="tmoe") | results["tmoe"])

    for liger in (False, True) if importlib.util.find_spec("liger_kernel") else (False,):
        for micro in args.micro:
            name = f"TRL, {micro} pairs at a time{', Liger' if liger else ''}"
            asked = dict(model=str(folder), rows=str(path), steps=args.dpo_steps, warmup=args.warmup)
            asked |= dict(batch=args.pairs, micro=micro, liger=liger)
            results[name] = run_rival("dpo", asked, args.rival_timeout)
            job.keep("dpo run", dict(contestant=name) | results[name])
    best = min((r["step_s"] for name, r in results.items() if name != "tmoe" and "step_s" in r), default=None)
    ratio = best and best / results["tmoe"]["step_s"]
    job.keep("dpo", dict(results=results, pairs=args.pairs, tokens_a_sequence=args.answer, times=ratio))

    title = f"DPO, {' '.join(model)}, {args.pairs} pairs a step of 2 x {args.answer} tokens"
    table = [
        "",
        title,
        "",
        "| contestant | ms a step | pairs/s | peak GiB | first loss | tmoe is so often as fast |",
    ]
    table.append("| --- |" + " --- |" * 5)
    for name, r in results.items():
        if "missing" in r:
            table.append(f"| {name} | {r['missing']} | | | | |")
            continue
        times = r["step_s"] / results["tmoe"]["step_s"]
        speed = f"{r['step_s'] * 1e3:.1f} | {args.pairs / r['step_s']:.1f} | {r['peak_gib']:.1f}"
        table.append(f"| {name} | {speed} | {r['first_loss']:.4f} | {times:.2f} |")
    return table


# ---- all ----


def about(module: str) -> dict[str, Any]:
    """The facts that each line of the file records about its origin."""
    return dict(
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        versions=versions() | {"transformers": transformers.__version__},
        date=date.today().isoformat(),
        command=" ".join([f"python -m benchmarks.{module}", *sys.argv[1:]]),
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    p.add_argument("--lengths", nargs="+", default=["full"], choices=LENGTHS, help="for the speed part")
    p.add_argument("--rounds", type=int, default=2, help="for the speed part: alternating runs of each task")
    p.add_argument("--steps", type=int, default=24, help="steps of a run of the speed part")
    p.add_argument("--seq", type=int, default=4096)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--sizes", nargs="+", type=int, default=[2048, 4096, 8192, 16384], help="tokens of a row")
    p.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    p.add_argument("--layers", type=int, default=4, help="layers of the DPO part's model")
    p.add_argument("--pairs", type=int, default=16, help="pairs of a DPO step, a multiple of 4")
    p.add_argument("--answer", type=int, default=512, help="tokens of a prompt with one of its answers")
    p.add_argument("--micro", nargs="+", type=int, default=[8, 4], help="pairs that TRL processes at a time")
    p.add_argument("--dpo-steps", type=int, default=10)
    p.add_argument("--warmup", type=int, default=3, help="DPO steps that are not timed")
    p.add_argument("--timeout", type=float, default=230, help="seconds after which a run is given up")
    p.add_argument("--rival-timeout", type=float, default=100)
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--tiny", action="store_true", help="models of a few thousand weights")
    p.add_argument("--json", type=Path, help="append each result to this file, one JSON object a line")
    args = p.parse_args()
    if args.device == "cuda" and args.parts != ["packing"]:
        require_gpu(p)
    if args.pairs % 4 or any(args.pairs % micro for micro in args.micro):
        p.error(f"--pairs {args.pairs}: must be a multiple of 4 and of --micro {args.micro}")
    tables = []
    with tempfile.TemporaryDirectory() as made:
        job = Job(args, Path(made), about("sft"))
        print(job.about, flush=True)
        for part in args.parts:
            tables += dict(packing=packing, dpo=dpo, speed=speed)[part](job)
            print(*tables, sep="\n", flush=True)
            tables.clear()


if __name__ == "__main__":
    main()
