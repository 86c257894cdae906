"""A step's answers: packed into micro-batches, with what their loss needs and what all ranks know of them.

next: post/policy_loss.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from tmoe.config.model import IGNORE
from tmoe.data.chat.dataset import ChatBatch
from tmoe.data.chat.packing import plan
from tmoe.data.chat.prompts import Prompt
from tmoe.generate.engine import Sample
from tmoe.post.losses.sums import StepCounts


class Answer(NamedTuple):
    """One answer to a prompt."""

    prompt: Prompt
    number: int
    """of the prompt, in the endless sequence: answers of one number are a group"""
    sample: int
    """of the answer, in its group"""
    ids: list[int]
    logprobs: Tensor
    """fp32 [n] on the CPU, of the sampler, over the whole tempered softmax"""
    finish: Literal["stop", "length"]
    text: str
    routes: Tensor | None = None
    """int16 [MoE layers, rows, K], for a replay: where the sampler sent each token that a row has"""

    @property
    def truncated(self) -> bool:
        """Whether it has no end."""
        return self.finish == "length"

    @property
    def rows(self) -> int:
        """Tokens that it takes in a row: its last one is predicted, and not read."""
        return len(self.prompt.ids) + len(self.ids) - 1


class Packed(NamedTuple):
    """Answers in micro-batches. `numbers_AN` of the batch says which answer each sequence is."""

    batch: ChatBatch
    drawn_ABS: Tensor
    """the sampler's log-prob of each target, 0 where nothing is trained"""
    routes_AYBSK: Tensor | None = None
    """int16: where the sampler sent each token, -1 for what is left of a row; None: answers have no routes"""


def rows_of(answers: Sequence[Answer], seq: int, to: int = 1) -> list[list[int]]:
    """Which answers share a row: best fit, longest first. to: as `pack`'s."""
    if not answers:
        return []
    found = plan(np.array([-(-answer.rows // to) * to for answer in answers]), seq)
    order, starts = found.order[found.places].tolist(), found.starts.tolist()
    return [order[starts[r] : starts[r + 1]] for r in range(found.rows)]


def pack(
    answers: Sequence[Answer],
    rows: list[list[int]],
    shape: tuple[int, int, int],
    untrained: Sequence[bool],
    to: int = 1,
) -> Packed:
    """Rows of answers as A micro-batches of B rows of S tokens, the last of which may be empty.

    Trained is the answer, and not the prompt. Positions restart with each sequence, and documents keep them
    apart.

    untrained: answers that are left out of the loss.
    to: sequences begin at multiples of this; the gap behind one is of its document, and of no sequence.
    """
    A, B, S = shape
    assert len(rows) <= A * B
    tokens, documents, positions = (np.zeros((A * B, S), np.int64) for _ in range(3))
    targets, sequences = np.full((A * B, S), IGNORE), np.full((A * B, S), -1)
    drawn = np.zeros((A * B, S), np.float32)
    routes = routes_for(answers, A * B, S)
    numbers: list[list[int]] = [[] for _ in range(A)]
    for r, row in enumerate(rows):
        mine = numbers[r // B]
        at = 0
        for document, i in enumerate(row):
            answer = answers[i]
            first, end = at + len(answer.prompt.ids) - 1, at + answer.rows
            tokens[r, at:end] = [*answer.prompt.ids, *answer.ids[:-1]]
            if not untrained[i]:
                targets[r, first:end] = answer.ids
                drawn[r, first:end] = answer.logprobs.numpy()
            if routes is not None and answer.routes is not None:
                routes[:, r, at:end] = answer.routes
            documents[r, at:end] = document
            after = -(-end // to) * to
            documents[r, end:after] = document
            documents[r, after:] = document + 1
            positions[r, at:end] = np.arange(end - at)
            sequences[r, at:end] = len(mine)
            mine.append(i)
            at = after
    most = max(map(len, numbers))
    padded = np.array([mine + [-1] * (most - len(mine)) for mine in numbers], np.int64).reshape(A, most)
    five = (torch.from_numpy(t).view(A, B, S) for t in (tokens, targets, documents, positions, sequences))
    return Packed(
        ChatBatch(*five, numbers_AN=torch.from_numpy(padded)),
        torch.from_numpy(drawn).view(A, B, S),
        None if routes is None else rearrange(routes, "y (a b) s k -> a y b s k", a=A),
    )


def routes_for(answers: Sequence[Answer], rows: int, seq: int) -> Tensor | None:
    """Room for the routes of all tokens [Y, rows, S, K], -1 yet; None where answers have none."""
    known = [answer.routes for answer in answers if answer.routes is not None]
    if not known:
        return None
    Y, _, K = known[0].shape
    return known[0].new_full((Y, rows, seq, K), -1)


class Step(NamedTuple):
    """A step's answers and all that its updates need beside the weights; a batch to the training loop.

    The step's first update fills `old` and `routes`, in the order of the micro-batches.
    """

    packed: Packed
    advantages_N: Tensor
    """fp32, of this reader's answers"""
    counts: StepCounts
    """of the whole step"""
    reference: list[Tensor]
    """of each micro-batch: log-probs of this rank's own tokens by the run's first model; none without a KL"""
    old: list[Tensor]
    """of each micro-batch: log-probs of this rank's own tokens at the first update, if more follow"""
    routes: list[Tensor]
    """of each micro-batch, with --grpo.replay=old: the experts [Y, T, K] of the first update"""
    numbers: Tensor = torch.zeros(0)
    """fp32: what the log says of the step as a whole"""

    @property
    def first(self) -> bool:
        """Whether no update has begun yet."""
        return not (self.old or self.routes)

    @property
    def tokens_ABS(self) -> Tensor:
        return self.packed.batch.tokens_ABS

    @property
    def targets_ABS(self) -> Tensor:
        return self.packed.batch.targets_ABS

    def count(self) -> int:
        """Tokens, without padding."""
        return self.packed.batch.count()

    def count_sequences(self) -> int:
        """Answers."""
        return self.packed.batch.count_sequences()


class Outcome(NamedTuple):
    """What all ranks know of an answer."""

    number: int
    sample: int
    reward: float
    """NaN for none"""
    tokens: int
    truncated: bool


Parts = dict[tuple[int, int], dict[str, float | None]]
"""of answers, by numbers of prompt and sample: rewards by name, without their weights"""


def routes_of(sample: Sample) -> Tensor:
    """Where the sampler sent each token but the answer's last, from the prompt's first on [Y, rows, K]."""
    assert sample.routes is not None
    before = [] if sample.prompt_routes is None else [sample.prompt_routes]
    return torch.cat([*before, sample.routes], 1)


def of_groups(told: Sequence[Outcome]) -> tuple[Tensor, Tensor]:
    """Rewards of answers, and the numbers of their prompts."""
    rewards = torch.tensor([one.reward for one in told], dtype=torch.float32)
    return rewards, torch.tensor([one.number for one in told], dtype=torch.int64)
