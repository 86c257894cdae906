"""Trains over two hosts, kills one host and starts it again; hosts are network namespaces of this machine.

    python tests/lib/two_hosts.py

Needs Linux, ip and unshare, and permission to create namespaces (root or user namespaces). A cable (veth)
connects the hosts:

      host0 10.77.0.1   rank 0  rank 1     ep: tokens stay on the host
             |                             dp: gradients and gathered parameters cross the cable
      host1 10.77.0.2   rank 2  rank 3

1. The reference: the same four ranks on one host.
2. One torchrun agent on each host, as in docs/multinode.md. After the first checkpoint everything on
   host1 is killed; host0 must end without help and name the ranks that fell silent.
3. The same two commands again: the run continues from the checkpoint, and all its losses equal the
   reference's to 1e-5.

Everything runs in separate namespaces (network, mounts, processes, host names). The kernel removes them with
the last process, so nothing is left on the machine, however this program ends.
"""

import argparse
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOSTS = {"host0": "10.77.0.1", "host1": "10.77.0.2"}
SANDBOX = "unshare --map-root-user --net --mount --pid --fork --kill-child --mount-proc --uts".split()
STEPS, EVERY = 16, 4
TRAIN = f"""tiny --no-compile --log.no-progress --log.no-report --model.layers 2 --model.dim 32
    --model.heads 2 --model.kv-heads 1 --model.head-dim 16 --model.moe.experts 4 --model.moe.ffn-dim 32
    --train.batch 2 --train.seq 32 --train.eval-every 0 --train.eval-batches 1 --optim.eps 1e-4
    --steps {STEPS} --checkpoint.every {EVERY} --checkpoint.mode sync --parallel.ep 2""".split()
LIMIT_S = 600  # seconds for any one launch


def obstacle() -> str | None:
    """The reason why this machine cannot simulate two hosts; None if it can."""
    if missing := [tool for tool in ("ip", "unshare") if not shutil.which(tool)]:
        return f"needs {' and '.join(missing)}"
    probe = subprocess.run(
        [*SANDBOX, "sh", "-c", "mount -t tmpfs none /run && ip netns add x"], capture_output=True
    )
    return f"namespaces are not permitted: {probe.stderr.decode().strip()}" if probe.returncode else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().inside:
        with tempfile.TemporaryDirectory() as folder:
            return play(Path(folder))
    if reason := obstacle():
        raise SystemExit(f"skipped: {reason}")
    raise SystemExit(subprocess.run([*SANDBOX, sys.executable, __file__, "--inside"]).returncode)


def play(folder: Path) -> None:
    lay_cable(folder)
    # the text to train on
    shutil.copytree(ROOT / "tmoe", folder / "text", ignore=shutil.ignore_patterns("__pycache__"))
    reference, out = folder / "one-host", folder / "two-hosts"
    one = torchrun("--standalone", "--nproc-per-node", "4", out=reference)
    ended(one, 0)
    print(f"one host: {len(losses(reference))} steps", flush=True)

    hosts = start_hosts(out)
    await_checkpoint(out, hosts)
    for pid in subprocess.check_output(["ip", "netns", "pids", "host1"]).split():
        os.kill(int(pid), signal.SIGKILL)
    began = time.monotonic()
    output = ended(hosts["host0"], 1)
    ended(hosts["host1"], -signal.SIGKILL)
    print(f"host1 killed; host0 ended after {time.monotonic() - began:.1f} s and said:", flush=True)
    silent = {int(rank): line for rank, line in re.findall(r"(?m)\brank (\d+) (is silent for .*)$", output)}
    check(set(silent) == {2, 3}, f"host0 does not name the dead ranks:\n{output}")
    print("\n".join(f"  rank {rank} {silent[rank]}" for rank in sorted(silent)), flush=True)
    check(len(losses(out)) < STEPS, "host1 died too late to tell anything")

    hosts = start_hosts(out)
    for host in HOSTS:
        output = ended(hosts[host], 0)
        check(
            host == "host1" or f"resumed after step {EVERY}" in output,
            f"not resumed from the checkpoint:\n{output}",
        )
    mesh = json.loads((out / "config.json").read_text())["mesh"]
    check(mesh == {"dp": 2, "ep": 2}, f"mesh {mesh}")
    want, got = losses(reference), losses(out)
    worst = max(abs(got[step] / want[step] - 1) for step in want)
    print(f"two hosts, dp 2 across, ep 2 inside: {len(got)} steps, losses {got[1]:.5f} to {got[STEPS]:.5f}")
    print(f"largest relative difference to one host: {worst:.1e}", flush=True)
    check(set(got) == set(want) == set(range(1, STEPS + 1)) and worst < 1e-5, "losses differ")
    check(not math.isclose(got[1], got[STEPS], rel_tol=1e-3), "nothing was learnt")


def lay_cable(folder: Path) -> None:
    """Creates two namespaces with a veth pair between them, and names for both ends."""
    hosts = folder / "hosts"
    hosts.write_text(
        f"127.0.0.1 localhost {socket.gethostname()}\n"
        + "".join(f"{address} {host}\n" for host, address in HOSTS.items())
    )
    commands = [
        "mount -t tmpfs none /run",
        f"mount --bind {hosts} /etc/hosts",
        "ip link set lo up",
        *(f"ip netns add {host}" for host in HOSTS),
        "ip link add eth0 netns host0 type veth peer name eth0 netns host1",
    ]
    for host, address in HOSTS.items():
        ip = f"ip -n {host}"
        commands += [f"{ip} addr add {address}/24 dev eth0", f"{ip} link set eth0 up", f"{ip} link set lo up"]
    for command in commands:
        subprocess.run(command.split(), check=True)


def torchrun(*flags: str, out: Path, host: str | None = None) -> subprocess.Popen:
    """A torchrun agent on this host, or inside a host's namespace and under that host's name."""
    call = "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execvp(sys.argv[2], sys.argv[2:])"
    enter = (
        ["ip", "netns", "exec", host, "unshare", "--uts", sys.executable, "-c", call, host] if host else []
    )
    agent = [sys.executable, "-m", "torch.distributed.run", *flags, "train.py", *TRAIN, "--out", str(out)]
    agent += ["--data.path", str(out.parent / "text")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with open(f"{out}-{host}.log", "w+") as log:
        process = subprocess.Popen([*enter, *agent], cwd=ROOT, env=env, stdout=log, stderr=log)
    process.log = Path(log.name)  # type: ignore[attr-defined]
    return process


def start_hosts(out: Path) -> dict[str, subprocess.Popen]:
    flags = (
        "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint host0:29400 --rdzv-id tmoe".split()
    )
    return {host: torchrun(*flags, out=out, host=host) for host in HOSTS}


def await_checkpoint(out: Path, hosts: dict[str, subprocess.Popen]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not (out / "checkpoints" / f"step-{EVERY}").exists():
        dead = {
            host: process.log.read_text() for host, process in hosts.items() if process.poll() is not None
        }
        check(not dead and time.monotonic() < deadline, f"no checkpoint of step {EVERY}: {dead}")
        time.sleep(0.005)


def ended(process: subprocess.Popen, code: int) -> str:
    """The output of a launch, once it has ended with this exit code."""
    try:
        got = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        got = None
    output = process.log.read_text()
    check(got == code, f"ended with {got} instead of {code}:\n{output}")
    return output


def losses(out: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def check(ok: bool, message: str) -> None:
    if not ok:
        raise SystemExit(f"failed: {message}")


if __name__ == "__main__":
    main()
