"""Put tmoe's fused, optionally expert-parallel experts into a loaded transformers model, in place.

transformers 5 keeps the experts of a layer in one module with `gate_up_proj` [E, 2F, D] and `down_proj` [E, D, F] (gpt-oss: the
last two axes exchanged, gate and up rows taking turns, and biases), called as (hidden_states, top_k_index, top_k_weights); the router beside it is untouched, so its logits, the auxiliary loss and every hook on it
stay what they were. The new module has the old one's parameters under the old names: state dicts, save_pretrained and optimizers
built before the swap do not notice (without a mesh: the Parameter objects themselves are kept).
Registering a function with transformers' ALL_EXPERTS_FUNCTIONS was the other way: it sees no mesh and cannot own DTensors.

next: experts.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from tmoe.config import ConfigError
from tmoe.experts import Experts, LocalExperts
from tmoe.hf_tables import CLAMPED, SWAPPABLE, Swap
from tmoe.parallel.dispatch import AllToAllDispatcher, Dispatcher, LocalDispatcher
from tmoe.parallel.mesh import Mesh, local_part
from tmoe.router import Routing

WEIGHTS = ("gate_up_proj", "down_proj")
BIASES = tuple(f"{name}_bias" for name in WEIGHTS)


class SwappedExperts(Experts):
    """A transformers experts module computed by tmoe: same parameters, same call. An Experts, so parallelize shards it as one.

    Weights that lie otherwise than the op's are turned round in every forward, at the cost of a copy of them: parameters, state dict
    and optimizer stay what they were.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, theirs: Any, swap: Swap, mesh: Mesh | None):
        nn.Module.__init__(self)  # not Experts': the parameters exist and keep their names
        for name, parameter in theirs.named_parameters():
            setattr(self, name, parameter)
        self.swap = swap
        self.dispatcher: Dispatcher = LocalDispatcher()
        if mesh is not None:
            self._spread(mesh)
        self.train(theirs.training)

    def _spread(self, mesh: Mesh) -> None:
        """Rank p of the expert group keeps experts p*L and on, as a DTensor."""
        experts, ep = self.gate_up_proj.shape[0], mesh.ep.size()
        if experts % ep:
            raise ConfigError(f"mesh: ep={ep} must divide the {experts} experts of a layer")
        L, p = experts // ep, mesh.ep.get_local_rank()
        for name, full in list(self.named_parameters()):
            local = full.data[p * L : (p + 1) * L].clone()
            spread = DTensor.from_local(local, mesh.ep, [Shard(0)], run_check=False)
            setattr(self, name, nn.Parameter(spread, full.requires_grad))
        if ep > 1:
            self.dispatcher = AllToAllDispatcher(mesh.ep.get_group(), L)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, D], experts and weights [T, K] as the router gives them; [T, D] of hidden_states' type."""
        kind = hidden_states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.gate_up_proj.dtype
        with torch.autocast(kind, enabled=False):  # cast here once, as autocast does at F.linear; the op takes one type
            gate_up, down, *biases = (self._weight(name, dtype) for name in (*WEIGHTS, *BIASES))
            weights = LocalExperts(gate_up, down, biases[0], biases[1], self.swap.activation)
            weights_TK = top_k_weights.to(torch.promote_types(dtype, torch.float32))
            routing = Routing(weights_TK, top_k_index.to(torch.int32), weights_TK)  # no dispatcher reads the logits
            rows, plan = self.dispatcher.dispatch(hidden_states.to(dtype), routing)
            return self.dispatcher.combine(weights(rows), plan).to(hidden_states.dtype)

    def _weight(self, name: str, dtype: torch.dtype) -> Any:
        """The rank's part as the op takes it: gate_up [L, 2F, D], down [L, D, F], biases [L, 2F] and [L, D] or None."""
        if not hasattr(self, name):
            return None
        t = local_part(getattr(self, name)).to(dtype)
        t = t.mT if self.swap.transposed and name in WEIGHTS else t
        t = torch.cat([t[:, 0::2], t[:, 1::2]], 1) if self.swap.woven and name.startswith("gate_up") else t
        return t.contiguous()


def swap_experts(model: Any, mesh: Mesh | None = None) -> Any:
    """Replace the experts of every MoE block of a transformers model by tmoe's, in place; returns the model.

    mesh: spread the experts over its ep axis; every rank must hold the same weights, and every rank takes part in every forward and
    backward with a batch of its own. `tmoe.parallel.parallelize(model, mesh)` then shards the rest and sums gradients over the ranks,
    so divide each rank's loss by the global count. Raises ConfigError: no table entry, no such block, experts that are sharded already,
    an activation other than the op's, no Mesh, or ep does not divide the experts; the model is unchanged then. Forward hooks on
    transformers' own experts modules go with these.
    """
    if not isinstance(mesh, Mesh | None):
        raise ConfigError(f"swap_experts: mesh={mesh!r}; must be a Mesh (tmoe.parallel.build_mesh), or None")
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in SWAPPABLE:
        raise ConfigError(f"swap_experts: model_type {kind!r}; there are table entries for {', '.join(SWAPPABLE)}")
    swap = SWAPPABLE[kind]
    if done := sum(isinstance(module, SwappedExperts) for module in model.modules()):
        raise ConfigError(f"swap_experts: {done} blocks of this {kind} have tmoe's experts already; swap a model once")
    found = {n: m for n, m in model.named_modules() if n.endswith(f".{swap.place}") and _is_experts(m, swap)}
    if not found:
        raise ConfigError(
            f"swap_experts: no module *.{swap.place} in this {kind} holds gate_up_proj and down_proj (and biases)"
        )
    if spread := [n for n, m in found.items() if any(isinstance(p, DTensor) for p in m.parameters())]:
        raise ConfigError(f"swap_experts: {spread[0]} is sharded already; swap before parallelize or fully_shard")
    if model.config.hidden_act != "silu":
        raise ConfigError(f"swap_experts: hidden_act={model.config.hidden_act!r}; the fused op computes silu")
    for theirs in found.values() if swap.activation == "clamped" else ():
        if (theirs.alpha, theirs.limit) != CLAMPED:
            raise ConfigError(
                f"swap_experts: swiglu_alpha={theirs.alpha}, swiglu_limit={theirs.limit}; computed: {CLAMPED}"
            )
    swapped = {name: SwappedExperts(theirs, swap, mesh) for name, theirs in found.items()}
    for name, ours in swapped.items():
        model.set_submodule(name, ours)
    return model


def _is_experts(module: nn.Module, swap: Swap) -> bool:
    """Whether it has the weights that the entry says, lying as it says; transformers marks how they lie."""
    lie = (getattr(module, "is_transposed", swap.transposed), not getattr(module, "is_concatenated", not swap.woven))
    names = {name for name, _ in module.named_parameters()}
    return names in ({*WEIGHTS}, {*WEIGHTS, *BIASES}) and lie == (swap.transposed, swap.woven)
