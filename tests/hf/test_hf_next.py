"""Qwen3-Next and Qwen3.5-MoE: what is carried, generation, direct start, tuning, and what is refused."""

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from hf_tiny import (
    MOE,
    NEXT,
    assert_as_near,
    assert_bits,
    exact_gradients,
    far,
    files_of,
    gradients_by_their_names,
    load_step,
    make,
    saved,
    short,
    tensors_of,
)
from linear_families import assert_starts_and_answers
from peft_tiny import TOKENS, logits_of_step
from safetensors.torch import load_file, save_file

from tmoe.config.check import ConfigError
from tmoe.config.presets import presets
from tmoe.hf import export_hf, import_hf, swap_experts
from tmoe.hf.adapters.commands import export_adapter, import_adapter
from tmoe.hf.config import read_config
from tmoe.model.count import count_parameters

VISION = dict(depth=2, hidden_size=8, intermediate_size=12, num_heads=2, out_hidden_size=16, patch_size=2)
VISION |= dict(spatial_merge_size=2, num_position_embeddings=16, deepstack_visual_indexes=[0])
MROPE = dict(rope_type="default", rope_theta=5e4, mrope_section=[1, 1, 0], mrope_interleaved=True)
NAMES = ("qwen3_next", "qwen3_5_moe_text")


def seeing():
    """A tiny Qwen3.5-MoE with its vision part, the same at each call."""
    text = {key: value for key, value in short().items() if not key.endswith("implementation")}
    text |= NEXT | MOE | dict(rope_parameters=MROPE | dict(partial_rotary_factor=0.5))
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=VISION)
    torch.manual_seed(7)
    how = dict(attn_implementation="eager", experts_implementation="eager")
    model = transformers.Qwen3_5MoeForConditionalGeneration._from_config(config, **how)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.3)
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.sub_(3)
    return model.eval()


def with_mtp(folder):
    """Adds tensors of blocks that predict further tokens, which transformers neither makes nor loads."""
    file = folder / "model.safetensors"
    more = {
        "mtp.fc.weight": torch.randn(16, 32),
        "mtp.layers.0.mlp.experts.0.up_proj.weight": torch.randn(10, 16),
    }
    save_file(load_file(file) | more, file, {"format": "pt"})
    return folder


def test_the_text_part_is_trained_and_the_rest_is_carried(tmp_path):
    """Logits and gradients of the text model; vision, mtp and every byte come back."""
    theirs = seeing()
    theirs.save_pretrained(tmp_path / "hf")
    with_mtp(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "step")
    model = load_step(tmp_path / "step")
    torch.manual_seed(3)
    x, targets = torch.randint(31, (2, 2, 40))
    logits = theirs(input_ids=x).logits
    assert far(model(x), logits) < 2e-5
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    model(x, targets).backward()
    hf = json.loads((tmp_path / "hf" / "config.json").read_text())
    got = gradients_by_their_names(model, hf)
    for p in theirs.parameters():
        p.data = torch.zeros_like(p) if p.grad is None else p.grad
    theirs.save_pretrained(tmp_path / "gradients")
    want = {n: g for n, g in tensors_of(tmp_path / "gradients").items() if ".visual." not in n}
    assert got.keys() == want.keys()
    assert_as_near(got, want, exact_gradients(tmp_path / "step", x, targets, tmp_path / "hf"))
    export_hf(tmp_path / "step", tmp_path / "back")
    assert_bits(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "hf"))
    assert files_of(tmp_path / "back") == files_of(tmp_path / "hf")


@pytest.mark.parametrize("name", NAMES)
def test_small_norm_weights_come_back_in_bf16(tmp_path, name):
    """Weights w of norms of 1 + w are kept as w: of 1 + w in bf16 only 2% would come back."""
    model = make(name, torch.bfloat16)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.normal_(0.0, 1e-5)
    model.save_pretrained(tmp_path / "hf")
    with_mtp(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "step")
    export_hf(tmp_path / "step", tmp_path / "back")
    assert_bits(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "hf"))


@pytest.mark.parametrize("name", NAMES)
def test_direct_start_and_greedy_answers(tmp_path, name):
    cfg = assert_starts_and_answers(tmp_path, name, 5e-5).cfg
    assert cfg.linear_layers == 3 and cfg.norm_offset


@pytest.mark.parametrize("name", NAMES)
def test_swapped_experts_are_the_same_model(name):
    x = torch.randint(31, (2, 20))
    want = make(name)(x).logits
    assert far(swap_experts(make(name))(x).logits, want) < 1e-5


