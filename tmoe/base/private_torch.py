"""What tmoe takes from torch and triton that has no public name: looked for, never assumed to be there.

Where a version lacks something, tmoe goes the public way, and one line says so (`take`). What has no public
way is in
NEEDED: a start without it ends with one message that names the versions tmoe was tested with (`lacks`).
"""

import functools
import importlib
import logging
import os
from typing import Any

TESTED = "torch 2.11 and 2.13 to 2.15 with triton 3.6, 3.8 and 3.9"
NEEDED = {  # what has no public way, and what uses it
    "torch._foreach_add_": "the optimizer",
    "torch._foreach_copy_": "averaged weights",
    "torch._foreach_mul_": "the optimizer",
    "torch._foreach_norm": "the norm of the gradients",
    "torch.Tensor._version": "working copies of weights",
    "torch.distributed.tensor.placement_types._StridedShard": "experts that data-parallel ranks share",
}
log = logging.getLogger("tmoe.base.private_torch")


def find(path: str) -> Any | None:
    """What a dotted path leads to: modules as far as possible, then attributes.

    None where anything is missing.
    """
    names = path.split(".")
    for split in range(len(names), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(names[:split]))
        except ImportError:
            continue
        for name in names[split:]:
            found = getattr(found, name, None)
        return found
    return None


def take(path: str, without: str) -> Any | None:
    """`find(path)`. Where there is none, a note says what follows.

    without: continues the sentence "torch 3.0 has no ...: ".
    """
    found = find(path)
    if found is None:
        note(f"{_version(path)} has no {path}: {without}")
    return found


@functools.cache
def note(text: str) -> None:
    """One line on rank 0, once a process.

    Not an error: everything works, some of it slower or not reported.
    """
    if os.environ.get("RANK", "0") == "0":
        log.warning("%s (tmoe was tested with %s)", text, TESTED)


def lacks() -> str:
    """What this torch lacks and tmoe cannot do without, as one message; "" if nothing."""
    missing = [f"{path} ({user})" for path, user in NEEDED.items() if find(path) is None]
    if not missing:
        return ""
    return f"{_version('torch')} has no {', '.join(missing)}: tmoe was tested with {TESTED}"


def need(owner: object, name: str, user: str) -> Any:
    """A private attribute that has no public way. RuntimeError where `owner` lacks it."""
    if not hasattr(owner, name):
        kind = type(owner).__name__
        raise RuntimeError(f"{user}: {_version('torch')} has no {kind}.{name}; tmoe was tested with {TESTED}")
    return getattr(owner, name)


def _version(path: str) -> str:
    """The package of a dotted path and its version, or torch's where it has none."""
    root = path.partition(".")[0]
    import torch  # late: a command that draws a report does without

    return f"{root} {getattr(importlib.import_module(root), '__version__', torch.__version__)}"
