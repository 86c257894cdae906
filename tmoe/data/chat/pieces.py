"""Renders a conversation as one or several texts and finds the parts of them that are trained.

next: data/chat/encoding.py
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from tmoe.data.chat.conversations import Conversation
from tmoe.data.chat.held import CALLS, INLINE, THOUGHTS, holds, squeezed
from tmoe.data.chat.special_tokens import Marker
from tmoe.data.chat.spelling import Speller
from tmoe.data.chat.template import ChatTemplate
from tmoe.data.tokenizer import DataError

# The end of a generation prompt that opens a thought: <think>, <seed:think>, [THINK], <|START_THINKING|>.
OPENED = re.compile(r"(<(\w[\w:]*)>|\[([A-Z]+)\]|<\|START_([A-Z]+)\|>)(\n*)\Z")
# A turn that begins with an empty thought; the second group is what is between its marks.
EMPTY = re.compile(r"\s*<(\w[\w:]*)>(\n*)</\1>")
# Advice for an error: some templates have no prompt before a first turn of the assistant.
FIRST = 'the row begins with the assistant; {"weight": 0} in this message trains the later turns alone'
SAID = "z0000000z"  # an answer that occurs in no other text
SHORT = [dict(role="user", content="?"), dict(role="assistant", content=SAID)]


class RenderedText(NamedTuple):
    """A text that becomes one sequence, and the spans of it that are trained."""

    text: str
    spans: list[tuple[int, int]]
    turns: list[int] = []  # noqa: RUF012
    """for each span the index of its message"""
    edges: list[tuple[int, int]] = []  # noqa: RUF012
    """for each prompt its end, and the beginning of its last special token. In generation
    the prompt is encoded alone, so the text must have the same tokens up to that end. It is enough to compare
    them from the last special token on, because no token extends over a special one."""


class Pieces:
    """Renders conversations, whose calls must be in the form of `calls.objects`."""

    def __init__(self, marker: Marker, template: ChatTemplate) -> None:
        self.marker = marker
        self.template = template
        self.spell = Speller(template)
        self._running: dict[str, bool] = {}

    def __call__(self, sample: Conversation) -> list[RenderedText]:
        """The texts of a conversation: one, or several if earlier turns are not rendered as the last one is.

        DataError for a conversation that the template refuses, and for turns that no model could generate.
        """
        return self._by_tags(sample) if self.template.marks else self._by_prefixes(sample)

    def _by_tags(self, sample: Conversation) -> list[RenderedText]:
        """The texts of the turns, each rendered as the last one; {% generation %} marks the trained spans."""
        messages, _, tools, more = sample
        texts: dict[int, str] = {}
        spans: dict[int, list[tuple[int, int]]] = {}
        for i in sample.turns:
            texts[i], marked = self._render(messages[: i + 1], tools, more)
            before, earlier = self._render(messages[:i], tools, more) if i else ("", [])
            behind = len(before) if texts[i].startswith(before) else 0
            marked = marked[0 if behind else len(earlier) :]
            spans[i] = [(low, high) for low, high in marked if low >= behind and low < high]
            self._require_end(texts[i], spans[i], i, tools, more)
        pieces = []
        left = list(sample.turns)
        while left:
            whole = texts[left[-1]]
            covered = [i for i in left if not spans[i] or whole.startswith(texts[i][: spans[i][-1][1]])]
            covered = covered or left[-1:]
            of_turns = [(span, i) for i in covered for span in spans[i]]
            pieces.append(RenderedText(whole, [span for span, _ in of_turns], [i for _, i in of_turns]))
            left = [i for i in left if i not in covered]
        return pieces[::-1]

    def _require_end(
        self, text: str, spans: list[tuple[int, int]], i: int, tools: list | None, more: dict[str, Any]
    ) -> None:
        """DataError if the trained part of a turn does not end in a special token."""
        if not spans:
            return  # another error reports that nothing of the turn is trained
        low, high = spans[-1]
        end = self._last_mark(text[low:high])
        if not end or (end in self.marker.closers and end != self._answer_end(tools, more)):
            shown = text[low:high].rstrip()[-30:]
            raise DataError(
                f"messages[{i}]: {{% generation %}} of the chat template ({self.template.source}) "
                f"leaves out the token that ends the turn, so no answer would ever end: {shown!r}; put "
                "it in front of {% endgeneration %}, or name another template with --data.chat-template"
            )

    def _by_prefixes(self, sample: Conversation) -> list[RenderedText]:
        """The texts of the turns; the trained span of a turn is the text after its generation prompt."""
        messages, _, tools, more = sample
        prompts = {}
        texts = {}
        for i in sample.turns:
            texts[i] = self._closed(messages[: i + 1], tools, more)
            # Try each variant of the generation prompt: without thinking it supplies an empty thought.
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
            ends = {i: self._end(len(prompts[i]), texts[i], whole) for i in left}
            turns = [i for i, end in ends.items() if end]
            spans = [(len(prompts[i]), ends[i]) for i in turns]
            pieces.append(RenderedText(whole, spans, turns, [self.edge(prompts[i]) for i in turns]))
            left = [i for i, end in ends.items() if not end]
        return pieces[::-1]

    def _behind(self, offered: list[str], text: str, messages: list[dict], i: int) -> tuple[str, str]:
        """The prompt after which message i is learned, and the text that ends with the message.

        DataError if no variant of the prompt in `offered` fits.
        """
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
        """A prompt and the turn that ends `text`, if the text before it differs from the prompt in blanks.

        Hermes writes a line break after a tool's result only if a turn follows it. Text and prompt must be
        equal from the prompt's last special token on.
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
        """A prompt and the turn that ends `text`, if the text before the turn differs from the prompt.

        gpt-oss drops thoughts before tool calls as soon as there is an answer. The turn is the text after the
        longest end of the prompt that occurs in `text`. None if that end does not include the message before.
        """
        content = before.get("content") or ""
        matches = []
        for prompt in prompts:
            low, high = 0, len(prompt)
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if prompt[-middle:] in text else (low, middle - 1)
            shared = prompt[len(prompt) - low :]
            message = shared[
                : max(self.edge(prompt)[1] - len(prompt) + low, 0)
            ]  # the part before the last mark
            if message and any(form in message for form in (content.strip(), json.dumps(content)[1:-1])):
                matches.append((low, prompt, text[text.rindex(shared) + low :]))
        return max(matches)[1:] if matches else None

    def edge(self, prompt: str) -> tuple[int, int]:
        """The end of a prompt, and the beginning of its last special token (0 if it has none)."""
        starts = [match.start() for match in self.marker.names.finditer(prompt)]
        return len(prompt), starts[-1] if starts else 0

    def _closed(self, messages: list[dict], tools: list | None, more: dict[str, Any]) -> str:
        """The text of messages, the last of which is the assistant's, with a token that ends its turn.

        If the template writes no such token, as that of GLM, the token that begins the next message (a call's
        result or the user's turn) is added, because generation stops at it. If there is none either, the
        tokenizer's separator is added.
        """
        text = self._render(messages, tools, more)[0]
        if self._runs_on(tools, more):
            text = self._without_next(messages, text, tools, more)
        end = self._last_mark(text)
        if end and (end not in self.marker.closers or end == self._answer_end(tools, more)):
            return text
        begins = self._following(messages, text, tools, more)
        if begins is None:  # the template changes a thought once an answer follows it
            call = {name: value for name, value in messages[-1].items() if name == CALLS}
            short = [*SHORT[:1], SHORT[1] | call]
            begins = self._following(short, self._render(short, tools, more)[0], tools, more)
        return text + (begins or self.template.special["eos_token"])

    def _runs_on(self, tools: list | None, more: dict[str, Any]) -> bool:
        """Whether the template writes the next turn's header without being asked for it (Command R7B)."""
        key = json.dumps([bool(tools), more], sort_keys=True, default=str)
        if key not in self._running:
            self._running[key] = self._writes_next(tools, more)
        return self._running[key]

    def _writes_next(self, tools: list | None, more: dict[str, Any]) -> bool:
        """The result of `_runs_on`, found by rendering a short conversation.

        The generation prompt may have more than the header, as in axolotl's template for Command A.
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
        """The text up to the separator that ends its last turn, without the beginning of the next turn."""
        longer = self._render([*messages, _next_of(messages)], tools, more)[0]
        eos = self.template.special["eos_token"]
        end = text.rfind(eos, 0, _common(text, longer)) if eos else -1
        if end < 0:
            raise DataError(
                f"the chat template ({self.template.source}) begins another turn of the assistant, and none "
                "is asked for; name another with --data.chat-template"
            )
        return text[: end + len(eos)]

    def _last_mark(self, text: str) -> str | None:
        """The special token that ends a text, trailing blanks ignored; None if there is none."""
        shown = text.rstrip()
        ends = [match.group() for match in self.marker.names.finditer(shown) if match.end() == len(shown)]
        return ends[-1] if ends else None

    def _answer_end(self, tools: list | None, more: dict[str, Any]) -> str | None:
        """The special token that ends a short answer; None if the template writes none."""
        try:
            return self._last_mark(self._render(SHORT, tools, more)[0])
        except DataError:
            return None

    def _following(
        self, messages: list[dict], text: str, tools: list | None, more: dict[str, Any]
    ) -> str | None:
        """The special token that begins a message after `messages`, whose text is `text`; else None."""
        try:
            longer = self._render([*messages, _next_of(messages)], tools, more)[0]
        except DataError:  # a template without such a role
            return None
        place = len(text) if longer.startswith(text) else -1
        if place < 0 and SAID in text:  # GLM-5.1 renders the thought of an earlier turn differently
            end = text[text.rindex(SAID) :]
            place = longer.find(end) + len(end) if end in longer else -1
        begins = self.marker.names.match(longer, place) if place >= 0 else None
        return begins.group() if begins else None

    def _end(self, start: int, text: str, whole: str) -> int:
        """The end in `whole` of the turn that begins at `start` and ends `text`; 0 if `whole` lacks the turn.

        The end is after the turn's last special token, if only blanks follow, because no model generates the
        line break after it. A special token that ends conversations (Phi-3's) follows only the last turn.
        """
        same = len(text) if whole.startswith(text) else _common(text, whole)
        ends = [match.end() for match in self.marker.names.finditer(text, start)]
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
    """A message that may follow `messages`: the result of a call in the last message, or a question."""
    if called := messages[-1].get(CALLS):
        return dict(role="tool", content="?", name="?", tool_call_id=called[0].get("id"))
    return dict(role="user", content="?")


def _opened(prompts: list[str], text: str, thought: str) -> tuple[str, str] | None:
    """A prompt that opens a thought, and the text with the thought added, if the template renders none.

    DeepSeek-R1's prompt ends in <think> and a line break, and its turns are rendered without their thoughts.
    A model that answers this prompt closes the thought first. So the returned turn closes it too, after an
    empty thought if the row has none. A turn that is rendered with an empty thought gets that of the row.
    None if no prompt opens a thought.
    """
    for prompt in prompts:
        match = OPENED.search(prompt)
        if not match or not text.startswith(base := prompt[: match.start()]):
            continue
        _, name, bracketed, started, blank = match.groups()
        closer = f"</{name}>" if name else f"[/{bracketed}]" if bracketed else f"<|END_{started}|>"
        rest = text[len(base) :].lstrip("\n")
        if text.startswith(prompt):
            rest = text[len(prompt) :].lstrip("\n")
            if not thought or not rest.startswith(closer):
                continue
        gap = "\n\n" if blank else ""
        rest = rest.removeprefix(closer).lstrip("\n")
        if thought:  # it must occur once, although the text may also render it
            rest = re.sub(rf"<think>\s*{re.escape(thought.strip())}\s*</think>\s*", "", rest, count=1)
        return prompt, f"{prompt}{thought.strip()}{blank}{closer}{gap}{rest}"
    return None


def _filled(turn: str, thought: str) -> str:
    """A turn that is rendered with an empty thought, filled with `thought`; "" for other turns or no thought.

    Kimi-K2-Thinking renders thoughts only up to the last call, yet its model thinks before the last answer.
    """
    match = EMPTY.match(turn) if thought else None
    if not match:
        return ""
    blank = match[2][: len(match[2]) // 2]
    close, rest = turn[match.end(2) : match.end()], turn[match.end() :]
    inline = INLINE.fullmatch(rest)
    if inline and squeezed(inline[2]) == squeezed(thought):  # the text contains the thought itself
        rest = inline[1].partition("<")[0] + inline[4]
    return f"{turn[: match.start(2)]}{blank}{thought.strip()}{blank}{close}{rest}"


def thought_of(message: dict[str, Any]) -> str:
    """A turn's thought, from its own field or from within its text; "" if there is none."""
    inline = INLINE.fullmatch(message.get("content") or "")
    return message.get(THOUGHTS) or (inline.group(2) if inline else "")


def _common(a: str, b: str) -> int:
    """The length of the common beginning of two texts."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
