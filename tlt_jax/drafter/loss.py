"""The drafter's training loss over packed rows of features.

Life of `draft_loss`:
1. `unroll` gives the drafter's outputs for every row and step; step s counts with `step_decay ** s`.
2. Feature loss (eagle): SmoothL1 between the output of row t and f_{t+1}.
3. Logit loss between the laws of token_{t+2}. The target's law is recomputed from its hidden state through its frozen
   head, never stored. Supervised rows are gathered to the front and worked off in chunks: prompt and padding rows cost
   nothing here, and no more than [chunk_rows, V] logits exist at a time. Gradients are taken in the forward pass, chunk
   by chunk, so that the backward pass needs no logits either.

Every term is a sum over supervised rows divided by their number in the whole optimizer step (`counts_U`), so that
micro-batches add up to the loss of their union.

Rows: row t is supervised if the mask says so. At step s so must be row t-s, where the run of drafts began.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.drafter import laws
from tlt_jax.drafter.config import DraftConfig
from tlt_jax.drafter.model import check_map, draft_head, mask_invalid, output_norm, target_head, to_target_ids
from tlt_jax.drafter.unroll import unroll, valid_rows
from tlt_jax.models import layers
from tlt_jax.types import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What the drafter is trained for.

    Attributes:
      num_steps: unroll steps; 1 is plain EAGLE, more is training-time test.
      step_decay: weight of step s is `step_decay ** s`.
      feature_weight: of SmoothL1 on features; 0 for the eagle3 form, which has no feature to match.
      logit_loss: one of `laws.LOSSES`.
      logit_weight: of the logit loss.
      temperature: of both laws; that of the rollouts whose drafts are to be accepted.
      full_target: normalise the target over its whole vocabulary where the draft vocabulary is smaller. Costs the
        target's whole head; without it the target's law is that of the ids the drafter can propose.
      chunk_rows: rows whose logits exist at a time.
    """

    num_steps: int = 1
    step_decay: float = 0.8
    feature_weight: float = 1.0
    logit_loss: str = "soft_ce"
    logit_weight: float = 0.1
    temperature: float = 1.0
    full_target: bool = False
    chunk_rows: int = 256

    def __post_init__(self):
        checks = (
            ("num_steps", self.num_steps >= 1, ">= 1"),
            ("step_decay", 0.0 < self.step_decay <= 1.0, "in (0, 1]"),
            ("feature_weight", self.feature_weight >= 0.0, ">= 0"),
            ("logit_loss", self.logit_loss in laws.LOSSES, f"one of {', '.join(laws.LOSSES)}"),
            ("logit_weight", self.logit_weight >= 0.0, ">= 0"),
            ("temperature", self.temperature > 0.0, "> 0: the drafts of a greedy rollout are trained at 1.0 as well"),
            ("chunk_rows", self.chunk_rows >= 1, ">= 1"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise ValueError(f"drafter.loss.{name}: got {getattr(self, name)!r}, expected {expected}")


PRESETS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "hass": {"num_steps": 3},
    "eagle3": {"num_steps": 7, "feature_weight": 0.0, "logit_weight": 1.0},
    "coupling": {"num_steps": 3, "logit_loss": "coupling", "logit_weight": 1.0},
}


def loss_preset(name: str, **overrides: Any) -> LossConfig:
    """A named recipe: `eagle`, `hass`, `eagle3`, or `coupling` (for drafter-invariant sampling)."""
    if name not in PRESETS:
        raise ValueError(f"drafter.loss: got preset {name!r}, expected one of {', '.join(PRESETS)}")
    return LossConfig(**(PRESETS[name] | overrides))


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

    frozen = _frozen(target_params, config, loss, d2t_V)
    rows = _Rows(
        hidden_MD=label_BTD.reshape(B * T, -1),
        label_M=_shift_left(batch.tokens).reshape(-1),
        valid_UM=valid_UBT.reshape(loss.num_steps, -1),
        scale_U=scale_U,
    )
    own = {name: draft_params[name] for name in ("final_norm", "head") if name in draft_params}
    h_UMD = h_UBTD.reshape(loss.num_steps, B * T, -1)
    logit_loss, sums = _head_loss((config, loss), h_UMD, own, frozen, rows)
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


class _Frozen(NamedTuple):
    """What the logits need besides trainable parameters."""

    head_VD: jax.Array | None  # eagle: rows of the target's head that the drafter uses
    target_VD: jax.Array  # target's head: the same rows, or all of them
    ids_V: jax.Array | None  # where target_VD has all rows: those of the draft vocabulary
    to_draft_V: jax.Array | None  # target id -> draft id, -1 outside


class _Rows(NamedTuple):
    """M = B*T rows; their labels, and where they count."""

    hidden_MD: jax.Array
    label_M: jax.Array  # target id
    valid_UM: jax.Array
    scale_U: jax.Array


def _frozen(target_params: Params, config: DraftConfig, loss: LossConfig, d2t_V: jax.Array | None) -> _Frozen:
    head_VD = None if config.form == "eagle3" else draft_head({}, target_params, config, d2t_V)
    full_VD = target_head(target_params, config)
    if d2t_V is None:
        return _Frozen(head_VD=head_VD, target_VD=full_VD, ids_V=None, to_draft_V=None)
    ids_V = to_target_ids(jnp.arange(config.draft_vocab_size, dtype=jnp.int32), d2t_V)
    index_V = jnp.arange(config.draft_vocab_size, dtype=jnp.int32)
    to_draft_V = jnp.full(config.target.vocab_size, -1, jnp.int32).at[ids_V].set(index_V)
    if loss.full_target:
        return _Frozen(head_VD=head_VD, target_VD=full_VD, ids_V=ids_V, to_draft_V=to_draft_V)
    kept_VD = jnp.take(full_VD, ids_V, axis=0) if head_VD is None else head_VD
    return _Frozen(head_VD=head_VD, target_VD=kept_VD, ids_V=None, to_draft_V=to_draft_V)


def _target_law(
    static: tuple[DraftConfig, LossConfig], hidden_CD: jax.Array, frozen: _Frozen
) -> tuple[jax.Array, jax.Array]:
    """Target's log-probabilities over the draft vocabulary, and its mass outside it."""
    config, loss = static
    platform = layers.platform_of(config.layer)
    logits_CV = layers.matmul(hidden_CD.astype(config.layer.dtype), frozen.target_VD, platform)
    logits_CV = mask_invalid(config, logits_CV)
    log_p_CV = jax.nn.log_softmax(logits_CV / loss.temperature, axis=-1)
    if frozen.ids_V is None:
        return log_p_CV, jnp.zeros(len(hidden_CD))
    log_p_CV = jnp.take(log_p_CV, frozen.ids_V, axis=-1)
    return log_p_CV, jnp.maximum(1.0 - jnp.sum(jnp.exp(log_p_CV), axis=-1), 0.0)


def _step_loss(
    h_CD: jax.Array,
    own: Params,
    static: tuple[DraftConfig, LossConfig],
    frozen: _Frozen,
    law: tuple[jax.Array, jax.Array],
    label_C: jax.Array,
    valid_C: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Summed logit loss of a chunk of rows at one step, and its measures."""
    config, loss = static
    head_VD = own["head"]["weight"] if own else frozen.head_VD
    logits_CV = _project(output_norm(own, config, h_CD), head_VD, layers.platform_of(config.layer))
    log_q_CV = jax.nn.log_softmax(mask_invalid(config, logits_CV) / loss.temperature, axis=-1)
    log_p_CV, outside_C = law
    loss_C = laws.row_loss(loss.logit_loss, log_p_CV, log_q_CV, outside_C, label_C)
    loss_sum = jnp.sum(jnp.where(valid_C, loss_C, 0.0))
    measures = laws.row_measures(log_p_CV, jax.lax.stop_gradient(log_q_CV), outside_C, label_C)
    measures = {name: jnp.where(valid_C, x_C, 0.0) for name, x_C in measures.items()}
    sums = {name: jnp.sum(x_C) for name, x_C in measures.items()}
    sums |= {"logit_loss": loss_sum, "rows": jnp.sum(valid_C, dtype=jnp.float32)}
    return loss_sum, sums | {"accept_rows": measures["accept"]}


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _project(h_CD: jax.Array, head_VD: jax.Array, platform: str) -> jax.Array:
    """f32 logits; the backward products run in the compute dtype, where autodiff would run them in f32."""
    return layers.matmul(h_CD, head_VD, platform)


def _project_bwd(platform, saved, g_CV):
    del platform
    h_CD, head_VD = saved
    g_CV = g_CV.astype(h_CD.dtype)
    f32 = jnp.float32
    dh_CD = jnp.einsum("cv,vd->cd", g_CV, head_VD.astype(h_CD.dtype), preferred_element_type=f32)
    dhead_VD = jnp.einsum("cv,cd->vd", g_CV, h_CD, preferred_element_type=f32)
    return dh_CD.astype(h_CD.dtype), dhead_VD.astype(head_VD.dtype)


_project.defvjp(lambda h, head, platform: (layers.matmul(h, head, platform), (h, head)), _project_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _head_loss(
    static: tuple[DraftConfig, LossConfig], h_UMD: jax.Array, own: Params, frozen: _Frozen, rows: _Rows
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """sum over steps and rows of scale * logit loss; measures as sums by step, `accept_rows` by row."""
    total, sums, _ = _work_off(static, h_UMD, own, frozen, rows, with_grads=False)
    return total, sums


def _head_loss_fwd(static, h_UMD, own, frozen, rows):
    total, sums, grads = _work_off(static, h_UMD, own, frozen, rows, with_grads=True)
    return (total, sums), grads


def _head_loss_bwd(static, grads, cotangents):
    del static
    dh_UMD, down = jax.tree.map(lambda g: (g * cotangents[0]).astype(g.dtype), grads)
    return dh_UMD, down, None, None


_head_loss.defvjp(_head_loss_fwd, _head_loss_bwd)


def _work_off(
    static: tuple[DraftConfig, LossConfig],
    h_UMD: jax.Array,
    own: Params,
    frozen: _Frozen,
    rows: _Rows,
    with_grads: bool,
):
    """Supervised rows in chunks; as many chunks as there are rows for."""
    U, M = h_UMD.shape[:2]
    C = min(static[1].chunk_rows, M)
    padded = -(-M // C) * C
    # Rows of step 0 include those of every later step.
    order_M = jnp.argsort(~rows.valid_UM[0], stable=True)
    order_M = jnp.pad(order_M, (0, padded - M), constant_values=M)  # reads past the end fill in zeros
    num_chunks = (jnp.sum(rows.valid_UM[0], dtype=jnp.int32) + C - 1) // C
    label_M = rows.label_M if frozen.to_draft_V is None else jnp.take(frozen.to_draft_V, rows.label_M)
    step_fn = jax.value_and_grad(_step_loss, argnums=(0, 1), has_aux=True) if with_grads else _step_loss

    def chunk(i, carry):
        index_C = jax.lax.dynamic_slice(order_M, (i * C,), (C,))
        law = _target_law(static, jnp.take(rows.hidden_MD, index_C, axis=0, mode="fill", fill_value=0), frozen)
        label_C = jnp.take(label_M, index_C, mode="fill", fill_value=0)

        def step(carry, u):
            total, sums, grads = carry
            h_CD = jnp.take(h_UMD[u], index_C, axis=0, mode="fill", fill_value=0)
            valid_C = jnp.take(rows.valid_UM[u], index_C, mode="fill", fill_value=False)
            out = step_fn(h_CD, own, static, frozen, law, label_C, valid_C)
            (loss, new), step_grads = out if with_grads else (out, None)
            total += loss * rows.scale_U[u]
            accept_C = new.pop("accept_rows")
            sums = {name: sums[name].at[u].add(x) for name, x in new.items()} | {
                "accept_rows": sums["accept_rows"].at[u, index_C].set(accept_C, mode="drop")
            }
            if with_grads:
                dh_UMD, down = grads
                dh_CD = (step_grads[0] * rows.scale_U[u]).astype(dh_UMD.dtype)
                dh_UMD = dh_UMD.at[u, index_C].set(dh_CD, mode="drop")
                down = jax.tree.map(lambda a, g: a + g * rows.scale_U[u], down, step_grads[1])
                grads = dh_UMD, down
            return (total, sums, grads), None

        return jax.lax.scan(step, carry, jnp.arange(U))[0]

    names = ("top1", "top3", "overlap", "accept", "logit_loss", "rows")
    sums = {name: jnp.zeros(U) for name in names} | {"accept_rows": jnp.zeros((U, M))}
    grads = (jnp.zeros_like(h_UMD), jax.tree.map(jnp.zeros_like, own)) if with_grads else ()
    return jax.lax.fori_loop(0, num_chunks, chunk, (jnp.float32(0.0), sums, grads))
