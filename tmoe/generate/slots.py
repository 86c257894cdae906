"""The loop of a call: answers in slots that are stepped together and refilled as answers end.

The first step of an answer has the prompt's last token as its input. So the answers of a group share one
prefill of the tokens before it, and the first token needs no special code.

On a GPU the host launches a step, then reads the results of the previous step; on a CPU it reads the step's
own results. The host knows without reading when an answer reaches its length. So only an answer that stops
earlier gets one step too many, whose result is dropped.

next: generate/prompt_chunks.py, generate/forward.py, generate/sampler.py
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tmoe.config.check import require
from tmoe.config.routing_choices import SELECTIONS
from tmoe.generate.cache import PAGE, Cache
from tmoe.generate.forward import all_turns, decode, idle, prefill
from tmoe.generate.gathered_model import Ranks
from tmoe.generate.graphs import CudaGraphs, rounded
from tmoe.generate.pages import Pages, Span
from tmoe.generate.prompt_chunks import chunks
from tmoe.generate.sampler import Sampling
from tmoe.generate.text import Text
from tmoe.model.transformer import Transformer
from tmoe.ops.decode.sample import Keys, sample
from tmoe.ops.loss.logprob import logprobs


@dataclass(eq=False)
class Request:
    """An answer to be made, with the tokens that it has so far."""

    prompt: int  # index of its prompt in the call
    sample: int  # its number among the answers to the prompt
    first: int  # position of the prompt's last token
    most: int  # most tokens that it may have
    number: int  # number of the prompt, on which draws depend
    text: Text | None
    pages: list[int] = field(default_factory=list)  # its pages of the cache, once it has a slot
    launched: int = 0  # steps that the host has launched for it
    finish: str = ""  # 'stop' or 'length' once it is over
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampler_logprobs: list[float] = field(default_factory=list)
    routes: list[Tensor] = field(default_factory=list)

    @property
    def span(self) -> Span:
        """Its tokens in the cache; its last token is not cached."""
        return Span(self.prompt, self.first, self.first + self.most)

    @property
    def leaves(self) -> bool:
        """Whether it needs no further step."""
        return bool(self.finish) or self.launched == self.most


class Flight(NamedTuple):
    """A step's results while they are copied to the host."""

    requests: list[Request]  # the request of each row
    numbers_4B: Tensor  # token, both log-probabilities, whether the token ends the answer
    routes_YBK: Tensor | None
    copied: torch.cuda.Event | None


class Room(NamedTuple):
    """The sizes of a call: its slots and their memory."""

    slots: int
    pages: int
    capacity: int  # most tokens of a prompt and its answer
    graphs: bool = False  # steps are CUDA graphs


def rows_of(model: Transformer, slots: int, graphs: bool = True) -> int:
    """Number of rows of a step of `slots` slots. graphs: whether steps may be CUDA graphs."""
    return model.rounding.rows(rounded(slots) if graphs else slots, model.head_weight.device.type)


