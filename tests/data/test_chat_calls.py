"""All that a row holds is in the text that is trained, or is named: templates of models that call tools."""

from __future__ import annotations

import copy
import json
import re
from itertools import compress

import numpy as np
import pytest
from call_templates import SPECIAL, byte_tokenizer, call_tokenizer
from chat_tokenizers import shown
from hypothesis import given, settings
from hypothesis import strategies as st

from tmoe.data.chat.conversations import Conversation, kind_of, parse_row
from tmoe.data.chat.encoding import Encoder, chat_prompt, encode, turn_ends
from tmoe.data.chat.held import walk
from tmoe.data.chat.template import load_template
from tmoe.data.tokenizer import DataError, JsonTokenizer

TOOL = dict(
    type="function",
    function=dict(
        name="look",
        description="Looks up a town.",
        parameters=dict(type="object", properties=dict(city=dict(type="string", description="its name"))),
    ),
)


def call(arguments, number: int = 1, name: str = "look") -> dict:
    return dict(id=f"abcdefgh{number}", type="function", function=dict(name=name, arguments=arguments))


def user(text: str) -> dict:
    return dict(role="user", content=text)


def answer(text: str | None, **more) -> dict:
    return dict(role="assistant", content=text, **more)


def result(text: str, number: int = 1) -> dict:
    return dict(role="tool", name="look", tool_call_id=f"abcdefgh{number}", content=text)


def asked(*messages: dict, **more) -> dict:
    return dict(messages=[user("Weather?"), *messages], **more)


def look(row: dict, tokenizer: JsonTokenizer) -> tuple[list[str], list[str]]:
    """The trained text of a row, turn by turn, and the fields that the template leaves out. DataError."""
    samples = parse_row(row, "row", kind_of(row)).samples
    encoder = Encoder(tokenizer, load_template(tokenizer))
    spans = []
    for found in encoder.encode(samples):
        if isinstance(found, DataError):
            raise found
        spans += [span for one in found for span in re.findall("⟦(.*?)⟧", shown(one, tokenizer), re.S)]
    return spans, sorted(encoder.left[0])


def trained(row: dict, name: str) -> list[str]:
    return look(row, call_tokenizer(name))[0]


# ---- every form of a call ----

CITY = {"city": "Paris"}
CALLED = {
    "qwen2_5": '<tool_call>\n{"name": "look", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>',
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>',
    "llama3_1": '{"name": "look", "parameters": {"city": "Paris"}}<|eot_id|>',
    "glm4_5": "\n<think></think>\n<tool_call>look\n<arg_key>city</arg_key>\n"
    "<arg_value>Paris</arg_value>\n</tool_call><|observation|>",
    "deepseek_r1": "\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n"
    '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
    "deepseek_v3_1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>"
    '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
    "mistral_v7": '[TOOL_CALLS][{"name": "look", "arguments": {"city": "Paris"}, "id": "abcdefgh1"}]</s>',
    "minimax_m2": '\n</think>\n\n<minimax:tool_call>\n<invoke name="look">\n'
    '<parameter name="city">Paris</parameter>\n</invoke>\n</minimax:tool_call>[e~[',
    "gemma4": '<|tool_call>call:look{city:<|"|>Paris<|"|>}<tool_call|><|tool_response>',
}


def forms() -> dict[str, dict]:
    """One call as rows hold it."""
    plain = asked(answer("", tool_calls=[call(CITY)]), tools=[TOOL])
    text = call('{"city":"Paris"}')
    absent = {name: one for name, one in plain["messages"][1].items() if name != "content"}
    union = call(CITY | dict(days=None, deep=None))
    bare = dict(id="abcdefgh1", name="look", arguments=CITY)
    parts = dict(plain["messages"][1], content=[dict(type="text", text="")])
    return {
        "object": plain,
        "text": asked(answer("", tool_calls=[text]), tools=[TOOL]),
        "null content": asked(answer(None, tool_calls=[call(CITY)]), tools=[TOOL]),
        "no content": asked(absent, tools=[TOOL]),
        "parts": asked(parts, tools=[TOOL]),
        "Arrow's nulls": asked(
            answer("", tool_calls=[union], name=None, reasoning_content=None),
            tools=[copy.deepcopy(TOOL) | dict(strict=None)],
        ),
        "bare call, bare tool": asked(answer("", tool_calls=[bare]), tools=[TOOL["function"]]),
        "JSON in texts": dict(
            messages=json.dumps([user("Weather?"), answer(None, tool_calls=[text])]), tools=json.dumps([TOOL])
        ),
        "tools one by one": asked(answer("", tool_calls=[text]), tools=[json.dumps(TOOL)]),
        "function_call": dict(
            messages=[user("Weather?"), answer(None, function_call=bare)], functions=[TOOL["function"]]
        ),
        "ShareGPT": dict(
            conversations=[
                {"from": "human", "value": "Weather?"},
                {"from": "function_call", "value": json.dumps(bare)},
            ],
            tools=json.dumps([TOOL]),
        ),
        "prompt and completion": dict(
            prompt=[user("Weather?")], completion=[answer(None, tool_calls=[text])], tools=[TOOL]
        ),
    }


