"""A process of an evaluation: scores its share of texts, and answers its share of prompts.

next: eval/forward.py, eval/store.py
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmoe.config.check import ConfigError, require
from tmoe.eval.forward import batch_of, hidden, length_of, target_logprobs
from tmoe.eval.store import Store
from tmoe.eval.tree import Row, rows
from tmoe.generate.engine import Engine, Piece
from tmoe.generate.forward import all_turns, idle
from tmoe.generate.gathered_model import AT_ONCE, ON_CPU, gathered
from tmoe.generate.sampler import Sampling

EVERY_S = 10.0  # seconds between two lines about the progress


class Scored(NamedTuple):
    """A text to score."""

    key: str
    ids: list[int]
    """inputs of the model, at most as many as it has positions"""
    targets: list[int]
    """the tokens after the last inputs; the last target follows the last input"""


class Asked(NamedTuple):
    """A prompt to answer."""

    key: str
    ids: list[int]
    number: int


class Worker:
    """The model of this process.

    engine: of the model; it may be laid out over ranks. store: keeps what is done. say: prints a line about
    the progress.
    """

    def __init__(self, engine: Engine, store: Store, say: Callable[[str], Any]) -> None:
        self.engine, self.store, self.say = engine, store, say

    @torch.no_grad()
    def score(self, texts: Sequence[Scored]) -> dict[str, tuple[float, bool]]:
        """The sum of the targets' log-probs of each text, in nats, and whether all are the most probable.

        If experts are spread over ranks, all ranks of their group must call it at the same time. ValueError
        for logits that are not finite, after all rows, because other ranks need this one's experts.
        """
        model = self.engine.model
        device = model.head_weight.device
        found: dict[str, tuple[float, bool]] = {}
        longest = max((len(text.ids) for text in texts), default=1)
        most = length_of(max(AT_ONCE if device.type == "cuda" else ON_CPU, longest), device)
        pending: deque[tuple[Row, Tensor, Tensor]] = deque()
        clock = Clock(len(texts), "texts", self.say)
        with on_device(device), gathered(model, most) as ranks:
            share = not model.cfg.linear_layers
            packed = rows([text.ids for text in texts], max(ranks.at_once, longest), share)
            turns = all_turns(model.cfg, longest, device)
            for row in packed:
                batch = batch_of(row, device)
                h_SD = hidden(model, batch, turns, ranks.rows(batch.ids_1S.numel()))
                places, targets = [], []
                for member, path in zip(row.members, row.places, strict=True):
                    places += path[len(path) - len(texts[member].targets) :]
                    targets += texts[member].targets
                wanted = torch.tensor([places, targets]).to(device)
                pending.append((row, *target_logprobs(h_SD, model.head_weight, *wanted)))
                if len(pending) > 1:  # the host reads a row while the device computes the next one
                    self.land(*pending.popleft(), texts, found)
                    clock.tell(len(found))
            while (rows_of_others := ranks.join(-1)) >= 0:
                idle(model, rows_of_others if ranks.pads else 0)
        for one in pending:
            self.land(*one, texts, found)
        for text in texts:
            total, _ = found[text.key]
            wrong = f"log-prob {total}: the model's logits are not finite"
            require(math.isfinite(total), f"a text of {len(text.ids)} tokens: {wrong}")
        return found

    def land(
        self, row: Row, logp_P: Tensor, best_P: Tensor, texts: Sequence[Scored], found: dict[str, Any]
    ) -> None:
        """Reads the results of a row and keeps them."""
        logp_P, best_P = logp_P.double().cpu(), best_P.cpu()
        first = 0
        for member in row.members:
            text = texts[member]
            own = slice(first, first := first + len(text.targets))
            total = logp_P[own].sum().item()
            found[text.key] = total, bool(best_P[own].all())
            if math.isfinite(total):
                self.store.add(text.key, found[text.key])

    def answer(self, prompts: Sequence[Asked], n: int, sampling: Sampling) -> dict[str, list[Any]]:
        """n answers to each prompt: [ids, finish, text] of each.

        If the model is laid out, all ranks must call it at the same time.
        """
        found: dict[str, list[Any]] = {}
        parts: dict[int, dict[int, Any]] = {}
        clock = Clock(len(prompts), "prompts", self.say)
        ids, numbers = [prompt.ids for prompt in prompts], [prompt.number for prompt in prompts]
        try:
            for piece in self.engine.stream(ids, n, sampling, numbers=numbers):
                if piece.done is None:
                    continue
                answers = parts.setdefault(piece.prompt, {})
                answers[piece.sample] = plain(piece)
                if len(answers) == n:
                    key = prompts[piece.prompt].key
                    found[key] = [answers[i] for i in range(n)]
                    self.store.add(key, found[key])
                    del parts[piece.prompt]
                    clock.tell(len(found))
        except ConfigError as error:  # it has the prompt's place in this rank's share
            text = re.sub(r"prompts\[(\d+)\]", lambda at: f"prompt {numbers[int(at[1])] + 1}", error.text)
            raise ConfigError(text) from None
        return found


def plain(piece: Piece) -> list[Any]:
    """An answer as values of JSON; a text's lone surrogates, of bytes that are not UTF-8, are replaced."""
    assert piece.done is not None
    text = (piece.done.text or "").encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return [piece.done.ids.tolist(), piece.done.finish, text]


def on_device(device: torch.device) -> Any:
    """A context that makes a GPU the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Clock:
    """Prints a line about the progress every EVERY_S seconds."""

    def __init__(self, total: int, what: str, say: Callable[[str], Any]) -> None:
        self.total, self.what, self.say = total, what, say
        self.start = self.told = time.monotonic()

    def tell(self, done: int) -> None:
        now = time.monotonic()
        if now - self.told >= EVERY_S:
            self.told = now
            left = (self.total - done) * (now - self.start) / max(done, 1)
            self.say(f"{done:,} of {self.total:,} {self.what}, {left:,.0f} s left")
