"""Trains a policy: `python -m launch.train --config=configs/X.py [--workdir=DIR] [--config.rl.learning_rate=1e-6 ...]`.

A workdir that holds a run of the same configuration is resumed from its newest checkpoint; `--fresh` insists on a new
one. Ctrl-C and SIGTERM end the run after the call in flight; a checkpoint being written is finished first.

In a job of several processes (`launch.local_cluster`, Slurm, or what the `distributed` section says) each runs this
command. They share the learner's mesh; each has rollout workers on its own devices. When one fails, all end.

Exit codes: 0 done; 1 the run failed or was stopped (the message says where to resume); 2 bad configuration or input.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import flags, logging

from launch import cli, job, setup
from launch.config import CONFIG, prepare_workdir, to_json
from launch.online import make_data, make_online
from launch.progress import SilentReporter, TerminalReporter
from launch.run_config import MAY_CHANGE, RunConfig
from launch.run_flags import PROGRESS, WORKDIR
from tlt_jax.checkpoint import CheckpointError, CheckpointStore, Restored
from tlt_jax.coordinator.driver import RolloutError
from tlt_jax.metrics import MetricsWriter, RolloutWriter, TimelineWriter
from tlt_jax.processes import Group, PeerError
from tlt_jax.rl import update
from tlt_jax.rl.loop import Reporter, TrainLoop
from tlt_jax.rl.optimizer import LearnerState
from tlt_jax.rl.rewards import RewardPool, RewardWorkerError
from tlt_jax.rl.tasks import Task
from tlt_jax.sharding import replicated

_FRESH = flags.DEFINE_bool("fresh", False, "Insist on a new workdir.")

# What may stop a run that is set up right: its message is enough, without a traceback.
_FAILURES = (
    CheckpointError,
    RewardWorkerError,
    PeerError,
    RolloutError,
    OSError,
    MemoryError,
    jax.errors.JaxRuntimeError,  # out of device memory, a lost device
    KeyboardInterrupt,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What a loop is made of, besides weights."""

    run: RunConfig
    inputs: setup.Inputs
    task: Task
    rewards: RewardPool
    workdir: pathlib.Path
    reporter: Reporter
    group: Group = dataclasses.field(default_factory=Group)


def main() -> dict[str, Any] | None:
    run = cli.read_run_config()
    with job.joined(run.distributed) as group:
        result = train(run, group)
    return result if group.is_first else None


def train(run: RunConfig, group: Group) -> dict[str, Any]:
    """One process's part of the run, from its inputs to its result."""
    workdir = pathlib.Path(WORKDIR.value or f"runs/{pathlib.Path(CONFIG.value or '').stem}")
    start_s = time.perf_counter()
    with cli.checking_input():
        config = to_json(run)
        group.agree("configuration", repr({name: section for name, section in config.items() if name != "distributed"}))
        inputs = setup.read_inputs(run, group)
        task = setup.load_task(run, inputs)
        rewards = setup.make_reward_pool(run)
        group.lead("workdir", lambda: prepare_workdir(workdir, config, fresh=_FRESH.value, may_change=MAY_CHANGE))
        store = CheckpointStore(workdir / "checkpoints", run.checkpoint, group=group)
        parts = Parts(
            run=run,
            inputs=inputs,
            task=task,
            rewards=rewards,
            workdir=workdir,
            reporter=_make_reporter(run) if group.is_first else SilentReporter(),
            group=group,
        )
        loop = make_loop(parts, store)
    logging.info("ready after %.1f s; workdir %s", time.perf_counter() - start_s, workdir)
    with rewards:
        metrics = run_to_end(loop)
    return {"workdir": str(workdir), "steps": run.loop.num_steps, "seconds": time.perf_counter() - start_s} | metrics


def _make_reporter(run: RunConfig) -> TerminalReporter:
    num_responses = run.loop.prompts_per_step * run.loop.group_size
    return TerminalReporter(run.loop.num_steps, num_responses, PROGRESS.value)


def run_to_end(loop: TrainLoop) -> dict[str, float]:
    """Runs the loop; whatever stops it, the last words say at which step, why, and where to go on."""
    loop.group.resume_hint = lambda: f"the same command {_where_to_resume(loop)}"
    try:
        metrics = loop.run()
        loop.close()
        return metrics
    except BaseException as error:
        cause = PeerError(loop.group.failure) if loop.group.failure else error  # a collective that broke off, say
        _say_where_to_resume(loop, cause)
        if isinstance(cause, _FAILURES):
            sys.exit(cli.EXIT_FAILED)
        raise


