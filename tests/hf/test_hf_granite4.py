"""Granite-4: published spelling, generation, direct start, swap, and what is refused by name."""

import json
from dataclasses import replace

import pytest
import torch
from hf_tiny import assert_bits, far, files_of, make, saved, tensors_of
from linear_families import assert_starts_and_answers
from peft_tiny import TOKENS, logits_of_step
from safetensors.torch import load_file, save_file

from tmoe.config.check import ConfigError
from tmoe.config.compare import differences
from tmoe.config.presets import presets
from tmoe.hf import export_hf, import_hf, swap_experts
from tmoe.hf.adapters.commands import export_adapter, import_adapter
from tmoe.hf.config import read_config, write_config
from tmoe.model.count import count_parameters

NAME = "granitemoehybrid"
OTHER = "granitemoehybrid, rope, groups, no bias of the convolution, limits, tied"


def test_direct_start_and_greedy_answers(tmp_path):
    cfg = assert_starts_and_answers(tmp_path, NAME, 2e-5).cfg
    assert cfg.linear.kind == "mamba2" and cfg.linear_layers == 3


def test_every_byte_comes_back_in_bf16(tmp_path):
    """Rows of in_proj and channels of the convolution are in another order in tmoe."""
    hf_dir = saved(tmp_path / "hf", NAME, torch.bfloat16, files=3)
    import_hf(hf_dir, tmp_path / "step")
    export_hf(tmp_path / "step", tmp_path / "back")
    assert_bits(tensors_of(tmp_path / "back"), tensors_of(hf_dir))
    assert files_of(tmp_path / "back") == files_of(hf_dir)


def test_pefts_adapters_of_rows_in_another_order(tmp_path):
    """An adapter is read as W + b a of transformers' matrices, and its tensors are written again."""
    hf_dir = saved(tmp_path / "hf", NAME)
    targets = ("mamba.in_proj", "mamba.out_proj", "q_proj", "o_proj")
    torch.manual_seed(5)
    theirs, adapter = make(NAME), {}
    state = theirs.state_dict()
    for name, weight in tensors_of(hf_dir).items():
        module = name.removesuffix(".weight")
        if module.endswith(targets):
            a, b = 0.1 * torch.randn(2, weight.shape[1]), 0.1 * torch.randn(weight.shape[0], 2)
            adapter[f"base_model.model.{module}.lora_A.weight"] = a
            adapter[f"base_model.model.{module}.lora_B.weight"] = b
            state[name] = weight + 2.0 * b @ a
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(adapter, folder / "adapter_model.safetensors")
    said = dict(peft_type="LORA", r=2, lora_alpha=4, target_modules=[t.split(".")[-1] for t in targets])
    said |= dict(bias="none", task_type="CAUSAL_LM", base_model_name_or_path=str(hf_dir))
    (folder / "adapter_config.json").write_text(json.dumps(said | dict(peft_version="0.19.1")))
    import_adapter(folder, tmp_path / "step", base=hf_dir)
    theirs.load_state_dict(state)
    assert far(logits_of_step(tmp_path / "step")[None], theirs(TOKENS).logits) < 2e-5
    export_adapter(tmp_path / "step", tmp_path / "back", layout="peft")
    assert adapter.keys() <= load_file(tmp_path / "back" / "adapter_model.safetensors").keys()
    import_adapter(tmp_path / "back", tmp_path / "again")
    torch.testing.assert_close(logits_of_step(tmp_path / "again"), logits_of_step(tmp_path / "step"))


def test_swapped_experts_are_the_same_model():
    x = torch.randint(31, (2, 20))
    want = make(NAME)(x).logits
    assert far(swap_experts(make(NAME))(x).logits, want) < 1e-5


def test_published_spelling():
    """Older words of layer_types, no positions, a missing limit, Infinity as transformers 4 writes it."""
    config = make(NAME).config.to_dict()
    want = read_config(config)
    older = dict(linear_attention="mamba", full_attention="attention")
    config["layer_types"] = [older[kind] for kind in config["layer_types"]]
    for limit in ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}]):
        assert read_config(config | dict(time_step_limit=limit)) == want
    assert read_config(config | dict(time_step_limit=[0.5, 2.0])).linear.most_step == 2.0
    assert read_config(config | dict(position_embedding_type=None)) == want
    del config["mamba_d_head"], config["time_step_limit"]
    assert read_config(config) == want
    config["layers_block_type"] = config.pop("layer_types")
    assert read_config(config) == want


