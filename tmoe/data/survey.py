"""Lists the files of a source in reading order and finds their kind from their first bytes.

All files of a source are of one kind: a folder with files of several kinds is refused, and a pattern
('folder/*.jsonl') selects those of one kind. A JSON file among texts (a package.json among source code) is
read as text too, unless it holds rows of a data set.

next: data/row_files.py, data/sources.py
"""

from __future__ import annotations

import glob
import itertools
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tmoe.base.disk import absent_words
from tmoe.base.listing import counted
from tmoe.data import hub_datasets
from tmoe.data.corpus import Split
from tmoe.data.indexed import is_indexed
from tmoe.data.row_files import PACKED_SUFFIXES, Form, Found, look, with_columns
from tmoe.data.tokenizer import NAMES, SETTINGS, TEMPLATE, DataError


class Facts(NamedTuple):
    """Facts found while reading a source: its documents, how the first begins, what was left out."""

    documents: int
    first: str
    skipped: str = ""


# These parts of the standard library are left out:
# - files that are not source text: caches, installed packages, build configuration;
# - generated files: codec tables, pydoc's topics, HTML entities;
# - tests (60% of the bytes, mostly assertions and data);
# - packages that distributions ship separately or that later versions dropped.
# Without them the libraries of Python 3.11 to 3.13 are nearly the same 8 MB.
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
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not STDLIB_SKIPPED_FOLDERS.fullmatch(name)]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    by_name = {path.relative_to(root).as_posix(): path for path in paths}
    return [by_name[key] for key in sorted(by_name) if not STDLIB_SKIPPED_FILES.fullmatch(key)]


# Files that Spark, Hadoop, Hive and dask write next to parts of a table: summaries, markers, checksums.
NO_ROWS = re.compile(r"_metadata|_common_metadata|_SUCCESS|_started_.*|_committed_.*|.*\.crc")
NO_PARTS = {"_temporary", "_spark_metadata"}  # folders that they leave, with parts that were never committed
# Names of folders that hold a table's log (which of its files still count), and the kind of table.
LOGS = {"_delta_log": "a Delta table", ".hoodie": "a Hudi table"}


def _below(path: Path) -> Iterator[Path]:
    """Everything below a folder.

    DataError for a folder that may not be read, which Path.rglob would leave out silently, and for a folder
    that holds a table's log.
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
    """Root and files of a source in reading order: sorted by relative path, hidden files left out."""
    if name == "stdlib":
        return Path(sysconfig.get_path("stdlib")), stdlib_files()
    if name.startswith(hub_datasets.PREFIX):
        return hub_datasets.files_of(name)
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
    """The files of a folder in reading order. DataError for an unreadable entry, or for an empty folder."""
    entries = {entry.relative_to(path).as_posix(): entry for entry in _below(path)}
    visible = [entries[key] for key in sorted(entries) if not re.search(r"(^|/)\.", key)]
    if "metadata/version-hint.text" in entries or any(key.endswith(".metadata.json") for key in entries):
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
                "remove it, and name a folder that it leads to as a separate source"
            )
    if not files:
        raise DataError(f"{name}: the folder holds no files")
    return sorted(files, key=lambda entry: entry.relative_to(path).as_posix())


def _require_one_split(root: Path, files: list[Path]) -> None:
    """DataError for a folder with both training and test rows, as in a clone of a data set of the hub."""
    splits: dict[str, list[str]] = {}
    for path in (file.relative_to(root) for file in files):
        if split := hub_datasets.split_of_rows(path.as_posix()):
            splits.setdefault(split, []).append(path.as_posix())
    if len(splits) < 2:
        return
    counts = ", ".join(f"{split} ({len(inside)})" for split, inside in splits.items())
    paths = splits.get("train", next(iter(splits.values())))
    start = os.path.commonprefix(paths)  # noqa: RUF071 (of characters: one pattern for all parts)
    pattern = paths[0] if len(paths) == 1 else f"{start}*"
    raise DataError(
        f"{root}: holds files of several splits, {counts}; valid: those of one split, {root / pattern}, and "
        "another split as --data.val-path"
    )


def _left_out(path: Path) -> bool:
    """Whether a file, by its path within the source, holds none of the source's rows."""
    return bool(NO_ROWS.fullmatch(path.name)) or not NO_PARTS.isdisjoint(path.parts)


def _matching(pattern: str) -> tuple[Path, list[Path]]:
    """Root and files of a pattern, as by `text_files`: 'folder/*.jsonl', 'folder/**/*.py'."""
    root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts))
    matching = map(Path, glob.glob(pattern, recursive=True))
    files = sorted(path for path in matching if path.is_file() and not _left_out(path.relative_to(root)))
    if not files:
        raise DataError(f"{pattern}: no file of such a name")
    return root, files


