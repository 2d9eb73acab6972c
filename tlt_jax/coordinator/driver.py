"""One worker through one rollout: decodes what it can get, trains while it has nothing, leaves at the end.

Life of `Driver.run`, in a thread of its own:
  1. Take groups while rows are free; step the engine. Now and then, look at directives, and give waiting requests away
     if another worker has none.
  2. Nothing left: report IDLE, promise to take the next gift, and wait. A gift leads back to 1.
  3. A directive grants a window: train until a gift comes, the grant is gone, or the trainer has had enough.
  4. A directive says that the rollout is over: leave.

Invariants: the engine is touched by this thread alone; whatever happens, the engine is idle and a last report is sent
when `run` returns.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tlt_jax.coordinator import agent as agents
from tlt_jax.coordinator.agent import Agent
from tlt_jax.coordinator.messages import Directive, Lost, Report, WindowEnd, from_json, to_json
from tlt_jax.coordinator.store import TimedStore
from tlt_jax.coordinator.work import WorkQueue
from tlt_jax.rollout.engine import Progress, RolloutEngine
from tlt_jax.types import Completion

# Calls of the store cost some 0.2 ms across processes; a look takes up to three of them.
POLL_S = 0.2

OnDone = Callable[[list[Completion]], None]
OnProgress = Callable[[Progress], None]
Ask = Callable[[], WindowEnd | None]


class RolloutError(RuntimeError):
    """The rollout could not be completed, for a worker in another process failed. The message says which, and why."""


class Trainer(Protocol):
    """What a worker does with its idle time."""

    def train(self, window_id: int, ask: Ask) -> WindowEnd:
        """Trains until `ask`, called between any two steps, gives a reason to stop, or there is one of its own.

        It raises nothing: a failure is counted, shown, and the reason why the window ended.
        """
        ...


@dataclasses.dataclass(kw_only=True)
class Job:
    """One rollout in one process: what its drivers share."""

    rollout: int
    root: str  # of the rollout's keys
    store: TimedStore  # of the queue too
    queue: WorkQueue
    num_workers: int  # in all processes
    on_sent: Callable[[], None]  # a report is in the store
    on_done: OnDone | None = None
    on_progress: OnProgress | None = None
    before_step: Callable[[RolloutEngine], None] | None = None
    completions: dict[int, Completion] = dataclasses.field(default_factory=dict)
    failure: BaseException | None = None  # of this process
    left_s: float | None = None  # when the last driver of this process had left
    poll_s: float = 0.0  # spent on messages, by all drivers
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    progress: dict[int, Progress] = dataclasses.field(default_factory=dict)

    def fail(self, failure: BaseException) -> None:
        """Makes every driver of this process leave before its next step; the first failure is kept."""
        with self.lock:
            self.failure = self.failure or failure

    def report(self, engine: RolloutEngine, done: list[Completion]) -> None:
        """Takes completions, and tells those who want to know. One worker at a time."""
        with self.lock:
            self.completions.update((c.request_id, c) for c in done)
            self.progress[engine.worker] = engine.progress()
            if done and self.on_done is not None:
                self.on_done(done)
            if self.on_progress is not None:
                parts = self.progress.values()
                self.on_progress(
                    Progress(
                        done=len(self.completions),
                        live=sum(p.live for p in parts),
                        waiting=sum(p.waiting for p in parts) + self.queue.num_untaken(),
                        tokens=sum(p.tokens for p in parts),
                    )
                )


class Driver:
    """Holds an engine and what its worker remembers of the rollout."""

    def __init__(self, engine: RolloutEngine, job: Job, trainer: Trainer | None):
        self.engine, self.job, self.trainer = engine, job, trainer
        self.agent = Agent(worker=engine.worker, rollout=job.rollout)
        self._num_done = 0
        self._promise: int | None = None
        self._looked_s = time.perf_counter()

    def run(self) -> None:
        """Serves the rollout to its end. Raises nothing: a failure is the job's, and ends the rollout everywhere."""
        try:
            self._serve()
        except BaseException as error:  # raised again by the thread that waits for the drivers
            self.job.fail(error)
            self._lose(error)
        finally:
            if self.engine.has_work:
                self.engine.abort()
            with self.job.lock:
                self.job.poll_s += self.job.store.spent()[1]

    def _serve(self) -> None:
        while self._decode():
            self._say(agents.turn_idle(self.agent, self._num_done))
            if not self._find_work():
                break
        self._say(agents.leave(self.agent))

    @property
    def _must_leave(self) -> bool:
        return self.agent.is_over or self.job.failure is not None

    # 1. with requests

    def _decode(self) -> bool:
        """Until the worker has run dry; False where it has to leave before."""
        # No more than its share at first, so that workers that begin a little later find some.
        self._take_groups(-(-self.job.queue.num_groups // self.job.num_workers))
        while self.engine.has_work:
            if self.job.before_step is not None:
                self.job.before_step(self.engine)
            done = self.engine.step()
            self._num_done += len(done)
            self.job.report(self.engine, done)
            self._look_around()
            if self._must_leave:
                return False
            self._take_groups()
        return True

    def _take_groups(self, limit: int | None = None) -> None:
        """Takes groups, at most `limit`, until the engine's rows are spoken for; the only worker may take all."""
        for num_taken in itertools.count():
            is_full = self.job.num_workers > 1 and self.engine.num_free_rows <= 0
            if is_full or num_taken == limit or (group := self.job.queue.take_group()) is None:
                return
            self.engine.submit(group)

    def _look_around(self) -> None:
        now_s = time.perf_counter()
        if now_s - self._looked_s < POLL_S:
            return
        self._looked_s = now_s
        self._read()
        if self.job.num_workers > 1 and (num_waiting := self.engine.progress().waiting):
            self._give(num_waiting)

    def _give(self, num_waiting: int) -> None:
        """Shares waiting requests evenly with the workers that have none."""
        num_wanted = self.job.queue.num_wanted()
        share = -(-num_waiting // (num_wanted + 1))
        for _ in range(num_wanted):
            if requests := self.engine.withdraw(share):
                self.job.queue.give(requests)

    # 2. without requests

    def _find_work(self) -> bool:
        """Until requests come; False where the worker has to leave."""
        if self._promise is None:
            self._promise = self.job.queue.promise()
        timeout_s = 0.0
        while True:
            self._read(timeout_s)
            if self._must_leave:
                return False
            if (requests := self.job.queue.gift(self._promise)) is not None:
                self._promise = None
                self._say(agents.turn_busy(self.agent))
                self.engine.submit(requests)
                return True
            if self.agent.granted is not None and self.trainer is not None:
                self._train(self.trainer)
            self.job.report(self.engine, [])  # says that this worker is well
            timeout_s = POLL_S

    # 3. in a window

    def _train(self, trainer: Trainer) -> None:
        self._say(agents.begin_window(self.agent))
        window_id = self.agent.window_id
        assert window_id is not None
        end = WindowEnd.FAILED
        try:
            end = trainer.train(window_id, self._ask)
        finally:
            self._say(agents.end_window(self.agent, end))

    def _ask(self) -> WindowEnd | None:
        """Why the window has to end; None where it may go on. Raises nothing: the trainer would take it for its own."""
        try:
            return self._why_stop()
        except BaseException as error:  # raised again by the thread that waits for the drivers
            self.job.fail(error)
            return WindowEnd.STOPPED

    def _why_stop(self) -> WindowEnd | None:
        if time.perf_counter() - self._looked_s >= POLL_S:
            self._looked_s = time.perf_counter()
            self.job.report(self.engine, [])  # a window may last for hours: says that this worker is well
        self._read()
        if self._must_leave or not self.agent.may_train:
            return WindowEnd.STOPPED
        assert self._promise is not None
        return None if self.job.queue.gift(self._promise) is None else WindowEnd.WORK

    # What is said and heard.

    def _say(self, step: tuple[Agent, Report]) -> None:
        self.agent, report = step
        self._send(report, report.seq)

    def _send(self, message: Report | Lost, seq: int) -> None:
        self.job.store.set(f"{self.job.root}/report/{self.engine.worker}/{seq}", to_json(message))
        self.job.store.timed(self.job.on_sent)

    def _lose(self, error: BaseException) -> None:
        """Tells the coordinator; what is in the way of that is not worth more than the error itself."""
        reason = f"{type(error).__name__}: {error}"
        try:
            lost = Lost(worker=self.engine.worker, rollout=self.job.rollout, reason=reason)
            self._send(lost, self.agent.seq + 1)
        except (RuntimeError, OSError, ValueError):
            return

    def _read(self, timeout_s: float = 0.0) -> None:
        """Takes all directives that have come, the first within `timeout_s`."""
        while True:
            newest = self.agent.newest
            version = 1 if newest is None else newest.version + 1
            text = self.job.store.get(f"{self.job.root}/directive/{self.engine.worker}/{version}", timeout_s)
            if text is None:
                return
            message = from_json(text)
            assert isinstance(message, Directive)
            self.agent, timeout_s = agents.receive(self.agent, message), 0.0


def failure_elsewhere(drivers: Sequence[Driver]) -> str:
    """Why the drivers left before all was done, where that was another process's failure; "" where it was not."""
    return next((d.agent.failure for d in drivers if d.agent.failure), "")
