"""Key/value cache: fixed capacity, per-row offsets, one buffer per layer.

Keys are stored [B,K,H,S] and values [B,K,S,H], so that both attention products contract contiguous
memory. A row's valid slots are `0..length-1`; whatever lies beyond is stale and masked by position, so
rolling a row back is only a smaller length. The engine donates the cache to every step; nothing here copies
it except `resize`, whose purpose is to.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from tlt_jax.models.config import ModelConfig


@struct.dataclass(kw_only=True)
class LayerCache:
    k: jax.Array  # [B,K,H,S]
    v: jax.Array  # [B,K,S,H]


Cache = tuple[LayerCache, ...]


def cache_shapes(config: ModelConfig, num_rows: int, capacity: int, dtype: str) -> Cache:
    """Shapes of a cache for `num_rows` rows of `capacity` slots."""
    k = jax.ShapeDtypeStruct((num_rows, config.num_kv_heads, config.head_dim, capacity), dtype)
    v = jax.ShapeDtypeStruct((num_rows, config.num_kv_heads, capacity, config.head_dim), dtype)
    return tuple(LayerCache(k=k, v=v) for _ in range(config.num_layers))  # pyright: ignore[reportArgumentType]


def init_cache(config: ModelConfig, num_rows: int, capacity: int, dtype: str) -> Cache:
    """A zero cache for `num_rows` rows of `capacity` slots."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), cache_shapes(config, num_rows, capacity, dtype))


def cache_bytes(config: ModelConfig, num_rows: int, capacity: int, dtype: str) -> int:
    """Bytes of a cache for `num_rows` rows of `capacity` slots."""
    values = 2 * config.num_layers * num_rows * config.num_kv_heads * config.head_dim * capacity
    return values * jnp.dtype(dtype).itemsize


def without_row_axis(cache: Cache) -> Cache:
    """The cache of one row as [K,H,S] and [K,S,H], for a loop to carry.

    XLA:CPU drops the axis of one row for its products, not for what a loop carries; it then writes two versions of the
    cache, and copies it four times a round.
    """
    return jax.tree.map(lambda x: x[0], cache)


def with_row_axis(cache: Cache) -> Cache:
    """Undoes `without_row_axis`."""
    return jax.tree.map(lambda x: x[None], cache)


def write(layer: LayerCache, k_BTKH: jax.Array, v_BTKH: jax.Array, start_B: jax.Array) -> LayerCache:
    """Writes T new keys and values of row b at slots `start_B[b] ... start_B[b]+T-1`.

    The caller guarantees `start_B + T <= S`: `dynamic_update_slice` would shift a block that does not fit
    and overwrite older entries without a word.
    """
    k_BKHT = k_BTKH.astype(layer.k.dtype).transpose(0, 2, 3, 1)
    v_BKTH = v_BTKH.astype(layer.v.dtype).transpose(0, 2, 1, 3)
    put = jax.lax.dynamic_update_slice
    if layer.k.ndim == 3:  # `without_row_axis`
        start = start_B[0]
        return LayerCache(k=put(layer.k, k_BKHT[0], (0, 0, start)), v=put(layer.v, v_BKTH[0], (0, start, 0)))
    return LayerCache(
        k=jax.vmap(lambda c, x, i: put(c, x, (0, 0, i)))(layer.k, k_BKHT, start_B),
        v=jax.vmap(lambda c, x, i: put(c, x, (0, i, 0)))(layer.v, v_BKTH, start_B),
    )


def compact(cache: Cache, start_B: jax.Array, path_BW: jax.Array, width: int) -> Cache:
    """Moves the accepted path of a block of `width` slots at `start_B` to its front, in order.

    Slot `start_B + i` becomes what slot `start_B + path_BW[i]` held, for the path's slots; `path_BW[:, 0]` is 0.
    """
    take, put = jax.lax.dynamic_slice, jax.lax.dynamic_update_slice

    def move_k(k_KHS: jax.Array, start: jax.Array, path_W: jax.Array) -> jax.Array:
        block_KHW = take(k_KHS, (0, 0, start), (*k_KHS.shape[:2], width))
        return put(k_KHS, jnp.take(block_KHW, path_W, axis=2), (0, 0, start))

    def move_v(v_KSH: jax.Array, start: jax.Array, path_W: jax.Array) -> jax.Array:
        block_KWH = take(v_KSH, (0, start, 0), (v_KSH.shape[0], width, v_KSH.shape[2]))
        return put(v_KSH, jnp.take(block_KWH, path_W, axis=1), (0, start, 0))

    if cache[0].k.ndim == 3:  # `without_row_axis`
        start, path_W = start_B[0], path_BW[0]
        return tuple(LayerCache(k=move_k(c.k, start, path_W), v=move_v(c.v, start, path_W)) for c in cache)
    return tuple(
        LayerCache(
            k=jax.vmap(move_k)(layer.k, start_B, path_BW),
            v=jax.vmap(move_v)(layer.v, start_B, path_BW),
        )
        for layer in cache
    )


def resize(cache: Cache, rows: jax.Array, capacity: int) -> Cache:
    """Row `rows[i]` of `cache` becomes row i of a new cache with `capacity` slots per row.

    Slots are cut or zero-filled at the end; the caller keeps every live row within `capacity`.
    """

    def fit(x: jax.Array, axis: int) -> jax.Array:
        x = jnp.take(x, rows, axis=0)
        extra = capacity - x.shape[axis]
        if extra <= 0:
            return jax.lax.slice_in_dim(x, 0, capacity, axis=axis)
        return jnp.pad(x, [(0, extra if a == axis else 0) for a in range(x.ndim)])

    return tuple(LayerCache(k=fit(c.k, 3), v=fit(c.v, 2)) for c in cache)


def put_row(cache: Cache, source: Cache, row: jax.Array) -> Cache:
    """Copies the one row of `source` over the head of row `row` of `cache`.

    `source` may have fewer slots than `cache`, never more.
    """
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice(x, y, (row, 0, 0, 0)), cache, source)
