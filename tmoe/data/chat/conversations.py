"""Parses rows of JSON or parquet as conversations: finds out a row's kind and names its faults.

    {"messages": [{"role", "content"}, ...], "tools": [...]}                conversation
    {"prompt": ..., "completion": ...}                                     prompt and answer
    {"instruction": ..., "input": ..., "output": ...}                      the same, instructions.py
    {"prompt": ..., "chosen": ..., "rejected": ...}                        preference

Prompts and answers are texts, used as they are, or lists of messages. A preference without a prompt has two
whole conversations, whose common beginning is the prompt; in HH-RLHF both are texts.

next: data/chat/encoding.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from tmoe.data.chat.calls import json_object, one_call, result_text, said_calls
from tmoe.data.chat.instructions import fields_of, is_instruction, with_prompt
from tmoe.data.tokenizer import DataError

Kind = Literal["messages", "conversations", "prompt/completion", "instruction", "preference"]
KINDS = "messages, prompt and completion, instruction and output, or (prompt,) chosen and rejected"

ROLES = ("system", "developer", "user", "assistant", "tool")
# names that other data sets use -> our roles
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
# roles of turns whose content is the JSON of one or several calls
CALLS = ("function_call", "tool_call", "tool_calls")
# fields of a message that state whether it is trained, and fields that do not state it clearly
TRAINS = ("weight", "train", "training", "trainable", "loss")
UNCLEAR = ("mask", "masked", "loss_mask", "train_mask", "loss_weight", "label", "train_detail")
# fields of a row that may change its meaning
TURNS_ROUND = (*TRAINS, *UNCLEAR, "labels", "weights", "sample_weight")
# fields that reverse a row's meaning if they are false; other data sets have them in KTO's rows
GOOD = ("kto_tag", "desirable", "preferred", "accepted", "correct", "is_correct")
# fields with content that is not text to train on
NO_TEXT = ("images", "image", "videos", "audios", "history")
ANSWERS = "\n\nAssistant:"  # precedes each answer in the texts of HH-RLHF
# template variables that the row's other fields or the caller set, so chat_template_kwargs may not
TAKEN = "messages", "tools", "documents", "prompt", "add_generation_prompt", "self"
SAME_PARAMETERS = ("input_schema", "inputSchema")  # names of a tool's parameters in Anthropic's rows and MCP
REASONING = ("reasoning_content", "thinking", "reasoning")


class Conversation(NamedTuple):
    """A list of messages; the assistant's messages from index `first` on are learned."""

    messages: list[dict[str, Any]]
    first: int = 0
    tools: list | None = None
    more: dict[str, Any] = {}  # noqa: RUF012
    """other variables for the template (chat_template_kwargs)"""

    @property
    def turns(self) -> list[int]:
        """Indices of the messages to learn; {"weight": 0} leaves a message out, as in OpenAI's format."""
        learned = range(self.first, len(self.messages))
        answers = (i for i in learned if self.messages[i]["role"] == "assistant")
        return [i for i in answers if self.messages[i].get("weight", 1)]


class Plain(NamedTuple):
    """A text and the text to learn after it, without a template."""

    prompt: str
    completion: str


Sample = Conversation | Plain


class ChatRow(NamedTuple):
    """A parsed row: one sample, or the chosen and the rejected sample of a preference, in this order."""

    samples: tuple[Sample, ...]
    key: str
    """text made from the prompt, whose hash decides the row's split"""
    nulls: int = 0
    """number of null fields of calls and tools, which are left out although the file may mean them"""
    desirable: bool | None = None
    """the label of a row that has one (data/chat/unpaired.py), else None"""
    unread: tuple[str, ...] = ()
    """fields that are not read, such as ids, sources and scores"""


def kind_of(row: dict) -> Kind | None:
    """The kind of a row, by its fields; None if it is of no known kind."""
    if "chosen" in row and "rejected" in row:
        return "preference"
    if row.get("messages") is not None:
        return "messages"
    if row.get("conversations") is not None:
        return "conversations"
    if "prompt" in row and _answer(row) is not None:
        return "prompt/completion"
    return "instruction" if is_instruction(row) else None


