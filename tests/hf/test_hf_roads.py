"""Import, direct start and export accept the same folders and refuse the others in the same words.

No tensor is lost on the way.

next: tmoe/hf/tensor_plan.py
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hf_tiny import MODELS, assert_bits, far, first_hand, load_step, saved, tensors_of
from safetensors.torch import save_file
from tiers import slow_but
from transformers import AutoModelForCausalLM

from tmoe.checkpoint.errors import MismatchError
from tmoe.checkpoint.manifest import CheckpointError
from tmoe.hf import export_hf, import_hf, load_hf
from tmoe.hf.architectures import ARCHITECTURES
from tmoe.hf.config import read_config
from tmoe.hf.files import Folder
from tmoe.hf.tensor_plan import plan_folder
from tmoe.model.transformer import Transformer

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
NAMES = [a.model_type for a in ARCHITECTURES if not a.nested]
NORM = "model.layers.1.post_attention_layernorm.weight"
NEMOTRON = "backbone.layers.1.norm.weight", "backbone.embeddings.weight"  # its norm and embedding
QUERY = "model.layers.1.self_attn.{}_proj"


def rewritten(folder: Path, tensors: dict[str, torch.Tensor], **config) -> None:
    """The folder with other tensors, in one file, and other settings."""
    save_file({n: t.clone() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(settings, indent=2))


def said(road) -> list[str]:
    """The lines by which a road refuses, without its heading; no line if it accepts."""
    try:
        road()
    except MismatchError as error:
        return [line.strip() for line in str(error).splitlines()[1:]]
    except CheckpointError as error:
        return [str(error)]
    return []


def roads(folder: Path, step: Path) -> dict[str, list[str]]:
    """What the three roads say about a folder; step: one of the model that its config.json names."""

    def start():
        cfg = read_config(Folder(folder).config)
        load_hf(folder, Transformer(cfg).state_dict(), cfg)

    away = folder.with_name("away")
    return dict(
        imported=said(lambda: import_hf(folder, away, dry_run=True)),
        started=said(start),
        exported=said(lambda: export_hf(step, away, like=folder, dry_run=True)),
    )


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A model's folder and a step of it, made once."""
    made = {}

    def original(name: str) -> tuple[Path, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp("original")
            saved(folder / "hf", name)
            import_hf(folder / "hf", folder / "step")
            made[name] = folder / "hf", folder / "step"
        return made[name]

    return original


def altered(tensors: dict[str, torch.Tensor], name: str) -> dict[str, tuple[dict, str]]:
    """Folders with one fault each: all tensors, and the word by which the folder is refused.

    "": it is accepted, and nothing is lost.
    """
    norm, embedding = (NORM, EMBEDDING) if name != "nemotron_h" else NEMOTRON
    lacks = {key: {k: t for k, t in tensors.items() if k != key} for key in (norm, embedding, HEAD)}
    rotary = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tables = {
        "nothing": (tensors, ""),
        "a computed table": (tensors | {rotary: torch.rand(4)}, ""),
        "a table of the whole model": (tensors | {"model.rotary_emb.inv_freq": torch.rand(4)}, "inv_freq"),
        "a tensor more": (tensors | {"model.surprise": torch.zeros(2)}, "model.surprise"),
        "a layer more": (tensors | {"model.layers.7.input_layernorm.weight": torch.zeros(16)}, "layers.7."),
        "a norm's bias": (tensors | {"model.norm.bias": torch.zeros(16)}, "model.norm.bias"),
        "a head's bias": (tensors | {"lm_head.bias": torch.zeros(31)}, "lm_head.bias"),
        "no norm": (lacks[norm], norm),
        "no embedding": (lacks[embedding], embedding),
        "untied, no head": (lacks[HEAD], HEAD),
        "another type": (tensors | {norm: tensors[norm].double()}, norm),
        "another shape": (tensors | {norm: torch.ones(17)}, norm),
        "a head of another shape": (tensors | {HEAD: torch.ones(32, 16)}, HEAD),
    }
    bias = next((k for k in tensors if k.endswith("_proj.bias") and "self_attn" in k), None)
    if bias:
        tables["no bias"] = ({k: t for k, t in tensors.items() if k != bias}, bias)
    elif "deepseek" not in name:
        unused = f"{QUERY.format('q')}.bias"
        tables["a bias"] = (tensors | {unused: torch.zeros(16)}, unused)
    return tables


@pytest.mark.parametrize("name", slow_but(first_hand, NAMES))
def test_the_roads_agree(tmp_path, originals, name):
    """And every tensor of the files is read, copied, carried or refused by name, in one place only."""
    original, step = originals(name)
    shutil.copytree(original, tmp_path / "hf")
    for what, (tensors, word) in altered(tensors_of(original), name).items():
        rewritten(tmp_path / "hf", tensors)
        found = roads(tmp_path / "hf", step)
        assert found["imported"] == found["started"] == found["exported"], what
        assert bool(found["imported"]) == bool(word) and all(word in line for line in found["imported"]), what
        plan = plan_folder(Folder(tmp_path / "hf"))
        read = {piece.name for group in plan.pieces.values() for piece in group}
        refused = {line.partition(":")[0] for line in plan.problems}
        places = [read - refused, {*plan.copies}, {*plan.extra}, refused]
        assert all(sum(tensor in place for place in places) == 1 for tensor in tensors), what


@pytest.mark.parametrize("name", slow_but(first_hand, [n for n in MODELS if n in NAMES or "," in n]))
def test_each_element_is_read_once(originals, name):
    """No tensor is read and then overwritten, and none fills two places."""
    plan = plan_folder(Folder(originals(name)[0]))
    seen = {}
    for ours, pieces in plan.pieces.items():
        ends = [torch.tensor(piece.offset) + torch.tensor(piece.shape) for piece in pieces]
        filled = torch.zeros(*torch.stack(ends).amax(0).tolist())
        for piece in pieces:
            filled[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))] += 1
            piece.see(seen.setdefault(piece.name, torch.zeros(piece.their_shape))).add_(1)
        assert (filled == 1).all(), ours
    assert all((count == 1).all() for count in seen.values()), [n for n, c in seen.items() if (c != 1).any()]


