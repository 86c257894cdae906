"""Compiles the kernels of a configuration before training, in parallel, so that no rank waits for a compiler.

Any number of processes may run it at once, on an empty or a half-written cache: each kernel is compiled once
(ops/launch/precompile.py). Call it before the process group exists, and let no collective wait for it. The
command line is warmup_command.py.

next: ops/launch/precompile.py
"""

import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from triton import knobs

from tmoe.base.private_torch import find
from tmoe.base.types import FLOATS
from tmoe.config.axes import Axes
from tmoe.config.model import IGNORE, ModelConfig
from tmoe.config.run import Config
from tmoe.generate.cache import layer_widths
from tmoe.generate.gathered_model import AT_ONCE
from tmoe.generate.sampler import Sampling
from tmoe.model.block_bytes import by_log_probs
from tmoe.model.lora import dense_sizes, expert_ranks
from tmoe.model.rounding import rounding
from tmoe.moe.exchange.dispatch import pairs_bound
from tmoe.moe.fp8_choice import planned
from tmoe.moe.moe_bytes import runs_beside, travelling
from tmoe.moe.select.capacity import capacity
from tmoe.ops.launch.kernel_launch import device_facts
from tmoe.ops.launch.precompile import precompile, whole
from tmoe.ops.launch.shapes import (
    AttentionShapes,
    DecodeShapes,
    ExchangeShapes,
    LayerShapes,
    LinearShapes,
    PassShapes,
    RouterShapes,
    StepShapes,
)
from tmoe.ops.register import traces_of
from tmoe.optim.states import DTYPES

# numbers of tokens, up to the most in a pass, that select every kernel which depends on this number
COUNTS = sorted(
    {n for i in range(13) for n in (2**i, 2**i + 1, 3 * 2**i, 3 * 2**i + 1) if n < AT_ONCE} | {AT_ONCE}
)
_warm: set[tuple] = set()  # (architecture, trace) of all that this process has compiled or found


def traces(cfg: Config) -> list[tuple]:
    """The kernel launches of a rank under this configuration, in the form that precompile reads.

    The registration of each op has the traces of its kernels (ops/register.py).
    """
    m = cfg.model
    dtype = FLOATS[cfg.train.dtype]
    tokens = cfg.train.batch * cfg.train.seq // (cfg.parallel.cp * cfg.parallel.tp)
    found = of_layer(cfg, tokens, dtype)
    masters = FLOATS[cfg.optim.masters]
    states, muon = DTYPES[cfg.optim.states], cfg.optim.muon is not None
    found += traces_of(StepShapes(m.vocab, m.dim, IGNORE, dtype, by_log_probs(cfg), states, masters, muon))
    if m.linear_layers:
        found += traces_of(linear_shapes(cfg, dtype, trained=True))
        found += traces_of(linear_shapes(cfg, dtype, trained=False)) if cfg.task == "grpo" else []
    if cfg.task == "grpo":
        found += of_rollout(cfg, tokens, dtype)
    return found


def of_layer(cfg: Config, T: int, dtype: torch.dtype, trained: bool = True) -> list[tuple]:
    """The launches of an MoE layer for T tokens of this rank; trained: False: in a forward alone."""
    return traces_of(layer_shapes(cfg, T, dtype, trained))


