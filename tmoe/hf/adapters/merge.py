"""Merges a step of adapters into its base: W + scale B A, in fp32, rounded once to the type of the folder.

next: hf/export.py
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tmoe.base.listing import listed
from tmoe.checkpoint.base import base_of, require_base
from tmoe.checkpoint.errors import CheckpointError
from tmoe.checkpoint.manifest import read_manifest, verify
from tmoe.checkpoint.rewrite import read_boxes
from tmoe.config.run import LoraConfig
from tmoe.hf.adapters.base_model import AdaptedStep
from tmoe.hf.adapters.write import Pair
from tmoe.hf.export import Boxes, Source, find_origin, with_dtype, with_plan, write_model
from tmoe.hf.files import MODEL, Folder, fill
from tmoe.hf.tensor_plan import plan_folder
from tmoe.model.lora import is_adapter
from tmoe.model.shapes import model_shapes
from tmoe.parallel.layout import Box


def merge_step(
    found: AdaptedStep,
    pair: Pair,
    lora: LoraConfig,
    out: Path,
    dtype: Literal["bf16", "fp32"] | None,
    dry_run: bool,
    license: str,
    quantize: str | None = None,
) -> None:
    """Writes the Hugging Face folder. ConfigError if the base has other weights than at the training.

    quantize: as of `export_hf`; the sums in fp32 are quantised, without a rounding before.
    """
    step, manifest, base = found.step, found.manifest, found.base
    for folder in (step, *([base.path] if base and base.manifest else ())):
        if problems := verify(folder, share=None):  # sizes now, contents as they are read
            raise CheckpointError(listed("", problems, indent=""))
    said = base_of(manifest)
    if said is not None and base is not None:
        again = "--base DIR, the folder that holds those weights now"
        require_base(step, said, str(base.path), again)
    if base is None:
        origin = find_origin(step, manifest, None)
    elif base.manifest is None:
        origin = find_origin(step, manifest, base.path)
    else:
        origin = find_origin(base.path, base.manifest, None)
    shapes = model_shapes(found.cfg)
    origin = with_dtype(origin, dtype if dtype or origin.stamp or not quantize else "bf16")
    source = Source(step, manifest, {}, *with_plan(step, manifest, origin, shapes, out))
    more = (said.sha256,) if said else ()
    write_model(source, merged(found, pair, lora), out, dry_run, license, quantize, more)
    if lora.base == "nf4":
        print(
            f"{out}: {step} was trained with --lora.base nf4; its adapters were added to the base's own "
            "weights, which are not rounded to NF4"
        )


def merged(found: AdaptedStep, pair: Pair, lora: LoraConfig) -> Boxes:
    """Reads boxes of the merged weights, in fp32."""
    base = boxes_of_base(found)
    adapted = {name.removeprefix(MODEL) for name in found.manifest.tensors if is_adapter(name)}
    held = lru_cache(1)(pair)

    def read(ours: str, boxes: tuple[Box, ...]) -> Iterator[Tensor]:
        matrix = ours.removesuffix(".weight")
        has = not {f"{matrix}.a", f"{matrix}_a"}.isdisjoint(adapted)
        for box, w in zip(boxes, base(ours, boxes), strict=True):
            if not has:
                yield w
                continue
            a, b = held(matrix)
            yield w.float() + lora.scale_of(matrix, a.shape[-2]) * change(a, b, box)

    return read


def change(a: Tensor, b: Tensor, box: Box) -> Tensor:
    """b a in a box of the matrix: a [rank, in], b [out, rank], of experts with a leading axis."""
    *experts, rows, columns = (
        slice(start, start + n) for start, n in zip(box.offset, box.shape, strict=True)
    )
    return b[(*experts, rows)] @ a[(*experts, slice(None), columns)]


def boxes_of_base(found: AdaptedStep) -> Boxes:
    """Reads boxes of the base's weights: of its folder, or of the step of adapters."""
    base = found.base
    if base is None or base.manifest is not None:
        step = base.path if base else found.step
        entries = ((base and base.manifest) or read_manifest(step)).tensors
        return lambda ours, boxes: read_boxes(step, entries[MODEL + ours], boxes)
    folder = Folder(base.path)
    pieces = plan_folder(folder).pieces

    def read(ours: str, boxes: tuple[Box, ...]) -> Iterator[Tensor]:
        with folder.reading() as reading:
            for box in boxes:
                target = torch.empty(box.shape)
                fill(target, box.offset, pieces[ours], reading)
                yield target

    return read
