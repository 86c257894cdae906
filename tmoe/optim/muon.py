"""Muon for matrices, and AdamW for all other parameters, on parameters of any meshes.

    m <- momentum m + (1 - momentum) g          u = (1 - momentum) g + momentum m     (Nesterov's)
    W <- (1 - lr decay) W - lr 0.2 sqrt(max(out, in)) orthogonal(u)

`muon` in ops/reference.py is the definition for one matrix (Jordan 2024; Liu et al. 2025). The factor gives
an update the size of AdamW's, so one learning rate and one decay are valid for both.

    experts [E, out, in]    whole matrices lie on a rank: gradient, momentum and products stay there
    dense [out, in]         are cut by rows: an owner gets u and returns the update (optim/owners.py)
    fused                   each of their matrices is iterated by itself (optim/matrices.py)

Momentum lies as its parameter does, so checkpoints, names and layouts are AdamW's.

next: optim/owners.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmoe.ops.dynamic_map import dequantise, quantise
from tmoe.ops.muon_op import look_ahead_, write_
from tmoe.ops.newton_schulz import CHUNK, orthogonal
from tmoe.ops.stochastic import random_bits, rounded
from tmoe.optim.matrices import Parts, Rows, merged
from tmoe.optim.owners import at_owners, rows_group, waves
from tmoe.optim.states import MOMENTUM, SCALES
from tmoe.parallel.copies import WorkingCopy, make_stale, version, working_copy
from tmoe.parallel.mesh import local_part, local_slices

LARGE = 2**24  # elements of a stack whose products fill a GPU


class Piece(NamedTuple):
    """Consecutive entries of axis 0 of this rank's part of a parameter: experts, or rows of a matrix."""

    p: Tensor
    begin: int
    end: int
    lr: float
    decay: float

    @property
    def elements(self) -> int:
        """Elements of the matrices: of a whole matrix that is cut by rows, else of these entries."""
        return self.p.numel() if self.p.ndim == 2 else (self.end - self.begin) * prod(self.p.shape[1:])

    def of(self, t: Tensor) -> Tensor:
        """These entries of this rank's part of a tensor that lies as the parameter does."""
        return t[self.begin : self.end]


class Stack(NamedTuple):
    """The matrices of some rows of a weight, or of a stack of weights."""

    rows: Rows
    result: Tensor  # the update of the whole weight
    given: Tensor  # [n, out, in]
    into: Tensor | None  # the same matrices of the update; None: no view has this shape
    squares: Tensor | None  # the sum of the squares of each matrix [n]; None: not known

    @classmethod
    def of(cls, rows: Rows, ahead: Tensor, result: Tensor, sums: Tensor | None) -> Stack:
        """These rows of Nesterov's look ahead, of the update and of the sums of squares of rows."""
        found = rows.matrices(ahead)
        given = found.reshape(-1, *found.shape[-2:])
        into = rows.matrices(result).reshape(given.shape)
        if into.untyped_storage().data_ptr() != result.untyped_storage().data_ptr():
            into = None
        squares = None if sums is None else rows.matrices(sums[..., None]).sum((-2, -1)).reshape(-1)
        return cls(rows, result, given, into, squares)


