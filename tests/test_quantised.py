"""Formats of quantised weights: hand-computed codes, bitsandbytes' bits, errors, sizes and refusals."""

import hashlib
import math

import pytest
import torch
from torch import Tensor

from tmoe.base import quantised
from tmoe.base.quantised import FORMATS, dequantise, integers, quantise, size_of, stored

KINDS = [*FORMATS]
ERROR = {"int8": 0.0072, "int4": 0.113, "fp8": 0.0265, "mxfp4": 0.114, "nf4": 0.093}  # of normal values
BITS = {"int8": 8, "int4": 4.125, "fp8": 8, "mxfp4": 4.25, "nf4": 4.127}


def error(kind: str, weight: Tensor) -> float:
    values = dequantise(quantise(weight, kind), kind, tuple(weight.shape))
    return float((values - weight.float()).norm() / weight.float().norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_errors_of_normal_values_are_known(kind, dtype):
    torch.manual_seed(0)
    weight = (torch.randn(8, 64, 256) * 0.02).to(dtype)
    assert error(kind, weight) <= ERROR[kind]


def test_int8_by_hand():
    codes, scales = quantise(torch.tensor([[127.0, -63.4, 0.5, 1.5], [0, 0, 0, 0]]), "int8")
    assert codes.tolist() == [[127, -63, 0, 2], [0, 0, 0, 0]] and scales.tolist() == [[1.0], [1.0]]


def test_int4_by_hand():
    """A scale of 2: the largest value is 15 = 7.5 x 2. Byte j of a group holds values j and j + 64."""
    weight = torch.zeros(1, 130)
    weight[0, 0], weight[0, 1], weight[0, 64], weight[0, 129] = 15.0, -15.0, 4.0, -7.5
    codes, scales = quantise(weight, "int4")
    assert scales.tolist() == [[2.0, 1.0]]
    assert codes[0, 0] == (7 + 8) | (2 + 8) << 4 and codes[0, 1] == (-8 + 8) | 8 << 4
    assert codes[0, 65] == (-8 + 8) | 8 << 4  # second group, value 129
    assert integers(codes, 130)[0, [0, 1, 64, 129]].tolist() == [7, -8, 2, -8]
    assert dequantise((codes, scales), "int4", (1, 130))[0, [0, 1, 64, 129]].tolist() == [14, -16, 4, -8]


def test_fp8_by_hand():
    codes, scales = quantise(torch.tensor([[896.0, -2.0, 34.0, 0.0]]), "fp8")  # scale 2
    assert scales.tolist() == [[2.0]] and codes.float().tolist() == [[448.0, -1.0, 16.0, 0.0]]  # 17: tie


def test_mxfp4_by_hand():
    """Ties go to even codes; a largest value from 7 on has the next power of two. The low bits come first."""
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -6.0]
    codes, scales = quantise(torch.tensor([middles]), "mxfp4")
    assert scales.tolist() == [[127]]
    assert dequantise((codes, scales), "mxfp4", (1, 8)).tolist() == [[0, 1, 1, 2, 2, 4, 4, -6]]
    assert codes[0, :4].tolist() == [0 | 2 << 4, 2 | 4 << 4, 4 | 6 << 4, 6 | 15 << 4]
    for most, exponent in (6.9, 0), (7.0, 1), (1.0, -2), (0.0, 0):
        assert quantise(torch.tensor([[most]]), "mxfp4")[1].item() == 127 + exponent


def test_nf4_has_the_bits_of_bitsandbytes():
    """bitsandbytes 0.50.2, quantize_4bit(blocksize=64, "nf4", compress_statistics=True), on a CPU."""
    i = torch.arange(300 * 64 + 7)
    weight = ((i * 7919 % 1009 - 504) / 512 * (1 + (i // 64 * 37) % 61) / 64).float()
    parts = quantise(weight, "nf4")
    values = dequantise(parts, "nf4", (len(weight),))
    said = [hashlib.sha256(t.numpy().tobytes()).hexdigest()[:16] for t in (*parts[:3], values)]
    assert said == ["e902c1dad528a592", "8a10a6a651d0442d", "217640dc9c81073a", "958f90bd48cd73d7"]
    assert float(parts[3]) == 0.47171539068222046


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape", [(3, 5, 33), (2, 64), (0, 64), (2, 0, 64), (1, 1), (7, 130), (2, 3, 128)], ids=str
)
def test_parts_have_the_listed_shapes_and_rows_of_zeros_stay_zeros(kind, shape):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    weight[..., :1, :] = 0
    parts = quantise(weight, kind)
    listed = stored(kind, shape)
    assert [(tuple(t.shape), t.dtype) for t in parts] == [(shape, dtype) for _, shape, dtype in listed]
    assert size_of(kind, shape) == sum(t.nbytes for t in parts)
    values = dequantise(parts, kind, shape, torch.bfloat16)
    assert values.shape == shape and values.dtype == torch.bfloat16 and values.isfinite().all()
    if kind != "nf4" or shape[-1] % 64 == 0:  # NF4's blocks run across rows
        assert not values[..., :1, :].any()


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_and_strides_do_not_matter(kind, monkeypatch):
    torch.manual_seed(0)
    weight = torch.randn(4, 96, 6).mT.contiguous().mT  # not contiguous
    parts, shape = quantise(weight.contiguous(), kind), tuple(weight.shape)
    values = dequantise(parts, kind, shape)
    monkeypatch.setattr(quantised, "PIECE", 256)
    assert all(map(torch.equal, quantise(weight, kind), parts))
    assert torch.equal(dequantise(parts, kind, shape), values)
    if kind != "nf4":  # a slice of experts
        assert torch.equal(dequantise(tuple(t[1:3] for t in parts), kind, (2, *shape[1:])), values[1:3])


def test_sizes():
    shape = (8, 256, 2048)
    for kind, bits in BITS.items():
        said = size_of(kind, shape) * 8 / math.prod(shape)
        assert abs(said - bits) < 0.01, (kind, said)


@pytest.mark.parametrize("kind", KINDS)
def test_refusals(kind):
    for bad in math.inf, -math.inf, math.nan, 3.4e38:
        weight = torch.ones(3, 65)
        weight[2, 64] = bad
        with pytest.raises(ValueError, match=rf"^model\.x: holds inf, NaN or .* valid for {kind}"):
            quantise(weight, kind, "model.x")
    for weight in torch.ones(3, dtype=torch.int32), torch.ones(()), torch.ones(3, 0):
        with pytest.raises(ValueError, match=r"^w: .* cannot be quantised .* valid: floating point"):
            quantise(weight, kind, "w")


def test_another_kind_is_refused():
    with pytest.raises(ValueError, match="kind: got 'int3', valid is int8, int4, fp8, mxfp4, nf4"):
        quantise(torch.ones(1, 1), "int3")
