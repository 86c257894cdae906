"""Initial weights that depend on the seed and a parameter's name alone, never on the layout.

The scheme: matrices are normal with standard deviation `std`. Matrices whose output is added to the residual
stream (attention `o`, a linear layer's `out`, every `down`) get std / sqrt(2 layers), so that the stream's
variance does not grow with depth (GPT-2). Norm weights are one, or zero where the factor is 1 + weight;
biases, sinks, the logarithm of a cosine router's scale and buffers are zero. An adapter's a is uniform within
1 / sqrt(its inputs), as PEFT draws it, and its b is zero. In a linear layer dt_bias is one, A_log is the
logarithm of a number from 0.01 to 16, and the convolution is uniform within 1 / sqrt(its tokens), as torch
draws one. A module may state a function of a uniform number for a parameter (`drawn`), as Mamba-2's does.

Each tensor is drawn from a separate generator, seeded by a hash of (seed, name). A rank draws the full tensor
and keeps its part, so every mesh starts from the same numbers. Removing layers changes only the residual
scale, not the draws. (CPU and CUDA generators differ: equal seeds give equal weights on one kind of device.)
"""

import hashlib
import math
from collections.abc import Callable

import torch
from torch import nn

from tmoe.parallel.mesh import local_part, local_slices

# Suffixes of the names of matrices whose output is added to the residual stream.
RESIDUAL = ("o.weight", ".out.weight", "down.weight", "down", "from_latent.weight")
ADAPTER_A, ADAPTER_B = (tuple(f"{matrix}{part}" for matrix in (".", ".gate_up_", ".down_")) for part in "ab")
ZERO = ("bias", "sinks", "log_scale", *ADAPTER_B)
A_LOG, CONV, DT_BIAS = ".A_log", ".rates.conv", ".dt_bias"  # of linear layers
DECAYS = 0.01, 16.0  # between which -A is drawn


def _stated(module: nn.Module) -> tuple[set[str], dict[str, Callable]]:
    """Names of parameters that modules set to zero, and the functions by which modules draw others."""
    parts = list(module.named_modules())
    zero = {
        f"{name}.{leaf}".lstrip(".") for name, part in parts for leaf in getattr(part, "start_at_zero", ())
    }
    drawn = {
        f"{name}.{leaf}".lstrip("."): function
        for name, part in parts
        for leaf, function in getattr(part, "drawn", {}).items()
    }
    return zero, drawn


@torch.no_grad()
def initialise(module: nn.Module, std: float = 0.02, layers: int = 1, seed: int | None = None) -> None:
    """Fills every parameter in place, and zeroes buffers. Parameters on the meta device are skipped.

    std: standard deviation of matrices.
    layers: number of layers of the model, for the scale of matrices that write to the residual stream.
    seed: seed of all draws; None draws a seed from torch's global generator.
    """
    if seed is None:
        seed = int(torch.randint(2**31, (), device="cpu"))
    for buffer in module.buffers():  # the routers' choice bias
        buffer.zero_()
    from_zero, drawn = _stated(module)
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            continue
        made = drawn.get(name)
        zero = name in from_zero or (made is None and name.endswith(ZERO) and not name.endswith(DT_BIAS))
        if zero or (parameter.dim() == 1 and made is None and not name.endswith(A_LOG)):
            parameter.fill_(0.0 if zero else 1.0)
            continue
        scale = std / math.sqrt(2 * layers) if name.endswith(RESIDUAL) else std
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        local = local_part(parameter)
        generator = torch.Generator(local.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        full = torch.empty(parameter.shape, device=local.device)
        if made is not None:
            full = made(full.uniform_(generator=generator))
        elif name.endswith(ADAPTER_A) or name.endswith(CONV):
            most = parameter.shape[-1] ** -0.5
            full.uniform_(-most, most, generator=generator)
        elif name.endswith(A_LOG):
            full.uniform_(*DECAYS, generator=generator).log_()
        else:
            full.normal_(0.0, scale, generator=generator)
        local.copy_(full[local_slices(parameter)])
        del full  # every rank draws whole parameters, and two of them must not be in memory at a time
