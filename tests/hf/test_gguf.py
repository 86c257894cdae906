"""GGUF files: llama.cpp's logits, types of tensors, sizes, what is refused, and the way back.

Logits and types are stored, as tests/lib/gguf_tiny.py says; no test needs llama.cpp.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")

import gguf_tiny as tiny
import hf_tiny
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf_graph import Graph
from gguf_words import byte_level
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tmoe.checkpoint.manifest import read_manifest
from tmoe.checkpoint.rewrite import read_whole
from tmoe.config.check import ConfigError
from tmoe.config.compare import differences
from tmoe.config.presets import moe_pilot_14b, presets
from tmoe.extras.gguf.encode import decode, encode
from tmoe.extras.gguf.families import Family, family_of, group_of, read_model, require_same_function
from tmoe.extras.gguf.keys import write_keys
from tmoe.extras.gguf.names import entries
from tmoe.extras.gguf.rows import Heads, turned
from tmoe.extras.gguf.types import MIXES, facts_of, kind_of, padded, size_of
from tmoe.extras.gguf.write import PART
from tmoe.hf.architectures import ARCHITECTURES
from tmoe.hf.command_line import main
from tmoe.hf.config import architecture, read_config, write_config
from tmoe.model.shapes import model_shapes

HERE = Path(__file__).parent
LOGITS = HERE / "gguf_logits.npz"
TYPES = HERE / "gguf_types.json"


def run(*words: object) -> None:
    command = "tmoe.extras.gguf.command"
    main(
        [str(word) for word in words],
        **{"import": f"{command}.import_model"},
        gguf=f"{command}.export_gguf",
    )


def weights_of(step: Path) -> dict[str, torch.Tensor]:
    tensors = read_manifest(step).tensors
    return {name: read_whole(step, entry) for name, entry in tensors.items() if name.startswith("model.")}


def tensors_in(file: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in GGUFReader(file).tensors}


# ---- llama.cpp's function ----

# An import gives these other weights of the same function: rotated rows in the other order, an untied head.
# Decays, and norms of 1 + weight, are stored as other numbers, which round.
REORDERED = ("deepseek2, sigmoid, groups", "qwen2moe")


@pytest.mark.parametrize("name", tiny.MODELS)
def test_logits_and_tokens_are_those_of_llama_cpp(tmp_path, name):
    """llama.cpp's logits of the fp32 file, to 1e-4, and its 32 greedy tokens; an import has its bits."""
    stored = np.load(LOGITS)
    step = tiny.step_of(tmp_path / "run", tiny.MODELS[name])
    run("gguf", step, tmp_path / "x.gguf", "--type", "f32")
    run("import", tmp_path / "x.gguf", tmp_path / "back")
    run("gguf", tmp_path / "back", tmp_path / "y.gguf", "--type", "f32")
    file, again = (tensors_in(tmp_path / f"{name}.gguf") for name in "xy")
    assert {*file} == {*again} and all(np.array_equal(again[name].data, t.data) for name, t in file.items())
    before, after = weights_of(step), weights_of(tmp_path / "back")
    for near in [n for n in before if n.endswith("A_log") or tiny.MODELS[name].norm_offset]:
        torch.testing.assert_close(after.pop(near), before.pop(near), rtol=0, atol=1e-6)
    if name not in REORDERED:
        hf_tiny.assert_bits(after, before)
    model = hf_tiny.load_step(tmp_path / "back")
    made = stored[f"{name}/tokens"].tolist()
    with torch.no_grad():
        logits = model(torch.tensor([[*tiny.PROMPT, *made]]))[0]
    at = len(tiny.PROMPT)
    assert np.abs(logits[:at].numpy()[tiny.ROWS] - stored[f"{name}/logits"]).max() < 1e-4
    assert logits[at - 1 : -1].argmax(-1).tolist() == made and len(made) == tiny.NEW


# ---- linear layers: the values that llama.cpp's converter writes ----

HYBRID = tiny.HYBRID


