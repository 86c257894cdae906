"""Whether a run may go on from a step folder, and what changes if it does.

next: checkpoint/rewrite.py
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tmoe.checkpoint.errors import refuse
from tmoe.checkpoint.manifest import read_manifest
from tmoe.config.check import fits, require
from tmoe.config.model import STEPS_READ, ModelConfig
from tmoe.config.run import Config
from tmoe.config.same import as_flags, build_config, differences

GROUPS = ("data", "optim", "sft", "preference", "grpo")  # sections whose changes a resumed run names


def require_same_model(step_dir: Path, model_cfg: ModelConfig) -> None:
    """MismatchError with every setting by which a step's model computes something else than `model_cfg`.

    Tensors of equal shapes do not reveal another top-k, norm or RoPE. Passes where the step does not say what
    its model was.
    """
    config = read_manifest(step_dir).info.get("config")
    if isinstance(config, dict) and isinstance(settings := config.get("model"), dict):
        theirs = build_config(settings)
        refuse(
            f"{step_dir} is not this model's (here: this run, there: the step)",
            differences(model_cfg, theirs),
            as_flags(model_cfg, theirs),
        )


def counts_of(step_dir: Path) -> tuple[int, int] | None:
    """Steps and tokens of the run that a step folder is of; None where it does not say them."""
    counts: list[Any] = [read_manifest(step_dir).state.get(name) for name in ("step", "tokens")]
    return (counts[0], counts[1]) if all(fits(n, int) and 0 <= n < 2**63 for n in counts) else None


def require_same_run(step_dir: Path, cfg: Config, data: dict[str, Any], readers: int) -> list[str]:
    """require_same_model, and ConfigError where this run keeps another kind of state than the step holds.

    data: `Dataset.facts()` of this run. readers: `Axes.readers` of this run.
    Returns, a line each, what the run may change but seldom wants to (the data, the seed, the types and
    lengths of numbers, the size of a step, the optimizer), and that no step is left to do.
    """
    require_same_model(step_dir, cfg.model)
    manifest = read_manifest(step_dir)
    other = f"; start anew from its weights with --init {step_dir}"

    # The kinds of state in the folder: what a run must have, and the average that only some runs keep.
    held = {name.partition(".")[0] for name in manifest.tensors}
    new = not cfg.load_optim
    anyway = f"; go on with new moments with --no-load-optim, or{other[1:]}"
    require("optim" in held or new, f"--resume={cfg.resume}: {step_dir} holds no optimizer state{anyway}")
    counts = counts_of(step_dir) if isinstance(manifest.state.get("guard"), dict) else None
    lacks = f"--resume={cfg.resume}: {step_dir} has no state of a run (step, tokens, guard){other}"
    require(counts is not None, lacks)
    step, tokens = counts or (0, 0)
    task = _setting(manifest.info.get("config"), "task") or cfg.task
    require(
        cfg.eval_only or task == cfg.task,
        f"--task={cfg.task}: {step_dir} was trained with --task {task}; valid: --task {task}, or a new run "
        f"from these weights: --init {step_dir} --out NEW",
    )
    ema = f"--optim.ema={cfg.optim.ema}: {step_dir} holds"
    require(
        cfg.optim.ema > 0 or "ema" not in held,
        f"{ema} an average of the weights; keep the setting of its run{other}",
    )
    require(
        cfg.optim.ema == 0 or "ema" in held,
        f"{ema} no average of the weights; resume with --optim.ema 0{other}",
    )
    # Ids must mean the same text as before.
    before = manifest.info.get("data")
    says = isinstance(before, dict) and before.keys() >= data.keys()  # older steps do not say
    before = {name: before[name] for name in data} if says else data
    same_ids = (data["tokenizer"], data["eos"]) == (before["tokenizer"], before["eos"])
    require(
        same_ids,
        f"--data.path={cfg.data.path}: made with tokenizer {data['tokenizer']}, eos {data['eos']}; "
        f"{step_dir} was trained on that of {before['tokenizer']}, eos {before['eos']}, "
        f"for which ids mean other text{other}",
    )

    # Conversations must be written as before.
    wrote = manifest.info.get("chat") is not None and "template" in before
    require(
        not wrote or data.get("template") == before["template"],
        f"--data.chat-template={cfg.data.chat_template}: writes conversations in another way than {step_dir} "
        f"was trained on; valid: leave it out, or its run's own template{other}",
    )

    # Settings that may change, by name.
    was = manifest.info.get("config", {})
    now = json.loads(json.dumps(asdict(cfg), default=str))
    goes_on = not cfg.eval_only and step < cfg.steps
    by_hash = ("data.tokenizer", "data.new_tokenizer", "data.chat_template")  # compared above
    names = [f"{group}.{name}" for group in GROUPS for name in now[group]]
    names = [name for name in names if name not in by_hash]
    names += [*(f"model.{name}" for name in STEPS_READ), "model.moe.selection"]
    names += ["train.seq", "train.dtype", "train.float8", "seed"]
    names += ["steps"] if goes_on else []  # the learning rates depend on it
    pairs = [(name.replace("_", "-"), _setting(was, name), _setting(now, name)) for name in names]
    changed = [(name, old, new) for name, old, new in pairs if old is not None and old != new]
    noted = [f"--{name}={new} (was {old})" for name, old, new in changed]

    # Tokens a step: of the step's own run, by its settings or else by its counts, and of this one.
    sizes = [_setting(was, f"train.{name}") for name in ("batch", "accumulate", "seq")]
    if all(fits(n, int) for n in sizes):
        of_one = math.prod([*sizes, _readers(was, manifest.world)])
    else:
        of_one = tokens / max(step, 1)
    a_step = cfg.train.batch * cfg.train.accumulate * readers * cfg.train.seq
    if goes_on and step and a_step != of_one:
        noted.append(f"{a_step:,} tokens a step (were {of_one:,.0f})")

    told = any(name.startswith(("data.", "train.seq")) for name, *_ in changed)
    if not told and before != data:
        noted.append(f"the data has changed, so it is shuffled anew: {data['is']} (was {before['is']})")
    if new:
        noted.append("--no-load-optim: the optimizer starts anew")
    if cfg.init:
        noted.append(f"--init={cfg.init}: not read, for {step_dir} goes on")
    if not goes_on and not cfg.eval_only:
        noted.append(
            f"nothing to do: --steps={cfg.steps}, and {step_dir} has {step} of them; name more to go on"
        )
    return noted


def _readers(config: Any, world: int) -> int:
    """How many ranks, or groups of them, read sequences of their own in a run of these settings."""
    parts = [_setting(config, f"parallel.{name}") for name in ("tp", "cp", "pp")]
    return world // math.prod(n for n in parts if fits(n, int) and n > 0)


def _setting(config: Any, name: str) -> Any:
    """A setting of a config's nested JSON, by its dotted name; None where there is none."""
    for part in name.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def started_from(step_dir: Path) -> str:
    """The --init of the run that a step folder belongs to.

    "" for new weights. `export` takes it for the original.
    """
    config = read_manifest(step_dir).info.get("config")
    return str(config.get("init") or "") if isinstance(config, dict) else ""