@pytest.mark.parametrize("name", [name for name in NAMES if first_hand(name)])
@pytest.mark.parametrize("head", ["equal", "equal, wider", "other", "alone", "absent"])
def test_a_tied_head(tmp_path, name, head):
    """config.json ties it; the files hold a copy, another head, the head alone, or none.

    The function is transformers' on every road, and an export brings every tensor back.
    """
    hf_dir = saved(tmp_path / "hf", name)
    tensors = {n: t for n, t in tensors_of(hf_dir).items() if n != HEAD}
    embedding = tensors[EMBEDDING].bfloat16() if head == "equal, wider" else tensors[EMBEDDING]
    tensors[EMBEDDING] = embedding
    heads = {
        "equal": embedding,
        "alone": embedding,
        "equal, wider": embedding.float(),
        "other": torch.randn(31, 16),
    }
    tensors |= {HEAD: heads[head]} if head in heads else {}
    if head == "alone":
        del tensors[EMBEDDING]
    rewritten(hf_dir, tensors, tie_word_embeddings=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        hf_dir, experts_implementation="eager", dtype=torch.float32
    ).eval()
    cfg = read_config(Folder(hf_dir).config)
    assert cfg.tied == (head != "other")
    started = Transformer(cfg)
    load_hf(hf_dir, started.state_dict(), cfg)
    import_hf(hf_dir, tmp_path / "step")
    assert_bits(load_step(tmp_path / "step").state_dict(), started.state_dict())
    x = torch.arange(40).view(2, 20) % 31
    with torch.no_grad():
        assert far(started(x), theirs(x).logits) < 1e-5
    for target, like in (("back", None), ("like", hf_dir)):
        export_hf(tmp_path / "step", tmp_path / target, like=like)
        assert_bits(tensors_of(tmp_path / target), tensors)
        assert json.loads((tmp_path / target / "config.json").read_text())["tie_word_embeddings"] == cfg.tied


def test_another_head_is_not_a_tied_models(tmp_path, capsys):
    """A tied model is neither filled from such a folder nor written like it.

    An import says how it was read.
    """
    hf_dir = saved(tmp_path / "hf", "qwen3, tied, yarn")
    import_hf(hf_dir, tmp_path / "tied")
    tied = read_config(Folder(hf_dir).config)
    rewritten(hf_dir, tensors_of(hf_dir) | {HEAD: torch.randn(31, 16)})
    model = Transformer(tied)
    with pytest.raises(
        MismatchError, match=r"files hold another lm_head(.|\n)*model.tied: True here, False there"
    ):
        load_hf(hf_dir, model.state_dict(), tied)
    with pytest.raises(
        MismatchError, match=r"model.head.weight: not in the step(.|\n)*model.tied: True here, False there"
    ):
        export_hf(tmp_path / "tied", tmp_path / "back", like=hf_dir)
    capsys.readouterr()
    import_hf(hf_dir, tmp_path / "step")
    assert (
        "but the files hold another lm_head.weight: read as tie_word_embeddings false"
        in capsys.readouterr().out
    )


def test_a_tensor_in_two_files_is_named(tmp_path, originals):
    """On all roads; also one that the index places where it is not."""
    original, step = originals("qwen3")
    tensors = tensors_of(original)
    shutil.copytree(original, tmp_path / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    files = {"a.safetensors": tensors, "b.safetensors": {NORM: tensors[NORM]}}
    for file, held in files.items():
        save_file(held, tmp_path / "hf" / file, {"format": "pt"})
    index = dict.fromkeys(tensors, "a.safetensors")
    for place, word in (("b.safetensors", f"{NORM}: both in"), ("c.safetensors", "c.safetensors: missing")):
        (tmp_path / "hf/model.safetensors.index.json").write_text(
            json.dumps(dict(weight_map=index | {NORM: place}))
        )
        found = roads(tmp_path / "hf", step)
        assert found["imported"] == found["exported"] and word in found["imported"][0]
        with pytest.raises(CheckpointError, match=word):
            load_hf(tmp_path / "hf", {}, read_config(json.loads((original / "config.json").read_text())))
    (tmp_path / "hf/model.safetensors.index.json").write_text(
        json.dumps(dict(weight_map=index | {NORM: "d.safetensors"}))
    )
    save_file({"model.other": torch.zeros(1)}, tmp_path / "hf/d.safetensors", {"format": "pt"})
    found = roads(tmp_path / "hf", step)
    assert found["imported"] == found["started"] == found["exported"] and len(found["imported"]) == 2
