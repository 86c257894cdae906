"""AdamW's kernel for moments in bf16 and 8 bits and weights in bf16, against its plain twin.

next: tests/optim/test_states.py
"""

import os
from dataclasses import replace

import forked
import pytest
import torch
from chips import CHIPS, assert_fits, measure
from tiers import slow_but

from tmoe.commands.warmup import traces
from tmoe.config.presets import presets
from tmoe.ops import narrow_adamw as op
from tmoe.ops.dynamic_map import FIRST, RATE, maps, quantise
from tmoe.ops.launch.kernel_launch import compile_only
from tmoe.ops.narrow_adamw import Row, narrow_adamw_, step_on_cpu_
from tmoe.ops.reference import AdamWRule
from tmoe.ops.stochastic import Place

INTERPRETED = "TRITON_INTERPRET" in os.environ  # read where kernels are defined
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs inside test_in_the_interpreter")
BF16, FP32, INT8 = torch.bfloat16, torch.float32, torch.uint8
RULE = AdamWRule(1e-2, (0.9, 0.95), 1e-8, 0.1)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="starts the others")
def test_in_the_interpreter():
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", __file__]
    ran = forked.run(command, env=os.environ | dict(TRITON_INTERPRET="1"))
    assert ran.returncode == 0 and "11 passed" in ran.stdout, ran.stdout[-4000:] + ran.stderr[-2000:]


def row(
    n: int, weight, grad, state, copy, step: float, place: Place = Place(5), block: int = 0, first: int = 0
):
    """A parameter of n elements; n is a multiple of the block, if it has one."""
    draw = torch.Generator().manual_seed(n)
    w, g, m, v = (torch.randn(n, generator=draw) for _ in range(4))
    v = v * v
    scales = None, None
    if state == INT8:
        (m, one), (v, two) = quantise(m, block, True), quantise(v, block, False)
        scales = one, two
    made = w.to(weight), g.to(grad), m.to(state), v.to(state)
    low = torch.full((n,), 7.0, dtype=copy) if copy else None
    return Row(*made, low, torch.tensor(float(step)), place, *scales, first=first)


def clone(row: Row) -> Row:
    return Row(*(t.clone() if isinstance(t, torch.Tensor) else t for t in row))


CUT = Place(9, base=40, chunk=96, stride=384)
FAR = Place(9, base=2**33 - 500)
ROWS = dict(
    bf16=lambda: [
        row(2500, FP32, FP32, BF16, BF16, 3),
        row(1, FP32, BF16, BF16, BF16, 1),
        row(0, FP32, FP32, BF16, None, 1),
        row(1024, FP32, BF16, BF16, None, 7, FAR),
        row(960, FP32, FP32, BF16, None, 2, CUT),
        row(960, FP32, FP32, BF16, None, 2, CUT, first=96),
    ],
    int8=lambda: [
        row(2560, FP32, FP32, INT8, BF16, 3, block=256),
        row(960, FP32, BF16, INT8, BF16, 1, block=240),
        row(335, FP32, FP32, INT8, None, 9, block=67),
        row(0, FP32, FP32, INT8, None, 1, block=64),
    ],
    masters=lambda: [
        row(2500, BF16, BF16, BF16, None, 3),
        row(33, BF16, BF16, FP32, None, 3),
        row(512, BF16, BF16, INT8, None, 4, block=128),
        row(960, BF16, BF16, BF16, None, 2, CUT),
    ],
)


@interpreted
@pytest.mark.parametrize("kind", list(ROWS))
@pytest.mark.parametrize("finite", [1.0, 0.0])
def test_the_kernel_is_its_twin(kind, finite):
    """The same bits but for sums in another order, which may flip one of 10,000 roundings."""
    rows = ROWS[kind]()
    before, twins = [clone(r) for r in rows], [clone(r) for r in rows]
    narrow_adamw_(rows, torch.tensor(0.25), torch.tensor(finite), *RULE)
    step_on_cpu_(twins, torch.tensor(0.25), RULE)
    for got, want, was in zip(rows, twins, before, strict=True):
        for name in ("weight", "mean", "square", "mean_scale", "square_scale"):
            a, b, c = (getattr(r, name) for r in (got, want, was))
            if a is None:
                continue
            if not finite:
                assert torch.equal(a, c), name
            elif a.dtype == FP32:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)
            else:
                assert (a != b).sum() <= 2 + a.numel() // 500, name
        assert torch.equal(got.grad, was.grad)
        if got.copy is not None:
            expected = got.weight if finite else torch.full_like(got.weight, 7.0)
            torch.testing.assert_close(got.copy.float(), expected, rtol=2**-7, atol=0)


