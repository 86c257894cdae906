"""The house reads well: imports point downward, every file says its job, the step is whole."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Floors from the ground up: a file may import from its own floor and below, never from above.
FLOORS = [
    ("tmoe.stack",),
    ("tmoe.ops",),
    ("tmoe.config", "tmoe.listing"),
    (
        "tmoe.parallel.launcher",
        "tmoe.parallel.mesh",
        "tmoe.parallel.grad_norm",
        "tmoe.parallel.copies",
        "tmoe.parallel.gathered_copies",
        "tmoe.parallel.collectives",
    ),
    (
        "tmoe.model.loss",
        "tmoe.data.tokenizer",
        "tmoe.checkpoint.dcp",
        "tmoe.data.rows",
        "tmoe.data.sources",
        "tmoe.data",
        "tmoe.optim",
        "tmoe.checkpoint.manifest",
        "tmoe.checkpoint.folders",
        "tmoe.parallel.layout",
        "tmoe.checkpoint.rewrite",
        "tmoe.checkpoint.inspect",
        "tmoe.checkpoint.tools",
        "tmoe.checkpoint",
        "tmoe.run.onlookers",
        "tmoe.run.progress",
        "tmoe.init",
        "tmoe.run.watch",
        "tmoe.model.attention_backend",
    ),
    ("tmoe.moe.router",),
    ("tmoe.moe.balance", "tmoe.moe.received", "tmoe.moe.symm", "tmoe.moe.dispatch"),
    ("tmoe.run.memory", "tmoe.run.metrics", "tmoe.report"),
    ("tmoe.moe.experts",),
    ("tmoe.moe", "tmoe.model.attention"),
    ("tmoe.model.latent",),
    ("tmoe.model",),
    ("tmoe.model.parallelize",),
    (
        "tmoe.hf.packed",
        "tmoe.hf.rules",
        "tmoe.hf.tables",
        "tmoe.hf.config",
        "tmoe.hf.files",
        "tmoe.hf.plan",
        "tmoe.hf.tokenizer",
        "tmoe.hf.write",
        "tmoe.hf.export",
        "tmoe.hf.swap",
        "tmoe.hf",
        "tmoe.upcycle",
    ),
    ("tmoe.config.presets", "tmoe.run.cli", "tmoe.run.dry_run", "tmoe.run.process", "tmoe.warmup"),
    ("train",),
]
PACKAGES = {"tmoe", "tmoe.parallel"}  # they re-export names of several floors, so nobody inside may import them


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def floor(name: str) -> int:
    for i, names in enumerate(FLOORS):
        if any(name == n or name.startswith(n + ".") for n in names):
            return i
    pytest.fail(f"{name} stands on no floor: add it to FLOORS")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {m if is_module(m) else node.module for m in modules}
    return {name for name in found if name.split(".")[0] == "tmoe"}


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


FILES = [ROOT / "train.py", *sorted((ROOT / "tmoe").rglob("*.py"))]
HOUSE = [f for f in FILES if module_name(f) not in PACKAGES]


@pytest.mark.parametrize("path", HOUSE, ids=module_name)
def test_imports_point_downward(path):
    here = module_name(path)
    for name in imports(path):
        if here == "train" and name == "tmoe.parallel":
            continue  # the front door may use the package's public names
        assert name not in PACKAGES, f"{here} imports the package {name}: name the module"
        assert floor(name) <= floor(here), f"{here} imports {name}, which stands above it"


def test_nobody_imports_entries():
    entries = {"train", "tmoe.run.cli", "tmoe.run.dry_run", "tmoe.warmup", "tmoe.run.process"}
    for path in HOUSE:
        if module_name(path) not in entries:
            assert not imports(path) & entries, path


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_first_line_states_the_job(path):
    doc = ast.get_docstring(ast.parse(path.read_text()))
    assert doc and doc.splitlines()[0].rstrip().endswith((".", ":")), f"{path}: first line must say what the file does"


def test_blocks_do_not_pad():
    """Compiled for a GPU, F.pad can be wrong in silence; model/attention_backend.py's add_zeros says how."""
    assert not [path.name for path in (ROOT / "tmoe").rglob("*.py") if "F.pad(" in path.read_text()]


def test_the_step_is_whole_in_train():
    """Everything that a step does happens in one loop body."""
    tree = ast.parse((ROOT / "train.py").read_text())
    loops = [n for n in ast.walk(tree) if isinstance(n, ast.For) and "range" in ast.unparse(n.iter)]
    called = {ast.unparse(n.func).split(".")[-1] for loop in loops for n in ast.walk(loop) if isinstance(n, ast.Call)}
    assert {"next", "forward_backward", "clip_grad_norm_", "all_finite", "step", "log", "save"} <= called


def test_the_front_door_names_every_room():
    readme = (ROOT / "README.md").read_text()
    for path in (*FILES, *(ROOT / "benchmarks").glob("*.py")):
        if path.read_text():
            assert f"| {path.relative_to(ROOT)} | " in readme, f"{path}: README's table lacks it"
