"""The files of the repository that a test file can execute or read, found from its text.

    Inputs(root).of("tests/moe/test_router.py")      # paths relative to root

Imports count wherever they are: at the top, in a function, or in a string that is a program. A public name of
a lazy package (PEP 562) counts as its module. In tests, benchmarks and examples, a file or folder of the
repository that a string names counts as read, and a file that starts programs reads train.py. Docstrings and
imports under TYPE_CHECKING do not count, because no test executes them.

A test file that computes the names of modules or paths names their folder in a string: `READS = "tmoe/"`.

Without a GPU the bodies of Triton's functions are executed by its interpreter and its compiler only.
`runs_kernels` finds the test files that use these, or read sources; for all others a change in a body is no
change (`outline`).
"""

import ast
import contextlib
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

EVERY = ("tests/conftest.py", "tests/lib/settled.py", "pyproject.toml")  # inputs of every test file
PROGRAM = "train.py"
WRITTEN = "runs/"  # folder of a user's runs: no input, and no package, although tests/lib/runs.py is a module
STARTERS = {"subprocess", "runpy", "forked", "two_hosts"}  # modules that start programs
OUTSIDE = ("tests/", "benchmarks/", "examples/", "docs/")  # folders of files whose strings may name files
PLAIN = (
    "tests/conftest.py",
    "tests/lib/gloo.py",
    "tests/lib/inputs.py",
)  # exceptions: their strings name no input of a test
NAMES_KERNELS = re.compile(
    r"TRITON_INTERPRET|compile_only|precompile|tmoe[./]ops|tmoe import .*\bops\b|\bchips\b|tmoe[ .]warmup"
    r"|commands.*warmup|[\"']tmoe/?[\"']|getsource|\w\.__file__"
)
NO_KERNELS = ("tests/lib/forked.py", "tests/lib/interpreter.py")  # they name kernels only for their users
IMPORT = re.compile(r"^\s*(?:from ([\w.]+) )?import \(?\s*([\w.]+(?:\s*,\s*[\w.]+)*)", re.MULTILINE)
WORD = re.compile(r"[\w.][\w./-]*")
MODULE = re.compile(r"(?:tmoe|benchmarks)(?:\.\w+)*(?:\.\w+|\.$)")


class Inputs:
    """The files of one checkout; each file is read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.exists = functools.cache(
            lambda path: not f"{path}/".startswith(WRITTEN) and os.path.exists(f"{root}/{path}")
        )
        self.named_by = functools.cache(self._named_by)
        self.public = functools.cache(self._public)
        self.names_kernels = functools.cache(self._names_kernels)

    def of(self, test: str) -> set[str]:
        """The test file, the files that it names, the files named in these, and so on."""
        inputs: set[str] = set()
        left = [test, *EVERY]
        while left:
            if (path := left.pop()) not in inputs and os.path.isfile(f"{self.root}/{path}"):
                inputs.add(path)
                left += self.named_by(path)
        return inputs

    def runs_kernels(self, inputs: set[str]) -> bool:
        """Whether one of a test file's inputs outside tmoe/ names kernels, their tools or sources of tmoe."""
        outside = (path for path in inputs if path.startswith(OUTSIDE) and path not in (*PLAIN, *NO_KERNELS))
        return any(self.names_kernels(path) for path in outside if path.endswith(".py"))

    def _names_kernels(self, path: str) -> bool:
        return bool(NAMES_KERNELS.search((self.root / path).read_text()))

    def _named_by(self, path: str) -> set[str]:
        if not path.endswith((".py", ".md")):
            return set()
        text = (self.root / path).read_text()
        if path.endswith(".md"):
            return self._imported_in(text, path)
        outside = path.startswith(OUTSIDE) and path not in PLAIN
        inputs: set[str] = set()
        bound: dict[str, str] = {}  # imported name -> its full name
        facts = facts_of(text)
        for name, alias in facts.imports:
            first = name.partition(".")[0]
            bound[alias] = alias if alias == first else name
            inputs |= self.module(name, path) | ({PROGRAM} if outside and first in STARTERS else set())
        for name in facts.names:
            first, dot, rest = name.partition(".")
            inputs |= self.module(bound[first] + dot + rest, path) if first in bound else set()
        for words in facts.paths if outside else ():
            inputs |= self.place(words, path, "tests/")
        for words in facts.strings:
            inputs |= self._in_string(words, path, outside)
        return inputs

    def _in_string(self, text: str, path: str, outside: bool) -> set[str]:
        inputs = self.module(text, path, program=True) if MODULE.fullmatch(text) else set()
        sibling = f"{Path(path).parent.as_posix()}/{text}"
        if not outside:  # a message of tmoe/ names pages for the user; tmoe/ does not read them
            return inputs | ({sibling} if "." in text and self.exists(sibling) else set())
        for word in WORD.findall(text):
            if match := MODULE.match(word):
                inputs |= self.module(match[0].rstrip("."), path, program=True)
            elif "." in word or "/" in word or word[0].isupper():
                inputs |= self.place(word.rstrip("."), path)
        return inputs | self._imported_in(text, path)

    def _imported_in(self, text: str, path: str) -> set[str]:
        """The modules that import statements in a text name."""
        pairs = [
            (module, name) for module, names in IMPORT.findall(text) for name in re.split(r"\s*,\s*", names)
        ]
        return set().union(*(self.module(f"{module}.{name}".lstrip("."), path) for module, name in pairs))

    def place(self, words: str, path: str, *more: str) -> set[str]:
        """The file, or all files of the folder, that a path names from the root, its own folder or `more`."""
        inputs: set[str] = set()
        for base in (
            {"", *more, f"{Path(path).parent.as_posix()}/"} if not words.startswith((".venv", ".git")) else ()
        ):
            if words.strip("./") and self.exists(base + words):
                place = self.root / base / words
                files = [file for file in place.rglob("*") if "__pycache__" not in file.parts]
                inputs |= {os.path.relpath(file, self.root) for file in (place, *files)}
        return inputs

    def module(self, name: str, path: str, program: bool = False) -> set[str]:
        """The files executed for a module, a public name or an attribute: its file and each package above it.

        A name that ends with a dot is a prefix: every module of the package.
        """
        folders = ("tests/lib/", f"{Path(path).parent.as_posix()}/", "tests/data/")
        for stem in ("", *(folders if path.startswith("tests/") else ())):
            inputs: set[str] = set()
            for part in name.split("."):
                if not part and stem:
                    inputs |= {f"{stem}{file.name}" for file in (self.root / stem).glob("*.py")}
                elif self.exists(f"{stem}{part}.py"):
                    inputs.add(f"{stem}{part}.py")
                    break
                elif self.exists(f"{stem}{part}/"):
                    stem += f"{part}/"
                    inputs.add(f"{stem}__init__.py")
                else:
                    inputs |= self.public(f"{stem}__init__.py").get(part, set())
                    break
            else:
                inputs |= {f"{stem}__main__.py"} if program else set()
            if inputs:
                return inputs
        return set()

    def _public(self, init: str) -> dict[str, set[str]]:
        """The files of each public name of a lazy package, from its imports for type checkers."""
        tree = ast.parse((self.root / init).read_text() if self.exists(init) else "")
        blocks = [ast.walk(node) for node in tree.body if for_checkers(node)]
        nodes = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
        return {alias: self.module(name, init) for node in nodes for name, alias in imported(node)}


