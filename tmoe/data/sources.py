"""What a source holds, opened as runs of token ids.

A source is the interpreter's own library, text, rows of JSON or parquet, or token shards. Documents come from
text files (one each) and rows (the string field "text"); data/rows.py tells which is which, by first bytes.
A source is of one kind: a folder with several is refused, and a pattern ('folder/*.jsonl') names one of them.
JSON among texts (a package.json among sources) is text like these, unless it holds rows of a data set.
A Megatron data set is NAME.bin with NAME.idx beside it, named by either or by NAME (data/indexed.py).
A shard is a file of token ids behind a header of 1024 bytes: one line of JSON padded with spaces (`head -1`
shows it), then little-endian uint16 or uint32 ids in which every document ends with eos.

Text up to IN_MEMORY bytes is tokenised by every process for itself. More than that is tokenised by one
process of each node, while the others wait for its lock, into shards in a temporary folder. All of them map
these shards, and so do later starts.

Held out for validation, independent of seed and sequence length:
    files of a folder, by a hash of their relative path;
    rows, by a hash of their text, so that equal documents stay on one side;
    of a source that is one document, or of each shard, the end.
With --data.split the documents held out are divided again, into validation and test data, in the same way.

next: data/rows.py, data/dataset.py
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import re
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import tokenizers
from filelock import FileLock
from rich.filesize import decimal

from tmoe.base.disk import BOM, absent_words
from tmoe.base.listing import counted
from tmoe.data import hub
from tmoe.data.corpus import Corpus, HeldOut, Run, Split, cut
from tmoe.data.indexed import eos_of, is_indexed, open_indexed
from tmoe.data.rows import (
    PACKED_SUFFIXES,
    Form,
    Found,
    kind_of_row,
    look,
    named,
    no_text,
    opened,
    read_rows,
)
from tmoe.data.shards import _publish, _write_shard, open_shard
from tmoe.data.tokenizer import NAMES, SETTINGS, TEMPLATE, Carried, DataError, Tokenizer, require_vocab

IN_MEMORY = 16_000_000  # bytes of a source's files
SHOWN = 60  # characters of a source's first document
NAMED = 5  # malformed documents that are named


class Skips:
    """Documents that were left out because they are malformed.

    Up to `limit` of them are; the next one's error is raised.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.found: dict[str, str] = {}  # where to what: a source is read more than once

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
        """How many were left out, and the first of them; "" for none."""
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

    Shards are mapped, texts and rows tokenised.
    field: the string field that holds a row's text.
    malformed: how many documents that cannot be read may be left out.
    carried: the tokenizer of the model to train; DataError for data of another, before anything is tokenised.
    """
    source = survey(source) if isinstance(source, str) else source
    name = source.name
    if source.form == "token shards":
        found = _open_shards(source, tokenizer, vocab, shares, split)
        if carried:
            carried.require(name, found.fingerprint)
        return found
    if source.form == "Megatron data sets":
        found = _open_indexed(source, tokenizer, shares, split)
        if carried:
            carried.require(name, found.fingerprint)
        return found
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


class Facts(NamedTuple):
    """What was found while reading a source: its documents, how the first begins, what was left out."""

    documents: int
    first: str
    skipped: str = ""


@dataclass
class _Texts:
    """One source of texts or rows, about to be tokenised."""

    source: Survey
    tokenizer: Tokenizer
    held_out: HeldOut
    field: str
    skips: Skips

    def in_memory(self, split: Split) -> tuple[Run, bool, Facts]:
        """The tokens of a split, or of the whole source if it is one document, and whether it is one."""
        documents = list(read_documents(self.source, self.field, self.skips))
        part_of, facts = self._divide(documents)
        wanted = [document for document in documents if part_of(document) in (split, "whole")]
        nothing = np.zeros(0, np.uint8)  # concatenate wants at least one array
        tokens = np.concatenate([nothing, *encode_documents(wanted, self.tokenizer, self.skips)])
        return Run(tokens, self.source.name), len(documents) == 1, facts._replace(skipped=self.skips.tell())

    def _divide(self, documents: Iterable[Document]) -> tuple[Callable[[Document], str], Facts]:
        """A function that tells which part a document belongs to, by its key, and the facts met on the way.

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

    def cached(self, split: Split) -> tuple[Run, bool, Facts]:
        """As in_memory, from shards that one process of the node makes."""
        made = made_once(self._key(), self._make)
        facts = Facts(**json.loads((made / "facts.json").read_text()))
        whole = facts.documents == 1
        path = made / ("whole.bin" if whole else f"{split}.bin")
        tokens = open_shard(path, self.tokenizer.vocab)[1].tokens if path.exists() else np.zeros(0, np.uint8)
        return Run(tokens, self.source.name), whole, facts

    def _key(self) -> str:
        """Changes when a file, the tokenizer or a setting changes that decides about tokens."""
        stats = [(str(path.resolve()), path.stat()) for path, _ in self.source.files]
        told = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        settings = [
            self.tokenizer.fingerprint,
            self.tokenizer.eos,
            self.held_out,
            self.field,
            self.source.columns,
            self.skips.limit,
        ]
        facts = ["2", tokenizers.__version__, self.source.form, str(self.source.root), *settings, told]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    def _make(self, made: Path) -> None:
        """Tokenise the source into the folder `made`: a shard for each part, and the facts."""
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

    If that process fails, all that waited for it raise the same DataError.
    """
    folder = cache_folder()
    made = folder / name
    failed = made.with_suffix(".failed")
    began = time.time_ns()
    with FileLock(made.with_suffix(".lock")):
        if failed.exists() and failed.stat().st_mtime_ns >= began:  # while this process waited
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
    """The first characters of a document, for a person to look at."""
    shown = text[: 4 * SHOWN]
    return (shown.decode("utf-8", "replace") if isinstance(shown, bytes) else shown)[:SHOWN]


def held_out(keys: list[str], fraction: float) -> list[bool]:
    """Which documents are for validation: each with probability `fraction`, by a hash of its key alone.

    The lowest hash is always held out and the highest never, so that two documents are enough for both
    splits.
    """
    hashes = [_hash(key) for key in keys]
    split_of = Splitter(hashes, HeldOut(fraction))
    return [split_of(found) == "val" for found in hashes]


class Splitter:
    """The split that a document belongs to, by the hash of its key alone. Without shares all are training's.

    The lowest hash of a source is validation data, the next test data if there is any, the highest training
    data: so two documents, or three, are enough for all splits.
    """

    def __init__(self, hashes: list[int], shares: HeldOut) -> None:
        low, high = min(hashes, default=0), max(hashes, default=0)
        between = (found for found in hashes if low < found < high)
        self.shares = shares
        self.sure: dict[int | None, Split] = {}
        if shares.test:
            self.sure[min(between, default=None)] = "test"
        self.sure[high] = "train"
        if shares.val:
            self.sure[low] = "val"

    def __call__(self, found: int) -> Split:
        if found in self.sure:
            return self.sure[found]
        at = found / 2**64
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
    """decides the split"""
    size: int
    """bytes on disk"""


# Left out of the standard library:
# - what is no source text: caches, installed packages, build configuration;
# - what is generated: codec tables, pydoc's topics, HTML entities;
# - tests (60% of the bytes, mostly assertions and data);
# - packages that distributions ship apart or later versions dropped.
# Without them Python 3.11 to 3.13 give nearly the same 8 MB.
STDLIB_SKIPPED_FOLDERS = re.compile(
    r"__pycache__|__phello__|site-packages|dist-packages|lib-dynload|config-.*|"
    r"encodings|pydoc_data|test|tests|idle_test|idlelib|tkinter|turtledemo|lib2to3|distutils|ensurepip"
)
STDLIB_SKIPPED_FILES = re.compile(
    r"_sysconfigdata.*|sitecustomize\.py|(html/entities|stringprep|re/_casefix)\.py"
)


def stdlib_files() -> list[Path]:
    """Source files of the running interpreter's own standard library, sorted by relative path."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not STDLIB_SKIPPED_FOLDERS.fullmatch(name)]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    kept = {path.relative_to(root).as_posix(): path for path in found}
    return [kept[key] for key in sorted(kept) if not STDLIB_SKIPPED_FILES.fullmatch(key)]


