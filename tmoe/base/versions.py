"""The versions with which a run was made: of packages, and the git revision."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tmoe.base.optional import Onlooker

log = logging.getLogger(__name__)


def versions(say: Callable[[str], Any] = log.warning) -> dict[str, Any]:
    """Versions of the software and the GPU, and the git revision and dirty flag of tmoe's source.

    A value is None if it is absent or cannot be read. say: called with a line for each version that cannot be
    read.
    """
    reads: dict[str, Callable[[], Any]] = {
        "python": platform.python_version,
        # torch's own attribute, because the metadata of the package index's wheel does not name its CUDA
        "torch": lambda: str(torch.__version__),
        "triton": lambda: package_version("triton"),
        "tmoe": lambda: package_version("tmoe"),
        "cuda": lambda: torch.version.cuda,
        "gpu": lambda: torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "git": git_state,
    }
    looks = {name: Onlooker(f"version of {name}: could not be read", say) for name in reads}
    return {name: looks[name](read) for name, read in reads.items()}


def package_version(name: str) -> str | None:
    """The installed version of a package; None where it is absent."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state() -> dict[str, Any] | None:
    """{"revision", "dirty"} of the checkout with this file; None if the checkout is not tmoe's."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *args]
        done = subprocess.run(command, capture_output=True, check=True, timeout=10)
        return os.fsdecode(done.stdout).strip()

    try:
        # If tmoe is installed inside another project's repository, git gives that project's revision.
        if Path(git("rev-parse", "--show-toplevel")) != Path(__file__).resolve().parents[2]:
            return None
        return {
            "revision": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None
