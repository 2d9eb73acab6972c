"""The drafter: one decoder layer over the target's features and its own next-token embedding.

One pairing, here and wherever a drafter is trained, fed or asked: row t consumes (f_t, token_{t+1}), and predicts
f_{t+1} and with it token_{t+2}. Row t stands at rotary position t and at cache slot t.

Forms:
  eagle   x = fc([E(token), f]);  h = x + attn(x);  h = h + mlp(norm(h));  logits = target head(h). f is the target's
          hidden state after its final norm; there is no norm before attention and none after the layer.
  eagle3  g = fc([f_low, f_mid, f_high]);  h = g + attn([norm(E(token)), norm(g)]);  h = h + mlp(norm(h));
          logits = own head(norm(h)).
Drafting further, h_t takes the place of f_{t+1} (in eagle3: of g_{t+1}).

The embedding and, in eagle, the head are the target's live tensors under `stop_gradient`: no copy can go stale, and no
gradient reaches the target. The parameters here are those that training changes, nothing else:

    fc/{weight,bias}  layer/attn/{q,k,v,o}/{weight,bias}  layer/mlp_norm/scale  layer/mlp/{gate,up,down}/weight
    eagle3 also: layer/{embed_norm,hidden_norm}/scale  final_norm/scale  head/weight

References:
  EAGLE (arXiv 2401.15077), EAGLE-3 (arXiv 2503.01840). Departure: a reduced draft vocabulary also in the eagle form,
  as rows of the target's head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from tlt_jax.drafter.config import DraftConfig
from tlt_jax.models import layers
from tlt_jax.models.cache import LayerCache, write
from tlt_jax.models.config import ModelConfig
from tlt_jax.models.transformer import Mlp, cache_view
from tlt_jax.types import Params

# (q_BTNH, k_BTKH, v_BTKH) -> (out_BTNH, whatever the caller wants back)
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


class DraftAttention(nn.Module):
    """Projections and rope; what is attended to is the caller's function."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTI, rope, attend: Attend):
        c = self.config
        B, T = x_BTI.shape[:2]

        def project(name, num_heads):
            y_BTO = layers.Linear(num_heads * c.head_dim, c.attention_bias, c, name=name)(x_BTI)
            return y_BTO.reshape(B, T, num_heads, c.head_dim)

        q_BTNH, k_BTKH, v_BTKH = project("q", c.num_heads), project("k", c.num_kv_heads), project("v", c.num_kv_heads)
        out_BTNH, carry = attend(layers.apply_rope(q_BTNH, *rope), layers.apply_rope(k_BTKH, *rope), v_BTKH)
        return layers.Linear(c.hidden_size, c.output_bias, c, name="o")(out_BTNH.reshape(B, T, -1)), carry


class DraftLayer(nn.Module):
    config: DraftConfig

    @nn.compact
    def __call__(self, x_BTD, embed_BTD, rope, attend: Attend):
        c = self.config.layer
        x_in = x_BTD
        if self.config.form == "eagle3":
            normed = [layers.RMSNorm(c, name="embed_norm")(embed_BTD), layers.RMSNorm(c, name="hidden_norm")(x_BTD)]
            x_in = jnp.concatenate(normed, axis=-1)
        attn_BTD, carry = DraftAttention(c, name="attn")(x_in, rope, attend)
        x_BTD = x_BTD + attn_BTD
        return x_BTD + Mlp(c, name="mlp")(layers.RMSNorm(c, name="mlp_norm")(x_BTD)), carry


class Drafter(nn.Module):
    config: DraftConfig

    @nn.compact
    def __call__(self, features_BTD, embed_BTD, rope, attend: Attend):
        c = self.config.layer
        x_BTD = features_BTD
        if self.config.form == "eagle":
            x_BTD = jnp.concatenate([embed_BTD, features_BTD], axis=-1)
        if x_BTD.shape[-1] != c.hidden_size:  # an eagle3 drafter's own output comes fused already
            x_BTD = layers.Linear(c.hidden_size, self.config.fc_bias, c, name="fc")(x_BTD)
        return DraftLayer(self.config, name="layer")(x_BTD, embed_BTD, rope, attend)


