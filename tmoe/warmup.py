"""The door of `python -m tmoe.warmup` and `tmoe warmup`: tmoe/commands/warmup.py has the command."""

from tmoe.commands.warmup import main

if __name__ == "__main__":
    main()
