"""Hugging Face's architectures, one table entry each: tensor names, how they stack and join, and fields of config.json.

Every tensor of theirs is a box of one of ours: `q_proj` is the first rows of `qkv`, an expert's `up_proj` the lower half of one
expert of `gate_up`. `pieces` works the boxes out; import, export and direct start all read them, so no direction has its own code.

A new architecture is one entry of ARCHITECTURES; docs/huggingface.md shows it.

next: hf.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple


from tmoe.config import ConfigError, ModelConfig, MoEConfig, RopeConfig

HF = dict[str, Any]  # the contents of a config.json


# ---- what an entry is made of ----


class Part(NamedTuple):
    """One of the tensors that make up one of ours. {layer} and {expert} stand for numbers.

    rows: how many of our rows (second axis of a stack of experts, else first) it fills; None: an equal share.
    transposed: its last two axes are the other way round.
    """

    name: str
    rows: Callable[[ModelConfig], int] | None = None
    transposed: bool = False


class Rule(NamedTuple):
    """One of our tensors and their parts, joined along the rows; parts named with {expert} are stacked first."""

    ours: str
    parts: tuple[Part, ...]


class Field(NamedTuple):
    """A setting of ModelConfig ("moe.top_k") and its key of config.json; the first of several keys is the one written.

    default: what Hugging Face's class takes where the key is missing or null, or a function of the other keys.
    """

    ours: str
    keys: tuple[str, ...]
    default: Any = None


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
    """keys of config.json for which tmoe computes one value only; missing and null are fine too"""
    layers: str = "dense"
    """which blocks are MoE: dense (none), moe (all) or qwen (decoder_sparse_step and mlp_only_layers)"""
    theta: float = 10000.0
    """RoPE base where config.json names none"""
    experts: str | None = None
    """swap_experts: the module of a transformers model that holds gate_up_proj and down_proj, inside a decoder layer"""
    extra: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    """patterns of tensors that are computed from the config: kept for the way back, never read"""


class Piece(NamedTuple):
    """One of their tensors as a box of one of ours; stacked: it lacks our first axis, of length one in the box."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    stacked: bool
    transposed: bool

    def to_theirs(self, axes: tuple) -> tuple:
        """Their order of something that is given for each of our axes: sizes, slices."""
        axes = tuple(axes[1:]) if self.stacked else tuple(axes)
        return (*axes[:-2], axes[-1], axes[-2]) if self.transposed else axes


# ---- tensors ----


def one(ours: str, theirs: str) -> Rule:
    return Rule(ours, (Part(theirs),))


