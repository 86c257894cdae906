"""Hugging Face in both directions, direct start, and swapped experts, on tiny random models that transformers makes.

next: ../tmoe/hf.py
"""

import copy
import json
import resource
import shutil
from collections import namedtuple
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from test_train import SMALL, run
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    GenerationConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tmoe.checkpoint import Checkpoints, MismatchError, read_manifest, verify
from tmoe.cli import parse
from tmoe.config import ConfigError, ModelConfig, MoEConfig, RopeConfig
from tmoe.hf import export_hf, import_hf, is_folder, load_hf, main, swap_experts
from tmoe.hf_config import differences, read_config, write_config
from tmoe.hf_files import Folder, split
from tmoe.hf_swap import SwappedExperts
from tmoe.hf_tables import ARCHITECTURES, Part, Rule, divide, their_shapes
from tmoe.model import Transformer
from tmoe.offline import plan_reshard
from tmoe.parallel import build_mesh, parallelize
from tmoe.rewrite import rewrite
from tmoe.zoo import presets

SIZES = dict(
    vocab_size=31,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=12,
    max_position_embeddings=128,
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
    attn_implementation="eager",
    experts_implementation="eager",
)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, original_max_position_embeddings=16)
LLAMA3 |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)
MOE = dict(num_experts=6, num_experts_per_tok=2)
MODELS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama, tied, llama3, narrow heads": lambda: LlamaConfig(
        **SIZES | dict(tie_word_embeddings=True, rope_parameters=LLAMA3, head_dim=2, num_key_value_heads=4)
    ),
    "llama, linear": lambda: LlamaConfig(**SIZES, rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=3e4)),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=8),
    "qwen3, tied, yarn": lambda: Qwen3Config(**SIZES, head_dim=6, tie_word_embeddings=True, rope_parameters=YARN),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=6, num_experts_per_tok=3),
    "mixtral, tied, wide heads": lambda: MixtralConfig(
        **SIZES, num_local_experts=4, tie_word_embeddings=True, head_dim=10
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **MOE, moe_intermediate_size=10, head_dim=8, norm_topk_prob=True),
    "qwen3_moe, every second": lambda: Qwen3MoeConfig(
        **SIZES | dict(num_hidden_layers=4), **MOE, moe_intermediate_size=10, decoder_sparse_step=2
    ),
    "qwen3_moe, leading dense": lambda: Qwen3MoeConfig(
        **SIZES | dict(num_hidden_layers=3), **MOE, moe_intermediate_size=10, mlp_only_layers=[0]
    ),
    "olmoe": lambda: OlmoeConfig(**SIZES, **MOE),
    "olmoe, renormalised, all heads": lambda: OlmoeConfig(
        **SIZES | dict(num_key_value_heads=4), **MOE, norm_topk_prob=True
    ),
}
MLA = dict(q_lora_rank=6, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=6, n_group=2, topk_group=1)
MLA |= dict(
    moe_intermediate_size=10, first_k_dense_replace=1, num_experts_per_tok=2, num_key_value_heads=4, num_hidden_layers=3
)
FOREIGN = {  # what tmoe's own model does not compute; the swap leaves everything but the experts to transformers
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SIZES, **MOE, moe_intermediate_size=10, shared_expert_intermediate_size=14, norm_topk_prob=False
    ),
    "granitemoe": lambda: GraniteMoeConfig(
        **SIZES, num_local_experts=6, num_experts_per_tok=2, residual_multiplier=0.3, logits_scaling=2.0
    ),
    "deepseek_v2": lambda: DeepseekV2Config(
        **SIZES | MLA, n_routed_experts=6, n_shared_experts=2, topk_method="group_limited_greedy"
    ),
    "deepseek_v3": lambda: DeepseekV3Config(**SIZES | MLA, n_routed_experts=6, n_shared_experts=1),
}
SPARSE = ["mixtral", "qwen3_moe", "qwen3_moe, every second", "olmoe"]


