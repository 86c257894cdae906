"""Finds the tokenizer to which weights belong at the start of a run, and compares it before an export.

next: data/tokenizer.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tmoe.checkpoint import folders
from tmoe.checkpoint.manifest import CheckpointError, Manifest, read_manifest
from tmoe.checkpoint.rewrite import read_whole
from tmoe.config.run import Config
from tmoe.data.chat.format import (
    SETTINGS,
    TEMPLATE,
    TOOLS_FILE,
    ChatFormat,
    ends_in,
    json_object,
    templates_in,
)
from tmoe.data.tokenizer import NAMES, Carried, TokenizerFiles
from tmoe.hf.chat import GENERATION, format_of_step
from tmoe.hf.files import FILE
from tmoe.hf.foreign import CONFIG, is_folder

TOKENIZER, MODEL = NAMES
UNREAD = ("vocab.json", "merges.txt", "vocab.txt", "*.tiktoken", "tiktoken.model", "spiece.model")
UNREAD += ("tekken.json", "tokenizer.model.v*")


def carried_by_start(cfg: Config) -> Carried | None:
    """The tokenizer of the weights with which a run begins; None if it is not known.

    The weights are those of the step that the run resumes, else those of --init. Only manifests and tokenizer
    files are read. Whether the step is complete and belongs to the run is checked when it is loaded.
    """
    if cfg.resume not in ("auto", "none"):
        carried = carried_by(Path(cfg.resume))
    else:
        step = _newest(Path(cfg.out, "checkpoints")) if cfg.resume == "auto" else None
        carried = carried_by(step) if step else None
    return carried or (carried_by(Path(cfg.init)) if cfg.init else None)


def _newest(steps: Path) -> Path | None:
    try:
        return next((path for _, path in folders.published(steps)[0]), None)
    except CheckpointError:
        return None  # the error is reported when the step is loaded


def unknown_of(init: str) -> str:
    """The note of a run whose --init has no known tokenizer; it names tokenizer files that are not read."""
    note = f"--init={init}: its tokenizer is not known, so it cannot be checked that the data are of it"
    return note + unread_in(Path(init))


def unread_in(folder: Path) -> str:
    """Advice to append to a message: a folder's tokenizer files that are not read, and how to convert one."""
    there = sorted({path.name for name in UNREAD for path in folder.glob(name)})
    if not there:
        return ""
    return (
        f": of {', '.join(there)} none is read; transformers' AutoTokenizer.from_pretrained(DIR)"
        f".save_pretrained(DIR) writes {TOKENIZER}, to be put next to the weights or named"
    )


class Level(NamedTuple):
    """One folder in the history of weights: a published folder or a step folder."""

    where: Path
    content: dict[str, bytes]
    """small files of the published folder, or those stored in the step"""
    manifest: Manifest | None
    """manifest of a step folder; None for a published folder"""


def lineage(path: Path) -> list[Level]:
    """The folders through which the weights of `path` were trained, by each run's --init, the oldest first.

    A folder that cannot be read ends the list, because loading it reports the error. So does a folder that
    is in the list already.
    """
    names = (*NAMES, SETTINGS, TEMPLATE, TOOLS_FILE, GENERATION, CONFIG)
    levels: list[Level] = []
    seen: list[Path] = []
    while True:
        if is_folder(path):
            content = {name: (path / name).read_bytes() for name in names if (path / name).is_file()}
            levels.append(Level(path, content, None))
            break
        try:
            step = folders.resolve(path)
            manifest = read_manifest(step)
            entries = {name: manifest.tensors.get(FILE + name) for name in names}
            content = {n: read_whole(step, entry).numpy().tobytes() for n, entry in entries.items() if entry}
        except CheckpointError:
            break
        levels.append(Level(path, content, manifest))
        seen.append(step.resolve())
        config = manifest.info.get("config")
        path = Path(str(config.get("init") or "")) if isinstance(config, dict) else Path()
        if not path.name or path.resolve() in seen:
            break
    return levels[::-1]


def carried_by(path: Path) -> Carried | None:
    """The tokenizer and the format of conversations of a Hugging Face folder or of a step folder.

    If the folder has none, those of the weights that its run started from are returned. A step's manifest
    names the tokenizer that made its data; a file with another hash is not used for it. CheckpointError for
    a step whose "chat" is malformed.
    """
    carried: Carried | None = None
    for level in lineage(path):
        carried = _after(level, carried)
    return carried


def carried_in(where: Path, content: dict[str, bytes]) -> Carried | None:
    """`carried_by` of the small files of a folder that is not there. where: what messages name."""
    return _after(Level(where, content, None), None)


def _after(level: Level, before: Carried | None) -> Carried | None:
    """The tokenizer and format after one more folder of the history; before: those of the older folders."""
    where, content, manifest = level
    carried = _of_files(where, content) or before
    chat, generation = (before.chat, before.generation) if before else (None, {})
    if content or manifest is None:
        generation = json_object(content.get(GENERATION))
        template, tools = templates_in(content)
        named = where / TEMPLATE if TEMPLATE in content else f"chat_template of {where / SETTINGS}"
        ends = ends_in(generation, json_object(content.get(CONFIG)))
        chat = ChatFormat(template, tools, ends=ends, source=str(named))
        carried = carried or Carried(str(where), "", None)
    trained_on = of_data(manifest) if manifest else None
    if trained_on is not None and (
        carried is None or trained_on not in (carried.fingerprint, *carried.others)
    ):
        if carried is not None and carried.fingerprint:  # with another tokenizer, ids have another meaning
            chat, generation = None, {}
        beside = _of_files(where, beside_data(manifest)) if manifest else None
        carried = Carried(str(where), trained_on, beside.files if beside else None)
    if manifest is not None:
        chat = format_of_step(where, manifest) or chat
    return carried and carried._replace(where=str(where), chat=chat, generation=generation)


