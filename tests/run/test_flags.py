"""A setting in errors: a flag on a command line, a name in Python; and which flag a wrong one meant."""

import io
import os
import pickle
import re
import socket
from types import SimpleNamespace

import forked
import pytest

import tmoe
from tmoe.base.wishes import wish
from tmoe.cli.flags import SYNONYMS, TASKS, flags_of_settings, meant_by, require_known, require_task
from tmoe.cli.parse import parse
from tmoe.config.axes import Axes
from tmoe.config.check import ConfigError, Setting, spelt
from tmoe.config.run import Config, GrpoConfig, TrainConfig
from tmoe.run.process import Runtime, signed

KNOWN = [flag for flag, _ in flags_of_settings(Config)]


@pytest.mark.parametrize(
    ("text", "flags", "names"),
    [
        (
            f"{Setting('model.moe.top_k', 9)}: must be 1 to {Setting('model.moe.experts', 8)}",
            "--model.moe.top-k=9: must be 1 to --model.moe.experts=8",
            "top_k=9: must be 1 to experts=8",
        ),
        (
            f"{Setting('model.dim', 3)}: with {Setting('model.moe.ffn_dim', 4)}",
            "--model.dim=3: with --model.moe.ffn-dim=4",
            "dim=3: with moe.ffn_dim=4",
        ),
        (
            f"{Setting('train.seq', 9)}: too much; torchrun --nproc-per-node 2 sets {Setting('world')}",
            "--train.seq=9: too much; torchrun --nproc-per-node 2 sets --world",
            "train.seq=9: too much; torchrun --nproc-per-node 2 sets world",
        ),
        (
            Setting("train.isolate_documents", False),
            "--train.no-isolate-documents",
            "isolate_documents=False",
        ),
        (f"{Setting('compile')}, {Setting('steps', -1)}", "--compile, --steps=-1", "compile, steps=-1"),
        ("no flag at all, --model.dim=3", "no flag at all, --model.dim=3", "no flag at all, --model.dim=3"),
    ],
)
def test_a_text_of_each_front(text, flags, names):
    assert spelt(text) == flags
    assert spelt(text, "name") == ConfigError(text).spelt("name") == names


def test_an_error_holds_its_fields_and_each_front_spells_it():
    """The file of a value is named after the value."""
    assert pickle.loads(pickle.dumps(Setting("model.dim", 3))) == Setting("model.dim", 3)
    wrong = f"must be 1 to {Setting('model.moe.experts', 8)}"
    made = ConfigError.of("model.moe.top_k", 9, wrong, "1, 2", "a.toml")
    for error in (made, pickle.loads(pickle.dumps(made))):
        found = (error.setting, error.value, error.wrong, error.valid, error.whence)
        assert found == ("model.moe.top_k", "9", "must be 1 to --model.moe.experts=8", "1, 2", "a.toml")
        line = "--model.moe.top-k=9 (from a.toml): must be 1 to --model.moe.experts=8; valid: 1, 2"
        assert error.spelt("flag") == line
        assert error.spelt("name") == "top_k=9 (from a.toml): must be 1 to experts=8; valid: 1, 2"
        key = "model.moe.top_k=9 (from a.toml): must be 1 to model.moe.experts=8; valid: 1, 2"
        assert error.spelt("key") == key
    with pytest.raises(ConfigError) as refused:
        TrainConfig(batch=0)
    assert (refused.value.setting, refused.value.value) == ("train.batch", "0")
    with pytest.raises(ConfigError) as refused:
        tmoe.MoEConfig(experts=8, groups=3)
    fields = refused.value.setting, refused.value.value, refused.value.wrong, refused.value.valid
    assert fields == ("model.moe.groups", "3", "must divide --model.moe.experts=8", "[1, 2, 4, 8]")
    switch = ConfigError.of("grpo.bitwise", True, f"needs {Setting('compile', False)}")
    assert (switch.value, switch.spelt("flag")) == ("", "--grpo.bitwise: needs --no-compile")
    plain = ConfigError("no model here")
    assert (plain.setting, plain.value, plain.wrong) == ("", "", "no model here")


def test_errors_are_of_the_front_that_asked():
    """One error for both: Python shows names, a command flags."""
    calls = {
        "top_k=9: must be 1 to experts=8": lambda: tmoe.MoEConfig(top_k=9),
        "batch=0: must be at least 1 and": lambda: TrainConfig(batch=0),
        "ep=3: must divide the world of 1 processes; valid: [1]": lambda: Axes.over(
            1, ep=3
        ),  # as build_mesh does
    }
    for says, call in calls.items():
        with pytest.raises(ConfigError) as told:
            call()
        assert told.value.spelt("name").startswith(says)


