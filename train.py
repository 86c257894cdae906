"""Trains a Mixture-of-Experts language model.

    python train.py tiny --steps 20                                               one process
    torchrun --nproc-per-node 2 train.py tiny --parallel.ep 2                     two, the experts spread between them
    torchrun --nproc-per-node 8 train.py qwen3-30b-a3b --parallel.ep 8 --data.path shards/
    python train.py qwen3-30b-a3b --dry-run --world 64 --parallel.ep 8            what each of 64 GPUs would hold
    python train.py --help                                                        every field

next: tmoe/data/dataset.py, tmoe/model/transformer.py
"""

import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import Any

import torch

from tmoe import warmup
from tmoe.checkpoint import resume
from tmoe.checkpoint.checkpoints import Checkpoints
from tmoe.config.check import require
from tmoe.config.model import IGNORE
from tmoe.config.run import Config
from tmoe.data.dataset import Batch, Loader, open_data, unigram_entropy
from tmoe.hf.start import load_weights
from tmoe.hf.tokenizer import carried_by_start
from tmoe.model.count import count_parameters, flops_per_token, peak_flops
from tmoe.model.transformer import Transformer
from tmoe.moe.balance import Totals
from tmoe.optim.adamw import build_optimizer, init_state, optimizer_tensors
from tmoe.optim.ema import Ema
from tmoe.optim.guard import SkipGuard, require_finite
from tmoe.optim.schedule import lr_factor, set_lr
from tmoe.parallel import Mesh, build_mesh, clip_grad_norm_, parallelize
from tmoe.run import process as runtime
from tmoe.run.cli import flags_of, parse
from tmoe.run.memory import require_room
from tmoe.run.metrics import Metrics
from tmoe.run.process import OnItsWay, Runtime, all_finite
from tmoe.run.profile import Graphs, collecting, profiler
from tmoe.versions import versions


def main(argv: list[str]) -> None:
    rank, world = runtime.launched()
    cfg = parse(argv, __doc__ or "", rank=rank, world=world)
    if cfg.dry_run:
        from tmoe.run.dry_run import dry_run  # its fake process group is of no use to a run

        return dry_run(cfg)
    if cfg.compile and not runtime.has_compiler():
        cfg = replace(cfg, compile=False)
        if rank == 0:
            print("no C++ compiler found: running eager (--no-compile)", file=sys.stderr)
    warmup.warm([cfg])  # no collective must wait for a compiler: before the process group exists
    run = runtime.start(cfg.seed, cfg.train.collective_timeout, cfg.train.also_stop_on)
    with run.watch, run.refusing(SkipGuard.TooMany):
        trainer = Trainer(cfg, run)
        with trainer.metrics:
            trainer.train()
    run.close()


