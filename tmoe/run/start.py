"""The start of a run: everything it owns is built, a step folder or --init is loaded, facts are logged.

Start is the base class of Trainer in train.py, which has the loop and the code of a step.

next: run/process.py
"""

import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tmoe.base.listing import counted
from tmoe.base.optional import say
from tmoe.base.versions import package_version, versions
from tmoe.checkpoint import resume
from tmoe.checkpoint.base import Base, base_of, find_adapters, require_base, settings_of, weights_hash
from tmoe.checkpoint.checkpoints import Checkpoints
from tmoe.checkpoint.manifest import Manifest, read_manifest
from tmoe.cli.defaults import plan_of, samples_a_step, with_length
from tmoe.cli.parse import flags_of, require_weights, resumes
from tmoe.config.check import ConfigError, Setting, require
from tmoe.config.run import Config
from tmoe.data.dataset import Dataset, require_alike
from tmoe.hf.adapters.load import is_peft, open_for_run, read_into
from tmoe.hf.load_base import load_base
from tmoe.hf.load_weights import carried_blocks, load_weights, read_step
from tmoe.hf.tokenizer_files import carried_by_start, unknown_of
from tmoe.log.metrics import Metrics
from tmoe.log.routes import Routes
from tmoe.model.count import count_parameters, flops_per_token, peak_flops
from tmoe.model.float8 import describe, require_device, require_layers
from tmoe.model.freeze import require_matches, settle
from tmoe.model.lora import describe as describe_adapters
from tmoe.model.lora import is_adapter, require_ranks
from tmoe.model.muon import describe as describe_muon
from tmoe.model.muon import parts_of
from tmoe.model.nf4 import has_nf4
from tmoe.model.parallelize import parallelize
from tmoe.model.qk_clip import describe as describe_clip
from tmoe.model.stages import Stages, pipeline
from tmoe.model.transformer import Transformer
from tmoe.moe.fp8_choice import arch_of
from tmoe.moe.fp8_choice import describe as describe_fp8
from tmoe.optim.adamw import build_optimizer, init_state, optimizer_tensors, restate
from tmoe.optim.ema import Ema
from tmoe.optim.guard import SkipGuard, require_finite
from tmoe.optim.loss_scale import LossScale
from tmoe.optim.states import MOMENTUM, States
from tmoe.parallel.agree import gathered
from tmoe.parallel.mesh import Mesh, build_mesh
from tmoe.plan.fitting import require_room
from tmoe.plan.frozen_codes import describe_freed
from tmoe.run.process import Runtime


