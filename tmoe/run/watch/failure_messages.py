"""Describes what happened to the ranks of a run: which is silent, which failed first, where calls differed.

next: run/watch/standstill.py
"""

from __future__ import annotations

import re

from tmoe.run.watch.journal import parting

# Words in the errors that a lost peer causes: errors of gloo, NCCL and the store.
LOST = re.compile(
    r"gloo|NCCL|nccl|[Cc]onnection|[Ss]ocket|Broken pipe|[Tt]imed? ?out|remote process|DistStore"
)
STRAYED = "DivergenceError: "


def explain(
    rank: int, world: int, before: dict[int, dict], now: dict[int, dict], clock: float, own_end: str
) -> list[str]:
    """Describes what happened to the ranks: the cause first, then the other ranks' states, then a summary.

    If a rank is dead or stopped, it is the cause of all errors of the kind that a lost peer gives. An error
    of another kind is a cause too.

    before, now: the states of the ranks, read at two moments. clock: the second moment, `Heartbeat.now`.
    own_end: the line of this rank.
    """
    failed = {r: words for r, words in now.items() if words["failure"]}
    stood = {r: words for r, words in now.items() if words["stands"]}
    quiet = [r for r in now if r != rank and r not in failed and r not in stood]
    silent = {r: now[r] for r in quiet if now[r]["beat"] == before.get(r, {}).get("beat")}
    never = [r for r in range(world) if r not in now]
    lost = {r: words for r, words in failed.items() if LOST.search(words["failure"].split(", then ")[0])}
    causes = {r: words for r, words in failed.items() if r not in lost} or ({} if silent or never else failed)

    # The causes, and this rank's own end.
    lines = [f"rank {r} was never heard of" for r in never]
    for r, words in silent.items():
        silence = clock - words["at"]
        lines.append(
            f"rank {r} is silent for {silence:.1f} s, stopped or dead; "
            f"last heard of in step {words['step']}, {after(words['sites'])}"
        )
    first = min(causes, key=lambda r: causes[r]["at"], default=None)
    if first is not None:
        its = causes[first]
        earlier = [str(r) for r, words in stood.items() if words["at"] < its["at"]]
        behind = f", after the standstill of rank {', '.join(earlier)}" if earlier else ""
        also = (
            "rank {} also failed, in step {}: {}{}"
            if lines
            else "the first to fail was rank {} in step {}: {}{}"
        )
        lines.append(also.format(first, its["step"], its["failure"], behind))
    lines.append(own_end)

    # The other ranks.
    lines += [
        f"rank {r} lost a peer in step {words['step']}" for r, words in lost.items() if r not in (rank, first)
    ]
    for r, words in stood.items():
        if r != rank:
            lines.append(f"rank {r} stood still, in step {words['step']}, {after(words['sites'])}")
    for r in quiet:
        if r not in silent:
            lines.append(f"rank {r} is alive, in step {now[r]['step']}, {after(now[r]['sites'])}")

    # Where their journals differ. A rank that is gone has made fewer calls: that is not a difference.
    journals = {r: words["sites"] for r, words in now.items() if words["votes"] == now[rank]["votes"]}
    gone = silent or never or (first is not None and first not in lost)
    parted = parting(journals, skipped=not gone)
    lines += [parted] if parted else []
    return [*lines, _in_short(rank, now, sorted([*silent, *never]), first, sorted(lost), bool(parted))]


def _in_short(
    rank: int, now: dict[int, dict], gone: list[int], first: int | None, lost: list[int], parted: bool
) -> str:
    """The summary in the last line, for a reader who sees only the end of the log."""
    divergence = [words["failure"] for words in now.values() if f"{words['failure']}".startswith(STRAYED)]
    if parted or divergence:
        where = f": {divergence[0].removeprefix(STRAYED)}" if divergence else ", as above"
        return f"in short: the ranks called different collectives, and no weights were changed by it{where}"
    if gone:
        steps = {now[r]["step"] for r in gone if r in now}
        where = f" in step {max(steps)}" if steps else " before the first step"
        losers = f"; rank {', '.join(map(str, lost))} lost contact" if lost else ""
        return f"in short: rank {', '.join(map(str, gone))} was killed or stopped{where}{losers}"
    if first is not None:
        return f"in short: rank {first} failed in step {now[first]['step']}: {now[first]['failure']}"
    return f"in short: no rank is known to have failed; rank {rank} stood still in step {now[rank]['step']}"


def after(sites: list[str]) -> str:
    return f"in or after {sites[-1]}" if sites else "before its first collective"


def cause(error: BaseException | None) -> str:
    """The exceptions in the order in which they were raised, each as its first line.

    The code that ends a run may fail too; that failure is not the reason of the end.
    """
    lines: list[str] = []
    while error:
        lines.append(f"{type(error).__name__}: {error}".splitlines()[0])
        error = None if error.__suppress_context__ else error.__context__
    return ", then ".join(reversed(lines))
