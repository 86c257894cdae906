"""Reads the body of a request: each field is served, accepted with its neutral value, or refused by name.

docs/serve.md has the table of fields.

next: serve/answers.py
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from tmoe.config.check import ConfigError
from tmoe.data.chat.conversations import parse_messages
from tmoe.data.chat.encoding import prompt_text, turn_ends
from tmoe.data.chat.held import TOOLS
from tmoe.data.chat.special_tokens import Marker
from tmoe.data.chat.template import ChatTemplate
from tmoe.data.tokenizer import DataError
from tmoe.generate.generation_config import sampling_of
from tmoe.generate.pages import Span, alone
from tmoe.generate.requests import MOST_TOP, Details
from tmoe.generate.sampler import Sampling
from tmoe.serve.messages import Ready
from tmoe.serve.parse_tools import text_of, thought_tags

MOST_N, MOST_STOPS, MOST_PROMPTS, MOST_TOOLS = 128, 4, 128, 128
MOST_MESSAGES = 4096  # gpt-oss's template, for example, needs time that grows with the square of their number
CHAT_TOKENS, TEXT_TOKENS = 1024, 16  # most tokens of an answer, unless the request says otherwise
SEEDS = 2**31  # seeds are taken modulo this
START = 16  # characters for each token of --max-len: texts with more are looked at before they are encoded
BOTH = {
    *("model", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream", "stream_options"),
    *("logprobs", "top_k", "min_p", "min_tokens", "repetition_penalty", "stop_token_ids", "tmoe"),
    "skip_special_tokens",
}
CHAT = BOTH | {"messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice"}
CHAT |= {"chat_template_kwargs"}
TEXT = BOTH | {"prompt", "echo"}
# Fields without an effect on the answer: any value is accepted.
WITHOUT_EFFECT = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key"}
# Fields that are accepted with these values only.
NEUTRAL: dict[str, tuple[Any, ...]] = dict(
    frequency_penalty=(0,),
    presence_penalty=(0,),
    logit_bias=({},),
    response_format=({"type": "text"},),
    parallel_tool_calls=(True,),
    modalities=(["text"],),
    service_tier=("auto", "default"),
    best_of=(1,),
    suffix=("",),
)


class Refused(Exception):
    """A request that is refused, with its HTTP status and the fields of OpenAI's error."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.message, self.param, self.code = message, param, code

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, self.param, self.code)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's form of an error."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    message = message.encode("utf-8", "replace").decode()
    return dict(error=dict(message=message, type=kind, param=param, code=code))


@dataclass
class Asked:
    """A request that can be answered."""

    chat: bool
    prompts: list[list[int]]
    texts: list[str]
    """of the prompts, for echo"""
    sampling: Sampling
    n: int
    details: Details
    stream: bool
    usage: bool
    """whether a stream ends with the count of tokens"""
    logprobs: int | None
    """number of alternatives; None: no log-probs"""
    echo: bool
    silent: bool
    """no token is returned (max_tokens 0 with echo)"""
    tools: list | None
    chat_template: ChatTemplate | None
    thinks: bool
    """whether the prompt ends within a thought"""
    routes: bool
    prompt_routes: bool
    left_out: list[str] = field(default_factory=list)
    """fields of messages, and variables, that the chat template does not show"""


