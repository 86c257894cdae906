"""Opens a source as runs of token ids.

A source is the interpreter's own library, text, rows of JSON or parquet, or token shards. A text file is one
document; a row is one document, its string field "text". data/survey.py finds out the kind of a file.
A Megatron data set is a pair of files NAME.bin and NAME.idx, named by either file or by NAME
(data/indexed.py). A shard is a file with a header of 1024 bytes, one line of JSON padded with spaces
(`head -1` shows it), then little-endian uint16 or uint32 ids in which every document ends with eos.

Every process tokenises text of up to IN_MEMORY bytes for itself. Larger text is tokenised by one process of
each node into shards in a temporary folder, while the node's other processes wait for its lock. All these
processes map the shards, and so do later starts.

Validation data are held out independently of seed and sequence length:
    files of a folder, by a hash of their relative path;
    rows, by a hash of their text, so that equal documents are in the same split;
    the end of a source that is one document, and the end of each shard.
With --data.split the documents held out are divided again, into validation and test data, in the same way.

next: data/survey.py, data/dataset.py
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import tokenizers
from filelock import FileLock
from rich.filesize import decimal

from tmoe.base.disk import BOM
from tmoe.data.corpus import Corpus, HeldOut, Split, TokenRun, cut
from tmoe.data.indexed import eos_of, open_indexed
from tmoe.data.row_files import kind_of_row, no_text, opened, read_rows
from tmoe.data.shards import _publish, _write_shard, open_shard
from tmoe.data.survey import (  # noqa: F401 (stdlib_files and text_files, which were here, until 0.2)
    Facts,
    Survey,
    stdlib_files,
    survey,
    text_files,
)
from tmoe.data.tokenizer import Carried, DataError, Tokenizer, require_vocab

IN_MEMORY = 16_000_000  # bytes of a source's files
SHOWN = 60  # characters of a source's first document
NAMED = 5  # malformed documents that are named


class Skips:
    """Documents that were left out because they are malformed.

    Up to `limit` documents are left out; the error of the next one is raised.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.found: dict[str, str] = {}  # place -> error; a dict, since a source is read more than once

    def add(self, where: str, error: DataError) -> None:
        self.found[where] = str(error)
        if len(self.found) <= self.limit:
            return
        if self.limit:
            earlier = "; ".join(list(self.found.values())[:NAMED])
            raise DataError(
                f"{error}; more than {self.limit} malformed documents (--skip-malformed), "
                f"the first: {earlier}"
            )
        raise DataError(
            f"{error}. --data.skip-malformed N (python -m tmoe.data: --skip-malformed N) leaves out up to N "
            "of such documents"
        ) from error

    def tell(self) -> str:
        """The number of documents left out and the first errors, in words; "" if there are none."""
        if not self.found:
            return ""
        return f"{len(self.found)} malformed left out: " + "; ".join(list(self.found.values())[:NAMED])


def open_corpus(
    source: str | Survey,
    tokenizer: Tokenizer,
    vocab: int,
    shares: HeldOut,
    split: Split,
    field: str = "text",
    malformed: int = 0,
    carried: Carried | None = None,
) -> Corpus:
    """Opens 'stdlib', a file, a folder, a pattern of files or a set of the hub.

    Shards are mapped, texts and rows are tokenised.
    field: the string field that holds a row's text.
    malformed: how many documents that cannot be read may be left out.
    carried: the tokenizer of the model to train. Data of another tokenizer raise DataError before anything
        is tokenised.
    """
    source = survey(source) if isinstance(source, str) else source
    name = source.name
    if source.form == "token shards":
        corpus = _open_shards(source, tokenizer, vocab, shares, split)
        if carried:
            carried.require(name, corpus.fingerprint)
        return corpus
    if source.form == "Megatron data sets":
        corpus = _open_indexed(source, tokenizer, shares, split)
        if carried:
            carried.require(name, corpus.fingerprint)
        return corpus
    if carried:
        carried.require(name, tokenizer.fingerprint)
    require_vocab(tokenizer, vocab, f"{name}: the tokenizer")
    texts = _Texts(source, tokenizer, shares, field, Skips(malformed))
    if sum(path.stat().st_size for path, _ in source.files) > IN_MEMORY:
        run, whole, facts = texts.cached(split)
    else:
        run, whole, facts = texts.in_memory(split)
    if whole:
        run = cut(run, shares, split, tokenizer.eos)
    return Corpus(name, [run], tokenizer.eos, tokenizer.fingerprint, source.tell(facts))


