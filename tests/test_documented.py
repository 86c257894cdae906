"""By the dry run each command of README.md and docs fits GPUs of 80 GB, or its page names the card."""

import functools

import documented
import pytest

from tmoe.cli.parse import parse
from tmoe.config.axes import Axes
from tmoe.config.gpus import GPUS
from tmoe.plan.fitting import verdict

COMMON = ("h100", "a100")
FOUND = list(documented.shown())


@functools.cache
def verdicts(world: int, words: tuple[str, ...]) -> dict[str, str]:
    """The dry run's verdict on each GPU."""
    own = [word for word in words if word != "--dry-run"]
    cfg = parse([*own, "--dry-run", "--world", str(world)], "")
    return {name: verdict(cfg, Axes.of(cfg.parallel, world), name)[0] for name in GPUS}


@pytest.mark.parametrize("shown", [one for one in FOUND if one.words[0] != "tiny"], ids=lambda one: one.place)
def test_fits(shown):
    said = verdicts(shown.world, tuple(shown.words))
    fits = [name for name, text in said.items() if text.startswith("verdict: fits.")]
    named = [name for name in fits if name.upper() in shown.around]
    assert named or {*COMMON} <= {*fits}, "\n".join(said[name] for name in COMMON)


def test_commands_are_found():
    """README's four, and every page that trains a published model; a command that does not fit is seen."""
    pages = [one.place.partition(":")[0] for one in FOUND if one.words[0] != "tiny"]
    assert pages.count("README.md") == 4
    wanted = {f"docs/{name}.md" for name in ("finetune", "grpo", "huggingface", "multinode", "parallel")}
    assert wanted <= {*pages}
    too_large = verdicts(8, ("qwen3-30b-a3b", "--parallel.ep", "8"))
    assert too_large["h100"].startswith("verdict: does not fit. 116.2 GiB")
    assert too_large["h200"].startswith("verdict: fits.")


def test_continued_lines_comments_and_launchers_are_read(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(
        "Text of `train.py qwen3-30b-a3b`.\n\n"
        "    torchrun --nnodes 2 --nproc-per-node 8 train.py \\\n"
        "        --init org/Qwen3-30B-A3B --parallel.ep 8  # a note\n"
        "    python train.py tiny --seed 1    what it does\n\nNeeds an H200.\n"
    )
    monkeypatch.setattr(documented, "ROOT", tmp_path)
    one, two = documented.shown()
    assert (one.place, one.world, one.words) == ("README.md:3", 16, ["qwen3-30b-a3b", "--parallel.ep", "8"])
    assert (two.world, two.words) == (1, ["tiny", "--seed", "1"]) and "H200" in two.around