def make(name: str, dtype: torch.dtype = torch.float32):
    """A transformers model with weights large enough that routing, gates and attention are far from linear."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config((MODELS | FOREIGN)[name]()).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.3)
    return model.eval()


def saved(path: Path, name: str, dtype: torch.dtype = torch.float32, files: int = 1) -> Path:
    model = make(name, dtype)
    model.generation_config = GenerationConfig(temperature=0.6, do_sample=True, eos_token_id=2)
    size = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(path, max_shard_size=size if files == 1 else size // files)
    (path / "tokenizer.json").write_text('{"version": "1.0", "words": "Grüße"}')
    (path / "empty.txt").touch()
    return path


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}


def assert_bits(got: dict, want: dict):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


def others_of(path: Path) -> dict[str, bytes]:
    return {name: content for name, content in files_of(path).items() if not name.endswith(".safetensors")}


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def far(a, b) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def load_step(path: Path) -> Transformer:
    """As train.py --init does, with the model settings that the step folder records."""
    config = json.loads((path / "manifest.json").read_text())["info"]["config"]["model"]
    cfg = ModelConfig(**config | dict(rope=RopeConfig(**config["rope"]), moe=MoEConfig(**config["moe"])))
    model = Transformer(replace(cfg, moe=replace(cfg.moe, balance="none", z_coeff=0.0)))
    checkpoints = Checkpoints(path.parent / "none", keep=1, mode="sync", info={})
    checkpoints.load(path, {f"model.{n}": p for n, p in model.named_parameters()}, only="model.")
    return model


def gradients_by_their_names(model: Transformer, hf: dict) -> dict:
    """Our gradients cut along the table's boxes."""
    arch = next(a for a in ARCHITECTURES if a.model_type == hf["model_type"])
    found, _ = divide(arch, model.cfg, ())
    cut = {}
    for ours, parameter in model.named_parameters():
        for piece in found[ours]:
            box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
            cut[piece.name] = parameter.grad[box].reshape(piece.shape[1:] if piece.stacked else piece.shape)
    return cut


# ---- import and export ----


