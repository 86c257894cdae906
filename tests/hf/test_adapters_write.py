"""Adapters written as PEFT's files and merged into the base: what is read back computes the same.

PEFT 0.21.2 loaded both layouts of all families when this was written, logits within 2e-6 of the stored ones.

next: tests/hf/test_adapters_read.py
"""

import json
from pathlib import Path

import hf_tiny
import pytest
import torch
from hf_tiny import tensors_of
from peft_tiny import STORED, logits_of, logits_of_hf, logits_of_step, off, saved_base
from safetensors.torch import load_file, save_file

from tmoe.checkpoint.base import find_adapters
from tmoe.checkpoint.manifest import read_manifest
from tmoe.config.check import ConfigError
from tmoe.hf.adapters.commands import export_adapter, import_adapter, merge

BAR = 1e-5
FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "olmoe", "granitemoe"]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """A function of a stored adapter's name: the step of it, on its base next to it."""
    folder = tmp_path_factory.mktemp("steps")

    def step(name: str) -> Path:
        if not (folder / name).exists():
            import_adapter(
                STORED / name, folder / name, base=saved_base(name.split("-")[0], folder / "bases")
            )
        return folder / name

    (folder / "bases").mkdir()
    return step


def same_files(a: Path, b: Path) -> bool:
    names = {path.name for path in a.iterdir()}
    assert names == {path.name for path in b.iterdir()}
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


@pytest.mark.parametrize("layout", ["peft", "per-expert"])
@pytest.mark.parametrize("name", [f"{family}-0.19" for family in FAMILIES] + ["qwen3_moe-gate_up-rs-0.19"])
def test_an_export_is_read_back_and_written_again_byte_for_byte(steps, tmp_path, name, layout, capsys):
    step = steps(name)
    if layout == "per-expert" and name.startswith(("gpt_oss", "granitemoe")):
        with pytest.raises(ConfigError, match=r"experts are published in stacks.*valid: peft"):
            export_adapter(step, tmp_path / "a", layout=layout)
        return
    export_adapter(step, tmp_path / "a", layout=layout)
    import_adapter(tmp_path / "a", tmp_path / "again")  # the base that the file names
    assert off(logits_of_step(tmp_path / "again"), logits_of(STORED / name)) < BAR
    capsys.readouterr()
    export_adapter(tmp_path / "again", tmp_path / "b", layout=layout)
    assert same_files(tmp_path / "a", tmp_path / "b")
    said = capsys.readouterr().out
    assert "B is multiplied" not in said  # all have one factor by now
    assert ("--layout peft is for PEFT" in said) == (layout == "per-expert")


