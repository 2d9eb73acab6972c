"""Several engines behind one queue, with engines that only count."""

import collections
import threading

import numpy as np
import pytest

from tlt_jax.rollout.engine import Progress
from tlt_jax.rollout.workers import WorkerPool
from tlt_jax.types import Completion, Request, SamplingParams


class CountingEngine:
    """Finishes the oldest request at every step; `fails_at` names a request that raises instead."""

    def __init__(self, worker, rows=2, fails_at=None, gate=None):
        self.worker, self.rows, self.fails_at, self.gate = worker, rows, fails_at, gate
        self.queue: collections.deque = collections.deque()
        self.num_done = self.num_aborts = 0
        self.weights = None

    @property
    def has_work(self):
        return bool(self.queue)

    @property
    def num_free_rows(self):
        return self.rows - len(self.queue)

    def load(self, weights):
        self.weights = weights

    def begin(self, start_s):
        self.start_s = start_s

    def submit(self, requests):
        self.queue.extend(requests)

    def abort(self):
        self.num_aborts += 1
        self.queue.clear()

    def progress(self):
        return Progress(done=self.num_done, live=min(self.rows, len(self.queue)), waiting=0, tokens=self.num_done)

    def step(self):
        if self.gate is not None:
            self.gate.wait(timeout=30)
        request = self.queue.popleft()
        if request.request_id == self.fails_at:
            raise RuntimeError("lost device")
        self.num_done += 1
        return [
            Completion(
                request_id=request.request_id,
                prompt_id=request.prompt_id,
                sample=request.sample,
                prompt_ids=request.prompt_ids,
                token_ids=np.array([request.request_id]),
                logprobs=np.zeros(1, np.float32),
                finish_reason="stop",
                worker=self.worker,
            )
        ]


def make_requests(num_prompts, group_size=3):
    sampling = SamplingParams()
    return [
        Request(request_id=10 * p + r, prompt_id=p, sample=r, prompt_ids=(1, p), sampling=sampling)
        for p in range(num_prompts)
        for r in range(group_size)
    ]


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_completions_come_in_the_order_of_the_requests(num_workers):
    """G8, H7: each request once, a group on one worker, every completion reported, states in pairs."""
    pool = WorkerPool([CountingEngine(i) for i in range(num_workers)])
    reported, progress, states = [], [], []
    requests = make_requests(5)
    done = pool.generate(requests, reported.extend, progress.append, lambda w, s: states.append((w, s)))
    assert [c.request_id for c in done] == [r.request_id for r in requests]
    assert sorted(c.request_id for c in reported) == [r.request_id for r in requests]
    assert all(len({c.worker for c in done if c.prompt_id == p}) == 1 for p in range(5))
    assert [p.done for p in progress] == list(range(1, 16)) and progress[-1].waiting == progress[-1].live == 0
    assert sorted(states) == sorted((w, s) for w in range(num_workers) for s in ("BUSY", "IDLE"))
    assert 0.0 <= pool.idle_frac < 1.0
    assert len({engine.start_s for engine in pool.engines}) == 1  # one clock


def test_a_worker_that_runs_dry_is_idle_and_takes_no_work_of_others():
    """One worker is held up with one group; the other does the rest, and stands idle."""
    gate = threading.Event()
    slow, fast = CountingEngine(0, rows=1, gate=gate), CountingEngine(1, rows=1)
    counts = collections.Counter()

    def on_done(done):
        counts.update(c.worker for c in done)
        if counts[1] == 9:
            gate.set()

    done = WorkerPool([slow, fast]).generate(make_requests(4), on_done)
    assert collections.Counter(c.worker for c in done) == {0: 3, 1: 9}


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_failing_worker_stops_all_and_its_error_comes_out(num_workers):
    """What was in progress is dropped everywhere, so the pool can be used again."""
    engines = [CountingEngine(i, fails_at=10) for i in range(num_workers)]
    pool = WorkerPool(engines)
    with pytest.raises(RuntimeError, match="lost device"):
        pool.generate(make_requests(4))
    assert not any(engine.has_work for engine in engines)
    for engine in engines:
        engine.fails_at = None
    assert len(pool.generate(make_requests(4))) == 12


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_error_of_the_callback_comes_out_too(num_workers):
    engines = [CountingEngine(i) for i in range(num_workers)]

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        WorkerPool(engines).generate(make_requests(3), on_progress=interrupt)
    assert not any(engine.has_work for engine in engines)


def test_each_worker_gets_its_own_copy_and_bad_calls_are_refused():
    engines = [CountingEngine(i) for i in range(2)]
    pool = WorkerPool(engines)
    pool.load(["a", "b"])
    assert [engine.weights for engine in engines] == ["a", "b"]
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        pool.load(["a"])
    with pytest.raises(ValueError, match="got a request id twice"):
        pool.generate(make_requests(1) * 2)
    with pytest.raises(ValueError, match="got no engines"):
        WorkerPool([])
