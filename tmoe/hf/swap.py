"""Put tmoe's fused, optionally expert-parallel experts into a loaded transformers model, in place.

transformers 5 keeps the experts of a layer in one module, called as (hidden_states, top_k_index,
top_k_weights), and marks it: hf/experts_module.py reads the layout of its weights and the activation that it
computes. So no table of families is needed. The router is a separate module and is not changed, so its
logits, the auxiliary loss and all its hooks stay the same. The new module has the parameters of the old one
under the same names. So state dicts, save_pretrained and optimizers built before the swap need no change
(without a mesh, the Parameter objects themselves are kept).
The alternative was to register a function with transformers' ALL_EXPERTS_FUNCTIONS, but such a function has
no mesh and cannot own DTensors.

next: hf/experts_module.py, moe/experts.py
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tmoe.base.activations import activation
from tmoe.config.check import ConfigError
from tmoe.config.float8_settings import MULTIPLE
from tmoe.hf.experts_module import Marks, is_marked, read_marks
from tmoe.moe.exchange.dispatch import AllToAllDispatcher, Dispatcher, LocalDispatcher
from tmoe.moe.exchange.two_level import over_nodes
from tmoe.moe.experts import Experts, LocalExperts
from tmoe.moe.fp8_choice import KERNELS
from tmoe.moe.router import Routing
from tmoe.ops.experts.adapted import Adapters
from tmoe.ops.experts.fp8_codes import encode
from tmoe.ops.launch.kernel_launch import device_facts
from tmoe.parallel.mesh import Mesh, local_part

SWAP_FIRST = "swap first, then wrap (PEFT's adapters, torch.compile, checkpointing) what swap_experts returns"
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class SwappedExperts(Experts):
    """A transformers experts module computed by tmoe, with the same parameters and the same call.

    It is a subclass of Experts, so parallelize shards it in the same way. Weights in another order than the
    op's are rearranged in every forward, at the cost of a copy of the weights. Parameters, state dict and
    optimizer are not changed.
    """

    down_proj: nn.Parameter

    def __init__(self, theirs: Any, marks: Marks, mesh: Mesh | None, fp8: bool = False):
        nn.Module.__init__(self)  # not Experts.__init__: the parameters exist already and keep their names
        # Keep the attributes that other code reads: sizes, marks, and whether the weights are initialised.
        attributes = {
            name: value
            for name, value in vars(theirs).items()
            if not name.startswith("_") and name != "forward"
        }
        vars(self).update(attributes, _is_hf_initialized=getattr(theirs, "_is_hf_initialized", False))
        for name, parameter in theirs.named_parameters():
            setattr(self, name, parameter)
        self.marks = marks
        self.scales: dict[str, float] = {}  # of the adapters that tmoe.lora.add has added
        self.adapters_on = True
        self.fp8 = fp8
        self.dispatcher: Dispatcher = LocalDispatcher()
        if mesh is not None:
            self._spread(mesh)

    def _spread(self, mesh: Mesh) -> None:
        """Keep on rank p of the expert group experts p*L to (p+1)*L - 1, as DTensors. L: experts a rank."""
        experts = self.down_proj.shape[0]
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
        """The experts' weighted sum, [T, D], in the dtype of hidden_states.

        hidden_states: [T, D].
        top_k_index, top_k_weights: [T, K], the router's experts and weights.
        """
        kind = hidden_states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.down_proj.dtype
        # Cast once, as autocast does for F.linear, because the op needs all inputs in one dtype.
        with torch.autocast(kind, enabled=False):
            weights = self._local(dtype)
            weights_TK = top_k_weights.to(torch.promote_types(dtype, torch.float32))
            # The weights are passed in place of the logits, which no dispatcher reads.
            routing = Routing(weights_TK, top_k_index.to(torch.int32), weights_TK)
            rows, plan = self.dispatcher.dispatch(hidden_states.to(dtype), routing)
            return self.dispatcher.combine(weights(rows), plan).to(hidden_states.dtype)

    def _local(self, dtype: torch.dtype) -> LocalExperts:
        """The rank's part in the op's layout: gate_up [L, 2F, D], down [L, D, F], and biases or None.

        Biases are [L, 2F] and [L, D]. Without a gate, F takes the place of 2F.
        """
        names, transposed, woven = self.marks.names, self.marks.transposed, self.marks.woven
        tensors: list[Any] = []
        for name in (*names, *(f"{name}_bias" for name in names)):
            if not hasattr(self, name):
                tensors.append(None)
                continue
            t = local_part(getattr(self, name)).to(dtype)
            t = t.mT if transposed and t.dim() == 3 else t
            t = torch.cat([t[:, 0::2], t[:, 1::2]], 1) if woven and len(tensors) % 2 == 0 else t
            tensors.append(t.contiguous())
        adapters, scales = self.local_adapters()
        if adapters is not None:
            adapters = Adapters(*(t if t is None else t.to(dtype) for t in adapters))
        gate_up, down, *bias, kind = *tensors, self.marks.activation
        codes = None
        if self.fp8 and self.training:  # of the present weights, which any optimizer may have written
            codes = encode(gate_up, activation(kind).halves), encode(down)
        how: dict[str, Any] = dict(adapters=adapters, scales=scales, codes=codes)
        return LocalExperts(gate_up, down, bias[0], bias[1], kind, **how)

    def sizes(self, matrix: str) -> tuple[int, int, int]:
        """Experts, rows and columns of a matrix in the op's layout. matrix: gate_up or down."""
        E, *sides = getattr(self, self.marks.names[matrix == "down"]).shape
        rows, columns = sides[::-1] if self.marks.transposed else sides
        return E, rows, columns

    def adapt(self, matrix: str, rank: int, scale: float) -> None:
        """Adds an adapter to a matrix, gate_up or down, in the op's layout; a and b are zero.

        Each rank of a mesh holds those of its experts.
        """
        E, rows, columns = self.sizes(matrix)
        weight = getattr(self, self.marks.names[matrix == "down"])
        for part, shape in (("a", (E, rank, columns)), ("b", (E, rows, rank))):
            whole = torch.zeros(shape, device=local_part(weight).device)
            if isinstance(weight, DTensor):
                whole = distribute_tensor(whole, weight.device_mesh, [Shard(0)])
            setattr(self, f"{matrix}_{part}", nn.Parameter(whole))
        self.scales[matrix] = scale

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles create the class by `swapped_class`, because it cannot be imported by name."""
        theirs = getattr(type(self), "stands_for", None)
        # A class that other code derives from this class defines its own method.
        if type(self) is not swapped_class(theirs):
            return super().__reduce_ex__(protocol)
        return (_without_init, (theirs,), vars(self).copy())


@cache
def swapped_class(theirs: type | None) -> type[SwappedExperts]:
    """A subclass of SwappedExperts whose instances are instances of `theirs` too.

    transformers' `_init_weights` recognises experts by their class.
    """
    if theirs is None:
        return SwappedExperts
    return type(f"Swapped{theirs.__name__}", (SwappedExperts, theirs), dict(stands_for=theirs))


def _without_init(theirs: type | None) -> SwappedExperts:
    made = swapped_class(theirs)
    return made.__new__(made)


def swap_experts(model: Any, mesh: Mesh | None = None, fp8: bool = False) -> Any:
    """Replace the experts of every MoE block of a transformers model by tmoe's, in place; returns the model.

    mesh: spread the experts over its ep axis. Every rank must hold the same weights, and every rank must take
        part in every forward and backward, each with its own batch. Afterwards
        `tmoe.parallel.parallelize(model, mesh)` shards the other parameters and sums gradients over the
        ranks, so divide each rank's loss by the global count.
    fp8: products of the experts are in float8 e4m3 while they train (`model.train()`): docs/fp8.md. The
        matrices are cast in every forward. Whether a step is faster is not looked up. On a GPU it must be a
        Hopper, both widths multiples of 64, and the weights, or autocast, bf16; on a CPU the widths are
        multiples of 16 and the type may be fp32.

    Raises ConfigError, and leaves the model unchanged, if the model has no experts that transformers has
    marked (further experts without marks are kept unchanged); if the op does not compute them; if they are
    already sharded, wrapped or offloaded, or have no weights yet; if mesh is not a Mesh, or ep does not
    divide the number of experts; if fp8 products do not support their widths, type or GPU.
    Forward hooks on transformers' own experts modules are lost with these modules. accelerate's hooks that
    move inputs to the modules' device are kept.
    """
    if not isinstance(mesh, Mesh | None):
        raise ConfigError(f"swap_experts: mesh={mesh!r}; must be a Mesh (tmoe.parallel.build_mesh), or None")
    kind = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
    if done := sum(isinstance(module, SwappedExperts) for module in model.modules()):
        raise ConfigError(
            f"swap_experts: {done} blocks of this {kind} have tmoe's experts already; swap a model once"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    marked = {name: module for name, module in modules.items() if is_marked(module)}
    marks = {}
    for name, theirs in marked.items():
        reason = _wrapped(modules, name) or _held_elsewhere(model, name)
        if reason:
            raise ConfigError(f"swap_experts: {name} {reason}")
        try:
            marks[name] = read_marks(theirs)
        except ConfigError as error:
            raise ConfigError(f"swap_experts: {name} {error.wrong}") from None
        if fp8 and (reason := _no_fp8(theirs, marks[name])):
            raise ConfigError(f"swap_experts: fp8=True: {name} {reason}")
    if not marked:
        raise ConfigError(f"swap_experts: {_none_found(kind, modules)}")
    made: dict[nn.Module, SwappedExperts] = {}
    for name, theirs in marked.items():  # a module with two names is replaced by one module
        if theirs not in made:
            made[theirs] = swapped_class(type(theirs))(theirs, marks[name], mesh, fp8)
    for name, theirs in marked.items():
        ours = made[theirs]
        model.set_submodule(name, ours)
        if hook := getattr(theirs, "_hf_hook", None):
            from accelerate.hooks import add_hook_to_module  # accelerate made the hook, so it is installed

            add_hook_to_module(ours, hook)
    return model


def _no_fp8(theirs: Any, marks: Marks) -> str:
    """The reason why these experts have no fp8 products; "" if they have them."""
    down: Tensor = getattr(theirs, marks.names[1])
    step, arch = MULTIPLE, "cpu"
    if down.is_cuda:
        step, arch = 64, device_facts(down.device)[0]
    if arch not in KERNELS:
        return f"is on {arch}, which has no kernels of experts in fp8; valid is Hopper"
    if down.dtype not in (torch.float32, torch.bfloat16):
        return f"has weights in {down.dtype}; valid are torch.float32 and torch.bfloat16"
    widths = tuple(down.shape[1:])
    odd = any(width % step for width in widths)
    return f"has the widths {widths}; both must be multiples of {step}" if odd else ""


def _none_found(kind: str, modules: dict[str, nn.Module]) -> str:
    """The reason why a model has nothing to swap; names the first module that looks like experts, if any."""
    for name, module in modules.items():
        if "down_proj" in {key for key, p in module._parameters.items() if p is not None and p.dim() == 3}:
            return (
                f"{name} holds experts, and {type(module).__name__} has none of transformers' marks "
                f"(has_gate, is_transposed, ...), which say what it computes"
            )
    return (
        f"no module of this {kind} is marked as experts by transformers (has_gate, is_transposed, ...); "
        f"there is nothing to swap"
    )


def _home(module: nn.Module) -> set[str]:
    """The Python modules that define a module's class and its base classes, without those of torch."""
    homes = {cls.__module__ for cls in type(module).__mro__}
    return {home for home in homes if home != "builtins" and not home.startswith("torch.nn.modules")}


