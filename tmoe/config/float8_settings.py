"""The layers that --train.float8 converts, by name and width, and the settings that it refuses.

next: tmoe/model/float8.py
"""

from __future__ import annotations

import importlib.util
import re
from typing import NamedTuple

from tmoe.config.check import Setting, require

# Weights of dense layers and shared experts. Head, router, shared gate, latents of experts and the experts
# themselves are left out: their products are not nn.Linear's, or are narrow, or decide how tokens are routed.
WEIGHTS = re.compile(
    r"(?:blocks|mtp)\.\d+\."
    r"(attention\.(qkvz?|qkv_a|q_b|kv_b|o|out)|(ffn|moe\.shared)\.(gate_up|down))\.weight"
)
MULTIPLE = 16  # both widths and the number of tokens must be multiples of it, for the GPU's float8 products
LEAST = 512  # smallest value of both widths: in narrower layers casts cost more than the product saves


class Asked(NamedTuple):
    """The setting by which a run asks for float8, as refusals name it."""

    name: str
    value: str
    none: str
    """the setting without float8"""

    @classmethod
    def by(cls, float8: str, fp8: str = "none") -> Asked:
        """The setting, for values of --train.float8 and --train.fp8; `all` converts the same layers."""
        if fp8 == "all":
            return cls("train.fp8", fp8, f"{Setting('train.fp8')} experts")
        return cls("train.float8", float8, f"{Setting('train.float8')} none")

    def require(self, holds: bool, wrong: str, valid: str = "") -> None:
        """ConfigError with this setting, the fault and the valid values, unless float8 is off or it holds."""
        off = f"{valid}, or {self.none}" if valid else self.none
        require(self.value == "none" or holds, self.name, self.value, wrong, off)


def fits(rows: int, columns: int) -> bool:
    """Whether a weight [rows, columns] is wide enough for float8 products."""
    return min(rows, columns) >= LEAST and rows % MULTIPLE == columns % MULTIPLE == 0


def shared_in_float8(float8: str, dim: int, width: int) -> bool:
    """Whether shared experts [2 width, dim] and [dim, width] have a layer in float8.

    If so, they are not computed during the exchange of tokens.
    float8: the value of --train.float8. width: of the shared experts; 0: none.
    """
    return float8 != "none" and width > 0 and (fits(2 * width, dim) or fits(dim, width))


def require_float8(asked: Asked, batch: int, seq: int, tp: int, cp: int) -> None:
    """ConfigError where float8 excludes the layout (tp, cp) or the sizes of a micro-batch."""
    divided = " ".join(Setting(f"parallel.{name}", n) for name, n in dict(tp=tp, cp=cp).items() if n > 1)
    wrong = f"not with {divided}: attention must multiply whole sequences by whole matrices"
    asked.require(not divided, wrong, "tp and cp of 1")
    tokens = batch * seq
    sizes = f"{Setting('train.batch', batch)} x {Setting('train.seq', seq)} = {tokens} tokens"
    wrong = f"{sizes} are no multiple of {MULTIPLE}"
    asked.require(tokens % MULTIPLE == 0, wrong, f"multiples of {MULTIPLE}")


def require_torchao(asked: Asked) -> None:
    """ConfigError where torchao is missing and a run needs it."""
    lacks = "needs the package torchao, which is not installed here"
    asked.require(importlib.util.find_spec("torchao") is not None, lacks, "pip install 'tmoe[float8]'")