def test_linear_layers_have_the_converters_values(tmp_path):
    """From the exported folder; the import computes the same, and its file has the same bits."""
    step = tiny.step_of(tmp_path / "run", HYBRID)
    run("gguf", step, tmp_path / "x.gguf", "--type", "f32")
    run("import", tmp_path / "x.gguf", tmp_path / "back")
    run("export", step, tmp_path / "hf")
    theirs = load_file(tmp_path / "hf/model.safetensors")
    file = {name: torch.from_numpy(t.data.copy()) for name, t in tensors_in(tmp_path / "x.gguf").items()}
    layer, block = "model.layers.0.linear_attn.", "blk.0."
    by_head = theirs[layer + "in_proj_qkvz.weight"].view(2, 2 * 8 + 2 * 24, 32).split([8, 8, 24, 24], 1)
    q, k, v, z = (part.reshape(-1, 32) for part in by_head)
    want = {
        block + "attn_qkv.weight": torch.cat([q, k, v]),
        block + "attn_gate.weight": z,
        block + "ssm_ba.weight": theirs[layer + "in_proj_ba.weight"],
        block + "ssm_conv1d.weight": theirs[layer + "conv1d.weight"][:, 0],
        block + "ssm_a": -theirs[layer + "A_log"].exp(),
        block + "ssm_dt.bias": theirs[layer + "dt_bias"],
        block + "ssm_norm.weight": theirs[layer + "norm.weight"],
        block + "ssm_out.weight": theirs[layer + "out_proj.weight"],
        "blk.3.attn_q.weight": theirs["model.layers.3.self_attn.q_proj.weight"],
        "blk.3.attn_v.weight": theirs["model.layers.3.self_attn.v_proj.weight"],
        "blk.3.attn_q_norm.weight": theirs["model.layers.3.self_attn.q_norm.weight"] + 1,
        "blk.3.post_attention_norm.weight": theirs["model.layers.3.post_attention_layernorm.weight"] + 1,
        "output_norm.weight": theirs["model.norm.weight"] + 1,
    }
    hf_tiny.assert_bits({name: file[name] for name in want}, want)
    fields = GGUFReader(tmp_path / "x.gguf").fields
    said = {name: fields[f"qwen3next.{name}"].contents() for name in ("ssm.inner_size", "ssm.time_step_rank")}
    assert said == {"ssm.inner_size": 48, "ssm.time_step_rank": 6}
    assert fields["qwen3next.full_attention_interval"].contents() == 4
    ids = torch.tensor([tiny.PROMPT])
    with torch.no_grad():
        logits, again = (hf_tiny.load_step(one)(ids) for one in (step, tmp_path / "back"))
    assert hf_tiny.far(again, logits) < 1e-6


def test_value_heads_of_qwen35moe_are_tiled():
    """Heads that share a key are apart: all first heads, then all second, then all third."""
    arch = next(one for one in ARCHITECTURES if one.model_type == "qwen3_5_moe_text")
    family = family_of(arch.model_type)
    assert not require_same_function(family, HYBRID)
    shapes = model_shapes(HYBRID)
    found, missing = entries(family, arch, HYBRID)
    parts = {entry.name: entry for entry in found}
    assert not missing and parts["blk.0.ssm_alpha.weight"].shape == (6, 32)
    ours = torch.arange(32 * 48).view(32, 48)
    apart = ours.view(32, 2, 3, 8).transpose(1, 2).reshape(32, 48)
    assert torch.equal(parts["blk.0.ssm_out.weight"].to_file(ours), apart)
    heads = torch.arange(6.0)
    assert parts["blk.0.ssm_dt.bias"].to_file(heads).tolist() == [0, 3, 1, 4, 2, 5]
    whole = torch.zeros(6)
    parts["blk.0.ssm_a"].to_ours(parts["blk.0.ssm_a"].to_file(heads), whole)
    torch.testing.assert_close(whole, heads)
    rows = torch.arange(shapes["blocks.0.attention.qkvz.weight"][0])[:, None]
    mixed = parts["blk.0.attn_qkv.weight"].to_file(rows[:80])[:, 0]
    assert mixed[:32].tolist() == [*range(32)] and mixed[32:].view(6, 8)[:, 0].tolist() == [
        32 + 8 * n for n in (0, 3, 1, 4, 2, 5)
    ]
    keys = write_keys(family.keys, HYBRID)
    assert keys["rope.dimension_sections"] == ("array", [1, 1, 0, 0])