@pytest.mark.parametrize("name", CALLED)
def test_a_call_is_trained_in_one_form(name: str):
    """Written by hand from each model's documentation, whatever form the row has."""
    tokenizer = call_tokenizer(name)
    texts = set()
    for form, row in forms().items():
        spans, _ = look(row, tokenizer)
        assert spans == [CALLED[name]], form
        ((sequence,),) = Encoder(tokenizer, load_template(tokenizer)).encode(
            parse_row(row, "row", kind_of(row)).samples
        )
        texts.add(tokenizer.decode(sequence.ids))
    assert len(texts) == 1, texts


def test_arguments_that_are_no_object():
    for arguments, match in (
        ("{", r"tool_calls\[0\]: arguments: text that is no JSON object"),
        ('{"a": 1, "a": 2}', "a key twice"),
        ("[1]", "arguments: list; must be an object"),
        (3, "arguments: int; must be an object"),
    ):
        with pytest.raises(DataError, match=match):
            parse_row(asked(answer("", tool_calls=[call(arguments)])), "row", "messages")
    for nothing in (None, "", {}, "{}"):
        assert trained(asked(answer("", tool_calls=[call(nothing)])), "llama3_1") == [
            '{"name": "look", "parameters": {}}<|eot_id|>'
        ]
    # A null within JSON text is no null of Arrow's.
    row = asked(answer("", tool_calls=[call('{"city": null}')]))
    assert trained(row, "llama3_1") == ['{"name": "look", "parameters": {"city": null}}<|eot_id|>']
    counted = parse_row(asked(answer("", tool_calls=[call({"city": None})]), tools=[TOOL]), "row", "messages")
    assert (
        counted.nulls == 1 and counted.samples[0].messages[1]["tool_calls"][0]["function"]["arguments"] == {}
    )


def test_kimis_ids_count_through_the_conversation():
    row = asked(
        answer("", tool_calls=[call(CITY), call({"city": "Rome"}, 2)]),
        result("wet", 1),
        result("dry", 2),
        answer("", tool_calls=[call({"city": "Oslo"}, 3)]),
        result("icy", 3),
        answer("So."),
    )
    tokenizer = call_tokenizer("kimi_k2")
    ((sequence,),) = encode(parse_row(row, "row", "messages").samples, tokenizer)
    text = tokenizer.decode(sequence.ids)
    assert re.findall(r"functions\.look:\d", text) == [f"functions.look:{n}" for n in (0, 1, 0, 1, 2, 2)]
    assert "## Return of functions.look:1\ndry" in text


def test_ids_that_a_template_refuses():
    """Mistral wants nine letters and digits; a result has its call's. A name within an id is no name."""
    row = asked(
        answer("", tool_calls=[call(CITY) | dict(id="call_b"), call(CITY) | dict(id="abcdefgh2")]),
        result("dry", 2),
        result("wet") | dict(tool_call_id="call_b"),
        answer("So."),
    )
    tokenizer = call_tokenizer("mistral_v7")
    samples = parse_row(row, "row", "messages").samples
    text = tokenizer.decode(encode(samples, tokenizer)[0][0].ids)
    ids = ["000000000", "abcdefgh2", "abcdefgh2", "000000000"]
    assert re.findall(r'"(?:call_)?id": "(\w+)"', text) == ids
    absent = {name: one for name, one in result("wet").items() if name != "tool_call_id"}
    bare = dict(name="look", arguments=CITY)
    samples = parse_row(asked(answer("", tool_calls=[bare]), absent, answer("a")), "row", "messages").samples
    assert '"call_id": "000000000"' in tokenizer.decode(encode(samples, tokenizer)[0][0].ids)
    row = asked(answer("", tool_calls=[call(CITY, name="f")]))
    assert "functions.f:0" in trained(row, "kimi_k2")[0]


