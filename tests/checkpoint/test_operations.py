"""docs/operations.md tells the truth: every message that it quotes can be printed by the code.

And every command exists.
"""

import ast
import re
from pathlib import Path

import pytest

from tmoe.checkpoint import tools as offline
from tmoe.cli.flags import flags_of_settings
from tmoe.config.run import Config
from tmoe.extras import upcycle
from tmoe.hf import command_line as hf

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/operations.md").read_text()
FOREIGN = {"Received data size doesn't match expected size", "Timeout (0:0"}  # gloo's and Python's own


def strings() -> list[str]:
    """Every string of the source, with values of f-strings as `…`."""
    found = []
    for path in [ROOT / "train.py", *(ROOT / "tmoe").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(\.\d+)?[sdg]", "…", node.value))
    return found


def messages() -> list[str]:
    cells = (
        line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| ") and "it says" not in line
    )
    return [quoted for cell in cells for quoted in re.findall(r"`([^`]+)`", cell)]


@pytest.fixture(scope="module")
def source() -> list[str]:
    return strings()


@pytest.mark.parametrize("message", [m for m in messages() if m not in FOREIGN])
def test_quoted_messages_are_in_the_source(source, message):
    """Flags, which an error holds as fields, are settings; the text between them is in the source."""
    flags = set(re.findall(r"--[a-z][a-z.-]*[a-z]", message))
    known = {flag for flag, _ in flags_of_settings(Config)}
    assert all(flag in known or any(flag in text for text in source) for flag in flags), flags
    between = re.sub(r"--[a-z][a-z.-]*[a-z](=\w+)?", "…", message)
    fragments = [part.strip(" ,") for part in re.split(r"[…:;()]|\bvalid\b", between)]
    fragments = [part for part in fragments if len(part) > 1]
    assert flags or fragments
    assert all(any(part in text for text in source) for part in fragments), fragments


def test_the_page_quotes_enough():
    assert len(messages()) > 25


@pytest.mark.parametrize("main", [offline.main, hf.main, upcycle.main])
def test_tools_and_flags_exist(main, capsys):
    module = ".".join(main.__module__.split(".")[:2])  # tmoe.checkpoint, of tmoe.checkpoint.tools
    words = {
        word
        for line in PAGE.splitlines()
        for part in line.split(";")
        if f"{module} " in part
        for word in part.split()
    }
    known = ""
    for command in [["inspect"], ["verify"], ["reshard"], ["average"], ["import"], ["export"], []]:
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        known += capsys.readouterr().out
    flags = {word for word in words if re.fullmatch(r"--[a-z-]+", word)}
    others = {"--init", "--adapter"}  # flags of train.py and tmoe.generate on the same lines
    assert {flag for flag in flags if flag not in known} <= others, known
