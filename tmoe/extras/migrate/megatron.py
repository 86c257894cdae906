"""Translates Megatron-Core's flags (pretrain_gpt.py) to tmoe's.

Megatron's defaults that differ from tmoe's are written into the command. So a flag that is left out of
Megatron's command has Megatron's default, and both commands compute the same.

next: tutel.py
"""

from __future__ import annotations

import ast
import math
from pathlib import Path

from tmoe.config.check import ConfigError
from tmoe.data.tokenizer import DataError, load_tokenizer
from tmoe.extras.migrate import names
from tmoe.extras.migrate.launchers import Launch
from tmoe.extras.migrate.megatron_flags import ROTARY, ROWS
from tmoe.extras.migrate.tables import GivenFlags, TranslatedCommand

VOCABULARIES = {"Llama2Tokenizer": 32000}  # sizes to assume if the tokenizer's file does not exist here
READ = "Llama2Tokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "HuggingFaceTokenizer"
MOE_PARTS = {"moe", "moe_act", "mlp", "shared_experts"}
# Flags that a command must have, because without them Megatron computes another function than tmoe.
NEEDED = {
    "--disable-bias-linear": "without it Megatron's linear layers have biases, tmoe's have none",
    "--swiglu": "without it Megatron's feed-forwards are GELU, tmoe's are SwiGLU",
    "--normalization": "without RMSNorm Megatron has LayerNorm, tmoe has RMSNorm",
    "--position-embedding-type": f"without rope Megatron learns positions; {ROTARY}",
    "--attention-dropout": "without 0 Megatron drops 0.1 inside attention, tmoe nothing",
}


# Parts of the names of Megatron's programs that do not train a decoder of text.
PROGRAMS = "bert", "t5", "ict", "retro", "mamba", "hybrid", "vision", "vlm", "mimo", "multimodal", "inpaint"
# Muon's matrices, for a factor of their learning rate
MUON = r"\.(qkv|qkvz|ba|out|qkv_a|q_b|kv_b|o|gate_up|down|to_latent|from_latent|eh_proj)(\.weight)?$"
AXES = tuple(
    f"--{name}-parallel-size"
    for name in ("tensor-model", "pipeline-model", "context", "expert-model", "expert-tensor")
)
REQUIRED = "--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--lr"


def translate(launch: Launch, world: int | None = None) -> TranslatedCommand:
    """The command of train.py that does what a command of pretrain_gpt.py does.

    world: ranks of the run; None: the smallest number that the layout allows.
    """
    out = TranslatedCommand()
    if any(part in launch.program.rpartition("/")[2] for part in PROGRAMS):
        out.refuse(launch.program, "tmoe trains decoders of text, as pretrain_gpt.py does")
    given = GivenFlags(ROWS, launch.words, out)
    for flag in REQUIRED:
        if not given.has(flag):
            out.reject(flag, "missing; Megatron needs it as well")
    instead = {"--position-embedding-type": "--rotary-base", "--swiglu": "--squared-relu"}
    for flag, why in NEEDED.items():
        if not given.has(flag) and not given.has(instead.get(flag, flag)):
            out.refuse(f"{flag} is left out", why)
    _lay_out(given, out, world)
    _model(given, out)
    _experts(given, out)
    if given.has("--squared-relu"):
        _squared_relu(given, out)
    _data(given, out)
    _train(given, out)
    _files(given, out)
    return out


