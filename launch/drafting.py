"""A run's drafter: read or made, and brought to the workers."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.coordinator.runtime import WorkerPool
from tlt_jax.drafter.config import DraftConfig
from tlt_jax.drafter.decode import make_draft_model, prepare
from tlt_jax.drafter.export import load_drafter
from tlt_jax.drafter.model import init_draft_params
from tlt_jax.drafter.settings import DrafterConfig
from tlt_jax.models.config import ModelConfig
from tlt_jax.rollout.engine import RolloutEngine
from tlt_jax.sharding import Versioned, replicated
from tlt_jax.types import DraftModel, Params


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Drafting:
    """A drafter and the parameters that it starts with.

    Attributes:
      config: shape, for one target.
      params: the trainable tree.
      d2t: map of a reduced vocabulary, or None.
    """

    config: DraftConfig
    params: Params
    d2t: np.ndarray | None = None

    @functools.cached_property
    def model(self) -> DraftModel:
        """For the engines: one object, so that they share programs."""
        return make_draft_model(self.config, None if self.d2t is None else jnp.asarray(self.d2t))

    def load_into(self, workers: WorkerPool, params: Params | None = None, version: int = 0) -> None:
        """Gives every worker the drafter, prepared for the target weights that the worker holds.

        Args:
          workers: with weights loaded.
          params: the trainable tree; default: the one that the run started with.
          version: of `params`.
        """
        for engine in workers.engines:
            self.load_into_engine(engine, params, version)

    def load_into_engine(self, engine: RolloutEngine, params: Params | None = None, version: int = 0) -> None:
        """As `load_into`, for one engine."""
        own = jax.device_put(self.params if params is None else params, replicated(engine.mesh))
        d2t = None if self.d2t is None else jnp.asarray(self.d2t)
        engine.load_drafter(Versioned(prepare(own, engine.weights.params, self.config, d2t), version))


def make_drafting(settings: DrafterConfig, target: ModelConfig) -> Drafting | None:
    """The drafter of a run's `drafter` section; None where it is off.

    Raises:
      ValueError: what lies at `drafter.path` is no drafter of this target.
    """
    if not settings.enabled:
        return None
    if settings.path:
        config, params, d2t = load_drafter(pathlib.Path(settings.path), target)
        return Drafting(config=config, params=params, d2t=d2t)
    config = settings.draft_config(target)
    if config.draft_vocab_size:
        raise ValueError(
            f"drafter.draft_vocab_size: got {config.draft_vocab_size} without drafter.path, expected 0: which ids to "
            "keep follows from data; let launch.train_drafter choose them and start from what it wrote"
        )
    return Drafting(config=config, params=init_draft_params(config, jax.random.key(settings.seed)))