def test_python_and_a_command_in_one_process():
    """No switch of the process: a program that calls both gets names from the one, flags from the other."""
    code = """
import tmoe
from tmoe.cli.parse import parse
for call in (lambda: parse(["tiny", "--model.moe.top-k", "9"], ""), lambda: tmoe.MoEConfig(top_k=9)) * 2:
    try:
        call()
    except (SystemExit, ValueError) as error:
        print(error)
"""
    done = forked.run(["-c", code])
    assert done.stdout.splitlines() == ["2", "top_k=9: must be 1 to experts=8"] * 2
    assert done.stderr.count("error: --model.moe.top-k=9: must be 1 to --model.moe.experts=8\n") == 2


def test_another_files_keys():
    """A key stands for its setting; what the file has no key for stays a flag of train.py."""
    wrong = f"must be 1 to {Setting('model.moe.experts', 8)}"
    error = ConfigError.of("model.moe.top_k", 9, wrong).within("a/config.json")
    keys = {"model.moe.top_k": "num_experts_per_tok"}
    says = "a/config.json: num_experts_per_tok=9: must be 1 to --model.moe.experts=8"
    assert error.spelt(keys) == says


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--lr", "--optim.lr"),
        ("--train.lr", "--optim.lr"),
        ("--optim.learning-rate", "--optim.lr"),
        ("--optim.learning_rate", "--optim.lr"),
        ("--batch-size", "--train.batch"),
        ("--per-device-train-batch-size", "--train.batch"),
        ("--gradient_accumulation_steps", "--train.accumulate"),
        ("--train.bacth", "--train.batch"),
        ("--float8-recipe-name", "--train.float8"),
        ("--fp8-format", "--train.fp8"),
        ("--moe.num-experts", "--model.moe.experts"),
        ("--ep", "--parallel.ep"),
        ("--wd", "--optim.weight-decay"),
        ("--lora-r", "--lora.rank"),
        ("--use_peft", "--lora.rank"),
        ("--lora-target-modules", "--lora.targets"),
        ("--load_best_model_at_end", "--checkpoint.keep-best"),
        ("--ddp-timeout", "--train.collective-timeout"),
        ("--no-checkpoint.keep-best", "--checkpoint.no-keep-best"),
        ("--no-model.moe.renormalize", "--model.moe.no-renormalize"),
    ],
)
def test_which_flag_was_meant(word, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["tiny", word, "3"], "")
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {word}: no such flag; did you mean {meant}?\n"


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("--peft-method", "low-rank adapters are trained by train.py with --lora.rank N"),
        ("--qlora", "a frozen base in 4 bits is for low-rank adapters; valid: --lora.rank N --lora.base nf4"),
        ("--use_dora", "the low-rank adapters are LoRA and rsLoRA"),
        ("--load-in-4bit", "a frozen base in 4 bits is for low-rank adapters; valid: --lora.rank N"),
        ("--load-in-8bit", "weights of 8 bits and fewer are not trained; valid: bf16"),
        ("--quantize", "weights of 8 bits and fewer are not trained"),
        ("--fp4", "the narrowest products are in fp8: --train.fp8 experts, or all with dense layers"),
        ("--use-vllm", "another engine for rollouts is not there yet"),
        ("--adam8bit", "valid: --optim.states int8 stores AdamW's moments in 8 bits, bf16 in 16"),
        ("--optimizer", "another optimizer is not there yet; valid: AdamW"),
        ("--deepspeed", "tmoe divides weights automatically; valid: --parallel.shard"),
        ("--sft.packing", "tmoe always packs rows"),
        ("--assistant-only-loss", "tmoe trains the assistant's tokens and completions alone"),
        ("--ref_model", "the reference is the model that the run begins with"),
        ("--local-rank", "the launcher sets the number of processes"),
        ("--model", "a section of settings, as --model.vocab; did you mean --init DIR?"),
        ("--model.moe", "a section of settings, as --model.moe.experts"),
        ("--sft", "a section of settings, as --sft.neftune; did you mean --task sft?"),
    ],
)
def test_a_wish_is_answered_as_such(word, says):
    """A missing feature is no typing error: the answer names it, and the way to do the same."""
    with pytest.raises(ConfigError) as refused:
        require_known([word, "8"], Config)
    assert str(refused.value).startswith(f"{word}: no such flag; {says}")


def test_no_setting_is_a_wish():
    """Near misses of our own flags are typing errors."""
    assert [flag for flag in KNOWN if wish(flag)] == ["--load-optim"]
    require_known(["--load-optim", "--no-load-optim"], Config)
    with pytest.raises(ConfigError, match=r"did you mean --model.moe.quantile-ema\?"):
        require_known(["--quantile-emaa"], Config)