class Survey(NamedTuple):
    """A source's files and the kind of data that was found in them."""

    name: str
    form: Form
    root: Path
    files: list[tuple[Path, Found]]
    columns: tuple[str, ...] = ()
    """columns to rename, OURS=THEIRS"""

    def tell(self, facts: Facts) -> str:
        """The source in words: its kind, files, documents, how the first begins, what was left out."""
        packed = sorted({file.packed for _, file in self.files if file.packed})
        among = sum(bool(file.rows) for _, file in self.files) if self.form == "plain text" else 0
        form = f"{self.form} ({','.join(packed)})" if packed else self.form
        parts = [
            f"{form} in {counted(len(self.files), 'file')}",
            *([f"{among} of them JSON, read as text like the other files"] if among else []),
            counted(facts.documents, "document") if facts.documents >= 0 else "documents not counted",
            *([f"the first begins {facts.first!r}"] if facts.first else []),
            *([facts.skipped] if facts.skipped else []),
        ]
        return ", ".join(parts)


BESIDE = (*NAMES, SETTINGS, TEMPLATE)  # files of a tokenizer that may be in a folder of shards


def survey(name: str, columns: tuple[str, ...] = ()) -> Survey:
    """Reads the first bytes of every file of a source. DataError if the files are of several kinds.

    columns: columns of the rows to rename, OURS=THEIRS.
    """
    root, files = text_files(name)
    if name == "stdlib" and not columns:
        return Survey(name, "plain text", root, [(path, Found("plain text")) for path in files])
    looked = [(path, with_columns(look(path), columns)) for path in files]
    if any(file.form == "plain text" for _, file in looked):
        looked = [(path, file if file.sure else _as_text(file)) for path, file in looked]
    looked = [(path, file) for path, file in looked if file.form != "nothing"]
    if any(file.form == "token shards" for _, file in looked):  # leave out their tokenizer's files
        looked = [(path, file) for path, file in looked if path.name not in BESIDE]
    forms = Counter(file.form for _, file in looked)
    if len(forms) > 1:
        raise _several_kinds(name, root, looked, forms)
    form: Form = next(iter(forms), "plain text")
    if columns and form not in ("JSON lines", "JSON", "parquet"):
        raise DataError(f"{name}: is {form}, which has no columns; leave --data.columns out")
    return Survey(name, form, root, looked, columns)


def none_in_split(name: str, rows: str, split: Split) -> str:
    """The error message for a split that has none of a source's rows."""
    why = f"none of its {rows} is in its {split} split (those of equal prompts stay together)"
    do = "name rows for validation with --data.val-path" if split == "train" else "give more prompts"
    return f"{name}: {why}; change --data.val-fraction (or --data.split), or {do}"


def require_rows(source: Survey, rows: str) -> None:
    """DataError for a source that holds anything but rows. rows: the valid rows in words, for the message."""
    what = source.form if source.files else "empty"
    if what not in ("JSON lines", "JSON", "parquet"):
        if any(path.suffix.lower() in (".csv", ".tsv") for path, _ in source.files):
            what = "a table as text, which is not read as rows (write it as JSON lines or parquet)"
        raise DataError(f"{source.name}: is {what}; valid: rows {rows}")


def _as_text(file: Found) -> Found:
    return file._replace(form="plain text") if file.form in ("JSON", "JSON lines") else file


def _several_kinds(
    name: str, root: Path, looked: list[tuple[Path, Found]], forms: Counter[Form]
) -> DataError:
    """The error for a source of several kinds: lists files of each kind, and patterns that select one."""
    kinds = []
    patterns = []
    for form, count in forms.most_common():
        paths = [path for path, file in looked if file.form == form]
        shown = ", ".join(str(path.relative_to(root)) for path in paths[:3]) + ", …" * (count > 3)
        kinds.append(f"{form}: {count:,} ({shown})")
        suffix = Counter(_suffix(path) for path in paths).most_common(1)[0][0]
        patterns.append(f"'{root}/**/*{suffix}'")
    return DataError(
        f"{name}: holds files of several kinds, {'; '.join(kinds)}. A source is of one kind: name it by a "
        f"pattern in quotes, as {' or '.join(patterns)}, or name its files, or move the other files away"
    )


def _suffix(path: Path) -> str:
    """The file's suffix; for a compressed file the last two (.jsonl.gz)."""
    return "".join(path.suffixes[-2:]) if path.suffix.lower() in PACKED_SUFFIXES else path.suffix
