"""The settings of sampling of each slot, on the device, and the draw of a step's tokens with them.

next: tmoe/ops/decode/sample.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tmoe.generate.requests import MOST_TOP, Request
from tmoe.generate.sampler import Sampling
from tmoe.generate.upload import upload
from tmoe.model.transformer import Transformer
from tmoe.ops.decode.sample import Drawn, Keys, RowFilters, sample
from tmoe.ops.loss.logprob import logprobs


class Needs(NamedTuple):
    """The parts of a step that some of its answers need. A CUDA graph is captured for each combination."""

    barred: bool = False  # tokens that only some answers may draw
    repeats: bool = False  # a penalty on tokens that occurred
    tops: bool = False
    routes: bool = False
    weights: bool = False
    heats: tuple[float, ...] = ()  # the temperatures, where the loss computes log-probs


class Head(NamedTuple):
    """The output of a step's forward, from which its tokens are drawn."""

    logits_BV: Tensor
    h_BD: Tensor  # the head's input
    token_B: Tensor  # the tokens before


class TopTokens(NamedTuple):
    """The values of `requests.Tops` for a step's rows."""

    ids_BK: Tensor
    logprobs_BK: Tensor
    own_B: Tensor


class RowSettings:
    """Settings of the answers in `slots` slots.

    If all answers have equal settings, the sampler gets them as numbers. Tokens and log-probs are the same
    as with settings of each row.
    """

    def __init__(self, model: Transformer, slots: int, known: int, one: Sampling | None):
        """Allocates the state of slots.

        known: number of ids that the tokenizer can decode. one: the settings, if all answers have the same.
        """
        self.model, self.one = model, one
        self.vocab, self.device = model.cfg.vocab, model.head_weight.device
        vocab, device = self.vocab, self.device
        # temperature, 1 - top_p, min_p, repetition_penalty; and seed, top_k
        self.real_4B = torch.zeros(4, slots, device=device)
        self.real_4B[:] = torch.tensor(_real(one or Sampling()), device=device)[:, None]
        self.whole_2B = torch.zeros(2, slots, dtype=torch.int64, device=device)
        # tokens that no answer draws: without a text, or suppressed in all answers
        self.unknown_V = None
        left = () if one is None else one.suppress
        if known < vocab or left:
            self.unknown_V = torch.arange(vocab, device=device) >= known
            self.unknown_V[torch.tensor(left, dtype=torch.int64, device=device)] = True
        # allocated when the first answer needs them: tokens that a row must not draw, and tokens in its
        # prompt and answer
        self.barred_BV: Tensor | None = None
        self.seen_BV: Tensor | None = None

    def needs(self, requests: Sequence[Request]) -> Needs:
        """The parts that a step of these answers needs."""
        asked = {id(request.asked): request.asked for request in requests}.values()
        hows = {id(prompt.sampling): prompt.sampling for prompt in asked}.values()
        heats = (
            sorted({how.temperature or 1.0 for how in hows}) if self.model.rounding.log_probs_of_loss else ()
        )
        return Needs(
            self._barring(hows) or any(request.barred for request in requests),
            any(how.repetition_penalty != 1 for how in hows),
            any(prompt.details.top_logprobs for prompt in asked),
            any(prompt.details.routes for prompt in asked),
            any(prompt.details.route_weights for prompt in asked),
            tuple(heats),
        )

    def _barring(self, hows: Iterable[Sampling]) -> bool:
        """Whether rows bar tokens that others may draw."""
        return self.one is None and any(how.suppress for how in hows)

    # ---- the rows ----

    def seat(self, seated: Mapping[int, Request]) -> None:
        """Sets the settings of slots whose answers begin."""
        if self.one is None:
            slots_I = upload(list(seated), self.device)
            hows = [request.asked.sampling for request in seated.values()]
            self.real_4B[:, slots_I] = upload([_real(how) for how in hows], self.device).T
            whole = [(how.seed, how.top_k) for how in hows]
            self.whole_2B[:, slots_I] = upload(whole, self.device).T
        for slot, request in seated.items():
            self.bar(slot, request)
            if request.asked.sampling.repetition_penalty != 1:  # of the whole prompt, its last token included
                seen_BV = self._seen()
                seen_BV[slot] = False
                seen_BV[slot, upload(request.asked.ids, self.device)] = True

    def bar(self, slot: int, request: Request) -> None:
        """Sets the tokens that the answer in a slot must not draw: before min_tokens also its end tokens."""
        how = request.asked.sampling
        left = [*(() if self.one else how.suppress), *(request.asked.ends if request.early else ())]
        if not left and self.barred_BV is None:
            return
        if self.barred_BV is None:
            self.barred_BV = torch.zeros(
                self.real_4B.shape[1], self.vocab, dtype=torch.bool, device=self.device
            )
            if self.unknown_V is not None:
                self.barred_BV |= self.unknown_V
        row_V = self.barred_BV[slot]
        row_V.zero_() if self.unknown_V is None else row_V.copy_(self.unknown_V)
        if left:
            row_V[upload(left, self.device)] = True

    def _seen(self) -> Tensor:
        if self.seen_BV is None:
            shape = self.real_4B.shape[1], self.vocab
            self.seen_BV = torch.zeros(shape, dtype=torch.bool, device=self.device)
        return self.seen_BV

    def move(self, targets_I: Tensor, sources_I: Tensor) -> None:
        """Copies the settings of slots `sources_I` to slots `targets_I`."""
        numbers = [] if self.one else [self.real_4B.T, self.whole_2B.T]
        for t in (*numbers, self.barred_BV, self.seen_BV):
            if t is not None:
                t[targets_I] = t[sources_I]

    # ---- a step ----

    def draw(self, head: Head, places: tuple[Tensor, Tensor, Tensor], needs: Needs) -> Drawn:
        """The next token of the first B slots. places: the numbers of prompt, answer and token, int64 [B]."""
        B = len(head.token_B)
        heat_B, cut_B, min_p_B, penalty_B = self.real_4B[:, :B]
        seed_B, top_k_B = self.whole_2B[:, :B]
        prompt_B, sample_B, made_B = places
        barred = self.barred_BV[:B] if needs.barred and self.barred_BV is not None else self.unknown_V
        logits_BV = self._penalised(head) if needs.repeats else head.logits_BV
        if self.one is None:
            keys = Keys(seed_B, prompt_B, sample_B, made_B)
            filters = RowFilters(heat_B, top_k_B, cut_B, min_p_B)
        else:
            keys, filters = Keys(self.one.seed, prompt_B, sample_B, made_B), self.one
        drawn = sample(logits_BV, keys, filters, barred)
        ids_B = drawn.tokens_B.long()
        if self.model.rounding.log_probs_of_loss:  # the sampler's sum has another order
            return drawn._replace(logprobs_B=self._of_loss(head.h_BD, ids_B, heat_B, needs.heats))
        if needs.repeats:  # from logits without the penalty
            heat_B = heat_B.where(heat_B > 0, 1.0)
            plain_BV = (head.logits_BV.float() / heat_B[:, None]).log_softmax(-1)
            plain_B = plain_BV.gather(1, ids_B[:, None])[:, 0]
            drawn = drawn._replace(logprobs_B=torch.where(penalty_B == 1, drawn.logprobs_B, plain_B))
        return drawn

    def _of_loss(self, h_BD: Tensor, ids_B: Tensor, heat_B: Tensor, heats: Sequence[float]) -> Tensor:
        """Log-probs as the loss computes them. Each temperature needs all rows: fewer have other bits."""
        weight_VD = self.model.head_weight
        heat_B = heat_B.where(heat_B > 0, 1.0)
        logp_B = logprobs(h_BD, weight_VD, ids_B, heats[0])
        for heat in heats[1:]:
            logp_B = torch.where(heat_B == heat, logprobs(h_BD, weight_VD, ids_B, heat), logp_B)
        return logp_B

    def _penalised(self, head: Head) -> Tensor:
        """Logits in fp32, with repetition_penalty on those of tokens that occurred."""
        B = len(head.token_B)
        assert self.seen_BV is not None
        seen_BV = self.seen_BV[:B].scatter_(1, head.token_B[:, None], True)
        z_BV, penalty_B1 = head.logits_BV.float(), self.real_4B[3, :B, None]
        return torch.where(seen_BV, torch.where(z_BV < 0, z_BV * penalty_B1, z_BV / penalty_B1), z_BV)


def _real(how: Sampling) -> tuple[float, float, float, float]:
    """The settings that are in real_4B."""
    return how.temperature, 1 - how.top_p, how.min_p, how.repetition_penalty


def top_tokens(logits_BV: Tensor, ids_B: Tensor) -> TopTokens:
    """The most probable tokens of each row, by the softmax of its logits, and the log-probs of `ids_B`."""
    logp_BV = logits_BV.float().log_softmax(-1)
    top = logp_BV.topk(min(MOST_TOP, logp_BV.shape[1]), -1)
    own_B = logp_BV.gather(1, ids_B.long()[:, None])[:, 0]
    return TopTokens(top.indices, top.values, own_B)
