"""Hugging Face's architectures, one table entry each: tensors and how they join, fields of config.json.

A new architecture is one entry of ARCHITECTURES; docs/huggingface.md shows it.

next: hf/config.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tmoe.config.model import ModelConfig
from tmoe.hf.rules import HF, NO_NULL, Architecture, Field, Part, Rule, Windows

# ---- tensors ----


A = "model.layers.{layer}"  # theirs
B = "blocks.{layer}"  # ours
HELD = f"{A}.mlp.experts"


def one(ours: str, theirs: str) -> Rule:
    """One of our tensors that is one of theirs."""
    return Rule(ours, (Part(theirs),))


def swiglu(
    ours: str, theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple:
    """Gate rows above up rows, and down. `theirs` is the module with the three projections, or {expert}'s."""
    weight = "" if ours.endswith("experts") else ".weight"  # parameters of Experts, Linear layers elsewhere
    both = (Part(f"{theirs}.{gate}.weight"), Part(f"{theirs}.{up}.weight"))
    return Rule(f"{ours}.gate_up{weight}", both), one(f"{ours}.down{weight}", f"{theirs}.{down}.weight")


def also(rule: Rule, held: str) -> Rule:
    """The rule of a tensor that transformers 5 holds whole, as tmoe does, under the name `held`."""
    return rule._replace(held=(Part(held),))


def experts(
    theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Rule, Rule]:
    """The experts' rules: one by one in the module `theirs`, as published, or stacked.

    Stacked they are gate_up_proj [E, 2F, D] and down_proj [E, D, F].
    """
    gate_up, downs = swiglu(f"{B}.moe.experts", f"{theirs}.{{expert}}", gate, up, down)
    return also(gate_up, f"{HELD}.gate_up_proj"), also(downs, f"{HELD}.down_proj")


def qkv(kind: str) -> Rule:
    """Their three projections, which are one product in tmoe. kind: weight or bias."""
    heads = dict(q=lambda cfg: cfg.heads, k=lambda cfg: cfg.kv_heads, v=lambda cfg: cfg.kv_heads)
    parts = (
        Part(f"{A}.self_attn.{n}_proj.{kind}", lambda cfg, n=n: heads[n](cfg) * cfg.head_dim) for n in heads
    )
    return Rule(f"{B}.attention.qkv.{kind}", tuple(parts))


DECODER = (
    one("embedding.weight", "model.embed_tokens.weight"),
    one("norm.weight", "model.norm.weight"),
    one("head.weight", "lm_head.weight"),
    one(f"{B}.attention_norm.weight", f"{A}.input_layernorm.weight"),
    one(f"{B}.ffn_norm.weight", f"{A}.post_attention_layernorm.weight"),
    *(qkv(kind) for kind in ("weight", "bias")),
    *(one(f"{B}.attention.o.{kind}", f"{A}.self_attn.o_proj.{kind}") for kind in ("weight", "bias")),
)
QK_NORM = tuple(one(f"{B}.attention.{n}_norm.weight", f"{A}.self_attn.{n}_norm.weight") for n in "qk")
DENSE = swiglu(f"{B}.ffn", f"{A}.mlp")
MOE = (
    one(f"{B}.moe.router.weight", f"{A}.mlp.gate.weight"),
    *experts(f"{A}.mlp.experts"),
)
SPARSE = f"{A}.block_sparse_moe"
MIXTRAL_MOE = (
    also(one(f"{B}.moe.router.weight", f"{SPARSE}.gate.weight"), f"{A}.mlp.gate.weight"),
    *experts(f"{SPARSE}.experts", "w1", "w3", "w2"),
)
QWEN_SHARED = (
    *swiglu(f"{B}.moe.shared", f"{A}.mlp.shared_expert"),
    one(f"{B}.moe.shared_gate.weight", f"{A}.mlp.shared_expert_gate.weight"),
)
GRANITE_MOE = (  # stacked as tmoe's are
    also(one(f"{B}.moe.router.weight", f"{SPARSE}.router.layer.weight"), f"{SPARSE}.router.weight"),
    also(one(f"{B}.moe.experts.gate_up", f"{SPARSE}.input_linear.weight"), f"{SPARSE}.experts.gate_up_proj"),
    also(one(f"{B}.moe.experts.down", f"{SPARSE}.output_linear.weight"), f"{SPARSE}.experts.down_proj"),
)


