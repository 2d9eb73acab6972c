"""Several real processes of one job on this machine.

    python -m launch.local_cluster --processes=2 [--pin] -- python -m launch.train --config=configs/X.py

Life of a job:
  1. Every process gets the command, and by environment what `jax.distributed` needs to know: JAX_COORDINATOR_ADDRESS (a
     free port of this machine), JAX_NUM_PROCESSES and JAX_PROCESS_ID. With `--pin` each has cores of its own, and as
     many threads.
  2. Their output comes out here, line by line, behind `[process] `.
  3. The first that fails ends the others: SIGTERM, and SIGKILL `--grace_s` seconds later. The last words say which
     process it was, how it ended, and in which phase (the line that it last wrote to its TLT_PHASE_FILE).
  4. SIGINT, SIGTERM and SIGHUP go on to all of them, with the same grace.

Exit code: 0 when all ended with 0; otherwise that of the first failure (128 + n for signal n); 2 for bad arguments. A
JSON object that process 0 printed last is printed again without its prefix, so that it is the last line here too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, TextIO

PHASE_FILE = "TLT_PHASE_FILE"
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.05


@dataclasses.dataclass(kw_only=True)
class Process:
    """One of the job's processes and what is known of it."""

    index: int
    child: subprocess.Popen[str]
    phase_path: pathlib.Path
    readers: list[threading.Thread]
    last_line: str = ""  # of its stdout

    def describe_end(self) -> str:
        """`process 1 was killed by SIGKILL in step 2, rollout`."""
        code = self.child.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        phase = self.phase_path.read_text().strip() if self.phase_path.exists() else ""
        return f"process {self.index} {how}" + (f" in {phase}" if phase else "")


def plan_cores(num_processes: int, cores: Sequence[int]) -> list[list[int]]:
    """Equal shares of the cores, next to each other.

    Raises:
      ValueError: fewer cores than processes.
    """
    if len(cores) < num_processes:
        raise ValueError(
            f"--pin: got {len(cores)} cores for {num_processes} processes, expected at least one each; "
            "start fewer processes, or leave --pin out"
        )
    share = len(cores) // num_processes
    return [list(cores[i * share : (i + 1) * share]) for i in range(num_processes)]


def make_environment(
    base: Mapping[str, str], index: int, count: int, port: int, phase_path: pathlib.Path, num_cores: int
) -> dict[str, str]:
    """The environment of process `index`; `num_cores` 0 leaves the thread counts alone."""
    threads = {"NPROC": str(num_cores), "OMP_NUM_THREADS": str(num_cores)} if num_cores else {}  # XLA's pools, OpenMP's
    return {
        **base,
        **threads,
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
        "PYTHONUNBUFFERED": "1",
        PHASE_FILE: str(phase_path),
    }


class Job:
    """The processes, from start to end."""

    def __init__(self, command: Sequence[str], num_processes: int, *, pin: bool, grace_s: float, directory: str):
        self._grace_s = grace_s
        self._kill_at_s: float | None = None
        self._failure: Process | None = None
        self._lock = threading.Lock()  # one line at a time
        cores = sorted(os.sched_getaffinity(0))
        shares = plan_cores(num_processes, cores) if pin else [cores] * num_processes
        port = _free_port()
        self.processes: list[Process] = []
        try:
            for i, share in enumerate(shares):
                phase_path = pathlib.Path(directory) / f"phase_{i}"
                args = (i, num_processes, port, phase_path, len(share) if pin else 0)
                os.sched_setaffinity(0, share)  # a child inherits it, before any library counts cores
                self._start(command, make_environment(os.environ, *args), i, phase_path)
        except BaseException:
            self._kill()
            raise
        finally:
            os.sched_setaffinity(0, cores)

    def _start(self, command: Sequence[str], env: dict[str, str], index: int, phase_path: pathlib.Path) -> None:
        child = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a terminal's Ctrl-C comes once: through here
        )
        process = Process(index=index, child=child, phase_path=phase_path, readers=[])
        self.processes.append(process)
        assert child.stdout is not None and child.stderr is not None
        for source, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
            reader = threading.Thread(target=self._copy_lines, args=(process, source, target), daemon=True)
            reader.start()
            process.readers.append(reader)

    def _copy_lines(self, process: Process, source: IO[str], target: TextIO) -> None:
        for line in source:
            line = line.rstrip("\n")
            if target is sys.stdout and line:
                process.last_line = line
            self._say(f"[{process.index}] {line}", target)

    def _say(self, line: str, target: TextIO) -> None:
        with self._lock:
            target.write(line + "\n")
            target.flush()

    def forward(self, number: int, _frame: object = None) -> None:
        """Passes a signal on to every process that still runs; they have the grace to end."""
        for process in self.processes:
            if process.child.poll() is None:
                process.child.send_signal(number)
        if self._kill_at_s is None:
            self._kill_at_s = time.monotonic() + self._grace_s

    def wait(self) -> int:
        """Waits for the end of all; returns the exit code of the job."""
        running = list(self.processes)
        while running:
            for process in [p for p in running if p.child.poll() is not None]:
                running.remove(process)
                if process.child.returncode and self._failure is None:
                    self._fail(process, running)
            if self._kill_at_s is not None and time.monotonic() > self._kill_at_s:
                self._kill()
            time.sleep(_POLL_S)
        self._kill()  # what the processes themselves left behind
        for reader in [r for p in self.processes for r in p.readers]:
            reader.join(timeout=5.0)
        if self._failure is not None:
            code = self._failure.child.returncode
            return 128 - code if code < 0 else code
        if _is_json_object(last := self.processes[0].last_line):
            self._say(last, sys.stdout)
        return 0

    def _fail(self, process: Process, others: Sequence[Process]) -> None:
        self._failure = process
        rest = f"; ending the other {len(others)}" if others else ""
        self._say(f"local_cluster: {process.describe_end()}{rest}", sys.stderr)
        self.forward(signal.SIGTERM)

    def _kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):  # the whole group has ended
                os.killpg(process.child.pid, signal.SIGKILL)


def run(command: Sequence[str], num_processes: int, *, pin: bool = False, grace_s: float = 10.0) -> int:
    """Runs the job in this process's main thread; returns its exit code.

    Raises:
      ValueError: bad arguments.
      OSError: the command cannot be started.
    """
    if num_processes < 1:
        raise ValueError(f"--processes: got {num_processes}, expected at least 1")
    if not command:
        raise ValueError("command: got none, expected one after --, e.g. -- python -m launch.train --config=...")
    with tempfile.TemporaryDirectory(prefix="tlt_cluster_") as directory:
        job = Job(command, num_processes, pin=pin, grace_s=grace_s, directory=directory)
        before = {number: signal.signal(number, job.forward) for number in _FORWARDED}
        try:
            return job.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    own, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(
        prog="launch.local_cluster", usage="%(prog)s --processes=N [--pin] [--grace_s=S] -- COMMAND ..."
    )
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--pin", action="store_true", help="an equal share of the cores for each process alone")
    parser.add_argument("--grace_s", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL")
    args = parser.parse_args(own)
    try:
        return run(command, args.processes, pin=args.pin, grace_s=args.grace_s)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _is_json_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except json.JSONDecodeError:
        return False


if __name__ == "__main__":
    sys.exit(main())
