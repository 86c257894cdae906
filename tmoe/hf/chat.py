"""Writes the files of an export that describe conversations: chat template, special tokens, ends of answers.

next: hf/tokenizer_files.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tmoe.checkpoint.manifest import NAME, CheckpointError, Manifest
from tmoe.data.chat.format import SETTINGS, TEMPLATE, TOOLS, ChatFormat, ends_in, json_object, templates_in
from tmoe.data.chat.template import ChatTemplate
from tmoe.data.tokenizer import NAMES
from tmoe.hf.foreign import CONFIG, GENERATION

Files = dict[str, Callable[[], bytes]]


class Written(NamedTuple):
    """The files of an export, and a note on each file that differs from the original's."""

    files: Files
    notes: list[str]


def format_of_step(step: Path, manifest: Manifest) -> ChatFormat | None:
    """The format of a step's conversations; None if its manifest has none. CheckpointError if malformed."""
    entry = manifest.info.get("chat")
    try:
        return None if entry is None else ChatFormat.parse(entry, f"the chat template of {step}")
    except ValueError as error:
        raise CheckpointError(f"{step / NAME}: {error}") from None


def with_chat(step: Path, manifest: Manifest, files: Files, folder: Path) -> Written:
    """An export's files, changed to the step's format of conversations.

    files: files of the original, or made from settings.
    folder: the exported folder, for the notes.

    The template is written to chat_template.jinja, or, with a second template for tools, as a list in
    tokenizer_config.json; the other place is left empty, so that the two never differ. Special tokens that
    the template reads are named in tokenizer_config.json as in training. generation_config.json lists the
    ends of the run's answers, then those of the original.
    """
    chat = format_of_step(step, manifest)
    if chat is None:
        return Written(files, [])
    notes: list[str] = []
    content = {n: files[n]() for n in (TEMPLATE, SETTINGS, GENERATION, CONFIG) if n in files}
    settings = json_object(content.get(SETTINGS))
    changed: dict[str, bytes] = {}
    if chat.template is not None:
        before = templates_in(content)
        if before != (chat.template, chat.tools):
            files = {name: read for name, read in files.items() if name != TEMPLATE}
            changed |= _put_template(chat.template, chat.tools, settings)
            replaced = "" if before[0] is None else "; the original's is replaced"
            where = folder / (TEMPLATE if chat.tools is None else SETTINGS)
            notes.append(f"{where}: the chat template that {step} was trained with{replaced}")
        if any(name in files for name in NAMES):
            tokens = _tokens_of(chat, settings)
            settings |= tokens
            if tokens:
                shown = ", ".join(f"{name} {text!r}" for name, text in tokens.items())
                notes.append(f"{folder / SETTINGS}: {shown}, as the template was given in training")
        if settings != json_object(content.get(SETTINGS)):
            changed[SETTINGS] = _json(settings)
    generation, config = json_object(content.get(GENERATION)), json_object(content.get(CONFIG))
    ends = ends_in(generation, config)
    if not {*chat.ends} <= {*ends}:
        both = list(dict.fromkeys([*chat.ends, *ends]))
        named = {
            name: config[name] for name in ("bos_token_id", "pad_token_id") if config.get(name) is not None
        }
        generation = (generation or named) | dict(eos_token_id=both if len(both) > 1 else both[0])
        changed[GENERATION] = _json(generation)
        notes.append(
            f"{folder / GENERATION}: eos_token_id is {both}, at which answers of {step} end; "
            f"the original's: {list(ends) or 'none'}"
        )
    return Written(files | {name: partial(bytes, raw) for name, raw in changed.items()}, notes)


def _put_template(template: str, tools: str | None, settings: dict[str, Any]) -> dict[str, bytes]:
    """A template's file, by its name. With a template for tools, both are put into `settings` instead."""
    settings.pop("chat_template", None)
    if tools is None:
        return {TEMPLATE: template.encode()}
    both = dict(default=template) | {TOOLS: tools}
    settings["chat_template"] = [dict(name=n, template=text) for n, text in both.items()]
    return {}


def _tokens_of(chat: ChatFormat, settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens that the template reads and tokenizer_config.json lacks or has with another text."""
    assert chat.template is not None
    read = ChatTemplate(chat.template, chat.source, chat.special, tools=chat.tools).reads
    tokens = {}
    for name, text in chat.special.items():
        setting = settings.get(name)
        setting = setting.get("content") if isinstance(setting, dict) else setting
        if name in read and isinstance(text, str) and text and setting != text:
            tokens[name] = text
    return tokens


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
