"""A run of adapters: what its steps hold, and who reads them.

next: tests/end_to_end/test_lora_layouts.py
"""

import shutil
from pathlib import Path

import forked
import pytest
import runs
import torch

from tmoe.checkpoint import tools
from tmoe.checkpoint.base import base_of, weights_hash
from tmoe.checkpoint.manifest import read_manifest
from tmoe.checkpoint.rewrite import read_whole
from tmoe.generate.load import load
from tmoe.hf.export import export_hf
from tmoe.model.lora import off

LORA = "--lora.rank 4 --lora.alpha 8 --train.dtype fp32 --optim.lr 1e-2 --checkpoint.every 2".split()
SMALL = [*runs.SMALL, "--steps", "4"]


def trained(gloo, out, *words, world=1, base=None):
    init = ["--init", str(base)] if base else []
    return gloo(world, runs.run, [*SMALL, "--out", str(out), *init, *map(str, words)])[0]


@pytest.fixture(scope="module")
def made(gloo, tmp_path_factory):
    """A base of two steps, and adapters of four steps on it."""
    folder = tmp_path_factory.mktemp("lora")
    gloo(1, runs.run, [*runs.SMALL, "--steps", "2", "--out", str(folder / "base")])
    base = folder / "base/checkpoints/step-2"
    trained(gloo, folder / "a", *LORA, base=base)
    return folder


def step_of(folder: Path, run: str, step: int = 4) -> Path:
    return folder / run / f"checkpoints/step-{step}"


def test_a_step_holds_adapters_and_names_the_base(made):
    base = made / "base/checkpoints/step-2"
    manifest = read_manifest(step_of(made, "a"))
    assert base_of(manifest) == (str(base), weights_hash(base))
    held = {name for name in manifest.tensors if name.startswith("model.")}
    kinds = {name.split(".", 3)[3] for name in held}
    assert kinds == {
        *(f"attention.{m}.{x}" for m in ("qkv", "o") for x in "ab"),
        *(f"moe.experts.{m}_{x}" for m in ("gate_up", "down") for x in "ab"),
    }
    moments = {name.split(".", 2)[2] for name in manifest.tensors if name.startswith("optim.exp_avg.")}
    assert moments == {name.removeprefix("model.") for name in held}


def test_a_resumed_run_goes_on_in_every_bit(gloo, made, tmp_path):
    shutil.copytree(step_of(made, "a", 2), tmp_path / "run/checkpoints/step-2")
    base = made / "base/checkpoints/step-2"
    again = trained(gloo, tmp_path / "run", *LORA, base=base)
    step = step_of(made, "a")
    for name, t in again.items():
        assert torch.equal(t, read_whole(step, read_manifest(step).tensors[name])), name


def refused(gloo, *words):
    (code, said), *_ = gloo(1, runs.begin, [*SMALL, *map(str, words)])
    assert code == 2 and said.startswith("error: "), said
    return said


def test_another_base_is_refused_and_a_moved_one_found(gloo, made, tmp_path):
    step, base = step_of(made, "a"), made / "base/checkpoints/step-2"
    (tmp_path / "moved").mkdir()
    moved = shutil.copytree(base, tmp_path / "moved/step-2")
    gloo(1, runs.run, [*runs.SMALL, "--steps", "2", "--seed", "1", "--out", str(tmp_path / "other")])
    other = tmp_path / "other/checkpoints/step-2"
    own = [*LORA, "--out", tmp_path / "b", "--resume", step]
    assert "holds other weights than" in refused(gloo, *own, "--init", other)
    assert "its adapters were trained" in refused(gloo, *own, "--init", other)
    assert gloo(1, runs.begin, [*SMALL, *map(str, own), "--init", str(moved)])[0][0] == 0
    assert gloo(1, runs.begin, [*SMALL, *map(str, own)])[0][0] == 0  # the step says where
    new = [*LORA, "--out", tmp_path / "c"]
    said = refused(gloo, *new, "--init", other, "--lora.init", step)
    assert f"--lora.init={step}: was trained on other weights" in said
    began = gloo(
        1, runs.load, [*SMALL, *map(str, new), "--init", str(moved), "--lora.init", str(made / "a")]
    )[0]
    name = "model.blocks.1.moe.experts.down_b"
    assert began[name].any()
    assert torch.equal(began[name], read_whole(step, read_manifest(step).tensors[name]))