@pytest.mark.parametrize("name", MODELS)
def test_imported_model_is_the_same_function(tmp_path, name):
    """Logits, the gradient of every tensor, and everything back bit for bit."""
    hf_dir = saved(tmp_path / "hf", name)
    import_hf(hf_dir, tmp_path / "step")
    assert verify(tmp_path / "step") == []
    model, theirs = load_step(tmp_path / "step"), make(name)
    x, targets = torch.randint(31, (2, 3, 40))
    logits = theirs(x).logits
    assert far(model(x), logits) < 1e-5
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    model(x, targets).backward()
    for p in theirs.parameters():
        p.data = p.grad  # their own way from parameters to names of files: save the gradients as if they were weights
    theirs.save_pretrained(tmp_path / "gradients")
    want = tensors_of(tmp_path / "gradients")
    got = gradients_by_their_names(model, json.loads((hf_dir / "config.json").read_text()))
    assert got.keys() == want.keys()
    for key, gradient in want.items():
        assert far(got[key], gradient) < 1e-5 or (gradient.norm() == 0 and got[key].norm() == 0), key

    export_hf(tmp_path / "step", tmp_path / "back")
    assert_bits(tensors_of(tmp_path / "back"), tensors_of(hf_dir))
    assert files_of(tmp_path / "back") == files_of(hf_dir)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert again.generation_config.temperature == 0.6
    assert_bits(again.state_dict(), make(name).state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3_moe", "llama, tied, llama3, narrow heads"])
def test_types_and_files_come_back(tmp_path, name, dtype):
    """16-bit tensors pass through fp32 unchanged; several files, a mixed type, a tied head, inv_freq: as they were."""
    hf_dir = saved(tmp_path / "hf", name, dtype, files=4)
    assert len(list(hf_dir.glob("*.safetensors"))) > 2
    index = json.loads((hf_dir / "model.safetensors.index.json").read_text())
    added = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(4)}
    if "tied" in name:
        added["lm_head.weight"] = tensors_of(hf_dir)["model.embed_tokens.weight"]
    norm = next(key for key in index["weight_map"] if key.endswith("input_layernorm.weight"))
    added[norm] = tensors_of(hf_dir)[norm].float() + 1e-6  # fp32 in a 16-bit file; 1e-6 is nothing that 16 bits hold
    owner = hf_dir / index["weight_map"][norm]
    save_file(load_file(owner) | added, owner, {"format": "pt"})
    index["weight_map"] |= dict.fromkeys(added, owner.name)
    (hf_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    import_hf(hf_dir, tmp_path / "step", world=3)
    export_hf(tmp_path / "step", tmp_path / "back")
    assert_bits(tensors_of(tmp_path / "back"), tensors_of(hf_dir))
    assert files_of(tmp_path / "back") == files_of(hf_dir)


def test_hub_spelling_of_older_transformers():
    """config.json as published: Mixtral 8x7B (4.36), Qwen3-30B-A3B (4.51), OLMoE (4.43), Llama 3.1 8B (4.43)."""
    shared = dict(hidden_act="silu", tie_word_embeddings=False, attention_dropout=0.0, initializer_range=0.02)
    mixtral = shared | dict(model_type="mixtral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)
    mixtral |= dict(num_attention_heads=32, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2)
    mixtral |= dict(
        vocab_size=32000, rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None, max_position_embeddings=32768
    )
    qwen = shared | dict(model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768)
    qwen |= dict(num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128)
    qwen |= dict(num_experts_per_tok=8, norm_topk_prob=True, vocab_size=151936, rms_norm_eps=1e-6, rope_theta=1e6)
    qwen |= dict(max_position_embeddings=40960, mlp_only_layers=[], decoder_sparse_step=1, rope_scaling=None)
    qwen |= dict(use_sliding_window=False, sliding_window=None, max_window_layers=48)
    olmoe = shared | dict(model_type="olmoe", hidden_size=2048, intermediate_size=1024, num_hidden_layers=16)
    olmoe |= dict(num_attention_heads=16, num_key_value_heads=16, num_experts=64, num_experts_per_tok=8, clip_qkv=None)
    olmoe |= dict(
        vocab_size=50304, rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=4096, norm_topk_prob=False
    )
    for name, hf in {"mixtral-8x7b": mixtral, "qwen3-30b-a3b": qwen, "olmoe-1b-7b": olmoe}.items():
        assert differences(presets()[name].model, read_config(hf)) == []
        found, _ = divide(next(a for a in ARCHITECTURES if a.model_type == hf["model_type"]), read_config(hf), ())
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
    llama |= dict(num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, rms_norm_eps=1e-5, rope_theta=5e5)
    llama |= dict(max_position_embeddings=131072, rope_scaling=scaling | dict(original_max_position_embeddings=8192))
    cfg = read_config(llama)
    assert cfg.rope == RopeConfig(5e5, 131072, "llama3", 8.0, 8192) and cfg.head_dim == 128 and cfg.dense_layers == 32


def broken(hf_dir: Path):
    """Three wrongs of three kinds."""
    file = hf_dir / "model.safetensors"
    tensors = load_file(file)
    missing = next(name for name in tensors if name.endswith("experts.3.up_proj.weight"))
    bent = next(name for name in tensors if name.endswith("q_proj.weight"))
    del tensors[missing]
    tensors[bent] = tensors[bent][:-1].contiguous()
    tensors["model.surprise"] = torch.zeros(2)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    save_file(tensors, file, {"format": "pt"})
    return [missing, bent, "model.surprise", "model.norm.weight"]


def test_every_wrong_tensor_is_listed(tmp_path):
    hf_dir = saved(tmp_path / "hf", "qwen3_moe")
    names = broken(hf_dir)
    with pytest.raises(MismatchError) as error:
        import_hf(hf_dir, tmp_path / "step")
    lines = str(error.value).splitlines()
    assert "4 differences" in lines[0] and len(lines) == 5
    for name, word in zip(names, ("missing", "shape (31, 16)", "no such tensor", "F64"), strict=True):
        assert any(name in line and word in line for line in lines), (name, lines)
    assert {p.name for p in tmp_path.iterdir()} == {"hf"}


def test_every_wrong_setting_is_listed(tmp_path):
    hf_dir = saved(tmp_path / "hf", "qwen3_moe")
    config = json.loads((hf_dir / "config.json").read_text())
    config |= dict(hidden_act="gelu", attention_bias=True, mlp_only_layers=[0, 2], num_hidden_layers=6)
    config |= dict(rope_parameters=dict(rope_type="dynamic"), num_experts_per_tok=None)
    (hf_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="5 problems") as error:
        import_hf(hf_dir, tmp_path / "step")
    for word in ("hidden_act='gelu'", "attention_bias=True", "every n-th", "'dynamic'", "num_experts_per_tok: missing"):
        assert word in str(error.value)
    (hf_dir / "config.json").write_text(json.dumps(config | dict(model_type="gemma")))
    with pytest.raises(
        ConfigError, match="'gemma' has no table entry; there are: llama, qwen3, mixtral, qwen3_moe, olmoe"
    ):
        import_hf(hf_dir, tmp_path / "step")
    assert {p.name for p in tmp_path.iterdir()} == {"hf"}


def test_a_tied_head_of_its_own_is_refused(tmp_path):
    hf_dir = saved(tmp_path / "hf", "qwen3, tied, yarn")
    tensors = load_file(hf_dir / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.randn(31, 16)}, hf_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(MismatchError, match=r"differs from model\.embed_tokens"):
        import_hf(hf_dir, tmp_path / "step")
    model = Transformer(
        read_config(Folder(hf_dir).config)
    )  # nothing has to go back from a direct start: as transformers does
    load_hf(hf_dir, model.named_parameters(), model.cfg)
    assert torch.equal(model.embedding.weight, tensors["model.embed_tokens.weight"])


def test_damage_is_named(tmp_path):
    hf_dir = saved(tmp_path / "hf", "olmoe", files=3)
    victim = sorted(hf_dir.glob("*.safetensors"))[1]
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-8])
    with pytest.raises(Exception, match=f"{victim.name}: damaged"):
        import_hf(hf_dir, tmp_path / "step")
    victim.unlink()
    with pytest.raises(Exception, match=f"{victim.name}: missing"):
        import_hf(hf_dir, tmp_path / "step")
    victim.write_bytes(whole)
    import_hf(hf_dir, tmp_path / "step")
    content = make("olmoe").model.norm.weight.detach().numpy().tobytes()
    shard = next(f for f in (tmp_path / "step").glob("*.distcp") if content in f.read_bytes())
    raw = bytearray(shard.read_bytes())
    raw[raw.index(content) + 5] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(Exception, match=r"damaged: SHA-256"):
        export_hf(tmp_path / "step", tmp_path / "back")
    assert {p.name for p in tmp_path.iterdir()} == {"hf", "step"}


