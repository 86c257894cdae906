"""Times the scoring of texts by `tmoe eval`, in tokens/s, against lm_eval's model `hf`.

    python -m benchmarks.eval olmoe-1b-7b --json benchmarks/results/eval/h100.jsonl
    python -m benchmarks.eval olmoe-1b-7b --layers 4 --batches 8 32
    python -m benchmarks.eval olmoe-1b-7b --device cpu --tiny     # does it run?

The model has random weights in its real widths, written as a Hugging Face folder that both load. Both get the
same ids, so tokenizers are not timed. Four sets of questions, with four answers each:

    mixed     questions of 20 to 1,500 tokens (log-normal, median 120), answers of 1 to 30 tokens
    letters   the same questions, answers of one token; `hf` too computes such a question once
    examples  questions of 30 to 120 tokens after the same 600 tokens of examples
    texts     whole texts of 20 to 2,000 tokens, one answer

`hf` runs with each of --batches ("auto" is one), and its best time counts. Tokens are those of all contexts
and answers, however few of them a contestant computes. First the sums of 64 pairs are compared: in bf16 the
median difference must be below 1% of the sum. Without lm_eval, `hf` is named as missing.

Expected: mixed at least 2.5 times `hf` (of four contexts one is computed, and no padding), letters 1.3,
examples 4, texts 1.2.
"""

import argparse
import importlib.util
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import tokenizers
import transformers

from benchmarks.engine import both, free, now, tiny
from benchmarks.moe_layer import in_turn, require_gpu
from benchmarks.train import write_line
from tmoe.base.versions import versions
from tmoe.config.presets import presets
from tmoe.eval.store import Store
from tmoe.eval.worker import Scored, Worker
from tmoe.generate.engine import Engine

Pair = tuple[list[int], list[int]]
SETS = "mixed", "letters", "examples", "texts"
COMPARED = 64  # pairs


def pairs_of(name: str, questions: int, vocab: int, longest: int) -> list[Pair]:
    """Contexts and answers of a set, made from a fixed seed; `longest`: the model's positions."""
    draw = random.Random(name)

    def ids(count: float) -> list[int]:
        return [draw.randrange(vocab) for _ in range(max(1, min(int(count), longest // 2)))]

    shared = ids(600)
    found: list[Pair] = []
    for _ in range(questions):
        if name == "texts":
            found.append((ids(1), ids(draw.lognormvariate(5.5, 1) + 20)))
            continue
        if name == "examples":
            question = [*shared, *ids(draw.uniform(30, 120))][-longest // 2 :]
        else:
            question = ids(min(draw.lognormvariate(4.8, 0.9) + 20, 1500))
        found += [(question, ids(1 if name == "letters" else draw.uniform(1, 30))) for _ in range(4)]
    return found


def ours(model: Any) -> Callable[[Sequence[Pair]], list[float]]:
    worker = Worker(Engine(model), Store(None, {}), lambda text: None)

    def score(pairs: Sequence[Pair]) -> list[float]:
        texts = [Scored(str(i), [*a, *b][:-1], b) for i, (a, b) in enumerate(pairs)]
        found = worker.score(texts)
        return [found[text.key][0] for text in texts]

    return score


def hf(model: Any, batch: str) -> Callable[[Sequence[Pair]], list[float]]:
    """lm_eval's own model over loaded weights. Its tokenizer is not used."""
    from lm_eval.models.huggingface import HFLM

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    plain = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a", pad_token="a")
    lm = HFLM(model, tokenizer=plain, batch_size=batch)

    def score(pairs: Sequence[Pair]) -> list[float]:
        requests = [((str(i), ""), a, b) for i, (a, b) in enumerate(pairs)]
        return [one for one, _ in lm._loglikelihood_tokens(requests, disable_tqdm=True)]

    return score


def measure(args: argparse.Namespace, name: str, contestants: dict[str, Callable]) -> dict[str, float]:
    """Median seconds of each contestant, in rounds over all of them."""
    pairs = pairs_of(name, args.questions, args.vocab, args.longest)
    first = pairs[:COMPARED]
    want = next(iter(contestants.values()))(first)
    times: dict[str, list[float]] = {label: [] for label in contestants}
    for label, score in contestants.items():
        parts = [abs(a - b) / abs(b) for a, b in zip(score(first), want, strict=True)]
        assert statistics.median(parts) < 0.01, f"{name}: the sums of {label} differ by {parts[:5]}"
    for i in range(args.rounds):
        for label, score in in_turn(i, list(contestants), list(contestants.values())):
            start = now()
            score(pairs)
            times[label].append(now() - start)
    tokens = sum(len(a) + len(b) for a, b in pairs)
    seconds = {label: statistics.median(some) for label, some in times.items()}
    best = min((s for label, s in seconds.items() if label != "tmoe"), default=None)
    ratio = f", {best / seconds['tmoe']:.2f} times the best of hf" if best else ""
    for label, value in seconds.items():
        print(f"| {name} | {label} | {value:.2f} | {tokens / value:,.0f} |")
    print(f"  {name}: {len(pairs)} answers, {tokens:,} tokens{ratio}", flush=True)
    return {label: tokens / value for label, value in seconds.items()}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("preset", nargs="?", default="olmoe-1b-7b", choices=sorted(presets()))
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--batches", nargs="+", default=["8", "32", "64"], help="batch sizes of hf")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand weights")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(words)
    if args.device == "cuda":
        require_gpu(parser)
    cfg = presets()[args.preset].model
    cfg = replace(tiny(cfg) if args.tiny else cfg, layers=args.layers or (2 if args.tiny else cfg.layers))
    args.vocab, args.longest = cfg.vocab, cfg.rope.max_seq
    with tempfile.TemporaryDirectory() as folder:
        model, theirs = both(cfg, args.device, Path(folder))
    contestants = {"tmoe": ours(model)}
    if importlib.util.find_spec("lm_eval") is None:
        print("hf: missing, lm_eval is not installed")
    else:
        contestants |= {f"hf, batch {batch}": hf(theirs, batch) for batch in args.batches}
    print("| questions | model | seconds | tokens/s |\n| --- | --- | --- | --- |")
    found = {name: measure(args, name, contestants) for name in args.sets}
    free()
    if args.json:
        told = dict(command=f"benchmarks.eval {args.preset}", layers=cfg.layers, questions=args.questions)
        told |= dict(date=str(date.today()), versions=versions(), tokens_per_s=found)
        write_line(args.json, told)


if __name__ == "__main__":
    main()
