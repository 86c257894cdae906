"""Logs of invented runs, for the tests of log/metrics.py and of log/report.py."""

from collections import namedtuple

import torch

from tmoe.config.model import ModelConfig, MoEConfig
from tmoe.config.run import Config, LogConfig, ParallelConfig, TrainConfig
from tmoe.log.metrics import Metrics
from tmoe.log.progress import Silent

Stats = namedtuple("Stats", "counts_LE entropy_L dropped_L dropped_LE bias_LE losses_LX")


def config(path, steps=10, eval_every=0, **log) -> Config:
    model = ModelConfig(layers=3, moe=MoEConfig(experts=6, top_k=2))
    quiet = {"progress": False} | log
    parts = dict(
        model=model,
        parallel=ParallelConfig(ep=2),
        train=TrainConfig(eval_every=eval_every),
        log=LogConfig(**quiet),
    )
    return Config(out=str(path), steps=steps, compile=False, **parts)


def start(cfg, *, rank=0, start_step=0, peak=None, facts=None) -> Metrics:
    cpu = torch.device("cpu")
    common = dict(rank=rank, world=4, device=cpu, flops_per_token=2e9, versions={"torch": "x"}, facts=facts)
    log = Metrics(cfg, peak=peak, start_step=start_step, **common)
    if log.display is not None and not cfg.log.progress:  # then a test reads only notes on stdout
        log.display.shown = Silent(cfg, start_step)
    return log


def stats(counts_LE: torch.Tensor, entropy_L: torch.Tensor, dropped_L: torch.Tensor) -> Stats:
    """The router statistics of a log line; all dropped pairs are of a layer's first expert."""
    dropped_LE = torch.zeros_like(counts_LE)
    dropped_LE[:, 0] = dropped_L
    losses_LX = torch.ones(len(counts_LE), 2)  # sequence, z
    return Stats(counts_LE, entropy_L, dropped_L, dropped_LE, torch.zeros_like(counts_LE), losses_LX)


def routers(seed: int, layers=3, experts=6) -> Stats:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 1000, (layers, experts), generator=generator).float()
    return stats(counts, torch.rand(layers, generator=generator), torch.arange(layers).float())


def step(log: Metrics, number: int, val_loss: float | None = None, **values) -> None:
    loss, norm = torch.tensor(10.0 / (number + 1)), torch.tensor(1.5)
    given = dict(loss=loss, grad_norm=norm, lr=1e-3, tokens=100 * (number + 1), router=routers(number))
    log.log(number, **(given | values))
    if val_loss is not None:
        log.validated(val_loss)
