"""Lets ranks agree: on whose work failed and why, on what each has found, on whether all have the same facts.

    gathered    each rank's value
    attempt     runs work on every rank; no rank waits for one whose work has failed
    unlike      the facts in which ranks differ
    together    words through a store, where not all ranks may come

next: parallel/collectives.py
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from tmoe.base.private_torch import find
from tmoe.parallel.mesh import default_store

T = TypeVar("T")
# where a group met
_get_process_group_store = find("torch.distributed.distributed_c10d._get_process_group_store")


def gathered(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Each rank's value, which pickle takes, in rank order. A collective; group None: this process alone."""
    if group is None:
        return [value]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def named(error: BaseException) -> str:
    """The type and words of an error."""
    return f"{type(error).__name__}: {error}"


def attempt(
    work: Callable[[], T],
    group: dist.ProcessGroup | None,
    errors: tuple[type[Exception], ...] = (Exception,),
    words: Callable[[Exception], str] = named,
) -> tuple[T | None, Exception | None, dict[int, str]]:
    """Runs `work` on every rank; every rank hears which failed. A collective; group None: this process alone.

    errors: what counts as a failure; others are not caught. words: puts an error into words.
    Returns the result and the error of this rank, and the words of each rank that failed.
    """
    result = None
    error = None
    try:
        result = work()
    except errors as caught:
        error = caught
    told = gathered(None if error is None else words(error), group)
    return result, error, {rank: why for rank, why in enumerate(told) if why is not None}


def by_reason(failures: Mapping[int, str]) -> dict[str, list[int]]:
    """Each different reason, with the ranks that failed for it."""
    ranks: dict[str, list[int]] = {}
    for rank, why in failures.items():
        ranks.setdefault(why, []).append(rank)
    return ranks


def unlike(facts: Mapping[str, Any], group: dist.ProcessGroup | None) -> list[str]:
    """A line for each fact that differs on some rank from rank 0's; the same on all ranks. A collective."""
    told = gathered(dict(facts), group)
    lines = []
    for name, value in told[0].items():
        if ranks := [rank for rank, other in enumerate(told) if other.get(name) != value]:
            theirs = told[ranks[0]].get(name)
            lines.append(f"{name}: {theirs} on rank {ranks}, {value} on rank 0; must be the same on all")
    return lines


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The store in which the group met, or keys of its own in the default store."""
    if _get_process_group_store:
        return _get_process_group_store(group)
    return dist.PrefixStore(f"tmoe {group.group_name}", default_store())


def together(group: dist.ProcessGroup, key: str, word: Any, ahead: Callable[[], Any]) -> list[Any] | None:
    """The words of all ranks of a group that call this with one key, in rank order, through its store.

    None once ahead() says that a rank never will call. For what should be a collective although other ranks
    may see no reason for it: all_gather_object would wait for them until the watchdog ends the process.

    word: what JSON can hold. ahead: waits for this rank's own work; then whether the others have gone on.
    Raises TimeoutError after the store's timeout.
    """
    ranks = dist.get_process_group_ranks(group)
    store, rank = store_of(group), group.rank()
    calls = f"tmoe {key} of {ranks}"  # groups that were split from one share its store
    call = store.add(calls, 0)
    prefix = f"{calls} {call}"
    keys = [f"{prefix} {q}" for q in ranks]

    def wait(done: Callable[[], bool], left: str) -> None:
        end = time.monotonic() + store.timeout.total_seconds()
        while not done():
            if time.monotonic() > end:
                missing = [q for q, k in zip(ranks, keys, strict=True) if not store.check([k])]
                store.delete_key(left)
                raise TimeoutError(f"{key}: ranks {missing} did not come within {store.timeout}")
            time.sleep(0.01)

    # `ahead` waits for this rank's own work: once its word is out, no rank waits for work that it still does.
    if ahead():
        return None
    store.set(keys[rank], json.dumps(word))
    passed = False

    def all_here() -> bool:
        nonlocal passed
        passed = bool(ahead())  # before the words: a peer's may be of a later call
        return passed or store.check(keys)

    wait(all_here, keys[rank])
    if passed:
        store.delete_key(keys[rank])  # or a rank that comes later would read it in another call
        return None
    words = [json.loads(store.get(k)) for k in keys]
    if store.add(prefix, 1) == len(keys):  # all have read: the next call may begin
        for k in (*keys, prefix):
            store.delete_key(k)
        store.add(calls, 1)
    wait(lambda: store.add(calls, 0) > call, prefix)  # or this rank's next word would be read as this one
    return words
