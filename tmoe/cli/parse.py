"""Makes a Config from a command line, `PRESET --section.field value`, or ends with one clear error.

next: config/run.py
"""

import importlib.util
import io
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, is_dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import tyro

from tmoe import front
from tmoe.base import exit_message
from tmoe.base.disk import expand_home, no_folder_words, unwritable_words
from tmoe.checkpoint.folders import resolve
from tmoe.checkpoint.manifest import CheckpointError, is_step
from tmoe.cli.flags import flag_of, flags_of_settings, name_of, require_known, require_task
from tmoe.cli.help import PAGES, page
from tmoe.cli.settings import BaseSettings, chosen_step, model_at, pinned, read_settings, start_of, state_of
from tmoe.cli.unread import require_read, unread
from tmoe.config.axes import Axes
from tmoe.config.balance_settings import require_coefficient_read
from tmoe.config.check import ConfigError, Section, Setting, divisors, require, spelt
from tmoe.config.compare import as_flags, differences
from tmoe.config.float8_settings import Asked, require_torchao
from tmoe.config.presets import presets
from tmoe.config.run import Config, with_global_batch
from tmoe.parallel.launcher import launcher_world
from tmoe.parallel.mesh import require_a_group_per_node
from tmoe.plan.memory import padding

SOURCES = """The first word: a preset ({presets}; default: tiny), or a run folder, whose run then continues.
Without a first word the model is that of --init DIR, if given. --config FILE: settings from a .toml or .json
file, in the form of a run's config.json; flags override it."""
LAG_S = 10.0  # seconds by which rank 0 may start later than other ranks


def parse(argv: Sequence[str], description: str, *, rank: int = 0, world: int = 1) -> Config:
    """The Config of a command line; the first word may name a preset (default: tiny) or a run folder.

    Without a first word the model is that of --init's folder. --config names a file of settings:
    cli/settings.py.

    Ends the process with code 2 and one message on rank 0, before any process group exists, for a setting
    that cannot work, alone or combined with others, or for a world whose size is not the product of the axes.
    """
    front.remember({})
    silent = io.StringIO()  # --help is shown by rank 0 alone
    try:
        with redirect_stdout(silent) if rank else nullcontext():
            cfg, read = _parse(list(argv), description, rank, world)
    except ValueError as error:
        refuse(front.spelt(error), rank)
    for note in (*read, *notes(cfg, world)) if rank == 0 else ():
        print(f"note: {note}", file=sys.stderr)
    return cfg


def check_start(argv: Sequence[str], cfg: Config, rank: int) -> None:
    """End the process as `parse` does if the weights to start from are missing, or of another model.

    argv: the words from which `parse` made cfg.
    """
    try:
        if argv and argv[0] in presets() and cfg.init:
            require_preset_of(argv[0], cfg)
        if not cfg.dry_run:
            require_step(cfg.resume)
            require_weights(cfg)
    except ValueError as error:
        refuse(front.spelt(error), rank)


def refuse(text: str, rank: int) -> NoReturn:
    """End the process with code 2. The first rank of each node prints the error, after `rank N:` if N > 0.

    Every node prints, because rank 0 does not see an error that only another node has.
    """
    launch = launcher_world()
    exit_message.leave(f"error: {text}")
    if rank == 0 or launch.local_rank == 0:
        print(f"rank {rank}: error: {text}" if rank else f"error: {text}", file=sys.stderr)
    if rank and launch.launcher not in ("", "environment"):
        # A launcher ends all ranks when one has ended; rank 0, still importing, could not print the error.
        time.sleep(LAG_S)
    raise SystemExit(2) from None


def misplaced(word: str, argv: Sequence[str]) -> str:
    """The hint for a preset or a run folder that is not the first word; "" for another word."""
    if word not in presets() and not Path(word).is_dir():
        return ""
    if argv[0] == word or not argv[0].startswith("-"):
        return f"{word}: one preset or run folder at most, and {argv[0]} is the first"
    return f"{word}: a preset or a run folder is the first word: train.py {word} {argv[0]} ..."


