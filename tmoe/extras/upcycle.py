"""Converts a dense model's step folder to a Mixture-of-Experts step folder that computes the same function.

    python -m tmoe.upcycle DENSE_STEP MOE_STEP --experts 8 --top-k 2
        8 copies of the feed-forward, of which a token uses 2
    python -m tmoe.upcycle DENSE_STEP MOE_STEP --experts 64 --granularity 8 --top-k 8
        each copy cut into 8 experts
    torchrun --nproc-per-node 8 train.py ... --init MOE_STEP

DENSE_STEP is a step that training saved, or that `python -m tmoe.hf import` made from a Llama, Mistral, Qwen2
(2.5) or Qwen3. No GPU is needed.
Each feed-forward of hidden width F0 is cut into G (granularity) slices of F0/G, and the slices are repeated
E/G times: expert e is slice e mod G. Experts iG to (i+1)G - 1, one whole copy, are a virtual group: they
share a router row, drawn from the seed, so they get equal logits and are chosen together (He et al. 2024,
"Upcycling large language models into mixture of experts", arXiv:2410.07524; Megatron-Core's
upcycling_utils.py).

The model computes the dense function, for any router, if
  1. K (top-k) is a multiple of G, so that whole groups are chosen. Any other K is refused, because it would
     leave out parts of the feed-forward.
  2. the K weights sum to 1 (--renormalize, the default). Each slice then has a summed weight of 1/G, and so
     `down` is multiplied by G.
With --no-renormalize (OLMoE's router) the weights are shares of all E experts, and `down` is multiplied by
E G / K instead. The function is then exact if the router's logits are equal, and close to it at the start of
training. Megatron multiplies gate, up and down each by the cube root of the factor, which changes the
function of SwiGLU; the factor in `down` alone is exact.

Exit codes: 0: done; 2: refused, with the reason on stderr; 1: failed or interrupted. If the command is
killed, running it again resumes it. Memory is that of a few tensors. Only the weights are used, as fp32;
optimizer state and averages of a dense model are of no use.

next: checkpoint/rewrite.py
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor

from tmoe.base.versions import versions
from tmoe.checkpoint import folders
from tmoe.checkpoint.base import refuse_adapters
from tmoe.checkpoint.errors import refuse
from tmoe.checkpoint.manifest import CheckpointError, Manifest, TensorEntry, dtype_of, read_manifest
from tmoe.checkpoint.plans import carry_out, check_sizes, origin_of, with_history
from tmoe.checkpoint.rewrite import Output, Plan, read_boxes
from tmoe.checkpoint.tools import commands
from tmoe.config.axes import ALONE, Axes
from tmoe.config.check import Setting, require
from tmoe.config.compare import build_config
from tmoe.config.model import ModelConfig, MoEConfig
from tmoe.hf.files import CONFIG, FILE, INDEX, MODEL
from tmoe.model.shapes import model_shapes
from tmoe.parallel.layout import Box, axes_of_flags, lay_out


def upcycle(
    dense: Annotated[Path, tyro.conf.arg(metavar="DENSE_STEP")],
    moe: Annotated[Path, tyro.conf.arg(metavar="MOE_STEP")],
    /,
    *,
    experts: int,
    top_k: int,
    granularity: int = 1,
    renormalize: bool = True,
    dense_layers: int = 0,
    moe_every: int = 1,
    seed: int = 0,
    world: int = 1,
    ep: int = 1,
    dry_run: bool = False,
) -> None:
    """Write a Mixture-of-Experts step folder that computes the same function as a dense step folder.
    If the command is killed, running it again resumes it.

    Args:
        dense: step folder of a dense model
        moe: a new folder
        experts: number of experts, E; a multiple of granularity
        top_k: experts per token, K; a multiple of granularity
        granularity: number of experts into which a copy of a feed-forward is cut, G; divides its hidden width
        renormalize: make the K weights sum to 1; without this the function is only close to the dense one. At
            K=1 the loss trains the routers only with --no-renormalize
        dense_layers: number of leading blocks that stay dense
        moe_every: after the leading dense blocks, the first and then every n-th block becomes an MoE block
        seed: seed of the routers' weights
        world: number of ranks that will load it; any other number of ranks can load it too
        ep: number of ranks of an expert group
        dry_run: check everything, write nothing
    """
    dense = folders.resolve(dense)
    plan = plan_upcycle(
        dense,
        experts=experts,
        top_k=top_k,
        granularity=granularity,
        renormalize=renormalize,
        dense_layers=dense_layers,
        moe_every=moe_every,
        seed=seed,
        axes=axes_of_flags(world, ep),
    )
    carry_out(plan, [dense], moe, dry_run)
    if top_k == 1 and renormalize and experts > 1:
        print(
            "note: --top-k=1 with --renormalize: a token's only weight is always 1, so balancing losses "
            "alone will train the routers; with --no-renormalize the loss does"
        )


def plan_upcycle(
    dense: Path,
    *,
    experts: int,
    top_k: int,
    granularity: int = 1,
    renormalize: bool = True,
    dense_layers: int = 0,
    moe_every: int = 1,
    seed: int = 0,
    axes: Axes = ALONE,
) -> Plan:
    """The plan of `upcycle`.

    ConfigError names the setting that cannot work. MismatchError lists every tensor that is not the dense
    model's. CheckpointError if `dense` is damaged or its manifest has no model settings.
    """
    manifest = read_manifest(dense)
    refuse_adapters(dense, manifest)
    before = _dense_config(dense, manifest)

    # Make the settings of the new model.
    require(granularity >= 1, "granularity", granularity, "must be at least 1")
    divides = f"must divide the dense hidden width, model.ffn_dim={before.ffn_dim}"
    require(before.ffn_dim % granularity == 0, "granularity", granularity, divides)
    multiple = f"must be a positive multiple of {Setting('granularity', granularity)}"
    for name, value in (("experts", experts), ("top_k", top_k)):
        require(value >= 1 and value % granularity == 0, name, value, multiple)
    require(top_k <= experts, "top_k", top_k, f"must be at most {Setting('experts', experts)}")
    width = before.ffn_dim // granularity
    moe = MoEConfig(experts=experts, top_k=top_k, ffn_dim=width, renormalize=renormalize)
    after = replace(before, moe=moe, dense_layers=dense_layers, moe_every=moe_every, dense_blocks=())
    some = any(map(after.is_moe, range(after.layers)))
    require(some, "dense_layers", dense_layers, f"none of the {after.layers} blocks would be an MoE")

    # Find the inputs: the dense weights, and files of an original that still fit (config and index do not).
    weights = {name.removeprefix(MODEL): e for name, e in manifest.tensors.items() if name.startswith(MODEL)}
    refuse(f"{dense} does not hold its dense model", _unfit(weights, model_shapes(before)))
    carried = {name: e for name, e in manifest.tensors.items() if name.startswith(FILE)}
    carried = {name: e for name, e in carried.items() if name not in (FILE + CONFIG, FILE + INDEX)}
    check_sizes(dense, manifest, carried | weights)

    # Plan the outputs.
    shapes = {MODEL + name: shape for name, shape in model_shapes(after).items()}
    dtypes = {name: dtype_of(entry.dtype) for name, entry in carried.items()}
    layouts = lay_out(shapes | {name: entry.shape for name, entry in carried.items()}, axes)
    outputs = [
        Output(
            name,
            shapes[name] if name in shapes else carried[name].shape,
            dtypes.get(name, torch.float32),
            *layout,
        )
        for name, layout in layouts.items()
    ]
    factor = granularity if renormalize else experts * granularity / top_k
    produce = partial(_upcycled, dense, weights, carried, after, granularity, factor, seed)
    blank = replace(manifest, step=0, tokens=0, world=axes.world, state=dict(step=0, tokens=0))
    options = dict(experts=experts, top_k=top_k, granularity=granularity, renormalize=renormalize, seed=seed)
    history = origin_of("upcycle", [dense], **options)
    config = dict(config=dict(model=asdict(after)), versions=versions())
    chat = {name: value for name, value in manifest.info.items() if name == "chat"}
    return with_history(outputs, produce, blank, history, info=config | chat)


def _dense_config(dense: Path, manifest: Manifest) -> ModelConfig:
    """The settings of the dense model.

    CheckpointError if there are none, ConfigError if a block is an MoE block.
    """
    config = manifest.info.get("config")
    settings = config.get("model") if isinstance(config, dict) else None
    if not isinstance(settings, dict):
        raise CheckpointError(
            f"{dense}: its manifest has no model settings; only steps of train.py and tmoe.hf have them"
        )
    cfg = build_config(settings)
    sparse = [layer for layer in range(cfg.layers) if cfg.is_moe(layer)]
    require(
        not sparse, f"{dense}: blocks {sparse} are MoE blocks already; only a dense model can be upcycled"
    )
    gated = cfg.moe.shared_activation == "swiglu" and not cfg.one_branch
    require(gated, f"{dense}: only blocks of attention and a gated feed-forward (swiglu) are upcycled")
    return cfg


def _unfit(weights: dict[str, TensorEntry], want: dict[str, tuple[int, ...]]) -> list[str]:
    """A line for each tensor that is missing, or not one of the model's weights."""
    found = [f"{name}: missing" for name in want.keys() - weights.keys()]
    for name, entry in weights.items():
        if name not in want:
            found.append(f"{name}: no such tensor in this model")
        elif entry.shape != want[name]:
            found.append(f"{name}: shape {entry.shape}, by its settings {want[name]}")
        elif not dtype_of(entry.dtype).is_floating_point:
            found.append(f"{name}: {entry.dtype} is no type of weights")
    return sorted(found)


