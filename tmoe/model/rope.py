"""Rotary position embedding: frequencies, their scalings, tables, rotation.

next: attention_backend.py
"""

import functools
import math

import torch
from torch import Tensor

from tmoe.base.private_torch import find_or_note
from tmoe.config.model import ModelConfig, RopeConfig

Tables = dict[RopeConfig | None, tuple[Tensor, Tensor]]  # results of rope_table, by kind of block
_modes = find_or_note(
    "torch._C._len_torch_dispatch_stack", "every forward computes its table of rotations again"
)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians per position for each of the C/2 pairs (fp32), and the factor on cos and sin.

    Scalings: none, linear (Chen et al. 2023), llama3 (Llama 3.1's released code), yarn (Peng et al. 2023,
    "NTK by parts"). They are computed in fp32 and in the order of transformers' operations, so that all bits
    are equal: published weights were trained with frequencies that were rounded in this way.
    """
    # computed on the CPU, so that the last bit of fp32 does not depend on the default device
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
    period = rope.theta ** (pairs / head_dim)  # positions per radian
    freq = 1.0 / period
    if rope.scaling == "none":
        return freq, 1.0
    if rope.scaling == "linear":
        return freq / rope.factor, 1.0
    if rope.scaling == "llama3":
        turns = rope.original_max_seq / (2 * math.pi / freq)  # rotations over the trained range
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0, 1)
        return (1 - keep) * freq / rope.factor + keep * freq, 1.0

    def pair_at(rotations: float) -> float:
        """The (fractional) pair that makes this number of rotations over the trained range."""
        radians = rope.original_max_seq / (rotations * 2 * math.pi)
        return head_dim * math.log(radians) / (2 * math.log(rope.theta))

    # pairs up to `low` keep their frequency; from pair `high` on the frequency is divided by the factor
    low = pair_at(rope.beta_fast)
    high = pair_at(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    keep = 1 - ((pairs / 2 - low) / (high - low or 0.001)).clamp(0, 1)

    factor = rope.attention_factor
    if factor is None and rope.mscale and rope.mscale_all_dim:
        factor = yarn_scale(rope.factor, rope.mscale) / yarn_scale(rope.factor, rope.mscale_all_dim)
    if factor is None:
        factor = yarn_scale(rope.factor)
    return 1.0 / (rope.factor * period) * (1 - keep) + freq * keep, factor


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature for ranges that are extended `factor` times: 0.1 mscale ln(factor) + 1.

    (Peng et al. 2023, section 3.4)
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_table(rope: RopeConfig, head_dim: int, seq: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [S, C] in fp32, cached for the next call; with rope.query_beta cos is [S, C + 1].

    The last column of that cos is query_scale, so that it is selected and sent together with the row of a
    position.

    Results that a tracer (torch.export's) or a mode computes are not cached: they may not be real tensors.
    """
    traced = torch.compiler.is_compiling() or _modes is None or _modes() > 0
    return (make_rope_table if traced else kept_rope_table)(rope, head_dim, seq, device)


def kinds_of(cfg: ModelConfig) -> frozenset[RopeConfig | None]:
    """The RoPE settings (`rope_of`) of the model's blocks, each once."""
    return frozenset(cfg.rope_of(i) for i in cfg.numbered)


def turns_of(
    cfg: ModelConfig, seq: int, device: torch.device, kinds: frozenset[RopeConfig | None] | None = None
) -> Tables:
    """The rope_table of each kind of block. Tables of blocks without RoPE have no channels.

    kinds: the result of kinds_of, required in compiled code: dynamo cannot trace the creation of a config.
    """
    kinds = kinds_of(cfg) if kinds is None else kinds
    return {rope: rope_table(rope or cfg.rope, cfg.rotary_dim if rope else 0, seq, device) for rope in kinds}


def make_rope_table(rope: RopeConfig, head_dim: int, seq: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The table of rope_table; the two halves of C are equal.

    Pairs are (i, i + C/2), as in Hugging Face's models. The angle is a product in fp32, as in those models:
    an exact angle differs by a relative 6e-8, and logits at position 6,000 by 3e-5.
    """
    freq, factor = rope_frequencies(rope, head_dim)
    at_S = torch.arange(seq, dtype=torch.float32, device="cpu")
    angle = torch.outer(at_S, freq)
    angle = torch.cat([angle, angle], -1)
    cos, sin = angle.cos() * factor, angle.sin() * factor
    if rope.query_beta:
        cos = torch.cat([cos, query_scale(rope, at_S)[:, None]], -1)
    return cos.to(device), sin.to(device)


def query_scale(rope: RopeConfig, at_S: Tensor) -> Tensor:
    """The factor on queries at these positions, in the shape and type of `at_S`; logits grow with position.

    1 + query_beta ln(1 + floor(position / original_max_seq)): Llama 4's released code, with Mistral 4's
    constants.
    """
    return 1 + rope.query_beta * torch.log(1 + torch.floor(at_S / rope.original_max_seq))


# the cache outlives the caller's mode, and autograd refuses inference tensors
kept_rope_table = functools.lru_cache(maxsize=8)(torch.inference_mode(False)(make_rope_table))


def rotate(x_BSHC: Tensor, cos_SC: Tensor, sin_SC: Tensor, interleave: bool = False) -> Tensor:
    """Rotates each pair of channels by its position's angle: computed in fp32, returned in x's dtype.

    cos_SC, sin_SC: from rope_table, or [B, S, C] if each row has its own positions. If they have fewer
        channels than x, only the first channels of x are rotated.
    interleave: pairs are neighbours (2i, 2i+1), else (i, i + C/2).
    """
    C = cos_SC.shape[-1]
    if not C:
        return x_BSHC
    x = x_BSHC[..., :C].float()
    cos, sin = cos_SC.unsqueeze(-2), sin_SC.unsqueeze(-2)
    if interleave:
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = cos[..., : C // 2], sin[..., : C // 2]
        turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    else:
        left, right = x.chunk(2, -1)
        turned = x * cos + torch.cat([-right, left], -1) * sin
    turned = turned.to(x_BSHC.dtype)
    return turned if x_BSHC.shape[-1] == C else torch.cat([turned, x_BSHC[..., C:]], -1)
