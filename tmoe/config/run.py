"""Every setting of a run as frozen dataclasses, and the checks that need no process group.

Letters, one legend for the whole package (shape suffixes in names, `x_TD`):
B batch, S sequence, T tokens on this rank (B*S), D model width, H query heads, G key/value heads,
C head width, E experts, L experts held by this rank, K experts per token, F expert hidden width,
N = T*K routed rows, R rows received from the expert group, V vocabulary.

next: train.py
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal

from tmoe.config.check import (
    COLDEST,
    FLOATS,
    MOST,
    ConfigError,
    Section,
    Setting,
    check,
    divisors,
    require,
)
from tmoe.config.float8_settings import MULTIPLE, Asked, require_float8
from tmoe.config.gpus import GpuName
from tmoe.config.model import ModelConfig, no_bits, require_reach
from tmoe.config.renamed import former_names
from tmoe.config.routing_choices import SELECTIONS

MOST |= dict.fromkeys(("dim", "head_dim", "v_head_dim", "ffn_dim", "shared_dim"), 2**20)
MOST |= dict.fromkeys(("q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim"), 2**20)


Dtype = Literal["bf16", "fp16", "fp32"]
LARGEST_SCALE = 2.0**32  # of the loss: fp32 sums of scaled gradients' squares stay finite


@dataclass(frozen=True)
class TrainConfig:
    """The size of a step, its precision, validation and time limits."""

    batch: int = 4
    """sequences of each rank in one micro-batch"""
    seq: int = 4096
    """tokens per sequence"""
    accumulate: int = 1
    """micro-batches of each rank in one step"""
    global_batch: int = 0
    """sequences of all ranks in one step, the same in every layout: accumulate is computed from it;
    0: the number follows from batch, accumulate and layout"""
    dtype: Dtype = "bf16"
    """compute type; gradients are reduced in fp32 in all of them, and master weights and optimizer state are
    fp32 unless --optim.masters, --optim.states or --optim.sums says otherwise; fp16 scales the loss"""
    loss_scale: float = 0.0
    """fp16: constant factor of the loss in the backward, so that small gradients are not rounded to zero;
    gradients are divided by it before clipping. 0: a dynamic factor, which the next four settings define"""
    initial_loss_scale: float = 65536.0
    """fp16: the first factor"""
    min_loss_scale: float = 1.0
    """fp16: the least factor; overflows at it count as --optim.max-skips"""
    loss_scale_window: int = 1000
    """fp16: steps without an overflow after which the factor doubles, up to 2^32"""
    loss_scale_hysteresis: int = 2
    """fp16: overflows since the factor last doubled, from which on each halves it; steps with an overflow are
    skipped"""
    float8: Literal["none", "rowwise"] = "none"
    """rowwise: products of dense layers and shared experts in float8 e4m3, with one scale per row, in
    training and evaluation (needs the float8 extra); head, router, experts and generation stay in dtype"""
    fp8: Literal["none", "experts", "all"] = "none"
    """experts: products of experts in float8 e4m3, where a measurement says that a step is faster; generation
    stays in dtype. all: experts, and --train.float8 rowwise"""
    fp8_everywhere: bool = False
    """products of experts in fp8 also where no measurement says that they are faster; on a CPU, which has
    no such products, by a slow emulation"""
    isolate_documents: bool = True
    """let tokens attend only inside the document that they belong to"""
    eval_every: int = 0
    """steps between validations; 0: only after the last step"""
    eval_batches: int = 8
    """batches in a validation, each with as many sequences as a step"""
    timeout: float = 120.0
    """with several ranks: end the run, and say where it hangs, if a step makes no progress for this many
    seconds plus the duration of the previous step; 0: no limit"""
    also_stop_on: tuple[Literal["SIGUSR1", "SIGUSR2"], ...] = ()
    """signals that save and end the run as SIGTERM does (Slurm sends one with --signal=USR1@120);
    a signal that is not listed kills the run without a save"""
    collective_timeout: float = 600.0
    """seconds that a collective, or the connection of all ranks at the start, waits for a missing rank;
    set it higher for slow disks and large saves"""

    def __post_init__(self) -> None:
        if self.fp8 == "all":
            object.__setattr__(self, "float8", "rowwise")
        zero = "global_batch eval_every timeout"
        one = "batch seq accumulate eval_batches loss_scale_window loss_scale_hysteresis"
        train = check(self, "train.", one=one, zero=zero, positive="initial_loss_scale min_loss_scale")
        require_loss_scale(self, train)
        year = 365 * 86400
        valid = f"must be from 1 to {year} (seconds; a year)"
        train.require(1 <= self.collective_timeout <= year, "collective_timeout", valid)
        tokens = self.batch * self.accumulate * self.seq
        sizes = f"{self.batch} x {train.said('accumulate')} x {train.said('seq')}"
        wrong = f"{tokens} tokens a rank in a step; must be below {2**31}"
        require(tokens < 2**31, "train.batch", sizes, wrong)


def require_loss_scale(cfg: TrainConfig, train: Section) -> None:
    """ConfigError for settings of the loss scale that are out of range, contradict each other, or are unused.

    train: the section of cfg.
    """
    fixed = "loss_scale"
    dynamic = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "loss_scale_hysteresis")
    for name in (fixed, *dynamic):
        if getattr(cfg, name) == TrainConfig.__dataclass_fields__[name].default:
            continue
        train.require(cfg.dtype == "fp16", name, f"needs {Setting('train.dtype', 'fp16')}")
        both = f"not with {train.said(fixed)}, which is constant; leave one of them out"
        train.require(name == fixed or not cfg.loss_scale, name, both)
    most = f"must be at most {LARGEST_SCALE:.0f} (2^32)"
    for name in (fixed, *dynamic[:2]):
        train.require(getattr(cfg, name) <= LARGEST_SCALE, name, most)
    valid = "must be 0 (a dynamic factor), or positive and finite in float32"
    train.require(cfg.loss_scale == 0 or cfg.loss_scale >= FLOATS[0], fixed, valid)
    least = f"must be at most {train.said('initial_loss_scale')}"
    train.require(cfg.min_loss_scale <= cfg.initial_loss_scale, "min_loss_scale", least)


@former_names("parallel")
@dataclass(frozen=True)
class ParallelConfig:
    """How ranks divide the work: world = pp x replicate x dp x ep x etp, and cp x tp divides dp x ep x etp.

    Experts are divided over ep and shared by dp. Groups of cp x tp ranks read the same sequences, and each
    rank of a group works on its own tokens of these sequences.
    """

    dp: int | None = None
    """data-parallel degree outside the expert group; None: the world divided by the other degrees"""
    ep: int = 1
    """expert-parallel degree; divides the experts"""
    tp: int = 1
    """tensor-parallel degree: ranks that divide attention's heads and a sequence's tokens"""
    tp_pieces: int = 1
    """tp: number of pieces in which a rank's tokens are sent, each while another piece is multiplied"""
    cp: int = 1
    """context-parallel degree: ranks that divide a sequence's tokens"""
    cp_exchange: Literal["keys", "heads"] = "keys"
    """what context-parallel attention exchanges: keys (every rank gathers all keys and values),
    heads (all-to-all: each rank has all tokens of some heads)"""
    pp: int = 1
    """pipeline stages"""
    schedule: Literal["1f1b", "interleaved", "v"] = "1f1b"
    """order of a pipeline's micro-batches;
    v: two chunks per stage, the second in reverse order of stages, with the experts' weight gradients
    computed while a stage would be idle (where each rank holds its experts whole, without symm and etp)"""
    chunks: int | None = None
    """parts of the model on each pipeline stage; None: 1 for 1f1b, 2 for interleaved and v"""
    cut: tuple[int, ...] = ()
    """number of blocks of each part of a pipeline, in the model's order, for example 4 2;
    none given: cut so that all stages take equal time, by the cost model"""
    head: Literal["last", "divided"] = "last"
    """where a pipeline computes the head and the loss: last (in the last part),
    divided (every stage that has time left computes some tokens of each micro-batch, with its own copy of the
    head; for pretrain and sft)"""
    replicate: int = 1
    """whole copies of the sharded model: gradients are summed over them, parameters never gathered"""
    etp: int = 1
    """expert-tensor-parallel degree: ranks that divide every expert; ep is nearly always faster"""
    adaptive_r: int | Literal["auto"] | None = None
    """what the MoE layers send, with equal results: 0: the expert group's weights, to every rank;
    1: tokens, to the ranks that hold their experts; a divisor of etp: tokens, with each expert divided among
    this many ranks; auto: the cheapest for this model and batch; None: etp"""
    ep_across_nodes: bool = False
    """let expert groups span nodes, where tokens are exchanged over the slower network"""
    dispatch: Literal["auto", "local", "nccl", "symm"] = "auto"
    """how rows are sent to their experts: local (ep=1), nccl (all-to-all; gloo on CPU),
    symm (stores into the peers' memory; one NVLink node), auto: symm where it works, else all-to-all,
    across nodes in two hops, so that a token crosses the network once for each node"""
    dispatch_dtype: Literal["same", "fp8"] = "same"
    """symm: type in which rows are sent: same (the compute type),
    or fp8, float8 e4m3 with one scale per row (half the bytes, 2.6% rounding error each way)"""
    shard: Literal[1, 2, 3] = 3
    """what ranks divide in addition to masters and optimizer state (experts are not affected):
    3: weights and gradients (a gather before every forward and backward);
    2: gradients, summed in every micro-batch (ZeRO-2); 1: nothing, gradients are summed once (ZeRO-1);
    with 2 and 1 weights are gathered once a step and kept"""
    checkpoint: Literal["none", "moe", "attention", "block"] = "none"
    """activation checkpointing: part of each block whose activations are recomputed in the backward:
    MoE (or dense feed-forward) with its norm, attention with its norm, or the whole block"""
    gathered_gib: float = 16.0
    """where dp divides a rank's experts: the largest size, in GiB of the compute type,
    up to which the whole experts are gathered once a step and kept;
    above it, FSDP2 gathers the experts of each layer twice a step"""

    @property
    def chunks_a_stage(self) -> int:
        """Parts of the model on each stage: `chunks`, or the schedule's own number."""
        if self.chunks is None:
            return 1 if self.schedule == "1f1b" else 2
        return self.chunks

    def __post_init__(self) -> None:
        one = "dp ep tp tp_pieces cp pp chunks replicate etp"
        parallel = check(self, "parallel.", one=one, zero="gathered_gib")
        valid = [0, *divisors(self.etp)]
        must = f"must be auto or one of {valid} with {parallel.said('etp')}"
        parallel.require(self.adaptive_r in (None, "auto", *valid), "adaptive_r", must)
        dispatch, alone = self.dispatch, self.ep == 1
        wrong = f"needs {Setting('parallel.ep', 1)}, not {self.ep}; use auto or nccl"
        parallel.require(dispatch != "local" or alone, "dispatch", wrong)
        more = f"needs {Setting('parallel.ep')} above 1"
        parallel.require(dispatch != "symm" or not alone, "dispatch", f"{more}, not 1; use auto or local")
        ok = self.dispatch_dtype != "fp8" or not (alone or dispatch == "nccl")
        parallel.require(ok, "dispatch_dtype", f"{more} and symm, not ep={self.ep} and {dispatch}")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW (Loshchilov & Hutter 2017) and Muon, their schedule, clipping and the average of the weights."""

    lr: float = 3e-4
    """peak learning rate; if --init gives the weights, the default is 2e-5 for --task sft, and 1e-6 for
    preference and grpo"""
    betas: tuple[float, float] = (0.9, 0.95)
    """decay of the first and second moment"""
    eps: float = 1e-8
    """added to the root of the second moment"""
    weight_decay: float = 0.1
    """decoupled weight decay; norms and biases have none. The default is 0 if --init gives the weights for
    sft, preference or grpo"""
    clip: float = 1.0
    """largest global gradient norm; 0: no clipping"""
    warmup: int | None = 0
    """steps of linear warm-up; by default the preset's number, but at most a tenth of the steps.
    None: a tenth of the steps, but at most 100"""
    warmup_fraction: float = 0.0
    """instead of warmup: warm-up steps as a share of the steps up to the end of the decay"""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """decay after the warm-up;
    wsd keeps the peak, then decays linearly over the last decay-fraction of the steps"""
    decay_fraction: float = 0.2
    """wsd: share of the steps in which the learning rate decays"""
    decay_steps: int = 0
    """number of steps, warm-up included, at which the decay ends; min-lr applies from there;
    0: the decay ends with the run"""
    min_lr: float = 0.1
    """learning rate at the end, as a share of the peak"""
    offload: bool = False
    """keep AdamW's moments in the host's pinned memory and stream them through the GPU in each step:
    8 bytes less per parameter on the GPU"""
    states: Literal["fp32", "bf16", "int8"] = "fp32"
    """type of AdamW's moments, of 8 bytes per parameter in fp32: bf16 (4 bytes), rounded stochastically,
    or int8 (2 bytes), in blocks of at most 256 numbers with one scale each;
    vectors and small matrices keep fp32 with int8"""
    masters: Literal["fp32", "bf16"] = "fp32"
    """type of the weights that AdamW writes and checkpoints hold; bf16: no fp32 copy is kept, and steps are
    rounded stochastically (needs --train.dtype bf16)"""
    sums: Literal["fp32", "bf16"] = "fp32"
    """type of the sums of a step's gradients between micro-batches, before ranks add up theirs in fp32
    (bf16 needs --train.dtype bf16)"""
    ema: float = 0.0
    """decay of an exponential moving average of the weights; 0: no average is kept"""
    freeze: str | None = None
    """parameters that are not trained: a regular expression searched for in their names,
    'router|embedding' for example; they have no gradient, no moments, and no fp32 copy under bf16"""
    lr_factors: tuple[str, ...] = ()
    """factors on the learning rate of some parameters, each PATTERN:FACTOR, as 'router:0.1';
    a parameter gets the factor of the first pattern found in its name"""
    muon: str | None = None
    """matrices that Muon trains, with a momentum and orthogonal updates: a regular expression searched for in
    their names, '.' for all, 'experts' for those of the experts; AdamW trains all other parameters, and
    always embedding, head, routers, norms and biases; lr and weight-decay are those of AdamW"""
    muon_momentum: float = 0.95
    """muon: decay of the momentum"""
    muon_iterations: int = 5
    """muon: iterations of Newton-Schulz in a step"""
    muon_heads: bool = False
    """muon: queries, keys and values are one matrix for each head, not one for all heads"""
    qk_clip: float = 0.0
    """largest logit of an attention head: after a step in which a head's logits were above it, its query (and
    latent key) weights are scaled so that they reach it; 0: no limit"""
    max_skips: int = 10
    """non-finite steps in a row after which the run ends with an error"""

    def __post_init__(self) -> None:
        zero, share = "weight_decay warmup decay_steps", "ema warmup_fraction muon_momentum"
        one = "max_skips muon_iterations"
        optim = check(self, "optim.", one=one, zero=zero, positive="lr eps", share=share)
        optim.require(self.muon_iterations <= 20, "muon_iterations", "must be 1 to 20; 5 are usual")
        ok = self.qk_clip == 0 or FLOATS[0] <= self.qk_clip <= FLOATS[1]
        optim.require(ok, "qk_clip", "must be 0 (no limit), or positive and finite in float32")
        either = not (self.warmup and self.warmup_fraction)
        both = f"{self.warmup}, {optim.said('warmup_fraction')}"
        require(either, "optim.warmup", both, "give one of them")
        end = self.decay_steps
        valid = f"must be 0, or more than {optim.said('warmup')}"
        optim.require(not end or end > (self.warmup or 0), "decay_steps", valid)
        ok = all(0 <= b <= FLOATS[2] for b in self.betas)
        optim.require(ok, "betas", "each at least 0 and below 1 in float32")
        optim.require(self.clip >= 0, "clip", "must be 0 (off) or more")
        optim.require(0 < self.decay_fraction <= 1, "decay_fraction", "above 0, at most 1")
        optim.require(0 <= self.min_lr <= 1, "min_lr", "a share of the peak, 0 to 1")
        require_pattern(self.freeze or "", "optim.freeze")
        require_pattern(self.muon or "", "optim.muon")
        for text in self.lr_factors:
            pattern, _, factor = text.rpartition(":")
            require_pattern(pattern, "optim.lr_factors")
            ok = bool(pattern) and re.fullmatch(r"\d*\.?\d+([eE][+-]?\d+)?", factor) is not None
            valid = "must be PATTERN:FACTOR, a factor of 0 or more"
            require(ok and 0 <= float(factor) < FLOATS[1], "optim.lr_factors", text, valid)

    @property
    def factors(self) -> list[tuple[str, float]]:
        """The patterns of `lr_factors`, each with its factor on the learning rate."""
        split = [text.rpartition(":") for text in self.lr_factors]
        return [(pattern, float(factor)) for pattern, _, factor in split]


def require_pattern(pattern: str, setting: str) -> None:
    """ConfigError unless this is a regular expression. setting: the setting's name, for the error."""
    try:
        re.compile(pattern)
    except re.error as error:
        wrong = f"must be a regular expression: {error}"
        raise ConfigError.of(setting, pattern, wrong) from None


