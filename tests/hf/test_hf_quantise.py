"""Exports with --quantize: names, bits, sizes and errors of the matrices; all else unchanged; read by others.

next: tmoe/hf/quantise.py
"""

import json
import math
import weakref
from pathlib import Path

import hf_tiny
import pytest
import torch
from hf_tiny import assert_bits, far, load_step, make, tensors_of
from safetensors import safe_open
from safetensors.torch import save_file

from tmoe.base.quantised import dequantise, quantise
from tmoe.checkpoint.manifest import CheckpointError
from tmoe.config.check import ConfigError
from tmoe.config.model import ModelConfig, MoEConfig
from tmoe.hf import export, export_hf, import_hf
from tmoe.hf.adapters.commands import import_adapter, merge
from tmoe.hf.quantise import SCHEMES, ignored
from tmoe.model.transformer import Transformer

ERRORS = dict(int8=0.008, int4=0.12, fp8=0.027, mxfp4=0.12)
PRESETS = dict(int8="W8A16", int4="W4A16", fp8="FP8_DYNAMIC", mxfp4="MXFP4A16")
BITS = dict(int8=8 + 16 / 128, int4=4 + 16 / 128, fp8=8 + 16 / 256, mxfp4=4 + 8 / 32)
WIDE = dict(hidden_size=256, intermediate_size=96, vocab_size=40, num_attention_heads=4)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A Qwen3-MoE in bf16 whose matrices have rows of 128 and 256, its dense block's 96; and its step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_tiny, "SIZES", hf_tiny.SIZES | WIDE)
        build = hf_tiny.MODELS["qwen3_moe, leading dense"]
        patch.setitem(hf_tiny.MODELS, "wide", lambda: widened(build()))
        patch.setattr(hf_tiny, "is_there", lambda config: True)
        model = make("wide", torch.bfloat16)
    here = tmp_path_factory.mktemp("quantise")
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0.0, 0.05)
    model.save_pretrained(here / "hf")
    import_hf(here / "hf", here / "step")
    return here, model


def widened(config):
    config.moe_intermediate_size, config.head_dim, config.num_experts = 128, 64, 4
    return config


def is_matrix(name: str) -> bool:
    return name.endswith("_proj.weight")


@pytest.mark.parametrize("kind", SCHEMES)
def test_matrices_are_near_and_everything_else_is_equal(imported, tmp_path, kind, capsys):
    here, _ = imported
    export_hf(here / "step", tmp_path / kind, quantize=kind)
    said = capsys.readouterr().out
    assert f"matrices in {kind}, compressed-tensors' {PRESETS[kind]}" in said
    kept = "model.layers.0.mlp.down_proj.weight" if kind.startswith("int") else None  # rows of 96
    assert ("128 does not divide their rows: model.layers.*.mlp.down_proj.weight (rows of 96)" in said) == (
        kept is not None
    )
    published, files = tensors_of(here / "hf"), tensors_of(tmp_path / kind)
    same = {name for name in published if not is_matrix(name) or name == kept}
    assert_bits({name: files[name] for name in same}, {name: published[name] for name in same})
    bits = sum(8 * t.nbytes for name, t in files.items() if name not in same and not name.endswith("_shape"))
    weights = sum(published[name].numel() for name in published.keys() - same)
    assert bits / weights == pytest.approx(BITS[kind], rel=0.01)

    import_hf(tmp_path / kind, tmp_path / "again")
    export_hf(tmp_path / "again", tmp_path / "back")
    values = tensors_of(tmp_path / "back")
    assert values.keys() == published.keys()
    for name in published.keys() - same:
        assert 0 < far(values[name], published[name]) < ERRORS[kind], name
    config = json.loads((tmp_path / kind / "config.json").read_text())
    settings = config.pop("quantization_config")
    assert config == json.loads((here / "hf" / "config.json").read_text())
    assert settings["quant_method"] == "compressed-tensors" and settings["format"] == SCHEMES[kind].format
    patterns = [r"re:model\.layers\.\d+\.mlp\.gate$", "lm_head", "model.embed_tokens", "model.norm"]
    assert {*patterns, r"re:model\.layers\.\d+\.input_layernorm$"} <= {*settings["ignore"]}


