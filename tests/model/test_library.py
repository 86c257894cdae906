"""tmoe's parts in someone else's model and loop: no Transformer, no config file, no meta tensors."""

import copy
import functools
import logging
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import tmoe
from tmoe.config.axes import Axes
from tmoe.model.parallelize import apply_ep
from tmoe.moe.balance import Balancer, stack

CFG = tmoe.MoEConfig(experts=8, top_k=2, ffn_dim=12, shared_dim=8, balance_coeff=0.1)
D, STEPS, ROWS = 16, 6, 8


class Theirs(nn.Module):
    """A classifier as a user might write it, with two of tmoe's layers in it."""

    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(5, D)
        self.layers = nn.ModuleList(tmoe.MoE(D, CFG) for _ in range(2))
        self.outputs = nn.Linear(D, 3)

    def forward(self, x):
        h = self.inputs(x)
        for layer in self.layers:
            y = layer(h)
            y += h  # in place: a layer's output must not be a view that FSDP2 has hooked
            h = y
        return self.outputs(h)


def train(rank: int, world: int, ep: int, dtype: str):
    torch.manual_seed(0)
    model = Theirs()
    mesh = tmoe.parallel.build_mesh(ep=ep)
    cfg = None if dtype == "fp32" else tmoe.Config(parallel=tmoe.config.ParallelConfig(ep=ep), compile=False)
    assert tmoe.parallel.parallelize(model, mesh, cfg) is model
    optimizer = torch.optim.SGD(model.parameters(), 0.3, foreach=False)
    draw = torch.Generator().manual_seed(1)
    target = torch.randn(5, 3, generator=draw)
    out = []
    for _ in range(STEPS):
        x = torch.randn(ROWS, 5, generator=draw)
        label = (x @ target).argmax(-1)
        mine = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
        x_mine = x[mine] if dtype == "fp32" else x[mine].bfloat16()
        logits = model(x_mine).float()
        loss = nn.functional.cross_entropy(logits, label[mine], reduction="sum") / ROWS
        # [T, D] input counts as one sequence: a rank's share of the z-loss is its tokens' over all tokens
        load = stack([layer.load for layer in model.layers])
        loss = loss + 0.01 * load.z_B.sum() / ROWS
        loss.backward()
        norm = tmoe.parallel.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        out.append(norm.item())
    return out, {n: p.full_tensor() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("world", "ep"), [(2, 2), (4, 2), (2, 1), (4, 4)])
def test_own_model_and_loop(gloo, world, ep):
    want_norms, want = gloo(1, train, 1, "fp32")[0]
    norms, got = gloo(world, train, ep, "fp32")[0]
    assert norms == pytest.approx(want_norms, rel=1e-5)
    assert want.keys() == got.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6)


def gathers(rank: int, world: int) -> list[str]:
    """What torch says while experts over (dp, ep) are gathered whole."""
    model = tmoe.parallel.parallelize(Theirs(), tmoe.parallel.build_mesh(ep=2))
    said: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("torch.distributed.tensor._redistribute").addHandler(heard)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for p in model.parameters():
            p.full_tensor()
    return [*said, *(str(one.message) for one in warned)]


def test_whole_experts_are_gathered_in_silence(gloo):
    """torch would tell each rank of two all-gathers, which there must be."""
    assert gloo(4, gathers) == [[]] * 4


def test_bf16_trains_fp32_masters(gloo):
    norms, got = gloo(2, train, 2, "bf16")[0]
    want, _ = gloo(2, train, 2, "fp32")[0]
    assert all(p.dtype == torch.float32 for p in got.values())
    assert norms == pytest.approx(want, rel=0.1)
    assert norms != want


def twice(rank: int, world: int) -> list[str]:
    said = []
    mesh = tmoe.parallel.build_mesh(ep=world)
    cfg = tmoe.Config(compile=False)
    whole = tmoe.Transformer(tmoe.config.ModelConfig(vocab=16, dim=16, layers=1, head_dim=4, moe=CFG))
    half = nn.ModuleList(tmoe.MoE(D, CFG) for _ in range(2))
    apply_ep(half[1], mesh, "auto")
    theirs = Theirs()
    for model in theirs, whole:
        tmoe.parallel.parallelize(model, mesh, cfg)
    for again in (
        *(lambda m=m: tmoe.parallel.parallelize(m, mesh, cfg) for m in (theirs, whole, half)),
        lambda: apply_ep(half[1], mesh, "auto"),
    ):
        with pytest.raises(ValueError) as error:
            again()
        said.append(str(error.value))
    return [*said, type(half[0].experts.gate_up.data).__name__]


