"""Adapters that PEFT saved, in every layout: a model computes the logits of PEFT, or the file is refused.

next: tests/lib/peft_tiny.py
"""

import json

import pytest
import torch
from peft_tiny import STORED, copied, logits_of, logits_of_step, off, saved_base, stored
from safetensors.torch import load_file

from tmoe.checkpoint.errors import CheckpointError
from tmoe.config.check import ConfigError
from tmoe.hf.adapters.commands import import_adapter
from tmoe.hf.adapters.read import PeftFolder
from tmoe.hf.command_line import main

BAR = 1e-5


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return tmp_path_factory.mktemp("bases")


@pytest.fixture
def imported(bases, tmp_path):
    """Logits of the step that `import-adapter` writes."""

    def logits(adapter, **more):
        base = saved_base(adapter.name.split("-")[0], bases)
        import_adapter(adapter, tmp_path / "step", base=base, **more)
        return logits_of_step(tmp_path / "step")

    return logits


@pytest.mark.parametrize("name", stored())
def test_a_step_of_a_stored_adapter_has_pefts_logits(imported, name):
    """Five families, PEFT 0.19 and 0.18, ranks 3 and 2, alphas, rsLoRA, one matrix alone, experts apart."""
    assert off(imported(STORED / name), logits_of(STORED / name)) < BAR


def test_a_module_named_as_a_parameter_is_read(imported, tmp_path):
    """target_parameters of PEFT may name the weight of a linear layer; its patterns have that name."""
    name = "qwen3_moe-0.19"
    named = ["experts.down_proj", "experts.gate_up_proj", "self_attn.q_proj.weight"]
    patterns = dict(rank_pattern={"experts.down_proj": 2, "q_proj.weight": 3, "q_proj": 5})
    patterns |= dict(r=3, target_modules=["v_proj"], target_parameters=named)
    assert off(imported(copied(name, tmp_path, **patterns)), logits_of(STORED / name)) < BAR


def grouped(tensors):
    """The file as unsloth wrote it until 2026-09: B's column e r + j in place of j E + e."""
    found = dict(tensors)
    for name, b in tensors.items():
        if ".experts." in name and ".lora_B." in name:
            found[name] = b.unflatten(1, (-1, 8)).mT.flatten(1).contiguous()
    return found


def test_unsloths_order_is_read_by_field_and_by_flag(imported, tmp_path, capsys, bases):
    want = logits_of(STORED / "qwen3_moe-0.19")
    said = copied("qwen3_moe-0.19", tmp_path, grouped, lora_B_layout="grouped_by_expert")
    assert off(imported(said), want) < BAR
    (tmp_path / "b").mkdir()
    mute = copied("qwen3_moe-0.19", tmp_path / "b", grouped, auto_mapping=dict(unsloth_fixed=True))
    base = saved_base("qwen3_moe", bases)
    import_adapter(mute, tmp_path / "b/step", base=base, b_order="grouped_by_expert")
    assert off(logits_of_step(tmp_path / "b/step"), want) < BAR
    assert "--b-order" not in capsys.readouterr().out
    import_adapter(mute, tmp_path / "b/other", base=base)  # PEFT's order, with a line
    assert off(logits_of_step(tmp_path / "b/other"), want) > 0.1
    assert "--b-order grouped_by_expert" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="lora_B_layout=grouped_by_expert"):
        import_adapter(said, tmp_path / "b/third", base=base, b_order="rank_major")


@pytest.mark.parametrize("name", ["qwen3_moe-0.18", "qwen3_moe-0.19", "gpt_oss-0.18"])
def test_shapes_tell_the_layout_without_a_version(imported, tmp_path, name):
    assert off(imported(copied(name, tmp_path, peft_version=None)), logits_of(STORED / name)) < BAR


