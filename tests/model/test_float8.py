"""--train.float8: which layers it converts, what they compute, how many products, and what is refused.

next: tmoe/model/float8.py, tmoe/config/float8_settings.py
"""

from dataclasses import replace
from types import SimpleNamespace

import layouts
import pytest
import torch
from held import saved_bytes
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from tmoe.base.private_torch import find
from tmoe.cli.parse import parse
from tmoe.commands.dry_run import dry_run
from tmoe.config.axes import ALONE
from tmoe.config.check import ConfigError
from tmoe.config.float8_settings import shared_in_float8
from tmoe.config.model import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from tmoe.config.run import Config, GrpoConfig, ParallelConfig, TrainConfig
from tmoe.generate.engine import Engine
from tmoe.generate.sampler import Sampling
from tmoe.model import float8
from tmoe.model.transformer import Block, Transformer
from tmoe.parallel import build_mesh, parallelize
from tmoe.plan.block_memory import cast_bytes, layer_bytes
from tmoe.plan.fitting import verdict

pytest.importorskip("torchao")

WIDE = ModelConfig(
    vocab=32,
    dim=512,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=128,
    dense_layers=1,
    ffn_dim=512,
    rope=RopeConfig(max_seq=256),
    moe=MoEConfig(experts=4, top_k=2, ffn_dim=64, shared_dim=512, shared_gate=True),
)
# 4 x (128 + 64) + 64 = 832 rows of queries and the rest; kv_b has 4 x (128 + 128) rows of 512
LATENT = replace(
    WIDE, attention="mla", mla=MLAConfig(q_rank=544, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
)
NARROW = replace(WIDE, ffn_dim=520, moe=replace(WIDE.moe, shared_dim=256))
GROUPED = ["attention.qkv", "attention.o"]


def model_of(cfg: ModelConfig, recipe: str = "rowwise") -> Transformer:
    torch.manual_seed(0)
    model = Transformer(cfg)
    model.init_weights(0)
    float8.apply_float8(model, recipe)
    return model


@pytest.fixture
def products(monkeypatch):
    """Grows by one with every product in float8, eager."""
    found, plain = [], torch._scaled_mm

    def counted(a, b, *rest, **named):
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        found.append((*a.shape, b.shape[1]))
        return plain(a, b, *rest, **named)

    monkeypatch.setattr(torch, "_scaled_mm", counted)
    return found


# ---- which layers ----


MLA = [f"attention.{name}" for name in ("qkv_a", "q_b", "kv_b", "o")]
DENSE, SHARED = (["ffn.gate_up", "ffn.down"], ["moe.shared.gate_up", "moe.shared.down"])


@pytest.mark.parametrize(
    ("cfg", "first", "second", "left"),
    [
        (WIDE, GROUPED + DENSE, GROUPED + SHARED, []),
        (LATENT, MLA + DENSE, MLA + SHARED, []),
        # 520 is no multiple of 16; 256 is narrow, and twice 256 is not
        (NARROW, [*GROUPED, DENSE[0]], [*GROUPED, SHARED[0]], ["0.ffn.down", "1.moe.shared.down"]),
    ],
    ids=["grouped", "latent", "narrow"],
)
def test_dense_and_shared_layers_are_converted(cfg, first, second, left):
    """Head, router, shared gate and experts are not; names and values stay."""
    converted = [*(f"0.{name}" for name in first), *(f"1.{name}" for name in second)]
    model, plain = model_of(cfg), model_of(cfg, "none")
    found = {name for name, module in model.named_modules() if module in float8.float8_layers(model)}
    assert found == {f"blocks.{name}" for name in converted}
    planned = float8.layers_in(cfg)
    assert set(planned.converted) == found and set(planned.left) == {f"blocks.{name}" for name in left}
    ours, theirs = model.state_dict(), plain.state_dict()
    assert [*ours] == [*theirs] and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not float8.float8_layers(plain)
    assert not any(module.plain for _, module in model.named_modules() if hasattr(module, "plain"))
    run = Config(model=cfg, train=TrainConfig(seq=64, float8="rowwise"))
    width = cfg.moe.shared_dim
    assert shared_in_float8("rowwise", 512, width) and not shared_in_float8("none", 512, width)
    assert not shared_in_float8("rowwise", 512, 0) and not shared_in_float8("rowwise", 512, 128)
    line = f"float8 (rowwise): {len(converted)} of {len(converted) + len(left)} dense and shared layers"
    assert float8.describe(run).startswith(line)
    assert ("without 1 ffn.down, 1 moe.shared.down" in float8.describe(run)) == bool(left)


def test_a_layer_that_does_more_stays_as_it_is():
    """An adapter's class and a hook are not lost."""
    model = model_of(WIDE, "none")

    class Adapted(nn.Linear):
        pass

    model.blocks[0].attention.qkv = Adapted(512, 1024, bias=False)
    model.blocks[0].attention.o.register_forward_hook(lambda *_: None)
    float8.apply_float8(model, "rowwise")
    assert type(model.blocks[0].attention.qkv) is Adapted and type(model.blocks[0].attention.o) is nn.Linear
    assert len(float8.float8_layers(model)) == 6


# ---- what they compute ----


def cast(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Rounded to e4m3 (at most 448) with a power of two for each row along `dim`."""
    scale = torch.exp2(torch.floor(torch.log2(448 / x.abs().amax(dim, keepdim=True))))
    return (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale


@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_rounded_rows(bias):
    torch.manual_seed(1)
    block = nn.ModuleDict({"blocks": nn.ModuleDict({"0": nn.ModuleDict({"ffn": nn.ModuleDict()})})})
    block["blocks"]["0"]["ffn"]["down"] = layer = nn.Linear(512, 1024, bias)
    float8.apply_float8(block, "rowwise")
    layer = block["blocks"]["0"]["ffn"]["down"]
    x, dy = torch.randn(48, 512).exp().requires_grad_(), torch.randn(48, 1024)
    y = layer(x)
    dx, dw = torch.autograd.grad(y, [x, layer.weight], dy)
    w, x = layer.weight.detach(), x.detach()
    want_y = cast(x, 1) @ cast(w, 1).T + (layer.bias.detach() if bias else 0)
    for ours, want in ((y, want_y), (dx, cast(dy, 1) @ cast(w, 0)), (dw, cast(dy, 0).T @ cast(x, 0))):
        assert (ours - want).norm() <= 3e-3 * want.norm()  # torchao rounds products to bf16
    assert 0.01 < (y - nn.functional.linear(x, w, layer.bias)).norm() / y.norm() < 0.06


def test_a_row_that_is_not_finite_stays_so():
    model = model_of(WIDE)
    layer, x = model.blocks[0].attention.o, torch.randn(16, 512)
    for value in (float("nan"), float("inf")):
        x[3, 5] = value
        y = layer(x)
        assert not y[3].isfinite().any() and y[:3].isfinite().all() and y[4:].isfinite().all()
    assert not layer(torch.zeros(16, 512)).any()


# ---- how many ----


def test_every_product_of_a_step_and_none_of_an_answer(products):
    """Three products a layer: forward, and two of the backward. Evaluation has one, generation none."""
    model, plain = model_of(WIDE), model_of(WIDE, "none")
    tokens = torch.randint(32, (2, 16))
    loss = model(tokens, tokens.roll(-1, 1))
    assert len(products) == 8
    loss.backward()
    assert len(products) == 24
    plain_loss = plain(tokens, tokens.roll(-1, 1))
    assert len(products) == 24 and 0 < abs(loss - plain_loss) < 0.02 * plain_loss
    with torch.no_grad():
        model(tokens, tokens.roll(-1, 1))
    assert len(products) == 32
    answers = [
        Engine(one).generate([[1, 2, 3], [4] * 20], 1, Sampling(max_tokens=8)) for one in (model, plain)
    ]
    assert len(products) == 32
    for (ours,), (theirs,) in zip(*answers, strict=True):
        assert torch.equal(ours.ids, theirs.ids) and torch.equal(ours.logprobs, theirs.logprobs)
    model(tokens)
    assert len(products) == 40
    with pytest.raises(ConfigError, match="bits: the forward has float8 products"):
        Engine(model, bits=True)


@pytest.mark.parametrize("checkpoint", ["none", "block"])
def test_a_compiled_block_has_them_in_its_graphs(checkpoint):
    """One graph forward, one backward; a block that is recomputed multiplies forward again."""
    torch.compiler.reset()
    block = model_of(WIDE).blocks[1]
    if checkpoint == "block":
        eager = block.compute
        block.compute = lambda *given: torch.utils.checkpoint.checkpoint(eager, *given, use_reentrant=False)
    counts = []

    def count(graph, inputs):
        target = torch.ops.aten._scaled_mm.default
        counts.append(sum(node.target is target for node in graph.graph.nodes))
        return graph

    backend = aot_autograd(fw_compiler=count, bw_compiler=count)
    block.compute = torch.compile(block.compute, fullgraph=True, dynamic=False, backend=backend)
    x = torch.randn(2, 32, 512, requires_grad=True)
    tables = torch.ones(32, 128), torch.zeros(32, 128)
    block(x, *tables, None, None, None)[0].sum().backward()
    # the last product of the forward need not be computed again
    assert counts in ([[4, 8]] if checkpoint == "none" else [[4, 11], [4, 12]])


def curve(rank, world, axes):
    """A training in float8 of a model whose layers are narrow, and the float8 products of this rank."""
    from tmoe.config import float8_settings as rule

    rule.LEAST, counted, plain, config = 16, [], torch._scaled_mm, layouts.config
    layouts.STEPS = 6  # the loss must fall
    torch._scaled_mm = lambda *a, **k: (counted.append(1), plain(*a, **k))[1]

    def changed(*args, **named):
        cfg = config(*args, **named)
        return replace(cfg, train=replace(cfg.train, float8="rowwise"))

    layouts.config = changed
    try:
        micros = 2 if axes.get("pp", 1) > 1 else 1
        return layouts.train(rank, world, axes, "gqa", micros=micros).losses, len(counted)
    finally:
        rule.LEAST, torch._scaled_mm, layouts.config = 512, plain, config


@pytest.mark.slow
def test_layouts_train_the_same_model(gloo):
    """16 layers x 3 products x 6 steps on each rank; a pipeline's stage has half of the layers, twice."""
    alone, counted = gloo(1, curve, dict(dp=1, ep=1))[0]
    assert counted == 16 * 3 * 6 and alone[-1] < 0.98 * alone[0]
    for axes in (dict(dp=2, ep=1), dict(dp=1, ep=2), dict(dp=1, ep=1, pp=2)):
        for losses, count in gloo(2, curve, axes):
            assert count == counted
            # sums of another order are rounded to e4m3 differently
            assert max(abs(a - b) / b for a, b in zip(losses, alone, strict=True)) < 1e-3


# ---- memory ----


def test_a_block_keeps_what_the_dry_run_says():
    torch.compiler.reset()
    cfg = Config(model=WIDE, train=TrainConfig(batch=2, seq=256, float8="rowwise", isolate_documents=False))
    plain = replace(cfg, train=replace(cfg.train, float8="none"))
    block = model_of(WIDE).blocks[0].bfloat16()
    block.compute = torch.compile(
        block.compute, fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition"
    )
    x = torch.randn(2, 256, 512, dtype=torch.bfloat16, requires_grad=True)
    kept = saved_bytes(block, x, WIDE)
    assert layer_bytes(cfg, ALONE, 0) == layer_bytes(plain, ALONE, 0)
    assert kept <= 1.02 * layer_bytes(cfg, ALONE, 0)
    # gate_up is the widest, [1024, 512]: gradient twice, input and weight, a byte each; 512 tokens
    assert cast_bytes(cfg, ALONE, 0) == 512 * (2 * 1024 + 512) + 1024 * 512
    assert cast_bytes(plain, ALONE, 0) == 0


# ---- refusals ----


ODD = TrainConfig(batch=1, seq=40, float8="rowwise")
BITS = dict(task="grpo", grpo=GrpoConfig(rewards=("exact",), bitwise=True), compile=False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(parallel=ParallelConfig(tp=2)), "not with --parallel.tp=2: "),
        (dict(parallel=ParallelConfig(cp=4)), "not with --parallel.cp=4: "),
        (dict(train=ODD), "--train.batch=1 x --train.seq=40 = 40 tokens are no multiple of 16"),
        (BITS, "--grpo.bitwise needs"),
    ],
    ids=["tp", "cp", "tokens", "bits"],
)
def test_settings_that_exclude_it(changes, says):
    base = dict(model=WIDE, train=TrainConfig(batch=1, seq=128, float8="rowwise"))
    with pytest.raises(ConfigError) as refused:
        Config(**base | changes)
    line = refused.value.spelt("flag")
    assert line.startswith(f"--train.float8=rowwise: {says}") and "; valid: " in line


