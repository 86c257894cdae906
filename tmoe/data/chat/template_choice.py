"""Chooses the template of a run's conversations, and the format that its saved steps store.

next: data/chat/chat_dataset.py
"""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tmoe.config.run import DataConfig
from tmoe.data.chat.encoding import Marker, turn_ends
from tmoe.data.chat.format import ChatFormat
from tmoe.data.chat.template import BUILT_IN, ChatTemplate, load_template
from tmoe.data.tokenizer import Carried, DataError, Tokenizer


class Chosen(NamedTuple):
    """The template of a run."""

    template: ChatTemplate
    notes: tuple[str, ...]
    """lines for the log: a named template differs from that of the weights, or a folder's is not used"""


def choose_template(cfg: DataConfig, tokenizer: Tokenizer, carried: Carried | None) -> Chosen:
    """The template of --data.chat-template, else of the weights, of the tokenizer's files, or built in.

    tokenizer: its `chat` is the weights' format. If the template of the weights or that of --data.tokenizer's
    folder is not used, a note names it. Neither is an error, because a template does not change the meaning
    of ids. DataError for a template that cannot be read.
    """
    chat = carried.chat if carried else None
    if cfg.chat_template is not None and not Path(cfg.chat_template).is_file() and chat and chat.template:
        raise DataError(
            f"--data.chat-template={cfg.chat_template}: no such file; valid: a jinja file, or None for "
            f"{chat.source}"
        )
    template = load_template(tokenizer, cfg.chat_template)
    notes: list[str] = []
    if carried is None or chat is None or chat.template is None:
        return Chosen(template, ())
    if cfg.chat_template is not None:
        if note := another(f"--data.chat-template={cfg.chat_template}", template, chat):
            notes.append(note)
    elif cfg.tokenizer != "auto":
        alone = copy.copy(tokenizer)
        alone.chat = None
        other = load_template(alone)
        if other.source != BUILT_IN and (other.text, other.tools) != (chat.template, chat.tools):
            notes.append(
                f"--data.tokenizer={cfg.tokenizer}: the template there is not used; conversations are "
                f"written by {chat.source}; --data.chat-template FILE names another"
            )
    return Chosen(template, tuple(notes))


def another(flag: str, template: ChatTemplate, theirs: ChatFormat | None) -> str:
    """A note if the template of `flag` differs from that of the weights; else ""."""
    if theirs is None or theirs.template is None:
        return ""
    if (template.text, template.tools) == (theirs.template, theirs.tools):
        return ""
    return f"{flag}: is used instead of the template of the weights, {theirs.source}"


def format_of(tokenizer: Tokenizer, template: ChatTemplate, forms: set[str], vocab: int) -> ChatFormat:
    """The format that a run's saved steps store: that of its rows, and else that of its first weights.

    forms: "conversation" if the template rendered rows, "text" if rows are texts, or both.
    vocab: number of ids of the model; ends that are not below it are left out.
    """
    before = tokenizer.chat or ChatFormat(None)
    marker = Marker(tokenizer)
    ends: list[int] = []
    if "conversation" in forms:
        with suppress(DataError):  # raised if the template refuses a bare question, or ends no turn
            ends += turn_ends(tokenizer, template)
        before = before._replace(template=template.text, tools=template.tools, special=template.special)
    if "text" in forms:
        ends.append(tokenizer.eos)
    opening = marker.encode([marker.opening])[0].ids.tolist() if marker.opening else []
    in_vocab = (i for i in dict.fromkeys([*ends, *before.ends]) if i < vocab)
    return before._replace(ends=tuple(in_vocab), opening=tuple(opening), source=template.source)
