"""Every family with experts in the installed transformers, each as a tiny random model.

A family is a folder of transformers whose modeling file marks a class of experts, or defines such a class
without a mark. Its configuration is reduced by the names of its keys; SPECIAL has further values that a
family needs.

next: tests/hf/test_hf_families.py
"""

import importlib
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForTokenClassification

MODELS = Path(transformers.__file__).parent / "models"
EXPERTS = re.compile(r"use_experts_implementation|^class \w*(?:Experts|ParallelExperts|CDMoE)\(", re.M)
FAMILIES = sorted(
    path.parent.name for path in MODELS.glob("*/modeling_*.py") if EXPERTS.search(path.read_text())
)
# name of a key -> its value in every family that has the key
SIZES: dict[str, Any] = dict.fromkeys(
    "num_experts num_local_experts n_routed_experts moe_num_experts num_dense_experts".split(), 4
)
SIZES |= dict.fromkeys(
    "num_experts_per_tok num_experts_per_token moe_k moe_topk top_k_experts num_hidden_layers "
    "num_key_value_heads linear_num_key_heads swa_num_key_value_heads index_n_heads attn_layer_period "
    "expert_layer_period layer_group_size index_topk_blocks hc_mult hc_count mamba_n_heads o_groups".split(),
    2,
)
SIZES |= dict.fromkeys(
    "n_group topk_group num_expert_group n_groups n_shared_experts num_shared_experts mamba_n_groups "
    "moe_num_shared_experts first_k_dense_replace num_dense_layers moe_layer_start_index moe_layer_end_index "
    "moe_layer_interval attn_layer_offset expert_layer_offset max_window_layers".split(),
    1,
)
SIZES |= dict.fromkeys("num_attention_heads swa_num_attention_heads linear_num_heads".split(), 4)
SIZES |= dict.fromkeys("linear_num_value_heads mamba_num_heads".split(), 4)
SIZES |= dict.fromkeys("hidden_size vision_dim projection_dim out_hidden_size".split(), 32)
SIZES |= dict.fromkeys(
    "head_dim swa_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim "
    "linear_head_dim index_head_dim mamba_d_head mamba_head_dim q_lora_rank kv_lora_rank o_lora_rank "
    "mamba_d_state ssm_state_size mamba_dt_rank router_hidden_size d_rel".split(),
    16,
)
SIZES |= dict.fromkeys(
    "qk_nope_head_dim chunk_size mamba_chunk_size block_size sliding_window sliding_window_size index_topk "
    "index_block_size gated_norm_rank hc_lowrank rotary_dim hidden_size_per_layer_input".split(),
    8,
)
SIZES |= dict.fromkeys(
    "intermediate_size dense_intermediate_size moe_intermediate_size moe_hidden_size "
    "shared_expert_intermediate_size shared_experts_intermediate_size moe_shared_expert_intermediate_size "
    "shared_intermediate_size".split(),
    12,
)
SIZES |= dict(vocab_size=64, unpadded_vocab_size=64, vocab_size_per_layer_input=64, qk_head_dim=24)
SIZES |= dict(max_position_embeddings=128, initializer_range=0.15, pad_token_id=0, bos_token_id=1)
SIZES |= dict(router_jitter_noise=0.0, input_jitter_noise=0.0, rel_extent=64, num_nextn_predict_layers=0)
SIZES |= dict(mamba_ssm_cache_dtype="float32", enable_moe_block=True)
# keys of SIZES that are set even if a family's default is None
ABSENT = (
    "enable_moe_block num_experts top_k_experts moe_intermediate_size num_experts_per_tok n_group topk_group "
)
ABSENT += "n_routed_experts n_shared_experts head_dim"
# families whose model_type differs from the folder's name
OTHER_NAMES = dict(inkling="inkling_mm_model", nllb_moe="nllb-moe")
# family -> keys in addition to SIZES, or instead of them
SPECIAL: dict[str, dict[str, Any]] = {
    "granitemoehybrid": dict(mamba_n_heads=4, layer_types=["linear_attention", "full_attention"]),
    "kimi_linear": dict(layer_types=["linear_attention", "full_attention"]),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "hunyuan_v1_moe": dict(rope_parameters=dict(rope_type="default", rope_theta=1e4)),
    "mistral4": dict(rope_parameters=dict(partial_rotary_factor=1.0)),
    "glm4v_moe": dict(rope_parameters=dict(mrope_section=[1, 1, 0])),
    "dbrx": dict(
        d_model=32,
        n_heads=4,
        n_layers=1,
        max_seq_len=64,
        attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=1e4),
        ffn_config=dict(ffn_hidden_size=16, moe_num_experts=4, moe_top_k=2),
    ),
    "nllb_moe": dict(
        d_model=16,
        encoder_layers=4,
        decoder_layers=4,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
    ),
    "switch_transformers": dict(
        d_model=16, d_kv=8, d_ff=16, num_layers=2, num_decoder_layers=2, num_heads=2, expert_capacity=8
    ),
    "glm5_next": dict(index_kpool=4, qk_rope_head_dim=0, layer_types=["linear_attention", "full_attention"]),
    "qwen4_exp": dict(
        layer_types=["linear_attention", "full_attention"],
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=8,
        indexer_compress_ratio=4,
    ),
    "unlimited_ocr": dict(num_key_value_heads=4),
    "zaya": dict(num_experts_per_tok=1),
    "longcat_flash": dict(
        num_layers=1, num_hidden_layers=2, ffn_hidden_size=12, expert_ffn_hidden_size=12, zero_expert_num=1
    ),
    "flint": dict(mlp_only_layers=[]),
    "doge": dict(is_moe=True),
    "ernie4_5_vl_moe": dict(moe_intermediate_size=[12, 12], rope_parameters=dict(mrope_section=[1, 1, 2])),
    "deepseek_v4": dict(
        head_dim=32, partial_rotary_factor=0.5, swiglu_limit=0.5, mlp_layer_types=["hash_moe", "moe"]
    ),
    "gpt_oss": dict(swiglu_limit=0.5),
    "nemotron_h": dict(num_hidden_layers=4),
}
# family -> inputs of its forward besides tokens; ERNIE's second kind of experts is for images
BESIDE = {"ernie4_5_vl_moe": dict(moe_mm_token_type_ids=(torch.arange(20) % 3 == 0).view(2, 10).int())}


