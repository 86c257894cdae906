"""python -m tmoe.data: writes text and JSONL as token shards; --show prints chat rows, --facts makes some."""

from tmoe.base.disk import expand_home
from tmoe.data.convert import convert
from tmoe.front import call, one_message


def main(words: list[str]) -> None:
    flags = {word.partition("=")[0] for word in words}
    command = convert
    if "--show" in flags:
        from tmoe.data.show import show as command
    elif "--facts" in flags:
        from tmoe.data.synthetic_chat import write_facts as command
    call(command, "python -m tmoe.data", words)


with one_message(interrupted="interrupted; nothing was written"):
    main(expand_home())
