"""Live: an engine that stays open. Requests are submitted, answered and cancelled at any time, by any thread.

    with tmoe.generate.Live(model, tokenizer, slots=32, max_len=8192) as live:
        ticket = live.submit("Once upon a time", tmoe.Sampling(temperature=0.8, seed=1), n=2)
        for piece in ticket:
            print(piece.sample, piece.text)
        samples = ticket.result()

A thread has the model, the cache and the graphs of steps from the beginning to the end; it is the only thread
that touches them. Other threads send it commands and get its results a step at a time.

next: generate/engine.py, generate/slots.py
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from tmoe.config.check import FLOATS, fits, require, spelt
from tmoe.data.chat.encoding import chat_prompt
from tmoe.generate.cache import PAGE, bytes_a_token, bytes_of_states
from tmoe.generate.engine import FREE, Engine, Prompt, Sample, can_be_graphs, require_pool
from tmoe.generate.forward import idle
from tmoe.generate.gathered_model import Ranks, gathered, group_for_questions
from tmoe.generate.pages import keys_of
from tmoe.generate.requests import Asked, Details, Request, Tops, tops_of
from tmoe.generate.sampler import Sampling
from tmoe.generate.slots import Room, Slots, rows_of
from tmoe.model.transformer import Transformer
from tmoe.parallel.launcher import launcher_world

if TYPE_CHECKING:
    from tmoe.data.tokenizer import Tokenizer

LONGEST = 32768  # tokens of a prompt and its answer, unless max_len says otherwise
BUDGET = 512  # tokens of prompts between two steps
RESTS = 0.005, 0.02  # seconds between questions of ranks that share experts: after work, and later
MOST_ANSWERS = 4096  # to one prompt


class LivePiece(NamedTuple):
    """The part of an answer that a step added: usually one token."""

    ticket: Ticket
    sample: int
    text: str
    """whole characters; "" for an engine without a tokenizer"""
    ids: list[int]
    logprobs: list[float]
    """as in `Sample`"""
    routes: Tensor | None
    """int16 [MoE layers, n, K], if they were asked for"""
    route_weights: Tensor | None
    tops: Tops | None
    done: Sample | None
    """the answer, once it is over"""


class Ticket:
    """A submitted request, and the way to its answers.

    Iterating over it yields its pieces until all answers are over, each piece once, even if several threads
    iterate.
    """

    def __init__(self, live: Live, number: int, requests: list[Request]):
        self.live, self.number, self.requests = live, number, requests
        self.pieces: queue.SimpleQueue[LivePiece | None] = queue.SimpleQueue()
        self.samples: list[Sample | None] = [None] * len(requests)
        self.sent = [0] * len(requests)  # tokens that pieces had
        self.left = len(requests)  # answers that are not over
        self.over = threading.Event()

    @property
    def prompt_tokens(self) -> int:
        """Number of the prompt's tokens."""
        return len(self.requests[0].asked.ids)

    def __iter__(self) -> Iterator[LivePiece]:
        while (piece := self.pieces.get()) is not None:
            yield piece
        self.pieces.put(None)  # for the next one who iterates
        self.live.raise_error(self)

    def result(self, timeout: float | None = None) -> tuple[Sample, ...]:
        """All answers, once they are over. TimeoutError after `timeout` seconds; the request continues.

        RuntimeError if the engine failed.
        """
        if not self.over.wait(timeout):
            raise TimeoutError(f"request {self.number}: its answers are not over after {timeout} s")
        self.live.raise_error(self)
        return tuple(cast(list[Sample], self.samples))

    def cancel(self) -> None:
        """As `Live.cancel`."""
        self.live.cancel(self)


class State(NamedTuple):
    """Counts of an engine: of the present, then of all its time."""

    running: int
    """answers that have a slot"""
    waiting: int
    """answers that have none yet"""
    pages: int
    """pages of the pool"""
    pages_in_use: int
    """pages that answers have"""
    pages_kept: int
    """pages without an answer whose tokens later prompts may reuse"""
    steps: int
    tokens: int
    """tokens of answers"""
    prompt_tokens: int
    """tokens of the prompts of requests that are over"""
    cached_tokens: int
    """of prompt_tokens: whose keys and values were reused"""


