"""What a table entry for one of Hugging Face's architectures is made of, and the boxes that it describes.

Every tensor of theirs is a box of one of ours: `q_proj` is the first rows of `qkv`, an expert's `up_proj` the
lower half of one expert of `gate_up`. `pieces` computes the boxes. Import, export and direct start all read
them, so no direction has its own code.

next: hf/architectures/__init__.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from tmoe.base.listing import listed
from tmoe.checkpoint.errors import MismatchError
from tmoe.config.model import ModelConfig
from tmoe.model.shapes import model_shapes

HF = dict[str, Any]  # the contents of a config.json
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer or an expert, in a tensor's name
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


# ---- what an entry is made of ----


class Part(NamedTuple):
    """One of the tensors that make up one of ours. {layer} and {expert} stand for numbers.

    rows: how many of our rows it fills (the second axis in a stack of experts, else the first), by the
        settings `of_layer`. 0: it does not exist. None: an equal share.
    transposed: its last two axes are exchanged.
    every, first: it is woven into a tensor with others: it has only every n-th row of that tensor, from the
        `first` on.
    framed: it has one axis more in front, of length one.
    """

    name: str
    rows: Callable[[ModelConfig], int] | None = None
    transposed: bool = False
    every: int = 1
    first: int = 0
    framed: bool = False


class Rule(NamedTuple):
    """One of our tensors and their parts, joined along the rows; parts named with {expert} are stacked first.

    held: the parts as transformers 5 holds them in memory; it writes these with save_original_format=False.
    Empty: the same parts. A folder may have either, layer by layer; where both have the same names, shapes
    tell them apart.
    """

    ours: str
    parts: tuple[Part, ...]
    held: tuple[Part, ...] = ()

    @property
    def by_shape(self) -> bool:
        """Whether shapes alone tell `held` from `parts`."""
        return {part.name for part in self.held} == {part.name for part in self.parts}


NO_NULL = "null is refused"


class Field(NamedTuple):
    """A setting of ModelConfig ("moe.top_k") and its keys in config.json.

    keys: the first of several is the one written.
    default: what transformers' class takes where the key is missing, or a function of the other keys. None:
        the key must be there.
    null: what transformers' model makes of null, which seldom is the default. NO_NULL: its class refuses
        null, or its model fails.
    least: the smallest number that config.json may say. None: ModelConfig's own check decides.
    words: what each word of config.json is as a setting; others are refused. The first of several for a
        setting is the one written. None: both say the same.
    """

    ours: str
    keys: tuple[str, ...]
    default: Any = None
    null: Any = NO_NULL
    least: int | None = None
    words: dict[str, str] | None = None

    def written(self, value: Any) -> Any:
        """A setting as config.json says it; where no word says it, as it is, which is then refused."""
        return next((word for word, ours in (self.words or {}).items() if ours == value), value)


class Key(NamedTuple):
    """A key of config.json that is no Field's, because functions of the entry make settings of it.

    kind: its type.
    least: the smallest valid number. None: any.
    null: whether transformers takes null for it.
    """

    name: str
    kind: Any = int
    least: int | None = None
    null: bool = True


class Layers(NamedTuple):
    """How an architecture says which blocks are MoE."""

    read: Callable[[HF, dict[str, Any]], list[str]]
    """(keys that are not null, settings found so far) -> what is wrong

    Puts dense_layers, and moe_every and dense_blocks where they are needed, into the settings.
    """
    write: Callable[[ModelConfig], HF] = lambda cfg: {}
    """the keys that say it"""


def kinds_of_layers(
    said: HF, key: str, valid: Collection[str], usual: list[str]
) -> tuple[list[str], list[str]]:
    """What a list of config.json says of each layer (`layer_types`, `mlp_layer_types`), and what is wrong.

    usual: what it says where the key is missing, and what is returned where it is wrong.
    """
    kinds = list(said.get(key, usual))
    if {*kinds} <= {*valid} and len(kinds) == len(usual):
        return kinds, []
    return usual, [f"{key}={kinds!r}: {' or '.join(valid)} for each of {len(usual)} layers is computed"]


INV_FREQ = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)  # computed from config.json


class Windows(NamedTuple):
    """How an architecture says which blocks have a sliding window, and how wide."""

    keys: tuple[str, ...]
    """which of sliding_window, use_sliding_window and layer_types it reads"""
    sliding: Callable[[HF, int], bool]
    """whether a block has the window where there is no layer_types"""
    width: int = 0
    """the window where config.json has no sliding_window"""
    null: bool = True
    """whether a sliding_window of null is no window; False: transformers fails where a block has one"""
    rotary: bool = False
    """whether blocks without a window have no rotary positions"""
    before: str = ""
    """the key that goes before sliding_window and counts the tokens before a token, without itself"""


@dataclass(frozen=True)
class Architecture:
    """All that tmoe knows of one of Hugging Face's architectures."""

    model_type: str
    class_name: str
    rules: tuple[Rule, ...]
    fields: tuple[Field, ...]
    ours: dict[str, Any]
    """settings of ModelConfig that the architecture implies"""
    theirs: dict[str, Any]
    """keys of config.json for which tmoe computes one value only, or one of a tuple

    null is valid only if it is in the tuple; a missing key is fine.
    """
    layers: Layers
    """which blocks are MoE"""
    keys: tuple[Key, ...] = ()
    """keys without a setting of their own, beside those that every architecture has (hf/config.py)"""
    write: Callable[[ModelConfig], HF] = lambda cfg: {}
    """keys of config.json that are more than a copy of one setting"""
    theta: float = 10000.0
    """RoPE base where config.json names none"""
    rope: HF = field(default_factory=dict)
    """scaling of RoPE where config.json names none"""
    nested: str = ""
    """the key of config.json under which the settings of the text's model lie; "": they are config.json's own

    Such a model is trained as its text part alone, and an export needs an original.
    """
    rope_alpha: bool = False
    """whether rope_type dynamic with an alpha raises the base once for all lengths (NTK)"""
    rope_by_kind: bool = False
    """whether blocks that see all and blocks with a window have settings of RoPE of their own"""
    rope_bases: str = ""
    """the key that may list each block's base of RoPE, 0 for none; "": no such key"""
    query_beta: str = ""
    """the key of RoPE's settings that is our rope.query_beta; "": queries are not scaled by position"""
    partial: Callable[[HF], float] | None = None
    """share of a head's channels that turn where config.json names none; None: always all of them

    With latent attention it must say what its own widths say.
    """
    windows: Windows | None = None
    """None: every token sees all tokens before it"""
    copies: dict[str, Callable[[HF], Any]] = field(default_factory=dict)
    """keys of config.json that must agree with other keys, if they are there at all"""
    fp32: tuple[str, ...] = ()
    """ends of the names of tensors that stay fp32 in an export to bf16, as in transformers"""
    extra: tuple[str, ...] = INV_FREQ
    """patterns of tensors that decide nothing: kept for the way back, read only if a rule names them"""