# What Spark, Hadoop, Hive and dask write next to parts of a table: summaries of parquet, marks and checksums.
NO_ROWS = re.compile(r"_metadata|_common_metadata|_SUCCESS|_started_.*|_committed_.*|.*\.crc")
NO_PARTS = {"_temporary", "_spark_metadata"}  # folders that they leave: of parts that were never committed
# What says which files of a table of some kind still count, by a part of its path.
LOGS = {"_delta_log": "a Delta table", ".hoodie": "a Hudi table"}


def _below(path: Path) -> Iterator[Path]:
    """Everything below a folder.

    DataError for what may not be read; Path.rglob would leave it out silently.
    """

    def refuse(error: OSError) -> None:
        raise DataError(
            f"{error.filename}: {error.strerror}; a source's folders must all be readable"
        ) from error

    for folder, folders, files in os.walk(path, onerror=refuse):
        if logs := sorted(LOGS.keys() & {*folders}):
            raise DataError(
                f"{path}: {Path(folder, logs[0]).relative_to(path)}: is the log of {LOGS[logs[0]]}, whose "
                "files may hold rows that are deleted; write the table as parquet or JSON lines first"
            )
        folders[:] = [name for name in folders if not name.startswith(".") and name not in NO_PARTS]
        yield from (Path(folder, name) for name in (*folders, *files))


