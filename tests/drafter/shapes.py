"""Tiny targets and drafters shared by the drafter's tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.drafter import model
from tlt_jax.drafter.config import DraftConfig
from tlt_jax.drafter.loss import draft_loss
from tlt_jax.models.config import ModelConfig
from tlt_jax.models.transformer import param_shapes

TARGET = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,  # not hidden_size / num_heads
    rope_theta=1e4,
    attention_bias=True,
    model_type="qwen2",
)


def random_params(shapes, scale, seed):
    """N(0, scale) matrices and biases, norms near one, drawn on the host: no program to compile."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        is_norm = path[-1].key == "scale"
        return jnp.asarray(rng.standard_normal(leaf.shape, np.float32) * (0.1 if is_norm else scale) + is_norm)

    return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.cache
def make(form="eagle", **fields):
    """(config, draft_params, target_params) of a tiny drafter; weights large enough to give peaked laws."""
    target = dataclasses.replace(TARGET, tie_embeddings=fields.pop("tie_embeddings", False))
    if form == "eagle3":
        fields.setdefault("feature_layers", (0, 1, 2))
    config = DraftConfig(target=target, form=form, **fields)
    target_params = random_params(param_shapes(target), 0.1, seed=0)
    return config, random_params(model.draft_param_shapes(config), 0.1, seed=1), target_params


def random_inputs(config, num_rows, num_tokens, seed=0):
    """Features f32[B,T,*] and tokens i32[B,T]."""
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((num_rows, num_tokens, config.feature_size), np.float32)
    tokens = rng.integers(0, config.target.vocab_size, (num_rows, num_tokens)).astype(np.int32)
    return jnp.asarray(features), jnp.asarray(tokens)


# One function for all files, so that equal shapes are compiled once.
loss_and_grads = jax.jit(jax.value_and_grad(draft_loss, argnums=(0, 1), has_aux=True), static_argnums=(2, 3))