def _answer(row: dict) -> Any:
    return row.get("response") if row.get("completion") is None else row["completion"]


def parse_row(row: Any, where: str, kind: Kind, sparse: bool = False) -> ChatRow:
    """Parses a row of this kind. DataError, which names `where` and the field, for a row that is not.

    Null fields are treated as absent: a data set of Arrow gives each object the fields of all other objects,
    and keeps them in any file that is written from it.
    sparse: whether nulls are certainly of that origin, as in parquet; if not, the nulls of calls and tools
        are counted.
    """
    if not isinstance(row, dict):
        raise DataError(f"{where}: needs an object with fields for {KINDS}; here is {type(row).__name__}")
    row_kind = kind_of(row)
    if row_kind != kind:
        fields = ", ".join(list(map(str, row))[:12]) or "none"
        raise DataError(
            f"{where}: the source's first row has {kind}, this one has not; its fields are: {fields}"
        )
    nulls = 0 if sparse else sum(map(_nulls, _calls_and_tools(row)))
    row = _without_nulls(row)
    _require_meaning(row, where, kind)
    given = parse_given(row, where)
    unread = _unread(row, kind)
    row, kind = _with_question(row, where, kind)
    if kind in ("messages", "conversations"):
        messages = parse_messages(row.get(kind), f"{where}: {kind}")
        messages = with_system(row, messages, where)
        sample = Conversation(messages, 0, *given)
        if not sample.turns:
            raise DataError(f"{where}: {kind}: no turn of the assistant to learn")
        return ChatRow((sample,), _key(messages[: sample.turns[0]], messages), nulls, unread=unread)
    row, answers = _with_answers(row, where, kind)
    values = [row.get("prompt"), *(row.get(field) for field in answers)]
    if kind == "prompt/completion" or row.get("prompt") is not None:
        if all(isinstance(value, str) for value in values):
            return _plain_row(row, where, answers, values, unread)
        prompt = _turns(row.get("prompt"), f"{where}: prompt", "user")
    else:
        prompt = None
    parsed = [_turns(row.get(field), f"{where}: {field}", "assistant") for field in answers]
    if prompt is not None:
        prompt = with_system(row, prompt, where)
    elif row.get("system"):
        parsed = [with_system(row, answer, where) for answer in parsed]
    samples = _after(prompt, parsed, where)
    key = _key(samples[0][0][: samples[0][1]], values)
    return ChatRow(tuple(Conversation(*pair, *given) for pair in samples), key, nulls, unread=unread)


def _with_question(row: dict, where: str, kind: Kind) -> tuple[dict, Kind]:
    """The row with a prompt in place of its instruction, if it has one, and its kind, which then differs."""
    if kind == "instruction":
        return with_prompt(row, where), "prompt/completion"
    if kind == "preference" and row.get("instruction") and "prompt" not in row:
        return with_prompt(row, where, output=False), kind
    return row, kind


def _with_answers(row: dict, where: str, kind: Kind) -> tuple[dict, tuple[str, ...]]:
    """The row, with messages that are JSON texts parsed, and the names of its answers' fields."""
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
) -> ChatRow:
    """Parses a row whose prompt and answers are texts. values: the prompt, then the answers."""
    prompt, *texts = values
    if row.get("system"):
        raise DataError(
            f"{where}: system: a prompt that is text has no place for it; valid: messages, or "
            "--data.columns instruction=prompt, which makes the two texts messages"
        )
    for field, text in zip(answers, texts, strict=True):
        if not text:
            raise DataError(f"{where}: {field}: is empty, so there is nothing to learn")
    unread += tuple(name for name in ("tools", "functions", "chat_template_kwargs") if row.get(name))
    return ChatRow(tuple(Plain(prompt, text) for text in texts), _key(prompt, values), unread=unread)


def _unread(row: dict, kind: Kind) -> tuple[str, ...]:
    """Fields of the row that rows of this kind do not have: ids, sources, scores, or misnamed parts."""
    if kind == "prompt/completion":
        fields = ("prompt", "completion" if "completion" in row else "response")
    elif kind == "instruction":
        fields = fields_of(row)
    elif kind == "preference":
        fields = ("chosen", "rejected", *(["prompt"] if "prompt" in row else fields_of(row)[:2]))
    else:
        fields = (kind,)
    tools = "tools" if "tools" in row else "functions"
    known = {*fields, tools, "system", "chat_template_kwargs"}
    return tuple(sorted(str(name) for name in row if name not in known))


