"""The door of `python -m tmoe.report` and `tmoe report`: tmoe/commands/report.py has the command."""

import functools

from tmoe.commands import report as moved

__getattr__ = functools.partial(getattr, moved)

if __name__ == "__main__":
    moved.command()