def test_qwen35moe_is_the_model_by_llama_cpps_graph(tmp_path):
    """A file of three value heads a key, computed in plain loops, has the logits of transformers' model."""
    config = hf_tiny.MODELS["qwen3_5_moe_text"]()
    config.linear_num_value_heads, config.linear_value_head_dim = 6, config.linear_key_head_dim
    torch.manual_seed(7)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(0.0, 0.3)
    theirs.save_pretrained(tmp_path / "hf")
    run("import", tmp_path / "hf", tmp_path / "step")
    run("gguf", tmp_path / "step", tmp_path / "x.gguf", "--type", "f32")
    ids = [i * 7 % 31 for i in range(24)]
    with torch.no_grad():
        want = theirs.double()(torch.tensor([ids]), use_cache=False).logits[0]
    assert hf_tiny.far(Graph(tmp_path / "x.gguf").logits(ids), want) < 2e-5


@pytest.mark.parametrize("name", ["granitehybrid", "nemotron_h_moe"])
def test_mamba2_has_the_converters_values(tmp_path, name):
    """Rows are those of the exported folder; -exp(A_log) and D are columns, the norm has a row a group."""
    step = tiny.step_of(tmp_path / "run", tiny.MODELS[name])
    run("gguf", step, tmp_path / "x.gguf", "--type", "f32")
    run("export", step, tmp_path / "hf")
    theirs = load_file(tmp_path / "hf/model.safetensors")
    file = {name: torch.from_numpy(t.data.copy()) for name, t in tensors_in(tmp_path / "x.gguf").items()}
    layer = "model.layers.0.mamba." if name == "granitehybrid" else "backbone.layers.0.mixer."
    want = {
        "ssm_in.weight": theirs[layer + "in_proj.weight"],
        "ssm_conv1d.weight": theirs[layer + "conv1d.weight"][:, 0],
        "ssm_conv1d.bias": theirs[layer + "conv1d.bias"],
        "ssm_a": -theirs[layer + "A_log"].exp()[:, None],
        "ssm_dt.bias": theirs[layer + "dt_bias"],
        "ssm_d": theirs[layer + "D"][:, None],
        "ssm_norm.weight": theirs[layer + "norm.weight"].view(2, -1),
        "ssm_out.weight": theirs[layer + "out_proj.weight"],
    }
    hf_tiny.assert_bits({name: file["blk.0." + name] for name in want}, want)


SSM = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 128,
    "attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
}
SSM |= {"rope.freq_base": 10000.0, "rope.scaling.finetuned": False, "context_length": 2**20}


def test_the_converters_keys_are_the_presets():
    """convert_hf_to_gguf.py's keys of Granite-4.0-H-Small and Nemotron-3-Nano, with its length of 2^20."""
    small = SSM | dict(block_count=40, embedding_length=4096, feed_forward_length=768, expert_count=72)
    small |= {"attention.head_count": 32, "attention.head_count_kv": [8 * (i % 10 == 5) for i in range(40)]}
    small |= dict(expert_used_count=10, expert_shared_feed_forward_length=1536, embedding_scale=12.0)
    small |= {"ssm.group_count": 1, "ssm.inner_size": 8192, "ssm.time_step_rank": 128, "logit_scale": 16.0}
    small |= {"attention.scale": 0.0078125, "residual_scale": 0.22, "rope.dimension_count": 128}
    nano = SSM | dict(block_count=52, embedding_length=2688, expert_count=128, expert_used_count=6)
    kinds = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    nano |= {"attention.head_count": 32, "attention.head_count_kv": [2 * (kind == "*") for kind in kinds]}
    nano |= {"feed_forward_length": [1856 * (kind == "E") for kind in kinds], "expert_shared_count": 1}
    nano |= {"expert_feed_forward_length": 1856, "expert_shared_feed_forward_length": 3712}
    nano |= {"attention.key_length": 128, "attention.value_length": 128, "rope.dimension_count": 84}
    nano |= {"ssm.group_count": 8, "ssm.inner_size": 4096, "ssm.time_step_rank": 64, "expert_group_count": 1}
    nano |= {"attention.layer_norm_epsilon": 1e-5, "expert_weights_norm": True, "expert_weights_scale": 2.5}
    for arch, values, preset in (
        ("granitehybrid", small, "granite-4.0-h-small"),
        ("nemotron_h_moe", nano, "nemotron-3-nano-30b-a3b"),
    ):
        want = presets()[preset].model
        shapes = {"token_embd.weight": (want.vocab, want.dim)} | (
            {} if want.tied else {"output.weight": (1,)}
        )
        _, cfg = read_model(arch, values, shapes)
        want = tiny.replace(want, linear=tiny.replace(want.linear, least_step=0.0))
        assert differences(cfg, want) == [] and cfg.rope.max_seq == 2**20
        with pytest.raises(ConfigError, match=r"head_count_kv=.*: must be 0 or one number for each of"):
            read_model(arch, values | {"attention.head_count_kv": [1, 2] * 20}, shapes)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("granitehybrid", dict(layer_types=("full",)), r"model.layer_types=\('full',\): needs linear blocks"),
        ("granitehybrid", dict(linear=tiny.replace(tiny.MAMBA, conv_bias=False)), "linear.conv_bias=False"),
        ("nemotron_h_moe", dict(layer_types=("linear", "moe", "dense")), "block 2 has a dense feed-forward"),
        (
            "nemotron_h_moe",
            dict(moe=tiny.replace(tiny.RELU, shared_dim=0)),
            "moe.shared_dim=0: must be above",
        ),
        ("nemotron_h_moe", dict(moe=tiny.replace(tiny.RELU, choice_bias=False)), "moe.choice_bias=False"),
        (
            "nemotron_h_moe",
            dict(linear=tiny.replace(tiny.MAMBA, least_step=0.001)),
            "least_step=0.001: .*computes 0.0.*--allow linear.least_step writes",
        ),
    ],
)
def test_other_mamba2_models_are_refused_by_name(name, change, said):
    family = dict(granitehybrid="granitemoehybrid", nemotron_h_moe="nemotron_h")[name]
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        require_same_function(family_of(family), tiny.replace(tiny.MODELS[name], **change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(layer_types=("full", "linear")), "model.linear"),
        (dict(dense_layers=1), "model.MoE layers="),
        (dict(linear=tiny.replace(HYBRID.linear, value_dim=6)), "model.linear.value_dim=6: must be key_dim"),
    ],
)
def test_other_hybrids_are_refused_by_name(change, said):
    with pytest.raises(ConfigError, match=said):
        require_same_function(family_of("qwen3_next"), tiny.replace(HYBRID, **change))


