"""Rewards that hang, die, shout and lie: each is named and counted, and costs its own sample alone.

next: test_rewards_code.py
"""

import logging
import os
import signal
import socket
import time
from pathlib import Path

import forked
import pytest

from tmoe.config.check import ConfigError
from tmoe.post.rewards import Rewards, RewardSample, pool

# A call of PyDLL keeps the interpreter's lock, as a loop in C does: no thread and no signal's handler runs.
HOSTILE = """
import ctypes, os, random, signal, sys, time

def hangs(s):
    if s.sample == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, set(range(1, 65)) - {9, 19})
        while True:
            ctypes.PyDLL(None).sleep(1000)
    return 1.0

def dies(s):
    if s.sample == 2:
        os._exit(0)
    return 1.0

def shouts(s):
    print("x" * 1_000_000)
    sys.stderr.write("y" * 1_000_000)
    os.write(1, b"z" * 1000)
    return 1.0

def writes_everywhere(s):
    if s.sample == 3:
        for descriptor in range(3, 1024):
            try:
                os.write(descriptor, b'garbage')
            except OSError:
                pass
    return 1.0

def hogs(s):
    if s.sample == 4:
        bytearray(5 << 30)
    return 1.0

def leaves(s):
    if s.sample == 5:
        sys.exit(0)
    if s.sample == 6:
        raise KeyboardInterrupt
    return 1.0

def changes_its_row(s):
    s.row["answer"] = "other"
    return 1.0
"""
ODD = """
def kinds(s):
    if s.sample == 7:
        raise KeyError("answer")
    odd = None, float("nan"), float("inf"), "1", True, 10**400, [1]
    return odd[s.sample]
def one(s):
    return 1
"""


LIKE_TRL = "as TRL's rewards do"
TAKES = "a reward takes one sample: f(sample) -> float or None"


