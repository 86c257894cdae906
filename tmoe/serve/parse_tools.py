"""Parses thoughts and tool calls out of the text of an answer, in the formats of four families.

    Qwen, Hermes   <think>...</think>, <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    Llama 3        {"name": ..., "parameters": {...}} as the whole answer, or after <|python_tag|>
    Mistral        [TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]name[ARGS]{...}
    gpt-oss        <|channel|>analysis<|message|>..., <|channel|>commentary to=functions.NAME ...

Thoughts between <think> and </think>, or [THINK] and [/THINK], are parsed with every format. A call that
cannot be read stays a part of the content, so that no text is lost.

next: serve/answers.py
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from tmoe.data.chat.template import ChatTemplate

LONE = re.compile("[\ud800-\udfff]")
# between two calls
BETWEEN = re.compile(r"(?:[;\s]|<tool_call>|\[TOOL_CALLS\])*")
# Mistral's name of a function, before its arguments
NAME = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*|(?=\{))")
Format = Literal["hermes", "llama3", "mistral", "gpt-oss", ""]


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


@dataclass
class Delta:
    """The addition of a text to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


def text_of(template: ChatTemplate | None) -> str:
    """The text of a chat template, and that of its second template for tools."""
    return f"{template.text}{template.tools or ''}" if template else ""


def format_of(template: str) -> Format:
    """The format of calls in a chat template's text; "": calls stay text."""
    if "<|channel|>" in template:
        return "gpt-oss"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template and "<arg_key>" not in template and "<function=" not in template:
        return "hermes"
    # Nemotron, for example, has Llama's marks of turns and calls of another form
    return "llama3" if "<|start_header_id|>" in template and '"parameters' in template else ""


def thought_tags(template: str) -> tuple[str, str] | None:
    """The tags around thoughts in a chat template's text; None if there are none."""
    pairs = [("<think>", "</think>"), ("[THINK]", "[/THINK]")]
    return next((pair for pair in pairs if pair[1] in template), None)


def has_thoughts(template: str) -> bool:
    """Whether thoughts are parsed with this template."""
    return thought_tags(template) is not None or format_of(template) == "gpt-oss"


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


def held(text: str, marks: tuple[str, ...]) -> int:
    """Number of characters at the end of a text that may be the beginning of a mark."""
    lengths = (n for mark in marks for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n]))
    return max(lengths, default=0)


class Plain:
    """An answer without thoughts and calls. The parent of the other parsers."""

    def add(self, text: str) -> Delta:
        """The part of the answer that is known after more text."""
        return Delta(text)

    def end(self) -> Delta:
        """The part that was held back, once the answer is over."""
        return Delta()


class Tagged(Plain):
    """Thoughts between tags, and calls as Hermes and Qwen write them."""

    def __init__(self, thoughts: tuple[str, str] | None, calls: bool, thinking: bool):
        """thoughts: their tags. thinking: whether the text begins within a thought."""
        self.inside = "think" if thinking else ""
        self.opens = {thoughts[0]: "think"} if thoughts else {}
        self.opens |= {"<tool_call>": "call"} if calls else {}
        self.closes = (thoughts[1],) if thoughts else ()
        self.buffer = ""
        self.begun = False  # whether the content has begun
        self.trim = thinking  # whether blanks are removed before the next text

    def add(self, text: str) -> Delta:
        self.buffer += text
        delta = Delta()
        while self._next(delta):
            pass
        return delta

    def _next(self, delta: Delta) -> bool:
        """Takes the text up to the next tag. Returns whether there was one."""
        if self.trim:
            self.buffer = self.buffer.lstrip()
            self.trim = not self.buffer
        if self.inside == "call":
            return self._close(delta)
        marks = self.closes if self.inside == "think" else tuple(self.opens)
        places = [(self.buffer.find(mark), mark) for mark in marks if mark in self.buffer]
        if not places:
            keep = len(self.buffer) - held(self.buffer, marks)
            blank = len(self.buffer[:keep].rstrip()) if marks else keep  # blanks before a tag are not shown
            self._say(self.buffer[:blank], delta)
            self.buffer = self.buffer[blank:]
            return False
        place, mark = min(places)
        self._say(self.buffer[:place].rstrip(), delta)
        self.buffer = self.buffer[place + len(mark) :]
        self.trim = mark != "<tool_call>"
        self.inside = "" if self.inside else self.opens[mark]
        return True

    def _say(self, text: str, delta: Delta) -> None:
        if self.inside == "think":
            delta.reasoning += text
        else:
            delta.content += text

    def _close(self, delta: Delta, over: bool = False) -> bool:
        """Takes a call up to its end tag, if it is there: not one within a string, unless no text follows."""
        body, tag, rest = self.buffer.partition("</tool_call>")
        while tag and not over and re.sub(r"\\.", "", body).count('"') % 2:
            more, tag, rest = rest.partition("</tool_call>")
            body += f"</tool_call>{more}"
        if tag:
            self._call(body, tag, delta)
            self.inside, self.buffer = "", rest
        return bool(tag)

    def _call(self, body: str, tag: str, delta: Delta) -> None:
        calls = calls_in(body)
        delta.calls += calls
        if not calls:
            delta.content += f"<tool_call>{body}{tag}"

    def end(self) -> Delta:
        delta = Delta()
        while self.inside == "call" and self._close(delta, over=True):
            while self._next(delta):
                pass
        if self.inside == "call":
            self._call(self.buffer, "", delta)
        else:
            self._say(self.buffer, delta)
        self.buffer = ""
        return delta


