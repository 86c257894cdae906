"""Where settings come from below the flags: a run folder, a file, --init's folder; differences as flags.

next: tmoe/cli/settings.py
"""

import json
import re
import shlex
import tomllib
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hf_tiny import saved
from runs import SMALL, refusal, run

from tmoe.checkpoint.errors import MismatchError
from tmoe.cli.parse import check_start, flags_of, parse
from tmoe.cli.settings import with_settings
from tmoe.config.compare import as_flags, differences
from tmoe.config.presets import presets
from tmoe.hf import import_hf, load_hf
from tmoe.hf.config import read_config
from tmoe.hf.files import Folder

TOML = """
out = "here"
steps = 7
[train]
batch = 3
eval-every = 2
[model]
windowed = [1, 0]
[model.moe]
top_k = 1
renormalize = false
[optim]
lr = 1
"""


def test_a_file_lies_between_preset_and_flags(tmp_path, capsys):
    """TOML and the same in JSON; keys with - or _; a whole number where a float is meant."""
    (tmp_path / "a.toml").write_text(TOML)
    cfg = parse(["tiny", f"--config={tmp_path / 'a.toml'}", "--train.batch", "5"], "")
    tiny = presets()["tiny"]
    assert (cfg.out, cfg.steps, cfg.train.batch, cfg.train.eval_every) == ("here", 7, 5, 2)
    assert (cfg.model.windowed, cfg.model.moe.top_k, cfg.model.moe.renormalize) == ((1, 0), 1, False)
    assert cfg.optim == replace(tiny.optim, lr=1, warmup=0) and cfg.train.seq == tiny.train.seq
    assert f"note: settings of {tmp_path / 'a.toml'}\n" in capsys.readouterr().err

    told = dict(out="here", steps=7, train=dict(batch=5, eval_every=2), optim=dict(lr=1))
    told["model"] = dict(windowed=[1, 0], moe=dict(top_k=1, renormalize=False))
    (tmp_path / "a.json").write_text(json.dumps(told))
    assert parse(["--config", str(tmp_path / "a.json")], "") == cfg


def test_a_word_is_a_list_of_one(tmp_path):
    (tmp_path / "a.toml").write_text("[data]\npath = 'x'")
    assert parse(["--config", str(tmp_path / "a.toml")], "").data.path == ("x",)


@pytest.mark.parametrize(("name", "text"), [("a.toml", "steps = 3\r\n"), ("a.json", '{"steps": 3}')])
def test_a_byte_order_mark_is_left_out(tmp_path, name, text):
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert parse(["--config", str(tmp_path / name)], "").steps == 3


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.toml", "[train]\nbatc = 3", r"a.toml: train.batc: no such setting; did you mean train.batch\?"),
        ("a.toml", "[train]\nbatch = 'x'", "a.toml: train.batch='x': must be a whole number"),
        ("a.toml", "train = 3", "a.toml: train=3: must hold nested settings"),
        ("a.toml", "[model.moe]\ntop_k = 9", r"a.toml: model.moe.top_k=9: must be 1 to model.moe.experts=8"),
        ("a.toml", "steps", "a.toml: cannot be read: "),
        ("a.toml", "a-b = 1\n", "a.toml: a-b: no such setting; there are: task, out"),
        ("a.toml", "eval_only = true\neval-only = true", "a.toml: eval-only: is there twice"),
        ("a.toml", "task = 'DPO'", "a.toml: task=DPO: no such task; .* did you mean task preference"),
        ("a.toml", "lora_r = 8", r"a.toml: lora_r: no such setting; did you mean lora.rank\?"),
        ("a.toml", "learning-rate = 1", r"no such setting; did you mean optim.lr\?"),
        ("a.toml", "[optim]\nlearning_rate = 1", r"no such setting; did you mean optim.lr\?"),
        ("a.json", '{"optim": {"lr": 1, "lr": 2}}', "a.json: cannot be read: lr is there twice"),
        ("a.json", '{"train.batch": 3}', 'sections are nested; valid: {"train": {"batch": 3}}'),
        ("a.json", "[]", "a.json: must be an object of settings"),
        ("a.json", '{"data": {"path": 3}}', "a.json: data.path=3: must be a list, each text"),
        ("a.yaml", "", "a.yaml: must be a .toml or .json file"),
    ],
)
def test_a_file_that_says_no_settings(tmp_path, capsys, name, text, says):
    (tmp_path / name).write_text(text)
    assert re.search(says, refusal(["tiny", "--config", str(tmp_path / name)], capsys))