TYPES = ["mamba"] * 5 + ["attention"] + (["mamba"] * 9 + ["attention"]) * 3 + ["mamba"] * 4
TINY = dict(  # what decides the function, of config.json of ibm-granite/granite-4.0-h-tiny
    model_type="granitemoehybrid",
    attention_bias=False,
    attention_multiplier=0.0078125,
    embedding_multiplier=12,
    hidden_act="silu",
    hidden_size=1536,
    initializer_range=0.1,
    intermediate_size=512,
    layer_types=TYPES,
    logits_scaling=6,
    mamba_chunk_size=256,
    mamba_conv_bias=True,
    mamba_d_conv=4,
    mamba_d_head=64,
    mamba_d_state=128,
    mamba_expand=2,
    mamba_n_groups=1,
    mamba_n_heads=48,
    mamba_proj_bias=False,
    max_position_embeddings=131072,
    num_attention_heads=12,
    num_experts_per_tok=6,
    num_hidden_layers=40,
    num_key_value_heads=4,
    num_local_experts=64,
    position_embedding_type="nope",
    residual_multiplier=0.22,
    rms_norm_eps=1e-05,
    rope_theta=10000,
    shared_intermediate_size=1024,
    tie_word_embeddings=True,
    vocab_size=100352,
)
SMALL = TINY | dict(  # of ibm-granite/granite-4.0-h-small
    hidden_size=4096,
    intermediate_size=768,
    logits_scaling=16,
    mamba_n_heads=128,
    num_attention_heads=32,
    num_experts_per_tok=10,
    num_key_value_heads=8,
    num_local_experts=72,
    shared_intermediate_size=1536,
)


@pytest.mark.parametrize(
    ("name", "config", "total"),
    [("granite-4.0-h-tiny", TINY, 6_939_037_248), ("granite-4.0-h-small", SMALL, 32_207_337_984)],
)
def test_published_configs_are_the_presets(name, config, total):
    """36 blocks of Mamba-2 and 4 of attention, each with experts; the parameters by hand."""
    cfg = presets()[name].model
    assert differences(cfg, read_config(config)) == []
    D, H, F = (config[key] for key in ("hidden_size", "mamba_n_heads", "intermediate_size"))
    mixed = 64 * H + 2 * 128
    mamba = (64 * H + mixed + H) * D + 5 * mixed + 3 * H + 64 * H + 64 * H * D
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = (2 * heads[0] + 2 * heads[1]) * 128 * D
    experts = config["num_local_experts"] * (3 * F + 1) * D + 3 * D * config["shared_intermediate_size"]
    assert total == 100352 * D + D + 40 * (2 * D + experts) + 36 * mamba + 4 * attention
    assert count_parameters(cfg).total == total


@pytest.mark.parametrize("name", [NAME, OTHER, "granitemoehybrid, dense"])
def test_config_json_of_a_new_model(name):
    """A model that was trained from scratch is written as this family, and read back as the same model."""
    cfg = read_config(make(name).config.to_dict())
    written = write_config(cfg, "bfloat16")
    assert written["model_type"] == NAME and differences(cfg, read_config(written)) == []
    with pytest.raises(ConfigError, match="computes this model"):
        write_config(replace(cfg, norm_offset=True), "bfloat16")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(hidden_act="gelu"), "hidden_act='gelu': only 'silu'"),
        (dict(mamba_proj_bias=True), "mamba_proj_bias=True: only"),
        (dict(position_embedding_type="alibi"), "position_embedding_type='alibi': only 'rope' or 'nope'"),
        (dict(layer_types=["conv"] * 4), "layer_types=.*: linear_attention or full_attention"),
        (dict(time_step_limit=[0.1]), "time_step_limit=.*: must be two numbers"),
        (dict(time_step_limit=[0.2, 0.1]), "most-step=0.1: must be at least"),
        (dict(mamba_n_groups=3), "mamba_n_heads=4: must be a multiple of"),
        (dict(mamba_expand=3), "mamba_expand=3: only 2.0 is computed"),
        (dict(mamba_d_head="auto"), "mamba_d_head='auto': must be"),
    ],
)
def test_what_is_not_computed_is_named(change, says):
    config = make(NAME).config.to_dict() | change
    with pytest.raises(ConfigError, match=says):
        read_config(config)
