"""Thoughts and tool calls in the text of an answer, whole and cut at every place.

next: tests/serve/test_server.py
"""

import json

import pytest
from call_templates import byte_tokenizer, call_tokenizer
from chat_tokenizers import TEMPLATES

from tmoe.data.chat.conversations import Conversation
from tmoe.data.chat.encoding import encode
from tmoe.serve.parse_calls import value_of
from tmoe.serve.parse_tools import Delta, format_of, has_thoughts, parser

WEATHER = '{"city": "Łódź"}'
CALL = ("weather", dict(city="Łódź"))
KINDS = dict(city="string", code="string", days="integer", more="object", cold="boolean")
PARAMETERS = dict(type="object", properties={name: dict(type=kind) for name, kind in KINDS.items()})
TOOLS = [dict(type="function", function=dict(name="weather", description="-", parameters=PARAMETERS))]
# Qwen3-Coder's, Qwen3.5's and Nemotron 3's form of calls
CODER = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' }}
{{- value | tojson if value is mapping else value | string }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>\\n' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"""
FILES = dict(hermes="calls/hermes", qwen="qwen3", llama3="calls/llama3_1", mistral="calls/mistral_v7")
FILES |= {"gpt-oss": "gpt_oss"}


def template(kind: str) -> str:
    return (TEMPLATES / f"{FILES[kind]}.jinja").read_text()


# kind, text of the answer, content, thought, calls
ROWS = [
    ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>', "", "", [CALL]),
    ("qwen", "<think>\nhm, 1 < 2\n</think>\n\nIt is <b>.", "It is <b>.", "hm, 1 < 2", []),
    (
        "qwen",
        f'<think>\nask\n</think>\n\nI ask.\n<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n'
        '</tool_call>\n<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>',
        "I ask.",
        "ask",
        [CALL, ("b", {})],
    ),
    ("qwen", "<tool_call>\nno JSON\n</tool_call>", "<tool_call>\nno JSON\n</tool_call>", "", []),
    # an end tag within a string does not end the call, and a broken string does not hide the next call
    (
        "qwen",
        '<tool_call>{"name": "write", "arguments": {"text": "\\"</tool_call>"}}</tool_call>ok',
        "ok",
        "",
        [("write", dict(text='"</tool_call>'))],
    ),
    (
        "qwen",
        '<tool_call>{"name: 1}</tool_call><tool_call>{"name": "b", "arguments": {}}</tool_call>!',
        '<tool_call>{"name: 1}</tool_call>!',
        "",
        [("b", {})],
    ),
    ("llama3", f'{{"name": "weather", "parameters": {WEATHER}}}', "", "", [CALL]),
    ("llama3", f'<|python_tag|>{{"name": "weather", "parameters": {WEATHER}}}', "", "", [CALL]),
    ("llama3", '{"a": 1} is JSON', '{"a": 1} is JSON', "", []),
    ("llama3", "Sunny {today}.", "Sunny {today}.", "", []),
    ("mistral", f'[TOOL_CALLS][{{"name": "weather", "arguments": {WEATHER}}}]', "", "", [CALL]),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{WEATHER}[TOOL_CALLS]b[ARGS]{{}}", "", "", [CALL, ("b", {})]),
    ("mistral", "a [TOOL_ b", "a [TOOL_ b", "", []),
    ("mistral", "a[TOOL_CALLS]oh", "a[TOOL_CALLS]oh", "", []),
    # odd forms of calls: blank arguments, a missing end tag, a mark within a string, half of a surrogate pair
    ("hermes", '<tool_call>{"name": "b", "arguments": null}</tool_call>', "", "", [("b", {})]),
    (
        "hermes",
        '<tool_call>{"name": "b", "arguments": {}}<tool_call>[{"name": "c"}, {"name": "d"}]</tool_call>',
        "",
        "",
        [("b", {}), ("c", {}), ("d", {})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "b", "arguments": {"a": "\\ud800 ł"}}</tool_call>',
        "",
        "",
        [("b", dict(a="\ud800 ł"))],
    ),
    ("llama3", 'Hm. <|python_tag|>{"name": "b"}; {"name": "c"}', "Hm.", "", [("b", {}), ("c", {})]),
    ("llama3", '<|python_tag|>f({"a": 1})', '<|python_tag|>f({"a": 1})', "", []),
    ("mistral", '[TOOL_CALLS]b[ARGS][TOOL_CALLS]c{"a": 1}', "", "", [("b", {}), ("c", dict(a=1))]),
    (
        "mistral",
        '[TOOL_CALLS]b[CALL_ID]x1[ARGS]{"a": "[TOOL_CALLS]c[ARGS]{}"}',
        "",
        "",
        [("b", dict(a="[TOOL_CALLS]c[ARGS]{}"))],
    ),
    ("gpt-oss", "<|channel|>commentary to=functions.b <|constrain|>json<|message|>", "", "", [("b", {})]),
    # arguments that no client could read stay text
    *(
        (kind, form.replace("*", bad), form.replace("*", bad), "", [])
        for bad in ("NaN", "1e999", "[" * 5000 + "]" * 5000)
        for kind, form in (
            ("hermes", '<tool_call>{"name": "b", "arguments": {"a": *}}</tool_call>'),
            ("mistral", '[TOOL_CALLS]b[ARGS]{"a": *}'),
            ("gpt-oss", '<|channel|>commentary to=functions.b<|message|>{"a": *}'),
        )
    ),
    ("hermes", *['<tool_call>{"name": "b", "arguments": "a"}</tool_call>'] * 2, "", []),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>ask<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{WEATHER}",
        "",
        "ask",
        [CALL],
    ),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Sunny.",
        "Sunny.",
        "hm",
        [],
    ),
]