def require_columns(columns: tuple[str, ...], setting: str) -> None:
    """ConfigError unless each is OURS=THEIRS, no OURS twice. setting: the name for the error."""
    parts = [one.partition("=") for one in columns]
    valid = "must be OURS=THEIRS, as messages=conversations, each OURS once"
    whole = all(ours and theirs for ours, _, theirs in parts) and len({p[0] for p in parts}) == len(parts)
    require(whole, setting, " ".join(columns), valid)


@dataclass(frozen=True)
class DataConfig:
    """The sources of the tokens; their order is a pure function of (seed, epoch, global sample)."""

    path: tuple[str, ...] = ("stdlib",)
    """sources, each PATH or PATH:WEIGHT:
    'stdlib' (Python's own standard library),
    a file of text, JSON lines, a JSON array or parquet (.gz, .zst, .bz2 and .xz as well),
    a folder of files of one of these kinds or of shards, a pattern in quotes, 'set/*.jsonl',
    or a data set of the Hugging Face hub, hub:ORG/NAME[@REVISION][:CONFIG][:SPLIT]"""
    text_field: str = "text"
    """name of the string field that holds a row's text, in JSON and parquet"""
    columns: tuple[str, ...] = ()
    """renamed columns, each OURS=THEIRS: messages=conversations, or prompt=question completion=answer;
    a row's column THEIRS is read as OURS, before the kind of the rows is recognised"""
    skip_malformed: int = 0
    """largest number of malformed documents of a source that are skipped; the first are named"""
    tokenizer: str = "auto"
    """'auto' (the tokenizer of --init's model, else bytes), 'bytes',
    or the path of a Hugging Face tokenizer.json, of a sentencepiece model (tokenizer.model, Llama 2),
    or of a folder that holds one of these"""
    new_tokenizer: bool = False
    """train --init's weights on ids of a tokenizer that is not their own:
    a new vocabulary, or the same vocabulary in another file"""
    chat_template: str | None = None
    """chat data: a jinja file that replaces the tokenizer's own chat template"""
    overlong: Literal["drop", "truncate", "error"] = "drop"
    """chat data: what happens to a row longer than --train.seq (preference: both answers together);
    truncate: its beginning is trained, if that part holds a token to train"""
    seed: int = 0
    """seed of the sample order"""
    val_fraction: float = 0.05
    """share held out for validation: of the documents (files of text, rows of JSON lines, in any number of
    files); of one long text, or of shards, the end is held out"""
    val_path: tuple[str, ...] = ()
    """instead of val-fraction: separate sources for validation; all of --data.path is then trained on"""
    split: tuple[float, ...] = ()
    """instead of val-fraction: shares of training, validation and test data, as 949 50 1;
    the loss of the test data is measured once, after the last step"""

    def __post_init__(self) -> None:
        data = check(self, "data.", zero="seed skip_malformed")
        sources = len(self.path) > 0 and all(self.path)
        data.require(sources, "path", "needs at least one source, and no empty one")
        require_columns(self.columns, "data.columns")
        data.require(0 < self.val_fraction < 1, "val_fraction", "above 0 and below 1")
        both = bool(self.val_path and self.split)
        data.require(not both, "val_path", f"not with {Setting('data.split')}")
        data.require(all(self.val_path), "val_path", "must name no empty source")
        valid = "three shares, as 949 50 1: those of training and validation above 0, that of test 0 or more"
        ok = not self.split or (len(self.split) == 3 and all(0 <= s < 1e12 for s in self.split))
        data.require(ok and all(self.split[:2]), "split", f"must be {valid}")

    @property
    def held_out(self) -> tuple[float, float]:
        """Shares of the documents that are held out for validation and for the test."""
        if self.val_path:
            return 0.0, 0.0
        if not self.split:
            return self.val_fraction, 0.0
        return self.split[1] / sum(self.split), self.split[2] / sum(self.split)


