"""The entry of `python -m tmoe.rollouts` and `tmoe rollouts`: the command is tmoe/commands/rollouts.py."""

import functools

from tmoe.commands import rollouts as moved

__getattr__ = functools.partial(getattr, moved)

if __name__ == "__main__":
    moved.command()
