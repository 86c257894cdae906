"""The parts of a table entry for one of Hugging Face's architectures, and the boxes that an entry describes.

In this folder, "our" names mean tmoe's, and "their" names mean Hugging Face's. Every tensor of theirs is a
box of one of ours: `q_proj` is the first rows of `qkv`, an expert's `up_proj` the lower half of one expert of
`gate_up`. `pieces` computes the boxes. Import, export and direct start all use them, so no direction has
separate code.

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
from tmoe.config.check import MOST, require
from tmoe.config.linear_settings import LayerType
from tmoe.config.model import ModelConfig
from tmoe.model.shapes import model_shapes

HF = dict[str, Any]  # the contents of a config.json
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # the number of a layer or an expert in a tensor's name
LAYER = "model.layers.{layer}"  # a block in their names
BLOCK = "blocks.{layer}"  # a block in our names
FURTHER = "mtp.{layer}"  # a block that predicts a further token
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


# ---- parts of an entry ----


class TensorPart(NamedTuple):
    """One of the Hugging Face tensors that make up a tensor of tmoe. {layer} and {expert} stand for numbers.

    rows: how many of our rows it fills (the second axis in a stack of experts, else the first), by the
        settings `of_layer`. 0: it does not exist. None: an equal share.
    transposed: its last two axes are exchanged.
    every, first: it is interleaved with other parts in one tensor: it is every n-th row of that tensor, from
        row `first` on.
    framed: it has one more leading axis, of length one.
    inner: it has one more axis, of length one, before its last.
    within: it is a part of each head's rows in a tensor that is ordered by heads: the number of heads, the
        rows of a head, and the first of them that belongs to this part. `rows` are those of all heads.
    """

    name: str
    rows: Callable[[ModelConfig], int] | None = None
    transposed: bool = False
    every: int = 1
    first: int = 0
    framed: bool = False
    inner: bool = False
    within: Callable[[ModelConfig], tuple[int, int, int]] | None = None


class TensorRule(NamedTuple):
    """One of our tensors and its parts, joined along the rows; parts named with {expert} are stacked first.

    held: the parts as transformers 5 holds them in memory and writes them with save_original_format=False.
        Empty: the same as `parts`. Each layer of a folder may have either form. If both forms have the same
        names, they are distinguished by their shapes.
    """

    ours: str
    parts: tuple[TensorPart, ...]
    held: tuple[TensorPart, ...] = ()

    @property
    def by_shape(self) -> bool:
        """Whether `held` and `parts` can only be distinguished by shapes."""
        return {part.name for part in self.held} == {part.name for part in self.parts}


NO_NULL = "null is refused"


class Field(NamedTuple):
    """A setting of ModelConfig ("moe.top_k") and its keys in config.json.

    keys: names of the key; an export writes the first.
    default: the value that transformers' class uses if the key is missing, or a function of the other keys.
        None: the key is required.
    null: the value that transformers' model uses for null, which is seldom the default. NO_NULL: its class
        refuses null, or its model fails.
    least: the smallest number that config.json may have. None: only ModelConfig's own check limits it.
    words: the setting for each word of config.json; other words are refused. If several words mean the same
        setting, an export writes the first. None: the setting equals the value in config.json.
    """

    ours: str
    keys: tuple[str, ...]
    default: Any = None
    null: Any = NO_NULL
    least: int | None = None
    words: dict[str, str] | None = None

    def written(self, value: Any) -> Any:
        """The word of config.json for a setting; if there is none, the setting itself, which is refused."""
        return next((word for word, ours in (self.words or {}).items() if ours == value), value)


class Key(NamedTuple):
    """A key of config.json that is not in a Field, because functions of the entry compute settings from it.

    kind: its type.
    least: the smallest valid number. None: any.
    null: whether transformers accepts null for it.
    """

    name: str
    kind: Any = int
    least: int | None = None
    null: bool = True


class MoELayers(NamedTuple):
    """How an architecture states which blocks are MoE."""

    read: Callable[[HF, dict[str, Any]], list[str]]
    """(keys that are not null, settings found so far) -> problems

    Puts dense_layers, and moe_every and dense_blocks if they are needed, into the settings.
    """
    write: Callable[[ModelConfig], HF] = lambda cfg: {}
    """the keys of config.json that state it"""


def kinds_of_layers(
    said: HF, key: str, valid: Collection[str], usual: list[str]
) -> tuple[list[str], list[str]]:
    """The kind of each layer in a list of config.json (`layer_types`, `mlp_layer_types`), and problems.

    said: the keys of config.json that are not null.
    valid: the valid kinds.
    usual: the kinds if the key is missing; they are also returned if the list is wrong.
    """
    kinds = list(said.get(key, usual))
    if {*kinds} <= {*valid} and len(kinds) == len(usual):
        return kinds, []
    return usual, [f"{key}={kinds!r}: {' or '.join(valid)} for each of {len(usual)} layers is computed"]


INV_FREQ = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)  # computed from config.json


class Windows(NamedTuple):
    """How an architecture states which blocks have a sliding window, and its width."""

    keys: tuple[str, ...]
    """those keys of sliding_window, use_sliding_window and layer_types that it reads"""
    sliding: Callable[[HF, int], bool]
    """whether a block has the window if there is no layer_types"""
    width: int = 0
    """the width in tokens if config.json has no sliding_window"""
    null: bool = True
    """True: a sliding_window of null means no window; False: transformers fails if a block then needs one"""
    rotary: bool = False
    """whether blocks without a window have no rotary positions"""
    before: str = ""
    """a key that takes precedence over sliding_window and counts the tokens before a token, without itself"""


class Linear(NamedTuple):
    """How an architecture states in layer_types which blocks are linear and which have full attention."""

    every: str = ""
    """the key by which every n-th block has full attention if there is no layer_types; "": none has"""
    older: tuple[tuple[str, str], ...] = ()
    """older words of layer_types, each with the word that transformers 5 has for it"""
    words: tuple[tuple[str, LayerType], ...] = (("linear_attention", "linear"), ("full_attention", "full"))
    """the words of layer_types, each with ours"""
    key: str = "layer_types"
    """the name of layer_types in config.json"""
    listed: Callable[[HF], list[str] | None] = lambda said: said.get("layer_types")
    """the list in a config.json; None if it has none"""


@dataclass(frozen=True)
class Architecture:
    """The table entry of one of Hugging Face's architectures."""

    model_type: str
    class_name: str
    rules: tuple[TensorRule, ...]
    fields: tuple[Field, ...]
    ours: dict[str, Any]
    """settings of ModelConfig that the architecture implies"""
    theirs: dict[str, Any]
    """keys of config.json for which tmoe supports only this value, or the values of a tuple

    null is valid only if it is in the tuple; the key may be missing.
    """
    layers: MoELayers
    """which blocks are MoE"""
    keys: tuple[Key, ...] = ()
    """keys that are in no Field, in addition to those of every architecture (hf/config.py)"""
    write: Callable[[ModelConfig], HF] = lambda cfg: {}
    """keys of config.json that are computed from settings instead of copied from one"""
    theta: float = 10000.0
    """RoPE base if config.json has none"""
    rope: HF = field(default_factory=dict)
    """scaling of RoPE if config.json has none"""
    nested: str = ""
    """the key of config.json that holds the settings of the text model; "": config.json itself holds them

    Such a model is trained as its text part alone, and an export needs an original.
    """
    rope_alpha: bool = False
    """whether rope_type dynamic with an alpha raises the base once for all lengths (NTK)"""
    rope_by_kind: bool = False
    """whether blocks with full attention and blocks with a window have separate settings of RoPE"""
    rope_bases: str = ""
    """the key that may list each block's RoPE base, 0 for no positions; "": no such key"""
    linear: Linear | None = None
    """how it states which blocks are linear; None: no block is"""
    query_beta: str = ""
    """the key of RoPE's settings that is our rope.query_beta; "": queries are not scaled by position"""
    partial: Callable[[HF], float] | None = None
    """share of a head's channels that are rotated if config.json has none; None: always all of them

    With latent attention the share must agree with the widths in config.json.
    """
    windows: Windows | None = None
    """None: every token sees all tokens before it"""
    copies: dict[str, Callable[[HF], Any]] = field(default_factory=dict)
    """keys of config.json that must agree with other keys if they are present"""
    fp32: tuple[str, ...] = ()
    """ends of the names of tensors that stay fp32 in an export to bf16, as in transformers"""
    extra: tuple[str, ...] = INV_FREQ
    """patterns of tensors without effect on the result: kept for an export, read only if a rule names them"""
    ahead: Callable[[HF], str] = lambda said: ""
    """why a config.json's blocks that predict further tokens cannot be trained; "": they can"""


