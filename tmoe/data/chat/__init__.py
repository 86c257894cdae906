"""Turns conversations into training data: rows, templates, masks, packing and prompts.

next: data/chat/encoding.py
"""

from typing import TYPE_CHECKING

from tmoe.base.lazy import lazy

if TYPE_CHECKING:
    from tmoe.data.chat.encoding import Encoder, Tokens, chat_prompt, encode, turn_end, turn_ends

__all__ = ["Encoder", "Tokens", "chat_prompt", "encode", "turn_end", "turn_ends"]

__getattr__, __dir__ = lazy(__name__, dict.fromkeys(__all__, "tmoe.data.chat.encoding"))
