"""The entry of `python -m tmoe.migrate` and `tmoe migrate`: the command is tmoe/extras/migrate/command.py."""

from tmoe.extras.migrate.command import main

__path__: list[str] = []  # tmoe/base/moved.py finds the modules below this name

if __name__ == "__main__":
    main()
