"""The settings of a run before its flags apply: of a preset, a run, a file, or the model of --init.

next: cli/parse.py
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import asdict, is_dataclass, replace
from difflib import get_close_matches
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from tmoe.base.disk import text_of
from tmoe.base.wishes import meant_by_value
from tmoe.checkpoint.folders import newest_in, steps_in
from tmoe.checkpoint.manifest import CheckpointError, is_step, read_manifest
from tmoe.cli.defaults import with_defaults
from tmoe.cli.flags import answer, flag_of, flags_of_settings, require_task
from tmoe.config.balance_settings import require_coefficient_read
from tmoe.config.check import ConfigError, Setting, fits, options_of, require, spell, spelt
from tmoe.config.model import ModelConfig
from tmoe.config.presets import presets, pretrain
from tmoe.config.renamed import note_of, with_new_flags, with_new_names
from tmoe.config.run import Config, DataConfig

# Settings of one start, not of the run: they are not taken over when a run continues.
OF_A_START = ("resume", "load_optim", "load_rng", "eval_only", "dry_run", "world", "gpu", "node")


class BaseSettings(NamedTuple):
    """The settings that the flags override, and their sources."""

    name: str
    """the command's first word as usage shows it, a preset or a run folder; "" if there is none"""
    cfg: Config
    rest: list[str]
    """the flags"""
    notes: list[str]
    """a line for each source, on what was read from it"""
    given: dict[str, str]
    """dotted settings that a user's own --config file gives -> that file"""
    record: bool
    """whether the --config file is the record of a run, which has every setting"""
    places: dict[str, str]
    """dotted settings that any file gives, also a run's record and the model of --init -> that file"""


def read_settings(words: list[str]) -> BaseSettings:
    """The settings that the flags of a command line override.

    The first source is a preset or a run folder (the first word); without a first word the model of --init's
    folder, or else `tiny`. The settings of --config's file override it. ConfigError for a source that cannot
    be read, and for a name that is no setting.
    """
    words, notes = with_new_flags(words)
    words, file = _without(words, "--config")
    first = words[0] if words and not words[0].startswith("-") else ""
    rest = words[1:] if first else words
    in_file = read_file(Path(file)) if file is not None else {}
    init = _value(rest, "--init") or in_file.get("init")
    given: dict[str, str] = {}
    record = False
    places: dict[str, str] = {}

    known, run = presets(), None
    if first in known:
        cfg = known[first]
    elif first:
        cfg = run = of_run(first)
        origin = str(Path(first, "config.json"))
        notes.append(f"settings of {origin}")
        places = dict.fromkeys(_names(asdict(cfg)), origin)
    elif isinstance(init, str) and init:
        weights = "--dry-run" not in rest
        start = start_of(init, weights)
        gone = _names_a_model(rest) and not start.exists()
        cfg = known["tiny"] if gone else _of_start(start, weights)
        if not gone:
            notes.append(f"the model's settings are those of {init}")
            config_json = Path(start, "config.json")
            place = str(config_json) if config_json.is_file() else init
            places = dict.fromkeys(_names(dict(model=asdict(cfg.model))), place)
    else:
        cfg = known["tiny"]
    cfg = with_adapters(cfg, rest, in_file, init, notes)
    if file is not None:
        cfg = with_settings(cfg, in_file, file)
        notes.append(f"settings of {file}")
        named = dict.fromkeys(_names(in_file), file)
        places |= named
        record = is_record(Path(file))
        given = {} if record else named
        old = [] if record else with_new_names(_parsed(Path(file)))[1]
        notes.extend(f"{file}: {note_of(name)}" for name in old)
        run = cfg if record else run
    flags, of_file = _values(rest), set(given)
    cfg = _with_one_length(cfg, flags, in_file, file)
    return BaseSettings(first, with_defaults(cfg, flags, of_file, run), rest, notes, given, record, places)


