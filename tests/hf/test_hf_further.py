"""Blocks that predict further tokens, as DeepSeek-V3 and GLM-4 publish them: read, trained, written.

The loss of a tiny model is that of transformers' MtpModel.

next: tmoe/hf/architectures/common.py
"""

import json
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hf_tiny import assert_bits, load_step, make, saved, tensors_of, train_and_save
from safetensors.torch import save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import train
from tmoe.checkpoint.errors import MismatchError
from tmoe.config.check import ConfigError
from tmoe.config.model import MTPConfig
from tmoe.config.presets import presets
from tmoe.extras.gguf.command import import_model
from tmoe.hf import export_hf, import_hf, load_hf
from tmoe.hf.command_line import main
from tmoe.hf.config import architecture, read_config, write_config
from tmoe.hf.files import Folder
from tmoe.hf.load_weights import carried_blocks
from tmoe.hf.rules import divide, their_shapes
from tmoe.model.transformer import Transformer

NAMES = {"mtp_block.": "", "post_norm.": "shared_head.norm."}


def published(folder: Path, name: str, dtype: torch.dtype = torch.float32):
    """A folder with a block after the last, and transformers' model and MtpModel of the same weights."""
    saved(folder, name, dtype)
    main = make(name, dtype)
    main.config.num_mtp_layers, main.config.mtp_mlp_layer_types = 1, ["sparse"]
    mtp = MtpModel(main, 1).to(dtype).eval()
    with torch.no_grad():
        for p in [*mtp.layers.parameters(), *mtp.layers.buffers()]:
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.3)
    tensors, L = tensors_of(folder), main.config.num_hidden_layers
    for theirs, t in mtp.layers[0].state_dict().items():
        for word, other in NAMES.items():
            theirs = theirs.replace(word, other)
        parts = {theirs: t}
        if ".experts." in theirs:  # published one by one
            base, kind = theirs.rsplit(".", 1)
            kinds = {"down_proj": t}
            if "gate" in kind:
                kinds = dict(zip(("gate_proj", "up_proj"), t.chunk(2, 1), strict=True))
            parts = {f"{base}.{e}.{k}.weight": w[e] for k, w in kinds.items() for e in range(len(t))}
        tensors |= {f"model.layers.{L}.{n}": w.clone() for n, w in parts.items()}
    tensors[f"model.layers.{L}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"model.layers.{L}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit(folder, num_nextn_predict_layers=1)
    return main, mtp


def edit(folder: Path, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def assert_loss_of(model: Transformer, main, mtp: MtpModel):
    """The loss of depth 1 is that of transformers' layer."""
    tokens = torch.randint(main.config.vocab_size, (1, 14), generator=torch.Generator().manual_seed(0))
    model(tokens, F.pad(tokens[:, 1:], (0, 1), value=-100))
    with torch.no_grad():
        h, at = main.model(tokens).last_hidden_state, torch.arange(1, 14)[None]
        cache = MtpCache(config=main.config.get_mtp_config())
        theirs = mtp.forward_layer(0, h[:, :-1], at, cache, input_ids=tokens[:, 1:])
        want = F.cross_entropy(mtp._project_to_logits(theirs)[0, :-1], tokens[0, 2:])
    assert model.mtp.measured[0].item() == pytest.approx(want.item(), abs=1e-5)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "glm4_moe_lite"])
def test_loss_is_that_of_transformers_and_every_byte_returns(tmp_path, name):
    main, mtp = published(tmp_path / "hf", name)
    import_hf(tmp_path / "hf", tmp_path / "step", mtp=1)
    model = load_step(tmp_path / "step").eval()
    assert_loss_of(model, main, mtp)
    export_hf(tmp_path / "step", tmp_path / "back")
    assert_bits(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "hf"))
    cfg = replace(read_config(Folder(tmp_path / "hf").config), mtp=MTPConfig(1))
    started = Transformer(cfg)
    load_hf(tmp_path / "hf", started.state_dict(), cfg)
    assert_bits(started.state_dict(), model.state_dict())


