"""Linen building blocks, and the products and attentions that are chosen by platform.

Weights are stored as Hugging Face stores them, [out, in]. Norms, softmax and logits are f32 whatever the
compute dtype: bf16 log-probabilities of a 150k vocabulary are off by up to 0.04.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from tlt_jax.models.config import ModelConfig, rope_frequencies

MASKED = -1e30  # finite, so that a fully masked row gives numbers and not NaN

# Up to this many rows a product is bound by reading the weight, and XLA:CPU is 2-3x faster with the
# weight as the left operand.
_THIN_ROWS = 64
# Query rows attended at a time in the uncached forward: bounds the score matrix at [B,N,512,T].
_QUERY_BLOCK = 512


def platform_of(config: ModelConfig) -> str:
    """The platform whose kernels are traced: the configured one, or the default backend."""
    return config.platform or jax.default_backend()


def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`einsum(spec, a, b)` of operands of one dtype, in f32.

    Autodiff would keep the f32 cotangent and run both products of the backward pass in f32, at a fraction of the bf16
    rate. Here the cotangent is rounded to the operands' dtype first, as mixed-precision training does; sums stay f32.
    In f32 it is plain autodiff. Every index occurs in two of the operands and the result, or in all three.
    """
    return _product(spec, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec, a, b):
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _product_forward(spec, a, b):
    return _product(spec, a, b), (a, b)


def _product_backward(spec, saved, d_out):
    a, b = saved
    inputs, out = spec.split("->")
    in_a, in_b = inputs.split(",")
    d_out = d_out.astype(a.dtype)
    d_a = jnp.einsum(f"{out},{in_b}->{in_a}", d_out, b, preferred_element_type=jnp.float32)
    d_b = jnp.einsum(f"{out},{in_a}->{in_b}", d_out, a, preferred_element_type=jnp.float32)
    return d_a.astype(a.dtype), d_b.astype(b.dtype)


_product.defvjp(_product_forward, _product_backward)