def test_adapters_and_whole_weights_are_not_mixed_up(gloo, made, tmp_path):
    step, base = step_of(made, "a"), made / "base/checkpoints/step-2"
    out = ["--out", tmp_path / "b"]
    said = refused(gloo, *out, "--init", step)
    assert f"--init={step}: holds adapters on {base}" in said and f"--init={base} --lora.init={step}" in said
    planned = forked.run(["train.py", *SMALL, *map(str, out), "--init", str(step), "--dry-run"])
    assert (planned.returncode, planned.stderr.splitlines()[-1]) == (2, said.splitlines()[-1])
    said = refused(gloo, *LORA, *out, "--resume", base)
    assert "--lora.rank=4: " in said and "holds no adapters; train them in a new run: --init" in said
    assert "holds adapters of --lora.rank=4" in refused(gloo, *out, "--resume", step)
    said = refused(gloo, *LORA, "--lora.rank", "6", *out, "--resume", step)
    assert "--lora.rank=6: " in said and "was trained with --lora.rank=4" in said
    said = refused(gloo, *LORA, *out, "--init", base, "--lora.init", base)
    assert f"--lora.init={base}: {base} holds no adapters" in said
    file = base / "manifest.json"
    said = refused(gloo, *LORA, *out, "--init", base, "--lora.init", file)
    assert f"--lora.init={file}: a file, and no folder; name the folder that holds it: {base}" in said
    said = refused(gloo, *out, "--init", base, "--lora.rank", "64")
    assert "--lora.rank=64: gives blocks.0.attention.qkv the rank 64, above 32, the smaller side" in said
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft/adapter_config.json").write_text("{}")
    said = refused(gloo, *LORA, *out, "--init", base, "--lora.init", tmp_path / "peft")
    assert "adapter_config.json: peft_type=null: tmoe reads low-rank adapters" in said
    with pytest.raises(ValueError, match=r"^\S+step-4: holds adapters on.*tmoe\.hf merge \S+step-4 DIR"):
        export_hf(step, tmp_path / "hf")  # an argument without a flag; train.py's flags are not those here


def test_a_model_speaks_with_its_adapters(made, tmp_path):
    step, base = step_of(made, "a"), made / "base/checkpoints/step-2"
    tokens = torch.arange(2, 18)[None]
    with torch.no_grad():
        plain = load(base, device="cpu").model(tokens)
        spoken = load(made / "a", device="cpu")
        assert spoken.path == step and not torch.equal(spoken.model(tokens), plain)
        given = load(base, device="cpu", adapter=made / "a").model
        assert torch.equal(given(tokens), spoken.model(tokens))
        with off(given):
            assert torch.equal(given(tokens), plain)
    said = forked.run(
        ["-m", "tmoe.generate", str(base), "ab", "--adapter", str(made / "a"), "--max-tokens", "3"]
    )
    assert said.returncode == 0, said.stderr
    wrong = forked.run(["-m", "tmoe.generate", str(base), "ab", "--adapter", str(base)])
    assert wrong.returncode == 2 and f"--adapter={base}: {base} holds no adapters" in wrong.stderr


def test_tools_keep_the_base(gloo, made, tmp_path, capsys):
    steps = [str(step_of(made, "a", n)) for n in (2, 4)]
    tools.main(["average", *steps, str(tmp_path / "mean")])
    tools.main(["reshard", steps[1], str(tmp_path / "two"), "--world", "2", "--ep", "2"])
    tools.main(["inspect", steps[1]])
    tools.main(["inspect", steps[1], "--brief"])
    said, base = capsys.readouterr().out, made / "base/checkpoints/step-2"
    assert f"path={base}" in said and f"adapters on {base}" in said
    for name in ("mean", "two"):
        assert base_of(read_manifest(tmp_path / name)) == base_of(read_manifest(steps[1]))
    name = "model.blocks.0.attention.o.b"
    found = [
        read_whole(Path(step), read_manifest(step).tensors[name]) for step in (*steps, tmp_path / "mean")
    ]
    torch.testing.assert_close(found[2], (found[0] + found[1]) / 2)
    tokens = torch.arange(2, 18)[None]
    with torch.no_grad():
        two, one = (load(path, device="cpu").model(tokens) for path in (tmp_path / "two", steps[1]))
    assert torch.equal(two, one)
    went_on = trained(
        gloo, tmp_path / "c", *LORA, "--resume", tmp_path / "two", "--parallel.ep", "2", world=2
    )
    assert all(
        torch.equal(t, read_whole(Path(steps[1]), read_manifest(steps[1]).tensors[n]))
        for n, t in went_on.items()
    )


def test_without_init_a_step_holds_the_base_too(gloo, made, tmp_path):
    """It was drawn from the seed, so there is no folder to name."""
    trained(gloo, tmp_path / "a", *LORA, "--steps", "2")
    manifest = read_manifest(step_of(tmp_path, "a", 2))
    assert base_of(manifest) is None and "model.embedding.weight" in manifest.tensors
    assert not any("embedding" in name for name in manifest.tensors if name.startswith("optim."))
    load(tmp_path / "a", device="cpu")


def test_the_start_says_what_is_trained(made):
    base = str(made / "base/checkpoints/step-2")
    words = ["train.py", *runs.SMALL[1:], "--init", base, *LORA[:4], "--out", str(made / "said"), "--dry-run"]
    done = forked.run(words)
    assert done.returncode == 0, done.stderr
    assert "adapters: " in done.stdout and "rank 4, rank 2 on each expert" in done.stdout