# ---- thoughts ----


def test_an_opened_thought_begins_the_turn():
    """DeepSeek-R1's prompt ends in <think> and a line break; an answer closes the thought first."""
    rows = [
        (asked(answer("Sun.", reasoning_content="Hm.")), "Hm.\n</think>\n\nSun.<｜end▁of▁sentence｜>"),
        (asked(answer("<think>\nHm.\n</think>\n\nSun.")), "Hm.\n</think>\n\nSun.<｜end▁of▁sentence｜>"),
        (asked(answer("Sun.")), "\n</think>\n\nSun.<｜end▁of▁sentence｜>"),
    ]
    tokenizer = call_tokenizer("deepseek_r1")
    for row, wanted in rows:
        assert look(row, tokenizer) == ([wanted], [])
        ((sequence,),) = encode(parse_row(row, "row", "messages").samples, tokenizer)
        prompt = chat_prompt([user("Weather?")], tokenizer)
        assert sequence.ids[: len(prompt)].tolist() == prompt.tolist()
        assert sequence.trained.tolist() == [False] * len(prompt) + [True] * (len(sequence.ids) - len(prompt))
    # Earlier turns are shown without their thoughts, and each is learned after its prompt.
    row = asked(
        answer("Sun.", reasoning_content="Hm."), user("And?"), answer("Rain.", reasoning_content="So.")
    )
    assert trained(row, "deepseek_r1") == [
        "Hm.\n</think>\n\nSun.<｜end▁of▁sentence｜>",
        "So.\n</think>\n\nRain.<｜end▁of▁sentence｜>",
    ]
    with_thought = asked(answer("Sun.", reasoning_content="Hm."))
    assert trained(with_thought, "deepseek_v3_1") == ["Hm.</think>Sun.<｜end▁of▁sentence｜>"]
    assert trained(asked(answer("Sun.")), "deepseek_v3_1") == ["Sun.<｜end▁of▁sentence｜>"]
    assert trained(with_thought, "minimax_m2") == ["Hm.\n</think>\n\nSun.[e~["]
    assert trained(asked(answer("Sun.")), "minimax_m2") == ["\n</think>\n\nSun.[e~["]
    assert trained(with_thought, "glm4_5") == ["\n<think>Hm.</think>\nSun.<|user|>"]


def test_ends():
    found = {
        name: [call_tokenizer(name).decode([i]) for i in turn_ends(call_tokenizer(name))] for name in SPECIAL
    }
    assert found.pop("glm4_5") == ["<|user|>", "<|observation|>"]
    assert found.pop("gemma4") == ["<turn|>", "<|tool_response>"]
    assert found == {name: [SPECIAL[name][0]] for name in found}


# ---- what a template leaves out ----

ABOUT = ["tools", "tools: description", "tools: parameters"]


@pytest.mark.parametrize(
    "name, row, left",
    [
        ("qwen2_5", asked(answer("Sun.", reasoning_content="Hm.")), ["reasoning_content"]),
        ("qwen2_5", asked(answer("a", reasoning_content="assistant")), ["reasoning_content"]),
        ("qwen2_5", asked(answer("Sun.", reasoning_content="Hm.", weight=0), answer("b")), []),
        ("llama3_1", asked(answer("First I look.", tool_calls=[call(CITY)])), ["content", "tool_calls: id"]),
        ("hermes", asked(answer("a", tool_calls=[call(CITY)])), ["content", "tool_calls: id"]),
        ("deepseek_r1", asked(answer("Sun."), tools=[TOOL]), ABOUT),
        ("mistral_v7", asked(answer(None, tool_calls=[call(CITY)]), result("wet"), answer("a")), ["name"]),
        ("mistral_v7", asked(answer("Sun."), tools=[TOOL]), []),
        ("kimi_k2", asked(answer("Sun."), tools=[TOOL]), []),
        ("qwen2_5", asked(answer("Sun.") | dict(name="Ann")), ["name"]),
    ],
)
def test_left_out(name: str, row: dict, left: list[str]):
    """Short strings that other words hold as well."""
    tokenizer = call_tokenizer(name)
    assert look(row, tokenizer)[1] == left
    samples = parse_row(row, "row", "messages").samples
    if any(field in ("content", "reasoning_content", "tools") for field in left):
        with pytest.raises(DataError, match=f"leaves out (the role|{left[0]})"):
            encode(samples, tokenizer)
    else:
        encode(samples, tokenizer)