class TensorPiece(NamedTuple):
    """A Hugging Face tensor, or the rows of it that a TensorPart names, as a box of a tensor of tmoe.

    offset, shape: the box in our tensor.
    stacked: it lacks our first axis, which has length one in the box.
    axis: the axis of our rows, counted from the end.
    transposed, every, first, framed, inner: as in TensorPart.
    lead, total: it is the rows from `lead` on of a tensor of `total` rows; total 0: all rows of the tensor.
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
    inner: bool = False
    lead: int = 0
    total: int = 0

    @property
    def their_shape(self) -> tuple[int, ...]:
        """The shape of their whole tensor."""
        whole = list(self.shape)
        whole[self.axis] = self.total or whole[self.axis] * self.every
        theirs = self.to_theirs(tuple(whole))
        theirs = (*theirs[:-1], 1, theirs[-1]) if self.inner else theirs
        return (1, *theirs) if self.framed else theirs

    def see(self, theirs: Tensor) -> Tensor:
        """The rows of their tensor that belong to this piece, in our order of axes, as a view."""
        theirs = theirs[0] if self.framed else theirs
        theirs = theirs.select(-2, 0) if self.inner else theirs
        theirs = theirs.mT if self.transposed else theirs
        if self.total:
            return theirs.narrow(self.axis, self.lead, self.shape[self.axis])
        return theirs.unflatten(self.axis, (-1, self.every)).select(self.axis, self.first)

    def to_theirs(self, axes: tuple) -> tuple:
        """Values for each of our axes (sizes or slices), reordered to their axes."""
        axes = tuple(axes[1:]) if self.stacked else tuple(axes)
        return (*axes[:-2], axes[-1], axes[-2]) if self.transposed else axes


def under(rules: Iterable[TensorRule], old: str, new: str) -> tuple[TensorRule, ...]:
    """The rules with `old` replaced by `new` at the beginning of the Hugging Face tensors' names."""

    def moved(parts: tuple[TensorPart, ...]) -> tuple[TensorPart, ...]:
        return tuple(
            part._replace(name=new + part.name.removeprefix(old) if part.name.startswith(old) else part.name)
            for part in parts
        )

    return tuple(rule._replace(parts=moved(rule.parts), held=moved(rule.held)) for rule in rules)


