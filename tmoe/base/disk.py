"""Writes files that are whole or absent: synced, renamed, hashed, with errors that name the path."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[TextIO]:
    """A file to write that replaces `path` at the end of the context.

    Readers, also after a crash, find either the old file or the new one.
    """
    aside = path.with_suffix(path.suffix + ".tmp")
    with naming(aside), open(aside, "w") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def unwritable_words(place: Path) -> str:
    """Why nothing can be written at `place`, which may not exist yet; "" if something can."""
    path = place.absolute()
    # os.path: Path.exists raises in a folder that may not be searched.
    nearest = next(p for p in (path, *path.parents) if os.path.lexists(p))
    if nearest.is_symlink() and not os.path.exists(nearest):
        return f"{nearest} is a link to nothing, {os.readlink(nearest)}; mount it, or remove the link"
    written = nearest.is_dir() and os.access(nearest, os.W_OK)
    return "" if written else f"{nearest} must be a folder that can be written"


@dataclass(frozen=True)
class FileEntry:
    """One file of the folder: bytes and SHA-256."""

    size: int
    sha256: str


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A context for writing `path`: an OSError without a file's name is raised again with this path.

    The errors of write, flush and fsync have no file's name.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


class HashedFile:
    """A new file that hashes what is written to it and is synced to the disk when it is closed.

    Its OSErrors name the path. The `with` block raises the first error: after a full disk, torch.save
    itself would raise "unexpected pos 704 vs 598" instead.
    """

    def __init__(self, path: Path):
        self.path = path
        self.size = 0
        self._sha = hashlib.sha256()
        self._failed: OSError | None = None

    def __enter__(self) -> HashedFile:
        self._file = open(self.path, "xb")
        return self

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self._fail(error)
            raise
        self._sha.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:  # torch.save flushes after every payload; one flush at the end is enough
        pass

    def __exit__(self, *_: object) -> None:
        try:
            with self._file:  # closes it even after an error
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as error:
            self._fail(error)
        if self._failed:
            raise self._failed

    def _fail(self, error: OSError) -> None:
        """Keep the first error, with the path in it."""
        self._failed = self._failed or OSError(error.errno, error.strerror, str(self.path))

    def entry(self) -> FileEntry:
        return FileEntry(self.size, self._sha.hexdigest())


# A part of the short text, or of the broken link, that git-annex leaves in the place of a file.
ANNEX = "annex/objects/"
ANNEX_WORDS = "is a pointer of git-annex, not the file itself: run git annex get in its folder"
# Descriptions of pointers, which replace files that were not downloaded, by their first bytes.
POINTERS = {
    b"version https://git-lfs": (
        "is a Git LFS pointer, not the file itself: run git lfs pull in its folder, or download the file "
        "again (hf download)"
    ),
    b"/" + ANNEX.encode(): ANNEX_WORDS,
}
BOM = b"\xef\xbb\xbf"


def pointer_words(raw: bytes) -> str:
    """The description of a file that begins with `raw`, if it is only a pointer to a file; else ""."""
    return next((words for start, words in POINTERS.items() if raw.startswith(start)), "")


def absent_words(path: Path) -> str:
    """Why there is no file at `path`: "missing", or a description of the broken link."""
    if not path.is_symlink():
        return "missing"
    target = os.readlink(path)
    return ANNEX_WORDS if ANNEX in target else f"a link to nothing, {target} (cp -L follows links)"


def no_folder_words(path: Path) -> str:
    """Why there is no folder at `path`: it is a file, whose folder is named, or nothing is there."""
    if not path.is_file():
        return "no such folder"
    return f"a file, and no folder; name the folder that holds it: {path.parent}"


def text_of(path: Path) -> str:
    """A file's UTF-8 text without a byte order mark. ValueError for a pointer (POINTERS)."""
    raw = path.read_bytes()
    if words := pointer_words(raw):
        raise ValueError(words)
    return raw.decode("utf-8-sig")


def expand_home(words: Iterable[str] | None = None) -> list[str]:
    """The words of a command line (None: this process's), with `~` replaced by the home folder.

    A shell does not replace the `~` in --out=~/x.
    """
    expanded = []
    for word in sys.argv[1:] if words is None else words:
        flag, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        expanded.append(flag + equals + os.path.expanduser(value))
    return expanded


def sync_folder(path: Path) -> None:
    """Syncs the folder, so that the names of its files survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