def _require_meaning(row: dict, where: str, kind: Kind) -> None:
    """DataError for a field that reverses a row's meaning, or holds anything but text."""
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
            continue  # a class label, as in many data sets
        do = "leave out the rows that are not to be trained, and the field"
        raise DataError(f"{where}: {name}={value!r:.40}: a row is trained as it is; {do}")
    for name in GOOD:
        if row.get(name) is False:
            raise DataError(
                f"{where}: {name}={row[name]!r}: a bad answer would be trained as a good one; "
                "leave out such rows, or train on prompt, completion and label with --preference.loss kto"
            )
    if field := next((name for name in NO_TEXT if row.get(name)), None):
        raise DataError(f"{where}: {field}: only messages and texts can be trained on; leave the field out")


def with_system(row: dict, messages: list[dict], where: str) -> list[dict]:
    """The messages, preceded by the row's field "system", which LLaMA-Factory's and ToolACE's rows have."""
    system = row.get("system")
    if not system:
        return messages
    if not isinstance(system, str):
        raise DataError(f"{where}: system: {type(system).__name__}; must be text")
    if messages[0]["role"] == "system":
        if messages[0]["content"] == system:
            return messages
        raise DataError(f"{where}: system: there is another system message; keep one of them")
    return [dict(role="system", content=system), *messages]


def parse_given(row: dict, where: str) -> tuple[list | None, dict[str, Any]]:
    """The row's other values for a template: its tools and chat_template_kwargs. DataError if malformed.

    Tools are returned in OpenAI's form, {"type": "function", "function": {...}}, even if the row leaves out a
    part of it.
    """
    field = "tools" if row.get("tools") is not None else "functions"
    tools = _json(_without_nulls(row.get(field)), f"{where}: {field}", list) or []
    tools = [_tool(tool, f"{where}: {field}[{i}]") for i, tool in enumerate(tools)]
    more = _json(row.get("chat_template_kwargs"), f"{where}: chat_template_kwargs", dict) or {}
    if taken := [name for name in TAKEN if name in more]:
        raise DataError(
            f"{where}: chat_template_kwargs: {', '.join(taken)}: cannot be set there; leave it out"
        )
    return tools or None, more


def _tool(tool: Any, where: str) -> dict[str, Any]:
    tool = _json(tool, where, dict)
    if not tool:
        raise DataError(
            f'{where}: must be {{"type": "function", "function": {{"name": ...}}}}; here is nothing'
        )
    if "function" not in tool and "name" in tool:
        tool = dict(type="function", function={name: value for name, value in tool.items() if name != "type"})
    function = tool.get("function")
    if isinstance(function, dict) and "parameters" not in function:
        same = next((name for name in SAME_PARAMETERS if name in function), None)
        function = {"parameters" if name == same else name: value for name, value in function.items()}
        tool = tool | dict(function=function)
    if isinstance(function, dict) and isinstance(function.get("parameters"), str):
        parameters = json_object(function["parameters"], f"{where}: parameters")
        tool = tool | dict(function=function | dict(parameters=parameters))
    return tool


def _with_prompt(row: dict, where: str) -> dict:
    """A preference of two texts (HH-RLHF), divided into their common beginning, the prompt, and two answers.

    The prompt ends with the last ANSWERS that both texts share. DataError if they share none, because the row
    then has two answers and no question.
    """
    both = row["chosen"], row["rejected"]
    if not all(isinstance(answer, str) for answer in both):
        return row
    differ = (i for i, (first, second) in enumerate(zip(*both, strict=False)) if first != second)
    end = both[0].rfind(ANSWERS, 0, next(differ, min(map(len, both)))) + len(ANSWERS)
    if end < len(ANSWERS):
        fields = ", ".join(list(map(str, row))[:12])
        raise DataError(
            f"{where}: chosen and rejected are texts, and there is no prompt; its fields are: {fields}; "
            "valid: a prompt, which --data.columns prompt=COLUMN may name"
        )
    chosen, rejected = (answer[end:] for answer in both)
    return row | dict(prompt=both[0][:end], chosen=chosen, rejected=rejected)


