"""Bodies of chats become requests; texts and bytes of tokens, also of parts of a character.

next: tmoe/serve/protocol.py, tmoe/serve/token_text.py
"""

import math

import numpy as np
import pytest
import tokenizers
import torch
from call_templates import call_tokenizer
from chat_tokenizers import chat_tokenizer
from gguf_words import sentencepiece_model

from tmoe.data.chat import encoding
from tmoe.data.chat.template import load_template
from tmoe.data.tokenizer import ByteTokenizer, JsonTokenizer, SentencePieceTokenizer, TokenizerFiles
from tmoe.serve.engine_process import rounded
from tmoe.serve.messages import Ready
from tmoe.serve.protocol import Protocol, Refused
from tmoe.serve.token_text import byte_alphabet, token_text

ASKED = dict(messages=[dict(role="user", content="hi")])


def protocol_of(tokenizer, **generation):
    ready = Ready(tokenizer, tokenizer.vocab, (tokenizer.eos,), (), generation, 4096, 64, ())
    return Protocol("m", ready, load_template(tokenizer, now=True))


def test_a_request_does_not_read_the_tokenizer_again(monkeypatch):
    protocol = protocol_of(call_tokenizer("hermes"))
    monkeypatch.setattr(JsonTokenizer, "marked", None)
    assert protocol.chat(ASKED).prompts == protocol.chat(ASKED).prompts


def test_defaults_are_the_folders():
    protocol = protocol_of(chat_tokenizer("qwen3"), do_sample=True, temperature=0.6, top_p=0.95)
    mine = protocol.chat(ASKED | dict(top_k=3)).sampling
    assert (mine.temperature, mine.top_p, mine.top_k) == (0.6, 0.95, 3)
    assert mine.max_tokens == 1024


def test_a_text_that_is_far_too_long_is_not_encoded(monkeypatch):
    """A token of blanks has eight characters here, so that a long text of blanks fits."""
    tokenizer = chat_tokenizer("qwen3", merges=20, text=" " * 400)
    protocol, read = protocol_of(tokenizer), []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text: read.append(len(text)) or encode(text))
    with pytest.raises(Refused, match="more than --max-len=4096") as refused:
        protocol.text(dict(prompt="ab" * 2**20))
    assert refused.value.code == "context_length_exceeded" and read == [16 * 4096]
    with pytest.raises(Refused, match=r"messages: more than --max-len=4096"):
        protocol.chat(dict(messages=[dict(role="user", content="ab" * 2**20)]))
    blanks = protocol.text(dict(prompt=" " * 70_000, max_tokens=1)).prompts[0]
    assert len(blanks) < 4096 and tokenizer.decode(blanks) == " " * 70_000


def test_answers_end_where_turns_end():
    """gpt-oss ends an answer with <|return|> and a call with <|call|>."""
    tokenizer = chat_tokenizer("gpt_oss")
    ids = {text: tokenizer.marked().token_to_id(text) for text in ("<|return|>", "<|call|>")}
    assert {*ids.values()} <= {*protocol_of(tokenizer).chat(ASKED).sampling.stop_ids}
    assert not protocol_of(tokenizer).text(dict(prompt="a")).sampling.stop_ids


def test_tools_that_the_template_does_not_show_are_refused():
    tool = dict(type="function", function=dict(name="weather", parameters={}))
    with pytest.raises(Refused, match=r"tools.*does not show them") as refused:
        protocol_of(chat_tokenizer("llama3")).chat(ASKED | dict(tools=[tool]))
    assert refused.value.param == "tools"
    assert protocol_of(call_tokenizer("hermes")).chat(ASKED | dict(tools=[tool])).tools == [tool]


@pytest.mark.parametrize("name", ["hermes", "qwen3", "llama3_1", "mistral_v7", "gpt_oss"])
def test_a_tool_needs_a_name_only(name):
    """gpt-oss's template refuses a tool without a description. Fields of null count as left out."""
    tokenizer = (chat_tokenizer if name in ("qwen3", "gpt_oss") else call_tokenizer)(name)
    protocol, alone = protocol_of(tokenizer), dict(name="ping")
    nulls = dict.fromkeys(("description", "parameters", "strict"))
    found = [
        protocol.chat(ASKED | dict(tools=[dict(type="function", function=function)]))
        for function in (alone, alone | nulls, alone | dict(strict=False))
    ]
    assert found[0].prompts == found[1].prompts == found[2].prompts
    assert found[0].tools == [dict(type="function", function=alone)] and not found[0].left_out
    assert "ping" in tokenizer.decode(found[0].prompts[0])


@pytest.mark.parametrize(
    ("tool", "wrong"),
    [
        (dict(type="custom", custom=dict(name="a")), r"tools\[0\]: must be"),
        (dict(type="function", function=dict(name=" ")), r"tools\[0\]\.function\.name: must be"),
        (dict(type="function", function=dict(name="a", description=5)), r"description: must be a text"),
        (dict(type="function", function=dict(name="a", parameters=[])), r"parameters: must be an object"),
        (dict(type="function", function=dict(name="a", strict=True)), r"strict: valid here: false"),
    ],
)
def test_a_faulty_tool_is_named(tool, wrong):
    with pytest.raises(Refused, match=wrong) as refused:
        protocol_of(call_tokenizer("hermes")).chat(ASKED | dict(tools=[tool]))
    assert refused.value.param == "tools"


