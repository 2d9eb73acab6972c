"""One pool of ahead-of-time compiled programs, keyed by shape, counted and bounded.

The counterpart of a CUDA-graph pool: every program that the engine runs is compiled here, once per key, on
first use or by a warm-up, and nothing else compiles during a rollout. The least recently used program is dropped
when the pool is full. Engines of one model, cache dtype and mesh may share a pool across threads.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.experimental import serialize_executable


@dataclasses.dataclass
class PoolStats:
    num_compiled: int = 0  # since the pool was made, evicted ones included
    compile_s: float = 0.0
    evicted: int = 0


class ExecutablePool:
    """Compiles `fn` for the shapes of a key, and returns the compiled program ever after."""

    def __init__(self, max_programs: int = 512):
        if max_programs < 1:
            raise ValueError(f"executables.max_programs: got {max_programs}, expected at least 1")
        self._max_programs = max_programs
        self._programs: collections.OrderedDict[Hashable, jax.stages.Compiled] = collections.OrderedDict()
        self._lock = threading.Lock()
        self.stats = PoolStats()

    def __len__(self) -> int:
        return len(self._programs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._programs

    def get(
        self,
        key: Hashable,
        fn: Callable[..., Any],
        shapes: Callable[[], tuple],
        donate: tuple[int, ...] = (),
        out_shardings: Any = None,
    ) -> jax.stages.Compiled:
        """The program for `key`.

        Args:
          key: names `fn` and all static choices, shapes and shardings.
          fn: a pure function of arrays.
          shapes: gives its arguments as `jax.ShapeDtypeStruct` trees, with shardings where they matter.
          donate: positions of the arguments whose buffers the program may reuse.
          out_shardings: of its results, a tree prefix.
        """
        with self._lock:
            if key in self._programs:
                self._programs.move_to_end(key)
                return self._programs[key]
            start_s = time.perf_counter()
            jitted = jax.jit(fn, donate_argnums=donate, out_shardings=out_shardings)
            program = jitted.lower(*shapes()).compile()
            self.stats.num_compiled += 1
            self.stats.compile_s += time.perf_counter() - start_s
            self._programs[key] = program
            if len(self._programs) > self._max_programs:
                self._programs.popitem(last=False)
                self.stats.evicted += 1
            return program

    def bytes_by_key(self) -> dict[Any, int]:
        """Bytes of each program as it would be stored, and of its temporary buffers.

        The serialised size counts the code on every platform; XLA's own figure for it is 0 on CPU.
        """
        sizes = {}
        for key, program in self._programs.items():
            memory = program.memory_analysis()
            temporary = 0 if memory is None else memory.temp_size_in_bytes
            sizes[key] = len(serialize_executable.serialize(program)[0]) + temporary
        return sizes

    def num_bytes(self) -> int:
        """Bytes of all programs in the pool."""
        return sum(self.bytes_by_key().values())
