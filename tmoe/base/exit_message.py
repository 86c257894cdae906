"""Passes the last line of a process to torchrun, which shows it in its report.

torchrun prints about thirty lines at its end, whatever its workers have printed. One of them, "traceback
:", shows the text that the worker that failed first left in the file that TORCHELASTIC_ERROR_FILE names.

next: tmoe/run/watch/__init__.py
"""

import json
import math
import os
import time
from contextlib import suppress


def leave(line: str, behind: bool = False) -> None:
    """Writes the reason for this process's end, if torchrun started it; other launchers do not read it.

    torchrun reports the process with the earliest time, in whole seconds, as the cause.

    Args:
        line: the reason.
        behind: whether this process ends because another one has ended; its time is then rounded up.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now = math.ceil(time.time()) if behind else math.floor(time.time())
    message = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(now)}}
    with suppress(OSError), open(path, "w") as file:  # the line is on stderr as well
        json.dump({"message": message}, file)
