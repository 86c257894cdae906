"""How a row's messages are spelled for one template: found by rendering a probe in each spelling.

A call's arguments are an object in some rows and JSON in a text in others, as OpenAI writes them; a call's
missing content is null, "" or absent. A template reads one of these. The others become a text in a text, the
word None, or nothing. So one call is rendered in every spelling. A spelling must show all of it, and not in
Python's form. An object is preferred to a text, and the content with the fewest characters around it.

    spell = Speller(template)
    messages = spell(objects(messages), tools)

next: data/chat.py
"""

from __future__ import annotations

import itertools
import json
from typing import Any, NamedTuple

from tmoe.data.chat_template import ChatTemplate
from tmoe.data.tokenizer import DataError

ABSENT = object()
# Letters and digits, nine of them: Mistral's templates refuse other ids.
ASKED, NAME, ID, KEY, VALUE, ANSWER, OTHER = (f"z{n:07}z" for n in range(7))
PARAMETERS = dict(type="object", properties={OTHER: dict(type="string", description="z")})
TOOL = dict(type="function", function=dict(name=OTHER, description="z", parameters=PARAMETERS))


class Spelling(NamedTuple):
    """The spelling that a template reads."""

    text_arguments: bool = False
    """a call's arguments as JSON in a text, not as an object"""
    content: Any = ""
    """of a call without text: "", None or ABSENT"""
    named_ids: bool = False
    """a call is named by its id alone, functions.NAME:NUMBER, as Kimi's are"""


class Speller:
    """Spells messages for one template; the spelling is found once, with tools and once without."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._found: dict[bool, Spelling] = {}

    def __call__(self, messages: list[dict[str, Any]], tools: list | None) -> list[dict[str, Any]]:
        """Copies of `objects(messages)` as the template reads them."""
        with_tools = bool(tools)
        if with_tools not in self._found:
            self._found[with_tools] = self._find(with_tools)
        return spelled(messages, self._found[with_tools])

    def _find(self, with_tools: bool) -> Spelling:
        tools = [TOOL] if with_tools else None
        call = dict(id=ID, type="function", function=dict(name=NAME, arguments={KEY: VALUE}))
        asked = dict(role="user", content=ASKED)
        called = [asked, dict(role="assistant", content="", tool_calls=[call])]
        answer = dict(role="tool", content=ANSWER, name=NAME, tool_call_id=ID)
        best: tuple[Any, Spelling] | None = None
        choices = itertools.product((False, True), (False, True), ("", None, ABSENT))
        for order, (named_ids, text_arguments, content) in enumerate(choices):
            how = Spelling(text_arguments, content, named_ids)
            text = self._rendered(called, how, tools) or self._rendered([*called, answer], how, tools)
            if not all(one in text for one in (NAME, KEY, VALUE)):
                continue
            foreign = f"'{KEY}':" in text or f'\\"{KEY}' in text  # Python's form, or a text in a text
            cost = foreign, named_ids, text_arguments, len("".join(text.split())), order
            if best is None or cost < best[0]:
                best = cost, how
        return best[1] if best else Spelling()

    def _rendered(self, messages: list[dict[str, Any]], how: Spelling, tools: list | None) -> str:
        """The text; "" where the template refuses this spelling."""
        try:
            return self.template.render(spelled(messages, how), tools)
        except DataError:
            return ""


def spelled(messages: list[dict[str, Any]], how: Spelling) -> list[dict[str, Any]]:
    """Copies of messages, whose calls' arguments are objects, in one spelling; without "weight"."""
    found = [{name: one for name, one in message.items() if name != "weight"} for message in messages]
    if how.named_ids:
        _name_ids(found)
    for message in found:
        if calls := message.get("tool_calls"):
            if how.text_arguments:
                message["tool_calls"] = [_as_text(call) for call in calls]
            if not message.get("content"):
                message["content"] = how.content
        if message.get("content") is ABSENT:
            del message["content"]
    return found


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return call | dict(function=call["function"] | dict(arguments=arguments))


def _name_ids(messages: list[dict[str, Any]]) -> None:
    """Kimi's ids: functions.NAME:NUMBER, numbers from 0 through the conversation; results follow theirs."""
    renamed: dict[Any, str] = {}
    open_calls: list[str] = []
    number = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            open_calls = []
            for j, call in enumerate(calls):
                name = call["function"]["name"]
                told = call.get("id")
                new = told if told and name in told else f"functions.{name}:{number}"
                renamed[told] = new
                open_calls.append(new)
                number += 1
                calls = [*calls[:j], call | dict(id=new), *calls[j + 1 :]]
            message["tool_calls"] = calls
        elif message["role"] == "tool":
            told = message.get("tool_call_id")
            following = open_calls.pop(0) if open_calls else None
            new = renamed.get(told, told) if told is not None else following
            if new is not None:
                message["tool_call_id"] = new
