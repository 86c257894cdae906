"""Sinkhorn: marginals, the fixed point of an independent implementation, and the kernel without a GPU.

The kernel runs in triton's interpreter, by one program and by several that wait for each other, each in a
process of its own:
    TRITON_INTERPRET=1 python tests/ops/test_sinkhorn.py

next: tmoe/moe/select/sinkhorn_selection.py
"""

import os
from pathlib import Path

import forked
import pytest
import torch
import torch.multiprocessing as mp
from interpreter import repair_interpreter

from tmoe.ops import reference
from tmoe.ops.router.sinkhorn import sinkhorn

ROOT = Path(__file__).parents[2]
FIXED = [[1.0, 2.0, 0.0, -1.0], [0.5, 0.0, 1.5, 1.0], [2.0, 1.9, -1.0, 0.0], [0.0, 0.0, 3.0, 1.0]]


def plan_of(logits, live, iterations):
    """The plan [T, E], each live row of sum 1/T."""
    potentials, residual = sinkhorn(logits, live, iterations)
    weight = torch.ones(len(logits)) if live is None else live.double()
    return (logits.double() + potentials.double()).softmax(-1) * (weight / weight.sum())[:, None], residual


def by_scaling(logits, rounds=4000):
    """The plan by scaling rows and columns of exp(logits) in turn, as in textbooks; fp64."""
    plan = logits.double().exp()
    T, E = plan.shape
    for _ in range(rounds):
        plan = plan / (T * plan.sum(1, keepdim=True))
        plan = plan / (E * plan.sum(0))
    return plan


def test_fixed_values():
    """FEATURES, section 3: the sums of rows and columns are .25."""
    plan, residual = plan_of(torch.tensor(FIXED), None, 32)
    quarters = torch.full((4,), 0.25, dtype=torch.float64)
    torch.testing.assert_close(plan.sum(0), quarters, atol=1e-5, rtol=0)
    torch.testing.assert_close(plan.sum(1), quarters)
    torch.testing.assert_close(plan, by_scaling(torch.tensor(FIXED)), atol=1e-5, rtol=1e-4)
    assert residual < 1e-4


@pytest.mark.parametrize("std", [0.5, 2.0, 6.0])
@pytest.mark.parametrize("T, E", [(64, 8), (256, 128), (512, 64), (2048, 16), (130, 7)])
def test_marginals_to_a_thousandth_in_32_iterations(T, E, std):
    """Of each row and column, relative to what it should be; also where experts differ in mean."""
    torch.manual_seed(T + E)
    for offset in (0.0, std):
        logits = std * torch.randn(T, E) + offset * torch.randn(E)
        plan, residual = plan_of(logits, None, 32)
        columns = (E * plan.sum(0) - 1).abs().max()
        assert columns < 1e-3 and (T * plan.sum(1) - 1).abs().max() < 1e-6
        assert residual.item() == pytest.approx(columns.item(), abs=2e-5)


def test_the_plan_is_that_of_scaling_rows_and_columns():
    torch.manual_seed(0)
    logits = 2 * torch.randn(60, 12)
    torch.testing.assert_close(plan_of(logits, None, 64)[0], by_scaling(logits), rtol=1e-4, atol=1e-8)