def test_a_long_conversation_is_refused_in_time_that_grows_with_its_length(monkeypatch):
    """Searches for the strings of 4,000 messages pass over the text twice at most, not once for each."""
    searched = []

    class Text(str):
        def find(self, string, start, end):
            found = str.find(self, string, start, end)
            searched.append((min(end, len(self)) if found < 0 else found) - start)
            return found

    monkeypatch.setattr(encoding, "squeezed", lambda text: Text("".join(text.split())))
    roles = "user", "assistant"
    messages = [dict(role=roles[i % 2], content=f"{i} ") for i in range(4001)]
    with pytest.raises(Refused, match=r"messages: more than --max-len=4096"):
        protocol_of(call_tokenizer("hermes")).chat(dict(messages=messages))
    assert len(searched) >= 4001 and sum(searched) < 2 * 200_000
    searched.clear()  # the template leaves out the ids of calls: the whole text is searched for one of them
    calls = [
        dict(id=f"c{i:08}", type="function", function=dict(name="f", arguments=f'{{"a": "é{i}"}}'))
        for i in range(4000)
    ]
    asked = [*ASKED["messages"], dict(role="assistant", content=None, tool_calls=calls)]
    asked += [dict(role="tool", tool_call_id=call["id"], content=f"r{i}") for i, call in enumerate(calls)]
    with pytest.raises(Refused, match=r"messages: more than --max-len=4096"):
        protocol_of(call_tokenizer("hermes")).chat(dict(messages=asked))
    assert len(searched) >= 12_000 and sum(searched) < 20 * 400_000
    with pytest.raises(Refused, match="messages: 4097; at most 4096"):
        protocol_of(call_tokenizer("hermes")).chat(dict(messages=messages + messages[:96]))
    named = [ASKED["messages"][0] | {f"field{i}": "xq-z" for i in range(65)}]
    with pytest.raises(Refused, match="leaves out more than 64 fields"):
        protocol_of(call_tokenizer("hermes")).chat(dict(messages=named))


def test_bytes_of_the_tokens_of_a_text():
    """The bytes of all tokens are the text's, although some tokens are parts of a character."""
    text = "Łódź, 𝛼 naïve"
    for tokenizer in (chat_tokenizer("qwen3"), ByteTokenizer(), with_metaspace(), sentencepiece()):
        found = [token_text(tokenizer, int(i)) for i in tokenizer.encode(text)]
        assert b"".join(raw for _, raw in found).strip() == text.encode()
        assert all("\ufffd" in shown or shown.encode() == raw for shown, raw in found)
        assert any("\ufffd" in shown for shown, _ in found)


@pytest.mark.parametrize("make", [lambda: with_metaspace(), lambda: sentencepiece(user="\ufffd")])
def test_a_token_that_is_the_replacement_character(make):
    """Its bytes are those of U+FFFD in UTF-8; a part of another character has the same text."""
    tokenizer = make()
    known = [i for i in range(tokenizer.vocab) if token_text(tokenizer, i)[0] == "\ufffd"]
    found = {token_text(tokenizer, i)[1] for i in known}
    assert found == {b"\xef\xbf\xbd"} | {bytes([byte]) for byte in range(128, 256)}


@pytest.mark.parametrize("make", [lambda: chat_tokenizer("qwen3"), ByteTokenizer, lambda: sentencepiece()])
def test_ids_that_only_the_model_has_have_no_text(make):
    """The vocabulary of a model may be larger than its tokenizer's, and alternatives have all ids."""
    tokenizer = make()
    ids = [tokenizer.vocab + 3, *tokenizer.encode("ab").tolist(), tokenizer.vocab]
    assert tokenizer.decode(ids) == "ab" and token_text(tokenizer, ids[0]) == ("", b"")


def sentencepiece(user=""):
    more = dict(user_defined_symbols=[user]) if user else {}
    return SentencePieceTokenizer(TokenizerFiles("tokenizer.model", sentencepiece_model(**more), None))


def with_metaspace():
    """A tokenizer in Llama 2's form: words begin with U+2581, unknown characters become bytes."""
    vocab = {"</s>": 0} | {f"<0x{i:02X}>": i + 1 for i in range(256)}
    vocab |= {piece: 257 + i for i, piece in enumerate(("▁", "n", "a", "v", "e", ",", "d", "\ufffd"))}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True))
    model.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    steps = tokenizers.decoders
    model.decoder = steps.Sequence(
        [steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)]
    )
    return JsonTokenizer(TokenizerFiles("t", model.to_str().encode(), None))


def test_the_alphabet_of_byte_level_vocabularies():
    assert {*byte_alphabet()} == {*tokenizers.pre_tokenizers.ByteLevel.alphabet()}
    coder = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((shown, _),) = coder.pre_tokenize_str("".join(map(chr, range(256))))
    raw = "".join(map(chr, range(256))).encode()
    assert np.array_equal([byte_alphabet()[c] for c in shown], [*raw])


def test_weights_of_routers_have_six_digits():
    """0.65185546875 is the number of fp16 next to 0.652; no number of fp16 becomes another one."""
    given = torch.tensor([[[0.652, 1 / 3], [0.0, 1.0]]], dtype=torch.float16)
    assert rounded(given) == [[[0.651855, 0.333252], [0.0, 1.0]]]
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = every[every.isfinite()]
    assert torch.equal(torch.tensor(rounded(finite)).half(), finite)
    assert max(len(repr(abs(w)).replace(".", "").lstrip("0")) for w in rounded(finite) if abs(w) > 1e-3) <= 6
    assert all(map(math.isfinite, rounded(every)))
