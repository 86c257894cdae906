"""Old names of modules, as notes and programs from before the rooms have them.

next: tmoe/base/moved.py
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tmoe.base.moved import moved

PAGE = Path(__file__).parents[1] / "docs/moved.md"


def test_the_page_and_the_names_agree():
    rows = re.findall(r"^\| (tmoe/\S+)\.py \| (tmoe/\S+)\.py \|", PAGE.read_text(), re.M)
    page = {old.replace("/", "."): new.replace("/", ".") for old, new in rows}
    assert moved().items() <= page.items()
    assert not [new for new in moved().values() if find_spec(new) is None]


def test_an_old_name_is_the_module_and_warns():
    with pytest.warns(DeprecationWarning, match=r"tmoe\.run\.defaults is tmoe\.cli\.defaults now"):
        old = importlib.import_module("tmoe.run.defaults")
    new = importlib.import_module("tmoe.cli.defaults")
    assert old is new and new.__spec__.name == new.__name__ == "tmoe.cli.defaults"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("tmoe.run.nothing")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_became_a_package_or_a_command_gives_its_functions():
    from tmoe.data import chat
    from tmoe.data.chat import encoding
    from tmoe.extras.migrate import translate as command

    assert chat.chat_prompt is encoding.chat_prompt and chat.encode is encoding.encode
    assert importlib.import_module("tmoe.migrate.command") is command
    door = importlib.import_module("tmoe.upcycle")
    del sys.modules["tmoe.upcycle"]  # runpy warns of a module that is imported already
    assert door.main is importlib.import_module("tmoe.extras.upcycle").main