def test_a_file_that_is_not_there(tmp_path, capsys):
    said = refusal(["--config", str(tmp_path / "a.toml")], capsys)
    assert f"--config={tmp_path / 'a.toml'}: no such file" in said
    assert "--config: needs a file" in refusal(["--config"], capsys)
    said = refusal(["--config=a.toml", "--config", "b.toml"], capsys)
    assert "--config=b.toml: one file at most, and --config=a.toml is the first" in said


@pytest.mark.slow
def test_a_run_folder_goes_on_with_its_settings(gloo, tmp_path, capsys):
    """Wherever it was moved, and without what its last start did once."""
    out = tmp_path / "a"
    words = [*SMALL, "--steps", "1", "--out", str(out), "--optim.ema", "0.5", "--no-load-rng"]
    gloo(1, run, words)
    moved = tmp_path / "b"
    out.rename(moved)
    cfg = parse([str(moved), "--steps", "2"], "")
    asked = parse([*words, "--steps", "2"], "")
    assert cfg == replace(asked, out=str(moved), load_rng=True)
    assert f"note: settings of {moved / 'config.json'}\n" in capsys.readouterr().err

    # The run continues there, and a copy of its settings starts a new run elsewhere.
    gloo(1, run, [str(moved), "--steps", "2"])
    starts = json.loads((moved / "config.json").read_text())["starts"]
    assert [start["step"] for start in starts] == [0, 1]
    config = str(moved / "config.json")
    assert parse(["--config", config, "--out", "c"], "") == replace(cfg, out="c")

    # A folder that is no run folder is named as what it is.
    step = moved / "checkpoints/step-2"
    assert f"its weights are taken with --init {step}" in refusal([str(step)], capsys)
    goes_on = f"; train.py {moved} continues its run\n"
    assert refusal([str(step)], capsys).endswith(goes_on)
    said = refusal([str(moved / "checkpoints")], capsys)
    assert f"{moved / 'checkpoints'}: no run folder: it has no config.json{goes_on}" in said
    said = refusal([config], capsys)
    assert f"its settings are taken with --config {config}{goes_on}" in said

    # A step says its run's model.
    model = parse(["--init", str(step), "--dry-run"], "").model
    assert model == cfg.model


def test_accumulate_follows_a_global_batch_anew(tmp_path):
    """A run's config.json holds the accumulate for that run's number of ranks."""
    cfg = parse(["tiny", "--train.global-batch", "32", "--train.batch", "4"], "")
    assert cfg.train.accumulate == 8
    (tmp_path / "config.json").write_text(json.dumps(dict(config=asdict(cfg))))
    assert parse([str(tmp_path)], "", world=2).train.accumulate == 4


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "granitemoe", "gpt_oss"])
def test_the_folder_to_start_from_says_the_model(tmp_path, capsys, name):
    hf_dir = saved(tmp_path / "hf", name)
    theirs = read_config(Folder(hf_dir).config)
    cfg = parse(["--init", str(hf_dir), "--dry-run", "--optim.lr", "1e-5"], "")
    assert cfg.model == theirs and cfg.optim.lr == 1e-5
    assert cfg.train.seq == min(4096, theirs.rope.max_seq)
    assert f"note: the model's settings are those of {hf_dir}\n" in capsys.readouterr().err
    assert parse([f"--init={hf_dir}", "--model.dropout", "0.1"], "").model == replace(theirs, dropout=0.1)

    # The same of an import, and of a file that names the folder.
    import_hf(hf_dir, tmp_path / "step")
    assert not differences(parse(["--init", str(tmp_path / "step"), "--dry-run"], "").model, theirs)
    (tmp_path / "a.toml").write_text(f"init = '{hf_dir}'\n[train]\nbatch = 2")
    cfg = parse(["--config", str(tmp_path / "a.toml")], "")
    assert cfg.model == theirs and cfg.train.batch == 2 and cfg.init == str(hf_dir)

    # With a preset it is refused with the flags that are missing; with these it is taken.
    with pytest.raises(MismatchError) as refused:
        load_hf(hf_dir, {}, presets()["tiny"].model)
    flags = re.search(r"\nthe same model by flags: (.*)$", str(refused.value))
    cfg = parse(["tiny", "--train.seq", "8", *shlex.split(flags[1])], "")
    assert not differences(cfg.model, theirs)


