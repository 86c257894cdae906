"""Resolves names on the Hugging Face hub to local folders, and uploads exports to the hub.

next: hub.py, hf/files.py
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from tmoe.checkpoint.manifest import CheckpointError
from tmoe.config.check import ConfigError
from tmoe.hf.foreign import require_no_adapter
from tmoe.hub import NAME, download, fetch

# SETTINGS and NEEDED are the files that tmoe reads or copies to an export. The folders of a repository
# (original/, onnx/) and Mistral's consolidated files hold the same weights again.
SETTINGS = ("*.json", "*.model", "*.jinja", "*.txt", "*.py", "README.md", "LICENSE*", "NOTICE*")
NEEDED = ("*.safetensors", *SETTINGS)
LEFT_OUT = ("*/*", "consolidated*")


def folder_of(path: str | Path, weights: bool = True) -> Path:
    """The folder of a path or a hub name. An existing path, or one that cannot be a name, is returned itself.

    Downloads files that the cache lacks, with a progress bar: one process of a machine at a time, so that the
    waiting processes find the files in the cache.
    weights: False if settings and tokenizer are enough.
    ConfigError, in one line, if the hub has no such repository, or if it does not answer and the cache lacks
    the repository.
    """
    name = str(path)
    return Path(path) if Path(path).exists() or not NAME.fullmatch(name) else _download(name, weights)


def name_of(folder: str) -> str | None:
    """The hub name of a folder in huggingface_hub's cache; None for another folder."""
    match = re.search(r"models--([^/]+)--([^/]+)/snapshots/[^/]+/?$", folder)
    return f"{match[1]}/{match[2]}" if match else None


def commit_of(folder: str) -> str | None:
    """The commit that a folder in huggingface_hub's cache holds; None for another folder."""
    return Path(folder).name if name_of(folder) else None


@cache
def _download(name: str, weights: bool) -> Path:
    folder = download(name, NEEDED if weights else SETTINGS, LEFT_OUT)
    require_no_adapter(folder)
    if lacks := _lacks(folder) if weights else []:
        raise ConfigError(
            f"{name}: {folder} in the cache lacks {lacks[0]}"
            f"{f' and {len(lacks) - 1} more files' if lacks[1:] else ''}; {fetch(name)}"
        )
    return folder


def _lacks(folder: Path) -> list[str]:
    """Files that a complete folder has and that this folder, downloaded in part, lacks."""
    wanted = ["config.json"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        wanted += sorted({*json.loads(index.read_text()).get("weight_map", {}).values()})
    else:
        wanted.append("model.safetensors")
    return [file for file in wanted if not (folder / file).is_file()]


# ---- upload ----


def require_login(repo: str) -> None:
    """ConfigError unless `repo` is a name of two parts and this machine is logged in to the hub."""
    from huggingface_hub import HfApi

    if not NAME.fullmatch(repo):
        raise ConfigError.of("push", repo, "must be OWNER/NAME")
    try:
        HfApi().whoami()
    except Exception as error:  # no token, a wrong token, or no connection
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        wrong = f"this machine has no login to the hub ({why}); hf auth login"
        raise ConfigError.of("push", repo, wrong) from None


def upload(folder: Path, repo: str, private: bool) -> str:
    """Upload a folder as one commit to a model repository, created if needed. Returns its address.

    CheckpointError, which names the command to try again, if the upload fails.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        made = api.create_repo(repo, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=f"{folder.name}, exported by tmoe")
    except Exception as error:  # whatever the error, the folder is complete
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        again = f"hf upload {repo} {folder}{' --private' * private}"
        raise CheckpointError(
            f"{folder}: written, but not uploaded ({type(error).__name__}: {why}); again: {again}"
        ) from None
    return str(made)
