"""The table of architectures is whole, and the docs show how to add to it.

next: tmoe/hf/architectures/__init__.py
"""

import re
from pathlib import Path

import pytest

from tmoe.config.check import ConfigError
from tmoe.hf import architectures
from tmoe.hf.architectures import ARCHITECTURES, olmoe, solar
from tmoe.hf.config import READ, read_config, write_config
from tmoe.hf.rules import Architecture

ROOT = Path(__file__).parents[2]
READS = "tmoe/hf/"  # every file: lib/inputs.py
FAMILIES = Path(architectures.__file__).parent


def test_every_entry_of_a_file_is_in_the_table():
    files = [path.stem for path in FAMILIES.glob("*.py") if path.stem not in ("__init__", "common")]
    found = {
        entry.model_type: entry
        for name in files
        for entry in vars(getattr(architectures, name)).values()
        if isinstance(entry, Architecture)
    }
    assert found == {entry.model_type: entry for entry in ARCHITECTURES}
    assert len(found) == len(ARCHITECTURES)


def test_a_key_has_one_type_in_all_entries():
    """config.py reads a key by its type in any of them, unless its own entry says another.

    Those that do not read the key have the type of the first that does.
    """
    kinds: dict[str, list] = {}
    for key in (key for entry in ARCHITECTURES for key in entry.keys):
        kinds.setdefault(key.name, []).append(key.kind)
    others = {"moe_layer_freq": tuple[int, ...]}  # MiMo's is a list
    assert kinds and all(READ[name] == found[0] for name, found in kinds.items())
    for name, found in kinds.items():
        assert {*found} - {others.get(name)} == {found[0]}, name


def test_no_other_file_knows_a_family_by_its_name():
    types = [entry.model_type for entry in ARCHITECTURES]
    for path in FAMILIES.parent.glob("*.py"):
        named = re.findall(rf"[\"']({'|'.join(types)})[\"']", path.read_text())
        assert not named, f"{path}: {named}"


def test_the_docs_show_a_family_whole():
    page = (ROOT / "docs/huggingface.md").read_text()
    (shown,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "Architecture(" in block)
    assert Path(olmoe.__file__).read_text().endswith(shown)
    for entry in ARCHITECTURES:
        assert f"| `{entry.model_type}` |" in page.split("\n\n**")[0], entry.model_type


def test_contributing_shows_a_family_whole():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (shown,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "Architecture(" in block)
    assert Path(solar.__file__).read_text().endswith(shown)
    assert len(Path(solar.__file__).read_text().splitlines()) <= 60


def test_the_keys_that_say_which_blocks_are_moe():
    """Of a Qwen with blocks 0 and 2 of four dense, and of a DeepSeek whose second block begins the MoE."""
    sizes = dict(vocab_size=32, hidden_size=16, num_hidden_layers=4, num_attention_heads=4, head_dim=4)
    sizes |= dict(num_key_value_heads=4, intermediate_size=8, moe_intermediate_size=8, num_experts_per_tok=2)
    sizes |= dict(max_position_embeddings=64)
    qwen = sizes | dict(model_type="qwen3_moe", num_experts=4, mlp_only_layers=[0, 2])
    cfg = read_config(qwen)
    assert [cfg.is_moe(i) for i in range(4)] == [False, True, False, True]
    assert write_config(cfg, "float32")["mlp_only_layers"] == [0, 2]
    latent = dict(kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, q_lora_rank=None)
    deepseek = sizes | latent | dict(model_type="deepseek_v2", n_routed_experts=4, first_k_dense_replace=1)
    cfg = read_config(deepseek | dict(moe_layer_freq=1))
    assert [cfg.is_moe(i) for i in range(4)] == [False, True, True, True]
    cfg = read_config(deepseek | dict(moe_layer_freq=2))
    assert [cfg.is_moe(i) for i in range(4)] == [False, False, True, False]
    hunyuan = sizes | dict(model_type="hy_v3", num_experts=4)
    assert [read_config(hunyuan).is_moe(i) for i in range(4)] == [False, True, True, True]
    kinds = ["sparse", "dense", "sparse", "sparse"]
    cfg = read_config(hunyuan | dict(mlp_layer_types=kinds))
    assert [cfg.is_moe(i) for i in range(4)] == [True, False, True, True]
    assert write_config(cfg, "float32")["mlp_layer_types"] == kinds
    for wrong, words in (
        (dict(mlp_layer_types=kinds[1:]), "dense or sparse for each of 4 layers is computed"),
        (dict(mlp_layer_types=["moe", *kinds[1:]]), "dense or sparse for each of 4 layers is computed"),
        (dict(mlp_layer_types=4), "mlp_layer_types=4: must be"),
        (dict(mlp_layer_types=kinds, first_k_dense_replace=1), "first_k_dense_replace=1: only 0 is computed"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_config(hunyuan | wrong)