def _model(given: GivenFlags, out: TranslatedCommand) -> None:
    dim, heads = given.whole("--hidden-size", 1, 1), given.whole("--num-attention-heads", 1, 1)
    out.set("--model.ffn-dim", given.whole("--ffn-hidden-size", _default_width(given)))
    groups = given.whole("--num-query-groups", 1) if given.has("--group-query-attention") else heads
    out.set("--model.kv-heads", groups)
    out.set("--model.head-dim", given.whole("--kv-channels", dim // max(heads, 1)))
    seq = given.whole("--seq-length", 0)
    out.set("--model.rope.max-seq", given.whole("--max-position-embeddings", seq))
    if not given.has("--init-method-std"):
        out.set("--model.init-std", 0.02)
    if given.has("--use-rope-scaling"):
        out.set("--model.rope.scaling", "llama3")
        out.set("--model.rope.factor", given.number("--rope-scaling-factor", 8.0))
        out.set("--model.rope.original-max-seq", 8192)
    out.set("--model.tied", not given.has("--untie-embeddings-and-output-weights"))
    out.set("--model.dropout", given.number("--hidden-dropout", 0.1))
    if not given.has("--norm-epsilon") and not given.has("--layernorm-epsilon"):
        out.set("--model.norm-eps", 1e-5)
    latent = given.has("--multi-latent-attention")
    out.set("--model.qk-norm", "head" if given.has("--qk-layernorm") and not latent else "none")
    if given.whole("--mtp-num-layers", 0):
        out.set("--model.mtp.coeff", given.number("--mtp-loss-scaling-factor", 0.1))
        out.set("--model.mtp.detach", given.has("--mtp-detach-heads"))
    if given.has("--add-qkv-bias"):
        out.set("--model.qkv-bias", True)
    if given.has("--apply-layernorm-1p"):
        out.set("--model.norm-offset", True)
    if given.has("--attention-output-gate"):
        out.set("--model.attention-gate", True)
    _linear(given, out)
    if latent:
        out.set("--model.attention", "mla")
        if not given.has("--qk-layernorm"):
            out.refuse("--qk-layernorm is left out", "tmoe's latent attention always normalizes its latents")
    _stretch(given, out, latent)
    percent = given.number("--rotary-percent", 1.0, 0)
    if percent != 1.0 and not latent:
        out.set("--model.rope.dim", int(given.whole("--kv-channels", dim // heads, 1) * percent))


def _linear(given: GivenFlags, out: TranslatedCommand) -> None:
    """Sets which blocks are linear: by a number N every N-th has attention; or a list of 1 (linear) and 0."""
    kind = given.text("--experimental-attention-variant", "")
    text = given.text("--linear-attention-freq", "")
    if kind and kind != "gated_delta_net":
        return out.refuse(f"--experimental-attention-variant={kind}", "tmoe has gated_delta_net")
    if not kind or not text:
        missing = "--linear-attention-freq" if kind else "--experimental-attention-variant gated_delta_net"
        return out.reject(missing, "missing; linear layers need it") if kind or text else None
    out.set("--model.linear.kind", "deltanet")
    if text.isdigit():
        return out.set("--model.linear.every", text)
    layers = given.whole("--num-layers", 1)
    if pattern := _pattern("--linear-attention-freq", text, layers, out):
        out.set("--model.layer-types", *("linear" if one else "full" for one in pattern))
    return None


def _stretch(given: GivenFlags, out: TranslatedCommand, latent: bool) -> None:
    """Sets YaRN, which Megatron uses for latent attention unless --rope-type is rope."""
    factor = given.number("--rotary-scaling-factor", 1.0, 1)
    kind = given.text("--rope-type", "yarn" if latent else "rope")
    if kind == "rope" or factor == 1:
        return
    out.set("--model.rope.scaling", "yarn")
    out.set("--model.rope.factor", factor)
    out.set("--model.rope.original-max-seq", given.whole("--original-max-position-embeddings", 4096, 1))
    out.set("--model.rope.mscale", given.number("--mscale", 1.0))
    out.set("--model.rope.mscale-all-dim", given.number("--mscale-all-dim", 0.0))


def _default_width(given: GivenFlags) -> int:
    """Default width of a feed-forward: 4 x hidden size; with a gate two thirds of it, rounded as Megatron."""
    dim = given.whole("--hidden-size", 0)
    return int((4 * dim * 2 / 3) / 64) * 64 if given.has("--swiglu") else 4 * dim


def _experts(given: GivenFlags, out: TranslatedCommand) -> None:
    layers = given.whole("--num-layers", 1)
    if not given.has("--num-experts"):
        out.set("--model.dense-layers", layers)
        return
    if not given.has("--moe-ffn-hidden-size"):
        out.set("--model.moe.ffn-dim", given.whole("--ffn-hidden-size", _default_width(given)))
    if given.has("--moe-layer-freq"):
        _frequency(given.text("--moe-layer-freq"), layers, out)
    if given.has("--moe-shared-expert-gate"):
        out.set("--model.moe.shared-gate", True)
    out.set("--model.moe.z-coeff", given.number("--moe-z-loss-coeff", 0.0))
    _router(given, out)
    _balance(given, out)
    _capacity(given, out)


def _squared_relu(given: GivenFlags, out: TranslatedCommand) -> None:
    """Sets relu squared for the kinds of feed-forwards that the model has."""
    if given.has("--swiglu"):
        out.reject("--squared-relu", "not with --swiglu; Megatron refuses both as well")
    if given.has("--num-experts"):
        out.set("--model.moe.activation", "relu2")
    dense = ("--model.dense-layers", ["0"]), ("--model.dense-blocks", []), ("--model.moe-every", ["1"])
    some = any(out.flags.get(flag, none) != none for flag, none in dense)
    if some or given.whole("--moe-shared-expert-intermediate-size", 0):
        out.set("--model.moe.shared-activation", "relu2")


def _frequency(text: str, layers: int, out: TranslatedCommand) -> None:
    """Translates --moe-layer-freq: N, the first and then every N-th block; or a list of 1 (MoE) and 0."""
    if text.isdigit():
        return out.set("--model.moe-every", text)
    if not (pattern := _pattern("--moe-layer-freq", text, layers, out)):
        return None
    dense = [i for i, moe in enumerate(pattern) if not moe]
    if dense == list(range(len(dense))):
        return out.set("--model.dense-layers", len(dense))
    return out.set("--model.dense-blocks", *dense)


def _pattern(flag: str, text: str, layers: int, out: TranslatedCommand) -> list[int]:
    """The list of 0 and 1 that a flag gives, one number for each block; [] if it is rejected."""
    try:
        pattern = read_pattern(text, flag)
    except ConfigError as error:
        out.wrong.append(error.spelt("flag"))
        return []
    if len(pattern) != layers or not {*pattern} <= {0, 1}:
        out.reject(f"{flag}={text}", f"must be {layers} numbers, each 0 or 1, or one number")
        return []
    return pattern


def read_pattern(text: str, flag: str = "--moe-layer-freq") -> list[int]:
    """The list that an expression such as `([0]+[1]*23)*2` computes. ConfigError for other expressions."""

    def value(node: ast.expr) -> list[int] | int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.List):
            return [n for item in node.elts if isinstance(n := value(item), int)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            a, b = value(node.left), value(node.right)
            if isinstance(node.op, ast.Add) and isinstance(a, list) and isinstance(b, list):
                return a + b
            if isinstance(node.op, ast.Mult) and isinstance(a, list) != isinstance(b, list):
                few, times = (a, b) if isinstance(a, list) else (b, a)
                if isinstance(few, list) and isinstance(times, int) and times * len(few) <= 4096:
                    return few * times
        raise ValueError

    try:
        pattern = value(ast.parse(text, mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        pattern = 0
    if not isinstance(pattern, list):
        raise ConfigError(f"{flag}={text}: must be a number or a list as ([0]+[1]*23)")
    return pattern


def _router(given: GivenFlags, out: TranslatedCommand) -> None:
    k = given.whole("--moe-router-topk", 2)
    score = given.text("--moe-router-score-function", "softmax")
    before = given.has("--moe-router-pre-softmax")
    groups, best = given.whole("--moe-router-num-groups", 1), given.whole("--moe-router-group-topk", 1)
    out.set("--model.moe.top-k", k)
    out.set(names.SCORE, score)
    # Softmax over the K chosen experts equals softmax over all E, divided by the sum of the K weights.
    # Sinkhorn has other weights.
    sinkhorn = "sinkhorn" in _kinds(given)
    after = score == "softmax" and not before and not sinkhorn
    bias = given.has("--moe-router-enable-expert-bias")
    out.set("--model.moe.softmax", "after" if after and groups == 1 and not bias else "before")
    out.set("--model.moe.renormalize", after or (score != "softmax" and k > 1))
    if groups > 1:
        each = k // max(best, 1)
        out.set("--model.moe.group-score", {1: "max", 2: "top2"}.get(each, names.GROUP_SCORE_TOP))
        if after and each > 1:
            why = "Megatron adds up logits for a group there, tmoe scores; use --moe-router-pre-softmax"
            out.refuse("--moe-router-num-groups", why)
    if bias:
        out.set("--model.moe.choice-bias", True)
    if given.text("--moe-router-dtype", "fp32") != "fp32":
        out.set(names.ROUTER_DTYPE, given.text("--moe-router-dtype"))
    if given.has("--moe-router-force-load-balancing"):
        out.set(names.FORCE, "even")
    if given.has("--moe-router-force-biased"):
        out.set(names.FORCE, "skew")
        out.set(names.FORCE_SKEW, given.number("--moe-router-force-biased", 1.0))


def _kinds(given: GivenFlags) -> list[str]:
    """The kinds of balancing; `[aux_loss,seq_aux_loss]` in one word is a list too."""
    words = given.list("--moe-router-load-balancing-type") or ["aux_loss"]
    return [kind.strip("'\" ") for word in words for kind in word.strip("[]").split(",")]


def _balance(given: GivenFlags, out: TranslatedCommand) -> None:
    types = _kinds(given)
    coeffs = [c for word in given.list("--moe-aux-loss-coeff") for c in word.strip("[]").split(",")] or ["0"]
    coeffs = coeffs * len(types) if len(coeffs) == 1 else coeffs
    if len(coeffs) != len(types):
        why = f"{len(coeffs)} numbers for {len(types)} kinds of balancing"
        return out.reject(f"--moe-aux-loss-coeff={' '.join(coeffs)}", why)
    if bad := [c for c in coeffs if not _is_number(c)]:
        return out.reject(f"--moe-aux-loss-coeff={bad[0]}", "must be a number, at least 0")
    for kind in types:
        if kind in names.SELECTIONS:
            out.set(names.SELECTION, names.SELECTIONS[kind])
        elif kind not in names.LOSSES and kind != "none":
            out.refuse(f"--moe-router-load-balancing-type={kind}", "not known")
    losses = [(names.LOSSES[t], c) for t, c in zip(types, coeffs, strict=True) if t in names.LOSSES]
    losses = [(name, c) for name, c in losses if float(c)]
    if len(losses) > 1:
        out.set(names.BALANCE, *(f"{name}:{coeff}" for name, coeff in losses))
    else:
        out.set(names.BALANCE, losses[0][0] if losses else "none")
        if losses:
            out.set(names.BALANCE_COEFF, losses[0][1])
    return None


def _capacity(given: GivenFlags, out: TranslatedCommand) -> None:
    factor = given.number("--moe-expert-capacity-factor", -1.0)
    if factor >= 0:
        out.set(names.CAPACITY, factor)
        out.set(names.ROUNDING, "megatron")
        policy = given.text("--moe-token-drop-policy", "probs")
        if policy not in ("probs", "position"):
            out.reject(f"--moe-token-drop-policy={policy}", "must be probs or position")
        out.set(names.DROP, names.DROPS.get(policy, policy))
        if given.has("--moe-pad-expert-input-to-capacity"):
            out.set(names.PAD, True)
    if given.has("--moe-token-dropping") and factor >= 0:
        out.notes.append("--moe-token-dropping: --moe-expert-capacity-factor alone makes tokens drop")
    elif given.has("--moe-token-dropping"):
        why = "Megatron calls it unsupported; --moe-expert-capacity-factor drops tokens"
        out.refuse("--moe-token-dropping", why)
    if given.has("--moe-apply-probs-on-input"):
        out.set(names.WEIGH, "before")


def _lay_out(given: GivenFlags, out: TranslatedCommand, world: int | None) -> None:
    tp, pp, cp, ep, etp = (given.whole(flag, 1, 1) for flag in AXES)
    out.set("--parallel.tp", tp)
    if given.has("--expert-tensor-parallel-size"):
        out.set("--parallel.etp", etp)
    elif tp > 1 and ep > 1:
        out.notes.append(
            f"--expert-tensor-parallel-size is left out, which divides every expert by tp={tp} in Megatron; "
            "here experts stay whole, with the same results"
        )
    stage = math.lcm(tp * cp, ep * etp)
    out.world = world or pp * stage
    if out.world % (pp * stage):
        layout = f"pp {pp}, tp {tp}, cp {cp}, ep {ep} and etp {etp}"
        out.reject(f"--world={out.world}", f"must be a multiple of {pp * stage}, over which {layout} fold")
    chunks = given.whole("--num-virtual-stages-per-pipeline-rank", 1, 1)
    if given.has("--num-layers-per-virtual-pipeline-stage"):
        each = given.whole("--num-layers-per-virtual-pipeline-stage", 1, 1)
        chunks = given.whole("--num-layers", 1, 1) // (pp * each)
    if chunks > 1:
        out.set("--parallel.schedule", "interleaved")
        out.set("--parallel.chunks", chunks)
    if given.has("--cp-comm-type"):
        kinds = dict(p2p="keys", all_gather="keys", allgather="keys", a2a="heads")
        kind = given.text("--cp-comm-type")
        if kind not in kinds:
            out.refuse(f"--cp-comm-type={kind}", f"tmoe has {', '.join(kinds)}")
        out.set("--parallel.cp-exchange", kinds.get(kind, "keys"))
    sharding = dict(no_shard=1, optim=1, optim_grads=2, optim_grads_params=3)
    if given.has("--data-parallel-sharding-strategy"):
        out.set("--parallel.shard", sharding.get(given.text("--data-parallel-sharding-strategy"), 3))
    elif given.has("--use-torch-fsdp2") or given.has("--use-megatron-fsdp"):
        out.set("--parallel.shard", 3)
    elif given.has("--use-distributed-optimizer"):
        out.set("--parallel.shard", 1)
    _recompute(given, out)
    if given.has("--optimizer-cpu-offload"):
        out.set("--optim.offload", True)
    if given.has("--distributed-timeout-minutes"):
        out.set("--train.collective-timeout", 60 * given.number("--distributed-timeout-minutes", 10, 1))


def _recompute(given: GivenFlags, out: TranslatedCommand) -> None:
    modules = {*given.list("--recompute-modules")}
    if given.text("--recompute-granularity") == "full":
        out.set("--parallel.checkpoint", "block")
    elif given.has("--moe-layer-recompute") or modules & MOE_PARTS:
        out.set("--parallel.checkpoint", "moe")
    elif given.has("--recompute-activations") or given.text("--recompute-granularity") == "selective":
        out.set("--parallel.checkpoint", "attention")


def _data(given: GivenFlags, out: TranslatedCommand) -> None:
    if given.has("--data-path"):
        try:
            out.set("--data.path", *blend(given.list("--data-path")))
        except ConfigError as error:
            out.wrong.append(error.spelt("flag"))
    elif not given.has("--mock-data"):
        out.reject("--data-path", "missing; give it, or --mock-data")
    out.set("--data.split", *_split(given.text("--split", "969,30,1"), out))
    out.set("--train.isolate-documents", given.has("--reset-attention-mask"))
    size = _vocabulary(given, out)
    tp = given.whole("--tensor-model-parallel-size", 1, 1)
    multiple = given.whole("--make-vocab-size-divisible-by", 128, 1) * tp
    out.set("--model.vocab", math.ceil(size / multiple) * multiple)


def _is_number(word: str) -> bool:
    try:
        return float(word) >= 0
    except ValueError:
        return False


def blend(words: list[str]) -> list[str]:
    """Sources of `--data.path`: `0.3 a 0.7 b` has weights, `a b` does not. ConfigError if only some have."""
    weights, paths = words[::2], words[1::2]
    if len(words) > 1 and len(weights) == len(paths) and all(map(_is_number, weights)):
        return [f"{path}:{weight}" for weight, path in zip(weights, paths, strict=True)]
    if any(map(_is_number, words)):
        raise ConfigError(f"--data-path={' '.join(words)}: must be paths, or a weight before every path")
    return words


def _split(text: str, out: TranslatedCommand) -> list[str]:
    shares = [share.strip() for share in text.replace("/", ",").split(",")]
    shares += ["0"] * (3 - len(shares))
    try:
        numbers = [float(share) for share in shares]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or numbers[0] <= 0:
        out.reject(f"--split={text}", "must be three numbers, as 949,50,1")
        return []
    if numbers[1] == 0:
        out.reject(f"--split={text}", "tmoe needs some validation data: a second number above 0")
    return shares


def _vocabulary(given: GivenFlags, out: TranslatedCommand) -> int:
    """The size of the vocabulary before it is rounded up to a multiple; also sets --data.tokenizer."""
    kind, path = given.text("--tokenizer-type"), given.text("--tokenizer-model")
    size = given.whole("--vocab-size", 0, 1)
    if kind == "NullTokenizer":
        if not size:
            out.reject("--vocab-size", "missing; NullTokenizer needs it")
        return size + 1  # the end of a document
    if kind not in READ:
        if given.has("--mock-data") and not kind:
            return size or 256
        why = "tmoe reads tokenizer.json and sentencepiece models: save it as one of these"
        out.refuse(f"--tokenizer-type={kind}" if kind else "--tokenizer-type is left out", why)
        return size or 256
    if not path:
        out.reject("--tokenizer-model", f"missing; {kind} needs it")
        return size or 256
    out.set("--data.tokenizer", path)
    if size:
        return size
    if Path(path).exists():
        try:
            return load_tokenizer(path).vocab
        except DataError as error:
            out.reject(f"--tokenizer-model={path}", f"{error}")
            return 256
    known = VOCABULARIES.get(kind, 0)
    if not known:
        out.reject(f"--tokenizer-model={path}", "no such file here; give --vocab-size, or run where it is")
        return 256
    out.notes.append(f"--tokenizer-model={path}: no such file here; taken to be Llama 2's, of {known} ids")
    return known


def _train(given: GivenFlags, out: TranslatedCommand) -> None:
    readers = max(out.world // math.prod(given.whole(flag, 1, 1) for flag in AXES[:3]), 1)
    micro = given.whole("--micro-batch-size", 1, 1)
    batch = given.whole("--global-batch-size", micro * readers, 1)
    if batch % (micro * readers):
        why = f"must be a multiple of --micro-batch-size={micro} x {readers} ranks that read"
        out.reject(f"--global-batch-size={batch}", why)
    out.set("--train.batch", micro)
    out.set("--train.global-batch", batch)
    steps = given.whole("--train-iters", given.whole("--train-samples", 0) // batch)
    if not (given.has("--train-iters") or given.has("--train-samples") or given.has("--skip-train")):
        out.reject("--train-iters", "missing; Megatron needs it or --train-samples")
    out.set("--steps", steps)
    lr = given.number("--lr", 1.0)
    if lr <= 0:
        out.reject(f"--lr={given.text('--lr')}", "must be above 0")
        lr = 1.0
    out.set("--optim.min-lr", given.number("--min-lr", 0.0) / lr)
    _schedule(given, out, steps, batch)
    out.set("--optim.weight-decay", given.number("--weight-decay", 0.01))
    out.set("--optim.betas", given.number("--adam-beta1", 0.9), given.number("--adam-beta2", 0.999))
    _types(given, out)
    _muon(given, out)
    _narrow(given, out)
    seed = given.whole("--seed", 1234)
    out.set("--seed", seed)
    out.set("--data.seed", seed)
    for flag, ours, default in (
        ("--eval-interval", "--train.eval-every", 1000),
        ("--eval-iters", "--train.eval-batches", 100),
        ("--log-interval", "--log.every", 100),
    ):
        if not given.has(flag):
            out.set(ours, default)


def _types(given: GivenFlags, out: TranslatedCommand) -> None:
    """The compute type, and the loss scale of fp16."""
    kinds = [kind for kind in ("bf16", "fp16") if given.has(f"--{kind}")]
    if len(kinds) > 1:
        out.reject("--fp16", "not with --bf16, as in Megatron")
    out.set("--train.dtype", *kinds[:1] or ["fp32"])
    if given.has("--fp8-format"):
        _fp8(given, out)
    if kinds != ["fp16"]:
        return
    if scale := given.number("--loss-scale", 0.0, 0.0):
        return out.set("--train.loss-scale", scale)
    first = given.number("--initial-loss-scale", 2.0**32, 0.0)
    out.set("--train.initial-loss-scale", int(first) if first.is_integer() else first)
    out.set("--train.min-loss-scale", given.number("--min-loss-scale", 1.0, 0.0))
    out.set("--train.loss-scale-window", given.whole("--loss-scale-window", 1000, 1))
    out.set("--train.loss-scale-hysteresis", given.whole("--hysteresis", 2, 1))


def _fp8(given: GivenFlags, out: TranslatedCommand) -> None:
    """Products in fp8: of experts, and of dense layers where each rank has whole sequences."""
    kind = given.text("--fp8-format")
    if kind not in ("e4m3", "hybrid"):
        out.reject(f"--fp8-format={kind}", "must be e4m3 or hybrid, as in Megatron")
    divided = any(given.whole(axis, 1, 1) > 1 for axis in (AXES[0], AXES[2]))
    if given.has("--num-experts"):
        out.set("--train.fp8", "experts" if divided else "all")
    else:
        out.set("--train.float8", "rowwise")


def _narrow(given: GivenFlags, out: TranslatedCommand) -> None:
    """The types of moments and of gradients that add up."""
    of_both = given.text("--exp-avg-dtype", "fp32")
    flags = {"--exp-avg-dtype": "states", "--exp-avg-sq-dtype": "states", "--main-grads-dtype": "sums"}
    for flag, ours in flags.items():
        kind = given.text(flag, "fp32")
        if kind not in ("fp32", "bf16"):
            out.refuse(f"{flag}={kind}", f"tmoe has fp32 and bf16 (--optim.{ours})")
        elif ours == "states" and kind != of_both:
            out.refuse(f"{flag}={kind}", f"both moments have one type, and --exp-avg-dtype is {of_both}")
        elif kind != "fp32":
            out.set(f"--optim.{ours}", kind)


def _muon(given: GivenFlags, out: TranslatedCommand) -> None:
    """Muon's settings and QK-Clip. Megatron's update is extra-scale / 0.2 times as large as tmoe's."""
    optimizer = given.text("--optimizer", "adam")
    if given.has("--qk-clip"):
        out.set("--optim.qk-clip", given.number("--qk-clip-threshold", 100.0, 0))
    if optimizer not in ("muon", "dist_muon"):
        if optimizer != "adam":
            out.refuse(f"--optimizer={optimizer}", "tmoe trains with AdamW, or with Muon and AdamW")
        return
    out.set("--optim.muon", ".")
    out.set("--optim.muon-momentum", given.number("--muon-momentum", 0.95, 0))
    out.set("--optim.muon-iterations", given.whole("--muon-num-ns-steps", 5, 1))
    if not (given.has("--muon-nesterov") or given.has("--muon-use-nesterov")):
        out.notes.append("Megatron's momentum does not look ahead without --muon-nesterov; tmoe's does")
    out.notes.append("Megatron's Muon trains routers, and gate and up as one matrix; tmoe's does neither")
    times = given.number("--muon-extra-scale-factor", 1.0, 0) / 0.2
    if round(times, 6) != 1:
        out.set("--optim.lr-factors", f"{MUON}:{times:g}")
        note = f"updates of Muon's matrices are {times:g} times AdamW's there (--muon-extra-scale-factor)"
        out.notes.append(f"{note}: a factor of their learning rate here, which decays them as many times")


def _schedule(given: GivenFlags, out: TranslatedCommand, steps: int, batch: int) -> None:
    style = given.text("--lr-decay-style", "linear")
    ours = dict(linear="linear", cosine="cosine", constant="constant", WSD="wsd")
    if style not in ours:
        out.refuse(f"--lr-decay-style={style}", f"tmoe has {', '.join(ours)}")
    out.set("--optim.schedule", ours.get(style, "linear"))
    end = given.whole("--lr-decay-iters", given.whole("--lr-decay-samples", 0) // batch)
    if end and end != steps:
        out.set("--optim.decay-steps", end)
    if given.has("--lr-warmup-fraction"):
        out.set("--optim.warmup-fraction", given.number("--lr-warmup-fraction", 0.0))
    else:
        samples = given.whole("--lr-warmup-samples", 0)
        out.set("--optim.warmup", given.whole("--lr-warmup-iters", samples // batch))
    if style == "WSD":
        falls = given.text("--lr-wsd-decay-style", "exponential")
        if falls != "linear":
            out.refuse(f"--lr-wsd-decay-style={falls}", "tmoe falls linearly: linear")
        out.set("--optim.decay-fraction", given.whole("--lr-wsd-decay-iters", 0) / max(end or steps, 1))


def _files(given: GivenFlags, out: TranslatedCommand) -> None:
    save, load = given.text("--save"), given.text("--load")
    start = given.text("--pretrained-checkpoint") or (load if given.has("--finetune") else "")
    if save:
        out.set("--out", save)
    if load and not start and load != save:
        start = load
    if start:
        out.set("--init", start)
        out.notes.append(
            f"--init {start}: a checkpoint of Megatron is made a step first: "
            f"python -m tmoe.migrate import megatron {start} STEP -- THESE FLAGS"
        )
    elif not load:
        out.set("--resume", "none")
    for flag in ("--no-load-optim", "--no-load-rng"):
        if given.has(flag):
            out.set(flag)
    if given.has("--tensorboard-dir"):
        out.set("--log.tensorboard", True)
    if not save:
        out.set("--checkpoint.mode", "off")
    elif (keep := given.whole("--most-recent-k", -1)) != 3:
        out.set("--checkpoint.keep", max(keep, 0))
    if given.has("--skip-train"):
        out.set("--eval-only", True)
    if given.has("--fake-process-group"):
        out.set("--dry-run")
        out.set("--world", out.world)
