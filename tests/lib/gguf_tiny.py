"""Tiny models of the families that are written as GGUF, with weights that any machine makes, and their steps.

llama.cpp's logits and greedy tokens of these models are stored in tests/hf/gguf_logits.npz, and the types
that its quantiser chooses in tests/hf/gguf_types.json. `python tests/lib/gguf_stored.py tests/hf`, with
llama-cpp-python installed, writes both files.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from tmoe.checkpoint.checkpoints import Checkpoints
from tmoe.config.linear_settings import LinearConfig
from tmoe.config.model import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from tmoe.config.presets import moe_pilot_14b
from tmoe.model.transformer import Transformer

VOCAB = 64
PROMPT = [i * 37 % VOCAB for i in range(1, 25)]
NEW = 32
ROWS = slice(3, None, 4)  # of the prompt's logits, those that are stored
ROPE = RopeConfig(max_seq=256)
MOE = MoEConfig(experts=4, top_k=2, ffn_dim=24, balance="none", z_coeff=0.0)
BASE = ModelConfig(
    vocab=VOCAB, dim=32, layers=3, heads=4, kv_heads=2, head_dim=8, ffn_dim=24, rope=ROPE, moe=MOE
)
WHOLE = replace(MOE, renormalize=False)
YARN = replace(ROPE, scaling="yarn", factor=2.0, original_max_seq=128)
LLAMA3 = replace(ROPE, theta=5e5, scaling="llama3", factor=8.0, original_max_seq=64)
SIGMOID = replace(
    MOE,
    experts=8,
    score="sigmoid",
    renormalize=False,
    choice_bias=True,
    groups=4,
    top_groups=2,
    group_score="top2",
    shared_dim=48,
    scaling=2.5,
)
MAMBA = LinearConfig("mamba2", key_heads=2, value_heads=6, key_dim=8, value_dim=8)
GRANITE = replace(
    BASE,
    layers=5,
    rotary=(0,),
    layer_types=("linear", "full", "linear", "linear", "full"),
    linear=replace(MAMBA, value_heads=8),
    attention_multiplier=0.2,
    embedding_multiplier=3.0,
    residual_multiplier=0.5,
    logits_scaling=2.0,
    tied=True,
    moe=replace(MOE, softmax="after", shared_dim=40),
)
RELU = replace(
    SIGMOID, activation="relu2", shared_activation="relu2", renormalize=True, groups=1, top_groups=1
)
NEMOTRON = replace(
    BASE,
    layers=6,
    head_dim=16,
    rotary=(0,),
    layer_types=("linear", "moe", "full", "moe", "linear", "moe"),
    linear=MAMBA,
    moe=RELU,
)
PILOT = moe_pilot_14b()
MODELS = {
    "llama": replace(BASE, dense_layers=3, rope=LLAMA3, tied=True),
    "qwen2": replace(BASE, dense_layers=3, qkv_bias=True),
    "qwen3": replace(BASE, dense_layers=3, qk_norm="head", head_dim=16, rope=YARN),
    "mixtral": replace(BASE, moe=replace(MOE, softmax="after"), norm_eps=1e-5),
    "qwen3moe": replace(BASE, qk_norm="head", head_dim=16, moe=replace(MOE, renormalize=True)),
    "qwen2moe": replace(BASE, qkv_bias=True, moe=replace(WHOLE, shared_dim=40, shared_gate=True), tied=True),
    "olmoe": replace(BASE, kv_heads=4, qk_norm="full", moe=WHOLE),
    "granitemoe": replace(
        BASE,
        attention_multiplier=0.2,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        logits_scaling=2.0,
        moe=replace(MOE, softmax="after", shared_dim=40),
    ),
    "pilot": replace(
        PILOT,
        vocab=VOCAB,
        dim=32,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=8,
        rope=replace(PILOT.rope, max_seq=256),
        moe=replace(PILOT.moe, experts=4, ffn_dim=24, shared_dim=24 if PILOT.moe.shared_dim else 0),
    ),
    "gpt-oss": replace(
        BASE,
        head_dim=16,
        sinks=True,
        qkv_bias=True,
        o_bias=True,
        window=8,
        windowed=(1, 0),
        rope=replace(YARN, theta=150000.0),
        moe=replace(MOE, softmax="after", router_bias=True, bias=True, activation="clamped"),
    ),
    "dots1": replace(BASE, kv_heads=4, qk_norm="head", dense_layers=1, moe=SIGMOID),
    "glm4moe": replace(
        BASE,
        qkv_bias=True,
        qk_norm="head",
        dense_layers=1,
        rope=replace(ROPE, dim=4),
        moe=replace(SIGMOID, renormalize=True, groups=1, top_groups=1),
    ),
    "glm4moe, as solar": replace(BASE, head_dim=16, moe=replace(SIGMOID, renormalize=True), rope=YARN),
    "minimax-m2": replace(
        BASE,
        qk_norm="full",
        head_dim=16,
        rope=replace(ROPE, dim=8),
        moe=replace(MOE, score="sigmoid", choice_bias=True),
    ),
    "hunyuan-moe": replace(BASE, qk_norm="rotated", moe=replace(MOE, shared_dim=24)),
    "ernie4_5-moe": replace(
        BASE,
        rope=replace(ROPE, interleave=True),
        dense_layers=1,
        tied=True,
        moe=replace(MOE, shared_dim=48, choice_bias=True),
    ),
    "exaone-moe": replace(
        BASE,
        layers=5,
        qk_norm="head",
        dense_layers=1,
        window=6,
        windowed=(1, 1, 1, 0),
        rotary=(1, 1, 1, 0),
        moe=replace(SIGMOID, renormalize=True),
    ),
    "deepseek2": replace(
        BASE,
        attention="mla",
        kv_heads=4,
        dense_layers=1,
        mla=MLAConfig(q_rank=24, kv_rank=16, nope_dim=16, rope_dim=8, v_dim=12),
        rope=replace(YARN, mscale=0.7, mscale_all_dim=0.7),
        moe=replace(WHOLE, shared_dim=24, scaling=1.5),
    ),
    "deepseek2, sigmoid, groups": replace(
        BASE,
        attention="mla",
        kv_heads=4,
        dense_layers=1,
        mla=MLAConfig(q_rank=24, kv_rank=16, nope_dim=16, rope_dim=8, v_dim=12, interleave=False),
        rope=replace(YARN, mscale=1.0, mscale_all_dim=1.0),
        moe=replace(SIGMOID, renormalize=True),
    ),
}


HYBRID = replace(
    BASE,
    layers=4,
    head_dim=16,
    rope=replace(ROPE, dim=4),
    qk_norm="head",
    attention_gate=True,
    norm_offset=True,
    linear=LinearConfig("deltanet", key_heads=2, value_heads=6, key_dim=8, value_dim=8),
    moe=replace(MOE, shared_dim=24, shared_gate=True),
)
MODELS |= {
    "qwen3next": HYBRID,
    "granitehybrid": GRANITE,
    "granitehybrid, dense, rotary": replace(
        GRANITE, dense_layers=5, rotary=(1,), linear=replace(GRANITE.linear, key_heads=1), tied=False
    ),
    "nemotron_h_moe": NEMOTRON,
    "nemotron_h_moe, latent experts": replace(
        NEMOTRON, moe=replace(RELU, latent_dim=16, groups=4, top_groups=2)
    ),
}


def step_of(folder: Path, cfg: ModelConfig, seed: int = 0, **info: object) -> Path:
    """A step folder of a model with these settings."""
    model = Transformer(cfg)
    fill(model, seed)
    config = dict(model=asdict(cfg))
    checkpoints = Checkpoints(folder, keep=1, mode="sync", info=dict(config=config) | info)
    tensors = {f"model.{n}": p for n, p in model.state_dict().items()}
    checkpoints.save(1, tensors, dict(step=1, tokens=9), {})
    return folder / "step-1"


@torch.no_grad()
def fill(model: Transformer, seed: int) -> None:
    """Weights of numpy's RandomState, whose numbers are the same in all versions."""
    random = np.random.RandomState(seed)
    for name, p in model.state_dict().items():
        values = torch.from_numpy(random.standard_normal(p.shape).astype(np.float32))
        scale = 0.1 if p.dim() == 1 else 2 * p.shape[-1] ** -0.5
        offset = model.cfg.norm_offset and not name.endswith("attention.norm.weight")  # their factor is 1 + w
        p.copy_(values * scale + (1.0 if name.endswith("norm.weight") and not offset else 0.0))


