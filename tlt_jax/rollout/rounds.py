"""The rounds of one engine: which strategy comes next, starting several rounds of it, and reading what they gave.

The life of a call:
  1. `choose` asks the policy for a strategy.
  2. `start` queues the programs of several rounds on the device: plain rounds in one program, drafted ones as a pair of
     programs each, chained through device memory without waiting. N-gram drafts come from the host, one round a call.
  3. `finish` waits for the outputs and tells the policy what they were worth.

Before a drafted round, rows whose drafter lags more than the round itself ingests are caught up, so any strategy may
follow any other without a prefill.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tlt_jax.rollout import speculate as spec, steps
from tlt_jax.rollout.config import REJECTION, RolloutConfig
from tlt_jax.rollout.device_rows import INGEST_ROWS, DeviceRows
from tlt_jax.rollout.ngram import NgramDrafter
from tlt_jax.rollout.scheduler import Active
from tlt_jax.rollout.tree import host_chain
from tlt_jax.sharding import Versioned
from tlt_jax.strategy import (
    LAYER_DRAFTER,
    NGRAM_DRAFTER,
    PLAIN,
    TREE_KIND,
    Choice,
    Outcome,
    Policy,
    Situation,
    Strategy,
)
from tlt_jax.types import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class InFlight:
    """Rounds that the device is working on."""

    choice: Choice
    situation: Situation
    outputs: steps.DecodeOut | list[spec.SpecOut]
    start_s: float
    is_timed: bool  # nothing else, a compilation say, fell into the call
    straggler_row: int | None
    drafter: Versioned | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Committed:
    """What rounds gave, on the host."""

    strategy: Strategy
    tokens: np.ndarray  # i32[rounds,B,W], -1 past the end of what a row committed
    logprobs: np.ndarray  # f32[rounds,B,W]
    drafted: np.ndarray  # i32[rounds,B]
    drafter: Versioned | None  # that was in use

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """i32[rounds,B], tokens that each row committed in each round."""
        return np.asarray(np.sum(self.tokens >= 0, axis=2, dtype=np.int32))

    def of_row(self, row: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probs of a row, round after round."""
        is_real = self.tokens[:, row] >= 0
        return self.tokens[:, row][is_real].tolist(), self.logprobs[:, row][is_real].tolist()


