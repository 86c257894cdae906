"""Adds expert parallelism to Hugging Face's Trainer by one more line after the Trainer's construction.

    trainer = Trainer(model, args, train_dataset=data)  # or TRL's SFTTrainer
    trainer.add_callback(ExpertParallel(trainer, ep=2))
    trainer.train()

It changes each part of the Trainer as follows:

    model         swap_experts and parallelize are applied; DDP is not
    loss          divided by the number of ranks: the Trainer averages gradients, parallelize sums them
    clipping      tmoe.parallel.clip_grad_norm_, with one norm over all meshes
    optimizer     a group of parameters for each mesh, since torch's fused and foreach steps need one mesh
    checkpoint-N  torch's DCP in model/ and optimizer/, to which every rank writes its part; other files are
                  the Trainer's
    save_model()  writes a whole folder for from_pretrained

transformers and accelerate are needed in this file and nowhere else in tmoe.

next: swap.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from tmoe.config.check import ConfigError
from tmoe.hf.swap import swap_experts
from tmoe.model.parallelize import parallelize
from tmoe.parallel.grad_norm import clip_grad_norm_
from tmoe.parallel.mesh import build_mesh

MODEL, OPTIMIZER, SCHEDULER = "model", "optimizer", "scheduler.pt"  # names in a folder checkpoint-N
# The Trainer's methods that depend on how a model is distributed; transformers has had them since version 4.
REPLACED = ("save_model", "_save_optimizer_and_scheduler", "_load_from_checkpoint")
REPLACED += ("_load_optimizer_and_scheduler", "_load_best_model", "create_optimizer")


class ExpertParallel(TrainerCallback):
    """Gives a Trainer's model tmoe's experts, divided among ep ranks, and applies FSDP2 to everything else.

    trainer: transformers' Trainer or a subclass, not trained yet. Every rank must have made it from the same
        weights.
    ep: number of ranks among which the experts of a layer are divided; it must divide the number of experts
        and of ranks.
    fp8: as for swap_experts.

    Raises ConfigError for a Trainer that would fail: one with a model_init, an existing optimizer, fp16 (its
    gradient scaler detects an overflow on one rank only), DeepSpeed or FSDP of the Trainer, an adapter of
    PEFT, or a reference model; and for a model that swap_experts refuses.
    """

    def __init__(self, trainer: Any, ep: int = 1, fp8: bool = False):
        self.trainer = trainer
        self._refuse()
        accelerator = trainer.accelerator
        self._prepare, self._backward = accelerator.prepare_model, accelerator.backward
        self._create_optimizer = trainer.create_optimizer
        mesh = build_mesh(ep=ep)
        self.world = mesh.world.size()
        parallelize(swap_experts(trainer.model, mesh, fp8), mesh)

        accelerator.prepare_model = self._prepare_model
        accelerator.backward = self._mean_backward
        accelerator.clip_grad_norm_ = self._clip
        trainer._mixed_mesh_grads = False  # since 5.2x the Trainer has another norm for several meshes
        for name in REPLACED:
            setattr(trainer, name, getattr(self, name))

    def _refuse(self) -> None:
        t = self.trainer
        lacks = [name for name in REPLACED if not hasattr(t, name)]
        reasons = {
            f"lacks {', '.join(lacks)}; must be transformers' Trainer or a class of it": bool(lacks),
            "has a model_init, which makes another model in train(); pass model=": getattr(
                t, "model_init", None
            ),
            "has an optimizer already; let the Trainer make it": getattr(t, "optimizer", None),
            "has fp16=True; bf16=True and fp32 are valid": getattr(t.accelerator, "scaler", None),
            "has its own DeepSpeed or FSDP; leave deepspeed and fsdp out of its arguments": (
                getattr(t, "is_deepspeed_enabled", False) or getattr(t, "is_fsdp_enabled", False)
            ),
            "trains an adapter of PEFT; valid is the model itself": hasattr(t.model, "peft_config"),
            "has a ref_model, which would stay whole on every rank; such a Trainer runs on one GPU": (
                getattr(t, "ref_model", None) is not None
            ),
        }
        for reason, true in reasons.items():
            if true:
                raise ConfigError(f"ExpertParallel: {type(t).__name__} {reason}")

    # ---- methods of the accelerator ----

    def _prepare_model(
        self, model: nn.Module, device_placement: Any = None, evaluation_mode: Any = False
    ) -> Any:
        """Prepares autocast and compilation as requested, without DDP, which evaluation_mode=True omits."""
        return self._prepare(model, device_placement=False, evaluation_mode=True)

    def _mean_backward(self, loss: Tensor, **kwargs: Any) -> None:
        self._backward(loss / self.world, **kwargs)

    def _clip(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        return clip_grad_norm_(parameters, max_norm, norm_type)

    # ---- methods of the Trainer, under its names ----

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = self._create_optimizer(*args, **kwargs)
        optimizer.param_groups[:] = [part for group in optimizer.param_groups for part in by_mesh(group)]
        return optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model. In a checkpoint (_internal_call) every rank writes its part. If the user calls it,
        rank 0 writes the whole model, for from_pretrained."""
        t = self.trainer
        folder = Path(output_dir or t.args.output_dir)
        if _internal_call:
            dcp.save(get_model_state_dict(t.model), checkpoint_id=folder / MODEL)
            if t.args.should_save:
                t.model.config.save_pretrained(folder)
                if t.processing_class is not None:
                    t.processing_class.save_pretrained(folder)
            return
        whole = {}
        for name, tensor in t.model.state_dict().items():
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # every rank takes part
            if t.args.should_save:
                whole[name] = tensor.cpu()
        t._save(str(folder), state_dict=whole)
        dist.barrier()  # no rank may read the folder before it is complete
        if t.args.push_to_hub:
            t.push_to_hub(commit_message="Model save")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        t = self.trainer
        state = get_optimizer_state_dict(t.model, inner(t.optimizer))
        dcp.save(state, checkpoint_id=Path(output_dir, OPTIMIZER))
        if t.args.should_save:
            torch.save(t.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint, MODEL)
        if not (folder / ".metadata").is_file():  # DCP writes it last
            raise ConfigError(
                f"resume_from_checkpoint: {folder} is no whole DCP folder; valid is a checkpoint-N that a "
                f"Trainer with ExpertParallel has written"
            )
        model = self.trainer.model
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=folder)  # in place
        set_model_state_dict(model, state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        t = self.trainer
        if not Path(checkpoint, OPTIMIZER, ".metadata").is_file():
            raise ConfigError(
                f"resume_from_checkpoint: {checkpoint} has no whole {OPTIMIZER}/; it was cut off, or written "
                f"under save_only_model=True"
            )
        state = get_optimizer_state_dict(t.model, inner(t.optimizer))
        dcp.load(state, checkpoint_id=Path(checkpoint, OPTIMIZER))
        set_optimizer_state_dict(t.model, inner(t.optimizer), state)
        t.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER), weights_only=True))

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.trainer.state.best_model_checkpoint)


def inner(optimizer: Any) -> torch.optim.Optimizer:
    """torch's optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def by_mesh(group: dict[str, Any]) -> list[dict[str, Any]]:
    """A group of parameters divided into one group a mesh, in the order of the meshes' first parameters."""
    parts: dict[Any, list[Tensor]] = {}
    for p in group["params"]:
        parts.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return [group | dict(params=params) for params in parts.values()]
