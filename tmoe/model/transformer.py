"""The Transformer: embedding, blocks, head. It is independent of the number of ranks.

next: model/attention.py, then moe/layer.py
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tmoe.base.private_torch import find_or_note
from tmoe.config.check import spelt
from tmoe.config.model import IGNORE, LINEAR, ModelConfig
from tmoe.model.adapted import keep_order
from tmoe.model.attention import Attention
from tmoe.model.attention_backend import Mask, make_mask
from tmoe.model.attention_parallel import ALONE
from tmoe.model.count import qk_width, v_width
from tmoe.model.latent import LatentAttention
from tmoe.model.linear import DeltaNet, LinearLayer
from tmoe.model.loss import Given, Objective, cross_entropy_sum, largest_logits
from tmoe.model.mamba2 import Mamba2
from tmoe.model.multi_token import MultiToken
from tmoe.model.norm import norm_of
from tmoe.model.rope import Tables, kinds_of, turns_of
from tmoe.model.rounding import rounding
from tmoe.moe.balance import Balancer, Load, RouterStats, Totals, stack
from tmoe.moe.experts import LocalExperts
from tmoe.moe.layer import MoE, SwiGLU, check_marks, dense_layer, warn_if_acausal, warn_if_untrained
from tmoe.moe.router import Router
from tmoe.ops.delta.runs import Runs, runs_of
from tmoe.ops.gradient_sums import GradientSum, find_table
from tmoe.parallel.init_weights import initialise

# marks a dimension of a tensor as dynamic: compiled graphs must accept any size of it
let_vary = find_or_note(
    "torch._dynamo.mark_dynamic", "blocks are compiled for each number of sequences in a row"
)
let_vary = let_vary or (lambda tensor, dim: None)


ALL = slice(None)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)). The feed-forward is an MoE or dense.

    In a linear block (`is_linear`) the attribute `attention` is a LinearLayer. A block of one branch
    (`ModelConfig.one_branch`) has one of the halves; the other's modules are None or identities.
    The result of each half passes dropout and, in Granite's models, is multiplied by a factor
    (`residual_multiplier`). Norms may also follow attention and feed-forward, or only follow them (`norms`).
    """

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.dropout = cfg.dropout
        self.multiplier = cfg.residual_multiplier
        self.window = cfg.window_of(layer)
        self.mask = cfg.mask_of(layer)  # the key of the block's mask in `Context.masks`
        self.rope = cfg.rope_of(layer)
        before, behind = cfg.norms != "post", cfg.norms in ("post", "sandwich")
        mixes, feeds = cfg.mixes(layer), cfg.feeds(layer)
        self.attention_norm = norm_if(before and mixes, cfg)
        self.attention = attention_of(cfg, layer) if mixes else None
        self.attention_post_norm = norm_if(behind, cfg)
        self.ffn_norm = norm_if(before and feeds, cfg)
        self.ffn_post_norm = norm_if(behind or (cfg.norms == "moe" and cfg.is_moe(layer)), cfg)
        self.moe = MoE(cfg.dim, cfg.moe, init=False) if cfg.is_moe(layer) else None
        self.ffn = None
        if cfg.is_dense(layer):
            self.ffn = dense_layer(cfg.dim, cfg.ffn_dim, cfg.moe.shared_activation)
        self.must_compile = False
        # a context in which the forward is recomputed; set by model/parallelize.py
        self.standing_in: Callable[[], AbstractContextManager] = nullcontext

    def forward(self, x: Tensor, *context: Any) -> tuple[Tensor, Load | None]:
        """Calls `compute` with this rank's experts gathered.

        This method is eager on purpose: FSDP2's hooks, of the block and of the experts' scope, run outside
        the compiled `compute`.
        """
        compute = self.compute
        if isinstance(self.attention, LinearLayer):
            compute = partial(self.attention.rates, compute)
        if self.moe is None:
            return compute(x, *context)
        return self.moe.experts(compute, x, *context)

    def compute(
        self,
        x: Tensor,
        cos_SC: Tensor,
        sin_SC: Tensor,
        mask: Mask | Runs,
        padding: Tensor | None,
        members: Tensor | None,
        experts: LocalExperts | None = None,
    ) -> tuple[Tensor, Load | None]:
        """The block's output [B, S, D], and its router's load (None without an MoE).

        cos_SC, sin_SC, mask: see Attention. padding: bool [B, S], True at tokens that the MoE leaves out.
        members: see `Context`.
        """
        # evaluated once while tracing, so it costs nothing in the compiled graph
        if self.must_compile and not torch.compiler.is_compiling():
            raise RuntimeError("a block that should be compiled ran eager; --no-compile allows that")
        x = self.attend(x, cos_SC, sin_SC, mask)
        return self.feed_forward(x, padding, members, experts)

    def attend(self, x: Tensor, cos_SC: Tensor, sin_SC: Tensor, mask: Mask | Runs) -> Tensor:
        """The first half: x + attention(norm(x)); x in a block without attention."""
        if self.attention is None:
            return x
        y = self.attention(self.attention_norm(x), cos_SC, sin_SC, mask)
        return x + self.branch(self.attention_post_norm(y))

    def feed_forward(
        self, x: Tensor, padding: Tensor | None, members: Tensor | None, experts: LocalExperts | None
    ) -> tuple[Tensor, Load | None]:
        """The second half: x + feed_forward(norm(x)), and the router's load; x in a block without one."""
        if not self.feeds:
            return x, None
        if self.ffn is not None:
            return x + self.branch(self.ffn_post_norm(self.ffn(self.ffn_norm(x)))), None
        assert self.moe is not None and experts is not None
        y_TD, load = self.moe.route(self.ffn_norm(x), padding, experts, members=members)
        return x + self.branch(self.ffn_post_norm(y_TD.view_as(x))), load

    @property
    def feeds(self) -> bool:
        """Whether the block has a feed-forward."""
        return self.ffn is not None or self.moe is not None

    @property
    def first_norm(self) -> nn.Module:
        """The norm on the input of the block's first branch."""
        return self.ffn_norm if self.attention is None else self.attention_norm

    def branch(self, y: Tensor) -> Tensor:
        """The term that is added to the residual stream: y after dropout, times the multiplier."""
        y = F.dropout(y, self.dropout, self.training) if self.dropout else y
        return y if self.multiplier == 1.0 else y * self.multiplier


