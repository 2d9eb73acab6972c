"""The policy-gradient loss of tokens whose log-probs are known: pure array functions.

`policy_loss` is one formula for every algorithm of `algorithms.py`. It returns a plain weighted sum over tokens, since
the weights already hold the denominators of the whole optimizer step: the loss and the gradient of a step are the sums
over its micro-batches and shards, whatever the cut.

Invariants:
  - Everything is f32: a ratio of bf16 log-probs is off by percents.
  - Masks are bool. Values at masked slots are replaced before `exp`, so that neither the value nor the gradient of a
    padded slot can be inf or NaN.
  - Log-ratios are bounded before `exp`: clipping afterwards gives a finite value whose gradient is inf * 0.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.rl.algorithms import AlgorithmConfig

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8, far beyond any clip range, far below the f32 overflow at 88
MAX_KL = 10.0  # bound of one token's k2 or k3


@flax.struct.dataclass(kw_only=True)
class TokenTerms:
    """Response tokens of a micro-batch; T counts response slots, rows may hold several responses."""

    logprobs: jax.Array  # f32[B,T] of the policy being trained
    entropies: jax.Array  # f32[B,T] of its next-token law
    old_logprobs: jax.Array  # f32[B,T] of the policy at the start of the step
    behaviour_logprobs: jax.Array  # f32[B,T] as the rollout recorded them
    ref_logprobs: jax.Array | None  # f32[B,T], None without a KL in the loss
    advantages: jax.Array  # f32[B,T]
    weights: jax.Array  # f32[B,T] see algorithms.py; 0 at padding
    mask: jax.Array  # bool[B,T] slots that take part
    segments: jax.Array  # i32[B,T] which response of its row a slot belongs to, from 0


def log_ratio(logprobs: jax.Array, old_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """Bounded new - old, 0 at masked slots; safe to put through `exp` in value and gradient."""
    difference = jnp.where(mask, logprobs - old_logprobs, 0.0)
    return jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_log_ratio(log_ratio_BT: jax.Array, mask_BT: jax.Array, segments_BT: jax.Array) -> jax.Array:
    """Mean log-ratio of a slot's own response, spread over its slots (GSPO, arXiv 2507.18071, eq. 7)."""
    num_segments = mask_BT.shape[1]  # a response has at least one slot

    def one_row(log_ratio_T, mask_T, segments_T):
        total_S = jax.ops.segment_sum(jnp.where(mask_T, log_ratio_T, 0.0), segments_T, num_segments)
        count_S = jax.ops.segment_sum(mask_T.astype(jnp.float32), segments_T, num_segments)
        return (total_S / jnp.maximum(count_S, 1.0))[segments_T]

    return jax.vmap(one_row)(log_ratio_BT, mask_BT, segments_BT)


def kl_estimate(logprobs: jax.Array, ref_logprobs: jax.Array, mask: jax.Array, estimator: str) -> jax.Array:
    """Per-token estimate of KL(policy || reference) from one sample, 0 at masked slots.

    With d = ref - policy: `k1` -d, unbiased, either sign; `k2` d^2 / 2, whose gradient is that of the KL;
    `k3` exp(d) - d - 1, unbiased and never negative. k2 and k3 are capped at `MAX_KL`, with gradient 0 beyond.

    References: Schulman, Approximating KL Divergence, 2020.
    """
    d = log_ratio(ref_logprobs, logprobs, mask)
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return jnp.minimum(0.5 * d * d, MAX_KL)
    if estimator == "k3":
        return jnp.minimum(jnp.exp(d) - d - 1.0, MAX_KL)
    raise ValueError(f"kl_estimator: got {estimator!r}, expected k1, k2 or k3")


