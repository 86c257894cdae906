"""What a source holds: the interpreter's own library, text, JSONL or token shards, opened as runs of token ids.

Documents come from text files (one each) and JSONL lines (the string field "text"). A shard is a file of token ids
behind a header of 1024 bytes: one line of JSON padded with spaces (`head -1` shows it), then little-endian uint16 or
uint32 ids in which every document ends with eos.

Held out for validation, independent of seed and sequence length: files of a folder by a hash of their relative path,
JSONL documents by a hash of their text (so that equal documents stay on one side), and of a source that is one
document, or of each shard, the end.

next: data.py
"""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import os
import re
import shutil
import sysconfig
import uuid
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_type_hints

import numpy as np

from tmoe.config import fits
from tmoe.manifest import naming
from tmoe.tokenizer import DataError, Tokenizer

Split = Literal["train", "val"]


class Run(NamedTuple):
    """Consecutive tokens of one file, in memory or mapped."""

    tokens: np.ndarray
    where: str
    offset: int = 0
    """bytes of the file before the first of these tokens"""

    def bad_id(self, position: int, vocab: int) -> DataError:
        at = self.offset + position * self.tokens.itemsize
        token = int(self.tokens[position])
        return DataError(f"{self.where}: token id {token} at byte {at}: valid ids are 0 to --model.vocab={vocab} - 1")


class Corpus(NamedTuple):
    """One split of one source."""

    name: str
    runs: list[Run]
    eos: int
    fingerprint: str
    """of the tokenizer that made the ids"""


def open_corpus(name: str, tokenizer: Tokenizer, vocab: int, fraction: float, split: Split) -> Corpus:
    """Opens 'stdlib', a text or .jsonl file, a shard, or a folder of texts or of shards.

    A folder with .bin files is one of shards. Shards are mapped, texts are read and tokenised at once.
    """
    if shards := _shard_files(name):
        return _open_shards(name, shards, vocab, fraction, split)
    if tokenizer.vocab > vocab:
        raise DataError(
            f"{name}: the tokenizer gives ids up to {tokenizer.vocab - 1}: --model.vocab={vocab} is too small"
        )
    return Corpus(name, [_open_texts(name, tokenizer, fraction, split)], tokenizer.eos, tokenizer.fingerprint)


def _open_texts(name: str, tokenizer: Tokenizer, fraction: float, split: Split) -> Run:
    documents = list(read_documents(name))
    several = len(documents) > 1
    if several:
        held = held_out([document.key for document in documents], fraction)
        documents = [document for document, val in zip(documents, held, strict=True) if val == (split == "val")]
    nothing = np.zeros(0, np.uint8)  # concatenate wants at least one array
    run = Run(np.concatenate([nothing, *encode_documents(documents, tokenizer)]), name)
    return run if several else _cut(run, fraction, split, tokenizer.eos)


def held_out(keys: list[str], fraction: float) -> list[bool]:
    """Which documents are for validation: each with probability `fraction`, by a hash of its key alone.

    The lowest hash is always held out and the highest never, so that two documents are enough for both splits.
    """
    hashes = [hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest() for key in keys]
    shares = [int.from_bytes(digest, "big") / 2**64 for digest in hashes]
    lowest, highest = min(shares), max(shares)
    return [share == lowest or (share < fraction and share < highest) for share in shares]


def _cut(run: Run, fraction: float, split: Split, eos: int) -> Run:
    """The first 1 - fraction of a run or the rest of it, cut after the first eos in the first half of that rest.

    Where no document ends there, the cut goes through a document: better than a validation split of almost nothing.
    """
    at = len(run.tokens) - int(len(run.tokens) * fraction)
    half = at + (len(run.tokens) - at) // 2
    for low in range(at, half, 1 << 20):  # in pieces: the first eos is near, the rest should stay on disk
        ends = np.flatnonzero(run.tokens[low : min(low + (1 << 20), half)] == eos)
        if ends.size:
            at = low + int(ends[0]) + 1
            break
    if split == "train":
        return run._replace(tokens=run.tokens[:at])
    return run._replace(tokens=run.tokens[at:], offset=run.offset + at * run.tokens.itemsize)


# ---- text -----------------------------------------------------------------------------------------------------------


class Document(NamedTuple):
    text: str | bytes
    where: str
    """file, or file:line"""
    key: str
    """decides the split"""
    size: int
    """bytes on disk"""


# Left out of the standard library. Not source text: caches, installed packages, build configuration. Generated: codec
# tables, pydoc's topics, HTML entities. Tests (60% of the bytes, mostly assertions and data) and the packages that
# distributions ship apart or later versions dropped: without them Python 3.11 to 3.13 give nearly the same 8 MB.
STDLIB_SKIPPED_FOLDERS = re.compile(
    r"__pycache__|__phello__|site-packages|dist-packages|lib-dynload|config-.*|"
    r"encodings|pydoc_data|test|tests|idle_test|idlelib|tkinter|turtledemo|lib2to3|distutils|ensurepip"
)
STDLIB_SKIPPED_FILES = re.compile(r"_sysconfigdata.*|sitecustomize\.py|(html/entities|stringprep|re/_casefix)\.py")


