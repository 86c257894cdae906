"""The order of the exchange's steps on streams, without a GPU: what waits for what.

next: test_symm_room.py
"""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
from symm_ranks import operands

from tmoe.moe.exchange import symm
from tmoe.ops import exchange
from tmoe.ops.experts import swiglu


class Streams:
    """torch.cuda's streams, as a list of (stream, what it was given)."""

    def __init__(self):
        self.now = "main"
        self.log = []

    def stream(self, name):
        return SimpleNamespace(
            name=name, wait_stream=lambda other: self.log.append((name, f"after {other.name}"))
        )

    @contextlib.contextmanager
    def on(self, stream):
        before = self.now
        self.now = stream.name
        yield
        self.now = before


class Calls(Streams):
    """An exchange, streams and experts that only say when they are asked, and on which stream."""

    def __init__(self, monkeypatch, hidden):
        super().__init__()
        main = self.stream("main")

        def say(what):
            return lambda *wire, **how: self.note(" ".join([what, *self.words(wire, how)]))

        ex = SimpleNamespace(
            side=self.stream("side"), rank=0, world=2, addresses=dict(side=None), reserve=lambda *_: None
        )
        ex.push = lambda name, x, *_, **how: say(f"push {x.shape[1]} columns")(**how)
        for name in ("pull", "meet", "sum", "copy_x", "copy_y", "wire_x", "wire_y"):
            setattr(ex, name, say(name))
        ex.copy_async, ex.arrived = (
            functools.partial(f, ex) for f in (symm.Exchange.copy_async, symm.Exchange.arrived)
        )
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(symm, "exchange_of", lambda _: ex)
        monkeypatch.setattr(symm, "hides", lambda *_: hidden)
        monkeypatch.setattr(symm, "ReceivedExperts", lambda *_: say("route")() or self)
        monkeypatch.setattr(exchange, "meet", say("half"))
        monkeypatch.setattr(swiglu, "forward", lambda x, *_: say("shared")() or (x, x))
        monkeypatch.setattr(swiglu, "backward", lambda dy, x, up, down, h: say("shared")() or (x, up, down))

    def words(self, wire, how):
        yield from (name for rows in wire if isinstance(rows, dict) for name in rows)
        yield from (f"{k}={v}" for k, v in how.items())

    def note(self, what):
        self.log.append((self.now, what))

    def forward(self, h):
        self.note("experts")

    def backward(self, h, x_is_here, dx_is_there, frozen, sums):
        self.note("dx")
        x_is_here()
        dx_is_there()
        self.note("dw")
        return None, None, None


def test_backward_waits_for_its_own_copies_before_it_waits_for_peers(monkeypatch):
    """A CUDA graph knows streams only.

    So what waits for other ranks must depend on what those ranks wait for.
    """
    at = Calls(monkeypatch, True)
    x, w, ids, gate_up, down, *_ = operands(False)
    without = (None,) * 7  # bias, shared expert, codes, H
    how = "swiglu", 4, 128, False, False, "group"
    symm._backward(symm.SymmBackward(x, None, x, w, ids, gate_up, down, *without, *how))
    assert at.log == [
        ("main", "push 8 columns meet=True"), ("main", "wire_x"),
        ("side", "after main"), ("side", "copy_x"), ("side", "half wait=False"),
        ("main", "route"), ("main", "dx"),
        ("main", "after side"), ("main", "half arrive=False"), ("main", "wire_y"),
        ("side", "after main"), ("side", "copy_y"), ("side", "half wait=False"),
        ("main", "dw"),
        ("main", "after side"), ("main", "half arrive=False"), ("main", "sum"), ("main", "meet"),
    ]  # fmt: skip


def test_forward_waits_for_its_own_copies_and_then_for_peers(monkeypatch):
    """As in the backward."""
    at = Calls(monkeypatch, True)
    symm._forward(symm.SymmCall(*operands(), "swiglu", 4, 128, False, True, "group"))
    beside = [
        ("main", "push 0 columns meet=False"),
        ("side", "after main"), ("side", "copy_x x"), ("side", "half wait=False"),
        ("main", "shared"), ("main", "after side"), ("main", "half arrive=False"),
    ]  # fmt: skip
    assert at.log == [*beside, ("main", "route"), ("main", "experts"), ("main", "pull")]
    at.log.clear()
    symm._forward(symm.SymmCall(*operands(False), "swiglu", 4, 128, False, True, "group"))
    assert at.log == [("main", what) for what in ("push 8 columns", "route", "experts", "pull")], "as ever"


@pytest.mark.parametrize("hidden", [True, False])
def test_backward_brings_dy_and_x_beside_the_shared_gradients(monkeypatch, hidden):
    at = Calls(monkeypatch, hidden)
    x, *rest = operands()
    symm._backward(symm.SymmBackward(x, x, x, *rest, x, x, "swiglu", 4, 128, False, False, "group"))
    home = [
        ("main", "wire_y"), ("side", "after main"), ("side", "copy_y"), ("side", "half wait=False"),
        ("main", "dw"), ("main", "after side"), ("main", "half arrive=False"), ("main", "sum"),
    ] if hidden else [("main", "pull"), ("main", "dw")]  # fmt: skip
    assert at.log == [
        ("main", "push 0 columns meet=False"),
        ("side", "after main"), ("side", "copy_x dy x"), ("side", "half wait=False"),
        ("main", "shared"), ("main", "after side"), ("main", "half arrive=False"),
        ("main", "route"), ("main", "dx"), *home, ("main", "meet"),
    ]  # fmt: skip
