"""How close a drafter's law is to the target's: losses and measures of single rows, given log-probabilities.

Acceptance under drafter-invariant sampling. Target and drafter take the arg-max of their log-probabilities plus the
same Gumbel noise. Both draw x with probability 1 / sum_y max(p_y / p_x, q_y / q_x), so given that the target drew x the
draft is accepted with

    a(x) = 1 / sum_y max(p_y, q_y p_x / q_x),

which needs no sort and no noise. Over x ~ p its mean is the acceptance rate; along a recorded response its product is
the chance that a run of drafts is accepted. `-log a(x)` is the loss made for this sampler: like a hard cross-entropy,
log(p_x / q_x), where the drafter is far off, and flat where it is right.

Laws are over the draft vocabulary. The target's may have mass `outside` it, in ids that the drafter cannot propose.

References:
  Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv 2408.07978.
  "LK Losses: Direct Acceptance Rate Optimization for Speculative Decoding", arXiv 2602.23881.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

LOSSES = ("soft_ce", "tv", "lk", "log_overlap", "coupling")
_LK_RATE = 3.0  # how fast the lk loss leaves KL for total variation as the overlap grows
_TINY = 1e-12


def overlap(log_p_xV: jax.Array, log_q_xV: jax.Array) -> jax.Array:
    """sum_x min(p, q): one minus total variation, the acceptance rate of classical rejection."""
    return jnp.sum(jnp.exp(jnp.minimum(log_p_xV, log_q_xV)), axis=-1)


def log_accept(log_p_xV: jax.Array, log_q_xV: jax.Array, outside_x: jax.Array, label_x: jax.Array) -> jax.Array:
    """log a(x) of the token that the target drew.

    Args:
      log_p_xV: target, f32.
      log_q_xV: drafter, normalised.
      outside_x: target's mass outside the draft vocabulary.
      label_x: draft id of the token drawn; any id where it is outside, and the result means nothing there.
    """
    pick = label_x[..., None]
    log_p = jnp.take_along_axis(log_p_xV, pick, axis=-1)
    log_q = jnp.take_along_axis(log_q_xV, pick, axis=-1)
    inside = jax.nn.logsumexp(jnp.maximum(log_p_xV, log_q_xV + (log_p - log_q)), axis=-1)
    return -jnp.logaddexp(inside, jnp.log(jnp.maximum(outside_x, _TINY)))


def row_loss(
    kind: str, log_p_xV: jax.Array, log_q_xV: jax.Array, outside_x: jax.Array, label_x: jax.Array
) -> jax.Array:
    """Loss of each row; 0 for `coupling` where the label (< 0) is outside the draft vocabulary.

    Kinds:
      soft_ce: -sum p log q.
      tv: total variation, 1 - sum min(p, q). Its gradient vanishes where the laws do not overlap: for fine-tuning.
      lk: w KL(p, q) + (1 - w) TV with w = exp(-3 sum min(p, q)), held constant.
      log_overlap: -log sum min(p, q).
      coupling: -log a(x), of the token drawn.
    """
    if kind == "soft_ce":
        return -jnp.sum(jnp.exp(log_p_xV) * log_q_xV, axis=-1)
    if kind == "coupling":
        loss_x = -log_accept(log_p_xV, log_q_xV, outside_x, jnp.maximum(label_x, 0))
        return jnp.where(label_x >= 0, loss_x, 0.0)
    overlap_x = overlap(log_p_xV, log_q_xV)
    if kind == "tv":
        return 1.0 - overlap_x
    if kind == "log_overlap":
        return -jnp.log(jnp.maximum(overlap_x, _TINY))
    assert kind == "lk", kind
    weight_x = jnp.exp(-_LK_RATE * jax.lax.stop_gradient(overlap_x))
    kl_x = jnp.sum(jnp.exp(log_p_xV) * (log_p_xV - log_q_xV), axis=-1)
    return weight_x * kl_x + (1.0 - weight_x) * (1.0 - overlap_x)


def row_measures(
    log_p_xV: jax.Array, log_q_xV: jax.Array, outside_x: jax.Array, label_x: jax.Array
) -> dict[str, jax.Array]:
    """What the logs show of each row, all in [0, 1].

    Returns:
      `top1`, `top3`: the target's likeliest token of the draft vocabulary is the drafter's, or among its three.
      `overlap`: of the two laws.
      `accept`: a(x) of the token drawn, 0 where it is outside the draft vocabulary.
    """
    # Ranks by counting: arg-max and top-k are slow on CPU.
    is_top = log_p_xV == jnp.max(log_p_xV, axis=-1, keepdims=True)
    best_x1 = jnp.max(jnp.where(is_top, log_q_xV, -jnp.inf), axis=-1, keepdims=True)
    rank_x = jnp.sum(log_q_xV > best_x1, axis=-1)
    accept_x = jnp.exp(log_accept(log_p_xV, log_q_xV, outside_x, jnp.maximum(label_x, 0)))
    return {
        "top1": (rank_x == 0).astype(jnp.float32),
        "top3": (rank_x < 3).astype(jnp.float32),
        "overlap": overlap(log_p_xV, log_q_xV),
        "accept": jnp.where(label_x >= 0, accept_x, 0.0),
    }
