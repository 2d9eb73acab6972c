"""A run's drafter: read or made, and brought to the workers."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.coordinator.runtime import WorkerPool
from tlt_jax.drafter import vocab
from tlt_jax.drafter.config import DraftConfig
from tlt_jax.drafter.decode import make_draft_model, prepare
from tlt_jax.drafter.export import load_drafter
from tlt_jax.drafter.features import Recorded
from tlt_jax.drafter.model import init_draft_params
from tlt_jax.drafter.settings import DrafterConfig
from tlt_jax.models.config import ModelConfig
from tlt_jax.rollout.engine import RolloutEngine
from tlt_jax.sharding import Versioned, replicated
from tlt_jax.types import DraftModel, Params

EXPORT_DIR = "drafter"  # of a workdir of launch.train_drafter: the drafter in EAGLE layout


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
        return _load(settings, target)
    config = settings.draft_config(target)
    if config.draft_vocab_size:
        raise ValueError(
            f"drafter.draft_vocab_size: got {config.draft_vocab_size} without drafter.path, expected 0: which ids to "
            "keep follows from data; let launch.train_drafter choose them and start from what it wrote"
        )
    return Drafting(config=config, params=init_draft_params(config, jax.random.key(settings.seed)))


def drafter_dir(path: str | pathlib.Path) -> pathlib.Path:
    """`path`, or the drafter's directory in it where it is a workdir of `launch.train_drafter`."""
    inner = pathlib.Path(path) / EXPORT_DIR
    return inner if (inner / "config.json").exists() else pathlib.Path(path)


def _load(settings: DrafterConfig, target: ModelConfig) -> Drafting:
    """The drafter at `settings.path`: a directory in EAGLE layout, or a workdir that has one."""
    config, params, d2t = load_drafter(drafter_dir(settings.path), target)
    return Drafting(config=config, params=params, d2t=d2t)


def check_start(settings: DrafterConfig, target: ModelConfig) -> None:
    """Raises ValueError where no drafter could be trained for `target`, before anything is generated or compiled."""
    if settings.path:
        _load(settings, target)
        return
    settings.draft_config(target)
    num_valid = target.num_valid_tokens or target.vocab_size
    least = len(target.eos_token_ids)
    if settings.draft_vocab_size and not least <= settings.draft_vocab_size <= num_valid:
        raise ValueError(
            f"drafter.draft_vocab_size: got {settings.draft_vocab_size}, expected 0 or {least} (the stop ids) to "
            f"{num_valid} (all tokens)"
        )


def tracing_drafter(settings: DrafterConfig, target: ModelConfig) -> Drafting:
    """A drafter without weights: engines that have it keep the features that it would read."""
    config = _load(settings, target).config if settings.path else settings.draft_config(target)
    return Drafting(config=dataclasses.replace(config, draft_vocab_size=0), params={})


def start_drafter(settings: DrafterConfig, target: ModelConfig, sequences: Sequence[Recorded]) -> Drafting:
    """What offline training starts from: the drafter at `drafter.path`, or a new one.

    Args:
      settings: the section.
      target: the model.
      sequences: trained on; a reduced vocabulary takes the ids that are most frequent in their responses.
    """
    if settings.path:
        return _load(settings, target)
    config, d2t = settings.draft_config(target), None
    if config.draft_vocab_size:
        counts = vocab.count_tokens([s.token_ids[s.prompt_len :] for s in sequences], target.vocab_size)
        d2t = vocab.frequent_map(counts, config.draft_vocab_size, target.eos_token_ids, target.num_valid_tokens)
    return Drafting(config=config, params=init_draft_params(config, jax.random.key(settings.seed)), d2t=d2t)