def text_files(name: str) -> tuple[Path, list[Path]]:
    """Root and files of a source in reading order: sorted by relative path, hidden ones left out."""
    if name == "stdlib":
        return Path(sysconfig.get_path("stdlib")), stdlib_files()
    if name.startswith(hub.PREFIX):
        return hub.files_of(name)
    path = Path(name)
    if path.suffix == ".idx" and path.with_suffix(".bin").is_file():
        path = path.with_suffix(".bin")
    if not path.exists() and is_indexed(path.with_name(f"{path.name}.bin")):
        path = path.with_name(f"{path.name}.bin")
    if path.is_file():
        return path.parent, [path]
    if not path.is_dir():
        if glob.has_magic(name):
            return _matching(name)
        raise DataError(
            f"{name}: no such file or folder; valid: 'stdlib', a file of text, JSON lines or parquet, a "
            "shard, a Megatron data set, a folder of these, a pattern of files, or a set of the hub, "
            "hub:ORG/NAME"
        )
    files = _files_in(path, name)
    _require_one_split(path, files)
    return path, files


def _files_in(path: Path, name: str) -> list[Path]:
    """The files of a folder in reading order; DataError for an entry that cannot be read, and for none."""
    found = {entry.relative_to(path).as_posix(): entry for entry in _below(path)}
    visible = [found[key] for key in sorted(found) if not re.search(r"(^|/)\.", key)]
    if "metadata/version-hint.text" in found or any(key.endswith(".metadata.json") for key in found):
        raise DataError(
            f"{name}: an Iceberg table, whose files may hold rows that are deleted; write it as parquet or "
            "JSON lines first"
        )
    visible = [entry for entry in visible if not NO_ROWS.fullmatch(entry.name)]
    files = [entry for entry in visible if entry.is_file()]
    for entry in sorted(set(visible).difference(files)):
        if entry.suffix == ".bin" and not entry.is_dir():
            files.append(entry)  # a shard: opening it reports what is wrong with it
        elif entry.is_symlink() and not entry.exists():
            raise DataError(f"{entry}: {absent_words(entry)}, or remove it")
        elif entry.is_symlink() or not entry.is_dir():
            raise DataError(
                f"{entry}: neither a file nor a folder but a pipe, or a link to a folder; "
                "remove it, and name a folder that it leads to as a source of its own"
            )
    if not files:
        raise DataError(f"{name}: the folder holds no files")
    return sorted(files, key=lambda entry: entry.relative_to(path).as_posix())


def _require_one_split(root: Path, files: list[Path]) -> None:
    """DataError for a folder with rows to train on and rows to test with, as a clone of a hub's set is."""
    splits: dict[str, list[str]] = {}
    for path in (file.relative_to(root) for file in files):
        if split := hub.split_of_rows(path.as_posix()):
            splits.setdefault(split, []).append(path.as_posix())
    if len(splits) < 2:
        return
    counts = ", ".join(f"{split} ({len(inside)})" for split, inside in splits.items())
    one = splits.get("train", next(iter(splits.values())))
    start = os.path.commonprefix(one)  # noqa: RUF071 (of characters: one pattern for all parts)
    pattern = one[0] if len(one) == 1 else f"{start}*"
    raise DataError(
        f"{root}: holds files of several splits, {counts}; valid: those of one split, {root / pattern}, and "
        "another split as --data.val-path"
    )


