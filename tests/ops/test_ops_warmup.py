"""Eight processes that start at once on an empty or half-written cache compile each kernel once.

None of them waits in a collective.

The test starts this file in another process, which forks eight ranks:
    python tests/ops/test_ops_warmup.py

next: test_ops_gpu.py
"""

import datetime
import importlib
import inspect
import json
import multiprocessing
import os
import pkgutil
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import forked
import pytest
import torch
import torch.distributed as dist
from filelock import FileLock
from tiers import slow_but

from tmoe import ops as tmoe_ops
from tmoe.commands import warmup
from tmoe.commands.warmup import warm
from tmoe.commands.warmup_command import ARCH
from tmoe.config.linear_settings import LinearConfig
from tmoe.config.presets import presets
from tmoe.config.run import GrpoConfig, LoraConfig, ParallelConfig, TrainConfig
from tmoe.ops.decode import sample
from tmoe.ops.delta import gpu as delta
from tmoe.ops.experts import swiglu
from tmoe.ops.experts.op import trace
from tmoe.ops.launch import precompile
from tmoe.ops.launch.kernel_launch import compile_only
from tmoe.ops.launch.shapes import StepShapes
from tmoe.ops.register import collect

ROOT = Path(__file__).parents[2]
RANKS = 8


def rank(index, folder):
    """The start of train.py: it compiles, and then joins the other ranks.

    Returns (compiled, needed, when done, compiled again).
    """
    cfgs = [presets()["tiny"]]
    compiled, needed = warm(cfgs, "cuda:90", 1)
    done = time.time()
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, datetime.timedelta(seconds=60), rank=index, world_size=RANKS)
    dist.barrier()
    dist.destroy_process_group()
    warmup._warm.clear()  # as a process that comes later
    return compiled, needed, done, warm(cfgs, "cuda:90", 1)


def main():
    folder = os.environ["TRITON_CACHE_DIR"]
    with multiprocessing.get_context("fork").Pool(RANKS) as pool:
        print(json.dumps(pool.starmap(rank, [(i, folder) for i in range(RANKS)], chunksize=1)))


def start(command, cache):
    places = f"{ROOT}{os.pathsep}{ROOT / 'tests/lib'}"
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *command], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def whole(cache):
    """The kernels that triton finds: it writes this file last."""
    return list(cache.glob("*/__grp__*.json"))


def half_written(cache):
    """Kernels of which some stages are there and the last is not."""
    return {f.parent for f in cache.glob("*/*.t*ir")} - {f.parent for f in whole(cache)}


def assert_ranks_share_the_work(cache):
    found = len(whole(cache))
    ranks = start([__file__], cache)
    out, _ = ranks.communicate(timeout=800)
    assert ranks.returncode == 0, out
    compiled, needed, done, again = zip(*json.loads(out.splitlines()[-1]), strict=True)
    assert len(set(needed)) == 1 and needed[0] == len(whole(cache)) > 10
    assert sum(compiled) == needed[0] - found, (compiled, found)
    assert sum(n > 0 for n in compiled) > 1, compiled  # in parallel
    # the first rank to leave for the first collective leaves after the last kernel: no rank has to wait
    # for a compiler there
    assert min(done) >= max(f.stat().st_mtime for f in whole(cache))
    assert not half_written(cache) and all(n == [0, needed[0]] for n in again)


@pytest.mark.slow
def test_eight_ranks_on_an_empty_cache(tmp_path):
    assert_ranks_share_the_work(tmp_path)


@pytest.mark.slow
def test_eight_ranks_on_what_a_killed_compilation_left(tmp_path):
    """Killed in the middle of a kernel: locks, temporary files and part of a cache stay."""
    victim = start(["-m", "tmoe.warmup", "tiny", "--arch", "cuda:90", "--processes", "2"], tmp_path)
    while not (whole(tmp_path) and half_written(tmp_path)):
        assert victim.poll() is None
    os.killpg(victim.pid, signal.SIGKILL)
    victim.communicate()
    assert half_written(tmp_path) and whole(tmp_path)
    assert_ranks_share_the_work(tmp_path)