@pytest.mark.parametrize("version", ["0.18", "0.19"])
def test_square_matrices_need_a_version(bases, tmp_path, version):
    def gate_up(tensors):
        """gate_up alone, [16, 16] for each expert."""
        kept = {n: t for n, t in tensors.items() if "experts.lora" not in n}
        return {n.replace(".base_layer", ""): t for n, t in kept.items()}

    base = saved_base("olmoe", bases)
    fields = dict(target_parameters=["experts.gate_up_proj"], peft_version=None)
    adapter = copied(f"olmoe-{version}", tmp_path, gate_up, **fields)
    with pytest.raises(ConfigError, match=r"matrices are square.*--peft-version 0\.18, or 0\.19"):
        import_adapter(adapter, tmp_path / "step", base=base)
    for said in ("0.18", "0.19"):
        import_adapter(adapter, tmp_path / said, base=base, peft_version=said)
    (tmp_path / "b").mkdir()
    stated = copied(f"olmoe-{version}", tmp_path / "b", gate_up, **fields | dict(peft_version=f"{version}.1"))
    import_adapter(stated, tmp_path / "stated", base=base)
    same = {
        said: off(*map(logits_of_step, (tmp_path / said, tmp_path / "stated"))) for said in ("0.18", "0.19")
    }
    assert same.pop(version) == 0 and max(same.values()) > 0.01
    with pytest.raises(ConfigError, match="states"):
        import_adapter(
            stated, tmp_path / "no", base=base, peft_version="0.18" if version == "0.19" else "0.19"
        )


FIELDS = [
    (dict(use_dora=True), "use_dora=true: DoRA"),
    (dict(lora_bias=True), "lora_bias=true"),
    (dict(fan_in_fan_out=True), "fan_in_fan_out=true"),
    (dict(layers_to_transform=[0]), r"layers_to_transform=\[0\]"),
    (dict(layers_to_transform=0), "layers_to_transform=0"),
    (dict(modules_to_save=["lm_head"]), "modules_to_save="),
    (dict(megatron_config=dict(a=1)), "megatron_config="),
    (dict(trainable_token_indices=[3]), "trainable_token_indices="),
    (dict(use_bdlora=dict(nblocks=2)), "use_bdlora="),
    (dict(use_something_of_2031=True), "use_something_of_2031=true: not a field"),
    (dict(bias="lora_only"), 'bias="lora_only"'),
    (dict(init_lora_weights="pissa"), 'init_lora_weights="pissa".*changes the base'),
    (dict(peft_type="LOHA"), 'peft_type="LOHA"'),
    (dict(r=4), "has rank 3, by adapter_config.json 4"),
    (dict(rank_pattern={"experts.(": 2}), "rank_pattern=.*no regular expression"),
    (dict(alpha_pattern={"q_proj": 0}), "alpha_pattern=.*not a number above 0"),
    (dict(alpha_pattern={"q_proj": float("inf")}), "alpha_pattern=.*not a number above 0"),
    (dict(lora_alpha=float("nan")), "lora_alpha=NaN: not a number above 0"),
    (dict(lora_dropout=1.5), "lora_dropout=1.5: not a share"),
    (dict(r=None), "r=null: missing"),
    (dict(lora_alpha="16"), "lora_alpha=.*malformed"),
    (dict(lora_B_layout="spiral"), 'lora_B_layout="spiral".*rank_major or grouped_by_expert'),
    (dict(target_modules=["q_proj"]), "v_proj: target_modules does not name it"),
    (dict(target_modules=r".*\.0\..*_proj"), r"layers.1.self_attn.q_proj: target_modules does not name it"),
    (dict(exclude_modules=["layers.1.self_attn.v_proj"]), "v_proj: target_modules does not name it"),
    (dict(target_modules="("), "target_modules=.*no regular expression"),
    (dict(target_parameters=["experts.down_proj"]), "target_parameters does not say"),
]


@pytest.mark.parametrize(("fields", "said"), FIELDS)
def test_a_field_that_is_not_computed_is_refused_by_name(bases, tmp_path, fields, said):
    adapter = copied("qwen3_moe-0.19", tmp_path, **fields)
    with pytest.raises(ValueError, match=said):
        import_adapter(adapter, tmp_path / "step", base=saved_base("qwen3_moe", bases))
    assert not (tmp_path / "step").exists()


AT = "base_model.model.model"
TENSORS = [
    (f"{AT}.layers.0.self_attn.q_proj.lora_magnitude_vector.weight", (32,), "DoRA"),
    (f"{AT}.embed_tokens.weight", (31, 16), "whole weights"),
    (f"{AT}.embed_tokens.lora_embedding_A", (3, 31), "adapter of the embedding"),
    (f"{AT}.layers.0.self_attn.q_proj.lora_B.bias", (32,), "no such name"),
    (f"{AT}.layers.0.self_attn.o_proj.lora_A.weight", (3, 32), "lora_B.weight: missing"),
]


