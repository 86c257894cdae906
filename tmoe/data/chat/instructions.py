"""Reads rows of an instruction (Alpaca, Dolly) as rows of prompt and completion.

    {"instruction": "Translate.", "input": "Bonjour", "output": "Hello"}

The question is a message of the user: the instruction, a line break and the input. LLaMA-Factory reads such
rows in this way. The answer is the completion. Dolly's names of input and output are context and response. A
preference has chosen and rejected in place of the output.

next: data/chat/encoding.py
"""

from __future__ import annotations

from typing import Any

from tmoe.data.tokenizer import DataError

INPUTS = ("input", "context")
OUTPUTS = ("output", "response", "completion")


def is_instruction(row: dict[str, Any]) -> bool:
    """Whether a row has an instruction and its answer."""
    return row.get("instruction") is not None and any(row.get(name) is not None for name in OUTPUTS)


def fields_of(row: dict[str, Any]) -> tuple[str, str, str]:
    """The names of the row's fields of instruction, input and output, which may be absent."""
    asked, answered = (next((name for name in names if name in row), names[0]) for names in (INPUTS, OUTPUTS))
    return "instruction", asked, answered


def with_prompt(row: dict[str, Any], where: str, output: bool = True) -> dict[str, Any]:
    """The row with a prompt in place of its instruction and input, and a completion in place of its output.

    output: whether the row has an output, which a preference lacks.
    DataError, which names `where`, for a field that is not text, and for a row without question or answer.
    """
    _, added, answered = fields_of(row)
    fields = ("instruction", added, answered) if output else ("instruction", added)
    for name in fields:
        if name in row and not isinstance(row[name], str):
            raise DataError(f"{where}: {name} is {type(row[name]).__name__}; must be text")
    asked = "\n".join(filter(None, (row[name] for name in fields[:2] if name in row)))
    if not asked.strip():
        raise DataError(f"{where}: instruction: is empty, so there is no question")
    rest = {name: value for name, value in row.items() if name not in fields}
    rest["prompt"] = [dict(role="user", content=asked)]
    if not output:
        return rest
    if not row[answered].strip():
        raise DataError(f"{where}: {answered}: is empty, so there is nothing to learn")
    return rest | dict(completion=[dict(role="assistant", content=row[answered])])
