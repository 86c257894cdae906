"""Turns of templates that write them in odd ways, and rows in other collections' words."""

from __future__ import annotations

import json
import re

import pytest
from call_templates import byte_tokenizer
from chat_tokenizers import chat_tokenizer, shown

from tmoe.data.chat.conversations import Conversation, Plain, kind_of, parse_row
from tmoe.data.chat.encoding import Encoder, chat_prompt, encode, spoken, turn_ends
from tmoe.data.chat.template import load_template
from tmoe.data.tokenizer import DataError, JsonTokenizer

CALL = dict(id="abcdefgh1", type="function", function=dict(name="look", arguments=dict(city="Paris")))
CHAT = [
    dict(role="user", content="Weather?"),
    dict(role="assistant", content="", tool_calls=[CALL]),
    dict(role="tool", name="look", tool_call_id="abcdefgh1", content="wet"),
    dict(role="assistant", content="Rain."),
]


def trained(messages: list[dict], tokenizer: JsonTokenizer) -> list[str]:
    (sequences,) = encode([Conversation(messages)], tokenizer)
    return [span for one in sequences for span in re.findall("⟦(.*?)⟧", shown(one, tokenizer), re.S)]


# Command R7B's way: the header of the next turn is always written.
OPENS = """\
{%- for m in messages -%}
<|turn|><|{{ m.role }}|>
{%- if m.tool_calls %}<|action|>{{ m.tool_calls[0].id }}{{ m.tool_calls[0].function | tojson }}
{%- else %}{{ m.get('name', '') }}{{ m.get('tool_call_id', '') }}{{ m.content }}{% endif -%}
<|end|>
{%- endfor -%}
<|turn|><|assistant|>{% if not enable_thinking %}<|think|><|thought|>{% endif %}"""


def test_the_next_turn_is_no_part_of_a_turn():
    """A turn ends in the separator, not in the header of the next turn."""
    marks = ("<|end|>", "<|turn|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|action|>", "<|think|>")
    tokenizer = byte_tokenizer(OPENS, (*marks, "<|thought|>"))
    called = '<|action|>abcdefgh1{"name": "look", "arguments": {"city": "Paris"}}<|end|>'
    assert trained(CHAT, tokenizer) == [called, "Rain.<|end|>"]
    assert trained(CHAT[:2], tokenizer) == [called]
    assert turn_ends(tokenizer) == (tokenizer.eos,)


# The way of Hermes 2 and 3: a line break follows a result only in front of another message.
HERMES = """\
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{- '<|im_start|>tool\n<tool_response>\n' + m.name + m.tool_call_id + m.content -}}
{{- '\n</tool_response>' if loop.last else '\n</tool_response>\n' }}{{ '<|im_end|>' -}}
{%- elif m.tool_calls is defined -%}
{%- set call = m.tool_calls[0] -%}
{{- '<|im_start|>assistant\n<tool_call>\n' + call.id + (call.function | tojson) -}}
{{- '\n</tool_call><|im_end|>\n' -}}
{%- else -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{{- '<|im_start|>assistant\n' if add_generation_prompt else '' -}}"""


def test_other_blanks_before_a_turn():
    """The turn is learned behind the prompt that generation has, blank by blank."""
    tokenizer = byte_tokenizer(HERMES)
    called = '<tool_call>\nabcdefgh1{"name": "look", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
    assert trained(CHAT, tokenizer) == [called, "Rain.<|im_end|>"]
    (sequences,) = encode([Conversation(CHAT)], tokenizer)
    prompt = chat_prompt(CHAT[:3], tokenizer)
    assert sequences[-1].ids[: len(prompt)].tolist() == prompt.tolist()
    assert tokenizer.decode(prompt).endswith("wet\n</tool_response><|im_end|><|im_start|>assistant\n")


# Kimi-K2-Thinking's way: thoughts up to the last call alone; earlier ones and the last answer's are empty.
KIMI = """\
{%- set last = namespace(i=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and not m.tool_calls %}{% set last.i = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- for m in messages -%}
<|{{ m.role }}|>
{%- if m.role == 'assistant' %}<think>
{{- m.reasoning_content if loop.index0 > last.i else '' }}</think>{% endif -%}
{{- (m.get('tool_call_id') or '') + (m.content or '') -}}
{%- if m.tool_calls %}{{ m.tool_calls[0].id ~ (m.tool_calls[0].function | tojson) }}{% endif -%}
<|end|>
{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt else '' -}}"""


