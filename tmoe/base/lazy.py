"""Makes packages whose public names are imported at their first use.

So a command that reads a log or a step folder need not import torch's compiler and Triton.

    __getattr__, __dir__ = lazy(__name__, {"moe_mlp": "tmoe.ops.experts.op"})      # in a package's __init__

next: __init__.py
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec


def lazy(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__` (PEP 562).

    modules: the module of each public name. The package's own modules need no entry.
    """

    def get(name: str) -> object:
        if name in modules:
            value = getattr(importlib.import_module(modules[name]), name)
            setattr(sys.modules[package], name, value)  # the next use does not call this function
            return value
        if not name.startswith("_") and find_spec(f"{package}.{name}"):
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *sys.modules[package].__all__})

    return get, names
