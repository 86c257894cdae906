"""A thought is written where the template reads it, whatever the row's form of it is."""

from __future__ import annotations

import pytest
from call_templates import byte_tokenizer
from chat_tokenizers import chat_tokenizer, shown

from tmoe.data.chat.conversations import kind_of, parse_row
from tmoe.data.chat.encoding import chat_prompt, encode
from tmoe.data.tokenizer import DataError

USER = dict(role="user", content="Weather?")
CALL = dict(id="abcdefgh1", type="function", function=dict(name="look", arguments={}))
# Magistral's and Ministral 3's way: a thought is a part of the content, and no field is read.
MAGISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {%- if m.content is string %}
            {{- m.content }}
        {%- else %}
            {%- for part in m.content or [] %}
                {{- '[THINK]' + part.thinking + '[/THINK]' if part.type == 'thinking' else part.text }}
            {%- endfor %}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
        {%- endfor %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}"""
# Granite's way: no thoughts.
WITHOUT = """\
{%- for m in messages %}{{ '[INST]' + m.content + '[/INST]' if m.role == 'user' else m.content + eos_token }}
{%- endfor %}"""
MARKS = ("</s>", "<s>", "[INST]", "[/INST]", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]")
MARKS += ("[TOOL_RESULTS]", "[/TOOL_RESULTS]")

FORMS = {
    "field": dict(content="Rain.", reasoning_content="Hm."),
    "parts": dict(content=[dict(type="thinking", thinking="Hm."), dict(type="text", text="Rain.")]),
    "within": dict(content="<think>\nHm.\n</think>\n\nRain."),
}


def text_of(tokenizer, *messages: dict) -> list[str]:
    """The texts of a row, with ⟦ ⟧ around their trained parts."""
    row = dict(messages=[USER, *messages])
    found = encode(parse_row(row, "row", kind_of(row)).samples, tokenizer)
    return [shown(sequence, tokenizer) for sequence in found[0]]


@pytest.mark.parametrize("form", FORMS)
def test_a_thought_is_where_the_template_reads_it(form: str):
    said = dict(role="assistant", **FORMS[form])
    tokenizer = byte_tokenizer(MAGISTRAL, MARKS, "<s>")
    assert text_of(tokenizer, said) == ["<s>[INST]Weather?[/INST]⟦[THINK]Hm.[/THINK]Rain.</s>⟧"]

    harmony = text_of(chat_tokenizer("gpt_oss"), said)[0].partition("<|start|>assistant")[2]
    final = "<|start|>assistant<|channel|>final<|message|>Rain.<|return|>⟧"
    assert harmony == f"⟦<|channel|>analysis<|message|>Hm.<|end|>{final}"


def test_thoughts_of_calls_of_earlier_turns_and_of_prompts():
    tokenizer = byte_tokenizer(MAGISTRAL, MARKS, "<s>")
    called = dict(role="assistant", content=None, reasoning_content="Look.", tool_calls=[CALL])
    result = dict(role="tool", tool_call_id="abcdefgh1", content="wet")
    answer = dict(role="assistant", **FORMS["field"])
    before = "<s>[INST]Weather?[/INST]⟦[THINK]Look.[/THINK][TOOL_CALLS]look[ARGS]{}</s>⟧[TOOL_RESULTS]wet"
    assert text_of(tokenizer, called, result, answer) == [
        before + "[/TOOL_RESULTS]⟦[THINK]Hm.[/THINK]Rain.</s>⟧"
    ]
    prompt = tokenizer.decode(chat_prompt([USER, answer, USER], tokenizer))
    assert prompt == "<s>[INST]Weather?[/INST][THINK]Hm.[/THINK]Rain.</s>[INST]Weather?[/INST]"


def test_what_is_no_thought_stays():
    """An empty thought is left out; a template without thoughts shows the text as it is."""
    empty = dict(role="assistant", content="<think>\n\n</think>\n\nRain.")
    tokenizer = byte_tokenizer(MAGISTRAL, MARKS, "<s>")
    assert text_of(tokenizer, empty) == ["<s>[INST]Weather?[/INST]⟦Rain.</s>⟧"]
    assert "final<|message|>Rain." in text_of(chat_tokenizer("gpt_oss"), empty)[0]
    plain = byte_tokenizer(WITHOUT, MARKS, "<s>")
    said = dict(role="assistant", **FORMS["within"])
    assert text_of(plain, said) == ["[INST]Weather?[/INST]⟦<think>\nHm.\n</think>\n\nRain.</s>⟧"]


def test_a_thought_after_a_text_is_refused():
    """Templates write it first, so the row's order would change."""
    parts = [dict(type="text", text="Rain."), dict(type="thinking", thinking="Hm.")]
    row = dict(messages=[USER, dict(role="assistant", content=parts)])
    with pytest.raises(DataError, match=r"messages\[1\]: content: a part of type thinking is after another"):
        parse_row(row, "row", kind_of(row))
    row["messages"][1]["content"] = [dict(type="text", text=""), parts[1], parts[0]]
    assert parse_row(row, "row", kind_of(row)).samples[0].messages[1]["reasoning_content"] == "Hm."