@pytest.mark.parametrize("world", [1, 2])
def test_a_model_is_laid_out_once(gloo, world):
    for *said, untouched in gloo(world, twice):
        assert [text.split(" is laid")[0] for text in said[:3]] == [
            f"parallelize: this {name}" for name in ("Theirs", "Transformer", "ModuleList")
        ]
        assert "sharded over a mesh already" in said[3] and untouched == "Tensor"


def test_stand_alone_layer_and_its_losses():
    """`MoE(dim, cfg)(x)` for [B, S, D] and [T, D], and the balancing loss from what it measured."""
    torch.manual_seed(0)
    moe = tmoe.MoE(D, CFG)
    x = torch.randn(3, 7, D, requires_grad=True)
    y = moe(x)
    assert y.shape == x.shape
    loss = Balancer(CFG).loss(stack([moe.load]), None)
    loss.backward()
    assert moe.router.weight.grad.abs().sum() > 0
    torch.testing.assert_close(moe(x.flatten(0, 1)).view_as(x), y)
    torch.testing.assert_close(copy.deepcopy(moe)(x), y)  # after a call, whose graph is no part of the copy


def test_a_layer_names_a_wrong_width_or_input():
    for dim in (0, -1, 2.5, "8", None):
        with pytest.raises(ValueError, match=f"dim: got {dim!r}, valid is a whole number"):
            tmoe.MoE(dim, tmoe.MoEConfig())
    layer = tmoe.MoE(16, tmoe.MoEConfig(ffn_dim=8))
    for shape in ((16,), (2, 5, 15), ()):
        with pytest.raises(ValueError, match=r"x: got shape .*dim=16"):
            layer(torch.randn(shape))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_layer_on_meta_has_shapes_alone(score):
    cfg = replace(CFG, score=score)
    x = torch.randn(3, 7, D, device="meta", requires_grad=True)
    moe = tmoe.MoE(D, cfg).to("meta")
    y = moe(x)
    (y.sum() + Balancer(cfg).loss(stack([moe.load]), None)).backward()
    assert y.is_meta and y.shape == x.grad.shape == x.shape and moe.router.weight.grad.is_meta


def test_presets_and_public_names():
    assert {"tiny", "moe-pilot-14b", "mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b"} < set(tmoe.presets())
    for name in ("Transformer", "MoE", "ops", "parallel", "presets"):
        assert hasattr(tmoe, name)
    for name in ("build_mesh", "parallelize", "clip_grad_norm_"):
        assert callable(getattr(tmoe.parallel, name))
    for name in ("moe_mlp", "grouped_mm"):
        assert callable(getattr(tmoe.ops, name))


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        (dict(ep=3), "ep=3"),
        (dict(dp=2, ep=1), "dp=2"),
        (dict(tp=2), r"--parallel.cp=1 x --parallel.tp=2 = 2: must divide dp x ep x etp = 1; valid: \[1\]"),
        (dict(replicate=2), "replicate=2 x --parallel.ep=1 = 2: must divide the world of 1"),
        (dict(dp=1, etp=2), "dp=1 x --parallel.ep=1 x --parallel.etp=2 = 2 is not the world of 1 processes"),
        (dict(ep=0), "ep=0"),
        (dict(dp=0), "dp=0"),
        (dict(ep="2"), "ep='2': must be a whole number from 1 on"),
        (dict(ep=1.0), "ep=1.0: must be a whole number from 1 on"),
        (dict(ep=None), "ep=None: must be a whole number from 1 on"),
        (dict(dp=True), "dp=True: must be a whole number from 1 on"),
    ],
    ids=str,
)
def test_mesh_errors_name_the_axis(axes, says):
    with pytest.raises(ValueError, match=says):
        Axes.over(1, **axes)


@pytest.mark.parametrize(
    "padding",
    [
        torch.zeros(7, 3, dtype=torch.bool),
        torch.ones(1, dtype=torch.bool),
        torch.zeros(3, 7),
        [True],
        torch.tensor(True),
        torch.zeros(3, 7, dtype=torch.bool, device="meta"),
    ],
    ids=["transposed", "one", "float", "list", "scalar", "elsewhere"],
)
def test_marks_of_another_shape_or_type_are_refused(padding):
    """Transposed marks would flatten in another order; marks of one element would leave every token out."""
    with pytest.raises(
        ValueError, match=r"padding: got .*, valid is torch.bool \(3, 7\) on cpu, one for each token"
    ):
        tmoe.MoE(D, CFG)(torch.randn(3, 7, D), padding)
    model = tmoe.Transformer(tmoe.presets()["tiny"].model)
    tokens = torch.zeros(3, 7, dtype=torch.int64)
    with pytest.raises(ValueError, match="padding: got "):
        model(tokens, padding_BS=padding)
    for name in ("documents_BS", "targets_BS"):
        with pytest.raises(
            ValueError, match=f"{name[:-3]}: got .*, valid is torch.int64 or torch.int32 .3, 7."
        ):
            model(tokens, **{"targets_BS": tokens} | {name: torch.zeros(7, 3, dtype=torch.int64)})


