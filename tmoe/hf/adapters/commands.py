"""The commands on adapters: import-adapter, export-adapter and merge.

    python -m tmoe.hf import-adapter ADAPTER STEP_OUT --base FOLDER   a step from a folder of PEFT's
    python -m tmoe.hf export-adapter STEP OUT                         a folder of PEFT's from a step
    python -m tmoe.hf merge STEP OUT                                  a Hugging Face folder: base and adapters
    python -m tmoe.hf merge STEP OUT --quantize int4                  the same in compressed-tensors' format

next: hf/adapters/read.py, hf/adapters/write.py, hf/adapters/merge.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.filesize import decimal
from torch import Tensor

from tmoe.base.listing import counted, listed
from tmoe.base.versions import versions
from tmoe.checkpoint.errors import CheckpointError
from tmoe.checkpoint.manifest import Manifest, verify
from tmoe.checkpoint.rewrite import (
    Output,
    Plan,
    check_space,
    keeping,
    read_whole,
    require_absent,
    rewrite,
)
from tmoe.config.check import ConfigError
from tmoe.config.run import LoraConfig
from tmoe.hf.adapters.base_model import AdaptedStep, BaseModel, adapted_step
from tmoe.hf.adapters.load import chat_of, tokenizer_notes
from tmoe.hf.adapters.merge import merge_step
from tmoe.hf.adapters.names import parameter, sites_of
from tmoe.hf.adapters.peft_config import Order, read_peft_config
from tmoe.hf.adapters.read import PeftFolder
from tmoe.hf.adapters.write import Layout, PeftFile, sizes_of, targets_of
from tmoe.hf.chat import SETTINGS, TEMPLATE, with_chat
from tmoe.hf.export import SHORT
from tmoe.hf.files import DTYPES, MODEL
from tmoe.hf.foreign import ADAPTER, ADAPTER_WEIGHTS, require_folder
from tmoe.hf.hub_folders import name_of
from tmoe.hf.quantise import require_kind
from tmoe.hf.tokenizer_files import carried_by
from tmoe.hf.write import Export, check_room, write_folder
from tmoe.model.lora import lora_of_settings
from tmoe.parallel.layout import Box

# ---- import-adapter ----


def import_adapter(
    adapter: Annotated[Path, tyro.conf.arg(metavar="ADAPTER")],
    step_out: Annotated[Path, tyro.conf.arg(metavar="STEP_OUT")],
    /,
    *,
    base: Path | None = None,
    peft_version: str = "",
    b_order: Order | None = None,
    dry_run: bool = False,
) -> None:
    """Write a step of adapters from a folder of PEFT's: its adapter_config.json and safetensors.

    Args:
        adapter: folder with adapter_config.json and adapter_model.safetensors
        step_out: a new folder
        base: the base's folder: Hugging Face's, a step with all weights, or a name on the hub; default: the
            folder that adapter_config.json names
        peft_version: the version of PEFT that wrote it, for a file that does not state it
        b_order: the order of the columns of B in a stack of experts: rank_major is PEFT's, grouped_by_expert
            that of unsloth before 2026-09-17; default: the file's lora_B_layout, else PEFT's
        dry_run: check everything, write nothing
    """
    require_absent(step_out)
    folder, found = open_peft(adapter, base, peft_version, b_order)
    plan = plan_adapter(folder, found)
    needed, free = check_space(plan, step_out)
    if not dry_run:
        with keeping(step_out):
            rewrite(plan, step_out)
    done = "nothing written" if dry_run else "verified"
    print(
        f"{step_out}: {counted(len(folder.matrices), 'adapter')} on {found.path}, {decimal(needed)} of "
        f"{decimal(free)} free; {done}"
    )
    for line in (*folder.notes(), *tokenizer_notes(folder, carried_by(found.path))):
        print(line)


def open_peft(
    adapter: Path, base: Path | None, peft_version: str = "", b_order: Order | None = None
) -> tuple[PeftFolder, BaseModel]:
    """A folder of PEFT's, and the base that is named; None: the one that the folder names."""
    if base is None:
        base = _base_said(adapter)
    found = BaseModel(base)
    return PeftFolder(adapter, found.sites, peft_version, b_order), found


