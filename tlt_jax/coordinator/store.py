"""Where workers and the coordinator leave messages for each other: a small key-value store.

Within one process it is a dictionary. Across processes it is the store of jax.distributed's coordination service, which
the job runs on anyway: no sockets of our own. A call there costs some 0.2 ms, and waiting for a key costs nothing until
it is set.

Keys are paths, `rollout/3/report/0/7`. A key is written once; what changes has a counter in its name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
from jax._src import distributed  # jax has no public route to the client of its coordination service


class Store(Protocol):
    """All methods may be called from any thread of any process."""

    def set(self, key: str, value: str) -> None:
        """Writes a key that was not written before."""
        ...

    def get(self, key: str, timeout_s: float = 0.0) -> str | None:
        """The value; None where the key is not written within `timeout_s`."""
        ...

    def list(self, prefix: str) -> dict[str, str]:
        """All keys under `prefix` + "/", by whole name."""
        ...

    def add(self, key: str, number: int) -> int:
        """Adds to a counter, which begins at 0, in one indivisible step; returns its new value."""
        ...

    def delete(self, key: str) -> None:
        """Removes a key and all keys below it; nothing happens where there are none."""
        ...


class LocalStore:
    """The store of a job of one process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            if key in self._values:
                raise ValueError(f"store: got {key!r} a second time, expected every key to be written once")
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float = 0.0) -> str | None:
        with self._changed:
            if timeout_s > 0:
                self._changed.wait_for(lambda: key in self._values, timeout_s)
            return self._values.get(key)

    def list(self, prefix: str) -> dict[str, str]:
        with self._changed:
            return {key: value for key, value in self._values.items() if key.startswith(f"{prefix}/")}

    def add(self, key: str, number: int) -> int:
        with self._changed:
            self._counts[key] = self._counts.get(key, 0) + number
            return self._counts[key]

    def delete(self, key: str) -> None:
        with self._changed:
            for table in (self._values, self._counts):
                for name in [name for name in table if name == key or name.startswith(f"{key}/")]:
                    del table[name]


class ServiceStore:
    """The store of a job whose processes called `jax.distributed.initialize`."""

    def __init__(self, prefix: str = "tlt_jax") -> None:
        """Takes the client of this process.

        Args:
          prefix: of all keys.

        Raises:
          ValueError: the process is not part of a distributed job.
        """
        client = distributed.global_state.client
        if client is None:
            raise ValueError("store: got no coordination service, expected jax.distributed.initialize() before")
        self._client: Any = client
        self._prefix = prefix

    def set(self, key: str, value: str) -> None:
        self._client.key_value_set(self._name(key), value)

    def get(self, key: str, timeout_s: float = 0.0) -> str | None:
        try:
            if timeout_s > 0:
                return self._client.blocking_key_value_get(self._name(key), max(int(timeout_s * 1e3), 1))
            return self._client.key_value_try_get(self._name(key))
        except jax.errors.JaxRuntimeError as error:
            if str(error).startswith(("NOT_FOUND", "DEADLINE_EXCEEDED")):
                return None
            raise

    def list(self, prefix: str) -> dict[str, str]:
        found = self._client.key_value_dir_get(self._name(prefix) + "/")
        return {key.removeprefix(f"{self._prefix}/"): value for key, value in found}

    def add(self, key: str, number: int) -> int:
        return int(self._client.key_value_increment(self._name(key), number))

    def delete(self, key: str) -> None:
        self._client.key_value_delete(self._name(key))

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"


class TimedStore:
    """Another store, with a count of the calls that do not wait and the seconds spent in them, by thread."""

    def __init__(self, store: Store):
        self.store = store
        self._spent = threading.local()

    def spent(self) -> tuple[int, float]:
        """Calls of this thread so far, and their seconds."""
        return getattr(self._spent, "calls", 0), getattr(self._spent, "seconds", 0.0)

    def set(self, key: str, value: str) -> None:
        return self.timed(self.store.set, key, value)

    def get(self, key: str, timeout_s: float = 0.0) -> str | None:
        if timeout_s > 0:
            return self.store.get(key, timeout_s)
        return self.timed(self.store.get, key)

    def list(self, prefix: str) -> dict[str, str]:
        return self.timed(self.store.list, prefix)

    def add(self, key: str, number: int) -> int:
        return self.timed(self.store.add, key, number)

    def delete(self, key: str) -> None:
        return self.timed(self.store.delete, key)

    def timed(self, call: Callable[..., Any], *args: Any) -> Any:
        """Makes the call, and counts it as one of the store's."""
        start_s = time.perf_counter()
        try:
            return call(*args)
        finally:
            calls, seconds = self.spent()
            self._spent.calls, self._spent.seconds = calls + 1, seconds + time.perf_counter() - start_s
