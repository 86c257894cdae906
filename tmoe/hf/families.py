"""Lists every MoE family of the installed transformers: imported, swapped, or what it lacks.

The families are found and judged by transformers' source code alone, so that families of later versions are
listed without a change here. A family is a folder of models/ that defines experts. A folder without a
modeling file is judged by its modular file, whose classes are changes of other families' classes, and counts
if its config class has a number of experts. An unknown family lacks the names that no entry reads and no
imported family has: keys of its config class, classes of its modeling file, parts of its decoder layer and
attention. The list is a hint, not a proof: equal names may compute different things.

next: hf/architectures/__init__.py
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

from tmoe.config.check import ConfigError
from tmoe.config.compare import ROPE
from tmoe.hf.architectures import ARCHITECTURES
from tmoe.hf.config import READ

EXPERTS = re.compile(r"^class \w*Experts?\w*\(", re.M)
COUNT = re.compile(r"^(moe_)?(num|n)_(routed_|local_)?experts$|^moe_num_experts$")
COUNTED = re.compile(r"^\s+(moe_)?(num|n)_(routed_|local_)?experts\s*[:=]", re.M)
# Keys that do not change the result of a text model on whole sequences, or that only training reads.
IDLE = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "attention_dropout", "pretraining_tp"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "hidden_act", "rope_theta"),
    *("initializer_range", "dtype", "torch_dtype", "router_z_loss_coef", "aux_loss_alpha", "seq_aux"),
}
# Ends of names of classes that every decoder has, or that exist for other tasks than text.
ORDINARY = re.compile(
    r"(Attention|MLP|Mlp|RMSNorm|RotaryEmbedding|Experts?|(Top[Kk])?(Router|Gate)"
    r"|MoE|Moe|MoeBlock|SparseMoeBlock"
    r"|DecoderLayer|PreTrainedModel|Model|For[A-Z]\w+|ModelOutput\w*|Output\w*|Kwargs|Cache)$"
)
VISION = re.compile(
    r"Vision|Visual|Image|Audio|Video|Speech|Code2Wav|Talker|Patch|Projector|Merger|Token2Wav"
    r"|MultiModal|Multimodal|Sam"
)
LAYER = re.compile(r"^class \w*(?:Attention|DecoderLayer)\(.*?(?=^class |\Z)", re.M | re.S)
PART = re.compile(r"self\.(\w+) = (?:\(\n?\s*)?(?:nn\.\w+|[A-Z]\w+)\(")
NAMED = 4  # most names of each kind that the line of a family lists


class Family(NamedTuple):
    """A folder of transformers' models/, as described by its source code."""

    name: str
    model_types: tuple[str, ...]
    keys: tuple[str, ...]
    """keys of the config class that has the number of experts"""
    modules: tuple[str, ...]
    """classes of the modeling file that not every decoder has, without the family's name"""
    parts: tuple[str, ...]
    """modules and parameters of its decoder layers and attentions"""
    hints: tuple[str, ...]
    """further facts of the config class, such as a nested text_config"""
    swaps: str
    """whether swap_experts accepts its experts, by their marks (hf/experts_module.py), in words; "": it does
    not"""


def families(models: Path | None = None) -> list[Family]:
    """The MoE families in transformers' folder models/. models: None for that of the installed transformers.

    ConfigError if transformers is not installed.
    """
    if models is None:
        spec = importlib.util.find_spec("transformers")  # finds it without importing it
        if spec is None or spec.origin is None:
            raise ConfigError("families: needs the package transformers, which is not installed here")
        models = Path(spec.origin).parent / "models"
    found = _modeling(models)
    return [_family(folder, text) for folder, text in found if EXPERTS.search(text) or _counts(folder)]


def standings(found: list[Family]) -> dict[str, str]:
    """A line for each family: whether it imports, whether it swaps, or what it lacks."""
    imported = {arch.model_type for arch in ARCHITECTURES}
    known = [family for family in found if imported & {*family.model_types}]
    modules = {name for family in known for name in family.modules}
    parts = {name for family in known for name in family.parts}
    read = _read_keys()
    lines = {}
    for family in found:
        does = ["imports"] * (family in known) + [family.swaps] * bool(family.swaps)
        lacks = {
            "keys": [key for key in family.keys if key not in read],
            "modules": [name for name in family.modules if name not in modules],
            "parts": [name for name in family.parts if name not in parts],
            "": [*family.hints],
        }
        gaps = [f"{what} {_listed(names)}".strip() for what, names in lacks.items() if names]
        unknown = f"lacks {'; '.join(gaps)}" if gaps else "lacks an entry; nothing unknown in its names"
        lines[family.name] = ", ".join(does if family in known else [*does, unknown])
    return lines