def test_nan_at_padding_reaches_no_gradient():
    moe = tmoe.MoE(D, replace(CFG, shared_gate=True))
    x = torch.randn(3, 7, D)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 4:] = True
    wants = []
    for filler in (0.0, float("nan")):
        y = moe(x.masked_fill(padding[..., None], filler), padding)
        assert not y[padding].any()
        loss = y[~padding].square().sum() + Balancer(CFG).loss(stack([moe.load]), None)
        wants.append((loss, *torch.autograd.grad(loss, list(moe.parameters()))))
    assert all(torch.equal(a, b) for a, b in zip(*wants, strict=True))


def test_a_layer_under_autocast_computes_in_its_type():
    torch.manual_seed(0)
    moe = tmoe.MoE(D, CFG)
    x = torch.randn(5, 7, D)
    first = nn.Linear(D, D)
    with torch.autocast("cpu", torch.bfloat16):
        y = moe(first(x))  # bf16 from the linear layer, fp32 weights
        same = moe(x)
    assert y.dtype == torch.bfloat16 and same.dtype == torch.float32
    exact = moe(x)
    assert 1e-4 < (same - exact).norm() / exact.norm() < 3e-2
    y.float().square().sum().backward()
    grads = [p.grad for p in (first.weight, moe.experts.down, moe.experts.gate_up)]
    moe.zero_grad(), first.zero_grad()
    moe(first(x)).square().sum().backward()
    for got, p in zip(grads, (first.weight, moe.experts.down, moe.experts.gate_up), strict=True):
        assert got.dtype == torch.float32 and (got - p.grad).norm() < 5e-2 * p.grad.norm()


def frozen(rank: int, world: int, ep: int) -> list[str]:
    model = tmoe.Transformer(tmoe.presets()["tiny"].model)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    model.blocks[0].moe.experts.down.requires_grad_(True)
    tmoe.parallel.parallelize(model, tmoe.parallel.build_mesh(ep=ep))
    tokens = torch.arange(32).view(2, 16) % 200
    model(tokens, tokens.roll(-1, 1)).backward()
    free = [name for name, p in model.named_parameters() if p.requires_grad]
    assert free == [name for name, p in model.named_parameters() if p.grad is not None]
    return free


@pytest.mark.parametrize(("world", "ep"), [(1, 1), (2, 1), (2, 2)])
def test_what_is_frozen_stays_frozen(gloo, world, ep):
    for free in gloo(world, frozen, ep):
        assert free == ["blocks.0.moe.experts.down", "head.weight"]


def refrozen(rank: int, world: int, ep: int, dtype: str) -> list[bool]:
    """Which weights the second step moved, when experts were unfrozen or frozen after the first."""
    cfg = tmoe.Config(compile=False, train=tmoe.config.TrainConfig(dtype=dtype))
    moved = []
    for wanted in (True, False):
        model = Theirs()
        experts = model.layers[0].experts.requires_grad_(not wanted)
        tmoe.parallel.parallelize(model, tmoe.parallel.build_mesh(ep=ep), cfg)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
        x = torch.randn(4, 5, dtype=torch.float32 if dtype == "fp32" else torch.bfloat16)
        for trains in (not wanted, wanted):
            before = experts.down.full_tensor().clone()
            experts.requires_grad_(trains)
            model(x).float().square().sum().backward()
            optimizer.step(), optimizer.zero_grad()
            moved.append(not torch.equal(experts.down.full_tensor(), before))
    return moved


@pytest.mark.parametrize(
    ("world", "ep", "dtype"), [(1, 1, "fp32"), (1, 1, "bf16"), (2, 2, "fp32"), (2, 2, "bf16"), (2, 1, "fp32")]
)
def test_weights_may_be_frozen_and_unfrozen_between_steps(gloo, world, ep, dtype):
    for moved in gloo(world, refrozen, ep, dtype):
        assert moved == [False, True, True, False]