# ---- types and sizes ----


@cache
def shapes_of(cfg) -> tuple[Family, dict[str, tuple[int, ...]]]:
    arch = architecture(write_config(cfg, "float32"))
    family = family_of(arch.model_type)
    return family, {entry.name: entry.shape for entry in entries(family, arch, cfg)[0]}


def kinds_of(cfg, mix: str) -> dict[str, str]:
    family, shapes = shapes_of(cfg)
    group = group_of(family, cfg)
    experts = cfg.moe.experts if any(map(cfg.is_moe, range(cfg.layers))) else 0
    facts = facts_of(shapes, cfg.layers, experts, group, family.name)
    return {name: kind_of(name, shape, mix, facts) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", tiny.MIXED)
def test_types_are_those_that_llama_cpp_chooses(name):
    """All tensors, for each mix that llama.cpp's quantiser makes."""
    stored = json.loads(TYPES.read_text())
    said = stored[name]
    assert {*said} == {*MIXES} - {"f32"}
    for mix, letters in said.items():
        kinds = kinds_of(tiny.MIXED[name], mix)
        theirs = [stored["types"][int(number, 36)] for number in letters]
        ours = [kinds[tensor] for tensor in sorted(kinds)]
        wrong = [one for one in zip(sorted(kinds), ours, theirs, strict=True) if one[1] != one[2]]
        assert not wrong, (mix, wrong[:3])


def test_types_of_the_pilot():
    """Its rows of 1408 are 44 blocks of 32, which no K-quant divides; 32 experts get no 8-expert types."""
    cfg = tiny.replace(moe_pilot_14b(), layers=4)
    small = dict(
        q2_k="Q4_0", q3_k_m="Q4_0", q3_k_s="Q4_0", q3_k_l="Q5_1", q4_k_s="Q5_0", q5_k_s="Q5_1", q6_k="Q8_0"
    )
    small |= dict(q4_k_m="Q5_0", q5_k_m="Q5_1", q3_k_m="Q5_0")
    for mix, kind in small.items():
        kinds = kinds_of(cfg, mix)
        assert kinds["blk.1.ffn_down_exps.weight"] == kind, mix
        assert kinds["output.weight"] == "Q6_K" and kinds["blk.0.ffn_gate_inp.weight"] == "F32"
    assert kinds_of(cfg, "q4_k_m")["blk.3.attn_v.weight"] == "Q6_K"
    size = sum(size_of(kind, shapes_of(cfg)[1][name]) for name, kind in kinds_of(cfg, "q8_0").items())
    weights = sum(int(np.prod(shape)) for shape in shapes_of(cfg)[1].values())
    assert abs(size / weights * 8 / 8.5 - 1) < 0.001


BOUNDS = dict(Q2_K=0.0075, Q3_K=0.004, Q4_K=0.002, Q5_K=0.002, Q6_K=0.002, Q8_0=0.002, Q4_0=0.002)
BOUNDS |= dict(Q5_0=0.002, Q5_1=0.002, MXFP4=0.002)  # tests/test-quantize-fns.cpp of llama.cpp
GGML = dict(
    Q2_K=0.2969, Q3_K=0.1507, Q4_K=0.0714, Q5_K=0.0361, Q6_K=0.0177
)  # relative error, its own encoder


@pytest.mark.parametrize("kind", BOUNDS)
def test_errors_of_encoders(kind):
    """llama.cpp's own test within its bound; on normal values at most 1.02 of ggml's encoder."""

    def back(values: torch.Tensor) -> torch.Tensor:
        return decode(encode(values, kind, ""), GGMLQuantizationType[kind])

    values = (0.1 + 2 * torch.cos(torch.arange(4096, dtype=torch.float32))).view(-1, 256)
    assert float((back(values) - values).double().norm()) / 4096 < BOUNDS[kind]
    if kind in GGML:
        normal = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
        assert float((back(normal) - normal).norm() / normal.norm()) < 1.02 * GGML[kind]


@pytest.mark.parametrize("kind", GGML)
def test_blocks_of_zeros_and_of_one_value(kind):
    values = torch.zeros(3, 256)
    values[1] = 0.5
    values[2, 7] = -3.0
    back = decode(encode(values, kind, ""), GGMLQuantizationType[kind])
    assert back.isfinite().all() and not back[0].any()
    assert float((back - values).abs().max()) < 0.1


def test_a_file_has_its_predicted_size(tmp_path, capsys):
    """Keys, table and tensors, each where the header says; the dry run counts the same bytes."""
    step = tiny.step_of(tmp_path / "run", tiny.MODELS["mixtral"])
    for mix in ("q8_0", "q4_k_m", "mxfp4", "bf16"):
        out = tmp_path / f"{mix}.gguf"
        run("gguf", step, out, "--type", mix, "--dry-run")
        assert not out.exists()
        predicted = int(re.findall(r"\((\d+) bytes\)", capsys.readouterr().out)[-1])
        run("gguf", step, out, "--type", mix)
        assert out.stat().st_size == predicted
        reader = GGUFReader(out)
        assert all(t.data_offset % 32 == 0 for t in reader.tensors)
        last = max(reader.tensors, key=lambda t: t.data_offset)
        assert predicted == padded(int(last.data_offset + last.n_bytes))
        assert reader.fields["general.file_type"].contents() == int(MIXES[mix].file_type)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".partial")]


