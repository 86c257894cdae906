"""Folders that compressed-tensors writes: each scheme's values, groups by their targets, errors.

next: tmoe/hf/compressed.py
"""

import json
import shutil

import pytest
import torch
from hf_tiny import assert_bits, load_step, saved, tensors_of
from safetensors.torch import save_file

from tmoe.checkpoint.errors import MismatchError
from tmoe.config.check import ConfigError
from tmoe.hf import import_hf
from tmoe.hf.compressed import compressed, read_groups, scheme_of

KINDS = {torch.int32: "I32", torch.int64: "I64", torch.uint8: "U8", torch.int8: "I8", torch.float32: "F32"}
KINDS |= {torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}
INT = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=8, dynamic=False)
FP8 = dict(num_bits=8, type="float", symmetric=True, strategy="channel")
M, W = 12, 32


def config(form: str, weights: dict, **more) -> dict:
    group = dict(targets=["Linear"], weights=weights)
    return dict(quant_method="compressed-tensors", format=form, config_groups=dict(group_0=group)) | more


def found(files: dict, settings: dict):
    shapes = {name: tuple(t.shape) for name, t in files.items()}
    return compressed(shapes, {name: KINDS[t.dtype] for name, t in files.items()}, settings)


def values(files: dict, settings: dict, box=(slice(0, M), slice(0, W))):
    """The values of `a.weight`; every box must hold those of the whole matrix."""
    got = found(files, settings)
    assert got.problems == []

    def read(name, where):
        return files[name][tuple(where)]

    whole = got.views["a.weight"].read(read, (slice(0, M), slice(0, W)))
    for part in ((slice(3, 11), slice(5, 29)), (slice(1, 12, 3), slice(9, 10))):
        assert torch.equal(got.views["a.weight"].read(read, part), whole[part])
    return whole


