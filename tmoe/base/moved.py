"""Lets modules be imported by the names that they had until 2026-11-28 (docs/moved.md).

An old name gives the module itself, with a warning that has the new name. Version 0.2 will remove the names
in moved.json.
"""

import importlib
import json
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


@cache
def moved() -> dict[str, str]:
    """The new names of modules, by their old names."""
    return json.loads(Path(__file__).with_suffix(".json").read_text())


class OldNames(MetaPathFinder, Loader):
    """The last finder, which is asked only for modules that no other finder has."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in moved():
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = moved()[spec.name]
        warnings.warn(f"{spec.name} is {new} now", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__  # the import system replaces it by the spec of the old name
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Enables imports by old names. A second call changes nothing."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.append(OldNames())
