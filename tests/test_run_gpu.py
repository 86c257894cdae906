"""`make test-gpu` without a GPU: what it says, whom it starts, and that collecting tests costs no work.

next: run_gpu.py
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import conftest
import forked
import pytest
import run_gpu
import torch

from tmoe.ops.launch.kernel_launch import compile_only

ROOT = Path(__file__).parents[1]
GIB = 2**30


@pytest.mark.parametrize(
    ("gpus", "gib", "cores", "want"),
    [
        (1, 79.2, 16, 14),  # an H100: (79.2 - 20) / 4 GiB is 14, and two of the cores are kept
        (1, 139.8, 16, 14),  # an H200's memory would do for 29
        (1, 79.2, 12, 10),
        (1, 39.4, 16, 4),
        (1, 23.6, 16, 1),
        (1, 8.0, 16, 1),
        (4, 79.2, 64, 56),
        (8, 79.2, 64, 62),
        (8, 79.2, 2, 1),
    ],
)
def test_as_many_workers_as_fit(gpus, gib, cores, want):
    assert run_gpu.workers(gpus, gib, cores) == want
    assert gib < 24 or run_gpu.GIB_KEPT + run_gpu.GIB_A_WORKER * want / gpus <= gib


def test_without_a_gpu_it_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert run_gpu.main([]) == 1
    said = capsys.readouterr()
    assert (
        said.err.startswith("error: no GPU: torch.cuda.is_available() is False")
        and len(said.err.splitlines()) == 1
    )
    assert not said.out


@pytest.mark.parametrize(
    ("lacks", "names"), [(["xdist"], "pytest-xdist"), (["pytest", "xdist"], "pytest, pytest-xdist")]
)
def test_a_package_that_is_missing_is_one_line(monkeypatch, capsys, lacks, names):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in lacks else found(name))
    assert run_gpu.main([]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {sys.executable} lacks {names}; ") and len(said.splitlines()) == 1
    assert f"-m pip install --no-index --find-links WHEELS {names.replace(',', '')}" in said


@pytest.mark.parametrize("visible", ["", "2,3"])
@pytest.mark.parametrize(
    ("codes", "want"), [((0, 0), 0), ((1, 0), 1), ((0, 2), 1), ((0, 5), 0), ((5, 5), 1)], ids=str
)
def test_two_runs_beside_each_other(monkeypatch, capsys, codes, want, visible):
    """One run has a share of a GPU for each worker, the other has none.

    Both end before the second's words are printed.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    properties = SimpleNamespace(total_memory=int(79.2 * GIB))
    for name, value in dict(
        is_available=True, device_count=2, get_device_name="H", get_device_properties=properties
    ).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16))
    ran = []

    class Beside:
        def __init__(self, command, stdout, **options):
            ran.append((command, options.get("env")))
            stdout.write("said by ranks\n")

        def wait(self):
            return codes[1]

        def terminate(self):
            pass

    def run(command, env=None, **options):
        ran.append((command, env))
        return SimpleNamespace(returncode=codes[0] if "pytest" in command else 0)

    monkeypatch.setattr(subprocess, "Popen", Beside)
    monkeypatch.setattr(subprocess, "run", run)
    assert run_gpu.main(["-k", "router"]) == want
    out = capsys.readouterr().out
    (whole, whole_env), (warm, _), (shared, share) = ran  # nothing on whole GPUs waits for the compilers
    assert "precompile" in warm[-1] and "kernels compiled" in warm[-1] and ", 14)" in warm[-1]
    assert (
        "--durations=10" in shared
        and "--durations=10" in whole
        and shared[-6:-4] == whole[-6:-4] == ["-k", "router"]
    )
    assert (
        "gpu and not whole_gpu" in shared and "gpu and whole_gpu" in whole and "--numprocesses=14" in shared
    )
    assert share["TMOE_TESTS_GIB"] == "12.0" and share["TMOE_TESTS_GPUS"] == (visible or "0,1")
    assert whole_env["OMP_NUM_THREADS"] and not {"TMOE_TESTS_GIB", "TMOE_TESTS_GPUS"} & (
        whole_env.keys() | os.environ
    )
    order = [
        out.index(words)
        for words in ("2 x H (79 GiB), 16 cores: 14 workers", "warm-up: ", "said by ranks", "tests: ")
    ]
    assert order == sorted(order)


@pytest.mark.parametrize(("worker", "gpu"), [("gw0", "2"), ("gw1", "GPU-7"), ("gw4", "2"), (None, "2,GPU-7")])
def test_a_worker_sees_its_gpu(monkeypatch, worker, gpu):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-7")
    monkeypatch.setenv("TMOE_TESTS_GPUS", "2,GPU-7")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if worker:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    conftest.pytest_configure(SimpleNamespace(addinivalue_line=lambda *words: None))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == gpu


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_every_gpu_test_is_in_its_files_and_in_one_of_its_runs():
    """Collected as the GPU machine does, compared with all tests of the folder."""

    def collected(*words: str) -> set[str]:
        command = ["-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", *words]
        said = forked.run(command, timeout=600)
        assert said.returncode == 0, said.stdout[-2000:] + said.stderr[-2000:]
        return set(filter(None, said.stdout.splitlines()))

    shared, whole = (
        collected(*run_gpu.files(), "-m", mark) for mark in ("gpu and not whole_gpu", "gpu and whole_gpu")
    )
    counts = {line.rpartition(": ")[0]: int(line.rpartition(": ")[2]) for line in shared | whole}
    assert 0 < len(whole) <= run_gpu.WHOLE_WORKERS
    assert {path.split("/")[-1] for path in counts} == {path.split("/")[-1] for path in run_gpu.files()}
    marked = [
        p.name
        for p in (ROOT / "tests").rglob("test_*.py")
        if "mark.gpu" in p.read_text() and p.name != "test_run_gpu.py"
    ]
    assert sorted(marked) == sorted(
        path.split("/")[-1] for path in run_gpu.files() if "test_run_gpu" not in path
    )


def test_the_warm_up_traces_without_a_gpu():
    wanted: dict[str, str] = {}
    with compile_only("cuda:90", lambda name, key, compile: wanted.setdefault(key, name)):
        for trace, *args in run_gpu.traces():
            trace(*args)
    assert len(wanted) > 200 and {"topk_kernel", "push_kernel", "adamw_kernel"} <= set(wanted.values())


WATCHED = """
import contextlib, importlib, os, sys
from pathlib import Path

import pytest, torch, transformers, tmoe, tmoe.hf  # what these open and start is theirs

sys.path[:0] = ["tests", *map(str, Path("tests").rglob("*/"))]
results = str(Path("benchmarks/results").absolute())
here, found = None, set()
STARTS = "subprocess.Popen", "os.system", "os.fork", "os.posix_spawn", "os.exec"


def watch(event, args):
    if event in STARTS or (event == "open" and str(os.path.abspath(str(args[0]))).startswith(results)):
        found.add(f"{here}: {event} {str(args[0])[:80]}")


sys.addaudithook(watch)
for here in sorted(path.stem for path in Path("tests").rglob("*.py")):
    with contextlib.suppress(pytest.skip.Exception):  # a library that only some machines have
        importlib.import_module(here)
print(*sorted(found), sep="\\n")
"""


@pytest.mark.slow
def test_importing_tests_starts_nothing_and_reads_no_results():
    """Every worker imports what it collects, so a check in a module body runs once for each worker."""
    ran = forked.run(["-c", WATCHED], timeout=600)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert not ran.stdout.split("\n")[0], ran.stdout
