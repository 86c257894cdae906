"""Makes a Hugging Face folder from a folder that stock torch.distributed.checkpoint (DCP) wrote.

Trainers of Hugging Face's models save such folders: FSDP's sharded checkpoints, torchtitan, fms-acceleration.
Names, config and tokenizer are those of ORIGINAL, the folder from which training began. A tensor is found
under its own name, under its name after a prefix that all names have (`model.`), or in one of these stacks:

    fms's ScatterMoE    MODULE.w1.weight, w2, w3 [E, in, out] and MODULE.router.weight
    transformers 5      MODULE.experts.gate_up_proj [E, 2F, D], MODULE.experts.down_proj [E, D, F];
                        without a gate MODULE.experts.up_proj [E, F, D]

transformers also renames the root of Nemotron-H. Its type is that of the DCP folder. Tensors of blocks that
predict further tokens, which transformers does not load, are copied from ORIGINAL if the DCP folder lacks
them. Any other tensor that is missing, unknown or of another shape is an error that names it.

next: hf/write.py
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.filesize import decimal
from torch import Tensor

from tmoe.checkpoint.errors import refuse
from tmoe.checkpoint.manifest import CheckpointError
from tmoe.checkpoint.rewrite import keeping
from tmoe.checkpoint.stock import StockFolder, backend_of
from tmoe.config.check import MOST
from tmoe.hf.files import INDEX, TIED, Folder
from tmoe.hf.quantise import RENAMED
from tmoe.hf.write import Export, check_room, write_folder

SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
KINDS = {kind: dtype for dtype, kind in SAFETENSORS.items()}
BLOCK = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.")
# Parts that wrappers of modules insert into a name.
WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Beginnings of the names of entries of a checkpoint other than the model.
BESIDE = re.compile(r"(optim|lr_sched|sched|rng|train_state|dataloader|step|epoch|ema)", re.I)
EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight")
PARTS = dict(w1="w1", gate_proj="w1", w3="w3", up_proj="w3", w2="w2", down_proj="w2")
ROUTER = re.compile(r"(.+)\.(gate|router|router\.layer)\.weight")
STACKED = re.compile(r"(.+)\.(input_linear|output_linear)\.weight")


@dataclass(frozen=True)
class TensorSource:
    """Names of the tensors of the DCP folder from which a tensor is made, and the function that makes it."""

    names: tuple[str, ...]
    make: Callable[..., Tensor]


def recover(
    dcp_dir: Annotated[Path, tyro.conf.arg(metavar="DCP_DIR")],
    out: Annotated[Path, tyro.conf.arg(metavar="OUT")],
    original: Annotated[Path, tyro.conf.arg(metavar="ORIGINAL")],
    /,
    *,
    dry_run: bool = False,
) -> None:
    """Write a Hugging Face folder from a folder of torch.distributed.checkpoint.

    If the command is killed, running it again resumes it.

    Args:
        dcp_dir: folder with .metadata and the .distcp files of all nodes, or the trainer's checkpoint folder
            that holds it
        out: a new folder
        original: the Hugging Face folder from which training began: names, config, tokenizer
        dry_run: check everything, write nothing
    """
    plan = plan_recovery(dcp_dir, original)
    needed, free = check_room(plan, out)
    if not dry_run:
        with keeping(out):
            write_folder(plan, out)
    done = "nothing written" if dry_run else "verified"
    print(f"{out}: {len(plan.shapes)} tensors, {decimal(needed)} of {decimal(free)} free; {done}")


def plan_recovery(dcp_dir: Path, original: Path) -> Export:
    """The plan of `recover`. MismatchError lists every tensor that does not fit."""
    stock = StockFolder(find_folder(Path(dcp_dir)))
    folder = Folder(Path(original))
    held, prefix = model_names(stock, set(folder.shapes))
    tied = bool(folder.config.get(TIED))
    found = {name: source_of(name, held, tied) for name in folder.shapes}
    sources = {name: source for name, source in found.items() if source}
    kept = [name for name in found.keys() - sources.keys() if is_kept(name, folder)]
    missing = [name for name in found if name not in sources and name not in kept]
    problems = [f"{name}: missing in {stock.path}" for name in missing]
    used = {name for source in sources.values() for name in source.names}
    problems += [f"{name}: {original} has no such tensor" for name in sorted(held.keys() - used)]
    metas = {name: _meta(stock, held, source) for name, source in sources.items()}
    metas |= {
        name: torch.empty(folder.shapes[name], dtype=KINDS[folder.dtype(name)], device="meta")
        for name in kept
    }
    problems += [line for name, meta in metas.items() for line in _unfit(folder, name, meta)]
    refuse(f"{stock.path} is no whole {original} (prefix {prefix!r})", problems)

    shapes = {name: tuple(meta.shape) for name, meta in metas.items() if meta is not None}
    types = {name: meta.dtype for name, meta in metas.items() if meta is not None}
    layout = {
        file: {name: SAFETENSORS[types[name]] for name in names} for file, names in folder.layout.items()
    }
    sizes = {name: meta.nbytes for name, meta in metas.items() if meta is not None}
    if kept:
        print(f"{len(kept)} tensors of blocks that predict further tokens are those of {original}")
    produce = partial(_produce, stock, held, sources, folder)
    return Export(layout, shapes, sizes, produce, _others(folder, sum(sizes.values())), stock.stamps())


def find_folder(path: Path) -> Path:
    """The DCP folder: `path`, or the only one inside it. CheckpointError, with advice, for other folders."""
    if (path / "manifest.json").is_file():
        raise CheckpointError(
            f"{path}: a step folder of tmoe; python -m tmoe.hf export makes the folder of it"
        )
    if backend_of(path):
        raise CheckpointError(
            f"{path}: a checkpoint of Megatron; python -m tmoe.migrate import megatron makes a step of it, "
            "and python -m tmoe.hf export a Hugging Face folder of that"
        )
    if _is_dcp(path) or not path.is_dir():
        return path
    inside = sorted(sub for sub in path.iterdir() if sub.is_dir() and _is_dcp(sub))
    named = [sub for sub in inside if not BESIDE.match(sub.name)]  # leave out the optimizer's folder
    if len(named) > 1:
        raise CheckpointError(
            f"{path}: holds several DCP folders, {', '.join(s.name for s in named)}: name one"
        )
    return named[0] if named else path


def _is_dcp(path: Path) -> bool:
    return (path / ".metadata").is_file() or any(path.glob("__*.metadata"))


def model_names(stock: StockFolder, wanted: set[str]) -> tuple[dict[str, str], str]:
    """The folder's names of the model's tensors, by the model's own names, and the prefix that it adds.

    CheckpointError for a folder of adapters. Optimizers and similar entries are left out.
    """
    plain = {WRAPPERS.sub("", name): name for name in stock.tensors}
    if adapters := [name for name in plain if re.search(r"\.lora_[AB]\.", name)]:
        raise CheckpointError(f"{stock.path}: holds adapters ({adapters[0]}), not a model's weights")
    prefixes = Counter(
        name[: len(name) - len(end)]
        for name in plain
        for end in (".".join(name.split(".")[i:]) for i in range(name.count(".") + 1))
        if end in wanted
    )
    largest = max(prefixes.values(), default=0)
    prefix = min((p for p, count in prefixes.items() if count == largest), key=len, default="")
    own = {name[len(prefix) :]: stored for name, stored in plain.items() if name.startswith(prefix)}
    rest = [name for name in plain if not name.startswith(prefix)]
    own = {name: stored for name, stored in own.items() if name in wanted or not BESIDE.match(name)}
    own |= {name: name for name in rest if not BESIDE.match(name)}  # unknown tensors are reported by name
    return own, prefix


def _others(original: Folder, size: int) -> dict[str, Callable[[], bytes]]:
    """The files besides the tensors. size: bytes of all tensors."""
    others: dict[str, Callable[[], bytes]] = {
        name: partial(original.content, name) for name in original.others() if name != INDEX
    }
    if original.indexed:
        index = dict(metadata=dict(total_size=size), weight_map=original.file_of)
        others[INDEX] = lambda: (json.dumps(index, indent=2) + "\n").encode()
    return others


def is_kept(name: str, original: Folder) -> bool:
    """Whether a tensor is the original's: it belongs to a block that predicts further tokens."""
    text = original.config.get("text_config", original.config)
    number = BLOCK.match(name)
    beyond = number is not None and int(number[1]) >= text.get("num_hidden_layers", MOST["layers"])
    return (name.startswith("mtp.") or beyond) and original.dtype(name) in KINDS