# ---- contents ----


def _upcycled(
    dense: Path,
    weights: dict[str, TensorEntry],
    carried: dict[str, TensorEntry],
    cfg: ModelConfig,
    granularity: int,
    factor: float,
    seed: int,
    output: Output,
) -> Iterator[Tensor]:
    """The contents of the output's boxes: copied files, drawn router rows, slices of experts, or weights."""
    if output.name in carried:
        return read_boxes(dense, carried[output.name], output.boxes)
    name = output.name.removeprefix(MODEL)
    block, _, part = name.partition(".moe.")
    if part == "router.weight":
        full = router(output.shape, granularity, cfg.init_std, f"{seed}:{name}")
        return (full[_slices(box)] for box in output.boxes)
    F = cfg.moe.ffn_dim
    F0 = cfg.ffn_dim
    if part == "experts.gate_up":
        entry = weights[f"{block}.ffn.gate_up.weight"]
        return _experts(
            dense, entry, output, 1, granularity, lambda g: [(0, g * F, F), (F, F0 + g * F, F)], 1.0
        )
    if part == "experts.down":
        entry = weights[f"{block}.ffn.down.weight"]
        return _experts(dense, entry, output, 2, granularity, lambda g: [(0, g * F, F)], factor)
    return (tensor.float() for tensor in read_boxes(dense, weights[name], output.boxes))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + n) for start, n in zip(box.offset, box.shape, strict=True))


