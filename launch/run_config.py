"""The sections of a run's configuration, and the frozen dataclasses they become.

A section of a config file sets fields of the dataclasses beside its name in `SCHEMA`; what it does not name keeps the
default that stands there. `rl.algorithm` and `drafter.preset` name presets, whose values then are the defaults of the
algorithm's fields and of `drafter.loss`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from launch.config import ConfigError, build
from tlt_jax.bandit.policy import BanditConfig
from tlt_jax.checkpoint import CheckpointConfig
from tlt_jax.coordinator.spot_trainer import SpotConfig
from tlt_jax.coordinator.state import CoordinatorConfig
from tlt_jax.drafter.config import loss_preset
from tlt_jax.drafter.settings import DrafterConfig
from tlt_jax.processes import DistributedConfig
from tlt_jax.rl.algorithms import PRESETS, AlgorithmConfig, check_sampling, preset
from tlt_jax.rl.evaluate import EvalConfig
from tlt_jax.rl.loop import LoopConfig
from tlt_jax.rl.optimizer import OptimizerConfig
from tlt_jax.rl.rewards import RewardConfig
from tlt_jax.rl.steps import LearnerConfig
from tlt_jax.rl.tasks import TaskConfig
from tlt_jax.rollout.config import RolloutConfig
from tlt_jax.rollout.ngram import NgramConfig
from tlt_jax.sharding import MeshConfig
from tlt_jax.types import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where the policy comes from.

    Attributes:
      path: a Hugging Face directory, or a name that `launch.convert fetch` knows.
      dtype: compute dtype of rollouts, and dtype of the weights that the workers hold.
    """

    path: str = ""
    dtype: str = "float32"

    def __post_init__(self):
        if not self.path:
            raise ValueError("model.path: got '', expected a Hugging Face directory or a name such as 'smollm2-135m'")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"model.dtype: got {self.dtype!r}, expected 'float32' or 'bfloat16'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """How many rollout workers share this process's devices."""

    num_workers: int = 1

    def __post_init__(self):
        if self.num_workers < 1:
            raise ValueError(f"rollout.num_workers: got {self.num_workers}, expected >= 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmName:
    """Which preset of `rl.algorithms`."""

    algorithm: str = "grpo"

    def __post_init__(self):
        if self.algorithm not in PRESETS:
            raise ValueError(f"rl.algorithm: got {self.algorithm!r}, expected one of {', '.join(PRESETS)}")


SCHEMA: dict[str, tuple[type, ...]] = {
    "model": (ModelSource,),
    "task": (TaskConfig,),
    "reward": (RewardConfig,),
    "rollout": (RolloutConfig, SamplingParams, WorkerConfig),
    "rl": (AlgorithmName, AlgorithmConfig, OptimizerConfig, LearnerConfig, LoopConfig),
    "eval": (EvalConfig,),
    "drafter": (DrafterConfig,),
    "bandit": (BanditConfig,),
    "ngram": (NgramConfig,),
    "coordinator": (CoordinatorConfig, SpotConfig),
    "mesh": (MeshConfig,),
    "checkpoint": (CheckpointConfig,),
    "distributed": (DistributedConfig,),
}

# What a resumed run may change: it does not change what a step computes, or says how long to go on. Drafters change no
# token, but a drafter's weights and optimizer state are resumed in the shapes that they have.
MAY_CHANGE = (
    *("loop.num_steps", "eval", "checkpoint", "mesh", "workers", "rollout", "learner", "reward.num_workers"),
    *("drafter.path", "drafter.enabled", "drafter.loss", "drafter.preset", "drafter.optim", "drafter.batch"),
    *("drafter.buffer", "bandit", "ngram", "coordinator", "spot", "distributed"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A checked configuration."""

    model: ModelSource
    task: TaskConfig
    reward: RewardConfig
    rollout: RolloutConfig
    sampling: SamplingParams
    workers: WorkerConfig
    algorithm: AlgorithmConfig
    optimizer: OptimizerConfig
    learner: LearnerConfig
    loop: LoopConfig
    eval: EvalConfig
    drafter: DrafterConfig
    bandit: BanditConfig
    ngram: NgramConfig
    coordinator: CoordinatorConfig
    spot: SpotConfig
    mesh: MeshConfig
    checkpoint: CheckpointConfig
    distributed: DistributedConfig


def make_run_config(sections: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """Sections (from `launch.config.load_config`) to dataclasses, with the checks that need several of them.

    Raises:
      ConfigError: says got, expected and remedy.
    """

    def section(name: str, *bases: Any) -> tuple[Any, ...]:
        return build(sections.get(name, {}), f"config.{name}", *(bases or SCHEMA[name]))

    rollout, sampling, workers = section("rollout")
    name, _, optimizer, learner, loop = section("rl")
    coordinator, spot = section("coordinator")
    _, algorithm, *_ = section("rl", AlgorithmName, preset(name.algorithm), *SCHEMA["rl"][2:])
    run = RunConfig(
        model=section("model")[0],
        task=section("task")[0],
        reward=section("reward")[0],
        rollout=rollout,
        sampling=sampling,
        workers=workers,
        algorithm=algorithm,
        optimizer=optimizer,
        learner=learner,
        loop=loop,
        eval=section("eval")[0],
        drafter=_drafter(sections.get("drafter", {}), sampling),
        bandit=section("bandit")[0],
        ngram=section("ngram")[0],
        coordinator=coordinator,
        spot=spot,
        mesh=section("mesh")[0],
        checkpoint=section("checkpoint")[0],
        distributed=section("distributed")[0],
    )
    try:
        run.loop.check_algorithm(run.algorithm)
        check_sampling(run.algorithm, run.sampling)
    except ValueError as error:
        raise ConfigError(f"config: {error}") from error
    return run


def _drafter(section: Mapping[str, Any], sampling: SamplingParams) -> DrafterConfig:
    """The section over the loss preset that it names, at the temperature of the rollouts."""
    name = build({k: v for k, v in section.items() if k == "preset"}, "config.drafter", DrafterConfig)[0].preset
    # Greedy rollouts have no law to match: their drafts are trained at 1.
    base = DrafterConfig(preset=name, loss=loss_preset(name, temperature=sampling.temperature or 1.0))
    return build(section, "config.drafter", base)[0]
