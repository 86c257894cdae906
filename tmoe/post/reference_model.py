"""Log-probs of a frozen reference: computed once, and kept with hashes of all that they depend on.

    store = ReferenceStore.open(run / "reference", rows=len(pairs), weights=weights_hash(start),
                                tokens=tokens_hash(rows), settings=dict(template=..., dtype="bf16", ...))
    for piece in store.missing():                   # after a stop: the remaining pieces
        store.write(piece, sums_of(piece))          # [rows of the piece, ...]
    refs = store.read()                             # [rows, ...]

Each piece is a separate file, whole or absent. A folder for other weights, tokens or settings is refused.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tmoe.base.disk import HashedFile, sync_folder
from tmoe.checkpoint.base import weights_hash as weights_hash
from tmoe.config.check import ConfigError

NAME = "identity.json"
PIECE = 4096  # rows of a file; a stop loses the work on one file, a few minutes at most


class ReferenceStore:
    """The reference's log-probs of `rows` rows, of any further shape. All ranks may open the same store."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Called by `open`, which has checked the arguments."""
        self.folder, self.rows = folder, facts["rows"]
        self.identity = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    @classmethod
    def open(
        cls,
        folder: str | Path,
        rows: int,
        weights: str,
        tokens: str,
        settings: Mapping[str, Any],
        otherwise: str = "remove it, or name another folder",
    ) -> Self:
        """The store in this folder; it is made if there is none.

        Args:
            folder: where the store is.
            rows: number of rows.
            weights: `weights_hash` of the reference; with adapters that are off, of their base.
            tokens: `tokens_hash` of all rows in order.
            settings: every other setting that changes a log-prob, of JSON's types: dtype, temperature,
                fp32_logits. Template and tokenizer are not needed, because `tokens` depends on both.
            otherwise: what to do about a folder with another identity, for the error.

        Raises ConfigError where the folder holds log-probs with another identity.
        """
        folder = Path(folder)
        facts = json.loads(
            json.dumps(dict(rows=rows, weights=weights, tokens=tokens, settings=dict(settings)))
        )
        folder.mkdir(parents=True, exist_ok=True)
        try:
            stored = json.loads((folder / NAME).read_text())
        except FileNotFoundError:
            _write(folder / NAME, json.dumps(facts, indent=1, sort_keys=True).encode())
            stored = facts
        except ValueError as error:
            raise ConfigError(f"{folder / NAME}: is damaged ({error}): remove {folder}") from error
        if words := "; ".join(_differences(stored, facts)):
            raise ConfigError(f"{folder}: holds reference log-probs of something else ({words}): {otherwise}")
        return cls(folder, stored)

    def pieces(self) -> list[range]:
        """All rows, in the ranges that files hold; the ranges are the same for any number of ranks."""
        return [range(i, min(i + PIECE, self.rows)) for i in range(0, self.rows, PIECE)]

    def missing(self) -> list[range]:
        """Pieces without a file. Ranks that compute together must use one rank's list."""
        return [piece for piece in self.pieces() if not self._path(piece).exists()]

    def write(self, piece: range, values: Tensor) -> None:
        """Writes a piece's log-probs, [rows of the piece, ...]. One rank must write each piece."""
        if piece not in self.pieces() or len(values) != len(piece):
            shape = tuple(values.shape)
            raise ValueError(f"piece: got {piece} with values {shape}, must be one of pieces() with its rows")
        values = values.detach().cpu().contiguous()
        about = {"identity": self.identity, "sha256": _digest(values)}
        _write(self._path(piece), save({"logps": values}, about))

    def read(self) -> Tensor:
        """All rows, [rows, ...]. ConfigError, which names the file, for one that is missing or damaged."""
        parts = [self._part(piece) for piece in self.pieces()]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def _part(self, piece: range) -> Tensor:
        path = self._path(piece)
        try:
            with safe_open(path, "pt") as file:
                values, about = file.get_tensor("logps"), file.metadata() or {}
        except FileNotFoundError as error:
            raise ConfigError(f"{path}: is missing: compute it again") from error
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: is damaged ({error}): remove it, and it is computed again") from error
        if about.get("identity") != self.identity:
            raise ConfigError(f"{path}: belongs to another store: remove it")
        if len(values) != len(piece) or about.get("sha256") != _digest(values):
            raise ConfigError(f"{path}: is damaged (its hash differs): remove it, and it is computed again")
        return values

    def _path(self, piece: range) -> Path:
        return self.folder / f"rows-{piece.start:09}.safetensors"


def tokens_hash(rows: Iterable[Iterable[Tensor]]) -> str:
    """A hash of all rows in order. A row is given as its tensors: token ids, masks, places of pairs."""
    sha = hashlib.sha256()
    for row in rows:
        sha.update(b"row")
        for t in row:
            sha.update(f"{t.dtype} {tuple(t.shape)}\n".encode())
            sha.update(_bytes(t))
    return sha.hexdigest()


def _bytes(t: Tensor) -> bytes:
    return t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if t.numel() else b""


def _digest(t: Tensor) -> str:
    return hashlib.sha256(f"{t.dtype} {tuple(t.shape)}\n".encode() + _bytes(t)).hexdigest()


def _write(path: Path, data: bytes) -> None:
    """Writes a file, whole or absent, even if several ranks write it at once."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with HashedFile(aside) as file:
            file.write(data)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)


def _differences(stored: Any, wanted: Mapping[str, Any]) -> list[str]:
    """The differences between two identities, in words."""
    if not isinstance(stored, dict):
        return ["it is not an identity that tmoe wrote"]
    old, new = ({**facts, **(facts.get("settings") or {})} for facts in (stored, wanted))
    names = sorted((old.keys() | new.keys()) - {"settings", "data"})  # data: older stores' names of sources
    return [f"{n}: {old.get(n)!r} there, {new.get(n)!r} here" for n in names if old.get(n) != new.get(n)]