def parse_json(raw: bytes) -> dict[str, Any]:
    """The object in a body."""
    try:
        text = raw.decode("utf-8")
        found = json.loads(text, parse_constant=_constant, object_pairs_hook=_object)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(400, f"body: not UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise Refused(400, "body: a text holds half of a surrogate pair") from None
    except RecursionError:
        raise Refused(400, "body: nested too deeply") from None
    except ValueError as error:
        raise Refused(400, f"body: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Refused(400, "body: must be an object")
    return found


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise Refused(400, f"body: {twice[:64]!r} is given twice in one object")
    return found


class Fields:
    """The fields of a body, read by type and range."""

    def __init__(self, body: Mapping[str, Any], served: set[str]):
        self.body = body
        for name, value in body.items():
            if value is None or name in served or name in WITHOUT_EFFECT:
                continue
            if name not in NEUTRAL:
                self.refuse(name[:64], "is not served here; leave it out", "unknown_parameter")
            if not any(_same(value, one) for one in (*NEUTRAL[name], *self.same(name))):
                valid = " or ".join(json.dumps(one) for one in NEUTRAL[name])
                self.refuse(name, f"valid here: {valid}, or leave it out")

    def same(self, name: str) -> tuple[Any, ...]:
        """A neutral value that follows from another field: the best n of n answers are all of them."""
        return (self.body.get("n"),) if name == "best_of" and "n" in self.body else ()

    def refuse(self, name: str, wrong: str, code: str | None = None) -> NoReturn:
        value = self.body.get(name)
        shown = "" if name not in self.body else f"={json.dumps(value)[:60]}"
        raise Refused(400, f"{name}{shown}: {wrong}", name, code)

    def number(self, name: str, low: float, high: float, default: Any = None, whole: bool = False) -> Any:
        value = self.body.get(name)
        if value is None:
            return default
        kind = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not (kind and low <= value <= high):
            a = "a whole number" if whole else "a number"
            self.refuse(name, f"must be {a} from {_plain(low)} to {_plain(high)}")
        return value

    def switch(self, name: str, default: bool = False) -> bool:
        value = self.body.get(name)
        if not isinstance(value, bool | None):
            self.refuse(name, "must be true or false")
        return default if value is None else value

    def object(self, name: str) -> dict[str, Any]:
        value = self.body.get(name)
        if not isinstance(value, dict | None):
            self.refuse(name, "must be an object")
        return value or {}

    def inner(self, name: str, known: set[str]) -> dict[str, bool]:
        """An object of switches."""
        found = self.object(name)
        for key, value in found.items():
            if key not in known or not isinstance(value, bool | None):
                self.refuse(name, f"valid: {', '.join(sorted(known))}, each true or false")
        return {key: bool(value) for key, value in found.items()}


def _plain(bound: float) -> str:
    """A bound of a field with all its digits."""
    return str(int(bound)) if float(bound).is_integer() else f"{bound:g}"


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


class Protocol:
    """Turns bodies into requests of one model."""

    def __init__(self, model: str, ready: Ready, template: ChatTemplate | None, no_template: str = ""):
        """no_template: why there is no template."""
        self.model, self.ready, self.template, self.no_template = model, ready, template, no_template
        self.base = sampling_of(ready.generation)
        # made once, because a Marker reads the whole tokenizer again
        self.marker = Marker(ready.tokenizer, template) if template else None
        self.ends = self._turn_ends() if template else ()

    def chat(self, body: Mapping[str, Any]) -> Asked:
        """A request of /v1/chat/completions."""
        fields = Fields(body, CHAT)
        self._require_model(fields)
        tools = self._tools(fields)
        if self.template is None or self.marker is None:
            raise Refused(400, f"messages: {self.no_template}", "messages")
        more = fields.object("chat_template_kwargs")
        if taken := sorted({"messages", "tools", "prompt", "add_generation_prompt", "self"} & more.keys()):
            fields.refuse("chat_template_kwargs", f"{taken[0]} is not a variable of the template")
        messages = self._messages(fields)
        try:
            parsed = parse_messages(messages, "messages")
            text, left = prompt_text(parsed, self.marker, self.template, tools, more)
            ids = self._encoded(text, lambda text: self.marker.encode([text])[0].ids, "messages")
        except RecursionError:
            raise Refused(400, "messages: nested too deeply", "messages") from None
        except (DataError, ConfigError, TypeError) as error:
            raise Refused(400, str(error)[:500], "messages") from None
        if TOOLS in left:
            fields.refuse("tools", f"the chat template ({self.template.source}) does not show them")
        if fields.switch("logprobs"):
            logprobs = fields.number("top_logprobs", 0, MOST_TOP, 0, whole=True)
        else:
            logprobs = None
            if fields.body.get("top_logprobs") not in (None, 0):
                fields.refuse("top_logprobs", "needs logprobs: true")
        most = fields.number("max_completion_tokens", 1, 2**20, whole=True)
        other = fields.number("max_tokens", 1, 2**20, whole=True)
        if most is not None and other is not None and most != other:
            fields.refuse("max_tokens", f"max_completion_tokens is {most}; give one of them")
        asked = self._asked(fields, True, [ids], most or other, logprobs)
        asked.tools, asked.left_out = tools, sorted(left)
        tags = thought_tags(text_of(self.template))
        asked.thinks = tags is not None and text.rstrip().endswith(tags[0])
        return asked

    def text(self, body: Mapping[str, Any]) -> Asked:
        """A request of /v1/completions."""
        fields = Fields(body, TEXT)
        self._require_model(fields)
        prompts = self._prompts(fields)
        logprobs = fields.number("logprobs", 0, MOST_TOP, None, whole=True)
        echo = fields.switch("echo")
        most = fields.number("max_tokens", 0 if echo else 1, 2**20, whole=True)
        return self._asked(fields, False, prompts, most, logprobs)

    # ---- parts of a body ----

    def _require_model(self, fields: Fields) -> None:
        model = fields.body.get("model")
        if model is not None and not isinstance(model, str):
            fields.refuse("model", "must be a text")
        if model is not None and model != self.model:
            wrong = f"model={model[:80]!r}: not served here; valid: {self.model!r}"
            raise Refused(404, wrong, "model", "model_not_found")

    def _tools(self, fields: Fields) -> list | None:
        tools, choice = fields.body.get("tools"), fields.body.get("tool_choice")
        if choice not in (None, "auto", "none"):
            fields.refuse("tool_choice", "valid here: auto or none")
        if tools is None or tools == []:
            return None
        if not isinstance(tools, list) or len(tools) > MOST_TOOLS:
            fields.refuse("tools", f"must be a list of up to {MOST_TOOLS} tools")
        found = [self._tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
        return None if choice == "none" else found

    @staticmethod
    def _tool(tool: Any, where: str) -> dict[str, Any]:
        """A tool without its fields of null, which count as left out."""
        inner = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(inner, dict):
            raise Refused(400, f"{where}: must be {{type: function, function: {{name, ...}}}}", "tools")
        inner = {name: value for name, value in inner.items() if value is not None}
        if not isinstance(inner.get("name"), str) or not inner["name"].strip():
            raise Refused(400, f"{where}.function.name: must be a text that is not empty", "tools")
        for name, kind, words in (("description", str, "a text"), ("parameters", dict, "an object")):
            if not isinstance(inner.get(name, kind()), kind):
                raise Refused(400, f"{where}.function.{name}: must be {words}", "tools")
        if inner.pop("strict", False) is not False:
            wrong = f"{where}.function.strict: valid here: false; arguments are not held to a schema"
            raise Refused(400, wrong, "tools")
        return tool | dict(function=inner)

    def _messages(self, fields: Fields) -> list[dict[str, Any]]:
        """The messages; a content of text parts becomes one text."""
        messages = fields.body.get("messages")
        if not (isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)):
            fields.refuse("messages", "must be a list of one or more objects")
        if len(messages) > MOST_MESSAGES:
            raise Refused(400, f"messages: {len(messages)}; at most {MOST_MESSAGES}", "messages")
        found = []
        for i, message in enumerate(messages):
            content = message.get("content")
            if isinstance(content, list):
                texts = [p.get("text") for p in content if isinstance(p, dict) and p.get("type") == "text"]
                if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
                    name = f"messages[{i}].content"
                    raise Refused(400, f"{name}: only parts of type text are served", name)
                message = message | dict(content="".join(texts))
            found.append({name: value for name, value in message.items() if value is not None})
            if content is None and "content" in message and "tool_calls" in found[-1]:
                found[-1]["content"] = ""
        return found

    def _prompts(self, fields: Fields) -> list[list[int]]:
        """The ids of a text, of ids, or of each element of a list of either."""
        prompt = fields.body.get("prompt")
        valid = "must be a text, a list of token ids, or a list of either, and not empty"
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_id(prompt[0])):
            prompt = [prompt]
        if not isinstance(prompt, list) or not prompt:
            fields.refuse("prompt", valid)
        if len(prompt) > MOST_PROMPTS:
            fields.refuse("prompt", f"{len(prompt)} prompts; at most {MOST_PROMPTS}")
        found = []
        for one in prompt:
            if isinstance(one, str):
                one = [*self.ready.begin, *self._encoded(one, self.ready.tokenizer.encode, "prompt")]
            if not isinstance(one, list) or not one or not all(_is_id(i) for i in one):
                fields.refuse("prompt", valid)
            if not 0 <= min(one) <= max(one) < self.ready.vocab:
                fields.refuse("prompt", f"ids must be from 0 to {self.ready.vocab - 1}")
            found.append(one)
        return found

    def _encoded(self, text: str, encode: Callable[[str], np.ndarray], name: str) -> list[int]:
        """The ids of a text. Refused if its beginning alone has twice the tokens that there is room for.

        A tokenizer needs seconds for a body's 4 MiB, and may read the end of a beginning in other tokens.
        """
        room = self.ready.max_len
        start = text[: START * room]
        if len(start) < len(text) and len(encode(start)) > 2 * room:
            wrong = f"{name}: more than --max-len={room} tokens"
            raise Refused(400, wrong, name, "context_length_exceeded")
        return encode(text).tolist()

    def _asked(
        self, fields: Fields, chat: bool, prompts: list[list[int]], most: int | None, logprobs: int | None
    ) -> Asked:
        """The fields that both routes have. most: most tokens of an answer, if given."""
        room, name = self.ready.max_len, "messages" if chat else "prompt"
        longest = max(map(len, prompts))
        if longest + (most or 1) > room:
            asked = f" and {most} of an answer" if most else ""
            wrong = f"{name}: {longest} tokens{asked}, but --max-len={room}"
            raise Refused(400, wrong, name, "context_length_exceeded")
        default = min(CHAT_TOKENS if chat else TEXT_TOKENS, room - longest)
        echo = not chat and fields.switch("echo")
        stream = fields.switch("stream")
        if stream and echo and logprobs is not None:
            fields.refuse("echo", "not in a stream with logprobs")
        options = fields.inner("stream_options", {"include_usage", "include_obfuscation"})
        if options and not stream:
            fields.refuse("stream_options", "needs stream: true")
        routes, prompt_routes = self._routes(fields, stream)
        experts = routes or prompt_routes
        sampling = self._sampling(fields, chat, default if most is None else max(most, 1))
        tops = 0 if logprobs is None else max(logprobs, 1)
        prompt_logprobs = echo and logprobs is not None
        n = fields.number("n", 1, MOST_N, 1, whole=True)
        # special tokens are parts of some formats of tool calls and thoughts
        skip = fields.switch("skip_special_tokens", not chat)
        self._require_pool(prompts, sampling.max_tokens, n)
        return Asked(
            chat,
            prompts,
            [self.ready.tokenizer.decode(ids) for ids in prompts] if echo else [],
            sampling,
            n,
            Details(experts, experts, tops, prompt_logprobs, skip),
            stream,
            options.get("include_usage", False),
            logprobs,
            echo,
            most == 0,
            None,
            self.template if chat else None,
            False,
            routes,
            prompt_routes,
        )

    def _routes(self, fields: Fields, stream: bool) -> tuple[bool, bool]:
        """Whether the experts of the answers' tokens, and of the prompts' tokens, are asked for."""
        ours = fields.inner("tmoe", {"routes", "prompt_routes"})
        if stream and ours.get("prompt_routes"):
            fields.refuse("tmoe", "prompt_routes is not served in a stream")
        return ours.get("routes", False), ours.get("prompt_routes", False)

    def _require_pool(self, prompts: list[list[int]], most: int, n: int) -> None:
        """Refused if the pool could never hold an answer. The answers to one prompt share its whole pages."""
        first = max(map(len, prompts)) - 1
        needs, has = alone(Span(0, first, first + most), n), self.ready.pages
        if needs > has:
            asked = f"a prompt of {first + 1} tokens with {n} answers of up to {most} needs {needs} pages"
            wrong = f"max_tokens: {asked}, but the pool of --pool-gib has {has}"
            raise Refused(400, wrong, "max_tokens", "context_length_exceeded")

    def _sampling(self, fields: Fields, chat: bool, most: int) -> Sampling:
        """The settings of sampling: the body's, else those of generation_config.json, else OpenAI's."""
        given: dict[str, Any] = dict(
            temperature=fields.number("temperature", 0, 2),
            top_p=fields.number("top_p", 0, 1),
            top_k=fields.number("top_k", 0, 2**31 - 1, whole=True),
            min_p=fields.number("min_p", 0, 1),
            repetition_penalty=fields.number("repetition_penalty", 0, 100),
            min_tokens=fields.number("min_tokens", 0, most, whole=True),
        )
        given = {name: value for name, value in given.items() if value is not None}
        floats = "temperature", "top_p", "min_p", "repetition_penalty"
        given |= {name: float(given[name]) for name in floats if name in given}
        stop = fields.body.get("stop")
        stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
        good = isinstance(stops, list) and all(isinstance(text, str) and text for text in stops)
        if not good or len(stops) > MOST_STOPS:
            fields.refuse("stop", f"must be a text, or up to {MOST_STOPS} texts, none of them empty")
        ids = [] if fields.body.get("stop_token_ids") is None else fields.body["stop_token_ids"]
        if not (isinstance(ids, list) and all(_is_id(i) and 0 <= i < self.ready.vocab for i in ids)):
            fields.refuse("stop_token_ids", f"must be a list of ids from 0 to {self.ready.vocab - 1}")
        seed = fields.number("seed", -(2**63), 2**63 - 1, None, whole=True)
        seed = random.SystemRandom().randrange(SEEDS) if seed is None else seed % SEEDS
        settings = dict(self.base)
        settings["stop"] = (*settings.get("stop", ()), *stops)
        settings["min_tokens"] = min(settings.get("min_tokens", 0), most)
        more = self.ends if chat else ()
        try:
            return Sampling(**settings | given, max_tokens=most, stop_ids=(*more, *ids), seed=seed)
        except ConfigError as error:
            name = error.setting if error.setting in fields.body else None
            raise Refused(400, str(error), name) from None

    def _turn_ends(self) -> tuple[int, ...]:
        try:
            return turn_ends(self.ready.tokenizer, self.template)
        except DataError:  # answers then end at the model's own tokens
            return ()


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