class FurtherBlock(Block):
    """A block that predicts one token further; its input is [e; h], see model/multi_token.py."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__(cfg, layer)
        self.enorm = norm_if(True, cfg)
        self.hnorm = norm_if(True, cfg)
        self.eh_proj = nn.Linear(2 * cfg.dim, cfg.dim, bias=False)
        self.norm = norm_if(True, cfg)
        if self.moe is not None:
            self.moe.further = True

    def attend(self, x: Tensor, *context: Any) -> Tensor:
        e, h = x.chunk(2, -1)
        return super().attend(self.eh_proj(torch.cat([self.enorm(e), self.hnorm(h)], -1)), *context)

    def feed_forward(self, x: Tensor, *context: Any) -> tuple[Tensor, Load | None]:
        y, load = super().feed_forward(x, *context)
        return self.norm(y), load


def norm_if(there: bool, cfg: ModelConfig) -> nn.Module:
    """A norm of the residual stream's width, or an identity where the model has no norm."""
    return norm_of(cfg, cfg.dim) if there else nn.Identity()


def attention_of(cfg: ModelConfig, layer: int) -> Attention | LatentAttention | LinearLayer:
    """The layer of this block by which a token reads earlier tokens."""
    if cfg.is_linear(layer):
        return Mamba2(cfg) if cfg.linear.kind == "mamba2" else DeltaNet(cfg)
    return LatentAttention(cfg) if cfg.attention == "mla" else Attention(cfg, cfg.window_of(layer))


