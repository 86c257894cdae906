"""The presets: published models' shapes, and one small enough for a laptop."""

from tmoe.config import Config, DataConfig, ModelConfig, MoEConfig, OptimConfig, RopeConfig, TrainConfig


def presets() -> dict[str, Config]:
    """Name to Config. The balancing loss is per sequence everywhere, so that no layout changes the mathematics."""
    return {
        "tiny": tiny(),
        "moe-pilot-14b": pretrain(moe_pilot_14b()),
        "mixtral-8x7b": pretrain(mixtral_8x7b()),
        "qwen3-30b-a3b": pretrain(qwen3_30b_a3b()),
        "olmoe-1b-7b": pretrain(olmoe_1b_7b(), lr=4e-4),
    }


def tiny() -> Config:
    """3.4M parameters, of which a byte passes 1.2M; learns Python in about two minutes on two CPU cores."""
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
    return Config(model=model, train=TrainConfig(batch=4, seq=4096), optim=optim, data=DataConfig())


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
