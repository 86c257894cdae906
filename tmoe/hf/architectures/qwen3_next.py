"""Qwen3-Next's and Qwen3.5-MoE's entries: three of four blocks are linear, norms multiply by 1 + weight.

Attention has gates: a head's rows of q_proj are its query, then its gate. Qwen3-Next orders the inputs of its
linear layers by key heads; Qwen3.5-MoE has a matrix for each. The block that predicts a further token (mtp)
is trained or kept for an export, like the vision part.

next: hf/architectures/qwen.py
"""

from __future__ import annotations

from tmoe.config.model import ModelConfig
from tmoe.hf.architectures import common as c
from tmoe.hf.architectures.qwen import LAYERS, ONLY_DENSE, SHARED, SHARED_WIDTH, SPARSE_STEP
from tmoe.hf.rules import INV_FREQ, Architecture, Field, Key, Linear, TensorPart, TensorRule, further, under

LINEAR = f"{c.LAYER}.linear_attn"
NET = f"{c.BLOCK}.attention"
MTP = r"mtp\..*"
INTERVAL = Key("full_attention_interval", least=1, null=False)


def gated_qkv(kind: str) -> TensorRule:
    """The rule of qkv with gates; q_proj has the query and the gate of each head. kind: weight or bias."""
    _, k, v = c.qkv(kind).parts
    q = TensorPart(
        f"{c.LAYER}.self_attn.q_proj.{kind}",
        lambda cfg: cfg.heads * cfg.head_dim,
        within=lambda cfg: (cfg.heads, 2 * cfg.head_dim, 0),
    )
    gate = q._replace(within=lambda cfg: (cfg.heads, 2 * cfg.head_dim, cfg.head_dim))
    return TensorRule(f"{c.BLOCK}.attention.qkv.{kind}", (q, k, v, gate))


def by_key_heads(theirs: str, sizes: tuple[str, ...]) -> tuple[TensorPart, ...]:
    """The parts of a matrix that is ordered by key heads.

    sizes: for each part "key" or "value", its rows being those of the key, or of the values that share the
    key; or "one" for a row for each of these values.
    """

    def rows(cfg: ModelConfig, size: str) -> int:
        n = cfg.linear
        shared = n.value_heads // n.key_heads
        return dict(key=n.key_dim, value=shared * n.value_dim, one=shared)[size]

    def part(i: int, size: str) -> TensorPart:
        def within(cfg: ModelConfig) -> tuple[int, int, int]:
            first = sum(rows(cfg, one) for one in sizes[:i])
            return cfg.linear.key_heads, sum(rows(cfg, one) for one in sizes), first

        name = f"{LINEAR}.{theirs}.weight"
        return TensorPart(name, lambda cfg: cfg.linear.key_heads * rows(cfg, size), within=within)

    return tuple(part(i, size) for i, size in enumerate(sizes))


RATES = (
    TensorRule(f"{NET}.rates.conv", (TensorPart(f"{LINEAR}.conv1d.weight", inner=True),)),
    *(c.one(f"{NET}.rates.{name}", f"{LINEAR}.{name}") for name in ("A_log", "dt_bias")),
    c.one(f"{NET}.norm.weight", f"{LINEAR}.norm.weight"),
    c.one(f"{NET}.out.weight", f"{LINEAR}.out_proj.weight"),
)
BY_KEY_HEADS = (
    TensorRule(f"{NET}.qkvz.weight", by_key_heads("in_proj_qkvz", ("key", "key", "value", "value"))),
    TensorRule(f"{NET}.ba.weight", by_key_heads("in_proj_ba", ("one", "one"))),
)
ONE_BY_ONE = (
    TensorRule(
        f"{NET}.qkvz.weight",
        (
            TensorPart(f"{LINEAR}.in_proj_qkv.weight", lambda cfg: cfg.linear.mixed),
            TensorPart(f"{LINEAR}.in_proj_z.weight", lambda cfg: cfg.linear.value_width),
        ),
    ),
    TensorRule(f"{NET}.ba.weight", tuple(TensorPart(f"{LINEAR}.in_proj_{n}.weight") for n in "ba")),
)
FURTHER = dict(enorm="pre_fc_norm_embedding", hnorm="pre_fc_norm_hidden", eh_proj="fc", norm="norm")