def _with_one_length(cfg: Config, flags: dict[str, str], in_file: dict[str, Any], file: str | None) -> Config:
    """The settings without --epochs if a source that overrides it gives --steps.

    ConfigError if one source gives both.
    """
    says = "the steps follow from the epochs and the data; leave one of them out"
    both = {"steps", "epochs"} <= flags.keys()
    wrong = f"not with {Setting('steps', flags.get('steps'))}: {says}"
    require(not both, "epochs", flags.get("epochs"), wrong)
    epochs, steps = in_file.get("epochs"), in_file.get("steps")
    require(None in (epochs, steps), f"{file}: epochs={epochs}: not with steps={steps}: {says}")
    by_steps = "steps" in flags or (steps is not None and "epochs" not in flags)
    return replace(cfg, epochs=None) if by_steps else cfg


def of_run(word: str) -> Config:
    """The settings of a run folder, for continuing it, even if it was moved. ConfigError for another word."""
    run, path = Path(word), Path(word, "config.json")
    if not path.is_file() or is_step(run):
        raise ConfigError(_no_run(word))
    content = _parsed(path)
    if "model_type" in content:
        start = f"start from it with {Setting('init')} {word}"
        raise ConfigError(f"{word}: no run folder but a Hugging Face folder: {start}")
    require(isinstance(content.get("config"), dict), f"{path}: no config.json of a run")
    return replace(with_settings(Config(), _settings_of(content), str(path)), out=word)


def _no_run(word: str) -> str:
    """The error for a first word that is neither preset nor run folder, with the probably meant words."""
    path = Path(word)
    if not path.exists() and len(path.parts) == 1:
        near = get_close_matches(word.replace("_", "-").lower(), presets(), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"preset {word!r}: must be one of {', '.join(presets())}; or a run folder{hint}"
    if not path.exists():
        return f"{word}: no such run folder"
    runs = [folder for folder in path.absolute().parents[:2] if Path(folder, "config.json").is_file()]
    goes_on = f"; train.py {runs[0]} continues its run" if runs else ""
    if path.is_file():
        meant = f": its settings are taken with --config {word}" if path.suffix in (".toml", ".json") else ""
        return f"{word}: no run folder but a file{meant}{goes_on}"
    if is_step(path):
        return f"{word}: no run folder but a step folder: its weights are taken with --init {word}{goes_on}"
    return f"{word}: no run folder: it has no config.json{goes_on}"


def read_file(path: Path) -> dict[str, Any]:
    """The nested settings of a TOML or JSON file; for a run's config.json the settings of the run."""
    kind = path.suffix in (".toml", ".json")
    require(kind, "config", path, "must be a .toml or .json file (a run's config.json is one)")
    require(path.is_file(), "config", path, "no such file")
    return _settings_of(_parsed(path))


def _parsed(path: Path) -> dict[str, Any]:
    try:
        text = text_of(path)
        content = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text, object_pairs_hook=_once)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    require(isinstance(content, dict), f"{path}: must be an object of settings")
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. ValueError for a key that it has twice; json would drop the first value silently."""
    unique = dict(pairs)
    if len(unique) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is there twice")
    return unique


def is_record(path: Path) -> bool:
    """Whether a file of settings is the record of a run, which has every setting."""
    return isinstance(_parsed(path).get("config"), dict)


def _settings_of(content: dict[str, Any]) -> dict[str, Any]:
    """The settings in a file: the whole file, or in a run's record the part under "config"."""
    config = content.get("config")
    if not isinstance(config, dict):
        return with_new_names(content)[0]
    settings = {name: value for name, value in with_new_names(config)[0].items() if name not in OF_A_START}
    train = settings.get("train")
    if isinstance(train, dict) and train.get("global_batch"):
        # accumulate was computed from it and the number of ranks, which may be different now
        settings["train"] = {name: value for name, value in train.items() if name != "accumulate"}
    if settings.get("epochs") is not None:
        settings.pop("steps", None)  # computed from epochs, the data and the sequences of a step
    return settings


