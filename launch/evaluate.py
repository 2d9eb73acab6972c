"""Held-out evaluation: `python -m launch.evaluate --config=configs/X.py [--checkpoint=DIR]`.

`--checkpoint` is the workdir of a run (its newest checkpoint; `--step` picks another) or a Hugging Face directory;
without it the model of the config is evaluated. The held-out prompts and the reward are those of the config; `eval.*`
says how many samples per prompt, at which temperature. Prints mean@k, pass@1 and pass@k.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sys
import time
from typing import Any

from absl import flags

from launch import cli, setup
from launch.config import ConfigError
from launch.progress import TerminalReporter
from launch.run_config import RunConfig
from tlt_jax.checkpoint import CheckpointStore
from tlt_jax.coordinator.runtime import WorkerPool
from tlt_jax.rl.evaluate import evaluate

_CHECKPOINT = flags.DEFINE_string("checkpoint", "", "Workdir of a run, or a Hugging Face directory.")
_STEP = flags.DEFINE_integer("step", None, "RL step of the checkpoint; default the newest.")


def main() -> dict[str, Any]:
    run = cli.read_run_config()
    with cli.checking_input():
        path = pathlib.Path(_CHECKPOINT.value) if _CHECKPOINT.value else None
        if path is not None and not path.is_dir():
            raise ConfigError(f"--checkpoint: got {path}, which is no directory; expected a workdir or a model")
        if path is not None and (path / "config.json").exists() and not (path / "checkpoints").is_dir():
            run = dataclasses.replace(run, model=dataclasses.replace(run.model, path=str(path)))
            path = None
        inputs = setup.read_inputs(run)
        task = setup.load_task(run, inputs)
        prompts = task.eval_prompts()
        if not prompts:
            raise ConfigError("task.eval_size: got 0 held-out prompts, expected some; set task.eval_size or eval_path")
        rewards = setup.make_reward_pool(run)
        workers = setup.make_workers(run, inputs)
        setup.check_requests(run, task, workers)
        step = 0
        if path is None:
            if _STEP.value is not None:
                raise ConfigError(f"--step: got {_STEP.value} without the workdir of a run in --checkpoint")
            setup.load_rollout_weights(run, inputs, workers)
        else:
            step = _load_checkpoint(run, inputs, workers, path)
    start_s = time.perf_counter()
    reporter = TerminalReporter(1, len(prompts) * run.eval.num_samples, sys.stderr.isatty())
    with rewards:
        reporter.phase(step, "eval")
        _, metrics = evaluate(workers, rewards, prompts, run.sampling, run.eval, inputs.decode_text, reporter.progress)
    reporter.close()
    return {"step": step, "k": run.eval.num_samples, "seconds": time.perf_counter() - start_s} | metrics


def _load_checkpoint(run: RunConfig, inputs: setup.Inputs, workers: WorkerPool, workdir: pathlib.Path) -> int:
    """Weights of the checkpoint into the workers; returns its step."""
    store = CheckpointStore(workdir / "checkpoints", run.checkpoint, read_only=True)
    with contextlib.closing(store):
        step = store.latest_step() if _STEP.value is None else _STEP.value
        if step is None:
            raise ConfigError(f"--checkpoint: {workdir} holds no complete checkpoint; expected the workdir of a run")
        target = setup.policy_shapes(run, inputs)
        params = store.restore_part("learner", {"params": target}, step=step)["params"]
    workers.load(setup.make_publish(run, inputs, workers)(params, step))
    if inputs.drafting is not None:
        inputs.drafting.load_into(workers)
    return step


if __name__ == "__main__":
    cli.run(main)
