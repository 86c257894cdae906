"""Compares the models of two sets of settings, and lists settings by dotted names.

next: presets.py"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any, get_type_hints

from tmoe.base.listing import listed
from tmoe.config.check import ConfigError, fits, spell
from tmoe.config.linear_settings import LinearConfig
from tmoe.config.model import STEPS_READ, MLAConfig, ModelConfig, MoEConfig, MTPConfig, RopeConfig
from tmoe.config.renamed import with_new_names
from tmoe.config.routing_choices import SELECTIONS

# the nested sections of ModelConfig, by name
PARTS: dict[str, Any] = dict(moe=MoEConfig, rope=RopeConfig, mla=MLAConfig, linear=LinearConfig)
PARTS |= dict(mtp=MTPConfig)
# settings that `facts` leaves out: those that training alone reads, and the sections, which it reads itself
TRAINING = {*(name.removeprefix("moe.") for name in STEPS_READ), "init_std", "router_dtype", *PARTS}
GROUPED_ONLY = {"kv_heads", "head_dim", "attention_multiplier"}  # latent attention has other widths
MAMBA2_ONLY = {"conv_bias", "least_step", "most_step"}  # settings of linear layers
# types of settings by dotted name, and of keys of config.json that settings are derived from
KINDS = get_type_hints(ModelConfig) | {
    f"{part}.{name}": kind for part, made in PARTS.items() for name, kind in get_type_hints(made).items()
}


def differences(ours: ModelConfig, theirs: ModelConfig) -> list[str]:
    """A line for every setting by which two models compute different results.

    Two names for the same mathematics are not a difference.
    """
    a, b = facts(ours), facts(theirs)
    names = dict.fromkeys([*a, *b])
    return [f"model.{n}: {a.get(n)!r} here, {b.get(n)!r} there" for n in names if a.get(n) != b.get(n)]


def as_flags(ours: ModelConfig, theirs: ModelConfig) -> str:
    """A line with the fewest flags that turn our model into theirs; "" for equal models."""
    wanted, current = flattened(theirs), flattened(ours)
    training = {name: current[name] for name in (*STEPS_READ, "init_std", "moe.router_dtype")}
    wanted = wanted | training
    changed = [name for name in wanted if wanted[name] != current[name]]
    for name in list(changed):
        if _is_theirs(wanted | {name: current[name]}, theirs):  # this model's results do not depend on it
            wanted[name] = current[name]
            changed.remove(name)
    words = [_as_flag(name, wanted[name]) for name in changed]
    return f"the same model by flags: {' '.join(words)}" if words else ""


def _is_theirs(flat: dict[str, Any], theirs: ModelConfig) -> bool:
    """Whether settings by dotted names are valid and describe this model."""
    try:
        return not differences(build_config(nested(flat)), theirs)
    except ConfigError:
        return False


def _as_flag(name: str, value: Any) -> str:
    section, dot, last = f"--model.{name.replace('_', '-')}".rpartition(".")
    if isinstance(value, bool):
        return f"{section}{dot}{'' if value else 'no-'}{last}"
    values = value if isinstance(value, (tuple, list)) else (value,)
    return " ".join([f"{section}{dot}{last}", *map(str, values)])


def facts(cfg: ModelConfig) -> dict[str, Any]:
    """The settings that decide what the model computes, in one spelling.

    Settings that only training reads are left out.
    """
    sparse = [i for i in range(cfg.layers) if cfg.is_moe(i)]
    unread = TRAINING | {"dense_layers", "dense_blocks", "moe_every", "window", "windowed", "rotary"}
    unread = unread | {"layer_types"}
    if not any(map(cfg.is_dense, range(cfg.layers))):
        unread = unread | {"ffn_dim"}
    settings = {f.name: getattr(cfg, f.name) for f in fields(cfg) if f.name not in unread}
    settings["MoE layers"] = sparse
    settings["windows"] = [cfg.window_of(i) for i in range(cfg.layers)]
    settings["attention_multiplier"] = softmax_scale(cfg)
    # a list by blocks only if blocks differ, else one value
    for name, of_a in (("kv_heads", cfg.kv_heads_in), ("sinks", cfg.sinks_in)):
        each = [of_a(window) for window in settings["windows"]]
        settings[name] = each if len({*each}) > 1 else each[0]
        del settings[f"window_{name}"]
    # settings that are off are left out, so that facts equal those of configs without these settings
    off = dict(attention_gate=False, norms="pre", value_multiplier=1.0, v_head_dim=0)
    off |= dict(index_topk=0, norm_offset=False)
    settings["v_head_dim"] = cfg.v_head_dim if cfg.v_head_dim != cfg.head_dim else 0
    settings = {name: value for name, value in settings.items() if name not in off or value != off[name]}
    if cfg.attention == "mla":
        settings |= {f"mla.{f.name}": getattr(cfg.mla, f.name) for f in fields(cfg.mla)}
        settings = {name: value for name, value in settings.items() if name not in GROUPED_ONLY}
    if linear := [i for i in range(cfg.layers) if cfg.is_linear(i)]:
        settings["linear layers"] = linear
        settings |= {f"linear.{name}": value for name, value in _linear_facts(cfg.linear).items()}
    settings |= _block_facts(cfg)
    if sparse:
        settings |= {f"moe.{name}": value for name, value in _moe_facts(cfg.moe).items()}
    return settings | {f"rope.{name}": value for name, value in _rope_facts(cfg).items()}


def _block_facts(cfg: ModelConfig) -> dict[str, Any]:
    """Further settings of blocks, without those that are off."""
    settings: dict[str, Any] = {"mtp.depth": cfg.mtp.depth}
    if cfg.one_branch:
        settings["branches"] = [cfg.branch_of(i) for i in range(cfg.layers)]
    if cfg.moe.shared_activation != "swiglu":  # of dense feed-forwards too
        settings["moe.shared_activation"] = cfg.moe.shared_activation
    return settings


def _linear_facts(linear: LinearConfig) -> dict[str, Any]:
    """The settings of linear layers that decide what they compute."""
    unread = {"every"} if linear.kind == "mamba2" else {"every", *MAMBA2_ONLY}
    return {f.name: getattr(linear, f.name) for f in fields(linear) if f.name not in unread}


def _moe_facts(moe: MoEConfig) -> dict[str, Any]:
    """The settings of an MoE layer that decide what it computes."""
    unread = TRAINING | {"shared_activation"}  # `facts` has it
    settings = {f.name: getattr(moe, f.name) for f in fields(moe) if f.name not in unread}
    if settings.pop("softmax") == "after":  # softmax over the K chosen is softmax over E, renormalised
        settings["renormalize"] = True
    entry = SELECTIONS[moe.selection]
    if entry.looks == "training":  # outside training such a model computes plain top-k
        settings["selection"] = "topk"
    if entry.weighs:
        settings |= dict(renormalize=False, score="sigmoid" if moe.top_k == 1 else "softmax")
    if settings["selection"] == "topk":
        del settings["max_top_k"]
    if moe.score != "cosine":
        settings = {name: value for name, value in settings.items() if not name.startswith("cosine_")}
    if moe.top_groups == moe.groups:
        settings |= dict(groups=1, top_groups=1, group_score="max")
    return settings


def softmax_scale(cfg: ModelConfig) -> float:
    return cfg.head_dim**-0.5 if cfg.attention_multiplier is None else cfg.attention_multiplier


ROPE = {  # for each scaling: the settings that it reads -> their keys in config.json
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
        mscale="mscale",
        mscale_all_dim="mscale_all_dim",
        truncate="truncate",
    ),
}


def _rope_facts(cfg: ModelConfig) -> dict[str, Any]:
    """RoPE's settings that have an effect. Settings that are off are left out, as in `facts`."""
    rope = cfg.rope
    settings = {name: getattr(rope, name) for name in ("theta", "scaling", *ROPE[rope.scaling])}
    if rope.dim not in (0, cfg.head_dim):
        settings["dim"] = rope.dim
    if rope.interleave:
        settings["interleave"] = True
    if rope.query_beta:
        settings |= dict(query_beta=rope.query_beta, original_max_seq=rope.original_max_seq)
    kinds = {i: cfg.rope_of(i) for i in range(cfg.layers) if cfg.attends(i)}
    if None in kinds.values():
        settings["no position"] = [i for i, kind in kinds.items() if kind is None]
    usual = replace(rope, window_theta=None)
    if others := {i: kind.theta for i, kind in kinds.items() if kind not in (None, usual)}:
        settings["theta in windows"] = others
    return settings


