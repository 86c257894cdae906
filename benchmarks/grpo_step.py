"""Times a whole GRPO step against TRL's, or measures its memory for groups of several sizes.

    python -m benchmarks.grpo_step --json benchmarks/results/post/h100.jsonl
    python -m benchmarks.grpo_step --memory --group 8 64 256 --json ...     # the whole pilot, frozen experts
    python -m benchmarks.grpo_step --device cpu --tiny --prompts 2 --group 4 --max-tokens 8    # does it run?

Speed: qwen3-30b-a3b cut to --layers, with the same random weights, prompts and rewards, and the same numbers
of prompts, answers and tokens. An answer ends before --max-tokens only with a chance of 1 in 151,936 per
token; "tokens" is the mean length of the answers. train.py --task grpo runs as a user starts it. TRL's
GRPOTrainer runs
without a server, in a separate process for each setting: with transformers' generate and a cache of keys and
values, once made to keep its grouped product for decoding too, and once by default; and with continuous
batching (use_transformers_continuous_batching). The loss is DAPO's, with one update, no reference, bf16,
nothing recomputed, and --micro answers at a time in the update. tmoe keeps fp32 master weights; TRL's model
is bf16 throughout, its fastest setting. "generated" is the tokens of answers divided by the rollout's time,
"trained" the same by the update's time, "whole" by the step's. Expected: at least 5 times TRL's best speed.
vLLM, in process or as a server, is not compared. --gpus 2 times only tmoe, on two GPUs.

--memory: the whole moe-pilot-14b with frozen experts, --prompts 1 unless given, 512 tokens an answer. The
pool of keys and values is bounded by --pool-gib. Each micro-batch is one row of --micro answers, and there
are at least
three: with two, the first one's gradients still wait in bf16 at the peak. Printed are the largest allocations
    in
GiB: of an update, of a rollout, of the pool, and of the step without the pool, which is the larger of the
update and the rollout without its pool; then the same from the dry run. Expected: the update, and the step
without the pool, differ by at most 0.3 GiB between groups; all are at most 76 GiB.

Words after -- are passed to train.py.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine import peak_gib
from benchmarks.moe_layer import require_gpu
from benchmarks.sft import EPISODE, Job, about, steps_of
from benchmarks.train import launch, running
from benchmarks.trl_rivals import run_rival, words, write_model, write_rows, write_tokenizer
from tmoe.cli.parse import parse
from tmoe.config.axes import Axes
from tmoe.plan.memory import memory_per_rank, peak_bytes

GIB = 2**30
MADE = "tmoe", "TRL, generate", "TRL, generate as it comes", "TRL, continuous batching"  # prose: as it comes
REWARD = '''"""A reward by which answers differ."""


def of_text(text):
    return text.count("1") / max(len(text), 1)


def worth(sample):
    return of_text(sample.answer)
'''


# ---- speed ----


def grpo_words(args: argparse.Namespace, folder: Path, group: int) -> list[str]:
    """train.py's words after the model's: prompts and answers of equal lengths that fill rows completely."""
    in_row = min(args.in_row, args.prompts * group)
    sizes = dict(prompts=args.prompts, group=group, rollout_slots=args.slots)
    sizes["max-tokens"] = args.max_tokens
    argv = ["--task", "grpo", *(word for name, n in sizes.items() for word in (f"--grpo.{name}", str(n)))]
    argv += ["--grpo.rewards", f"{folder}/reward.py:worth", "--data.path", f"{folder}/prompts.jsonl"]
    argv += ["--train.seq", str(in_row * (args.prompt + args.max_tokens))]
    return argv + ["--train.batch", str(max(1, args.micro // in_row)), *EPISODE.split()]


def write_prompts(args: argparse.Namespace, folder: Path, vocab: int) -> Path:
    rng = np.random.default_rng(0)
    (folder / "reward.py").write_text(REWARD)
    prompts = [dict(prompt=words(rng, args.prompt, vocab)[1:]) for _ in range(256)]
    return write_rows(folder / "prompts.jsonl", prompts)


def tmoe_step(lines: list[dict[str, Any]], answers: int) -> dict[str, Any]:
    """Figures of train.py's steps: medians, with the times of a step's parts in seconds."""

    def middle(value_of: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(map(value_of, lines))

    return dict(
        step_s=middle(lambda line: line["step_s"]),
        steps_s=[line["step_s"] for line in lines],
        rollout_s=middle(lambda line: answers * line["answers/tokens"] / line["answers/tokens_per_s"]),
        rewards_s=middle(lambda line: line["time/rewards"] * line["step_s"]),
        update_s=middle(lambda line: line["time/update"] * line["step_s"]),
        length=middle(lambda line: line["answers/tokens"]),
        truncated=middle(lambda line: line["answers/truncated"]),
        peak_gib=max(line["peak_gib"] for line in lines),
    )


def with_rates(r: dict[str, Any], answers: int, prompt: int) -> dict[str, Any]:
    """The same figures, with tokens of answers per second; for the update also with their prompts' tokens."""
    tokens = answers * r["length"]
    rates = dict(
        generated=tokens / r["rollout_s"], trained=tokens / r["update_s"], whole=tokens / r["step_s"]
    )
    return r | rates | dict(trained_with_prompts=(tokens + answers * prompt) / r["update_s"])


