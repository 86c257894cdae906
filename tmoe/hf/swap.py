"""Put tmoe's fused, optionally expert-parallel experts into a loaded transformers model, in place.

transformers 5 keeps the experts of a layer in one module, called as (hidden_states, top_k_index,
top_k_weights). It has `gate_up_proj` [E, 2F, D] and `down_proj` [E, D, F]; in gpt-oss their last two axes are
exchanged, gate and up rows take turns, and there are biases. The router beside it is untouched, so its
logits, the auxiliary loss and every hook on it stay what they were. The new module has the old one's
parameters under the old names. So state dicts, save_pretrained and optimizers built before the swap need no
change (without a mesh, the Parameter objects themselves are kept).
Registering a function with transformers' ALL_EXPERTS_FUNCTIONS was the alternative: it sees no mesh and
cannot own DTensors.

next: moe/experts.py
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from tmoe.activations import ACTIVATIONS
from tmoe.config.check import ConfigError
from tmoe.hf.architectures import SWAPPABLE
from tmoe.hf.rules import Swap
from tmoe.moe.dispatch import AllToAllDispatcher, Dispatcher, LocalDispatcher
from tmoe.moe.experts import Experts, LocalExperts
from tmoe.moe.router import Routing
from tmoe.moe.two_level import over_nodes
from tmoe.parallel.mesh import Mesh, local_part

WEIGHTS = ("gate_up_proj", "down_proj")
BIASES = tuple(f"{name}_bias" for name in WEIGHTS)
SWAP_FIRST = "swap first, then wrap (PEFT's adapters, torch.compile, checkpointing) what swap_experts returns"
# The module whose _apply_gate a class has if it defines none of its own.
DEFAULT_GATE = "transformers.integrations.moe"


class SwappedExperts(Experts):
    """A transformers experts module computed by tmoe: same parameters, same call.

    It is an Experts, so parallelize shards it as one. Weights that lie in another order than the op's are
    rearranged in every forward, at the cost of a copy of them. Parameters, state dict and optimizer stay what
    they were.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, theirs: Any, swap: Swap, mesh: Mesh | None):
        nn.Module.__init__(self)  # not that of Experts: the parameters exist and keep their names
        # What code that knows the class reads: sizes, marks, and whether the weights are initialised already.
        kept = {
            name: value
            for name, value in vars(theirs).items()
            if not name.startswith("_") and name != "forward"
        }
        vars(self).update(kept, _is_hf_initialized=getattr(theirs, "_is_hf_initialized", False))
        for name, parameter in theirs.named_parameters():
            setattr(self, name, parameter)
        self.swap = swap
        self.dispatcher: Dispatcher = LocalDispatcher()
        if mesh is not None:
            self._spread(mesh)

    def _spread(self, mesh: Mesh) -> None:
        """Keep on rank p of the expert group the experts from p*L on, as a DTensor. L: experts of a rank."""
        experts = self.gate_up_proj.shape[0]
        ep = mesh.ep.size()
        if experts % ep:
            raise ConfigError(f"mesh: ep={ep} must divide the {experts} experts of a layer")
        L = experts // ep
        p = mesh.ep.get_local_rank()
        for name, full in list(self.named_parameters()):
            local = full.data[p * L : (p + 1) * L].clone()
            spread = DTensor.from_local(local, mesh.ep, [Shard(0)], run_check=False)
            setattr(self, name, nn.Parameter(spread, full.requires_grad))
        if ep > 1:
            self.dispatcher = over_nodes(AllToAllDispatcher(mesh.ep.get_group(), L), mesh.nodes)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The experts' weighted sum, [T, D] of hidden_states' type.

        hidden_states [T, D]; experts and weights [T, K] as the router gives them.
        """
        kind = hidden_states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.gate_up_proj.dtype
        # Cast here once, as autocast does at F.linear: the op takes one type.
        with torch.autocast(kind, enabled=False):
            gate_up, down, *biases = (self._weight(name, dtype) for name in (*WEIGHTS, *BIASES))
            weights = LocalExperts(gate_up, down, biases[0], biases[1], self.swap.activation)
            weights_TK = top_k_weights.to(torch.promote_types(dtype, torch.float32))
            # The weights stand in for the logits, which no dispatcher reads.
            routing = Routing(weights_TK, top_k_index.to(torch.int32), weights_TK)
            rows, plan = self.dispatcher.dispatch(hidden_states.to(dtype), routing)
            return self.dispatcher.combine(weights(rows), plan).to(hidden_states.dtype)

    def _weight(self, name: str, dtype: torch.dtype) -> Any:
        """The rank's part as the op takes it: gate_up [L, 2F, D], down [L, D, F], biases or None.

        Biases are [L, 2F] and [L, D].
        """
        if not hasattr(self, name):
            return None
        t = local_part(getattr(self, name)).to(dtype)
        t = t.mT if self.swap.transposed and name in WEIGHTS else t
        t = torch.cat([t[:, 0::2], t[:, 1::2]], 1) if self.swap.woven and name.startswith("gate_up") else t
        return t.contiguous()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles make the class anew by `swapped_class`: no import finds it by its name."""
        theirs = getattr(type(self), "stands_for", None)
        # A class that other code has derived from it defines its own way.
        if type(self) is not swapped_class(theirs):
            return super().__reduce_ex__(protocol)
        return (_without_init, (theirs,), vars(self).copy())


