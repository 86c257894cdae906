"""Finds out what a file of a source holds, from its first bytes, and reads its rows.

Rows are JSON lines, a JSON array or parquet; files may be compressed.

next: data/survey.py
"""

from __future__ import annotations

import bz2
import gzip
import importlib.util
import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from tmoe.base.disk import BOM, POINTERS, naming
from tmoe.data.chat.conversations import kind_of
from tmoe.data.indexed import MAGIC, is_indexed
from tmoe.data.tokenizer import DataError

Form = Literal["token shards", "Megatron data sets", "JSON lines", "JSON", "parquet", "plain text", "nothing"]

PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz"}
# Bytes 1 to 3 of a frame of other data, which a zstd reader skips. Byte 0 is 0x50 to 0x5f, and bytes 4 to 7
# are the frame's size (RFC 8878, section 3.1.2).
SKIPPABLE = b"\x2a\x4d\x18"
WINDOW = 1 << 31  # bytes: zstd's largest window, of files made with --long=31; only needed memory is used
PACKED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
ROWS_SUFFIXES = (".jsonl", ".ndjson", ".json")
FROM_ARROW = (
    "save the data set as parquet or JSON lines: datasets.load_from_disk(FOLDER).to_parquet(FILE.parquet)"
)
REFUSED = {
    **POINTERS,
    MAGIC: "the index of a Megatron data set, whose .bin is not in the same folder",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"Rar!": "a rar archive; unpack it",
    b"7z\xbc\xaf": "a 7z archive; unpack it",
    b"ARROW1": f"an Arrow file; {FROM_ARROW}",
    b"\xff\xff\xff\xff": f"an Arrow stream, as datasets.save_to_disk writes; {FROM_ARROW}",
    b"PARE": "parquet that is encrypted; write it without encryption",
    b"Obj\x01": "an Avro file; save the data set as parquet or JSON lines",
    b"SQLite format 3\0": "a database of SQLite; save its rows as parquet or JSON lines",
    b"\x04\x22\x4d\x18": "compressed by lz4; unpack it, or compress it by zstd, gzip, bzip2 or xz",
    b"%PDF-": "a PDF; extract its text",
    b"\x93NUMPY": "a NumPy array; make token shards with python -m tmoe.data",
    b"\x89HDF": "an HDF5 file; save the data set as parquet or JSON lines",
    b"\xff\xfe": "text in UTF-16; save it as UTF-8",
    b"\xfe\xff": "text in UTF-16; save it as UTF-8",
}
HEAD = 4096
PIECE = 1 << 20  # characters that the JSON reader reads at a time
MOST_GUESSED = 1 << 24  # characters within which the first value must end, in a file not named .json


class Found(NamedTuple):
    """The kind of data that was found in a file."""

    form: Form
    packed: str = ""
    """program that compressed the file; "" if it is not compressed"""
    named: bool = False
    """whether the file's name has an ending of JSON lines (.jsonl, .ndjson)"""
    rows: tuple[dict, ...] = ()
    """its first rows, at most two"""
    columns: tuple[str, ...] = ()
    """columns to rename, OURS=THEIRS"""

    @property
    def sure(self) -> bool:
        """Whether these are rows of a data set, not a single JSON file such as a package.json."""
        if self.form == "parquet" or self.named:
            return True
        return len(self.rows) > 1 and kind_of_row(self.rows[0]) != ""


# Kind of chat row (data/chat/conversations.py) -> its name in messages, and the task that trains on it.
CHAT = {
    "messages": ("chat rows", "sft"),
    "conversations": ("chat rows", "sft"),
    "prompt/completion": ("prompt and completion rows", "sft"),
    "instruction": ("instruction rows", "sft"),
    "preference": ("preference rows", "preference"),
}


def kind_of_row(row: dict, field: str = "text") -> str:
    """The kind of a row, by its fields: "text", or a kind of chat rows in words; "" if it is not known."""
    if isinstance(row.get(field), str):
        return "text"
    kind = kind_of(row)
    return CHAT[kind][0] if kind else ""


