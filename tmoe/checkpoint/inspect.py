"""Shows what a step folder holds: the run, the tree of tensors, statistics of one tensor.

In the tree, equal blocks are folded into one line.

next: checkpoint/manifest.py
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast, get_type_hints

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from rich.tree import Tree
from torch import Tensor

from tmoe.base.listing import counted
from tmoe.checkpoint.base import base_of
from tmoe.checkpoint.best import best_of, number_of, read_losses
from tmoe.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    TensorEntry,
    dtype_of,
    read_chunk,
    read_manifest,
)
from tmoe.config.run import Config
from tmoe.parallel.layout import EXPERTS

BLOCK = 4 << 20  # number of elements that statistics convert to fp64 at once


# ---- the folder ----


def as_json(manifest: Manifest) -> dict[str, Any]:
    """The content that `show` prints, as JSON for programs."""
    tensors = {
        name: dict(
            shape=entry.shape,
            dtype=entry.dtype,
            placement=entry.placement,
            bytes=nbytes(entry),
            chunks=len(entry.chunks),
            files=len({chunk.file for chunk in entry.chunks}),
            sha256=entry.sha256,
        )
        for name, entry in manifest.tensors.items()
    }
    fields = ("step", "tokens", "world", "saved_ns", "info", "state")
    return {key: getattr(manifest, key) for key in fields} | dict(
        files={name: vars(entry) for name, entry in manifest.files.items()}, tensors=tensors
    )


def show(path: Path, manifest: Manifest, console: Console) -> None:
    """Print the facts, settings and tensors of a step folder.

    Strings of the manifest are printed literally, never as markup.
    """
    facts = Table.grid(padding=(0, 2))
    for key, value in _facts(path, manifest):
        facts.add_row(Text(key, style="bold"), Text(_printable(value)))
    console.print(facts)
    root = Node()
    for name, entry in manifest.tensors.items():
        root.insert(name.split("."), entry)
    console.print(_tree(root, Tree(Text(f"tensors  {decimal(root.nbytes())}", style="bold"))))


def show_brief(path: Path, manifest: Manifest, console: Console) -> None:
    """Print a step folder in a few lines: sizes, the settings that are not the defaults, the data."""
    tensors = manifest.tensors.values()
    weights = sum(math.prod(t.shape) for name, t in manifest.tensors.items() if name.startswith("model."))
    tokens = "unknown" if manifest.tokens is None else f"{manifest.tokens:,}"
    size = decimal(sum(entry.size for entry in manifest.files.values()))
    lines = [
        f"{path}: step {manifest.step}, {tokens} tokens, {counted(manifest.world, 'rank')}, {size}, "
        f"{counted(len(tensors), 'tensor')}, {weights:,} numbers of the model"
    ]
    config = manifest.info.get("config")
    if (base := base_of(manifest)) is not None:
        lines.append(f"adapters on {base.path}")
    lines += changed_settings(config) if isinstance(config, dict) else ["settings: the step does not say"]
    data = manifest.info.get("data")
    if isinstance(data, dict):
        lines.append("data  " + _flat(data))
    for line in lines:
        console.print(Text(_printable(line)), soft_wrap=True)


def changed_settings(config: dict[str, Any]) -> list[str]:
    """Settings of a run that differ from the defaults of `Config`: one line for each section that has any."""
    usual = json.loads(json.dumps(dict(_defaults(Config)), default=str))
    sections: dict[str, dict[str, Any]] = {}
    for name, value in _dotted(json.loads(json.dumps(config, default=str))):
        if name not in usual or usual[name] != value:
            section, _, last = name.rpartition(".")
            sections.setdefault(section, {})[last] = value
    return [f"{section or 'run'}  {_flat(settings)}" for section, settings in sections.items()]


def _defaults(kind: type, section: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and default of every setting that has one."""
    hints = get_type_hints(kind)
    for setting in fields(kind):
        inner = hints[setting.name]
        if is_dataclass(inner):
            yield from _defaults(cast(type, inner), f"{section}{setting.name}.")
        elif setting.default is not MISSING:
            yield section + setting.name, setting.default
        elif setting.default_factory is not MISSING:
            yield section + setting.name, setting.default_factory()


