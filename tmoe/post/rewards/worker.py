"""The program of a process that computes rewards: reads samples from a pipe, writes a line for each reward.

    python -P worker.py JOBS REPLIES PARENT       two descriptors, and the process with whose end it ends

It is started by its path and imports neither tmoe nor torch, so that a killed worker is replaced in 0.1 s,
and not in 3 s with 360 MB. A frame from the trainer is four bytes of length and a pickle. An answer is a line
of JSON, because a worker's messages are not trusted. The first frame is {path, timeout_s, terms}, answered by
{"ready": true} or {"refused": [term, why]}. Other frames are (job, first term, end, pickled sample), answered
by a line for each term from the first to the one before the end.

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

MEMORY_GIB = 4  # limit of one worker's own data, above which a MemoryError is raised
LENGTH = struct.Struct(">I")
HERE = Path(__file__).parent
PR_SET_PDEATHSIG = 1
IGNORED = "SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"
BATCHES = {"prompts", "completions", "completion_ids"}  # parameters of TRL's reward functions
WORDS_OF_ERROR = 2000  # most characters of a traceback that are sent


def main() -> None:
    jobs, replies, parent = (int(word) for word in sys.argv[1:4])
    settle(jobs, replies, parent)
    names = import_light()
    hello = pickle.loads(read_frame(jobs))
    sys.path[:] = hello["path"]
    functions = []
    for i, term in enumerate(hello["terms"]):
        try:
            functions.append(load(term, hello["timeout_s"], names))
        except BaseException as error:
            reply(replies, dict(refused=[i, said_of(error, term["file"])]))
            return
    reply(replies, dict(ready=True))
    make_sample = names["reward_sample"].RewardSample
    while True:
        job, first, end, sample = pickle.loads(read_frame(jobs))
        for i in range(first, end):
            # each reward gets its own copy of the sample, so that no reward sees another's changes to the row
            reply(replies, dict(job=job, term=i) | outcome(functions[i], make_sample, sample))


def settle(jobs: int, replies: int, parent: int) -> None:
    """Prepares this process: it ends with the trainer, even inside a loop in C, and ignores its signals.

    If memory is short, the kernel kills this process first. Its memory is limited to MEMORY_GIB.
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
    """The modules of this folder that rewards need, under their real names, without their parent packages.

    A reward file that imports tmoe itself afterwards gets the whole package.
    """
    empty = {}
    for name, folder in (("tmoe", HERE.parents[1]), ("tmoe.post", HERE.parent), ("tmoe.post.rewards", HERE)):
        empty[name] = ModuleType(name)
        empty[name].__path__ = [str(folder)]
    sys.modules |= empty
    modules = {
        name: importlib.import_module(f"tmoe.post.rewards.{name}") for name in ("reward_sample", "builtin")
    }
    for name in empty:
        del sys.modules[name]
    return modules


def load(term: dict[str, Any], timeout_s: float, names: dict[str, ModuleType]) -> Callable[..., Any]:
    """The function of a term. Raises the error of its file, or Refused."""
    if term["file"] is None:
        return names["builtin"].make(term["name"], term["argument"], timeout_s)
    path = Path(term["file"])
    if (module := sys.modules.get(key := f"reward:{path}")) is None:
        module = sys.modules[key] = ModuleType(key)
        module.__file__ = str(path)
        sys.path.insert(0, str(path.parent))  # it may import files of its folder
        exec(compile(term["source"], str(path), "exec"), module.__dict__)
    if (function := getattr(module, term["name"], None)) is None:
        there = [name for name, value in vars(module).items() if inspect.isfunction(value)][:8]
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
    """One line about an error in loading a reward, with the place in its file, or in a file of its folder.

    Frames of this file and of Python's library do not help a user. file: None for a built-in reward.
    """
    try:
        if isinstance(error, Refused):
            return str(error)
        text = error.msg if isinstance(error, SyntaxError) else error
        summary = " ".join(f"{type(error).__name__}: {text}".split())
        if isinstance(error, SyntaxError) and error.filename:
            return f"{error.filename}:{error.lineno}: {summary}"
        folder = f"{Path(file).parent}/" if file else "no folder"
        frames = traceback.extract_tb(error.__traceback__)
        reward_frames = [
            frame for frame in frames if frame.filename.startswith(folder) and frame.filename != __file__
        ]
        return (
            f"{reward_frames[-1].filename}:{reward_frames[-1].lineno}: {summary}"
            if reward_frames
            else summary
        )
    except BaseException:  # an error whose text raises
        return type(error).__name__


def outcome(function: Callable[..., Any], make_sample: Callable[..., Any], pickled: bytes) -> dict[str, Any]:
    """The outcome of a reward: {"value": a finite number}, or {"fault": what happened instead}."""
    try:
        sample = make_sample(*pickle.loads(pickled))
        seed(f"{sample.step} {sample.number} {sample.sample}")
        value = function(sample)
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: they must not end the worker
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
    """Seeds the random generators, so that a reward's numbers depend on the sample, not on earlier work."""
    random.seed(key)
    drawn = random.getrandbits(32)
    for name, function in (("numpy.random", "seed"), ("torch", "manual_seed")):
        if name in sys.modules:
            getattr(sys.modules[name], function)(drawn)


def words_of(error: BaseException) -> str:
    """The end of a traceback without this file's own frame; the error's type if the traceback fails."""
    try:
        trace = error.__traceback__
        below = trace.tb_next if trace else None
        return "".join(traceback.format_exception(type(error), error, below))[-WORDS_OF_ERROR:]
    except BaseException:
        return type(error).__name__


def read_frame(descriptor: int) -> bytes:
    """The next frame. Ends this process if the trainer has closed the pipe."""
    (length,) = LENGTH.unpack(read_exactly(descriptor, LENGTH.size))
    return read_exactly(descriptor, length)


def read_exactly(descriptor: int, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        some = os.read(descriptor, min(length - len(data), 2**20))
        if not some:
            os._exit(0)
        data += some
    return bytes(data)


def reply(descriptor: int, what: dict[str, Any]) -> None:
    line = json.dumps(what).encode() + b"\n"
    while line:
        line = line[os.write(descriptor, line) :]


if __name__ == "__main__":
    main()
