"""Puts completions under the prompts of other rows; KTO computes its baseline from them.

next: post/kto.py
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from tmoe.data.chat.chat_dataset import ChatDataset
from tmoe.data.chat.packing import plan
from tmoe.data.chat.source import ChatSource
from tmoe.data.tokenizer import DataError

Sequence = tuple[int, np.ndarray, np.ndarray]  # a sequence's number, its ids, and which ids are trained


class Mismatched:
    """Each completion of a data set under the prompt of another row; the pairing is fixed for all steps.

    The other row is the next row of the same source and split, in the order of the file, that has a different
    prompt; after the last row the first one follows. The pairing is the same in every layout. A sequence that
    is longer than a row of S tokens is cut at its end.

    Raises DataError for a split with one prompt.
    """

    def __init__(self, data: ChatDataset) -> None:
        self.data = data
        self.partners = [_partners(source) for source in data.sources]

    def sequence(self, number: int) -> Sequence:
        """Completion `number` under its other prompt."""
        place = bisect_right(self.data.bases, number) - 1
        source, i = self.data.sources[place], number - self.data.bases[place]
        other = int(self.partners[place][i])
        prompt, _ = source.sequence(other)
        ids, trained = source.sequence(i)
        prompt = prompt[: source.firsts[other]]
        answer = slice(int(source.firsts[i]), None)
        whole = np.concatenate([prompt, ids[answer]])[: source.seq]
        learned = np.concatenate([np.zeros(len(prompt), np.bool_), trained[answer]])[: source.seq]
        return number, whole, learned

    def rows(self, numbers: list[int]) -> list[list[Sequence]]:
        """The completions of these numbers under their other prompts, packed into rows."""
        if not numbers:
            return []
        completions = [self.sequence(number) for number in numbers]
        packed = plan(np.array([len(ids) for _, ids, _ in completions]), self.data.seq)
        order, starts = packed.order[packed.places].tolist(), packed.starts.tolist()
        return [[completions[i] for i in order[starts[r] : starts[r + 1]]] for r in range(packed.rows)]


def _partners(source: ChatSource) -> np.ndarray:
    """For each sequence, the sequence whose prompt its completion is put under; -1 for other splits."""
    units = source.units.tolist()
    count = len(units)
    prompts = [source.sequence(i)[0][: source.firsts[i]].tobytes() for i in units]
    if len(set(prompts)) < 2:
        raise DataError(
            f"{source.name}: a split has only one prompt: --preference.loss kto needs completions under "
            "other prompts, and so two or more prompts in each split; change --data.val-fraction, or give "
            "more data"
        )
    following = [(n + 1) % count for n in range(count)]
    for n in reversed(range(2 * count)):  # two passes, because the first rows follow the last
        at, after = n % count, (n + 1) % count
        if prompts[after] == prompts[at]:
            following[at] = following[after]
    partners = np.full(len(source.lengths), -1)
    partners[units] = np.array(units)[following]
    return partners
