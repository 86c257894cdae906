"""From conversations to token ids, and which of them are trained.

Trained is what a model would have to say: an assistant's turn with the token that ends it, but not its
header, nor anything else that the generation prompt supplies. Where a template says by {% generation %} what
that is, it is taken at its word. Otherwise the conversation is rendered with and without the turn:

    render(messages before, with generation prompt)      must begin
    render(messages before and the turn)                 what follows is trained

in text and in tokens. A turn is learned behind that generation prompt, for that is what a model will have
read, also where a template leaves out some of it once there is an answer. Some templates render an earlier
turn in another way than the last: Qwen3 drops its thoughts, gpt-oss ends it with another token. Then a
conversation becomes several sequences, each ending with a turn as it is when it is last. So every turn is
learned once.

    template = load_template(tokenizer)
    sequence, = encode([Conversation(messages)], tokenizer, template)[0]     ids and trained, arrays [n]
    ids = chat_prompt(messages, tokenizer)                                   to generate from
    stops = turn_ends(tokenizer, template)                                   the tokens that end a turn

next: data/chat_dataset.py
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tmoe.data.chat_rows import Conversation, Plain, Sample, parse_messages
from tmoe.data.chat_template import CLOSE, OPEN, ChatTemplate, load_template
from tmoe.data.tokenizer import DataError, JsonTokenizer, Tokenizer


class Tokens(NamedTuple):
    """One sequence to train on; it ends with its last trained token."""

    ids: np.ndarray
    """[n] of the tokenizer's type"""
    trained: np.ndarray
    """[n] bool: whether this token is to be predicted"""


class Encoded(NamedTuple):
    """Ids of a text, and from which to which character each goes."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class Marker:
    """Encodes what a template rendered, in which special tokens are written out by name."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.plain = tokenizer
        if isinstance(tokenizer, JsonTokenizer):
            self._tokenizer = tokenizer.marked()
            added = self._tokenizer.get_added_tokens_decoder().items()
            self.special = {token.content: number for number, token in added if token.special}
            self.opening = tokenizer.opening
        else:
            self._tokenizer = None
            self.special = {tokenizer.decode([tokenizer.eos]): tokenizer.eos}
            self.opening = ""
        longest_first = sorted((text for text in self.special if text), key=len, reverse=True)
        self.names = re.compile("|".join(map(re.escape, [*longest_first, OPEN, CLOSE])))
        closing = [
            text for text in self.special if text.replace("</", "<", 1) in self.special.keys() - {text}
        ]
        self.closers = set(closing) - {tokenizer.decode([tokenizer.eos])}
        """special tokens that end a part of a turn, as </tool_call>, which <tool_call> begins"""

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text's tokens. UnicodeError for a lone surrogate."""
        raw = [text.encode() for text in texts]
        if self._tokenizer is None:
            return [_of_bytes(one) for one in raw]
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        dtype = np.uint16 if self.plain.vocab <= 1 << 16 else np.uint32
        found = []
        for encoding in encodings:
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            found.append(Encoded(np.array(encoding.ids, dtype), offsets[:, 0], offsets[:, 1]))
        return found

    def require_text(self, messages: Sequence[dict[str, Any]]) -> None:
        """DataError where a message holds a special token, which would end its turn or begin another."""
        for i, message in enumerate(messages):
            for name in ("content", "reasoning_content"):
                found = self.names.search(message.get(name) or "")
                if found:
                    raise DataError(
                        f"messages[{i}]: {name} holds {found.group()!r}, which the tokenizer would take for "
                        "a mark of its own"
                    )


def _of_bytes(raw: bytes) -> Encoded:
    ids = np.frombuffer(raw, np.uint8)
    characters = np.cumsum((ids & 0xC0) != 0x80) - 1
    return Encoded(ids, characters, characters + 1)


class _Piece(NamedTuple):
    """A text that becomes one sequence, and the spans of it that are trained."""

    text: str
    spans: list[tuple[int, int]]
    edges: list[tuple[int, int]] = []  # noqa: RUF012
    """where a prompt ends, and where its last special token begins: a model answers behind the tokens of the
    prompt alone, and tokens never reach over a special one"""