def router(shape: tuple[int, ...], granularity: int, std: float, seed: str) -> Tensor:
    """Weights [E, D] of a router: E/G normal rows of deviation `std`, each repeated G times.

    The repetition makes the logits of a group equal.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    rows = torch.empty(shape[0] // granularity, shape[1]).normal_(0.0, std, generator=generator)
    return rows.repeat_interleave(granularity, 0)


def _experts(
    dense: Path,
    entry: TensorEntry,
    output: Output,
    axis: int,
    granularity: int,
    cuts: Callable[[int], list[tuple[int, int, int]]],
    factor: float,
) -> Iterator[Tensor]:
    """Boxes of a stack of experts, cut from a dense tensor and multiplied by `factor`.

    axis: the axis of the stack along which the dense tensor is cut; in the dense tensor it is axis - 1.
    cuts: cuts(g) gives for slice g (start in the expert, start in the dense tensor, length) of each part.
    """
    plans = [list(_sources(box, axis, granularity, cuts)) for box in output.boxes]
    contents = read_boxes(dense, entry, tuple(source for plan in plans for _, source in plan))
    for box, plan in zip(output.boxes, plans, strict=True):
        stack = torch.empty(box.shape)
        for target, _ in plan:
            stack[target] = next(contents)
        yield stack.mul_(factor)
        del stack  # free it before the next stack is made


def _sources(
    box: Box, axis: int, granularity: int, cuts: Callable[[int], list[tuple[int, int, int]]]
) -> Iterator[tuple[tuple[slice | int, ...], Box]]:
    """The parts that fill a box of the stack: (place in the box, box of the dense tensor) for each part."""
    for row in range(box.shape[0]):
        for start, source, length in cuts((box.offset[0] + row) % granularity):
            low = max(start, box.offset[axis])
            high = min(start + length, box.offset[axis] + box.shape[axis])
            if low < high:
                target: list[slice | int] = [row, slice(None), slice(None)]
                target[axis] = slice(low - box.offset[axis], high - box.offset[axis])
                offset = list(box.offset[1:])
                shape = list(box.shape[1:])
                offset[axis - 1] = source + low - start
                shape[axis - 1] = high - low
                yield tuple(target), Box(0, tuple(offset), tuple(shape))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line. An error ends the process with one message."""
    commands(upcycle, "python -m tmoe.upcycle", __doc__, argv)
