"""Defaults that follow from other settings: a finetune's rate, the warm-up, the steps of --epochs.

A finetune here is a run of --task sft, preference or grpo whose weights --init gives.

next: cli/settings.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from tmoe.base.listing import counted
from tmoe.checkpoint.manifest import NAME, CheckpointError, read_manifest
from tmoe.config.check import ConfigError, Setting, fits
from tmoe.config.run import Config, require_steps
from tmoe.optim.learning_rate import MOST_WARMUP, lr_factor, warmup_of

# Peak learning rates of finetunes: the defaults of TRL's SFTConfig (2e-5), DPOConfig and GRPOConfig (1e-6).
RATES = dict(sft=2e-5, preference=1e-6, grpo=1e-6)
ADAPTED = 10  # adapters: this many times that rate (Schulman et al. 2025, LoRA Without Regret)
# Settings of OptimConfig that this file sets if the user gave no value.
WARMUPS = "warmup", "warmup_fraction"
OURS = "lr", "weight_decay", *WARMUPS


def with_defaults(cfg: Config, flags: Mapping[str, str], of_file: Set[str], run: Config | None) -> Config:
    """The settings with the defaults that follow from the task, the start and the number of steps.

    Flags and the file's settings always take precedence. A run that continues from a checkpoint keeps its
    rate, weight decay and warm-up. So does a new run with a run's settings, unless it is a finetune of
    another task. A finetune has the rate of RATES, or ADAPTED times that rate for adapters, and no weight
    decay. The warm-up is the preset's, but at most a tenth of the steps. It is None if the number of steps
    follows from --epochs: `with_length` computes it then.

    Args:
        cfg: settings of a preset or a run folder, overridden by those of a file.
        flags: values of flags as text, by dotted names; they replace settings of `cfg` later.
        of_file: dotted names of the file's settings.
        run: settings of the run folder or of a run's config.json, if the command names one.
    """
    optim = cfg.optim
    task, init = flags.get("task", cfg.task), flags.get("init", cfg.init)
    own = {name for name in OURS if f"optim.{name}" in of_file | flags.keys()}
    warmups = {name for name in WARMUPS if f"optim.{name}" in flags} or own & {*WARMUPS}
    found: dict[str, Any] = {name: 0 for name in WARMUPS if len(warmups) == 1 and name not in warmups}

    another = run is not None and bool(init) and task != run.task
    if run is not None and not another:
        return replace(cfg, optim=replace(optim, **found))
    if kept := of_the_run(flags.get("out", cfg.out), flags.get("resume", cfg.resume)):
        held = own | ({*WARMUPS} if warmups else set())
        found |= {name: value for name, value in kept.items() if name not in held}
        return replace(cfg, optim=replace(optim, **found))
    if init and task in RATES:
        times = ADAPTED if _whole(flags.get("lora.rank"), cfg.lora.rank) else 1
        usual = dict(lr=RATES[task] * times, weight_decay=0.0)
        found |= {name: value for name, value in usual.items() if name not in own}
    if not warmups:
        found["warmup"] = _warmup(cfg, flags)
    return replace(cfg, optim=replace(optim, **found))


def _warmup(cfg: Config, flags: Mapping[str, str]) -> int | None:
    """The preset's warm-up, but at most a tenth of the steps; None if the steps follow from --epochs."""
    if "epochs" in flags or (cfg.epochs is not None and "steps" not in flags):
        return None
    steps = _whole(flags.get("steps"), cfg.steps)
    end = _whole(flags.get("optim.decay_steps"), cfg.optim.decay_steps) or steps
    most = MOST_WARMUP if cfg.optim.warmup is None else cfg.optim.warmup
    return min(most, min(steps, end) // 10)


def _whole(text: str | None, default: int) -> int:
    """The whole number of a flag; `default` without the flag, or if its value is refused later."""
    try:
        return default if text is None else max(int(text), 0)
    except ValueError:
        return default


def of_the_run(out: str, resume: str) -> dict[str, Any]:
    """The values of OURS in the run that --resume continues; empty if there is no such run that can be read.

    With "auto" they are read from the folder's config.json, if it has a step; else from the step folder.
    """
    config: Any = None
    try:
        if resume == "auto" and any(path.is_file() for path in Path(out).glob(f"checkpoints/step-*/{NAME}")):
            config = json.loads(Path(out, "config.json").read_text()).get("config")
        elif resume not in ("auto", "none"):
            config = read_manifest(Path(resume)).info.get("config")
        optim = config["optim"] if config else {}
        values = {name: optim[name] for name in OURS if name in optim}
        kinds = dict(lr=float, weight_decay=float, warmup=int, warmup_fraction=float)
        return {name: value for name, value in values.items() if fits(value, kinds[name])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, CheckpointError, RecursionError):
        return {}  # the resume itself reports the error


def with_length(cfg: Config, samples: int, a_step: int, ahead: int = 0) -> Config:
    """The settings with the number of steps that --epochs needs, and with the warm-up that follows from it.

    The number is rounded up, because the last step is a whole one. ConfigError for a setting that needs more
    steps.

    Args:
        samples: number of samples of one epoch: packed rows, windows or prompts.
        a_step: samples of all ranks in one step.
        ahead: samples by which the data is ahead of the step number, because earlier steps were larger.
    """
    if cfg.eval_only:
        return cfg
    if cfg.epochs is not None:
        steps = max(1, math.ceil((cfg.epochs * samples - ahead) / a_step - 1e-9))
        try:
            cfg = replace(cfg, steps=steps)
            require_steps(cfg)
        except ConfigError as error:
            epochs = Setting("epochs", f"{cfg.epochs:g}")
            raise error.within(f"{epochs} of {samples:,} samples") from None
    if cfg.optim.warmup is None and not cfg.optim.warmup_fraction:
        cfg = replace(cfg, optim=replace(cfg.optim, warmup=warmup_of(cfg.steps, cfg.optim)))
    return cfg


def plan_of(cfg: Config, a_step: int, samples: int = 0, trained: float = 0.0, ahead: int = 0) -> list[str]:
    """Lines at a start: its learning rate and length, and warnings.

    Warnings are for a peak rate that is never reached, and for few steps that can become the best.

    Args:
        a_step: samples of all ranks in one step.
        samples: number of samples of one epoch; 0: not known.
        trained: mean number of trained tokens of a sample; 0: not known.
        ahead: as in `with_length`.
    """
    optim, steps = cfg.optim, cfg.steps
    warmup = warmup_of(steps, optim)
    parts = [
        f"learning rate {optim.lr:g}{of_adapters(cfg)}",
        f"warm-up {warmup:,} of {counted(steps, 'step')}",
    ]
    if samples:
        parts.append(f"{(steps * a_step + ahead) / samples:.3g} epochs")
    if cfg.task == "grpo":
        parts.append(f"{counted(a_step, 'prompt')} x {cfg.grpo.group} answers a step")
    elif trained:
        parts.append(f"about {trained * a_step:,.0f} trained tokens a step")
    lines = [", ".join(parts)]
    if warmup > steps > 0:
        highest = optim.lr * lr_factor(steps - 1, steps, optim)
        share = f"--optim.warmup-fraction={optim.warmup_fraction} is {warmup:,} steps"
        flag = f"--optim.warmup={warmup}" if optim.warmup else share
        end = f"more than --steps={steps}, so the full rate {optim.lr:g} is never reached"
        lines.append(f"warning: {flag}: {end}; the highest is {highest:.3g}")
    save, validate = cfg.checkpoint.every, cfg.train.eval_every
    if cfg.checkpoint.keep_best and cfg.checkpoint.keep and save and validate:
        both = math.lcm(save, validate)
        if both > save and both > validate:
            when = f"every {both:,} steps" if both < steps else "at the last step alone"
            lines.append(
                f"--checkpoint.every={save}, --train.eval-every={validate}: a step is saved and validated "
                f"{when}, and only such a step can be the best that stays; give both the same number"
            )
    return lines


def of_adapters(cfg: Config) -> str:
    """The part of a start's line about the rate of a finetune's adapters; "" for other runs."""
    usual = RATES.get(cfg.task, 0.0)
    if not cfg.lora.rank or not usual:
        return ""
    return f" ({cfg.optim.lr / usual:g} times the usual rate of all weights, {usual:g})"


def samples_a_step(cfg: Config, readers: int) -> int:
    """Number of samples of all ranks in one step: rows, or for --task grpo prompts.

    readers: `Axes.readers` of the run.
    """
    if cfg.task == "grpo":
        return cfg.grpo.prompts
    return cfg.train.batch * cfg.train.accumulate * readers
