"""Reads adapter_config.json: each field that changes what an adapter computes is used, or refused by name.

next: hf/adapters/read.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tmoe.base.disk import absent_words, text_of
from tmoe.checkpoint.manifest import CheckpointError
from tmoe.config.check import ConfigError, require
from tmoe.hf.foreign import ADAPTER

Order = Literal["rank_major", "grouped_by_expert"]  # unsloth's words for the columns of a stack's B
ORDERS: tuple[Order, ...] = ("rank_major", "grouped_by_expert")

# Fields that are read, and fields that change nothing in a finished adapter.
READ = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_parameters"}
READ |= {"peft_type", "peft_version", "lora_B_layout", "lora_dropout", "base_model_name_or_path"}
READ |= {"init_lora_weights", "target_modules", "exclude_modules"}
UNUSED = {"task_type", "inference_mode", "revision", "auto_mapping"}
UNUSED |= {"megatron_core", "qalora_group_size", "eva_config", "runtime_config", "ensure_weight_tying"}
UNUSED |= {"layers_pattern"}  # read only together with layers_to_transform, which is refused
# Fields that are refused, and the reason.
REFUSED = {
    "use_dora": "DoRA scales each row of the merged weight, which tmoe's adapters do not compute",
    "lora_bias": "a bias of B is not computed",
    "fan_in_fan_out": "weights stored as [in, out] are of no family here",
    "layers_to_transform": "adapters of some layers are named by their tensors alone",
    "modules_to_save": "whole weights are trained next to the adapters: merge it with PEFT",
    "megatron_config": "its layers are Megatron's parallel ones",
    "trainable_token_indices": "rows of the embedding are trained next to the adapters: merge it with PEFT",
    "layer_replication": "layers are repeated",
    "alora_invocation_tokens": "the adapter is on after certain tokens alone",
}
MOST = 2.0**128 - 2.0**104  # the largest number of fp32
INIT = (True, False, "gaussian", "eva", "orthogonal")  # other starts change the base's weights, or the layer


class PeftConfig(NamedTuple):
    """The fields of adapter_config.json that decide what an adapter computes."""

    path: Path
    rank: int
    alpha: float
    rs: bool
    ranks: dict[str, int]
    """rank_pattern: regular expression, which must match the end of a module's name -> rank"""
    alphas: dict[str, float]
    parameters: tuple[str, ...]
    """target_parameters: ends of the names of parameters"""
    modules: str | list[str] | None
    """target_modules: ends of the names of modules, or a regular expression of the whole name; None: all"""
    excluded: str | list[str] | None
    """exclude_modules, in the same form; None: none"""
    version: tuple[int, int] | None
    """the version of PEFT that wrote it; None: not stated, or a development version"""
    order: Order | None
    """the columns of B in a stack of experts; None: not stated"""
    unsloth: bool
    """whether the file mentions unsloth"""
    dropout: float
    base: str

    def rank_of(self, name: str) -> int:
        """The rank of a module's or parameter's adapter."""
        return matched(self.ranks, name, self.rank)

    def alpha_of(self, name: str) -> float:
        return matched(self.alphas, name, self.alpha)

    def names(self, module: str) -> bool:
        """Whether PEFT gives a module an adapter, by target_modules and exclude_modules."""
        if self.excluded and _is_named(self.excluded, module):
            return False
        return self.modules in (None, "", [], "all-linear") or _is_named(self.modules, module)


