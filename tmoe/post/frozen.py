"""A frozen copy of the weights that a run began with, kept while the model is trained.

next: post/grpo.py
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from tmoe.checkpoint.checkpoints import Checkpoints
from tmoe.config.run import Config
from tmoe.hf.load_weights import load_weights
from tmoe.model.transformer import Transformer
from tmoe.optim.ema import Ema
from tmoe.parallel.copies import make_stale
from tmoe.parallel.mesh import local_part


class FrozenWeights:
    """The weights of --init, or the weights drawn from the seed: typed and laid out as the model's own.

    Weights that --optim.freeze freezes are not kept twice. A collective. A resumed run has other weights than
    it began with: the first weights are then read, or drawn, again, while the present ones are kept on the
    host.
    """

    def __init__(self, model: Transformer, cfg: Config, step: int) -> None:
        """step: number of steps that the run has done."""
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        if step == 0:
            self.weights = kept(model, trained)
            return
        now = {name: host_copy(p) for name, p in model.named_parameters()}
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        if cfg.init:
            reader = Checkpoints(Path(cfg.out) / "checkpoints", keep=0, mode="sync", info={})
            load_weights(Path(cfg.init), reader, model.state_dict(), cfg.model)
        else:
            model.init_weights(cfg.seed)
        # a weight that is frozen now may have been trained before the run was resumed
        parameters = dict(model.named_parameters())
        moved = {name for name, old in now.items() if not torch.equal(old, host_copy(parameters[name]))}
        self.weights = kept(model, trained | moved)
        with torch.no_grad():
            for name, b in model.named_buffers():
                b.copy_(buffers[name])
            for name, p in parameters.items():
                local_part(p).copy_(now[name])
        make_stale(model.parameters())

    def in_place(self) -> AbstractContextManager[None]:
        """Inside, the model computes with these weights."""
        return self.weights.swapped()


def kept(model: Transformer, names: set[str]) -> Ema:
    """Copies of these weights."""
    return Ema(((name, p) for name, p in model.named_parameters() if name in names), 0.0, dtype=None)


def host_copy(p: Tensor) -> Tensor:
    """This rank's part of a parameter, on the CPU."""
    return local_part(p).detach().to("cpu", copy=True)