def read(kind: str, pieces: list[str], tools: list | None = TOOLS, thinks: bool = False) -> Delta:
    found = parser(template(kind), tools, thinks)
    deltas = [*map(found.add, pieces), found.end()]
    calls = [call for delta in deltas for call in delta.calls]
    return Delta("".join(d.content for d in deltas), "".join(d.reasoning for d in deltas), calls)


@pytest.mark.parametrize(("kind", "text", "content", "thought", "calls"), ROWS)
def test_pieces_do_not_matter(kind, text, content, thought, calls):
    cuts = [[text], list(text), *([text[:i], text[i:]] for i in range(1, min(len(text), 300)))]
    for pieces in cuts:
        found = read(kind, pieces)
        assert (found.content.strip(), found.reasoning.strip()) == (content, thought), pieces
        assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls
        assert all(call.arguments.encode() for call in found.calls)


def test_formats_are_known_by_the_template():
    assert [format_of(template(kind)) for kind in FILES] == [
        "hermes",
        "hermes",
        "llama3",
        "mistral",
        "gpt-oss",
    ]
    assert [format_of((TEMPLATES / f"calls/{name}.jinja").read_text()) for name in SECTIONS] == [
        *SECTIONS.values()
    ]
    assert format_of(CODER) == "qwen3-coder"
    assert format_of((TEMPLATES / "calls/gemma4.jinja").read_text()) == ""
    nemotron = '{% if tools %}<|start_header_id|><TOOLCALL>[{"name": "a", "arguments": "b"}]</TOOLCALL>'
    assert format_of(nemotron) == ""
    assert has_thoughts(template("qwen")) and not has_thoughts(template("mistral"))


def test_without_tools_calls_stay_text():
    text = f'<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>'
    assert read("hermes", list(text), tools=None) == Delta(text)


def test_a_prompt_that_ends_in_a_thought():
    found = read("qwen", ["\nhm", "\n</thi", "nk>\n\nYes."], thinks=True)
    assert (found.reasoning, found.content) == ("hm", "Yes.")


@pytest.mark.parametrize(
    ("kind", "begin", "end", "call"),
    [
        ("llama3", "<think>", "</think>", f'{{"name": "weather", "parameters": {WEATHER}}}'),
        ("mistral", "[THINK]", "[/THINK]", f"[TOOL_CALLS]weather[ARGS]{WEATHER}"),
    ],
)
def test_thoughts_before_calls_of_other_formats(kind, begin, end, call):
    """DeepSeek's distilled Llama, and Magistral."""
    text = f"{begin}\nhm\n{end}\n\n{call}"
    both = template(kind) + begin + end
    for pieces in ([text], list(text)):
        found = parser(both, TOOLS, False)
        deltas = [*map(found.add, pieces), found.end()]
        assert "".join(d.reasoning for d in deltas) == "hm" and not "".join(d.content for d in deltas)
        calls = [call for delta in deltas for call in delta.calls]
        assert [(one.name, json.loads(one.arguments)) for one in calls] == [CALL]


