"""torch.compile's compiler, with a switch to compile graphs without running them.

next: model/compile_ahead.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from tmoe.base.private_torch import find, find_or_note
from tmoe.model.attention_backend import COMPILE

WITHOUT = "blocks are compiled in their first step, in which ranks wait for the slowest compiler"
_Inductor: Any = find_or_note("torch._TorchCompileInductorWrapper", WITHOUT)


class NotRun(Exception):
    """Raised instead of running a graph: the graph was compiled, and not run."""


class Compiler:
    """A backend of torch.compile: inductor's graphs run, except inside `only_compiling`."""

    def __init__(self) -> None:
        self.inductor = _Inductor(None, COMPILE["options"], COMPILE["dynamic"])
        self.runs = True

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled = self.inductor(graph, inputs)

        def run(*args: Any) -> Any:
            if not self.runs:
                raise NotRun
            return compiled(*args)

        return run

    @contextmanager
    def only_compiling(self) -> Iterator[None]:
        """In this context, calls compile forward and backward, and raise NotRun instead of running."""
        # by default torch compiles a backward when it first runs, unless sizes are known only at run time
        name = "force_non_lazy_backward_lowering"
        known = find(f"torch._functorch.config.{name}") is not None
        self.runs = False
        try:
            with torch._functorch.config.patch({name: True}) if known else nullcontext():
                yield
        finally:
            self.runs = True


compiler = Compiler() if _Inductor is not None else None


def compiled(fn: Callable) -> Callable:
    """fn, compiled as one graph at its first call."""
    if compiler is None:
        return torch.compile(fn, fullgraph=True, **COMPILE)
    return torch.compile(fn, fullgraph=True, dynamic=COMPILE["dynamic"], backend=compiler)
