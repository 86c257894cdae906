"""Injects the same faults into checkpoints of tmoe and of stock DCP, and prints the outcome for each.

    python -m benchmarks.faults                        every case on both, two ranks, about a minute
    python -m benchmarks.faults --json results.json    the same, and writes the outcome to a file

A case is called with a system and an empty folder and returns what went wrong, [] if nothing did. For tmoe,
tests/faults/test_faults_checkpoint.py requires []. Stock DCP is the shortest careful loop around
torch.distributed.checkpoint: one folder per step; the newest folder with a .metadata is the one to resume
from; an asynchronous save's future is checked after every step.

next: inject.py
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pickle
import platform
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.inject import (
    Stock,
    System,
    Tmoe,
    die_at,
    fill_disk,
    fill_disk_of_helpers,
    flip,
    kill_in_writer,
    load,
    load_path,
    save,
    save_or_die,
    say,
    tensors,
    values,
)
from benchmarks.launch import End, launch

EXIT_S = 7.0  # seconds allowed from a rank's death to the end of its peers


# ---- cases: each returns what went wrong, [] if nothing did ----


def run(fn: Callable[..., Any], *args: Any, world: int = 2) -> list[Any]:
    """Results of ranks that must survive."""
    ends = launch(world, fn, *args, timeout=5, limit=20)
    if failed := [
        f"rank {rank}: code {end.code}: {end.said[-500:]}" for rank, end in enumerate(ends) if end.code
    ]:
        raise RuntimeError("; ".join(failed))
    return [end.result for end in ends]


def expect(found: list[tuple[str | None, list[float], str]], step: str, value: float) -> list[str]:
    """Complaints, unless every rank resumed from `step` and holds `value` in all tensors."""
    wrong = []
    for rank, (path, numbers, error) in enumerate(found):
        if error:
            wrong.append(f"rank {rank} cannot resume from {path}: {error[-150:]}")
        elif path is None or path.split(".")[0] != step or numbers != [value]:
            wrong.append(f"rank {rank} resumed from {path} and holds {numbers}, not {step} with [{value}]")
    return wrong


def peers_end(ends: list[End]) -> list[str]:
    """Complaints, unless rank 1 was killed and rank 0 ended soon after, with an error and without help."""
    late = ends[0].at - ends[1].at
    wrong = []
    if ends[1].code != -signal.SIGKILL:
        wrong.append(f"rank 1 was to be killed, and ended with {ends[1].code}")
    if ends[0].code in (None, 0) or late > EXIT_S:
        wrong.append(f"rank 0 ended with {ends[0].code} {late:.1f} s after its peer was killed")
    return wrong


def kill_in_fresh_save(system: System, folder: Path) -> list[str]:
    run(save, system, folder, {10: 1.0})
    ends = launch(2, save_or_die, system, folder, {20: 2.0}, kill_in_writer, timeout=5, limit=20)
    return peers_end(ends) + expect(run(load, system, folder), "step-10", 1.0)


def kill_in_second_save_of_a_step(system: System, folder: Path) -> list[str]:
    """After a rollback a step is saved again: the old or the new state is found, never a mixture."""
    run(save, system, folder, {10: 1.0})
    ends = launch(2, save_or_die, system, folder, {10: 2.0}, kill_in_writer, timeout=5, limit=20)
    return peers_end(ends) + expect(run(load, system, folder), "step-10", 1.0)


def crash_points(system: System, folder: Path, step: int = 20) -> list[str]:
    """One process dies at its k-th write, sync, rename, mkdir or unlink, for every k.

    The state found afterwards must be the old or the new one.
    """
    wrong = []
    count = 0
    killed = True
    old, new = torch.full((64, 8), 1.0), torch.full((64, 8), 2.0)
    while killed:
        count += 1
        place = folder / str(count)
        system(place).save(10, {"model.w": old})
        killed = die_at(count, lambda at=place: system(at, keep=1).save(step, {"model.w": new}))
        store = system(place)
        loaded = {"model.w": torch.zeros(64, 8)}
        error = ""
        try:
            store.load(store.latest() or place / "nothing", loaded)
        except BaseException as caught:
            error = say(caught)[-150:]
        if error or values(loaded) not in ([1.0], [2.0]):
            wrong.append(f"killed at point {count}: holds {values(loaded)} {error}")
        shutil.rmtree(place)
    return wrong if count > 8 else [f"only {count} points were reached"]


def crash_points_in_second_save(system: System, folder: Path) -> list[str]:
    return crash_points(system, folder, step=10)


def save_again_after_a_crash(system: System, folder: Path) -> list[str]:
    """The resumed run saves the same step at which the killed one died and left files."""
    run(save, system, folder, {10: 1.0})
    for step in (20, 10):
        launch(2, save_or_die, system, folder, {step: 2.0}, kill_in_writer, timeout=5, limit=20)
    wrong = [
        f"rank {r} could not save: {why}"
        for r, (why, _) in enumerate(run(save, system, folder, {20: 3.0}))
        if why
    ]
    return wrong + expect(run(load, system, folder), "step-20", 3.0)


def disk_full(system: System, folder: Path, background: bool = False) -> list[str]:
    wrong = []
    outcomes = run(save, system, folder, {10: 1.0, 20: 2.0}, fill_disk, background)
    for rank, (why, _) in enumerate(outcomes):
        if why is None or "[Errno 27]" not in why or "step-20" not in why:
            wrong.append(f"rank {rank} got {why and why[-150:]!r}: not errno and path")
    if (left := sorted(p.name for p in folder.iterdir())) != ["step-10"]:
        wrong.append(f"left over: {left}")
    return wrong + expect(run(load, system, folder), "step-10", 1.0)


def disk_full_in_helper_thread(system: System, folder: Path) -> list[str]:
    outcomes = run(save, system, folder, {10: 1.0, 20: 2.0}, fill_disk_of_helpers, False, 2)
    wrong = [
        f"rank {rank}: the save reported success" for rank, (why, _) in enumerate(outcomes) if why is None
    ]
    return wrong + expect(run(load, system, folder), "step-10", 1.0)


def background_save_fails(system: System, folder: Path) -> list[str]:
    """The error must be raised after one of the next steps on every rank, not at the next save or never."""
    outcomes = run(save, system, folder, {10: 1.0, 20: 2.0}, fill_disk, True)
    wrong = [
        f"rank {r} got {why!r} after {polls} steps"
        for r, (why, polls) in enumerate(outcomes)
        if not why or polls > 40
    ]
    return wrong + expect(run(load, system, folder), "step-10", 1.0)


def retention_with_partials(system: System, folder: Path) -> list[str]:
    """Two steps are kept; two newer folders are incomplete: the whole ones must stay."""
    run(save, system, folder, {10: 1.0, 20: 2.0})
    for partial_step in (1000, 1001):
        (folder / f"step-{partial_step}").mkdir()
    store = system(folder, keep=2)
    store.save(30, tensors(3.0))
    left = {p.name for p in folder.iterdir()}
    wrong = [] if {"step-20", "step-30"} <= left else [f"left: {sorted(left)}"]
    return wrong + ([f"not removed: {sorted(left)}"] if "step-10" in left else [])


def commit_mark_garbage(system: System, folder: Path) -> list[str]:
    """The file that marks a step as whole is empty or nonsense: an older step must be found."""
    run(save, system, folder, {10: 1.0, 20: 2.0})
    wrong = []
    for content in (b"", b"latest: nan"):
        (folder / "step-20" / system.commit_mark).write_bytes(content)
        wrong += expect(run(load, system, folder), "step-10", 1.0)
    return wrong


def bit_flips(system: System, folder: Path) -> list[str]:
    """For each file in turn: the error names it before any tensor changes, and an older step is found."""
    run(save, system, folder, {10: 1.0, 20: 2.0})
    step = folder / "step-20"
    wrong = []
    for file in sorted(step.iterdir()):
        at = file.stat().st_size // 2
        flip(file, at)
        wrong += damaged(system, folder, file)
        flip(file, at)
    return wrong


def damaged(system: System, folder: Path, file: Path) -> list[str]:
    error, loaded = load_path(0, 1, system, file.parent)
    wrong = [] if file.name in error else [f"{file.name}: loaded {values(loaded)}, error {error[-150:]!r}"]
    if values(loaded) != [0.0] and error:
        wrong.append(f"{file.name}: tensors changed before the error: {values(loaded)}")
    return wrong + [f"{file.name}: {line}" for line in expect([load(0, 1, system, folder)], "step-10", 1.0)]


def truncated_missing_extra(system: System, folder: Path) -> list[str]:
    run(save, system, folder, {10: 1.0, 20: 2.0})
    step = folder / "step-20"
    wrong = []
    shard = max(step.glob("*.distcp"), key=lambda p: p.stat().st_size)
    raw = shard.read_bytes()
    shutil.copy(shard, step / "__9_0.distcp")
    wrong += [f"extra shard: {line}" for line in expect([load(0, 1, system, folder)], "step-20", 2.0)]
    os.truncate(shard, len(raw) // 2)
    wrong += [f"truncated: {line}" for line in damaged(system, folder, shard)]
    shard.unlink()
    return wrong + [f"missing: {line}" for line in damaged(system, folder, shard)]


class Hostile:
    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.sentinel),)


def hostile_pickles(system: System, folder: Path) -> list[str]:
    """In metadata or a tensor's payload: loading must run none, even if the attacker knows the format."""
    run(save, system, folder, {10: 1.0, 20: 2.0})
    step = folder / "step-20"
    wrong = []
    shard = max(step.glob("*.distcp"), key=lambda p: p.stat().st_size)
    for file, sentinel in ((shard, folder / "ran-payload"), (step / ".metadata", folder / "ran-metadata")):
        raw = file.read_bytes()
        code = pickle.dumps(Hostile(sentinel))
        file.write_bytes(code + raw[len(code) :])
        system.reseal(step)
        load_path(0, 1, system, step)
        if sentinel.exists():
            wrong.append(f"{file.name}: code ran")
        file.write_bytes(raw)
        system.reseal(step)
    return wrong


