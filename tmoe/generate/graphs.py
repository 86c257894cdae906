"""Steps as CUDA graphs, one for each number of slots: one launch a step in place of hundreds.

A graph holds the addresses of weights and pages, which differ between calls. So each call captures its own
graphs. For each number of slots the first step runs without a graph and compiles its kernels; the second step
is captured.

next: generate/slots.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch

SIZES = (1, 4, 16, 64, 128, 256, 512)  # slots of a graph; a step runs in the smallest with enough slots


def rounded(slots: int) -> int:
    """The slots of the graph that runs a step of `slots` slots; `slots` itself above the largest size."""
    return next((size for size in SIZES if size >= slots), slots)


@functools.cache
def capturing(device: torch.device) -> torch.cuda.Stream:
    """A device's stream for captures. torch's own capture stream is on the first device that captured."""
    return torch.cuda.Stream(device)


class CudaGraphs:
    """Functions without arguments, captured as graphs by key. Their next run overwrites their results.

    They run one after the other, so their intermediate tensors share memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = capturing(device)
        self.memory = torch.cuda.graph_pool_handle()
        self.known: set[Hashable] = set()
        self.captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}

    def run(self, key: Hashable, step: Callable[[], Any]) -> Any:
        """The function's result. A key must always have the same function, of tensors at fixed addresses."""
        if key not in self.known:
            self.known.add(key)
            return step()
        if key not in self.captured:
            graph = torch.cuda.CUDAGraph()
            # other threads may use the GPU during the capture: NCCL's, and one that saves a checkpoint
            how = dict(pool=self.memory, stream=self.stream, capture_error_mode="thread_local")
            with torch.cuda.graph(graph, **how):
                result = step()
            self.captured[key] = graph, result
        graph, result = self.captured[key]
        graph.replay()
        return result
