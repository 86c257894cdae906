"""Reads rows of a prompt, a completion and a label, the format of KTO.

    {"prompt": ..., "completion": ..., "label": true}

Prompt and completion are texts or lists of messages, as in rows without a label (data/chat/conversations.py).

next: data/chat/mismatched.py
"""

from __future__ import annotations

from typing import Any

from tmoe.data.tokenizer import DataError


def without_label(row: Any, where: str) -> tuple[Any, bool | None]:
    """A row without its label, and the label. DataError, which names `where`, unless it is true or false."""
    if not isinstance(row, dict):
        return row, None  # parse_row refuses this row
    label = row.get("label")
    if not isinstance(label, bool):
        shown = f"label={label!r:.40}" if "label" in row else "no label"
        raise DataError(
            f"{where}: {shown}: --preference.loss kto needs rows of prompt, completion and label; "
            "valid: true for a good completion, false for another"
        )
    return {name: value for name, value in row.items() if name != "label"}, label
