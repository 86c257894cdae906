"""Reads tool calls from the text that a model wrote between the marks of its format.

    JSON           {"name": ..., "arguments": {...}}, or name[ARGS]{...}       Hermes, Llama 3, Mistral
    headed JSON    a name after a mark, then an object                         DeepSeek, Kimi
    by name        a text for each parameter                                   Qwen3-Coder, GLM, MiniMax

A parameter given by name is a text. It is read as JSON if the tool's schema allows a value of that type. Each
reader returns no call if a part of the text is none, so that the text can be shown instead.

next: serve/parse_tools.py
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

LONE = re.compile("[\ud800-\udfff]")
# between two calls
BETWEEN = re.compile(r"(?:[;\s]|<tool_call>|\[TOOL_CALLS\])*")
# Mistral's name of a function, before its arguments
NAME = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*|(?=\{))")


def _number(text: str) -> float:
    """A number with a point or an exponent, or a constant that is no JSON, such as NaN."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number in JSON")
    return number


DECODER = json.JSONDecoder(parse_float=_number, parse_constant=_number)


@dataclass
class Call:
    """A tool call."""

    name: str
    arguments: str
    """JSON text"""


def call_of(found: Any) -> Call | None:
    """The call in a JSON value; None if it has no name."""
    if not isinstance(found, dict):
        return None
    inner = found.get("function") if isinstance(found.get("function"), dict) else found
    given = inner.get("arguments", inner.get("parameters"))
    if isinstance(given, dict):
        try:
            text = json.dumps(given, ensure_ascii=False)
            # half of a surrogate pair, which only an escape can write
            given = json.dumps(given) if LONE.search(text) else text
        except RecursionError:
            return None
    return named_call(inner.get("name"), "" if given is None else given)


def named_call(name: Any, arguments: Any) -> Call | None:
    """A call with arguments in JSON; blank ones are an empty object. None if either cannot be read."""
    if not isinstance(arguments, str) or not isinstance(name, str):
        return None
    text = arguments.strip() or "{}"
    return Call(name, text) if name.strip() and name.isprintable() and is_object(text) else None


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(DECODER.decode(text), dict)
    except (ValueError, RecursionError):
        return False


def calls_in(text: str, named: bool = False) -> list[Call]:
    """The calls of a text: JSON objects, or lists of them. [] if a part of it is none.

    named: whether a name may precede an object, its arguments.
    """
    place, calls = 0, list[Call | None]()
    while (place := BETWEEN.match(text, place).end()) < len(text):
        name = NAME.match(text, place) if named else None
        start = name.end() if name else place
        try:
            blank = name and text[start : start + 1] != "{"
            found, place = ({}, start) if blank else DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            return []
        if name:
            calls.append(named_call(name[1], text[start:place]))
        else:
            calls += map(call_of, found if isinstance(found, list) else [found])
    return [call for call in calls if call] if all(calls) else []


class ByName(NamedTuple):
    """How a format writes a call whose parameters have names."""

    head: re.Pattern[str]
    """the function's name"""
    parameter: re.Pattern[str]
    """a parameter's name and its text"""
    foot: re.Pattern[str]
    """the end of the call"""


