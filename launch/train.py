"""Trains a policy: `python -m launch.train --config=configs/X.py [--workdir=DIR] [--config.rl.learning_rate=1e-6 ...]`.

A workdir that holds a run of the same configuration is resumed from its newest checkpoint; `--fresh` insists on a new
one.

Exit codes: 0 done; 1 the run failed (the message says where to resume); 2 bad configuration or input.
"""

from __future__ import annotations

import pathlib
import sys
import time
from typing import Any

from absl import flags, logging

from launch import cli, setup
from launch.config import CONFIG, prepare_workdir, to_json
from launch.progress import TerminalReporter
from launch.run_config import MAY_CHANGE, RunConfig
from tlt_jax.checkpoint import CheckpointError, CheckpointStore, Restored
from tlt_jax.metrics import MetricsWriter, RolloutWriter, TimelineWriter
from tlt_jax.rl.loop import TrainLoop
from tlt_jax.rl.update import make_learner

_WORKDIR = flags.DEFINE_string("workdir", "", "Directory of the run; default runs/<config name>.")
_FRESH = flags.DEFINE_bool("fresh", False, "Insist on a new workdir.")
_PROGRESS = flags.DEFINE_bool("progress", sys.stderr.isatty(), "Show progress bars.")


def main() -> dict[str, Any] | None:
    run = cli.read_run_config()
    workdir = pathlib.Path(_WORKDIR.value or f"runs/{pathlib.Path(CONFIG.value or '').stem}")
    start_s = time.perf_counter()
    with cli.checking_input():
        inputs = setup.read_inputs(run)
        task = setup.load_task(run, inputs)
        rewards = setup.make_reward_pool(run)
        prepare_workdir(workdir, to_json(run), fresh=_FRESH.value, may_change=MAY_CHANGE)
        store = CheckpointStore(workdir / "checkpoints", run.checkpoint)
        loop = make_loop(run, inputs, task, rewards, store, workdir)
    logging.info("ready after %.1f s; workdir %s", time.perf_counter() - start_s, workdir)
    with rewards:
        try:
            metrics = loop.run()
            store.close()
        except (CheckpointError, FloatingPointError, MemoryError) as error:
            logging.error("step failed: %s; run the same command again to resume from %s", error, store.latest_step())
            sys.exit(cli.EXIT_FAILED)
    loop.close()
    return {"workdir": str(workdir), "steps": run.loop.num_steps, "seconds": time.perf_counter() - start_s} | metrics


def make_loop(run: RunConfig, inputs, task, rewards, store: CheckpointStore, workdir: pathlib.Path) -> TrainLoop:
    """All parts of the run: the policy from the newest checkpoint if there is one, else from the model directory."""
    if task.num_dropped_prompts:
        logging.warning(
            "%d prompts are longer than task.max_prompt_tokens %d and were dropped",
            task.num_dropped_prompts,
            run.task.max_prompt_tokens,
        )
    policy = setup.make_policy(run, inputs)
    learner = make_learner(inputs.model, run.algorithm, run.optimizer, run.learner, policy.mesh)
    prompts = task.train_iterator(run.loop.prompts_per_step, run.loop.seed)
    restored = store.restore({"learner": learner.steps.state_shapes, "data": None})
    reference = policy.load() if restored is None or run.algorithm.needs_reference else None
    if restored is None:
        assert reference is not None
        state = learner.init(reference)
    else:
        state = restored.items["learner"]
    first_step = 1
    if restored is not None:
        prompts.set_state(restored.items["data"])
        _check_restored(restored, int(state.step))
        logging.info("%s", restored.describe())
        first_step = restored.step + 1
    kept = first_step if restored is not None else 0  # a fresh run may evaluate before its first step, as step 0
    workers = setup.make_workers(run, inputs)
    num_responses = run.loop.prompts_per_step * run.loop.group_size
    return TrainLoop(
        config=run.loop,
        algo=run.algorithm,
        sampling=run.sampling,
        eval_config=run.eval,
        learner=learner,
        state=state,
        ref_params=reference if run.algorithm.needs_reference else None,
        workers=workers,
        publish=setup.make_publish(run, inputs, workers),
        prompts=prompts,
        eval_prompts=task.eval_prompts(),
        rewards=rewards,
        decode_text=inputs.decode_text,
        store=store,
        checkpoint_every=run.checkpoint.every_steps,
        metrics=MetricsWriter(workdir, first_step=kept),
        rollouts=RolloutWriter(workdir, first_step=kept),
        timeline=TimelineWriter(workdir, first_step=kept),
        reporter=TerminalReporter(first_step, run.loop.num_steps, num_responses, _PROGRESS.value),
        first_step=first_step,
    )


def _check_restored(restored: Restored, optimizer_steps: int) -> None:
    saved = restored.manifest["summary"]["optimizer_steps"]
    if saved != optimizer_steps:
        raise ValueError(
            f"checkpoint of step {restored.step}: got an optimizer count of {optimizer_steps}, expected {saved} as its "
            "summary says; the checkpoint is damaged: remove it to resume from the one before"
        )


if __name__ == "__main__":
    cli.run(main)