def killed(arch, traces):
    os.kill(os.getpid(), signal.SIGKILL)


def broken(arch, traces):
    return 1 / 0


@pytest.mark.timeout(300)
def test_a_killed_process_ends_the_warm_up(monkeypatch):
    """Out of memory, or a compiler that aborts: no process waits for what will not come."""
    monkeypatch.setattr(precompile, "work", killed)
    with pytest.raises(RuntimeError, match="a process that compiled kernels for cuda:90 died"):
        precompile.precompile("cuda:90", [], 2)
    monkeypatch.setattr(precompile, "work", broken)
    with pytest.raises(RuntimeError, match="cuda:90: ZeroDivisionError: division by zero"):
        precompile.precompile("cuda:90", [], 2)


@pytest.mark.slow
def test_a_cache_without_room_for_locks_is_read(tmp_path):
    """Whole and read-only, or another user's: triton reads it, and so do we.

    (Root may write anywhere, so here a file is in the way.)
    """
    (tmp_path / "tmoe-locks").touch()
    asks = (
        "import torch; from tmoe.ops import adamw; from tmoe.ops.launch import precompile; "
        "print(precompile.work('cuda:90', [(adamw.trace, torch.bfloat16)]))"
    )
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    first, second = (forked.run(["-c", asks], env=env) for _ in range(2))
    first, second = eval(first.stdout), eval(second.stdout)
    assert first[0] == first[1] > 0 and second == (0, first[1])


DAMAGE = """
import os, pathlib, sys, torch
from tmoe.ops import sum_parts as parts
from tmoe.ops.launch import precompile

def start():
    if (child := os.fork()) == 0:  # a process that has compiled nothing yet
        compiled, wanted = precompile.work("cuda:90", [(parts.trace, torch.bfloat16)])
        os._exit(100 + compiled if wanted == 2 else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) - 100

cache = pathlib.Path(os.environ["TRITON_CACHE_DIR"])
found = [start(), start()]
for pattern in ("__grp__*.json", "sum*.json", "*.cubin"):
    empty = lambda f, data: f.write_bytes(b"")
    half = lambda f, data: f.write_bytes(data[: len(data) // 2])
    gone = lambda f, data: f.unlink()
    for harm in (empty, half, gone):
        file = sorted(cache.glob(f"*/{pattern}"))[0]
        whole = file.read_bytes()
        harm(file, whole)
        found += [start(), start(), int(len(file.read_bytes()) == len(whole))]
print(found)
"""


