"""The loop of a call: answers in slots that are stepped together and refilled as answers end.

The first step of an answer has the prompt's last token as its input. So the answers of a group share one
prefill of the tokens before it, and the first token needs no special code.

On a GPU the host launches a step, then reads the results of the previous step; on a CPU it reads the step's
own results. The host knows without reading when an answer reaches its length. So only an answer that stops
earlier gets one step too many, whose result is dropped.

Answers may be added and cancelled between turns. A budget limits the tokens of prompts that a turn computes
while answers run, so that long prompts are computed in pieces between steps.

next: generate/prompt_fill.py, generate/forward.py, generate/row_settings.py
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmoe.config.routing_choices import SELECTIONS
from tmoe.generate.cache import PAGE, Cache
from tmoe.generate.forward import all_turns, decode, idle, prefill
from tmoe.generate.gathered_model import Ranks
from tmoe.generate.graphs import CudaGraphs, rounded
from tmoe.generate.pages import Pages
from tmoe.generate.prompt_chunks import chunks
from tmoe.generate.prompt_fill import Filling, pieces_of, publish_answer, record
from tmoe.generate.prompt_graphs import PromptGraphs
from tmoe.generate.requests import Request
from tmoe.generate.row_settings import Head, Needs, RowSettings, TopTokens, top_tokens
from tmoe.generate.sampler import Sampling
from tmoe.generate.states import States
from tmoe.generate.upload import upload
from tmoe.model.transformer import Transformer

HEATS = 4  # most temperatures of a step that is a CUDA graph, where the loss computes log-probs


class Results(NamedTuple):
    """The results of a step for its rows."""

    numbers_3B: Tensor  # fp64: token and both log-probabilities
    routes_YBK: Tensor | None = None  # int16
    weights_YBK: Tensor | None = None  # fp16
    tops: TopTokens | None = None

    def of(self, B: int) -> Results:
        """The results of the first B rows."""
        tops = None if self.tops is None else TopTokens(*(t[:B] for t in self.tops))
        routes, weights = (None if t is None else t[:, :B] for t in (self.routes_YBK, self.weights_YBK))
        return Results(self.numbers_3B[:, :B], routes, weights, tops)


class Flight(NamedTuple):
    """A step's results while they are copied to the host."""

    requests: list[Request]  # the request of each row
    results: Results
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
    """The state of a call; `turn` is a round of its loop. Its memory is freed with this object."""

    def __init__(
        self,
        model: Transformer,
        room: Room,
        known: int,
        ranks: Ranks,
        sampling: Sampling | None = None,
        budget: int | None = None,
    ):
        """Allocates the memory of a call.

        known: number of ids that the tokenizer can decode; higher ids are never sampled.
        sampling: settings of all answers; None: each answer has its own.
        budget: most tokens of prompts that a turn computes while answers run; None: no bound.
        """
        self.model, self.ranks, self.budget = model, ranks, budget
        cfg, weight = model.cfg, model.head_weight
        device = weight.device
        self.lag = 1 if device.type == "cuda" else 0  # launched steps whose results the host has not read
        self.slots = room.slots
        self.graphs = CudaGraphs(device) if room.graphs else None
        # whether a token's experts depend on the other tokens of a step
        self.looks = SELECTIONS[cfg.moe.selection].looks == "always"
        self.cache = Cache(cfg, room.pages, device, weight.dtype)
        self.pages = Pages(room.pages)
        M = -(-room.capacity // PAGE)
        # whole pages, because tables are cached by their length
        self.turns = all_turns(cfg, min(M * PAGE, cfg.rope.max_seq), device)
        self.queue: deque[Request] = deque()
        self.admitted: list[tuple[Request, tuple[int, int] | None]] = []  # with the page to copy
        self.filling: dict[int, Filling] = {}  # by prompt
        self.shortest_first = False
        self.gone: Counter[int] = Counter()  # cancelled answers to prompts that are being cached
        self.again: list[Request] = []  # requests that begin again
        self.rows: list[Request] = []  # the requests of the first slots
        self.flights: deque[Flight] = deque()
        # state_6B: each slot's next token, its position, the number of its answer's tokens, 1 if it has an
        # answer, and the numbers of prompt and answer, on which draws depend. table_BM: its pages. A slot
        # without an answer has 0 everywhere.
        B = self.size(room.slots)
        self.state_6B = torch.zeros(6, B, dtype=torch.int64, device=device)
        self.table_BM = torch.zeros(B, M, dtype=torch.int32, device=device)
        given = model, self.cache, self.turns
        self.chunks = None if self.graphs is None else PromptGraphs(*given, self.graphs)
        self.states = States(model, B)
        self.cache.states = self.states.slots
        self.settings = RowSettings(model, B, known, sampling)
        self.needs: Needs | None = None  # of the rows; None: unknown

    # ---- the loop ----

    def add(self, requests: Sequence[Request]) -> None:
        """Appends answers to the queue. The answers to a prompt follow each other."""
        for request in requests:
            self.pages.expect(request.prompt, 1)
        self.queue += requests

    def cancel(self, requests: Iterable[Request]) -> None:
        """Ends answers, wherever they are; their pages are free after the next turn."""
        prompts = set()
        for request in requests:
            if request.finish in ("", "again"):
                request.finish = "cancel"
                prompts.add(request.prompt)
        waits = Counter(request.prompt for request in self.queue if request.finish)
        self.queue = deque(request for request in self.queue if not request.finish)
        for prompt in prompts:
            self.gone[prompt] += waits[prompt]
            siblings = [request for request, _ in self.admitted if request.prompt == prompt]
            left = any(request.prompt == prompt for request in self.queue)
            if not left and all(request.finish for request in siblings):
                self.filling.pop(prompt, None)
                self.admitted = [pair for pair in self.admitted if pair[0].prompt != prompt]
                for request in siblings:
                    self.pages.drop(request.pages)
        self.forget()

    def forget(self) -> None:
        """Frees pages kept for cancelled answers, unless a page will be copied once its prompt is cached."""
        for prompt in [prompt for prompt in self.gone if prompt not in self.filling]:
            self.pages.forget(prompt, self.gone.pop(prompt))

    @property
    def busy(self) -> bool:
        """Whether any answer is not over, or its pages are not free."""
        return bool(self.rows or self.flights or self.queue or self.admitted or self.again)

    def turn(self) -> list[Request]:
        """Refills slots, launches a step, and reads the results of a step.

        Returns the requests to which results were added, or which are over with an error.
        """
        self.refill()
        if self.rows:
            self.flights.append(self.step())
        if self.flights and (len(self.flights) > self.lag or not self.rows):
            return self.apply_results(self.flights.popleft())
        return []

    def run(self) -> Iterator[list[Request]]:
        """Makes all answers of the queue. Yields what each turn returns."""
        while self.busy:
            yield self.turn()
        while (rows := self.ranks.join(-1)) >= 0:
            idle(self.model, rows if self.ranks.pads else 0)

    # ---- slots ----

    def refill(self) -> None:
        """Gives free slots to the next requests of the queue, while pages are free; then closes the gaps."""
        gaps = deque(slot for slot, request in enumerate(self.rows) if request.leaves)
        for slot in gaps:
            self.leave(self.rows[slot])
        if self.again:
            self.begin_again()
        self.admit(len(self.rows) - len(gaps))
        self.fill(running=len(gaps) < len(self.rows))
        self.seat(gaps)
        if gaps:
            self.close(gaps)

    def leave(self, request: Request) -> None:
        """Frees the pages of an answer that needs no further step."""
        if request.finish in ("error", "again") and not request.ids:  # else its prompt's keys are finite
            self.pages.unpublish(request.pages)
        elif request.finish not in ("error", "again"):
            publish_answer(request, self.pages)
        self.pages.drop(request.pages)
        request.seated = False
        if request.finish == "again":
            self.again.append(request)

    def begin_again(self) -> None:
        """Puts requests whose old steps have all been read back into the queue."""
        under_way = {id(request) for flight in self.flights for request in flight.requests}
        for request in self.again:
            if request.finish != "again" or id(request) in under_way:
                continue
            if not request.asked.alone:  # the pages for further answers are doubtful too
                self.pages.drop(self.pages.kept.pop(request.prompt, []))
            request.asked.alone = True
            request.finish, request.launched = "", 0
            self.pages.expect(request.prompt, 1)
            # only the first prompt of the queue may keep pages, or two prompts could wait for each other's
            first = self.queue[0].prompt if self.queue else request.prompt
            ahead = 0
            if first != request.prompt and first in self.pages.kept:
                ahead = next((i for i, one in enumerate(self.queue) if one.prompt != first), len(self.queue))
            self.queue.insert(ahead, request)
        self.again = [request for request in self.again if request.finish == "again"]

    def admit(self, taken: int) -> None:
        """Gives pages to the next requests of the queue. taken: slots that have an answer."""
        while self.queue and taken + len(self.admitted) < self.slots:
            request = self.queue[0]
            asked = request.asked
            keys = () if asked.alone else asked.keys
            seat = self.pages.admit(request.span, keys)
            if seat is None:
                break
            self.queue.popleft()
            request.pages = seat.pages
            if seat.fresh:
                asked.begin(seat.reused * PAGE)
                self.states.begin(request.prompt)
                notes = [self.pages.notes[page] for page in seat.fresh[: seat.reused]]
                self.filling[request.prompt] = Filling(
                    asked, seat.fresh, asked.cached, keys, notes, request.prompt
                )
            self.admitted.append((request, seat.copied))

    def fill(self, running: bool) -> None:
        """Caches prompts without their last tokens, and records what is asked of their tokens.

        running: whether any answer waits for its next step, so that the budget applies.
        """
        most, device = self.ranks.at_once, self.state_6B.device
        left = None if self.budget is None else self.budget if running else max(self.budget, most)
        work = pieces_of(self.in_turn(), most, left)
        blocks = self.model.rounding.in_blocks or device.type == "cuda"
        next_parts = iter(work)
        for chunk in chunks([piece for _, piece in work], most, device, blocks=blocks):
            parts = [next(next_parts) for _ in chunk.lengths]
            # else the last block's experts are not needed
            last = self.ranks.group is not None or any(filling.records for filling, _ in parts)
            rows = self.ranks.rows(chunk.tokens_1S.numel())
            with self.on_device():
                if self.chunks is not None and self.chunks.take(chunk):
                    routings, x = self.chunks.run(chunk, rows, last)
                else:
                    states = [self.states.of_prompt(filling.prompt) for filling, _ in parts]
                    routings, x = prefill(self.model, self.cache, chunk, self.turns, rows, last, states)
                record(self.model, chunk, parts, routings, x)
            for filling, piece in parts:
                filling.advance(len(piece.ids), packed=len(parts) > 1, pages=self.pages)
        self.filling = {prompt: filling for prompt, filling in self.filling.items() if not filling.complete}

    def in_turn(self) -> list[Filling]:
        """The prompts that are being cached: in every other turn the shortest rest first, else the oldest.

        So a short prompt does not wait for the whole of a long one, and a long one continues.
        """
        prompts = list(self.filling.values())
        self.shortest_first = not self.shortest_first and self.budget is not None
        return sorted(prompts, key=lambda filling: filling.left) if self.shortest_first else prompts

    def seat(self, gaps: deque[int]) -> None:
        """Gives slots to admitted answers whose prompts are cached, first those in `gaps`."""
        ready = [pair for pair in self.admitted if pair[0].prompt not in self.filling]
        if not ready:
            return
        self.admitted = [pair for pair in self.admitted if pair[0].prompt in self.filling]
        self.cache.copy([copied for _, copied in ready if copied is not None])
        seated: dict[int, Request] = {}
        for request, _ in ready:
            if request.finish:  # cancelled meanwhile
                self.pages.drop(request.pages)
                continue
            slot = gaps.popleft() if gaps else len(self.rows)
            self.rows[slot : slot + 1] = [request]
            seated[slot] = request
            request.seated = True
            request.barred = request.early and bool(request.asked.ends)
            request.doubtful = request.asked.packed or request.asked.cached > 0
        if seated:
            self.set_state(seated)
        self.forget()
        waits = {request.prompt for request, _ in self.admitted} | {*self.filling}
        self.states.keep(lambda prompt: prompt in waits or prompt in self.pages.waiting)

    def set_state(self, seated: dict[int, Request]) -> None:
        """Sets the state of slots for the first steps of their answers."""
        device = self.state_6B.device
        slots_I = upload(list(seated), device)
        requests = seated.values()
        states = [
            (request.asked.ids[-1], request.first, 0, 1, request.asked.number, request.sample)
            for request in requests
        ]
        self.state_6B[:, slots_I] = upload(states, device).T
        M = self.table_BM.shape[1]
        tables = [request.pages + [0] * (M - len(request.pages)) for request in requests]
        self.table_BM[slots_I] = upload(tables, device, torch.int32)
        self.states.seat({slot: request.prompt for slot, request in seated.items()}, slots_I)
        self.settings.seat(seated)
        self.needs = None

    def close(self, gaps: Sequence[int]) -> None:
        """Moves the last answers into gaps, so that steps have no empty slots between answers."""
        empty = set(gaps)
        B = len(self.rows) - len(gaps)
        targets = [slot for slot in gaps if slot < B]
        sources = [slot for slot in range(B, len(self.rows)) if slot not in empty]
        for source, target in zip(sources, targets, strict=True):
            self.rows[target] = self.rows[source]
        if targets:
            device = self.state_6B.device
            targets_I, sources_I = upload(targets, device), upload(sources, device)
            for state in (self.state_6B.T, self.table_BM):
                state[targets_I] = state[sources_I]
            self.states.move(targets_I, sources_I)
            self.settings.move(targets_I, sources_I)
        for state in (self.state_6B.T, self.table_BM):
            state[B : len(self.rows)] = 0
        del self.rows[B:]
        self.needs = None

    # ---- steps ----

    def step(self) -> Flight:
        """Launches a step of all rows: each row's token is cached, and its next token drawn."""
        B = len(self.rows)
        size = self.size(B)
        needs = self.find_needs()
        rows = self.ranks.rows(size)
        with self.on_device():
            if self.graphs is not None and len(needs.heats) <= HEATS:
                run = partial(self.advance, size, self.table_BM.shape[1], needs, 0)
                results = self.graphs.run((size, needs), run)
            else:
                longest = 1 + max(request.first + request.launched for request in self.rows)
                results = self.advance(size, -(-longest // PAGE), needs, rows)
            flight = start_copy(list(self.rows), results.of(B))
        for request in self.rows:
            request.launched += 1
        return flight

    def find_needs(self) -> Needs:
        """The parts that the next step needs; end tokens of answers that are not early are allowed."""
        if self.needs is not None and not self.needs.barred:
            return self.needs
        for slot, request in enumerate(self.rows):
            if request.barred and not request.early:
                self.settings.bar(slot, request)
                request.barred = False
                self.needs = None
        if self.needs is None:
            self.needs = self.settings.needs(self.rows)
        return self.needs

    def on_device(self) -> AbstractContextManager:
        """A context that makes the model's GPU the current device."""
        device = self.state_6B.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def size(self, slots: int) -> int:
        """Number of rows of a step of `slots` slots; the rows after them have no answer."""
        return rows_of(self.model, slots, graphs=self.graphs is not None)

    def advance(self, B: int, M: int, needs: Needs, rows: int) -> Results:
        """A step of the first B slots on the device.

        M: most pages in which a slot has tokens, the new one included. rows: as in feed_forward.
        """
        token_B, at_B, made_B, live_B, prompt_B, sample_B = self.state_6B[:, :B]
        padding_B = live_B == 0 if self.looks else None
        logits_BV, h_BD, routings = decode(
            self.model, self.cache, token_B, at_B, self.table_BM[:B, :M], self.turns, rows, padding_B
        )
        drawn = self.settings.draw(Head(logits_BV, h_BD, token_B), (prompt_B, sample_B, made_B), needs)
        numbers_3B = torch.stack([t.double() for t in drawn])
        routes = weights = None
        if needs.routes and routings:
            routes = torch.stack([routing.ids_TK for routing in routings]).to(torch.int16)
        if needs.weights and routings:
            weights = torch.stack([routing.weights_TK for routing in routings]).to(torch.float16)
        tops = top_tokens(logits_BV, drawn.tokens_B) if needs.tops else None
        token_B.copy_(drawn.tokens_B)
        at_B += live_B
        made_B += live_B
        return Results(numbers_3B, routes, weights, tops)

    def apply_results(self, flight: Flight) -> list[Request]:
        """Adds a step's results to its requests that are not over yet. Returns these requests."""
        if flight.copied is not None:
            flight.copied.synchronize()
        numbers_3B, routes_YBK, weights_YBK, tops = flight.results
        top_ids, top_logprobs, own = (t.tolist() for t in tops) if tops is not None else ((), (), ())
        open_requests = []
        rows = zip(flight.requests, numbers_3B.T.tolist(), strict=True)
        for row, (request, (token, logprob, sampler_logprob)) in enumerate(rows):
            if request.finish:
                continue
            if not math.isfinite(logprob):
                self.spoil(request, logprob)
                open_requests += [request] if request.finish == "error" else []
                continue
            request.ids.append(int(token))
            request.logprobs.append(logprob)
            request.sampler_logprobs.append(sampler_logprob)
            details = request.asked.details
            if routes_YBK is not None and details.routes:
                request.routes.append(routes_YBK[:, row])
            if weights_YBK is not None and details.route_weights:
                request.weights.append(weights_YBK[:, row])
            if k := details.top_logprobs:
                request.tops.append((top_ids[row][:k], top_logprobs[row][:k], own[row]))
            self.update_finish(request, int(token) in request.asked.ends)
            open_requests.append(request)
        return open_requests

    def spoil(self, request: Request, logprob: float) -> None:
        """Ends an answer whose logits are not finite, or begins it again.

        In a row of several prompts attention multiplies the values of other prompts by 0, and 0 times NaN is
        NaN. So if the first token has no finite logits, the answer begins again with its prompt alone.
        """
        if request.doubtful and not request.ids:
            request.finish = "again"
            if not request.seated:  # its only step was launched, so it has left its slot already
                self.again.append(request)
            return
        request.finish = "error"
        request.error = f"log-prob {logprob}: the model's logits are not finite"

    def update_finish(self, request: Request, ended: bool) -> None:
        """Decides whether an answer is over with its last token, and adds the token to its text."""
        text, count = request.text, len(request.ids)
        may_stop = count >= request.asked.sampling.min_tokens
        if text is not None and not ended:
            text.add(request.ids[-1:], may_stop)
        if ended or (text is not None and text.stopped):
            request.finish = "stop"
        elif count == request.most:
            request.finish = "length"
        if request.finish and text is not None:
            text.end(may_stop)
            request.finish = "stop" if text.stopped else request.finish


def start_copy(requests: list[Request], results: Results) -> Flight:
    """Starts the copy of a step's results to the host."""
    if not results.numbers_3B.is_cuda:
        return Flight(requests, results, None)

    def to_host(t: Any) -> Any:
        return t.to("cpu", non_blocking=True) if isinstance(t, Tensor) else t

    numbers_3B, routes_YBK, weights_YBK, tops = results
    tops = None if tops is None else TopTokens(*map(to_host, tops))
    results = Results(to_host(numbers_3B), to_host(routes_YBK), to_host(weights_YBK), tops)
    copied = torch.cuda.Event()
    copied.record()
    return Flight(requests, results, copied)
