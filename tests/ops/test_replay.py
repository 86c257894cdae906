"""Calls that are remembered: the third call launches what the first did, with addresses of its own tensors.

No kernel runs here: a stand-in for triton's C function writes down what it is given. test_ops_gpu.py
compares results.
"""

import gc
import itertools
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import triton

from tmoe.moe.exchange import received_rows
from tmoe.ops.experts import gpu
from tmoe.ops.launch import kernel_launch, replay


@pytest.fixture
def calls(monkeypatch):
    """What reached the C function, each call as a list; a GPU of sm_90 that is not there."""
    handed = []

    class Compiled(SimpleNamespace):
        """triton's own launch, where hooks listen."""

        def __getitem__(self, grid):
            return lambda *args, stream: handed.append(["heard", *grid, stream, *args])

    def warmup(kernel, *args, grid, **options):
        boxes = [i for i, a in enumerate(args) if "Descriptor" in type(a).__name__]
        run = SimpleNamespace(boxes=boxes)
        facts = dict(head=(kernel.__name__,))
        return Compiled(run=run, **facts)

    def encode(d):
        return [("map", d.base.data_ptr(), *d.shape, *d.strides, *d.block), *d.shape, *d.strides]

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "warmup", warmup)
    monkeypatch.setattr(
        kernel_launch,
        "_own_launcher",
        lambda compiled, kernel, values: kernel_launch.Short(
            lambda *a: handed.append(list(a)), compiled.head, [(i, encode) for i in compiled.run.boxes]
        ),
    )
    driver = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 77)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(kernel_launch._thread, "ready", True, raising=False)
    monkeypatch.setattr(kernel_launch, "_binaries", {})
    monkeypatch.setattr(replay, "_programs", {})
    monkeypatch.setattr(gpu, "device_facts", lambda device: ("cuda:90", 132, True))
    return handed


class Memory:
    """Names each buffer of a call by the order of its allocation, so that two calls can be compared."""

    def __init__(self, monkeypatch, inputs):
        self.named = [t for t in inputs if t is not None]
        self.spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in self.named]
        own = torch.empty

        def empty(*args, **kwargs):
            t = own(*args, **kwargs)
            self.named.append(t)  # alive, so no two share memory
            self.spans.append((t.data_ptr(), t.data_ptr() + t.nbytes))
            return t

        monkeypatch.setattr(torch, "empty", empty)

    def name(self, value):
        if isinstance(value, tuple):
            return tuple(map(self.name, value))
        if isinstance(value, int):
            found = [(i, value - begin) for i, (begin, end) in enumerate(self.spans) if begin <= value < end]
            # of a program that is loaded at a fixed address, all of the heap can lie below
            assert found or value < 2**34, value
            return found[0] if found else value
        return value


def inputs(T, D, F, E, K, dtype, biased, gap=0):
    def new(*shape, dtype=dtype):
        return torch.zeros(torch.Size(shape).numel() + gap, dtype=dtype)[gap:].view(shape)

    tensors = (
        new(T, D),
        new(E, 2 * F, D),
        new(E, D, F),
        new(T, K, dtype=torch.float32),
        new(T, K, dtype=torch.int32),
    )
    return *tensors, new(E, 2 * F) if biased else None


def step(tensors, pairs, run):
    """forward without and with what backward keeps, and backward; returns the shapes of all results."""
    x, gate_up, down, weights, _, bias = tensors
    how = "swiglu", pairs
    (alone, *_) = run(gpu.forward, tensors, *how, False)
    (y, h, packed) = run(gpu.forward, tensors, *how, True)
    grads = run(
        gpu.backward, (torch.empty(x.shape, dtype=x.dtype), x, gate_up, down, weights, h, packed, bias), *how
    )
    return [None if t is None else (t.shape, t.dtype) for t in (alone, y, h, packed, *grads)]