def stdlib_files() -> list[Path]:
    """Source files of the running interpreter's own standard library, sorted by relative path."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not STDLIB_SKIPPED_FOLDERS.fullmatch(name)]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    kept = {path.relative_to(root).as_posix(): path for path in found}
    return [kept[key] for key in sorted(kept) if not STDLIB_SKIPPED_FILES.fullmatch(key)]


def _below(path: Path) -> Iterator[Path]:
    """Everything below a folder. Path.rglob leaves out, without a word, what it may not read."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}; a source's folders must all be readable") from error

    for folder, folders, files in os.walk(path, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in (*folders, *files))


def text_files(name: str) -> tuple[Path, list[Path]]:
    """Root and files of a text source in reading order: sorted by relative path, hidden ones left out."""
    if name == "stdlib":
        return Path(sysconfig.get_path("stdlib")), stdlib_files()
    path = Path(name)
    if path.is_file():
        return path.parent, [path]
    if not path.is_dir():
        raise DataError(f"{name}: no such file or folder; valid: 'stdlib', text, .jsonl, a shard, or a folder of these")
    found = {entry.relative_to(path).as_posix(): entry for entry in _below(path)}
    visible = [found[key] for key in sorted(found) if not re.search(r"(^|/)\.", key)]
    files = [entry for entry in visible if entry.is_file()]
    for entry in sorted(set(visible).difference(files)):
        if entry.is_symlink() or not entry.is_dir():
            raise DataError(
                f"{entry}: neither a file nor a folder but a pipe, or a link to nothing or to a folder; remove it, and name "
                "a folder that it leads to as a source of its own"
            )
    if not files:
        raise DataError(f"{name}: the folder holds no files")
    return path, files


def read_documents(name: str) -> Iterator[Document]:
    """Documents of a text source in order, empty ones left out; holds one text file or JSONL line at a time."""
    root, files = text_files(name)
    for path in files:
        if path.suffix == ".jsonl":
            yield from _read_jsonl(path)
            continue
        with naming(path):
            raw = path.read_bytes()
        if raw:
            yield Document(raw, str(path), path.relative_to(root).as_posix(), len(raw))


def _read_jsonl(path: Path) -> Iterator[Document]:
    with naming(path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number}: not JSON: {error}") from error
            text = record.get("text") if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise DataError(f'{path}:{number}: needs an object with a string field "text"')
            if text:
                yield Document(text, f"{path}:{number}", text, len(line))


