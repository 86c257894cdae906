"""Times how long an asynchronous checkpoint delays training, compared with a bare copy of as many bytes.

    python -m benchmarks.save --gib 30 --folder /fast/disk --json save.jsonl

The state is one rank's as in training: fp32 weights and both moments, in tensors of 1 GiB. The first save
also pins its buffers. When it is on the disk, bare copies into the same pinned buffers and a second save are
timed. Each time is in seconds until the GPU is free again. Without a GPU, the script prints that and copies
inside the host's memory, which times only the disk.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from benchmarks.train import write_line
from tmoe.checkpoint.checkpoints import Checkpoints

PIECE = 2**28  # fp32 elements of a tensor: 1 GiB


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, help="GiB of state; default: 30, without a GPU 1")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path, help="append the result to this file, one JSON object a line")
    args = parser.parse_args()

    # The size of the state: the requested size, if memory and disk have room for it.
    gpu = torch.cuda.is_available()
    if args.gib is None:
        args.gib = 30.0 if gpu else 1.0
    if not 0 < args.gib < float("inf"):
        parser.error(f"--gib={args.gib}: must be a positive number of GiB")
    if not args.folder.is_dir():
        parser.error(f"--folder={args.folder}: must be a folder that is there")
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    room = min(host, torch.cuda.mem_get_info()[0]) if gpu else host // 2  # the host also holds a copy
    if args.gib * 2**30 > (most := min(room, shutil.disk_usage(args.folder).free)):
        parser.error(
            f"--gib={args.gib}: must be at most {most / 2**30:.1f}, "
            f"which memory and {args.folder} have room for"
        )
    if not gpu:
        print(
            f"no GPU here: {args.gib:g} GiB are copied inside the host's memory, then written",
            file=sys.stderr,
        )

    whole, rest = divmod(round(args.gib * 2**28), PIECE)
    sizes = [PIECE] * whole + [rest] * (rest > 0)
    state = {f"tensor{i}": torch.randn(n, device="cuda" if gpu else "cpu") for i, n in enumerate(sizes)}
    bytes_ = sum(t.nbytes for t in state.values())
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        checkpoints = Checkpoints(folder, keep=1, mode="async", info={})
        first = timed(lambda: checkpoints.save(1, dict(state), {}, {}))
        on_disk = timed(checkpoints.finish)
        buffers = checkpoints._staging

        def copy() -> None:
            for name, t in state.items():
                buffers[name].copy_(t, non_blocking=True)

        copies = [timed(copy) for _ in range(3)]
        stall = timed(lambda: checkpoints.save(2, dict(state), {}, {}))
        result = dict(
            date=str(date.today()),
            gpu=torch.cuda.get_device_name() if gpu else None,
            torch=torch.__version__,
            bytes=bytes_,
            first_stall_s=first,
            stall_s=stall,
            bare_copy_s=statistics.median(copies),
            on_disk_s=first + on_disk,
        )
        print(
            f"{bytes_ / 2**30:.1f} GiB: training waited for {stall:.2f} s "
            f"({first:.1f} in the first save, which pins the memory); "
            f"bare copy to pinned memory {result['bare_copy_s']:.2f} s; "
            f"hashed, on the disk and synced after {first + on_disk:.1f} s",
            flush=True,
        )
        if args.json:
            write_line(args.json, result)
        checkpoints.finish()
    finally:
        shutil.rmtree(folder)


def timed(work: Callable[[], object]) -> float:
    """Seconds until `work` is finished, on the GPU as well."""
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
