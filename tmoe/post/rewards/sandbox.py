"""Runs untrusted Python programs: without network, without files except Python's own, with limits on all use.

The worker starts this file as a separate program, without torch or tmoe. That program leads a process group,
and makes user, mount, process, network and IPC namespaces. Inside them are Python and the system's libraries,
read only, and 64 MB of memory to write to. Root becomes another user inside, because the kernel does not
limit root's number of processes. All processes that the untrusted program starts end with it. It gets none of
the worker's environment variables.

A script is judged by its output. A test runs in a second sandbox, and asks the program for values over a
socket (judge.py), so that no verdict is made in the program's sandbox.

next: post/rewards/wire.py
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

MIB = 2**20
MEMORY_MIB, FILE_MIB, DISK_MIB = 2048, 16, 64
PROCESSES, FILES = 64, 256
SYSTEM = "/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32", "/nix", "/gnu", "/etc/alternatives"
DEVICES = "/dev/null", "/dev/zero", "/dev/urandom"
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 2**17, 2**27, 2**28, 2**29, 2**30
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 2**12, 2**14, 2**18, 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY_NO_SUID = 442, -100, 2**15, 3
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
NOBODY = 65534
LIMITS = {
    resource.RLIMIT_AS: MEMORY_MIB * MIB,
    resource.RLIMIT_FSIZE: FILE_MIB * MIB,
    resource.RLIMIT_NOFILE: FILES,
    resource.RLIMIT_CORE: 0,
}
COULD_NOT = 97  # exit code if no program was run
PASSED = 43  # exit code of a judge (judge.py) whose test reached its end

# The code that runs inside: it reads the job, closes its file, and runs the last of the job's modules.
RUNNER = """
import json, sys
from types import ModuleType
with open(int(sys.argv[1])) as file:
    job = json.load(file)
for name, source in job["modules"]:
    module = sys.modules[name] = ModuleType(name)
    module.__path__ = []
    exec(compile(source, name, "exec"), module.__dict__)
module.main(job, int(sys.argv[2]))
"""
PACKAGES = "tmoe", "tmoe.post", "tmoe.post.rewards"  # made as empty packages, for the modules' own imports


class Done(NamedTuple):
    whole: bool
    """whether the script ended within its time and with exit code 0"""
    said: str
    """its output on stdout"""


class SandboxProcess:
    """One sandboxed process. If no sandbox can be made, `require` raises OSError, which says what failed.

    Args:
        role: the module that it runs, program or judge.
        text: the program, or the judge's test.
        given: its stdin.
        seconds: limit of its CPU time.
        link: its end of the socket between program and judge; -1 for none.
    """

    def __init__(self, role: str, text: str, given: str, seconds: float, link: int = -1) -> None:
        self.failed = os.urandom(16).hex()  # no program can guess it
        sources = {name: "" for name in PACKAGES}
        sources |= {f"{PACKAGES[-1]}.{name}": _source(name) for name in ("wire", role)}
        job = json.dumps({"modules": list(sources.items()), _TEXT[role]: text})
        with contextlib.ExitStack() as files:
            job_file, stdin = (files.enter_context(_memory()) for _ in range(2))
            self.stdout, self.told = _memory(), _memory()
            for file, words in ((job_file, job), (stdin, given)):
                file.write(words.encode(errors="replace"))
                file.seek(0)
            numbers = job_file.fileno(), self.told.fileno(), link, round(seconds), os.getpid()
            words = [sys.executable, "-I", "-S", __file__, *map(str, numbers)]
            passed = job_file.fileno(), self.told.fileno(), *([link] if link >= 0 else [])
            self.process = subprocess.Popen(
                [*words, self.failed, *_folders_of_python()],
                stdin=stdin,
                stdout=self.stdout,
                stderr=subprocess.DEVNULL,
                pass_fds=passed,
                start_new_session=True,
                env={},
            )

    def __enter__(self) -> SandboxProcess:
        return self

    def __exit__(self, *_: object) -> None:
        """Kills it, with all processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.stdout.close()
        self.told.close()

    def code(self, seconds: float) -> int | None:
        """Its exit code; None if it has not ended after these seconds."""
        try:
            return self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None

    def require(self) -> None:
        answer = _read(self.told)
        if answer.startswith(self.failed):
            raise OSError(answer.removeprefix(self.failed))


