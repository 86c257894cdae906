"""Translates Tutel's arguments (of moe_layer and its helloworld) to tmoe's flags.

Tutel is a layer, and its examples train it on random numbers. The resulting command trains one block with
that layer on text, with AdamW.

next: fms.py
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from tmoe.config.check import divisors
from tmoe.extras.migrate import names
from tmoe.extras.migrate.launchers import Launch
from tmoe.extras.migrate.tables import (
    FlagRow,
    GivenFlags,
    TranslatedCommand,
    nothing,
    refused,
    same,
    switch,
    worked,
)

LIBRARY = "a call of the library: `tmoe.MoE(...)(x, padding, top_k=, capacity_factor=, adaptive_r=)`"

ROWS: tuple[FlagRow, ...] = (
    # moe_layer(...)
    worked("gate_type", "top or cosine_top: `--model.moe.score` softmax or cosine; TopKGate's K: top-k"),
    same("model_dim", "--model.dim"),
    worked("experts", "its type: see expert_type"),
    worked("count_per_node", "as num_local_experts"),
    worked("num_experts_per_device", "as num_local_experts"),
    same("hidden_size_per_expert", "--model.moe.ffn-dim"),
    nothing("scan_expert_func", "experts are known by name; `tmoe.parallel.tag_experts` for other modules"),
    refused("result_func", "a function cannot be given on a command line; apply it to what tmoe.MoE returns"),
    nothing("group", "`--parallel.ep` makes the groups"),
    worked("seeds", "the first is `--seed`", "some"),
    nothing(
        "a2a_ffn_overlap_degree", "tmoe overlaps exchange and products itself; results do not depend on it"
    ),
    worked("is_postscore", f"False: `{names.WEIGH} before`"),
    worked(
        "batch_prioritized_routing",
        f"True: `{names.DROP} {names.DROPS['prioritized']}`, else `{names.DROPS['first_choices']}`",
    ),
    worked("normalize_gate", "`--model.moe.renormalize`; True where left out"),
    worked(
        "is_gshard_loss",
        f"True: `{names.BALANCE} {names.GSHARD}`; False: `{names.IMPORTANCE}`, which needs gate_noise",
    ),
    worked(
        "parallel_type",
        "where N ranks share an expert: adaptive:0 is `--parallel.adaptive-r 0`, adaptive:1 and data divide "
        "no expert, adaptive:R is `--parallel.etp N --parallel.adaptive-r R`, model `--parallel.etp N`; auto "
        "is R 1 there; a call may choose again: `moe(x, adaptive_r=)`",
    ),
    nothing("use_2dh", "across nodes rows are always sent in two hops", "one"),
    nothing("pad_samples", "deprecated there"),
    # the gate
    worked("k", "`--model.moe.top-k`"),
    nothing("fp32_gate", f"tmoe's router is fp32; `{names.ROUTER_DTYPE} fp64` is finer", "one"),
    worked("gate_noise", f"`{names.NOISE}`"),
    worked(
        "capacity_factor",
        f"`{names.CAPACITY}`, without its sign, with `{names.ROUNDING} tutel`; 1 where left out",
    ),
    same("proj_dim", "--model.moe.cosine-dim"),
    same("init_t", "--model.moe.cosine-temperature"),
    # each call
    refused("gate_index", "one router a layer"),
    worked("top_k", "`--model.moe.top-k`"),
    refused("reserve_dims", "tmoe's layer takes [B, S, D] or [T, D]"),
    nothing("inequivalent_tokens", "ranks may have different numbers of tokens"),
    worked("adaptive_r", "as parallel_type adaptive:R"),
    nothing("megablocks_size", "for inference on one GPU; tmoe does not pad"),
    # the experts
    worked("activation_fn", "relu or gelu of ffn: `--model.moe.activation`; silu of llama_ffn; else refused"),
    refused("output_dim", "the output of experts is as wide as their input"),
    worked("has_fc1_bias", "with has_fc2_bias `--model.moe.bias`; of ffn, True where left out"),
    worked("has_fc2_bias", "with has_fc1_bias `--model.moe.bias`; of ffn, True where left out"),
    # helloworld's
    same("--batch_size", "--train.batch"),
    same("--num_tokens", "--train.seq"),
    same("--hidden_size", "--model.moe.ffn-dim"),
    worked(
        "--num_local_experts",
        "N: `--model.moe.experts` N x world, `--parallel.ep` world; -N: N ranks share an expert, "
        "`--model.moe.experts` and `--parallel.ep` world / N",
    ),
    worked("--dtype", "`--train.dtype` fp32, bf16 or fp16; others are refused"),
    worked("--top", "`--model.moe.top-k`; 2 where left out"),
    worked("--l_aux_wt", f"`{names.BALANCE_COEFF}`; 0 where left out"),
    nothing("--allreduce_degree", "gradients are summed by FSDP2"),
    same("--num_steps", "--steps"),
    worked("--checkpoint_path", "`--init`, of an imported checkpoint"),
    worked("--checkpoint", "`--init`, of an imported checkpoint"),
    nothing("--device", "a GPU where there is one"),
    switch("--eval", "`--eval-only True` of a `--checkpoint`; without one refused"),
    nothing(
        "--use_tensorcore",
        "TF32 for fp32 is torch's setting (examples/helloworld.py takes the flag)",
        "nothing",
    ),
    worked(
        "--expert_type",
        "ffn, where left out: `--model.moe.activation relu --model.moe.bias`; llama_ffn: SwiGLU",
    ),
    nothing("--local_rank", "the launcher sets it"),
    # of a process's groups and environment
    nothing("group_count", "`--parallel.ep` and `--parallel.dp` make the groups"),
    nothing("backend", "NCCL on GPUs, gloo on CPUs"),
)
TYPES = dict(float32="fp32", bfloat16="bf16", float16="fp16")
# for each type of experts: its valid activation_fn (the first is the default) -> tmoe's name
ACTIVATIONS = dict(ffn=dict(relu="relu", gelu="gelu"), llama_ffn=dict(silu="swiglu", swish="swiglu"))


# Programs of Tutel that are not helloworld, or that differ from it -> the counterpart in tmoe.
PROGRAMS = {
    "helloworld_deepspeed": "DeepSpeed's MoE layer, not Tutel's",
    "helloworld_megatron": "a dense feed-forward over all ranks; --num_local_experts=-WORLD shares an expert",
    "helloworld_custom": "its gate or experts are code; tmoe.MoE(..., experts=...) takes experts of your own",
    "helloworld_from_scratch": "an MoE written without Tutel; examples/own_loop.py is a whole loop of tmoe",
    "moe_mnist": "images; give tmoe.MoE to a loop of your own, as examples/own_loop.py",
    "moe_cifar10": "images; give tmoe.MoE to a loop of your own, as examples/own_loop.py",
    "bandwidth_test": "a benchmark of the network; python -m benchmarks.exchange is tmoe's",
    "nccl_all_": "a test of a collective, not of a layer",
    "tutel.checkpoint": "python -m tmoe.migrate import tutel FILES OUT reads the files of all ranks",
}
TIMEOUT = "TUTEL_GLOBAL_TIMEOUT_SEC"
YEAR = 365 * 86400  # largest value of --train.collective-timeout


def translate(launch: Launch, world: int | None = None) -> TranslatedCommand:
    """The command of train.py for a command of helloworld, or arguments of moe_layer as `name=value`.

    world: ranks of the run; None: the fewest that num_local_experts allows.
    """
    out = TranslatedCommand()
    _program(launch.program, out)
    words = [f"--{word}" if re.match(r"[a-z]\w*=", word) else word for word in launch.words]
    given = GivenFlags(ROWS, words, out, abbreviated=True)
    _wait(launch.variables, out)
    each = _shared(given, out)
    out.world = world or max(-each, 1)
    _lay_out(given, out, each)
    dim = given.whole("model_dim", 2048, 1)
    if dim % 2:
        out.reject(f"model_dim={dim}", "must be even, as in Tutel")
    out.set("--model.dim", dim)
    for flag, ours, default in (
        ("hidden_size", "--model.moe.ffn-dim", 2048),
        ("batch_size", "--train.batch", 16),
        ("num_tokens", "--train.seq", 512),
        ("num_steps", "--steps", 100),
    ):
        if not given.has(flag) and not (flag == "hidden_size" and given.has("hidden_size_per_expert")):
            out.set(ours, default)
    out.set("--model.layers", 1)
    head = 64 if dim % 64 == 0 else 2
    out.set("--model.heads", dim // head)
    out.set("--model.kv-heads", dim // head)
    out.set("--model.head-dim", head)
    _router(given, out)
    _capacity(given, out)
    _experts(given, out)
    kind = given.text("--dtype", "float32")
    if kind not in TYPES:
        out.refuse(f"--dtype={kind}", f"tmoe trains in {' or '.join(TYPES)}")
    out.set("--train.dtype", TYPES.get(kind, "fp32"))
    if kind == "float16":
        out.notes.append(
            "--dtype=float16: tmoe keeps weights in fp32, and scales the loss (--train.loss-scale)"
        )
    if given.has("seeds"):
        out.set("--seed", given.text("seeds").strip("(,"))
    start = given.text("--checkpoint_path") or given.text("--checkpoint")
    if start:
        out.set("--init", start)
        out.notes.append(f"--init {start}: {NO_IMPORT}")
    if given.has("--eval") and start:
        out.set("--eval-only", True)
    elif given.has("--eval"):
        why = "without --checkpoint there are no weights to validate; benchmarks.moe_layer times a forward"
        out.refuse("--eval", why)
    out.notes.append(
        "the data and AdamW are tmoe's: Tutel is a layer, and its examples train it on random numbers"
    )
    return out


def _program(program: str, out: TranslatedCommand) -> None:
    """Refuses a program of Tutel that is not its helloworld, and notes how other helloworlds differ."""
    name = program.removesuffix(".py").replace("/", ".")
    for part, why in PROGRAMS.items():
        if part in name:
            return out.refuse(program, why)
    if name.endswith("helloworld_amp"):
        out.notes.append(f"{program}: --train.dtype bf16 is tmoe's automatic mixed precision; --dtype stays")
    if name.endswith("helloworld_switch"):
        out.notes.append(f"{program}: switches between calls are arguments of a call: {LIBRARY}")
    return None


def _wait(variables: Mapping[str, str], out: TranslatedCommand) -> None:
    """Translates TUTEL_GLOBAL_TIMEOUT_SEC, which the command or the environment sets."""
    text = variables.get(TIMEOUT, os.environ.get(TIMEOUT, ""))
    out.read.add(TIMEOUT)
    if not text:
        return
    if not text.isdigit() or int(text) < 1:
        return out.reject(f"{TIMEOUT}={text}", "must be a whole number of seconds, at least 1")
    if int(text) > YEAR:
        out.notes.append(f"{TIMEOUT}={text}: tmoe waits a year at most")
    out.set("--train.collective-timeout", min(int(text), YEAR))


NO_IMPORT = (
    "a checkpoint of Tutel holds a layer in a model of your own; "
    "python -m tmoe.migrate import tutel FILES STEP makes its experts and router a step's where they fit"
)


def _shared(given: GivenFlags, out: TranslatedCommand) -> int:
    """num_local_experts, a whole number: N means N experts on each rank, -N means N ranks per expert."""
    flags = "--num_local_experts", "num_experts_per_device", "count_per_node"
    flag = next((flag for flag in flags if given.has(flag)), flags[0])
    each = given.whole(flag, 2, -(2**16))  # Tutel also accepts fractions, which are refused
    if each == 0:
        out.reject(f"{flag}={given.text(flag)}", "must not be 0")
    return each or 2


def _lay_out(given: GivenFlags, out: TranslatedCommand, each: int) -> None:
    world, shared = out.world, max(-each, 1)
    if world % shared:
        out.reject(f"--num_local_experts={each}", f"{shared} ranks share an expert; --world={world}")
    experts = each * world if each > 0 else max(world // shared, 1)
    degree = _degree(given, out, shared)
    out.set("--model.moe.experts", experts)
    out.set("--parallel.ep", max(world // shared, 1))
    if degree > 1:
        out.set("--parallel.etp", shared)
    if degree == 0 and not _is_true(given, "is_postscore", True):
        why = "tmoe gathers experts only if weights multiply the activation; results are the same"
        out.notes.append(f"adaptive:0 with is_postscore=False: tokens are sent: {why}")
    elif degree not in (1, shared):
        out.set("--parallel.adaptive-r", degree)


def _degree(given: GivenFlags, out: TranslatedCommand, shared: int) -> int:
    """adaptive_r: 0, or among how many of the ranks that share an expert its width is divided."""
    text = given.text("adaptive_r") or given.text("parallel_type", "adaptive:1")
    kind, _, number = text.partition(":")
    if text in ("data", "auto"):
        return 1
    if text == "model":
        return shared
    digits = number if kind == "adaptive" else text
    if not digits.isdigit():
        out.reject(f"parallel_type={text}", "must be data, model, auto or adaptive:R")
        return 1
    degree = min(int(digits), shared)
    valid = [0, *divisors(shared)]
    if degree not in valid:
        out.reject(f"parallel_type={text}", f"R must be one of {valid}")
    return degree


def _router(given: GivenFlags, out: TranslatedCommand) -> None:
    gate = given.text("gate_type", "top")
    k = given.whole("top", given.whole("k", given.whole("top_k", 2)))
    if gate.startswith("Top") and gate.endswith("Gate") and gate[3:-4].isdigit():
        gate, k = "top", int(gate[3:-4])
    scores = dict(top="softmax", cosine_top="cosine")
    if gate not in scores:
        out.refuse(
            f"gate_type={gate}",
            f"tmoe has {' and '.join(scores)}; CONTRIBUTING.md shows a router of your own",
        )
    out.set("--model.moe.top-k", k)
    out.set(names.SCORE, scores.get(gate, "softmax"))
    normalised = _is_true(given, "normalize_gate", True) and k > 1
    out.set("--model.moe.renormalize", normalised)
    out.set("--model.moe.z-coeff", 0)
    noise = given.number("gate_noise", 0.0)
    if noise:
        out.set(names.NOISE, noise)
    weight = given.number("l_aux_wt", 0.0)
    if not weight:
        out.set(names.BALANCE, "none")
        return
    gshard = _is_true(given, "is_gshard_loss", True)
    if not gshard and not noise:
        out.reject("is_gshard_loss=False", "needs gate_noise above 0, as in Tutel")
    out.set(names.BALANCE, f"{names.GSHARD if gshard else names.IMPORTANCE}:{weight:g}")


def _capacity(given: GivenFlags, out: TranslatedCommand) -> None:
    factor = given.number("capacity_factor", 1.0)
    if factor:  # 0 is tmoe's default: nothing is dropped
        out.set(names.CAPACITY, abs(factor))  # below 0, Tutel drops the same and pads less, as tmoe does
        out.set(names.ROUNDING, "tutel")
        first = _is_true(given, "batch_prioritized_routing", False)
        out.set(names.DROP, names.DROPS["prioritized" if first else "first_choices"])
    if not _is_true(given, "is_postscore", True):
        out.set(names.WEIGH, "before")


def _experts(given: GivenFlags, out: TranslatedCommand) -> None:
    kind = given.text("--expert_type") or given.text("experts", "ffn")
    if kind not in ACTIVATIONS:
        out.refuse(f"--expert_type={kind}", f"tmoe has {' and '.join(ACTIVATIONS)}")
        return
    known = ACTIVATIONS[kind]
    name = given.text("activation_fn", next(iter(known)))
    # F.relu, torch.nn.functional.relu and lambda x: F.relu(x) are relu
    called = re.sub(r"^lambda (\w+): *([\w.]+)\(\1\)$", r"\2", name).rpartition(".")[2]
    if called not in known:
        out.refuse(f"activation_fn={name}", f"of {kind} tmoe has {' and '.join(known)}")
    elif kind == "ffn":
        out.set("--model.moe.activation", known[called])
    biases = [_is_true(given, flag, kind == "ffn") for flag in ("has_fc1_bias", "has_fc2_bias")]
    if any(biases):
        out.set("--model.moe.bias", True)
        if not all(biases):
            out.refuse(
                "has_fc1_bias, has_fc2_bias", "tmoe has biases on all projections of an expert or on none"
            )


def _is_true(given: GivenFlags, flag: str, default: bool) -> bool:
    text = given.text(flag, str(default)).lower()
    if text not in ("true", "false", "1", "0"):
        given.outcome.reject(f"{flag}={given.text(flag)}", "must be True or False")
        return default
    return text in ("true", "1")
