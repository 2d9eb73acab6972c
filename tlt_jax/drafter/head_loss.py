"""The logit loss of many rows through large heads, in bounded memory.

Life of `head_loss`:
1. Supervised rows are gathered to the front: rows of prompts and padding cost nothing here.
2. They are worked off in chunks, as many as there are rows for; no more than [chunk_rows, V] logits exist at a time.
   A chunk's target law serves all unroll steps.
3. Gradients are taken in the same pass, chunk by chunk: the backward pass only scales them, and needs no logits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from tlt_jax.drafter import laws
from tlt_jax.drafter.config import DraftConfig, LossConfig
from tlt_jax.drafter.model import draft_head, mask_invalid, output_norm, target_head, to_target_ids
from tlt_jax.models import layers
from tlt_jax.types import Params

Static = tuple[DraftConfig, LossConfig]
_SUMS = ("top1", "top3", "overlap", "accept", "logit_loss", "rows")


class Frozen(NamedTuple):
    """What the logits need besides trainable parameters."""

    head_VD: jax.Array | None  # eagle: rows of the target's head that the drafter uses
    target_VD: jax.Array  # target's head: the same rows, or all of them
    ids_V: jax.Array | None  # where target_VD has all rows: those of the draft vocabulary
    to_draft_V: jax.Array | None  # target id -> draft id, -1 outside


class Rows(NamedTuple):
    """M = B*T rows; their labels, and where they count."""

    hidden_MD: jax.Array
    label_M: jax.Array  # target id
    valid_UM: jax.Array
    scale_U: jax.Array


def gather_frozen(target_params: Params, config: DraftConfig, loss: LossConfig, d2t_V: jax.Array | None) -> Frozen:
    """Takes the rows of the target's head that the loss needs, once for all chunks."""
    head_VD = None if config.form == "eagle3" else draft_head({}, target_params, config, d2t_V)
    full_VD = target_head(target_params, config)
    if d2t_V is None:
        return Frozen(head_VD=head_VD, target_VD=full_VD, ids_V=None, to_draft_V=None)
    ids_V = to_target_ids(jnp.arange(config.draft_vocab_size, dtype=jnp.int32), d2t_V)
    index_V = jnp.arange(config.draft_vocab_size, dtype=jnp.int32)
    to_draft_V = jnp.full(config.target.vocab_size, -1, jnp.int32).at[ids_V].set(index_V)
    if loss.full_target:
        return Frozen(head_VD=head_VD, target_VD=full_VD, ids_V=ids_V, to_draft_V=to_draft_V)
    kept_VD = jnp.take(full_VD, ids_V, axis=0) if head_VD is None else head_VD
    return Frozen(head_VD=head_VD, target_VD=kept_VD, ids_V=None, to_draft_V=to_draft_V)


def _target_law(static: Static, hidden_CD: jax.Array, frozen: Frozen) -> tuple[jax.Array, jax.Array]:
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
    static: Static,
    frozen: Frozen,
    law: tuple[jax.Array, jax.Array],
    label_C: jax.Array,
    valid_C: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Summed logit loss of a chunk of rows at one step, and its measures."""
    config, loss = static
    head_VD = own["head"]["weight"] if own else frozen.head_VD
    logits_CV = _project(output_norm(own, config, h_CD), head_VD, layers.platform_of(config.layer))
    logits_CV = mask_invalid(config, cast(jax.Array, logits_CV))
    log_q_CV = jax.nn.log_softmax(logits_CV / loss.temperature, axis=-1)
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
def head_loss(
    static: Static, h_UMD: jax.Array, own: Params, frozen: Frozen, rows: Rows
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """sum over steps and rows of scale * logit loss; measures as sums by step, `accept_rows` by row."""
    sums = _work_off(static, h_UMD, own, frozen, rows, with_grads=False)
    return sums.total, sums.measures


def _head_loss_fwd(static, h_UMD, own, frozen, rows):
    sums = _work_off(static, h_UMD, own, frozen, rows, with_grads=True)
    return (sums.total, sums.measures), sums.grads


def _head_loss_bwd(static, grads, cotangents):
    del static
    dh_UMD, down = jax.tree.map(lambda g: (g * cotangents[0]).astype(g.dtype), grads)
    return dh_UMD, down, None, None


head_loss.defvjp(_head_loss_fwd, _head_loss_bwd)


class _Sums(NamedTuple):
    """What the chunks add up to."""

    total: jax.Array  # the loss
    measures: dict[str, jax.Array]  # f32[U] each, and accept_rows f32[U,M]
    grads: Any  # of (h_UMD, own), or None


def _work_off(static: Static, h_UMD: jax.Array, own: Params, frozen: Frozen, rows: Rows, with_grads: bool) -> _Sums:
    """Supervised rows in chunks; as many chunks as there are rows for."""
    U, M = h_UMD.shape[:2]
    C = min(static[1].chunk_rows, M)
    # Rows of step 0 include those of every later step.
    order_M = jnp.argsort(~rows.valid_UM[0], stable=True)
    order_M = jnp.pad(order_M, (0, -M % C), constant_values=M)  # reads past the end fill in zeros
    num_chunks = (jnp.sum(rows.valid_UM[0], dtype=jnp.int32) + C - 1) // C
    if frozen.to_draft_V is not None:
        rows = rows._replace(label_M=jnp.take(frozen.to_draft_V, rows.label_M))
    measures = {name: jnp.zeros(U) for name in _SUMS} | {"accept_rows": jnp.zeros((U, M))}
    grads = (jnp.zeros_like(h_UMD), jax.tree.map(jnp.zeros_like, own)) if with_grads else None

    def chunk(i, sums):
        index_C = jax.lax.dynamic_slice(order_M, (i * C,), (C,))
        return _add_chunk(static, h_UMD, own, frozen, rows, index_C, sums)

    empty = _Sums(total=jnp.float32(0.0), measures=measures, grads=grads)
    return jax.lax.fori_loop(0, num_chunks, chunk, empty)


def _add_chunk(
    static: Static, h_UMD: jax.Array, own: Params, frozen: Frozen, rows: Rows, index_C: jax.Array, sums: _Sums
) -> _Sums:
    """Adds the rows `index_C`, all steps."""
    law = _target_law(static, jnp.take(rows.hidden_MD, index_C, axis=0, mode="fill", fill_value=0), frozen)
    label_C = jnp.take(rows.label_M, index_C, mode="fill", fill_value=0)

    def step(sums, u):
        h_CD = jnp.take(h_UMD[u], index_C, axis=0, mode="fill", fill_value=0)
        valid_C = jnp.take(rows.valid_UM[u], index_C, mode="fill", fill_value=False)
        args = (h_CD, own, static, frozen, law, label_C, valid_C)
        scale = rows.scale_U[u]
        grads = None
        if sums.grads is None:
            loss, new = _step_loss(*args)
        else:
            (loss, new), (dh_CD, down) = jax.value_and_grad(_step_loss, argnums=(0, 1), has_aux=True)(*args)
            dh_UMD = sums.grads[0].at[u, index_C].set((dh_CD * scale).astype(h_UMD.dtype), mode="drop")
            grads = dh_UMD, jax.tree.map(lambda a, g: a + g * scale, sums.grads[1], down)
        measures = {name: sums.measures[name].at[u].add(new[name]) for name in _SUMS}
        measures["accept_rows"] = sums.measures["accept_rows"].at[u, index_C].set(new["accept_rows"], mode="drop")
        return _Sums(total=sums.total + loss * scale, measures=measures, grads=grads), None

    return jax.lax.scan(step, sums, jnp.arange(len(h_UMD)))[0]
