"""The door of `python -m tmoe.warmup` and `tmoe warmup`: tmoe/commands/warmup.py has the command."""

import functools

from tmoe.commands import warmup as moved

__getattr__ = functools.partial(getattr, moved)

if __name__ == "__main__":
    moved.main()