def _dotted(settings: dict[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{section}{name}.")
        else:
            yield section + name, value


def show_steps(steps: list[Path]) -> None:
    """Print a line for each step of a run, the newest first: tokens, time, validation, and which is the best.

    With --task grpo the validation is shown as the mean reward, which is minus the loss.
    """
    losses = read_losses(steps[0].parent)
    best = best_of(losses, steps)
    for path in steps:
        manifest = read_manifest(path)
        config = manifest.info.get("config")
        rewarded = isinstance(config, dict) and config.get("task") == "grpo"
        parts = [
            str(path),
            "" if manifest.tokens is None else f"{manifest.tokens:,} tokens",
            _saved(manifest),
        ]
        if (loss := losses.get(number_of(path))) is not None:
            parts.append(f"validation reward {-loss:.4f}" if rewarded else f"validation loss {loss:.4f}")
        print("  ".join([*filter(None, parts), *(["best"] if path == best else [])]))


def _facts(path: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    yield "path", str(path)
    yield "step", f"{manifest.step}"
    yield "tokens", "unknown" if manifest.tokens is None else f"{manifest.tokens:,}"
    yield "world", counted(manifest.world, "rank")
    yield "saved", _saved(manifest)
    sizes = [entry.size for entry in manifest.files.values()]
    yield "files", f"{len(sizes)}, {decimal(sum(sizes))} ({sum(sizes)} bytes)"
    for title, value in {**manifest.info, "state": manifest.state}.items():
        sections = {}
        if isinstance(value, dict):
            sections = {k: v for k, v in value.items() if isinstance(v, dict)}
        if rest := {k: v for k, v in value.items() if k not in sections} if sections else value:
            yield title, _flat(rest)
        for key, section in sections.items():  # each section of the settings has its own line
            yield f"{title}.{key}", _flat(section)


def _saved(manifest: Manifest) -> str:
    return datetime.fromtimestamp(manifest.saved_ns / 1e9).astimezone().isoformat(" ", "seconds")


def _flat(value: Any, name: str = "") -> str:
    """The value as text, on one line; nested dicts as "a.b=1  a.c=2"."""
    if isinstance(value, dict):
        return "  ".join(_flat(part, f"{name}.{key}" if name else key) for key, part in value.items())
    return f"{name}={value}" if name else f"{value}"


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)


# ---- the tree ----


@dataclass
class Node:
    """A part of the dotted names: the parts below it, and the tensor of exactly this name, if any."""

    children: dict[str, Node] = field(default_factory=dict)
    entry: TensorEntry | None = None

    def insert(self, parts: list[str], entry: TensorEntry) -> None:
        node = self
        for part in parts:
            node = node.children.setdefault(part, Node())
        node.entry = entry

    def nbytes(self) -> int:
        own = nbytes(self.entry) if self.entry else 0
        return own + sum(child.nbytes() for child in self.children.values())

    def signature(self) -> tuple:
        """Equal for nodes that look the same: the blocks of a model, the generator states of all ranks."""
        entry = self.entry
        own = entry and (
            entry.shape,
            entry.dtype,
            None if entry.placement.startswith("rank ") else entry.placement,
        )
        return own, tuple((name, child.signature()) for name, child in self.children.items())


def _tree(node: Node, branch: Tree) -> Tree:
    for label, child, count in _folded(node):
        while not child.entry and len(child.children) == 1:  # attention -> o -> weight: one line
            ((name, child),) = child.children.items()
            label = f"{label}.{name}"
        _tree(child, branch.add(_line(label, child, count)))
    return branch


def _folded(node: Node) -> Iterator[tuple[str, Node, int]]:
    """The children with their counts; consecutive numbered children that look the same become one."""
    runs: list[tuple[str, str, Node, int]] = []
    previous: tuple | None = None
    numbers = sorted((name for name in node.children if name.isdecimal()), key=int)
    for name in numbers:
        child = node.children[name]
        if (signature := child.signature()) == previous:
            first, _, _, count = runs.pop()
            runs.append((first, name, child, count + 1))
        else:
            runs.append((name, name, child, 1))
        previous = signature
    for first, last, child, count in runs:
        yield first if count == 1 else f"{first}-{last}", child, count
    for name, child in node.children.items():
        if not name.isdecimal():
            yield name, child, 1


def _line(label: str, node: Node, count: int) -> Text:
    line = Text(_printable(label), style="" if node.entry else "bold")
    if node.entry:
        line.append(f"  {list(node.entry.shape)} {node.entry.dtype}", "cyan")
    line.append(f"  {decimal(node.nbytes())}" + (f" each, {count} times" if count > 1 else ""), "green")
    if node.entry and count == 1:
        line.append(f"  {_printable(node.entry.placement)}", "dim")
    return line


def nbytes(entry: TensorEntry) -> int:
    return math.prod(entry.shape) * dtype_of(entry.dtype).itemsize


# ---- one tensor ----


@dataclass
class Statistics:
    """Statistics of the finite elements, in fp64; NaN if there are none.

    std is the population's, norm the 2-norm.
    """

    count: int = 0
    non_finite: int = 0
    min: float = math.nan
    max: float = math.nan
    mean: float = math.nan
    squares: float = 0.0  # summed squared distances from the mean

    @property
    def std(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else math.nan

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares + self.count * self.mean**2) if self.count else math.nan

    def add(self, values: Tensor) -> None:
        for block in values.reshape(-1).split(BLOCK):
            wide = block.double()
            finite = wide[wide.isfinite()]
            self.non_finite += wide.numel() - finite.numel()
            if finite.numel():
                mean = finite.mean()
                part = Statistics(finite.numel(), 0, float(finite.min()), float(finite.max()), float(mean))
                part.squares = float((finite - mean).square_().sum())
                self.merge(part)

    def merge(self, other: Statistics) -> None:
        """Add another sample's statistics: the means and squares of two samples give those of their union.

        Source: Chan, Golub, LeVeque 1979.
        """
        self.non_finite += other.non_finite
        if not self.count or not other.count:
            if other.count:
                self.count, self.min, self.max = other.count, other.min, other.max
                self.mean, self.squares = other.mean, other.squares
            return
        count = self.count + other.count
        distance = other.mean - self.mean
        self.squares += other.squares + distance**2 * self.count * other.count / count
        self.mean += distance * other.count / count
        self.count = count
        self.min = min(self.min, other.min)
        self.max = max(self.max, other.max)

    def as_json(self) -> dict[str, Any]:
        keys = ("min", "max", "mean", "std", "norm")
        return dict(finite=self.count, non_finite=self.non_finite) | {
            key: None if math.isnan(value := getattr(self, key)) else value for key in keys
        }


def statistics(path: Path, name: str) -> tuple[TensorEntry, list[Statistics]]:
    """A tensor's entry and its statistics: of the whole, then of each expert for a parameter [E, ...].

    Holds one chunk in memory at a time.
    Raises CheckpointError if there is no such tensor (it lists the nearest names), or if the tensor's bytes
    are damaged.
    """
    tensors = read_manifest(path).tensors
    if (entry := tensors.get(name)) is None:
        near = nearest(name, tensors)
        hint = f"nearest: {', '.join(near)}" if near else "without --tensor all are listed"
        raise CheckpointError(f"{path}: no tensor {name!r}; {hint}")
    per_expert = len(entry.shape) > 1 and 0 not in entry.shape and EXPERTS.fullmatch(name)
    parts = [Statistics() for _ in range(entry.shape[0])] if per_expert else [Statistics()]
    for chunk in entry.chunks:
        tensor = read_chunk(path, chunk, dtype_of(entry.dtype))
        if per_expert:
            for row, values in enumerate(tensor, start=chunk.offset[0]):
                parts[row].add(values)
        else:
            parts[0].add(tensor)
    whole = Statistics()
    for part in parts:
        whole.merge(part)
    return entry, [whole, *(parts if per_expert else ())]


def nearest(name: str, names: Iterable[str], count: int = 5) -> list[str]:
    """The names that contain this one, whole or as parts in the same order, and the names similar to it."""
    names, wanted = list(names), [part for part in name.lower().split(".") if part]
    dotted = [known for known in names if f".{name}." in f".{known}."]
    ordered = [known for known in names if wanted and _in_order(wanted, known.lower().split("."))]
    alike = difflib.get_close_matches(name, names, n=count, cutoff=0.5)
    return list(dict.fromkeys([*dotted, *ordered, *alike]))[:count]


def _in_order(wanted: list[str], parts: list[str]) -> bool:
    """Whether each of the words is contained in a part, in this order."""
    left = iter(parts)
    return all(any(word in part for part in left) for word in wanted)


def show_statistics(name: str, entry: TensorEntry, found: list[Statistics], console: Console) -> None:
    console.print(
        Text(f"{name}  {list(entry.shape)} {entry.dtype}  {decimal(nbytes(entry))}  {entry.placement}")
    )
    table = Table("", "min", "max", "mean", "std", "norm", "non-finite", box=None)
    for i, s in enumerate(found):
        numbers = [f"{value:.6g}" for value in (s.min, s.max, s.mean, s.std, s.norm)]
        table.add_row(f"expert {i - 1}" if i else "all", *numbers, f"{s.non_finite}")
    console.print(table)