def test_stacks_are_encoded_in_parts(tmp_path, monkeypatch):
    """A stack that is read an expert at a time has the bytes of one that is read whole."""
    step = tiny.step_of(tmp_path / "run", tiny.MODELS["mixtral"])
    run("gguf", step, tmp_path / "whole.gguf", "--type", "q8_0")
    monkeypatch.setattr("tmoe.extras.gguf.write.AT_ONCE", 1)
    run("gguf", step, tmp_path / "parts.gguf", "--type", "q8_0")
    whole, parts = ((tmp_path / f"{name}.gguf").read_bytes() for name in ("whole", "parts"))
    assert whole.replace(b"whole", b"parts") == parts


# ---- the way back ----


@pytest.mark.parametrize("mix", ["f16", "q8_0", "q6_k", "q2_k"])
def test_types_are_read_back(tmp_path, mix):
    """The step has the values that the blocks stand for, and writing it again gives the same blocks."""
    cfg = tiny.replace(tiny.MIXED["granitemoe"], layers=1)
    step = tiny.step_of(tmp_path / "run", cfg)
    run("gguf", step, tmp_path / "x.gguf", "--type", mix)
    run("import", tmp_path / "x.gguf", tmp_path / "back", "--world", "2", "--ep", "2")
    before, after = weights_of(step), weights_of(tmp_path / "back")
    assert {*before} == {*after}
    file = tensors_in(tmp_path / "x.gguf")
    stack = file["blk.0.ffn_up_exps.weight"]
    values = decode(stack.data, stack.tensor_type).view(16, 48, 256)
    assert torch.equal(after["model.blocks.0.moe.experts.gate_up"][:, 48:], values)
    worst = max(float((after[n] - before[n]).norm() / before[n].norm()) for n in before)
    assert worst < dict(f16=0.0005, q8_0=0.02, q6_k=0.03, q2_k=0.4)[mix]
    info = read_manifest(tmp_path / "back").info["gguf"]
    assert info["architecture"] == "granitemoe" and sum(info["types"].values()) == len(file)
    run("gguf", tmp_path / "back", tmp_path / "y.gguf", "--type", mix)
    again = tensors_in(tmp_path / "y.gguf")
    if mix in ("f16", "q8_0"):
        assert all(np.array_equal(again[name].data, t.data) for name, t in file.items())


