"""Training of the drafter in a worker's idle time: begins at once, stops between any two steps, harms nothing.

Life of a window (`SpotTrainer.train`, in the worker's own thread):
  1. The drafter is measured on held-out traces.
  2. Ask; draw a batch; one optimizer step; wait for it, so that never more than one step is under way.
  3. Every `eval_every` steps: measure again. A better drafter is handed to the rollouts that still run in this process.
     After `patience` measurements without a gain the window is over: what is left of it is worth nothing.
  4. The window's record says what it cost and what it was worth.

Invariants:
  - Only the drafter's own state changes; the target's parameters are read.
  - An error in training ends the window, is counted and noted, and goes no further; the drafter then goes on from the
    last one that was handed out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from safetensors.numpy import save_file

from tlt_jax import files
from tlt_jax.coordinator.driver import Ask
from tlt_jax.coordinator.messages import WindowEnd
from tlt_jax.drafter.buffer import BufferConfig, DataBuffer
from tlt_jax.drafter.train import DraftState, DraftTrainer
from tlt_jax.sharding import Versioned, path_str
from tlt_jax.types import FeatureTrace, Params

# What training may fail with: the device (out of memory), bad numbers or data, the disk.
FAILURES = (RuntimeError, ValueError, ArithmeticError, MemoryError, OSError)
_NO_DATA_S = 0.05  # between looks at a buffer without anything to train on


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpotConfig:
    """How idle workers train.

    Attributes:
      held_out_frac: share of prompts whose responses are never trained on, but measured on.
      eval_every: optimizer steps between measurements.
      patience: measurements without a gain after which a window ends; 0 goes on to the end of the rollout.
      min_gain: of accept length, that counts as one.
      checkpoint_every_s: between snapshots of the trainable weights while a window lasts; 0 writes none.
    """

    held_out_frac: float = 0.125
    eval_every: int = 8
    patience: int = 4
    min_gain: float = 0.01
    checkpoint_every_s: float = 60.0

    def __post_init__(self):
        checks = (
            ("held_out_frac", 0.0 <= self.held_out_frac < 1.0, "in [0, 1)"),
            ("eval_every", self.eval_every >= 1, ">= 1"),
            ("patience", self.patience >= 0, ">= 0 (0 is off)"),
            ("min_gain", self.min_gain >= 0.0, ">= 0"),
            ("checkpoint_every_s", self.checkpoint_every_s >= 0.0, ">= 0 (0 writes none)"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise ValueError(f"coordinator.{name}: got {getattr(self, name)!r}, expected {expected}")


class Data:
    """Traces to train on, and traces to measure on; all responses to a prompt are in the same part."""

    def __init__(self, buffer: BufferConfig, held_out_frac: float):
        self.train, self.held_out = DataBuffer(buffer), DataBuffer(buffer)
        self._held_out_frac = held_out_frac

    def start_step(self, step: int) -> None:
        """As `DataBuffer.start_step`."""
        self.train.start_step(step)
        self.held_out.start_step(step)

    @property
    def buffers(self) -> dict[str, DataBuffer]:
        return {"train": self.train, "held_out": self.held_out}

    def add(self, trace: FeatureTrace) -> None:
        """Takes a finished response; any thread."""
        digest = hashlib.blake2b(trace.token_ids[: trace.prompt_len].tobytes(), digest_size=4).digest()
        is_held_out = int.from_bytes(digest, "little") < self._held_out_frac * 2**32
        (self.held_out if is_held_out else self.train).add(trace)


class Engine(Protocol):
    """What is needed of a rollout engine."""

    worker: int

    @property
    def weights(self) -> Versioned: ...


@dataclasses.dataclass(kw_only=True)
class Window:
    """What a window cost, and what it was worth."""

    window_id: int
    worker: int
    step: int  # of RL
    num_steps: int = 0  # optimizer steps
    tokens: int = 0  # supervised rows
    seconds: float = 0.0
    first_step_s: float = 0.0  # from its beginning to the end of its first optimizer step
    longest_step_s: float = 0.0  # the most that a directive had to wait
    loss: float = 0.0  # mean over steps
    top1: float = 0.0
    accept_before: float | None = None  # accept length on held-out traces, where there are any
    accept_after: float | None = None
    end: str = ""


class SpotTrainer:
    """The drafter of one worker, and its training. One thread at a time."""

    def __init__(
        self,
        engine: Engine,
        trainer: DraftTrainer,
        draft_params: Params,
        data: Data,
        config: SpotConfig,
        *,
        on_better: Callable[[Params], None] = lambda params: None,
        seed: int = 0,
        directory: pathlib.Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Makes the trainer; nothing is compiled yet.

        Args:
          engine: of the worker, for the target's weights.
          trainer: of its devices.
          draft_params: to start from.
          data: shared by the workers of this process.
          config: when to stop, what to write.
          on_better: called with a copy of the weights that measure best so far.
          seed: of the order of data.
          directory: for snapshots of the trainable weights; None writes none.
          clock: in seconds.
        """
        self.trainer, self.data, self.config = trainer, data, config
        self.state: DraftState = trainer.init(draft_params)
        self.kept = _copy(self.state.params)  # the last that were handed out or merged; never donated
        self.windows: list[Window] = []  # since the last merge
        self.num_failures = 0
        self._engine, self._clock, self._on_better = engine, clock, on_better
        self._rng = np.random.default_rng([seed, engine.worker])
        self._merged_tokens = 0
        self._kept_tokens = 0  # trained on since the last merge when `kept` was made
        self._snapshot = None if directory is None else Snapshot(directory / f"worker_{engine.worker}.safetensors")
        self._written_s = clock()

    @property
    def tokens(self) -> int:
        """Supervised rows trained on since the last merge: the weight of this worker in the next one."""
        return int(self.state.tokens) - self._merged_tokens

    def set_state(self, state: DraftState) -> None:
        """Goes on from a merged or restored state, of which it takes a copy."""
        self.state = jax.tree.map(lambda x, like: _put(x, like), state, self.trainer.shapes)
        self._merged_tokens = int(self.state.tokens)
        self._keep()

    def warm_up(self, batch: Any) -> None:
        """Compiles what a window needs, on a state that is thrown away: the first step is as short as the others.

        Args:
          batch: of the trainer's shape; what is in it does not matter.
        """
        target = self._engine.weights.params
        self.trainer.step(self.trainer.init(self.state.params), target, batch)
        jax.block_until_ready(self.trainer.evaluate(self.state.params, target, batch))

    def train(self, window_id: int, ask: Ask) -> WindowEnd:
        """Trains until `ask` has a reason to stop or training no longer helps; see the module's docstring."""
        window = Window(window_id=window_id, worker=self._engine.worker, step=self.data.train.step)
        start_s = self._clock()
        try:
            end = self._train(window, ask, start_s)
        except FAILURES as error:
            end = WindowEnd.FAILED
            self.num_failures += 1
            logging.exception("worker %d: training failed, the rollout goes on: %s", self._engine.worker, error)
            self._recover()
        window.seconds, window.end = self._clock() - start_s, end
        self.windows.append(window)
        return end

    def _train(self, window: Window, ask: Ask, start_s: float) -> WindowEnd:
        target = self._engine.weights.params
        held_out, best, num_flat = None, None, 0
        while (end := ask()) is None:
            if held_out is None and (held_out := self.trainer.make_batch(self.data.held_out, self._rng)) is not None:
                best = window.accept_before = window.accept_after = self._measure(target, held_out)
                continue  # measuring took time
            batch = self.trainer.make_batch(self.data.train, self._rng)
            if batch is None:
                time.sleep(_NO_DATA_S)
                continue
            self._step(window, target, batch, start_s)
            if window.num_steps % self.config.eval_every:
                continue
            if held_out is None or best is None:
                self._hand_out()
                continue
            window.accept_after = self._measure(target, held_out)
            if window.accept_after >= best + self.config.min_gain:
                best, num_flat = window.accept_after, 0
                self._hand_out()
            else:
                num_flat += 1
                if num_flat == self.config.patience:
                    return WindowEnd.BUDGET
        return end

    def _step(self, window: Window, target: Params, batch: Any, start_s: float) -> None:
        begin_s = self._clock()
        self.state, metrics = self.trainer.step(self.state, target, batch)
        loss, top1, rows = (
            float(np.ravel(x)[0]) for x in jax.device_get([metrics[k] for k in ("loss", "top1", "rows")])
        )
        now_s = self._clock()
        window.first_step_s = window.first_step_s or now_s - start_s
        window.longest_step_s = max(window.longest_step_s, now_s - begin_s)
        window.num_steps += 1
        window.tokens += int(rows)
        window.loss += (loss - window.loss) / window.num_steps
        window.top1 += (top1 - window.top1) / window.num_steps
        every_s = self.config.checkpoint_every_s
        if self._snapshot is not None and every_s and now_s - self._written_s >= every_s:
            self._written_s = now_s
            self._snapshot.write(self.state.params)

    def _measure(self, target: Params, batch: Any) -> float:
        """Accept length on held-out traces: tokens committed per target forward, as `trainer.evaluate` expects it."""
        out = jax.device_get(self.trainer.evaluate(self.state.params, target, batch))
        return float(out["committed"]) / max(float(out["rounds"]), 1e-9)

    def _hand_out(self) -> None:
        self._keep()
        self._on_better(self.kept)

    def _keep(self) -> None:
        self.kept, self._kept_tokens = _copy(self.state.params), self.tokens

    def _recover(self) -> None:
        """A step that failed has taken its state along."""
        leaves = jax.tree.leaves(self.state)
        if any(x.is_deleted() for x in leaves):
            self.state = self.trainer.init(self.kept)
            self._merged_tokens = -self._kept_tokens

    def close(self) -> None:
        """Waits for a snapshot that is being written."""
        if self._snapshot is not None:
            self._snapshot.wait()


class Snapshot:
    """Writes trainable weights to one file, in the background; a file is whole or the one before."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._thread: threading.Thread | None = None

    def write(self, params: Params) -> None:
        """Begins to write a copy, so that the caller may donate `params`; does nothing while another is written."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._write, args=(_copy(params),), name="drafter-snapshot")
            self._thread.start()

    def _write(self, params: Params) -> None:
        flat = {path_str(path): np.asarray(x) for path, x in jax.tree_util.tree_flatten_with_path(params)[0]}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with files.atomic_path(self._path) as temporary:
                save_file(flat, temporary)
        except OSError as error:  # the checkpoints of the run are written elsewhere, and say so themselves
            logging.warning("snapshot of the drafter not written: %s", error)

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()


@jax.jit
def _copy(params: Params) -> Params:
    return jax.tree.map(jnp.copy, params)


def _put(x: Any, like: Any) -> jax.Array:
    """A copy, for the trainer donates what it holds."""
    moved = x if like.sharding is None else jax.device_put(x, like.sharding)
    return jnp.array(moved, like.dtype, copy=True)
