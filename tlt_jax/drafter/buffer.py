"""What drafters are trained on while a rollout runs: one step off.

The responses that finish early are the short ones, and a drafter trained on them alone would be worst where it is
needed most. So the buffer holds what this step has finished so far, and the long responses of the step before.

Engine threads may `add` while a trainer's thread draws.

Life of a step: `start_step` lets go of everything but the last step's long responses; `add` takes responses as they
finish; `draw` gives windows, a set share of their rows from the long ones. Memory is bounded: where `max_bytes` is
reached the oldest step's shortest responses go first.

Features are those of the policy that made the response, whose version each trace carries. Targets are taken through the
head of the policy in use: for the last step's traces one update newer, which is little beside what they teach.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from tlt_jax.drafter.packing import Window, WindowConfig, cut_windows
from tlt_jax.types import FeatureTrace


@dataclasses.dataclass(frozen=True, kw_only=True)
class BufferConfig:
    """What the buffer keeps, and the mix it gives.

    Attributes:
      max_bytes: host memory for traces.
      long_share: share of drawn rows that come from the last step's long responses, as far as there are any.
      long_quantile: a response is long if its length is at or above this quantile of its step.
    """

    max_bytes: int = 2 << 30
    long_share: float = 0.5
    long_quantile: float = 0.75

    def __post_init__(self):
        checks = (
            ("max_bytes", self.max_bytes > 0, "> 0"),
            ("long_share", 0.0 <= self.long_share <= 1.0, "in [0, 1]"),
            ("long_quantile", 0.0 <= self.long_quantile < 1.0, "in [0, 1)"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise ValueError(f"drafter.buffer.{name}: got {getattr(self, name)!r}, expected {expected}")


class DataBuffer:
    """Traces of this step and the last; every method may be called from any thread."""

    def __init__(self, config: BufferConfig):
        self.config = config
        self.step = 0
        self.num_evicted = 0
        self._traces: list[FeatureTrace] = []
        self._num_bytes = 0
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._traces)

    @property
    def traces(self) -> tuple[FeatureTrace, ...]:
        with self._lock:
            return tuple(self._traces)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def start_step(self, step: int) -> None:
        """Keeps the long responses of step - 1, and nothing else; does nothing where `step` has begun already."""
        with self._lock:
            if step == self.step:
                return
            last = [trace for trace in self._traces if trace.step == step - 1]
            if last:
                bound = np.quantile([trace.response_len for trace in last], self.config.long_quantile)
                last = [trace for trace in last if trace.response_len >= bound]
            self._set(last)
            self.step = step

    def add(self, trace: FeatureTrace) -> None:
        """Takes a finished response of this step.

        Raises:
          ValueError: a trace of another step.
        """
        with self._lock:
            if trace.step != self.step:
                raise ValueError(
                    f"drafter buffer: got a trace of step {trace.step} in step {self.step}: start_step first"
                )
            self._set([*self._traces, trace])
            self._evict()

    def _set(self, traces: list[FeatureTrace]) -> None:
        self._traces = traces
        self._num_bytes = sum(trace.num_bytes for trace in traces)

    def _evict(self) -> None:
        excess = self._num_bytes - self.config.max_bytes
        if excess <= 0:
            return
        victims: set[int] = set()
        for trace in sorted(self._traces, key=lambda t: (t.step, t.response_len)):
            if excess <= 0:
                break
            victims.add(id(trace))
            excess -= trace.num_bytes
        if victims:
            self.num_evicted += len(victims)
            self._set([trace for trace in self._traces if id(trace) not in victims])

    def draw(self, num_rows: int, window: WindowConfig, rng: np.random.Generator) -> list[Window]:
        """Windows of about `num_rows` rows in random order, each at most once; fewer if the buffer has no more."""
        with self._lock:
            traces, step = self._traces, self.step  # the list is replaced, never changed
        old, new = (
            _shuffled([w for t in traces if (t.step < step) == is_old for w in cut_windows(t, window)], rng)
            for is_old in (True, False)
        )
        rows_old, rows_new = (sum(w.num_rows for w in windows) for windows in (old, new))
        want_old = max(self.config.long_share * num_rows, num_rows - rows_new)
        taken_old = _take(old, min(want_old, rows_old))
        taken_new = _take(new, num_rows - sum(w.num_rows for w in taken_old))
        return _shuffled(taken_old + taken_new, rng)

    def get_state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """What a checkpoint holds: a JSON object, and few large arrays."""
        with self._lock:
            kept, step, num_evicted = self._traces, self.step, self.num_evicted
        names = ("request_id", "prompt_len", "start", "step", "policy_version")
        traces = [
            {name: int(getattr(t, name)) for name in names} | {"num_tokens": len(t.token_ids), "rows": len(t.features)}
            for t in kept
        ]
        meta = {"step": step, "num_evicted": num_evicted, "traces": traces}
        if not kept:
            return meta, {}
        arrays = {
            "token_ids": np.concatenate([t.token_ids for t in kept]).astype(np.int32),
            "features": np.concatenate([t.features for t in kept]),
        }
        if kept[0].hidden is not None:
            arrays["hidden"] = np.concatenate([t.hidden for t in kept if t.hidden is not None])
        return meta, arrays

    def set_state(self, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Becomes the buffer that `get_state` described."""
        traces = []
        token, row = 0, 0
        for fields in meta["traces"]:
            fields = dict(fields)
            num_tokens, num_rows = fields.pop("num_tokens"), fields.pop("rows")
            parts: dict[str, Any] = {
                name: np.array(arrays[name][row : row + num_rows]) for name in ("features", "hidden") if name in arrays
            }
            token_ids = np.array(arrays["token_ids"][token : token + num_tokens])
            traces.append(FeatureTrace(token_ids=token_ids, **fields, **parts))
            token, row = token + num_tokens, row + num_rows
        with self._lock:
            self.step, self.num_evicted = meta["step"], meta["num_evicted"]
            self._set(traces)


def _shuffled(windows: list[Window], rng: np.random.Generator) -> list[Window]:
    return [windows[i] for i in rng.permutation(len(windows))]


def _take(windows: Sequence[Window], num_rows: float) -> list[Window]:
    """The first windows that reach `num_rows` rows together."""
    taken, rows = [], 0
    for w in windows:
        if rows >= num_rows:
            break
        taken.append(w)
        rows += w.num_rows
    return taken
