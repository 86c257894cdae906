"""The engine's process: it loads a model, opens a `Live`, and answers the front's messages.

One process has the whole model, and is a child of the front. With several ranks the child is rank 0, and the
process of every other rank is an engine, which connects to the front through a socket.

An engine ignores SIGINT and SIGTERM, because the front drains. It ends on a `Close`, when the pipe closes,
and a child also with its parent, while it loads too.

next: serve/engine_client.py
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Client, Connection
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from tmoe.checkpoint.errors import CheckpointError
from tmoe.config.check import ConfigError
from tmoe.front import spelt
from tmoe.generate.live import Live, LivePiece, Ticket
from tmoe.generate.load import Loaded, load
from tmoe.generate.processes import Processes
from tmoe.generate.requests import Tops
from tmoe.generate.warm_up import warm_up
from tmoe.serve.messages import (
    Ask,
    Cancel,
    Close,
    EngineSettings,
    Failed,
    Joined,
    Pages,
    Part,
    Ready,
    Refusal,
    Step,
    Submit,
    Told,
)

PR_SET_PDEATHSIG = 1
REFUSALS = OSError, ValueError, CheckpointError


def engine_process(pipe: Connection, front: Connection, settings: EngineSettings) -> None:
    """The whole child process. front: the front's end of the pipe, which a forked process has too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it ended before the call above
        os._exit(1)
    front.close()
    ignore_signals()
    try:
        processes = Processes(settings.ep)
        if processes.group is not None:
            processes.from_first(settings.meeting)
    except (RuntimeError, *REFUSALS) as error:
        pipe.send(failure(error))
        return
    if answer(pipe, settings, processes) is not None:
        return
    os._exit(0)


def engine_rank(settings: EngineSettings) -> None:
    """The engine of a rank above 0, in the launcher's process. Ends the process."""
    processes = Processes(settings.ep)
    pipe = Client(processes.from_first(""), "AF_UNIX")
    pipe.send(Joined(processes.rank, os.getpid()))
    try:
        failed = answer(pipe, settings, processes)
    except SystemExit:  # rank 0 reports the reason
        pipe.send(Failed("", True))
        raise
    if failed is not None:
        raise SystemExit(2 if failed.refused else 1)
    os._exit(0)


def ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def failure(error: BaseException) -> Failed:
    return Failed(spelt(error) or type(error).__name__, isinstance(error, REFUSALS))


def answer(pipe: Connection, settings: EngineSettings, processes: Processes) -> Failed | None:
    """Loads the model, and serves it until the front ends the engine. Returns why, if it cannot."""
    how = settings.tokenizer, settings.device, settings.dtype, settings.adapter, settings.quantize
    lay_out = processes.spread if settings.ep > 1 else None
    try:
        loaded = processes.agreed(lambda: load(settings.path, *how, lay_out))
        side = processes.agreed(lambda: EngineSide(pipe, loaded, settings))
        ignore_signals()
        pipe.send(Pages(side.pages) if processes.rank else side.ready(loaded))
    except (RuntimeError, *REFUSALS) as error:
        failed = failure(error)
        pipe.send(failed)
        return failed
    try:
        side.serve()
    except (EOFError, OSError):  # the front is gone
        os._exit(1)
    if processes.group is not None:  # else a rank may lose the last reply of one that has ended
        with suppress(RuntimeError):
            dist.barrier(processes.group)
    return None


