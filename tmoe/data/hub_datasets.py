"""Finds and downloads a data set of the Hugging Face hub: hub:ORG/NAME[@REVISION][:CONFIG][:SPLIT].

    hub:HuggingFaceH4/ultrachat_200k:train_sft      a split
    hub:openai/gsm8k:main:train                     a config (a subset) and a split
    hub:ORG/NAME                                    the split "train", or the only one
    hub:ORG/NAME@refs/convert/parquet:default:train the hub's own parquet of a set in other formats

Configs and splits are read from the set's card (README.md, `configs:`). If the card lists none, file names
decide, as in Hugging Face's library `datasets`: SPLIT-00000-of-00003.parquet, or "train", "validation" or
"test" (and other words of KEYWORDS) in a file's or folder's name. Only the files of the chosen split are
downloaded.

A listing of the files is kept in the cache for each commit. So a run whose revision is pinned needs no
connection once its files are in the cache.

next: data/survey.py
"""

from __future__ import annotations

import glob
import json
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from tmoe import hub
from tmoe.base.disk import written_whole
from tmoe.config.check import ConfigError
from tmoe.data.tokenizer import DataError

PREFIX = "hub:"
SHAPE = "hub:ORG/NAME[@REVISION][:CONFIG][:SPLIT]"
CARD = "README.md"
READ = re.compile(r".*\.(parquet|jsonl|ndjson|json|txt)(\.(gz|zst|bz2|xz))?", re.IGNORECASE)
OTHERS = re.compile(r".*\.(csv|tsv|arrow|zip|tar|tar\.gz|tgz|py|xml|h5)(\.(gz|zst|bz2|xz))?", re.IGNORECASE)
NO_DATA = (
    "dataset_infos.json",
    "dataset_info.json",
    "dataset_dict.json",
    "state.json",
    "config.json",
    "LICENSE.txt",
)
FORMATS = "parquet", "jsonl", "ndjson", "json", "txt"  # in order of preference if two have as many files
SHARDED = re.compile(r"data/.+?-\d{5}-of-\d{5}[^/]*")
COMMIT = re.compile(r"[0-9a-f]{40}")
KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
Configs = dict[str, dict[str, list[str]]]  # config -> split -> files


class Wanted(NamedTuple):
    """The parts of a source of the hub."""

    name: str
    revision: str | None
    rest: tuple[str, ...]
    """config and split, or only one of the two"""


def parse(spec: str) -> Wanted:
    """The parts of a source `hub:...`. DataError if it does not have the form of SHAPE."""
    first, *rest = spec.removeprefix(PREFIX).split(":")
    name, at, revision = first.partition("@")
    if slices := next((part for part in rest if "[" in part), ""):
        whole = spec.partition(slices)[0] + slices.partition("[")[0]
        raise DataError(
            f"{spec}: a slice of a split cannot be named; valid: {whole}, all of it, with fewer --steps"
        )
    if not hub.NAME.fullmatch(name) or len(rest) > 2 or not all(rest) or bool(at) != bool(revision):
        raise DataError(f"{spec}: must be {SHAPE}")
    return Wanted(name, revision or None, tuple(rest))


def pinned(spec: str) -> str:
    """The source with its branch, tag or missing revision replaced by the hub's current commit.

    A weight at its end is kept. Sources that are not of the hub are returned unchanged. DataError if the
    hub's commit cannot be found out.
    """
    if not spec.startswith(PREFIX):
        return spec
    first, *rest = spec.removeprefix(PREFIX).split(":")
    wanted = parse(PREFIX + first)
    commit, _ = listing(wanted.name, wanted.revision)
    return ":".join([f"{PREFIX}{wanted.name}@{commit}", *rest])


def files_of(spec: str) -> tuple[Path, list[Path]]:
    """Root and files, in reading order, of a source `hub:...`; downloads those that the cache lacks.

    DataError, in one line, if there is no such set, config or split, or if the hub refuses the download.
    """
    wanted = parse(spec)
    commit, names = listing(wanted.name, wanted.revision)
    card = _downloaded(wanted.name, commit, (CARD,)) / CARD if CARD in names else None
    chosen = choose(spec, *configs_of(names, card), wanted.rest)
    unread = [name for name in chosen if not READ.fullmatch(name)]
    if unread or not chosen:
        raise _no_files(spec, wanted, unread or names)
    folder = _downloaded(wanted.name, commit, chosen)
    if missing := [name for name in chosen if not (folder / name).is_file()]:
        raise DataError(f"{spec}: {folder} lacks {missing[0]}; {hub.fetch(wanted.name, 'dataset')}")
    return folder, [folder / name for name in sorted(chosen)]


# ---- listing and download ----


