"""Reads the prompts of --task grpo; their order is a pure function of (seed, step).

    {"prompt": "2+3=", "answer": "5"}                                       a text, used as it is
    {"prompt": [{"role": "user", "content": "What is 2+3?"}], ...}          messages, by the chat template

The other fields of a row are for the rewards. Prompt q of draw t of step s is sample
(s * (tries + 1) + t) * prompts + q of an endless, shuffled sequence. So a step has the same prompts in every
layout, and its prompts are found without those of earlier steps.

next: post/grpo.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from tmoe.config.run import Config
from tmoe.data.chat.conversations import listed, parse_given, parse_messages, with_system
from tmoe.data.chat.encoding import Marker, prompt_text
from tmoe.data.chat.held import tell
from tmoe.data.chat.template import ChatTemplate
from tmoe.data.chat.template_choice import Chosen, choose_template, format_of
from tmoe.data.corpus import HeldOut, Split
from tmoe.data.dataset import Dataset, _choose_tokenizer, permute, refused, sources_of
from tmoe.data.row_files import read_rows
from tmoe.data.sources import NAMED, Skips, Splitter, _hash
from tmoe.data.survey import none_in_split, require_rows, survey
from tmoe.data.tokenizer import Carried, DataError, Tokenizer, require_ids, require_vocab

Judge = Callable[[str, dict[str, Any]], None]  # called with a prompt's text and its row
ROW = '{"prompt": a text or a list of messages, and what rewards read, as "answer"}'


class Prompt(NamedTuple):
    """A prompt to answer: its ids, its text and its row."""

    ids: list[int]
    text: str
    """the rendered text whose ids the model reads"""
    row: dict[str, Any]


class RankPrompts(NamedTuple):
    """A rank's prompts of a step, before they are answered."""

    step: torch.Tensor  # number of the step, 0-dim
    numbers_P: torch.Tensor  # numbers of the prompts in the endless sequence, int64


class PromptSource:
    """The prompts of one split of one source."""

    def __init__(self, name: str, prompts: list[Prompt], cfg: Config, taken: str) -> None:
        self.name, self.prompts, self.taken = name, prompts, taken
        self.seq, self.vocab = cfg.train.seq, cfg.model.vocab
        self.samples = len(prompts)
        self.tokens = sum(len(prompt.ids) for prompt in prompts)
        self.predicted = 0  # trained tokens are not known: the step generates the answers


class PromptDataset(Dataset):
    """An endless, randomly accessible sequence of prompts; made by `open_prompts`."""

    sources: list[PromptSource]

    def __init__(
        self,
        cfg: Config,
        sources: list[PromptSource],
        weights: list[int],
        tokenizer: Tokenizer,
        chosen: Chosen,
    ) -> None:
        eos, fingerprint = tokenizer.eos, tokenizer.fingerprint
        seed = cfg.data.seed
        super().__init__(sources, weights, eos=eos, fingerprint=fingerprint, seed=seed)  # pyrefly: ignore
        self.tokenizer = tokenizer
        self.prompts, self.draws = cfg.grpo.prompts, cfg.grpo.resample + 1
        self.template, self.notes = chosen.template.digest, chosen.notes
        prompts = (prompt for source in sources for prompt in source.prompts)
        asked = (listed(prompt.row["prompt"]) for prompt in prompts)
        forms = {"text" if isinstance(prompt, str) else "conversation" for prompt in asked}
        self.chat = format_of(tokenizer, chosen.template, forms, cfg.model.vocab)
        tokenizer.chat = self.chat  # an engine ends answers at the ids that it lists

    def prompt(self, number: int) -> Prompt:
        """Prompt `number` of the endless sequence, from 0."""
        source, epoch, position = self.place(number)
        opened = self.sources[source]
        return opened.prompts[permute(position, opened.samples, f"{self.seed}/{epoch}/{source}")]

    def number(self, step: int, draw: int, place: int) -> int:
        """The number, in the endless sequence, of prompt `place` of a step's draw `draw`, each from 0."""
        return (step * self.draws + draw) * self.prompts + place

    def indices(
        self, step: int, *, batch: int, accumulate: int = 1, rank: int = 0, world: int = 1
    ) -> list[int]:
        """The numbers, in the endless sequence, of the prompts that a rank uses in a step's first draw."""
        return [self.number(step, 0, q) for q in share(self.prompts, rank, world)]

    def batch(
        self, step: int, *, batch: int, accumulate: int = 1, rank: int = 0, world: int = 1
    ) -> RankPrompts:
        numbers = self.indices(step, batch=batch, accumulate=accumulate, rank=rank, world=world)
        return RankPrompts(torch.tensor(step), torch.tensor(numbers, dtype=torch.int64))

    def go_on(self, step: int, tokens: int, **shape: int) -> None:
        """Does nothing, because a step's prompts do not depend on earlier steps."""

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"template": self.template}

    def extent(self, split: str) -> dict[str, Any]:
        return super().extent(split) | {"--data.chat-template": self.template}

    def describe(self) -> str:
        weighted = zip(self.sources, self.weights, strict=True)
        shares = (f"{source.name} {weight / sum(self.weights):.1%}" for source, weight in weighted)
        return f"{self.samples:,} prompts of {self.tokens:,} tokens: {', '.join(shares)}"


