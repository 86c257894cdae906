"""MiMo-V2-Flash's entry: narrow values; windowed blocks have sinks, twice the key heads, another RoPE base.

The published config.json repeats settings in keys that transformers does not read (`COPIES`). These keys must
agree with the settings.

next: hf/architectures/common.py, hf/architectures/deepseek.py
"""

from __future__ import annotations

from collections.abc import Callable

from tmoe.config.check import MOST
from tmoe.hf.architectures import common, deepseek
from tmoe.hf.architectures import common as c
from tmoe.hf.rules import HF, INV_FREQ, Architecture, Field, Key, Windows

ATTN = f"{c.LAYER}.self_attn"
FAR, NEAR = "full_attention", "sliding_attention"
ROPE = {FAR: dict(rope_theta=5e6), NEAR: dict(rope_theta=1e4)}
SHARE = 0.334  # share of a head's channels that RoPE rotates


def slides(hf: HF, layer: int) -> bool:
    return layer > 0 and (layer + 1) % 6 != 0


def share(hf: HF) -> float:
    """The default share of rotated channels; with a scaling of RoPE, transformers rotates all channels."""
    return SHARE if hf.get("rope_type", hf.get("type", "default")) == "default" else 1.0


def of_rope(kind: str, key: str, usual: float) -> Callable[[HF], float]:
    def said(hf: HF) -> float:
        of_kind = (hf.get("rope_parameters") or ROPE).get(kind)
        return of_kind.get(key, usual) if isinstance(of_kind, dict) else usual

    return said


def marks(key: str, marked: str, usual: Callable[[HF, int], bool]) -> Callable[[HF], list[int]]:
    """A function that returns 1 for each layer of the kind `marked` by the key, and 0 for other layers."""

    def said(hf: HF) -> list[int]:
        layers = range(min(hf["num_hidden_layers"], MOST["layers"]))
        return [int(k == marked) for k in hf[key]] if key in hf else [int(usual(hf, i)) for i in layers]

    return said


COPIES: dict[str, Callable[[HF], object]] = {
    "hybrid_layer_pattern": marks("layer_types", NEAR, slides),
    "moe_layer_freq": marks(c.MLP_TYPES.name, "sparse", lambda hf, layer: layer > 0),
    "layernorm_epsilon": lambda hf: hf.get("rms_norm_eps", 1e-5),
    "rope_theta": of_rope(FAR, "rope_theta", ROPE[FAR]["rope_theta"]),
    "swa_rope_theta": of_rope(NEAR, "rope_theta", ROPE[NEAR]["rope_theta"]),
    "partial_rotary_factor": of_rope(FAR, "partial_rotary_factor", SHARE),
    "swa_num_attention_heads": lambda hf: hf["num_attention_heads"],
    "swa_num_key_value_heads": lambda hf: 2 * hf.get("num_key_value_heads", 4),
    "swa_head_dim": lambda hf: hf.get("head_dim", 192),
    "swa_v_head_dim": lambda hf: hf.get("v_head_dim", 128),
}


MIMO_V2_FLASH = Architecture(
    "mimo_v2_flash",
    "MiMoV2FlashForCausalLM",
    (
        *(common.DECODER + common.DENSE + common.MOE),
        c.one(f"{c.BLOCK}.moe.router.choice_bias", f"{c.LAYER}.mlp.gate.{deepseek.CHOICE_BIAS}"),
        c.also(c.one(f"{c.BLOCK}.attention.sinks", f"{ATTN}.attention_sink_bias"), f"{ATTN}.sinks"),
    ),
    (
        *(*c.SIZES, common.NORM_EPS, common.key_heads(4), common.BIASES[0], c.FFN),
        *(c.SAID_HEAD_DIM._replace(default=192), Field("v_head_dim", ("v_head_dim",), 128, least=1)),
        *deepseek.one_group(scaling=1.0, renormalize=True),
        Field("moe.scaling", ("routed_scaling_factor",), 1.0, 1.0),
        Field("window_kv_heads", (), lambda hf: 2 * hf.get("num_key_value_heads", 4)),
        Field("value_multiplier", ("attention_value_scale",), 0.707, 1.0),
    ),
    ours={"window_sinks": True} | deepseek.GROUPED,
    theirs=c.PLAIN
    | deepseek.SIGMOID_KEYS
    | dict(n_shared_experts=(None, 0), add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False),
    layers=common.typed_layers(1),
    keys=(
        *(c.MLP_TYPES, Key("sliding_window_size", least=0)),
        *(Key(name, tuple[int, ...]) for name in ("hybrid_layer_pattern", "moe_layer_freq")),
    ),
    write=lambda cfg: dict(v_head_dim=cfg.value_dim),
    rope=ROPE,
    rope_by_kind=True,
    partial=share,
    windows=Windows(("sliding_window", "layer_types"), slides, 129, null=False, before="sliding_window_size"),
    copies=COPIES,
    fp32=(deepseek.CHOICE_BIAS,),
    extra=(*INV_FREQ, r"model\.mtp\..*"),
)
