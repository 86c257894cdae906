"""The door of `python -m tmoe.routing` and `tmoe routing`: tmoe/commands/routing.py has the command."""

import functools

from tmoe.commands import routing as moved

__getattr__ = functools.partial(getattr, moved)

if __name__ == "__main__":
    moved.command()