class Trainer:
    """Everything that a run owns, built in the order in which it is needed; `train` is the loop."""

    def __init__(self, cfg: Config, run: Runtime):
        self.cfg, self.run, p = cfg, run, cfg.parallel
        run.alike(flags_of(cfg))
        self.mesh = run.together(lambda: build_mesh(p.dp, p.ep, ep_across_nodes=p.ep_across_nodes))
        run.together(lambda: require_room(cfg, self.mesh.dp.size(), self.mesh.ep.size(), run.memory))
        self.carried = run.together(
            lambda: carried_by_start(cfg)
        )  # the tokenizer of the weights to start from
        self.data, self.val_data = run.together(
            lambda: [
                open_data(cfg.data, cfg.train.seq, cfg.model.vocab, split, self.carried)
                for split in ("train", "val")
            ]
        )
        run.alike(self.data.extent("training") | self.val_data.extent("validation"))
        self.entropy = run.together(lambda: unigram_entropy(self.val_data))
        with run.refusing():  # a dispatcher that was asked for and does not work here
            self.model = build_model(cfg, self.mesh, run.device)
        self.optimizer = build_optimizer(self.model.named_parameters(), cfg.optim, run.device)
        if not cfg.eval_only:
            init_state(self.optimizer)
        self.optimizer.keeps_fresh = True  # here nobody else writes weights but Ema, which says so
        self.ema = Ema(self.model.named_parameters(), cfg.optim.ema) if cfg.optim.ema else None
        self.guard, self.graphs = SkipGuard(cfg.optim.max_skips), Graphs()
        self.step, self.tokens, self.changes = 0, 0, list[str]()
        known = versions() if run.rank == 0 else {}  # who writes them down
        info = dict(config=asdict(cfg), versions=known, data=self.data.facts())
        mode = "sync" if cfg.checkpoint.mode == "sync" else "async"
        self.checkpoints = Checkpoints(
            Path(cfg.out) / "checkpoints", keep=cfg.checkpoint.keep, mode=mode, info=info
        )
        run.watch.saving = self.checkpoints.saving
        held = None if cfg.eval_only else run.claim(cfg.out)  # first: who is still there may save a step
        self.restore()
        peak = peak_flops(run.device_name) if cfg.train.dtype == "bf16" else None
        ours: dict[str, Any] = dict(
            rank=run.rank, world=run.world, device=run.device, versions=known, held=held
        )
        ours |= dict(
            flops_per_token=flops_per_token(cfg.model, cfg.train.seq), peak=peak, start_step=self.step
        )
        ours |= dict(facts=dict(data=self.data.describe(), unigram_entropy=self.entropy))
        self.metrics = run.together(
            lambda: Metrics(cfg, **ours)
        )  # rank 0 may find files that it cannot go on with
        self.announce()

    def train(self) -> None:
        cfg, model, optimizer, run = self.cfg, self.model, self.optimizer, self.run
        if cfg.eval_only:
            loss, at = self.validate(), f"after step {self.step}"
            return self.metrics.note("stopped" if loss is None else f"validation loss {loss:.4f} {at}")
        data = Loader(self.data, start_step=self.step, pin=run.device.type == "cuda", **self.shape())
        unread = None  # what `log` takes, of a step whose numbers are on their way to the host
        with data, collecting(), profiler(cfg.profile, cfg.out, run.rank, self.step) as profile:
            for step in run.watch.over(range(self.step, cfg.steps), cfg.train.timeout):
                batch = next(data)
                totals, stop = self.agree(batch)
                lr = cfg.optim.lr * lr_factor(step, cfg.steps, cfg.optim)
                set_lr(optimizer, lr)
                loss = self.forward_backward(batch, totals)
                norm = clip_grad_norm_(model.parameters(), inf)
                run.watch.vote()  # a skipped collective has summed what does not belong together
                optimizer.decide(
                    finite := all_finite(loss, norm), norm, cfg.optim.clip
                )  # to clip, or to skip it
                optimizer.step()
                model.update_bias(finite)
                if self.ema:
                    self.ema.update(finite)
                optimizer.zero_grad()
                self.graphs.passed("train")
                self.step, self.tokens = step + 1, self.tokens + batch.tokens_ABS.numel() * run.world
                last = stop or self.step == cfg.steps
                save = last or (cfg.checkpoint.every and self.step % cfg.checkpoint.every == 0)
                validate = not stop and (
                    last or (cfg.train.eval_every and self.step % cfg.train.eval_every == 0)
                )
                if unread is not None:  # the step before; the GPU has this one to work on meanwhile
                    self.log(*unread)
                router = model.balancer.read_log() if self.metrics.due(step) else None
                unread = step, OnItsWay((loss, norm, finite, self.mean, router)), lr, self.tokens
                if save or validate or run.device.type == "cpu":
                    self.log(
                        *unread
                    )  # before the checkpoint: who resumes from it does not log this step again
                    unread = None
                    run.watch.pause()
                if save and (
                    last or not self.guard.in_a_row
                ):  # a run of skipped steps must not push good ones out
                    self.save()
                if (
                    last
                ):  # whole before a validation that may be long: whoever ends a run does not wait for it
                    self.checkpoints.finish()
                if validate and (val_loss := self.validate()) is not None:
                    self.metrics.validated(val_loss)
                if profile:
                    run.watch.pause()  # writing a trace takes its time
                    profile.step()
                self.checkpoints.poll()
                if last:
                    break

    def forward_backward(self, batch: Batch, totals: Totals) -> torch.Tensor:
        """Gradients of the step's loss, summed over ranks with the last micro-batch; returns the global batch's mean cross-entropy."""
        model, loss, isolate = (
            self.model,
            torch.zeros((), device=self.run.device),
            self.cfg.train.isolate_documents,
        )
        model.balancer.start_step()
        for i, (tokens_BS, targets_BS, documents_BS) in enumerate(batch.micros(self.run.device, isolate)):
            model.set_requires_gradient_sync(i + 1 == len(batch.tokens_ABS))
            model(tokens_BS, targets_BS, documents_BS=documents_BS, totals=totals).backward()
            loss += model.cross_entropy
        self.mean = (
            loss * totals.targets / max((batch.targets_ABS != IGNORE).sum().item(), 1)
        )  # of this rank's own
        return model.balancer.all_reduce(loss)

    def agree(self, batch: Batch) -> tuple[Totals, bool]:
        """What the whole step holds, and whether any rank was told to stop: one small exchange between CPUs."""
        targets, stops = self.run.sums((batch.targets_ABS != IGNORE).sum().item(), self.run.stop)
        sequences = batch.tokens_ABS[..., 0].numel() * self.run.world
        totals = [max(targets, 1.0), sequences * self.cfg.train.seq, sequences]
        return Totals(*self.run.put(torch.tensor(totals))), stops > 0

    @torch.no_grad()
    def validate(self) -> float | None:
        """Mean cross-entropy over the first eval_batches validation batches, of averaged weights if there are any; None once told to stop."""
        model, cfg, one = self.model, self.cfg, torch.ones((), device=self.run.device)
        total, targets = torch.zeros((), device=self.run.device), 0
        model.eval()
        with self.metrics.paused(), self.ema.swapped() if self.ema else nullcontext():
            for i in range(cfg.train.eval_batches):
                if stopped := self.run.sums(self.run.stop)[0] > 0:
                    break
                batch = self.val_data.batch(i, **self.shape())
                targets += (batch.targets_ABS != IGNORE).sum().item()
                for tokens_BS, targets_BS, documents_BS in batch.micros(
                    self.run.device, cfg.train.isolate_documents
                ):
                    model(tokens_BS, targets_BS, documents_BS=documents_BS, totals=Totals(one, one, one))
                    total += model.cross_entropy
            model.reshard()  # no backward follows to free what the root gathered
        model.train()
        self.graphs.passed("validate")
        return (
            None if stopped else model.balancer.all_reduce(total).item() / max(self.run.sums(targets)[0], 1)
        )

    def log(self, step: int, numbers: OnItsWay, lr: float, tokens: int) -> None:
        """Guards and writes down a step, once its numbers are here."""
        loss, norm, finite, mean, router = numbers.read()
        if self.guard.strange(bool(finite), loss.item()):
            self.run.blame(
                step, loss.item(), norm.item(), mean.item(), self.data.indices(step, **self.shape())
            )
        counts = dict(
            tokens=tokens, skipped=self.guard.total, recompiles=self.graphs.recompiles, ended=numbers.ended
        )
        self.metrics.log(step, loss=loss, grad_norm=norm, lr=lr, router=router, **counts)
        self.guard.give_up(step)

    def save(self) -> None:
        """Everything that the next step depends on; the data's position is the step itself. Weights that hold NaN end the run instead."""
        if self.cfg.checkpoint.mode == "off":
            return
        self.checkpoints.finish()
        self.run.together(lambda: require_finite(self.tensors(("model",))))
        state = dict(step=self.step, tokens=self.tokens, guard=self.guard.state_dict())
        self.checkpoints.save(self.step, self.tensors(), state, runtime.rng_states(self.run.device))

    def restore(self) -> None:
        cfg, run = self.cfg, self.run
        with run.refusing():
            if path := self.checkpoints.find(cfg.resume):
                self.changes = run.together(
                    lambda: resume.require_same_run(path, cfg, self.data.facts(), run.world)
                )
                state, rng = self.checkpoints.load(
                    path, self.tensors(), ("model.", "ema.") if cfg.eval_only else None
                )
                self.step, self.tokens = state["step"], state["tokens"]
                self.guard.load_state_dict(state["guard"])
                self.checkpoints.info["config"]["init"] = resume.started_from(
                    path
                )  # whatever --init says now
                self.data.go_on(self.step, self.tokens, **self.shape())
                if rng is not None:  # another number of ranks draws other numbers
                    runtime.set_rng_states(rng, run.device)
            elif cfg.init:
                load_weights(Path(cfg.init), self.checkpoints, self.model.state_dict(), cfg.model)
                if self.ema:
                    self.ema.restart()
            elif cfg.eval_only:
                found_nothing = (
                    f"--eval-only: no checkpoint in --out={cfg.out}; name --init, or --resume none"
                )
                require(cfg.resume != "auto", found_nothing)
        run.together(lambda: require_finite(self.tensors(("model",))))

    def tensors(self, wanted: tuple[str, ...] = ("model", "optim", "ema")) -> dict[str, torch.Tensor]:
        """Name to tensor of what a checkpoint holds."""
        model = dict(self.model.named_parameters())
        ema = self.ema.tensors() if self.ema else {}
        parts = dict(model=self.model.state_dict(), optim=optimizer_tensors(self.optimizer, model), ema=ema)
        return {f"{part}.{name}": t for part in wanted for name, t in parts[part].items()}

    def announce(self) -> None:
        cfg, note, mesh = self.cfg, self.metrics.note, self.mesh
        counts = count_parameters(cfg.model)
        note(
            f"{counts.total:,} parameters, {counts.active:,} active; mesh dp {mesh.dp.size()} x ep {mesh.ep.size()}"
        )
        note(f"training data: {self.data.describe()}; tokenizer {self.data.fingerprint}")
        for source, held in zip(self.data.sources, self.val_data.sources, strict=True):
            note(
                f"{source.name}: {source.taken}; {source.tokens:,} tokens to train on, {held.tokens:,} to validate with"
            )
        if cfg.init and not self.carried:
            note(
                f"--init={cfg.init}: its tokenizer is not known, so nothing tells whether the data are of it"
            )
        if self.entropy is not None:
            note(
                f"unigram entropy of the validation bytes: {self.entropy:.3f} nats, a context-free model's best loss"
            )
        if self.step:
            note("; ".join([f"resumed after step {self.step}", *self.changes]))

    def shape(self) -> dict[str, int]:
        train = self.cfg.train
        return dict(batch=train.batch, accumulate=train.accumulate, rank=self.run.rank, world=self.run.world)


def build_model(cfg: Config, mesh: Mesh, device: torch.device) -> Transformer:
    """Meta first, so that no rank ever holds the whole model; then its own shards, filled from the seed."""
    with torch.device("meta"):
        model = Transformer(cfg.model)
    parallelize(model, mesh, cfg, whole_forwards=True)
    model.to_empty(device=device)
    model.init_weights(cfg.seed)
    return model


if __name__ == "__main__":
    main(sys.argv[1:])