def speed(job: Job) -> list[str]:
    args = job.args
    group = args.group[0]
    answers = args.prompts * group
    model = job.words("qwen3-30b-a3b", args.layers)
    cfg = parse(model, "", world=1).model
    folder = job.folder / "model"
    write_model(folder, cfg, args.device)
    rows = write_prompts(args, job.folder, cfg.vocab)
    results: dict[str, dict[str, Any]] = {}
    for name in MADE:
        if name not in args.only or (args.gpus > 1 and name != "tmoe"):
            continue
        if name == "tmoe":
            more = [*grpo_words(args, job.folder, group), "--init", str(folder)]
            launch(args.gpus, args.steps, [*model, *more, *args.train], job.folder / "grpo", args.timeout)
            lines = steps_of(job.folder / "grpo", args.warmup)
            r = tmoe_step(lines[:-1] or lines, answers)  # the last step validates
        else:
            asked = dict(model=str(folder), rows=str(rows), reward=str(job.folder / "reward.py"))
            asked |= dict(steps=args.rival_steps, warmup=1, batch=answers, micro=args.micro, group=group)
            asked |= dict(max_tokens=args.max_tokens, continuous="continuous" in name, switch="comes" in name)
            r = run_rival("grpo", asked, args.rival_timeout)
        results[name] = r if "missing" in r else with_rates(r, answers, args.prompt)
        job.keep("grpo run", dict(contestant=name) | results[name])
    rival_s = [r["step_s"] for name, r in results.items() if name != "tmoe" and "step_s" in r]
    tmoe_s = results.get("tmoe", {}).get("step_s")
    times = min(rival_s) / tmoe_s if rival_s and tmoe_s else None
    job.keep(
        "grpo",
        dict(results=results, answers=answers, prompt=args.prompt, times=times, expected=5, gpus=args.gpus),
    )
    return speed_table(args, model, results, tmoe_s)


def speed_table(
    args: argparse.Namespace, model: list[str], found: dict[str, dict[str, Any]], own: float | None
) -> list[str]:
    workload = (
        f"{args.prompts} prompts of {args.prompt} tokens, {args.group[0]} answers each of {args.max_tokens}"
    )
    lines = ["", f"GRPO, {' '.join(model)}, GPUs: {args.gpus}; {workload}", ""]
    head = "contestant | s a step | rollout | rewards | update | tokens/s generated | trained | whole"
    lines += [f"| {head} | tokens | GiB | tmoe is so often as fast, expected 5 |"]
    lines += ["| --- |" + " --- |" * 10]
    for name, r in found.items():
        if "missing" in r:
            lines.append(f"| {name} | {r['missing']} |" + " |" * 9)
            continue
        shares = " | ".join(
            f"{r[f'{part}_s'] / r['step_s']:.1%}" for part in ("rollout", "rewards", "update")
        )
        rates = " | ".join(f"{r[rate]:,.0f}" for rate in ("generated", "trained", "whole"))
        times = f"{r['step_s'] / own:.2f}" if own else ""
        beside = f"{r['length']:.1f} | {r['peak_gib']:.1f} | {times}"
        lines.append(f"| {name} | {r['step_s']:.2f} | {shares} | {rates} | {beside} |")
    return lines


