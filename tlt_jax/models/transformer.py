"""The decoder: Llama 3.x, Qwen2 / 2.5, Qwen3 and SmolLM2 in one linen module, behind pure functions.

`forward` runs whole sequences without a cache (training, scoring). `forward_cached` appends T tokens per row
to a cache at per-row offsets and serves prefill (T = a chunk), decode (T = 1) and verification of a draft tree
(T = nodes, with the tree's mask and positions) alike. Neither computes logits: callers pick the positions they
need and pass them to `compute_logits`.

Parameters are a plain nested dict, weights as [out, in]:

    embed/weight  final_norm/scale  head/weight (untied models only)
    layers_{i}/{attn_norm,mlp_norm}/scale  layers_{i}/attn/{q,k,v,o}/{weight,bias}  layers_{i}/attn/{q,k}_norm/scale
    layers_{i}/mlp/{gate,up,down}/weight

`decode_layout` gives another tree that `forward_cached` takes as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
from flax import linen as nn, struct

from tlt_jax.models import layers
from tlt_jax.models.cache import Cache, LayerCache, write
from tlt_jax.models.config import ModelConfig
from tlt_jax.types import Params


@struct.dataclass(kw_only=True)
class ForwardOut:
    hidden: jax.Array  # [B,T,D] after the final norm
    features: tuple[jax.Array, ...] = ()  # [B,T,D] each: outputs of the layers asked for, before the final norm


@struct.dataclass(kw_only=True)
class CacheView:
    """What the layers need to know of a cached step, the same for all of them."""

    start: jax.Array  # i32[B] slot of the first new token
    mask: jax.Array  # bool[B,T,S] slots each new token sees


class Attention(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD, rope, segment_ids_BT, layer_cache, view):
        c = self.config
        B, T = x_BTD.shape[:2]

        def project(name, num_heads):
            return layers.Linear(num_heads * c.head_dim, c.attention_bias, c, name=name)(x_BTD).reshape(
                B, T, num_heads, c.head_dim
            )

        N, K = c.num_heads, c.num_kv_heads
        if self.has_variable("params", "qkv"):
            q_BTNH, k_BTKH, v_BTKH = jnp.split(project("qkv", N + 2 * K), [N, N + K], axis=2)
        else:
            q_BTNH, k_BTKH, v_BTKH = project("q", N), project("k", K), project("v", K)
        if c.qk_norm:  # per head, before rope
            q_BTNH = layers.RMSNorm(c, name="q_norm")(q_BTNH)
            k_BTKH = layers.RMSNorm(c, name="k_norm")(k_BTKH)
        q_BTNH, k_BTKH = layers.apply_rope(q_BTNH, *rope), layers.apply_rope(k_BTKH, *rope)
        if layer_cache is None:
            out_BTNH = layers.attend_uncached(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, layers.platform_of(c))
        else:
            layer_cache = write(layer_cache, k_BTKH, v_BTKH, view.start)
            out_BTNH = layers.attend_cached(q_BTNH, layer_cache.k, layer_cache.v, view.mask)
        out_BTD = layers.Linear(c.hidden_size, c.output_bias, c, name="o")(out_BTNH.reshape(B, T, -1))
        return out_BTD, layer_cache


class Mlp(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD):
        c = self.config
        if self.has_variable("params", "gate_up"):
            both_BTF = layers.Linear(2 * c.intermediate_size, False, c, name="gate_up")(x_BTD)
            gate_BTF, up_BTF = jnp.split(both_BTF, 2, axis=-1)
        else:
            gate_BTF = layers.Linear(c.intermediate_size, False, c, name="gate")(x_BTD)
            up_BTF = layers.Linear(c.intermediate_size, False, c, name="up")(x_BTD)
        return layers.Linear(c.hidden_size, False, c, name="down")(nn.silu(gate_BTF) * up_BTF)


class DecoderLayer(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD, rope, segment_ids_BT, layer_cache: LayerCache | None, view: CacheView | None):
        c = self.config
        attn_BTD, layer_cache = Attention(c, name="attn")(
            layers.RMSNorm(c, name="attn_norm")(x_BTD), rope, segment_ids_BT, layer_cache, view
        )
        x_BTD = x_BTD + attn_BTD
        x_BTD = x_BTD + Mlp(c, name="mlp")(layers.RMSNorm(c, name="mlp_norm")(x_BTD))
        return x_BTD, layer_cache


class Transformer(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, tokens_BT, positions_BT, segment_ids_BT=None, cache: Cache | None = None, view=None, taps=()):
        c = self.config
        rope = layers.rope_tables(c, positions_BT)
        x_BTD = layers.Embed(c, name="embed")(tokens_BT)
        features, new_cache = [], []
        for i in range(c.num_layers):
            layer_cache = None if cache is None else cache[i]
            x_BTD, layer_cache = DecoderLayer(c, name=f"layers_{i}")(x_BTD, rope, segment_ids_BT, layer_cache, view)
            new_cache.append(layer_cache)
            if i in taps:
                features.append(x_BTD)
        if c.num_layers and not c.tie_embeddings and self.is_initializing():
            _UntiedHead(c, name="head")()
        hidden_BTD = layers.RMSNorm(c, name="final_norm")(x_BTD)
        return ForwardOut(hidden=hidden_BTD, features=tuple(features)), tuple(new_cache)


class _UntiedHead(nn.Module):
    """Declares the parameter only; `compute_logits` uses it."""

    config: ModelConfig

    @nn.compact
    def __call__(self):
        shape = (self.config.vocab_size, self.config.hidden_size)
        return self.param("weight", nn.initializers.normal(0.02), shape, jnp.float32)


def init_params(config: ModelConfig, key: jax.Array, dtype: str = "float32") -> Params:
    """Random parameters, N(0, 0.02), norms at one."""
    params = jax.jit(lambda k: _init(config, k))(key)
    return jax.tree.map(lambda x: x.astype(dtype), params)


def param_shapes(config: ModelConfig, dtype: str = "float32") -> Params:
    """The parameter tree as `jax.ShapeDtypeStruct`, without allocating anything."""
    shapes = jax.eval_shape(lambda k: _init(config, k), jax.random.key(0))
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, dtype), shapes)


def _init(config: ModelConfig, key: jax.Array) -> Params:
    """f32 parameters. Traced with the plain kernels: cuDNN's want a GPU present and more than this one token."""
    dummy = jnp.zeros((1, 1), jnp.int32)
    return dict(Transformer(dataclasses.replace(config, platform="cpu")).init(key, dummy, dummy)["params"])