QWEN = ByName(
    re.compile(r"\s*<function=([^>\n]+)>"),
    re.compile(
        r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*<(?:parameter=|/function>))", re.DOTALL
    ),
    re.compile(r"\s*</function>\s*"),
)
MINIMAX = ByName(
    re.compile(r"\s*<invoke name=\"([^\"\n]+)\">"),
    re.compile(
        r"\s*<parameter name=\"([^\"\n]+)\">(.*?)</parameter>(?=\s*<(?:parameter |/invoke>))", re.DOTALL
    ),
    re.compile(r"\s*</invoke>\s*(?:</minimax:tool_call>\s*)?"),
)
GLM = ByName(
    re.compile(r"\s*([^\s<>]+)(?=\s*(?:<arg_key>|\Z))"),
    re.compile(
        r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL
    ),
    re.compile(r"\s*\Z"),
)
# a call's name and its arguments: the form of V3 and R1, then that of V3.1
DEEPSEEK = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:"
    r"function<｜tool▁sep｜>([^\n]+)\n```json\n(.*?)\n```"
    r"|([^<]+)<｜tool▁sep｜>(.*?)"
    r")<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>\s*)?",
    re.DOTALL,
)
KIMI = re.compile(
    r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?([^<]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>(.*?)"
    r"<\|tool_call_end\|>\s*(?:<\|tool_calls_section_end\|>\s*)?",
    re.DOTALL,
)
BY_NAME = {"qwen3-coder": QWEN, "minimax": MINIMAX, "glm": GLM}
HEADED = dict(deepseek=DEEPSEEK, kimi=KIMI)
Reader = Callable[[str], list[Call]]


def reader_of(kind: str, tools: list | None) -> Reader:
    """The reader of calls of a format. tools: of the request, in OpenAI's form."""
    if kind in BY_NAME:
        return partial(calls_by_name, form=BY_NAME[kind], types=types_of(tools))
    if kind in HEADED:
        return partial(headed_calls, form=HEADED[kind])
    return partial(calls_in, named=kind != "hermes")


def types_of(tools: list | None) -> dict[str, dict[str, Any]]:
    """For each function of `tools`, in OpenAI's form, the JSON schemas of its parameters by their names."""
    found = {}
    for tool in tools or []:
        function = tool["function"]
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        found[function["name"]] = properties if isinstance(properties, dict) else {}
    return found


def value_of(text: str, schema: Any) -> Any:
    """The value of a parameter that a model wrote as this text: the text, or the JSON in it.

    schema: the parameter's JSON schema, or None. JSON of a type that the schema does not name is a text.
    Qwen's templates write true and false as Python does.
    """
    kinds = types_in(schema)
    if "boolean" in kinds and text.strip() in ("True", "False"):
        return text.strip() == "True"
    try:
        value = DECODER.decode(text.strip())
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) or (kinds and not kinds & types_of_value(value)) else value


def types_in(schema: Any) -> set[str]:
    """The types that a JSON schema and its alternatives name; empty if they name none."""
    if not isinstance(schema, dict):
        return set()
    options = [schema, *as_list(schema.get("anyOf")), *as_list(schema.get("oneOf"))]
    names = (name for one in options if isinstance(one, dict) for name in as_list(one.get("type")))
    return {name for name in names if isinstance(name, str)}


def as_list(value: Any) -> list:
    """A list as it is, none for None, and another value as a list of it."""
    return value if isinstance(value, list) else [] if value is None else [value]


def types_of_value(value: Any) -> set[str]:
    """The names that a JSON schema has for the type of a value that is no string."""
    if isinstance(value, bool) or value is None:
        return {"null" if value is None else "boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == int(value) else {"number"}
    return {"array" if isinstance(value, list) else "object"}


def calls_by_name(text: str, form: ByName, types: dict[str, dict[str, Any]]) -> list[Call]:
    """The calls of a text whose parameters have names. types: the result of `types_of`."""
    place, calls = 0, list[Call | None]()
    while text[place:].strip():
        head = form.head.match(text, place)
        if not head:
            return []
        name, place = head[1].strip(), head.end()
        given: dict[str, Any] = {}
        while found := form.parameter.match(text, place):
            key, place = found[1].strip(), found.end()
            if key in given:
                return []
            given[key] = value_of(found[2], types.get(name, {}).get(key))
        foot = form.foot.match(text, place)
        # GLM writes a call without arguments as one word, which any text may be
        if not foot or not (given or form is not GLM or name in types):
            return []
        place = foot.end()
        calls.append(call_of(dict(name=name, arguments=given)))
    return [call for call in calls if call] if all(calls) else []


def headed_calls(text: str, form: re.Pattern[str]) -> list[Call]:
    """The calls of a text in each of which a name precedes an object."""
    place, calls = 0, list[Call | None]()
    while text[place:].strip():
        found = form.match(text, place)
        if not found:
            return []
        name, arguments = (part for part in found.groups() if part is not None)
        calls.append(named_call(name.strip(), arguments))
        place = found.end()
    return [call for call in calls if call] if all(calls) else []
