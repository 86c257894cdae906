"""The program of a process that works out rewards: reads samples from a pipe, writes a line for each reward.

    python -P worker.py JOBS REPLIES PARENT       two descriptors, and the process whose end is its own

It is started by its path and imports neither tmoe nor torch, so that one that was killed is replaced in 0.1 s
and not in 3 s with 360 MB. A frame is four bytes of length and a pickle from the trainer; an answer is a line
of JSON, for what a worker says is trusted no further. First frame: {path, timeout_s, terms}, answered by
{"ready": true} or {"refused": [term, why]}. Others: (job, first term, end, pickled sample), a line for each
term from the first on.

next: post/rewards/builtin.py
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
import json
import math
import numbers
import os
import pickle
import random
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

MEMORY_GIB = 4  # of its own data, of one worker; behind it a MemoryError is raised
LENGTH = struct.Struct(">I")
HERE = Path(__file__).parent
PR_SET_PDEATHSIG = 1
IGNORED = "SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"
BATCHES = {"prompts", "completions", "completion_ids"}  # parameters of TRL's reward functions
WORDS_OF_ERROR = 2000  # characters of a traceback that are told


def main() -> None:
    jobs, replies, parent = (int(word) for word in sys.argv[1:4])
    settle(jobs, replies, parent)
    names = import_light()
    told = pickle.loads(read_frame(jobs))
    sys.path[:] = told["path"]
    functions = []
    for i, term in enumerate(told["terms"]):
        try:
            functions.append(load(term, told["timeout_s"], names))
        except BaseException as error:
            reply(replies, dict(refused=[i, said_of(error, term["file"])]))
            return
    reply(replies, dict(ready=True))
    make_sample = names["sample"].RewardSample
    while True:
        job, first, end, sample = pickle.loads(read_frame(jobs))
        for i in range(first, end):
            # each has a sample of its own, so that none sees what another has done to its row
            reply(replies, dict(job=job, term=i) | outcome(functions[i], make_sample, sample))


def settle(jobs: int, replies: int, parent: int) -> None:
    """Ends with the trainer, even in the middle of a loop in C; signals to the trainer are not for it.

    It is the first that the kernel ends where memory is short. What it prints goes nowhere.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    if os.getppid() != parent:
        os._exit(0)
    for name in IGNORED:
        # not SIG_IGN, which programs that a reward starts would inherit
        signal.signal(getattr(signal, name), lambda *_: None)
    for descriptor in (jobs, replies):
        os.set_inheritable(descriptor, False)
    with contextlib.suppress(OSError, ValueError):  # a lower limit holds already
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_GIB * 2**30,) * 2)


def import_light() -> dict[str, ModuleType]:
    """The modules of this folder that rewards need, by their true names but without what lies above them.

    A reward file that imports tmoe itself afterwards gets it whole.
    """
    empty = {}
    for name, folder in (("tmoe", HERE.parents[1]), ("tmoe.post", HERE.parent), ("tmoe.post.rewards", HERE)):
        empty[name] = ModuleType(name)
        empty[name].__path__ = [str(folder)]
    sys.modules |= empty
    found = {name: importlib.import_module(f"tmoe.post.rewards.{name}") for name in ("sample", "builtin")}
    for name in empty:
        del sys.modules[name]
    return found


def load(term: dict[str, Any], timeout_s: float, names: dict[str, ModuleType]) -> Callable[..., Any]:
    """The function of a term. Raises whatever is wrong with it."""
    if term["file"] is None:
        return names["builtin"].make(term["name"], term["argument"], timeout_s)
    path = Path(term["file"])
    if (module := sys.modules.get(key := f"reward:{path}")) is None:
        module = sys.modules[key] = ModuleType(key)
        module.__file__ = str(path)
        sys.path.insert(0, str(path.parent))  # it may import what lies beside it
        exec(compile(term["source"], str(path), "exec"), module.__dict__)
    if (function := getattr(module, term["name"], None)) is None:
        there = [name for name, one in vars(module).items() if inspect.isfunction(one)][:8]
        raise Refused(f"it has no function {term['name']}; valid: {', '.join(there) or 'none, it has none'}")
    return usable(function, term["name"])