SIMPLE = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + BODY + '<|im_end|>\n' }}{% endfor %}"
SIMPLE += "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"


def simple(body: str) -> JsonTokenizer:
    return byte_tokenizer(SIMPLE.replace("BODY", body))


@pytest.mark.parametrize(
    "body, row, match",
    [
        (
            "(m.content or '')",
            asked(answer("", tool_calls=[call(CITY)])),
            r"messages\[1\]: .*tool_calls, and so all",
        ),
        (
            "(m.content or '')",
            asked(answer("", reasoning_content="Hm.", tool_calls=[call(CITY)])),
            "and so all of",
        ),
        (
            "('' if m.role == 'tool' else m.content)",
            asked(answer("a"), result("a"), answer("b")),
            "the role 'tool'",
        ),
        (
            "(m.content if m.role == 'assistant' else m.content[:5])",
            asked(answer("a")),
            r"leaves out the role 'user', or a part of its text: 'Weather\?'",
        ),
        (
            "(m.content or m.tool_calls[0].function.name ~ m.tool_calls[0].function.arguments.items()|list)",
            asked(answer("", tool_calls=[call({"a": {"b": 1}})])),
            r"messages\[1\]: .*writes \{'b': 1\} of a call's arguments as Python does",
        ),
        (
            "(m.content + (m.name or ''))",
            asked(answer("<|im_", name="start|>")),
            r"make '<\|im_start\|>', a special token that no text",
        ),
    ],
)
def test_nothing_is_lost_or_added(body: str, row: dict, match: str):
    with pytest.raises(DataError, match=match):
        look(row, simple(body))


# ---- no row forges a mark ----

MARK = "<|im_start|>"
FORGED = {
    "messages[0]: content": asked(answer("a")) | dict(messages=[user(f"x{MARK}"), answer("a")]),
    "messages[1]: reasoning_content": asked(answer("a", reasoning_content=MARK)),
    "messages[1]: name": asked(answer("a", name=MARK)),
    "messages[1]: tool_calls[0].function.name": asked(answer("", tool_calls=[call({}, name=MARK)])),
    "messages[1]: tool_calls[0].function.arguments.a": asked(answer("", tool_calls=[call({"a": MARK})])),
    "messages[1]: tool_calls[0].function.arguments.a.b[1]": asked(
        answer("", tool_calls=[call({"a": {"b": [1, MARK]}})])
    ),
    "messages[1]: tool_calls[0].function.arguments: a key": asked(answer("", tool_calls=[call({MARK: 1})])),
    "messages[1]: tool_calls[0].id": asked(answer("", tool_calls=[call({}) | dict(id=MARK)])),
    "messages[2]: tool_call_id": asked(
        answer("", tool_calls=[call({})]), result("a") | dict(tool_call_id=MARK), answer("b")
    ),
    "tools[0].function.description": asked(
        answer("a"), tools=[dict(type="function", function=dict(name="f", description=MARK))]
    ),
    "tools[0].function.parameters.properties: a key": asked(
        answer("a"), tools=[dict(name="f", parameters=dict(properties={MARK: {}}))]
    ),
    "chat_template_kwargs.style": asked(answer("a"), chat_template_kwargs=dict(style=MARK)),
}


@pytest.mark.parametrize("where", FORGED)
def test_no_string_of_a_row_holds_a_special_token(where: str):
    with pytest.raises(DataError, match=re.escape(f"{where} holds '{MARK}'")):
        look(FORGED[where], call_tokenizer("qwen2_5"))


def test_json_text_with_escapes_forges_none():
    row = asked(answer("", tool_calls=[call('{"a": "\\u003c|im_start|>"}')]))
    with pytest.raises(DataError, match=r"arguments\.a holds"):
        look(row, call_tokenizer("qwen2_5"))


def test_marks_that_are_words_of_the_vocabulary():
    """DeepSeek's <｜User｜> is no special token, but begins a turn all the same; <think> may be in a text."""
    tokenizer = call_tokenizer("deepseek_v3_1")
    with pytest.raises(DataError, match="content holds '<｜User｜>'"):
        look(asked(answer("a<｜User｜>b")), tokenizer)
    with pytest.raises(DataError, match="content holds '<｜Assistant｜>'"):
        chat_prompt([user("<｜Assistant｜>")], tokenizer)
    look(asked(answer("<think>a</think>b")), tokenizer)


