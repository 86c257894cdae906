"""A step folder from a GGUF file: its settings, its tensors as fp32, its tokenizer.

next: extras/gguf/names.py, extras/gguf/back.py
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor

from tmoe.base.versions import versions
from tmoe.checkpoint.errors import refuse
from tmoe.checkpoint.manifest import CheckpointError, Manifest
from tmoe.checkpoint.rewrite import Output, Plan
from tmoe.config.axes import Axes
from tmoe.config.check import ConfigError
from tmoe.config.model import ModelConfig
from tmoe.extras.gguf.back import tokenizer_files
from tmoe.extras.gguf.encode import decode
from tmoe.extras.gguf.families import Family, read_model
from tmoe.extras.gguf.names import Entry, architecture_of, entries
from tmoe.extras.gguf.write import FACTORS, LLAMA3, LLAMA3_SETTINGS, llama3_factors
from tmoe.hf.files import FILE, MODEL
from tmoe.hf.tokenizer_files import carried_in
from tmoe.model.shapes import model_shapes
from tmoe.parallel.layout import Box, lay_out

TOKENIZER = "tokenizer."
PARTS = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
RANGES = (8192, 4096, 2048, 16384, 32768, 131072)  # that Llama's published models were trained on


class File(NamedTuple):
    """A GGUF file, mapped, or all files of a model in several parts."""

    paths: tuple[Path, ...]
    arch: str
    keys: dict[str, Any]
    """of its architecture, the name taken off"""
    tokenizer: dict[str, Any]
    """"tokenizer." taken off"""
    tensors: dict[str, Any]
    """gguf.ReaderTensor by name"""
    llama3: list[float] | None
    """llama3's settings, where tmoe wrote the file"""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(int(n) for n in t.shape)[::-1] for name, t in self.tensors.items()}

    @property
    def types(self) -> dict[str, int]:
        """ggml's types and how many tensors have each."""
        return dict(Counter(t.tensor_type.name for t in self.tensors.values()).most_common())


