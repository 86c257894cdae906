"""Nemotron-H: published spelling, generation, direct start, swap, what is carried, and what is refused."""

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
from tmoe.config.model import MTPConfig
from tmoe.config.presets import presets
from tmoe.hf import export_hf, import_hf, swap_experts
from tmoe.hf.adapters.commands import export_adapter, import_adapter
from tmoe.hf.config import read_config, write_config
from tmoe.model.count import count_parameters

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


def test_pefts_adapters_of_stacks_and_of_the_class_names(tmp_path, capsys):
    """PEFT 0.20 saves `model.` for `backbone.`, and stacks of experts; an export has stacks too."""
    hf_dir, theirs, adapter = saved(tmp_path / "hf", NAME), make(NAME), {}
    state, r = theirs.state_dict(), 2
    torch.manual_seed(5)
    for name, w in state.items():
        module = name.removesuffix(".weight")
        if module.endswith(("q_proj", "in_proj", "out_proj")):
            key, (E, out, width) = module, (1, *w.shape)
        elif name.endswith(("experts.up_proj", "experts.down_proj")):
            key, (E, out, width) = name.rpartition(".")[0] + ".base_layer" * ("up" in name), w.shape
        else:
            continue
        a, b = 0.1 * torch.randn(E, r, width), 0.1 * torch.randn(E, out, r)
        state[name] = w + 2.0 * (b @ a).view_as(w)
        adapter[f"base_model.model.{key}.lora_A.weight"] = a.flatten(0, 1)
        adapter[f"base_model.model.{key}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1).contiguous()
    assert any(".experts.base_layer." in key for key in adapter)
    (tmp_path / "adapter").mkdir()
    save_file(adapter, tmp_path / "adapter" / "adapter_model.safetensors")
    said = dict(peft_type="LORA", r=r, lora_alpha=2 * r, bias="none", task_type="CAUSAL_LM")
    said |= dict(target_modules=["q_proj", "in_proj", "out_proj"], peft_version="0.20.0")
    said |= dict(target_parameters=["experts.up_proj", "experts.down_proj"])
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(said))
    import_adapter(tmp_path / "adapter", tmp_path / "step", base=hf_dir)
    theirs.load_state_dict(state)
    assert far(logits_of_step(tmp_path / "step")[None], theirs(TOKENS).logits) < 2e-5
    export_adapter(tmp_path / "step", tmp_path / "back", layout="peft")
    assert "PEFT refuses adapters of a nemotron_h's out_proj" in capsys.readouterr().out
    names = load_file(tmp_path / "back" / "adapter_model.safetensors").keys()
    assert {key.replace(".model.layers", ".backbone.layers") for key in adapter} <= names
    assert not any(".experts.0." in key for key in names)
    import_adapter(tmp_path / "back", tmp_path / "again")
    torch.testing.assert_close(logits_of_step(tmp_path / "again"), logits_of_step(tmp_path / "step"))


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


NANO = dict(  # config.json of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16
    architectures=["NemotronHForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=1,
    chunk_size=128,
    conv_kernel=4,
    eos_token_id=2,
    expand=2,
    head_dim=128,
    hidden_dropout=0.0,
    hidden_size=2688,
    hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    initializer_range=0.02,
    intermediate_size=1856,
    layer_norm_epsilon=1e-05,
    mamba_head_dim=64,
    mamba_hidden_act="silu",
    mamba_num_heads=64,
    mamba_proj_bias=False,
    mamba_ssm_cache_dtype="float32",
    max_position_embeddings=262144,
    mlp_bias=False,
    mlp_hidden_act="relu2",
    model_type="nemotron_h",
    moe_intermediate_size=1856,
    moe_shared_expert_intermediate_size=3712,
    n_group=1,
    n_groups=8,
    n_routed_experts=128,
    n_shared_experts=1,
    norm_eps=1e-05,
    norm_topk_prob=True,
    num_attention_heads=32,
    num_experts_per_tok=6,
    num_hidden_layers=52,
    num_key_value_heads=2,
    num_logits_to_keep=1,
    pad_token_id=0,
    partial_rotary_factor=1.0,
    rescale_prenorm_residual=True,
    residual_in_fp32=False,
    rope_theta=10000,
    routed_scaling_factor=2.5,
    sliding_window=None,
    ssm_state_size=128,
    tie_word_embeddings=False,
    time_step_floor=0.0001,
    time_step_max=0.1,
    time_step_min=0.001,
    topk_group=1,
    torch_dtype="bfloat16",
    transformers_version="4.55.4",
    use_bias=False,
    use_cache=True,
    use_conv_bias=True,
    use_mamba_kernels=True,
    vocab_size=131072,
)


def test_the_published_config_is_the_preset():
    """23 blocks of Mamba-2, 23 of experts, 6 of attention; the parameters by hand, without choice biases.

    With mtp there are as many as in the folder, in bf16.
    """
    cfg = presets()["nemotron-3-nano-30b-a3b"].model
    assert differences(cfg, read_config(NANO)) == []
    D = 2688
    mamba = (2 * 4096 + 2 * 8 * 128 + 64) * D + 6144 * 5 + 3 * 64 + 4096 + 4096 * D
    attention, experts = (32 + 4) * 128 * D + 4096 * D, 128 * 2 * D * 1856 + 128 * D + 2 * D * 3712
    whole = 2 * 131072 * D + D + 52 * D + 23 * mamba + 23 * experts + 6 * attention
    counts = count_parameters(cfg)
    assert counts.total == whole == 31_577_937_344
    assert round(counts.active / 1e9, 1) == 3.6
    further = attention + experts + 2 * D * D + 5 * D
    assert count_parameters(replace(cfg, mtp=MTPConfig(1))).total == whole + further == 32_913_263_168


@pytest.mark.parametrize("name", [NAME, LATENT])
def test_config_json_of_a_new_model(name):
    """A model that was trained from scratch is written as this family, and read back as the same model."""
    cfg = read_config(make(name).config.to_dict())
    written = write_config(cfg, "bfloat16")
    assert written["model_type"] == NAME and differences(cfg, read_config(written)) == []
    dense = replace(cfg, layer_types=("linear", "dense", "full"), layers=6)
    written = write_config(dense, "bfloat16")
    assert written["model_type"] == NAME and differences(dense, read_config(written)) == []
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