def test_another_trainers_name_of_a_task(capsys):
    assert all(meant.split()[0] in ("pretrain", "sft", "preference", "grpo") for meant in TASKS.values())
    with pytest.raises(SystemExit):
        parse(["tiny", "--task", "SimPO"], "")
    meant = "did you mean --task preference --preference.loss simpo?"
    said = capsys.readouterr().err
    assert said.startswith("error: --task=SimPO: no such task; valid: pretrain, sft") and meant in said
    with pytest.raises(ConfigError, match=r"--task=SFT: no such task; .*; did you mean --task sft\?"):
        require_task("SFT")
    for task in ("pretrain", "sft", "preference", "grpo", "nosuch", ""):
        require_task(task)


def test_answers_fit_into_the_row(capsys):
    """Half of a short row, 256 of a long one; a number that was typed is used or refused."""
    words = ["tiny", "--task", "grpo", "--grpo.rewards", "exact"]
    assert parse(words, "").answer_tokens == 64
    assert parse([*words, "--train.seq", "1024"], "").answer_tokens == 256
    assert parse([*words, "--grpo.max-tokens", "127"], "").answer_tokens == 127
    with pytest.raises(SystemExit):
        parse([*words, "--grpo.max-tokens", "128"], "")
    assert "error: --grpo.max-tokens=128: must be below --train.seq=128" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse([*words[:-1], "none.py:f:2", "--grpo.max-tokens", "128"], "")
    assert "error: --grpo.rewards=none.py:f:2: none.py: no such file" in capsys.readouterr().err
    with pytest.raises(ConfigError) as refused:
        GrpoConfig(rewards=("exact",), loss="cispo", clip_low=0.1)
    assert str(refused.value).startswith("--grpo.clip-low=0.1: --grpo.loss=cispo has neither")


def test_every_synonym_is_of_one_flag_of_its_section():
    assert SYNONYMS.keys() <= set(KNOWN)
    words = [(flag.rpartition(".")[0], word) for flag, words in SYNONYMS.items() for word in words.split()]
    assert len(words) == len(set(words)) and not any(f"--{word}" in KNOWN for _, word in words)
    assert meant_by("--zzzzzz", KNOWN) == []


@pytest.mark.parametrize(
    ("word", "flags"),
    [
        ("--grpo.num-generations", ["--grpo.group"]),
        ("--num-generations", ["--grpo.group"]),
        ("--grpo.max-completion-length", ["--grpo.max-tokens"]),
        ("--grpo.beta", ["--grpo.kl"]),  # and not --preference.beta, whose last part it is
        ("--beta", ["--preference.beta"]),
        ("--grpo.loss-type", ["--grpo.loss"]),
        ("--loss-type", ["--preference.loss", "--grpo.loss"]),
        ("--reward-funcs", ["--grpo.rewards"]),
        ("--grpo.learning-rate", ["--optim.lr"]),
    ],
)
def test_other_trainers_names_of_posttraining(word, flags):
    assert meant_by(word, KNOWN) == flags


def test_valid_degrees_are_valid():
    """ep divides the world and the experts."""
    with pytest.raises(ConfigError, match=re.escape("processes; valid: [1, 2, 4]")):
        Axes.over(12, ep=8, experts=128)
    with pytest.raises(ConfigError, match=re.escape("processes; valid: [1, 2, 3, 4, 6, 12]")):
        Axes.over(12, ep=8)


@pytest.mark.parametrize("place", ["/proc/x", "/dev/null/x"])
def test_a_place_where_no_folder_can_be_made(place):
    alone = SimpleNamespace(rank=0, on_all_ranks=lambda work: work())
    with pytest.raises(
        ConfigError, match=rf"--out={place}: no files can be made there \((No|Not)[^E]*\); name"
    ):
        Runtime.claim(alone, place)


def test_a_run_folder_in_use_names_its_process(tmp_path):
    """The lock holds process and host, and a later holder's alone: the text of the longer one is gone."""
    alone = SimpleNamespace(rank=0, on_all_ranks=lambda work: work())
    (tmp_path / ".lock").write_text("1234567890 a-longer-name-than-any-host-has-here.example.org\n" * 2)
    held = Runtime.claim(alone, tmp_path)
    assert (tmp_path / ".lock").read_text() == f"{os.getpid()} {socket.gethostname()}\n"
    with open(tmp_path / ".lock", "rb") as file:
        assert signed(file) == f", {os.getpid()} on {socket.gethostname()},"
    held.close()
    with io.BytesIO() as empty:
        assert signed(empty) == ""


def test_no_steps_are_nothing_to_do(capsys):
    with pytest.raises(SystemExit):
        parse(["tiny", "--steps", "0"], "")
    assert "--steps=0: nothing to do; valid: 1 or more, or --eval-only" in capsys.readouterr().err
    assert parse("tiny --steps 0 --dry-run".split(), "").steps == 0
