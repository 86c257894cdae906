"""Converts Tutel's checkpoint files, one for each rank, to one safetensors file with the names of tmoe.MoE.

    python -m tmoe.migrate import tutel 'states/{rank}-of-{size}.ckpt' OUT.safetensors -- --size 8

Tutel is a layer in a user's own model, so its files cannot become a step of tmoe. In OUT, a MoE layer's
router and experts have the layer's name followed by tmoe.MoE's names (`LAYER.router.weight`,
`LAYER.experts.gate_up`, `LAYER.experts.down`), for `load_state_dict` of the user's model after tmoe.MoE has
replaced moe_layer. Every other tensor keeps its name. The gate `top` and the experts `llama_ffn` and `ffn`
are supported. For `ffn`, tmoe.MoE needs `activation="relu"` (or the value of activation_fn) and, unless both
biases were left out, `bias=True`. Missing, unknown or mismatched tensors are errors: Tutel's own loading
would fill zeros.

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
LLAMA = (
    "W_fc1",
    "W_fc2",
    "W_fc3",
)  # [E, D, F] twice and [E, F, D]; a rank holds its experts, or a flat part of one expert
FFN = ("batched_fc1_w", "batched_fc2_w")  # [E, F, D] twice; ranks that share an expert divide F
BIASES = ("batched_fc1_bias", "batched_fc2_bias")  # [E, F] and [E, D]; sharing ranks divide D, rounded up


def gather(pattern: str, size: int, namespace: str = "") -> dict[str, Tensor]:
    """All tensors of a checkpoint, as those of one model that holds every expert.

    pattern: path of a rank's file, with {rank} and {size} in it.
    size: number of ranks.
    namespace: keys that lead to the state dict within the file, as a/b.
    CheckpointError names the file that is missing or damaged, MismatchError every tensor that does not fit.
    """
    states = [_read(pattern, rank, size, namespace) for rank in range(size)]
    counts = {name: int(value) for name, value in states[0].items() if name.endswith(COUNT)}
    layers = {name.removesuffix(COUNT): count for name, count in counts.items()}
    if not layers:
        raise CheckpointError(
            f"{_file(pattern, 0, size)}: no MoE layer of Tutel ({COUNT[1:]} is nowhere): if the file is of "
            "an old version, load and save it once with the present one; if the state dict lies deeper, name "
            "its keys with --namespace"
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
    """Router and experts of one layer, by tmoe.MoE's names."""
    present = {name.removeprefix(f"{layer}.") for name in states[0] if name.startswith(f"{layer}.")}
    router = "gates.0.wg.weight"
    kind = "ffn" if any("batched_fc" in name for name in present) else "llama_ffn"
    biased = any(f"experts.{name}" in present for name in BIASES)
    names = (*FFN, *(BIASES if biased else ())) if kind == "ffn" else LLAMA
    weights = [f"experts.{name}" for name in names]
    problems = [f"{layer}.{name}: missing" for name in (router, *weights) if name not in present]
    if biased and len(problems) == 1:
        problems.append(f"{layer}: tmoe has biases on both projections of an expert or on none")
    known = {router, *weights, COUNT[1:]}
    problems += [
        f"{layer}.{name}: not known in a layer of gate top and experts {kind}"
        for name in sorted(present - known)
    ]
    refuse(f"{layer} is not a known kind of layer", problems)
    gate = states[0][f"{layer}.{router}"]
    ranks = len(states)
    if gate.dim() != 2 or gate.shape[0] != experts or (experts % ranks and ranks % experts):
        raise CheckpointError(
            f"{layer}: {experts} experts on {ranks} ranks, a gate of {tuple(gate.shape)}: experts and ranks "
            "must divide one another, and the gate must have a row for each"
        )
    dim = gate.shape[1]
    if kind == "ffn":
        return {"router.weight": gate, **_ffn(layer, experts, dim, states, biased)}
    return {"router.weight": gate, **_llama_ffn(layer, experts, dim, states, weights)}


def _llama_ffn(
    layer: str, experts: int, dim: int, states: list[dict[str, Tensor]], weights: list[str]
) -> dict[str, Tensor]:
    """A layer's experts of kind llama_ffn, whose ranks hold pieces of the flat matrices `weights`."""
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
        "experts.gate_up": torch.cat([gate_EDF.mT, up_EDF.mT], dim=1).contiguous(),
        "experts.down": down_EFD.mT.contiguous(),
    }


def _ffn(
    layer: str, experts: int, dim: int, states: list[dict[str, Tensor]], biased: bool
) -> dict[str, Tensor]:
    """A layer's experts of kind ffn, with two matrices each.

    Ranks hold the experts in order; ranks that share an expert hold its width in order.
    """

    def whole(name: str) -> Tensor:
        """The tensor of all ranks as [E, all elements of an expert]."""
        flat = torch.cat([state[f"{layer}.experts.{name}"].reshape(-1) for state in states])
        if flat.numel() % experts:
            elements = f"{layer}.experts.{name}: {flat.numel()} elements in all ranks"
            raise CheckpointError(f"{elements}; must be as many for each of {experts} experts")
        return flat.view(experts, -1)

    up, down = (whole(name) for name in FFN)
    width = up.shape[1] // dim
    sizes = {name: whole(name).shape[1] for name in BIASES} if biased else {}
    sharers = max(1, len(states) // experts)
    padded = -(-dim // sharers) * sharers  # sharing ranks hold equal parts of the second bias
    valid = width and up.shape[1] == down.shape[1] == dim * width
    if not valid or tuple(sizes.values()) not in ((), (width, padded)):
        sizes = {FFN[0]: up.shape[1], FFN[1]: down.shape[1]} | sizes
        shown = ", ".join(f"{layer}.experts.{name}: {size}" for name, size in sizes.items())
        raise CheckpointError(
            f"{shown} elements of an expert in all ranks; must be {dim} x one width twice, and biases of "
            f"that width and of {padded}; experts with another output_dim are not read"
        )
    tensors = {
        "experts.gate_up": up.view(experts, width, dim),
        "experts.down": down.view(experts, width, dim).mT.contiguous(),
    }
    if biased:
        tensors["experts.gate_up_bias"] = whole(BIASES[0])
        tensors["experts.down_bias"] = whole(BIASES[1])[:, :dim].contiguous()
    return tensors


def _file(pattern: str, rank: int, size: int) -> Path:
    return Path(pattern.replace("{rank}", str(rank)).replace("{size}", str(size)))


def _read(pattern: str, rank: int, size: int, namespace: str) -> dict[str, Tensor]:
    path = _file(pattern, rank, size)
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; {pattern} must name the files of all {size} ranks")
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and torch raise many kinds
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
    """Writes the safetensors file and returns the number of its tensors. Arguments as for `gather`."""
    if out.exists():
        raise CheckpointError(f"{out}: exists already; name a new file")
    if "{rank}" not in pattern and size > 1:
        raise CheckpointError(f"{pattern}: needs {{rank}} in it, for {size} files")
    tensors = gather(pattern, size, namespace)
    partial = out.with_name(f"{out.name}.partial")
    save_file({name: t.contiguous() for name, t in tensors.items()}, partial)
    partial.rename(out)
    return len(tensors)
