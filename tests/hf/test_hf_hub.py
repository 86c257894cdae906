"""A name on the hub where a folder is meant, and an export that is uploaded, against a stand-in for the hub.

next: tmoe/hf/hub_folders.py
"""

from pathlib import Path

import pytest
import torch
from hf_tiny import assert_bits, files_of, load_step, saved, tensors_of, train_and_save
from hub_server import COMMIT, serving
from huggingface_hub import ModelCard, constants

from tmoe.checkpoint.manifest import CheckpointError
from tmoe.cli.parse import flags_of, parse
from tmoe.config.check import ConfigError
from tmoe.generate.load import load
from tmoe.hf import export_hf, import_hf
from tmoe.hf import hub_folders as hub
from tmoe.hf.load_weights import model_of

NAME = "owner/tiny.moe-1b"


def test_a_name_is_downloaded_once_and_then_a_folder(tmp_path, monkeypatch, capsys):
    """Settings alone for a dry run, the needed files for all else; later the cache is enough."""
    monkeypatch.chdir(tmp_path)
    original = saved(tmp_path / "hf", "qwen3_moe", torch.bfloat16, files=2)
    (original / "README.md").write_text("---\nlicense: mit\n---\n")
    (original / "empty.txt").unlink()  # of which no byte is asked for
    needed = files_of(original)
    files = needed | {"original/model.safetensors": b"x", "pytorch_model.bin": b"x", "consolidated.pth": b"x"}
    with serving(NAME, files, monkeypatch, tmp_path / "cache") as server:
        cfg = parse(["--init", NAME, "--dry-run"], "")
        assert not any(name.endswith(".safetensors") for name in server.given) and server.given
        assert cfg.model == model_of(original)
        cfg = parse(["--init", NAME, "--data.path", str(tmp_path)], "")
        assert sorted(server.given) == sorted(needed)
        assert Path(cfg.init).is_absolute() and hub.name_of(cfg.init) == NAME
        assert flags_of(cfg)["--init"] == repr(COMMIT)
        import_hf(Path(NAME), tmp_path / "step")
        hub._download.cache_clear()
        assert hub.folder_of(NAME) == Path(cfg.init)
        assert len(server.given) == len(needed)
    import_hf(Path(NAME), tmp_path / "again")  # no server any more
    assert_bits(load_step(tmp_path / "step").state_dict(), load_step(tmp_path / "again").state_dict())
    with pytest.raises(ValueError, match="tokenizer"):  # the tiny folder has none, but it was found
        load(NAME)
    export_hf(tmp_path / "step", tmp_path / "back", like=Path(NAME))
    assert files_of(tmp_path / "back") == needed

    with serving(NAME, {}, monkeypatch, tmp_path / "empty"):
        with pytest.raises(
            ConfigError, match=r"^owner/other: no such folder here, and no such model"
        ) as error:
            hub.folder_of("owner/other")
        assert "\n" not in str(error.value)
    for where, words in (
        ("cache", "lacks model-00001|IncompleteSnapshotError"),
        ("none", "no download from the hub"),
    ):
        if where == "cache":
            next((tmp_path / "cache").rglob("model-00001*.safetensors")).unlink()
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / where))
        hub._download.cache_clear()
        with pytest.raises(ConfigError, match=words) as error:
            import_hf(Path(NAME), tmp_path / "third")
        assert f"hf download {NAME} --local-dir {NAME}" in str(error.value) and "\n" not in str(error.value)


def test_what_is_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/model").mkdir(parents=True)
    for path in ("owner/model", "/owner/other", "owner/a/b", "./owner/other", "model", "~owner/x"):
        assert hub.folder_of(path) == Path(path)
    assert hub.name_of("runs/a") is None and hub.commit_of("runs/a") is None


class Api:
    """What an upload asks of HfApi."""

    said: list
    fails = ""

    def whoami(self):
        if self.fails == "login":
            raise ValueError("Token is required\nmore")

    def create_repo(self, repo, *, private, exist_ok):
        self.said.append((repo, private, exist_ok))
        return f"https://huggingface.co/{repo}"

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        if self.fails:
            raise OSError("connection lost\nmore")
        self.said.append((repo_id, sorted(files_of(folder_path)), commit_message))


def trained_from(step: Path, run: Path, **config) -> Path:
    model = load_step(step)
    return train_and_save(run, model.cfg, model, **config)


def test_an_export_is_uploaded(tmp_path, monkeypatch, capsys):
    """In one command: the repository is made, the whole folder is one commit; README.md says what it is."""
    api = type("Fake", (Api,), dict(said=[]))
    monkeypatch.setattr("huggingface_hub.HfApi", api)
    import_hf(saved(tmp_path / "hf", "qwen3_moe"), tmp_path / "start")
    cached = tmp_path / "models--owner--base/snapshots/abc"
    cached.parent.mkdir(parents=True)
    (tmp_path / "hf").rename(cached)
    step = trained_from(tmp_path / "start", tmp_path / "run", init=str(cached))
    export_hf(step, tmp_path / "out", push="me/mine", private=True, license="apache-2.0")
    assert api.said[0] == ("me/mine", True, True)
    assert api.said[1] == ("me/mine", sorted(files_of(tmp_path / "out")), "out, exported by tmoe")
    assert "uploaded to https://huggingface.co/me/mine" in capsys.readouterr().out
    told = ModelCard.load(tmp_path / "out/README.md").data.to_dict()
    assert told == dict(
        license="apache-2.0",
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model="owner/base",
        tags=["qwen3_moe", "moe", "tmoe"],
    )
    (cached / "README.md").write_text("theirs")
    export_hf(step, tmp_path / "kept")
    assert (tmp_path / "kept/README.md").read_text() == "theirs"

    api.fails = "upload"
    with pytest.raises(
        CheckpointError, match=r"connection lost\); again: hf upload me/mine \S*/late --private"
    ):
        export_hf(step, tmp_path / "late", push="me/mine", private=True)
    assert tensors_of(tmp_path / "late").keys() == tensors_of(tmp_path / "out").keys()
    api.fails = "login"
    for flags, words in (
        (dict(push="me/mine"), r"--push=me/mine: this machine has no login to the hub \(Token is required\)"),
        (dict(push="mine"), "--push=mine: must be OWNER/NAME"),
        (dict(private=True), "--private: needs --push"),
    ):
        with pytest.raises(ConfigError, match=words):
            export_hf(step, tmp_path / "never", **flags)
    assert not (tmp_path / "never").exists()
