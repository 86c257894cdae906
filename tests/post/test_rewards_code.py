"""The reward `code`: right, wrong and hostile programs; a refusal by name where there is no sandbox."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import pytest

from tmoe.config.check import ConfigError
from tmoe.post.rewards import Rewards, RewardSample, pool, sandbox
from tmoe.post.rewards import code as code_reward


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
    done = sandbox.script(head + LOOKS, "", 60.0)
    assert done.whole
    assert eval(done.said, dict(true=True, false=False)) == {
        **dict(user=1, process=2, secret=False, files=[], memory=True, large="File too large"),
        **dict(here="Network is unreachable", self="Network is unreachable", python="Read-only file system"),
    }


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        *[("def check(f):\n    assert f(1)", "asserts nothing"), ("", "asserts nothing")],
        ("class T:\n    def test(self): f()\nif __name__ == '__main__': main()", "asserts nothing"),
        *[
            (["assert add(1) = 1"], "no Python"),
            ('{"inputs": ["1"], "outputs": ["2"]}', "must be Python text"),
        ],
        *[({"input": [1], "output": "2"}, "must be"), ({"input": "1", "output": None}, "must be")],
        *[({"input": "1", "output": "2", "testtype": "functional"}, "must be"), ("[]", "must be")],
        ({"input": "1", "output": "2", "fn_name": "f"}, "must be Python text"),
    ],
)
def test_tests_that_each_program_or_none_would_pass_are_refused(tests, why):
    with pytest.raises(ValueError, match=why) as error:
        code_reward.tests_of(of("", tests))
    assert "\n" not in str(error.value)


def test_the_program_of_an_answer():
    """The last block that says it is Python; output that follows is none."""
    blocks = "```Python\nfirst\n```\n```py\nx = 1\n```\nIt prints\n```\n3\n```\n"
    assert code_reward.program_of(blocks) == "x = 1\n"
    assert code_reward.program_of("```\na\n```\n```text\nb\n```") == "b\n"
    assert code_reward.program_of("x = 1") == "x = 1"


def test_objects_as_json_text_are_objects():
    """As the sets of DeepCoder and PRIME write them; as Python it is a list, which each program passes."""
    text = '[{"type": "stdin_stdout", "input": "1", "output": "2"}]'
    assert code_reward.tests_of(of("", text)) == [{"type": "stdin_stdout", "input": "1", "output": "2"}]
    assert code_reward.tests_of(of("", "[f(x) for x in (1,)]")) == ["[f(x) for x in (1,)]"]


SHADOWS = (
    "abs len sorted isinstance all any type list str repr eval exec compile print AssertionError".split()
)
ANY = """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __eq__
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __radd__ = __sub__
    def __abs__(self): return 0
    def __float__(self): return 0.0
    def __round__(self, digits=0): return self
    def __iter__(self): return iter([])
    def __len__(self): return 0
    def __hash__(self): return 0
    def __getattr__(self, name): return self
    def __call__(self, *words): return self
