"""The entry of `python -m tmoe.warmup` and `tmoe warmup`: the command is tmoe/commands/warmup_command.py."""

import importlib

from tmoe.commands.warmup_command import main


def __getattr__(name: str) -> object:
    """The names that were in this file before are in tmoe/commands/warmup.py, which loads Triton."""
    return getattr(importlib.import_module("tmoe.commands.warmup"), name)


if __name__ == "__main__":
    main()