class Piece(NamedTuple):
    """One of their tensors, or the rows of it that a Part names, as a box of one of ours.

    stacked: it lacks our first axis, which has length one in the box.
    axis: the axis of our rows, counted from the end.
    """

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    stacked: bool
    axis: int
    transposed: bool
    every: int
    first: int
    framed: bool = False

    @property
    def their_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor of theirs."""
        whole = list(self.shape)
        whole[self.axis] *= self.every
        theirs = self.to_theirs(tuple(whole))
        return (1, *theirs) if self.framed else theirs

    def see(self, theirs: Tensor) -> Tensor:
        """The part of their tensor that is ours, in our order of axes, as a view."""
        theirs = theirs[0] if self.framed else theirs
        theirs = theirs.mT if self.transposed else theirs
        return theirs.unflatten(self.axis, (-1, self.every)).select(self.axis, self.first)

    def to_theirs(self, axes: tuple) -> tuple:
        """Something given for each of our axes (sizes, slices), in their order of axes."""
        axes = tuple(axes[1:]) if self.stacked else tuple(axes)
        return (*axes[:-2], axes[-1], axes[-2]) if self.transposed else axes


def under(rules: Iterable[Rule], old: str, new: str) -> tuple[Rule, ...]:
    """The same rules where their names that begin with `old` begin with `new`."""

    def moved(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        return tuple(
            part._replace(name=new + part.name.removeprefix(old) if part.name.startswith(old) else part.name)
            for part in parts
        )

    return tuple(rule._replace(parts=moved(rule.parts), held=moved(rule.held)) for rule in rules)


# ---- boxes ----


def pieces(
    arch: Architecture, cfg: ModelConfig, ours: str, shape: tuple[int, ...], held: Container[str] = ()
) -> list[Piece]:
    """Their tensors that make up our tensor `ours` of `shape`, expert by expert.

    Empty: the architecture lacks it.
    held: numbers of the layers whose tensors are spelled as transformers 5 holds them (see Rule).
    """
    generic, layer = _generic(ours)
    here = of_layer(cfg, int(layer)) if layer else cfg
    rule = next((rule for rule in arch.rules if rule.ours == generic), Rule(ours, ()))
    parts = rule.held if rule.held and layer in held else rule.parts
    found = []
    stacked = any("{expert}" in part.name for part in parts)
    axis = (".experts." in ours) - len(shape)
    for expert in range(shape[0]) if stacked else (None,):
        start = 0
        for part in parts:
            rows = part.rows(here) if part.rows else shape[axis] // len(parts)
            if not rows:
                continue
            offset = [0] * len(shape)
            box = list(shape)
            offset[axis] = start
            box[axis] = rows
            if expert is not None:
                offset[0] = expert
                box[0] = 1
            name = part.name.format(layer=layer, expert=expert)
            woven = (part.every, part.first, part.framed)
            found.append(Piece(name, tuple(offset), tuple(box), stacked, axis, part.transposed, *woven))
            start += rows
    assert sum(math.prod(piece.shape) for piece in found) in (0, math.prod(shape)), (
        f"{ours}: parts leave a hole"
    )
    return found


def _generic(ours: str) -> tuple[str, str]:
    """The name of our tensor as rules have it, and the number of its layer, "" if it has none."""
    numbers = [word for word in ours.split(".") if word.isdigit()]
    generic = ".".join("{layer}" if word.isdigit() else word for word in ours.split("."))
    return generic, numbers[0] if numbers else ""


def of_layer(cfg: ModelConfig, layer: int) -> ModelConfig:
    """The settings with this layer's own number of key heads."""
    heads = cfg.kv_heads_in(cfg.window_of(layer))
    return cfg if heads == cfg.kv_heads else replace(cfg, kv_heads=heads)


