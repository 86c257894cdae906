"""Looks up private names of torch and triton that tmoe uses; no name is assumed to exist.

If a version lacks a name, tmoe uses public functions instead, and one line reports it (`take`). Names without
a public replacement are in NEEDED: a start without one of them ends with one message that names the versions
with which tmoe was tested (`lacks`).
"""

import functools
import importlib
import logging
import os
from typing import Any

TESTED = "torch 2.11 and 2.13 to 2.15 with triton 3.6, 3.8 and 3.9"
NEEDED = {  # names without a public replacement, and their users
    "torch._foreach_add_": "the optimizer",
    "torch._foreach_copy_": "averaged weights",
    "torch._foreach_mul_": "the optimizer",
    "torch._foreach_norm": "the norm of the gradients",
    "torch.Tensor._version": "working copies of weights",
    "torch.distributed.tensor.placement_types._StridedShard": "experts that data-parallel ranks share",
}
log = logging.getLogger("tmoe.base.private_torch")


def find(path: str) -> Any | None:
    """The object at a dotted path of modules and then attributes; None if any part is missing."""
    names = path.split(".")
    for split in range(len(names), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(names[:split]))
        except ImportError:
            continue
        for name in names[split:]:
            value = getattr(value, name, None)
        return value
    return None


def find_or_note(path: str, without: str) -> Any | None:
    """`find(path)`. If it finds nothing, a note says what follows.

    without: the consequence; it continues the line "torch 3.0 has no ...: ".
    """
    value = find(path)
    if value is None:
        note(f"{_version(path)} has no {path}: {without}")
    return value


@functools.cache
def note(text: str) -> None:
    """Logs one line on rank 0, once per process.

    It is not an error: everything works, but some parts are slower or not reported.
    """
    if os.environ.get("RANK", "0") == "0":
        log.warning("%s (tmoe was tested with %s)", text, TESTED)


def lacks() -> str:
    """The error for names of NEEDED that this torch lacks, in one message; "" if it has all."""
    missing = [f"{path} ({user})" for path, user in NEEDED.items() if find(path) is None]
    if not missing:
        return ""
    return f"{_version('torch')} has no {', '.join(missing)}: tmoe was tested with {TESTED}"


def need(owner: object, name: str, user: str) -> Any:
    """A private attribute without a public replacement. RuntimeError if `owner` lacks it."""
    if not hasattr(owner, name):
        kind = type(owner).__name__
        raise RuntimeError(f"{user}: {_version('torch')} has no {kind}.{name}; tmoe was tested with {TESTED}")
    return getattr(owner, name)


def _version(path: str) -> str:
    """The package of a dotted path and its version, or torch's version if it has none."""
    root = path.partition(".")[0]
    import torch  # imported late, because a command that draws a report does not need it

    return f"{root} {getattr(importlib.import_module(root), '__version__', torch.__version__)}"