def test_nothing_is_overwritten_and_space_is_counted(tmp_path, monkeypatch):
    hf_dir = saved(tmp_path / "hf", "llama")
    import_hf(hf_dir, tmp_path / "step")
    with pytest.raises(Exception, match="exists already"):
        import_hf(hf_dir, tmp_path / "step")
    with pytest.raises(Exception, match="exists already"):
        export_hf(tmp_path / "step", hf_dir)
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, 9000))
    for attempt in (
        lambda: import_hf(hf_dir, tmp_path / "new"),
        lambda: export_hf(tmp_path / "step", tmp_path / "new"),
    ):
        with pytest.raises(Exception, match=r"needs .* has .*9000\) free"):
            attempt()
    monkeypatch.undo()
    import_hf(hf_dir, tmp_path / "new", dry_run=True)
    export_hf(tmp_path / "step", tmp_path / "new", dry_run=True)
    assert {p.name for p in tmp_path.iterdir()} == {"hf", "step"}


def train_and_save(folder: Path, cfg: ModelConfig, model: Transformer, **config) -> Path:
    """What train.py leaves after a step: other weights, its own settings, nothing of Hugging Face's."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.01)
    info = dict(config=dict(model=asdict(cfg)) | config)
    checkpoints = Checkpoints(folder, keep=1, mode="sync", info=info)
    tensors = {f"model.{n}": p for n, p in model.named_parameters()}
    checkpoints.save(1, tensors | {"optim.x": torch.zeros(3)}, dict(step=1, tokens=9), {})
    return folder / "step-1"


@pytest.mark.parametrize("start", ["step", "hf", "like"])
def test_fine_tuned_model_goes_back_to_its_layout(tmp_path, start):
    hf_dir = saved(tmp_path / "hf", "mixtral", torch.bfloat16, files=3)
    import_hf(hf_dir, tmp_path / "step")
    model = load_step(tmp_path / "step")
    init = {} if start == "like" else dict(init=str(tmp_path / start))
    step = train_and_save(tmp_path / "run", model.cfg, model, **init)
    export_hf(step, tmp_path / "back", like=hf_dir if start == "like" else None)
    assert others_of(tmp_path / "back") == others_of(hf_dir)
    assert {n: t.dtype for n, t in tensors_of(tmp_path / "back").items()} == {
        n: t.dtype for n, t in tensors_of(hf_dir).items()
    }
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    x = torch.randint(31, (2, 20))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    assert far(theirs(x).logits, model(x)) < 1e-5
    if start == "hf":
        shutil.move(hf_dir, tmp_path / "away")
        with pytest.raises(Exception, match="which is not there; name the original with --like"):
            export_hf(step, tmp_path / "again")
        wide = replace(model.cfg, norm_eps=1e-3)
        other = train_and_save(tmp_path / "other", wide, Transformer(wide))
        with pytest.raises(MismatchError, match=r"model.norm_eps: 0.001 here, 1e-05 there"):
            export_hf(other, tmp_path / "again", like=tmp_path / "away")


@pytest.mark.parametrize("scaling", ["none", "llama3", "yarn"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "qwen3_moe", "olmoe"])
def test_trained_here_gets_a_config(tmp_path, monkeypatch, kind, scaling):
    """config.json is made from the settings, by the table backwards; transformers computes the same."""
    base = dict(vocab=31, dim=16, layers=3, heads=4, kv_heads=2, head_dim=4, ffn_dim=10, norm_eps=1e-5)
    rope = RopeConfig(
        theta=3e4, max_seq=256, scaling=scaling, factor=1.0 if scaling == "none" else 4, original_max_seq=64
    )
    moe = MoEConfig(
        experts=4,
        top_k=2,
        ffn_dim=8,
        renormalize=kind not in ("olmoe", "mixtral"),
        softmax="after" if kind == "mixtral" else "before",
        balance="none",
        z_coeff=0,
    )
    qk = dict(qwen3="head", qwen3_moe="head", olmoe="full").get(kind, "none")
    dense = dict(llama=3, qwen3=3, qwen3_moe=1).get(kind, 0)
    cfg = ModelConfig(**base, qk_norm=qk, dense_layers=dense, rope=rope, moe=moe)
    model = Transformer(cfg)
    step = train_and_save(tmp_path / "run", cfg, model)
    monkeypatch.setattr("tmoe.hf_export.SHARD", 4000)
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


def test_resharded_import_goes_back(tmp_path):
    hf_dir = saved(tmp_path / "hf", "qwen3_moe", torch.bfloat16, files=2)
    import_hf(hf_dir, tmp_path / "step")
    rewrite(plan_reshard(tmp_path / "step", world=6, ep=3), tmp_path / "other")
    export_hf(tmp_path / "other", tmp_path / "back")
    assert_bits(tensors_of(tmp_path / "back"), tensors_of(hf_dir))
    assert files_of(tmp_path / "back") == files_of(hf_dir)


def test_every_difference_between_step_and_original_is_listed(tmp_path):
    hf_dir = saved(tmp_path / "hf", "qwen3_moe")
    import_hf(hf_dir, tmp_path / "step")
    names = broken(hf_dir)
    config = json.loads((hf_dir / "config.json").read_text())
    (hf_dir / "config.json").write_text(json.dumps(config | dict(vocab_size=40, rms_norm_eps=1e-3)))
    with pytest.raises(MismatchError) as error:
        export_hf(tmp_path / "step", tmp_path / "back", like=hf_dir)
    lines = str(error.value).splitlines()
    wrong = (
        names[0],
        names[2],
        names[3],
        "model.embedding.weight: shape",
        "model.head.weight: shape",
        "norm_eps",
        "model.vocab",
    )
    assert len(lines) == 1 + len(wrong)
    assert all(sum(word in line for line in lines) == 1 for word in wrong), lines
    assert {p.name for p in tmp_path.iterdir()} == {"hf", "step"}


def test_a_model_that_no_architecture_computes():
    cfg = presets()["tiny"].model
    assert write_config(cfg, "float32")["model_type"] == "qwen3_moe"
    for odd in (replace(cfg, moe=replace(cfg.moe, shared_dim=8)), replace(cfg, moe=replace(cfg.moe, scaling=2.0))):
        with pytest.raises(ConfigError, match="none of llama, qwen3, mixtral, qwen3_moe, olmoe computes"):
            write_config(odd, "float32")


def test_transposed_parts(tmp_path, monkeypatch):
    """An architecture that stores x W instead of W x, all experts of a layer in one tensor: gpt-oss and others do."""
    hf_dir = saved(tmp_path / "hf", "qwen3_moe")
    import_hf(hf_dir, tmp_path / "plain")
    tensors, fused = load_file(hf_dir / "model.safetensors"), {}
    for layer in range(2):
        names = [f"model.layers.{layer}.mlp.experts.{e}.down_proj.weight" for e in range(6)]
        fused[f"model.layers.{layer}.mlp.down"] = torch.stack([tensors.pop(n).T for n in names])
    save_file(tensors | fused, hf_dir / "model.safetensors", {"format": "pt"})
    entry = next(a for a in ARCHITECTURES if a.model_type == "qwen3_moe")
    down = Rule("blocks.{layer}.moe.experts.down", (Part("model.layers.{layer}.mlp.down", transposed=True),))
    other = replace(entry, rules=(down, *(rule for rule in entry.rules if rule.ours != down.ours)))
    for module in ("hf", "hf_config", "hf_export"):
        monkeypatch.setattr(f"tmoe.{module}.architecture", lambda hf: other)
    import_hf(hf_dir, tmp_path / "step", world=5)
    assert_bits(load_step(tmp_path / "step").state_dict(), load_step(tmp_path / "plain").state_dict())
    export_hf(tmp_path / "step", tmp_path / "back")
    assert_bits(tensors_of(tmp_path / "back"), tensors_of(hf_dir))


def test_files_are_cut_like_transformers_does():
    layout = split({"a": (10,), "b": (30,), "c": (200,), "d": (1,)}, "F32", 160)
    assert [list(group) for group in layout.values()] == [["a", "b"], ["c"], ["d"]]
    assert list(layout)[1] == "model-00002-of-00003.safetensors"


def test_which_folder_is_hugging_faces(tmp_path):
    hf_dir = saved(tmp_path / "hf", "llama")
    import_hf(hf_dir, tmp_path / "step")
    (tmp_path / "config.json").write_text('{"steps": 3}')
    assert is_folder(hf_dir) and not is_folder(tmp_path / "step") and not is_folder(tmp_path)


def peak(rank: int, world: int, folder: Path) -> list[int]:
    """Bytes by which the largest resident size grows in an import and in the export of what came."""
    found = []
    for size in ("small", "large"):  # the small model's round loads code and warms allocators
        for convert, source, target in ((import_hf, "hf", "step"), (export_hf, "step", "back")):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            convert(folder / size / source, folder / size / target)
            found.append(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
    return found[2:]


def test_memory_is_that_of_a_few_tensors(gloo, tmp_path):
    """32 layers, 76 MB in files of 24 MB, no tensor above 1 MB; beside them the first 4 layers alone."""
    sizes = SIZES | dict(hidden_size=256, num_attention_heads=4, head_dim=64, intermediate_size=512)
    for name, layers in (("small", 4), ("large", 32)):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes | dict(num_hidden_layers=layers)))
        model.save_pretrained(tmp_path / name / "hf", max_shard_size="24MB")
    for growth in gloo(1, peak, tmp_path)[0]:
        assert growth < 12e6, f"{growth / 1e6:.1f} MB"


def test_command_line(tmp_path, capsys):
    hf_dir = saved(tmp_path / "hf", "olmoe")
    main(["import", str(hf_dir), str(tmp_path / "step"), "--world", "4", "--ep", "2"])
    assert read_manifest(tmp_path / "step").world == 4
    main(["export", str(tmp_path / "step"), str(tmp_path / "back")])
    assert_bits(tensors_of(tmp_path / "back"), tensors_of(hf_dir))
    assert "OlmoeForCausalLM; written" in capsys.readouterr().out
    assert {p.name for p in tmp_path.iterdir()} == {"hf", "step", "back"}
    with pytest.raises(SystemExit, match=r"error: .*back: exists already"):
        main(["export", str(tmp_path / "step"), str(tmp_path / "back")])
    with pytest.raises(SystemExit, match=r"error: --ep=4: must divide the 6 experts"):
        main(["import", str(hf_dir), str(tmp_path / "other"), "--world", "4", "--ep", "4"])


# ---- the whole way ----


def test_train_from_an_import_and_export(gloo, tmp_path):
    """`train.py tiny --init STEP` on two ranks starts from theirs; its checkpoint goes back and computes what the run ended with."""
    cfg = parse([*SMALL, "--out", "x"], "", rank=0, world=1)
    hf_dir = tmp_path / "hf"
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**write_config(cfg.model, "float32"))).eval()
    theirs.save_pretrained(hf_dir)
    import_hf(hf_dir, tmp_path / "step")
    flags = [
        *SMALL,
        "--out",
        str(tmp_path / "run"),
        "--init",
        str(tmp_path / "step"),
        "--steps",
        "2",
        "--parallel.ep",
        "2",
    ]
    final = gloo(2, run, [*flags, "--checkpoint.mode", "sync"])[0]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    export_hf(tmp_path / "run" / "checkpoints" / "step-2", tmp_path / "back")
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    x = torch.randint(256, (2, 30))
    model = Transformer(cfg.model)
    model.load_state_dict({n.removeprefix("model."): t for n, t in final.items() if n.startswith("model.")})
    assert far(tuned(x).logits, model(x)) < 1e-5 < far(theirs(x).logits, model(x)) < 0.5


# ---- direct start ----


def start(rank: int, world: int, ep: int, folders: dict[Path, ModelConfig]):
    """Full tensors of each model on every rank, after saving them as training would."""
    mesh, found = build_mesh(ep=ep), []
    for hf_dir, cfg in folders.items():
        with torch.device("meta"):
            model = Transformer(cfg)
        parallelize(model, mesh)
        model.to_empty(device="cpu")
        load_hf(hf_dir, model.named_parameters(), cfg)
        info = dict(config=dict(model=asdict(cfg), init=str(hf_dir)))
        checkpoints = Checkpoints(hf_dir.with_name(f"{hf_dir.name}-run"), keep=1, mode="sync", info=info)
        checkpoints.save(1, {f"model.{n}": p for n, p in model.named_parameters()}, dict(step=1, tokens=1), {})
        found.append({name: p.full_tensor() for name, p in model.named_parameters()})
    return found


@pytest.mark.parametrize(("world", "ep"), [(1, 1), (2, 2), (4, 2)])
def test_direct_start_on_any_layout(gloo, tmp_path, world, ep):
    """Each rank's slices are right, and what the ranks save goes back to the folder bit for bit."""
    names = ["mixtral, tied, wide heads", "qwen3_moe, leading dense"]
    folders = [saved(tmp_path / f"hf-{i}", name, torch.bfloat16, files=2) for i, name in enumerate(names)]
    want = []
    for folder in folders:
        import_hf(folder, Path(f"{folder}-step"))
        want.append(load_step(Path(f"{folder}-step")))
    configs = {folder: model.cfg for folder, model in zip(folders, want, strict=True)}
    for found in gloo(world, start, ep, configs):
        for got, model in zip(found, want, strict=True):
            assert_bits(got, dict(model.named_parameters()))
    for folder in folders:
        export_hf(Path(f"{folder}-run/step-1"), Path(f"{folder}-back"))
        assert_bits(tensors_of(Path(f"{folder}-back")), tensors_of(folder))


