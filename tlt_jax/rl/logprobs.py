"""Log-probs of response tokens under a policy, without ever holding the logits of a whole batch.

Life of a call: the network runs once over packed rows; the hidden states that predict response tokens are gathered; the
head then goes over them in chunks, in both directions, so that at most `head_tokens` rows of logits exist. Chunks in
which no row has a response token are skipped, so a batch pays for the response tokens it has.

The backward pass is written out: it recomputes the chunk's logits, and takes softmax minus one-hot straight into the
two products. It costs one product more than keeping all logits and no memory; its operands have the compute dtype,
sums are f32.

Invariants: logits, temperature, log-softmax and entropy are f32 (a bf16 log-softmax over 150k ids is off by 0.04);
slot i is the log-prob of the i-th response token; ids that the tokenizer does not have are outside the softmax.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tlt_jax.models.config import ModelConfig
from tlt_jax.models.transformer import compute_logits, forward
from tlt_jax.rl.batch import MicroBatch
from tlt_jax.types import Params


class HeadConfig(NamedTuple):
    """Static choices of the chunked head."""

    model: ModelConfig
    chunk: int  # slots of a row per chunk
    entropy_grad: bool  # whether the entropy is differentiated; its value is always there


def response_logprobs(
    params: Params,
    config: ModelConfig,
    micro: MicroBatch,
    temperature: jax.Array,
    *,
    head_tokens: int = 2048,
    remat: bool = False,
    is_packed: bool = True,
    entropy_grad: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies of the response tokens of a micro-batch.

    Args:
      params: the policy.
      config: static; `config.dtype` is the compute dtype of the network and of the head's products.
      micro: packed rows.
      temperature: f32[] > 0, divides the logits.
      head_tokens: rows of logits held at a time.
      remat: recompute each layer in the backward pass.
      is_packed: whether a row may hold several responses; if not, attention needs no segments.
      entropy_grad: whether gradients flow through the entropies.
    Returns:
      f32[B,T] natural-log probabilities and f32[B,T] entropies in nats, both 0 at slots not in use.
    """
    # Rows of one response are padded on the right, where causal attention never looks.
    segment_ids_BT = micro.segment_ids if is_packed else None
    out = forward(params, config, micro.tokens, micro.positions, segment_ids_BT=segment_ids_BT, remat=remat)
    hidden_BTD = jnp.take_along_axis(out.hidden, micro.slots[:, :, None], axis=1)
    weight_VD = params["embed" if config.tie_embeddings else "head"]["weight"]
    num_rows, width = micro.slots.shape
    head = HeadConfig(model=config, chunk=_chunk(width, head_tokens // num_rows), entropy_grad=entropy_grad)
    return head_logprobs(head, weight_VD, hidden_BTD, micro.targets, micro.mask, temperature)


def _chunk(width: int, wanted: int) -> int:
    """`width` halved until it is at most `wanted`."""
    chunk = width
    while chunk > max(wanted, 1) and chunk % 2 == 0:
        chunk //= 2
    return chunk


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def head_logprobs(head: HeadConfig, weight_VD, hidden_BTD, targets_BT, mask_BT, temperature):
    """Log-prob of each target and entropy of its law: f32[B,T] twice, 0 where the mask is off."""
    logprobs_BT, entropies_BT, _ = _scan_forward(head, weight_VD, hidden_BTD, targets_BT, mask_BT, temperature)
    return logprobs_BT, entropies_BT


def _scan_forward(head, weight_VD, hidden_BTD, targets_BT, mask_BT, temperature):
    weight_VD = weight_VD.astype(hidden_BTD.dtype)  # once, not once a chunk

    def score(hidden_BCD, targets_BC, mask_BC):
        logits_BCV = _logits(head, weight_VD, hidden_BCD, temperature)
        lse_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
        # A masked sum instead of a gather: it stays local where the vocabulary is split over devices.
        hit_BCV = targets_BC[..., None] == jnp.arange(logits_BCV.shape[-1], dtype=jnp.int32)
        logprobs_BC = jnp.sum(jnp.where(hit_BCV, logits_BCV, 0.0), axis=-1) - lse_BC
        mean_BC = jnp.sum(jnp.exp(logits_BCV - lse_BC[..., None]) * logits_BCV, axis=-1)
        return tuple(jnp.where(mask_BC, x_BC, 0.0) for x_BC in (logprobs_BC, lse_BC - mean_BC, lse_BC))

    def skip(hidden_BCD, targets_BC, mask_BC):
        return (jnp.zeros(mask_BC.shape, jnp.float32),) * 3

    def step(carry, xs):
        return carry, jax.lax.cond(jnp.any(xs[2]), score, skip, *xs)

    xs = tuple(_to_chunks(x, head.chunk) for x in (hidden_BTD, targets_BT, mask_BT))
    _, ys = jax.lax.scan(step, None, xs)
    return tuple(_from_chunks(y) for y in ys)


def _head_forward(head, weight_VD, hidden_BTD, targets_BT, mask_BT, temperature):
    logprobs_BT, entropies_BT, lse_BT = _scan_forward(head, weight_VD, hidden_BTD, targets_BT, mask_BT, temperature)
    saved = (weight_VD, hidden_BTD, targets_BT, mask_BT, temperature, entropies_BT, lse_BT)
    return (logprobs_BT, entropies_BT), saved


def _head_backward(head: HeadConfig, saved, cotangents):
    """With p the softmax: d logprob = onehot - p, d entropy = -p (log p + entropy), both over the temperature."""
    weight_VD, hidden_BTD, targets_BT, mask_BT, temperature, entropies_BT, lse_BT = saved
    dtype = hidden_BTD.dtype
    cast_VD = weight_VD.astype(dtype)

    def grad(d_weight_VD, hidden_BCD, targets_BC, mask_BC, entropies_BC, lse_BC, d_logprobs_BC, d_entropies_BC):
        logits_BCV = _logits(head, cast_VD, hidden_BCD, temperature)
        log_p_BCV = logits_BCV - lse_BC[..., None]
        p_BCV = jnp.exp(log_p_BCV)
        hit_BCV = targets_BC[..., None] == jnp.arange(logits_BCV.shape[-1], dtype=jnp.int32)
        d_logits_BCV = jnp.where(hit_BCV, d_logprobs_BC[..., None], 0.0) - d_logprobs_BC[..., None] * p_BCV
        if head.entropy_grad:
            # p is 0 at masked ids, whose log p is about -1e30: the product is 0.
            d_logits_BCV -= d_entropies_BC[..., None] * p_BCV * (log_p_BCV + entropies_BC[..., None])
        d_logits_BCV = jnp.where(mask_BC[..., None], d_logits_BCV / temperature, 0.0).astype(dtype)
        d_hidden_BCD = jnp.einsum("bcv,vd->bcd", d_logits_BCV, cast_VD, preferred_element_type=jnp.float32)
        d_weight_VD += jnp.einsum("bcv,bcd->vd", d_logits_BCV, hidden_BCD, preferred_element_type=jnp.float32)
        return d_weight_VD, d_hidden_BCD.astype(dtype)

    def skip(d_weight_VD, hidden_BCD, *_):
        return d_weight_VD, jnp.zeros_like(hidden_BCD)

    def step(d_weight_VD, xs):
        return jax.lax.cond(jnp.any(xs[2]), grad, skip, d_weight_VD, *xs)

    xs = (hidden_BTD, targets_BT, mask_BT, entropies_BT, lse_BT, *cotangents)
    xs = tuple(_to_chunks(x, head.chunk) for x in xs)
    d_weight_VD, d_hidden = jax.lax.scan(step, jnp.zeros(weight_VD.shape, jnp.float32), xs)
    return d_weight_VD.astype(weight_VD.dtype), _from_chunks(d_hidden), None, None, None


head_logprobs.defvjp(_head_forward, _head_backward)


def _logits(head: HeadConfig, weight_VD, hidden_BCD, temperature):
    """f32 logits over the temperature; ids beyond the tokenizer are masked by `compute_logits`."""
    params = {"embed" if head.model.tie_embeddings else "head": {"weight": weight_VD}}
    return compute_logits(params, head.model, hidden_BCD) / temperature


def _to_chunks(x_BTx: jax.Array, chunk: int) -> jax.Array:
    """[B,T,...] to [T/chunk,B,chunk,...]."""
    num_rows, width = x_BTx.shape[:2]
    return x_BTx.reshape(num_rows, width // chunk, chunk, *x_BTx.shape[2:]).swapaxes(0, 1)


def _from_chunks(x_nBCx: jax.Array) -> jax.Array:
    """The inverse of `_to_chunks`."""
    num_chunks, num_rows, chunk = x_nBCx.shape[:3]
    return x_nBCx.swapaxes(0, 1).reshape(num_rows, num_chunks * chunk, *x_nBCx.shape[3:])
