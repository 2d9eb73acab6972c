"""The rows of the live batch on the device: their memory, shared prompt prefixes, and the programs that act on them.

Every program comes from the pool. Their number stays small because a memory changes its shape in hops from one
bucket to the next, because prefixes are kept one row each (neither how far a batch shrinks at once nor how many
prompts were prefilled together names a program), and because strategies of equal verify width share a program.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from tlt_jax.models.config import ModelConfig
from tlt_jax.rollout import speculate as spec, steps
from tlt_jax.rollout.config import REJECTION, RolloutConfig
from tlt_jax.rollout.executables import ExecutablePool
from tlt_jax.rollout.memory import Memory, init_memory, put_memory, resize_memory
from tlt_jax.rollout.prefix import PrefillGroup, Prompt, chunk_widths, group_prompts
from tlt_jax.rollout.scheduler import bucket_path
from tlt_jax.rollout.tree import Tree, host_chain
from tlt_jax.sharding import replicated
from tlt_jax.types import DraftModel, Params

# Rows that the drafter takes in per call, where more are pending than a round ingests by itself.
INGEST_ROWS = (16, 128)


@dataclasses.dataclass
class EngineStats:
    """Counts since the engine was made."""

    dispatches: int = 0
    rounds: int = 0
    row_rounds: int = 0  # rounds times rows of the batch, idle rows included
    tokens: int = 0
    prefill_tokens: int = 0
    resizes: int = 0
    drafted: int = 0
    accepted: int = 0
    ingested: int = 0  # rows taken into the drafter's cache by calls of their own, padding included
    # By strategy: rounds, rounds times the rows that were live in them, and what these rows were given.
    arm_rounds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    arm_row_rounds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    arm_tokens: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


class DeviceRows:
    """The memory of one engine's live batch and the prefixes that wait to be copied into it."""

    def __init__(
        self,
        model: ModelConfig,
        config: RolloutConfig,
        kv_buckets: Sequence[int],
        mesh: Mesh,
        pool: ExecutablePool,
        stats: EngineStats,
        drafter: DraftModel | None = None,
    ):
        self.model, self.config, self.pool, self.stats, self.drafter = model, config, pool, stats, drafter
        self.memory: Memory | None = None
        self.shape = (0, 0)  # rows, slots
        self.prefixes: dict[Prompt, Memory] = {}  # one row each: all tokens of the prompt but the last
        self._kv_buckets = tuple(kv_buckets)
        self._cache_dtype = config.cache_dtype or model.dtype
        self._feature_layers = drafter.feature_layers if drafter is not None else ()
        self._mesh, self._replicated = mesh, replicated(mesh)
        self._draft_sharding = None
        if drafter is not None:
            draft_heads = jax.eval_shape(lambda: drafter.init_cache(1, 64, self._cache_dtype)).k.shape[1]
            self._draft_sharding = self._by_heads(draft_heads)
        self._sharding = Memory(  # of a memory: the target's cache, the drafter's, the features
            target=self._by_heads(model.num_kv_heads),  # pyright: ignore[reportArgumentType]
            draft=self._draft_sharding,  # pyright: ignore[reportArgumentType]
            features=self._replicated if drafter is not None else None,  # pyright: ignore[reportArgumentType]
        )
        self._sharding_without_draft = dataclasses.replace(self._sharding, draft=None)

    def _by_heads(self, num_kv_heads: int) -> NamedSharding:
        return NamedSharding(self._mesh, P() if num_kv_heads % self._mesh.shape["tensor"] else P(None, "tensor"))

    def release(self) -> None:
        """Frees the memory and the prefixes."""
        self.memory, self.shape = None, (0, 0)
        self.prefixes.clear()

    def fit(self, num_rows: int, capacity: int, source: Sequence[int] | None) -> None:
        """Gives the memory its buckets; `source` maps new rows to old ones, None when nothing alive is in it."""
        shape = (num_rows, capacity)
        unmoved = source is None or list(source) == list(range(num_rows))
        if self.memory is not None and shape == self.shape and unmoved:
            return
        if source is None or self.memory is None:
            self.memory = None  # free the old one first
            self.memory = self._alloc(num_rows, capacity)
        else:
            rows = list(source)
            for hop in bucket_path(self.shape, shape, self.config.batch_buckets, self._kv_buckets):
                self.memory = self._resize(self.memory, self.shape, hop, rows)
                self.shape, rows = hop, list(range(num_rows))
        self.shape = shape

    def fill(self, prompts: Mapping[int, Prompt], params: Params) -> None:
        """Copies each prompt's prefix into its row, after prefilling those that are not there yet."""
        missing = [p for p in prompts.values() if p not in self.prefixes]
        for group in group_prompts(missing, self._kv_buckets, self.config.prefill_buckets):
            self._prefill(group, params)
        for row, prompt in prompts.items():
            if len(prompt) > 1:
                self._put(self.prefixes[prompt], row)

    def keep(self, prompts: Iterable[Prompt]) -> None:
        """Drops all other prefixes."""
        needed = set(prompts) if self.prefixes else ()
        self.prefixes = {p: memory for p, memory in self.prefixes.items() if p in needed}

    def decode(
        self, rows: steps.Rows, truncate: bool, max_rounds: int, exit_live: int, params: Params
    ) -> steps.DecodeOut:
        """Starts up to `max_rounds` plain rounds."""
        num_rounds = self.config.rounds_per_dispatch
        fn = functools.partial(_decode, self.model, self._feature_layers, num_rounds, truncate)
        args = (params, self.memory, rows, np.int32(min(max_rounds, num_rounds)), np.int32(exit_live))
        out_shardings = (self._sharding, self._replicated)
        self.memory, out = self._call(("decode", *self.shape, num_rounds, truncate), fn, args, (1,), out_shardings)
        return out

    def ingest(
        self, num_rows: int, tokens_BT: np.ndarray, start_B: np.ndarray, draft_params: Any, params: Params
    ) -> None:
        """Takes T = `num_rows` (one of `INGEST_ROWS`) committed positions per row into the drafter's cache."""
        assert self.memory is not None and self.drafter is not None
        fn = functools.partial(_ingest, self.drafter)
        args = (params, draft_params, self.memory.draft, self.memory.features, tokens_BT, start_B)
        key = ("ingest", *self.shape, num_rows)
        draft = self._call(key, fn, args, (2,), self._draft_sharding)
        self.memory = dataclasses.replace(self.memory, draft=draft)
        self.stats.ingested += tokens_BT.size

    def draft(
        self,
        shape: spec.Shape,
        rows: steps.Rows,
        pending: spec.Pending,
        exit_live: int,
        draft_params: Any,
        params: Params,
    ) -> Tree:
        """Starts the drafting half of a round."""
        assert self.memory is not None and self.drafter is not None
        fn = functools.partial(_draft, self.drafter, shape)
        memory = self.memory
        args = (params, draft_params, memory.draft, memory.features, rows, pending, np.int32(exit_live))
        out_shardings = (self._draft_sharding, self._replicated)
        draft, tree = self._call(("draft", *self.shape, shape), fn, args, (2,), out_shardings)
        self.memory = dataclasses.replace(memory, draft=draft)
        return tree

    def verify(
        self, truncate: bool, rows: steps.Rows, tree: Tree, exit_live: int, params: Params
    ) -> tuple[steps.Rows, spec.Pending, spec.SpecOut]:
        """Starts the verifying half of a round."""
        assert self.memory is not None
        width = tree.tokens.shape[1]
        rule = self.config.verify
        fn = functools.partial(_verify, self.model, self._feature_layers, truncate, rule)
        memory, draft = dataclasses.replace(self.memory, draft=None), self.memory.draft
        out_shardings = (self._sharding_without_draft, *(self._replicated,) * 3)
        args = (params, memory, rows, tree, np.int32(exit_live))
        key = ("verify", *self.shape, width, truncate, rule == REJECTION, tree.log_q is None)
        memory, rows, pending, out = self._call(key, fn, args, (1,), out_shardings)
        self.memory = dataclasses.replace(memory, draft=draft)
        return rows, pending, out

    def wait(self) -> None:
        """Until the device has done all that was started."""
        jax.block_until_ready(self.memory)

    def read_features(self, row: int) -> jax.Array:
        """The features of a row, bf16[S,D']; to be fetched before the next call that changes the memory."""
        assert self.memory is not None
        args = (self.memory.features, np.int32(row))
        return self._call(("features", *self.shape), _read_features, args, (), self._replicated)

    def warm_up(
        self,
        empty_rows: Callable[[int], steps.Rows],
        truncates: Sequence[bool],
        shapes: Callable[[int], Iterable[tuple[spec.Shape, bool]]],
        draft_params: Any,
        params: Params,
    ) -> None:
        """Runs every program once, on rows that are not alive.

        Args:
          empty_rows: gives that many dead rows.
          truncates: variants of the programs that draw tokens.
          shapes: speculative shapes for a batch bucket, and whether the drafter grows them.
          draft_params: the drafter's weights, if there are any.
          params: target parameters.
        """
        row_buckets, kv_buckets = self.config.batch_buckets, self._kv_buckets
        stats, prefixes = dataclasses.replace(self.stats), {}
        for slots in kv_buckets:
            widths = chunk_widths(self.config.prefill_chunk, slots)
            for num_rows, width in itertools.product(self.config.prefill_buckets, widths):
                prompt = (0,) * (width + 1)
                self._prefill(PrefillGroup(prompts=(prompt,) * num_rows, num_rows=num_rows, capacity=slots), params)
                prefixes[slots] = self.prefixes.pop(prompt)
        for i, j in itertools.product(range(len(row_buckets)), range(len(kv_buckets))):
            self.fit(row_buckets[i], kv_buckets[j], None)
            for slots in kv_buckets[: j + 1]:
                self._put(prefixes[slots], 0)
            rows = empty_rows(row_buckets[i])
            for truncate in truncates:
                self.decode(rows, truncate, self.config.rounds_per_dispatch, 0, params)
            self._warm_up_speculation(rows, truncates, shapes(row_buckets[i]), draft_params, params)
            hops = [(num_rows, kv_buckets[j]) for num_rows in _beside(row_buckets, i)]
            hops += [(row_buckets[i], slots) for slots in _beside(kv_buckets, j)]
            for hop in hops:
                assert self.memory is not None
                self._resize(self.memory, self.shape, hop, [])
        self.release()
        self.stats.prefill_tokens, self.stats.resizes = stats.prefill_tokens, stats.resizes
        self.stats.ingested = stats.ingested

    def _warm_up_speculation(self, rows: steps.Rows, truncates, shapes, draft_params: Any, params: Params) -> None:
        num_rows, slots = self.shape
        zero_B = np.zeros(num_rows, np.int32)
        for shape, is_drafted in shapes:
            tree = host_chain(np.zeros((num_rows, shape.width), np.int32), zero_B)
            if is_drafted:
                pending = spec.Pending(tokens=np.zeros((num_rows, shape.width), np.int32), num=zero_B)  # pyright: ignore
                tree = self.draft(shape, rows, pending, 0, draft_params, params)
            for truncate in truncates:
                self.verify(truncate, rows, tree, 0, params)
        if self.drafter is not None:
            self.read_features(0)
            if draft_params is not None:
                for n in INGEST_ROWS:
                    if n <= slots:
                        self.ingest(n, np.zeros((num_rows, n), np.int32), zero_B, draft_params, params)

    def _alloc(self, num_rows: int, capacity: int) -> Memory:
        def fn() -> Memory:
            return init_memory(self.model, self.drafter, num_rows, capacity, self._cache_dtype)

        return self._call(("alloc", num_rows, capacity), fn, ())

    def _resize(self, memory: Memory, old: tuple[int, int], new: tuple[int, int], rows: Sequence[int]) -> Memory:
        """`rows` names the old row of each new one; missing ones do not matter."""
        index = np.zeros(new[0], np.int32)
        index[: len(rows)] = rows[: new[0]]
        self.stats.resizes += 1
        return self._call(("resize", old, new), functools.partial(_resize, new[1]), (memory, index))

    def _prefill(self, group: PrefillGroup, params: Params) -> None:
        num_rows, capacity = group.num_rows, group.capacity
        memory = dataclasses.replace(self._alloc(num_rows, capacity), draft=None)
        for tokens, start in group.chunks(self.config.prefill_chunk):
            fn = functools.partial(_prefill, self.model, self._feature_layers)
            args = (params, tokens, start, memory)
            key = ("prefill", tokens.shape, capacity)
            memory = self._call(key, fn, args, (3,), self._sharding_without_draft)
        self.stats.prefill_tokens += sum(len(p) - 1 for p in group.prompts)
        take = functools.partial(_resize, capacity)
        for i, prompt in enumerate(group.prompts):
            row = np.full(1, i, np.int32)
            self.prefixes[prompt] = (
                self._call(("take", num_rows, capacity), take, (memory, row), (), self._sharding_without_draft)
                if num_rows > 1
                else memory
            )

    def _put(self, prefix: Memory, row: int) -> None:
        key = ("put", self.shape, prefix.target[0].k.shape[-1])
        self.memory = self._call(key, put_memory, (self.memory, prefix, np.int32(row)), donate=(0,))

    def _call(
        self,
        key: tuple,
        fn: Callable[..., Any],
        args: tuple,
        donate: tuple[int, ...] = (),
        out_shardings: Any = None,
    ) -> Any:
        """Runs the pool's program for `key`; host arrays are replicated over the worker's devices.

        All memories have one sharding, whatever program they come from, so that any may follow any.
        """

        def shape(x: Any) -> jax.ShapeDtypeStruct:
            sharding = x.sharding if isinstance(x, jax.Array) else self._replicated
            return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding)

        out_shardings = out_shardings or self._sharding
        program = self.pool.get((*key, self.drafter), fn, lambda: jax.tree.map(shape, args), donate, out_shardings)
        return program(*args)