def recomputing(rank: int, world: int, ep: int, dtype: str) -> float:
    cfg = tmoe.Config(compile=False, train=tmoe.config.TrainConfig(dtype=dtype))
    grads = []
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        model = Theirs()
        tmoe.parallel.parallelize(model, tmoe.parallel.build_mesh(ep=ep), cfg)
        if reentrant is not None:
            for part in (model.outputs, *model.layers):
                inner = functools.partial(checkpoint, part.forward, use_reentrant=reentrant)
                part.forward = lambda h, f=inner: f(
                    h
                ).clone()  # Theirs adds in place, which CheckpointFunction refuses
        x = torch.randn(4, 5).to(torch.float32 if dtype == "fp32" else torch.bfloat16)
        model(x).float().square().sum().backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])
    pairs = [(a, b) for other in grads[1:] for a, b in zip(other, grads[0], strict=True)]
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


@pytest.mark.parametrize(
    ("world", "dtype", "apart"), [(1, "fp32", 1e-6), (1, "bf16", 1e-2), (2, "fp32", 1e-6)]
)
def test_somebodys_own_checkpointing_changes_no_gradient(gloo, world, dtype, apart):
    assert max(gloo(world, recomputing, world, dtype)) < apart  # sums in another order


def changed_inside(rank: int, world: int) -> list[str]:
    said = []
    for forward_again in (False, True):
        model = Theirs()
        tmoe.parallel.parallelize(model, tmoe.parallel.build_mesh(ep=world))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(4, 5)
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        if forward_again:
            model(x)
        with pytest.raises(RuntimeError) as error:
            loss.backward()
        said.append(str(error.value))
    return said


def test_weights_written_between_a_forward_and_its_backward_are_refused(gloo):
    """Autograd refuses this itself for plain tensors.

    The second backward would use the new weights where the first forward had the old ones.
    """
    first, second = gloo(1, changed_inside)[0]
    assert all(
        "modified by an inplace operation" in text or "between a forward and its backward" in text
        for text in (first, second)
    )


def refused(rank: int, world: int) -> list[str]:
    said = []
    mesh = tmoe.parallel.build_mesh(ep=world)
    uneven = nn.Sequential(tmoe.MoE(D, CFG), tmoe.MoE(D, replace(CFG, experts=7)))
    for model in nn.ModuleList([tmoe.MoE(D, CFG)]), uneven:
        with pytest.raises(ValueError) as error:
            tmoe.parallel.parallelize(model, mesh)
        said += [str(error.value), type(model[0].experts.gate_up.data).__name__]
    return said


def lay_out_shared(rank: int, world: int, shared: str) -> None:
    mesh = tmoe.parallel.build_mesh(ep=world)
    first = tmoe.MoE(D, CFG)
    second = tmoe.MoE(D, CFG)
    if shared == "weight":
        second.experts.down = first.experts.down
    elif shared == "module":
        second.experts = first.experts
    model = nn.Sequential(first, nn.Identity(), first if shared == "layer" else second, nn.Linear(D, D))
    x = torch.randn(5, D)
    count = len(list(model.parameters()))
    with torch.no_grad():
        before = model(x)
    if shared != "layer":
        says = (
            r"parallelize: 2.experts.\w+: got the parameter of 0.experts.\w+, "
            r"valid is a parameter of this layer alone"
        )
        with pytest.raises(ValueError, match=says):
            tmoe.parallel.parallelize(model, mesh)
        assert type(first.experts.down.data) is torch.Tensor
        return
    tmoe.parallel.parallelize(model, mesh)
    torch.testing.assert_close(model(x).detach(), before)
    assert len(list(model.parameters())) == count


@pytest.mark.parametrize("shared", ["weight", "module", "layer"])
def test_experts_of_two_layers_are_refused_and_a_layer_called_twice_is_not(gloo, shared):
    """Spread one by one, parameters that two layers share would be trained as two, in silence."""
    gloo(2, lay_out_shared, shared)


def no_parts(rank: int, world: int) -> None:
    model = tmoe.MoE(D, CFG)
    mesh = tmoe.parallel.build_mesh()
    for args, says in (
        ((None, mesh), "model: got None, valid is a Module"),
        ((model, mesh.world), "mesh: got DeviceMesh.*, valid is a Mesh"),
        ((model, mesh, CFG), "cfg: got MoEConfig.*, valid is a Config"),
    ):
        with pytest.raises(ValueError, match=f"parallelize: {says}"):
            tmoe.parallel.parallelize(*args)


def test_what_is_no_model_mesh_or_config_is_named(gloo):
    gloo(1, no_parts)


def test_what_cannot_be_laid_out_is_refused_before_anything_changes(gloo):
    for container, kind, uneven, same in gloo(2, refused):
        assert container == "parallelize: a ModuleList has no forward; give the module that calls its parts"
        assert uneven == "--parallel.ep=2: must divide --model.moe.experts=7" and kind == same == "Tensor"


