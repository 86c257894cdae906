"""What `make train` trains completes lines of Python functions, most of which parse."""

import ast
from pathlib import Path

import forked
import pytest

from tmoe.generate.load import load
from tmoe.generate.sampler import Sampling

# Beginnings of functions; each is completed up to the end of its line. The model was trained on 128 bytes at
# a time for three minutes, so lines are what it can do.
BEGINNINGS = [
    "def __init__(self",
    "def __init__(self, name",
    "def __init__(self, name, value",
    "def close(self",
    "def read(self",
    "def write(self, data",
    "def get(self, key",
    "def reset(self",
    "def __len__(self",
    "def __repr__(self",
    "def __eq__(self, other",
    "def f(self):\n    return N",
    "def f(self):\n    return T",
    "def f(self):\n    return F",
    "def f(self):\n    return []",
    "def f(x):\n    if x is ",
    "def f(x):\n    if x is not ",
    "def f(self):\n    if self.x is ",
    "def f(self):\n    if self._file is not ",
    "def f(self, x):\n    self.x = N",
]
# sharp and without improbable bytes; seed 0
HOW = Sampling(temperature=0.3, min_p=0.1, stop=("\n",), max_tokens=60, seed=0)


def parses(text: str) -> bool:
    """Whether a text is Python; a line that opens a block gets one."""
    try:
        ast.parse(text + " pass" if text.endswith(":") else text)
    except (SyntaxError, ValueError):
        return False
    return True


def completed(run: Path) -> list[str]:
    """Each beginning with its completion, where that reached the line's end."""
    found = load(run, device="cpu").engine().generate(BEGINNINGS, 1, HOW)
    pairs = zip(BEGINNINGS, found, strict=True)
    return [begin + sample.text for begin, (sample,) in pairs if sample.finish == "stop"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_half_of_the_completions_parse(tmp_path):
    """As `make train` trains, seed and all: 15 of 20 where this was written; half are asked for."""
    words = ["train.py", "tiny", "--parallel.ep", "2", "--resume", "none", "--out", str(tmp_path)]
    done = forked.torchrun(2, words, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    texts = completed(tmp_path)
    assert sum(map(parses, texts)) >= len(BEGINNINGS) / 2, texts


def test_parses_tells_python_from_other_text():
    assert parses("def f(x):\n    if x is None:") and parses("def f(self, x):")
    assert not parses("def f(self))") and not parses("def f(x):\n    return the first")