def test_tokens_that_do_not_count_change_nothing():
    torch.manual_seed(1)
    logits = 3 * torch.randn(50, 6)
    live = torch.rand(50) < 0.7
    got = sinkhorn(logits, live, 32)
    other = logits.where(live[:, None], 100 * torch.randn(50, 6))
    for a, b, c in zip(got, sinkhorn(other, live, 32), sinkhorn(logits[live], None, 32), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("T", [0, 1])
def test_no_tokens_and_one(T):
    potentials, residual = sinkhorn(torch.randn(T, 5), None, 8)
    assert potentials.shape == (5,) and potentials.isfinite().all() and residual.isfinite()


def test_an_expert_that_nobody_wants_gets_its_share():
    """Its scores underflow to 0 in fp32, so Megatron's exp(logits) has a column of zeros."""
    logits = torch.randn(40, 4)
    logits[:, 3] -= 200
    plan, residual = plan_of(logits, None, 32)
    assert residual < 1e-3 and plan.sum(0)[3].item() == pytest.approx(0.25, rel=1e-3)


def test_compiles_and_names_bad_input():
    logits, live = torch.randn(9, 4), torch.rand(9) < 0.5
    torch.library.opcheck(torch.ops.tmoe.sinkhorn.default, (logits, None, 3))
    torch.library.opcheck(torch.ops.tmoe.sinkhorn.default, (logits, live, 3))
    for args, name in [
        ((logits[0], None, 3), "logits"),
        ((logits.bfloat16(), None, 3), "logits"),
        ((logits, None, 0), "iterations"),
        ((logits, live[:3], 3), "live"),
        ((logits, live.int(), 3), "live"),
    ]:
        with pytest.raises(ValueError, match=name):
            sinkhorn(*args)


# ---- the kernel without a GPU ----


@pytest.mark.slow
def test_kernel_in_the_interpreter():
    ran = forked.run([__file__], env=os.environ | dict(TRITON_INTERPRET="1"))
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert ran.stdout.splitlines()[-1] == "all right"


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["cuda:90", "cuda:80", "hip:gfx942"])
def test_kernel_fits_the_chips(arch):
    """Programs meet, so one must be resident on every multiprocessor: it leaves room beside it for others."""
    from chips import CHIPS, measure

    from tmoe.ops.launch.kernel_launch import compile_only
    from tmoe.ops.router.sinkhorn import trace

    found = []

    def visit(name, key, compile):
        found.append(measure(arch, name, compile))

    with compile_only(arch, visit):
        for E in (8, 60, 256):
            trace(4096, E)
    chip = CHIPS[arch]
    assert len(found) == 6
    for binary in found:
        assert not binary.spilled and binary.shared <= chip.shared // 4
        assert binary.registers * binary.threads <= chip.registers // 2


def one_program(first, programs, tensors, iterations):
    """A program of a launch, in a process of its own."""
    repair_interpreter()
    from tmoe.ops.experts.pair_order import power_of_2
    from tmoe.ops.router.sinkhorn import sinkhorn_kernel

    torch.set_num_threads(1)
    logits, live, potentials, residual, parts, arrived = tensors
    T, E = logits.shape
    sinkhorn_kernel[(1,)](
        logits, live, potentials, residual, parts, arrived, T, iterations, first, programs,
        E, power_of_2(E), 4, 2, live is not None,
    )  # fmt: skip


def main():
    repair_interpreter()
    from tmoe.ops.router import sinkhorn as op

    op.device_facts = lambda device: ("cuda:90", 1, False)
    torch.manual_seed(0)
    for T, E, padded in [(70, 8, False), (33, 60, True), (5, 1, True), (1, 3, False), (0, 4, False)]:
        logits = 3 * torch.randn(T, E)
        live = torch.rand(T) < 0.7 if padded else None
        got, want = op.forward(logits, live, 9), reference.sinkhorn(logits.double(), live, 9)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)

    programs, T, E = 3, 23, 6
    logits, live = 3 * torch.randn(T, E), torch.rand(T) < 0.8
    parts = torch.full((2, programs, 2, 8), float("nan"))
    arrived = torch.zeros(1, dtype=torch.int32)
    tensors = (logits, live, torch.empty(E), torch.empty(()), parts, arrived)
    for t in tensors:
        t.share_memory_()
    context = mp.get_context("fork")
    jobs = [context.Process(target=one_program, args=(p, programs, tensors, 5)) for p in range(programs)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
        assert job.exitcode == 0
    for a, b in zip(tensors[2:4], reference.sinkhorn(logits.double(), live, 5), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    print("all right")


if __name__ == "__main__":
    main()
