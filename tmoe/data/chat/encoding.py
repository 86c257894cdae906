"""Encodes conversations as token ids and marks which of them are trained.

The trained tokens are those that a model has to generate: an assistant's turn with the token that ends it,
but not its header, nor anything else that the generation prompt supplies. If a template marks this part by
{% generation %}, the mark is used. Otherwise the conversation is rendered with and without the turn:

    render(messages before, with generation prompt)      must be the beginning of
    render(messages before and the turn)                 in which the text after it is trained

This must hold in text and in tokens. A turn is learned after the generation prompt, because the model reads
that prompt when it generates, even if a template leaves out a part of the prompt once there is an answer.
Some templates render an earlier turn differently from the last one: Qwen3 drops its thoughts, gpt-oss ends
it with another token. A conversation then becomes several sequences, each of which ends with a turn rendered
as the last one. So every turn is learned once.

    template = load_template(tokenizer)
    sequence, = encode([Conversation(messages)], tokenizer, template)[0]     ids and trained, arrays [n]
    ids = chat_prompt(messages, tokenizer)                                   to generate from
    stops = turn_ends(tokenizer, template)                                   the tokens that end a turn

next: data/chat/chat_dataset.py
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tmoe.data.chat.calls import objects
from tmoe.data.chat.conversations import Conversation, Plain, Sample, parse_messages
from tmoe.data.chat.held import (
    CALLS,
    PASSED,
    THOUGHTS,
    Item,
    absent,
    as_python,
    holds,
    require_asked,
    shadow,
    squeezed,
    walk,
)
from tmoe.data.chat.pieces import Pieces, RenderedText
from tmoe.data.chat.special_tokens import Encoded, Marker
from tmoe.data.chat.spelling import speller_of
from tmoe.data.chat.template import ChatTemplate, load_template
from tmoe.data.tokenizer import DataError, Tokenizer


class Tokens(NamedTuple):
    """One sequence to train on; it ends with its last trained token."""

    ids: np.ndarray
    """[n] token ids, of the tokenizer's dtype"""
    trained: np.ndarray
    """[n] bool: whether the token is trained, as a target"""


