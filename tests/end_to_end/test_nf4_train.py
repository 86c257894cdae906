"""A run of adapters on a base in NF4: its steps, a resume, who speaks with it, and what is refused.

next: tests/end_to_end/test_lora_layouts.py
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import runs
import torch
from tiers import slow_but

import train
from tmoe.base.quantised import dequantise, quantise
from tmoe.checkpoint.base import base_of, weights_hash
from tmoe.checkpoint.checkpoints import Checkpoints
from tmoe.checkpoint.manifest import read_manifest
from tmoe.checkpoint.rewrite import read_whole
from tmoe.cli.parse import parse
from tmoe.config.run import Config, GrpoConfig, LoraConfig
from tmoe.generate.load import load
from tmoe.hf import import_hf
from tmoe.hf.adapters.commands import export_adapter, merge
from tmoe.log.metrics_file import read_steps
from tmoe.model.lora import off
from tmoe.model.nf4 import require_nf4, slots_of
from tmoe.run import process as runtime

NF4 = "--lora.rank 4 --lora.alpha 8 --lora.base nf4 --train.dtype fp32 --optim.lr 1e-2".split()
SMALL = [*runs.SMALL, "--steps", "4", "--checkpoint.every", "2"]


def trained(gloo, out, *words, world=1):
    return gloo(world, runs.run, [*SMALL, "--out", str(out), *map(str, words)])[0]


@pytest.fixture(scope="module")
def made(gloo, tmp_path_factory):
    """A base of two steps, and adapters of four steps on it in NF4."""
    folder = tmp_path_factory.mktemp("nf4")
    gloo(1, runs.run, [*runs.SMALL, "--steps", "2", "--out", str(folder / "base")])
    trained(gloo, folder / "a", *NF4, "--init", base_in(folder))
    return folder


def base_in(folder: Path) -> Path:
    return folder / "base/checkpoints/step-2"


def step_of(folder: Path, run: str, step: int = 4) -> Path:
    return folder / run / f"checkpoints/step-{step}"


def test_a_step_holds_adapters_alone_and_the_hash_of_the_whole_base(made):
    base, manifest = base_in(made), read_manifest(step_of(made, "a"))
    assert base_of(manifest) == (str(base), weights_hash(base))
    held = {name for name in manifest.tensors if name.startswith("model.")}
    assert held and all(name.endswith((".a", ".b", "_a", "_b")) for name in held)
    step = step_of(made, "a")
    moved = [n for n in held if n.endswith("b") and read_whole(step, manifest.tensors[n]).any()]
    assert len(moved) == len(held) // 2  # every b has left zero


def test_a_resumed_run_goes_on_in_every_bit(gloo, made, tmp_path):
    shutil.copytree(step_of(made, "a", 2), tmp_path / "run/checkpoints/step-2")
    again = trained(gloo, tmp_path / "run", *NF4, "--init", base_in(made))
    step = step_of(made, "a")
    for name, t in again.items():
        assert torch.equal(t, read_whole(step, read_manifest(step).tensors[name])), name


def test_training_is_that_of_the_rounded_base(gloo, made, tmp_path):
    """The same run on a whole base that holds the values of NF4 gives the same adapters, to rounding."""
    base, slots = base_in(made), slots_of(load(made / "a", device="cpu").model)
    manifest, tensors = read_manifest(base), {}
    for name, entry in manifest.tensors.items():
        if not name.startswith("model."):
            continue
        t = read_whole(base, entry)
        if name.removeprefix("model.") in slots:
            t = dequantise(quantise(t, "nf4"), "nf4", tuple(t.shape))
        tensors[name] = t
    assert len(slots) > 4
    rounded = Checkpoints(tmp_path / "r/checkpoints", keep=0, mode="sync", info=manifest.info)
    rounded.save(2, tensors, dict(step=2, tokens=1), {})
    words = [word if word != "nf4" else "whole" for word in NF4]
    whole = trained(gloo, tmp_path / "b", *words, "--init", tmp_path / "r/checkpoints/step-2")
    step = step_of(made, "a")
    adapters = {n: e for n, e in read_manifest(step).tensors.items() if n.startswith("model.")}
    for name, entry in adapters.items():
        torch.testing.assert_close(whole[name], read_whole(step, entry), rtol=1e-4, atol=1e-6)


SHARED = ["", "--parallel.gathered-gib 0", "--parallel.replicate 2"]


@pytest.mark.parametrize("words", slow_but(SHARED[:2], SHARED))
def test_two_ranks_that_share_a_batch(gloo, made, tmp_path, words):
    """Each holds the whole base; adapters are sharded, kept whole, or both copies of two replicas."""
    half = ["--train.batch", 4, *words.split()]
    two = trained(gloo, tmp_path / "b", *NF4, *half, "--init", base_in(made), world=2)
    step = step_of(made, "a")
    for name, entry in read_manifest(step).tensors.items():
        if name.startswith("model."):
            torch.testing.assert_close(two[name], read_whole(step, entry), rtol=1e-3, atol=1e-5)


def test_a_model_speaks_with_adapters_on_its_base_in_nf4(made):
    base, tokens = base_in(made), torch.arange(2, 18)[None]
    with torch.no_grad():
        spoken = load(made / "a", device="cpu").model
        given = load(base, device="cpu", adapter=made / "a").model
        assert torch.equal(given(tokens), spoken(tokens))
        plain = load(base, device="cpu", quantize="nf4").model
        with off(given):
            torch.testing.assert_close(given(tokens), plain(tokens), rtol=1e-5, atol=1e-5)
        answer = load(made / "a", device="cpu").engine().generate([[3, 4]], 1)[0][0]
        assert answer.ids.numel() > 0


def begun(rank: int, world: int, argv: list[str]) -> tuple[str, dict[str, torch.Tensor]]:
    """The line on the weights of a start, and the adapters with which the run begins."""
    trainer = train.Trainer(cfg := parse(argv, "", rank=rank, world=world), runtime.start(cfg.seed))
    state = runs.whole(trainer)
    return trainer.began, {name: t for name, t in state.items() if name.startswith("model.")}


def test_adapters_of_another_kind_of_base_and_of_peft_start_a_run(gloo, made, tmp_path):
    """--lora.init changes how the base is held, which the start states; a resumed run may not."""
    export_adapter(step_of(made, "a"), tmp_path / "peft")
    init, whole = ["--init", base_in(made)], ["--lora.base", "whole"]
    began = {}
    for name, words in {
        "step": ["--lora.init", made / "a"],
        "whole": ["--lora.init", made / "a", *whole],
        "peft": ["--lora.init", tmp_path / "peft", "--lora.base", "nf4"],
    }.items():
        out = ["--out", tmp_path / name, "--train.dtype", "fp32"]
        said, adapters = gloo(1, begun, [*SMALL, *map(str, [*out, *init, *words])])[0]
        assert said.endswith(", trained on a base in NF4") == (name == "whole"), said
        began[name] = adapters
    assert began["whole"].keys() == began["peft"].keys() == began["step"].keys()
    for key, t in began["step"].items():
        assert torch.equal(began["whole"][key], t), key
        assert torch.equal(began["peft"][key] != 0, t != 0), key  # its B has another factor
    tokens = torch.arange(2, 18)[None]
    with torch.no_grad():
        want = load(made / "a", device="cpu").model(tokens)
        got = load(base_in(made), device="cpu", adapter=tmp_path / "peft", quantize="nf4").model(tokens)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert torch.equal(load(made / "a", device="cpu", quantize="nf4").model(tokens), want)
    with pytest.raises(ValueError, match=r"quantize=int4: not with low-rank adapters.*; valid: nf4"):
        load(base_in(made), device="cpu", adapter=tmp_path / "peft", quantize="int4")


def test_a_merge_adds_to_the_bases_own_weights(made, tmp_path, capsys):
    """Neither the values of NF4 nor the hash of another base: W + 8/4 b a, W as the base's step holds it."""
    base, step = base_in(made), step_of(made, "a")
    merge(step, tmp_path / "hf")
    said = "was trained with --lora.base nf4; its adapters were added to the base's own weights"
    assert said in capsys.readouterr().out
    import_hf(tmp_path / "hf", tmp_path / "merged")

    def read(folder, name):
        return read_whole(folder, read_manifest(folder).tensors[f"model.blocks.0.attention.o.{name}"])

    weight, found = read(base, "weight"), read(tmp_path / "merged", "weight")
    torch.testing.assert_close(found, weight + 2 * read(step, "b") @ read(step, "a"), rtol=1e-5, atol=1e-7)
    rounded = dequantise(quantise(weight, "nf4"), "nf4", tuple(weight.shape))
    change = (found - weight).norm()
    assert change > 0 and (rounded - weight).norm() > change / 100