class Live:
    """An engine that answers requests as they are submitted.

    An answer is the one that `Engine.generate` gives for the request alone: its tokens depend on its prompt,
    settings, seed and numbers, not on other requests, up to the rounding of batches (docs/generate.md). A
    request that fails ends alone.

    If experts of the model are spread over ranks, every rank opens a Live, submits its requests, and
    drains it. The model's weights must not change, and no other call may use the model, until it is drained.

    Args:
        model: as for Engine; or an Engine, whose tokenizer, ends of answers, `begin`, `graphs` and `bits` are
            used.
        tokenizer: as for Engine.
        slots: most answers that are made at the same time.
        pool_gib: GiB for keys and values. None: room for all slots at max_len; at most 80% of the free memory
            of a GPU, or half of the host's, divided by the processes that a launcher has started there.
        max_len: most tokens of a prompt and its answer; an answer also ends there. None: the model's range of
            positions, at most 32768.
        budget: most tokens of prompts that are computed between two steps, in whole pages of 128.
        reuse: prompts share the pages of earlier prompts that begin with the same tokens. A model with linear
            layers shares none: the state at a page's end is not kept. So the time of a
            first token shows whether anyone has submitted the prompt's beginning before.
        after: called in the engine's thread after each step with the step's pieces, which tickets then do not
            get. It must return soon; an error of it ends the engine.

    Raises ConfigError for settings that cannot work.
    """

    def __init__(
        self,
        model: Transformer | Engine,
        tokenizer: Tokenizer | None = None,
        *,
        slots: int = 64,
        pool_gib: float | None = None,
        max_len: int | None = None,
        budget: int = BUDGET,
        reuse: bool = True,
        after: Callable[[list[LivePiece]], None] | None = None,
    ):
        own = isinstance(model, Engine)
        require(tokenizer is None or not own, "tokenizer: an Engine has its own; valid is None")
        self.engine = model if isinstance(model, Engine) else Engine(model, tokenizer, slots=slots)
        ok = fits(slots, int) and slots >= 1
        require(ok, "slots", repr(slots), "must be a whole number of at least 1")
        ok = pool_gib is None or (fits(pool_gib, float) and 0 < pool_gib <= FLOATS[1])
        require(ok, "pool_gib", repr(pool_gib), "must be a number above 0, and finite")
        cfg = self.engine.model.cfg
        ok = max_len is None or (fits(max_len, int) and 1 <= max_len <= cfg.longest)
        require(ok, "max_len", repr(max_len), f"must be from 1 to {spelt(cfg.longest_limit, 'key')}")
        ok = fits(budget, int) and budget >= PAGE
        require(ok, "budget", repr(budget), f"must be a whole number of at least {PAGE}")
        self.reuse = reuse and not cfg.linear_layers
        self.slots, self.budget, self.after = slots, budget, after
        self.max_len = min(cfg.longest, LONGEST) if max_len is None else max_len
        self.pool_gib = pool_gib
        self.room: Room | None = None
        self.error: BaseException | None = None
        self.state = State(*[0] * len(State._fields))
        self._inbox: queue.SimpleQueue[tuple[str, Ticket | None]] = queue.SimpleQueue()
        self._open: dict[int, Ticket] = {}  # the engine's thread alone uses it
        self._lock = threading.Lock()  # of the numbers and of `closing`
        self._numbers = 0
        self._closing = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tmoe-live", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self.error is not None:
            self._thread.join()
            raise self.error

    # ---- any thread ----

    def submit(
        self,
        prompt: Prompt | Sequence[Mapping[str, Any]],
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        number: int = 0,
        details: Details | None = None,
        chat: Mapping[str, Any] | None = None,
    ) -> Ticket:
        """Adds a request.

        Args:
            prompt: token ids or a text, as for `Engine.generate`; or the messages of a conversation, rendered
                by the chat template up to the assistant's next turn.
            sampling: settings of its answers. None: Sampling().
            n: number of answers.
            number: number of the prompt, on which draws depend: equal numbers, seeds and prompts give equal
                answers.
            details: what is recorded of tokens in addition to their log-probs. Prompts whose log-probs are
                asked for are computed whole.
            chat: arguments of `tmoe.data.chat.encoding.chat_prompt` for messages: template, tools, and the
                template's variables.

        Raises ConfigError for arguments that cannot work and for a request that the pool could never hold,
        DataError for messages that the template refuses, and RuntimeError if the engine is drained or failed.
        """
        sampling, details = sampling or Sampling(), details or Details()
        self.engine.check_sampling(sampling)
        ok = fits(n, int) and 1 <= n <= MOST_ANSWERS
        require(ok, "n", repr(n), f"must be a whole number from 1 to {MOST_ANSWERS}")
        ok = fits(number, int) and 0 <= number < 2**63
        require(ok, "number", repr(number), "must be a whole number of at least 0")
        ids = self._ids(prompt, chat)
        require(len(ids) <= self.max_len, f"prompt: {len(ids)} tokens, but max_len={self.max_len}")
        kind = details.kind if self.reuse else None
        keys = [] if kind is None else keys_of(ids[:-1], kind)
        ends = frozenset((*self.engine.eos, *sampling.stop_ids))
        asked = Asked(ids, sampling, ends, details, number, kind, keys)
        with self._lock:
            if self._closing:
                raise RuntimeError("this Live is drained") from self.error
            prompt_number, self._numbers = self._numbers, self._numbers + 1
            live = self.engine.tokenizer is not None
            requests = [
                self.engine.request(prompt_number, sample, asked, self.max_len, live) for sample in range(n)
            ]
            assert self.room is not None
            a_page = self._bytes_a_page()
            require_pool(self.room.pages * a_page, [requests[0].span], n, a_page)
            ticket = Ticket(self, prompt_number, requests)
            self._inbox.put(("submit", ticket))
        return ticket

    def _ids(self, prompt: Any, chat: Mapping[str, Any] | None) -> list[int]:
        """The tokens of a prompt."""
        messages = isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)
        if not messages:
            require(chat is None, "chat: valid only for a prompt of messages")
            return self.engine.ids_of(0, prompt)
        tokenizer = self.engine.tokenizer
        require(tokenizer is not None, "prompt: messages need a tokenizer: Live(model, tokenizer)")
        assert tokenizer is not None
        return chat_prompt(prompt, tokenizer, **(chat or {})).tolist()

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request. Its answers that are not over get the finish 'cancel', and its pages are freed."""
        self._inbox.put(("cancel", ticket))

    def zero_counts(self) -> None:
        """The counts of all time begin at 0."""
        self._inbox.put(("zero counts", None))

    def drain(self, timeout: float | None = None) -> bool:
        """Takes no more requests, waits until all are over, and frees the engine's memory.

        timeout: seconds after which the rest is cancelled. Returns whether nothing had to be cancelled.
        """
        with self._lock:
            self._closing = True
        self._inbox.put(("wake", None))
        self._thread.join(timeout)
        whole = not self._thread.is_alive()
        if not whole:
            self._inbox.put(("cancel all", None))
            self._thread.join()
        return whole and self.error is None

    def __enter__(self) -> Live:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.drain(None if kind is None else 0)

    def raise_error(self, ticket: Ticket) -> None:
        """RuntimeError if the engine failed before the ticket's answers were over."""
        if ticket.left:
            raise RuntimeError(f"request {ticket.number}: the engine failed: {self.error!r}") from self.error

    # ---- the engine's thread ----

    @torch.no_grad()
    def _run(self) -> None:
        """The thread: from gathering the weights until the last answer is over."""
        model = self.engine.model
        device = model.head_weight.device
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # each thread has another current GPU
            questions = group_for_questions(model)
            with gathered(model, rows_of(model, self.slots), questions=questions) as ranks:
                graphs = self.engine.graphs and ranks.free and can_be_graphs(model)
                self.room = self.engine.on_all_ranks(self._room)._replace(graphs=graphs)
                slots = Slots(model, self.room, self.engine.known, ranks, None, self.budget)
                self._count(slots)
                self._ready.set()
                self._serve(slots, ranks)
        except BaseException as error:  # reported by every ticket, and by __init__
            self.error = error
        finally:
            with self._lock:
                self._closing = True
            self._ready.set()
            while not self._inbox.empty():
                kind, ticket = self._inbox.get()
                if kind == "submit" and ticket is not None:
                    self._open[ticket.number] = ticket
            for ticket in self._open.values():
                ticket.pieces.put(None)
                ticket.over.set()

    def _serve(self, slots: Slots, ranks: Ranks) -> None:
        """The loop: commands, then a turn; without work it waits for a command."""
        rest = RESTS[0]
        while True:
            self._obey(slots, wait=not slots.busy and not self._closing and ranks.group is None)
            if slots.busy:
                rest = RESTS[0]
                self._hand_out(slots, slots.turn())
                continue
            self._count(slots)
            closing = self._closing and self._inbox.empty()
            if ranks.group is None:
                if closing:
                    return
                continue
            if (rows := ranks.join(-2 if closing else -1)) >= 0:
                idle(self.engine.model, rows if ranks.pads else 0)
                rest = RESTS[0]
            elif rows == -2:  # the largest of all ranks: every rank is closing
                return
            else:
                time.sleep(rest)
                rest = min(1.02 * rest, RESTS[1])

    def _obey(self, slots: Slots, wait: bool) -> None:
        """Carries out the commands that have arrived. wait: until there is one."""
        while wait or not self._inbox.empty():
            kind, ticket = self._inbox.get()
            wait = False
            if kind == "submit" and ticket is not None:
                self._open[ticket.number] = ticket
                slots.add(ticket.requests)
            elif kind == "cancel" and ticket is not None and ticket.number in self._open:
                self._cancel(slots, [ticket])
            elif kind == "cancel all":
                self._cancel(slots, list(self._open.values()))
            elif kind == "zero counts":
                self.state = State(*[0] * len(State._fields))

    def _cancel(self, slots: Slots, tickets: Sequence[Ticket]) -> None:
        """Ends all answers of tickets that are not over."""
        requests = [request for ticket in tickets for request in ticket.requests]
        requests = [request for request in requests if request.finish in ("", "again")]
        slots.cancel(requests)
        self._hand_out(slots, requests)

    def _hand_out(self, slots: Slots, landed: Sequence[Request]) -> None:
        """Gives what a step added to the tickets, or to `after`."""
        pieces = [self._piece(request) for request in landed]
        over: list[Asked] = []
        if self.after is not None and pieces:
            self.after(pieces)
        for piece in pieces:
            ticket = piece.ticket
            if self.after is None:
                ticket.pieces.put(piece)
            if piece.done is not None:
                ticket.samples[piece.sample] = piece.done
                ticket.left -= 1
                if not ticket.left:
                    del self._open[ticket.number]
                    over.append(ticket.requests[0].asked)
                    ticket.pieces.put(None)
                    ticket.over.set()
        self._count(slots, pieces, over)

    def _piece(self, request: Request) -> LivePiece:
        """The part of an answer that is in none of its pieces yet."""
        ticket, sample = self._open[request.prompt], request.sample
        new = slice(ticket.sent[sample], len(request.ids))
        ticket.sent[sample] = len(request.ids)
        routes, weights = request.routes[new], request.weights[new]
        return LivePiece(
            ticket,
            sample,
            request.text.news(bool(request.finish)) if request.text else "",
            request.ids[new],
            request.logprobs[new],
            torch.stack(routes, 1) if routes else None,
            torch.stack(weights, 1) if weights else None,
            tops_of(request.tops[new]),
            self.engine.sample_of(request) if request.finish else None,
        )

    def _count(self, slots: Slots, pieces: Sequence[LivePiece] = (), over: Sequence[Asked] = ()) -> None:
        """Updates the state. Other threads read it without a lock, because it is replaced as a whole.

        pieces: of a step. over: prompts whose answers are all over.
        """
        old = self.state
        self.state = State(
            len(slots.rows),
            len(slots.queue) + len(slots.admitted) + len(slots.again),
            slots.cache.pages - 1,
            slots.pages.in_use,
            len(slots.pages.unused),
            old.steps + bool(pieces),
            old.tokens + sum(len(piece.ids) for piece in pieces),
            old.prompt_tokens + sum(len(asked.ids) for asked in over),
            old.cached_tokens + sum(asked.cached for asked in over),
        )

    # ---- sizes ----

    def _bytes_a_page(self) -> int:
        model = self.engine.model
        return PAGE * bytes_a_token(model.cfg, model.head_weight.dtype)

    def _room(self) -> Room:
        """The slots and pages of the engine. ConfigError for a pool without room for one answer of a page."""
        device, a_page = self.engine.model.head_weight.device, self._bytes_a_page()
        pages = 1 + self.slots * -(-self.max_len // PAGE)
        pool = self.pool_gib and self.pool_gib * 2**30
        if pool is None and device.type == "cuda":
            pool = FREE * torch.cuda.mem_get_info(device)[0]
            pool -= bytes_of_states(self.engine.model.cfg, self.slots, self.engine.model.head_weight.dtype)
        elif pool is None:
            processes = launcher_world().local_size or 1
            pool = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 2 / processes
        has = f"{pool / 2**30:.3g} GiB for keys and values"
        require(pool >= 2 * a_page, "pool_gib", True, f"{has}; must hold two pages of {a_page} bytes")
        return Room(self.slots, min(pages, int(pool // max(1, a_page))), self.max_len)