def config_of(family: str) -> Any:
    """The tiny configuration of a family's text model."""
    kind = CONFIG_MAPPING[OTHER_NAMES.get(family, family)]()
    text = type(kind if family == "dbrx" else kind.get_text_config())  # dbrx's text config is its attention
    has = text().to_dict()
    sizes = {k: v for k, v in SIZES.items() if has.get(k) is not None or (k in ABSENT.split() and k in has)}
    if "kv_lora_rank" in sizes or family == "dots3_note":  # latent attention: as many key heads as queries
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if "mlp_layer_types" in has:
        sizes["mlp_layer_types"] = ["dense", "sparse"]
    rope = has.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        sizes["rope_parameters"] = rope | dict(mrope_section=[4, 2, 2])
    if {"linear_attention", "full_attention"} <= set(has.get("layer_types") or ()):
        sizes["layer_types"] = ["linear_attention", "full_attention"]
    special = dict(SPECIAL.get(family, {}))
    if "rope_parameters" in special:
        special["rope_parameters"] = (rope or {}) | special["rope_parameters"]
    sizes |= special
    how = dict(attn_implementation="eager", experts_implementation="eager", eos_token_id=None)
    return text(**sizes, **how)


def build(family: str) -> Any:
    """A random model with logits if transformers has such a class for it, else the bare text model."""
    torch.manual_seed(0)
    config = config_of(family)
    for auto in (AutoModelForCausalLM, AutoModelForTokenClassification, AutoModel):
        if type(config) in auto._model_mapping:
            return auto.from_config(config, dtype=torch.float32).eval()
    file = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    models = (m for m in vars(file).values() if getattr(m, "config_class", None) is type(config))
    model = next(model for model in models if "forward" in vars(model))
    return model._from_config(config, dtype=torch.float32).eval()