@interpreted
@pytest.mark.parametrize("signed", [True, False])
def test_codes_at_every_value_and_midpoint(signed):
    """Without decay rates a moment is the gradient, or its square: the map's own values, and between them.

    Numbers around the begin of each decade are tried too, and numbers of all sizes.
    """
    values, middles = (maps(torch.device("cpu"))[i] for i in ((0, 1) if signed else (2, 3)))
    tried = [values, middles[1:], middles[1:].nextafter(torch.tensor(2.0)), values * 0.999, values * 1.001]
    tried += [middles[1:].nextafter(torch.tensor(-2.0)), torch.logspace(-12, 0, 300)]
    begins = [FIRST.value + -(-(decade << 29) // RATE.value) for decade in range(8)]
    bits = [(begin << 12) + near for begin in begins for near in range(-3, 4)]
    bits += range(0x33000000, 0x3F800000, 50021)
    sizes = torch.tensor(bits, dtype=torch.int32).view(FP32)
    tried += [sizes, -sizes] if signed else [sizes]
    x = torch.cat(tried).clamp(-1, 1)
    x = x if signed else x.clamp(min=0).sqrt()
    x = torch.cat([x, torch.zeros(-len(x) % 255)]).view(-1, 255)
    x = torch.cat([x, torch.ones(len(x), 1)], 1).flatten()  # so that each block's scale is 1
    made = row(len(x), FP32, FP32, INT8, None, 1, block=256)
    empty = torch.full_like(made.mean, 127), torch.zeros_like(made.square)
    made = made._replace(grad=x, mean=empty[0], square=empty[1])
    twin = clone(made)
    one = torch.ones(())
    rule = RULE._replace(betas=(0.0, 0.0))
    narrow_adamw_([made], one, one, *rule)
    step_on_cpu_([twin], one, rule)
    assert torch.equal(made.mean, twin.mean) and torch.equal(made.square, twin.square)
    if signed:
        assert torch.equal(made.mean[:255], torch.arange(255, dtype=torch.uint8))
    else:
        assert len(made.square.unique()) == 256


@interpreted
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("square", lambda t: t.float(), "mean and square both"),
        ("weight", lambda t: t.double(), "weight must be fp32 or bf16"),
        ("mean_scale", lambda t: None, "with scales"),
    ],
)
def test_other_tensors_are_refused(name, change, message):
    one = torch.ones(())
    given = row(512, FP32, FP32, INT8, None, 1, block=256)
    with pytest.raises(ValueError, match=rf"narrow_adamw_: .*{message}"):
        narrow_adamw_([given._replace(**{name: change(getattr(given, name))})], one, one, *RULE)


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("arch", slow_but(["cuda:90"], CHIPS))
def test_the_kernels_fit(arch):
    found = []
    with compile_only(arch, lambda name, key, compile: found.append(measure(arch, name, compile))):
        op.trace(BF16, INT8, FP32)
        op.trace(BF16, BF16, BF16)
    assert len(found) == 4 + 8
    for binary in found:
        assert_fits(binary, CHIPS[arch])
    if arch.startswith("cuda"):  # warps hand one another a block's scale and nothing else
        assert all(binary.shared <= 16 for binary in found[:4])


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize(("states", "masters"), [("bf16", "fp32"), ("int8", "bf16")])
def test_the_warm_up_knows_what_a_step_launches(states, masters):
    tiny = presets()["tiny"]
    optim = replace(tiny.optim, states=states, masters=masters)
    cfg = replace(tiny, optim=optim, train=replace(tiny.train, dtype="bf16"))

    def launched(what):
        found = {}
        with compile_only("cuda:90", lambda name, key, compile: found.setdefault(key, name)):
            what()
        return found

    def step():
        weight, state = (BF16 if masters == "bf16" else FP32), (INT8 if states == "int8" else BF16)
        meta = dict(device="meta")
        one = torch.ones((), **meta)
        copy = None if masters == "bf16" else BF16
        for n, kind, block in ((512, state, 256), (100, FP32 if masters == "bf16" else state, 0)):
            if kind == INT8 or not block or state == BF16:
                made = row(n, weight, BF16, kind, copy, 1, block=block)
                on_meta = Row(*(t.to("meta") if isinstance(t, torch.Tensor) else t for t in made))
                narrow_adamw_([on_meta], one, one, *RULE)

    wanted = launched(step)
    assert set(wanted.values()) == {"narrow_adamw_kernel"}
    assert not set(wanted) - set(launched(lambda: [trace(*args) for trace, *args in traces(cfg)]))
