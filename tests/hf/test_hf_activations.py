"""The experts' activation is read from config.json and written into it; one that is not computed is named.

next: tmoe/hf/architectures/common.py
"""

import json
from dataclasses import replace

import pytest
import torch
from hf_tiny import MODELS, assert_same_function, far, files_of, load_step, make, saved, train_and_save
from tiers import slow_but
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN

from tmoe.base.activations import activation
from tmoe.config.check import ConfigError
from tmoe.config.model import ModelConfig, MoEConfig
from tmoe.hf import export_hf, import_hf
from tmoe.hf.architectures.common import HIDDEN_ACTS
from tmoe.hf.config import read_config, write_config
from tmoe.model.transformer import Transformer

# Without dense blocks and shared experts.
FAMILIES = [
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "granitemoe",
    "flex_olmo",
    "minimax_m2",
]


def use(monkeypatch, name: str, act: str, **changes):
    """From here on the tiny model of this name has this hidden_act."""
    usual = MODELS[name]

    def config():
        made = usual()
        for key, value in dict(hidden_act=act, **changes).items():
            setattr(made, key, value)
        return made

    monkeypatch.setitem(MODELS, name, config)


@pytest.mark.parametrize("name", slow_but(["mixtral"], FAMILIES))
def test_gelu_gating_is_the_same_function(tmp_path, monkeypatch, name):
    usual = make(name)(torch.arange(8)[None]).logits
    use(monkeypatch, name, "gelu_pytorch_tanh")
    assert_same_function(tmp_path, name)
    model = load_step(tmp_path / "step")
    assert model.cfg.moe.activation == "geglu" and far(model(torch.arange(8)[None]), usual) > 1e-3


@pytest.mark.parametrize("word", HIDDEN_ACTS)
def test_each_word_is_transformers_function_and_comes_back(tmp_path, monkeypatch, word):
    entry = activation(HIDDEN_ACTS[word])
    gate, up = 3 * torch.randn(2, 500, dtype=torch.float64)
    torch.testing.assert_close(entry.of(torch.cat([gate, up])), ACT2FN[word](gate) * up, rtol=1e-8, atol=1e-9)
    use(monkeypatch, "mixtral", word)
    hf_dir = saved(tmp_path / "hf", "mixtral")
    import_hf(hf_dir, tmp_path / "step")
    export_hf(tmp_path / "step", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(hf_dir)


@pytest.mark.parametrize("word", ["gelu", "relu", "relu2", "quick_gelu", "no such thing"])
def test_what_is_not_computed_is_named(word):
    """gelu, relu and relu2 have a gate there, which the op's have not."""
    config = MODELS["mixtral"]().to_dict() | dict(hidden_act=word)
    with pytest.raises(ConfigError, match=rf"hidden_act='{word}': only 'silu' or 'gelu_pytorch_tanh' or"):
        read_config(config)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe, leading dense", "qwen2_moe", "deepseek_v3"])
def test_dense_blocks_and_shared_experts_are_swiglu(name):
    config = MODELS[name]().to_dict()
    assert read_config(config | dict(hidden_act="swish")).moe.activation == "swiglu"
    with pytest.raises(ConfigError, match=r"hidden_act='gelu_new': dense blocks and shared experts.*'silu'"):
        read_config(config | dict(hidden_act="gelu_new"))


def test_trained_here_with_gelu_gating_it_leaves(tmp_path):
    moe = MoEConfig(experts=4, top_k=2, ffn_dim=12, activation="geglu", balance="none", z_coeff=0.0)
    cfg = ModelConfig(
        vocab=31, dim=16, layers=2, heads=4, kv_heads=2, head_dim=4, qk_norm="head", norm_eps=1e-6, moe=moe
    )
    model = Transformer(cfg)
    step = train_and_save(tmp_path / "run", cfg, model)
    export_hf(step, tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["hidden_act"] == "gelu_pytorch_tanh" and config["model_type"] == "qwen3_moe"
    x = torch.randint(31, (2, 20))
    assert far(model(x), AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(x).logits) < 1e-5
    # dense blocks alone have no experts whose activation could stand in the way
    dense = replace(cfg, dense_layers=2, ffn_dim=12)
    assert write_config(dense, "float32")["hidden_act"] == "silu"
    for other in (replace(moe, shared_dim=8), replace(moe, activation="relu2")):
        with pytest.raises(ConfigError, match="computes this model"):
            write_config(replace(cfg, moe=other), "float32")
