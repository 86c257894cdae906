"""Sums of two digits for --task grpo: answers with mistakes to begin with, and questions with their answers.

    python examples/digit_sums.py OUT

writes OUT/mistakes.jsonl (prompt and completion, of which one in eight is right and the others are near) and
OUT/sums.jsonl (prompt and answer). A model that is finetuned on the first is right once in eight times; what
it needs to learn from rewards is there, and is not likely yet. docs/grpo.md goes on from here.
"""

import json
import random
import sys
from pathlib import Path

DIGITS = range(6)
COPIES = 40  # answers to each sum
RIGHT = 0.12
NEAR = 4  # how far wrong answers are from right ones


def main(out: Path) -> None:
    draw = random.Random(0)
    sums = [(f"{a}+{b}=", a + b) for a in DIGITS for b in DIGITS]
    answers = []
    for prompt, right in sums * COPIES:
        wrong = [n for n in range(right - NEAR, right + NEAR + 1) if n >= 0 and n != right]
        answers.append((prompt, right if draw.random() < RIGHT else draw.choice(wrong)))
    draw.shuffle(answers)
    draw.shuffle(sums)
    out.mkdir(parents=True, exist_ok=True)
    for name, field, rows in (("mistakes", "completion", answers), ("sums", "answer", sums)):
        lines = (json.dumps({"prompt": prompt, field: str(n)}) + "\n" for prompt, n in rows)
        (out / f"{name}.jsonl").write_text("".join(lines))
        print(f"{out / name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