class Refused(Exception):
    """A function that is no reward; its text says why."""


def usable(function: Any, name: str) -> Callable[..., Any]:
    """The function, if it can be called with one sample and may return a number. Refused otherwise."""
    if not callable(function):
        raise Refused(f"{name} is no function, it is {type(function).__name__}")
    takes = f"a reward takes one sample: {name}(sample) -> float or None"
    if isinstance(function, type):
        raise Refused(f"{name} is a class; {takes}")
    kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if any(is_kind(function) for is_kind in kinds):
        raise Refused(f"{name} is asynchronous or a generator, and returns no number; {takes}")
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # no signature is known of some functions in C
        return function
    if lists := BATCHES & signature.parameters.keys():
        raise Refused(f"{name} takes lists, {' and '.join(sorted(lists))}, as TRL's rewards do; {takes}")
    try:
        signature.bind(None)
    except TypeError as error:
        raise Refused(f"{takes}; it is {name}{str(signature)[:200]}: {error}") from None
    return function


def said_of(error: BaseException, file: str | None) -> str:
    """One line on what was raised while a reward was loaded, with the line of its file, or of one next to it.

    The frames of this file and of Python's library say nothing to a user. file: None for one of tmoe's own.
    """
    try:
        if isinstance(error, Refused):
            return str(error)
        text = error.msg if isinstance(error, SyntaxError) else error
        said = " ".join(f"{type(error).__name__}: {text}".split())
        if isinstance(error, SyntaxError) and error.filename:
            return f"{error.filename}:{error.lineno}: {said}"
        folder = f"{Path(file).parent}/" if file else "no folder"
        frames = traceback.extract_tb(error.__traceback__)
        own = [one for one in frames if one.filename.startswith(folder) and one.filename != __file__]
        return f"{own[-1].filename}:{own[-1].lineno}: {said}" if own else said
    except BaseException:  # an error whose text raises
        return type(error).__name__


def outcome(function: Callable[..., Any], make_sample: Callable[..., Any], pickled: bytes) -> dict[str, Any]:
    """{"value": a finite number}, or {"fault": what happened instead}."""
    try:
        sample = make_sample(*pickle.loads(pickled))
        seed(f"{sample.step} {sample.number} {sample.sample}")
        value = function(sample)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are no reason to end either
        return dict(fault=f"raised {type(error).__name__}", told=words_of(error))
    if value is None:
        return dict(fault="returned None")
    if not isinstance(value, numbers.Real):
        return dict(fault=f"returned {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        return dict(fault="returned inf")
    except BaseException as error:
        return dict(fault=f"raised {type(error).__name__}", told=words_of(error))
    if not math.isfinite(number):
        return dict(fault="returned NaN" if math.isnan(number) else "returned inf")
    return dict(value=number)


def seed(key: str) -> None:
    """What a reward draws depends on the sample, and not on what its worker has done before."""
    random.seed(key)
    drawn = random.getrandbits(32)
    for name, function in (("numpy.random", "seed"), ("torch", "manual_seed")):
        if name in sys.modules:
            getattr(sys.modules[name], function)(drawn)


def words_of(error: BaseException) -> str:
    """The end of a traceback without this file's own frame, where an error can say anything at all."""
    try:
        trace = error.__traceback__
        below = trace.tb_next if trace else None
        return "".join(traceback.format_exception(type(error), error, below))[-WORDS_OF_ERROR:]
    except BaseException:
        return type(error).__name__


def read_frame(descriptor: int) -> bytes:
    """Ends this process where the trainer has closed its end."""
    (length,) = LENGTH.unpack(read_exactly(descriptor, LENGTH.size))
    return read_exactly(descriptor, length)


def read_exactly(descriptor: int, length: int) -> bytes:
    found = bytearray()
    while len(found) < length:
        some = os.read(descriptor, min(length - len(found), 2**20))
        if not some:
            os._exit(0)
        found += some
    return bytes(found)


def reply(descriptor: int, what: dict[str, Any]) -> None:
    line = json.dumps(what).encode() + b"\n"
    while line:
        line = line[os.write(descriptor, line) :]


if __name__ == "__main__":
    main()