def init_draft_params(config: DraftConfig, key: jax.Array, dtype: str = "float32") -> Params:
    """Random parameters, N(0, 0.02), norms at one; the trainable tree only."""
    return jax.jit(lambda k: _init(config, k, dtype))(key)


def draft_param_shapes(config: DraftConfig, dtype: str = "float32") -> Params:
    """The parameter tree as `jax.ShapeDtypeStruct`, without allocating anything."""
    return jax.eval_shape(lambda k: _init(config, k, dtype), jax.random.key(0))


def _init(config: DraftConfig, key: jax.Array, dtype: str) -> Params:
    layer_key, head_key = jax.random.split(key)
    D = config.target.hidden_size
    features, embed = jnp.zeros((1, 1, config.feature_size)), jnp.zeros((1, 1, D))
    rope = layers.rope_tables(config.layer, jnp.zeros((1, 1), jnp.int32))
    params = dict(Drafter(config).init(layer_key, features, embed, rope, lambda q, k, v: (q, None))["params"])
    if config.form == "eagle3":
        weight_VD = 0.02 * jax.random.normal(head_key, (config.vocab_size, D))
        params |= {"final_norm": {"scale": jnp.ones(D)}, "head": {"weight": weight_VD}}
    return jax.tree.map(lambda x: x.astype(dtype), params)


def frozen_params(target_params: Params) -> Params:
    """The part of the target that a drafter reads: its embedding and, where it has one, its head. No copy."""
    return {name: target_params[name] for name in ("embed", "head") if name in target_params}


def apply_layer(
    draft_params: Params,
    target_params: Params,
    config: DraftConfig,
    features_BTD: jax.Array,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    attend: Attend,
) -> tuple[jax.Array, Any]:
    """The drafter around any attention; `draft_forward` describes the arguments."""
    dtype = config.layer.dtype
    embed_VD = jax.lax.stop_gradient(target_params["embed"]["weight"])
    embed_BTD = jnp.take(embed_VD, tokens_BT, axis=0).astype(dtype)
    rope = layers.rope_tables(config.layer, positions_BT)
    out = Drafter(config).apply({"params": draft_params}, features_BTD.astype(dtype), embed_BTD, rope, attend)
    return cast(tuple[jax.Array, Any], out)


def draft_forward(
    draft_params: Params,
    target_params: Params,
    config: DraftConfig,
    features_BTD: jax.Array,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array | None = None,
) -> jax.Array:
    """Causal forward of whole sequences, no cache.

    Args:
      draft_params: the trainable tree.
      target_params: the target's parameters, or `frozen_params` of them.
      config: static.
      features_BTD: f_t of row t; width `config.feature_size`, or D for a drafter's own earlier output.
      tokens_BT: token_{t+1} of row t, the one that follows the feature; padding may hold any valid id.
      positions_BT: t, the position of the feature.
      segment_ids_BT: rows see earlier rows of their own segment only; 0 marks padding.

    Returns:
      h_BTD, the guess of f_{t+1}; `draft_logits` of it are those of token_{t+2}.
    """

    def attend(q_BTNH, k_BTKH, v_BTKH):
        platform = layers.platform_of(config.layer)
        return layers.attend_uncached(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, platform), None

    return apply_layer(draft_params, target_params, config, features_BTD, tokens_BT, positions_BT, attend)[0]


def draft_forward_cached(
    draft_params: Params,
    target_params: Params,
    config: DraftConfig,
    features_BTD: jax.Array,
    tokens_BT: jax.Array,
    start_B: jax.Array,
    layer_cache: LayerCache,
    *,
    positions_BT: jax.Array | None = None,
    block_mask: jax.Array | None = None,
) -> tuple[jax.Array, LayerCache]:
    """Appends T rows at slots `start_B ... start_B+T-1`: ingest of committed positions, and drafting.

    Arguments as in `draft_forward` and `transformer.forward_cached`. Rows written while drafting hold guesses: the
    caller overwrites their slots with true features before it goes on from there.
    """
    num_new = tokens_BT.shape[1]
    if positions_BT is None:
        positions_BT = start_B[:, None] + jnp.arange(num_new, dtype=jnp.int32)
    view = cache_view(start_B, num_new, layer_cache.k.shape[-1], block_mask)

    def attend(q_BTNH, k_BTKH, v_BTKH):
        cache = write(layer_cache, k_BTKH, v_BTKH, view.start)
        return layers.attend_cached(q_BTNH, cache.k, cache.v, view.mask), cache

    return apply_layer(draft_params, target_params, config, features_BTD, tokens_BT, positions_BT, attend)


