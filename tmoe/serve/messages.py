"""The values that pass between the front and the engine's process, over a pipe.

next: serve/engine_process.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tmoe.data.tokenizer import Tokenizer
from tmoe.generate.live import State
from tmoe.generate.requests import Details
from tmoe.generate.sampler import Sampling


@dataclass(frozen=True)
class EngineSettings:
    """How the engine's process loads a model and answers. Fields as the flags of `tmoe serve`."""

    path: Path
    slots: int = 32
    max_len: int | None = None
    pool_gib: float | None = None
    tokenizer: str | None = None
    device: str | None = None
    dtype: Any = None
    adapter: Path | None = None
    quantize: Any = None
    ep: int = 1
    """ranks that divide the experts of a copy of the model"""
    meeting: str = ""
    """the address of the front's socket, to which the engines of ranks above 0 connect; known to rank 0"""


class Ready(NamedTuple):
    """The engine has loaded its model."""

    tokenizer: Tokenizer
    vocab: int
    eos: tuple[int, ...]
    begin: tuple[int, ...]
    generation: dict[str, Any]
    max_len: int
    pages: int
    """pages of the pool that answers can have"""
    notes: tuple[str, ...]
    moe_blocks: tuple[int, ...] = ()
    """numbers of the blocks with experts"""
    experts: int = 0
    """outputs of the router of such a block"""
    reuse: bool = True
    """whether prompts share pages of earlier prompts"""


class Joined(NamedTuple):
    """The first message of the engine of a rank above 0."""

    rank: int
    pid: int


class Pages(NamedTuple):
    """The engine of a rank above 0 has loaded its model. pages: of its pool, that answers can have."""

    pages: int


class Failed(NamedTuple):
    """The engine could not start, or failed. refused: whether a flag or a folder is wrong.

    text: why; "": rank 0 knows.
    """

    text: str
    refused: bool


class Submit(NamedTuple):
    """A request for n answers to a prompt."""

    key: int
    ids: list[int]
    sampling: Sampling
    n: int
    details: Details
    prompt_routes: bool = False
    """whether the last part of each answer has the experts of the prompt's tokens"""


class Cancel(NamedTuple):
    """Ends a request."""

    key: int


class Ask(NamedTuple):
    """A question for the engine's state; the reply is a `Told`."""


class Close(NamedTuple):
    """Ends the engine's process. Requests under way are cancelled."""


class Told(NamedTuple):
    """The state of the engine."""

    state: State


class Refusal(NamedTuple):
    """A request that the engine refuses."""

    key: int
    text: str


class Step(NamedTuple):
    """The additions of a step to answers.

    Most add nothing but text: these are in the first four lists, whose elements belong together, because
    a `Part` for each of them costs both processes several times as much.
    """

    keys: list[int]
    """of requests"""
    samples: list[int]
    texts: list[str]
    ids: list[list[int]]
    parts: list[Part]
    """additions with more than text, and the last ones of answers"""


@dataclass
class Part:
    """An addition to an answer, by one step or by several that a reader has not taken yet."""

    key: int
    sample: int
    text: str = ""
    ids: list[int] = field(default_factory=list)
    tops: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    """for each of ids: its own log-prob, and pairs of the most probable ids and their log-probs"""
    routes: list[list[list[int]]] = field(default_factory=list)
    """[n][MoE layers][K]"""
    weights: list[list[list[float]]] = field(default_factory=list)
    prompt_tops: list[tuple[float, list[tuple[int, float]]]] | None = None
    prompt_routes: list[list[list[int]]] | None = None
    """[tokens of the prompt - 1][MoE layers][K]"""
    prompt_weights: list[list[list[float]]] | None = None
    finish: str = ""
    error: str = ""
    cached: int = 0

    def join(self, later: Part) -> None:
        """Adds what later steps added to the same answer."""
        self.text += later.text
        self.ids += later.ids
        self.tops += later.tops
        self.routes += later.routes
        self.weights += later.weights
        self.prompt_tops = self.prompt_tops or later.prompt_tops
        self.prompt_routes = self.prompt_routes or later.prompt_routes
        self.prompt_weights = self.prompt_weights or later.prompt_weights
        self.finish, self.error, self.cached = later.finish, later.error, later.cached
