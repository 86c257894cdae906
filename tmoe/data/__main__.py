"""python -m tmoe.data: text and JSONL to token shards; --show shows chat rows, --facts makes some."""

import sys

import tyro

from tmoe.data.convert import convert
from tmoe.data.tokenizer import DataError
from tmoe.disk import expand_home


def main(words: list[str]) -> None:
    flags = {word.partition("=")[0] for word in words}
    command = convert
    if "--show" in flags:
        from tmoe.data.show import show as command
    elif "--facts" in flags:
        from tmoe.data.small_facts import write_facts as command
    tyro.cli(command, prog="python -m tmoe.data", args=words)


try:
    main(expand_home())
except (DataError, OSError) as error:
    sys.exit(f"error: {error}")
except KeyboardInterrupt:
    sys.exit("error: interrupted; nothing was written")