class EngineSide:
    """A `Live` and the pipe to the front."""

    def __init__(self, pipe: Connection, loaded: Loaded, settings: EngineSettings):
        self.pipe = pipe
        self.lock = threading.Lock()  # of the pipe and of `tickets`
        self.tickets: dict[int, Ticket] = {}
        self.asked: dict[int, Submit] = {}  # by the ticket's number
        engine = loaded.engine(settings.slots)
        sizes: dict[str, Any] = dict(slots=settings.slots, pool_gib=settings.pool_gib)
        self.live = Live(engine, max_len=settings.max_len, after=self.after, **sizes)
        warm_up(self.live)
        assert self.live.room is not None
        self.pages = self.live.room.pages - 1

    def ready(self, loaded: Loaded) -> Ready:
        """The front's knowledge of the model."""
        cfg = loaded.model.cfg
        moe = tuple(i for i in range(cfg.layers) if cfg.is_moe(i))
        known = loaded.eos, loaded.begin, loaded.generation, self.live.max_len, self.pages, loaded.notes
        return Ready(loaded.tokenizer, cfg.vocab, *known, moe, cfg.moe.outputs if moe else 0, self.live.reuse)

    def serve(self) -> None:
        """Carries out messages until the front ends the engine, or the engine fails."""
        while True:
            came = self.pipe.poll(0.5)
            if (error := self.live.error) is not None:
                with self.lock:
                    self.pipe.send(Failed(f"the engine failed: {type(error).__name__}: {error}", False))
                raise OSError("the engine failed") from error
            if not came:
                continue
            message = self.pipe.recv()
            if isinstance(message, Submit):
                self.submit(message)
            elif isinstance(message, Cancel):
                with self.lock:
                    ticket = self.tickets.get(message.key)
                if ticket is not None:
                    self.live.cancel(ticket)
            elif isinstance(message, Ask):
                with self.lock:
                    self.pipe.send(Told(self.live.state))
            elif isinstance(message, Close):
                self.live.drain(0)
                return

    def submit(self, asked: Submit) -> None:
        """Hands a request to the engine. The lock delays its first piece until its key is known."""
        with self.lock:
            try:
                ticket = self.live.submit(asked.ids, asked.sampling, n=asked.n, details=asked.details)
            except (ConfigError, ValueError, RuntimeError) as error:
                self.pipe.send(Refusal(asked.key, str(error)))
                return
            self.tickets[asked.key] = ticket
            self.asked[ticket.number] = asked

    def after(self, pieces: list[LivePiece]) -> None:
        """Sends a step's pieces as one message."""
        with self.lock:
            step = self.step_of(pieces)
            ends = Counter(piece.ticket for piece in pieces if piece.done is not None)
            for ticket, count in ends.items():
                if ticket.left == count:  # `left` falls after this call
                    del self.tickets[self.asked.pop(ticket.number).key]
            self.pipe.send(step)

    def step_of(self, pieces: list[LivePiece]) -> Step:
        step = Step([], [], [], [], [])
        for piece in pieces:
            asked = self.asked[piece.ticket.number]
            if piece.done is not None or piece.tops is not None or piece.routes is not None:
                step.parts.append(part_of(asked, piece))
                continue
            step.keys.append(asked.key)
            step.samples.append(piece.sample)
            step.texts.append(piece.text)
            step.ids.append(piece.ids)
        return step


def part_of(asked: Submit, piece: LivePiece) -> Part:
    """A piece of an answer in plain values."""
    done = piece.done
    shown = done if asked.prompt_routes else None
    return Part(
        asked.key,
        piece.sample,
        piece.text,
        piece.ids,
        pairs(piece.tops),
        listed(piece.routes),
        listed(piece.route_weights),
        pairs(done.prompt_tops) if done and done.prompt_tops is not None else None,
        listed(shown.prompt_routes) if shown else None,
        listed(shown.prompt_route_weights) if shown else None,
        done.finish if done else "",
        done.error if done else "",
        done.cached if done else 0,
    )


def listed(values_YNK: Tensor | None) -> list:
    """Experts, or their weights in fp16, by token and layer."""
    if values_YNK is None:
        return []
    values_NYK = values_YNK.transpose(0, 1)
    return rounded(values_NYK) if values_NYK.is_floating_point() else values_NYK.tolist()


def rounded(weights: Tensor) -> list:
    """Values of an fp16 tensor with 6 significant digits, of which JSON is short."""
    return digits()[weights.numpy().view(np.uint16)].tolist()


@cache
def digits() -> np.ndarray:
    """Each number of fp16 with 6 significant digits, at the index of its bits. JSON has no infinities."""
    values = np.arange(2**16, dtype=np.uint16).view(np.float16)
    return np.array([float(f"{value:.6g}") for value in np.nan_to_num(values).tolist()])


def pairs(tops: Tops | None) -> list[tuple[float, list[tuple[int, float]]]]:
    """For each place: the token's own log-prob, and the most probable ids with theirs."""
    if tops is None:
        return []
    rows = zip(tops.own.tolist(), tops.ids.tolist(), tops.logprobs.tolist(), strict=True)
    return [(own, list(zip(ids, logprobs, strict=True))) for own, ids, logprobs in rows]
