"""Runs the tests that need a GPU with the current interpreter, by as many workers as fit.

    make test-gpu PYTHON=python3          # or: python3 tests/run_gpu.py
    python3 tests/run_gpu.py -k router    # further words go to pytest

Nothing is installed and no package index is asked. Two pytest processes run at the same time:

- Most tests share GPUs with other workers, one worker for each GIB_A_WORKER of a GPU.
- Tests marked `whole_gpu` start their own ranks, need several GPUs or use much of a GPU's memory. All such
  tests of a file run on one worker, and memory is reserved for them.

Meanwhile the kernels are compiled into triton's cache. Tests that share GPUs start when that is done; the
tests of `whole_gpu` start at once and compile what they do not find. The time for compiling is reported
separately; a second call finds the kernels in the cache.

next: conftest.py
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
GIB_A_WORKER = 4.0  # GiB of a GPU for a worker, with its context (0.6 GiB); determines the number of workers
GIB_A_TEST = 12.0  # GiB that the largest tests may use for a moment; few do so at the same time
GIB_KEPT = 20.0  # GiB of each GPU reserved for the ranks and large tensors of `whole_gpu`
CORES_KEPT = 2  # cores reserved for `whole_gpu`
WHOLE_WORKERS = 6  # workers for the files of `whole_gpu`
# import name -> the package's name for pip
NEEDED = {"pytest": "pytest", "xdist": "pytest-xdist", "triton": "triton"}
NEEDED |= {
    name: name for name in ("einops", "numpy", "rich", "safetensors", "tokenizers", "tyro", "filelock")
}
OPTIONAL = {"transformers": "tests/hf/test_hf_gpu.py", "torchao": "tests/model/test_float8_gpu.py"}


def workers(gpus: int, gib: float, cores: int) -> int:
    """How many processes share `gpus` GPUs of `gib` GiB each, on a machine of `cores` cores; at least one."""
    of_one = max(1, int((gib - GIB_KEPT) // GIB_A_WORKER))
    return max(1, min(gpus * of_one, cores - CORES_KEPT))


def missing() -> list[str]:
    """The packages, by pip's names, that the tests need and this interpreter lacks."""
    return [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]


def files() -> list[str]:
    """The test files with tests for a GPU.

    Importing all test files in every worker would take longer than many of these tests.
    """
    found = (
        path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()
    )
    return [path.relative_to(ROOT).as_posix() for path in found]