def samples(n, **row):
    return [RewardSample("ask", "1", row or {"answer": "1"}, "stop", 5, 3, 70 + i // 4, i) for i in range(n)]


@pytest.fixture
def file(tmp_path):
    def write(text, name="mine.py"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def test_hostile_rewards_cost_one_sample_each(file, caplog):
    path = file(HOSTILE)
    functions = "hangs dies shouts writes_everywhere hogs leaves changes_its_row".split()
    said = [*(f"{path}:{name}" for name in functions), "exact:0.5"]
    with Rewards(said, workers=2, timeout_s=5.0) as rewards:
        first = rewards.score(samples(8))
        before = [worker.process.pid for worker in rewards.pool.workers]
        again = rewards.score(samples(1))  # all that were ended are there again
        assert [worker.process.pid for worker in rewards.pool.workers] == before
    assert first.rewards == [7.5, None, None, None, None, None, None, 7.5]
    assert again.rewards == [7.5] and again.faults == {}
    bad = dict(hangs=1, dies=2, writes_everywhere=3, hogs=4)
    for name, part in first.parts.items():
        wrong = [i for i, value in enumerate(part) if value is None]
        assert wrong == ([5, 6] if name == "leaves" else [bad[name]] if name in bad else []), name
    assert first.faults == {
        **{"hangs: hung": 1, "dies: died": 1, "writes_everywhere: broke its pipe": 1},
        **{
            "hogs: raised MemoryError": 1,
            "leaves: raised SystemExit": 1,
            "leaves: raised KeyboardInterrupt": 1,
        },
    }
    assert "reward hangs: hung" in caplog.text and "bytearray(5 << 30)" in caplog.text


def test_what_is_no_number_is_none_and_counted(file, caplog):
    """One that returns None does not apply; all else is a failure, and the sample has no reward."""
    path = file(ODD)
    with Rewards([f"{path}:kinds", f"{path}:one:2"], workers=1) as rewards:
        scores = rewards.score(samples(8))
        rewards.score(samples(8))
    assert scores.parts["kinds"] == [None, None, None, None, 1.0, None, None, None]
    assert scores.parts["one"] == [1.0] * 8
    assert scores.rewards == [2.0, None, None, None, 3.0, None, None, None]
    assert scores.faults == {
        **{"kinds: raised KeyError": 1, "kinds: returned NaN": 1, "kinds: returned None": 1},
        **{"kinds: returned inf": 2, "kinds: returned list": 1, "kinds: returned str": 1},
    }
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 5  # each kind once in two steps, and None is no warning
    assert "KeyError" in caplog.text and "worker.py" not in caplog.text  # of its traceback, the file's own
    with Rewards([f"{path}:kinds"], workers=1) as rewards:
        assert rewards.score(samples(1)) == ([None], {"kinds": [None]}, {"kinds: returned None": 1})


@pytest.mark.parametrize(("value", "weight"), [(1e308, 100), (1e300, 1), (-1e30, 1e9)])
def test_sums_that_are_not_finite(file, value, weight):
    with Rewards([f"{file(f'def big(s): return {value}')}:big:{weight}"], workers=1) as rewards:
        scores = rewards.score(samples(1))
    assert scores == ([None], {"big": [value]}, {"sum: is not finite": 1})


def test_infinities_of_two_signs_are_no_sum(file):
    path = file("def big(s): return 1e308\ndef small(s): return -1e308")
    with Rewards([f"{path}:big:100", f"{path}:small:100"], workers=1) as rewards:
        found = rewards.score(samples(1))
    assert found.rewards == [None] and found.faults == {"sum: is not finite": 1}


DRAWS = """
import random
def draws(s):
    return random.random() + len(str({"b", "a", s.answer, "c", "d"}))
def order(s):
    return float(hash(s.answer + "x") % 1000003)
"""


def test_which_worker_has_a_sample_makes_no_difference(file):
    path = file(DRAWS)
    found = []
    for workers in (1, 3):
        with Rewards([f"{path}:draws", f"{path}:order"], workers=workers) as rewards:
            many = [one._replace(answer=f"{one.sample}") for one in samples(40)]
            found += [rewards.score(many), rewards.score(many[::-1])]
    assert found[0] == found[2] and found[1] == found[3]
    assert found[0].rewards == found[1].rewards[::-1] and len(set(found[0].rewards)) == 40


INSIDE = """
import os, sys
def descriptors(s):
    places = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if int(n) > 2
              and os.path.exists(f"/proc/self/fd/{n}")]
    return float(len([place for place in places if place.startswith("pipe:")]) * 100 + len(
        [place for place in places if place.startswith("socket:")]))
def modules(s):
    return float("torch" in sys.modules or "tmoe" in sys.modules)
def names(s):
    return float(sum(name in os.environ for name in ("RANK", "MASTER_ADDR", "NCCL_DEBUG"))
                 + (os.environ["CUDA_VISIBLE_DEVICES"] != ""))
def children(s):
    import subprocess
    return float(subprocess.run(["sh", "-c", "kill -TERM $$"]).returncode)
def imports(s):
    from tmoe.post.rewards.reward_sample import RewardSample
    import beside
    return float(isinstance(s, RewardSample)) + beside.TWO
"""


def test_workers_have_nothing_of_the_trainer(file, monkeypatch):
    """No socket of gloo, though it could be inherited; no torch; no word of a launcher. Two pipes."""
    for name in ("RANK", "MASTER_ADDR", "NCCL_DEBUG"):
        monkeypatch.setenv(name, "0")
    file("TWO = 2", "beside.py")
    path = file(INSIDE)
    with socket.socket() as ours:
        ours.set_inheritable(True)
        said = [f"{path}:{name}" for name in ("descriptors", "modules", "names", "children", "imports")]
        with Rewards(said, workers=2) as rewards:
            parts = rewards.score(samples(1)).parts
    assert parts == dict(
        descriptors=[200.0],
        modules=[0.0],
        names=[0.0],
        children=[float(-signal.SIGTERM)],  # what a reward starts can be ended as ever
        imports=[3.0],
    )


def test_signals_to_the_group_and_edits_of_the_file_change_nothing(file):
    path = file("def f(s): return 1")
    with Rewards([f"{path}:f"], workers=2) as rewards:
        first, second = rewards.pool.workers
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(first.process.pid, number)
        file("def f(s): return 2")
        os.kill(second.process.pid, signal.SIGKILL)  # as by a machine without memory, between two steps
        second.process.wait()
        scores = rewards.score(samples(8))
        assert first is rewards.pool.workers[0] and second is not rewards.pool.workers[1]
    assert scores.rewards == [1.0] * 8 and scores.faults == {}


def test_large_answers_fit_through_pipes(file):
    many = [one._replace(answer="x" * 3_000_000) for one in samples(3)]
    with Rewards([f"{file('def size(s): return len(s.answer)')}:size"], workers=1) as rewards:
        assert rewards.score(many).rewards == [3e6] * 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1\ndef f(s): return (", "{path}:2: SyntaxError: '(' was never closed"),
        ("import nowhere_at_all", "{path}:1: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("def g(s): return 1\nh = g", "it has no function f; valid: g, h"),
        ("f = 3", "f is no function, it is int"),
        ("def f(s, t): return 1", f"{TAKES}; it is f(s, t): missing a required argument: 't'"),
        ("def f(): return 1", f"{TAKES}; it is f(): too many positional arguments"),
        ("def f(completions, **kwargs): return [1]", f"f takes lists, completions, {LIKE_TRL}; {TAKES}"),
        ("def f(prompts, completions): pass", f"f takes lists, completions and prompts, {LIKE_TRL}; {TAKES}"),
        ("class f: pass", f"f is a class; {TAKES}"),
        ("def f(s): yield 1", f"f is asynchronous or a generator, and returns no number; {TAKES}"),
        ("raise OSError('no\\ndisk')", "{path}:1: OSError: no disk"),
        ("import os; os._exit(3)", "a process with these rewards died before it was ready (exit code 3)"),
    ],
)
def test_files_that_cannot_be_imported_are_refused_in_one_line(file, text, told):
    path = file(text)
    with pytest.raises(ConfigError) as error:
        Rewards([f"{path}:f"], workers=1)
    assert str(error.value) == f"--grpo.rewards={path}:f: {told.replace('{path}', str(path))}"


def test_an_end_to_starting_workers_again_and_again(file):
    """What a reward needs is gone in the middle of a run: the run ends with one error, and does not hang."""
    needed = file("", "needed_by_mine.py")
    path = file("import needed_by_mine, os\ndef f(s): os._exit(4)")
    rewards = Rewards([f"{path}:f"], workers=1)
    needed.unlink()
    with pytest.raises(RuntimeError, match=r"rewards: a process .* before it was ready .*3 times in a row"):
        rewards.score(samples(2))
    with pytest.raises(RuntimeError, match="rewards: they are closed"):
        rewards.score(samples(2))
    rewards.close()


PARENT = """
import os, signal, sys, threading, time
from tmoe.post.rewards import Rewards, RewardSample, pool
file, told = sys.argv[1:]
rewards = Rewards([f"{file}:hangs"], workers=2, timeout_s=600)
with open(told, "w") as out:
    print(*(worker.process.pid for worker in rewards.pool.workers), file=out)
sample = RewardSample("", "", {}, "stop", 1, 0, 0, 1)
threading.Thread(target=rewards.score, args=([sample],), daemon=True).start()
while not os.path.exists(told + ".in"):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def test_workers_die_with_the_trainer(file, tmp_path):
    """Also one that is in the middle of a loop in C, where it reads from no pipe."""
    told = tmp_path / "told"
    mark = f"    if s.sample == 1:\n        open({str(told) + '.in'!r}, 'w').close()\n"
    path = file(HOSTILE.replace("    if s.sample == 1:\n", mark, 1))
    done = forked.run(["-c", PARENT, path, told])
    assert done.returncode == -signal.SIGKILL, done.stderr
    workers = [int(pid) for pid in told.read_text().split()]
    deadline = time.monotonic() + 60
    while any(map(runs, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(workers) == 2 and not any(map(runs, workers))


def test_closing_ends_all():
    rewards = Rewards(["exact"], workers=2)
    workers = [worker.process.pid for worker in rewards.pool.workers]
    rewards.close()
    rewards.close()
    assert not any(map(runs, workers))


ONLY_HANGS = """
import time
def hangs(s):
    time.sleep(1000 if s.number else 0)
    return 1.0
"""


@pytest.mark.slow
def test_a_reward_that_only_hangs_is_given_up_for_the_step(file, monkeypatch):
    """Else a step would take as long as all of its samples take to time out. The next step tries again."""
    monkeypatch.setattr(pool, "MOST_HUNG", 2)
    said = ["exact", f"{file(ONLY_HANGS)}:hangs", "regex(1)"]
    with Rewards(said, workers=1, timeout_s=3.0) as rewards:
        first = rewards.score(samples(6))
        again = rewards.score([one._replace(number=0) for one in samples(2)])
    assert first.faults == {"hangs: hung": 2, "hangs: was not tried": 4}
    assert first.parts["exact"] == first.parts["regex"] == [1.0] * 6 and first.rewards == [None] * 6
    assert again.rewards == [3.0] * 2 and again.faults == {}
