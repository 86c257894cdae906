"""The meshes of folded axes: which ranks a rank meets on each."""

import torch.distributed as dist

from tmoe.config.axes import Axes
from tmoe.parallel.mesh import build_mesh


def met(rank: int, world: int, axes: dict[str, int]) -> dict[str, list[int]]:
    """Ranks of this rank's group on each axis."""
    mesh = build_mesh(**axes)
    groups = {name: dist.get_process_group_ranks(group) for name, group in mesh.groups.items()}
    meshes = dict(dp=mesh.dp, ep=mesh.ep, world=mesh.world)
    assert mesh.place == mesh.axes.place(rank)
    shapes = dict(shard=list(mesh.shard.shape), sharers=list(mesh.sharers.shape))
    return (
        groups
        | {name: dist.get_process_group_ranks(one.get_group()) for name, one in meshes.items()}
        | shapes
    )


def test_folded_axes_of_eight_ranks(gloo):
    found = gloo(8, met, dict(pp=2, ep=4, cp=2, tp=2))
    assert found[0]["tp"] == [0, 1] and found[0]["cp"] == [0, 2] and found[0]["parts"] == [0, 1, 2, 3]
    assert found[0]["ep"] == [0, 1, 2, 3] == found[0]["world"] and found[0]["dp"] == [0]
    assert found[0]["pp"] == [0, 4] and found[5]["pp"] == [1, 5]
    assert found[7]["tp"] == [6, 7] and found[7]["cp"] == [5, 7] and found[7]["world"] == [4, 5, 6, 7]


def test_replicas_and_expert_slices(gloo):
    found = gloo(8, met, dict(replicate=2, etp=2, ep=2))
    assert found[0]["etp"] == [0, 2] == found[0]["dp"], "storage does not know etp: its ranks share experts"
    assert found[0]["ep"] == [0, 1] and found[6]["etp"] == [4, 6]
    assert found[0]["world"] == list(range(8))
    assert found[0]["shard"] == [2, 4] and found[0]["sharers"] == [2, 2]


def test_ranks_of_a_group_agree_with_their_places(gloo):
    axes = dict(replicate=2, dp=2, ep=2, tp=2)
    places = [Axes(**axes).place(rank) for rank in range(8)]
    for rank, found in enumerate(gloo(8, met, axes)):
        here = places[rank]
        assert found["tp"] == [r for r, p in enumerate(places) if p.reader == here.reader]
        same = [r for r, p in enumerate(places) if (p.replicate, p.dp) == (here.replicate, here.dp)]
        assert found["ep"] == same
