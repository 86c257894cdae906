"""The door of `python -m tmoe.report` and `tmoe report`: tmoe/commands/report.py has the command."""

from tmoe.commands.report import command

if __name__ == "__main__":
    command()
