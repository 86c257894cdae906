"""Experts of one token alone: the definition, whoever its experts are; chips.

next: tests/ops/test_decoding_kernels.py
"""

import os

import pytest
import torch
from chips import CHIPS, assert_fits, measure
from interpreter import repair_interpreter
from tiers import slow_but

from tmoe.base.activations import activation as activation_of
from tmoe.ops import reference
from tmoe.ops.experts.one_token import one_token
from tmoe.ops.launch.kernel_launch import compile_only

INTERPRETED = "TRITON_INTERPRET" in os.environ  # read where kernels are defined
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs inside test_decoding_kernels")
compiled = pytest.mark.skipif(INTERPRETED, reason="compiles")
fp32, bf16 = torch.float32, torch.bfloat16
KINDS = ["swiglu", "clamped:alpha=1.702,limit=7", "relu2"]


@pytest.fixture(scope="module", autouse=INTERPRETED)
def _interpreter():
    repair_interpreter()


def given(E: int, D: int, F: int, K: int, kind: str, dtype: torch.dtype, biased: bool, device: str = "cpu"):
    H = activation_of(kind).halves * F
    torch.manual_seed(0)
    ids = torch.randperm(E)[:K][None].to(torch.int32)
    bias = torch.randn(E, H).to(dtype) if biased else None
    tensors = torch.randn(1, D), torch.randn(E, H, D) / D**0.5, torch.randn(E, D, F) / F**0.5
    found = (*(t.to(dtype) for t in tensors), torch.rand(1, K), ids, bias)
    return [None if t is None else t.to(device) for t in found]


@interpreted
@pytest.mark.parametrize("kind", slow_but(KINDS[:1], KINDS))
@pytest.mark.parametrize(("dtype", "biased"), slow_but([(fp32, True)], [(fp32, True), (bf16, False)]))
@pytest.mark.parametrize("shape", [(5, 40, 9, 3), (4, 520, 1030, 1)], ids=str)
def test_the_definition(shape, kind, dtype, biased):
    x, gate_up, down, weights, ids, bias = given(*shape, kind, dtype, biased)
    got = one_token(x, gate_up, down, weights, ids, bias, kind)
    want = reference.moe_mlp(x, gate_up, down, weights, ids, bias, kind)
    close = dict(rtol=1e-5, atol=1e-5) if dtype == fp32 else dict(rtol=2**-5, atol=2**-5)  # it cuts bf16
    torch.testing.assert_close(got, want, **close)


@interpreted
@pytest.mark.parametrize("nobody", [-1, 7])
def test_an_expert_that_is_not_here_adds_nothing(nobody):
    x, gate_up, down, weights, ids, _ = given(4, 16, 8, 3, "swiglu", fp32, False)
    few = reference.moe_mlp(x, gate_up, down, weights[:, 1:], ids[:, 1:])
    ids[0, 0] = nobody
    torch.testing.assert_close(one_token(x, gate_up, down, weights, ids, None, "swiglu"), few)


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("arch", CHIPS)
def test_the_kernels_fit(arch):
    found = []
    with compile_only(arch, lambda name, key, compile: found.append(measure(arch, name, compile))):
        for shape in ((128, 2048, 768, 8), (8, 4096, 14336, 2)):
            tensors = given(*(1, *shape[1:3], 1), "swiglu", bf16, False)[:3]
            x, gate_up, down = (t.to("meta") for t in tensors)
            weights = torch.empty(1, shape[3], device="meta")
            one_token(x, gate_up, down, weights, weights.int(), None, "swiglu")
    assert len(found) == 4
    for binary in found:
        assert_fits(binary, CHIPS[arch])
