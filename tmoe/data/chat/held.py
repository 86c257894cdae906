"""Finds out which strings of a conversation its rendered text holds, and so what a template leaves out.

Two checks find missing strings. First a shadow of the conversation, with a nonce in place of every string, is
rendered in the same way: this shows which fields a template writes. Then every string of the row is searched
for in the rendered text, as it is or as JSON escapes it, without blanks, because templates strip blanks: this
shows what a template cuts out of a text. The first check is needed for short strings, which may also occur
within other words. Few shadows are rendered, because rows have few shapes.

next: data/chat/encoding.py
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from tmoe.data.tokenizer import DataError

# A thought within the text of an answer, as in many data sets: <think>, its text, </think> and the answer.
INLINE = re.compile(r"(\s*<think>\s*)(.*?)(\s*</think>\s*)(.*)", re.DOTALL)
THOUGHTS, CALLS, TOOLS = "reasoning_content", "tool_calls", "tools"
NULLS = "arguments and tools that are null"
SAME_THOUGHT = ("thinking", "reasoning")
PASSED = ("role", "weight", *SAME_THOUGHT)
NUMBER = 7070707
NAMED = 10  # most fields that one sentence names
NEAR = 2**15  # characters around the last string, in which the next one is searched for first
MOST_ABSENT = 64  # kinds of strings of a conversation that a template may leave out
Replace = Callable[[str], str]


class Item(NamedTuple):
    """A string of a conversation."""

    message: int
    """index of its message; -1: it is in the tools"""
    field: str
    text: str

    @property
    def content(self) -> bool:
        """Whether the string is content of the conversation, not a name or an id."""
        return self.field in ("content", THOUGHTS, CALLS, TOOLS)


def walk(
    messages: list[dict[str, Any]], tools: list | None, replace: Replace = str
) -> tuple[list[dict[str, Any]], list | None, list[Item]]:
    """A copy with every string replaced, and the new strings. Calls must have the form of `calls.objects`."""
    items: list[Item] = []
    copies = []
    for i, message in enumerate(messages):
        copy = {}
        for name, value in message.items():
            if name in PASSED:
                copy[name] = value
            elif name == "content" and message["role"] == "assistant" and isinstance(value, str):
                copy[name] = _answer(i, value, replace, items)
            elif name == CALLS:
                copy[name] = [_call(i, call, replace, items) for call in value]
            else:
                copy[name] = _leaves(value, i, name, replace, items)
        for name in (name for name in SAME_THOUGHT if name in message and THOUGHTS in copy):
            copy[name] = copy[THOUGHTS]
        copies.append(copy)
    if tools:
        tools = [_tool(tool, replace, items) for tool in tools]
    return copies, tools, items


def _answer(i: int, text: str, replace: Replace, items: list[Item]) -> str:
    match = INLINE.fullmatch(text)
    if not match:
        return _leaves(text, i, "content", replace, items)
    begins, thought, ends, answer = match.groups()
    thought = _leaves(thought, i, THOUGHTS, replace, items)
    return begins + thought + ends + _leaves(answer, i, "content", replace, items)


def _call(i: int, call: dict[str, Any], replace: Replace, items: list[Item]) -> dict[str, Any]:
    copy = {
        name: value if name == "type" else _leaves(value, i, f"{CALLS}: {name}", replace, items)
        for name, value in call.items()
        if name != "function"
    }
    function = {
        name: _leaves(
            value, i, CALLS if name in ("name", "arguments") else f"{CALLS}: {name}", replace, items
        )
        for name, value in call["function"].items()
    }
    return copy | dict(function=function)


def _tool(tool: Any, replace: Replace, items: list[Item]) -> Any:
    """A copy with names and descriptions replaced. Types are kept: templates write them differently."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    copy = dict(function)
    for name, field in (("name", TOOLS), ("description", f"{TOOLS}: description")):
        if isinstance(copy.get(name), str):
            copy[name] = _leaves(copy[name], -1, field, replace, items)
    parameters = copy.get("parameters")
    if isinstance(parameters, dict) and isinstance(parameters.get("properties"), dict):
        shown = {
            _leaves(name, -1, f"{TOOLS}: parameters", replace, items): _described(parameter, replace, items)
            for name, parameter in parameters["properties"].items()
        }
        copy["parameters"] = parameters | dict(properties=shown)
    return tool | dict(function=copy) if "function" in tool else copy


def _described(parameter: Any, replace: Replace, items: list[Item]) -> Any:
    if isinstance(parameter, dict) and isinstance(parameter.get("description"), str):
        text = _leaves(parameter["description"], -1, f"{TOOLS}: description", replace, items)
        return parameter | dict(description=text)
    return parameter


