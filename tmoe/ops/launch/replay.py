"""Records a call's allocations and launches, and replays them with new addresses in calls of equal shapes.

The decisions of gpu.py on the host (configurations, tiles, boxes, binaries) depend on shapes, types and
alignments alone, and gpu.py uses the device only through `empty` and `launch`. So the second call of a kind
is recorded, and from the third call on the record is replayed without any decision. In a layer's backward,
which autograd runs on its own thread with cold caches, these decisions took most of the host's time
(docs/decisions/016-replay.md).

next: gpu.py
"""

import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from triton import knobs

from tmoe.base.private_torch import find_or_note
from tmoe.ops.launch import kernel_launch
from tmoe.ops.launch.kernel_launch import Address, Descriptor, encoded, heard

TorchDispatchMode: Any = find_or_note(
    "torch.utils._python_dispatch.TorchDispatchMode", "every call of a layer decides its launches again"
)

KEPT = 256  # most kinds of call that are kept; without a limit, batches of new sizes would fill memory
Tensors = Sequence[Tensor | None]
_programs: dict = {}  # kind -> None after its first call, then its Program, or False if it has none


def remembered(run: Callable[..., tuple], tensors: Tensors, *how: Hashable) -> tuple:
    """Returns run(*tensors, *how), replayed if possible. run: a function of gpu.py.

    tensors: tensors on the current device, or None.
    how: further arguments of run.
    The results are tensors that run has allocated, or None.
    """
    hooks = knobs.runtime
    if (
        TorchDispatchMode is None
        or kernel_launch.compiling()
        or heard(hooks.launch_enter_hook)
        or heard(hooks.launch_exit_hook)
    ):
        return run(*tensors, *how)

    kind = [run, *how, kernel_launch.tf32(), tensors[0].device]
    for t in tensors:
        if t is None:
            kind.append(None)
        elif t.is_contiguous():
            kind += t.shape, t.dtype, t.data_ptr() % 16
        else:
            return run(*tensors, *how)
    kind = tuple(kind)

    program = _programs.get(kind, ...)
    if program is ...:
        if len(_programs) >= KEPT:
            # list() and pop() are atomic, since another thread may do the same
            _programs.pop(list(_programs)[0], None)  # noqa: RUF015
        _programs[kind] = None
        return run(*tensors, *how)
    if program is None:
        tape = Tape(tensors)
        with kernel_launch.recording(tape), Foreign(tape):
            results = run(*tensors, *how)
        _programs[kind] = tape.program(results)
        return results
    return program(tensors) if program else run(*tensors, *how)


