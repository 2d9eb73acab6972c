"""The learner: one rollout batch in, a better policy out.

Life of `update`:
  1. The rows that take part are cut into the optimizer steps of one pass, and each step into fixed-shape micro-batches.
  2. Where the algorithm needs them, log-probs of the reference, and of the policy as it is now, are computed over the
     same micro-batches.
  3. For each optimizer step: gradients are summed over its micro-batches in f32, then AdamW is applied.
  4. Device sums come to the host once, and become metrics.

Invariants:
  - The gradient of an optimizer step does not depend on how it was cut or sharded.
  - In the first optimizer step of a batch the old policy is the current one, by construction: the ratio is 1 to the
    bit, whatever the dtype and shapes.
  - A gradient that is not finite changes nothing: parameters, moments and step count stay, and the skip is counted.
  - `update` donates its state: nobody may hold the old parameters. `init` copies, so the caller's parameters survive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from tlt_jax.models.config import ModelConfig
from tlt_jax.rl.algorithms import AlgorithmConfig
from tlt_jax.rl.batch import MicroBatch, TrainBatch, row_weights, split_minibatches
from tlt_jax.rl.optimizer import LearnerState, OptimizerConfig
from tlt_jax.rl.packing import make_micro_batches, scatter_rows
from tlt_jax.rl.steps import LearnerConfig, Steps, make_steps
from tlt_jax.sharding import BATCH
from tlt_jax.types import Params

Cut = Callable[[TrainBatch, np.ndarray], list[MicroBatch]]


class Learner(NamedTuple):
    """Functions around a `LearnerState`.

    Attributes:
      init: params -> state; copies, in f32, onto the mesh.
      update: (state, batch, ref_params=None) -> (state, metrics); donates the state.
      logprobs: (params, batch) -> B arrays f32[response], of every row, whether it takes part or not.
      kl_sums: (params, ref_params, batch) -> f32[B] KL estimate summed over each response, for a KL in the reward.
      micro_batches: (batch, rows) -> those rows' micro-batches, on the device, weighted as one optimizer step.
      steps: the jitted programs, the state's shapes and the trace counts.
    """

    init: Callable[[Params], LearnerState]
    update: Callable[..., tuple[LearnerState, dict[str, float]]]
    logprobs: Callable[[Params, TrainBatch], list[np.ndarray]]
    kl_sums: Callable[[Params, Params, TrainBatch], np.ndarray]
    micro_batches: Callable[[TrainBatch, np.ndarray], list[MicroBatch]]
    steps: Steps


def make_learner(
    model: ModelConfig,
    algo: AlgorithmConfig,
    optim: OptimizerConfig,
    config: LearnerConfig | None = None,
    mesh: Mesh | None = None,
) -> Learner:
    """Builds the learner; nothing is compiled before first use.

    Args:
      model: the policy's architecture.
      algo: the loss.
      optim: AdamW.
      config: layout and dtype; None takes the defaults.
      mesh: axes `data`, `fsdp`, `tensor`; None is one device.
    """
    config = config or LearnerConfig()
    steps = make_steps(model, algo, optim, config, mesh)
    num_shards = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]

    def micro_batches(batch: TrainBatch, rows: np.ndarray) -> list[MicroBatch]:
        weights = row_weights(batch.response_lens[rows], algo, batch.max_tokens)
        return [place(micro, mesh) for micro in make_micro_batches(batch, rows, weights, config.pack, num_shards)]

    return Learner(
        init=steps.init,
        update=_make_update(steps, algo, micro_batches),
        logprobs=_make_logprobs(steps, micro_batches),
        kl_sums=_make_kl_sums(steps, micro_batches),
        micro_batches=micro_batches,
        steps=steps,
    )


def _make_update(steps: Steps, algo: AlgorithmConfig, cut: Cut) -> Callable:
    def update(state: LearnerState, batch: TrainBatch, ref_params: Params | None = None):
        parts = split_minibatches(batch, algo.num_minibatches)
        work = [cut(batch, rows) for rows in parts]
        temperature = np.float32(batch.temperature)
        start_s = time.monotonic()
        old, ref = _fixed_logprobs(steps, algo, (state.params, ref_params), work, temperature)
        logprob_s = time.monotonic() - start_s
        outcomes = []
        for iteration in range(algo.num_iterations):
            for i, micros in enumerate(work):
                grads, sums = steps.zeros()
                is_on_policy = np.bool_(iteration == i == 0)
                for micro, old_BT, ref_BT in zip(micros, old[i], ref[i], strict=True):
                    args = (micro, old_BT, ref_BT, is_on_policy, temperature)
                    grads, sums = steps.accumulate(state.params, grads, sums, *args)
                state, info = steps.apply(state, grads)
                outcomes.append({**sums, **info})
        metrics = summarise(jax.device_get(outcomes)) | _layout_metrics(batch, parts, work)
        return state, metrics | {"time/logprob_s": logprob_s}

    return update


def _fixed_logprobs(steps: Steps, algo: AlgorithmConfig, policies, work: list[list[MicroBatch]], temperature):
    """Log-probs of the policy as it is now and of the reference, for each micro-batch of each optimizer step.

    Old log-probs are only computed where a later step needs them; elsewhere the rollout's hold their place. The
    reference is None throughout where the loss has no KL.
    """
    params, ref_params = policies
    old = [[micro.behaviour_logprobs for micro in micros] for micros in work]
    ref: list[list[Any]] = [[None] * len(micros) for micros in work]
    if algo.num_updates > 1:
        old = [[steps.score(params, micro, temperature) for micro in micros] for micros in work]
    if algo.needs_reference and algo.kl_in == "loss":
        if ref_params is None:
            raise ValueError(
                f"ref_params: got None, expected the reference policy since algorithm.kl_coef is {algo.kl_coef}; "
                "pass it, or set kl_coef to 0"
            )
        ref = [[steps.score(ref_params, micro, temperature) for micro in micros] for micros in work]
    return jax.block_until_ready((old, ref))


def _make_logprobs(steps: Steps, cut: Cut) -> Callable:
    def logprobs(params: Params, batch: TrainBatch) -> list[np.ndarray]:
        num_rows, temperature = len(batch.tokens), np.float32(batch.temperature)
        micros = cut(batch, np.arange(num_rows))
        values = [steps.score(params, micro, temperature) for micro in micros]
        return _fetch_rows(steps, micros, values, num_rows)

    return logprobs


def _make_kl_sums(steps: Steps, cut: Cut) -> Callable:
    def kl_sums(params: Params, ref_params: Params, batch: TrainBatch) -> np.ndarray:
        num_rows, temperature = len(batch.tokens), np.float32(batch.temperature)
        micros = cut(batch, np.arange(num_rows))
        values = []
        for micro in micros:
            policy, ref = (steps.score(p, micro, temperature) for p in (params, ref_params))
            values.append(steps.kl(policy, ref, micro.mask))
        rows = _fetch_rows(steps, micros, values, num_rows)
        return np.array([row.sum(dtype=np.float64) for row in rows], np.float32)

    return kl_sums


def _fetch_rows(steps: Steps, micros: list[MicroBatch], values: list[jax.Array], num_rows: int) -> list[np.ndarray]:
    """Slot values on the host, row by row, in every process."""
    gathered = [steps.gather((value, micro.mask, micro.row_index)) for value, micro in zip(values, micros, strict=True)]
    return scatter_rows(jax.device_get(gathered), num_rows)


def place(micro: MicroBatch, mesh: Mesh | None) -> MicroBatch:
    """On the mesh, rows split over it. Every process passes the same global arrays and keeps its own rows."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, micro)
    sharding = NamedSharding(mesh, BATCH)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), micro)


