"""Conversations out of rows of JSON or parquet: which kind a row is, and what is wrong with it.

    {"messages": [{"role", "content"}, ...], "tools": [...]}                conversation
    {"prompt": ..., "completion": ...}                                     prompt and answer
    {"prompt": ..., "chosen": ..., "rejected": ...}                        preference

Prompts and answers are texts, taken as they are, or lists of messages. A preference without a prompt has two
whole conversations, whose common beginning is the prompt; those of HH-RLHF are texts.

next: data/chat/encoding.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from tmoe.data.chat.calls import json_object, one_call, result_text, said_calls
from tmoe.data.tokenizer import DataError

Kind = Literal["messages", "conversations", "prompt/completion", "preference"]
KINDS = "messages, prompt and completion, or (prompt,) chosen and rejected"

ROLES = ("system", "developer", "user", "assistant", "tool")
# names that other collections have for the same
SAME_ROLE = dict(
    human="user",
    gpt="assistant",
    model="assistant",
    bot="assistant",
    chatgpt="assistant",
    prompter="user",
    observation="tool",
    function="tool",
    tool_response="tool",
    function_response="tool",
    ipython="tool",
)
# roles of turns that are JSON of one call or of several
CALLS = ("function_call", "tool_call", "tool_calls")
# fields by which a message says whether it is trained, and those that do not say it clearly
TRAINS = ("weight", "train", "training", "trainable", "loss")
UNCLEAR = ("mask", "masked", "loss_mask", "train_mask", "loss_weight", "label", "train_detail")
# fields of a row that change what it means, or that no text holds
TURNS_ROUND = (*TRAINS, *UNCLEAR, "labels", "weights", "sample_weight")
# fields that turn a row's meaning round if they are false; KTO's rows have such in other collections
GOOD = ("kto_tag", "desirable", "preferred", "accepted", "correct", "is_correct")
NO_TEXT = ("images", "image", "videos", "audios", "history")
ANSWERS = "\n\nAssistant:"  # in front of each answer in the texts of HH-RLHF
# what a template is given of the row and by who renders it, and so not by chat_template_kwargs
TAKEN = "messages", "tools", "documents", "prompt", "add_generation_prompt", "self"
SAME_PARAMETERS = ("input_schema", "inputSchema")  # of a tool, as Anthropic's rows and MCP have them
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
    nulls: int = 0
    """fields of calls and tools that are null, and so left out, where a file may hold them on purpose"""
    desirable: bool | None = None
    """of rows with a label (data/chat/unpaired.py); None: the row has none"""
    unread: tuple[str, ...] = ()
    """fields that nothing reads: ids, sources, scores"""


def kind_of(row: dict) -> Kind | None:
    """What a row is, by its fields."""
    if "chosen" in row and "rejected" in row:
        return "preference"
    if row.get("messages") is not None:
        return "messages"
    if row.get("conversations") is not None:
        return "conversations"
    if "prompt" in row and _answer(row) is not None:
        return "prompt/completion"
    return None


def _answer(row: dict) -> Any:
    return row.get("response") if row.get("completion") is None else row["completion"]


def parse_row(row: Any, where: str, kind: Kind, sparse: bool = False) -> Row:
    """A row of this kind. DataError that names `where` and the field, for one that is not.

    Fields that are null are not there: a data set of Arrow gives every object the fields of all others, and
    keeps them in whatever file it is written to. sparse: whether that is so for sure, as in parquet; else
    the nulls of calls and tools are counted.
    """
    if not isinstance(row, dict):
        raise DataError(f"{where}: needs an object with fields for {KINDS}; here is {type(row).__name__}")
    found = kind_of(row)
    if found != kind:
        fields = ", ".join(list(map(str, row))[:12]) or "none"
        raise DataError(
            f"{where}: the source's first row has {kind}, this one has not; its fields are: {fields}"
        )
    nulls = 0 if sparse else sum(map(_nulls, _calls_and_tools(row)))
    row = _without_nulls(row)
    _require_meaning(row, where, kind)
    given = parse_given(row, where)
    unread = _unread(row, kind)
    if kind in ("messages", "conversations"):
        messages = parse_messages(row.get(kind), f"{where}: {kind}")
        messages = with_system(row, messages, where)
        sample = Conversation(messages, 0, *given)
        if not sample.turns:
            raise DataError(f"{where}: {kind}: no turn of the assistant to learn")
        return Row((sample,), _key(messages[: sample.turns[0]], messages), nulls, unread=unread)
    row, answers = _with_answers(row, where, kind)
    values = [row.get("prompt"), *(row.get(field) for field in answers)]
    if kind == "prompt/completion" or row.get("prompt") is not None:
        if all(isinstance(one, str) for one in values):
            return _plain_row(row, where, answers, values, unread)
        prompt = _turns(row.get("prompt"), f"{where}: prompt", "user")
    else:
        prompt = None
    parsed = [_turns(row.get(field), f"{where}: {field}", "assistant") for field in answers]
    if prompt is not None:
        prompt = with_system(row, prompt, where)
    elif row.get("system"):
        parsed = [with_system(row, one, where) for one in parsed]
    samples = _after(prompt, parsed, where)
    key = _key(samples[0][0][: samples[0][1]], values)
    return Row(tuple(Conversation(*one, *given) for one in samples), key, nulls, unread=unread)


def _with_answers(row: dict, where: str, kind: Kind) -> tuple[dict, tuple[str, ...]]:
    """The row with lists of its prompt and answers, and the names of the answers' fields."""
    if kind == "prompt/completion":
        field = "completion" if "completion" in row else "response"
        answers = (field,)
    else:
        answers = ("chosen", "rejected")
        if row.get("chosen") == row.get("rejected"):
            raise DataError(f"{where}: chosen and rejected are equal, so neither is preferred")
    row |= {field: listed(row[field]) for field in ("prompt", *answers) if field in row}
    if kind == "preference" and row.get("prompt") is None:
        row = _with_prompt(row, where)
    return row, answers


