"""A Hugging Face folder from a step folder: settings, tokenizer, types and file layout of the original, or made from the settings.

next: hf/files.py
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
import tyro
from rich.filesize import decimal
from torch import Tensor

from tmoe.checkpoint import folders
from tmoe.checkpoint.errors import refuse
from tmoe.checkpoint.manifest import NAME, CheckpointError, Manifest, TensorEntry, read_manifest, verify
from tmoe.checkpoint.rewrite import keeping, read_boxes, read_whole, require_absent, require_outside
from tmoe.config.model import ModelConfig
from tmoe.config.same import build_config, differences
from tmoe.hf.config import architecture, write_config
from tmoe.hf.files import (
    CONFIG,
    DTYPES,
    EXTRA,
    FILE,
    INDEX,
    LAYOUT,
    MODEL,
    Folder,
    Layout,
    is_folder,
    require_names,
    split,
    untied,
)
from tmoe.hf.packed import unpacked
from tmoe.hf.plan import plan_folder, plan_layout
from tmoe.hf.rules import FP32, HF, divide, their_shapes
from tmoe.hf.tokenizer import require_tokenizer_of_run
from tmoe.hf.write import Export, check_room, write_folder
from tmoe.listing import listed
from tmoe.model.shapes import model_shapes
from tmoe.parallel.layout import Box

SHARD = 5 * 10**9  # bytes of an exported file, as transformers 4 cut them
SHORT = dict(bf16="BF16", fp32="F32")


class Origin(NamedTuple):
    """What the exported folder shall look like: its settings, files, where each tensor lies, computed tensors."""

    config: HF
    layout: Layout
    files: dict[str, Callable[[], bytes]]
    extra: Callable[[str], Tensor]
    packed: str = ""
    """the format in which the original holds some of its tensors, see hf/packed.py"""
    stamp: str = ""
    """changes when the original's tensors do"""
    folder: Folder | None = None
    """the original, where it is a folder and not what a step carries or settings say"""


def export_hf(
    step_dir: Annotated[Path, tyro.conf.arg(metavar="STEP_DIR")],
    hf_dir: Annotated[Path, tyro.conf.arg(metavar="HF_DIR")],
    /,
    *,
    like: Path | None = None,
    dtype: Literal["bf16", "fp32"] | None = None,
    dry_run: bool = False,
) -> None:
    """Write a Hugging Face folder from a step folder: imported, fine-tuned from an import, or trained from the start.

    Args:
        step_dir: a step folder
        hf_dir: a new folder
        like: folder whose config, tokenizer, types and file layout to take; default: the one that the weights came from, if any
        dtype: type of every tensor; default: the original's, fp32 for a model trained here
        dry_run: check everything, write nothing
    """
    require_absent(hf_dir)
    step = folders.resolve(step_dir)
    require_outside(hf_dir, [step])
    manifest = read_manifest(step)
    weights = {name: e for name, e in manifest.tensors.items() if name.startswith(MODEL)}
    if problems := verify(step, share=None):  # sizes now, contents as they are read
        raise CheckpointError(listed("", problems, indent=""))
    origin = _with_dtype(find_origin(step, manifest, like), dtype)
    require_tokenizer_of_run(step, manifest, origin.files)
    names = {name: kind for group in origin.layout.values() for name, kind in group.items()}
    plan = plan_folder(origin.folder) if origin.folder else plan_layout(origin.config, names)
    arch, found, extra = plan.arch, plan.written(), plan.extra
    refuse(
        f"{step} is no {arch.model_type} of this config", plan.problems + _unfit(manifest, weights, plan.cfg)
    )
    shapes = their_shapes(found) | {name: tuple(origin.extra(name).shape) for name in extra}
    sizes = {name: math.prod(shape) * _itemsize(origin, names, name) for name, shape in shapes.items()}
    produce = partial(_exported, step, weights, found, names, extra, origin)
    sources = (_digest(step), origin.stamp, json.dumps(origin.config))
    export = Export(origin.layout, shapes, sizes, produce, origin.files, sources)
    needed, free = check_room(export, hf_dir)
    if not dry_run:
        with keeping(hf_dir):
            write_folder(export, hf_dir)
    done = "nothing written" if dry_run else "verified"
    print(
        f"{hf_dir}: {len(names)} tensors, {decimal(needed)} of {decimal(free)} free, {arch.class_name}; {done}"
    )
    if origin.packed:
        print(f"{hf_dir}: {unpacked(origin.packed)}")
    if origin.folder and origin.folder.own_head:
        print(f"{untied(origin.folder.path)}; so says {hf_dir / CONFIG}")


def find_origin(step: Path, manifest: Manifest, like: Path | None, later: tuple[Path, ...] = ()) -> Origin:
    """`like`, else the folder that was imported here or that training started from (--init), else one made from the settings.
    later: the steps that began from this one."""
    if like:
        return _origin_of_folder(Folder(like))
    if LAYOUT in manifest.tensors:
        return _origin_of_step(step, manifest)
    config = manifest.info.get("config")
    settings = config if isinstance(config, dict) else {}
    start = Path(settings.get("init") or "")
    later = (*later, step.resolve())
    saved_over = start.resolve() in later
    gone = start.is_absolute() and not start.exists() and re.fullmatch(r"step-\d+", start.name)
    if start.name and not ((saved_over or gone) and isinstance(settings.get("model"), dict)):
        if is_folder(start):
            return _origin_of_folder(Folder(start))
        if not start.exists():
            raise CheckpointError(
                f"{step}: trained from {start}, which is not there; name the original with --like HF_DIR"
            )
        return find_origin(start, read_manifest(start), None, later)
    if not isinstance(settings.get("model"), dict):
        raise CheckpointError(
            f"{step}: its manifest has no model settings; name a folder of this model with --like HF_DIR"
        )
    if gone:
        print(
            f"{step}: {start}, from which it was trained, is gone: config.json is made from settings; --like HF_DIR names an original"
        )
    return _origin_of_settings(build_config(settings["model"]), _carried(step, manifest.tensors))


