"""DeepSeek's checkpoints as published: fp8 in blocks, the choice bias, layers that predict further tokens.

And config.json of the hub. Logits, gradients and the way back of tiny models of both architectures are
in test_hf_models.py.

next: tmoe/hf/architectures/deepseek.py
"""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_tiny import assert_bits, far, files_of, load_step, make, saved, tensors_of, train_and_save
from runs import SMALL, begin, run
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tmoe.checkpoint.errors import MismatchError
from tmoe.config.check import ConfigError
from tmoe.config.compare import differences
from tmoe.config.model import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from tmoe.config.presets import presets
from tmoe.extras.gguf.command import export_gguf
from tmoe.generate import Engine, Sampling
from tmoe.generate.live import Live
from tmoe.hf import export_hf, import_hf, load_hf
from tmoe.hf.config import read_config, write_config
from tmoe.hf.files import Folder
from tmoe.model.shapes import model_shapes
from tmoe.model.transformer import Transformer
from tmoe.parallel import build_mesh, parallelize

INDEX = "model.safetensors.index.json"


def edit_config(folder: Path, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def in_two_files(folder: Path, tensors: dict[str, torch.Tensor]):
    """Writes the folder's weights anew, in two files; a tensor and its factors may be in different ones."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in {*where.values()}:
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps(dict(metadata=dict(total_size=7), weight_map=where)))


# ---- fp8 ----


def quantised(folder: Path, block: list[int], fmt: str = "fp8") -> dict[str, torch.Tensor]:
    """Turns a folder into what DeepSeek publishes; returns its values in fp32."""
    tensors = tensors_of(folder)
    values = {}
    for name in [n for n in tensors if n.endswith("_proj.weight") or "kv_a_proj" in n]:
        w = tensors[name].float()
        blocks = [-(-n // b) for n, b in zip(w.shape, block, strict=True)]
        scale = torch.rand(blocks) * 0.01 + 1e-3
        wide = torch.kron(scale, torch.ones(block))[: w.shape[0], : w.shape[1]]
        tensors[name] = (w / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
        values[name] = tensors[name].float() * wide
    in_two_files(folder, tensors)
    method = dict(quant_method=fmt, fmt="e4m3", activation_scheme="dynamic", weight_block_size=block)
    edit_config(folder, quantization_config=method)
    return {n: t for n, t in tensors.items() if n in values or "scale_inv" not in n} | values


def start(rank: int, world: int, ep: int, hf_dir: Path) -> dict[str, torch.Tensor]:
    cfg = read_config(Folder(hf_dir).config)
    with torch.device("meta"):
        model = Transformer(cfg)
    parallelize(model, build_mesh(ep=ep))
    model.to_empty(device="cpu")
    load_hf(hf_dir, model.state_dict(), cfg)
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in model.state_dict().items()}


@pytest.mark.parametrize("block", [[128, 128], [3, 5]])
def test_fp8_stands_for_its_products(gloo, tmp_path, block):
    """Imported and started from directly, whatever rows a rank holds; the export is bf16, rounded once."""
    hf_dir = saved(tmp_path / "hf", "deepseek_v3", torch.bfloat16)
    want = quantised(hf_dir, block)
    import_hf(hf_dir, tmp_path / "step", world=4, ep=2)
    export_hf(tmp_path / "step", tmp_path / "back", dtype="fp32")
    assert_bits(tensors_of(tmp_path / "back"), {name: t.float() for name, t in want.items()})
    imported = load_step(tmp_path / "step").state_dict()
    for found in gloo(4, start, 2, hf_dir):
        assert_bits(found, imported)
    export_hf(tmp_path / "step", tmp_path / "half")
    published = tensors_of(hf_dir)
    for name, tensor in tensors_of(tmp_path / "half").items():
        kind = torch.bfloat16 if published[name].dtype == torch.float8_e4m3fn else published[name].dtype
        assert torch.equal(tensor, want[name].to(kind)) and tensor.dtype == kind
    how = dict(output_loading_info=True, experts_implementation="eager")
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "half", **how)
    assert not any(info.values()), info
    assert "quantization_config" not in json.loads((tmp_path / "half/config.json").read_text())
    assert theirs(torch.randint(31, (1, 9))).logits.isfinite().all()


def test_fp8_that_does_not_fit_is_listed(tmp_path):
    hf_dir = saved(tmp_path / "hf", "deepseek_v3", torch.bfloat16)
    quantised(hf_dir, [4, 4])
    tensors = tensors_of(hf_dir)
    lost = "model.layers.0.self_attn.o_proj.weight"
    bent = "model.layers.1.mlp.experts.2.up_proj.weight"
    del tensors[f"{lost}_scale_inv"]
    tensors[f"{bent}_scale_inv"] = torch.ones(3, 3)
    in_two_files(hf_dir, tensors)
    with pytest.raises(MismatchError, match="2 differences") as error:
        import_hf(hf_dir, tmp_path / "step")
    for word in (
        f"{lost}_scale_inv: missing, but {lost} is",
        f"{bent}_scale_inv: shape (3, 3), must be a factor for",
    ):
        assert word in str(error.value)
    edit_config(hf_dir, quantization_config=dict(quant_method="fp8", weight_block_size=None))
    with pytest.raises(ConfigError, match="weight_block_size=None"):
        import_hf(hf_dir, tmp_path / "step")
    edit_config(hf_dir, quantization_config=dict(quant_method="awq"))
    with pytest.raises(ConfigError, match="quantization_config: quant_method='awq': only fp8"):
        import_hf(hf_dir, tmp_path / "step")
    assert {p.name for p in tmp_path.iterdir()} == {"hf"}


# ---- tensors ----


def test_layers_that_predict_further_tokens_are_carried(tmp_path, capsys):
    """They are not the model's: named as such, and put back in their place by an export.

    More of them than config.json names are refused.
    """
    hf_dir = saved(tmp_path / "hf", "deepseek_v3", torch.bfloat16)
    tensors = tensors_of(hf_dir)
    extra = {n.replace("layers.2.", "layers.3."): t.clone() for n, t in tensors.items() if "layers.2." in n}
    extra |= {
        f"model.layers.3.{n}": torch.randn(16, 2).half()
        for n in ("eh_proj.weight", "shared_head.head.weight")
    }
    in_two_files(hf_dir, tensors | extra)
    edit_config(hf_dir, num_nextn_predict_layers=1)
    import_hf(hf_dir, tmp_path / "step", world=2)
    said = capsys.readouterr().out
    assert f"{len(extra)} tensors" in said and "model.layers.3.eh_proj.weight" in said
    assert "model.layers.3.mlp.experts.*.up_proj.weight (6)" in said and "layers.2." not in said
    export_hf(tmp_path / "step", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(hf_dir)
    assert_bits(start_of(hf_dir), load_step(tmp_path / "step").state_dict())
    edit_config(hf_dir, num_nextn_predict_layers=0)
    with pytest.raises(MismatchError, match=f"{len(extra)} differences") as error:
        import_hf(hf_dir, tmp_path / "other")
    lines = str(error.value).splitlines()
    assert len(lines) == 20 and sum(".experts." in line for line in lines) == 3  # kinds of 6 each
    single = [name for name in extra if ".experts." not in name]
    assert all(f"{name}: deepseek_v3 has no such tensor" in str(error.value) for name in single)
    assert (
        "  model.layers.*.mlp.experts.*.up_proj.weight: deepseek_v3 has no such tensor (6, one is layers.3 "
        in str(error.value)
    )


def start_of(hf_dir: Path) -> dict[str, torch.Tensor]:
    cfg = read_config(Folder(hf_dir).config)
    model = Transformer(cfg)
    load_hf(hf_dir, model.state_dict(), cfg)
    return model.state_dict()


def test_every_wrong_tensor_is_listed(tmp_path):
    hf_dir = saved(tmp_path / "hf", "deepseek_v2")
    file = hf_dir / "model.safetensors"
    tensors = load_file(file)
    A = "model.layers.1.self_attn"
    del tensors[f"{A}.kv_a_layernorm.weight"], tensors[f"{A}.q_a_proj.weight"]
    tensors[f"{A}.kv_b_proj.weight"] = tensors[f"{A}.kv_b_proj.weight"][:-1].contiguous()
    tensors[f"{A}.q_proj.weight"] = torch.zeros(32, 16)  # the other way to make queries
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"] = torch.zeros(6)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(MismatchError) as error:
        import_hf(hf_dir, tmp_path / "step")
    lines = str(error.value).splitlines()
    assert "5 differences" in lines[0] and len(lines) == 6
    for end in (
        "kv_a_layernorm.weight: missing",
        "q_a_proj.weight: missing",
        "kv_b_proj.weight: shape (39, 8), deepseek_v2 with this config has (40, 8)",
        "q_proj.weight: deepseek_v2 has no such tensor",
        "e_score_correction_bias: deepseek_v2 has no such tensor",
    ):
        assert end in str(error.value), end
    assert {p.name for p in tmp_path.iterdir()} == {"hf"}


def test_a_start_without_the_choice_bias_is_refused(tmp_path):
    hf_dir = saved(tmp_path / "hf", "deepseek_v3")
    model = Transformer(read_config(Folder(hf_dir).config))
    with pytest.raises(MismatchError, match="2 differences") as error:
        load_hf(hf_dir, model.named_parameters(), model.cfg)
    assert (
        "blocks.1.moe.router.choice_bias: not among the tensors to fill; give the model's state_dict()"
        in str(error.value)
    )


# ---- settings ----

HUB = dict(
    hidden_act="silu", attention_bias=False, attention_dropout=0.0, rms_norm_eps=1e-6, rope_theta=10000
)
HUB |= dict(
    tie_word_embeddings=False, initializer_range=0.02, max_position_embeddings=163840, moe_layer_freq=1
)
HUB |= dict(
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512, pretraining_tp=1, ep_size=1
)
STRETCH = dict(type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1)
V2_LITE = HUB | dict(
    model_type="deepseek_v2", hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408
)
V2_LITE |= dict(num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16, vocab_size=102400)
V2_LITE |= dict(n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1)
V2_LITE |= dict(q_lora_rank=None, n_group=1, topk_group=1, topk_method="greedy", scoring_func="softmax")
V2_LITE |= dict(norm_topk_prob=False, routed_scaling_factor=1.0, aux_loss_alpha=0.001, seq_aux=True)
V2_LITE |= dict(rope_scaling=STRETCH | dict(mscale=0.707, mscale_all_dim=0.707))
V2 = V2_LITE | dict(
    hidden_size=5120, intermediate_size=12288, moe_intermediate_size=1536, num_hidden_layers=60
)
V2 |= dict(
    num_attention_heads=128, num_key_value_heads=128, n_routed_experts=160, q_lora_rank=1536, n_group=8
)
V2 |= dict(topk_group=3, topk_method="group_limited_greedy", routed_scaling_factor=16.0)
V3 = HUB | dict(
    model_type="deepseek_v3", hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048
)
V3 |= dict(num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128, vocab_size=129280)
V3 |= dict(n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3)
V3 |= dict(q_lora_rank=1536, n_group=8, topk_group=4, topk_method="noaux_tc", scoring_func="sigmoid")
V3 |= dict(norm_topk_prob=True, routed_scaling_factor=2.5, aux_loss_alpha=0.001, num_nextn_predict_layers=1)
V3 |= dict(rope_scaling=STRETCH | dict(mscale=1.0, mscale_all_dim=1.0), seq_aux=True)


KIMI_K2 = V3 | dict(
    model_type="kimi_k2", num_attention_heads=64, num_key_value_heads=64, vocab_size=163840, n_group=1
)
KIMI_K2 |= dict(n_routed_experts=384, topk_group=1, first_k_dense_replace=1, routed_scaling_factor=2.827)
KIMI_K2 |= dict(max_position_embeddings=131072, rope_theta=50000.0, num_nextn_predict_layers=0)
KIMI_K2 |= dict(rope_scaling=STRETCH | dict(factor=32.0, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0))
GLM = HUB | dict(model_type="glm4_moe_lite", hidden_size=2048, intermediate_size=10240)
GLM |= dict(num_hidden_layers=47, num_attention_heads=20, num_key_value_heads=20, vocab_size=154880)
GLM |= dict(moe_intermediate_size=1536, n_routed_experts=64, n_shared_experts=1, num_experts_per_tok=4)
GLM |= dict(q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256, n_group=1, topk_group=1)
GLM |= dict(topk_method="noaux_tc", norm_topk_prob=True, routed_scaling_factor=1.8, first_k_dense_replace=1)
GLM |= dict(num_nextn_predict_layers=1, partial_rotary_factor=1.0, rms_norm_eps=1e-5, rope_scaling=None)
GLM |= dict(rope_theta=1000000, max_position_embeddings=202752)
INDEXED = dict(model_type="deepseek_v32", index_topk=2048, index_head_dim=128)
GLM5 = GLM | INDEXED | dict(model_type="glm_moe_dsa", hidden_size=6144, intermediate_size=12288)
GLM5 |= dict(num_hidden_layers=78, num_attention_heads=64, num_key_value_heads=64, q_lora_rank=2048)
GLM5 |= dict(moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8, index_n_heads=32)
GLM5 |= dict(first_k_dense_replace=3, routed_scaling_factor=2.5, scoring_func="sigmoid")
GLM5 |= dict(index_topk_freq=4, indexer_types=None, rope_interleave=True, indexer_rope_interleave=True)


def test_config_of_the_hub():
    assert differences(presets()["kimi-k2"].model, read_config(KIMI_K2)) == []
    assert differences(presets()["glm-4.7-flash"].model, read_config(GLM)) == []
    with pytest.raises(ConfigError, match="first_k_dense_replace=2: only 1 is computed"):
        read_config(GLM | dict(first_k_dense_replace=2))
    assert differences(presets()["deepseek-v2-lite"].model, read_config(V2_LITE)) == []
    assert differences(presets()["deepseek-v3"].model, read_config(V3)) == []
    indexed = read_config(V3 | INDEXED | dict(index_n_heads=64))
    assert differences(replace(indexed, index_topk=0), read_config(V3)) == [] and indexed.longest == 2048
    glm = read_config(GLM5)
    assert [sum(map(glm.is_moe, range(78))), glm.heads, glm.moe.groups, glm.longest] == [75, 64, 1, 2048]
    total = sum(math.prod(shape) for shape in model_shapes(glm).values())
    indexers = 78 * (32 * 128 * 2048 + 128 * 6144 + 2 * 128 + 32 * 6144)
    assert round((total + indexers) / 1e9) == 744, "billions of parameters, as published"
    moe = read_config(V2).moe
    assert (moe.groups, moe.top_groups, moe.group_score, moe.renormalize, moe.scaling) == (
        8,
        3,
        "max",
        False,
        16.0,
    )
    every_second = read_config(V3 | dict(moe_layer_freq=2))  # among the layers from 3 on, the even ones
    assert [i for i in range(9) if every_second.is_moe(i)] == [4, 6, 8]


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        (V2, dict(topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, attention_bias=True)),
        (V3, dict(topk_method="greedy", scoring_func="softmax", attention_bias=True, kv_lora_rank=None)),
    ],
)
def test_every_wrong_setting_is_listed(config, wrong):
    with pytest.raises(ConfigError, match="4 problems") as error:
        read_config(config | wrong)
    for key, value in wrong.items():
        assert f"{key}={value!r}: only" in str(error.value) or f"{key}: missing" in str(error.value)


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_trained_here_gets_a_config(tmp_path, kind):
    """And the choice bias stays fp32 in an export to bf16, as transformers keeps it."""
    moe = MoEConfig(
        experts=8, top_k=3, ffn_dim=12, shared_dim=24, groups=4, top_groups=3, renormalize=False, z_coeff=0
    )
    base = dict(
        vocab=31, dim=16, layers=3, heads=4, attention="mla", dense_layers=1, ffn_dim=12, norm_eps=1e-4
    )
    mla = MLAConfig(kv_rank=6, nope_dim=4, rope_dim=4, v_dim=3)
    rope = RopeConfig(max_seq=128)
    if kind == "deepseek_v3":
        moe = replace(moe, score="sigmoid", choice_bias=True, group_score="top2", scaling=2.0)
        mla = replace(mla, q_rank=5, interleave=False)
        rope = replace(rope, scaling="yarn", factor=4.0, original_max_seq=32, mscale=0.8, mscale_all_dim=0.6)
    cfg = ModelConfig(**base, mla=mla, moe=moe, rope=rope)
    model = Transformer(cfg)
    for buffer in model.buffers():
        buffer.normal_(0, 0.3)
    step = train_and_save(tmp_path / "run", cfg, model)
    export_hf(step, tmp_path / "hf")
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values()), info
    assert theirs.config.model_type == kind
    x = torch.randint(31, (2, 90))
    assert far(theirs(x).logits, model(x)) < 1e-5
    export_hf(step, tmp_path / "small", dtype="bf16")
    for name, tensor in tensors_of(tmp_path / "small").items():
        assert tensor.dtype == (torch.float32 if "e_score_correction_bias" in name else torch.bfloat16)


def test_trained_from_theirs_and_back(gloo, tmp_path):
    """`train.py --init HF_DIR` on two ranks, and the export.

    Every choice bias moves by one step of the rule and goes back as theirs, in fp32.
    """
    hf_dir = saved(tmp_path / "hf", "deepseek_v3", torch.bfloat16)
    flags = f"""{" ".join(SMALL)} --init {hf_dir} --out {tmp_path / "run"} --steps 1 --parallel.ep 2
        --train.batch 2 --model.layers 3 --model.dim 16 --model.heads 4 --model.attention mla
        --model.qk-norm none --model.dense-layers 1 --model.vocab 256 --model.ffn-dim 12
        --model.mla.q-rank 6 --model.mla.kv-rank 8 --model.mla.nope-dim 4 --model.mla.rope-dim 4
        --model.mla.v-dim 6 --model.rope.max-seq 128 --model.moe.experts 6 --model.moe.top-k 2
        --model.moe.ffn-dim 10 --model.moe.shared-dim 10 --model.moe.score sigmoid --model.moe.choice-bias
        --model.moe.groups 2 --model.moe.group-score top2 --model.moe.scaling 2.5
        --model.moe.bias-speed 0.125"""
    tensors = tensors_of(hf_dir)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.randn(256, 16).bfloat16()
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[bias] = tensors[bias].float()
    in_two_files(hf_dir, tensors)
    edit_config(hf_dir, vocab_size=256)
    gloo(2, run, flags.split())
    export_hf(tmp_path / "run/checkpoints/step-1", tmp_path / "back")
    tuned = tensors_of(tmp_path / "back")
    assert {n: t.dtype for n, t in tuned.items()} == {n: t.dtype for n, t in tensors.items()}
    assert set((tuned[bias] - tensors[bias]).tolist()) <= {-0.125, 0.0, 0.125}
    assert (tuned[bias] != tensors[bias]).any()
    assert (
        make("deepseek_v3").config.model_type
        == json.loads((tmp_path / "back/config.json").read_text())["model_type"]
    )


# ---- an indexer ----


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa, shared keys"])
def test_up_to_its_number_of_keys_an_indexer_changes_nothing(tmp_path, name):
    """Greedy answers are transformers' up to index_topk=40 tokens; beyond, dense attention would differ."""
    import_hf(saved(tmp_path / "hf", name), tmp_path / "step")
    ours, theirs = load_step(tmp_path / "step"), make(name)
    prompt, x = torch.randint(3, 31, (1, 20)), torch.randint(31, (2, 60))
    want = theirs.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    (answer,) = Engine(ours).generate(prompt.tolist(), 1, Sampling(temperature=0, max_tokens=60))[0]
    assert list(answer.ids[:20]) == want[0, 20:].tolist() and answer.finish == "length"
    assert len(answer.ids) == 21, "the last token is predicted by the 40th"
    longer = Transformer(replace(ours.cfg, index_topk=0))
    longer.load_state_dict(ours.state_dict())
    got, want = longer(x), theirs(x).logits
    assert far(got[:, :40], want[:, :40]) < 1e-5 and far(got[:, 40:], want[:, 40:]) > 0.1
    says = "model.index_topk=40, beyond which an indexer chooses keys: not computed"
    with pytest.raises(ValueError, match=f"60 positions, but {says}"):
        ours(x)
    with pytest.raises(ConfigError, match=f"60 tokens, but {says}"):
        Engine(ours).generate(x.tolist(), 1)
    with pytest.raises(ConfigError, match=rf"max.len=41: must be from 1 to {says}"):
        Live(ours, max_len=41)


def test_an_indexer_is_carried(tmp_path):
    """From fp8 through a step of training, also in a block that predicts a further token; or refused."""
    hf_dir = saved(tmp_path / "hf", "deepseek_v32", torch.bfloat16)
    tensors = tensors_of(hf_dir)
    more = {n.replace("layers.2.", "layers.3."): t.clone() for n, t in tensors.items() if "layers.2." in n}
    wide = ("model.embed_tokens.weight", "lm_head.weight")
    in_two_files(hf_dir, tensors | more | {name: torch.randn(256, 16).bfloat16() for name in wide})
    edit_config(hf_dir, num_nextn_predict_layers=1, vocab_size=256)
    want = {n: t for n, t in quantised(hf_dir, [3, 5]).items() if ".indexer." in n}
    stored = tensors_of(hf_dir)
    assert len(want) == 4 * 5
    assert {t.itemsize for n, t in stored.items() if n.endswith("indexer.weights_proj.weight")} == {1}
    flags = f"""--init {hf_dir} --out {tmp_path / "run"} --steps 1 --train.batch 2 --no-compile
        --log.no-report --train.eval-every 0 --train.eval-batches 1""".split()
    code, said = begin(0, 1, [*flags, "--train.seq", "41"])
    says = (
        rf"--train.seq=41: must be at most --model.index-topk=40 \(from {hf_dir}/config.json\), beyond which"
    )
    assert code == 2 and re.search(says, said) and len(said.splitlines()) == 1
    run(0, 1, [*flags, "--train.seq", "40"])
    step = tmp_path / "run/checkpoints/step-1"
    export_hf(step, tmp_path / "back")
    tuned = tensors_of(tmp_path / "back")
    assert_bits({n: tuned[n] for n in want}, {n: t.bfloat16() for n, t in want.items()})
    assert not torch.equal(tuned[wide[0]], stored[wide[0]])
    export_hf(step, tmp_path / "fp8", quantize="fp8")
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    assert r"re:model\.layers\.\d+\.self_attn\.indexer\.wk$" in config["quantization_config"]["ignore"]
    with pytest.raises(ConfigError, match="'deepseek_v32': no GGUF is written of it"):
        export_gguf(step, tmp_path / "x.gguf", type="f16")
    with pytest.raises(ConfigError, match=r"index.topk=40: an export needs the indexer's weights: name the"):
        write_config(read_config(Folder(hf_dir).config), "float32")
    in_two_files(hf_dir, tensors_of(hf_dir) | {"model.layers.0.self_attn.indexer.wo.weight": torch.ones(2)})
    with pytest.raises(MismatchError, match=r"indexer\.wo\.weight: deepseek_v32 has no such tensor"):
        import_hf(hf_dir, tmp_path / "step")