def policy_loss(terms: TokenTerms, algo: AlgorithmConfig) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Weighted sum of token losses, and sums and maxima for metrics.

    Args:
      terms: the micro-batch's response tokens.
      algo: static.
    Returns:
      f32[] loss, and a dict of f32[]: keys `sum/*` add up over micro-batches, keys `max/*` take the maximum.
    Raises:
      ValueError: a mask that is not bool, log-probs that are not f32, or shapes that differ.
    """
    _check(terms)
    log_ratio_BT = log_ratio(terms.logprobs, terms.old_logprobs, terms.mask)
    if algo.ratio_level == "sequence":
        log_ratio_BT = sequence_log_ratio(log_ratio_BT, terms.mask, terms.segments)
    ratio_BT = jnp.exp(log_ratio_BT)
    pg_BT, clipped_BT, dual_clipped_BT = _clipped_surrogate(ratio_BT, terms.advantages, algo)
    # The gap is measured from the policy at the start of the step, so that it shows numerics, not learning.
    gap_BT = log_ratio(terms.old_logprobs, terms.behaviour_logprobs, terms.mask)
    tis_BT = jnp.ones_like(ratio_BT)
    if algo.tis_cap > 0.0:
        tis_BT = jax.lax.stop_gradient(jnp.minimum(jnp.exp(gap_BT), algo.tis_cap))
    token_loss_BT = pg_BT * tis_BT
    kl_BT = jnp.zeros_like(ratio_BT)
    if terms.ref_logprobs is not None:
        kl_BT = kl_estimate(terms.logprobs, terms.ref_logprobs, terms.mask, algo.kl_estimator)
        if algo.kl_in == "loss":
            token_loss_BT += algo.kl_coef * kl_BT
    if algo.entropy_coef > 0.0:
        token_loss_BT -= algo.entropy_coef * jnp.where(terms.mask, terms.entropies, 0.0)
    loss = jnp.sum(jnp.where(terms.mask, terms.weights * token_loss_BT, 0.0))

    def total(values_BT):
        return jnp.sum(jnp.where(terms.mask, values_BT.astype(jnp.float32), 0.0))

    metrics = {
        "sum/tokens": total(terms.mask),
        "sum/loss": loss,
        "sum/policy_loss": total(terms.weights * pg_BT * tis_BT),
        "sum/kl": total(kl_BT),
        "sum/entropy": total(terms.entropies),
        "sum/ratio": total(ratio_BT),
        "sum/clip": total(clipped_BT),
        "sum/dual_clip": total(dual_clipped_BT),
        "sum/gap": total(jnp.abs(gap_BT)),
        "sum/tis": total(tis_BT),
        "max/ratio": jnp.max(jnp.where(terms.mask, ratio_BT, 0.0)),
        "max/gap": jnp.max(jnp.abs(gap_BT)),
    }
    return loss, jax.lax.stop_gradient(metrics)


def _clipped_surrogate(ratio, advantages, algo: AlgorithmConfig):
    """PPO's pessimistic loss with optional dual clip, and where each clip is active."""
    free = -advantages * ratio
    bounded = -advantages * jnp.clip(ratio, 1.0 - algo.clip_low, 1.0 + algo.clip_high)
    loss = jnp.maximum(free, bounded)
    is_clipped = bounded > free
    is_dual_clipped = jnp.zeros_like(is_clipped)
    if algo.dual_clip > 0.0:
        ceiling = -advantages * algo.dual_clip
        is_dual_clipped = (advantages < 0.0) & (loss > ceiling)
        loss = jnp.where(is_dual_clipped, ceiling, loss)
    return loss, is_clipped, is_dual_clipped


def _check(terms: TokenTerms) -> None:
    if terms.mask.dtype != jnp.bool_:
        raise ValueError(f"mask: got {terms.mask.dtype}, expected bool; write `mask > 0`, or check the argument order")
    for name in [field.name for field in dataclasses.fields(terms)]:
        value = getattr(terms, name)
        if value is None or name in ("mask", "segments"):
            continue
        if value.dtype != jnp.float32:
            raise ValueError(f"{name}: got {value.dtype}, expected float32; compute the log-softmax from f32 logits")
        if value.shape != terms.mask.shape:
            raise ValueError(f"{name}: got shape {value.shape}, expected {terms.mask.shape} as the mask")
