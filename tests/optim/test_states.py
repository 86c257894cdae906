"""AdamW's moments in bf16 and 8 bits, and weights in bf16: rule, rounding, layouts, conversion."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tmoe.config.axes import Axes
from tmoe.config.presets import presets
from tmoe.config.run import OptimConfig
from tmoe.ops.dynamic_map import dequantise, maps, quantise
from tmoe.ops.stochastic import Place, place_of, random_bits, rounded
from tmoe.optim.adamw import build_optimizer, init_state, optimizer_tensors, restate
from tmoe.optim.states import block_of
from tmoe.plan.memory import memory_per_rank, peak_bytes

CPU = torch.device("cpu")
CFG = OptimConfig(lr=1e-2, eps=1e-4, weight_decay=0.1)
SHAPES = dict(embedding=(12, 512), router=(8, 6), norm=(6,), gate_up=(8, 6, 240), odd=(64, 257))
STATES = "bf16", "int8"


def draw(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}


def parameters(rank: int, world: int, dtype: torch.dtype, seed: int = 0) -> dict[str, nn.Parameter]:
    """`gate_up` on (dp, ep), along axis 1 and 0; the rest on all ranks in a row. One process: all plain."""
    values = {name: t.to(dtype) for name, t in draw(seed).items()}
    if world > 1:
        grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "ep"))
        flat = init_device_mesh("cpu", (world,))
        for name, t in values.items():
            experts = name == "gate_up"
            places = [Shard(1), Shard(0)] if experts else [Shard(0)]
            values[name] = distribute_tensor(t, grid if experts else flat, places)
    return {name: nn.Parameter(v) for name, v in values.items()}


def like(p: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return distribute_tensor(value, p.device_mesh, p.placements) if isinstance(p, DTensor) else value


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t.detach().clone()


def train(rank: int, world: int, states: str, masters: str, steps: int = 3):
    """Weights and state after some steps, of which the second is clipped and one more is skipped."""
    dtype = torch.bfloat16 if masters == "bf16" else torch.float32
    params = parameters(rank, world, dtype)
    cfg = replace(CFG, states=states, masters=masters)
    optimizer = build_optimizer(params.items(), cfg, CPU, seed=5)
    init_state(optimizer)
    for step in (0, 1, "skipped", *range(2, steps)):
        for name, grad in draw(9 if step == "skipped" else 100 + step).items():
            params[name].grad = like(params[name], grad.to(dtype))
        if step != 0:
            finite = torch.tensor(float(step != "skipped"))
            optimizer.decide(finite, torch.tensor(4.0 if step == 1 else 0.1), 1.0)
        optimizer.step()
    state = optimizer_tensors(optimizer, params)
    return {n: whole(t) for n, t in (params | state).items()}


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("masters", ["fp32", "bf16"])
def test_a_step_is_the_published_rule_on_stored_moments(states, masters):
    """Loshchilov & Hutter 2017, algorithm 2, in fp64, from the moments and weights that are stored."""
    before, after = (train(0, 1, states, masters, steps) for steps in (3, 4))
    for name, shape in SHAPES.items():
        block = block_of(torch.empty(shape)) if states == "int8" else 0
        assert block == (dict(embedding=256, gate_up=240).get(name, 0) if states == "int8" else 0)

        def moment(key, of, name=name, block=block):
            t = of[f"{key}.{name}"]
            if block:
                return dequantise(t, of[f"{key}_scale.{name}"], key == "exp_avg").double()
            assert t.dtype == (torch.bfloat16 if states == "bf16" else torch.float32)
            return t.double()

        dtype = torch.bfloat16 if masters == "bf16" else torch.float32
        g = draw(103)[name].to(dtype).double()
        m = 0.9 * moment("exp_avg", before) + 0.1 * g
        v = 0.95 * moment("exp_avg_sq", before) + 0.05 * g * g
        w = before[name].double()
        w = w * (1 - 1e-2 * 0.1 * (w.ndim > 1))
        w = w - 1e-2 * (m / (1 - 0.9**4)) / ((v / (1 - 0.95**4)).sqrt() + 1e-4)
        assert after[f"step.{name}"] == 4 and after[name].dtype == dtype
        near = 2.0**-7 if masters == "bf16" else 1e-5
        torch.testing.assert_close(after[name].double(), w, rtol=near, atol=1e-6)
        for key, want in (("exp_avg", m), ("exp_avg_sq", v)):
            got = moment(key, after)
            if not block:
                torch.testing.assert_close(got, want, rtol=2.0**-7 if states == "bf16" else 1e-5, atol=1e-6)
                continue
            # half of the widest step of the map: 0.9 / 64 or 0.9 / 128 of the block's largest
            most = want.unflatten(-1, (-1, block)).abs().amax(-1, keepdim=True)
            far = (got - want).unflatten(-1, (-1, block)).abs() / most
            assert far.max() < (0.0071 if key == "exp_avg" else 0.0036)


@pytest.mark.parametrize(("states", "masters"), [("bf16", "bf16"), ("int8", "fp32")])
def test_every_layout_gives_the_same_bits(gloo, states, masters):
    want = train(0, 1, states, masters)
    for got in gloo(4, train, states, masters):
        assert got.keys() == want.keys()
        for name in want:
            assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_torchaos(signed):
    quant = pytest.importorskip("torchao.optim.quant_utils")
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))
    x = x if signed else x * x
    values = torch.tensor(quant.create_dynamic_map(signed)).float()
    torch.testing.assert_close(maps(CPU)[0 if signed else 2], values, rtol=0, atol=1e-7)
    scaled, scale = quant.scale_tensor(x, 256)
    codes, ours = quantise(x, 256, signed)
    assert torch.equal(ours.view(-1), scale)
    assert (codes != quant.quantize_8bit_with_qmap(scaled, values)).sum() <= 2  # a tie may differ
    torch.testing.assert_close(
        dequantise(codes, ours, signed), quant.dequant_with_qmap(codes, values, scale), rtol=0, atol=1e-6
    )


def test_an_8_bit_step_is_torchaos(monkeypatch):
    adam = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    ours, theirs = (nn.Parameter(draw(0)["embedding"].clone()) for _ in range(2))
    cfg = replace(CFG, states="int8")
    mine = build_optimizer([("w", ours)], cfg, CPU)
    other = adam.AdamW8bit([theirs], lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, weight_decay=cfg.weight_decay)
    for step in range(4):
        ours.grad, theirs.grad = (draw(step)["embedding"].clone() for _ in range(2))
        mine.step()
        other.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_rounding_has_the_right_mean_and_two_neighbours():
    draws, again = random_bits(Place(7), 3, 1 << 16, CPU)
    for bits in (draws & 0xFFFF, draws >> 16, again & 0xFFFF):
        for x in (1.001, -1.001, 3e-20, 0.0):
            got = rounded(torch.full((1 << 16,), x), bits)
            low = torch.tensor(x).bfloat16().float()
            assert got.float().mean().item() == pytest.approx(x, rel=1e-4, abs=1e-30)
            assert len(got.unique()) == (1 if x == 0 else 2)
            assert (got.float() - low).abs().max() <= abs(x) * 2**-7
    assert torch.equal(
        rounded(torch.tensor([math.inf, -math.inf]), torch.tensor([65535, 65535])).isinf(),
        torch.tensor([True, True]),
    )


def test_random_numbers_follow_the_element_and_the_step():
    """Parts of [6, 4, 5], cut along axis 0, and along axes 0 and 1, have the numbers of the whole."""
    shape = 6, 4, 5
    bits = random_bits(Place(3), 2, 120, CPU)[0].view(shape)
    for part in ((slice(2, 5), slice(0, 4), slice(0, 5)), (slice(3, 6), slice(1, 3), slice(0, 5))):
        place = place_of(shape, part, 3)
        size = bits[part].numel()
        assert torch.equal(random_bits(place, 2, size, CPU)[0].view(bits[part].shape), bits[part])
    assert place_of(shape, (slice(0, 6), slice(0, 4), slice(2, 4)), 3) == Place(3, 2, 2, 5)
    with pytest.raises(ValueError, match=r"axes \[1, 2\]"):
        place_of(shape, (slice(0, 6), slice(0, 2), slice(2, 4)), 3)
    others = random_bits(Place(4), 2, 120, CPU)[0], random_bits(Place(3), 3, 120, CPU)[0]
    assert all((other == bits.view(-1)).sum() == 0 for other in others)
    far = random_bits(Place(3, 2**33), 2, 8, CPU)[0]
    assert not torch.equal(far, bits.view(-1)[:8])


def test_a_small_change_of_a_moment_is_not_lost():
    """0.999 v + 0.001 g^2 is nearer to v than to v's neighbour, and yet v moves to g^2 on average."""
    p = nn.Parameter(torch.zeros(64, 64))
    cfg = replace(CFG, states="bf16", betas=(0.9, 0.999), lr=1e-9)
    optimizer = build_optimizer([("w", p)], cfg, CPU)
    init_state(optimizer)
    moment = optimizer.state[p]["exp_avg_sq"]
    moment.fill_(1.0)
    for _ in range(100):
        p.grad = torch.full_like(p, 2.0)
        optimizer.step()
    assert moment.float().mean().item() == pytest.approx(4 - 3 * 0.999**100, rel=2e-3)


