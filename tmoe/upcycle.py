"""The door of `python -m tmoe.upcycle` and `tmoe upcycle`: tmoe/extras/upcycle.py has the command."""

from tmoe.extras.upcycle import main

if __name__ == "__main__":
    main()