def test_names_and_columns_are_those_of_pefts_file(steps, tmp_path):
    """Pairs of PEFT's own file whose matrix is not joined of several are equal to the export's, but for s."""
    export_adapter(steps("qwen3_moe-0.19"), tmp_path / "a")
    ours = load_file(tmp_path / "a/adapter_model.safetensors")
    theirs = load_file(STORED / "qwen3_moe-0.19/adapter_model.safetensors")
    assert theirs.keys() < ours.keys()  # k has q's and v's A, and zeros as B
    config = json.loads((tmp_path / "a/adapter_config.json").read_text())
    assert config["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
    factor = config["lora_alpha"] / config["r"]
    for end, own in ((".base_layer.lora_", 5 / 3), ("experts.lora_", 7 / 2)):
        for name in (name for name in theirs if end in name):
            scale = 1 if "lora_A" in name else own / factor
            assert torch.allclose(ours[name], theirs[name] * scale, rtol=1e-6), name
    for said in config["alpha_pattern"]:
        assert config["alpha_pattern"][said] / config["rank_pattern"][said] == pytest.approx(factor)


def test_experts_one_by_one_have_the_published_names(steps, tmp_path):
    export_adapter(steps("mixtral-0.19"), tmp_path / "a", layout="per-expert", dtype="bf16")
    file = load_file(tmp_path / "a/adapter_model.safetensors")
    at = "base_model.model.model.layers.1.block_sparse_moe.experts.7"
    assert {n: tuple(t.shape) for n, t in file.items() if n.startswith(at)} == {
        f"{at}.{leaf}.lora_{x}.weight": shape
        for leaf, rank, out, width in (("w1", 3, 12, 16), ("w3", 3, 12, 16), ("w2", 2, 16, 12))
        for x, shape in (("A", (rank, width)), ("B", (out, rank)))
    }
    config = json.loads((tmp_path / "a/adapter_config.json").read_text())
    assert config["r"] == 3 and {"w2": 2, "down_proj": 2}.items() <= config["rank_pattern"].items()
    assert {"w1", "w2", "w3"} < {*config["target_modules"]} and config["target_parameters"] is None
    assert {t.dtype for t in file.values()} == {torch.bfloat16}


def deepseek_adapter(folder: Path) -> Path:
    """An adapter of PEFT's on a base next to it: a dense block, shared experts, and gate_up of experts."""
    hf_tiny.saved(folder / "base", "deepseek_v3")
    inputs = {"0.mlp.gate_proj": (16, 12), "0.mlp.up_proj": (16, 12), "0.mlp.down_proj": (12, 16)}
    inputs |= {"1.mlp.shared_experts.down_proj": (10, 16), "2.self_attn.o_proj": (24, 16)}
    shapes = {
        f"{name}.{x}": (3, in_) if x == "A" else (out, 3) for name, (in_, out) in inputs.items() for x in "AB"
    }
    shapes |= {"1.mlp.experts.A": (12, 16), "1.mlp.experts.B": (20, 12)}  # rank 2 for each of 6 experts
    torch.manual_seed(4)
    at = "base_model.model.model.layers."
    file = {f"{at}{name[:-1]}lora_{name[-1]}.weight": torch.randn(shape) for name, shape in shapes.items()}
    config = dict(
        peft_type="LORA", r=3, lora_alpha=6, peft_version="0.21.2", rank_pattern={"experts.gate_up_proj": 2}
    )
    config |= dict(target_modules=["o_proj"], target_parameters=["experts.gate_up_proj", "gate_proj.weight"])
    config["target_parameters"] += ["up_proj.weight", "down_proj.weight"]
    (folder / "a").mkdir()
    (folder / "a/adapter_config.json").write_text(json.dumps(config))
    save_file(file, folder / "a/adapter_model.safetensors")
    return folder / "a"


@pytest.mark.parametrize("layout", ["peft", "per-expert"])
def test_dense_layers_next_to_experts_are_named_as_parameters(tmp_path, layout):
    """PEFT takes `gate_proj`, `up_proj` and `down_proj` of target_modules for the experts' wherever they are.

    PEFT 0.21.2 reads both exports: logits within 1e-5 of the merged model's.
    """
    import_adapter(deepseek_adapter(tmp_path), tmp_path / "step", base=tmp_path / "base")
    export_adapter(tmp_path / "step", tmp_path / "b", layout=layout)
    config = json.loads((tmp_path / "b/adapter_config.json").read_text())
    file = load_file(tmp_path / "b/adapter_model.safetensors")
    modules = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in file}
    dense = {name for name in modules if name.endswith("_proj") and "mlp" in name and ".experts." not in name}
    assert len(dense) == 4

    def named(name: str, targets: list[str]) -> bool:
        return any(name == target or name.endswith(f".{target}") for target in targets)

    assert all(named(f"{name}.weight", config["target_parameters"]) for name in dense)
    assert not any(named(name, config["target_modules"]) for name in dense)
    assert named("model.layers.2.self_attn.o_proj", config["target_modules"])
    one_by_one = [f"model.layers.1.mlp.experts.3.{leaf}_proj" for leaf in ("gate", "up", "down")]
    assert [named(name, config["target_modules"]) for name in one_by_one] == [layout == "per-expert"] * 3
    assert not any(named(f"{name}.weight", config["target_parameters"]) for name in one_by_one)
    for out in ("step", "again"):
        merge(tmp_path / out, tmp_path / f"{out}-hf")
        if out == "step":
            import_adapter(tmp_path / "b", tmp_path / "again", base=tmp_path / "base")
    a, b, base = (tensors_of(tmp_path / name) for name in ("step-hf", "again-hf", "base"))
    assert max(off(a[name], b[name]) for name in a) < 1e-5
    given = load_file(tmp_path / "a/adapter_model.safetensors")
    at = "model.layers.1.mlp.shared_experts.down_proj"
    B, A = (given[f"base_model.model.{at}.lora_{x}.weight"] for x in "BA")
    assert off(a[f"{at}.weight"], base[f"{at}.weight"] + 2 * B @ A) < 1e-5