def query_rows(cfg: ModelConfig) -> int:
    """Rows of q_proj: none where queries have a latent."""
    return 0 if cfg.mla.q_rank else cfg.heads * (cfg.mla.nope_dim + cfg.mla.rope_dim)


QKV_A = (  # q_a_proj where queries have a latent, else q_proj
    Part(f"{A}.self_attn.q_proj.weight", query_rows),
    Part(f"{A}.self_attn.q_a_proj.weight", lambda cfg: cfg.mla.q_rank),
    Part(f"{A}.self_attn.kv_a_proj_with_mqa.weight", lambda cfg: cfg.mla.kv_rank + cfg.mla.rope_dim),
)
LATENT = (
    Rule(f"{B}.attention.qkv_a.weight", QKV_A),
    *(one(f"{B}.attention.{n}_norm.weight", f"{A}.self_attn.{n}_a_layernorm.weight") for n in ("q", "kv")),
    *(one(f"{B}.attention.{n}_b.weight", f"{A}.self_attn.{n}_b_proj.weight") for n in ("q", "kv")),
)
DEEPSEEK = (
    *DECODER,
    *LATENT,
    *DENSE,
    *MOE,
    *swiglu(f"{B}.moe.shared", f"{A}.mlp.shared_experts"),
    one(f"{B}.moe.router.choice_bias", f"{A}.mlp.gate.e_score_correction_bias"),
)


def woven(theirs: str, transposed: bool = False) -> tuple[Part, Part]:
    """Parts of a tensor whose rows take turns: gate, up, gate, up. The even rows are the gate's."""
    return Part(theirs, None, transposed, 2, 0), Part(theirs, None, transposed, 2, 1)


GPT_OSS = (  # weights for x W, where tmoe and the others have W x
    one(f"{B}.attention.sinks", f"{A}.self_attn.sinks"),
    *(one(f"{B}.moe.router.{kind}", f"{A}.mlp.router.{kind}") for kind in ("weight", "bias")),
    Rule(f"{B}.moe.experts.gate_up", woven(f"{A}.mlp.experts.gate_up_proj", transposed=True)),
    Rule(f"{B}.moe.experts.gate_up_bias", woven(f"{A}.mlp.experts.gate_up_proj_bias")),
    Rule(f"{B}.moe.experts.down", (Part(f"{A}.mlp.experts.down_proj", transposed=True),)),
    one(f"{B}.moe.experts.down_bias", f"{A}.mlp.experts.down_proj_bias"),
)


# ---- settings ----


# A function of the other keys gets those that are not null. Its KeyError names the key that is missing.


def last_full_layer(hf: HF) -> int:
    return hf.get("max_window_layers", 28)


def width_of_head(hf: HF) -> int:
    # Zero heads are refused together with the other settings.
    return hf["hidden_size"] // (hf["num_attention_heads"] or 1)


def all_heads(hf: HF) -> int:
    return hf["num_attention_heads"]