def share(count: int, rank: int, world: int) -> range:
    """The indices of a rank's part of `count` items, which need not divide evenly."""
    return range(count * rank // world, count * (rank + 1) // world)


def open_prompts(
    cfg: Config, split: Split, carried: Carried | None = None, judge: Judge = lambda text, row: None
) -> PromptDataset:
    """Opens the sources of `--data.path` as prompts that leave room for an answer in a row of --train.seq.

    Weights are as in `open_data`, but count prompts.
    judge: raises ValueError for a row whose answers cannot be judged.
    DataError for a row that cannot be asked or judged, the same on every rank.
    """
    flag, names, weights = sources_of(cfg.data, split)
    part: Split = "train" if cfg.data.val_path else split  # with --data.val-path no source is divided
    carried = None if cfg.data.new_tokenizer else carried
    tokenizer = _choose_tokenizer(cfg.data.tokenizer, carried)
    require_vocab(tokenizer, cfg.model.vocab, "--data.tokenizer:")
    chosen = choose_template(cfg.data, tokenizer, carried)
    try:
        sources = [_open(cfg, name, part, tokenizer, chosen.template, judge) for name in names]
    except DataError as error:
        raise refused(flag, names, error) from None
    weights = weights or [source.samples for source in sources]
    return PromptDataset(cfg, sources, weights, tokenizer, chosen)


def _open(
    cfg: Config, name: str, split: Split, tokenizer: Tokenizer, template: ChatTemplate, judge: Judge
) -> PromptSource:
    """One source's prompts of a split; prompts that are too long are left out or an error (data.overlong)."""
    source = survey(name, cfg.data.columns)
    require_rows(source, f"of {ROW}")
    skips = Skips(cfg.data.skip_malformed)
    marker = Marker(tokenizer, template)
    left: Counter[str] = Counter()
    rows: list[tuple[str, dict[str, Any], str]] = []
    for path, file in source.files:
        for where, row, error, _ in read_rows(path, file, ""):
            try:
                if error is not None:
                    raise error
                text, lacks = _text(row, where, marker, template)
                try:
                    judge(text, row)
                except ValueError as wrong:
                    raise DataError(f"{where}: {wrong}") from None
                rows.append((where, row, text))
                left.update(lacks)
            except DataError as wrong:
                skips.add(where, wrong)
    if not rows:
        raise DataError(f"{name}: holds no prompts")
    hashes = [_hash(text) for *_, text in rows]
    split_of = Splitter(hashes, HeldOut(*cfg.data.held_out))
    in_split = [row for row, digest in zip(rows, hashes, strict=True) if split_of(digest) == split]
    if not in_split:
        raise DataError(none_in_split(name, f"{len(rows):,} prompts", split))
    limit = cfg.train.seq - cfg.answer_tokens + 1  # an answer's last token is a target only, not an input
    encoded = marker.encode([text for *_, text in in_split])
    prompts, long = [], []
    for (where, row, text), encoding in zip(in_split, encoded, strict=True):
        require_ids(encoding.ids, tokenizer, cfg.model.vocab, where)
        if len(encoding.ids) > limit:
            long.append(where)
        else:
            prompts.append(Prompt(np.asarray(encoding.ids, np.int64).tolist(), text, row))
    sizes = f"--train.seq={cfg.train.seq} leaves after --grpo.max-tokens={cfg.answer_tokens}"
    shown = ", ".join(long[:NAMED])
    if long and cfg.data.overlong == "error":
        raise DataError(f"{name}: {len(long)} prompts are longer than {sizes}: {shown}")
    if not prompts:
        raise DataError(
            f"{name}: its {split} split has no prompt, of {len(in_split)}, that fits in the "
            f"tokens that {sizes}"
        )
    parts = [f"{source.form}, {len(rows):,} prompts, {len(prompts):,} to {split}"]
    if long:
        parts.append(f"{len(long):,} longer than {sizes} left out ({shown})")
    parts += filter(None, [skips.tell(), tell(left, template.source)])
    return PromptSource(name, prompts, cfg, ", ".join(parts))


def _text(row: Any, where: str, marker: Marker, template: ChatTemplate) -> tuple[str, set[str]]:
    """The text of a row that the model reads, and the fields that the template leaves out.

    DataError, which names `where`, for a row without a prompt to answer.
    """
    lacks: set[str] = set()
    prompt = listed(row.get("prompt")) if isinstance(row, dict) else None
    if isinstance(prompt, str) and prompt:
        if row.get("system"):
            raise DataError(f"{where}: system: a prompt that is text has no place for it; give messages")
        text = prompt if prompt.startswith(marker.opening) else marker.opening + prompt
    elif isinstance(prompt, list) and prompt:
        messages = with_system(row, parse_messages(prompt, f"{where}: prompt"), where)
        if messages[-1]["role"] == "assistant":
            raise DataError(f"{where}: prompt: ends with a turn of the assistant, so it asks nothing")
        tools, more = parse_given(row, where)
        try:
            text, lacks = prompt_text(messages, marker, template, tools, more)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
    else:
        fields = ", ".join(list(map(str, row))[:12]) if isinstance(row, dict) else type(row).__name__
        given = f", its prompt is {prompt!r}" if isinstance(row, dict) and "prompt" in row else ""
        raise DataError(f"{where}: needs {ROW}; here is {fields or 'none'}{given}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        bad = f"{text[error.start]!r} at {error.start}"
        raise DataError(f"{where}: prompt: is no Unicode text: {bad}, {error.reason}") from None
    return text, lacks
