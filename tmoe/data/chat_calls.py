"""A call of a tool in one form, whatever form a row has it in: OpenAI's, with its arguments as an object.

next: data/chat_rows.py
"""

from __future__ import annotations

import json
from typing import Any

from tmoe.data.tokenizer import DataError

OUTER = ("id", "type", "index")  # fields of a call around its function
SAME_ARGUMENTS = ("parameters", "input", "args")  # other collections' names for them


def objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with every call as `one_call` gives it. DataError as there."""
    found = []
    for i, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            where = f"messages[{i}]: tool_calls"
            message = message | dict(tool_calls=[one_call(c, f"{where}[{j}]") for j, c in enumerate(calls)])
        found.append(message)
    return found


def one_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """{"type": "function", "id" if there is one, "function": {"name", "arguments": object}}.

    DataError that names `where` for arguments that are neither an object nor JSON of one.
    """
    bare = "function" not in call  # the name and the arguments alone, as in Hermes' rows
    function = {k: v for k, v in call.items() if k not in OUTER} if bare else call["function"]
    outer = {k: v for k, v in call.items() if k in OUTER} if bare else call
    if "arguments" not in function:
        same = next((name for name in SAME_ARGUMENTS if name in function), None)
        function = {"arguments" if name == same else name: one for name, one in function.items()}
    arguments = json_object(function.get("arguments"), f"{where}: arguments")
    return dict(type="function") | outer | dict(function=function | dict(arguments=arguments))


def json_object(value: Any, where: str) -> dict[str, Any]:
    """An object, or the one that a text holds as JSON; {} for null and an empty text.

    DataError that names `where` for others.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value, object_pairs_hook=_unique, parse_constant=_finite)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: text that is no JSON object: {error}") from error
    if value in (None, "") or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, list) and all(isinstance(one, tuple) and len(one) == 2 for one in value):
        return dict(value)  # a map of Arrow
    if not isinstance(value, dict):
        raise DataError(f"{where}: {type(value).__name__}; must be an object, or JSON of one in a text")
    return value


def _finite(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("an object that has a key twice")
    return found
