"""Hugging Face's Trainer on two ranks with spread experts: trained like one process, resumed as if never cut.

next: tmoe/hf/trainer.py
"""

import os
from pathlib import Path

import pytest
import torch
from hf_tiny import make
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

pytest.importorskip("accelerate")

from tmoe.config.check import ConfigError
from tmoe.hf.trainer import ExpertParallel

STEPS = 4
ROWS = 8  # of a step, on all ranks together


def arguments(out: Path, world: int, **more) -> TrainingArguments:
    return TrainingArguments(
        str(out),
        **dict(
            max_steps=STEPS,
            per_device_train_batch_size=ROWS // world // 2,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            max_grad_norm=0.5,  # below the norms that come, so every step is clipped
            use_cpu=True,
            logging_steps=1,
            report_to=[],
            save_steps=2,
            adam_epsilon=1e-4,
            disable_tqdm=True,
        )
        | more,
    )


def data() -> list[dict]:
    draw = torch.Generator().manual_seed(3)
    return [dict(input_ids=x, labels=x) for x in torch.randint(8, (STEPS * ROWS, 16), generator=draw)]


def lines(trainer: Trainer) -> list[tuple[float, float]]:
    """Loss and norm of every step."""
    return [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line]


def join(rank: int, world: int) -> None:
    """What torchrun announces; the process group is there already."""
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ |= dict(LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")


def spread(rank: int, world: int, out: Path, name: str) -> dict:
    join(rank, world)
    trainer = Trainer(make(name), arguments(out, world), train_dataset=data(), eval_dataset=data()[:8])
    trainer.add_callback(ExpertParallel(trainer, ep=world))
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(out / "whole"))
    expert = next(p for n, p in trainer.model.named_parameters() if n.endswith("gate_up_proj"))

    again = Trainer(make(name), arguments(out, world, save_strategy="no"), train_dataset=data())
    again.add_callback(ExpertParallel(again, ep=world))
    again.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    pairs = zip(trainer.model.parameters(), again.model.parameters(), strict=True)
    return dict(
        lines=lines(trainer),
        resumed=lines(again),
        same=all(torch.equal(p.to_local(), q.to_local()) for p, q in pairs),
        held=expert.to_local().shape[0],
        evaluated=evaluated,
    )


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("olmoe", marks=pytest.mark.slow)])
def test_trainer_with_spread_experts_is_one_process_unswapped(gloo, tmp_path, name):
    one = Trainer(make(name), arguments(tmp_path / "one", 1), train_dataset=data(), eval_dataset=data()[:8])
    one.train()
    want = lines(one)
    assert len(want) == STEPS and want[-1][0] < want[0][0] and min(norm for _, norm in want) > 0.5

    out = tmp_path / "two"
    for rank in gloo(2, spread, out, name):
        for got, line in zip(rank["lines"], want, strict=True):
            assert got == pytest.approx(line, rel=1e-5)
        assert rank["resumed"] == rank["lines"] and rank["same"]
        assert rank["held"] == 3  # of 6 experts
        assert rank["evaluated"] == pytest.approx(one.evaluate()["eval_loss"], rel=1e-5)
    whole = AutoModelForCausalLM.from_pretrained(out / "whole").state_dict()
    for key, tensor in one.model.state_dict().items():
        assert torch.allclose(whole[key], tensor, atol=2e-5), key


def refused(rank: int, world: int, out: Path) -> list[str]:
    join(rank, world)
    said = []

    def attempt(trainer: Trainer, **more) -> None:
        with pytest.raises(ValueError) as error:
            ExpertParallel(trainer, **more)
        said.append(str(error.value))

    model = make("qwen3_moe")
    optimizer = torch.optim.AdamW(model.parameters())
    attempt(Trainer(model, arguments(out, world), optimizers=(optimizer, None)))
    attempt(Trainer(args=arguments(out, world), model_init=lambda: make("qwen3_moe")))
    trainer = Trainer(make("qwen3_moe"), arguments(out, world), train_dataset=data())
    attempt(trainer, ep=3)
    ExpertParallel(trainer, ep=2)
    with pytest.raises(ConfigError) as error:
        trainer.train(resume_from_checkpoint=str(out))
    return [*said, str(error.value)]


def test_what_would_train_wrongly_is_refused(gloo, tmp_path):
    for said in gloo(2, refused, tmp_path):
        assert "Trainer has an optimizer already; let the Trainer make it" in said[0]
        assert "has a model_init, which makes another model in train(); pass model=" in said[1]
        assert "ep=3: must divide the world of 2 processes" in said[2]
        assert "is no whole DCP folder; valid is a checkpoint-N" in said[3]