def test_a_run_folder_to_start_from_means_its_newest_whole_step(tmp_path, capsys):
    """A newer step without all its bytes is named and left; the model is that of the step taken."""
    steps = tmp_path / "a/checkpoints"
    import_hf(saved(tmp_path / "old", "mixtral"), steps / "step-2")
    import_hf(saved(tmp_path / "new", "qwen3_moe"), steps / "step-1")  # saved last: a run that went back
    theirs = {name: read_config(Folder(tmp_path / name).config) for name in ("old", "new")}
    capsys.readouterr()

    def start(init: Path) -> tuple[str, str]:
        cfg = parse(["--init", str(init), "--train.seq", "8"], "")
        assert not differences(cfg.model, theirs["new" if cfg.init.endswith("step-1") else "old"])
        return cfg.init, capsys.readouterr().err

    for init in (tmp_path / "a", steps):
        init_of_run, said = start(init)
        assert init_of_run == str(steps / "step-1")
        assert said.endswith(f"note: --init={init}: its newest whole step is {steps / 'step-1'}\n")

    # A resume is of a step: another name is an error, which names the newest.
    a_file = steps / "step-1/manifest.json"
    for resume, says in (
        (tmp_path / "a", f"no step folder; did you mean {steps / 'step-1'}?"),
        (tmp_path / "old", "no step folder, or one that was never finished; valid: auto, none or a step"),
        (tmp_path / "no", "no such folder; valid: auto, none or a step folder"),
        (a_file, f"a file, and no folder; name the folder that holds it: {a_file.parent}; valid: auto, none"),
    ):
        words = ["tiny", "--resume", str(resume)]
        with pytest.raises(SystemExit):
            check_start(words, parse(words, ""), 0)
        assert f"error: --resume={resume}: {says}" in capsys.readouterr().err

    # The newest has lost a byte, and then the other one its manifest.
    shard = next((steps / "step-1").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    init_of_run, said = start(tmp_path / "a")
    assert init_of_run == str(steps / "step-2")
    assert f"note: skipped a damaged checkpoint: {shard}: damaged: " in said
    (steps / "step-2/manifest.json").write_text("{")
    said = refusal(["--init", str(tmp_path / "a")], capsys)
    assert said.count("\n") == 1 and f"--init={tmp_path / 'a'}: {steps}: no whole checkpoint: {steps}" in said

    # A run without a step, and one whose disk is not mounted.
    (tmp_path / "b").mkdir()
    said = refusal(["--init", str(tmp_path / "b")], capsys)
    assert said.count("\n") == 1 and "; valid: a run folder, a step folder or a Hugging Face folder" in said
    (tmp_path / "b/checkpoints").symlink_to(tmp_path / "c")
    said = refusal(["--init", str(tmp_path / "b")], capsys)
    assert f"--init={tmp_path / 'b'}: {tmp_path / 'b/checkpoints'}: a link to nothing" in said


def test_ranks_compare_the_weights_that_they_start_from(tmp_path):
    """A run that still saves may show a newer step to another node; a node may have its own copy."""

    def told(step: str, hf_dir: Path) -> str:
        import_hf(hf_dir, tmp_path / step)
        return flags_of(replace(presets()["tiny"], init=str(tmp_path / step)))["--init"]

    mixtral, qwen = saved(tmp_path / "a", "mixtral"), saved(tmp_path / "b", "qwen3_moe")
    assert told("step-1", mixtral) == told("copy", mixtral) != told("step-2", qwen)


def test_a_preset_beside_another_model_is_the_word_at_fault(tmp_path, capsys):
    """The answer is no larger --model.vocab, which the tokenizer would ask for."""
    hf_dir = saved(tmp_path / "hf", "mixtral")
    capsys.readouterr()
    words = ["tiny", "--init", str(hf_dir)]
    cfg = parse(words, "")
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        check_start(words, cfg, 0)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert said.startswith(f"error: tiny: this preset is another model than --init={hf_dir} (model.vocab: ")
    assert "; valid: no preset, for --init says the model, or the same model by flags: --model.vocab" in said
    flags = re.search(r"the same model by flags: (.*)$", said)[1]
    words = ["tiny", "--init", str(hf_dir), "--train.seq", "8", *shlex.split(flags)]
    cfg = parse(words, "")
    check_start(words, cfg, 0)
    assert not differences(cfg.model, read_config(Folder(hf_dir).config))


@pytest.mark.parametrize("name", list(presets()))
def test_differences_as_flags_are_enough(name):
    """From another model, and nothing for the model itself or for what training alone reads."""
    model = presets()[name].model
    words = as_flags(presets()["gpt-oss-20b"].model, model).partition(": ")[2].split()
    cfg = parse(["gpt-oss-20b", *words, "--train.seq", "64", "--dry-run"], "")
    assert not differences(cfg.model, model)
    moe = replace(model.moe, balance="none", z_coeff=0.0)
    assert as_flags(model, replace(model, dropout=0.3, moe=moe)) == ""


def test_empty_lists_and_none_are_flags():
    tiny = presets()["tiny"].model
    ours = replace(tiny, dense_blocks=(1,), attention_multiplier=0.5, tied=True)
    words = as_flags(ours, tiny).partition(": ")[2].split()
    assert words == "--model.attention-multiplier None --model.dense-blocks --model.no-tied".split()
    there = ["--model.tied", "--model.dense-blocks", "1", "--model.attention-multiplier", "0.5"]
    assert parse(["tiny", *there, *words], "").model == tiny


def test_no_folder_to_start_from(capsys, monkeypatch, tmp_path):
    said = refusal(["--init", "runs/a/checkpoints/step-9"], capsys)
    assert "step-9: no such folder; valid: a run folder, a step folder or a Hugging Face folder" in said
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = refusal(["--init", "Qwen/Qwen3-30B-A3B"], capsys)
    assert "--init=Qwen/Qwen3-30B-A3B: no such folder here, and no download from the hub" in said
    assert "hf download Qwen/Qwen3-30B-A3B --local-dir Qwen/Qwen3-30B-A3B" in said and "mean" not in said
    # a run's path has the form of a name on the hub
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/facts").mkdir(parents=True)
    said = refusal(["--init", "runs/fact"], capsys)
    assert said.startswith("error: --init=runs/fact: no such folder here, and no download from the hub")
    assert said.endswith("; did you mean runs/facts?\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tinny"], r"preset 'tinny': must be one of tiny, .*; or a run folder; did you mean tiny\?"),
        (["Qwen3_30B"], r"; did you mean qwen3-30b-a3b\?"),
        (["zzz"], r"preset 'zzz': must be one of tiny, .*; or a run folder$"),
        (["runs/none"], "^error: runs/none: no such run folder$"),
        (["--steps", "5", "tiny"], r"tiny: a preset or .* the first word: train.py tiny --steps"),
        (["tiny", "tiny"], "tiny: one preset or run folder at most, and tiny is the first"),
        (["--eval-only", "tiny"], r"--eval-only=tiny: .*; a preset .*: train.py tiny --eval-only$"),
        (["--eval-only", "tino"], "--eval-only=tino: must be true or false$"),
    ],
)
def test_a_first_word_that_is_none_or_stands_elsewhere(capsys, words, says):
    assert re.search(says, refusal(words, capsys), re.M)


def test_an_environment_without_a_compiler_is_heard(monkeypatch, capsys):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert not parse(["tiny"], "").compile
    assert "note: TORCH_COMPILE_DISABLE=1 in the environment: running eager" in capsys.readouterr().err


def test_a_hugging_face_folder_is_no_run(tmp_path, capsys):
    hf_dir = saved(tmp_path / "hf", "mixtral")
    assert f"start from it with --init {hf_dir}" in refusal([str(hf_dir)], capsys)


def test_the_file_that_the_page_shows():
    """docs/settings.md's TOML names settings that there are."""
    page = (Path(__file__).parents[2] / "docs/settings.md").read_text()
    (block,) = re.findall(r"^```toml\n(.*?)^```$", page, re.M | re.S)
    cfg = with_settings(presets()["qwen3-30b-a3b"], tomllib.loads(block), "the page")
    assert (cfg.steps, cfg.train.global_batch, cfg.model.moe.balance_coeff) == (2000, 64, 0.001)
