"""Several engines behind one queue of prompt groups.

A worker takes the next group when it has a free row, so no split is fixed beforehand and a worker with short
responses takes more groups. Tokens do not depend on which worker a request lands on.

With one worker everything runs in the caller's thread. With several, each has a thread of its own; callbacks are
called from those threads, one at a time.
"""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tlt_jax.rollout.engine import Progress, RolloutEngine
from tlt_jax.sharding import Versioned
from tlt_jax.types import Completion, Request

OnDone = Callable[[list[Completion]], None]
OnProgress = Callable[[Progress], None]
OnState = Callable[[int, str], None]


class WorkerPool:
    """Runs requests on a fixed set of engines."""

    def __init__(self, engines: Sequence[RolloutEngine]):
        if not engines:
            raise ValueError("workers: got no engines, expected at least one")
        if len({e.worker for e in engines}) < len(engines):
            raise ValueError(f"workers: got the numbers {[e.worker for e in engines]}, expected each engine its own")
        self.engines = list(engines)
        self.idle_frac = 0.0  # of the last `generate`: share of the workers' time after they had run dry

    def load(self, weights: Sequence[Versioned]) -> None:
        """Gives every engine its own copy of the weights, all of one version."""
        for engine, copy in zip(self.engines, weights, strict=True):
            engine.load(copy)

    def arm_rounds(self) -> dict[str, int]:
        """Rounds played of each strategy so far, over all engines."""
        total: collections.Counter[str] = collections.Counter()
        for engine in self.engines:
            total.update(engine.stats.arm_rounds)
        return dict(total)

    def save_bandits(self) -> list[dict[str, Any] | None]:
        """What each engine's policy has learnt about strategies, for a checkpoint."""
        return [engine.save_bandit() for engine in self.engines]

    def restore_bandits(self, saved: Sequence[dict[str, Any] | None]) -> None:
        """Takes up what `save_bandits` gave; engines beyond the saved ones start afresh."""
        for engine, state in zip(self.engines, saved, strict=False):
            engine.restore_bandit(state)

    def generate(
        self,
        requests: Sequence[Request],
        on_done: OnDone | None = None,
        on_progress: OnProgress | None = None,
        on_state: OnState | None = None,
    ) -> list[Completion]:
        """All completions, in the order of `requests`.

        Args:
          requests: those of one prompt next to each other; a group goes to one worker.
          on_done: called with completions as they finish, while decoding goes on.
          on_progress: called after every engine step with the totals over workers.
          on_state: called with a worker's number and "BUSY" when it starts, "IDLE" when it has run dry.

        Raises:
          ValueError: two requests of the same id.
        """
        if len({r.request_id for r in requests}) != len(requests):
            raise ValueError("requests: got a request id twice, expected distinct ids (they seed the noise)")
        start_s = time.perf_counter()
        for engine in self.engines:
            engine.begin(start_s)
        job = _Job(requests, on_done, on_progress, on_state, len(self.engines))
        if len(self.engines) == 1:
            job.serve(self.engines[0])
        else:
            threads = [
                threading.Thread(target=job.serve, args=(e,), name=f"rollout-worker-{e.worker}") for e in self.engines
            ]
            for t in threads:
                t.start()
            try:
                for t in threads:
                    t.join()
            except BaseException as e:  # an interrupt: the workers drop what they have, then it goes on up
                job.stop(e)
                for t in threads:
                    t.join()
                raise
        if job.failure is not None:
            raise job.failure
        total_s = max(time.perf_counter() - start_s, 1e-9)
        self.idle_frac = 1.0 - sum(job.busy_s.values()) / (total_s * len(self.engines))
        return [job.completions[r.request_id] for r in requests]


class _Job:
    """One call of `generate`: the queue, and what came back."""

    def __init__(
        self,
        requests: Sequence[Request],
        on_done: OnDone | None,
        on_progress: OnProgress | None,
        on_state: OnState | None,
        num_workers: int,
    ):
        groups = [list(g) for _, g in itertools.groupby(requests, key=lambda r: r.prompt_id)]
        self.completions: dict[int, Completion] = {}
        self.failure: BaseException | None = None
        self._groups = collections.deque(groups)
        self.busy_s: dict[int, float] = {}
        self._on_done, self._on_progress, self._on_state = on_done, on_progress, on_state
        self._num_workers = num_workers
        self._progress: dict[int, Progress] = {}
        self._lock = threading.Lock()

    def serve(self, engine: RolloutEngine) -> None:
        """Runs one engine until the queue is empty and its requests are done, or any worker has failed."""
        start_s = time.perf_counter()
        try:
            self._tell(engine, "BUSY")
            while self.failure is None:
                self._refill(engine)
                if not engine.has_work:
                    break
                done = engine.step()
                self._report(engine, done)
            self.busy_s[engine.worker] = time.perf_counter() - start_s
            self._tell(engine, "IDLE")
        except BaseException as e:  # re-raised by `generate`
            self.stop(e)
        if engine.has_work:
            engine.abort()

    def stop(self, failure: BaseException) -> None:
        """Makes every worker drop its requests before its next step."""
        with self._lock:
            self.failure = self.failure or failure
            self._groups.clear()

    def _tell(self, engine: RolloutEngine, state: str) -> None:
        if self._on_state is not None:
            with self._lock:
                self._on_state(engine.worker, state)

    def _refill(self, engine: RolloutEngine) -> None:
        """Takes groups until the engine's rows are spoken for; the only worker may as well take all."""
        while self._num_workers == 1 or engine.num_free_rows > 0:
            with self._lock:
                if not self._groups:
                    return
                group = self._groups.popleft()
            engine.submit(group)

    def _report(self, engine: RolloutEngine, done: list[Completion]) -> None:
        with self._lock:
            self.completions.update((c.request_id, c) for c in done)
            self._progress[engine.worker] = engine.progress()
            parts = self._progress.values()
            if done and self._on_done is not None:
                self._on_done(done)
            if self._on_progress is not None:
                queued = sum(len(g) for g in self._groups)
                self._on_progress(
                    Progress(
                        done=len(self.completions),
                        live=sum(p.live for p in parts),
                        waiting=sum(p.waiting for p in parts) + queued,
                        tokens=sum(p.tokens for p in parts),
                    )
                )