def _turns(value: Any, where: str, role: str) -> list[dict]:
    """The messages of a value: a list of messages, one message, or the text of a message of this role."""
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, str | list):
        kind = "null" if value is None else type(value).__name__
        raise DataError(f"{where}: must be text or a list of messages; here is {kind}")
    return parse_messages([dict(role=role, content=value)] if isinstance(value, str) else value, where)


def _after(prompt: list[dict] | None, answers: list[list[dict]], where: str) -> list[tuple[list[dict], int]]:
    """For each answer, the conversation of prompt and answer, and the index of its first learned message.

    Answers that repeat the prompt, as in UltraFeedback, are whole conversations. The answers of a row without
    prompt are whole conversations too; their common beginning is then the prompt.
    """
    whole = [answer[0]["role"] != "assistant" for answer in answers]
    if prompt is not None:
        answers = [_joined(prompt, *pair, where) for pair in zip(answers, whole, strict=True)]
        if len(answers) == 1 or not any(whole):
            return [(answer, len(prompt)) for answer in answers]
    first = answers[0]
    common = 0
    shortest = min(map(len, answers))
    while common < shortest and all(answer[common] == first[common] for answer in answers):
        common += 1
    if common == 0:
        raise DataError(
            f"{where}: chosen and rejected begin differently, and there is no prompt for both; valid: a "
            "prompt, which --data.columns prompt=COLUMN may name"
        )
    return [(answer, common) for answer in answers]


def _joined(prompt: list[dict], answer: list[dict], whole: bool, where: str) -> list[dict]:
    """A prompt and an answer as one conversation. DataError for two questions.

    whole: whether the answer is a whole conversation, whose messages may repeat those of the prompt.
    """
    if not whole:
        return prompt + answer
    answered, asked = (
        [message | dict(content=message["content"].strip()) for message in part] for part in (answer, prompt)
    )
    if any(answered[i : i + len(asked)] == asked for i in range(len(answered))):
        return answer
    for both in range(min(len(answered), len(asked)), 0, -1):
        if asked[-both:] == answered[:both]:
            return prompt[:-both] + answer
    if prompt[-1]["role"] == answer[0]["role"] == "user":
        raise DataError(f"{where}: prompt: is another question than the answer begins with; leave one out")
    return prompt + answer


def parse_messages(value: Any, where: str) -> list[dict]:
    """A list of messages in the form that templates read. DataError, which names `where`, if malformed."""
    value = _json(value, where, list)
    if not value:
        raise DataError(f'{where}: needs a list of messages, each {{"role": ..., "content": ...}}')
    return [_message(message, f"{where}[{number}]") for number, message in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, Any]:
    """One message in the form that templates read. DataError for parts that templates would silently omit."""
    if not isinstance(value, dict):
        raise DataError(f'{where}: needs {{"role": ..., "content": ...}}; here is {type(value).__name__}')
    # Remove null fields, because templates test `"tool_calls" in message`.
    message = {name: _without_nulls(field) for name, field in value.items() if field is not None}
    if "role" not in message and "from" in message:
        message["role"] = message.pop("from")
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    role = message["role"] = _role(message, where)
    if "function_call" in message:
        message["tool_calls"] = [message.pop("function_call")]
    calls = _calls(message.pop("tool_calls", None), where)
    if role == "assistant" and isinstance(message.get("content"), list):
        _take_thoughts(message, where)
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
    """Stores a message's reasoning under both names that templates read."""
    reasoning = next((message[name] for name in REASONING if message.get(name)), None)
    if not reasoning:
        return
    if not isinstance(reasoning, str):
        raise DataError(f"{where}: {type(reasoning).__name__} as reasoning; must be text")
    message |= dict.fromkeys(REASONING[:2], reasoning)
    message.pop(REASONING[2], None)


