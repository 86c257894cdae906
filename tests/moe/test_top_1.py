"""A top-1 router whose only weight is divided by itself gets nothing from the loss.

Refused in new models, told of in given ones.

next: tmoe/config/run.py
"""

import warnings

import pytest
import torch
from hf_tiny import MODELS, SIZES, assert_bits, tensors_of
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import train
from tmoe import MoE, MoEConfig, Transformer
from tmoe.cli import settings
from tmoe.cli.parse import parse
from tmoe.config.check import ConfigError
from tmoe.config.model import ModelConfig
from tmoe.config.run import Config, TrainConfig
from tmoe.hf import export_hf, import_hf, load_hf
from tmoe.hf.config import read_config
from tmoe.hf.files import Folder

ROUTERS = [
    (dict(), "--model.moe.renormalize=True", "set --model.moe.renormalize False, and"),
    (dict(score="sigmoid"), "--model.moe.renormalize=True", "set --model.moe.renormalize False, and"),
    (dict(choice_bias=True), "--model.moe.renormalize=True", "set --model.moe.renormalize False, and"),
    (dict(scaling=2.5, groups=2), "--model.moe.renormalize=True", "set --model.moe.renormalize False, and"),
    (dict(softmax="after"), "--model.moe.softmax=after", "False --model.moe.softmax before, and"),
    (
        dict(softmax="after", renormalize=False),
        "--model.moe.softmax=after",
        "False --model.moe.softmax before, and",
    ),
    (dict(renormalize=False), "", ""),
    (dict(renormalize=False, score="sigmoid"), "", ""),
    (dict(top_k=2), "", ""),
    (dict(top_k=2, softmax="after"), "", ""),
]


@pytest.mark.parametrize(
    ("kw", "cause", "remedy"), ROUTERS, ids=lambda kw: str(kw) if isinstance(kw, dict) else ""
)
def test_a_new_layer_is_refused_where_its_router_has_no_gradient(kw, cause, remedy):
    cfg = MoEConfig(**dict(experts=4, top_k=1, ffn_dim=8, balance="none", z_coeff=0.0) | kw)
    moe = MoE(16, cfg, init=False)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(0, 0.3)
    (moe(torch.randn(64, 16)) * torch.randn(64, 16)).sum().backward()
    gradient = moe.router.weight.grad.norm().item()
    assert (gradient < 1e-4) == bool(cause) == bool(cfg.untrained) and (cause or gradient > 1e-2)
    if not cause:
        assert MoE(16, cfg)(torch.randn(3, 16)).shape == (3, 16)
        return
    with pytest.raises(ConfigError) as error:
        MoE(16, cfg)
    assert str(error.value).startswith(
        f"--model.moe.top-k=1 with {cause}: a token's only weight is divided by itself"
    )
    assert remedy in str(error.value) and len(str(error.value).splitlines()) == 1


def test_one_expert_needs_no_router():
    assert MoE(4, MoEConfig(experts=1, top_k=1, ffn_dim=3))(torch.randn(2, 4)).shape == (2, 4)


TOP_1 = "--model.moe.top-k 1".split()


@pytest.mark.parametrize("resume", ["auto", "none"])
def test_a_new_run_is_refused_before_anything(tmp_path, capsys, resume):
    for more in ([], ["--model.moe.score", "sigmoid"], ["--model.moe.softmax", "after"], ["--dry-run"]):
        with pytest.raises(SystemExit) as ended:
            train.main(["tiny", *TOP_1, "--out", str(tmp_path / "new"), "--resume", resume, *more])
        said = capsys.readouterr().err
        assert ended.value.code == 2 and said.startswith("error: --model.moe.top-k=1 with ")
        assert "set --model.moe.renormalize False" in said and len(said.splitlines()) == 1
    assert not (tmp_path / "new").exists()
    parse(["tiny", *TOP_1, "--model.moe.renormalize", "False"], "")
    parse(["tiny", *TOP_1, "--eval-only"], "")
    parse(["tiny", *TOP_1, "--model.dense-layers", "4"], "")


@pytest.mark.parametrize("left", ["step-3.tmp-" + "0" * 32, "step-x", ""])
def test_what_a_killed_save_left_is_no_step_to_go_on_from(tmp_path, capsys, left):
    (tmp_path / "checkpoints" / left).mkdir(parents=True)
    with pytest.raises(SystemExit):
        parse(["tiny", *TOP_1, "--out", str(tmp_path)], "")
    assert "error: --model.moe.top-k=1" in capsys.readouterr().err


def published(folder):
    """A top-1 model as Hugging Face would publish it, whose weights are renormalised."""
    sizes = SIZES | dict(vocab_size=256, num_hidden_layers=1)
    options = dict(
        num_experts=4, num_experts_per_tok=1, moe_intermediate_size=10, head_dim=8, norm_topk_prob=True
    )
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **options))
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_an_imported_one_starts_resumes_and_goes_back_with_one_note(tmp_path, capsys, monkeypatch):
    hf_dir = published(tmp_path / "hf")
    import_hf(hf_dir, tmp_path / "step")
    assert capsys.readouterr().out.count("note: --model.moe.top-k=1 with --model.moe.renormalize=True: ") == 1
    model = read_config(Folder(hf_dir).config)
    cfg = Config(model=model, train=TrainConfig(batch=1, seq=16, eval_batches=1), compile=False)
    monkeypatch.setattr(settings, "presets", lambda: {"published": cfg})
    note = (
        "note: --model.moe.top-k=1 with --model.moe.renormalize=True: "
        "a token's only weight is divided by itself"
    )
    for i, source in enumerate((hf_dir, tmp_path / "step")):
        out = tmp_path / f"run-{i}"
        words = ["published", "--log.no-progress", "--log.no-report", "--out", str(out)]
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*top-k=1")
            train.main([*words, "--steps", "1", "--init", str(source)])
            assert capsys.readouterr().err.count(note) == 1
            train.main([*words, "--steps", "2"])  # --resume auto
            assert capsys.readouterr().err.count(note) == 1
            train.main([*words, "--steps", "3", "--resume", str(out / "checkpoints" / "step-2")])
            assert capsys.readouterr().err.count(note) == 1
        export_hf(out / "checkpoints" / "step-3", tmp_path / f"back-{i}", like=hf_dir)
        assert AutoModelForCausalLM.from_pretrained(tmp_path / f"back-{i}").config.norm_topk_prob
    export_hf(tmp_path / "step", tmp_path / "back")
    assert_bits(tensors_of(tmp_path / "back"), tensors_of(hf_dir))


def test_in_a_loop_of_ones_own_it_is_a_warning(tmp_path):
    hf_dir = published(tmp_path / "hf")
    cfg = read_config(Folder(hf_dir).config)
    with torch.device("meta"):
        model = Transformer(cfg)  # says nothing yet: weights may come
    model.to_empty(device="cpu")
    with pytest.warns(
        UserWarning, match="top-k=1 with --model.moe.renormalize=True: .* balancing losses alone"
    ):
        load_hf(hf_dir, model.state_dict(), cfg)
    with pytest.warns(UserWarning, match="top-k=1 with"):
        Transformer(cfg)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Transformer(ModelConfig(layers=1, dense_layers=1, moe=cfg.moe))
        Transformer(ModelConfig(layers=1))


def test_every_published_top_1_model_still_reads():
    """Granite's softmax over the one chosen logit, and every other model whose weight is always 1."""
    config = MODELS["granitemoe, tied, biases, all heads"]()
    assert read_config(config.to_dict() | dict(architectures=["GraniteMoeForCausalLM"])).moe.untrained
