"""Converts Hugging Face folders to step folders, and step folders to Hugging Face folders.

    python -m tmoe.hf import HF_DIR STEP_DIR                    a step for `train.py PRESET --init STEP_DIR`
    python -m tmoe.hf import HF_DIR STEP_DIR --world 64 --ep 8  the same, in files for 64 ranks
    python -m tmoe.hf export STEP_DIR HF_DIR                    from_pretrained loads it
    python -m tmoe.hf export STEP_DIR HF_DIR --like ORIGINAL    config, tokenizer and files as in ORIGINAL
    python -m tmoe.hf export STEP_DIR HF_DIR --quantize int4    matrices in 4 bits, as compressed-tensors
    python -m tmoe.hf export STEP_DIR HF_DIR --push OWNER/NAME  the same, and uploads it to the hub
    python -m tmoe.hf gguf STEP_DIR X.gguf --type q4_k_m        a file for llama.cpp
    python -m tmoe.hf import X.gguf STEP_DIR                    a step of its weights, as fp32
    python -m tmoe.hf recover DCP_DIR OUT ORIGINAL              a Hugging Face folder from a DCP folder
    python -m tmoe.hf import-adapter PEFT_DIR STEP_DIR --base HF_DIR  a step of PEFT's adapter
    python -m tmoe.hf export-adapter STEP_DIR PEFT_DIR          PEFT's files from a step of adapters
    python -m tmoe.hf merge STEP_DIR HF_DIR                     base and adapters in one model, --quantize too
    python -m tmoe.hf families                                  which MoE families of transformers work here

Exit codes: 0: done; 2: refused, with the reason on stderr; 1: failed or interrupted. If a command is
killed, running it again resumes it. Memory is that of a few tensors. Weights in a step folder are fp32, as in
training, which holds bf16 and fp16 exactly; an export gives every tensor its original type, or matrices the
type of --quantize. A step folder also stores the files of HF_DIR that are not weights, as tensors
hf.file.NAME of bytes.

`train.py --init HF_DIR` needs no import: hf/load_weights.py reads each rank's part directly from HF_DIR.

next: hf/rules.py, hf/architectures/__init__.py, hf/config.py, hf/tensor_plan.py, hf/files.py, hf/export.py,
extras/recover.py, extras/gguf/command.py, hf/adapters/commands.py, hf/swap.py
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.filesize import decimal
from torch import Tensor

from tmoe.base.listing import listed
from tmoe.base.versions import versions
from tmoe.checkpoint.errors import refuse
from tmoe.checkpoint.manifest import Manifest
from tmoe.checkpoint.resume import require_same_run
from tmoe.checkpoint.rewrite import Output, Plan, check_space, keeping, rewrite
from tmoe.config.axes import ALONE, Axes
from tmoe.config.check import spelt
from tmoe.config.compare import build_config
from tmoe.config.model import MTPConfig
from tmoe.hf.export import export_hf
from tmoe.hf.files import EXTRA, FILE, LAYOUT, MODEL, Folder, fill, untied
from tmoe.hf.foreign import CONFIG, is_folder
from tmoe.hf.hub_folders import folder_of
from tmoe.hf.load_weights import load_hf, load_weights
from tmoe.hf.packed import unpacked
from tmoe.hf.rules import TensorPiece
from tmoe.hf.swap import swap_experts
from tmoe.hf.tensor_plan import plan_folder
from tmoe.hf.tokenizer_files import carried_by
from tmoe.model.shapes import model_shapes
from tmoe.parallel.layout import Box, axes_of_flags, lay_out

__all__ = [
    "export_hf",
    "import_hf",
    "is_folder",
    "load_hf",
    "load_weights",
    "require_same_run",
    "swap_experts",
]


# ---- import ----


def import_hf(
    hf_dir: Annotated[Path, tyro.conf.arg(metavar="HF_DIR")],
    step_dir: Annotated[Path, tyro.conf.arg(metavar="STEP_DIR")],
    /,
    *,
    world: int = 1,
    ep: int = 1,
    mtp: int = 0,
    dry_run: bool = False,
) -> None:
    """Write a step folder from a Hugging Face folder. If the command is killed, running it again resumes it.

    Args:
        hf_dir: folder with config.json and safetensors, or a name on the hub
        step_dir: a new folder
        world: number of ranks that will load it; any other number of ranks can load it too
        ep: number of ranks of an expert group
        mtp: number of blocks that predict further tokens, to be trained (--model.mtp.depth); others are kept
            unchanged for an export
        dry_run: check everything, write nothing
    """
    axes = axes_of_flags(world, ep)
    hf_dir = folder_of(hf_dir)
    plan = plan_import(hf_dir, axes, mtp)
    needed, free = check_space(plan, step_dir)
    if not dry_run:
        with keeping(step_dir):
            rewrite(plan, step_dir)
    done = "nothing written" if dry_run else "verified"
    print(f"{step_dir}: {len(plan.outputs)} tensors, {decimal(needed)} of {decimal(free)} free; {done}")
    model = build_config(plan.manifest.info["config"]["model"])
    if model.moe.untrained and any(map(model.is_moe, range(model.layers))):
        print(f"note: {spelt(model.moe.untrained)}")
    if packed := plan.manifest.info["packed"]:
        print(f"{hf_dir}: {unpacked(packed)}")
    if plan.manifest.info["own_head"]:
        print(f"{untied(hf_dir)}; an export's {CONFIG} states this")
    unread = [output.name.removeprefix(EXTRA) for output in plan.outputs if output.name.startswith(EXTRA)]
    if unread:
        kinds = Counter(re.sub(r"experts\.\d+", "experts.*", name) for name in unread)
        head = f"{len(unread)} tensors that tmoe does not compute with are kept unchanged for an export:"
        print(listed(head, [name + (f" ({count})" if count > 1 else "") for name, count in kinds.items()]))


def plan_import(hf_dir: Path, axes: Axes = ALONE, mtp: int = 0) -> Plan:
    """The plan of `import`.

    ConfigError for settings that tmoe does not compute. MismatchError lists every tensor that does not fit.
    """
    folder = Folder(Path(hf_dir))
    arch, cfg, pieces, _, extra, problems, held = plan_folder(folder, MTPConfig(mtp))
    refuse(f"{hf_dir} is no whole {arch.model_type}", problems)

    # The outputs are the model's tensors, then the entries from which an export restores the original.
    shapes = {MODEL + name: shape for name, shape in model_shapes(cfg).items()}
    outputs = [Output(name, shapes[name], torch.float32, *lay) for name, lay in lay_out(shapes, axes).items()]
    carried: dict[str, Callable[[], Tensor]] = {
        FILE + name: partial(_content, folder, name) for name in folder.others()
    }
    carried |= {EXTRA + name: partial(folder.whole, name) for name in extra}
    carried[LAYOUT] = partial(_as_tensor, json.dumps(folder.layout).encode())
    outputs += [_carried_output(name, load()) for name, load in carried.items()]
    manifest = Manifest(
        step=0,
        tokens=0,
        world=axes.world,
        saved_ns=0,
        info=dict(
            config=dict(model=asdict(cfg)),
            versions=versions(),
            hf=arch.model_type,
            packed=folder.packed,
            own_head=folder.own_head,
            held=sorted(held),
        ),
        state=dict(step=0, tokens=0),
        files={},
        tensors={},
    )
    # `reshard --only model` drops the files. These entries still name the tokenizer and the template.
    if (known := carried_by(folder.path)) and known.fingerprint:
        manifest.info["data"] = dict(tokenizer=known.fingerprint)
    if known and known.chat:
        manifest.info["chat"] = known.chat.as_json()
    read = sorted({*folder.stored_in.values(), *folder.others()})
    stats = ((name, (folder.path / name).stat()) for name in read)
    stamps = tuple(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
    return Plan(tuple(outputs), partial(_imported, folder, pieces, carried), manifest, stamps)


def _imported(
    folder: Folder,
    pieces: dict[str, list[TensorPiece]],
    carried: dict[str, Callable[[], Tensor]],
    output: Output,
) -> Iterator[Tensor]:
    """The contents of one tensor's boxes: copied unchanged, or filled from the folder's tensors."""
    if output.name in carried:
        yield carried[output.name]()
        return
    with folder.reading() as read:
        for box in output.boxes:
            target = torch.empty(box.shape, dtype=output.dtype)
            fill(target, box.offset, pieces[output.name.removeprefix(MODEL)], read)
            yield target


def _carried_output(name: str, tensor: Tensor) -> Output:
    box = Box(0, (0,) * tensor.dim(), tuple(tensor.shape))
    return Output(name, box.shape, tensor.dtype, "replicated", (box,))


def _content(folder: Folder, name: str) -> Tensor:
    return _as_tensor(folder.content(name))


def _as_tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
