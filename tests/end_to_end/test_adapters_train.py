"""Training continues from the files of PEFT: layouts, GRPO, a resumed run; a model answers with them.

next: tests/end_to_end/test_lora_train.py
"""

import json
import random
from pathlib import Path

import pytest
import runs
import torch
from safetensors.torch import load_file

from tmoe.checkpoint.manifest import read_manifest
from tmoe.checkpoint.resume import require_same_run
from tmoe.cli.parse import parse
from tmoe.commands.dry_run import dry_run
from tmoe.generate.load import load
from tmoe.hf.adapters.commands import export_adapter, import_adapter
from tmoe.model.lora import is_adapter

LORA = "--lora.rank 4 --lora.expert-rank 3 --lora.ranks \\.o$:2 --lora.alphas down:5".split()
LORA += "--lora.targets attention experts.down experts.gate_up".split()
PLAIN = "--train.dtype fp32 --optim.lr 1e-2 --train.batch 4 --train.global-batch 8".split()
SMALL = [*runs.SMALL, *PLAIN]


def trained(gloo, out, *words, world=1):
    return gloo(world, runs.run, [*SMALL, "--out", str(out), *map(str, words)])[0]


@pytest.fixture(scope="module")
def made(gloo, tmp_path_factory):
    """A base, adapters on it, PEFT's folder of these, and a step that was imported from that folder."""
    folder = tmp_path_factory.mktemp("peft")
    gloo(1, runs.run, [*runs.SMALL, "--steps", "2", "--out", str(folder / "base")])
    base = folder / "base/checkpoints/step-2"
    trained(gloo, folder / "a", "--steps", "2", "--init", base, *LORA)
    export_adapter(folder / "a", folder / "peft")
    import_adapter(folder / "peft", folder / "step", base=base)
    return folder


def start_of(made, adapters="peft") -> list:
    return ["--init", made / "base/checkpoints/step-2", "--lora.init", made / adapters]


def adapters_in(state) -> dict[str, torch.Tensor]:
    return {n: t for n, t in state.items() if n.startswith("model.") and is_adapter(n)}


@pytest.fixture(scope="module")
def alone(gloo, made):
    """The state of three more steps in one process."""
    return trained(gloo, made / "alone", *start_of(made), "--steps", "3", "--checkpoint.every", "1")


def test_settings_follow_from_the_folder_and_pefts_files_are_the_step(gloo, made, alone):
    config = read_manifest(made / "alone/checkpoints/step-3").info["config"]["lora"]
    assert (config["rank"], config["expert_rank"]) == (4, 3) and config["ranks"] == [r"\.attention\.o$:2"]
    began = gloo(1, runs.load, [*SMALL, "--out", str(made / "b"), *map(str, start_of(made))])[0]
    step = gloo(1, runs.load, [*SMALL, "--out", str(made / "c"), *map(str, start_of(made, "step"))])[0]
    runs.assert_equal_state(began, step)
    assert any(t.any() for n, t in began.items() if n.endswith("_b"))
    moved = {n for n, t in adapters_in(alone).items() if not torch.equal(t, began[n])}
    assert moved == adapters_in(began).keys()


@pytest.mark.parametrize("words", ["--parallel.ep 2", "--parallel.tp 2"])
def test_two_processes_train_and_export_the_adapters_of_one(gloo, made, alone, tmp_path, words):
    out = tmp_path / "run"
    state = trained(gloo, out, *start_of(made), "--steps", "3", *words.split(), world=2)
    want = adapters_in(alone)
    assert adapters_in(state).keys() == want.keys()
    for name, t in want.items():
        assert torch.allclose(state[name], t, atol=2e-6), name
    export_adapter(out, tmp_path / "here")
    export_adapter(made / "alone", tmp_path / "there")
    here, there = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("here", "there"))
    assert here.keys() == there.keys()
    assert max(float((here[n] - there[n]).abs().max()) for n in here) < 1e-5


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(gloo, made, alone, tmp_path):
    step = made / "alone/checkpoints/step-2"
    words = [*start_of(made), "--resume", step, "--steps", "3"]
    runs.assert_equal_state(trained(gloo, tmp_path / "again", *words), alone)


