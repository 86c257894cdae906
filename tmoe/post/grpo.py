"""Learning from rewards of the model's own answers: GRPO and its family, in the trainer's process.

A step draws prompts by (seed, step), lets the model answer each `group` times, rewards the answers, compares
the answers to a prompt with each other, and trains on them. Answers are functions of the weights, the seed
and their numbers. So they are the same in every layout, they are never saved, and a resumed run equals a run
without a break.

Until the first update of a step changes the weights, the policy that drew an answer is the policy that is
trained. So the old log-probs are taken from the first update's own forward and need no forward in addition.

next: post/answers.py, post/policy_loss.py
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.base.types import FLOATS
from tmoe.config.model import IGNORE
from tmoe.config.run import Config
from tmoe.data.chat.prompt_data import PromptDataset, RankPrompts, open_prompts, share
from tmoe.data.corpus import Split
from tmoe.data.dataset import Micro
from tmoe.data.tokenizer import Carried
from tmoe.generate.cache import PAGE, bytes_a_token
from tmoe.generate.engine import Engine, Samples, require_pool
from tmoe.generate.gathered_model import Stopped
from tmoe.generate.generation_config import not_followed
from tmoe.generate.pages import Span
from tmoe.generate.sampler import Sampling
from tmoe.model.adapted import keep_order
from tmoe.model.compile_ahead import Pass
from tmoe.model.lora import off
from tmoe.model.loss import Given, Objective
from tmoe.model.rounding import rounding
from tmoe.model.transformer import Transformer
from tmoe.moe.balance import Totals
from tmoe.moe.trace import keeping, replaying
from tmoe.ops import logprobs
from tmoe.parallel.agree import gathered
from tmoe.parallel.mesh import Mesh
from tmoe.post.answers import Answer, AnswerResult, Packed, Parts, Step, of_groups, pack, routes_of, rows_of
from tmoe.post.estimates import estimates
from tmoe.post.frozen import FrozenWeights
from tmoe.post.losses.sequences import advantages, has_unequal_rewards
from tmoe.post.losses.sums import StepCounts, sequence_sums
from tmoe.post.losses.tokens import kl
from tmoe.post.policy_loss import OF_TOKENS, PolicyLoss
from tmoe.post.rewarded import Rewarded
from tmoe.post.rewards import Rewards, RewardSample
from tmoe.post.rollouts import Rollout, RolloutLog, spread
from tmoe.post.task import Task
from tmoe.run.process import Runtime

SHOWN = 32  # most answers of a step in rollouts.jsonl
log = logging.getLogger(__name__)
HELD_OUT = 1 << 62  # first number of validation prompts, so that they share no random numbers with training
BASELINE = {"dr_grpo": "mean", "rloo": "leave-one-out"}
OF_STEP = (
    *("reward/mean", "reward/std", "reward/equal", "reward/faults", "reward/known", "answers/count"),
    *("answers/tokens", "answers/truncated"),
    *("answers/tokens_per_s", "time/rollout", "time/rewards", "time/update"),
)


class Grpo(Task):
    """A policy loss of sampled answers; an answer's advantage compares its reward with those of its group."""

    spikes = False

    def __init__(self, cfg: Config, mesh: Mesh):
        super().__init__(cfg, mesh)
        g = self.g = cfg.grpo
        self.evaluate = self._evaluate
        self.updates = g.updates
        self.offloads = g.offload
        self.baseline: Any = g.advantage or BASELINE.get(g.loss, "normalised")
        self.loss = PolicyLoss(cfg, mesh, self.measure_tokens)
        self.measures = (*OF_TOKENS, *OF_STEP)
        self.rewarded, self.validated = (Rewarded(g.rewards, g.allow_empty) for _ in range(2))

    def open(self, split: Split, carried: Carried | None) -> PromptDataset:
        g = self.g
        self.generation = carried.generation if carried else {}
        if split == "train":
            self.rewards = Rewards(
                g.rewards, workers=g.reward_workers, timeout_s=g.reward_timeout, code=g.code
            )
        data = open_prompts(self.cfg, split, carried, self.rewards.require_row)
        if g.pool_gib is not None:
            lengths = {len(prompt.ids) - 1 for source in data.sources for prompt in source.prompts}
            spans = [Span(0, length, length + self.cfg.answer_tokens) for length in lengths]
            a_page = PAGE * bytes_a_token(self.cfg.model, FLOATS[self.cfg.train.dtype])
            require_pool(g.pool_gib * 2**30, spans, g.group, a_page, "grpo.pool_gib")
        return data

    @property
    def passes(self) -> list[Pass]:
        """The forward passes of a step, and of the reference if there is one. Rollouts use eager blocks."""
        old = [Pass(traced=True), Pass(replay=True)]
        steps = dict(none=[Pass()], rollout=[Pass(replay=True)], old=old)
        reference = Pass(grad=False, adapters=not self.cfg.lora.rank)
        return steps[self.g.replay] + ([reference] if self.g.kl else [])

    def example(self, batch: RankPrompts, device: torch.device) -> Micro:
        """A micro-batch of padding, because there are no answers yet."""
        train = self.cfg.train
        return next(pack([], [], (1, train.batch, train.seq), []).batch.micros(device, True))

    def facts(self, val_data: PromptDataset) -> dict[str, Any]:
        return dict(prompts=val_data.describe())

    def notes(self, facts: dict[str, Any]) -> list[str]:
        g = self.g
        told = [f"{g.prompts} prompts a step, {g.group} answers each, rewards {', '.join(g.rewards)}"]
        if self.cfg.model.linear_layers:
            told.append(
                "linear layers: rollouts update states token after token, training in chunks: "
                "log-probs differ by about 1e-3 in bf16"
            )
        if left := not_followed(self.generation, followed=False):
            why = f"rollouts sample the policy itself, at --grpo.temperature={g.temperature}"
            told.append(f"generation_config.json: not followed: {', '.join(left)}: {why}")
        return told

    def prepare(self, model: Transformer, data: Sequence[PromptDataset], run: Runtime, step: int) -> None:
        self.data, self.model = data[0], model
        keep_order(model, rounding(self.g.bitwise).low_rank_in_order)
        # the reference of adapters is their base, which the model holds already
        self.frozen = FrozenWeights(model, self.cfg, step) if self.g.kl and not self.cfg.lora.rank else None
        self.ended = time.perf_counter()
        self.log = None
        if run.rank == 0 and not self.cfg.eval_only:
            self.log = RolloutLog(Path(self.cfg.out), step, SHOWN, log.warning)

    def state(self) -> dict[str, Any]:
        return dict(without_reward=[self.rewarded.in_a_row, self.validated.in_a_row])

    def load_state(self, state: dict[str, Any]) -> None:
        self.rewarded.in_a_row, self.validated.in_a_row = state.get("without_reward", (0, 0))

    # ---- a rollout ----

    def rollout(self, model: Transformer, batch: RankPrompts, run: Runtime, step: int) -> Step | None:
        """Answers to the step's prompts, rewarded and packed.

        With --grpo.resample, prompts whose answers all have the same reward are replaced by new prompts.
        """
        g = self.g
        answers: list[Answer] = []
        told: list[AnswerResult] = []
        parts: Parts = {}
        missing, drawn, equal = g.prompts, 0, 0
        self.rewarded.begin()
        seconds = dict(rollout=0.0, rewards=0.0)
        generated = 0
        for draw in range(g.resample + 1):
            numbers = [self.data.number(step, draw, q) for q in range(missing)]
            began = time.perf_counter()
            mine = self.ask(model, self.data, numbers, 0, run)
            if mine is None:
                return None
            answered = time.perf_counter()
            found, some = self.reward(mine, step, run, self.rewarded)
            parts |= some
            seconds["rollout"] += answered - began
            seconds["rewards"] += time.perf_counter() - answered
            generated += sum(outcome.tokens for outcome in found)
            keeps = has_unequal_rewards(*of_groups(found)).tolist()
            tell = {outcome.number for outcome, keep in zip(found, keeps, strict=True) if keep}
            drawn += missing
            equal += missing - len(tell)
            if g.resample:
                mine = [answer for answer in mine if answer.number in tell]
                found = [outcome for outcome in found if outcome.number in tell]
                missing -= len(tell)
            answers += mine
            told += found
            if not g.resample or not missing:
                break
        learnt = self.learn(model, answers, told, run)
        rewards = {(one.number, one.sample): one.reward for one in told}
        self.show(step, answers, rewards, parts, learnt.advantages_N, run)
        learnt = learnt._replace(numbers=self.numbers(told, equal / drawn, generated, seconds))
        self.rewarded.judge(f"step {step + 1}")  # after rollouts.jsonl has its answers
        return learnt

    def ask(
        self, model: Transformer, data: PromptDataset, numbers: list[int], base: int, run: Runtime
    ) -> list[Answer] | None:
        """Answers to this reader's part of the prompts, in order; None once any rank has to stop.

        A collective. Prompts are answered in waves that fill the slots twice. Between waves the ranks
        synchronise, so that a lost rank is noticed. Signals are checked between tokens.

        Args:
            numbers: numbers of all ranks' prompts in `data`.
            base: added to a prompt's number in the key of its random numbers.
        """
        g, place, axes = self.g, self.mesh.place, self.mesh.axes
        reads = [numbers[i] for i in share(len(numbers), place.reader, axes.readers)]
        part = place.cp * axes.tp + place.tp  # ranks that share a reader divide its prompts
        own = [reads[i] for i in share(len(reads), part, axes.parts)]
        most = math.ceil(math.ceil(len(numbers) / axes.readers) / axes.parts)
        size = max(1, 2 * g.rollout_slots // g.group)
        waves = [own[i : i + size] for i in range(0, len(own), size)]
        sampling = Sampling(
            temperature=g.temperature,
            top_p=g.top_p,
            max_tokens=self.cfg.answer_tokens,
            seed=self.cfg.seed,
        )
        replays = g.replay == "rollout" and base != HELD_OUT
        engine = Engine(model, data.tokenizer, slots=g.rollout_slots, pool_gib=g.pool_gib, bits=g.bitwise)
        answers: list[Answer] = []
        for w in range(-(-most // size)):
            wave = waves[w] if w < len(waves) else []
            prompts = [data.prompt(number) for number in wave]
            keys = [base + number for number in wave]
            made = Samples()
            ids = [prompt.ids for prompt in prompts]
            with run.watch.unrecorded(), suppress(Stopped):  # the sum below is not 0 then
                made = engine.generate(
                    ids, g.group, sampling, numbers=keys, routes=replays, told=run.stop_requested
                )
            run.watch.note_progress()
            if run.sum_over_ranks(run.stop)[0]:
                return None
            for number, prompt, group in zip(wave, prompts, made, strict=True):
                for i, s in enumerate(group):
                    routes = routes_of(s) if replays else None
                    finish = "stop" if s.finish == "stop" else "length"
                    answers.append(
                        Answer(*(prompt, number, i, s.ids.tolist(), s.logprobs, finish, s.text or "", routes))
                    )
        if axes.parts > 1:
            everyone = gathered((place.reader, answers), run.control)
            answers = [answer for reader, some in everyone if reader == place.reader for answer in some]
        return answers

    def reward(
        self, answers: list[Answer], step: int, run: Runtime, counts: Rewarded
    ) -> tuple[list[AnswerResult], Parts]:
        """Rewards this rank's answers. Returns the outcomes of all ranks' answers. A collective.

        counts: gets the rewards and the faults. Also returned: the parts of the rewards of the answers that
        this rank rewarded.
        """
        place = self.mesh.place
        own: list[AnswerResult] = []
        parts: Parts = {}
        faults: dict[str, int] = {}
        if place.cp == place.tp == 0:  # one of the ranks that share answers rewards them
            asked = [
                RewardSample(
                    a.prompt.text, a.text, a.prompt.row, a.finish, len(a.ids), step + 1, a.number, a.sample
                )
                for a in answers
            ]
            scores = self.rewards.score(asked)
            for i, a in enumerate(answers):
                reward = scores.rewards[i]
                worth = math.nan if reward is None else reward
                own.append(AnswerResult(a.number, a.sample, worth, len(a.ids), a.truncated))
                parts[a.number, a.sample] = {name: column[i] for name, column in scores.parts.items()}
            faults = scores.faults
            run.watch.note_progress()
        everyone = gathered((own, faults), run.control)
        found = [outcome for some, _ in everyone for outcome in some]
        counts.add([outcome.reward for outcome in found], [kinds for _, kinds in everyone])
        return found, parts

    def learn(
        self, model: Transformer, answers: list[Answer], told: list[AnswerResult], run: Runtime
    ) -> Step:
        """Packs this reader's answers, and computes the inputs of their loss. A collective.

        answers: of this reader; the outcomes are those of all ranks' answers.
        """
        g, train = self.g, self.cfg.train
        to = rounding(g.bitwise).begin
        rows = rows_of(answers, train.seq, to)
        micros = max(1, *gathered(-(-len(rows) // train.batch), run.control))
        untrained = [g.overlong == "drop" and answer.truncated for answer in answers]
        packed = pack(answers, rows, (micros, train.batch, train.seq), untrained, to)
        reference: list[Tensor] = []
        rewards, numbers = of_groups(told)
        if self.g.kl:
            reference, far = self.of_frozen(model, packed, run)
            if g.kl_in == "reward":
                own = {(answers[i].number, answers[i].sample): value for i, value in far.items()}
                everyone = {key: value for one in gathered(own, run.control) for key, value in one.items()}
                rewards -= g.kl * torch.tensor([everyone[one.number, one.sample] for one in told])
        found = advantages(rewards, numbers, self.baseline, g.advantage_eps)
        places = {(one.number, one.sample): i for i, one in enumerate(told)}
        mine = [places[answer.number, answer.sample] for answer in answers]
        trained = [one.tokens for one in told if not (g.overlong == "drop" and one.truncated)]
        counts = torch.tensor([sum(trained), len(trained), 0], dtype=torch.float32, device=run.device)
        own_advantages_N = found[torch.tensor(mine, dtype=torch.int64)]
        return Step(packed, own_advantages_N, StepCounts(*counts), reference, old=[], routes=[])

    def show(
        self,
        step: int,
        answers: list[Answer],
        rewards: dict[tuple[int, int], float],
        parts: Parts,
        advantages_N: Tensor,
        run: Runtime,
    ) -> None:
        """Writes some of a step's answers into rollouts.jsonl. A collective.

        rewards: the rewards by (number of the prompt, sample). advantages_N: the advantages of `answers`.
        """
        shown = [
            Rollout(
                *(step + 1, a.number, a.sample, a.prompt.text, a.text, rewards[a.number, a.sample]),
                *(parts[a.number, a.sample], a.finish, len(a.ids), advantage),
            )
            for a, advantage in zip(answers, advantages_N.tolist(), strict=True)
            if (a.number, a.sample) in parts  # one of the ranks that share answers rewarded them
        ]
        everyone = gathered(spread(shown, SHOWN), run.control)
        if self.log is not None:
            self.log.write([one for some in everyone for one in some])

    # ---- an update ----

    def objective_of(self, batch: Step) -> Objective:
        return self.loss.objective(batch)

    def micros(self, batch: Step, device: torch.device) -> Iterator[Micro]:
        """Micro-batches with each token's weight, its log-prob by the sampler, and its answer's advantage.

        Until the next micro-batch is asked for, the model routes to the experts that --grpo.replay names.
        """
        first = batch.first
        self.measure(batch.numbers.to(device) * batch.counts.tokens.clamp(min=1) / self.mesh.axes.world)
        for a, micro in enumerate(batch.packed.batch.micros(device, True)):
            given = self.loss.given(batch, a, micro, first)
            with self.replayed(batch, a, first, device):
                yield micro._replace(given=given)

    def rows(self, batch: Step) -> Iterator[Micro]:
        return batch.packed.batch.micros(torch.device("cpu"), True)

    @contextmanager
    def replayed(self, step: Step, a: int, first: bool, device: torch.device) -> Iterator[None]:
        """A context for forward and backward of micro-batch a; recomputed layers use the same experts again.

        first: whether this is the step's first update.
        """
        if self.g.replay == "rollout" and step.packed.routes_AYBSK is not None:
            ids_YBSK = step.packed.routes_AYBSK[a].to(device)
            with replaying(self.model, [self.model.own(ids_BSK) for ids_BSK in ids_YBSK]):
                yield
        elif self.g.replay == "old" and not first:
            with replaying(self.model, step.routes[a]):
                yield
        elif self.g.replay == "old":
            with keeping(self.model) as calls:
                yield
            step.routes.extend(calls)
        else:
            yield

    def measure_tokens(self, sums: Tensor) -> None:
        """Adds a micro-batch's sums of `OF_TOKENS`, fp32 [3], to the numbers for the log."""
        self.measure(torch.cat([sums, sums.new_zeros(len(OF_STEP))]).float())

    # ---- the reference ----

    def of_frozen(
        self, model: Transformer, packed: Packed, run: Runtime
    ) -> tuple[list[Tensor], dict[int, float]]:
        """Log-probs by the model that the run began with, and the divergence of the answers from it.

        Returns for each micro-batch the log-probs of this rank's own tokens; and for each answer of this
        reader the divergence, a sum over its tokens, in nats. That model always chooses its own experts,
        because a replay holds the experts of another model.
        """
        first = off(model) if self.frozen is None else self.frozen.in_place()
        estimator = self.g.kl_estimator or "k1"
        found: list[Tensor] = []
        far: dict[int, float] = {}

        def collect(h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, given: Given) -> Tensor:
            logp_T = logprobs(h_TD, weight_VD, targets_T, self.g.temperature)
            found.append(logp_T)
            numbers = given["numbers"].tolist()
            far_T = kl(given["drawn"], logp_T, estimator).where(targets_T != IGNORE, 0.0)
            sums_N = sequence_sums(far_T, given["sequences"].clamp(min=0), max(len(numbers), 1))
            if self.mesh.axes.parts > 1:
                dist.all_reduce(sums_N, group=self.mesh.groups["parts"])
            far.update(zip(numbers, sums_N.tolist(), strict=False))
            return h_TD.new_zeros((), dtype=torch.float32)

        one = torch.ones((), device=run.device)
        model.eval()
        with torch.no_grad(), first:
            for a, micro in enumerate(packed.batch.micros(run.device, True)):
                given = (micro.given or {}) | {"drawn": packed.drawn_ABS[a].to(run.device)}
                micro = micro._replace(given=given)
                model(**micro._asdict(), totals=Totals(one, one, one), objective=collect)
            model.reshard()
        model.train()
        return found, far

    # ---- numbers ----

    def numbers(
        self, told: list[AnswerResult], equal: float, generated: int, seconds: dict[str, float]
    ) -> Tensor:
        """The numbers that the log shows for a step over all ranks, fp32, one for each name in `measures`.

        `time/...` are shares of the time since the previous step.
        equal: share of the drawn prompts whose answers all had the same reward. generated: tokens of all
        answers, including those to replaced prompts. seconds: duration of "rollout" and "rewards".
        """
        rewards, _ = of_groups(told)
        known = rewards[~rewards.isnan()]
        count = max(len(told), 1)
        now = time.perf_counter()
        passed, self.ended = now - self.ended, now
        shares = [seconds[name] / passed for name in ("rollout", "rewards")]
        numbers = [
            known.mean().item() if len(known) else math.nan,
            known.std(correction=0).item() if len(known) else math.nan,
            equal,
            sum(self.rewarded.faults.values()),
            self.rewarded.known,
            self.rewarded.answers,
            sum(one.tokens for one in told) / count,
            sum(one.truncated for one in told) / count,
            generated / max(seconds["rollout"], 1e-9),
            *shares,
            1 - sum(shares),
        ]
        return torch.cat([torch.zeros(len(OF_TOKENS)), torch.tensor(numbers)])

    def _evaluate(
        self, model: Transformer, data: PromptDataset, run: Runtime
    ) -> tuple[float, dict[str, float]] | None:
        """Minus the mean reward of answers to held-out prompts, and pass@k; the prompts never change."""
        numbers = list(range(min(self.cfg.train.eval_batches * self.g.prompts, data.samples)))
        answers = self.ask(model, data, numbers, HELD_OUT, run)
        if answers is None:
            return None
        self.validated.begin()
        told, _ = self.reward(answers, -1, run, self.validated)
        finishes = ["length" if one.truncated else "stop" for one in told]
        rewards, prompts = [one.reward for one in told], [one.number for one in told]
        ks = [2**i for i in range(self.g.group.bit_length())]
        found = estimates(prompts, rewards, finishes, ks, self.g.pass_reward)
        mean = found.pop(f"mean@{self.g.group}")
        self.validated.judge("validation")
        counts = {"reward/known": self.validated.known, "answers/count": self.validated.answers}
        return -mean, {"reward/mean": mean, "answers/truncated": found.pop("truncated"), **counts, **found}