def further(rules: Iterable[TensorRule], place: str, *own: TensorRule) -> tuple[TensorRule, ...]:
    """The rules of the blocks that predict further tokens: those of blocks, in another place.

    place: replaces "model.layers.{layer}"; {ahead} in it is the block's number after the last block, {layer}
        its number from 0 on. own: rules of the tensors that other blocks lack.
    """
    blocks = [rule for rule in rules if rule.ours.startswith(BLOCK)]
    moved = under(blocks, LAYER, place)
    return *own, *(rule._replace(ours=FURTHER + rule.ours.removeprefix(BLOCK)) for rule in moved)


# ---- boxes ----


def pieces(
    arch: Architecture, cfg: ModelConfig, ours: str, shape: tuple[int, ...], held: Container[str] = ()
) -> list[TensorPiece]:
    """Their tensors that make up our tensor `ours` of `shape`, expert by expert.

    The list is empty if the architecture lacks the tensor.
    held: numbers of the layers whose tensors have the form in which transformers 5 holds them (TensorRule).
    """
    generic, layer = _generic(ours)
    ahead = cfg.layers + int(layer or 0)  # the number of a block that predicts a further token
    layer_cfg = of_layer(cfg, ahead if ours.startswith("mtp.") else int(layer)) if layer else cfg
    rule = next((rule for rule in arch.rules if rule.ours == generic), TensorRule(ours, ()))
    parts = rule.held if rule.held and _held_key(ours, layer) in held else rule.parts
    result = []
    stacked = any("{expert}" in part.name for part in parts)
    axis = (".experts." in ours) - len(shape)
    for expert in range(shape[0]) if stacked else (None,):
        start = 0
        for part in parts:
            rows = part.rows(layer_cfg) if part.rows else shape[axis] // len(parts)
            if not rows:
                continue
            offset = [0] * len(shape)
            box = list(shape)
            offset[axis] = start
            box[axis] = rows
            if expert is not None:
                offset[0] = expert
                box[0] = 1
            name = part.name.format(layer=layer, expert=expert, ahead=ahead)
            woven = (part.every, part.first, part.framed, part.inner)
            whole = TensorPiece(name, tuple(offset), tuple(box), stacked, axis, part.transposed, *woven)
            result += [whole] if part.within is None else _by_heads(whole, *part.within(layer_cfg))
            start += rows
    assert sum(math.prod(piece.shape) for piece in result) in (0, math.prod(shape)), (
        f"{ours}: parts leave a hole"
    )
    return result


