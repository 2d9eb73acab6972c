"""The pool: one score per row within the limit, whatever the verifiers do."""

import concurrent.futures
import os
import signal
import subprocess
import sys
import time

import pytest

from tlt_jax.rl import rewards

MODULE = """
import os, sys, time

def value(text, reference):
    return float(text)

def hang(text, reference):
    if text == "hang":
        time.sleep(1000)
    return float(text)

def meet(text, reference):
    folder, count = reference["folder"], reference["count"]
    open(os.path.join(folder, text), "w").close()
    while len(os.listdir(folder)) < count:
        time.sleep(0.01)
    return 1.0

def imported_jax(text, reference):
    return float("jax" in sys.modules)

def stop_the_worker(text, reference):
    if text == "stop":
        os.kill(os.getppid(), 19)
    return float(text)

def show_pids(text, reference):
    with open(text, "w") as file:
        file.write(f"{os.getpid()} {os.getppid()}")
    os.rename(text, text + ".done")
    time.sleep(1000)
"""


@pytest.fixture
def make_pool(tmp_path, monkeypatch):
    (tmp_path / "toy_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    pools = []

    def make(*names, **kwargs):
        kwargs = {"num_workers": 2, "timeout_s": 10.0, **kwargs}
        pools.append(rewards.RewardPool(rewards.RewardConfig(weights=dict.fromkeys(names, 1.0), **kwargs)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def make_items(texts, **reference):
    return [rewards.RewardItem(row_id=index, text=text, reference=reference) for index, text in enumerate(texts)]


def test_sleeping_verifiers_are_killed_and_the_pool_goes_on(make_pool):
    """G2: 3 of 8 rows hang: 8 scores, 3 time-outs, and the next batch works."""
    pool = make_pool("toy_rewards:hang", timeout_s=0.5)
    result = pool.score(make_items(["0", "hang", "2", "hang", "4", "hang", "6", "7"]))
    assert result.scores.tolist() == [0, 0, 2, 0, 4, 0, 6, 7]
    assert (result.timeouts, result.errors) == (3, 0)
    assert pool.score(make_items(["1", "2"])).scores.tolist() == [1, 2]


def test_a_stuck_worker_process_is_replaced(make_pool, monkeypatch):
    """G2: the pool does not rely on the worker's own clock."""
    monkeypatch.setattr(rewards, "_GRACE_S", 0.2)
    result = make_pool("toy_rewards:stop_the_worker", num_workers=1, timeout_s=0.5).score(make_items(["stop", "1"]))
    assert result.status == ("timeout", "ok")
    assert result.scores.tolist() == [0, 1]


def test_a_reference_must_be_json(make_pool):
    with pytest.raises(TypeError, match="set is not JSON serializable"):
        make_pool("toy_rewards:value").submit(make_items(["1"], bad={1}))


def test_one_score_per_row_in_its_place(make_pool):
    """G8: 5 rows, 2 of which cannot be read, give 5 scores; the errors are counted apart from wrong answers."""
    pool = make_pool("toy_rewards:value", failed_score=-1.0)
    result = pool.score(make_items(["1", "x", "3", "", "0"]))
    assert result.scores.tolist() == [1, -1, 3, -1, 0]
    assert result.status == ("ok", "error", "ok", "error", "ok")
    assert (result.errors, result.timeouts) == (2, 0)
    assert all("could not convert" in message for message in result.messages)
    assert pool.score([]).scores.shape == (0,)


def test_rows_are_scored_in_parallel(make_pool, tmp_path):
    """G11: each of 4 rows waits for the other 3, so they end only if all run at once; the time is logged."""
    folder = tmp_path / "met"
    folder.mkdir()
    result = make_pool("toy_rewards:meet", num_workers=4).score(make_items("abcd", folder=str(folder), count=4))
    assert result.scores.tolist() == [1, 1, 1, 1]
    assert result.seconds > 0


def test_scoring_from_threads_and_overlapping_batches(make_pool):
    """G1: batches from several threads keep apart, with math-verify in the workers."""
    pool = make_pool("math")
    items = [
        rewards.RewardItem(row_id=0, text=rf"\boxed{{{n}}}", reference={"answer": "3", "format": "boxed"})
        for n in (3, 4)
    ]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: pool.score(items), range(4)))
    assert [result.scores.tolist() for result in results] == [[1.0, 0.0]] * 4
    assert sum(result.errors for result in results) == 0


def test_submit_returns_before_the_scores(make_pool, tmp_path):
    folder = tmp_path / "met"
    folder.mkdir()
    future = make_pool("toy_rewards:meet").submit(make_items("a", folder=str(folder), count=2))
    assert not future.done()
    (folder / "other").touch()
    assert future.result().scores.tolist() == [1.0]


def test_workers_import_no_jax(make_pool):
    assert make_pool("toy_rewards:imported_jax").score(make_items(["x"])).scores.tolist() == [0.0]


def test_a_worker_that_cannot_start_is_not_a_wrong_answer(make_pool, tmp_path):
    """G1: a broken reward stops the run with its own error."""
    (tmp_path / "broken_reward.py").write_text("import no_such_library\n")
    with pytest.raises(rewards.RewardWorkerError, match="no_such_library"):
        make_pool("broken_reward:f").score(make_items(["x"]))


def test_closing_ends_the_processes_and_refuses_more(make_pool, tmp_path):
    pool = make_pool("toy_rewards:show_pids", timeout_s=0.5)
    pool.score(make_items([str(tmp_path / "pids")]))
    pool.close()
    pool.close()
    _await_death((tmp_path / "pids.done").read_text().split())
    with pytest.raises(ValueError, match="closed"):
        pool.submit(make_items(["1"]))


SCRIPT = """
import sys
from tlt_jax.rl import rewards
config = rewards.RewardConfig(weights={"toy_rewards:show_pids": 1.0}, num_workers=1, timeout_s=500.0)
rewards.RewardPool(config).score([rewards.RewardItem(row_id=0, text=sys.argv[1], reference={})])
"""


def test_a_killed_run_leaves_no_process_behind(make_pool, tmp_path):
    make_pool("toy_rewards:value")  # puts the module in place
    pids = tmp_path / "pids"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    run = subprocess.Popen([sys.executable, "-c", SCRIPT, str(pids)], env=environment)
    while not (tmp_path / "pids.done").exists():
        assert run.poll() is None
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    run.wait()
    _await_death((tmp_path / "pids.done").read_text().split())


def _await_death(pids):
    deadline_s = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline_s, f"still there: {pids}"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"weights": {}}, "reward.weights: got none"),
        ({"weights": {"maths": 1.0}}, "'maths'"),
        ({"timeout_s": 0.0}, "reward.timeout_s: got 0.0"),
        ({"num_workers": -1}, "reward.num_workers"),
        ({"memory_mb": -1}, "reward.memory_mb"),
        ({"sandbox": "yes"}, "reward.sandbox: got 'yes'"),
    ],
)
def test_bad_config(fields, words):
    with pytest.raises(ValueError, match=words):
        rewards.RewardConfig(**fields)
