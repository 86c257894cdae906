"""When the stages of a pipeline post their receives.

A receive that waits is a kernel that holds multiprocessors, and a message that is sent before its receive is
posted makes its sender wait in the same way. So a receive is posted before the action that runs while its
message is sent, if every action takes the time that the cost model predicts. A rank that is idle then has no
kernel that the receive could slow down.

next: pipelining.py
"""

import bisect
from collections.abc import Sequence

from tmoe.parallel.pipeline_schedule import Message, Run, StageCost, Table, messages, source

Posts = tuple[tuple[tuple[Message, ...], ...], ...]  # by rank and by place in its row


def posts(table: Table, costs: Sequence[StageCost], latency: float = 0.0) -> Posts:
    """The messages whose receives each rank posts just before each of its actions.

    A rank posts the messages of a sender in the order of sending, each at the latest before the action that
    needs it.

    costs: seconds of each chunk and of each piece of the head. latency: seconds of a message.
    """
    run = Run(table, list(costs), latency).to_the_end()
    close = 1e-9 * max(run.now)  # an action that ends as the message is sent does not delay it
    places: list[dict[Message, int]] = []
    for rank, row in enumerate(table.ranks):
        needed = {
            message: place
            for place, action in enumerate(row)
            for message in table.needs(action)
            if source(table, message) != rank
        }
        ends = run.ends[rank]
        due = {m: bisect.bisect_right(ends, run.there[m] - latency + close) for m in needed}
        places.append({message: min(due[message], place) for message, place in needed.items()})
    found: list[list[list[Message]]] = [[[] for _ in row] for row in table.ranks]
    for (_, rank), sent in messages(table).items():
        place = len(table.ranks[rank])
        for message in reversed(sent):
            place = min(place, places[rank][message])
            found[rank][place].insert(0, message)
    return tuple(tuple(map(tuple, row)) for row in found)
