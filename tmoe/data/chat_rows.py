"""Conversations out of rows of JSON or parquet: which kind a row is, and what is wrong with it.

    {"messages": [{"role", "content"}, ...], "tools": [...]}                conversation
    {"prompt": ..., "completion": ...}                                     prompt and answer
    {"prompt": ..., "chosen": ..., "rejected": ...}                        preference

Prompts and answers are texts, taken as they are, or lists of messages. A preference without a prompt has two
whole conversations, whose common beginning is the prompt.

next: data/chat.py
"""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

from tmoe.data.tokenizer import DataError

Kind = Literal["messages", "conversations", "prompt/completion", "preference"]
KINDS = "messages, prompt and completion, or (prompt,) chosen and rejected"

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# names that other collections have for the same
SAME_ROLE = dict(human="user", gpt="assistant", model="assistant", bot="assistant", observation="tool")
# what a template is given of the row and by who renders it, and so not by chat_template_kwargs
TAKEN = "messages", "tools", "documents", "prompt", "add_generation_prompt", "self"
REASONING = ("reasoning_content", "thinking", "reasoning")


class Conversation(NamedTuple):
    """Messages, of which those of the assistant from `first` on are to be learned."""

    messages: list[dict[str, Any]]
    first: int = 0
    tools: list | None = None
    more: dict[str, Any] = {}  # noqa: RUF012
    """what else the template is given"""

    @property
    def turns(self) -> list[int]:
        """Numbers of the messages to learn; {"weight": 0} leaves one out, as in OpenAI's format."""
        learned = range(self.first, len(self.messages))
        mine = (i for i in learned if self.messages[i]["role"] == "assistant")
        return [i for i in mine if self.messages[i].get("weight", 1)]


class Plain(NamedTuple):
    """A text and the text to learn after it, without a template."""

    prompt: str
    completion: str


Sample = Conversation | Plain


class Row(NamedTuple):
    """What one row gives: one sample, or of a preference two, the chosen one first."""

    samples: tuple[Sample, ...]
    key: str
    """of the prompt: decides whether the row is held out"""


def kind_of(row: dict) -> Kind | None:
    """What a row is, by its fields."""
    if "chosen" in row and "rejected" in row:
        return "preference"
    if "messages" in row:
        return "messages"
    if "conversations" in row:
        return "conversations"
    if "prompt" in row and _answer(row) is not None:
        return "prompt/completion"
    return None


def _answer(row: dict) -> Any:
    return row.get("completion", row.get("response"))


def parse_row(row: Any, where: str, kind: Kind, sparse: bool = False) -> Row:
    """A row of this kind. DataError that names `where` and the field, for one that is not.

    sparse: whether a missing field reads as null, as in parquet.
    """
    if not isinstance(row, dict):
        raise DataError(f"{where}: needs an object with fields for {KINDS}; here is {type(row).__name__}")
    found = kind_of(row)
    if found != kind:
        fields = ", ".join(list(map(str, row))[:12]) or "none"
        raise DataError(
            f"{where}: the source's first row has {kind}, this one has not; its fields are: {fields}"
        )
    row = _without_nulls(row) if sparse else row
    tools, more = parse_given(row, where)

    def conversation(messages: list[dict], first: int) -> Conversation:
        return Conversation(messages, first, tools, more)

    if kind in ("messages", "conversations"):
        messages = parse_messages(row[kind], f"{where}: {kind}")
        sample = conversation(messages, 0)
        if not sample.turns:
            raise DataError(f"{where}: {kind}: no turn of the assistant to learn")
        return Row((sample,), _key(messages[: sample.turns[0]], messages))
    if kind == "prompt/completion":
        field = "completion" if "completion" in row else "response"
        answers = (field,)
    else:
        answers = ("chosen", "rejected")
        if row["chosen"] == row["rejected"]:
            raise DataError(f"{where}: chosen and rejected are equal, so neither is preferred")
    given = [row.get("prompt"), *(row[field] for field in answers)]
    if kind == "prompt/completion" or row.get("prompt") is not None:
        texts = [one for one in given if isinstance(one, str)]
        if len(texts) == len(given):
            prompt, *texts = texts
            for field, text in zip(answers, texts, strict=True):
                if not text:
                    raise DataError(f"{where}: {field}: is empty, so there is nothing to learn")
            return Row(tuple(Plain(prompt, text) for text in texts), _key(prompt, given))
        prompt = _turns(row["prompt"], f"{where}: prompt", "user")
    else:
        prompt = None
    parsed = [_turns(row[field], f"{where}: {field}", "assistant") for field in answers]
    samples = _after(prompt, parsed, where)
    return Row(tuple(conversation(*one) for one in samples), _key(samples[0][0][: samples[0][1]], given))


def parse_given(row: dict, where: str) -> tuple[list | None, dict[str, Any]]:
    """What a row gives a template beside messages: tools and chat_template_kwargs. DataError for others."""
    tools = _json(row.get("tools"), f"{where}: tools", list)
    more = _json(row.get("chat_template_kwargs"), f"{where}: chat_template_kwargs", dict) or {}
    if taken := [name for name in TAKEN if name in more]:
        raise DataError(f"{where}: chat_template_kwargs: {', '.join(taken)}: not from there; leave it out")
    return tools or None, more


