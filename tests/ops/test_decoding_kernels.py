"""Kernels of decoding and of the delta rule in Triton's interpreter: runs their tests again in processes.

next: tests/generate/test_engine.py
"""

import os
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    "test_decode_attention.py",
    "test_decode_heads.py",
    "test_decode_in_blocks.py",
    "test_one_token.py",
    "test_sample.py",
    "test_norm.py",
    "test_quantised_ops.py",
    "test_delta_kernels.py",
]


def in_the_interpreter(*which: str) -> None:
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "-x", *which]
    command += [f"tests/ops/{name}" for name in FILES]
    ran = forked.run(command, env=os.environ | dict(TRITON_INTERPRET="1"), timeout=1500)
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-4000:] + ran.stderr[-2000:]


def test_a_few():
    """One case of attention, one of the sampler, the random numbers' bits, and the delta rule."""
    in_the_interpreter(
        "-m", "not slow", "-k", "kernels_are and latents or 0.6 or numpys or of_their_own_mixed or plain_form"
    )


@pytest.mark.slow
def test_all():
    in_the_interpreter()
