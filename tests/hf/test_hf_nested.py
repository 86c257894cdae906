"""The text part of a model that sees: trained alone, with everything else carried to the last byte."""

import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from hf_tiny import SIZES, assert_bits, far, files_of, gradients_by_their_names, load_step, tensors_of
from safetensors.torch import load_file, save_file
from tiers import slow_but
from transformers import (
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from tmoe.checkpoint.errors import MismatchError
from tmoe.config.check import ConfigError
from tmoe.config.model import ModelConfig, MoEConfig
from tmoe.hf import export_hf, import_hf, load_hf
from tmoe.hf.config import architecture, read_config, write_config
from tmoe.hf.rules import held_by_shape
from tmoe.model.transformer import Transformer

TEXT = dict(num_experts_per_tok=2, moe_intermediate_size=10, head_dim=8, num_hidden_layers=3)
TEXT |= dict(attention_bias=True)
MROPE = dict(rope_type="default", rope_theta=5e4, mrope_section=[2, 1, 1])
VISION = dict(depth=2, hidden_size=8, intermediate_size=12, num_heads=2, out_hidden_size=16, patch_size=2)
VISION |= dict(spatial_merge_size=2)
FAMILIES = {
    "qwen3_vl_moe": (
        Qwen3VLMoeConfig,
        Qwen3VLMoeForConditionalGeneration,
        dict(num_experts=6, mlp_only_layers=[1], rope_parameters=MROPE | dict(mrope_interleaved=True)),
        dict(num_position_embeddings=16, deepstack_visual_indexes=[0]),
    ),
    "glm4v_moe": (
        Glm4vMoeConfig,
        Glm4vMoeForConditionalGeneration,
        dict(
            n_routed_experts=6,
            first_k_dense_replace=1,
            rope_parameters=MROPE | dict(mrope_section=[1, 1, 0], partial_rotary_factor=0.5),
        ),
        dict(image_size=8),
    ),
}


def made(name: str):
    """transformers' model with large weights, the same at each call."""
    config_class, model_class, more, seen = FAMILIES[name]
    text = {key: value for key, value in SIZES.items() if not key.endswith("implementation")}
    config = config_class(text_config=text | TEXT | more, vision_config=VISION | seen)
    torch.manual_seed(7)
    how = dict(attn_implementation="eager", experts_implementation="eager")
    model = model_class._from_config(config, **how)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.3)
        for key, buffer in model.named_buffers():
            if "e_score_correction_bias" in key:
                buffer.normal_(0.0, 0.3)
    return model.eval()


def as_published(folder, part: str = ""):
    """Turns stacked experts round: transformers 5 reads either way and writes its own.

    part: of the names of those to turn, others stay.
    """
    file = folder / "model.safetensors"
    tensors = load_file(file)
    stacked = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
    turned = {name: t for name, t in tensors.items() if name.endswith(stacked) and part in name}
    save_file(tensors | {name: t.mT.contiguous() for name, t in turned.items()}, file, {"format": "pt"})


