"""Rows, tokens and experts beyond 2^31 elements, in triton's CPU interpreter.

Only the ends of huge buffers are ever touched, and memory that is never touched is never there: 30 GB of
buffers take 100 MB. (The descriptors of hopper.py address by coordinates.) As a test it starts itself in
a process with TRITON_INTERPRET=1:
    TRITON_INTERPRET=1 python tests/ops/test_ops_int64.py

next: test_ops_gpu.py
"""

import builtins
import os
import resource
from pathlib import Path

import forked
import pytest
import torch

ROOT = Path(__file__).parents[2]
D, F, n = 64, 32, 40  # n rows at the very end, of the very last expert
N, E = 2**31 // D + n, 2**31 // (2 * F * D) + 1


@pytest.mark.slow
def test_offsets_beyond_31_bits():
    ran = forked.run([__file__], env=os.environ | dict(TRITON_INTERPRET="1"))
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert ran.stdout.splitlines()[-1] == "all right"


def frugal_interpreter():
    """Runs only the last programs of a grid of millions, and does not copy arguments onto themselves."""
    from triton.runtime import interpreter

    def last(*bounds):
        return (
            builtins.range(bounds[0] - n, bounds[0])
            if len(bounds) == 1 and bounds[0] > 2**20
            else builtins.range(*bounds)
        )

    interpreter.range = last
    interpreter.GridExecutor._restore_args_dev = lambda *args: None


def metadata(E):
    """The last of E experts has the last n of N rows, in reverse order of their tokens, with K = 1.

    The other experts have none.
    """
    from tmoe.ops.experts.pair_order import Metadata

    meta = Metadata(torch.empty(Metadata.size(N, E), dtype=torch.int32), N, E)
    meta.offsets[E - 1 :] = torch.tensor([N - n, N])
    meta.by_size[0] = E - 1
    for bm, tiles in meta.tiles.items():
        tiles[0] = 1
        tiles[4] = E - 1
        tiles[4 + meta.capacity(N, E, bm)] = N - n
    meta.order[N - n :] = torch.arange(N - 1, N - n - 1, -1)
    meta.row_of[N - n :] = torch.arange(N - 1, N - n - 1, -1)
    return meta


def huge(last, length=N):
    """A tensor of this length that ends with these entries."""
    t = torch.empty(length, *last.shape[1:], dtype=last.dtype)
    t[length - last.shape[0] :] = last
    return t


def near(name, got_NW, want_nW, tolerance=3e-3):
    got = got_NW[N - n :].double() if got_NW.shape[0] == N else got_NW.double()
    error = float((got - want_nW).norm() / want_nW.norm())
    assert error < tolerance, (name, error)


def main():
    from interpreter import repair_interpreter, small_tiles

    from tmoe.ops.experts import gpu

    repair_interpreter()
    frugal_interpreter()
    small_tiles(gpu, False, True, 1)
    torch.manual_seed(0)
    x, dy = torch.randn(n, D).half(), torch.randn(n, D).half()
    gate_up, down = (torch.randn(1, 2 * F, D) * D**-0.5).half(), (torch.randn(1, D, F) * F**-0.5).half()
    weights = torch.rand(n, 1)

    # what it should be, in float64; rows are tokens in reverse order
    rows = x.double().flip(0).requires_grad_()
    w = weights.double().flip(0).requires_grad_()
    h = rows @ gate_up[-1].double().T
    h.retain_grad()
    act = torch.nn.functional.silu(h[:, :F]) * h[:, F:]
    out = act @ down[-1].double().T
    (out * w).backward(dy.double().flip(0))

    gate_up, down = huge(gate_up, E), huge(down, E)
    layer = gpu.LayerLaunches(huge(x), (E, D, F), 1, metadata(E), huge(weights), (gate_up, down))
    h_N2F = torch.empty(N, 2 * F, dtype=x.dtype)
    dy_ND = huge(dy)
    near("gather", layer.gathered(layer.x), rows.detach(), 1e-9)
    act_NF = layer.up(gate_up, None, h_N2F)
    near("H", h_N2F, h.detach())
    near("act", act_NF, act.detach())
    out_ND = layer.rows("down", act_NF, down, True)
    near("down", out_ND, out.detach())
    y_TD, _ = layer.combine(out_ND, layer.weights)
    near("combine", y_TD, (out * w).detach().flip(0))
    dh_N2F, scaled_NF, ds = layer.dh(dy_ND, down, h_N2F)
    near("dh", dh_N2F, h.grad)
    near("ds", ds[:, N - n :].sum(0)[:, None], w.grad)
    near("dx", layer.rows("dx", dh_N2F, gate_up, False), rows.grad)
    # the interpreter is too slow for half a million experts
    layer = gpu.LayerLaunches(layer.x, (1, D, F), 1, metadata(1), layer.weights)
    near(
        "d_down",
        layer.dw("dw_down", dy_ND, scaled_NF, "a")[0],
        (dy.double().flip(0) * w.detach()).T @ act.detach(),
    )
    near("d_gate_up", layer.dw("dw_up", dh_N2F, layer.x, "b")[0], h.grad.T @ rows.detach())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # KiB
    print("all right")


if __name__ == "__main__":
    main()
