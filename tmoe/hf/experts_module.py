"""Reads the marks of transformers' experts modules: the layout of their weights, and their gate's function.

transformers marks every class of experts that it calls as (hidden_states, top_k_index, top_k_weights), by
`is_transposed`, `is_concatenated`, `has_bias`, `has_gate`, `has_post_expert_norm` and a method `_apply_gate`.
So no table of families is needed, and families of later versions are supported too.

The marks do not state which function the gate is. It is found by a test: the gate is called on random numbers
of every size, in fp64 and with a gradient, and one of the op's activations must have the same values and
gradients, in training and in evaluation. A name, of a class or in a configuration, is never trusted.

next: ops/reference.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tmoe.base.activations import ACTIVATIONS, activation, canonical
from tmoe.config.check import ConfigError

MARKS = ("has_gate", "has_bias", "is_transposed", "_apply_gate")


class Marks(NamedTuple):
    """The layout of a module's weights, and the activation that it computes."""

    activation: str
    """the activation in the notation of moe_mlp"""
    names: tuple[str, str]
    """names of its matrices, gate_up_proj (without a gate up_proj) and down_proj; biases end in _bias"""
    transposed: bool
    """whether weights are for x W instead of W x, so that the last two axes of the matrices are exchanged"""
    woven: bool
    """whether gate and up rows alternate"""


def is_marked(module: nn.Module) -> bool:
    """Whether the module itself has transformers' marks, not one inside it whose attributes it forwards."""
    places = (vars(module), *(vars(cls) for cls in type(module).__mro__))
    return all(any(mark in place for place in places) for mark in MARKS)


def read_marks(module: Any) -> Marks:
    """The marks of a module with loaded weights. ConfigError if the op computes something else.

    The message does not have the module's name.
    """
    if getattr(module, "has_post_expert_norm", False):
        raise ConfigError(
            "is marked has_post_expert_norm=True: a norm after each expert, "
            "which the fused op does not compute"
        )
    gated = bool(module.has_gate)
    names = ("gate_up_proj" if gated else "up_proj", "down_proj")
    wanted = {*names, *(f"{name}_bias" for name in names if module.has_bias)}
    held = {name for name, _ in module.named_parameters()}
    if held != wanted:
        raise ConfigError(
            f"is marked has_gate={gated}, has_bias={bool(module.has_bias)}, which needs the parameters "
            f"{', '.join(sorted(wanted))}, and holds {', '.join(sorted(held)[:6]) or 'none'}"
        )
    transposed = bool(module.is_transposed)
    woven = gated and not getattr(module, "is_concatenated", True)
    up, down = (getattr(module, name) for name in names)
    halves = 2 if gated else 1
    E, D, F = (*down.shape, 0, 0)[:3]
    if transposed:
        D, F = F, D
    if down.dim() != 3 or tuple(up.shape) != ((E, D, halves * F) if transposed else (E, halves * F, D)):
        raise ConfigError(
            f"is marked is_transposed={transposed}, and its {names[0]} {tuple(up.shape)} does not fit "
            f"down_proj {tuple(down.shape)}"
        )
    return Marks(_computed(module, F, gated, woven, down.device), names, transposed, woven)


