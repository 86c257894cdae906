"""Reads a Hugging Face folder: its config, and its safetensors box by box; writes safetensors one by one.

next: hf/importer.py
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tmoe.base.disk import absent_words, text_of
from tmoe.checkpoint.errors import refuse
from tmoe.checkpoint.manifest import CheckpointError
from tmoe.config.check import ConfigError
from tmoe.hf.compressed import compressed
from tmoe.hf.config import architecture, ties_unsaid
from tmoe.hf.foreign import (
    CONFIG,
    GENERATION,
    INDEX,
    SINGLE,
    WEIGHTS,
    hint,
    renamed,
    require_folder,
    require_no_adapter,
    require_no_pointers,
    require_single,
)
from tmoe.hf.packed import QUANTISED, Found, Read, View, fp8, mxfp4
from tmoe.hf.rules import EMBEDDING, HEAD, HF, Architecture, TensorPiece

DTYPES = dict(F32=torch.float32, BF16=torch.bfloat16, F16=torch.float16)  # what fp32 holds without rounding
# Types by their names in safetensors, with the bytes of an element, in the order of a file's tensors.
TYPES = dict(U64=8, I64=8, F64=8, F32=4, U32=4, I32=4, BF16=2, F16=2, U16=2, I16=2)
TYPES |= dict(F8_E8M0=1, F8_E4M3=1, F8_E5M2=1, I8=1, U8=1, BOOL=1)
ORDER = {name: i for i, name in enumerate(TYPES)}
# Names, and beginnings of names, of the entries in a step folder from which an export restores the original.
FILE = "hf.file."
EXTRA = "hf.extra."
LAYOUT = "hf.layout"
MODEL = "model."
TIED = "tie_word_embeddings"
ROWS = 1024  # rows that are compared at a time
FORMATS: dict[str, Callable[[dict, dict[str, str], HF], Found]] = {
    "mxfp4": mxfp4,
    "fp8": fp8,
    "compressed-tensors": compressed,
}
Layout = dict[str, dict[str, str]]  # file -> tensor -> dtype, as safetensors names it


class Folder:
    """Names, shapes and types of a folder's tensors, read from the headers alone.

    CheckpointError names files that are missing, damaged or only pointers. ConfigError for a file in place of
    a folder, and for a folder with an adapter (`require_no_adapter`).
    packed: the name of the format of quantised tensors, "" if there are none. The quantised tensors appear as
        the 16-bit tensors that they encode (hf/packed.py). MismatchError names tensors whose type or shape is
        not that of the format.
    own_head: True if config.json ties the head to the embedding, but the files hold another head. The model
        is then read as untied, as in transformers 5, and `config` is changed to this.
    """

    def __init__(self, path: Path):
        self.path = path
        require_folder(path)
        require_no_adapter(path)
        require_no_pointers(path)
        self.config: HF = self._json(CONFIG)
        if (path / GENERATION).is_file():
            self._json(GENERATION)  # it has the ends of answers, so a damaged file must be an error
        if not any((path / name).is_file() for name in (SINGLE, INDEX)):
            architecture(self.config)  # reports an unknown family rather than the missing file
        # If the folder has both, transformers reads the single file: a save over a folder of many files
        # removes these files but leaves their index.
        self.indexed = (path / INDEX).is_file() and not (path / SINGLE).is_file()
        index = self._index() if self.indexed else {}
        if not index:
            require_single(path)
        self.layout: Layout = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.file_of: dict[str, str] = {}
        for file in sorted(set(index.values())) or [SINGLE]:
            self._read_header(file)
        misplaced = [(name, file) for name, file in index.items() if self.file_of.get(name) != file]
        self.problems = [
            f"{name}: {INDEX} places it in {file}, it is "
            f"{f'in {self.file_of[name]}' if name in self.file_of else 'not there'}"
            for name, file in misplaced
        ]
        self.stored_in = dict(self.file_of)
        self.views: dict[str, View] = {}
        quantised = _holder(self.config).get(QUANTISED)
        self.packed = self._see_through(quantised if isinstance(quantised, dict) else {})
        tied = self.config.get(TIED, ties_unsaid(self.config)) is True
        self.own_head = tied and HEAD in self.shapes and not self.repeats(HEAD, EMBEDDING)
        if self.own_head:
            self.config[TIED] = False

    def _see_through(self, quantised: HF) -> str:
        """Replace the tensors of a quantised format by views, which compute values from them.

        Returns the format's name, "" if there is none.
        """
        method = quantised.get("quant_method", "")
        if not isinstance(method, str) or method not in FORMATS:
            return ""
        del _holder(self.config)[QUANTISED]
        dtypes = {n: kind for group in self.layout.values() for n, kind in group.items()}
        try:
            self.views, problems, unread = FORMATS[method](self.shapes, dtypes, quantised)
        except ConfigError as error:
            raise error.within(str(self.path / CONFIG)) from None
        refuse(f"{self.path} holds {method} tensors that cannot be read", problems)
        if not self.views:
            raise ConfigError(
                f"{self.path / CONFIG}: {QUANTISED}: quant_method={method!r}, but no tensor has that format; "
                f"if the weights are not quantised, remove {QUANTISED}"
            )
        for name, view in self.views.items():
            file = self.file_of[view.parts[0]]
            for part in view.parts:
                del self.layout[self.file_of.pop(part)][part], self.shapes[part]
            self.layout[file][name] = view.dtype
            self.shapes[name] = view.shape
            self.file_of[name] = file
        for name in unread:
            del self.layout[self.file_of.pop(name)][name], self.shapes[name]
        self.layout = {file: names for file, names in self.layout.items() if names}
        return method

    def _json(self, name: str) -> Any:
        try:
            value = json.loads(text_of(self.path / name))
        except FileNotFoundError:
            why = f"{self.path / name}: {absent_words(self.path / name)}"
            raise CheckpointError(f"{why}; {self.path} is no Hugging Face folder{hint(self.path)}") from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path / name}: malformed: {error}") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.path / name}: malformed: not an object")
        return value

    def _index(self) -> dict[str, str]:
        index = self._json(INDEX).get("weight_map")
        if (
            not isinstance(index, dict)
            or not index
            or not all(isinstance(file, str) for file in index.values())
        ):
            raise CheckpointError(f"{self.path / INDEX}: malformed: weight_map must give each tensor's file")
        # Check the names now, because an export could not write files of other names.
        require_names(self.path / INDEX, sorted(set(index.values())))
        return index

    def _read_header(self, file: str) -> None:
        with opened(self.path / file) as handle:
            for name in handle.keys():  # noqa: SIM118
                if name in self.file_of:
                    raise CheckpointError(f"{name}: both in {self.file_of[name]} and in {file}")
                part = handle.get_slice(name)
                self.layout.setdefault(file, {})[name] = part.get_dtype()
                self.shapes[name] = tuple(part.get_shape())
                self.file_of[name] = file

    def dtype(self, name: str) -> str:
        return self.layout[self.file_of[name]][name]

    def others(self) -> list[str]:
        """Files that are kept with the weights: config, generation settings, tokenizer, licence.

        The index is included if the folder is read by it.
        """
        names = sorted(
            entry.name for entry in os.scandir(self.path) if entry.is_file() and entry.name[0] != "."
        )
        return [name for name in names if (self.indexed if name == INDEX else not name.endswith(WEIGHTS))]

    def content(self, name: str) -> bytes:
        """The bytes of one of `others`.

        config.json has the contents of `config`. The index of a quantised folder lists the tensors that the
        quantised ones encode.
        """
        if (self.packed or self.own_head) and name == CONFIG:
            return (json.dumps(self.config, indent=2) + "\n").encode()
        if self.packed and name == INDEX:
            return (json.dumps(dict(metadata={}, weight_map=self.file_of), indent=2) + "\n").encode()
        return (self.path / name).read_bytes()

    @contextmanager
    def reading(self) -> Iterator[Read]:
        """Yields a function read(name, slices), which returns a view of the memory-mapped file.

        Slices may have steps, except for tensors stored in fp8. The views are valid, and memory is held,
        until the scope ends.
        """
        with ExitStack() as stack:
            handles: dict[str, Any] = {}

            def read_stored(name: str, box: tuple) -> Tensor:
                file = self.stored_in[name]
                if file not in handles:
                    handles[file] = stack.enter_context(opened(self.path / file))
                part = handles[file].get_slice(name)[tuple(slice(s.start, s.stop) for s in box)]
                return part[tuple(slice(None, None, s.step) for s in box)]  # safetensors supports no steps

            def read(name: str, box: tuple) -> Tensor:
                view = self.views.get(name)
                return view.read(read_stored, box) if view else read_stored(name, box)

            yield read

    def whole(self, name: str) -> Tensor:
        """A whole tensor, as a copy."""
        with self.reading() as read:
            return read(name, tuple(slice(0, n) for n in self.shapes[name])).clone()

    def repeats(self, name: str, other: str) -> bool:
        """Whether a tensor has the values of `other`, bit for bit; True if there is no `other`.

        Reads ROWS rows at a time.
        """
        if other not in self.shapes:
            return True
        shape = self.shapes[name]
        plain = {self.dtype(name), self.dtype(other)} <= {*DTYPES}
        if shape != self.shapes[other] or len(shape) != 2 or not plain:
            return False
        for start in range(0, shape[0], ROWS):
            box = (slice(start, min(start + ROWS, shape[0])), slice(0, shape[1]))
            with self.reading() as read:
                a, b = (read(n, box).float().view(torch.int32) for n in (name, other))
                if not torch.equal(a, b):
                    return False
        return True

    def compare(
        self, arch: Architecture, expected: dict[str, tuple[int, ...]], extra: list[str]
    ) -> list[str]:
        """A line for each tensor that is missing, not expected, or of a wrong shape or type.

        expected: names and shapes. extra: names of further valid tensors.
        Valid types are those that fp32 holds without rounding.
        """
        if why := renamed(expected, self.shapes):
            return [why]
        problems = list(self.problems)
        for name, shape in expected.items():
            if name not in self.shapes:
                problems.append(f"{name}: missing")
            elif self.shapes[name] != shape:
                problems.append(
                    f"{name}: shape {self.shapes[name]}, {arch.model_type} with this config has {shape}"
                )
            elif self.dtype(name) not in DTYPES:
                problems.append(f"{name}: {self.dtype(name)}; valid are {', '.join(DTYPES)}")
        known = expected.keys() | set(extra)
        return problems + [
            f"{name}: {arch.model_type} has no such tensor" for name in self.shapes if name not in known
        ]


def settings_of(folder: Path) -> HF:
    """config.json of a folder that may lack weights, as Folder reads it but without checking the head."""
    require_no_adapter(folder)
    try:
        config = json.loads(text_of(folder / CONFIG))
    except ValueError as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from error
    quantised = _holder(config).get(QUANTISED)
    if isinstance(quantised, dict) and quantised.get("quant_method") in FORMATS:
        del _holder(config)[QUANTISED]
    return config


def _holder(config: HF) -> HF:
    """The object with the quantization_config: the config.json itself, or an object inside it."""
    inside = (part for part in config.values() if isinstance(part, dict) and part.get(QUANTISED))
    return config if config.get(QUANTISED) else next(inside, config)


def untied(folder: Path) -> str:
    """The note of import, direct start and export about a folder whose head is not the tied embedding."""
    return (
        f"{folder / CONFIG} ties {HEAD} to {EMBEDDING}, but the files hold another {HEAD}: "
        f"read as {TIED} false"
    )


def require_names(where: Path, names: Iterable[str]) -> None:
    """CheckpointError if one of the file names found in `where` is a path that leaves its folder."""
    if odd := [name for name in names if Path(name).name != name or name in ("", ".", "..")]:
        raise CheckpointError(f"{where}: file names {odd} leave the folder")


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """An open safetensors file. CheckpointError, which names the file, if it is missing or damaged."""
    try:
        with safe_open(file, "pt") as handle:
            yield handle
    except FileNotFoundError:
        raise CheckpointError(f"{file}: {absent_words(file)}") from None
    except SafetensorError as error:
        raise CheckpointError(f"{file}: damaged: {error}") from error
    except OSError as error:  # safetensors does not name the file
        raise CheckpointError(f"{file}: {error}") from error


def fill(target: Tensor, offset: tuple[int, ...], found: list[TensorPiece], read: Read) -> None:
    """Fill `target` from the pieces. `target` is the box of one of tmoe's tensors that starts at `offset`."""
    for piece in found:
        sides = list(zip(offset, target.shape, piece.offset, piece.shape, strict=True))
        spans = [(max(a, b), min(a + m, b + n)) for a, m, b, n in sides]
        if any(low >= high for low, high in spans):
            continue
        inside = [slice(low - b, high - b) for (low, high), b in zip(spans, piece.offset, strict=True)]
        rows = inside[piece.axis]
        first = rows.start * piece.every + piece.first + piece.lead
        inside[piece.axis] = slice(first, rows.stop * piece.every + piece.lead, piece.every)
        box = piece.to_theirs(tuple(inside))
        box = (*box[:-1], slice(0, 1), box[-1]) if piece.inner else box
        theirs = read(piece.name, (slice(0, 1), *box))[0] if piece.framed else read(piece.name, box)
        theirs = theirs.squeeze(-2) if piece.inner else theirs
        theirs = theirs.mT if piece.transposed else theirs
        slices = tuple(slice(low - a, high - a) for (low, high), a in zip(spans, offset, strict=True))
        target[slices] = theirs