def with_settings(cfg: Any, told: dict[str, Any], where: str, section: str = "") -> Any:
    """`cfg` with the nested settings of a file. ConfigError for a wrong one; it names file and setting."""
    kinds = get_type_hints(type(cfg))
    settings: dict[str, Any] = {}
    known = [flag for flag, _ in flags_of_settings(Config)]
    for key, value in told.items():
        name, shown = key.replace("-", "_"), f"{where}: {section}{key}"
        if name not in kinds:
            hint = answer(flag_of(section + name), known)
            meant = spelt(hint, "key")
            if flag_of(key) in known:
                raise ConfigError(f"{shown}: sections are nested", valid=_nested(name, value))
            raise ConfigError(f"{shown}: no such setting; {meant or 'there are: ' + ', '.join(kinds)}")
        require(name not in settings, f"{shown}: is there twice, with - and with _")
        kind = kinds[name]
        if f"{section}{name}" == "task" and isinstance(value, str):
            _require_task_in(where, value)
        if is_dataclass(kind):
            require(isinstance(value, dict), f"{shown}={value!r}: must hold nested settings, as {key}.NAME")
            settings[name] = with_settings(getattr(cfg, name), value, where, f"{section}{key}.")
            continue
        if isinstance(value, str) and not fits(value, kind) and fits([value], kind):
            value = [value]  # a list of one word, as after a flag
        options = [str(option) for option in options_of(kind)]
        near = meant_by_value(f"{section}{name}", str(value), options) if options else ""
        require(fits(value, kind), f"{shown}={value!r}: must be {spell(kind)}{near}")
        settings[name] = tuple(value) if isinstance(value, list) else value
    try:
        if section == "model.moe." and {"balance", "balance_coeff"} <= settings.keys():
            balance = settings["balance"]
            words = [balance] if isinstance(balance, str) else balance
            require_coefficient_read(words, settings["balance_coeff"])
        return replace(cfg, **settings)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.spelt('key')}") from None


def _nested(name: str, value: Any) -> str:
    """A dotted setting in the form of a JSON file: {"train": {"batch": 3}} for train.batch."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return json.dumps(value, default=str)


def _require_task_in(where: str, value: str) -> None:
    """ConfigError for another trainer's name of a task in a file, with its name in tmoe."""
    try:
        require_task(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.spelt('key')}") from None


def start_of(init: str, weights: bool) -> Path:
    """The folder that --init means: a path, or the hub's folder of a name (hf/hub_folders.py).

    For a run folder, or a folder of steps, it is the newest step that has all its files.
    """
    from tmoe.hf.foreign import is_folder  # tmoe.hf takes most of a second to import, and is seldom needed
    from tmoe.hf.hub_folders import folder_of

    try:
        folder = folder_of(init, weights)
        steps = None if is_folder(folder) else steps_in(folder)
        return newest_in(steps)[0] if steps else folder
    except (ConfigError, CheckpointError, OSError) as error:
        text = error.text if isinstance(error, ConfigError) else str(error)
        raise ConfigError.of("init", init, text.removeprefix(f"{init}: ") + _near(Path(init))) from None


def _near(path: Path) -> str:
    """A hint at the folder that a path may mean, one with a similar name; "" if there is none."""
    if path.exists() or not path.parent.is_dir():
        return ""
    near = get_close_matches(
        path.name, [entry.name for entry in path.parent.iterdir() if entry.is_dir()], 1, 0.7
    )
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def chosen_step(init: str, start: Path) -> list[str]:
    """Notes on the step that `start_of` chose in a run folder, and on newer steps that are damaged."""
    if Path(init) not in (start.parent, start.parent.parent):
        return []
    skipped = [f"skipped a damaged checkpoint: {problem}" for problem in newest_in(start.parent)[1]]
    return [*skipped, f"--init={init}: its newest whole step is {start}"]


def pinned(data: DataConfig) -> DataConfig:
    """The settings with the commit of each data set of the hub, so that a resumed run reads the same rows."""
    if not any(name.startswith("hub:") for name in (*data.path, *data.val_path)):
        return data
    from tmoe.data import hub_datasets  # seldom needed

    changes: dict[str, Any] = {}
    for name in ("path", "val_path"):
        sources = getattr(data, name)
        try:
            changes[name] = tuple(map(hub_datasets.pinned, sources))
        except ValueError as error:
            raise ConfigError.of(f"data.{name}", " ".join(sources), str(error)) from None
    return replace(data, **changes)