def add(a, b): return Any()
"""
WRITES = "import os\nfor n in range(3, 20):\n    try: os.write(n, {what})\n    except OSError: pass"
CHEATS = [
    "raise SystemExit(0)",
    f"import os; os._exit({sandbox.PASSED})",
    "import os; os._exit(97)",  # as the sandbox itself where it cannot be made
    f"def add(a, b):\n    import os; os._exit({sandbox.PASSED})",
    f"def add(a, b): exit({sandbox.PASSED})",
    "import sys; sys.excepthook = lambda *_: None\ndef add(a, b): 1 / 0",
    f"import atexit, os; atexit.register(lambda: os._exit({sandbox.PASSED}))\ndef add(a, b): return 0",
    f"import builtins\nfor name in {SHADOWS}: setattr(builtins, name, max)\ndef add(a, b): return 0",
    "import json; json.loads = json.dumps = lambda *_: '{\"value\": 3}'\ndef add(a, b): return 0",
    "import sys; sys.modules['tmoe.post.rewards.wire'].Wire.write = lambda *_: 1\ndef add(a, b): return 0",
    "import sys\nfor name in list(sys.modules): sys.modules[name] = None\ndef add(a, b): return 0",
    "def add(a, b):\n    found = []\n    for _ in range(10**5): found = [found]\n    return found",
    "class Odd(int):\n    def __eq__(self, other): return True\ndef add(a, b): return [Odd(0)][0]",
    WRITES.format(what="b'\\0\\0\\0\\2{}' * 9"),
    WRITES.format(what="b'\\xff' * 99"),
    "import os, signal; os.kill(0, signal.SIGKILL)",
    "import threading, os\ndef add(a, b): threading.Thread(target=os._exit, args=(43,)).start()",
    "def add(a, b):\n    raise type('Own', (BaseException,), {})",
    "__builtins__ = None",
    "def add(a, b):\n    return add.__class__",
    # what it says is code for a judge that ran what it is given
    "add = eval",
]


@pytest.mark.parametrize("program", CHEATS)
def test_a_program_cannot_pass_a_test_but_by_its_values(program):
    test = "assert add(1, 2) == 3" if program != "add = eval" else f"add('{program} + 1', {{}})"
    assert not sandbox.passes(program, test, 60.0)


def test_an_object_that_is_equal_to_everything_is_equal_to_nothing_that_a_test_has():
    """The program has names of Python's builtins, too, which are not those of the test."""
    lines = """assert add(1, 2) == 3; assert 3 == add(1, 2); assert [add(1, 2)] == [3]
    assert not add(1, 2) != 3; assert add(1, 2) in (3, 4); assert {add(1, 2)} == {3}; assert add(1, 2) >= 3
    assert 3 <= add(1, 2) <= 3; assert abs(add(1, 2) - 3) < 1e-6; assert abs(3 - add(1, 2)) < 1e-6
    assert round(add(1, 2), 2) == 3; assert math.isclose(add(1, 2), 3); assert add(1, 2).x == 3
    assert add(1, 2)() == 3; assert 3 in add(1, 2); assert isinstance(add(1, 2), int)
    assert str(add(1, 2)) == "3"; assert all([add(1, 2) == 3]); assert sum([add(1, 2)]) == 3
    assert max(add(1, 2), 2) == 3; assert dict(a=add(1, 2)) == dict(a=3)
    unittest.TestCase().assertEqual(add(1, 2), 3); unittest.TestCase().assertAlmostEqual(add(1, 2), 3)"""
    each = [one.strip() for line in lines.splitlines() for one in line.split(";")]
    none = f"""
import unittest
for one in {each!r}:
    try:
        exec(one, globals())
    except Exception:
        continue
    raise KeyError(one)
"""
    shadows = "".join(f"def {name}(*_): return True\n" for name in SHADOWS)
    assert len(each) == 23 and sandbox.passes(shadows + ANY, none, 60.0)
    honest = "def add(a, b): return a + b"
    assert not sandbox.passes(honest, none, 60.0)  # the first line passes, which the loop does not allow