class SafetensorsWriter:
    """Writes a safetensors file: the header first, then the tensors in any order.

    The library's own save_file needs the whole file, usually 5 GB, in memory. The order of tensors and the
    format of the header are the library's, so that a file written by it is restored byte for byte.
    """

    def __init__(self, path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], nbytes: dict[str, int]):
        self.path = path
        self.offset: dict[str, int] = {}
        self.parts: list[tuple[int, int, str]] = []  # start, size and SHA-256 of each write
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
        end = 0
        in_order = sorted(tensors.items(), key=lambda item: (ORDER.get(item[1][0], 0), item[0]))
        for name, (dtype, shape) in in_order:
            start = end
            end = start + nbytes[name]
            self.offset[name] = start
            header[name] = dict(dtype=dtype, shape=shape, data_offsets=[start, end])
        raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        raw += b" " * (-len(raw) % 8)
        self.start = 8 + len(raw)
        self.file = open(path, "xb")  # noqa: SIM115
        # Reserve the whole file, so that a full disk is noticed now.
        self._call(lambda: os.posix_fallocate(self.file.fileno(), 0, self.start + end))
        self._put(0, len(raw).to_bytes(8, "little") + raw)

    def write(self, name: str, tensor: Tensor) -> None:
        flat: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        self._put(self.start + self.offset[name], flat)

    def _put(self, at: int, data: Any) -> None:
        self.file.seek(at)
        self._call(lambda: self.file.write(data))
        self.parts.append((at, len(data), hashlib.sha256(data).hexdigest()))

    def close(self) -> None:
        with self.file:
            self._call(self.file.flush)
            self._call(lambda: os.fsync(self.file.fileno()))

    def _call(self, call: Callable[[], Any]) -> None:
        """Run `call`, and add the name of this file to an OSError that it raises."""
        try:
            call()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def split(tensors: dict[str, tuple[int, ...]], dtype: str, limit: int) -> Layout:
    """Divide tensors, in order, into files of at most `limit` bytes, named as transformers expects."""
    sizes = {name: math.prod(shape) * DTYPES[dtype].itemsize for name, shape in tensors.items()}
    return split_parts((({name: dtype}, nbytes) for name, nbytes in sizes.items()), limit)


def split_parts(parts: Iterable[tuple[dict[str, str], int]], limit: int) -> Layout:
    """`split` for groups of tensors, each of which belongs in one file: (names and types, their bytes)."""
    groups: list[dict[str, str]] = [{}]
    held = 0
    for kinds, nbytes in parts:
        if groups[-1] and held + nbytes > limit:
            groups.append({})
            held = 0
        groups[-1] |= kinds
        held += nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i + 1:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups)}
