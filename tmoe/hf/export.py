"""Writes a Hugging Face folder from a step folder, in the layout of an original or of tmoe's own settings.

Settings, tokenizer, types and file layout are those of the original, if there is one. Otherwise they are made
from the settings of the run.

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

from tmoe.base.listing import listed
from tmoe.checkpoint import folders
from tmoe.checkpoint.base import refuse_adapters
from tmoe.checkpoint.errors import refuse
from tmoe.checkpoint.manifest import NAME, CheckpointError, Manifest, TensorEntry, read_manifest, verify
from tmoe.checkpoint.rewrite import keeping, read_boxes, read_whole, require_absent
from tmoe.config.check import Setting, require
from tmoe.config.compare import build_config, differences
from tmoe.config.model import ModelConfig, MTPConfig
from tmoe.hf.card import README, card
from tmoe.hf.chat import with_chat
from tmoe.hf.config import architecture, write_config
from tmoe.hf.files import (
    DTYPES,
    EXTRA,
    FILE,
    LAYOUT,
    MODEL,
    TYPES,
    Folder,
    Layout,
    require_names,
    split,
    split_parts,
    untied,
)
from tmoe.hf.foreign import CONFIG, INDEX, is_folder
from tmoe.hf.hub_folders import folder_of, require_login, upload
from tmoe.hf.packed import QUANTISED, unpacked
from tmoe.hf.quantise import Quantised, Stored, quantised, require_kind
from tmoe.hf.rules import HF, TensorPiece, divide, published, their_shapes
from tmoe.hf.tensor_plan import Reading, plan_folder, plan_layout
from tmoe.hf.tokenizer_files import of_run, require_tokenizer_of_run
from tmoe.hf.write import Export, check_room, write_folder
from tmoe.model.shapes import model_shapes
from tmoe.parallel.layout import Box

SHARD = 5 * 10**9  # most bytes of an exported file, as in transformers 4
SHORT = dict(bf16="BF16", fp32="F32")  # --dtype -> safetensors' name


class Origin(NamedTuple):
    """The plan of the exported folder: settings, files, place of each tensor, computed tensors."""

    config: HF
    layout: Layout
    files: dict[str, Callable[[], bytes]]
    extra: Callable[[str], Tensor]
    packed: str = ""
    """the quantised format of some of the original's tensors, see hf/packed.py; "": none"""
    stamp: str = ""
    """changes if the original's tensors change; "": the plan was made from settings"""
    folder: Folder | None = None
    """the original, if it is a folder; None: the plan was made from files in a step, or from settings"""
    held: tuple[str, ...] = ()
    """numbers of the layers stored as transformers 5 holds them, by the shapes of the original's tensors"""


class Contents(NamedTuple):
    """The tensors of the exported folder before quantising, and what is quantised."""

    types: dict[str, str]
    """by name"""
    shapes: dict[str, tuple[int, ...]]
    pieces: dict[str, list[TensorPiece]]
    """for each of tmoe's tensors the pieces of the folder's tensors"""
    extra: list[str]
    """those that are only carried along"""
    quantised: Quantised | None = None

    def stored(self) -> dict[str, Stored]:
        """The stored tensors of each tensor."""
        if self.quantised:
            return {n: self.quantised.stored(n, self.types[n], shape) for n, shape in self.shapes.items()}
        return {name: {name: (self.types[name], shape)} for name, shape in self.shapes.items()}