class Encoder:
    """Encodes samples with one tokenizer and one template. The function `encode` is its short form."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, strict: bool = False) -> None:
        """strict: whether thoughts, calls and tools that the template leaves out are an error.

        If not, they are listed in `left`. It is always an error if the template leaves out a whole turn or a
        message that is to be answered.
        """
        self.marker = Marker(tokenizer, template)
        self.template = template
        self.strict = strict
        self.left: list[set[str]] = []
        """for each sample of the last call of `encode`, the fields that the template leaves out"""
        self._pieces = Pieces(self.marker, template)
        self._special = np.array([*self.marker.special.values()])
        self._shadows: dict[str, tuple[set[int], list[Counter[str]] | None]] = {}

    def encode(self, samples: Sequence[Sample]) -> list[list[Tokens] | DataError]:
        """The sequences of each sample, or the error if it cannot be trained on."""
        planned: list[list[RenderedText] | DataError] = []
        self.left = [set() for _ in samples]
        for sample, left in zip(samples, self.left, strict=True):
            try:
                planned.append(
                    self._plain(sample) if isinstance(sample, Plain) else self._conversation(sample, left)
                )
            except DataError as error:
                planned.append(error)
        pieces = [piece for plan in planned if not isinstance(plan, DataError) for piece in plan]
        texts = [text for piece in pieces for text in _texts(piece)]
        try:
            encoded = iter(self.marker.encode(texts))
        except UnicodeEncodeError as error:
            if len(samples) == 1:
                return [DataError(f"not Unicode text: {error.reason} in {error.object[:40]!r}")]
            left = self.left
            results = [self.encode([sample])[0] for sample in samples]
            self.left = left
            return results
        return [
            plan
            if isinstance(plan, DataError)
            else self._cut(plan, [[next(encoded) for _ in _texts(piece)] for piece in plan])
            for plan in planned
        ]

    # ---- texts ----

    def _plain(self, sample: Plain) -> list[RenderedText]:
        """The two texts, between the tokenizer's opening token and its separator, each of these only once."""
        opening, eos = self.marker.opening, self.template.special["eos_token"]
        prompt = sample.prompt if opening and sample.prompt.startswith(opening) else opening + sample.prompt
        completion = sample.completion.rstrip()
        text = prompt + (completion if eos and completion.endswith(eos) else sample.completion + eos)
        return [RenderedText(text, [(len(prompt), len(text))], [0], [self._pieces.edge(prompt)])]

    def _conversation(self, sample: Conversation, left: set[str]) -> list[RenderedText]:
        """The texts of a conversation. The fields that the template leaves out are added to `left`."""
        if not sample.turns:
            raise DataError("no turn of the assistant to learn")
        last = sample.turns[-1] + 1
        sample = sample._replace(messages=objects(sample.messages[:last]))
        self.marker.require_text(sample.messages, sample.tools, sample.more)
        pieces = self._pieces(sample)
        self._require_held(sample, pieces, left)
        return pieces

    def _require_held(self, sample: Conversation, pieces: list[RenderedText], left: set[str]) -> None:
        """DataError if the texts lack a required string; other fields that they lack are added to `left`."""
        messages, _, tools, _ = sample
        items = walk(messages, tools)[2]
        shapes, marks = self._shadow(sample)
        whole, turns = _shown(pieces)
        lacks = [
            n in shapes or not holds(turns.get(item.message, whole), item.text)
            for n, item in enumerate(items)
        ]
        learned = set(sample.turns)
        source = f"the chat template ({self.template.source})"
        for i in sample.turns:
            contents = [n for n, item in enumerate(items) if item.message == i and item.content]
            if contents and all(lacks[n] for n in contents):
                fields = ", ".join(sorted({items[n].field for n in contents}))
                raise DataError(
                    f"messages[{i}]: {source} leaves out {fields}, and so all of the turn; name a template "
                    "that shows it with --data.chat-template"
                )
        for item in itertools.compress(items, lacks):
            if item.field == THOUGHTS and item.message not in learned:
                continue  # many templates leave out earlier thoughts, so the model never reads them
            require_asked(item, messages, source)
            if self.strict and item.content:
                where = f"messages[{item.message}]: " if item.message >= 0 else ""
                raise DataError(f"{where}{source} leaves out {item.field}: {item.text[:40]!r}")
            left.add(item.field)
        left |= not_read(self.template, sample.more)
        self._require_no_new_mark(pieces, marks)
        for i in sample.turns:
            for call in messages[i].get(CALLS) or []:
                if (value := as_python(call["function"]["arguments"], turns[i])) is not None:
                    raise DataError(
                        f"messages[{i}]: {source} writes {value!r:.60} of a call's arguments as Python does, "
                        "not as JSON; name another with --data.chat-template"
                    )

    def _shadow(self, sample: Conversation) -> tuple[set[int], list[Counter[str]] | None]:
        """For conversations of this shape: indices of strings that their texts lack, and the texts' marks."""
        shadowed = shadow(sample.messages, sample.tools)
        key = json.dumps([shadowed[:2], sample.turns, sample.more], sort_keys=True, default=str)
        if key not in self._shadows:
            self._shadows[key] = self._look(sample, shadowed)
        return self._shadows[key]

    def _look(
        self, sample: Conversation, shadowed: tuple[list[dict], list | None, list[Item]]
    ) -> tuple[set[int], list[Counter[str]] | None]:
        """The result of `_shadow` for a shadow that has not been rendered yet."""
        messages, tools, items = shadowed
        try:
            pieces = self._pieces(sample._replace(messages=messages, tools=tools))
        except DataError:  # the template accepts only certain words; the strings themselves are searched for
            return set(), None
        whole, turns = _shown(pieces)
        lacks = {n for n, item in enumerate(items) if item.text not in turns.get(item.message, whole)}
        return lacks, [self._marks(piece) for piece in pieces]

    def _marks(self, piece: RenderedText) -> Counter[str]:
        return Counter(self.marker.names.findall(piece.text))

    def _require_no_new_mark(self, pieces: list[RenderedText], marks: list[Counter[str]] | None) -> None:
        """DataError if the texts hold a special token that the same conversation in other words does not."""
        if marks is None or len(marks) != len(pieces):
            return
        for piece, known in zip(pieces, marks, strict=True):
            if new := self._marks(piece) - known:
                raise DataError(
                    f"its texts make {next(iter(new))!r}, a special token that no text of the row holds"
                )

    # ---- tokens ----

    def _cut(self, plan: list[RenderedText], encoded: list[list[Encoded]]) -> list[Tokens] | DataError:
        """The tokens of each piece up to its last trained token, or an error if no answer can be learned."""
        sequences = []
        for piece, (whole, *ends) in zip(plan, encoded, strict=True):
            if not all(_begins(whole, end, *edge) for end, edge in zip(ends, piece.edges, strict=True)):
                whole = self._in_parts(piece)
            if whole is None:
                start = piece.spans[0][0]
                return DataError(
                    f"{piece.text[max(start - 20, 0) : start + 20]!r}: a turn's first characters make one "
                    "token with those before them, so no answer can begin with them"
                )
            trained = np.zeros(len(whole.ids), bool)
            for low, high in piece.spans:
                trained |= (whole.starts < high) & (whole.ends > low)
                # Phi-3's header token includes the blanks at the beginning of the answer; it is not trained.
                over = np.flatnonzero((whole.starts < low) & (whole.ends > low))
                trained[over[np.isin(whole.ids[over], self._special)]] = False
            places = np.flatnonzero(trained)
            if not places[1:].size and not (places.size and places[0] > 0):
                return DataError("no token of it is trained: is its answer empty?")
            last = int(places[-1]) + 1
            sequences.append(Tokens(whole.ids[:last], trained[:last]))
        return sequences

    def _in_parts(self, piece: RenderedText) -> Encoded | None:
        """The tokens of the text encoded in parts; a part begins with each trained span, as in generation.

        None if these tokens decode to another text: some tokenizers put a blank before every text.
        """
        edges = [0, *(low for low, _ in piece.spans), len(piece.text)]
        cuts = list(itertools.pairwise(edges))
        parts = self.marker.encode([piece.text[low:high] for low, high in cuts])
        joined = [np.concatenate([getattr(p, name) for p in parts]) for name in ("ids", "starts", "ends")]
        shifts = np.repeat([low for low, _ in cuts], [len(p.ids) for p in parts])
        same = self.marker.plain.decode(joined[0]) == piece.text
        return Encoded(joined[0], joined[1] + shifts, joined[2] + shifts) if same else None


