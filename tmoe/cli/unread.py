"""Refuses settings that another task, loss or start would read.

`RULES` lists the settings that only some runs read. A setting that is in no rule is read by all runs.

next: cli/parse.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import NamedTuple

from tmoe.config.check import ConfigError
from tmoe.config.model import MLAConfig
from tmoe.config.run import Config, LoraConfig, OptimConfig

# For settings of --task preference, the losses that read them. A test compares this table with the formulas.
PREFERENCE = dict(
    beta=("sigmoid", "robust", "hinge", "ipo", "simpo", "kto"),
    smoothing=("sigmoid", "robust"),
    gamma=("simpo",),
    ratio=("orpo",),
    desirable_weight=("kto",),
    undesirable_weight=("kto",),
)
# Losses that do not normalise advantages by default (--grpo.advantage).
OTHER_ADVANTAGE = ("dr_grpo", "rloo")
WHOLE_ANSWERS = ("gspo", "rloo")  # losses without a mismatch correction by default (--grpo.mismatch)
OF_UPDATES = """loss clip_low clip_high dual_clip ratio_cap ratio_penalty entropy normaliser advantage
advantage_eps updates kl kl_in kl_estimator overlong resample mismatch mismatch_cap replay"""
# Settings of OptimConfig that a validation does not read.
OF_WEIGHTS = "ema", "freeze", "masters"
OF_OPTIM = tuple(f"optim.{one.name}" for one in fields(OptimConfig) if one.name not in OF_WEIGHTS)


class UnreadRule(NamedTuple):
    """Settings that only some runs read."""

    names: tuple[str, ...]
    """dotted settings; a name that ends with a point means all settings of that section"""
    read: Callable[[Config], bool]
    """whether the run reads them"""
    now: Callable[[Config], str]
    """the flag of this run because of which they are not read"""
    valid: str
    """the settings with which they are read"""
    refuses: bool = True
    """whether unread settings are an error; False: a note names them, because they do no harm"""


def of_task(names: str, *tasks: str) -> UnreadRule:
    """Settings that some tasks read."""
    return UnreadRule(
        tuple(names.split()),
        lambda cfg: cfg.task in tasks,
        lambda cfg: f"--task={cfg.task}",
        f"with --task {' or '.join(tasks)}",
    )


def of_value(names: str, setting: str, value: str) -> UnreadRule:
    """Settings that a run reads with one value of another setting. A note names them elsewhere."""
    flag = f"--{setting.replace('_', '-')}"
    given = attrgetter(setting)
    return UnreadRule(
        tuple(names.split()),
        lambda cfg: given(cfg) == value,
        lambda cfg: f"{flag}={given(cfg)}",
        f"with {flag} {value}",
        refuses=False,
    )


def of_preference(name: str, losses: tuple[str, ...]) -> UnreadRule:
    """A setting that some losses of --task preference read."""
    return UnreadRule(
        (f"preference.{name}",),
        lambda cfg: cfg.task != "preference" or cfg.preference.loss in losses,
        lambda cfg: f"--preference.loss={cfg.preference.loss}",
        f"with --preference.loss {' or '.join(losses)}",
    )


def of_grpo(
    name: str, read: Callable[[Config], bool], now: Callable[[Config], str], valid: str
) -> UnreadRule:
    """A setting of --task grpo that is read only with some values of another setting."""
    return UnreadRule((f"grpo.{name}",), lambda cfg: cfg.task != "grpo" or read(cfg), now, valid)


def normalises(cfg: Config) -> bool:
    """Whether rewards are divided by their standard deviation."""
    usual = "other" if cfg.grpo.loss in OTHER_ADVANTAGE else "normalised"
    return (cfg.grpo.advantage or usual) == "normalised"


def corrects(cfg: Config) -> bool:
    """Whether the loss corrects the sampler's probabilities."""
    usual = "off" if cfg.grpo.loss in WHOLE_ANSWERS else "truncate"
    return (cfg.grpo.mismatch or usual) != "off"


