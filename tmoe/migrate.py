"""The entry of `python -m tmoe.migrate` and `tmoe migrate`, whose code is in tmoe/extras/migrate."""

from tmoe.extras.migrate.translate import main

__path__: list[str] = []  # tmoe/base/moved.py finds the modules below this name

if __name__ == "__main__":
    main()
