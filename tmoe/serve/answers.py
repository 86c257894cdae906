"""Writes answers in OpenAI's form: whole bodies, and the chunks of a stream.

next: serve/front.py
"""

from __future__ import annotations

import codecs
import json
import math
import time
import uuid
from typing import Any

from tmoe.data.tokenizer import Tokenizer
from tmoe.serve.messages import Part
from tmoe.serve.parse_tools import Call, Delta, Plain, parser, text_of
from tmoe.serve.protocol import Asked
from tmoe.serve.token_text import token_text

MARK = "\0"  # a content in whose place others are put
# OpenAI has no reason for an answer that failed: the reply then ends with an error
FINISH = dict(stop="stop", length="length", cancel="abort", error="")


class Choice:
    """One answer of a request, while its parts arrive."""

    def __init__(self, asked: Asked, index: int, tokenizer: Tokenizer):
        self.asked, self.index, self.tokenizer = asked, index, tokenizer
        self.prompt = index // asked.n
        template = text_of(asked.chat_template)
        self.parser = parser(template, asked.tools, asked.thinks) if asked.chat else Plain()
        self.text = self.reasoning = self.finish = self.error = ""
        self.calls: list[Call] = []
        self.tops: list[tuple[int, float, list[tuple[int, float]]]] = []
        self.prompt_tops: list[tuple[int, float | None, list[tuple[int, float]]]] = []
        if asked.details.prompt_logprobs:  # nothing predicts the first token
            self.prompt_tops.append((asked.prompts[self.prompt][0], None, []))
        self.routes: list = []
        self.weights: list = []
        self.prompt_routes: list = []
        self.prompt_weights: list = []
        self.tokens = self.cached = self.offset = 0
        self.characters = codecs.getincrementaldecoder("utf-8")("replace")  # of the tokens up to `offset`
        self.begun = False  # whether a chunk of it was sent
        self.frame: tuple[bytes, bytes] | None = None  # the bytes around the content in events of text alone

    def add(self, text: str, tokens: int, last: bool = False) -> Delta:
        """Adds a text of `tokens` tokens. Returns what it says. last: no text follows."""
        delta = self.parser.add(text)
        if last:
            rest = self.parser.end()
            delta.content += rest.content
            delta.reasoning += rest.reasoning
            delta.calls += rest.calls
        self.text += delta.content
        self.reasoning += delta.reasoning
        self.calls += delta.calls
        self.tokens += tokens
        return delta

    def take(self, part: Part) -> tuple[Delta, Part]:
        """Adds a part. Returns what the part says, and its tokens."""
        if self.asked.silent:
            part.text, part.ids, part.tops, part.routes, part.weights = "", [], [], [], []
            part.finish = part.finish and "length"
        delta = self.add(part.text, len(part.ids), bool(part.finish))
        if part.finish:
            self.finish, self.error, self.cached = FINISH[part.finish], part.error, part.cached
        self.tops += self.own_tops(part)
        if part.prompt_tops is not None:
            ids = self.asked.prompts[self.prompt]
            rest = [(i, own, tops) for i, (own, tops) in zip(ids[1:], part.prompt_tops, strict=True)]
            self.prompt_tops = [self.prompt_tops[0], *rest]
        self.routes += part.routes
        self.weights += part.weights
        self.prompt_routes, self.prompt_weights = part.prompt_routes or [], part.prompt_weights or []
        if self.finish == "stop" and self.calls:
            self.finish = "tool_calls"
        return delta, part

    @staticmethod
    def own_tops(part: Part) -> list[tuple[int, float, list[tuple[int, float]]]]:
        """For each token: its id, log-prob and alternatives."""
        return [(i, own, tops) for i, (own, tops) in zip(part.ids, part.tops, strict=False)]

    # ---- log-probs ----

    def logprobs(self, tops: list) -> dict[str, Any] | None:
        """Log-probs of tokens, in the form of the route. None if they were not asked for."""
        if self.asked.logprobs is None:
            return None
        return self._of_chat(tops) if self.asked.chat else self._of_text(tops)

    def _of_chat(self, tops: list) -> dict[str, Any]:
        many = self.asked.logprobs
        content = [
            self._token(i, own) | dict(top_logprobs=[self._token(*one) for one in others[:many]])
            for i, own, others in tops
        ]
        return dict(content=content, refusal=None)

    def _token(self, i: int, logprob: float | None) -> dict[str, Any]:
        shown, raw = self.token(i)
        return dict(token=shown, logprob=finite(logprob), bytes=raw)

    def token(self, i: int) -> tuple[str, list[int] | None]:
        """A token's text, with U+FFFD for a part of a character, and its bytes, if they are known."""
        text, raw = token_text(self.tokenizer, i)
        return text, None if raw is None else list(raw)

    def _of_text(self, tops: list) -> dict[str, Any]:
        tokens = [self.token(i)[0] for i, _, _ in tops]
        hidden = self.tokenizer.special if self.asked.details.skip_special else ()
        offsets = []
        for place, (i, _, _) in enumerate(tops):
            if place == len(self.prompt_tops) > 0:  # the answer's text is decoded apart from the prompt's
                self.offset += len(self.characters.decode(b"", final=True))
            # an echo shows the whole prompt
            shown = i not in hidden or place < len(self.prompt_tops)
            offsets.append(self._advance(i) if shown else self.offset)
        others = [self._by_text(*top) for top in tops]
        own = [finite(p) for _, p, _ in tops]
        return dict(tokens=tokens, token_logprobs=own, top_logprobs=others, text_offset=offsets)

    def _advance(self, i: int) -> int:
        """The next token's place in the text, in characters; a part of a character has its place."""
        text, raw = token_text(self.tokenizer, i)
        goes_on = raw is not None and raw[:1] and raw[0] & 0xC0 == 0x80
        place = self.offset + (not goes_on and bool(self.characters.getstate()[0]))
        if raw is not None:
            self.offset += len(self.characters.decode(raw))
        else:
            self.characters.reset()
            self.offset = place + len(text)
        return place

    def _by_text(self, i: int, own: float | None, found: list) -> dict[str, float | None] | None:
        """The most probable tokens and the token itself, as OpenAI has them; of equal texts the first one."""
        if own is None:
            return None
        shown: dict[str, float | None] = {}
        for other, logprob in [*found[: self.asked.logprobs], (i, own)]:
            shown.setdefault(self.token(other)[0], finite(logprob))
        return shown

    # ---- bodies ----

    def whole(self) -> dict[str, Any]:
        """The answer as an element of choices."""
        found: dict[str, Any] = dict(index=self.index, finish_reason=self.finish)
        if self.asked.chat:
            message: dict[str, Any] = dict(role="assistant", content=self.text, refusal=None)
            if self.reasoning:
                message["reasoning_content"] = self.reasoning
            if self.calls:
                message["tool_calls"] = [self._call(call) for call in self.calls]
                message["content"] = self.text or None
            found |= dict(message=message, logprobs=self.logprobs(self.tops))
        else:
            text = (self.asked.texts[self.prompt] if self.asked.echo else "") + self.text
            text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            found |= dict(text=text, logprobs=self.logprobs([*self.prompt_tops, *self.tops]))
        ours: dict[str, Any] = {}
        if self.asked.routes:
            ours |= dict(routes=self.routes, weights=self.weights)
        if self.asked.prompt_routes:
            tokens = [self.token(i)[0] for i in self.asked.prompts[self.prompt]]
            ours |= dict(prompt_tokens=tokens, prompt_routes=self.prompt_routes)
            ours |= dict(prompt_weights=self.prompt_weights)
        return found | dict(tmoe=ours) if ours else found

    @staticmethod
    def _call(call: Call) -> dict[str, Any]:
        function = dict(name=call.name, arguments=call.arguments)
        # nine letters and digits, because Mistral's templates refuse any other id
        return dict(id=uuid.uuid4().hex[:9], type="function", function=function)

    def chunk(self, delta: Delta, part: Part) -> dict[str, Any] | None:
        """The content of a part, as an element of a chunk's choices. None if it adds nothing yet."""
        first, self.begun = not self.begun, True
        if not (delta or first or self.finish or self.asked.routes or self.asked.logprobs is not None):
            return None
        found: dict[str, Any] = dict(index=self.index, finish_reason=self.finish or None)
        if self.asked.chat:
            said: dict[str, Any] = dict(role="assistant") if first else {}
            if delta.content or first:
                said["content"] = delta.content
            if delta.reasoning:
                said["reasoning_content"] = delta.reasoning
            if delta.calls:
                start = len(self.calls) - len(delta.calls)
                calls = [self._call(call) for call in delta.calls]
                said["tool_calls"] = [dict(index=start + i) | call for i, call in enumerate(calls)]
            found["delta"] = said
        else:
            echo = self.asked.texts[self.prompt] if self.asked.echo and first else ""
            echo = echo.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            found["text"] = echo + delta.content
        found["logprobs"] = self.logprobs(self.own_tops(part))
        if self.asked.routes:
            found["tmoe"] = dict(routes=part.routes, weights=part.weights)
        return found


