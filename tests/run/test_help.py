"""The first page of train.py --help: by task, at most 120 lines, with the defaults that apply.

next: tmoe/cli/help.py
"""

import pytest

from tmoe.cli.flags import flags_of_settings
from tmoe.cli.help import COLUMNS, LINES, PAGES, in_short, meanings
from tmoe.cli.parse import parse, value_at
from tmoe.config.run import Config


def shown(words: str, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(words.split(), "")
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("task", PAGES)
def test_the_page_of_a_task(task, capsys):
    text = shown(f"tiny --task {task} --help", capsys)
    lines = text.splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS
    assert f"The settings most used with --task {task}; in brackets the defaults of tiny." in lines
    for other in PAGES.keys() - {task, "pretrain"}:
        assert f"--{other}." not in text
    assert "--help-all" in text and "--train.seq N [128]" in text


def test_defaults_are_those_of_preset_and_task(capsys):
    assert "--train.seq N [4096]" in shown("qwen3-30b-a3b -h", capsys)
    text = shown("tiny --task grpo --help", capsys)
    assert "--grpo.max-tokens N [None]" in text and "None: 256, or half of" in text
    assert "[grpo]" in text and "--grpo.overlong train|drop [train]" in text


def test_every_setting_has_a_line_of_help_all(capsys):
    text = shown("tiny --help-all", capsys)
    assert all(flag in text for flag, _ in flags_of_settings(Config))


def test_pages_name_settings_that_there_are():
    for page in PAGES.values():
        names = [name for names in page.values() for name in names.split()]
        assert len(names) == len(set(names))
        for name in names:
            value_at(Config(), name)


def test_a_meaning_in_short():
    text = "how rows travel: local (ep=1; one rank),\nnccl; the rest. None: what is left; more"
    assert in_short(text, False) == "how rows travel: local (ep=1; one rank), nccl"
    assert in_short(text, True) == "how rows travel: local (ep=1; one rank), nccl; None: what is left"
    assert meanings(Config)["eval_only"] == "validate and exit"
