"""The jitted steps of the rollout engine: prefill a chunk, decode several rounds, move rows.

A row is a response in progress. Its cache holds `length` tokens; `token` is the newest one and not yet in the
cache. A decode round appends `token`, and draws the next from the logits at its position. Prefill therefore
leaves the last prompt token out: the first round of each sibling handles it, with the sibling's own noise, in
the same program as every later token.

Programs take host-built `Rows` and return small arrays; the cache is donated and updated in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

from tlt_jax.models.cache import with_row_axis, without_row_axis
from tlt_jax.models.config import ModelConfig
from tlt_jax.models.transformer import compute_logits, forward_cached
from tlt_jax.rollout.memory import Memory, features_of, write_features
from tlt_jax.rollout.sampling import SamplingArrays, draw, warp
from tlt_jax.types import Params

MAX_STOP_IDS = 8  # static width of `Rows.stop_ids`


@struct.dataclass(kw_only=True)
class Rows:
    token: jax.Array  # i32[B] newest token, not in the cache
    length: jax.Array  # i32[B] tokens in the cache
    limit: jax.Array  # i32[B] total tokens at which the row ends
    live: jax.Array  # bool[B]
    stop_ids: jax.Array  # i32[B,MAX_STOP_IDS], -1 where unused
    sampling: SamplingArrays


@struct.dataclass(kw_only=True)
class DecodeOut:
    tokens: jax.Array  # i32[rounds,B], -1 where the row was not live
    logprobs: jax.Array  # f32[rounds,B]
    num_rounds: jax.Array  # i32[] rounds done


def prefill(
    params: Params,
    config: ModelConfig,
    feature_layers: Sequence[int],
    tokens_BT: jax.Array,
    start_B: jax.Array,
    memory: Memory,
) -> Memory:
    """Appends one chunk of T prompt tokens per row; no logits."""
    out, cache = forward_cached(params, config, tokens_BT, start_B, memory.target, feature_layers=feature_layers)
    features = write_features(memory, features_of(out), start_B)
    return dataclasses.replace(memory, target=cache, features=features)


def decode(
    params: Params,
    config: ModelConfig,
    feature_layers: Sequence[int],
    num_rounds: int,
    truncate: bool,
    memory: Memory,
    rows: Rows,
    max_rounds: jax.Array,
    exit_live: jax.Array,
) -> tuple[Memory, DecodeOut]:
    """Up to `max_rounds` plain decoding rounds, fewer if no more than `exit_live` rows are left alive.

    Args:
      params: target parameters.
      config: static.
      feature_layers: static; what a drafter reads of the target besides its last hidden state.
      num_rounds: static; rounds that the outputs have room for.
      truncate: static; whether any row uses top-k, top-p or min-p.
      memory: donated. The caller keeps `length + max_rounds <= S` for live rows.
      rows: host-built state.
      max_rounds: i32[] <= num_rounds.
      exit_live: i32[].
    """
    B = rows.token.shape[0]
    S = memory.target[0].k.shape[-1]

    def cond(carry):
        r, _, rows, _ = carry
        return (r < max_rounds) & (jnp.sum(rows.live, dtype=jnp.int32) > exit_live)

    def body(carry):
        r, memory, rows, out = carry
        # A dead row writes somewhere inside its own, no longer read, part of the cache.
        start_B = jnp.minimum(rows.length, S - 1)
        forward, cache = forward_cached(
            params, config, rows.token[:, None], start_B, memory.target, feature_layers=feature_layers
        )
        features = write_features(memory, features_of(forward), start_B)
        memory = dataclasses.replace(memory, target=cache, features=features)
        law_B1V = warp(compute_logits(params, config, forward.hidden), rows.sampling, truncate)
        token_B1, logprob_B1 = draw(law_B1V, rows.sampling, (rows.length + 1)[:, None])
        token_B, logprob_B = token_B1[:, 0], logprob_B1[:, 0]
        out = DecodeOut(
            tokens=out.tokens.at[r].set(jnp.where(rows.live, token_B, -1)),
            logprobs=out.logprobs.at[r].set(jnp.where(rows.live, logprob_B, 0.0)),
            num_rounds=r + 1,
        )
        length_B = rows.length + rows.live
        stopped_B = jnp.any(token_B[:, None] == rows.stop_ids, axis=1) | (length_B + 1 >= rows.limit)
        rows = rows.replace(
            token=jnp.where(rows.live, token_B, rows.token), length=length_B, live=rows.live & ~stopped_B
        )
        return r + 1, memory, rows, out

    empty = DecodeOut(
        tokens=jnp.full((num_rounds, B), -1, jnp.int32),
        logprobs=jnp.zeros((num_rounds, B), jnp.float32),
        num_rounds=jnp.int32(0),
    )
    if B == 1:
        memory = dataclasses.replace(memory, target=without_row_axis(memory.target))
    _, memory, _, out = jax.lax.while_loop(cond, body, (jnp.int32(0), memory, rows, empty))
    if B == 1:
        memory = dataclasses.replace(memory, target=with_row_axis(memory.target))
    return memory, out
