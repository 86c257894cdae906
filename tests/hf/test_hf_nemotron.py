"""Nemotron-H: published spelling, generation, direct start, swap, what is carried, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from hf_tiny import assert_bits, far, files_of, make, saved, tensors_of
from linear_families import assert_starts_and_answers
from safetensors.torch import load_file, save_file

from tmoe.config.check import ConfigError
from tmoe.config.compare import differences
from tmoe.hf import export_hf, import_hf, swap_experts
from tmoe.hf.config import read_config, write_config

NAME = "nemotron_h"
LATENT = "nemotron_h, latent experts, groups, no bias of the convolution"


@pytest.mark.parametrize("name", [NAME, LATENT])
def test_direct_start_and_greedy_answers(tmp_path, name):
    """transformers does not limit the step of a single token, so its answers are those of whole sequences."""
    cfg = assert_starts_and_answers(tmp_path, name, 2e-5, cached=False).cfg
    assert cfg.one_branch and cfg.linear.kind == "mamba2" and cfg.moe.shared_activation == "relu2"


def test_every_byte_comes_back_in_bf16(tmp_path):
    """Also tensors of blocks that predict further tokens, which are carried."""
    hf_dir = saved(tmp_path / "hf", NAME, torch.bfloat16)
    more = {
        "mtp.layers.0.mixer.q_proj.weight": torch.randn(24, 16),
        "mtp.layers.1.norm.weight": torch.randn(16),
    }
    file, index = sorted(hf_dir.glob("*.safetensors"))[0], hf_dir / "model.safetensors.index.json"
    save_file(load_file(file) | more, file, {"format": "pt"})
    names = json.loads(index.read_text())
    names["weight_map"] |= dict.fromkeys(more, file.name)
    index.write_text(json.dumps(names))
    import_hf(hf_dir, tmp_path / "step")
    export_hf(tmp_path / "step", tmp_path / "back")
    assert_bits(tensors_of(tmp_path / "back"), tensors_of(hf_dir))
    assert files_of(tmp_path / "back") == files_of(hf_dir)


@pytest.mark.parametrize("name", [NAME, LATENT])
def test_swapped_experts_are_the_same_model(name):
    x = torch.randint(31, (2, 20))
    want = make(name)(x).logits
    assert far(swap_experts(make(name))(x).logits, want) < 1e-5


def test_published_spelling():
    """The pattern of letters, older words, and other names of keys."""
    config = make(NAME).config.to_dict()
    want = read_config(config)
    kinds = config.pop("layers_block_type")
    assert [want.branch_of(i) for i in range(6)] == ["linear", "moe", "linear", "dense", "full", "moe"]
    assert read_config(config | dict(hybrid_override_pattern="MEM-*E")) == want
    older = dict(linear_attention="mamba", full_attention="attention")
    assert read_config(config | dict(layers_block_type=[older.get(kind, kind) for kind in kinds])) == want
    other = {"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias"}
    renamed = {other.get(key, key): value for key, value in config.items()}
    assert read_config(renamed | dict(layers_block_type=kinds)) == want


@pytest.mark.parametrize("name", [NAME, LATENT])
def test_config_json_of_a_new_model(name):
    """A model that was trained from scratch is written as this family, and read back as the same model."""
    cfg = read_config(make(name).config.to_dict())
    written = write_config(cfg, "bfloat16")
    assert written["model_type"] == NAME and differences(cfg, read_config(written)) == []
    with pytest.raises(ConfigError, match="computes this model"):
        write_config(replace(cfg, moe=replace(cfg.moe, shared_activation="swiglu")), "bfloat16")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(mlp_hidden_act="gelu"), "mlp_hidden_act='gelu': only 'relu2'"),
        (dict(mamba_hidden_act="relu"), "mamba_hidden_act='relu': only"),
        (dict(use_bias=True), "use_bias=True: only"),
        (dict(mlp_bias=True), "mlp_bias=True: only"),
        (dict(tie_word_embeddings=True), "tie_word_embeddings=True: only False"),
        (
            dict(layers_block_type=["linear_attention", "full_attention"]),
            "only with one or more of 'moe' and",
        ),
        (
            dict(layers_block_type=["conv", "moe"]),
            "layers_block_type=.*: linear_attention or full_attention or moe",
        ),
        (dict(num_hidden_layers=5), "layers_block_type=.* for each of 5 layers"),
        (dict(n_groups=3), "mamba_num_heads=4: must be a multiple of"),
    ],
)
def test_what_is_not_computed_is_named(change, says):
    config = make(NAME).config.to_dict() | change
    with pytest.raises(ConfigError, match=says):
        read_config(config)
