"""What README and docs show runs as it stands, on two processes.

And examples/own_loop.py trains the same model on one process and on two.
"""

import os
import re
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(
        block,
        id=f"{page.name}-{number}",
        marks=[] if page.name == "README.md" else pytest.mark.slow,
    )
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S))
]
EAGER = dict(TORCH_COMPILE_DISABLE="1")


def torchrun(world: int, words: list[str], **extra: str) -> str:
    """What `world` gloo processes print; AssertionError with their output unless all end with 0."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **extra}
    done = forked.torchrun(world, words, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_pages_have_snippets():
    assert {param.id.rpartition("-")[0] for param in SNIPPETS} >= {"README.md", "huggingface.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_snippet_in_python_is_fenced_as_such(page):
    """An indented one would escape the next test."""
    outside = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    assert not re.findall(r"^    (?:import \w+|from [\w.]+ import .*|\w+ = \w+\(.*)$", outside, re.M)


@pytest.mark.parametrize("block", SNIPPETS)
def test_a_snippet_runs_as_it_stands(block, tmp_path):
    if "transformers" in block:
        pytest.importorskip("transformers")
    world = (
        "import torch.distributed as dist\nassert not dist.is_initialized() or dist.get_world_size() == 2\n"
    )
    (tmp_path / "snippet.py").write_text(block + world)
    torchrun(2, [str(tmp_path / "snippet.py")])


def numbers(said: str) -> dict[int, list[tuple[float, float]]]:
    """(loss, norm) of each step, by rank."""
    found: dict[int, list[tuple[float, float]]] = {}
    for rank, loss, norm in re.findall(r"rank (\d+) step \d+ loss ([\d.]+) norm ([\d.]+)", said):
        found.setdefault(int(rank), []).append((float(loss), float(norm)))
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Losses and norms of one process over 14 steps."""
    folder = tmp_path_factory.mktemp("own_loop")
    return numbers(
        torchrun(1, ["examples/own_loop.py", "--steps", "14", "--save", str(folder / "1")], **EAGER)
    )[0]


@pytest.mark.slow
@pytest.mark.parametrize("ep", [1, 2])
def test_own_loop_on_two_ranks_is_the_one_of_one(alone, tmp_path, ep):
    """Ten steps on two ranks, then four more on one rank, from the two ranks' checkpoint."""
    assert alone[-1][0] < 0.25 * alone[0][0]
    words = ["examples/own_loop.py", "--steps", "10", "--ep", str(ep), "--save", str(tmp_path / "step-10")]
    two = numbers(torchrun(2, words, **EAGER))
    assert two[0] == two[1], "ranks agree"
    words = ["examples/own_loop.py", "--steps", "14", "--load", str(tmp_path / "step-10")]
    rest = numbers(torchrun(1, words, **EAGER))[0]
    assert len(alone) == len(two[0] + rest) == 14
    for got, want in zip(two[0] + rest, alone, strict=True):
        assert got == pytest.approx(want, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_own_loop_compiled(alone):
    two = numbers(torchrun(2, ["examples/own_loop.py", "--steps", "4", "--ep", "2"]))
    for got, want in zip(two[0], alone, strict=False):
        assert got == pytest.approx(want, rel=1e-4, abs=1e-5)
    assert two[0] == two[1] and len(two[0]) == 4
