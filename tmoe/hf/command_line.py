"""The command line of hf/: the first word names a function, and only the module of that function is imported.

next: hf/importer.py
"""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import tyro

from tmoe.checkpoint import tools

# the function of each command
ADAPTERS = "tmoe.hf.adapters.commands"
COMMANDS = {
    "import": "tmoe.hf.importer.import_hf",
    "export": "tmoe.hf.export.export_hf",
    "import-adapter": f"{ADAPTERS}.import_adapter",
    "export-adapter": f"{ADAPTERS}.export_adapter",
    "merge": f"{ADAPTERS}.merge",
}
FAMILIES = {"families": "tmoe.hf.families.print_families"}


def main(argv: Sequence[str] | None = None, **more: str) -> None:
    """Runs the command line. An error ends the process with one message.

    more: commands of extras/, which hf/ does not import.
    """
    words = sys.argv[1:] if argv is None else argv
    places = {**COMMANDS, **more, **FAMILIES}
    commands = {name: (found if name in words[:1] else described)(at) for name, at in places.items()}
    text = ast.get_docstring(source("tmoe.hf.importer"))
    tools.commands(commands, "python -m tmoe.hf", text, argv, config=(tyro.conf.FlagCreatePairsOff,))


def found(place: str) -> Callable[..., None]:
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(module), name)


def described(place: str) -> Callable[[], None]:
    """A function with the docstring of another, for a list of commands. The other one is not imported."""
    module, _, name = place.rpartition(".")

    def stand_in() -> None: ...

    nodes = [n for n in source(module).body if isinstance(n, ast.FunctionDef) and n.name == name]
    stand_in.__doc__ = ast.get_docstring(nodes[0])
    return stand_in


def source(module: str) -> ast.Module:
    """The tree of a module that need not be imported."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return ast.parse(Path(spec.origin).read_text())