def traces() -> list[tuple]:
    """The kernel variants that tests launch most often, in the form that precompile.py expects.

    Variants that few tests need are compiled by those tests.
    """
    sys.path[:0] = [str(folder) for folder in sorted((ROOT / "tests").rglob("*/"))]  # as pytest does
    import test_moe_gpu
    import test_ops_gpu
    import test_router_gpu
    import test_symm_gpu
    import torch

    from tmoe.base.activations import ACTIVATIONS
    from tmoe.commands.warmup import traces as traces_of
    from tmoe.config.model import IGNORE
    from tmoe.config.presets import presets
    from tmoe.config.run import ParallelConfig
    from tmoe.ops import adamw_op
    from tmoe.ops import sum_parts as parts
    from tmoe.ops.experts.op import trace
    from tmoe.ops.loss import cross_entropy, logprob_kernels
    from tmoe.ops.router import product as router_product
    from tmoe.ops.router.topk import trace as trace_router

    found: list[tuple] = []
    for T, D, F, E, K, _ in test_ops_gpu.SHAPES:
        found += [(trace, T, D, F, E, K, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
        if T > 200:
            activations = tuple(ACTIVATIONS)
            found += [(trace, T, D, F, E, K, torch.bfloat16, None, act, True) for act in activations]
    for shape in test_ops_gpu.FEW_SHAPES:
        for dtype in (torch.bfloat16, torch.float16):
            found += [(test_ops_gpu.trace_few, *shape, dtype, rows) for rows in test_ops_gpu.FEW_ROWS]
    for cfg in test_moe_gpu.CASES.values():
        T, D = test_moe_gpu.SIZES
        found.append((trace, T, D, cfg.ffn_dim, cfg.experts, cfg.top_k, torch.bfloat16))
        found.append((trace_router, T, cfg.experts, cfg.top_k, cfg.renormalize or cfg.softmax == "after"))
        found.append((router_product.trace, T, D, cfg.experts, torch.bfloat16))
    for T, D, E in test_router_gpu.SHAPES:
        found += [(router_product.trace, T, D, E, dtype) for dtype in (torch.bfloat16, torch.float32)]
    for dtype in (torch.bfloat16, torch.float32):
        found += [
            (cross_entropy.trace, V, D, IGNORE, dtype) for D, V in ((64, 512), (128, 50304), (64, 1001))
        ]
        found += [(logprob_kernels.trace, V, IGNORE, dtype) for V in (512, 50304, 1001, 151936)]
        found += [(adamw_op.trace, dtype), (parts.trace, dtype)]
    tiny = presets()["tiny"]
    found += traces_of(replace(tiny, train=replace(tiny.train, batch=1), parallel=ParallelConfig(ep=4)))
    return found + test_symm_gpu.traces(4)


def warm(processes: int, env: dict[str, str]) -> None:
    """Compiles the kernels in a separate process, so that no process forks after CUDA has started.

    An error is only printed: the tests then compile and repeat it.
    """
    code = (
        "import sys; sys.path[:0] = ['.', 'tests']; import run_gpu; "
        "from tmoe.ops.launch.precompile import precompile; "
        "from tmoe.commands.warmup import local_arch; "
        f"print('kernels compiled and needed:', *precompile(local_arch(), run_gpu.traces(), {processes}))"
    )
    start = time.perf_counter()
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env)
    failed = f" (failed, exit code {ended.returncode}: the tests compile)" if ended.returncode else ""
    print(f"warm-up: {time.perf_counter() - start:.0f} s{failed}", flush=True)


def commands(count: int, words: list[str]) -> list[list[str]]:
    """Two pytest commands: for the tests that share GPUs among `count` workers, and for `whole_gpu` tests."""
    left_out = [path for package, path in OPTIONAL.items() if importlib.util.find_spec(package) is None]
    chosen = [path for path in files() if path not in left_out]
    common = [sys.executable, "-m", "pytest", *chosen, "--durations=10", "--max-worker-restart=0", *words]
    shared = ["-m", "gpu and not whole_gpu", f"--numprocesses={count}", "--dist=worksteal"]
    whole = ["-m", "gpu and whole_gpu", f"--numprocesses={WHOLE_WORKERS}", "--dist=loadfile"]
    return [common + shared, common + whole]


def main(words: list[str]) -> int:
    """Returns 0 if all tests passed. Returns 1 if some failed, or if they cannot run; one line says why."""
    if lacking := missing():
        print(
            f"error: {sys.executable} lacks {', '.join(lacking)}; "
            "without a package index bring their wheels: "
            f"{sys.executable} -m pip install --no-index --find-links WHEELS {' '.join(lacking)}",
            file=sys.stderr,
        )
        return 1
    import torch

    if not torch.cuda.is_available():
        print(
            "error: no GPU: torch.cuda.is_available() is False; `make test` runs what needs none",
            file=sys.stderr,
        )
        return 1
    gpus = torch.cuda.device_count()
    gib = min(torch.cuda.get_device_properties(i).total_memory for i in range(gpus)) / 2**30
    cores = len(os.sched_getaffinity(0))
    count = workers(gpus, gib, cores)
    name = torch.cuda.get_device_name(0)
    print(
        f"{gpus} x {name} ({gib:.0f} GiB), {cores} cores: {count} workers of {GIB_A_WORKER:.0f} GiB",
        flush=True,
    )
    for package, path in OPTIONAL.items():
        if importlib.util.find_spec(package) is None:
            print(f"note: {package} is not here, so {path} is left out", flush=True)
    # a worker compiles in its own process: starting sixteen compilers for each of fourteen workers takes
    # longer than they save
    env = dict(OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1") | os.environ
    shared, whole = commands(count, words)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    share = dict(TMOE_TESTS_GIB=str(GIB_A_TEST), TMOE_TESTS_GPUS=visible)
    with tempfile.TemporaryFile("w+") as said:
        beside = subprocess.Popen(whole, cwd=ROOT, env=env, stdout=said, stderr=subprocess.STDOUT)
        try:
            warm(max(1, min(16, cores) - CORES_KEPT), env)
            start = time.perf_counter()
            codes = [subprocess.run(shared, cwd=ROOT, env=env | share).returncode, beside.wait()]
        finally:
            beside.terminate()
            beside.wait()
        said.seek(0)
        print("\n---- whole GPUs: ranks, several GPUs, large tensors ----", said.read(), sep="\n")
    print(f"tests: {time.perf_counter() - start:.0f} s")
    # exit code 5: no test was selected
    return int(any(code not in (0, 5) for code in codes) or all(code == 5 for code in codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
