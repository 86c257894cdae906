"""The door of `python -m tmoe.rollouts` and `tmoe rollouts`: tmoe/commands/rollouts.py has the command."""

from tmoe.commands.rollouts import command

if __name__ == "__main__":
    command()