@dataclass(frozen=True)
class SftConfig:
    """Supervised finetuning (--task sft)."""

    neftune: float = 0.0
    """noise on embeddings in training: uniform(-1, 1) times this / sqrt(tokens of the conversation x width);
    the paper has 5 (Jain et al. 2023)"""
    dft: bool = False
    """weigh each token's loss by the token's own probability, without a gradient through that weight
    (dynamic finetuning, Wu et al. 2025)"""

    def __post_init__(self) -> None:
        check(self, "sft.", zero="neftune")


@dataclass(frozen=True)
class PreferenceConfig:
    """Learning from pairs of a preferred and a rejected answer, or from answers with a label (--task
    preference)."""

    loss: Literal["sigmoid", "robust", "hinge", "ipo", "simpo", "orpo", "kto"] = "sigmoid"
    """preference loss: sigmoid is DPO's; simpo and orpo need no reference model; kto is for single answers
    with a label"""
    beta: float | None = None
    """how strongly the model is held to the reference: a smaller value allows more difference;
    None: 0.1, for simpo 2"""
    smoothing: float = 0.0
    """sigmoid and robust: probability that a pair's label is wrong, at least 0 and below 0.5;
    robust uses 0.1 if this is 0"""
    gamma: float = 1.0
    """simpo: margin by which the preferred answer should win"""
    ratio: float = 0.1
    """orpo: weight of the odds-ratio term, which is added to the loss of the preferred answer"""
    desirable_weight: float = 1.0
    """kto: weight of an answer whose label is true"""
    undesirable_weight: float = 1.0
    """kto: weight of an answer whose label is false"""

    def __post_init__(self) -> None:
        positive = "beta desirable_weight undesirable_weight"
        preference = check(self, "preference.", zero="gamma ratio", positive=positive)
        preference.require(0 <= self.smoothing < 0.5, "smoothing", "must be at least 0 and below 0.5")