def export_hf(
    step_dir: Annotated[Path, tyro.conf.arg(metavar="STEP_DIR")],
    hf_dir: Annotated[Path, tyro.conf.arg(metavar="HF_DIR")],
    /,
    *,
    like: Path | None = None,
    dtype: Literal["bf16", "fp32"] | None = None,
    quantize: str | None = None,
    dry_run: bool = False,
    push: str | None = None,
    private: bool = False,
    license: str = "unknown",
) -> None:
    """Write a Hugging Face folder from a step folder: imported, fine-tuned from an import, or trained from
    the start.

    Args:
        step_dir: a step folder
        hf_dir: a new folder
        like: folder or name on the hub whose config, tokenizer, types and file layout to use; default: the
            model from which the weights were first read, if any
        dtype: type of every tensor; default: the original's, or fp32 for a model trained from scratch (with
            quantize bf16)
        quantize: int8, int4, fp8 or mxfp4: store the matrices of attention, feed-forwards and experts in 8 or
            4 bits, as compressed-tensors does
        dry_run: check everything, write nothing
        push: then upload the folder to this repository of the hub, OWNER/NAME, created if it does not exist
        private: with push: make a new repository private
        license: license to state in README.md if the original has no README.md: apache-2.0, other, ...
    """
    require(push is not None or not private, "private", True, f"needs {Setting('push')}")
    if quantize is not None:
        require_kind(quantize)
    require_absent(hf_dir)
    if push is not None:
        require_login(push)
    source = source_of(step_dir, hf_dir, like, dtype, "bf16" if quantize else None)
    write_model(source, partial(_read_step, source), hf_dir, dry_run, license, quantize)
    if push is not None and not dry_run:
        print(f"{hf_dir}: uploaded to {upload(hf_dir, push, private)}")


Boxes = Callable[[str, tuple[Box, ...]], Iterator[Tensor]]  # one of tmoe's tensors, boxes -> their contents


def write_model(
    source: Source,
    read: Boxes,
    hf_dir: Path,
    dry_run: bool,
    license: str,
    quantize: str | None = None,
    more: tuple[str, ...] = (),
) -> None:
    """Writes the Hugging Face folder of a model, and prints what was done.

    read: the boxes of one of the model's tensors. dry_run, license, quantize: as of `export_hf`.
    more: what decides the weights besides the step.
    """
    step, manifest, _, origin, plan, chat_notes = source
    names = {name: kind for group in origin.layout.values() for name, kind in group.items()}
    arch = plan.arch
    if README not in origin.files and LAYOUT not in manifest.tensors:  # no README is added to an import
        readme = partial(card, hf_dir.name, arch, plan.cfg, manifest, license)
        origin = origin._replace(files=origin.files | {README: readme})
    origin, contents = _contents(origin, plan, names, quantize)
    export = _export_of(step, read, origin, contents, more)
    needed, free = check_room(export, hf_dir)
    if not dry_run:
        with keeping(hf_dir):
            write_folder(export, hf_dir)
    done = "nothing written" if dry_run else "verified"
    print(
        f"{hf_dir}: {len(export.shapes)} tensors, {decimal(needed)} of {decimal(free)} free, "
        f"{arch.class_name}; {done}"
    )
    for line in (*chat_notes, *_notes_of(origin, contents, hf_dir)):
        print(line)


def _read_step(source: Source, ours: str, boxes: tuple[Box, ...]) -> Iterator[Tensor]:
    return read_boxes(source.step, source.weights[MODEL + ours], boxes)


class Source(NamedTuple):
    """A step folder that is exported, with all that is known of the model."""

    step: Path
    manifest: Manifest
    weights: dict[str, TensorEntry]
    """the model's tensors, by their names in the step"""
    origin: Origin
    plan: Reading
    notes: list[str]
    """what is said of the chat template and of ends of answers"""


def source_of(
    step_dir: Path, out: Path, like: Path | None, dtype: str | None, of_settings: str | None = None
) -> Source:
    """The model of a step folder, whole and of the settings that its origin says; else an error says why.

    out: where the export is written. like, dtype: as of `export_hf`. of_settings: dtype where it is None and
    there is no original.
    """
    like = like and folder_of(like)
    step = folders.resolve(step_dir)
    manifest = read_manifest(step)
    refuse_adapters(step, manifest)
    weights = {name: e for name, e in manifest.tensors.items() if name.startswith(MODEL)}
    if problems := verify(step, share=None):  # sizes now, contents as they are read
        raise CheckpointError(listed("", problems, indent=""))
    shapes = {name.removeprefix(MODEL): entry.shape for name, entry in weights.items()}
    origin = find_origin(step, manifest, like)
    origin = with_dtype(origin, dtype if dtype or origin.stamp else of_settings)
    return Source(step, manifest, weights, *with_plan(step, manifest, origin, shapes, out))