class Both(Plain):
    """Thoughts between tags; the other text is read by another parser."""

    def __init__(self, thoughts: Tagged, inner: Plain):
        self.thoughts, self.inner = thoughts, inner

    def add(self, text: str) -> Delta:
        outer = self.thoughts.add(text)
        delta = self.inner.add(outer.content)
        return Delta(delta.content, outer.reasoning, delta.calls)

    def end(self) -> Delta:
        outer = self.thoughts.end()
        delta, last = self.inner.add(outer.content), self.inner.end()
        return Delta(delta.content + last.content, outer.reasoning, delta.calls + last.calls)


class Marked(Plain):
    """Llama 3 and Mistral: the text after the first mark of calls is held back, and read at its end."""

    def __init__(self, mark: str, brace: bool) -> None:
        """brace: whether an answer that begins with a brace may be a call, too."""
        self.mark, self.brace = mark, brace
        self.buffer, self.inside = "", False

    def add(self, text: str) -> Delta:
        self.buffer += text
        if self.inside:
            return Delta()
        before, mark, rest = self.buffer.partition(self.mark)
        if mark:
            self.inside, self.buffer = True, rest
            return Delta(before.rstrip())
        if self.brace and self.buffer.lstrip()[:1] in ("", "{"):
            return Delta()
        keep = len(self.buffer) - held(self.buffer, (self.mark,))
        keep = len(self.buffer[:keep].rstrip())  # blanks before a mark are not shown
        said, self.buffer = self.buffer[:keep], self.buffer[keep:]
        self.brace = self.brace and not said
        return Delta(said)

    def end(self) -> Delta:
        calls = calls_in(self.buffer, named=self.inside) if self.inside or self.brace else []
        return Delta(calls=calls) if calls else Delta(self.mark * self.inside + self.buffer)


class Channels(Plain):
    """gpt-oss: messages with headers. Analysis is the thought, commentary to a function is a call."""

    ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")

    def __init__(self, calls: bool) -> None:
        self.calls = calls
        self.buffer, self.header = "", ""
        self.inside = False  # whether the buffer is the body of a message

    def add(self, text: str) -> Delta:
        self.buffer += text
        delta = Delta()
        while self._next(delta):
            pass
        return delta

    def _next(self, delta: Delta) -> bool:
        if not self.inside:
            header, mark, rest = self.buffer.partition("<|message|>")
            if mark:
                self.header, self.buffer, self.inside = header, rest, True
            return bool(mark)
        places = [(self.buffer.find(mark), mark) for mark in self.ENDS if mark in self.buffer]
        if places:
            place, mark = min(places)
            self._say(self.buffer[:place], delta, True)
            keep = 0 if mark in ("<|start|>", "<|channel|>") else len(mark)
            self.buffer, self.inside = self.buffer[place + keep :], False
            return True
        if self._function():
            return False
        keep = len(self.buffer) - held(self.buffer, self.ENDS)
        self._say(self.buffer[:keep], delta, False)
        self.buffer = self.buffer[keep:]
        return False

    def _function(self) -> str:
        """The name of the function that the message is for; "" for a text."""
        found = re.search(r"to=functions\.([^\s<]+)", self.header)
        return found[1] if found and self.calls else ""

    def _say(self, text: str, delta: Delta, over: bool) -> None:
        name = self._function()
        if name and over:
            if call := named_call(name, text):
                delta.calls.append(call)
            else:
                delta.content += f"{self.header}<|message|>{text}"
        elif "analysis" in self.header:
            delta.reasoning += text
        else:
            delta.content += text

    def end(self) -> Delta:
        delta = Delta()
        if self.inside:
            self._say(self.buffer, delta, True)
        else:
            delta.content += self.buffer  # no header, or one without its message
        self.buffer = ""
        return delta


def parser(template: str, tools: bool, thinks: bool) -> Plain:
    """The parser of an answer. template: text of the chat template. thinks: the prompt ends in a thought."""
    kind = format_of(template)
    if kind == "gpt-oss":
        return Channels(tools)
    tags = thought_tags(template)
    if tools and kind in ("llama3", "mistral"):
        inner = Marked("<|python_tag|>", True) if kind == "llama3" else Marked("[TOOL_CALLS]", False)
        return Both(Tagged(tags, False, thinks), inner) if tags else inner
    calls = kind == "hermes" and tools
    return Tagged(tags, calls, thinks) if tags or calls else Plain()
