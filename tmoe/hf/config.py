"""Converts config.json to ModelConfig and back, by the entries of hf/architectures.

next: hf/tensor_plan.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tmoe.base.listing import listed
from tmoe.config.check import MOST, ConfigError, Section, fits
from tmoe.config.compare import (
    KINDS,
    ROPE,
    _mistyped,
    build_config,
    differences,
    facts,
    flattened,
    nested,
    softmax_scale,
)
from tmoe.config.model import ModelConfig, MTPConfig
from tmoe.hf.architectures import ARCHITECTURES
from tmoe.hf.packed import QUANTISED, no_reader
from tmoe.hf.rules import (
    HF,
    NO_NULL,
    Architecture,
    Field,
    Windows,
    kinds_of_layers,
    most_further,
    require_names,
)
from tmoe.model.count import qk_width

AHEAD = ("num_nextn_predict_layers", "num_mtp_layers")  # two names of one setting
WHOLE = (
    "sliding_window",
    "max_position_embeddings",
    "n_shared_experts",
    "original_max_position_embeddings",
    "head_dim",
    "rotary_dim",
    *AHEAD,
)
# The types of keys of config.json that no Field reads: first keys of all architectures, then keys of some. A
# type is checked for every model_type, even if it does not read the key, unless its entry has another type.
READ: dict[str, Any] = dict.fromkeys(WHOLE, int) | dict.fromkeys(("rope_parameters", "rope_scaling"), dict)
READ |= dict(use_sliding_window=bool, layer_types=tuple[str, ...])
READ |= {key.name: key.kind for arch in reversed(ARCHITECTURES) for key in arch.keys}
# The smallest valid numbers of some of these keys.
LEAST = dict(max_position_embeddings=1, n_shared_experts=0) | dict.fromkeys(AHEAD, 0)

# Most expert tensors in a folder, far above any model (DeepSeek-V3: 46,000). The number is limited because
# each tensor becomes a Python object before any data is read.
TENSORS = 2**20


def architecture(hf: HF) -> Architecture:
    """The entry of a config.json's model_type. ConfigError, which lists the known types, if there is none."""
    entries = [a for a in ARCHITECTURES if a.model_type == hf.get("model_type")]
    if not entries and "model_type" not in hf:
        raise ConfigError(
            "config.json: no model_type, so this is no Hugging Face folder; the weights of a run of tmoe are "
            "exported with: python -m tmoe.hf export STEP HF_DIR"
        )
    if not entries:
        known = ", ".join(a.model_type for a in ARCHITECTURES)
        raise ConfigError(
            f"config.json: model_type {hf.get('model_type')!r} has no table entry; there are: {known}; "
            f"python -m tmoe.hf families lists what a family of experts lacks, and {IN_TRANSFORMERS}"
        )
    return entries[0]


def ties_unsaid(hf: HF) -> bool:
    """Whether transformers ties the head to the embedding if config.json lacks the key."""
    of_type = [arch for arch in ARCHITECTURES if arch.model_type == hf.get("model_type")]
    defaults = [field.default for arch in of_type for field in arch.fields if field.ours == "tied"]
    return defaults[-1:] == [True]


def text_settings(arch: Architecture, hf: HF) -> HF:
    """The settings of the text model, with the outer keys of a tied head and of quantisation."""
    if not arch.nested:
        return hf
    inner = hf.get(arch.nested)
    if not isinstance(inner, dict):
        raise ConfigError(f"config.json of a {arch.model_type}: {arch.nested}={inner!r}: must be an object")
    return inner | {key: hf[key] for key in ("tie_word_embeddings", "quantization_config") if key in hf}