def _leaves(value: Any, i: int, field: str, replace: Replace, items: list[Item]) -> Any:
    """A copy of a nested value; its strings and keys are replaced and added to `items`."""
    if isinstance(value, str):
        new = replace(value) if value.strip() else value
        if new.strip():
            items.append(Item(i, field, new))
        return new
    if isinstance(value, dict):
        return {
            _leaves(str(key), i, field, replace, items): _leaves(item, i, field, replace, items)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_leaves(item, i, field, replace, items) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool) and replace is not str:
        return type(value)(NUMBER)
    return value


def shadow(
    messages: list[dict[str, Any]], tools: list | None
) -> tuple[list[dict[str, Any]], list | None, list[Item]]:
    """The conversation with a nonce for every string: nine letters and digits, as Mistral requires of ids."""
    numbers: dict[str, str] = {}
    ids = {call.get("id") for message in messages for call in message.get(CALLS) or []} - {None}

    def nonce(text: str) -> str:
        if text in ids and text in numbers:  # a result has the id of its call
            return numbers[text]
        return numbers.setdefault(text if text in ids else f"{len(numbers)} {text}", f"z{len(numbers):07}z")

    return walk(messages, tools, nonce)


def require_asked(item: Item, messages: list[dict[str, Any]], source: str) -> None:
    """DataError if the string that `source` leaves out is content of another message than the assistant's."""
    if item.message >= 0 and item.field == "content" and messages[item.message]["role"] != "assistant":
        role, text = messages[item.message]["role"], item.text[:40]
        where = f"messages[{item.message}]"
        raise DataError(f"{where}: {source} leaves out the role {role!r}, or a part of its text: {text!r}")


def squeezed(text: str) -> str:
    """The text without blanks, which templates strip and add."""
    return "".join(text.split())


def forms(string: str) -> Iterator[str]:
    """A string without blanks as it is, and as JSON escapes it."""
    yield squeezed(string)
    for ascii_only in (False, True):
        yield squeezed(json.dumps(string.strip(), ensure_ascii=ascii_only)[1:-1])


def holds(text: str, string: str) -> bool:
    """Whether a text without blanks holds a string, as it is or as JSON escapes it."""
    return any(form in text for form in forms(string))


def absent(text: str, items: Iterable[Item], kind: Callable[[Item], Hashable]) -> list[Item]:
    """The first item of each kind whose strings a text without blanks does not hold.

    A template writes most strings in their order, so a string is first searched for near the last one. No
    string is searched for of a kind of which one is absent: the time of searches in the whole text grows with
    the square of a conversation's length. DataError for more than MOST_ABSENT kinds.
    """
    place, lacking = 0, dict[Hashable, Item]()
    for item in items:
        if (of := kind(item)) not in lacking:
            if (at := _find(text, item.text, place)) >= 0:
                place = at
            else:
                lacking[of] = item
        if len(lacking) > MOST_ABSENT:
            raise DataError(f"the chat template leaves out more than {MOST_ABSENT} fields of the messages")
    return [*lacking.values()]


def _find(text: str, string: str, place: int) -> int:
    """The place of a string, as `holds` reads it: after `place`, near it, or anywhere; -1: none."""
    near = NEAR + 6 * len(string)  # JSON may write 6 characters for one
    for start, end in ((place, place + near), (max(place - near, 0), place + near), (0, len(text))):
        for form in forms(string):
            if (at := text.find(form, start, end)) >= 0:
                return at
    return -1


def as_python(value: Any, text: str) -> Any:
    """An object or list in a call's arguments that the blankless text has in Python's syntax; else None."""
    if isinstance(value, dict | list) and value:
        for item in value.values() if isinstance(value, dict) else value:
            if (part := as_python(item, text)) is not None:
                return part
        forms = (json.dumps(value, ensure_ascii=ascii_only) for ascii_only in (False, True))
        if squeezed(repr(value)) in text and not any(squeezed(form) in text for form in forms):
            return value
    return None


def tell(left: Counter[str], source: str, unread: Iterable[str] = ()) -> str:
    """The sentence on what a template leaves out; "" if it leaves out nothing.

    left: number of rows by field that is left out.
    unread: fields of rows that are no part of a conversation.
    """
    parts = [f"{field} in {count:,} row{'s' * (count > 1)}" for field, count in sorted(left.items())]
    omitted = f"left out by the chat template ({source}): {', '.join(parts)}" if parts else ""
    fields = sorted(unread)
    more = f" and {len(fields) - NAMED} more" if len(fields) > NAMED else ""
    ignored = f"fields of rows that are not read: {', '.join(fields[:NAMED])}{more}" if fields else ""
    return ", ".join(filter(None, (omitted, ignored)))
