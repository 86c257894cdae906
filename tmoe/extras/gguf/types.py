"""The type of every tensor of a GGUF file, as llama.cpp's own quantiser chooses it, and its bytes.

Source: llama_tensor_get_type_impl and tensor_type_fallback of src/llama-quant.cpp, llama.cpp 0c1e57098.

next: extras/gguf/encode.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

ALIGNMENT = 32  # bytes; every tensor begins at a multiple
BLOCK = re.compile(r"blk\.(\d+)\.")


class Mix(NamedTuple):
    """A value of --type: the type of most tensors, and the number in general.file_type."""

    base: str
    file_type: LlamaFileType


MIXES = dict(
    f32=Mix("F32", LlamaFileType.ALL_F32),
    f16=Mix("F16", LlamaFileType.MOSTLY_F16),
    bf16=Mix("BF16", LlamaFileType.MOSTLY_BF16),
    q8_0=Mix("Q8_0", LlamaFileType.MOSTLY_Q8_0),
    q6_k=Mix("Q6_K", LlamaFileType.MOSTLY_Q6_K),
    q5_k_m=Mix("Q5_K", LlamaFileType.MOSTLY_Q5_K_M),
    q5_k_s=Mix("Q5_K", LlamaFileType.MOSTLY_Q5_K_S),
    q4_k_m=Mix("Q4_K", LlamaFileType.MOSTLY_Q4_K_M),
    q4_k_s=Mix("Q4_K", LlamaFileType.MOSTLY_Q4_K_S),
    q3_k_l=Mix("Q3_K", LlamaFileType.MOSTLY_Q3_K_L),
    q3_k_m=Mix("Q3_K", LlamaFileType.MOSTLY_Q3_K_M),
    q3_k_s=Mix("Q3_K", LlamaFileType.MOSTLY_Q3_K_S),
    q2_k=Mix("Q2_K", LlamaFileType.MOSTLY_Q2_K),
    mxfp4=Mix("MXFP4", LlamaFileType.MOSTLY_MXFP4_MOE),
)
FLOATS = ("F32", "F16", "BF16")
# The type of a tensor whose rows the blocks of the first type do not divide.
FALLBACK = dict(Q2_K="Q4_0", Q3_K="Q4_0", Q4_K="Q5_0", Q5_K="Q5_1", Q6_K="Q8_0")


class Facts(NamedTuple):
    """The facts of a model that decide types, besides a tensor's name and shape."""

    layers: int
    experts: int
    """0: a dense model"""
    group: int
    """query heads for each key head, as the file's keys say"""
    tied: bool
    """whether the file has no output.weight"""
    values: Mapping[int, int]
    """layer -> its place among the layers that have an attn_v"""
    large: bool = False
    """whether llama.cpp takes the model for Llama 2 70B"""


def facts_of(names: Mapping[str, tuple[int, ...]], layers: int, experts: int, group: int, arch: str) -> Facts:
    """The facts of a file with these tensors. names: tensor -> shape, as torch has it."""
    with_v = sorted(int(n.split(".")[1]) for n in names if n.endswith("attn_v.weight"))
    large = arch == "llama" and layers == 80 and not experts and group > 1
    places = {layer: place for place, layer in enumerate(with_v)}
    return Facts(layers, experts, group, "output.weight" not in names, places, large)


def kind_of(name: str, shape: tuple[int, ...], mix: str, model: Facts) -> str:
    """The name of ggml's type for a tensor in a file of this mix. shape: as torch has it.

    Norms, biases, vectors and routers stay F32, as llama.cpp's converter writes them.
    """
    base = MIXES[mix].base
    if not _is_quantised(name, shape):
        return "F32"
    return base if base in FLOATS else fitting(_chosen(name, shape, mix, base, model), shape[-1])


def _is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    kept = any(part in name for part in ("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d.weight"))
    return len(shape) > 1 and name.endswith("weight") and not kept


def fitting(kind: str, columns: int) -> str:
    """The type, or the one that stands in for it where its blocks do not divide a row."""
    if columns % block_of(kind) == 0:
        return kind
    kind = FALLBACK.get(kind, kind)
    return kind if columns % block_of(kind) == 0 else "F16"


def _chosen(name: str, shape: tuple[int, ...], mix: str, base: str, model: Facts) -> str:
    """The type before shapes are looked at."""
    if name == "output.weight" or (model.tied and name == "token_embd.weight"):
        if mix == "mxfp4" or base == "Q8_0" or shape[-1] % block_of(base):
            return "Q8_0"
        return "Q6_K"
    if mix == "mxfp4":  # stacks; the projections of latent attention are stacks as well
        return "MXFP4" if len(shape) == 3 and shape[0] > 1 else "Q8_0"
    found = BLOCK.match(name)
    layer = int(found[1]) if found else 0
    if name.endswith("attn_v.weight"):
        return _values(mix, base, layer, model)
    if name.endswith("attn_qkv.weight"):
        return dict(q3_k_m="Q4_K", q3_k_l="Q4_K", q4_k_m="Q5_K", q5_k_m="Q6_K").get(mix, base)
    if name.endswith("attn_k.weight"):
        return "Q8_0" if model.experts == 8 else base
    if "ffn_down" in name:
        return _downs(mix, base, layer, model.layers)
    if name.endswith("attn_output.weight"):
        if model.experts == 8:
            return "Q5_K" if mix in ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m") else base
        return dict(q2_k="Q3_K", q3_k_m="Q4_K", q3_k_l="Q5_K").get(mix, base)
    return base


def _values(mix: str, base: str, layer: int, model: Facts) -> str:
    place, number = model.values[layer], len(model.values)
    kind = base
    if mix == "q2_k":
        kind = "Q4_K" if model.group >= 4 else "Q3_K"
    elif mix == "q3_k_m":
        kind = "Q5_K" if place < 2 else "Q4_K"
    elif mix == "q3_k_l" or (mix == "q4_k_s" and place < 4):
        kind = "Q5_K"
    elif mix in ("q4_k_m", "q5_k_m") and _gets_more(place, number):
        kind = "Q6_K"
    if model.large and kind in ("Q3_K", "Q4_K"):
        kind = "Q5_K"
    return "Q8_0" if model.experts == 8 else kind


def _downs(mix: str, base: str, layer: int, layers: int) -> str:
    if mix == "q2_k":
        return "Q3_K"
    if mix == "q3_k_m":
        return "Q5_K" if layer < layers // 16 else "Q4_K"
    if mix == "q3_k_l" or (mix == "q4_k_s" and layer < layers // 8):
        return "Q5_K"
    return "Q6_K" if mix in ("q4_k_m", "q5_k_m") and _gets_more(layer, layers) else base


def _gets_more(layer: int, layers: int) -> bool:
    """Whether a layer's tensor gets more bits: the first and last eighth, and every third between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


# ---- bytes ----


def block_of(kind: str) -> int:
    """Values of one block."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]


def size_of(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor, without padding."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return math.prod(shape) // block * size


def padded(size: int) -> int:
    """Bytes up to the next place where a tensor may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT
