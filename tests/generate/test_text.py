"""Text comes in whole characters, equal to what decoding all tokens at once gives, and ends at stop texts."""

import pytest

from tmoe.data.tokenizer import ByteTokenizer
from tmoe.generate.text import Text

TEXT = "naïve 😀 日本語\nend"


def grown(raw: bytes, stop: tuple[str, ...] = ()) -> tuple[list[str], Text]:
    """The texts that are sent, byte by byte."""
    text = Text(ByteTokenizer(), stop)
    sent = []
    for byte in raw:
        text.add([byte])
        sent.append(text.news())
        if text.stopped:
            return sent, text
    text.end()
    return [*sent, text.news(over=True)], text


def test_bytes_are_held_back_until_a_character_is_whole():
    sent, text = grown(TEXT.encode())
    assert "".join(sent) == text.text == TEXT
    assert [piece for piece in sent if piece] == list(TEXT)


@pytest.mark.parametrize(
    "raw", [b"a\xffb", b"\xe2\x82", b"x\xf0\x9f\x98y\xf0", b"\x80\x80ok\xc3\xa9"], ids=repr
)
def test_bytes_that_are_no_text_become_u_fffd(raw):
    sent, text = grown(raw)
    assert "".join(sent) == text.text == raw.decode("utf-8", "replace")


def test_a_stop_text_is_cut_off_and_never_sent_in_part():
    sent, text = grown(b"one END two ENDE three", ("ENDE", "EN DE"))
    assert text.stopped and text.text == "one END two "
    assert "".join(sent) == text.text
    # the beginning of a stop text waits until the next character shows that it is none
    assert sent[4:9] == ["", "", "", "END ", "t"]


def test_the_first_of_several_stop_texts_ends_it():
    assert grown(b"abcdef", ("f", "cd", "def"))[1].text == "ab"
    text = Text(ByteTokenizer(), ("cd", "b"))
    text.add(list(b"abcd"))
    assert text.stopped and text.text == "a"


def test_a_stop_text_before_min_tokens_is_passed_over():
    text = Text(ByteTokenizer(), ("b",))
    for i, byte in enumerate(b"abcab"):
        text.add([byte], may_stop=i >= 2)
    assert text.stopped and text.text == "abca"


def test_a_waiting_beginning_is_sent_at_the_end():
    sent, text = grown(b"abEN", ("END",))
    assert sent == ["a", "b", "", "", "EN"] and not text.stopped


def test_a_stop_text_of_megabytes_costs_no_more_than_the_text_held_back():
    """A search that compared each of its beginnings would need minutes for a character."""
    sent, text = grown(b"aabaa" + b"c" * 200 + b"aab", ("aab" + "a" * 4_000_000, "c" * 4_000_000))
    assert sent[:6] == ["", "", "", "", "", "aabaa"] and set(sent[6:-1]) <= {"", "c" * 200}
    assert not text.stopped and "".join(sent) == text.text == "aabaa" + "c" * 200 + "aab"
