"""Slots that answers are made in: filled from a queue, stepped together, emptied as answers end.

An answer begins with its prompt's last token, as any other step does: so the answers of a group share one
prefill of the tokens before it, and the first token needs no code of its own. A slot keeps its prompt's part
of the cache until another prompt takes the slot; the answers of a group that come later copy it from there.

The host launches a step, then reads what the step before it gave (on a CPU the step itself). It knows lengths
without reading, so only an answer that stops by itself is stepped once too often; that step's result is
dropped.

next: generate/forward.py, generate/sampler.py
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tmoe.generate.cache import Cache
from tmoe.generate.forward import Turns, decode, idle, prefill
from tmoe.generate.sampler import Sampling, draw
from tmoe.generate.text import Text
from tmoe.generate.whole import Ranks
from tmoe.model.rope import rope_table
from tmoe.model.transformer import Transformer

AT_ONCE = 8192  # tokens of prompts, padding included, in one prefill


@dataclass(eq=False)
class Request:
    """One answer to make, and what there is of it."""

    prompt: int  # its place among the prompts of the call
    sample: int  # its number among the answers to it
    first: int  # position of the prompt's last token
    most: int  # tokens that it may have
    uniform: Tensor
    text: Text | None
    launched: int = 0  # steps that the host has started for it
    finish: str = ""  # 'stop' or 'length' once it is over
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampler_logprobs: list[float] = field(default_factory=list)
    routes: list[Tensor] = field(default_factory=list)

    @property
    def leaves(self) -> bool:
        """Whether no further step is to be started for it."""
        return bool(self.finish) or self.launched == self.most


class Flight(NamedTuple):
    """A step's results on their way to the host."""

    requests: list[Request]  # of the rows
    numbers_4B: Tensor  # token, both log-probabilities, whether the token ends the answer
    routes_YBK: Tensor | None
    copied: torch.cuda.Event | None


class Room(NamedTuple):
    """What a call takes for its slots."""

    slots: int
    capacity: int  # tokens a slot


