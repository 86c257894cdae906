"""Every architecture of the table: the same function in both directions, and config.json both ways.

next: tmoe/hf/architectures/__init__.py
"""

import importlib
import json
import re
from dataclasses import replace

import pytest
import torch
import transformers
from hf_tiny import (
    LACKING,
    LLAMA3,
    MODELS,
    assert_bits,
    assert_same_function,
    far,
    files_of,
    first_hand,
    load_step,
    saved,
    tensors_of,
    train_and_save,
)
from huggingface_hub import ModelCard
from packaging.version import Version
from safetensors.torch import load_file, save_file
from tiers import slow_but
from transformers import AutoConfig, AutoModelForCausalLM

from tmoe.checkpoint.errors import MismatchError
from tmoe.config.check import ConfigError
from tmoe.config.compare import differences
from tmoe.config.linear_settings import LinearConfig
from tmoe.config.model import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from tmoe.config.presets import presets
from tmoe.hf import export_hf, import_hf
from tmoe.hf.architectures import ARCHITECTURES
from tmoe.hf.config import read_config, write_config
from tmoe.hf.rules import divide, their_shapes
from tmoe.model.transformer import Transformer


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="has not all families")
def test_no_family_is_left_out():
    """A family whose class transformers lacks is in no test; a wrong name would be the same."""
    assert not LACKING


def in_the_fast_tier(name: str) -> bool:
    """One model of each family, but of those whose parts another family has."""
    again = ("minimax_m2", "mellum", "granitemoe_swa", "flint", "axk1", "glm_moe_dsa")
    return first_hand(name) or ("," not in name and name not in again)


