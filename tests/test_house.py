"""The house reads well: imports point downward, no circle is left, every file says its job.

And the step is whole.
"""

import ast
import re
import runpy
from collections import defaultdict
from functools import cache
from pathlib import Path

import early
import pytest

ROOT = Path(__file__).parents[1]

# Floors from the ground up. A room is a folder of tmoe/, or a file directly in it; it may import from
# floors below its own, never from the same floor or above.
FLOORS = [
    ("base",),
    (
        "ops",
        "config",
    ),
    (
        "parallel",
        "front",
        "hub",
    ),
    (
        "checkpoint",
        "optim",
        "data",
    ),
    ("moe",),
    ("model",),
    (
        "hf",
        "log",
    ),
    ("generate",),
    (
        "plan",
        "serve",
    ),
    ("cli",),
    ("run",),
    ("post",),
    ("eval",),
    (
        "commands",
        "extras",
    ),
    (
        "train",
        "__main__",
        "report",
        "rollouts",
        "routing",
        "warmup",
        "lora",
        "migrate",
        "upcycle",
    ),
]
# Packages whose __init__ holds the public names of several floors: nothing inside may import those.
PUBLIC = {"tmoe", "tmoe.hf"}
# tmoe.parallel.parallelize and .pipeline, public names, looked up late
ALIASES = {("tmoe.parallel", name) for name in ("tmoe.model.parallelize", "tmoe.model.stages")}

FILES = [ROOT / "train.py", *sorted((ROOT / "tmoe").rglob("*.py"))]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room(name: str) -> str:
    """The folder of tmoe/ that a module lies in, or the file directly in tmoe/."""
    parts = name.split(".")
    return parts[0] if parts[0] != "tmoe" else parts[min(1, len(parts) - 1)]


def floor(name: str) -> int:
    """A __main__ is the door of its room's command: it imports what stands above the room, too."""
    if name.endswith(".__main__"):
        return len(FLOORS) - 1
    for i, rooms in enumerate(FLOORS):
        if room(name) in rooms:
            return i
    pytest.fail(f"{name} stands on no floor: add its room to FLOORS")


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


parsed = cache(early.parsed)


@cache
def imports(path: Path) -> frozenset[str]:
    """Modules of tmoe that a file imports, at its top or later."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if is_module(name) else node.module for name in names}
    return frozenset(name for name in found if name.split(".")[0] == "tmoe")


HOUSE = [path for path in FILES if module_name(path) != "tmoe"]


def none(wrong: list[str]) -> None:
    """One test a rule: all files that break the rule are listed."""
    assert not wrong, "\n" + "\n".join(wrong)


def test_imports_point_downward():
    wrong = []
    for path in HOUSE:
        here = module_name(path)
        for name in sorted(imports(path)):
            if (here, name) in ALIASES or room(name) == room(here):
                continue
            if name in PUBLIC and here != "train":
                wrong.append(f"{here} imports the package {name}: name the module")
            elif floor(name) >= floor(here):
                wrong.append(f"{here} imports {name}, which does not stand below it")
    none(wrong)


def test_no_circle_is_left():
    """Modules of one folder may import each other, but not in a circle."""
    below = {module_name(path): imports(path) for path in HOUSE}
    below["tmoe.parallel"] = below["tmoe.parallel"] - {name for _, name in ALIASES}
    state: dict[str, str] = defaultdict(str)

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert state[name] != "open", f"a circle of imports: {' -> '.join(way)}"
        if state[name] == "done":
            return
        state[name] = "open"
        for next_name in sorted(below.get(name, ())):
            visit(next_name, (*way, next_name))
        state[name] = "done"

    for name in below:
        visit(name, (name,))


def test_first_line_states_the_job():
    said = {path: ast.get_docstring(parsed(path)) or "" for path in FILES}
    ends = {path: doc.partition("\n")[0].rstrip().endswith((".", ":")) for path, doc in said.items()}
    none([f"{path}: first line must say what the file does" for path, good in ends.items() if not good])


ARGUMENTS = 8
# Functions of ours that take more, `self` not counted. A registered op's take one value (ops/register.py).
MANY = {
    "tmoe.moe.exchange.symm": {"push"},
    "tmoe.moe.exchange.received_rows": {"__init__"},
    "tmoe.ops.decode.attention": {"decode_attention"},
    "tmoe.ops.exchange": {"push", "pull"},
    "tmoe.ops.experts.cpu": {"gradients_of_matrices"},
    "tmoe.ops.experts.op": {"trace", "moe_mlp", "moe_mlp_deferred", "moe_mlp_summed"},
    "tmoe.ops.experts.gpu": {
        "forward",
        "backward",
        "backward_of_x",
        "backward_into",
        "backward_of_matrices",
        "specialised",
    },
    "tmoe.ops.register": {"register", "register_differentiable"},  # all but two by name
    "tmoe.hf.export": {"export_hf"},  # a command's flags
    "tmoe.log.metrics": {"__init__", "log"},
    "tmoe.extras.upcycle": {"upcycle", "plan_upcycle"},
}


def test_functions_take_few_arguments():
    """Kernels, whose decorator is some jit, take what they need."""
    wrong = []
    for path in FILES:
        allowed = MANY.get(module_name(path), set())
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.FunctionDef) or node.name in allowed:
                continue
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            kernel = any("jit" in ast.unparse(d) for d in node.decorator_list)
            if not kernel and len([name for name in names if name != "self"]) > ARGUMENTS:
                taken = f"{node.name} takes {len(names)} arguments"
                wrong.append(f"{path}:{node.lineno}: {taken}: name what belongs together")
    none(wrong)


LINES = 80
BRANCHES = 20
# Functions that are above the bar of branches: strike a name out when its function is cut.
ABOVE = {"_parse", "_explain", "explain"}
FORKS = (
    ast.If,
    ast.For,
    ast.While,
    ast.ExceptHandler,
    ast.IfExp,
    ast.Assert,
    ast.comprehension,
    ast.match_case,
)


def branches(function: ast.FunctionDef) -> int:
    """McCabe's number, with a branch for each further operand of `and` and `or`; inner functions count."""
    nodes = list(ast.walk(function))
    operands = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    return 1 + operands + sum(isinstance(node, FORKS) for node in nodes)