RULES = (
    of_task("sft.", "sft"),
    of_task("preference.", "preference"),
    of_task("grpo.", "grpo"),
    of_task("data.chat_template data.overlong", "sft", "preference", "grpo"),
    of_task("data.text_field train.isolate_documents", "pretrain"),
    *(of_preference(name, losses) for name, losses in PREFERENCE.items()),
    of_grpo(
        "advantage_eps",
        normalises,
        lambda cfg: f"--grpo.loss={cfg.grpo.loss}, --grpo.advantage={cfg.grpo.advantage}",
        "with --grpo.advantage normalised",
    ),
    of_grpo(
        "mismatch_cap",
        corrects,
        lambda cfg: f"--grpo.loss={cfg.grpo.loss}, --grpo.mismatch={cfg.grpo.mismatch}",
        "with --grpo.mismatch truncate or mask",
    ),
    of_grpo("kl_in", lambda cfg: cfg.grpo.kl > 0, lambda cfg: "--grpo.kl=0", "with --grpo.kl above 0"),
    of_value("optim.decay_fraction", "optim.schedule", "wsd"),
    of_value(" ".join(f"model.mla.{one.name}" for one in fields(MLAConfig)), "model.attention", "mla"),
    of_value("model.kv_heads model.head_dim", "model.attention", "gqa"),
    of_value("model.moe.tile model.moe.tile_rounding", "model.moe.selection", "tiles"),
    of_value("model.moe.sinkhorn_iterations", "model.moe.selection", "sinkhorn"),
    of_value("model.moe.quantile_ema", "model.moe.selection", "quantile"),
    of_value("model.moe.cosine_dim model.moe.cosine_temperature", "model.moe.score", "cosine"),
    of_value("model.moe.force_skew", "model.moe.force", "skew"),
    UnreadRule(
        ("optim.min_lr", "optim.decay_steps"),
        lambda cfg: cfg.optim.schedule != "constant",
        lambda cfg: "--optim.schedule=constant",
        "with --optim.schedule cosine, linear or wsd",
        refuses=False,
    ),
    UnreadRule(
        ("data.val_fraction",),
        lambda cfg: not (cfg.data.val_path or cfg.data.split),
        lambda cfg: "--data.val-path" if cfg.data.val_path else "--data.split",
        "without --data.val-path and --data.split",
        refuses=False,
    ),
    *(
        UnreadRule(tuple(names.split()), read, lambda cfg, now=now: now, valid, refuses=False)
        for names, read, now, valid in (
            (
                "checkpoint.every checkpoint.keep checkpoint.keep_best",
                lambda cfg: cfg.checkpoint.mode != "off",
                "--checkpoint.mode=off",
                "with --checkpoint.mode async or sync",
            ),
            (
                "optim.sums",
                lambda cfg: cfg.task == "grpo" or cfg.train.accumulate > 1 or cfg.train.global_batch > 0,
                "--train.accumulate=1",
                "with --train.accumulate above 1",
            ),
            (
                "parallel.schedule",
                lambda cfg: cfg.parallel.pp > 1,
                "--parallel.pp=1",
                "with --parallel.pp above 1",
            ),
            (
                "parallel.cp_exchange",
                lambda cfg: cfg.parallel.cp > 1,
                "--parallel.cp=1",
                "with --parallel.cp above 1",
            ),
            (
                "model.moe.balance_coeff",
                lambda cfg: cfg.model.moe.balance != "none",
                "--model.moe.balance=none",
                "with a balancing loss",
            ),
            (
                "model.moe.drop model.moe.rounding",
                lambda cfg: cfg.model.moe.capacity_factor is not None,
                "--model.moe.capacity-factor=None",
                "with --model.moe.capacity-factor",
            ),
            (
                "model.windowed model.window_kv_heads model.window_sinks",
                lambda cfg: cfg.model.window > 0,
                "--model.window=0",
                "with --model.window above 0",
            ),
            (
                "model.moe.bias_speed",
                lambda cfg: cfg.model.moe.choice_bias,
                "--model.moe.choice-bias=False",
                "with --model.moe.choice-bias",
            ),
            (
                "model.moe.group_score",
                lambda cfg: cfg.model.moe.groups > 1 or cfg.model.moe.top_devices > 0,
                "--model.moe.groups=1",
                "with --model.moe.groups above 1 or --model.moe.top-devices above 0",
            ),
        )
    ),
    UnreadRule(
        tuple(f"lora.{one.name}" for one in fields(LoraConfig) if one.name != "rank"),
        lambda cfg: cfg.lora.rank > 0,
        lambda cfg: "--lora.rank=0",
        "with --lora.rank above 0",
    ),
    UnreadRule(
        ("optim.muon_momentum", "optim.muon_iterations", "optim.muon_heads"),
        lambda cfg: cfg.optim.muon is not None,
        lambda cfg: "--optim.muon=None",
        "with --optim.muon PATTERN",
    ),
    UnreadRule(
        ("model.mtp.coeff", "model.mtp.detach"),
        lambda cfg: cfg.model.mtp.depth > 0,
        lambda cfg: "--model.mtp.depth=0",
        "with --model.mtp.depth above 0",
    ),
    UnreadRule(
        tuple(f"model.linear.{one}" for one in ("key_heads", "value_heads", "key_dim", "value_dim", "conv")),
        lambda cfg: cfg.model.linear.kind != "none",
        lambda cfg: "--model.linear.kind=none",
        "with --model.linear.kind deltanet or mamba2",
    ),
    UnreadRule(
        tuple(f"model.linear.{one}" for one in ("conv_bias", "least_step", "most_step")),
        lambda cfg: cfg.model.linear.kind == "mamba2",
        lambda cfg: f"--model.linear.kind={cfg.model.linear.kind}",
        "with --model.linear.kind mamba2",
    ),
    UnreadRule(
        ("model.linear.every",),
        lambda cfg: cfg.model.linear.kind != "none" and not cfg.model.layer_types,
        lambda cfg: "--model.layer-types" if cfg.model.layer_types else "--model.linear.kind=none",
        "with --model.linear.kind deltanet or mamba2, and without --model.layer-types",
    ),
    UnreadRule(
        ("model.moe_every",),
        lambda cfg: not cfg.model.one_branch,
        lambda cfg: "--model.layer-types with moe or dense",
        "where blocks have two branches",
    ),
    UnreadRule(
        ("model.moe.shared_activation",),
        lambda cfg: bool(cfg.model.moe.shared_dim) or any(map(cfg.model.is_dense, range(cfg.model.layers))),
        lambda cfg: "--model.moe.shared-dim=0",
        "with --model.moe.shared-dim above 0, or a dense block",
    ),
    UnreadRule(
        ("data.new_tokenizer",),
        lambda cfg: cfg.init is not None or cfg.resume not in ("auto", "none"),
        lambda cfg: "drawn weights, which have no tokenizer",
        "with --init",
    ),
    UnreadRule(
        ("load_optim", "load_rng"),
        lambda cfg: cfg.resume != "none",
        lambda cfg: "--resume=none",
        "with --resume auto or a step folder",
    ),
    UnreadRule(
        ("steps", "epochs", "checkpoint.", "train.eval_every", "load_optim", "load_rng", "sft.", *OF_OPTIM)
        + tuple(f"grpo.{name}" for name in OF_UPDATES.split()),
        lambda cfg: not cfg.eval_only or cfg.dry_run,
        lambda cfg: "--eval-only",
        "without --eval-only",
        refuses=False,
    ),
)


def require_read(cfg: Config, given: Mapping[str, str]) -> list[str]:
    """Raise ConfigError for given settings that this run does not read, with one message for each rule.

    given: dotted settings that the user gave -> the flag with its value, as spelled in an error.
    Returns notes on unused settings that are not refused.
    """
    notes = []
    for rule in RULES:
        if rule.read(cfg):
            continue
        named = [shown for name, shown in given.items() if applies(rule, name)]
        if named and not rule.refuses:
            notes.append(f"{', '.join(named)}: unused with {rule.now(cfg)}")
        elif named:
            leave = "leave it out" if len(named) == 1 else "leave them out"
            wrong = f"{', '.join(named)}: unused with {rule.now(cfg)}"
            raise ConfigError(wrong, valid=f"{rule.valid}, or {leave}")
    return notes


def applies(rule: UnreadRule, name: str) -> bool:
    """Whether a rule contains this dotted setting."""
    return any(name.startswith(one) if one.endswith(".") else name == one for one in rule.names)


def unread(cfg: Config, name: str) -> str:
    """The flag because of which a run does not read a dotted setting; "" if it reads the setting."""
    return next((rule.now(cfg) for rule in RULES if applies(rule, name) and not rule.read(cfg)), "")
