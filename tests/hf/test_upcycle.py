"""Upcycling: the Mixture-of-Experts computes what the dense model computes, whatever the router says.

Impossible requests are refused.

next: tmoe/extras/upcycle.py
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hf_tiny import SIZES, far, load_step, saved
from transformers import AutoModelForCausalLM

from benchmarks.inject import die_at
from tmoe.checkpoint import dcp as shards
from tmoe.checkpoint import manifest as files
from tmoe.checkpoint import rewrite
from tmoe.checkpoint.checkpoints import Checkpoints, read_manifest, verify
from tmoe.config.model import ModelConfig, MoEConfig, RopeConfig
from tmoe.extras import upcycle
from tmoe.hf import export_hf, import_hf
from tmoe.hf.files import Folder
from tmoe.hf.tensor_plan import plan_folder
from tmoe.model.transformer import Transformer
from tmoe.parallel import build_mesh, parallelize

ROOT = Path(__file__).parents[2]
LLAMA = ModelConfig(
    vocab=31,
    dim=16,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn_dim=24,
    dense_layers=3,
    rope=RopeConfig(max_seq=64),
)
MODELS = {
    "llama": LLAMA,
    "qwen3": replace(LLAMA, qk_norm="head", tied=True),
    "wide, one layer": replace(LLAMA, layers=1, dense_layers=4, ffn_dim=120),
}


def run(*words: object) -> None:
    upcycle.main([str(word) for word in words])


def refused(*words: object) -> str:
    with pytest.raises(SystemExit) as end:
        run(*words)
    assert end.value.code, "an error"
    return str(end.value)


def save(folder: Path, cfg: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    """Writes folder/step-5 as training would, with weights so large that nothing is nearly linear."""
    torch.manual_seed(3)
    model = Transformer(cfg)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.3)
    model.to(dtype)
    tensors = {f"model.{n}": p for n, p in model.named_parameters()}
    tensors |= {f"optim.exp_avg.{n}": p * 2 for n, p in model.named_parameters()} | {
        "optim.step": torch.ones(())
    }
    info = dict(config=dict(model=asdict(cfg), init="elsewhere"))
    Checkpoints(folder, keep=0, mode="sync", info=info).save(5, tensors, dict(step=5, tokens=7), {})
    return model.float()


def logits(model: Transformer) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(60).view(3, 20) * 7 % 31)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("experts", "granularity", "top_k", "more"),
    [
        (4, 1, 1, []),
        (4, 1, 3, []),
        (8, 2, 4, ["--world", 3, "--seed", 9]),
        (24, 8, 8, ["--world", 4, "--ep", 2]),
        (12, 12, 12, ["--world", 8, "--ep", 4]),
        (6, 3, 6, ["--dense-layers", 1, "--moe-every", 2]),
        (5, 1, 2, ["--moe-every", 2]),
    ],
)
def test_logits_are_the_dense_models(tmp_path, name, experts, granularity, top_k, more):
    if "--dense-layers" in more and MODELS[name].layers == 1:
        more = ["--moe-every", 2]
    dense = logits(save(tmp_path, MODELS[name]))
    flags = ["--experts", experts, "--granularity", granularity, "--top-k", top_k, *more]
    run(tmp_path / "step-5", tmp_path / "moe", *flags)
    assert verify(tmp_path / "moe") == []
    model = load_step(tmp_path / "moe")
    assert (
        any(block.moe for block in model.blocks)
        and model.cfg.moe.ffn_dim * granularity == MODELS[name].ffn_dim
    )
    assert far(logits(model), dense) < 1e-5
    for block in model.blocks:
        if block.moe:
            groups = block.moe.router.weight.view(experts // granularity, granularity, -1)
            assert (groups == groups[:, :1]).all() and len(groups[:, 0].unique(dim=0)) == len(groups)
            with torch.no_grad():  # whatever the router says: another one, of groups
                block.moe.router.weight.copy_(torch.randn_like(groups[:, :1]).expand_as(groups).flatten(0, 1))
    assert far(logits(model), dense) < 1e-5


def test_routers_that_the_loss_will_not_train_are_told(tmp_path, capsys):
    save(tmp_path, LLAMA)
    told = {}
    for i, words in enumerate(("--top-k 1", "--top-k 1 --no-renormalize", "--top-k 2")):
        run(tmp_path / "step-5", tmp_path / f"moe-{i}", "--experts", 4, *words.split())
        told[words] = capsys.readouterr().out.count("note: --top-k=1 with --renormalize: ")
    assert told == {"--top-k 1": 1, "--top-k 1 --no-renormalize": 0, "--top-k 2": 0}


def test_routers_are_drawn_from_the_seed_and_the_layer(tmp_path):
    save(tmp_path, replace(LLAMA, dim=64, init_std=0.07))
    found = {}
    for folder, seed, world in (("a", 0, 1), ("b", 0, 6), ("c", 1, 1)):
        run(
            tmp_path / "step-5",
            tmp_path / folder,
            "--experts",
            64,
            "--top-k",
            2,
            "--seed",
            seed,
            "--world",
            world,
        )
        found[folder] = [block.moe.router.weight.detach() for block in load_step(tmp_path / folder).blocks]
    assert all(torch.equal(a, b) for a, b in zip(found["a"], found["b"], strict=True))
    assert not any(torch.equal(a, c) for a, c in zip(found["a"], found["c"], strict=True))
    assert not torch.equal(found["a"][0], found["a"][1])
    assert found["a"][0].std().item() == pytest.approx(0.07, rel=0.05)


@pytest.mark.parametrize(("experts", "granularity", "top_k"), [(6, 1, 2), (8, 2, 4), (12, 4, 4)])
def test_without_renormalising_a_block_is_the_dense_one_times_what_its_experts_weigh(
    tmp_path, experts, granularity, top_k
):
    """sum(weights) E / K: 1 on average over an indifferent router, which is the purpose of the factor."""
    dense = save(tmp_path, LLAMA)
    flags = ["--experts", experts, "--granularity", granularity, "--top-k", top_k, "--no-renormalize"]
    run(tmp_path / "step-5", tmp_path / "moe", *flags)
    model = load_step(tmp_path / "moe")
    x = torch.randn(50, 16)
    assert not model.cfg.moe.renormalize
    for ours, theirs in zip(model.blocks, dense.blocks, strict=True):
        share = ours.moe.router(x).weights_TK.sum(-1, keepdim=True) * experts / top_k
        assert far(ours.moe(x), theirs.ffn(x) * share) < 1e-5 and (share - 1).abs().mean() < 0.3


def test_half_precision_is_widened_and_the_weights_alone_are_taken(tmp_path):
    dense = save(tmp_path, LLAMA, torch.bfloat16)
    run(tmp_path / "step-5", tmp_path / "moe", "--experts", 4, "--top-k", 2)
    manifest = read_manifest(tmp_path / "moe")
    assert all(
        name.startswith("model.") and entry.dtype == "float32" for name, entry in manifest.tensors.items()
    )
    assert (manifest.step, manifest.tokens, manifest.state) == (0, 0, dict(step=0, tokens=0))
    assert "init" not in manifest.info["config"] and manifest.info["history"][-1]["granularity"] == 1
    model = load_step(tmp_path / "moe")
    assert (
        torch.equal(model.embedding.weight, dense.embedding.weight)
        and far(logits(model), logits(dense)) < 1e-5
    )


# ---- from and to Hugging Face, and into training ----


@pytest.mark.parametrize(
    ("name", "becomes"),
    [
        ("llama", "mixtral"),
        ("qwen3, tied, yarn", "qwen3_moe"),
        ("qwen2, tied, late window, yarn", "qwen2_moe"),
        ("mistral", "mixtral"),
    ],
)
def test_a_hugging_face_model_becomes_another(tmp_path, name, becomes):
    """Imported, upcycled, exported: transformers loads it and computes what the dense one computes.

    The tokenizer came along.
    """
    hf_dir = saved(tmp_path / "hf", name, torch.bfloat16)
    import_hf(hf_dir, tmp_path / "dense")
    run(tmp_path / "dense", tmp_path / "moe", "--experts", 6, "--granularity", 3, "--top-k", 3)
    export_hf(tmp_path / "moe", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", experts_implementation="eager")
    assert model.config.model_type == becomes and model.generation_config.temperature == 0.6
    x = torch.arange(60).view(3, 20) % SIZES["vocab_size"]
    with torch.no_grad():
        dense = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
        assert far(model(x).logits, dense(x).logits) < 1e-5
    for file in ("tokenizer.json", "empty.txt"):
        assert (tmp_path / "out" / file).read_bytes() == (hf_dir / file).read_bytes()
    # a shared expert of no width, which transformers writes and an export does not, is nothing to read
    model.save_pretrained(tmp_path / "again")
    assert not plan_folder(Folder(tmp_path / "again")).problems


def start(rank: int, world: int, step: Path, ep: int) -> torch.Tensor:
    cfg = load_step(step).cfg
    model = parallelize(Transformer(cfg), build_mesh(ep=ep))
    tensors = {f"model.{n}": p for n, p in model.state_dict().items()}
    Checkpoints(step.parent / "run", keep=1, mode="sync", info={}).load(step, tensors, only="model.")
    found = logits(model)
    model.train()
    model(torch.arange(20).view(1, 20), torch.arange(20).view(1, 20)).backward()
    assert all(p.grad is not None for p in model.parameters())
    return found


@pytest.mark.slow
def test_any_layout_starts_from_it(gloo, tmp_path):
    dense = logits(save(tmp_path, MODELS["qwen3"]))
    run(
        tmp_path / "step-5",
        tmp_path / "moe",
        "--experts",
        8,
        "--granularity",
        2,
        "--top-k",
        4,
        "--world",
        2,
        "--ep",
        2,
    )
    for world, ep in ((2, 2), (4, 2), (3, 1)):
        for found in gloo(world, start, tmp_path / "moe", ep):
            assert far(found, dense) < 1e-5


# ---- refused before the first byte ----


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--experts 0 --top-k 1", "--experts=0: must be a positive multiple of --granularity=1"),
        (
            "--experts 6 --granularity 4 --top-k 4",
            "--experts=6: must be a positive multiple of --granularity=4",
        ),
        (
            "--experts 8 --granularity 4 --top-k 2",
            "--top-k=2: must be a positive multiple of --granularity=4",
        ),
        ("--experts 8 --granularity 0 --top-k 2", "--granularity=0: must be at least 1"),
        (
            "--experts 10 --granularity 5 --top-k 5",
            "--granularity=5: must divide the dense hidden width, model.ffn_dim=24",
        ),
        ("--experts 4 --top-k 5", "--top-k=5: must be at most --experts=4"),
        ("--experts 4 --top-k 0", "--top-k=0: must be a positive multiple"),
        ("--experts 4 --top-k 2 --dense-layers 3", "--dense-layers=3: none of the 3 blocks would be an MoE"),
        ("--experts 4 --top-k 2 --moe-every 0", "--model.moe-every=0: must be at least 1"),
        (
            "--experts 4 --top-k 2 --world 4 --ep 3",
            "--world=4 --ep=3: both at least 1, and ep must divide the world",
        ),
        ("--experts 6 --top-k 2 --world 4 --ep 4", "--ep=4: must divide the 6 experts of"),
    ],
)
def test_bad_combinations(tmp_path, flags, words):
    save(tmp_path, LLAMA)
    assert words in refused(tmp_path / "step-5", tmp_path / "moe", *flags.split())
    assert {p.name for p in tmp_path.iterdir()} == {"step-5"}


def test_blocks_that_were_named_dense_become_moe_as_well(tmp_path):
    sparse = MoEConfig(experts=2, ffn_dim=4)  # which no block has
    save(tmp_path, replace(LLAMA, dense_layers=0, dense_blocks=(0, 1, 2), moe=sparse))
    after = upcycle.plan_upcycle(tmp_path / "step-5", experts=4, top_k=2).manifest.info["config"]["model"]
    assert after["dense_blocks"] == () and after["dense_layers"] == 0 and after["moe"]["experts"] == 4


def lie(step: Path, **changes) -> None:
    manifest = replace(read_manifest(step), **changes)
    (step / files.NAME).unlink()
    files.write_manifest(step, manifest)


def test_sources_that_are_no_dense_model(tmp_path):
    flags = ["--experts", 4, "--top-k", 2]
    save(tmp_path / "sparse", replace(LLAMA, dense_layers=1, moe=MoEConfig(experts=2, ffn_dim=4)))
    assert "blocks [1, 2] are MoE blocks already" in refused(
        tmp_path / "sparse/step-5", tmp_path / "moe", *flags
    )
    save(tmp_path, LLAMA)
    step = tmp_path / "step-5"
    shutil.copytree(step, tmp_path / "bare")
    lie(tmp_path / "bare", info={})
    assert "its manifest has no model settings" in refused(tmp_path / "bare", tmp_path / "moe", *flags)
    shutil.copytree(step, tmp_path / "bent")
    tensors = dict(read_manifest(step).tensors)
    tensors["model.extra"] = tensors.pop("model.norm.weight")
    lie(tmp_path / "bent", tensors=tensors, info=dict(config=dict(model=asdict(replace(LLAMA, ffn_dim=48)))))
    message = refused(tmp_path / "bent", tmp_path / "moe", *flags)
    for words in (
        "norm.weight: missing",
        "extra: no such tensor",
        "blocks.2.ffn.down.weight: shape (16, 24), by its settings",
    ):
        assert words in message
    shard = next(step.glob("*.distcp"))
    os.truncate(shard, 10)
    assert f"{shard}: damaged" in refused(step, tmp_path / "moe", *flags)
    assert "no such folder" in refused(tmp_path / "nothing", tmp_path / "moe", *flags)
    assert not (tmp_path / "moe").exists() and not (tmp_path / "moe.partial").exists()


def test_space_dry_run_and_existing_folder(tmp_path, monkeypatch, capsys):
    save(tmp_path, LLAMA)
    words = [tmp_path / "step-5", tmp_path / "moe", "--experts", 4, "--top-k", 2]
    run(*words, "--dry-run")
    assert "nothing written" in capsys.readouterr().out and not (tmp_path / "moe").exists()
    with monkeypatch.context() as little:
        little.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 0, 1234))
        assert "needs" in refused(*words) and not (tmp_path / "moe.partial").exists()
    run(*words)
    assert "exists already" in refused(*words)


@pytest.mark.slow
def test_killed_it_goes_on_with_the_same_command(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SMALL", 4000)  # several groups
    dense = logits(save(tmp_path, LLAMA))
    words = [tmp_path / "step-5", "--experts", 4, "--granularity", 2, "--top-k", 2]
    resumed = 0
    for count in range(1, 200, 7):  # dense enough for several kills after a finished group
        moe = tmp_path / f"moe-{count}"
        if not die_at(count, lambda moe=moe: run(words[0], moe, *words[1:])):
            break
        resumed += any(rewrite.work_folder(moe).glob(f"group-*/{files.NAME}"))
        if not moe.exists():
            run(words[0], moe, *words[1:])
        assert far(logits(load_step(moe)), dense) < 1e-5 and not rewrite.work_folder(moe).exists()
    assert resumed > 2 and count > 50


RSS = """
import re, sys
from pathlib import Path
from tmoe.checkpoint import rewrite; from tmoe.extras import upcycle
from tmoe.config.axes import Axes
import tmoe.checkpoint.dcp, tmoe.model.transformer  # which commands import when they run

rewrite.MEMORY = int(sys.argv[2])
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
before = peak()
plan = upcycle.plan_upcycle(Path(sys.argv[1]), experts=8, granularity=2, top_k=2, axes=Axes(dp=2, ep=2))
rewrite.rewrite(plan, Path(sys.argv[1] + "moe"))
print((peak() - before) * 1024)
"""


@pytest.mark.slow
def test_memory_is_that_of_a_few_tensors(tmp_path):
    cfg = replace(LLAMA, dim=512, layers=8, dense_layers=8, ffn_dim=1024)
    save(tmp_path, cfg)
    memory = 64 << 20
    malloc = {"MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RSS, tmp_path / "step-5", str(memory)]
    told = subprocess.run(
        command, cwd=ROOT, env=os.environ | malloc, capture_output=True, text=True, check=True
    ).stdout
    written = sum(entry.size for entry in read_manifest(tmp_path / "step-5moe").files.values())
    assert int(re.findall(r"\d+", told)[-1]) < memory + (16 << 20) < written / 2