def with_plan(
    step: Path, manifest: Manifest, origin: Origin, shapes: dict[str, tuple[int, ...]], out: Path
) -> tuple[Origin, Reading, list[str]]:
    """The origin with the tokenizer and chat format of the step; the plan of its folder; notes on the chat.

    shapes: of the model's tensors. MismatchError if they, or the step's settings, are not the origin's.
    """
    if not origin.stamp:  # made from settings
        config, files = of_run(step, manifest, origin.config, origin.files)
        origin = _with_files(origin._replace(config=config, files=files))
    require_tokenizer_of_run(step, manifest, origin.files)
    files, chat_notes = with_chat(step, manifest, origin.files, out)
    origin = origin._replace(files=files)
    names = {name: kind for group in origin.layout.values() for name, kind in group.items()}
    trained = model_in(manifest)
    mtp = trained.mtp if trained else MTPConfig()
    if origin.folder:
        plan = plan_folder(origin.folder, mtp)
    else:
        plan = plan_layout(origin.config, names, origin.held, mtp)
    unfit = plan.problems + _unfit(manifest, shapes, plan.cfg)
    refuse(f"{step} is no {plan.arch.model_type} of this config", unfit)
    return origin, plan, chat_notes


def find_origin(step: Path, manifest: Manifest, like: Path | None, later: tuple[Path, ...] = ()) -> Origin:
    """The plan of the exported folder: that of an original, or one made from settings.

    The original is `like` if given, else the folder from which the step was imported or from which training
    started (--init). later: the steps that were trained from this step, so that a circle ends.
    """
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
            f"{step}: {start}, from which it was trained, is gone: config.json is made from settings; "
            f"--like HF_DIR names an original"
        )
    return _origin_of_settings(build_config(settings["model"]), _carried(step, manifest.tensors))


def _origin_of_folder(folder: Folder) -> Origin:
    files = {name: partial(folder.content, name) for name in folder.others()}
    stats = ((name, (folder.path / name).stat()) for name in sorted(folder.layout))
    stamp = "".join(f"{name} {stat.st_size} {stat.st_mtime_ns}\n" for name, stat in stats)
    return Origin(folder.config, folder.layout, files, folder.whole, folder.packed, stamp, folder)


def _origin_of_step(step: Path, manifest: Manifest) -> Origin:
    tensors = manifest.tensors
    files = _carried(step, tensors)
    layout = json.loads(_content(step, tensors[LAYOUT]))
    require_names(step, layout)

    def extra(name: str) -> Tensor:
        return read_whole(step, tensors[EXTRA + name])

    packed = manifest.info.get("packed", "")
    held = tuple(manifest.info.get("held", ()))
    return Origin(json.loads(files[CONFIG]()), layout, files, extra, packed, _digest(step), held=held)


def _carried(step: Path, tensors: dict[str, TensorEntry]) -> dict[str, Callable[[], bytes]]:
    """The files of the original that are stored in a step folder, by name."""
    carried = {name.removeprefix(FILE): entry for name, entry in tensors.items() if name.startswith(FILE)}
    require_names(step, carried)
    return {name: partial(_content, step, entry) for name, entry in carried.items()}


def _content(step: Path, entry: TensorEntry) -> bytes:
    return read_whole(step, entry).numpy().tobytes()


def _digest(step: Path) -> str:
    return hashlib.sha256((step / NAME).read_bytes()).hexdigest()


def _origin_of_settings(cfg: ModelConfig, files: dict[str, Callable[[], bytes]]) -> Origin:
    """An origin made from the model's settings.

    files: files such as a tokenizer, which an upcycled model has from its dense model.
    """
    config = write_config(cfg, "float32")
    found, _ = divide(architecture(config), cfg, ())
    origin = Origin(config, split(their_shapes(found), "F32", SHARD), files, lambda name: torch.empty(0))
    return _with_files(origin)


