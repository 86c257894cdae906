"""Finds the expert parameters of any module, and makes optimizer groups of experts and of other parameters.

next: parallel/grad_norm.py
"""

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def tag_experts(module: nn.Module, patterns: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: first all other parameters, then the experts, with `moe: True`.

        optimizer = torch.optim.AdamW(tmoe.parallel.tag_experts(model), lr=1e-4)

    A parameter is an expert if one of these holds for it, or for another name of the same parameter:

    - it is a DTensor that is split over the axis "ep" of its mesh, as after `parallelize` or `swap_experts`;
    - it has the attribute `allreduce` set to False, as DeepSpeed and Megatron mark experts;
    - `re.search` finds one of the `patterns` in its name: r"(^|\\.)experts\\." fits most models.

    A group is {"params": tensors, "param_names": their names in `module`}, in the order of
    `named_parameters`. The group of experts has the additional key "moe": True; the other group has no such
    key. Each parameter occurs once, in one group, under its first name. Frozen parameters are in no group,
    and a group without parameters is left out.

    Raises ValueError if no parameter, frozen parameters included, is an expert, and if a pattern matches no
    name or is not a regular expression.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    wanted = [_compiled(pattern, names) for pattern in _several(patterns)]
    experts = {
        p
        for p, aliases in names.items()
        if _split_over_ep(p) or _marked(p) or any(w.search(name) for w in wanted for name in aliases)
    }
    if not experts:
        raise ValueError(
            f"tag_experts: none of the {len(names)} parameters of this {type(module).__name__} is an expert: "
            'looked for DTensors split over a mesh axis "ep" '
            "(after parallelize or swap_experts with a mesh), "
            f"for the attribute allreduce=False, and for names by patterns={tuple(patterns)}; "
            r'give patterns=(r"(^|\.)experts\.",), or whatever the names of your experts have in common'
        )

    def group(members: list[nn.Parameter], **tags: Any) -> dict[str, Any]:
        return {"params": members, "param_names": [names[p][0] for p in members], **tags}

    trained = [p for p in names if p.requires_grad]
    groups = [
        group([p for p in trained if p not in experts]),
        group([p for p in trained if p in experts], moe=True),
    ]
    return [entry for entry in groups if entry["params"]]


def _split_over_ep(p: Tensor) -> bool:
    if not isinstance(p, DTensor):
        return False
    axes = p.device_mesh.mesh_dim_names or ()
    return any(
        axis == "ep" and not placed.is_replicate() for axis, placed in zip(axes, p.placements, strict=False)
    )


def _marked(p: Tensor) -> bool:
    return not getattr(p, "allreduce", True)


def _several(patterns: Sequence[str]) -> Sequence[str]:
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(
            f'tag_experts: patterns={patterns!r}: must be several strings, as ("experts", "moe")'
        )
    return patterns


def _compiled(pattern: str, names: dict[nn.Parameter, list[str]]) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"tag_experts: patterns: {pattern!r} is no regular expression ({error}); "
            "valid: one of Python's re"
        ) from None
    every = [name for aliases in names.values() for name in aliases]
    if not any(compiled.search(name) for name in every):
        raise ValueError(
            f"tag_experts: patterns: {pattern!r} fits no parameter's name; "
            f"names here: {', '.join(every[:3])}{', ...' if len(every) > 3 else ''}"
        )
    return compiled