_TEXT = dict(program="program", judge="test")  # the key of a role's text in its job


def script(program: str, given: str, seconds: float) -> Done:
    """Runs a program as a script, with `given` on stdin. OSError if no sandbox can be made."""
    with SandboxProcess("program", program, given, seconds) as box:
        code = box.code(seconds)
        box.require()
        return Done(code == 0, "" if code is None else _read(box.stdout))


def passes(program: str, test: str, seconds: float) -> bool:
    """Whether a test reaches its end with values of the program. OSError if no sandbox can be made."""
    deadline = time.monotonic() + seconds
    ends = socket.socketpair()
    with contextlib.ExitStack() as stack:
        try:
            boxes = [
                stack.enter_context(SandboxProcess(role, text, "", seconds, end.fileno()))
                for role, text, end in (("program", program, ends[0]), ("judge", test, ends[1]))
            ]
        finally:
            for end in ends:
                end.close()
        code = boxes[1].code(deadline - time.monotonic())
        for box in boxes:
            box.require()
        return code == PASSED


def check() -> None:
    """Tries the sandbox with a program that has a child process. OSError, with the reason, if it fails."""
    child = "import os\nif (child := os.fork()) == 0: os._exit(0)\nassert os.waitpid(child, 0)[1] == 0"
    try:
        whole = script(child, "", 60.0).whole
    except OSError as error:
        raise OSError(f"a sandbox cannot be made here: {error}") from error
    if not whole:
        raise OSError("a sandbox cannot be made here: Python does not run in it")


@functools.cache
def _source(name: str) -> str:
    return Path(__file__).with_name(f"{name}.py").read_text()


def _memory() -> Any:
    if not hasattr(os, "memfd_create"):
        raise OSError("only Linux has the namespaces that it takes")
    return open(os.memfd_create("reward"), "w+b")


def _read(file: Any) -> str:
    """A file's text from its beginning, past the buffer, which does not have other descriptors' writes."""
    return os.pread(file.fileno(), FILE_MIB * MIB, 0).decode(errors="replace")


def _folders_of_python() -> list[str]:
    """The folders that Python needs, in addition to the system's own folders; outer folders first."""
    executable = Path(os.path.realpath(sys.executable))
    folders = {sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix), str(executable.parents[1])}
    return sorted(folders - {"/"}, key=lambda folder: (folder.count("/"), folder))


# ---- this file as a program ----

libc = ctypes.CDLL(None, use_errno=True)


class MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]


def call(name: str, *arguments: Any) -> None:
    """Calls a function of libc. OSError, with the function and its text arguments, if it fails."""
    if getattr(libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        about = ", ".join(argument.decode() for argument in arguments if isinstance(argument, bytes))
        raise OSError(number, os.strerror(number), f"{name}({about})")


def end_with(parent: int) -> None:
    """Lets the kernel kill this process when its parent ends; exits if the parent has ended already."""
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(COULD_NOT)


def main() -> None:
    """Makes the namespaces and waits for the program.

    Only a parent process may map the users of its child's namespace, so two processes are needed.
    """
    job, report, link, seconds, parent = (int(word) for word in sys.argv[1:6])
    failed, *folders = sys.argv[6:]
    end_with(parent)
    asked, answered = os.pipe(), os.pipe()
    outer = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(answered[1])
        with reporting(report, failed):
            call("unshare", CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC)
            end_with(outer)
            os.write(asked[1], b"1")
            if os.read(answered[0], 1) == b"1":
                inside((job, link), report, seconds, folders, failed)
        os._exit(COULD_NOT)
    with reporting(report, failed):
        os.close(asked[1])
        if os.read(asked[0], 1) == b"1":
            name_users(child)
            os.write(answered[1], b"1")
    os.close(answered[1])
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)