class Reader(gguf.GGUFReader):
    """gguf's reader, which says of a file that ends too early how many bytes are missing.

    It only looks at what the parent's own methods are given, so a parent without them still reads.
    """

    def _get(self, offset: Any, dtype: Any, count: Any = 1, *more: Any, **named: Any) -> Any:
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"the file ends at byte {len(self.data)}, but a value of its header at {end}")
        return super()._get(offset, dtype, count, *more, **named)

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        ends = [len(self.data)]
        for field in fields:
            _, _, _, dims, kind, offset = field.parts
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind[0])]
            ends.append(int(start_offs) + int(offset[0]) + math.prod(map(int, dims)) // block * size)
        if max(ends) > len(self.data):
            has = f"the file has {len(self.data)} bytes of {max(ends)} that its header states"
            raise ValueError(f"truncated: {has}; copy or download it again")
        super()._build_tensors(start_offs, fields)


def open_file(path: Path) -> File:
    """A file, or all parts of a model in several files, whichever of them is named.

    CheckpointError for a file that is damaged, and for a part that is missing or of another model.
    """
    reader, values = _opened(path)
    paths, tensors = (path,), [*reader.tensors]
    if (count := values.get("split.count", 0)) not in (0, 1):  # 0: llama.cpp has merged the parts
        paths = _parts_of(path, count)
        opened = [_opened(part) for part in paths]
        for i, (part, (_, own)) in enumerate(zip(paths, opened, strict=True)):
            if (own.get("split.count"), own.get("split.no")) != (count, i):
                said = f"split.no={own.get('split.no')}, split.count={own.get('split.count')}"
                raise CheckpointError(f"{part}: {said}; by its name {i} and {count}")
        values, tensors = opened[0][1], [tensor for one, _ in opened for tensor in one.tensors]
        found, stated = len({tensor.name for tensor in tensors}), values.get("split.tensors.count")
        if found != stated or found != len(tensors):
            raise CheckpointError(f"{path}: its parts hold {found} tensors, by split.tensors.count {stated}")
    arch = values.get("general.architecture")
    if not isinstance(arch, str):
        raise CheckpointError(f"{path}: no general.architecture")
    keys = {name.removeprefix(f"{arch}."): v for name, v in values.items() if name.startswith(f"{arch}.")}
    words = {name.removeprefix(TOKENIZER): v for name, v in values.items() if name.startswith(TOKENIZER)}
    return File(paths, arch, keys, words, {t.name: t for t in tensors}, values.get(LLAMA3))


def _opened(path: Path) -> tuple[Reader, dict[str, Any]]:
    """A file, mapped, and its keys."""
    try:
        reader = Reader(path)
        return reader, {
            n: field.contents() for n, field in reader.fields.items() if not n.startswith("GGUF.")
        }
    except (ValueError, KeyError, IndexError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{path}: no GGUF file, or damaged: {error}") from None


def _parts_of(path: Path, count: Any) -> tuple[Path, ...]:
    """The files of a model in `count` parts, as llama.cpp names them. CheckpointError names a missing one."""
    match = PARTS.fullmatch(path.name)
    if match is None or int(match[2]) != count:
        named = "all parts are read if they are named NAME-00001-of-00002.gguf and so on"
        raise CheckpointError(f"{path}: a part of a model in {count} files; {named}")
    names = [f"{match[1]}-{i:05}-of-{match[2]}.gguf" for i in range(1, int(match[2]) + 1)]
    if missing := [name for name in names if not path.with_name(name).is_file()]:
        more = f" and {len(missing) - 1} others" * (len(missing) > 1)
        raise CheckpointError(f"{path}: a part of a model in {count} files; missing: {missing[0]}{more}")
    return tuple(map(path.with_name, names))


def plan_import(path: Path, axes: Axes) -> tuple[Plan, File, list[str]]:
    """The plan of an import, the file, and what is said of its tokenizer.

    ConfigError: an architecture or keys that tmoe does not compute. MismatchError lists tensors that do not
    fit.
    """
    file = open_file(path)
    try:
        family, cfg = read_model(file.arch, file.keys, file.shapes)
        cfg = _with_factors(file, family, cfg)
    except ConfigError as error:
        raise error.within(str(path)) from None
    arch = architecture_of(family, cfg)
    found, missing = entries(family, arch, cfg)
    refuse(f"{path} is no whole {file.arch}", _unfit(file, found, cfg) + [f"{m}: no name" for m in missing])
    shapes = {MODEL + name: shape for name, shape in model_shapes(cfg).items()}
    outputs = [Output(name, shapes[name], torch.float32, *lay) for name, lay in lay_out(shapes, axes).items()]
    try:
        files, said = tokenizer_files(file.tokenizer)
    except ConfigError as error:
        raise error.within(str(path)) from None
    carried = {
        FILE + name: torch.frombuffer(bytearray(raw), dtype=torch.uint8) for name, raw in files.items()
    }
    for name, tensor in carried.items():
        box = Box(0, (0,), tuple(tensor.shape))
        outputs.append(Output(name, box.shape, tensor.dtype, "replicated", (box,)))
    info = dict(
        config=dict(model=asdict(cfg)),
        versions=versions(),
        hf=arch.model_type,
        gguf=dict(architecture=file.arch, types=file.types),
    )
    if known := carried_in(path, files):
        info |= dict(data=dict(tokenizer=known.fingerprint)) if known.fingerprint else {}
        info |= dict(chat=known.chat.as_json()) if known.chat else {}
    state = dict(step=0, tokens=0)
    manifest = Manifest(0, 0, axes.world, 0, info, state, {}, {})
    stats = ((part.name, part.stat()) for part in file.paths)
    stamps = tuple(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
    by_ours: dict[str, list[Entry]] = {}
    for entry in found:
        by_ours.setdefault(MODEL + entry.ours, []).append(entry)
    plan = Plan(tuple(outputs), partial(_produced, file, by_ours, carried), manifest, stamps)
    return plan, file, [said] if said else []


def _produced(
    file: File, by_ours: dict[str, list[Entry]], carried: dict[str, Tensor], output: Output
) -> Iterator[Tensor]:
    """The contents of one tensor's boxes."""
    if output.name in carried:
        yield carried[output.name]
        return
    whole = torch.empty(output.shape)
    for entry in by_ours[output.name]:
        tensor = file.tensors[entry.name]
        entry.to_ours(decode(tensor.data, tensor.tensor_type).view(entry.shape), whole)
    for box in output.boxes:
        inside = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
        yield whole[inside].contiguous()


def _unfit(file: File, found: list[Entry], cfg: ModelConfig) -> list[str]:
    """A line for each tensor that is missing, unknown, or of a wrong shape or type."""
    problems = []
    shapes = file.shapes
    readable = {kind for kind in {t.tensor_type for t in file.tensors.values()} if _is_readable(kind)}
    known = {FACTORS} if cfg.rope.scaling == "llama3" else set()
    for entry in found:
        known.add(entry.name)
        if entry.name not in shapes:
            problems.append(f"{entry.name}: missing")
        elif _squeezed(shapes[entry.name]) != _squeezed(entry.shape):
            problems.append(f"{entry.name}: shape {shapes[entry.name]}, by the keys {entry.shape}")
        elif (kind := file.tensors[entry.name].tensor_type) not in readable:
            problems.append(f"{entry.name}: type {kind.name} is not read")
    return problems + [f"{name}: {file.arch} has no such tensor here" for name in shapes if name not in known]


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def _is_readable(kind: gguf.GGMLQuantizationType) -> bool:
    _, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        decode(np.zeros((1, size), np.float32 if kind.name == "F32" else np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _with_factors(file: File, family: Family, cfg: ModelConfig) -> ModelConfig:
    """The settings with llama3's scaling, where the file has its factors.

    A file has no more than a number for each frequency; the settings are the published ones that give them.
    """
    if FACTORS not in file.tensors:
        return cfg
    tensor = file.tensors[FACTORS]
    given = decode(tensor.data, tensor.tensor_type).tolist()
    guesses = [(round(max(given), 4), trained, 1.0, 4.0) for trained in RANGES]
    for guess in [tuple(file.llama3)] if file.llama3 else guesses:
        settings: dict[str, Any] = dict(zip(LLAMA3_SETTINGS, guess, strict=True))
        settings["original_max_seq"] = int(settings["original_max_seq"])
        rope = replace(cfg.rope, scaling="llama3", **settings)
        want = llama3_factors(rope, cfg.rotary_dim)
        same = (math.isclose(a, b, rel_tol=1e-5) for a, b in zip(given, want, strict=False))
        if family.factors and len(want) == len(given) and all(same):
            return replace(cfg, rope=rope)
    raise ConfigError(f"{FACTORS}: factors {given[:4]}... of RoPE are not those of llama3's scaling")
