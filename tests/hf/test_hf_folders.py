"""Hugging Face folders as they are found: adapters, Git LFS pointers, byte order marks, missing parts.

next: tmoe/hf/files.py
"""

import json
import shutil
from pathlib import Path

import pytest
from hf_tiny import files_of, saved

from tmoe.checkpoint.manifest import CheckpointError
from tmoe.config.check import ConfigError
from tmoe.data.tokenizer import DataError, load_tokenizer
from tmoe.generate.load import find
from tmoe.hf import export_hf, hub, import_hf
from tmoe.hf.files import INDEX, SINGLE, Folder, is_folder, settings_of
from tmoe.hf.start import model_of
from tmoe.hf.tokenizer import unknown_of

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
ADAPTER = dict(peft_type="LORA", base_model_name_or_path="Qwen/Qwen2.5-7B")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("hf") / "whole", "qwen2", files=3)


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "folder")


def refused(folder: Path, kind: type[Exception], tmp_path: Path) -> str:
    """The message of import and of a direct start, which must be one line and the same."""
    with pytest.raises(kind) as imported:
        import_hf(folder, tmp_path / "step")
    with pytest.raises(kind) as started:
        model_of(find(folder))
    assert str(imported.value) == str(started.value) and "\n" not in str(started.value)
    return str(started.value)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_next_to_weights_is_named(folder, tmp_path, name):
    (folder / name).write_text(json.dumps(ADAPTER))
    said = refused(folder, ConfigError, tmp_path)
    assert f"({name}), which would not be applied: merge it with PEFT (merge_and_unload" in said
    assert ("of Qwen/Qwen2.5-7B next to the weights" in said) == (name == "adapter_config.json")
    with pytest.raises(ConfigError, match="an adapter"):
        settings_of(folder)


def test_an_adapter_alone_is_named(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    said = refused(folder, ConfigError, tmp_path)
    assert "is an adapter of Qwen/Qwen2.5-7B (adapter_config.json, adapter_model.safetensors), not a" in said
    with pytest.raises(ConfigError, match="is an adapter of Qwen"):
        hub.require_no_adapter(folder)  # what a download is asked before its missing files are named


@pytest.mark.parametrize(
    "name",
    ["config.json", "model-00002-of-00004.safetensors", INDEX, "tokenizer.json", "generation_config.json"],
)
def test_git_lfs_pointers_are_named(folder, tmp_path, name):
    assert (folder / name).is_file()
    (folder / name).write_bytes(POINTER)
    said = refused(folder, CheckpointError, tmp_path)
    assert f"{name}: each is a Git LFS pointer, not the file itself: run git lfs pull" in said
    assert is_folder(folder)


def test_git_lfs_pointers_are_named_together(folder, tmp_path):
    for file in folder.glob("*.safetensors"):
        file.write_bytes(POINTER)
    said = refused(folder, CheckpointError, tmp_path)
    assert all(f"model-0000{i}-of-00004.safetensors" in said for i in (1, 2, 3, 4))
    (folder / "config.json").write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=r"config\.json: is a Git LFS pointer"):
        settings_of(folder)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja"]
)
def test_a_tokenizer_that_is_a_pointer(tmp_path, name):
    (tmp_path / "tokenizer.json").write_text("{}")
    if name == "tokenizer.model":
        (tmp_path / "tokenizer.json").unlink()
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(DataError, match=f"{name}: is a Git LFS pointer"):
        load_tokenizer(str(tmp_path))


def test_byte_order_marks_are_skipped(folder, tmp_path):
    """Some editors write them; an export brings the bytes back."""
    for name in ("config.json", INDEX, "generation_config.json"):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    assert is_folder(folder) and settings_of(folder)["model_type"] == "qwen2"
    import_hf(folder, tmp_path / "step")
    export_hf(tmp_path / "step", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(folder)


def test_an_index_that_is_missing_or_names_a_missing_file(folder, tmp_path):
    (folder / "model-00002-of-00004.safetensors").rename(tmp_path / "kept")
    assert refused(folder, CheckpointError, tmp_path).endswith("model-00002-of-00004.safetensors: missing")
    (tmp_path / "kept").rename(folder / "model-00002-of-00004.safetensors")
    (folder / INDEX).unlink()
    said = refused(folder, CheckpointError, tmp_path)
    assert f"model-00004-of-00004.safetensors without {INDEX}, which says where each tensor is" in said
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    said = refused(folder, CheckpointError, tmp_path)
    assert f"{SINGLE}: missing; here are pytorch_model.bin, and only safetensors are read" in said


def test_a_cache_of_links_and_a_config_of_few_words(folder, tmp_path):
    """The hub's cache has links to blobs; config.json may name a type "auto", no class, own code."""
    config = json.loads((folder / "config.json").read_text())
    config = {k: v for k, v in config.items() if k != "architectures"}
    config |= dict(torch_dtype="auto", auto_map={"AutoConfig": "configuration_own.Own"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_own.py").write_text("raise RuntimeError\n")
    links = tmp_path / "snapshot"
    links.mkdir()
    for number, file in enumerate(folder.iterdir()):
        blob = tmp_path / f"blob{number}"
        shutil.copy(file, blob)
        (links / file.name).symlink_to(blob)
    import_hf(links, tmp_path / "step")
    export_hf(tmp_path / "step", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(folder)
    assert Folder(links).config["torch_dtype"] == "auto"


def test_a_tokenizer_in_files_that_are_not_read_is_named(tmp_path):
    said = unknown_of(str(tmp_path))
    assert said.endswith("its tokenizer is not known, so nothing tells whether the data are of it")
    for name in ("merges.txt", "vocab.json", "qwen.tiktoken"):
        (tmp_path / name).write_text("{}")
    said = unknown_of(str(tmp_path))
    assert "of merges.txt, qwen.tiktoken, vocab.json none is read; transformers' AutoTokenizer" in said