@dataclass
class _Texts:
    """One source of texts or rows, about to be tokenised."""

    source: Survey
    tokenizer: Tokenizer
    held_out: HeldOut
    field: str
    skips: Skips

    def in_memory(self, split: Split) -> tuple[TokenRun, bool, Facts]:
        """The tokens of a split, whether they are the whole source (if it is one document), and its facts."""
        documents = list(read_documents(self.source, self.field, self.skips))
        part_of, facts = self._divide(documents)
        wanted = [document for document in documents if part_of(document) in (split, "whole")]
        nothing = np.zeros(0, np.uint8)  # concatenate needs at least one array
        tokens = np.concatenate([nothing, *encode_documents(wanted, self.tokenizer, self.skips)])
        return (
            TokenRun(tokens, self.source.name),
            len(documents) == 1,
            facts._replace(skipped=self.skips.tell()),
        )

    def _divide(self, documents: Iterable[Document]) -> tuple[Callable[[Document], str], Facts]:
        """A function that returns the part to which a document belongs, by its key, and the source's facts.

        The parts are the splits, or "whole" for a source of one document.
        """
        first = ""
        shares: list[int] = []
        for document in documents:
            if not shares:
                first = beginning(document.text)
            shares.append(_hash(document.key))
        split_of = Splitter(shares, self.held_out)

        def part_of(document: Document) -> str:
            return "whole" if len(shares) == 1 else split_of(_hash(document.key))

        return part_of, Facts(len(shares), first)

    def cached(self, split: Split) -> tuple[TokenRun, bool, Facts]:
        """The same as `in_memory`, read from shards that one process of the node makes."""
        made = made_once(self._key(), self._make)
        facts = Facts(**json.loads((made / "facts.json").read_text()))
        whole = facts.documents == 1
        path = made / ("whole.bin" if whole else f"{split}.bin")
        tokens = open_shard(path, self.tokenizer.vocab)[1].tokens if path.exists() else np.zeros(0, np.uint8)
        return TokenRun(tokens, self.source.name), whole, facts

    def _key(self) -> str:
        """Name of the cached shards; it changes with every file, tokenizer or setting that decides tokens."""
        stats = [(str(path.resolve()), path.stat()) for path, _ in self.source.files]
        stamps = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        settings = [
            self.tokenizer.fingerprint,
            self.tokenizer.eos,
            self.held_out,
            self.field,
            self.source.columns,
            self.skips.limit,
        ]
        facts = ["2", tokenizers.__version__, self.source.form, str(self.source.root), *settings, stamps]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    def _make(self, made: Path) -> None:
        """Tokenises the source into the folder `made`: a shard for each part, and the facts."""
        size = decimal(sum(path.stat().st_size for path, _ in self.source.files))
        print(
            f"{self.source.name}: {size}, tokenised once for this node, into {made}",
            file=sys.stderr,
            flush=True,
        )
        part_of, facts = self._divide(read_documents(self.source, self.field, self.skips))
        with _publish(made) as folder:
            for part in ("whole",) if facts.documents == 1 else get_args(Split):
                documents = read_documents(self.source, self.field, self.skips)
                wanted = (document for document in documents if part_of(document) == part)
                path = folder / f"{part}.bin"
                encoded = encode_documents(wanted, self.tokenizer, self.skips)
                if not _write_shard(path, encoded, self.tokenizer):
                    path.unlink()
            facts = facts._replace(skipped=self.skips.tell())
            (folder / "facts.json").write_text(json.dumps(facts._asdict()))


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder of this name in the cache; `make` fills it, in one process of the node.

    If that process fails, the processes that waited for it raise the same DataError.
    """
    folder = cache_folder()
    made = folder / name
    failed = made.with_suffix(".failed")
    began = time.time_ns()
    with FileLock(made.with_suffix(".lock")):
        if failed.exists() and failed.stat().st_mtime_ns >= began:  # it failed while this process waited
            raise DataError(failed.read_text())
        try:
            if not made.exists():
                make(made)
        except (DataError, OSError) as error:
            full = f"{error} (tokens are made in {folder}; TMPDIR names another place)"
            failed.write_text(str(error) if isinstance(error, DataError) else full)
            raise DataError(failed.read_text()) from error
    return made


def cache_folder() -> Path:
    """This user's folder for tokens that several processes of this node map. Its contents may be deleted."""
    folder = Path(tempfile.gettempdir(), f"tmoe-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise DataError(
            f"{folder}: belongs to another user; name another place for temporary files in TMPDIR"
        )
    return folder