PROGRAM = """
import math
from collections import Counter, defaultdict, namedtuple
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import List
Point = namedtuple("Point", "x y")
class Empty(LookupError): pass
class Emptier(Empty): pass
class Color(Enum): RED = 1
class Number(IntEnum): ONE = 1
class Word(str, Enum): A = "a"
class Last(list):
    def last(self): return self[-1]
class Stack:
    def __init__(self): self.items = []
    def push(self, one):
        self.items.append(one)
        return self
    def pop(self):
        if not self.items: raise Emptier("empty", 3)
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __str__(self): return f"Stack{self.items}"
@dataclass(order=True)
class Pair:
    x: int
    y: "int" = 0
    def __add__(self, other): return Pair(self.x + other.x, self.y + other.y)
class Solution:
    def two(self, nums: List[int], target: int) -> List[int]: return [0, 1]
def same(x): return x
def keys(x): return x.keys()
def items(x): return x.items()
def put(xs): xs.sort(); xs.append(9)
def nest(d): d["k"].append(2); d["new"] = {"z": d["k"]}
def squares(n):
    for i in range(n): yield i * i
def apply(f, xs): return [f(x) for x in xs]
def wrong(): raise ValueError("neg")
def count(text): return Counter(text)
def lists():
    found = defaultdict(list)
    found[1].append(2)
    return found
def circle():
    found = [1]
    found.append(found)
    return found
def hello(n): print("hi", n)
@contextmanager
def five(): yield 5
def plus(): return lambda x: x + 1
def reverse(node):
    before = None
    while node:
        node.next, node, before = before, node.next, node
    return before
def odd(): return (1, [2, {3}], frozenset([4]), b"x\\xff", 1j, range(3), None, True, "\\ud800", 10**5000)
def array():
    import numpy as np
    return np.arange(4.0).reshape(2, 2)
"""
TESTS = [  # of classes; of exceptions; of containers that are changed; of values, functions and prints
    """
s = Stack()
assert len(s.push(1).push(2)) == 2 and s.pop() == 2 and list(s) == [1] and str(s) == "Stack[1]"
assert isinstance(s, Stack) and not isinstance(3, Stack) and 1 in s and 5 not in s
assert Pair(1, 2) == Pair(1, 2) != Pair(1, 3) and Pair(1, 2) + Pair(1, 1) == Pair(2, 3) and Pair(1) < Pair(2)
assert Pair(3).x == 3 and same([Pair(1)])[0] == Pair(1) and {Pair: 1}[Pair] == 1
assert Point(1, 2) == (1, 2) and Point(1, 2).x == 1 and tuple(Point(1, 2)) == (1, 2) and Point(1, 2)[1] == 2
assert same(Last([1])) == [1] and Last([1, 2]).last() == 2 and sorted(Last([2, 1])) == [1, 2]
assert Color.RED is Color.RED and Color.RED.value == 1 and Number.ONE == 1 and 3 - Number.ONE == 2
assert Word.A == "a" and keys({3: 4}) == {3} and {(3, 4)} == items({3: 4})
assert Solution().two([2, 7], target=9) == [0, 1]
""",
    """
for kind in (Empty, Emptier, LookupError):
    try:
        Stack().pop()
        assert False
    except kind as error:
        assert error.args == ("empty", 3)
try:
    wrong()
except ValueError as error:
    assert str(error) == "neg"
def boom(x):
    raise KeyError(x)
try:
    apply(boom, [1])
    assert False
except KeyError as error:
    assert error.args == (1,)
import unittest
class Case(unittest.TestCase):
    def test_it(self):
        self.assertEqual(same(3), 3)
        self.assertRaises(ValueError, wrong)
suite = unittest.defaultTestLoader.loadTestsFromTestCase(Case)
assert unittest.TextTestRunner().run(suite).wasSuccessful()
""",
    """
xs = [3, 1, 2]
assert put(xs) is None and xs == [1, 2, 3, 9] and same(xs) is xs
d = {"k": [1]}
k = d["k"]
nest(d)
assert d == {"k": [1, 2], "new": {"z": [1, 2]}} and k is d["k"] is d["new"]["z"] and k == [1, 2]
c = circle()
assert c[1] is c and lists() == {1: [2]} and count("aab").most_common(1) == [("a", 2)]
""",
    """
assert list(squares(4)) == [0, 1, 4, 9] and next(squares(1)) == 0 and sum(squares(3)) == 5
assert odd() == (1, [2, {3}], frozenset([4]), b"x\\xff", 1j, range(3), None, True, "\\ud800", 10**5000)
assert apply(lambda x: x * 2, [1]) == [2] and apply(str, [1]) == ["1"] and apply(Pair, [1]) == [Pair(1)]
assert plus()(2) == 3 and math.isclose(same(0.1) * 3, 0.3) and same(float("nan")) != 0
assert type(same("")) is str and type(same(True)) is bool
assert (array() == np.array([[0, 1], [2, 3]])).all() and array().shape == (2, 2)
import contextlib, io
with contextlib.redirect_stdout(io.StringIO()) as said, five() as v:
    hello(3)
assert v == 5 and said.getvalue() == "hi 3\\n"
def check(candidate):
    assert candidate(1) == 1
check(same)
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
    def double(self): return 2 * self.value
last = Node(3)
found = reverse(Node(1, Node(2, last)))
assert found is last and (found.next.value, found.next.next.value, found.next.next.next) == (2, 1, None)
assert apply(Node.double, [Node(4)]) == [8]
""",
]


