"""Argument checks of the ops: a ValueError that names the argument, the value it got and the valid values."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tmoe.base import activations
from tmoe.base.private_torch import find_or_note

_tracks_gradients = find_or_note(
    "torch._C._functorch.is_gradtrackingtensor", "torch.func's gradients raise torch's own error"
)
# this shows that there is no tangent, without a check of each tensor
_LEVELS = hasattr(forward_ad, "_current_level")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # and float64 on the CPU
INTS = (torch.int32, torch.int64)


def require(ok: object, name: str, got: object, valid: object) -> None:
    """Raise ValueError unless ok.

    Frequent callers test first and call this with False: composing the message costs more than the test.
    """
    if not ok:
        raise ValueError(f"{name}: got {got}, valid is {valid}")


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for x's device.

    torch raises an error if it is asked about the meta device, which has no autocast.
    """
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def check_tensors(**tensors: object) -> None:
    """Raise unless every argument is a tensor that these ops can differentiate.

    ValueError for an argument that is not a tensor, None included. NotImplementedError for a forward-mode
    tangent, which torch would drop in silence, and for a tensor of torch.func's gradients, for which torch
    would raise an unrelated error.
    """
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            require(False, name, repr(t)[:80], "a tensor")
        if (not _LEVELS or forward_ad._current_level >= 0) and forward_ad.unpack_dual(t).tangent is not None:
            raise NotImplementedError(
                f"{name}: got a forward-mode tangent, but this op is differentiated by backward alone"
            )
        if not torch.compiler.is_compiling() and _tracks_gradients and _tracks_gradients(t):
            raise NotImplementedError(
                f"{name}: got a tensor of torch.func's grad, vjp or jacrev, "
                "but this op is differentiated by torch.autograd alone"
            )


def check_moe_mlp(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    bias_E2F: Tensor | None,
    activation: str,
) -> None:
    """Raise ValueError unless the arguments fit moe_mlp's contract."""
    require(x_TD.dim() == 2, "x", f"shape {tuple(x_TD.shape)}", "[T, D]")
    ok = down_EDF.dim() == 3 and all(down_EDF.shape)
    require(ok, "down", f"shape {tuple(down_EDF.shape)}", "[E, D, F], none of them 0")
    (T, D), (E, _, F) = x_TD.shape, down_EDF.shape
    require(
        ids_TK.dim() == 2 and ids_TK.shape[0] == T,
        "ids",
        f"shape {tuple(ids_TK.shape)}",
        f"[T={T}, K]",
    )
    K = ids_TK.shape[1]
    try:
        rows = activations.activation(activation).halves * F
    except ValueError as error:
        raise ValueError(f"activation: got {activation!r}, {error}") from None
    letter = "2F" if rows > F else "F"
    shapes = {
        "gate_up": (gate_up_E2FD, (E, rows, D), f"[E, {letter}, D]"),
        "down": (down_EDF, (E, D, F), "[E, D, F]"),
        "weights": (weights_TK, (T, K), "[T, K]"),
    }
    for name, (t, shape, letters) in shapes.items():
        require(
            tuple(t.shape) == shape,
            name,
            f"shape {tuple(t.shape)}",
            f"{shape} = {letters}",
        )
    biases = {} if bias_E2F is None else {"gate_up_bias": bias_E2F}
    for name, bias in biases.items():
        valid = f"({E}, {rows}) = [E, {letter}]"
        require(tuple(bias.shape) == (E, rows), name, f"shape {tuple(bias.shape)}", valid)
    _check_types("x", x_TD, gate_up=gate_up_E2FD, down=down_EDF, **biases)
    require(
        weights_TK.dtype in (x_TD.dtype, torch.float32),
        "weights",
        weights_TK.dtype,
        "torch.float32" if x_TD.dtype == torch.float32 else f"torch.float32 or {x_TD.dtype}",
    )
    require(ids_TK.dtype in INTS, "ids", ids_TK.dtype, "int32 or int64")
    check_device(x_TD, gate_up=gate_up_E2FD, down=down_EDF, weights=weights_TK, ids=ids_TK, **biases)


def check_shared(x_TD: Tensor, gate_up_2GD: Tensor, down_DG: Tensor, fp8: bool) -> None:
    """Raise ValueError unless a shared expert's matrices fit x_TD: gate_up [2G, D] or up alone [G, D]."""
    require(not fp8, "fp8", fp8, "False with a shared expert")
    require(down_DG.dim() == 2, "shared_down", f"shape {tuple(down_DG.shape)}", "[D, G]")
    D = x_TD.shape[1]
    G = down_DG.shape[1]
    rows = G if tuple(gate_up_2GD.shape) == (G, D) else 2 * G
    for name, t, shape in (("shared_gate_up", gate_up_2GD, (rows, D)), ("shared_down", down_DG, (D, G))):
        require(tuple(t.shape) == shape, name, f"shape {tuple(t.shape)}", shape)
        _check_types("x", x_TD, **{name: t})
        check_device(x_TD, **{name: t})


def check_grouped_mm(a_ND: Tensor, b_EFD: Tensor, ends_E: Tensor) -> None:
    """Raise ValueError unless the arguments fit grouped_mm's contract."""
    require(a_ND.dim() == 2, "a", f"shape {tuple(a_ND.shape)}", "[N, D]")
    D = a_ND.shape[1]
    require(
        b_EFD.dim() == 3 and b_EFD.shape[2] == D and all(b_EFD.shape),
        "b",
        f"shape {tuple(b_EFD.shape)}",
        f"[E, F, D={D}], none of them 0",
    )
    E = b_EFD.shape[0]
    require(tuple(ends_E.shape) == (E,), "ends", f"shape {tuple(ends_E.shape)}", f"[E={E}]")
    _check_types("a", a_ND, b=b_EFD)
    require(ends_E.dtype == torch.int32, "ends", ends_E.dtype, "int32")
    check_device(a_ND, b=b_EFD, ends=ends_E)


def _check_types(first: str, x: Tensor, **others: Tensor) -> None:
    """Raise ValueError unless x's device can compute in x's type, and `others` have the same type."""
    valid = (*FLOATS, torch.float64) if x.device.type == "cpu" else FLOATS
    require(x.dtype in valid, first, x.dtype, f"one of {valid} on {x.device.type}")
    for name, t in others.items():
        require(t.dtype == x.dtype, name, t.dtype, f"{first}'s {x.dtype}")


def check_device(x: Tensor, **others: Tensor) -> None:
    """Raise ValueError unless all tensors are on x's device.

    Fake implementations check it as well: torch runs them if one of several tensors is on the meta device.
    """
    for name, t in others.items():
        require(t.device == x.device, name, t.device, f"the input's {x.device}")
