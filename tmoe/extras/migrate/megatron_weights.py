"""Makes a step folder from a torch_dist checkpoint of Megatron-Core.

    python -m tmoe.migrate import megatron CKPT STEP -- THEIR FLAGS
    python train.py ... --init STEP

The flags of the run define the model. The checkpoint's own copy of them is a pickle of Megatron's classes and
is not read. Only the weights are read, in the type in which the model computed, and stored as fp32. Every
tensor of the model must exist with its shape, and no tensor may be left over: nothing is filled with zeros.

Megatron orders the rows of linear_qkv by groups: the queries of a group, its key, its value. tmoe has all
queries, then all keys, then all values. In both, linear_fc1 has the gate rows above the up rows.

next: tmoe/checkpoint/stock.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tmoe.base.versions import versions
from tmoe.checkpoint.errors import refuse
from tmoe.checkpoint.manifest import CheckpointError, Manifest
from tmoe.checkpoint.rewrite import Output, Plan
from tmoe.checkpoint.stock import StockFolder, backend_of
from tmoe.config.axes import ALONE
from tmoe.config.model import ModelConfig
from tmoe.hf.files import MODEL
from tmoe.model.shapes import model_shapes
from tmoe.parallel.layout import lay_out

LATEST = "latest_checkpointed_iteration.txt"
ROAD = (
    "save it once as torch_dist, by Megatron itself: its command with --load {path} --ckpt-convert-format "
    "torch_dist --ckpt-convert-save NEW"
)
LAYER = "decoder.layers."
# tmoe's tensors of a block -> Megatron's names, of which the first that exists is used.
BLOCK: dict[str, tuple[str, ...]] = {
    "attention_norm.weight": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "attention.qkv.weight": ("self_attention.linear_qkv.weight",),
    "attention.qkv.bias": ("self_attention.linear_qkv.bias",),
    "attention.o.weight": ("self_attention.linear_proj.weight",),
    "attention.q_norm.weight": ("self_attention.q_layernorm.weight",),
    "attention.k_norm.weight": ("self_attention.k_layernorm.weight",),
    "ffn_norm.weight": ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    "ffn.gate_up.weight": ("mlp.linear_fc1.weight",),
    "ffn.down.weight": ("mlp.linear_fc2.weight",),
    "moe.router.weight": ("mlp.router.weight",),
    "moe.router.choice_bias": ("mlp.router.expert_bias",),
    "moe.experts.gate_up": ("mlp.experts.experts.linear_fc1.weight",),
    "moe.experts.down": ("mlp.experts.experts.linear_fc2.weight",),
    "moe.shared.gate_up.weight": ("mlp.shared_experts.linear_fc1.weight",),
    "moe.shared.down.weight": ("mlp.shared_experts.linear_fc2.weight",),
    "moe.shared_gate.weight": ("mlp.shared_experts.gate_weight",),
}
ROOT = {
    "embedding.weight": "embedding.word_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "head.weight": "output_layer.weight",
}
THEIRS = "embedding.", "decoder.", "output_layer.", "mtp."  # beginnings of the names of the model's tensors


def find_step(path: Path) -> Path:
    """The folder of the newest iteration of a run, or of one iteration.

    CheckpointError, with advice, if it is not in the format torch_dist.
    """
    if (path / LATEST).is_file():
        latest = (path / LATEST).read_text().strip()
        path = path / (f"iter_{int(latest):07}" if latest.isdigit() and len(latest) < 19 else "release")
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    backend = backend_of(path)
    if backend == "torch_dist":
        return path
    if backend:
        road = ROAD.format(path=path)
        raise CheckpointError(f"{path}: of Megatron's format {backend}, only torch_dist is read; {road}")
    if any(path.glob("mp_rank_*")):
        raise CheckpointError(f"{path}: of Megatron's old format (mp_rank_*); {ROAD.format(path=path)}")
    raise CheckpointError(f"{path}: no checkpoint of Megatron: has neither {LATEST} nor metadata.json")


def plan_import(path: Path, model: ModelConfig) -> Plan:
    """The plan of the step folder.

    MismatchError lists every tensor that is missing, left over or of another shape.
    """
    if model.attention == "mla":
        raise CheckpointError(
            f"{path}: of latent attention, whose layout tmoe does not know; export it to Hugging Face with "
            "Megatron-Bridge, and import that: python -m tmoe.hf import"
        )
    if model.mtp.depth:
        raise CheckpointError(
            f"{path}: --mtp-num-layers={model.mtp.depth}: blocks of further tokens, whose layout tmoe does "
            "not know; export it to Hugging Face with Megatron-Bridge, and import that"
        )
    if model.linear_layers or model.attention_gate:
        raise CheckpointError(
            f"{path}: with linear layers or gates of attention, whose order of rows tmoe does not know; "
            "export it to Hugging Face with Megatron-Bridge, and import that"
        )
    stock = StockFolder(find_step(path))
    shapes = model_shapes(model)
    places, problems, used = {}, [], set()
    for name, shape in shapes.items():
        place = place_of(name, stock)
        if place is None:
            problems.append(f"{name}: missing in the checkpoint ({', '.join(candidates(name))})")
            continue
        key, row = place
        used.add(key)
        there = stock.tensors[key].shape
        if row is not None and (not there or there[0] != model.layers):
            problems.append(f"{key}: {there}, not of {model.layers} layers")
        elif (there if row is None else there[1:]) != shape:
            problems.append(f"{key}: {there if row is None else there[1:]}, the flags give {shape}")
        places[name] = place
    left = [key for key in stock.tensors if key.startswith(THEIRS) and key not in used]
    problems += [f"{key}: the model of the flags has no such tensor" for key in sorted(left)]
    refuse(f"{stock.path} is not the model of the flags", problems)

    outputs = [
        Output(MODEL + name, shapes[name], torch.float32, *lay)
        for name, lay in lay_out(shapes, ALONE).items()
    ]
    manifest = Manifest(
        step=0,
        tokens=0,
        world=1,
        saved_ns=0,
        info=dict(config=dict(model=asdict(model)), versions=versions(), megatron=str(stock.path)),
        state=dict(step=0, tokens=0),
        files={},
        tensors={},
    )
    return Plan(tuple(outputs), partial(_produce, stock, places, model), manifest, stock.stamps())


def candidates(name: str) -> list[str]:
    """Megatron's names for one of tmoe's tensors; the name of the tensor of all layers is first."""
    if name in ROOT:
        return [ROOT[name]]
    number, rest = block_of(name)
    return [f"{LAYER}{prefix}{end}" for prefix in ("", f"{number}.") for end in BLOCK.get(rest, ())]


def block_of(name: str) -> tuple[int, str]:
    """The number of the block in a tensor's name, and the name within the block."""
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    assert match, name
    return int(match[1]), match[2]


