"""The model that a run began with, kept beside the one that is trained.

next: post/grpo.py
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import torch

from tmoe.checkpoint.checkpoints import Checkpoints
from tmoe.config.run import Config
from tmoe.hf.start import load_weights
from tmoe.model.transformer import Transformer
from tmoe.optim.ema import Ema
from tmoe.parallel.copies import make_stale


class Frozen:
    """The weights of --init, or those drawn from the seed: fp32, laid out as the model's own are.

    A collective. Where a run goes on, its weights have moved: then the first ones are read, or drawn, again.
    """

    def __init__(self, model: Transformer, cfg: Config, step: int) -> None:
        """step: the steps that the run has done."""
        if step == 0:
            self.weights = Ema(model.named_parameters(), 0.0)
            return
        now = Ema(model.named_parameters(), 0.0)
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        if cfg.init:
            reader = Checkpoints(Path(cfg.out) / "checkpoints", keep=0, mode="sync", info={})
            load_weights(Path(cfg.init), reader, model.state_dict(), cfg.model)
        else:
            model.init_weights(cfg.seed)
        self.weights = Ema(model.named_parameters(), 0.0)
        with torch.no_grad():
            for name, b in model.named_buffers():
                b.copy_(buffers[name])
            for name, p in model.named_parameters():
                p.copy_(now.tensors()[name])
        make_stale(model.parameters())

    def in_place(self) -> AbstractContextManager[None]:
        """Inside, the model computes with these weights."""
        return self.weights.swapped()