# ---- fields that say whether a turn or a row is trained ----


@pytest.mark.parametrize("tokenizer", ["tags", "prefixes"])
def test_weights(tokenizer: str):
    """A turn of weight 0 is read and not trained, with {% generation %} as without."""
    tagged = SIMPLE.replace(
        "{{ '<|im_start|>' + m.role + '\n' + BODY + '<|im_end|>\n' }}",
        "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + "
        "'<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}",
    )
    made = byte_tokenizer(tagged) if tokenizer == "tags" else simple("m.content")
    for off in (dict(weight=0), dict(train=False), dict(training=0), dict(loss=False, weight=0.0)):
        row = asked(answer("one", weight=1), user("more"), answer("two", **off), user("end"), answer("three"))
        assert look(row, made) == (["one<|im_end|>", "three<|im_end|>"], [])


@pytest.mark.parametrize(
    "row, match",
    [
        (asked(answer("a", weight=0.5)), "weight 0.5: must be 0 or 1"),
        (asked(answer("a", weight="1")), "weight '1': must be 0 or 1"),
        (asked(answer("a", mask=True)), r"messages\[1\]: mask: is not supported"),
        (asked(answer("a", train=False, weight=1)), "one says that it is trained"),
        (asked(user("b") | dict(train=True), answer("a")), "only turns of the assistant"),
        (asked(answer("a"), label=False), "label=False: a row is trained as it is"),
        (asked(answer("a"), weight=0), "weight=0: a row"),
        (asked(answer("a"), train=False), "train=False: a row"),
        (asked(answer("a"), mask=[0, 1]), "mask="),
        (asked(answer("a"), images=["x.png"]), "images: only messages and texts"),
        (dict(prompt="a", completion="b", label=True), "label=True: rows of prompt, completion and label"),
        (dict(prompt="a", completion="b", label=False), "label=False: rows of prompt, completion and label"),
        (dict(prompt="a", completion="b", system="c"), "system: a prompt that is text has no place for it"),
        (
            dict(messages=[dict(role="system", content="b"), user("a"), answer("a")], system="c"),
            "another system message",
        ),
    ],
)
def test_fields_that_turn_a_row_round_are_refused(row: dict, match: str):
    with pytest.raises(DataError, match=f"^row: .*{match}"):
        parse_row(row, "row", kind_of(row))


def test_rows_of_others():
    """ToolACE's system, ShareGPT's results, thoughts as parts, classes that are no labels of good and bad."""
    row = dict(
        system="Be brief.",
        label="weather",
        conversations=[
            {"from": "user", "value": "Weather?"},
            {"from": "function_call", "value": json.dumps([dict(name="look", arguments=json.dumps(CITY))])},
            {"from": "observation", "value": "wet"},
            {"from": "gpt", "value": "Rain.", "weight": None},
        ],
    )
    tokenizer = call_tokenizer("qwen2_5")
    ((sequence,),) = encode(parse_row(row, "row", "conversations").samples, tokenizer)
    text = tokenizer.decode(sequence.ids)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>")
    assert "<|im_start|>user\n<tool_response>\nwet\n</tool_response><|im_end|>" in text
    assert trained(row, "qwen2_5") == [CALLED["qwen2_5"], "Rain.<|im_end|>"]
    with pytest.raises(DataError, match="a call must be JSON"):
        parse_row(dict(conversations=[{"from": "function_call", "value": "look()"}]), "row", "conversations")
    parts = [dict(type="thinking", thinking="Hm."), dict(type="text", text="Sun.")]
    assert trained(asked(answer(parts)), "glm4_5") == ["\n<think>Hm.</think>\nSun.<|user|>"]


