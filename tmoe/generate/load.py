"""Loads an engine from a run folder, a step folder or a Hugging Face folder, with the folder's tokenizer.

next: generate/command_line.py
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import tokenizers
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tmoe.base.disk import BOM
from tmoe.checkpoint import folders
from tmoe.checkpoint.base import base_of, find_adapters, require_base, settings_of
from tmoe.checkpoint.checkpoints import Checkpoints
from tmoe.checkpoint.errors import refuse
from tmoe.checkpoint.manifest import CheckpointError, Manifest, read_manifest
from tmoe.checkpoint.rewrite import read_boxes, read_whole
from tmoe.config.check import ConfigError, Setting, require
from tmoe.config.compare import build_config
from tmoe.config.model import ModelConfig
from tmoe.config.run import LoraConfig
from tmoe.data.chat.format import ends_of
from tmoe.data.tokenizer import ByteTokenizer, Carried, DataError, Tokenizer, load_tokenizer
from tmoe.generate.engine import Engine
from tmoe.generate.load_quantised import Place, load_quantised
from tmoe.hf.adapters.load import chat_of, is_peft, open_folder, read_into, tokenizer_notes
from tmoe.hf.adapters.read import PeftFolder
from tmoe.hf.files import MODEL, Folder
from tmoe.hf.foreign import hint, is_folder, require_folder
from tmoe.hf.hub_folders import folder_of
from tmoe.hf.load_base import load_base
from tmoe.hf.load_weights import load_hf
from tmoe.hf.tensor_plan import plan_folder
from tmoe.hf.tokenizer_files import carried_by, unread_in
from tmoe.model.lora import add_adapters, is_adapter, lora_of_settings
from tmoe.model.nf4 import has_nf4
from tmoe.model.shapes import model_shapes
from tmoe.model.transformer import Transformer
from tmoe.parallel.layout import Box
from tmoe.parallel.mesh import local_part, local_slices

DTYPES = dict(bf16=torch.bfloat16, fp32=torch.float32)
# --quantize of a model with adapters: what is wrong, what is valid
WITH_ADAPTERS = (
    "not with low-rank adapters, whose base is in nf4 or not quantised",
    "nf4, no --quantize, or merge the adapters",
)
KINDS = "a run folder, a step folder or a Hugging Face folder"


class Loaded(NamedTuple):
    """A model loaded from a folder, with everything that its engine needs."""

    path: Path
    """the step folder or Hugging Face folder"""
    model: Transformer
    tokenizer: Tokenizer
    eos: tuple[int, ...]
    begin: tuple[int, ...]
    """tokens that the tokenizer puts before every text, if the weights were trained with them"""
    generation: dict[str, Any]
    """generation_config.json of the folder, or of the folder from which its run started"""
    seq: int | None
    """tokens of the sequences on which a run trained it; None for a Hugging Face folder"""
    notes: tuple[str, ...] = ()
    """lines on the adapters"""

    def engine(self, slots: int = 64, pool_gib: float | None = None) -> Engine:
        eos, begin = self.eos, self.begin
        return Engine(self.model, self.tokenizer, eos=eos, begin=begin, slots=slots, pool_gib=pool_gib)


def load(
    path: str | Path,
    tokenizer: str | None = None,
    device: str | None = None,
    dtype: Literal["bf16", "fp32"] | None = None,
    adapter: str | Path | None = None,
    quantize: Literal["int8", "int4", "fp8", "nf4"] | None = None,
    lay_out: Callable[[Transformer], None] | None = None,
) -> Loaded:
    """A model with its tokenizer, from a folder.

    Args:
        path: a run folder, whose newest complete step is used; a step folder; a Hugging Face folder; or a
            name on the hub. For a step of adapters the frozen base is read too, from the place in its
            manifest.
        tokenizer: 'bytes' or a tokenizer.json, for a folder without one.
        device: None: a GPU if there is one.
        dtype: None: bf16 on a GPU, else fp32.
        adapter: a step folder or run folder of adapters, or a folder of PEFT's, whose base is at `path`. The
            tokenizer and the chat format are those of the adapters' step; a folder of PEFT's may have a chat
            template.
        quantize: quantise the matrices of experts and dense layers while loading; the other tensors, and all
            computation, have the dtype. With adapters only nf4, for a base that is in a folder.
        lay_out: divides the model, on the meta device, over ranks. Each rank then reads its own part, and all
            ranks must call this function. Not with quantize, nor with a folder of PEFT's.

    Raises CheckpointError for a folder of another kind or a damaged step, ValueError for a model that tmoe
    cannot compute and for a model without a known tokenizer.
    """
    where = device_of(device)
    kind = DTYPES[dtype] if dtype else torch.bfloat16 if where.type == "cuda" else torch.float32
    path = find(folder_of(path))
    seq = None
    base = ""
    peft = None
    if adapter is not None and is_peft(adapter):
        peft = open_folder(Path(adapter), path, "adapter")
    elif adapter is not None:
        base = str(path)
        path, _ = find_adapters(Path(adapter), "adapter")
    require(not peft or quantize in (None, "nf4"), "quantize", quantize, *WITH_ADAPTERS)
    require(not (peft and lay_out), "adapter", adapter, "a folder of PEFT's is not divided over ranks")
    require(not (quantize and lay_out), "quantize", quantize, "quantised weights are not divided over ranks")
    place = Place(where, kind, lay_out)
    if is_folder(path):
        cfg = plan_folder(Folder(path)).cfg
        carried = carried_by(path)
        found = tokenizer_of(path, carried, tokenizer)
        model = of_folder(path, cfg, place, quantize, peft)
        published = True
    else:
        manifest = read_manifest(path)
        run: Any = manifest.info.get("config")
        settings: Any = run.get("model") if isinstance(run, dict) else None
        require(isinstance(settings, dict), f"{path}: its manifest does not say what the model is")
        carried = carried_by(path)
        found = tokenizer_of(path, carried, tokenizer)
        model = of_step(path, manifest, build_config(settings), place, quantize, peft, base)
        published = "hf" in manifest.info
        seq = run.get("train", {}).get("seq")
    if peft:
        read_into(peft, model.state_dict())
        found.chat = chat_of(peft, carried) or found.chat
    require(
        found.ordinary <= model.cfg.vocab,
        f"{path}: its tokenizer has {found.ordinary} ids, but model.vocab={model.cfg.vocab}",
    )
    begin = opening(carried) if published and tokenizer is None else ()
    if found.chat is not None and found.chat.opening is not None:
        begin = found.chat.opening
    generation = carried.generation if carried else {}
    notes = tuple([*peft.notes(), *tokenizer_notes(peft, carried)]) if peft else ()
    return Loaded(path, model.eval(), found, ends_of(found, model.cfg.vocab), begin, generation, seq, notes)


def of_folder(
    path: Path, cfg: ModelConfig, place: Place, quantize: str | None, peft: PeftFolder | None
) -> Transformer:
    """The model of a Hugging Face folder; without values for the adapters of `peft`."""
    if quantize and not peft:
        return load_quantised(path, None, cfg, quantize, place)
    lora = peft.settings() if peft else None
    if lora is not None and quantize:
        lora = replace(lora, base="nf4")
    model = empty(cfg, place.device, place.dtype, lora, place.lay_out)
    if has_nf4(model):
        load_base(path, model)
    else:
        load_hf(path, frozen_of(model), cfg)
    return model


def of_step(
    step: Path,
    manifest: Manifest,
    cfg: ModelConfig,
    place: Place,
    quantize: str | None,
    peft: PeftFolder | None,
    base: str,
) -> Transformer:
    """The model of a step folder; without values for the adapters of `peft`.

    base: the folder of the frozen base of a step with adapters; "": the place in its manifest.
    """
    lora = peft.settings() if peft else lora_of_settings(settings_of(manifest))
    if lora is not None and quantize:
        require(quantize == "nf4", "quantize", quantize, *WITH_ADAPTERS)
        apart = peft is not None or base_of(manifest) is not None
        require(
            apart, "quantize", quantize, f"{step} holds adapters with their base", "the folder of a merge"
        )
        lora = replace(lora, base="nf4")
    elif quantize:
        require_fit(model_shapes(cfg), step, manifest)
        return load_quantised(step, manifest, cfg, quantize, place)
    model = empty(cfg, place.device, place.dtype, lora, place.lay_out)
    if not peft:
        fill(model, step, manifest, base)
    elif has_nf4(model):
        load_base(step, model, "")
    else:
        fill_from(frozen_of(model), step, manifest)
    return model


def device_of(name: str | None) -> torch.device:
    """The device of this name; None: a GPU if there is one. ConfigError for a device that does not exist."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = re.fullmatch(r"cpu|cuda(?::(\d{1,4}))?", name or ("cuda" if count else "cpu"))
    there = found is not None and (found[0] == "cpu" or int(found[1] or 0) < count)
    valid = "cpu" if not count else f"cpu, cuda or cuda:0 to cuda:{count - 1}"
    require(there, "device", name, f"valid here: {valid}")
    return torch.device(cast(re.Match, found)[0])


