"""The drafter of a run that trains it in its idle time, as the loop sees it.

Life of RL step s:
  1. `start_step(s)`: the buffer lets go of everything but the last step's long responses.
  2. During the rollout engines add traces, idle workers train (`spot_trainer`), and `before_step` brings the best
     drafter of this process to the engines that still decode. Tokens do not depend on it.
  3. `finish_step()`: all workers' drafters become one (`weights.merge`). Every process enters it, once per step.
  4. `publish()`: after the target's new weights, the merged drafter goes to all engines.

Invariant: between steps all workers hold the same drafter and the same optimizer state.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import threading
from collections.abc import Callable, Collection, Sequence
from typing import IO, Any

import jax
import numpy as np
from absl import logging

from tlt_jax.coordinator.spot_trainer import Data, SpotTrainer, Window
from tlt_jax.coordinator.weights import merge
from tlt_jax.drafter import buffer_file
from tlt_jax.drafter.train import DraftState
from tlt_jax.metrics import keep_rows_before
from tlt_jax.rollout.engine import RolloutEngine
from tlt_jax.sharding import Versioned
from tlt_jax.types import Params

Load = Callable[[RolloutEngine, Params, int], None]


class OnlineDrafter:
    """Holds the spot trainers of this process."""

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        spots: Sequence[SpotTrainer],
        data: Data,
        load: Load,
        *,
        directory: pathlib.Path | None = None,
    ):
        """Makes it from parts of the same drafter.

        Args:
          engines: of this process.
          spots: their trainers, in the same order.
          data: what the engines add traces to.
          load: (engine, trainable weights, version) -> None: gives the engine the drafter; keeps the weights.
          directory: for records of windows; None writes none.
        """
        self.engines, self.spots, self.data = list(engines), list(spots), data
        self.version = 0  # merges that changed the drafter
        self.example: Any = None  # a batch of the trainers' shape, for `warm_up`
        self.num_swaps = 0  # drafters brought to engines inside a rollout
        self._load = load
        self._best: Versioned | None = None  # of this process in this step
        self._loaded: dict[int, Versioned] = {}
        self._records: IO[str] | None = None
        self._directory = directory
        self._writer: threading.Thread | None = None

    def warm_up(self) -> None:
        """Compiles what windows need, so that the first one is not spent on that; engines have their weights."""
        if self.example is not None:
            for spot in self.spots:
                spot.warm_up(self.example)

    def take(self, params: Params) -> None:
        """Keeps weights that measured better than those before; called by spot trainers, in their threads."""
        self._best = Versioned(params, self.version)

    def before_step(self, engine: RolloutEngine) -> None:
        """Brings the best drafter so far to an engine, between two of its steps and in its own thread."""
        best = self._best
        if best is not None and self._loaded.get(engine.worker) is not best:
            self._loaded[engine.worker] = best
            self.num_swaps += 1
            self._load(engine, best.params, best.version)

    def start_step(self, step: int) -> None:
        """Before the step's first rollout."""
        if self._directory is not None and self._records is None:
            self._records = _open_records(self._directory / f"windows_{jax.process_index()}.jsonl", step)
        self.data.start_step(step)
        self.num_swaps = 0

    def finish_step(self) -> dict[str, float]:
        """After the step's last rollout: merges, and says what training did, over all processes.

        `drafter/accept_before` and `_after` are means over windows of the accept length on held-out traces.
        """
        windows = [w for spot in self.spots for w in spot.windows]
        for window in windows:
            self._record(window)
        weights = [float(spot.tokens) for spot in self.spots]
        stats = _stats(windows, [spot.num_failures for spot in self.spots], self.num_swaps)
        state, total, stats = merge([spot.state for spot in self.spots], weights, stats)
        if total > 0.0:
            self.version += 1
            self._set(state)
        for spot in self.spots:
            spot.windows, spot.num_failures = [], 0
        self._best = None
        return _metrics(stats) | {"drafter/version": self.version, "drafter/tokens": total}

    def publish(self) -> None:
        """The merged drafter to every engine of this process, for the target weights that it holds."""
        for engine, spot in zip(self.engines, self.spots, strict=True):
            self._load(engine, spot.kept, self.version)
        self._loaded.clear()

    def get_state(self) -> tuple[DraftState, dict[str, Any]]:
        """For a checkpoint, between steps: arrays on the host (the same in all processes), and JSON."""
        return jax.device_get(self.spots[0].state), {"version": self.version}

    def save_data(self, step: int, keep: Collection[int]) -> None:
        """Writes what the next step starts to train on, beside the checkpoint of `step` and in the background.

        Every process writes a file of its own. Files of steps that are neither `step` nor in `keep` are removed.
        """
        if self._directory is None:
            return
        self.data.start_step(step + 1)
        self._join()
        names = {_data_name(f"{s:08d}") for s in {step, *keep}}
        for pattern in (_data_name("*"), f".{_data_name('*')}.*.tmp"):  # the second: a process was killed in mid-write
            for path in self._directory.glob(pattern):
                if path.name not in names:
                    path.unlink()
        saved = {name: buffer.get_state() for name, buffer in self.data.buffers.items()}
        path = self._directory / _data_name(f"{step:08d}")
        self._writer = threading.Thread(target=_write_data, args=(path, saved), name="drafter-data")
        self._writer.start()

    def load_data(self, step: int) -> None:
        """Goes on with what `save_data` wrote; with nothing, and a word about it, where the file is not there."""
        path = None if self._directory is None else self._directory / _data_name(f"{step:08d}")
        if path is None or not path.exists():
            logging.warning("drafter: no data of step %d to go on with; training waits for this step's responses", step)
            return
        for name, state in buffer_file.read(path).items():
            self.data.buffers[name].set_state(*state)

    def _join(self) -> None:
        if self._writer is not None:
            self._writer.join()

    def state_shapes(self, sharding: jax.sharding.Sharding) -> DraftState:
        """What `set_state` takes, as targets of a restore."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), self.spots[0].trainer.shapes
        )

    def set_state(self, state: DraftState, facts: dict[str, Any]) -> None:
        """Goes on from a checkpoint.

        Args:
          state: whole on every device it is on.
          facts: from `get_state`.
        """
        self._set(jax.tree.map(lambda x: x.addressable_data(0) if isinstance(x, jax.Array) else x, state))
        self.version = facts["version"]

    def _set(self, state: DraftState) -> None:
        for spot in self.spots:
            spot.set_state(state)

    def _record(self, window: Window) -> None:
        if self._records is not None:
            self._records.write(json.dumps(dataclasses.asdict(window)) + "\n")
            self._records.flush()

    def close(self) -> None:
        """Waits for what is being written."""
        self._join()
        for spot in self.spots:
            spot.close()
        if self._records is not None:
            self._records.close()


def _open_records(path: pathlib.Path, first_step: int) -> IO[str]:
    """Windows of `first_step` and later are left over from a run that is resumed before them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    keep_rows_before(path, first_step)
    return open(path, "a")