def test_the_package_the_gpu_and_the_model_are_named(monkeypatch, capsys):
    cfg = Config(model=WIDE, train=TrainConfig(seq=64, float8="rowwise"))
    small = replace(cfg, model=replace(WIDE, dim=256, head_dim=64))
    with pytest.raises(ConfigError, match="no dense layer or shared expert of this model has two widths"):
        float8.require_layers(small)
    card = SimpleNamespace(name="NVIDIA A100-SXM4-80GB", major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    a100 = r"float8=rowwise: NVIDIA A100-SXM4-80GB \(sm_80\) has no float8 products; valid: NVIDIA from sm_89"
    with pytest.raises(ConfigError, match=a100):
        float8.require_device(cfg, torch.device("cuda", 0))
    card.major, card.minor = 9, 0
    float8.require_device(cfg, torch.device("cuda", 0))
    float8.require_device(cfg, torch.device("cpu"))
    with pytest.raises(ConfigError, match="--gpu=a100: has no float8 products"):
        float8.require_gpu(replace(cfg, gpu="a100", dry_run=True))
    assert verdict(cfg, ALONE, None)[0].startswith("fits: h100, h200, b200, mi300x, rtx4090;")

    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    words = "tiny --train.float8 rowwise".split()
    with pytest.raises(SystemExit) as ended:
        parse(words, "")
    said = capsys.readouterr().err
    assert ended.value.code == 2 and len(said.splitlines()) == 1
    assert said.startswith("error: --train.float8=rowwise: needs the package torchao")
    assert "pip install 'tmoe[float8]'" in said
    with pytest.raises(ConfigError, match="needs the package torchao"):
        float8.apply_float8(Transformer(WIDE), "rowwise")
    wide = "--model.dim 512 --model.heads 4 --model.head-dim 128 --model.kv-heads 4".split()
    planned = parse([*words, *wide, "--dry-run"], "")
    dry_run(planned)  # a plan does not need it
    assert float8.describe(planned) in capsys.readouterr().out


def refused(rank, world):
    cfg = Config(model=WIDE, train=TrainConfig(seq=64, float8="rowwise"), compile=False)
    mesh = build_mesh(1, 1)
    with pytest.raises(ValueError, match=r"train.float8: got rowwise, valid is none for a Sequential"):
        parallelize(nn.Sequential(nn.Linear(512, 512)), mesh, cfg)


def test_somebodys_own_model_is_refused(gloo):
    gloo(1, refused)


def test_blocks_and_private_names_are_there():
    assert find("torchao.float8.float8_linear.Float8Linear") is not None
    assert isinstance(model_of(WIDE).blocks[0], Block)
