"""Hugging Face folders as they are found: adapters, Git LFS pointers, byte order marks, missing parts.

next: tmoe/hf/files.py
"""

import json
import shutil
from pathlib import Path

import pytest
from hf_tiny import files_of, saved
from safetensors.torch import load_file, save_file

from tmoe.checkpoint.errors import MismatchError
from tmoe.checkpoint.manifest import CheckpointError
from tmoe.config.check import ConfigError
from tmoe.data.tokenizer import DataError, load_tokenizer
from tmoe.generate.load import find, tokenizer_of
from tmoe.hf import export_hf, import_hf
from tmoe.hf import hub_folders as hub
from tmoe.hf.files import INDEX, SINGLE, Folder, settings_of
from tmoe.hf.foreign import is_folder
from tmoe.hf.load_weights import model_of
from tmoe.hf.tokenizer_files import unknown_of

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
    assert said.endswith("its tokenizer is not known, so it cannot be checked that the data are of it")
    for name in ("merges.txt", "vocab.json", "qwen.tiktoken"):
        (tmp_path / name).write_text("{}")
    said = unknown_of(str(tmp_path))
    assert "of merges.txt, qwen.tiktoken, vocab.json none is read; transformers' AutoTokenizer" in said
    with pytest.raises(
        DataError, match=r"tokenizer\.json: of merges\.txt, qwen\.tiktoken, vocab\.json none is"
    ):
        tokenizer_of(tmp_path, None, None)


@pytest.mark.parametrize(
    ("raw", "says"), [(b"IQ== 0\nIg== 1\n", "a file of tiktoken"), (b"", "file is empty")]
)
def test_a_tokenizer_model_that_is_no_sentencepiece(tmp_path, raw, says):
    """Llama 3 has its tiktoken file under the name that Llama 2's sentencepiece model has."""
    pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer.model").write_bytes(raw)
    with pytest.raises(DataError, match=says):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("raw", [b"", b"{", b"null"])
def test_a_damaged_generation_config_is_no_folder_without_ends(folder, tmp_path, raw):
    (folder / "generation_config.json").write_bytes(raw)
    said = refused(folder, CheckpointError, tmp_path)
    assert f"{folder}/generation_config.json: malformed: " in said


@pytest.mark.parametrize(
    "pointer", [b"/annex/objects/SHA256E-s9--a.safetensors\n", "../.git/annex/objects/a"]
)
def test_git_annex_pointers_are_named(folder, tmp_path, pointer):
    """An unlocked file that is not here is a short text, a locked one a link to nothing."""
    for name in ("config.json", "model-00002-of-00004.safetensors"):
        (folder / name).unlink()
        if isinstance(pointer, bytes):
            (folder / name).write_bytes(pointer)
        else:
            (folder / name).symlink_to(pointer)
    said = refused(folder, CheckpointError, tmp_path)
    assert "config.json, model-00002-of-00004.safetensors: each is a pointer of git-annex" in said
    assert said.endswith("run git annex get in its folder")


def test_a_link_to_nothing_is_named(folder, tmp_path):
    (folder / "model-00002-of-00004.safetensors").unlink()
    (folder / "model-00002-of-00004.safetensors").symlink_to("../../blobs/9")
    said = refused(folder, CheckpointError, tmp_path)
    assert "model-00002-of-00004.safetensors: each a link to nothing, ../../blobs/9 (cp -L" in said


@pytest.mark.parametrize(
    "raw", [b"", b"// of me\n{}", b"<!DOCTYPE html>", b'{"model_type": "qwen2",}', b"[]"]
)
def test_a_damaged_config_is_named_by_every_command(folder, tmp_path, raw):
    (folder / "config.json").write_bytes(raw)
    assert f"{folder}/config.json: malformed: " in refused(folder, CheckpointError, tmp_path)
    (folder / "checkpoints").mkdir()  # a run's, whose config.json has no model_type either
    assert not is_folder(folder)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["consolidated.safetensors"], "here are consolidated.safetensors, in the publisher's own format"),
        (["consolidated.00.pth"], "here are consolidated.00.pth, in the publisher's own format: download"),
        (["m-q4.gguf"], "or a step of these: python -m tmoe.hf import "),
        (["model.fp16.safetensors"], 'from_pretrained(DIR, variant="fp16").save_pretrained(NEW_DIR) writes'),
        (["model-00001-of-00001.safetensors"], f"safetensors: rename it to {SINGLE}"),
        (["weights.safetensors"], f"where it holds the whole model, rename it to {SINGLE}"),
        (
            ["original/consolidated.00.pth"],
            "original/consolidated.00.pth is not read; download the files next",
        ),
        ([], "no file of weights is here; download them: hf download ORG/NAME --local-dir DIR"),
    ],
)
def test_weights_of_other_formats_name_the_way(folder, tmp_path, names, says):
    for file in (*folder.glob("*.safetensors"), folder / INDEX):
        file.unlink()
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    said = refused(folder, CheckpointError, tmp_path)
    assert f"{SINGLE}: missing; " in said and says in said
    if names and "/" not in names[0]:  # as a publisher's own format has it
        (folder / "config.json").unlink()
        with pytest.raises(CheckpointError) as start:
            model_of(folder)
        assert "config.json is missing, which says what the model is; here " in str(start.value)
        assert says in str(start.value)


