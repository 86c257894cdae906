"""The entry of `python -m tmoe.report` and `tmoe report`: the command is tmoe/commands/report.py."""

import functools

from tmoe.commands import report as moved

__getattr__ = functools.partial(getattr, moved)

if __name__ == "__main__":
    moved.command()