class Slots:
    """The state of a call of Engine; `run` is its loop. Its memory goes with it."""

    def __init__(
        self,
        model: Transformer,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        ends: set[int],
        room: Room,
        known: int,
        routes: bool,
        ranks: Ranks,
    ):
        """ends: ids that end an answer. known: ids from here on have no text, and never come."""
        self.model, self.prompts, self.sampling, self.ranks = model, prompts, sampling, ranks
        cfg, weight = model.cfg, model.head_weight
        device = weight.device
        self.lag = 1 if device.type == "cuda" else 0  # steps that the host is behind
        self.cache = Cache(cfg, *room, device, weight.dtype)
        self.turns = Turns(*rope_table(cfg.rope, cfg.rotary_dim, room.capacity, device))
        self.rows: list[Request] = []  # those of the first slots
        self.holds: list[int | None] = [None] * room.slots  # whose prompt a slot's cache begins with
        # a slot's next token and its position, how many tokens its answer has, and the answer's uniforms
        self.token_B, self.at_B, self.made_B = torch.zeros(3, room.slots, dtype=torch.int64, device=device)
        most = min(sampling.max_tokens, room.capacity)
        self.uniform_BN = torch.zeros(room.slots, most, dtype=torch.float64, device=device)
        self.ends_I = torch.tensor(sorted(ends), dtype=torch.int64, device=device)
        self.unknown_V = torch.arange(cfg.vocab, device=device) >= known if known < cfg.vocab else None
        self.ending_V = torch.isin(torch.arange(cfg.vocab, device=device), self.ends_I)
        self.routes = routes

    def run(self, queue: deque[Request]) -> Iterator[list[Request]]:
        """Makes all answers of the queue, which lists those of a prompt one after the other.

        Yields the requests of each step once its results are in them.
        """
        flights: deque[Flight] = deque()
        while True:
            self.refill(queue)
            if self.rows:
                flights.append(self.step())
            if flights and (len(flights) > self.lag or not self.rows):
                yield self.land(flights.popleft())
            if not (self.rows or flights or queue):
                break
        while (rows := self.ranks.join(-1)) >= 0:
            idle(self.model, rows if self.ranks.pads else 0)

    # ---- slots ----

    def refill(self, queue: deque[Request]) -> None:
        """Gives the slots of answers that are over to the queue; else closes the gaps."""
        fresh: dict[int, int] = {}  # prompts to be prefilled, and their slots
        later: list[tuple[int, int]] = []  # slots to copy, once that is done
        for slot in range(len(self.holds)):
            if slot < len(self.rows) and not self.rows[slot].leaves:
                continue
            if not queue:
                break
            request = queue.popleft()
            prompt = request.prompt
            if prompt in fresh:
                later.append((fresh[prompt], slot))
            elif prompt not in self.holds:
                fresh[prompt] = slot
            elif self.holds[slot] != prompt:
                self.cache.copy(self.holds.index(prompt), slot, request.first)
            self.holds[slot] = prompt
            self.seat(slot, request)
        self.prefill(fresh)
        for source, target in later:
            self.cache.copy(source, target, len(self.prompts[self.rows[source].prompt]) - 1)
        self.close_gaps()

    def seat(self, slot: int, request: Request) -> None:
        """Makes a slot ready for the first step of an answer, but for its prompt's cache."""
        if slot == len(self.rows):
            self.rows.append(request)
        self.rows[slot] = request
        self.token_B[slot] = self.prompts[request.prompt][-1]
        self.at_B[slot] = request.first
        self.made_B[slot] = 0
        self.uniform_BN[slot, : request.most].copy_(request.uniform, non_blocking=True)

    def prefill(self, fresh: dict[int, int]) -> None:
        """Caches these prompts without their last tokens, several at once, padded behind their ends."""
        waiting = sorted(((len(self.prompts[p]) - 1, p, slot) for p, slot in fresh.items()), reverse=True)
        while waiting and (longest := waiting[0][0]):
            count = max(1, AT_ONCE // longest)
            some, waiting = waiting[:count], waiting[count:]
            some = [(n, p, slot) for n, p, slot in some if n]
            rows = [self.prompts[p][:n] + [0] * (longest - n) for n, p, _ in some]
            device = self.token_B.device
            lengths_B1 = torch.tensor([[n] for n, *_ in some], device=device)
            padding_BS = torch.arange(longest, device=device) >= lengths_B1
            slots_B = torch.tensor([slot for *_, slot in some], device=device)
            tokens_BS = torch.tensor(rows, dtype=torch.int64, device=device)
            prefill(self.model, self.cache, tokens_BS, padding_BS, slots_B, self.ranks)

    def close_gaps(self) -> None:
        """Moves last slots into those of answers that are over, so that steps run over no empty slot."""
        while any(request.leaves for request in self.rows):
            last = len(self.rows) - 1
            if not self.rows[last].leaves:
                gap = next(i for i, request in enumerate(self.rows) if request.leaves)
                moved = self.rows[gap] = self.rows[last]
                self.holds[gap] = self.holds[last]
                self.cache.copy(last, gap, moved.first + moved.launched)
                for state in (self.token_B, self.at_B, self.made_B, self.uniform_BN):
                    state[gap] = state[last]
            self.rows.pop()

    # ---- steps ----

    def step(self) -> Flight:
        """Starts a step of all rows: a token of each into the cache, the next one drawn."""
        B = len(self.rows)
        token_B, at_B, made_B = (t[:B] for t in (self.token_B, self.at_B, self.made_B))
        longest = 1 + max(request.first + request.launched for request in self.rows)
        logits_BV, chosen = decode(self.model, self.cache, token_B, at_B, longest, self.turns, self.ranks)
        uniform_B = self.uniform_BN[:B].gather(1, made_B[:, None])[:, 0]
        drawn = draw(logits_BV, uniform_B, self.sampling, self.barred(made_B))
        ended_B = torch.isin(drawn.tokens_B, self.ends_I)
        numbers_4B = torch.stack([t.double() for t in (*drawn, ended_B)])
        routes_YBK = torch.stack(chosen).to(torch.int16) if self.routes and chosen else None

        token_B.copy_(drawn.tokens_B)
        at_B += 1
        made_B += 1
        for request in self.rows:
            request.launched += 1
        return take_off(list(self.rows), numbers_4B, routes_YBK)

    def barred(self, made_B: Tensor) -> Tensor | None:
        """Tokens that may not come: those without a text, and before min_tokens those that end an answer."""
        if all(request.launched >= self.sampling.min_tokens for request in self.rows):
            return self.unknown_V
        early_BV = (made_B < self.sampling.min_tokens)[:, None] & self.ending_V
        return early_BV if self.unknown_V is None else early_BV | self.unknown_V

    def land(self, flight: Flight) -> list[Request]:
        """Writes a step's results into its requests; those that were over before are left out."""
        if flight.copied is not None:
            flight.copied.synchronize()
        routes_YBK = flight.routes_YBK
        open_requests = []
        for row, (request, numbers) in enumerate(
            zip(flight.requests, flight.numbers_4B.T.tolist(), strict=True)
        ):
            if request.finish:
                continue
            token, logprob, sampler_logprob, ended = numbers
            request.ids.append(int(token))
            request.logprobs.append(logprob)
            request.sampler_logprobs.append(sampler_logprob)
            if routes_YBK is not None:
                request.routes.append(routes_YBK[:, row])
            self.judge(request, bool(ended))
            open_requests.append(request)
        return open_requests

    def judge(self, request: Request, ended: bool) -> None:
        """Says whether an answer is over with its last token, and lets its text grow."""
        text, count = request.text, len(request.ids)
        may_stop = count >= self.sampling.min_tokens
        if text is not None and not ended:
            text.add(request.ids[-1:], may_stop)
        if ended or (text is not None and text.stopped):
            request.finish = "stop"
        elif count == request.most:
            request.finish = "length"
        if request.finish and text is not None:
            text.end(may_stop)
            request.finish = "stop" if text.stopped else request.finish


def take_off(requests: list[Request], numbers_4B: Tensor, routes_YBK: Tensor | None) -> Flight:
    """Begins the copy of a step's results to the host."""
    if not numbers_4B.is_cuda:
        return Flight(requests, numbers_4B, routes_YBK, None)
    numbers_4B = numbers_4B.to("cpu", non_blocking=True)
    routes_YBK = None if routes_YBK is None else routes_YBK.to("cpu", non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return Flight(requests, numbers_4B, routes_YBK, copied)
