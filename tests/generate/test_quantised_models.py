"""Models with quantised matrices: they compute what a model of the rounded weights does, from every folder.

next: tests/benchmarks/test_quantised_benchmarks.py
"""

import weakref
from dataclasses import asdict, replace
from unittest.mock import Mock

import pytest
import torch
from hf_tiny import saved
from layouts import BRANCHES, MAMBA2
from tiers import slow_but
from tiny_models import MODEL

import tmoe
from tmoe.base.quantised import dequantise, quantise
from tmoe.checkpoint.checkpoints import Checkpoints
from tmoe.config.model import ModelConfig
from tmoe.data.tokenizer import ByteTokenizer
from tmoe.generate import Engine, Sampling, command_line, load_quantised
from tmoe.generate.load import load
from tmoe.generate.load_quantised import Place
from tmoe.hf.files import Folder
from tmoe.hf.load_weights import load_hf
from tmoe.hf.tensor_plan import plan_folder
from tmoe.model.quantised import make_room, quantised_copy, quantised_to
from tmoe.model.transformer import Transformer
from tmoe.ops.quantised.gpu import KINDS
from tmoe.parallel.mesh import Mesh

HERE = Place(torch.device("cpu"), torch.float32)
# biases and sinks; latent attention, groups and a dense block; a gated shared expert; ...
FAMILIES = ["gpt_oss", "deepseek_v3", "qwen2_moe", "olmoe", "mixtral, window"]
FAMILIES += ["granitemoeshared", "minimax_m2", "ernie4_5_moe"]


def rounded(model: Transformer, kind: str) -> Transformer:
    """A plain model whose quantised matrices have the values of their codes."""
    with torch.device("meta"):
        slots = make_room(Transformer(model.cfg), kind)
    plain = Transformer(model.cfg).eval()
    state = model.state_dict()
    for name in slots:
        state[name] = dequantise(quantise(state[name], kind), kind, tuple(state[name].shape))
    plain.load_state_dict(state)
    return plain


@pytest.fixture(scope="module")
def run_of_bytes(tmp_path_factory):
    """A step folder, and its model."""
    moe = replace(MODEL.moe, top_k=2)
    model = drawn(replace(MODEL, vocab=256, moe=moe, rope=replace(MODEL.rope, max_seq=64)))
    folder = tmp_path_factory.mktemp("run")
    config = dict(model=asdict(model.cfg), train=dict(seq=40), data=dict(tokenizer="bytes"))
    info = dict(config=config, data=dict(tokenizer="bytes"))
    checkpoints = Checkpoints(folder / "checkpoints", keep=0, mode="sync", info=info)
    tensors = {f"model.{n}": t for n, t in model.state_dict().items()}
    checkpoints.save(1, tensors, dict(step=1, tokens=1), {})
    return folder, model


def drawn(cfg: ModelConfig) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(cfg).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.3)
    return model


@torch.no_grad()
def assert_same(model: Transformer, want: Transformer) -> None:
    """Logits of a forward, and an engine's greedy answers and log-probs."""
    tokens = torch.randint(3, 31, (2, 9), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(tokens), want(tokens), rtol=1e-4, atol=1e-4)
    asked = Sampling(temperature=0, max_tokens=6)
    prompts = [row.tolist() for row in tokens] + [[5]]
    for a, b in zip(*(Engine(m, slots=2).generate(prompts, 1, asked) for m in (model, want)), strict=True):
        assert a[0].ids.tolist() == b[0].ids.tolist()
        torch.testing.assert_close(a[0].logprobs, b[0].logprobs, rtol=1e-4, atol=1e-4)


def test_what_is_quantised():
    """The matrices of attention, dense blocks, experts and shared experts, and nothing else."""
    with torch.device("meta"):
        model = Transformer(MODEL)
        every = {name for name, p in model.named_parameters() if p.dim() > 1}
        slots = make_room(model, "int8")
    dense = {f"blocks.{i}.attention.{name}.weight" for i in range(3) for name in ("qkv", "o")}
    dense |= {f"blocks.0.ffn.{name}.weight" for name in ("gate_up", "down")}
    moe = {f"blocks.{i}.moe.experts.{name}" for i in (1, 2) for name in ("gate_up", "down")}
    moe |= {f"blocks.{i}.moe.shared.{name}.weight" for i in (1, 2) for name in ("gate_up", "down")}
    assert set(slots) == dense | moe
    kept = {f"blocks.{i}.moe.{name}.weight" for i in (1, 2) for name in ("router", "shared_gate")}
    assert every - set(slots) == kept | {"embedding.weight", "head.weight"}
    assert {name for name, p in model.named_parameters() if p.dim() > 1} == every - set(slots)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_that_of_its_rounded_weights(kind):
    model = drawn(replace(MODEL, rope=replace(MODEL.rope, max_seq=64)))
    small = quantised_copy(model, kind)
    assert quantised_to(small) == kind and not quantised_to(model)
    assert_same(small, rounded(model, kind))