def test_bos_and_eos_that_texts_hold_already_come_once():
    tokenizer = call_tokenizer("mistral_v7")
    with_bos = json.loads(tokenizer.files.raw)
    with_bos["post_processor"] = dict(
        type="TemplateProcessing",
        single=[dict(SpecialToken=dict(id="<s>", type_id=0)), dict(Sequence=dict(id="A", type_id=0))],
        pair=[dict(Sequence=dict(id="A", type_id=0)), dict(Sequence=dict(id="B", type_id=1))],
        special_tokens={"<s>": dict(id="<s>", ids=[1], tokens=["<s>"])},
    )
    tokenizer = JsonTokenizer(tokenizer.files._replace(raw=json.dumps(with_bos).encode()))
    assert tokenizer.opening == "<s>"
    wanted = "<s>[INST]a[/INST]⟦b</s>⟧"
    for prompt, completion in (
        ("[INST]a[/INST]", "b"),
        ("<s>[INST]a[/INST]", "b</s>"),
        ("<s>[INST]a[/INST]", "b</s>\n"),
    ):
        samples = parse_row(dict(prompt=prompt, completion=completion), "row", "prompt/completion").samples
        ((sequence,),) = encode(samples, tokenizer)
        assert shown(sequence, tokenizer) == wanted
    assert shown(encode([Conversation([user("a"), answer("b")])], tokenizer)[0][0], tokenizer) == wanted


# ---- a walk over templates and rows ----

words = st.text("ab {}\"'\\\n<>é", min_size=1, max_size=6).filter(lambda text: text.strip())
values = st.recursive(
    words | st.integers(-9, 9) | st.booleans(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=3,
)
arguments = st.dictionaries(words, values, max_size=2)


@st.composite
def rows(draw) -> dict:
    """Questions, calls with results, and answers, with thoughts and tools or without."""
    messages = [dict(role="system", content=draw(words))] if draw(st.booleans()) else []
    number = 0
    for _ in range(draw(st.integers(1, 2))):
        messages.append(user(draw(words)))
        thought = st.none() | words
        for _ in range(draw(st.integers(0, 2))):
            number += 1
            content, thoughts = draw(st.just("") | words), draw(thought)
            called = answer(content, tool_calls=[call(draw(arguments), number)])
            messages += [
                called | (dict(reasoning_content=thoughts) if thoughts else {}),
                result(draw(words), number),
            ]
        thoughts = draw(thought)
        messages.append(answer(draw(words)) | (dict(reasoning_content=thoughts) if thoughts else {}))
    return dict(messages=messages) | (dict(tools=[TOOL]) if draw(st.booleans()) else {})


def as_text(row: dict) -> dict:
    """The row as OpenAI has it, with nulls as Arrow adds them."""
    row = copy.deepcopy(row)
    for message in row["messages"]:
        for one in message.get("tool_calls") or []:
            one["function"]["arguments"] = json.dumps(one["function"]["arguments"])
        if message.get("tool_calls"):
            message["content"] = message["content"] or None
        message |= dict(weight=None, refusal=None)
    return row


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(SPECIAL)), rows())
def test_a_walk_over_templates_and_rows(name: str, row: dict):
    """A row is refused, or each turn's words are in what is trained, and both forms of it train the same."""
    tokenizer = call_tokenizer(name)
    encoder = Encoder(tokenizer, load_template(tokenizer))
    found = [encoder.encode(parse_row(one, "row", "messages").samples)[0] for one in (row, as_text(row))]
    if isinstance(found[0], DataError):
        assert str(found[0]) == str(found[1]) and name not in (
            "qwen2_5",
            "glm4_5",
            "minimax_m2",
            "gemma4",
        ), found
        return
    assert not isinstance(found[1], DataError)
    assert [one.ids.tolist() for one in found[0]] == [one.ids.tolist() for one in found[1]]
    assert [one.trained.tolist() for one in found[0]] == [one.trained.tolist() for one in found[1]]
    texts = [tokenizer.decode(one.ids) for one in found[0]]
    parts = [tokenizer.decode(one.ids[one.trained]) for one in found[0]]
    assert not any("None" in text or "undefined" in text for text in texts)
    told = "".join("".join(parts).split())
    for item in walk(row["messages"], None)[2]:
        if item.field in encoder.left[0] or not item.content or name == "kimi_k2":
            continue
        mine = row["messages"][item.message]["role"] == "assistant"
        where = told if mine else "".join("".join(texts).split())
        forms = (item.text, json.dumps(item.text, ensure_ascii=False)[1:-1])
        assert any("".join(form.strip().split()) in where for form in forms), item
    for one in found[0]:  # each trained token is predicted from the one before
        ends = np.flatnonzero(np.diff(np.append(one.trained, False).astype(int)) == -1)
        assert all(tokenizer.decode([one.ids[end]]) in SPECIAL[name] for end in ends)
        assert list(compress(one.ids.tolist(), one.trained))
