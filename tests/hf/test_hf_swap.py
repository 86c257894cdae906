"""tmoe's experts in transformers' models: the same function, trained alike, spread over ranks.

next: tmoe/hf/swap.py
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from hf_tiny import MODELS, SIZES, SPARSE, assert_bits, far, make, tensors_of
from tiers import slow_but
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, MixtralConfig

from tmoe.config.check import ConfigError
from tmoe.hf import swap_experts
from tmoe.hf.swap import SwappedExperts
from tmoe.parallel import build_mesh, clip_grad_norm_, parallelize


def swapped(model) -> list[SwappedExperts]:
    return [m for m in model.modules() if isinstance(m, SwappedExperts)]


def has_auxiliary_loss(model) -> bool:
    """Whether the class has one: DeepSeek's classes have none.

    Granite's records no router in transformers 5.17, where its loss fails, swapped or not.
    """
    kind = model.config.model_type
    recorded = "router_logits" in type(model)._can_record_outputs
    assert recorded or kind == "granitemoe" or kind.startswith("deepseek")
    return recorded and not kind.startswith("deepseek")


def losses_and_gradients(model, x, mask=None):
    router = dict(output_router_logits=True) if has_auxiliary_loss(model) else {}
    out = model(x, labels=x, attention_mask=mask, **router)
    out.loss.backward()
    return out, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", SPARSE)
def test_swapped_model_is_the_same_function(tmp_path, name):
    theirs = make(name)
    ours = swap_experts(copy.deepcopy(theirs))
    assert len(swapped(ours)) == sum(key.endswith("experts.down_proj") for key in theirs.state_dict()) > 0
    x = torch.randint(31, (3, 20))
    mask = torch.ones_like(x)
    mask[1, 13:] = 0
    (a, want), (b, got) = losses_and_gradients(theirs, x, mask), losses_and_gradients(ours, x, mask)
    assert far(b.logits, a.logits) < 1e-5
    assert b.loss.item() == pytest.approx(a.loss.item(), rel=1e-5)
    if has_auxiliary_loss(theirs):
        assert b.aux_loss.item() == pytest.approx(a.aux_loss.item(), rel=1e-5) and a.aux_loss > 0
        for one, other in zip(b.router_logits, a.router_logits, strict=True):
            assert far(one, other) < 1e-5
    assert got.keys() == want.keys()
    assert max(far(got[key], want[key]) for key in want if want[key] is not None) < 1e-5
    assert_bits(ours.state_dict(), theirs.state_dict())
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    assert_bits(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs"))
    fresh = swap_experts(AutoModelForCausalLM.from_config(MODELS[name]()))
    fresh.load_state_dict(theirs.state_dict())
    assert torch.equal(fresh.eval()(x).logits, ours(x).logits)


def test_swap_keeps_parameters_that_an_optimizer_holds():
    model = make("mixtral")
    before = dict(model.named_parameters())
    swap_experts(model)
    assert all(before[name] is p for name, p in model.named_parameters())


@pytest.mark.parametrize("name", ["mixtral", "olmoe"])
def test_plain_loop_trains_it_alike(name):
    def losses(model):
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3, eps=1e-4)
        found = []
        draw = torch.Generator().manual_seed(3)
        for _ in range(4):
            x = torch.randint(8, (4, 16), generator=draw)
            loss = model(x, labels=x, output_router_logits=True).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    want = losses(make(name).train())
    assert losses(swap_experts(make(name)).train()) == pytest.approx(want, rel=1e-5) and want[-1] < want[0]


def test_trainer_trains_it_alike(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    draw = torch.Generator().manual_seed(3)
    data = [dict(input_ids=x, labels=x) for x in torch.randint(8, (16, 16), generator=draw)]

    def losses(model, out):
        args = TrainingArguments(
            out,
            max_steps=4,
            per_device_train_batch_size=4,
            learning_rate=3e-3,
            use_cpu=True,
            logging_steps=1,
            report_to=[],
            save_steps=4,
            adam_epsilon=1e-4,
            disable_tqdm=True,
        )
        trainer = Trainer(model, args, train_dataset=data)
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    want = losses(make("qwen3_moe"), tmp_path / "theirs")
    ours = swap_experts(make("qwen3_moe"))
    assert (
        losses(ours, tmp_path / "ours") == pytest.approx(want, rel=1e-5)
        and len(want) == 4
        and want[-1] < want[0]
    )
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / "checkpoint-4")
    assert_bits(again.state_dict(), ours.state_dict())


def test_swapped_under_autocast():
    """The op runs in bf16 as F.linear would: near to the loop over experts, and of exactly its types."""
    theirs = make("qwen3_moe")
    ours = swap_experts(copy.deepcopy(theirs))
    x = torch.randint(31, (2, 20))
    with torch.autocast("cpu", torch.bfloat16):
        a = theirs(x).logits
        b = ours(x).logits
    assert a.dtype == b.dtype and far(b, a) < 0.05
    exact = theirs(x).logits
    assert far(b, exact) < 1.5 * far(a, exact) + 1e-3


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # a buffer of the router's


def spread(rank: int, world: int, ep: int, names: list[str]):
    """How far spread experts are from one whole model.

    In logits, in gradients and in the mean loss over all ranks' tokens.
    """
    mesh = build_mesh(ep=ep)
    found = {}
    x = torch.randint(31, (2 * world, 20), generator=torch.Generator().manual_seed(5))
    mine = slice(2 * rank, 2 * rank + 2)
    for name in names:
        theirs = make(name)
        ours = parallelize(swap_experts(copy.deepcopy(theirs), mesh), mesh)
        logits = ours(x[mine]).logits
        (F.cross_entropy(logits.flatten(0, 1), x[mine].flatten()) / world).backward()
        out = theirs(x).logits
        F.cross_entropy(out.flatten(0, 1), x.flatten()).backward()
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        found[name] = dict(
            state={key: whole(tensor) for key, tensor in ours.state_dict().items()},
            held=swapped(ours)[-1].gate_up_proj.to_local().numel(),
            logits=far(logits, out[mine]),
            gradients=max(far(p.grad.full_tensor(), q.grad) for p, q in pairs),
        )
    return found


@pytest.mark.parametrize(("world", "ep"), slow_but([(2, 2)], [(2, 2), (4, 2)]))
def test_swapped_and_spread(gloo, world, ep):
    ranks = gloo(world, spread, ep, SPARSE)
    for rank in ranks:
        for name, found in rank.items():
            assert found["logits"] < 1e-5 and found["gradients"] < 1e-5, name
            want = make(name).state_dict()
            assert_bits(found["state"], want)
            one = next(t for key, t in want.items() if key.endswith("gate_up_proj"))
            assert sum(other[name]["held"] for other in ranks) == one.numel()


def recomputing(rank: int, world: int) -> list[float]:
    norms = []
    for recompute in (False, True):
        model = make("qwen3_moe")
        mesh = build_mesh(ep=world)
        parallelize(swap_experts(model, mesh), mesh)
        if recompute:
            model.gradient_checkpointing_enable()
        x = torch.arange(24).view(2, 12) % 31
        (model.train()(x, labels=x).loss / world).backward()
        norms.append(clip_grad_norm_(model.parameters(), 1.0).item())
    return norms


@pytest.mark.parametrize("world", [1, 2])
def test_their_gradient_checkpointing_works_in_a_spread_model(gloo, world):
    for plain, recomputed in gloo(world, recomputing):
        assert recomputed == pytest.approx(plain, rel=1e-6) and plain > 0


def test_swap_refuses_what_it_does_not_compute():
    model = AutoModelForCausalLM.from_config(MODELS["llama"]())
    with pytest.raises(ConfigError, match="no module of this llama is marked as experts by transformers"):
        swap_experts(model)
    model = AutoModelForCausalLM.from_config(MixtralConfig(**SIZES, num_local_experts=4, hidden_act="gelu"))
    with pytest.raises(ConfigError, match="hidden_act='gelu'"):
        swap_experts(model)
    model = swap_experts(make("mixtral"))
    before = dict(model.named_parameters())
    with pytest.raises(
        ConfigError, match="2 blocks of this mixtral have tmoe's experts already; swap a model once"
    ):
        swap_experts(model)
    assert all(before[name] is p for name, p in model.named_parameters())


def out_of_order(rank: int, world: int) -> list[str]:
    mesh = build_mesh(ep=world)
    whole_mesh = build_mesh(ep=1)
    said = []
    wrong = [
        lambda model: swap_experts(parallelize(model, whole_mesh), mesh),
        lambda model: swap_experts(fully_shard(model)),
        lambda model: swap_experts(model, world),
        lambda model: parallelize(swap_experts(model), mesh),
        lambda model: parallelize(swap_experts(model, whole_mesh), mesh),
        lambda model: parallelize(swap_experts(model, mesh), whole_mesh),
    ]
    for way in wrong:
        with pytest.raises(ValueError) as error:
            way(make("mixtral"))
        said.append(str(error.value))
    return said


def test_another_order_or_mesh_is_refused(gloo):
    """Two mistakes that would be wrong in silence.

    Sharded experts computed as if they were whole, or never summed over the ranks that share them.
    """
    for said in gloo(2, out_of_order):
        assert all(
            "mlp.experts is sharded already; swap before parallelize or fully_shard" in s for s in said[:2]
        )
        assert "swap_experts: mesh=2; must be a Mesh" in said[2]
        assert (
            "mlp.experts: got whole, valid is spread by swap_experts(model, mesh) with the same mesh, ep=2"
            in said[3]
        )
        assert (
            "got spread over ep=1, valid is spread by swap_experts(model, mesh) with the same mesh, ep=2"
            in said[4]
        )
        assert (
            "got spread over ep=2, valid is spread by swap_experts(model, mesh) with the same mesh, ep=1"
            in said[5]
        )
