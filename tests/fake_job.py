"""A job whose processes are threads of this one, and whose key-value store is a dict."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax

from tlt_jax.processes import DistributedConfig, Group, PeerError


class DictStore:
    def __init__(self):
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key, value, allow_overwrite=False):
        with self._changed:
            assert allow_overwrite or key not in self._values
            self._values[key] = value
            self._changed.notify_all()

    def key_value_set(self, key, value, allow_overwrite=False):
        self.key_value_set_bytes(key, value.encode(), allow_overwrite)

    def blocking_key_value_get_bytes(self, key, timeout_in_ms):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: timed out")
            return self._values[key]

    def key_value_dir_get(self, key):
        with self._changed:
            return [(k, v.decode()) for k, v in self._values.items() if k.startswith(key)]

    def key_value_delete(self, key):
        with self._changed:
            del self._values[key]

    def keys(self, prefix):
        return sorted(k for k in self._values if k.startswith(prefix))


class FakeJob:
    """`job(work, count)` runs `work(group)` in `count` processes."""

    def __init__(self):
        self._groups: list[Group] = []

    def __call__(self, work: Callable[[Group], Any], count: int = 2, **config: Any) -> tuple[list[Any], DictStore]:
        """What each process returned or raised, and the store."""
        store = DictStore()
        results: list[Any] = [None] * count

        def process(i: int) -> None:
            group = Group(i, count, store, DistributedConfig(**config))
            self._groups.append(group)
            try:
                results[i] = work(group)
            except (ValueError, OSError, PeerError) as error:
                results[i] = error

        threads = [threading.Thread(target=process, args=(i,)) for i in range(count)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(timeout=30)
            assert not t.is_alive()
        return results, store

    def close(self) -> None:
        """Ends the watches, before one of them ends this process."""
        for group in self._groups:
            group._is_closed.set()
            group._is_heard.set()