def test_tables_of_the_block_are_written_as_trained(tmp_path):
    """A folder may repeat embedding and head in the block: an export repeats the trained ones."""
    published(tmp_path / "hf", "glm4_moe", torch.bfloat16)
    cfg = replace(read_config(Folder(tmp_path / "hf").config), mtp=MTPConfig(1))
    model = Transformer(cfg)
    load_hf(tmp_path / "hf", model.state_dict(), cfg)
    step = train_and_save(tmp_path / "run", cfg, model, init=str(tmp_path / "hf"))
    export_hf(step, tmp_path / "back")
    before, after = tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "back")
    last = f"model.layers.{cfg.layers}"
    tables = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
    for copy, original in tables.items():
        assert torch.equal(after[f"{last}.{copy}.weight"], after[original]), copy
        assert not torch.equal(after[original], before[original]), original
    assert torch.equal(after[f"{last}.eh_proj.weight"], model.mtp[0].eh_proj.weight.bfloat16())


def test_the_command_trains_blocks_of_a_folder(tmp_path):
    """import HF_DIR STEP_DIR --mtp 1; a GGUF file holds no such blocks."""
    published(tmp_path / "hf", "glm4_moe")
    command = partial(main, **{"import": "tmoe.extras.gguf.command.import_model"})
    command(["import", str(tmp_path / "hf"), str(tmp_path / "step"), "--mtp", "1"])
    assert any(name.startswith("mtp.0.") for name in load_step(tmp_path / "step").state_dict())
    with pytest.raises(ConfigError, match=r"mtp=1: \S*m.gguf is a GGUF file, .*valid: 0"):
        import_model(tmp_path / "m.gguf", tmp_path / "other", mtp=1)


def test_a_dry_run_refuses_another_model_than_that_of_init(tmp_path, capsys):
    """A folder has one block; a step has what it was imported with. The run says the same."""
    published(tmp_path / "hf", "glm4_moe")
    import_hf(tmp_path / "hf", tmp_path / "step", mtp=1)
    depth = "--model.mtp.depth"
    wrong = {
        "hf": [(depth, "2"), ("--model.moe.top-k", "1")],
        "step": [(depth, "0"), ("--model.layers", "3")],
    }
    for start, flags in wrong.items():
        for flag, value in flags:
            with pytest.raises(SystemExit, match="2"):
                train.main(["--dry-run", "--init", str(tmp_path / start), "--train.seq", "16", flag, value])
            said = capsys.readouterr().err.replace("top_k", "top-k")
            assert flag[2:] in said and f"{value} here" in said.replace("=2: config.json", "2 here"), said


