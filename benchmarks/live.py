"""Times tmoe.generate.Live: gaps between tokens while a long prompt arrives, and the turns of a conversation.

    python -m benchmarks.live gaps olmoe-1b-7b --budget 256 512 1024
    python -m benchmarks.live turns qwen3-30b-a3b --layers 12
    python -m benchmarks.live gaps olmoe-1b-7b --device cpu --tiny      # does it run?

gaps: 32 streams are answered, each with other settings, when a prompt of 8,192 tokens is submitted. The time
between two tokens of a stream is measured before, and from then until the prompt's first token. Expected: the
longest gap is at most 3 times the median gap before.

turns: the first token of a prompt of 4,000 tokens, then of a second prompt that begins with the first one and
its answer. Expected: the second takes at most 0.25 of the first. With an engine that keeps bits, the second
answer's log-probs are compared with those without reuse.

Weights and prompts are random. The engine is warmed up as `tmoe serve` does, and a first round has other
prompts.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import drawn, tiny
from benchmarks.moe_layer import require_gpu
from benchmarks.train import write_line
from tmoe.base.versions import versions
from tmoe.config.presets import presets
from tmoe.generate import Engine, Live, LivePiece, Sampling, Ticket
from tmoe.generate.warm_up import warm_up
from tmoe.model.transformer import Transformer

STREAMS = 32
# settings of the streams, in turn
MIXED = (
    Sampling(temperature=0.0),
    Sampling(),
    Sampling(temperature=0.6, top_k=20, top_p=0.95),
    Sampling(min_p=0.05),
)


class Clock:
    """The times of all pieces, taken in the engine's thread."""

    def __init__(self) -> None:
        self.times: dict[tuple[int, int], list[float]] = {}

    def __call__(self, pieces: list[LivePiece]) -> None:
        now = time.perf_counter()
        for piece in pieces:
            self.times.setdefault((piece.ticket.number, piece.sample), []).append(now)

    def first(self, ticket: Ticket) -> float:
        """The time of the first token of a request."""
        return min(times[0] for (number, _), times in self.times.items() if number == ticket.number)


def prompt_of(length: int, vocab: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(vocab) for _ in range(length)]


def gaps(model: Transformer, length: int, budget: int, tokens: int) -> dict[str, Any]:
    """Milliseconds between tokens of streams, after a prompt of `length` tokens was submitted."""
    clock = Clock()
    engine = Engine(model, eos=())
    vocab = model.cfg.vocab
    with Live(engine, slots=STREAMS + 1, max_len=length + 64, budget=budget, after=clock) as live:
        warm_up(live)
        for seed in (1, 2):  # the first round compiles what is left
            streams = [
                live.submit(prompt_of(64, vocab, i), replace(MIXED[i % 4], max_tokens=tokens, seed=i))
                for i in range(STREAMS)
            ]
            while len(clock.times.get((streams[-1].number, 0), ())) < min(20, tokens // 2):
                time.sleep(0.001)
            begin = time.perf_counter()
            long = live.submit(prompt_of(length, vocab, seed), Sampling(max_tokens=2))
            long.result()
            running = sum(not ticket.over.is_set() for ticket in streams)
            for ticket in streams:
                ticket.cancel()
                ticket.result()
        end = clock.first(long)
        pairs = [pair for ticket in streams for pair in pairwise(clock.times[ticket.number, 0])]
    alone = statistics.median(1e3 * (b - a) for a, b in pairs if b < begin)
    during = [1e3 * (b - a) for a, b in pairs if b > begin and a < end]
    return dict(
        budget=budget,
        median_before_ms=alone,
        median_ms=statistics.median(during),
        longest_ms=max(during),
        ratio=max(during) / alone,
        first_token_ms=1e3 * (end - begin),
        streams_left=running,
    )


def turns(model: Transformer, length: int) -> dict[str, Any]:
    """Milliseconds to the first token of two turns, and whether reuse changes bits."""
    vocab = model.cfg.vocab
    clock = Clock()
    how = Sampling(max_tokens=32, seed=1)
    with Live(Engine(model, eos=()), slots=4, max_len=length + 256, after=clock) as live:
        warm_up(live)
        for seed in (1, 2):
            prompt = prompt_of(length, vocab, seed)
            began = [time.perf_counter()]
            one = live.submit(prompt, how)
            answer = one.result()[0].ids.tolist()
            second = [*prompt, *answer, *prompt_of(64, vocab, seed + 9)]
            began.append(time.perf_counter())
            two = live.submit(second, how)
            cached = two.result()[0].cached
        first, again = (1e3 * (clock.first(t) - at) for t, at in zip((one, two), began, strict=True))
    answers = []
    engine = Engine(model, eos=(), bits=True)
    for reuse in (True, False):
        with Live(engine, slots=4, max_len=length + 256, reuse=reuse) as live:
            live.submit(prompt, how).result()
            answers.append(live.submit(second, how).result()[0])
    model.keep_bits(False)
    same = torch.equal(answers[0].logprobs, answers[1].logprobs)
    return dict(first_ms=first, second_ms=again, ratio=again / first, cached=cached, same_bits=same)


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("gaps", "turns"))
    p.add_argument("preset")
    p.add_argument("--layers", type=int, help="number of layers to keep")
    p.add_argument("--budget", type=int, nargs="+", default=[512])
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--tiny", action="store_true", help="a tiny model of the same kind, and short prompts")
    p.add_argument("--json", type=Path, help="append each result to this file, one JSON object a line")
    args = p.parse_args(argv)
    if args.device == "cuda":
        require_gpu(p)
    cfg = presets()[args.preset].model
    cfg = tiny(cfg) if args.tiny else cfg
    cfg = replace(cfg, layers=args.layers or cfg.layers)
    length = (400 if args.tiny else 8192) if args.what == "gaps" else (300 if args.tiny else 4000)
    need = length + 256
    if cfg.rope.max_seq < need:  # positions do not change the time
        cfg = replace(cfg, rope=replace(cfg.rope, max_seq=need))
    model = drawn(cfg, args.device)
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    about = dict(what=args.what, preset=args.preset, layers=cfg.layers, gpu=gpu, date=str(date.today()))
    tokens = 60 if args.tiny else 3000
    results = (
        [gaps(model, length, budget, tokens) for budget in args.budget]
        if args.what == "gaps"
        else [turns(model, length)]
    )
    for result in results:
        print(about | result, flush=True)
        if args.json:
            write_line(args.json, about | result | dict(versions=versions()))


if __name__ == "__main__":
    main()