def test_the_stored_numbers_are_those_of_the_formats(imported, tmp_path):
    """int4's and int8's words by hand, from the integers of base/quantised.py for each group of 128."""
    here, _ = imported
    name = "model.layers.1.mlp.experts.2.gate_proj.weight"
    weight = tensors_of(here / "hf")[name].float()
    for kind, bits in (("int4", 4), ("int8", 8)):
        export_hf(here / "step", tmp_path / kind, quantize=kind)
        files = tensors_of(tmp_path / kind)
        words, scale = files[f"{name}_packed"], files[f"{name}_scale"]
        assert files[f"{name}_shape"].tolist() == [128, 256] and words.shape == (128, 256 * bits // 32)
        first = [
            (int(words[5, 0]) >> bits * i & (1 << bits) - 1) - (1 << bits - 1) for i in range(32 // bits)
        ]
        got = torch.tensor(first) * scale[5, 0].float()
        groups = weight.view(128, 2, 128)
        parts = quantise(groups, kind)
        want = dequantise(parts, kind, groups.shape)
        assert torch.equal(got, want[5, 0, : 32 // bits])
        assert (want[5, 0].max() - groups[5, 0].max()).abs() <= scale[5, 0].float() * 0.55


def test_files_have_at_most_the_bytes_of_a_shard_and_the_size_is_predicted(imported, tmp_path, monkeypatch):
    here, _ = imported
    monkeypatch.setattr(export, "SHARD", 300_000)
    predicted = {}
    check = export.check_room
    monkeypatch.setattr(
        export, "check_room", lambda plan, dst: predicted.update(plan.sizes) or check(plan, dst)
    )
    export_hf(here / "step", tmp_path / "none", quantize="int4", dry_run=True)
    assert not (tmp_path / "none").exists()
    export_hf(here / "step", tmp_path / "hf", quantize="int4")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2 and {*index.values()} == {file.name for file in files}
    stored = {}
    for file in files:
        with safe_open(file, "pt") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        assert all(index[name] == file.name for name in tensors)
        assert sum(t.nbytes for t in tensors.values()) <= 300_000
        header = int.from_bytes(file.read_bytes()[:8], "little") + 8
        assert file.stat().st_size == header + sum(predicted[name] for name in tensors)
        stored |= {name: t.nbytes for name, t in tensors.items()}
    assert stored == predicted
    packed = [name for name in index if name.endswith("_packed")]
    assert all(index[name] == index[name.replace("_packed", "_scale")] for name in packed)
    import_hf(tmp_path / "hf", tmp_path / "step")
    with pytest.raises(CheckpointError, match="exists"):
        export_hf(here / "step", tmp_path / "hf", quantize="int4")


def adapted(here: Path, folder: Path) -> Path:
    """A step of adapters on layer 1 of the imported model, of o and of experts' down, with factor 2."""
    drawn, at = torch.Generator().manual_seed(0), "base_model.model.model.layers.1"
    shapes = {"self_attn.o_proj": ((3, 256), (256, 3)), "mlp.experts": ((4 * 3, 128), (256, 3 * 4))}
    tensors = {
        f"{at}.{name}.lora_{x}.weight": torch.randn(shape, generator=drawn) * 0.1
        for name, pair in shapes.items()
        for x, shape in zip("AB", pair, strict=True)
    }
    settings = dict(peft_type="LORA", peft_version="0.19.1", r=3, lora_alpha=6, target_modules=["o_proj"])
    settings |= dict(target_parameters=["experts.down_proj"], task_type="CAUSAL_LM")
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    import_adapter(folder, folder / "step", base=here / "hf")
    return folder / "step"


def test_a_merge_quantises_the_sums_in_fp32(imported, tmp_path, capsys):
    """The numbers are those of an export of the merged model in fp32; the base is bf16."""
    here, _ = imported
    step = adapted(here, tmp_path / "peft")
    merge(step, tmp_path / "int4", quantize="int4")
    assert "matrices in int4, compressed-tensors' W4A16" in capsys.readouterr().out
    merge(step, tmp_path / "whole", dtype="fp32")
    import_hf(tmp_path / "whole", tmp_path / "merged")
    export_hf(tmp_path / "merged", tmp_path / "want", quantize="int4")
    found, want = tensors_of(tmp_path / "int4"), tensors_of(tmp_path / "want")
    same = [name for name in want if name.endswith(("_packed", "_scale", "_shape"))]
    assert len(same) > 3 * 4 * 3
    assert all(torch.equal(found[name].to(want[name].dtype), want[name]) for name in same)
    base, whole = tensors_of(here / "hf"), tensors_of(tmp_path / "whole")
    changed = {name for name in base if not torch.equal(base[name].float(), whole[name])}
    at = "model.layers.1"
    assert changed == {
        f"{at}.self_attn.o_proj.weight", *(f"{at}.mlp.experts.{e}.down_proj.weight" for e in range(4))
    }  # fmt: skip
    with pytest.raises(ConfigError, match="quantize=nf4: no format that is written; valid: int8, int4"):
        merge(step, tmp_path / "nf4", quantize="nf4")
    merge(step, tmp_path / "none", quantize="fp8", dry_run=True)
    assert not (tmp_path / "nf4").exists() and not (tmp_path / "none").exists()


def test_one_matrix_at_a_time_is_in_memory(imported, tmp_path, monkeypatch):
    here, _ = imported
    packed, before = export.Quantised.packed, []

    def watched(self, name, weight, kind):
        assert not any(ref() is not None for ref in before)
        before.append(weakref.ref(weight))
        return packed(self, name, weight, kind)

    monkeypatch.setattr(export.Quantised, "packed", watched)
    export_hf(here / "step", tmp_path / "hf", quantize="fp8")
    assert len(before) == len([name for name in tensors_of(here / "hf") if is_matrix(name)])


def test_experts_stacked_as_transformers_holds_them_are_written_one_by_one(imported, tmp_path):
    here, model = imported
    model.save_pretrained(tmp_path / "held", save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in tensors_of(tmp_path / "held"))
    import_hf(tmp_path / "held", tmp_path / "step")
    export_hf(tmp_path / "step", tmp_path / "hf", quantize="fp8")
    export_hf(here / "step", tmp_path / "want", quantize="fp8")
    assert_bits(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "want"))


def test_a_model_trained_here_is_written_in_bf16(tmp_path):
    moe = MoEConfig(experts=4, top_k=2, ffn_dim=128)
    cfg = ModelConfig(vocab=64, dim=128, layers=1, heads=2, kv_heads=2, head_dim=64, ffn_dim=128, moe=moe)
    step = hf_tiny.train_and_save(tmp_path, cfg, Transformer(cfg))
    export_hf(step, tmp_path / "hf", quantize="int8")
    kinds = {
        name: t.dtype
        for name, t in tensors_of(tmp_path / "hf").items()
        if not name.endswith(("_packed", "_shape"))
    }
    assert {*kinds.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    import_hf(tmp_path / "hf", tmp_path / "again")
    for name, weight in load_step(step).state_dict().items():
        assert far(load_step(tmp_path / "again").state_dict()[name], weight) < ERRORS["int8"], name


def test_what_cannot_be_quantised_is_refused_by_name(imported, tmp_path):
    here, _ = imported
    with pytest.raises(ConfigError, match=r"quantize=nvfp4: transformers 5\.23 loads its experts without"):
        export_hf(here / "step", tmp_path / "hf", quantize="nvfp4")
    with pytest.raises(
        ConfigError, match="quantize=int3: no format that is written; valid: int8, int4, fp8, mxfp4"
    ):
        export_hf(here / "step", tmp_path / "hf", quantize="int3")
    for name in ("gpt_oss", "granitemoe"):
        import_hf(hf_tiny.saved(tmp_path / name, name), tmp_path / f"{name}-step")
        with pytest.raises(ConfigError, match=f"quantize=fp8: a {name} stores all experts of a layer in one"):
            export_hf(tmp_path / f"{name}-step", tmp_path / "hf", quantize="fp8")
    import_hf(hf_tiny.saved(tmp_path / "olmoe", "olmoe"), tmp_path / "olmoe-step")
    says = r"experts.0.gate_proj.weight has rows of 16 values, which must be a multiple of 128; valid: fp8"
    with pytest.raises(ConfigError, match=says):
        export_hf(tmp_path / "olmoe-step", tmp_path / "hf", quantize="int4")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("hf")]


def test_a_weight_without_a_number_is_refused_by_name(tmp_path):
    model = make("olmoe")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 2, 1] = math.nan
    model.save_pretrained(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "step")
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.experts.3.down_proj.weight: holds inf, NaN"):
        export_hf(tmp_path / "step", tmp_path / "fp8", quantize="fp8")
    assert not (tmp_path / "fp8").exists()


def test_patterns_of_ignored_modules_match_no_quantised_module():
    matrices = ["model.layers.1.mlp.down_proj.weight", "model.layers.10.mlp.experts.3.up_proj.weight"]
    others = ["model.layers.0.mlp.down_proj.weight", "model.layers.10.mlp.gate.weight", "lm_head.weight"]
    others += ["visual.blocks.0.fc.weight", "model.visual.blocks.1.fc.weight", "model.norm.weight", "a.bias"]
    assert ignored([*matrices, *others], matrices) == [
        "lm_head",
        "model.layers.0.mlp.down_proj",
        r"re:model\.layers\.\d+\.mlp\.gate$",
        r"re:(.*\.)?visual\..*",
        "model.norm",
    ]


@pytest.mark.parametrize("kind", SCHEMES)
def test_transformers_loads_it(imported, tmp_path, kind):
    """Dequantised while loading and in the first forward, and with the values that tmoe reads."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    here, model = imported
    export_hf(here / "step", tmp_path / "hf", quantize=kind)
    import_hf(tmp_path / "hf", tmp_path / "again")
    export_hf(tmp_path / "again", tmp_path / "values")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "values", dtype=torch.bfloat16)
    for at_once in (True, False):
        theirs, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / "hf",
            dtype=torch.bfloat16,
            quantization_config=CompressedTensorsConfig(dequantize=at_once),
            output_loading_info=True,
        )
        assert not any(info.values()), info
        theirs(torch.arange(20)[None])  # the first forward decompresses
        read = theirs.state_dict()
        for name, weight in model.state_dict().items():
            assert far(read[name], weight) < ERRORS[kind], name
            assert far(read[name], ours.state_dict()[name]) < 0.003, name


FAMILIES = sorted(name for name in hf_tiny.MODELS if "," not in name)
STACKED = ("gpt_oss", "granitemoe", "granitemoehybrid", "granitemoeshared", "granitemoe_swa", "mistral4")
LATENT = dict(q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_loaded_by_transformers_or_refused(tmp_path, monkeypatch, name):
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    for sizes, wider in (
        ("SIZES", WIDE | dict(intermediate_size=128)),
        ("MLA", LATENT | dict(moe_intermediate_size=128)),
        ("TYPED_MLA", LATENT | dict(moe_intermediate_size=128)),
        ("MIMO", dict(head_dim=48, v_head_dim=32, moe_intermediate_size=128)),
        ("NEXT", dict(linear_value_head_dim=32)),
        ("INDEXER", dict(index_head_dim=64)),
        ("GRANITE4", dict(mamba_d_head=128)),
        ("NEMOTRON", WIDE | dict(intermediate_size=128, moe_intermediate_size=128, mamba_head_dim=64)),
        ("NEMOTRON", dict(moe_shared_expert_intermediate_size=128)),
    ):
        for key, value in wider.items():
            monkeypatch.setitem(getattr(hf_tiny, sizes), key, value)
    config = hf_tiny.MODELS[name]()
    for key in ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"):
        if hasattr(config, key):
            setattr(config, key, 128)
    if getattr(config, "head_dim", None) and not hasattr(config, "kv_lora_rank") and "mimo" not in name:
        config.head_dim = 64
    monkeypatch.setitem(hf_tiny.MODELS, name, lambda: config)
    monkeypatch.setattr(hf_tiny, "is_there", lambda config: True)
    model = make(name, torch.bfloat16)
    model.save_pretrained(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "step")
    if name in STACKED:
        with pytest.raises(ConfigError, match=f"quantize=int4: a {name} stores all experts"):
            export_hf(tmp_path / "step", tmp_path / "int4", quantize="int4")
        return
    export_hf(tmp_path / "step", tmp_path / "int4", quantize="int4")
    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "int4", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info.values()), info
    theirs(torch.arange(20)[None])  # the first forward decompresses
    read = theirs.state_dict()
    for key, weight in model.state_dict().items():
        assert far(read[key], weight) < ERRORS["int4"], key
    wide = [key for key, weight in model.state_dict().items() if weight.dim() > 1]
    kept = [key for key in wide if torch.equal(read[key], model.state_dict()[key])]
    kept = [key for key in kept if not key.endswith(("_ba.weight", "_b.weight", "_a.weight"))]  # of decays
    kept = [key for key in kept if ".indexer." not in key]
    assert not any(part in key for key in kept for part in ("_proj", "experts", "shared_mlp.up")), kept
