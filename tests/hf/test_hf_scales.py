"""fp8 in blocks: factors are read as transformers reads them, or refused by name.

The factors' type says what they mean.

next: tmoe/hf/packed.py
"""

import json
from pathlib import Path

import pytest
import torch
from hf_tiny import SIZES, assert_bits, make, tensors_of
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Qwen3MoeConfig

from tmoe.checkpoint.errors import MismatchError
from tmoe.config.check import ConfigError
from tmoe.hf import export_hf, import_hf, load_hf
from tmoe.hf.config import read_config
from tmoe.hf.files import Folder
from tmoe.model.transformer import Transformer

M, W = 4, 16  # a block, which divides every weight: for others transformers' conversion raises
WEIGHT = "model.layers.1.self_attn.q_proj.weight"
EXPERT = "model.layers.0.mlp.experts.1.up_proj.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    sizes = SIZES | dict(hidden_size=32, intermediate_size=32)
    config = Qwen3MoeConfig(
        **sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(make.__globals__["MODELS"], "fp8", lambda: config)
        make("fp8").save_pretrained(tmp_path_factory.mktemp("plain") / "hf")
    return next(tmp_path_factory.getbasetemp().glob("plain*/hf"))


def write(folder: Path, plain: Path, tensors: dict[str, torch.Tensor], **settings) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    method = dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[M, W]) | settings
    config = json.loads((plain / "config.json").read_text()) | dict(quantization_config=method)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def packed(plain: Path, kind: torch.dtype) -> dict[str, torch.Tensor]:
    """The folder's tensors with projections in fp8.

    Factors are powers of two, or a multiple of one where the type holds that.
    """
    tensors = tensors_of(plain)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        w = tensors[name]
        exponent = torch.randint(-12, -5, (w.shape[0] // M, w.shape[1] // W))
        factor = 2.0**exponent
        if kind == torch.uint8:
            stored = (exponent + 127).to(kind)
        elif kind == torch.float8_e8m0fnu:
            stored = factor.to(kind)
        else:
            stored = (factor * 1.37).to(kind)
            factor = stored.float()
        wide = factor.repeat_interleave(M, 0).repeat_interleave(W, 1)
        tensors[name] = (w / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = stored
    return tensors


FP32, BF16, FP16, U8, E8M0 = torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e8m0fnu


@pytest.mark.parametrize("scale_fmt", [None, "float", "ue8m0"])
@pytest.mark.parametrize("kind", [FP32, BF16, FP16, U8, E8M0], ids=str)
def test_factors_are_read_as_transformers_reads_them(plain, tmp_path, kind, scale_fmt):
    said = {} if scale_fmt is None else dict(scale_fmt=scale_fmt)
    hf_dir = write(tmp_path / "hf", plain, packed(plain, kind), **said)
    how = dict(
        dtype=torch.float32,
        quantization_config=FineGrainedFP8Config(dequantize=True, weight_block_size=(M, W)),
    )
    theirs = AutoModelForCausalLM.from_pretrained(hf_dir, **how)
    import_hf(hf_dir, tmp_path / "step", world=3)
    export_hf(tmp_path / "step", tmp_path / "back", dtype="fp32")
    assert_bits(AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict(), theirs.state_dict())
    assert theirs.state_dict()[WEIGHT].abs().max() < 10  # and that is near what was packed
    cfg = read_config(Folder(hf_dir).config)
    model = Transformer(cfg)
    load_hf(hf_dir, model.state_dict(), cfg)
    assert torch.equal(model.state_dict()["blocks.1.attention.qkv.weight"][:32], theirs.state_dict()[WEIGHT])


def test_every_exponent(tmp_path):
    """2^(u - 127), as transformers computes it for bytes (255: infinite) and torch for E8M0 (255: NaN)."""
    kinds = torch.arange(256, dtype=torch.uint8).view(16, 16)
    ones = torch.ones(16, 16).to(torch.float8_e4m3fn)
    for stored, last in ((kinds, float("inf")), (kinds.view(E8M0), float("nan"))):
        tensors = {"x.weight": ones, "x.weight_scale_inv": stored}
        folder = tmp_path / str(stored.dtype)
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        method = dict(quant_method="fp8", weight_block_size=[1, 1])
        (folder / "config.json").write_text(json.dumps(dict(quantization_config=method)))
        got = Folder(folder).whole("x.weight").flatten()
        want = torch.tensor([2.0 ** (u - 127) for u in range(255)] + [last])
        assert torch.equal(got[:255], want[:255]) and str(got[255]) == str(want[255])


def refused(hf_dir: Path, plain: Path, tmp_path: Path, kind: type[Exception], *words: str) -> None:
    """By the import, the direct start and an export like it, in the same words and at most twenty lines."""
    cfg = read_config(Folder(plain).config)
    if not (tmp_path / "plain").exists():
        import_hf(plain, tmp_path / "plain")
    roads = (
        lambda: import_hf(hf_dir, tmp_path / "step"),
        lambda: load_hf(hf_dir, Transformer(cfg).state_dict(), cfg),
        lambda: export_hf(tmp_path / "plain", tmp_path / "back", like=hf_dir),
    )
    for road in roads:
        with pytest.raises(kind) as error:
            road()
        for word in words:
            assert word in str(error.value), str(error.value)
        assert len(str(error.value).splitlines()) <= 20
    assert not (tmp_path / "step").exists() and not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    "kind",
    [torch.int8, torch.int32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool],
    ids=str,
)
def test_factors_of_another_type_are_refused(plain, tmp_path, kind):
    tensors = packed(plain, FP32)
    tensors[f"{WEIGHT}_scale_inv"] = torch.ones(8, 2).to(kind)
    hf_dir = write(tmp_path / "hf", plain, tensors)
    refused(
        hf_dir,
        plain,
        tmp_path,
        MismatchError,
        f"{WEIGHT}_scale_inv: ",
        "; valid are F32, BF16, F16, U8, F8_E8M0",
    )


@pytest.mark.parametrize(
    "kind", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.int8, BF16, FP32, U8], ids=str
)
def test_weights_of_another_type_are_refused(plain, tmp_path, kind):
    """transformers multiplies what comes, and takes int8 for pairs of four bits."""
    tensors = packed(plain, U8)
    tensors[EXPERT] = tensors[EXPERT].float().to(kind)
    hf_dir = write(tmp_path / "hf", plain, tensors)
    refused(hf_dir, plain, tmp_path, MismatchError, f"{EXPERT}: ", "; valid are F8_E4M3")


def lost(tensors, name):
    del tensors[name]


def shaped(*shape):
    return lambda tensors, name: tensors.update({name: torch.ones(shape).to(tensors[name].dtype)})


def renamed(tensors, name):
    tensors[f"{name.removesuffix('_scale_inv')}_scale"] = tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        (lost, f"{WEIGHT}_scale_inv", (f"{WEIGHT}_scale_inv: missing, but {WEIGHT} is there",)),
        (lost, WEIGHT, (f"{WEIGHT}: missing, but {WEIGHT}_scale_inv is there",)),
        (renamed, f"{WEIGHT}_scale_inv", (f"{WEIGHT}_scale_inv: missing",)),
        (
            shaped(2, 8),
            f"{WEIGHT}_scale_inv",
            (f"{WEIGHT}_scale_inv: shape (2, 8), must be a factor for each block",),
        ),
        (shaped(16), f"{WEIGHT}_scale_inv", ("shape (16,), must be a factor for each block of 4 x 16",)),
        (shaped(), f"{WEIGHT}_scale_inv", ("shape (), must be a factor for each block of 4 x 16",)),
        (shaped(2, 4, 32), WEIGHT, (f"{WEIGHT}: shape (2, 4, 32), must be [M, W]",)),
    ],
)
def test_parts_that_do_not_fit_are_refused(plain, tmp_path, change, name, words):
    tensors = packed(plain, U8)
    change(tensors, name)
    refused(write(tmp_path / "hf", plain, tensors), plain, tmp_path, MismatchError, *words)


