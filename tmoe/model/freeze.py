"""Parameters that are not trained: chosen by a regular expression over their names; with adapters, the base.

next: model/parallelize.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import nn

from tmoe.config.check import require
from tmoe.config.run import Config, Dtype
from tmoe.model.lora import adapt, hold, require_targets
from tmoe.model.qk_clip import watch_logits
from tmoe.model.transformer import Transformer
from tmoe.optim.matrices import chosen


def freeze(model: nn.Module, pattern: str | None, dtype: Dtype = "fp32") -> list[str]:
    """Freezes every parameter whose name contains a match of `pattern` (a regex); returns their names.

    A frozen parameter has no gradient and no optimizer state. It is held in `dtype`, the dtype of the
    products, so that no master copy is needed. The choice bias of a frozen router does not move either. Call
    this function before `parallelize`. pattern None freezes nothing.
    """
    frozen = matching(pattern, (name for name, _ in model.named_parameters())) if pattern else []
    hold(model, frozen, dtype)
    return frozen


def settle(model: Transformer, cfg: Config) -> None:
    """Chooses what is trained in a new model: its adapters (--lora.rank), or all but --optim.freeze.

    Trained weights become bf16 with --optim.masters bf16, and --optim.qk-clip makes attention record its
    largest logits. Call it before `parallelize`.
    """
    if cfg.lora.rank:
        adapt(model, cfg.lora, cfg.train.dtype)
    else:
        freeze(model, cfg.optim.freeze, cfg.train.dtype)
        if cfg.optim.masters == "bf16":
            hold(model, [name for name, p in model.named_parameters() if p.requires_grad], "bf16", True)
        watch_logits(model, cfg)


def frozen_pattern(cfg: Config) -> str:
    """The pattern of frozen names: all with adapters, else --optim.freeze; "": none."""
    return "." if cfg.lora.rank else cfg.optim.freeze or ""


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names in which the pattern is found."""
    return [name for name in names if re.search(pattern, name)]


def require_matches(cfg: Config) -> None:
    """ConfigError if a pattern of --optim.freeze, .muon or .lr-factors matches no name, or all are frozen.

    With adapters, the names are those of the adapters; patterns of --lora.targets are checked too. Frozen
    queries are refused with --optim.qk-clip, also on ranks whose pipeline stage has none.
    """
    require_targets(cfg)
    patterns = {"freeze": [cfg.optim.freeze] if cfg.optim.freeze else []}
    muon = cfg.optim.muon
    patterns["lr_factors"] = [pattern for pattern, _ in cfg.optim.factors]
    if not any(patterns.values()) and muon is None:
        return
    with torch.device("meta"):
        model = Transformer(cfg.model)
    if cfg.lora.rank:
        adapt(model, cfg.lora, cfg.train.dtype)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    some = sorted({re.sub(r"\b(blocks|mtp)\.\d+\.", "", name) for name in names})
    for name, given in patterns.items():
        for pattern in given:
            found = matching(pattern, names)
            wrong = f"found in no parameter's name; names end in {some}"
            require(len(found) > 0, f"optim.{name}", pattern, wrong)
            everything = name == "freeze" and len(found) == len(names)
            require(not everything, "optim.freeze", pattern, "nothing is left to train")
    freeze(model, cfg.optim.freeze)
    watch_logits(model, cfg)
    wrong = f"found in no trained matrix; AdamW trains tables, routers and vectors; matrices: {_ends(model)}"
    require(muon is None or bool(chosen(muon, model.named_parameters())), "optim.muon", muon, wrong)


def _ends(model: nn.Module) -> list[str]:
    """Ends of the names of the matrices that Muon can train."""
    found = chosen(".", model.named_parameters())
    return sorted({re.sub(r"\b(blocks|mtp)\.\d+\.", "", name) for name in found})
