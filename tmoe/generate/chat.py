"""Conversations as prompts: what a model is given to answer, and the token that ends its answer.

next: generate/command.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tmoe.data.tokenizer import Tokenizer


def chat_prompt(messages: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> list[int]:
    """Ids of a conversation up to where the assistant's next turn begins.

    A turn is its role on a line, its text, the tokenizer's eos, and a line's end.
    """
    ids: list[int] = []
    for message in messages:
        ids += tokenizer.encode(f"{message['role']}\n{message['content']}").tolist()
        ids += [tokenizer.eos, *tokenizer.encode("\n").tolist()]
    return ids + tokenizer.encode("assistant\n").tolist()


def turn_end(tokenizer: Tokenizer) -> int:
    """The id by which the assistant's turn ends, at which generation is to stop."""
    return tokenizer.eos