def read_config(hf: HF) -> ModelConfig:
    """ModelConfig of a config.json.

    ConfigError lists every setting that is missing or that tmoe does not compute.
    A missing key has the default of transformers' class. null has the value that transformers' model uses for
    null, which is seldom the same.
    """
    arch = architecture(hf)
    hf = text_settings(arch, hf)
    by_name = {field.ours: field for field in arch.fields}  # a later field of the same setting wins
    kinds = READ | {key.name: key.kind for key in arch.keys}
    kinds |= {key: KINDS[field.ours] for field in by_name.values() for key in field.keys}
    mistyped = [
        _mistyped(key, hf[key], kind) for key, kind in kinds.items() if not fits(hf.get(key), kind | None)
    ]
    _refuse(arch, mistyped)

    said = {key: value for key, value in hf.items() if value is not None}
    problems = _unknown(arch, hf, said)
    problems += [_null(key.name) for key in arch.keys if not key.null and hf.get(key.name, 0) is None]
    found = dict(arch.ours)
    for field in by_name.values():
        try:
            found[field.ours] = _read_field(field, hf, said)
        except KeyError as missing:
            problems.append(f"{missing.args[0]}: missing")
        except ConfigError as error:
            problems.append(error.wrong)
    _refuse(arch, _miscounted(arch, said, found))

    keys = found.get("kv_heads")
    queries = found.get("heads")
    if found.get("attention") == "mla" and keys != queries:
        problems.append(
            f"num_key_value_heads={keys}: must be num_attention_heads={queries} with latent attention"
        )
    problems += arch.layers.read(said, found)
    problems += read_windows(arch, hf, said, found) + read_rope(arch, hf, found)
    _refuse(arch, list(dict.fromkeys(problems)))  # name a key once if several settings need it

    try:
        cfg = build_config(nested(found))
    except ConfigError as error:
        _refuse(arch, [_in_their_keys(error, _their_keys(arch, hf))])
        raise
    key = next(iter(by_name["moe.activation"].keys), "")
    other = cfg.moe.activation != cfg.moe.shared_activation
    if key in hf and other and (_has_dense(cfg) or cfg.moe.shared_dim):
        words = "dense blocks and shared experts have the same activation, and only 'silu' is computed there"
        _refuse(arch, [f"{key}={hf[key]!r}: {words}"])
    return cfg


def _has_dense(cfg: ModelConfig) -> bool:
    return any(map(cfg.is_dense, range(cfg.layers)))


def _read_field(field: Field, hf: HF, said: HF) -> Any:
    """A setting's value. KeyError names a missing key; ConfigError states an invalid value."""
    given = {key: hf[key] for key in field.keys if key in hf}
    if None in given.values() and field.null is NO_NULL:
        key = next(key for key, value in given.items() if value is None)
        raise KeyError(key) if field.default is None else ConfigError(_null(key))
    if len({*given.values()}) > 1:
        said_twice = " and ".join(f"{key}={value!r}" for key, value in given.items())
        raise ConfigError(f"{said_twice}: must be equal")
    value = next(iter(given.values()), field.default)
    value = field.null if value is None and given else value
    value = value(said) if callable(value) else value
    if value is None:
        raise KeyError(field.keys[0] if field.keys else field.ours)
    if field.words is not None and value not in field.words:
        raise ConfigError(
            f"{field.keys[0]}={value!r}: only {' or '.join(map(repr, field.words))} is computed"
        )
    return value if field.words is None else field.words[value]


def _null(key: str) -> str:
    return f"{key}=null: must have a value; without the key it is transformers' default"


def _unknown(arch: Architecture, hf: HF, said: HF) -> list[str]:
    """A line for each key whose value tmoe does not compute, or that contradicts other keys."""
    problems = []
    for key, value in arch.theirs.items():
        valid = value if isinstance(value, tuple) else (value,)
        if key == QUANTISED and hf.get(key) is not None:
            problems.append(no_reader(hf[key]))
        elif key in hf and not any(_same(hf[key], choice) for choice in valid):
            problems.append(f"{key}={hf[key]!r}: only {value!r} is computed")
    for key, repeated in arch.copies.items():
        if key not in hf:
            continue
        try:
            value = repeated(said)
        except KeyError:  # reported as missing when its setting is read
            continue
        if key not in said:
            problems.append(_null(key))
        elif not _same(said[key], value):
            problems.append(f"{key}={hf[key]!r}: only {value!r} is computed, by the other settings")
    return problems


