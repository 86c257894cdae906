"""A frozen base in NF4 under low-rank adapters (QLoRA, --lora.base nf4).

The matrices of experts and dense layers, with and without an adapter, are held in NF4. Embedding, head,
norms and routers stay in the type of --train.dtype; the decays of linear layers stay in fp32, their matrix
(`ba`) in the type of --train.dtype. Mamba-2 has no such matrix: the rows of its steps are the last of `qkvz`,
which is quantised. The values of a layer are computed for its products, in forward and again in backward.

    in_nf4(model)                the modules take the place of those of a model with adapters, on meta
    for slot in slots_of(model).values(): slot.put(weight)

next: moe/nf4_experts.py
"""

from __future__ import annotations

from torch import Tensor, nn

from tmoe.config.axes import Axes
from tmoe.config.check import Section, Setting, require
from tmoe.config.run import Config
from tmoe.model.adapted import Adapted
from tmoe.model.slot import Slot
from tmoe.moe.experts import Experts
from tmoe.moe.nf4_experts import Nf4Experts
from tmoe.moe.quantised_experts import held, hold
from tmoe.ops.quantised.adapted import nf4_linear
from tmoe.ops.quantised.gpu import Matrix
from tmoe.ops.quantised.op import quantised_values

AXES = ("ep", "tp", "cp", "etp", "pp")
NARROW = ("ba",)  # matrices that are never quantised: of a linear layer's decays, two rows a head


class Nf4Linear(nn.Linear):
    """A frozen nn.Linear in NF4. `weight` computes the values."""

    kind = "nf4"

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)  # not nn.Linear's, which creates a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        hold(self, "weight", "nf4", linear.weight)
        self.bias = linear.bias

    @property
    def matrix(self) -> Matrix:
        return held(self, "weight", "nf4", (self.out_features, self.in_features))

    @property
    def weight(self) -> Tensor:
        return quantised_values(self.matrix, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = nf4_linear(x, self.matrix)
        return y if self.bias is None else y + self.bias


class Nf4Adapted(Nf4Linear, Adapted):
    """An Adapted whose weight is in NF4."""

    def __init__(self, linear: Adapted):
        Nf4Linear.__init__(self, linear)
        self.a, self.b = linear.a, linear.b
        self.scale, self.dropout = linear.scale, linear.dropout
        self.adapters_on, self.in_order = linear.adapters_on, linear.in_order

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x, Nf4Linear.forward(self, x))


def in_nf4(model: nn.Module, names: list[str]) -> None:
    """Replaces these modules and experts' matrices by empty ones in NF4.

    names: as `matrices_of` of model/lora.py gives them; all that the model has.
    """
    for name in names:
        owner, _, leaf = name.rpartition(".")
        parent = model.get_submodule(owner)
        if isinstance(parent, Nf4Experts) or leaf in NARROW:
            continue  # replaced with its other matrix, or never
        if isinstance(parent, Experts):
            above, _, place = owner.rpartition(".")
            setattr(model.get_submodule(above), place, Nf4Experts(parent))
        else:
            linear = getattr(parent, leaf)
            made = Nf4Adapted(linear) if isinstance(linear, Adapted) else Nf4Linear(linear)
            setattr(parent, leaf, made)


def slots_of(model: nn.Module) -> dict[str, Slot]:
    """The places of the weights in NF4, by the weights' names."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Nf4Linear):
            found[f"{name}.weight"] = Slot(f"{name}.weight", module, "weight")
        elif isinstance(module, Nf4Experts):
            for matrix in ("gate_up", "down"):
                found[f"{name}.{matrix}"] = Slot(f"{name}.{matrix}", module, matrix)
    return found


def has_nf4(model: nn.Module) -> bool:
    """Whether a model has a base in NF4."""
    return any(isinstance(module, Nf4Linear | Nf4Experts) for module in model.modules())


def require_alone(axes: Axes) -> None:
    """ValueError for a mesh that divides a base in NF4."""
    for axis in AXES:
        size = getattr(axes, axis)
        require(
            size == 1, f"parallel.{axis}", size, "not with a base in NF4, which every rank holds whole", "1"
        )


def require_nf4(cfg: Config) -> None:
    """ConfigError for settings that a base in NF4 excludes."""
    if cfg.lora.base == "whole":
        return
    run = Section(cfg)
    lora = Setting("lora.base", cfg.lora.base)
    for axis in AXES:
        wrong = f"not with {lora}: every rank holds the whole base"
        run.require(
            getattr(cfg.parallel, axis) == 1, f"parallel.{axis}", wrong, f"1, or {Setting('parallel.dp')}"
        )
