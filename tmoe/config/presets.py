"""The presets: published models' shapes, and one small enough for a laptop."""

import functools
from collections.abc import Mapping
from types import MappingProxyType

from tmoe.config.linear_settings import LayerType, LinearConfig
from tmoe.config.model import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from tmoe.config.run import Config, DataConfig, OptimConfig, TrainConfig


@functools.cache
def presets() -> Mapping[str, Config]:
    """Every preset: name -> Config.

    The balancing loss is per sequence in all presets, so that no layout changes the mathematics.
    """
    found = {
        "tiny": tiny(),
        "moe-pilot-14b": pretrain(moe_pilot_14b()),
        "mixtral-8x7b": pretrain(mixtral_8x7b()),
        "qwen3-30b-a3b": pretrain(qwen3_30b_a3b()),
        "olmoe-1b-7b": pretrain(olmoe_1b_7b(), lr=4e-4),
        "qwen2-57b-a14b": pretrain(qwen2_57b_a14b()),
        "granite-3b-a800m": pretrain(granite_3b_a800m()),
        "gpt-oss-20b": pretrain(gpt_oss(layers=24, experts=32)),
        "gpt-oss-120b": pretrain(gpt_oss(layers=36, experts=128)),
        "deepseek-v2-lite": pretrain(deepseek_v2_lite(), lr=4.2e-4),
        "deepseek-v3": pretrain(deepseek_v3(), lr=2.2e-4),
        "kimi-k2": pretrain(kimi_k2(), lr=2e-4),
        "glm-4.7-flash": pretrain(glm_4_7_flash()),
        "qwen3-next-80b-a3b": pretrain(qwen3_next_80b_a3b()),
        "qwen3.5-35b-a3b": pretrain(qwen3_5_35b_a3b()),
        "granite-4.0-h-tiny": pretrain(granite_4_h_tiny()),
        "granite-4.0-h-small": pretrain(granite_4_h_small()),
        "nemotron-3-nano-30b-a3b": pretrain(nemotron_3_nano_30b_a3b()),
    }
    return MappingProxyType(found)


def tiny() -> Config:
    """3.4M parameters, 1.2M active per byte; learns Python in about two minutes on two CPU cores."""
    model = ModelConfig(
        vocab=256,
        dim=192,
        layers=4,
        heads=6,
        kv_heads=2,
        head_dim=32,
        qk_norm="head",
        init_std=0.05,
        rope=RopeConfig(max_seq=1024),
        moe=MoEConfig(experts=8, top_k=2, ffn_dim=160),
    )
    return Config(
        out="runs/tiny",
        steps=320,
        model=model,
        train=TrainConfig(batch=8, seq=128, dtype="fp32", eval_every=160, eval_batches=16),
        optim=OptimConfig(lr=5e-3, warmup=20, schedule="wsd", decay_fraction=0.4, min_lr=0.05),
    )


def pretrain(model: ModelConfig, lr: float = 3e-4) -> Config:
    optim = OptimConfig(lr=lr, warmup=100)
    seq = min(4096, model.longest)
    return Config(model=model, train=TrainConfig(batch=4, seq=seq), optim=optim, data=DataConfig())


def moe_pilot_14b() -> ModelConfig:
    """14.33B parameters, 2.65B active (MoE-Pilot's card)."""
    return ModelConfig(
        vocab=151936,
        dim=2048,
        layers=45,
        heads=16,
        kv_heads=4,
        head_dim=128,
        moe=MoEConfig(experts=32, top_k=2, ffn_dim=1408, shared_dim=2 * 1408),
    )


def mixtral_8x7b() -> ModelConfig:
    """46.7B parameters, 12.9B active (Jiang et al. 2024)."""
    return ModelConfig(
        vocab=32000,
        dim=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        rope=RopeConfig(theta=1e6, max_seq=32768),
        moe=MoEConfig(experts=8, top_k=2, ffn_dim=14336, softmax="after", balance_coeff=0.02),
    )


def qwen3_30b_a3b() -> ModelConfig:
    """30.5B parameters, 3.3B active (Qwen team 2025)."""
    return ModelConfig(
        vocab=151936,
        dim=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        qk_norm="head",
        rope=RopeConfig(theta=1e6, max_seq=40960),
        moe=MoEConfig(experts=128, top_k=8, ffn_dim=768, balance_coeff=0.001),
    )


def olmoe_1b_7b() -> ModelConfig:
    """6.9B parameters, 1.3B active (Muennighoff et al. 2024)."""
    return ModelConfig(
        vocab=50304,
        dim=2048,
        layers=16,
        heads=16,
        kv_heads=16,
        head_dim=128,
        qk_norm="full",
        norm_eps=1e-5,
        moe=MoEConfig(experts=64, top_k=8, ffn_dim=1024, renormalize=False),
    )


