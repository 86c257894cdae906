"""What a launch with torchrun, or with half of what it sets, says when it is refused: one message, however late rank 0 comes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import train

ROOT = Path(__file__).parents[1]
LATE = "import os, time\nif os.environ.get('RANK') == '0':\n    time.sleep(2)\n"


@pytest.mark.parametrize(
    "words, says", [("--parallel.dp 3", "error: --parallel.dp=3"), ("--parallel.ep 0", "--parallel.ep=0: must be")]
)
def test_one_message_though_rank_0_is_the_last_to_start(tmp_path, words, says):
    (tmp_path / "sitecustomize.py").write_text(LATE)
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        f"{torchrun} train.py tiny {words}".split(), cwd=ROOT, env=env, capture_output=True, text=True, timeout=90
    )
    assert ended.returncode
    assert (ended.stdout + ended.stderr).count(says) == 1


@pytest.mark.parametrize(
    ("set_", "says"),
    [
        (dict(WORLD_SIZE="2"), "RANK= and WORLD_SIZE=2 in the environment: RANK must be from 0 to WORLD_SIZE - 1"),
        (dict(RANK="0"), "RANK=0 and WORLD_SIZE= in the environment"),
        (dict(RANK="3", WORLD_SIZE="2"), "RANK=3 and WORLD_SIZE=2 in the environment"),
        (dict(RANK="abc", WORLD_SIZE="2"), "RANK='abc' in the environment: must be a whole number from 0 on"),
        (dict(LOCAL_RANK="-1"), "LOCAL_RANK='-1' in the environment"),
        (dict(WORLD_SIZE=""), "WORLD_SIZE='' in the environment: must be a whole number from 1 on"),
    ],
    ids=str,
)
def test_half_a_launcher_is_one_error(monkeypatch, capsys, set_, says):
    """It would wait for ranks that nobody starts, or meet them in the middle of the first step."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        train.main(["tiny"])
    assert ended.value.code == 2 and capsys.readouterr().err.startswith(f"error: {says}")