class Tape:
    """Records the calls of `launch` and `empty`, and finds the tensor to whose memory an address belongs.

    `whole` becomes False if any of them cannot be replayed.
    """

    def __init__(self, tensors: Tensors) -> None:
        self.spans: list[tuple[int, int]] = []  # for each buffer: its first address, and the address after it
        self.holders: list[Callable[[], Tensor | None]] = []  # for each buffer: its tensor, None if deleted
        self.events: list[tuple] = []
        self.whole = True
        self.inputs = len(tensors)
        for t in tensors:
            self._add(t)
        known = sorted(span for span in self.spans if span[0] < span[1])
        if any(before[1] > after[0] for before, after in itertools.pairwise(known)):
            self.whole = False  # inputs overlap: an address in both could belong to either

    def _add(self, t: Tensor | None) -> None:
        """Number the buffer of a tensor (None: an empty buffer)."""
        begin = 0 if t is None else t.data_ptr()
        self.spans.append((begin, begin if t is None else begin + t.nbytes))
        self.holders.append((lambda: None) if t is None else weakref.ref(t))

    def _find(self, address: int) -> tuple[int, int]:
        """(number of the buffer that contains the address, bytes from its start).

        A buffer counts only while its tensor exists: afterwards another buffer may get its memory.
        """
        for i in reversed(range(len(self.spans))):
            begin, end = self.spans[i]
            if begin <= address < end and self.holders[i]() is not None:
                return i, address - begin
        self.whole = False
        return 0, 0

    def allocated(self, t: Tensor) -> None:
        """Records that `empty` has allocated t."""
        self._add(t)
        self.events.append(("empty", t.shape, t.dtype))

    def launched(self, run: Any, grid: tuple[int, ...], args: Sequence, values: Sequence) -> None:
        """Records that `launch` calls run(grid, stream, values) for these arguments."""
        if not hasattr(run, "parts"):
            self.whole = False  # triton's own launcher, which cannot be replayed
            return
        call, head, maps = run.parts
        encoders = {i: (encode, known) for i, encode, known in maps}
        flat: list = []  # arguments of the C function; None where an address has to be filled in
        slots, boxes = [], []  # positions of addresses and of tensor maps in `flat`
        used = set()  # buffers that this launch uses
        for i, (arg, value) in enumerate(zip(args, values, strict=True)):
            if isinstance(arg, Descriptor):
                buffer, offset = self._find(arg.base.data_ptr())
                length = 1 + 2 * len(arg.shape)  # an encoded map, then sizes and strides
                box = arg._replace(base=Address(0))  # otherwise the program would keep the tensor alive
                boxes.append((len(flat), len(flat) + length, buffer, offset, box, *encoders[i]))
                flat += [None] * length
                used.add(buffer)
            elif isinstance(arg, torch.Tensor):
                buffer, offset = self._find(value)
                slots.append((len(flat), buffer, offset))
                flat.append(None)
                used.add(buffer)
            else:
                flat.append(value)
        self.events.append(("launch", call, grid, head, flat, slots, boxes, used))

    def program(self, results: Tensors) -> "Program | Literal[False]":
        """The record as a Program that returns tensors like `results`; False if it cannot be replayed."""
        numbers = {
            id(holder()): i
            for i, holder in enumerate(self.holders)
            if i >= self.inputs and holder() is not None
        }
        result_numbers = [None if t is None else numbers.get(id(t)) for t in results]
        if not self.whole or any(
            i is None and t is not None for i, t in zip(result_numbers, results, strict=True)
        ):
            return False

        last = {}  # buffer -> the last launch that uses it
        for at, event in enumerate(self.events):
            last |= dict.fromkeys(event[-1], at) if event[0] == "launch" else {}

        # a buffer that the call allocated and does not return is freed after the last launch that uses it
        steps = []
        for at, event in enumerate(self.events):
            steps.append(event[:-1] if event[0] == "launch" else event)
            spent = [
                i for i, end in last.items() if end == at and i >= self.inputs and i not in result_numbers
            ]
            steps += [("free", i) for i in spent]
        return Program(steps, result_numbers)


class Foreign(TorchDispatchMode or object):  # pyrefly: ignore
    """Marks a tape as not replayable if the call runs torch's own ops, which a program cannot repeat."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is not torch.ops.aten.empty.memory_format and not func.is_view:
            self.tape.whole = False
        return func(*args, **(kwargs or {}))


class Program:
    """The recorded steps of a call, which calling the program repeats.

    Buffers are numbered: first the call's tensors, then the tensors that it allocates. Each allocated buffer
    is freed after its last use.
    """

    def __init__(self, steps: list[tuple], results: list[int | None]) -> None:
        self.steps = steps
        self.results = results

    def __call__(self, tensors: Tensors) -> tuple[Tensor | None, ...]:
        device = tensors[0].device
        stream = kernel_launch.current_stream()
        held = list(tensors)
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        for step in self.steps:
            if step[0] == "launch":
                _, call, grid, head, flat, slots, boxes = step
                values = flat.copy()
                for at, buffer, offset in slots:
                    values[at] = addresses[buffer] + offset
                for begin, end, buffer, offset, box, encode, known in boxes:
                    key = addresses[buffer] + offset, box.shape, box.strides
                    values[begin:end] = known.get(key) or encoded(
                        box._replace(base=Address(key[0])), encode, known
                    )
                call(*grid, stream, *head, *values)
            elif step[0] == "empty":
                held.append(torch.empty(step[1], dtype=step[2], device=device))
                addresses.append(held[-1].data_ptr())
            else:
                held[step[1]] = None
        return tuple(None if i is None else held[i] for i in self.results)
