"""The settings of a model: widths, layers, attention, experts.

next: run.py"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Literal

from tmoe.base.activations import activation, canonical
from tmoe.config.balance_settings import Balance, one_spelling, read_balance, require_noise
from tmoe.config.check import ConfigError, Section, Setting, check, divisors, require
from tmoe.config.linear_settings import LayerType, LinearConfig
from tmoe.config.renamed import former_names
from tmoe.config.routing_choices import SCORES, SELECTIONS, ScoreName

# Settings of a model that affect its training alone. A run may change them: the weights mean the same.
STEPS_READ = (
    *(
        "dropout",
        "mtp.coeff",
        "mtp.detach",
        "moe.balance",
        "moe.balance_coeff",
        "moe.z_coeff",
        "moe.jitter",
        "moe.bias_speed",
    ),
    *("moe.noise", "moe.force", "moe.force_skew"),
    *("moe.sinkhorn_iterations", "moe.quantile_ema", "moe.tile", "moe.tile_rounding"),
    *("moe.capacity_factor", "moe.rounding", "moe.drop", "moe.pad"),
)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and the scalings that stretch it past its trained range."""

    theta: float = 10000.0
    """base of the geometric frequency ladder"""
    max_seq: int = 4096
    """longest sequence the model may see, after scaling"""
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """how frequencies are stretched:
    linear (Chen et al. 2023), llama3 (Llama 3.1), yarn (Peng et al. 2023)"""
    factor: float = 1.0
    """how much frequencies are stretched: max_seq divided by the range that was trained without scaling"""
    original_max_seq: int = 4096
    """range trained without scaling (llama3, yarn)"""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_seq / this are stretched in full"""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_seq / this are left alone"""
    beta_fast: float = 32.0
    """yarn: rotations over the original range above which a frequency is left alone"""
    beta_slow: float = 1.0
    """yarn: rotations below which a frequency is stretched in full"""
    attention_factor: float | None = None
    """yarn: factor on cos and sin;
    None: from mscale and mscale_all_dim, or 0.1 ln(factor) + 1 without those"""
    mscale: float | None = None
    """yarn: with mscale_all_dim, the factor on cos and sin is
    (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1) (DeepSeek)"""
    mscale_all_dim: float | None = None
    """yarn: further factor on the logits of latent attention (DeepSeek):
    (0.1 mscale_all_dim ln(factor) + 1)^2"""
    truncate: bool = True
    """yarn: the ramp between beta_fast and beta_slow begins and ends at whole pairs (False: gpt-oss)"""
    dim: int = 0
    """grouped-query attention: number of channels of a head that are rotated, the first ones (GLM-4.5: half
    of them); 0: all. Latent attention has mla.rope-dim instead"""
    interleave: bool = False
    """grouped-query attention: rotary pairs are neighbours (2i, 2i+1) (ERNIE-4.5), else (i, i + half).
    Latent attention has mla.interleave instead"""
    window_theta: float | None = None
    """base in blocks with a window, whose frequencies are not stretched (Mellum, Gemma 3);
    None: as in the other blocks"""
    query_beta: float = 0.0
    """latent attention: a query is multiplied by 1 + this ln(1 + floor(position / original_max_seq))
    (Mistral 4, Llama 4); 0: no such factor"""

    def __post_init__(self) -> None:
        zero = "attention_factor mscale mscale_all_dim"
        one, zero = "max_seq factor original_max_seq", f"{zero} dim query_beta"
        rope = check(self, "model.rope.", one=one, zero=zero)
        rope.require(1 < self.theta < math.inf, "theta", "must be above 1 and finite")
        base = self.window_theta
        ok = base is None or 1 < base < math.inf
        rope.require(ok, "window_theta", "must be above 1 and finite, or none")
        stretched = self.scaling != "none" or self.factor == 1
        rope.require(stretched, "factor", f"needs {Setting('model.rope.scaling')}")
        for low, high in ("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast"):
            a, b = getattr(self, low), getattr(self, high)
            touch = low == "beta_slow"  # equal limits make the ramp a step (Kimi K2)
            valid = f"above 0 and {'at or ' * touch}below {rope.said(high)}"
            rope.require(0 < a <= b < math.inf and (a < b or touch), low, f"must be {valid}")


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1).

    Keys and values of all heads are projected from one narrow latent.
    """

    q_rank: int = 0
    """width of the queries' latent; 0: none, queries are projected from the input (DeepSeek-V2-Lite)"""
    kv_rank: int = 512
    """width of the latent from which keys and values are projected"""
    nope_dim: int = 128
    """channels of a query and key head without position"""
    rope_dim: int = 64
    """channels with rotary position; all heads share these channels of the key"""
    v_dim: int = 128
    """channels of a value head"""
    interleave: bool = True
    """rotary pairs are neighbours (2i, 2i+1), as in DeepSeek's checkpoints; False: (i, i + rope-dim/2)"""

    def __post_init__(self) -> None:
        mla = check(self, "model.mla.", one="kv_rank nope_dim rope_dim v_dim", zero="q_rank")
        mla.require(self.rope_dim % 2 == 0, "rope_dim", "must be even (RoPE turns pairs)")


