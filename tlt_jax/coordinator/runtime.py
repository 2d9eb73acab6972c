"""The workers of this process, and, in the process that leads, the coordinator of all workers.

Life of `WorkerPool.generate`, which every process calls with the same requests in the same order:
  1. The leader opens the rollout.
  2. A driver per worker (see `driver`) serves it, each in a thread of its own; one alone in the caller's thread.
  3. The coordinator hears every report, applies `state.transition` and sends the directives that follow: at once after
     a report from this process, within `LISTEN_S` after one from another.
  4. When all drivers have left, each process returns what its own workers have completed.

Tokens do not depend on which worker a request lands on.
"""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tlt_jax.coordinator.driver import (
    Driver,
    Job,
    OnDone,
    OnProgress,
    RolloutError,
    Trainer,
    failure_elsewhere,
)
from tlt_jax.coordinator.messages import (
    Change,
    Directive,
    Event,
    Open,
    Recall,
    Release,
    WorkerState,
    from_json,
    to_json,
)
from tlt_jax.coordinator.state import CoordinatorConfig, start, time_in_states, transition
from tlt_jax.coordinator.store import LocalStore, Store, TimedStore
from tlt_jax.coordinator.work import WorkQueue, make_groups
from tlt_jax.rollout.engine import RolloutEngine
from tlt_jax.sharding import Versioned
from tlt_jax.types import Completion, Request

LEAVE_S = 60.0  # how long the leader listens for workers that are slow to leave
# Counts of an engine by strategy, and what metrics call them.
ARM_COUNTS = {
    "arm_rounds": "spec/arm",
    "arm_row_rounds": "spec/arm_row_rounds",
    "arm_tokens": "spec/arm_tokens",
}
LISTEN_S = 0.05  # a call of the store costs some 0.3 ms, in a thread of its own

OnChange = Callable[[Change], None]


class Coordinator:
    """Applies the rules to what arrives, and sends what follows. Any thread may call it."""

    def __init__(self, store: Store, num_workers: int, config: CoordinatorConfig):
        self.on_change: OnChange | None = None
        self._store = store
        self._lock = threading.RLock()
        self._state = start(num_workers, config, time.perf_counter())

    def tell(self, event: Event) -> None:
        """Applies one event, now."""
        with self._lock:
            self._state, actions = transition(self._state, event, time.perf_counter())
            for action in actions:
                if isinstance(action, Directive):
                    key = f"{_root(action.rollout)}/directive/{action.worker}/{action.version}"
                    self._store.set(key, to_json(action))
                elif self.on_change is not None:
                    self.on_change(action)

    def open(self, rollout: int, num_requests: int, train: bool) -> None:
        """Begins a rollout; keys of the last but one are removed, for everybody has left the last one."""
        self._store.delete(_root(rollout - 2))
        self.tell(Open(rollout=rollout, num_requests=num_requests, train=train))
        self.listen()

    def listen(self) -> None:
        """Reads all reports that have come."""
        with self._lock:
            root = f"{_root(self._state.rollout)}/report"
            found = [(tuple(map(int, key.split("/")[-2:])), key, text) for key, text in self._store.list(root).items()]
            for _, key, text in sorted(found):
                self._store.delete(key)
                message = from_json(text)
                assert not isinstance(message, Directive)
                self.tell(message)

    def is_in_progress(self, rollout: int) -> bool:
        """Whether any worker has yet to leave this rollout; not where it failed, for all have been told."""
        with self._lock:
            return self._state.rollout == rollout and not self._state.is_closed and not self._state.failure

    def seconds(self) -> dict[WorkerState, float]:
        """Worker-seconds in each state since the coordinator began, over all workers."""
        with self._lock:
            now_s = time.perf_counter()
            total = dict.fromkeys(WorkerState, 0.0)
            for worker in range(len(self._state.workers)):
                for state, seconds in time_in_states(self._state, worker, now_s).items():
                    total[state] += seconds
            return total


