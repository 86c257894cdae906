"""Whole runs with experts in fp8: GRPO answers in the compute type and learns in fp8; evaluation is in fp8.

next: tests/end_to_end/test_fp8_train.py
"""

import json

import pytest
import runs
from tiers import slow_but

import train
from tmoe.cli.parse import parse
from tmoe.generate import gathered_model
from tmoe.ops.experts import adapted_cpu, adapted_fp8_cpu, cpu, fp8_cpu
from tmoe.run import process as runtime

ON = "--train.fp8 experts --train.fp8-everywhere".split()
GRPO = """--task grpo --grpo.rewards length(8,4) --grpo.prompts 2 --grpo.group 2 --grpo.max-tokens 8
    --steps 2 --checkpoint.mode off""".split()
KINDS = ("bf16", cpu, "moe_mlp_forward"), ("fp8", fp8_cpu, "forward")
ADAPTED = ("bf16", adapted_cpu, "forward"), ("fp8", adapted_fp8_cpu, "forward")


def counted(rank, world, argv, adapted):
    """Forwards of a layer of experts in a run, by kind, in rollouts and outside of them."""
    found, depth = {}, [0]
    context = gathered_model.in_compute_type

    class Rollout:
        def __init__(self, model):
            self.inside = context(model)

        def __enter__(self):
            depth[0] += 1
            return self.inside.__enter__()

        def __exit__(self, *error):
            depth[0] -= 1
            return self.inside.__exit__(*error)

    def watch(kind, module, name):
        original = getattr(module, name)

        def call(*args, **more):
            at = kind, "rollout" if depth[0] else "update"
            found[at] = found.get(at, 0) + 1
            return original(*args, **more)

        setattr(module, name, call)
        return lambda: setattr(module, name, original)

    undo = [watch(*one) for one in (ADAPTED if adapted else KINDS)]
    gathered_model.in_compute_type = Rollout
    try:
        runs.run(rank, world, argv)
    finally:
        gathered_model.in_compute_type = context
        for restore in undo:
            restore()
    return found


CASES = [
    ("plain", 1, []),
    ("lora", 1, ["--lora.rank", "8"]),
    ("plain", 2, ["--parallel.ep", "2", "--grpo.kl", "0.1"]),
]


@pytest.mark.parametrize("what, world, more", slow_but(CASES[1:2], CASES), ids=str)
def test_grpo_answers_in_the_compute_type_and_learns_in_fp8(gloo, tmp_path, what, world, more):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(dict(prompt=f"{i}+1=", answer=str(i + 1))) + "\n" for i in range(40)))
    argv = [*runs.SMALL, *GRPO, *ON, *more, "--out", str(tmp_path / "run"), "--data.path", str(rows)]
    for found in gloo(world, counted, argv, what == "lora"):
        assert ("fp8", "rollout") not in found and found["fp8", "update"] >= 4
    (first, second) = runs.lines(tmp_path / "run")
    for line in (first, second):
        assert line["grad_norm"] > 0 and line["policy/entropy"] > 0
    other = [word for word in argv if word not in ON]
    other[other.index("--out") + 1] = str(tmp_path / "off")
    gloo(world, runs.run, other)
    plain = runs.lines(tmp_path / "off")[0]
    assert plain["reward/mean"] == first["reward/mean"]  # the same answers of the same first policy
    assert plain["grad_norm"] != first["grad_norm"]
    assert plain["grad_norm"] == pytest.approx(first["grad_norm"], rel=0.3)


def test_evaluation_multiplies_as_training_does(gloo, tmp_path):
    """The validation of a run's last step is that of --eval-only in fp8, and not that without."""
    argv = [*runs.SMALL, "--steps", "2", "--train.eval-every", "2", "--out", str(tmp_path)]
    gloo(1, runs.run, [*argv, *ON])
    val = runs.lines(tmp_path)[-1]["val_loss"]
    again, plain = (gloo(1, validated, [*argv, "--eval-only", *on])[0] for on in (ON, []))
    assert again == val and again != plain and again == pytest.approx(plain, rel=1e-2)


def validated(rank, world, argv):
    cfg = parse(argv, "", rank=rank, world=world)
    trainer = train.Trainer(cfg, runtime.start(cfg.seed))
    with trainer.metrics:
        return trainer.validate()