def test_what_a_folder_lacks_is_named(tmp_path):
    published(tmp_path / "hf", "glm4_moe")
    with pytest.raises(ConfigError, match=r"model.mtp.depth=2: config.json has 1 .*valid: 0 to 1"):
        import_hf(tmp_path / "hf", tmp_path / "step", mtp=2)
    tensors = tensors_of(tmp_path / "hf")
    name = next(n for n in tensors if n.endswith("shared_head.head.weight"))
    save_file(tensors | {name: tensors[name] + 1}, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    with pytest.raises(MismatchError, match=rf"{name}: is not lm_head.weight; .*--model.mtp.depth 0"):
        import_hf(tmp_path / "hf", tmp_path / "step", mtp=1)
    import_hf(tmp_path / "hf", tmp_path / "step")  # carried where it is not trained
    export_hf(tmp_path / "step", tmp_path / "back")
    assert_bits(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "hf"))
    plain = read_config(Folder(tmp_path / "hf").config)
    assert carried_blocks(tmp_path / "hf", plain).endswith("trains them: 1")
    left = {n: t for n, t in tensors.items() if not n.startswith(f"model.layers.{plain.layers}.")}
    save_file(left, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    assert carried_blocks(tmp_path / "hf", plain) == ""  # config.json names a block, but it is not there
    saved(tmp_path / "other", "qwen3_moe")
    with pytest.raises(ConfigError, match="a qwen3_moe that predict further tokens have no names"):
        import_hf(tmp_path / "other", tmp_path / "step 2", mtp=1)


def nemotrons(folder: Path, name: str):
    """A folder with mtp's two blocks, and transformers' model and its layers of the same weights.

    transformers has no class for these blocks. A model of one block of attention and one of experts computes
    them: its final norm is that of mtp, and its input is the projection.
    """
    saved(folder, name)
    main = make(name)
    config = deepcopy(main.config)
    config.layers_block_type = ["full_attention", "moe"]
    torch.manual_seed(7)
    layers = type(main.model)(config).eval()
    with torch.no_grad():
        for p in [*layers.parameters(), *layers.buffers()]:
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.3)
    D = config.hidden_size
    own = dict(enorm=torch.randn(D), hnorm=torch.randn(D), eh_proj=0.3 * torch.randn(D, 2 * D))
    found = {f"mtp.layers.0.{n}.weight": t for n, t in own.items()}
    for theirs, t in layers.state_dict().items():
        theirs = theirs.replace("norm_f.", "layers.1.final_layernorm.")
        if ".experts." in theirs:  # published one by one
            base, kind = theirs.rsplit(".", 1)
            found |= {f"mtp.{base}.{e}.{kind}.weight": w.clone() for e, w in enumerate(t)}
        elif theirs.startswith("layers."):
            found[f"mtp.{theirs}"] = t.clone()
    tensors = tensors_of(folder) | found
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit(folder, num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E")
    return main, layers, own


@pytest.mark.parametrize(
    "name", ["nemotron_h", "nemotron_h, latent experts, groups, no bias of the convolution"]
)
def test_nemotrons_two_blocks_are_one(tmp_path, name):
    """mtp.layers.0 is attention, mtp.layers.1 experts; every byte returns, and the loss is transformers'."""
    main, layers, own = nemotrons(tmp_path / "hf", name)
    import_hf(tmp_path / "hf", tmp_path / "step", mtp=1)
    model = load_step(tmp_path / "step").eval()
    tokens = torch.randint(main.config.vocab_size, (1, 14), generator=torch.Generator().manual_seed(0))
    model(tokens, F.pad(tokens[:, 1:], (0, 1), value=-100))
    with torch.no_grad():
        h, e = main.model(tokens).last_hidden_state[:, :-1], main.get_input_embeddings()(tokens[:, 1:])
        eps = main.config.layer_norm_epsilon
        parts = [F.rms_norm(t, t.shape[-1:], own[n], eps) for t, n in ((e, "enorm"), (h, "hnorm"))]
        x = torch.cat(parts, -1) @ own["eh_proj"].T
        logits = main.lm_head(layers(inputs_embeds=x).last_hidden_state)[0, :-1]
        want = F.cross_entropy(logits, tokens[0, 2:])
    assert model.mtp.measured[0].item() == pytest.approx(want.item(), abs=1e-5)
    export_hf(tmp_path / "step", tmp_path / "back")
    assert_bits(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "hf"))


def test_other_blocks_of_nemotron_are_kept_and_not_trained(tmp_path):
    nemotrons(tmp_path / "hf", "nemotron_h")
    edit(tmp_path / "hf", mtp_hybrid_override_pattern="*M")
    with pytest.raises(
        ConfigError, match=r"model.mtp.depth=1: mtp_layers_block_type=.*only full_attention and"
    ):
        import_hf(tmp_path / "hf", tmp_path / "step", mtp=1)
    edit(tmp_path / "hf", num_nextn_predict_layers=2, mtp_hybrid_override_pattern="*E")
    with pytest.raises(ConfigError, match=r"depth=2: a nemotron_h has names for one block .*valid: 0 or 1"):
        import_hf(tmp_path / "hf", tmp_path / "step", mtp=2)
    import_hf(tmp_path / "hf", tmp_path / "step")
    export_hf(tmp_path / "step", tmp_path / "back")
    assert_bits(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "hf"))


