"""Where a response may be executed: a process that can reach nothing.

Two ways, tried in this order by `find_sandbox`:
  bwrap    bubblewrap: own user, process, network and IPC namespaces, read-only root, private /tmp, empty
           environment, no capabilities, dies with its parent.
  seccomp  a list of allowed system calls, through `pyseccomp`: files open for reading only; no process,
           thread, program, socket, signal or write to a file can be made. For machines without bubblewrap.
Both add the limits of `limit_resources`. Without either, `find_sandbox` raises and names the remedy; nothing
has run by then.

What stays possible: reading files that the user can read, and code that forges its own row's score. Nothing
leaves the process but that row's score.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys

BWRAP = "bwrap"
SECCOMP = "seccomp"
NONE = "none"

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38

_TCGETS = 0x5401  # is it a terminal? Other ioctls act, and could type into someone's terminal.
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# What the interpreter needs to import, compute, sleep, answer on an open pipe and end.
_ALLOWED_CALLS = """
brk mmap munmap mremap mprotect madvise futex membarrier rseq set_robust_list
rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall
read readv pread64 write writev lseek close fstat stat lstat newfstatat statx access faccessat faccessat2
readlink readlinkat getdents64 getcwd dup fcntl poll ppoll select pselect6
clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time getrandom
getpid getppid gettid getuid geteuid getgid getegid getgroups getrusage getrlimit sysinfo uname
sched_yield sched_getaffinity exit exit_group
""".split()  # noqa: SIM905


class SandboxUnavailableError(RuntimeError):
    """Neither bubblewrap nor seccomp works on this machine."""


def find_sandbox(has_bwrap=None, has_seccomp=None) -> str:
    """The best sandbox of this machine, "bwrap" or "seccomp".

    Args:
      has_bwrap: replaces the probe for a working bubblewrap, for tests.
      has_seccomp: replaces the probe for pyseccomp and its library.

    Raises:
      SandboxUnavailableError: neither is there; the message names the remedy.
    """
    if (has_bwrap or _has_bwrap)():
        return BWRAP
    if (has_seccomp or _has_seccomp)():
        return SECCOMP
    raise SandboxUnavailableError(
        "this reward may execute text that a model wrote, and no sandbox was found: install bubblewrap "
        "(`apt-get install bubblewrap`), or on Linux `pip install pyseccomp` with libseccomp; or use a reward "
        "that executes nothing, such as 'number', 'exact' or 'math'"
    )


@functools.lru_cache(maxsize=1)
def _has_bwrap() -> bool:
    """True where bwrap is installed and may make namespaces (containers often forbid it)."""
    if shutil.which("bwrap") is None:
        return False
    probe = [*_bwrap_prefix(), sys.executable, "-c", ""]
    try:
        return subprocess.run(probe, capture_output=True, timeout=20, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


@functools.lru_cache(maxsize=1)
def _has_seccomp() -> bool:
    if not sys.platform.startswith("linux") or importlib.util.find_spec("pyseccomp") is None:
        return False
    try:
        importlib.import_module("pyseccomp")
    except (RuntimeError, OSError):  # the package is there, libseccomp is not
        return False
    return True


def _bwrap_prefix() -> list[str]:
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    command += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    # The private /tmp would hide an installation that lies there.
    for path in sorted({sys.prefix, sys.base_prefix, *sys.path}):
        if path.startswith("/tmp/") and os.path.exists(path):
            command += ["--ro-bind", path, path]
    return [*command, "--chdir", "/"]


def worker_environment(kind: str) -> dict[str, str]:
    """Environment of a worker: the caller's without a sandbox, the bare minimum inside one."""
    bare = {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    if kind == NONE:
        return {**os.environ, **bare}
    home = "/tmp" if kind == BWRAP else os.path.expanduser("~")  # some imports need a place for caches
    return {**bare, "PATH": "/usr/bin:/bin", "HOME": home, "LANG": "C.UTF-8"}


def worker_command(kind: str, arguments: list[str]) -> list[str]:
    """The command line that runs the interpreter with `arguments` inside the sandbox `kind`."""
    command = [sys.executable, *arguments]
    if kind != BWRAP:
        return command
    settings = [word for key, value in worker_environment(kind).items() for word in ("--setenv", key, value)]
    return [*_bwrap_prefix(), *settings, *command]


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def guard_worker() -> None:
    """Prepares the process that starts rows: it adopts what they leave behind, and hides its descriptors."""
    if sys.platform.startswith("linux"):
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _prctl(_PR_SET_DUMPABLE, 0)


def limit_resources(cpu_s: float, memory_bytes: int) -> None:
    """Limits the calling process: CPU seconds, address space on top of what it holds, no core, no files.

    It also dies with its parent. `memory_bytes` 0 sets no limit on memory.
    """
    import resource

    if sys.platform.startswith("linux"):
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    seconds = int(cpu_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes and sys.platform.startswith("linux"):
        with open("/proc/self/statm") as file:
            held_bytes = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held_bytes + memory_bytes, held_bytes + memory_bytes))


def lock_down(kind: str) -> None:
    """Gives up every right that scoring does not need, for good; called once per row, in its own process."""
    if kind == NONE:
        return
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if kind == SECCOMP:
        _load_filter()


def _load_filter() -> None:
    import errno

    import pyseccomp as seccomp

    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    rules = seccomp.SyscallFilter(defaction=seccomp.ERRNO(errno.EPERM))
    for name in _ALLOWED_CALLS:
        try:
            rules.add_rule(seccomp.ALLOW, name)
        except OSError:  # some names exist on some architectures only
            continue
    rules.add_rule(seccomp.ALLOW, "openat", seccomp.Arg(2, seccomp.MASKED_EQ, _WRITE_FLAGS, 0))
    rules.add_rule(seccomp.ALLOW, "ioctl", seccomp.Arg(1, seccomp.EQ, _TCGETS))
    rules.load()
