"""Inspects, verifies, reshards and averages checkpoints on a machine without GPU or process group.

    python -m tmoe.checkpoint inspect runs/a/checkpoints/step-1000                  what it holds
    python -m tmoe.checkpoint inspect runs/a/checkpoints/step-1000 --tensor NAME    statistics of one tensor
    python -m tmoe.checkpoint inspect runs/a/checkpoints/step-1000 --brief          its changed settings
    python -m tmoe.checkpoint inspect runs/a                                        its steps, and the best
    python -m tmoe.checkpoint verify runs/a/checkpoints                             every byte of every step
    python -m tmoe.checkpoint reshard STEP DST --world 64 --ep 8                    files for another world
    python -m tmoe.checkpoint reshard STEP DST --world 1 --only model --dtype bf16  weights alone, in bf16
    python -m tmoe.checkpoint average STEP STEP STEP DST                            mean of the weights
    python -m tmoe.checkpoint average STEP DST --ema                                training's own average

Exit code 0: done; 2: refused, with the reason on stderr; 1: failed, interrupted, or damage found. The memory
needed is that of a few tensors.

This file has the flags. A command imports its computation when it runs, so that --help does not load torch.

next: checkpoint/plans.py, checkpoint/inspect.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from tmoe import front
from tmoe.base import disk
from tmoe.base.listing import listed
from tmoe.checkpoint.errors import CheckpointError
from tmoe.front import call

if TYPE_CHECKING:
    from tmoe.checkpoint.rewrite import Advance

WIDTH = 200  # columns of a line that is written to a file or a pipe
HASHED = 1 << 30  # most bytes of a step that `inspect` hashes; of a larger step it checks only the sizes


# ---- inspect, verify ----


def inspect(
    path: Annotated[Path, tyro.conf.arg(metavar="STEP")],
    /,
    tensor: str | None = None,
    json: bool = False,
    brief: bool = False,
) -> None:
    """Show the run, settings and tensors of a step folder.

    Args:
            path: a step folder; for a run folder, its steps are listed with their validations
            tensor: show statistics of this tensor instead; its bytes are checked
            json: print JSON
            brief: a few lines, with only the settings that are not the defaults
    """
    from rich.console import Console

    from tmoe.checkpoint import folders
    from tmoe.checkpoint import inspect as inspection
    from tmoe.checkpoint import manifest as files

    if brief and (json or tensor):
        raise CheckpointError("--brief: not with --json or --tensor")
    if not (tensor or brief or json) and (steps := steps_of(path)):
        return inspection.show_steps(steps)
    path = folders.resolve(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such folder; valid: a step folder or a run folder")
    manifest = files.read_manifest(path)  # raises for a folder that is no step
    if problems := files.verify(path, share=(0, 1) if _size(path) <= HASHED else None):
        print(
            listed("warning: this step is not whole, and a run would not use it:", problems), file=sys.stderr
        )
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    if tensor is None:
        if brief:
            return inspection.show_brief(path, manifest, console)
        return _print_json(inspection.as_json(manifest)) if json else inspection.show(path, manifest, console)
    entry, statistics = inspection.statistics(path, tensor)
    if not json:
        return inspection.show_statistics(tensor, entry, statistics, console)
    whole, *experts = (part.as_json() for part in statistics)
    _print_json(dict(name=tensor, shape=entry.shape, dtype=entry.dtype) | whole | dict(experts=experts))


def steps_of(path: Path) -> list[Path]:
    """The steps of a run folder or of a checkpoints folder, newest first; none for a step folder."""
    from tmoe.checkpoint import folders, manifest

    if (path / manifest.NAME).exists():
        return []
    lists = ([step for _, step in folders.published(at)[0]] for at in (path, path / "checkpoints"))
    return next(filter(None, lists), [])


def _size(path: Path) -> int:
    """Bytes of the files of a step folder; 0 for a folder that is gone."""
    from tmoe.checkpoint import manifest as files

    return sum(size for _, size, *_ in files.stamp(path) or ())


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def verify(path: Path, /) -> None:
    """Hash every byte of a step folder, or of every step in a checkpoints folder; exit code 1 if any is
    damaged.

    Args:
        path: a step folder, a folder of steps, or a run folder
    """
    from tmoe.checkpoint import folders
    from tmoe.checkpoint.rewrite import bar

    lists = [folders.entries(folder, published=True) for folder in (path, path / "checkpoints")]
    steps = lists[0] or lists[1] or [folders.resolve(path)]
    damaged = 0
    with bar("verifying", sum(map(_size, steps))) as advance:
        for step in steps:
            if (problems := _problems(step, advance)) is None:
                print(f"removed  {step}")
                continue
            print(listed(f"damaged  {step}" if problems else f"whole    {step}", problems))
            damaged += bool(problems)
    if damaged:
        raise SystemExit(f"error: {damaged} of {len(steps)} steps damaged")  # exit code 1


def _problems(step: Path, advance: Advance) -> list[str] | None:
    """The problems of a step; None if the run that owns it has removed it meanwhile.

    A step that was replaced meanwhile is verified again.
    """
    from tmoe.checkpoint import manifest as files

    for _ in range(3):
        before = files.stamp(step)
        problems = files.verify(step, advance=advance)
        if not problems or (now := files.stamp(step)) == before:
            break
        if now is None:
            return None
    return problems


# ---- reshard ----


def reshard(
    src: Annotated[Path, tyro.conf.arg(metavar="SRC")],
    dst: Annotated[Path, tyro.conf.arg(metavar="DST")],
    /,
    *,
    world: int,
    ep: int = 1,
    dtype: Literal["bf16", "fp32"] | None = None,
    only: tuple[Literal["model", "ema", "optim"], ...] = (),
    dry_run: bool = False,
) -> None:
    """Write a step folder again for another number of ranks: each rank will find its rows in its own files.

    If the command is killed, the same command continues. DST appears when everything is written and verified.

    Args:
        src: a step folder
        dst: a new folder
        world: number of ranks that will load it
        ep: ranks of an expert group
        dtype: cast the weights and their average, to the nearest, ties to even; moments and choice biases
            keep their type
        only: keep these parts; default: all
        dry_run: only say what would be written
    """
    from tmoe.checkpoint import folders
    from tmoe.checkpoint.plans import carry_out, plan_reshard
    from tmoe.parallel.layout import axes_of_flags

    src = folders.resolve(src)
    carry_out(plan_reshard(src, axes_of_flags(world, ep), dtype, only), [src], dst, dry_run)


# ---- average ----


def average(
    paths: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="STEP... DST")],
    /,
    *,
    ema: bool = False,
    dry_run: bool = False,
) -> None:
    """STEP... DST: write the mean of the weights of several steps, or with --ema the average that training
    kept.

    The result holds only weights, in the layout of the first step: `train.py --init DST` starts from it.

    Args:
        paths: step folders, then the new folder
            ema: use each step's moving average (--optim.ema) instead of its weights
            dry_run: only say what would be written
    """
    from tmoe.checkpoint import folders
    from tmoe.checkpoint.manifest import read_manifest
    from tmoe.checkpoint.plans import carry_out, plan_average

    if len(paths) < 2:
        raise ValueError("average needs STEP... DST: at least one step folder and a new folder")
    *steps, dst = paths
    steps = [folders.resolve(step) for step in steps]
    carry_out(plan_average(steps, ema), steps, dst, dry_run)
    chats = [read_manifest(step).info.get("chat") for step in steps]
    if others := [str(step) for step, chat in zip(steps, chats, strict=True) if chat != chats[0]]:
        print(f"{dst}: conversations are written as in {steps[0]}; they differ in {', '.join(others)}")


def main(argv: Sequence[str] | None = None) -> None:
    """The command line. An error ends the process with one message."""
    names: dict[str, Any] = dict(inspect=inspect, verify=verify, reshard=reshard, average=average)
    commands(names, "python -m tmoe.checkpoint", __doc__, argv, config=(tyro.conf.FlagCreatePairsOff,))


def commands(what: Any, prog: str, text: str | None, argv: Sequence[str] | None, **more: Any) -> None:
    """Run a command line. An error ends the process with one message.

    what: a function, or functions by subcommand.
    text: the module's docstring, which --help shows.
    """
    with one_message():
        description = (text or "").partition("\nnext:")[0]
        call(what, prog, disk.expand_home(argv), description=description, **more)


def one_message() -> AbstractContextManager[None]:
    """Surrounds a command that works on checkpoints: an error ends the process with one message."""
    stopped = "interrupted; the same command continues after what is finished"
    return front.one_message(CheckpointError, RecursionError, interrupted=stopped)