def test_config_of_a_model_trained_from_the_start():
    nano = replace(presets()["nemotron-3-nano-30b-a3b"].model, mtp=MTPConfig(1))
    assert write_config(nano, "float32")["num_nextn_predict_layers"] == 1
    with pytest.raises(ConfigError, match="depth=2: a nemotron_h has names for one block"):
        write_config(replace(nano, mtp=MTPConfig(2)), "float32")
    cfg = replace(presets()["deepseek-v3"].model, mtp=MTPConfig(1))
    assert write_config(cfg, "float32")["num_nextn_predict_layers"] == 1
    with pytest.raises(
        ConfigError, match=r"mtp.depth=1: the blocks of a qwen3_moe that predict further tokens have no names"
    ):
        write_config(replace(presets()["qwen3-30b-a3b"].model, mtp=MTPConfig(1)), "float32")
    qwen = presets()["qwen3-next-80b-a3b"].model  # `mtp.fc.weight` has no number
    assert write_config(replace(qwen, mtp=MTPConfig(1)), "float32")["num_nextn_predict_layers"] == 1
    with pytest.raises(ConfigError, match=r"mtp.depth=2: a qwen3_next has names for one block .*valid: 0 or"):
        write_config(replace(qwen, mtp=MTPConfig(2)), "float32")


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe_text"])
def test_qwen_has_one_block_of_other_names(tmp_path, name):
    """Norms of 1 + weight, gated attention; experts one by one or stacked; the loss is transformers'."""
    saved(tmp_path / "hf", name)
    cfg = replace(read_config(Folder(tmp_path / "hf").config), mtp=MTPConfig(1))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    groups, _ = divide(architecture(config), cfg, ())
    theirs = {n: s for n, s in their_shapes(groups).items() if n.startswith("mtp.")}
    assert {"mtp.fc.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"} <= {*theirs}
    draw = torch.Generator().manual_seed(3)
    drawn = {n: 0.3 * torch.randn(s, generator=draw) for n, s in theirs.items()}
    expert = "mtp.layers.0.mlp.experts"
    parts = [
        torch.stack([drawn[f"{expert}.{e}.{k}_proj.weight"] for e in range(cfg.moe.experts)])
        for k in ("gate", "up", "down")
    ]
    stacked = {n: t for n, t in drawn.items() if expert not in n}
    stacked |= {f"{expert}.gate_up_proj": torch.cat(parts[:2], 1), f"{expert}.down_proj": parts[2]}
    kept = tensors_of(tmp_path / "hf")
    states = []
    for i, more in enumerate((drawn, stacked)):
        save_file(kept | more, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
        import_hf(tmp_path / "hf", tmp_path / f"step {i}", mtp=1)
        states.append(load_step(tmp_path / f"step {i}").state_dict())
        export_hf(tmp_path / f"step {i}", tmp_path / f"back {i}")
        assert_bits(tensors_of(tmp_path / f"back {i}"), kept | more)
    assert_bits(*states)
    assert carried_blocks(tmp_path / "hf", replace(cfg, mtp=MTPConfig())).endswith("trains them: 1")
    assert carried_blocks(tmp_path / "hf", cfg) == ""

    main = make(name)
    main.config.num_mtp_layers, main.config.mtp_layer_types = 1, ["full_attention"]
    mtp = MtpModel(main, 1).eval()
    block = {n.removeprefix("mtp.layers.0."): t for n, t in stacked.items() if "layers" in n}
    block = {f"mtp_block.{n}": t for n, t in block.items()}
    own = dict(enorm="pre_fc_norm_embedding", hnorm="pre_fc_norm_hidden", eh_proj="fc", post_norm="norm")
    mtp.layers[0].load_state_dict(block | {f"{a}.weight": stacked[f"mtp.{b}.weight"] for a, b in own.items()})
    assert_loss_of(load_step(tmp_path / "step 0").eval(), main, mtp)
