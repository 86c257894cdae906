"""Converts dense layers and shared experts to float8 products, by torchao (--train.float8).

A converted layer casts its input, its weight and the gradient of its result to float8 e4m3 in each product,
with one scale per row that is a power of two ("rowwise"). Parameters keep their names, types and layout:
master weights, optimizer, checkpoints and exports do not change.

next: model/parallelize.py
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from tmoe.base.versions import package_version
from tmoe.config.check import ConfigError, Setting
from tmoe.config.float8_settings import LEAST, MULTIPLE, WEIGHTS, Asked, fits, require_torchao
from tmoe.config.gpus import GPUS
from tmoe.config.model import ModelConfig
from tmoe.config.run import Config
from tmoe.model.shapes import model_shapes
from tmoe.moe.experts import Experts

ADA = (8, 9)  # the first compute capability of NVIDIA with float8 products
AMD = ("gfx94", "gfx95", "gfx12")  # MI300, MI350, RDNA 4


class Float8Layers(NamedTuple):
    """Names of a model's dense layers and shared experts."""

    converted: list[str]
    left: list[str]
    """too narrow, or of a width that float8 products do not support"""


def layers_in(model: ModelConfig) -> Float8Layers:
    """The layers that float8 converts, and the layers that it does not convert, in the order of the model."""
    layers = Float8Layers([], [])
    for name, shape in model_shapes(model).items():
        if WEIGHTS.fullmatch(name):
            (layers.converted if fits(*shape) else layers.left).append(name.removesuffix(".weight"))
    return layers


def require_layers(cfg: Config) -> None:
    """ConfigError if --train.float8 would convert no layer of the model."""
    if cfg.train.float8 == "none" or layers_in(cfg.model).converted:
        return
    none = "no dense layer or shared expert of this model has two widths"
    fit = f"that are at least {LEAST} and multiples of {MULTIPLE}"
    asked_by(cfg).require(False, f"{none} {fit}", "a wider model")


def describe(cfg: Config) -> str:
    """A line: how many layers multiply in float8, and which do not. "" without --train.float8."""
    if cfg.train.float8 == "none":
        return ""
    converted, left = layers_in(cfg.model)
    kinds = Counter(name.split(".", 2)[2] for name in left)
    out = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    counts = f"{len(converted)} of {len(converted) + len(left)} dense and shared layers"
    line = f"float8 ({cfg.train.float8}): {counts}"
    line += f", without {out} (a width below {LEAST} or no multiple of {MULTIPLE})" if left else ""
    return f"{line}; MFU counts against the peak of bf16"


def require_device(cfg: Config, device: torch.device) -> None:
    """ConfigError if --train.float8 cannot run here: torchao is missing, or the GPU has no float8 products.

    A CPU computes the same products, but not faster.
    """
    if cfg.train.float8 == "none":
        return
    load_torchao(asked_by(cfg))
    if lack := lacking(device):
        asked_by(cfg).require(False, f"{lack} has no float8 products", "NVIDIA from sm_89 on, MI300")


def require_gpu(cfg: Config) -> None:
    """ConfigError if the GPU of a dry run has no float8 products."""
    if cfg.train.float8 == "none" or cfg.gpu is None or GPUS[cfg.gpu].float8:
        return
    asked = asked_by(cfg)
    wrong = f"has no float8 products, for {Setting(asked.name, asked.value)}"
    valid = f"{', '.join(name for name, gpu in GPUS.items() if gpu.float8)}, or {asked.none}"
    raise ConfigError.of("gpu", cfg.gpu, wrong, valid)


def lacking(device: torch.device) -> str:
    """The name of a GPU that has no float8 products; "" for other devices."""
    if device.type != "cuda":
        return ""
    facts = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        chip = facts.gcnArchName
        return "" if chip.startswith(AMD) else f"{facts.name} ({chip})"
    chip = facts.major, facts.minor
    return "" if chip >= ADA else f"{facts.name} (sm_{chip[0]}{chip[1]})"


def asked_by(cfg: Config) -> Asked:
    """The setting by which a run asks for float8."""
    return Asked.by(cfg.train.float8, cfg.train.fp8)


def load_torchao(asked: Asked) -> Any:
    """torchao.float8. ConfigError if torchao is missing, or cannot be imported with this torch."""
    require_torchao(asked)
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # torchao logs a line for each kernel built for other GPUs
    try:
        import torchao.float8  # pyrefly: ignore[missing-import] (an extra)
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        got = f"torchao {package_version('torchao')} cannot be imported with torch {torch.__version__}"
        wrong, valid = f"{got}: {why}", f"another torchao, or {asked.none}"
        raise ConfigError.of(asked.name, asked.value, wrong, valid) from None
    finally:
        logging.disable(level)
    return torchao.float8


def apply_float8(model: nn.Module, float8: Literal["none", "rowwise"]) -> None:
    """Converts the layers of a Transformer, or of a part of one, in place; "none" converts nothing.

    Call it before `apply_ep`, which reads whether shared experts are plain, and before any compilation. A
    layer that is not a plain nn.Linear (an adapter, a parametrization) or has hooks is not converted. Raises
    ConfigError if torchao is missing.
    """
    if float8 == "none":
        return
    torchao = load_torchao(Asked.by(float8))
    torchao.convert_to_float8_training(
        model, config=torchao.Float8LinearConfig.from_recipe_name(float8), module_filter_fn=_is_converted
    )


def _is_converted(module: nn.Module, name: str) -> bool:
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        return False
    wide = fits(module.out_features, module.in_features)
    return wide and WEIGHTS.fullmatch(f"{name}.weight") is not None


def float8_layers(model: nn.Module) -> list[nn.Linear]:
    """The converted layers of a model; an empty list if torchao was never imported."""
    kind = getattr(sys.modules.get("torchao.float8.float8_linear"), "Float8Linear", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


@contextmanager
def in_compute_type(model: nn.Module) -> Iterator[None]:
    """In this context, converted layers multiply in the type of their weights, for rollouts.

    A step of decoding has few rows, so casts of whole weights would cost more than the float8 products save.
    Compiled blocks keep their float8 products. Experts multiply in the type of their weights too.
    """
    experts = [module for module in model.modules() if isinstance(module, Experts) and module.fp8]
    for module in experts:
        module.fp8 = False
    layers = [layer for layer in float8_layers(model) if "forward" not in vars(layer)]  # calls may be nested
    for layer in layers:
        vars(layer)["forward"] = partial(nn.Linear.forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]
        for module in experts:
            module.fp8 = True