@pytest.mark.parametrize("name", [f"{family}-0.19" for family in FAMILIES])
def test_a_merged_model_has_pefts_logits(steps, tmp_path, name):
    merge(steps(name), tmp_path / "hf")
    assert off(logits_of_hf(tmp_path / "hf"), logits_of(STORED / name)) < BAR


def test_a_quantised_merge_names_families_without_such_a_format(steps, tmp_path):
    with pytest.raises(ConfigError, match=r"quantize=int4: .*gpt_oss"):
        merge(steps("gpt_oss-0.19"), tmp_path / "hf", quantize="int4")
    assert not (tmp_path / "hf").exists()


def test_merging_rounds_once_and_leaves_other_weights_as_they_are(steps, tmp_path):
    step = steps("qwen3_moe-0.19")
    base = tensors_of(Path(read_manifest(step).info["base"]["path"]))
    merge(step, tmp_path / "fp32")
    merge(step, tmp_path / "bf16", dtype="bf16")
    whole, rounded = tensors_of(tmp_path / "fp32"), tensors_of(tmp_path / "bf16")
    changed = {name for name in base if not torch.equal(base[name], whole[name])}
    assert {name.split(".")[-2] for name in changed} == {
        "q_proj",
        "v_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    assert all(torch.equal(rounded[name], whole[name].bfloat16()) for name in whole)
    file = load_file(STORED / "qwen3_moe-0.19/adapter_model.safetensors")
    at = "base_model.model.model.layers.1.mlp.experts.lora_"
    a, b = file[f"{at}A.weight"], file[f"{at}B.weight"]
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    change = 7 / 2 * (b[:, 5::8].double() @ a[10:12].double())
    assert off(whole[name], base[name] + change) < 1e-6 and off(whole[name], base[name]) > 0.01


def test_another_base_is_refused(steps, tmp_path):
    step = steps("qwen3_moe-0.19")
    other = steps("qwen3_moe-0.18").parent / "bases/mixtral"
    saved_base("mixtral", other.parent)
    with pytest.raises(ValueError, match="is not the base of"):
        export_adapter(step, tmp_path / "a", base=other)
    changed = tmp_path / "base"
    changed.mkdir()
    for path in Path(read_manifest(step).info["base"]["path"]).iterdir():
        (changed / path.name).write_bytes(path.read_bytes())
    text = (changed / "config.json").read_text()
    (changed / "config.json").write_text(text.replace('"bos_token_id": 1', '"bos_token_id": 3'))
    with pytest.raises(ConfigError, match="holds other weights than"):
        merge(step, tmp_path / "hf", base=changed)
    assert not (tmp_path / "hf").exists()


def test_a_step_without_adapters_is_refused(steps, tmp_path):
    from tmoe.hf import import_hf

    base = Path(read_manifest(steps("qwen3_moe-0.19")).info["base"]["path"])
    import_hf(base, tmp_path / "step")
    for command in (export_adapter, merge):
        with pytest.raises(ConfigError, match="holds no adapters"):
            command(tmp_path / "step", tmp_path / "out")
    import_adapter(STORED / "qwen3_moe-0.19", tmp_path / "adapted", base=tmp_path / "step")  # a step as base
    merge(tmp_path / "adapted", tmp_path / "hf")
    assert off(logits_of_hf(tmp_path / "hf"), logits_of(STORED / "qwen3_moe-0.19")) < BAR
    export_adapter(tmp_path / "adapted", tmp_path / "out")


def test_pefts_folders_are_named_with_the_command_for_them(tmp_path):
    """merge and export-adapter read steps, and a folder in the place of a file is no folder of PEFT's."""
    for command in (export_adapter, merge):
        with pytest.raises(ConfigError, match=r"a folder of PEFT's.*import-adapter .*qwen3_moe-0.19 STEP"):
            command(STORED / "qwen3_moe-0.19", tmp_path / "out")
    (tmp_path / "odd/adapter_config.json").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"adapter_config.json in it is a folder"):
        find_adapters(tmp_path / "odd", "adapter")
