"""python -m tmoe.hf gguf STEP OUT.gguf, and import of a .gguf file.

next: extras/gguf/write.py, extras/gguf/read.py
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.filesize import decimal

from tmoe.checkpoint.rewrite import check_space, keeping, rewrite
from tmoe.config.check import ConfigError, require
from tmoe.hf.importer import import_hf
from tmoe.parallel.layout import axes_of_flags

Mixes = Literal[
    "f32",
    "f16",
    "bf16",
    "q8_0",
    "q6_k",
    "q5_k_m",
    "q5_k_s",
    "q4_k_m",
    "q4_k_s",
    "q3_k_l",
    "q3_k_m",
    "q3_k_s",
    "q2_k",
    "mxfp4",
]
SUFFIX = ".gguf"


def export_gguf(
    step_dir: Annotated[Path, tyro.conf.arg(metavar="STEP_DIR")],
    out: Annotated[Path, tyro.conf.arg(metavar="OUT.gguf")],
    /,
    *,
    type: Mixes,
    like: Path | None = None,
    pre: str = "",
    allow: tuple[str, ...] = (),
    device: str = "auto",
    dry_run: bool = False,
) -> None:
    """Write a GGUF file, which llama.cpp loads, from a step folder.

    Args:
        step_dir: a step folder
        out: a new file, whose name ends in .gguf
        type: of most tensors; each tensor's own is the one that llama.cpp's quantiser chooses
        like: folder or name on the hub whose config and tokenizer to take, as of export
        pre: llama.cpp's name of the pre-tokenizer; default: the one that splits as tokenizer.json says
        allow: settings that llama.cpp computes otherwise and that are written all the same, by the names that
            the refusal gives
        device: where K-quants are computed; auto: a GPU if there is one
        dry_run: check everything, print types and size, write nothing
    """
    _require_package()
    from tmoe.extras.gguf.write import content_of, write_file
    from tmoe.generate.load import device_of
    from tmoe.hf.export import source_of

    if out.suffix != SUFFIX:
        raise ConfigError(f"{out}: must be the name of a new file that ends in {SUFFIX}")
    chosen = str(device_of(None if device == "auto" else device))
    source = source_of(step_dir, out, like, None)
    content = content_of(source, out.stem, type, pre, allow)
    size = write_file(content, source, out, chosen, dry_run)
    counts = Counter(content.kinds.values()).most_common()
    done = "nothing written" if dry_run else "written"
    print(
        f"{out}: {len(content.kinds)} tensors, {', '.join(f'{n} {kind}' for kind, n in counts)}; "
        f"{decimal(size)} ({size} bytes), {content.family.name}; {done}"
    )
    for note in content.notes:
        print(f"note: {note}")


def import_model(
    hf_dir: Annotated[Path, tyro.conf.arg(metavar="HF_DIR")],
    step_dir: Annotated[Path, tyro.conf.arg(metavar="STEP_DIR")],
    /,
    *,
    world: int = 1,
    ep: int = 1,
    mtp: int = 0,
    dry_run: bool = False,
) -> None:
    """Write a step folder from a Hugging Face folder or a GGUF file.

    Killed, the same command continues.

    Args:
        hf_dir: config.json and safetensors; or a name on the hub; or a file FILE.gguf
        step_dir: a new folder
        world: number of ranks that will load it; any other number can, too
        ep: ranks of an expert group
        mtp: number of blocks that predict further tokens, to be trained (--model.mtp.depth); others are kept
            unchanged for an export
        dry_run: check everything, write nothing
    """
    if hf_dir.suffix != SUFFIX or hf_dir.is_dir():
        return import_hf(hf_dir, step_dir, world=world, ep=ep, mtp=mtp, dry_run=dry_run)
    require(not mtp, "mtp", mtp, f"{hf_dir} is a GGUF file, which holds no such blocks", 0)
    _require_package()
    from tmoe.extras.gguf.read import plan_import

    if not hf_dir.is_file():
        raise ConfigError(f"{hf_dir}: no such file")
    plan, file, notes = plan_import(hf_dir, axes_of_flags(world, ep))
    needed, free = check_space(plan, step_dir)
    if not dry_run:
        with keeping(step_dir):
            rewrite(plan, step_dir)
    done = "nothing written" if dry_run else "verified"
    kinds = ", ".join(f"{n} {kind}" for kind, n in file.types.items())
    print(
        f"{step_dir}: {len(file.tensors)} tensors of a {file.arch} ({kinds}) as fp32, {decimal(needed)} of "
        f"{decimal(free)} free; {done}"
    )
    for note in notes:
        print(f"note: {note}")
    return None


def _require_package() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("GGUF files need the package gguf: pip install 'tmoe[gguf]'")
