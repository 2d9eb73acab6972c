"""From a checked configuration to the parts of a run. Cheap checks come first, weights and programs last."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import logging

from launch.drafting import Drafting, make_drafting
from launch.fetch import resolve_model
from launch.run_config import RunConfig
from tlt_jax.bandit.factory import make_policy as make_strategy_policy
from tlt_jax.coordinator.runtime import WorkerPool
from tlt_jax.coordinator.store import ServiceStore
from tlt_jax.models.config import ModelConfig
from tlt_jax.models.hf import load_config, load_hf
from tlt_jax.models.transformer import param_shapes
from tlt_jax.processes import Group
from tlt_jax.rl.experience import make_requests
from tlt_jax.rl.prompts import load_tokenizer
from tlt_jax.rl.rewards import RewardPool
from tlt_jax.rl.tasks import Task, make_task
from tlt_jax.rollout.engine import RolloutEngine
from tlt_jax.sharding import Versioned, make_mesh, param_shardings, publish_all, worker_meshes
from tlt_jax.types import FeatureTrace, Params

DecodeText = Callable[[Sequence[int]], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run reads, before the policy's weights are."""

    model_dir: pathlib.Path
    model: ModelConfig
    tokenizer: Any
    decode_text: DecodeText
    drafting: Drafting | None


def read_inputs(run: RunConfig, group: Group | None = None) -> Inputs:
    """The model's configuration and tokenizer; a model known by name is fetched first, by one process at a time."""
    if group is not None:
        group.lead("model", lambda: resolve_model(run.model.path))
    model_dir = resolve_model(run.model.path)
    model = load_config(model_dir, dtype=run.model.dtype)
    tokenizer = load_tokenizer(model_dir)
    decode_text = functools.partial(tokenizer.decode, skip_special_tokens=True)
    drafting = make_drafting(run.drafter, model)
    return Inputs(model_dir=model_dir, model=model, tokenizer=tokenizer, decode_text=decode_text, drafting=drafting)


def check_lengths(run: RunConfig, max_prompt_tokens: int, model: ModelConfig) -> None:
    """Raises ValueError where the longest prompt and response do not fit the cache, or the model's positions."""
    name, response = max(
        ("rollout.max_tokens", run.sampling.max_tokens), ("eval.max_tokens", run.eval.max_tokens), key=lambda x: x[1]
    )
    need = max_prompt_tokens + response
    if need > run.rollout.max_len:
        raise ValueError(
            f"lengths: got task.max_prompt_tokens {max_prompt_tokens} + {name} {response} = {need} tokens, expected at "
            f"most rollout.max_len {run.rollout.max_len}; raise rollout.max_len or lower one of the two"
        )
    if need > model.max_position_embeddings:
        raise ValueError(
            f"lengths: got {need} tokens of prompt and response, expected at most the model's "
            f"max_position_embeddings {model.max_position_embeddings}; lower task.max_prompt_tokens or {name}"
        )


def load_task(run: RunConfig, inputs: Inputs) -> Task:
    """The prompts, checked against the cache."""
    check_lengths(run, run.task.max_prompt_tokens, inputs.model)
    task = make_task(run.task, inputs.tokenizer)
    if task.num_dropped_prompts:
        logging.warning(
            "%d prompts are longer than task.max_prompt_tokens %d and were dropped",
            task.num_dropped_prompts,
            run.task.max_prompt_tokens,
        )
    return task


def check_requests(run: RunConfig, task: Task, workers: WorkerPool) -> None:
    """Raises ValueError where an engine would refuse what training or evaluation will ask of it."""
    for prompts, sampling in ((task.train, run.sampling), (task.eval_prompts(), run.eval.sampling(run.sampling))):
        for request in make_requests(prompts, 1, sampling, 0):
            workers.engines[0].check(request)


def make_workers(
    run: RunConfig,
    inputs: Inputs,
    devices: Sequence[jax.Device] | None = None,
    group: Group | None = None,
    trace_sink: Callable[[FeatureTrace], None] | None = None,
) -> WorkerPool:
    """The rollout workers, each on a sub-mesh of this process's devices; no weights yet.

    In a job of several processes all have as many; their numbers count through the processes.
    """
    group = group or Group()
    meshes = worker_meshes(devices or jax.local_devices(), run.workers.num_workers)
    first = group.index * len(meshes)
    return WorkerPool(
        [_make_engine(run, inputs, mesh, i, trace_sink) for i, mesh in enumerate(meshes, first)],
        config=run.coordinator,
        store=ServiceStore() if group.count > 1 else None,
        num_workers=group.count * len(meshes),
        is_leader=group.is_first,
    )


def _make_engine(
    run: RunConfig,
    inputs: Inputs,
    mesh: jax.sharding.Mesh,
    worker: int,
    trace_sink: Callable[[FeatureTrace], None] | None,
) -> RolloutEngine:
    platform = mesh.devices.flat[0].platform
    bandit = dataclasses.replace(run.bandit, seed=run.bandit.seed + worker)
    return RolloutEngine(
        inputs.model,
        run.rollout,
        seed=run.loop.seed,
        mesh=mesh,
        worker=worker,
        decode_text=inputs.decode_text,
        drafter=None if inputs.drafting is None else inputs.drafting.model,
        bandit=make_strategy_policy(bandit, platform),
        ngram=run.ngram,
        trace_sink=trace_sink,
    )


def make_publish(run: RunConfig, inputs: Inputs, workers: WorkerPool) -> Callable[[Params, int], list[Versioned]]:
    """(params, version) -> one copy per worker, in the rollout's dtype and the worker's sharding."""
    shapes = param_shapes(inputs.model)
    shardings = [param_shardings(shapes, e.mesh, heads=inputs.model.num_kv_heads) for e in workers.engines]

    def copy_to_workers(params: Params, version: int) -> list[Versioned]:
        return publish_all(params, shardings, version, run.model.dtype)

    return copy_to_workers


def load_rollout_weights(run: RunConfig, inputs: Inputs, workers: WorkerPool) -> None:
    """Loads the model straight into the workers (generation and evaluation, without a learner)."""
    shapes = param_shapes(inputs.model)
    copies = []
    for engine in workers.engines:
        shardings = param_shardings(shapes, engine.mesh, heads=inputs.model.num_kv_heads)
        _, params = load_hf(inputs.model_dir, param_dtype=run.model.dtype, shardings=shardings)
        copies.append(Versioned(params=params, version=0))
    workers.load(copies)
    if inputs.drafting is not None:
        inputs.drafting.load_into(workers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """The learner's mesh, and the model's weights for it in f32."""

    mesh: jax.sharding.Mesh
    load: Callable[[], Params]


def make_policy(run: RunConfig, inputs: Inputs, devices: Sequence[jax.Device] | None = None) -> Policy:
    """Nothing is read before `load()`."""
    mesh = make_mesh(run.mesh, devices)
    shardings = param_shardings(param_shapes(inputs.model), mesh, heads=inputs.model.num_kv_heads)
    return Policy(mesh=mesh, load=lambda: load_hf(inputs.model_dir, shardings=shardings)[1])


def policy_shapes(run: RunConfig, inputs: Inputs) -> Params:
    """What the policy's weights look like on the learner's mesh: the target of a restore."""
    shapes = param_shapes(inputs.model)
    shardings = param_shardings(shapes, make_mesh(run.mesh), heads=inputs.model.num_kv_heads)
    return jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), shapes, shardings)


def make_reward_pool(run: RunConfig) -> RewardPool:
    return RewardPool(run.reward)
