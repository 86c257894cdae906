"""Errors of every command: one line on stderr that begins with `error: `, without a frame, and an exit code.

next: tmoe/front.py
"""

import errno
import json
import re
import runpy
import sys
from dataclasses import asdict

import pytest

from tmoe import front
from tmoe.base.disk import expand_home
from tmoe.checkpoint import tools
from tmoe.cli.parse import parse
from tmoe.commands import report as report_command
from tmoe.commands import rollouts, routing, warmup_command
from tmoe.config.check import ConfigError
from tmoe.extras import upcycle
from tmoe.extras.migrate import translate as migrate
from tmoe.generate import command_line as generate
from tmoe.hf import command_line as hf_command


def function(main, prog):
    """A command that is a function, as its file starts it."""

    def run(words):
        with front.one_message():
            front.call(main, prog, expand_home(words))

    return run


def data(words):
    sys.argv = ["tmoe.data", *words]
    runpy.run_module("tmoe.data", run_name="__main__", alter_sys=True)


def warm(words):
    sys.argv = ["tmoe.warmup", *words]
    warmup_command.main()


COMMANDS = {
    "train": lambda words: parse(words, ""),
    "generate": generate.main,
    "data": data,
    "checkpoint": tools.main,
    "hf": hf_command.main,
    "upcycle": upcycle.main,
    "migrate": migrate.main,
    "report": function(report_command.main, "python -m tmoe.report"),
    "routing": function(routing.main, "python -m tmoe.routing"),
    "rollouts": function(rollouts.main, "python -m tmoe.rollouts"),
    "warmup": warm,
}
# command and words -> what the line names
WRONG = [
    # a flag that there is not
    ("train", "tiny --nosuch 3", "--nosuch: no such flag"),
    ("train", "tiny -x 3", "-x: no such flag"),
    ("generate", "RUN --temprature 1", "--temprature: no such flag; did you mean --temperature"),
    ("generate", "RUN --prompt x", "--prompt: no such flag; give its value alone, as a word"),
    ("data", "a --out b --tokeniser x", "--tokeniser: no such flag; did you mean --tokenizer"),
    ("checkpoint", "inspect STEP --tensr x", "--tensr: no such flag; did you mean --tensor"),
    ("hf", "export A B --lik C", "--lik: no such flag; did you mean --like"),
    ("upcycle", "A B --expert 4 --top-k 2", "--expert: no such flag; did you mean --experts"),
    ("report", "RUN --dpi 3", "--dpi: no such flag"),
    ("routing", "RUN --outt 3", "--outt: no such flag; did you mean --out"),
    ("rollouts", "RUN --bset 3", "--bset: no such flag; did you mean --best"),
    ("warmup", "--nosuch", "--nosuch"),
    # a value of another type
    ("train", "tiny --train.batch x", "--train.batch=x: must be a whole number"),
    ("train", "tiny --model.heads 3.5", "--model.heads=3.5: must be a whole number"),
    ("train", "tiny --optim.betas a b", "--optim.betas=a b: must be a list of 2, each a number"),
    ("train", "tiny --compile maybe", "--compile=maybe: must be true or false"),
    ("train", "tiny --world x", "--world=x: must be a whole number or none"),
    ("generate", "RUN --temperature warm", "--temperature=warm: must be a number or none"),
    ("generate", "RUN -n x", "-n=x: must be a whole number"),
    ("data", "a --out b --shard-tokens x", "--shard-tokens=x: must be a whole number"),
    ("checkpoint", "reshard A B --world x", "--world=x: must be a whole number"),
    ("hf", "import A B --world x", "--world=x: must be a whole number"),
    ("upcycle", "A B --experts x --top-k 2", "--experts=x: must be a whole number"),
    ("rollouts", "RUN --step x", "--step=x: must be a whole number or none"),
    ("warmup", "--processes x", "--processes"),
    # a value that is none of the choices
    ("train", "tiny --train.dtype fp8", "--train.dtype=fp8: must be one of bf16, fp16, fp32"),
    ("train", "tiny --task dpo", "--task=dpo: no such task; valid: pretrain, sft, preference, grpo; did"),
    ("train", "tiny --task sftt", "--task=sftt: must be one of pretrain, sft"),
    ("train", "tinny", "'tinny': must be one of tiny"),
    ("train", "tiny --grpo.loss ppo", "--grpo.loss=ppo: must be one of dapo"),
    ("generate", "RUN --dtype fp8", "--dtype=fp8: must be one of bf16, fp32 or none"),
    ("checkpoint", "reshard A B --world 1 --dtype x", "--dtype=x: must be one of"),
    ("hf", "export A B --dtype x", "--dtype=x: must be one of bf16, fp32"),
    ("migrate", "gshard", "gshard: must be one of megatron"),
    ("warmup", "tinny", "'tinny': valid are tiny"),
    # what another trainer calls a value
    ("train", "tiny --task preference --preference.loss dpo", "kto; did you mean sigmoid?"),
    ("train", "tiny --task preference --preference.loss kto_pair", "kto; did you mean kto?"),
    ("train", "tiny --task preference --preference.loss slic_hf", "kto; did you mean hinge?"),
    ("train", "tiny --train.dtype bfloat16", "must be one of bf16, fp16, fp32; did you mean bf16?"),
    # a value out of range
    ("train", "tiny --train.batch 0", "--train.batch=0: must be at least 1"),
    ("train", "tiny --steps=-1", "--steps=-1: must be at least 0"),
    ("train", "tiny --parallel.ep 3", "--parallel.ep=3: must divide --model.moe.experts=8; valid: [1, 2, 4"),
    ("generate", "RUN -n 0", "-n=0: must be at least 1"),
    ("checkpoint", "reshard A B --world 4 --ep 3", "--world=4 --ep=3: both at least 1"),
    ("hf", "import A B --world 4 --ep 3", "--world=4 --ep=3: both at least 1"),
    ("warmup", "--processes -3", "--processes"),
    # a word that looks like a flag, in front of the positional ones
    ("hf", "export --lora A B", "--lora: no such flag; low-rank adapters are trained by train.py"),
    ("checkpoint", "verify --nosuch A", "--nosuch: no such flag"),
    # no value
    ("train", "tiny --train.batch", "--train.batch: needs a value; must be a whole number"),
    ("train", "--config", "--config: needs a file"),
    ("train", "tiny --optim.betas 1", "--optim.betas=1: needs 2 values"),
    ("generate", "RUN --top-k", "--top-k: needs a value"),
    ("generate", "", "RUN|STEP|HF_DIR: missing"),
    ("data", "a", "--out: missing"),
    ("data", "--facts", "--facts: needs a value; must be a path"),
    ("checkpoint", "", "needs a command; valid: inspect, verify, reshard, average"),
    ("checkpoint", "inspect", "STEP: missing"),
    ("hf", "export A", "HF_DIR: missing"),
    ("migrate", "", "needs a command; valid: megatron, tutel"),
    ("upcycle", "A", "MOE_STEP, --experts, --top-k: missing"),
    ("report", "", "RUN: missing"),
    ("rollouts", "RUN --best", "--best: needs a value"),
    ("warmup", "--arch", "--arch"),
    # a word too many, a command that there is not
    ("train", "tiny foo", "foo: unexpected word"),
    ("train", "--steps 3 tiny", "tiny: a preset or a run folder is the first word"),
    ("generate", "A B C", "C: unexpected word"),
    ("checkpoint", "inspct A", "inspct: no such command; valid: inspect, verify, reshard, average"),
    ("hf", "exprt A", "exprt: no such command"),
    ("report", "A B", "B: unexpected word"),
    ("train", "tiny -- --steps 3", "--: no such flag"),
    # what is not there
    ("train", "NONE/run", "NONE/run: no such run folder"),
    ("train", "--config NONE.toml", "--config=NONE.toml: no such file"),
    ("train", "--init NONE/step-3", "NONE/step-3: no such folder"),
    ("generate", "NONE/step-3 x", "NONE/step-3"),
    ("generate", "RUN --file NONE.jsonl", "--file=NONE.jsonl: no such file"),
    ("data", "NONE.txt --out b", "NONE.txt: no such file or folder"),
    ("checkpoint", "inspect NONE", "NONE: no such folder; valid: a step folder or a run folder"),
    ("generate", "RUN --file a --out NONE/b", "--out=NONE/b: its folder is not there"),
    ("hf", "export NONE B", "NONE"),
    ("upcycle", "NONE B --experts 4 --top-k 2", "NONE"),
    ("report", "NONE", "NONE/metrics.jsonl: missing"),
    ("routing", "NONE", "NONE"),
    ("rollouts", "NONE", "NONE"),
    # what does not go together
    ("train", "tiny --data.val-path a --data.split 8 1 1", "--data.val-path=a: not with --data.split"),
    (
        "train",
        "tiny --optim.warmup 3 --optim.warmup-fraction .1",
        "--optim.warmup=3, --optim.warmup-fraction=",
    ),
    ("generate", "RUN x --out a", "--out=a: needs --file"),
    ("generate", "RUN x --system a", "--system='a': needs --chat"),
    ("hf", "export A B --private", "--private: needs --push"),
    (
        "train",
        "tiny --model.moe.balance sequence:0.02 --model.moe.balance-coeff 0.5",
        "--model.moe.balance-coeff=0.5: unused with --model.moe.balance=sequence:0.02",
    ),
    ("rollouts", "RUN --best 1 --worst 1", "--best=1, --worst=1: give one of them"),
]


