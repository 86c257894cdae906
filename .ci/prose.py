"""Finds wordings that a reader has to resolve, in docstrings, comments, help texts, messages and pages.

    python .ci/prose.py               # the whole project; exit status 1 where a wording is found
    python .ci/prose.py tmoe/moe      # a folder or a file

A file that needs such a word names it: `# prose: WORD, WORD` in code, `<!-- prose: WORD -->` in a page. Code
between backticks is not read.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PLACES = ["train.py", "tmoe", "examples", "benchmarks", "tests/lib", ".ci"]
PLACES += ["docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
WORDS = re.compile(
    r"(?<![-\w])(so many|of (its|their) own|taken for|comes to|there (is|are) of|what is no|go(es)? on|told"
    r"|alike|beside|behind|anew|nobody|who has|without a word|by (itself|themselves)|the others'?|as it comes"
    r"|sa(id|ys) so|here and there)(?![-\w])",
    re.IGNORECASE,
)
BEGINNINGS = re.compile(
    r"(Of|Those|What|By(?! default\b)|As(?! (a|the) (default|result|rule)\b| of\b| in\b)|Who|Whose|Behind"
    r"|Beside)\b"
)
ALLOWED = re.compile(r"(?:#|<!--) prose: ([^#>]*?)\s*(?:-->|#|$)", re.MULTILINE)
SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`])")
LIST_ITEM = re.compile(r"\n\s*\n|\n\s*[-*0-9]+[.)]?\s")
CODE = re.compile(r"`[^`]*`")
NO_PAGE = re.compile(r"```.*?```|^\s*(\||>|    )[^\n]*$", re.MULTILINE | re.DOTALL)


def sentences(text: str) -> Iterator[str]:
    """Sentences of at least four words."""
    for block in LIST_ITEM.split(text):
        for sentence in SENTENCE.split(" ".join(block.split())):
            if len(sentence.split()) >= 4:
                yield sentence


def of_python(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring, run of comments, and string of at least four words."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, re.sub(r"(?m)^(next:|    ).*", "", node.value)
    first, last, block = 0, -2, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or ALLOWED.match(token.string):
            continue
        if token.start[0] != last + 1:
            yield first, " ".join(block)
            first, block = token.start[0], []
        block.append(token.string.lstrip("# "))
        last = token.start[0]
    yield first, " ".join(block)


def found_in(path: Path) -> Iterator[str]:
    """A line for each wording of a file that is not allowed."""
    source = path.read_text()
    allowed = {word.strip().lower() for words in ALLOWED.findall(source) for word in words.split(",")}
    texts = of_python(source) if path.suffix == ".py" else [(0, NO_PAGE.sub(" ", source))]
    for line, text in texts:
        for sentence in sentences(CODE.sub("CODE", text)):
            words = [match[0] for match in WORDS.finditer(sentence)]
            if beginning := BEGINNINGS.match(sentence):
                words.append(beginning[0])
            if words := [word for word in words if word.lower() not in allowed]:
                yield f"{path}:{line}: {', '.join(words)}: {sentence[:160]}"


def main(places: list[str]) -> int:
    roots = [Path(place) for place in places or PLACES]
    paths = [path for root in roots for path in ([root] if root.is_file() else sorted(root.rglob("*")))]
    found = [
        line
        for path in paths
        if path.suffix in (".py", ".md") and path.name != "prose.py"
        for line in found_in(path)
    ]
    print(*found, sep="\n", end="\n" if found else "")
    if found:
        print(f"{len(found)} sentences; CONTRIBUTING.md has the rules, and .ci/prose.py how to allow a word")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
