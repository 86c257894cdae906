"""Folders with stacked experts, as transformers 5 holds them: read, started from and written back so.

next: tmoe/hf/rules.py
"""

import shutil
from pathlib import Path

import pytest
import torch
from hf_tiny import MODELS, assert_bits, far, files_of, first_hand, load_step, make, saved, tensors_of
from safetensors.torch import load_file, save_file
from tiers import slow_but
from transformers import AutoModelForCausalLM

from tmoe.checkpoint.errors import MismatchError
from tmoe.hf import export_hf, import_hf, load_hf
from tmoe.hf.config import read_config
from tmoe.hf.files import Folder
from tmoe.model.transformer import Transformer

DENSE = ("llama", "qwen2", "qwen3", "mistral")  # families, or the first word of a model's name
# tmoe refuses Nemotron-H's experts as stacks
SPARSE = [
    name for name in MODELS if name.partition(",")[0] not in (*DENSE, "nemotron_h") and ", dense" not in name
]
FAMILIES = [
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "granitemoe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "granitemoeshared",
    "hy_v3",
]


def stacked(path: Path, name: str, dtype: torch.dtype = torch.float32, size: str = "1GB") -> Path:
    make(name, dtype).save_pretrained(path, save_original_format=False, max_shard_size=size)
    return path


def started(hf_dir: Path) -> Transformer:
    cfg = read_config(Folder(hf_dir).config)
    model = Transformer(cfg)
    load_hf(hf_dir, model.state_dict(), cfg)
    return model


@pytest.mark.parametrize("name", slow_but(first_hand, SPARSE))
def test_the_same_model_and_every_byte_back(tmp_path, name):
    hf_dir = stacked(tmp_path / "hf", name)
    names = tensors_of(hf_dir).keys()
    assert any(n.endswith("experts.gate_up_proj") for n in names) and not any(
        ".experts.0." in n for n in names
    )
    import_hf(hf_dir, tmp_path / "step")
    x = torch.randint(31, (2, 40))
    model = load_step(tmp_path / "step")
    assert far(model(x), make(name)(x).logits) < 1e-5
    assert_bits(started(hf_dir).state_dict(), model.state_dict())
    export_hf(tmp_path / "step", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(hf_dir)


@pytest.mark.parametrize("name", slow_but(first_hand, FAMILIES))
def test_both_spellings_are_one_model(tmp_path, name):
    """The same step from either, for several ranks; --like chooses the spelling of an export."""
    usual = saved(tmp_path / "usual", name, torch.bfloat16, files=3)
    held = tmp_path / "held"
    stacked(held, name, torch.bfloat16, size="6KB")
    assert len(list(held.glob("*.safetensors"))) > 2
    for folder in (usual, held):
        import_hf(folder, tmp_path / f"{folder.name}-step", world=6, ep=3 if "deepseek" not in name else 2)
    assert_bits(
        load_step(tmp_path / "held-step").state_dict(), load_step(tmp_path / "usual-step").state_dict()
    )
    for step, like in (("held-step", usual), ("usual-step", held)):
        export_hf(tmp_path / step, tmp_path / f"like-{like.name}", like=like)
        assert files_of(tmp_path / f"like-{like.name}") == files_of(like)


def in_one_file(path: Path, original: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    shutil.copy(original / "config.json", path)
    save_file(
        {name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors", {"format": "pt"}
    )
    return path


@pytest.mark.parametrize("name", slow_but(first_hand, [name for name in FAMILIES if name != "gpt_oss"]))
def test_a_layer_each_is_read_and_both_in_one_are_refused(tmp_path, name):
    usual = tensors_of(saved(tmp_path / "usual", name))
    held = tensors_of(stacked(tmp_path / "held", name))
    tail = "layers.1."
    each = {n: t for n, t in usual.items() if tail not in n} | {n: t for n, t in held.items() if tail in n}
    hf_dir = in_one_file(tmp_path / "each", tmp_path / "usual", each)
    import_hf(hf_dir, tmp_path / "step")
    # read there too
    assert_bits(AutoModelForCausalLM.from_pretrained(hf_dir).state_dict(), make(name).state_dict())
    assert_bits(load_step(tmp_path / "step").state_dict(), started(tmp_path / "usual").state_dict())
    export_hf(tmp_path / "step", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(hf_dir)

    down = next(
        n
        for n in held
        if n.endswith("layers.1.mlp.experts.down_proj") or "1.block_sparse_moe.experts.down" in n
    )
    others = [
        n for n in usual if tail in n and n not in held and ("w2" in n or "down_proj" in n or "output" in n)
    ]
    half = {n: t for n, t in each.items() if n != down} | {n: usual[n] for n in others}
    last = str(read_config(Folder(hf_dir).config).layers - 1)
    for kind, tensors, layer in (("both", usual | held, last), ("half", half, "1")):
        hf_dir = in_one_file(tmp_path / kind, tmp_path / "usual", tensors)
        cfg = read_config(Folder(hf_dir).config)
        roads = (
            lambda hf_dir=hf_dir: import_hf(hf_dir, tmp_path / "other"),
            lambda hf_dir=hf_dir, cfg=cfg: load_hf(hf_dir, Transformer(cfg).state_dict(), cfg),
            lambda hf_dir=hf_dir: export_hf(tmp_path / "step", tmp_path / "other", like=hf_dir),
        )
        for road in roads:
            with pytest.raises(MismatchError, match="spelled in two ways") as error:
                road()
            lines = str(error.value).splitlines()
            assert any(
                f"model.layers.{layer}." in line and ": as well as model." in line for line in lines[1:]
            ), lines
            assert len(lines) <= 20
    assert not (tmp_path / "other").exists()


def test_a_stack_of_another_shape_is_refused(tmp_path):
    """[E, D, 2F] is no [E, 2F, D], and experts must all be there."""
    hf_dir = stacked(tmp_path / "hf", "qwen3_moe")
    tensors = load_file(hf_dir / "model.safetensors")
    turned, short = (f"model.layers.{i}.mlp.experts.{n}_proj" for i, n in enumerate(("gate_up", "down")))
    tensors[turned] = tensors[turned].mT.contiguous()
    tensors[short] = tensors[short][:-1].contiguous()
    save_file(tensors, hf_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(MismatchError, match="2 differences") as error:
        import_hf(hf_dir, tmp_path / "step")
    assert f"{turned}: shape (6, 16, 20), qwen3_moe with this config has (6, 20, 16)" in str(error.value)
    assert f"{short}: shape (5, 16, 10)" in str(error.value)


def test_a_folder_without_experts_gets_a_short_message(tmp_path):
    """36 tensors of three kinds."""
    hf_dir = saved(tmp_path / "hf", "qwen3_moe")
    tensors = {n: t for n, t in load_file(hf_dir / "model.safetensors").items() if ".experts." not in n}
    save_file(tensors, hf_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(MismatchError, match="36 differences") as error:
        import_hf(hf_dir, tmp_path / "step")
    lines = str(error.value).splitlines()
    assert len(lines) == 4
    assert "  model.layers.*.mlp.experts.*.up_proj.weight: missing (12, one is layers.0 experts.0)" in lines