# ---- memory ----


def watch(out: Path, argv: list[str]) -> None:
    """Trains by train.py in this process, and records the peak allocations of rollouts and updates."""
    import train
    from tmoe.generate.cache import PAGE, Cache, bytes_a_token
    from tmoe.post.grpo import Grpo

    peaks: dict[str, list[float]] = dict(rollout=[], update=[], pool=[])
    rollout, after, cache = Grpo.rollout, train.Trainer.after, Cache.__init__

    def note(name: str) -> None:
        peaks[name].append(peak_gib())
        out.write_text(json.dumps(peaks))
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def measured_rollout(*args: Any) -> Any:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        peaks["pool"].append(0.0)
        answers = rollout(*args)
        note("rollout")
        return answers

    def measured_after(*args: Any) -> None:
        note("update")
        after(*args)

    def measured_cache(self: Cache, cfg: Any, pages: int, device: torch.device, dtype: torch.dtype) -> None:
        if peaks["pool"]:
            peaks["pool"][-1] = max(peaks["pool"][-1], pages * PAGE * bytes_a_token(cfg, dtype) / GIB)
        cache(self, cfg, pages, device, dtype)

    Grpo.rollout = measured_rollout  # pyrefly: ignore
    train.Trainer.after = measured_after  # pyrefly: ignore
    Cache.__init__ = measured_cache  # pyrefly: ignore
    train.main(argv)


def predicted(argv: list[str]) -> dict[str, float]:
    """The dry run's GiB for update, rollout and pool."""
    cfg = parse(argv, "", world=1)
    parts = memory_per_rank(cfg, Axes.of(cfg.parallel, 1))
    update = peak_bytes(parts | dict(rollout=0, pool=0))
    of_update = dict.fromkeys(("gathered", "working", "activations", "accumulated", "gradients"), 0)
    rollout = peak_bytes(parts | of_update)
    return dict(update=update / GIB, rollout=rollout / GIB, pool=parts["pool"] / GIB)


def beside_pool(m: dict[str, float]) -> float:
    return max(m["update"], m["rollout"] - m["pool"])


def watched(argv: list[str], out: Path, timeout: float) -> dict[str, Any]:
    """The peaks that `watch` recorded in a separate process until it ended, and its exit."""
    command = [sys.executable, "-m", "benchmarks.grpo_step", "--watch", str(out), "--", *argv]
    with running(command, dict(os.environ)) as process:
        try:
            ended = f"ended with code {process.wait(timeout)}"
        except subprocess.TimeoutExpired:
            ended = f"not done within {timeout:.0f} s"
    peaks = json.loads(out.read_text()) if out.exists() else {}
    if not peaks.get("update"):
        return dict(peaks=peaks, missing=f"no update: {ended}")
    return dict(peaks=peaks, ended=ended, measured={name: max(each) for name, each in peaks.items()})


def memory(job: Job) -> list[str]:
    args = job.args
    model = ["moe-pilot-14b", *(job.words("", 2)[1:] if args.tiny else [])]
    tokenizer = job.folder / "words"
    vocab = parse(model, "", world=1).model.vocab
    write_tokenizer(tokenizer, vocab)
    write_prompts(args, job.folder, vocab)
    more = ["--optim.freeze", "experts", "--data.tokenizer", str(tokenizer), "--steps", "2"]
    more += ["--grpo.pool-gib", str(args.pool_gib), "--checkpoint.mode", "off", "--resume", "none"]
    more += args.train
    results: dict[int, dict[str, Any]] = {}
    for group in args.group:
        argv = [*model, *grpo_words(args, job.folder, group), *more]
        argv += ["--out", str(job.folder / f"memory-{group}")]
        r = watched(argv, job.folder / f"peaks-{group}.json", args.timeout)
        results[group] = r | dict(predicted=predicted(argv))
        job.keep("grpo memory", dict(group=group, words=argv) | results[group])
    return memory_table(args, results)


