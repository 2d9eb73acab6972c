"""Jobs of several real processes: how they begin, how they fail, and that they train as one process does."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from launch.config import ConfigError
from launch.job import Place, find_place
from tests import tiny_model
from tests.tiny_model import LocalRewards, make_loop, read_metrics, read_rollouts, sections, write_config
from tlt_jax.metrics import read_jsonl
from tlt_jax.processes import DistributedConfig

ROOT = pathlib.Path(__file__).parents[2]
CLUSTER = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}


def test_a_process_finds_its_place():
    alone, whole = DistributedConfig(), Place(coordinator_address="10.0.0.1:1234", num_processes=4, process_id=3)
    assert find_place(alone, {}) is None
    assert find_place(alone, CLUSTER | {"JAX_NUM_PROCESSES": "1"}) is None
    assert find_place(alone, CLUSTER) == whole and whole.is_whole
    config = DistributedConfig(coordinator_address="10.0.0.1:1234", num_processes=4, process_id=3)
    assert find_place(config, {}) == whole
    place = find_place(DistributedConfig(process_id=0), CLUSTER)
    assert place is not None and place.process_id == 0


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_a_launcher_that_jax_knows_fills_in_the_rest(name):
    place = find_place(DistributedConfig(), {name: "2"})
    assert place is not None and not place.is_whole and place.process_id is None
    assert find_place(DistributedConfig(), {name: "1"}) is None


def test_half_a_place_is_refused():
    with pytest.raises(ConfigError, match=r"num_processes=4, process_id=None, expected all three or none; set them in"):
        find_place(DistributedConfig(), {k: v for k, v in CLUSTER.items() if k != "JAX_PROCESS_ID"})
    with pytest.raises(ConfigError, match="JAX_PROCESS_ID: got 'one' in the environment, expected a whole number"):
        find_place(DistributedConfig(), CLUSTER | {"JAX_PROCESS_ID": "one"})


# Real processes


def start(root, *command, **env):
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{root}", "XLA_FLAGS": tiny_model.ONE_DEVICE} | env
    cluster = [sys.executable, "-m", "launch.local_cluster", "--processes=2", "--grace_s=5", "--", sys.executable]
    cluster += map(str, command)
    return subprocess.Popen(cluster, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


PROGRAM = """
import os, signal, time
from absl import logging
from launch import job
from tlt_jax.processes import DistributedConfig
logging.use_absl_handler()
with job.joined(DistributedConfig(stall_timeout_s={stall_s}, heartbeat_timeout_s=3)) as group:
    import jax, numpy as np
    from jax.experimental import multihost_utils
    multihost_utils.sync_global_devices("start")
    group.enter("step 1, rollout")
    if group.index == 1:
        {failure}
    group.enter("step 1, update")
    multihost_utils.sync_global_devices("update")  # process 0 waits here for ever
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "stall_s", "words"),
    [
        ("raise ValueError('boom')", 60.0, ") failed in step 1, rollout: ValueError: boom"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", 60.0, ") has not been heard of for"),
        ("time.sleep(600)", 3.0, ") in step 1, rollout"),
    ],
)
def test_no_process_waits_for_ever(tmp_path, failure, stall_s, words):
    """E3, E5, E6: a process that raises, freezes or sleeps ends the job, and the others name it and its phase."""
    start_s = time.monotonic()
    process = start(tmp_path, "-c", PROGRAM.format(failure=failure, stall_s=stall_s))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "done" not in out and time.monotonic() - start_s < 60.0
    mine = [line for line in err.splitlines() if line.startswith("[0] ") and "process 1 (" in line]
    assert any(words in line for line in mine), err