def no_text(where: str, row: Any, field: str) -> DataError:
    """The error for a row without text; it names the row's likely kind and its fields."""
    if not isinstance(row, dict):
        return DataError(
            f'{where}: needs an object with a string field "{field}"; here is {type(row).__name__}'
        )
    if isinstance(row.get(field), bytes):
        return DataError(f'{where}: the binary field "{field}" is not UTF-8, and so no text')
    if field in row and not (kind_of(row) and row[field] is None):
        type_name = "null" if row[field] is None else type(row[field]).__name__
        return DataError(
            f'{where}: needs a string in "{field}"; here is {type_name}; --data.text-field '
            "(python -m tmoe.data: --text-field) names another field"
        )
    shown = ", ".join(list(map(str, row))[:12]) or "none"
    if kind := kind_of(row):
        name, task = CHAT[kind]
        return DataError(
            f"{where}: {name} (fields: {shown}), whose JSON is no text to train on; train.py --task {task} "
            f'trains on them. Valid here: rows with a string field "{field}", or another named by '
            "--data.text-field (--text-field)"
        )
    return DataError(
        f'{where}: needs an object with a string field "{field}"; its fields are: {shown}; '
        "--data.text-field (python -m tmoe.data: --text-field) names another"
    )


def look(path: Path) -> Found:
    """Finds out what a file holds, by its first bytes and, if these do not decide it, by its name."""
    if path.suffix == ".bin":  # its faults are reported when it is opened
        return Found("Megatron data sets" if is_indexed(path) else "token shards")
    if path.suffix == ".idx" and path.with_suffix(".bin").is_file():
        return Found("nothing")
    packed = packing(path)
    with opened(path, packed) as (stream, _):
        head = stream.read(HEAD)
    if not head:
        return Found("nothing", packed)
    if head.startswith(b'{"') and b'"tmoe-shard"' in head[:1024]:
        return Found("token shards", packed)
    if head.startswith(b"PAR1"):
        return Found("parquet", packed)
    refuse_others(path, head)
    if packed and (twice := next((name for magic, name in PACKED.items() if head.startswith(magic)), "")):
        raise DataError(f"{path}: {twice} within {packed}; unpack it once")
    return _rows_or_text(path, packed, head)


def _rows_or_text(path: Path, packed: str, head: bytes) -> Found:
    """`look` for a file that is text or rows. head: the file's first bytes."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED_SUFFIXES:
        del suffixes[-1]
    suffix = suffixes[-1] if suffixes else ""
    named = suffix in ROWS_SUFFIXES[:2]
    start = head.removeprefix(BOM).lstrip()[:1]
    if start == b"{" or named:
        lines = first_lines(path, packed)
        if lines or (named and start != b"["):
            return Found("JSON lines", packed, named, lines)
    if start in (b"{", b"["):
        limit = None if suffix in ROWS_SUFFIXES else MOST_GUESSED
        values: list[Any] = []
        with suppress(DataError):
            values += [value for _, value, _ in islice(read_json(path, packed, limit), 2)]
        if values and all(isinstance(value, dict) for value in values):
            return Found("JSON", packed, named, tuple(values))
    # The name is that of rows, but none were found: reading reports why, unless the source has other texts.
    if suffix in ROWS_SUFFIXES:
        return Found("JSON lines" if start == b"{" else "JSON", packed, named)
    return Found("plain text", packed)


def with_columns(found: Found, columns: tuple[str, ...]) -> Found:
    """`found` with its columns renamed as `columns` states."""
    if not columns:
        return found
    return found._replace(columns=columns, rows=tuple(renamed(row, columns) for row in found.rows))


def refuse_others(path: Path, head: bytes) -> None:
    """DataError for a file of a known kind that is neither text nor rows."""
    for magic, what in REFUSED.items():
        if head.startswith(magic):
            raise DataError(f"{path}: {what}")
    if head[257:262] == b"ustar":
        raise DataError(f"{path}: a tar archive; unpack it")
    if path.suffix.lower() == ".parquet":
        begins = head[:20].decode("utf-8", "replace")
        raise DataError(f"{path}: no parquet, which begins with PAR1, but {begins!r}; download it again")


def first_lines(path: Path, packed: str) -> tuple[dict, ...]:
    """The first two lines that are not blank, if they are JSON objects; else ()."""
    rows = []
    with opened(path, packed) as (stream, _):
        for line in islice(filter(bytes.strip, stream), 2):
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError):
                return ()
    return tuple(rows) if all(isinstance(row, dict) for row in rows) else ()


# ---- compressed files ----


def packing(path: Path) -> str:
    """The name of the program that compressed a file, by the file's first bytes; "" for no compression."""
    # Opening a pipe would block until something writes to it.
    if not path.is_file():
        raise DataError(f"{path}: no regular file, or a link to nothing")
    with naming(path), path.open("rb") as file:
        head = file.read(8)
        skipped = False
        while head[1:4] == SKIPPABLE and head[0] >> 4 == 5 and len(head) == 8:
            skipped = True
            file.seek(int.from_bytes(head[4:], "little"), os.SEEK_CUR)
            head = file.read(8)
    if skipped and not head:
        return "zstd"
    return next((name for magic, name in PACKED.items() if head.startswith(magic)), "")


