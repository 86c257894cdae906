"""The table of what fits: it is this version's, and its cells are the dry run's verdicts.

next: docs/make_fits.py
"""

import runpy
from pathlib import Path

import pytest

from tmoe.config.presets import presets
from tmoe.model.count import count_parameters
from tmoe.plan.fitting import verdict

ROOT = Path(__file__).parents[2]
FITS = runpy.run_path(str(ROOT / "docs/make_fits.py"))
PAGE = ROOT / "docs/finetune.md"
ORDER = ("yes", "block", "offload", "–")


def rows() -> list[list[str]]:
    table = PAGE.read_text().split("<!-- fits -->\n")[1].split("\n<!-- end -->")[0]
    return [[part.strip() for part in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_rows_are_those_of_this_version():
    for preset in ("olmoe-1b-7b", "qwen3-30b-a3b"):
        assert [row for row in rows() if row[0] == preset] == [*FITS["rows"]([preset])], (
            "PYTHONPATH=. python docs/make_fits.py draws them"
        )


@pytest.mark.slow
def test_the_page_has_the_table_of_this_version():
    text = PAGE.read_text()
    assert FITS["drawn"](text) == text, "PYTHONPATH=. python docs/make_fits.py draws it"


@pytest.mark.parametrize("way", range(len(FITS["WAYS"])))
@pytest.mark.parametrize("task", FITS["TASKS"])
def test_cells_are_the_verdicts_of_the_dry_run(task, way):
    """For one H100 and eight, one H200 and eight: the cell's settings fit, and those before it do not."""
    way = FITS["WAYS"][way]
    for preset in ("olmoe-1b-7b", "qwen3-30b-a3b"):
        (row,) = (r for r in rows() if r[:2] == [preset, way.flags] and task in r[2].split(", "))
        for column, ranks, gpu in ((5, 1, "h100"), (9, 8, "h100"), (6, 1, "h200"), (10, 8, "h200")):
            cfg = FITS["settings"](preset, task, way)
            said = [
                verdict(change(cfg), FITS["axes_of"](cfg, ranks), gpu)[0]
                for change in FITS["SAVING"].values()
            ]
            fits = [line.startswith("verdict: fits.") for line in said]
            assert [*fits, True].index(True) == ORDER.index(row[column])


def test_no_cell_fits_less_than_the_bytes_of_its_weights():
    """Frozen weights take 2 bytes; trained ones 4, gradients at least 2, moments 8 on the GPU or the host.

    In NF4 they take half a byte, on every rank.
    """
    counts = {name: count_parameters(cfg.model).total for name, cfg in presets().items()}
    for preset, flags, _, *cells in rows():
        weights = counts[preset]
        a_weight = {"yes": 14, "block": 14, "offload": 6} if flags == "all" else dict.fromkeys(ORDER[:3], 2)
        nf4 = "nf4" in flags
        if nf4:
            a_weight = dict.fromkeys(ORDER[:3], 0.5)
        for cell, ranks, GB in zip(cells, [1] * 4 + [8] * 4, [24, 48, 80, 141] * 2, strict=True):
            assert a_weight.get(cell, 0) * weights / (1 if nf4 else ranks) < GB * 2**30, (
                preset,
                flags,
                cell,
                ranks,
                GB,
            )
        for four in (cells[:4], cells[4:]):  # a larger card needs no more than a smaller one
            assert sorted(four, key=ORDER.index, reverse=True) == four
        assert all(ORDER.index(b) <= ORDER.index(a) for a, b in zip(cells[:4], cells[4:], strict=True))
