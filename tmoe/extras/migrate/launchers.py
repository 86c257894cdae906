"""Separates and reads the variables, launchers and program at the beginning of another framework's command.

`read` removes the launchers' words and returns the number of processes, which the translation needs.
It knows torchrun and `python -m torch.distributed.run`, accelerate, deepspeed, mpiexec and mpirun (with the
options of Open MPI and Hydra), srun, jsrun, aprun, flux, Tutel's launcher, and any wrapper before these (env,
ssh, numactl, nsys, docker, apptainer, uv run, ...).

next: tables.py
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SET = re.compile(r"[A-Z_][A-Z0-9_]*=", re.S)  # an environment variable; lower case: argument of moe_layer
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
PYTHON = re.compile(r"(?:python|pypy)[\d.]*")
# Modules that start another program -> the launcher.
MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "tutel.launcher.run": "tutel",
    "tutel.launcher.execl": "tutel",
}
LAUNCHERS = (
    "torchrun accelerate accelerate-launch deepspeed mpiexec mpirun mpiexec.hydra orterun prterun srun"
)
LAUNCHERS = {*LAUNCHERS.split(), "jsrun", "aprun", "flux", "horovodrun", "ibrun"}
TAKES_MODULE = {"python", "torchrun", "accelerate", "deepspeed", "tutel"}
ENDS = {";", "&&", "||"}  # words that end a command in a shell
PIPED = re.compile(r"\|&?$|&$|[012&]?>")
SHELLS = {"bash", "sh", "zsh"}
# Options of launchers that set a variable, as `-x NAME=VALUE` or `-genv NAME VALUE`.
SETS = {"-x", "-genv", "--genv", "-env", "--env", "-e", "-E", "--export", "-export"}
# Options of mpiexec, srun and similar launchers that give the number of processes -> the kind of number.
COUNTS = {
    "-n": "all", "-np": "all", "--n": "all", "--np": "all", "-c": "all", "--ntasks": "all",
    "--num-proc": "all", "-N": "nodes", "--nodes": "nodes", "--ntasks-per-node": "each", "-ppn": "each",
    "--ppn": "each", "-npernode": "each", "--npernode": "each", "--map-by": "map", "-a": "each",
    "-host": "hosts", "--host": "hosts", "-H": "hosts", "-hosts": "hosts", "--hosts": "hosts",
    "-w": "hosts", "--nodelist": "hosts",
}  # fmt: skip
MPI = {"mpiexec", "mpirun", "mpiexec.hydra", "orterun", "prterun"}


@dataclass
class Launch:
    """The launchers, variables and program of a command, and the flags of the framework after them."""

    words: list[str]
    """the framework's own flags"""
    program: str = ""
    """the script or module that is started; "" if none is named"""
    world: int | None = None
    """number of processes that the launchers start; None if they do not give it"""
    each: int | None = None
    """number of processes on a node"""
    variables: dict[str, str] = field(default_factory=dict)
    """environment variables that the command or a launcher's option sets"""
    handed_on: set[str] = field(default_factory=set)
    """names of those variables that a launcher's option copies from the environment"""
    launchers: list[str] = field(default_factory=list)
    said: dict[str, list[str]] = field(default_factory=dict)
    """for each launcher the words that belong to it"""


def read(words: Sequence[str], environ: Mapping[str, str] = os.environ) -> Launch:
    """Separates launchers, variables and program from a command; a command may also be flags alone.

    environ: the environment with the values of variables that a launcher copies by name (`-x NAME`).
    """
    words = _command(_unwrapped([word for word in words if word.strip(" \t\n\\")]))
    launch = Launch(words)
    end = _program(words)
    if not end:
        return launch
    *front, launch.program = words[:end]
    launch.words = words[end:]
    launcher = "env"
    launch.said[launcher] = []
    for i, word in enumerate(front):
        base = word.rpartition("/")[2]
        name = _module(front, i) or ("python" if PYTHON.fullmatch(base) else base)
        if name in LAUNCHERS or name in ("python", "tutel"):
            launcher = name
            launch.launchers.append(name)
            launch.said[name] = []
        elif launcher == "env" and re.match(r"[A-Za-z_]\w*=", word):
            name, _, launch.variables[name] = word.partition("=")
        else:
            if SET.match(word) and front[i - 1] not in SETS:  # after `srun ... env`, or exported in bash -c
                name, _, launch.variables[name] = word.partition("=")
            launch.said[launcher].append(word)
    for words_of in launch.said.values():
        for name, value in _set_by(words_of):
            if value is not None or name in environ:
                launch.variables[name] = environ[name] if value is None else value
                launch.handed_on |= {name} if value is None else set()
    _count(launch, environ)
    return launch