def matmul(x_xI: jax.Array, w_OI: jax.Array, platform: str, out_dtype: str | jnp.dtype = "float32") -> jax.Array:
    """`x @ w.T` with f32 accumulation, in the form that is fast on `platform`.

    Args:
      x_xI: activations, any leading dimensions.
      w_OI: weight as [out, in]; cast to the dtype of `x_xI`.
      platform: "cpu", or anything else for the plain product.
      out_dtype: dtype of the result.

    Returns:
      [..., O] of `out_dtype`.
    """
    lead = x_xI.shape[:-1]
    num_rows = 1
    for n in lead:
        num_rows *= n
    w_OI = w_OI.astype(x_xI.dtype)
    if platform != "cpu" or num_rows > _THIN_ROWS:
        y_xO = product("...i,oi->...o", x_xI, w_OI)
        return y_xO.astype(out_dtype)
    x_MI = x_xI.reshape(num_rows, -1)
    # bf16 with one row falls to a naive loop on XLA:CPU, ten times slower than with two.
    pad = int(num_rows == 1 and x_xI.dtype == jnp.bfloat16)
    if pad:
        x_MI = jnp.pad(x_MI, ((0, 1), (0, 0)))
    y_OM = jax.lax.dot_general(w_OI, x_MI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    # Without the barrier the simplifier folds the transpose back into the slow form.
    y_MO = jax.lax.optimization_barrier(y_OM).T
    return y_MO[:num_rows].reshape(*lead, -1).astype(out_dtype)


class Linear(nn.Module):
    """`x @ weight.T + bias`, weight [out, in]."""

    num_out: int
    use_bias: bool
    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTI: jax.Array) -> jax.Array:
        w_OI = self.param("weight", nn.initializers.normal(0.02), (self.num_out, x_BTI.shape[-1]), jnp.float32)
        y_BTO = matmul(x_BTI, w_OI, platform_of(self.config))
        if self.use_bias:
            y_BTO += self.param("bias", nn.initializers.zeros, (self.num_out,), jnp.float32)
        return y_BTO.astype(self.config.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, in f32."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_xD: jax.Array) -> jax.Array:
        scale_D = self.param("scale", nn.initializers.ones, (x_xD.shape[-1],), jnp.float32)
        x_f32 = x_xD.astype(jnp.float32)
        inv = jax.lax.rsqrt(jnp.mean(x_f32 * x_f32, axis=-1, keepdims=True) + self.config.rms_norm_eps)
        # The normalised value is rounded to the compute dtype before scaling, as the reference models do.
        return scale_D.astype(self.config.dtype) * (x_f32 * inv).astype(self.config.dtype)


class Embed(nn.Module):
    """Token embedding, weight [V, D]."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        shape = (self.config.vocab_size, self.config.hidden_size)
        w_VD = self.param("weight", nn.initializers.normal(0.02), shape, jnp.float32)
        return jnp.take(w_VD, tokens_BT, axis=0).astype(self.config.dtype)


def rope_tables(config: ModelConfig, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin f32[B,T,1,H/2] of the rotary angles at the given positions."""
    inv_freq, factor = rope_frequencies(config)
    angle_BTH = positions_BT[..., None].astype(jnp.float32) * inv_freq
    return jnp.cos(angle_BTH)[:, :, None] * factor, jnp.sin(angle_BTH)[:, :, None] * factor


def apply_rope(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the half-split pairs (i, i + H/2), the layout of Hugging Face files."""
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


def attend_cached(q_BTNH: jax.Array, k_BKHS: jax.Array, v_BKSH: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """Attention of T new queries over a cache, softmax in f32.

    Returns:
      [B,T,N,H] in the dtype of the queries.
    """
    B, T, N, H = q_BTNH.shape
    *rows, K = k_BKHS.shape[:-2]  # `cache.without_row_axis` leaves no rows
    q_BTKGH = (q_BTNH * H**-0.5).astype(k_BKHS.dtype).reshape(B, T, K, N // K, H)
    q_BKMH = q_BTKGH.transpose(0, 2, 3, 1, 4).reshape(*rows, K, -1, H)  # M = (group, query)
    score_BKMS = jnp.einsum("...mh,...hs->...ms", q_BKMH, k_BKHS, preferred_element_type=jnp.float32)
    score_BKGTS = score_BKMS.reshape(B, K, N // K, T, -1)
    score_BKGTS = jnp.where(mask_BTS[:, None, None], score_BKGTS, MASKED)
    prob_BKMS = jax.nn.softmax(score_BKGTS, axis=-1).reshape(score_BKMS.shape).astype(v_BKSH.dtype)
    out_BKMH = jnp.einsum("...ms,...sh->...mh", prob_BKMS, v_BKSH, preferred_element_type=jnp.float32)
    out_BTNH = out_BKMH.reshape(B, K, N // K, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
    return out_BTNH.astype(q_BTNH.dtype)


def attend_uncached(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segment_ids_BT: jax.Array | None, platform: str
) -> jax.Array:
    """Causal attention inside equal segments, softmax in f32; segment 0 is padding.

    On GPU, unsegmented bf16 rows go to cuDNN's flash kernel; everything else runs in blocks of queries, so
    that memory grows with T and not with its square.
    """
    B, T, N, H = q_BTNH.shape
    if platform in ("gpu", "cuda") and segment_ids_BT is None and q_BTNH.dtype == jnp.bfloat16:
        return jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, is_causal=True, implementation="cudnn")
    attend = functools.partial(_attend_block, k_BTKH=k_BTKH, v_BTKH=v_BTKH, segment_ids_BT=segment_ids_BT)
    if T <= _QUERY_BLOCK:
        return attend(q_BTNH, segment_ids_BT, jnp.int32(0))
    # Queries are padded to whole blocks; what the surplus ones get is dropped.
    num_blocks = -(-T // _QUERY_BLOCK)
    pad = num_blocks * _QUERY_BLOCK - T

    def blocks(x_BTx: jax.Array) -> jax.Array:
        x_BTx = jnp.pad(x_BTx, [(0, pad if axis == 1 else 0) for axis in range(x_BTx.ndim)])
        return x_BTx.reshape(B, num_blocks, _QUERY_BLOCK, *x_BTx.shape[2:]).swapaxes(0, 1)

    starts = jnp.arange(0, T, _QUERY_BLOCK, dtype=jnp.int32)
    segments_xBT = None if segment_ids_BT is None else blocks(segment_ids_BT)
    out_xBTNH = jax.lax.map(lambda args: jax.checkpoint(attend)(*args), (blocks(q_BTNH), segments_xBT, starts))
    return out_xBTNH.swapaxes(0, 1).reshape(B, T + pad, N, H)[:, :T]


def _attend_block(
    q_BTNH: jax.Array,
    query_segment_BT: jax.Array | None,
    start: jax.Array,
    *,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None,
) -> jax.Array:
    """Attention of the queries at `start ...` over all keys. S is the key axis here."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BTKH.shape[1:3]
    query_T = start + jnp.arange(T)
    mask_BTS = (query_T[:, None] >= jnp.arange(S)[None, :])[None]
    if segment_ids_BT is not None and query_segment_BT is not None:
        mask_BTS = mask_BTS & (query_segment_BT[:, :, None] == segment_ids_BT[:, None, :])
    q_BTKGH = (q_BTNH * H**-0.5).reshape(B, T, K, N // K, H)
    score_BKGTS = product("btkgh,bskh->bkgts", q_BTKGH, k_BTKH)
    score_BKGTS = jnp.where(mask_BTS[:, None, None], score_BKGTS, MASKED)
    prob_BKGTS = jax.nn.softmax(score_BKGTS, axis=-1).astype(v_BTKH.dtype)
    out_BTKGH = product("bkgts,bskh->btkgh", prob_BKGTS, v_BTKH)
    return out_BTKGH.reshape(B, T, N, H).astype(q_BTNH.dtype)