def flattened(cfg: ModelConfig) -> dict[str, Any]:
    """Settings by dotted name: "dim", "moe.top_k", "rope.theta"."""
    return _flat(asdict(cfg))


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in settings.items() if name not in PARTS}
    return plain | {f"{part}.{key}": value for part in PARTS for key, value in settings.get(part, {}).items()}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Nested settings from settings by dotted name: the inverse of `flattened`."""
    parts: dict[str, Any] = {part: {} for part in PARTS}
    for name, value in flat.items():
        part, _, key = name.rpartition(".")
        (parts[part] if part else parts)[key] = value
    return parts


def build_config(settings: dict[str, Any]) -> ModelConfig:
    """ModelConfig from nested settings, as config.json of a run holds them; ConfigError for anything else."""
    settings, _ = with_new_names(settings, "model.")
    try:
        known = {name: value for name, value in _flat(settings).items() if name in KINDS}
        wrong = {name: value for name, value in known.items() if not fits(value, KINDS[name])}
        if wrong:
            problems = [_mistyped(name, value, KINDS[name]) for name, value in wrong.items()]
            raise ConfigError(listed("model settings are malformed", problems))

        parts: dict[str, Any] = {part: made(**settings.get(part, {})) for part, made in PARTS.items()}
        # JSON has lists in place of tuples.
        parts["windowed"] = tuple(settings.get("windowed", (1,)))
        parts["rotary"] = tuple(settings.get("rotary", (1,)))
        parts["layer_types"] = tuple(settings.get("layer_types", ()))
        parts["dense_blocks"] = tuple(settings.get("dense_blocks", ()))
        return ModelConfig(**settings | parts)
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"model settings are malformed: {error}") from error


def _mistyped(name: str, value: Any, kind: Any) -> str:
    return f"{name}={value!r}: must be {spell(kind)}"
