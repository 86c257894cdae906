"""Meshes, sharding, collectives and the gradient norm: what a training loop needs to run on many ranks."""

from tmoe.parallel.grad_norm import clip_grad_norm_
from tmoe.parallel.mesh import Mesh, build_mesh
from tmoe.parallel.tags import tag_experts

__all__ = ["Mesh", "build_mesh", "clip_grad_norm_", "parallelize", "tag_experts"]


def __getattr__(name: str):
    # late, because apply.py stands above the model, and the model's dispatch.py lives in this package
    if name == "parallelize":
        from tmoe.model.parallelize import parallelize

        return parallelize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
