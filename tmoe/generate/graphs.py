"""Steps as CUDA graphs, one for each number of slots: a launch a step, where the host would launch hundreds.

A graph holds the addresses of weights and pages, which are those of one call. So a call captures its own, at
a number's second step; the first one runs plainly and compiles what it needs.

next: generate/slots.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch

SIZES = (1, 4, 16, 64, 128, 256, 512)  # slots of a graph; a step runs in the smallest that has room


def rounded(slots: int) -> int:
    """The slots that a step of so many has; more than the largest size have graphs of their own."""
    return next((size for size in SIZES if size >= slots), slots)


@functools.cache
def capturing(device: torch.device) -> torch.cuda.Stream:
    """A device's stream to capture on: torch has one for all, of the device that captured first."""
    return torch.cuda.Stream(device)


class Graphs:
    """Functions without arguments, captured by a key. What they return is overwritten by their next run.

    They run one after the other, so what lies between their operations shares memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = capturing(device)
        self.memory = torch.cuda.graph_pool_handle()
        self.known: set[Hashable] = set()
        self.captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}

    def run(self, key: Hashable, step: Callable[[], Any]) -> Any:
        """The function's result. It must be the same function each time, of tensors that stay in place."""
        if key not in self.known:
            self.known.add(key)
            return step()
        if key not in self.captured:
            graph = torch.cuda.CUDAGraph()
            # other threads may use the GPU meanwhile: NCCL's, and one that saves a checkpoint
            how = dict(pool=self.memory, stream=self.stream, capture_error_mode="thread_local")
            with torch.cuda.graph(graph, **how):
                result = step()
            self.captured[key] = graph, result
        graph, result = self.captured[key]
        graph.replay()
        return result