def with_further(rules: tuple[TensorRule, ...]) -> tuple[TensorRule, ...]:
    """The rules, and those of the block that predicts a further token, of which there is one."""
    own = (c.one(f"{c.FURTHER}.{name}.weight", f"mtp.{theirs}.weight") for name, theirs in FURTHER.items())
    return rules + further(rules, "mtp.layers.{layer}", *own)


RULES = tuple(gated_qkv(kind) for kind in ("weight", "bias")) + c.DECODER + c.QK_NORM + RATES + c.MOE + SHARED
# "swish" is the same function; other activations would be those of the convolution as well
SILU = Field("moe.activation", ("hidden_act",), "silu", words=dict(silu="swiglu", swish="swiglu"))
FIELDS = (
    *c.SIZES,
    SILU,
    c.key_heads(2),
    *c.BIASES,
    c.SAID_HEAD_DIM._replace(default=256),
    c.MOE_FFN._replace(default=512),
    Field("moe.shared_dim", (SHARED_WIDTH,), 512, least=1),
    c.EXPERTS._replace(keys=("num_experts",), default=512),
    c.TOP_K._replace(default=10),
    c.AUXILIARY,
    Field("linear.key_heads", ("linear_num_key_heads",), 16),
    Field("linear.value_heads", ("linear_num_value_heads",), 32),
    Field("linear.key_dim", ("linear_key_head_dim",), 128),
    Field("linear.value_dim", ("linear_value_head_dim",), 128),
    Field("linear.conv", ("linear_conv_kernel_dim",), 4),
)
OURS = {
    "qk_norm": "head",
    "attention_gate": True,
    "norm_offset": True,
    "linear.kind": "deltanet",
    "moe.shared_gate": True,
}
THEIRS = c.PLAIN | dict(attn_output_gate=(True, None))
FP32 = ("A_log", "dt_bias")

QWEN3_NEXT = Architecture(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    with_further(RULES + c.DENSE + BY_KEY_HEADS),
    (*FIELDS, c.FFN._replace(default=5632), c.RENORMALIZE._replace(default=True)),
    ours=OURS,
    theirs=THEIRS,
    layers=LAYERS,
    keys=(SPARSE_STEP, ONLY_DENSE, INTERVAL),
    partial=lambda hf: 0.25,
    linear=Linear(INTERVAL.name),
    fp32=FP32,
    extra=(*INV_FREQ, MTP),
)

QWEN3_5_MOE_TEXT = Architecture(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    with_further(RULES + ONE_BY_ONE),
    (*FIELDS, c.EXPERTS._replace(keys=("num_experts",), default=256), c.TOP_K._replace(default=8)),
    ours=OURS | {"moe.renormalize": True},
    theirs=THEIRS | dict(norm_topk_prob=(True, None), mlp_only_layers=([], None)),
    layers=c.ALL_MOE,
    keys=(INTERVAL,),
    partial=lambda hf: 0.25,
    linear=Linear(INTERVAL.name),
    fp32=FP32,
    extra=(*INV_FREQ, MTP),
)

QWEN3_5_MOE = Architecture(
    "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration",
    under(QWEN3_5_MOE_TEXT.rules, "model.", "model.language_model."),
    QWEN3_5_MOE_TEXT.fields,
    ours=QWEN3_5_MOE_TEXT.ours,
    theirs=QWEN3_5_MOE_TEXT.theirs,
    layers=c.ALL_MOE,
    keys=(INTERVAL,),
    partial=lambda hf: 0.25,
    linear=Linear(INTERVAL.name),
    fp32=FP32,
    extra=(*INV_FREQ, MTP, r"model\.visual\..*"),
    nested="text_config",
)