def _wrapped(modules: dict[str, nn.Module], name: str) -> str:
    """The reason why the module is wrapped by one that is not part of its model; "" if it is not wrapped.

    All modules around it, up to its model, are checked. A module is part of the model if its class is defined
    in the same file as the experts' or the model's class. Any other module (PEFT's, torch.compile's) may read
    parameters or modules that the swap removes.
    """
    homes = _home(modules[name])
    between = []
    for place in [name[:i] for i in reversed(range(len(name))) if name[i] == "."]:
        between.append(place)
        if hasattr(modules[place], "_init_weights"):  # the nearest model of transformers
            homes |= _home(modules[place])
            break
    else:
        homes |= _home(modules[""])
    for place in reversed(between):
        around = modules[place]
        if not isinstance(around, CONTAINERS) and not homes & _home(around):
            kind = type(around).__name__
            return f"is wrapped: {place} is {kind} around experts or their weights; {SWAP_FIRST}"
    return ""


def _held_elsewhere(model: nn.Module, name: str) -> str:
    """The reason why the module does not hold its whole weights; "" if it does."""
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
            f"has accelerate's hook {kinds}, which would be lost; swap a model without "
            f"(accelerate.hooks' remove_hook_...)"
        )
    if "forward" in vars(module) and not own:
        return "has a forward that something has put in place of its class's; swap first"
    return ""


def _hooks(module: nn.Module) -> list[Any]:
    """accelerate's hooks on the module itself; the hooks of a chain are listed one by one."""
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))
