"""Every key of config.json with null, without it, and with JSON values of every type.

Each is read as transformers reads it, or refused. Both sides build the model, and their logits are
compared. Where transformers reads the same as before, no model is built anew.

next: tmoe/hf/config.py
"""

import copy
import inspect
import json
import logging
import math
import re
from dataclasses import fields
from functools import cache

import pytest
import torch
from hf_tiny import LLAMA3, LOCAL_MOE, MLA, MODELS, MSCALE, SIZES, YARN, far, first_hand
from huggingface_hub.errors import StrictDataclassFieldValidationError
from tiers import slow_but
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    Qwen3Config,
    models,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tmoe.checkpoint.manifest import CheckpointError
from tmoe.config.check import ConfigError
from tmoe.config.compare import facts
from tmoe.hf import load_hf
from tmoe.hf.architectures import ARCHITECTURES
from tmoe.hf.config import READ, read_config
from tmoe.hf.files import Folder
from tmoe.model.transformer import Transformer

ABSENT = object()
VALUES = [None, ABSENT, False, True, 0, 2, 0.5, "x", [], {}]
ROPE = [
    "rope_theta",
    "rope_type",
    "type",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "truncate",
]
ROPE += ["beta_fast", "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"]
ROPE += ["partial_rotary_factor", "llama_4_scaling_beta"]
MORE = [
    "head_dim",
    "rope_theta",
    "partial_rotary_factor",
    "per_layer_config",
    "mlp_bias",
    "attention_bias",
    "clip_qkv",
]
# what decides nothing in a forward pass of tokens without padding, or how transformers computes it
IDLE = {
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "model_type",
    "problem_type",
    "output_hidden_states",
    "use_cache",
}
IDLE |= {
    "return_dict",
    "transformers_version",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "attention_dropout",
}
IDLE |= {"output_router_logits", "pretraining_tp", "is_encoder_decoder", "chunk_size_feed_forward"}
EVERYWHERE = {
    "sliding_window",
    "layer_types",
    "rope_parameters",
    "original_max_position_embeddings",
    "head_dim",
}
TOKENS = torch.arange(40).view(2, 20) * 7 % 31
WIDE_ROPE = MLA | dict(qk_rope_head_dim=6)  # no width is another's by chance
# Kimi K2 has no class of its own in transformers: it is read as deepseek_v3 is.
OWN_CLASS = [a.model_type for a in ARCHITECTURES if not a.nested and a.model_type != "kimi_k2"]
BASES = {model_type: MODELS[model_type] for model_type in OWN_CLASS} | {
    "deepseek_v2": lambda: DeepseekV2Config(
        **SIZES | WIDE_ROPE, n_routed_experts=6, n_shared_experts=2, topk_method="group_limited_greedy"
    ),
    "deepseek_v3": lambda: DeepseekV3Config(**SIZES | WIDE_ROPE, n_routed_experts=6, n_shared_experts=1),
}
VARIANTS = {
    "deepseek_v2, greedy, mscale": MODELS["deepseek_v2, lite: no query latent, greedy, mscale"],
    "deepseek_v3, as many experts as defaults need, mscale": lambda: DeepseekV3Config(
        **SIZES | WIDE_ROPE | dict(n_group=8, topk_group=4, q_lora_rank=None, num_hidden_layers=4),
        n_routed_experts=16,
        n_shared_experts=1,
        rope_parameters=MSCALE,
    ),
    "qwen3, as many heads as the default": lambda: Qwen3Config(
        **SIZES | dict(num_attention_heads=32, num_key_value_heads=32), head_dim=4
    ),
    "qwen3, late window": MODELS["qwen3, late window"],
    "qwen3, layer_types": lambda: Qwen3Config(
        **SIZES,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen2, late window": MODELS["qwen2, tied, late window, yarn"],
    "qwen2_moe, windows": MODELS["qwen2_moe, windows, wide heads"],
    "qwen3_moe, windows": MODELS["qwen3_moe, window, biases"],
    "mixtral, windows": MODELS["mixtral, window"],
    "gpt_oss, rope of the class": lambda: GptOssConfig(**SIZES, **LOCAL_MOE, head_dim=8),
    "gpt_oss, windows of the class": lambda: GptOssConfig(**SIZES, **LOCAL_MOE, head_dim=8, sliding_window=5),
    "llama, yarn": lambda: LlamaConfig(**SIZES | dict(head_dim=16), rope_parameters=YARN),
    "llama, llama3": lambda: LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama, linear": MODELS["llama, linear"],
}
FAST = "llama", "mixtral, windows", "gpt_oss, rope of the class", "deepseek_v2, greedy, mscale"


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)  # transformers warns of most of these configs
    yield
    logging.disable(logging.NOTSET)


@cache
def words_of(cls: type) -> set[str]:
    """Names that occur in the code that makes and runs a class's model."""
    folder = cls.model_type.removesuffix("_text")
    source = inspect.getsource(getattr(getattr(models, folder), f"modeling_{folder}"))
    words = {*re.findall(r"\w+", source)}
    return words | {cls.attribute_map.get(word, word) for word in words} | EVERYWHERE