def swiglu(ours: str, theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple:
    """Gate rows above up rows, and down. `theirs` is the module that holds the three projections, or {expert}'s."""
    weight = (
        "" if ours.endswith("experts") else ".weight"
    )  # ours are parameters of Experts, but Linear layers elsewhere
    both = (Part(f"{theirs}.{gate}.weight"), Part(f"{theirs}.{up}.weight"))
    return Rule(f"{ours}.gate_up{weight}", both), one(f"{ours}.down{weight}", f"{theirs}.{down}.weight")


A, B = "model.layers.{layer}", "blocks.{layer}"
QKV = (
    Part(f"{A}.self_attn.q_proj.weight", lambda cfg: cfg.heads * cfg.head_dim),
    Part(f"{A}.self_attn.k_proj.weight", lambda cfg: cfg.kv_heads * cfg.head_dim),
    Part(f"{A}.self_attn.v_proj.weight", lambda cfg: cfg.kv_heads * cfg.head_dim),
)
DECODER = (
    one("embedding.weight", "model.embed_tokens.weight"),
    one("norm.weight", "model.norm.weight"),
    one("head.weight", "lm_head.weight"),
    one(f"{B}.attention_norm.weight", f"{A}.input_layernorm.weight"),
    one(f"{B}.ffn_norm.weight", f"{A}.post_attention_layernorm.weight"),
    Rule(f"{B}.attention.qkv.weight", QKV),
    one(f"{B}.attention.o.weight", f"{A}.self_attn.o_proj.weight"),
)
QK_NORM = tuple(one(f"{B}.attention.{n}_norm.weight", f"{A}.self_attn.{n}_norm.weight") for n in "qk")
DENSE = swiglu(f"{B}.ffn", f"{A}.mlp")
MOE = (
    one(f"{B}.moe.router.weight", f"{A}.mlp.gate.weight"),
    *swiglu(f"{B}.moe.experts", f"{A}.mlp.experts.{{expert}}"),
)
MIXTRAL_MOE = (
    one(f"{B}.moe.router.weight", f"{A}.block_sparse_moe.gate.weight"),
    *swiglu(f"{B}.moe.experts", f"{A}.block_sparse_moe.experts.{{expert}}", "w1", "w3", "w2"),
)


# ---- settings ----


def width_of_head(hf: HF) -> int:
    return hf["hidden_size"] // hf["num_attention_heads"]


SIZES = (
    Field("vocab", ("vocab_size",)),
    Field("dim", ("hidden_size",)),
    Field("layers", ("num_hidden_layers",)),
    Field("heads", ("num_attention_heads",)),
    Field("kv_heads", ("num_key_value_heads",), lambda hf: hf["num_attention_heads"]),
    Field("norm_eps", ("rms_norm_eps",), 1e-6),
    Field("tied", ("tie_word_embeddings",), False),
    Field("init_std", ("initializer_range",), 0.02),
)
HEAD_DIM = Field("head_dim", ("head_dim",), width_of_head)
FFN = Field("ffn_dim", ("intermediate_size",))
EXPERTS = Field("moe.experts", ("num_experts", "num_local_experts"))
TOP_K = Field("moe.top_k", ("num_experts_per_tok",))
RENORMALIZE = Field("moe.renormalize", ("norm_topk_prob",), False)
AUXILIARY = Field("moe.balance_coeff", ("router_aux_loss_coef",), 0.001)
PLAIN = dict(hidden_act="silu", attention_bias=False, attention_dropout=0.0, quantization_config=None)
FULL = PLAIN | dict(use_sliding_window=False)

ARCHITECTURES = (
    Architecture(
        "llama",
        "LlamaForCausalLM",
        DECODER + DENSE,
        (*SIZES, HEAD_DIM, FFN),
        ours={},
        theirs=PLAIN | dict(mlp_bias=False),
    ),
    Architecture(
        "qwen3",
        "Qwen3ForCausalLM",
        DECODER + QK_NORM + DENSE,
        (*SIZES, HEAD_DIM._replace(default=128), FFN),
        ours=dict(qk_norm="head"),
        theirs=FULL,
    ),
    Architecture(
        "mixtral",
        "MixtralForCausalLM",
        DECODER + MIXTRAL_MOE,
        (
            *SIZES,
            HEAD_DIM,
            Field("moe.ffn_dim", ("intermediate_size",)),
            EXPERTS._replace(keys=("num_local_experts", "num_experts")),
            TOP_K,
            AUXILIARY,
        ),
        ours={"moe.softmax": "after"},
        theirs=PLAIN | dict(sliding_window=None, router_jitter_noise=0.0),
        layers="moe",
        theta=1e6,
        experts="mlp.experts",
    ),
    Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        DECODER + QK_NORM + DENSE + MOE,
        (
            *SIZES,
            HEAD_DIM,
            FFN,
            Field("moe.ffn_dim", ("moe_intermediate_size",)),
            EXPERTS,
            TOP_K,
            RENORMALIZE,
            AUXILIARY,
        ),
        ours=dict(qk_norm="head"),
        theirs=FULL,
        layers="qwen",
        experts="mlp.experts",
    ),
    Architecture(
        "olmoe",
        "OlmoeForCausalLM",
        DECODER + QK_NORM + MOE,
        (
            *SIZES,
            HEAD_DIM._replace(keys=()),  # always D/H: the query norm is as wide as the model
            Field("moe.ffn_dim", ("intermediate_size",)),
            EXPERTS,
            TOP_K,
            RENORMALIZE,
            AUXILIARY._replace(default=0.01),
        ),
        ours=dict(qk_norm="full"),
        theirs=PLAIN | dict(clip_qkv=None),
        layers="moe",
        experts="mlp.experts",
    ),
)


# ---- from config.json to ModelConfig and back ----


def architecture(hf: HF) -> Architecture:
    """The entry of a config.json's model_type; ConfigError naming those that there are."""
    found = [a for a in ARCHITECTURES if a.model_type == hf.get("model_type")]
    if not found:
        known = ", ".join(a.model_type for a in ARCHITECTURES)
        raise ConfigError(f"config.json: model_type {hf.get('model_type')!r} has no table entry; there are: {known}")
    return found[0]