def _unfit(original: Folder, name: str, meta: Tensor | None) -> list[str]:
    """Faults of a tensor. meta: its shape and type; None if its parts do not fit together."""
    if meta is None or tuple(meta.shape) != original.shapes[name]:
        got = "parts that do not fit together" if meta is None else f"shape {tuple(meta.shape)}"
        return [f"{name}: {got}, {original.path} has {original.shapes[name]}"]
    if meta.dtype not in SAFETENSORS:
        return [f"{name}: {meta.dtype}, which safetensors does not have"]
    return []


def source_of(name: str, held: dict[str, str], tied: bool) -> TensorSource | None:
    """The source of one of the original's tensors; None if the folder does not hold it.

    held: the folder's names of the model's tensors, by the model's own names.
    tied: whether the head may be read from the embedding.
    """
    found = _source_of(name, held, tied)
    if found is None and name.startswith(RENAMED):
        return _source_of("model." + name.removeprefix(RENAMED), held, tied)
    return found


def _source_of(name: str, held: dict[str, str], tied: bool) -> TensorSource | None:
    """`source_of` under this name."""
    if name in held:
        return TensorSource((name,), lambda whole: whole)
    candidates: list[TensorSource] = []
    if match := EXPERT.fullmatch(name):
        module, number, part = match[1], int(match[2]), PARTS[match[3]]
        for at in modules(module):
            candidates.append(TensorSource((f"{at}.{part}.weight",), partial(_scattered, number)))
            fused = f"{at}.experts.{'down_proj' if part == 'w2' else 'gate_up_proj'}"
            candidates.append(TensorSource((fused,), partial(_fused, number, part)))
            if part == "w3":  # without a gate
                candidates.append(TensorSource((f"{at}.experts.up_proj",), partial(_one, number)))
    elif match := STACKED.fullmatch(name):
        parts = ("w1", "w3") if match[2] == "input_linear" else ("w2",)
        names = tuple(f"{match[1]}.{part}.weight" for part in parts)
        candidates.append(TensorSource(names, _side_by_side))
        fused = "gate_up_proj" if match[2] == "input_linear" else "down_proj"
        candidates += [
            TensorSource((f"{at}.experts.{fused}",), lambda whole: whole) for at in modules(match[1])
        ]
    elif match := ROUTER.fullmatch(name):
        ends = ("router.weight", "gate.weight", "router.layer.weight")
        candidates += [
            TensorSource((f"{at}.{end}",), lambda whole: whole) for at in modules(match[1]) for end in ends
        ]
    if tied and name == "lm_head.weight":
        candidates.append(TensorSource(("model.embed_tokens.weight",), lambda whole: whole))
    return next((source for source in candidates if all(n in held for n in source.names)), None)


