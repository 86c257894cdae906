"""Which texts a conversation becomes, and which parts of these are trained.

next: data/chat/encoding.py
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from tmoe.data.chat.held import CALLS, INLINE, THOUGHTS, holds, squeezed
from tmoe.data.chat.marks import Marker
from tmoe.data.chat.rows import Conversation
from tmoe.data.chat.spelling import Speller
from tmoe.data.chat.template import ChatTemplate
from tmoe.data.tokenizer import DataError

# The end of a generation prompt that opens a thought: <think>, <seed:think>, [THINK], <|START_THINKING|>.
OPENED = re.compile(r"(<(\w[\w:]*)>|\[([A-Z]+)\]|<\|START_([A-Z]+)\|>)(\n*)\Z")
# A turn that begins with an empty thought; the second group is what is between its marks.
EMPTY = re.compile(r"\s*<(\w[\w:]*)>(\n*)</\1>")
# What to do about a first turn of the assistant, which some templates show no prompt for.
FIRST = 'the row begins with the assistant; {"weight": 0} in this message trains the later turns alone'
SAID = "z0000000z"  # an answer that no other text holds
SHORT = [dict(role="user", content="?"), dict(role="assistant", content=SAID)]


class Piece(NamedTuple):
    """A text that becomes one sequence, and the spans of it that are trained."""

    text: str
    spans: list[tuple[int, int]]
    turns: list[int] = []  # noqa: RUF012
    """the message that each span is of"""
    edges: list[tuple[int, int]] = []  # noqa: RUF012
    """where a prompt ends, and where its last special token begins: a model answers behind the tokens of the
    prompt alone, and tokens never reach over a special one"""


class Pieces:
    """Renders conversations, whose calls are as `objects` gives them."""

    def __init__(self, marker: Marker, template: ChatTemplate) -> None:
        self.marker = marker
        self.template = template
        self.spell = Speller(template)
        self._running: dict[str, bool] = {}

    def __call__(self, sample: Conversation) -> list[Piece]:
        """Its texts: one, or several where earlier turns are shown in another way than the last.

        DataError for what the template refuses, and for turns that no model could say.
        """
        return self._by_tags(sample) if self.template.marks else self._by_prefixes(sample)

    def _by_tags(self, sample: Conversation) -> list[Piece]:
        """The parts of each turn, shown as the last one, that {% generation %} names."""
        messages, _, tools, more = sample
        texts: dict[int, str] = {}
        spans: dict[int, list[tuple[int, int]]] = {}
        for i in sample.turns:
            texts[i], found = self._render(messages[: i + 1], tools, more)
            before, earlier = self._render(messages[:i], tools, more) if i else ("", [])
            behind = len(before) if texts[i].startswith(before) else 0
            found = found[0 if behind else len(earlier) :]
            spans[i] = [(low, high) for low, high in found if low >= behind and low < high]
            self._require_end(texts[i], spans[i], i, tools, more)
        pieces = []
        left = list(sample.turns)
        while left:
            whole = texts[left[-1]]
            here = [i for i in left if not spans[i] or whole.startswith(texts[i][: spans[i][-1][1]])]
            here = here or left[-1:]
            of_turns = [(span, i) for i in here for span in spans[i]]
            pieces.append(Piece(whole, [span for span, _ in of_turns], [i for _, i in of_turns]))
            left = [i for i in left if i not in here]
        return pieces[::-1]

    def _require_end(
        self, text: str, spans: list[tuple[int, int]], i: int, tools: list | None, more: dict[str, Any]
    ) -> None:
        """DataError where what is trained of a turn does not end in a special token."""
        if not spans:
            return  # the error is that nothing of it is trained
        low, high = spans[-1]
        end = self._last_mark(text[low:high])
        if not end or (end in self.marker.closers and end != self._answer_end(tools, more)):
            shown = text[low:high].rstrip()[-30:]
            raise DataError(
                f"messages[{i}]: {{% generation %}} of the chat template ({self.template.source}) "
                f"leaves out the token that ends the turn, so no answer would ever end: {shown!r}; put "
                "it in front of {% endgeneration %}, or name another template with --data.chat-template"
            )

    def _by_prefixes(self, sample: Conversation) -> list[Piece]:
        """A turn is what follows its generation prompt."""
        messages, _, tools, more = sample
        prompts = {}
        texts = {}
        for i in sample.turns:
            texts[i] = self._closed(messages[: i + 1], tools, more)
            # The longest of what a generation prompt may supply: without thinking, an empty thought.
            try:
                offered = [
                    self._render(messages[:i], tools, more | variant, prompt=True)[0]
                    for variant in self.template.variants
                ]
            except DataError as error:
                raise error if i else DataError(f"{error}; {FIRST}") from None
            prompts[i], texts[i] = self._behind(offered, texts[i], messages, i)
        pieces = []
        left = list(sample.turns)
        while left:
            whole = texts[left[-1]]
            here = {i: self._end(len(prompts[i]), texts[i], whole) for i in left}
            mine = [i for i, end in here.items() if end]
            spans = [(len(prompts[i]), here[i]) for i in mine]
            pieces.append(Piece(whole, spans, mine, [self.edge(prompts[i]) for i in mine]))
            left = [i for i, end in here.items() if not end]
        return pieces[::-1]

    def _behind(self, offered: list[str], text: str, messages: list[dict], i: int) -> tuple[str, str]:
        """The prompt that message i is learned after, and the text that ends with it. DataError for none."""
        fitting = [prompt for prompt in offered if text.startswith(prompt)]
        thought = thought_of(messages[i])
        if (not fitting or not holds(squeezed(text), thought)) and (
            opened := _opened(offered, text, thought)
        ):
            return opened
        moved = None
        if not fitting and i:
            moved = self._but_for_blanks(offered, text) or self._moved(offered, text, messages[i - 1])
        if moved:
            prompt, turn = moved
            return prompt, prompt + (_filled(turn, thought) or turn)
        if not fitting:
            begins = text[_common(text, offered[0]) :][:40]
            raise DataError(
                f"messages[{i}]: the template's generation prompt, ending in {offered[0][-40:]!r}, is "
                f"not how it begins this turn, {begins!r}; name a template that "
                "does so with --data.chat-template, or one with {% generation %}"
                + ("" if i else f"; {FIRST}")
            )
        shortest = min(fitting, key=len)
        if filled := _filled(text[len(shortest) :], thought):
            return shortest, shortest + filled
        return max(fitting, key=len), text

    def _but_for_blanks(self, prompts: list[str], text: str) -> tuple[str, str] | None:
        """A prompt and the turn that `text` ends with, where the text before the turn has other blanks.

        Hermes writes a line break after a tool's result only if a turn follows it. Text and prompt are equal
        from the prompt's last special token on.
        """
        for prompt in sorted(prompts, key=len, reverse=True):
            mark = self.edge(prompt)[1]
            before, header = squeezed(prompt[:mark]), prompt[mark:]
            place = text.find(header) if mark else -1
            while place >= 0:
                if squeezed(text[:place]) == before:
                    return prompt, text[place + len(header) :]
                place = text.find(header, place + 1)
        return None

    def _moved(self, prompts: list[str], text: str, before: dict[str, Any]) -> tuple[str, str] | None:
        """A prompt and the turn that `text` ends with, where what stands before the turn is not the prompt.

        gpt-oss drops thoughts before tool calls as soon as there is an answer. The turn is what follows the
        longest end of the prompt in the text. None where that does not reach back over the message before.
        """
        content = before.get("content") or ""
        found = []
        for prompt in prompts:
            low, high = 0, len(prompt)
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if prompt[-middle:] in text else (low, middle - 1)
            shared = prompt[len(prompt) - low :]
            message = shared[
                : max(self.edge(prompt)[1] - len(prompt) + low, 0)
            ]  # what precedes the last mark
            if message and any(one in message for one in (content.strip(), json.dumps(content)[1:-1])):
                found.append((low, prompt, text[text.rindex(shared) + low :]))
        return max(found)[1:] if found else None

    def edge(self, prompt: str) -> tuple[int, int]:
        """Where a prompt ends, and where its last special token begins."""
        starts = [found.start() for found in self.marker.names.finditer(prompt)]
        return len(prompt), starts[-1] if starts else 0

    def _closed(self, messages: list[dict], tools: list | None, more: dict[str, Any]) -> str:
        """The text of messages whose last is the assistant's, with a token that ends its turn.

        Where the template writes none, as GLM's, it is the one that begins the next message, a call's result
        or the user's turn: generation meets that. Where there is none either, it is the tokenizer's
        separator.
        """
        text = self._render(messages, tools, more)[0]
        if self._runs_on(tools, more):
            text = self._without_next(messages, text, tools, more)
        end = self._last_mark(text)
        if end and (end not in self.marker.closers or end == self._answer_end(tools, more)):
            return text
        begins = self._following(messages, text, tools, more)
        if begins is None:  # a thought is shown in another way once there is an answer
            call = {name: one for name, one in messages[-1].items() if name == CALLS}
            short = [*SHORT[:1], SHORT[1] | call]
            begins = self._following(short, self._render(short, tools, more)[0], tools, more)
        return text + (begins or self.template.special["eos_token"])

    def _runs_on(self, tools: list | None, more: dict[str, Any]) -> bool:
        """Whether the template writes the header of the next turn though none is asked for (Command R7B)."""
        key = json.dumps([bool(tools), more], sort_keys=True, default=str)
        if key not in self._running:
            self._running[key] = self._writes_next(tools, more)
        return self._running[key]

    def _writes_next(self, tools: list | None, more: dict[str, Any]) -> bool:
        """`_runs_on`, looked for in a short conversation.

        The generation prompt may have more than the header, as axolotl's for Command A.
        """
        try:
            text, prompt, longer = (
                self._render(messages, tools, more, prompt=prompt)[0]
                for messages, prompt in ((SHORT, False), (SHORT, True), ([*SHORT, *SHORT], False))
            )
        except DataError:
            return False
        eos = self.template.special["eos_token"]
        if text.rstrip().endswith(eos) or longer.startswith(text):
            return False
        _, ends, header = text.rpartition(eos) if eos else ("", "", "")
        marks = ends and header.strip() and not self.marker.names.sub("", header).strip()
        return text == prompt or bool(marks and prompt.startswith(text))

    def _without_next(self, messages: list[dict], text: str, tools: list | None, more: dict[str, Any]) -> str:
        """A text up to the separator that ends its last turn, without the next turn's beginning."""
        longer = self._render([*messages, _next_of(messages)], tools, more)[0]
        eos = self.template.special["eos_token"]
        end = text.rfind(eos, 0, _common(text, longer)) if eos else -1
        if end < 0:
            raise DataError(
                f"the chat template ({self.template.source}) begins another turn of the assistant where none "
                "is asked for; name another with --data.chat-template"
            )
        return text[: end + len(eos)]

    def _last_mark(self, text: str) -> str | None:
        """The special token that ends a text, but for blanks."""
        shown = text.rstrip()
        ends = [found.group() for found in self.marker.names.finditer(shown) if found.end() == len(shown)]
        return ends[-1] if ends else None

    def _answer_end(self, tools: list | None, more: dict[str, Any]) -> str | None:
        """The special token that ends a short answer; None where the template writes none."""
        try:
            return self._last_mark(self._render(SHORT, tools, more)[0])
        except DataError:
            return None

    def _following(
        self, messages: list[dict], text: str, tools: list | None, more: dict[str, Any]
    ) -> str | None:
        """The special token that begins what follows messages, whose text this is; None where none does."""
        try:
            longer = self._render([*messages, _next_of(messages)], tools, more)[0]
        except DataError:  # a template without such a role
            return None
        place = len(text) if longer.startswith(text) else -1
        if place < 0 and SAID in text:  # GLM-5.1 shows the thought of an earlier turn in another way
            end = text[text.rindex(SAID) :]
            place = longer.find(end) + len(end) if end in longer else -1
        begins = self.marker.names.match(longer, place) if place >= 0 else None
        return begins.group() if begins else None

    def _end(self, start: int, text: str, whole: str) -> int:
        """Where the turn that begins at `start` and ends `text` ends in `whole`; 0 where it is not there.

        That is behind its last special token, if only blanks follow: no model says the line break after it. A
        special token that ends conversations (Phi-3's) follows the last turn only.
        """
        same = len(text) if whole.startswith(text) else _common(text, whole)
        ends = [found.end() for found in self.marker.names.finditer(text, start)]
        end = max((end for end in ends if end <= same), default=0)
        rest = text[end:] if same == len(text) else self.marker.names.sub("", text[end:])
        if end and not rest.strip():
            return end
        return len(text) if same == len(text) else 0

    def _render(
        self, messages: list[dict], tools: list | None, more: dict[str, Any], *, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        return self.template.render_marked(self.spell(messages, tools), tools, prompt=prompt, **more)


def _next_of(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """A message that may follow these: the result of their last call, or a question."""
    if called := messages[-1].get(CALLS):
        return dict(role="tool", content="?", name="?", tool_call_id=called[0].get("id"))
    return dict(role="user", content="?")


def _opened(prompts: list[str], text: str, thought: str) -> tuple[str, str] | None:
    """A prompt that opens a thought, and the text with the thought in it, where the template shows none.

    DeepSeek-R1's prompt ends in <think> and a line break, and its turns are shown without their thoughts. A
    model that answers it closes the thought first: so does the turn, with an empty one where the row
    has none. A turn that is shown with an empty thought gets the row's. None where no prompt does so.
    """
    for prompt in prompts:
        found = OPENED.search(prompt)
        if not found or not text.startswith(base := prompt[: found.start()]):
            continue
        _, name, bracketed, started, blank = found.groups()
        closer = f"</{name}>" if name else f"[/{bracketed}]" if bracketed else f"<|END_{started}|>"
        rest = text[len(base) :].lstrip("\n")
        if text.startswith(prompt):
            rest = text[len(prompt) :].lstrip("\n")
            if not thought or not rest.startswith(closer):
                continue
        gap = "\n\n" if blank else ""
        rest = rest.removeprefix(closer).lstrip("\n")
        if thought:  # which is there once, though the text shows it as well
            rest = re.sub(rf"<think>\s*{re.escape(thought.strip())}\s*</think>\s*", "", rest, count=1)
        return prompt, f"{prompt}{thought.strip()}{blank}{closer}{gap}{rest}"
    return None


def _filled(turn: str, thought: str) -> str:
    """A turn that is shown with an empty thought, with the row's; "" for another turn, and for no thought.

    Kimi-K2-Thinking shows thoughts up to the last call only, yet its model thinks before the last answer.
    """
    found = EMPTY.match(turn) if thought else None
    if not found:
        return ""
    blank = found[2][: len(found[2]) // 2]
    close, rest = turn[found.end(2) : found.end()], turn[found.end() :]
    inline = INLINE.fullmatch(rest)
    if inline and squeezed(inline[2]) == squeezed(thought):  # the thought itself, within the text
        rest = inline[1].partition("<")[0] + inline[4]
    return f"{turn[: found.start(2)]}{blank}{thought.strip()}{blank}{close}{rest}"


def thought_of(message: dict[str, Any]) -> str:
    """A turn's thought, its own or the one within its text; "" for none."""
    inline = INLINE.fullmatch(message.get("content") or "")
    return message.get(THOUGHTS) or (inline.group(2) if inline else "")


def _common(a: str, b: str) -> int:
    """How many characters both begin with."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