@contextmanager
def opened(path: Path, packed: str) -> Generator[tuple[BinaryIO, BinaryIO], None, None]:
    """A stream of a file's unpacked content, and the file itself, whose `tell` is the bytes read so far.

    DataError if the file is damaged.
    """
    with naming(path), path.open("rb") as file:
        try:
            yield _unpacked(path, file, packed), file
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise DataError(f"{path}: damaged {packed}: {error}") from error
        except OSError as error:
            if packed and error.errno is None:  # bz2 raises this for damaged data
                raise DataError(f"{path}: damaged {packed}: {error}") from error
            raise
        except Exception as error:
            if type(error).__name__ == "ZstdError":
                raise DataError(f"{path}: damaged {packed}: {error}") from error
            raise


def _unpacked(path: Path, file: BinaryIO, packed: str) -> BinaryIO:
    if packed == "gzip":
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    if packed == "bzip2":
        return cast(BinaryIO, bz2.BZ2File(file))
    if packed == "xz":
        return cast(BinaryIO, lzma.LZMAFile(file))
    if packed == "zstd":
        require_package(path, "compressed by zstd", "zstandard", "'tmoe[zstd]', or pip install zstandard")
        import zstandard  # pyrefly: ignore[missing-import]

        unpacked = _ZstdFrames(file, zstandard.ZstdDecompressor(max_window_size=WINDOW).decompressobj)
        return cast(BinaryIO, io.BufferedReader(cast(Any, unpacked), PIECE))
    return file


class _ZstdFrames(io.RawIOBase):
    """Unpacks zstd frames that follow one another.

    EOFError if the file ends within a frame; the library's own reader would end without an error.
    """

    def __init__(self, file: BinaryIO, frame: Callable[[], Any]) -> None:
        self.file = file
        self.new_frame = frame
        self.frame = frame()
        self.inside = False
        self.rest = b""
        self.ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            packed = self.rest or self.file.read(1 << 17)
            if not packed:
                if self.inside:
                    raise EOFError("the file ends within a frame")
                return 0
            self.ready = memoryview(self.frame.decompress(packed))
            self.inside = not self.frame.eof
            self.rest = self.frame.unused_data
            if self.frame.eof:
                self.frame = self.new_frame()
        count = min(len(buffer), len(self.ready))
        buffer[:count] = self.ready[:count]
        self.ready = self.ready[count:]
        return count


def require_package(path: Path, what: str, package: str, install: str) -> None:
    """DataError if a package that is needed to read `path` is not installed."""
    if importlib.util.find_spec(package) is None:
        raise DataError(
            f"{path}: {what}: needs the package {package}, which is not installed here: pip install {install}"
        )


# ---- rows ----


def read_rows(path: Path, found: Found, field: str) -> Iterator[tuple[str, Any, DataError | None, int]]:
    """For each row of a file: its place, the row, its error (None if it was read), its bytes in the file.

    Columns are renamed as `found.columns` states. DataError if the first row lacks one of these columns.
    """
    first = True
    for where, row, error, size in _read_rows(path, found, field):
        if found.columns and isinstance(row, dict):
            if first:
                require_columns_in(row, found.columns, where)
            row, first = renamed(row, found.columns), False
        yield where, row, error, size


def require_columns_in(row: dict, columns: tuple[str, ...], where: str) -> None:
    """DataError if a row has a column under neither of its two names, OURS=THEIRS."""
    for column in columns:
        ours, _, theirs = column.partition("=")
        if ours not in row and theirs not in row:
            there = ", ".join(list(map(str, row))[:20]) or "none"
            raise DataError(f"{where}: --data.columns={column}: no column {theirs!r}; valid: {there}")


def renamed(row: dict, columns: tuple[str, ...]) -> dict:
    """The row with its columns THEIRS renamed to OURS; a column that was named OURS before is left out."""
    pairs = [column.partition("=")[::2] for column in columns]
    new = {ours: row[theirs] for ours, theirs in pairs if theirs in row}
    taken = {theirs for _, theirs in pairs}
    return {name: value for name, value in row.items() if name not in taken and name not in new} | new


def _read_rows(path: Path, found: Found, field: str) -> Iterator[tuple[str, Any, DataError | None, int]]:
    if found.form == "parquet":
        yield from _parquet_rows(path, found, field)
    elif found.form == "JSON":
        for number, row, size in read_json(path, found.packed):
            yield f"{path}: row {number}", row, None, size
    else:
        yield from _line_rows(path, found.packed)


