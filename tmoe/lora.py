"""Low-rank adapters in transformers' models whose experts tmoe computes: add, merge, save, load.

    model = tmoe.hf.swap_experts(AutoModelForCausalLM.from_pretrained(DIR))
    tmoe.lora.add(model, rank=16)         # all weights are frozen; experts get rank / top-k
    ...                                   # train
    tmoe.lora.save(model, "adapter")      # PEFT's files, which `python -m tmoe.hf import-adapter` reads too
    tmoe.lora.merge(model)                # W + scale B A, in fp32; then save_pretrained

Experts' adapters are computed inside the op, so no merged weight exists and no gradient of one.

next: hf/swap.py, hf/adapters/write.py
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tmoe.checkpoint.rewrite import require_absent
from tmoe.config.check import ConfigError, require
from tmoe.config.run import LoraConfig
from tmoe.hf.adapters.names import Names, Place, Sites
from tmoe.hf.adapters.peft_config import Order
from tmoe.hf.adapters.read import PeftFolder
from tmoe.hf.adapters.settings import Sizes
from tmoe.hf.adapters.write import PeftFile, targets_of
from tmoe.hf.foreign import ADAPTER, ADAPTER_WEIGHTS
from tmoe.hf.swap import SwappedExperts
from tmoe.model.adapted import Adapted
from tmoe.model.lora import require_low
from tmoe.parallel.mesh import local_part, local_slices

GATES = re.compile(r"(^|\.)(gate|router(\.layer)?|shared_expert_gate)$")  # layers that get no adapter


class AdaptedLinear(Adapted):
    """A frozen layer of another library's model: the adapter is computed in its own type, fp32."""

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight, self.bias)
        return y + self.outer(self.inner(x.to(self.a.dtype))).to(y.dtype) if self.adapters_on else y


def add(
    model: Any,
    rank: int,
    *,
    expert_rank: int | None = None,
    alpha: float = 32.0,
    rs: bool = False,
    targets: Sequence[str] = (),
    dropout: float = 0.0,
    seed: int = 0,
) -> Any:
    """Freezes a model and adds adapters to its experts and linear layers, in place; returns the model.

    model: transformers', after `tmoe.hf.swap_experts`. With a mesh each rank holds its experts' adapters.
    rank: of linear layers' adapters. expert_rank: of each expert's; None: rank / top-k, at least 1.
    alpha, rs: the factor is alpha / rank, or with `rs` alpha / sqrt(rank).
    targets: regular expressions searched in the names of modules and experts' parameters, as "q_proj",
        "experts.down_proj"; none: all. The output layer, routers and gates get none.
    dropout: share of linear layers' inputs that are dropped in training.
    seed: a is drawn from it by name, equal on all ranks; b is zero.

    ConfigError for a model without swapped experts or with adapters, for a target that matches nothing, and
    for a rank above the smaller side of a matrix.
    """
    wrong = "one text, whose letters would each be a pattern"
    require(not isinstance(targets, str), "targets", targets, wrong, f"[{targets!r}]")
    lora = LoraConfig(rank, expert_rank, alpha, rs, tuple(targets), dropout=dropout)
    require(rank >= 1, "rank", rank, "must be 1 or more")
    found = _matrices(model)
    _require_plain(model, "add")
    for target in lora.targets:
        some = any(re.search(target, name) for name in found)
        require(some, "targets", target, "found in no name of a layer or parameter that can have one")
    picks = [re.compile(target) for target in lora.targets]
    names = [name for name in found if not picks or any(pick.search(name) for pick in picks)]
    ranks = {name: _rank(model, lora, found[name]) for name in names}
    for name, rank in ranks.items():
        require_low(lora, name, rank, _side(model, found[name]))
    _attach(model, {name: Sizes(rank, alpha) for name, rank in ranks.items()}, rs, dropout)
    for name in names:
        _draw(f"{name}.a", _factors(model, found[name])[0], seed)
    return model


def merge(model: Any) -> Any:
    """Adds the adapters to the weights, and removes the adapters, in place; returns the model.

    The sum is computed in fp32, or in the weights' type if it is wider, and rounded once to their type. The
    weights stay frozen.
    """
    for name, where in _matrices(model).items():
        module = model.get_submodule(where[0])
        if isinstance(module, Adapted):
            wide = torch.promote_types(module.weight.dtype, torch.float32)
            change = module.b.detach().to(wide) @ module.a.detach().to(wide) * module.scale
            plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            weight = module.weight.detach()
            plain.weight = nn.Parameter((weight.to(wide) + change).to(weight.dtype), requires_grad=False)
            plain.bias = module.bias
            plain.train(module.training)
            model.set_submodule(name, plain)
        elif isinstance(module, SwappedExperts) and where[1] in module.scales:
            _merge_experts(module, where[1])
    return model


