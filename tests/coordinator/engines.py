"""Engines that only count, requests for them, and a process of a job that runs them:

python -m tests.coordinator.engines ADDRESS INDEX [fails]
"""

import collections
import json
import sys
import time

import numpy as np

from tlt_jax.rollout.engine import Progress
from tlt_jax.types import Completion, Request, SamplingParams


class CountingEngine:
    """Finishes the oldest request at every step; `fails_at` names a request that raises instead."""

    def __init__(self, worker, rows=2, fails_at=None, gate=None, step_s=0.0):
        self.worker, self.rows, self.fails_at, self.gate, self.step_s = worker, rows, fails_at, gate, step_s
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

    def begin(self, start_s, step, trace):
        self.start_s, self.was_traced = start_s, (step, trace)

    def submit(self, requests):
        self.queue.extend(requests)

    def withdraw(self, num_requests):
        num_waiting = max(len(self.queue) - self.rows, 0)
        return [self.queue.pop() for _ in range(min(num_requests, num_waiting))][::-1]

    def abort(self):
        self.num_aborts += 1
        self.queue.clear()

    def progress(self):
        live = min(self.rows, len(self.queue))
        return Progress(done=self.num_done, live=live, waiting=len(self.queue) - live, tokens=self.num_done)

    def step(self):
        if self.gate is not None:
            self.gate.wait(timeout=30)
        time.sleep(self.step_s)
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


def run_process(address, index, fails):
    """Two rollouts in one of two processes: workers 0 and 1 are quick, 2 is slow and has one row."""
    import jax

    from tlt_jax.coordinator.runtime import WorkerPool
    from tlt_jax.coordinator.store import ServiceStore

    jax.distributed.initialize(address, 2, index)
    if index == 0:
        engines = [CountingEngine(i, rows=1, step_s=0.05) for i in range(2)]
    else:
        engines = [CountingEngine(2, rows=1, step_s=0.15)]
    pool = WorkerPool(engines, store=ServiceStore("test"), num_workers=3, is_leader=index == 0)
    changes = []
    if pool.coordinator is not None:
        pool.coordinator.on_change = lambda c: changes.append((c.worker, c.state))
    said = {"done": [], "error": ""}
    try:
        for _ in range(2):
            if fails and index == 1:
                engines[0].step = lambda: (_ for _ in ()).throw(RuntimeError("lost device"))
            said["done"].append([(c.request_id, c.worker) for c in pool.generate(make_requests(6))])
    except RuntimeError as error:
        said["error"] = f"{type(error).__name__}: {error}"
    said |= {"poll_s": pool.poll_s, "seconds": dict(pool.seconds), "changes": changes}
    deadline_s = time.monotonic() + 30.0
    while not fails and pool.coordinator is not None and pool.coordinator.is_in_progress(2):
        assert time.monotonic() < deadline_s, "the leader does not hear that all have left"
        time.sleep(0.02)
    print(json.dumps(said))


if __name__ == "__main__":
    run_process(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "fails")
