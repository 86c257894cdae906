"""The entry of `python -m tmoe.warmup` and `tmoe warmup`: the command is tmoe/commands/warmup.py."""

import functools

from tmoe.commands import warmup as moved

__getattr__ = functools.partial(getattr, moved)

if __name__ == "__main__":
    moved.main()