def refused(rank: int, world: int, hf_dir: Path, cfg: ModelConfig):
    if rank:
        hf_dir = hf_dir.with_name("broken")
    model = Transformer(cfg)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises((ValueError, Exception)) as error:
        load_hf(hf_dir, model.named_parameters(), cfg)
    return str(error.value), all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_direct_start_is_refused_on_every_rank(gloo, tmp_path):
    hf_dir = saved(tmp_path / "hf", "qwen3_moe")
    cfg = read_config(Folder(hf_dir).config)
    shutil.copytree(hf_dir, tmp_path / "broken")
    names = broken(tmp_path / "broken")
    for message, untouched in gloo(2, refused, hf_dir, cfg):
        assert all(name in message for name in names) and untouched
    other = replace(cfg, qk_norm="none", moe=replace(cfg.moe, top_k=3, renormalize=False), rope=RopeConfig(theta=7.0))
    with pytest.raises(MismatchError, match="4 differences") as error:
        load_hf(hf_dir, Transformer(other).named_parameters(), other)
    for word in ("model.qk_norm: 'none' here", "moe.top_k: 3 here, 2 there", "moe.renormalize", "rope.theta: 7.0"):
        assert word in str(error.value)


# ---- swapped experts ----


def losses_and_gradients(model, x, mask=None):
    router = {} if model.config.model_type.startswith("deepseek") else dict(output_router_logits=True)
    out = model(x, labels=x, attention_mask=mask, **router)
    out.loss.backward()
    return out, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", [*SPARSE, *FOREIGN])