def decode_layout(params: Params, config: ModelConfig) -> Params:
    """Parameters as one device decodes with them fastest: on CPU, `attn/qkv` and `mlp/gate_up` are one weight each.

    Small products there pay for waking a second thread, or do not get one. Elsewhere, the parameters as they are.
    """
    if layers.platform_of(config) != "cpu" or "qkv" in params["layers_0"]["attn"]:
        return params

    def join(parts: Sequence[Params]) -> Params:
        return {name: jnp.concatenate([p[name] for p in parts]) for name in parts[0]}

    def fuse(layer: Params) -> Params:
        attn, mlp = dict(layer["attn"]), dict(layer["mlp"])
        attn["qkv"] = join([attn.pop(name) for name in ("q", "k", "v")])
        mlp["gate_up"] = join([mlp.pop(name) for name in ("gate", "up")])
        return {**layer, "attn": attn, "mlp": mlp}

    return {name: fuse(value) if name.startswith("layers_") else value for name, value in params.items()}


def forward(
    params: Params,
    config: ModelConfig,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    *,
    segment_ids_BT: jax.Array | None = None,
    feature_layers: Sequence[int] = (),
    remat: bool = False,
) -> ForwardOut:
    """Causal forward of whole sequences, no cache.

    Args:
      params: the parameter tree.
      config: static.
      tokens_BT: token ids; padding may hold any valid id.
      positions_BT: rotary position of each token inside its own sequence.
      segment_ids_BT: tokens see earlier tokens of their own segment only; 0 marks padding. Without it rows
        are one sequence each, padded on the right.
      feature_layers: layers whose outputs are returned too, in ascending order.
      remat: recompute each layer in the backward pass.
    """
    if remat:
        return _forward_remat(params, config, tokens_BT, positions_BT, segment_ids_BT, feature_layers)
    out, _ = Transformer(config).apply(
        {"params": params}, tokens_BT, positions_BT, segment_ids_BT, None, None, tuple(feature_layers)
    )
    return out


def _forward_remat(params, config, tokens_BT, positions_BT, segment_ids_BT, feature_layers) -> ForwardOut:
    """`Transformer` without a cache, layer by layer, each recomputed in the backward pass."""
    rope = layers.rope_tables(config, positions_BT)
    layer = _recomputed_layer(config)
    x_BTD = layers.Embed(config).apply({"params": params["embed"]}, tokens_BT)
    features = []
    for i in range(config.num_layers):
        x_BTD = layer(params[f"layers_{i}"], x_BTD, rope, segment_ids_BT)
        if i in feature_layers:
            features.append(x_BTD)
    hidden_BTD = cast(jax.Array, layers.RMSNorm(config).apply({"params": params["final_norm"]}, x_BTD))
    return ForwardOut(hidden=hidden_BTD, features=tuple(features))


