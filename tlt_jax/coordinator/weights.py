"""One drafter out of those that workers trained by themselves: the mean, weighted by what each was trained on.

Every process enters `merge` once per RL step, also one whose workers trained nothing: its weight is 0. There is one
computation over all processes, so nothing can be entered in a different order, and no preemption can leave others
waiting.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

Tree = TypeVar("Tree")


def merge(trees: Sequence[Tree], weights: Sequence[float], stats: np.ndarray) -> tuple[Tree, float, np.ndarray]:
    """The weighted mean over all workers of all processes.

    Floating-point leaves are averaged in their own dtype; of the others, counters, the largest stands. Where no worker
    anywhere has a weight the first tree is returned: all are what the last merge gave.

    Args:
      trees: one per worker of this process, of equal structure and shapes, on any devices.
      weights: of the trees, >= 0; a tree of weight 0 is not looked at.
      stats: f64[n], numbers that are summed over all processes on the way.

    Returns:
      The mean, on the devices of the first tree or, in a job of several processes, on its first device; the total
      weight; the summed numbers.
    """
    own = [(tree, w) for tree, w in zip(trees, weights, strict=True) if w > 0.0]
    total = float(sum(weights))
    if jax.process_count() == 1 and len(own) == 1:
        return own[0][0], total, stats  # to the bit
    acc = _scale(own[0][0] if own else trees[0], jnp.float32(own[0][1] if own else 0.0))
    for tree, w in own[1:]:
        moved = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), tree, acc)
        acc = _add(acc, moved, jnp.float32(w))
    if jax.process_count() > 1:
        acc, total, stats = _sum_over_processes(acc, total, stats)
    if total == 0.0:
        return trees[0], 0.0, stats
    return _scale(acc, jnp.float32(1.0 / total)), total, stats


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


@jax.jit
def _scale(tree: Any, factor: jax.Array) -> Any:
    return jax.tree.map(lambda x: (x * factor).astype(x.dtype) if _is_float(x) else x, tree)


@functools.partial(jax.jit, donate_argnums=0)
def _add(acc: Any, tree: Any, weight: jax.Array) -> Any:
    return jax.tree.map(lambda a, x: (a + x * weight).astype(a.dtype) if _is_float(a) else jnp.maximum(a, x), acc, tree)


def _sum_over_processes(acc: Any, total: float, stats: np.ndarray) -> tuple[Any, float, np.ndarray]:
    """Sums (of counters, the largest), the same in every process: the one collective."""
    devices = [min((d for d in jax.devices() if d.process_index == i), key=lambda d: d.id) for i in range(_count())]
    mesh = Mesh(np.asarray(devices), ("process",), axis_types=(AxisType.Auto,))
    mine, split = devices[jax.process_index()], NamedSharding(mesh, P("process"))

    def share(x: Any) -> jax.Array:
        local = jax.device_put(jnp.asarray(x)[None], mine)
        return jax.make_array_from_single_device_arrays((_count(), *local.shape[1:]), split, [local])

    # f32 holds token counts and sums of losses to seven digits, which is more than they mean.
    shared = jax.tree.map(share, (acc, jnp.float32(total), jnp.asarray(stats, jnp.float32)))
    acc, all_, sums = jax.tree.map(lambda x: x.addressable_data(0), _make_sum(mesh)(shared))
    return acc, float(all_), np.asarray(sums, np.float64)


@functools.cache
def _make_sum(mesh: Mesh) -> Any:
    def total(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.sum(x, axis=0) if _is_float(x) else jnp.max(x, axis=0), tree)

    return jax.jit(total, out_shardings=NamedSharding(mesh, P()))


def _count() -> int:
    return jax.process_count()