class Facts(NamedTuple):
    """The imports, names with attributes, paths joined by `/`, and strings of one text."""

    imports: set[tuple[str, str]]
    names: set[str]
    paths: set[str]
    strings: set[str]


@functools.cache
def facts_of(text: str) -> Facts:
    """The facts of a Python file; none for a text that is not Python, whose users fail."""
    facts = Facts(set(), set(), set(), set())
    inner: set[ast.AST] = set()  # parts of longer paths
    tree = ast.Module([], [])
    with contextlib.suppress(SyntaxError, ValueError):
        tree = ast.parse(text)
    for node in executed(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            facts.imports.update(imported(node))
        elif isinstance(node, ast.Attribute):
            facts.names.add(dotted(node))
        elif isinstance(node, ast.BinOp):
            inner.add(node.left)
            facts.paths.update([] if node in inner else [joined(node)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            facts.strings.add(node.value)
    return facts


@functools.cache
def outline(text: str) -> str:
    """A module without the bodies of its jit functions; a text without them, or with a fault, as it is."""
    tree = ast.Module([], [])
    with contextlib.suppress(SyntaxError, ValueError):
        tree = ast.parse(text if ".jit" in text else "")
    lines = text.splitlines()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any(".jit" in ast.unparse(d) for d in node.decorator_list):
            first, last = node.body[0].lineno, node.end_lineno or 0
            lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(filter(None, lines)) if tree.body else text


def executed(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields all nodes but docstrings, blocks for type checkers and tables of lazy packages, outer first."""
    left: list[ast.AST] = [tree]
    while left:
        for child in ast.iter_child_nodes(left.pop()):
            docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            table = isinstance(child, ast.Call) and dotted(child.func) == "lazy"
            if not (docstring or table or for_checkers(child)):
                yield child
                left.append(child)


def for_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING")


def dotted(node: ast.AST) -> str:
    """The text of a name with attributes; "" for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return ".".join([node.id, *parts]) if isinstance(node, ast.Name) else ""


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yields (full name, local name) for each import of a statement."""
    module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    for alias in node.names:
        yield module + alias.name, alias.asname or (alias.name if module else alias.name.partition(".")[0])


def joined(node: ast.AST) -> str:
    """The path that an expression appends to a folder: "docs/map.md" for `ROOT / "docs" / "map.md"`."""
    parts: list[str] = []
    while isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant):
        parts.insert(0, str(node.right.value))
        node = node.left
    return "/".join(parts) if re.search("__file__|[A-Z]{3}", ast.unparse(node)) else ""
