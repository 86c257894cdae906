"""TRL's SFTTrainer and DPOTrainer on models with swapped experts: losses and norms of the unswapped ones.

next: tmoe/hf/swap.py
"""

import copy

import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig

from tmoe.hf import swap_experts

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.slow  # importing TRL takes seconds

STEPS = 3
SETTINGS = dict(
    max_steps=STEPS,
    per_device_train_batch_size=2,
    learning_rate=3e-3,
    adam_epsilon=1e-4,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    max_length=64,
)
FACTS = [("the sea", "salt"), ("the sky", "blue"), ("grass", "green"), ("coal", "black"), ("snow", "white")]


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(["<end>", "<pad>", *alphabet])}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>", pad_token="<pad>")


def tiny() -> torch.nn.Module:
    torch.manual_seed(7)
    sizes = dict(vocab_size=258, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
    moe = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, num_key_value_heads=2)
    config = Qwen3MoeConfig(**sizes, **moe, bos_token_id=None, eos_token_id=0, pad_token_id=1)
    return AutoModelForCausalLM.from_config(config)


def sft(model, out):
    rows = [dict(prompt=f"What is {a}? ", completion=b) for a, b in FACTS * 2]
    args = trl.SFTConfig(str(out), **SETTINGS)
    return trl.SFTTrainer(
        model, args, train_dataset=datasets.Dataset.from_list(rows), processing_class=bytes_tokenizer()
    )


def dpo(model, out):
    rows = [dict(prompt=f"What is {a}? ", chosen=b, rejected=b[::-1]) for a, b in FACTS * 2]
    args = trl.DPOConfig(str(out), **SETTINGS)
    data = datasets.Dataset.from_list(rows)
    return trl.DPOTrainer(
        model, copy.deepcopy(model), args, train_dataset=data, processing_class=bytes_tokenizer()
    )


@pytest.mark.parametrize("trainer_of", [sft, dpo])
def test_trl_trains_swapped_experts_alike(tmp_path, trainer_of):
    def lines(model) -> list[float]:
        trainer = trainer_of(model, tmp_path)
        trainer.train()
        log = [line for line in trainer.state.log_history if "loss" in line]
        return [line[key] for line in log for key in ("loss", "grad_norm")]

    want = lines(tiny())
    assert len(want) == 2 * STEPS and want[-2] != want[0]
    assert lines(swap_experts(tiny())) == pytest.approx(want, rel=1e-5)
