"""Converts tool calls and their results from the forms that rows use to one form, OpenAI's.

Arguments become an object, and a result becomes a text.

next: data/chat/conversations.py
"""

from __future__ import annotations

import ast
import json
from contextlib import suppress
from typing import Any

from tmoe.data.tokenizer import DataError

OUTER = ("id", "type", "index")  # fields of a call around its function
SAME_ARGUMENTS = ("parameters", "input", "args")  # names of "arguments" in other data sets


def objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with every call in the form that `one_call` returns. DataError as in `one_call`."""
    parsed = []
    for i, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            where = f"messages[{i}]: tool_calls"
            message = message | dict(tool_calls=[one_call(c, f"{where}[{j}]") for j, c in enumerate(calls)])
        parsed.append(message)
    return parsed


def one_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """The call as {"type": "function", "id" if there is one, "function": {"name", "arguments": object}}.

    DataError, which names `where`, for arguments that are neither an object nor the JSON of an object.
    """
    bare = "function" not in call  # a call of only name and arguments, as in Hermes' rows
    function = {k: v for k, v in call.items() if k not in OUTER} if bare else call["function"]
    outer = {k: v for k, v in call.items() if k in OUTER} if bare else call
    if "arguments" not in function:
        same = next((name for name in SAME_ARGUMENTS if name in function), None)
        function = {"arguments" if name == same else name: value for name, value in function.items()}
    arguments = json_object(function.get("arguments"), f"{where}: arguments")
    return dict(type="function") | outer | dict(function=function | dict(arguments=arguments))


def said_calls(said: Any, where: str) -> list[dict[str, Any]]:
    """The calls of a turn whose text is the JSON of one or several calls, as in ShareGPT's function_call.

    The text may also be in Python's syntax, as in the data set Toucan.
    """
    calls = said
    if isinstance(said, str):
        with suppress(ValueError, RecursionError, SyntaxError, MemoryError):
            calls = ast.literal_eval(said.strip())
        with suppress(ValueError, RecursionError):
            calls = json.loads(said)
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not calls:
        raise DataError(f'{where}: a call must be JSON of {{"name", "arguments"}}; here is {said!r:.80}')
    return calls


def result_text(content: Any) -> Any:
    """A tool's result as text: JSON of a value, unless it is None, a text or a list of parts of text."""
    parts = isinstance(content, list) and all(isinstance(part, str) or _is_part(part) for part in content)
    if content is None or isinstance(content, str) or parts:
        return content
    return json.dumps(content, ensure_ascii=False)


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def json_object(value: Any, where: str) -> dict[str, Any]:
    """The value if it is an object, or the object in a text of JSON, which may be encoded twice.

    Null and blank text give {}. DataError, which names `where`, for other values.
    """
    for _ in range(2):  # some data sets encode the JSON text as JSON again
        if isinstance(value, str) and value.strip():
            try:
                value = json.loads(value, object_pairs_hook=_unique, parse_constant=_finite)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: text that is no JSON object: {error}") from error
    if value in (None, "") or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, list) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        return dict(value)  # Arrow's map type
    if not isinstance(value, dict):
        raise DataError(f"{where}: {type(value).__name__}; must be an object, or JSON of one in a text")
    return value


def _finite(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(fields := dict(pairs)) < len(pairs):
        raise ValueError("an object that has a key twice")
    return fields