def test_a_choice_bias_is_fp32_whatever_the_default_type():
    cfg = tmoe.MoEConfig(experts=4, top_k=2, ffn_dim=8, choice_bias=True)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        router = tmoe.MoE(16, cfg).router
    finally:
        torch.set_default_dtype(before)
    for _ in range(1000):
        router.update_bias(torch.tensor([0, 9, 9, 9]))
    torch.testing.assert_close(router.choice_bias, torch.tensor([1.0, -1.0, -1.0, -1.0]), rtol=0, atol=1e-3)
    router.update_bias(torch.tensor([0.5, 1.5, 1.0, 1.0]))  # means over ranks, say
    torch.testing.assert_close(
        router.choice_bias, torch.tensor([1.001, -1.001, -1.0, -1.0]), rtol=0, atol=1e-3 / 4
    )
    with pytest.raises(ValueError, match=r"counts: got \[1, 2\], valid is a tensor"):
        router.update_bias([1, 2])
    with pytest.raises(ValueError, match=r"counts: got \(1,\), valid is \[E=4\]"):
        router.update_bias(torch.ones(1))
    with pytest.raises(ValueError, match="choice_bias: got False, valid is True"):
        tmoe.MoE(16, tmoe.MoEConfig(experts=4, top_k=2, ffn_dim=8)).router.update_bias(torch.ones(4))


def test_experts_that_are_not_whole_or_no_parameters_are_refused(gloo):
    moe = tmoe.MoE(D, CFG)
    half = CFG.experts // 2
    for name in ("gate_up", "down"):  # as sharding by hand leaves them
        setattr(moe.experts, name, nn.Parameter(getattr(moe.experts, name).detach()[:half]))
    with pytest.raises(
        ValueError,
        match=f"experts: got {half} of them on this rank, valid is all {CFG.experts}, or experts sharded",
    ):
        moe(torch.randn(3, D))
    for said in gloo(2, parametrized):
        assert (
            "parallelize: 0.experts: got parameters down, valid is gate_up and down (parametrize later)"
            in said
        )


def parametrized(rank: int, world: int) -> str:
    model = nn.Sequential(tmoe.MoE(D, CFG))
    nn.utils.parametrize.register_parametrization(model[0].experts, "gate_up", nn.Identity())
    with pytest.raises(ValueError) as error:
        tmoe.parallel.parallelize(model, tmoe.parallel.build_mesh(ep=world))
    return str(error.value)


def test_blocks_that_are_compiled_already_are_refused(gloo):
    assert (
        "parallelize: blocks.0: got a OptimizedModule, valid is a Block; parallelize comes before"
        in gloo(1, compiled)[0]
    )


def compiled(rank: int, world: int) -> str:
    model = small_transformer()
    model.blocks[0] = torch.compile(model.blocks[0])
    with pytest.raises(ValueError) as error:
        tmoe.parallel.parallelize(model, tmoe.parallel.build_mesh())
    return str(error.value)


def small_transformer(**router) -> tmoe.Transformer:
    moe = replace(CFG, shared_dim=0, **router)
    return tmoe.Transformer(
        tmoe.ModelConfig(vocab=32, dim=D, layers=1, heads=2, kv_heads=1, head_dim=8, moe=moe)
    )


def under_another_wrapper(rank: int, world: int) -> list[str]:
    """DDP, for example: the router is steered by all ranks' counts, or not at all."""
    torch.manual_seed(0)
    said = []
    tokens = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(rank))
    for router in (dict(choice_bias=True), dict(balance="global")):
        model = small_transformer(**router)
        step = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(RuntimeError) as error:
            step(tokens[:, :-1], tokens[:, 1:]).backward()
            model.update_bias()
        said.append(str(error.value))
        model.balancer.all_reduce = lambda t: functools.reduce(torch.add, gathered(t.detach(), world))
        step(tokens[:, :-1], tokens[:, 1:]).backward()
        model.update_bias()
        if model.cfg.moe.choice_bias:
            bias = model.blocks[0].moe.router.choice_bias
            said.append(bool(bias.any()) and all(torch.equal(bias, b) for b in gathered(bias, world)))
    return said


def gathered(t: torch.Tensor, world: int) -> list[torch.Tensor]:
    parts = [torch.empty_like(t) for _ in range(world)]
    dist.all_gather(parts, t.contiguous())
    return parts


def test_routers_under_another_wrapper_ask_how_ranks_add_up(gloo):
    for first, equal, second in gloo(2, under_another_wrapper):
        assert (
            first == second
            and first.startswith("balancer.all_reduce: not set in a world of 2 ranks")
            and equal
        )