def reading(config) -> str:
    """What the code of transformers finds when it reads a config."""
    return json.dumps(
        {k: v for k, v in config.to_dict().items() if k in words_of(type(config))}, sort_keys=True
    )


class Theirs:
    """transformers' models of the configs that it takes, each way of reading them once."""

    def __init__(self, folder):
        self.folder = folder
        self.models = {}
        self.far = {}

    def model(self, config):
        key = reading(config)
        if key not in self.models:
            self.models[key] = self._built(config)
        return key, self.models[key]

    def _built(self, config):
        """The model and its logits, or what it failed with."""
        torch.manual_seed(3)
        how = dict(attn_implementation="eager", experts_implementation="eager")
        try:
            model = AutoModelForCausalLM.from_config(config, **how).eval()
            with torch.no_grad():
                for p in model.parameters():
                    p.normal_(1.0 if p.dim() == 1 else 0.0, 0.3)
                for name, p in model.named_parameters():
                    if name.endswith("A_log"):
                        p.sub_(3)  # as in hf_tiny.make
                for name, buffer in model.named_buffers():
                    if "e_score_correction_bias" in name:
                        buffer.normal_(0.0, 0.3)
                logits = model(TOKENS).logits
        except Exception as error:  # whatever a value does to them
            return error
        return (model, logits) if logits.isfinite().all() else ValueError("logits are not finite")

    def apart(self, key: str, hf: dict) -> float:
        """How far tmoe's logits are from theirs; CheckpointError where it does not take the weights."""
        ours = key, json.dumps(facts(read_config(hf)), sort_keys=True)
        if ours not in self.far:
            model, logits = self.models[key]
            model.save_pretrained(self.folder)
            (self.folder / "config.json").write_text(json.dumps(hf))
            mine = Transformer(read_config(Folder(self.folder).config))
            load_hf(self.folder, mine.state_dict(), mine.cfg)
            with torch.no_grad():
                self.far[ours] = far(mine(TOKENS), logits)
        return self.far[ours]


def cases(base: dict, values: list) -> list[tuple[str, dict]]:
    """Yields what is changed, and the config."""
    arch = next(a for a in ARCHITECTURES if a.model_type == base["model_type"])
    cls = CONFIG_MAPPING[arch.model_type]
    keys = {key for field in arch.fields for key in field.keys} | {*arch.theirs, *READ, *MORE, *arch.copies}
    keys |= {field.name for field in fields(cls)} | {*cls.attribute_map}
    keys -= IDLE | {"rope_parameters", "rope_scaling"}
    found = []
    for key in sorted(keys):
        for value in values:
            if (key, value) == ("max_position_embeddings", 2):
                continue  # fewer than TOKENS has, which tmoe refuses to compute
            rest = {k: v for k, v in base.items() if k != key}
            changed = rest if value is ABSENT else rest | {key: value}
            found.append((f"{key}={'absent' if value is ABSENT else value!r}", changed))
            if key in ("rope_theta", "original_max_position_embeddings"):
                found.append((f"{found[-1][0]}, no rope_parameters", {**changed, "rope_parameters": None}))
    for key in ROPE if "rope_parameters" in base else ():  # Nemotron-H has no positions
        for value in values:
            rest = {k: v for k, v in base["rope_parameters"].items() if k != key}
            rope = rest if value is ABSENT else rest | {key: value}
            found.append(
                (f"rope {key}={'absent' if value is ABSENT else value!r}", base | dict(rope_parameters=rope))
            )
    whole = [None, {}, dict(rope_theta=5.0), dict(type="linear", factor=2.0)]
    whole += [dict(rope_type="yarn", factor=2.0), dict(rope_type="linear")]
    found += [
        (f"{key}={rope}", base | {key: rope}) for rope in whole for key in ("rope_parameters", "rope_scaling")
    ]
    bare = {key: value for key, value in base.items() if key != "rope_parameters"}
    return [*found, ("no rope_parameters", bare), ("rope_scaling={} alone", bare | dict(rope_scaling={}))]


def disagreement(hf: dict, theirs: Theirs, what: str) -> str:
    """What is wrong; "" if nothing is.

    Where transformers computes with a config, tmoe computes the same or refuses it. Where transformers takes
    no null there, no such type, or cannot do without the key, tmoe refuses the config as well.
    """
    try:
        read_config(copy.deepcopy(hf))
    except ConfigError as error:
        assert "NoneType" not in str(error), error  # an accident, not a sentence
        return ""
    try:
        key, built = theirs.model(CONFIG_MAPPING[hf["model_type"]].from_dict(copy.deepcopy(hf)))
    except Exception as error:  # strict checks raise errors of several kinds
        key = ""
        built = error
    if isinstance(built, tuple):
        try:
            apart = theirs.apart(key, hf)
        except (CheckpointError, ConfigError):  # the weights do not fit, said by name
            return ""
        return f"logits are {apart:.2g} apart" if apart > 1e-5 else ""
    whole_for_real = isinstance(built, StrictDataclassFieldValidationError) and "got int" in str(built)
    mistyped = isinstance(built, StrictDataclassFieldValidationError) and not whole_for_real
    untold = "=None" in what or "=absent" in what
    return f"transformers refuses it: {str(built).strip().splitlines()[-1]}" if mistyped or untold else ""