def memory_table(args: argparse.Namespace, found: dict[int, dict[str, Any]]) -> list[str]:
    lines = [
        "",
        f"memory, frozen experts, {args.prompts} prompts, GiB at most, each followed by the dry run's",
        "",
    ]
    lines += ["| group | update | rollout | pool | step without the pool |", "| --- |" + " --- |" * 4]
    for group, r in found.items():
        if "missing" in r:
            lines.append(f"| {group} | {r['missing']} |" + " |" * 3)
            continue
        cells = [
            f"{peak_of(r['measured']):.2f}, {peak_of(r['predicted']):.2f}"
            for peak_of in (*(itemgetter(name) for name in ("update", "rollout", "pool")), beside_pool)
        ]
        lines.append(f"| {group} | {' | '.join(cells)} |")
    measured = [r["measured"] for r in found.values() if "measured" in r]
    for name, peak_of in (("update", itemgetter("update")), ("step without the pool", beside_pool)):
        each = list(map(peak_of, measured))
        if len(each) > 1:
            lines.append(f"{name}: {max(each) - min(each):.2f} GiB between groups, expected at most 0.3")
    return lines


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--memory", action="store_true", help="memory instead of speed")
    p.add_argument("--only", nargs="+", default=list(MADE), choices=MADE)
    p.add_argument("--gpus", type=int, default=1)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--prompts", type=int, help="prompts of a step; default 8, with --memory 1")
    p.add_argument("--prompt", type=int, help="tokens of a prompt; default 64, with --memory 128")
    p.add_argument(
        "--group", nargs="+", type=int, help="answers to a prompt; default 32, with --memory 8 64 256"
    )
    p.add_argument("--max-tokens", type=int, help="tokens of an answer; default 256, with --memory 512")
    p.add_argument("--slots", type=int, default=256)
    p.add_argument(
        "--micro", type=int, help="answers of one forward of the update; default 16, with --memory 2"
    )
    p.add_argument("--pool-gib", type=float, default=12.0, help="with --memory: most GiB of the pool")
    p.add_argument("--steps", type=int, default=7)
    p.add_argument("--warmup", type=int, default=2, help="steps of train.py that are not timed")
    p.add_argument("--rival-steps", type=int, default=3, help="steps of TRL; the first is not timed")
    p.add_argument(
        "--timeout", type=float, default=200, help="seconds after which a run of train.py is given up"
    )
    p.add_argument("--rival-timeout", type=float, default=100)
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--tiny", action="store_true", help="a model of a few thousand weights")
    p.add_argument("--json", type=Path, help="append each result to this file, one JSON object a line")
    p.add_argument("--watch", type=Path, help=argparse.SUPPRESS)  # for the process that --memory starts
    p.add_argument("train", nargs=argparse.REMAINDER, help="-- words for train.py")
    args = p.parse_args()
    args.train = [w for w in args.train if w != "--"]
    if args.watch:
        return watch(args.watch, args.train)
    if args.device == "cuda":
        require_gpu(p)
    usual = dict(prompts=1, prompt=128, group=[8, 64, 256], max_tokens=512, micro=2)
    usual = usual if args.memory else dict(prompts=8, prompt=64, group=[32], max_tokens=256, micro=16)
    vars(args).update({name: value for name, value in usual.items() if getattr(args, name) is None})
    args.in_row = args.micro if args.memory else 8  # answers
    with tempfile.TemporaryDirectory() as made:
        job = Job(args, Path(made), about("grpo_step"))
        print(job.about, flush=True)
        print(*(memory if args.memory else speed)(job), sep="\n")


if __name__ == "__main__":
    main()
