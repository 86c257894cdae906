"""How a row's messages are spelled for one template: found by rendering a probe in each spelling.

A call's arguments are an object in some rows and JSON in a text in others, as OpenAI writes them; a call's
missing content is null, "" or absent. A template reads one of these. The others become a text in a text, the
word None, or nothing. So one call is rendered in every spelling. A spelling must show all of it, and not in
Python's form. A turn that ends as an answer does is preferred, then an object to a text, then the content
with the fewest characters around it.

    spell = Speller(template)
    messages = spell(objects(messages), tools)

next: data/chat/encoding.py
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, NamedTuple

from tmoe.data.chat.template import ChatTemplate
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
    ids: str = ""
    """"named": a call is named by its id alone, functions.NAME:NUMBER, as Kimi's; "nine": nine letters and
    digits, as Mistral's; else any"""


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
        end = self._rendered([asked, dict(role="assistant", content=ANSWER)], Spelling(), tools)
        end = end.rpartition(ANSWER)[2].strip()
        best: tuple[Any, Spelling] | None = None
        choices = itertools.product(("", "named"), (False, True), ("", None, ABSENT))
        for order, (ids, text_arguments, content) in enumerate(choices):
            how = Spelling(text_arguments, content, ids)
            text = self._rendered(called, how, tools) or self._rendered([*called, answer], how, tools)
            if not all(one in text for one in (NAME, KEY, VALUE)):
                continue
            foreign = f"'{KEY}':" in text or f'\\"{KEY}' in text  # Python's form, or a text in a text
            endless = not text.rstrip().endswith(end)  # LFM2.5 ends a turn only where it has a content
            cost = foreign, endless, ids, text_arguments, len("".join(text.split())), order
            if best is None or cost < best[0]:
                best = cost, how
        how = best[1] if best else Spelling()
        other = [dict(message, tool_calls=[call | dict(id="call_1")]) for message in called[1:]]
        answered = [asked, *other, answer | dict(tool_call_id="call_1")]
        text = self._rendered([asked, *other], how, tools) or self._rendered(answered, how, tools)
        return how if text or not best else how._replace(ids="nine")

    def _rendered(self, messages: list[dict[str, Any]], how: Spelling, tools: list | None) -> str:
        """The text; "" where the template refuses this spelling."""
        try:
            return self.template.render(spelled(messages, how), tools)
        except DataError:
            return ""


def spelled(messages: list[dict[str, Any]], how: Spelling) -> list[dict[str, Any]]:
    """Copies of messages, whose calls' arguments are objects, in one spelling; without "weight"."""
    found = [{name: one for name, one in message.items() if name != "weight"} for message in messages]
    if how.ids:
        _name_ids(found, how.ids)
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


def _name_ids(messages: list[dict[str, Any]], form: str) -> None:
    """Gives calls ids of a form, numbered from 0 through the conversation; a result has its call's."""
    renamed: dict[Any, str] = {}
    unanswered: list[str] = []
    number = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            unanswered = []
            for j, call in enumerate(calls):
                new = _id_of(call, number, form)
                renamed[call.get("id")] = new
                unanswered.append(new)
                number += 1
                calls = [*calls[:j], call | dict(id=new), *calls[j + 1 :]]
            message["tool_calls"] = calls
        elif message["role"] == "tool":
            told = message.get("tool_call_id")
            following = unanswered.pop(0) if unanswered else None
            new = renamed.get(told, told) if told is not None else following
            if new is not None:
                message["tool_call_id"] = new


def _id_of(call: dict[str, Any], number: int, form: str) -> str:
    """A call's own id, if it has the form, else one made of its number."""
    name, own = call["function"]["name"], str(call.get("id"))
    if form == "named":
        kept = re.fullmatch(rf"(functions\.)?{re.escape(name)}:\d+", own)
        return own if kept else f"functions.{name}:{number}"
    return own if re.fullmatch(r"[A-Za-z0-9]{9}", own) else f"{number:09}"
