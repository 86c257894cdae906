"""Bodies of chats become requests; texts and bytes of tokens, also of parts of a character.

next: tmoe/serve/protocol.py, tmoe/serve/token_text.py
"""

import numpy as np
import pytest
import tokenizers
from call_templates import call_tokenizer
from chat_tokenizers import chat_tokenizer

from tmoe.data.chat.template import load_template
from tmoe.data.tokenizer import ByteTokenizer, JsonTokenizer, TokenizerFiles
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


def test_bytes_of_the_tokens_of_a_text():
    """The bytes of all tokens are the text's, although some tokens are parts of a character."""
    text = "Łódź, 𝛼 naïve"
    for tokenizer in (chat_tokenizer("qwen3"), ByteTokenizer(), with_metaspace()):
        found = [token_text(tokenizer, int(i)) for i in tokenizer.encode(text)]
        assert b"".join(raw for _, raw in found).strip() == text.encode()
        assert all("\ufffd" in shown or shown.encode() == raw for shown, raw in found)
        assert any("\ufffd" in shown for shown, _ in found)


def with_metaspace():
    """A tokenizer in Llama 2's form: words begin with U+2581, unknown characters become bytes."""
    vocab = {"</s>": 0} | {f"<0x{i:02X}>": i + 1 for i in range(256)}
    vocab |= {piece: 257 + i for i, piece in enumerate(("▁", "n", "a", "v", "e", ",", "d"))}
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