def qwen2_57b_a14b() -> ModelConfig:
    """57.4B parameters, 14.2B active (Qwen team 2024)."""
    return ModelConfig(
        vocab=151936,
        dim=3584,
        layers=28,
        heads=28,
        kv_heads=4,
        head_dim=128,
        qkv_bias=True,
        rope=RopeConfig(theta=1e6, max_seq=32768),
        moe=MoEConfig(
            experts=64,
            top_k=8,
            ffn_dim=2560,
            shared_dim=20480,
            shared_gate=True,
            renormalize=False,
            balance_coeff=0.001,
        ),
    )


def granite_3b_a800m() -> ModelConfig:
    """3.3B parameters, 0.9B active (IBM 2024, Granite 3.0)."""
    return ModelConfig(
        vocab=49155,
        dim=1536,
        layers=32,
        heads=24,
        kv_heads=8,
        head_dim=64,
        tied=True,
        embedding_multiplier=12.0,
        attention_multiplier=0.015625,
        residual_multiplier=0.22,
        logits_scaling=6.0,
        moe=MoEConfig(experts=40, top_k=8, ffn_dim=512, softmax="after"),
    )


def gpt_oss(layers: int, experts: int) -> ModelConfig:
    """20.9B parameters, 3.6B active, or 116.8B, 5.1B active (OpenAI 2025).

    OpenAI counts the active parameters without the embedding.
    """
    return ModelConfig(
        vocab=201088,
        dim=2880,
        layers=layers,
        heads=64,
        kv_heads=8,
        head_dim=64,
        qkv_bias=True,
        o_bias=True,
        sinks=True,
        window=128,
        windowed=(1, 0),
        norm_eps=1e-5,
        rope=RopeConfig(
            theta=150000.0, max_seq=131072, scaling="yarn", factor=32.0, original_max_seq=4096, truncate=False
        ),
        moe=MoEConfig(
            experts=experts,
            top_k=4,
            ffn_dim=2880,
            softmax="after",
            router_bias=True,
            bias=True,
            activation="clamped",
        ),
    )


