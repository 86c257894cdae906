"""The list of MoE families, and the rows of docs/huggingface.md, which are made of the table of entries.

next: tmoe/hf/families.py
"""

import re
from pathlib import Path

import pytest

from tmoe.config.check import ConfigError
from tmoe.hf import families
from tmoe.hf.architectures import ARCHITECTURES
from tmoe.hf.command_line import main
from tmoe.hf.families import Family, print_families, standings
from tmoe.hf.rules import Architecture

ROOT = Path(__file__).parents[2]
DENSE = {"llama", "qwen2", "qwen3", "mistral"}
NO_CLASS = {"kimi_k2", "kimi_k25", "qwen3_5_moe_text"}  # not in transformers, or part of another family


def test_every_family_of_the_installed_transformers_is_listed(capsys):
    """Those of the table are imported; the others say in one line what they lack."""
    main(["families"])
    lines = capsys.readouterr().out.splitlines()
    told = dict(line.split(maxsplit=1) for line in lines[:-1])
    assert len(told) >= 60 and lines[-1].startswith(f"{len(told)} families, ")
    ours = {arch.model_type for arch in ARCHITECTURES} - DENSE - NO_CLASS
    assert {name for name, line in told.items() if line.startswith("imports")} == ours
    assert all(told[name].startswith("imports, swaps") for name in ours)
    assert all(line.startswith(("imports", "swaps", "lacks")) and len(line) < 600 for line in told.values())
    assert told["jamba"].startswith("swaps, lacks") and "Mamba" in told["jamba"]
    assert "q_gate_proj" in told["axk2"]
    assert told["muse_spark"].startswith("lacks") and told["dbrx"].startswith("lacks")
    assert told["kolibri1"] == "swaps, lacks parts post_self_attn_layernorm"
    assert told["inkling2"].startswith("swaps if its gate is one of the op's, lacks")


CONFIG = """
class NewVisionConfig(PreTrainedConfig):
    model_type = "new_vision"
    depth: int = 2
class NewConfig(PreTrainedConfig):
    model_type = "new"
    hidden_size: int = 8
    num_experts: int = 4
    {key}: int = 3
"""
MODEL = """
class NewAttention(nn.Module):
    def __init__(self, config):
        self.q_proj = nn.Linear(8, 8)
        self.{part} = nn.Linear(8, 8)
class NewExperts(nn.Module):
    pass
class New{module}(nn.Module):
    pass
class NewVisionTower(nn.Module):
    pass
class NewForCausalLM(NewPreTrainedModel):
    pass
"""


