"""AdamW on two meshes, its state, the schedule, the average of the weights, and steps that are not taken."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tmoe.config.run import OptimConfig
from tmoe.optim.adamw import AdamW, build_optimizer, init_state, optimizer_tensors, parameter_groups
from tmoe.optim.ema import Ema
from tmoe.optim.guard import SkipGuard
from tmoe.optim.learning_rate import lr_factor, set_lr
from tmoe.parallel.grad_norm import clip_grad_norm_

CPU = torch.device("cpu")
CFG = OptimConfig(lr=1e-2, eps=1e-4, weight_decay=0.1)
SHAPES = dict(embedding=(10, 6), router=(8, 6), router_bias=(8,), norm=(6,), gate_up=(8, 6, 4), frozen=(3, 3))


def draw(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}


def parameters(world: int, seed: int = 0) -> dict[str, nn.Parameter]:
    """`gate_up` on a (dp, ep) grid, the rest on all ranks in a row, `router_bias` plain.

    In one process all are plain.
    """
    values = draw(seed)
    if world > 1:
        grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "ep"))
        flat = init_device_mesh("cpu", (world,))
        values["gate_up"] = distribute_tensor(values["gate_up"], grid, [Shard(1), Shard(0)])
        for name in ("embedding", "router", "norm"):
            values[name] = distribute_tensor(values[name], flat, [Shard(0)])
    return {name: nn.Parameter(v, requires_grad=name != "frozen") for name, v in values.items()}


def set_gradients(params: dict[str, nn.Parameter], seed: int) -> None:
    for name, grad in draw(seed).items():
        p = params[name]
        if p.requires_grad:
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t.detach().clone()


def snapshot(tensors):
    return {name: local(t.detach()).clone() for name, t in tensors.items()}


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].equal(b[name]), name


def test_only_matrices_decay_and_frozen_parameters_stay_out():
    params = parameters(1) | {"experts.gate_up_bias": nn.Parameter(torch.ones(8, 6))}
    groups = parameter_groups(params.items(), 0.3)
    names = {id(p): name for name, p in params.items()}
    decay = {frozenset(names[id(p)] for p in g["params"]): g["weight_decay"] for g in groups}
    still = {"router_bias", "norm", "experts.gate_up_bias"}
    assert decay == {frozenset({"embedding", "router", "gate_up"}): 0.3, frozenset(still): 0.0}


def train(rank, world, steps):
    params = parameters(world)
    optimizer = build_optimizer(params.items(), CFG, CPU)
    assert all(group["fused"] for group in optimizer.param_groups)
    init_state(optimizer)
    for step in range(steps):
        set_gradients(params, 100 + step)
        set_lr(optimizer, CFG.lr / (step + 1))
        optimizer.step()
    tensors = optimizer_tensors(optimizer, params)
    return {n: whole(t) for n, t in params.items()}, {n: whole(t) for n, t in tensors.items()}


@pytest.mark.parametrize("world", [2, 4])
def test_fused_adamw_on_two_meshes_equals_one_process(gloo, world):
    params, state = train(0, 1, 4)
    for got_params, got_state in gloo(world, train, 4):
        for got, expected in ((got_params, params), (got_state, state)):
            assert got.keys() == expected.keys()
            for name in expected:
                torch.testing.assert_close(got[name], expected[name], rtol=1e-6, atol=1e-7, msg=name)


def test_fused_adamw_is_the_published_rule():
    """Loshchilov & Hutter 2017, algorithm 2, in fp64."""
    params, _ = train(0, 1, 3)
    start = draw(0)
    (beta1, beta2) = CFG.betas
    for name in ("gate_up", "norm"):
        w = start[name].double()
        m = 0.0
        v = 0.0
        for t in range(1, 4):
            g = draw(99 + t)[name].double()
            lr = CFG.lr / t
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            w = w * (1 - lr * CFG.weight_decay * (w.ndim >= 2))
            w = w - lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + CFG.eps)
        torch.testing.assert_close(params[name].double(), w, rtol=1e-5, atol=1e-6)


def test_explicit_state_changes_nothing():
    runs = []
    for explicit in (False, True):
        params = parameters(1)
        optimizer = build_optimizer(params.items(), CFG, CPU)
        if explicit:
            init_state(optimizer)
        set_gradients(params, 1)
        optimizer.step()
        runs.append(snapshot(params) | snapshot(optimizer_tensors(optimizer, params)))
    assert_same_bits(*runs)


def resume(rank, world):
    """Three steps straight; and two, whose state a new optimizer loads in place for the third."""
    ends = []
    for stop in (False, True):
        params = parameters(world)
        optimizer = build_optimizer(params.items(), CFG, CPU)
        init_state(optimizer)
        for step in range(3):
            if stop and step == 2:
                saved = snapshot(params), snapshot(optimizer_tensors(optimizer, params))
                params = parameters(world, seed=77)
                optimizer = build_optimizer(params.items(), CFG, CPU)
                init_state(optimizer)
                for values, tensors in zip(
                    saved, (params, optimizer_tensors(optimizer, params)), strict=True
                ):
                    assert values.keys() == tensors.keys()
                    for name, value in values.items():
                        local(tensors[name].detach()).copy_(value)
            set_gradients(params, 100 + step)
            optimizer.step()
        ends.append(snapshot(params) | snapshot(optimizer_tensors(optimizer, params)))
    return ends


def test_state_loaded_in_place_before_the_first_step_continues_bit_for_bit(gloo):
    for straight, resumed in gloo(2, resume):
        assert_same_bits(straight, resumed)
        assert {"exp_avg.gate_up", "exp_avg_sq.norm", "step.router"} <= resumed.keys()
        assert "exp_avg.frozen" not in resumed and resumed["step.router"] == 3


def poisoned_step(rank, world, poison):
    """Three steps; with `poison`, a NaN in one rank's shard asks for a skip after the first."""
    params = parameters(world)
    optimizer = build_optimizer(params.items(), CFG, CPU)
    init_state(optimizer)
    skipped = 0
    for seed in [1, "bad", 2, 3] if poison else [1, 2, 3]:
        set_gradients(params, 9 if seed == "bad" else seed)
        if seed == "bad" and rank == world - 1:
            local(params["gate_up"].grad).view(-1)[0] = math.nan
        before = snapshot(params) | snapshot(optimizer_tensors(optimizer, params))
        if clip_grad_norm_(params.values(), 1.0).isfinite():
            optimizer.step()
        else:
            skipped += 1
            assert_same_bits(before, snapshot(params) | snapshot(optimizer_tensors(optimizer, params)))
        optimizer.zero_grad()
    return skipped, snapshot(params) | snapshot(optimizer_tensors(optimizer, params))