def _texts(piece: RenderedText) -> list[str]:
    """The texts of a piece to encode: all of it, and the end of each of its prompts."""
    return [piece.text, *(piece.text[special:end] for end, special in piece.edges)]


def _begins(whole: Encoded, part: Encoded, end: int, start: int) -> bool:
    """Whether `whole` has the tokens of `part`, which is its text from character `start` to `end`."""
    first = int(whole.starts.searchsorted(start))
    last = first + len(part.ids)
    at_edge = last == len(whole.ids) or whole.starts[last] >= end
    return bool(at_edge) and np.array_equal(whole.ids[first:last], part.ids)


def _shown(pieces: list[RenderedText]) -> tuple[str, dict[int, str]]:
    """All texts of the pieces, and the trained text of each turn, both without blanks."""
    turns: dict[int, str] = {}
    for piece in pieces:
        for (low, high), i in zip(piece.spans, piece.turns, strict=True):
            turns[i] = turns.get(i, "") + squeezed(piece.text[low:high])
    return "".join(squeezed(piece.text) for piece in pieces), turns


def encode(
    samples: Iterable[Sample], tokenizer: Tokenizer, template: ChatTemplate | None = None
) -> list[list[Tokens]]:
    """The sequences of each sample.

    DataError for the first sample that cannot be trained on, or for which the template leaves out a thought,
    a call, a tool or a text.
    """
    results = Encoder(tokenizer, template or load_template(tokenizer), strict=True).encode(list(samples))
    for result in results:
        if isinstance(result, DataError):
            raise result
    return results  # pyrefly: ignore[bad-return]


def chat_prompt(
    messages: Sequence[dict[str, Any]],
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
    tools: list | None = None,
    **more: Any,
) -> np.ndarray:
    """Ids [n] of a conversation up to the beginning of the assistant's next turn, encoded as in training.

    template: None for the tokenizer's own, with today's date.
    more: other variables of the template, such as enable_thinking.
    DataError for malformed messages, or messages that the template refuses or that hold a special token.
    """
    template = template or load_template(tokenizer, now=True)
    marker = Marker(tokenizer, template)
    text = prompt_text(parse_messages(list(messages), "messages"), marker, template, tools, more)[0]
    return marker.encode([text])[0].ids


