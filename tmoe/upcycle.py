"""The door of `python -m tmoe.upcycle` and `tmoe upcycle`: tmoe/extras/upcycle.py has the command."""

import functools

from tmoe.extras import upcycle as moved

__getattr__ = functools.partial(getattr, moved)

if __name__ == "__main__":
    moved.main()