def test_swapped_model_is_the_same_function(tmp_path, name):
    theirs = make(name)
    ours = swap_experts(copy.deepcopy(theirs))
    assert sum(isinstance(m, SwappedExperts) for m in ours.modules()) == 2
    x = torch.randint(31, (3, 20))
    mask = torch.ones_like(x)
    mask[1, 13:] = 0
    (a, want), (b, got) = losses_and_gradients(theirs, x, mask), losses_and_gradients(ours, x, mask)
    assert far(b.logits, a.logits) < 1e-5
    assert b.loss.item() == pytest.approx(a.loss.item(), rel=1e-5)
    if "deepseek" not in name:  # their classes have no auxiliary loss
        assert b.aux_loss.item() == pytest.approx(a.aux_loss.item(), rel=1e-5) and a.aux_loss > 0
        for one, other in zip(b.router_logits, a.router_logits, strict=True):
            assert far(one, other) < 1e-5
    assert got.keys() == want.keys()
    assert max(far(got[key], want[key]) for key in want if want[key] is not None) < 1e-5
    assert_bits(ours.state_dict(), theirs.state_dict())
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    assert_bits(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs"))
    fresh = swap_experts(AutoModelForCausalLM.from_config((MODELS | FOREIGN)[name]()))
    fresh.load_state_dict(theirs.state_dict())
    assert torch.equal(fresh.eval()(x).logits, ours(x).logits)


def test_swap_keeps_parameters_that_an_optimizer_holds():
    model = make("mixtral")
    before = dict(model.named_parameters())
    swap_experts(model)
    assert all(before[name] is p for name, p in model.named_parameters())


@pytest.mark.parametrize("name", ["mixtral", "olmoe"])
def test_plain_loop_trains_it_alike(name):
    def losses(model):
        optimizer, found = torch.optim.AdamW(model.parameters(), 3e-3, eps=1e-4), []
        draw = torch.Generator().manual_seed(3)
        for _ in range(4):
            x = torch.randint(8, (4, 16), generator=draw)
            loss = model(x, labels=x, output_router_logits=True).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    want = losses(make(name).train())
    assert losses(swap_experts(make(name)).train()) == pytest.approx(want, rel=1e-5) and want[-1] < want[0]


def test_trainer_trains_it_alike(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    draw = torch.Generator().manual_seed(3)
    data = [dict(input_ids=x, labels=x) for x in torch.randint(8, (16, 16), generator=draw)]

    def losses(model, out):
        args = TrainingArguments(
            out, max_steps=4, per_device_train_batch_size=4, learning_rate=3e-3, use_cpu=True, logging_steps=1,
            report_to=[], save_steps=4, adam_epsilon=1e-4, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, args, train_dataset=data)
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    want = losses(make("qwen3_moe"), tmp_path / "theirs")
    ours = swap_experts(make("qwen3_moe"))
    assert losses(ours, tmp_path / "ours") == pytest.approx(want, rel=1e-5) and len(want) == 4 and want[-1] < want[0]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / "checkpoint-4")
    assert_bits(again.state_dict(), ours.state_dict())


def test_swapped_under_autocast():
    """The op runs in bf16 as F.linear would: near to what the loop over experts gives, and exactly typed."""
    theirs = make("qwen3_moe")
    ours = swap_experts(copy.deepcopy(theirs))
    x = torch.randint(31, (2, 20))
    with torch.autocast("cpu", torch.bfloat16):
        a, b = theirs(x).logits, ours(x).logits
    assert a.dtype == b.dtype and far(b, a) < 0.05
    exact = theirs(x).logits
    assert far(b, exact) < 1.5 * far(a, exact) + 1e-3


def spread(rank: int, world: int, ep: int, names: list[str]):
    """Distances of spread experts' logits and gradients, of the mean loss over all ranks' tokens, from one whole model's."""
    mesh, found = build_mesh(ep=ep), {}
    x = torch.randint(31, (2 * world, 20), generator=torch.Generator().manual_seed(5))
    mine = slice(2 * rank, 2 * rank + 2)
    for name in names:
        theirs = make(name)
        ours = parallelize(swap_experts(copy.deepcopy(theirs), mesh), mesh)
        logits = ours(x[mine]).logits
        (F.cross_entropy(logits.flatten(0, 1), x[mine].flatten()) / world).backward()
        out = theirs(x).logits
        F.cross_entropy(out.flatten(0, 1), x.flatten()).backward()
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        found[name] = dict(
            state={key: tensor.full_tensor() for key, tensor in ours.state_dict().items()},
            held=ours.model.layers[-1].mlp.experts.gate_up_proj.to_local().numel(),
            logits=far(logits, out[mine]),
            gradients=max(far(p.grad.full_tensor(), q.grad) for p, q in pairs),
        )
    return found


@pytest.mark.parametrize(("world", "ep"), [(2, 2), (4, 2)])
def test_swapped_and_spread(gloo, world, ep):
    for ranks in gloo(world, spread, ep, SPARSE):
        for name, found in ranks.items():
            assert found["logits"] < 1e-5 and found["gradients"] < 1e-5, name
            want = make(name).state_dict()
            assert_bits(found["state"], want)
            assert found["held"] * world == want["model.layers.1.mlp.experts.gate_up_proj"].numel(), name


def test_swap_refuses_what_it_does_not_compute():
    model = AutoModelForCausalLM.from_config(MODELS["llama"]())
    with pytest.raises(ConfigError, match="model_type 'llama'; there are table entries for mixtral, qwen2_moe"):
        swap_experts(model)
    model = AutoModelForCausalLM.from_config(MixtralConfig(**SIZES, num_local_experts=4, hidden_act="gelu"))
    with pytest.raises(ConfigError, match="hidden_act='gelu'"):
        swap_experts(model)
    model = swap_experts(make("mixtral"))
    with pytest.raises(ConfigError, match="no module"):
        swap_experts(model)