def _recomputed_layer(config: ModelConfig):
    """(params, x, rope, segment ids) -> x of one layer, which saves its input alone for the backward pass.

    Unlike `jax.checkpoint`, the recomputation waits for the layer's cotangent. It needs nothing but saved inputs
    otherwise, and XLA:CPU then recomputes all layers at once: the memory of no recomputation at all.
    """

    def run(params, x_BTD, rope, segment_ids_BT):
        return DecoderLayer(config).apply({"params": params}, x_BTD, rope, segment_ids_BT, None, None)[0]

    def forward_rule(params, x_BTD, rope, segment_ids_BT):
        return run(params, x_BTD, rope, segment_ids_BT), (params, x_BTD, rope, segment_ids_BT)

    def backward_rule(saved, d_out_BTD):
        params, x_BTD, rope, segment_ids_BT = saved
        if layers.platform_of(config) == "cpu":
            # XLA:CPU drops barriers before it schedules; a product with 0 it must keep, for the sake of NaN.
            x_BTD += 0 * d_out_BTD[0, 0, 0]
        else:
            x_BTD, d_out_BTD = jax.lax.optimization_barrier((x_BTD, d_out_BTD))
        _, pullback = jax.vjp(lambda p, x: run(p, x, rope, segment_ids_BT), params, x_BTD)
        return *pullback(d_out_BTD), None, None

    layer = jax.custom_vjp(run)
    layer.defvjp(forward_rule, backward_rule)
    return layer


def forward_cached(
    params: Params,
    config: ModelConfig,
    tokens_BT: jax.Array,
    start_B: jax.Array,
    cache: Cache,
    *,
    positions_BT: jax.Array | None = None,
    block_mask: jax.Array | None = None,
    feature_layers: Sequence[int] = (),
) -> tuple[ForwardOut, Cache]:
    """Appends T tokens per row at slots `start_B ... start_B+T-1` of a cache of S slots.

    Args:
      params: the parameter tree.
      config: static.
      tokens_BT: the new tokens.
      start_B: valid slots of each row; `start_B + T <= S` is the caller's duty.
      cache: donated by the caller's jit; updated in place.
      positions_BT: rotary positions; default `start_B + 0..T-1`.
      block_mask: bool[T,T] or bool[B,T,T], which new tokens each new token sees (row = query); default causal. A
        draft tree passes ancestors-and-self. More columns than T: see `cache_view`.
      feature_layers: layers whose outputs are returned too, in ascending order.
    """
    if positions_BT is None:
        positions_BT = start_B[:, None] + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    view = cache_view(start_B, tokens_BT.shape[1], cache[0].k.shape[-1], block_mask)
    out = Transformer(config).apply(
        {"params": params}, tokens_BT, positions_BT, None, cache, view, tuple(feature_layers)
    )
    return cast(tuple[ForwardOut, Cache], out)


def cache_view(start_B: jax.Array, num_new: int, capacity: int, block_mask: jax.Array | None = None) -> CacheView:
    """What T = `num_new` tokens appended at `start_B` see of `capacity` slots; mask as in `forward_cached`.

    A mask of more than T columns also rules over slots before `start_B`: its columns are the last M slots, of which the
    new tokens are the last T. A draft tree that grows level by level hides other branches that way.
    """
    if block_mask is None:
        last_BT = start_B[:, None] + jnp.arange(num_new, dtype=jnp.int32)
        return CacheView(start=start_B, mask=jnp.arange(capacity)[None, None] <= last_BT[:, :, None])
    width = block_mask.shape[-1]  # M
    block_mask_BTM = jnp.broadcast_to(block_mask, (len(start_B), num_new, width))
    return CacheView(start=start_B, mask=_block_mask(block_mask_BTM, start_B + num_new - width, capacity))


def _block_mask(block_mask_BTM: jax.Array, base_B: jax.Array, capacity: int) -> jax.Array:
    """Every slot before `base_B`, and in the M slots from there what `block_mask_BTM` says: bool[B,T,S]."""
    B, T, width = block_mask_BTM.shape
    inside_BS = jnp.arange(capacity)[None] - base_B[:, None]
    index_BTS = jnp.broadcast_to(jnp.clip(inside_BS, 0, width - 1)[:, None], (B, T, capacity))
    in_block_BTS = jnp.take_along_axis(block_mask_BTM, index_BTS, axis=2)
    return (inside_BS < 0)[:, None] | ((inside_BS < width)[:, None] & in_block_BTS)


def compute_logits(params: Params, config: ModelConfig, hidden_xD: jax.Array) -> jax.Array:
    """f32 logits [..., V] of hidden states [..., D]; ids that the tokenizer does not have are masked."""
    weight_VD = params["embed" if config.tie_embeddings else "head"]["weight"]
    logits_xV = layers.matmul(hidden_xD, weight_VD, layers.platform_of(config))
    if config.num_valid_tokens is None or config.num_valid_tokens == config.vocab_size:
        return logits_xV
    return jnp.where(jnp.arange(config.vocab_size) < config.num_valid_tokens, logits_xV, layers.MASKED)