def test_an_empty_thought_of_the_last_answer_gets_the_rows_own():
    """A model thinks before each answer, also before the one whose thought the template leaves out."""
    tokenizer = byte_tokenizer(KIMI, ("<|end|>", "<|user|>", "<|assistant|>", "<|tool|>"))
    asked, called, told, said = CHAT
    told = {name: one for name, one in told.items() if name != "name"}
    chat = [asked, called | dict(reasoning_content="Look."), told, said | dict(reasoning_content="So wet.")]
    by_hand = '<think>Look.</think>abcdefgh1{"name": "look", "arguments": {"city": "Paris"}}<|end|>'
    assert trained(chat, tokenizer) == [by_hand, "<think>So wet.</think>Rain.<|end|>"]
    assert trained([asked, said], tokenizer) == ["<think></think>Rain.<|end|>"]
    within = dict(role="assistant", content="<think>\nSo wet.\n</think>\n\nRain.")
    assert trained([asked, within], tokenizer) == ["<think>So wet.</think>Rain.<|end|>"]


# Cohere's way: the generation prompt opens a thought by a special token, which a turn without one lacks.
COHERE = """\
{%- for m in messages -%}
<|{{ m.role }}|>
{%- if m.reasoning_content %}<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>{% endif -%}
{{- m.content }}<|end|>
{%- endfor -%}
{{- '<|assistant|><|START_THINKING|>' if add_generation_prompt else '' -}}"""


def test_a_thought_that_a_special_token_opens_is_closed():
    marks = ("<|end|>", "<|user|>", "<|assistant|>", "<|START_THINKING|>", "<|END_THINKING|>")
    tokenizer = byte_tokenizer(COHERE, marks)
    chat = [CHAT[0], CHAT[3], CHAT[0], CHAT[3] | dict(reasoning_content="Hm.")]
    assert trained(chat, tokenizer) == ["<|END_THINKING|>Rain.<|end|>", "Hm.<|END_THINKING|>Rain.<|end|>"]
    within = dict(role="assistant", content="<think>\nHm.\n</think>\n\nRain.")
    assert trained([CHAT[0], within], tokenizer) == ["Hm.<|END_THINKING|>Rain.<|end|>"]
    assert turn_ends(tokenizer) == (tokenizer.eos,)


# GLM-5.1's way: no end of a turn, and an earlier answer without the mark that opens its empty thought.
GLM = """\
{%- for m in messages -%}
<|{{ 'observation' if m.role == 'tool' else m.role }}|>
{%- if m.role == 'assistant' %}{{ '<think></think>' if loop.last else '</think>' }}{% endif -%}
{{- m.content -}}
{%- endfor -%}
{{- '<|assistant|><think>' if add_generation_prompt else '' -}}"""


