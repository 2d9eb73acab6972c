"""What a run leaves in its workdir for people to read: metrics, rollouts, timeline.

Life of a writer:
1. It is opened with `first_step`, the step that the run does next (0, or the restored one). Rows of that step and later
   ones are left over from a run that went on past its last checkpoint; they are removed, for they are about to be
   written again.
2. Each write appends one line (or one file) and flushes it. A line cut short by a kill is dropped at the next opening.

Invariants: one row per step in `metrics.jsonl`, steps ascending; a Parquet file is whole or absent. In a job of several
processes one of them has `is_writer`; the others call the same methods, which then only check their arguments.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import tensorboardX

from tlt_jax import files, types

_NAME = re.compile(r"[a-z][a-z0-9_]*(/[A-Za-z0-9_.:+-]+)*")

ROLLOUT_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("prompt_id", pa.int64()),
        ("request_id", pa.int64()),
        ("sample", pa.int32()),
        ("worker", pa.int32()),
        ("policy_version", pa.int64()),
        ("prompt_len", pa.int32()),
        ("response_len", pa.int32()),
        ("finish_reason", pa.string()),
        ("reward", pa.float32()),
        ("advantage", pa.float32()),
        ("rounds", pa.int32()),
        ("drafted", pa.int32()),
        ("accepted", pa.int32()),
        ("accept_len", pa.float32()),
        ("start_s", pa.float32()),
        ("end_s", pa.float32()),
        ("text", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),  # of the response
    ]
)


class MetricsWriter:
    """Writes `metrics.jsonl`, one JSON object per step, and the same numbers as TensorBoard events."""

    def __init__(self, workdir: str | os.PathLike[str], *, first_step: int = 0, is_writer: bool = True):
        self._path = pathlib.Path(workdir) / "metrics.jsonl"
        self._last_step = first_step - 1
        self._file = None
        self._events = None
        if is_writer:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            keep_rows_before(self._path, first_step)
            self._file = open(self._path, "a")
            self._events = tensorboardX.SummaryWriter(str(self._path.parent), purge_step=first_step, write_to_disk=True)

    def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float | int]:
        """Appends the row of one step.

        Args:
          step: larger than any written before.
          metrics: name -> number (Python, numpy or a jax scalar). Names are `part/part_unit`.

        Returns:
          The row as written, without `step`, as Python numbers.

        Raises:
          ValueError: a step written before; a name of another form; a value that is no single number.
        """
        if step <= self._last_step:
            raise ValueError(
                f"metrics: got step {step} after step {self._last_step}, expected a later one; "
                "write all metrics of a step at once"
            )
        row = {name: _as_number(name, value) for name, value in metrics.items()}
        self._last_step = step
        if self._file is None or self._events is None:
            return row
        # JSON has no NaN or infinity: null, so that any reader can load the file. TensorBoard gets the value itself.
        finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        for name, value in row.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()
        return row

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()


class RolloutWriter:
    """Writes `rollouts/step_000000.parquet`, one row per response, columns as in `ROLLOUT_SCHEMA`."""

    def __init__(self, workdir: str | os.PathLike[str], *, first_step: int = 0, is_writer: bool = True):
        self._dir = pathlib.Path(workdir) / "rollouts"
        self._is_writer = is_writer
        if is_writer:
            for path in self._dir.glob("step_*.parquet"):
                if int(path.stem.removeprefix("step_")) >= first_step:
                    path.unlink()

    def write(
        self,
        step: int,
        completions: Sequence[types.Completion],
        texts: Sequence[str],
        rewards: Sequence[float] | np.ndarray,
        advantages: Sequence[float] | np.ndarray,
    ) -> pathlib.Path:
        """Writes the responses of one step; all arguments are in the same row order.

        Returns:
          The path of the file.

        Raises:
          ValueError: texts, rewards or advantages of another length than completions.
        """
        for name, values in (("texts", texts), ("rewards", rewards), ("advantages", advantages)):
            if len(values) != len(completions):
                raise ValueError(
                    f"rollouts: got {len(values)} {name} for {len(completions)} completions, expected one each"
                )
        path = self._dir / f"step_{step:06d}.parquet"
        if self._is_writer:
            rows = [
                _rollout_row(step, completion, text, float(reward), float(advantage))
                for completion, text, reward, advantage in zip(completions, texts, rewards, advantages, strict=True)
            ]
            with files.atomic_path(path) as temporary:
                pq.write_table(pa.Table.from_pylist(rows, schema=ROLLOUT_SCHEMA), temporary)
        return path


class TimelineWriter:
    """Writes `timeline.jsonl`: from `t_s` on, `worker` is in `state`.

    `t_s` counts the seconds of the run over all its processes: after a resume it goes on from the last row kept.
    """

    def __init__(self, workdir: str | os.PathLike[str], *, first_step: int = 0, is_writer: bool = True):
        path = pathlib.Path(workdir) / "timeline.jsonl"
        self._file = None
        self._offset_s = 0.0
        if is_writer:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = keep_rows_before(path, first_step)
            self._offset_s = max((row["t_s"] for row in kept), default=0.0)
            self._file = open(path, "a")

    def write(self, t_s: float, *, worker: int, state: str, step: int, window_id: int | None = None) -> None:
        """Appends one change of state.

        Args:
          t_s: seconds since this process began.
          worker: whose state changes.
          state: the new state.
          step: RL step.
          window_id: the training window, where the state belongs to one.
        """
        if self._file is not None:
            row = {
                "t_s": round(self._offset_s + t_s, 6),
                "worker": worker,
                "state": state,
                "window_id": window_id,
                "step": step,
            }
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the rows of a file written above; a last line without its newline (a writer was killed) is left out."""
    text = pathlib.Path(path).read_text()
    return [json.loads(line) for line in text.split("\n")[:-1]]


