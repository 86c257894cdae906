"""Makes batches of packed conversations or preferences, with the interface of pretraining's data.

    data = open_chat(cfg.data, cfg.train.seq, cfg.model.vocab, "train", "sft", carried)    a ChatDataset
    with Loader(data, start_step=step, batch=B, accumulate=A, rank=reader, world=readers) as batches:
        batch = next(batches)                                                              a ChatBatch
        for micro in batch.micros(device, True):                                           as in pretraining

A ChatDataset is a Dataset: indices, batch(step, ...), go_on, facts, extent, describe, sources, fingerprint.
Its samples are packed rows. So the position in the data is given by the step and the tokens of the steps
before it, and a step has the same rows in every layout. `counts` has numbers for the log, and each source's
`taken` states how the source was read. The task "preference" instead of "sft" makes pairs (see ChatBatch),
and "kto" makes single answers.

next: data/chat/tokenise.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tmoe.config.run import DataConfig
from tmoe.data.chat.batch import ChatBatch, batch_of
from tmoe.data.chat.source import ChatSource, RowCounts
from tmoe.data.chat.template_choice import Chosen, choose_template, format_of
from tmoe.data.chat.tokenise import ChatTask, _Rows
from tmoe.data.corpus import Split
from tmoe.data.dataset import Dataset, _choose_tokenizer, refused, sources_of
from tmoe.data.survey import survey
from tmoe.data.tokenizer import Carried, DataError, Tokenizer, require_ids, require_vocab


class ChatDataset(Dataset):
    """An endless, randomly accessible sequence of packed rows, mixed from sources; made by `open_chat`."""

    sources: list[ChatSource]

    def __init__(
        self,
        sources: list[ChatSource],
        weights: list[int],
        tokenizer: Tokenizer,
        vocab: int,
        seed: int,
        chosen: Chosen,
    ) -> None:
        for source in sources:
            source.vocab = vocab
        eos, fingerprint = tokenizer.eos, tokenizer.fingerprint
        super().__init__(sources, weights, eos=eos, fingerprint=fingerprint, seed=seed)  # pyrefly: ignore
        self.tokenizer = tokenizer
        self.template, self.notes = chosen
        forms = set().union(*(source.forms for source in sources))
        self.chat = format_of(tokenizer, self.template, forms, vocab)
        bases = np.cumsum([0, *(len(source.lengths) for source in sources)]).tolist()
        self.sequences: int = bases.pop()
        """sequences of all sources and all splits; the numbers in ChatBatch.numbers_AN are below it"""
        self.bases = bases

    @property
    def counts(self) -> RowCounts:
        counts = np.array([source.counts for source in self.sources])
        return RowCounts(*counts.sum(0).tolist())

    def row(self, index: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Number, ids and trained mask of each sequence of global sample `index`."""
        number, epoch, position = self.place(index)
        source = self.sources[number]
        sequences = source.row(position, epoch, f"{self.seed}/{number}")
        return [(self.bases[number] + i, *source.sequence(i)) for i in sequences]

    def batch(
        self, step: int, *, batch: int, accumulate: int = 1, rank: int = 0, world: int = 1
    ) -> ChatBatch:
        """The packed rows of `indices`, in their order."""
        wanted = self.indices(step, batch=batch, accumulate=accumulate, rank=rank, world=world)
        return batch_of([self.row(index) for index in wanted], (accumulate, batch, self.seq))

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"template": self.template.digest}

    def extent(self, split: str) -> dict[str, Any]:
        more = {f"--data.path: trained tokens of the {split} data": self.counts.trained}
        return super().extent(split) | more | {"--data.chat-template": self.template.digest}

    def describe(self) -> str:
        c = self.counts
        return f"{super().describe()}; {c.sequences:,} sequences, {c.trained:,} tokens of them trained"


def open_chat(
    cfg: DataConfig, seq: int, vocab: int, split: Split, task: ChatTask, carried: Carried | None = None
) -> ChatDataset:
    """Opens the sources of `--data.path` as chat data for rows of seq tokens.

    Each source has rows of one kind (data/chat/conversations.py): for "sft" conversations or prompts with
    answers, for "preference" preferences, for "kto" prompts with answers and labels, or preferences, which
    are split into two answers each. Weights are as in `open_data`, but count packed rows.
    carried: the tokenizer of the model that the run starts from, as in `open_data`.
    DataError for anything that cannot be trained on, the same on every rank.
    """
    part: Split = "train" if cfg.val_path else split  # with --data.val-path no source is divided
    flag, names, weights = sources_of(cfg, split)
    carried = None if cfg.new_tokenizer else carried
    tokenizer = _choose_tokenizer(cfg.tokenizer, carried)
    require_vocab(tokenizer, vocab, "--data.tokenizer:")
    if carried:
        carried.require("--data.tokenizer", tokenizer.fingerprint)
    chosen = choose_template(cfg, tokenizer, carried)
    template = chosen.template
    try:
        sources = [
            _Rows(survey(name, cfg.columns), task, tokenizer, template, cfg).open(seq, part) for name in names
        ]
        for source in sources:
            require_ids(source.ids, tokenizer, vocab, source.name)
    except DataError as error:
        raise refused(flag, names, error) from None
    weights = weights or [source.samples for source in sources]
    return ChatDataset(sources, weights, tokenizer, vocab, cfg.seed, chosen)