def published(folder, name: str):
    """The folder with such a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made(name).save_pretrained(folder)
    as_published(folder)
    config = json.loads((folder / "config.json").read_text()) | dict(dtype="float32")
    for part in ("text_config", "vision_config"):
        config[part] |= dict(dtype="float32")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    return published(tmp_path_factory.mktemp("nested") / "hf", "qwen3_vl_moe")


@pytest.mark.parametrize("name", slow_but(["qwen3_vl_moe"], FAMILIES))
def test_the_text_part_is_the_same_function_and_the_rest_is_carried(tmp_path, name):
    hf_dir = published(tmp_path / "hf", name)
    import_hf(hf_dir, tmp_path / "step")
    model, theirs = load_step(tmp_path / "step"), made(name)
    x, targets = torch.randint(31, (2, 3, 40))
    logits = theirs(input_ids=x).logits
    assert far(model(x), logits) < 1e-5
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    model(x, targets).backward()
    for p in theirs.parameters():
        p.data = torch.zeros_like(p) if p.grad is None else p.grad
    theirs.save_pretrained(tmp_path / "gradients")
    as_published(tmp_path / "gradients")
    want = {n: g for n, g in tensors_of(tmp_path / "gradients").items() if not n.startswith("model.visual.")}
    want = {n: g for n, g in want.items() if not n.endswith("e_score_correction_bias")}
    got = gradients_by_their_names(model, json.loads((hf_dir / "config.json").read_text()))
    assert got.keys() == want.keys()
    for key, gradient in want.items():
        assert far(got[key], gradient) < 1e-5 or (gradient.norm() == 0 and got[key].norm() == 0), key

    export_hf(tmp_path / "step", tmp_path / "back")
    seen = [name for name in tensors_of(hf_dir) if name.startswith("model.visual.")]
    assert len(seen) > 20
    assert_bits(tensors_of(tmp_path / "back"), tensors_of(hf_dir))
    assert files_of(tmp_path / "back") == files_of(hf_dir)


def copied(source, target):
    target.mkdir()
    for name, content in files_of(source).items():
        (target / name).write_bytes(content)
    return target


def test_experts_as_transformers_5_saves_them_are_one_model_with_the_published(tmp_path, hf_dir):
    """Shapes tell. An import, --like and a direct start take either, layer by layer, and write it so."""
    import_hf(hf_dir, tmp_path / "step")
    want = load_step(tmp_path / "step").state_dict()
    saved, mixed = (copied(hf_dir, tmp_path / name) for name in ("saved", "mixed"))
    as_published(saved)  # a second turn
    as_published(mixed, "layers.2.")
    down = "model.language_model.layers.0.mlp.experts.down_proj"
    assert tensors_of(saved)[down].shape == (6, 16, 10) and tensors_of(hf_dir)[down].shape == (6, 10, 16)
    for folder in (saved, mixed):
        step = tmp_path / f"{folder.name}-step"
        import_hf(folder, step)
        assert_bits(load_step(step).state_dict(), want)
        model = Transformer(load_step(step).cfg)
        load_hf(folder, model.state_dict(), model.cfg)
        assert_bits(model.state_dict(), want)
        export_hf(step, tmp_path / f"{folder.name}-back")
        export_hf(tmp_path / "step", tmp_path / f"{folder.name}-like", like=folder)
        export_hf(step, tmp_path / f"{folder.name}-published", like=hf_dir)
        assert files_of(tmp_path / f"{folder.name}-back") == files_of(folder)
        assert files_of(tmp_path / f"{folder.name}-like") == files_of(folder)
        assert files_of(tmp_path / f"{folder.name}-published") == files_of(hf_dir)

    as_published(saved, "layers.0.mlp.experts.gate_up_proj")
    with pytest.raises(MismatchError, match=r"1 layers are spelled in two ways") as error:
        import_hf(saved, tmp_path / "both")
    assert f"{down}: as well as model.language_model.layers.0.mlp.experts.gate_up_proj" in str(error.value)


def test_a_square_tensor_is_as_its_neighbour():
    """Where down is as wide as high, gate and up tell which way the layer is stored."""
    arch = architecture(dict(model_type="qwen3_vl_moe"))
    moe = MoEConfig(experts=4, top_k=2, ffn_dim=16)
    cfg = ModelConfig(vocab=31, dim=16, layers=2, heads=2, kv_heads=2, head_dim=8, moe=moe)
    held = "model.language_model.layers.{}.mlp.experts.{}_proj"
    shapes = {held.format(i, "down"): (4, 16, 16) for i in range(2)}
    both = {held.format(0, "gate_up"): (4, 16, 32), held.format(1, "gate_up"): (4, 32, 16)}
    assert held_by_shape(arch, cfg, shapes | both) == {"1"} and held_by_shape(arch, cfg, shapes) == set()


def test_another_type_is_said_inside_too(tmp_path, hf_dir):
    import_hf(hf_dir, tmp_path / "step")
    export_hf(tmp_path / "step", tmp_path / "back", dtype="bf16")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {config["dtype"], config["text_config"]["dtype"], config["vision_config"]["dtype"]} == {"bfloat16"}
    assert {t.dtype for t in tensors_of(tmp_path / "back").values()} == {torch.bfloat16}


def test_what_is_not_computed_is_named(tmp_path, hf_dir):
    config = json.loads((hf_dir / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"text_config=None: must be an object"):
        read_config(config | dict(text_config=None))
    with pytest.raises(ConfigError, match=r"tie_word_embeddings=True: only False is computed"):
        read_config(config | dict(tie_word_embeddings=True))
    inner = config["text_config"] | dict(hidden_act="gelu", norm_topk_prob=False)
    with pytest.raises(ConfigError) as error:
        read_config(config | dict(text_config=inner))
    assert "hidden_act='gelu'" in str(error.value) and "norm_topk_prob=False" in str(error.value)
    # without an original the rest of the model is not there: an export is another family's, of the text alone
    assert write_config(read_config(config), "float32")["model_type"] == "qwen3_moe"


def test_a_tensor_that_is_neither_is_refused(tmp_path, hf_dir):
    file = copied(hf_dir, tmp_path / "hf") / "model.safetensors"
    save_file(load_file(file) | {"model.audio.weight": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(MismatchError, match=r"model\.audio\.weight: qwen3_vl_moe has no such tensor"):
        import_hf(tmp_path / "hf", tmp_path / "step")