SIZES = (
    Field("vocab", ("vocab_size",)),
    Field("dim", ("hidden_size",)),
    Field("layers", ("num_hidden_layers",)),
    Field("heads", ("num_attention_heads",)),
    Field("kv_heads", ("num_key_value_heads",), all_heads, all_heads),
    Field("norm_eps", ("rms_norm_eps",), 1e-6),
    Field("tied", ("tie_word_embeddings",), False),
    Field("init_std", ("initializer_range",), 0.02),
)
NORM_EPS = Field("norm_eps", ("rms_norm_eps",), 1e-5)  # goes behind SIZES, whose default it replaces
HEAD_DIM = Field("head_dim", ("head_dim",), width_of_head, width_of_head)
SAID_HEAD_DIM = HEAD_DIM._replace(null=NO_NULL)
FFN = Field("ffn_dim", ("intermediate_size",))
EXPERT_FFN = Field("moe.ffn_dim", ("intermediate_size",))
# Two names of one setting, where the class says so.
EXPERTS = Field("moe.experts", ("num_experts", "num_local_experts"))
LOCAL_EXPERTS = EXPERTS._replace(keys=("num_local_experts", "num_experts"))
TOP_K = Field("moe.top_k", ("num_experts_per_tok",))
RENORMALIZE = Field("moe.renormalize", ("norm_topk_prob",), False)
AUXILIARY = Field("moe.balance_coeff", ("router_aux_loss_coef",), 0.001)
BIASES = tuple(Field(f"{part}_bias", ("attention_bias",), False) for part in ("qkv", "o"))
CLAMPED = (1.702, 7.0)  # alpha and limit of the clamped SwiGLU, the only ones that the op computes


def key_heads(default: int, null: Any = NO_NULL) -> Field:
    """The field goes behind SIZES, whose default it replaces."""
    return Field("kv_heads", ("num_key_value_heads",), default, null)


DEEPSEEK_SIZES = (
    *SIZES,
    Field("mla.q_rank", ("q_lora_rank",), 1536, 0),
    Field("mla.kv_rank", ("kv_lora_rank",)),
    Field("mla.nope_dim", ("qk_nope_head_dim",)),
    Field("mla.rope_dim", ("qk_rope_head_dim",)),
    Field("mla.v_dim", ("v_head_dim",)),
    FFN,
    EXPERT_FFN._replace(keys=("moe_intermediate_size",)),
    TOP_K,
    AUXILIARY._replace(keys=("aux_loss_alpha",), null=0.001),
)


def shared_width(default: int) -> Field:
    """Summed width of the shared experts. The config gives their number."""
    number = "n_shared_experts"
    return Field("moe.shared_dim", (), lambda hf: hf["moe_intermediate_size"] * hf.get(number, default))


def v2_groups(hf: HF) -> bool:
    # transformers' class takes greedy where the key is missing.
    return hf.get("topk_method") == "group_limited_greedy"


def deepseek_keys(cfg: ModelConfig) -> HF:
    """Keys that DeepSeek's config.json needs beside those of its fields.

    Where num_key_value_heads is less than all heads, transformers repeats keys and values. It knows no
    moe_layer_freq but 1.
    """
    return dict(
        q_lora_rank=cfg.mla.q_rank or None,
        num_key_value_heads=cfg.heads,
        n_shared_experts=cfg.moe.shared_dim // cfg.moe.ffn_dim,
        moe_layer_freq=1,
    )


def v2_keys(cfg: ModelConfig) -> HF:
    method = "greedy" if cfg.moe.groups == 1 else "group_limited_greedy"
    return deepseek_keys(cfg) | dict(
        topk_method=method, n_group=cfg.moe.groups, topk_group=cfg.moe.top_groups
    )


PLAIN = dict(hidden_act="silu", quantization_config=None, per_layer_config=None)
WINDOW_KEYS = ("use_sliding_window", "max_window_layers")

