"""The door of `python -m tmoe.routing` and `tmoe routing`: tmoe/commands/routing.py has the command."""

from tmoe.commands.routing import command

if __name__ == "__main__":
    command()
