"""A GGUF file from a step folder: keys, tokenizer and tensors, one tensor after another.

next: extras/gguf/families.py, extras/gguf/names.py, extras/gguf/types.py, extras/gguf/vocabulary.py
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor

from tmoe.base.disk import naming, sync_folder
from tmoe.base.listing import listed
from tmoe.checkpoint.manifest import CheckpointError, TensorEntry
from tmoe.checkpoint.rewrite import bar, locked, read_boxes, require_absent, require_ours, room_for
from tmoe.config.check import ConfigError
from tmoe.config.model import ModelConfig, RopeConfig
from tmoe.extras.gguf.encode import encode
from tmoe.extras.gguf.families import Family, family_of, group_of, require_same_function
from tmoe.extras.gguf.keys import write_keys
from tmoe.extras.gguf.names import Entry, entries
from tmoe.extras.gguf.types import MIXES, facts_of, kind_of, padded, size_of
from tmoe.extras.gguf.vocabulary import Vocabulary, bytes_vocabulary, vocabulary
from tmoe.hf.export import Source
from tmoe.hf.files import MODEL
from tmoe.hf.tokenizer_files import of_data
from tmoe.parallel.layout import Box

FACTORS = "rope_freqs.weight"
LLAMA3 = "tmoe.rope.llama3"  # the settings that FACTORS are made of, which llama.cpp does not read
LLAMA3_SETTINGS = ("factor", "original_max_seq", "low_freq_factor", "high_freq_factor")
AT_ONCE = 2**25  # values of a stack that are read and encoded together
PART = "unfinished"  # the file in `OUT.partial`; without a suffix no command reads it
Put = Callable[[str, str, Any], None]


class Content(NamedTuple):
    """All of a file before a tensor is read."""

    family: Family
    cfg: ModelConfig
    name: str
    entries: tuple[Entry, ...]
    kinds: dict[str, str]
    """tensor -> ggml's type"""
    mix: str
    vocabulary: Vocabulary
    notes: tuple[str, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each tensor, without padding."""
        shapes = {entry.name: entry.shape for entry in self.entries}
        if FACTORS in self.kinds:
            shapes = {FACTORS: (self.cfg.rotary_dim // 2,)} | shapes
        return {name: size_of(self.kinds[name], shape) for name, shape in shapes.items()}

    @property
    def data(self) -> int:
        """Bytes of all tensors with padding."""
        return sum(map(padded, self.sizes.values()))


def content_of(source: Source, name: str, mix: str, pre: str, allow: tuple[str, ...]) -> Content:
    """The content of a file of this step. ConfigError for what llama.cpp cannot name or computes otherwise.

    mix: of `MIXES`. pre, allow: as of the command.
    """
    arch, cfg = source.plan.arch, source.plan.cfg
    family = family_of(arch.model_type)
    notes = require_same_function(family, cfg, allow)
    if not family.compared:
        notes.append(f"llama.cpp's {family.name} has not been compared with tmoe on such a file")
    found, missing = entries(family, arch, cfg)
    if missing:
        raise ConfigError(listed(f"llama.cpp's {family.name} has no name for", missing))
    shapes = {entry.name: entry.shape for entry in found}
    experts = cfg.moe.experts if any(map(cfg.is_moe, range(cfg.layers))) else 0
    facts = facts_of(shapes, cfg.layers, experts, group_of(family, cfg), family.name)
    kinds = {name: kind_of(name, shape, mix, facts) for name, shape in shapes.items()}
    if cfg.rope.scaling == "llama3":
        kinds = {FACTORS: "F32"} | kinds
    if source.plan.extra:
        notes.append(f"{len(source.plan.extra)} tensors that the model does not read are not written")
    words, said = _vocabulary_of(source, cfg, pre)
    notes += [said] if said else []
    return Content(family, cfg, name, tuple(found), kinds, mix, words, tuple(notes))


def _vocabulary_of(source: Source, cfg: ModelConfig, pre: str) -> tuple[Vocabulary, str]:
    """The vocabulary, and a note where no file of a tokenizer is known."""
    files = {name: read() for name, read in source.origin.files.items() if not name.endswith(".py")}
    found = vocabulary(files, cfg.vocab, pre)
    if found.model == "none" and of_data(source.manifest) == "bytes":
        return bytes_vocabulary(cfg.vocab), "the tokenizer of bytes is written, in llama.cpp's form"
    if found.model != "none" and "eos" not in found.ids:
        usual = 2 if found.model == "llama" else 11
        return (
            found,
            f"no end of a text is known: llama.cpp takes token {usual} for it",
        )
    none = "no tokenizer is known, and none is written: llama.cpp takes and gives ids alone"
    return found, none if found.model == "none" else ""


# ---- the file ----


def write_file(content: Content, source: Source, out: Path, device: str, dry_run: bool) -> int:
    """Write `out`, under its name when it is whole, and return its bytes.

    The file is first written into the folder `out.partial`, and replaces the part that a killed call left.

    dry_run: only count them. CheckpointError where out exists, out.partial holds other files, another process
    writes it, space is too small or a tensor cannot be encoded, and where the file's size is not the
    predicted one.
    """
    require_absent(out, "file")
    require_ours(out, PART.__eq__)
    with tempfile.TemporaryDirectory() as folder:
        header = Path(folder) / "header.gguf"
        _write_header(content, header)
        head = header.read_bytes()
    head += bytes(padded(len(head)) - len(head))
    size = len(head) + content.data
    room_for(size, out)
    if dry_run:
        return size
    with locked(out) as work:
        part = work / PART
        try:
            with naming(part), open(part, "wb") as file, bar(out.name, size) as tell:
                file.write(head)
                for name, planned in content.sizes.items():
                    begin = file.tell()
                    for raw in _encoded(content, source, name, device):
                        file.write(raw.data)
                    if (written := file.tell() - begin) != planned:
                        raise CheckpointError(f"{part}: {name} has {written} bytes, {planned} were predicted")
                    file.write(bytes(padded(planned) - planned))
                    tell(padded(planned))
                file.flush()
                os.fsync(file.fileno())
            part.rename(out)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    sync_folder(out.parent)
    return size


def _encoded(content: Content, source: Source, name: str, device: str) -> Iterator[np.ndarray]:
    """The bytes of a tensor, in parts."""
    if name == FACTORS:
        yield encode(torch.tensor(llama3_factors(content.cfg.rope, content.cfg.rotary_dim)), "F32", name)
        return
    entry = next(entry for entry in content.entries if entry.name == name)
    for values in read_entry(source.step, source.weights[MODEL + entry.ours], entry):
        yield encode(values.float(), content.kinds[name], f"{source.step}: {entry.ours}", device)


def read_entry(step: Path, stored: TensorEntry, entry: Entry) -> Iterator[Tensor]:
    """A tensor of the file in parts along its first axis: stacks of experts are not read whole."""
    whole = entry.box
    parts = [whole]
    if len(whole.shape) == 3 and not entry.latent:
        many = max(1, AT_ONCE // math.prod(whole.shape[1:]))
        first, others = whole.offset[1:], whole.shape[1:]
        starts = range(0, whole.shape[0], many)
        sizes = (min(many, whole.shape[0] - start) for start in starts)
        parts = [Box(0, (s, *first), (n, *others)) for s, n in zip(starts, sizes, strict=True)]
    for tensor in read_boxes(step, stored, tuple(parts)):
        yield entry.to_file(tensor)


def llama3_factors(rope: RopeConfig, width: int) -> list[float]:
    """The divisors of frequencies in llama3's scaling (Llama 3.1). width: channels that rotate."""
    factors = []
    for i in range(0, width, 2):
        wavelength = 2 * math.pi * rope.theta ** (i / width)
        turns = rope.original_max_seq / wavelength
        share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        share = min(max(share, 0.0), 1.0)
        factors.append(1 / ((1 - share) / rope.factor + share))
    return factors


def _write_header(content: Content, path: Path) -> None:
    """Keys and the table of tensors."""
    writer = gguf.GGUFWriter(path, content.family.name)
    put: dict[str, Callable[[str, Any], None]] = dict(
        uint32=writer.add_uint32, float32=writer.add_float32, bool=writer.add_bool, string=writer.add_string
    )
    put["array"] = writer.add_array
    writer.add_type("model")
    writer.add_name(content.name)
    writer.add_file_type(int(MIXES[content.mix].file_type))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(content.cfg.vocab)
    for name, (kind, value) in write_keys(content.family.keys, content.cfg).items():
        put[kind](f"{content.family.name}.{name}", value)
    if FACTORS in content.kinds:
        rope = content.cfg.rope
        writer.add_array(LLAMA3, [float(getattr(rope, name)) for name in LLAMA3_SETTINGS])
    _put_vocabulary(writer, content.vocabulary)
    shapes = {entry.name: entry.shape for entry in content.entries}
    shapes[FACTORS] = (content.cfg.rotary_dim // 2,)
    values: Any = np.dtype(np.float32)
    for name, size in content.sizes.items():
        kind = gguf.GGMLQuantizationType[content.kinds[name]]
        writer.add_tensor_info(name, shapes[name], values, size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _put_vocabulary(writer: gguf.GGUFWriter, words: Vocabulary) -> None:
    writer.add_tokenizer_model(words.model)
    if words.model == "none":
        return
    writer.add_tokenizer_pre(words.pre)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    if words.scores:
        writer.add_token_scores(words.scores)
    if words.merges:
        writer.add_token_merges(words.merges)
    named = dict(bos="bos", eos="eos", unk="unk", pad="pad", eot="eot")
    for name in named:
        if name in words.ids:
            getattr(writer, f"add_{name}_token_id")(words.ids[name])
    for name, value in words.adds.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    if words.template is not None:
        both = [dict(name="default", template=words.template)]
        both += [dict(name="tool_use", template=words.tools)] if words.tools else []
        writer.add_chat_template(both if words.tools else words.template)