def of_data(manifest: Manifest) -> str | None:
    """Fingerprint of the tokenizer that made a step's data; None if the manifest has none."""
    data = manifest.info.get("data")
    fingerprint = data.get("tokenizer") if isinstance(data, dict) else None
    return fingerprint if isinstance(fingerprint, str) else None


def of_run(
    step: Path, manifest: Manifest, config: dict[str, Any], files: dict[str, Callable[[], bytes]]
) -> tuple[dict[str, Any], dict[str, Callable[[], bytes]]]:
    """config.json and files of an export made from settings, with the tokenizer of the run's data added.

    The tokenizer's files are added if they still exist where the run read them (--data.tokenizer, the shards'
    folder, --init), and the id that ends a text is added to the settings. A line is printed if the files are
    missing.
    """
    data = manifest.info.get("data")
    eos = data.get("eos") if isinstance(data, dict) else None
    if isinstance(eos, int) and config.get("eos_token_id") is None:
        config = config | {"eos_token_id": eos}
        ends = json.dumps({"eos_token_id": eos}, indent=2) + "\n"
        files = {GENERATION: ends.encode} | files
    trained_on = of_data(manifest)
    if trained_on is None or any(name in files for name in NAMES):
        return config, files
    if trained_on == "bytes":
        print(f"{step}: trained on bytes: there is no tokenizer file, an id is a byte and 0 ends a text")
        return config, files
    if beside := beside_data(manifest):
        return config, files | {name: partial(bytes, raw) for name, raw in beside.items()}
    print(
        f"{step}: no tokenizer is written: it was trained on data of {trained_on}, whose {TOKENIZER} is not "
        f"where the run found it; copy it into the folder"
    )
    return config, files


def beside_data(manifest: Manifest) -> dict[str, bytes]:
    """Files of the tokenizer of a run's data, by their names on Hugging Face.

    They are read where the run read them: --data.tokenizer, or the folder of the shards. {} if no file there
    has the fingerprint that is recorded for the data.
    """
    trained_on = of_data(manifest)
    for place in _places(manifest):
        folder = place if place.is_dir() else place.parent
        beside = [folder / name for name in (*NAMES, SETTINGS, TEMPLATE)]
        content = {path.name: path.read_bytes() for path in beside if path.is_file()}
        if place.is_file() and place.name not in NAMES:
            raw = place.read_bytes()
            is_json = raw.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")
            content = {TOKENIZER if is_json else MODEL: raw} | {
                n: content[n] for n in content if n not in NAMES
            }
        carried = _of_files(folder, content)
        if carried and trained_on in (carried.fingerprint, *carried.others):
            return content
    return {}


def _places(manifest: Manifest) -> list[Path]:
    """Files and folders that may be, or hold, the tokenizer of a run's data."""
    config = manifest.info.get("config")
    data = config.get("data") if isinstance(config, dict) else None
    data = data if isinstance(data, dict) else {}
    paths = data.get("path")
    named = Path(str(data.get("tokenizer") or ""))
    places = [named] if named.name and named.exists() else []
    for name in map(str, paths if isinstance(paths, list | tuple) else ()):
        path = Path(name) if Path(name).exists() else Path(name.rpartition(":")[0] or name)
        places += [path if path.is_dir() else path.parent]
    return places


def _of_files(where: Path, content: dict[str, bytes]) -> Carried | None:
    """The tokenizer of a folder's files.

    None without a tokenizer.json or tokenizer.model. A tokenizer.json without a model is ignored, because it
    cannot encode text.
    """
    candidates = [
        TokenizerFiles(
            f"{where / name}",
            content[name],
            content.get(SETTINGS),
            f"{where / SETTINGS}",
            content.get(TEMPLATE),
            content.get(TOOLS_FILE),
        )
        for name in NAMES
        if name in content and (name == MODEL or _is_tokenizer(content[name]))
    ]
    if not candidates:
        return None
    fingerprint, *others = (files.fingerprint for files in candidates)
    return Carried(str(where), fingerprint, candidates[0], tuple(others))


def _is_tokenizer(raw: bytes) -> bool:
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return True  # a damaged file must raise an error later instead of being ignored
    return not isinstance(content, dict) or "model" in content


def require_tokenizer_of_run(step: Path, manifest: Manifest, files: dict[str, Callable[[], bytes]]) -> None:
    """CheckpointError if an export's tokenizer is not the tokenizer with which the step was trained."""
    trained_on = of_data(manifest)
    carried = _of_files(Path(), {name: files[name]() for name in NAMES if name in files})
    if trained_on is None or carried is None:
        return
    fingerprint = carried.fingerprint
    if trained_on not in (fingerprint, *carried.others):
        raise CheckpointError(
            f"{step}: trained on data of tokenizer {trained_on}; {TOKENIZER} of the original is "
            f"{fingerprint}, for which ids mean other text: name with --like a copy of the original "
            f"that holds the run's {TOKENIZER}, or none"
        )