@cache
def listing(name: str, revision: str | None) -> tuple[str, tuple[str, ...]]:
    """Commit and file names of a data set's revision (None: its main branch).

    The hub is asked unless the revision is a commit that was listed before. Without a connection, the newest
    kept listing of the revision is used, or else the files of the revision in the cache.
    """
    from huggingface_hub import HfApi, errors

    where = PREFIX + name
    try:
        lock = f".tmoe{hub.folder_name(name, 'dataset')}.listing.lock"
        with hub.one_line(where, "dataset"), FileLock(hub.cache() / lock):
            if revision and COMMIT.fullmatch(revision) and (listed := _kept(name, revision)):
                return listed
            try:
                info = HfApi().dataset_info(name, revision=revision)
            except (errors.HTTPError, OSError):
                if listed := _kept(name, revision or "main") or _cached(name, revision or "main"):
                    return listed
                raise
            listed = str(info.sha), tuple(sorted(sibling.rfilename for sibling in info.siblings or ()))
            for label in {revision or "main", listed[0]}:
                path = _kept_path(name, label)
                path.parent.mkdir(exist_ok=True)
                with written_whole(path) as file:
                    json.dump(listed, file)
            return listed
    except ConfigError as error:
        raise DataError(str(error)) from None


def _kept_path(name: str, revision: str) -> Path:
    return hub.cache() / f".tmoe{hub.folder_name(name, 'dataset')}" / f"{revision.replace('/', '--')}.json"


def _kept(name: str, revision: str) -> tuple[str, tuple[str, ...]] | None:
    path = _kept_path(name, revision)
    if not path.is_file():
        return None
    commit, names = json.loads(path.read_text())
    return commit, tuple(names)


def _cached(name: str, revision: str) -> tuple[str, tuple[str, ...]] | None:
    """A listing of huggingface_hub's cache, for a revision that another program downloaded; else None."""
    ref = _snapshot(name, "").parent / "refs" / revision
    commit = ref.read_text().strip() if ref.is_file() else revision
    folder = _snapshot(name, commit)
    if not folder.is_dir():
        return None
    files = (path for path in folder.rglob("*") if path.is_file())
    return commit, tuple(sorted(path.relative_to(folder).as_posix() for path in files))


def _snapshot(name: str, commit: str) -> Path:
    """The folder of huggingface_hub's cache for the files of a commit."""
    return hub.cache() / f"datasets--{name.replace('/', '--')}" / "snapshots" / commit


@cache
def _downloaded(name: str, commit: str, files: tuple[str, ...]) -> Path:
    try:
        with hub.one_line(PREFIX + name, "dataset"):
            there = _snapshot(name, commit)
            if all((there / file).is_file() for file in files):  # only complete files have these names
                return there
            return hub.download(name, [glob.escape(file) for file in files], (), "dataset", commit)
    except ConfigError as error:
        message = str(error)
        raise DataError(message if message.startswith(PREFIX) else PREFIX + message) from None


# ---- configs and splits ----


def configs_of(names: Iterable[str], card: Path | None) -> tuple[Configs, str]:
    """Files of each split of each config, and the default config ("" if there is none).

    Both are read from the card if it lists configs, else from the files' names.
    """
    names = list(names)
    declared = _metadata(card).get("configs") if card else None
    if isinstance(declared, list) and declared:
        configs, usual = _of_card([entry for entry in declared if isinstance(entry, dict)], names)
    else:
        groups: dict[str, list[str]] = {}
        for name in filter(_is_data, names):
            top, slash, _ = name.partition("/")
            is_config = slash and top != "data" and split_of(f"{top}/") is None
            groups.setdefault(top if is_config else "default", []).append(name)
        configs = {config: _by_split(group) for config, group in groups.items()}
        usual = "default"
    return configs, next(iter(configs)) if len(configs) == 1 else usual if usual in configs else ""


def _metadata(card: Path) -> dict[str, Any]:
    from huggingface_hub.repocard import metadata_load

    try:
        return metadata_load(card) or {}
    except Exception as error:  # an error of the YAML parser
        raise DataError(f"{card}: its front matter is no YAML: {error}".replace("\n", " ")) from None


def _of_card(declared: list[dict[str, Any]], names: list[str]) -> tuple[Configs, str]:
    """The configs of the card's front matter, and the default one.

    The keys that are read: config_name, data_files, data_dir, default.
    """
    configs: Configs = {}
    usual = "default"
    for item in declared:
        config = str(item.get("config_name", "default"))
        usual = config if item.get("default") is True else usual
        base = str(item.get("data_dir") or "").strip("/")
        inside = [name for name in names if not base or name.startswith(f"{base}/")]
        files = item.get("data_files")
        if files is None:
            configs[config] = _by_split([name for name in inside if _is_data(name)])
            continue
        splits = configs.setdefault(config, {})
        for entry in [files] if isinstance(files, str | dict) else files:
            data_file = entry if isinstance(entry, dict) else dict(split="train", path=entry)
            paths = data_file.get("path", ())
            for path in [paths] if isinstance(paths, str) else paths:
                pattern = _pattern(f"{base}/{path}" if base else path)
                split_files = splits.setdefault(str(data_file.get("split", "train")), [])
                split_files += [name for name in names if pattern.fullmatch(name) and name not in split_files]
    return configs, usual