def _same(a: Any, b: Any) -> bool:
    """Whether two JSON values are equal; 0 is not false."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _refuse(arch: Architecture, problems: list[str]) -> None:
    """ConfigError that lists all problems, if there are any."""
    if problems:
        raise ConfigError(listed(f"config.json of a {arch.model_type}: {len(problems)} problems", problems))


def _miscounted(arch: Architecture, said: HF, found: dict[str, Any]) -> list[str]:
    """A line for each number that is too small to be valid, or too large to list the items that it counts.

    The numbers are checked before a list or a shape is made from them.
    """
    least = LEAST | {key.name: key.least for key in arch.keys if key.least is not None}
    least |= {field.keys[0]: field.least for field in arch.fields if field.least is not None}
    given = {key: said[key] for key in least if key in said}
    problems = [f"{key}={n}: must be at least {least[key]}" for key, n in given.items() if n < least[key]]

    layers = found.get("layers") or 0
    experts = found.get("moe.experts") or 0
    limit = MOST["layers"]
    counts = dict(num_hidden_layers=layers) | {key: given[key] for key in AHEAD if key in given}
    problems += [f"{key}={n}: must be at most {limit}" for key, n in counts.items() if n > limit]

    one_by_one = any("{expert}" in part.name for rule in arch.rules for part in rule.parts)
    if one_by_one and layers * experts > TENSORS:
        key = next(k for field in arch.fields if field.ours == "moe.experts" for k in field.keys if k in said)
        problems.append(f"{key}={experts}: with num_hidden_layers={layers} more than {TENSORS} experts")
    return problems


def _their_keys(arch: Architecture, hf: HF) -> dict[str, str]:
    """For each setting of a model, by its dotted name, its key in config.json."""
    keys = {
        field.ours: next((k for k in field.keys if k in hf), field.keys[0])
        for field in arch.fields
        if field.keys
    }
    keys |= {
        "rope.max_seq": "max_position_embeddings",
        "rope.theta": "rope_theta",
        "window": "sliding_window",
        "window_kv_heads": "swa_num_key_value_heads",
        "rope.query_beta": arch.query_beta,
    }
    keys |= {f"rope.{ours}": key for ours, key in ROPE["llama3"].items() | ROPE["yarn"].items()}

    return {f"model.{ours}": key for ours, key in keys.items()}


def _in_their_keys(error: ConfigError, keys: Mapping[str, str]) -> str:
    """An error's line with the keys of config.json. Settings may lack the section "model." in the error."""
    short = {setting.removeprefix("model."): key for setting, key in keys.items()}
    return re.sub(
        r"\b(?:moe|rope|mla|linear)\.[a-z0-9_.]+",
        lambda match: short.get(match[0], match[0]),
        error.spelt(keys),
    )


def write_config(cfg: ModelConfig, dtype: str) -> HF:
    """config.json of a model that was trained from scratch. ConfigError if no entry computes the model.

    An entry fits if its config.json, read back, computes the same mathematics. tmoe has
    no weights of an indexer, so a model with one needs an original.
    """
    lacks = "an export needs the indexer's weights: name the original with --like HF_DIR"
    Section(cfg, "model.").require(not cfg.index_topk, "index_topk", lacks)
    mtp, cfg = cfg.mtp, replace(cfg, mtp=MTPConfig())
    flat = flattened(cfg) | dict(attention_multiplier=softmax_scale(cfg))
    if not any(map(cfg.is_moe, range(cfg.layers))):
        flat["moe.activation"] = cfg.moe.shared_activation  # of dense blocks
    unnamed: list[Architecture] = []
    for arch in (arch for arch in ARCHITECTURES if not arch.nested):
        hf = dict(architectures=[arch.class_name], model_type=arch.model_type, torch_dtype=dtype)
        hf |= {field.keys[0]: field.written(flat[field.ours]) for field in arch.fields if field.keys}
        # Set these keys to null, because the defaults of the classes are tokens of other models.
        hf |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        hf |= {key: value[0] if isinstance(value, tuple) else value for key, value in arch.theirs.items()}
        hf |= arch.layers.write(cfg) | write_windows(arch, cfg) | write_rope(arch, cfg)
        hf |= arch.write(cfg) | (dict(num_nextn_predict_layers=mtp.depth) if mtp.depth else {})
        try:
            same = not differences(cfg, read_config(hf))
        except ConfigError:
            continue
        if same and mtp.depth <= most_further(arch):
            return {key: value for key, value in hf.items() if key != "quantization_config"}
        unnamed += [arch] * same
    if unnamed:
        require_names(unnamed[0], replace(cfg, mtp=mtp), mtp.depth)
    known = ", ".join(a.model_type for a in ARCHITECTURES)
    raise ConfigError(f"none of {known} computes this model: {facts(replace(cfg, mtp=mtp))}")


