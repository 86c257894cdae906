"""A refused command line under torchrun: one message, however late rank 0 comes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
