"""Writes README.md of an export: the front matter that the hub reads, and a few lines about the model.

If the original has a README.md, that file is kept unchanged and none is written.

next: hf/export.py
"""

from __future__ import annotations

from typing import Any

from tmoe.checkpoint.manifest import Manifest
from tmoe.config.model import ModelConfig
from tmoe.hf.hub_folders import name_of
from tmoe.hf.rules import Architecture
from tmoe.model.count import count_parameters

README = "README.md"
TAGS = ("moe", "tmoe")


def card(name: str, arch: Architecture, cfg: ModelConfig, manifest: Manifest, license: str) -> bytes:
    """The contents of README.md.

    name: name of the exported folder.
    license: an identifier of the hub's list (apache-2.0, other, unknown).
    """
    sparse = any(map(cfg.is_moe, range(cfg.layers)))
    run: Any = manifest.info.get("config")
    base = name_of(str(run.get("init") or "")) if isinstance(run, dict) else None
    matter = [f"license: {license}", "library_name: transformers", "pipeline_tag: text-generation"]
    matter += [f"base_model: {base}"] if base else []
    matter += ["tags:", *(f"- {tag}" for tag in (arch.model_type, *TAGS[not sparse :]))]
    counts = count_parameters(cfg)
    size = f"{_short(counts.total)} parameters"
    if sparse:
        size += (
            f", {_short(counts.active)} of them active for a token "
            f"({cfg.moe.top_k} of {cfg.moe.experts} experts in a layer)"
        )
    begun = f" It began as {base}." if base else ""
    lines = [
        *("---", *matter, "---", "", f"# {name}", ""),
        f"{size}; {arch.class_name} in transformers.{begun}",
        f"Trained with tmoe: step {manifest.step}, {manifest.tokens} tokens.",
    ]
    return ("\n".join(lines) + "\n").encode()


def _short(count: int) -> str:
    return f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"
