"""The processes of one job: what they tell each other on the host, and how none of them waits for ever.

Everything goes through the key-value store of the coordination service that `jax.distributed` runs on; the arrays of a
mesh never do.

Life of a job of several processes:
  1. `Group(...)` starts a watch: a thread that says once a second which phase of which step this process is in and how
     far, and reads the same of all others.
  2. The loop calls `enter` at each phase and `advance` as it gets on. `gather`, `agree` and `lead` are entered by all
     processes in one order; each checks that the others are at the same point.
  3. When the watch finds that a process has failed, has gone silent, or stands still, the next `check` or wait of this
     process raises `PeerError` with that process's name and phase. Where the main thread cannot listen, in a collective
     that will never complete, the watch says the same and ends the process itself.
  4. `close` after the last step: all are there, and nobody is watched any more. Or `fail`: the others are told.

Invariants: a process waits for another only as long as that one is heard of and gets on (or waits itself); keys are
deleted once all have read them. A group of one does none of this.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
from absl import logging

_PHASE_FILE = "TLT_PHASE_FILE"  # where a launcher on this machine wants to read the phase
_ALIVE = "tlt/alive/"
_BEAT_S = 1.0
_LISTEN_S = 5.0  # what the main thread has to raise a failure before the watch ends the process,
_CLOSE_S = 30.0  # and to end once it has
EXIT_FAILED = 1


class PeerError(RuntimeError):
    """Another process of the job has failed or stands still. The message says which, where, and in which phase."""


class Store(Protocol):
    """What is used of the client of jax's coordination service."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = ...) -> None: ...
    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = ...) -> None: ...
    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes: ...
    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...
    def key_value_delete(self, key: str) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """The processes of a job.

    Coordinator, number and index come from here, or else from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID (`launch.local_cluster` sets them), or else from Slurm or Open MPI as `jax.distributed` reads them.
    Without any of these the job is this process alone.

    Attributes:
      coordinator_address: host:port of process 0.
      num_processes: of the job; 0 takes the environment's.
      process_id: of this process, from 0; -1 takes the environment's.
      initialization_timeout_s: how long the processes wait for each other at the start.
      heartbeat_timeout_s: a process not heard of for so long is lost, and the job ends.
      stall_timeout_s: a process that stays at one point of one phase for so long hangs, and the job ends. Longer than
        the longest compilation.
    """

    coordinator_address: str = ""
    num_processes: int = 0
    process_id: int = -1
    initialization_timeout_s: int = 300
    heartbeat_timeout_s: float = 30.0
    stall_timeout_s: float = 1800.0

    def __post_init__(self):
        checks = (
            ("num_processes", self.num_processes >= 0, ">= 0 (0: from the environment)"),
            ("process_id", self.process_id >= -1, ">= -1 (-1: from the environment)"),
            ("initialization_timeout_s", self.initialization_timeout_s >= 1, ">= 1"),
            ("heartbeat_timeout_s", self.heartbeat_timeout_s >= 3.0, ">= 3 (processes are heard of once a second)"),
            ("stall_timeout_s", self.stall_timeout_s > 0.0, "> 0"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise ValueError(f"distributed.{name}: got {getattr(self, name)!r}, expected {expected}")


@dataclasses.dataclass(kw_only=True)
class _Status:
    """What a process says of itself."""

    index: int
    host: str
    beat: int = 0
    phase: str = "start"
    progress: int = 0
    is_waiting: bool = False  # for other processes: it need not get on by itself
    failure: str = ""

    def where(self) -> str:
        return f"process {self.index} ({self.host})"

    def point(self) -> tuple[str, int, bool]:
        return self.phase, self.progress, self.is_waiting


@dataclasses.dataclass
class _Seen:
    """The last news of a process, by this process's clock."""

    status: _Status
    beat_s: float
    point_s: float


class Group:
    """All processes of the job, as seen by one of them. `gather`, `agree`, `lead` and `close`: main thread only."""

    def __init__(
        self, index: int = 0, count: int = 1, store: Store | None = None, config: DistributedConfig | None = None
    ):
        self.index, self.count = index, count
        self.resume_hint: Callable[[], str] = lambda: "the same command goes on"  # for the last words
        self._status = _Status(index=index, host=socket.gethostname())
        self._num_gathers = 0
        self._failure = ""
        self._is_heard = threading.Event()  # the failure has been raised
        self._is_closed = threading.Event()
        self._config = config or DistributedConfig()
        self._store = store
        if count > 1:
            if store is None:
                raise ValueError(f"processes: got no key-value store for {count} processes, expected the client's")
            self._tell()
            threading.Thread(target=self._watch, name="process-watch", daemon=True).start()

    @property
    def is_first(self) -> bool:
        """True in the one process that writes for people."""
        return self.index == 0

    @property
    def failure(self) -> str:
        """What is wrong with another process, as far as is known; empty where nothing is."""
        return self._failure

    def enter(self, phase: str) -> None:
        """Says what this process does from now on, as in `step 2, rollout`; raises PeerError as `check` does."""
        self._status.phase = phase
        self._status.progress += 1
        if path := os.environ.get(_PHASE_FILE):
            with open(f"{path}.new", "w") as f:
                f.write(phase)
            os.replace(f"{path}.new", path)  # who reads it after a kill finds the phase before, not half of this one
        self.check()

    def advance(self) -> None:
        """Says that this process gets on with its phase; any thread. Raises PeerError as `check` does."""
        self._status.progress += 1
        self.check()

    def check(self) -> None:
        """Raises PeerError where another process has failed or stands still."""
        if self._failure:
            self._is_heard.set()
            raise PeerError(self._failure)

    def gather(self, name: str, value: bytes) -> list[bytes]:
        """Every process's `value`, in their order, in every process.

        Args:
          name: of this exchange, for messages; the same in all processes.
          value: up to some tens of megabytes.

        Raises:
          PeerError: a process does not arrive, or arrives at an exchange of another name.
        """
        if self.count == 1:
            return [value]
        store, number = self._need_store(), self._num_gathers
        self._num_gathers += 1
        store.key_value_set_bytes(_gather_key(number, self.index), name.encode() + b"\n" + value)
        values = []
        self._status.is_waiting = True
        for i in range(self.count):
            theirs, _, payload = self._wait_for(number, i).partition(b"\n")
            if theirs != name.encode():
                raise PeerError(
                    f"process {i} is at {theirs.decode()!r} while process {self.index} is at {name!r}: they do not run "
                    "the same program on the same configuration"
                )
            values.append(payload)
        self._status.is_waiting = False
        if number:  # everybody is here, so everybody has read what was given before
            store.key_value_delete(_gather_key(number - 1, self.index))
        return values

    def agree(self, name: str, value: str) -> None:
        """Raises PeerError, in all processes, where `value` is not the same everywhere."""
        if self.count == 1:
            return
        mine = hashlib.sha256(value.encode()).hexdigest()
        theirs = [digest.decode() for digest in self.gather(f"agree on {name}", mine.encode())]
        odd = [i for i, digest in enumerate(theirs) if digest != theirs[0]]
        if odd:
            raise PeerError(f"{name}: processes {odd} have another one than process 0; start all with the same inputs")

    def lead(self, name: str, work: Callable[[], Any]) -> None:
        """Process 0 does `work` while the others wait. Its ValueError or OSError is a ValueError in the others."""
        error: ValueError | OSError | None = None
        if self.is_first:
            try:
                work()
            except (ValueError, OSError) as caught:  # raised below, once the others know
                error = caught
        message = self.gather(name, str(error or "").encode())[0].decode()
        if error is not None:
            raise error
        if message:
            raise ValueError(message)

    def close(self) -> None:
        """The end of a job that went well: waits for all, then stops watching."""
        if self.count > 1 and not self._is_closed.is_set():
            self.enter("end")
            self.gather("end", b"")
            self._is_closed.set()

    def fail(self, message: str) -> None:
        """Tells the others that this process has failed; stays long enough for them to hear it."""
        if self.count == 1 or self._is_closed.is_set():
            return
        self._status.failure = message
        try:
            self._tell()
        except jax.errors.JaxRuntimeError:
            return  # the coordination service is gone, and its process with it
        time.sleep(2.5 * _BEAT_S)

    def _need_store(self) -> Store:
        assert self._store is not None
        return self._store

    def _wait_for(self, number: int, index: int) -> bytes:
        while True:
            self.check()
            try:
                return self._need_store().blocking_key_value_get_bytes(_gather_key(number, index), 1000)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise PeerError(f"process 0, which coordinates the job, cannot be reached: {error}") from error

    def _tell(self) -> None:
        self._status.beat += 1
        text = json.dumps(dataclasses.asdict(self._status))
        self._need_store().key_value_set(f"{_ALIVE}{self.index}", text, allow_overwrite=True)

    def _watch(self) -> None:
        seen: dict[int, _Seen] = {}
        while not self._is_closed.wait(_BEAT_S):
            try:
                self._tell()
                news = [_Status(**json.loads(text)) for _, text in self._need_store().key_value_dir_get(_ALIVE)]
            except jax.errors.JaxRuntimeError as error:
                self._failure = f"process 0, which coordinates the job, cannot be reached: {error}"
            else:
                self._failure = self._judge(seen, news, time.monotonic())
            if self._failure:
                break
        if self._failure and not (self._is_heard.wait(_LISTEN_S) and self._is_closed.wait(_CLOSE_S)):
            self._end_process()

    def _judge(self, seen: dict[int, _Seen], news: list[_Status], now_s: float) -> str:
        """What is wrong with the job, in words; empty where nothing is."""
        for status in news:
            last = seen.setdefault(status.index, _Seen(status, now_s, now_s))
            if status.beat != last.status.beat:
                last.beat_s = now_s
            if status.point() != last.status.point() or status.is_waiting:
                last.point_s = now_s
            last.status = status
        for last in seen.values():
            status = last.status
            if status.index != self.index and status.failure:
                return f"{status.where()} failed in {status.phase}: {status.failure}"
            if status.index != self.index and now_s - last.beat_s > self._config.heartbeat_timeout_s:
                return (
                    f"{status.where()} has not been heard of for {now_s - last.beat_s:.0f} s; it was in {status.phase}"
                )
        limit_s = self._config.stall_timeout_s
        if any(now_s - s.point_s > limit_s for s in seen.values()):
            # One that hangs holds up others in a collective, which may seem to stand still for longer: name them all.
            stalled = [s.status for s in seen.values() if now_s - s.point_s > limit_s / 2]
            where = "; ".join(f"{status.where()} in {status.phase}" for status in stalled)
            return f"no progress for {limit_s:.0f} s: {where}"
        return ""

    def _end_process(self) -> None:
        """Last words where the main thread cannot say them, and the end."""
        logging.error("%s: %s; ending this process; %s", self._status.phase, self._failure, self.resume_hint())
        logging.flush()
        os._exit(EXIT_FAILED)


def _gather_key(number: int, index: int) -> str:
    return f"tlt/gather/{number}/{index}"


def make_group(config: DistributedConfig) -> Group:
    """The group of this process, after `jax.distributed.initialize` where there was one."""
    if jax.process_count() == 1:
        return Group()
    from jax._src import distributed  # no public way to the store of the service that jax itself runs

    return Group(jax.process_index(), jax.process_count(), distributed.global_state.client, config)
