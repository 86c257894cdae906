"""Draws the tables of docs/migrate.md: every flag of the other frameworks and what it becomes.

PYTHONPATH=. python docs/make_migrate.py
"""

import re
from pathlib import Path

from tmoe.extras.migrate.frameworks import FRAMEWORKS
from tmoe.extras.migrate.tables import page


def drawn(text: str) -> str:
    """The page with the tables of this version between its marks."""
    for framework, (rows, _) in FRAMEWORKS.items():
        mark = re.compile(rf"(<!-- {framework} -->\n).*?(<!-- end -->)", re.S)
        table = page(rows)
        text = mark.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text)
    return text


if __name__ == "__main__":
    PAGE = Path(__file__).with_name("migrate.md")
    PAGE.write_text(drawn(PAGE.read_text()))