def _plain_row(
    row: dict, where: str, answers: tuple[str, ...], values: list[Any], unread: tuple[str, ...]
) -> Row:
    """A row whose prompt and answers (values, in this order) are text."""
    prompt, *texts = values
    if row.get("system"):
        raise DataError(f"{where}: system: a prompt that is text has no place for it; give messages")
    for field, text in zip(answers, texts, strict=True):
        if not text:
            raise DataError(f"{where}: {field}: is empty, so there is nothing to learn")
    unread += tuple(name for name in ("tools", "functions", "chat_template_kwargs") if row.get(name))
    return Row(tuple(Plain(prompt, text) for text in texts), _key(prompt, values), unread=unread)


def _unread(row: dict, kind: Kind) -> tuple[str, ...]:
    """Fields that rows of this kind do not have: ids, sources and scores, or a part that has another name."""
    if kind == "prompt/completion":
        own = ("prompt", "completion" if "completion" in row else "response")
    else:
        own = ("prompt", "chosen", "rejected") if kind == "preference" else (kind,)
    tools = "tools" if "tools" in row else "functions"
    known = {*own, tools, "system", "chat_template_kwargs"}
    return tuple(sorted(str(name) for name in row if name not in known))


def _require_meaning(row: dict, where: str, kind: Kind) -> None:
    """DataError for a field that turns a row's meaning round, or holds anything but text."""
    if kind == "prompt/completion" and "label" in row:
        raise DataError(
            f"{where}: label={row['label']!r}: rows of prompt, completion and label say whether an answer is "
            "good, and all would be trained as good ones; valid: --task preference --preference.loss kto, or "
            "the rows whose label is true, without it"
        )
    for name in TURNS_ROUND:
        value = row.get(name)
        if value is None or value is True or (name in TRAINS and value == 1):
            continue
        if name == "label" and (isinstance(value, str) or (isinstance(value, int | float) and value > 0)):
            continue  # a class, as many data sets have it
        do = "leave out the rows that are not to be trained, and the field"
        raise DataError(f"{where}: {name}={value!r:.40}: a row is trained as it is; {do}")
    for name in GOOD:
        if row.get(name) is False:
            raise DataError(
                f"{where}: {name}={row[name]!r}: a bad answer would be trained as a good one; "
                "leave out such rows, or train on prompt, completion and label with --preference.loss kto"
            )
    if found := next((name for name in NO_TEXT if row.get(name)), None):
        raise DataError(f"{where}: {found}: only messages and texts can be trained on; leave the field out")