def find(path: Path) -> Path:
    """The step folder or Hugging Face folder that a path means."""
    require_folder(path)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder", valid=KINDS)
    if is_folder(path):
        return path
    if steps := folders.steps_in(path):
        step = Checkpoints(steps, keep=0, mode="sync", info={}).find("auto")
        assert step is not None
        return step
    step = folders.resolve(path)
    try:
        read_manifest(step)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: must be {KINDS}{hint(path) or f': {error}'}") from None
    return step


def empty(
    cfg: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    lora: LoraConfig | None = None,
    lay_out: Callable[[Transformer], None] | None = None,
) -> Transformer:
    """A model with uninitialised tensors; no copy of it in another type or on another device is made.

    lora: settings of its adapters, if it has some. lay_out: as in `load`.
    """
    with torch.device("meta"):
        model = Transformer(cfg).to(dtype)
        if lora is not None:
            add_adapters(model, lora)
            for p in model.parameters():  # not buffers: scales of a base in NF4 are fp32
                p.data = p.data.to(dtype)
        if lay_out is not None:
            lay_out(model)
    return model.to_empty(device=device)


def frozen_of(model: Transformer) -> dict[str, Tensor]:
    """A model's tensors without its adapters."""
    return {name: t for name, t in model.state_dict().items() if not is_adapter(name)}