class Muon:
    """Muon's part of an optimizer: its groups of kind "muon", whose state is `optimizer.state`.

    On a GPU fp32 weights and momenta are read and written by kernels (ops/muon_op.py), and the host does not
    wait.
    """

    def __init__(
        self,
        matrices: Mapping[Tensor, Parts],
        momentum: float,
        iterations: int,
        products: torch.dtype,
        on_gpu: bool,
    ) -> None:
        """matrices: rows of each matrix, for each parameter.

        momentum: decay of the momentum. iterations: of Newton-Schulz. products: type of its products.
        ValueError for a matrix that the layout cuts otherwise than by rows.
        """
        self.matrices = {p: merged(parts) for p, parts in matrices.items()}
        self.momentum = momentum
        self.iterations = iterations
        self.products = products
        self.on_gpu = on_gpu
        self.optimizer: Any = None  # the AdamW that steps
        self.one: Tensor | None = None  # on the device
        self._row_scales: dict[Tensor, Tensor] = {}
        self._written: set[WorkingCopy] = set()
        for p in self.matrices:
            rows_group(p)

    def step(self, optimizer: Any, groups: Iterable[dict[str, Any]]) -> None:
        """Takes a step as the last `decide` of the optimizer, an AdamW, set it.

        A collective of the ranks that share the matrices.
        """
        self.optimizer = optimizer
        trained = [(p, group) for group in groups for p in group["params"] if p.grad is not None]
        if trained and (self.on_gpu or optimizer.finite is None or optimizer.finite):
            self._step_of_matrices(trained, optimizer.finite if self.on_gpu else None)

    def _step_of_matrices(self, trained: list[tuple[Tensor, dict[str, Any]]], finite: Tensor | None) -> None:
        """finite: 0-dim on the device; if it is 0, nothing is written. None: 1."""
        by_ranks: dict[Any, list[Piece]] = defaultdict(list)
        self.optimizer._begin([p for p, _ in trained])
        for p, group in trained:
            self.optimizer.state[p]["step"] += 1 if finite is None else finite
            rule = group["lr"], group["weight_decay"]
            by_ranks[rows_group(p)] += [Piece(p, *span, *rule) for span in _spans(p)]
        for ranks, pieces in by_ranks.items():
            # Small matrices of all layers are in the same waves, so that they fill a GPU together.
            pieces.sort(key=lambda piece: piece.elements)
            sizes = [piece.elements for piece in pieces]
            for wave in waves(sizes, 1 if ranks is None else ranks.size()):
                self._step_of_wave([pieces[i] for i in wave], finite, ranks)
        copies = [working_copy(p) for p, _ in trained]
        current = [copy is not None and copy.seen == version(copy.master) for copy in copies]
        torch.autograd.graph.increment_version([p for p, _ in trained])
        for (p, _), copy, was in zip(trained, copies, current, strict=True):
            if copy is not None and copy in self._written:
                # a skipped step writes no copy, so a copy that was out of date before the step still is
                copy.written(self.optimizer.keeps_fresh and was)
            else:
                make_stale([p])
        self._written.clear()

    def _step_of_wave(self, pieces: list[Piece], finite: Tensor | None, ranks: Any) -> None:
        """A step of some pieces; a collective of `ranks`, unless they are None."""

        def compute(numbers: list[int], full: list[Tensor]) -> list[Tensor]:
            known = [None if ranks is not None else squares[i] for i in numbers]
            return self._orthogonal([pieces[i].p for i in numbers], full, known)

        ahead, squares = zip(*[self._ahead(piece, finite) for piece in pieces], strict=True)
        shapes = [(piece.p.shape[-2], piece.p.shape[-1]) for piece in pieces]
        for piece, update in zip(pieces, at_owners(ahead, shapes, compute, ranks), strict=True):
            if copy := self._write(piece, update, finite):
                self._written.add(copy)

    def _ahead(self, piece: Piece, finite: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Writes a piece's new momentum; returns Nesterov's look ahead, in the type of the products.

        The second result is the sum of the squares of each row, where a kernel computes it.
        """
        p, state = piece.p, self.optimizer.state[piece.p]
        assert p.grad is not None
        raw = piece.of(local_part(p.grad.detach())).contiguous()
        stored = piece.of(local_part(state[MOMENTUM]))
        scale = state.get(SCALES[MOMENTUM])
        scale = None if scale is None else piece.of(local_part(scale))
        if self.on_gpu and scale is None and stored.dtype == torch.float32:
            there = stored.to(raw.device, non_blocking=True)
            found = look_ahead_(raw, there, *self._numbers(finite), self.momentum, self.products)
            if there is not stored:
                stored.copy_(there, non_blocking=True)
            return found
        grad = raw.float()
        if self.optimizer.factor is not None:
            grad = grad * self.optimizer.factor
        old = stored.to(grad.device, non_blocking=True)
        if scale is not None:
            old = dequantise(old, scale.to(grad.device, non_blocking=True), True)
        new = old.float().lerp(grad, 1 - self.momentum)
        ahead = grad.lerp(new, self.momentum).to(self.products)
        if scale is not None and scale.numel():
            codes, scales = quantise(new, new.shape[-1] // scale.shape[-1], True)
            self._store(scale, scales, finite)
            self._store(stored, codes, finite)
        else:
            self._store(stored, self._narrowed(piece, new, stored.dtype, 0), finite)
        return ahead, None

    def _orthogonal(
        self, parameters: Sequence[Tensor], full: Sequence[Tensor], squares: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """The update of each weight from Nesterov's look ahead.

        A large stack is computed where it lies. Small ones of one shape are copied into one batch.

        squares: the sum of the squares of each row; None: not known.
        """
        found = [torch.empty_like(u) for u in full]
        batches: dict[tuple[int, int], list[Stack]] = defaultdict(list)
        for p, u, result, sums in zip(parameters, full, found, squares, strict=True):
            for rows in self.matrices[p]:
                stack = Stack.of(rows, u, result, sums)
                if stack.given.numel() < LARGE or stack.into is None:
                    batches[stack.given.shape[-2], stack.given.shape[-1]].append(stack)
                else:
                    orthogonal(stack.given, self.iterations, stack.squares, stack.into)
        for some in batches.values():
            done = orthogonal(_joined([one.given for one in some]), self.iterations)
            for one, o in zip(some, done.split([len(one.given) for one in some]), strict=True):
                part = one.rows.of(one.result)
                part.copy_(o.view(part.shape))
        return found

    def _write(self, piece: Piece, update: Tensor, finite: Tensor | None) -> WorkingCopy | None:
        """Adds the update to the weight, which decays. Returns the working copy that was written as well."""
        weight = piece.of(local_part(piece.p.detach()))
        scales = self._scales(piece.p)
        if self.on_gpu and weight.dtype == torch.float32 and weight.is_contiguous():
            copy = working_copy(piece.p)
            copy = None if copy and copy.tensor.dtype == weight.dtype else copy
            mine = piece.of(copy.mine) if copy else None
            one = self._numbers(finite)[1]
            write_(weight, update.contiguous(), mine, scales, one, piece.lr, piece.decay)
            return copy
        new = weight.float() * (1 - piece.lr * piece.decay)
        new = new.addcmul_(update.float(), scales[:, None], value=-piece.lr)
        self._store(weight, self._narrowed(piece, new, weight.dtype, 1), finite)
        return None

    def _numbers(self, finite: Tensor | None) -> tuple[Tensor, Tensor]:
        """The factor of the gradients, and `finite`, 0-dim fp32 on the device; 1 for those that are None."""
        if self.one is None:
            device = next(iter(self.matrices)).device
            self.one = torch.ones((), device=device)
        return (
            self.one if self.optimizer.factor is None else self.optimizer.factor,
            self.one if finite is None else finite,
        )

    def _scales(self, p: Tensor) -> Tensor:
        """The factor of each row on this rank: 0.2 sqrt(max(out, in)) of the row's matrix."""
        if p not in self._row_scales:
            columns = p.shape[-1]
            full = torch.empty(p.shape[-2], 1)
            for rows in self.matrices[p]:
                _, out, inner = rows.shape(columns)
                rows.of(full).fill_(0.2 * max(out, inner) ** 0.5)
            own = local_slices(p)[0] if p.ndim == 2 else slice(None)
            self._row_scales[p] = full[own, 0].to(local_part(p).device)
        return self._row_scales[p]

    def _narrowed(self, piece: Piece, new: Tensor, dtype: torch.dtype, which: int) -> Tensor:
        """New numbers, rounded stochastically if they are stored in bf16. which: of the two hashes."""
        if dtype != torch.bfloat16 or self.optimizer.states is None:
            return new
        count = new[0].numel() if len(new) else 0
        step = self.optimizer.state[piece.p]["step"].long()
        bits = random_bits(self.optimizer._place(piece.p), step, new.numel(), new.device, piece.begin * count)
        return rounded(new, bits[which].view(new.shape) & 0xFFFF)

    @staticmethod
    def _store(into: Tensor, new: Tensor, finite: Tensor | None) -> None:
        """Writes new numbers, unless `finite` is 0: then the same bytes remain."""
        if finite is not None:
            new = torch.where(finite.bool(), new.to(into.dtype), into.to(new.device, non_blocking=True))
        into.copy_(new, non_blocking=True)


def _joined(stacks: Sequence[Tensor]) -> Tensor:
    return stacks[0] if len(stacks) == 1 else torch.cat(list(stacks))


def _spans(p: Tensor) -> Iterator[tuple[int, int]]:
    """Spans of axis 0 of this rank's part that are worked on at a time: at most CHUNK elements of a stack."""
    local = local_part(p)
    if p.ndim == 2:  # a rank without rows takes part in the exchange
        yield 0, len(local)
        return
    each = max(1, CHUNK // max(1, local[:1].numel()))
    for begin in range(0, len(local), each):
        yield begin, min(begin + each, len(local))
