"""A run whose idle worker trains the drafter: same tokens and rewards, everything accounted for, exact resume."""

import collections
import itertools
import json
import threading
import time

import jax
import numpy as np
import pytest

from tests import tiny_model
from tests.tiny_model import LocalRewards, make_loop, read_metrics, read_rollouts, run_loop, sections
from tlt_jax.metrics import read_jsonl

COLUMNS = ("prompt_id", "request_id", "policy_version", "response_len", "reward", "advantage", "text")


def digits(text, reference=None):
    return sum(c.isdigit() for c in text) / max(len(text), 1)


def rows(workdir):
    return {step: [[row[c] for c in COLUMNS] for row in table] for step, table in read_rollouts(workdir).items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The configuration, two workers, and the rows of two steps without a drafter."""
    root = tiny_model.make_files(tmp_path_factory.mktemp("tiny"))
    config = sections(root, rl={"num_steps": 2}, rollout={"num_workers": 2, "max_live": 4})
    workdir = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        run_loop(config, workdir, LocalRewards(digits))
        yield config, rows(workdir)


def with_tlt(config, **coordinator):
    return config | {
        "drafter": {
            "enabled": True,
            "loss": {"num_steps": 1},
            "optim": {"learning_rate": 1e-2},
            "batch": {"row_len": 64, "context_len": 8, "num_rows": 2},
        },
        "bandit": {"arms": "1: chain_2"},
        "coordinator": {"held_out_frac": 0.0, "eval_every": 2, "checkpoint_every_s": 0.05} | coordinator,
    }


def hold_up(loop, num_steps=3):
    """Makes worker 0 wait in each rollout until worker 1 has trained so many steps, or has failed to."""
    slow, spot = loop.workers.engines[0], loop.online.spots[1]
    step, begin, trained = slow.step, slow.begin, threading.Event()
    train_step = spot._step

    def count(window, *args):
        train_step(window, *args)
        if window.num_steps >= num_steps:
            trained.set()

    def begin_waiting(*args, **kwargs):
        trained.clear()
        begin(*args, **kwargs)

    def wait():
        deadline_s = time.perf_counter() + 60
        while not trained.wait(0.01) and spot.num_failures == 0 and time.perf_counter() < deadline_s:
            pass
        return step()

    spot._step, slow.begin, slow.step = count, begin_waiting, wait


def test_idle_time_trains_the_drafter_and_changes_no_token(plain, tmp_path):
    """F8, F10, C14: with TLT on and off tokens, rewards and lengths are equal; a resumed run has the same drafter;
    every merge is a version, which the engines have next.

    The parts of a step are its time, the timeline has every change, and the target's weights come from the learner.
    """
    config, expected = plain
    loop = make_loop(with_tlt(config), tmp_path, LocalRewards(digits))
    hold_up(loop)
    loop.run()
    loop.close()
    assert rows(tmp_path) == expected
    metrics = read_metrics(tmp_path)
    for i, row in enumerate(metrics, 1):
        assert (row["step"], row["drafter/version"], row["drafter/failures"]) == (i, i, 0)
        assert row["drafter/train_steps"] >= 3 and row["drafter/tokens"] > 0 and row["drafter/windows"] >= 1
        assert 0.0 < row["worker/idle_used_frac"] <= 1.0 and 0.0 < row["worker/idle_frac"] < 1.0
        assert 0.0 < row["worker/poll_frac"] < 1.0
        parts = {k: v for k, v in row.items() if k.startswith("time/") and k != "time/step_s"}
        assert min(parts.values()) >= 0.0 and sum(parts.values()) == pytest.approx(row["time/step_s"])
    check_timeline(tmp_path, loop)
    check_times(tmp_path)
    windows = [json.loads(line) for line in (tmp_path / "drafter" / "windows_0.jsonl").read_text().splitlines()]
    assert {w["step"] for w in windows} == {1, 2} and sum(w["num_steps"] for w in windows) == sum(
        row["drafter/train_steps"] for row in metrics
    )
    assert (tmp_path / "drafter" / "worker_1.safetensors").exists()
    for engine in loop.workers.engines:
        assert engine._rounds.drafter.version == 2
        got, want = (params["embed"]["weight"] for params in (engine.weights.params, loop.state.params))
        np.testing.assert_array_equal(got, want)  # the head too: no drafter update has touched it
    again = make_loop(with_tlt(config), tmp_path, LocalRewards(digits))
    assert again.first_step == 3 and again.online.version == 2
    for a, b in zip(
        jax.tree.leaves(again.online.spots[0].state), jax.tree.leaves(loop.online.spots[1].state), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    kept, found = (x.online.data.train for x in (loop, again))
    assert [t.request_id for t in found.traces] == [t.request_id for t in kept.traces] and found.step == 3
    assert {t.step for t in found.traces} == {2}  # the long responses of the last step
    np.testing.assert_array_equal(found.traces[0].features, kept.traces[0].features)
    again.close()


def test_without_the_file_of_its_data_a_run_goes_on_with_none(plain, tmp_path):
    config, expected = plain
    config = with_tlt(config)
    loop = make_loop(config | {"rl": config["rl"] | {"num_steps": 1}}, tmp_path, LocalRewards(digits))
    loop.run()
    loop.close()
    for path in (tmp_path / "drafter").glob("data_*"):
        path.unlink()
    again = make_loop(config, tmp_path, LocalRewards(digits))
    assert (again.first_step, len(again.online.data.train)) == (2, 0)
    again.run()
    again.close()
    assert rows(tmp_path) == expected


def check_timeline(workdir, loop):
    """Training lies between a worker's own end of decoding and the end of the rollout; windows have numbers."""
    timeline = read_jsonl(workdir / "timeline.jsonl")
    trained = [r for r in timeline if r["state"] == "TRAINING"]
    assert len({r["window_id"] for r in trained}) == len(trained) >= 2 and {r["step"] for r in trained} == {1, 2}
    for worker in (0, 1):
        mine = [r["state"] for r in timeline if r["worker"] == worker]
        for before, state, after in zip(mine, mine[1:], mine[2:], strict=False):
            assert state != "TRAINING" or (before, after) == ("IDLE", "IDLE")
    assert all((r["window_id"] is None) == (r["state"] != "TRAINING") for r in timeline)


def check_times(workdir):
    """H7: the timeline says what the metrics say, and leaves no second of a worker out."""
    timeline, metrics = read_jsonl(workdir / "timeline.jsonl"), read_metrics(workdir)
    spent, begun = collections.Counter(), {}
    for worker in (0, 1):
        mine = [r for r in timeline if r["worker"] == worker]
        begun |= {(worker, r["step"]): r["t_s"] for r in reversed(mine) if r["state"] == "BUSY"}
        for row, after in itertools.pairwise(mine):
            spent[row["step"], row["state"]] += after["t_s"] - row["t_s"]
    for row in metrics:
        for state in ("busy", "idle", "training"):
            assert spent[row["step"], state.upper()] == pytest.approx(row[f"worker/{state}_s"], abs=1e-3)
        assert row["worker/busy_s"] + row["worker/idle_s"] + row["worker/training_s"] <= 2 * row["time/rollout_s"]
    before_rollout_s = sum(row["time/other_s"] for row in metrics)
    for worker in (0, 1):  # from one rollout's beginning to the next one's: a step
        step_s = begun[worker, 2] - begun[worker, 1]
        assert step_s == pytest.approx(metrics[0]["time/step_s"], rel=0.02, abs=before_rollout_s + 0.05)


@pytest.mark.slow
def test_a_failure_of_training_stops_no_step(plain, tmp_path):
    """It is counted, and the run goes on with the drafter that it had."""
    config, expected = plain
    loop = make_loop(with_tlt(config), tmp_path, LocalRewards(digits))
    hold_up(loop)

    def fail(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    for spot in loop.online.spots:
        spot.trainer = spot.trainer._replace(step=fail)
        spot.warm_up = lambda batch: None
    loop.run()
    loop.close()
    assert rows(tmp_path) == expected
    assert all(row["drafter/failures"] >= 1 and row["drafter/version"] == 0 for row in read_metrics(tmp_path))


@pytest.mark.slow
def test_tlt_may_be_switched_off(plain, tmp_path):
    """`coordinator.train = False`: a drafter that stays as it is; `drafter.enabled = False`: none."""
    config, expected = plain
    loop = make_loop(with_tlt(config, train=False), tmp_path, LocalRewards(digits))
    assert loop.online is None and loop.workers.trainers == {}
    loop.run()
    loop.close()
    assert rows(tmp_path) == expected
    assert "TRAINING" not in {r["state"] for r in read_jsonl(tmp_path / "timeline.jsonl")}
    assert {row["worker/idle_used_frac"] for row in read_metrics(tmp_path)} == {0.0}
