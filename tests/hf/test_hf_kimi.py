"""Kimi K2.5's text part, alone and in a whole folder; and Kimi's experts in int4, read as their values.

next: tmoe/hf/packed.py
"""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from hf_tiny import assert_bits, far, files_of, gradients_by_their_names, load_step, tensors_of
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, Kimi_K25Config, Kimi_K25ForConditionalGeneration

from tmoe.checkpoint.errors import MismatchError
from tmoe.config.check import ConfigError
from tmoe.hf import export_hf, import_hf, load_hf
from tmoe.hf.compressed import compressed
from tmoe.hf.config import read_config, write_config
from tmoe.hf.files import Folder, settings_of
from tmoe.model.transformer import Transformer

TEXT = dict(vocab_size=31, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4)
TEXT |= dict(intermediate_size=12, moe_intermediate_size=16, n_routed_experts=6, num_experts_per_tok=2)
TEXT |= dict(q_lora_rank=6, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
TEXT |= dict(first_k_dense_replace=1, n_group=1, topk_group=1, routed_scaling_factor=2.8, n_shared_experts=1)
TEXT |= dict(max_position_embeddings=128, tie_word_embeddings=False)
VISION = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, patch_size=2)
VISION |= dict(pos_emb_height=4, pos_emb_width=4)
SIZE = 8  # values of an expert's row that share a factor
GROUP = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=SIZE, actorder=None)
METHOD = dict(quant_method="compressed-tensors", format="pack-quantized")
METHOD |= dict(config_groups=dict(group_0=dict(targets=["Linear"], weights=GROUP)))


def made():
    """transformers' model with large weights, the same at each call."""
    text = DeepseekV3Config(**TEXT)
    config = Kimi_K25Config(
        text_config=text, vision_config=VISION, projection_hidden_size=16, tie_word_embeddings=False
    )
    torch.manual_seed(7)
    how = dict(attn_implementation="eager", experts_implementation="eager")
    model = Kimi_K25ForConditionalGeneration._from_config(config, **how)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.3)
        for key, buffer in model.named_buffers():
            if "e_score_correction_bias" in key:
                buffer.normal_(0.0, 0.3)
    return model.eval()


def saved(model, folder) -> dict[str, torch.Tensor]:
    """Saves the model under the names that Moonshot publishes; transformers 5.23 writes some otherwise."""
    model.save_pretrained(folder)
    names = {
        "language_model.model.blocks.": "language_model.model.layers.",
        "model.mm_projector.": "mm_projector.",
    }
    names |= {"vision_tower.encoder.patch_embed.": "vision_tower.patch_embed."}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        start = next((start for start in names if name.startswith(start)), "")
        tensors[names.get(start, "") + name.removeprefix(start)] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


def edit(folder, inside=None, **changes):
    """config.json with these keys, and those of `inside` in its text_config."""
    config = json.loads((folder / "config.json").read_text()) | changes
    config["text_config"] |= inside or {}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    """The published config: the text's model_type is kimi_k2, and the class has Moonshot's name."""
    folder = tmp_path_factory.mktemp("kimi") / "hf"
    saved(made(), folder)
    edit(folder, dict(model_type="kimi_k2"), architectures=["KimiK25ForConditionalGeneration"])
    (folder / "tiktoken.model").write_bytes(b"AA== 0\n")
    return folder