class Rounds:
    """Chooses, starts and reads rounds on an engine's device memory."""

    def __init__(self, device: DeviceRows, config: RolloutConfig, policy: Policy | None, ngram: NgramDrafter | None):
        self._device, self._config, self._policy, self._ngram = device, config, policy, ngram
        self._state: Any = None if policy is None else policy.init()
        self.drafter: Versioned | None = None  # weights, as `drafter.decode.prepare` gives them
        shapes = [spec.shape_of(s, config.verify) for s in strategies_of(policy, config) if s != PLAIN]
        self.max_advance = max(
            [config.rounds_per_dispatch, *(config.rounds_per_draft * (shape.depth + 1) for shape in shapes)]
        )

    def save(self) -> dict[str, Any] | None:
        """What the policy has learnt, for a checkpoint."""
        return None if self._policy is None else self._policy.to_json(self._state)

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Takes up what `save` gave."""
        if self._policy is not None and saved is not None:
            self._state = self._policy.from_json(saved)

    def _shape(self, strategy: Strategy) -> spec.Shape:
        return spec.shape_of(strategy, self._config.verify)

    def shapes(self, num_rows: int, smaller: int) -> list[tuple[spec.Shape, bool]]:
        """Speculative shapes that a batch of `num_rows` rows, more than `smaller` of them alive, may run.

        Those of the drafter come with True, n-grams with False; of n-grams one per width.
        """
        found: dict[tuple[Any, bool], tuple[spec.Shape, bool]] = {}
        for live in range(smaller + 1, num_rows + 1):
            for s in self._policy.arms(live) if self._policy is not None else ():
                is_drafted = s.drafter == LAYER_DRAFTER
                if s == PLAIN or (is_drafted and self.drafter is None):
                    continue
                shape = self._shape(s)
                found.setdefault((shape if is_drafted else shape.width, is_drafted), (shape, is_drafted))
        return list(found.values())

    def start(
        self,
        rows: Sequence[Active | None],
        host_rows: steps.Rows,
        exit_live: int,
        *,
        params: Params,
        policy_version: int,
        is_clean: bool,
    ) -> InFlight:
        """Starts the next rounds.

        Args:
          rows: who sits where.
          host_rows: the same, as arrays.
          exit_live: a round begins only while more rows than that are alive.
          params: target parameters.
          policy_version: theirs.
          is_clean: no other device work was started since the last call was read.
        """
        straggler_row = max(
            (i for i, a in enumerate(rows) if a is not None),
            key=lambda i: rows[i].limit - rows[i].length,  # pyright: ignore
        )
        straggler = rows[straggler_row]
        assert straggler is not None
        situation = Situation(
            live_batch=sum(a is not None for a in rows),
            batch_bucket=len(rows),
            kv_bucket=self._device.shape[1],
            policy_version=policy_version,
            drafter_version=None if self.drafter is None else self.drafter.version,
            straggler_id=straggler.request.request_id,
        )
        choice = Choice(PLAIN)
        if self._policy is not None:
            choice, self._state = self._policy.select(self._state, situation)
        num_compiled = self._device.pool.stats.num_compiled
        if not is_clean and choice.strategy != PLAIN:
            self._device.wait()  # or its time would be counted as the strategy's
        truncate = any(a.request.sampling.truncates for a in rows if a is not None)
        run = functools.partial(self._run, choice, rows, host_rows, truncate, exit_live, params)
        if choice.strategy.drafter == LAYER_DRAFTER:
            self._catch_up(rows, self._shape(choice.strategy).depth + 1, params)
        start_s = time.perf_counter()
        outputs = run()
        return InFlight(
            choice=choice,
            situation=situation,
            outputs=outputs,
            start_s=start_s,
            is_timed=num_compiled == self._device.pool.stats.num_compiled and (is_clean or choice.strategy != PLAIN),
            straggler_row=straggler_row,
            drafter=self.drafter if choice.strategy.drafter == LAYER_DRAFTER else None,
        )

    def _run(self, choice: Choice, rows, host_rows: steps.Rows, truncate: bool, exit_live: int, params: Params):
        if choice.strategy == PLAIN:
            max_rounds = choice.max_rounds or self._config.rounds_per_dispatch
            return self._device.decode(host_rows, truncate, max_rounds, exit_live, params)
        shape = self._shape(choice.strategy)
        if choice.strategy.drafter == NGRAM_DRAFTER:
            return [self._device.verify(truncate, host_rows, self._propose(rows, shape.width), exit_live, params)[2]]
        assert self.drafter is not None
        state, pending, outputs = host_rows, _pending(rows, shape.width), []
        for _ in range(min(choice.max_rounds or self._config.rounds_per_draft, self._config.rounds_per_draft)):
            tree = self._device.draft(shape, state, pending, exit_live, self.drafter.params, params)
            state, pending, out = self._device.verify(truncate, state, tree, exit_live, params)
            outputs.append(out)
        return outputs

    def _propose(self, rows: Sequence[Active | None], width: int):
        assert self._ngram is not None
        tokens = np.zeros((len(rows), width), np.int32)
        num_drafts = np.zeros(len(rows), np.int32)
        for i, a in enumerate(rows):
            if a is not None:
                room = a.limit - a.length - 2  # one token of the round is the target's own
                drafts = self._ngram.propose(a.request.request_id, min(width - 1, room))
                tokens[i, 0], num_drafts[i] = a.newest, len(drafts)
                tokens[i, 1 : 1 + len(drafts)] = drafts
        return host_chain(tokens, num_drafts)

    def _catch_up(self, rows: Sequence[Active | None], most_pending: int, params: Params) -> None:
        """Ingests until no row has more pending than a round takes in by itself."""
        assert self.drafter is not None
        sizes = [n for n in INGEST_ROWS if n <= self._device.shape[1]]
        while (lag := max(a.length - a.num_ingested for a in rows if a is not None)) > most_pending:
            num = next((n for n in sizes if n >= lag - 1), sizes[-1])
            start = np.zeros(len(rows), np.int32)
            tokens = np.zeros((len(rows), num), np.int32)
            for i, a in enumerate(rows):
                if a is None:
                    continue
                start[i] = max(min(a.num_ingested, self._device.shape[1] - num), 0)
                known = a.tokens_from(int(start[i]) + 1)[:num]
                tokens[i, : len(known)] = known
                # One row stays pending at least: its output is where drafting starts.
                a.num_ingested = max(min(int(start[i]) + num, a.length - 1), 0)
            self._device.ingest(num, tokens, start, self.drafter.params, params)

    def finish(self, call: InFlight) -> Committed:
        """Waits for the rounds of a call."""
        out = jax.device_get(call.outputs)
        elapsed_s = time.perf_counter() - call.start_s
        if isinstance(out, list):
            tokens, logprobs, drafted = (
                np.stack([getattr(o, name) for o in out]) for name in ("tokens", "logprobs", "drafted")
            )
            num_rounds = int(np.count_nonzero((tokens >= 0).any(axis=(1, 2))))
        else:
            num_rounds = int(out.num_rounds)
            tokens, logprobs = out.tokens[..., None], out.logprobs[..., None]
            drafted = np.zeros(tokens.shape[:2], np.int32)
        done = Committed(
            strategy=call.choice.strategy,
            tokens=tokens[:num_rounds],
            logprobs=logprobs[:num_rounds],
            drafted=drafted[:num_rounds],
            drafter=call.drafter,
        )
        if self._policy is not None and call.is_timed and num_rounds:
            outcome = Outcome(
                situation=call.situation,
                choice=call.choice,
                committed=done.counts,
                elapsed_s=max(elapsed_s, 1e-9),
                straggler_row=call.straggler_row,
            )
            self._state = self._policy.update(self._state, outcome)
        return done


def _pending(rows: Sequence[Active | None], width: int) -> spec.Pending:
    tokens = np.zeros((len(rows), width), np.int32)
    num = np.zeros(len(rows), np.int32)
    for i, a in enumerate(rows):
        if a is not None:
            num[i] = a.length - a.num_ingested
            tokens[i, : num[i]] = a.tokens_from(a.num_ingested + 1)
    return spec.Pending(tokens=tokens, num=num)  # pyright: ignore[reportArgumentType]


def strategies_of(policy: Policy | None, config: RolloutConfig) -> tuple[Strategy, ...]:
    """Every strategy that a policy may choose at any live batch of an engine."""
    if policy is None:
        return (PLAIN,)
    found = tuple(dict.fromkeys(s for live in range(1, config.batch_buckets[-1] + 1) for s in policy.arms(live)))
    trees = [s.name for s in found if s.kind == TREE_KIND]
    if config.verify == REJECTION and trees:
        raise ValueError(
            f"rollout.verify: got 'rejection' with the trees {', '.join(trees)}, expected chains; take them out of "
            "bandit.arms, or set rollout.verify to 'coupled' or 'target_only'"
        )
    return found