@pytest.mark.parametrize("test", TESTS)
def test_a_judge_elsewhere_sees_what_python_sees(test):
    assert sandbox.passes(PROGRAM, test, 60.0)
    names: dict = {}
    exec(PROGRAM + "import numpy as np", names)  # the test is right in one Python as well
    exec(test, names)


def test_a_program_cannot_end_the_loop_of_a_test():
    """A StopIteration ends map and zip in Python itself: nothing would be compared."""
    test = "for one, other in zip(map(add, [1], [2]), [3]): assert one == other"
    assert not sandbox.passes("def add(a, b): raise StopIteration", test, 60.0)
    assert sandbox.passes(ADD, f"{test}\nassert next(iter([]), 1) == 1", 60.0)


def test_a_program_cannot_replace_a_method_of_a_test():
    test = """
class Tree:
    def __init__(self): self.left = self.right = None
    def fits(self): return self.left == 3
tree = Tree()
add(tree)
assert tree.fits()
"""
    forged = "def add(tree):\n    try: tree.fits = lambda: True\n    except AttributeError: pass"
    assert not sandbox.passes(forged, test, 60.0)
    assert sandbox.passes("def add(tree): tree.left = print; tree.left = 3", test, 60.0)


def test_tests_see_no_program_that_did_not_load():
    for program in ("def add(: no", "1 / 0", "exit(0)"):
        assert not sandbox.passes(program, "", 60.0)
    assert sandbox.passes("", "", 60.0)


@pytest.mark.parametrize("below", ["temporary", "base"])
def test_where_pythons_environment_lies(tmp_path, below):
    """Below /tmp, which programs have for themselves; or below the Python that it is an environment of."""
    place = tempfile.TemporaryDirectory(dir="/tmp" if below == "temporary" else sys.base_prefix)
    with place as folder:
        os.chmod(folder, 0o755)
        venv.create(f"{folder}/env", symlinks=True)
        python = f"{folder}/env/bin/python"
        code = SEES.format(root=Path(sandbox.__file__).parents[3])
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


SEES = """
import sys, types
for name in ("tmoe", "tmoe.post", "tmoe.post.rewards"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = ["{root}/" + name.replace(".", "/")]
from tmoe.post.rewards import sandbox
sandbox.check()
print(sandbox.script("open('/tmp/x', 'w').write('x')", "", 60.0).whole)
"""


def test_programs_that_do_not_end_are_no_fault_of_the_reward():
    """They fail within the sample's time, and the worker lives on."""
    with Rewards(["code"], workers=1, code=True, timeout_s=5.0) as rewards:
        worker = rewards.pool.workers[0]
        scores = rewards.score([of("import time\ntime.sleep(1000)", ["assert 1", "assert 1"])])
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
    done = sandbox.script(BOMB, "", 60.0)
    assert done == sandbox.Done(True, "True\n")
    assert none_is_left()


LEAVES = """
import ctypes, os, time
os.setsid()
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG: no signal where the parent ends
os.kill(1, 9)
os._exit = lambda *_: time.sleep(1000)
def add(a, b): return a + b
"""


def test_a_program_that_leaves_its_group_ends_with_its_sandbox():
    assert sandbox.passes(LEAVES, "assert add(1, 2) == 3", 60.0)
    assert none_is_left()


@pytest.mark.slow
def test_bombs_without_end(tmp_path):
    """In Python and in a shell, for the sample's time; then all is gone."""
    for program in (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import os\nos.system('bomb() { bomb | bomb & }; bomb')\nimport time; time.sleep(1000)",
    ):
        assert not sandbox.passes(program, "", 2.0)
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