class Start:
    """Everything that a run owns, built in the order in which it is needed.

    The constructor loads the step to continue from and writes the notes of the start. It is a collective: an
    error on one rank ends all ranks with code 2 and one message.
    """

    def __init__(self, cfg: Config, run: Runtime, task_of: Callable[[Config, Mesh], Any]):
        """task_of: creates the task (tmoe/post/task.py) from these settings on this mesh."""
        self.cfg = cfg
        self.run = run
        run.require_equal(flags_of(cfg))

        # The mesh, and whether the model fits into each rank's memory.
        p = cfg.parallel
        axes = dict(tp=p.tp, cp=p.cp, pp=p.pp, replicate=p.replicate, etp=p.etp)
        self.mesh = run.on_all_ranks(
            lambda: build_mesh(p.dp, p.ep, **axes, ep_across_nodes=p.ep_across_nodes)
        )
        run.on_all_ranks(lambda: require_matches(cfg))
        run.on_all_ranks(lambda: resumes(cfg) or require_ranks(cfg))
        run.on_all_ranks(lambda: require_layers(cfg))
        run.on_all_ranks(lambda: require_device(cfg, run.device))
        run.on_all_ranks(lambda: require_room(cfg, self.mesh.axes, run.memory))

        # Data, read with the tokenizer of the initial weights, if they have one.
        self.carried = run.on_all_ranks(lambda: carried_by_start(cfg))
        self.task = task_of(cfg, self.mesh)
        opened = run.on_all_ranks(lambda: [self.task.open(split, self.carried) for split in ("train", "val")])
        self.data, self.val_data = opened
        run.on_all_ranks(lambda: require_alike(self.data, self.val_data))
        run.require_equal(self.data.extent("training") | self.val_data.extent("validation"))
        self.a_step = samples_a_step(cfg, self.mesh.axes.readers)
        cfg = self.with_length(cfg)
        self.test_data: Dataset | None = None
        if cfg.data.held_out[1]:
            self.test_data = run.on_all_ranks(lambda: self.task.open("test", self.carried))
            run.require_equal(self.test_data.extent("test"))
        self.facts = run.on_all_ranks(lambda: self.task.facts(self.val_data))

        # Model and optimizer.
        with run.refusing():  # the requested dispatcher may not work on these ranks
            self.model = build_model(cfg, self.mesh, run.device)
        # keeps_fresh is allowed: besides the optimizer only Ema writes weights, and Ema calls `make_stale`.
        parameters = self.model.named_parameters()
        optim = cfg.optim
        how = dict(keeps_fresh=True, seed=cfg.seed, parts=parts_of(self.model, optim.muon_heads))
        products = torch.bfloat16 if cfg.train.dtype == "bf16" else torch.float32
        self.optimizer = build_optimizer(parameters, optim, run.device, products=products, **how)
        if not cfg.eval_only:
            init_state(self.optimizer)
        averaged = ((n, p) for n, p in self.model.named_parameters() if p.requires_grad or not cfg.lora.rank)
        self.ema = Ema(averaged, cfg.optim.ema) if cfg.optim.ema else None

        # The progress of the run.
        self.step = 0
        self.tokens = 0
        self.saved: int | None = None  # the step of the last checkpoint that this process wrote
        self.began = ""  # the source of the weights, if they were loaded by --init
        self.base: Base | None = None  # the frozen model of adapters, if it is in a folder
        self.changes: list[str] = []  # settings that differ from those of the checkpoint
        # random states of the checkpoint, set before the first step: building a model for a note draws, too
        self.rng: dict[str, Tensor] | None = None
        self.guard = SkipGuard(cfg.optim.max_skips, self.task.spikes)
        self.scale = LossScale(cfg.train, run.device) if cfg.train.dtype == "fp16" else None
        self.routes = Routes(cfg.log.routes, cfg.out, self.model, run.rank)

        # Checkpoints, and the step to continue from.
        known = versions() if run.rank == 0 else {}  # only rank 0 writes them
        self.checkpoints = Checkpoints(
            Path(cfg.out) / "checkpoints",
            keep=cfg.checkpoint.keep,
            keep_best=cfg.checkpoint.keep_best,
            mode="sync" if cfg.checkpoint.mode == "sync" else "async",
            info=dict(config=asdict(cfg), versions=known, data=self.data.facts())
            | chat_of(self.data)
            | cut_of(self.model),
        )
        # Before restore: another run that still holds the folder may save one more step.
        held = None if cfg.eval_only else run.claim(cfg.out)
        self.restore()
        if not cfg.eval_only:
            self.checkpoints.begin(self.step)
        # On all ranks together: rank 0 may find files in the run folder that it cannot continue.
        self.metrics = run.on_all_ranks(lambda: self.open_log(known, held))
        self.announce()

    def open_log(self, known: dict[str, str], held: Any) -> Metrics:
        """The log of the run; known: versions of packages; held: the claim of the run folder."""
        cfg, run = self.cfg, self.run
        return Metrics(
            cfg,
            rank=run.rank,
            world=run.world,
            device=run.device,
            flops_per_token=flops_per_token(cfg.model, cfg.train.seq, frozen=cfg.lora.rank > 0),
            peak=peak_flops(run.device_name) if cfg.train.dtype != "fp32" else None,
            start_step=self.step,
            versions=known,
            facts=dict(data=self.data.describe(), **self.facts),
            held=held,
        )

    def with_length(self, cfg: Config) -> Config:
        """The settings with the number of steps that data and --epochs give; also set in the task."""
        samples = self.data.samples
        self.cfg = self.task.cfg = self.run.on_all_ranks(lambda: with_length(cfg, samples, self.a_step))
        return self.cfg

    def restore(self) -> None:
        """Loads the checkpoint that --resume finds, or else the weights of --init.

        Ends all ranks with code 2 if that does not work, or if the weights hold NaN.
        """
        cfg, run = self.cfg, self.run
        with run.refusing():
            if path := self.checkpoints.find(cfg.resume):
                self.go_on_from(path)
            elif cfg.init:
                self.begin_from(Path(cfg.init))
                if self.ema:
                    self.ema.restart()
            elif cfg.eval_only and cfg.resume == "auto":
                require_weights(cfg, found=False)
            elif cfg.lora.rank and cfg.lora.base == "nf4":
                needs = "needs weights to quantise"
                raise ConfigError.of("lora.base", "nf4", needs, f"{Setting('init')} FOLDER")
        tensors = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        run.on_all_ranks(lambda: require_finite(tensors))

    def begin_from(self, init: Path) -> None:
        """Loads the weights of --init; with adapters they are the frozen base."""
        cfg, run = self.cfg, self.run
        tensors = self.model.state_dict()
        if cfg.lora.rank:
            tensors = {name: t for name, t in tensors.items() if not is_adapter(name)}
            found = run.on_all_ranks(lambda: "" if run.rank else weights_hash(init))
            digest = gathered(found, run.control)[0]
            self.record_base(Base(str(init), digest))
        number = self.load_base_from(init, tensors)
        self.began = f"weights of {init}, {number} tensors"
        self.began += " on rank 0" if cfg.parallel.pp > 1 else ""
        self.began += carried_blocks(init, cfg.model)
        if cfg.lora.init:
            self.began += f"; adapters of {self.load_adapters(Path(cfg.lora.init))}"

    def load_base_from(self, folder: Path, tensors: dict[str, Tensor]) -> int:
        """Fills these tensors from a folder; a base in NF4 from all of its tensors. Returns their number."""
        model = self.model
        if isinstance(model, Transformer) and has_nf4(model):
            return self.run.on_all_ranks(lambda: load_base(folder, model))
        load_weights(folder, self.checkpoints, tensors, self.cfg.model)
        return len(tensors)

    def record_base(self, base: Base) -> None:
        """Records the frozen model on which the adapters are trained. Steps do not contain its weights."""
        self.base = base
        self.checkpoints.info["base"] = base._asdict()

    def load_adapters(self, path: Path) -> str:
        """Loads the adapters of a step, which must have been trained on this run's base; returns its name.

        The name states it if the base was held otherwise, whole or in NF4.

        A folder of PEFT's does not say which weights its base had; its shapes must be the base's.
        """
        if is_peft(path):
            folder = self.run.on_all_ranks(lambda: open_for_run(path, self.cfg))
            self.run.on_all_ranks(lambda: read_into(folder, self.model.state_dict()))
            return str(path)

        def look() -> tuple[Path, Manifest]:
            step, manifest = find_adapters(path)
            resume.require_same_adapters(step, manifest, self.cfg, base=False)
            base, own = base_of(manifest), self.base
            where = "drawn from a seed" if base is None else base.path
            wrong = f"was trained on other weights ({where}) than {Setting('init', self.cfg.init)}"
            same = base is not None and own is not None and base.sha256 == own.sha256
            require(same, "lora.init", str(path), wrong)
            return step, manifest

        step, manifest = self.run.on_all_ranks(look)
        tensors = {f"model.{name}": t for name, t in self.model.state_dict().items() if is_adapter(name)}
        read_step(step, manifest, tensors, more=True)
        held = settings_of(manifest).get("base", "whole")
        other = "in NF4" if held == "nf4" else "that was whole"
        return str(step) if held == self.cfg.lora.base else f"{step}, trained on a base {other}"

    def load_base(self, path: Path) -> None:
        """Loads the frozen base of a step of adapters. A missing or different base is refused."""
        cfg, run = self.cfg, self.run
        base = base_of(read_manifest(path))
        if base is None:  # drawn from the seed: the step contains all weights
            return
        place = cfg.init or ""
        again = f"{Setting('init')} DIR, the folder that holds those weights now"
        found = run.on_all_ranks(lambda: "" if run.rank else str(require_base(path, base, place, again)))
        folder = Path(gathered(found, run.control)[0])
        tensors = {name: t for name, t in self.model.state_dict().items() if not is_adapter(name)}
        self.load_base_from(folder, tensors)
        self.record_base(Base(str(folder), base.sha256))

    def go_on_from(self, path: Path) -> None:
        """Loads a step folder: all state that the next step depends on, or only weights for --eval-only."""
        run, facts, readers = self.run, self.data.facts(), self.mesh.axes.readers

        def look() -> tuple[Config, list[str]]:
            cfg = self.cfg
            if counts := resume.counts_of(path):  # earlier steps of another size left other samples
                self.data.go_on(*counts, **self.shape())
                cfg = with_length(cfg, self.data.samples, self.a_step, self.data.ahead)
            notes = resume.require_same_run(path, cfg, facts, readers)
            return cfg, notes + resume.other_cut(path, cut_of(self.model).get("cut", ""))

        cfg, self.changes = run.on_all_ranks(look)
        self.cfg = self.task.cfg = cfg
        if cfg.lora.rank:
            self.load_base(path)
        weights_only = cfg.eval_only or not cfg.load_optim
        if not weights_only:
            trained = ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
            by_muon = {name: MOMENTUM in self.optimizer.moments_of(p) for name, p in trained}
            run.on_all_ranks(lambda: resume.require_same_optimizer(path, cfg, by_muon))
            stored = resume.stored_states(path)
            known: dict[Tensor, States] = {}
            known |= {p: stored[name] for name, p in self.model.named_parameters() if name in stored}
            init_state(self.optimizer, known)
        wanted = ("model.", "ema.") if weights_only else None
        tensors = self.tensors(("model", "ema")) if weights_only else self.tensors()
        draws = cfg.load_rng and not cfg.eval_only
        # no random states with another number of ranks, which draw other numbers, or if they are not wanted
        state, self.rng = self.checkpoints.load(path, tensors, wanted, rng=draws)
        if not weights_only:
            restate(self.optimizer)
        self.step = state["step"]
        self.tokens = state["tokens"]
        self.guard.load_state_dict(state["guard"])
        if self.scale:
            self.scale.load_state_dict(state.get("scale", {}))
        self.task.load_state(state.get("task", {}))
        self.checkpoints.info["config"]["init"] = resume.started_from(path)  # whatever --init is now
        self.checkpoints.info["config"]["steps"] = cfg.steps

    def tensors(self, wanted: tuple[str, ...] = ("model", "optim", "ema")) -> dict[str, Tensor]:
        """Name to tensor of a checkpoint's contents; names begin with the part, for example "model.".

        A base that is in a folder is left out.
        """
        parameters = dict(self.model.named_parameters())
        weights = self.model.state_dict()
        if self.base is not None:
            weights = {name: t for name, t in weights.items() if is_adapter(name)}
        parts = dict(
            model=weights,
            optim=optimizer_tensors(self.optimizer, parameters),
            ema=self.ema.tensors() if self.ema else {},
        )
        return {f"{part}.{name}": t for part in wanted for name, t in parts[part].items()}

    def announce(self) -> None:
        """Logs notes: the size of the model, the layout, the data, and the step of a resumed run."""
        cfg, note = self.cfg, self.metrics.note
        counts = count_parameters(cfg.model)
        note(f"{counts.total:,} parameters, {counts.active:,} active; mesh {self.mesh.axes}")
        if line := describe(cfg):
            note(f"{line}; torchao {package_version('torchao')}")
        where = cfg, self.mesh.axes, arch_of(self.run.device.type)
        fp8 = [*describe_fp8(*where), *describe_freed(*where)]
        for line in [*fp8, *describe_adapters(cfg, self.mesh.axes.ep), *describe_muon(cfg, self.mesh.axes)]:
            note(line)
        for line in describe_clip(cfg):
            note(line)
        if depth := cfg.model.mtp.depth:
            alone = "alone, without a gradient to other blocks" if cfg.model.mtp.detach else "with the model"
            note(f"multi-token prediction: {counted(depth, 'block')}, trained {alone}")
        note(f"training data: {self.data.describe()}; tokenizer {self.data.fingerprint}")
        own = bool(cfg.data.val_path)
        for source, held in zip_longest(self.data.sources, () if own else self.val_data.sources):
            rest = f", {held.tokens:,} to validate with" if held else ""
            note(f"{source.name}: {source.taken}; {source.tokens:,} tokens to train on{rest}")
        for held in self.val_data.sources if own else ():
            note(f"{held.name}: {held.taken}; {held.tokens:,} tokens to validate with")
        if self.began:
            note(self.began)
        for line in self.data.notes:
            note(line)
        if cfg.init and not (self.carried and self.carried.fingerprint):
            note(unknown_of(cfg.init))
        for line in self.task.notes(self.facts):
            note(line)
        if not cfg.eval_only:
            data = self.data
            for line in plan_of(cfg, self.a_step, data.samples, data.trained_a_sample(), data.ahead):
                note(line)
        if self.step:
            note("; ".join([f"resumed after step {self.step}", *self.changes]))

    def say_end(self) -> None:
        """Prints the last line on stderr of rank 0, if a signal ended the run: where the run's state is."""
        cfg, run = self.cfg, self.run
        if run.rank or cfg.eval_only or self.step >= cfg.steps:
            return
        path = self.checkpoints.newest
        where = f"its state is in {path}, and the same command continues it" if path else "nothing was saved"
        off = " (--checkpoint.mode off)" if cfg.checkpoint.mode == "off" else ""
        say(f"stopped{run.told and f' by {run.told}'} after step {self.step}: {where}{off}", sys.stderr)

    def shape(self) -> dict[str, int]:
        """This rank's part of a step, as arguments of `batch`: sizes, rank and number of readers."""
        train = self.cfg.train
        sizes = dict(batch=train.batch, accumulate=train.accumulate)
        return dict(**sizes, rank=self.mesh.place.reader, world=self.mesh.axes.readers)

    @property
    def counts(self) -> bool:
        """Whether this rank counts the sequences that it reads, for all ranks that share them."""
        place = self.mesh.place
        return place.cp == place.tp == place.pp == 0


def chat_of(data: Dataset) -> dict[str, Any]:
    """The chat format for a step's manifest: {} or {"chat": ...}."""
    return {} if data.chat is None else {"chat": data.chat.as_json()}


def cut_of(model: Transformer | Stages) -> dict[str, str]:
    """The pipeline's cut for a step's manifest: {} or {"cut": ...}."""
    return {"cut": str(model.division)} if isinstance(model, Stages) else {}


def build_model(cfg: Config, mesh: Mesh, device: torch.device) -> Transformer | Stages:
    """The model, or this rank's stages of it, laid out over the mesh, with weights drawn from the seed.

    It is built on the meta device, so that no rank ever holds the whole model. Then each rank fills its
    shards.
    """
    if mesh.axes.pp > 1:
        model = pipeline(cfg, mesh)
    else:
        with torch.device("meta"):
            model = Transformer(cfg.model)
            settle(model, cfg)
        parallelize(model, mesh, cfg, whole_forwards=True)
    model.to_empty(device=device)
    model.init_weights(cfg.seed)
    return model