# Keys of RoPE's settings for which null means the same as a missing key; for truncate it means false.
ROPE_NULLS = ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate")


IN_TRANSFORMERS = "tmoe.hf.swap_experts trains the experts of such a model in transformers"
NO_LONGROPE = (
    f"; longrope changes with the length of an input, which tmoe does not compute; {IN_TRANSFORMERS}"
)
KINDS_OF_BLOCKS = "full_attention", "sliding_attention"  # without and with a window
LINEAR_BLOCK = "linear_attention"


def read_rope(arch: Architecture, hf: HF, found: dict[str, Any]) -> list[str]:
    """Put RoPE's settings into `found`, and return problems.

    The settings are read as transformers 5 (rope_parameters) or 4 (rope_theta, rope_scaling) writes them. If
    keys contradict each other, the same key is used as in version 5.
    """
    if arch.rope_by_kind:
        return _read_ropes(arch, hf, found)
    stated = hf.get("rope_scaling") or hf.get("rope_parameters")
    stated = arch.rope if stated is None else stated
    if parts := [key for key, value in stated.items() if isinstance(value, dict)]:
        return [f"separate settings of RoPE for each of {', '.join(parts)}: one for all layers is computed"]
    return _read_one_rope(arch, hf, stated, found)


def _read_ropes(arch: Architecture, hf: HF, found: dict[str, Any]) -> list[str]:
    """`read_rope` if rope_parameters has an object for each kind of block in the model."""
    stated = hf.get("rope_parameters")
    stated = arch.rope if stated is None else stated
    problems = ["rope_scaling: only rope_parameters is read"] if "rope_scaling" in hf else []
    there = {bool(slides) for slides in found.get("windowed", ())} if found.get("window") else {False}
    ropes = []
    for kind in (
        name for name, slides in zip(KINDS_OF_BLOCKS, (False, True), strict=True) if slides in there
    ):
        settings = stated.get(kind)
        if not isinstance(settings, dict) or not {"rope_theta"} & {*settings, *hf}:
            return [*problems, f"rope_parameters: no object with a rope_theta for {kind}"]
        ropes.append({name: found[name] for name in ("head_dim",) if name in found})
        problems += [f"{kind}: {what}" for what in _read_one_rope(arch, hf, settings, ropes[-1])]
    whole, near = ropes[0], ropes[-1]
    found |= whole
    if near != whole and not problems:
        if near["rope.scaling"] != "none" or near.get("rope.dim") != whole.get("rope.dim"):
            return ["sliding_attention: only another rope_theta than full_attention's, unscaled, is computed"]
        found["rope.window_theta"] = near["rope.theta"]
    return problems