GRPO = "--task grpo --grpo.prompts 4 --grpo.group 4 --grpo.max-tokens 6 --grpo.kl 0.1 --grpo.rewards"


def test_rollouts_of_two_ranks_are_those_of_one(gloo, made, tmp_path):
    """Each rank answers with the whole base. The loss is 0.1 times the divergence from the base."""
    rows = [dict(prompt=f"{n}+{n}=", answer=str(2 * n)) for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "reward.py").write_text("def some(s):\n    return sum(s.answer.encode()) % 7 / 7\n")
    words = [*GRPO.split(), f"{tmp_path / 'reward.py'}:some", "--data.path", tmp_path / "rows.jsonl"]
    words = [*NF4, *words, "--init", base_in(made), "--steps", 2]
    found = []
    for world in (1, 2):
        trained(gloo, tmp_path / str(world), *words, "--train.batch", 2 // world, world=world)
        steps = [line for _, line in read_steps(tmp_path / str(world) / "metrics.jsonl")]
        found.append([line[name] for line in steps for name in ("loss", "grad_norm", "reward/mean")])
        assert abs(steps[0]["loss"]) < 1e-7 < 1e-6 < steps[1]["loss"] and steps[0]["grad_norm"] > 0
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-5)


def refused(gloo, *words):
    (code, said), *_ = gloo(1, runs.begin, [*SMALL, *map(str, words)])
    assert code == 2 and said.startswith("error: "), said
    return said