def error_of(command, words, capsys) -> tuple[str, int]:
    """The line that a command ends with, and its exit code."""
    with pytest.raises(SystemExit) as ended:
        COMMANDS[command](words)
    code = ended.value.code
    return capsys.readouterr().err, code


@pytest.mark.parametrize(("command", "words", "says"), WRONG)
def test_an_error_is_one_line(command, words, says, capsys, monkeypatch, tmp_path):
    """No frame, no wrap at 80 columns: one line, as a grep finds it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tmoe"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line, code = error_of(command, words.split(), capsys)
    assert line.startswith("error: ") and line.count("\n") == 1 and says in line, line
    assert code == 2 and not re.search(r"[│╭╰─╮╯]|Traceback", line)


def test_the_front_of_argparse(capsys, monkeypatch):
    """One line without a usage; the first rank of a node prints it."""
    parser = front.Parser("An example.")
    parser.add_argument("--ep", type=int)
    for words, says in (
        (["--nosuch", "3"], "error: --nosuch: no such flag; --help shows all\n"),
        (["--ep", "x"], "error: --ep: invalid int value: 'x'\n"),
    ):
        for rank, printed in (("0", says), ("1", "")):
            monkeypatch.setenv("LOCAL_RANK", rank)
            with pytest.raises(SystemExit) as ended:
                parser.parse_args(words)
            assert ended.value.code == 2 and capsys.readouterr().err == printed


def test_a_fault_of_the_machine_ends_with_another_code(capsys):
    """A full disk is no wrong command, wherever the error is wrapped; a missing file is."""

    def ended_by(error, cause=None):
        with pytest.raises(SystemExit) as ended, front.one_message():
            raise error from cause
        return 1 if isinstance(ended.value.code, str) else ended.value.code

    full = OSError(errno.ENOSPC, "No space left on device")
    assert ended_by(full) == 1 and ended_by(ValueError("not written"), full) == 1
    assert (
        ended_by(FileNotFoundError(errno.ENOENT, "no such file")) == 2
        and ended_by(ValueError("bad row")) == 2
    )
    assert capsys.readouterr().err.count("error: ") == 2


def test_a_value_of_a_file_names_the_file(tmp_path, capsys):
    """Resumed on one process, a run of two is refused by the file that holds the 2; a typed 2 has no file."""
    cfg = asdict(parse(["tiny", "--out", str(tmp_path)], ""))
    cfg["parallel"]["ep"] = 2
    (tmp_path / "config.json").write_text(json.dumps(dict(config=cfg)))
    line, _ = error_of("train", [str(tmp_path)], capsys)
    place = tmp_path / "config.json"
    assert f"error: --parallel.ep=2 (from {place}): must divide the world of 1 processes; valid: [1]" in line
    line, _ = error_of("train", [str(tmp_path), "--parallel.ep", "2"], capsys)
    assert "error: --parallel.ep=2: must divide the world" in line
    line, _ = error_of("train", [str(tmp_path), "--parallel.ep", "1", "--parallel.tp", "5"], capsys)
    assert f"--parallel.tp=5: must divide --model.heads=6 (from {place}) and fit" in line

    own = tmp_path / "own.toml"
    own.write_text("[parallel]\nep = 2\n")
    line, _ = error_of("train", ["tiny", "--config", str(own)], capsys)
    assert f"error: --parallel.ep=2 (from {own}): must divide the world" in line


def test_errors_in_a_run_name_the_file_as_well(monkeypatch):
    """Errors of all ranks after the command line was read are spelt at the same front."""
    front.remember({"--train.batch": (8, "a/config.json")})
    error, other = (ConfigError.of("train.batch", batch, "too much") for batch in (8, 80))
    assert front.spelt(error) == "--train.batch=8 (from a/config.json): too much"
    assert front.spelt(other) == "--train.batch=80: too much"
    front.remember({})