def with_system(row: dict, messages: list[dict], where: str) -> list[dict]:
    """Messages after the row's own "system", which LLaMA-Factory's and ToolACE's rows have."""
    told = row.get("system")
    if not told:
        return messages
    if not isinstance(told, str):
        raise DataError(f"{where}: system: {type(told).__name__}; must be text")
    if messages[0]["role"] == "system":
        if messages[0]["content"] == told:
            return messages
        raise DataError(f"{where}: system: there is another system message; keep one of them")
    return [dict(role="system", content=told), *messages]


def parse_given(row: dict, where: str) -> tuple[list | None, dict[str, Any]]:
    """What a row gives a template beside messages: tools and chat_template_kwargs. DataError for others.

    Tools are as OpenAI has them, {"type": "function", "function": {...}}, whatever the row leaves out of it.
    """
    field = "tools" if row.get("tools") is not None else "functions"
    tools = _json(_without_nulls(row.get(field)), f"{where}: {field}", list) or []
    tools = [_tool(one, f"{where}: {field}[{i}]") for i, one in enumerate(tools)]
    more = _json(row.get("chat_template_kwargs"), f"{where}: chat_template_kwargs", dict) or {}
    if taken := [name for name in TAKEN if name in more]:
        raise DataError(f"{where}: chat_template_kwargs: {', '.join(taken)}: not from there; leave it out")
    return tools or None, more


def _tool(tool: Any, where: str) -> dict[str, Any]:
    tool = _json(tool, where, dict)
    if not tool:
        raise DataError(
            f'{where}: must be {{"type": "function", "function": {{"name": ...}}}}; here is nothing'
        )
    if "function" not in tool and "name" in tool:
        tool = dict(type="function", function={name: one for name, one in tool.items() if name != "type"})
    function = tool.get("function")
    if isinstance(function, dict) and "parameters" not in function:
        same = next((name for name in SAME_PARAMETERS if name in function), None)
        function = {"parameters" if name == same else name: one for name, one in function.items()}
        tool = tool | dict(function=function)
    if isinstance(function, dict) and isinstance(function.get("parameters"), str):
        parameters = json_object(function["parameters"], f"{where}: parameters")
        tool = tool | dict(function=function | dict(parameters=parameters))
    return tool


def _with_prompt(row: dict, where: str) -> dict:
    """A preference of two texts with the prompt that both begin with, as those of HH-RLHF do.

    It ends with their last common ANSWERS. DataError where there is none: two answers and no question.
    """
    both = row["chosen"], row["rejected"]
    if not all(isinstance(one, str) for one in both):
        return row
    differ = (i for i, (one, other) in enumerate(zip(*both, strict=False)) if one != other)
    end = both[0].rfind(ANSWERS, 0, next(differ, min(map(len, both)))) + len(ANSWERS)
    if end < len(ANSWERS):
        fields = ", ".join(list(map(str, row))[:12])
        raise DataError(
            f"{where}: chosen and rejected are texts, and there is no prompt; its fields are: {fields}; "
            "valid: a prompt, which --data.columns prompt=COLUMN may name"
        )
    chosen, rejected = (one[end:] for one in both)
    return row | dict(prompt=both[0][:end], chosen=chosen, rejected=rejected)


