"""The one line that a process ends with: where torchrun reads it, whose report then holds it.

torchrun ends with some thirty lines of its own, whatever its workers have said. Of these "traceback :" is
what the worker that failed first left in the file that TORCHELASTIC_ERROR_FILE names.

next: tmoe/run/watch/__init__.py
"""

import json
import math
import os
import time
from contextlib import suppress


def leave(line: str, behind: bool = False) -> None:
    """Writes why this process ends, if torchrun started it; anything else has no use for it.

    behind: it ends because another one did. torchrun takes the earliest for the cause, and tells seconds.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now = math.ceil(time.time()) if behind else math.floor(time.time())
    told = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(now)}}
    with suppress(OSError), open(path, "w") as file:  # the line is on stderr as well
        json.dump({"message": told}, file)
