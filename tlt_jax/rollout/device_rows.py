"""The rows of the live batch on the device: one cache, shared prompt prefixes, and the programs that move them.

Every program comes from the pool. Their number stays small because a cache changes its shape in hops from one
bucket to the next, and because prefixes are kept one row each: neither how far a batch shrinks at once nor how many
prompts were prefilled together names a program.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from tlt_jax.models.cache import Cache, init_cache, put_row, resize
from tlt_jax.models.config import ModelConfig
from tlt_jax.rollout import steps
from tlt_jax.rollout.config import RolloutConfig
from tlt_jax.rollout.executables import ExecutablePool
from tlt_jax.rollout.prefix import PrefillGroup, Prompt, group_prompts
from tlt_jax.rollout.scheduler import bucket_path
from tlt_jax.sharding import replicated
from tlt_jax.types import Params


@dataclasses.dataclass
class EngineStats:
    """Counts since the engine was made."""

    dispatches: int = 0
    rounds: int = 0
    row_rounds: int = 0  # rounds times rows of the batch, idle rows included
    tokens: int = 0
    prefill_tokens: int = 0
    resizes: int = 0


class DeviceRows:
    """The decode cache of one engine and the prefixes that wait to be copied into it."""

    def __init__(self, model: ModelConfig, config: RolloutConfig, mesh: Mesh, pool: ExecutablePool, stats: EngineStats):
        self.model, self.config, self.pool, self.stats = model, config, pool, stats
        self.cache: Cache | None = None
        self.shape = (0, 0)  # rows, slots
        self.prefixes: dict[Prompt, Cache] = {}  # one row each: all tokens of the prompt but the last
        tensor = mesh.shape["tensor"]
        self._cache_dtype = config.cache_dtype or model.dtype
        self._cache_sharding = NamedSharding(mesh, P() if model.num_kv_heads % tensor else P(None, "tensor"))
        self._replicated = replicated(mesh)

    def release(self) -> None:
        """Frees the cache and the prefixes."""
        self.cache, self.shape = None, (0, 0)
        self.prefixes.clear()

    def fit(self, num_rows: int, capacity: int, source: Sequence[int] | None) -> None:
        """Gives the cache its buckets; `source` maps new rows to old ones, None when nothing alive is in it."""
        shape = (num_rows, capacity)
        unmoved = source is None or list(source) == list(range(num_rows))
        if self.cache is not None and shape == self.shape and unmoved:
            return
        if source is None or self.cache is None:
            self.cache = None  # free the old one first
            self.cache = self._alloc(num_rows, capacity)
        else:
            rows = list(source)
            for hop in bucket_path(self.shape, shape, self.config.batch_buckets, self.config.kv_buckets):
                self.cache = self._resize(self.cache, self.shape, hop, rows)
                self.shape, rows = hop, list(range(num_rows))
        self.shape = shape

    def fill(self, prompts: Mapping[int, Prompt], params: Params) -> None:
        """Copies each prompt's prefix into its row, after prefilling those that are not there yet."""
        missing = [p for p in prompts.values() if p not in self.prefixes]
        for group in group_prompts(missing, self.config.kv_buckets, self.config.prefill_buckets):
            self._prefill(group, params)
        for row, prompt in prompts.items():
            if len(prompt) > 1:
                self._put(self.prefixes[prompt], row)

    def keep(self, prompts: Iterable[Prompt]) -> None:
        """Drops all other prefixes."""
        needed = set(prompts) if self.prefixes else ()
        self.prefixes = {p: cache for p, cache in self.prefixes.items() if p in needed}

    def decode(self, rows: steps.Rows, truncate: bool, exit_live: int, params: Params) -> steps.DecodeOut:
        """Starts several rounds on the cache."""
        num_rounds = self.config.rounds_per_dispatch
        fn = functools.partial(_decode, self.model, num_rounds, truncate)
        args = (params, self.cache, rows, np.int32(num_rounds), np.int32(exit_live))
        out_shardings = (self._cache_sharding, self._replicated)
        self.cache, out = self._call(("decode", *self.shape, num_rounds, truncate), fn, args, (1,), out_shardings)
        return out

    def warm_up(self, empty_rows: Callable[[int], steps.Rows], truncates: Sequence[bool], params: Params) -> None:
        """Runs every program once, on rows that are not alive.

        Args:
          empty_rows: gives that many dead rows.
          truncates: variants of the decode program.
          params: target parameters.
        """
        row_buckets, kv_buckets = self.config.batch_buckets, self.config.kv_buckets
        stats, prefixes = dataclasses.replace(self.stats), {}
        for slots in kv_buckets:
            for num_rows in self.config.prefill_buckets:
                self._prefill(PrefillGroup(prompts=((0, 0),) * num_rows, num_rows=num_rows, capacity=slots), params)
            prefixes[slots] = self.prefixes.pop((0, 0))
        for i, j in itertools.product(range(len(row_buckets)), range(len(kv_buckets))):
            self.fit(row_buckets[i], kv_buckets[j], None)
            for slots in kv_buckets[: j + 1]:
                self._put(prefixes[slots], 0)
            for truncate in truncates:
                self.decode(empty_rows(row_buckets[i]), truncate, 0, params)
            hops = [(num_rows, kv_buckets[j]) for num_rows in _beside(row_buckets, i)]
            hops += [(row_buckets[i], slots) for slots in _beside(kv_buckets, j)]
            for hop in hops:
                assert self.cache is not None
                self._resize(self.cache, self.shape, hop, [])
        self.release()
        self.stats.prefill_tokens, self.stats.resizes = stats.prefill_tokens, stats.resizes

    def _alloc(self, num_rows: int, capacity: int) -> Cache:
        def fn() -> Cache:
            return init_cache(self.model, num_rows, capacity, self._cache_dtype)

        return self._call(("alloc", num_rows, capacity), fn, ())

    def _resize(self, cache: Cache, old: tuple[int, int], new: tuple[int, int], rows: Sequence[int]) -> Cache:
        """`rows` names the old row of each new one; missing ones do not matter."""
        index = np.zeros(new[0], np.int32)
        index[: len(rows)] = rows[: new[0]]
        self.stats.resizes += 1
        return self._call(("resize", old, new), functools.partial(_resize, new[1]), (cache, index))

    def _prefill(self, group: PrefillGroup, params: Params) -> None:
        num_rows, capacity = group.num_rows, group.capacity
        cache = self._alloc(num_rows, capacity)
        for tokens, start in group.chunks(self.config.prefill_chunk):
            fn = functools.partial(_prefill, self.model)
            cache = self._call(("prefill", tokens.shape, capacity), fn, (params, tokens, start, cache), donate=(3,))
        self.stats.prefill_tokens += sum(len(p) - 1 for p in group.prompts)
        take = functools.partial(_resize, capacity)
        for i, prompt in enumerate(group.prompts):
            row = np.full(1, i, np.int32)
            self.prefixes[prompt] = (
                self._call(("take", num_rows, capacity), take, (cache, row)) if num_rows > 1 else cache
            )

    def _put(self, prefix: Cache, row: int) -> None:
        key = ("put", self.shape, prefix[0].k.shape[-1])
        self.cache = self._call(key, put_row, (self.cache, prefix, np.int32(row)), donate=(0,))

    def _call(
        self,
        key: tuple,
        fn: Callable[..., Any],
        args: tuple,
        donate: tuple[int, ...] = (),
        out_shardings: Any = None,
    ) -> Any:
        """Runs the pool's program for `key`; host arrays are replicated over the worker's devices.

        All caches have one sharding, whatever program they come from, so that any may follow any.
        """

        def shape(x: Any) -> jax.ShapeDtypeStruct:
            sharding = x.sharding if isinstance(x, jax.Array) else self._replicated
            return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding)

        out_shardings = out_shardings or self._cache_sharding
        program = self.pool.get(key, fn, lambda: jax.tree.map(shape, args), donate, out_shardings)
        return program(*args)


def _beside(buckets: Sequence[int], i: int) -> tuple[int, ...]:
    return (*buckets[max(i - 1, 0) : i], *buckets[i + 1 : i + 2])


# Module-level, with static arguments first, so that a program's trace depends on nothing but its key.


def _decode(model, num_rounds, truncate, params, cache, rows, max_rounds, exit_live):
    return steps.decode(params, model, num_rounds, truncate, cache, rows, max_rounds, exit_live)


def _prefill(model, params, tokens_BT, start_B, cache):
    return steps.prefill(params, model, tokens_BT, start_B, cache)


def _resize(capacity, cache, rows):
    return resize(cache, rows, capacity)