def prompt_text(
    messages: list[dict[str, Any]],
    marker: Marker,
    template: ChatTemplate,
    tools: list | None = None,
    more: dict[str, Any] | None = None,
) -> tuple[str, set[str]]:
    """The text of messages up to the beginning of the next turn, and the fields that it leaves out.

    Raises DataError as `chat_prompt` does.
    """
    more = more or {}
    marker.require_text(messages, tools, more)
    text = template.render(speller_of(template)(messages, tools), tools, prompt=True, **more)
    shown = squeezed(text)
    items = walk(messages, tools)[2]
    missing = absent(shown, items, lambda item: (item.field, messages[item.message]["role"]))
    asked = any(message["role"] == "user" for message in messages)
    for item in missing if asked else ():  # some templates render the system's text in the first question
        require_asked(item, messages, f"the chat template ({template.source})")
    left = {item.field for item in missing if item.field != THOUGHTS} | not_read(template, more)
    return text, left | not_named(messages, template, {item.field for item in items})


def not_named(messages: list[dict[str, Any]], template: ChatTemplate, texts: set[str]) -> set[str]:
    """The fields of messages without a string, as {"partial": true}, whose names the template does not have.

    texts: fields with strings, which the rendered text shows or not.
    """
    source = f"{template.text}{template.tools or ''}"
    fields = {name for message in messages for name, value in message.items() if value and name not in texts}
    return {name for name in fields - {*PASSED, CALLS} if name not in source}


def not_read(template: ChatTemplate, more: Iterable[str]) -> set[str]:
    """The names in a row's chat_template_kwargs that the template does not read."""
    return {f"chat_template_kwargs: {name}" for name in more if name not in template.reads}


def spoken(text: str, tokenizer: Tokenizer, template: ChatTemplate) -> str:
    """The part of a generated answer to put into the next prompt: the last text between special tokens.

    gpt-oss writes its thought and its answer between special tokens, which no message may hold, and its
    template renders only the answer.
    """
    parts = [part for part in Marker(tokenizer, template).forged.split(text) if part.strip()]
    return parts[-1] if parts else ""


def turn_ends(
    tokenizer: Tokenizer, template: ChatTemplate | None = None, tools: list | None = None
) -> tuple[int, ...]:
    """The ids that end the assistant's turns in training, at which generation must stop.

    The first id ends an answer. The id that ends a call follows if the template renders calls and ends them
    with another token: gpt-oss has <|return|> and <|call|>, GLM the marks of the user and of an observation.
    An earlier answer may end with another token than the last: Phi-3 has <|end|>, and after the last answer
    <|endoftext|>.
    tools: the tools of a prompt, if it has any.
    DataError for a template with which no answer can be learned.
    """
    asked = dict(role="user", content="a")
    call = dict(id="abcdefgh1", type="function", function=dict(name="b", arguments=dict(c="d")))
    answers = [dict(role="assistant", content="b"), dict(role="assistant", content="", tool_calls=[call])]
    tool = dict(
        name="b", description="b", parameters=dict(type="object", properties=dict(c=dict(type="string")))
    )
    given = [tools, tools or [dict(type="function", function=tool)]]
    encoder = Encoder(tokenizer, template or load_template(tokenizer))
    special = encoder.marker.special.values()
    ends: list[int] = []
    for answer, offered in zip(answers, given, strict=True):
        once, twice = [asked, answer], [asked, answer, asked, answer]
        both = [Conversation(messages, tools=offered) for messages in (once, twice)]
        last, earlier = encoder.encode(both if answer is answers[0] else both[:1] * 2)
        if isinstance(last, DataError):
            if not ends:
                raise last
            continue
        for sequence in last if isinstance(earlier, DataError) else [*last, *earlier]:
            ends += _ends(sequence, special)
    if not ends:
        raise DataError("the chat template ends no turn with a special token, so no answer would ever end")
    return tuple(dict.fromkeys(ends))


def _ends(sequence: Tokens, special: Collection[int]) -> list[int]:
    """The special token that ends each trained part of a sequence.

    A line break after that token, within {% generation %}, is trained too, but it is not the end.
    """
    ids, trained = sequence.ids.tolist(), sequence.trained.tolist()
    ends = []
    for on, part in itertools.groupby(zip(ids, trained, strict=True), key=lambda token: token[1]):
        ends += [token for token, _ in part if on and token in special][-1:]
    return ends


def turn_end(tokenizer: Tokenizer, template: ChatTemplate | None = None) -> int:
    """The id that ends an answer in training: the first of `turn_ends`."""
    return turn_ends(tokenizer, template)[0]