class Encoder:
    """Encodes samples with one tokenizer and one template. `encode` of this file is the short way."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.marker = Marker(tokenizer)
        self.template = template
        self.rendered: set[str] = set()  # roles that the template is known to render

    def encode(self, samples: Sequence[Sample]) -> list[list[Tokens] | DataError]:
        """The sequences of each sample, or why it cannot be trained on."""
        planned: list[list[_Piece] | DataError] = []
        for sample in samples:
            try:
                plan = self._plain if isinstance(sample, Plain) else self._conversation
                planned.append(plan(sample))  # pyrefly: ignore[bad-argument-type]
            except DataError as error:
                planned.append(error)
        pieces = [piece for plan in planned if not isinstance(plan, DataError) for piece in plan]
        texts = [text for piece in pieces for text in _texts(piece)]
        try:
            encoded = iter(self.marker.encode(texts))
        except UnicodeEncodeError as error:
            if len(samples) == 1:
                return [DataError(f"not Unicode text: {error.reason} in {error.object[:40]!r}")]
            return [self.encode([sample])[0] for sample in samples]
        return [
            plan
            if isinstance(plan, DataError)
            else self._cut(plan, [[next(encoded) for _ in _texts(piece)] for piece in plan])
            for plan in planned
        ]

    # ---- texts ----

    def _plain(self, sample: Plain) -> list[_Piece]:
        """The two texts, the tokenizer's opening token in front, and its separator at the end."""
        eos = self.template.special["eos_token"]
        prompt = self.marker.opening + sample.prompt
        text = prompt + sample.completion + eos
        return [_Piece(text, [(len(prompt), len(text))], [self._edge(prompt)])]

    def _conversation(self, sample: Conversation) -> list[_Piece]:
        messages, _, tools, more = sample
        self.marker.require_text(messages)
        if not sample.turns:
            raise DataError("no turn of the assistant to learn")
        if self.template.marks:
            last = sample.turns[-1] + 1
            text, spans = self._render(messages[:last], tools, more)
            before = len(self._render(messages[: sample.first], tools, more)[0]) if sample.first else 0
            spans = [(low, high) for low, high in spans if low >= before and low < high]
            pieces = [_Piece(text, spans)]
        else:
            pieces = self._by_prefixes(sample)
        self._require_rendered(messages[: sample.turns[-1] + 1], tools, more)
        return pieces

    def _by_prefixes(self, sample: Conversation) -> list[_Piece]:
        """One piece, or several where the template renders earlier turns in another way than the last."""
        messages, _, tools, more = sample
        prompts = {}
        texts = {}
        for i in sample.turns:
            texts[i] = self._closed(messages[: i + 1], tools, more)
            # The longest of what a generation prompt may supply: without thinking, an empty thought.
            offered = [
                self._render(messages[:i], tools, more | variant, prompt=True)[0]
                for variant in self.template.variants
            ]
            fitting = [prompt for prompt in offered if texts[i].startswith(prompt)]
            if not fitting and i and (moved := _moved(offered, texts[i], messages[i - 1])):
                fitting = [moved[0]]
                texts[i] = moved[0] + moved[1]
            if not fitting:
                begins = texts[i][_common(texts[i], offered[0]) :][:40]
                raise DataError(
                    f"messages[{i}]: the template's generation prompt, ending in {offered[0][-40:]!r}, is "
                    f"not how it begins this turn, {begins!r}; name a template that "
                    "does so with --data.chat-template, or one with {% generation %}"
                )
            prompts[i] = max(fitting, key=len)
        pieces = []
        left = list(sample.turns)
        while left:
            whole = texts[left[-1]]
            here = {i: self._end(len(prompts[i]), texts[i], whole) for i in left}
            spans = [(len(prompts[i]), end) for i, end in here.items() if end]
            pieces.append(_Piece(whole, spans, [self._edge(prompts[i]) for i, end in here.items() if end]))
            left = [i for i, end in here.items() if not end]
        return pieces[::-1]

    def _edge(self, prompt: str) -> tuple[int, int]:
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
        shown = text.rstrip()
        ends = [found for found in self.marker.names.finditer(text) if found.end() == len(shown)]
        if ends and ends[-1].group() not in self.marker.closers:
            return text
        answer = dict(role="user", content="?")
        called = messages[-1].get("tool_calls")
        if called:
            answer = dict(role="tool", content="?", name="?", tool_call_id=called[0].get("id"))
        try:
            longer = self._render([*messages, answer], tools, more)[0]
        except DataError:  # a template without such a role
            longer = ""
        begins = self.marker.names.match(longer, len(text)) if longer.startswith(text) else None
        return text + (begins.group() if begins else self.template.special["eos_token"])

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
        return self.template.render_marked(messages, tools, prompt=prompt, **more)

    def _require_rendered(self, messages: list[dict], tools: list | None, more: dict[str, Any]) -> None:
        """DataError for a role that the template leaves out in silence; looks once for each role."""
        for role in {message["role"] for message in messages} - self.rendered:
            shown = [m | dict(content="a\ufffdb") if m["role"] == role else m for m in messages]
            try:
                text = self._render(shown, tools, more)[0]
            except DataError:
                text = "a\ufffdb"  # what it refuses it does not leave out
            if "a\ufffdb" not in text and "a\\ufffdb" not in text:
                raise DataError(
                    f"messages: the chat template ({self.template.source}) leaves out the role {role!r}"
                )
            self.rendered.add(role)

    # ---- tokens ----

    def _cut(self, plan: list[_Piece], encoded: list[list[Encoded]]) -> list[Tokens] | DataError:
        """Each piece's tokens up to the last trained one."""
        found = []
        for piece, (whole, *ends) in zip(plan, encoded, strict=True):
            if not all(_begins(whole, end, *edge) for end, edge in zip(ends, piece.edges, strict=True)):
                whole = self._in_parts(piece)
            if whole is None:
                start = piece.spans[0][0]
                return DataError(
                    f"{piece.text[max(start - 20, 0) : start + 20]!r}: a turn's first characters make one "
                    "token with those before them, so no answer can begin so"
                )
            trained = np.zeros(len(whole.ids), bool)
            for low, high in piece.spans:
                trained |= (whole.starts < high) & (whole.ends > low)
            places = np.flatnonzero(trained)
            if not places[1:].size and not (places.size and places[0] > 0):
                return DataError("no token of it is trained: is its answer empty?")
            last = int(places[-1]) + 1
            found.append(Tokens(whole.ids[:last], trained[:last]))
        return found

    def _in_parts(self, piece: _Piece) -> Encoded | None:
        """The tokens where each trained span begins a text of its own, as it does for a model that answers.

        None where these tokens are not the same text: some tokenizers put a blank before every text.
        """
        edges = [0, *(low for low, _ in piece.spans), len(piece.text)]
        cuts = list(itertools.pairwise(edges))
        parts = self.marker.encode([piece.text[low:high] for low, high in cuts])
        joined = [np.concatenate([getattr(p, name) for p in parts]) for name in ("ids", "starts", "ends")]
        shifts = np.repeat([low for low, _ in cuts], [len(p.ids) for p in parts])
        same = self.marker.plain.decode(joined[0]) == piece.text
        return Encoded(joined[0], joined[1] + shifts, joined[2] + shifts) if same else None


