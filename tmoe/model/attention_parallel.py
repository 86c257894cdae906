"""How tp and cp divide attention: this rank's tokens and heads, and the ranks that it exchanges with.

The storage of weights does not depend on these axes. Outside attention every rank processes its own tokens
with whole matrices. A gradient is then a sum over a rank's tokens and heads, zero elsewhere, and FSDP2's sum
over the stage completes it.

    tp        gathers tokens before the projections, which use the rows of this rank's heads, and
              scatters the sum of all heads' results (sequence parallelism: Korthikanti et al. 2022)
    cp, keys  queries are not sent; keys and values of all tokens are gathered
    cp, heads all-to-all: from all heads of a rank's tokens to its heads of all tokens (Jacobs et al. 2023)

next: model/attention.py
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from tmoe.model.adapted import adapted
from tmoe.model.attention_backend import Mask, dense_mask
from tmoe.model.norm import factor_of
from tmoe.ops.largest_logit import largest_logit
from tmoe.parallel.collectives import name_of
from tmoe.parallel.mesh import Mesh
from tmoe.parallel.token_exchange import (
    exchange,
    gather,
    gathered_linear,
    in_key_order,
    linear_scattered,
    positions,
    scatter_sum,
)


class Spread(NamedTuple):
    """How the ranks of one sequence divide attention. `ALONE`: one rank has all of it."""

    tp: int = 1
    tp_rank: int = 0
    tp_group: str = ""
    cp: int = 1
    cp_rank: int = 0
    cp_group: str = ""
    cp_exchange: Literal["keys", "heads"] = "keys"
    pieces: int = 1
    """number of pieces of a rank's tokens under tp; one piece is sent during the product of another"""

    @classmethod
    def over(cls, mesh: Mesh, cp_exchange: Literal["keys", "heads"], pieces: int) -> Spread:
        """The Spread of this rank; all ranks of a group must pass the same arguments."""
        axes, place = mesh.axes, mesh.place
        if axes.parts == 1:
            return ALONE
        tp_group, cp_group = (name_of(mesh.groups[name]) for name in ("tp", "cp"))
        return cls(axes.tp, place.tp, tp_group, axes.cp, place.cp, cp_group, cp_exchange, pieces)

    @property
    def by_keys(self) -> bool:
        """Whether this rank's queries attend to the keys of all ranks."""
        return self.cp > 1 and self.cp_exchange == "keys"

    def tokens(self, seq: int, device: torch.device) -> Tensor | None:
        """Positions of the tokens of a sequence that this rank processes, int64; None: all of them.

        Raises ValueError if the ranks cannot divide the sequence.
        """
        parts = self.cp * self.tp
        if parts == 1:
            return None
        if self.by_keys:
            return _positions(seq, self.cp, self.cp_rank, self.tp, self.tp_rank, device)
        if seq % parts:
            below = seq // parts * parts
            cp = f"--parallel.cp={self.cp} --parallel.cp-exchange=heads and " if self.cp > 1 else ""
            what = "cp x tp" if self.cp > 1 else "tp"
            raise ValueError(
                f"--train.seq={seq} with {cp}--parallel.tp={self.tp}: must be a multiple of {what}, {parts}; "
                f"valid: {f'{below} or ' if below else ''}{below + parts}"
            )
        return _positions(seq, 1, 0, parts, self.cp_rank * self.tp + self.tp_rank, device)

    def queries(self, seq: int, device: torch.device) -> Tensor | None:
        """Positions of the tokens whose queries this rank rotates: the tokens of its tp group; None: all."""
        if self.cp == 1:
            return None
        if self.by_keys:
            return _positions(seq, self.cp, self.cp_rank, 1, 0, device)
        return _positions(seq, 1, 0, self.cp, self.cp_rank, device)

    def heads(self, heads: int) -> slice:
        """This rank's query heads under tp."""
        local_heads = heads // self.tp
        return slice(self.tp_rank * local_heads, (self.tp_rank + 1) * local_heads)

    def key_heads(self, heads: int) -> slice:
        """This rank's key/value heads: its share, or, if tp is larger, the one that its query heads use."""
        first = self.tp_rank * heads // self.tp
        return slice(first, first + max(1, heads // self.tp))

    def project(self, linear: nn.Linear, x_BsD: Tensor, rows: Sequence[slice]) -> Tensor:
        """The rows `rows` of linear(x) for the tokens of the tp group, [B, S, rows]."""
        if self.tp == 1:
            return linear(x_BsD)
        weight, bias = rows_of(linear, rows)
        y_BSO = gathered_linear(x_BsD, weight, bias, self.tp_group, self.pieces)
        if (own := adapted(linear)) is None:
            return y_BSO
        return y_BSO + own.outer(gather(own.inner(x_BsD), self.tp_group), rows)

    def output(self, linear: nn.Linear, y_BSO: Tensor) -> Tensor:
        """linear(y), summed over all ranks' heads, for this rank's tokens; y: own heads, all tokens."""
        if self.tp == 1:
            return linear(y_BSO)
        width = y_BSO.shape[-1]
        columns = slice(self.tp_rank * width, (self.tp_rank + 1) * width)
        y = linear_scattered(y_BSO, linear.weight[:, columns], self.tp_group, self.pieces)
        if (own := adapted(linear)) is not None:
            y = y + own.outer(scatter_sum(own.inner(y_BSO, columns), self.tp_group))
        return y if linear.bias is None else y + linear.bias

    def norm(self, norm: nn.RMSNorm, x_BSO: Tensor, own: slice, copies: int) -> Tensor:
        """RMSNorm over the channels of all ranks' heads; x has the channels in `own`.

        copies: how many ranks of the tp group have the same heads.
        """
        if self.tp == 1:
            return norm(x_BSO)
        x = x_BSO.float()
        square_BS1 = x.square().sum(-1, keepdim=True) / copies
        # the sum over ranks, gathered to all of them; its gradient is the sum of the ranks' gradients
        total_BS1 = gather(scatter_sum(square_BS1, self.tp_group), self.tp_group)
        eps = torch.finfo(x_BSO.dtype).eps if norm.eps is None else norm.eps
        y = x * (total_BS1 / norm.weight.shape[0] + eps).rsqrt() * factor_of(norm)[own].float()
        return y.to(x_BSO.dtype)

    def gather_keys(self, x_BSX: Tensor) -> Tensor:
        """Keys, values or latents of all tokens of the sequence, in order; x itself unless cp is by keys."""
        return in_key_order(gather(x_BSX, self.cp_group), self.cp) if self.by_keys else x_BSX

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All heads of this rank's tokens to some heads of all tokens; unchanged unless cp is by heads."""
        if self.cp == 1 or self.by_keys:
            return q, k, v
        H, G = q.shape[2], k.shape[2]
        if G % self.cp:  # each rank needs the key heads of its query heads
            times = self.cp // G if self.cp % G == 0 else H // G
            k, v = (t.repeat_interleave(times, 2) for t in (k, v))
        q, k, v = (exchange(t, self.cp_group, True) for t in (q, k, v))
        return q, k, v

    def tokens_to_heads(self, x_BsHC: Tensor) -> Tensor:
        """All heads of this rank's tokens to some heads of all tokens; unchanged without cp."""
        return x_BsHC if self.cp == 1 else exchange(x_BsHC, self.cp_group, True)

    def own_heads(self, heads: int) -> slice:
        """This rank's heads under tp and, by heads, under cp; cp must divide tp's share."""
        share = self.heads(heads)
        each = (share.stop - share.start) // self.cp
        return slice(share.start + self.cp_rank * each, share.start + (self.cp_rank + 1) * each)

    def from_heads(self, y_BSHC: Tensor) -> Tensor:
        """The inverse of `to_heads`."""
        if self.cp == 1 or self.by_keys:
            return y_BSHC
        return exchange(y_BSHC, self.cp_group, False)

    def note_logits(
        self, largest_H: Tensor, q: Tensor, k: Tensor, mask: Mask, scale: float, window: int = 0
    ) -> Tensor:
        """Records the largest logits of the heads whose attention this rank computes; returns q's values."""
        first = self.tp_rank * (len(largest_H) // self.tp)
        first += self.cp_rank * q.shape[2] if self.cp > 1 and not self.by_keys else 0
        seen = mask if mask is None or isinstance(mask, Tensor) else dense_mask(mask, q.shape[1], k.shape[1])
        return largest_logit(q, k, seen, largest_H, first, 0 if seen is not mask else window, scale)

    def of_heads(self, t_H: Tensor | None) -> Tensor | None:
        """The part of a value per head that belongs to the heads whose attention this rank computes."""
        if t_H is None:
            return None
        t_H = t_H[self.heads(t_H.shape[0])]
        if self.cp == 1 or self.by_keys:
            return t_H
        return rearrange(t_H, "(rank head) -> rank head", rank=self.cp)[self.cp_rank]


ALONE = Spread()


def rows_of(linear: nn.Linear, rows: Sequence[slice]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of these rows, in the order of `rows`."""
    weight = torch.cat([linear.weight[part] for part in rows])
    bias = None if linear.bias is None else torch.cat([linear.bias[part] for part in rows])
    return weight, bias


def linear_of_rows(linear: nn.Linear, x: Tensor, rows: slice) -> Tensor:
    """The rows `rows` of linear(x)."""
    if rows == slice(0, linear.weight.shape[0]):
        return linear(x)
    y = F.linear(x, linear.weight[rows], None if linear.bias is None else linear.bias[rows])
    own = adapted(linear)
    return y if own is None else y + own.outer(own.inner(x), [rows])


@functools.lru_cache(maxsize=64)
def _positions(seq: int, cp: int, cp_rank: int, tp: int, tp_rank: int, device: torch.device) -> Tensor:
    """`positions`, cached for the next call, so that forwards need no copy to the GPU."""
    with torch.inference_mode(False):
        return positions(seq, cp, cp_rank, tp, tp_rank, device)
