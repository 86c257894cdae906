"""Learning from single answers marked as good or bad (KTO), with one baseline for the whole step.

The baseline z estimates how far the policy has moved from the reference: the mean difference of their
log-probs over the step's completions, each after the prompt of another row. It is computed before the step's
first micro-batch, over all ranks, so that it is the same in every layout and for all sizes of micro-batches.

next: post/losses/sequences.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tmoe.config.run import Config
from tmoe.data.chat.batch import ChatBatch, batch_of
from tmoe.data.chat.chat_dataset import ChatDataset, open_chat
from tmoe.data.chat.mismatched import Mismatched
from tmoe.data.corpus import Split
from tmoe.data.dataset import Micro
from tmoe.data.tokenizer import Carried
from tmoe.model.loss import Given
from tmoe.model.stages import Stages
from tmoe.model.transformer import Transformer
from tmoe.moe.balance import Totals
from tmoe.parallel.agree import gathered
from tmoe.parallel.collectives import sum_over_all
from tmoe.parallel.mesh import Mesh
from tmoe.post.losses.sequences import Completions, baseline_of, kto
from tmoe.post.preference import Preference
from tmoe.run.process import Runtime

BALANCED = 1.0, 4 / 3  # range of w_D n_D / (w_U n_U) in the paper, section 4.2


class Kto(Preference):
    """The mean of KTO's loss over the completions of a step."""

    measures = "rewards/desirable", "rewards/undesirable", "rewards/margin", "rewards/accuracy", "kl"
    copies = 2  # log-probs of the reference: after a completion's own prompt, then after another one

    def __init__(self, cfg: Config, mesh: Mesh):
        super().__init__(cfg, mesh)
        p = cfg.preference
        self.kinds = dict(desirable_weight=p.desirable_weight, undesirable_weight=p.undesirable_weight)
        self.evaluate = self._evaluate
        self.mismatched: dict[int, Mismatched] = {}  # by id of the data set

    def open(self, split: Split, carried: Carried | None) -> ChatDataset:
        cfg = self.cfg
        data = open_chat(cfg.data, cfg.train.seq, cfg.model.vocab, split, "kto", carried)
        self.mismatched[id(data)] = Mismatched(data)
        if split == "train":
            good = sum(int(source.desirable[source.units].sum()) for source in data.sources)
            self.labels = good, sum(len(source.units) for source in data.sources) - good
        return data

    def notes(self, facts: dict[str, Any]) -> list[str]:
        good, bad = self.labels
        counts = f"kto: {good:,} desirable completions, {bad:,} others"
        if not good or not bad:
            return [f"{counts}: one kind alone, but the loss compares both kinds"]
        ratio = self.kinds["desirable_weight"] * good / (self.kinds["undesirable_weight"] * bad)
        note = f"{counts}; weight x number is {ratio:.3g} to 1"
        low, high = BALANCED
        if not low * 0.999 <= ratio <= high * 1.001:
            flags = "--preference.desirable-weight or --preference.undesirable-weight"
            note += f"; the paper recommends 1 to 4/3, set by {flags}"
        return [note]

    def divisor(self, batch: ChatBatch) -> float:
        """Number of completions."""
        return (batch.numbers_AN >= 0).sum().item()

    def prepare(
        self, model: Transformer | Stages, data: Sequence[ChatDataset], run: Runtime, step: int
    ) -> None:
        super().prepare(model, data, run, step)
        self.data = data[0]
        labels = [source.desirable for dataset in self._sets(data) for source in dataset.sources]
        self.desirable_N = torch.from_numpy(np.concatenate(labels)).to(run.device)

    def others(self, batches: Sequence[ChatBatch], data: ChatDataset, run: Runtime) -> list[ChatBatch]:
        """The batches' completions, each after the prompt of another one. A collective.

        Every rank gets the same number of micro-batches.
        """
        train = self.cfg.train
        numbers = [n for batch in batches for n in batch.numbers_AN.flatten().tolist() if n >= 0]
        rows = self.mismatched[id(data)].rows(numbers)
        most = max(1, *gathered(-(-len(rows) // train.batch), run.control))
        micros = -(-most // train.accumulate) * train.accumulate
        return [batch_of(rows, (micros, train.batch, train.seq))]

    def rollout(
        self, model: Transformer | Stages, batch: ChatBatch, run: Runtime, step: int
    ) -> ChatBatch | None:
        """Computes the step's baseline, with the weights before the step. A collective."""
        model.eval()
        self.baseline(model, [batch], self.data, run)
        model.train()
        return batch

    def baseline(
        self, model: Transformer | Stages, batches: Sequence[ChatBatch], data: ChatDataset, run: Runtime
    ) -> float:
        """Computes z and the shares of both kinds over all ranks' batches. A collective.

        Returns the number of completions.
        """
        assert self.reference_N is not None
        gains, count = torch.zeros((), dtype=torch.float64, device=run.device), 0
        for batch in self.others(batches, data, run):
            for numbers_N, logp_N in self.sums_of(model, batch, run):
                gains += (logp_N - self.reference_N[numbers_N + self.total]).sum()
                count += len(numbers_N)
        model.reshard()
        place, parts = self.mesh.place, self.mesh.axes.parts
        good = whole = 0.0
        if place.cp == place.tp == place.pp == 0:  # one of the ranks that share sequences counts them
            for batch in batches:
                numbers = batch.numbers_AN[batch.numbers_AN >= 0]
                whole += len(numbers)
                good += self.desirable_N[numbers.to(run.device)].sum().item()
        gained, counted, good, whole = run.sum_over_ranks(gains.item() / parts, count / parts, good, whole)
        self.z = baseline_of(*run.to_device(torch.tensor([gained, counted], dtype=torch.float64)))
        # Sums over one kind are divided by the number of both kinds; these factors turn them into means.
        self.shares = [whole / kind if kind else math.nan for kind in (good, whole - good)]
        return whole

    def micros(self, batch: ChatBatch, device: torch.device) -> Iterator[Micro]:
        for micro in super().micros(batch, device):
            given = micro.given or {}
            if self.reference_N is not None:
                given = given | {"desirable": self.desirable_N[given["numbers"]]}
            yield micro._replace(given=given)

    def objective(self, h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, given: Given) -> Tensor:
        logp_N, _ = self.sums(h_TD, weight_VD, targets_T, given)
        good_N = given["desirable"]
        completions = Completions(logp_N, given["reference"], good_N)
        loss = kto(completions, self.z, self.beta, **self.kinds).sum()

        parts = self.mesh.axes.parts
        with torch.no_grad():
            gains_N = logp_N - given["reference"]
            desirable, other = (
                self.beta * gains_N.where(kind_N, 0.0).sum() * share
                for kind_N, share in zip((good_N, ~good_N), self.shares, strict=True)
            )
            right = torch.where(good_N, gains_N > self.z, gains_N < self.z).sum()
            numbers = desirable, other, desirable - other, right, self.z * len(gains_N)
            self.measure(torch.stack([n.double() for n in numbers]).float() / parts)
        # Every rank that divides these rows has the whole loss: keep 1/parts of its value, the whole gradient
        return (loss - loss.detach() * (1 - 1 / parts)).float()

    def _evaluate(
        self, model: Transformer | Stages, data: ChatDataset, run: Runtime
    ) -> tuple[float, dict[str, float]] | None:
        """The mean loss of held-out completions, with one baseline over all of them."""
        train, device = self.cfg.train, run.device
        shape = dict(batch=train.batch, accumulate=train.accumulate)
        shape |= dict(rank=self.mesh.place.reader, world=self.mesh.axes.readers)
        batches = [data.batch(i, **shape) for i in range(train.eval_batches)]
        if run.sum_over_ranks(run.stop)[0]:
            return None
        whole = self.baseline(model, batches, data, run)
        total, one = torch.zeros((), device=device), torch.ones((), device=device)
        totals = Totals(one, one, one)
        for batch in batches:
            if run.sum_over_ranks(run.stop)[0]:
                self.read_measured(total)
                return None
            micros = list(self.micros(batch, device))
            if isinstance(model, Stages):
                total += model.evaluate(micros, totals, self.objective)
                continue
            for micro in micros:
                model(**micro._asdict(), totals=totals, objective=self.objective)
                total += model.task_loss
        model.reshard()
        sums = sum_over_all(torch.cat([total[None], self.read_measured(total)]))
        loss, *measured = (sums / max(whole, 1)).tolist()
        return loss, dict(zip(self.measures, measured, strict=True))