def _origin_of_folder(folder: Folder) -> Origin:
    files = {name: partial(folder.content, name) for name in folder.others()}
    stats = ((name, (folder.path / name).stat()) for name in sorted(folder.layout))
    stamp = "".join(f"{name} {stat.st_size} {stat.st_mtime_ns}\n" for name, stat in stats)
    return Origin(folder.config, folder.layout, files, folder.whole, folder.packed, stamp, folder)


def _origin_of_step(step: Path, manifest: Manifest) -> Origin:
    tensors = manifest.tensors

    files, layout = _carried(step, tensors), json.loads(_content(step, tensors[LAYOUT]))
    require_names(step, layout)
    extra, packed = lambda name: read_whole(step, tensors[EXTRA + name]), manifest.info.get("packed", "")
    return Origin(json.loads(files[CONFIG]()), layout, files, extra, packed, _digest(step))


def _carried(step: Path, tensors: dict[str, TensorEntry]) -> dict[str, Callable[[], bytes]]:
    """The files of the original that travel in a step folder, by name."""
    carried = {name.removeprefix(FILE): entry for name, entry in tensors.items() if name.startswith(FILE)}
    require_names(step, carried)
    return {name: partial(_content, step, entry) for name, entry in carried.items()}


def _content(step: Path, entry: TensorEntry) -> bytes:
    return read_whole(step, entry).numpy().tobytes()


def _digest(step: Path) -> str:
    return hashlib.sha256((step / NAME).read_bytes()).hexdigest()


def _origin_of_settings(cfg: ModelConfig, files: dict[str, Callable[[], bytes]]) -> Origin:
    """files: a tokenizer and the like, which an upcycled model has from the dense one."""
    config = write_config(cfg, "float32")
    found, _ = divide(architecture(config), cfg, ())
    return _with_files(
        Origin(config, split(their_shapes(found), "F32", SHARD), files, lambda name: torch.empty(0))
    )


def _with_dtype(origin: Origin, dtype: str | None) -> Origin:
    """Every tensor of another type; config.json and the index say so."""
    if dtype is None:
        return origin
    layout = {
        file: {
            n: "F32" if n.endswith(FP32) else SHORT[dtype] if kind in DTYPES else kind
            for n, kind in names.items()
        }
        for file, names in origin.layout.items()
    }
    key = "dtype" if "dtype" in origin.config else "torch_dtype"
    config = origin.config | {key: str(DTYPES[SHORT[dtype]]).removeprefix("torch.")}
    return _with_files(origin._replace(config=config, layout=layout))


def _with_files(origin: Origin) -> Origin:
    """config.json and the index made from what the origin says."""
    index = {name: file for file, names in origin.layout.items() for name in names}
    made = {CONFIG: origin.config}
    if len(origin.layout) > 1:
        made[INDEX] = dict(metadata={}, weight_map=index)
    files = {name: (json.dumps(value, indent=2) + "\n").encode for name, value in made.items()}
    return origin._replace(files=origin.files | files)


def _unfit(manifest: Manifest, weights: dict[str, TensorEntry], cfg: ModelConfig) -> list[str]:
    """Every difference between the step folder's tensors and settings and the model that shall come out."""
    want = {MODEL + name: shape for name, shape in model_shapes(cfg).items()}
    problems = [f"{name}: not in the step folder" for name in want if name not in weights]
    for name, entry in weights.items():
        if name not in want:
            problems.append(f"{name}: no such tensor in this model")
        elif want[name] != entry.shape:
            problems.append(f"{name}: shape {entry.shape}, by config.json {want[name]}")
    config = manifest.info.get("config")
    if isinstance(config, dict) and isinstance(config.get("model"), dict):
        problems += differences(build_config(config["model"]), cfg)
    return problems


def _itemsize(origin: Origin, names: dict[str, str], name: str) -> int:
    return DTYPES[names[name]].itemsize if names[name] in DTYPES else origin.extra(name).element_size()


def _exported(step, weights, found, names, extra, origin, wanted: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Those of their tensors that are wanted, in the order of ours: each chunk of the step folder is read and checked once a call."""
    shapes = their_shapes(found)
    for ours, pieces_of_ours in found.items():
        group = [piece for piece in pieces_of_ours if piece.name in wanted]
        boxes = tuple(Box(0, piece.offset, piece.shape) for piece in group)
        pieces = zip(group, read_boxes(step, weights[MODEL + ours], boxes), strict=True)
        for name, parts in groupby(pieces, key=lambda pair: pair[0].name):
            theirs = torch.empty(shapes[name], dtype=DTYPES[names[name]])
            for piece, tensor in parts:
                seen = piece.see(theirs)
                seen.copy_(tensor.view(seen.shape))
                if theirs.dtype == torch.float16 and bool(
                    (seen.isinf() & tensor.view(seen.shape).isfinite()).any()
                ):
                    most = float(tensor.abs().max())
                    raise CheckpointError(
                        f"{step}: {ours} has weights up to {most:.3g}, float16 holds 65504: export with --dtype bf16"
                    )
            yield name, theirs
    for name in wanted.intersection(extra):
        tensor = origin.extra(name)
        yield name, tensor.to(DTYPES.get(names[name], tensor.dtype))
