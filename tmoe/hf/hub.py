"""A name on the Hugging Face hub where a folder is meant, and an export uploaded to the hub.

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

# What tmoe reads and what an export carries. Folders in a repository hold the weights once more (original/,
# onnx/), as do Mistral's consolidated files.
SETTINGS = ("*.json", "*.model", "*.jinja", "*.txt", "*.py", "README.md", "LICENSE*", "NOTICE*")
NEEDED = ("*.safetensors", *SETTINGS)
LEFT_OUT = ("*/*", "consolidated*")


def folder_of(path: str | Path, weights: bool = True) -> Path:
    """The folder that a path or a hub name means; a path that is there, or can be no name, as it is.

    Downloads what the cache lacks, with a progress bar: one process of a machine at a time, and those that
    waited find the files there. weights: False: settings and tokenizer are enough.
    ConfigError, in one line, where the hub has no such repository or does not answer and the cache lacks it.
    """
    name = str(path)
    return Path(path) if Path(path).exists() or not NAME.fullmatch(name) else _download(name, weights)


def name_of(folder: str) -> str | None:
    """The hub name of a folder in huggingface_hub's cache; None for another folder."""
    found = re.search(r"models--([^/]+)--([^/]+)/snapshots/[^/]+/?$", folder)
    return f"{found[1]}/{found[2]}" if found else None


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
    """Files that a whole folder has and this one, downloaded in part, has not."""
    wanted = ["config.json"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        wanted += sorted({*json.loads(index.read_text()).get("weight_map", {}).values()})
    else:
        wanted.append("model.safetensors")
    return [file for file in wanted if not (folder / file).is_file()]


# ---- upload ----


def require_login(repo: str) -> None:
    """ConfigError unless uploads to `repo` can begin: a name of two parts, and a login of the hub."""
    from huggingface_hub import HfApi

    if not NAME.fullmatch(repo):
        raise ConfigError.of("push", repo, "must be OWNER/NAME")
    try:
        HfApi().whoami()
    except Exception as error:  # no token, a wrong one, no connection
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        wrong = f"the hub knows no login here ({why}); hf auth login"
        raise ConfigError.of("push", repo, wrong) from None


def upload(folder: Path, repo: str, private: bool) -> str:
    """Upload a folder as one commit of a model repository, made if it is not there. Returns its address.

    CheckpointError, which says how to try again, where the upload fails.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        made = api.create_repo(repo, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=f"{folder.name}, exported by tmoe")
    except Exception as error:  # the folder is whole, whatever happened
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        again = f"hf upload {repo} {folder}{' --private' * private}"
        raise CheckpointError(
            f"{folder}: written, but not uploaded ({type(error).__name__}: {why}); again: {again}"
        ) from None
    return str(made)
