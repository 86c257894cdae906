"""Reads a folder of PEFT's: every tensor is a part of one of tmoe's adapters, or is refused by name.

PEFT has had these layouts. In all of them the change of a matrix is s B A.
- A module: A [r, in], B [out, r]. Experts one by one are such modules.
- A stack of experts, from 0.19 on: A [E r, in] with row e r + j, B [out, r E] with column j E + e. unsloth
  wrote column e r + j until 2026-09 ("grouped_by_expert").
- The same before 0.19, for stacks [E, out, in]: in and out are exchanged, A [E r, out] and B [in, r E], and
  the change of an expert is A^T B^T. Stacks [E, in, out] (gpt-oss) were as they are now.
`experts.lora_A` is the last targeted parameter of the stack, `experts.base_layer.lora_A` the one before it.

tmoe's matrix often joins several of theirs (q, k and v): then A's are put above each other, and B is block
diagonal. If their A's are equal, one A is kept.

next: hf/adapters/write.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmoe.checkpoint.errors import refuse
from tmoe.checkpoint.manifest import CheckpointError
from tmoe.config.check import ConfigError, Setting
from tmoe.config.run import LoraConfig
from tmoe.hf.adapters.names import WEIGHT, Place, Sites
from tmoe.hf.adapters.peft_config import Order, read_peft_config
from tmoe.hf.adapters.settings import Sizes, settings_of_sizes
from tmoe.hf.files import DTYPES, opened
from tmoe.hf.foreign import ADAPTER_WEIGHTS, require_folder, require_no_pointers
from tmoe.hf.quantise import RENAMED

PREFIX = "base_model.model."
KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
OUTER = ".base_layer"
EXCHANGED_BEFORE = (0, 19)  # the version of PEFT from which a stack's A has the width of its input
TORN = "adapter_model.bin"


class Part(NamedTuple):
    """The rows of one of tmoe's matrices that a pair of the file changes."""

    key: str
    """the pair's module, as in the file: KEY.lora_A.weight"""
    name: str
    """the name that rank_pattern and alpha_pattern are matched with"""
    place: Place
    stack: bool
    """whether the pair is of all experts"""
    rank: int
    alpha: float


class Adapter(NamedTuple):
    """One of tmoe's adapters, from the file: the change of its matrix is scale b a."""

    a: Tensor
    """[rank, in], of experts [E, rank, in]; fp32"""
    b: Tensor
    """[out, rank], of experts [E, out, rank]; fp32"""
    alpha: float
    """with the rank, the scale"""