def _by_heads(whole: TensorPiece, heads: int, size: int, first: int) -> list[TensorPiece]:
    """A piece divided by heads: each is rows of a head in their tensor, see TensorPart.within."""
    found = []
    for head in range(heads):
        offset, box = list(whole.offset), list(whole.shape)
        box[whole.axis] //= heads
        offset[whole.axis] += head * box[whole.axis]
        place = dict(lead=head * size + first, total=heads * size)
        found.append(whole._replace(offset=tuple(offset), shape=tuple(box), **place))
    return found


def published(
    arch: Architecture, cfg: ModelConfig, groups: dict[str, list[TensorPiece]]
) -> dict[str, list[TensorPiece]]:
    """The pieces of the same tensors of ours in the published form, where transformers 5 has another one."""
    shapes = model_shapes(cfg)
    doubled = {rule.ours for rule in arch.rules if rule.held}
    return {
        ours: pieces(arch, cfg, ours, shapes[ours]) if _generic(ours)[0] in doubled else group
        for ours, group in groups.items()
    }


def _held_key(name: str, layer: str) -> str:
    """The member of a set of held layers for a tensor of this layer; mtp counts its blocks from 0 again."""
    return f"mtp.{layer}" if name.startswith("mtp.") else layer


def _generic(ours: str) -> tuple[str, str]:
    """The name of our tensor as in a TensorRule, with {layer}, and its layer's number, "" without one."""
    numbers = [word for word in ours.split(".") if word.isdigit()]
    generic = ".".join("{layer}" if word.isdigit() else word for word in ours.split("."))
    return generic, numbers[0] if numbers else ""


def of_layer(cfg: ModelConfig, layer: int) -> ModelConfig:
    """The settings with this layer's own number of key heads."""
    heads = cfg.kv_heads_in(cfg.window_of(layer))
    return cfg if heads == cfg.kv_heads else replace(cfg, kv_heads=heads)


def divide(
    arch: Architecture, cfg: ModelConfig, present: Iterable[str], ahead: int = 0, held: Collection[str] = ()
) -> tuple[dict[str, list[TensorPiece]], list[str]]:
    """The pieces of our tensors, and the names among `present` that the model does not read.

    The unread tensors are computed ones (inv_freq), and those of the `ahead` blocks after the last, which
    predict further tokens (DeepSeek-V3, 2024, section 2.2; transformers skips them too), unless the model
    has these blocks (--model.mtp.depth).

    A tied model's folder may hold the embedding under either name, or under both (`copies`).
    held: numbers of the layers that `held_by_shape` found.
    MismatchError names the layers whose tensors have both forms of a TensorRule.
    """
    present = set(present)
    held = held_layers(arch, cfg, present) | {*held}
    pieces_of = {name: pieces(arch, cfg, name, shape, held) for name, shape in model_shapes(cfg).items()}
    if cfg.tied and HEAD in present and EMBEDDING not in present:
        pieces_of["embedding.weight"] = [piece._replace(name=HEAD) for piece in pieces_of["embedding.weight"]]
    behind = tuple(f"model.layers.{cfg.layers + i}." for i in range(ahead))
    computed = [re.compile(pattern) for pattern in arch.extra]
    read = {piece.name for group in pieces_of.values() for piece in group} | copies(cfg, present).keys()
    unread = (n for n in present - read if n.startswith(behind) or any(p.fullmatch(n) for p in computed))
    return pieces_of, sorted(unread)


def held_layers(arch: Architecture, cfg: ModelConfig, present: Iterable[str]) -> set[str]:
    """Numbers of the layers that, by the names `present`, have the form in which transformers 5 holds them.

    MismatchError names the layers with names of both forms of a TensorRule.
    """
    rules = [rule for rule in arch.rules if rule.held and not rule.by_shape]
    spelled = {part.name: False for rule in rules for part in rule.parts}
    spelled |= {part.name: True for rule in rules for part in rule.held}
    ways = {re.sub(r"\{\w+\}", "*", name): held for name, held in spelled.items()}
    seen: dict[str, dict[bool, str]] = {}
    for name in sorted(present):
        numbers = NUMBER.findall(name)
        if numbers and int(numbers[0]) < cfg.layers and (held := ways.get(NUMBER.sub("*", name))) is not None:
            seen.setdefault(_held_key(name, numbers[0]), {}).setdefault(held, name)
    return _held_of(seen)


