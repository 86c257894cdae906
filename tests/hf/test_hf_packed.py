"""gpt-oss as it is published: MXFP4 experts, read as what they stand for, against transformers' conversion.

next: tmoe/hf/packed.py
"""

import json
from pathlib import Path

import pytest
import torch
from hf_tiny import assert_bits, far, load_step, make, tensors_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tmoe.checkpoint.errors import MismatchError
from tmoe.hf import export_hf, import_hf, load_hf
from tmoe.hf.config import read_config
from tmoe.hf.files import Folder
from tmoe.hf.packed import unpack
from tmoe.model.transformer import Transformer

METHOD = dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"])
E, D, F = 4, 64, 96  # two blocks and three


@pytest.fixture
def published(tmp_path, monkeypatch) -> Path:
    """A folder of two files with random blocks.

    They hold every value of four bits, and exponents from far below one to far above.
    """
    config = GptOssConfig(
        vocab_size=31,
        hidden_size=D,
        intermediate_size=F,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=E,
        num_experts_per_tok=2,
        sliding_window=5,
        max_position_embeddings=128,
    )
    monkeypatch.setitem(make.__globals__["MODELS"], "published", lambda: config)
    model = make("published", torch.bfloat16)
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.6)
    model.save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    draw = torch.Generator().manual_seed(1)
    file.unlink()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        rows, width = tensors.pop(name).mT.shape[1:]
        tensors[f"{name}_blocks"] = torch.randint(
            256, (E, rows, width // 32, 16), generator=draw, dtype=torch.uint8
        )
        tensors[f"{name}_scales"] = torch.randint(
            115, 127, (E, rows, width // 32), generator=draw, dtype=torch.uint8
        )
    where = {name: f"model-0000{1 + ('blocks' in name)}-of-00002.safetensors" for name in tensors}
    for file in {*where.values()}:
        save_file(
            {n: t for n, t in tensors.items() if where[n] == file}, tmp_path / "hf" / file, {"format": "pt"}
        )
    index = dict(metadata={}, weight_map=where)
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    edit_config(tmp_path / "hf", quantization_config=METHOD)
    return tmp_path / "hf"


def edit_config(folder: Path, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def values_of(folder: Path) -> dict[str, torch.Tensor]:
    """The values as transformers reads them."""
    tensors = tensors_of(folder)
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        packed = tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales")
        tensors[name] = convert_moe_packed_tensors(*packed, dtype=torch.bfloat16)
    return tensors


def test_the_values_are_those_of_transformers(published, tmp_path, capsys):
    want = values_of(published)
    import_hf(published, tmp_path / "step", world=6, ep=2)  # boxes that begin inside a block
    assert "mxfp4 tensors are read as the 16-bit values" in capsys.readouterr().out
    export_hf(tmp_path / "step", tmp_path / "back")
    assert "exports hold those, without quantization_config" in capsys.readouterr().out
    assert_bits(tensors_of(tmp_path / "back"), want)
    config = json.loads((published / "config.json").read_text())
    del config["quantization_config"]
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    assert (tmp_path / "back" / "generation_config.json").read_bytes() == (
        published / "generation_config.json"
    ).read_bytes()
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32, attn_implementation="eager"
    )
    x = torch.randint(31, (2, 20))
    assert far(load_step(tmp_path / "step")(x), theirs(x).logits) < 1e-5
    export_hf(tmp_path / "step", tmp_path / "like", like=published, dtype="fp32")
    assert_bits(tensors_of(tmp_path / "like"), {name: t.float() for name, t in want.items()})


def test_direct_start_reads_them(published, tmp_path):
    import_hf(published, tmp_path / "step")
    cfg = read_config(Folder(published).config)
    model = Transformer(cfg)
    load_hf(published, model.state_dict(), cfg)
    assert_bits(model.state_dict(), load_step(tmp_path / "step").state_dict())


def test_every_byte_and_every_exponent_is_that_of_transformers():
    """2^-127 to 2^128, whose half is finite.

    x 0 is NaN where the power is not finite, there as here: 2^128 is, and theirs by ldexp.
    """
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).expand(256, 16, 1, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1, 1).expand(256, 16, 1).contiguous()
    files = dict(b=blocks, s=scales)
    got = unpack("b", "s", lambda name, box: files[name][box], (slice(0, 256), slice(0, 32), slice(0, 16)))
    assert torch.equal(got.bfloat16(), convert_moe_packed_tensors(blocks, scales))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float32, torch.float8_e8m0fnu])
@pytest.mark.parametrize("end", ["_scales", "_blocks"])
def test_a_part_of_another_type_is_refused(published, tmp_path, dtype, end):
    """Each type holds the same numbers, or bits that mean something else: the shape does not tell."""
    file = published / "model-00001-of-00002.safetensors"
    file = (
        file
        if any(name.endswith(end) for name in load_file(file))
        else published / "model-00002-of-00002.safetensors"
    )
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(end))
    tensors[name] = tensors[name].float().to(dtype)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(MismatchError, match=f"{name}: .*; valid are U8"):
        import_hf(published, tmp_path / "step")


def test_packed_and_plain_at_once_is_refused(published, tmp_path):
    file = published / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    plain = "model.layers.0.mlp.experts.down_proj"
    tensors[plain] = torch.zeros(E, F, D)
    save_file(tensors, file, {"format": "pt"})
    index = json.loads((published / "model.safetensors.index.json").read_text())
    index["weight_map"][plain] = file.name
    (published / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(MismatchError, match=f"{plain}: there, and packed as {plain}_blocks as well"):
        import_hf(published, tmp_path / "step")


def test_parts_that_do_not_fit_are_listed(published, tmp_path):
    file = published / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    down, up = (f"model.layers.1.mlp.experts.{name}_proj" for name in ("down", "gate_up"))
    del tensors[f"{down}_scales"]
    tensors[f"{up}_scales"] = tensors[f"{up}_scales"][:-1].contiguous()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(MismatchError) as error:
        import_hf(published, tmp_path / "step")
    lost = f"{down}_scales: missing, but {down}_blocks is there"
    bent = f"{up}_scales: shape (3, 192, 2), must be the blocks'"
    assert "2 differences" in str(error.value) and lost in str(error.value) and bent in str(error.value)
    edit_config(published, quantization_config=dict(quant_method="awq"))
    with pytest.raises(
        ValueError,
        match=r"quant_method='awq': only fp8 in blocks, .*: take the pub",
    ):
        import_hf(published, tmp_path / "step")
    assert {p.name for p in tmp_path.iterdir()} == {"hf"}
