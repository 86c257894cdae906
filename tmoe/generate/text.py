"""The text of an answer while its tokens are drawn: whole characters only, cut where a stop text begins.

next: generate/load.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tmoe.data.tokenizer import Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"


class Text:
    """A text that grows token by token. `text` is final: no later token changes it.

    A token may end within a character. Its text is then held back until the character is complete, or until
    later text shows that it never will be; U+FFFD then replaces its bytes.

    hidden: ids whose text is left out.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), hidden: frozenset[int] = frozenset()
    ):
        self.tokenizer = tokenizer
        self.stop = stop
        self.hidden = hidden
        self.text = ""
        self.stopped = False  # whether a stop text, which is cut off, was found
        self.sent = 0  # characters that `news` has returned
        self.ids: list[int] = []
        # ids[begin:read] are in `text` already. They are decoded again with the tokens after them, because a
        # tokenizer may write a token differently at the start of a text.
        self.begin = self.read = 0

    def add(self, ids: Sequence[int], may_stop: bool = True) -> None:
        """Appends tokens. may_stop: look for stop texts that the added text contains or completes."""
        self.ids += [i for i in ids if i not in self.hidden]
        known = self.tokenizer.decode(self.ids[self.begin : self.read])
        decoded = self.tokenizer.decode(self.ids[self.begin :])
        if len(decoded) > len(known) and not unfinished(decoded):
            self.settle(decoded[len(known) :], may_stop)
            self.begin, self.read = self.read, len(self.ids)

    def end(self, may_stop: bool = True) -> None:
        """Adds the text that was held back; no token may follow."""
        known = self.tokenizer.decode(self.ids[self.begin : self.read])
        decoded = self.tokenizer.decode(self.ids[self.begin :])
        self.begin, self.read = self.read, len(self.ids)
        self.settle(decoded[len(known) :], may_stop)

    def settle(self, more: str, may_stop: bool) -> None:
        """Adds `more` to `text`, up to a stop text."""
        if self.stopped:
            return
        before = len(self.text)
        # a ByteTokenizer decodes bytes that are not text to lone surrogates
        self.text += more.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        ends = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self.stop if may_stop]
        if places := [place for place in ends if place >= 0]:
            self.text = self.text[: min(places)]
            self.stopped = True

    def news(self, over: bool = False) -> str:
        """Text since the last call. A possible beginning of a stop text is kept until the answer is over."""
        held = 0 if over or self.stopped else max((self.overlap(stop) for stop in self.stop), default=0)
        more = self.text[self.sent : len(self.text) - held]
        self.sent += len(more)
        return more

    def overlap(self, stop: str) -> int:
        """Number of characters at the text's end that are the beginning of `stop`.

        Text that `news` has returned is not searched: it was found to begin no stop text.
        """
        size = len(self.text)
        starts = range(max(self.sent, size - len(stop) + 1), size)
        return next((size - i for i in starts if stop.startswith(self.text[i:])), 0)


def unfinished(text: str) -> bool:
    """Whether a text ends in bytes that may be the beginning of a character."""
    return text.endswith(BROKEN) or 0xDC80 <= ord(text[-1]) <= 0xDCFF
