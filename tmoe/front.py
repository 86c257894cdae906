"""The front of every command: words become values, and an error becomes one line on stderr and an exit code.

    error: --parallel.ep=3 (from runs/a/config.json): must divide --model.moe.experts=8; valid: [1, 2, 4, 8]

Exit code 2: the command was refused, because a flag, or a file or folder that it names, is missing or
invalid.
Exit code 1: work that had begun failed (the disk is full), or Ctrl-C ended it. train.py uses the same codes.

next: tmoe/config/check.py, tmoe/cli/parse.py
"""

from __future__ import annotations

import argparse
import errno
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, NoReturn, get_args

import tyro

from tmoe.base.private_torch import find
from tmoe.base.wishes import meant_by_value, wish
from tmoe.config.check import ConfigError, options_of, spell

# tyro's hook for refused words. A tyro without the hook prints a box and exits with code 2.
_on_parse_error = find("tyro._errors.on_parse_error")
# errno codes of errors that are about a path and have no exception class in `failed`.
NAMED = errno.ENOTEMPTY, errno.EXDEV, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EROFS
# Settings of this process that were not given by a flag: --flag to (value, the file with the value).
_places: dict[str, tuple[Any, str]] = {}


class Ended(SystemExit):
    """The end of a command whose words were refused. str: the line, already printed on stderr. code: 2."""

    code = 2


def remember(places: Mapping[str, tuple[Any, str]]) -> None:
    """Record which file each setting of this process was read from: --flag to (value, the file)."""
    _places.clear()
    _places.update(places)


def spelt(error: BaseException) -> str:
    """The text of an error in terms of flags, with the file of each value that was not given by a flag."""
    text = error.spelt("flag") if isinstance(error, ConfigError) else str(error)
    for flag, (value, place) in _places.items():
        joined = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for shown in dict.fromkeys((repr(value), str(value), joined)):
            mention = f"{flag}={shown}"
            at = text.find(mention) + len(mention)
            if at >= len(mention) and re.match(r"[\s:;,)]|$", text[at:]):
                text = f"{text[:at]} (from {place}){text[at:]}"
                break
    return text


@contextmanager
def one_message(*kinds: type[Exception], interrupted: str = "interrupted") -> Iterator[None]:
    """Context of a command: an expected error (ValueError, OSError, `kinds`) ends the process with one line.

    The exit code is 2. It is 1 for a fault of the machine (`failed`) and for Ctrl-C.

    interrupted: the text of the line after Ctrl-C.
    """
    try:
        yield
    except (OSError, ValueError, *kinds) as error:
        if failed(error):
            raise SystemExit(f"error: {spelt(error)}") from None  # Python prints it; exit code 1
        end(spelt(error))
    except KeyboardInterrupt:
        raise SystemExit(f"error: {interrupted}") from None


def failed(error: BaseException) -> bool:
    """Whether the machine caused the error: the disk is full, or a device fails.

    All other errors concern a path that the user named: it is missing, it may not be read, or it exists
    already.
    """
    named = FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause.errno is not None and not isinstance(cause, named) and cause.errno not in NAMED
        cause = cause.__cause__ or cause.__context__
    return False


