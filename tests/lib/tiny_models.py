"""A tiny model with one part of each kind, which tests of several folders train."""

from tmoe.config.model import ModelConfig, MoEConfig, RopeConfig

# A training run of the model: number of steps, sequences per step, tokens per sequence.
STEPS, SEQUENCES, SEQ = 8, 8, 16
# One dense layer, then two of eight experts with a gated shared expert, a balancing loss and a z-loss.
MODEL = ModelConfig(
    vocab=64,
    dim=32,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    qk_norm="head",
    dense_layers=1,
    ffn_dim=48,
    rope=RopeConfig(max_seq=SEQ),
    moe=MoEConfig(
        experts=8, top_k=3, ffn_dim=16, shared_dim=16, shared_gate=True, balance_coeff=0.1, z_coeff=0.01
    ),
)
