"""The door of `python -m tmoe.migrate` and `tmoe migrate`: tmoe/extras/migrate/command.py has the command."""

from tmoe.extras.migrate.command import main

if __name__ == "__main__":
    main()
