"""Meshes, sharding, collectives and the gradient norm: what a training loop needs to run on many ranks."""

from tmoe.parallel.by_counts import all_gather_v, all_to_all_v
from tmoe.parallel.grad_norm import clip_grad_norm_
from tmoe.parallel.mesh import Mesh, build_mesh
from tmoe.parallel.tags import tag_experts

__all__ = [
    "Mesh",
    "all_gather_v",
    "all_to_all_v",
    "build_mesh",
    "clip_grad_norm_",
    "parallelize",
    "pipeline",
    "tag_experts",
]


def __getattr__(name: str) -> object:
    # late, because both stand above this package
    if name == "parallelize":
        from tmoe.model.parallelize import parallelize

        return parallelize
    if name == "pipeline":
        from tmoe.model.stages import pipeline

        return pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