def divide(
    arch: Architecture, cfg: ModelConfig, present: Iterable[str], ahead: int = 0, held: Collection[str] = ()
) -> tuple[dict[str, list[Piece]], list[str]]:
    """The pieces of our tensors, and which of the tensors `present` the model does not read.

    Those are computed ones (inv_freq), and those of the `ahead` blocks behind its last, which predict tokens
    further on (DeepSeek-V3, 2024, section 2.2; transformers skips them too).

    A tied model's folder may hold the embedding under either name, or under both (`copies`).
    held: numbers of the layers that `held_by_shape` found.
    MismatchError names the layers whose tensors are spelled in both ways that a Rule may have.
    """
    present = set(present)
    held = held_layers(arch, cfg, present) | {*held}
    found = {name: pieces(arch, cfg, name, shape, held) for name, shape in model_shapes(cfg).items()}
    if cfg.tied and HEAD in present and EMBEDDING not in present:
        found["embedding.weight"] = [piece._replace(name=HEAD) for piece in found["embedding.weight"]]
    behind = tuple(f"model.layers.{cfg.layers + i}." for i in range(ahead))
    computed = [re.compile(pattern) for pattern in arch.extra]
    read = {piece.name for group in found.values() for piece in group}
    unread = (n for n in present - read if n.startswith(behind) or any(p.fullmatch(n) for p in computed))
    return found, sorted(unread)


def held_layers(arch: Architecture, cfg: ModelConfig, present: Iterable[str]) -> set[str]:
    """Numbers of the layers that the names `present` spell as transformers 5 holds them (Rule).

    MismatchError names the layers that are spelled in both ways.
    """
    rules = [rule for rule in arch.rules if rule.held and not rule.by_shape]
    spelled = {part.name: False for rule in rules for part in rule.parts}
    spelled |= {part.name: True for rule in rules for part in rule.held}
    ways = {re.sub(r"\{\w+\}", "*", name): held for name, held in spelled.items()}
    seen: dict[str, dict[bool, str]] = {}
    for name in sorted(present):
        numbers = NUMBER.findall(name)
        if numbers and int(numbers[0]) < cfg.layers and (held := ways.get(NUMBER.sub("*", name))) is not None:
            seen.setdefault(numbers[0], {}).setdefault(held, name)
    return _held_of(seen)


def held_by_shape(arch: Architecture, cfg: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Numbers of the layers whose tensors of these shapes are as transformers 5 holds them (Rule.by_shape).

    A square tensor says neither; then the layer's others do. MismatchError names the layers that say both.
    """
    told = {rule.ours for rule in arch.rules if rule.by_shape}
    seen: dict[str, dict[bool, str]] = {}
    for ours, shape in model_shapes(cfg).items() if told else ():
        generic, layer = _generic(ours)
        if generic not in told:
            continue
        usual, other = (their_shapes({ours: pieces(arch, cfg, ours, shape, h)}) for h in ((), {layer}))
        for name in usual:
            if usual[name] != other[name] and shapes.get(name) in (usual[name], other[name]):
                seen.setdefault(layer, {}).setdefault(shapes[name] == other[name], name)
    return _held_of(seen)


def _held_of(seen: dict[str, dict[bool, str]]) -> set[str]:
    """Which of these layers are held. seen: layer -> way of spelling (True: held) -> a tensor's name."""
    if mixed := [f"{names[True]}: beside {names[False]}" for names in seen.values() if len(names) == 2]:
        ways_said = "as published and as transformers 5 holds them"
        head = f"{len(mixed)} layers are spelled in two ways, {ways_said}; must be one way in each layer"
        raise MismatchError(listed(head, mixed))
    return {layer for layer, names in seen.items() if True in names}


def copies(cfg: ModelConfig, present: Container[str]) -> dict[str, str]:
    """Of the tensors `present`, those that repeat another one, and that one.

    Folder makes sure that they are equal: a tied model whose head is not the embedding is read as untied.
    """
    return {HEAD: EMBEDDING} if cfg.tied and HEAD in present and EMBEDDING in present else {}


def ahead(hf: HF) -> int:
    """Number of a config.json's blocks that predict tokens further on."""
    # The second name is transformers' own.
    return hf.get("num_nextn_predict_layers", hf.get("num_mtp_layers")) or 0


def their_shapes(found: dict[str, list[Piece]]) -> dict[str, tuple[int, ...]]:
    return {piece.name: piece.their_shape for group in found.values() for piece in group}
