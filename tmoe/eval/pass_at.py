"""pass@k: the probability that one of k answers to a prompt is right by a reward, without bias.

next: post/estimates.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tmoe.config.check import ConfigError, Setting, require, spelt
from tmoe.data.chat.conversations import parse_given, parse_messages, with_system
from tmoe.data.chat.encoding import Marker, prompt_text, turn_ends
from tmoe.data.tokenizer import DataError
from tmoe.eval.evaluator import Evaluator
from tmoe.eval.flags import Flags
from tmoe.eval.store import key_of
from tmoe.generate.prompt_file import is_chat, read_prompts
from tmoe.generate.sampler import Sampling
from tmoe.post.estimates import estimates
from tmoe.post.rewards import Rewards, RewardSample

PART = 1024  # answers whose rewards are computed and kept together


class Question(NamedTuple):
    """A prompt: its row, the text that the model reads, its tokens, and whether it is a conversation."""

    row: dict[str, Any]
    text: str
    ids: list[int]
    chat: bool


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of prompts. A prompt that is a list, as in GRPO's data, is a conversation."""
    if path.suffix != ".jsonl" or not path.is_file():
        return read_prompts(path)
    lines = []
    for line in path.read_text("utf-8-sig", "surrogateescape").split("\n"):
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            return read_prompts(path)  # it names the line
        if isinstance(row, dict) and isinstance(row.get("prompt"), list):
            row = {"messages": row["prompt"]} | row
        lines += [row] if row is not None else []
    chats = [isinstance(row, dict) and is_chat(row) for row in lines]
    return lines if lines and all(chats) else read_prompts(path)


def questions(evaluator: Evaluator, rows: Sequence[dict[str, Any]], flags: Flags) -> list[Question]:
    """The prompts as the model reads them. ConfigError for flags that only conversations use, without one."""
    chat, system = flags.chat, flags.system
    template, engine = evaluator.template, evaluator.worker.engine
    marker = Marker(evaluator.loaded.tokenizer, template)
    before = [dict(role="system", content=system)] if system else []
    chats = chat or any(map(is_chat, rows)) or not rows
    for name in ("system", "chat_template"):
        value = getattr(flags, name)
        no_chat = f"{Setting('file', flags.file)} has no conversations"
        require(
            not value or chats or bool(flags.tasks),
            name,
            value,
            no_chat,
            f"with {Setting('chat')}, or rows with messages",
        )
    found = []
    for number, row in enumerate(rows):
        try:
            if not (chat or is_chat(row)):
                found.append(Question(row, row["prompt"], engine.ids_of(number, row["prompt"]), False))
                continue
            said = row["messages"] if is_chat(row) else [dict(role="user", content=row["prompt"])]
            messages = with_system(row, parse_messages(said, "messages"), "row")
            messages = parse_messages([*before, *messages], "messages")
            text, _ = prompt_text(messages, marker, template, *parse_given(row, "row"))
            ids = engine.ids_of(number, marker.encode([text])[0].ids.tolist())
            found.append(Question(row, text, ids, True))
        except ValueError as error:
            raise ConfigError(f"{Setting('file')}: prompt {number + 1}: {error}") from None
    return found


def rewards_of(words: Sequence[str], workers: int, timeout_s: float, code: bool) -> Rewards:
    """The rewards that --rewards names."""
    try:
        return Rewards(words, workers=workers, timeout_s=timeout_s, code=code)
    except ConfigError as error:
        raise ConfigError(_ours(error)) from None


def _ours(error: Exception) -> str:
    """An error of the rewards, whose settings have other names in GRPO."""
    text = spelt(error.text, "flag") if isinstance(error, ConfigError) else str(error)
    return text.replace("--grpo.rewards", "--rewards").replace("--grpo.code", "--code")


class Counts(NamedTuple):
    """The numbers k of pass@k, the answers to each prompt, and the least reward of a right answer."""

    ks: Sequence[int]
    n: int
    right: float


def evaluate(
    evaluator: Evaluator, asked: Sequence[Question], counts: Counts, sampling: Sampling, rewards: Rewards
) -> dict[str, Any]:
    """pass@k, mean@n and the share of answers cut off; under "samples" every answer with its rewards.

    ConfigError if no answer has a reward.
    """
    ks, n, right = counts
    for number, one in enumerate(asked):
        try:
            rewards.require_row(one.text, one.row)
        except ValueError as error:
            raise ConfigError(f"{Setting('file')}: prompt {number + 1}: {_ours(error)}") from None
    answers = _answers(evaluator, asked, n, sampling)
    samples = [
        RewardSample(one.text, text, one.row, finish, len(ids), 0, number, sample)
        for number, (one, several) in enumerate(zip(asked, answers, strict=True))
        for sample, (ids, finish, text) in enumerate(several)
    ]
    values, parts, faults = _rewards(evaluator, samples, rewards)
    known = [value for value in values if value is not None]
    reasons = ", ".join(f"{kind}, {count} times" for kind, count in faults.items())
    words = " ".join(term.word for term in rewards.terms)
    require(len(known) > 0, "rewards", words, f"none of {len(values)} answers has a reward ({reasons})")
    numbers, finishes = [sample.number for sample in samples], [sample.finish for sample in samples]
    kept = [
        dict(prompt=sample.number, sample=sample.sample, answer=sample.answer, finish=sample.finish)
        | dict(tokens=sample.tokens, reward=value, parts=part)
        for sample, value, part in zip(samples, values, parts, strict=True)
    ]
    told = dict(prompts=len(asked), n=n, right=right, faults=faults)
    told["without_reward"] = len(values) - len(known)
    return estimates(numbers, values, finishes, ks, right) | told | dict(samples=kept)


def _answers(evaluator: Evaluator, asked: Sequence[Question], n: int, sampling: Sampling) -> list[list[Any]]:
    """n answers to each question. An answer in a conversation ends with its turn, too."""
    found: list[list[Any]] = [[] for _ in asked]
    for chat in (False, True):
        mine = [i for i, one in enumerate(asked) if one.chat == chat]
        how = sampling
        if chat and mine:
            try:
                ends = turn_ends(evaluator.loaded.tokenizer, evaluator.template)
                how = replace(sampling, stop_ids=ends)
            except DataError as error:
                evaluator.worker.say(f"{error}: answers end at the tokenizer's eos alone")
        made = evaluator.answer([asked[i].ids for i in mine], n, how, mine) if mine else []
        for i, several in zip(mine, made, strict=True):
            found[i] = several
    return found


def _rewards(
    evaluator: Evaluator, samples: Sequence[RewardSample], rewards: Rewards
) -> tuple[list[float | None], list[dict[str, float | None]], dict[str, int]]:
    """The reward of each sample, its parts, and all faults. Rewards without a fault are kept, and read."""
    values: list[float | None] = []
    parts: list[dict[str, float | None]] = []
    faults: dict[str, int] = {}
    terms = [(term.word, term.source) for term in rewards.terms]
    store = evaluator.store
    for first in range(0, len(samples), PART):
        some = samples[first : first + PART]
        key = key_of("rewards", terms, [sample._asdict() for sample in some])
        result: Any = store.known.get(key)
        if result is None:
            scores = rewards.score(some)
            by_sample = [{name: part[i] for name, part in scores.parts.items()} for i in range(len(some))]
            result = [scores.rewards, by_sample, scores.faults]
            if not scores.faults:  # a fault may be one of the machine, or of a short --reward-timeout
                store.add(key, result)
        own, by_sample, found = result
        values += own
        parts += by_sample
        faults |= {name: faults.get(name, 0) + count for name, count in found.items()}
    return values, parts, faults
