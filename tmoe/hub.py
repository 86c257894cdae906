"""Files of repositories on the Hugging Face hub: downloaded once per machine, then read from the cache.

huggingface_hub downloads them, with its cache, login and progress bars. It is installed because tokenizers
requires it, and it is imported only when needed. Without a connection the files are read from the cache. An
error of one line names what the cache lacks.

next: hf/hub_folders.py for models, data/hub_datasets.py for data sets
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from filelock import FileLock

from tmoe.config.check import ConfigError

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
Kind = Literal["model", "dataset"]


def download(
    name: str,
    patterns: Sequence[str],
    ignored: Sequence[str] = (),
    kind: Kind = "model",
    revision: str | None = None,
) -> Path:
    """The folder in the cache that holds the files of a repository that match these patterns.

    One process of a machine downloads missing files and shows a progress bar. The other processes wait for
    it.

    Raises ConfigError, in one line, where the hub has no such repository, or where the hub does not answer
    and the cache lacks the files.
    """
    import huggingface_hub

    with one_line(name, kind), FileLock(cache() / f".tmoe{folder_name(name, kind)}.lock"):
        return Path(
            huggingface_hub.snapshot_download(
                name,
                repo_type=kind,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignored),
            )
        )


def cache() -> Path:
    """The folder of huggingface_hub's cache. It is created if it is missing."""
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE)
    place.mkdir(parents=True, exist_ok=True)
    return place


def folder_name(name: str, kind: Kind) -> str:
    """A name for a file or folder that is unique to a repository."""
    return f"{'' if kind == 'model' else '--datasets'}--{name.replace('/', '--')}"


def fetch(name: str, kind: Kind = "model") -> str:
    """The download command to type on a machine that can reach the hub."""
    what = name if kind == "model" else f"{name} --repo-type dataset"
    return (
        f"where the hub can be reached: hf download {what}, or hf download {what} --local-dir {name} "
        f"to get a folder that can be copied here"
    )


@contextmanager
def one_line(name: str, kind: Kind = "model") -> Iterator[None]:
    """Turns errors of the hub into a ConfigError of one line with advice. name: ORG/NAME or hub:ORG/NAME."""
    from huggingface_hub import errors

    here = "no such folder here, and " if kind == "model" else ""
    try:
        yield
    except errors.GatedRepoError:
        raise ConfigError(
            f"{name}: access is restricted: request it on its page of the hub, then run hf auth login"
        ) from None
    except errors.RepositoryNotFoundError:
        what = "model" if kind == "model" else "data set"
        raise ConfigError(
            f"{name}: {here}no such {what} on the hub for this login (hf auth whoami)"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"{name}: no such revision on the hub (branch, tag or commit)") from None
    except (errors.HFValidationError, errors.HTTPError, OSError) as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"{name}: {here}no download from the hub ({why}); {fetch(name.removeprefix('hub:'), kind)}"
        ) from None