def draft_head(
    draft_params: Params, target_params: Params, config: DraftConfig, d2t_V: jax.Array | None = None
) -> jax.Array:
    """The output matrix [draft vocabulary, D].

    With a reduced vocabulary the eagle form gathers rows of the target's head: take them once per policy version and
    pass them to `draft_logits`, not once per drafted token.

    Raises:
      ValueError: a reduced vocabulary without its map, or with a map of another length.
    """
    check_map(config, d2t_V)
    if config.form == "eagle3":
        return draft_params["head"]["weight"]
    weight_VD = target_head(target_params, config)
    if not config.draft_vocab_size:
        return weight_VD
    return jnp.take(weight_VD, to_target_ids(jnp.arange(config.draft_vocab_size, dtype=jnp.int32), d2t_V), axis=0)


def target_head(target_params: Params, config: DraftConfig) -> jax.Array:
    """The target's output matrix [V, D], frozen."""
    name = "embed" if config.target.tie_embeddings else "head"
    return jax.lax.stop_gradient(target_params[name]["weight"])


def draft_logits(
    draft_params: Params,
    target_params: Params,
    config: DraftConfig,
    h_xD: jax.Array,
    d2t_V: jax.Array | None = None,
    *,
    head_VD: jax.Array | None = None,
) -> jax.Array:
    """f32 logits over the draft vocabulary of the drafter's outputs [..., D].

    Args:
      draft_params: the trainable tree.
      target_params: the target's parameters, or `frozen_params` of them.
      config: static.
      h_xD: from `draft_forward` or `draft_forward_cached`.
      d2t_V: i32 map of a reduced vocabulary, as offsets: target id = i + d2t[i].
      head_VD: result of `draft_head`, where the caller has it already.
    """
    if head_VD is None:
        head_VD = draft_head(draft_params, target_params, config, d2t_V)
    h_xD = output_norm(draft_params, config, h_xD)
    return mask_invalid(config, layers.matmul(h_xD, head_VD, layers.platform_of(config.layer)))


def output_norm(draft_params: Params, config: DraftConfig, h_xD: jax.Array) -> jax.Array:
    """What the head is applied to: eagle3's final norm of h, and h itself in eagle."""
    if config.form == "eagle":
        return h_xD
    return cast(jax.Array, layers.RMSNorm(config.layer).apply({"params": draft_params["final_norm"]}, h_xD))


def mask_invalid(config: DraftConfig, logits_xV: jax.Array) -> jax.Array:
    """Masks ids that the tokenizer does not have; a reduced vocabulary has none of them."""
    num_valid = config.target.num_valid_tokens
    if logits_xV.shape[-1] != config.target.vocab_size or num_valid in (None, config.target.vocab_size):
        return logits_xV
    return jnp.where(jnp.arange(config.target.vocab_size) < num_valid, logits_xV, layers.MASKED)


def to_target_ids(ids_x: jax.Array, d2t_V: jax.Array | None) -> jax.Array:
    """Draft ids to target ids; without a map they are the same."""
    return ids_x if d2t_V is None else ids_x + jnp.take(d2t_V, ids_x)


def check_map(config: DraftConfig, d2t_V: Any) -> None:
    """Refuses a reduced vocabulary whose map is missing or belongs to another vocabulary."""
    got = None if d2t_V is None else d2t_V.shape
    if config.draft_vocab_size and got != (config.draft_vocab_size,):
        raise ValueError(
            f"draft vocabulary: got {config.draft_vocab_size} of {config.target.vocab_size} ids and a map of shape "
            f"{got}, expected offsets of shape ({config.draft_vocab_size},): load the map saved with the drafter"
        )
    if not config.draft_vocab_size and got is not None:
        raise ValueError(f"draft vocabulary: got a map of shape {got} for the whole vocabulary, expected none")
