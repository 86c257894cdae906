"""Translates a command of a known framework: by its table of flags, then by rules for all frameworks.

next: tables.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tmoe.config.check import ConfigError
from tmoe.extras.migrate import fms, megatron, names, tutel
from tmoe.extras.migrate import launchers as launcher
from tmoe.extras.migrate.launchers import Launch
from tmoe.extras.migrate.tables import FlagRow, TranslatedCommand, misfits

Translation = Callable[[Launch, int | None], TranslatedCommand]
FRAMEWORKS: dict[str, tuple[tuple[FlagRow, ...], Translation]] = {
    "megatron": (megatron.ROWS, megatron.translate),
    "tutel": (tutel.ROWS, tutel.translate),
    "fms": (fms.ROWS, fms.translate),
}
# Variables for which no note is needed, because launchers set them.
SILENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORLD_SIZE",
    "LOCAL_SIZE",
    "PYTHONPATH",
}


def translate(framework: str, words: Sequence[str], world: int | None = None) -> TranslatedCommand:
    """The outcome of a command of a framework.

    words: the command, with or without its launchers.
    world: number of ranks; None: the number that the launcher starts, else the smallest for the layout.

    Raises ConfigError for an invalid command. Its message has a line for each fault of the command, including
    flags without a counterpart.
    """
    launch = launcher.read(words)
    out = FRAMEWORKS[framework][1](launch, world or launch.world)
    if world and launch.world and world != launch.world:
        out.notes.append(f"--world={world}: is used; the launcher in the command starts {launch.world}")
    if launch.each and out.world % launch.each == 0:
        out.per_node = launch.each
    if left := sorted(launch.variables.keys() - SILENT - out.read - launch.handed_on):
        shown = " ".join(f"{name}={launch.variables[name]}" for name in left)
        out.notes.append(
            f"{shown}: variables are left out; set those that are still needed before this command"
        )
    misfits(out, names.kinds())
    if out.wrong:
        raise ConfigError("\n".join([*out.wrong, *out.refused]))
    return out
