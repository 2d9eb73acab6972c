"""Our own engine and learner on the job that the peers are given, in the result fields that they print."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import jax
import numpy as np

from benchmarks.peers.job import RolloutJob, TrainJob
from tlt_jax.models.hf import load_hf
from tlt_jax.rl.algorithms import AlgorithmConfig
from tlt_jax.rl.batch import PackConfig, make_batch
from tlt_jax.rl.optimizer import OptimizerConfig
from tlt_jax.rl.steps import LearnerConfig
from tlt_jax.rl.update import make_learner
from tlt_jax.rollout.config import RolloutConfig
from tlt_jax.rollout.engine import RolloutEngine
from tlt_jax.sharding import Versioned
from tlt_jax.types import Completion, Request, SamplingParams


def rollout(job: RolloutJob) -> dict[str, Any]:
    """Tokens per second of the engine: median over `job.repeats` after `job.warmup` calls.

    Returns:
      `tok_s, walls_s, cpu_s, tok_per_cpu_s, compile_s, useful_tokens, utilisation, compiles_after_warmup, token_ids`.
      `utilisation` is the share of row-rounds that made a useful token.
    """
    model, params = load_hf(job.model_dir, dtype=job.dtype, param_dtype=job.dtype)
    config = RolloutConfig(
        max_live=job.batch_size,
        max_len=job.kv_capacity,
        min_kv=128,
        kv_growth=1.5,
        prefill_rows=min(16, job.batch_size),
        **job.options,
    )
    engine = RolloutEngine(model, config, seed=job.seed)
    engine.load(Versioned(params, 0))
    requests = [
        Request(
            request_id=i,
            prompt_id=i,
            prompt_ids=tuple(prompt),
            sampling=SamplingParams(
                temperature=job.temperature,
                max_tokens=length,
                ignore_eos=True,
                stop_token_ids=tuple(job.stop_token_ids),
            ),
        )
        for i, (prompt, length) in enumerate(zip(job.prompts, job.max_new_tokens, strict=True))
    ]
    start_s = time.perf_counter()
    for _ in range(job.warmup):
        engine.generate(requests)
    first_s = time.perf_counter() - start_s
    num_compiled, before = engine.pool.stats.num_compiled, dataclasses.replace(engine.stats)
    walls_s, cpus_s, completions = [], [], []
    for _ in range(job.repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        completions = engine.generate(requests)
        walls_s.append(time.perf_counter() - wall)
        cpus_s.append(time.process_time() - cpu)
    num_tokens = sum(len(c.token_ids) for c in completions)
    wall_s, cpu_s = statistics.median(walls_s), statistics.median(cpus_s)
    row_rounds = engine.stats.row_rounds - before.row_rounds
    return {
        "tok_s": num_tokens / wall_s,
        "wall_s": wall_s,
        "walls_s": walls_s,
        "cpu_s": cpu_s,
        "tok_per_cpu_s": num_tokens / cpu_s,
        "compile_s": engine.pool.stats.compile_s,
        "first_call_s": first_s,
        "useful_tokens": num_tokens,
        "utilisation": (engine.stats.tokens - before.tokens) / max(row_rounds, 1),
        "compiles_after_warmup": engine.pool.stats.num_compiled - num_compiled,
        "token_ids": [c.token_ids.tolist() for c in completions],
    }


def train(job: TrainJob) -> dict[str, Any]:
    """Tokens per second of one update of the learner, prompt and response tokens counted; median over repeats."""
    model, params = load_hf(job.model_dir, dtype=job.dtype)
    algo = AlgorithmConfig(aggregation="token_mean", clip_low=job.clip, clip_high=job.clip)
    width = max(len(p) + len(r) for p, r in zip(job.prompts, job.responses, strict=True))
    config = LearnerConfig(remat=job.remat, pack=PackConfig(micro_batch_tokens=width * job.micro_batch))
    optim = OptimizerConfig(learning_rate=job.learning_rate, max_grad_norm=job.max_grad_norm)
    learner = make_learner(model, algo, optim, config)
    state = learner.init(params)
    behaviour = job.behaviour_logprobs or [[0.0] * len(r) for r in job.responses]
    completions = [
        Completion(
            request_id=i,
            prompt_id=i,
            sample=0,
            prompt_ids=tuple(prompt),
            token_ids=np.asarray(response, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            finish_reason="stop",
        )
        for i, (prompt, response, logprobs) in enumerate(zip(job.prompts, job.responses, behaviour, strict=True))
    ]
    batch = make_batch(completions, SamplingParams(temperature=job.temperature, max_tokens=width))
    batch = dataclasses.replace(batch, advantages=np.asarray(job.advantages, np.float32))
    start_s = time.perf_counter()
    first: dict[str, float] = {}
    for i in range(job.warmup):
        state, metrics = learner.update(state, batch)
        first = first or metrics if i == 0 else first
    warmup_s = time.perf_counter() - start_s
    walls_s = []
    for _ in range(job.repeats):
        wall = time.perf_counter()
        state, _ = learner.update(state, batch)
        jax.block_until_ready(state.params)
        walls_s.append(time.perf_counter() - wall)
    wall_s = statistics.median(walls_s)
    return {
        "tok_s": job.num_tokens / wall_s,
        "update_s": wall_s,
        "walls_s": walls_s,
        "compile_s": max(0.0, warmup_s - job.warmup * wall_s),
        "first_step": {"loss": first["rl/loss"], "grad_norm": first["rl/grad_norm"]},
    }
