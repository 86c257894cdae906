"""The format of a model's conversations: template, special tokens, ends of answers and opening tokens.

A saved step of a chat finetune stores the format in its manifest, under "chat". A published folder states it
in chat_template.jinja, tokenizer_config.json and generation_config.json.

next: data/tokenizer.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

TEMPLATE = "chat_template.jinja"
SETTINGS = "tokenizer_config.json"
TOOLS = "tool_use"  # name of the template for conversations with tools
TOOLS_FILE = f"additional_chat_templates/{TOOLS}.jinja"  # as transformers 5 saves it


class ChatFormat(NamedTuple):
    """Everything besides the tokenizer that decided the ids of a model's conversations."""

    template: str | None
    """text of the jinja template; None: no conversation was rendered, and no folder has a template"""
    tools: str | None = None
    """a second template, for conversations with tools"""
    special: dict[str, Any] = {}  # noqa: RUF012
    """the template's variables besides the conversation (eos_token, ...); empty: those of the tokenizer"""
    ends: tuple[int, ...] = ()
    """ids that end an answer, in addition to the tokenizer's `eos`"""
    opening: tuple[int, ...] | None = None
    """ids that precede a prompt that is a text; None: not known"""
    source: str = ""
    """where the format was found, for messages"""

    def as_json(self) -> dict[str, Any]:
        """The format without `source`, as it is stored in a manifest."""
        opening = None if self.opening is None else list(self.opening)
        return self._asdict() | dict(ends=list(self.ends), opening=opening, source="")

    @classmethod
    def parse(cls, told: Any, source: str) -> ChatFormat:
        """The format from the output of `as_json`. ValueError names the malformed fields."""
        told = told if isinstance(told, dict) else {}
        opening = told.get("opening")
        checks = dict(
            template=isinstance(told.get("template"), str | None),
            tools=isinstance(told.get("tools"), str | None),
            special=isinstance(told.get("special"), dict),
            ends=_are_ids(told.get("ends")),
            opening=opening is None or _are_ids(opening),
        )
        if wrong := [name for name, right in checks.items() if not right]:
            raise ValueError(f"chat: malformed: {', '.join(wrong)}")
        return cls(
            told.get("template"),
            told.get("tools"),
            told["special"],
            tuple(told["ends"]),
            None if opening is None else tuple(opening),
            source,
        )


def ends_of(tokenizer: Any, vocab: int) -> tuple[int, ...]:
    """Every id below `vocab` that ends an answer: the tokenizer's `eos`, and the ends of its `chat`."""
    chat = getattr(tokenizer, "chat", None)
    ends = dict.fromkeys([tokenizer.eos, *(chat.ends if chat else ())])
    return tuple(i for i in ends if i < vocab)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)


def templates_in(content: Mapping[str, bytes]) -> tuple[str | None, str | None]:
    """The chat template among the files of a published folder, and the template for tools; None if absent.

    chat_template.jinja is preferred to the key of tokenizer_config.json, as in transformers. A template that
    cannot be read is returned as None; the tokenizer's own reader reports it.
    """
    try:
        if TEMPLATE in content:
            tools = content.get(TOOLS_FILE)
            return content[TEMPLATE].decode("utf-8-sig"), tools.decode("utf-8-sig") if tools else None
        template = json_object(content.get(SETTINGS)).get("chat_template")
        if isinstance(template, str):
            return template, None
        by_name = {entry["name"]: entry["template"] for entry in template or ()}
        return by_name.get("default"), by_name.get(TOOLS)
    except (ValueError, KeyError, TypeError):
        return None, None


def json_object(raw: bytes | None) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no file, no object, or text that transformers cannot read."""
    try:
        value = json.loads(raw.decode("utf-8-sig")) if raw else {}
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def ends_in(generation: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer by generation_config.json, else by config.json or its text_config."""
    nested = config.get("text_config")
    config = config if "eos_token_id" in config or not isinstance(nested, dict) else nested
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    ends = ends if isinstance(ends, list) else [ends]
    return tuple(dict.fromkeys(i for i in ends if type(i) is int and i >= 0))
