"""Which experts swap_experts takes and which it refuses, by what the modules say of themselves.

A refused model stays as it was.

next: tmoe/hf/swap.py
"""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from hf_tiny import LOCAL_MOE, MODELS, SIZES, assert_bits, far, make
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig

from tmoe.config.check import ConfigError
from tmoe.hf import swap_experts
from tmoe.hf.swap import SwappedExperts

TOKENS = torch.arange(20).view(2, 10) * 7 % 31


def refused(model, match: str) -> None:
    """swap_experts raises, and no module, parameter or hook is another than before."""
    before = dict(model.named_modules()), dict(model.named_parameters())
    inside = {name: dict(vars(module)) for name, module in before[0].items()}
    with pytest.raises(ConfigError, match=match) as error:
        swap_experts(model)
    assert len(str(error.value).splitlines()) == 1
    after = dict(model.named_modules()), dict(model.named_parameters())
    for was, now in zip(before, after, strict=True):
        assert was.keys() == now.keys() and all(was[name] is now[name] for name in was)
    for name, module in after[0].items():
        assert vars(module).keys() == inside[name].keys()
        assert all(value is inside[name][key] for key, value in vars(module).items())


# ---- started anew ----


def begin_anew(model) -> None:
    for parameter in model.parameters():
        parameter.__dict__.pop("_is_hf_initialized", None)
    for module in model.modules():
        module._is_hf_initialized = False
    model.initialize_weights()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "granitemoe", "gpt_oss", "deepseek_v3"])
def test_initialize_weights_draws_swapped_experts_as_it_draws_theirs(name):
    theirs = make(name)
    ours = swap_experts(make(name))
    for model in (theirs, ours):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        torch.manual_seed(3)
        begin_anew(model)
    assert_bits(ours.state_dict(), theirs.state_dict())
    assert not any(p.isnan().any() for p in ours.parameters())


def test_initialize_weights_leaves_loaded_experts_alone():
    """A model that is drawn or loaded already: transformers goes by a mark on the module."""
    theirs = AutoModelForCausalLM.from_config(MODELS["qwen3_moe"]())
    ours = swap_experts(copy.deepcopy(theirs))
    ours.initialize_weights()
    assert_bits(ours.state_dict(), theirs.state_dict())


def test_swapped_models_are_copied_and_pickled():
    model = swap_experts(make("qwen3_moe"))
    want = model(TOKENS).logits
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(TOKENS).logits, want)
        assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]


# ---- the activation, and the gate ----


def tiny_mixtral(act: str):
    return AutoModelForCausalLM.from_config(
        MixtralConfig(**SIZES, num_local_experts=4, hidden_act=act)
    ).eval()


@pytest.mark.parametrize("act", ["silu", "swish", "gelu_pytorch_tanh"])
def test_activations_by_every_name(act):
    theirs = tiny_mixtral(act)
    ours = swap_experts(copy.deepcopy(theirs))
    assert far(ours(TOKENS).logits, theirs(TOKENS).logits) < 1e-5


def test_an_activation_that_the_experts_do_not_read():
    """gpt-oss's experts have a gate of their own, and never see hidden_act of the configuration."""
    theirs = AutoModelForCausalLM.from_config(
        GptOssConfig(**SIZES, **LOCAL_MOE, head_dim=4, hidden_act="gelu")
    ).eval()
    ours = swap_experts(copy.deepcopy(theirs))
    assert far(ours(TOKENS).logits, theirs(TOKENS).logits) < 1e-5


@pytest.mark.parametrize("act", ["gelu", "relu", "mish"])
def test_another_activation_is_refused(act):
    refused(
        tiny_mixtral(act),
        rf"model\.layers\.0\.mlp\.experts computes \w+ \(hidden_act='{act}'\); the fused op",
    )


def test_the_experts_activation_counts_not_the_configurations():
    model = tiny_mixtral("silu")
    model.model.layers[1].mlp.experts.act_fn = nn.GELU()
    refused(model, r"model\.layers\.1\.mlp\.experts computes GELU")


def of_class(module: nn.Module, **marks) -> None:
    """Give one module a class of its own with these attributes."""
    module.__class__ = type(f"Other{type(module).__name__}", (type(module),), marks)


def own_gate(self, gate_up):
    gate, up = gate_up.chunk(2, -1)
    return nn.functional.silu(gate.clamp(max=1.0)) * up


