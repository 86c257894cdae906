"""The first import of a test process: turns the garbage collector off until `settle`, after all imports.

Imported and parsed objects are never freed, but each full collection visits all of them. These collections
are a third of the time of `import torch` and four fifths of ast.parse.
"""

import ast
import gc
from pathlib import Path

gc.disable()


def settle() -> None:
    """Excludes all existing objects from collection and turns the collector on."""
    gc.collect()
    gc.freeze()
    gc.enable()


def parsed(path: Path) -> ast.Module:
    """The tree of a Python file."""
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()