def state_of(init: str) -> str | None:
    """An identity of --init's folder, which ranks on several machines compare; None if nothing is known.

    It is the commit of a folder in the hub's cache, or a hash of a step's weights. They may differ, because a
    run that still saves may show a newer step to another node, and two nodes may have different copies.
    """
    from tmoe.hf.hub_folders import commit_of

    if not is_step(Path(init)):
        return commit_of(init)
    try:
        tensors = read_manifest(init).tensors
    except CheckpointError:
        return None  # reading the weights says what is wrong
    hashes = "".join(tensors[name].sha256 for name in sorted(tensors) if name.startswith("model."))
    return hashlib.sha256(hashes.encode()).hexdigest()


def model_at(init: str) -> ModelConfig | None:
    """The model of --init's folder; None if the folder has none, which a later check refuses."""
    from tmoe.hf.load_weights import model_of

    try:
        return model_of(start_of(init, False), False)
    except (CheckpointError, ConfigError, OSError):
        return None


def _of_start(init: Path, weights: bool) -> Config:
    """Settings of a run that starts from these weights: their model, with the presets' training settings.

    weights: whether the folder must have the weights.
    """
    from tmoe.hf.load_weights import model_of

    try:
        model = model_of(init, weights)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    return pretrain(model)


def with_adapters(
    cfg: Config, words: list[str], in_file: dict[str, Any], init: Any, notes: list[str]
) -> Config:
    """The settings with those of the adapters at --lora.init, if there is one; adds notes on them.

    in_file: settings of --config's file. init: the value of --init, None without one.
    """
    lora = in_file.get("lora")
    lora = lora if isinstance(lora, dict) else {}
    path = _value(words, "--lora.init") or lora.get("init")
    known = cfg.lora.rank or {"rank", "alpha", "targets"} <= lora.keys()  # of a run
    if known or not isinstance(path, str) or not path:
        return cfg
    from tmoe.hf.adapters.load import settings_at

    wrong = f"needs {Setting('init')}, the weights on which these adapters were trained"
    require(isinstance(init, str) and bool(init), "lora.init", path, wrong)
    weights = "--dry-run" not in words
    found, said = settings_at(Path(path), start_of(init, weights), weights)
    if _value(words, "--lora.rank") is None:
        notes.append(f"the adapters' settings are those of {path}")
    notes.extend(said)
    return replace(cfg, lora=found)


def _names_a_model(words: list[str]) -> bool:
    return any(word.startswith("--model.") for word in words)


def _names(settings: dict[str, Any], section: str = "") -> set[str]:
    """The dotted names of a file's nested settings."""
    names: set[str] = set()
    for key, value in settings.items():
        name = section + key.replace("-", "_")
        names |= _names(value, f"{name}.") if isinstance(value, dict) else {name}
    return names


def _values(words: list[str]) -> dict[str, str]:
    """The flags of a command line by dotted names, each with the word after it; the last one counts."""
    values = {}
    for word, after in zip_longest(words, words[1:], fillvalue=""):
        head, equals, value = word.partition("=")
        if head.startswith("--"):
            values[head[2:].replace("-", "_")] = value if equals else after
    return values


def _value(words: list[str], flag: str) -> str | None:
    """The value of a flag, the last if there are several; None if there is none."""
    return _without(words, flag)[1]


def _without(words: list[str], flag: str) -> tuple[list[str], str | None]:
    """The words without `--flag VALUE` and `--flag=VALUE`, and the last value."""
    left: list[str] = []
    last = None
    rest = iter(words)
    for word in rest:
        head, equals, value = word.partition("=")
        if head != flag:
            left.append(word)
            continue
        before, last = last, value if equals else next(rest, "")
        once = flag != "--config" or before is None
        require(once, "config", last, f"one file at most, and {Setting('config', before)} is the first")
        require(last != "" or flag != "--config", "config", True, "needs a file, .toml or .json")
    return left, last
