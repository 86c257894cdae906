"""Finds the spelling of tool calls and thoughts that a template reads, by rendering each spelling of a test.

Some rows have a call's arguments as an object, others as a text of JSON, as OpenAI writes them. The missing
content of a call is null, "" or absent. A template reads one of these spellings; it renders other spellings
as a text within a text, as the word None, or as nothing. So a test call is rendered in every spelling. The
rendered text must show the whole call, and arguments that are not in Python's syntax are preferred. Further
preferences are, in this order: a turn with the same end as an answer, ids as they are, arguments as an
object, and the shortest rendering.

A thought may be a field, a part of the content, or within the text between <think> and </think>. A template
may read one of these only: Magistral's reads parts. If a template has other marks of thoughts than <think>,
as gpt-oss, a thought within the text is moved to where the template reads it. Otherwise the model would learn
to write <think> as a part of its answer.

    spell = Speller(template)
    messages = spell(objects(messages), tools)

next: data/chat/encoding.py
"""

from __future__ import annotations

import itertools
import json
import re
from functools import lru_cache
from typing import Any, NamedTuple

from tmoe.data.chat.held import INLINE, SAME_THOUGHT, THOUGHTS
from tmoe.data.chat.template import ChatTemplate
from tmoe.data.tokenizer import DataError

ABSENT = object()
# Each is nine letters and digits, because Mistral's templates refuse other ids.
ASKED, NAME, ID, KEY, VALUE, ANSWER, OTHER = (f"z{n:07}z" for n in range(7))
PARAMETERS = dict(type="object", properties={OTHER: dict(type="string", description="z")})
TOOL = dict(type="function", function=dict(name=OTHER, description="z", parameters=PARAMETERS))


class Spelling(NamedTuple):
    """The spelling of tool calls and thoughts that a template reads."""

    text_arguments: bool = False
    """whether a call's arguments are a text of JSON instead of an object"""
    content: Any = ""
    """content of a call without text: "", None or ABSENT"""
    ids: str = ""
    """form of a call's id. "named": functions.NAME:NUMBER, the only place of the call's name, as for Kimi;
    "nine": nine letters and digits, as for Mistral; "": any"""
    thoughts: str = ""
    """where a turn's thought is written. "field": reasoning_content; "parts": a part of the content, of type
    thinking; "": where the row has it"""


@lru_cache(maxsize=8)
def speller_of(template: ChatTemplate) -> Speller:
    """The Speller of a template, kept, because it renders some twenty conversations to find the spelling."""
    return Speller(template)


class Speller:
    """Spells messages for one template; its spelling is found once with tools and once without."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._found: dict[bool, Spelling] = {}

    def __call__(self, messages: list[dict[str, Any]], tools: list | None) -> list[dict[str, Any]]:
        """Copies of `messages` in the template's spelling; `messages` is the output of `calls.objects`."""
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
            if not all(mark in text for mark in (NAME, KEY, VALUE)):
                continue
            foreign = f"'{KEY}':" in text or f'\\"{KEY}' in text  # Python's syntax, or a text within a text
            endless = not text.rstrip().endswith(end)  # LFM2.5 ends a turn only if it has a content
            cost = foreign, endless, ids, text_arguments, len("".join(text.split())), order
            if best is None or cost < best[0]:
                best = cost, how
        how = (best[1] if best else Spelling())._replace(thoughts=self._thoughts(tools))
        other = [dict(message, tool_calls=[call | dict(id="call_1")]) for message in called[1:]]
        answered = [asked, *other, answer | dict(tool_call_id="call_1")]
        text = self._rendered([asked, *other], how, tools) or self._rendered(answered, how, tools)
        return how if text or not best else how._replace(ids="nine")

    def _thoughts(self, tools: list | None) -> str:
        """The field `thoughts` of the spelling."""
        asked, said = dict(role="user", content=ASKED), dict(role="assistant", content=ANSWER)
        thinks = said | dict.fromkeys((THOUGHTS, SAME_THOUGHT[0]), KEY)
        within = said | dict(content=f"<think>\n{KEY}\n</think>\n\n{ANSWER}")
        field, parts, inline = (
            self._rendered([asked, turn], Spelling(thoughts=form), tools)
            for turn, form in ((thinks, ""), (thinks, "parts"), (within, ""))
        )
        if KEY in field:
            return "field" if inline.count("<think>") > field.count("<think>") else ""
        # a template that writes parts as JSON or in Python's syntax does not read them
        read = KEY in parts and ANSWER in parts and not re.search("""["']thinking["']""", parts)
        return "parts" if read else ""

    def _rendered(self, messages: list[dict[str, Any]], how: Spelling, tools: list | None) -> str:
        """The rendered text; "" if the template refuses this spelling."""
        try:
            return self.template.render(spelled(messages, how), tools)
        except DataError:
            return ""


def spelled(messages: list[dict[str, Any]], how: Spelling) -> list[dict[str, Any]]:
    """Copies of messages in the spelling `how`, without "weight". Their calls' arguments must be objects."""
    copies = [{name: value for name, value in message.items() if name != "weight"} for message in messages]
    if how.ids:
        _name_ids(copies, how.ids)
    for message in copies:
        if how.thoughts and message["role"] == "assistant":
            _move_thought(message, how.thoughts)
        if calls := message.get("tool_calls"):
            if how.text_arguments:
                message["tool_calls"] = [_as_text(call) for call in calls]
            if not message.get("content"):
                message["content"] = how.content
        if message.get("content") is ABSENT:
            del message["content"]
    return copies


def _move_thought(message: dict[str, Any], form: str) -> None:
    """Moves the thought of the assistant's message from its fields, or from within its text, to `form`."""
    thought, content = message.get(THOUGHTS), message.get("content") or ""
    if not thought and (inline := INLINE.fullmatch(content)):
        _, thought, _, content = inline.groups()
    for name in (THOUGHTS, *SAME_THOUGHT):
        message.pop(name, None)
    message["content"] = content
    if thought and form == "field":
        message |= dict.fromkeys((THOUGHTS, SAME_THOUGHT[0]), thought)
    elif thought:
        parts = [dict(type="thinking", thinking=thought), dict(type="text", text=content)]
        message["content"] = parts if content else parts[:1]


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return call | dict(function=call["function"] | dict(arguments=arguments))


def _name_ids(messages: list[dict[str, Any]], form: str) -> None:
    """Gives calls ids of this form, numbered from 0, and gives results the ids of their calls."""
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
            call_id = message.get("tool_call_id")
            following = unanswered.pop(0) if unanswered else None
            new = renamed.get(call_id, call_id) if call_id is not None else following
            if new is not None:
                message["tool_call_id"] = new


def _id_of(call: dict[str, Any], number: int, form: str) -> str:
    """A call's own id if it has the form, else an id made from its number."""
    name, own = call["function"]["name"], str(call.get("id"))
    if form == "named":
        fits = re.fullmatch(rf"(functions\.)?{re.escape(name)}:\d+", own)
        return own if fits else f"functions.{name}:{number}"
    return own if re.fullmatch(r"[A-Za-z0-9]{9}", own) else f"{number:09}"
