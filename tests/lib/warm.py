"""The folder that CI keeps between its runs: caches of inductor and Triton, and the record of green files.

    with warm.kept() as folder: ...      # the variables of both caches are set inside

The folder is ${XDG_CACHE_HOME:-~/.cache}/tmoe-ci, with one folder for each combination of Python, torch,
Triton and processor. A run starts with the caches of the last run, if every test of that run passed; any
other caches are deleted, so that a damaged cache fails no test. If the folder cannot be written, or another
run uses the caches, the run uses a temporary folder and prints a line about it.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
LIMIT_BYTES = 4 * 2**30  # caches never delete the results of older versions of the code


@contextlib.contextmanager
def kept() -> Iterator[Path]:
    """Yields the folder of the record. The caches are kept unless the body raises an exception."""
    with contextlib.ExitStack() as stack:
        spare = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tmoe-ci-")))
        place = folder() or spare
        caches = place if place != spare and _locked(place, stack) else spare
        if caches == spare:
            print(
                "CI's caches are empty and will not be kept: their folder is in use or not writable",
                flush=True,
            )
        seal = caches / "seal"
        if not seal.is_file() or seal.read_text() != (digest(caches) or "unlike any"):
            for name in CACHES.values():
                shutil.rmtree(caches / name, ignore_errors=True)
        seal.unlink(missing_ok=True)
        os.environ.update({variable: str(caches / name) for variable, name in CACHES.items()})
        yield place
        with contextlib.suppress(OSError):
            seal.write_text(digest(caches))


def folder() -> Path | None:
    """The folder of these versions; None if it cannot be created or written."""
    versions = [f"python{platform.python_version()}"]
    for package in ("torch", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package}{importlib.metadata.version(package)}")
    try:
        top = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        place = top / "tmoe-ci" / "-".join([*versions, _processor()])
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            return place
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return None


def digest(caches: Path) -> str:
    """The hash of all files of both caches; "" if they exceed LIMIT_BYTES or a file cannot be read."""
    sha = hashlib.sha256()
    size = 0
    try:
        for path in sorted(path for name in CACHES.values() for path in (caches / name).rglob("*")):
            data = path.read_bytes() if path.is_file() else b""
            size += len(data)
            sha.update(f"{path.relative_to(caches)} {hashlib.sha256(data).hexdigest()}\n".encode())
    except OSError:
        return ""
    return sha.hexdigest() if size <= LIMIT_BYTES else ""


def _locked(place: Path, stack: contextlib.ExitStack) -> bool:
    """Whether the caches belong to this run until the stack ends."""
    try:
        lock = stack.enter_context((place / "lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _processor() -> str:
    """Eight letters for the instruction set of this processor, for which inductor compiles."""
    with contextlib.suppress(OSError):
        flags = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")]
        return hashlib.sha256(flags[0].encode() if flags else platform.machine().encode()).hexdigest()[:8]
    return platform.machine()