def end(text: str) -> NoReturn:
    """End the process with `error: text` on stderr and exit code 2."""
    line = f"error: {text}"
    print(line, file=sys.stderr)
    raise Ended(line) from None


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors, as in all commands. Only the first rank of a node prints the line."""

    def __init__(self, text: str | None):
        super().__init__(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        line = message.removeprefix("argument ")
        head, unknown, words = line.partition("unrecognized arguments: ")
        line = f"{words.split()[0]}: no such flag; --help shows all" if unknown else head
        if os.environ.get("LOCAL_RANK", "0") == "0":
            end(line)
        raise Ended(line)


def call(
    what: Any,
    prog: str,
    words: Sequence[str],
    known: Sequence[str] | None = None,
    hint: Callable[[str], str] | None = None,
    **more: Any,
) -> Any:
    """Calls a class or function with the words of a command line as arguments, and returns the result.

    Raises ConfigError for words that are refused, SystemExit(0) after --help.

    what: a class, a function, or a dict of them by subcommand. known: the flags; None: the flags of `what`.
    hint: returns the message for an unexpected word, "" for the usual message. more: arguments of tyro.cli.
    """
    words = list(words)
    commands = what if isinstance(what, dict) else {}
    if commands and words and not words[0].startswith("-") and words[0] not in commands:
        near = get_close_matches(words[0], commands, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{words[0]}: no such command", valid=f"{', '.join(commands)}{meant}")
    if commands and not words:
        raise ConfigError(f"{prog}: needs a command", valid=", ".join(commands))
    inner = [commands[words[0]]] if commands and words[0] in commands else commands.values() or [what]
    flags = list(known or (flag for one in inner for flag in flags_of(one)))

    def refuse(event: Any) -> None:
        raise _refusal(event, words, flags, hint)

    run = tyro.extras.subcommand_cli_from_dict if commands else tyro.cli
    with _on_parse_error(refuse) if _on_parse_error else nullcontext():
        return run(what, prog=prog, args=words, **more)


def flags_of(what: Any) -> Iterator[str]:
    """The flags of a function or of a flat dataclass, as they are typed on a command line."""
    if is_dataclass(what):
        names = [one.name for one in fields(what)]
    else:
        names = [
            name
            for name, one in inspect.signature(what).parameters.items()
            if one.kind != one.POSITIONAL_ONLY
        ]
    yield from (f"--{name.replace('_', '-')}" for name in names)


def value_of(words: Sequence[str], flag: str) -> str:
    """The value that the last occurrence of a flag has, its words joined by spaces; "" if it has none."""
    found = ""
    for i, word in enumerate(words):
        head, equals, value = word.partition("=")
        if head.replace("_", "-") != flag:
            continue
        if not equals:
            rest = words[i + 1 :]
            last = next((j for j, one in enumerate(rest) if re.match(r"--?[a-zA-Z]", one)), len(rest))
            value = " ".join(rest[:last])
        found = value
    return found


def _refusal(
    event: Any, words: list[str], flags: list[str], hint: Callable[[str], str] | None
) -> ConfigError:
    """The error for an event of tyro: which word is wrong, and which words are valid."""
    kind = type(event).__name__
    shows = f"{event.prog} {'--help-all' if '--help-all' in flags else '--help'} shows all"
    if kind == "UnrecognizedArgs":
        return ConfigError(unexpected(event.tokens, flags, shows, hint))
    if kind == "MissingArgs":
        names = ", ".join(argument_name(one.arg) for one in event.missing_arguments)
        if event.unrecognized_tokens:
            return ConfigError(unexpected(event.unrecognized_tokens, flags, shows, hint))
        return ConfigError(f"{names}: missing; {shows}")
    if kind == "MissingSubcommand":
        valid = ", ".join(event.subcommand_spec.parser_from_name)
        return ConfigError(f"{event.prog}: needs a command", valid=valid)
    argument = getattr(event, "argument", None)
    if kind == "InstantiationFailure" and argument is None:
        error: BaseException | None = sys.exc_info()[1]
        while error is not None and not isinstance(error, ConfigError):
            error = error.__cause__ or error.__context__
        return error if isinstance(error, ConfigError) else ConfigError(event.message)
    if argument is None:
        return ConfigError(f"{' '.join(words)}: {kind}; {shows}")
    if argument.is_positional() and (unknown := unknown_flags(words, flags)):
        return ConfigError(unexpected(unknown, flags, shows, hint))
    return _wrong_value(argument, words)


def unknown_flags(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Words that look like flags and are not. tyro reads such a word as a positional argument's value."""
    heads = {
        word: word.partition("=")[0].replace("_", "-") for word in words if re.match(r"--[a-zA-Z]", word)
    }
    return [
        word
        for word, head in heads.items()
        if head not in flags and f"--{head[2:].removeprefix('no-')}" not in flags
    ]


def _wrong_value(argument: Any, words: list[str]) -> ConfigError:
    """The error for an invalid value of one argument."""
    name, must = argument_name(argument), f"must be {in_words(argument.field.type)}"
    given = value_of(words, name)
    if argument.is_positional():
        return ConfigError(f"{name}: {must}")
    count = argument.lowered.nargs
    if not given:
        must = f"needs a value; {must}"
    elif isinstance(count, int) and count > 1 and len(given.split()) < count:
        must = f"needs {count} values; {must}"
    else:
        must += meant_in(name[2:], given, argument.field.type)
    return ConfigError.of(name.lstrip("-").replace("-", "_"), given or True, must)


def meant_in(flag: str, given: str, kind: Any) -> str:
    """A hint at the option that a wrong value probably means; "" where the setting has no options."""
    options = [str(one) for one in options_of(kind)]
    return meant_by_value(flag.replace("-", "_"), given, options) if options else ""


def argument_name(argument: Any) -> str:
    """The name of an argument: its flag, or the word in capitals that --help shows for it."""
    if argument.is_positional():
        return argument.lowered.metavar.strip("[]").split()[0].rstrip("}").lstrip("{")
    return argument.display_name().split("/")[0]


def in_words(kind: Any) -> str:
    """The type of an argument, in words."""
    if get_args(kind) and hasattr(kind, "__metadata__"):
        return in_words(get_args(kind)[0])
    return spell(kind)


def unexpected(
    tokens: list[str],
    flags: list[str],
    shows: str,
    hint: Callable[[str], str] | None = None,
) -> str:
    """The message for the first word that is neither a flag nor the value of a flag."""
    flag = next((one for one in tokens if re.match(r"--?[a-zA-Z]", one)), "")
    if flag:
        name = flag.partition("=")[0]
        if answer := wish(name):
            return f"{name}: no such flag; {answer}"
        near = get_close_matches(name.replace("_", "-"), flags, 1, 0.7)
        if near and near[0] == name:  # an argument without a flag
            return f"{name}: no such flag; give its value alone, as a word; {shows}"
        return f"{name}: no such flag; " + (f"did you mean {near[0]}?" if near else shows)
    word = tokens[0]
    if hint and (said := hint(word)):
        return said
    return f"{word}: unexpected word, neither a flag nor a flag's value; {shows}"