class WorkerPool:
    """Runs requests on the engines of this process, together with those of all others."""

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        *,
        config: CoordinatorConfig | None = None,
        store: Store | None = None,
        num_workers: int | None = None,
        is_leader: bool = True,
    ):
        """Makes the pool.

        Args:
          engines: of this process; their `worker` numbers are unique among all processes.
          config: when idle workers train.
          store: shared by the processes of the job; default: this process is alone.
          num_workers: of all processes; default: these engines.
          is_leader: this process coordinates; true in exactly one.

        Raises:
          ValueError: no engines, or two of the same number.
        """
        if not engines:
            raise ValueError("workers: got no engines, expected at least one")
        if len({e.worker for e in engines}) < len(engines):
            raise ValueError(f"workers: got the numbers {[e.worker for e in engines]}, expected each engine its own")
        self.engines = list(engines)
        self.num_workers = len(engines) if num_workers is None else num_workers
        self.trainers: Mapping[int, Trainer] = {}  # by worker; those without one do not train
        self.before_step: Callable[[RolloutEngine], None] | None = None  # called in the engine's own thread
        self.poll_s = 0.0  # spent on messages so far, by all workers of this process
        self.driver_s = 0.0  # in rollouts, of all workers of this process
        self._is_shared = store is not None
        self._store = LocalStore() if store is None else store
        self._rollout = 0
        config = config or CoordinatorConfig()
        self.coordinator = Coordinator(self._store, self.num_workers, config) if is_leader else None
        # Worker-seconds inside `generate` so far, over the workers of all processes; in the leader alone.
        self.seconds: dict[WorkerState, float] = dict.fromkeys(WorkerState, 0.0)

    def load(self, weights: Sequence[Versioned]) -> None:
        """Gives every engine its own copy of the weights, all of one version."""
        for engine, copy in zip(self.engines, weights, strict=True):
            engine.load(copy)

    def arm_counts(self) -> dict[str, int]:
        """What each strategy was played and gave so far, over all engines: names as in `ARM_COUNTS`, then its own."""
        total: collections.Counter[str] = collections.Counter()
        for engine, field in itertools.product(self.engines, ARM_COUNTS):
            total.update({f"{ARM_COUNTS[field]}/{name}": n for name, n in getattr(engine.stats, field).items()})
        return dict(total)

    def save_bandits(self) -> list[dict[str, Any] | None]:
        """What each engine's policy has learnt about strategies, for a checkpoint."""
        return [engine.save_bandit() for engine in self.engines]

    def restore_bandits(self, saved: Sequence[dict[str, Any] | None]) -> None:
        """Takes up what `save_bandits` gave; engines beyond the saved ones start afresh."""
        for engine, state in zip(self.engines, saved, strict=False):
            engine.restore_bandit(state)

    def recall(self, worker: int, *, is_recalled: bool = True) -> None:
        """Keeps a worker from training for the rest of the rollout, or lets it train again; the leader may ask."""
        if self.coordinator is None:
            raise ValueError("workers.recall: got a call in another process, expected one in the process that leads")
        self.coordinator.tell(Recall(worker=worker) if is_recalled else Release(worker=worker))

    def generate(
        self,
        requests: Sequence[Request],
        on_done: OnDone | None = None,
        on_progress: OnProgress | None = None,
        *,
        step: int = 0,
        train: bool = False,
        trace: bool = False,
        expected_lens: Mapping[int, float] | None = None,
    ) -> list[Completion]:
        """All completions of this process's workers, in the order of `requests`; alone, those of all requests.

        Args:
          requests: those of one prompt next to each other; a group goes to one worker.
          on_done: called with completions as they finish, while decoding goes on.
          on_progress: called after every engine step with the totals over workers, and now and then by idle ones.
          step: RL step, for traces.
          train: whether features are traced, and idle workers train on them.
          trace: whether features are traced, trained on or not.
          expected_lens: tokens of a response by `prompt_id`, the same in all processes; longest are decoded first.

        Raises:
          ValueError: two requests of the same id.
          RolloutError: a worker of another process failed.
        """
        if len({r.request_id for r in requests}) != len(requests):
            raise ValueError("requests: got a request id twice, expected distinct ids (they seed the noise)")
        self._rollout += 1
        train = train and bool(self.trainers)
        store = TimedStore(self._store)
        job = Job(
            rollout=self._rollout,
            root=_root(self._rollout),
            store=store,
            queue=WorkQueue(store, _root(self._rollout), make_groups(requests, expected_lens)),
            num_workers=self.num_workers,
            on_sent=self.coordinator.listen if self.coordinator is not None else lambda: None,
            on_done=on_done,
            on_progress=on_progress,
            before_step=self.before_step,
        )
        start_s, before = time.perf_counter(), self._seconds()
        for engine in self.engines:
            engine.begin(start_s, step=step, trace=train or trace)
        drivers = [Driver(e, job, self.trainers.get(e.worker) if train else None) for e in self.engines]
        if self.coordinator is not None:
            self.coordinator.open(self._rollout, len(requests), train)
        self._run(drivers, job)
        for state, seconds in self._seconds().items():
            self.seconds[state] += seconds - before[state]
        self.poll_s += job.poll_s
        self.driver_s += len(self.engines) * (time.perf_counter() - start_s)
        if job.failure is not None:
            raise job.failure
        if failure := failure_elsewhere(drivers):
            raise RolloutError(f"rollout: {failure}")
        return [job.completions[r.request_id] for r in requests if r.request_id in job.completions]

    def _seconds(self) -> dict[WorkerState, float]:
        return self.coordinator.seconds() if self.coordinator is not None else {}

    def _run(self, drivers: Sequence[Driver], job: Job) -> None:
        """Until every driver has left."""
        if self._is_shared and self.coordinator is not None:
            # No daemon: at its exit an interpreter ends such threads wherever they are, in a call of the service too.
            threading.Thread(target=_listen, args=(self.coordinator, job), name="coordinator").start()
        try:
            if len(drivers) == 1:
                drivers[0].run()
            else:
                _run_threads(drivers, job)
        finally:
            job.left_s = time.perf_counter()


