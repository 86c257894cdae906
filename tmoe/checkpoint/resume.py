"""Whether a run may continue from a step folder, and what changes if it does.

next: checkpoint/rewrite.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from tmoe.checkpoint.errors import refuse
from tmoe.checkpoint.manifest import Manifest, read_manifest
from tmoe.config.check import Section, Setting, fits
from tmoe.config.compare import as_flags, build_config, differences
from tmoe.config.model import STEPS_READ, ModelConfig
from tmoe.config.renamed import with_new_names
from tmoe.config.run import Config

ADAMW, MUON = "optim.exp_avg.", "optim.momentum."  # names of state that only one of the optimizers has
SCALES_READ = "min_loss_scale", "loss_scale_window", "loss_scale_hysteresis"  # by a resumed run
GROUPS = ("data", "optim", "sft", "preference", "grpo", "lora")  # a note lists changed settings of these


def require_same_model(step_dir: Path, model_cfg: ModelConfig) -> None:
    """Raises MismatchError with every setting by which a step's model computes otherwise than `model_cfg`.

    Tensors of equal shapes do not reveal another top-k, norm or RoPE. If the step does not record its model's
    settings, nothing is raised.
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
    """Steps and tokens of the run up to this step folder; None if the folder does not record them."""
    counts: list[Any] = [read_manifest(step_dir).state.get(name) for name in ("step", "tokens")]
    return (counts[0], counts[1]) if all(fits(n, int) and 0 <= n < 2**63 for n in counts) else None


def require_same_run(step_dir: Path, cfg: Config, data: dict[str, Any], readers: int) -> list[str]:
    """Calls require_same_model, and raises ConfigError if this run keeps another kind of state than the step.

    data: `Dataset.facts()` of this run.
    readers: `Axes.readers` of this run.
    Returns one line for each difference that is allowed but seldom wanted (the data, the seed, the types and
    lengths of numbers, the size of a step, the optimizer), and one line if no step is left to do.
    """
    require_same_model(step_dir, cfg.model)
    manifest = read_manifest(step_dir)
    require_same_adapters(step_dir, manifest, cfg)
    step, tokens = _require_state(step_dir, manifest, cfg)
    before = manifest.info.get("data")
    says = isinstance(before, dict) and before.keys() >= data.keys()  # older steps do not record them
    before = {name: before[name] for name in data} if says else data
    _require_same_text(step_dir, manifest, cfg, before, data)
    _require_masters(step_dir, manifest, cfg)
    _require_held(step_dir, manifest, cfg)

    goes_on = not cfg.eval_only and step < cfg.steps
    was, _ = with_new_names(manifest.info.get("config", {}))
    changed = _changed(was, cfg, goes_on)
    noted = [f"--{name}={new} (was {old})" for name, old, new in changed]
    noted += converted(step_dir, cfg)
    a_step = cfg.train.batch * cfg.train.accumulate * readers * cfg.train.seq
    of_one = _tokens_of_a_step(was, manifest.world, tokens / max(step, 1))
    if goes_on and step and a_step != of_one:
        noted.append(f"{a_step:,} tokens a step (were {of_one:,.0f})")
    named = any(name.startswith(("data.", "train.seq")) for name, *_ in changed)
    if not named and before != data:
        noted.append(f"the data has changed, so it is shuffled again: {data['is']} (was {before['is']})")
    if not cfg.load_optim:
        noted.append("--no-load-optim: the optimizer starts from its initial state")
    noted += _not_read(step_dir, manifest, was, cfg)
    if not goes_on and not cfg.eval_only:
        noted.append(
            f"nothing to do: --steps={cfg.steps}, and {step_dir} has {step} of them; name more to continue"
        )
    return noted


def _not_read(step_dir: Path, manifest: Manifest, was: Any, cfg: Config) -> list[str]:
    """A line for each setting that only a new run reads. was: settings of the step's run, as JSON."""
    given: dict[str, Any] = {}
    if cfg.init and not cfg.lora.rank:
        given["init"] = cfg.init
    if cfg.lora.init:
        given["lora.init"] = cfg.lora.init
    first = cfg.train.initial_loss_scale
    dynamic = cfg.train.dtype == "fp16" and not cfg.train.loss_scale
    if dynamic and manifest.state.get("scale") and first != _setting(was, "train.initial_loss_scale"):
        given["train.initial-loss-scale"] = first
    return [f"--{name}={value}: not read, because {step_dir} is resumed" for name, value in given.items()]


def other_cut(step_dir: Path, cut: str) -> list[str]:
    """A line if the pipeline of the step's run was cut elsewhere.

    cut: of this run, "" without a pipeline. Any cut loads a step of any other.
    """
    was = read_manifest(step_dir).info.get("cut")
    if not cut or not isinstance(was, str) or was == cut:
        return []
    return [f"the pipeline is cut into {cut} (was {was})"]