@torch.no_grad()
def _merge_experts(module: SwappedExperts, matrix: str) -> None:
    weight = local_part(getattr(module, module.marks.names[matrix == "down"]))
    wide = torch.promote_types(weight.dtype, torch.float32)
    a, b = (local_part(getattr(module, f"{matrix}_{part}")).to(wide) for part in "ab")
    change = b @ a * module.scales.pop(matrix)
    marks = module.marks
    if marks.woven and matrix == "gate_up":
        gate, up = change.chunk(2, 1)
        change = torch.stack([gate, up], 2).flatten(1, 2)
    weight.copy_(weight.to(wide) + (change.mT if marks.transposed else change))
    for part in "ab":
        delattr(module, f"{matrix}_{part}")


def save(model: Any, folder: str | Path) -> None:
    """Writes the model's adapters as a folder of PEFT's, stacks of experts as PEFT 0.19 has them.

    folder: a new one. With a mesh all ranks call it, and rank 0 writes. ConfigError without adapters.
    """
    folder = Path(folder)
    found = {name: where for name, where in _matrices(model).items() if _factors(model, where)}
    require(bool(found), "tmoe.lora.save: the model has no adapters; add them with tmoe.lora.add")
    sites = _sites(model)
    some = next(iter(found.values()))
    modules = [model.get_submodule(path) for path, _ in found.values()]
    dropout = max((m.dropout for m in modules if isinstance(m, Adapted)), default=0.0)
    sizes, pairs = {}, {}
    for name, where in found.items():
        a, b = (t.full_tensor() if isinstance(t, DTensor) else t for t in _factors(model, where))
        pairs[name] = (a.detach().float().cpu(), b.detach().float().cpu())
        sizes[name] = Sizes(a.shape[-2], _scale(model, where) * a.shape[-2])  # factor = alpha / rank
    assert some
    file = PeftFile(targets_of(sites, found, "peft"), sizes, LoraConfig(1, dropout=dropout), sites)
    if dist.is_initialized() and dist.get_rank():
        return
    require_absent(folder)
    folder.mkdir(parents=True)
    tensors = {n: t.contiguous() for n, t in file.tensors(pairs.__getitem__, {*file.shapes()})}
    save_file(tensors, folder / ADAPTER_WEIGHTS[0], metadata=dict(format="pt"))
    base = str(getattr(model.config, "_name_or_path", "") or "")
    (folder / ADAPTER).write_text(json.dumps(file.config(base), indent=2) + "\n")


def load(model: Any, folder: str | Path, *, peft_version: str = "", b_order: Order | None = None) -> Any:
    """Freezes a model and adds the adapters of a folder of PEFT's, in place; returns the model.

    model: as for `add`. peft_version, b_order: for a file that does not state them, as of
        `python -m tmoe.hf import-adapter`.
    Raises as `PeftFolder` does, and ConfigError for a model with adapters.
    """
    found = _matrices(model)
    _require_plain(model, "load")
    file = PeftFolder(Path(folder), _sites(model), peft_version, b_order)
    adapters = dict(file.adapters())
    sizes = {name: Sizes(one.a.shape[-2], one.alpha) for name, one in adapters.items()}
    _attach(model, sizes, file.config.rs, file.config.dropout)
    with torch.no_grad():
        for name, one in adapters.items():
            for mine, whole in zip(_factors(model, found[name]), (one.a, one.b), strict=True):
                local_part(mine).copy_(whole[local_slices(mine)])
    return model


# ---- a model's matrices ----

Where = tuple[str, str]  # a module's name, and of experts the matrix, gate_up or down


