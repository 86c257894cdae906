"""Direct start: each rank reads its own slices of a Hugging Face folder.

next: tmoe/hf/importer.py
"""

import shutil
from dataclasses import asdict, replace
from pathlib import Path

import forked
import pytest
import torch
from hf_tiny import SIZES, assert_bits, broken, load_step, saved, tensors_of
from transformers import AutoModelForCausalLM, MixtralConfig

from tmoe.checkpoint.checkpoints import Checkpoints
from tmoe.checkpoint.errors import MismatchError
from tmoe.config.model import ModelConfig, RopeConfig
from tmoe.hf import export_hf, import_hf, load_hf
from tmoe.hf.config import read_config
from tmoe.hf.files import Folder
from tmoe.model.transformer import Transformer
from tmoe.parallel import build_mesh, parallelize


def start(rank: int, world: int, ep: int, folders: dict[Path, ModelConfig]):
    """Full tensors of each model on every rank, after saving them as training would."""
    mesh = build_mesh(ep=ep)
    found = []
    for hf_dir, cfg in folders.items():
        with torch.device("meta"):
            model = Transformer(cfg)
        parallelize(model, mesh)
        model.to_empty(device="cpu")
        load_hf(hf_dir, model.named_parameters(), cfg)
        info = dict(config=dict(model=asdict(cfg), init=str(hf_dir)))
        checkpoints = Checkpoints(hf_dir.with_name(f"{hf_dir.name}-run"), keep=1, mode="sync", info=info)
        checkpoints.save(
            1, {f"model.{n}": p for n, p in model.named_parameters()}, dict(step=1, tokens=1), {}
        )
        found.append({name: p.full_tensor() for name, p in model.named_parameters()})
    return found


def test_a_start_says_whose_weights_it_has(tmp_path):
    """Embedding, norm, head, and seven tensors a block: qkv, o, two norms, router and two of the experts."""
    sizes = SIZES | dict(vocab_size=256)
    AutoModelForCausalLM.from_config(MixtralConfig(**sizes, num_local_experts=4)).save_pretrained(tmp_path)
    words = ["--init", str(tmp_path), "--train.seq", "32", "--train.batch", "1", "--train.eval-batches", "1"]
    done = forked.run(["train.py", "--eval-only", "--no-compile", *words])
    assert done.returncode == 0, done.stderr
    assert f"\nweights of {tmp_path}, {3 + 2 * 7} tensors\n" in done.stdout + done.stderr
    assert "validation loss" in done.stdout + done.stderr


@pytest.mark.parametrize(("world", "ep"), [(1, 1), (2, 2), (4, 2)])
def test_direct_start_on_any_layout(gloo, tmp_path, world, ep):
    """Each rank's slices are right, and what the ranks save goes back to the folder bit for bit."""
    names = ["mixtral, tied, wide heads", "qwen3_moe, leading dense", "gpt_oss", "granitemoe"]
    folders = [saved(tmp_path / f"hf-{i}", name, torch.bfloat16, files=2) for i, name in enumerate(names)]
    want = []
    for folder in folders:
        import_hf(folder, Path(f"{folder}-step"))
        want.append(load_step(Path(f"{folder}-step")))
    configs = {folder: model.cfg for folder, model in zip(folders, want, strict=True)}
    for found in gloo(world, start, ep, configs):
        for got, model in zip(found, want, strict=True):
            assert_bits(got, dict(model.named_parameters()))
    for folder in folders:
        export_hf(Path(f"{folder}-run/step-1"), Path(f"{folder}-back"))
        assert_bits(tensors_of(Path(f"{folder}-back")), tensors_of(folder))


def refused(rank: int, world: int, hf_dir: Path, cfg: ModelConfig):
    if rank:
        hf_dir = hf_dir.with_name("broken")
    model = Transformer(cfg)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises((ValueError, Exception)) as error:
        load_hf(hf_dir, model.named_parameters(), cfg)
    return str(error.value), all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_direct_start_is_refused_on_every_rank(gloo, tmp_path):
    hf_dir = saved(tmp_path / "hf", "qwen3_moe")
    cfg = read_config(Folder(hf_dir).config)
    shutil.copytree(hf_dir, tmp_path / "broken")
    names = broken(tmp_path / "broken")
    for message, untouched in gloo(2, refused, hf_dir, cfg):
        assert all(name in message for name in names) and untouched
    other = replace(
        cfg, qk_norm="none", moe=replace(cfg.moe, top_k=3, renormalize=False), rope=RopeConfig(theta=7.0)
    )
    with pytest.raises(MismatchError, match="4 differences") as error:
        load_hf(hf_dir, Transformer(other).named_parameters(), other)
    for word in (
        "model.qk_norm: 'none' here",
        "moe.top_k: 3 here, 2 there",
        "moe.renormalize",
        "rope.theta: 7.0",
    ):
        assert word in str(error.value)
