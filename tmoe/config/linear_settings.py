"""The settings of linear layers, which keep a state instead of keys and values.

next: model.py"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tmoe.config.check import check

LayerType = Literal["linear", "full", "moe", "dense"]
CHUNK = 64  # tokens of a chunk in the count of operations (ops/delta)


@dataclass(frozen=True)
class LinearConfig:
    """Linear layers: blocks whose attention is replaced by a rule that updates a state of fixed size."""

    kind: Literal["none", "deltanet", "mamba2"] = "none"
    """the rule of these blocks: none: all blocks have attention; deltanet: Gated DeltaNet (Yang et al. 2024,
    as in Qwen3-Next); mamba2: Mamba-2 (Dao & Gu 2024, as in Granite-4 and Nemotron-H)"""
    every: int = 4
    """every n-th block has full attention, all further blocks are linear, unless layer-types is given"""
    key_heads: int = 16
    """heads of queries and keys; Mamba-2: groups, of C and B"""
    value_heads: int = 32
    """heads of values; a multiple of key-heads: neighbouring ones share a key"""
    key_dim: int = 128
    """channels of a query and key head; Mamba-2: of a group's state"""
    value_dim: int = 128
    """channels of a value head"""
    conv: int = 4
    """tokens of the causal convolution over queries, keys and values"""
    conv_bias: bool = True
    """a bias in the convolution of Mamba-2; Gated DeltaNet has none"""
    least_step: float = 0.0
    """smallest step dt of Mamba-2; a smaller one is raised to it (Nemotron-H)"""
    most_step: float = 0.0
    """largest step dt of Mamba-2; 0: no limit"""

    def __post_init__(self) -> None:
        linear = check(
            self,
            "model.linear.",
            one="every key_heads value_heads key_dim value_dim conv",
            zero="least_step most_step",
        )
        ok = self.value_heads % self.key_heads == 0
        linear.require(ok, "value_heads", f"must be a multiple of {linear.said('key_heads')}")
        ok = not self.most_step or self.most_step >= self.least_step
        linear.require(ok, "most_step", f"must be at least {linear.said('least_step')}, or 0")

    @property
    def gate_rows(self) -> int:
        """Rows of the matrix of beta and decays; Mamba-2 has decays alone."""
        return (1 if self.kind == "mamba2" else 2) * self.value_heads

    @property
    def key_width(self) -> int:
        """Channels of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Channels of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def mixed(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width
