"""Times a layer's experts in NF4 for few rows, with and without adapters, against bf16, in CUDA graphs.

    python -m benchmarks.nf4_layer --json FILE         one GPU, about a minute
    python -m benchmarks.nf4_layer --device cpu --tiny      does it run?

The layer is that of qwen3-30b-a3b with 64 tokens, without gradients, as in decoding. Adapters have rank 1 or
8 on each expert. Results are compared with the op on whole matrices of the same values. Attention's matrices
are timed as well, with `nf4_linear` and with F.linear.

Expected: the codes of a layer are 0.32 GB, which take 0.08 ms at 4.2 TB/s, but each code is looked up in a
table, which takes longer than their read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.engine import TINY
from benchmarks.quantised_forms import COPIES, dense_shapes, ms, packed, random_matrix, wrong_by
from benchmarks.train import write_line
from tmoe.base.quantised import dequantise
from tmoe.base.versions import versions
from tmoe.config.model import ModelConfig
from tmoe.config.presets import presets
from tmoe.ops import moe_mlp
from tmoe.ops.experts.adapted import moe_mlp_adapted
from tmoe.ops.experts.adapted_cpu import Adapters
from tmoe.ops.experts.cpu import ExpertWeights
from tmoe.ops.quantised.adapted import Nf4Weights, moe_mlp_nf4, nf4_linear

RANKS = (1, 8)
MOST = 0.02  # relative error: bf16 is rounded after the base's product and after the adapter's
Make = Callable[..., Tensor]


def adapters_of(cfg: ModelConfig, rank: int, make: Make) -> Adapters:
    moe, D = cfg.moe, cfg.dim
    E, H, width = moe.experts, 2 * moe.ffn_dim, moe.ffn_dim
    up = make(E, rank, D) / D**0.5, make(E, H, rank) / rank**0.5
    down = make(E, rank, width) / width**0.5, make(E, D, rank) / rank**0.5
    return Adapters(*up, *down)


def layer_calls(cfg: ModelConfig, slots: int, make: Make) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Names and calls. Raises AssertionError where NF4's result is not that of its values."""
    moe, D = cfg.moe, cfg.dim
    E, width = moe.experts, moe.ffn_dim
    x = make(slots, D)
    ids = torch.rand(slots, E, device=x.device).topk(moe.top_k).indices.int()
    weights = torch.rand(slots, moe.top_k, device=x.device)
    up, down = (packed(make(*shape) / shape[2] ** 0.5, "nf4") for shape in ((E, 2 * width, D), (E, D, width)))
    base = Nf4Weights(up, down, None, moe.activation)
    w_up, w_down = (dequantise(m.parts, "nf4", m.shape, x.dtype) for m in (up, down))
    whole = ExpertWeights(w_up, w_down, None, moe.activation)
    without = lambda: moe_mlp(x, w_up, w_down, weights, ids, None, moe.activation)  # noqa: E731
    yield "bf16", without
    for rank in (0, *RANKS):
        adapters = adapters_of(cfg, rank, make) if rank else None
        nf4 = lambda a=adapters: moe_mlp_nf4(x, base, a, weights, ids)  # noqa: E731
        if adapters is None:
            want = without()
        else:
            plain = lambda a=adapters: moe_mlp_adapted(x, whole, a, weights, ids)  # noqa: E731
            want = plain()
            yield f"bf16, rank {rank}", plain
        error = wrong_by(nf4(), want)
        assert error < MOST, f"nf4, rank {rank}: wrong by {error}"
        yield f"nf4, rank {rank}" if rank else "nf4", nf4


def dense_calls(cfg: ModelConfig, slots: int, make: Make) -> Iterator[tuple[str, Callable[[int], Tensor]]]:
    """Names and calls of attention's matrices; the number chooses one of their copies."""
    for name, (W, L) in dense_shapes(cfg).items():
        x = make(slots, L)
        plain = [make(W, L) for _ in range(COPIES)]
        codes = [random_matrix(str(x.device), "nf4", (W, L)) for _ in range(COPIES)]
        yield f"{name}, bf16", lambda i, x=x, m=plain: F.linear(x, m[i % COPIES])
        yield f"{name}, nf4", lambda i, x=x, m=codes: nf4_linear(x, m[i % COPIES])


@torch.no_grad()
def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("preset", nargs="?", default="qwen3-30b-a3b")
    flags.add_argument("--slots", type=int, default=64)
    flags.add_argument("--device", default="cuda")
    flags.add_argument("--tiny", action="store_true")
    flags.add_argument("--json", type=Path)
    asked = flags.parse_args()
    cfg = presets()[asked.preset].model
    if asked.tiny:
        moe = replace(cfg.moe, experts=8, top_k=2, ffn_dim=64)
        cfg = replace(replace(cfg, moe=moe, **TINY), dim=64)  # whole blocks of 64
    cuda = asked.device == "cuda"
    torch.manual_seed(0)
    dtype = torch.bfloat16 if cuda else torch.float32
    make = lambda *shape: torch.randn(*shape, device=asked.device, dtype=dtype)  # noqa: E731
    times: dict[str, float | None] = {}
    for name, call in layer_calls(cfg, asked.slots, make):
        times[name] = ms(lambda i, call=call: call()) * 1e3 if cuda else None
    for name, numbered in dense_calls(cfg, asked.slots, make):
        times[name] = ms(numbered) * 1e3 if cuda else None
    for name, us in times.items():
        print(f"{name:20}" + ("  right" if us is None else f"{us:9.1f} us"))
    if asked.json:
        gpu = torch.cuda.get_device_name() if cuda else "cpu"
        what: dict[str, Any] = dict(
            command=" ".join(sys.argv), preset=asked.preset, slots=asked.slots, gpu=gpu
        )
        write_line(asked.json, what | dict(date=str(date.today()), versions=versions(), us=times))


if __name__ == "__main__":
    main()