def held_by_shape(arch: Architecture, cfg: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Numbers of the layers that, by their tensors' shapes, have the form in which transformers 5 holds them.

    Only rules with TensorRule.by_shape are checked. A square tensor fits both forms; the layer's other
    tensors then decide. MismatchError names the layers with shapes of both forms.
    """
    by_shape = {rule.ours for rule in arch.rules if rule.by_shape}
    seen: dict[str, dict[bool, str]] = {}
    for ours, shape in model_shapes(cfg).items() if by_shape else ():
        generic, layer = _generic(ours)
        if generic not in by_shape:
            continue
        usual, other = (their_shapes({ours: pieces(arch, cfg, ours, shape, h)}) for h in ((), {layer}))
        for name in usual:
            if usual[name] != other[name] and shapes.get(name) in (usual[name], other[name]):
                seen.setdefault(layer, {}).setdefault(shapes[name] == other[name], name)
    return _held_of(seen)


def _held_of(seen: dict[str, dict[bool, str]]) -> set[str]:
    """The layers that have the held form. seen: layer -> form (True: held) -> a tensor's name."""
    if mixed := [f"{names[True]}: as well as {names[False]}" for names in seen.values() if len(names) == 2]:
        ways_said = "as published and as transformers 5 holds them"
        head = f"{len(mixed)} layers are spelled in two ways, {ways_said}; must be one way in each layer"
        raise MismatchError(listed(head, mixed))
    return {layer for layer, names in seen.items() if True in names}


def copies(cfg: ModelConfig, present: Container[str]) -> dict[str, str]:
    """The tensors among `present` that repeat another tensor: name -> the repeated tensor's name.

    They are a tied head, and the tables of blocks that predict further tokens, if these are trained. Folder
    ensures that they are equal: a tied model whose head is not the embedding is read as untied.
    """
    found = {HEAD: EMBEDDING} if cfg.tied and HEAD in present and EMBEDDING in present else {}
    embedding = EMBEDDING if EMBEDDING in present else HEAD
    head = embedding if cfg.tied else HEAD
    for number in cfg.numbered[cfg.layers :]:
        place = f"{LAYER.format(layer=number)}."
        tables = {f"{place}embed_tokens.weight": embedding, f"{place}shared_head.head.weight": head}
        found |= {name: original for name, original in tables.items() if name in present}
    return found


def ahead(hf: HF) -> int:
    """Number of blocks in a config.json that predict further tokens."""
    # transformers uses the second name.
    return hf.get("num_nextn_predict_layers", hf.get("num_mtp_layers")) or 0


def most_further(arch: Architecture) -> int:
    """The most trained blocks that predict further tokens for which the architecture has names.

    It is 1 if a name has no number of the block, as `mtp.fc.weight` of Qwen3-Next.
    """
    names = [part.name for rule in arch.rules if rule.ours.startswith(FURTHER) for part in rule.parts]
    numbered = all("{layer}" in name or "{ahead}" in name for name in names)
    return (MOST["layers"] if numbered else 1) if names else 0


def require_names(arch: Architecture, cfg: ModelConfig, ahead: int, said: HF | None = None) -> None:
    """ConfigError unless the architecture has names for the model's blocks that predict further tokens.

    ahead: the number of such blocks in config.json. said: its settings; None: of a new model.
    """
    depth = cfg.mtp.depth
    most = most_further(arch)
    wrong = f"the blocks of a {arch.model_type} that predict further tokens have no names here"
    require(not depth or most > 0, "model.mtp.depth", depth, wrong, 0)
    wrong = f"a {arch.model_type} has names for one block that predicts further tokens"
    require(depth <= most, "model.mtp.depth", depth, wrong, "0 or 1")
    wrong = arch.ahead(said or {}) if depth else ""
    require(not wrong, "model.mtp.depth", depth, wrong, 0)
    wrong = f"config.json has {ahead} such blocks (num_nextn_predict_layers)"
    require(depth <= ahead, "model.mtp.depth", depth, wrong, f"0 to {ahead}" if ahead else 0)


def their_shapes(found: dict[str, list[TensorPiece]]) -> dict[str, tuple[int, ...]]:
    return {piece.name: piece.their_shape for group in found.values() for piece in group}
