"""A pool of killable processes that turns responses into rewards.

Life of a batch:
  1. `submit(items)` queues one job per row and returns a future, so that scoring overlaps with decoding.
  2. A thread per worker takes a row, hands it to its process (`reward_worker`), and waits no longer than the
     row's limit. The processes start at the first batch, and again after one was lost.
  3. Every row gets exactly one score, in its own place: a row that raised or ran out of time scores
     `failed_score` and is counted as an error or a time-out, apart from wrong answers.

Workers are new interpreters, never forks of this process, which may hold an accelerator. They import no jax.
Safe to call from any thread.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import queue
import secrets
import select
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tlt_jax.rl import sandbox, verifiers

_START_LIMIT_S = 120.0
_GRACE_S = 10.0  # the worker enforces the limit itself; past this it is taken for stuck
_MAX_MESSAGES = 5
_MAX_DEFAULT_WORKERS = 16  # a host with hundreds of cores needs no more of them for this


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What a response is worth, and the limits under which that is found out.

    Attributes:
      weights: reward name -> weight; names as in `verifiers.VERIFIERS`, or 'package.module:function'.
      num_workers: processes; 0 takes the number of cores, up to 16.
      timeout_s: most wall-clock seconds for one row.
      memory_mb: most memory a row may take on top of the worker's own, in MiB; 0 sets no limit.
      sandbox: "auto" uses one wherever it can, and insists where a reward executes text; user functions alone
        run without, since they may need files or the network. "on" insists; "off" refuses such rewards.
      failed_score: score of a row whose verifier raised or ran out of time.
    """

    weights: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"math": 1.0})
    num_workers: int = 0
    timeout_s: float = 5.0
    memory_mb: int = 2048
    sandbox: str = "auto"
    failed_score: float = 0.0

    def __post_init__(self):
        if not self.weights:
            raise ValueError("reward.weights: got none, expected at least one, e.g. {'math': 1.0}")
        for name in self.weights:
            verifiers.check_reward_name(name)
        checks = (
            ("num_workers", self.num_workers >= 0, ">= 0 (0 takes one per core)"),
            ("timeout_s", self.timeout_s > 0, "> 0 seconds"),
            ("memory_mb", self.memory_mb >= 0, ">= 0 (0 sets no limit)"),
            ("sandbox", self.sandbox in ("auto", "on", "off"), "'auto', 'on' or 'off'"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise ValueError(f"reward.{name}: got {getattr(self, name)!r}, expected {expected}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardItem:
    """One response to score; `reference` is the prompt's, as the task made it (plain JSON values)."""

    row_id: int
    text: str
    reference: Mapping[str, Any]
    finish_reason: str = "stop"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardResult:
    """Scores of one batch, in the order of its items."""

    scores: np.ndarray  # f32[n]
    status: tuple[str, ...]  # per row: "ok", "error" or "timeout"
    messages: tuple[str, ...]  # the first few errors, for the log
    seconds: float  # from submission to the last score

    @property
    def errors(self) -> int:
        return self.status.count("error")

    @property
    def timeouts(self) -> int:
        return self.status.count("timeout")


class RewardWorkerError(RuntimeError):
    """A reward process could not start, so nothing can be scored."""


def choose_sandbox(config: RewardConfig, find=sandbox.find_sandbox) -> str:
    """The sandbox to score in: "bwrap", "seccomp" or "none".

    Raises:
      SandboxUnavailableError: a reward executes text (or `sandbox` is "on") and the machine has none.
      ValueError: a reward executes text and `sandbox` is "off".
    """
    executing = [name for name in config.weights if verifiers.reward_executes_text(name)]
    if config.sandbox == "off":
        if executing:
            raise ValueError(
                f"reward.sandbox: got 'off' with reward {executing[0]!r}, which executes what a model wrote; "
                "expected 'auto' or 'on', or another reward"
            )
        return sandbox.NONE
    if executing or config.sandbox == "on":
        return find()
    if any(map(verifiers.is_user_function, config.weights)):
        return sandbox.NONE
    try:
        return find()
    except sandbox.SandboxUnavailableError:
        return sandbox.NONE


class _Batch:
    """Scores of one submission as they come in."""

    def __init__(self, num_rows: int, failed_score: float):
        self.future: concurrent.futures.Future[RewardResult] = concurrent.futures.Future()
        self._replies: list[dict[str, Any] | None] = [None] * num_rows
        self._num_open = num_rows
        self._failed_score = failed_score
        self._start_s = time.monotonic()
        self._lock = threading.Lock()
        self.future.set_running_or_notify_cancel()
        if not num_rows:
            self._finish()

    def put(self, index: int, reply: dict[str, Any]) -> None:
        with self._lock:
            assert self._replies[index] is None, "one score per row"
            self._replies[index] = reply
            self._num_open -= 1
            is_done = self._num_open == 0
        if is_done and not self.future.done():
            self._finish()

    def fail(self, error: BaseException) -> None:
        with self._lock:
            if not self.future.done():
                self.future.set_exception(error)

    def _finish(self) -> None:
        replies = [reply or {} for reply in self._replies]
        status = tuple("ok" if "score" in r else "timeout" if "timeout" in r else "error" for r in replies)
        self.future.set_result(
            RewardResult(
                scores=np.array([r.get("score", self._failed_score) for r in replies], np.float32),
                status=status,
                messages=tuple(r["error"] for r in replies if "error" in r)[:_MAX_MESSAGES],
                seconds=time.monotonic() - self._start_s,
            )
        )


class RewardPool:
    """Scores batches in parallel under a hard limit per row; see the module's docstring."""

    def __init__(self, config: RewardConfig):
        """Raises SandboxUnavailableError or ValueError before anything is scored; starts no process yet."""
        self._config = config
        self._settings = {
            "weights": dict(config.weights),
            "sandbox": choose_sandbox(config),
            "timeout_s": config.timeout_s,
            "memory_bytes": config.memory_mb * 2**20,
        }
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def sandbox_kind(self) -> str:
        """ "bwrap", "seccomp" or "none"."""
        return self._settings["sandbox"]

    def submit(self, items: Sequence[RewardItem]) -> concurrent.futures.Future[RewardResult]:
        """Starts scoring; the future holds a `RewardResult`, or raises RewardWorkerError.

        Raises:
          TypeError: a reference holds something that JSON cannot carry.
          ValueError: the pool is closed.
        """
        rows = [json.dumps({"text": item.text, "reference": dict(item.reference)}).encode() for item in items]
        batch = _Batch(len(rows), self._config.failed_score)
        with self._lock:
            if self._is_closed:
                raise ValueError("the reward pool is closed; expected submit before close")
            self._start_threads()
            for index, row in enumerate(rows):
                self._jobs.put((batch, index, row))
        return batch.future

    def score(self, items: Sequence[RewardItem]) -> RewardResult:
        """`submit` and wait."""
        return self.submit(items).result()

    def close(self) -> None:
        """Ends all workers; rows still queued are dropped with a RewardWorkerError. May be called twice."""
        with self._lock:
            self._is_closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def _start_threads(self) -> None:
        if self._threads:
            return
        for index in range(self._config.num_workers or min(os.cpu_count() or 1, _MAX_DEFAULT_WORKERS)):
            thread = threading.Thread(target=self._serve, name=f"reward-{index}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self) -> None:
        """One worker's thread. It lives as long as its process, which the kernel ends with its thread."""
        worker = None
        while (job := self._jobs.get()) is not None:
            batch, index, row = job
            if self._is_closed:
                batch.fail(RewardWorkerError("the reward pool was closed before all rows were scored"))
                continue
            try:
                worker = worker or _Worker(self._settings)
                reply = worker.score(row)
            except BaseException as error:
                batch.fail(error)  # whoever waits for the batch must hear of it
                if not isinstance(error, RewardWorkerError):
                    raise
                continue
            if worker.is_done:
                worker.kill()
                worker = None
            batch.put(index, reply)
        if worker is not None:
            worker.kill()


class _Worker:
    """One `reward_worker` process and its wires."""

    def __init__(self, settings: Mapping[str, Any]):
        self._limit_s = settings["timeout_s"] + _GRACE_S
        self._unread = b""
        self.is_done = False
        self._log = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                sandbox.worker_command(settings["sandbox"], ["-m", "tlt_jax.rl.reward_worker"]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=sandbox.worker_environment(settings["sandbox"]),
                start_new_session=True,  # an interrupt at the keyboard is the run's to handle
            )
        except OSError as error:
            raise RewardWorkerError(f"a reward process did not start: {error}") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        reply = self._exchange(json.dumps(settings).encode(), _START_LIMIT_S)
        if reply != {"ready": True}:
            self._process.kill()
            self._process.wait()
            self._log.seek(0)
            tail = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
            self.kill()
            raise RewardWorkerError(f"a reward process did not start: {tail[0] if tail else reply}")

    def score(self, row: bytes) -> dict[str, Any]:
        """One reply for one row (JSON), whatever happens to the process; `is_done` says that it is spent."""
        nonce = secrets.token_hex(8)
        reply = self._exchange(nonce.encode() + b"\n" + row, self._limit_s)
        if reply.pop("nonce", None) == nonce:
            self.is_done = bool(reply.pop("last"))
            return reply
        self.is_done = True
        return reply if "timeout" in reply else {"error": "the reward process was lost while it scored this row"}

    def kill(self) -> None:
        """Ends the process at once; what it runs dies with it."""
        self._process.kill()
        self._process.wait()
        for wire in (self._process.stdin, self._process.stdout, self._log):
            if wire is not None:
                wire.close()

    def _exchange(self, message: bytes, limit_s: float) -> dict[str, Any]:
        """Sends a message and returns one line; {"timeout": true} past the limit, {} from a dead process."""
        deadline_s = time.monotonic() + limit_s
        left = memoryview(message + b"\n")
        try:
            while left:
                if not _wait(self._in, select.POLLOUT, deadline_s):
                    return {"timeout": True}
                left = left[os.write(self._in, left) :]
            while b"\n" not in self._unread:
                if not _wait(self._out, select.POLLIN, deadline_s):
                    return {"timeout": True}
                chunk = os.read(self._out, 65536)
                if not chunk:
                    return {}
                self._unread += chunk
            line, self._unread = self._unread.split(b"\n", 1)
            return json.loads(line)
        except (BrokenPipeError, json.JSONDecodeError):
            return {}


def _wait(descriptor: int, event: int, deadline_s: float) -> bool:
    poller = select.poll()
    poller.register(descriptor, event)
    return bool(poller.poll(max(deadline_s - time.monotonic(), 0.0) * 1e3))
