"""The training command: what it refuses, how it stops, and that it goes on where it was."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from launch import train
from launch.config import to_json
from launch.run_config import make_run_config
from tests import tiny_model
from tests.tiny_model import LocalRewards, make_loop, read_metrics, read_rollouts, run_command, sections, write_config
from tlt_jax.rl import sandbox
from tlt_jax.rl.rewards import RewardConfig, RewardPool

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tiny_model.make_files(tmp_path_factory.mktemp("tiny"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        yield root


@pytest.fixture
def refused(root, tmp_path, capfd, monkeypatch):
    """Runs the command on a changed configuration; gives the message of exit code 2, which comes before any step."""
    tiny_model.share_programs(monkeypatch)

    def run(*argv, **changes):
        path = write_config(tmp_path / "tiny.py", sections(root, **changes))
        code, out, err = run_command(capfd, train.main, f"--config={path}", f"--workdir={tmp_path / 'run'}", *argv)
        assert (code, out) == (2, "") and "Traceback" not in err
        assert not (tmp_path / "run" / "metrics.jsonl").exists()
        return err

    return run


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config.rollout.temprature=0.5"], "config.rollout.temprature: unknown key; did you mean config.rollout.te"),
        (["--config.rl.group_size=four"], "config.rl.group_size: got 'four', expected int"),
        (["--config.rl.group_size=4.5"], "config.rl.group_size: got 4.5 (float), expected int"),
        (["--config.rl.num_minibatches=3"], "2 prompts x 4 responses = 8 rows for 3 minibatches, expected a multiple"),
        (["--config.rollout.top_p=0.9"], "expected top_k=0, top_p=1, min_p=0 for training"),
        (["--config.rollout.max_tokens=40"], "task.max_prompt_tokens 32 + rollout.max_tokens 40 = 72 tokens, expected"),
        (["--config.eval.max_tokens=40"], "task.max_prompt_tokens 32 + eval.max_tokens 40 = 72 tokens, expected"),
        (["--config.task.max_prompt_tokens=3"], "longer than max_prompt_tokens=3); expected at least 1"),
        (["--config.rollout.stop_token_ids=(5,6,7,8,9,10,11)"], "got 9 stop ids, expected at most 8"),
        (["--config.rollout.num_workers=0"], "rollout.num_workers: got 0, expected >= 1"),
        (["--config.mesh.data=3"], "mesh: got data=3, fsdp=1, tensor=1 for 1 devices"),
        (["--config.model.path=nowhere"], "nowhere"),
        (["--config.reward.weights.vibes=1.0"], "reward: got 'vibes', expected one of"),
        (["--steps=3"], "Unknown command line flag 'steps'"),
        (["leftover"], "got stray arguments ['leftover'], expected flags"),
        (["--config=nowhere.py"], "got 'nowhere.py', expected a Python file"),
    ],
)
def test_bad_configuration_is_refused(refused, argv, message):
    """H1, B2: exit code 2 with got, expected and remedy, before anything compiles."""
    assert message in refused(*argv)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "1", "answer": "1"}', "{'prompt'}"], "bad.jsonl:2: not a JSON object"),
        (['{"prompt": "1", "answer": "1"}', "", '{"prompt": " ", "answer": "1"}'], "bad.jsonl:3: empty prompt"),
        (['{"question": "1", "answer": "1"}'], "bad.jsonl:1: no field 'prompt'"),
        ([], "no training prompt left of 0"),
    ],
)
def test_a_bad_prompts_file_is_refused_with_its_line(refused, tmp_path, lines, message):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines))
    assert message in refused(f"--config.task.path={path}", "--config.task.eval_size=0")


def test_a_model_without_a_shard_is_refused(refused, tmp_path):
    """D11: the missing tensors are named."""
    tiny_model.write_model(tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").unlink()
    assert "safetensors" in refused(f"--config.model.path={tmp_path / 'broken'}")


def test_a_workdir_of_another_configuration_is_refused(refused, root, tmp_path):
    """H8: each differing key with both values; --fresh refuses a workdir with a run in it."""
    (tmp_path / "run").mkdir()
    resolved = to_json(make_run_config(sections(root)))
    (tmp_path / "run" / "config.json").write_text(json.dumps(resolved))
    message = refused("--config.rl.learning_rate=0.5")
    assert "holds a run of another configuration" in message
    assert "optimizer.learning_rate: the run has 0.001, now 0.5" in message
    assert "expected a new one; name another --workdir" in refused("--fresh")


def failed(loop, caplog):
    """Runs a loop that is to fail; the last words, after exit code 1."""
    with pytest.raises(SystemExit) as exit_:
        train.run_to_end(loop)
    assert exit_.value.code == 1
    return caplog.text


def test_a_checkpoint_that_cannot_be_written_ends_the_run(root, tmp_path, caplog):
    """C2: exit code 1 with the step and where the run goes on."""
    loop = make_loop(sections(root), tmp_path, LocalRewards(lambda *_: 1.0))
    save = loop.store.save

    def save_or_fail(step, *args, **kwargs):
        if step == 2:
            loop.store.wait()
            for path in (tmp_path / "checkpoints").iterdir():
                path.rename(tmp_path / path.name)
            (tmp_path / "checkpoints").rmdir()
            (tmp_path / "checkpoints").write_text("in the way")
        save(step, *args, **kwargs)

    loop.store.save = save_or_fail
    message = failed(loop, caplog)
    assert "step 2 failed: CheckpointError: the checkpoint of step 2 could not be written" in message
    assert "the same command resumes from step 1" in message


def test_rewards_that_cannot_start_end_the_run(root, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sandbox, "worker_command", lambda *_: ["/nonexistent/python"])
    with RewardPool(RewardConfig(weights={"tiny_rewards:digits": 1.0}, num_workers=1)) as rewards:
        message = failed(make_loop(sections(root), tmp_path, rewards), caplog)
    assert "step 1 failed: RewardWorkerError: a reward process did not start" in message
    assert "the same command starts from the beginning: there is no checkpoint yet" in message


def test_a_full_disk_ends_the_run(root, tmp_path, caplog):
    loop = make_loop(sections(root), tmp_path, LocalRewards(lambda *_: 1.0))

    def full(*_):
        raise OSError(28, "No space left on device")

    loop.rollouts.write = full
    assert "step 1 failed: OSError: [Errno 28] No space left on device" in failed(loop, caplog)


def test_an_interrupt_ends_the_run_after_the_checkpoint_in_flight(root, tmp_path, caplog):
    """C2: Ctrl-C in step 2 says so; the checkpoint of step 1 is complete."""
    loop = make_loop(sections(root), tmp_path, LocalRewards(lambda *_: 1.0))

    def progress(_):
        if loop.step == 2:
            raise KeyboardInterrupt

    loop.reporter.progress = progress
    message = failed(loop, caplog)
    assert "step 2 stopped; the same command resumes from step 1" in message
    assert not any(engine.has_work for engine in loop.workers.engines)
    assert loop.reporter.phases[-1] == (0, "closed")


# Subprocesses


def start(root, workdir, config, *argv):
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{root}", "XLA_FLAGS": tiny_model.ONE_DEVICE}
    env["JAX_COMPILATION_CACHE_DIR"] = str(root / "xla")
    command = [sys.executable, "-m", "launch.train", f"--config={config}", f"--workdir={workdir}", *argv]
    return subprocess.Popen(
        command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process):
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1]), out, err


def stop_after(process, workdir, step, signal_number):
    """Sends a signal once the metrics of `step` are written; returns stderr and the processes that were below."""
    path = workdir / "metrics.jsonl"
    while not path.exists() or f'{{"step": {step},' not in path.read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal_number)
    _, err = process.communicate(timeout=300)
    return err, below


def assert_gone(processes):
    gone, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == [] and len(gone) == len(processes) > 0


@pytest.mark.slow
def test_killed_and_stopped_runs_end_as_the_uninterrupted_one(root, tmp_path):
    """C3, C5, C7, C10, C11, C13, H5, H7, H8: SIGKILL, then SIGTERM, then to the end == one run; nothing left behind."""
    # Plain decoding alone: which other strategies are played, and so which programs are needed, depends on the clock.
    changes = {"eval": {"every": 2}, "bandit": {"arms": "1: plain"}}
    config = write_config(tmp_path / "tiny.py", sections(root, **changes))
    result, out, _ = finish(start(root, tmp_path / "whole", config, f"--json={tmp_path / 'result.json'}"))
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert result["steps"] == 4 and [f"step {i}/4 " in out for i in range(6)] == [False, True, True, True, True, False]
    num_cached = len(list((root / "xla").iterdir()))

    process = start(root, tmp_path / "cut", config)
    _, below = stop_after(process, tmp_path / "cut", 2, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert_gone(below)
    process = start(root, tmp_path / "cut", config)
    err, below = stop_after(process, tmp_path / "cut", 3, signal.SIGTERM)
    assert (process.returncode, "Traceback" in err) == (1, False)
    assert "stopped; the same command resumes from step" in err and "restored step" in err
    assert_gone(below)
    _, _, err = finish(start(root, tmp_path / "cut", config))
    assert "restored step 3" in err or "restored step 4" in err

    assert [row["step"] for row in read_metrics(tmp_path / "cut")] == [0, 1, 2, 3, 4]
    whole, cut = (
        {
            step: [(r["prompt_id"], r["request_id"], r["text"], r["reward"], r["advantage"]) for r in table]
            for step, table in read_rollouts(tmp_path / name).items()
        }
        for name in ("whole", "cut")
    )
    assert cut == whole and sorted(whole) == [1, 2, 3, 4]
    ours, theirs = read_metrics(tmp_path / "cut")[4], read_metrics(tmp_path / "whole")[4]
    same = [k for k in theirs if k.startswith(("rl/", "eval/"))]
    assert {k: ours[k] for k in same} == {k: theirs[k] for k in same} and len(same) > 20
    # H5: the later processes compiled nothing: all programs were on disk.
    assert len(list((root / "xla").iterdir())) == num_cached
    assert ours["compile/cached"] == ours["compile/count"]
