"""Training-time test: the drafter run on its own outputs, all rows of a sequence at once.

Step 0 is the plain forward. Step s gives row t the guess that step s-1 made at row t-1 in place of f_t, and lets it
attend to what a drafter that started at row t-s has in its cache: rows up to t-s with true features, then row t-s+i as
step i computed it. So `unroll(...)[s]` at row t is the (s+1)-th output of sequential drafting from row t-s along the
true tokens. Rows with fewer than s rows before them in their segment have no such start: their values are finite and
meaningless, and no valid row depends on them.

References:
  HASS (arXiv 2408.15766), section 3.2; EAGLE-3 (arXiv 2503.01840), figure 6. As in the latter, gradients flow through
  the fed-back outputs.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from tlt_jax.drafter.config import DraftConfig
from tlt_jax.drafter.model import apply_layer
from tlt_jax.models import layers
from tlt_jax.types import Params

# Query rows attended at a time: bounds the score matrix at [B,N,512,T].
_QUERY_BLOCK = 512


def unroll(
    draft_params: Params,
    target_params: Params,
    config: DraftConfig,
    features_BTD: jax.Array,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array,
    num_steps: int,
) -> jax.Array:
    """`num_steps` outputs of every row, h_UBTD; arguments as in `model.draft_forward`."""
    history: tuple[tuple[jax.Array, jax.Array], ...] = ()
    outputs: list[jax.Array] = []
    platform = layers.platform_of(config.layer)

    def step(inputs_BTD, history):
        def attend(q_BTNH, k_BTKH, v_BTKH):
            past = (*history, (k_BTKH, v_BTKH))
            return attend_unrolled(q_BTNH, past, segment_ids_BT, platform), past

        return apply_layer(draft_params, target_params, config, inputs_BTD, tokens_BT, positions_BT, attend)

    for _ in range(num_steps):
        inputs_BTD = shift_right(outputs[-1], 1) if outputs else features_BTD
        h_BTD, history = step(inputs_BTD, history)
        outputs.append(h_BTD)
    return jnp.stack(outputs)


def shift_right(x_BTx: jax.Array, num: int) -> jax.Array:
    """Row t becomes what row t-`num` was; zeros come in on the left."""
    if not num:
        return x_BTx
    return jnp.pad(x_BTx, [(0, 0), (num, 0)] + [(0, 0)] * (x_BTx.ndim - 2))[:, : x_BTx.shape[1]]


def valid_rows(mask_BT: jax.Array, segment_ids_BT: jax.Array, num_steps: int) -> jax.Array:
    """bool[U,B,T]: rows supervised at each step: t and its start t-s both are in the mask, in one segment."""
    rows = []
    for s in range(num_steps):
        same_BT = segment_ids_BT == shift_right(segment_ids_BT, s)
        rows.append(mask_BT & shift_right(mask_BT, s) & same_BT)
    return jnp.stack(rows)


def attend_unrolled(
    q_BTNH: jax.Array, past: tuple[tuple[jax.Array, jax.Array], ...], segment_ids_BT: jax.Array, platform: str
) -> jax.Array:
    """Attention of step s = len(past) - 1 over the true rows up to t-s and one guessed row of each later step.

    Args:
      q_BTNH: queries of step s.
      past: (k_BTKH, v_BTKH) of steps 0 to s.
      segment_ids_BT: 0 is padding.
      platform: of `layers.platform_of`.
    """
    (k_BTKH, v_BTKH), guesses = past[0], past[1:]
    if not guesses:
        return layers.attend_uncached(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, platform)
    B, T, N, H = q_BTNH.shape
    s = len(guesses)
    # Row t sees step i at row t - (s - i): the guesses of one start lie on a diagonal. U counts them from 1 to s.
    k_BTUKH, v_BTUKH = (
        jnp.stack([shift_right(pair[j], s - i) for i, pair in enumerate(guesses, 1)], axis=2) for j in (0, 1)
    )
    block = min(T, _QUERY_BLOCK)
    if T % block:
        block = T
    attend = functools.partial(
        _attend_block, num_guesses=s, k_BTKH=k_BTKH, v_BTKH=v_BTKH, segment_ids_BT=segment_ids_BT
    )
    if block == T:
        # Scores are recomputed in the backward pass, so that memory does not grow with the number of steps.
        return jax.checkpoint(attend)(q_BTNH, k_BTUKH, v_BTUKH, jnp.int32(0))

    def split(x):
        return x.reshape(B, T // block, block, *x.shape[2:]).swapaxes(0, 1)

    starts = jnp.arange(0, T, block, dtype=jnp.int32)
    blocks = (split(q_BTNH), split(k_BTUKH), split(v_BTUKH), starts)
    out_xBTNH = jax.lax.map(lambda args: jax.checkpoint(attend)(*args), blocks)
    return out_xBTNH.swapaxes(0, 1).reshape(B, T, N, H)


def _attend_block(
    q_BTNH: jax.Array,
    guess_k_BTUKH: jax.Array,
    guess_v_BTUKH: jax.Array,
    start: jax.Array,
    *,
    num_guesses: int,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array,
) -> jax.Array:
    """The queries at `start ...` over all true rows (S is their axis) and their own diagonals; softmax in f32."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BTKH.shape[1:3]
    last_T = start + jnp.arange(T) - num_guesses
    mask_BTS = (last_T[:, None] >= jnp.arange(S)[None, :])[None]
    query_segment_BT = jax.lax.dynamic_slice_in_dim(segment_ids_BT, start, T, axis=1)
    mask_BTS = mask_BTS & (query_segment_BT[:, :, None] == segment_ids_BT[:, None, :])
    q_BTKGH = (q_BTNH * H**-0.5).reshape(B, T, K, N // K, H)
    f32 = jnp.float32
    true_BKGTS = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BTKH, preferred_element_type=f32)
    true_BKGTS = jnp.where(mask_BTS[:, None, None], true_BKGTS, layers.MASKED)
    guess_BKGTU = jnp.einsum("btkgh,btukh->bkgtu", q_BTKGH, guess_k_BTUKH, preferred_element_type=f32)
    score = jnp.concatenate([true_BKGTS, guess_BKGTU], axis=-1)
    prob_BKGTS, prob_BKGTU = jnp.split(jax.nn.softmax(score, axis=-1).astype(v_BTKH.dtype), [S], axis=-1)
    out = jnp.einsum("bkgts,bskh->btkgh", prob_BKGTS, v_BTKH, preferred_element_type=f32)
    out += jnp.einsum("bkgtu,btukh->btkgh", prob_BKGTU, guess_v_BTUKH, preferred_element_type=f32)
    return out.reshape(B, T, N, H).astype(q_BTNH.dtype)
