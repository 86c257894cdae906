"""Recognises folders that `Folder` does not read, and names the command that makes a readable one.

next: hf/files.py
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from tmoe.base.disk import absent_words, no_folder_words, pointer_words, text_of
from tmoe.checkpoint.manifest import NAME, CheckpointError
from tmoe.config.check import ConfigError

CONFIG = "config.json"
GENERATION = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".bin.index.json")
NO_WEIGHTS = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state\w*)\.(bin|pt|pth)"
)  # written by transformers' Trainer
CONVERT = "AutoModelForCausalLM.from_pretrained(DIR{more}).save_pretrained(NEW_DIR)"
DOWNLOAD = "hf download ORG/NAME --local-dir DIR"
WRAPPERS = {  # prefix of the names in a wrapped model's state_dict -> the wrapper
    "_orig_mod.": "torch.compile",
    "module.": "DistributedDataParallel",
    "_orig_mod.module.": "torch.compile",
    "module._orig_mod.": "DistributedDataParallel",
    "base_model.model.": "PEFT",
    "_fsdp_wrapped_module.": "FSDP",
    "model.language_model.": "a model of images and text",
    "language_model.": "a model of images and text",
}
SHOWN = 4  # most names of files in a message


def is_folder(path: str | Path) -> bool:
    """Whether `path` looks like a Hugging Face folder (and not like a step folder or a run folder).

    It is also True for some folders that `Folder` refuses: config.json is damaged, a pointer or a link to
    nothing, or it names no model_type while the folder holds weights, or the folder holds an adapter.
    """
    path = Path(path)
    try:
        raw = (path / CONFIG).read_bytes()
    except OSError:
        return (path / ADAPTER).is_file() or (path / CONFIG).is_symlink()
    ours = (path / NAME).exists() or (path / "checkpoints").exists()
    try:
        typed = bool(pointer_words(raw)) or "model_type" in json.loads(raw)
    except (ValueError, TypeError, RecursionError):
        return not ours
    return typed or (not ours and any(path.glob("*.safetensors")))


def require_folder(path: Path) -> None:
    """ConfigError if a file is named in place of its folder; it says how a GGUF file becomes a step."""
    if path.is_file() and path.suffix == ".gguf":
        raise ConfigError(f"{path}: a GGUF file; python -m tmoe.hf import {path} STEP_DIR makes a step of it")
    if path.is_file():
        raise ConfigError(f"{path}: {no_folder_words(path)}")


def require_no_adapter(folder: Path) -> None:
    """ConfigError for a folder that holds an adapter (LoRA, by PEFT), alone or next to weights.

    transformers applies such an adapter to the weights when it loads the folder; tmoe reads only the weights.
    """
    names = [name for name in (ADAPTER, *ADAPTER_WEIGHTS) if (folder / name).is_file()]
    if not names:
        return
    base = ""
    with suppress(OSError, ValueError, AttributeError):
        base = str(json.loads(text_of(folder / ADAPTER)).get("base_model_name_or_path") or "")
    of_base = f" of {base}" * bool(base)
    merge = "merge it with PEFT (merge_and_unload, then save_pretrained) and name the merged folder"
    ours = f"python -m tmoe.hf import-adapter {folder} STEP --base BASE, then merge STEP DIR, writes one"
    if (folder / CONFIG).is_file():
        raise ConfigError(
            f"{folder}: holds an adapter{of_base} next to the weights ({', '.join(names)}), "
            f"which would not be applied: {merge}, or move the adapter's files away "
            "to use the weights without it"
        )
    raise ConfigError(f"{folder}: is an adapter{of_base} ({', '.join(names)}), not a whole model: {ours}")


def require_no_pointers(folder: Path) -> None:
    """CheckpointError if files of a folder are pointers of Git LFS or git-annex; it names them.

    Checks weights and the files that are read as settings, tokenizer or template.
    """
    suffixes = (".safetensors", ".json", ".model", ".jinja")
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name) if folder.is_dir() else []
    pointers: dict[str, list[str]] = {}
    for entry in (candidate for candidate in entries if candidate.name.endswith(suffixes)):
        path = Path(entry.path)
        if not path.exists():
            words = absent_words(path)
        elif entry.is_file() and entry.stat().st_size < 1024:
            words = pointer_words(path.read_bytes())
        else:
            continue
        if words:
            pointers.setdefault(words, []).append(entry.name)
    for words, names in pointers.items():
        raise CheckpointError(f"{folder}: {', '.join(names)}: each {words}")


def require_single(folder: Path) -> None:
    """CheckpointError if a folder without an index lacks model.safetensors.

    It names the weights that the folder has instead, and how to convert them to safetensors.
    """
    if not (folder / SINGLE).is_file() and folder.is_dir():
        raise CheckpointError(f"{folder / SINGLE}: missing; {weights_of(folder) or nothing_of(folder)}")


def nothing_of(folder: Path) -> str:
    """Advice for a folder without any file of weights."""
    if parts := sorted(folder.glob("*/*.distcp")) or sorted(folder.glob("*.distcp")):
        name = parts[0].parent
        return f"{name} is of torch.distributed.checkpoint: python -m tmoe.hf recover {name} OUT ORIGINAL"
    if (folder / "zero_to_fp32.py").is_file():
        return "DeepSpeed's files are here: python zero_to_fp32.py --safe_serialization DIR NEW_DIR writes it"
    inside = sorted(path for path in folder.glob("*/*") if path.name.endswith(WEIGHTS) and path.is_file())
    if inside:
        return f"{inside[0].relative_to(folder)} is not read; download the files next to {CONFIG}: {DOWNLOAD}"
    return f"no file of weights is here; download them: {DOWNLOAD}"


def weights_of(folder: Path) -> str:
    """The weights of a folder without model.safetensors, and how to convert them; "" if it has none."""
    there = sorted(path.name for path in folder.iterdir() if path.name.endswith(WEIGHTS) and path.is_file())
    there = [name for name in there if not NO_WEIGHTS.fullmatch(name)]
    if not there:
        return ""
    shown = ", ".join(there[:SHOWN]) + ", ..." * (len(there) > SHOWN)
    tensors = [name for name in there if name.endswith(".safetensors")]
    own = [name for name in there if name.startswith("consolidated")]
    others = [name for name in tensors if name not in own]
    if len(others) == 1 and re.fullmatch(r"model-0*1-of-0*1\.safetensors", others[0]):
        return f"here is {others[0]}: rename it to {SINGLE}"
    if any(re.fullmatch(r"model-\d+-of-\d+\.safetensors", name) for name in others):
        return f"here are {shown} without {INDEX}, which says where each tensor is: download it as well"
    if others and (variant := re.match(r"model\.(\w+)(-\d+-of-\d+)?\.safetensors", others[0])):
        written = CONVERT.format(more=f', variant="{variant[1]}"')
        return f"here are {shown}: transformers' {written} writes it"
    if len(others) == 1:
        return f"here is {others[0]}: where it holds the whole model, rename it to {SINGLE}"
    if own:
        return (
            f"here are {shown}, in the publisher's own format: download the files of transformers' format, "
            f"{SINGLE} or model-*.safetensors with {INDEX}, of the same repository ({DOWNLOAD})"
        )
    if packed := [name for name in there if name.endswith(".gguf")]:
        read = f"python -m tmoe.hf import {folder / packed[0]} STEP_DIR"
        return f"here are {shown}: take the published folder of 16-bit weights, or a step of these: {read}"
    written = CONVERT.format(more="")
    return f"here are {shown}, and only safetensors are read: transformers' {written} writes it"


def hint(path: Path) -> str:
    """Advice for a folder that is not a Hugging Face folder, to append to a message; "" if there is none."""
    if not path.is_dir() or (path / CONFIG).exists():
        return ""
    below = [config.parent for pattern in ("*", "*/*") for config in path.glob(f"{pattern}/{CONFIG}")]
    numbered = {str(folder): [*map(int, re.findall(r"\d+", folder.name))] for folder in below}
    names = sorted((name for name in numbered if is_folder(name)), key=lambda name: (numbered[name], name))
    if names:
        more = f" (of {len(names)} such folders in it)" if names[1:] else ""
        return f"; did you mean {names[-1]}{more}?"
    if weights := weights_of(path):
        return f"; {CONFIG} is missing, which says what the model is; {weights}"
    return ""


def renamed(expected: Iterable[str], there: Collection[str]) -> str:
    """The reason why most expected names of tensors are missing, if a prefix explains it; else ""."""
    missing = [name for name in expected if name not in there]
    ends = {wrapper: sum(f"{wrapper}{name}" in there for name in missing) for wrapper in WRAPPERS}
    wrapper = max(WRAPPERS, key=lambda prefix: ends[prefix])
    if 2 * ends[wrapper] > len(missing):
        return f"names begin with {wrapper}, as {WRAPPERS[wrapper]} writes them: save the model within it"
    bare = sum(name.startswith("model.") and name.removeprefix("model.") in there for name in missing)
    if 2 * bare > len(missing):
        return (
            "names lack model. in front, as AutoModel writes them, without a head: save the model as "
            "AutoModelForCausalLM reads it"
        )
    return ""