def _read_one_rope(arch: Architecture, hf: HF, stated: HF, found: dict[str, Any]) -> list[str]:
    """`read_rope` for one object of settings."""
    given = {"rope_theta": hf.get("rope_theta", arch.theta)} | stated
    kind = given.get("rope_type", given.get("type", "default"))
    if arch.rope_alpha and kind == "dynamic":
        kind, problems = _apply_alpha(given, found.get("head_dim"))
        if problems:
            return problems
    # Dynamic scaling (NTK) changes the base only for inputs longer than max_position_embeddings, which tmoe
    # refuses.
    scaling = "none" if kind in ("default", "dynamic") else kind
    if not isinstance(scaling, str) or scaling not in ROPE:
        why = NO_LONGROPE if kind in ("longrope", "su") else ""
        return [f"rope_type={kind!r}: valid are default, dynamic, linear, llama3, yarn{why}"]

    problems = [] if hf.get("max_position_embeddings") else ["max_position_embeddings: missing"]
    if kind == "dynamic" and not fits(given.get("factor"), float):
        problems.append(f"factor={given.get('factor')!r} of rope_type dynamic: must be a number")
    problems += _read_partial(arch, {**hf, **given}, found)
    for key, value in dict(mscale=None, mscale_all_dim=None).items():
        if key not in ROPE[scaling] and given.get(key, hf.get(key)) not in (None, value):
            problems.append(f"{key}={given.get(key, hf.get(key))!r}: only {value!r} is computed")

    found["rope.scaling"] = scaling
    found["rope.theta"] = given["rope_theta"]
    found["rope.max_seq"] = hf.get("max_position_embeddings")

    keys = dict(theta="rope_theta") | ROPE[scaling]
    if key := keys.get("original_max_seq"):  # the top level, where Phi-3 has it, wins
        given[key] = hf.get(key, given.get(key, hf.get("max_position_embeddings")))
    problems += [_null(key) for key in (*keys.values(), "partial_rotary_factor") if _is_null(given, key)]
    problems += _read_scaling(arch, given, kind, keys, found)
    return problems + (_read_bases(arch.rope_bases, hf, found) if hf.get(arch.rope_bases) is not None else [])


def _apply_alpha(given: dict[str, Any], width: Any) -> tuple[str, list[str]]:
    """Apply dynamic scaling by a constant alpha to rope_theta. Returns (remaining rope_type, problems)."""
    alpha = given.get("alpha")
    if not (alpha and isinstance(width, int) and width > 2):
        return "dynamic", []
    if not fits(alpha, float) or not fits(given["rope_theta"], float):
        return "dynamic", [f"alpha={alpha!r} rope_theta={given['rope_theta']!r}: must be numbers"]
    given["rope_theta"] = given["rope_theta"] * alpha ** (width / (width - 2))
    return "default", []


def _read_scaling(
    arch: Architecture, given: HF, kind: Any, keys: Mapping[str, str], found: dict[str, Any]
) -> list[str]:
    """Put the numbers of RoPE's scaling into `found`, and return problems. keys: our name -> their key."""
    problems: list[str] = []
    read = {ours: given[key] for ours, key in keys.items() if given.get(key) is not None}
    if "truncate" in keys and "truncate" in given:
        read["truncate"] = given["truncate"] or False  # transformers tests its truth value
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        if name in keys and name not in given:
            problems.append(f"{name} of rope_type {kind}: missing")
    if key := arch.query_beta:
        if not fits(given.get(key), float):
            problems.append(f"{key}={given.get(key)!r}: must be a number")
        if "original_max_seq" not in keys:
            problems.append(
                f"rope_type={kind!r}: only yarn or llama3 is computed, whose range {key} counts by"
            )
        read["query_beta"] = given.get(key)
    found |= {f"rope.{name}": value for name, value in read.items()}
    return problems


