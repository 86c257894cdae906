r"""Braces of TeX: what the last \boxed{...} of a text holds, and the group that begins at a place.

next: post/rewards/number.py
"""

import re

BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")


def last_boxed(text: str) -> str | None:
    r"""What is inside the last whole \boxed{...}, nested braces and all; None without one."""
    end = len(text)
    for box in reversed(list(BOX.finditer(text))):
        found = group_at(text, box.end(), end - box.end())
        if found is not None:
            return found[0].strip()
        end = box.start()  # what a box that does not close is inside of does not close either
    return None


def group_at(text: str, at: int, most: int | None = None) -> tuple[str, int] | None:
    r"""What is inside the braces that open at `at`, spaces passed over, and where they end.

    None where none open there, or where they do not close within `most` characters. Escaped braces, \{ and
    \}, are text.
    """
    while at < len(text) and text[at].isspace():
        at += 1
    if not text.startswith("{", at):
        return None
    depth = 0
    i = at
    end = len(text) if most is None else min(len(text), at + most)
    while i < end:
        if text[i] == "\\":
            i += 2
            continue
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[at + 1 : i], i + 1
        i += 1
    return None
