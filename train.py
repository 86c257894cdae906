"""Trains a Mixture-of-Experts language model.

    python train.py tiny --steps 20                                       one process
    torchrun --nproc-per-node 2 train.py tiny --parallel.ep 2             two, the experts sharded over them
    torchrun --nproc-per-node 8 train.py qwen3-30b-a3b --parallel.ep 8 --data.path shards/
    python train.py qwen3-30b-a3b --dry-run --world 64 --parallel.ep 8    what each of 64 GPUs would hold
    python train.py runs/tiny --steps 400                                 continue a run with its settings
    python train.py --task sft --help                                     the usual settings of a task

next: tmoe/run/start.py, tmoe/data/dataset.py, tmoe/model/transformer.py
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import inf

import torch
from torch import Tensor

from tmoe.cli.parse import check_start, parse
from tmoe.commands import warmup
from tmoe.commands.plan_command import plan
from tmoe.config.run import Config
from tmoe.data.dataset import Batch, Dataset, Loader
from tmoe.log.progress import validation
from tmoe.model.compile_ahead import compile_ahead
from tmoe.model.multi_token import count_further, names_of, read_measured
from tmoe.model.qk_clip import clip_logits
from tmoe.model.stages import Stages
from tmoe.moe.balance import Totals
from tmoe.optim.guard import SkipGuard, StepNumbers, of_first_skipped, require_finite
from tmoe.optim.learning_rate import lr_factor, set_lr
from tmoe.parallel import clip_grad_norm_
from tmoe.parallel.collectives import sum_over_all
from tmoe.post import task_of
from tmoe.post.task import NothingToLearn, Task
from tmoe.run import process as runtime
from tmoe.run.process import PendingHostCopy, Runtime, all_finite
from tmoe.run.profile import GraphCounter, Profiler, collecting, profiler
from tmoe.run.start import Start

Unread = tuple[
    int, PendingHostCopy, float, int
]  # arguments of `log` for a step whose numbers are still being copied to the host


def main(argv: list[str]) -> None:
    rank, world = runtime.launched()
    cfg = parse(argv, __doc__ or "", rank=rank, world=world)
    check_start(argv, cfg, rank)
    if cfg.dry_run:
        return plan(cfg)
    if cfg.compile and not runtime.has_compiler():
        cfg = replace(cfg, compile=False)
        if rank == 0:
            print("no C++ compiler found: running eager (--no-compile)", file=sys.stderr)
    warmup.warm([cfg])  # before the process group exists: no collective must wait for a compiler
    run = runtime.start(cfg.seed, cfg.train.collective_timeout, cfg.train.also_stop_on)
    with run.watch, run.refusing(SkipGuard.TooMany, NothingToLearn):
        trainer = Trainer(cfg, run)
        with trainer.metrics, trainer.saving():
            trainer.train()
    run.close()
    trainer.say_end()


class Trainer(Start):
    """A run. Start builds mesh, data, task, model, optimizer and checkpoints; `train` is the loop."""

    task: Task

    def __init__(self, cfg: Config, run: Runtime):
        super().__init__(cfg, run, task_of)
        self.names = *self.task.measures, *names_of(cfg.model.mtp.depth)
        self.graphs = GraphCounter()
        self.unread: Unread | None = None  # the step whose numbers are not logged yet

    def prepare(self) -> None:
        """Prepares the first step: compiles the graphs, and calls the task's own preparation."""
        cfg, run = self.cfg, self.run
        if cfg.compile and (cfg.eval_only or self.step < cfg.steps):
            data = self.val_data if cfg.eval_only else self.data
            example = self.task.example(data.batch(self.step, **self.shape()), run.device)
            passes = [one for one in self.task.passes if not (one.grad and cfg.eval_only)]
            compile_ahead(self.model, self.mesh, cfg.train.dtype, example, passes)
            run.watch.wait_for_ranks()
        test = () if self.test_data is None else (self.test_data,)
        self.task.prepare(self.model, (self.data, self.val_data, *test), run, self.step)

    def train(self) -> None:
        cfg, model, optimizer, run = self.cfg, self.model, self.optimizer, self.run
        self.prepare()
        if self.rng is not None:
            runtime.set_rng_states(self.rng, run.device)
        if cfg.eval_only:
            val_loss = self.validate()
            result = "stopped"
            if val_loss is not None:
                result = validation("validation", val_loss, self.val_measured, self.step)
            self.metrics.note(result)
            return self.test()
        data = Loader(self.data, start_step=self.step, pin=run.device.type == "cuda", **self.shape())
        with data, collecting(), profiler(cfg.profile, cfg.out, run.rank, self.step) as profile:
            saving = self.checkpoints.saving
            for step in run.watch.watched_steps(range(self.step, cfg.steps), cfg.train.timeout, saving):
                with optimizer.away(self.task.offloads):
                    batch = self.task.rollout(model, next(data), run, step)
                if batch is None:  # a stop was requested in the rollout; a resumed run repeats it
                    self.leave()
                    break
                totals, stop = self.agree(batch)
                lr = cfg.optim.lr * lr_factor(step, cfg.steps, cfg.optim)
                set_lr(optimizer, lr)
                self.routes.begin(step)
                numbers: StepNumbers | None = None
                for _ in range(self.task.updates):
                    loss = self.forward_backward(batch, totals)
                    scale = self.scale.factor if self.scale else None
                    norm = clip_grad_norm_(model.counted(), inf)
                    # all ranks raise if one skipped a collective: the sums would be wrong
                    run.watch.compare_calls()
                    finite = all_finite(loss, norm)
                    norm = norm if scale is None else norm / scale
                    # decides whether to clip the gradients and whether to skip the step
                    optimizer.decide(finite, norm, cfg.optim.clip, scale)
                    optimizer.step()
                    clip_logits(model, cfg.optim.qk_clip, finite, self.mesh.world.get_group())
                    model.update_bias(finite)
                    if self.ema:
                        self.ema.update(finite)
                    if self.scale:
                        self.scale.update(finite)
                    optimizer.zero_grad()
                    numbers = of_first_skipped(numbers, (loss, norm, finite, scale))

                self.step = step + 1
                self.tokens += batch.tokens_ABS.numel() * self.mesh.axes.readers
                assert numbers is not None
                self.after(step, stop, lr, numbers, profile)
                if stop:
                    break

    def after(
        self,
        step: int,
        stop: bool,
        lr: float,
        numbers: StepNumbers,
        profile: Profiler | None,
    ) -> None:
        """Finishes a step: its line in the log, and the checkpoint, validation and trace that are due.

        numbers: loss, gradient norm, whether both are finite, and the loss scale if there is one, 0-dim on
        the device; of several updates those of `of_first_skipped`. The GPU works on the next step while they
        are copied to the host. Therefore a step is logged one step late, unless a checkpoint or a validation
        is due now.
        """
        cfg, run = self.cfg, self.run
        self.graphs.passed("train")
        axes, place = self.mesh.axes, self.mesh.place
        self.routes.end(step, cfg.train.seq, cfg.train.batch, axes.readers, place.reader)
        last = stop or self.step == cfg.steps
        save = last or self.every(cfg.checkpoint.every)
        validate = not stop and (last or self.every(cfg.train.eval_every))

        # Log the previous step, then start the copy of this step's numbers to the host.
        if self.unread is not None:
            self.log(*self.unread)
        router = self.model.read_log() if self.metrics.due(step) else None
        self.unread = step, PendingHostCopy((*numbers, self.mean, router, self.measured)), lr, self.tokens
        if save or validate or run.device.type == "cpu":
            # Before the checkpoint: a run that resumes from it does not log this step again.
            self.log(*self.unread)
            self.unread = None
            run.watch.pause()

        # A skipped step is saved only if it is the last: each save may remove an older, good checkpoint.
        if save and (last or not self.guard.in_a_row):
            self.save()
        if last:  # the checkpoint is on disk before the validation, which may be long and be interrupted
            self.checkpoints.finish()
        if validate and (val_loss := self.validate()) is not None:
            self.metrics.validated(val_loss, self.val_measured)
            self.checkpoints.validated(self.step, val_loss)
            if last:
                self.checkpoints.retain()
        if last and not stop:
            self.test()
        if profile:
            run.watch.pause()  # writing a trace takes long
            profile.step()
        self.checkpoints.poll()
        self.metrics.note(*self.checkpoints.news(last))

    def leave(self) -> None:
        """Saves the state of the finished steps, when a stop was requested before the step had its batch."""
        if self.unread is not None:
            self.log(*self.unread)
            self.unread = None
        self.run.watch.pause()
        self.save()
        self.checkpoints.finish()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around the loop: saves the state of the finished steps if the data has nothing left to learn."""
        began = self.step
        try:
            yield
        except NothingToLearn as error:
            saves = self.step > began and not self.cfg.eval_only and self.cfg.checkpoint.mode != "off"
            if saves:
                (self.checkpoints.finish if self.saved == self.step else self.leave)()
            where = f"the state after step {self.step} is in {self.checkpoints.newest}" if saves else ""
            raise NothingToLearn("; ".join(filter(None, [str(error), where]))) from None

    def every(self, steps: int) -> bool:
        """Whether something that is done every `steps` steps (0: never) is due after the step just done."""
        return steps > 0 and self.step % steps == 0

    def forward_backward(self, batch: Batch, totals: Totals) -> Tensor:
        """Forward and backward of all micro-batches; returns the global batch's mean loss, 0-dim.

        The gradients are in the parameters afterwards, multiplied by the loss scale if there is one. They are
        summed over ranks during the last micro-batch.
        """
        model, device, objective = self.model, self.run.device, self.task.objective_of(batch)
        micros = self.task.micros(batch, device)
        scale = self.scale.factor if self.scale else None
        if isinstance(model, Stages):
            loss = model.forward_backward(list(micros), totals, objective, scale)
            return self.over_all(loss, batch, totals)
        loss = torch.zeros((), device=device)
        model.start_step()
        for i, micro in enumerate(micros):
            model.set_requires_gradient_sync(i + 1 == len(batch.tokens_ABS))
            model(**micro._asdict(), totals=totals, objective=objective).backward(scale)
            loss += model.task_loss
        return self.over_all(loss, batch, totals)

    def over_all(self, loss: Tensor, batch: Batch, totals: Totals) -> Tensor:
        """The loss over all ranks, from this rank's share. Keeps the other numbers that the log shows."""
        own = self.task.divisor(batch) / self.mesh.axes.parts
        self.mean = loss * totals.targets / max(own, 1)
        further = read_measured(self.model, self.cfg.model.mtp.depth, loss)
        loss, *self.measured = sum_over_all(
            torch.cat([loss[None], self.task.read_measured(loss) / totals.targets, further])
        )
        return loss

    def agree(self, batch: Batch) -> tuple[Totals, bool]:
        """Counts of the whole step, and whether any rank must stop. Costs one small all-reduce on the CPU."""
        depth = self.cfg.model.mtp.depth
        own: list[float] = [0] * (3 + depth)
        if self.counts:
            micros = self.task.rows(batch) if depth else ()
            rows = [count_further(depth, m.targets_BS, m.documents_BS, m.padding_BS).tolist() for m in micros]
            further = map(sum, zip(*rows, strict=True))
            own = [self.task.divisor(batch), batch.count(), batch.count_sequences(), *further]
        targets, *others, stops = self.run.sum_over_ranks(*own, self.run.stop)
        counts = self.run.to_device(torch.tensor([max(targets, 1.0), *others]))
        targets, tokens, sequences, *_ = counts
        return Totals(targets, tokens, sequences, counts[3:] if depth else None), stops > 0

    @torch.no_grad()
    def validate(self, data: Dataset | None = None) -> float | None:
        """Mean loss over the first eval_batches batches of held-out data; None if a stop was requested.

        If the run keeps averaged weights, the loss is that of the averaged weights. data: the validation data
        unless given.
        """
        cfg, model, device = self.cfg, self.model, self.run.device
        total, divisor = torch.zeros((), device=device), 0.0
        one = torch.ones((), device=device)  # sums are divided at the end
        model.eval()
        with self.metrics.paused(), self.ema.swapped() if self.ema else nullcontext():
            if self.task.evaluate is not None:
                with self.optimizer.away(self.task.offloads):
                    found = self.task.evaluate(model, data or self.val_data, self.run)
                model.train()
                val_loss, self.val_measured = found or (None, {})
                return val_loss
            for i in range(cfg.train.eval_batches):
                if stopped := self.run.sum_over_ranks(self.run.stop)[0] > 0:
                    break
                batch = (data or self.val_data).batch(i, **self.shape())
                divisor += self.task.divisor(batch) if self.counts else 0
                objective, micros = self.task.objective_of(batch), self.task.micros(batch, device)
                if isinstance(model, Stages):
                    total += model.evaluate(list(micros), Totals(one, one, one), objective)
                    continue
                for micro in micros:
                    model(**micro._asdict(), totals=Totals(one, one, one), objective=objective)
                    total += model.task_loss
            model.reshard()  # frees the root's gathered weights: no backward follows to do it
        model.train()
        self.graphs.passed("validate")
        if stopped:
            return None
        sums = sum_over_all(torch.cat([total[None], self.task.read_measured(total)]))
        val_loss, *measured = (sums / max(self.run.sum_over_ranks(divisor)[0], 1)).tolist()
        self.val_measured = dict(zip(self.task.measures, measured, strict=True))
        return val_loss

    def test(self) -> None:
        """Logs the loss of the test data, if some were held out, as a line of the log and as a note."""
        if self.test_data is None or (loss := self.validate(self.test_data)) is None:
            return
        if not self.cfg.eval_only:
            self.metrics.validated(loss, self.val_measured, "test")
        self.metrics.note(validation("test", loss, self.val_measured, self.step))

    def log(self, step: int, numbers: PendingHostCopy, lr: float, tokens: int) -> None:
        """Checks a step's loss and logs the step. Waits until the step's numbers are on the host."""
        loss, norm, finite, scale, mean, router, measured = numbers.read()
        rescales = self.scale is not None and scale.item() > self.scale.least and loss.isfinite().item()
        if self.guard.strange(bool(finite), loss.item(), rescales):
            samples = self.data.indices(step, **self.shape())
            self.run.explain_bad_step(step + 1, loss.item(), norm.item(), mean.item(), samples)
        scaled = {} if scale is None else {"loss_scale": scale}
        self.metrics.log(
            step,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            tokens=tokens,
            router=router,
            skipped=self.guard.total,
            recompiles=self.graphs.recompiles,
            ended=numbers.ended,
            measured=dict(zip(self.names, measured, strict=True)) | scaled,
        )
        self.guard.give_up(step + 1)

    def save(self) -> None:
        """Writes a checkpoint of everything that the next step depends on.

        The position in the data is the step itself. If weights hold NaN, the run ends with an error and saves
        nothing.
        """
        if self.cfg.checkpoint.mode == "off":
            return
        self.checkpoints.finish()
        self.run.on_all_ranks(lambda: require_finite(self.tensors(("model",))))
        state = dict(step=self.step, tokens=self.tokens, guard=self.guard.state_dict())
        state |= dict(task=self.task.state())
        state |= dict(scale=self.scale.state_dict()) if self.scale else {}
        tensors = {name: t for name, t in self.tensors().items() if not self.model.is_copy(name)}
        self.saved = self.step
        self.checkpoints.save(self.step, tensors, state, runtime.rng_states(self.run.device))


if __name__ == "__main__":
    main(sys.argv[1:])
