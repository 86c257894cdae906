"""A Hugging Face folder from a step folder: settings, tokenizer, types and file layout of the original, or made from the settings.

next: hf_files.py
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
import tyro
from rich.filesize import decimal
from torch import Tensor

from tmoe import folders
from tmoe.config import ModelConfig
from tmoe.hf_config import architecture, build_config, differences, read_config, write_config
from tmoe.hf_files import (
    CONFIG,
    DTYPES,
    EXTRA,
    FILE,
    INDEX,
    LAYOUT,
    MODEL,
    Folder,
    Layout,
    Writer,
    is_folder,
    refuse,
    split,
)
from tmoe.hf_tables import HF, Piece, divide, model_shapes, their_shapes
from tmoe.layout import Box
from tmoe.manifest import CheckpointError, HashedFile, Manifest, TensorEntry, read_manifest, verify
from tmoe.rewrite import bar, read_boxes

SHARD = 5 * 10**9  # bytes of an exported file, as transformers 4 cut them
HEADER = 512  # bytes a tensor costs beside its elements, and more than that: its lines in the header and in the index
SHORT = dict(bf16="BF16", fp32="F32")


class Origin(NamedTuple):
    """What the exported folder shall look like: its settings, files, where each tensor lies, computed tensors."""

    config: HF
    layout: Layout
    files: dict[str, Callable[[], bytes]]
    extra: Callable[[str], Tensor]


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
    if hf_dir.exists() or hf_dir.is_symlink():
        raise CheckpointError(f"{hf_dir}: exists already; name a new folder")
    step = folders.resolve(step_dir)
    manifest = read_manifest(step)
    weights = {name: e for name, e in manifest.tensors.items() if name.startswith(MODEL)}
    if problems := verify(step, share=None):  # sizes now, contents as they are read
        raise CheckpointError("; ".join(problems))
    origin = _with_dtype(find_origin(step, manifest, like), dtype)
    arch, cfg = architecture(origin.config), read_config(origin.config)
    names = {name: kind for group in origin.layout.values() for name, kind in group.items()}
    found, extra = divide(arch, cfg, names)
    refuse(
        f"{step} is no {arch.model_type} of this config",
        _unfit(manifest, weights, cfg, found, {name: kind for name, kind in names.items() if name not in extra}),
    )
    shapes = their_shapes(found) | {name: tuple(origin.extra(name).shape) for name in extra}
    sizes = {name: math.prod(shape) * _itemsize(origin, names, name) for name, shape in shapes.items()}
    needed, free = _check_space(hf_dir, sum(sizes.values()) + HEADER * len(shapes))
    if not dry_run:
        _write(hf_dir, origin, shapes, sizes, partial(_exported, step, weights, found, names, extra, origin))
    done = "nothing written" if dry_run else "written"
    print(f"{hf_dir}: {len(names)} tensors, {decimal(needed)} of {decimal(free)} free, {arch.class_name}; {done}")


def _check_space(hf_dir: Path, needed: int) -> tuple[int, int]:
    parent = next(parent for parent in hf_dir.absolute().parents if parent.exists())
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise CheckpointError(
            f"{hf_dir}: needs {decimal(needed)} ({needed} bytes), {parent} has {decimal(free)} ({free}) free"
        )
    return needed, free


def find_origin(step: Path, manifest: Manifest, like: Path | None) -> Origin:
    """`like`, else the folder that was imported here or that training started from (--init), else one made from the settings."""
    if like:
        return _origin_of_folder(Folder(like))
    if LAYOUT in manifest.tensors:
        return _origin_of_step(step, manifest.tensors)
    config = manifest.info.get("config")
    settings = config if isinstance(config, dict) else {}
    if init := settings.get("init"):
        start = Path(init)
        if is_folder(start):
            return _origin_of_folder(Folder(start))
        if not start.exists():
            raise CheckpointError(
                f"{step}: trained from {start}, which is not there; name the original with --like HF_DIR"
            )
        return find_origin(start, read_manifest(start), None)
    if not isinstance(settings.get("model"), dict):
        raise CheckpointError(
            f"{step}: its manifest has no model settings; name a folder of this model with --like HF_DIR"
        )
    return _origin_of_settings(build_config(settings["model"]))


def _origin_of_folder(folder: Folder) -> Origin:
    files = {name: (folder.path / name).read_bytes for name in folder.others()}
    return Origin(folder.config, folder.layout, files, folder.whole)


def _origin_of_step(step: Path, tensors: dict[str, TensorEntry]) -> Origin:
    def whole(name: str) -> Tensor:
        entry = tensors[name]
        return next(read_boxes(step, entry, (Box(0, (0,) * len(entry.shape), entry.shape),)))

    def content(name: str) -> bytes:
        return whole(name).numpy().tobytes()

    names = [name.removeprefix(FILE) for name in tensors if name.startswith(FILE)]
    layout = json.loads(content(LAYOUT))
    if odd := [name for name in (*names, *layout) if Path(name).name != name or name in ("", ".", "..")]:
        raise CheckpointError(f"{step}: file names {odd} leave the folder")
    files = {name: partial(content, FILE + name) for name in names}
    return Origin(json.loads(files[CONFIG]()), layout, files, lambda name: whole(EXTRA + name))


def _origin_of_settings(cfg: ModelConfig) -> Origin:
    config = write_config(cfg, "float32")
    found, _ = divide(architecture(config), cfg, ())
    return _with_files(Origin(config, split(their_shapes(found), "F32", SHARD), {}, lambda name: torch.empty(0)))


def _with_dtype(origin: Origin, dtype: str | None) -> Origin:
    """Every tensor of another type; config.json and the index say so."""
    if dtype is None:
        return origin
    layout = {
        file: {name: SHORT[dtype] if kind in DTYPES else kind for name, kind in names.items()}
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


def _unfit(
    manifest: Manifest,
    weights: dict[str, TensorEntry],
    cfg: ModelConfig,
    found: dict[str, list[Piece]],
    names: dict[str, str],
) -> list[str]:
    """Every difference between the step folder's tensors and settings and the folder that shall come out."""
    want = {MODEL + name: shape for name, shape in model_shapes(cfg).items()}
    problems = [f"{name}: not in the step folder" for name in want if name not in weights]
    for name, entry in weights.items():
        if name not in want:
            problems.append(f"{name}: no such tensor in this model")
        elif want[name] != entry.shape:
            problems.append(f"{name}: shape {entry.shape}, by config.json {want[name]}")
    theirs = their_shapes(found)
    problems += [f"{name}: not in the original's files" for name in theirs if name not in names]
    problems += [
        f"{name}: {names[name]} in the original's files; valid are {', '.join(DTYPES)}"
        for name in theirs
        if names.get(name, "F32") not in DTYPES
    ]
    problems += [f"{name}: in the original's files, but not in this model" for name in names if name not in theirs]
    config = manifest.info.get("config")
    if isinstance(config, dict) and isinstance(config.get("model"), dict):
        problems += differences(build_config(config["model"]), cfg)
    return problems