def _line_rows(path: Path, packed: str) -> Iterator[tuple[str, Any, DataError | None, int]]:
    """`read_rows` for JSON lines; empty lines are left out."""
    before = 0
    with opened(path, packed) as (stream, file):
        for number, line in enumerate(stream, start=1):
            size = file.tell() - before
            before = file.tell()
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                yield where, json.loads(line), None, size
            except (ValueError, RecursionError) as error:
                yield where, None, DataError(f"{where}: not JSON: {error}"), size


def read_json(path: Path, packed: str, most: int | None = None) -> Iterator[tuple[int, Any, int]]:
    """Number (from 1), value and bytes of each value of a JSON array, or of values that follow one another.

    One value at a time is in memory. most: characters within which the first value must end.
    DataError if the file ends within a value, or is not JSON.
    """
    number = 0
    before = 0  # bytes of the file at the last value
    with opened(path, packed) as (stream, file):
        text = io.TextIOWrapper(stream, encoding="utf-8-sig")
        try:
            for value in _values(text, most):
                number += 1
                size = file.tell() - before
                before = file.tell()
                yield number, value, size
        except (ValueError, RecursionError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path}: row {number + 1}: not JSON: {error}") from error
        finally:
            text.detach()


def _values(text: io.TextIOWrapper, most: int | None) -> Iterator[Any]:
    """The values of `read_json`. ValueError for text that is not JSON."""
    decoder = json.JSONDecoder()
    first = True  # no value has been found yet
    closed = False  # the array has ended
    done = False  # the file has ended
    needed = 0  # characters that the buffer must hold before the next value is parsed again
    buffer = text.read(PIECE)
    at = _blank(buffer, 0)
    array = buffer.startswith("[", at)
    at += array
    while True:
        at = _blank(buffer, at, "," if array else "")
        if array and buffer.startswith("]", at):
            at = _blank(buffer, at + 1)
            closed = True
        if at < len(buffer) and closed:
            raise ValueError("something follows the array")
        if at < len(buffer) and len(buffer) - at >= needed:
            try:
                value, end = decoder.raw_decode(buffer, at)
                if end < len(buffer) or done:
                    yield value
                    first = False
                    at = end
                    needed = 0
                    continue
            except ValueError:
                if done:
                    raise
                needed = 2 * (len(buffer) - at)  # so that the value is not parsed again with every piece
        if done:
            break
        if most is not None and first and len(buffer) > most:
            raise ValueError(f"the first value does not end within {most} characters")
        more = text.read(PIECE)
        done = not more
        needed = 0 if done else needed
        buffer, at = buffer[at:] + more, 0
    if array and not closed:
        raise ValueError("the file ends within the array")


def _blank(text: str, at: int, also: str = "") -> int:
    """The position of the next character that is neither blank nor in `also`."""
    while at < len(text) and (text[at].isspace() or text[at] in also):
        at += 1
    return at


def _parquet_rows(path: Path, found: Found, field: str) -> Iterator[tuple[str, Any, DataError | None, int]]:
    """`read_rows` for parquet: only the column `field` if the file has it and no column is renamed, else all.

    All columns are read because the error of a row without text names them.
    """
    require_package(path, "parquet", "pyarrow", "'tmoe[parquet]', or pip install pyarrow")
    if found.packed:
        raise DataError(f"{path}: parquet within {found.packed}; unpack it, for parquet is compressed itself")
    import pyarrow.parquet  # pyrefly: ignore[missing-import]

    try:
        file = pyarrow.parquet.ParquetFile(path)
        columns = [field] if field in file.schema_arrow.names and not found.columns else None
        binary = "binary" in str(file.schema_arrow)
        number = 0
        size = -(-path.stat().st_size // max(file.metadata.num_rows, 1))
        for table in file.iter_batches(batch_size=256, columns=columns):
            for row in table.to_pylist():
                number += 1
                yield f"{path}: row {number}", _as_text(row) if binary else row, None, size
    # Errors raised by the code that consumes these rows are not caught here.
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: damaged parquet: {error}") from error


def _as_text(value: Any) -> Any:
    """The value with binary UTF-8 decoded as text, since some writers of parquet store text as binary."""
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()
        return value
    if isinstance(value, dict):
        return {name: _as_text(item) for name, item in value.items()}
    return [_as_text(item) for item in value] if isinstance(value, list) else value
