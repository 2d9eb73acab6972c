"""The classical rule: accept a drawn draft with probability p/q, else draw from what the target has over the drafter.

A reference for the coupled rule, and for comparison: it keeps the target's law, not the tokens of plain decoding. q is
the law that the draft was really drawn from, one-hot for drafts that nobody drew (n-grams). Draft, acceptance test,
residual and bonus have noise streams of their own, numbered by what they are for and where their round began: no bits
are ever used twice.

References:
  Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023, algorithm 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tlt_jax.models.layers import MASKED
from tlt_jax.rollout.sampling import SamplingArrays, argmax, position_noise
from tlt_jax.rollout.tree import Tree, Verdict

DRAFT, TEST, RESIDUAL, BONUS = 1, 2, 3, 4
_KINDS = 8


def stream(kind: int, position_BT: jax.Array, start_B: jax.Array) -> jax.Array:
    """u32[B,T], the stream of `kind` in the round that began with `start_B` tokens in the cache; never 0."""
    number_B1 = (kind + _KINDS * start_B.astype(jnp.uint32))[:, None]
    return jnp.broadcast_to(number_B1, position_BT.shape).astype(jnp.uint32)


def accept(
    tree: Tree, law_BWV: jax.Array, sampling: SamplingArrays, position_BW: jax.Array, start_B: jax.Array
) -> Verdict:
    """The verdict over a chain.

    Args:
      tree: a chain; without `log_q` its drafts count as certain ones.
      law_BWV: warped logits at every node.
      sampling: per row.
      position_BW: absolute position of the token after each node.
      start_B: tokens in the cache before the round.
    """
    B, W, V = law_BWV.shape
    log_p_BWV = jax.nn.log_softmax(law_BWV, axis=-1)
    hot_B1 = (sampling.temperature > 0)[:, None]
    drafts_BD = tree.tokens[:, 1:]
    one_hot_BDV = jnp.where(jax.nn.one_hot(drafts_BD, V, dtype=bool), 0.0, MASKED)
    log_q_BDV = one_hot_BDV if tree.log_q is None else tree.log_q

    def noise(kind: int, size: int) -> jax.Array:
        return position_noise(sampling, position_BW, size, stream(kind, position_BW, start_B))

    def of_drafts(x_BDV: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x_BDV, drafts_BD[..., None], axis=2)[..., 0]

    log_u_BD = -jnp.exp(-noise(TEST, 1)[:, :-1, 0])  # of a uniform number
    passes_BD = log_u_BD < of_drafts(log_p_BWV[:, :-1]) - of_drafts(log_q_BDV)
    greedy_BW = argmax(law_BWV)
    passes_BD = jnp.where(hot_B1, passes_BD, drafts_BD == greedy_BW[:, :-1]) & tree.valid[:, 1:]
    num_accepted_B = jnp.sum(jnp.cumprod(passes_BD, axis=1, dtype=jnp.int32), axis=1)
    rest_BDV = jnp.maximum(jnp.exp(log_p_BWV[:, :-1]) - jnp.exp(log_q_BDV), 0.0)
    # A draft that was never proposed leaves nothing to subtract.
    rest_BDV = jnp.where(tree.valid[:, 1:, None], rest_BDV, jnp.exp(log_p_BWV[:, :-1]))
    residual_BD = argmax(jnp.where(rest_BDV > 0, jnp.log(rest_BDV), MASKED) + noise(RESIDUAL, V)[:, :-1])
    bonus_B = argmax(log_p_BWV[:, -1] + noise(BONUS, V)[:, -1])
    own_BW = jnp.where(hot_B1, jnp.concatenate([residual_BD, bonus_B[:, None]], axis=1), greedy_BW)
    index_W = jnp.arange(W, dtype=jnp.int32)
    next_BW = jnp.concatenate([drafts_BD, own_BW[:, -1:]], axis=1)
    tokens_BW = jnp.where(index_W < num_accepted_B[:, None], next_BW, own_BW)
    return Verdict(
        path=jnp.broadcast_to(index_W, (B, W)),
        num_committed=num_accepted_B + 1,
        tokens=tokens_BW,
        logprobs=jnp.take_along_axis(log_p_BWV, tokens_BW[..., None], axis=2)[..., 0],
    )