def test_a_turn_without_an_end_ends_where_the_next_begins():
    tokenizer = byte_tokenizer(GLM, ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>"))
    chat = [CHAT[0], CHAT[3], CHAT[0], CHAT[3]]
    assert trained(chat, tokenizer) == ["</think>Rain.<|user|>"] * 2
    assert [tokenizer.decode([i]) for i in turn_ends(tokenizer)] == ["<|user|>"]


# The way of axolotl's Command A: the next turn's header always, and one more mark where it is asked for.
COMMAND = OPENS.replace("{% if not enable_thinking", "{% if add_generation_prompt").replace(
    "<|think|><|thought|>", "<|think|>"
)


def test_a_generation_prompt_has_more_than_the_header():
    marks = ("<|end|>", "<|turn|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|action|>", "<|think|>")
    template = COMMAND.replace("{{ m.content }}", "{{ '<|think|>' if m.role == 'assistant' }}{{ m.content }}")
    tokenizer = byte_tokenizer(template, marks)
    assert trained([CHAT[0], CHAT[3]] * 2, tokenizer) == ["Rain.<|end|>"] * 2
    assert turn_ends(tokenizer) == (tokenizer.eos,)


# LFM2.5's way: the end of a turn is written behind its content, and not where there is none.
ENDED = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.tool_calls is defined %}<call>{{ m.tool_calls[0].id }}{{ m.tool_calls[0].function | tojson }}</call>
{%- endif -%}
{%- if m.content is defined %}{{ m.content or '' }}{{ m.tool_call_id }}{{ m.name }}<|im_end|>{% endif %}
{%- endfor -%}
{{- '<|im_start|>assistant\n' if add_generation_prompt else '' -}}"""


def test_a_call_without_content_ends_as_an_answer_does():
    tokenizer = byte_tokenizer(ENDED)
    call = '<call>abcdefgh1{"name": "look", "arguments": {"city": "Paris"}}</call><|im_end|>'
    for content in ("", None, ...):
        row = dict(messages=[dict(one) for one in CHAT])
        row["messages"][1] = dict(role="assistant", tool_calls=[CALL]) | (
            {} if content is ... else dict(content=content)
        )
        (sample,) = parse_row(row, "row", "messages").samples
        assert trained(sample.messages, tokenizer) == [call, "Rain.<|im_end|>"]
    assert turn_ends(tokenizer) == (tokenizer.eos,)


def test_a_first_turn_of_the_assistant_is_answered_with_what_to_do():
    """A template that reads the first message shows no prompt in front of it."""
    template = (
        "{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>' if messages[0].role == 'system' }}"
    )
    plain = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    )
    tokenizer = byte_tokenizer(template + plain + "{{ '<|im_start|>assistant\n' if add_generation_prompt }}")
    chat = [dict(role="assistant", content="Hello."), CHAT[0], CHAT[3]]
    with pytest.raises(DataError, match=r'begins with the assistant; \{"weight": 0\} in this message'):
        trained(chat, tokenizer)
    assert trained([chat[0] | dict(weight=0), *chat[1:]], tokenizer) == ["Rain.<|im_end|>"]


PHI = """\
{%- for m in messages -%}
{{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' -}}
{%- endfor -%}
{{- '<|assistant|>\n' if add_generation_prompt else eos_token -}}"""


def test_the_end_of_an_earlier_turn_ends_answers():
    """Phi-3: generation meets <|end|> first, and <|endoftext|> only after it."""
    tokenizer = byte_tokenizer(PHI, ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>"))
    assert [tokenizer.decode([one]) for one in turn_ends(tokenizer)] == ["<|endoftext|>", "<|end|>"]


def test_a_header_that_takes_blanks_is_not_trained():
    """Special tokens of Phi-3 take the blanks behind them, and so those that an answer begins with."""
    plain = byte_tokenizer(PHI, ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>"))
    told = json.loads(plain.files.raw)
    for token in told["added_tokens"]:
        token["rstrip"] = True
    tokenizer = JsonTokenizer(plain.files._replace(raw=json.dumps(told).encode()))
    for text in ("Rain.", "\n Rain."):
        chat = [CHAT[0], dict(role="assistant", content=text)]
        assert trained(chat, tokenizer) == ["Rain.<|end|><|endoftext|>"]


def test_a_normalizer_makes_no_special_token():
    """Where special tokens are looked for in the normalized text, as tokenizers allows."""
    plain = byte_tokenizer(PHI, ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>"))
    told = json.loads(plain.files.raw) | dict(normalizer=dict(type="Lowercase"))
    chat = [CHAT[0], dict(role="assistant", content="Rain <|END|> x")]
    for normalized in (False, True):
        for token in told["added_tokens"]:
            token["normalized"] = normalized
        tokenizer = JsonTokenizer(plain.files._replace(raw=json.dumps(told).encode()))
        if not normalized:
            assert trained(chat, tokenizer) == ["rain <|end|> x<|end|>\n<|endoftext|>"]
            continue
        with pytest.raises(DataError, match=r"messages\[1\]: content holds '<\|end\|>', which"):
            trained(chat, tokenizer)


EMPTY = """\
{%- for m in messages -%}
{{- '<|' + m.role + '|>' + ('<think></think>' if m.role == 'assistant' else '') + m.content + eos_token -}}
{%- endfor -%}
{{- '<|assistant|><think>' + ('' if thinking else '</think>') if add_generation_prompt else '' -}}"""


def test_an_empty_thought_gets_the_rows_own():
    """DeepSeek-V3.1 as llama.cpp has it: each turn is shown with an empty thought."""
    tokenizer = byte_tokenizer(EMPTY, ("<|end|>", "<|user|>", "<|assistant|>"))
    said = dict(role="assistant", content="Rain.")
    assert trained([CHAT[0], said], tokenizer) == ["Rain.<|end|>"]
    thought = said | dict(reasoning_content="Hm.")
    assert trained([CHAT[0], thought], tokenizer) == ["Hm.</think>Rain.<|end|>"]


def test_what_the_next_prompt_has_of_an_answer():
    tokenizer = chat_tokenizer("gpt_oss")
    template = load_template(tokenizer)
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Rain."
    assert spoken(said, tokenizer, template) == spoken("Rain.", tokenizer, template) == "Rain."
    assert spoken("<|channel|>", tokenizer, template) == spoken("", tokenizer, template) == ""
    chat = [CHAT[0], dict(role="assistant", content="Rain."), CHAT[0]]
    assert "<|message|>Rain.<|end|>" in tokenizer.decode(chat_prompt(chat, tokenizer))


# ---- rows in other collections' words ----


def test_other_names_of_arguments_and_parameters():
    """Llama's `parameters` and Anthropic's `input` of a call, `input_schema` of a tool."""
    schema = dict(type="object", properties=dict(city=dict(type="string")))
    function = dict(name="look", description="Looks.")
    plain = dict(messages=[CHAT[0], CHAT[1], *CHAT[2:]], tools=[dict(type="function", function=function)])
    plain["tools"][0]["function"]["parameters"] = schema
    wanted = parse_row(plain, "row", "messages").samples
    for name in ("parameters", "input", "args"):
        bare = {"id": "abcdefgh1", "name": "look", name: dict(city="Paris")}
        row = dict(
            messages=[CHAT[0], CHAT[1] | dict(tool_calls=[bare]), *CHAT[2:]],
            tools=[dict(name="look", description="Looks.", input_schema=schema)],
        )
        assert parse_row(row, "row", "messages").samples == wanted


def said(*rows: dict) -> list:
    """The samples of each row."""
    return [parse_row(row, "row", kind_of(row)).samples for row in rows]


def test_words_of_other_collections():
    """Roles in capitals and OpenAssistant's, ShareGPT's fields by halves, calls as Toucan writes them."""
    plain = dict(messages=[CHAT[0], CHAT[3]])
    rows = [
        dict(messages=[dict(role=asked, content="Weather?"), dict(role=answers, content="Rain.")])
        for asked, answers in (("USER", "ASSISTANT"), ("Human", "GPT"), ("prompter", "assistant"))
    ]
    rows.append(dict(messages=[dict(role="user", value="Weather?"), {"from": "gpt", "content": "Rain."}]))
    assert said(*rows) == said(plain) * 4
    bare = dict(name="look", arguments=dict(city="Paris"))
    wanted = said(dict(messages=[CHAT[0], dict(role="assistant", tool_calls=[bare])]))
    encoded = bare | dict(arguments=json.dumps(json.dumps(bare["arguments"])))
    for form in (
        dict(role="tool_call", content=repr(bare | dict(arguments=json.dumps(bare["arguments"])))),
        dict(role="assistant", tool_calls=[encoded]),
    ):
        assert said(dict(messages=[CHAT[0], form])) == wanted
    with pytest.raises(DataError, match="a call must be JSON"):
        said(dict(messages=[CHAT[0], dict(role="tool_call", content="look(city='Paris')")]))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (dict(sky="grün", rain=True), '{"sky": "grün", "rain": true}'),
        ([dict(sky="blue"), 3], '[{"sky": "blue"}, 3]'),
        (21.5, "21.5"),
        ([dict(type="text", text="wet"), dict(type="text", text="!")], "wet!"),
    ],
)
def test_a_result_that_is_no_text_is_json(content, text: str):
    ((sample,),) = said(dict(messages=[*CHAT[:2], CHAT[2] | dict(content=content), CHAT[3]]))
    assert sample.messages[2]["content"] == text


def test_pairs_of_texts_have_a_prompt():
    """HH-RLHF's texts have a common beginning, which is the prompt; other texts have none."""
    talk = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Weather?\n\nAssistant:"
    row = dict(chosen=talk + " Rain.", rejected=talk + " Rainbows.\n\nHuman: No.\n\nAssistant: Oh.")
    assert said(row) == [
        (Plain(talk, " Rain."), Plain(talk, " Rainbows.\n\nHuman: No.\n\nAssistant: Oh.")),
    ]
    with pytest.raises(
        DataError, match=r"no prompt; its fields are: question, chosen, rejected; valid: .*prompt=COL"
    ):
        said(dict(question="Weather?", chosen="Rain.", rejected="Sun."))
    # one message in place of a list, as LLaMA-Factory has it
    pair = dict(prompt=[CHAT[0]], chosen=CHAT[3], rejected={"from": "gpt", "value": "Sun."})
    listed = dict(pair, chosen=[CHAT[3]], rejected=[dict(role="assistant", content="Sun.")])
    assert said(pair) == said(listed)


def test_tools_of_a_text_are_named():
    row = dict(prompt="Weather?", completion="Rain.", tools=[dict(name="look")], source="x")
    assert parse_row(row, "row", "prompt/completion").unread == ("source", "tools")


def test_what_a_template_does_not_read_of_its_own_arguments():
    """A row's chat_template_kwargs: the template reads one name and not the other."""
    tokenizer = byte_tokenizer(
        "{{ style }}{% for m in messages %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}"
        "{{ 'assistant' if add_generation_prompt }}"
    )
    row = dict(messages=[CHAT[0], CHAT[3]], chat_template_kwargs=dict(style="calm", enable_thinking=False))
    encoder = Encoder(tokenizer, load_template(tokenizer))
    encoder.encode(parse_row(row, "row", "messages").samples)
    assert encoder.left == [{"chat_template_kwargs: enable_thinking"}]


def test_texts_and_fields_that_hold_nothing_are_not_there():
    said = dict(role="assistant", content="Rain.")
    row = dict(messages=[CHAT[0], said | dict(tool_calls="")], tools="", prompt=None, id=7, score=None)
    parsed = parse_row(row, "row", "messages")
    assert parsed.samples == parse_row(dict(messages=[CHAT[0], said]), "row", "messages").samples
    assert parsed.unread == ("id",)
    assert kind_of(dict(messages=None, prompt="a", completion=None, response="b")) == "prompt/completion"
    thought = dict(role="assistant", content=None, reasoning_content="Hm.")
    (sample,) = parse_row(dict(messages=[CHAT[0], thought]), "row", "messages").samples
    assert sample.messages[1]["content"] == ""


@pytest.mark.parametrize(
    "row, match",
    [
        (
            dict(prompt=None, completion="Rain."),
            "row: prompt: must be text .*; here is null",
        ),
        (dict(messages=CHAT, kto_tag=False), "row: kto_tag=False: a bad answer"),
        (dict(messages=CHAT, label=0), "row: label=0: a row is trained as it is"),
        (dict(messages=CHAT, tools=[None]), r"row: tools\[0\]: must be .* here is nothing"),
        (
            dict(
                messages=[
                    CHAT[0],
                    dict(role="assistant", tool_calls=[dict(name="f", arguments='{"a": NaN}')]),
                ]
            ),
            r"tool_calls\[0\]: arguments: text that is no JSON object: NaN is no number of JSON",
        ),
    ],
)
def test_rows_that_are_refused(row: dict, match: str):
    with pytest.raises(DataError, match=match):
        parse_row(row, "row", kind_of(row))


def test_a_prompt_that_answers_repeat_is_there_once():
    """Whole conversations next to a prompt: its system message stays, another question is refused."""
    be, ask = dict(role="system", content="Be."), dict(role="user", content="Weather?")
    good, bad = (dict(role="assistant", content=text) for text in ("Rain.", "Sun."))

    def talks(**row) -> list[list[dict]]:
        return [one.messages for one in parse_row(row, "row", kind_of(row)).samples]

    whole = dict(chosen=[ask, good], rejected=[ask, bad])
    both = [[be, ask, good], [be, ask, bad]]
    assert talks(prompt="Weather? ", **whole) == [[ask, good], [ask, bad]]
    assert talks(prompt=[be, ask], **whole) == talks(prompt=[be], **whole) == both
    assert talks(prompt="Weather?", system="Be.", **whole) == both
    assert talks(prompt="Weather?", chosen=[be, ask, good], rejected=[be, ask, bad]) == both
    assert talks(prompt=[be, ask], completion=[ask, good]) == [[be, ask, good]]
    assert talks(prompt="Weather?", chosen=[ask, good], rejected=[bad]) == [[ask, good], [ask, bad]]
    in_text = dict(prompt=json.dumps([be, ask]), chosen=json.dumps([good]), rejected=json.dumps([bad]))
    assert talks(**in_text) == both
    with pytest.raises(DataError, match="row: prompt: is another question than the answer begins with"):
        talks(prompt="Time?", **whole)