def _turns(value: Any, where: str, role: str) -> list[dict]:
    """Messages of a list, one message, or a text as one message of this role."""
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, str | list):
        here = "null" if value is None else type(value).__name__
        raise DataError(f"{where}: must be text or a list of messages; here is {here}")
    return parse_messages([dict(role=role, content=value)] if isinstance(value, str) else value, where)


def _after(prompt: list[dict] | None, answers: list[list[dict]], where: str) -> list[tuple[list[dict], int]]:
    """Prompt and answer of each as one conversation, and where its answer begins.

    Answers that repeat the prompt, as those of UltraFeedback do, are whole conversations. So are those of a
    row without prompt; what they share is the prompt then.
    """
    whole = [one[0]["role"] != "assistant" for one in answers]
    if prompt is not None:
        answers = [_joined(prompt, *one, where) for one in zip(answers, whole, strict=True)]
        if len(answers) == 1 or not any(whole):
            return [(one, len(prompt)) for one in answers]
    first = answers[0]
    common = 0
    shortest = min(map(len, answers))
    while common < shortest and all(one[common] == first[common] for one in answers):
        common += 1
    if common == 0:
        raise DataError(f"{where}: chosen and rejected begin differently, and there is no prompt for both")
    return [(one, common) for one in answers]


def _joined(prompt: list[dict], answer: list[dict], whole: bool, where: str) -> list[dict]:
    """A prompt and an answer, each message once where the answer is `whole`. DataError for two questions."""
    if not whole:
        return prompt + answer
    said, asked = ([one | dict(content=one["content"].strip()) for one in part] for part in (answer, prompt))
    if any(said[i : i + len(asked)] == asked for i in range(len(said))):
        return answer
    for both in range(min(len(said), len(asked)), 0, -1):
        if asked[-both:] == said[:both]:
            return prompt[:-both] + answer
    if prompt[-1]["role"] == answer[0]["role"] == "user":
        raise DataError(f"{where}: prompt: is another question than the answer begins with; leave one out")
    return prompt + answer


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
    # A field that is null is not there: templates ask `"tool_calls" in message`.
    message = {name: _without_nulls(one) for name, one in value.items() if one is not None}
    if "role" not in message and "from" in message:
        message["role"] = message.pop("from")
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    role = message["role"] = _role(message, where)
    if "function_call" in message:
        message["tool_calls"] = [message.pop("function_call")]
    calls = _calls(message.pop("tool_calls", None), where)
    if role == "assistant" and isinstance(message.get("content"), list):
        _take_thoughts(message)
    if role == "tool":
        message["content"] = result_text(message.get("content"))
    content = _content(message.get("content"), where)
    thinks = role == "assistant" and any(message.get(name) for name in REASONING)
    if content is None and not calls and not thinks:
        no_calls = " and no tool_calls" if role == "assistant" else ""
        raise DataError(f"{where}: no content{no_calls}; its fields are: {', '.join(map(str, value))}")
    message["content"] = content or ""
    if calls:
        message["tool_calls"] = calls
    if not _learned(message, where):
        message["weight"] = 0
    _name_reasoning(message, where)
    return message


def _name_reasoning(message: dict[str, Any], where: str) -> None:
    """Puts a message's reasoning under both names that templates read."""
    reasoning = next((message[name] for name in REASONING if message.get(name)), None)
    if not reasoning:
        return
    if not isinstance(reasoning, str):
        raise DataError(f"{where}: {type(reasoning).__name__} as reasoning; must be text")
    message |= dict.fromkeys(REASONING[:2], reasoning)
    message.pop(REASONING[2], None)


