"""Parses thoughts and tool calls out of the text of an answer, while the text arrives.

    Qwen, Hermes   <think>...</think>, <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    Qwen3-Coder    <tool_call><function=NAME><parameter=KEY>...: Qwen3.5, Nemotron 3
    GLM            <tool_call>NAME<arg_key>KEY</arg_key><arg_value>...
    Llama 3        {"name": ..., "parameters": {...}} as the whole answer, or after <|python_tag|>
    Mistral        [TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]name[ARGS]{...}
    DeepSeek, Kimi, MiniMax    a section of calls after a mark of its own
    gpt-oss        <|channel|>analysis<|message|>..., <|channel|>commentary to=functions.NAME ...

serve/parse_calls.py reads the text between the marks. Thoughts between <think> and </think>, or [THINK] and
[/THINK], are parsed with every format. A call that cannot be read stays a part of the content, so that no
text is lost.

next: serve/answers.py
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from tmoe.data.chat.template import ChatTemplate
from tmoe.serve.parse_calls import Call, Reader, calls_in, named_call, reader_of

Format = Literal[
    "hermes", "qwen3-coder", "glm", "llama3", "mistral", "deepseek", "kimi", "minimax", "gpt-oss", ""
]
# the mark after which a format's calls are the rest of the answer
SECTIONS = dict(
    llama3="<|python_tag|>",
    mistral="[TOOL_CALLS]",
    deepseek="<｜tool▁calls▁begin｜>",
    kimi="<|tool_calls_section_begin|>",
    minimax="<minimax:tool_call>",
)
# marks of parameters: a value may hold the mark that ends a call
VALUES = {"qwen3-coder": ("<parameter=", "</parameter>"), "glm": ("<arg_value>", "</arg_value>")}


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
    sections: tuple[Format, ...] = ("mistral", "deepseek", "kimi", "minimax")
    if found := next((kind for kind in sections if SECTIONS[kind] in template), None):
        return found
    if "<tool_call>" in template:
        by_name: dict[str, Format] = {"<arg_key>": "glm", "<function=": "qwen3-coder"}
        return next((kind for mark, kind in by_name.items() if mark in template), "hermes")
    # Nemotron, for example, has Llama's marks of turns and calls of another form
    return "llama3" if "<|start_header_id|>" in template and '"parameters' in template else ""


def thought_tags(template: str) -> tuple[str, str] | None:
    """The tags around thoughts in a chat template's text; None if there are none."""
    pairs = [("<think>", "</think>"), ("[THINK]", "[/THINK]")]
    return next((pair for pair in pairs if pair[1] in template), None)


def has_thoughts(template: str) -> bool:
    """Whether thoughts are parsed with this template."""
    return thought_tags(template) is not None or format_of(template) == "gpt-oss"


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
    """Thoughts between tags, and calls each of which has tags, as Hermes, Qwen and GLM write them."""

    def __init__(
        self,
        thoughts: tuple[str, str] | None,
        thinking: bool,
        read: Reader | None = None,
        values: tuple[str, str] | None = None,
    ):
        """thoughts: their tags. thinking: whether the text begins within a thought.

        read: reads a call; None: calls stay text.
        values: the marks of a parameter's value; None: calls are JSON.
        """
        self.read, self.values = read, values
        self.called = False  # whether a call is the last of what was read
        self.inside = "think" if thinking else ""
        self.opens = {thoughts[0]: "think"} if thoughts else {}
        self.opens |= {"<tool_call>": "call"} if read else {}
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
            self.called = self.called and not text.strip()

    def _close(self, delta: Delta, over: bool = False) -> bool:
        """Takes a call up to its end tag, if it is there: not one within a string, unless no text follows."""
        body, tag, rest = self.buffer.partition("</tool_call>")
        while tag and not over and self._in_value(body):
            more, tag, rest = rest.partition("</tool_call>")
            body += f"</tool_call>{more}"
        if tag:
            self._call(body, tag, delta)
            self.inside, self.buffer = "", rest
        return bool(tag)

    def _in_value(self, body: str) -> bool:
        """Whether the beginning of a call ends within a string, or within a parameter's value."""
        if self.values:
            return body.count(self.values[0]) > body.count(self.values[1])
        return re.sub(r"\\.", "", body).count('"') % 2 == 1

    def _call(self, body: str, tag: str, delta: Delta) -> None:
        assert self.read  # no call begins without it
        calls = self.read(body)
        delta.calls += calls
        self.called = bool(calls)
        if not calls:
            delta.content += f"<tool_call>{body}{tag}"

    def end(self) -> Delta:
        delta = Delta()
        while self.inside == "call" and self._close(delta, over=True):
            while self._next(delta):
                pass
        if self.inside == "call":
            self._call(self.buffer, "", delta)
        elif self.buffer.strip() or not self.called:  # Nemotron ends a call with a line break
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
    """Formats of SECTIONS: the text after the first mark of calls is held back, and read at its end."""

    def __init__(self, mark: str, read: Reader, brace: bool) -> None:
        """brace: whether an answer that begins with a brace may be a call, too."""
        self.mark, self.read, self.brace = mark, read, brace
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
        read = self.read if self.inside else calls_in
        calls = read(self.buffer) if self.inside or self.brace else []
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


def parser(template: str, tools: list | None, thinks: bool) -> Plain:
    """The parser of an answer.

    template: text of the chat template. tools: of the request, in OpenAI's form. thinks: the prompt ends in a
    thought.
    """
    kind = format_of(template)
    if kind == "gpt-oss":
        return Channels(bool(tools))
    tags = thought_tags(template)
    read = reader_of(kind, tools) if tools and kind else None
    if read and kind in SECTIONS:
        inner = Marked(SECTIONS[kind], read, kind == "llama3")
        return Both(Tagged(tags, thinks), inner) if tags else inner
    return Tagged(tags, thinks, read, VALUES.get(kind)) if tags or read else Plain()
