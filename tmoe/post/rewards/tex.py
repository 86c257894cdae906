r"""Reads TeX: the contents of the last \boxed{...}, groups in braces, and text without looks and units.

next: post/rewards/number.py
"""

import re

BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")


def last_boxed(text: str) -> str | None:
    r"""The contents of the last complete \boxed{...}, with nested braces; None without one."""
    end = len(text)
    for box in reversed(list(BOX.finditer(text))):
        group = group_at(text, box.end(), end - box.end())
        if group is not None:
            return group[0].strip()
        end = box.start()  # a box around an unclosed box is not closed either
    return None


def group_at(text: str, at: int, most: int | None = None) -> tuple[str, int] | None:
    r"""The contents of the braces that open at `at`, after spaces, and the place where they end.

    None if no brace opens there, or if it does not close within `most` characters. Escaped braces, \{ and \},
    are text.
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


UNITS = (
    r"degrees?|(?:square|sq\.?|cubic)\s*[a-z]+|units?|[ckm]m|kg|ft|(?:centi|kilo|milli)?meters?|miles?|inch(?:es)?"
    r"|feet|foot|yards?|seconds?|minutes?|hours?|days?|weeks?|months?|years?|dollars?|cents?|mph|lit(?:er|re)s?"
    r"|pounds?|points?|percent|ways|people|students?"
)
RATES = r"(?<=\s)(?:[ck]?m|miles?|met(?:er|re)s?|feet|ft)\s*/\s*(?:h(?:ou)?r?|s(?:ec(?:ond)?)?|min(?:ute)?)"
RAISED = r"\s*\^\s*(?:\{\s*[23]\s*\}|[23])"
WORDS = (
    r"\\(?:text|textrm|textnormal|textit|textbf|mathrm|mathbf|mathit|mathsf|boldsymbol|bm|mbox|hbox"
    r"|operatorname)"
)
NOON = r"(?!\s*[aApP]\.?\s*[mM]\b)"  # a.m. and p.m. are no units
# Units at the end of a text, after a number or a command: "5\text{ cm}^2", "5cm", "5 square inches", "5 m/s".
OF_UNITS = re.compile(
    rf"(?:(?<=[\d}})%.\s])|(?<=\\pi))"
    rf"(?:{WORDS}\s*\{{{NOON}[\s,]*[a-zA-Z][^{{}}]*\}}|(?:{UNITS})\b\.?|{RATES}\b)(?:{RAISED})?\s*$"
)
RAISED_UNIT = re.compile(rf"((?<=[\d\s}})]){WORDS}\s*\{{[^{{}}]*\}}|(?<=[\d\s])(?:m|in|{UNITS})){RAISED}")
SIGNS = {
    **{"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty "},
    **{"±": r"\pm ", "∓": r"\mp "},
    **{
        "√": r"\sqrt ",
        "∪": r"\cup ",
        "±": r"\pm ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "°": "",
        "％": "%",
        r"\%": "%",
    },
    **{"½": r"\frac12", "¼": r"\frac14", "¾": r"\frac34", "⅓": r"\frac13", "⅔": r"\frac23"},
    **{
        r"\lbrace": r"\{",
        r"\rbrace": r"\}",
        r"\lbrack": "[",
        r"\rbrack": "]",
        r"\!": "",
        r"\varnothing": r"\emptyset",
    },
}
# 0.1\overline{6}: the digits before the point, those after it that do not repeat, and those that repeat.
REPEATING = re.compile(
    r"(\d{0,20})\.(\d{0,20})\\(?:overline|bar)\s*(?:\{\s*(?=\d+\s*\})|(?=\d(?!\d)))(\d{1,20})(?:\s*\})?"
)
OF_WORDS = re.compile(rf"{WORDS}\s*\{{([^{{}}]*)\}}")
AROUND = re.compile(rf"(?:{WORDS}\s*)?(?={{)")  # the beginning of a text that is in braces
LOOKS = tuple(
    (re.compile(pattern), to)
    for pattern, to in (
        (r"\\(?:left|right|middle|bigl?|bigr|Bigl?|Bigr|displaystyle|textstyle)(?![a-zA-Z])", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\?\$|[£€¥]|\\(?:pounds|euro|yen)(?![a-zA-Z])", ""),
        (r"(?<!\\)\\[()\[\]]|^\s*(?:\\approx(?![a-zA-Z])|≈)", ""),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])", ""),
    )
)
SPELLINGS = tuple(
    (re.compile(pattern), to)
    for pattern, to in (
        (r"(?<=[\s\d)}\]])(?:and|or)(?=[\s\\(\[-])", ","),
        (r"\\(le|ge|ne)q(?![a-zA-Z])", r"\\\1"),
        (r"\\(?:[lr]?vert|mid)(?![a-zA-Z])", "|"),
        (r"\\\{\s*\\\}", r"\\emptyset"),
        (r"(?<![\d.,])\d{1,3}(?:\s\d{3})+(?![\d.,]|\s*/)", lambda match: re.sub(r"\s", "", match[0])),
        (r"(?<=\d)\{,\}(?=\d)", ","),
        (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
        (r"\s*(\\cup|\\in(?![a-zA-Z])|[=,()\[\]{}])\s*", r"\1"),
        (r"(^|[(\[,])\+", r"\1"),
    )
)


def _repeating(match: re.Match[str]) -> str:
    whole, first, again = match.groups()
    nines = (10 ** len(again) - 1) * 10 ** len(first)
    return rf"\frac{{{int(whole + first + again) - int(whole + first or '0')}}}{{{nines}}}"


def without_periods(text: str) -> str:
    r"""Writes decimals with repeating digits as fractions: 0.1\overline{6} as \frac{15}{90}."""
    return REPEATING.sub(_repeating, text)


def _unwrapped(text: str) -> str:
    r"""A text without braces, \text or \mathbf around the whole text."""
    while match := AROUND.match(text):
        group = group_at(text, match.end())
        if group is None or group[1] != len(text):
            break
        text = group[0].strip()
    return text


def without_looks(text: str) -> str:
    r"""TeX without markup that changes only the look of an answer, and without the unit at its end.

    Removed are spaces of TeX, \( and \), braces around the whole text, \left and \right, \displaystyle,
    dollar signs, degrees, \text around words, and a full stop. \dfrac, \tfrac and \cfrac become \frac; signs
    of Unicode become TeX commands; "and" and "or" become commas.
    """
    text = without_periods(text)
    for sign, word in SIGNS.items():
        text = text.replace(sign, word)
    for pattern, to in LOOKS:
        text = pattern.sub(to, text)
    text = OF_UNITS.sub("", _unwrapped(text.strip().removesuffix(".").strip()))
    text = OF_WORDS.sub(r"\1", text)
    for pattern, to in SPELLINGS:
        text = pattern.sub(to, text.strip())
    return text.removesuffix(".").strip()
