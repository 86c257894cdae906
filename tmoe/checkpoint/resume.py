"""Whether a run may go on from a step folder, and what changes if it does.

next: rewrite.py"""

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
from tmoe.config.same import build_config, differences


def require_same_model(step_dir: Path, model_cfg: ModelConfig) -> None:
    """MismatchError with every setting by which the model of a step folder computes something else than `model_cfg`: tensors of
    equal shapes do not tell another top-k, norm or RoPE apart. Passes where the step does not say what its model was."""
    config = read_manifest(step_dir).info.get("config")
    if isinstance(config, dict) and isinstance(settings := config.get("model"), dict):
        refuse(
            f"{step_dir} is not this model's (here: this run, there: the step)",
            differences(model_cfg, build_config(settings)),
        )


def require_same_run(step_dir: Path, cfg: Config, data: dict[str, Any], world: int) -> list[str]:
    """require_same_model, and ConfigError where a run with these settings keeps another kind of state than the step folder holds. Returns
    what it may change but seldom wants to, a line each: the data, the seed, numbers' types and lengths, a step's size, the optimizer; and
    that no step is left to do. data: `Dataset.facts()` of this run's; world: its processes."""
    require_same_model(step_dir, cfg.model)
    manifest = read_manifest(step_dir)
    held = {name.partition(".")[0] for name in manifest.tensors}
    other = f"; start anew from its weights with --init {step_dir}"
    require("optim" in held, f"--resume={cfg.resume}: {step_dir} holds no optimizer state{other}")
    counts: list[Any] = [manifest.state.get(name) for name in ("step", "tokens")]
    whole = all(fits(n, int) and 0 <= n < 2**63 for n in counts) and isinstance(
        manifest.state.get("guard"), dict
    )
    require(whole, f"--resume={cfg.resume}: {step_dir} has no state of a run (step, tokens, guard){other}")
    ema = f"--optim.ema={cfg.optim.ema}: {step_dir} holds"
    require(
        cfg.optim.ema > 0 or "ema" not in held,
        f"{ema} an average of the weights; keep the setting of its run{other}",
    )
    require(
        cfg.optim.ema == 0 or "ema" in held,
        f"{ema} no average of the weights; resume with --optim.ema 0{other}",
    )
    before = manifest.info.get("data")
    says = isinstance(before, dict) and before.keys() >= data.keys()  # older steps do not
    before = {name: before[name] for name in data} if says else data
    tokens_of = [(d["tokenizer"], d["eos"]) for d in (data, before)]
    require(
        tokens_of[0] == tokens_of[1],
        f"--data.path={cfg.data.path}: made with tokenizer {data['tokenizer']}, eos {data['eos']}; {step_dir} was trained on that of "
        f"{before['tokenizer']}, eos {before['eos']}, for which ids mean other text{other}",
    )
    was, now = manifest.info.get("config", {}), json.loads(json.dumps(asdict(cfg), default=str))
    (step, tokens), goes_on = counts, not cfg.eval_only and counts[0] < cfg.steps
    idle = f"nothing to do: --steps={cfg.steps}, and {step_dir} has {step} of them; name more to go on"
    left = [] if goes_on or cfg.eval_only else [idle]
    by_hash = ("data.tokenizer", "data.new_tokenizer")  # above
    names = [f"{group}.{name}" for group in ("data", "optim") for name in now[group]]
    names = [name for name in names if name not in by_hash]
    names += [*(f"model.{name}" for name in STEPS_READ), "train.seq", "train.dtype", "seed"]
    names += ["steps"] if goes_on else []  # rates follow them
    pairs = [(name.replace("_", "-"), _setting(was, name), _setting(now, name)) for name in names]
    changed = [(name, old, new) for name, old, new in pairs if old is not None and old != new]
    noted = [f"--{name}={new} (was {old})" for name, old, new in changed]
    sizes = [_setting(was, f"train.{name}") for name in ("batch", "accumulate", "seq")]
    of_one = (
        math.prod([*sizes, manifest.world]) if all(fits(n, int) for n in sizes) else tokens / max(step, 1)
    )
    a_step = cfg.train.batch * cfg.train.accumulate * world * cfg.train.seq
    if goes_on and step and a_step != of_one:
        noted.append(f"{a_step:,} tokens a step (were {of_one:,.0f})")
    told = any(name.startswith(("data.", "train.seq")) for name, *_ in changed)
    if not told and before != data:
        noted.append(f"the data has changed, so it is shuffled anew: {data['is']} (was {before['is']})")
    unread = [f"--init={cfg.init}: not read, for {step_dir} goes on"] if cfg.init else []
    return noted + unread + left


def _setting(config: Any, name: str) -> Any:
    """Of a config's nested JSON, by its dotted name; None where there is none."""
    for part in name.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def started_from(step_dir: Path) -> str:
    """The --init of the run that a step folder belongs to, which `export` takes for the original; "" for new weights."""
    config = read_manifest(step_dir).info.get("config")
    return str(config.get("init") or "") if isinstance(config, dict) else ""