def print_families() -> None:
    """List every MoE family of the installed transformers: imports, swaps, or what it lacks."""
    lines = standings(families())
    width = max(map(len, lines))
    for name, line in lines.items():
        print(f"{name:{width}}  {line}")
    imported = sum(line.startswith("imports") for line in lines.values())
    print(f"{len(lines)} families, {imported} of them imported")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _read_keys() -> set[str]:
    """Keys of config.json that some entry reads, or that do not change a text model's result."""
    fields = {key for arch in ARCHITECTURES for field in arch.fields for key in field.keys}
    fixed = {key for arch in ARCHITECTURES for key in (*arch.theirs, *arch.copies)}
    return fields | fixed | {*READ} | IDLE | {key for keys in ROPE.values() for key in keys.values()}


def _modeling(models: Path) -> list[tuple[Path, str]]:
    """The folders of models/ in order, and the text of their modeling files, else of their modular files."""
    found: dict[Path, str] = {}
    for kind in ("modeling", "modular"):
        files = sorted(models.glob(f"*/{kind}_*.py"))
        for folder in sorted({file.parent for file in files} - found.keys()):
            found[folder] = "\n".join(file.read_text() for file in files if file.parent == folder)
    return sorted(found.items())


def _counts(folder: Path) -> bool:
    """Whether a folder without a modeling file has the number of experts in its config class."""
    configs = folder.glob("configuration_*.py") if not any(folder.glob("modeling_*.py")) else ()
    return any(COUNTED.search(file.read_text()) for file in configs)


def _family(folder: Path, modeling: str) -> Family:
    types: list[str] = []
    keys: list[str] = []
    hints: list[str] = []
    for file in sorted(folder.glob("configuration_*.py")):
        source = file.read_text()
        hints += ["a nested text_config"] * ("text_config:" in source)
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                kind, fields = _settings(node)
                types += [kind] if kind else []
                keys = fields if any(map(COUNT.match, fields)) or not keys else keys
    classes = [name for name in re.findall(r"^class (\w+)\(", modeling, re.M) if not VISION.search(name)]
    # The prefix of a family's class names is that of its experts class.
    prefix = re.search(r"^class (\w*?)(Text|Naive|Parallel)?(Moe|MoE)?Experts?\w*\(", modeling, re.M)
    stem = prefix[1] if prefix else ""
    modules = [name.removeprefix(stem) for name in classes if not ORDINARY.search(name)]
    layers = (block for block in LAYER.findall(modeling) if not VISION.search(block.partition("(")[0]))
    parts = [part for block in layers for part in PART.findall(block)]

    def once(names: list[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(names))

    lists = once(types), once(keys), once(modules), once(parts), once(hints)
    swaps = _swaps(modeling) or _swaps(_base_of_experts(folder, modeling))
    return Family(folder.name, *lists, swaps=swaps)


def _base_of_experts(folder: Path, modular: str) -> str:
    """The modeling file of the family whose experts a modular file changes; "" if there is none."""
    base = re.search(r"^class \w*Experts?\w*\((\w+)\)", modular, re.M)
    imports = re.findall(r"^from \.\.(\w+)\.(\w+) import (\([^)]*\)|.*)$", modular, re.M)
    for family, file, names in imports:
        path = folder.parent / family / f"{file}.py"
        if base and re.search(rf"\b{base[1]}\b", names) and path.is_file():
            return path.read_text()
    return ""


def _swaps(modeling: str) -> str:
    marked = re.findall(r"^@use_experts_implementation(\(.*?\))?$", modeling, re.M | re.S)
    if not any("has_post_expert_norm=True" not in mark for mark in marked):
        return ""
    return "swaps if its gate is one of the op's" if "def _apply_gate(" in modeling else "swaps"


def _settings(config: ast.ClassDef) -> tuple[str, list[str]]:
    """The model_type ("" if none) and the keys that a config class defines."""
    kind = ""
    for node in config.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "model_type":
            kind = getattr(node.value, "value", "")
    fields = [
        n.target.id for n in config.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    ]
    return kind, fields
