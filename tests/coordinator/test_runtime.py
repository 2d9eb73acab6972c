"""Several engines behind one queue and under one coordinator, with engines that only count."""

import collections
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.coordinator.engines import CountingEngine, make_requests
from tlt_jax.coordinator import driver
from tlt_jax.coordinator.messages import WindowEnd, WorkerState
from tlt_jax.coordinator.runtime import WorkerPool, worker_metrics
from tlt_jax.coordinator.store import LocalStore


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_completions_come_in_the_order_of_the_requests(num_workers):
    """G8, H7: each request once, a group on one worker, every completion reported, states in pairs."""
    pool = WorkerPool([CountingEngine(i) for i in range(num_workers)])
    reported, progress, changes = [], [], []
    pool.coordinator.on_change = changes.append
    requests = make_requests(5)
    done = pool.generate(requests, reported.extend, progress.append, step=3)
    assert [c.request_id for c in done] == [r.request_id for r in requests]
    assert sorted(c.request_id for c in reported) == [r.request_id for r in requests]
    assert all(len({c.worker for c in done if c.prompt_id == p}) == 1 for p in range(5))
    counts = [p.done for p in progress]
    assert sorted(set(counts)) == list(range(1, 16)) and counts == sorted(counts)
    assert progress[-1].waiting == progress[-1].live == 0
    for i in range(num_workers):
        states = [c.state for c in changes if c.worker == i]
        assert (states[0], states[-2:]) == ("BUSY", ["IDLE", "LEARNING"])
    assert [c.time_s for c in changes] == sorted(c.time_s for c in changes)
    assert all(engine.was_traced == (3, False) for engine in pool.engines)  # nobody trains
    assert len({engine.start_s for engine in pool.engines}) == 1  # one clock


def test_a_worker_that_runs_dry_takes_waiting_requests_of_another(monkeypatch):
    """One worker is held up with one group; the other does the rest, and then half of what still waits there."""
    monkeypatch.setattr(driver, "POLL_S", 0.001)
    gate = threading.Event()
    slow, fast = CountingEngine(0, rows=1, gate=gate), CountingEngine(1, rows=1)
    pool = WorkerPool([slow, fast])
    changes, seen = [], []
    pool.coordinator.on_change = changes.append

    def on_progress(progress):
        seen.append(progress.done)
        if seen.count(9) > 2:  # nothing but the held-up group is left, and the fast worker waits for a gift
            gate.set()

    done = pool.generate(make_requests(4), on_progress=on_progress)
    assert collections.Counter(c.worker for c in done) == {0: 2, 1: 10}
    assert [c.state for c in changes if c.worker == 1] == ["BUSY", "IDLE", "BUSY", "IDLE", "LEARNING"]
    assert sum(pool.seconds.values()) == pytest.approx(2 * (changes[-1].time_s - changes[0].time_s), rel=0.2)
    assert pool.seconds[WorkerState.IDLE] > 0.0 == pool.seconds[WorkerState.TRAINING]


def test_a_worker_with_rows_for_all_leaves_the_others_their_share():
    """Both wait at every step for the other: one that had taken all would wait for ever."""
    together = threading.Barrier(2)
    pool = WorkerPool([CountingEngine(i, rows=12, gate=together) for i in range(2)])
    done = pool.generate(make_requests(4))
    assert collections.Counter(c.worker for c in done) == {0: 6, 1: 6}


def test_groups_that_were_long_before_go_first():
    engine = CountingEngine(0)
    done = []
    WorkerPool([engine]).generate(make_requests(4, 1), done.extend, expected_lens={1: 10.0, 2: 90.0, 3: 20.0})
    assert [c.prompt_id for c in done] == [2, 0, 3, 1]  # nothing is known of 0: the average, 40


class CountingTrainer:
    """Trains until it is told to stop, or has made `budget` steps."""

    def __init__(self, budget=None):
        self.budget, self.windows, self.ends = budget, [], []
        self.is_training = threading.Event()

    def train(self, window_id, ask):
        self.windows.append(window_id)
        self.is_training.set()
        num_steps = 0
        while (end := ask()) is None:
            num_steps += 1
            if num_steps == self.budget:
                end = WindowEnd.BUDGET
                break
        self.ends.append(end)
        return end