class Reply:
    """The choices of a request, and the fields that all its bodies have."""

    def __init__(self, asked: Asked, model: str, tokenizer: Tokenizer):
        self.asked = asked
        kind = ("chat.completion" if asked.chat else "text_completion", "chatcmpl" if asked.chat else "cmpl")
        self.frame: dict[str, Any] = dict(id=f"{kind[1]}-{uuid.uuid4().hex}", created=int(time.time()))
        self.frame["model"] = model
        self.notes = dict(tmoe=dict(left_out=asked.left_out)) if asked.left_out else {}
        self.kind = kind[0]
        self.choices = [Choice(asked, i, tokenizer) for i in range(asked.n * len(asked.prompts))]
        # whether the events of most parts have only a text
        self.quick = not (asked.silent or asked.routes or asked.logprobs is not None)

    def failed(self) -> str:
        """Which answer failed, and why; "" if none did."""
        found = next((choice for choice in self.choices if choice.error), None)
        return f"choices[{found.index}]: the answer failed: {found.error}" if found else ""

    def usage(self) -> dict[str, Any]:
        """Counts of tokens. Each prompt counts once."""
        prompt = sum(map(len, self.asked.prompts))
        made = sum(choice.tokens for choice in self.choices)
        firsts = self.choices[:: self.asked.n]
        cached = sum(choice.cached for choice in firsts)
        total = dict(prompt_tokens=prompt, completion_tokens=made, total_tokens=prompt + made)
        return total | dict(prompt_tokens_details=dict(cached_tokens=cached))

    def whole(self) -> dict[str, Any]:
        """The body without a stream."""
        choices = [choice.whole() for choice in self.choices]
        return self.frame | dict(object=self.kind, choices=choices, usage=self.usage()) | self.notes

    def event(self, choice: Choice, part: Part) -> bytes:
        """The event of a part; b"" if it adds nothing yet."""
        found = choice.chunk(*choice.take(part))
        return b"" if found is None else self._event([found])

    def quick_event(self, choice: Choice, text: str, tokens: int) -> bytes | None:
        """`event` of a part that has nothing but a text of `tokens` tokens, at a tenth of its cost.

        None: the part needs `event`, since its chunk has more than the text; nothing has been added then.
        """
        if not (self.quick and choice.begun) or self.notes:
            return None
        delta = choice.add(text, tokens)
        if delta.reasoning or delta.calls:
            found = choice.chunk(delta, Part(0, 0))
            return b"" if found is None else self._event([found])
        if not delta.content:
            return b""
        if choice.frame is None:
            found = choice.chunk(Delta(MARK), Part(0, 0))
            before, _, after = self._event([found]).partition(json.dumps(MARK).encode())
            choice.frame = before, after
        return choice.frame[0] + json.dumps(delta.content).encode() + choice.frame[1]

    def usage_event(self) -> bytes:
        return self._event([], usage=self.usage())

    def _event(self, choices: list, **more: Any) -> bytes:
        kind = f"{self.kind}.chunk" if self.asked.chat else self.kind
        more = more or (dict(usage=None) if self.asked.usage else {})
        more, self.notes = more | self.notes, {}  # notes are in the first event only
        return event(self.frame | dict(object=kind, choices=choices) | more)


def event(value: Any) -> bytes:
    """A server-sent event with a JSON value."""
    return b"data: " + json.dumps(value, allow_nan=False).encode() + b"\n\n"


def finite(value: float | None) -> float | None:
    """A log-prob in JSON, which has no infinities: OpenAI writes -9999 for a probability of 0."""
    return value if value is None or math.isfinite(value) else -9999.0