@pytest.mark.parametrize(
    ("name", "mark", "says"),
    [
        ("qwen3_moe", dict(_apply_gate=own_gate), "computes its own gate, own_gate"),
        (
            "qwen3_moe",
            dict(has_gate=False),
            "is marked has_gate=False, .* parameters down_proj, up_proj",
        ),
        ("qwen3_moe", dict(has_post_expert_norm=True), "is marked has_post_expert_norm=True"),
        (
            "qwen3_moe",
            dict(is_transposed=True),
            r"is marked is_transposed=True, and its gate_up_proj \(6, 20, 16\) does not fit down_proj",
        ),
        (
            "gpt_oss",
            dict(is_concatenated=True),
            r"computes its own gate, GptOssExperts\._apply_gate; the fused op computes swiglu",
        ),
    ],
)
def test_marks_of_other_mathematics_are_refused(name, mark, says):
    model = make(name)
    theirs = model.model.layers[1].mlp.experts
    for key in mark:
        vars(theirs).pop(key, None)
    of_class(theirs, **mark)
    refused(model, rf"model\.layers\.1\.mlp\.experts {says}")


def own_gradient(self, gate_up):
    gate, up = gate_up.chunk(2, -1)
    return (nn.functional.silu(gate) * up).detach() + 0 * gate_up.sum()


def by_training(self, gate_up):
    gate, up = gate_up.chunk(2, -1)
    return nn.functional.silu(gate) * up * (1.001 if self.training else 1.0)


def far_away(self, gate_up):
    gate, up = gate_up.chunk(2, -1)
    return nn.functional.silu(gate.clamp(max=1e15)) * up


def failing(self, gate_up):
    raise RuntimeError("not for you")


@pytest.mark.parametrize("gate", [own_gradient, by_training, far_away, failing])
def test_a_gate_that_is_another_somewhere_is_refused(gate):
    """In the gradient alone, in training alone, or on large numbers alone."""
    model = make("qwen3_moe")
    theirs = model.model.layers[0].mlp.experts
    of_class(theirs, _apply_gate=gate)
    says = "its own gate, failing fails on random numbers: RuntimeError"
    if gate is not failing:
        says = f"computes its own gate, {gate.__name__}; the fused op computes swiglu"
    refused(model, rf"model\.layers\.0\.mlp\.experts {says}")


def in_fp32(self, gate_up):
    gate, up = gate_up.chunk(2, -1)
    return (nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


def by_other_names(self, gate_up):
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=self.bound), up.clamp(-self.bound, self.bound)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


@pytest.mark.parametrize(("gate", "activation"), [(in_fp32, "swiglu"), (by_other_names, "clamped:limit=2.5")])
def test_a_gate_is_known_by_what_it_computes(gate, activation):
    """Whatever its class and its constants are called."""
    theirs = make("qwen3_moe").model.layers[0].mlp.experts
    of_class(theirs, _apply_gate=gate)
    theirs.bound = 2.5
    theirs.config._experts_implementation = "batched_mm"  # which calls _apply_gate
    for p in theirs.parameters():
        nn.init.normal_(p, std=2.0)
    model = make("qwen3_moe")
    model.model.layers[0].mlp.experts = copy.deepcopy(theirs)
    ours = swap_experts(model).model.layers[0].mlp.experts
    assert ours.marks.activation == activation
    x, ids, w = torch.randn(20, 16), torch.randint(0, 6, (20, 2)), torch.rand(20, 2)
    assert far(ours(x, ids, w), theirs(x, ids, w)) < 1e-5


@pytest.mark.parametrize(("limit", "activation"), [(10.0, "clamped_silu"), (1.5, "clamped_silu:limit=1.5")])
def test_deepseek_v4s_experts_are_right_on_large_weights(limit, activation):
    """Taken for SwiGLU they would be wrong on large weights only, and by 150 %."""
    v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    sizes = dict(num_local_experts=4, hidden_size=16, hidden_act="silu", swiglu_limit=limit)
    sizes |= dict(intermediate_size=24, moe_intermediate_size=24)
    experts = v4.DeepseekV4Experts(SimpleNamespace(**sizes, _experts_implementation="eager"))
    for p in experts.parameters():
        nn.init.normal_(p, std=3.0)
    model = make("qwen3_moe")
    model.model.layers[0].mlp.experts = copy.deepcopy(experts)
    ours = swap_experts(model).model.layers[0].mlp.experts
    assert ours.marks.activation == activation
    x, ids, w = torch.randn(20, 16), torch.randint(0, 4, (20, 2)), torch.rand(20, 2)
    assert far(ours(x, ids, w), experts(x, ids, w)) < 1e-5