def with_dtype(origin: Origin, dtype: str | None) -> Origin:
    """The origin with every tensor in another type, and config.json and the index changed to that type."""
    if dtype is None:
        return origin

    fp32 = architecture(origin.config).fp32

    def new(name: str, kind: str) -> str:
        if name.endswith(fp32):
            return "F32"
        return SHORT[dtype] if kind in DTYPES else kind

    layout = {
        file: {name: new(name, kind) for name, kind in names.items()} for file, names in origin.layout.items()
    }
    key = "dtype" if "dtype" in origin.config else "torch_dtype"
    said = str(DTYPES[SHORT[dtype]]).removeprefix("torch.")
    parts = {
        name: part | dict.fromkeys({"dtype", "torch_dtype"} & {*part}, said)
        for name, part in origin.config.items()
        if isinstance(part, dict)
    }
    config = origin.config | parts | {key: said}
    return _with_files(origin._replace(config=config, layout=layout))


def _contents(
    origin: Origin, plan: Reading, names: dict[str, str], kind: str | None
) -> tuple[Origin, Contents]:
    """The contents of the folder to write, and the origin with its layout and config.

    kind: of --quantize. Experts are then written one by one, as compressed-tensors needs them, and files have
    at most SHARD bytes.
    """
    pieces = plan.written()
    shapes = their_shapes(pieces) | {name: tuple(origin.extra(name).shape) for name in plan.extra}
    contents = Contents(names, shapes, pieces, plan.extra)
    if kind is None:
        return origin, contents
    pieces = published(plan.arch, plan.cfg, contents.pieces)
    shapes = their_shapes(pieces) | {name: contents.shapes[name] for name in contents.extra}
    types = {
        piece.name: contents.types[contents.pieces[ours][0].name]
        for ours, group in pieces.items()
        for piece in group
    }
    types |= {name: kind for name, kind in contents.types.items() if name in shapes}
    chosen = quantised(kind, plan.arch, pieces)
    contents = Contents(types, shapes, pieces, contents.extra, chosen)
    sized = (
        ({name: stored_type for name, (stored_type, _) in parts.items()}, sum(_bytes(origin, parts).values()))
        for parts in contents.stored().values()
    )
    layout = split_parts(sized, SHARD)
    config = origin.config | {QUANTISED: chosen.config(types)}
    files = {name: read for name, read in origin.files.items() if name != INDEX}
    return _with_files(origin._replace(config=config, layout=layout, files=files)), contents


def _export_of(step: Path, read: Boxes, origin: Origin, contents: Contents, more: tuple[str, ...]) -> Export:
    stored = contents.stored()
    shapes = {name: shape for parts in stored.values() for name, (_, shape) in parts.items()}
    sizes = {name: size for parts in stored.values() for name, size in _bytes(origin, parts).items()}
    owners = {part: name for name, parts in stored.items() for part in parts}
    produce = partial(_exported, step, read, origin, contents, owners)
    sources = (_digest(step), origin.stamp, json.dumps(origin.config), *more)
    return Export(origin.layout, shapes, sizes, produce, origin.files, sources)


def _bytes(origin: Origin, parts: Stored) -> dict[str, int]:
    """The bytes of stored tensors, by name."""
    return {
        name: math.prod(shape) * (TYPES.get(kind) or origin.extra(name).element_size())
        for name, (kind, shape) in parts.items()
    }


def _notes_of(origin: Origin, contents: Contents, hf_dir: Path) -> list[str]:
    """Notes of an export: quantised weights were unpacked, the head was untied, what is quantised now."""
    notes = [f"{hf_dir}: {unpacked(origin.packed)}"] if origin.packed else []
    if contents.quantised:
        notes = [f"{hf_dir}: {line}" for line in contents.quantised.notes(contents.types)]
    if origin.folder and origin.folder.own_head:
        notes.append(f"{untied(origin.folder.path)}; {hf_dir / CONFIG} states this")
    return notes


