"""The routed ids of some steps of a run, in RUN/routes: every rank writes its own, any layout reads all.

    ids = read_routes("runs/x/routes", 3)          # of the third step: {block: [sequences, S, K]}

next: tmoe/moe/trace.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from tmoe.base.disk import naming
from tmoe.model.stages import Stages
from tmoe.model.transformer import Transformer
from tmoe.moe.trace import keeping, trace


class Routes:
    """Keeps the choices of the steps that cfg.log.routes names, and writes them after each such step.

    The file that a rank writes for a step holds `ids.BLOCK` [rows, tokens, K] for each of the rank's MoE
    blocks; `rows`, the indices of these sequences in the step's global batch; and `tokens`, their positions
    in the sequence.
    """

    def __init__(self, steps: tuple[int, ...], out: str, model: Transformer | Stages, rank: int):
        self.steps = steps
        self.folder = Path(out, "routes")
        self.parts = [*model] if isinstance(model, Stages) else [model]
        self.rank = rank
        self.inside = ExitStack()
        for part in self.parts if steps else []:
            trace(part)  # from the first step on, so that all steps use one compiled graph

    def begin(self, step: int) -> None:
        """Called before a step. `step` is counted from 0, as in the loop; file names count from 1."""
        if step + 1 in self.steps:
            self.kept = [self.inside.enter_context(keeping(part)) for part in self.parts]

    def end(self, step: int, seq: int, batch: int, readers: int, reader: int) -> None:
        """Called after a step: writes the choices that were kept.

        step: from 0.
        seq: tokens of a sequence.
        batch: sequences of a micro-batch of one rank.
        readers, reader: how many ranks, or groups of them, read their own sequences, and this one's index.
        """
        if step + 1 not in self.steps:
            return
        self.inside.close()
        calls = max(map(len, self.kept))
        rows = [(call * readers + reader) * batch + row for call in range(calls) for row in range(batch)]
        arrays = {}
        for part, choices in zip(self.parts, self.kept, strict=True):
            if not choices:  # all blocks of a pipeline stage may be dense
                continue
            blocks = [name for name, block in part.blocks.named_children() if block.moe is not None]
            place = next(part.parameters()).device
            tokens = part.own(torch.arange(seq, device=place)[None])[0].cpu().numpy()
            for i, block in enumerate(blocks):
                ids = torch.cat([rearrange(call[i], "(b s) k -> b s k", b=batch) for call in choices])
                arrays[f"ids.{block}"] = ids.cpu().numpy().astype(np.int16 if ids.max() < 2**15 else np.int32)
            arrays |= {"rows": np.array(rows), "tokens": tokens.astype(np.int64)}
        self.kept = []
        if not arrays:
            return
        step += 1
        facts = dict(step=step, sequences=calls * readers * batch, seq=seq)
        write(self.folder / f"step-{step}.rank-{self.rank}.safetensors", arrays, facts)


def write(path: Path, arrays: dict[str, np.ndarray], told: dict[str, Any]) -> None:
    """Writes a safetensors file, which is either whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    with naming(aside), open(aside, "wb") as file:
        file.write(save(arrays, {"routes": json.dumps(told)}))
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def read_routes(folder: Path | str, step: int) -> dict[int, Tensor]:
    """The choices of a step's global batch: block to int32 [sequences, S, K], -1 for no expert.

    Sequences are ordered as in the step: by micro-batch, and within a micro-batch by reader. For a replay,
    give `replaying` the choices of a rank's own tokens, [block][rows][:, tokens] for each MoE block.
    Raises ValueError if files of the step are missing or incomplete.
    """
    routes: dict[int, Tensor] = {}
    paths = sorted(Path(folder).glob(f"step-{step}.rank-*.safetensors"))
    if not paths:
        known = sorted({path.name.split(".")[0] for path in Path(folder).glob("step-*.safetensors")})
        raise ValueError(f"{folder}: has no step-{step}; valid: {', '.join(known) or 'no step was traced'}")
    for path in paths:
        for block, ids, rows, tokens, shape in _parts(path):
            whole = routes.setdefault(block, torch.full((*shape, ids.shape[-1]), -2, dtype=torch.int32))
            whole[rows[:, None], tokens] = ids
    for block, ids in routes.items():
        missing = (ids == -2).any(-1)
        if missing.any():
            row = missing.any(1).nonzero()[0].item()
            raise ValueError(f"{folder}: step-{step} lacks a rank's file: block {block}, sequence {row}")
    return dict(sorted(routes.items()))


def _parts(path: Path) -> Iterator[tuple[int, Tensor, Tensor, Tensor, tuple[int, int]]]:
    """Yields for each block in a rank's file: number, ids, rows, tokens, and the step's (sequences, seq)."""
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads(file.metadata()["routes"])
            shape = int(facts["sequences"]), int(facts["seq"])
            rows, tokens = file.get_tensor("rows"), file.get_tensor("tokens")
            for name in file.keys():  # noqa: SIM118 (no mapping)
                if name.startswith("ids."):
                    yield int(name[4:]), file.get_tensor(name).int(), rows, tokens, shape
    except (SafetensorError, KeyError, ValueError, TypeError, IndexError) as error:
        raise ValueError(f"{path}: no routes of a run: {error}") from error