def worker_metrics(before: Mapping[WorkerState, float], after: Mapping[WorkerState, float]) -> dict[str, float]:
    """Where the workers' time in rollouts went between two readings of `WorkerPool.seconds`.

    `worker/idle_frac` is the share after a worker had run dry, `worker/idle_used_frac` how much of that was training.
    """
    states = (WorkerState.BUSY, WorkerState.IDLE, WorkerState.TRAINING)
    busy_s, waiting_s, training_s = (after[state] - before[state] for state in states)
    idle_s = waiting_s + training_s
    return {
        "worker/busy_s": busy_s,
        "worker/idle_s": waiting_s,
        "worker/training_s": training_s,
        "worker/idle_frac": idle_s / max(busy_s + idle_s, 1e-9),
        "worker/idle_used_frac": training_s / max(idle_s, 1e-9),
    }


def _root(rollout: int) -> str:
    return f"rollout/{rollout}"


def _listen(coordinator: Coordinator, job: Job) -> None:
    """Hears other processes until the last worker anywhere has left; that may be after those of this process have."""
    try:
        while job.failure is None and coordinator.is_in_progress(job.rollout):
            if job.left_s is not None and time.perf_counter() - job.left_s > LEAVE_S:
                return  # a process that hangs is the business of those who watch processes
            time.sleep(LISTEN_S)
            coordinator.listen()
    except (RuntimeError, OSError) as error:  # the service is gone, and with it the job
        job.fail(error)


def _run_threads(drivers: Sequence[Driver], job: Job) -> None:
    threads = [threading.Thread(target=d.run, name=f"worker-{d.engine.worker}") for d in drivers]
    for t in threads:
        t.start()
    try:
        for t in threads:
            t.join()
    except BaseException as error:  # an interrupt: the workers drop what they have, then it goes on up
        job.fail(error)
        for t in threads:
            t.join()
        raise