def mismatches(system: System, folder: Path) -> list[str]:
    """Other shape, other dtype, missing, extra: all must be listed, nothing cast, nothing changed."""
    run(save, system, folder, {10: 1.0})
    asked = {
        "model.w": torch.zeros(512, 65),
        "model.b": torch.zeros(512).bfloat16(),
        "model.new": torch.zeros(3),
    }
    error, loaded = load_path(0, 1, system, folder / "step-10", asked)
    wrong = [
        f"{name} is not named"
        for name in ("model.w", "model.b", "model.new", "model.norm")
        if name not in error
    ]
    if loaded["model.b"].any():
        wrong.append(f"tensors changed: {values({'b': loaded['model.b'].float()})}")
    return wrong


def ranks_disagree(system: System, folder: Path) -> list[str]:
    run(save, system, folder, {10: 1.0, 20: 2.0})
    return expect(run(load, system, folder, "step-20"), "step-10", 1.0)


def other_worlds(system: System, folder: Path) -> list[str]:
    run(save, system, folder, {10: 1.0})
    wrong = []
    for world in (4, 1):
        wrong += expect(run(load, system, folder, world=world), "step-10", 1.0)
    return wrong


CASES: dict[str, tuple[str, Callable[..., list[str]]]] = {
    "1": ("rank killed while saving", kill_in_fresh_save),
    "2": ("rank killed while saving a step again", kill_in_second_save_of_a_step),
    "3a": ("killed at every write, sync, rename", crash_points),
    "3b": ("the same, saving a step again", crash_points_in_second_save),
    "4": ("saving again after a crash", save_again_after_a_crash),
    "5": ("disk full on one rank", disk_full),
    "6": ("disk full in a helper thread", disk_full_in_helper_thread),
    "7": ("background save fails", background_save_fails),
    "8": ("retention with partial steps", retention_with_partials),
    "10": ("commit mark empty or garbage", commit_mark_garbage),
    "11": ("bit flipped in each file", bit_flips),
    "12": ("shard truncated, missing, extra", truncated_missing_extra),
    "13": ("hostile pickle", hostile_pickles),
    "14": ("wrong shape, dtype, missing, extra key", mismatches),
    "15": ("ranks see different steps", ranks_disagree),
    "18": ("saved by 2 ranks, loaded by 4 and 1", other_worlds),
}
NOT_OFFERED = {("stock DCP", "8"): "deletes nothing", ("stock DCP", "15"): "does not choose a step"}
SILENT = {"2", "6", "11", "14"}  # cases that are wrong without an error