def read_config(hf: HF) -> ModelConfig:
    """ModelConfig of a config.json; ConfigError lists every setting that is missing or that tmoe does not compute."""
    arch = architecture(hf)
    problems = [
        f"{key}={hf[key]!r}: only {value!r} is computed"
        for key, value in arch.theirs.items()
        if hf.get(key) not in (None, value)
    ]
    if {*(hf.get("layer_types") or ())} - {"full_attention"}:
        problems.append(f"layer_types={hf['layer_types']!r}: only full_attention is computed")
    found = dict(arch.ours)
    for field in arch.fields:
        value = next((hf[key] for key in field.keys if hf.get(key) is not None), field.default)
        try:
            found[field.ours] = value(hf) if callable(value) else value
        except KeyError:
            pass  # the key that it would be derived from is reported itself
        else:
            if found[field.ours] is None:
                problems.append(f"{field.keys[0]}: missing")
    problems += read_layers(arch, hf, found) + read_rope(arch, hf, found)
    if problems:
        raise ConfigError("\n  ".join([f"config.json of a {arch.model_type}: {len(problems)} problems", *problems]))
    return build_config(nested(found))


def write_config(cfg: ModelConfig, dtype: str) -> HF:
    """config.json of a model that was trained here. ConfigError where no entry computes what `cfg` says.

    An entry fits if its config.json reads back as the same mathematics.
    """
    flat = flattened(cfg)
    for arch in ARCHITECTURES:
        hf = dict(architectures=[arch.class_name], model_type=arch.model_type, torch_dtype=dtype)
        hf |= {field.keys[0]: flat[field.ours] for field in arch.fields if field.keys}
        hf |= arch.theirs | write_layers(arch, cfg) | write_rope(cfg.rope)
        try:
            if not differences(cfg, read_config(hf)):
                return {key: value for key, value in hf.items() if key != "quantization_config"}
        except ConfigError:
            continue
    known = ", ".join(a.model_type for a in ARCHITECTURES)
    raise ConfigError(f"none of {known} computes this model: {facts(cfg)}")


def differences(ours: ModelConfig, theirs: ModelConfig) -> list[str]:
    """Every setting in which two models compute different things; equal mathematics under two names is no difference."""
    a, b = facts(ours), facts(theirs)
    names = dict.fromkeys([*a, *b])
    return [f"model.{n}: {a.get(n)!r} here, {b.get(n)!r} there" for n in names if a.get(n) != b.get(n)]


def facts(cfg: ModelConfig) -> dict[str, Any]:
    """The settings that decide what the model computes, in one spelling; what only training reads is left out."""
    sparse = [i for i in range(cfg.layers) if cfg.is_moe(i)]
    names = ["vocab", "dim", "layers", "heads", "kv_heads", "head_dim", "qk_norm", "tied", "norm_eps"]
    names += ["ffn_dim"] if len(sparse) < cfg.layers else []
    found = {name: getattr(cfg, name) for name in names} | {"MoE layers": sparse}
    if sparse:
        moe = cfg.moe
        names = ("experts", "top_k", "ffn_dim", "shared_dim", "shared_gate", "scaling")
        found |= {f"moe.{name}": getattr(moe, name) for name in names}
        found["moe.renormalize"] = moe.renormalize or moe.softmax == "after"  # softmax over K is over E, renormalised
        seen = {"softmax", "renormalize", "balance", "balance_coeff", "z_coeff", "jitter", *names}
        found |= {f"moe.{f.name}": getattr(moe, f.name) for f in fields(moe) if f.name not in seen}
    return found | {f"rope.{name}": value for name, value in _rope_facts(cfg.rope).items()}


ROPE = {  # settings that each scaling reads -> their key of config.json
    "none": {},
    "linear": dict(factor="factor"),
    "llama3": dict(
        factor="factor",
        original_max_seq="original_max_position_embeddings",
        low_freq_factor="low_freq_factor",
        high_freq_factor="high_freq_factor",
    ),
    "yarn": dict(
        factor="factor",
        original_max_seq="original_max_position_embeddings",
        beta_fast="beta_fast",
        beta_slow="beta_slow",
        attention_factor="attention_factor",
    ),
}


def _rope_facts(rope: RopeConfig) -> dict[str, Any]:
    return {name: getattr(rope, name) for name in ("theta", "scaling", *ROPE[rope.scaling])}


def read_rope(arch: Architecture, hf: HF, found: dict[str, Any]) -> list[str]:
    """RoPE as transformers 5 (rope_parameters) or 4 (rope_theta, rope_scaling) writes it."""
    given = {"rope_theta": hf.get("rope_theta")} | (hf.get("rope_scaling") or {}) | (hf.get("rope_parameters") or {})
    kind = given.get("rope_type", given.get("type", "default"))
    scaling = "none" if kind == "default" else kind
    if scaling not in ROPE:
        return [f"rope_type={kind!r}: valid are default, linear, llama3, yarn"]
    problems = [] if hf.get("max_position_embeddings") else ["max_position_embeddings: missing"]
    for key, value in dict(partial_rotary_factor=1.0, truncate=True, mscale=None, mscale_all_dim=None).items():
        if given.get(key, hf.get(key)) not in (None, value):
            problems.append(f"{key}={given.get(key, hf.get(key))!r}: only {value!r} is computed")
    found["rope.scaling"], found["rope.theta"] = scaling, float(given.get("rope_theta") or arch.theta)
    found["rope.max_seq"] = hf.get("max_position_embeddings")
    read = {ours: given[key] for ours, key in ROPE[scaling].items() if given.get(key) is not None}
    if "original_max_seq" in ROPE[scaling]:
        read.setdefault("original_max_seq", hf.get("max_position_embeddings"))
    if "factor" in ROPE[scaling] and "factor" not in read:
        problems.append(f"factor of rope_type {kind}: missing")
    found |= {f"rope.{name}": value for name, value in read.items()}
    return problems


