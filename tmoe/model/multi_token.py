"""Multi-token prediction: blocks after the last, each of which predicts one token further (--model.mtp).

The block of depth k = 1 .. D, at place i of a row of tokens t, with h^0 the output of the model's final norm:

    x = eh_proj [enorm(embedding(t_{i+k})); hnorm(h^{k-1}_i)]
    h^k = norm(block_k(x));  the head's logits of h^k_i predict t_{i+k+1}
    loss = coeff / D * sum over k of the mean cross-entropy of depth k     (DeepSeek-V3, 2024, section 2.2)

Embedding and head are the model's. A place is counted if t_{i+1} .. t_{i+k+1} are all of its document and
trained. Each depth's mean is over its own places of the whole step. Positions are those of the main blocks:
RoPE depends on differences of positions alone.

next: model/transformer.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tmoe.config.model import IGNORE, ModelConfig
from tmoe.model.loss import cross_entropy_sum
from tmoe.moe.balance import Balancer, Totals, stack
from tmoe.moe.router import Router

Model = Any  # a Transformer; model/transformer.py imports this module
Context = Any  # its Context


def later(t_BS: Tensor, k: int, fill: int = 0) -> Tensor:
    """The value k places later in the same row; `fill` past its end."""
    past = t_BS.new_full((*t_BS.shape[:-1], min(k, t_BS.shape[-1])), fill)
    return torch.cat([t_BS[..., k:], past], -1)


def inside(like_BS: Tensor, documents_BS: Tensor | None, k: int) -> Tensor:
    """bool [..., S], True at places whose next k tokens are in the row and of the same document.

    documents_BS: numbers of documents; None: a row is one document. like_BS: any tensor of the shape.
    """
    found = later(torch.ones_like(like_BS), k).bool()
    if documents_BS is not None:
        for j in range(1, k + 1):
            found &= later(documents_BS, j, -1) == documents_BS
    return found


def targets_of(targets_BS: Tensor, documents_BS: Tensor | None, padding_BS: Tensor | None, k: int) -> Tensor:
    """The targets of depth k, int64 [..., S]: t_{i+k+1} at places that are counted, -100 elsewhere.

    targets_BS: t_{i+1}, -100 where it is not trained. documents_BS, padding_BS: as of `Transformer.forward`.
    """
    if padding_BS is not None:
        targets_BS = targets_BS.masked_fill(padding_BS, IGNORE)
    counted = inside(targets_BS, documents_BS, k)
    if documents_BS is not None:  # the target itself, if its document is known
        counted &= (later(documents_BS, k + 1, -1) == documents_BS) | ~inside(targets_BS, None, k + 1)
    for j in range(k + 1):
        counted &= later(targets_BS, j, IGNORE) != IGNORE
    return later(targets_BS, k, IGNORE).masked_fill(~counted, IGNORE)


def count_further(
    depth: int, targets_BS: Tensor, documents_BS: Tensor | None = None, padding_BS: Tensor | None = None
) -> Tensor:
    """The numbers of places that the depths 1 .. depth count, int64 [depth]: of a micro-batch or a batch.

    Added up over all ranks and micro-batches, they are `Totals.further`.
    """
    depths = [targets_of(targets_BS, documents_BS, padding_BS, k + 1) for k in range(depth)]
    return torch.stack([(targets != IGNORE).sum() for targets in depths])


class MultiToken(nn.ModuleList):
    """The blocks that predict further tokens (`FurtherBlock`), by depth, and their loss."""

    def __init__(self, cfg: ModelConfig, blocks: Iterable[nn.Module]):
        super().__init__(blocks)
        self.cfg = cfg.mtp
        self.balancer = Balancer(cfg.moe)  # separate from the model's, whose log has a row for each MoE block
        self.measured: Tensor | None = None

    def blocks(self) -> list[Any]:
        """The blocks, by depth."""
        return list(self)

    def routers(self) -> Iterator[Router]:
        """The routers of the blocks, by depth."""
        return (block.moe.router for block in self.blocks() if block.moe is not None)

    def share(
        self,
        model: Model,
        h_BSD: Tensor,
        rows: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        best_T: Tensor | None,
        context: Context,
        totals: Totals | None,
    ) -> Tensor:
        """This rank's share of the depths' loss, and of the balancing losses of their routers; 0-dim fp32.

        h_BSD: the output of the final norm for this rank's tokens. rows: tokens, targets, documents and
        padding of whole rows. best_T: tokens of the main head's largest logits for this rank's tokens; None:
        nothing is measured. totals: counts of the step; None: this call is the step.
        """
        tokens_BS, targets_BS, documents_BS, padding_BS = rows
        D, detach = len(self), self.cfg.detach
        if totals is None:
            counts = count_further(D, targets_BS, documents_BS, padding_BS)
        else:
            assert totals.further is not None
            counts = totals.further
        head_VD = model.head_weight.detach() if detach else model.head_weight
        best_BS = None if best_T is None else self.whole(model, best_T, tokens_BS)
        h = h_BSD.detach() if detach else h_BSD
        losses, equal, loads = [], [], []
        for k, block in enumerate(self.blocks(), 1):
            with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
                e = model.embed(later(tokens_BS, k))
            left_out_BS = ~inside(tokens_BS, documents_BS, k)
            left_out_BS = left_out_BS if padding_BS is None else left_out_BS | padding_BS
            inner = context.without(model.own(left_out_BS))
            h, load = block(torch.cat([e, h], -1), *inner.of_block(block), *inner.of_tokens)
            if load is not None:
                loads.append(load)
            targets_T = model.own(targets_of(targets_BS, documents_BS, padding_BS, k)).flatten()
            drafts_T = None if best_BS is None else torch.empty_like(targets_T)
            one = cross_entropy_sum(model.scaled(h).flatten(0, 1), head_VD, targets_T, drafts_T)
            count = counts[k - 1].clamp(min=1)
            losses.append(one / count)
            if best_BS is not None:
                same_T = model.own(later(best_BS, k)).flatten() == drafts_T
                equal.append((same_T & (targets_T != IGNORE)).sum() / count)
        if best_BS is not None:
            self.measure(torch.stack([*losses, *equal]).detach())
        loss = self.cfg.coeff / D * torch.stack(losses).sum()
        if not loads:
            return loss
        load = stack(loads)
        if self.training:
            self.balancer.record(load)
        return loss + self.balancer.loss(load, totals)

    def whole(self, model: Model, best_T: Tensor, like_BS: Tensor) -> Tensor:
        """The values of whole rows, from those of each rank's tokens. A collective under tp and cp."""
        tokens = model.spread.tokens(like_BS.shape[1], like_BS.device)
        if tokens is None or self.balancer.over_parts is None:
            return best_T.view_as(like_BS)
        best_BS = torch.zeros_like(like_BS)
        best_BS[:, tokens] = best_T.view(len(like_BS), -1)
        return self.balancer.over_parts(best_BS)

    def measure(self, numbers: Tensor) -> None:
        """Adds a micro-batch's numbers: each depth's loss, then each depth's share of equal tokens."""
        self.measured = numbers if self.measured is None else self.measured + numbers


def names_of(depth: int) -> tuple[str, ...]:
    """Names in the log: each depth's loss, and its share of places with the main head's largest logit.

    mtp/equal_k is the share of the counted places where the token of the largest logit of depth k is that of
    the main head k places later. Speculative decoding would accept these drafts.
    """
    return tuple(f"mtp/{what}_{k}" for what in ("loss", "equal") for k in range(1, depth + 1))


def read_measured(model: Model | Iterable[Model], depth: int, like: Tensor) -> Tensor:
    """This rank's share of the numbers of `names_of` since the last call, fp32, on the device of `like`.

    model: a Transformer, or the parts of one (model/stages.py).
    """
    parts: list[Model] = [model] if hasattr(model, "mtp") else list(model)
    total = torch.zeros(2 * depth, device=like.device)
    for part in parts:
        measured, part.mtp.measured = part.mtp.measured, None
        total = total if measured is None else total + measured
    return total