def beginning(text: str | bytes) -> str:
    """The first SHOWN characters of a document, for a person to read."""
    shown = text[: 4 * SHOWN]
    return (shown.decode("utf-8", "replace") if isinstance(shown, bytes) else shown)[:SHOWN]


def held_out(keys: list[str], fraction: float) -> list[bool]:
    """Whether each document is for validation: with probability `fraction`, by a hash of its key alone.

    The document with the lowest hash is always held out and the one with the highest hash never, so that two
    documents are enough for both splits.
    """
    hashes = [_hash(key) for key in keys]
    split_of = Splitter(hashes, HeldOut(fraction))
    return [split_of(number) == "val" for number in hashes]


class Splitter:
    """Maps the hash of a document's key to its split. If both shares are 0, all documents are training data.

    The document with the lowest hash of a source is validation data, the next lowest is test data if there is
    any, and the highest is training data. So two documents, or three with test data, are enough for all
    splits.
    """

    def __init__(self, hashes: list[int], shares: HeldOut) -> None:
        low, high = min(hashes, default=0), max(hashes, default=0)
        between = (number for number in hashes if low < number < high)
        self.shares = shares
        self.sure: dict[int | None, Split] = {}
        if shares.test:
            self.sure[min(between, default=None)] = "test"
        self.sure[high] = "train"
        if shares.val:
            self.sure[low] = "val"

    def __call__(self, number: int) -> Split:
        if number in self.sure:
            return self.sure[number]
        at = number / 2**64
        return "val" if at < self.shares.val else "test" if at < sum(self.shares) else "train"


def _hash(key: str) -> int:
    raw = key.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")


# ---- text ----


class Document(NamedTuple):
    """One text of a source."""

    text: str | bytes
    where: str
    """file, or file:line"""
    key: str
    """text whose hash decides the split"""
    size: int
    """bytes on disk"""


def read_documents(
    source: str | Survey, field: str = "text", skips: Skips | None = None
) -> Iterator[Document]:
    """Documents of a source of texts or rows, in order, empty ones left out.

    One text file or row at a time is in memory. Rows of a kind with another use always raise DataError.
    skips: collects malformed documents; without it, the first of them raises its DataError.
    """
    source = survey(source) if isinstance(source, str) else source
    skips = skips or Skips()
    for path, file in source.files:
        if file.form in ("token shards", "Megatron data sets"):
            raise DataError(f"{path}: token ids, which are no text; train on them as they are (--data.path)")
        if file.form == "plain text":
            with opened(path, file.packed) as (stream, _):
                raw = stream.read().removeprefix(BOM)
            if raw:
                yield Document(raw, str(path), path.relative_to(source.root).as_posix(), path.stat().st_size)
            continue
        for where, row, error, size in read_rows(path, file, field):
            text = row.get(field) if isinstance(row, dict) else None
            if error is None and not isinstance(text, str):
                error = no_text(where, row, field)
                if isinstance(row, dict) and kind_of_row(row, field):
                    raise error
            if error is not None:
                skips.add(where, error)
            elif text:
                yield Document(text, where, text, size)


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, skips: Skips | None = None
) -> Iterator[np.ndarray]:
    """Ids of each document, with eos at the end.

    Several documents are encoded in one call, which a Hugging Face tokenizer runs in parallel.
    skips: collects documents that are not Unicode or that hold the separator; without it, the first of them
        raises its DataError.
    """
    skips = skips or Skips()
    for chunk in _chunks(documents):
        try:
            encoded = tokenizer.encode_many([document.text for document in chunk])
        except UnicodeError:
            chunk = [document for document in chunk if _is_unicode(document, tokenizer, skips)]
            encoded = tokenizer.encode_many([document.text for document in chunk])
        for document, ids in zip(chunk, encoded, strict=True):
            if (separators := np.flatnonzero(ids == tokenizer.eos)).size:
                error = DataError(
                    f"{document.where}: holds the document separator (id {tokenizer.eos}) at token "
                    f"{separators[0]}; is it text?"
                )
                skips.add(document.where, error)
            else:
                yield np.append(ids, np.array(tokenizer.eos, dtype=ids.dtype))


