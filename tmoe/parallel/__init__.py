"""Meshes, sharding, collectives and the gradient norm: what a training loop needs to run on many ranks."""

from typing import TYPE_CHECKING

from tmoe.base.lazy import lazy

if TYPE_CHECKING:
    from tmoe.model.parallelize import parallelize
    from tmoe.model.stages import pipeline
    from tmoe.parallel.collectives import all_gather_v, all_to_all_v
    from tmoe.parallel.expert_parameters import tag_experts
    from tmoe.parallel.grad_norm import clip_grad_norm_
    from tmoe.parallel.mesh import Mesh, build_mesh

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

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Mesh": "tmoe.parallel.mesh",
        "all_gather_v": "tmoe.parallel.collectives",
        "all_to_all_v": "tmoe.parallel.collectives",
        "build_mesh": "tmoe.parallel.mesh",
        "clip_grad_norm_": "tmoe.parallel.grad_norm",
        "parallelize": "tmoe.model.parallelize",
        "pipeline": "tmoe.model.stages",
        "tag_experts": "tmoe.parallel.expert_parameters",
    },
)
