"""The door of `python -m tmoe.rollouts` and `tmoe rollouts`: tmoe/commands/rollouts.py has the command."""

import functools

from tmoe.commands import rollouts as moved

__getattr__ = functools.partial(getattr, moved)

if __name__ == "__main__":
    moved.command()
