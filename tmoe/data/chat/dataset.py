"""Batches of packed conversations or preferences, with the interface of pretraining's data.

    data = open_chat(cfg.data, cfg.train.seq, cfg.model.vocab, "train", "sft", carried)    a ChatDataset
    with Loader(data, start_step=step, batch=B, accumulate=A, rank=reader, world=readers) as batches:
        batch = next(batches)                                                              a ChatBatch
        for micro in batch.micros(device, True):                                           as in pretraining

A ChatDataset is a Dataset: indices, batch(step, ...), go_on, facts, extent, describe, sources, fingerprint.
Its samples are packed rows. So the position in the data is the step and the tokens of the steps before it,
and a step has the same rows in every layout. `counts` has numbers for the log, and each source's `taken` says
what it was taken for. "preference" instead of "sft" gives pairs: see ChatBatch. "kto" gives single answers.

What text becomes is kept, under hashes, where tokens of large sources are kept (data/sources.py).

next: data/chat/packing.py
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jinja2
import numpy as np
import tokenizers
from rich.filesize import decimal
from safetensors.numpy import load_file, save_file

from tmoe.config.run import DataConfig
from tmoe.data.chat.batch import ChatBatch, batch_of
from tmoe.data.chat.choice import Chosen, choose_template, format_of
from tmoe.data.chat.encoding import Encoder, Tokens
from tmoe.data.chat.held import NULLS, tell
from tmoe.data.chat.packing import plan
from tmoe.data.chat.rows import KINDS, Kind, Plain, Row, kind_of, parse_row
from tmoe.data.chat.template import ChatTemplate
from tmoe.data.chat.unpaired import without_label
from tmoe.data.corpus import HeldOut, Split
from tmoe.data.dataset import Dataset, _choose_tokenizer, refused, sources_of
from tmoe.data.rows import read_rows
from tmoe.data.shards import _publish
from tmoe.data.sources import (
    NAMED,
    Skips,
    Splitter,
    Survey,
    _hash,
    made_once,
    none_in_split,
    require_rows,
    survey,
)
from tmoe.data.tokenizer import Carried, DataError, Tokenizer, require_ids, require_vocab

ChatTask = Literal["sft", "preference", "kto"]
# Kinds of rows that each task trains on; others are named with the task that does.
TRAINS_ON: dict[ChatTask, tuple[Kind, ...]] = dict(
    sft=("messages", "conversations", "prompt/completion"),
    preference=("preference",),
    kto=("prompt/completion", "preference"),
)
CHUNK = 256  # rows that are encoded together
TOLD = 1_000_000  # bytes of a source above which its tokenising is announced
VERSION = 8  # of what is kept
SPLITS: tuple[Split, ...] = ("train", "val", "test")


class Counts(NamedTuple):
    """What became of a source's rows, or of all sources'."""

    rows: int
    """that were read, malformed ones not among them"""
    sequences: int
    """to train on in this split, a preference's two counted both"""
    tokens: int
    """of these"""
    trained: int
    """of these, tokens that are predicted"""
    truncated: int
    """sequences cut to fit"""
    dropped: int
    """rows of this split left out because they are too long"""
    skipped: int
    """malformed rows left out"""