def _role(message: dict[str, Any], where: str) -> str:
    """The message's role, by our names. If the role means calls, the content is read as `tool_calls`."""
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
    """Calls in OpenAI's form, but with their arguments as objects. DataError if they are malformed."""
    calls = _json(calls, f"{where}: tool_calls", list) or []
    for call in calls:
        called = call.get("function", call) if isinstance(call, dict) else None
        if not (isinstance(called, dict) and isinstance(called.get("name"), str)):
            valid = 'must be {"function": {"name": ..., "arguments": ...}}'
            raise DataError(f"{where}: tool_calls: {valid}; here is {call!r:.80}")
    return [one_call(call, f"{where}: tool_calls[{i}]") for i, call in enumerate(calls)]


def _learned(message: dict[str, Any], where: str) -> bool:
    """Whether the message is trained if it is the assistant's; removes the fields that state it."""
    marks = {name: message.pop(name) for name in (*TRAINS, *UNCLEAR) if name in message}
    if unclear := [name for name in marks if name in UNCLEAR]:
        raise DataError(
            f'{where}: {unclear[0]}: is not supported; "weight": 0 leaves a turn out, 1 trains it'
        )
    for name, value in marks.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise DataError(f"{where}: {name} {value!r}: must be 0 or 1")
        if value and message["role"] != "assistant":
            raise DataError(f"{where}: {name} {value!r}: only turns of the assistant are trained")
    if len({bool(value) for value in marks.values()}) > 1:
        raise DataError(f"{where}: {', '.join(marks)}: one says that it is trained, another that it is not")
    return all(marks.values())


def _take_thoughts(message: dict[str, Any], where: str) -> None:
    """Moves the thoughts among the parts of a message's content to its reasoning.

    DataError for a thought after a text: templates write thoughts first.
    """
    parts = [part for part in message["content"] if not (isinstance(part, dict) and part.get("text") == "")]
    thoughts = [part for part in parts if isinstance(part, dict) and part.get("type") == "thinking"]
    if thoughts and all(isinstance(thought.get("thinking"), str) for thought in thoughts):
        if parts[: len(thoughts)] != thoughts:
            raise DataError(
                f"{where}: content: a part of type thinking is after another; valid: before all others"
            )
        message["reasoning_content"] = "".join(thought["thinking"] for thought in thoughts)
        message["content"] = parts[len(thoughts) :]


def _content(content: Any, where: str) -> str | None:
    """Text of a message. A list of text parts is joined, because many templates would leave it out."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            kinds = sorted({str(part.get("type")) if isinstance(part, dict) else "?" for part in content})
            raise DataError(f"{where}: content of parts {', '.join(kinds)}; only text can be trained on")
        return "".join(parts)
    if content is not None and not isinstance(content, str):
        raise DataError(f"{where}: content is {type(content).__name__}; must be text")
    return content


def listed(value: Any) -> Any:
    """The messages that a text holds as JSON, as in CSV files and some parquet; else the value unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            messages = json.loads(value)
            if messages and all(
                isinstance(message, dict) and message.keys() & {"role", "from"} for message in messages
            ):
                return messages
    return value


def _json(value: Any, where: str, kind: type) -> Any:
    """A value of type `kind`, which some files hold as JSON in a text; None for a blank text.

    DataError for a value of another type.
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
    """The value without null fields; null items of lists are kept, because Arrow adds none."""
    if isinstance(value, dict):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _calls_and_tools(row: dict) -> Iterator[Any]:
    """The parts of a row in which a null may have a meaning: its tools, and the arguments of its calls."""
    yield row.get("tools")
    for name in ("messages", "conversations", "prompt", "completion", "chosen", "rejected"):
        for message in row[name] if isinstance(row.get(name), list) else ():
            for call in (message.get("tool_calls") if isinstance(message, dict) else None) or ():
                called = call.get("function") if isinstance(call, dict) else None
                yield called.get("arguments") if isinstance(called, dict) else None


def _nulls(value: Any) -> int:
    """The number of null fields within a value."""
    if isinstance(value, dict):
        return sum(1 if field is None else _nulls(field) for field in value.values())
    return sum(map(_nulls, value)) if isinstance(value, list) else 0


def _key(prompt: Any, whole: Any) -> str:
    """A row's key, made from its prompt, so that no prompt is in two splits; else made from `whole`."""
    return json.dumps(prompt or whole, sort_keys=True, default=str)
