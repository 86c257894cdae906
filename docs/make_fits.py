"""Draws the table of docs/finetune.md: which finetunes fit on one GPU and on eight, by the dry run's formula.

PYTHONPATH=. python docs/make_fits.py
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tmoe.config.axes import Axes
from tmoe.config.gpus import GPUS, GpuName, room
from tmoe.config.presets import presets
from tmoe.config.run import Config, LoraConfig
from tmoe.plan.memory import held_at_most

# Memory as nvidia-smi shows it, in bytes: GeForce RTX 4090, L40S, H100 and H200.
# GB -> bytes, and the card of --gpu that has the same kernels
CARDS: dict[int, tuple[float, GpuName]] = {
    24: (GPUS["rtx4090"].memory, "rtx4090"),
    48: (46_068 * 2**20, "rtx4090"),
    80: (GPUS["h100"].memory, "h100"),
    141: (GPUS["h200"].memory, "h200"),
}
TASKS = ("sft", "preference", "grpo")
MARKS = re.compile(r"(<!-- fits -->\n).*?(<!-- end -->)", re.S)
NO = "–"

Change = Callable[[Config], Config]


class Way(NamedTuple):
    """The choice of what is trained: its flags, and the settings that they change."""

    flags: str
    change: Change


def _freeze(cfg: Config) -> Config:
    return replace(cfg, optim=replace(cfg.optim, freeze="moe.experts"))


def _block(cfg: Config) -> Config:
    return replace(cfg, parallel=replace(cfg.parallel, checkpoint="block"))


def _offload(cfg: Config) -> Config:
    return replace(_block(cfg), optim=replace(cfg.optim, offload=True))


def _adapters(cfg: Config) -> Config:
    return replace(cfg, lora=LoraConfig(rank=16))


def _nf4(cfg: Config) -> Config:
    return replace(cfg, lora=LoraConfig(rank=16, base="nf4"))


def _wide_adapters(cfg: Config) -> Config:
    return replace(cfg, lora=LoraConfig(rank=16, expert_rank=16))


WAYS = (
    Way("all", lambda cfg: cfg),
    Way("`--optim.freeze moe.experts`", _freeze),
    Way("`--lora.rank 16`", _adapters),
    Way("`--lora.rank 16 --lora.base nf4`", _nf4),
    Way("`--lora.rank 16 --lora.expert-rank 16`", _wide_adapters),
)
# The settings of a cell, in the order in which they are tried: none, recomputing, and moments on the host.
SAVING: dict[str, Change] = {"yes": lambda cfg: cfg, "block": _block, "offload": _offload}


def settings(preset: str, task: str, way: Way) -> Config:
    """A finetune of a preset: sequences of at most 4096 tokens, one at a time."""
    cfg = presets()[preset]
    cfg = replace(
        cfg, task=task, train=replace(cfg.train, batch=1), grpo=replace(cfg.grpo, rewards=("exact",))
    )
    return way.change(cfg)


def axes_of(cfg: Config, ranks: int) -> Axes:
    """The ranks divide the experts; ranks that each hold the whole base in NF4 divide the batch."""
    return Axes(ep=ranks) if cfg.lora.base == "whole" else Axes(dp=ranks)


def cell(cfg: Config, ranks: int, memory: float, gpu: GpuName) -> str:
    """The first of SAVING with which the run fits on this many GPUs of this memory; NO if none does."""
    cfg = replace(cfg, gpu=gpu)
    for name, change in SAVING.items():
        if held_at_most(change(cfg), axes_of(cfg, ranks)) <= room(memory):
            return name
    return NO


def rows(names: Iterable[str]) -> Iterator[list[str]]:
    """A row for each of these presets, for what is trained, and for tasks with the same cells.

    Rows that fit nowhere are left out.
    """
    for preset in names:
        for way in WAYS:
            cells = {}
            for task in TASKS:
                cfg = settings(preset, task, way)
                cells[task] = tuple(cell(cfg, ranks, *card) for ranks in (1, 8) for card in CARDS.values())
            for same, tasks in groupby(TASKS, cells.__getitem__):
                if {*same} != {NO}:
                    yield [preset, way.flags, ", ".join(tasks), *same]


def table() -> str:
    """The table in Markdown."""
    head = ["preset", "trained", "task", *(f"{GB} GB" for GB in CARDS), *(f"8 × {GB} GB" for GB in CARDS)]
    lines = [head, ["---"] * len(head), *rows(name for name in presets() if name != "tiny")]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def drawn(text: str) -> str:
    """The page with the table of this version between its marks."""
    return MARKS.sub(lambda found: f"{found[1]}{table()}\n{found[2]}", text)


if __name__ == "__main__":
    PAGE = Path(__file__).with_name("finetune.md")
    PAGE.write_text(drawn(PAGE.read_text()))