def test_a_folder_of_folders_and_a_file_name_what_is_meant(whole, tmp_path):
    """Two steps of transformers' Trainer, the second later by its number; a repository of the hub's cache."""
    for name in ("trainer/checkpoint-200", "trainer/checkpoint-1000", "models--a--b/snapshots/ab1"):
        shutil.copytree(whole, tmp_path / name)
    said = refused_to_start(tmp_path / "trainer")
    assert f"did you mean {tmp_path}/trainer/checkpoint-1000 (of 2 such folders in it)?" in said
    for name in ("models--a--b", "models--a--b/snapshots"):
        said = refused_to_start(tmp_path / name)
        assert f"did you mean {tmp_path}/models--a--b/snapshots/ab1?" in said
    for load in (find, Folder):
        with pytest.raises(ConfigError, match=r"INDEX: a file.*holds it: .*whole$".replace("INDEX", INDEX)):
            load(whole / INDEX)


def refused_to_start(folder: Path) -> str:
    """The message of `train.py --init` for a folder without a model; `generate` suggests the same folder."""
    with pytest.raises(CheckpointError) as init:
        model_of(folder)
    with pytest.raises(CheckpointError) as generate:
        find(folder)
    assert str(init.value).rpartition("did you mean ")[2][:40] in str(generate.value)
    return str(init.value)


@pytest.mark.parametrize(
    ("quantised", "says"),
    [
        (dict(quant_method="gptq", bits=4), "quant_method='gptq': only fp8 in blocks, compressed-tensors"),
        (dict(quant_method="bitsandbytes"), "from_pretrained(DIR).dequantize().save_pretrained(NEW_DIR)"),
        (dict(bits=4), "{'bits': 4}, without a quant_method: only fp8 in blocks"),
        (dict(quant_method="fp8", activation_scheme="static"), "FineGrainedFP8Config(dequantize=True)"),
        (
            dict(quant_method="compressed-tensors", format="float-quantized", config_groups={}),
            "CompressedTensorsConfig(dequantize=True)",
        ),
    ],
)
def test_quantised_weights_that_are_not_read_name_the_way(folder, quantised, says):
    config = json.loads((folder / "config.json").read_text()) | dict(quantization_config=quantised)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        model_of(folder)
    assert says in str(error.value) and "take the published folder of 16-bit weights" in str(error.value)


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("_orig_mod.", "names begin with _orig_mod., as torch.compile writes them"),
        ("module.", "names begin with module., as DistributedDataParallel writes them"),
        ("base_model.model.", "names begin with base_model.model., as PEFT writes them"),
        ("", "names lack model. in front, as AutoModel writes them, without a head"),
    ],
)
def test_names_that_all_differ_are_one_line(tmp_path, before, says):
    file = saved(tmp_path / "hf", "qwen2") / SINGLE
    tensors = load_file(file)
    if before:
        tensors = {before + name: tensor for name, tensor in tensors.items()}
    else:
        tensors = {name.removeprefix("model."): t for name, t in tensors.items() if name != "lm_head.weight"}
    save_file(tensors, file)
    with pytest.raises(MismatchError) as error:
        import_hf(tmp_path / "hf", tmp_path / "step")
    assert str(error.value).splitlines()[1].strip().startswith(says) and "1 difference" in str(error.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "pytorch_model_fsdp_0/__0_0.distcp",
            "python -m tmoe.hf recover {}/pytorch_model_fsdp_0 OUT ORIGINAL",
        ),
        ("zero_to_fp32.py", "python zero_to_fp32.py --safe_serialization DIR NEW_DIR writes it"),
        ("training_args.bin", "no file of weights is here; download them"),
    ],
)
def test_a_trainers_folder_without_whole_weights(folder, tmp_path, name, says):
    for file in (*folder.glob("*.safetensors"), folder / INDEX):
        file.unlink()
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"x")
    assert says.format(folder) in refused(folder, CheckpointError, tmp_path)
