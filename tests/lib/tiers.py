"""The cases of a parametrized test that the fast tier runs; the slow tier runs all other cases."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_but(kept: Callable[[Any], bool] | Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases for pytest.mark.parametrize, all marked slow except those in `kept` (or accepted by it).

    A case is a tuple with one value for each name, or a single value that is not a tuple.
    """
    picks = kept if callable(kept) else list(kept).__contains__
    cases = list(cases)
    fast = [case for case in cases if picks(case)]
    assert fast, "no case is left for the fast tier"
    return [
        case
        if case in fast
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