@former_names("grpo")
@dataclass(frozen=True)
class GrpoConfig:
    """Learning from rewards of the model's own answers (--task grpo)."""

    rewards: tuple[str, ...] = ()
    """reward functions, each NAME, NAME:WEIGHT, FILE.py:FUNCTION or FILE.py:FUNCTION:WEIGHT:
    exact, number, boxed, choice, regex, length, code, or a function of your own"""
    prompts: int = 8
    """prompts of all ranks in one step, the same number in every layout"""
    group: int = 8
    """answers to each prompt, whose rewards are compared with each other"""
    max_tokens: int | None = None
    """most tokens of an answer; a prompt and its answer together must fit into --train.seq;
    None: 256, or half of --train.seq where that is less"""
    temperature: float = 1.0
    """temperature of sampling, and of the log-probs in the loss"""
    top_p: float = 1.0
    """nucleus sampling: tokens are drawn from the smallest set whose probabilities sum to this"""
    loss: Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo", "dppo", "rloo"] = "dapo"
    """the policy loss"""
    clip_low: float | None = None
    """the ratio of new to old probability is clipped to at least 1 minus this; None: the loss's default;
    dppo: tokens with a negative advantage are dropped once their probability fell by more than this"""
    clip_high: float | None = None
    """the ratio of new to old probability is clipped to at most 1 plus this; None: the loss's default;
    dppo: tokens with a positive advantage are dropped once their probability rose by more than this"""
    dual_clip: float | None = None
    """dapo, grpo, dr_grpo, gspo, rloo: upper bound of the ratio where the advantage is negative, above 1
    (3 in Ye et al. 2020); None: no bound"""
    ratio_cap: float | None = None
    """cispo: upper bound of the ratio that weighs a token (None: 5); dapo, grpo, dr_grpo: upper bound of
    ratios before they are clipped, above 1 + clip-high (None: no bound)"""
    ratio_penalty: float | None = None
    """dppo: weight of the penalty ln(ratio)^2, which pulls ratios back to 1; None: 0.001"""
    entropy: float = 0.0
    """weight of the policy's entropy, which is subtracted from the loss"""
    normaliser: Literal["token", "sequence", "constant"] | None = None
    """how token losses are averaged: over the step's tokens (token); over each answer's tokens, then over
    answers (sequence); their sum divided by answers x max-tokens (constant). None: the loss's default"""
    advantage: Literal["normalised", "mean", "leave-one-out"] | None = None
    """advantage of an answer: its reward minus the mean of its prompt's answers, divided by their standard
    deviation (normalised) or not (mean), or minus the mean of the other answers (leave-one-out);
    None: mean for dr_grpo, leave-one-out for rloo, else normalised"""
    advantage_eps: float = 1e-4
    """normalised: added to the standard deviation"""
    updates: int = 1
    """optimizer updates with the answers of each step"""
    kl: float = 0.0
    """weight of the KL divergence from the model that the run began with; 0: no such model is kept"""
    kl_in: Literal["loss", "reward"] = "loss"
    """where the divergence counts: added to the loss, or subtracted from the rewards"""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """estimator of the divergence at each token; None: k2 in the loss, k1 in the reward;
    k1 in the loss is refused, because its gradient is 0 on average"""
    overlong: Literal["train", "drop"] = "train"
    """answers that are cut off at max-tokens: trained like others (train), or left out of the loss (drop);
    the reward `length` lowers the reward of answers that are nearly that long"""
    resample: int = 0
    """dynamic sampling: how many times prompts whose answers all got the same reward are replaced;
    0: never (such prompts give no gradient)"""
    mismatch: Literal["truncate", "mask", "off"] | None = None
    """correction for tokens to which sampler and trainer give different probabilities: the loss is weighed by
    the ratio trainer / sampler, at most mismatch-cap (truncate), or 0 if the ratio is beyond mismatch-cap
    or 1/mismatch-cap (mask); None: truncate, for gspo and rloo off"""
    mismatch_cap: float = 2.0
    """mismatch: bound of the ratio, above 1"""
    replay: Literal["none", "rollout", "old"] = "none"
    """routing replay: the experts that updates use again, with weights computed from the current scores:
    those of the rollout (rollout, R3), or in a step's later updates those of its first one (old, R2)"""
    bitwise: bool = False
    """make the rollout's log-probs equal to those of the update's forward in every bit, so that ratios are
    exactly 1; slower, and needs --no-compile and a --train.seq that is a multiple of 128"""
    rollout_slots: int = 64
    """answers that each rank generates at the same time"""
    pool_gib: float | None = None
    """GiB of each rank's memory for keys and values of answers, allocated for a rollout and freed after it;
    None: as much as they need, at most 80% of the free memory"""
    offload: bool = False
    """keep AdamW's moments in the host's memory while answers are generated: 8 bytes per parameter more for
    keys and values. (Gradients take no memory at that time)"""
    reward_workers: int = 2
    """processes of each rank that compute rewards"""
    reward_timeout: float = 10.0
    """seconds after which a reward that is not computed yet has failed"""
    allow_empty: int = 0
    """steps in a row that may pass without a reward for any answer; after one more the run saves its state
    and ends. Validations are counted separately, by the same bound"""
    code: bool = False
    """let the reward `code` run what the model writes, without network and within limits"""
    pass_reward: float = 1.0
    """validation: smallest reward at which an answer counts as right, for pass@k"""

    def __post_init__(self) -> None:
        one, zero = (
            "prompts group max_tokens updates rollout_slots reward_workers",
            "kl resample ratio_penalty entropy",
        )
        positive = "temperature clip_high pool_gib reward_timeout ratio_cap advantage_eps"
        grpo = check(self, "grpo.", one=one, zero=f"{zero} allow_empty", positive=positive)
        compared = "must be at least 2, because answers are compared with each other"
        grpo.require(self.group > 1, "group", compared)
        grpo.require(self.temperature >= COLDEST, "temperature", f"must be at least {COLDEST}")
        grpo.require(0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1")
        low = self.clip_low
        grpo.require(low is None or 0 < low < 1, "clip_low", "must be above 0 and below 1")
        bounds = [name for name in ("clip_low", "clip_high") if getattr(self, name) is not None]
        if bounds and self.loss == "cispo":
            value = ", ".join([str(getattr(self, bounds[0])), *map(grpo.said, bounds[1:])])
            valid = f"leave it out, or {Setting('grpo.ratio_cap')}"
            raise ConfigError.of(f"grpo.{bounds[0]}", value, f"{grpo.said('loss')} has neither", valid)
        require_bounds(self)
        grpo.require(self.mismatch_cap > 1, "mismatch_cap", "must be above 1")
        whole = self.loss in ("gspo", "rloo") and self.mismatch in ("truncate", "mask")
        wrong = f"weighs single tokens, but {grpo.said('loss')} is a loss of whole answers"
        grpo.require(not whole, "mismatch", wrong, "off")


CLIPPED = "dapo", "grpo", "dr_grpo"  # losses of tokens by PPO's clip
LOSSES_WITH = dict(  # the losses that have a setting; a setting of every loss is not listed
    dual_clip=(*CLIPPED, "gspo", "rloo"),
    ratio_cap=(*CLIPPED, "cispo"),
    ratio_penalty=("dppo",),
    normaliser=(*CLIPPED, "cispo", "dppo"),
)


def require_bounds(g: GrpoConfig) -> None:
    """ConfigError unless the loss has the settings that are given for it, and every bound can take effect."""
    grpo = Section(g, "grpo.")
    for name, losses in LOSSES_WITH.items():
        valid = f"valid with {', '.join(losses)}, not with {grpo.said('loss')}"
        grpo.require(getattr(g, name) is None or g.loss in losses, name, valid)
    dual, cap = g.dual_clip, g.ratio_cap
    grpo.require(dual is None or 1 < dual < FLOATS[1], "dual_clip", "must be above 1")
    high = g.clip_high or (0.28 if g.loss == "dapo" else 0.2)
    above = f"must be above 1 + {Setting('grpo.clip_high', high)}, which bounds ratios as well"
    grpo.require(cap is None or g.loss == "cispo" or cap > 1 + high, "ratio_cap", above)
    counted = g.kl_estimator is None or g.kl > 0
    grpo.require(counted, "kl_estimator", f"needs {Setting('grpo.kl')} above 0")
    silent = g.kl_estimator == "k1" and g.kl_in == "loss"
    wrong = f"its gradient is 0 in the mean; valid with {grpo.said('kl_in')}: k2, k3"
    grpo.require(not silent, "kl_estimator", wrong)
    once = g.replay == "old" and g.updates == 1
    again = "uses the experts of the first update in later updates"
    needs = f"needs {Setting('grpo.updates')} of at least 2, or rollout"
    grpo.require(not once, "replay", f"{again}; {needs}")


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on frozen weights (LoRA, Hu et al. 2021), on each expert too: docs/adapters.md."""

    rank: int = 0
    """rank of the adapters of dense layers; experts get rank / top-k, at least 1. 0: no adapters, all weights
    are trained"""
    expert_rank: int | None = None
    """rank of each expert's adapters; None: rank / top-k, at least 1"""
    alpha: float = 32.0
    """an adapter adds (alpha / rank) B A to its matrix W"""
    rs: bool = False
    """the factor is alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023)"""
    targets: tuple[str, ...] = ()
    """matrices that get an adapter: regular expressions searched in their names, for example
    'attention experts' or 'attention.qkv'; none: all of attention, experts, shared experts and dense layers.
    Embedding, router and head get none"""
    ranks: tuple[str, ...] = ()
    """ranks of some matrices, each PATTERN:RANK, as 'attention:32'; a matrix gets the rank of the first
    pattern found in its name"""
    alphas: tuple[str, ...] = ()
    """alphas of some matrices, each PATTERN:ALPHA, in the same way"""
    dropout: float = 0.0
    """share of the inputs of dense layers' adapters dropped in training; experts' adapters have no dropout"""
    base: Literal["whole", "nf4"] = "whole"
    """nf4: the frozen matrices of experts and dense layers are held in 4 bits, in bitsandbytes' format
    (QLoRA); whole: in the type of --train.dtype"""
    init: str | None = None
    """start from the adapters of this step, of this run's newest step, or of this folder of PEFT's, trained
    on the weights of --init; rank, alpha and targets are then those of the adapters"""

    def __post_init__(self) -> None:
        lora = check(self, "lora.", zero="rank", one="expert_rank", positive="alpha", share="dropout")
        lora.require(all(self.targets), "targets", "must name no empty pattern")
        for pattern in self.targets:
            require_pattern(pattern, "lora.targets")
        valid = dict(ranks=("PATTERN:RANK, a rank of 1 or more", r"[1-9]\d*"))
        valid["alphas"] = ("PATTERN:ALPHA, a number above 0", r"\d*\.?\d+([eE][+-]?\d+)?")
        for name, (form, number) in valid.items():
            for text in getattr(self, name):
                pattern, _, value = text.rpartition(":")
                require_pattern(pattern, f"lora.{name}")
                good = bool(pattern) and re.fullmatch(number, value) is not None
                require(good and 0 < float(value) < FLOATS[1], f"lora.{name}", text, f"must be {form}")

    def rank_of(self, matrix: str, top_k: int) -> int:
        """The rank of a matrix's adapter. matrix: its name. top_k: experts of a token."""
        if (own := _of_matrix(self.ranks, matrix)) is not None:
            return int(own)
        return self.rank_of_experts(top_k) if ".experts." in matrix else self.rank

    def source_of(self, matrix: str) -> tuple[str, int | str]:
        """The setting, with its value, that decides the rank of a matrix's adapter."""
        for text in self.ranks:
            if re.search(text.rpartition(":")[0], matrix):
                return "ranks", text
        if self.expert_rank and ".experts." in matrix:
            return "expert_rank", self.expert_rank
        return "rank", self.rank

    def alpha_of(self, matrix: str) -> float:
        """The alpha of a matrix's adapter."""
        own = _of_matrix(self.alphas, matrix)
        return self.alpha if own is None else float(own)

    def scale_of(self, matrix: str, rank: int) -> float:
        """The factor of B A in a matrix's adapter of this rank."""
        return self.alpha_of(matrix) / (rank**0.5 if self.rs else rank)

    def rank_of_experts(self, top_k: int) -> int:
        """The rank of each expert's adapters, without `ranks`."""
        return self.expert_rank or max(1, self.rank // top_k)


def _of_matrix(values: tuple[str, ...], matrix: str) -> str | None:
    """The value of the first PATTERN:VALUE whose pattern is found in a matrix's name; None without one."""
    split = (text.rpartition(":") for text in values)
    return next((value for pattern, _, value in split if re.search(pattern, matrix)), None)


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept."""

    every: int = 0
    """steps between checkpoints; 0: only after the last step (and at a signal that ends the run)"""
    keep: int = 3
    """verified checkpoints that are kept; older ones are removed; 0: all are kept"""
    keep_best: bool = True
    """keep the checkpoint with the best validation as well"""
    mode: Literal["sync", "async", "off"] = "async"
    """async: training continues while a copy of the state is written;
    off: nothing is written, not even at the end"""

    def __post_init__(self) -> None:
        check(self, "checkpoint.", zero="every keep")


@dataclass(frozen=True)
class LogConfig:
    """The logs of a run, and how often they are written."""

    every: int = 1
    """steps between lines of metrics.jsonl"""
    progress: bool = True
    """show a progress bar on a terminal; without it, lines of the loss are printed, as outside a terminal"""
    report: bool = True
    """draw report.png at the end (about a second); --log.no-report leaves that to `python -m tmoe.report`"""
    tensorboard: bool = False
    """write TensorBoard files into the run folder"""
    wandb: str | None = None
    """name of a Weights & Biases project (needs the wandb extra)"""
    routes: tuple[int, ...] = ()
    """numbers of steps, from 1, whose routed expert ids every rank writes into the run folder's routes/, for
    a replay"""

    def __post_init__(self) -> None:
        check(self, "log.", one="every")


@dataclass(frozen=True)
class Config:
    """A whole run."""

    task: Literal["pretrain", "sft", "preference", "grpo"] = "pretrain"
    """what the model learns from: text (pretrain), answers in conversations (sft),
    preferred and rejected answers (preference), rewards of its answers (grpo)"""
    out: str = "runs/default"
    """run folder: config.json, metrics.jsonl, checkpoints/, report.png"""
    steps: int = 1000
    """optimizer steps"""
    epochs: float | None = None
    """instead of steps: passes over the training data, over prompts with --task grpo; 0.5 is half a pass.
    The number of steps follows from the data, its packing and the sequences of a step, rounded up"""
    seed: int = 0
    """seed of weights, dropout and jitter"""
    compile: bool = True
    """compile every block (torch.compile, fullgraph);
    on a CPU without a C++ compiler, blocks run eagerly and a note reports it"""
    resume: str = "auto"
    """'auto' (newest complete checkpoint of the run folder, if any), 'none', or the path of a step folder"""
    init: str | None = None
    """start from the weights of this step, run (its newest step), Hugging Face folder or name on the hub;
    optimizer, schedule and data start from the beginning"""
    load_optim: bool = True
    """resume with the optimizer's state;
    --no-load-optim: the step's weights, and its place in schedule and data, but new moments"""
    load_rng: bool = True
    """resume with the states of the random generators; after --no-load-rng other numbers are drawn"""
    eval_only: bool = False
    """validate and exit"""
    dry_run: bool = False
    """print parameters, placements and the bytes that each of --world ranks will hold, and exit"""
    world: int | None = None
    """dry run: number of ranks to plan for; None: the product of the axes"""
    gpu: GpuName | None = None
    """dry run: the GPU whose data sheet says whether the run fits; None: all known GPUs"""
    node: int | None = None
    """dry run: number of ranks of a node, which bounds tp, etp and, without ep-across-nodes, ep; None: 8"""
    profile: tuple[int, ...] = ()
    """numbers of steps, from 1, to trace with torch.profiler into the run folder"""
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        run = check(self, "", one="world node", zero="steps seed", positive="epochs")
        if self.epochs is None:
            require_steps(self)

        short = self.train.seq <= self.model.longest
        run.require(short, "train.seq", f"must be at most {self.model.longest_limit}")

        experts, ep = self.model.moe.experts, self.parallel.ep
        has_moe = any(self.model.is_moe(i) for i in range(self.model.layers))
        dense = "a model without MoE layers"
        run.require(has_moe or ep == 1, "parallel.ep", f"{dense} needs {Setting('parallel.ep', 1)}")
        run.require(has_moe or not self.log.routes, "log.routes", f"{dense} routes nothing")
        divides, wrong = experts % ep == 0, f"must divide {run.said('model.moe.experts')}"
        run.require(not has_moe or divides, "parallel.ep", wrong, divisors(experts))
        if has_moe:
            require_routing(self)
        for name, other in (("parallel.dispatch", "symm"), ("parallel.dispatch_dtype", "fp8")):
            padded = self.model.moe.pad and run.value(name) == other
            wrong = f"not with {Setting('model.moe.pad')}, which uses an all-to-all instead"
            run.require(not padded, name, wrong)
        if self.task == "grpo":
            require_grpo(self)
        require_layout(self)
        if self.model.mtp.depth:
            require_further(self)
        if self.lora.rank:
            require_lora(self)
        t, p = self.train, self.parallel
        require_float8(Asked.by(t.float8, t.fp8), t.batch, t.seq, p.tp, p.cp)
        require_fp8(self)
        wide = f"not with {run.said('train.dtype')}: float8 products give bf16 or fp32"
        run.require(t.float8 == "none" or t.dtype != "fp16", "train.float8", wide, "none")
        require_narrow(self)
        away = f"{run.said('task')} generates no answers; valid with {Setting('task')} grpo"
        run.require(self.task == "grpo" or not self.grpo.offload, "grpo.offload", away)

    @property
    def answer_tokens(self) -> int:
        """Most tokens of an answer with --task grpo."""
        most = self.grpo.max_tokens
        return min(256, max(self.train.seq // 2, 1)) if most is None else most


def require_steps(cfg: Config) -> None:
    """ConfigError unless each step that a setting names by its number is a step of the run."""
    run = Section(cfg)
    steps = 0 if cfg.eval_only else cfg.steps
    valid = f"must be numbers of steps, from 1 to {Setting('steps', steps)}"
    for name in ("profile", "log.routes"):
        ok = all(1 <= step <= steps for step in run.value(name))
        run.require(ok, name, valid if steps else "a run without steps has none")


def require_grpo(cfg: Config) -> None:
    """ConfigError unless the model can generate answers and be trained on them as cfg.grpo says."""
    g, t, model, run = cfg.grpo, cfg.train, cfg.model, Section(cfg)
    task = f"{Setting('task')} grpo"
    valid = "needs at least one of exact, number, boxed, choice, regex, length, code or FILE.py:FUNCTION"
    run.require(len(g.rewards) > 0 and all(g.rewards), "grpo.rewards", valid)
    pp = cfg.parallel.pp
    run.require(pp == 1, "parallel.pp", f"{task} needs 1; pipeline stages cannot generate answers")
    given = f"{t.accumulate}, {run.said('train.global_batch')}"
    follows = f"with {task} the number of micro-batches follows from the answers"
    ok = t.accumulate == 1 and t.global_batch == 0
    require(ok, "train.accumulate", given, follows, "1 and 0")
    kept = f"{Setting('optim.offload')} keeps the moments on the host in updates too; leave one out"
    run.require(not (g.offload and cfg.optim.offload), "grpo.offload", kept)
    if g.replay != "none":
        has_moe = any(map(model.is_moe, range(model.layers)))
        run.require(has_moe, "grpo.replay", "a model without MoE layers routes nothing", "none")
        several = f"{run.said('model.moe.selection')} gives tokens more or fewer experts than top-k"
        run.require(not SELECTIONS[model.moe.selection].columns, "grpo.replay", several, "none")
    require_no_noise(model, "grpo")
    if g.bitwise:
        require_bits(cfg)
    below = f"must be below {run.said('train.seq')}, which a prompt and its answer share"
    run.require(cfg.answer_tokens < t.seq, "grpo.max_tokens", below)
    routes = f"answers are not samples of the data; leave it out with {task}"
    run.require(not cfg.log.routes, "log.routes", routes)
    cut = f"prompts are never cut; valid for {task}: drop, error"
    run.require(cfg.data.overlong != "truncate", "data.overlong", cut)


def require_further(cfg: Config) -> None:
    """ConfigError for settings that blocks of further tokens (--model.mtp) do not support."""
    run, depth = Section(cfg), "model.mtp.depth"
    carried = f"{Setting(depth, 0)} keeps those of a published model unchanged for its export"
    folder = f"{carried}; a step that has them is exported first, and {Setting('init')} names that folder"
    pairs = f"{Setting('task', 'preference')} trains on answers that the model should not give"
    run.require(cfg.task != "preference", depth, f"{pairs}; {folder}", 0)
    adapters = f"{run.said('lora.rank')} trains adapters alone, and PEFT has no names for these blocks"
    run.require(not cfg.lora.rank, depth, f"{adapters}; {folder}", 0)
    policy = f"with {run.said('task')} their loss must not change the policy; {carried}"
    run.require(cfg.task != "grpo" or cfg.model.mtp.detach, "model.mtp.detach", policy, "True")
    last = f"not with {run.said(depth)}, whose blocks need all tokens on the last stage"
    run.require(cfg.parallel.head == "last", "parallel.head", last, "last")
    room = f"must be more than {run.said(depth)} + 1 tokens"
    run.require(cfg.train.seq > cfg.model.mtp.depth + 1, "train.seq", room)


def require_no_noise(model: ModelConfig, task: str) -> None:
    """ConfigError where training would draw random numbers that change log-probs."""
    drops = model.dropout or model.moe.jitter
    names = f"{Setting('model.dropout')}, {Setting('model.moe.jitter')}"
    require(not drops, f"{names}: {drops} changes log-probs; {Setting('task')} {task} needs 0")


def require_fp8(cfg: Config) -> None:
    """ConfigError for settings that experts with products in fp8 do not support."""
    t, run = cfg.train, Section(cfg)
    if t.fp8 == "none":
        run.require(not t.fp8_everywhere, "train.fp8_everywhere", f"needs {Setting('train.fp8')} experts")
        return
    name, none = "train.fp8", f"none, or {Setting('train.float8')} rowwise for dense layers"
    has_moe = any(map(cfg.model.is_moe, range(cfg.model.layers)))
    run.require(has_moe, name, "a model without MoE layers has no experts", none)
    narrow = f"not with {run.said('train.dtype')}: fp8 products give bf16 or fp32"
    run.require(t.dtype != "fp16", name, narrow, "none")
    held = f"not with {run.said('lora.base')}, whose products are in the dtype of training"
    run.require(cfg.lora.base == "whole", name, held, "none")
    for other in ("parallel.etp", "parallel.adaptive_r"):
        cut = f"not with {run.said(other)}, which multiplies by parts or gathered experts without codes"
        run.require(run.value(other) in (None, 1), name, cut, "none")
    widths = cfg.model.expert_dim, cfg.model.moe.ffn_dim
    sizes = f"experts of {widths[0]} x {widths[1]}: both must be multiples of {MULTIPLE}"
    run.require(not any(width % MULTIPLE for width in widths), name, sizes, "none")


def require_bits(cfg: Config) -> None:
    """ConfigError unless rollouts and updates can be equal in bits."""
    why, p, run = no_bits(cfg.model), cfg.parallel, Section(cfg)
    bits = Setting("grpo.bitwise")
    run.require(why is None, "grpo.bitwise", why or "")
    equal = f"{bits} needs the same products in answers and updates; valid: one of the two settings"
    run.require(cfg.train.fp8 == "none", "train.fp8", equal)
    run.require(cfg.train.float8 == "none", "train.float8", equal)
    eager = f"compiled blocks round differently; needs {Setting('compile', False)}"
    run.require(not cfg.compile, "grpo.bitwise", eager)
    run.require(cfg.train.seq % 128 == 0, "train.seq", f"must be a multiple of 128 with {bits}")
    divided = f"{p.tp}, {run.said('parallel.cp')}, {run.said('parallel.etp')}"
    wrong = f"divide work that rollouts do undivided; {bits} needs 1"
    require(p.tp == p.cp == p.etp == 1, "parallel.tp", divided, wrong)


def require_lora(cfg: Config) -> None:
    """ConfigError for settings that adapters do not support."""
    run = Section(cfg)
    rank = run.said("lora.rank")
    fixed = f"with {rank} adapters alone are trained; leave it out, or choose with {Setting('lora.targets')}"
    run.require(cfg.optim.freeze is None, "optim.freeze", fixed)
    small = f"not with {rank}: adapters alone are trained, by AdamW"
    run.require(cfg.optim.muon is None, "optim.muon", small, "leave it out")
    still = f"not with {rank}: the weights of attention are frozen"
    run.require(not cfg.optim.qk_clip, "optim.qk_clip", still, "0")
    wrong = f"not with {rank}: products of frozen layers in float8 are not supported"
    Asked.by(cfg.train.float8, cfg.train.fp8).require(False, wrong)
    codes = f"not with {run.said('lora.base')}: a decoded token reads codes, and training their values"
    run.require(not cfg.grpo.bitwise or cfg.lora.base == "whole", "grpo.bitwise", codes, "False")
    based = cfg.lora.init is None or cfg.init is not None
    run.require(
        based, "lora.init", f"needs {Setting('init')}, the weights on which these adapters were trained"
    )
    noise = f"changes log-probs; {run.said('task')} needs 0"
    run.require(not cfg.lora.dropout or cfg.task in ("pretrain", "sft"), "lora.dropout", noise)


def require_narrow(cfg: Config) -> None:
    """ConfigError for masters or sums of gradients in bf16 that the other settings contradict."""
    o, run = cfg.optim, Section(cfg)
    needs = f"needs {Setting('train.dtype', 'bf16')}"
    for name in ("masters", "sums"):
        ok = run.value(f"optim.{name}") == "fp32" or cfg.train.dtype == "bf16"
        run.require(ok, f"optim.{name}", needs, "fp32")
    adapters = f"not with {run.said('lora.rank')}: adapters are small, and their weights stay fp32"
    run.require(o.masters == "fp32" or not cfg.lora.rank, "optim.masters", adapters, "fp32")
    sharded = f"{run.said('parallel.shard')} sums gradients in the type of masters; give both, or neither"
    summed = o.masters == "fp32" or o.sums == "bf16" or cfg.parallel.shard != 2
    run.require(summed, "optim.masters", sharded, f"{Setting('optim.sums', 'bf16')} as well")


def require_layout(cfg: Config) -> None:
    """ConfigError unless attention, pipeline and experts can be divided as cfg.parallel says."""
    p, model, run = cfg.parallel, cfg.model, Section(cfg)
    require_heads(p, model)

    # tp and cp: a sequence's tokens.
    parts = p.cp * p.tp * (2 if p.cp > 1 and p.cp_exchange == "keys" else 1)
    degrees = [run.said(name) for name in ("parallel.cp", "parallel.tp") if run.value(name) > 1]
    valid = f"must be a multiple of {parts}, into which {' x '.join(degrees)} divides each sequence"
    run.require(cfg.train.seq % parts == 0, "train.seq", valid)

    # pp: layers and micro-batches.
    chunks, name = p.chunks_a_stage, run.said("parallel.schedule")
    one = f"{name} has 1; use interleaved"
    run.require(p.schedule != "1f1b" or chunks == 1, "parallel.chunks", one)
    several = f"{name} needs 2 or more; use 1f1b"
    run.require(p.schedule != "interleaved" or chunks > 1, "parallel.chunks", several)
    two = f"{name} has 2, one in each direction"
    run.require(p.schedule != "v" or chunks == 2, "parallel.chunks", two)
    fits = p.pp == 1 or p.pp * chunks <= model.layers
    require(fits, "parallel.pp", f"{p.pp} x {chunks} chunks", f"more than {run.said('model.layers')}")
    require_cut(cfg)
    if not cfg.train.global_batch:  # else `with_global_batch` knows how many there are
        require_micros(cfg)

    # etp: every expert's width.
    if p.etp > 1:
        has_moe = any(model.is_moe(i) for i in range(model.layers))
        alone = f"a model without MoE layers needs {Setting('parallel.etp', 1)}"
        run.require(has_moe, "parallel.etp", alone)
        width = model.moe.ffn_dim
        wrong = f"must divide {run.said('model.moe.ffn_dim')}"
        run.require(width % p.etp == 0, "parallel.etp", wrong, divisors(width))
        wrong = f"{run.said('parallel.etp')} needs auto or nccl"
        run.require(p.dispatch not in ("local", "symm"), "parallel.dispatch", wrong)


def require_cut(cfg: Config) -> None:
    """ConfigError unless --parallel.cut and .head fit the pipeline."""
    p, run = cfg.parallel, Section(cfg)
    pipelined = f"needs {Setting('parallel.pp')} above 1"
    run.require(p.head == "last" or p.pp > 1, "parallel.head", pipelined, "last")
    objective = f"{run.said('task')} compares whole sequences, whose tokens cannot be divided"
    run.require(p.head == "last" or cfg.task in ("pretrain", "sft"), "parallel.head", objective, "last")
    if not p.cut:
        return
    run.require(p.pp > 1, "parallel.cut", pipelined)
    parts, layers = p.pp * p.chunks_a_stage, cfg.model.layers
    wrong = f"must be {parts} whole numbers from 1 on, one for each part, whose sum is"
    ok = len(p.cut) == parts and all(n > 0 for n in p.cut) and sum(p.cut) == layers
    run.require(ok, "parallel.cut", f"{wrong} {run.said('model.layers')}")


def require_micros(cfg: Config, given: str = "") -> None:
    """ConfigError unless the pipeline has enough micro-batches.

    given: the setting that their number follows from, added to the value in the message.
    """
    p, micros, run = cfg.parallel, cfg.train.accumulate, Section(cfg)
    stages = run.said("parallel.pp")
    few = f"{stages} needs {p.pp} micro-batches or more"
    require(micros >= p.pp, "train.accumulate", f"{micros}{given}", few)
    whole = p.pp == 1 or p.schedule != "interleaved" or micros % p.pp == 0
    wrong = f"{run.said('parallel.schedule')} needs a multiple of {stages}"
    require(whole, "train.accumulate", f"{micros}{given}", wrong)


def with_global_batch(cfg: Config, readers: int) -> Config:
    """The settings with the accumulate that follows from --train.global-batch, if that is given.

    readers: `Axes.readers` of the run.
    Raises ConfigError where batch x readers does not divide the global batch, or where --train.accumulate is
    given too and differs from the computed value.
    """
    t = cfg.train
    if not t.global_batch:
        return cfg
    once, run = t.batch * readers, Section(cfg)
    name = run.said("train.global_batch")
    each = f"{run.said('train.batch')} x {readers} readers of this layout = {once} sequences a micro-batch"
    wrong, valid = f"must be a multiple of {each}", _near(t.global_batch, once)
    run.require(t.global_batch % once == 0, "train.global_batch", wrong, valid)
    micros = t.global_batch // once
    wrong = f"{name} gives {micros} ({each}); leave one of them out"
    run.require(t.accumulate in (1, micros), "train.accumulate", wrong)
    cfg = replace(cfg, train=replace(t, accumulate=micros))
    require_micros(cfg, f" (of {name})")
    return cfg


def _near(batch: int, once: int) -> str:
    """The multiples of `once` around a batch."""
    below = batch // once * once
    return " or ".join(str(n) for n in (below, below + once) if n)


def require_routing(cfg: Config) -> None:
    """ConfigError unless a token's experts fit on the ranks it may reach, and experts' tokens fill tiles."""
    p, moe = cfg.parallel, cfg.model.moe
    require_reach(moe, p.ep)
    if moe.selection == "tiles":
        tokens = cfg.train.batch * cfg.train.seq // (p.cp * p.tp) * moe.top_k / moe.outputs
        mean = f"an expert gets {tokens:g} of a rank's tokens on average"
        names = "train.batch", "train.seq", "model.moe.top_k"
        sizes = f"{' x '.join(map(Setting, names))} / {Setting('model.moe.experts')}"
        wrong = f"{mean}, fewer than one tile ({sizes})"
        Section(cfg).require(tokens >= moe.tile, "model.moe.tile", wrong)


def require_linear(p: ParallelConfig, model: ModelConfig) -> None:
    """ConfigError unless tp and cp by heads divide the key heads of linear layers.

    Mamba-2's groups may be fewer than the ranks: then ranks have copies, and divide the value heads.
    """
    parallel, kind = Section(p, "parallel."), "value" if model.linear.kind == "mamba2" else "key"
    G = getattr(model.linear, f"{kind}_heads")
    wrong = f"must divide {Setting(f'model.linear.{kind}_heads', G)}"
    parallel.require(G % p.tp == 0, "tp", wrong, divisors(G))
    needs = f"not with {Setting('model.linear.kind', model.linear.kind)}, which has no keys to gather"
    heads = f"heads, or {Setting('parallel.cp', 1)}"
    parallel.require(p.cp == 1 or p.cp_exchange == "heads", "cp_exchange", needs, heads)
    own = G // p.tp
    wrong = f"must divide the {own} {kind} heads of linear layers that tp leaves a rank"
    parallel.require(own % p.cp == 0, "cp", wrong, divisors(own))


def require_heads(p: ParallelConfig, model: ModelConfig) -> None:
    """ConfigError unless tp, and cp by heads, divide the heads of this model's attention.

    Linear layers have their own heads, and no keys that cp could gather.
    """
    if model.linear_layers:
        require_linear(p, model)
    parallel, heads = Section(p, "parallel."), model.heads
    divide = f"must divide {Setting('model.heads', heads)}"
    degrees = divisors(heads)
    full = (layer for layer in range(model.layers) if model.attends(layer))
    kinds = {model.kv_heads_in(model.window_of(layer)) for layer in full}
    for groups in sorted(kinds) if model.attention == "gqa" else ():
        degrees = [tp for tp in degrees if groups % tp == 0 or tp % groups == 0]
        parallel.require(p.tp in degrees, "tp", f"{divide} and fit {groups} key heads", degrees)
    parallel.require(p.tp in degrees, "tp", divide, degrees)
    if p.cp_exchange == "heads":
        own = heads // p.tp
        by_keys = "" if model.linear_layers else f", or {Setting('parallel.cp_exchange')} keys"
        valid = f"{divisors(own)}{by_keys}"
        parallel.require(own % p.cp == 0, "cp", f"must divide the {own} heads that tp leaves a rank", valid)