def modules(name: str) -> list[str]:
    """The names that the module of experts may have during training."""
    before, _, last = name.rpartition(".")
    also = [
        other
        for other in ("block_sparse_moe", "mlp")
        if other != last and last in ("block_sparse_moe", "mlp")
    ]
    return [name, *(f"{before}.{other}" for other in also)]


def _scattered(number: int, stacked_EIO: Tensor) -> Tensor:
    return stacked_EIO[number].T


def _fused(number: int, part: str, stacked: Tensor) -> Tensor:
    expert = stacked[number]
    if part == "w2":
        return expert
    half = expert.shape[0] // 2
    return expert[:half] if part == "w1" else expert[half:]


def _one(number: int, stacked: Tensor) -> Tensor:
    return stacked[number]


def _side_by_side(*stacked_EIO: Tensor) -> Tensor:
    return torch.cat([stacked.transpose(1, 2) for stacked in stacked_EIO], dim=1)


def _meta(stock: StockFolder, held: dict[str, str], source: TensorSource) -> Tensor | None:
    """Shape and type of the tensor that a source makes; None if its parts do not fit together."""
    parts = [stock.tensors[held[name]] for name in source.names]
    try:
        return source.make(*(torch.empty(part.shape, dtype=part.dtype, device="meta") for part in parts))
    except (IndexError, RuntimeError):
        return None


def _produce(
    stock: StockFolder,
    held: dict[str, str],
    sources: dict[str, TensorSource],
    folder: Folder,
    names: set[str],
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file. Three tensors of the DCP folder are cached, since one may be used many times.

    folder: the original, which has the tensors without a source.
    """
    read = functools.lru_cache(maxsize=3)(lambda name: stock.read(held[name]))
    for name in sorted(names - sources.keys()):
        yield name, folder.whole(name).to(KINDS[folder.dtype(name)])
    for name in sorted(names & sources.keys(), key=lambda name: sources[name].names):
        yield name, sources[name].make(*map(read, sources[name].names)).contiguous()
