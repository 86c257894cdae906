"""No message is longer than twenty lines, and items that are alike are counted together.

next: tmoe/base/listing.py
"""

import pytest

from tmoe.base.listing import listed


def test_a_short_list_is_shown_whole():
    names = [f"model.layers.{i}.norm.weight: missing" for i in range(19)]
    assert listed("not whole", names).splitlines() == ["not whole", *(f"  {name}" for name in names)]
    assert listed("", ["one"]) == "one"


def test_a_long_list_has_a_line_for_each_kind():
    names = [
        f"model.layers.{i}.mlp.experts.{j}.up_proj.weight: missing" for i in range(2, 50) for j in range(128)
    ]
    lines = listed(
        "not whole", [*names, "model.norm.weight: F64", "model.layers.7.norm.weight: missing"]
    ).splitlines()
    assert lines == [
        "not whole",
        "  model.layers.*.mlp.experts.*.up_proj.weight: missing (6,144, one is layers.2 experts.0)",
        "  model.norm.weight: F64",
        "  model.layers.7.norm.weight: missing",
    ]


@pytest.mark.parametrize(("head", "shown"), [("head", 18), ("", 19), ("two\nlines", 17)])
def test_many_kinds_are_cut(head, shown):
    """100 kinds of two items each: the line about what is cut counts items."""
    lines = listed(head, [f"layers.{i}.t{k}: 0.5 here" for k in range(100) for i in range(2)]).splitlines()
    assert len(lines) == 20 and lines[-1].strip() == f"… {2 * (100 - shown)} more"
    assert lines[-2].strip() == f"layers.*.t{shown - 1}: 0.5 here (2, one is layers.0)"


def test_items_of_several_lines_count_as_such():
    assert len(listed("head", ["a\nb\nc"] * 10 + [f"d{i}" for i in range(30)]).splitlines()) == 20