def _left_out(path: Path) -> bool:
    """Whether a file, by its path in a source, is no part of its rows."""
    return bool(NO_ROWS.fullmatch(path.name)) or not NO_PARTS.isdisjoint(path.parts)


def _matching(pattern: str) -> tuple[Path, list[Path]]:
    """As text_files, for the files that a pattern names: 'folder/*.jsonl', 'folder/**/*.py'."""
    root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts))
    matching = map(Path, glob.glob(pattern, recursive=True))
    files = sorted(path for path in matching if path.is_file() and not _left_out(path.relative_to(root)))
    if not files:
        raise DataError(f"{pattern}: no file of such a name")
    return root, files


class Survey(NamedTuple):
    """What a source was taken for."""

    name: str
    form: Form
    root: Path
    files: list[tuple[Path, Found]]
    columns: tuple[str, ...] = ()
    """other names of columns, OURS=THEIRS"""

    def tell(self, facts: Facts) -> str:
        """The source in words: its kind, files, documents, how the first begins, what was left out."""
        packed = sorted({found.packed for _, found in self.files if found.packed})
        among = sum(bool(found.rows) for _, found in self.files) if self.form == "plain text" else 0
        form = f"{self.form} ({','.join(packed)})" if packed else self.form
        parts = [
            f"{form} in {counted(len(self.files), 'file')}",
            *([f"{among} of them JSON, taken as text like the others"] if among else []),
            counted(facts.documents, "document") if facts.documents >= 0 else "documents not counted",
            *([f"the first begins {facts.first!r}"] if facts.first else []),
            *([facts.skipped] if facts.skipped else []),
        ]
        return ", ".join(parts)


BESIDE = (*NAMES, SETTINGS, TEMPLATE)  # of a tokenizer


def survey(name: str, columns: tuple[str, ...] = ()) -> Survey:
    """Looks at the first bytes of every file of a source. DataError where the files are of several kinds.

    columns: other names of columns of rows, OURS=THEIRS.
    """
    root, files = text_files(name)
    if name == "stdlib" and not columns:
        return Survey(name, "plain text", root, [(path, Found("plain text")) for path in files])
    looked = [(path, named(look(path), columns)) for path in files]
    if any(found.form == "plain text" for _, found in looked):
        looked = [(path, found if found.sure else _as_text(found)) for path, found in looked]
    looked = [(path, found) for path, found in looked if found.form != "nothing"]
    if any(found.form == "token shards" for _, found in looked):  # their tokenizer may lie beside them
        looked = [(path, found) for path, found in looked if path.name not in BESIDE]
    forms = Counter(found.form for _, found in looked)
    if len(forms) > 1:
        raise _several_kinds(name, root, looked, forms)
    form: Form = next(iter(forms), "plain text")
    if columns and form not in ("JSON lines", "JSON", "parquet"):
        raise DataError(f"{name}: is {form}, which has no columns; leave --data.columns out")
    return Survey(name, form, root, looked, columns)


def none_in_split(name: str, rows: str, split: Split) -> str:
    """The error of a split without any of a source's rows."""
    why = f"none of its {rows} is in its {split} split (those of equal prompts stay together)"
    return f"{name}: {why}; change --data.val-fraction (or --data.split), or give more prompts"


def require_rows(source: Survey, rows: str) -> None:
    """DataError for a source that holds anything but rows. rows: what is valid in words."""
    what = source.form if source.files else "empty"
    if what not in ("JSON lines", "JSON", "parquet"):
        if any(path.suffix.lower() in (".csv", ".tsv") for path, _ in source.files):
            what = "a table as text, which is not read as rows (write it as JSON lines or parquet)"
        raise DataError(f"{source.name}: is {what}; valid: rows {rows}")


def _as_text(found: Found) -> Found:
    return found._replace(form="plain text") if found.form in ("JSON", "JSON lines") else found


