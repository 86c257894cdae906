"""Tiny models whose weights follow from a formula, and adapters of PEFT's on them, stored with their logits.

tests/hf/stored_adapters/ holds files that PEFT 0.19.1 and 0.18.1 saved. Each folder has the logits of the
PeftModel in fp64 (`logits.safetensors`, for TOKENS). `NAME-apart` has one pair for each expert, as
transformers 4 named them; its logits are of PEFT 0.21.2.

next: tests/hf/test_adapters_read.py
"""

import json
import zlib
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from tmoe.checkpoint.manifest import read_manifest
from tmoe.config.compare import build_config
from tmoe.generate.load import empty, fill
from tmoe.model.lora import lora_of_settings

STORED = Path(__file__).parents[1] / "hf/stored_adapters"
TOKENS = torch.arange(1, 21)[None]
SIZES = dict(
    vocab_size=31,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    experts_implementation="eager",
)
MOE = dict(num_experts_per_tok=2, intermediate_size=12)
CONFIGS = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=12, head_dim=8
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, **MOE, num_local_experts=8),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, num_local_experts=8, num_experts_per_tok=2, intermediate_size=16, head_dim=8
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **SIZES, num_experts=8, num_experts_per_tok=2, intermediate_size=8
    ),
    "granitemoe": lambda: transformers.GraniteMoeConfig(**SIZES, **MOE, num_local_experts=8),
}
# gpt_oss: F = D, so down is square. olmoe: 2F = D, so gate_up is square.


def base_of(family: str):
    """transformers' model of a family; each weight is a sine of its index, so no file holds them. fp32."""
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 or name.endswith(("bias", "sinks")):
                phase = zlib.crc32(name.encode()) % 1000
                p.copy_(
                    0.3 * torch.sin(torch.arange(p.numel(), dtype=torch.float64) * 1.7 + phase).view(p.shape)
                )
    return model.eval()


def logits_of(folder: Path) -> torch.Tensor:
    """[20, V], those of PEFT."""
    return load_file(folder / "logits.safetensors")["logits"]


def saved_base(family: str, folder: Path) -> Path:
    """The folder of a base, written if it is not there."""
    path = folder / family
    if not path.exists():
        base_of(family).save_pretrained(path)
    return path


def stored() -> list[str]:
    return sorted(path.name for path in STORED.iterdir())


def copied(name: str, folder: Path, tensors=None, **fields) -> Path:
    """A copy of a stored adapter with other fields in its config, and other tensors.

    tensors: a function of the file's tensors. A field of None in `fields` is written as null.
    """
    out = folder / f"{name}-copy"
    out.mkdir()
    said = json.loads((STORED / name / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps(said | fields))
    file = load_file(STORED / name / "adapter_model.safetensors")
    save_file(tensors(file) if tensors else file, out / "adapter_model.safetensors")
    return out


@torch.no_grad()
def logits_of_step(step: Path) -> torch.Tensor:
    """[20, V] of a step of adapters on its base, in fp64."""
    manifest = read_manifest(step)
    config = manifest.info["config"]
    lora = lora_of_settings(config["lora"])
    model = empty(build_config(config["model"]), torch.device("cpu"), torch.float32, lora)
    fill(model, step, manifest)
    return model.eval().double()(TOKENS)[0]


@torch.no_grad()
def logits_of_hf(folder: Path) -> torch.Tensor:
    """[20, V] of a Hugging Face folder, by transformers in fp64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    return model.eval().double()(TOKENS).logits[0]


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference."""
    return float((a - b).detach().abs().max())
