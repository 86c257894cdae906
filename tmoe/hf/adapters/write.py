"""Makes a folder of PEFT's from tmoe's adapters: names, tensors and adapter_config.json.

`peft` is what PEFT 0.19 and later write for transformers 5: stacks of experts. `per-expert` has a pair for
each expert, under the published names; most servers read it.

tmoe's matrix often joins several of theirs: each of q, k and v gets the whole A and its rows of B. That is
exact. Several servers read `r` and `lora_alpha` and no patterns. So B is multiplied where factors differ, and
all adapters of the file have one factor.

next: hf/adapters/commands.py
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tmoe.config.check import ConfigError
from tmoe.config.run import LoraConfig
from tmoe.hf.adapters.names import WEIGHT, Place, Sites
from tmoe.hf.adapters.read import OUTER, PREFIX
from tmoe.hf.adapters.settings import Sizes

Layout = Literal["peft", "per-expert"]
Pair = Callable[[str], tuple[Tensor, Tensor]]  # matrix -> A [rank, in] and B [out, rank]; of experts [E, ...]
ROUNDED = 1e-12  # largest relative difference of factors that are equal but for rounding
WRITTEN_AS = "0.19.1"  # the version of PEFT whose layout of stacks is written
# Modules that PEFT takes for experts of transformers 4, in a model with stacks, wherever they are
EXPERT_LEAVES = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


class Target(NamedTuple):
    """A pair of the file."""

    key: str
    """KEY.lora_A.weight"""
    name: str
    """the name that patterns of adapter_config.json are matched with"""
    matrix: str
    places: tuple[Place, ...]
    stack: bool
    parameter: bool
    """whether PEFT is given the name of a parameter (target_parameters) instead of a module's"""


def targets_of(sites: Sites, matrices: Iterable[str], layout: Layout) -> list[Target]:
    """The pairs of a file. ConfigError for `per-expert` of a model whose experts are published as stacks.

    A shared expert's or a dense block's `gate_proj` next to stacks of experts is named as a parameter,
    `gate_proj.weight`: as a module PEFT would drop it, because it takes that name for the experts'.
    """
    chosen = set(matrices)
    names = sites.published if layout == "per-expert" else sites.held
    found = []
    for module, places in names.linears.items():
        if places[0].matrix in chosen:
            leaf = module.rpartition(".")[2]
            dense = bool(sites.held.stacks) and places[0].expert is None and leaf in EXPERT_LEAVES
            name = module + WEIGHT * dense
            found.append(Target(PREFIX + module, name, places[0].matrix, places, False, dense))
    for module, leaves in names.stacks.items():
        own = {leaf: places for leaf, places in leaves.items() if places[0].matrix in chosen}
        if own and layout == "per-expert":
            wrong = f"this model's experts are published in stacks ({module}), and have no names one by one"
            raise ConfigError.of("layout", layout, wrong, "peft")
        for i, (leaf, places) in enumerate(own.items()):
            inner = OUTER * (len(own) - 1 - i)
            key, name = PREFIX + module + inner, f"{module}.{leaf}"
            found.append(Target(key, name, places[0].matrix, places, True, True))
    return found