def _base_said(adapter: Path) -> Path:
    require_folder(adapter)
    said = read_peft_config(adapter).base
    if said and os.path.isdir(said):
        return Path(said)
    named = (
        f"{adapter / ADAPTER} names {said!r}, which is no folder here"
        if said
        else f"{adapter / ADAPTER} names none"
    )
    raise ConfigError.of("base", True, named, "the folder of the base, or its name on the hub")


def plan_adapter(folder: PeftFolder, base: BaseModel) -> Plan:
    """The step of a folder of PEFT's."""
    lora = folder.settings()
    shapes: dict[str, tuple[int, ...]] = {}
    for matrix in folder.matrices:
        *experts, out, width = base.sites.matrices[matrix]
        rank = lora.rank_of(matrix, base.cfg.moe.top_k)
        shapes[parameter(matrix, "a")] = (*experts, rank, width)
        shapes[parameter(matrix, "b")] = (*experts, out, rank)
    outputs = [_output(MODEL + name, shape) for name, shape in shapes.items()]
    record = base.record()
    config = dict(model=asdict(base.cfg), lora=asdict(lora), init=str(base.path))
    manifest = Manifest(
        step=0,
        tokens=0,
        world=1,
        saved_ns=0,
        info=dict(config=config, versions=versions(), base=record._asdict()),
        state=dict(step=0, tokens=0),
        files={},
        tensors={},
    )
    if chat := chat_of(folder, carried_by(base.path)):
        manifest.info["chat"] = chat.as_json()
    stats = ((name, (folder.path / name).stat()) for name in (ADAPTER, ADAPTER_WEIGHTS[0]))
    stamps = tuple(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
    stamps += (folder.order, str(folder.exchanged))
    return Plan(tuple(outputs), partial(_imported, folder), manifest, stamps)


def _output(name: str, shape: tuple[int, ...]) -> Output:
    return Output(name, shape, torch.float32, "replicated", (Box(0, (0,) * len(shape), shape),))


def _imported(folder: PeftFolder, output: Output) -> Iterator[Tensor]:
    name = output.name.removeprefix(MODEL)
    a, b, _ = folder.adapter(name[:-2])
    yield (a if name.endswith("a") else b).contiguous()


# ---- export-adapter ----


def export_adapter(
    step: Annotated[Path, tyro.conf.arg(metavar="STEP")],
    out: Annotated[Path, tyro.conf.arg(metavar="OUT")],
    /,
    *,
    layout: Layout = "peft",
    base: Path | None = None,
    dtype: Literal["bf16", "fp32"] = "fp32",
    dry_run: bool = False,
) -> None:
    """Write a folder of PEFT's from a step of adapters.

    Args:
        step: a step folder or a run folder of --lora.rank
        out: a new folder
        layout: peft: stacks of experts, as PEFT 0.19 and later write them; per-expert: a pair for each
            expert, which most servers read
        base: where the base is now; default: where the step says
        dtype: type of the tensors
        dry_run: check everything, write nothing
    """
    require_absent(out)
    found = adapted_step(step, base)
    if problems := verify(found.step, share=None):
        raise CheckpointError(listed("", problems, indent=""))
    lora = lora_of(found)
    sites = found.base.sites if found.base else sites_of(found.arch, found.cfg)
    matrices = [name for name in sites.matrices if MODEL + parameter(name, "a") in found.manifest.tensors]
    sizes = sizes_of(lora, matrices, found.cfg.moe.top_k)
    file = PeftFile(targets_of(sites, matrices, layout), sizes, lora, sites)
    kind = SHORT[dtype]
    shapes = file.shapes()
    weights = {ADAPTER_WEIGHTS[0]: dict.fromkeys(shapes, kind)}
    nbytes = DTYPES[kind].itemsize
    sizes_in_bytes = {name: shape[0] * shape[1] * nbytes for name, shape in shapes.items()}
    said = str(found.base.path) if found.base else ""
    config = (json.dumps(file.config(name_of(said) or said), indent=2) + "\n").encode()
    files: dict[str, Callable[[], bytes]] = {ADAPTER: partial(bytes, config)}
    chat = with_chat(found.step, found.manifest, {}, out)
    files |= {name: read for name, read in chat.files.items() if name in (TEMPLATE, SETTINGS)}
    produce = partial(_exported, file, partial(_pair, found), DTYPES[kind])
    sources = (str(found.manifest.tensors), config.decode())
    export = Export(weights, shapes, sizes_in_bytes, produce, files, sources)
    needed, free = check_room(export, out)
    if not dry_run:
        with keeping(out):
            write_folder(export, out)
    done = "nothing written" if dry_run else "verified"
    print(
        f"{out}: {counted(len(matrices), 'adapter')} in {counted(len(shapes), 'tensor')}, {decimal(needed)} "
        f"of {decimal(free)} free; {done}"
    )
    for line in _export_notes(file, found, out, files):
        print(line)


def _export_notes(
    file: PeftFile, found: AdaptedStep, out: Path, files: dict[str, Callable[[], bytes]]
) -> Iterator[str]:
    if file.several:
        yield f"{out}: B is multiplied, so that all adapters have the factor of r and lora_alpha"
    if file.apart:
        left = "PEFT on transformers 5 leaves experts one by one of several families out, without an error"
        yield f"{out}: {left}; --layout peft is for PEFT"
    if found.arch.model_type == "nemotron_h" and any(t.key.endswith(".out_proj") for t in file.targets):
        left = r"--lora.targets '^(?!.*attention\.out)' trains none"
        yield f"{out}: PEFT refuses adapters of a nemotron_h's out_proj; {left}, or merge them"
    if found.base is None:
        yield f"{out}: its base was drawn from a seed, and is in no folder; PEFT can only read a merged model"
    elif found.base.manifest is not None:
        write = f"python -m tmoe.hf export {found.base.path} DIR"
        yield f"{out}: its base is a step folder, which PEFT does not read; {write}"
    if file.lora.base == "nf4":
        yield f"{out}: trained with --lora.base nf4; PEFT adds it to a base of any type"
    if file.lora.dropout and any(target.stack for target in file.targets):
        yield f"{out}: lora_dropout is 0: PEFT has no dropout on stacks of experts"
    for name in (TEMPLATE, SETTINGS):
        if name in files:
            yield f"{out / name}: the chat template that {found.step} was trained with"


def lora_of(found: AdaptedStep) -> LoraConfig:
    lora = lora_of_settings(found.manifest.info["config"]["lora"])
    assert lora is not None  # adapted_step checks it
    return lora


def _pair(found: AdaptedStep, matrix: str) -> tuple[Tensor, Tensor]:
    entries = found.manifest.tensors
    a, b = (read_whole(found.step, entries[MODEL + parameter(matrix, part)]).float() for part in ("a", "b"))
    return a, b


def _exported(
    file: PeftFile, pair: Any, dtype: torch.dtype, wanted: set[str]
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in file.tensors(pair, wanted):
        yield name, tensor.to(dtype)


# ---- merge ----


def merge(
    step: Annotated[Path, tyro.conf.arg(metavar="STEP")],
    out: Annotated[Path, tyro.conf.arg(metavar="OUT")],
    /,
    *,
    base: Path | None = None,
    dtype: Literal["bf16", "fp32"] | None = None,
    quantize: str | None = None,
    dry_run: bool = False,
    license: str = "unknown",
) -> None:
    """Write a Hugging Face folder of a step's base with its adapters added to the weights, in fp32.

    Args:
        step: a step folder or a run folder of --lora.rank
        out: a new folder
        base: where the base is now; default: where the step says
        dtype: type of every tensor; default: the base's
        quantize: int8, int4, fp8 or mxfp4: store the matrices of attention, feed-forwards and experts in 8 or
            4 bits, as compressed-tensors does
        dry_run: check everything, write nothing
        license: license to state in README.md if the base has no README.md: apache-2.0, other, ...
    """
    if quantize is not None:
        require_kind(quantize)
    require_absent(out)
    found = adapted_step(step, base)
    merge_step(found, partial(_pair, found), lora_of(found), out, dtype, dry_run, license, quantize)