def stored_states(step_dir: Path) -> dict[str, Literal["fp32", "bf16", "int8"]]:
    """How a step folder stores the moments: by the parameter's name."""
    kinds: dict[str, Literal["fp32", "bf16", "int8"]] = dict(bfloat16="bf16", uint8="int8")
    tensors = read_manifest(step_dir).tensors
    return {
        name.removeprefix(first): kinds.get(entry.dtype, "fp32")
        for first in (ADAMW, MUON)
        for name, entry in tensors.items()
        if name.startswith(first)
    }


def require_same_optimizer(step_dir: Path, cfg: Config, by_muon: Mapping[str, bool]) -> None:
    """ConfigError if Muon trained other weights up to this step than it trains in this run.

    by_muon: whether Muon trains a weight, for this rank's trained weights by name.
    """
    manifest = read_manifest(step_dir)
    changed = [n for n, muon in by_muon.items() if f"{ADAMW if muon else MUON}{n}" in manifest.tensors]
    was = _setting(manifest.info.get("config"), "optim.muon")
    holds = "AdamW's moments" if changed and by_muon[changed[0]] else "Muon's momentum"
    some = f"{changed[0]} and {len(changed) - 1} more" if len(changed) > 1 else ", ".join(changed)
    wrong = f"{step_dir} holds {holds} of {some}"
    valid = f"{Setting('optim.muon', was)}, as in its run, or new moments with {Setting('load_optim', False)}"
    Section(cfg).require(not changed, "optim.muon", wrong, valid)


def converted(step_dir: Path, cfg: Config) -> list[str]:
    """A line if moments of the step are stored otherwise than in this run.

    The setting of the step's run decides, because small moments are fp32 in a run with int8.
    """
    was = _setting(read_manifest(step_dir).info.get("config"), "optim.states") or "fp32"
    if was == cfg.optim.states or cfg.eval_only or not cfg.load_optim:
        return []
    return [f"--optim.states={cfg.optim.states}: the moments are {was} in {step_dir}, and are converted"]


def require_same_adapters(step_dir: Path, manifest: Manifest, cfg: Config, base: bool = True) -> None:
    """ConfigError if this run's adapters differ from those of the step.

    base: whether the base must be held as in the step's run, whole or in NF4. A run that starts from adapters
    (--lora.init) may hold it otherwise.
    """
    was = _setting(manifest.info.get("config"), "lora")
    was = was if isinstance(was, dict) else {}
    run, rank = Section(cfg), was.get("rank", 0)
    own = f"{step_dir} holds adapters of {Setting('lora.rank', rank)}"
    run.require(bool(cfg.lora.rank) or not rank, "lora.rank", own)
    new = f"{Setting('init')} {step_dir} {Setting('out')} NEW"
    lacks = f"{step_dir} holds no adapters; train them in a new run: {new}"
    run.require(bool(rank) or not cfg.lora.rank, "lora.rank", lacks)
    require_same_settings(step_dir, was, cfg)
    wrong = f"{step_dir} was trained with {Setting('lora.base', was.get('base'))}"
    run.require(not base or was.get("base", cfg.lora.base) == cfg.lora.base, "lora.base", wrong)


def require_same_settings(place: Path, was: dict[str, Any], cfg: Config) -> None:
    """ConfigError if this run's adapters compute otherwise than those of a folder. was: of `LoraConfig`."""
    run, rank = Section(cfg), was.get("rank", 0)
    was, now = (json.loads(json.dumps(said)) for said in (was, asdict(cfg.lora)))
    for name in ("rank", "expert_rank", "alpha", "rs", "targets", "ranks", "alphas") if rank else ():
        wrong = f"{place} was trained with {Setting(f'lora.{name}', was.get(name))}"
        run.require(name not in was or was[name] == now[name], f"lora.{name}", wrong)


def _anew(step_dir: Path) -> str:
    """The end of an error message: another way to use the step."""
    return f"; start a new run from its weights with {Setting('init')} {step_dir}"


def _require_state(step_dir: Path, manifest: Manifest, cfg: Config) -> tuple[int, int]:
    """Steps and tokens of the step; raises ConfigError if it lacks state that this run needs, or has more."""
    run = Section(cfg)
    other = _anew(step_dir)
    held = {name.partition(".")[0] for name in manifest.tensors}
    anyway = f"; continue with new moments with {Setting('load_optim', False)}, or{other[1:]}"
    lacks = f"{step_dir} holds no optimizer state{anyway}"
    run.require("optim" in held or not cfg.load_optim, "resume", lacks)
    counts = counts_of(step_dir) if isinstance(manifest.state.get("guard"), dict) else None
    lacks = f"{step_dir} has no state of a run (step, tokens, guard){other}"
    run.require(counts is not None, "resume", lacks)
    task = _setting(manifest.info.get("config"), "task") or cfg.task
    theirs = f"{Setting('task')} {task}"
    weights = f"{Setting('init')} {step_dir} {Setting('out')} NEW"
    valid = f"{theirs}, or a new run from these weights: {weights}"
    run.require(cfg.eval_only or task == cfg.task, "task", f"{step_dir} was trained with {theirs}", valid)
    kept = f"{step_dir} holds an average of the weights; keep the setting of its run{other}"
    run.require(cfg.optim.ema > 0 or "ema" not in held, "optim.ema", kept)
    without = f"{step_dir} holds no average of the weights; resume with {Setting('optim.ema')} 0{other}"
    run.require(cfg.optim.ema == 0 or "ema" in held, "optim.ema", without)
    return counts or (0, 0)