def test_skipped_step_leaves_no_trace(gloo):
    for (zero, clean), (one, skipped) in zip(
        gloo(4, poisoned_step, False), gloo(4, poisoned_step, True), strict=True
    ):
        assert (zero, one) == (0, 1)
        assert_same_bits(clean, skipped)


def test_skip_guard_counts_resumes_and_ends_the_run():
    guard = SkipGuard(3)
    for step, finite in enumerate([False, False, True, False, False]):
        assert guard.strange(finite, 1.0) is not finite
        guard.give_up(step)
    other = SkipGuard(3)
    other.load_state_dict(guard.state_dict())
    assert (other.total, other.in_a_row) == (4, 2)
    with pytest.raises(RuntimeError, match=r"step 5: .*3 times in a row .*--optim\.max-skips=3"):
        assert other.strange(False, float("nan"))
        other.give_up(5)


def factors(**settings):
    cfg = OptimConfig(**settings)
    return [lr_factor(step, 100, cfg) for step in range(101)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_warmup_is_linear_and_ends_at_the_peak(schedule):
    got = factors(schedule=schedule, warmup=10)
    assert got[:10] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert got[10] == 1.0


@pytest.mark.parametrize("m", [0.0, 0.1])
def test_schedules_at_their_corners(m):
    cosine, linear = (factors(schedule=s, warmup=20, min_lr=m) for s in ("cosine", "linear"))
    wsd = factors(schedule="wsd", warmup=20, min_lr=m, decay_fraction=0.4)
    # quarter, half and end of the 80 steps after the warm-up
    assert [cosine[i] for i in (40, 60, 100)] == pytest.approx(
        [m + (1 - m) * (2 + 2**0.5) / 4, (1 + m) / 2, m]
    )
    assert [linear[i] for i in (40, 60, 100)] == pytest.approx([m + (1 - m) * 0.75, (1 + m) / 2, m])
    assert wsd[20:61] == [1.0] * 41
    assert [wsd[i] for i in (80, 90, 100)] == pytest.approx([(1 + m) / 2, m + (1 - m) / 4, m])
    assert factors(schedule="constant", min_lr=m) == [1.0] * 101
    for curve in (cosine, linear, wsd):
        assert all(a >= b for a, b in itertools.pairwise(curve[20:])) and curve[99] > m


def test_schedule_of_degenerate_runs():
    for schedule in ("cosine", "linear", "wsd"):
        assert lr_factor(0, 1, OptimConfig(schedule=schedule)) == 1.0
        assert lr_factor(6, 7, OptimConfig(schedule=schedule, warmup=7)) == 1.0, "all warm-up"
        assert lr_factor(500, 100, OptimConfig(schedule=schedule, min_lr=0.25)) == pytest.approx(0.25)
    # a warm-up that reaches into wsd's decay shortens it
    assert lr_factor(95, 100, OptimConfig(schedule="wsd", warmup=90, min_lr=0.0)) == pytest.approx(0.5)


def averaged(rank, world):
    params = parameters(world)
    ema = Ema(params.items(), 0.9)
    values = {name: whole(p.detach()).double() for name, p in params.items()}
    for seed in range(1, 5):
        for (name, p), new in zip(params.items(), parameters(world, seed).values(), strict=True):
            p.data.copy_(new.data)
            values[name] = 0.9 * values[name] + 0.1 * whole(new.detach()).double()
        ema.update()
    before = snapshot(params)
    inside = {}
    try:
        with ema.swapped():
            inside = {name: whole(p.detach()) for name, p in params.items()}
            raise KeyError("in validation")
    except KeyError:
        assert_same_bits(before, snapshot(params))
    averages = ema.tensors()
    assert averages["gate_up"].placements == params["gate_up"].placements if world > 1 else True
    return values, inside, {name: whole(t) for name, t in averages.items()}


@pytest.mark.parametrize("world", [1, 4])
def test_ema_follows_its_formula_and_swaps_back(gloo, world):
    for values, inside, averages in gloo(world, averaged):
        assert values.keys() == averages.keys()
        for name, value in values.items():
            torch.testing.assert_close(averages[name].double(), value, rtol=1e-5, atol=1e-6)
            assert inside[name].equal(averages[name])


def test_ema_of_bf16_weights_is_kept_in_fp32():
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    ema = Ema([("w", p)], 0.999)
    p.data.fill_(2.0)
    ema.update()
    with ema.swapped():
        assert p.eq(1.0).all(), "1.001 rounded to bf16"
    assert p.eq(2.0).all()
    torch.testing.assert_close(ema.tensors()["w"], torch.full((4,), 1.001))


@pytest.mark.gpu
def test_fused_on_a_gpu_with_explicit_state():
    runs = []
    for device in ("cpu", "cuda"):
        params = {name: nn.Parameter(p.detach().to(device)) for name, p in parameters(1).items()}
        optimizer = build_optimizer(params.items(), CFG, torch.device(device))
        init_state(optimizer)
        for seed in range(3):
            for name, grad in draw(seed).items():
                params[name].grad = grad.to(device)
            optimizer.step()
        runs.append({name: p.detach().cpu() for name, p in params.items()})
    for name in runs[0]:
        torch.testing.assert_close(runs[0][name], runs[1][name], rtol=1e-5, atol=1e-6)


def test_a_closure_is_refused():
    optimizer = build_optimizer(
        [("w", torch.nn.Parameter(torch.ones(2)))], OptimConfig(), torch.device("cpu")
    )
    with pytest.raises(ValueError, match="got a closure"):
        optimizer.step(lambda: torch.ones(()))


def test_grad_scaler_unscales_and_skips(monkeypatch):
    """torch lets fused optimizers do both themselves.

    Ours on a GPU would not, so it leaves them to the scaler.
    """
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = build_optimizer([("p", p)], OptimConfig(lr=0.1), torch.device("cpu"))
    seen = []
    real = AdamW.step
    monkeypatch.setattr(AdamW, "step", lambda self: seen.append(p.grad.clone()) or real(self))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in (3.0, math.inf, 5.0):
        optimizer.zero_grad()
        scaler.scale((p * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [g.tolist() for g in seen] == [[3.0] * 3, [5.0] * 3] and p.isfinite().all()


@pytest.mark.parametrize("name", ["amsgrad", "maximize"])
def test_other_rules_are_refused(name):
    with pytest.raises(ValueError, match=f"AdamW: {name}=True"):
        AdamW([torch.nn.Parameter(torch.ones(3))], **{name: True})


@pytest.mark.parametrize(("norm", "factor"), [(0.1, 1.0), (4.0, 0.25)])
def test_clipping_never_enlarges(norm, factor):
    optimizer = build_optimizer([("w", nn.Parameter(torch.zeros(1)))], OptimConfig(), torch.device("cpu"))
    optimizer.decide(torch.ones(()), torch.tensor(norm), 1.0)
    assert optimizer.factor.item() == pytest.approx(factor)
    optimizer.decide(torch.ones(()), torch.tensor(norm), 0.0)
    assert optimizer.factor is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_takes_the_weights_place_and_gives_it_back(dtype):
    """No copy of fp32 weights is held; both come back bit for bit, also after an error."""
    weights = {name: nn.Parameter(torch.randn(300, 7).to(dtype)) for name in "ab"}
    ema = Ema(weights.items(), 0.5)
    with torch.no_grad():
        for w in weights.values():
            w.normal_()
    ema.update()
    before, averages = ({n: t.detach().clone() for n, t in of.items()} for of in (weights, ema.tensors()))
    with pytest.raises(KeyError), ema.swapped():
        assert all(torch.equal(weights[n], averages[n].to(dtype)) for n in weights)
        raise KeyError
    assert all(
        torch.equal(weights[n], before[n]) and torch.equal(ema.tensors()[n], averages[n]) for n in weights
    )


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_decay_may_end_before_the_run(schedule):
    """Until its end the decay is that of a run of so many steps; behind it the least rate holds."""
    cfg = OptimConfig(schedule=schedule, warmup=5, min_lr=0.1)
    ends = OptimConfig(schedule=schedule, warmup=5, min_lr=0.1, decay_steps=40)
    factors = [lr_factor(step, 100, ends) for step in range(100)]
    assert factors[:40] == [lr_factor(step, 40, cfg) for step in range(40)]
    assert factors[40:] == pytest.approx([0.1] * 60)


def test_warm_up_as_a_share():
    """Of the steps until the decay ends, as Megatron's --lr-warmup-fraction."""
    share = OptimConfig(warmup_fraction=0.25, decay_steps=40)
    steps = OptimConfig(warmup=10, decay_steps=40)
    assert [lr_factor(s, 100, share) for s in range(100)] == [lr_factor(s, 100, steps) for s in range(100)]
    assert lr_factor(24, 100, OptimConfig(warmup_fraction=0.25)) == 1.0
    with pytest.raises(ValueError, match=r"--optim.warmup=3, --optim.warmup-fraction=0.1: give one"):
        OptimConfig(warmup=3, warmup_fraction=0.1)
    with pytest.raises(ValueError, match=r"--optim.decay-steps=3: must be 0, or more than --optim.warmup=3"):
        OptimConfig(warmup=3, decay_steps=3)
