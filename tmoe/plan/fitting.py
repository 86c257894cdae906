"""The smallest change of settings with which a run fits into a GPU's memory, as flags.

Changes are tried in the order of their cost: recomputing; smaller micro-batches (with the same tokens per
step, then with fewer); moments on the host; moments, and sums of gradients, in bf16; all of these together;
then twice the ranks, over which parameters are divided, and so on.

next: commands/dry_run.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal, get_args

from tmoe.config.axes import Axes
from tmoe.config.check import ConfigError, Setting
from tmoe.config.gpus import GPUS
from tmoe.config.run import Config
from tmoe.plan.memory import held_at_most, memory_per_rank, peak_bytes

Recompute = Literal["moe", "attention", "block"]
MOST_TIMES = 64  # the most times that the number of ranks is multiplied


def smallest_change(cfg: Config, layouts: Iterable[Axes], fits: Callable[[Config, Axes], bool]) -> str:
    """Flags with which one of these layouts fits; "" if no change that was tried is sufficient.

    layouts: layouts of the same world size. fits: whether a run with these settings fits.
    """
    layouts, ways = list(layouts), changes(cfg)
    times = 1
    while times <= MOST_TIMES:
        for words, changed in ways[1:] if times == 1 else ways:
            for axes in layouts:
                wider = replace(axes, dp=axes.dp * times)
                if fits(changed, wider):
                    grown = [f"{wider.world} ranks (--parallel.dp {wider.dp})"] if times > 1 else []
                    return " with ".join([*grown, *([" ".join(words)] if words else [])])
        times *= 2
    return ""


def changes(cfg: Config) -> list[tuple[list[str], Config]]:
    """Settings that need less memory for the same steps, each with its flags.

    The first are the run's own settings; the last combine the strongest change of each kind.
    """
    options: list[tuple[list[str], Config]] = [([], cfg)]
    both, together = [], cfg
    strongest = {words[0].split()[0]: (words, change) for words, change in knobs(cfg)}
    for words, change in knobs(cfg):
        if altered := applied(cfg, change):
            options.append((words, altered))
    for words, change in strongest.values():
        if altered := applied(together, change):
            both, together = [*both, *words], altered
    return [*options, (both, together)]


Knob = tuple[list[str], Callable[[Config], Config]]


def knobs(cfg: Config) -> list[Knob]:
    """The settings that can be changed to save memory, one at a time, those with the least cost first."""
    options: list[Knob] = []
    if cfg.eval_only:  # the state is parameters only, which only more ranks divide
        return options
    for kind in get_args(Recompute):
        if cfg.parallel.checkpoint == "none" or kind == "block" != cfg.parallel.checkpoint:
            options.append(([f"--parallel.checkpoint {kind}"], _recomputing(kind)))
    halves = [cfg.train.batch >> n for n in range(1, cfg.train.batch.bit_length())]
    for batch in halves:  # same tokens per step; but gradients that add up need memory too
        times = -(-cfg.train.batch // batch) * cfg.train.accumulate
        words = [f"--train.batch {batch}"]
        words += [] if cfg.train.global_batch else [f"--train.accumulate {times}"]
        options.append((words, _batch(batch, times)))
    for batch in [] if cfg.train.global_batch else halves:
        options.append(([f"--train.batch {batch}"], _batch(batch, cfg.train.accumulate)))
    if not cfg.optim.offload:
        words = ["--optim.offload"]
        options.append((words, lambda c: replace(c, optim=replace(c.optim, offload=True))))
    adds_up = cfg.train.accumulate > 1 and cfg.train.dtype == "bf16" and cfg.optim.sums == "fp32"
    words = ["--optim.states bf16"] if cfg.optim.states == "fp32" else []
    words += ["--optim.sums bf16"] if adds_up else []
    if words:
        options.append((words, _in_bf16(cfg.optim.states == "fp32", adds_up)))
    return options


def _in_bf16(moments: bool, sums: bool) -> Callable[[Config], Config]:
    def change(cfg: Config) -> Config:
        optim = replace(cfg.optim, states="bf16") if moments else cfg.optim
        return replace(cfg, optim=replace(optim, sums="bf16") if sums else optim)

    return change


def _recomputing(kind: Recompute) -> Callable[[Config], Config]:
    return lambda c: replace(c, parallel=replace(c.parallel, checkpoint=kind))


def _batch(batch: int, accumulate: int) -> Callable[[Config], Config]:
    return lambda c: replace(c, train=replace(c.train, batch=batch, accumulate=accumulate))


def applied(cfg: Config, change: Callable[[Config], Config]) -> Config | None:
    """The changed settings; None if the settings contradict each other."""
    try:
        return change(cfg)
    except ConfigError:
        return None


def require_room(cfg: Config, axes: Axes, room: int) -> None:
    """Raises ConfigError if a rank with `room` bytes certainly cannot hold its part, and says what would fit.

    The part is parameters, gradients and moments, which every step holds at the same time, or half of the
    estimate of `peak_bytes`; with eval_only it is the parameters. If the room is between that and the full
    estimate, the run is tried, because the estimate assumes balanced routing.
    """
    need, what = needed(cfg, axes)
    if need <= room:
        return
    sizes = dict(dp=axes.dp, ep=axes.ep)
    sizes |= {name: size for name, size in vars(axes).items() if size > 1 and name not in sizes}
    layout = " ".join(Setting(f"parallel.{name}", size) for name, size in sizes.items())
    change = smallest_change(cfg, [axes], lambda c, a: needed(c, a)[0] <= room)
    advice = f"this would fit: {change}" if change else "use more ranks or a smaller --model"
    has = f"a rank has {room / 2**30:.1f} GiB of memory and needs {need / 2**30:.1f} for {what}"
    raise ConfigError(f"{layout}: {has}; {advice} ({Setting('dry_run')} lists the parts)")


def needed(cfg: Config, axes: Axes) -> tuple[int, str]:
    """Bytes that a rank certainly needs, and a name for them."""
    parts = memory_per_rank(cfg, axes)
    if cfg.eval_only:
        return parts["parameters"], "parameters"
    state = sum(parts[name] for name in ("parameters", "gradients", "moments"))
    if "pool" in parts and cfg.grpo.pool_gib is None:  # with a smaller pool answers wait
        parts["pool"] = 0
    return max((state, "parameters, gradients and moments"), (peak_bytes(parts) // 2, "half of a step"))


def verdict(cfg: Config, axes: Axes, gpu: str | None) -> list[str]:
    """Whether a rank's part fits into this GPU, and which change would fit; without a GPU, which GPUs fit.

    The comparison uses the most that tensors need at one time, the allocator's fragments and CUDA's memory.
    """
    need = held_at_most(cfg, axes)
    if gpu is None:
        able = {name: card for name, card in GPUS.items() if card.float8 or cfg.train.float8 == "none"}
        fit = [name for name, card in able.items() if need <= card.room]
        others = [name for name in able if name not in fit]
        return [f"fits: {', '.join(fit) or 'none'}; does not fit: {', '.join(others) or 'none'} (--gpu NAME)"]
    card = GPUS[gpu]
    has = (
        f"{card.title} has {card.room / 2**30:.1f} GiB for tensors "
        "(data sheet, without CUDA's own memory and fragments)"
    )
    if need <= card.room:
        return [f"verdict: fits. {need / 2**30:.1f} GiB at most at one time; {has}"]
    change = smallest_change(cfg, [axes], lambda c, a: held_at_most(c, a) <= card.room)
    lines = [f"verdict: does not fit. {need / 2**30:.1f} GiB at most at one time; {has}"]
    lines.append(
        f"the smallest change that fits: {change or 'none of recomputing, batch, offload, states and ranks'}"
    )
    certain, what = needed(cfg, axes)
    if certain > card.memory:  # as require_room decides at the start
        lines.append(f"a run refuses to start: {certain / 2**30:.1f} GiB for {what}")
    else:
        lines.append("a run starts all the same, and may run out of memory")
    return lines