def _say_where_to_resume(loop: TrainLoop, error: BaseException) -> None:
    if loop.group.count == 1:  # a checkpoint of several processes needs them all: the one being written is given up
        try:
            loop.close()  # finishes a checkpoint that is being written
        except (CheckpointError, OSError) as another:
            if another is not error:
                logging.error("step %d: %s", loop.step, another)
    why = "stopped" if isinstance(error, KeyboardInterrupt) else f"failed: {type(error).__name__}: {error}"
    logging.error("step %d %s; the same command %s", loop.step, why, _where_to_resume(loop))


def _where_to_resume(loop: TrainLoop) -> str:
    newest = None if loop.store is None else loop.store.latest_step()
    return "starts from the beginning: there is no checkpoint yet" if newest is None else f"resumes from step {newest}"


def make_loop(
    parts: Parts,
    store: CheckpointStore,
    devices: Sequence[jax.Device] | None = None,
    make_learner: Callable[..., update.Learner] = update.make_learner,
) -> TrainLoop:
    """All parts of the run: the policy from the newest checkpoint if there is one, else from the model directory.

    Args:
      parts: what has been read and checked.
      store: where checkpoints are.
      devices: of learner and workers; default all.
      make_learner: as `update.make_learner`.
    """
    run, inputs, workdir, is_writer = parts.run, parts.inputs, parts.workdir, parts.group.is_first
    data = make_data(run, inputs.drafting)
    workers = setup.make_workers(run, inputs, devices, parts.group, None if data is None else data.add)
    setup.check_requests(run, parts.task, workers)
    policy = setup.make_policy(run, inputs, devices)
    learner = make_learner(inputs.model, run.algorithm, run.optimizer, run.learner, policy.mesh)
    prompts = parts.task.train_iterator(run.loop.prompts_per_step, run.loop.seed)
    online = None
    if inputs.drafting is not None and data is not None:
        online = make_online(run, inputs.drafting, workers, data, workdir)
    targets = {"learner": learner.steps.state_shapes, "data": None, "bandit": None}
    if online is not None:
        targets |= {"drafter": online.state_shapes(replicated(policy.mesh)), "online": None}
    restored = store.restore(targets, optional=("drafter", "online"))  # a run may train its drafter from now on
    reference = policy.load() if restored is None or run.algorithm.needs_reference else None
    first_step, kept = 1, 0  # a fresh run may evaluate before its first step, as step 0
    if restored is None:
        assert reference is not None
        state = learner.init(reference)
    else:
        state = restored.items["learner"]
        prompts.set_state(restored.items["data"])
        first = parts.group.index * len(workers.engines)  # the saved ones are of all processes
        workers.restore_bandits(restored.items.get("bandit", [])[first:])
        if online is not None and "drafter" in restored.items:
            online.set_state(restored.items["drafter"], restored.items["online"])
            online.load_data(restored.step)
        _check_restored(restored, state)
        logging.info("%s", restored.describe())
        first_step = kept = restored.step + 1
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
        publish_drafter=None if inputs.drafting is None else functools.partial(inputs.drafting.load_into, workers),
        online=online,
        prompts=prompts,
        eval_prompts=parts.task.eval_prompts(),
        rewards=parts.rewards,
        decode_text=inputs.decode_text,
        store=store,
        checkpoint_every=run.checkpoint.every_steps,
        metrics=MetricsWriter(workdir, first_step=kept, is_writer=is_writer),
        rollouts=RolloutWriter(workdir, first_step=kept, is_writer=is_writer),
        timeline=TimelineWriter(workdir, first_step=kept, is_writer=is_writer),
        reporter=parts.reporter,
        group=parts.group,
        first_step=first_step,
    )


def _check_restored(restored: Restored, state: LearnerState) -> None:
    saved, found = restored.manifest["summary"]["optimizer_steps"], int(state.step)
    if saved != found:
        raise ValueError(
            f"checkpoint of step {restored.step}: got an optimizer count of {found}, expected {saved} as its "
            "summary says; the checkpoint is damaged: remove it to resume from the one before"
        )


if __name__ == "__main__":
    cli.run(main)