def _read_bases(key: str, hf: HF, found: dict[str, Any]) -> list[str]:
    """Put the RoPE bases of blocks with and without a window, from a list, into `found`; return problems."""
    bases, layers = hf[key], found.get("layers") or 0
    if len(bases) != layers or not all(base == 0 or 1 < base < math.inf for base in bases):
        return [f"{key}={bases!r}: must be 0 (no positions) or above 1 for each of {layers} layers"]
    period = shortest(bases := [float(base) for base in bases])
    found["rotary"] = tuple(int(base > 0) for base in bases[:period]) or (1,)
    windowed = found.get("windowed", (0,)) if found.get("window") else (0,)
    far = _bases_of(bases, windowed, 0)
    near = _bases_of(bases, windowed, 1)
    if len(far) > 1 or len(near) > 1:
        return [
            f"{key}={bases!r}: one base for blocks with a window and one for all other blocks is computed"
        ]
    if near and near != far and found["rope.scaling"] != "none":
        return [f"{key}={bases!r}: with a scaling of RoPE only one base for all is computed"]
    found["rope.theta"] = next(iter(far or near), found["rope.theta"])
    if near and far and near != far:
        found["rope.window_theta"] = next(iter(near))
    return []


def _bases_of(bases: list[float], windowed: tuple[int, ...], slides: int) -> set[float]:
    """The bases, without 0, of the blocks with a window (slides: 1) or without (slides: 0)."""
    return {base for i, base in enumerate(bases) if base and windowed[i % len(windowed)] == slides}


def shortest(values: list) -> int:
    """The length of the shortest pattern that, repeated, gives `values`."""
    n = len(values)
    return next((p for p in range(1, n) if values == (values[:p] * n)[:n]), n)


def _read_partial(arch: Architecture, given: HF, found: dict[str, Any]) -> list[str]:
    """Put the number of a head's channels that RoPE rotates into `found`, and return problems."""
    key, width = "partial_rotary_factor", found.get("head_dim")
    if arch.partial is not None and found.get("attention") == "mla":
        still, turned = found.get("mla.nope_dim", 0), found.get("mla.rope_dim", 0)
        if still < 1 or turned < 1:  # reported where they are read
            return []
        share = given.get(key, arch.partial(given))
        if fits(share, float) and int((still + turned) * share) == turned:
            return []
        return [f"{key}={share!r}: {turned / (still + turned)} is computed, by the widths of a query"]
    if key in given or arch.partial is None:
        share = 1.0 if given.get(key) is None else given[key]
    else:
        share = arch.partial(given)
    if arch.partial is None:
        return [] if share == 1.0 else [f"{key}={share!r}: only 1.0 is computed"]
    width = width if isinstance(width, int) else 0
    turned = int(width * share) if fits(share, float) else 0  # rounded down, as in transformers
    if turned % 2 or not 0 < turned <= width:
        return [f"{key}={share!r}: must be an even number of the head's channels, of head_dim={width}"]
    found["rope.dim"] = 0 if turned == width else turned
    return []


def _is_null(given: HF, key: str) -> bool:
    """Whether a key of RoPE's settings is null although transformers computes with it."""
    return key in given and given[key] is None and key not in ROPE_NULLS


def write_rope(arch: Architecture, cfg: ModelConfig) -> HF:
    """RoPE's settings in the format of transformers 4, which version 5 reads too."""
    rope = cfg.rope
    scaling: HF = {key: getattr(rope, ours) for ours, key in ROPE[rope.scaling].items()}
    given: HF = {"rope_type": "default" if rope.scaling == "none" else rope.scaling}
    given |= {key: value for key, value in scaling.items() if value is not None}
    if arch.query_beta:
        given[arch.query_beta] = rope.query_beta
    partial = {} if arch.partial is None else dict(partial_rotary_factor=cfg.rotary_dim / qk_width(cfg))
    written = dict(max_position_embeddings=rope.max_seq)
    if arch.rope_by_kind:
        whole = given | dict(rope_theta=rope.theta) | partial
        base = rope.window_theta
        near = whole if base is None else dict(rope_type="default", rope_theta=base) | partial
        return written | dict(rope_parameters=dict(zip(KINDS_OF_BLOCKS, (whole, near), strict=True)))
    return (
        written
        | partial
        | dict(
            rope_theta=rope.theta,
            rope_scaling=None if rope.scaling == "none" and not arch.rope else given,
        )
    )