def fill(model: Transformer, step: Path, manifest: Manifest, base: str = "") -> None:
    """Reads the model's tensors from a step folder, and those of a frozen base from the base's folder.

    base: the base's folder, named by the user; "": the place in the step's manifest.
    """
    wanted = model.state_dict()
    if (found := base_of(manifest)) is not None:
        again = f"tmoe.generate MODEL {Setting('adapter', step)}, MODEL being those weights"
        folder = require_base(step, found, base, again)
        if has_nf4(model):
            load_base(folder, model, "adapter")
            return fill_from({n: t for n, t in wanted.items() if is_adapter(n)}, step, manifest)
        frozen = frozen_of(model)
        wanted = {name: t for name, t in wanted.items() if is_adapter(name)}
        if is_folder(folder):
            load_hf(folder, frozen, model.cfg)
        else:
            fill_from(frozen, folder, read_manifest(folder))
    fill_from(wanted, step, manifest)


@torch.no_grad()
def fill_from(wanted: dict[str, Tensor], step: Path, manifest: Manifest) -> None:
    """Fills tensors from a step folder, one after the other, checked as they are read."""
    require_fit({name: tuple(t.shape) for name, t in wanted.items()}, step, manifest)
    for name, tensor in wanted.items():
        entry = manifest.tensors[f"{MODEL}{name}"]
        if not isinstance(tensor, DTensor):
            tensor.copy_(read_whole(step, entry))
            continue
        parts = local_slices(tensor)
        box = Box(0, tuple(part.start for part in parts), tuple(part.stop - part.start for part in parts))
        local_part(tensor).copy_(next(read_boxes(step, entry, (box,))))


def require_fit(shapes: dict[str, tuple[int, ...]], step: Path, manifest: Manifest) -> None:
    """CheckpointError unless a step folder holds exactly these tensors of a model."""
    entries = {n.removeprefix(MODEL): e for n, e in manifest.tensors.items() if n.startswith(MODEL)}
    problems = [f"{name}: not in the step" for name in shapes.keys() - entries.keys()]
    problems += [f"{name}: not in the model" for name in entries.keys() - shapes.keys()]
    problems += [
        f"{name}: shape {entries[name].shape} in the step, {shape} in the model"
        for name, shape in shapes.items()
        if name in entries and entries[name].shape != shape
    ]
    refuse(f"{step} does not fit its own settings", sorted(problems))


def tokenizer_of(path: Path, carried: Carried | None, spec: str | None) -> Tokenizer:
    """The tokenizer that --tokenizer names, else the folder's, with the folder's chat format.

    carried: the tokenizer's facts in the folder. spec: the value of --tokenizer. Raises DataError if there is
    no tokenizer, or if --tokenizer contradicts the folder.
    """
    if spec is not None:
        found = load_tokenizer(spec, "--tokenizer")
        if carried is not None and carried.fingerprint not in ("", found.fingerprint):
            raise DataError(
                f"--tokenizer={spec}: is {found.fingerprint}; the weights of {path} are of "
                f"{carried.fingerprint}, in which ids mean other text; name that tokenizer, or leave it out"
            )
        found.chat = carried.chat if carried and carried.chat else found.chat
        return found
    if carried is not None and carried.files is not None:
        return carried.load("--tokenizer")
    if carried is not None and carried.fingerprint == ByteTokenizer.fingerprint:
        found = ByteTokenizer()
        found.chat = carried.chat
        return found
    known = carried.fingerprint if carried else ""
    which = f"tokenizer {known}, which is not there" if known else "no tokenizer that is known"
    unread = unread_in(path) if carried is None or not known else ""
    raise DataError(f"{path}: has {which}; name it with --tokenizer, 'bytes' or a tokenizer.json{unread}")


def opening(carried: Carried | None) -> tuple[int, ...]:
    """Tokens that a folder's tokenizer puts before every text by default."""
    if carried is None or carried.files is None or carried.files.name.endswith(".model"):
        return ()
    tokenizer = tokenizers.Tokenizer.from_buffer(carried.files.raw.removeprefix(BOM))
    whole = tokenizer.encode("a").ids
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    starts = [i for i in range(len(whole)) if whole[i : i + len(plain)] == plain]
    return tuple(whole[: starts[0]]) if plain and starts else ()