def test_a_resumed_run_says_that_lora_init_is_not_read(made):
    step = made / "a/checkpoints/step-2"
    words = [*SMALL, "--resume", step, "--steps", "3", *LORA, *start_of(made, "a")]
    cfg = parse(list(map(str, words)), "")
    notes = require_same_run(step, cfg, read_manifest(step).info["data"], 1)
    assert f"--lora.init={made / 'a'}: not read, because {step} is resumed" in notes


def refused(gloo, tmp_path, *words) -> str:
    (code, said), *_ = gloo(1, runs.begin, [*SMALL, "--out", str(tmp_path / "no"), *map(str, words)])
    assert code == 2 and said.count("error: ") == 1, said
    return said


def test_other_settings_and_a_missing_base_are_refused(gloo, made, tmp_path, capsys):
    said = refused(gloo, tmp_path, *start_of(made), "--lora.rank", "8")
    assert "--lora.rank=8: " in said and f"{made / 'peft'} was trained with --lora.rank=4" in said
    for start in (made / "peft", made / "a"):  # a dry run refuses what a start refuses
        words = map(str, [*start_of(made)[:2], "--lora.init", start, "--lora.alpha", "5", "--dry-run"])
        with pytest.raises(SystemExit) as end:
            dry_run(parse([*SMALL, *words, "--out", str(tmp_path / "no")], ""))
        assert "--lora.alpha=5.0: " in f"{end.value} {capsys.readouterr().err}"
    said = refused(gloo, tmp_path, "--lora.init", made / "peft")
    assert f"--lora.init={made / 'peft'}: needs --init" in said
    fields = json.loads((made / "peft/adapter_config.json").read_text())
    (tmp_path / "dora").mkdir()
    (tmp_path / "dora/adapter_config.json").write_text(json.dumps(fields | dict(use_dora=True)))
    said = refused(gloo, tmp_path, *start_of(made)[:2], "--lora.init", tmp_path / "dora")
    assert "use_dora=true: DoRA" in said
    wide = [*start_of(made)[:2], "--lora.ranks", "nothing:3", "--lora.rank", "4"]
    assert "--lora.ranks=nothing:3: found in the name of no matrix that has an adapter" in refused(
        gloo, tmp_path, *wide
    )
    assert "--lora.alphas=x: must be PATTERN:ALPHA" in refused(
        gloo, tmp_path, *wide[:2], "--lora.alphas", "x"
    )


def test_a_model_speaks_with_a_folder_of_pefts(made, tmp_path):
    base = made / "base/checkpoints/step-2"
    tokens = torch.arange(2, 18)[None]
    (made / "peft/chat_template.jinja").write_text("{{ messages[0].content }}!")
    try:
        spoken = load(base, device="cpu", adapter=made / "peft")
    finally:
        (made / "peft/chat_template.jinja").unlink()
    with torch.no_grad():
        want = load(made / "a", device="cpu").model(tokens)
        plain = load(base, device="cpu").model(tokens)
        got = spoken.model(tokens)
    assert float((got - want).abs().max()) < 1e-6 < float((want - plain).abs().max())
    assert (
        spoken.tokenizer.chat is not None and spoken.tokenizer.chat.template == "{{ messages[0].content }}!"
    )


def test_grpo_trains_from_pefts_files(gloo, made, tmp_path):
    draw = random.Random(0)
    sums = [(draw.randrange(100), draw.randrange(10)) for _ in range(16)]
    rows = [json.dumps(dict(prompt=f"{a}+{b}?", answer=str(a + b))) for a, b in sums]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    (tmp_path / "reward.py").write_text("def some(sample):\n    return sum(sample.answer.encode()) % 7 / 7\n")
    words = ["--task", "grpo", "--data.path", tmp_path / "prompts.jsonl", "--train.seq", "64", "--steps", "2"]
    words += (
        "--train.global-batch 0 --grpo.prompts 4 --grpo.group 4 --grpo.max-tokens 6 --grpo.kl 0.1".split()
    )
    words += ["--grpo.rewards", f"{tmp_path / 'reward.py'}:some", *start_of(made)]
    after = trained(gloo, tmp_path / "run", *words)
    began = gloo(1, runs.load, [*SMALL, "--out", str(tmp_path / "b"), *map(str, start_of(made))])[0]
    moved = [n for n, t in adapters_in(after).items() if not torch.equal(t, began[n])]
    assert len(moved) == len(adapters_in(began))
    assert {line["step"] for line in runs.lines(Path(tmp_path / "run"))} == {1, 2}