class Slots:
    """The state of a call of Engine; `run` is its loop. Its memory is freed with this object."""

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
        """Allocates the memory of a call.

        ends: ids that end an answer. known: number of ids that the tokenizer can decode; higher ids are never
        sampled.
        """
        self.model, self.prompts, self.sampling, self.ranks = model, prompts, sampling, ranks
        cfg, weight = model.cfg, model.head_weight
        device = weight.device
        self.lag = 1 if device.type == "cuda" else 0  # launched steps whose results the host has not read
        self.slots = room.slots
        self.graphs = CudaGraphs(device) if room.graphs else None
        # whether a token's experts depend on the other tokens of a step
        self.looks = SELECTIONS[cfg.moe.selection].looks == "always"
        self.cache = Cache(cfg, room.pages, device, weight.dtype)
        M = -(-room.capacity // PAGE)
        # whole pages, because tables are cached by their length
        self.turns = all_turns(cfg, min(M * PAGE, cfg.rope.max_seq), device)
        self.rows: list[Request] = []  # the requests of the first slots
        # state_6B: each slot's next token, its position, the number of its answer's tokens, 1 if it has an
        # answer, and the numbers of prompt and answer, on which draws depend. table_BM: its pages. A slot
        # without an answer has 0 everywhere.
        B = self.size(room.slots)
        self.state_6B = torch.zeros(6, B, dtype=torch.int64, device=device)
        self.table_BM = torch.zeros(B, M, dtype=torch.int32, device=device)
        self.unknown_V = self.never(known, device)
        # the tokens in the prompt and the answer of each slot, if there is a penalty on them
        repeats = sampling.repetition_penalty != 1
        self.seen_BV = torch.zeros(B, cfg.vocab, dtype=torch.bool, device=device) if repeats else None
        ends_I = torch.tensor(sorted(ends), dtype=torch.int64, device=device)
        self.ending_V = torch.isin(torch.arange(cfg.vocab, device=device), ends_I)
        self.routes = routes
        self.prompt_routes: dict[int, Tensor] = {}

    def never(self, known: int, device: torch.device) -> Tensor | None:
        """bool [V]: tokens that are never drawn, without a text or suppressed; None if there are none."""
        vocab = self.model.cfg.vocab
        if known >= vocab and not self.sampling.suppress:
            return None
        ids_V = torch.arange(vocab, device=device)
        left_I = torch.tensor(self.sampling.suppress, dtype=torch.int64, device=device)
        return (ids_V >= known) | torch.isin(ids_V, left_I)

    def run(self, queue: deque[Request]) -> Iterator[list[Request]]:
        """Makes all answers of the queue, in which the answers to a prompt follow each other.

        Yields the requests of each step after its results have been added to them.
        """
        self.pages = Pages(self.cache.pages, [request.span for request in queue])
        flights: deque[Flight] = deque()
        while True:
            self.refill(queue)
            if self.rows:
                flights.append(self.step())
            if flights and (len(flights) > self.lag or not self.rows):
                yield self.apply_results(flights.popleft())
            if not (self.rows or flights or queue):
                break
        while (rows := self.ranks.join(-1)) >= 0:
            idle(self.model, rows if self.ranks.pads else 0)

    # ---- slots ----

    def refill(self, queue: deque[Request]) -> None:
        """Gives free slots to the next requests of the queue, while pages are free; then closes the gaps."""
        gaps = deque(slot for slot, request in enumerate(self.rows) if request.leaves)
        for slot in gaps:
            self.pages.drop(self.rows[slot].pages)
        fresh: dict[int, list[int]] = {}  # prompts to be cached, and their pages
        copied: list[tuple[int, int]] = []
        seated: dict[int, Request] = {}
        while queue and (gaps or len(self.rows) < self.slots):
            seat = self.pages.admit(queue[0].span)
            if seat is None:
                break
            request = queue.popleft()
            request.pages = seat.pages
            if seat.fresh:
                fresh[request.prompt] = seat.fresh
            if seat.copied is not None:
                copied.append(seat.copied)
            slot = gaps.popleft() if gaps else len(self.rows)
            self.rows[slot : slot + 1] = [request]
            seated[slot] = request
        self.prefill(fresh)
        self.cache.copy(copied)
        self.seat(seated)
        if gaps:
            self.close(gaps)

    def prefill(self, fresh: dict[int, list[int]]) -> None:
        """Caches prompts without their last tokens, each in its pages; keeps their routes if asked for."""
        ids = {prompt: self.prompts[prompt][:-1] for prompt in fresh}
        last = self.routes or self.ranks.group is not None  # else the last block's experts are not needed
        chosen = []
        device = self.state_6B.device
        prompts = [(ids[prompt], fresh[prompt]) for prompt in fresh]
        blocks = self.model.rounding.in_blocks or device.type == "cuda"
        for chunk in chunks(prompts, self.ranks.at_once, device, blocks=blocks):
            rows = self.ranks.rows(chunk.tokens_1S.numel())
            with self.on_device():
                routes = prefill(self.model, self.cache, chunk, self.turns, rows, last)
            if self.routes and routes:
                chosen.append(torch.stack(routes, 0).to("cpu", torch.int16))
        if chosen:
            parts = torch.cat(chosen, 1).split([len(ids[prompt]) for prompt in fresh], 1)
            self.prompt_routes |= dict(zip(fresh, parts, strict=True))

    def seat(self, seated: dict[int, Request]) -> None:
        """Sets the state of slots for the first steps of their answers."""
        if not seated:
            return
        device = self.state_6B.device
        slots_I = torch.tensor(list(seated), device=device)
        requests = seated.values()
        states = [
            (self.prompts[request.prompt][-1], request.first, 0, 1, request.number, request.sample)
            for request in requests
        ]
        self.state_6B[:, slots_I] = torch.tensor(states, device=device).T
        tables = torch.zeros(len(seated), self.table_BM.shape[1], dtype=torch.int32)
        for row, request in enumerate(requests):
            tables[row, : len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)
        self.table_BM[slots_I] = tables.to(device)
        if self.seen_BV is not None:  # of the whole prompt, its last token included
            for slot, request in seated.items():
                self.seen_BV[slot] = False
                self.seen_BV[slot, torch.tensor(self.prompts[request.prompt], device=device)] = True

    def close(self, gaps: Sequence[int]) -> None:
        """Moves the last answers into gaps, so that steps have no empty slots between answers."""
        empty = set(gaps)
        B = len(self.rows) - len(gaps)
        targets = [slot for slot in gaps if slot < B]
        sources = [slot for slot in range(B, len(self.rows)) if slot not in empty]
        for source, target in zip(sources, targets, strict=True):
            self.rows[target] = self.rows[source]
        seen = [] if self.seen_BV is None else [self.seen_BV]
        for state in (self.state_6B.T, self.table_BM, *seen):
            if targets:
                state[targets] = state[sources]
            state[B : len(self.rows)] = 0
        del self.rows[B:]

    # ---- steps ----

    def step(self) -> Flight:
        """Launches a step of all rows: each row's token is cached, and its next token drawn."""
        B = len(self.rows)
        size = self.size(B)
        rows = self.ranks.rows(size)
        early = any(request.launched < self.sampling.min_tokens for request in self.rows)
        with self.on_device():
            if self.graphs is not None:
                M = self.table_BM.shape[1]
                run = partial(self.advance, size, M, early, 0)
                numbers_4B, routes_YBK = self.graphs.run((size, early), run)
            else:
                longest = 1 + max(request.first + request.launched for request in self.rows)
                numbers_4B, routes_YBK = self.advance(size, -(-longest // PAGE), early, rows)
            routes_YBK = None if routes_YBK is None else routes_YBK[:, :B]
            flight = start_copy(list(self.rows), numbers_4B[:, :B], routes_YBK)
        for request in self.rows:
            request.launched += 1
        return flight

    def on_device(self) -> AbstractContextManager:
        """A context that makes the model's GPU the current device."""
        device = self.state_6B.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def size(self, slots: int) -> int:
        """Number of rows of a step of `slots` slots; the rows after them have no answer."""
        return rows_of(self.model, slots, graphs=self.graphs is not None)

    def advance(self, B: int, M: int, early: bool, rows: int) -> tuple[Tensor, Tensor | None]:
        """A step of the first B slots on the device. Returns numbers_4B and routes_YBK of a Flight.

        M: most pages in which a slot has tokens, the new one included. early: whether any answer has fewer
        tokens than min_tokens. rows: as in feed_forward.
        """
        token_B, at_B, made_B, live_B, prompt_B, sample_B = self.state_6B[:, :B]
        padding_B = live_B == 0 if self.looks else None
        logits_BV, h_BD, chosen = decode(
            self.model, self.cache, token_B, at_B, self.table_BM[:B, :M], self.turns, rows, padding_B
        )
        keys = Keys(self.sampling.seed, prompt_B, sample_B, made_B)
        heat = self.sampling.temperature or 1.0
        seen_BV = None
        if self.seen_BV is not None:
            seen_BV = self.seen_BV[:B].scatter_(1, token_B[:, None], True)
        drawn = sample(
            self.penalised(logits_BV, seen_BV), keys, self.sampling, self.forbidden_tokens(made_B, early)
        )
        ids_B = drawn.tokens_B.long()
        if self.model.rounding.log_probs_of_loss:  # the sampler's sum has another order
            drawn = drawn._replace(logprobs_B=logprobs(h_BD, self.model.head_weight, ids_B, heat))
        elif seen_BV is not None:  # from logits without the penalty
            plain_BV = (logits_BV.float() / heat).log_softmax(-1)
            drawn = drawn._replace(logprobs_B=plain_BV.gather(1, ids_B[:, None])[:, 0])
        numbers_4B = torch.stack([t.double() for t in (*drawn, self.ending_V[drawn.tokens_B])])
        routes_YBK = torch.stack(chosen).to(torch.int16) if self.routes and chosen else None
        token_B.copy_(drawn.tokens_B)
        at_B += live_B
        made_B += live_B
        return numbers_4B, routes_YBK

    def penalised(self, logits_BV: Tensor, seen_BV: Tensor | None) -> Tensor:
        """The logits from which tokens are drawn; fp32 if repetition_penalty changes those of seen tokens."""
        if seen_BV is None:
            return logits_BV
        z_BV, penalty = logits_BV.float(), self.sampling.repetition_penalty
        return torch.where(seen_BV, torch.where(z_BV < 0, z_BV * penalty, z_BV / penalty), z_BV)

    def forbidden_tokens(self, made_B: Tensor, early: bool) -> Tensor | None:
        """Tokens that must not be drawn: those of `never`, and before min_tokens also end tokens."""
        if not early:
            return self.unknown_V
        early_BV = (made_B < self.sampling.min_tokens)[:, None] & self.ending_V
        return early_BV if self.unknown_V is None else early_BV | self.unknown_V

    def apply_results(self, flight: Flight) -> list[Request]:
        """Adds a step's results to its requests that are not over yet. Returns these requests."""
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
            where = f"prompts[{request.prompt}], answer {request.sample}, token {len(request.ids)}"
            require(math.isfinite(logprob), f"{where}: log-prob {logprob}: the model's logits are not finite")
            request.ids.append(int(token))
            request.logprobs.append(logprob)
            request.sampler_logprobs.append(sampler_logprob)
            if routes_YBK is not None:
                request.routes.append(routes_YBK[:, row])
            self.update_finish(request, bool(ended))
            open_requests.append(request)
        return open_requests

    def update_finish(self, request: Request, ended: bool) -> None:
        """Decides whether an answer is over with its last token, and adds the token to its text."""
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


def start_copy(requests: list[Request], numbers_4B: Tensor, routes_YBK: Tensor | None) -> Flight:
    """Starts the copy of a step's results to the host."""
    if not numbers_4B.is_cuda:
        return Flight(requests, numbers_4B, routes_YBK, None)
    numbers_4B = numbers_4B.to("cpu", non_blocking=True)
    routes_YBK = None if routes_YBK is None else routes_YBK.to("cpu", non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return Flight(requests, numbers_4B, routes_YBK, copied)