def _turns(value: Any, where: str, role: str) -> list[dict]:
    """Messages of a list, or a text as one message of this role."""
    if not isinstance(value, str | list):
        here = "null" if value is None else type(value).__name__
        raise DataError(f"{where}: must be text or a list of messages; here is {here}")
    return parse_messages([dict(role=role, content=value)] if isinstance(value, str) else value, where)


def _after(prompt: list[dict] | None, answers: list[list[dict]], where: str) -> list[tuple[list[dict], int]]:
    """Prompt and answer of each as one conversation, and where its answer begins.

    Answers that repeat the prompt, as those of UltraFeedback do, are whole conversations. So are those of a
    row without prompt; what they share is the prompt then.
    """
    whole = all(one[0]["role"] != "assistant" for one in answers)
    if prompt is None or (whole and len(answers) == 2):
        first = answers[0]
        common = 0
        shortest = min(map(len, answers))
        while common < shortest and all(one[common] == first[common] for one in answers):
            common += 1
        if common == 0:
            raise DataError(
                f"{where}: chosen and rejected begin differently, and there is no prompt for both"
            )
        return [(one, common) for one in answers]
    return [(prompt + one, len(prompt)) for one in answers]


def parse_messages(value: Any, where: str) -> list[dict]:
    """A list of messages as templates read them. DataError that names `where` for what is none."""
    value = _json(value, where, list)
    if not value:
        raise DataError(f'{where}: needs a list of messages, each {{"role": ..., "content": ...}}')
    return [_message(one, f"{where}[{number}]") for number, one in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, Any]:
    """One message as templates read it. DataError for what a template would leave out in silence."""
    if not isinstance(value, dict):
        raise DataError(f'{where}: needs {{"role": ..., "content": ...}}; here is {type(value).__name__}')
    # A field that is null is not there: templates ask `"tool_calls" in message`. Some ask whether content is.
    message = {name: one for name, one in value.items() if one is not None or name == "content"}
    if "role" not in message and "from" in message:
        message["role"] = message.pop("from")
        message["content"] = message.pop("value", None)
    role = message.get("role")
    role = SAME_ROLE.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise DataError(f"{where}: role {role!r}; valid: {', '.join((*ROLES, *SAME_ROLE))}")
    message["role"] = role
    calls = message.get("tool_calls")
    if calls is not None:
        message["tool_calls"] = calls = _json(calls, f"{where}: tool_calls", list)
        for call in calls:
            called = call.get("function", call) if isinstance(call, dict) else None
            if not (isinstance(called, dict) and isinstance(called.get("name"), str)):
                valid = 'must be {"function": {"name": ..., "arguments": ...}}'
                raise DataError(f"{where}: tool_calls: {valid}; here is {call!r:.80}")
        if not calls:
            del message["tool_calls"]
    content = _content(message.get("content"), where)
    if "content" in message:
        message["content"] = content
    if content is None and not calls:
        raise DataError(f"{where}: no content" + (" and no tool_calls" if role == "assistant" else ""))
    if message.get("weight", 1) not in (0, 1):
        raise DataError(f"{where}: weight {message['weight']!r}: must be 0 or 1")
    if reasoning := next((message[name] for name in REASONING if message.get(name)), None):
        if not isinstance(reasoning, str):
            raise DataError(f"{where}: {type(reasoning).__name__} as reasoning; must be text")
        message |= dict(reasoning_content=reasoning, thinking=reasoning)
    return message


def _content(content: Any, where: str) -> str | None:
    """Text of a message; a list of text parts as one text, which many templates would leave out."""
    if isinstance(content, list):
        parts = [one.get("text") if isinstance(one, dict) else None for one in content]
        if not all(isinstance(part, str) for part in parts):
            kinds = sorted({str(one.get("type")) if isinstance(one, dict) else "?" for one in content})
            raise DataError(f"{where}: content of parts {', '.join(kinds)}; only text can be trained on")
        return "".join(parts)
    if content is not None and not isinstance(content, str):
        raise DataError(f"{where}: content is {type(content).__name__}; must be text")
    return content


def _json(value: Any, where: str, kind: type) -> Any:
    """A value of this kind, which some files hold as JSON in a text. DataError for another kind."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: text that is no JSON: {error}") from error
    if value is not None and not isinstance(value, kind):
        name = "a list" if kind is list else "an object"
        raise DataError(f"{where}: must be {name}; here is {type(value).__name__}")
    return value


def _without_nulls(value: Any) -> Any:
    """Without fields that are null: parquet gives every object the fields of all others."""
    if isinstance(value, dict):
        kept = (name for name, one in value.items() if one is not None or name == "content")
        return {name: _without_nulls(value[name]) for name in kept}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _key(prompt: Any, whole: Any) -> str:
    """Rows of one prompt have one key, so that both splits never share one; without prompt, all decides."""
    return json.dumps(prompt or whole, sort_keys=True, default=str)