def deepseek_v2_lite() -> ModelConfig:
    """15.7B parameters, 2.7B active, 2.4B without the embedding (DeepSeek-AI 2024, appendix B)."""
    return ModelConfig(
        vocab=102400,
        dim=2048,
        layers=27,
        heads=16,
        attention="mla",
        dense_layers=1,
        ffn_dim=10944,
        mla=MLAConfig(kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
        rope=deepseek_rope(mscale=0.707),
        moe=MoEConfig(
            experts=64,
            top_k=6,
            ffn_dim=1408,
            shared_dim=2 * 1408,
            renormalize=False,
            balance_coeff=0.001,
            z_coeff=0.0,
        ),
    )


def deepseek_v3() -> ModelConfig:
    """671B parameters, 37B active (DeepSeek-AI 2024), without the layer that predicts a further token."""
    return ModelConfig(
        vocab=129280,
        dim=7168,
        layers=61,
        heads=128,
        attention="mla",
        dense_layers=3,
        ffn_dim=18432,
        mla=MLAConfig(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
        rope=deepseek_rope(mscale=1.0),
        moe=MoEConfig(
            experts=256,
            top_k=8,
            ffn_dim=2048,
            shared_dim=2048,
            score="sigmoid",
            scaling=2.5,
            groups=8,
            top_groups=4,
            group_score="top2",
            choice_bias=True,
            balance_coeff=0.0001,
            z_coeff=0.0,
        ),
    )


def kimi_k2() -> ModelConfig:
    """1.03T parameters, 33B active (Moonshot AI 2025): DeepSeek-V3 with more experts and fewer heads."""
    return ModelConfig(
        vocab=163840,
        dim=7168,
        layers=61,
        heads=64,
        attention="mla",
        dense_layers=1,
        ffn_dim=18432,
        mla=MLAConfig(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
        rope=RopeConfig(
            theta=50000.0,
            max_seq=131072,
            scaling="yarn",
            factor=32.0,
            original_max_seq=4096,
            beta_fast=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
        moe=MoEConfig(
            experts=384,
            top_k=8,
            ffn_dim=2048,
            shared_dim=2048,
            score="sigmoid",
            scaling=2.827,
            choice_bias=True,
            balance_coeff=0.001,
            z_coeff=0.0,
        ),
    )


def glm_4_7_flash() -> ModelConfig:
    """29.9B parameters, 3.9B active (Z.ai 2026), without the layer that predicts a further token."""
    return ModelConfig(
        vocab=154880,
        dim=2048,
        layers=47,
        heads=20,
        attention="mla",
        dense_layers=1,
        ffn_dim=10240,
        norm_eps=1e-5,
        mla=MLAConfig(q_rank=768, kv_rank=512, nope_dim=192, rope_dim=64, v_dim=256),
        rope=RopeConfig(theta=1e6, max_seq=202752),
        moe=MoEConfig(
            experts=64,
            top_k=4,
            ffn_dim=1536,
            shared_dim=1536,
            score="sigmoid",
            scaling=1.8,
            choice_bias=True,
            balance_coeff=0.001,
            z_coeff=0.0,
        ),
    )


def qwen3_next(vocab: int, layers: int, moe: MoEConfig, rope: RopeConfig) -> ModelConfig:
    """The common settings of Qwen3-Next and Qwen3.5-MoE: three of four blocks are linear (Gated DeltaNet)."""
    return ModelConfig(
        vocab=vocab,
        dim=2048,
        layers=layers,
        heads=16,
        kv_heads=2,
        head_dim=256,
        qk_norm="head",
        attention_gate=True,
        norm_offset=True,
        linear=LinearConfig("deltanet", every=4),
        rope=rope,
        moe=moe,
    )


def qwen3_next_80b_a3b() -> ModelConfig:
    """79.7B parameters, 3.9B active (Qwen team 2025), without the block that predicts a further token."""
    moe = MoEConfig(experts=512, top_k=10, ffn_dim=512, shared_dim=512, shared_gate=True, balance_coeff=0.001)
    return qwen3_next(151936, 48, moe, RopeConfig(theta=1e7, max_seq=262144, dim=64))


def qwen3_5_35b_a3b() -> ModelConfig:
    """34.7B parameters, 3.5B active (Qwen team 2026): the text part alone."""
    moe = MoEConfig(experts=256, top_k=8, ffn_dim=512, shared_dim=512, shared_gate=True, balance_coeff=0.001)
    return qwen3_next(248320, 40, moe, RopeConfig(theta=1e7, max_seq=262144, dim=64))


def granite_4_h(dim: int, heads: int, kv_heads: int, logits_scaling: float, moe: MoEConfig) -> ModelConfig:
    """The common settings of Granite-4.0-H: Mamba-2 in nine of ten blocks, no positions, experts in all."""
    return ModelConfig(
        vocab=100352,
        dim=dim,
        layers=40,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        tied=True,
        norm_eps=1e-5,
        embedding_multiplier=12.0,
        attention_multiplier=0.0078125,
        residual_multiplier=0.22,
        logits_scaling=logits_scaling,
        init_std=0.1,
        layer_types=("linear",) * 5 + ("full",) + ("linear",) * 4,
        linear=LinearConfig("mamba2", key_heads=1, value_heads=2 * dim // 64, key_dim=128, value_dim=64),
        rotary=(0,),
        rope=RopeConfig(max_seq=131072),
        moe=moe,
    )


def granite_4_h_tiny() -> ModelConfig:
    """6.9B parameters, 1.5B active (IBM 2025, Granite-4.0-H-Tiny)."""
    moe = MoEConfig(experts=64, top_k=6, ffn_dim=512, shared_dim=1024, softmax="after")
    return granite_4_h(1536, 12, 4, 6.0, moe)


def granite_4_h_small() -> ModelConfig:
    """32.2B parameters, 8.8B active (IBM 2025, Granite-4.0-H-Small)."""
    moe = MoEConfig(experts=72, top_k=10, ffn_dim=768, shared_dim=1536, softmax="after")
    return granite_4_h(4096, 32, 8, 16.0, moe)


def nemotron_3_nano_30b_a3b() -> ModelConfig:
    """31.6B parameters, 3.6B active (NVIDIA 2025): each block is Mamba-2, experts or attention."""
    letters: dict[str, LayerType] = {"M": "linear", "E": "moe", "*": "full"}
    pattern = "MEMEM*" + "EMEMEM*" * 4 + "EMEMEMEM*" + "EMEMEMEME"
    return ModelConfig(
        vocab=131072,
        dim=2688,
        layers=len(pattern),
        heads=32,
        kv_heads=2,
        head_dim=128,
        norm_eps=1e-5,
        ffn_dim=1856,
        layer_types=tuple(letters[letter] for letter in pattern),
        linear=LinearConfig(
            "mamba2", key_heads=8, value_heads=64, key_dim=128, value_dim=64, least_step=0.001
        ),
        rotary=(0,),
        rope=RopeConfig(max_seq=262144),
        moe=MoEConfig(
            experts=128,
            top_k=6,
            ffn_dim=1856,
            shared_dim=3712,
            activation="relu2",
            shared_activation="relu2",
            score="sigmoid",
            scaling=2.5,
            choice_bias=True,
            balance_coeff=0.0001,
            z_coeff=0.0,
        ),
    )


def deepseek_rope(mscale: float) -> RopeConfig:
    """DeepSeek's published RoPE, stretched from 4096 to 163840 tokens."""
    return RopeConfig(
        max_seq=163840,
        scaling="yarn",
        factor=40.0,
        original_max_seq=4096,
        mscale=mscale,
        mscale_all_dim=mscale,
    )