def test_presets_by_hand():
    """Qwen3-Next-80B-A3B: 36 linear blocks, 12 of attention, 512 experts of 512; and Qwen3.5-35B-A3B."""
    D, E = 2048, 512
    linear = (2 * 16 * 128 + 2 * 32 * 128) * D + 64 * D + 8192 * 4 + 64 + 128 + 4096 * D
    full = (2 * 16 + 2 * 2) * 256 * D + 16 * 256 * D + 2 * 256
    moe = E * D + E * 3 * 512 * D + 3 * 512 * D + D
    whole = 2 * 151936 * D + D + 36 * linear + 12 * full + 48 * (moe + 2 * D)
    counts = count_parameters(presets()["qwen3-next-80b-a3b"].model)
    assert counts.total == whole and round(whole / 1e9, 1) == 79.7
    assert round(linear / 1e6, 1) == 33.7 and round(full / 1e6, 1) == 27.3
    assert round(counts.active / 1e9, 1) == 3.9
    small = count_parameters(presets()["qwen3.5-35b-a3b"].model)
    assert round(small.total / 1e9, 1) == 34.7


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(hidden_act="gelu"), "hidden_act='gelu': only 'silu'"),
        (dict(layer_types=["sliding_attention"] * 4), "layer_types=.*: linear_attention or full_attention"),
        (dict(layer_types=None, full_attention_interval=0), "full_attention_interval=0: must be at least 1"),
        (dict(linear_num_value_heads=3), "linear_num_value_heads=3: must be a multiple of"),
        (dict(attn_output_gate=False), "attn_output_gate=False: only"),
    ],
)
def test_what_is_not_computed_is_named(change, says):
    config = make("qwen3_next").config.to_dict() | change
    with pytest.raises(ConfigError, match=says):
        read_config(config)


def test_the_interval_is_read_where_no_list_is():
    config = make("qwen3_next").config.to_dict()
    for key in ("layer_types", "full_attention_interval"):
        config.pop(key, None)
    assert [read_config(config).is_linear(i) for i in range(4)] == [True, True, True, False]
    config["full_attention_interval"] = 2
    assert [read_config(config).is_linear(i) for i in range(4)] == [True, False, True, False]


def test_pefts_adapters_of_rows_by_heads(tmp_path):
    """An adapter of every kind of layer, read as W + b a of transformers' matrices, and written again."""
    hf_dir = saved(tmp_path / "hf", "qwen3_next")
    weights = tensors_of(hf_dir)
    targets = (
        "linear_attn.in_proj_qkvz",
        "linear_attn.in_proj_ba",
        "linear_attn.out_proj",
        "q_proj",
        "o_proj",
    )
    torch.manual_seed(5)
    adapter, merged = {}, dict(weights)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.endswith(targets):
            a, b = 0.1 * torch.randn(2, weight.shape[1]), 0.1 * torch.randn(weight.shape[0], 2)
            adapter[f"base_model.model.{module}.lora_A.weight"] = a
            adapter[f"base_model.model.{module}.lora_B.weight"] = b
            merged[name] = weight + 2.0 * b @ a
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(adapter, folder / "adapter_model.safetensors")
    said = dict(peft_type="LORA", r=2, lora_alpha=4, target_modules=[t.split(".")[-1] for t in targets])
    said |= dict(
        bias="none", task_type="CAUSAL_LM", base_model_name_or_path=str(hf_dir), peft_version="0.19.1"
    )
    (folder / "adapter_config.json").write_text(json.dumps(said))
    import_adapter(folder, tmp_path / "step", base=hf_dir)
    theirs = make("qwen3_next")
    theirs.load_state_dict(from_merged(theirs, merged))
    assert far(logits_of_step(tmp_path / "step")[None], theirs(TOKENS).logits) < 2e-5
    export_adapter(tmp_path / "step", tmp_path / "back", layout="peft")
    written = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert adapter.keys() <= written.keys() and not any("conv1d" in name for name in written)
    import_adapter(tmp_path / "back", tmp_path / "again")
    torch.testing.assert_close(logits_of_step(tmp_path / "again"), logits_of_step(tmp_path / "step"))


def from_merged(theirs, merged: dict) -> dict:
    """The state of a transformers model with other values of its dense matrices."""
    state = theirs.state_dict()
    return {name: merged.get(name, value) for name, value in state.items()}