@cache
def swapped_class(theirs: type | None) -> type[SwappedExperts]:
    """SwappedExperts whose instances are instances of `theirs` too.

    transformers' `_init_weights` recognises experts by their class.
    """
    if theirs is None:
        return SwappedExperts
    return type(f"Swapped{theirs.__name__}", (SwappedExperts, theirs), dict(stands_for=theirs))


def _without_init(theirs: type | None) -> SwappedExperts:
    made = swapped_class(theirs)
    return made.__new__(made)


def swap_experts(model: Any, mesh: Mesh | None = None) -> Any:
    """Replace the experts of every MoE block of a transformers model by tmoe's, in place; returns the model.

    mesh: spread the experts over its ep axis. Every rank must hold the same weights, and every rank takes
        part in every forward and backward with a batch of its own. Then
        `tmoe.parallel.parallelize(model, mesh)` shards the rest and sums gradients over the ranks, so divide
        each rank's loss by the global count.

    Raises ConfigError, and leaves the model unchanged, where there is no table entry or no such block;
    where the op does not compute the experts; where the experts are sharded, wrapped or offloaded already,
    or have no weights yet; where mesh is no Mesh, or ep does not divide the experts.
    Forward hooks on transformers' own experts modules are lost with those modules. accelerate's hooks that
    move their inputs to their device are kept.
    """
    if not isinstance(mesh, Mesh | None):
        raise ConfigError(f"swap_experts: mesh={mesh!r}; must be a Mesh (tmoe.parallel.build_mesh), or None")
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in SWAPPABLE:
        raise ConfigError(
            f"swap_experts: model_type {kind!r}; there are table entries for {', '.join(SWAPPABLE)}"
        )
    swap = SWAPPABLE[kind]
    if done := sum(isinstance(module, SwappedExperts) for module in model.modules()):
        raise ConfigError(
            f"swap_experts: {done} blocks of this {kind} have tmoe's experts already; swap a model once"
        )
    modules = dict(model.named_modules())
    found = {name: module for name, module in modules.items() if name.endswith(f".{swap.place}")}
    for name, theirs in found.items():
        reason = _held_otherwise(theirs, swap)
        reason = reason or _held_elsewhere(model, name) or _computed_otherwise(theirs, swap)
        if reason:
            raise ConfigError(f"swap_experts: {name} {reason}")
    astray = [name for name, m in modules.items() if {*WEIGHTS} <= m._parameters.keys() and name not in found]
    if astray:
        raise ConfigError(f"swap_experts: {astray[0]} holds experts, and not as *.{swap.place}; {SWAP_FIRST}")
    if not found:
        raise ConfigError(
            f"swap_experts: no module *.{swap.place} in this {kind} holds gate_up_proj and down_proj "
            f"(and biases)"
        )
    swapped = {name: swapped_class(type(theirs))(theirs, swap, mesh) for name, theirs in found.items()}
    for name, ours in swapped.items():
        model.set_submodule(name, ours)
        if hook := getattr(found[name], "_hf_hook", None):
            from accelerate.hooks import add_hook_to_module  # it is installed, since it made the hook

            add_hook_to_module(ours, hook)
    return model


def _is_experts(module: nn.Module, swap: Swap) -> bool:
    """Whether it has the weights of the entry, in the order of the entry, and its gate.

    transformers marks all three.
    """
    return not _held_otherwise(module, swap) and not _gated_otherwise(module, swap)