def notes(cfg: Config, world: int) -> Iterator[str]:
    """A line for each setting that works, but is probably a mistake."""
    if trains_routers(cfg) and (untrained := cfg.model.moe.untrained):
        yield f"{spelt(untrained)}, as in the model that this run starts from"
    if trains_routers(cfg) and cfg.model.moe.acausal:
        yield spelt(cfg.model.moe.acausal)

    world = planned_world(cfg, world)
    axes = Axes.of(cfg.parallel, world)
    experts, ep = cfg.model.moe.experts, axes.ep
    times = padding(cfg, axes)
    if times > 1.5:
        both = axes.dp * ep
        folds = [replace(axes, dp=both // e, ep=e) for e in divisors(math.gcd(experts, both))]
        degrees = [other.ep for other in folds if padding(cfg, other) <= 1.1]
        yield (
            f"--parallel.ep={ep}: FSDP2 cuts a rank's {experts // ep} experts over dp {axes.dp} "
            f"unevenly and moves {times:.1f} times their bytes at each gather; "
            f"--parallel.ep without that: {', '.join(map(str, degrees)) or 'none in this world'}"
        )


def planned_world(cfg: Config, world: int) -> int:
    """Number of ranks of the run, or with dry_run of the planned run."""
    if not cfg.dry_run:
        return world
    p = cfg.parallel
    group = p.ep * p.etp
    parts = p.cp * p.tp
    dp = p.dp or parts // math.gcd(parts, group)  # the fewest ranks over which tp and cp can fold
    return cfg.world or p.pp * p.replicate * dp * group


def trains_routers(cfg: Config) -> bool:
    """Whether the run has routers and trains them."""
    return not cfg.eval_only and any(cfg.model.is_moe(layer) for layer in range(cfg.model.layers))


def begins_anew(cfg: Config) -> bool:
    """Whether the run draws its weights, because neither --init nor a step to resume from gives them.

    The answer depends on the steps that are on the disk now.
    """
    return not cfg.init and not resumes(cfg)


def resumes(cfg: Config) -> bool:
    """Whether the run continues from a step that is on the disk now."""
    if cfg.resume != "auto":
        return cfg.resume != "none"
    steps = (path for path in Path(cfg.out, "checkpoints").glob("step-*") if ".tmp-" not in path.name)
    return any(map(is_step, steps))


def _parse(argv: list[str], description: str, rank: int, world: int) -> tuple[Config, list[str]]:
    """The settings, and a line for each source of settings other than flags."""
    if "" in argv[:1]:
        raise ConfigError("'': an empty first word", valid="a preset, a run folder or a flag")
    source = read_settings(expand_home(argv))
    name = source.name or ("tiny" if not source.notes else "")
    shown = f"{name or ' and '.join(source.notes)}"
    text = f"{description}\n\n{SOURCES.format(presets=', '.join(presets()))} Defaults below: {shown}."
    require_known(source.rest, Config)
    words = spell_booleans(source.rest)
    typed = flags_in(words)
    if "--help" in typed or "-h" in words:
        task = front.value_of(words, "--task") or source.cfg.task
        require_task(task)
        print(page(source.cfg, task if task in PAGES else "pretrain", name or "--init's model"))
        raise SystemExit(0)
    if "--help-all" in typed:
        words = ["--help"]
    untyped = {name: place for name, place in source.places.items() if flag_of(name) not in typed}
    front.remember({flag_of(name): (value_at(source.cfg, name), place) for name, place in untyped.items()})
    require_task(front.value_of(words, "--task"))
    if "--dry-run" not in typed:
        require_reward_files(front.value_of(words, "--grpo.rewards").split() or source.cfg.grpo.rewards)
    cfg = front.call(
        Config,
        f"train.py {name}".rstrip(),
        words,
        known=[*(flag for flag, _ in flags_of_settings(Config)), "--help-all"],
        hint=lambda word: misplaced(word, argv),
        description=text,
        default=source.cfg,
        console_outputs=rank == 0,
        config=(tyro.conf.HelptextFromCommentsOff,),  # a third of the time: tyro would read the source
    )
    source.notes.extend(_require_read(cfg, source, words, typed))
    require_work(cfg)
    experts = cfg.model.moe.experts if trains_routers(replace(cfg, eval_only=False)) else 0
    axes = Axes.of(cfg.parallel, planned_world(cfg, world), experts)
    cfg = with_global_batch(cfg, axes.readers)
    require_cache_folder()
    if not (cfg.dry_run or cfg.parallel.ep_across_nodes):
        require_a_group_per_node(axes)
    if trains_routers(cfg) and begins_anew(cfg):
        cfg.model.moe.require_trained()
    return _settled(cfg, source.notes), source.notes


def _settled(cfg: Config, notes: list[str]) -> Config:
    """The settings with the folder, the data and the compiler that this run will use; notes gets a line each.

    Raises ConfigError for a folder that cannot be read or written, and for torchao that is asked for and
    missing.
    """
    if cfg.init:
        # Absolute: an export reads this path from a step, and may run in another folder.
        start = start_of(cfg.init, weights=not cfg.dry_run)
        notes.extend(chosen_step(cfg.init, start))
        cfg = replace(cfg, init=str(start.absolute()))
    if cfg.dry_run:
        return cfg
    cfg = replace(cfg, data=pinned(cfg.data))
    if not cfg.eval_only:  # a validation writes nothing
        require_places(cfg)
    require_torchao(Asked.by(cfg.train.float8, cfg.train.fp8))
    if cfg.compile and os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        cfg = replace(cfg, compile=False)
        notes.append("TORCH_COMPILE_DISABLE=1 in the environment: running eager (--no-compile)")
    return cfg


def require_work(cfg: Config) -> None:
    """Raise ConfigError for a run without a step to do, and for a planned world that is no dry run's."""
    run, planned = Section(cfg), f"only for {Setting('dry_run')}"
    real = "torchrun --nproc-per-node sets the real one"
    run.require(cfg.world is None or cfg.dry_run, "world", f"{planned}; {real}")
    run.require(cfg.gpu is None or cfg.dry_run, "gpu", f"{planned}; a run has the GPUs that it finds")
    run.require(cfg.node is None or cfg.dry_run, "node", f"{planned}; a run has the nodes of its launcher")
    works = bool(cfg.steps or cfg.epochs or cfg.eval_only or cfg.dry_run)
    valid = f"1 or more, or {Setting('eval_only')} to validate alone"
    run.require(works, "steps", "nothing to do", valid)


def require_reward_files(rewards: Sequence[str]) -> None:
    """Raise ConfigError for a reward FILE.py:FUNCTION whose file is missing."""
    for word in rewards:
        file, named, _ = word.partition(".py:")
        if named and not Path(f"{file}.py").is_file():
            valid = "FILE.py:FUNCTION or FILE.py:FUNCTION:WEIGHT"
            raise ConfigError.of("grpo.rewards", word, f"{file}.py: no such file", valid)


def require_step(resume: str) -> None:
    """Raise ConfigError for a --resume that is neither auto nor none and names no step folder."""
    if resume in ("auto", "none"):
        return
    valid = "auto, none or a step folder"
    try:
        step = resolve(Path(resume))
    except CheckpointError as error:
        wrong = str(error).removeprefix(f"{Path(resume)}: ")
        raise ConfigError.of("resume", Path(resume), wrong) from None
    require(step.is_dir(), "resume", resume, no_folder_words(step), valid)
    require(is_step(step), "resume", resume, "no step folder, or one that was never finished", valid)


def require_preset_of(name: str, cfg: Config) -> None:
    """Raise ConfigError for a preset as first word whose model differs from that of --init's folder."""
    theirs = model_at(cfg.init or "")
    if theirs is not None and not theirs.mtp.depth:  # the start compares their numbers
        theirs = replace(theirs, mtp=cfg.model.mtp)
    if theirs is None or not (found := differences(cfg.model, theirs)):
        return
    more = f" and {len(found) - 2} more" if len(found) > 2 else ""
    flags = as_flags(cfg.model, theirs)
    start = f"{Setting('init', cfg.init)} ({'; '.join(found[:2])}{more})"
    valid = f"no preset, for {Setting('init')} says the model{flags and ', or '}{flags}"
    raise ConfigError(f"{name}: this preset is another model than {start}", valid=valid)


def _require_read(
    cfg: Config, source: BaseSettings, words: list[str], typed: dict[str, str]
) -> Iterator[str]:
    """Raise ConfigError for settings that the user gave and this run does not read.

    Yields notes on unused settings that do no harm, and on unused settings of a run's record.
    """
    given = {}
    for flag, spelling in sorted(typed.items()):
        value = front.value_of(words, flag)
        given[name_of(flag)] = f"{spelling}={value}" if value else spelling
    if "model.moe.balance_coeff" in given:
        balance = front.value_of(words, "--model.moe.balance").split()
        require_coefficient_read(balance, front.value_of(words, "--model.moe.balance-coeff"))
    yield from require_read(cfg, given)
    of_file = {name: f"{flag_of(name)}={value_at(cfg, name)}" for name in source.given if name not in given}
    yield from require_read(replace(cfg, eval_only=False), of_file)
    if source.record:
        usual = Config()
        for name, place in source.places.items():
            value = value_at(cfg, name)
            differs = name not in given and value != value_at(usual, name)
            if differs and (now := unread(replace(cfg, eval_only=False), name)):
                yield f"{flag_of(name)}={value} (from {place}): unused with {now}"


def require_weights(cfg: Config, found: bool = True) -> None:
    """Raise ConfigError for --eval-only without weights from a checkpoint or from --init.

    found: False if the run folder's checkpoints were read already, and none can be used.
    """
    name = f"name {Setting('init')}, a run folder or {Setting('resume')} STEP"
    if not cfg.eval_only or (found and not begins_anew(cfg)):
        return
    places = Path(cfg.out), Path(cfg.out, "checkpoints")
    if found and cfg.resume == "auto" and any(place.is_symlink() and not place.exists() for place in places):
        return  # a link to a disk that is absent: the search for checkpoints names the link
    if cfg.resume == "none":
        wrong = f"no weights with {Setting('resume', 'none')} and no {Setting('init')}"
    else:
        wrong = f"no checkpoint in {Setting('out', cfg.out)}"
    raise ConfigError.of("eval_only", True, f"{wrong}; {name}")


def require_places(cfg: Config) -> None:
    """Raise ConfigError unless everything that this run writes can be written."""
    out = Path(os.path.realpath(cfg.out))
    if step := next((p for p in (out, *out.parents) if is_step(p)), None):
        wrong = f"is in the step folder {step}, and would be removed with it; name a folder outside it"
        raise ConfigError.of("out", cfg.out, wrong)
    places = [cfg.out, f"{cfg.out}/checkpoints"]
    if cfg.log.tensorboard:
        places.append(f"{cfg.out}/tensorboard")
    for place in places:
        require_writable(cfg.out, place)
    for name, wanted in dict(wandb=cfg.log.wandb, tensorboard=cfg.log.tensorboard).items():
        there = not wanted or importlib.util.find_spec(name) is not None
        needs = f"needs the package {name}, which is not installed here"
        require(there, f"log.{name}", str(wanted), needs)


def flags_of(cfg: Config) -> dict[str, str]:
    """The settings that must be the same on all ranks, as --section.field -> value.

    Paths and the presence of a compiler are left out, because they may differ between nodes.
    """
    told: dict[str, Any] = asdict(cfg)
    told["data"]["path"] = [name for name in cfg.data.path if name.startswith("hub:")] or None
    told["out"] = told["compile"] = None
    told["init"] = bool(cfg.init) and (state_of(cfg.init) or True)
    told["lora"]["init"] = bool(cfg.lora.init)
    return dict(_flags("--", told))


def _flags(name: str, told: Any) -> Iterator[tuple[str, str]]:
    if isinstance(told, dict):
        for key, value in told.items():
            yield from _flags(f"{name}{'' if name == '--' else '.'}{key.replace('_', '-')}", value)
    else:
        yield name, repr(told)


def require_writable(out: str, place: str) -> None:
    """Raise ConfigError unless the place in the run folder is a writable folder, or can be made."""
    if wrong := unwritable_words(Path(place)):
        raise ConfigError.of("out", out, wrong)


def require_cache_folder() -> None:
    """Raise ConfigError if the environment names a file as the folder of triton's cache."""
    place = os.environ.get("TRITON_CACHE_DIR", "")
    if os.path.exists(place) and not os.path.isdir(place):
        raise ConfigError(f"TRITON_CACHE_DIR={place}: must be a folder, or a path where one can be made")


def spell_booleans(argv: list[str]) -> list[str]:
    """The words with `--compile false` and `--compile=false` written as tyro's own `--no-compile`.

    Raises ConfigError for a switch that is set to another word.
    """
    switches = set(switches_of(Config))
    out: list[str] = []
    words = argv[::-1]  # popped from the end
    while words:
        head, equals, value = words.pop().partition("=")
        flag = head.replace("_", "-")

        # --no-compile takes no value.
        whole = re.sub(r"(--|\.)no-(?=[^.]*$)", r"\1", flag)  # without the no- of its last part
        if whole in switches - {flag} and (equals or (words and words[-1].lower() in ("true", "false"))):
            wrong = f"takes no value; {whole} does, true or false"
            raise ConfigError.of(name_of(flag), value or words[-1], wrong)
        if flag not in switches:
            out.append(head + equals + value)
            continue

        # --compile may.
        if not equals:
            value = words.pop() if words and not words[-1].startswith("-") else "true"
        if value.lower() not in ("true", "false"):
            first = value in presets() or Path(value).is_dir()
            hint = f"; a preset or a run folder is the first word: train.py {value} {flag}" if first else ""
            raise ConfigError.of(name_of(flag), value, f"must be true or false{hint}")
        section, dot, last = flag[2:].rpartition(".")
        out.append(flag if value.lower() == "true" else f"--{section}{dot}no-{last}")
    return out


def flags_in(words: Sequence[str]) -> dict[str, str]:
    """The flags among words, each with its spelling there. A switch is listed without its no-."""
    switches = set(switches_of(Config))
    flags = [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]
    on = {flag: re.sub(r"(--|\.)no-(?=[^.]*$)", r"\1", flag) for flag in flags}
    return {on[flag] if on[flag] in switches else flag: flag for flag in flags}


def value_at(cfg: Any, name: str) -> Any:
    """The value of a dotted setting."""
    return reduce(getattr, name.split("."), cfg)


def switches_of(config: type, section: str = "--") -> Iterator[str]:
    """Flags of the settings that are true or false."""
    for name, kind in get_type_hints(config).items():
        flag = section + name.replace("_", "-")
        if is_dataclass(kind):
            yield from switches_of(kind, f"{flag}.")
        elif kind is bool:
            yield flag