def _unwrapped(words: list[str]) -> list[str]:
    """The words within `bash -c 'COMMAND'`, `sbatch --wrap 'COMMAND'` or a command that is one word."""
    if len(words) == 1 and _program(split := _split(words[0])):
        return split
    for i, word in enumerate(words if words[:1] == ["sbatch"] else []):
        name, equals, wrapped = word.partition("=")
        if name == "--wrap":
            return _command(_split(wrapped if equals else "".join(words[i + 1 : i + 2])))
    for i, word in enumerate(words[:-1]):
        if word.startswith("--") and "=" not in word:
            continue
        if word in ("-c", "-lc") and words[i - 1].rpartition("/")[2] in SHELLS:
            return [*words[: i - 1], *_command(_split(words[i + 1])), *words[i + 2 :]]
    return words


def _command(words: list[str]) -> list[str]:
    """The first command in a shell's line that starts a program, without pipes and redirections after it.

    Variables that earlier commands export are put before it.
    """
    parts: list[list[str]] = [[]]
    for word in words:
        if word in ENDS or word.endswith(";"):
            parts[-1] += [word[:-1]] if word.endswith(";") and word != ";" else []
            parts.append([])
        else:
            parts[-1].append(word)
    at = next((i for i, part in enumerate(parts) if _program(part)), None)
    if at is None:
        return words
    exported = [word for part in parts[:at] if part[:1] == ["export"] for word in part[1:]]
    command = parts[at]
    return [
        *exported,
        *command[: next((i for i, word in enumerate(command) if PIPED.match(word)), len(command))],
    ]


def _split(text: str) -> list[str]:
    """The words of a shell's text. The end of a line ends a command unless the line is continued."""
    lines: list[list[str]] = []
    pending = ""  # text of a quote that is not closed yet
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        pending = f"{pending}\n{line}" if pending else line
        try:
            lines.append(shlex.split(pending, comments=True))
            pending = ""
        except ValueError:
            continue
    lines.append(pending.split())
    return [word for words in lines if words for word in (*words, ";")][:-1]


def _program(words: list[str]) -> int:
    """The index of the framework's first flag, after the script or module; 0 if the command is only flags."""
    if not words or words[0].startswith("-") or re.match(r"[a-z]\w*=", words[0]):
        return 0
    takes = module = False  # whether the current launcher accepts -m; whether -m was followed by an option
    for i, word in enumerate(words):
        base, before = word.rpartition("/")[2], words[i - 1] if i else ""
        if PYTHON.fullmatch(base) or base in LAUNCHERS:
            takes, module = bool(PYTHON.fullmatch(base)) or base in TAKES_MODULE, False
        elif _module(words, i):
            takes = True
        elif takes and before in ("-m", "--module") and not word.startswith("-"):
            return i + 1
        elif takes and word.startswith("--module="):
            words[i : i + 1] = [word.partition("=")[2]]
            return i + 1
        elif takes and before in ("-m", "--module"):
            module = True
        elif _is_script(word) or (module and DOTTED.fullmatch(word)):
            return i + 1
    return 0


def _is_script(word: str) -> bool:
    return word.endswith(".py") and word[0] != "-"


def _module(words: list[str], at: int) -> str:
    """The launcher whose module is at this place, after -m; "" if there is none."""
    return MODULES.get(words[at], "") if at and words[at - 1] in ("-m", "--module") else ""


def _set_by(words: list[str]) -> list[tuple[str, str | None]]:
    """Variables that a launcher's options set; None is the value of a variable that is copied by name."""
    variables: list[tuple[str, str | None]] = []
    for i, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option not in SETS:
            continue
        given = value if equals else "".join(words[i + 1 : i + 2])
        for item in given.split(","):
            name, equals, value = item.partition("=")
            if not equals and option in ("-genv", "-env"):
                value, equals = "".join(words[i + 2 : i + 3]), "="
            variables.append((name, value if equals else None))
    return variables