def test_refusals(gloo, made, tmp_path):
    init = ["--init", base_in(made), "--out", tmp_path / "b"]
    said = refused(gloo, *NF4, "--out", tmp_path / "b")
    assert "--lora.base=nf4: needs weights to quantise; valid: --init FOLDER" in said
    said = refused(gloo, *NF4, *init, "--resume", step_of(made, "a"), "--lora.base", "whole")
    assert "--lora.base=whole" in said and "was trained with --lora.base=nf4" in said
    cfg = Config(lora=LoraConfig(rank=4, base="nf4"))
    for axis in ("ep", "tp", "cp", "pp"):
        two = replace(cfg.train, accumulate=2)
        divided = replace(cfg, train=two, parallel=replace(cfg.parallel, **{axis: 2}))
        with pytest.raises(ValueError, match=rf"parallel\.{axis}=2: not with .*base=nf4.*; valid: 1, or"):
            require_nf4(divided)
    with pytest.raises(ValueError, match=r"float8=rowwise: not with"):
        replace(cfg, train=replace(cfg.train, float8="rowwise"))
    with pytest.raises(ValueError, match=r"bitwise: not with .*base=nf4.*; valid: False"):
        replace(cfg, task="grpo", grpo=GrpoConfig(rewards=("exact",), bitwise=True), compile=False)