def test_an_import_of_hugging_face_and_back(tmp_path):
    """Tokenizer, template and ends of a folder go through a file; an export of the import has them."""
    hf_dir = hf_tiny.saved(tmp_path / "hf", "qwen3_moe", torch.float32)
    told = byte_level()
    config = json.loads((hf_dir / "config.json").read_text()) | dict(eos_token_id=0)
    told["model"]["vocab"] = {text: i for text, i in told["model"]["vocab"].items() if i < 31}
    told["model"]["merges"] = []
    (hf_dir / "config.json").write_text(json.dumps(config))
    (hf_dir / "tokenizer.json").write_text(json.dumps(told))
    (hf_dir / "chat_template.jinja").write_text("{{ messages[0].content }}")
    run("import", hf_dir, tmp_path / "step")
    run("gguf", tmp_path / "step", tmp_path / "x.gguf", "--type", "f32")
    fields = GGUFReader(tmp_path / "x.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == "qwen2"
    assert fields["tokenizer.chat_template"].contents() == "{{ messages[0].content }}"
    run("import", tmp_path / "x.gguf", tmp_path / "back")
    run("export", tmp_path / "back", tmp_path / "out")
    hf_tiny.assert_bits(hf_tiny.tensors_of(tmp_path / "out"), hf_tiny.tensors_of(hf_dir))
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["vocab"]
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 2


def test_rows_in_pairs_and_back():
    rows = torch.arange(2 * 10).view(20, 1).expand(20, 3)
    heads = Heads(2, 2, 6, 2, True)
    pairs = turned(rows, heads)
    assert pairs[:10, 0].tolist() == [0, 1, 2, 5, 3, 6, 4, 7, 8, 9]
    assert torch.equal(turned(pairs, heads.back()), rows)


def test_keys_are_snapped_to_what_was_meant():
    """fp32's 1e-06 is 1e-06 again, and no key is dropped in silence."""
    family, shapes = shapes_of(tiny.MODELS["mixtral"])
    arch = family.name
    values = dict(block_count=3, context_length=256, embedding_length=32, feed_forward_length=24)
    values |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8}
    values |= {"attention.layer_norm_rms_epsilon": float(np.float32(1e-5)), "rope.freq_base": 10000.0}
    values |= dict(expert_count=4, expert_used_count=2)
    assert read_model(arch, values, shapes)[1].norm_eps == 1e-5
    with pytest.raises(ConfigError, match=r"attention.sliding_window=9: not read"):
        read_model(arch, values | {"attention.sliding_window": 9}, shapes)
    with pytest.raises(ConfigError, match="embedding_length: missing"):
        read_model(arch, {k: v for k, v in values.items() if k != "embedding_length"}, shapes)
    with pytest.raises(ConfigError, match="'mamba': there are llama"):
        read_model("mamba", values, shapes)


# ---- what is refused ----

