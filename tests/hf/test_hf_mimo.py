"""MiMo-V2-Flash as it is published: what its config.json says in keys of its own must agree with the others.

next: tmoe/hf/architectures/mimo.py
"""

import pytest
from transformers import MiMoV2FlashConfig

from tmoe.config.check import ConfigError
from tmoe.hf.config import read_config
from tmoe.model.count import count_parameters

FULL = [i == 0 or i % 6 == 5 for i in range(48)]
PUBLISHED = dict(
    model_type="mimo_v2_flash",
    vocab_size=152576,
    hidden_size=4096,
    intermediate_size=16384,
    num_hidden_layers=48,
    num_attention_heads=64,
    num_key_value_heads=4,
    head_dim=192,
    v_head_dim=128,
    max_position_embeddings=262144,
    rope_theta=5000000,
    partial_rotary_factor=0.334,
    layernorm_epsilon=1e-5,
    attention_bias=False,
    attention_value_scale=0.707,
    hybrid_layer_pattern=[int(not full) for full in FULL],
    sliding_window=128,
    sliding_window_size=128,
    swa_rope_theta=10000,
    swa_num_attention_heads=64,
    swa_num_key_value_heads=8,
    swa_head_dim=192,
    swa_v_head_dim=128,
    add_swa_attention_sink_bias=True,
    add_full_attention_sink_bias=False,
    moe_layer_freq=[0] + [1] * 47,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=None,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    n_group=1,
    topk_group=1,
    routed_scaling_factor=None,
)


def test_the_published_config_is_read_as_transformers_reads_it():
    cfg = read_config(PUBLISHED)
    theirs = MiMoV2FlashConfig(**PUBLISHED)
    windows = [cfg.window_of(i) for i in range(48)]
    assert theirs.sliding_window == 129 and {*windows} == {0, 129}  # 128 before it, and itself
    assert [kind == "full_attention" for kind in theirs.layer_types] == FULL == [w == 0 for w in windows]
    assert [cfg.kv_heads_in(window) for window in windows] == [4 if full else 8 for full in FULL]
    assert [cfg.sinks_in(window) for window in windows] == [not full for full in FULL]
    bases = [theirs.rope_parameters[kind]["rope_theta"] for kind in theirs.layer_types]
    assert [cfg.rope_of(i).theta for i in range(48)] == bases
    assert [cfg.is_moe(i) for i in range(48)] == [kind == "sparse" for kind in theirs.mlp_layer_types]
    assert (cfg.rotary_dim, cfg.value_dim, cfg.value_multiplier, cfg.moe.scaling) == (64, 128, 0.707, 1.0)
    counts = count_parameters(cfg)
    assert round(counts.total / 1e9) == 309 and round(counts.active / 1e9) == 15  # as its card says


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hybrid_layer_pattern", [0, 1] * 24),
        ("moe_layer_freq", [1] * 48),
        ("layernorm_epsilon", 1e-6),
        ("rope_theta", 1e6),
        ("swa_rope_theta", 5e6),
        ("partial_rotary_factor", 0.5),
        ("swa_num_attention_heads", 32),
        ("swa_num_key_value_heads", 4),
        ("swa_head_dim", 128),
        ("swa_v_head_dim", 192),
        ("add_swa_attention_sink_bias", False),
        ("add_full_attention_sink_bias", True),
        ("n_shared_experts", 1),
    ],
)
def test_what_transformers_would_leave_unread_is_refused_by_name(key, value):
    with pytest.raises(ConfigError, match=rf"{key}=.*only .* is computed"):
        read_config(PUBLISHED | {key: value})


def test_more_key_heads_in_windows_than_heads_are_named():
    with pytest.raises(ConfigError, match="swa_num_key_value_heads=8: must divide num_attention_heads=4"):
        read_config(
            {k: v for k, v in PUBLISHED.items() if not k.startswith("swa_num")} | dict(num_attention_heads=4)
        )