def place_of(name: str, stock: StockFolder) -> tuple[str, int | None] | None:
    """Megatron's tensor and, if it holds all layers, the index of the layer; None if it does not exist."""
    for key in candidates(name):
        if key in stock.tensors:
            stacked = name not in ROOT and not key[len(LAYER) :].partition(".")[0].isdigit()
            return key, block_of(name)[0] if stacked else None
    return None


def _produce(
    stock: StockFolder, places: dict[str, tuple[str, int | None]], model: ModelConfig, output: Output
) -> Iterator[Tensor]:
    name = output.name.removeprefix(MODEL)
    tensor = stock.read(*places[name]).float()
    if ".attention.qkv." in name:
        tensor = ungrouped(tensor, model)
    for box in output.boxes:
        yield tensor[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))].contiguous()


def ungrouped(qkv: Tensor, model: ModelConfig) -> Tensor:
    """The rows of linear_qkv in the order of all queries, all keys, all values."""
    groups, each = model.kv_heads, model.heads // model.kv_heads
    heads = qkv.view(groups, each + 2, model.head_dim, *qkv.shape[1:])
    parts: list[Tensor] = [heads[:, :each], heads[:, each], heads[:, each + 1]]
    flat: Callable[[Tensor], Tensor] = lambda part: part.reshape(-1, *qkv.shape[1:])  # noqa: E731
    return torch.cat([flat(part) for part in parts])