@contextlib.contextmanager
def reporting(told: int, failed: str) -> Any:
    """Writes an OSError of its body to a file for the worker, with a mark that no program can guess."""
    try:
        yield
    except OSError as error:
        os.write(told, f"{failed}{error}".encode())


def name_users(child: int) -> None:
    """Maps users of the child's namespace: user 1 inside is this user.

    If this user is root, user 1 is the unprivileged user 65534 instead, and root is mapped too, to make
    mounts.
    """
    place = Path(f"/proc/{child}")
    user, group = os.getuid(), os.getgid()
    if user == 0:
        (place / "uid_map").write_text(f"0 0 1\n1 {NOBODY} 1")
        (place / "gid_map").write_text(f"0 0 1\n1 {NOBODY} 1")
        return
    (place / "setgroups").write_text("deny")
    (place / "uid_map").write_text(f"1 {user} 1")
    (place / "gid_map").write_text(f"1 {group} 1")


def inside(given: tuple[int, int], told: int, seconds: int, folders: list[str], failed: str) -> None:
    """Starts the program in the new namespaces; the namespace of processes begins with a child."""
    is_root = os.getuid() == 0
    alive, held = os.pipe()
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    with reporting(told, failed):
        make_root(folders)
        if is_root:
            os.setgroups([])
            os.setresgid(1, 1, 1)
            os.setresuid(1, 1, 1)
        call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(held)
        if select.select([alive], [], [], 0)[0]:  # closed: the parent has been killed already
            os._exit(COULD_NOT)
        for what, most in LIMITS.items():
            resource.setrlimit(what, (most, most))
        resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds + 1, seconds + 1))
        os.chdir("/tmp")
        keep_init()
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        env = dict(PATH="/usr/bin:/bin", HOME="/tmp", LANG="C.UTF-8", PYTHONHASHSEED="0") | threads
        words = [sys.executable, "-s", "-P", "-B", "-c", RUNNER, *map(str, given)]
        os.set_inheritable(told, False)
        os.execve(sys.executable, words, env)
    os._exit(COULD_NOT)


def keep_init() -> None:
    """Forks the program from process 1, which waits for it. When process 1 ends, the whole namespace ends.

    Process 1 is killed with its parent. A program can undo PR_SET_PDEATHSIG for its own process, but it can
    neither signal process 1 nor trace it, because process 1 is not dumpable.
    """
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)


def make_root(folders: list[str]) -> None:
    """Replaces the file system by one in memory that has Python, the system's libraries, and /tmp."""
    sources = {folder: os.path.realpath(folder) for folder in (*SYSTEM, *folders, *DEVICES)}
    links = {folder: os.readlink(folder) for folder in SYSTEM if os.path.islink(folder)}
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    room = f"size={DISK_MIB}m,nr_inodes=4096,mode=0755"
    call("mount", b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID | MS_NODEV, room.encode())
    os.chdir("/tmp")
    os.mkdir("old")
    call("pivot_root", b".", b"old")
    os.chdir("/")
    for folder, source in sources.items():
        if folder in links:
            os.symlink(links[folder], folder)
        elif os.path.exists(f"/old{source}") and not os.path.lexists(folder):
            show(source, folder)
    call("umount2", b"/old", MNT_DETACH)
    os.rmdir("/old")
    os.makedirs("/tmp", exist_ok=True)  # it exists if Python's own folder is in it
    os.chmod("/tmp", 0o777)


def show(source: str, place: str) -> None:
    """Mounts a folder or a device of the old file system at its old place; folders are read only."""
    if os.path.isdir(f"/old{source}"):
        os.makedirs(place)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.close(os.open(place, os.O_CREAT))
    call("mount", f"/old{source}".encode(), place.encode(), None, MS_BIND | MS_REC, None)
    if os.path.isdir(place):
        asked = MountAttributes(set=READ_ONLY_NO_SUID)
        size = ctypes.c_size_t(ctypes.sizeof(asked))
        words = AT_FDCWD, place.encode(), AT_RECURSIVE, ctypes.byref(asked), size
        call("syscall", MOUNT_SETATTR, *words)


if __name__ == "__main__":
    main()
