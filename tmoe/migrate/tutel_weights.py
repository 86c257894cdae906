"""Tutel's checkpoint files, one a rank, as one safetensors file with the names of tmoe.MoE.

    python -m tmoe.migrate import tutel 'states/{rank}-of-{size}.ckpt' OUT.safetensors -- --size 8

Tutel is a layer in a model of somebody's own, so there is no step of tmoe to make of its files. In OUT a MoE
layer's router and experts have tmoe.MoE's names behind the layer's own (`LAYER.router.weight`,
`LAYER.experts.gate_up`, `LAYER.experts.down`), for `load_state_dict` of the model in which tmoe.MoE stands
where moe_layer stood; every other tensor keeps its name. Known are the gate `top` and the experts
`llama_ffn`. Missing, unknown or mismatched tensors are errors: Tutel's own loading would fill zeros.

next: tmoe/hf/files.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tmoe.checkpoint.errors import refuse
from tmoe.checkpoint.manifest import CheckpointError

COUNT = "._num_global_experts"
FFN = (
    "experts of two matrices (Tutel's ffn) are not read; keep them as experts of your own in tmoe.MoE, "
    "gathered by python -m tutel.checkpoint.gather"
)


def gather(pattern: str, size: int, namespace: str = "") -> dict[str, Tensor]:
    """All tensors of a checkpoint, of one model that holds every expert.

    pattern: path of a rank's file, with {rank} and {size} in it. namespace: keys on the way to the state
    dict, as a/b. CheckpointError names the file that is missing or damaged, MismatchError every tensor that
    does not fit.
    """
    states = [_read(pattern, rank, size, namespace) for rank in range(size)]
    counts = {name: int(value) for name, value in states[0].items() if name.endswith(COUNT)}
    layers = {name.removesuffix(COUNT): count for name, count in counts.items()}
    if not layers:
        raise CheckpointError(
            f"{_file(pattern, 0, size)}: no MoE layer of Tutel ({COUNT[1:]} is nowhere): if the file is of "
            "an old version, load and save it once with the present one; if the state dict lies deeper, name "
            "the way there with --namespace"
        )
    problems = [
        f"{name}: in the file of rank {rank}, not in all"
        for rank, state in enumerate(states)
        for name in sorted(state.keys() ^ states[0].keys())
    ]
    refuse(f"{pattern}: the ranks' files do not fit together", sorted(set(problems)))
    out = {
        name: tensor
        for name, tensor in states[0].items()
        if not any(
            name == layer + COUNT or name.startswith((f"{layer}.experts.", f"{layer}.gates."))
            for layer in layers
        )
    }
    for layer, experts in layers.items():
        out |= {f"{layer}.{name}": tensor for name, tensor in _layer(layer, experts, states).items()}
    return out


def _layer(layer: str, experts: int, states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Router and experts of one layer by tmoe.MoE's names."""
    own = {name.removeprefix(f"{layer}.") for name in states[0] if name.startswith(f"{layer}.")}
    router = "gates.0.wg.weight"
    weights = [f"experts.W_fc{i}" for i in (1, 2, 3)]
    if any("batched_fc" in name for name in own):
        raise CheckpointError(f"{layer}: {FFN}")
    problems = [f"{layer}.{name}: missing" for name in (router, *weights) if name not in own]
    known = {router, *weights, COUNT[1:]}
    problems += [
        f"{layer}.{name}: not known in a layer of gate top and experts llama_ffn"
        for name in sorted(own - known)
    ]
    refuse(f"{layer} is no layer that is known", problems)
    gate = states[0][f"{layer}.{router}"]
    ranks = len(states)
    if gate.dim() != 2 or gate.shape[0] != experts or (experts % ranks and ranks % experts):
        raise CheckpointError(
            f"{layer}: {experts} experts on {ranks} ranks, a gate of {tuple(gate.shape)}: experts and ranks "
            "must divide one another, and the gate must have a row for each"
        )
    dim = gate.shape[1]
    flat = {name: torch.cat([state[f"{layer}.{name}"].reshape(-1) for state in states]) for name in weights}
    hidden = {name: tensor.numel() // (experts * dim) for name, tensor in flat.items()}
    width = hidden[weights[0]]
    whole = all(tensor.numel() == experts * dim * width for tensor in flat.values())
    if not whole or not width:
        sizes = ", ".join(f"{layer}.{name}: {tensor.numel()}" for name, tensor in flat.items())
        raise CheckpointError(f"{sizes} elements in all ranks; must be {experts} experts x {dim} x one width")
    gate_EDF, up_EDF = (flat[name].view(experts, dim, width) for name in weights[:2])
    down_EFD = flat[weights[2]].view(experts, width, dim)
    return {
        "router.weight": gate,
        "experts.gate_up": torch.cat([gate_EDF.mT, up_EDF.mT], dim=1).contiguous(),
        "experts.down": down_EFD.mT.contiguous(),
    }


def _file(pattern: str, rank: int, size: int) -> Path:
    return Path(pattern.replace("{rank}", str(rank)).replace("{size}", str(size)))


def _read(pattern: str, rank: int, size: int, namespace: str) -> dict[str, Tensor]:
    path = _file(pattern, rank, size)
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; {pattern} must name the files of all {size} ranks")
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # many kinds, of zip, pickle and torch
        raise CheckpointError(f"{path}: no file of tensors: {str(error).splitlines()[0][:200]}") from None
    for key in filter(None, namespace.split("/")):
        if not isinstance(state, dict) or key not in state:
            raise CheckpointError(f"{path}: --namespace={namespace}: no {key} there")
        state = state[key]
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds no state dict but {type(state).__name__}")
    state = {name: t for name, t in state.items() if isinstance(t, Tensor) or str(name).endswith(COUNT)}
    return {str(name): t if isinstance(t, Tensor) else torch.tensor(t) for name, t in state.items()}


def write(pattern: str, size: int, out: Path, namespace: str = "") -> int:
    """Write the safetensors file; returns the number of tensors."""
    if out.exists():
        raise CheckpointError(f"{out}: exists already; name a new file")
    if "{rank}" not in pattern and size > 1:
        raise CheckpointError(f"{pattern}: needs {{rank}} in it, for {size} files")
    tensors = gather(pattern, size, namespace)
    partial = out.with_name(f"{out.name}.partial")
    save_file({name: t.contiguous() for name, t in tensors.items()}, partial)
    partial.rename(out)
    return len(tensors)