@pytest.mark.parametrize("name", slow_but(in_the_fast_tier, MODELS))
def test_imported_model_is_the_same_function(tmp_path, name):
    assert_same_function(tmp_path, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3_moe", "llama, tied, llama3, narrow heads", "gpt_oss", "granitemoe"])
def test_types_and_files_come_back(tmp_path, name, dtype):
    """16-bit tensors pass through fp32 unchanged.

    Several files, a mixed type, a tied head and inv_freq come back as they were.
    """
    hf_dir = saved(tmp_path / "hf", name, dtype, files=4)
    assert len(list(hf_dir.glob("*.safetensors"))) > 2
    index = json.loads((hf_dir / "model.safetensors.index.json").read_text())
    added = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(4)}
    if "tied" in name:
        added["lm_head.weight"] = tensors_of(hf_dir)["model.embed_tokens.weight"]
    norm = next(key for key in index["weight_map"] if key.endswith("input_layernorm.weight"))
    # fp32 in a 16-bit file; 1e-6 is nothing that 16 bits hold
    added[norm] = tensors_of(hf_dir)[norm].float() + 1e-6
    owner = hf_dir / index["weight_map"][norm]
    save_file(load_file(owner) | added, owner, {"format": "pt"})
    index["weight_map"] |= dict.fromkeys(added, owner.name)
    (hf_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    import_hf(hf_dir, tmp_path / "step", world=3)
    export_hf(tmp_path / "step", tmp_path / "back")
    assert_bits(tensors_of(tmp_path / "back"), tensors_of(hf_dir))
    assert files_of(tmp_path / "back") == files_of(hf_dir)


def test_hub_spelling_of_older_transformers():
    """config.json as published.

    Of Mixtral 8x7B (4.36), Qwen3-30B-A3B (4.51), OLMoE (4.43) and Llama 3.1 8B (4.43).
    """
    shared = dict(hidden_act="silu", tie_word_embeddings=False, attention_dropout=0.0, initializer_range=0.02)
    mixtral = shared | dict(
        model_type="mixtral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32
    )
    mixtral |= dict(num_attention_heads=32, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2)
    mixtral |= dict(
        vocab_size=32000,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        sliding_window=None,
        max_position_embeddings=32768,
    )
    qwen = shared | dict(
        model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768
    )
    qwen |= dict(
        num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128
    )
    qwen |= dict(
        num_experts_per_tok=8, norm_topk_prob=True, vocab_size=151936, rms_norm_eps=1e-6, rope_theta=1e6
    )
    qwen |= dict(max_position_embeddings=40960, mlp_only_layers=[], decoder_sparse_step=1, rope_scaling=None)
    qwen |= dict(use_sliding_window=False, sliding_window=None, max_window_layers=48)
    olmoe = shared | dict(model_type="olmoe", hidden_size=2048, intermediate_size=1024, num_hidden_layers=16)
    olmoe |= dict(
        num_attention_heads=16, num_key_value_heads=16, num_experts=64, num_experts_per_tok=8, clip_qkv=None
    )
    olmoe |= dict(
        vocab_size=50304,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=4096,
        norm_topk_prob=False,
    )
    for name, hf in {"mixtral-8x7b": mixtral, "qwen3-30b-a3b": qwen, "olmoe-1b-7b": olmoe}.items():
        assert differences(presets()[name].model, read_config(hf)) == []
        found, _ = divide(
            next(a for a in ARCHITECTURES if a.model_type == hf["model_type"]), read_config(hf), ()
        )
        assert (
            sum(torch.Size(s).numel() for s in their_shapes(found).values())
            == {
                "mixtral": 46_702_792_704,
                "qwen3_moe": 30_532_122_624,
                "olmoe": 6_919_161_856,
            }[hf["model_type"]]
        )
    scaling = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    llama = shared | dict(
        model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, mlp_bias=False
    )
    llama |= dict(
        num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, rms_norm_eps=1e-5, rope_theta=5e5
    )
    llama |= dict(
        max_position_embeddings=131072, rope_scaling=scaling | dict(original_max_position_embeddings=8192)
    )
    cfg = read_config(llama)
    assert (
        cfg.rope == RopeConfig(5e5, 131072, "llama3", 8.0, 8192)
        and cfg.head_dim == 128
        and cfg.dense_layers == 32
    )


def test_every_wrong_setting_is_listed(tmp_path):
    hf_dir = saved(tmp_path / "hf", "qwen3_moe")
    config = json.loads((hf_dir / "config.json").read_text())
    config |= dict(hidden_act="gelu", quantization_config=dict(quant_method="awq"))
    config |= dict(rope_parameters=dict(rope_type="longrope"), num_experts_per_tok=None)
    (hf_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="4 problems") as error:
        import_hf(hf_dir, tmp_path / "step")
    for word in (
        "hidden_act='gelu'",
        "quantization_config: quant_method='awq'",
        "rope_type='longrope': valid are default, dynamic, linear, llama3, yarn; longrope changes with",
        "tmoe.hf.swap_experts trains the experts of such a model in transformers",
        "num_experts_per_tok: missing",
    ):
        assert word in str(error.value)
    said = re.search(r"(tmoe[.\w]*)\.(\w+) trains the experts", str(error.value))
    assert callable(getattr(importlib.import_module(said[1]), said[2]))  # it can be imported by that name
    kinds = dict(full_attention=dict(rope_theta=1e4), sliding_attention=dict(rope_theta=1e6))
    (hf_dir / "config.json").write_text(json.dumps(config | dict(rope_parameters=kinds)))
    with pytest.raises(ConfigError, match="separate settings of RoPE for each of full_attention, sliding"):
        import_hf(hf_dir, tmp_path / "step")
    (hf_dir / "config.json").write_text(json.dumps(config | dict(model_type="gemma")))
    with pytest.raises(
        ConfigError, match="'gemma' has no table entry; there are: llama, qwen3, qwen2, mistral, "
    ):
        import_hf(hf_dir, tmp_path / "step")
    (hf_dir / "config.json").write_text(json.dumps(dict(config={}, starts=[])))
    with pytest.raises(
        ConfigError, match=r"no model_type, so this is no Hugging Face folder; .*tmoe.hf export STEP"
    ):
        import_hf(hf_dir, tmp_path / "step")
    assert {p.name for p in tmp_path.iterdir()} == {"hf"}


@pytest.mark.parametrize(
    "rope",
    [
        # beside it, and first
        dict(rope_scaling=dict(LLAMA3, factor=3.0), original_max_position_embeddings=40),
        dict(rope_scaling=dict(LLAMA3, factor=3.0), rope_parameters=dict(LLAMA3, factor=2.0)),
        dict(rope_scaling=None, rope_theta=3e4, rope_parameters=dict(LLAMA3, rope_theta=2e4)),
        dict(rope_scaling=dict(type="linear", factor=3.0), rope_theta=3e4),
        dict(rope_scaling=dict(type="yarn", factor=3.0, beta_fast=None)),
        dict(),
    ],
)
def test_rope_in_any_spelling_is_what_transformers_computes(tmp_path, rope):
    hf_dir = saved(tmp_path / "hf", "llama")
    config = json.loads((hf_dir / "config.json").read_text())
    del config["rope_parameters"]
    (hf_dir / "config.json").write_text(json.dumps(config | rope))
    import_hf(hf_dir, tmp_path / "step")
    theirs = AutoModelForCausalLM.from_pretrained(hf_dir, attn_implementation="eager")
    x = torch.randint(31, (2, 120))
    assert far(load_step(tmp_path / "step")(x), theirs(x).logits) < 1e-5


@pytest.mark.parametrize(
    "name", ["llama", "mixtral", "llama, tied, llama3, narrow heads", "qwen3, tied, yarn"]
)
def test_far_into_a_sequence_it_is_still_the_same_function(tmp_path, name):
    """Angles are rounded there as theirs are.

    Exact angles gave logits up to 3e-5 apart at 6,000 tokens.
    """
    hf_dir = saved(tmp_path / "hf", name)
    config = json.loads((hf_dir / "config.json").read_text()) | dict(max_position_embeddings=8192)
    (hf_dir / "config.json").write_text(json.dumps(config))
    import_hf(hf_dir, tmp_path / "step")
    theirs = AutoModelForCausalLM.from_pretrained(hf_dir, experts_implementation="eager")
    x = torch.randint(31, (1, 4000))
    with torch.no_grad():
        assert far(load_step(tmp_path / "step")(x), theirs(x).logits) < 1e-6


KINDS = {  # settings of each architecture beside the common ones
    "llama": dict(dense_layers=3, qkv_bias=True, o_bias=True),
    "qwen3": dict(dense_layers=3, qk_norm="head", window=9, windowed=(0, 1)),
    "mixtral": dict(window=20, moe=dict(softmax="after")),
    "qwen3_moe": dict(dense_layers=1, qk_norm="head"),
    "olmoe": dict(qk_norm="full", moe=dict(renormalize=False)),
    "qwen2_moe": dict(
        dense_layers=1, qkv_bias=True, moe=dict(renormalize=False, shared_dim=6, shared_gate=True)
    ),
    "granitemoe": dict(residual_multiplier=0.5, logits_scaling=4.0, moe=dict(softmax="after")),
    "gpt_oss": dict(
        **dict(qkv_bias=True, o_bias=True, sinks=True, window=9, windowed=(1, 0)),
        moe=dict(softmax="after", router_bias=True, bias=True, activation="clamped"),
    ),
}


SIGMOID = dict(score="sigmoid", choice_bias=True)
WINDOWS = dict(window=9, windowed=(1, 0))
NEXT = LinearConfig("deltanet", key_heads=2, value_heads=4, key_dim=4, value_dim=6)
APART = {  # those whose blocks are set apart, with settings of RoPE
    "glm4_moe": dict(dense_layers=1, qkv_bias=True, rope=dict(dim=2), moe=SIGMOID | dict(shared_dim=8)),
    "minimax_m2": dict(qk_norm="full", rope=dict(dim=2), moe=SIGMOID),
    "ernie4_5_moe": dict(
        dense_layers=1, moe_every=2, rope=dict(interleave=True), moe=dict(choice_bias=True, shared_dim=16)
    ),
    "exaone_moe": dict(
        dense_layers=1, qk_norm="head", rotary=(1, 0), **WINDOWS, moe=SIGMOID | dict(shared_dim=8)
    ),
    "mellum": dict(qk_norm="head", dense_blocks=(1,), **WINDOWS, rope=dict(window_theta=300.0)),
    "flex_olmo": dict(qk_norm="full", norms="post"),
    "afmoe": dict(
        **dict(qk_norm="head", norms="sandwich", attention_gate=True, rotary=(1, 0), dense_layers=1),
        **dict(embedding_multiplier=4.0, moe=SIGMOID | dict(shared_dim=8, scaling=2.0)) | WINDOWS,
    ),
    "hunyuan_v1_moe": dict(qk_norm="rotated", moe=dict(shared_dim=8)),
    "granitemoe_swa": dict(
        sinks=True, rotary=(1, 0), **WINDOWS, residual_multiplier=0.5, moe=dict(softmax="after", shared_dim=6)
    ),
    "axk1": dict(
        **dict(attention="mla", norms="moe", dense_blocks=(1,)),
        **dict(mla=MLAConfig(q_rank=6, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=6)),
        moe=SIGMOID | dict(shared_dim=8),
    ),
    "mistral4": dict(
        **dict(attention="mla", dense_layers=1, rope=dict(scaling="yarn", factor=4.0, query_beta=0.4)),
        **dict(mla=MLAConfig(q_rank=6, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=6)),
        moe=dict(shared_dim=8),
    ),
    "mimo_v2_flash": dict(
        **dict(dense_layers=1, window_kv_heads=4, window_sinks=True, v_head_dim=6, value_multiplier=0.5),
        **dict(rope=dict(dim=2, window_theta=300.0), moe=SIGMOID) | WINDOWS,
    ),
    "qwen3_next": dict(
        **dict(
            qk_norm="head", attention_gate=True, norm_offset=True, layer_types=("linear", "full", "linear")
        ),
        **dict(linear=NEXT, rope=dict(dim=2), dense_blocks=(1,)),
        moe=dict(shared_dim=8, shared_gate=True),
    ),
    "flint": dict(
        **dict(dense_blocks=(1,), qk_norm="head", sinks=True, rotary=(1, 0), **WINDOWS),
        moe=dict(score="sigmoid", shared_dim=6),
    ),
}
CASES = [(kind, scaling) for kind in KINDS for scaling in ("none", "llama3", "yarn")]
CASES += [(kind, "none") for kind in APART] + [("mellum", "yarn")]


@pytest.mark.parametrize(("kind", "scaling"), slow_but(lambda case: case[0] in KINDS, CASES))
def test_trained_here_gets_a_config(tmp_path, monkeypatch, kind, scaling):
    """config.json is made from the settings, by the table read backwards; transformers computes the same."""
    base = dict(vocab=31, dim=16, layers=3, heads=4, kv_heads=2, head_dim=4, ffn_dim=10, norm_eps=1e-5)
    settings = (KINDS | APART)[kind]
    stretched = dict(scaling=scaling, factor=1.0 if scaling == "none" else 4.0, original_max_seq=64)
    rope = RopeConfig(theta=3e4, max_seq=256, **stretched | settings.get("rope", {}))
    moe = MoEConfig(experts=4, top_k=2, ffn_dim=8, balance="none", z_coeff=0, **settings.get("moe", {}))
    cfg = ModelConfig(**base | settings | dict(rope=rope, moe=moe))
    model = Transformer(cfg)
    step = train_and_save(tmp_path / "run", cfg, model)
    monkeypatch.setattr("tmoe.hf.export.SHARD", 4000)
    export_hf(step, tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values()), info
    assert theirs.config.model_type == kind
    x = torch.randint(31, (2, 90))
    assert far(theirs(x).logits, model(x)) < 1e-5
    export_hf(step, tmp_path / "small", dtype="bf16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "small").dtype == torch.bfloat16
    import_hf(tmp_path / "small", tmp_path / "again")
    assert AutoConfig.from_pretrained(tmp_path / "small").num_hidden_layers == 3


def test_the_pilot_leaves_as_a_granite(tmp_path):
    """moe-pilot-14b with its sizes cut: factors of 1 and the usual scale of attention, equal logits."""
    whole = presets()["moe-pilot-14b"].model
    hf = write_config(whole, "bfloat16")
    assert hf["model_type"] == "granitemoeshared" and hf["attention_multiplier"] == 128**-0.5
    assert [hf[f"{n}"] for n in ("embedding_multiplier", "residual_multiplier", "logits_scaling")] == [
        1.0
    ] * 3
    moe = replace(whole.moe, experts=4, ffn_dim=8, shared_dim=16)
    cfg = replace(whole, vocab=31, dim=16, layers=2, heads=4, kv_heads=2, head_dim=4, moe=moe)
    model = Transformer(cfg)
    export_hf(train_and_save(tmp_path / "run", cfg, model), tmp_path / "hf", license="apache-2.0")
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values()) and theirs.config.model_type == "granitemoeshared"
    x = torch.randint(31, (2, 90))
    assert far(theirs(x).logits, model.eval()(x)) < 1e-5
    told = ModelCard.load(tmp_path / "hf/README.md")
    assert told.data.license == "apache-2.0" and told.data.tags == ["granitemoeshared", "moe", "tmoe"]
    assert (told.data.library_name, told.data.pipeline_tag) == ("transformers", "text-generation")
    assert "(2 of 4 experts in a layer)" in told.text and "step 1, 9 tokens" in told.text


def test_a_model_that_no_architecture_computes():
    cfg = presets()["tiny"].model
    assert write_config(cfg, "float32")["model_type"] == "qwen3_moe"
    for odd in (
        replace(cfg, moe=replace(cfg.moe, shared_dim=8)),
        replace(cfg, moe=replace(cfg.moe, scaling=2.0)),
    ):
        with pytest.raises(ConfigError, match=r"none of llama, .*, gpt_oss.* computes"):
            write_config(odd, "float32")


def test_hub_spelling_of_the_presets():
    """config.json as published: gpt-oss-20b (4.55), Granite 3.0 3B-A800M (4.45), Qwen2-57B-A14B (4.40)."""
    scaling = dict(beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096)
    gpt_oss = dict(
        model_type="gpt_oss", attention_bias=True, attention_dropout=0.0, experts_per_token=4, head_dim=64
    )
    gpt_oss |= dict(hidden_act="silu", hidden_size=2880, initial_context_length=4096, intermediate_size=2880)
    gpt_oss |= dict(layer_types=["sliding_attention", "full_attention"] * 12, max_position_embeddings=131072)
    gpt_oss |= dict(
        num_attention_heads=64, num_experts_per_tok=4, num_hidden_layers=24, num_key_value_heads=8
    )
    gpt_oss |= dict(
        num_local_experts=32, rms_norm_eps=1e-5, rope_scaling=scaling | dict(rope_type="yarn", truncate=False)
    )
    gpt_oss |= dict(
        rope_theta=150000, sliding_window=128, swiglu_limit=7.0, tie_word_embeddings=False, vocab_size=201088
    )
    granite = dict(
        model_type="granitemoe", attention_bias=False, attention_dropout=0.1, attention_multiplier=0.015625
    )
    granite |= dict(embedding_multiplier=12.0, hidden_act="silu", hidden_size=1536, intermediate_size=512)
    granite |= dict(
        logits_scaling=6.0, max_position_embeddings=4096, num_attention_heads=24, num_experts_per_tok=8
    )
    granite |= dict(
        num_hidden_layers=32, num_key_value_heads=8, num_local_experts=40, residual_multiplier=0.22
    )
    granite |= dict(
        rms_norm_eps=1e-6, rope_scaling=None, rope_theta=10000, tie_word_embeddings=True, vocab_size=49155
    )
    qwen = dict(
        model_type="qwen2_moe",
        attention_dropout=0.0,
        decoder_sparse_step=1,
        hidden_act="silu",
        hidden_size=3584,
    )
    qwen |= dict(
        intermediate_size=18944, max_position_embeddings=32768, max_window_layers=28, num_experts_per_tok=8
    )
    qwen |= dict(moe_intermediate_size=2560, norm_topk_prob=False, num_attention_heads=28, num_experts=64)
    qwen |= dict(num_hidden_layers=28, num_key_value_heads=4, rms_norm_eps=1e-6, rope_theta=1000000.0)
    qwen |= dict(
        shared_expert_intermediate_size=20480,
        sliding_window=65536,
        use_sliding_window=False,
        vocab_size=151936,
    )
    qwen |= dict(tie_word_embeddings=False)
    for name, hf in {"gpt-oss-20b": gpt_oss, "granite-3b-a800m": granite, "qwen2-57b-a14b": qwen}.items():
        assert differences(presets()[name].model, read_config(hf)) == [], name


@pytest.mark.parametrize(
    ("name", "missing", "bent", "extra"),
    [
        ("gpt_oss", "self_attn.sinks", "experts.gate_up_proj", "self_attn.q_norm.weight"),
        ("gpt_oss", "experts.down_proj_bias", "experts.gate_up_proj_bias", "mlp.experts.gate_up_proj_blocks"),
        ("granitemoe", "router.layer.weight", "input_linear.weight", "self_attn.q_proj.bias"),
        ("qwen2_moe", "q_proj.bias", "shared_expert.up_proj.weight", "self_attn.o_proj.bias"),
    ],
)
def test_every_wrong_tensor_is_listed(tmp_path, name, missing, bent, extra):
    file = saved(tmp_path / "hf", name) / "model.safetensors"
    tensors = load_file(file)
    gone, short = (next(key for key in tensors if key.endswith(end)) for end in (missing, bent))
    tensors[short] = tensors[short][..., :-1].contiguous()
    del tensors[gone]
    save_file(tensors | {f"model.layers.1.{extra}": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(MismatchError) as error:
        import_hf(tmp_path / "hf", tmp_path / "step")
    lines = str(error.value).splitlines()
    assert len(lines) == 4 and "3 differences" in lines[0]
    for words in (
        (gone, "missing"),
        (short, f"shape {tuple(tensors[short].shape)}"),
        (extra, "no such tensor"),
    ):
        assert sum(all(word in line for word in words) for line in lines) == 1, (words, lines)
    assert {p.name for p in tmp_path.iterdir()} == {"hf"}