def _several_kinds(
    name: str, root: Path, looked: list[tuple[Path, Found]], forms: Counter[Form]
) -> DataError:
    """The error of a source of several kinds: files of each kind, and patterns that would name one kind."""
    kinds = []
    patterns = []
    for form, count in forms.most_common():
        paths = [path for path, found in looked if found.form == form]
        shown = ", ".join(str(path.relative_to(root)) for path in paths[:3]) + ", …" * (count > 3)
        kinds.append(f"{form}: {count:,} ({shown})")
        suffix = Counter(_suffix(path) for path in paths).most_common(1)[0][0]
        patterns.append(f"'{root}/**/*{suffix}'")
    return DataError(
        f"{name}: holds files of several kinds, {'; '.join(kinds)}. A source is of one kind: name it by a "
        f"pattern in quotes, as {' or '.join(patterns)}, or name its files, or move the others away"
    )


def _suffix(path: Path) -> str:
    """The file's suffix; .gz and its like together with the one before."""
    return "".join(path.suffixes[-2:]) if path.suffix.lower() in PACKED_SUFFIXES else path.suffix


def read_documents(
    source: str | Survey, field: str = "text", skips: Skips | None = None
) -> Iterator[Document]:
    """Documents of a source of texts or rows, in order, empty ones left out.

    Holds one text file or row at a time. skips: takes malformed documents; without it, the first one raises
    its
    DataError. Rows of a kind with another use always raise it.
    """
    source = survey(source) if isinstance(source, str) else source
    skips = skips or Skips()
    for path, found in source.files:
        if found.form in ("token shards", "Megatron data sets"):
            raise DataError(f"{path}: token ids, which are no text; train on them as they are (--data.path)")
        if found.form == "plain text":
            with opened(path, found.packed) as (stream, _):
                raw = stream.read().removeprefix(BOM)
            if raw:
                yield Document(raw, str(path), path.relative_to(source.root).as_posix(), path.stat().st_size)
            continue
        for where, row, error, size in read_rows(path, found, field):
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

    Documents are encoded some at a time, which a Hugging Face tokenizer does in parallel. skips: takes
    documents that are not Unicode or hold the separator; without it, the first one raises its DataError.
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
    """Whether a document can be encoded; else `skips` takes its error."""
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
    """Lists of 256 documents or 4 MB of text.

    While it encodes, a tokenizer takes a hundred bytes and more for each byte of text.
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
    """One split of Megatron's data sets. Their ids are taken for those of the tokenizer that is named."""
    opened = [open_indexed(path) for path, _ in source.files]
    eos = eos_of(opened, tokenizer.eos if tokenizer.named else None)
    fingerprint = tokenizer.fingerprint if tokenizer.named else "unknown"

    # What the source was taken for.
    first = opened[0]
    shown = first.whole(first.ids[: min(4 * SHOWN, int(first.starts(1)[-1]))])
    known = tokenizer.named and shown.min(initial=0) >= 0 and shown.max(initial=0) < tokenizer.vocab
    text = tokenizer.decode(shown[shown != eos])[:SHOWN] if known else ""
    taken = source.tell(Facts(sum(one.entries - 1 for one in opened), text))
    runs = [one.run(shares, split, eos) for one in opened]
    return Corpus(source.name, runs, eos, fingerprint, f"{taken}, of tokenizer {fingerprint}, eos {eos}")


def _open_shards(source: Survey, tokenizer: Tokenizer, vocab: int, shares: HeldOut, split: Split) -> Corpus:
    """One split of a source of shards. DataError where they are of several tokenizers."""
    paths = [path for path, _ in source.files]
    opened = [open_shard(path, vocab) for path in paths]
    first, run = opened[0]
    for path, (header, _) in zip(paths, opened, strict=True):
        if (header.tokenizer, header.eos) != (first.tokenizer, first.eos):
            raise DataError(
                f"{path}: made with tokenizer {header.tokenizer}, eos {header.eos}; "
                f"{paths[0]} with {first.tokenizer}, eos {first.eos}"
            )

    # What the source was taken for. The first text is shown where this tokenizer can decode it.
    counts = [header.documents for header, _ in opened]
    documents = -1 if min(counts) < 0 else sum(counts)
    shown = run.tokens[: 4 * SHOWN]
    ends = np.flatnonzero(shown == first.eos)
    same = tokenizer.fingerprint == first.tokenizer
    text = tokenizer.decode(shown[: ends[0] if ends.size else None])[:SHOWN] if same else ""
    taken = f"{source.tell(Facts(documents, text))}, of tokenizer {first.tokenizer}"
    runs = [cut(run, shares, split, first.eos) for _, run in opened]
    return Corpus(source.name, runs, first.eos, first.tokenizer, taken)
