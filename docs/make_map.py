"""Draws docs/map.md: every file of the house with the first line of its docstring.

python docs/make_map.py
"""

import ast
from pathlib import Path

HEAD = """# Where things are

Made by `make map` from the first line of every file.
"""
GROUPS = {
    "The entry": ["train.py", "tmoe/*.py"],
    "Commands": ["tmoe/commands"],
    "The command line": ["tmoe/cli"],
    "The process around a run": ["tmoe/run"],
    "Post-training": ["tmoe/post"],
    "The plan of memory": ["tmoe/plan"],
    "Generation": ["tmoe/generate"],
    "Hugging Face": ["tmoe/hf"],
    "The log": ["tmoe/log"],
    "The model": ["tmoe/model"],
    "The MoE layer": ["tmoe/moe"],
    "Data": ["tmoe/data"],
    "Optimizer": ["tmoe/optim"],
    "Checkpoints": ["tmoe/checkpoint"],
    "Parallelism": ["tmoe/parallel"],
    "Ops": ["tmoe/ops"],
    "Settings": ["tmoe/config"],
    "Imported by every room": ["tmoe/base"],
    "Never imported by the core": ["tmoe/extras"],
    "Examples": ["examples"],
    "Benchmarks": ["benchmarks"],
    "Helpers of the tests": ["tests/lib"],
}


def draw(root: Path) -> str:
    """The text of docs/map.md for the checkout at `root`."""
    parts = [HEAD]
    grouped = {place for places in GROUPS.values() for place in places}
    rooms = {str(path.parent.relative_to(root)) for path in (root / "tmoe").glob("*/__init__.py")}
    for title, places in (GROUPS | {"More": sorted(rooms - grouped)}).items():
        files = [path for place in places for path in sorted(_files(root, place))]
        rows = [f"| {path.relative_to(root)} | {first_line(path)} |" for path in files]
        if rows:
            parts.append(
                "\n".join([f"## {title}\n", "| file | its one job |", "| --- | --- |", *rows]) + "\n"
            )
    return "\n".join(parts)


def _files(root: Path, place: str) -> list[Path]:
    folder = root / place
    found = folder.rglob("*.py") if folder.is_dir() else root.glob(place)
    return [path for path in found if path.read_text().strip()]


def first_line(path: Path) -> str:
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    return doc.split("\n")[0]


if __name__ == "__main__":
    ROOT = Path(__file__).parents[1]
    (ROOT / "docs/map.md").write_text(draw(ROOT))
