"""Offline training of a drafter on recorded responses: epochs over a data set, held-out accept length, early stop.

Life of a run:
1. Some sequences are held out; the rest are cut into shards whose features fit in memory together. One shard: features
   are read once. Several: each is read again whenever its turn comes.
2. An epoch goes through the shards in an order of its own, and through the batches of each in an order of its own, both
   fixed by (seed, epoch). So `Position` says what comes next, and a resumed run trains on what the first would have.
3. Every `eval_every` steps the held-out batches are scored; the best parameters so far go to the caller. Where
   the accept length has not grown for `patience` evaluations, or `num_steps` or `max_minutes` are reached, it is over.

A checkpoint holds the trainable state, the position, and the map of the vocabulary; nothing of the target.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from tlt_jax.drafter.features import Recorded
from tlt_jax.drafter.loss import DraftBatch
from tlt_jax.drafter.packing import BatchConfig, cut_windows, make_batches
from tlt_jax.drafter.train import DraftOptimConfig, DraftState, DraftTrainer
from tlt_jax.types import FeatureTrace, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupConfig:
    """How long, and on what.

    Attributes:
      num_steps: most optimizer steps.
      max_minutes: most minutes of training and evaluation, features included; 0 is off. What it cuts off can be
        resumed, so it bounds each start of the command.
      optim: of the warm-up; a first training wants a larger rate than adapting inside a run.
      held_out: sequences kept for evaluation, at most a fifth of all.
      eval_every: optimizer steps between evaluations.
      patience: evaluations without a better accept length after which training stops; 0 never does.
      min_gain: accept length by which an evaluation must be better to count.
      checkpoint_every: optimizer steps between checkpoints.
      num_prompts: prompts of the task to answer where no data is given.
      samples: responses per prompt that has none.
    """

    num_steps: int = 2000
    max_minutes: float = 0.0
    optim: DraftOptimConfig = dataclasses.field(
        default_factory=lambda: DraftOptimConfig(learning_rate=1e-3, warmup_steps=20, feature_noise=0.2)
    )
    held_out: int = 64
    eval_every: int = 50
    patience: int = 6
    min_gain: float = 0.01
    checkpoint_every: int = 200
    num_prompts: int = 256
    samples: int = 2

    def __post_init__(self):
        least = {"num_steps": 1, "max_minutes": 0, "held_out": 1, "eval_every": 1, "patience": 0, "min_gain": 0}
        least |= {"checkpoint_every": 1, "num_prompts": 1, "samples": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"drafter.warmup.{name}: got {getattr(self, name)!r}, expected >= {bound}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """The next batch: of which epoch, which of its shards, which of that shard's batches."""

    epoch: int = 0
    shard: int = 0
    batch: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What an evaluation found, and where."""

    step: int
    tokens: int  # supervised rows trained on so far
    metrics: dict[str, float]

    @property
    def accept_len(self) -> float:
        return self.metrics["drafter/accept_len"]


def split_held_out(sequences: Sequence[Recorded], num: int, seed: int) -> tuple[list[Recorded], list[Recorded]]:
    """(trained on, held out); responses to one prompt fall on one side.

    Raises:
      ValueError: fewer than two different prompts.
    """
    groups: dict[bytes, list[Recorded]] = {}
    for sequence in sequences:
        groups.setdefault(sequence.token_ids[: sequence.prompt_len].tobytes(), []).append(sequence)
    if len(groups) < 2:
        raise ValueError(f"drafter data: got {len(groups)} different prompts, expected at least 2: one is held out")
    num = min(num, max(len(sequences) // 5, 1))
    order = np.random.default_rng((seed, 0)).permutation(len(groups))
    parts: tuple[list[Recorded], list[Recorded]] = ([], [])
    members = list(groups.values())
    for place, i in enumerate(order):
        is_held_out = len(parts[1]) < num and place < len(groups) - 1
        parts[is_held_out].extend(members[i])
    return parts


def make_shards(sequences: Sequence[Recorded], bytes_per_token: int, max_bytes: int) -> list[list[Recorded]]:
    """Runs of sequences whose features take at most `max_bytes` together; a longer sequence is alone."""
    shards: list[list[Recorded]] = []
    room = 0
    for sequence in sequences:
        need = bytes_per_token * len(sequence.token_ids)
        if not shards or need > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(sequence)
        room -= need
    return shards


class BatchSource:
    """Batches without end, from any position on."""

    def __init__(
        self,
        shards: Sequence[Sequence[Recorded]],
        read: Callable[[Sequence[Recorded]], Iterator[FeatureTrace]],
        config: BatchConfig,
        seed: int,
    ):
        """Reads nothing yet.

        Args:
          shards: from `make_shards`.
          read: sequences -> their traces.
          config: the shape of a batch.
          seed: of all orders.
        """
        self._shards, self._read, self._config, self._seed = shards, read, config, seed
        self._loaded: tuple[int, list[FeatureTrace]] | None = None

    def batches(self, position: Position) -> Iterator[tuple[DraftBatch, Position]]:
        """(batch, the position after it) from `position` on.

        Raises:
          ValueError: data with nothing to supervise.
        """
        first = position
        while True:
            order = np.random.default_rng((self._seed, 1, first.epoch)).permutation(len(self._shards))
            num_batches = 0
            for place in range(first.shard, len(order)):
                skip = first.batch if place == first.shard else 0
                for i, batch in enumerate(self._shard_batches(int(order[place]), first.epoch)):
                    num_batches += 1
                    if i >= skip:
                        yield batch, Position(epoch=first.epoch, shard=place, batch=i + 1)
            if not num_batches and not (first.shard or first.batch):
                raise ValueError("drafter data: got no response of at least two tokens, expected some to learn from")
            first = Position(epoch=first.epoch + 1)

    def _shard_batches(self, index: int, epoch: int) -> Iterator[DraftBatch]:
        if self._loaded is None or self._loaded[0] != index:
            self._loaded = None  # lets go of one shard before the next is read
            self._loaded = index, list(self._read(self._shards[index]))
        windows = [w for trace in self._loaded[1] for w in cut_windows(trace, self._config)]
        order = np.random.default_rng((self._seed, 2, epoch, index)).permutation(len(windows))
        c = self._config
        return make_batches([windows[i] for i in order], c.num_micro, c.num_rows, c.row_len)


def held_out_batches(traces: Sequence[FeatureTrace], config: BatchConfig) -> list[DraftBatch]:
    """Batches of whole responses, as far as a row holds them."""
    windows = [w for trace in traces for w in cut_windows(trace, config)]
    return list(make_batches(windows, 1, config.num_rows, config.row_len))


def evaluate(
    trainer: DraftTrainer, params: Params, target_params: Params, batches: Sequence[DraftBatch]
) -> dict[str, float]:
    """Held-out metrics of a drafter.

    Returns:
      `drafter/accept_len` of a chain, under the noise shared with the target; by draft position k = 1, 2, ... means
      over rows `drafter/accept/k` (chance that draft k is the token drawn, given that those before it were),
      `drafter/top1/k`, `drafter/top3/k` (agreement with the target's likeliest token), `drafter/overlap/k`
      (1 - total variation); and `drafter/eval_loss`.
    """
    if not batches:
        raise ValueError("drafter data: got no held-out response of at least two tokens, expected some to measure on")
    found = jax.device_get([trainer.evaluate(params, target_params, batch) for batch in batches])
    rows_U = sum(m["rows"] for m in found)
    out = {"drafter/accept_len": float(sum(m["committed"] for m in found) / sum(m["rounds"] for m in found))}
    for name in ("accept", "top1", "top3", "overlap"):
        mean_U = sum(m[name] * m["rows"] for m in found) / np.maximum(rows_U, 1.0)
        out |= {f"drafter/{name}/{k + 1}": float(x) for k, x in enumerate(mean_U)}
    weights = [float(m["rows"][0]) for m in found]
    out["drafter/eval_loss"] = float(np.average([m["loss"] for m in found], weights=weights))
    return out


@dataclasses.dataclass(kw_only=True)
class Progress:
    """What a warm-up has reached; JSON but for the state."""

    position: Position = dataclasses.field(default_factory=Position)
    best_accept_len: float = 0.0
    best_step: int = -1
    num_stale: int = 0  # evaluations since the best
    stopped: str = ""  # why it ended; "" while it goes on

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Progress:
        return cls(**{**fields, "position": Position(**fields["position"])})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
    """What the command does at certain moments."""

    on_step: Callable[[int, dict[str, float]], None]  # step, metrics of training on it
    on_eval: Callable[[Evaluated, Params | None], None]  # and the parameters, where they are the best so far
    save: Callable[[DraftState, Progress], None]


def train(
    config: WarmupConfig,
    trainer: DraftTrainer,
    target_params: Params,
    state: DraftState,
    source: BatchSource,
    held_out: Sequence[DraftBatch],
    progress: Progress,
    hooks: Hooks,
) -> DraftState:
    """Trains until something says stop; returns the last state, and updates `progress` as it goes."""
    start_s, step = time.monotonic(), int(state.step)

    def look() -> None:
        metrics = evaluate(trainer, state.params, target_params, held_out)
        seen = Evaluated(step=step, tokens=int(state.tokens), metrics=metrics)
        is_better = progress.best_step < 0 or seen.accept_len > progress.best_accept_len + config.min_gain
        if is_better:
            progress.best_accept_len, progress.best_step = seen.accept_len, step
        progress.num_stale = 0 if is_better else progress.num_stale + 1
        hooks.on_eval(seen, state.params if is_better else None)

    if step == 0:
        look()
    for batch, after in source.batches(progress.position):
        progress.stopped = _why_stop(config, progress, step, time.monotonic() - start_s)
        if progress.stopped:
            break
        state, metrics = trainer.step(state, target_params, batch)
        step += 1
        progress.position = after
        first = {name: float(np.asarray(x).reshape(-1)[0]) for name, x in jax.device_get(metrics).items()}
        hooks.on_step(step, first)
        if step % config.eval_every == 0:
            look()
        if step % config.checkpoint_every == 0:
            hooks.save(state, progress)
    return state


def _why_stop(config: WarmupConfig, progress: Progress, step: int, seconds: float) -> str:
    if step >= config.num_steps:
        return f"{config.num_steps} steps are done"
    if config.patience and progress.num_stale >= config.patience:
        return f"no better accept length in {config.patience} evaluations"
    if config.max_minutes and seconds > 60 * config.max_minutes:
        return f"{config.max_minutes:g} minutes are over"
    return ""