ARCHITECTURES = (
    Architecture(
        "llama",
        "LlamaForCausalLM",
        DECODER + DENSE,
        (*SIZES, *BIASES, HEAD_DIM, FFN),
        ours={},
        theirs=PLAIN | dict(mlp_bias=False),
    ),
    Architecture(
        "qwen3",
        "Qwen3ForCausalLM",
        DECODER + QK_NORM + DENSE,
        (*SIZES, key_heads(32, all_heads), *BIASES, SAID_HEAD_DIM._replace(default=128), FFN),
        ours=dict(qk_norm="head"),
        theirs=PLAIN,
        windows=Windows(
            ("sliding_window", "use_sliding_window", "layer_types"),
            lambda hf, layer: layer >= last_full_layer(hf),
            4096,
        ),
        no_null=WINDOW_KEYS,
    ),
    Architecture(
        "mixtral",
        "MixtralForCausalLM",
        DECODER + MIXTRAL_MOE,
        (
            *SIZES,
            NORM_EPS,
            key_heads(8),
            HEAD_DIM,
            EXPERT_FFN,
            LOCAL_EXPERTS,
            TOP_K,
            AUXILIARY,
        ),
        ours={"moe.softmax": "after"},
        theirs=PLAIN | dict(router_jitter_noise=0.0),
        layers="moe",
        theta=1e6,
        windows=Windows(("sliding_window",), lambda hf, layer: True),
    ),
    Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        DECODER + DENSE + MOE + QWEN_SHARED,
        (
            *SIZES,
            key_heads(16),
            BIASES[0]._replace(keys=("qkv_bias",), default=True),
            SAID_HEAD_DIM,
            FFN,
            EXPERT_FFN._replace(keys=("moe_intermediate_size",)),
            Field("moe.shared_dim", ("shared_expert_intermediate_size",), 5632),
            EXPERTS._replace(keys=("num_experts",)),
            TOP_K,
            RENORMALIZE,
            AUXILIARY,
        ),
        ours={"moe.shared_gate": True},
        theirs=PLAIN,
        layers="qwen",
        windows=Windows(
            ("sliding_window", "use_sliding_window", "layer_types"),
            lambda hf, layer: layer % 2 == 0 and layer < last_full_layer(hf),
            4096,
            null=False,
        ),
        no_null=("decoder_sparse_step", *WINDOW_KEYS),
    ),
    Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        DECODER + QK_NORM + DENSE + MOE,
        (
            *SIZES,
            key_heads(4),
            *BIASES,
            SAID_HEAD_DIM,
            FFN,
            EXPERT_FFN._replace(keys=("moe_intermediate_size",)),
            EXPERTS,
            TOP_K,
            RENORMALIZE,
            AUXILIARY,
        ),
        ours=dict(qk_norm="head"),
        theirs=PLAIN,
        layers="qwen",
        windows=Windows(("sliding_window", "use_sliding_window"), lambda hf, layer: True, 4096),
        no_null=("decoder_sparse_step", "use_sliding_window"),
    ),
    Architecture(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        DEEPSEEK,
        (
            *DEEPSEEK_SIZES,
            EXPERTS._replace(keys=("n_routed_experts", "num_experts")),
            shared_width(2),
            Field("dense_layers", ("first_k_dense_replace",), 0),
            Field("moe.scaling", ("routed_scaling_factor",), 1.0),
            Field("moe.groups", (), lambda hf: hf["n_group"] if v2_groups(hf) else 1),
            Field("moe.top_groups", (), lambda hf: hf["topk_group"] if v2_groups(hf) else 1),
        ),
        ours={"attention": "mla", "moe.renormalize": False},
        # On norm_topk_prob, DeepSeek's own code and transformers disagree.
        theirs=PLAIN
        | dict(
            attention_bias=False,
            mlp_bias=False,
            scoring_func=("softmax", None),
            norm_topk_prob=(False, None),
            topk_method=("greedy", "group_limited_greedy"),
        ),
        layers="deepseek",
        write=v2_keys,
        no_null=("n_shared_experts",),
    ),
    Architecture(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        DEEPSEEK,
        (
            *DEEPSEEK_SIZES,
            key_heads(128, all_heads),
            EXPERTS._replace(keys=("n_routed_experts", "num_local_experts")),
            shared_width(1),
            Field("dense_layers", ("first_k_dense_replace",), 3),
            Field("mla.interleave", ("rope_interleave",), True, False),
            Field("moe.scaling", ("routed_scaling_factor",), 2.5),
            Field("moe.groups", ("n_group",), 8),
            Field("moe.top_groups", ("topk_group",), 4),
            RENORMALIZE._replace(default=True, null=False),
        ),
        ours={"attention": "mla", "moe.score": "sigmoid", "moe.choice_bias": True, "moe.group_score": "top2"},
        theirs=PLAIN
        | dict(attention_bias=False, scoring_func=("sigmoid", None), topk_method=("noaux_tc", None)),
        layers="deepseek",
        write=deepseek_keys,
        copies=dict(head_dim=lambda hf: hf["qk_rope_head_dim"]),  # its RoPE is as wide as this says
        no_null=("n_shared_experts", "num_mtp_layers"),
    ),
    Architecture(
        "olmoe",
        "OlmoeForCausalLM",
        DECODER + QK_NORM + MOE,
        (
            *SIZES,
            NORM_EPS,
            *BIASES,
            HEAD_DIM._replace(keys=()),  # always D/H, because the query norm is as wide as the model
            EXPERT_FFN,
            EXPERTS,
            TOP_K,
            RENORMALIZE,
            AUXILIARY._replace(default=0.01),
        ),
        ours=dict(qk_norm="full"),
        theirs=PLAIN | dict(clip_qkv=None),
        copies=dict(head_dim=width_of_head),
        layers="moe",
    ),
    Architecture(
        "granitemoe",
        "GraniteMoeForCausalLM",
        DECODER + GRANITE_MOE,
        (
            *SIZES,
            *BIASES,
            SAID_HEAD_DIM,
            *(Field(name, (name,), 1.0) for name in ("attention_multiplier", "embedding_multiplier")),
            *(Field(name, (name,), 1.0) for name in ("residual_multiplier", "logits_scaling")),
            EXPERT_FFN,
            EXPERTS._replace(keys=("num_local_experts",)),
            TOP_K,
            AUXILIARY._replace(null=0.001),
        ),
        ours={"moe.softmax": "after"},
        theirs=PLAIN,
        layers="moe",
    ),
    Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        DECODER + GPT_OSS,
        (
            *SIZES,
            NORM_EPS,
            key_heads(8),
            *(bias._replace(default=True) for bias in BIASES),
            SAID_HEAD_DIM._replace(default=64),
            EXPERT_FFN,
            LOCAL_EXPERTS,
            TOP_K,
            AUXILIARY,
        ),
        ours={
            "sinks": True,
            "moe.softmax": "after",
            "moe.router_bias": True,
            "moe.bias": True,
            "moe.activation": "clamped",
        },
        theirs=PLAIN | dict(zip(("swiglu_alpha", "swiglu_limit"), CLAMPED, strict=True)),
        layers="moe",
        theta=150000.0,
        rope=dict(rope_type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096),
        windows=Windows(("sliding_window", "layer_types"), lambda hf, layer: layer % 2 == 0, 128, null=False),
    ),
)


class Swap(NamedTuple):
    """Where in a decoder layer of a transformers model the experts' weights are, and how they lie.

    place: the module that holds them. activation: MoEConfig's.
    """

    place: str = "mlp.experts"
    activation: str = "swiglu"
    transposed: bool = False
    """for x W instead of W x: the last two axes of the weights are exchanged"""
    woven: bool = False
    """gate and up rows take turns"""


# For swap_experts, by model_type. Router, attention and shared experts stay transformers' own, so an entry
# needs no ModelConfig that could express the model.
SWAPPABLE = dict(
    mixtral=Swap(),
    qwen2_moe=Swap(),
    qwen3_moe=Swap(),
    olmoe=Swap(),
    granitemoe=Swap("block_sparse_moe.experts"),
    gpt_oss=Swap(activation="clamped", transposed=True, woven=True),
    deepseek_v2=Swap(),
    deepseek_v3=Swap(),
)
