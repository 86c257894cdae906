"""Rows of an instruction: Alpaca's and Dolly's names, preferences, and rows that are refused."""

from __future__ import annotations

import pytest

from tmoe.data.chat.conversations import Conversation, kind_of, parse_row
from tmoe.data.tokenizer import DataError


def asked(text: str, answer: str, *before: dict) -> Conversation:
    messages = [*before, dict(role="user", content=text), dict(role="assistant", content=answer)]
    return Conversation(messages, len(before) + 1)


ALPACA = dict(instruction="Translate.", input="Bonjour", output="Hello")


@pytest.mark.parametrize(
    "row, want, unread",
    [
        (ALPACA | dict(id=1), asked("Translate.\nBonjour", "Hello"), ("id",)),
        (dict(instruction="Say hi.", input="", output="Hi"), asked("Say hi.", "Hi"), ()),
        (dict(instruction="Say hi.", input=None, output="Hi"), asked("Say hi.", "Hi"), ()),
        (dict(instruction="Who?", context="Ada.", response="Ada"), asked("Who?\nAda.", "Ada"), ()),
        (
            ALPACA | dict(system="Be brief.", prompt="Below is an instruction.", history=[]),
            asked("Translate.\nBonjour", "Hello", dict(role="system", content="Be brief.")),
            ("history", "prompt"),
        ),
    ],
)
def test_rows_are_conversations(row: dict, want: Conversation, unread: tuple[str, ...]):
    assert kind_of(row) == "instruction"
    found = parse_row(row, "row", "instruction")
    assert found.samples == (want,)
    assert found.unread == unread


def test_preferences():
    row = dict(instruction="Translate.", input="Bonjour", chosen="Hello", rejected="Bye", score=1)
    found = parse_row(row, "row", kind_of(row))
    assert found.samples == tuple(asked("Translate.\nBonjour", answer) for answer in ("Hello", "Bye"))
    assert found.unread == ("score",)


@pytest.mark.parametrize(
    "row, match",
    [
        (ALPACA | dict(output=" "), "row: output: is empty"),
        (ALPACA | dict(instruction="", input=""), "row: instruction: is empty"),
        (ALPACA | dict(input=["Bonjour"]), "row: input is list; must be text"),
        (ALPACA | dict(history=[["Hi", "Ho"]]), "row: history: only messages and texts"),
        (ALPACA | dict(kto_tag=False), "row: kto_tag=False: a bad answer"),
    ],
)
def test_rows_that_would_lose_a_part_are_refused(row: dict, match: str):
    with pytest.raises(DataError, match=match):
        parse_row(row, "row", kind_of(row))