@pytest.mark.parametrize(
    "settings",
    [
        dict(scale_fmt="e4m3"),
        dict(scale_fmt=None),
        dict(activation_scheme="static"),
        dict(activation_scheme=None),
        dict(expert_dtype="fp4"),
        dict(modules_to_convert=["embed_tokens"]),
        dict(weight_block_size=None),
        dict(weight_block_size=[M]),
        dict(weight_block_size=[True, W]),
    ],
    ids=str,
)
def test_settings_that_say_something_else_are_refused(plain, tmp_path, settings):
    (key, value), *_ = settings.items()
    hf_dir = write(tmp_path / "hf", plain, packed(plain, U8), **settings)
    refused(hf_dir, plain, tmp_path, ConfigError, f"quantization_config: {key}={value!r}")


def test_scales_of_activations_are_named(plain, tmp_path):
    """With them the packed model computes something else: none is dropped in silence."""
    odd = WEIGHT.replace("weight", "activation_scale")
    hf_dir = write(tmp_path / "hf", plain, packed(plain, U8) | {odd: torch.ones(())})
    with pytest.raises(MismatchError, match=f"{odd}: qwen3_moe has no such tensor"):
        import_hf(hf_dir, tmp_path / "step")


def test_modules_that_are_not_packed_and_a_block_that_is_not_said(plain, tmp_path):
    """Which tensors are packed is read from the files, as in transformers.

    Blocks are 128 x 128 where no size is said.
    """
    values = tensors_of(plain)
    tensors = dict(values)
    tensors[WEIGHT] = (values[WEIGHT] * 64).to(torch.float8_e4m3fn)
    tensors[f"{WEIGHT}_scale_inv"] = torch.tensor([[121]], dtype=torch.uint8)  # 2^-6
    hf_dir = write(tmp_path / "hf", plain, tensors, modules_to_not_convert=["lm_head", "mlp.experts"])
    config = json.loads((hf_dir / "config.json").read_text())
    del config["quantization_config"]["weight_block_size"]
    (hf_dir / "config.json").write_text(json.dumps(config))
    import_hf(hf_dir, tmp_path / "step")
    export_hf(tmp_path / "step", tmp_path / "back", dtype="fp32")
    assert_bits(tensors_of(tmp_path / "back"), values | {WEIGHT: tensors[WEIGHT].float() / 64})
