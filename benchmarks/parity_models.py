"""Tiny random models, one per family and feature, and this project's logits for them.

Shared by `benchmarks.parity`, which compares them with transformers, and by the tests, which compare them with what
transformers gave. Weights come from a seed through `numpy.random.RandomState`, whose streams are frozen.
"""

from __future__ import annotations

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from tlt_jax.models import cache, hf, hf_export, transformer
from tlt_jax.models.config import ModelConfig, RopeScaling
from tlt_jax.types import Params

LENGTHS = (24, 9, 4)  # of the rows of the ragged batch
NUM_DECODED = 3  # tokens of each row that are fed one at a time in the cached run

_SMALL = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=1e6,
    max_position_embeddings=64,
    eos_token_ids=(2,),
    bos_token_id=1,
    pad_token_id=0,
)
# Contexts short enough that each kind of scaling changes the frequencies which the batch uses.
_LLAMA3_ROPE = RopeScaling(
    kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
_YARN = RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=16)
_LINEAR = RopeScaling(kind="linear", factor=4.0)

FAMILIES: dict[str, ModelConfig] = {
    name: ModelConfig(**(_SMALL | fields))  # type: ignore[arg-type]
    for name, fields in {
        "smollm2": dict(
            hidden_size=24, num_heads=3, num_kv_heads=1, rope_theta=1e5, rms_norm_eps=1e-5, tie_embeddings=True
        ),
        "llama3": dict(rope_theta=5e5, rope_scaling=_LLAMA3_ROPE),
        "llama_linear": dict(rope_scaling=_LINEAR),
        "llama_bias": dict(attention_bias=True, output_bias=True),
        "qwen2": dict(model_type="qwen2", attention_bias=True, tie_embeddings=True),
        "qwen2_untied": dict(model_type="qwen2", attention_bias=True),
        "qwen2_yarn": dict(model_type="qwen2", attention_bias=True, rope_scaling=_YARN),
        "qwen3": dict(model_type="qwen3", qk_norm=True, head_dim=16, tie_embeddings=True),
        "qwen3_untied": dict(model_type="qwen3", qk_norm=True, head_dim=16, num_kv_heads=4),
    }.items()
}


def random_params(config: ModelConfig, seed: int = 0) -> Params:
    """Parameters whose logits have a spread of a few units, with nothing at its neutral value.

    Norm scales differ from one and biases from zero, so that a forgotten one shows.
    """
    draw = np.random.RandomState(seed).standard_normal
    params = {}
    for path, (_, shape) in hf.param_names(config).items():
        noise = draw(shape)
        if path.endswith("scale"):
            value = 1.0 + 0.3 * noise
        elif path.endswith("bias") or path.startswith("embed"):
            value = 0.5 * noise
        else:
            value = noise * shape[-1] ** -0.5
        params[path] = value.astype(np.float32)
    return traverse_util.unflatten_dict(params, sep="/")


def write_model(out_dir: str | pathlib.Path, config: ModelConfig, seed: int = 0) -> Params:
    """Writes a tiny random model as an HF directory and returns its parameters."""
    params = random_params(config, seed)
    hf_export.save_hf(out_dir, config, params)
    return params


def ragged_batch(config: ModelConfig) -> np.ndarray:
    """Tokens i32[B,T], rows padded on the right with id 0 to the longest of `LENGTHS`."""
    tokens = np.random.RandomState(7).randint(1, config.vocab_size, (len(LENGTHS), max(LENGTHS)))
    return np.where(valid_mask(), tokens, 0).astype(np.int32)


def valid_mask() -> np.ndarray:
    """bool[B,T], true on the tokens of the ragged batch."""
    return np.arange(max(LENGTHS)) < np.asarray(LENGTHS)[:, None]


@functools.partial(jax.jit, static_argnums=1)
def logits_uncached(params: Params, config: ModelConfig, tokens_BT: jax.Array) -> jax.Array:
    """f32[B,T,V] of whole rows."""
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    hidden_BTD = transformer.forward(params, config, tokens_BT, positions_BT).hidden
    return transformer.compute_logits(params, config, hidden_BTD)


@functools.partial(jax.jit, static_argnums=1)
def _append(params: Params, config: ModelConfig, tokens_BT: jax.Array, start_B: jax.Array, kv: cache.Cache):
    out, kv = transformer.forward_cached(params, config, tokens_BT, start_B, kv)
    return transformer.compute_logits(params, config, out.hidden), kv


def logits_cached(params: Params, config: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    """f32[B,T,V] of the ragged batch from a cache: each row but its last tokens at once, those one at a time.

    Rows end at their own places, so the cache holds stale slots of the padding, which later tokens overwrite.
    """
    rows = np.arange(len(LENGTHS))
    start = np.asarray(LENGTHS) - NUM_DECODED
    longest = int(start.max())
    kv = cache.init_cache(config, len(rows), 32, "float32")
    prefix = np.where(np.arange(longest) < start[:, None], tokens[:, :longest], 0)
    logits = np.zeros((*tokens.shape, config.vocab_size), np.float32)
    logits[:, :longest], kv = _append(params, config, prefix, jnp.zeros(len(rows), jnp.int32), kv)
    for i in range(NUM_DECODED):
        at = start + i
        step, kv = _append(params, config, tokens[rows, at][:, None], jnp.asarray(at, jnp.int32), kv)
        logits[rows, at] = step[:, 0]
    return logits