REFUSED = {
    "qwen3_moe, every second": ("MoE layers=[1, 3]", "model.moe.renormalize=False"),
    "qwen3_moe, window, biases": ("model.o_bias=True", "model.windows=[5, 5]"),
    "olmoe": ("model.kv_heads=2",),
    "olmoe, renormalised, all heads": ("model.moe.renormalize=True",),
    "qwen2_moe, windows, wide heads": ("model.head_dim=6",),
    "mixtral, window": ("model.windows=[6, 6]", "--allow windows"),
    "gpt_oss": ("model.rope.truncate=False", "--allow rope.truncate"),
    "gpt_oss, one key head, other windows, no attention bias": (
        "model.windows=[0, 0, 3]",
        "model.qkv_bias=False",
    ),
    "deepseek_v2": ("model.moe.group_score='max'",),
    "deepseek_v3, halves, no query latent, mscale, weights as they are": ("model.mla.q_rank=0",),
    "deepseek_v3, one group, all blocks sparse, one mscale": ("YaRN's factor",),
    "flex_olmo": ("no GGUF is written of it",),
    "flint": ("no GGUF is written of it",),
    "axk1": ("no GGUF is written of it",),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_computes_otherwise_is_refused_by_name(name):
    made = hf_tiny.MODELS[name]()
    hf = made.to_dict() | dict(model_type=made.model_type)
    cfg = read_config(hf)
    with pytest.raises(ConfigError) as error:
        require_same_function(family_of(architecture(hf).model_type), cfg)
    for words in REFUSED[name]:
        assert words in str(error.value)


def test_every_preset_is_written():
    """gpt-oss's, whose YaRN is published with truncate false, and Nemotron's, with its limit, by name."""
    by_name = {"gpt-oss-20b": "rope.truncate", "gpt-oss-120b": "rope.truncate"}
    by_name["nemotron-3-nano-30b-a3b"] = "linear.least_step"
    for name, preset in presets().items():
        arch = architecture(write_config(preset.model, "float32"))
        allowed = (by_name[name],) if name in by_name else ()
        lines = require_same_function(family_of(arch.model_type), preset.model, allowed)
        assert len(lines) == len(allowed), name


def test_two_differences_are_allowed_by_name():
    made = hf_tiny.MODELS["gpt_oss"]()
    cfg = read_config(made.to_dict() | dict(model_type=made.model_type))
    (line,) = require_same_function(family_of("gpt_oss"), cfg, ("rope.truncate",))
    assert "rope.truncate=False" in line
    with pytest.raises(ConfigError, match="MoE layers"):
        require_same_function(
            family_of("qwen3_moe"), tiny.replace(tiny.MODELS["qwen3moe"], moe_every=2), ("MoE layers",)
        )


def refusal(capsys, *words: object) -> str:
    with pytest.raises(SystemExit) as end:
        run(*words)
    return f"{end.value} {capsys.readouterr().err}"


def test_the_command_refuses_in_one_line(tmp_path, capsys):
    step = tiny.step_of(tmp_path / "run", tiny.MODELS["llama"])
    assert "ends in .gguf" in refusal(capsys, "gguf", step, tmp_path / "x", "--type", "f16")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    there = refusal(capsys, "gguf", step, tmp_path / "x.gguf", "--type", "f16")
    assert "exists already; name a new file" in there
    assert "no GGUF file, or damaged" in refusal(capsys, "import", tmp_path / "x.gguf", tmp_path / "s")
    assert "no such file" in refusal(capsys, "import", tmp_path / "y.gguf", tmp_path / "s")
    assert "q5_k_m" in refusal(capsys, "gguf", step, tmp_path / "y.gguf", "--type", "q7_k")
    said = refusal(capsys, "gguf", step, tmp_path / "y.gguf", "--type", "f16", "--device", "gpu")
    assert "--device=gpu: valid here: cpu" in said and not (tmp_path / "y.gguf").exists()


def test_an_unfinished_file_is_replaced_and_nobody_elses(tmp_path, capsys):
    step, out = tiny.step_of(tmp_path / "run", tiny.MODELS["llama"]), tmp_path / "x.gguf"
    work = tmp_path / "x.gguf.partial"
    work.write_text("a download")
    assert "x.gguf.partial: is no folder; move it away" in refusal(capsys, "gguf", step, out, "--type", "f16")
    assert work.read_text() == "a download"
    work.unlink()
    work.mkdir()
    (work / "notes").write_text("a life's work")
    assert "x.gguf.partial: holds notes" in refusal(capsys, "gguf", step, out, "--type", "f16")
    (work / "notes").rename(work / PART)
    descriptor = os.open(work, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert "another process is writing it" in refusal(capsys, "gguf", step, out, "--type", "f16")
    os.close(descriptor)
    run("gguf", step, out, "--type", "f16")
    assert not work.exists() and GGUFReader(out).tensors


def test_a_cut_file_and_a_lacking_tensor_are_refused(tmp_path, capsys):
    step = tiny.step_of(tmp_path / "run", tiny.MODELS["llama"])
    run("gguf", step, tmp_path / "new/x.gguf", "--type", "f32")  # in a folder that is made
    raw = (tmp_path / "new/x.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(raw[: len(raw) // 2])
    said = refusal(capsys, "import", tmp_path / "cut.gguf", tmp_path / "s")
    whole = max(t.data_offset + t.n_bytes for t in GGUFReader(tmp_path / "new/x.gguf").tensors)
    assert len(raw) - 32 < whole <= len(raw)  # the last tensor may be padded to 32 bytes
    assert "cut.gguf: no GGUF file, or damaged: truncated" in said
    assert f"{len(raw) // 2} bytes of {whole} that its header states" in said
    (tmp_path / "cut.gguf").write_bytes(raw[:100])
    said = refusal(capsys, "import", tmp_path / "cut.gguf", tmp_path / "s")
    assert "damaged: the file ends at byte 100, but a value of its header at 1" in said
    (tmp_path / "other.gguf").write_bytes(raw.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    said = refusal(capsys, "import", tmp_path / "other.gguf", tmp_path / "s")
    assert "blk.1.ffn_up.weight: missing" in said and "blk.1.ffn_xx.weight: llama has no such tensor" in said


def divided(file: Path, folder: Path) -> list[Path]:
    """The model of a file in parts of 20 tensors, as llama.cpp's tools write them."""
    whole, folder = GGUFReader(file), folder / "parts"
    folder.mkdir()
    arch = whole.fields["general.architecture"].contents()
    writer = GGUFWriter(folder / "x.gguf", arch, split_max_tensors=20)
    for name, field in whole.fields.items():
        if name.startswith(f"{arch}."):
            value = field.contents()
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)
    for tensor in whole.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file(folder / "x.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.iterdir())


def test_a_model_in_parts_is_read_whole(tmp_path, capsys):
    step = tiny.step_of(tmp_path / "run", tiny.MODELS["qwen3moe"])
    run("gguf", step, tmp_path / "x.gguf", "--type", "f32")
    one, two = divided(tmp_path / "x.gguf", tmp_path)
    assert two.name == "x-00002-of-00002.gguf"
    run("import", two, tmp_path / "back")
    hf_tiny.assert_bits(weights_of(tmp_path / "back"), weights_of(step))
    (tmp_path / "y.gguf").write_bytes(one.read_bytes())
    said = refusal(capsys, "import", tmp_path / "y.gguf", tmp_path / "s")
    assert "y.gguf: a part of a model in 2 files; all parts are read if they are named NAME-00001-of" in said
    raw = two.read_bytes()
    two.write_bytes(one.read_bytes())
    said = refusal(capsys, "import", one, tmp_path / "s")
    assert "x-00002-of-00002.gguf: split.no=0, split.count=2; by its name 1 and 2" in said
    two.write_bytes(raw[:-9000])
    assert "x-00002-of-00002.gguf: no GGUF file, or damaged: truncated" in refusal(
        capsys, "import", one, tmp_path / "s"
    )
    two.unlink()
    said = refusal(capsys, "import", one, tmp_path / "s")
    assert "a part of a model in 2 files; missing: x-00002-of-00002.gguf" in said


def test_float16_that_overflows_is_refused(tmp_path, capsys):
    step = tiny.step_of(tmp_path / "run", tiny.MODELS["llama"])
    with pytest.raises(Exception, match="float16 holds 65504: use --type bf16"):
        encode(torch.full((2, 32), 7e4), "F16", "blocks.0.ffn.down.weight")
    assert step.exists()


def test_a_run_on_bytes_gets_the_tokenizer_of_bytes(tmp_path, capsys):
    cfg = tiny.replace(tiny.MODELS["pilot"], vocab=256)
    step = tiny.step_of(tmp_path / "run", cfg, data=dict(tokenizer="bytes", eos=0))
    run("gguf", step, tmp_path / "x.gguf", "--type", "f32")
    fields = GGUFReader(tmp_path / "x.gguf").fields
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 0
    assert len(fields["tokenizer.ggml.tokens"].contents()) == 256
    said = capsys.readouterr().out
    assert "no tokenizer is known" not in said and "the tokenizer of bytes is written" in said