def _beside(buckets: Sequence[int], i: int) -> tuple[int, ...]:
    return (*buckets[max(i - 1, 0) : i], *buckets[i + 1 : i + 2])


# Module-level, with static arguments first, so that a program's trace depends on nothing but its key.


def _decode(model, feature_layers, num_rounds, truncate, params, memory, rows, max_rounds, exit_live):
    return steps.decode(params, model, feature_layers, num_rounds, truncate, memory, rows, max_rounds, exit_live)


def _prefill(model, feature_layers, params, tokens_BT, start_B, memory):
    return steps.prefill(params, model, feature_layers, tokens_BT, start_B, memory)


def _ingest(drafter, params, draft_params, cache, features_BSD, tokens_BT, start_B):
    return spec.ingest(params, draft_params, drafter, cache, features_BSD, tokens_BT, start_B)


def _draft(drafter, shape, params, draft_params, cache, features_BSD, rows, pending, exit_live):
    return spec.draft(params, draft_params, drafter, shape, cache, features_BSD, rows, pending, exit_live)


def _verify(model, feature_layers, truncate, rule, params, memory, rows, tree, exit_live):
    return spec.verify(params, model, feature_layers, truncate, rule, memory, rows, tree, exit_live)


def _read_features(features_BSD, row):
    return jax.lax.dynamic_index_in_dim(features_BSD, row, keepdims=False).astype(jnp.bfloat16)


def _resize(capacity, memory, rows):
    return resize_memory(memory, rows, capacity)