def _held_otherwise(module: nn.Module, swap: Swap) -> str:
    """How the module's weights differ from the entry's, in name or order; "" where they do not."""
    names = {name for name, _ in module.named_parameters()}
    direct = {name for name, _ in module.named_parameters(recurse=False)}
    deep = {part for name in names - direct for part in name.split(".")}
    if deep & {*WEIGHTS}:
        return f"is {type(module).__name__} around experts or their weights; {SWAP_FIRST}"
    if names not in ({*WEIGHTS}, {*WEIGHTS, *BIASES}):
        held = ", ".join(sorted(names)[:6]) or "nothing"
        return f"must hold gate_up_proj and down_proj (and biases), and holds {held}"
    lie = (
        getattr(module, "is_transposed", swap.transposed),
        not getattr(module, "is_concatenated", not swap.woven),
    )
    if lie != (swap.transposed, swap.woven):
        return (
            f"is marked is_transposed={lie[0]}, is_concatenated={not lie[1]}; "
            f"the table entry is for {swap.transposed}, {not swap.woven}"
        )
    return ""


def _held_elsewhere(model: nn.Module, name: str) -> str:
    """Why the module's weights cannot be taken whole from here; "" where they can."""
    module = model.get_submodule(name)
    if any(isinstance(p, DTensor) for p in module.parameters()):
        return "is sharded already; swap before parallelize or fully_shard"
    if any(p.is_meta for p in module.parameters()):
        return (
            "has its weights on meta: offloaded by accelerate (device_map), or never loaded; "
            "load the model with its experts on a device, then swap"
        )
    parents = [name[:i] for i in range(len(name)) if name[i] == "."]
    for place in ("", *parents):
        hooks = _hooks(model.get_submodule(place))
        moved = [
            getattr(hook, "offload", False) and getattr(hook, "place_submodules", False) for hook in hooks
        ]
        if any(moved):
            return f"is offloaded by accelerate's hook on {place or 'the model'}; load it without, then swap"
    own = _hooks(module)
    if any(type(hook).__name__ != "AlignDevicesHook" or hook.offload for hook in own):
        kinds = ", ".join(type(hook).__name__ for hook in own)
        return (
            f"has accelerate's hook {kinds}, which would go; swap a model without "
            f"(accelerate.hooks' remove_hook_...)"
        )
    if "forward" in vars(module) and not own:
        return "has a forward that something has put in place of its class's; swap first"
    return ""


def _hooks(module: nn.Module) -> list[Any]:
    """accelerate's hooks on the module itself; a chain of hooks one by one."""
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def _computed_otherwise(module: Any, swap: Swap) -> str:
    """What the module computes that the fused op does not; "" where they compute the same."""
    if reason := _gated_otherwise(module, swap):
        return reason
    ours = ACTIVATIONS[swap.activation]
    if {name: getattr(module, name, None) for name in ours.constants} != ours.constants:
        said = ", ".join(f"swiglu_{name}={getattr(module, name, None)}" for name in ours.constants)
        return f"has {said}; computed: {tuple(ours.constants.values())}"
    if ours.of_gate is None:
        return ""
    # Ask the function and not the configuration: some experts do not read it, others lack the setting.
    x = torch.linspace(-30, 30, 61, device=module.gate_up_proj.device)
    act = getattr(module, "act_fn", None)
    if act is None or not torch.allclose(act(x), ours.of_gate(x), rtol=1e-3):
        said = getattr(getattr(module, "config", None), "hidden_act", None)
        name = getattr(act, "__name__", type(act).__name__)
        return f"computes {name} (hidden_act={said!r}); the fused op computes {ours.hidden_act}"
    return ""


def _gated_otherwise(module: Any, swap: Swap) -> str:
    """Which mark of transformers says that the module is not down(act(gate) * up).

    "" where none does, or where the entry names its gate.
    """
    if not getattr(module, "has_gate", True):
        return "is marked has_gate=False: no gate beside up, which the fused op needs"
    if getattr(module, "has_post_expert_norm", False):
        return (
            "is marked has_post_expert_norm=True: a norm behind each expert, "
            "which the fused op does not compute"
        )
    gate = getattr(module, "_apply_gate", None)
    ours = ACTIVATIONS[swap.activation]
    if ours.of_gate and gate is not None and gate.__module__ != DEFAULT_GATE:
        computed = f"{ours.hidden_act}(gate) * up"
        return f"computes a gate of its own, {gate.__qualname__}; the fused op computes {computed}"
    return ""
