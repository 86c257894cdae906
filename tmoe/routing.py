"""The entry of `python -m tmoe.routing` and `tmoe routing`: the command is tmoe/commands/routing.py."""

import functools

from tmoe.commands import routing as moved

__getattr__ = functools.partial(getattr, moved)

if __name__ == "__main__":
    moved.command()