def matched(patterns: dict[str, Any], name: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a name, as in PEFT's get_pattern_key."""
    return next((v for key, v in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)


def _is_named(targets: str | list[str] | None, module: str) -> bool:
    """Whether a module is one of the targets, as in PEFT's check_target_module_exists."""
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets or ())


def read_peft_config(folder: Path, version: str = "") -> PeftConfig:
    """The adapter_config.json of a folder.

    version: the version of PEFT that wrote it, if the file does not state it.

    ConfigError names a field that is refused, unknown or malformed. CheckpointError: no such file, or no
    JSON.
    """
    path = folder / ADAPTER
    try:
        said = json.loads(text_of(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: {absent_words(path)}; {folder} is no folder of PEFT's") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: malformed: {error}") from error
    require(isinstance(said, dict), f"{path}: malformed: not an object")
    _refuse_fields(path, said)
    kinds = dict(r=int, lora_alpha=(int, float), use_rslora=bool, rank_pattern=dict, alpha_pattern=dict)
    kinds |= dict(target_parameters=list, peft_version=str, lora_B_layout=str, lora_dropout=(int, float))
    kinds |= dict(target_modules=(str, list), exclude_modules=(str, list))
    for key, kind in kinds.items():
        value = said.get(key)
        odd = isinstance(value, bool) and kind is not bool
        if value is not None and (odd or not isinstance(value, kind)):
            raise _of(path, key, value, "malformed", "the type that PEFT writes")
    for key in ("r", "lora_alpha"):
        if said.get(key) is None:
            raise _of(path, key, None, "missing", "a number above 0")
    stated = version_of(said.get("peft_version") or "")
    given = version_of(version)
    if given and stated not in (None, given):
        wrong = f"{path} states {said['peft_version']}"
        raise ConfigError.of("peft_version", version, wrong, "without this flag")
    config = PeftConfig(
        path,
        said["r"],
        said["lora_alpha"],
        bool(said.get("use_rslora")),
        said.get("rank_pattern") or {},
        said.get("alpha_pattern") or {},
        tuple(map(str, said.get("target_parameters") or ())),
        said.get("target_modules"),
        said.get("exclude_modules"),
        stated or given,
        _order(path, said.get("lora_B_layout")),
        "unsloth" in json.dumps(said).lower(),
        float(said.get("lora_dropout") or 0.0),
        str(said.get("base_model_name_or_path") or ""),
    )
    _require_patterns(config)
    return config


def _of(path: Path, key: str, value: Any, wrong: str, valid: str = "") -> ConfigError:
    shown = json.dumps(value)
    return ConfigError(f"{path}: {key}={shown[:80]}: {wrong}{f'; valid: {valid}' if valid else ''}")


def _refuse_fields(path: Path, said: dict[str, Any]) -> None:
    kind = said.get("peft_type")
    if kind != "LORA":
        raise _of(path, "peft_type", kind, "tmoe reads low-rank adapters", '"LORA"')
    if said.get("bias") not in (None, "none"):
        raise _of(path, "bias", said["bias"], "biases are trained next to the adapters", '"none"')
    init = said.get("init_lora_weights", True)
    if init is not None and init not in INIT:
        wrong = "this start changes the base's weights, or the layer, so the adapter is not one of the base"
        convert = "convert it with PEFT (save_pretrained with path_initial_model_for_weight_conversion)"
        raise _of(path, "init_lora_weights", init, f"{wrong}: {convert}")
    for key, value in said.items():
        if key in READ or key in UNUSED or key == "bias" or not _says_something(value):
            continue
        if key.startswith("unsloth") or key.startswith("fused_expert_lora"):
            continue  # notes of unsloth; lora_B_layout is what decides
        wrong = REFUSED.get(key, "not a field of PEFT's LoRA that tmoe computes")
        raise _of(path, key, value, wrong, "null or false, as PEFT writes it by default")


def _says_something(value: Any) -> bool:
    if type(value) in (int, float):
        return True  # layers_to_transform=0 is the first layer
    return value not in (None, False, "") and value != [] and value != {}


def _order(path: Path, said: str | None) -> Order | None:
    for order in ORDERS:
        if said == order:
            return order
    if said is not None:
        raise _of(path, "lora_B_layout", said, "no such order of B's columns", " or ".join(ORDERS))
    return None


def version_of(said: str) -> tuple[int, int] | None:
    """The first two numbers of a version; None of a development version, or of no version."""
    found = re.match(r"(\d+)\.(\d+)(?!.*dev)", said)
    return (int(found[1]), int(found[2])) if found else None


def _require_patterns(config: PeftConfig) -> None:
    path = config.path
    tables: dict[str, dict[str, Any]] = dict(rank_pattern=config.ranks, alpha_pattern=config.alphas)
    for key, table in tables.items():
        for pattern, value in table.items():
            number = int if key == "rank_pattern" else (int, float)
            if isinstance(value, bool) or not isinstance(value, number) or not 0 < value < MOST:
                raise _of(path, key, {pattern: value}, "not a number above 0")
            try:
                re.compile(pattern)
            except re.error as error:
                raise _of(path, key, {pattern: value}, f"no regular expression: {error}") from None
    for key, said in (("target_modules", config.modules), ("exclude_modules", config.excluded)):
        if isinstance(said, str):
            try:
                re.compile(said)
            except re.error as error:
                raise _of(path, key, said, f"no regular expression: {error}") from None
    if not 0 <= config.dropout < 1:
        raise _of(path, "lora_dropout", config.dropout, "not a share from 0 to below 1")
    for key, value in (("r", config.rank), ("lora_alpha", config.alpha)):
        if not 0 < value < MOST:  # JSON has NaN and Infinity in Python
            raise _of(path, key, value, "not a number above 0")
