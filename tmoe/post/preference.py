"""Learning from pairs of answers: DPO and its family, with the reference's log-probs computed once.

next: post/losses/__init__.py
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.checkpoint.base import weights_hash
from tmoe.config.check import Setting, require
from tmoe.config.model import IGNORE
from tmoe.config.run import Config, require_no_noise
from tmoe.data.chat.chat_dataset import ChatBatch, ChatDataset, open_chat
from tmoe.data.corpus import Split
from tmoe.data.dataset import Micro
from tmoe.data.tokenizer import Carried
from tmoe.model.compile_ahead import Pass
from tmoe.model.lora import off
from tmoe.model.loss import Given
from tmoe.model.stages import Stages
from tmoe.model.transformer import Transformer
from tmoe.moe.balance import Totals
from tmoe.ops import logprobs
from tmoe.parallel.agree import gathered
from tmoe.parallel.mesh import Mesh
from tmoe.post.losses import LOSSES
from tmoe.post.losses.pairs import pairs_of
from tmoe.post.losses.sums import sequence_sums, trained_tokens
from tmoe.post.reference_model import ReferenceStore, tokens_hash
from tmoe.post.task import Task
from tmoe.run.process import Runtime


class Preference(Task):
    """The mean over a step's pairs of a loss of their log-probs.

    The reference is the model that the run begins with. Its log-probs are computed before the first step, by
    the same forward, and kept in the run folder, so that a resumed run has them too.
    """

    measures = "rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy"
    copies = 1
    """number of log-probs of the reference that are kept for each sequence"""

    def __init__(self, cfg: Config, mesh: Mesh):
        super().__init__(cfg, mesh)
        require_no_noise(cfg.model, "preference")
        self.reference_N: Tensor | None = None  # log-probs of all sequences, fp64
        p = cfg.preference
        self.beta = p.beta or (2.0 if p.loss == "simpo" else 0.1)
        self.needs_reference = LOSSES[p.loss].needs_reference
        given = dict(beta=self.beta, smoothing=p.smoothing, gamma=p.gamma, weight=p.ratio)
        given["noise"] = p.smoothing or 0.1  # robust's name of smoothing; 0.1 as in Chowdhury et al.
        options = {name: value for name, value in given.items() if name in LOSSES[p.loss].options}
        self.loss = partial(LOSSES[p.loss].formula, **options)

    def open(self, split: Split, carried: Carried | None) -> ChatDataset:
        cfg = self.cfg
        return open_chat(cfg.data, cfg.train.seq, cfg.model.vocab, split, "preference", carried)

    def facts(self, val_data: ChatDataset) -> dict[str, Any]:
        return dict(pairs=val_data.describe())

    @property
    def passes(self) -> list[Pass]:
        """The passes of a step and of a validation, and of the reference if there are adapters."""
        reference = self.cfg.lora.rank and self.needs_reference
        return [*super().passes, *([Pass(grad=False, adapters=False)] if reference else [])]

    def notes(self, facts: dict[str, Any]) -> list[str]:
        return []

    def divisor(self, batch: ChatBatch) -> float:
        """Number of pairs."""
        return (batch.numbers_AN >= 0).sum().item() / 2

    def micros(self, batch: ChatBatch, device: torch.device) -> Iterator[Micro]:
        for micro in batch.micros(device, True):
            if self.reference_N is None:
                yield micro
                continue
            given = micro.given or {}
            yield micro._replace(given=given | {"reference": self.reference_N[given["numbers"]]})

    def sums(self, h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, given: Given) -> tuple[Tensor, Tensor]:
        """Log-prob of each sequence of the micro-batch, and its number of trained tokens, fp64 [N] each.

        Where tp and cp divide rows, both are sums over all ranks of a row, and the gradient with respect to a
        rank's own tokens is that of the whole sum.
        """
        logp_T = logprobs(h_TD, weight_VD, targets_T)
        trained_T = targets_T != IGNORE
        place_T = given["sequences"].clamp(min=0)
        count = given["numbers"].numel()
        room = max(count, 1)  # padding tokens need a sequence, also in a micro-batch that has none
        logp_N = sequence_sums(logp_T.where(trained_T, 0.0), place_T, room)
        tokens_N = trained_tokens(trained_T, place_T, room).double()
        if self.mesh.axes.parts > 1:
            both = torch.stack([logp_N.detach(), tokens_N])
            dist.all_reduce(both, group=self.mesh.groups["parts"])
            logp_N, tokens_N = logp_N + (both[0] - logp_N.detach()), both[1]
        return logp_N[:count], tokens_N[:count]

    def objective(self, h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, given: Given) -> Tensor:
        logp_N, tokens_N = self.sums(h_TD, weight_VD, targets_T, given)
        pairs = pairs_of(logp_N, tokens_N, given.get("reference"))
        loss = self.loss(pairs).sum()

        parts = self.mesh.axes.parts
        with torch.no_grad():
            chosen, rejected = pairs.means if self.reference_N is None else pairs.gains
            rewards = self.beta * torch.stack([chosen, rejected, chosen - rejected])
            right = (chosen > rejected).double()
            self.measure(torch.cat([rewards, right[None]]).sum(1).float() / parts)
        # Every rank that divides these rows has the whole loss: keep 1/parts of its value, the whole gradient
        return (loss - loss.detach() * (1 - 1 / parts)).float()

    # ---- the reference ----

    def prepare(
        self, model: Transformer | Stages, data: Sequence[ChatDataset], run: Runtime, step: int
    ) -> None:
        """Computes the reference's log-probs of all sequences, or reads those that the run has already.

        The reference of adapters is their base, also if --lora.init gave the adapters' values.
        """
        if not self.needs_reference:
            return
        self.total = self._number(data)
        weights, tokens = gathered(run.on_all_ranks(lambda: self._hashes(data, run)), run.control)[0]
        store = run.on_all_ranks(lambda: self._store(weights, tokens, step))
        if gathered(store.missing() and "some", run.control)[0]:
            gone = f"{store.folder}: lacks the reference's log-probs, and {step} steps have changed weights"
            again = f"restore the folder, or start from the beginning with {Setting('resume')} none"
            same = step == 0 or self.cfg.lora.rank > 0  # training does not change a base
            run.on_all_ranks(lambda: require(same, f"{gone}; {again}"))
            found = torch.full((self.copies * self.total,), -math.inf, dtype=torch.float64)
            model.eval()
            with off(model):  # with adapters the reference is their base, else the model
                for part in data:
                    self._pass(model, part, run, found)
            model.train()
            # Ranks without the last blocks have -inf; the last batch may repeat the first rows.
            dist.all_reduce(found, dist.ReduceOp.MAX, group=run.control)
            for piece in store.pieces() if run.rank == 0 else ():
                store.write(piece, found[piece.start : piece.stop])
            run.sum_over_ranks(0.0)  # a barrier: the files are written
        self.reference_N = run.on_all_ranks(store.read).to(run.device)

    def _number(self, data: Sequence[ChatDataset]) -> int:
        """The number of all sequences. Sequences of sources that only validation has get the last numbers."""
        sets = self._sets(data)
        if len(sets) > 1 and sets[1].bases[0] == 0:
            sets[1].bases = [base + sets[0].sequences for base in sets[1].bases]
        return sum(one.sequences for one in sets)

    def _sets(self, data: Sequence[ChatDataset]) -> Sequence[ChatDataset]:
        """The data sets with their own sources: training's, and with --data.val-path also validation's."""
        return data[:2] if self.cfg.data.val_path else data[:1]

    def _hashes(self, data: Sequence[ChatDataset], run: Runtime) -> tuple[str, str]:
        """Hashes of the reference's weights and of the tokens of all rows, on rank 0; ("", "") on others."""
        if run.rank:
            return "", ""
        init, start = self.cfg.init, f"drawn from --seed={self.cfg.seed}"
        weights = weights_hash(init) if init else start
        sources = [source for one in self._sets(data) for source in one.sources]
        rows = (source.sequence(i) for source in sources for i in range(len(source.lengths)))
        return weights, tokens_hash([torch.tensor(t) for t in row] for row in rows)

    def _store(self, weights: str, tokens: str, step: int) -> ReferenceStore:
        """The store of the run's reference log-probs, identified by everything that they depend on.

        Names of sources and templates are left out: a change in either changes the rows' tokens, and their
        hash is part of the identity.
        """
        cfg = self.cfg
        settings: dict[str, Any] = dict(dtype=cfg.train.dtype, seq=cfg.train.seq)
        settings |= dict(copies=self.copies) if self.copies > 1 else {}
        settings |= dict(float8=cfg.train.float8) if cfg.train.float8 != "none" else {}
        settings |= dict(fp8=cfg.train.fp8) if cfg.train.fp8 != "none" else {}
        again = "remove it, and the log-probs are computed again; or name another --out"
        if step:
            again = (
                f"the weights have been trained for {step} steps, so the log-probs of their start cannot be "
                "computed any more; resume with the data, template, --init and settings that the run began "
                "with, in its version of tmoe, or begin a run with another --out"
            )
        folder = Path(cfg.out) / "reference"
        return ReferenceStore.open(folder, self.copies * self.total, weights, tokens, settings, again)

    @torch.no_grad()
    def _pass(self, model: Transformer | Stages, data: ChatDataset, run: Runtime, found: Tensor) -> None:
        """Computes every row of a data set once, in the shapes of training; log-probs go into `found`."""
        once = copy.copy(data)
        once.weights, once.ahead = [source.samples for source in data.sources], 0
        train, axes = self.cfg.train, self.mesh.axes
        shape = dict(batch=train.batch, accumulate=train.accumulate)
        shape |= dict(rank=self.mesh.place.reader, world=axes.readers)
        for step in range(-(-data.samples // (train.batch * train.accumulate * axes.readers))):
            batch = once.batch(step, **shape)
            for n, one in enumerate([batch, *self.others([batch], data, run)]):
                for numbers_N, logp_N in self.sums_of(model, one, run):
                    found[numbers_N.cpu() + n * self.total] = logp_N.cpu()
        model.reshard()

    def others(self, batches: Sequence[ChatBatch], data: ChatDataset, run: Runtime) -> list[ChatBatch]:
        """Further batches for the reference, whose sequences have the numbers of those of `batches`."""
        return []

    @torch.no_grad()
    def sums_of(
        self, model: Transformer | Stages, batch: ChatBatch, run: Runtime
    ) -> list[tuple[Tensor, Tensor]]:
        """Numbers and log-probs of a batch's sequences, for each micro-batch whose head is on this rank."""
        self.collected: list[tuple[Tensor, Tensor]] = []
        micros = list(batch.micros(run.device, True))
        one = torch.ones((), device=run.device)
        totals = Totals(one, one, one)
        size = self.cfg.train.accumulate
        if isinstance(model, Stages):
            for first in range(0, len(micros), size):
                model.evaluate(micros[first : first + size], totals, self._collect)
        else:
            for micro in micros:
                model(**micro._asdict(), totals=totals, objective=self._collect)
        return self.collected

    def _collect(self, h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, given: Given) -> Tensor:
        logp_N, _ = self.sums(h_TD, weight_VD, targets_T, given)
        self.collected.append((given["numbers"], logp_N))
        return logp_N.new_zeros((), dtype=torch.float32)