class ChatSource:
    """One split of one source: its sequences, mapped, and how they are packed into rows."""

    def __init__(
        self,
        name: str,
        made: Path,
        seq: int,
        split: Split,
        cfg: DataConfig,
        told: str,
        pairs: bool,
    ) -> None:
        self.name = name
        self.seq = seq
        facts = json.loads((made / "facts.json").read_text())
        # views, for a slice of a memmap costs several times as much as one of an array
        self.ids = np.memmap(made / "ids.bin", facts["dtype"], "r").view(np.ndarray)
        self.trained = np.memmap(made / "trained.bin", np.bool_, "r").view(np.ndarray)
        kept = load_file(made / "sequences.safetensors")
        self.starts = kept["starts"]
        self.lengths = np.diff(self.starts)
        self.firsts = kept["firsts"]
        """of each sequence: its first trained token"""
        self.desirable = kept.get("desirable", np.zeros(0, np.bool_))
        """of --preference.loss kto: whether each sequence's answer is a good one"""
        self._files = facts["files"]
        self.forms: set[str] = set(facts["forms"])
        """of its rows: "conversation", "text" """
        self._places = kept["places"]
        self.rows = kept["rows"]
        self.of_unit = 2 if pairs else 1
        """sequences that stay together"""

        units = np.flatnonzero((kept["splits"] == SPLITS.index(split))[:: self.of_unit])
        if not len(units):
            raise DataError(none_in_split(name, "rows", split))
        self.units, cut, dropped = self._fit(
            units, kept["firsts"], cfg.overlong, cfg.skip_malformed - facts["skipped"]
        )
        if not len(self.units):
            raise DataError(
                f"{name}: no row of its {split} split is left to train on, of {len(units)}; raise "
                f"--train.seq={seq}, change --data.val-fraction, or give more data"
            )
        self.plan = plan(self._of_units(self.lengths)[self.units].sum(1), seq)
        self.samples = self.plan.rows
        mine = self._of_units(np.arange(len(self.lengths)))[self.units].ravel()
        self.tokens = int(self.lengths[mine].sum())
        trained = kept["counts"][mine].sum()
        if cut.any():
            trained = sum(int(self.sequence(i)[1][1:].sum()) for i in mine)
        self.predicted = int(trained)
        self.counts = Counts(
            facts["rows"],
            len(mine),
            self.tokens,
            self.predicted,
            int(cut[mine].sum()),
            dropped,
            facts["skipped"],
        )
        self.taken = self._tell(told, facts)

    def _of_units(self, values: np.ndarray) -> np.ndarray:
        """[units, 1], or [units, 2] of preferences."""
        return values.reshape(-1, self.of_unit)

    def _fit(
        self, units: np.ndarray, firsts: np.ndarray, overlong: str, skip: int
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """The units that fit into a row, which sequences are cut for it, and how many units are left out.

        Cut lengths are set in `lengths`. skip: how many pairs may be left out as equal once they are cut.
        """
        lengths = self._of_units(self.lengths)
        long = units[lengths[units].sum(1) > self.seq]
        cut = np.zeros(len(self.lengths), bool)
        self.examples = self._examples(long)
        if overlong == "error" and long.size:
            raise DataError(
                f"{self.name}: {len(long)} rows are longer than --train.seq={self.seq}: {self.examples}; "
                "raise it, or say --data.overlong drop or truncate"
            )
        if overlong == "truncate":
            for unit in long.tolist():
                mine = range(unit * self.of_unit, (unit + 1) * self.of_unit)
                # Half the row for each of two, and what the shorter one leaves.
                share = self.seq // self.of_unit
                for i in mine:
                    others = sum(int(self.lengths[j]) for j in mine if j != i)
                    most = max(share, self.seq - others) if self.of_unit == 2 else self.seq
                    cut[i] = self.lengths[i] > most
                    self.lengths[i] = min(int(self.lengths[i]), most)
        lost = (lengths[long].sum(1) > self.seq) | (self._of_units(firsts)[long] >= lengths[long]).any(1)
        equal = long[self._equal_cut(long) & ~lost]
        if len(equal) > skip:
            raise DataError(
                f"{self.name}: {len(equal)} pairs are equal once cut to --train.seq={self.seq}, so no answer "
                f"is preferred: {self._examples(equal)}; raise it, say --data.overlong drop, or leave them "
                f"out by --data.skip-malformed {len(equal)}"
            )
        self.equal = self._examples(equal)
        left = np.setdiff1d(units, [*long[lost], *equal], assume_unique=True)
        return left, cut, int(lost.sum())

    def _equal_cut(self, long: np.ndarray) -> np.ndarray:
        """[long] bool: whether the two sequences of a pair are equal in their cut lengths."""
        if self.of_unit == 1:
            return np.zeros(len(long), bool)
        both = ([Tokens(*self.sequence(2 * int(unit) + i)) for i in range(2)] for unit in long)
        return np.array([_equal(*pair) for pair in both], bool)

    def _tell(self, told: str, facts: dict[str, Any]) -> str:
        """What the source was taken for, and what became of its rows."""
        c = self.counts
        parts = [told, f"{c.rows:,} rows"]
        sequences = len(self.lengths)
        if sequences != c.rows * self.of_unit:
            parts.append(
                f"of which the template made {sequences:,} sequences, as it renders earlier turns differently"
            )
        parts.append(f"trained {c.trained / max(c.tokens, 1):.1%} of the tokens")
        parts.append(f"packed to {c.tokens / (self.samples * self.seq):.1%}")
        long = f"longer than --train.seq={self.seq}"
        if c.dropped:
            parts.append(f"{c.dropped:,} rows {long} left out ({self.examples})")
        if c.truncated:
            parts.append(f"{c.truncated:,} sequences {long} cut")
        if self.equal:
            parts.append(f"pairs that are equal once cut left out: {self.equal}")
        return ", ".join([*parts, *filter(None, [facts["malformed"], facts["left"]])])

    def _examples(self, units: np.ndarray) -> str:
        return ", ".join(self.where(int(unit) * self.of_unit) for unit in units[:NAMED])

    def where(self, sequence: int) -> str:
        """File and line, or row, of a sequence."""
        file, line = self._places[self.rows[sequence]]
        path, by_line = self._files[file]
        return f"{path}:{line}" if by_line else f"{path}: row {line}"

    def sequence(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a sequence, and which are trained."""
        part = slice(self.starts[i], self.starts[i] + self.lengths[i])
        return self.ids[part], self.trained[part]

    def row(self, position: int, epoch: int, key: str) -> list[int]:
        """The sequences of a packed row of an epoch, in their order."""
        units = self.units[self.plan.row(position, epoch, key)]
        return [int(unit) * self.of_unit + i for unit in units for i in range(self.of_unit)]


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
        """of all sources and both splits: numbers in ChatBatch.numbers_AN are below it"""
        self.bases = bases

    @property
    def counts(self) -> Counts:
        counts = np.array([source.counts for source in self.sources])
        return Counts(*counts.sum(0).tolist())

    def row(self, index: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Number, ids and trained of each sequence of global sample `index`."""
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

    Each has rows of one kind (data/chat/rows.py): for "sft" conversations or prompts with answers, for
    "preference" preferences, for "kto" prompts with answers and labels, or preferences taken apart.
    Weights as in `open_data`, in packed rows. carried: as there.
    DataError for anything that cannot be trained on, the same on every rank.
    """
    part: Split = "train" if cfg.val_path else split  # of sources, where validation has its own
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


def first_row(source: Survey) -> tuple[Kind, dict]:
    """What a source's rows are, and the first one. DataError where they are nothing to train a chat on."""
    valid = f"with fields for {KINDS}"
    require_rows(source, valid)
    wrong: DataError | None = None
    for _, first, error, _ in (one for path, found in source.files for one in read_rows(path, found, "")):
        if isinstance(first, dict):
            break
        wrong = wrong or error
    else:
        raise wrong or DataError(f"{source.name}: holds no rows; valid: rows {valid}")
    kind = kind_of(first)
    if kind is None:
        fields = [f"{name}{' (null)' * (value is None)}" for name, value in first.items()]
        shown = ", ".join(fields[:12]) or "none"
        more = "; --data.columns OURS=THEIRS names others"
        raise DataError(f"{source.name}: its fields are: {shown}; valid: rows {valid}{more}")
    return kind, first


def _equal(one: Tokens, other: Tokens) -> bool:
    return np.array_equal(one.ids, other.ids) and np.array_equal(one.trained, other.trained)


class _Rows:
    """One source of chat rows, about to be tokenised."""

    def __init__(
        self, source: Survey, task: ChatTask, tokenizer: Tokenizer, template: ChatTemplate, cfg: DataConfig
    ) -> None:
        self.source = source
        self.task = task
        self.tokenizer = tokenizer
        self.template = template
        self.cfg = cfg
        self.kind = self._kind()

    def _kind(self) -> Kind:
        """What the source's rows are, by the first one. DataError where the task does not train on such."""
        name = self.source.name
        kind, _ = first_row(self.source)
        if kind not in TRAINS_ON[self.task]:
            other = "preference" if kind == "preference" else "sft"
            flags = "preference --preference.loss kto" if self.task == "kto" else self.task
            raise DataError(f"{name}: rows of {kind}, which --task {other} trains on, not --task {flags}")
        return kind

    def open(self, seq: int, split: Split) -> ChatSource:
        made = made_once(f"chat-{self._key()}", self._make)
        count = len(self.source.files)
        files = f" in {count} files" if count > 1 else ""
        told = f"{self.source.form} of {self.kind}{files}, {self.template.source}"
        pairs = self.kind == "preference" and self.task == "preference"
        return ChatSource(self.source.name, made, seq, split, self.cfg, told, pairs)

    def _key(self) -> str:
        """Changes when a file, tokenizer, template or a setting changes that decides about tokens."""
        stats = [(str(path.resolve()), path.stat()) for path, _ in self.source.files]
        told = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        task = self.task == "kto"
        settings = [self.kind, task, self.cfg.held_out, self.cfg.skip_malformed, self.source.columns]
        model = [self.tokenizer.fingerprint, self.tokenizer.eos, self.template.digest]
        libraries = [VERSION, tokenizers.__version__, jinja2.__version__]
        return hashlib.sha256(json.dumps([*libraries, *model, *settings, told]).encode()).hexdigest()[:32]

    def _make(self, made: Path) -> None:
        """Tokenise the source into the folder `made`."""
        size = sum(path.stat().st_size for path, _ in self.source.files)
        if size > TOLD:
            told = (
                f"{self.source.name}: {decimal(size)} of chat rows, tokenised once for this node, into {made}"
            )
            print(told, file=sys.stderr, flush=True)
        skips = Skips(self.cfg.skip_malformed)
        encoder = Encoder(self.tokenizer, self.template)
        starts, firsts, counts, rows, places = (array("q", [0] * (i == 0)) for i in range(5))
        hashes, desirable = array("Q"), array("b")
        left: Counter[str] = Counter()
        forms: set[str] = set()
        unread: set[str] = set()
        dtype = np.min_scalar_type(self.tokenizer.vocab - 1)
        with _publish(made) as folder:
            with (folder / "ids.bin").open("wb") as ids, (folder / "trained.bin").open("wb") as trained:
                for place, row, sequences, lacks in self._encoded(encoder, skips):
                    left.update(lacks)
                    for number, one in enumerate(sequences):
                        ids.write(one.ids.astype(dtype).tobytes())
                        trained.write(one.trained.tobytes())
                        starts.append(starts[-1] + len(one.ids))
                        firsts.append(int(np.flatnonzero(one.trained[1:])[0]) + 1)
                        counts.append(int(one.trained[1:].sum()))
                        rows.append(len(hashes))
                        # a pair is taken apart: its first answer is the good one
                        desirable.append(number == 0 if row.desirable is None else row.desirable)
                    hashes.append(_hash(row.key))
                    unread |= {*row.unread}
                    forms |= {"text" if isinstance(one, Plain) else "conversation" for one in row.samples}
                    places.extend(place)
            if not hashes:
                raise DataError(f"{self.source.name}: holds no rows to train on")
            shares = np.array(hashes, np.uint64).tolist()
            split_of = Splitter(shares, HeldOut(*self.cfg.held_out))
            splits = np.array([SPLITS.index(split_of(one)) for one in shares], np.uint8)
            kept = dict(
                starts=np.array(starts),
                firsts=np.array(firsts),
                counts=np.array(counts),
                rows=np.array(rows),
                places=np.array(places).reshape(-1, 2),
                splits=splits[np.array(rows)],
            )
            if self.task == "kto":
                kept["desirable"] = np.array(desirable, np.bool_)
            save_file(kept, folder / "sequences.safetensors")
            facts = dict(
                dtype=str(dtype),
                forms=sorted(forms),
                rows=len(hashes),
                skipped=len(skips.found),
                malformed=skips.tell(),
                left=tell(left, self.template.source, unread),
                files=[(str(path), found.form == "JSON lines") for path, found in self.source.files],
            )
            (folder / "facts.json").write_text(json.dumps(facts))

    def _encoded(
        self, encoder: Encoder, skips: Skips
    ) -> Iterator[tuple[tuple[int, int], Row, list[Tokens], set[str]]]:
        """Of every row that can be trained on: file and line, row, sequences, and fields that it loses.

        `skips` takes the others.
        """
        for chunk in self._chunks(skips):
            samples = [sample for _, _, row in chunk for sample in row.samples]
            encoded = iter(zip(encoder.encode(samples), encoder.left, strict=True))
            for where, place, row in chunk:
                found, lost = zip(*(next(encoded) for _ in row.samples), strict=True)
                lacks = set().union(*lost) | ({NULLS} if row.nulls else set())
                failed = next((one for one in found if isinstance(one, DataError)), None)
                sequences = [s for one in found if not isinstance(one, DataError) for s in one]
                whole = len(sequences) == len(row.samples) or self.task == "sft"
                if failed is None and not whole:
                    failed = DataError(
                        "an answer of several turns, of which the template renders earlier ones in "
                        "another way than the last; only the last can be learned: split it"
                    )
                if failed is None and self.kind == "preference" and _equal(*sequences):
                    failed = DataError(
                        "chosen and rejected are equal as the template shows them, so neither is preferred"
                    )
                if failed is not None:
                    skips.add(where, DataError(f"{where}: {failed}"))
                else:
                    yield place, row, sequences, lacks

    def _chunks(self, skips: Skips) -> Iterator[list[tuple[str, tuple[int, int], Row]]]:
        """Parsed rows, CHUNK at a time, each with where it is."""
        chunk = []
        for number, (path, found) in enumerate(self.source.files):
            for where, value, error, _ in read_rows(path, found, ""):
                try:
                    if error is not None:
                        raise error
                    desirable = None
                    if self.task == "kto" and self.kind == "prompt/completion":
                        value, desirable = without_label(value, where)
                    row = parse_row(value, where, self.kind, found.form == "parquet")
                    row = row._replace(desirable=desirable)
                except DataError as wrong:
                    skips.add(where, wrong)
                    continue
                line = int(where.rpartition(":")[2].removeprefix(" row "))
                chunk.append((where, (number, line), row))
                if len(chunk) == CHUNK:
                    yield chunk
                    chunk = []
        if chunk:
            yield chunk