def said_in_full(name: str) -> dict:
    """config.json with every key that transformers writes.

    Without layer_types where other keys are to say which blocks have windows.
    """
    written = (BASES | VARIANTS)[name]().to_json_string(use_diff=False)
    infinite = {"__float__": "Infinity"}  # transformers decodes it where it reads a file
    config = json.loads(written, object_hook=lambda made: math.inf if made == infinite else made)
    return {key: value for key, value in config.items() if key != "layer_types" or "window" not in name}


MEANS = {  # a key and its value -> the setting of it, worked out by hand; "absent": without the key
    ("deepseek_v3", "norm_topk_prob", None): ("moe.renormalize", False),
    ("deepseek_v3", "norm_topk_prob", ABSENT): ("moe.renormalize", True),
    ("deepseek_v3", "rope_interleave", None): ("mla.interleave", False),
    ("deepseek_v3", "rope_interleave", ABSENT): ("mla.interleave", True),
    ("deepseek_v3", "q_lora_rank", None): ("mla.q_rank", 0),
    ("deepseek_v3", "q_lora_rank", ABSENT): ("mla.q_rank", 1536),
    ("deepseek_v2", "q_lora_rank", ABSENT): ("mla.q_rank", 1536),
    ("deepseek_v2", "norm_topk_prob", None): ("moe.renormalize", False),
    ("mistral4", "q_lora_rank", ABSENT): ("mla.q_rank", 1024),
    ("mistral4", "norm_topk_prob", None): ("moe.renormalize", False),
    ("mistral4", "rope_parameters", None): ("rope.query_beta", 0.1),
    ("llama", "num_key_value_heads", None): ("kv_heads", 4),
    ("llama", "head_dim", None): ("head_dim", 4),
    ("mixtral", "sliding_window", None): ("window", 0),
    ("mixtral, windows", "sliding_window", ABSENT): ("window", 0),
    ("qwen3, late window", "sliding_window", None): ("window", 0),
    ("qwen3, late window", "sliding_window", ABSENT): ("window", 4096),
    ("qwen2, late window", "sliding_window", ABSENT): ("window", 4096),
    ("qwen2, late window", "use_sliding_window", ABSENT): ("window", 0),
    ("mistral", "sliding_window", None): ("window", 0),
    ("mistral", "sliding_window", ABSENT): ("window", 4096),
    ("gpt_oss, rope of the class", "rope_parameters", None): ("rope.scaling", "yarn"),
    ("gpt_oss, rope of the class", "rope_parameters", (("rope_type", "default"),)): ("rope.scaling", "none"),
    ("qwen2_moe", "mlp_only_layers", None): ("dense_layers", 0),
}


@pytest.mark.parametrize(("case", "means"), MEANS.items(), ids=lambda pair: str(pair[:2]))
def test_what_null_and_absence_mean(case, means):
    (name, key, value), (setting, want) = case, means
    base = said_in_full(name)
    rest = {k: v for k, v in base.items() if k != key}
    found = read_config(
        rest if value is ABSENT else rest | {key: dict(value) if isinstance(value, tuple) else value}
    )
    for part in setting.split("."):
        found = getattr(found, part)
    assert found == want


def test_a_null_that_is_refused_is_named():
    base = said_in_full("mixtral")
    with pytest.raises(ConfigError) as error:
        read_config(
            base | dict(num_key_value_heads=None, hidden_size=None, hidden_act=None, router_jitter_noise=None)
        )
    for line in (
        "num_key_value_heads=null: must have a value",
        "hidden_size: missing",
        "hidden_act=null: must have a value",
    ):
        assert line in str(error.value)
    assert "4 problems" in str(error.value)


@pytest.mark.parametrize(
    ("rope", "line"),
    [
        (dict(rope_type="linear"), "rope_type='linear': only yarn or llama3 is computed"),
        (dict(llama_4_scaling_beta=None), "llama_4_scaling_beta=None: must be a number"),
        (dict(llama_4_scaling_beta=-0.5), "llama_4_scaling_beta=-0.5: must be at least 0"),
        (dict(partial_rotary_factor=1.0), "partial_rotary_factor=1.0: 0.5 is computed, by the widths"),
    ],
)
def test_a_scale_by_position_that_is_refused_is_named(rope, line):
    base = said_in_full("mistral4")
    with pytest.raises(ConfigError, match=re.escape(line)):
        read_config(base | dict(rope_parameters=base["rope_parameters"] | rope))


@pytest.mark.parametrize("name", slow_but(FAST, [*BASES, *VARIANTS]))
def test_every_key_is_read_as_transformers_reads_it(tmp_path, name):
    base = said_in_full(name)
    theirs = Theirs(tmp_path)
    found = []
    for what, hf in cases(base, VALUES if name in BASES and first_hand(name) else [None, ABSENT]):
        if problem := disagreement(hf, theirs, what):
            found.append(f"{what}: {problem}")
    assert not found, "\n".join(found)
