"""The drafter's training loss over packed rows of features.

Life of `draft_loss`:
1. `unroll` gives the drafter's outputs for every row and step; step s counts with `step_decay ** s`.
2. Feature loss (eagle): SmoothL1 between the output of row t and f_{t+1}.
3. Logit loss between the laws of token_{t+2}: `head_loss`. The target's law is recomputed from its hidden state
   through its frozen head, never stored.

Every term is a sum over supervised rows divided by their number in the whole optimizer step (`counts_U`), so that
micro-batches add up to the loss of their union.

Rows: row t is supervised if the mask says so. At step s so must be row t-s, where the run of drafts began.
"""

from __future__ import annotations

from typing import Any, cast

import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.drafter.config import DraftConfig, LossConfig
from tlt_jax.drafter.head_loss import Rows, gather_frozen, head_loss
from tlt_jax.drafter.model import check_map
from tlt_jax.drafter.unroll import unroll, valid_rows
from tlt_jax.types import Params


@flax.struct.dataclass(kw_only=True)
class DraftBatch:
    """Packed rows. Row t of a segment pairs f_t with token_{t+1}; its labels stand in row t+1."""

    features: jax.Array  # [B,T,feature_size] f_t
    tokens: jax.Array  # i32[B,T] token_{t+1}
    positions: jax.Array  # i32[B,T] t
    segment_ids: jax.Array  # i32[B,T], 0 is padding
    mask: jax.Array  # bool[B,T] supervised: f_{t+1} and token_{t+2} exist and belong to the response
    hidden: jax.Array | None = None  # [B,T,D] target's state after its final norm; None in eagle: features are that


def count_rows(mask_xBT: jax.Array, segment_ids_xBT: jax.Array, num_steps: int) -> jax.Array:
    """f32[U], supervised rows of each step over all micro-batches of an optimizer step."""
    T = mask_xBT.shape[-1]
    valid_UBT = valid_rows(mask_xBT.reshape(-1, T), segment_ids_xBT.reshape(-1, T), num_steps)
    return jnp.sum(valid_UBT, axis=(1, 2), dtype=jnp.float32)


def draft_loss(
    draft_params: Params,
    target_params: Params,
    config: DraftConfig,
    loss: LossConfig,
    batch: DraftBatch,
    counts_U: jax.Array,
    d2t_V: jax.Array | None = None,
    noise_BTD: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of one micro-batch, as its share of the optimizer step's loss.

    Args:
      draft_params: what is differentiated.
      target_params: the target's parameters, or `frozen_params` of them; get no gradient.
      config: static.
      loss: static.
      batch: the rows.
      counts_U: `count_rows` of the whole optimizer step.
      d2t_V: map of a reduced draft vocabulary.
      noise_BTD: added to the features that go in, not to those that are labels.

    Returns:
      The loss f32[], and sums over the rows of this micro-batch by step, f32[U]: `rows`, `feature_loss`,
      `logit_loss` (both unweighted) and those of `laws.row_measures`; and `accept_rows` f32[U,B,T].

    References:
      EAGLE (arXiv 2401.15077) eq. 6-8, HASS (arXiv 2408.15766), EAGLE-3 (arXiv 2503.01840). Departure: each step is
      divided by its own number of rows.
    """
    check_map(config, d2t_V)
    _check_form(config, loss, batch)
    B, T = batch.tokens.shape
    clean_BTD = jax.lax.stop_gradient(batch.features)
    inputs_BTD = clean_BTD if noise_BTD is None else clean_BTD + noise_BTD.astype(clean_BTD.dtype)
    h_UBTD = unroll(
        *(draft_params, target_params, config, inputs_BTD, batch.tokens),
        *(batch.positions, batch.segment_ids, loss.num_steps),
    )
    hidden_BTD = clean_BTD if batch.hidden is None else jax.lax.stop_gradient(batch.hidden)
    label_BTD = _shift_left(hidden_BTD)
    valid_UBT = valid_rows(batch.mask, batch.segment_ids, loss.num_steps)
    scale_U = loss.step_decay ** jnp.arange(loss.num_steps) / jnp.maximum(counts_U, 1.0)

    frozen = gather_frozen(target_params, config, loss, d2t_V)
    rows = Rows(
        hidden_MD=label_BTD.reshape(B * T, -1),
        label_M=_shift_left(batch.tokens).reshape(-1),
        valid_UM=valid_UBT.reshape(loss.num_steps, -1),
        scale_U=scale_U,
    )
    own = {name: draft_params[name] for name in ("final_norm", "head") if name in draft_params}
    h_UMD = h_UBTD.reshape(loss.num_steps, B * T, -1)
    logit_loss, sums = cast(Any, head_loss((config, loss), h_UMD, own, frozen, rows))
    sums["accept_rows"] = sums["accept_rows"].reshape(valid_UBT.shape)
    total = loss.logit_weight * logit_loss
    if loss.feature_weight:
        feature_UBT = _smooth_l1(h_UBTD, label_BTD)
        feature_U = jnp.sum(jnp.where(valid_UBT, feature_UBT, 0.0), axis=(1, 2))
        total += loss.feature_weight * jnp.sum(feature_U * scale_U)
        sums["feature_loss"] = jax.lax.stop_gradient(feature_U)
    return total, sums


def _check_form(config: DraftConfig, loss: LossConfig, batch: DraftBatch) -> None:
    if config.form == "eagle3" and (loss.feature_weight or batch.hidden is None):
        raise ValueError(
            f"drafter.loss: got feature_weight {loss.feature_weight} and a batch "
            f"{'without' if batch.hidden is None else 'with'} hidden states for the eagle3 form, expected 0 and with: "
            "its features are not what it predicts"
        )


def _smooth_l1(h_xD: jax.Array, label_xD: jax.Array) -> jax.Array:
    """Mean over the width, in f32."""
    gap = jnp.abs(h_xD.astype(jnp.float32) - label_xD.astype(jnp.float32))
    return jnp.mean(jnp.where(gap < 1.0, 0.5 * gap * gap, gap - 0.5), axis=-1)


def _shift_left(x_BTx: jax.Array) -> jax.Array:
    """Row t becomes what row t+1 was; the last row becomes zero and is never supervised."""
    return jnp.pad(x_BTx[:, 1:], [(0, 0), (0, 1)] + [(0, 0)] * (x_BTx.ndim - 2))