def _pattern(path: str) -> re.Pattern:
    """A card's glob as a regular expression: ** crosses folders, * and ? do not, [...] is as in fnmatch."""
    parts = re.split(r"(\*\*/?|\*|\?|\[[^\]]+\])", path.removeprefix("./"))
    spelled = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(spelled.get(p, p if p.startswith("[") else re.escape(p)) for p in parts))


def _is_data(name: str) -> bool:
    known = READ.fullmatch(name) or OTHERS.fullmatch(name)
    return bool(known) and name.rpartition("/")[2] not in NO_DATA and not re.search(r"(^|/)[._]", name)


def _by_split(names: list[str]) -> dict[str, list[str]]:
    """Files by the split in their names; all files are "train" if no name has a split.

    The rules are those of Hugging Face's library `datasets`. If there are files such as
    data/SPLIT-00000-of-00003, only these are used. Only files of the commonest format are used, so that
    a set that is published in two formats is read once.
    """
    names = [name for name in names if SHARDED.fullmatch(name)] or names
    splits: dict[str, list[str]] = {}
    for name in names:
        if split := split_of(name):
            splits.setdefault(split, []).append(name)
    splits = splits or ({"train": names} if names else {})
    kinds = Counter(_format_of(name) for group in splits.values() for name in group)
    kind = max(kinds, key=lambda form: (kinds[form], -(*FORMATS, form).index(form)), default="")
    one_kind = {split: [n for n in group if _format_of(n) == kind] for split, group in splits.items()}
    return {split: group for split, group in one_kind.items() if group}


def _format_of(name: str) -> str:
    match = READ.fullmatch(name) or OTHERS.fullmatch(name)
    return match[1].lower() if match else ""


def split_of(path: str) -> str | None:
    """The split in a path's names; None if there is none."""
    folder, _, file = path.rpartition("/")
    if match := re.match(r"(.+?)-\d{5}-of-\d{5}", file):
        return match[1]
    if folder and re.fullmatch(r"\d+\.parquet", file):  # parquet made by the hub: CONFIG/SPLIT/0000.parquet
        return folder.rpartition("/")[2].removeprefix("partial-")
    for part in reversed(path.split("/")):
        words = re.split(r"[-._ 0-9]+", part.lower())
        for split, keywords in KEYWORDS.items():
            if set(words) & {*keywords}:
                return split
    return None


def split_of_rows(path: str) -> str | None:
    """The split of a file of rows whose name, or whose folder's name, is that of a split; else None.

    It is stricter than `split_of`: a folder may hold test_parser.jsonl, or texts of a topic named eval.
    """
    read = READ.fullmatch(path)
    if not read or read[1].lower() == "txt":
        return None
    folder, _, file = path.rpartition("/")
    if match := re.match(r"(.+?)-\d{5}-of-\d{5}", file):
        words = {*re.split(r"[-._ 0-9]+", match[1].lower())}
        return match[1] if any(words & {*keywords} for keywords in KEYWORDS.values()) else None
    for part in (file.partition(".")[0].lower(), folder.rpartition("/")[2].lower()):
        for split, keywords in KEYWORDS.items():
            if part in keywords:
                return split
    return None


def choose(spec: str, configs: Configs, usual: str, rest: tuple[str, ...]) -> tuple[str, ...]:
    """The files of the config and split that a source names. DataError lists the valid ones.

    rest: config and split, or only one of them. A single name means a split of the default config if it has
        such a split, else a config.
    """
    known = ", ".join(list(configs)[:20]) or "none"
    config, split = usual, None
    if len(rest) == 2 or (rest and rest[0] not in configs.get(usual, {}) and rest[0] in configs):
        config, *more = rest
        split = more[0] if more else None
    elif rest:
        split = rest[0]
    if config and config not in configs:
        raise DataError(f"{spec}: no config {config!r}; valid: {known}")
    if not config and configs:
        named = f"no config {split!r}; valid" if split else f"name a config, {SHAPE}; there are"
        raise DataError(f"{spec}: {named}: {known}")
    splits = configs.get(config, {})
    if split is None:
        split = _usual_split(spec, splits)
    if split not in splits and splits:
        more = f"; configs: {known}" if len(configs) > 1 else ""
        raise DataError(f"{spec}: no split {split!r}; valid: {', '.join(splits)}{more}")
    return tuple(splits.get(split, ()))


def _usual_split(spec: str, splits: dict[str, list[str]]) -> str:
    if "train" in splits or not splits:
        return "train"
    if len(splits) > 1:
        raise DataError(f"{spec}: has no split 'train'; name one: {', '.join(splits)}")
    return next(iter(splits))


def _no_files(spec: str, wanted: Wanted, there: Iterable[str]) -> DataError:
    shown = ", ".join(list(there)[:3]) or "none"
    return DataError(
        f"{spec}: its files ({shown}) are not parquet, JSON lines, JSON or text; the hub keeps parquet "
        f"of many such sets: {PREFIX}{wanted.name}@refs/convert/parquet:CONFIG:SPLIT"
    )
