"""Meshes, sharding, collectives and the gradient norm: what a training loop needs to run on many ranks."""

from tmoe.parallel.grad_norm import clip_grad_norm_
from tmoe.parallel.mesh import Mesh, build_mesh

__all__ = ["Mesh", "build_mesh", "clip_grad_norm_", "parallelize"]


def __getattr__(name: str) -> object:
    # Looked up late: it lives in tmoe/model, which stands above this package.
    if name == "parallelize":
        from tmoe.model.parallelize import parallelize

        return parallelize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