def test_gpt_oss_with_another_limit():
    theirs = make("gpt_oss")
    for layer in theirs.model.layers:
        layer.mlp.experts.limit = 0.5  # transformers 5.23 reads it from the configuration, 5.17 does not
    ours = swap_experts(copy.deepcopy(theirs))
    assert ours.model.layers[0].mlp.experts.marks.activation == "clamped:limit=0.5"
    assert far(ours(TOKENS).logits, theirs(TOKENS).logits) < 1e-5


def test_experts_in_two_places_stay_one():
    model = make("qwen3_moe")
    model.model.layers[1].mlp.experts = model.model.layers[0].mlp.experts
    want = model(TOKENS).logits
    swap_experts(model)
    assert model.model.layers[1].mlp.experts is model.model.layers[0].mlp.experts
    assert isinstance(model.model.layers[1].mlp.experts, SwappedExperts)
    assert far(model(TOKENS).logits, want) < 1e-5


class Unmarked(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj


def test_experts_without_marks_are_refused_by_name():
    model = make("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.experts = Unmarked(layer.mlp.experts)
    refused(model, r"model\.layers\.0\.mlp\.experts holds experts, and Unmarked has none of transformers' m")


# ---- offloaded, or without weights ----


def folder(tmp_path):
    make("qwen3_moe").save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def placed(tmp_path, **elsewhere: str):
    """The model by a device_map: all on the CPU but what is named otherwise."""
    pytest.importorskip("accelerate")
    parts = ("embed_tokens", "layers.0", "norm", "rotary_emb")
    kinds = ("self_attn", "input_layernorm", "post_attention_layernorm", "mlp.gate", "mlp.experts")
    names = [f"model.{part}" for part in parts] + [f"model.layers.1.{kind}" for kind in kinds] + ["lm_head"]
    where = dict.fromkeys(names, "cpu") | {
        name.replace("__", "."): place for name, place in elsewhere.items()
    }
    options = dict(device_map=where, offload_folder=tmp_path / "off", experts_implementation="eager")
    return AutoModelForCausalLM.from_pretrained(folder(tmp_path), **options).eval()


@pytest.mark.parametrize("name", ["model__layers__0", "model__layers__1__mlp__experts"])
def test_experts_on_disk_are_refused(tmp_path, name):
    model = placed(tmp_path, **{name: "disk"})
    want = model(TOKENS).logits
    refused(model, r"model\.layers\.\d\.mlp\.experts has its weights on meta: offloaded by accelerate")
    assert torch.equal(model(TOKENS).logits, want)


@pytest.mark.parametrize("how", ["cpu", "disk"])
def test_what_accelerate_offloads_as_a_whole_is_refused(tmp_path, how):
    accelerate = pytest.importorskip("accelerate")
    model = make("qwen3_moe")
    want = model(TOKENS).logits
    if how == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.disk_offload(model, tmp_path / "off", execution_device="cpu")
    refused(model, r"model\.layers\.0\.mlp\.experts has its weights on meta: offloaded by accelerate")
    assert torch.equal(model(TOKENS).logits, want)


def test_hooks_of_accelerate_that_would_go_are_refused():
    hooks = pytest.importorskip("accelerate.hooks")
    model = make("qwen3_moe")
    hooks.add_hook_to_module(model.model.layers[1].mlp.experts, hooks.CpuOffload(execution_device="cpu"))
    refused(model, r"model\.layers\.1\.mlp\.experts has accelerate's hook CpuOffload, which would be lost")
    model = make("qwen3_moe")
    hook = hooks.SequentialHook(hooks.AlignDevicesHook("cpu"), hooks.ModelHook())
    hooks.add_hook_to_module(model.model.layers[0].mlp.experts, hook)
    refused(model, r"has accelerate's hook AlignDevicesHook, ModelHook, which would be lost")


def test_a_hook_on_a_parent_that_loads_the_experts_is_refused():
    hooks = pytest.importorskip("accelerate.hooks")
    model = make("qwen3_moe")
    hook = hooks.AlignDevicesHook("cpu", offload=True, place_submodules=True)
    hooks.add_hook_to_module(model.model.layers[1].mlp, hook)
    refused(model, r"model\.layers\.1\.mlp\.experts has its weights on meta")
    for name in ("gate_up_proj", "down_proj"):  # as they are while the parent's forward runs
        setattr(model.model.layers[1].mlp.experts, name, nn.Parameter(torch.zeros(6, 4, 4)))
    refused(model, r"experts is offloaded by accelerate's hook on model\.layers\.1\.mlp; load it without")


def test_never_materialised_is_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MODELS["mixtral"]())
    refused(
        model, r"model\.layers\.0\.mlp\.experts has its weights on meta: .* or never loaded; load the model"
    )


def test_a_forward_put_in_place_is_refused():
    model = make("mixtral")
    model.model.layers[1].mlp.experts.forward = lambda hidden, index, weights: hidden
    refused(model, r"model\.layers\.1\.mlp\.experts has a forward that something has put in place")


@pytest.mark.parametrize("elsewhere", [{}, dict(lm_head="disk")])
def test_a_model_on_the_cpu_with_a_device_map_is_swapped(tmp_path, elsewhere):
    """What only moves inputs to where the experts are is kept: dispatch_model hangs it on every module."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = placed(tmp_path, **elsewhere)
    want = model(TOKENS).logits
    before = dict(model.named_parameters())
    for layer in model.model.layers:
        add_hook_to_module(layer.mlp.experts, AlignDevicesHook("cpu"))
    swap_experts(model)
    assert sum(isinstance(m, SwappedExperts) for m in model.modules()) == 2
    assert all(type(layer.mlp.experts._hf_hook) is AlignDevicesHook for layer in model.model.layers)
    assert all(before[name] is p for name, p in model.named_parameters() if not p.is_meta)
    assert far(model(TOKENS).logits, want) < 1e-5


# ---- wrapped ----


class Wrapper(nn.Module):
    """Lies around an experts module as PEFT's ParamWrapper does for `target_parameters`.

    There is one for each parameter.
    """

    def __init__(self, base_layer: nn.Module, parameter_name: str):
        super().__init__()
        self.base_layer, self.parameter_name = base_layer, parameter_name
        rank = 2
        weight = getattr(getattr(base_layer, "base_layer", base_layer), parameter_name)
        self.lora_A = nn.ModuleDict(dict(default=nn.Linear(weight.shape[2], rank * len(weight), bias=False)))
        self.lora_B = nn.ModuleDict(dict(default=nn.Linear(rank * len(weight), weight.shape[1], bias=False)))


class Saved(nn.Module):
    """As PEFT's ModulesToSaveWrapper."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict(dict(default=copy.deepcopy(module)))


class Adapted(nn.Module):
    """As PEFT's LoRA around a Linear."""

    def __init__(self, base_layer: nn.Linear):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict(dict(default=nn.Linear(base_layer.in_features, 2, bias=False)))
        self.lora_B = nn.ModuleDict(dict(default=nn.Linear(2, base_layer.out_features, bias=False)))

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


@pytest.mark.parametrize("layers", [(0, 1), (1,)])
@pytest.mark.parametrize("how", ["each parameter", "one parameter", "the module", "its parent", "compiled"])
def test_wrapped_experts_are_told_to_swap_first(how, layers):
    """One wrapped layer is enough: the others alone would be swapped in silence."""
    model = make("qwen3_moe")
    for layer in (model.model.layers[i] for i in layers):
        experts = layer.mlp.experts
        if how == "each parameter":
            layer.mlp.experts = Wrapper(Wrapper(experts, "gate_up_proj"), "down_proj")
        elif how == "one parameter":
            layer.mlp.experts = Wrapper(experts, "down_proj")
        elif how == "the module":
            layer.mlp.experts = Saved(experts)
        elif how == "its parent":
            layer.mlp = Saved(layer.mlp)
        else:
            layer.mlp.experts = torch.compile(experts)
    refused(model, rf"swap_experts: model\.layers\.{layers[0]}\.mlp\..* swap first, then wrap \(PEFT")


def test_adapters_on_attention_alone_are_no_obstacle():
    theirs = make("qwen3_moe")
    for layer in theirs.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    ours = swap_experts(copy.deepcopy(theirs))
    assert far(ours(TOKENS).logits, theirs(TOKENS).logits) < 1e-5


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_peft_before_is_refused_and_behind_trains_alike(name):
    peft = pytest.importorskip("peft")

    def adapted(model):
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        options = dict(target_modules=["q_proj"], target_parameters=parameters, init_lora_weights=False)
        return peft.get_peft_model(model, peft.LoraConfig(r=2, **options))

    theirs, ours = adapted(make(name)), adapted(swap_experts(make(name)))
    refused(
        theirs, r"model\.layers\.0\.mlp\.experts is ParamWrapper around experts or their weights; swap first"
    )
    ours.load_state_dict(theirs.state_dict())
    found = []
    for model in (theirs, ours):
        out = model(TOKENS, labels=TOKENS)
        out.loss.backward()
        found.append([out.logits, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) > 4 and max(far(b, a) for a, b in zip(*found, strict=True)) < 1e-5