def _computed(module: Any, F: int, gated: bool, woven: bool, device: torch.device) -> str:
    """The op's activation that equals the module's own function; ConfigError if there is none."""
    function = module._apply_gate if gated else module.act_fn
    halves = 2 if gated else 1
    h = _numbers(F, halves).to(device)
    d_act = torch.randn(h.shape[0], F, dtype=h.dtype, generator=torch.Generator().manual_seed(1)).to(device)
    size = torch.stack([half.abs() + 1 for half in h.chunk(halves, -1)]).prod(0)
    flags = [(part, part.training) for part in module.modules()]
    # the gate of a woven module reads alternating gate and up rows
    call = (lambda h: function(torch.stack(h.chunk(2, -1), -1).flatten(-2))) if woven else function
    try:
        asked = []
        for training in (False, True):
            for part, _ in flags:
                part.training = training
            asked.append(_value_and_gradient(call, h, d_act))
    except Exception as error:
        raise ConfigError(f"{_named(module, gated)} fails on random numbers: {error!r:.200}") from None
    finally:
        for part, training in flags:
            part.training = training
    for name in _candidates(module, gated):
        candidate = activation(name).of
        if all(any(_same(got, candidate, h, d_act, size, wide) for wide in (True, False)) for got in asked):
            return canonical(name)
    known = ", ".join(name for name, entry in ACTIVATIONS.items() if entry.gated == gated)
    raise ConfigError(f"computes {_named(module, gated)}; the fused op computes {known}")


def _numbers(F: int, halves: int) -> Tensor:
    """Random [n, halves * F] in fp64: half of the rows in the range of clamps, half of any size to 1e18."""
    draw = torch.Generator().manual_seed(0)
    shape = (2 * (4 + 1024 // F), halves * F)
    h = torch.randn(shape, dtype=torch.float64, generator=draw) * 5
    power = torch.rand(shape, dtype=torch.float64, generator=draw) * 22 - 4
    h[::2] = (h.sign() * 10**power)[::2]
    return h


def _value_and_gradient(f: Callable[[Tensor], Tensor], h: Tensor, d_act: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(h.device.type, enabled=False):
        h, d_act = h.clone().requires_grad_(), d_act.clone()
        act = f(h)
        return act.detach(), torch.autograd.grad(act, h, d_act.to(act.dtype))[0]


def _same(
    got: tuple[Tensor, Tensor],
    candidate: Callable[[Tensor], Tensor],
    h: Tensor,
    d_act: Tensor,
    size: Tensor,
    wide: bool,
) -> bool:
    """Whether the values and gradients in `got` are those of `candidate`.

    wide: compute `candidate` in fp64; False: in fp32, as some gates compute.
    size: (|gate| + 1) * (|up| + 1), to which the permitted rounding error is proportional.
    """
    want = _value_and_gradient(candidate if wide else lambda h: candidate(h.float()).double(), h, d_act)
    relative, rounding = (1e-9, 1e-13) if wide else (1e-5, 1e-6)
    for g, w in zip(got, want, strict=True):
        if g.shape != w.shape:
            return False
        room = rounding * torch.cat([size] * (w.shape[-1] // size.shape[-1]), -1)
        if not ((g.double() - w).abs() <= relative * w.abs() + room).all():
            return False
    return True


def _candidates(module: Any, gated: bool) -> Iterator[str]:
    """The op's activations; those with constants also with every number among the module's attributes.

    Numbers in attributes with the constant's name are tried first.
    """
    numbers = {
        name: float(value)
        for name, value in vars(module).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 2.0**127
    }
    for name, entry in ACTIVATIONS.items():
        if entry.gated != gated:
            continue
        yield name
        choices = []
        for key in entry.constants:
            named = [numbers[n] for n in (key, f"swiglu_{key}") if n in numbers]
            choices.append(list(dict.fromkeys([*named, entry.constants[key], *numbers.values()])))
        for values in itertools.product(*choices) if choices else ():
            yield f"{name}:" + ",".join(map("{}={!r}".format, entry.constants, values))


def _named(module: Any, gated: bool) -> str:
    """The module's function in words: its class's own gate, or the activation and its name in the config."""
    if gated and module._apply_gate.__module__ != "transformers.integrations.moe":
        return f"its own gate, {module._apply_gate.__qualname__}"
    act = getattr(module, "act_fn", None)
    config = getattr(module, "config", None)
    hidden_act = next((v for k in ("hidden_act", "mlp_hidden_act") if (v := getattr(config, k, None))), None)
    return f"{getattr(act, '__name__', type(act).__name__)} (hidden_act={hidden_act!r})"
