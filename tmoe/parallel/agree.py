"""Lets ranks agree on which of them failed and why, on each rank's value, and on whether their facts match.

    gathered           each rank's value
    attempt            runs work on every rank; no rank waits for a rank whose work has failed
    differing_facts    the facts in which ranks differ
    gathered_by_store  words exchanged through a store, for calls that some ranks may never make

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
# the store through which a group was formed
_get_process_group_store = find("torch.distributed.distributed_c10d._get_process_group_store")


def gathered(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Each rank's value, in rank order. The value must be picklable.

    A collective of the group; group None: this process alone.
    """
    if group is None:
        return [value]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def error_text(error: BaseException) -> str:
    """The type and message of an error."""
    return f"{type(error).__name__}: {error}"


def attempt(
    work: Callable[[], T],
    group: dist.ProcessGroup | None,
    errors: tuple[type[Exception], ...] = (Exception,),
    words: Callable[[Exception], str] = error_text,
) -> tuple[T | None, Exception | None, dict[int, str]]:
    """Runs `work` on every rank, and reports to every rank which ranks failed.

    A collective of the group; group None: this process alone.

    errors: exceptions that count as a failure; any other exception is not caught.
    words: turns an error into text.
    Returns the result and the error of this rank, and the text of each rank that failed, by rank.
    """
    result = None
    error = None
    try:
        result = work()
    except errors as caught:
        error = caught
    messages = gathered(None if error is None else words(error), group)
    return result, error, {rank: why for rank, why in enumerate(messages) if why is not None}


def by_reason(failures: Mapping[int, str]) -> dict[str, list[int]]:
    """Each distinct reason, with the ranks that failed for that reason."""
    ranks: dict[str, list[int]] = {}
    for rank, why in failures.items():
        ranks.setdefault(why, []).append(rank)
    return ranks


def differing_facts(facts: Mapping[str, Any], group: dist.ProcessGroup | None) -> list[str]:
    """A line for each fact that has another value on some rank than on rank 0.

    A collective; all ranks get the same lines.
    """
    by_rank = gathered(dict(facts), group)
    lines = []
    for name, value in by_rank[0].items():
        if ranks := [rank for rank, other in enumerate(by_rank) if other.get(name) != value]:
            differing = by_rank[ranks[0]].get(name)
            lines.append(f"{name}: {differing} on rank {ranks}, {value} on rank 0; must be the same on all")
    return lines


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The store through which the group was formed, else the default store with a prefix for this group."""
    if _get_process_group_store:
        return _get_process_group_store(group)
    return dist.PrefixStore(f"tmoe {group.group_name}", default_store())


def gathered_by_store(
    group: dist.ProcessGroup, key: str, word: Any, ahead: Callable[[], Any]
) -> list[Any] | None:
    """Exchanges a word between all ranks of a group, through the group's store; returns them in rank order.

    All ranks must call it with the same key. The result is None once ahead() returns True, because some rank
    then never will call. Use it for an exchange that only some ranks may see a reason for: all_gather_object
    would wait for the other ranks until the watchdog ends the process.

    word: this rank's word, any value that JSON can represent.
    ahead: waits for this rank's own work, then returns whether the other ranks have moved on without this
        exchange.
    Raises TimeoutError after the store's timeout.
    """
    ranks = dist.get_process_group_ranks(group)
    store, rank = store_of(group), group.rank()
    calls = f"tmoe {key} of {ranks}"  # groups split from the same parent group share its store
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

    # `ahead` waits for this rank's own work. So once the word is stored, no rank waits for unfinished work.
    if ahead():
        return None
    store.set(keys[rank], json.dumps(word))
    passed = False

    def all_here() -> bool:
        nonlocal passed
        passed = bool(ahead())  # checked before the words, because a peer's word may belong to a later call
        return passed or store.check(keys)

    wait(all_here, keys[rank])
    if passed:
        store.delete_key(keys[rank])  # otherwise a later rank would read the word in another call
        return None
    words = [json.loads(store.get(k)) for k in keys]
    if store.add(prefix, 1) == len(keys):  # all ranks have read the words: the next call may begin
        for k in (*keys, prefix):
            store.delete_key(k)
        store.add(calls, 1)
    wait(lambda: store.add(calls, 0) > call, prefix)  # then the next call may write its words
    return words
