"""Plans of the offline tools: a step for other ranks, the mean of steps, and the parts common to all plans.

next: checkpoint/rewrite.py
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal
from torch import Tensor

from tmoe.base.listing import counted, listed
from tmoe.checkpoint import manifest as files
from tmoe.checkpoint.base import require_one_base
from tmoe.checkpoint.dcp import RNG
from tmoe.checkpoint.errors import CheckpointError
from tmoe.checkpoint.manifest import Manifest, TensorEntry, dtype_of, read_manifest
from tmoe.checkpoint.rewrite import (
    Output,
    Plan,
    check_space,
    divide,
    keeping,
    read_boxes,
    require_outside,
    rewrite,
)
from tmoe.config.axes import Axes
from tmoe.config.model import STEPS_READ
from tmoe.config.renamed import with_new_names
from tmoe.parallel.layout import BUFFERS, Box, Layout, lay_out

DTYPES = dict(bf16=torch.bfloat16, fp32=torch.float32)
CAST = ("model.", "ema.")  # prefixes of what --dtype casts; moments and step counts keep their type


# ---- reshard ----


def plan_reshard(src: Path, axes: Axes, dtype: str | None = None, only: Sequence[str] = ()) -> Plan:
    """Plan of `reshard` for ranks of these axes.

    Raises ValueError if ep does not divide the experts, or if no tensor is kept; CheckpointError if src is
    damaged.

    Generator states are kept if the world size is the same; another number of ranks draws other numbers.
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


def plan_average(steps: Sequence[Path], ema: bool = False) -> Plan:
    """Plan of `average`.

    Raises CheckpointError, which lists every difference in names, shapes, dtypes and model settings.
    """
    manifests = [read_manifest(step) for step in steps]
    require_one_base(list(steps), manifests)
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
    # Training keeps no moving average of buffers, so the steps' own values are used.
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
    """Model settings by dotted name, without the settings that only training reads.

    A run may change those between two steps.
    """
    config = manifest.info.get("config")
    model, _ = with_new_names(config.get("model") if isinstance(config, dict) else None, "model.")
    flat: dict[str, Any] = {}
    for name, value in model.items() if isinstance(model, dict) else ():
        flat |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return {name: value for name, value in flat.items() if name not in (*STEPS_READ, "init_std")}


def _layout_of(entry: TensorEntry) -> Layout:
    """The layout that a tensor already has. Its ranks are read from the names of its files."""
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

    The sum is computed in fp64, where a sum of a few fp32 numbers is exact or nearly exact, and rounded to
    fp32. Narrower types are rounded from fp32.
    """
    total = torch.zeros(box.shape, dtype=torch.float64)
    for reader in readers:
        total += _widened(next(reader))
    mean = total.div_(len(readers))
    return mean if dtype == torch.float64 else mean.float().to(dtype)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor  # float8 has no addition


# ---- every plan ----


def with_history(
    outputs: list[Output],
    produce: Any,
    manifest: Manifest,
    origin: dict[str, Any],
    info: dict[str, Any] | None = None,
) -> Plan:
    """A plan whose result records its origin, after the history that its source recorded.

    info: facts of the result; None: the facts of the source.
    """
    history = manifest.info.get("history")
    told = {"history": [*(history if isinstance(history, list) else ()), origin]}
    blank = replace(
        manifest, saved_ns=0, info=(manifest.info if info is None else info) | told, files={}, tensors={}
    )
    return Plan(tuple(outputs), produce, blank, tuple(source["sha256"] for source in origin["sources"]))


def origin_of(tool: str, steps: Sequence[Path], **options: Any) -> dict[str, Any]:
    """The record of how a result was made: tool, options, step folders and the hashes of their manifests."""
    digests = [hashlib.sha256((step / files.NAME).read_bytes()).hexdigest() for step in steps]
    sources = [dict(path=str(step), sha256=digest) for step, digest in zip(steps, digests, strict=True)]
    return dict(tool=tool, sources=sources) | options


def check_sizes(src: Path, manifest: Manifest, entries: dict[str, TensorEntry]) -> None:
    """Raises CheckpointError for missing and truncated files before the first byte is written.

    Flipped bits are found later, when a chunk is read and thereby hashed.
    Files of tensors that are not needed may be damaged: this rescues the weights of a step whose optimizer
    state is lost.
    """
    needed = {chunk.file for entry in entries.values() for chunk in entry.chunks}
    if problems := files.verify(src, share=None, names=needed):
        raise CheckpointError(listed("", problems, indent=""))


def carry_out(plan: Plan, sources: Sequence[Path], dst: Path, dry_run: bool) -> None:
    """Check the plan against the disk, then write `dst`; with dry_run only say what would be written."""
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