def _with_files(origin: Origin) -> Origin:
    """The origin with config.json and the index made from its own settings and layout."""
    index = {name: file for file, names in origin.layout.items() for name in names}
    made = {CONFIG: origin.config}
    if len(origin.layout) > 1:
        made[INDEX] = dict(metadata={}, weight_map=index)
    files = {name: (json.dumps(value, indent=2) + "\n").encode for name, value in made.items()}
    return origin._replace(files=origin.files | files)


def _unfit(manifest: Manifest, shapes: dict[str, tuple[int, ...]], cfg: ModelConfig) -> list[str]:
    """Every difference between the step's tensors and settings and the model that is to be written."""
    want = model_shapes(cfg)
    problems = [f"{MODEL}{name}: not in the step folder" for name in want if name not in shapes]
    for name, shape in shapes.items():
        if name not in want:
            problems.append(f"{MODEL}{name}: no such tensor in this model")
        elif want[name] != shape:
            problems.append(f"{MODEL}{name}: shape {shape}, by config.json {want[name]}")
    trained = model_in(manifest)
    return problems + (differences(trained, cfg) if trained else [])


def model_in(manifest: Manifest) -> ModelConfig | None:
    """The model's settings in a step's manifest; None if it has none."""
    config = manifest.info.get("config")
    settings = config.get("model") if isinstance(config, dict) else None
    return build_config(settings) if isinstance(settings, dict) else None


def _exported(
    step: Path,
    read: Boxes,
    origin: Origin,
    contents: Contents,
    owners: dict[str, str],
    wanted: set[str],
) -> Iterator[tuple[str, Tensor]]:
    """Yields the wanted stored tensors of the exported folder, each with its name.

    owners: for each stored tensor the name of its tensor. wanted: all stored tensors of some tensors. A call
    reads and checks each chunk of the step folder once.
    CheckpointError for a weight that float16 cannot hold, and for inf and NaN in a matrix to quantise.
    """
    names = {owners[part] for part in wanted}
    chosen = contents.quantised
    for name, tensor in _assembled(step, read, contents, names):
        if chosen is None or name not in chosen.matrices:
            yield name, tensor
            continue
        try:
            yield from chosen.packed(name, tensor, contents.types[name])
        except ValueError as error:
            raise CheckpointError(f"{step}: {error}") from error
    for name in names.intersection(contents.extra):
        tensor = origin.extra(name)
        yield name, tensor.to(DTYPES.get(contents.types[name], tensor.dtype))


def _assembled(step: Path, read: Boxes, contents: Contents, wanted: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Yields the wanted tensors that are made of tmoe's, in the order of tmoe's tensors, one at a time.

    A matrix to quantise is in fp32, every other tensor in its type.
    """
    shapes = their_shapes(contents.pieces)
    matrices = contents.quantised.matrices if contents.quantised else {}
    for ours, pieces_of_ours in contents.pieces.items():
        group = [piece for piece in pieces_of_ours if piece.name in wanted]
        first = {piece.name: i for i, piece in reversed([*enumerate(group)])}
        group.sort(key=lambda piece: first[piece.name])  # all pieces of a tensor together
        boxes = tuple(Box(0, piece.offset, piece.shape) for piece in group)
        pieces = zip(group, read(ours, boxes), strict=True)
        for name, parts in groupby(pieces, key=lambda pair: pair[0].name):
            dtype = torch.float32 if name in matrices else DTYPES[contents.types[name]]
            theirs = torch.empty(shapes[name], dtype=dtype)
            for piece, tensor in parts:
                seen = piece.see(theirs)
                ours_seen = tensor.view(seen.shape)
                seen.copy_(ours_seen)
                if theirs.dtype == torch.float16 and bool((seen.isinf() & ours_seen.isfinite()).any()):
                    most = float(tensor.abs().max())
                    raise CheckpointError(
                        f"{step}: {ours} has weights up to {most:.3g}, float16 holds 65504: "
                        f"export with --dtype bf16"
                    )
            yield name, theirs
