"""Short requests that compile an engine's kernels and capture its graphs, before the first user's request.

Without them the first prompt of each length waits seconds for a compiler, and so do all running answers.

next: generate/live.py
"""

from __future__ import annotations

import random
import time

from tmoe.generate.cache import PAGE
from tmoe.generate.graphs import SIZES
from tmoe.generate.live import Live
from tmoe.generate.prompt_chunks import LENGTHS
from tmoe.generate.prompt_graphs import LONGEST
from tmoe.generate.sampler import Sampling

TWICE = 2  # the first run of a shape compiles its kernels, the second captures its graph
FEW = Sampling(max_tokens=4)


def warm_up(live: Live) -> float:
    """Runs all shapes of steps and of prompts that are graphs. Returns the seconds that it took.

    Only an engine whose steps are graphs needs it. The engine must have had no request; its counts begin at 0
    afterwards.
    """
    assert live.room is not None
    if not live.room.graphs:
        return 0.0
    began, after, live.after = time.perf_counter(), live.after, None
    draw = random.Random(0)
    longest = min(live.max_len, (live.room.pages - 1) * PAGE) - FEW.max_tokens  # tokens of a prompt
    rows = [n for n in LENGTHS if n <= LONGEST]

    def prompt(tokens: int) -> list[int]:
        return [draw.randrange(live.engine.known) for _ in range(max(1, min(tokens, longest)))]

    def run(*prompts: list[int]) -> None:
        for ticket in [live.submit(ids, FEW) for ids in prompts]:
            ticket.result()

    for slots in sorted({min(size, live.slots) for size in SIZES}):
        run(*(prompt(3) for _ in range(slots)))
    for tokens in TWICE * LENGTHS:  # beginnings of prompts
        run(prompt(tokens))
    for keys in LENGTHS[2:]:  # later pieces of prompts whose beginnings are cached
        begun = prompt(max(rows[-1] // 2, keys - rows[-1]))
        run(begun + [0])
        for tokens in TWICE * rows:
            if len(begun) + tokens <= min(keys, longest):
                run(begun + prompt(tokens))
    live.zero_counts()
    live.after = after
    return time.perf_counter() - began