@pytest.mark.slow
def test_a_torn_or_missing_file_costs_its_kernel_alone(tmp_path):
    """It costs neither every start nor the first launch; triton takes a torn binary for a whole one."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    ran = forked.run(["-c", DAMAGE], env=env)
    assert ran.stdout.splitlines()[-1:] == [str([2, 0, *[1, 0, 1] * 9])], ran.stdout + ran.stderr


def test_nothing_is_asked_for_twice(monkeypatch):
    """One process asks once for one architecture: a second run in it forks nothing."""
    asked = []
    monkeypatch.setattr(warmup, "_warm", set())
    monkeypatch.setattr(
        warmup, "precompile", lambda arch, traces, n: asked.append((arch, len(traces))) or (0, len(traces))
    )
    tiny, other = presets()["tiny"], presets()["olmoe-1b-7b"]
    n = len(warmup.traces(tiny))
    assert warm([tiny, tiny], "cuda:90", 1) == (0, n) and warm([tiny], "cuda:90", 1) == (0, 0)
    assert warm([tiny], "cuda:80", 1) == (0, n)
    warm([tiny, other], "cuda:90", 1)
    assert asked == [("cuda:90", n), ("cuda:80", n), ("cuda:90", len(warmup.traces(other)))]


def test_every_op_with_kernels_is_asked(monkeypatch):
    """Each `trace` of tmoe.ops is in what some configuration warms up."""
    monkeypatch.setattr(warmup, "COUNTS", [64])
    monkeypatch.setattr(delta, "MEASURED", {ARCH})
    tiny = presets()["tiny"]
    moe = tiny.model.moe
    bf16 = replace(tiny, train=replace(tiny.train, dtype="bf16"), compile=False)
    grpo = replace(bf16, task="grpo", grpo=GrpoConfig(rewards=["length"], rollout_slots=64))
    shared = replace(presets()["moe-pilot-14b"], parallel=ParallelConfig(ep=2))
    fp8 = replace(shared, train=replace(shared.train, fp8="experts", fp8_everywhere=True))
    cfgs = [
        grpo,
        replace(grpo, grpo=replace(grpo.grpo, bitwise=True)),
        replace(bf16, model=replace(tiny.model, moe=replace(moe, weigh="before"))),
        replace(bf16, model=replace(tiny.model, moe=replace(moe, selection="sinkhorn"))),
        shared,
        replace(grpo, lora=LoraConfig(rank=8)),
        replace(bf16, optim=replace(bf16.optim, states="bf16")),
        replace(bf16, optim=replace(bf16.optim, muon=".*")),
        fp8,
        replace(fp8, lora=LoraConfig(rank=8)),
        replace(grpo, model=replace(tiny.model, linear=LinearConfig("deltanet", 4, 2, 2, 64, 64))),
    ]
    asked = {run for cfg in cfgs for run, *_ in warmup.traces(cfg)}
    found = set()
    for module in pkgutil.walk_packages(tmoe_ops.__path__, "tmoe.ops."):
        names = vars(importlib.import_module(module.name)).items()
        found |= {f for name, f in names if name.startswith("trace") and inspect.isfunction(f)}
    found.discard(sample.trace_rows)  # settings of each row: tmoe.generate.Live only, which no run starts
    # no layer calls rms_norm
    assert {f.__module__ for f in found - asked} <= {"tmoe.ops.norm", "tmoe.ops.register"}, found - asked


def test_a_second_op_of_a_name_is_refused():
    with pytest.raises(ValueError, match="StepShapes: got adamw"):
        collect("adamw", {StepShapes: lambda shapes: []})


def kernels(traces: list[tuple]) -> set[str]:
    found: set[str] = set()
    with compile_only("cuda:90", lambda name, key, compile: found.add(key)):
        for run, *args in traces:
            run(*args)
    return found


@pytest.mark.parametrize("name", slow_but(["qwen3-30b-a3b"], ["qwen3-30b-a3b", "olmoe-1b-7b", "gpt-oss-20b"]))
@pytest.mark.parametrize("ep", [1, 2])
def test_a_rollouts_pass_of_any_number_of_tokens_is_compiled(name, ep):
    grpo = GrpoConfig(rewards=["length"], rollout_slots=64)
    cfg = replace(presets()[name], task="grpo", grpo=grpo, train=TrainConfig(batch=1, seq=2048))
    cfg = replace(cfg, parallel=ParallelConfig(ep=ep))
    known = kernels(warmup.traces(cfg))
    draw = random.Random(0)
    for T in [1, 63, 255, 504, 1023, 8191, *(draw.randint(1, 8192) for _ in range(30))]:
        of_pass = warmup.of_layer(cfg, T, torch.bfloat16, trained=False)
        assert kernels(of_pass) <= known, T
        # the experts', which with nccl have as many rows as come
        (run, rows, *how), *_ = [one for one in of_pass if one[0] is trace]
        if ep > 1:
            assert kernels([(run, draw.randint(1, rows), *how)]) <= known, T


@pytest.mark.parametrize(
    ("name", "layout", "widths"),
    [
        ("moe-pilot-14b", {}, [2816]),
        ("deepseek-v2-lite", dict(ep=2), [2816, 10944]),
        ("qwen3-30b-a3b", dict(ep=2, etp=2), []),
        ("nemotron-3-nano-30b-a3b", dict(ep=2), [3712]),
    ],
)
def test_a_rollouts_shared_dense_and_whole_experts_are_compiled(name, layout, widths):
    """With etp a rollout takes each expert whole."""
    cfg = replace(presets()[name], task="grpo", grpo=GrpoConfig(rewards=["length"], rollout_slots=64))
    known = kernels(warmup.traces(replace(cfg, parallel=ParallelConfig(**layout))))
    bf16 = torch.bfloat16
    halves = cfg.model.moe.shared_halves
    assert kernels([(swiglu.trace, 1, width, bf16, halves) for width in widths]) <= known
    layout = layout | dict(etp=1)
    whole = replace(cfg, parallel=ParallelConfig(**layout))
    assert kernels(warmup.of_layer(whole, 48, bf16, trained=False)) <= known


TOOLS = """
import os
for name in ("TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"):
    os.environ.pop(name, None)