def _require_masters(step_dir: Path, manifest: Manifest, cfg: Config) -> None:
    """Raises ConfigError if this run keeps its weights in another type than the step."""
    was = _setting(manifest.info.get("config"), "optim.masters") or "fp32"
    wrong = f"{step_dir} holds weights of {Setting('optim.masters', was)}{_anew(step_dir)}"
    same = was == cfg.optim.masters or cfg.lora.rank > 0
    Section(cfg).require(same, "optim.masters", wrong, was)


def _require_held(step_dir: Path, manifest: Manifest, cfg: Config) -> None:
    """Raises ConfigError if the step holds weights that are not trained, in another type than this run."""
    settings = manifest.info.get("config")
    was = _setting(settings, "train.dtype") or cfg.train.dtype
    frozen = cfg.optim.freeze and _setting(settings, "optim.freeze")
    drawn = cfg.lora.rank > 0 and "base" not in manifest.info  # adapters on weights that the step holds
    wrong = f"{step_dir} holds frozen weights of {Setting('train.dtype', was)}"
    wrong += "" if drawn else _anew(step_dir)
    Section(cfg).require(was == cfg.train.dtype or not (frozen or drawn), "train.dtype", wrong, was)


def _require_same_text(
    step_dir: Path, manifest: Manifest, cfg: Config, before: dict[str, Any], data: dict[str, Any]
) -> None:
    """Raises ConfigError unless ids mean the same text and conversations are written the same way as before.

    before, data: facts of the step's data and of this run's.
    """
    run = Section(cfg)
    other = _anew(step_dir)
    same_ids = (data["tokenizer"], data["eos"]) == (before["tokenizer"], before["eos"])
    wrong = (
        f"made with tokenizer {data['tokenizer']}, eos {data['eos']}; "
        f"{step_dir} was trained on that of {before['tokenizer']}, eos {before['eos']}, "
        f"for which ids mean other text{other}"
    )
    run.require(same_ids, "data.path", wrong)
    wrote = manifest.info.get("chat") is not None and "template" in before
    as_before = not wrote or data.get("template") == before["template"]
    wrong = f"writes conversations in another way than {step_dir} was trained on"
    own = f"leave it out, or its run's own template{other}"
    run.require(as_before, "data.chat_template", wrong, own)


def _changed(was: Any, cfg: Config, goes_on: bool) -> list[tuple[str, Any, Any]]:
    """(flag, old, new) for each setting that may differ from the step's and does.

    was: settings of the step's run, as JSON.
    """
    now = json.loads(json.dumps(asdict(cfg), default=str))
    by_hash = ("data.tokenizer", "data.new_tokenizer", "data.chat_template")  # compared by _require_same_text
    names = [f"{group}.{name}" for group in GROUPS for name in now[group]]
    # a resumed run does not read the last; converted and _require_masters compare the two before it
    apart = (*by_hash, "optim.states", "optim.masters", "lora.init")
    names = [name for name in names if name not in apart]
    names += [*(f"model.{name}" for name in STEPS_READ), "model.moe.selection"]
    names += ["train.seq", "train.dtype", "train.loss_scale", "train.float8", "seed"]
    names += ["train.fp8", "train.fp8_everywhere", *(f"train.{name}" for name in SCALES_READ)]
    names += ["steps"] if goes_on else []  # the learning rates depend on the number of steps
    pairs = [(name.replace("_", "-"), _setting(was, name), _setting(now, name)) for name in names]
    return [(name, old, new) for name, old, new in pairs if old is not None and old != new]


def _tokens_of_a_step(was: Any, world: int, counted: float) -> float:
    """Tokens of a step in a run with settings `was` on `world` ranks; `counted` if the settings lack them."""
    sizes = [_setting(was, f"train.{name}") for name in ("batch", "accumulate", "seq")]
    return math.prod([*sizes, _readers(was, world)]) if all(fits(n, int) for n in sizes) else counted


def _readers(config: Any, world: int) -> int:
    """How many ranks, or groups of ranks, read their own sequences in a run with these settings."""
    parts = [_setting(config, f"parallel.{name}") for name in ("tp", "cp", "pp")]
    return world // math.prod(n for n in parts if fits(n, int) and n > 0)


def _setting(config: Any, name: str) -> Any:
    """A setting of a config's nested JSON, by its dotted name; None if it is missing."""
    for part in name.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def started_from(step_dir: Path) -> str:
    """The --init of the run that a step folder belongs to.

    "" means new weights. `export` uses the result as the original folder.
    """
    config = read_manifest(step_dir).info.get("config")
    return str(config.get("init") or "") if isinstance(config, dict) else ""