def _is_unicode(document: Document, tokenizer: Tokenizer, skips: Skips) -> bool:
    """Whether a document can be encoded; if not, its error is added to `skips`."""
    try:
        tokenizer.encode(document.text)
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        skips.add(
            document.where,
            DataError(f"{document.where}: not Unicode text at offset {error.start}: {error.reason}"),
        )
        return False
    return True


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Lists of at most 256 documents; a list ends early once it holds 4 MB of text.

    The lists are short because an encoding tokenizer needs a hundred or more bytes for each byte of text.
    """
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.text)
        if len(chunk) == 256 or size >= 4_000_000:
            yield chunk
            chunk = []
            size = 0
    if chunk:
        yield chunk


# ---- token ids ----


def _open_indexed(source: Survey, tokenizer: Tokenizer, shares: HeldOut, split: Split) -> Corpus:
    """One split of Megatron data sets. Their ids are assumed to be of the tokenizer that the user named."""
    opened = [open_indexed(path) for path, _ in source.files]
    eos = eos_of(opened, tokenizer.eos if tokenizer.named else None)
    fingerprint = tokenizer.fingerprint if tokenizer.named else "unknown"

    # Describe the source in words.
    first = opened[0]
    shown = first.whole(first.ids[: min(4 * SHOWN, int(first.starts(1)[-1]))])
    known = tokenizer.named and shown.min(initial=0) >= 0 and shown.max(initial=0) < tokenizer.vocab
    text = tokenizer.decode(shown[shown != eos])[:SHOWN] if known else ""
    taken = source.tell(Facts(sum(part.entries - 1 for part in opened), text))
    runs = [part.run(shares, split, eos) for part in opened]
    return Corpus(source.name, runs, eos, fingerprint, f"{taken}, of tokenizer {fingerprint}, eos {eos}")


def _open_shards(source: Survey, tokenizer: Tokenizer, vocab: int, shares: HeldOut, split: Split) -> Corpus:
    """One split of a source of shards. DataError if the shards are of several tokenizers."""
    paths = [path for path, _ in source.files]
    opened = [open_shard(path, vocab) for path in paths]
    first, run = opened[0]
    for path, (header, _) in zip(paths, opened, strict=True):
        if (header.tokenizer, header.eos) != (first.tokenizer, first.eos):
            raise DataError(
                f"{path}: made with tokenizer {header.tokenizer}, eos {header.eos}; "
                f"{paths[0]} with {first.tokenizer}, eos {first.eos}"
            )

    # Describe the source in words. Its first text is shown if this tokenizer can decode it.
    counts = [header.documents for header, _ in opened]
    documents = -1 if min(counts) < 0 else sum(counts)
    shown = run.tokens[: 4 * SHOWN]
    ends = np.flatnonzero(shown == first.eos)
    same = tokenizer.fingerprint == first.tokenizer
    text = tokenizer.decode(shown[: ends[0] if ends.size else None])[:SHOWN] if same else ""
    taken = f"{source.tell(Facts(documents, text))}, of tokenizer {first.tokenizer}"
    runs = [cut(run, shares, split, first.eos) for _, run in opened]
    return Corpus(source.name, runs, first.eos, first.tokenizer, taken)
