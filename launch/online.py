"""From the sections `drafter` and `coordinator` to a drafter that idle workers train."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from launch.drafting import Drafting
from launch.run_config import RunConfig
from tlt_jax.coordinator.online import OnlineDrafter
from tlt_jax.coordinator.runtime import WorkerPool
from tlt_jax.coordinator.spot_trainer import Data, SpotTrainer
from tlt_jax.drafter.config import DraftConfig
from tlt_jax.drafter.loss import DraftBatch
from tlt_jax.drafter.packing import BatchConfig
from tlt_jax.drafter.train import DraftTrainer, make_draft_trainer
from tlt_jax.rollout.engine import RolloutEngine
from tlt_jax.types import Params


def make_data(run: RunConfig, drafting: Drafting | None) -> Data | None:
    """What engines hand their traces to; None where idle workers do not train."""
    if drafting is None or not run.coordinator.train:
        return None
    return Data(run.drafter.buffer, run.spot.held_out_frac)


def make_online(
    run: RunConfig, drafting: Drafting, workers: WorkerPool, data: Data, workdir: pathlib.Path
) -> OnlineDrafter:
    """A trainer for each worker, on the worker's own devices; the pool calls them from now on."""
    directory = workdir / "drafter"

    @functools.cache  # workers on the same devices share programs
    def make_trainer(mesh: Mesh) -> DraftTrainer:
        settings = run.drafter
        return make_draft_trainer(
            drafting.config,
            settings.loss,
            settings.optim,
            batch=settings.batch,
            d2t=drafting.d2t,
            seed=settings.seed,
            mesh=mesh,
        )

    def load(engine: RolloutEngine, params: Params, version: int) -> None:
        drafting.load_into_engine(engine, params, version)

    spots: list[SpotTrainer] = []
    online = OnlineDrafter(workers.engines, spots, data, load, directory=directory)
    for engine in workers.engines:
        spot = SpotTrainer(
            engine,
            make_trainer(engine.mesh),
            drafting.params,
            data,
            run.spot,
            on_better=online.take,
            seed=run.drafter.seed,
            directory=directory,
        )
        online.spots.append(spot)
    workers.trainers = {engine.worker: spot for engine, spot in zip(workers.engines, online.spots, strict=True)}
    workers.before_step = online.before_step
    online.example = _empty_batch(drafting.config, run.drafter.batch)
    return online


def _empty_batch(config: DraftConfig, shape: BatchConfig) -> DraftBatch:
    """A batch that trains on nothing, in the shape and types of those that do."""
    size = (shape.num_micro, shape.num_rows, shape.row_len)
    bf16: Any = jnp.bfloat16

    def zeros(*width: int, dtype: Any = np.int32) -> jax.Array:
        return np.zeros((*size, *width), dtype)  # type: ignore[return-value]

    is_fused = config.feature_size != config.target.hidden_size
    return DraftBatch(
        features=zeros(config.feature_size, dtype=bf16),
        hidden=zeros(config.target.hidden_size, dtype=bf16) if is_fused else None,
        tokens=zeros(),
        positions=zeros(),
        segment_ids=zeros(),
        mask=zeros(dtype=bool),
    )