@pytest.mark.parametrize(("budget", "end"), [(None, WindowEnd.STOPPED), (2, WindowEnd.BUDGET)])
def test_an_idle_worker_trains_until_the_last_straggler_is_done(budget, end):
    """E1, E2: it begins by itself, needs nobody's company, and holds nobody up."""
    gate, trainers = threading.Event(), {0: CountingTrainer(), 1: CountingTrainer(budget)}
    pool = WorkerPool([CountingEngine(0, rows=3, gate=gate), CountingEngine(1)])
    pool.trainers = trainers
    changes = []
    pool.coordinator.on_change = changes_of(changes, lambda c: gate.set() if c[:2] == (1, "TRAINING") else None)
    assert len(pool.generate(make_requests(4), train=True)) == 12
    mine = [(state, window) for worker, state, window in changes if worker == 1]
    assert mine[-4:] == [("IDLE", None), ("TRAINING", 1), ("IDLE", None), ("LEARNING", None)]
    assert trainers[1].windows == [1] and trainers[1].ends == [end] and trainers[0].windows == []
    assert pool.seconds[WorkerState.TRAINING] > 0.0
    assert pool.engines[1].was_traced == (0, True)
    assert len(pool.generate(make_requests(4))) == 12 and trainers[1].windows == [1]  # an evaluation: no training


def changes_of(changes, react):
    """Keeps changes as tuples, and reacts to each."""

    def on_change(change):
        changes.append((change.worker, change.state, change.window_id))
        react(changes[-1])

    return on_change


def test_requests_end_a_window(monkeypatch):
    """Work comes before training; a worker that was recalled does not train."""
    monkeypatch.setattr(driver, "POLL_S", 0.001)
    gate, trainer = threading.Event(), CountingTrainer()
    slow, fast = CountingEngine(0, rows=1, gate=gate), CountingEngine(1, rows=1)
    pool = WorkerPool([slow, fast])
    pool.trainers = {1: trainer}
    changes = []
    pool.coordinator.on_change = changes_of(changes, lambda c: gate.set() if c[:2] == (1, "TRAINING") else None)
    done = pool.generate(make_requests(2), train=True)
    assert collections.Counter(c.worker for c in done) == {0: 2, 1: 4}
    assert trainer.ends[0] is WindowEnd.WORK and set(trainer.ends[1:]) <= {WindowEnd.STOPPED}
    assert [c[1] for c in changes if c[0] == 1][:6] == ["BUSY", "IDLE", "TRAINING", "IDLE", "BUSY", "IDLE"]
    metrics = worker_metrics(dict.fromkeys(WorkerState, 0.0), pool.seconds)
    assert 0.0 < metrics["worker/idle_used_frac"] < 1.0 and 0.0 < metrics["worker/idle_frac"] < 1.0


def training_pool():
    """Worker 1 trains while the gate holds worker 0 up in its first step."""
    gate, trainer = threading.Event(), CountingTrainer()
    pool = WorkerPool([CountingEngine(0, rows=3, gate=gate), CountingEngine(1)])
    pool.trainers = {1: trainer}
    return pool, trainer, gate


def test_a_window_says_that_its_worker_is_well(monkeypatch):
    """E3: whoever watches for processes that stand still hears of one that trains, however long it does."""
    monkeypatch.setattr(driver, "POLL_S", 0.001)
    pool, trainer, gate = training_pool()
    heard = []

    def on_progress(progress):
        if trainer.is_training.is_set() and threading.current_thread().name == "worker-1" and not trainer.ends:
            heard.append(progress.done)
            if len(heard) == 3:
                gate.set()

    assert len(pool.generate(make_requests(4), on_progress=on_progress, train=True)) == 12
    assert len(heard) >= 3 and trainer.windows == [1] and trainer.ends == [WindowEnd.STOPPED]