class CompileCounter:
    """Counts every program that this process compiles, or loads compiled from the cache on disk, from now on."""

    def __init__(self):
        self._count = self._cached = 0
        self._seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._on_compile)
        jax.monitoring.register_event_listener(self._on_event)
        self._is_open = True

    def read(self) -> dict[str, float]:
        """`compile/count`, those of them that came from the disk (`compile/cached`), and `compile/seconds`."""
        return {"compile/count": self._count, "compile/cached": self._cached, "compile/seconds": self._seconds}

    def close(self) -> None:
        """Stops counting; may be called twice."""
        if self._is_open:
            self._is_open = False
            jax.monitoring.unregister_event_duration_listener(self._on_compile)
            jax.monitoring.unregister_event_listener(self._on_event)

    def _on_compile(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self._count += 1
            self._seconds += duration_secs

    def _on_event(self, event: str, **kwargs: str | int) -> None:
        self._cached += event == "/jax/compilation_cache/cache_hits"


def memory_metrics() -> dict[str, int]:
    """Memory of this process now: resident host bytes, bytes on its devices, number of live arrays.

    A backend that keeps no statistics (CPU) counts the bytes of its live arrays.
    """
    arrays = jax.live_arrays()
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(stat is not None for stat in stats):
        device_bytes = sum(stat["bytes_in_use"] for stat in stats if stat is not None)
    else:
        device_bytes = sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)
    return {
        "memory/host_bytes": psutil.Process().memory_info().rss,
        "memory/device_bytes": int(device_bytes),
        "memory/live_arrays": len(arrays),
    }


def _as_number(name: str, value: Any) -> float | int:
    if not _NAME.fullmatch(name) or name == "step":
        raise ValueError(f"metrics: got name {name!r}, expected lower-case parts like 'rollout/tokens_per_s'")
    array = np.asarray(value)
    if array.ndim != 0 or array.dtype.kind not in "iuf":
        raise ValueError(
            f"metrics: got {value!r} for {name!r}, expected one number; reduce arrays and flags before they are written"
        )
    return array.item()


def _rollout_row(step: int, completion: types.Completion, text: str, reward: float, advantage: float) -> dict[str, Any]:
    own = {name: getattr(completion, name) for name in ROLLOUT_SCHEMA.names if hasattr(completion, name)}
    return own | {
        "step": step,
        "prompt_len": len(completion.prompt_ids),
        "response_len": len(completion.token_ids),
        "reward": reward,
        "advantage": advantage,
        "text": text,
    }


def keep_rows_before(path: pathlib.Path, first_step: int) -> list[dict[str, Any]]:
    """Rewrites a JSONL file without rows of `first_step` and later and without a cut last line; returns the rest."""
    if not path.exists():
        return []
    kept = [row for row in read_jsonl(path) if row["step"] < first_step]
    files.write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
    return kept
