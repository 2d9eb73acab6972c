"""Device memory of the live batch: the target's cache and, with a drafter, its cache and what it reads of the target.

Row b, slot t belong to position t of one response, in all three. Slots from a row's `length` on are scratch.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from tlt_jax.models.cache import Cache, LayerCache, init_cache, put_row, resize
from tlt_jax.models.config import ModelConfig
from tlt_jax.models.transformer import ForwardOut
from tlt_jax.types import DraftModel


@struct.dataclass(kw_only=True)
class Memory:
    target: Cache
    draft: LayerCache | None = None
    features: jax.Array | None = None  # [B,S,D'], of position t at slot t


def feature_size(model: ModelConfig, drafter: DraftModel) -> int:
    """Width of the feature buffer: what the drafter reads, then the last hidden state if that is something else."""
    return model.hidden_size * (len(drafter.feature_layers) + 1)


def init_memory(model: ModelConfig, drafter: DraftModel | None, num_rows: int, capacity: int, dtype: str) -> Memory:
    """Zero memory for `num_rows` rows of `capacity` slots."""
    target = init_cache(model, num_rows, capacity, dtype)
    if drafter is None:
        return Memory(target=target)
    return Memory(
        target=target,
        draft=drafter.init_cache(num_rows, capacity, dtype),
        features=jnp.zeros((num_rows, capacity, feature_size(model, drafter)), model.dtype),
    )


def features_of(out: ForwardOut) -> jax.Array:
    """What the feature buffer keeps of a forward: [B,T,D']."""
    return jnp.concatenate([*out.features, out.hidden], axis=-1)


def write_features(memory: Memory, features_BTD: jax.Array, start_B: jax.Array) -> jax.Array | None:
    """The buffer with T new features per row at slots `start_B` on; None where there is no buffer."""
    if memory.features is None:
        return None
    features_BTD = features_BTD.astype(memory.features.dtype)
    if len(start_B) == 1:  # not as a scatter: see `cache.write`
        return jax.lax.dynamic_update_slice(memory.features, features_BTD, (0, start_B[0], 0))
    put = jax.vmap(lambda x, y, i: jax.lax.dynamic_update_slice(x, y, (i, 0)))
    return put(memory.features, features_BTD, start_B)


def read_features(features_BSD: jax.Array, start_B: jax.Array, num: int) -> jax.Array:
    """`num` slots per row from `start_B` on."""
    return jax.vmap(lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, num, axis=0))(features_BSD, start_B)


def resize_memory(memory: Memory, rows: jax.Array, capacity: int) -> Memory:
    """Row `rows[i]` becomes row i of a new memory with `capacity` slots per row, as `cache.resize`."""
    draft, features = memory.draft, memory.features
    if draft is not None:
        (draft,) = resize((draft,), rows, capacity)
    if features is not None:
        features = jnp.take(features, rows, axis=0)[:, :capacity]
        features = jnp.pad(features, ((0, 0), (0, capacity - features.shape[1]), (0, 0)))
    return Memory(target=resize(memory.target, rows, capacity), draft=draft, features=features)


def put_memory(memory: Memory, source: Memory, row: jax.Array) -> Memory:
    """Copies the one row of `source` over the head of row `row`; the drafter's cache stays as it is."""
    features = memory.features
    if features is not None and source.features is not None:
        features = jax.lax.dynamic_update_slice(features, source.features, (row, 0, 0))
    return dataclasses.replace(memory, target=put_row(memory.target, source.target, row), features=features)