def test_a_failure_that_a_window_hears_of_is_not_the_trainers(monkeypatch):
    """E3, E6: what stops the job stops the window, and comes out as it is."""
    monkeypatch.setattr(driver, "POLL_S", 0.001)
    pool, trainer, gate = training_pool()

    def on_progress(_):
        if trainer.is_training.is_set():
            gate.set()
            raise ConnectionError("process 3 has not been heard of")

    with pytest.raises(ConnectionError, match="process 3 has not been heard of"):
        pool.generate(make_requests(4), on_progress=on_progress, train=True)
    assert trainer.ends == [WindowEnd.STOPPED] and not any(engine.has_work for engine in pool.engines)


def test_a_worker_that_trains_leaves_when_another_is_lost():
    """E6: between two steps, with the other's error."""
    pool, trainer, gate = training_pool()

    def lose():
        gate.wait(30)
        raise RuntimeError("lost device")

    pool.engines[0].step = lose
    pool.coordinator.on_change = changes_of([], lambda c: gate.set() if c[:2] == (1, "TRAINING") else None)
    with pytest.raises(RuntimeError, match="lost device"):
        pool.generate(make_requests(4), train=True)
    assert trainer.ends == [WindowEnd.STOPPED]


def test_time_spent_on_messages_by_value(monkeypatch):
    """A clock that only steps and calls of the store move on: 24 steps of 0.1 s, 0.3 ms a call."""
    now_s, calls = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])

    def slowed(call):
        def slow(*args):
            calls.append(call.__name__)
            now_s[0] += 3e-4
            return call(*args)

        return slow

    for name in ("set", "get", "list", "add", "delete"):
        monkeypatch.setattr(LocalStore, name, slowed(getattr(LocalStore, name)))
    engine = CountingEngine(0)
    step = engine.step

    def slow_step():
        now_s[0] += 0.1
        return step()

    engine.step = slow_step
    pool = WorkerPool([engine])
    assert len(pool.generate(make_requests(8))) == 24
    by_opening = 2  # the coordinator's, before the worker begins
    assert calls[:by_opening] == ["delete", "list"] and calls.count("add") == 9  # 8 groups, a promise
    assert pool.poll_s == pytest.approx(3e-4 * (len(calls) - by_opening))
    assert pool.driver_s == pytest.approx(24 * 0.1 + 3e-4 * len(calls))
    assert 0.0 < pool.poll_s / pool.driver_s < 0.01


def test_worker_metrics_by_value():
    before = dict.fromkeys(WorkerState, 1.0)
    after = {WorkerState.BUSY: 7.0, WorkerState.IDLE: 2.0, WorkerState.TRAINING: 4.0, WorkerState.LEARNING: 99.0}
    assert worker_metrics(before, after) == {
        "worker/busy_s": 6.0,
        "worker/idle_s": 1.0,
        "worker/training_s": 3.0,
        "worker/idle_frac": 0.4,
        "worker/idle_used_frac": 0.75,
    }


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


@pytest.mark.parametrize("fails", ["", "fails"])
def test_two_processes_share_a_rollout_and_its_failures(fails):
    """E1, E6: groups go to whoever is free, waiting requests change processes; a failure in one ends both."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    env = os.environ | {"PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.coordinator.engines", address]
    processes = [
        subprocess.Popen([*command, str(i), fails], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    said = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err[-2000:]
        said.append(json.loads(out.strip().splitlines()[-1]))
    if fails:
        assert said[0]["error"] == "RolloutError: rollout: worker 2: RuntimeError: lost device"
        assert said[1]["error"] == "RuntimeError: lost device"
        return
    ids = [[request_id for request_id, _ in rollout] for p in said for rollout in p["done"]]
    for first, second in zip(ids[:2], ids[2:], strict=True):  # two rollouts of two processes
        assert sorted(first + second) == sorted(r.request_id for r in make_requests(6))
    workers = {worker for p in said for rollout in p["done"] for _, worker in rollout}
    assert workers == {0, 1, 2}
    assert all(p["poll_s"] > 0.0 for p in said) and said[0]["seconds"]["BUSY"] > 0.0 == sum(said[1]["seconds"].values())
    assert len([c for c in said[0]["changes"] if c == [2, "LEARNING"]]) == 2  # the leader knows of all workers
