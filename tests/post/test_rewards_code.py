"""The reward `code`: right, wrong and hostile programs; a refusal by name where there is no sandbox."""

import contextlib
import shutil
import time
from pathlib import Path

import pytest

from tmoe.config.check import ConfigError
from tmoe.post.rewards import Rewards, RewardSample, pool, sandbox


def why_not() -> str:
    try:
        sandbox.check()
    except OSError as error:
        return str(error)
    return ""


@pytest.fixture(autouse=True, scope="module")
def needs_a_sandbox():
    if why := why_not():
        pytest.skip(why)


ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = ["assert add(1, 2) == 3", "assert add(1, 1) == 3", "assert add('a', 'b') == 'ab'", "add(1)"]


def of(answer, tests, i=0):
    return RewardSample("ask", answer, {"tests": tests}, "stop", 9, 0, 0, i)


def test_share_of_tests_that_pass():
    """Of asserts two in four; of a script's output all, where only white space at ends differs."""
    script = (
        "So:\n```python\nimport sys\na, b = map(int, input().split())\nprint(a + b, '\\n')\nsys.exit()\n```"
    )
    pairs = [{"input": "1 2\n", "output": "3"}, {"input": "5 5", "output": "11"}]
    given = [
        of(f"```python\n{ADD}```\nThat is all.", ASSERTS),
        of(script, pairs),
        of(ADD, ASSERTS[0]),
        of("def add(: no Python", ASSERTS),
        of(ADD, None),
        of(ADD, [{"input": "1"}]),
    ]
    with Rewards(["code"], workers=1, code=True, timeout_s=60.0) as rewards:
        scores = rewards.score(given)
    assert scores.parts["code"] == [0.5, 0.5, 1.0, 0.0, None, None]
    assert scores.faults == {"code: raised ValueError": 2}


LOOKS = """
import json, os, socket
found = {"user": os.getuid(), "process": os.getpid(), "secret": "SECRET" in os.environ}
for name, where in (("here", "1.1.1.1"), ("self", "127.0.0.1")):
    try:
        socket.create_connection((where, 80), 2)
    except OSError as error:
        found[name] = error.strerror
found["files"] = [path for path in PATHS if os.path.exists(path)]
try:
    open(PYTHON, "a")
except OSError as error:
    found["python"] = error.strerror
open("/tmp/scratch", "w").write("x")
try:
    open("/tmp/large", "w").write("x" * (20 << 20))
except OSError as error:
    found["large"] = error.strerror
try:
    bytearray(3 << 30)
except MemoryError:
    found["memory"] = True
print(json.dumps(found))
"""


def test_a_program_sees_and_reaches_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    (tmp_path / "file").write_text("")
    python = sandbox._folders_of_python()[-1] + "/lib"
    paths = [str(tmp_path / "file"), "/etc/passwd", "/proc/self", "/run", str(Path(__file__))]
    head = f"PATHS = {paths!r}\nPYTHON = {python!r} + '/x'\n"
    done = sandbox.run(head + LOOKS, None, "", 60.0)
    assert done.whole
    assert eval(done.said, dict(true=True, false=False)) == {
        **dict(user=1, process=1, secret=False, files=[], memory=True, large="File too large"),
        **dict(here="Network is unreachable", self="Network is unreachable", python="Read-only file system"),
    }


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit(0)",
        "import os; os._exit(97)",  # as the sandbox itself where it cannot be made
        "import os\nfor n in range(3, 20):\n  try: os.write(n, b'f')\n  except OSError: pass\nos._exit(97)",
        "import os; os._exit(0)",
        "import sys; sys.stdout.close(); sys.exit(0)",
        "import os, signal; os.kill(0, signal.SIGKILL)",
        "__builtins__ = None",
    ],
)
def test_leaving_early_passes_no_test(program):
    assert not sandbox.run(program, "assert False", "", 60.0).whole


def test_programs_that_do_not_end_are_no_fault_of_the_reward():
    """They fail within the sample's time, and the worker lives on."""
    with Rewards(["code"], workers=1, code=True, timeout_s=5.0) as rewards:
        worker = rewards.pool.workers[0]
        scores = rewards.score([of("import time\ntime.sleep(1000)", ["pass", "pass"])])
        assert rewards.pool.workers == [worker]
    assert scores.rewards == [0.0] and scores.faults == {}


BOMB = """
import os, time
made = 0
try:
    while made < 1000:
        if os.fork() == 0:
            time.sleep(1000)
        made += 1
except OSError:
    print(made < 64)
"""


def test_processes_are_counted_and_end_with_the_program():
    """A bomb gets no further than the limit, and nothing of it is left behind."""
    done = sandbox.run(BOMB, None, "", 60.0)
    assert done == sandbox.Done(True, "True\n")
    assert none_is_left()


@pytest.mark.slow
def test_bombs_without_end(tmp_path):
    """In Python and in a shell, for the sample's time; then all is gone."""
    for program in (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import os\nos.system('bomb() { bomb | bomb & }; bomb')\nimport time; time.sleep(1000)",
    ):
        assert not sandbox.run(program, "", "", 2.0).whole
        assert none_is_left()


def none_is_left() -> bool:
    """Of processes that run the sandbox's runner: waits for those that are on their way out."""
    mark = sandbox.RUNNER.encode()[:60]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                lines.append(path.read_bytes())
        if not any(mark in line for line in lines):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("text", "wrong", "told"),
    [
        ('call("unshare", ', 'call("unshare", 1 | ', "[Errno 22] Invalid argument: 'unshare()'"),
        ('"uid_map"', '"no_map"', "No such file or directory: '/proc/"),
        ('b"tmpfs", b"/tmp"', 'b"tmpfs", b"/nowhere"', "'mount(tmpfs, /nowhere, tmpfs, size="),
    ],
)
def test_is_refused_by_name_where_namespaces_cannot_be_had(tmp_path, monkeypatch, text, wrong, told):
    """The same files, but for a call that the kernel refuses."""
    folder = tmp_path / "tmoe/post/rewards"
    shutil.copytree(pool.WORKER.parent, folder)
    source = (folder / "sandbox.py").read_text()
    assert text in source
    (folder / "sandbox.py").write_text(source.replace(text, wrong))
    monkeypatch.setattr(pool, "WORKER", folder / "worker.py")
    with pytest.raises(ConfigError) as error:
        Rewards(["exact", "code:2"], workers=1, code=True)
    said = str(error.value)
    assert said.startswith("--grpo.rewards=code:2: OSError: a sandbox cannot be made here: ") and told in said