def encode_documents(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Ids of each document, eos at its end; some at a time, which a Hugging Face tokenizer encodes in parallel."""
    for chunk in _chunks(documents):
        try:
            encoded = tokenizer.encode_many([document.text for document in chunk])
        except UnicodeError as error:
            raise _not_unicode(chunk, tokenizer) from error
        for document, ids in zip(chunk, encoded, strict=True):
            if (separators := np.flatnonzero(ids == tokenizer.eos)).size:
                raise DataError(
                    f"{document.where}: holds the document separator (id {tokenizer.eos}) at token {separators[0]}; "
                    "is it text?"
                )
            yield np.append(ids, np.array(tokenizer.eos, dtype=ids.dtype))


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """256 documents or 4 MB of text: while it encodes, a tokenizer takes a hundred bytes and more for each of text."""
    chunk, size = list[Document](), 0
    for document in documents:
        chunk.append(document)
        size += len(document.text)
        if len(chunk) == 256 or size >= 4_000_000:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _not_unicode(documents: list[Document], tokenizer: Tokenizer) -> DataError:
    for document in documents:
        try:
            tokenizer.encode(document.text)
        except (UnicodeDecodeError, UnicodeEncodeError) as error:
            return DataError(f"{document.where}: not Unicode text at offset {error.start}: {error.reason}")
    raise AssertionError("a batch failed whose documents encode one by one")


# ---- shards ---------------------------------------------------------------------------------------------------------

HEADER_BYTES = 1024


@dataclass(frozen=True)
class ShardHeader:
    """First line of a shard, as JSON."""

    dtype: Literal["uint16", "uint32"]
    tokens: int
    max_id: int
    """largest id, which opening compares with the model's vocabulary without reading the ids"""
    max_at: int
    """token at which max_id first stands, for the message"""
    tokenizer: str
    """fingerprint"""
    vocab: int
    eos: int
    magic: str = "tmoe-shard"
    version: int = 1

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize


def _shard_files(name: str) -> list[Path]:
    path = Path(name)
    return [path] if path.suffix == ".bin" and path.is_file() else sorted(path.glob("*.bin"))


def _open_shards(name: str, paths: list[Path], vocab: int, fraction: float, split: Split) -> Corpus:
    opened = [open_shard(path, vocab) for path in paths]
    first, _ = opened[0]
    for path, (header, _) in zip(paths, opened, strict=True):
        if (header.tokenizer, header.eos) != (first.tokenizer, first.eos):
            raise DataError(
                f"{path}: made with tokenizer {header.tokenizer}, eos {header.eos}; "
                f"{paths[0]} with {first.tokenizer}, eos {first.eos}"
            )
    return Corpus(name, [_cut(run, fraction, split, first.eos) for _, run in opened], first.eos, first.tokenizer)


def open_shard(path: Path, vocab: int) -> tuple[ShardHeader, Run]:
    """Maps one shard after checking header, size and largest id; DataError names file and offset."""
    header = read_header(path)
    size, promised = path.stat().st_size, HEADER_BYTES + header.tokens * header.itemsize
    if size != promised:
        what = "truncated" if size < promised else "too long"
        raise DataError(f"{path}: {what}: ends at byte {size}, its header promises {header.tokens} tokens, {promised}")
    if header.tokens == 0:
        raise DataError(f"{path}: empty shard: no tokens after the header (byte {HEADER_BYTES})")
    mapped = np.memmap(path, dtype=f"<u{header.itemsize}", mode="r", offset=HEADER_BYTES)
    run = Run(mapped, str(path), HEADER_BYTES)
    if header.max_id >= vocab:
        raise run.bad_id(header.max_at, vocab)
    return header, run


def read_header(path: Path) -> ShardHeader:
    if not path.is_file():
        raise DataError(f"{path}: no regular file, or a link to nothing")  # opened, a pipe would wait for a writer
    with path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES:
        what = "truncated" if raw else "empty shard"
        raise DataError(f"{path}: {what}: ends at byte {len(raw)}, inside the header of {HEADER_BYTES}")
    try:
        fields = json.loads(raw)
        if (fields["magic"], fields["version"]) != (ShardHeader.magic, ShardHeader.version):
            raise ValueError(f"magic {fields['magic']!r}, version {fields['version']!r}")
        header = ShardHeader(**fields)
        for name, kind in get_type_hints(ShardHeader).items():
            if not fits(value := getattr(header, name), kind):
                raise ValueError(f"{name} {value!r}")
        tokens = header.tokens
        if min(tokens, header.max_id, header.max_at) < 0 or (tokens and header.max_at >= tokens):
            raise ValueError(f"max_id {header.max_id} at token {header.max_at} of {tokens}")
        if not 0 <= header.eos < header.vocab:
            raise ValueError(f"eos {header.eos} of {header.vocab} ids")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(
            f"{path}: byte 0 begins no {ShardHeader.magic} header of version {ShardHeader.version}: {error!r}; "
            "`python -m tmoe.data` makes shards"
        ) from error
    return header


def write_shards(out: Path, documents: Iterable[np.ndarray], tokenizer: Tokenizer, shard_tokens: int) -> int:
    """Writes documents (ids that end with eos) as shards into the new folder `out`; returns the number of tokens.

    A shard holds whole documents, at most `shard_tokens` tokens unless one document alone is longer. The folder appears
    whole or not at all: it is written and synced under another name, then renamed.
    """
    total = 0
    with _publish(out) as folder:
        for number, group in itertools.groupby(_number(documents, shard_tokens), key=operator.itemgetter(0)):
            total += _write_shard(folder / f"{number:05}.bin", (ids for _, ids in group), tokenizer)
        if total == 0:
            raise DataError("the sources hold no text: nothing to write")
    return total


def _number(documents: Iterable[np.ndarray], shard_tokens: int) -> Iterator[tuple[int, np.ndarray]]:
    """Gives each document the number of its shard."""
    number = filled = 0
    for ids in documents:
        if filled and filled + len(ids) > shard_tokens:
            number, filled = number + 1, 0
        filled += len(ids)
        yield number, ids


def _write_shard(path: Path, documents: Iterable[np.ndarray], tokenizer: Tokenizer) -> int:
    dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab <= 1 << 16 else "uint32"
    tokens, max_id, max_at = 0, -1, 0
    with naming(path), path.open("xb") as file:
        file.seek(HEADER_BYTES)
        for ids in documents:
            highest = int(ids.argmax())
            if ids[highest] > max_id:
                max_id, max_at = int(ids[highest]), tokens + highest
            file.write(ids.astype("<u2" if dtype == "uint16" else "<u4").tobytes())
            tokens += len(ids)
        header = ShardHeader(dtype, tokens, max_id, max_at, tokenizer.fingerprint, tokenizer.vocab, tokenizer.eos)
        file.seek(0)
        file.write(json.dumps(asdict(header)).encode().ljust(HEADER_BYTES - 1) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return tokens


@contextmanager
def _publish(out: Path) -> Generator[Path, None, None]:
    """A folder to write into that becomes `out` at the end, or vanishes on any error."""
    if os.path.lexists(out):
        raise DataError(f"--out={out}: exists already; name a new folder")
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex[:12]}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        _sync_folder(temporary)
        temporary.rename(out)  # fails if a folder with content appeared there meanwhile
        _sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