def summarise(outcomes: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Metrics of a rollout batch from the sums of its optimizer steps.

    Returns:
      Means over the trained tokens of all steps: `rl/kl` (nats, 0 without a reference), `rl/entropy` (nats),
      `rl/ratio_mean`, `rl/clip_frac`, `rl/dual_clip_frac`, `rl/logprob_gap` (nats, of |learner - rollout|) and
      `rl/tis_mean`. Maxima: `rl/ratio_max`, `rl/logprob_gap_max`. Means over optimizer steps: `rl/loss`,
      `rl/policy_loss` and `rl/grad_norm` before clipping. The last step's `rl/learning_rate`.
      Counts: `rl/valid_tokens` (response tokens trained on, each pass counts), `rl/num_updates` (applied) and
      `rl/skipped_updates` (gradient not finite; such steps count nowhere else).
    """
    num_skipped = sum(not outcome["is_applied"] for outcome in outcomes)
    outcomes = [outcome for outcome in outcomes if outcome["is_applied"]]

    def total(name: str) -> float:
        return float(sum(outcome[name] for outcome in outcomes))

    def largest(name: str) -> float:
        return float(max((outcome[name] for outcome in outcomes), default=0.0))

    num_tokens = max(total("sum/tokens"), 1.0)
    num_updates = max(len(outcomes), 1)
    return {
        "rl/loss": total("sum/loss") / num_updates,
        "rl/policy_loss": total("sum/policy_loss") / num_updates,
        "rl/kl": total("sum/kl") / num_tokens,
        "rl/entropy": total("sum/entropy") / num_tokens,
        "rl/ratio_mean": total("sum/ratio") / num_tokens,
        "rl/ratio_max": largest("max/ratio"),
        "rl/clip_frac": total("sum/clip") / num_tokens,
        "rl/dual_clip_frac": total("sum/dual_clip") / num_tokens,
        "rl/logprob_gap": total("sum/gap") / num_tokens,
        "rl/logprob_gap_max": largest("max/gap"),
        "rl/tis_mean": total("sum/tis") / num_tokens,
        "rl/grad_norm": total("grad_norm") / num_updates,
        "rl/learning_rate": float(outcomes[-1]["learning_rate"]) if outcomes else 0.0,
        "rl/valid_tokens": total("sum/tokens"),
        "rl/num_updates": float(len(outcomes)),
        "rl/skipped_updates": float(num_skipped),
    }


def _layout_metrics(batch: TrainBatch, parts: list[np.ndarray], work: list[list[MicroBatch]]) -> dict[str, float]:
    """Of one pass: `rl/valid_rows`, `rl/micro_batches`, and `rl/pad_frac`, the share of token slots left empty."""
    num_slots = sum(micro.tokens.size for micros in work for micro in micros)
    num_tokens = sum(len(batch.tokens[row]) for rows in parts for row in rows)
    return {
        "rl/valid_rows": float(sum(len(rows) for rows in parts)),
        "rl/micro_batches": float(sum(len(micros) for micros in work)),
        "rl/pad_frac": 1.0 - num_tokens / num_slots if num_slots else 0.0,
    }