def linear_shapes(cfg: Config, dtype: torch.dtype, trained: bool) -> LinearShapes:
    """A linear layer's heads on this rank; trained: False: in a rollout, which no axis divides."""
    n, p = cfg.model.linear, cfg.parallel
    parts = p.tp * p.cp if trained else 1
    heads = max(n.key_heads // parts, 1), n.value_heads // parts
    how = n.kind != "mamba2", n.kind == "mamba2" and n.conv_bias
    return LinearShapes(*heads, n.key_dim, n.value_dim, n.conv, dtype, trained, *how)


def layer_shapes(cfg: Config, T: int, dtype: torch.dtype, trained: bool) -> LayerShapes:
    """An MoE layer for T tokens of this rank.

    With expert parallelism a rank holds E / ep experts, and up to T * ep rows arrive, each with its K slots.
    """
    m, moe, t = cfg.model, cfg.model.moe, cfg.train
    p = cfg.parallel
    ep, etp = travelling(cfg, Axes(ep=p.ep, etp=p.etp))
    E, K = moe.experts, moe.slots
    pairs = pairs_bound(T, moe.top_k, ep, E // ep)
    if ep == 1 and moe.slots > moe.top_k:
        pairs = T * moe.top_k * 9 // 8
    pairs = pairs and pairs * etp
    rows, slots = T * ep * etp, K
    if moe.pad:
        rows, slots, pairs = E * capacity(T, K, moe) * etp, 1, pairs or T * K * etp
    weighed_inside = moe.weigh == "activation"
    if weighed_inside:
        passes = [PassShapes(rows, slots, pairs)]
        if ep > 1 and not (trained or moe.pad):  # with nccl any number of rows arrives, also an odd one
            passes.append(PassShapes(rows - 1, slots, pairs))
    else:  # one row for each pair, whose only expert has the weight 1
        passes = [PassShapes(T * K * etp, 1, None)]
    if moe.by_softmax_topk(ep):
        chosen, renormalize = moe.top_k, moe.renormalize or moe.softmax == "after"
    else:  # the op only chooses; quantile balancing reads one more expert
        chosen, renormalize = moe.top_k + (moe.selection == "quantile"), False
    wide, grpo = cfg.optim.sums == "fp32", cfg.task == "grpo"
    shared_dim = moe.shared_dim if runs_beside(cfg, Axes(ep=p.ep, etp=p.etp)) else 0
    return LayerShapes(
        tokens=T,
        dim=m.dim,
        dtype=dtype,
        trained=trained,
        # a frozen base has no gradients, etp's slices have no sums, and ops do not add to sums in bf16
        summed=trained and etp == 1 and not cfg.lora.rank and wide and (t.accumulate > 1 or grpo),
        width=m.expert_dim,
        ffn_dim=moe.ffn_dim // etp,
        experts=E // ep,
        activation=moe.activation,
        biased=moe.bias,
        passes=tuple(passes),
        moved=None if weighed_inside else (rows, slots),
        router=RouterShapes(moe.outputs, chosen, renormalize, moe.selection == "sinkhorn"),
        exchange=ExchangeShapes(ep, K, p.dispatch_dtype == "fp8", not moe.pad, shared_dim, moe.shared_halves)
        if ep > 1
        else None,
        adapters=expert_ranks(cfg),
        fp8=planned(cfg, Axes(ep=p.ep, etp=p.etp)),
    )


def of_rollout(cfg: Config, tokens: int, dtype: torch.dtype) -> list[tuple]:
    """The launches of a rollout, whose passes may have any number of tokens.

    tokens: of a micro-batch of training, for which an exchange has room at least.
    """
    r = cfg.parallel.adaptive_r
    whole = replace(cfg.parallel, tp=1, cp=1, etp=1, adaptive_r=0 if r == 0 else None)
    whole = replace(cfg, parallel=whole)
    counts = *COUNTS, max(tokens, cfg.grpo.rollout_slots)
    layers = [one for T in counts for one in of_layer(whole, T, dtype, trained=False)]
    return [*layers, *traces_of(decode_shapes(cfg, dtype))]


def decode_shapes(cfg: Config, dtype: torch.dtype) -> DecodeShapes:
    """A rollout's step for one token of each slot without the experts: attention, norms, sampling."""
    m, how = cfg.model, rounding(cfg.grpo.bitwise)
    blocks = range(m.layers)
    widths = [m.moe.shared_dim] * any(map(m.is_moe, blocks)) + [m.ffn_dim] * any(map(m.is_dense, blocks))
    return DecodeShapes(
        vocab=m.vocab,
        dim=m.dim,
        dtype=dtype,
        layers=tuple(attention_shapes(m, layer) for layer in range(m.layers) if m.attends(layer)),
        ffn_dims=tuple(width for width in widths if width),
        fused=how.fused,
        in_blocks=how.in_blocks,
        filters=Sampling(temperature=cfg.grpo.temperature, top_p=cfg.grpo.top_p),
        adapted=dense_sizes(m, cfg.lora),
        norm_offset=m.norm_offset,
        ffn_halves=m.moe.shared_halves,
    )


def attention_shapes(m: ModelConfig, layer: int) -> AttentionShapes:
    """Attention of a layer to its cache."""
    keys, key_dim, value_dim = layer_widths(m, layer)
    return AttentionShapes(
        queries=m.heads,
        keys=keys,
        key_dim=key_dim,
        value_dim=value_dim,
        window=m.window_of(layer),
        sinks=m.sinks_in(m.window_of(layer)),
        latent=m.attention == "mla",
        scale=m.head_dim**-0.5 if m.attention_multiplier is None else m.attention_multiplier,
        norm=m.qk_norm,
        norm_eps=m.norm_eps,
        rotary_dim=m.rotary_dim if m.rope_of(layer) else 0,
        interleave=m.rope.interleave,
        value_multiplier=m.value_multiplier,
    )


def local_arch() -> str | None:
    """The architecture of this machine's GPU, None without one."""
    return device_facts(torch.device("cuda", 0))[0] if torch.cuda.is_available() else None


def warm(cfgs: list[Config], arch: str | None = None, processes: int = 0) -> tuple[int, int]:
    """Compiles what the configurations need; returns (kernels compiled here, kernels needed).

    Earlier requests of this process count as not needed: the process may have threads by then, and must not
    fork with threads.

    arch: the architecture to compile for; default: that of this machine's GPU. processes: 0: one a core, at
    most 8.
    """
    if sys.platform == "linux" and any(cfg.compile for cfg in cfgs):
        drop_torn_objects()
    here = local_arch()
    arch = arch or here
    if arch is None:
        return 0, 0
    if here is not None:
        keep_tools()
    wanted = dict.fromkeys(t for cfg in cfgs for t in traces(cfg))  # each once
    new = [t for t in wanted if (arch, *t) not in _warm]
    found = precompile(arch, new, processes or min(8, os.cpu_count() or 1)) if new else (0, 0)
    _warm.update((arch, *t) for t in new)
    return found


def keep_tools() -> None:
    """From now on Triton uses the cache and the assembler that are set at this moment.

    With its first kernel inductor gives both of them another place where the environment names none. What
    was compiled before is then not found, and compiled again in the first step.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
    if "TRITON_PTXAS_PATH" not in os.environ and torch.version.cuda:
        os.environ["TRITON_PTXAS_PATH"] = knobs.nvidia.ptxas.path


def drop_torn_objects() -> None:
    """Removes from torch.compile's cache the libraries that a killed linker or a full disk has cut short.

    torch takes a file that is there for a whole one, and fails at each start. Each file is looked at under
    torch's own lock for it, so none that is just being written is removed.
    """
    cache_dir = find("torch._inductor.codecache.cache_dir")
    get_lock_dir = find("torch._inductor.codecache.get_lock_dir")
    if cache_dir is None or get_lock_dir is None:
        return
    for path in Path(cache_dir()).rglob("*.main.so"):
        with suppress(OSError, Timeout):
            if not whole(path):
                lock = Path(get_lock_dir(), f"{path.name.partition('.')[0]}.lock")
                with FileLock(lock, timeout=0):
                    path.unlink()
