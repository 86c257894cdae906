"""Sums of two digits for --task grpo: prompts with mostly wrong answers, and questions with the right ones.

    python examples/digit_sums.py OUT

writes OUT/mistakes.jsonl (prompt and completion; one completion in eight is right, the wrong ones are close)
and OUT/sums.jsonl (prompt and answer). A model that is finetuned on mistakes.jsonl answers one question in
eight correctly, so right answers occur and rewards can make them more likely. docs/grpo.md has the next
steps.
"""

import json
import random
import sys
from pathlib import Path

DIGITS = range(6)
COPIES = 40  # answers to each sum in mistakes.jsonl
RIGHT = 0.12  # share of right answers
NEAR = 4  # largest distance of a wrong answer from the right one


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
