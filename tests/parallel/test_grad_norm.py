"""clip_grad_norm_ returns and applies what one process with all tensors would, on any mixture of meshes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tmoe.parallel.grad_norm import clip_grad_norm_

INF, NAN = math.inf, math.nan
P = [0.5, 1.0, 2.0, 3.0, INF]
EPS = 2e-6  # fp32 gradients scaled by a factor that is rounded to fp32


def hand_made() -> dict[str, torch.Tensor]:
    """Gradients of very different sizes.

    Experts 2 and 5 received no token; `tiny` leaves most ranks without a row.
    """
    g = torch.Generator().manual_seed(7)
    shapes = dict(
        gate_up=(8, 6, 5),
        down=(8, 5, 3),
        embedding=(13, 5),
        tiny=(1, 4),
        norm=(5,),
        plain=(3, 3),
        unused=(4, 4),
    )
    grads = {
        n: torch.randn(shape, generator=g) * 10 ** (i - 2) for i, (n, shape) in enumerate(shapes.items())
    }
    grads["gate_up"][[2, 5]] = 0
    grads["down"][[2, 5]] = 0
    return grads


class Experts(nn.Module):
    def __init__(self, grads, ep):
        super().__init__()
        for name in ("gate_up", "down"):
            setattr(self, name, nn.Parameter(distribute_tensor(grads[name], ep, [Shard(0)])))


class Dense(nn.Module):
    def __init__(self, grads):
        super().__init__()
        for name in ("embedding", "tiny", "norm", "unused"):
            setattr(self, name, nn.Parameter(grads[name].clone()))


def two_meshes(world: int, ep: int) -> dict[str, nn.Parameter]:
    """Parameters as tmoe places them: experts on (dp, ep), FSDP2 over dp; dense FSDP2 over all; one plain.

    Each carries its hand-made gradient, except `unused`.
    """
    grid = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("dp", "ep"))
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("world",))
    grads = hand_made()
    experts = Experts(grads, grid["ep"])
    dense = Dense(grads)
    fully_shard(experts, mesh=grid["dp"])
    fully_shard(dense, mesh=flat)
    assert len(experts.gate_up.placements) == 2 and len(dense.tiny.placements) == 1
    params = dict(experts.named_parameters()) | dict(dense.named_parameters())
    params["plain"] = nn.Parameter(grads["plain"].clone())
    for name, p in params.items():
        p.grad = None if name == "unused" else p.detach().clone()
    return params


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t.clone()


def clip_all(rank, world, ep):
    """Per p: the norm, and the gradients after clipping to 0.7 of it."""
    results = {}
    for p in P:
        params = two_meshes(world, ep)
        norm = clip_grad_norm_(params.values(), INF, p)
        again = clip_grad_norm_(params.values(), 0.7 * norm.item(), p, foreach=False if p == 3 else None)
        assert type(again) is torch.Tensor and again.shape == () and again.equal(norm), (
            "inf must leave gradients alone"
        )
        results[p] = norm.item(), {n: whole(t.grad) for n, t in params.items() if t.grad is not None}
    return results


@pytest.mark.parametrize(("world", "ep"), [(1, 1), (2, 2), (4, 2), (4, 1), (8, 2), (8, 4)])
def test_two_meshes_equal_one_process(gloo, world, ep):
    per_rank = gloo(world, clip_all, ep)
    for p in P:
        params = {n: nn.Parameter(g.clone()) for n, g in hand_made().items() if n != "unused"}
        for t in params.values():
            t.grad = t.detach().clone()
        expected = torch.nn.utils.clip_grad_norm_(params.values(), INF, p)
        torch.nn.utils.clip_grad_norm_(params.values(), 0.7 * expected.item(), p)
        assert len({results[p][0] for results in per_rank}) == 1, "one number on all ranks, bit for bit"
        for norm, grads in (results[p] for results in per_rank):
            assert norm == pytest.approx(expected.item(), rel=EPS)
            assert grads.keys() == params.keys()
            for name, grad in grads.items():
                torch.testing.assert_close(grad, params[name].grad, rtol=EPS, atol=0)


def poisoned(rank, world, name, value, p):
    params = two_meshes(world, 2)
    if rank == world - 1:
        grad = params[name].grad
        (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[0] = value
    norm = clip_grad_norm_(params.values(), INF, p)
    try:
        clip_grad_norm_(params.values(), 1.0, p, error_if_nonfinite=True)
    except RuntimeError as error:
        return norm, str(error)
    return norm, ""


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    ("name", "p"), [("gate_up", 2.0), ("embedding", INF), ("plain", 3.0), ("plain", INF)]
)
def test_nonfinite_in_one_shard_reaches_every_rank(gloo, name, value, p):
    for norm, error in gloo(4, poisoned, name, value, p):
        assert norm.isnan() if math.isnan(value) else norm == INF
        assert f"norm of order {p}" in error


def missing(rank, world):
    """Gradients that are None on some ranks, then on all; then ranks with no parameters at all."""
    params = two_meshes(world, 2)
    if rank == 0:
        params["gate_up"].grad = params["plain"].grad = None
    some = clip_grad_norm_(params.values(), INF)
    lost = whole(params["gate_up"].detach()).square().sum() - params["gate_up"].to_local().square().sum()
    few = clip_grad_norm_(params.values() if rank else [], INF)
    for p in params.values():
        p.grad = None
    return some, lost, few, clip_grad_norm_(params.values(), 1.0)


def test_gradients_missing_on_some_ranks_do_not_hang(gloo):
    results = gloo(4, missing)
    squares = {n: g.square().sum().item() for n, g in hand_made().items()}
    rest = sum(squares[n] for n in ("down", "embedding", "tiny", "norm"))
    for some, _, few, none in results:
        assert some.item() == pytest.approx(math.sqrt(rest + results[0][1].item()), rel=EPS)
        assert few < some and none == 0
    assert len({few.item() for _, _, few, _ in results}) == 1


def with_grad(t):
    p = nn.Parameter(t.detach().clone())
    p.grad = t.detach().clone()
    return p


def uneven_ownership(rank, world):
    """Parameters that not all ranks hold alike.

    Ranks 0 and 1 alone share `pair`. Ranks of two pipeline stages hold different tensors. `copied` lives
    on the columns of a grid, so each row holds a copy.
    """
    g = torch.Generator().manual_seed(3)
    everywhere, pair, copied, *stages = (torch.randn(6, 4, generator=g) * 3**i for i in range(7))
    flat = init_device_mesh("cpu", (4,))
    first_two = DeviceMesh("cpu", [0, 1])
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    pipeline = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    params = [with_grad(distribute_tensor(everywhere, flat, [Shard(1)]))]
    params += [with_grad(distribute_tensor(copied, grid["ep"], [Shard(0)]))]
    params += [with_grad(distribute_tensor(copied, grid, [Replicate(), Shard(0)]))]
    if rank < 2:
        params += [with_grad(distribute_tensor(pair, first_two, [Shard(0)]))]
    for stage in stages[:1] if pipeline["pp"].get_local_rank() == 0 else stages[1:]:
        params += [with_grad(distribute_tensor(stage, pipeline["dp"], [Shard(0)]))]
    norms = [clip_grad_norm_(params, INF, p) for p in (1.0, 2.0, INF)]
    return len(params), norms, [everywhere, pair, copied, copied, *stages]


def test_ranks_that_own_different_numbers_of_tensors(gloo):
    results = gloo(4, uneven_ownership)
    assert [n for n, *_ in results] == [5, 5, 6, 6]
    for _, norms, tensors in results:
        for norm, p in zip(norms, (1.0, 2.0, INF), strict=True):
            one = torch.linalg.vector_norm(torch.cat([t.flatten() for t in tensors]).double(), p)
            assert norm.item() == pytest.approx(one.item(), rel=EPS)


def partial(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    parts = torch.randn(world, 5, 3, generator=torch.Generator().manual_seed(5))
    p = nn.Parameter(distribute_tensor(parts.sum(0), mesh, [Replicate()]))
    p.grad = DTensor.from_local(parts[rank].clone(), mesh, [Partial()])
    norm = clip_grad_norm_([p], 1.0)
    return norm, p.grad.full_tensor(), parts.sum(0)


def test_pending_sums_are_added_up_before_the_norm(gloo):
    for norm, clipped, grad in gloo(3, partial):
        torch.testing.assert_close(norm, grad.norm())
        torch.testing.assert_close(clipped, grad / grad.norm())


def test_low_precision_gradients_are_added_up_in_fp32():
    grads = [torch.randn(1000, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(50)]
    params = [with_grad(g) for g in grads]
    exact = torch.cat(grads).double().norm()
    norm = clip_grad_norm_(params, 1.0)
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx(exact.item(), rel=1e-6)
    assert abs(torch.nn.utils.get_total_norm(grads).item() / exact.item() - 1) > 1e-4, (
        "torch's bf16 sum is that far off"
    )
    torch.testing.assert_close(params[0].grad, (grads[0].double() / exact).bfloat16(), rtol=2**-7, atol=0)


def test_long_sums_do_not_drift_on_a_cpu():
    p = with_grad(torch.randn(3_000_000, generator=torch.Generator().manual_seed(0)))
    for order in (1.0, 2.0, 3.0):
        exact = torch.linalg.vector_norm(p.grad.double(), order)
        assert clip_grad_norm_(p, INF, order).item() == pytest.approx(exact.item(), rel=1e-7)


@pytest.mark.parametrize("p", [0, -1, -INF, NAN])
def test_norm_type_out_of_range(p):
    with pytest.raises(ValueError, match=r"norm_type=.*above 0"):
        clip_grad_norm_([], 1.0, p)


def test_what_is_no_number_or_no_tensor_is_named():
    p = with_grad(torch.tensor([3.0, 4.0]))
    for args in (([p], None), ([p], 1.0, "two")):
        with pytest.raises(ValueError, match=r"max_norm=.*, norm_type=.*: must be numbers"):
            clip_grad_norm_(*args)
    with pytest.raises(
        ValueError, match=r"params: got tuple, valid are tensors, as model.parameters\(\) gives"
    ):
        clip_grad_norm_(torch.nn.Linear(2, 2).named_parameters(), 1.0)


@pytest.mark.parametrize("largest", [-1.0, -INF, NAN])
def test_a_negative_largest_norm_turns_no_gradient_round(largest):
    p = with_grad(torch.tensor([3.0, 4.0]))
    with pytest.raises(ValueError, match=r"max_norm=.*0 or above"):
        clip_grad_norm_([p], largest)
    assert p.grad.tolist() == [3.0, 4.0]
    assert clip_grad_norm_([p], 2.0, "inf").item() == 4.0  # torch takes the word, too
    assert p.grad.tolist() == pytest.approx([1.5, 2.0])


def foreign_model():
    torch.manual_seed(0)
    layers = [nn.Linear(6, 11), nn.GELU(), nn.Linear(11, 11), nn.GELU(), nn.Linear(11, 3)]
    model = nn.Sequential(*layers)
    model.register_parameter("never_used", nn.Parameter(torch.ones(5)))
    return model


def foreign_loop(rank, world, clip):
    """FSDP2 as any code uses it.

    FSDP2 averages over ranks, so one process takes the mean over the whole batch.
    """
    model = foreign_model()
    if world > 1:
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    draw = torch.Generator().manual_seed(1)
    norms = []
    for _ in range(5):
        x, y = torch.randn(12, 6, generator=draw), torch.randn(12, 3, generator=draw)
        mine = slice(rank * 12 // world, (rank + 1) * 12 // world)
        (10 * nn.functional.mse_loss(model(x[mine]), y[mine])).backward()
        norms.append(clip(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, [whole(p.detach()) for p in model.parameters()]


@pytest.mark.parametrize("world", [2, 4])
def test_in_an_fsdp2_loop_that_tmoe_did_not_build(gloo, world):
    (norms, params), *_ = gloo(1, foreign_loop, torch.nn.utils.clip_grad_norm_)
    assert min(norms) > 1.0, "every step is clipped"
    for got_norms, got_params in gloo(world, foreign_loop, clip_grad_norm_):
        assert got_norms == pytest.approx(norms, rel=1e-5)
        for got, expected in zip(got_params, params, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("p", P)
def test_no_host_sync_on_a_gpu(p):
    grads = [torch.randn(n, 7, device="cuda") for n in (1, 100, 3000)]
    params = [with_grad(g) for g in grads]
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm = clip_grad_norm_(params, 0.5, p)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    exact = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]).double(), p)
    assert norm.is_cuda and norm.item() == pytest.approx(exact.item(), rel=1e-5)
    torch.testing.assert_close(params[1].grad, (grads[1].double() * (0.5 / exact)).float())
