"""RMSNorm whose rows do not depend on their number, and top-k weights that do not: definition, bits, chips.

next: tests/ops/test_decoding_kernels.py
"""

import os

import pytest
import torch
import torch.nn.functional as F
from chips import CHIPS, assert_fits, measure
from interpreter import repair_interpreter

from tmoe.ops import norm as module
from tmoe.ops.launch.kernel_launch import compile_only
from tmoe.ops.norm import rms_norm
from tmoe.ops.router import topk

INTERPRETED = "TRITON_INTERPRET" in os.environ  # read where kernels are defined
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs inside test_decoding_kernels")
compiled = pytest.mark.skipif(INTERPRETED, reason="compiles")
fp32, bf16, fp64 = torch.float32, torch.bfloat16, torch.float64


@pytest.fixture(scope="module", autouse=INTERPRETED)
def _interpreter():
    repair_interpreter()


@pytest.mark.parametrize("run", [rms_norm, pytest.param(module.forward, marks=interpreted)])
@pytest.mark.parametrize("dtype", [fp32, bf16])
@pytest.mark.parametrize("shape", [(5, 48), (3, 4, 128), (2, 2000), (0, 8)], ids=str)
def test_the_definition(run, dtype, shape):
    x, weight = torch.randn(shape).to(dtype) * 3, torch.randn(shape[-1])
    want = F.rms_norm(x.double(), shape[-1:], weight.double(), 1e-5)
    got = run(x, weight, 1e-5)
    assert got.dtype == dtype and got.shape == x.shape
    torch.testing.assert_close(got.double(), want, rtol=1e-6 if dtype == fp32 else 2**-7, atol=1e-7)


@pytest.mark.parametrize("run", [rms_norm, pytest.param(module.forward, marks=interpreted)])
@pytest.mark.parametrize("D", [128, 2048])
def test_a_row_does_not_know_how_many_there_are(run, D):
    x, weight = torch.randn(4096 if D == 128 else 300, D), torch.randn(D)
    whole = run(x, weight, 1e-6)
    for rows in (slice(0, 1), slice(7, 8), slice(5, 40), slice(len(x) - 1, len(x))):
        assert torch.equal(run(x[rows], weight, 1e-6), whole[rows])


def test_gradients():
    x, weight = torch.randn(3, 2, 6, dtype=fp64), torch.randn(6, dtype=fp64)
    both = x.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-2), both)


@pytest.mark.parametrize(
    ("x", "weight", "words"),
    [
        (torch.zeros(3, 4), torch.zeros(5), "weight: got shape (5,)"),
        (torch.zeros(3, 4).long(), torch.zeros(4), "x: got torch.int64"),
        (torch.zeros(()), torch.zeros(1), "x: got shape ()"),
    ],
)
def test_what_does_not_fit_is_named(x, weight, words):
    with pytest.raises(ValueError) as error:
        rms_norm(x, weight, 1e-6)
    assert words in str(error.value)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("renormalize", [True, False])
def test_weights_of_top_k_do_not_depend_on_how_many_rows_there_are(renormalize):
    """Programs of 8 rows and tiles of 64 columns, and programs of one row and tiles of 128."""
    logits = torch.randn(1024, 128) * 2
    tilings = {(R := topk.rows_a_program(128, T), topk.tile_width(128, 8, R)) for T in (1024, 64)}
    assert len(tilings) == 2
    weights, ids = topk.forward(logits, 8, renormalize)
    few_weights, few_ids = topk.forward(logits[:64], 8, renormalize)
    assert torch.equal(few_ids, ids[:64]) and torch.equal(few_weights, weights[:64])


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("arch", CHIPS)
def test_the_kernel_fits(arch):
    found = []
    with compile_only(arch, lambda name, key, compile: found.append(measure(arch, name, compile))):
        for D in (128, 2048, 7168):
            module.trace(D, bf16)
    for binary in found:
        assert_fits(binary, CHIPS[arch])