def test_the_text_part_is_the_same_function_and_the_rest_is_carried(tmp_path, hf_dir):
    names = tensors_of(hf_dir).keys()
    parts = ("language_model.model.", "language_model.lm_head.", "vision_tower.", "mm_projector.")
    assert all(name.startswith(parts) for name in names)
    assert "language_model.model.layers.1.mlp.experts.5.up_proj.weight" in names
    import_hf(hf_dir, tmp_path / "step")
    model, theirs = load_step(tmp_path / "step"), made()
    x, targets = torch.randint(31, (2, 3, 40))
    logits = theirs(input_ids=x).logits
    assert far(model(x), logits) < 1e-5
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    model(x, targets).backward()
    for p in theirs.parameters():
        p.data = torch.zeros_like(p) if p.grad is None else p.grad
    want = {n: g for n, g in saved(theirs, tmp_path / "gradients").items() if n.startswith("language_model.")}
    want = {n: g for n, g in want.items() if not n.endswith("e_score_correction_bias")}
    got = gradients_by_their_names(model, json.loads((hf_dir / "config.json").read_text()))
    assert got.keys() == want.keys()
    for key, gradient in want.items():
        assert far(got[key], gradient) < 1e-5 or (gradient.norm() == 0 and got[key].norm() == 0), key

    export_hf(tmp_path / "step", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(hf_dir)
    again = Kimi_K25ForConditionalGeneration.from_pretrained(tmp_path / "back")
    assert far(again(input_ids=x).logits, logits) < 1e-6
    # without an original the rest of the model is not there
    assert write_config(model.cfg, "float32")["model_type"] == "deepseek_v3"


def test_what_is_not_computed_is_named(tmp_path, hf_dir):
    config = json.loads((hf_dir / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"text_config=\[\]: must be an object"):
        read_config(config | dict(text_config=[]))
    inner = config["text_config"] | dict(model_type="kimi_linear")
    with pytest.raises(ConfigError, match=r"model_type='kimi_linear': only \('kimi_k2', 'deepseek_v3'"):
        read_config(config | dict(text_config=inner))
    folder = shutil.copytree(hf_dir, tmp_path / "hf")
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"audio_tower.weight": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(MismatchError, match=r"audio_tower\.weight: kimi_k25 has no such tensor"):
        import_hf(folder, tmp_path / "step")


def packed(values: torch.Tensor) -> torch.Tensor:
    """Eight numbers from -8 to 7 in an int32, by Python's own integers, the first in the lowest bits."""
    words = [
        [sum((value + 8) << (4 * i) for i, value in enumerate(row[j : j + 8])) for j in range(0, len(row), 8)]
        for row in values.tolist()
    ]
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)  # the upper half wraps to negative numbers


@pytest.fixture(scope="module")
def quantised(tmp_path_factory, hf_dir):
    """A folder in bf16 with experts in int4, and the tensors that they stand for."""
    folder = shutil.copytree(hf_dir, tmp_path_factory.mktemp("int4") / "hf")
    tensors = {name: t.bfloat16() for name, t in load_file(folder / "model.safetensors").items()}
    values = dict(tensors)
    draw = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if ".mlp.experts." in name]:
        M, W = tensors.pop(name).shape
        numbers = torch.randint(-8, 8, (M, W), generator=draw)
        scale = torch.rand(M, W // SIZE, generator=draw).bfloat16()
        tensors |= {f"{name}_packed": packed(numbers), f"{name}_scale": scale}
        tensors[f"{name}_shape"] = torch.tensor([M, W])
        # the product in bf16, as compressed-tensors makes it
        values[name] = (numbers.bfloat16().view(M, -1, SIZE) * scale[..., None]).view(M, W)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit(folder, dict(quantization_config=METHOD), dtype="bfloat16")
    return folder, values


def test_int4_is_read_as_its_values(tmp_path, quantised, capsys):
    hf_dir, want = quantised
    import_hf(hf_dir, tmp_path / "step", world=6, ep=2)
    assert "compressed-tensors tensors are read as the 16-bit values" in capsys.readouterr().out
    cfg = read_config(Folder(hf_dir).config)
    assert read_config(settings_of(hf_dir)) == cfg
    model = Transformer(cfg)
    load_hf(hf_dir, model.state_dict(), cfg)
    assert_bits(model.state_dict(), load_step(tmp_path / "step").state_dict())
    export_hf(tmp_path / "step", tmp_path / "back")
    assert_bits(tensors_of(tmp_path / "back"), want)
    config = json.loads((hf_dir / "config.json").read_text())
    del config["text_config"]["quantization_config"]
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


def test_int4_boxes_may_begin_anywhere():
    """Every one of sixteen numbers, and boxes across words and groups."""
    numbers = torch.arange(64).view(2, 32) * 5 % 16 - 8
    scale = torch.tensor([[1.0, 0.5, 3.0, 0.25], [2.0, 1.5, 0.125, 8.0]])
    want = numbers * scale.repeat_interleave(8, 1)
    files = {"a.weight_packed": packed(numbers), "a.weight_scale": scale}
    files["a.weight_shape"] = torch.tensor([2, 32])
    kinds = dict(zip(files, ("I32", "F32", "I64"), strict=True))
    view = compressed({name: tuple(t.shape) for name, t in files.items()}, kinds, METHOD).views["a.weight"]
    for box in ((slice(0, 2), slice(0, 32)), (slice(1, 2), slice(3, 29)), (slice(0, 1), slice(9, 12))):
        assert torch.equal(view.read(lambda name, where: files[name][where], box), want[box])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            METHOD | dict(format="marlin-24"),
            "config_groups.group_0: format='marlin-24': only 'pack-quantized'",
        ),
        (METHOD | dict(config_groups={}), "config_groups={}: one with weights is read"),
        (METHOD | dict(transform_config=dict(a=1)), "transform_config={'a': 1}: only None or {} is read"),
        (
            METHOD | dict(sparsity_config=dict(format="sparse-24")),
            "sparsity_config={'format': 'sparse-24'}: only",
        ),
        (METHOD | dict(config_groups=dict(W4A16=["Linear"])), "config_groups.W4A16=['Linear']: targets and"),
        (
            dict(num_bits=3),
            "group_0: num_bits=3: only 2 or 4 or 8 is read; take the published folder of 16-bit",
        ),
        (dict(type="float"), "type='float': only 'int' is read"),
        (dict(strategy="token"), "strategy='token': only 'group' or 'channel' or 'tensor' is read"),
        (dict(actorder="group"), "actorder='group': only None or False"),
        (dict(group_size=0), "group_size=0: must be above 0"),
        (dict(quant_method="awq"), "quantization_config: quant_method='awq': only fp8 in blocks"),
    ],
)
def test_other_packing_is_refused_by_name(tmp_path, quantised, wrong, says):
    folder = shutil.copytree(quantised[0], tmp_path / "hf")
    inner = METHOD | dict(config_groups=dict(group_0=dict(weights=GROUP | wrong)))
    method = wrong if {"format", "quant_method"} & wrong.keys() else inner
    edit(folder, dict(quantization_config=method))
    with pytest.raises(ConfigError) as error:
        import_hf(folder, tmp_path / "step")
    assert says in str(error.value)


def test_int4_that_does_not_fit_is_listed(tmp_path, quantised):
    folder = shutil.copytree(quantised[0], tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    a, b, c = (f"language_model.model.layers.1.mlp.experts.{i}.up_proj.weight" for i in range(3))
    del tensors[f"{a}_scale"]
    tensors[f"{b}_scale"] = tensors[f"{b}_scale"][:, :-1].contiguous()
    tensors[f"{c}_packed"] = tensors[f"{c}_packed"].float()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(MismatchError, match="3 differences") as error:
        import_hf(folder, tmp_path / "step")
    for line in (
        f"{a}_scale: missing, but {a}_packed is there",
        f"{b}_scale: shape (16, 3), must be a factor for 8 values of a row",
        f"{c}_packed: F32; valid are I32",
    ):
        assert line in str(error.value)
