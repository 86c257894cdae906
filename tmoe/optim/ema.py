"""Averages of a model's weights over a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tmoe.optim.adamw import _locals
from tmoe.parallel.copies import make_stale


class Ema:
    """Exponential moving average of the weights, sharded like the weights, and at first a copy of them.

    After n updates the initial weights still count with decay^n, so decay should be at most about
    1 - 1/(a tenth of the run).
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        decay: float,
        dtype: torch.dtype | None = torch.float32,
    ):
        """dtype: of the averages; None: that of each parameter, which suits copies that never change."""
        self.decay = decay
        self._parameters = dict(named_parameters)
        self._averages = {n: p.detach().to(dtype or p.dtype, copy=True) for n, p in self._parameters.items()}

    def restart(self) -> None:
        """Sets the averages to copies of the weights again, after other weights were loaded."""
        _copy(_locals(self._averages), _locals(self._parameters))

    @torch.no_grad()
    def update(self, taken: Tensor | None = None) -> None:
        """Sets average = decay * average + (1 - decay) * weight; call it once after each step.

        taken: 0-dim; with 0 the averages do not change. None: as 1.
        """
        weight = 1.0 - self.decay if taken is None else taken * (1.0 - self.decay)
        for average, w in zip(_locals(self._averages), _locals(self._parameters), strict=True):
            average.lerp_(w.float(), weight)

    def tensors(self) -> dict[str, Tensor]:
        """The averages by name: the tensors themselves, to save, and to load into in place."""
        return dict(self._averages)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside this context the parameters hold the averages; afterwards exactly their old values.

        They are restored after an error as well. Weights and averages of one type are exchanged one by one,
        so no second copy of the model is needed. Weights of other types are copied. FSDP2 modules must be
        sharded when the context begins and ends. They are sharded after a backward; after a forward alone
        call `.reshard()` inside the context.
        """
        pairs = list(zip(_locals(self._parameters), _locals(self._averages), strict=True))
        exact = [(w, a) for w, a in pairs if w.dtype == a.dtype]
        rounded = [(w, a) for w, a in pairs if w.dtype != a.dtype]
        saved = [w.clone() for w, _ in rounded]
        _exchange(exact)
        _copy([w for w, _ in rounded], [a for _, a in rounded])
        make_stale(self._parameters.values())
        try:
            yield
        finally:
            _exchange(exact)
            _copy([w for w, _ in rounded], saved)
            make_stale(self._parameters.values())


@torch.no_grad()
def _exchange(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Exchanges the values of both tensors of each pair."""
    for a, b in pairs:
        held = a.clone()
        a.copy_(b)
        b.copy_(held)


@torch.no_grad()
def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    if into:
        torch._foreach_copy_(into, values)
