"""The drafter in the form that the rollout engine calls."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tlt_jax.drafter.config import DraftConfig
from tlt_jax.drafter.model import draft_forward_cached, draft_head, draft_logits, to_target_ids
from tlt_jax.models.cache import init_cache
from tlt_jax.types import DraftModel, Params

Weights = dict[str, Any]


def make_draft_model(config: DraftConfig, d2t_V: jax.Array | None = None) -> DraftModel:
    """Pure functions over the weights that `prepare` returns.

    Args:
      config: static.
      d2t_V: map of a reduced draft vocabulary; constant in the compiled programs.
    """

    def forward(weights: Weights, params: Params, features, tokens, start, cache, positions, block_mask):
        return draft_forward_cached(
            weights["params"],
            params,
            config,
            features,
            tokens,
            start,
            cache,
            positions_BT=positions,
            block_mask=block_mask,
        )

    def logits(weights: Weights, params: Params, h_BTD: jax.Array) -> jax.Array:
        return draft_logits(weights["params"], params, config, h_BTD, d2t_V, head_VD=weights.get("head"))

    return DraftModel(
        forward=forward,
        logits=logits,
        target_ids=lambda ids: to_target_ids(ids, d2t_V),
        vocab_size=config.vocab_size,
        init_cache=lambda num_rows, capacity, dtype: init_cache(config.layer, num_rows, capacity, dtype)[0],
        feature_layers=config.feature_layers,
    )


def prepare(draft_params: Params, params: Params, config: DraftConfig, d2t_V: jax.Array | None = None) -> Weights:
    """Weights for the engine: the trainable tree and, with a reduced vocabulary, the head's rows of it.

    Call it again whenever the target's or the drafter's parameters change.
    """
    if not config.draft_vocab_size or config.form == "eagle3":
        return {"params": draft_params}
    head_VD = jax.jit(lambda d, p: jnp.copy(draft_head(d, p, config, d2t_V)))(draft_params, params)
    return {"params": draft_params, "head": head_VD}
