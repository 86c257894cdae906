"""The entry of `python -m tmoe.upcycle` and `tmoe upcycle`: the command is tmoe/extras/upcycle.py."""

import functools

from tmoe.extras import upcycle as moved

__getattr__ = functools.partial(getattr, moved)

if __name__ == "__main__":
    moved.main()