class PeftFile(NamedTuple):
    """A file of adapters that is to be written."""

    targets: list[Target]
    sizes: Mapping[str, Sizes]
    lora: LoraConfig
    sites: Sites

    @property
    def first(self) -> Sizes:
        """The rank and alpha of adapter_config.json's `r` and `lora_alpha`, which give all pairs' factor.

        With experts one by one they are those of gate_up, because PEFT fuses gate and up of such a file at
        that rank; else those of the commonest rank.
        """
        ranks = [self.sizes[target.matrix].rank for target in self.targets]
        gates = [t.matrix for t in self.targets if t.places[0].expert is not None and "gate_up" in t.matrix]
        counts = Counter(ranks)
        rank = self.sizes[gates[0]].rank if gates else min(counts, key=lambda r: (-counts[r], r))
        return next(size for size in self.sizes.values() if size.rank == rank)

    @property
    def apart(self) -> set[str]:
        """The matrices whose experts are in the file one by one."""
        return {target.matrix for target in self.targets if target.places[0].expert is not None}

    @property
    def rs(self) -> bool:
        """use_rslora. False for experts one by one: as PEFT fuses gate and up, it doubles r and alpha."""
        return self.lora.rs and not self.apart

    def alpha(self, rank: int) -> float:
        """The alpha that gives an adapter of this rank the file's factor."""
        first = self.first
        if self.lora.rs and not self.rs:
            return self.factor(first) * rank
        times = rank / first.rank
        return first.alpha * (times**0.5 if self.rs else times)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the file's tensors."""
        found: dict[str, tuple[int, ...]] = {}
        for target in self.targets:
            rank = self.sizes[target.matrix].rank
            rank *= self.sites.matrices[target.matrix][0] if target.stack else 1
            out = sum(place.rows for place in target.places)
            found[f"{target.key}.lora_A.weight"] = (rank, target.places[0].width)
            found[f"{target.key}.lora_B.weight"] = (out, rank)
        return found

    def tensors(self, pair: Pair, wanted: set[str]) -> Iterator[tuple[str, Tensor]]:
        """The wanted tensors in fp32, each with its name. One matrix's are in memory at a time."""
        by_matrix: dict[str, list[Target]] = {}
        for target in self.targets:
            by_matrix.setdefault(target.matrix, []).append(target)
        factor = self.factor(self.first)
        for matrix, targets in by_matrix.items():
            if not any(f"{t.key}.lora_{x}.weight" in wanted for t in targets for x in "AB"):
                continue
            a, b = pair(matrix)
            times = self.factor(self.sizes[matrix]) / factor
            b = b if math.isclose(times, 1, rel_tol=ROUNDED) else b * times
            for target in targets:
                for x, tensor in zip("AB", _of_target(target, a, b), strict=True):
                    if (name := f"{target.key}.lora_{x}.weight") in wanted:
                        yield name, tensor

    def _fused(self) -> dict[str, int]:
        """Names of stacks into which PEFT fuses pairs of experts one by one, and their ranks.

        PEFT names gate_up itself, at twice the rank `r`.
        """
        apart, found = self.apart, {}
        for module, leaves in self.sites.held.stacks.items():
            for leaf, places in leaves.items():
                if (matrix := places[0].matrix) in apart and not matrix.endswith("gate_up"):
                    found[f"{module}.{leaf}"] = self.sizes[matrix].rank
        return found

    @property
    def several(self) -> bool:
        """Whether tmoe's adapters have several factors, so that B's are multiplied."""
        first = self.factor(self.first)
        return any(not math.isclose(self.factor(s), first, rel_tol=ROUNDED) for s in self.sizes.values())

    def factor(self, size: Sizes) -> float:
        return size.alpha / (size.rank**0.5 if self.lora.rs else size.rank)

    def config(self, base: str) -> dict[str, Any]:
        """adapter_config.json. base: of base_model_name_or_path."""
        first, modules = self.first, self.sites.modules
        if self.apart:
            modules = modules - {f"{m}.{leaf}" for m, one in self.sites.held.stacks.items() for leaf in one}
        experts = {
            name for name, places in self.sites.published.linears.items() if places[0].expert is not None
        }
        named = {t.name for t in self.targets if not t.parameter}
        # PEFT reads experts' gate and up one by one only if down is named too; its B is then 0
        linears = sorted(named | experts if self.apart else named)
        weights = {name + WEIGHT for name in experts}
        parameters = [t.name for t in self.targets if t.parameter]
        ranks = {t.name: self.sizes[t.matrix].rank for t in self.targets} | self._fused()
        others = {name: rank for name, rank in ranks.items() if rank != first.rank}
        keys = _patterns(others, ranks)
        dropout = 0.0 if parameters else self.lora.dropout  # PEFT refuses dropout on parameters
        return dict(
            alpha_pattern={key: _number(self.alpha(rank)) for key, rank in keys.items()},
            auto_mapping=None,
            base_model_name_or_path=base or None,
            bias="none",
            fan_in_fan_out=False,
            inference_mode=True,
            init_lora_weights=True,
            lora_alpha=_number(self.alpha(first.rank)),
            lora_dropout=dropout,
            modules_to_save=None,
            peft_type="LORA",
            peft_version=WRITTEN_AS,
            r=first.rank,
            rank_pattern=keys,
            revision=None,
            target_modules=_ends(linears, {*modules, *linears}, 1),
            target_parameters=_ends(parameters, {*modules, *weights, *parameters}, 2) or None,
            task_type="CAUSAL_LM",
            use_dora=False,
            use_rslora=self.rs,
        )


def sizes_of(lora: LoraConfig, matrices: Iterable[str], top_k: int) -> dict[str, Sizes]:
    """The rank and alpha of each of these matrices' adapters."""
    return {name: Sizes(lora.rank_of(name, top_k), lora.alpha_of(name)) for name in matrices}


def _of_target(target: Target, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A and B of a pair, from those of the matrix."""
    rows = [b[..., place.start : place.start + place.rows, :] for place in target.places]
    out = torch.empty(*b.shape[:-2], sum(part.shape[-2] for part in rows), b.shape[-1])
    for place, part in zip(target.places, rows, strict=True):
        out[..., place.theirs, :] = part
    if target.stack:  # A's row e r + j, B's column j E + e
        return a.flatten(0, 1), out.permute(1, 2, 0).flatten(1)
    if (expert := target.places[0].expert) is not None:
        return a[expert], out[expert]
    return a, out


def _number(value: float) -> int | float:
    """A float as an int, if it is one: PEFT's own alphas are."""
    return int(value) if float(value).is_integer() else float(value)


def _suffixes(name: str, least: int) -> Iterator[str]:
    """The ends of a name of at least `least` parts, the shortest first."""
    parts = name.split(".")
    for count in range(least, len(parts) + 1):
        yield ".".join(parts[-count:])


def _ends(names: list[str], among: set[str], least: int) -> list[str]:
    """Ends of names, as short as possible, that all of `names` have and no other of `among`."""
    chosen = set(names)
    ends: dict[str, bool] = {}
    found: set[str] = set()
    having: dict[str, set[str]] = {}
    for name in among:
        for end in _suffixes(name, 1):
            having.setdefault(end, set()).add(name)
    for name in names:
        for end in _suffixes(name, least):
            if end not in ends:
                ends[end] = having[end] <= chosen
            if ends[end]:
                found.add(end)
                break
    return sorted(found)


def _patterns(others: dict[str, int], ranks: dict[str, int]) -> dict[str, int]:
    """rank_pattern: ends of names -> rank, none of which is the end of a pair of another rank.

    Experts one by one are named as a stack as well, since PEFT fuses such a file into stacks.
    """
    having: dict[str, set[int]] = {}
    for name, rank in ranks.items():
        for end in _suffixes(name, 1):
            having.setdefault(end, set()).add(rank)
    found: dict[str, int] = {}
    for name, rank in others.items():
        least = 2 if name.endswith(WEIGHT) else 1
        end = next((end for end in _suffixes(name, least) if having[end] == {rank}), name)
        found[end] = rank
    return dict(sorted(found.items()))