class PeftFolder:
    """The adapter of a folder of PEFT's, as tmoe's matrices. Tensors are read when they are asked for.

    sites: of the base.
    version: the version of PEFT that wrote it; only for a file that does not state it.
    order: the order of the columns of B in stacks; None: the file's lora_B_layout, else PEFT's.

    ConfigError names a field of adapter_config.json that is refused, and a layout that neither version nor
    shapes show. MismatchError lists each tensor that is of no matrix of the base, or of another shape.
    """

    def __init__(self, path: Path, sites: Sites, version: str = "", order: Order | None = None):
        require_folder(path)
        require_no_pointers(path)
        self.path = path
        self.config = read_peft_config(path, version)
        if order and self.config.order not in (None, order):
            wrong = f"{self.config.path} has lora_B_layout={self.config.order}"
            raise ConfigError.of("b_order", order, wrong, "without this flag")
        self.order: Order = order or self.config.order or "rank_major"
        self.order_unknown = self.config.unsloth and not (order or self.config.order)
        self.sites = sites
        self.file = path / ADAPTER_WEIGHTS[0]
        if not self.file.is_file() and (path / TORN).is_file():
            wrong = f"{path}: {TORN} is not read, which can hold code"
            raise CheckpointError(f"{wrong}; load it with PEFT and save it with safe_serialization=True")
        self.shapes = _header(self.file)
        self.linears = sites.published.linears | sites.held.linears
        problems: list[str] = []
        self.parts: dict[str, list[Part]] = {}
        self.stacks: dict[str, tuple[int, int]] = {}  # key -> (in, out) of a stack
        for key in self.shapes:
            problems += self._place(key)
        self.exchanged = self._exchanged() if self.stacks and not problems else False
        problems += self._doubles()
        refuse(f"{path} is no adapter of this base", problems)

    # ---- the header ----

    def _place(self, key: str) -> list[str]:
        """Files a pair under its matrices; returns its problems."""
        module = key.removeprefix(PREFIX)
        a, b = self.shapes[key]
        site = self._site(module)
        if site in self.linears:
            as_parameter = module + WEIGHT
            named = _ends(as_parameter, self.config.parameters)
            if not named and not self.config.names(module):
                return [f"{key}: target_modules does not name it, so PEFT does not use it"]
            places = self.linears[site]
            want = (places[0].width, sum(place.rows for place in places))
            if (a[1], b[0]) != want or a[0] != b[1]:
                return [f"{key}: lora_A {a}, lora_B {b}; the base's matrix has (in, out) {want}"]
            return self._file(key, as_parameter if named else module, places, False, a[0])
        experts = module.removesuffix(OUTER)
        site = site.removesuffix(OUTER)
        stacks = self.sites.held.stacks.get(site) or self.sites.published.stacks.get(site)
        if not stacks:
            return [f"{key}: {self._why_not(module)}"]
        leaf = self._leaf(key, experts, list(stacks))
        if not leaf:
            wanted = f"{experts}.{' or '.join(stacks)}"
            return [f"{key}: target_parameters does not say whether it is of {wanted}"]
        places = stacks[leaf]
        E = self.sites.matrices[places[0].matrix][0]
        want = (places[0].width, sum(place.rows for place in places))
        if a[0] % E or a[0] != b[1] or (a[1], b[0]) not in (want, want[::-1]):
            return [f"{key}: lora_A {a}, lora_B {b}; the base has {E} experts with (in, out) {want}"]
        self.stacks[key] = want
        return self._file(key, f"{experts}.{leaf}", places, True, a[0] // E)

    def _site(self, module: str) -> str:
        """The name in folders of a module of the file; PEFT saves Nemotron-H's under `model`."""
        other = RENAMED + module.removeprefix("model.")
        known = other in self.linears or other.removesuffix(OUTER) in self.sites.held.stacks
        return other if known else module

    def _leaf(self, key: str, experts: str, leaves: list[str]) -> str:
        """The parameter of a module of experts that a pair changes; "" if it cannot be known.

        PEFT wraps a module once for each targeted parameter, in the order of the module's parameters; the
        last wrapper has the module's own name.
        """
        targets = self.config.parameters
        named = [leaf for leaf in leaves if _ends(f"{experts}.{leaf}", targets)] if targets else leaves
        wrapped = f"{PREFIX}{experts}{OUTER}" in self.shapes
        if len(named) != 1 + wrapped:
            return ""
        return named[0] if key.endswith(OUTER) else named[-1]

    def _file(self, key: str, name: str, places: tuple[Place, ...], stack: bool, rank: int) -> list[str]:
        said = self.config.rank_of(name)
        if said != rank:
            return [f"{key}: has rank {rank}, by adapter_config.json {said}"]
        alpha = self.config.alpha_of(name)
        for place in places:
            self.parts.setdefault(place.matrix, []).append(Part(key, name, place, stack, rank, alpha))
        return []

    def _why_not(self, module: str) -> str:
        if module in self.sites.modules or f"{module}.weight" in self.sites.modules:
            return "tmoe has no adapter of this layer (embedding, head, router, a shared expert's gate)"
        return "the base has no such layer"

    def _doubles(self) -> list[str]:
        """Rows that two pairs change."""
        found: list[str] = []
        for parts in self.parts.values():
            seen: dict[Any, str] = {}
            for part in parts:
                rows = (part.place.start, part.place.expert)
                if rows in seen:
                    found.append(f"{part.key}: changes the same weights as {seen[rows]}")
                seen[rows] = part.key
            if len({part.stack for part in parts}) > 1:
                found.append(f"{parts[0].key}: experts are there one by one, and as a stack")
        return found

    def _exchanged(self) -> bool:
        """Whether in and out are exchanged in the pairs of stacks, as PEFT before 0.19 wrote them.

        Shapes show it, if a stack is not square; else the version; else the file is refused.
        """
        shown: dict[bool, str] = {}
        for key, (width, out) in self.stacks.items():
            if width != out:
                a, _ = self.shapes[key]
                shown.setdefault(a[1] != width, key)
        if len(shown) == 2:
            both = " and ".join(shown.values())
            raise ConfigError(f"{self.file}: {both} have their axes in different orders")
        if shown:
            return next(iter(shown))
        if all(self._transposed(key) for key in self.stacks):
            return False  # [E, in, out]: every version has written it in the same way
        if self.config.version is None:
            wrong = f"{self.config.path}: peft_version does not say which version wrote it, and the experts'"
            wrong += " matrices are square: PEFT before 0.19 exchanged in and out, which shapes cannot show"
            raise ConfigError(wrong, valid=f"import-adapter {Setting('peft_version')} 0.18, or 0.19")
        return self.config.version < EXCHANGED_BEFORE

    def _transposed(self, key: str) -> bool:
        part = next(part for parts in self.parts.values() for part in parts if part.key == key)
        return part.place.transposed

    # ---- tensors ----

    @property
    def matrices(self) -> list[str]:
        """Names of tmoe's matrices that get an adapter, in the model's order."""
        return [name for name in self.sites.matrices if name in self.parts]

    def adapters(self) -> Iterator[tuple[str, Adapter]]:
        """Each matrix that gets an adapter, with it. One adapter is in memory at a time."""
        for matrix in self.matrices:
            yield matrix, self.adapter(matrix)

    def settings(self) -> LoraConfig:
        """The settings of the adapters; reads A's, for matrices that join several of theirs."""
        sizes = {matrix: Sizes(one.a.shape[-2], one.alpha) for matrix, one in self.adapters()}
        return settings_of_sizes(sizes, self.sites.matrices, self.config.rs, self.config.dropout)

    def adapter(self, matrix: str) -> Adapter:
        """The adapter of a matrix, from all its pairs."""
        parts = self.parts[matrix]
        shape = self.sites.matrices[matrix]
        groups: dict[int, list[Part]] = {}
        for part in sorted(parts, key=lambda part: (part.place.start, part.place.expert or 0)):
            groups.setdefault(part.place.start, []).append(part)
        first = next(iter(groups.values()))[0]
        scale = self.scale(first.alpha, first.rank)
        found = [self._group(group, shape, scale) for group in groups.values()]
        kept: list[tuple[Tensor, list[tuple[Place, Tensor]]]] = []  # each A, and its rows of B
        for (a, b), group in zip(found, groups.values(), strict=True):
            same = next((rows for other, rows in kept if torch.equal(a, other)), None)
            if same is None:
                kept.append((a, same := []))
            same.append((group[0].place, b))
        a_whole = torch.cat([a for a, _ in kept], -2)
        b_whole = torch.zeros(*shape[:-1], a_whole.shape[-2])
        column = 0
        for a, rows in kept:
            for place, b in rows:
                columns = slice(column, column + a.shape[-2])
                b_whole[..., place.start : place.start + place.rows, columns] = b
            column += a.shape[-2]
        times = a_whole.shape[-2] / first.rank  # the scale stays, the rank does not
        return Adapter(a_whole, b_whole, first.alpha * (times**0.5 if self.config.rs else times))

    def scale(self, alpha: float, rank: int) -> float:
        return alpha / (rank**0.5 if self.config.rs else rank)

    def _group(self, group: list[Part], shape: tuple[int, ...], scale: float) -> tuple[Tensor, Tensor]:
        """A and B of the same rows of a matrix: of one pair, or of one pair for each expert.

        A [r, in] and B [rows, r]; of experts with a leading E. B is multiplied by its own scale over `scale`.
        An expert without a pair has zeros.
        """
        with opened(self.file) as file:

            def read(part: Part) -> tuple[Tensor, Tensor]:
                a, b = (file.get_tensor(f"{part.key}.lora_{x}.weight").float() for x in "AB")
                factor = self.scale(part.alpha, part.rank) / scale
                a, b = self._of_experts(a, b, shape[0]) if part.stack else (a, b)
                b = b[..., part.place.theirs, :]
                return a, b if factor == 1 else b * factor

            if group[0].place.expert is None:
                return read(group[0])
            rank = max(part.rank for part in group)
            a_whole = torch.zeros(shape[0], rank, shape[-1])
            b_whole = torch.zeros(shape[0], group[0].place.rows, rank)
            for part in group:
                a, b = read(part)
                assert part.place.expert is not None
                a_whole[part.place.expert, : part.rank] = a
                b_whole[part.place.expert, :, : part.rank] = b
            return a_whole, b_whole

    def _of_experts(self, a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        """A [E, r, in] and B [E, out, r] of the pair of a stack."""
        a = a.unflatten(0, (experts, -1))
        if self.order == "rank_major":
            b = b.unflatten(1, (-1, experts)).permute(2, 0, 1)
        else:
            b = b.unflatten(1, (experts, -1)).permute(1, 0, 2)
        return (b.mT, a.mT) if self.exchanged else (a, b)

    def notes(self) -> list[str]:
        """Lines on what the file does not state, or what is not used."""
        found = []
        if self.stacks and self.order_unknown:
            found.append(
                f"{self.config.path}: unsloth wrote it, without lora_B_layout: B's columns are read as "
                f"PEFT's; import-adapter --b-order grouped_by_expert reads that of unsloth before 2026-09-17"
            )
        if self.config.dropout:
            share = f"lora_dropout={self.config.dropout:g}"
            found.append(f"{self.config.path}: {share} is of training alone; --lora.dropout sets it")
        return found


def _header(file: Path) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """The pairs of a file, key -> shapes of A and B. MismatchError lists the tensors that are in no pair."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    problems: list[str] = []
    with opened(file) as handle:
        for name in sorted(handle.keys()):
            match = KEY.fullmatch(name)
            if match is None:
                problems.append(f"{name}: {_unknown(name)}")
                continue
            part = handle.get_slice(name)
            shape = tuple(part.get_shape())
            if part.get_dtype() not in DTYPES:
                problems.append(f"{name}: {part.get_dtype()}; valid are {', '.join(DTYPES)}")
            elif len(shape) != 2 or not all(shape):
                problems.append(f"{name}: shape {shape}; PEFT's have two axes")
            found.setdefault(PREFIX + match[1], {})[match[2]] = shape
    pairs = found.items()
    alone = [f"{key}.lora_{'AB'['A' in pair]}.weight: missing" for key, pair in pairs if len(pair) < 2]
    if not found and not problems:
        problems.append(f"{file.name} holds no adapter")
    refuse(f"{file} holds tensors that are no low-rank adapters", problems + alone)
    return {key: (pair["A"], pair["B"]) for key, pair in found.items()}


def _unknown(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return "of DoRA, which is not computed"
    if "lora_embedding" in name:
        return "an adapter of the embedding, which tmoe does not have"
    if ".lora_" not in name:
        return "whole weights next to the adapters: merge it with PEFT"
    return f"no such name in PEFT's LoRA; valid: {PREFIX}MODULE.lora_A.weight and .lora_B.weight"


def _ends(name: str, targets: tuple[str, ...]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)