def _data_name(step: str) -> str:
    return f"data_{jax.process_index()}_{step}.safetensors"


def _write_data(path: pathlib.Path, saved: dict[str, buffer_file.State]) -> None:
    try:
        buffer_file.write(path, saved)
    except OSError as error:  # a resumed run then waits for data; the checkpoint itself is whole
        logging.warning("data of the drafter not written: %s", error)


def _stats(windows: Sequence[Window], failures: Sequence[int], num_swaps: int) -> np.ndarray:
    """Sums that `_metrics` makes numbers of; they can be added over processes."""
    measured = [(w.accept_before, w.accept_after) for w in windows if w.accept_before and w.accept_after]
    return np.asarray(
        [
            len(windows),
            sum(failures),
            num_swaps,
            sum(w.num_steps for w in windows),
            sum(w.loss * w.num_steps for w in windows),
            sum(w.top1 * w.num_steps for w in windows),
            sum(w.seconds for w in windows),
            len(measured),
            sum(before for before, _ in measured),
            sum(after for _, after in measured),
        ],
        np.float64,
    )


def _metrics(stats: np.ndarray) -> dict[str, float]:
    windows, failures, swaps, steps, loss, top1, seconds, measured, before, after = map(float, stats)
    metrics = {
        "drafter/windows": windows,
        "drafter/failures": failures,
        "drafter/swaps": swaps,
        "drafter/train_steps": steps,
        "drafter/train_s": seconds,
    }
    if steps:
        metrics |= {"drafter/loss": loss / steps, "drafter/top1": top1 / steps}
    if measured:
        metrics |= {"drafter/accept_before": before / measured, "drafter/accept_after": after / measured}
    return metrics
