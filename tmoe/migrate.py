"""The door of `python -m tmoe.migrate` and `tmoe migrate`: tmoe/extras/migrate/command.py has the command."""

from tmoe.extras.migrate.command import main

__path__: list[str] = []  # modules below this name are found by tmoe/base/moved.py

if __name__ == "__main__":
    main()
