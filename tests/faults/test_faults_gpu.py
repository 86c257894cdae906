"""On GPUs, too, a run ends soon when a rank stops or raises.

Kernels then wait for that rank's kernels, and Python may wait behind a full queue. As tests they start
themselves under torchrun, on four ranks. Where there are fewer GPUs, the ranks share them
(benchmarks/shared.py).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from symm_ranks import ROOT

TIMEOUT = 15.0  # of a step
TORCHRUN = 30.0  # s that it gives a rank to end by itself; a stopped one does not
FLAGS = (
    "tiny --steps 20 --train.batch 1 --train.eval-every 0 --train.eval-batches 1 "
    "--parallel.ep 4 --checkpoint.mode off"
).split()


@pytest.mark.gpu
@pytest.mark.whole_gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("how", "layers"), [("stops", 4), ("stops", 16), ("raises", 4)])
def test_the_others_end(tmp_path, how, layers):
    """16 layers are more launches than the queue of a GPU takes."""
    shared = [] if torch.cuda.device_count() >= 4 else ["-m", "benchmarks.shared"]
    flags = [*FLAGS, "--model.layers", str(layers), "--train.timeout", str(TIMEOUT), "--out", str(tmp_path)]
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=4",
        *shared,
        __file__,
        how,
        *flags,
    ]
    env = os.environ | dict(PYTHONPATH=f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    ran = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=360)
    ended = time.time()
    said = ran.stdout + ran.stderr
    assert ran.returncode == 1, said
    took = ended - float(re.findall(r"step 6: (\S+)", said)[0])
    assert took < (TIMEOUT + TORCHRUN if how == "stops" else 0) + 15, said
    if how == "raises":
        assert "the first to fail was rank 2 in step 7: RuntimeError: a guard of rank 2" in said, said
    elif layers == 4:
        assert "s (--train.timeout)" in said and "rank 2 is silent for" in said, said
    else:
        assert "nothing has moved" in said or f"Timeout (0:00:{TIMEOUT:.0f}" in said, said


def main(how: str, argv: list[str]) -> None:
    import train

    real = train.Trainer.forward_backward

    def forward_backward(self, *args):
        if self.step == 6 and self.run.rank == 2:
            print("step 6:", time.time(), flush=True)
            if how == "raises":
                raise RuntimeError("a guard of rank 2")
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(self, *args)

    train.Trainer.forward_backward = forward_backward
    train.main(argv)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
