"""The tables of the cost model: dp x ep for some GPUs, their best layouts on all axes, or one step's parts.

next: constants.py
"""

import math
from types import SimpleNamespace

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.cost.search import Choice
from benchmarks.cost.step_time import Prediction, predict
from tmoe.config.axes import Axes
from tmoe.config.check import divisors
from tmoe.config.run import Config
from tmoe.plan.fitting import smallest_change
from tmoe.plan.memory import held_at_most, memory_per_rank


def layouts(cfg: Config, gpus: int, node: int) -> list[Axes]:
    """Axes to compare: every ep that divides experts and GPUs, fits nodes, and spans at most two nodes."""
    degrees = divisors(math.gcd(cfg.model.moe.experts, gpus))
    return [Axes(dp=gpus // ep, ep=ep) for ep in degrees if ep <= 2 * node and fits(ep, gpus, node)]


def fits(ep: int, gpus: int, node: int) -> bool:
    """Whether each group of ep consecutive ranks is inside one node, or fills whole nodes.

    train.py refuses any other ep, and this model does not cover it.
    """
    return gpus <= node or node % ep == 0 or ep % node == 0


def refused(cfg: Config, gpus: list[int], tokens: float, m: SimpleNamespace, parts: bool) -> str:
    """Why this model does not cover the request; "" if it does."""
    p = cfg.parallel
    if not 0 < tokens < math.inf:
        return f"--tokens {tokens}: must be above 0 and finite"
    if cfg.train.dtype != "bf16":
        return f"--train.dtype={cfg.train.dtype}: the constants were measured in bf16; add --train.dtype bf16"
    if cfg.train.float8 != "none":
        return f"--train.float8={cfg.train.float8}: not in this model; valid: none"
    if p.dispatch_dtype != "same":
        return f"--parallel.dispatch-dtype={p.dispatch_dtype}: not in this model; valid: same"
    times = "the times are of a step that trains all weights"
    memory = "the memory alone: train.py --dry-run"
    if cfg.lora.rank:
        return f"--lora.rank={cfg.lora.rank}: {times}; valid: 0; {memory}"
    if depth := cfg.model.mtp.depth:
        return f"--model.mtp.depth={depth}: the times have no blocks of further tokens; valid: 0; {memory}"
    if cfg.optim.freeze:
        return f"--optim.freeze={cfg.optim.freeze}: {times}; valid: none; {memory}"
    if cfg.task in ("preference", "grpo"):
        wrong = "the times have no reference model and no rollouts"
        return f"--task={cfg.task}: {wrong}; valid: pretrain, sft; {memory}"
    if not parts:
        known = p.dispatch in ("auto", "nccl")
        return "" if known else f"--parallel.dispatch={p.dispatch}: the page takes auto or nccl"
    if p.dispatch == "symm" and cfg.model.moe.bias:
        return "--parallel.dispatch=symm: experts have biases (--model.moe.bias); valid: auto, nccl"
    if p.dispatch == "symm" and p.ep > m.node:
        return f"--parallel.dispatch=symm: one node of {m.node} at most, not --parallel.ep={p.ep}"
    if bad := [n for n in gpus if not fits(p.ep, n, m.node)]:
        return (
            f"--parallel.ep={p.ep}: on {bad[0]} GPUs groups would straddle nodes of {m.node}; "
            f"valid: what divides {m.node}, or multiples of it"
        )
    return ""


def page(cfg: Config, gpus: list[int], tokens: float, m: SimpleNamespace, of: str = "") -> Table:
    """A line for every layout; the fastest that fits is bold, layouts that do not fit are dim.

    If no layout fits on some number of GPUs, a line below the table says what change would help. ~: more than
    one node, so the network's figures are assumed.
    of: the GPU, in words.
    """
    train = cfg.train
    sizes = f"{train.accumulate} x {train.batch} x {train.seq}"
    head = f"{of}\n" if of else ""
    table = Table(title=f"{head}{sizes} tokens a GPU, recomputed: {cfg.parallel.checkpoint}")
    would: list[str] = []
    heads = ["GPUs", "dp x ep", "M tokens a step", "ms", "tokens/s/GPU", "MFU", "exposed", "GiB"]
    for name in [*heads, f"days for {tokens:.3g} tokens", "GPU-hours"]:
        table.add_column(name, justify="right")
    for world in gpus:
        predictions = {axes: predict(cfg, axes, m) for axes in layouts(cfg, world, m.node)}
        fit = [axes for axes, p in predictions.items() if p.peak_bytes <= m.room]
        best = max(fit, key=lambda axes: predictions[axes].tokens_per_s_gpu, default=None)
        if predictions and not fit:
            change = smallest_change(cfg, predictions, lambda c, axes: held_at_most(c, axes) <= m.room)
            would.append(
                f"{world} GPUs: no layout fits; the smallest change that does: {change or 'not found'}"
            )
        about = "~" if world > m.node else ""
        for axes, p in predictions.items():
            gib = f"{p.peak_bytes / 2**30:.0f}" + ("" if axes in fit else " too much")
            hours = tokens / p.tokens_per_s_gpu / 3600
            across = "" if axes.ep <= m.node else " across nodes"
            table.add_row(
                str(world),
                f"{axes.dp} x {axes.ep}{across}",
                f"{p.tokens / 1e6:.2f}",
                f"{about}{p.seconds * 1e3:.0f}",
                f"{about}{p.tokens_per_s_gpu:,.0f}",
                "" if p.mfu is None else f"{about}{p.mfu:.1%}",
                f"{p.exposed:.0%}",
                gib,
                f"{hours / world / 24:,.1f}",
                f"{hours:,.0f}",
                style="bold" if axes == best else "" if axes in fit else "dim",
            )
        table.add_section()
    table.caption = "\n".join(would)
    table.caption_justify = "left"
    return table


def parts_table(p: Prediction) -> Table:
    """A line for every part of one step, the longest first."""
    table = Table("part", "ms", "share", title=f"{p.gpus} GPUs, {p.seconds * 1e3:.1f} ms")
    for name, seconds in sorted(p.parts.items(), key=lambda part: -part[1]):
        if not seconds:
            continue
        table.add_row(name, f"{seconds * 1e3:.1f}", f"{seconds / p.seconds:.1%}")
    return table


def memory_table(cfg: Config, axes: Axes, step: Prediction, m: SimpleNamespace) -> Table:
    """A line for each part of the memory of the fullest rank, as in the dry run, and the bound."""
    has = f"{m.room / 2**30:.1f} GiB for tensors"
    verdict = "fits" if step.peak_bytes <= m.room else "does not fit"
    table = Table("held by the fullest rank", "GiB", title=f"memory: {verdict}, a GPU has {has}")
    for name, size in memory_per_rank(cfg, axes).items():
        if size:
            table.add_row(name, f"{size / 2**30:.1f}")
    table.add_section()
    table.add_row("most at one time", f"{step.peak_bytes / 2**30:.1f}")
    return table


def best_table(found: list[Choice], gpus: int, batch_tokens: int, m: SimpleNamespace) -> Table:
    """A line for each of the fastest layouts of all axes: its step, and where the time goes."""
    table = Table(
        title=f"the fastest that fit on {gpus} GPUs, all axes, recomputation, offload, states and numbers of "
        f"micro-batches, at most {batch_tokens / 1e6:.2f} M tokens a step (--batch-tokens)",
        title_justify="left",
        box=SIMPLE_HEAD,
        caption=""
        if found
        else "no layout fits into memory, with blocks recomputed, offload and bf16 states",
    )
    for name in ("layout", "micro-batches", "M tokens", "ms", "tokens/s/GPU", "MFU", "GiB"):
        table.add_column(name, justify="left" if name == "layout" else "right", no_wrap=True)
    table.add_column("where the time goes")
    for cfg, axes, step in found:
        train = cfg.train
        table.add_row(
            spelled(cfg, axes) + saved(cfg, axes, m),
            f"{train.accumulate} x {train.batch} x {train.seq}",
            f"{step.tokens / 1e6:.2f}",
            f"{step.seconds * 1e3:.0f}",
            f"{step.tokens_per_s_gpu:,.0f}",
            "" if step.mfu is None else f"{step.mfu:.1%}",
            f"{step.peak_bytes / 2**30:.0f}",
            shares(step),
        )
    return table


def spelled(cfg: Config, axes: Axes) -> str:
    """The axes above 1, with the schedule of a pipeline and the method of cp."""
    p = cfg.parallel
    names = ("pp", "replicate", "dp", "ep", "etp", "cp", "tp")
    more = {"pp": f" {p.schedule}" + (f" {p.chunks}" if p.schedule == "interleaved" else "")}
    more["cp"] = f" {p.cp_exchange}"
    parts = [f"{name} {n}{more.get(name, '')}" for name in names if (n := getattr(axes, name)) > 1]
    return " x ".join(parts) or "dp 1"


def saved(cfg: Config, axes: Axes, m: SimpleNamespace) -> str:
    """The settings of a layout besides axes that the search chose, and a flag that a run needs."""
    words = [] if cfg.parallel.checkpoint == "none" else [f"recomputed: {cfg.parallel.checkpoint}"]
    words += ["offload"] if cfg.optim.offload else []
    kinds = cfg.optim.states, cfg.optim.masters, cfg.optim.sums
    named = zip(("states", "masters", "sums"), kinds, strict=True)
    words += [f"{name} {kind}" for name, kind in named if kind != "fp32"]
    words += ["across nodes"] if axes.ep > m.node else []
    return "".join(f", {word}" for word in words)


def shares(step: Prediction) -> str:
    """The parts that are at least a fiftieth of a step, the longest first."""
    parts = sorted(step.parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {s / step.seconds:.0%}" for name, s in parts if s >= step.seconds / 50)