def _count(launch: Launch, environ: Mapping[str, str]) -> None:
    """Sets the number of processes, by the innermost launcher that gives it."""
    for name in launch.launchers:
        options = _options(launch.said[name])
        if name == "torchrun":
            launch.each = _number(options, "--nproc-per-node")
            launch.world = _times(launch.each, _number(options, "--nnodes", 1))
        elif name in ("accelerate", "accelerate-launch"):
            launch.world = _number(options, "--num-processes", _number(options, "-n", None))
            launch.world = launch.world or _of_file(options.get("--config-file", ""))
            machines = _number(options, "--num-machines", 1) or 1
            launch.each = launch.world and launch.world // machines
        elif name == "deepspeed":
            included = options.get("--include", options.get("-i", ""))
            each, nodes = _number(options, "--num-gpus"), _number(options, "--num-nodes", 1)
            slots = sum(len(host.partition(":")[2].split(",")) for host in included.split("@") if host)
            launch.each, launch.world = each, slots or _times(each, nodes) or launch.world
        elif name == "tutel":  # starts LOCAL_SIZE processes for each of mpiexec's
            local = {**environ, **launch.variables}.get("LOCAL_SIZE", "1")
            if local.isdigit():
                launch.world, launch.each = (launch.world or 1) * int(local), int(local)
        elif name != "python":
            launch.world, launch.each = _of_mpi(name, options)
    if launch.world is None and launch.variables.get("WORLD_SIZE", "").isdigit():
        launch.world = int(launch.variables["WORLD_SIZE"])


def _times(each: int | None, nodes: int | None) -> int | None:
    return None if each is None or nodes is None else each * nodes


def _options(words: list[str]) -> dict[str, str]:
    """Options by name, with dashes in place of underscores, and the word after each."""
    options = {}
    for i, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option.startswith("-"):
            after = "".join(words[i + 1 : i + 2])
            options[option.replace("_", "-")] = value if equals else after
            if glued := re.fullmatch(r"-([nN])(\d+)", option):  # srun -N2 -n16
                options[f"-{glued[1]}"] = glued[2]
    if "-nproc-per-node" in options:
        options["--nproc-per-node"] = options["-nproc-per-node"]
    return options


def _number(options: Mapping[str, str], name: str, default: int | None = None) -> int | None:
    """The value of an option; None if it is not a number, as `auto`, or a range, as 1:4."""
    if name not in options:
        return default
    low, _, high = options[name].partition(":")  # --nnodes 2:2
    return int(low) if low.isdigit() and high in ("", low) else None


def _of_mpi(name: str, options: Mapping[str, str]) -> tuple[int | None, int | None]:
    """The number of processes that mpiexec, srun or a similar launcher starts: (in all, on a node)."""
    counts = _said_counts(name, options)
    each, total = _said(counts, "each"), _said(counts, "all")
    if total:
        return (total * (each or 1), each) if name == "jsrun" else (total, each)
    if name not in MPI:
        nodes = _said(counts, "nodes")
        nodes = 1 if nodes is None else nodes
        return (nodes * each, each) if each else ((nodes, 1) if "nodes" in counts else (None, None))
    if "hosts" not in counts or ".." in counts["hosts"]:  # a list without an end
        return None, None
    hosts = [host for host in counts["hosts"].split(",") if host not in ("", "..", "...")]
    slots = [host.partition(":")[2] for host in hosts]
    return (each or 1) * len(hosts) if each else sum(int(n) if n.isdigit() else 1 for n in slots), each


def _said(counts: Mapping[str, str], kind: str) -> int | None:
    """The number of this kind; None if there is none."""
    return int(counts[kind]) if counts.get(kind, "").isdigit() else None


def _said_counts(name: str, options: Mapping[str, str]) -> dict[str, str]:
    """Values of the options that give processes, nodes or hosts, by their kind in COUNTS."""
    counts: dict[str, str] = {}
    for option, value in options.items():
        kind = COUNTS.get(option, "")
        if (kind == "nodes" and name in MPI) or (kind == "each" and name == "aprun"):
            kind = "each"  # Open MPI's -N is npernode
        if option == "-c" and name not in MPI:  # cores
            continue
        if kind == "map" and (match := re.match(r"ppr:(\d+):node", value)):
            kind, value = "each", match[1]
        counts.setdefault(kind, value)
    return counts


def _of_file(path: str) -> int | None:
    """num_processes of accelerate's YAML file, if the file exists on this machine."""
    try:
        text = Path(path).read_text() if path else ""
    except (OSError, UnicodeDecodeError):
        return None
    match = re.search(r"^num_processes:\s*(\d+)", text, re.M)
    return int(match[1]) if match else None
