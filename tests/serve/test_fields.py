"""docs/serve.md's table of fields says what the code does, and it has every field of OpenAI's interface.

next: tmoe/serve/protocol.py
"""

import json
import re
from pathlib import Path

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as TextParams

from tmoe.serve.protocol import CHAT, NEUTRAL, TEXT, WITHOUT_EFFECT, Fields, Refused

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
ROUTES = dict(both=(CHAT, TEXT), chat=(CHAT,), completions=(TEXT,))
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.read_text().splitlines()
    if re.match(r"\| `\w+` \| (both|chat|completions) \|", line)
]
TABLE = {
    name.strip(" `"): (route, treatment, rest[0] if rest else "") for name, route, treatment, *rest in ROWS
}


def accepts(served, name, value):
    try:
        Fields({name: value}, served)
    except Refused as refused:
        assert refused.status == 400 and refused.param == name and name in refused.message
        return False
    return True


def test_the_table_has_every_field():
    assert len(TABLE) == len(ROWS)
    known = {
        *ChatParams.__annotations__,
        *TextParams.__annotations__,
        *CHAT,
        *TEXT,
        *NEUTRAL,
        *WITHOUT_EFFECT,
    }
    assert {*TABLE} == known


@pytest.mark.parametrize("name", TABLE)
def test_the_code_treats_a_field_as_the_table_says(name):
    route, treatment, values = TABLE[name]
    for served in (CHAT, TEXT):
        if treatment == "served":
            assert (name in served) == (served in ROUTES[route]) == accepts(served, name, "anything")
        elif treatment == "no effect":
            assert accepts(served, name, "anything") and name not in NEUTRAL
        elif treatment == "neutral value":
            wanted = [json.loads(value) for value in re.findall("`([^`]*)`", values)]
            assert wanted == [*NEUTRAL[name]]
            assert all(accepts(served, name, value) for value in wanted)
            assert not accepts(served, name, "surely not")
        else:
            assert treatment == "refused" and not accepts(served, name, "anything")
        assert accepts(served, name, None)
    assert treatment == "served" or route == "both"


def test_true_is_no_number():
    """In Python True == 1 and 0.0 == False."""
    Fields(dict(best_of=2, n=2), TEXT)
    with pytest.raises(Refused):
        Fields(dict(best_of=3, n=2), TEXT)
    assert not accepts(TEXT, "best_of", True) and not accepts(TEXT, "frequency_penalty", False)
    assert not accepts(CHAT, "parallel_tool_calls", 1) and accepts(TEXT, "frequency_penalty", 0.0)


@pytest.mark.parametrize(
    "low, high, said", [(0, 2**20, "0 to 1048576"), (-(2**63), 1.5, f"{-(2**63)} to 1.5")]
)
def test_a_bound_is_written_with_all_its_digits(low, high, said):
    with pytest.raises(Refused, match=f"must be a number from {said}$"):
        Fields({"n": 1e30}, CHAT).number("n", low, high)
