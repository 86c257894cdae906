"""Step folders by name: which are published, the rename that publishes one, the remains of killed saves.

`step-N` is published: it is whole, or its damage can be proven.
`step-N.tmp-UUID` is being written or removed.
`step-N.old-UUID` is the previous step N while a second save of that number replaces it. It exists only
between two renames.

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
    """(saved_ns, step folder) for each step with an undamaged manifest, newest first; and the other steps'
    problems.

    Newest means saved last: after a rollback, that is the step with the lower number.
    """
    steps = []
    problems = []
    for path in entries(folder, published=True):
        try:
            steps.append((read_saved_ns(path), path))
        except CheckpointError as error:
            problems.append(str(error))
    return sorted(steps, reverse=True), problems


def entries(folder: Path, published: bool) -> list[Path]:
    """Published step folders, and replaced ones whose successor is not there yet; or all others."""
    # A link without a target may point to a disk that is not mounted: a run must not start from step 0 then.
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
    """`path`; or the step's .old folder, if a save was killed between the two renames that replace the step.

    Raises CheckpointError for a folder of steps or of a run; it names the newest step in that folder.
    """
    if not (path / NAME).exists():
        for folder in (path, path / "checkpoints"):
            if steps := published(folder)[0]:
                raise CheckpointError(f"{path}: no step folder; did you mean {steps[0][1]}?")
    return path if path.exists() else next(iter(path.parent.glob(f"{path.name}.old-*")), path)


def steps_in(path: Path) -> Path | None:
    """The folder that holds the steps of `path`, a run folder or a folder of steps; None if there is no step.

    Raises CheckpointError for a run whose checkpoints/ is a link without a target.
    """
    for folder in (path / "checkpoints", path):
        if (folder.is_dir() or folder.is_symlink()) and entries(folder, published=True):
            return folder
    return None


def newest_in(steps: Path) -> tuple[Path, list[str]]:
    """The step of a folder that was saved last and has all its files, and the problems of newer steps.

    Sizes are compared; shards are not hashed here but when the weights are read. Raises CheckpointError if no
    step has its files.
    """
    newest_first, problems = published(steps)
    for _, step in newest_first:
        if not (wrong := verify(step, share=None)):
            return step, problems
        problems += wrong
    more = f", and {len(problems) - 1} more problems" if problems[1:] else ""
    raise CheckpointError(f"{steps}: no whole checkpoint: {problems[0]}{more}")


def sibling(path: Path, kind: str) -> Path:
    """An unused name next to `path`. kind: "tmp" (being written or removed) or "old" (being replaced)."""
    return path.with_name(f"{path.name}.{kind}-{uuid.uuid4().hex}")


def next_saved_ns(folder: Path) -> int:
    """The saved_ns of the step that is about to be published.

    It is later than that of every step in the folder, even if the clock was set back.
    """
    return max([time.time_ns(), *(earlier + 1 for earlier, _ in published(folder)[0])])


def publish(temporary: Path, final: Path) -> None:
    """Give the complete folder `temporary` its public name.

    An existing step of that name is renamed first, and removed once its successor is safe.

    If the process is killed at any point, either the old or the new step is found, never a mixture.
    """
    sync_folder(temporary)
    displaced = sibling(final, "old") if final.exists() else None
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

    The folder loses its public name first, so that a kill half way leaves no damaged step under that name.
    """
    if "." not in path.name:
        condemned = sibling(path, "tmp")
        os.rename(path, condemned)
        path = condemned
    shutil.rmtree(path, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what killed saves left in `folder`.

    Only the writer of a folder may call it: a save in progress looks the same as a killed one.
    """
    for path in entries(folder, published=True):
        if ".old-" in path.name:  # killed between the two renames: give the old step its name back
            os.rename(path, path.with_name(path.name.split(".")[0]))
    for path in entries(folder, published=False):
        remove(path)
