"""Meshes, (path regex -> PartitionSpec) tables, and versioned copies of weights.

A mesh has the axes `data`, `fsdp` and `tensor`, in this order, always all three. Batches are split over
(`data`, `fsdp`), weights over (`fsdp`, `tensor`). A rollout worker is a mesh of its own whose `tensor` axis
spans its devices.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from tlt_jax.types import Params

AXES = ("data", "fsdp", "tensor")
BATCH = P(("data", "fsdp"))

# Weights are [out, in]: column-parallel ones split their outputs over `tensor`, row-parallel ones their inputs.
PARAM_TABLE: tuple[tuple[str, P], ...] = (
    (r"^(embed|head)/weight$", P("tensor", "fsdp")),
    (r"^layers_\d+/attn/(q|k|v)/weight$", P("tensor", "fsdp")),
    (r"^layers_\d+/attn/(q|k|v)/bias$", P("tensor")),
    (r"^layers_\d+/attn/o/weight$", P("fsdp", "tensor")),
    (r"^layers_\d+/attn/o/bias$", P()),
    (r"^layers_\d+/mlp/(gate|up)/weight$", P("tensor", "fsdp")),
    (r"^layers_\d+/mlp/down/weight$", P("fsdp", "tensor")),
    (r"^(layers_\d+/(attn_norm|mlp_norm|attn/(q|k)_norm)|final_norm)/scale$", P()),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each axis; -1 on one axis takes what is left."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The learner's mesh over `devices` (default: all).

    Raises:
      ValueError: where the axes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = [config.data, config.fsdp, config.tensor]
    known = max(int(np.prod([n for n in shape if n != -1])), 1)
    fits = len(devices) == known if -1 not in shape else len(devices) % known == 0
    if min(shape) < -1 or 0 in shape or shape.count(-1) > 1 or not fits:
        raise ValueError(
            f"mesh: got data={shape[0]}, fsdp={shape[1]}, tensor={shape[2]} for {len(devices)} devices; expected a "
            "product equal to the number of devices, with -1 on at most one axis"
        )
    shape = [len(devices) // known if n == -1 else n for n in shape]
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def worker_meshes(devices: Sequence[jax.Device], num_workers: int) -> list[Mesh]:
    """Splits `devices` into `num_workers` meshes of equal size, tensor-parallel inside each.

    With more workers than devices (a laptop), workers share devices one each in turn.

    Raises:
      ValueError: where the workers do not divide the devices.
    """
    if num_workers < 1:
        raise ValueError(f"workers: got {num_workers}, expected at least 1")
    if num_workers >= len(devices):
        groups = [[devices[i % len(devices)]] for i in range(num_workers)]
    elif len(devices) % num_workers:
        raise ValueError(f"workers: got {num_workers} for {len(devices)} devices, expected a divisor of the devices")
    else:
        size = len(devices) // num_workers
        groups = [list(devices[i * size : (i + 1) * size]) for i in range(num_workers)]
    return [make_mesh(MeshConfig(data=1, fsdp=1, tensor=len(g)), g) for g in groups]


def path_str(path: tuple[Any, ...]) -> str:
    """`layers_0/attn/q/weight` for a key path of `jax.tree_util`."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def spec_for(path: str, table: Sequence[tuple[str, P]] = PARAM_TABLE) -> P:
    """The spec of the one rule that matches `path`.

    Raises:
      ValueError: where no rule, or more than one, matches.
    """
    hits = [spec for pattern, spec in table if re.search(pattern, path)]
    if len(hits) != 1:
        raise ValueError(f"sharding: got {len(hits)} rules for parameter {path!r}, expected exactly one")
    return hits[0]


def param_shardings(shapes: Params, mesh: Mesh, table: Sequence[tuple[str, P]] = PARAM_TABLE, heads: int = 0) -> Params:
    """A NamedSharding for every parameter.

    An axis that does not divide its dimension is left out (that dimension is replicated), and the attention
    projections are split over `tensor` only if whole key/value heads fall on each device.

    Args:
      shapes: tree of arrays or `ShapeDtypeStruct`.
      mesh: with the axes of `AXES`.
      table: (path regex, spec) rules.
      heads: number of key/value heads; 0 skips the whole-heads rule.
    """

    def choose(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = path_str(path)
        spec = spec_for(name, table)
        split_heads = "/attn/" in name and heads and heads % mesh.shape["tensor"]
        axes = []
        for size, axis in zip(leaf.shape, tuple(spec) + (None,) * (len(leaf.shape) - len(spec)), strict=True):
            drop = axis is None or size % mesh.shape[axis] or (axis == "tensor" and split_heads)
            axes.append(None if drop else axis)
        return NamedSharding(mesh, P(*axes))

    return jax.tree_util.tree_map_with_path(choose, shapes)


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, P())


@dataclasses.dataclass(frozen=True)
class Versioned:
    """Weights with the number of the policy update that made them."""

    params: Params
    version: int


def publish(params: Params, shardings: Params, version: int, dtype: str | None = None) -> Versioned:
    """One copy; see `publish_all`."""
    return publish_all(params, [shardings], version, dtype)[0]


def publish_all(params: Params, shardings: Sequence[Params], version: int, dtype: str | None = None) -> list[Versioned]:
    """Real copies of `params` in other shardings and another dtype, one parameter at a time.

    Never an alias: the learner donates its parameters to the next update, and `device_put` to an equal sharding
    would share their buffers. Memory is bounded by the copies plus one parameter.

    Where `params` lie on the devices of several processes, all of these call this together; each asks for copies on
    its own devices.

    Args:
      params: the learner's.
      shardings: a tree like `params` for each copy.
      version: of the weights.
      dtype: of the copies; None keeps that of `params`.
    """

    def copy(x: jax.Array, *to: NamedSharding) -> list[jax.Array]:
        if x.is_fully_addressable:
            return [jax.device_put(jnp.array(x, dtype=dtype, copy=True), sharding) for sharding in to]
        whole = _gather(x, dtype or x.dtype.name)
        return [jax.device_put(whole, sharding) for sharding in to]

    leaves, tree = jax.tree.flatten(params)
    targets = [tree.flatten_up_to(sharding) for sharding in shardings]
    copies = zip(*(copy(x, *to) for x, *to in zip(leaves, *targets, strict=True)), strict=True)
    return [Versioned(params=tree.unflatten(c), version=version) for c in copies]


def _gather(x: jax.Array, dtype: str) -> jax.Array:
    """All of an array that is spread over processes, on one device of this one."""
    assert isinstance(x.sharding, NamedSharding) and isinstance(x.sharding.mesh, Mesh)
    return _copy_everywhere(dtype, replicated(x.sharding.mesh))(x).addressable_shards[0].data


@functools.cache
def _copy_everywhere(dtype: str, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: jnp.array(x, dtype=dtype, copy=True), out_shardings=sharding)
