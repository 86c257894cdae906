"""The first import of a test process: the garbage collector is off until `settle`, behind all imports.

Imports and parsed files are objects that stay. Each full collection walks all of them and frees none: a third
of the time of `import torch`, four fifths of ast.parse.
"""

import ast
import gc
from pathlib import Path

gc.disable()


def settle() -> None:
    """Takes all objects out of the collector's sight and switches the collector on."""
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