@dataclass(frozen=True)
class MTPConfig:
    """Multi-token prediction (DeepSeek-V3, 2024, section 2.2): blocks that predict further tokens.

    They follow the last block, are built like it, and are run in training alone.
    """

    depth: int = 0
    """number of blocks that predict further tokens; 0: none, and a published model's are kept unchanged for
    its export"""
    coeff: float = 0.3
    """factor on the mean of their losses (DeepSeek-V3: 0.3, later 0.1; Megatron: 0.1)"""
    detach: bool = False
    """train these blocks alone: their loss gives no gradient to other blocks, embedding and head"""

    def __post_init__(self) -> None:
        check(self, "model.mtp.", zero="depth coeff")


@former_names("model.moe")
@dataclass(frozen=True)
class MoEConfig:
    """One Mixture-of-Experts layer: router, experts, shared experts, balancing terms."""

    experts: int = 8
    """number of routed experts, E"""
    top_k: int = 2
    """experts per token, K"""
    ffn_dim: int = 256
    """hidden width of one routed expert, F"""
    shared_dim: int = 0
    """summed hidden width of the shared experts, which process every token; 0: none"""
    shared_activation: Literal["swiglu", "relu2"] = "swiglu"
    """activation of shared experts, and of dense feed-forwards: silu(gate) up (swiglu), or relu(up) squared,
    without a gate (relu2, Nemotron-H)"""
    shared_gate: bool = False
    """multiply the shared experts' output by sigmoid(x . w) (Qwen2-MoE)"""
    score: ScoreName = "softmax"
    """how scores are computed from the router's logits: softmax, each logit's sigmoid (DeepSeek-V3),
    the square root of its softplus (sqrtsoftplus), or the softmax of scaled cosines (Tutel's cosine_top)"""
    selection: str = "topk"
    """how experts are chosen: each token's best experts (topk); top-k after evening out the load, over the
    tokens of a call (sinkhorn) or from step to step (quantile); top-k in whole tiles of the products (tiles);
    or each expert's best tokens (expert-choice)"""
    softmax: Literal["before", "after"] = "before"
    """softmax over all E logits before the top-k choice, or over the K chosen logits after it (Mixtral)"""
    renormalize: bool = True
    """divide the K weights by their sum (if softmax is before the top-k choice)"""
    router_dtype: Literal["fp32", "fp64"] = "fp32"
    """precision of the router's product, scores and weights, independent of the model's compute type"""
    groups: int = 1
    """number of groups of neighbouring experts;
    a token chooses among the experts of its top-groups best groups (DeepSeek-V2)"""
    top_groups: int = 1
    """number of groups from which a token may choose"""
    group_score: Literal["max", "top2", "top"] = "max"
    """score of a group: that of its best expert (max, DeepSeek-V2), the sum of its two best (top2,
    DeepSeek-V3), or the sum of its best top-k/top-groups experts (top, Megatron)"""
    top_devices: int = 0
    """most of the --parallel.ep ranks on which a token's experts may be; the best ranks by group-score are
    taken (DeepSeek-V2); 0: any ranks. The choice then depends on --parallel.ep; with groups it does not"""
    choice_bias: bool = False
    """balance without a loss: a bias on each expert's score
    that is added for the choice alone, never for the weight (Wang et al. 2024)"""
    bias_speed: float = 0.001
    """choice bias: the bias rises by this after a step for experts below the mean load of the global batch,
    and falls by this for experts above it"""
    scaling: float = 1.0
    """factor on the K weights"""
    identity_experts: int = 0
    """further outputs of the router whose expert is the identity: y += weight * x (LongCat-Flash)"""
    max_top_k: int = 0
    """expert-choice and tiles: most experts that a token may get; 0: no limit"""
    tile: int = 128
    """tiles: the number of tokens of each expert is rounded to a multiple of this"""
    tile_rounding: Literal["nearest", "up", "down"] = "nearest"
    """tiles: direction of that rounding"""
    sinkhorn_iterations: int = 32
    """sinkhorn: iterations, a fixed number"""
    quantile_ema: float = 0.0
    """quantile: share of the old bias in the new one"""
    cosine_dim: int = 256
    """cosine: width of the projection"""
    cosine_temperature: float = 0.5
    """cosine: divisor of the cosines at the start; a learned factor multiplies them as well"""
    balance: Balance = "sequence"
    """load-balancing losses: none, or one or several of these, as NAME or NAME:COEFFICIENT.
    E/(K T^2) sum_e (sum_t p_te) count_e (Switch, Fedus et al. 2021) over a rank's micro-batch (batch),
    each sequence, equal in every layout (sequence), or all of the step so far (global);
    over a micro-batch also gshard (first choices alone count), importance (V-MoE's importance and load
    losses) and importance-tutel (Tutel's versions of these); the last two need noise"""
    balance_coeff: float = 0.01
    """weight of a load-balancing loss that is named without a coefficient"""
    z_coeff: float = 0.001
    """weight of the router z-loss mean(logsumexp(logits)^2) (ST-MoE, Zoph et al. 2022)"""
    jitter: float = 0.0
    """multiply the router's input by uniform(1 - jitter, 1 + jitter) in training (Switch)"""
    noise: float = 0.0
    """normal noise on the logits in training; its standard deviation is this divided by the number of experts
    (Tutel's gate_noise, V-MoE)"""
    force: Literal["none", "even", "skew"] = "none"
    """for benchmarks, routing that ignores the logits' values: the same load for every expert (even),
    or random logits with fixed biases of standard deviation force-skew (skew)"""
    force_skew: float = 1.0
    """force=skew: standard deviation of the biases"""
    router_bias: bool = False
    """a learned bias on the router's logits (gpt-oss)"""
    bias: bool = False
    """learned biases on the routed experts' projections (gpt-oss)"""
    capacity_factor: float | None = None
    """most pairs (a token and one of its experts) of a rank's micro-batch that an expert computes, as a
    multiple of an even share; further pairs are dropped. None: no pair is dropped;
    0: no pair is dropped, and with pad there is room for every token; below 0: as above 0 (Tutel)"""
    rounding: Literal["megatron", "tutel"] = "megatron"
    """the bound for T tokens and factor f: ceil(T K / E f) (megatron), or K int(f ceil(T / E)) (tutel)"""
    drop: Literal["probs", "position", "choice", "priority"] = "probs"
    """pairs that an expert keeps first: the largest weights (probs), the first tokens (position),
    first choices before second ones and among them the first tokens (choice, GShard and Tutel),
    or among them the tokens with the best scores (priority, Tutel's batch-prioritised routing)"""
    pad: bool = False
    """pad each expert's rows to its bound: sizes are known in advance, and no exchange waits for counts"""
    latent_dim: int = 0
    """width of the rows that routed experts process: tokens are projected down to it before they are sent,
    and the experts' sums are projected up again; router and shared experts keep the full width;
    0: no projections"""
    weigh: Literal["before", "activation", "after"] = "activation"
    """where a token's weights are multiplied: into its rows before the experts (before), into the activation
    inside them (activation), or into the experts' results (after: the same function as activation, slower)"""
    activation: str = "swiglu"
    """activation of the routed experts: silu(gate) up (swiglu), gelu_tanh(gate) up (geglu);
    with g = min(gate, limit) and u = clamp(up, -limit, limit): g sigmoid(alpha g) (u + 1) (clamped, gpt-oss)
    or silu(g) u (clamped_silu, DeepSeek-V4);
    with one matrix and no gate: relu(up)^2 (relu2), relu(up) (relu), gelu(up) (gelu);
    other constants than the default ones follow the name: clamped:alpha=1.702,limit=7"""

    def __post_init__(self) -> None:
        zero = "bias_speed shared_dim balance_coeff z_coeff noise force_skew "
        zero += "top_devices identity_experts max_top_k latent_dim"
        one = "experts ffn_dim groups tile sinkhorn_iterations cosine_dim"
        positive, share = "scaling cosine_temperature", "jitter quantile_ema"
        moe = check(self, "model.moe.", one=one, zero=zero, positive=positive, share=share)
        k, e = self.top_k, self.experts
        n, best = self.groups, self.top_groups
        moe.require(1 <= k <= self.outputs, "top_k", f"must be 1 to {self.outputs_said}")
        moe.require(e % n == 0, "groups", f"must divide {moe.said('experts')}", divisors(e))
        moe.require(1 <= best <= n, "top_groups", f"must be 1 to {moe.said('groups')}")
        size = e // n
        moe.require(k <= self.reach(), "top_k", f"{best} groups of {size} experts hold only {best * size}")
        ok = n == 1 or self.group_score != "top2" or size > 1
        moe.require(ok, "group_score", f"needs two experts a group; {moe.said('groups')} leaves {size}")
        require_policy(self)
        moe.require(math.isfinite(self.capacity_factor or 0.0), "capacity_factor", "must be finite")
        bounded = self.capacity_factor is not None
        needs = f"needs {Setting('model.moe.capacity_factor')} (0: room for all)"
        moe.require(bounded or not self.pad, "pad", needs)
        full = SELECTIONS[self.selection].columns or self.identity_experts > 0
        chosen = f"{Setting('model.moe.selection')} expert-choice and tiles"
        others = f"not with {chosen}, or {Setting('model.moe.identity_experts')}"
        moe.require(not (bounded and full), "capacity_factor", others)
        ungated = not self.shared_gate or self.shared_dim > 0
        moe.require(ungated, "shared_gate", f"needs {Setting('model.moe.shared_dim')} above 0")
        require_noise(self.balance, self.balance_coeff, self.noise)
        try:
            object.__setattr__(self, "activation", canonical(self.activation))
        except ValueError as error:
            raise ConfigError.of("model.moe.activation", self.activation, str(error)) from None
        for name, value in zip(
            ("balance", "balance_coeff"), one_spelling(self.balance, self.balance_coeff), strict=True
        ):
            object.__setattr__(self, name, value)

    @property
    def losses(self) -> dict[str, float]:
        """The load-balancing losses by name, each with its coefficient."""
        return read_balance(self.balance, self.balance_coeff)

    @property
    def logged(self) -> tuple[str, ...]:
        """Names of the logged values of each router: its losses, z, Sinkhorn's distance from even loads."""
        return *self.losses, "z", *(("residual",) if self.selection == "sinkhorn" else ())

    @property
    def outputs(self) -> int:
        """Number of outputs of the router: the experts, followed by the identity experts."""
        return self.experts + self.identity_experts

    @property
    def outputs_said(self) -> str:
        """The settings that add up to the number of outputs, for the text of an error."""
        moe = Section(self, "model.moe.")
        return moe.said("experts") + (f" + {moe.said('identity_experts')}" if self.identity_experts else "")

    @property
    def slots(self) -> int:
        """Columns of a routing's ids: K, or for selections with `columns` the most experts of a token."""
        return (self.max_top_k or self.outputs) if SELECTIONS[self.selection].columns else self.top_k

    def limits(self, devices: int = 1) -> bool:
        """Whether a token may choose only from some groups or ranks. devices: ranks of the expert group."""
        return self.top_groups < self.groups or 0 < self.top_devices < devices

    def by_softmax_topk(self, devices: int = 1) -> bool:
        """Whether one op chooses and weighs experts: the K largest of a softmax over all, without a bias."""
        plain = self.selection == "topk" and SCORES[self.score].softmax
        return plain and not self.choice_bias and not self.limits(devices)

    def reach(self, devices: int = 1) -> int:
        """The most experts that a token may choose. devices: ranks of the expert group."""
        open_to = self.experts * self.top_groups // self.groups
        if self.top_devices:
            open_to = min(open_to, self.experts // devices * min(self.top_devices, devices))
        return open_to + self.identity_experts

    @property
    def untrained(self) -> str:
        """Why the task's loss gives the router no gradient, its settings marked; "" where it does.

        Published models may have been trained this way, so a config may have such settings. A run that
        begins a new model calls `require_trained`.
        """
        entry = SELECTIONS[self.selection]
        divided = (self.renormalize or self.softmax == "after") and not entry.weighs
        if self.top_k > 1 or self.outputs == 1 or not divided or entry.looks == "always":
            return ""
        cause = Setting("model.moe.renormalize", "True")
        if self.softmax == "after":
            cause = Setting("model.moe.softmax", "after")
        return (  # prose: by itself
            f"{Setting('model.moe.top_k', 1)} with {cause}: a token's only weight is divided by itself and "
            "constant, so balancing losses alone train the routers"
        )

    @property
    def acausal(self) -> str:
        """Why the layer does not suit models that predict the next token, settings marked; "" if it does."""
        if SELECTIONS[self.selection].looks != "always":
            return ""
        return (
            f"{Setting('model.moe.selection', self.selection)}: a token's experts depend on later tokens, so "
            "a causal model learns from what it will not have when it generates"
        )

    @property
    def halves(self) -> int:
        """Rows of an expert's first matrix for each of its ffn_dim channels: 2 with a gate, else 1."""
        return activation(self.activation).halves

    @property
    def shared_halves(self) -> int:
        """`halves` of shared experts and of dense feed-forwards."""
        return activation(self.shared_activation).halves

    def require_trained(self) -> None:
        """Raise ConfigError, with what to set, where the task's loss gives the router no gradient."""
        before = f" {Setting('model.moe.softmax')} before" if self.softmax == "after" else ""
        remedy = f"set {Setting('model.moe.renormalize')} False{before}, and the loss does"
        require(not self.untrained, f"{self.untrained}; {remedy}")


def require_reach(moe: MoEConfig, ep: int) -> None:
    """ConfigError unless the ranks that a token may reach hold its experts."""
    section = Section(moe, "model.moe.")
    reached = f"of {Setting('parallel.ep', ep)} ranks hold only {moe.reach(ep)}"
    section.require(moe.top_k <= moe.reach(ep), "top_k", f"{section.said('top_devices')} {reached}")


def require_policy(moe: MoEConfig) -> None:
    """ConfigError unless score, selection, weights and limits of a router can be combined."""
    section = Section(moe, "model.moe.")
    section.require(moe.selection in SELECTIONS, "selection", f"must be one of {', '.join(SELECTIONS)}")
    entry = SELECTIONS[moe.selection]
    after = moe.softmax == "after"
    columned = " or ".join(name for name, policy in SELECTIONS.items() if policy.columns)
    bias = section.said("choice_bias")
    clashes = [
        (
            after and not SCORES[moe.score].softmax,
            "softmax",
            f"not with {section.said('score')}, which has no softmax",
        ),
        (
            after and moe.choice_bias,
            "softmax",
            f"not with {bias}, which is added to scores made before the choice",
        ),
        (moe.top_devices > 0 and moe.groups > 1, "top_devices", f"not with {section.said('groups')}"),
        (
            not entry.limited and moe.top_groups < moe.groups,
            "selection",
            f"not with {section.said('groups')} {section.said('top_groups')}",
        ),
        (not entry.limited and moe.top_devices > 0, "selection", f"not with {section.said('top_devices')}"),
        (not entry.biased and moe.choice_bias, "selection", f"not with {bias}"),
        (
            entry.weighs and (moe.score, moe.softmax) != ("softmax", "before"),
            "selection",
            f"has its own weights; not with {section.said('score')} {section.said('softmax')}",
        ),
        (
            moe.max_top_k > 0 and not entry.columns,
            "max_top_k",
            f"only for {Setting('model.moe.selection')} {columned}",
        ),
        (
            moe.max_top_k > 0 and not moe.top_k <= moe.max_top_k <= moe.outputs,
            "max_top_k",
            f"must be {section.said('top_k')} to {moe.outputs_said}, or 0",
        ),
        (
            moe.selection == "quantile" and moe.top_k == moe.outputs,
            "selection",
            f"{section.said('top_k')} must be below {moe.outputs_said}",
        ),
    ]
    for clash, name, wrong in clashes:
        section.require(not clash, name, wrong)


# Settings that latent attention does not have, each with the value that switches it off.
LATENT_LACKS = dict(
    v_head_dim=0,
    window_kv_heads=0,
    window_sinks=False,
    value_multiplier=1.0,
    qk_norm="none",
    qkv_bias=False,
    o_bias=False,
    attention_gate=False,
    sinks=False,
    window=0,
    attention_multiplier=None,
    norm_offset=False,
)


@dataclass(frozen=True)
class ModelConfig:
    """The decoder: embedding, blocks of attention and (dense or MoE) feed-forward, head."""

    vocab: int = 256
    """vocabulary size, V"""
    dim: int = 256
    """model width, D"""
    layers: int = 4
    """number of blocks; cuts a preset to its first blocks"""
    heads: int = 4
    """query heads, H"""
    attention: Literal["gqa", "mla"] = "gqa"
    """grouped-query attention (gqa), or multi-head latent attention (mla, DeepSeek) of the widths in mla"""
    kv_heads: int = 4
    """key/value heads, G; divides heads"""
    window_kv_heads: int = 0
    """key/value heads of blocks with a window; divides heads (MiMo-V2-Flash);
    0: as many as in the other blocks"""
    head_dim: int = 64
    """head width, C"""
    v_head_dim: int = 0
    """width of a value head (MiMo-V2-Flash); 0: that of queries and keys. Latent attention has mla.v-dim"""
    qk_norm: Literal["none", "head", "full", "rotated"] = "none"
    """RMSNorm on queries and keys: per head (head, Qwen3), over all heads at once (full, OLMoE),
    or per head after the rotary positions (rotated, Hunyuan)"""
    qkv_bias: bool = False
    """learned biases on queries, keys and values (Qwen2, gpt-oss)"""
    o_bias: bool = False
    """a learned bias on attention's output projection (gpt-oss)"""
    attention_gate: bool = False
    """multiply each channel of attention's result by sigmoid(x . w), before the output projection (AFMoE)"""
    sinks: bool = False
    """a learned logit for each query head, which enters the softmax but has no value to add (gpt-oss)"""
    window_sinks: bool = False
    """sinks only in blocks with a window (MiMo-V2-Flash)"""
    window: int = 0
    """sliding window: a token attends to itself and the window - 1 tokens before it; 0: to all before it"""
    windowed: tuple[int, ...] = (1,)
    """blocks with the window, 1 (with) or 0 (without) for each block, repeated over the depth;
    1 0: every second block, the first included (gpt-oss)"""
    rotary: tuple[int, ...] = (1,)
    """blocks with rotary positions, 1 (with) or 0 (without) for each block, repeated over the depth;
    1 1 1 0: every fourth block has none (NoPE: EXAONE 4, AFMoE). Grouped-query attention only"""
    index_topk: int = 0
    """keys that an indexer chooses for each query (DeepSeek-V3.2, GLM-5); 0: no indexer.
    A query here attends to all keys, the same up to this many tokens; longer sequences are refused"""
    attention_multiplier: float | None = None
    """factor on the products of queries and keys (Granite); None: 1/sqrt(head-dim)"""
    value_multiplier: float = 1.0
    """factor on values (MiMo-V2-Flash)"""
    embedding_multiplier: float = 1.0
    """factor on the embedding's output (Granite)"""
    residual_multiplier: float = 1.0
    """factor on the outputs of attention and feed-forward, before the residual addition (Granite)"""
    logits_scaling: float = 1.0
    """divisor of the logits (Granite)"""
    layer_types: tuple[LayerType, ...] = ()
    """blocks with full attention (full) and linear blocks (linear, of linear.kind), repeated over the depth;
    none: every linear.every-th block has full attention. With moe or dense among them a block has one branch
    (Nemotron-H): attention, a linear layer, an MoE or a dense feed-forward"""
    dense_layers: int = 0
    """number of leading blocks whose feed-forward is dense"""
    dense_blocks: tuple[int, ...] = ()
    """indices of further blocks whose feed-forward is dense"""
    moe_every: int = 1
    """after the leading dense blocks, every n-th block is an MoE block, starting with the first"""
    ffn_dim: int = 1024
    """hidden width of the dense feed-forward blocks"""
    tied: bool = False
    """let the output head share the embedding's weight"""
    norms: Literal["pre", "post", "sandwich", "moe"] = "pre"
    """where a block has RMSNorms: on the inputs of attention and feed-forward (pre),
    on their outputs (post, FlexOlmo), on both (sandwich, AFMoE),
    or on their inputs and on the output of an MoE (moe, A.X-K1)"""
    norm_eps: float = 1e-6
    """added to the mean square in every RMSNorm"""
    norm_offset: bool = False
    """the factor of RMSNorms is 1 + weight (Qwen3-Next), except in linear layers; the weight begins at 0"""
    dropout: float = 0.0
    """dropout on each residual branch in training"""
    init_std: float = 0.02
    """standard deviation of the initial weights;
    for projections into the residual stream it is divided by sqrt(2 layers)"""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """rotary position embedding (Su et al. 2021) and the scalings that stretch it past its trained range"""
    mla: MLAConfig = field(default_factory=MLAConfig)
    """multi-head latent attention (DeepSeek-V2, 2024, section 2.1):
    keys and values of all heads are projected from one narrow latent"""
    linear: LinearConfig = field(default_factory=LinearConfig)
    """blocks whose attention is replaced by a rule that updates a state of fixed size"""
    mtp: MTPConfig = field(default_factory=MTPConfig)
    """multi-token prediction (DeepSeek-V3, 2024, section 2.2): blocks that predict further tokens"""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """one Mixture-of-Experts layer: router, experts, shared experts, balancing terms"""

    def __post_init__(self) -> None:
        one = "vocab dim layers heads kv_heads head_dim moe_every ffn_dim"
        zero, share = "dense_layers norm_eps init_std window window_kv_heads v_head_dim index_topk", "dropout"
        positive = "attention_multiplier value_multiplier embedding_multiplier residual_multiplier"
        positive += " logits_scaling"
        model = check(self, "model.", one=one, zero=zero, positive=positive, share=share)
        h, grouped = self.heads, self.attention == "gqa"
        heads, mla = model.said("heads"), Setting("model.attention", "mla")
        model.require(not grouped or h % self.kv_heads == 0, "kv_heads", f"must divide {heads}")
        near = self.window_kv_heads
        model.require(not near or h % near == 0, "window_kv_heads", f"must divide {heads}, or be 0")
        for name, off in LATENT_LACKS.items():
            value = getattr(self, name)
            require(grouped or value == off, f"model.{name}", str(value), f"not with {mla}")
        model.require(self.head_dim % 2 == 0, "head_dim", "must be even (RoPE turns pairs)")
        turn = self.rope.dim
        valid = f"must be even and at most {model.said('head_dim')}"
        model.require(turn % 2 == 0 and turn <= self.head_dim, "rope.dim", valid)
        model.require(grouped or not turn, "rope.dim", f"not with {mla}")
        model.require(grouped or not self.rope.interleave, "rope.interleave", f"not with {mla}")
        model.require(not grouped or not self.rope.query_beta, "rope.query_beta", f"only with {mla}, or 0")
        numbered = all(block >= 0 for block in self.dense_blocks)
        model.require(numbered, "dense_blocks", "must be numbers of blocks, from 0 on")
        valid = "must be one or more of 1 (with the window) and 0 (without)"
        model.require({*self.windowed} in ({0}, {1}, {0, 1}), "windowed", valid)
        valid = "must be one or more of 1 (rotary positions) and 0 (none)"
        model.require({*self.rotary} in ({0}, {1}, {0, 1}), "rotary", valid)
        model.require(grouped or {*self.rotary} == {1}, "rotary", f"not with {mla}")
        kinds, needed = {*self.layer_types}, f"{Setting('model.linear.kind', 'deltanet')} or mamba2"
        model.require("linear" not in kinds or self.linear.kind != "none", "layer_types", f"needs {needed}")
        self._check_branches(model)
        absolute = f"not with {model.said('rope.query_beta')}, by which queries depend on their position"
        model.require(not self.mtp.depth or not self.rope.query_beta, "mtp.depth", absolute, 0)

    def _check_branches(self, model: Section) -> None:
        """ConfigError for settings that blocks of one branch do not have."""
        if self.one_branch:
            alone = f"not with {model.said('layer_types')}, where a block has one branch"
            model.require(self.norms == "pre", "norms", alone, "pre")
            sparse = not self.mtp.depth or "moe" in self.layer_types
            model.require(sparse, "mtp.depth", f"needs moe in {model.said('layer_types')}", 0)
            model.require(not self.dense_blocks, "dense_blocks", alone)
            model.require(not self.dense_layers, "dense_layers", alone, 0)

    @functools.cached_property
    def one_branch(self) -> bool:
        """Whether a block has attention or a feed-forward, not both."""
        return not {"moe", "dense"}.isdisjoint(self.layer_types)

    def branch_of(self, layer: int) -> LayerType | None:
        """The branch of this block; None if it has two, as blocks that predict further tokens have."""
        alone = self.one_branch and layer < self.layers
        return self.layer_types[layer % len(self.layer_types)] if alone else None

    def mixes(self, layer: int) -> bool:
        """Whether this block has attention or a linear layer."""
        return self.branch_of(layer) in (None, "linear", "full")

    def attends(self, layer: int) -> bool:
        """Whether this block has attention."""
        return self.mixes(layer) and not self.is_linear(layer)

    def feeds(self, layer: int) -> bool:
        """Whether this block has a feed-forward, an MoE or a dense one."""
        return self.branch_of(layer) in (None, "moe", "dense")

    def is_dense(self, layer: int) -> bool:
        """Whether this block has a dense feed-forward."""
        return self.feeds(layer) and not self.is_moe(layer)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence."""
        return min(self.index_topk or self.rope.max_seq, self.rope.max_seq)

    @property
    def longest_limit(self) -> str:
        """The setting that limits `longest`, marked."""
        model = Section(self, "model.")
        if self.longest == self.rope.max_seq:
            return model.said("rope.max_seq")
        return f"{model.said('index_topk')}, beyond which an indexer chooses keys: not computed"

    @property
    def expert_dim(self) -> int:
        """Width of the rows that routed experts process."""
        return self.moe.latent_dim or self.dim

    @property
    def rotary_dim(self) -> int:
        """Number of channels of a head that are rotated by the position."""
        return (self.rope.dim or self.head_dim) if self.attention == "gqa" else self.mla.rope_dim

    @property
    def numbered(self) -> range:
        """Numbers of all blocks: those of the model, and after them those that predict further tokens."""
        return range(self.layers + self.mtp.depth)

    @property
    def two_tables(self) -> bool:
        """Whether the last part of a pipeline needs the embedding too: as the head, or for further tokens."""
        return self.tied or self.mtp.depth > 0

    def is_moe(self, layer: int) -> bool:
        if self.one_branch:
            return self.branch_of(layer) in ("moe", None)
        layer = min(layer, self.layers - 1)
        regular = layer >= self.dense_layers and (layer - self.dense_layers) % self.moe_every == 0
        return regular and layer not in self.dense_blocks

    def is_linear(self, layer: int) -> bool:
        """Whether this block has a linear layer in place of attention."""
        if self.linear.kind == "none" or layer >= self.layers:  # blocks of further tokens have attention
            return False
        if self.layer_types:
            return self.layer_types[layer % len(self.layer_types)] == "linear"
        return (layer + 1) % self.linear.every != 0

    @property
    def linear_layers(self) -> int:
        """Number of blocks with a linear layer."""
        return sum(map(self.is_linear, range(self.layers)))

    def mask_of(self, layer: int) -> int | str:
        """How this block reads earlier tokens: LINEAR, by attention with this window, or NO_TOKENS."""
        if not self.mixes(layer):
            return NO_TOKENS
        return LINEAR if self.is_linear(layer) else self.window_of(layer)

    def rope_of(self, layer: int) -> RopeConfig | None:
        """The RoPE settings of this block; None for a block without RoPE."""
        last = min(layer, self.layers - 1)
        if not self.attends(layer) or not self.rotary[last % len(self.rotary)]:
            return None
        if self.rope.window_theta is None:
            return self.rope
        whole = replace(self.rope, window_theta=None)
        if not self.window_of(layer):
            return whole
        return replace(whole, theta=self.rope.window_theta, scaling="none", factor=1.0)

    def window_of(self, layer: int) -> int:
        """Number of tokens that a token attends to in this block, itself included; 0: all before it."""
        if not self.attends(layer):
            return 0
        layer = min(layer, self.layers - 1)
        return self.window if self.windowed[layer % len(self.windowed)] else 0

    def norms_of(self, layer: int) -> tuple[int, int]:
        """Numbers of RMSNorms of the model's width around this block's attention and its feed-forward."""
        if self.branch_of(layer) is not None:
            return int(self.mixes(layer)), int(self.feeds(layer))
        more = self.norms == "moe" and self.is_moe(layer)
        around = 2 if self.norms == "sandwich" else 1
        return around, around + more

    @property
    def value_dim(self) -> int:
        """Channels of a value head of grouped-query attention."""
        return self.v_head_dim or self.head_dim

    def kv_heads_in(self, window: int) -> int:
        """Key/value heads of a block with this window (0: none)."""
        return (window and self.window_kv_heads) or self.kv_heads

    def sinks_in(self, window: int) -> bool:
        """Whether a block with this window (0: none) has sinks."""
        return self.sinks or (self.window_sinks and window > 0)


LINEAR = "linear"  # `mask_of` of a linear block
NO_TOKENS = "none"  # `mask_of` of a block that is a feed-forward alone
IGNORE = -100  # a target that no loss counts


def no_bits(cfg: ModelConfig) -> str | None:
    """Why rollouts' log-probs cannot equal training's in every bit, settings marked; None where they can."""
    model = Section(cfg, "model.")
    windows = {cfg.window_of(i) for i in range(cfg.layers)}
    if cfg.linear_layers:
        return (
            f"{Setting('model.linear.kind', cfg.linear.kind)}: single steps update the state in another order"
        )
    if cfg.attention != "gqa":
        return f"{model.said('attention')}: decoding multiplies its matrices in another order; valid: gqa"
    if windows != {0}:
        return f"{model.said('window')}: not built for windows; valid: 0"
    if cfg.sinks_in(0):
        return f"{Setting('model.sinks')}: not built for sinks; valid: False"
    if cfg.value_dim != cfg.head_dim:
        return f"{Setting('model.v_head_dim', cfg.value_dim)}: must be {model.said('head_dim')}"
    noisy = cfg.moe.jitter or cfg.moe.noise or cfg.moe.capacity_factor
    if noisy and any(map(cfg.is_moe, range(cfg.layers))):
        jitter = Setting("model.moe.jitter")
        return f"{jitter}, noise, capacity-factor: apply in training alone; valid: 0, 0 and None"
    return None if not cfg.dropout else f"{model.said('dropout')}: applies in training alone; valid: 0"