@pytest.mark.parametrize("start", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("end", ["fp32", "bf16", "int8"])
def test_stored_moments_are_converted(start, end):
    params = parameters(0, 1, torch.float32)
    before = build_optimizer(params.items(), replace(CFG, states=start), CPU)
    init_state(before)
    for name, grad in draw(1).items():
        params[name].grad = grad
    before.step()
    after = build_optimizer(params.items(), replace(CFG, states=end), CPU)
    init_state(after, dict.fromkeys(params.values(), start))
    old, new = (optimizer_tensors(optimizer, params) for optimizer in (before, after))
    assert old.keys() == new.keys() and all(t.dtype == old[name].dtype for name, t in new.items())
    for name, t in new.items():
        t.copy_(old[name])
    restate(after)
    fresh = build_optimizer(params.items(), replace(CFG, states=end), CPU)
    init_state(fresh)
    got, want = (optimizer_tensors(optimizer, params) for optimizer in (after, fresh))
    assert {n: (t.dtype, t.shape) for n, t in got.items()} == {n: (t.dtype, t.shape) for n, t in want.items()}
    exact = 0.1 * draw(1)["embedding"]
    codes = got["exp_avg.embedding"]
    value = dequantise(codes, got["exp_avg_scale.embedding"], True) if end == "int8" else codes.float()
    assert (value - exact).abs().max() < 0.012 * exact.abs().max()
    if start == end:
        assert all(torch.equal(got[name], old[name]) for name in old)


def test_torchs_state_dict_keeps_types():
    params = parameters(0, 1, torch.float32)
    optimizer = build_optimizer(params.items(), replace(CFG, states="int8"), CPU)
    init_state(optimizer)
    for name, grad in draw(1).items():
        params[name].grad = grad
    optimizer.step()
    other = build_optimizer(params.items(), replace(CFG, states="int8"), CPU)
    other.load_state_dict(optimizer.state_dict())
    for name, t in optimizer_tensors(other, params).items():
        want = optimizer_tensors(optimizer, params)[name]
        assert t.dtype == want.dtype and torch.equal(t, want), name


def test_the_dry_run_counts_each_type():
    """Qwen3-30B-A3B on 8 GPUs, 16 micro-batches, blocks recomputed: bytes an element, and the bound."""
    base = presets()["qwen3-30b-a3b"]
    base = replace(base, parallel=replace(base.parallel, ep=8, checkpoint="block"))
    base = replace(base, train=replace(base.train, accumulate=16))

    def memory(**optim):
        return memory_per_rank(replace(base, optim=replace(base.optim, **optim)), Axes(ep=8))

    wide, narrow = memory(), memory(states="bf16", sums="bf16")
    elements = wide["moments"] // 8
    assert narrow["moments"] == 4 * elements and narrow["parameters"] == wide["parameters"] == 4 * elements
    assert narrow["accumulated"] * 2 == wide["accumulated"]
    # FSDP2's sharded gradients of dense weights stay fp32; the experts' are sums
    assert wide["gradients"] - narrow["gradients"] == 2 * 48 * 128 * 3 * 768 * 2048 // 8
    assert memory(states="int8")["moments"] == 2 * elements + elements // 32
    half = memory(states="bf16", sums="bf16", masters="bf16")
    assert half["parameters"] == 2 * elements and half["gathered"] < narrow["gathered"]
    assert peak_bytes(wide) > 79 * 2**30 and peak_bytes(narrow) < 58 * 2**30
    offloaded = memory(states="int8", offload=True)
    assert offloaded["moments"] == 0
