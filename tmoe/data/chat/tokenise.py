"""Turns a source of chat rows into files of tokens, once for all processes of a node.

The files are kept under hashed names in the folder that also holds the tokens of large texts
(data/sources.py).

next: data/chat/encoding.py, data/chat/source.py
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import jinja2
import numpy as np
import tokenizers
from rich.filesize import decimal
from safetensors.numpy import save_file

from tmoe.config.run import DataConfig
from tmoe.data.chat.conversations import KINDS, ChatRow, Kind, Plain, kind_of, parse_row
from tmoe.data.chat.encoding import Encoder, Tokens
from tmoe.data.chat.held import NULLS, tell
from tmoe.data.chat.source import SPLITS, ChatSource, _equal
from tmoe.data.chat.template import ChatTemplate
from tmoe.data.chat.unpaired import without_label
from tmoe.data.corpus import HeldOut, Split
from tmoe.data.row_files import read_rows
from tmoe.data.shards import _publish
from tmoe.data.sources import Skips, Splitter, _hash, made_once
from tmoe.data.survey import Survey, require_rows
from tmoe.data.tokenizer import DataError, Tokenizer

ChatTask = Literal["sft", "preference", "kto"]
# Kinds of rows that each task trains on. The error for another kind names the task that trains on it.
TRAINS_ON: dict[ChatTask, tuple[Kind, ...]] = dict(
    sft=("messages", "conversations", "prompt/completion", "instruction"),
    preference=("preference",),
    kto=("prompt/completion", "preference"),
)
CHUNK = 256  # rows that are encoded together
TOLD = 1_000_000  # bytes of a source above which its tokenising is announced
VERSION = 9  # version of the files that are kept


def first_row(source: Survey) -> tuple[Kind, dict]:
    """The kind of a source's rows, and its first row. DataError if they are not chat rows."""
    valid = f"with fields for {KINDS}"
    require_rows(source, valid)
    wrong: DataError | None = None
    for _, first, error, _ in (row for path, file in source.files for row in read_rows(path, file, "")):
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


def _template_of(forms: list[str], source: str) -> str:
    """The template of rows in words. forms: "conversation" if it rendered rows, "text" for rows of texts."""
    if "conversation" not in forms:
        return "texts without a chat template"
    return f"{source}, but rows of texts without it" if "text" in forms else source


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
        """The kind of the source's rows, by its first row. DataError if the task does not train on it."""
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
        forms = json.loads((made / "facts.json").read_text())["forms"]
        origin = f"{self.source.form} of {self.kind}{files}, {_template_of(forms, self.template.source)}"
        pairs = self.kind == "preference" and self.task == "preference"
        return ChatSource(self.source.name, made, seq, split, self.cfg, origin, pairs)

    def _key(self) -> str:
        """Name of the kept files; it changes with source files, tokenizer, template and relevant settings."""
        stats = [(str(path.resolve()), path.stat()) for path, _ in self.source.files]
        stamps = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        task = self.task == "kto"
        settings = [self.kind, task, self.cfg.held_out, self.cfg.skip_malformed, self.source.columns]
        model = [self.tokenizer.fingerprint, self.tokenizer.eos, self.template.digest]
        libraries = [VERSION, tokenizers.__version__, jinja2.__version__]
        return hashlib.sha256(json.dumps([*libraries, *model, *settings, stamps]).encode()).hexdigest()[:32]

    def _make(self, made: Path) -> None:
        """Tokenises the source into the folder `made`."""
        size = sum(path.stat().st_size for path, _ in self.source.files)
        if size > TOLD:
            note = (
                f"{self.source.name}: {decimal(size)} of chat rows, tokenised once for this node, into {made}"
            )
            print(note, file=sys.stderr, flush=True)
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
                    for number, sequence in enumerate(sequences):
                        ids.write(sequence.ids.astype(dtype).tobytes())
                        trained.write(sequence.trained.tobytes())
                        starts.append(starts[-1] + len(sequence.ids))
                        firsts.append(int(np.flatnonzero(sequence.trained[1:])[0]) + 1)
                        counts.append(int(sequence.trained[1:].sum()))
                        rows.append(len(hashes))
                        # a pair becomes two answers, the first of which is the good one
                        desirable.append(number == 0 if row.desirable is None else row.desirable)
                    hashes.append(_hash(row.key))
                    unread |= {*row.unread}
                    forms |= {
                        "text" if isinstance(sample, Plain) else "conversation" for sample in row.samples
                    }
                    places.extend(place)
            if not hashes:
                raise DataError(f"{self.source.name}: holds no rows to train on")
            shares = np.array(hashes, np.uint64).tolist()
            split_of = Splitter(shares, HeldOut(*self.cfg.held_out))
            splits = np.array([SPLITS.index(split_of(share)) for share in shares], np.uint8)
            arrays = dict(
                starts=np.array(starts),
                firsts=np.array(firsts),
                counts=np.array(counts),
                rows=np.array(rows),
                places=np.array(places).reshape(-1, 2),
                splits=splits[np.array(rows)],
            )
            if self.task == "kto":
                arrays["desirable"] = np.array(desirable, np.bool_)
            save_file(arrays, folder / "sequences.safetensors")
            facts = dict(
                dtype=str(dtype),
                forms=sorted(forms),
                rows=len(hashes),
                skipped=len(skips.found),
                malformed=skips.tell(),
                left=tell(left, self.template.source, unread),
                files=[(str(path), file.form == "JSON lines") for path, file in self.source.files],
            )
            (folder / "facts.json").write_text(json.dumps(facts))

    def _encoded(
        self, encoder: Encoder, skips: Skips
    ) -> Iterator[tuple[tuple[int, int], ChatRow, list[Tokens], set[str]]]:
        """For every row that can be trained on: (file, line), the row, its sequences, and fields left out.

        Other rows are added to `skips`.
        """
        for chunk in self._chunks(skips):
            samples = [sample for _, _, row in chunk for sample in row.samples]
            encoded = iter(zip(encoder.encode(samples), encoder.left, strict=True))
            for where, place, row in chunk:
                results, lost = zip(*(next(encoded) for _ in row.samples), strict=True)
                lacks = set().union(*lost) | ({NULLS} if row.nulls else set())
                failed = next((result for result in results if isinstance(result, DataError)), None)
                sequences = [s for result in results if not isinstance(result, DataError) for s in result]
                whole = len(sequences) == len(row.samples) or self.task == "sft"
                if failed is None and not whole:
                    failed = DataError(
                        "an answer of several turns, of which the template renders earlier ones in "
                        "another way than the last; only the last can be learned: split the row"
                    )
                if failed is None and self.kind == "preference" and _equal(*sequences):
                    failed = DataError(
                        "chosen and rejected are equal as the template shows them, so neither is preferred"
                    )
                if failed is not None:
                    skips.add(where, DataError(f"{where}: {failed}"))
                else:
                    yield place, row, sequences, lacks

    def _chunks(self, skips: Skips) -> Iterator[list[tuple[str, tuple[int, int], ChatRow]]]:
        """Lists of CHUNK parsed rows, each with its place."""
        chunk = []
        for number, (path, file) in enumerate(self.source.files):
            for where, value, error, _ in read_rows(path, file, ""):
                try:
                    if error is not None:
                        raise error
                    desirable = None
                    if self.task == "kto" and self.kind == "prompt/completion":
                        value, desirable = without_label(value, where)
                    row = parse_row(value, where, self.kind, file.form == "parquet")
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
