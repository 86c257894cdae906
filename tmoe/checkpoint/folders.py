"""Step folders by name: which are published, the rename that publishes one, what killed saves left behind.

`step-N` is published: it is whole, or provably damaged.
`step-N.tmp-UUID` is being written or being removed.
`step-N.old-UUID` is a step that a second save of the same number displaces, between two renames only.

next: checkpoint/manifest.py
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from pathlib import Path

from tmoe.base.disk import sync_folder
from tmoe.checkpoint.manifest import NAME, CheckpointError, read_saved_ns, verify

_STEP = re.compile(r"(step-\d+)(?:\.(tmp|old)-[0-9a-f]{32})?")


def published(folder: Path) -> tuple[list[tuple[int, Path]], list[str]]:
    """(saved_ns, step folder) of steps with an undamaged manifest, newest first; and the others' problems.

    Newest means saved last: after a rollback the lower step number is the one to go on from.
    """
    found = []
    problems = []
    for path in entries(folder, published=True):
        try:
            found.append((read_saved_ns(path), path))
        except CheckpointError as error:
            problems.append(str(error))
    return sorted(found, reverse=True), problems


def entries(folder: Path, published: bool) -> list[Path]:
    """Published step folders (a displaced one too, while its successor is not there), or the others."""
    # A link to nothing may be a disk that is not mounted: no run may start anew beside it.
    if folder.is_symlink() and not folder.exists():
        raise CheckpointError(
            f"{folder}: a link to nothing, {os.readlink(folder)}; mount it, or remove the link"
        )
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    steps = [match for match in map(_STEP.fullmatch, names) if match]
    present = {match[1] for match in steps if not match[2]}
    is_published = {
        match[0]: not match[2] or (match[2] == "old" and match[1] not in present) for match in steps
    }
    return [folder / name for name, public in is_published.items() if public == published]


def resolve(path: Path) -> Path:
    """`path`, or where its step lies if a save was killed between the two renames that replace it.

    CheckpointError for a folder of steps or of a run; it names the newest step in that folder.
    """
    if not (path / NAME).exists():
        for folder in (path, path / "checkpoints"):
            if steps := published(folder)[0]:
                raise CheckpointError(f"{path}: no step folder; did you mean {steps[0][1]}?")
    return path if path.exists() else next(iter(path.parent.glob(f"{path.name}.old-*")), path)


def steps_in(path: Path) -> Path | None:
    """The folder that has the steps of `path`, a run folder or a folder of steps; None without any step.

    CheckpointError for a run whose checkpoints/ is a link to nothing.
    """
    for folder in (path / "checkpoints", path):
        if (folder.is_dir() or folder.is_symlink()) and entries(folder, published=True):
            return folder
    return None


def newest_in(steps: Path) -> tuple[Path, list[str]]:
    """The step of a folder that was saved last and has all its files, and the problems of newer ones.

    Compares sizes and hashes no shard: reading the weights does. CheckpointError where no step has its files.
    """
    found, problems = published(steps)
    for _, step in found:
        if not (wrong := verify(step, share=None)):
            return step, problems
        problems += wrong
    more = f", and {len(problems) - 1} more problems" if problems[1:] else ""
    raise CheckpointError(f"{steps}: no whole checkpoint: {problems[0]}{more}")


def beside(path: Path, kind: str) -> Path:
    """A name for `path` that was never used: kind tmp (being written or removed) or old (displaced)."""
    return path.with_name(f"{path.name}.{kind}-{uuid.uuid4().hex}")


def next_saved_ns(folder: Path) -> int:
    """saved_ns of the step that is about to be published.

    It is later than that of every step in the folder, even when the clock was set back.
    """
    return max([time.time_ns(), *(earlier + 1 for earlier, _ in published(folder)[0])])


def publish(temporary: Path, final: Path) -> None:
    """Give the complete folder `temporary` its public name.

    A step of that name is displaced, and removed once its successor is safe.

    Killed at any point, either the old or the new step is found, never a mixture.
    """
    sync_folder(temporary)
    displaced = beside(final, "old") if final.exists() else None
    if displaced:
        os.rename(final, displaced)
    try:
        os.rename(temporary, final)
    except OSError:
        if displaced:
            os.rename(displaced, final)
        raise
    sync_folder(final.parent)
    if displaced:
        remove(displaced)


def remove(path: Path) -> None:
    """Delete a step folder.

    It loses its public name first, so that a kill half way leaves no damaged step behind.
    """
    if "." not in path.name:
        condemned = beside(path, "tmp")
        os.rename(path, condemned)
        path = condemned
    shutil.rmtree(path, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Clear what killed saves left in `folder`.

    Only the writer of a folder may call it: a save in flight looks the same as a killed one.
    """
    for path in entries(folder, published=True):
        if ".old-" in path.name:  # killed between the two renames: the old step gets its name back
            os.rename(path, path.with_name(path.name.split(".")[0]))
    for path in entries(folder, published=False):
        remove(path)