def outcome(system: System, case: str) -> dict[str, Any]:
    if reason := NOT_OFFERED.get((system.name, case)):
        return {"pass": None, "why": [reason], "seconds": 0.0}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            wrong = CASES[case][1](system, Path(folder))
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        wrong = [line.replace(folder, "RUN") for line in wrong]
    return {"pass": not wrong, "why": wrong, "seconds": round(time.monotonic() - begin, 1)}


def show(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    table = Table("#", "case", *results, title=f"Checkpoint faults, torch {torch.__version__}")
    for case, (title, _) in CASES.items():
        cells = []
        for by_case in results.values():
            result = by_case[case]
            word = {True: "[green]pass", False: "[red]FAIL", None: "[dim]–"}[result["pass"]]
            cells.append(word if result["pass"] else f"{word}[/] {result['why'][0][:100]}")
        table.add_row(case, title, *cells)

    passed = [
        [case for case, result in by_case.items() if result["pass"] is True] for by_case in results.values()
    ]
    table.add_section()
    table.add_row("", "passed", *(f"{len(cases)} of {len(CASES)}" for cases in passed))
    weigh = {case: 3 if case in SILENT else 1 for case in CASES}
    points = [str(sum(weigh[case] for case in cases)) for cases in passed]
    table.add_row("", f"points of {sum(weigh.values())}, silent wrongness counts three times", *points)
    Console(width=160 if not sys.stdout.isatty() else None).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "faults.json")
    args = parser.parse_args()
    # Cases fork, and stock DCP would call CUDA on both sides of the fork. No case needs a GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)  # both systems log at length the outcomes that the table shows
    results: dict[str, dict[str, Any]] = {}
    for system in (Tmoe, Stock):
        results[system.name] = {}
        for case in CASES:
            results[system.name][case] = result = outcome(system, case)
            print(f"{system.name} {case}: {'pass' if result['pass'] else result['why']}", file=sys.stderr)
    show(results)
    about = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
