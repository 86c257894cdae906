"""The dry run: what a rank will hold, for any world, before a GPU is rented.

The model is built on the meta device and laid out over a fake process group by the very code that trains, so
placements and local shapes are the real ones; only activations are a closed form (run/memory.py).
"""

from collections import defaultdict

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Column, Table
from torch.distributed.tensor import DTensor

from tmoe.config.run import Config
from tmoe.model.count import count_parameters, flops_per_token
from tmoe.model.parallelize import parallelize
from tmoe.model.transformer import Transformer
from tmoe.parallel.mesh import build_mesh, local_part
from tmoe.run.memory import memory_per_rank, peak_bytes
from tmoe.stack import TESTED, find


def dry_run(cfg: Config) -> None:
    """Prints counts of parameters, where each group lies, and bytes on rank 0 of `cfg.world` ranks."""
    # The "fake" backend can be had by this private name alone.
    FakeStore = find("torch.testing._internal.distributed.fake_pg.FakeStore")
    if FakeStore is None:
        message = (
            f"--dry-run: torch {torch.__version__} has no fake process group; tmoe was tested with {TESTED}"
        )
        raise SystemExit(f"error: {message}")
    world = cfg.world or (cfg.parallel.dp or 1) * cfg.parallel.ep
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    mesh = build_mesh(cfg.parallel.dp, cfg.parallel.ep, ep_across_nodes=True)
    with torch.device("meta"):
        model = Transformer(cfg.model)
    parallelize(model, mesh, cfg, whole_forwards=True)
    counts = count_parameters(cfg.model)
    console = Console(width=150)
    console.print(f"{world} ranks: {mesh.axes}")
    console.print(
        f"parameters: {counts.total:,} total, {counts.active:,} active a token; "
        f"{flops_per_token(cfg.model, cfg.train.seq) / 1e9:.3f} GFLOP a token, forward and backward"
    )
    console.print(placements(model))
    console.print(memory(memory_per_rank(cfg, mesh.axes)))
    dist.destroy_process_group()


def placements(model: Transformer) -> Table:
    """A row for parameters of the same name (but for the block's number), shape and placement."""
    groups: dict[tuple, list] = defaultdict(list)
    for name, p in model.state_dict().items():
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        spread = isinstance(p, DTensor)  # the routers' choice biases are plain tensors
        placed = (str(p.placements), str(p.device_mesh.mesh_dim_names)) if spread else ("replicated", "")
        groups[kind, tuple(p.shape), *placed].append(local_part(p))
    table = Table(
        Column("parameter", no_wrap=True),
        "copies",
        "shape",
        "mesh",
        "placement",
        "on rank 0",
        title="placement",
        title_justify="left",
    )
    for (kind, shape, placed, axes), parts in groups.items():
        table.add_row(kind, str(len(parts)), str(list(shape)), axes, placed, str(list(parts[0].shape)))
    return table


def memory(parts: dict[str, int]) -> Table:
    """A row for each of `memory_per_rank`'s parts, in GiB, and what is held at most at one time."""
    table = Table("held by a rank", "GiB", title="memory", title_justify="left")
    for name, size in parts.items():
        table.add_row(name, f"{size / 2**30:.3f}")
    table.add_section()
    most = peak_bytes(parts)
    table.add_row("most at one time", f"{most / 2**30:.3f}")
    if parts["exchange"]:
        table.add_row("of it torch's (peak_gib)", f"{(most - parts['exchange']) / 2**30:.3f}")
    return table