@pytest.mark.slow
def test_a_job_that_goes_well_ends_well(tmp_path):
    """E6: both processes end with 0."""
    process = start(tmp_path, "-c", PROGRAM.format(failure="pass", stall_s=60.0))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert sorted(line for line in out.splitlines() if "Gloo" not in line) == ["[0] done", "[1] done"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tiny_model.make_files(tmp_path_factory.mktemp("tiny"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        yield root


def find_process(cluster, index):
    """The job's process of this index, and all that it started."""
    for process in psutil.Process(cluster.pid).children():
        if process.environ().get("JAX_PROCESS_ID") == str(index):
            return [process, *process.children(recursive=True)]
    raise AssertionError(f"no process {index}")


def learnt(workdir):
    return {
        step: [
            (r["prompt_id"], r["request_id"], r["text"], r["reward"], r["advantage"], r["finish_reason"]) for r in table
        ]
        for step, table in read_rollouts(workdir).items()
    }


@pytest.mark.slow
def test_two_processes_train_as_one_and_go_on_after_a_kill(root, tmp_path):
    """C3, E1, E2, E4: two processes, one of them killed and the job restarted == one process."""
    config = sections(root, rl={"num_steps": 2, "prompts_per_step": 3}, eval={"every": 2}, mesh={"fsdp": -1})
    path = write_config(tmp_path / "tiny.py", config)
    command = ("-m", "launch.train", f"--config={path}", f"--workdir={tmp_path / 'two'}")
    cluster = start(root, *command)
    metrics = tmp_path / "two" / "metrics.jsonl"
    while not metrics.exists() or '{"step": 1,' not in metrics.read_text():
        assert cluster.poll() is None, cluster.communicate()
        time.sleep(0.02)
    below = find_process(cluster, 0) + (victim := find_process(cluster, 1))
    victim[0].send_signal(signal.SIGKILL)
    _, err = cluster.communicate(timeout=60)
    assert cluster.returncode == 128 + signal.SIGKILL
    assert "local_cluster: process 1 was killed by SIGKILL in step" in err and "ending the other 1" in err
    assert psutil.wait_procs(below, timeout=30)[1] == []

    out, err = (cluster := start(root, *command)).communicate(timeout=240)
    assert cluster.returncode == 0, err
    assert out.splitlines()[-1].startswith('{"workdir": ') and "step 2/2" in out
    assert [row["step"] for row in read_metrics(tmp_path / "two")] == [0, 1, 2]
    workers = {r["worker"] for table in read_rollouts(tmp_path / "two").values() for r in table}
    assert workers == {0, 1}

    # That one process with several workers does the same is tested with the loop.
    rewards = LocalRewards(lambda text, _: sum(c.isdigit() for c in text) / max(len(text), 1))
    loop = make_loop(config, tmp_path / "one", rewards)
    loop.run()
    loop.close()
    assert learnt(tmp_path / "one") == learnt(tmp_path / "two")
    layout = {"rl/micro_batches", "rl/pad_frac"}  # rows are dealt out to the shards
    for ours, theirs in zip(read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two"), strict=True):
        names = {name for name in ours if name.startswith(("rl/", "eval/"))} - layout
        assert len(names) > 4
        for name in names:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-5, err_msg=name)


TLT = """
import os, runpy, time
from tlt_jax.rollout.engine import RolloutEngine
step = RolloutEngine.step

def slow_step(self):
    time.sleep(0.5)
    return step(self)

if os.environ["JAX_PROCESS_ID"] == "0":  # so that the other one runs dry first, and trains
    RolloutEngine.step = slow_step
runpy.run_module("launch.train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_process_that_has_run_dry_trains_the_drafter_and_changes_no_token(root, tmp_path):
    """F10, E1, E2, E4: tokens and rewards of one process without a drafter; both enter every merge, whatever they did.

    What the drafter trains on next lies beside the checkpoints, a file of each process.
    """
    config = sections(root, rl={"num_steps": 2}, mesh={"fsdp": -1})
    rewards = LocalRewards(lambda text, _: sum(c.isdigit() for c in text) / max(len(text), 1))
    loop = make_loop(config, tmp_path / "plain", rewards)
    loop.run()
    loop.close()
    tlt = {
        "drafter": {
            "enabled": True,
            "loss": {"num_steps": 1},
            "batch": {"row_len": 64, "context_len": 8, "num_rows": 2},
        },
        "bandit": {"arms": "1: chain_2"},
        "coordinator": {"held_out_frac": 0.0, "eval_every": 2},
    }
    path, workdir = write_config(tmp_path / "tlt.py", config | tlt), tmp_path / "tlt"
    cluster = start(root, "-c", TLT, f"--config={path}", f"--workdir={workdir}")
    _, err = cluster.communicate(timeout=240)
    assert cluster.returncode == 0, err
    assert learnt(workdir) == learnt(tmp_path / "plain")
    assert {r["worker"] for table in read_rollouts(workdir).values() for r in table} == {0, 1}
    for i, row in enumerate(read_metrics(workdir), 1):
        assert (row["step"], row["drafter/version"], row["drafter/failures"]) == (i, i, 0)
        assert row["drafter/train_steps"] > 0 and row["drafter/tokens"] > 0 and row["worker/training_s"] > 0.0
        assert 1.0 <= row["spec/accept_len"] <= 3.0 and row["spec/drafted"] > 0  # chains of two
        assert 0.0 < row["worker/poll_frac"] < 1.0
    trained = [r for r in read_jsonl(workdir / "timeline.jsonl") if r["state"] == "TRAINING"]
    assert 1 in {r["worker"] for r in trained} and {r["step"] for r in trained} == {1, 2}
    names = sorted(path.name for path in (workdir / "drafter").glob("data_*"))
    assert names == [f"data_{i}_0000000{step}.safetensors" for i in (0, 1) for step in (1, 2)]