CASES = [  # T, D, F, E, K, dtype, biased, share of pairs in a window
    (512, 128, 192, 16, 4, torch.bfloat16, False, 1),  # few rows: one launch for both products
    (6000, 128, 64, 4, 2, torch.bfloat16, True, 1),
    (6000, 128, 64, 4, 2, torch.float16, True, 3),  # windows
    (300, 72, 40, 4, 2, torch.bfloat16, False, 2),  # no tensor maps
    (300, 64, 64, 3, 2, torch.float32, True, 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_third_call_launches_what_the_first_did(calls, monkeypatch, case):
    *shape, dtype, biased, share = case
    pairs = -(-shape[0] * shape[4] // share // 128) * 128
    logs, found = [], []
    for run in (lambda f, tensors, *how: f(*tensors, *how), *[replay.remembered] * 4):
        tensors = inputs(*shape, dtype, biased)
        calls.clear()
        with monkeypatch.context() as patch:
            memory = Memory(patch, tensors)
            found.append(step(tensors, pairs, run))
        logs.append([[memory.name(v) for v in call] for call in calls])
    assert len(logs[0]) > 8 and all(log == logs[0] for log in logs[1:])
    assert all(shapes == found[0] for shapes in found[1:])
    assert len(replay._programs) == 3 and all(
        isinstance(p, replay.Program) for p in replay._programs.values()
    )


def test_another_kind_of_call_is_not_taken_for_it(calls):
    """Other shapes, types, alignments or arguments: each kind is decided anew.

    Inputs with gaps are not remembered.
    """
    base = dict(T=300, D=64, F=64, E=3, K=2, dtype=torch.bfloat16, biased=False)
    changes = [
        {},
        dict(T=301),
        dict(D=128),
        dict(F=128),
        dict(E=4),
        dict(K=3),
        dict(dtype=torch.float16),
        dict(biased=True),
        dict(gap=1),
    ]
    for change in changes:
        for _ in range(3):
            tensors = inputs(**(base | change))
            replay.remembered(gpu.forward, tensors, "swiglu", 1024, True)
    assert len(replay._programs) == len(changes)
    for how in (("clamped", 1024, True), ("swiglu", 1024, False), ("swiglu", 896, True)):
        replay.remembered(gpu.forward, tensors, *how)
    assert len(replay._programs) == len(changes) + 3
    x, *others = inputs(**base)
    gaps = x.t().contiguous().t()
    calls.clear()
    for _ in range(3):
        replay.remembered(gpu.forward, (gaps, *others), "swiglu", 1024, True)
    assert len(replay._programs) == len(changes) + 3 and str(gaps.data_ptr()) not in repr(calls)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    before = len(calls)
    try:
        torch.backends.cuda.matmul.allow_tf32 = not tf32
        replay.remembered(gpu.forward, (x, *others), "swiglu", 1024, True)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    assert len(replay._programs) == len(changes) + 4 and len(calls) > before


def test_tf32_by_fp32_precision(calls):
    """Where that is set, allow_tf32 may not be asked for: torch raises."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for precision in ("tf32", "ieee"):
            matmul.fp32_precision = precision
            assert kernel_launch.tf32() == (precision == "tf32")
            tensors = inputs(T=300, D=64, F=64, E=3, K=2, dtype=torch.float32, biased=False)
            replay.remembered(gpu.forward, tensors, "swiglu", 1024, True)
    finally:
        matmul.fp32_precision = before
    assert calls and len(replay._programs) == 2


def test_threads_may_fill_the_memory_together(monkeypatch):
    monkeypatch.setattr(replay, "_programs", {})
    failed = []
    interval = sys.getswitchinterval()

    def fill(thread):
        x = torch.zeros(1)
        try:
            for i in range(20000):
                replay.remembered(lambda x, n: (x,), (x,), (thread, i))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=fill, args=(i,)) for i in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed


def test_no_more_is_alive_than_in_the_first_call(calls, monkeypatch):
    """Buffers are given back after their last use.

    The most bytes at once are those of a call that decides for itself, or fewer; afterwards nothing is alive.
    """
    own = torch.empty
    peaks = []
    alive = [0, 0]

    def gone(size):
        alive[0] -= size

    def empty(*args, **kwargs):
        t = own(*args, **kwargs)
        weakref.finalize(t.untyped_storage(), gone, t.nbytes)
        alive[0] += t.nbytes
        alive[1] = max(alive)
        return t

    monkeypatch.setattr(torch, "empty", empty)
    for run in (lambda f, tensors, *how: f(*tensors, *how), *[replay.remembered] * 3):
        inputs_alive = inputs(6000, 128, 64, 4, 2, torch.bfloat16, False)
        alive[:] = 0, 0
        step(inputs_alive, 12032, run)
        peaks.append(alive[1])
        gc.collect()
        assert alive[0] == 0
    assert peaks[3] <= peaks[0], peaks


def test_what_cannot_be_replayed_is_not(calls, monkeypatch):
    """Four kinds of calls.

    No tokens (torch's own ops make the results), two inputs in one memory, unknown memory, and triton's own
    launcher.
    """
    empty = inputs(0, 64, 64, 3, 2, torch.bfloat16, False)
    x, gate_up, down, weights, ids, bias = inputs(300, 64, 64, 3, 2, torch.bfloat16, False)
    shared = torch.zeros(3, 3, 64, 64, dtype=torch.bfloat16)
    overlap = (
        x,
        shared.view(-1)[: 3 * 128 * 64].view(3, 128, 64),
        shared.view(-1)[-3 * 64 * 64 - 64 : -64].view(3, 64, 64),
    )
    for tensors in (empty, (*overlap, weights, ids, bias)):
        for _ in range(4):
            y, *_ = replay.remembered(gpu.forward, tensors, "swiglu", 1024, True)
            assert y.shape == tensors[0].shape
    assert list(replay._programs.values()) == [False, False]
    replay._programs.clear()
    with monkeypatch.context() as patch:
        patch.setattr(
            gpu, "empty", lambda shape, dtype, device: torch.empty(shape, dtype=dtype, device=device)
        )
        for _ in range(3):
            replay.remembered(gpu.forward, (x, gate_up, down, weights, ids, bias), "swiglu", 1024, True)
    assert list(replay._programs.values()) == [False]
    replay._programs.clear()
    kernel_launch._binaries.clear()
    monkeypatch.setattr(kernel_launch, "launcher", lambda *_: lambda *_: None)
    for _ in range(3):
        replay.remembered(gpu.forward, (x, gate_up, down, weights, ids, bias), "swiglu", 1024, True)
    assert list(replay._programs.values()) == [False]


def test_what_torch_does_no_program_repeats(calls):
    """A function that calls one of torch's ops always runs as it is.

    Even if the op works on memory that the function has allocated here.
    """

    def run(x, through_a_view):
        y = kernel_launch.empty(x.shape, x.dtype, x.device)
        (y.view(-1) if through_a_view else y).copy_(x)
        return (y,)

    for view in (True, False):
        for i in range(5):
            x = torch.full((7,), float(i))
            assert torch.equal(replay.remembered(run, (x,), view)[0], x)
    assert list(replay._programs.values()) == [False, False]


def test_inside_compile_only_nothing_is_remembered(calls):
    asked = []
    tensors = inputs(300, 64, 64, 3, 2, torch.bfloat16, False)
    for _ in range(3):
        replay.remembered(gpu.forward, tensors, "swiglu", 1024, True)
    driver = triton.runtime.driver._active
    with kernel_launch.compile_only("cuda:90", lambda name, key, compile: asked.append(name)):
        calls.clear()
        replay.remembered(gpu.forward, tensors, "swiglu", 1024, True)
    assert triton.runtime.driver._active is driver and len(asked) >= 4 and not calls


def test_memory_that_was_let_go_is_nobodys():
    """An unknown tensor may have got it since."""
    t = torch.zeros(64)
    tape = replay.Tape(())
    address = t.data_ptr()
    tape.allocated(t)
    assert tape._find(address + 8) == (0, 8) and tape.whole
    del t
    tape._find(address)
    assert not tape.whole


def test_a_failure_while_it_is_written_down_leaves_nothing_behind(calls, monkeypatch):
    tensors = inputs(300, 64, 64, 3, 2, torch.bfloat16, False)
    replay.remembered(gpu.forward, tensors, "swiglu", 1024, True)
    with monkeypatch.context() as patch:
        patch.setattr(gpu.LayerLaunches, "combine", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            replay.remembered(gpu.forward, tensors, "swiglu", 1024, True)
    assert getattr(kernel_launch._thread, "tape", None) is None and list(replay._programs.values()) == [None]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_hear_of_every_launch(calls, monkeypatch, hook):
    """A profiler's hooks: while there are any, nothing is replayed."""
    tensors = inputs(300, 64, 64, 3, 2, torch.bfloat16, False)
    for _ in range(3):
        replay.remembered(gpu.forward, tensors, "swiglu", 1024, True)
    monkeypatch.setattr(getattr(triton.knobs.runtime, hook), "calls", [print])
    launches = len(calls) // 3
    calls.clear()
    replay.remembered(gpu.forward, tensors, "swiglu", 1024, True)
    assert [call[0] for call in calls] == ["heard"] * launches


def test_sizes_that_never_come_again_fill_no_memory(calls, monkeypatch):
    """The oldest is dropped, and is written down anew when it comes again."""
    monkeypatch.setattr(replay, "KEPT", 4)
    for T in itertools.chain(range(300, 310), [300] * 3, range(310, 313)):
        replay.remembered(gpu.forward, inputs(T, 64, 64, 3, 2, torch.bfloat16, False), "swiglu", 1024, True)
    assert [isinstance(p, replay.Program) for p in replay._programs.values()] == [True, False, False, False]


class Sections:
    """The sections of an exchange, each a tensor of its own."""

    def __init__(self, T, D, K, dtype):
        self.of = {name: torch.zeros(T, D, dtype=dtype) for name in ("x", "dy", "y")}
        self.of |= {name: torch.zeros(T, K) for name in ("weights", "d_weights")}
        self.of["ids"] = torch.zeros(T, K, dtype=torch.int32)

    def rows(self, name, D, dtype):
        return self.of[name]

    routes = rows


@pytest.mark.parametrize("share", [1, 3])
@pytest.mark.parametrize(("D", "dtype", "biased"), [(128, torch.bfloat16, True), (128, torch.float32, False)])
def test_an_expert_groups_parts(calls, monkeypatch, share, D, dtype, biased):
    """One launch after another as without memory.

    The two words of the exchange come between the same launches, and x is not read until it is here.
    """
    T, F, L, K = 6000, 64, 4, 2
    pairs = -(-T * K // share // 128) * 128
    logs, found = [], []
    for again in range(5):
        ex = Sections(T, D, K, dtype)
        weights = inputs(8, D, F, L, K, dtype, biased)
        gate_up = weights[1]
        down = weights[2]
        bias = weights[5]
        h = torch.zeros(pairs, 2 * F, dtype=dtype)
        calls.clear()
        with monkeypatch.context() as patch:
            if again == 0:
                patch.setattr(received_rows, "remembered", lambda part, tensors, *how: part(*tensors, *how))
            memory = Memory(patch, (gate_up, down, bias, h, *ex.of.values()))
            experts = received_rows.ReceivedExperts(ex, gate_up, down, bias, "swiglu", K, dtype, pairs)
            experts.forward(None)
            experts.forward(h)
            calls.append(["forward"])
            words = (lambda: calls.append(["x is here"])), (lambda: calls.append(["dx is there"]))
            grads = experts.backward(h, *words)
        logs.append([[memory.name(v) for v in call] for call in calls])
        found.append([None if g is None else (g.shape, g.dtype) for g in grads])
        assert all(g is None or any(g is t for t in memory.named) for g in grads)
        marks = [logs[-1].index([word]) for word in ("forward", "x is here", "dx is there")]
        x = next(i for i, t in enumerate(memory.named) if t is ex.of["x"]), 0
        assert x not in _named(logs[-1][marks[0] : marks[1]]) and x in _named(logs[-1][marks[1] :])
        assert marks[2] - marks[1] > 1 or share == 1
    assert all(log == logs[0] for log in logs[1:]) and all(f == found[0] for f in found)
    assert found[0] == [((L, 2 * F, D), dtype), ((L, D, F), dtype), ((L, 2 * F), dtype) if biased else None]
    programs = replay._programs.values()
    assert len(programs) == (6 if share > 1 else 4) and all(isinstance(p, replay.Program) for p in programs)


def _named(value):
    """All (buffer, offset) in a launch's arguments."""
    if isinstance(value, (tuple, list)):
        if len(value) == 2 and all(isinstance(v, int) for v in value):
            yield value
        else:
            for v in value:
                yield from _named(v)