def read_linear(arch: Architecture, said: HF, found: dict[str, Any]) -> list[str]:
    """Put the kinds of blocks of an architecture with linear blocks into `found`, and return problems."""
    assert arch.linear is not None
    linear, layers, every = arch.linear, found.get("layers") or 0, 0
    if key := linear.every:
        every = said.get(key, 4)
        if not fits(every, int) or every < 1:
            return [f"{key}={every!r}: must be at least 1"]
    usual = [KINDS_OF_BLOCKS[0] if every and not (i + 1) % every else LINEAR_BLOCK for i in range(layers)]
    older, listed = dict(linear.older), linear.listed(said)
    if listed is not None:
        said = said | {linear.key: [older.get(kind, kind) for kind in listed]}
    kinds, problems = kinds_of_layers(said, linear.key, dict(linear.words), usual)
    found["layer_types"] = tuple(dict(linear.words)[kind] for kind in kinds)
    found["layer_types"] = found["layer_types"][: shortest(list(found["layer_types"]))]
    return problems


# attention to the keys that an indexer chooses, and the older name of it
INDEXED = "indexed_attention", "deepseek_sparse_attention"


def read_windows(arch: Architecture, hf: HF, said: HF, found: dict[str, Any]) -> list[str]:
    """Put window and windowed of a config.json into `found`, and return problems.

    Put layer_types of an architecture with linear blocks.
    """
    if arch.linear:
        return read_linear(arch, said, found)
    windows = arch.windows
    layers = found.get("layers") or 0
    typed = windows is not None and "layer_types" in windows.keys
    known = ("full_attention", "sliding_attention") if typed else ("full_attention",)
    known = INDEXED if found.get("index_topk") else known
    types, problems = kinds_of_layers(said, "layer_types", known, [known[0]] * layers)
    if windows is None or problems:
        return problems

    off = "use_sliding_window" in windows.keys and not said.get("use_sliding_window", False)
    width = _window_width(windows, hf, said, off)
    if width is not None and width < 1:
        return [f"sliding_window={width}: must be at least 1, or null"]

    if "layer_types" in said and typed:
        slides = [kind == "sliding_attention" for kind in types]
        missing = "layer_types: sliding_attention needs a sliding_window"
    else:
        slides = [windows.sliding(said, i) for i in range(layers)]
        missing = "" if off or windows.null else _null("sliding_window")
    if any(slides) and width is None and missing:
        return [missing]
    _put_windows(windows, slides, width, found)
    return []


def _put_windows(windows: Windows, slides: list[bool], width: Any, found: dict[str, Any]) -> None:
    """Put the width of the window, and which blocks have one, into `found`."""
    pattern = tuple(map(int, slides[: shortest(slides)])) or (1,)
    found["windowed"] = pattern
    found["window"] = width if any(slides) and width else 0
    if windows.rotary:
        found["rotary"] = pattern


def _window_width(windows: Windows, hf: HF, said: HF, off: bool) -> Any:
    """Width of the window in tokens; None if there is none. off: whether use_sliding_window is false."""
    if windows.before and said.get(windows.before) is not None:
        return said[windows.before] + 1
    return None if off else hf.get("sliding_window", windows.width or None)


def write_windows(arch: Architecture, cfg: ModelConfig) -> HF:
    """The keys of config.json by which the architecture states its windows, with their values.

    Windows that these keys cannot describe are noticed when the keys are read back.
    """
    if arch.linear:
        theirs = {ours: word for word, ours in arch.linear.words}
        kinds = (cfg.branch_of(i) or ("linear" if cfg.is_linear(i) else "full") for i in range(cfg.layers))
        return {arch.linear.key: [theirs.get(kind, kind) for kind in kinds]}
    windows = [cfg.window_of(i) for i in range(cfg.layers)]
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    values = dict(sliding_window=max(windows) or None, use_sliding_window=any(windows), layer_types=kinds)
    return {key: values[key] for key in arch.windows.keys} if arch.windows else {}