def _role(message: dict[str, Any], where: str) -> str:
    """Whose message it is, by our names. A role that means calls has its content read as `tool_calls`."""
    role = message.get("role")
    role = role.lower() if isinstance(role, str) else role
    if role in CALLS:
        role = "assistant"
        message["tool_calls"] = said_calls(message.pop("content", None), where)
    role = SAME_ROLE.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise DataError(f"{where}: role {role!r}; valid: {', '.join((*ROLES, *SAME_ROLE, *CALLS))}")
    return role


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls as OpenAI writes them, but with their arguments as objects. DataError for what is none."""
    calls = _json(calls, f"{where}: tool_calls", list) or []
    for call in calls:
        called = call.get("function", call) if isinstance(call, dict) else None
        if not (isinstance(called, dict) and isinstance(called.get("name"), str)):
            valid = 'must be {"function": {"name": ..., "arguments": ...}}'
            raise DataError(f"{where}: tool_calls: {valid}; here is {call!r:.80}")
    return [one_call(call, f"{where}: tool_calls[{i}]") for i, call in enumerate(calls)]


def _learned(message: dict[str, Any], where: str) -> bool:
    """Whether the message is trained, where it is the assistant's; takes the fields that say so away."""
    told = {name: message.pop(name) for name in (*TRAINS, *UNCLEAR) if name in message}
    if unclear := [name for name in told if name in UNCLEAR]:
        raise DataError(f'{where}: {unclear[0]}: not known here; "weight": 0 leaves a turn out, 1 trains it')
    for name, value in told.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise DataError(f"{where}: {name} {value!r}: must be 0 or 1")
        if value and message["role"] != "assistant":
            raise DataError(f"{where}: {name} {value!r}: only turns of the assistant are trained")
    if len({bool(value) for value in told.values()}) > 1:
        raise DataError(f"{where}: {', '.join(told)}: one says that it is trained, another that it is not")
    return all(told.values())


def _take_thoughts(message: dict[str, Any]) -> None:
    """Parts of content that are thoughts become its reasoning."""
    thoughts = [one for one in message["content"] if isinstance(one, dict) and one.get("type") == "thinking"]
    if thoughts and all(isinstance(one.get("thinking"), str) for one in thoughts):
        message["reasoning_content"] = "".join(one["thinking"] for one in thoughts)
        message["content"] = [one for one in message["content"] if one not in thoughts]


def _content(content: Any, where: str) -> str | None:
    """Text of a message; a list of text parts as one text, which many templates would leave out."""
    if isinstance(content, list):
        parts = [one.get("text") if isinstance(one, dict) else one for one in content]
        if not all(isinstance(part, str) for part in parts):
            kinds = sorted({str(one.get("type")) if isinstance(one, dict) else "?" for one in content})
            raise DataError(f"{where}: content of parts {', '.join(kinds)}; only text can be trained on")
        return "".join(parts)
    if content is not None and not isinstance(content, str):
        raise DataError(f"{where}: content is {type(content).__name__}; must be text")
    return content


def listed(value: Any) -> Any:
    """Messages that a text holds as JSON, as CSV files and some parquet have them; else the value."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            found = json.loads(value)
            if found and all(isinstance(one, dict) and one.keys() & {"role", "from"} for one in found):
                return found
    return value


def _json(value: Any, where: str, kind: type) -> Any:
    """A value of this kind, which some files hold as JSON in a text; None for a blank one.

    DataError for another kind.
    """
    if isinstance(value, str) and not value.strip():
        return None
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
    """Without fields that are null; items of lists stay, for Arrow adds none."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _calls_and_tools(row: dict) -> Iterator[Any]:
    """The parts of a row in which a null may be meant."""
    yield row.get("tools")
    for name in ("messages", "conversations", "prompt", "completion", "chosen", "rejected"):
        for message in row[name] if isinstance(row.get(name), list) else ():
            for call in (message.get("tool_calls") if isinstance(message, dict) else None) or ():
                called = call.get("function") if isinstance(call, dict) else None
                yield called.get("arguments") if isinstance(called, dict) else None


def _nulls(value: Any) -> int:
    """How many fields within a value are null."""
    if isinstance(value, dict):
        return sum(1 if one is None else _nulls(one) for one in value.values())
    return sum(map(_nulls, value)) if isinstance(value, list) else 0


def _key(prompt: Any, whole: Any) -> str:
    """Rows of one prompt have one key, so that both splits never share one; without prompt, all decides."""
    return json.dumps(prompt or whole, sort_keys=True, default=str)
