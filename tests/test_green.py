"""CI's selection: what a test file reads, when it runs again, what leaves a record, and how CI ends.

next: lib/green.py
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import green
import pytest
import seen
import warm
from inputs import Inputs
from orphans import descendants

ROOT = Path(__file__).parents[1]

TREE = {
    "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['.', 'tests/lib']\n",
    "constraints.txt": "",
    "train.py": "from tmoe.run.cli import parse",
    "README.md": "```python\nfrom tmoe import Public\n```",
    "docs/map.md": "",
    "docs/data.md": "",
    "tmoe/__init__.py": """
from typing import TYPE_CHECKING
from tmoe.lazy import lazy
if TYPE_CHECKING:
    from tmoe.deep.public import Public
__getattr__, __dir__ = lazy(__name__, {"Public": "tmoe.deep.public"})
""",
    "tmoe/lazy.py": "def lazy(package, modules): return None, None",
    "tmoe/deep/__init__.py": "",
    "tmoe/deep/public.py": "def f():\n    from tmoe.deep import late",
    "tmoe/deep/late.py": "TABLE = __file__ + 'table.json'; MESSAGE = 'see docs/data.md and tmoe.deep.other'",
    "tmoe/deep/table.json": "",
    "tmoe/deep/other.py": "",
    "tmoe/run/__init__.py": "",
    "tmoe/run/cli.py": "import importlib; importlib.import_module(f'tmoe.deep.{1}')",
    "tmoe/tool/__init__.py": "",
    "tmoe/tool/__main__.py": "",
    "tests/conftest.py": "",
    "tests/lib/forked.py": "",
    "tests/lib/helper.py": "import tmoe.run",
    "tests/lib/runs.py": "",
    "runs/tiny/metrics.jsonl": "",
    "tests/data/a.jinja": "",
    "tests/data/b/c.jinja": "",
    "tests/moe/losses.json": "",
}
DEEP = {"tmoe/__init__.py", "tmoe/lazy.py", "tmoe/deep/__init__.py"}
PUBLIC = {*DEEP, "tmoe/deep/public.py", "tmoe/deep/late.py", "tmoe/deep/table.json"}
HELPER = {"tests/lib/helper.py", "tmoe/__init__.py", "tmoe/lazy.py", "tmoe/run/__init__.py"}
TOOL = {"tmoe/__init__.py", "tmoe/lazy.py", "tmoe/tool/__init__.py", "tmoe/tool/__main__.py"}
CLI = {
    *DEEP - {"tmoe/deep/__init__.py"},
    "tmoe/run/__init__.py",
    "tmoe/run/cli.py",
    *PUBLIC,
    "tmoe/deep/other.py",
}


@pytest.fixture
def tree(tmp_path):
    for path, text in TREE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import tmoe", {"tmoe/__init__.py", "tmoe/lazy.py"}),
        ("import tmoe\ndef test(): tmoe.Public()", PUBLIC),
        ("def test():\n    from tmoe import Public", PUBLIC),
        ("from tmoe import deep as d\nd.public.f()", PUBLIC),
        ("import helper", HELPER),
        ("import runs", {"tests/lib/runs.py"}),
        ("PATH = 'runs/tiny'", set()),
        ("CODE = '''\nfrom tmoe import (Public, x)\n'''", PUBLIC),
        ("patch('tmoe.deep.other.x', 1)", {*DEEP, "tmoe/deep/other.py"}),
        ("run(['-m', 'tmoe.tool'])", TOOL),
        ("import forked", {"tests/lib/forked.py", "train.py", *CLI}),
        ("import subprocess", {"train.py", *CLI}),
        ("(ROOT / 'README.md').read_text()", {"README.md", *PUBLIC}),
        ("PAGE = 'README.md'", {"README.md", *PUBLIC}),
        ("(ROOT / 'docs').glob('*.md')", {"docs/map.md", "docs/data.md"}),
        ("f'docs/{name}.md'", {"docs/map.md", "docs/data.md"}),
        ("Path(__file__).parents[1] / 'data' / 'b'", {"tests/data/b/c.jinja"}),
        ("(tmp_path / 'data').mkdir()", set()),
        ("(Path(__file__).parent / 'losses.json').read_text()", {"tests/moe/losses.json"}),
        ("READS = 'tmoe/deep/'", {*PUBLIC, "tmoe/deep/other.py"}),
        ('"""Of README.md."""\nif TYPE_CHECKING:\n    from tmoe.deep import other', set()),
    ],
)  # fmt: skip
def test_inputs_are_found_in_the_text(tree, text, found):
    (tree / "tests/moe/test_x.py").write_text(text)
    always = {"tests/moe/test_x.py", "tests/conftest.py", "pyproject.toml"}
    assert Inputs(tree).of("tests/moe/test_x.py") - always == found


@pytest.fixture(scope="module")
def house():
    return Inputs(ROOT)


@pytest.mark.parametrize(
    ("test", "reads"),
    [
        (
            "test_wheel",
            "pyproject.toml README.md LICENSE train.py tmoe/ops/experts/table.json tmoe/extras/upcycle.py",
        ),
        ("test_stack", "README.md train.py"),
        ("test_lazy", "tmoe/hf/swap.py tmoe/parallel/expert_parameters.py"),
        ("test_house", "docs/make_map.py docs/map.md train.py tmoe/post/grpo.py tests/lib/gloo.py"),
        ("test_documented", "README.md docs/finetune.md docs/multinode.md tmoe/commands/dry_run.py"),
        ("test_tmoe_command", "tmoe/__main__.py tmoe/hf/__main__.py tmoe/commands/rollouts.py"),
        ("test_green", ".ci/counted.py tests/lib/green.py"),
        ("benchmarks/cost/test_points", "README.md docs/performance.md tmoe/model/h200.json"),
        ("checkpoint/test_operations", "docs/operations.md tmoe/post/grpo.py"),
        ("data/test_chat_masks", "tests/data/templates/gpt_oss.jinja tmoe/data/chat/special_tokens.py"),
        ("end_to_end/test_snippets", "README.md docs/huggingface.md examples/own_loop.py tmoe/hf/swap.py"),
        ("end_to_end/test_helloworld", "examples/helloworld_fsdp2.py"),
        ("end_to_end/test_digit_sums", "examples/digit_sums.py train.py"),
        ("faults/test_multinode", "tests/lib/two_hosts.py train.py"),
        ("faults/test_faults", "train.py benchmarks/inject.py tmoe/run/watch/journal.py"),
        ("hf/test_architectures", "CONTRIBUTING.md docs/huggingface.md tmoe/hf/rules.py"),
        ("migrate/test_trl_table", "docs/migrate.md tmoe/extras/migrate/names.py"),
        ("moe/test_contributing", "CONTRIBUTING.md docs/routers.md"),
        ("moe/test_tutel_golden", "tests/moe/tutel_losses.json tmoe/moe/layer.py"),
        ("ops/test_norm", "tmoe/ops/norm.py"),
        ("run/test_settings", "docs/settings.md tmoe/cli/settings.py"),
    ],
)
def test_inputs_of_files_of_this_house(house, test, reads):
    found = house.of(f"tests/{test}.py")
    assert {path for path in reads.split() if (ROOT / path).exists()} <= found
    assert "tests/conftest.py" in found and not [path for path in found if path.startswith(".venv")]


def test_a_file_of_arithmetic_does_not_wait_for_train(house):
    """The record would be worth little if every file read all others."""
    found = house.of("tests/parallel/test_schedule.py")
    assert "tmoe/parallel/pipeline_schedule.py" in found and "train.py" not in found and len(found) < 40


# ---- the record ----


A, B = "tests/test_a.py", "tests/test_b.py"


def selection(tree, runs_on="here"):
    return green.Selection(tree, tree / "green.json", runs_on)


@pytest.fixture
def two(tree, monkeypatch):
    """A checkout with two test files, both green; one opened a page that its text does not name."""
    monkeypatch.setattr(green, "CORE_TESTS", ())
    (tree / "tests/test_a.py").write_text("import tmoe.deep.public")
    (tree / "tests/test_b.py").write_text("import tmoe.run")
    selection(tree).keep({A: 1.0, B: 2.0}, [A, B], {B: {"docs/map.md", "docs/"}})
    assert selection(tree).chosen() == []
    return tree


@pytest.mark.parametrize(
    ("path", "runs"),
    [
        ("tmoe/deep/late.py", [A]),
        ("tmoe/run/__init__.py", [B]),
        ("tmoe/__init__.py", [B, A]),  # the slower one first
        ("tests/test_b.py", [B]),
        ("docs/map.md", [B]),
        ("docs/new.md", [B]),  # its folder was listed
        ("README.md", []),
        ("tests/conftest.py", [B, A]),
        ("tests/test_c.py", ["tests/test_c.py"]),
    ],
)  # fmt: skip
def test_a_file_runs_again_when_an_input_differs(two, path, runs):
    (two / path).write_text((two / path).read_text() + "\n" if (two / path).exists() else "")
    assert selection(two).chosen() == runs
    assert set(selection(two).chosen(everything=True)) >= {A, B}


KERNEL = """import triton