@torch.no_grad()
def greedy(model: Transformer) -> tuple[np.ndarray, list[int]]:
    """Logits of the prompt [n, V], and the greedy tokens after it."""
    ids = list(PROMPT)
    first = None
    while len(ids) < len(PROMPT) + NEW:
        logits = model(torch.tensor([ids]))[0]
        first = logits if first is None else first
        ids.append(int(logits[-1].argmax()))
    assert first is not None
    return first.float().numpy(), ids[len(PROMPT) :]


# ---- types of tensors ----

WIDTHS = dict(dim=256, heads=8, kv_heads=2, head_dim=32, ffn_dim=256)
WIDE = replace(BASE, **WIDTHS)
SIXTEEN = replace(MOE, experts=16, ffn_dim=64, shared_dim=0)
EIGHT = replace(SIXTEEN, experts=8)
MIXED = {  # models that differ in what decides types: depth, experts, heads, widths, tied heads
    "qwen3moe": replace(WIDE, layers=17, qk_norm="head", moe=replace(SIXTEEN, renormalize=True)),
    "mixtral": replace(WIDE, layers=9, moe=replace(EIGHT, softmax="after"), norm_eps=1e-5),
    "olmoe": replace(WIDE, kv_heads=8, qk_norm="full", moe=replace(SIXTEEN, renormalize=False)),
    "granitemoe": replace(
        WIDE, tied=True, logits_scaling=2.0, moe=replace(SIXTEEN, ffn_dim=48, softmax="after", shared_dim=256)
    ),
    "gpt-oss": replace(MODELS["gpt-oss"], dim=288, layers=9, moe=replace(MODELS["gpt-oss"].moe, ffn_dim=288)),
    "deepseek2": replace(
        MODELS["deepseek2"],
        dim=256,
        layers=9,
        ffn_dim=256,
        mla=MLAConfig(q_rank=256, kv_rank=64, nope_dim=32, rope_dim=32, v_dim=32),
    ),
    "granitehybrid": replace(
        GRANITE,
        **WIDTHS,
        layers=10,
        linear=replace(MAMBA, value_heads=8, value_dim=32),
        moe=replace(SIXTEEN, softmax="after", shared_dim=256),
    ),
    "nemotron_h_moe": replace(
        NEMOTRON,
        **WIDTHS,
        layers=12,
        linear=replace(MAMBA, value_heads=8, value_dim=32),
        moe=replace(RELU, ffn_dim=256, shared_dim=256),
    ),
    "qwen2": replace(WIDE, layers=17, kv_heads=4, dense_layers=17, qkv_bias=True),
    "qwen2moe": replace(
        WIDE, qkv_bias=True, moe=replace(EIGHT, renormalize=False, shared_dim=256, shared_gate=True)
    ),
}
