"""Counts for /metrics, in the text form of Prometheus.

next: serve/front.py
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence

from tmoe.generate.live import State

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # seconds
HELP = dict(
    running=("gauge", "answers that have a slot"),
    waiting=("gauge", "answers without a slot"),
    pages=("gauge", "pages of the pool"),
    pages_in_use=("gauge", "pages of answers"),
    pages_kept=("gauge", "pages that later prompts may reuse"),
    steps=("counter", "steps of the engine"),
    tokens=("counter", "tokens of answers"),
    prompt_tokens=("counter", "tokens of prompts of requests that are over"),
    cached_tokens=("counter", "tokens of prompts that were reused"),
)


class Histogram:
    """Durations in seconds, counted by bounds."""

    def __init__(self, name: str, text: str):
        self.name, self.text = name, text
        self.counts, self.sum = [0] * (len(BOUNDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    def lines(self) -> list[str]:
        totals = list(itertools.accumulate(self.counts))
        bounds = [*map(str, BOUNDS), "+Inf"]
        rows = [f'{self.name}_bucket{{le="{b}"}} {n}' for b, n in zip(bounds, totals, strict=True)]
        head = [f"# HELP {self.name} {self.text}", f"# TYPE {self.name} histogram"]
        return [*head, *rows, f"{self.name}_sum {self.sum:.6f}", f"{self.name}_count {totals[-1]}"]


class Counters:
    """The counts of the front."""

    def __init__(self) -> None:
        self.first = Histogram("tmoe_first_token_seconds", "time from a request to its first token")
        self.gap = Histogram("tmoe_token_gap_seconds", "time between two tokens of an answer")
        self.statuses: dict[int, int] = {}

    def text(self, states: Sequence[State], requests: int, tasks: int) -> str:
        """The page of /metrics.

        states: of the ranks; their sums have the usual names, and each of several ranks has lines too.
        requests: those under way. tasks: of the front's event loop.
        """
        lines = []
        for name, (kind, text) in HELP.items():
            values = [getattr(state, name) for state in states]
            end = f"{name}{'_total' if kind == 'counter' else ''}"
            lines += [f"# HELP tmoe_{end} {text}", f"# TYPE tmoe_{end} {kind}", f"tmoe_{end} {sum(values)}"]
            if len(values) > 1:
                lines += [f"# HELP tmoe_rank_{end} {text}, by rank", f"# TYPE tmoe_rank_{end} {kind}"]
                lines += [f'tmoe_rank_{end}{{rank="{rank}"}} {value}' for rank, value in enumerate(values)]
        lines += ["# HELP tmoe_requests requests under way", "# TYPE tmoe_requests gauge"]
        lines += [f"tmoe_requests {requests}"]
        lines += ["# HELP tmoe_tasks tasks of the front's event loop", "# TYPE tmoe_tasks gauge"]
        lines += [f"tmoe_tasks {tasks}"]
        lines += ["# HELP tmoe_replies_total replies by status", "# TYPE tmoe_replies_total counter"]
        lines += [f'tmoe_replies_total{{status="{s}"}} {n}' for s, n in sorted(self.statuses.items())]
        return "\n".join([*lines, *self.first.lines(), *self.gap.lines(), ""])