def packed(numbers, bits: int):
    """Words of 32 bits along the last axis, the first number in the lowest bits, by plain loops."""
    half, per = 1 << bits - 1, 32 // bits
    rows = []
    for row in numbers.tolist():
        row = row + [-half] * (-len(row) % per)
        words = [sum((row[i + j] + half) << bits * j for j in range(per)) for i in range(0, len(row), per)]
        rows.append([word - (1 << 32) if word >= 1 << 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_words_in_groups_with_and_without_zero_points(bits, symmetric):
    draw = torch.Generator().manual_seed(bits)
    half = 1 << bits - 1
    numbers = torch.randint(-half, half, (M, W), generator=draw)
    zeros = torch.randint(-half, half, (M, W // 8), generator=draw)
    scale = torch.rand(M, W // 8, generator=draw).bfloat16()
    files = {"a.weight_packed": packed(numbers, bits), "a.weight_scale": scale}
    files["a.weight_shape"] = torch.tensor([M, W])
    want = numbers * scale.float().repeat_interleave(8, 1)
    if not symmetric:
        files["a.weight_zero_point"] = packed(zeros.T, bits).T.contiguous()
        want = (numbers - zeros.repeat_interleave(8, 1)) * scale.float().repeat_interleave(8, 1)
    settings = config("pack-quantized", INT | dict(num_bits=bits, symmetric=symmetric))
    assert torch.equal(values(files, settings), want)


def test_words_with_a_zero_point_for_the_whole_matrix():
    """compressed-tensors packs zero points of rows and groups alone."""
    numbers = torch.randint(-8, 8, (M, W), generator=torch.Generator().manual_seed(0))
    files = {"a.weight_packed": packed(numbers, 4), "a.weight_shape": torch.tensor([M, W])}
    files |= {"a.weight_scale": torch.tensor([0.25]), "a.weight_zero_point": torch.tensor([-3]).char()}
    settings = config("pack-quantized", INT | dict(strategy="tensor", group_size=None, symmetric=False))
    assert torch.equal(values(files, settings), (numbers + 3) * 0.25)


@pytest.mark.parametrize(
    ("how", "rows", "columns"),
    [
        (dict(strategy="channel"), 1, W),
        (dict(strategy="tensor"), M, W),
        (dict(strategy="group", group_size=16), 1, 16),
        (dict(strategy="block", block_structure=[5, 16]), 5, 16),
        (dict(strategy=None, group_size=-1), 1, W),
    ],
)
@pytest.mark.parametrize("form", ["int-quantized", "float-quantized", "naive-quantized"])
def test_bytes_with_a_factor_a_row_a_group_a_block_or_for_all(how, rows, columns, form):
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randint(-127, 128, (M, W), generator=draw)
    kind, dtype = ("int", torch.int8) if form == "int-quantized" else ("float", torch.float8_e4m3fn)
    numbers = numbers.to(dtype)
    scale = torch.rand(-(-M // rows), W // columns, generator=draw)
    want = numbers.float() * scale.repeat_interleave(rows, 0)[:M].repeat_interleave(columns, 1)
    files = {"a.weight": numbers, "a.weight_scale": scale[0] if scale.numel() == 1 else scale}
    weights = dict(num_bits=8, type=kind, symmetric=True) | how
    assert torch.equal(values(files, config(form, weights)), want)
    if kind == "int":
        zeros = torch.randint(-9, 9, scale.shape, generator=draw, dtype=torch.int8)
        whole = zeros.repeat_interleave(rows, 0)[:M].repeat_interleave(columns, 1)
        want = (numbers.float() - whole) * scale.repeat_interleave(rows, 0)[:M].repeat_interleave(columns, 1)
        files["a.weight_zero_point"] = zeros[0] if zeros.numel() == 1 else zeros
        assert torch.equal(values(files, config(form, weights | dict(symmetric=False))), want)


@pytest.mark.parametrize("form", ["mxfp4-pack-quantized", "nvfp4-pack-quantized", "mxfp8-quantized"])
def test_floats_of_4_and_8_bits_in_groups(form):
    draw = torch.Generator().manual_seed(0)
    size = 16 if "nv" in form else 32
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    if "fp4" in form:
        raw = torch.randint(0, 256, (M, W // 2), generator=draw, dtype=torch.uint8)
        numbers = torch.tensor(
            [[table[byte >> s & 15] for byte in row for s in (0, 4)] for row in raw.tolist()]
        )
        files = {"a.weight_packed": raw}
    else:
        files = {"a.weight": torch.randn(M, W, generator=draw).to(torch.float8_e4m3fn)}
        numbers = files["a.weight"].float()
    if "nv" in form:
        files["a.weight_scale"] = torch.rand(M, W // size, generator=draw).to(torch.float8_e4m3fn)
        files["a.weight_global_scale"] = torch.tensor([4.0])
        scale = files["a.weight_scale"].float() / 4
    else:
        files["a.weight_scale"] = torch.randint(120, 131, (M, W // size), generator=draw, dtype=torch.uint8)
        scale = 2.0 ** (files["a.weight_scale"].float() - 127)
    weights = dict(num_bits=4 if "fp4" in form else 8, type="float", symmetric=True, group_size=size)
    settings = config(form, weights | dict(strategy="tensor_group" if "nv" in form else "group"))
    assert torch.equal(values(files, settings), numbers * scale.repeat_interleave(size, 1))


def test_a_module_has_the_group_that_names_it_most_closely():
    """A whole name before a pattern, and a pattern before a class, in any order of the groups."""
    groups = dict(
        group_0=dict(targets=["Linear"], weights=INT, format="pack-quantized"),
        group_1=dict(targets=[r"re:.*self_attn\.(q|k)_proj$"], weights=FP8, format="float-quantized"),
        group_2=dict(
            targets=["m.0.self_attn.k_proj"], weights=FP8 | dict(num_bits=8), format="mxfp8-quantized"
        ),
        group_3=dict(targets=["re:.*attn$"], weights=None, input_activations=dict(num_bits=8)),
    )
    groups["group_2"]["weights"] = dict(
        num_bits=8, type="float", symmetric=True, strategy="group", group_size=32
    )
    schemes = read_groups(dict(format="mixed-precision", config_groups=groups))
    said = {
        name: scheme_of(f"m.0.{name}", schemes).format
        for name in ("self_attn.q_proj", "mlp.experts.3.up_proj")
    }
    assert said == {"self_attn.q_proj": "float-quantized", "mlp.experts.3.up_proj": "pack-quantized"}
    assert scheme_of("m.0.self_attn.k_proj", schemes).format == "mxfp8-quantized"
    assert scheme_of("m.0.self_attn.k_proj", schemes[1:2]).format == "float-quantized"
    assert scheme_of("m.0.mlp.up_proj", schemes[1:]) is None


@pytest.mark.parametrize(
    ("form", "weights", "says"),
    [
        (
            "mixed-precision",
            INT,
            "group_0: format='mixed-precision': only 'pack-quantized' or 'int-quantized'",
        ),
        ("mxfp6-pack-quantized", INT, "format='mxfp6-pack-quantized': only"),
        ("nvfp4-pack-quantized", INT, "type='int': only 'float' is read"),
        ("float-quantized", FP8 | dict(symmetric=False), "symmetric=False: only True is read"),
        ("int-quantized", FP8, "type='float': only 'int' is read"),
        ("pack-quantized", INT | dict(strategy="block"), "strategy='block': only 'group' or"),
        (
            "int-quantized",
            INT | dict(strategy="block", block_structure="8x8"),
            "block_structure='8x8': must be",
        ),
        ("pack-quantized", INT | dict(dynamic=True), "dynamic=True: only None or False is read"),
        (["pack-quantized"], INT, "format=['pack-quantized']: only"),
        ("naive-quantized", INT | dict(type=[]), "format='naive-quantized': only"),
        ("pack-quantized", INT | dict(num_bits=4.0), "num_bits=4.0: only 2 or 4 or 8 is read"),
        (
            "pack-quantized",
            "W4A16",
            "config_groups.group_0={'targets': ['Linear'], 'weights': 'W4A16'}: targets",
        ),
    ],
)
def test_a_scheme_that_is_not_read_is_refused_by_name(form, weights, says):
    with pytest.raises(ConfigError) as error:
        read_groups(config(form, weights))
    assert says in str(error.value) and "CompressedTensorsConfig(dequantize=True)" in str(error.value)


def test_tensors_that_no_scheme_explains_are_listed():
    files = {"a.weight": torch.zeros(M, W, dtype=torch.int8), "a.weight_scale": torch.ones(M, 1)}
    settings = config("int-quantized", dict(num_bits=8, type="int", strategy="channel"))
    settings["config_groups"]["group_0"]["targets"] = ["re:b"]
    assert found(files, settings).problems == [
        "a.weight: quantised, but no target of quantization_config matches a"
    ]
    settings["config_groups"]["group_0"]["targets"] = ["Linear"]
    problems = found(files | {"a.weight_g_idx": torch.zeros(W)}, settings).problems
    assert problems == ["a.weight_g_idx: not in int-quantized with 8 bits a channel"]
    files["a.weight_scale"] = torch.ones(M, 2)
    assert found(files, settings).problems == ["a.weight_scale: shape (12, 2), must be [M, 1] or [1]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen3-MoE as llm-compressor writes it: experts in int4, attention and keys in fp8."""
    here = saved(tmp_path_factory.mktemp("wild") / "hf", "qwen3_moe")
    tensors = tensors_of(here)
    want = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, width = tensors[name].shape
        if ".experts." in name and width == 16:
            numbers = torch.randint(-8, 8, (rows, width))
            tensors |= {f"{name}_packed": packed(numbers, 4), f"{name}_scale": torch.rand(rows, 2)}
            tensors[f"{name}_shape"] = torch.tensor([rows, width])
            want[name] = numbers * tensors[f"{name}_scale"].repeat_interleave(8, 1)
            del tensors[name]
        elif "self_attn" in name:
            tensors[f"{name}_scale"] = torch.rand(rows, 1)
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            want[name] = tensors[name].float() * tensors[f"{name}_scale"]
            tensors[name.replace("weight", "input_scale")] = torch.ones(1)
    for layer in range(2):
        tensors |= {f"model.layers.{layer}.self_attn.{part}_scale": torch.ones(1) for part in "kv"}
    save_file(tensors, here / "model.safetensors", {"format": "pt"})
    groups = dict(
        group_0=dict(targets=["re:.*self_attn.*"], weights=FP8, format="float-quantized"),
        group_1=dict(targets=["re:.*experts.*"], weights=INT, format="pack-quantized"),
    )
    more = dict(config_groups=groups, kv_cache_scheme=dict(num_bits=8, type="float"), sparsity_config={})
    settings = config("mixed-precision", INT) | more | dict(ignore=["lm_head", "re:.*down_proj$"])
    edited = json.loads((here / "config.json").read_text()) | dict(quantization_config=settings)
    (here / "config.json").write_text(json.dumps(edited))
    return here, want


def test_a_folder_in_the_wild_is_imported(folder, tmp_path, capsys):
    hf_dir, want = folder
    import_hf(hf_dir, tmp_path / "step", world=2, ep=2)
    assert "factors of quantised activations, if the folder has some, are left out" in capsys.readouterr().out
    model = load_step(tmp_path / "step").state_dict()
    for layer in range(2):
        qkv = [want[f"model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
        assert torch.equal(model[f"blocks.{layer}.attention.qkv.weight"], torch.cat(qkv))
        for expert in range(6):
            name = f"model.layers.{layer}.mlp.experts.{expert}"
            both = torch.cat([want[f"{name}.{part}_proj.weight"] for part in ("gate", "up")])
            assert torch.equal(model[f"blocks.{layer}.moe.experts.gate_up"][expert], both)
            assert torch.equal(
                model[f"blocks.{layer}.moe.experts.down"][expert], want[f"{name}.down_proj.weight"]
            )
    assert_bits({"": model["head.weight"]}, {"": want["lm_head.weight"]})


def test_a_part_of_a_wrong_type_is_listed(folder, tmp_path):
    here = shutil.copytree(folder[0], tmp_path / "hf")
    tensors = tensors_of(here)
    name = "model.layers.1.mlp.experts.5.up_proj.weight_packed"
    tensors[name] = tensors[name].to(torch.int64)
    save_file(tensors, here / "model.safetensors", {"format": "pt"})
    with pytest.raises(MismatchError, match=f"{name}: I64; valid are I32"):
        import_hf(here, tmp_path / "step")
