"""Finds a model's chat template and renders it in jinja2's sandbox.

A template is code, written by the publisher of the model. It is rendered as transformers does (Hugging Face,
2026): ImmutableSandboxedEnvironment, trim_blocks, lstrip_blocks, loop controls, `tojson`, `raise_exception`,
`strftime_now`, and the names of the tokenizer's special tokens. Its variables are plain JSON values.

next: data/chat/encoding.py
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from tmoe.data.chat.format import TOOLS_FILE
from tmoe.data.tokenizer import DataError, JsonTokenizer, Tokenizer

# The template for a tokenizer whose model has none. Every turn is the role, its text and the tokenizer's end
# of a document, which no text can forge, because a row that holds it is refused.
PLAIN = """\
{%- if tools -%}
{{- 'tools\\n' + (tools | tojson) + eos_token + '\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- message.role + '\\n' -}}
{%- if message.role == 'assistant' and message.reasoning_content -%}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n' -}}
{%- endif -%}
{{- message.content or '' -}}
{%- if message.tool_calls -%}
{{- '\\ncalls\\n' + (message.tool_calls | tojson) -}}
{%- endif -%}
{{- eos_token + '\\n' -}}
{%- endfor -%}
{{- 'assistant\\n' if add_generation_prompt else '' -}}
"""
BUILT_IN = "plain built-in template: the model has none"
# The date of `strftime_now` in training, fixed so that ids do not change with the day on which a run resumes.
TRAINING_DAY = datetime.datetime(2025, 1, 1)
# Marks around the text of a {% generation %} block. Unicode assigns no characters to these two code points.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Variables by which published templates switch thinking on and off.
THINKING = ("enable_thinking", "thinking")


class ChatTemplate:
    """One compiled template. `render` returns the text of a conversation, or raises DataError if it fails."""

    def __init__(
        self, text: str, source: str, special: dict[str, Any], *, tools: str | None = None, now: bool = False
    ) -> None:
        """special: variables of the template besides the conversation: bos_token, eos_token and others.

        tools: a second template, for conversations with tools.
        now: whether `strftime_now` is today's date, as for a question to answer, or TRAINING_DAY.
        """
        self.source = source
        self.text = text
        self.tools = tools
        self.special = special
        clock = datetime.datetime.now if now else lambda: TRAINING_DAY
        environment = _environment(clock)
        try:
            self._template = environment.from_string(text)
            self._with_tools = environment.from_string(tools) if tools else self._template
            read = jinja2.meta.find_undeclared_variables(environment.parse(text + (tools or "")))
        except jinja2.TemplateError as error:
            raise DataError(f"{source}: not a chat template: {_first_line(error)}") from error
        self.reads = read
        """names of all variables that the template may read"""
        self.marks = GENERATION.search(text) is not None
        """whether the template marks the trained text by {% generation %}"""
        self.variants: list[dict[str, Any]] = [{}]
        """settings of variables for which the generation prompt may differ"""
        self.variants += [{name: on} for name in THINKING if name in read for on in (False, True)]
        content = json.dumps([text, tools, special], sort_keys=True, default=str)
        self.digest = hashlib.sha256(content.encode()).hexdigest()[:32]

    def render(
        self, messages: list[dict], tools: list | None = None, *, prompt: bool = False, **more: Any
    ) -> str:
        """The text of these messages; with prompt, up to the beginning of the assistant's next turn."""
        return self.render_marked(messages, tools, prompt=prompt, **more)[0]

    def render_marked(
        self, messages: list[dict], tools: list | None = None, *, prompt: bool = False, **more: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of `render`, and the first character and the end of each {% generation %} block in it."""
        given = dict(messages=messages, documents=None, add_generation_prompt=prompt)
        try:
            text = self._rendered(tools, self.special | given | more)
        except Exception as error:  # a template may fail in any way on unexpected messages
            reason = str(error) if isinstance(error, jinja2.TemplateError) else repr(error)
            raise DataError(f"the chat template ({self.source}) refuses it: {reason}") from error
        parts = text.split(OPEN)
        if len(parts) == 1:
            return text, []
        spans = []
        plain = parts[0]
        for part in parts[1:]:
            inside, _, after = part.partition(CLOSE)
            spans.append((len(plain), len(plain) + len(inside)))
            plain += inside + after
        return plain, spans

    def _rendered(self, tools: list | None, given: dict[str, Any]) -> str:
        """The text. A template that refuses tools without all fields is given tools with them."""
        template = self._with_tools if tools else self._template
        try:
            return template.render(given | dict(tools=tools))
        except Exception:
            if not tools or (whole := [with_all_fields(tool) for tool in tools]) == tools:
                raise
        return template.render(given | dict(tools=whole))


def with_all_fields(tool: Any) -> Any:
    """A tool with the description and the parameters that OpenAI assumes where they are left out."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    return tool | dict(
        function=dict(description="", parameters=dict(type="object", properties={})) | function
    )


class _GenerationTag(jinja2.ext.Extension):
    """Puts OPEN and CLOSE around the text that a {% generation %} block renders."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return OPEN + caller() + CLOSE


class _Namespace(jinja2.utils.Namespace):
    """jinja2's namespace, which refuses names with a leading underscore, as these could break the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *others = args
        fields = dict(*others, **kwargs)
        for name in fields:
            _allow(name)
        jinja2.utils.Namespace.__init__(self, fields)

    def __setitem__(self, name: str, value: Any) -> None:
        _allow(name)
        super().__setitem__(name, value)


def _allow(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.sandbox.SecurityError(f"namespace: {name!r} begins with an underscore")


def _environment(clock: Callable[[], datetime.datetime]) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    # jinja2's own filter escapes HTML
    def to_json(x: Any, ensure_ascii: bool = False, **layout: Any) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, **layout)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    given: dict[str, Any] = environment.globals
    given["raise_exception"] = refuse
    given["strftime_now"] = lambda form: clock().strftime(form)
    given["namespace"] = _Namespace
    return environment


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def load_template(
    tokenizer: Tokenizer, path: str | None = None, *, now: bool = False, flag: str = "--data.chat-template"
) -> ChatTemplate:
    """The template in the file `path`, else of the weights (`tokenizer.chat`), of the tokenizer, or built in.

    flag: the flag that names `path`, for messages.
    """
    special = special_tokens(tokenizer)
    if path is not None:
        if not Path(path).is_file():
            raise DataError(f"{flag}={path}: no such file; valid: a jinja file")
        return ChatTemplate(_text(Path(path).read_bytes(), path), path, special, now=now)
    if (chat := tokenizer.chat) is not None and chat.template is not None:
        return ChatTemplate(chat.template, chat.source, special, tools=chat.tools, now=now)
    if isinstance(tokenizer, JsonTokenizer):
        files = tokenizer.files
        if files.template is not None:
            source = "the tokenizer's chat_template.jinja"
            tools = _text(files.tools, TOOLS_FILE) if files.tools else None
            return ChatTemplate(_text(files.template, source), source, special, tools=tools, now=now)
        source = f"chat_template of {files.settings_name}"
        setting = _settings(tokenizer).get("chat_template")
        if isinstance(setting, str):
            return ChatTemplate(setting, source, special, now=now)
        if setting:
            return _named(setting, source, special, now)
    opening = "{{- bos_token -}}\n" if special["opens_with_bos"] else ""
    return ChatTemplate(opening + PLAIN, BUILT_IN, special, now=now)


def _text(raw: bytes, source: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: not UTF-8 at byte {error.start}") from error


def _named(templates: Any, source: str, special: dict[str, Any], now: bool) -> ChatTemplate:
    """A template from a list of named ones: "default", and "tool_use" for conversations with tools."""
    try:
        by_name = {entry["name"]: entry["template"] for entry in templates}
        return ChatTemplate(by_name["default"], source, special, tools=by_name.get("tool_use"), now=now)
    except (KeyError, TypeError) as error:
        raise DataError(
            f'{source}: must be text, or a list of {{"name", "template"}} with a "default"; '
            "name a template with --data.chat-template FILE"
        ) from error


def special_tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    """The special tokens' texts by the names that a template reads: eos_token, bos_token and other *_token.

    opens_with_bos: whether the tokenizer begins every text with bos_token, as some models require.
    """
    if tokenizer.chat is not None and tokenizer.chat.special:
        return dict(tokenizer.chat.special)
    if not isinstance(tokenizer, JsonTokenizer):
        eos = tokenizer.decode([tokenizer.eos])
        return dict(eos_token=eos, bos_token="", opens_with_bos=False)
    named = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in _settings(tokenizer).items()
        if name.endswith("_token")
    }
    texts = {name: value for name, value in named.items() if isinstance(value, str)}
    texts = dict(bos_token="") | texts | dict(eos_token=tokenizer.eos_text)
    opening = tokenizer.opening
    bos = texts["bos_token"]
    return texts | dict(opens_with_bos=bool(opening and bos != texts["eos_token"] and opening == bos))


def _settings(tokenizer: JsonTokenizer) -> dict[str, Any]:
    settings = tokenizer.files.settings
    return json.loads(settings) if settings else {}  # an object, as was checked when it was opened