def _matrices(model: Any) -> dict[str, Where]:
    """The matrices that can have an adapter, by transformers' name of the layer or parameter.

    ConfigError for a model without swapped experts.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found: dict[str, Where] = {}
    for name, module in model.named_modules():
        if isinstance(module, SwappedExperts):
            for matrix, parameter in zip(("gate_up", "down"), module.marks.names, strict=True):
                found[f"{name}.{parameter}"] = (name, matrix)
        elif isinstance(module, nn.Linear) and module is not head and not GATES.search(name):
            found[name] = (name, "")
    if not any(matrix for _, matrix in found.values()):
        raise ConfigError(
            "tmoe.lora: the model has no experts of tmoe's", valid="tmoe.hf.swap_experts(model)"
        )
    return found


def _require_plain(model: Any, call: str) -> None:
    """ConfigError for a model that has adapters: new ones would replace them."""
    if any(isinstance(module, Adapted) or getattr(module, "scales", None) for module in model.modules()):
        raise ConfigError(f"tmoe.lora.{call}: the model has adapters; merge them, or load the model again")


def _rank(model: Any, lora: LoraConfig, where: Where) -> int:
    if not where[1]:
        return lora.rank
    config = model.config.get_text_config()
    names = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k")
    top_k = next((k for n in names if isinstance(k := getattr(config, n, None), int)), None)
    if top_k is None and lora.expert_rank is None:
        wrong = "this model's config does not say how many experts a token has"
        raise ConfigError.of("expert_rank", None, wrong, "a rank")
    return lora.rank_of_experts(top_k or 1)


def _side(model: Any, where: Where) -> int:
    """The smaller side of a matrix; of experts, that of each."""
    module = model.get_submodule(where[0])
    if where[1]:
        return min(getattr(module, module.marks.names[where[1] == "down"]).shape[-2:])
    return min(module.out_features, module.in_features)


def _attach(model: Any, sizes: dict[str, Sizes], rs: bool, dropout: float) -> None:
    """Freezes the model, and adds adapters of these ranks and alphas, all zero."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    matrices = _matrices(model)
    for name, (rank, alpha) in sizes.items():
        path, matrix = matrices[name]
        module = model.get_submodule(path)
        scale = alpha / (rank**0.5 if rs else rank)
        if isinstance(module, SwappedExperts):
            module.adapt(matrix, rank, scale)
            continue
        linear = AdaptedLinear(module, rank, scale, dropout)
        linear.train(module.training)
        nn.init.zeros_(linear.a)
        nn.init.zeros_(linear.b)
        model.set_submodule(path, linear)


def _factors(model: Any, where: Where) -> tuple[Tensor, ...]:
    """a and b of a matrix; () if it has no adapter."""
    module = model.get_submodule(where[0])
    if isinstance(module, SwappedExperts):
        if where[1] not in module.scales:
            return ()
        return getattr(module, f"{where[1]}_a"), getattr(module, f"{where[1]}_b")
    return (module.a, module.b) if isinstance(module, Adapted) else ()


def _scale(model: Any, where: Where) -> float:
    module = model.get_submodule(where[0])
    return module.scales[where[1]] if isinstance(module, SwappedExperts) else module.scale


@torch.no_grad()
def _draw(name: str, parameter: Tensor, seed: int) -> None:
    """Uniform within 1 / sqrt(inputs), as PEFT draws a; from the seed and the name, equal on all ranks."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    draw = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    most = parameter.shape[-1] ** -0.5
    whole = torch.empty(parameter.shape).uniform_(-most, most, generator=draw)
    local_part(parameter).copy_(whole[local_slices(parameter)])


def _sites(model: Any) -> Sites:
    """The model's own modules as the names of PEFT's files. Experts may also be one by one."""
    matrices: dict[str, tuple[int, ...]] = {}
    held, apart = Names({}, {}), Names({}, {})
    for name, (path, matrix) in _matrices(model).items():
        module = model.get_submodule(path)
        if not isinstance(module, SwappedExperts):
            out, width = matrices[name] = tuple(module.weight.shape)
            held.linears[path] = (Place(name, 0, out, 1, 0, None, width, False),)
            continue
        E, rows, width = matrices[name] = module.sizes(matrix)
        marks, leaf = module.marks, name.rpartition(".")[2]
        halves = [(0, rows // 2), (rows // 2, rows // 2)] if leaf == "gate_up_proj" else [(0, rows)]
        parts = halves if marks.woven else [(0, rows)]
        every = len(parts)
        places = [Place(name, *part, every, i, None, width, marks.transposed) for i, part in enumerate(parts)]
        held.stacks.setdefault(path, {})[leaf] = tuple(places)
        leaves = ("gate_proj", "up_proj") if len(halves) == 2 else (leaf,)
        for e in range(E):
            for one, half in zip(leaves, halves, strict=True):
                apart.linears[f"{path}.{e}.{one}"] = (Place(name, *half, 1, 0, e, width, False),)
    modules = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    return Sites(matrices, apart, held, frozenset(modules))