@pytest.mark.parametrize("moe", [dict(weigh="before"), dict(weigh="after"), dict(latent_dim=16)], ids=str)
def test_weights_before_and_after_experts_and_a_latent_space(moe):
    cfg = replace(MODEL, rope=replace(MODEL.rope, max_seq=64), moe=replace(MODEL.moe, **moe))
    model = drawn(cfg)
    assert_same(quantised_copy(model, "int4"), rounded(model, "int4"))


@pytest.mark.parametrize("kind", ["int4", "nf4"])
@pytest.mark.parametrize("cfg", [MAMBA2, BRANCHES], ids=["mamba2", "branches"])
def test_mamba2_and_blocks_of_one_branch(cfg, kind):
    """Granite-4's and Nemotron-H's blocks; feed-forwards of relu squared without a gate."""
    cfg = replace(cfg, rope=replace(cfg.rope, max_seq=64))
    with torch.device("meta"):
        slots = make_room(Transformer(cfg), kind)
    assert {f"blocks.0.attention.{name}.weight" for name in ("qkvz", "out")} <= set(slots)
    model = drawn(cfg)
    assert_same(quantised_copy(model, kind), rounded(model, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", slow_but(FAMILIES[:2], FAMILIES))
def test_a_hugging_face_folder(family, kind, tmp_path):
    folder = saved(tmp_path / "hf", family)
    cfg = plan_folder(Folder(folder)).cfg
    whole = Transformer(cfg).eval()
    load_hf(folder, whole.state_dict(), cfg)
    assert_same(load_quantised.load_quantised(folder, None, cfg, kind, HERE), rounded(whole, kind))


def test_one_unquantised_tensor_at_a_time(tmp_path, monkeypatch):
    folder = saved(tmp_path / "hf", "olmoe")
    cfg = plan_folder(Folder(folder)).cfg
    read, alive = load_quantised.read_hf, []

    def watched(*args):
        for name, tensor in read(*args):
            assert not any(ref() is not None for ref in alive), name
            alive[:] = [weakref.ref(tensor)]
            yield name, tensor
            del tensor

    monkeypatch.setattr(load_quantised, "read_hf", watched)
    model = load_quantised.load_quantised(folder, None, cfg, "int8", HERE)
    assert len(alive) == 1 and quantised_to(model) == "int8"


def test_the_command_line(run_of_bytes, capsys):
    path, model = run_of_bytes
    words = [str(path), "def f(", "--temperature", "0", "--device", "cpu", "--max-tokens", "12"]
    for kind in KINDS:
        command_line.main([*words, "--min-tokens", "12", "--quantize", kind])
        said = capsys.readouterr()
        engine = Engine(quantised_copy(model, kind), ByteTokenizer())
        ((want,),) = engine.generate(["def f("], 1, Sampling(temperature=0, max_tokens=12, min_tokens=12))
        assert said.out == f"def f({want.text}\n"
        held = sum(t.nbytes for t in quantised_copy(model, kind).state_dict().values()) / 2**20
        assert f"matrices of experts and dense layers in {kind}: {held:.1f} MiB of weights" in said.err
    with pytest.raises(SystemExit) as ended:
        command_line.main([*words, "--quantize", "int3"])
    assert ended.value.code == 2 and "int8" in capsys.readouterr().err


def test_bf16_keeps_scales_and_computes_in_bf16(run_of_bytes):
    path, _ = run_of_bytes
    model = load(path, device="cpu", dtype="bf16", quantize="int4").model
    assert model.head_weight.dtype == torch.bfloat16
    assert model.blocks[0].attention.qkv.weight.dtype == torch.bfloat16
    assert Engine(model).generate([[5, 6]], 1, Sampling(max_tokens=3))[0][0].ids.numel() == 3


def test_refusals():
    model = quantised_copy(drawn(MODEL), "int8")
    with pytest.raises(ValueError, match="bits: steps multiply int8 codes"):
        Engine(model, bits=True)
    with pytest.raises(ValueError, match="parallelize: model: got matrices in int8"):
        tmoe.parallel.parallelize(model, Mock(spec=Mesh))
    with pytest.raises(ValueError, match="quantize=mxfp4: unknown; valid: int8 or int4 or fp8 or nf4"):
        quantised_copy(drawn(MODEL), "mxfp4")
    bad = drawn(MODEL)
    with torch.no_grad():
        bad.blocks[1].moe.experts.down[3, 2, 1] = torch.inf
    with pytest.raises(ValueError, match=r"^blocks\.1\.moe\.experts\.down: holds inf, NaN"):
        quantised_copy(bad, "int4")