def test_next_months_family_says_what_it_lacks(tmp_path, monkeypatch):
    (tmp_path / "new").mkdir()
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense/modeling_dense.py").write_text("class DenseMLP(nn.Module):\n    pass\n")
    words = dict(key="depth_of_field", part="gate_proj", module="Lens")
    (tmp_path / "new/configuration_new.py").write_text(CONFIG.format(**words))
    (tmp_path / "new/modeling_new.py").write_text(MODEL.format(**words))
    (found,) = families.families(tmp_path)
    assert found == Family(
        "new",
        ("new_vision", "new"),
        ("hidden_size", "num_experts", "depth_of_field"),
        ("Lens",),
        ("q_proj", "gate_proj"),
        (),
        "",
    )
    known = Family("qwen3_moe", ("qwen3_moe",), (), (), ("q_proj",), (), "swaps")
    lacks = "lacks keys depth_of_field; modules Lens; parts gate_proj"
    assert standings([found, known]) == dict(new=lacks, qwen3_moe="imports, swaps")
    plain = found._replace(keys=("hidden_size",), modules=(), parts=("q_proj",))
    assert standings([plain, known])["new"] == "lacks an entry; nothing unknown in its names"
    monkeypatch.setattr(families.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package transformers"):
        print_families()


def test_a_family_of_a_modular_file_alone_is_listed(tmp_path):
    """transformers 5.24 ships sarvam_moe so: the experts are those of the family that they derive from."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    (tmp_path / "old/modeling_old.py").write_text(
        "@use_experts_implementation\nclass OldExperts(nn.Module):\n"
    )
    words = dict(key="depth_of_field", part="gate_proj", module="Lens")
    (tmp_path / "new/configuration_new.py").write_text(CONFIG.format(**words))
    modular = "from ..old.modeling_old import (\n    OldAttention,\n    OldExperts,\n)\n" + MODEL.format(
        **words
    )
    (tmp_path / "new/modular_new.py").write_text(
        modular.replace("NewExperts(nn.Module)", "NewExperts(OldExperts)")
    )
    (tmp_path / "bare").mkdir()  # as sarvam_mla: no class of a model
    (tmp_path / "bare/modular_bare.py").write_text(
        "class BareConfig(OldConfig):\n    n_routed_experts: int = 4\n"
    )
    (tmp_path / "bare/configuration_bare.py").write_text("class BareConfig:\n    n_routed_experts: int = 4\n")
    bare, new, old = families.families(tmp_path)
    assert (bare.name, bare.swaps) == ("bare", "")
    assert (new.name, new.model_types, new.modules, new.swaps) == (
        "new",
        ("new_vision", "new"),
        ("Lens",),
        "swaps",
    )
    assert (old.name, old.swaps) == ("old", "swaps")


def row(arch: Architecture) -> str:
    """An entry in a line of the page's table, by what the entry itself says."""
    settings = {field.ours for field in arch.fields}
    ours = arch.ours
    names = {rule.ours for rule in arch.rules}
    kinds = {"head": "norms of heads", "full": "norms of queries and keys", "rotated": "norms behind RoPE"}
    norm = kinds.get(ours.get("qk_norm", ""), "")
    attention = ["latent" if ours.get("attention") == "mla" else "grouped", norm]
    attention += ["sinks"] * bool(ours.get("sinks")) + ["sinks in windows"] * bool(ours.get("window_sinks"))
    attention += ["windows"] * bool(arch.windows)
    attention += ["other key heads in windows"] * ("window_kv_heads" in settings)
    attention += ["values of another width"] * ("v_head_dim" in settings)
    attention += ["biases"] * ("qkv_bias" in settings | ours.keys())
    attention += ["gate"] * bool(ours.get("attention_gate"))
    attention += ["part of the channels turns"] * bool(arch.partial and attention[0] == "grouped")
    attention += ["queries scaled by position"] * bool(arch.query_beta)
    attention += ["an indexer's keys, up to their number"] * ("index_topk" in settings)
    if arch.linear:
        attention.append("three of four blocks linear" if arch.linear.every else "blocks of Mamba-2")
    attention += ["norms of 1 + weight"] * bool(ours.get("norm_offset"))
    attention += ["neighbours turn"] * bool(ours.get("rope.interleave"))
    attention += ["positions in windows alone"] * bool(arch.windows and arch.windows.rotary)
    norms = ours.get("norms", "")
    attention += ["a norm behind an MoE" if norms == "moe" else f"{norms} norms"] * bool(norms)
    moe = []
    if "moe.experts" in settings:
        moe = [ours.get("moe.score", "softmax")]
        moe += ["groups"] * ("moe.groups" in settings) + ["choice bias"] * bool(ours.get("moe.choice_bias"))
        moe += ["shared"] * any(".moe.shared." in name for name in names)
        moe += ["dense"] * any(name.startswith("blocks.{layer}.ffn.") for name in names)
    kinds = [", ".join(filter(None, words)) for words in (attention, moe)]
    return (
        f"| `{arch.model_type}` | {arch.class_name.removesuffix('ForCausalLM')} | {kinds[0]} | {kinds[1]} |"
    )


def test_every_entry_has_its_row_in_the_docs():
    page = (ROOT / "docs/huggingface.md").read_text()
    shown = re.findall(r"^\| `\w+` \| \w+ \| [^|\n]*\| [^|\n]*\|$", page, re.M)
    want = [row(arch) for arch in ARCHITECTURES]
    assert shown == want, "the table of docs/huggingface.md must be:\n" + "\n".join(want)