def test_functions_are_short_and_have_few_branches():
    """Kernels as well."""
    wrong = []
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.FunctionDef):
                continue
            lines = node.end_lineno - node.lineno + 1
            number = branches(node)
            if lines > LINES or (number > BRANCHES and node.name not in ABOVE):
                wrong.append(f"{path}:{node.lineno}: {node.name} has {lines} lines and {number} branches")
    none(wrong)


def test_blocks_do_not_pad():
    """F.pad, compiled for a GPU, can be wrong in silence; add_zeros of the attention backend says how."""
    assert not [path.name for path in (ROOT / "tmoe").rglob("*.py") if "F.pad(" in path.read_text()]


def test_ops_name_no_axes():
    """einops costs 2 us a call more than a view: no kernel's host path, which is counted in us, calls it."""
    ops = (ROOT / "tmoe" / "ops").rglob("*.py")
    assert not [path.name for path in ops if "einops" in path.read_text()]


def test_ops_are_registered_in_one_way():
    """ops/register.py alone calls torch.library; an op's fake asks it for the size that is not known."""
    wrong = []
    for path in HOUSE:
        if module_name(path) == "tmoe.ops.register":
            continue
        attributes = [n for n in ast.walk(parsed(path)) if isinstance(n, ast.Attribute)]
        used = {n.attr for n in attributes if ast.unparse(n.value) == "torch.library"} - {"get_ctx"}
        wrong += [f"{path} uses torch.library.{name}" for name in sorted(used)]
    none(wrong)


def test_bits_is_read_in_one_place():
    """The setting becomes a Rounding (model/rounding.py); layers, engine and sampler know no switch."""
    settings = {"tmoe.config.run", "tmoe.post.grpo", "tmoe.commands.warmup"}
    names = {path: {n.attr for n in ast.walk(parsed(path)) if isinstance(n, ast.Attribute)} for path in HOUSE}
    assert {module_name(path) for path, used in names.items() if "bitwise" in used} == settings


def calls(*within: ast.AST) -> set[str]:
    """Last names of what is called inside these nodes."""
    nodes = [n for node in within for n in ast.walk(node) if isinstance(n, ast.Call)]
    return {ast.unparse(n.func).split(".")[-1] for n in nodes}


def test_the_step_is_whole_in_train():
    """Everything that a step does happens in one loop body, and everything that follows it in one method."""
    tree = parsed(ROOT / "train.py")
    loops = [n for n in ast.walk(tree) if isinstance(n, ast.For) and "range" in ast.unparse(n.iter)]
    assert {"next", "forward_backward", "clip_grad_norm_", "all_finite", "step", "after"} <= calls(*loops)
    (after,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "after"]
    assert {"log", "save", "validate"} <= calls(after)


def test_no_test_imports_a_test():
    """run_gpu.py does, because it traces what tests launch."""
    for path in (*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "tests/lib").glob("*.py")):
        for node in ast.walk(parsed(path)):
            modules = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            modules |= {node.module or ""} if isinstance(node, ast.ImportFrom) else set()
            assert not [name for name in modules if name.split(".")[-1].startswith("test_")], path


def test_the_map_names_every_file():
    """The map is generated (`make map`) and not committed: what is held is that it can be drawn, whole."""
    drawn = runpy.run_path(str(ROOT / "docs/make_map.py"))["draw"](ROOT)
    named = re.findall(r"^\| (\S+\.py) \| (.+) \|$", drawn, re.M)
    written = {str(path.relative_to(ROOT)) for path in FILES if path.read_text().strip()}
    assert written <= {name for name, _ in named}
    assert len(named) == len(dict(named)), "a file is named twice"


def test_the_index_names_every_page():
    """docs/README.md says of each page, by what a reader wants, what is in it; its links lead somewhere."""
    index = (ROOT / "docs/README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md", "map.md"}
    links = set(re.findall(r"\]\(([^)#]+)", index)) - {"map.md"}
    assert pages <= links, f"docs/README.md names no {pages - links}"
    assert not [link for link in links if not (ROOT / "docs" / link).exists()]