# templates, and the format of their calls
SECTIONS = dict(
    glm4_5="glm", deepseek_r1="deepseek", deepseek_v3_1="deepseek", kimi_k2="kimi", minimax_m2="minimax"
)


def call(number: int, **arguments) -> dict:
    return dict(
        id=f"functions.weather:{number}", type="function", function=dict(name="weather", arguments=arguments)
    )


@pytest.mark.parametrize("name", [*SECTIONS, "coder"])
def test_calls_that_a_template_writes_are_read(name: str):
    """A call that a model is trained to write is read as the same call, in one piece and in characters."""
    tokenizer = byte_tokenizer(CODER) if name == "coder" else call_tokenizer(name)
    first = dict(city='Łódź "5</tool_call>\n<b>', code="20", days=3, more=dict(a=[1, "x"]), cold=True)
    made = [call(0, **first), call(1, city="Rome", unknown="Łódź")]
    asked = [dict(role="user", content="?"), dict(role="assistant", content="I ask.", tool_calls=made)]
    ((sequence,),) = encode([Conversation(asked)], tokenizer)
    text = tokenizer.decode(sequence.ids[sequence.trained][:-1])
    template = CODER if name == "coder" else (TEMPLATES / f"calls/{name}.jinja").read_text()
    for pieces in ([text], list(text)):
        found = parser(template, TOOLS, "</think>" in text and "<think>" not in text)
        deltas = [*map(found.add, pieces), found.end()]
        assert "".join(delta.content for delta in deltas).lstrip() == "I ask."
        read = [(one.name, json.loads(one.arguments)) for delta in deltas for one in delta.calls]
        assert read == [("weather", one["function"]["arguments"]) for one in made]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm4_5", "<tool_call>other</tool_call>"),
        ("glm4_5", "<tool_call>weather\n<arg_key>city</arg_key>\n</tool_call>"),
        ("glm4_5", "<tool_call>weather<arg_key>a</arg_key><arg_value>1</arg_value> and</tool_call>"),
        ("coder", "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</function>\n</tool_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.a:0<|tool_call_end|>"),
        ("deepseek_v3_1", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>b<｜tool▁call▁end｜>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="a"><parameter name="b">c</invoke>'),
    ],
)
def test_calls_that_cannot_be_read_stay_text(name: str, text: str):
    template = CODER if name == "coder" else (TEMPLATES / f"calls/{name}.jinja").read_text()
    for pieces in ([text], list(text)):
        found = parser(template, TOOLS, False)
        deltas = [*map(found.add, pieces), found.end()]
        assert not any(delta.calls for delta in deltas)
        assert "".join(delta.content for delta in deltas) == text


def test_values_without_a_schema_and_calls_without_arguments():
    values = {
        "1.5": 1.5,
        "null": None,
        '"a"': '"a"',
        "NaN": "NaN",
        "True": "True",
        " a\n": " a\n",
        "[1]": [1],
    }
    pairs = "".join(f"<arg_key>{i}</arg_key><arg_value>{text}</arg_value>" for i, text in enumerate(values))
    found = parser("<tool_call><arg_key>", TOOLS, False)
    delta = found.add(f"<tool_call>unknown{pairs}</tool_call><tool_call>weather\n</tool_call>")
    first, second = delta.calls
    assert json.loads(first.arguments) == {str(i): value for i, value in enumerate(values.values())}
    assert (second.name, second.arguments) == ("weather", "{}")


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("20", dict(type="string"), "20"),
        ("20", dict(type=["string", "null"]), "20"),
        ("null", dict(anyOf=[dict(type="string"), dict(type="null")]), None),
        ("20", dict(anyOf=[dict(type="integer"), dict(type="string")]), 20),
        ("2.0", dict(type="integer"), 2.0),
        ("2.5", dict(type="integer"), "2.5"),
        ("False", dict(type="boolean"), False),
        ("False", dict(type="string"), "False"),
        ('["a"]', dict(type="array"), ["a"]),
        ("three", dict(type="integer"), "three"),
        ("{}", dict(enum=["a"]), {}),
    ],
)
def test_a_value_has_a_type_of_its_schema(text: str, schema: dict, value):
    found = value_of(text, schema)
    assert (found, type(found)) == (value, type(value))