from triton import knobs
from tmoe.commands import warmup
before = knobs.cache.dir, knobs.nvidia.ptxas.path
warmup.torch.version.cuda = "13.0"
warmup.keep_tools()
for name in ("TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"):  # as inductor does
    os.environ.setdefault(name, "/another")
assert (knobs.cache.dir, knobs.nvidia.ptxas.path) == before, (knobs.cache.dir, knobs.nvidia.ptxas.path)
"""


def test_inductor_changes_neither_cache_nor_assembler():
    ran = forked.run(["-c", TOOLS])
    assert ran.returncode == 0, ran.stderr


TORN = """
import os, sys, torch
from pathlib import Path
from tmoe.commands import warmup
from tmoe.config.presets import presets
if len(sys.argv) > 1:
    for path in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.main.so"):
        os.truncate(path, int(sys.argv[1]))
    if len(sys.argv) == 2:
        warmup.warm([presets()["tiny"]])
print(float(torch.compile(lambda x: (x * 3.25).sin() + x)(torch.full((100,), 2.0)).sum()))
"""


@pytest.mark.slow
def test_a_torn_library_of_torchs_own_cache_is_made_again(tmp_path, monkeypatch):
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def run(*words):
        return forked.run(["-c", TORN, *words], env=env)

    first = run()
    assert first.returncode == 0, first.stderr
    assert run("0", "and not mended").returncode, "torch heals it by itself: warmup.drop_torn_objects can go"
    assert run("0").stdout == first.stdout
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (library,) = tmp_path.rglob("*.main.so")
    warmup.drop_torn_objects()
    os.truncate(library, library.stat().st_size - 1)
    # another process is just writing it
    with FileLock(tmp_path / "locks" / f"{library.name.partition('.')[0]}.lock"):
        warmup.drop_torn_objects()
        assert library.exists()
    warmup.drop_torn_objects()
    assert not library.exists()


def test_a_cache_that_is_a_file_is_one_error(tmp_path):
    (tmp_path / "file").touch()
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "file"), "PYTHONPATH": str(ROOT)}
    for words in (
        ["-m", "tmoe.warmup", "tiny", "--arch", "cuda:90"],
        [ROOT / "train.py", "--out", tmp_path / "run"],
    ):
        ended = forked.run(words, env=env)
        assert ended.returncode == 2 and "Traceback" not in ended.stderr
        assert f"error: TRITON_CACHE_DIR={tmp_path}/file: must be a folder" in ended.stderr


def test_architectures_are_those_that_the_assembler_knows():
    known = [a for a in range(60, 130) if ARCH.fullmatch(f"cuda:{a}")]
    # of the ptxas that triton 3.6 brings
    assert known == [
        70,
        72,
        75,
        80,
        86,
        87,
        89,
        90,
        100,
        101,
        103,
        120,
        121,
    ]


if __name__ == "__main__":
    main()