def write_rope(rope: RopeConfig) -> HF:
    """In transformers 4's spelling, which 5 reads too."""
    scaling: HF = {key: getattr(rope, ours) for ours, key in ROPE[rope.scaling].items()}
    given = {"rope_type": rope.scaling} | {key: value for key, value in scaling.items() if value is not None}
    return dict(
        rope_theta=rope.theta,
        rope_scaling=None if rope.scaling == "none" else given,
        max_position_embeddings=rope.max_seq,
    )


def read_layers(arch: Architecture, hf: HF, found: dict[str, Any]) -> list[str]:
    """dense_layers and moe_every of a config.json, and what keeps them from existing."""
    layers = found.get("layers") or 0
    if arch.layers != "qwen":
        found["dense_layers"] = layers if arch.layers == "dense" else 0
        return []
    step, dense = hf.get("decoder_sparse_step") or 1, hf.get("mlp_only_layers") or []
    sparse = [i for i in range(layers) if (i + 1) % step == 0 and i not in dense]
    first = sparse[0] if sparse else layers
    every = sparse[1] - first if len(sparse) > 1 else max(layers - first, 1)
    found["dense_layers"], found["moe_every"] = first, every
    if sparse != list(range(first, layers, every)):
        return [f"decoder_sparse_step={step}, mlp_only_layers={dense}: MoE layers {sparse} are not every n-th"]
    return []


def write_layers(arch: Architecture, cfg: ModelConfig) -> HF:
    if arch.layers != "qwen":
        return {}
    return dict(decoder_sparse_step=1, mlp_only_layers=[i for i in range(cfg.layers) if not cfg.is_moe(i)])


def flattened(cfg: ModelConfig) -> dict[str, Any]:
    """Settings by dotted name: "dim", "moe.top_k", "rope.theta"."""
    plain = asdict(cfg)
    parts = {f"{part}.{key}": value for part in ("moe", "rope") for key, value in plain.pop(part).items()}
    return plain | parts


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    parts: dict[str, Any] = {"moe": {}, "rope": {}}
    for name, value in flat.items():
        part, _, key = name.rpartition(".")
        (parts[part] if part else parts)[key] = value
    return parts


def build_config(settings: dict[str, Any]) -> ModelConfig:
    """ModelConfig from nested settings, as config.json of a run holds them; ConfigError for anything else."""
    try:
        parts = dict(moe=MoEConfig(**settings["moe"]), rope=RopeConfig(**settings["rope"]))
        return ModelConfig(**settings | parts)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"model settings are malformed: {error}") from error


# ---- boxes ----


def pieces(arch: Architecture, cfg: ModelConfig, ours: str, shape: tuple[int, ...]) -> list[Piece]:
    """Their tensors that make up our tensor `ours` of `shape`, expert by expert; empty: the architecture lacks it."""
    numbers = [word for word in ours.split(".") if word.isdigit()]
    generic = ".".join("{layer}" if word.isdigit() else word for word in ours.split("."))
    parts = next((rule.parts for rule in arch.rules if rule.ours == generic), ())
    found, layer = [], numbers[0] if numbers else ""
    stacked = any("{expert}" in part.name for part in parts)
    for expert in range(shape[0]) if stacked else (None,):
        axis = 1 if len(shape) == 3 else 0
        start = 0
        for part in parts:
            rows = part.rows(cfg) if part.rows else shape[axis] // len(parts)
            offset, box = [0] * len(shape), list(shape)
            offset[axis], box[axis] = start, rows
            if expert is not None:
                offset[0], box[0] = expert, 1
            name = part.name.format(layer=layer, expert=expert)
            found.append(Piece(name, tuple(offset), tuple(box), stacked, part.transposed))
            start += rows
    assert sum(math.prod(piece.shape) for piece in found) in (0, math.prod(shape)), f"{ours}: parts leave a hole"
    return found