class Blocks(nn.ModuleList):
    """Consecutive blocks of a model, each named by its number in the whole model."""

    def __init__(self, cfg: ModelConfig, numbers: range):
        super().__init__()
        for i in numbers:
            self.add_module(str(i), Block(cfg, i))

    def __getitem__(self, place: int | slice) -> Any:
        """The block at a place, counted from 0, whatever the blocks' names are."""
        chosen: Any = list(self)[place]
        return nn.ModuleList(chosen) if isinstance(place, slice) else chosen


class _Rows(torch.autograd.Function):
    """Rows of a table. Their gradient is added to the table's sum; a step's only one is autograd's."""

    @staticmethod
    def forward(ctx: Any, table_VD: Tensor, tokens_BS: Tensor, owner: GradientSum) -> Tensor:
        ctx.save_for_backward(table_VD, tokens_BS)
        ctx.owner = owner
        return F.embedding(tokens_BS, table_VD)

    @staticmethod
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[Tensor | None, None, None]:
        table_VD, tokens_BS = ctx.saved_tensors
        target = ctx.owner.open()
        if target.plain:
            whole = torch.ops.aten.embedding_dense_backward(grad_BSD, tokens_BS, len(table_VD), -1, False)
            return whole, None, None
        total = target.allocated(table_VD).tensor
        if not target.add:
            total.zero_()
        # not index_add_, whose sums on a GPU have another order each time
        total.index_put_((tokens_BS,), grad_BSD.to(total.dtype), accumulate=True)
        ctx.owner.close(target, total)
        return None, None, None


def rows_of(embedding: nn.Embedding, tokens_BS: Tensor) -> Tensor:
    """embedding(tokens_BS). If its table has a sum of gradients, the rows of these tokens are added to it.

    autograd would get a gradient of the whole table, [V, D], from each micro-batch.
    """
    table_VD = embedding.weight
    plain = type(embedding) is nn.Embedding and embedding.padding_idx is None and not hooked(embedding)
    owner = find_table(table_VD) if plain and not torch.compiler.is_compiling() else None
    if owner is None or not (torch.is_grad_enabled() and table_VD.requires_grad):
        return embedding(tokens_BS)
    return _Rows.apply(table_VD, tokens_BS, owner)


def hooked(module: nn.Module) -> bool:
    """Whether hooks of the user run when this module is called."""
    kinds = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    return any(getattr(module, kind, None) for kind in kinds)


class Context(NamedTuple):
    """Inputs that all blocks of a forward share."""

    turns: Tables  # cos and sin by kind of block, [S, C];
    # [B, S, C] if each row has its own positions
    masks: dict[int | str, Mask | Runs]  # by `mask_of` of blocks that have attention
    padding_BS: Tensor | None  # of this rank's tokens
    # fp32 [B, S, sequences of a row], 1 where a token belongs to a sequence; None if rows are sequences, or
    # if no loss needs it
    members_BSN: Tensor | None

    @property
    def of_tokens(self) -> tuple[Tensor | None, Tensor | None]:
        """The inputs of the MoE layers that have a value for each token."""
        return self.padding_BS, self.members_BSN

    def without(self, left_out_BS: Tensor) -> "Context":
        """The context of blocks that leave out these tokens of this rank, bool; they include the padding."""
        members_BSN = self.members_BSN
        if members_BSN is not None:
            members_BSN = members_BSN * ~left_out_BS[..., None]
            if not torch.compiler.is_compiling():
                let_vary(members_BSN, 2)
        return self._replace(padding_BS=left_out_BS, members_BSN=members_BSN)

    def of_block(self, block: Block) -> tuple[Tensor, Tensor, Mask | Runs]:
        """The inputs of a block's attention."""
        return *self.turns[block.rope], self.masks.get(block.mask)