@triton.jit
def kernel(x):
    {body}

def launch():
    {other}
"""


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        (KERNEL.format(body="return x + 1", other="return 2"), [B]),
        (KERNEL.format(body="return x", other="return 3"), [B, A]),
        (KERNEL.format(body="return x", other="return 2").replace("(x)", "(x, y)"), [B, A]),
        (KERNEL.format(body="return (", other="return 2"), [B, A]),  # fails wherever it is imported
    ],
)
def test_a_kernels_body_counts_where_kernels_run(two, text, runs):
    (two / "tmoe/ops").mkdir()
    (two / "tmoe/ops/kernels.py").write_text(KERNEL.format(body="return x", other="return 2"))
    (two / "tmoe/deep/public.py").write_text("from tmoe.ops import kernels")
    (two / B).write_text("import tmoe.deep.public\nENV = dict(TRITON_INTERPRET='1')")
    selection(two).keep({A: 1.0, B: 2.0}, [A, B], {})
    assert selection(two).chosen() == []
    (two / "tmoe/ops/kernels.py").write_text(text)
    assert selection(two).chosen() == runs


def test_without_a_record_everything_runs(two, monkeypatch):
    assert selection(two, runs_on="newer torch").chosen() == [B, A]
    monkeypatch.setattr(green, "CORE_TESTS", (A,))
    assert selection(two).chosen() == [A]
    for damaged in ('{"tests/test_a.py": {}}', "[1]", '{"', "\0"):
        (two / "green.json").write_text(damaged)
        assert selection(two).chosen() == [A, B]
    (two / "green.json").unlink()
    assert selection(two).chosen() == [A, B]


def test_a_change_during_the_run_leaves_no_record(two):
    (two / "green.json").unlink()
    begun = selection(two)
    (two / "tmoe/deep/public.py").write_text("")
    begun.keep({A: 3.0, B: 2.0}, [A, B], {})
    assert selection(two).chosen() == [A]
    assert selection(two).chosen(everything=True) == [A, B]  # the seconds of A are recorded


def test_a_file_that_is_not_green_is_in_its_place_in_the_next_run(two):
    (two / "tests/test_c.py").write_text("def test_x(): ...")
    selection(two).keep({A: 9.0, "tests/test_c.py": 1.5}, [], {})
    assert selection(two).chosen() == ["tests/test_c.py"]
    assert selection(two).chosen(everything=True) == [B, "tests/test_c.py", A]  # A: as when it was green


def report(test, when="call", outcome="passed", reason=""):
    facts = dict(passed=outcome == "passed", skipped=outcome == "skipped", longrepr=("", 1, reason))
    return SimpleNamespace(nodeid=f"{test}::t", when=when, duration=0.5, **facts)


def test_a_record_is_of_files_that_are_whole():
    recorder = seen.Recorder()
    tests = "passed failed skipped inside broken_setup broken_teardown unfinished".split()
    recorder.pytest_xdist_node_collection_finished([f"{test}::{n}" for test in tests for n in "xy"])
    for test in tests:
        for outcome in ("passed", "passed" if test in ("broken_setup", "broken_teardown") else test):
            if outcome == "unfinished":
                continue
            recorder.pytest_runtest_logreport(report(test, "setup"))
            reason = "Skipped: runs inside test_others" if outcome == "inside" else "needs trl"
            recorder.pytest_runtest_logreport(
                report(test, "call", "skipped" if outcome == "inside" else outcome, reason)
            )
            recorder.pytest_runtest_logreport(report(test, "teardown"))
    recorder.pytest_runtest_logreport(report("broken_setup", "setup", "failed"))
    recorder.pytest_runtest_logreport(report("broken_teardown", "teardown", "failed"))
    assert recorder.green() == ["passed", "inside"]
    assert recorder.seconds["passed"] == recorder.seconds["failed"] == 3.0


PLUGINS = ("green", "inputs", "seen", "warm")


@pytest.fixture
def ci(tree):
    """CI over the small tree, with processes and all."""
    for name in PLUGINS:
        shutil.copy(ROOT / f"tests/lib/{name}.py", tree / "tests/lib")
    (tree / "tests/test_a.py").write_text("import tmoe.deep.public\ndef test(): pass")
    (tree / "tests/test_b.py").write_text(
        "PATH = 'docs', 'map' + '.md'\ndef test(): assert not open('/'.join(PATH)).read()"
    )
    env = {**os.environ, "XDG_CACHE_HOME": str(tree / "cache"), "PYTHONPATH": str(tree)}

    def run(*words):
        command = [sys.executable, str(tree / "tests/lib/green.py"), *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout

    return run


@pytest.mark.slow
def test_files_are_run_until_they_are_green_and_not_after(tree, ci):
    code, said = ci()
    assert code == 0, said
    assert ci("--list") == (0, "\n")
    (tree / "docs/map.md").write_text("a fault that the text of no test file names")
    code, said = ci()
    assert code == 1 and "1 of 2 test files run" in said and "1 failed" in said
    code, said = ci("--all")
    assert code == 1 and "1 failed, 1 passed" in said
    (tree / "docs/map.md").write_text("")
    assert ci("--list") == (0, "\n")  # as it was when it was green
    (record,) = tree.glob("cache/tmoe-ci/*/green.json")
    assert json.loads(record.read_text())["tests/test_b.py"]["opened"] == ["docs/map.md"]


# ---- the folder that is kept ----


def test_caches_are_kept_as_a_green_run_left_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for variable in warm.CACHES:
        monkeypatch.setenv(variable, "")

    def entries():
        """The entries that a run finds in its cache; it adds one."""
        with warm.kept():
            cache = Path(os.environ["TRITON_CACHE_DIR"])
            cache.mkdir(parents=True, exist_ok=True)
            found = len(list(cache.iterdir()))
            (cache / f"entry-{found}").write_text("binary")
        return found

    assert [entries(), entries(), entries()] == [0, 1, 2]
    next(tmp_path.rglob("entry-1")).write_text("")  # damaged
    assert [entries(), entries()] == [0, 1]
    with pytest.raises(SystemExit), warm.kept():
        raise SystemExit(1)  # a test failed
    assert entries() == 0
    with warm.kept():
        assert entries() == 0  # another run holds the caches
    assert "in use" in capsys.readouterr().out
    monkeypatch.setenv("XDG_CACHE_HOME", str(next(tmp_path.rglob("entry-0"))))
    assert [entries(), entries()] == [0, 0]  # a file is in the way of the folder
    monkeypatch.setattr(warm, "LIMIT_BYTES", 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "small"))
    assert [entries(), entries()] == [0, 0]


# ---- the count of seconds, and the end ----

IGNORES = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(100)"
LEAVES = """
import subprocess, sys, time
child = [sys.executable, "-c", sys.argv[2]]
subprocess.Popen(child, start_new_session=True, stdout=subprocess.PIPE).stdout.read(1)
while time.process_time() < 1:
    pass
print("ready", flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_ci_and_all_are_counted(number, tmp_path):
    (tmp_path / "counted.py").write_text(
        (ROOT / ".ci/counted.py").read_text().replace("GRACE_S = 10.0", "GRACE_S = 0.5")
    )
    command = [sys.executable, tmp_path / "counted.py", sys.executable, "-c", LEAVES]
    process = subprocess.Popen(
        [*command, "100" if number else "0", IGNORES], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    before = descendants()
    if number:
        process.send_signal(number)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == (128 + number if number else 0)
    assert 1 <= float(said.split("processes: ")[1].split(";")[0]) < 10
    assert not [
        pid for pid in before & descendants() if b"SIG_IGN" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
