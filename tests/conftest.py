"""Common to all tests: the `gloo` fixture, the markers `gpu` and `slow`, seeds, a time limit.

next: tests/lib/gloo.py
"""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import early  # first: see its file
import gloo as gloo_module
import numpy as np
import orphans
import pytest
import torch
import torch.distributed as dist

from tmoe.checkpoint import dcp as shards

LIB = Path(__file__).parent / "lib"
HEARD = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU  # by a run
CONTEXT_GIB = 0.6  # GiB of a GPU's memory that CUDA's context uses in each process
TEST_TIMEOUT_S = 900  # large, so that no test fails because another program uses the same cores


# A process group that is garbage has threads, which a forked child does not have. A child that collects the
# group hangs, or ends by SIGABRT.
os.register_at_fork(after_in_child=gc.freeze)


def pytest_configure(config: pytest.Config) -> None:
    gloo_module.read_errors_as_a_command_prints_them()
    orphans.end_with_pytest()
    # so that a test that starts its own file as a program can import the helpers
    known = [str(LIB), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(known)
    if (gpus := os.environ.get("TMOE_TESTS_GPUS")) and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
        listed = gpus.split(",")  # set by run_gpu.py: each worker uses one of the shared GPUs
        os.environ["CUDA_VISIBLE_DEVICES"] = listed[int(worker.removeprefix("gw")) % len(listed)]


def pytest_unconfigure() -> None:
    orphans.end_descendants()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    found = yield
    early.settle()
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    limited = config.pluginmanager.hasplugin("timeout")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(
                pytest.mark.skip(reason="needs a CUDA device, torch.cuda.is_available() is False")
            )
        if limited and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Hides the GPU from tests that are not marked `gpu`, so that they do the same on every machine.

    The GPU is hidden from the test, its fixtures, and the processes that they start.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not item.get_closest_marker("gpu"):
            patch.setattr(torch.cuda, "is_available", lambda: False)
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _gloo_server(request: pytest.FixtureRequest) -> None:
    """Starts the server early, so that its imports run during the first tests.

    It must start while pytest captures output.
    """
    if any("gloo" in item.fixturenames for item in request.session.items):
        gloo_module.start_server()


@pytest.fixture(scope="module", autouse=True)
def _open_ends() -> Iterator[None]:
    """Ends the process group that a file's tests left open, and restores the handlers of signals.

    The next file on this worker expects no group, and SIGTERM must end what its tests start (orphans.py).
    """
    handlers = {number: signal.getsignal(number) for number in HEARD}
    yield
    for number, handler in handlers.items():
        if handler is not None:  # None: not set by Python
            signal.signal(number, handler)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _share_of_a_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Limits the GPU memory of one test of run_gpu.py, where workers share GPUs, without the CUDA context.

    The memory is released after the test.
    """
    gib = os.environ.get("TMOE_TESTS_GIB")
    shares = bool(gib) and request.node.get_closest_marker("gpu") is not None
    if gib and shares:
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, (float(gib) - CONTEXT_GIB) / total))
    yield
    if shares:
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def gloo():
    """`gloo(world, fn, *args, timeout=600)` runs fn(rank, world, *args) on `world` gloo processes."""
    return gloo_module.run


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(gloo_module.SEED)
    np.random.seed(gloo_module.SEED)
    torch.manual_seed(gloo_module.SEED)


@pytest.fixture(autouse=True)
def _shard_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the real size for the next test: fault cases make shards small in this process.

    See benchmarks/inject.py.
    """
    monkeypatch.setattr(shards, "SMALL", shards.SMALL)
