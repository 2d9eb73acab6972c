"""From logits to a token and its log-probability, the same way wherever a token is drawn.

Order: temperature, top-k, top-p (on what top-k left), min-p; then `argmax(law + Gumbel noise)`. Temperature 0 is the
plain arg-max of the logits, and its log-probabilities are those at temperature 1. All rows of a batch may differ.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from tlt_jax.models.layers import MASKED
from tlt_jax.rollout.noise import gumbel


@struct.dataclass(kw_only=True)
class SamplingArrays:
    """`SamplingParams` of a batch of rows, and each row's noise key."""

    key: jax.Array  # u32[B,2]
    temperature: jax.Array  # f32[B]
    top_k: jax.Array  # i32[B], 0 keeps all
    top_p: jax.Array  # f32[B]
    min_p: jax.Array  # f32[B]


def argmax(x_xV: jax.Array) -> jax.Array:
    """First index of the maximum over the last axis, i32.

    `jnp.argmax` lowers to a scalar two-operand reduction on CPU, about 30 times slower than this.
    """
    top_x1 = jnp.max(x_xV, axis=-1, keepdims=True)
    index_V = jnp.arange(x_xV.shape[-1], dtype=jnp.int32)
    first = jnp.min(jnp.where(x_xV == top_x1, index_V, x_xV.shape[-1]), axis=-1)
    return jnp.minimum(first, x_xV.shape[-1] - 1)  # a row of NaN stays in range


def warp(logits_BTV: jax.Array, sampling: SamplingArrays, truncate: bool) -> jax.Array:
    """Logits of the law that tokens are drawn from; removed tokens are at `MASKED`.

    Args:
      logits_BTV: f32.
      sampling: per row.
      truncate: static; False skips the sort that top-k and top-p need.
    """
    temperature_B11 = sampling.temperature[:, None, None]
    scaled_BTV = logits_BTV / jnp.where(temperature_B11 > 0, temperature_B11, 1.0)
    return _truncate(scaled_BTV, sampling) if truncate else scaled_BTV


def _truncate(scaled_BTV: jax.Array, sampling: SamplingArrays) -> jax.Array:
    V = scaled_BTV.shape[-1]
    descending_BTV = -jnp.sort(-scaled_BTV, axis=-1)
    k_B11 = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, V), V)[:, None, None]
    rank_V = jnp.arange(V, dtype=jnp.int32)
    descending_BTV = jnp.where(rank_V < k_B11, descending_BTV, MASKED)
    prob_BTV = jax.nn.softmax(descending_BTV, axis=-1)
    mass_before_BTV = jnp.cumsum(prob_BTV, axis=-1) - prob_BTV
    min_p_B11 = sampling.min_p[:, None, None]
    top_p_B11 = sampling.top_p[:, None, None]
    # A running f32 sum reaches 1 before the last token does: 1.0 must keep all by itself.
    keep_BTV = (mass_before_BTV < top_p_B11) | (top_p_B11 >= 1.0)
    keep_BTV &= prob_BTV >= min_p_B11 * prob_BTV[..., :1]
    keep_BTV = (keep_BTV | (rank_V == 0)) & (rank_V < k_B11)
    # Tokens that tie with the last one kept stay too: which of them came first in the sort means nothing.
    threshold_BT1 = jnp.min(jnp.where(keep_BTV, descending_BTV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled_BTV >= threshold_BT1, scaled_BTV, MASKED)


def draw(law_BTV: jax.Array, sampling: SamplingArrays, position_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The token of each row at each position, and its log-probability.

    Args:
      law_BTV: warped logits, from `warp`.
      sampling: per row.
      position_BT: absolute position of the token to draw.

    Returns:
      tokens i32[B,T] and natural-log probabilities f32[B,T].
    """
    return draw_with(law_BTV, sampling, position_noise(sampling, position_BT, law_BTV.shape[-1]))


def position_noise(
    sampling: SamplingArrays, position_BT: jax.Array, vocab_size: int, stream_BT: jax.Array | None = None
) -> jax.Array:
    """The noise f32[B,T,V] of each row's own request at each absolute position; streams as in `noise.gumbel`."""
    key_BT2 = jnp.broadcast_to(sampling.key[:, None], (*position_BT.shape, 2))
    return gumbel(key_BT2, position_BT, vocab_size, stream_BT)


def draw_with(law_BTV: jax.Array, sampling: SamplingArrays, noise_BTV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `draw`, for a caller that has the noise already."""
    hot_B11 = (sampling.temperature > 0)[:, None, None]
    token_BT = argmax(jnp.where(hot_B11, law_BTV + noise_BTV, law_BTV))
    chosen_BT = jnp.take_along_axis(law_BTV, token_BT[..., None], axis=-1)[..., 0]
    return token_BT, chosen_BT - jax.nn.logsumexp(law_BTV, axis=-1)
