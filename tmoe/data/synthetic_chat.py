"""Makes a tiny chat set from a seed: questions about a few made-up people, their answers, and preferences.

    python -m tmoe.data --facts OUT [--people N] [--seed S]

writes OUT/chat.jsonl (messages), OUT/pairs.jsonl (prompt, chosen, rejected) and OUT/questions.jsonl (prompt
and answer, to ask a trained model). Tests and docs finetune on it: `tiny` learns it on a CPU.

next: data/chat/conversations.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tmoe.base.disk import unwritable_words
from tmoe.data.tokenizer import DataError

NAMES = [
    *("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jana", "Kai", "Lena"),
    *("Max", "Nora", "Otto", "Pia", "Quin", "Rosa", "Sam", "Tara", "Udo", "Vera", "Will", "Zoe"),
]
CITIES = ["Oslo", "Rome", "Lima", "Cairo", "Paris", "Delhi", "Quito", "Tokyo", "Berlin", "Lagos"]
PETS = ["cat", "dog", "fox", "hen", "owl", "pig", "bee", "frog"]
COLOURS = ["red", "blue", "green", "black", "white", "pink", "brown", "grey"]
# for each kind of fact: its values, the ways to ask for it, and the sentence that states it
# prose: What
ASKED = [
    (CITIES, ("Where does {} live?", "Which city is {}'s home?", "{} lives where?"), "{} lives in {}."),
    (PETS, ("Which pet has {}?", "What animal does {} keep?", "{}'s pet is what?"), "{} has a {}."),
    (COLOURS, ("Which colour likes {}?", "What is {}'s colour?", "{} likes which colour?"), "{} likes {}."),
]


class Fact(NamedTuple):
    """The questions that ask for a fact, the right answer, and a wrong answer."""

    questions: tuple[str, ...]
    answer: str
    wrong: str


def small_facts(people: int = 8, seed: int = 0) -> list[Fact]:
    """Three facts about each person: city, pet, colour. A wrong answer has another value of the same kind."""
    if not 1 <= people <= len(NAMES):
        raise DataError(f"--people={people}: must be from 1 to {len(NAMES)}")
    draw = random.Random(seed)
    facts = []
    for name in draw.sample(NAMES, people):
        for values, questions, statement in ASKED:
            right, wrong = draw.sample(values, 2)
            asked = tuple(question.format(name) for question in questions)
            facts.append(Fact(asked, statement.format(name, right), statement.format(name, wrong)))
    return facts


def chat_rows(facts: Iterable[Fact]) -> list[dict[str, Any]]:
    """A conversation for each way to ask for each fact."""
    return [
        dict(messages=[dict(role="user", content=question), dict(role="assistant", content=fact.answer)])
        for fact in facts
        for question in fact.questions
    ]


def preference_rows(facts: Iterable[Fact]) -> list[dict[str, Any]]:
    """For each way to ask for each fact, a row that prefers the right answer to the wrong one."""
    return [
        dict(
            prompt=[dict(role="user", content=question)],
            **{
                name: [dict(role="assistant", content=text)]
                for name, text in (("chosen", fact.answer), ("rejected", fact.wrong))
            },
        )
        for fact in facts
        for question in fact.questions
    ]


def write_facts(facts: Path, *, people: int = 8, seed: int = 0) -> None:
    """Writes a tiny chat set of made-up facts.

    Args:
        facts: folder to make; must not exist
        people: number of people; each has three facts
        seed: another seed gives other people and facts
    """
    drawn = small_facts(people, seed)
    asked = [dict(prompt=question, answer=fact.answer) for fact in drawn for question in fact.questions]
    files = dict(chat=chat_rows(drawn), pairs=preference_rows(drawn), questions=asked)
    if facts.exists():
        raise DataError(f"--facts={facts}: exists already; name a new folder")
    if wrong := unwritable_words(facts):
        raise DataError(f"--facts={facts}: {wrong}")
    facts.mkdir(parents=True)
    for name, rows in files.items():
        (facts / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{facts / name}.jsonl: {len(rows)} rows")