def _itemsize(origin: Origin, names: dict[str, str], name: str) -> int:
    return DTYPES[names[name]].itemsize if names[name] in DTYPES else origin.extra(name).element_size()


def _exported(step, weights, found, names, extra, origin) -> Iterator[tuple[str, Tensor]]:
    """Their tensors, in the order of ours: each chunk of the step folder is read and checked once."""
    for ours, group in found.items():
        boxes = tuple(Box(0, piece.offset, piece.shape) for piece in group)
        for piece, tensor in zip(group, read_boxes(step, weights[MODEL + ours], boxes), strict=True):
            theirs = tensor.mT if piece.transposed else tensor
            yield piece.name, theirs.reshape(piece.to_theirs(piece.shape)).to(DTYPES[names[piece.name]])
    for name in extra:
        tensor = origin.extra(name)
        yield name, tensor.to(DTYPES.get(names[name], tensor.dtype))


def _write(
    hf_dir: Path,
    origin: Origin,
    shapes: dict,
    sizes: dict[str, int],
    tensors: Callable[[], Iterator[tuple[str, Tensor]]],
) -> None:
    """Into a folder beside `hf_dir`, synced and renamed when whole; removed if anything fails."""
    hf_dir.parent.mkdir(parents=True, exist_ok=True)
    temporary = folders.beside(hf_dir, "tmp")
    temporary.mkdir()
    try:
        with ExitStack() as stack, bar("writing", sum(sizes.values())) as advance:
            writer_of: dict[str, Writer] = {}
            for file, group in origin.layout.items():
                writer = Writer(temporary / file, {n: (kind, shapes[n]) for n, kind in group.items()}, sizes)
                stack.callback(writer.close)
                writer_of |= dict.fromkeys(group, writer)
            for name, tensor in tensors():
                writer_of[name].write(name, tensor)
                advance(sizes[name])
        for name, content in origin.files.items():
            _write_file(temporary / name, content())
        folders.sync_folder(temporary)
        temporary.rename(hf_dir)  # fails where a folder with something in it has come meanwhile
        folders.sync_folder(hf_dir.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_file(path: Path, content: bytes) -> None:
    with HashedFile(path) as file:
        file.write(content)
