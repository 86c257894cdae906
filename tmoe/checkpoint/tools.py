"""Take checkpoints apart and together on a machine without GPU or process group.

    python -m tmoe.checkpoint inspect runs/a/checkpoints/step-1000                  what it holds
    python -m tmoe.checkpoint inspect runs/a/checkpoints/step-1000 --tensor NAME    statistics of one tensor
    python -m tmoe.checkpoint inspect runs/a/checkpoints/step-1000 --brief          its changed settings
    python -m tmoe.checkpoint inspect runs/a                                        its steps, and the best
    python -m tmoe.checkpoint verify runs/a/checkpoints                             every byte of every step
    python -m tmoe.checkpoint reshard STEP DST --world 64 --ep 8                    files for another world
    python -m tmoe.checkpoint reshard STEP DST --world 1 --only model --dtype bf16  weights alone, in bf16
    python -m tmoe.checkpoint average STEP STEP STEP DST                            mean of the weights
    python -m tmoe.checkpoint average STEP DST --ema                                training's own average

Exit code 0: done; 1: damaged, refused or failed, the reason on stderr; 2: not a command line. Memory is that
of a few tensors.

next: checkpoint/rewrite.py, checkpoint/inspect.py
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.filesize import decimal
from torch import Tensor

from tmoe import disk, front
from tmoe.checkpoint import folders
from tmoe.checkpoint import inspect as inspection
from tmoe.checkpoint import manifest as files
from tmoe.checkpoint.dcp import RNG
from tmoe.checkpoint.manifest import CheckpointError, Manifest, TensorEntry, dtype_of, read_manifest
from tmoe.checkpoint.rewrite import (
    Advance,
    Output,
    Plan,
    bar,
    check_space,
    divide,
    keeping,
    read_boxes,
    require_outside,
    rewrite,
)
from tmoe.config.axes import Axes
from tmoe.config.model import STEPS_READ
from tmoe.front import call
from tmoe.listing import counted, listed
from tmoe.parallel.layout import BUFFERS, Box, Layout, axes_of_flags, lay_out

DTYPES = dict(bf16=torch.bfloat16, fp32=torch.float32)
WIDTH = 200  # of lines that go into a file or a pipe
HASHED = 1 << 30  # bytes of a step that `inspect` hashes on its way; of a larger one it looks at sizes alone
CAST = ("model.", "ema.")  # what --dtype casts; moments and step counts keep their type


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
        path: a step folder; of a run folder its steps are listed, with their validations
        tensor: statistics of this tensor instead; its bytes are checked
        json: print JSON
        brief: a few lines, with those settings alone that are not the defaults
    """
    if brief and (json or tensor):
        raise CheckpointError("--brief: not with --json or --tensor")
    if not (tensor or brief or json) and (steps := steps_of(path)):
        return inspection.show_steps(steps)
    path = folders.resolve(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such folder; valid: a step folder or a run folder")
    manifest = read_manifest(path)  # what is no step folder is refused, not warned of
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
    entry, found = inspection.statistics(path, tensor)
    if not json:
        return inspection.show_statistics(tensor, entry, found, console)
    whole, *experts = (one.as_json() for one in found)
    _print_json(dict(name=tensor, shape=entry.shape, dtype=entry.dtype) | whole | dict(experts=experts))


def steps_of(path: Path) -> list[Path]:
    """The steps of a run folder or of a checkpoints folder, newest first; none of a step folder."""
    if (path / files.NAME).exists():
        return []
    return next((found for at in (path, path / "checkpoints") if (found := _published(at))), [])


def _published(folder: Path) -> list[Path]:
    return [step for _, step in folders.published(folder)[0]]


def _size(path: Path) -> int:
    return sum(size for _, size, *_ in files.stamp(path) or ())


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def verify(path: Path, /) -> None:
    """Hash every byte of a step folder, or of every step in a checkpoints folder; exit code 1 if any is
    damaged.

    Args:
        path: a step folder, a folder of steps, or a run folder
    """
    found = [folders.entries(folder, published=True) for folder in (path, path / "checkpoints")]
    steps = found[0] or found[1] or [folders.resolve(path)]
    damaged = 0
    with bar("verifying", sum(size for step in steps for _, size, *_ in files.stamp(step) or ())) as advance:
        for step in steps:
            if (problems := _problems(step, advance)) is None:
                print(f"removed  {step}")
                continue
            print(listed(f"damaged  {step}" if problems else f"whole    {step}", problems))
            damaged += bool(problems)
    if damaged:
        raise CheckpointError(f"{damaged} of {len(steps)} steps damaged")


def _problems(step: Path, advance: Advance) -> list[str] | None:
    """What is wrong with a step; None if the run that owns it removed it meanwhile.

    A step that was replaced meanwhile is looked at again.
    """
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
    """Write a step folder again for another number of ranks: each will find its rows in its own files.

    Killed, the same command goes on where it was. DST appears when everything is written and verified.

    Args:
        src: a step folder
        dst: a new folder
        world: number of ranks that will load it
        ep: ranks of an expert group
        dtype: cast the weights and their average, to the nearest, ties to even; moments and choice biases
            keep their type
        only: keep these parts; default: all
        dry_run: say what would be written
    """
    src = folders.resolve(src)
    carry_out(plan_reshard(src, axes_of_flags(world, ep), dtype, only), [src], dst, dry_run)


def plan_reshard(src: Path, axes: Axes, dtype: str | None = None, only: Sequence[str] = ()) -> Plan:
    """Plan of `reshard` for ranks of these axes.

    ValueError: ep does not divide the experts, or nothing is left. CheckpointError: src is damaged.

    Generator states stay if the world does; another number of ranks draws other numbers.
    """
    manifest = read_manifest(src)
    kept = {
        name: entry
        for name, entry in manifest.tensors.items()
        if _is_kept(name, only, axes.world == manifest.world)
    }
    if not kept:
        raise ValueError(f"{src}: holds no tensor of {', '.join(only)}")
    check_sizes(src, manifest, kept)
    layouts = lay_out({name: entry.shape for name, entry in kept.items()}, axes)
    outputs = []
    for name, entry in kept.items():
        kind = dtype_of(entry.dtype)
        if dtype and name.startswith(CAST) and kind.is_floating_point and not BUFFERS.fullmatch(name):
            kind = DTYPES[dtype]
        layout = _layout_of(entry) if name.startswith(RNG) else layouts[name]
        outputs.append(Output(name, entry.shape, kind, *layout))
    origin = origin_of("reshard", [src], world=axes.world, ep=axes.ep, dtype=dtype, only=list(only))
    return with_history(outputs, partial(_resharded, src, kept), replace(manifest, world=axes.world), origin)


def _is_kept(name: str, only: Sequence[str], same_world: bool) -> bool:
    if name.startswith(RNG):
        return same_world and not only
    return not only or name.split(".")[0] in only


def _resharded(src: Path, entries: dict[str, TensorEntry], output: Output) -> Iterator[Tensor]:
    return (part.to(output.dtype) for part in read_boxes(src, entries[output.name], output.boxes))


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

    The result holds weights alone, in the layout of the first step: `train.py --init DST` starts from it.

    Args:
        paths: step folders, then the new folder
        ema: take each step's moving average (--optim.ema) instead of its weights
        dry_run: say what would be written
    """
    if len(paths) < 2:
        raise ValueError("average needs STEP... DST: at least one step folder and a new folder")
    *steps, dst = paths
    steps = [folders.resolve(step) for step in steps]
    carry_out(plan_average(steps, ema), steps, dst, dry_run)
    chats = [read_manifest(step).info.get("chat") for step in steps]
    if others := [str(step) for step, chat in zip(steps, chats, strict=True) if chat != chats[0]]:
        print(
            f"{dst}: conversations are written as in {steps[0]}; another way is that of {', '.join(others)}"
        )


def plan_average(steps: Sequence[Path], ema: bool = False) -> Plan:
    """Plan of `average`.

    CheckpointError lists every difference in names, shapes, dtypes and model settings.
    """
    manifests = [read_manifest(step) for step in steps]
    first = manifests[0]
    prefix = "ema." if ema else "model."

    weights = {name: entry for name, entry in first.tensors.items() if name.startswith("model.")}
    sources = [
        {
            f"model.{name.removeprefix(prefix)}": entry
            for name, entry in m.tensors.items()
            if name.startswith(prefix)
        }
        for m in manifests
    ]
    # Training keeps no moving average of buffers: the steps' own values are taken.
    for entries, m in zip(sources, manifests, strict=True):
        entries |= {
            name: entry for name, entry in m.tensors.items() if ema and entries and BUFFERS.fullmatch(name)
        }
    if ema and not any(sources):
        raise CheckpointError(f"{steps[0]}: holds no ema.* tensors; training keeps them with --optim.ema")
    if found := _differences(steps, manifests, weights, sources, prefix):
        raise CheckpointError(listed(f"the steps do not fit: {counted(len(found), 'difference')}", found))
    for step, manifest, entries in zip(steps, manifests, sources, strict=True):
        check_sizes(step, manifest, entries)
    outputs = [Output(name, e.shape, dtype_of(e.dtype), *_layout_of(e)) for name, e in weights.items()]
    newest = max(manifests, key=lambda manifest: manifest.step)
    origin = origin_of("average", steps, ema=ema)
    described = replace(newest, world=first.world, info=first.info)
    return with_history(
        outputs, partial(_averaged, list(zip(steps, sources, strict=True))), described, origin
    )


def _differences(
    steps: Sequence[Path],
    manifests: list[Manifest],
    weights: dict[str, TensorEntry],
    sources: list[dict[str, TensorEntry]],
    prefix: str,
) -> list[str]:
    """Everything that keeps the steps from being averaged.

    Each line names the step that differs from the first.
    """
    found = [] if weights else [f"{steps[0]}: holds no model.* tensors"]
    found += [
        f"{n}: {e.dtype} has no mean" for n, e in weights.items() if not dtype_of(e.dtype).is_floating_point
    ]
    for step, manifest, entries in zip(steps, manifests, sources, strict=True):
        for name in sorted(weights.keys() | entries.keys()):
            mine, other = weights.get(name), entries.get(name)
            if mine is None or other is None:
                lacking = f"{prefix}{name.removeprefix('model.')}" if mine else name
                found.append(f"{lacking}: not in {step if mine else steps[0]}")
            elif mine.shape != other.shape:
                found.append(f"{name}: shape {mine.shape} in {steps[0]}, {other.shape} in {step}")
            elif mine.dtype != other.dtype and prefix == "model.":
                found.append(f"{name}: {mine.dtype} in {steps[0]}, {other.dtype} in {step}")
        mine, other = _model_settings(manifests[0]), _model_settings(manifest)
        for key in sorted(mine.keys() | other.keys()):
            if mine.get(key) != other.get(key):
                found.append(f"model.{key}: {mine.get(key)} in {steps[0]}, {other.get(key)} in {step}")
    return found


def _model_settings(manifest: Manifest) -> dict[str, Any]:
    """Model settings by dotted name, without those that only training reads.

    Runs may change those between two steps.
    """
    config = manifest.info.get("config")
    model = config.get("model") if isinstance(config, dict) else None
    flat: dict[str, Any] = {}
    for name, value in model.items() if isinstance(model, dict) else ():
        flat |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return {name: value for name, value in flat.items() if name not in (*STEPS_READ, "init_std")}


def _layout_of(entry: TensorEntry) -> Layout:
    """The layout that a tensor already has. The ranks are in the names of its files."""
    ranks = [re.match(r"__(\d+)_", chunk.file) for chunk in entry.chunks]
    boxes = zip(ranks, entry.chunks, strict=True)
    return Layout(
        entry.placement, tuple(Box(int(rank[1]) if rank else 0, c.offset, c.shape) for rank, c in boxes)
    )


def _averaged(sources: list[tuple[Path, dict[str, TensorEntry]]], output: Output) -> Iterator[Tensor]:
    readers = [read_boxes(step, entries[output.name], output.boxes) for step, entries in sources]
    return (_mean(readers, box, output.dtype) for box in output.boxes)


def _mean(readers: list[Iterator[Tensor]], box: Box, dtype: torch.dtype) -> Tensor:
    """The mean of the same box in several steps.

    Summed in fp64, where the sum of a few fp32 numbers is exact or nearly so, and rounded to fp32. Narrower
    types are rounded from fp32.
    """
    total = torch.zeros(box.shape, dtype=torch.float64)
    for reader in readers:
        total += _widened(next(reader))
    mean = total.div_(len(readers))
    return mean if dtype == torch.float64 else mean.float().to(dtype)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor  # float8 has no addition


# ---- carrying out ----


def with_history(
    outputs: list[Output],
    produce: Any,
    manifest: Manifest,
    origin: dict[str, Any],
    info: dict[str, Any] | None = None,
) -> Plan:
    """A plan whose result says where it comes from, after what its source said of itself.

    info: facts of the result; None: those of the source.
    """
    history = manifest.info.get("history")
    told = {"history": [*(history if isinstance(history, list) else ()), origin]}
    blank = replace(
        manifest, saved_ns=0, info=(manifest.info if info is None else info) | told, files={}, tensors={}
    )
    return Plan(tuple(outputs), produce, blank, tuple(source["sha256"] for source in origin["sources"]))


def origin_of(tool: str, steps: Sequence[Path], **options: Any) -> dict[str, Any]:
    """What a result records of its making: tool, options, step folders and the hashes of their manifests."""
    digests = [hashlib.sha256((step / files.NAME).read_bytes()).hexdigest() for step in steps]
    sources = [dict(path=str(step), sha256=digest) for step, digest in zip(steps, digests, strict=True)]
    return dict(tool=tool, sources=sources) | options


def check_sizes(src: Path, manifest: Manifest, entries: dict[str, TensorEntry]) -> None:
    """Refuse missing and truncated files before the first byte is written.

    Flipped bits are found later, when a chunk is read and thereby hashed.
    Files of tensors that are not needed may be damaged: the weights of a step can be rescued when its
    optimizer state is lost.
    """
    needed = {chunk.file for entry in entries.values() for chunk in entry.chunks}
    if problems := files.verify(src, share=None, names=needed):
        raise CheckpointError(listed("", problems, indent=""))


def carry_out(plan: Plan, sources: Sequence[Path], dst: Path, dry_run: bool) -> None:
    """Check the plan against the disk, then write `dst`, or with dry_run only say what would be written."""
    require_outside(dst, sources)
    needed, free = check_space(plan, dst)
    ranks = {
        (box.rank, i) for i, group in enumerate(divide(plan)) for output in group for box in output.boxes
    }
    size = sum(output.nbytes for output in plan.outputs)
    what = (
        f"{dst}: {len(plan.outputs)} tensors, {decimal(size)} in {counted(len(ranks), 'file')} of "
        f"{counted(plan.manifest.world, 'rank')}"
    )
    if dry_run:
        return print(f"{what}; at most {decimal(needed)} to write, {decimal(free)} free; nothing written")
    with keeping(dst):
        rewrite(plan, dst)
    print(f"{what}, verified")


def main(argv: Sequence[str] | None = None) -> None:
    """The command line. An error ends the process with one message."""
    names: dict[str, Any] = dict(inspect=inspect, verify=verify, reshard=reshard, average=average)
    commands(names, "python -m tmoe.checkpoint", __doc__, argv, config=(tyro.conf.FlagCreatePairsOff,))


def commands(what: Any, prog: str, text: str | None, argv: Sequence[str] | None, **more: Any) -> None:
    """Run a command line. An error ends the process with one message.

    what: a function, or functions by subcommand. text: the module's docstring, which --help shows.
    """
    with one_message():
        description = (text or "").partition("\nnext:")[0]
        call(what, prog, disk.expand_home(argv), description=description, **more)


def one_message() -> AbstractContextManager[None]:
    """Around a command that works on checkpoints: an error ends the process with one message."""
    stopped = "interrupted; the same command goes on with what was finished"
    return front.one_message(CheckpointError, RecursionError, interrupted=stopped)
