"""tag_experts finds the experts of any module, each parameter once, and makes groups that optimizers take."""

import copy
import re

import pytest
import torch
from hf_tiny import MODELS
from tiers import slow_but
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

import tmoe
from tmoe.hf import swap_experts
from tmoe.model.transformer import Transformer
from tmoe.optim.adamw import AdamW
from tmoe.parallel import build_mesh, parallelize, tag_experts

EXPERTS = r"(^|\.)experts\."


class Tutel(nn.Module):
    """Somebody's own: experts that an optimizer of their own reduces, marked as DeepSpeed and Megatron do."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.ffn = nn.Linear(4, 4)
        self.w1, self.w2 = (nn.Parameter(torch.ones(2, 4, 4)) for _ in range(2))
        for p in (self.w1, self.w2):
            p.allreduce = False
        self.gate.weight.allreduce = True


def named(groups: list[dict]) -> dict[str, list[str]]:
    return {"experts" if group.get("moe") else "rest": group["param_names"] for group in groups}


def whole_and_once(module: nn.Module, groups: list[dict]) -> None:
    """Every parameter that trains is in one group once, under its name."""
    own = dict(module.named_parameters())
    found = [
        (name, p) for group in groups for name, p in zip(group["param_names"], group["params"], strict=True)
    ]
    assert sorted(name for name, _ in found) == sorted(name for name, p in own.items() if p.requires_grad)
    assert all(p is own[name] for name, p in found)


def test_marked_parameters():
    module = Tutel()
    groups = tag_experts(module)
    assert named(groups) == {
        "rest": ["gate.weight", "gate.bias", "ffn.weight", "ffn.bias"],
        "experts": ["w1", "w2"],
    }
    assert [group.get("moe") for group in groups] == [None, True] and "moe" not in groups[0]
    whole_and_once(module, groups)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, AdamW])
def test_optimizers_take_the_groups(kind):
    """They step like one group of all parameters, and keep tags and names in what they save."""
    one, other = Tutel(), Tutel()
    other.load_state_dict(one.state_dict())
    optimizers = kind(tag_experts(one), lr=0.1), kind(other.parameters(), lr=0.1)
    for module, optimizer in zip((one, other), optimizers, strict=True):
        sum(p.square().sum() for p in module.parameters()).backward()
        optimizer.step()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    saved = optimizers[0].state_dict()["param_groups"]
    assert saved[1]["moe"] is True and saved[1]["param_names"] == ["w1", "w2"] and "moe" not in saved[0]
    again = kind(tag_experts(one), lr=0.5)
    again.load_state_dict(optimizers[0].state_dict())
    assert again.param_groups[1]["lr"] == 0.1


def test_patterns():
    model = Transformer(tmoe.presets()["tiny"].model)
    groups = tag_experts(model, patterns=(EXPERTS,))
    own = named(groups)
    assert own["experts"] == [n for n, _ in model.named_parameters() if ".experts." in n]
    assert len(own["experts"]) == 2 * len(model.blocks)
    whole_and_once(model, groups)
    # by several patterns, which overlap each other and a mark
    module = Tutel()
    groups = tag_experts(module, patterns=["^w", "w1", r"ffn\.(weight|bias)"])
    assert named(groups)["experts"] == ["w1", "w2", "ffn.weight", "ffn.bias"]  # a module's own come first
    whole_and_once(module, groups)


def test_frozen_parameters_are_left_out():
    module = Tutel()
    module.w1.requires_grad_(False)
    module.ffn.requires_grad_(False)
    groups = tag_experts(module)
    assert named(groups) == {"rest": ["gate.weight", "gate.bias"], "experts": ["w2"]}
    module.w2.requires_grad_(False)  # as with adapters: there are experts, and none trains
    assert named(tag_experts(module)) == {"rest": ["gate.weight", "gate.bias"]}
    module.gate.requires_grad_(False)
    module.w2.requires_grad_(True)
    assert named(tag_experts(module)) == {"experts": ["w2"]}


def test_shared_parameters():
    """Under two names, of which one says expert: one, under the first name."""
    module = Tutel()
    module.experts = nn.ModuleList([nn.Linear(4, 4)])
    module.experts[0].weight = module.ffn.weight
    groups = tag_experts(module, patterns=(EXPERTS,))
    own = named(groups)
    assert set(own["experts"]) == {"ffn.weight", "w1", "w2", "experts.0.bias"}
    whole_and_once(module, groups)


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        ((), 'DTensors split over a mesh axis "ep" (after parallelize or swap_experts with a mesh), for the'),
        ((), "attribute allreduce=False, and for names by patterns=(); give patterns="),
        ((), "none of the 4 parameters of this Sequential"),
        (("expert",), "'expert' fits no parameter's name; names here: 0.weight, 0.bias, 1.weight, ..."),
        (("0", "expert"), "'expert' fits no parameter's name"),
        (("(",), "'(' is no regular expression"),
        ("0", "patterns='0': must be several strings"),
        ((3,), "patterns=(3,): must be several strings"),
    ],
)
def test_none_found(patterns, says):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=re.escape(says)):
        tag_experts(module, patterns)


def spread(rank: int, world: int, ep: int, kind: str) -> tuple:
    """Names by group of a model on a (dp, ep) mesh, and of the same in one process by name."""
    mesh = build_mesh(ep=ep)
    torch.manual_seed(0)
    if kind == "tmoe":
        model = Transformer(tmoe.presets()["tiny"].model)
    elif kind == "own":
        model = nn.Sequential(nn.Linear(4, 8), tmoe.MoE(8, tmoe.MoEConfig(experts=4, top_k=2, ffn_dim=8)))
    else:
        model = AutoModelForCausalLM.from_config(MODELS[kind]())
        swap_experts(model, mesh)
    by_name = named(tag_experts(copy.deepcopy(model), patterns=(EXPERTS,)))
    before = None
    if kind == "tmoe":
        try:
            tag_experts(model)
        except ValueError as error:
            before = str(error)
    parallelize(model, mesh)
    groups = tag_experts(model)
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    whole_and_once(model, groups)
    return named(groups), by_name, before, len(optimizer.param_groups)


@pytest.mark.parametrize(("world", "ep"), slow_but([(1, 1), (2, 2)], [(1, 1), (2, 1), (2, 2), (4, 2)]))
@pytest.mark.parametrize("kind", ["tmoe", "own", "mixtral", "qwen2_moe"])
def test_by_placement(gloo, world, ep, kind):
    for found, want, before, count in gloo(world, spread, ep, kind):
        assert found == want and found["experts"] and count == 2
        assert kind != "tmoe" or "looked for DTensors" in before


def placed(rank: int, world: int) -> dict[str, list[str]]:
    """Copies on every rank of the expert group are no experts, nor is what is split over another axis."""
    mesh = build_mesh(ep=2)
    module = nn.Module()
    for name, on, placements in (
        ("split", mesh.ep, [Shard(0)]),
        ("copied", mesh.ep, [Replicate()]),
        ("both", mesh.grid, [Replicate(), Shard(1)]),
        ("elsewhere", mesh.grid, [Shard(0), Replicate()]),
        ("dense", mesh.world, [Shard(0)]),
    ):
        module.register_parameter(name, nn.Parameter(distribute_tensor(torch.ones(4, 4), on, placements)))
    return named(tag_experts(module))


def test_placements(gloo):
    for found in gloo(2, placed):
        assert found == {"rest": ["copied", "elsewhere", "dense"], "experts": ["split", "both"]}
