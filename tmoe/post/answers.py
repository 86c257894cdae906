"""A step's answers: packed into micro-batches, with the inputs of their loss and the facts all ranks know.

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
from tmoe.data.chat.chat_dataset import ChatBatch
from tmoe.data.chat.packing import plan
from tmoe.data.chat.prompt_data import Prompt
from tmoe.generate.engine import Sample
from tmoe.post.losses.sums import StepCounts


class Answer(NamedTuple):
    """One answer to a prompt."""

    prompt: Prompt
    number: int
    """number of the prompt, in the endless sequence of prompts; answers of one number are a group"""
    sample: int
    """number of the answer, in its group"""
    ids: list[int]
    logprobs: Tensor
    """fp32 [n] on the CPU: the sampler's log-probs, over the whole softmax at the sampling temperature"""
    finish: Literal["stop", "length"]
    text: str
    routes: Tensor | None = None
    """int16 [MoE layers, rows, K], for a replay: the experts to which the sampler sent each token"""

    @property
    def truncated(self) -> bool:
        """Whether the answer was cut off before its end."""
        return self.finish == "length"

    @property
    def rows(self) -> int:
        """Number of tokens that the answer takes in a row: its last token is predicted, not read."""
        return len(self.prompt.ids) + len(self.ids) - 1


class Packed(NamedTuple):
    """Answers in micro-batches. The batch's `numbers_AN` has the index of the answer of each sequence."""

    batch: ChatBatch
    drawn_ABS: Tensor
    """the sampler's log-prob of each target, 0 where nothing is trained"""
    routes_AYBSK: Tensor | None = None
    """int16: the experts to which the sampler sent each token, -1 for the unused end of a row; None: answers
    have no routes"""


def rows_of(answers: Sequence[Answer], seq: int, to: int = 1) -> list[list[int]]:
    """The answers that share each row, by index: best fit, longest first. to: as in `pack`."""
    if not answers:
        return []
    packed = plan(np.array([-(-answer.rows // to) * to for answer in answers]), seq)
    order, starts = packed.order[packed.places].tolist(), packed.starts.tolist()
    return [order[starts[r] : starts[r + 1]] for r in range(packed.rows)]


def pack(
    answers: Sequence[Answer],
    rows: list[list[int]],
    shape: tuple[int, int, int],
    untrained: Sequence[bool],
    to: int = 1,
) -> Packed:
    """Rows of answers as A micro-batches of B rows of S tokens; the last rows may be empty.

    The tokens of answers are trained, the tokens of prompts are not. Positions restart with each sequence,
    and every sequence is a document, so that sequences do not attend to each other.

    Args:
        answers: this reader's answers.
        rows: the indices of the answers in each row (`rows_of`).
        shape: A, B and S.
        untrained: for each answer, whether it is left out of the loss.
        to: sequences begin at multiples of this. The gap after a sequence belongs to its document, and to no
            sequence.
    """
    A, B, S = shape
    assert len(rows) <= A * B
    tokens, documents, positions = (np.zeros((A * B, S), np.int64) for _ in range(3))
    targets, sequences = np.full((A * B, S), IGNORE), np.full((A * B, S), -1)
    drawn = np.zeros((A * B, S), np.float32)
    routes = routes_for(answers, A * B, S)
    numbers: list[list[int]] = [[] for _ in range(A)]
    for r, row in enumerate(rows):
        members = numbers[r // B]
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
            sequences[r, at:end] = len(members)
            members.append(i)
            at = after
    most = max(map(len, numbers))
    padded = np.array([members + [-1] * (most - len(members)) for members in numbers], np.int64).reshape(
        A, most
    )
    five = (torch.from_numpy(t).view(A, B, S) for t in (tokens, targets, documents, positions, sequences))
    return Packed(
        ChatBatch(*five, numbers_AN=torch.from_numpy(padded)),
        torch.from_numpy(drawn).view(A, B, S),
        None if routes is None else rearrange(routes, "y (a b) s k -> a y b s k", a=A),
    )


def routes_for(answers: Sequence[Answer], rows: int, seq: int) -> Tensor | None:
    """A tensor for the routes of all tokens [Y, rows, S, K], filled with -1; None if answers have none."""
    known = [answer.routes for answer in answers if answer.routes is not None]
    if not known:
        return None
    Y, _, K = known[0].shape
    return known[0].new_full((Y, rows, seq, K), -1)


class Step(NamedTuple):
    """A step's answers and everything else that its updates need; the training loop's batch.

    The step's first update fills `old` and `routes`, in the order of the micro-batches.
    """

    packed: Packed
    advantages_N: Tensor
    """fp32: the advantages of this reader's answers"""
    counts: StepCounts
    """counts of the whole step"""
    reference: list[Tensor]
    """for each micro-batch, log-probs of this rank's own tokens by the run's first model; empty without KL"""
    old: list[Tensor]
    """for each micro-batch, log-probs of this rank's own tokens at the first update, if there are several"""
    routes: list[Tensor]
    """for each micro-batch, with --grpo.replay=old: the experts [Y, T, K] of the first update"""
    numbers: Tensor = torch.zeros(0)
    """fp32: the logged numbers of the step as a whole"""

    @property
    def first(self) -> bool:
        """Whether no update of the step has begun."""
        return not (self.old or self.routes)

    @property
    def tokens_ABS(self) -> Tensor:
        return self.packed.batch.tokens_ABS

    @property
    def targets_ABS(self) -> Tensor:
        return self.packed.batch.targets_ABS

    def count(self) -> int:
        """Number of tokens, without padding."""
        return self.packed.batch.count()

    def count_sequences(self) -> int:
        """Number of answers."""
        return self.packed.batch.count_sequences()


class AnswerResult(NamedTuple):
    """The facts of an answer that all ranks know."""

    number: int
    sample: int
    reward: float
    """NaN: the answer has no reward"""
    tokens: int
    truncated: bool


Parts = dict[tuple[int, int], dict[str, float | None]]
"""(number of the prompt, sample) -> the answer's rewards by name, without their weights"""


def routes_of(sample: Sample) -> Tensor:
    """Experts of each token from the prompt's first to the answer's last but one, as sampled [Y, rows, K]."""
    assert sample.routes is not None
    before = [] if sample.prompt_routes is None else [sample.prompt_routes]
    return torch.cat([*before, sample.routes], 1)


def of_groups(told: Sequence[AnswerResult]) -> tuple[Tensor, Tensor]:
    """Rewards of answers, and the numbers of their prompts."""
    rewards = torch.tensor([result.reward for result in told], dtype=torch.float32)
    return rewards, torch.tensor([result.number for result in told], dtype=torch.int64)
