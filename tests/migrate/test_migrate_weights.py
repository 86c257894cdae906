"""Checkpoints of Megatron (torch_dist) and of Tutel: the same function as before, or refused by name."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import hf_tiny
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tiers import slow_but

import tmoe
from tmoe.checkpoint.manifest import CheckpointError
from tmoe.config.model import MoEConfig
from tmoe.extras.migrate.translate import main
from tmoe.extras.migrate.tutel_weights import gather

FLAGS = """--disable-bias-linear --swiglu --normalization RMSNorm --position-embedding-type rope
--attention-dropout 0 --hidden-dropout 0 --num-layers 2 --hidden-size 16 --num-attention-heads 4
--group-query-attention --num-query-groups 2 --ffn-hidden-size 12 --seq-length 32
--max-position-embeddings 128 --num-experts 6 --moe-router-topk 3 --untie-embeddings-and-output-weights
--mock-data --vocab-size 31 --make-vocab-size-divisible-by 1 --lr 1e-3 --train-iters 2""".split()


def to_megatron(hf: dict[str, torch.Tensor], config, stacked: bool) -> dict[str, torch.Tensor]:
    """As Megatron's own loader of Mixtral places the tensors, by its names in torch_dist."""
    groups, heads, D = config.num_key_value_heads, config.num_attention_heads, config.hidden_size
    layers: list[dict[str, torch.Tensor]] = []
    for i in range(config.num_hidden_layers):
        own = {n.removeprefix(f"model.layers.{i}."): t for n, t in hf.items() if f".layers.{i}." in n}
        q, k, v = (own[f"self_attn.{part}_proj.weight"] for part in "qkv")
        C = q.shape[0] // heads
        qkv = [q.view(groups, heads // groups * C, D), k.view(groups, C, D), v.view(groups, C, D)]
        experts = [
            [own[f"block_sparse_moe.experts.{e}.{w}.weight"] for w in ("w1", "w3", "w2")]
            for e in range(config.num_local_experts)
        ]
        layers.append(
            {
                "self_attention.linear_qkv.layer_norm_weight": own["input_layernorm.weight"],
                "self_attention.linear_qkv.weight": torch.cat(qkv, dim=1).reshape(-1, D),
                "self_attention.linear_proj.weight": own["self_attn.o_proj.weight"],
                "pre_mlp_layernorm.weight": own["post_attention_layernorm.weight"],
                "mlp.router.weight": own["block_sparse_moe.gate.weight"],
                "mlp.experts.experts.linear_fc1.weight": torch.stack([torch.cat(e[:2]) for e in experts]),
                "mlp.experts.experts.linear_fc2.weight": torch.stack([e[2] for e in experts]),
            }
        )
    if stacked:
        blocks = {f"decoder.layers.{n}": torch.stack([one[n] for one in layers]) for n in layers[0]}
    else:
        blocks = {f"decoder.layers.{i}.{n}": t for i, one in enumerate(layers) for n, t in one.items()}
    return blocks | {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = hf_tiny.saved(tmp_path_factory.mktemp("mixtral"), "mixtral")
    return hf_tiny.make("mixtral"), hf_tiny.tensors_of(folder)


def write(folder: Path, tensors: dict[str, torch.Tensor], backend: str = "torch_dist") -> Path:
    """A run's folder: the newest iteration, with extra states and an optimizer beside the model."""
    step = folder / "iter_0000005"
    beside = {
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_2": io.BytesIO(b"anything"),
        "optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.zeros(16),
    }
    dcp.save(tensors | beside, checkpoint_id=step, no_dist=True)
    (step / "metadata.json").write_text(json.dumps(dict(sharded_backend=backend, sharded_backend_version=1)))
    (step / "common.pt").write_bytes(b"a pickle of Megatron's classes, never read")
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    return folder


@pytest.mark.parametrize("stacked", [True, False])
def test_megatron_computes_the_same(tmp_path, original, stacked):
    """Logits of the step are those of the transformers model that the checkpoint was made of."""
    model, tensors = original
    run = write(tmp_path / "ckpt", to_megatron(tensors, model.config, stacked))
    theta = model.config.rope_parameters["rope_theta"]
    eps = model.config.rms_norm_eps
    flags = [*FLAGS, "--rotary-base", str(theta), "--norm-epsilon", str(eps)]
    main(["import", "megatron", str(run), str(tmp_path / "step"), "--", *flags])
    ids = torch.randint(31, (2, 24), generator=torch.Generator().manual_seed(0))
    ours = hf_tiny.load_step(tmp_path / "step")
    assert hf_tiny.far(ours(ids), model(ids).logits) < 1e-5


def test_megatron_names_what_does_not_fit(tmp_path, original):
    model, tensors = original
    theirs = to_megatron(tensors, model.config, True)
    del theirs["decoder.layers.mlp.router.weight"]
    theirs["decoder.layers.mlp.experts.experts.linear_fc2.weight"] = torch.zeros(2, 6, 16, 7)
    theirs["decoder.layers.self_attention.q_layernorm.weight"] = torch.zeros(2, 4)
    run = write(tmp_path / "ckpt", theirs)
    with pytest.raises(SystemExit) as end:
        main(["import", "megatron", str(run), str(tmp_path / "step"), "--", *FLAGS])
    said = str(end.value)
    assert "blocks.0.moe.router.weight: missing in the checkpoint (decoder.layers.mlp.router.weight" in said
    assert "linear_fc2.weight: (6, 16, 7), the flags give (6, 16, 12)" in said
    assert "q_layernorm.weight: the model of the flags has no such tensor" in said
    assert not (tmp_path / "step").exists()


@pytest.mark.parametrize(
    "made, words",
    [
        (
            "zarr",
            r"of Megatron's format zarr, only torch_dist is read; save it once as torch_dist, .*--ckpt-conv",
        ),
        ("old", r"of Megatron's old format \(mp_rank_\*\); save it once as torch_dist"),
        ("none", r"no checkpoint of Megatron: has neither"),
        ("absent", r"no such folder"),
    ],
)
def test_other_formats_are_refused_with_the_road(tmp_path, made, words):
    path = tmp_path / made
    if made != "absent":
        (path / "mp_rank_00" if made == "old" else path).mkdir(parents=True)
    if made == "zarr":
        (path / "metadata.json").write_text(json.dumps(dict(sharded_backend="zarr")))
    with pytest.raises(SystemExit, match=words):
        main(["import", "megatron", str(path), str(tmp_path / "step"), "--", *FLAGS])


def test_another_model_than_tmoe_has_is_refused(tmp_path, original):
    flags = [word for word in FLAGS if word != "--swiglu"]
    with pytest.raises(SystemExit, match=r"--swiglu is left out"):
        main(["import", "megatron", str(tmp_path), str(tmp_path / "step"), "--", *flags])
    with pytest.raises(SystemExit, match="gates of attention, whose order of rows"):
        main(
            [
                "import",
                "megatron",
                str(tmp_path),
                str(tmp_path / "step"),
                "--",
                *FLAGS,
                "--attention-output-gate",
            ]
        )


# ---- Tutel ----

D, F, E = 8, 6, 4


def tutel_layer(seed: int = 0) -> dict[str, torch.Tensor]:
    """One layer's whole tensors, as Tutel's llama_ffn names them: fc1 and fc2 [E, D, F], fc3 [E, F, D]."""
    g = torch.Generator().manual_seed(seed)
    shapes = dict(W_fc1=(E, D, F), W_fc2=(E, D, F), W_fc3=(E, F, D))
    return {n: torch.randn(s, generator=g) for n, s in shapes.items()} | {
        "wg": torch.randn(E, D, generator=g)
    }


def write_tutel(folder: Path, ranks: int) -> str:
    """Each rank's file: its experts, or its flat part of the one that several ranks share."""
    folder.mkdir()
    whole = tutel_layer()
    for rank in range(ranks):
        experts = {
            f"moe.experts.{n}": whole[n].reshape(ranks, -1)[rank].clone() for n in ("W_fc1", "W_fc2", "W_fc3")
        }
        state = experts | {
            "moe._num_global_experts": torch.tensor(E),
            "moe.gates.0.wg.weight": whole["wg"],
            "head.weight": torch.ones(3, D),
        }
        torch.save({"model": state}, folder / f"{rank}-of-{ranks}.ckpt")
    return str(folder / "{rank}-of-{size}.ckpt")


def tutel_forward(x: torch.Tensor) -> torch.Tensor:
    """Tutel's layer, dropless, top 2: softmax over all experts, the two best, divided by their sum."""
    w = tutel_layer()
    scores = (x @ w["wg"].T).softmax(-1)
    best, ids = scores.topk(2)
    best = best / best.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for t in range(len(x)):
        for weight, e in zip(best[t], ids[t], strict=True):
            hidden = torch.nn.functional.silu(x[t] @ w["W_fc1"][e]) * (x[t] @ w["W_fc2"][e])
            y[t] += weight * (hidden @ w["W_fc3"][e])
    return y


@pytest.mark.parametrize("ranks", slow_but([2, 8], [1, 2, 4, 8]))
def test_tutel_computes_the_same(tmp_path, ranks):
    """On fewer ranks than experts, as many, and more, where ranks share an expert."""
    pattern = write_tutel(tmp_path / "c", ranks)
    out = tmp_path / "out.safetensors"
    main(["import", "tutel", pattern, str(out), "--", f"--size={ranks}", "--namespace", "model"])
    tensors = load_file(out)
    assert torch.equal(tensors["head.weight"], torch.ones(3, D))
    layer = tmoe.MoE(D, MoEConfig(experts=E, top_k=2, ffn_dim=F, balance="none", z_coeff=0.0))
    layer.load_state_dict({n.removeprefix("moe."): t for n, t in tensors.items() if n.startswith("moe.")})
    x = torch.randn(10, D, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(layer(x), tutel_forward(x), rtol=1e-5, atol=1e-5)


def write_ffn(folder: Path, whole: dict[str, torch.Tensor], ranks: int) -> str:
    """Tutel's ffn: sharers of an expert hold rows of both matrices [F/n, D] and parts of both biases."""
    folder.mkdir()
    E, _, D = whole["batched_fc1_w"].shape
    sharers = max(1, ranks // E)
    split = dict(whole)
    if "batched_fc2_bias" in whole:
        short = -(-D // sharers) * sharers - D
        split["batched_fc2_bias"] = torch.nn.functional.pad(whole["batched_fc2_bias"], (0, short))
    for rank in range(ranks):
        state = {
            f"moe.experts.{n}": t.reshape(ranks, -1)[rank].clone() for n, t in split.items() if n != "wg"
        }
        state |= {"moe._num_global_experts": torch.tensor(E), "moe.gates.0.wg.weight": whole["wg"]}
        torch.save(state, folder / f"{rank}-of-{ranks}.ckpt")
    return str(folder / "{rank}-of-{size}.ckpt")


@pytest.mark.parametrize(
    ("ranks", "E", "D", "F", "bias"),
    [(1, 4, 8, 6, True), (2, 4, 8, 6, False), (8, 4, 8, 6, True), (8, 2, 6, 4, True)],
)
def test_tutels_ffn_computes_the_same(tmp_path, ranks, E, D, F, bias):
    """Two matrices, ReLU, biases; the last case divides 6 channels of the second bias among 4, as 2 each."""
    g = torch.Generator().manual_seed(1)
    shapes = dict(batched_fc1_w=(E, F, D), batched_fc2_w=(E, F, D), wg=(E, D))
    shapes |= dict(batched_fc1_bias=(E, F), batched_fc2_bias=(E, D)) if bias else {}
    w = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    tensors = gather(write_ffn(tmp_path / "c", w, ranks), ranks)
    how = dict(activation="relu", bias=bias, balance="none", z_coeff=0.0)
    layer = tmoe.MoE(D, MoEConfig(experts=E, top_k=2, ffn_dim=F, **how))
    layer.load_state_dict({name.removeprefix("moe."): t for name, t in tensors.items()})
    x = torch.randn(10, D, generator=g)
    best, ids = (x @ w["wg"].T).softmax(-1).topk(2)
    b1, b2 = (w.get(f"batched_fc{i}_bias", torch.zeros(E, 1)) for i in (1, 2))
    y = torch.zeros_like(x)
    for t in range(len(x)):
        for weight, e in zip(best[t] / best[t].sum(), ids[t], strict=True):
            hidden = torch.relu(w["batched_fc1_w"][e] @ x[t] + b1[e])
            y[t] += weight * (hidden @ w["batched_fc2_w"][e] + b2[e])
    torch.testing.assert_close(layer(x), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda m: m.pop("moe.experts.batched_fc2_bias"),
            "biases on both projections of an expert or on none",
        ),
        (lambda m: m.pop("moe.experts.batched_fc2_w"), "moe.experts.batched_fc2_w: missing"),
        (
            lambda m: m.update({"moe.experts.batched_fc2_w": torch.ones(4, 6, 10)}),
            "batched_fc2_w: 60, .* elements of an expert.* experts with another output_dim are not read",
        ),
        (lambda m: m.update({"moe.experts.batched_fc1_w": torch.ones(7)}), "as many for each of 4 experts"),
        (lambda m: m.update({"moe.experts.W_fc1": torch.ones(7)}), "W_fc1: not known in .* experts ffn"),
    ],
)
def test_other_ffns_of_tutel_are_refused_by_name(tmp_path, change, words):
    shapes = dict(batched_fc1_w=(4, 6, 8), batched_fc2_w=(4, 6, 8), wg=(4, 8))
    shapes |= dict(batched_fc1_bias=(4, 6), batched_fc2_bias=(4, 8))
    pattern = write_ffn(tmp_path / "c", {name: torch.ones(shape) for name, shape in shapes.items()}, 1)
    state = torch.load(pattern.replace("{rank}-of-{size}", "0-of-1"))
    change(state)
    torch.save(state, tmp_path / "c/0-of-1.ckpt")
    with pytest.raises(CheckpointError, match=words):
        gather(pattern, 1)


def test_tutel_never_fills_zeros(tmp_path):
    """A tensor that one rank, or all, lack is named; so are other sizes, files, gates and experts."""
    pattern = write_tutel(tmp_path / "c", 2)

    def with_change(change, rank: int | None = None) -> str:
        shutil.rmtree(tmp_path / "d", ignore_errors=True)
        shutil.copytree(tmp_path / "c", tmp_path / "d")
        for file in (tmp_path / "d").iterdir():
            if rank is None or file.name.startswith(f"{rank}-"):
                told = torch.load(file)
                change(told["model"])
                torch.save(told, file)
        return str(tmp_path / "d" / "{rank}-of-{size}.ckpt")

    for change, rank, words in (
        (lambda m: m.pop("moe.experts.W_fc2"), 1, "moe.experts.W_fc2: in the file of rank 1, not in all"),
        (lambda m: m.pop("moe.experts.W_fc2"), None, "moe.experts.W_fc2: missing"),
        (
            lambda m: m.update({"moe.experts.W_fc1": torch.ones(7)}),
            1,
            "elements in all ranks; must be 4 experts",
        ),
        (lambda m: m.update({"moe.experts.bias": torch.ones(7)}), None, "moe.experts.bias: not known"),
        (lambda m: m.update({"moe.experts.batched_fc1_w": torch.ones(7)}), None, "batched_fc2_w: missing"),
        (lambda m: m.update({"moe.gates.0.wg.weight": torch.ones(5, D)}), None, "a gate of"),
        (lambda m: m.pop("moe._num_global_experts"), None, "no MoE layer of Tutel"),
    ):
        with pytest.raises(CheckpointError, match=words):
            gather(with_change(change, rank), 2, "model")
    with pytest.raises(CheckpointError, match=r"0-of-3.ckpt: missing"):
        gather(pattern, 3, "model")
    with pytest.raises(CheckpointError, match="--namespace=other: no other there"):
        gather(pattern, 2, "other")


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


def test_hostile_files_of_tutel(tmp_path):
    for value in (Evil(), [1], {"model": 3}):
        torch.save(value, tmp_path / "0.ckpt")
        with pytest.raises(CheckpointError, match=r"0.ckpt: "):
            gather(str(tmp_path / "{rank}.ckpt"), 1, "model")
    (tmp_path / "0.ckpt").write_bytes(b"PK\3\4")
    with pytest.raises(CheckpointError, match=r"0.ckpt: no file of tensors"):
        gather(str(tmp_path / "{rank}.ckpt"), 1)