class Transformer(nn.Module):
    """A decoder-only language model.

    `model(tokens_BS)` returns logits [B, S, V]. `model(tokens_BS, targets_BS)` returns the loss: mean
    cross-entropy over the targets that are not -100, plus the balancing losses. Weights are initialised by
    parallel/init_weights.py.

    Where tp or cp divide sequences, all ranks of a group get the same whole rows. Each rank computes its own
    tokens of them (`own`), and returns their logits, or its share of the loss. The shares add up to the loss.
    """

    def __init__(self, cfg: ModelConfig, span: range | None = None, head: bool = True):
        """span: the blocks of this module, if it is a part of a model (model/stages.py); None: all blocks.

        head: whether a part with the last block, or without blocks, has norm and head.
        """
        super().__init__()
        self.cfg = cfg
        span = range(cfg.layers) if span is None else span
        self.ropes = kinds_of(cfg)
        self.first = span.start == 0
        self.last = span.stop == cfg.layers and head
        has_table = self.first or (self.last and cfg.two_tables)
        self.embedding = nn.Embedding(cfg.vocab, cfg.dim) if has_table else None
        self.blocks = Blocks(cfg, span)
        self.norm = norm_of(cfg, cfg.dim) if self.last else None
        has_head = self.last and not cfg.tied
        self.head = nn.Linear(cfg.dim, cfg.vocab, bias=False) if has_head else None
        self.balancer = Balancer(cfg.moe)
        further = [FurtherBlock(cfg, layer) for layer in cfg.numbered[cfg.layers :] if self.last]
        self.mtp = MultiToken(cfg, further)
        # set by model/parallelize.py: how tp and cp divide sequences, and the name of the expert group
        self.spread = ALONE
        self.expert_group = ""
        self.rounding = rounding(bits=False)  # see keep_bits
        self.init_weights()
        whole = self.first and self.last
        if whole and any(block.moe for block in self.blocks) and not self.embedding.weight.is_meta:
            warn_if_untrained(cfg.moe)
            warn_if_acausal(cfg.moe)

    def init_weights(self, seed: int | None = None) -> None:
        """Draws all weights again; see parallel/init_weights.py."""
        initialise(self, self.cfg.init_std, self.cfg.layers, seed)

    def keep_bits(self, on: bool = True) -> None:
        """From now on a forward computes the same bits for a token, whichever other tokens are in its batch.

        Single decoding steps give the same bits too. Attention processes blocks of 128 tokens in a fixed
        order, so a sequence must begin at a multiple of 128. A gap after a sequence, marked as padding,
        belongs to that sequence's document. An Engine with bits calls this method.
        """
        self.rounding = rounding(bits=on)
        for module in self.modules():
            if isinstance(module, SwiGLU):
                module.fused = self.rounding.fused
        keep_order(self, self.rounding.low_rank_in_order)

    def counted(self) -> Iterator[nn.Parameter]:
        """Parameters that the gradient norm counts: all of them, each once (see model/stages.py)."""
        return self.parameters()

    def is_copy(self, name: str) -> bool:
        """Whether a tensor of this name duplicates a tensor of another rank. In a whole model none does."""
        return False

    def read_log(self) -> RouterStats | None:
        """The routers' statistics since the last call, over all ranks; None if nothing was recorded.

        A collective.
        """
        return self.balancer.read_log(self.routers())

    def update_bias(self, taken: Tensor | None = None) -> None:
        """Updates the routers' choice bias by the step's loads (MoEConfig.choice_bias).

        Call it once after each optimizer step, on every rank. taken: 0 for a step that was skipped.
        """
        for balancer, routers in (self.balancer, self.routers()), (self.mtp.balancer, self.mtp.routers()):
            balancer.update_bias(routers, taken)

    def start_step(self) -> None:
        """Resets the counts that balancing losses add up over a step's micro-batches."""
        self.balancer.start_step()
        self.mtp.balancer.start_step()

    def all_blocks(self) -> Iterator[Block]:
        """The blocks of this module, then those that predict further tokens."""
        return (block for block in (*self.blocks, *self.mtp.blocks()) if isinstance(block, Block))

    def routers(self) -> Iterator[Router]:
        """The routers of the MoE layers, from the first to the last."""
        return (block.moe.router for block in self.blocks if block.moe is not None)

    def forward(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor | None = None,
        *,
        documents_BS: Tensor | None = None,
        padding_BS: Tensor | None = None,
        positions_BS: Tensor | None = None,
        totals: Totals | None = None,
        objective: Objective | None = None,
        given: Given | None = None,
    ) -> Tensor:
        """Logits [B, S, V], or with targets the loss.

        Args:
            tokens_BS, targets_BS: int64; targets of -100 are not counted.
            documents_BS: number of the document that a token belongs to; tokens attend only within their
                document.
            padding_BS: bool, True at tokens that no other token attends to, that are sent to no expert and
                are counted in no loss.
            positions_BS: int64, position of each token for RoPE; None: its index in the row.
            totals: targets, tokens and sequences of the whole step over all ranks, if this call is a part of
                the step; the losses of the parts then add up. None: this call is the whole step.
            objective: the training objective; None: cross-entropy.
            given: inputs of the objective besides the targets, by name: a value for each token [B, S], or for
                other items that the objective counts [M]. The model uses two names itself: "noise", see
                `embed`, and "members", bool [B, S, n], True where a token belongs to the n-th sequence that
                is packed into its row. The balancing loss `sequence` is then a mean over these sequences.
                Without "members", a row is one sequence.

        Raises ValueError for tensors of a wrong shape, dtype or device, or for sequences longer than RoPE's
        range.
        """
        if targets_BS is not None and isinstance(tokens_BS, Tensor):  # `context` raises for other types
            check_marks("targets", targets_BS, tokens_BS, tokens_BS.shape, torch.int64, torch.int32)
        given = given or {}
        rows = tokens_BS, documents_BS, padding_BS, positions_BS
        context = self.context(*rows, given)
        h_BSD, load = self.hidden_in(context, tokens_BS, given)
        if targets_BS is None:
            return F.linear(self.scaled(h_BSD), self.head_weight)
        rows = tokens_BS, targets_BS, documents_BS, padding_BS
        loss = self.losses(h_BSD, rows, context, totals, objective, given)
        return loss if load is None else loss + self.balancer.loss(load, totals)

    def losses(
        self,
        h_BSD: Tensor,
        rows: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        context: Context,
        totals: Totals | None,
        objective: Objective | None,
        given: Given,
        piece: slice = ALL,
    ) -> Tensor:
        """This rank's share of the task's loss, plus that of the blocks that predict further tokens.

        h_BSD: for this rank's own tokens. rows: tokens, targets, documents, padding. piece: see `task_share`.
        An evaluation, whose totals do not count further tokens, leaves these blocks out. ValueError if the
        totals of a step do not count them.
        """
        _, targets_BS, _, padding_BS = rows
        if padding_BS is not None:
            targets_BS = targets_BS.masked_fill(padding_BS, IGNORE)
        count = (targets_BS != IGNORE).sum().clamp(min=1) if totals is None else totals.targets
        left_out = len(self.mtp) == 0 or (totals is not None and totals.further is None)
        if left_out and len(self.mtp) and self.training and torch.is_grad_enabled():
            raise ValueError(
                f"totals.further: None, but model.mtp.depth={len(self.mtp)}; "
                "valid are the step's sums of tmoe.model.multi_token.count_further"
            )
        best_T = None
        if not left_out and not torch.compiler.is_compiling():
            best_T = self.own(targets_BS).flatten().clone()
        loss = self.task_share(h_BSD, targets_BS, count, objective, given, piece, best_T)
        return loss if left_out else loss + self.mtp.share(self, h_BSD, rows, best_T, context, totals)

    def task_share(
        self,
        h_BSD: Tensor,
        targets_BS: Tensor,
        count: Tensor,
        objective: Objective | None = None,
        given: Given | None = None,
        piece: slice = ALL,
        best_T: Tensor | None = None,
    ) -> Tensor:
        """This rank's share of the task's loss, divided by count; stored in `task_loss`.

        h_BSD: for this rank's own tokens. targets_BS, given: for whole rows. best_T: as of
        `cross_entropy_sum`.
        piece: the tokens of h among this rank's own tokens.
        """
        h_TD = self.scaled(h_BSD).flatten(0, 1)
        targets_T = self.own(targets_BS).flatten()[piece]
        local_given = {
            name: self.own(t).flatten()[piece] if t.dim() == 2 else t for name, t in (given or {}).items()
        }
        if objective is None:
            loss = cross_entropy_sum(h_TD, self.head_weight, targets_T, best_T) / count
        else:
            loss = objective(h_TD, self.head_weight, targets_T, local_given) / count
            if best_T is not None:
                largest_logits(h_TD, self.head_weight, best_T)
        self.task_loss = loss.detach()
        return loss

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix [V, D]."""
        return self.embedding.weight if self.head is None else self.head.weight

    def scaled(self, h_BSD: Tensor) -> Tensor:
        """Final hidden states as the input of the head (`logits_scaling`)."""
        return h_BSD if self.cfg.logits_scaling == 1.0 else h_BSD / self.cfg.logits_scaling

    def own(self, t_BS: Tensor) -> Tensor:
        """This rank's tokens of whole rows; all tokens unless tp or cp divide sequences."""
        tokens = self.spread.tokens(t_BS.shape[1], t_BS.device)
        return t_BS if tokens is None else t_BS[:, tokens]

    def hidden(
        self,
        tokens_BS: Tensor,
        documents_BS: Tensor | None = None,
        padding_BS: Tensor | None = None,
        positions_BS: Tensor | None = None,
        given: Given | None = None,
    ) -> tuple[Tensor, Load | None]:
        """Final hidden states [B, S, D], and the routers' load stacked over MoE layers; see `forward`.

        The load is None without MoE layers. This function reads only "noise" and "members" of `given`.
        """
        context = self.context(tokens_BS, documents_BS, padding_BS, positions_BS, given)
        return self.hidden_in(context, tokens_BS, given)

    def hidden_in(
        self, context: Context, tokens_BS: Tensor, given: Given | None = None
    ) -> tuple[Tensor, Load | None]:
        """`hidden` with its context."""
        x, load = self.run_blocks(self.embed(tokens_BS, (given or {}).get("noise")), context)
        return self.norm(x), load

    def context(
        self,
        tokens_BS: Tensor,
        documents_BS: Tensor | None = None,
        padding_BS: Tensor | None = None,
        positions_BS: Tensor | None = None,
        given: Given | None = None,
    ) -> Context:
        """RoPE tables, and a mask for each window, for whole rows. Raises ValueError as `forward` does."""
        if not isinstance(tokens_BS, Tensor) or tokens_BS.dim() != 2:
            raise ValueError(
                f"tokens: got {getattr(tokens_BS, 'shape', type(tokens_BS))}, valid is a tensor [B, S]"
            )
        S = tokens_BS.shape[1]
        if padding_BS is not None:
            check_marks("padding", padding_BS, tokens_BS, tokens_BS.shape, torch.bool)
        if documents_BS is not None:
            check_marks("documents", documents_BS, tokens_BS, tokens_BS.shape, torch.int64, torch.int32)
        if positions_BS is not None:
            check_marks("positions", positions_BS, tokens_BS, tokens_BS.shape, torch.int64)
        if self.cfg.longest < S:
            raise ValueError(f"tokens: {S} positions, but {spelt(self.cfg.longest_limit, 'key')}")
        members_BSN = self.members(tokens_BS, padding_BS, given)
        self.spread.tokens(S, tokens_BS.device)  # raises on each stage of a pipeline if S cannot be divided
        runs = None
        if self.cfg.linear_layers:
            runs = runs_of(documents_BS, padding_BS, self.cfg.linear.conv - 1)
        if padding_BS is not None:
            documents_BS = self.rounding.documents(documents_BS, padding_BS, tokens_BS)
            padding_BS = self.own(padding_BS)

        device = tokens_BS.device
        rotated = self.spread.queries(S, device)
        turns = self.turns(S, device, rotated, positions_BS)
        width = min(qk_width(self.cfg), v_width(self.cfg))
        at_Q = rotated if self.spread.by_keys else None
        masks: dict[int | str, Mask | Runs] = {
            window: make_mask(
                documents_BS,
                window,
                S,
                device,
                width,
                self.cfg.sinks_in(window),
                at_Q,
                self.rounding.in_blocks,
            )
            for window in {self.cfg.mask_of(i) for i in self.cfg.numbered}
            if isinstance(window, int)
        }
        if self.cfg.linear_layers:
            masks[LINEAR] = runs
        return Context(turns, masks, padding_BS, members_BSN)

    def members(self, tokens_BS: Tensor, padding_BS: Tensor | None, given: Given | None) -> Tensor | None:
        """fp32 [B, S, n], 1 where a token belongs to its row's n-th sequence; None if no loss needs it.

        Raises ValueError as `forward` does.
        """
        members_BSN = (given or {}).get("members") if "sequence" in self.cfg.moe.losses else None
        if members_BSN is None:
            return None
        shape = (*tokens_BS.shape, members_BSN.shape[-1])
        check_marks("members", members_BSN, tokens_BS, torch.Size(shape), torch.bool)
        if padding_BS is not None:
            members_BSN = members_BSN & ~padding_BS[..., None]
        members_BSN = self.own(members_BSN).float()
        if members_BSN.shape[-1] == 1:  # compilers treat a size of 1 as a constant
            members_BSN = torch.cat([members_BSN, torch.zeros_like(members_BSN)], -1)
        if not torch.compiler.is_compiling():
            let_vary(members_BSN, 2)
        return members_BSN

    def turns(
        self, S: int, device: torch.device, rotated: Tensor | None, positions_BS: Tensor | None
    ) -> dict[Any, tuple[Tensor, Tensor]]:
        """Cosines and sines of each RoPE for the tokens `rotated` of a row (None: all S tokens).

        positions_BS: the tokens' positions; None: their indices in the row.
        """
        turns = turns_of(self.cfg, S, device, self.ropes)
        at = rotated
        if positions_BS is not None:
            at = positions_BS if rotated is None else positions_BS[:, rotated]
        if at is None:
            return turns
        return {rope: (cos_SC[at], sin_SC[at]) for rope, (cos_SC, sin_SC) in turns.items()}

    def embed(self, tokens_BS: Tensor, noise_BS: Tensor | None = None) -> Tensor:
        """The input of the first block, for this rank's own tokens of whole rows.

        noise_BS: in training, uniform(-1, 1) times this value is added to each channel of a token's embedding
            (NEFTune, Jain et al. 2023).
        """
        assert self.embedding is not None
        x = rows_of(self.embedding, self.own(tokens_BS))
        if noise_BS is not None and self.training:
            x = x + (2 * torch.rand_like(x) - 1) * self.own(noise_BS)[..., None].to(x.dtype)
        return x if self.cfg.embedding_multiplier == 1.0 else x * self.cfg.embedding_multiplier

    def run_blocks(self, x: Tensor, context: Context) -> tuple[Tensor, Load | None]:
        """Runs all blocks in order. In training their load is recorded for the log."""
        loads = []
        for block in self.blocks:
            assert isinstance(block, Block)
            x, load = block(x, *context.of_block(block), *context.of_tokens)
            if load is not None:
                loads.append(load)
        load = stack(loads) if loads else None
        if load is not None and self.training:
            self.balancer.record(load)
        return x, load