@pytest.mark.parametrize(("name", "shape", "said"), TENSORS)
def test_a_tensor_that_is_not_read_is_refused_by_name(bases, tmp_path, name, shape, said):
    adapter = copied("qwen3_moe-0.19", tmp_path, lambda file: file | {name: torch.zeros(shape)})
    with pytest.raises(CheckpointError, match=said) as refused:
        import_adapter(adapter, tmp_path / "step", base=saved_base("qwen3_moe", bases))
    assert name.rpartition(".lora_A")[0] in str(refused.value) or name in str(refused.value)


PAIRS = [
    ("lm_head", 16, 31, "tmoe has no adapter of this layer"),
    ("model.layers.0.mlp.gate", 16, 8, "tmoe has no adapter of this layer"),
    ("model.layers.2.self_attn.q_proj", 16, 32, "the base has no such layer"),
    ("model.layers.0.self_attn.k_proj", 16, 32, r"the base's matrix has \(in, out\) \(16, 16\)"),
]


@pytest.mark.parametrize(("module", "width", "out", "said"), PAIRS)
def test_a_pair_of_no_matrix_of_the_base_is_refused_by_name(bases, tmp_path, module, width, out, said):
    more = {
        f"base_model.model.{module}.lora_A.weight": torch.zeros(3, width),
        f"base_model.model.{module}.lora_B.weight": torch.zeros(out, 3),
    }
    adapter = copied("qwen3_moe-0.19", tmp_path, lambda file: file | more, target_modules=None)
    with pytest.raises(CheckpointError, match=said) as refused:
        import_adapter(adapter, tmp_path / "step", base=saved_base("qwen3_moe", bases))
    assert module in str(refused.value)


def test_the_command_ends_with_one_line(bases, tmp_path, capsys):
    base = saved_base("qwen3_moe", bases)
    adapter = copied("qwen3_moe-0.19", tmp_path, use_dora=True)
    with pytest.raises(SystemExit) as ended:
        main(["import-adapter", str(adapter), str(tmp_path / "step"), "--base", str(base)])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("error: ") and "use_dora=true" in said
    with pytest.raises(SystemExit) as ended:  # no --base, and the file names "tiny"
        main(["import-adapter", str(STORED / "qwen3_moe-0.19"), str(tmp_path / "step")])
    assert ended.value.code == 2 and "--base: " in capsys.readouterr().err
    torn = copied("qwen3_moe-0.18", tmp_path, base_model_name_or_path=5, r=None)  # the base is not the fault
    for wrong, words in ((tmp_path / "no", "missing"), (torn, "r=null")):
        with pytest.raises(SystemExit):
            main(["import-adapter", str(wrong), str(tmp_path / "step")])
        said = capsys.readouterr().err
        assert words in said and f"error: {wrong}/adapter_config.json: " in said


def test_dropout_is_kept_and_noted(bases, tmp_path, capsys):
    adapter = copied("qwen3_moe-0.19", tmp_path, lora_dropout=0.25)
    import_adapter(adapter, tmp_path / "step", base=saved_base("qwen3_moe", bases))
    assert "lora_dropout=0.25 is of training alone" in capsys.readouterr().out
    assert (
        json.loads((tmp_path / "step/manifest.json").read_text())["info"]["config"]["lora"]["dropout"] == 0.25
    )


def test_equal_as_of_joined_matrices_are_kept_once(bases, tmp_path):
    """q, k and v of one A, as export-adapter writes them: qkv keeps the rank."""

    def shared(file):
        a = file[f"{AT}.layers.0.self_attn.q_proj.lora_A.weight"]
        return {n: a.clone() if "_proj.lora_A" in n and "layers.0" in n else t for n, t in file.items()}

    from tmoe.hf.adapters.base_model import BaseModel

    adapter = copied("qwen3_moe-0.19", tmp_path, shared)
    folder = PeftFolder(adapter, BaseModel(saved_base("qwen3_moe", bases)).sites)
    ranks = [folder.adapter(f"blocks.{i}.attention.qkv").a.shape[0] for i in (0, 1)]
    assert ranks == [3, 6]
    file = load_file(adapter / "adapter_model.safetensors")
    a, b, _ = folder.adapter("blocks.0.attention.qkv")
    q = file[f"{AT}.layers.0.self_attn.q_proj.lora_B.weight"] @ a
    assert torch.equal(b[:32] @ a, q) and not b[32:48].any()