def _texts(piece: _Piece) -> list[str]:
    """What is to be encoded of a piece: all of it, and the ends of its prompts."""
    return [piece.text, *(piece.text[special:end] for end, special in piece.edges)]


def _begins(whole: Encoded, part: Encoded, end: int, start: int) -> bool:
    """Whether a text has the tokens of one of its parts where that lies."""
    first = int(whole.starts.searchsorted(start))
    last = first + len(part.ids)
    at_edge = last == len(whole.ids) or whole.starts[last] >= end
    return bool(at_edge) and np.array_equal(whole.ids[first:last], part.ids)


def _moved(prompts: list[str], text: str, before: dict[str, Any]) -> tuple[str, str] | None:
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
        if low and any(one in shared for one in (content.strip(), json.dumps(content)[1:-1])):
            found.append((low, prompt, text[text.rindex(shared) + low :]))
    return max(found)[1:] if found else None


def _common(a: str, b: str) -> int:
    """How many characters both begin with."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def encode(
    samples: Iterable[Sample], tokenizer: Tokenizer, template: ChatTemplate | None = None
) -> list[list[Tokens]]:
    """The sequences of each sample. DataError for the first one that cannot be trained on."""
    found = Encoder(tokenizer, template or load_template(tokenizer)).encode(list(samples))
    for one in found:
        if isinstance(one, DataError):
            raise one
    return found  # pyrefly: ignore[bad-return]


def chat_prompt(
    messages: Sequence[dict[str, Any]],
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
    tools: list | None = None,
    **more: Any,
) -> np.ndarray:
    """Ids [n] of a conversation up to where the assistant's next turn begins, as training had it.

    template: None for the tokenizer's own, with today's date. more: what else it reads, as enable_thinking.
    DataError for messages that are none, that the template refuses, or that hold a special token.
    """
    template = template or load_template(tokenizer, now=True)
    marker = Marker(tokenizer)
    parsed = parse_messages(list(messages), "messages")
    marker.require_text(parsed)
    return marker.encode([template.render(parsed, tools, prompt=True, **more)])[0].ids


def turn_ends(
    tokenizer: Tokenizer, template: ChatTemplate | None = None, tools: list | None = None
) -> tuple[int, ...]:
    """The ids by which the assistant's turns end in training, at which generation is to stop.

    First the end of an answer, then that of a call, where the template shows calls and ends these with
    another token: gpt-oss has <|return|> and <|call|>, GLM the mark of the user and that of an observation.
    tools: as a prompt has them; None where it has none.
    DataError for a template that no answer can be learned in.
    """
    asked = dict(role="user", content="a")
    call = dict(id="abcdefgh1", type="function", function=dict(name="b", arguments=dict(c="d")))
    answers = [dict(role="assistant", content="b"), dict(role="assistant", content="", tool_calls=[call])]
    tool = dict(
        name="b", description="b", parameters=dict(type="object", properties=dict(c=dict(type="string")))
    )
    given = [tools, tools or [dict(type="function", function=tool)]]
    special = Marker(tokenizer).special.values()
    found: list[int] = []
    for answer, offered in zip(answers, given, strict=True):
        try:
            ((*_, sequence),) = encode([Conversation([asked, answer], tools=offered)], tokenizer, template)
        except DataError:
            if not found:
                raise
            continue
        # A line break that {% generation %} holds behind the end is trained, but it ends nothing.
        found += [one for one in sequence.ids[sequence.trained].tolist() if one in special][-1:]
    if not found:
        raise DataError("the chat template ends no turn with a special token, so no answer would ever end")
    return tuple(dict.fromkeys(found))


def turn_end(tokenizer: Tokenizer, template: ChatTemplate | None = None) -> int:
    """The id by which an answer ends in training: the first of `turn_ends`."""
    return turn_ends(tokenizer, template)[0]
