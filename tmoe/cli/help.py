"""The first page of train.py --help: a task's most used settings, with the defaults that apply.

next: cli/parse.py
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache, reduce
from typing import Any, get_args, get_origin, get_type_hints

from tmoe.config.presets import presets
from tmoe.config.run import Config

COLUMNS = 100
HEAD = 46  # columns of flag, kind and default
LINES = 120  # most lines of a page, by a test
START = "task init out steps epochs seed resume eval_only dry_run world compile"
TRAIN = "train.batch train.seq train.accumulate train.global_batch train.dtype train.eval_every"
OPTIM = "optim.lr optim.warmup optim.schedule optim.weight_decay optim.clip optim.freeze lora.rank"
PARALLEL = "parallel.dp parallel.ep parallel.tp parallel.cp parallel.pp parallel.checkpoint"
KEPT = "checkpoint.every checkpoint.keep log.every log.wandb"
CHAT = "data.path data.tokenizer data.chat_template data.overlong data.val_fraction"
GRPO = """grpo.rewards grpo.prompts grpo.group grpo.max_tokens grpo.temperature grpo.loss grpo.kl grpo.updates
grpo.clip_low grpo.clip_high grpo.overlong grpo.rollout_slots grpo.reward_workers grpo.reward_timeout"""
# Titles and dotted settings of each task's page.
PAGES: dict[str, dict[str, str]] = {
    "pretrain": {
        "start": START,
        "model": "model.layers model.dim model.heads model.vocab model.moe.experts model.moe.top_k",
        "data": "data.path data.tokenizer data.val_fraction data.seed",
        "step": TRAIN,
        "optimizer": OPTIM,
        "ranks": f"{PARALLEL} parallel.dispatch parallel.shard",
        "checkpoints and logs": f"{KEPT} profile",
    },
    "sft": {
        "start": START,
        "data": CHAT,
        "task": "sft.neftune sft.dft",
        "step": TRAIN,
        "optimizer": OPTIM,
        "ranks": PARALLEL,
        "checkpoints and logs": KEPT,
    },
    "preference": {
        "start": START,
        "data": CHAT,
        "task": "preference.loss preference.beta preference.smoothing preference.gamma preference.ratio",
        "step": TRAIN,
        "optimizer": OPTIM,
        "ranks": PARALLEL,
        "checkpoints and logs": KEPT,
    },
    "grpo": {
        "start": START,
        "data": CHAT,
        "task": GRPO,
        "step": "train.batch train.seq train.dtype train.eval_every train.eval_batches",
        "optimizer": OPTIM,
        "ranks": PARALLEL,
        "checkpoints and logs": KEPT,
    },
}


def page(cfg: Config, task: str, shown: str) -> str:
    """The first page for a task, at most LINES lines.

    cfg: the settings that apply without flags; its values are the defaults. shown: where they are from.
    """
    known = list(presets())
    rest = textwrap.fill(f"presets: {', '.join(known)}", COLUMNS, subsequent_indent="  ")
    lines = [
        "usage: train.py [PRESET | RUN] [--config FILE] [--init DIR] [--section.setting VALUE ...]",
        "",
        *rest.splitlines(),
        "RUN: a run folder, whose run continues. --init DIR: the weights and the model to start from.",
        "--config FILE: settings from a .toml or .json file. They override a preset's; flags override both.",
        "",
        f"The settings most used with --task {task}; in brackets the defaults of {shown}.",
        f"Other pages: --task {' | '.join(one for one in PAGES if one != task)} --help.",
        "Every setting: --help-all.",
    ]
    for title, names in PAGES[task].items():
        lines += ["", f"{title}:"]
        lines += [line for name in names.split() for line in _lines(cfg, task, name)]
    return "\n".join(lines)


def _lines(cfg: Config, task: str, name: str) -> Iterator[str]:
    """The lines of a setting: flag, kind and default, and the beginning of its help text, at most 3 lines."""
    *sections, last = name.split(".")
    owner = reduce(getattr, sections, cfg)
    value = getattr(owner, last)
    value = task if name == "task" else value
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    kind = get_type_hints(type(owner))[last]
    flag = f"--{name.replace('_', '-')}"
    head = f"  {flag} {_kind(kind)}".rstrip() + f" [{shown}]"
    text = in_short(meanings(type(owner))[last], value is None)
    wrapped = textwrap.wrap(text, COLUMNS - HEAD - 2, max_lines=3, placeholder=" …")
    if len(head) > HEAD:
        yield head
        head = ""
    yield f"{head:<{HEAD}}  {wrapped[0]}"
    yield from (" " * (HEAD + 2) + line for line in wrapped[1:])


def _kind(kind: Any) -> str:
    """The kind of a flag's value in short: N, X, TEXT, the choices; "" for a switch."""
    options = [one for one in get_args(kind) if one not in (type(None), ...)]
    if all(isinstance(one, str | int) for one in options) and options:
        return "|".join(map(str, options))
    if options:
        return f"{_kind(options[0])}{' ...' if get_origin(kind) is tuple else ''}"
    return {int: "N", float: "X", str: "TEXT"}.get(kind, "")


def in_short(text: str, none: bool) -> str:
    """A help text up to its first semicolon, or to the end of its first sentence.

    none: whether to add the meaning of the value None, if the text has one.
    """
    parts = re.split(r"(?:;|\.(?=\s|$))\s*(?![^()]*\))", " ".join(text.split()))
    more = [part for part in parts[1:] if none and part.startswith("None:")]
    return "; ".join([parts[0], *more])


@cache
def meanings(config: type) -> dict[str, str]:
    """The help texts of a dataclass of settings, the strings below its fields, by field name."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    assert isinstance(body, ast.ClassDef) and is_dataclass(config)
    found = {one.name: "" for one in fields(config)}
    for field, text in zip(body.body, body.body[1:], strict=False):
        named = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if named and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[field.target.id] = str(text.value.value)
    return found
