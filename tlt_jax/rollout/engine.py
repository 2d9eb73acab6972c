"""The rollout engine of one worker: continuous batching over static shapes.

The life of a step:
  1. collect: wait for the call in flight; commit its tokens; take finished rows out.
  2. schedule: pick batch and cache buckets, move rows, admit waiting requests (prefill once per prompt, then copy).
  3. dispatch: start the next several rounds of the strategy that the policy chooses.
  4. return the completions of 1; whatever the caller does with them runs while the device works on 3.

Invariants:
  - A request's tokens depend on (weights, seed, request id, prompt, sampling) alone, up to floating-point ties.
  - Every program comes from the pool; once its buckets have been seen a rollout compiles nothing.
    No strategy, no drafter and no change of either changes a token.
  - The memory is donated to every call; no row writes past its capacity, whatever strategy comes next.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tlt_jax.huge_pages import collapse
from tlt_jax.models.config import ModelConfig
from tlt_jax.models.transformer import decode_layout
from tlt_jax.rollout.config import RolloutConfig
from tlt_jax.rollout.device_rows import DeviceRows, EngineStats
from tlt_jax.rollout.executables import ExecutablePool
from tlt_jax.rollout.ngram import NgramConfig, NgramDrafter
from tlt_jax.rollout.noise import request_key
from tlt_jax.rollout.requests import check_request, host_rows, stop_ids
from tlt_jax.rollout.rounds import Committed, InFlight, Rounds, strategies_of
from tlt_jax.rollout.scheduler import Active, Scheduler
from tlt_jax.rollout.speculate import shape_of
from tlt_jax.rollout.stop_strings import find_stop
from tlt_jax.rollout.traces import make_trace
from tlt_jax.sharding import MeshConfig, Versioned, make_mesh
from tlt_jax.strategy import NGRAM_DRAFTER, PLAIN, Policy
from tlt_jax.types import FINISH_LENGTH, Completion, DraftModel, FeatureTrace, Request


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a progress bar shows."""

    done: int
    live: int
    waiting: int
    tokens: int


class RolloutEngine:
    """Generates responses with the weights last given to `load`."""

    def __init__(
        self,
        model: ModelConfig,
        config: RolloutConfig,
        *,
        seed: int = 0,
        mesh: Mesh | None = None,
        worker: int = 0,
        decode_text: Callable[[Sequence[int]], str] | None = None,
        pool: ExecutablePool | None = None,
        drafter: DraftModel | None = None,
        bandit: Policy | None = None,
        ngram: NgramConfig | None = None,
        trace_sink: Callable[[FeatureTrace], None] | None = None,
    ):
        """Makes an engine; compiles nothing yet.

        Args:
          model: the target's configuration; its `dtype` is the compute dtype.
          config: shapes and scheduling.
          seed: the run's seed, shared by all workers.
          mesh: the worker's devices; default: the first device.
          worker: number that completions carry.
          decode_text: token ids to text, needed for stop strings only.
          pool: programs to share with engines of the same model, cache dtype and mesh; default: one of its own.
          drafter: a trained drafter; chains and trees are played once `load_drafter` has given it weights.
          bandit: chooses the strategy of every call; default: plain decoding always.
          ngram: settings of the n-gram drafter, which is there if `bandit` has an arm for it.
          trace_sink: with a drafter, called with the target features of each finished response of a rollout that was
            begun with `trace`.
        """
        request_key(seed, 0)  # refuses a bad seed before any work
        self.model, self.config, self.seed, self.worker = model, config, seed, worker
        self.mesh = mesh or make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
        self.pool = ExecutablePool(config.max_programs) if pool is None else pool
        self.stats = EngineStats()
        self._decode_text = decode_text
        strategies = strategies_of(bandit, config)
        self._scratch = max((shape_of(s).scratch for s in strategies if s != PLAIN), default=0)
        self._kv_buckets = config.kv_buckets_with(self._scratch)
        self._scheduler = Scheduler(config.batch_buckets, self._kv_buckets)
        self._device = DeviceRows(model, config, self._kv_buckets, self.mesh, self.pool, self.stats, drafter)
        uses_ngram = any(s.drafter == NGRAM_DRAFTER for s in strategies)
        self._ngram = NgramDrafter(ngram or NgramConfig()) if uses_ngram else None
        self._rounds = Rounds(self._device, config, bandit, self._ngram)
        self._trace_sink = trace_sink if drafter is not None else None
        self._in_flight: InFlight | None = None
        self._weights: Versioned | None = None
        self.begin()
        self._ids: set[int] = set()  # of the requests in progress

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that leaves room for one new token."""
        return self.config.max_len - 1

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self._in_flight is not None

    @property
    def num_free_rows(self) -> int:
        """Requests that could be submitted without one having to wait."""
        return self.config.batch_buckets[-1] - len(self._scheduler.live) - len(self._scheduler.waiting)

    @property
    def weights(self) -> Versioned:
        """The target weights in use."""
        return self._loaded()

    @property
    def policy_version(self) -> int:
        return self._loaded().version

    def load(self, weights: Versioned) -> None:
        """Takes new weights (a copy of its own: see `sharding.publish`); cached prefixes are dropped.

        On one CPU device they are laid out anew for decoding, in huge pages.

        Raises:
          ValueError: while requests are in progress.
        """
        if self.has_work:
            raise ValueError("engine.load: got new weights with requests in progress, expected an idle engine")
        if self.mesh.size == 1:
            weights = Versioned(decode_layout(weights.params, self.model), weights.version)
            collapse(weights.params)
        self._weights = weights
        self._rounds.drafter = None  # it may hold rows of the old head
        self._device.release()

    def load_drafter(self, weights: Versioned | None) -> None:
        """Takes a drafter's weights, prepared for the target weights in use; None puts the drafter away.

        At any time between two calls of `step`, rollouts in progress included: their tokens do not change.

        Raises:
          ValueError: the engine was made without a drafter.
        """
        if self._device.drafter is None:
            raise ValueError("engine.load_drafter: got weights, expected an engine that was made with a drafter")
        self._loaded()
        self._rounds.drafter = weights
        for active in self._scheduler.live:
            active.num_ingested = 0  # the drafter's cache is the old weights'

    def save_bandit(self) -> dict[str, Any] | None:
        """What the policy has learnt about strategies, for a checkpoint; None without one."""
        return self._rounds.save()

    def restore_bandit(self, saved: dict[str, Any] | None) -> None:
        """Takes up what `save_bandit` gave."""
        self._rounds.restore(saved)

    def begin(self, start_s: float | None = None, *, step: int = 0, trace: bool = False) -> None:
        """Starts a rollout: its clock and the counts of `progress` begin at 0.

        Args:
          start_s: on the clock of `time.perf_counter`, for workers that start together; default: now.
          step: RL step that traces are marked with.
          trace: hand the features of finished responses to the trace sink.
        """
        self._start_s = time.perf_counter() if start_s is None else start_s
        self._step, self._is_tracing = step, trace and self._trace_sink is not None
        self._num_done, self._num_tokens_before = 0, self.stats.tokens

    def submit(self, requests: Iterable[Request]) -> None:
        """Queues requests, first come first served.

        Raises:
          ValueError: without weights, on an empty prompt, a token outside the vocabulary, a request that cannot fit
            `max_len`, or the id of another request in progress; nothing is queued then.
        """
        requests = list(requests)
        self._loaded()
        for r in requests:
            self.check(r)
        ids = {r.request_id for r in requests}
        if len(ids) < len(requests) or ids & self._ids:
            raise ValueError("requests: got a request id twice, expected distinct ids (they seed the noise)")
        self._ids |= ids
        self._scheduler.waiting.extend(requests)

    def withdraw(self, num_requests: int) -> list[Request]:
        """Takes back up to `num_requests` that wait for a row, the last that came; another engine may run them."""
        waiting = self._scheduler.waiting
        taken = [waiting.pop() for _ in range(min(num_requests, len(waiting)))][::-1]
        self._ids -= {r.request_id for r in taken}
        return taken

    def abort(self) -> None:
        """Drops every request in progress and the cache; the engine is idle afterwards, with weights and programs."""
        for active in self._scheduler.live:
            if self._ngram is not None:
                self._ngram.finish(active.request.request_id)
        self._scheduler = Scheduler(self.config.batch_buckets, self._kv_buckets)
        self._in_flight = None
        self._device.release()
        self._ids.clear()

    def generate(
        self, requests: Iterable[Request], on_progress: Callable[[Progress], None] | None = None
    ) -> list[Completion]:
        """All completions of `requests`, in the order of the requests.

        Raises:
          ValueError: as `submit`, and while other requests are in progress. Any error leaves the engine idle.
        """
        if self.has_work:
            raise ValueError("engine.generate: got requests while others are in progress, expected an idle engine")
        requests = list(requests)
        by_id: dict[int, Completion] = {}
        self.begin()
        try:
            self.submit(requests)
            while self.has_work:
                for completion in self.step():
                    by_id[completion.request_id] = completion
                if on_progress is not None:
                    on_progress(self.progress())
        except BaseException:
            self.abort()
            raise
        return [by_id[r.request_id] for r in requests]

    def warm_up(self, truncate: bool = False) -> int:
        """Compiles every program that a rollout may need; returns how many the pool holds.

        Without it programs are compiled when first needed, and a rollout of unusual lengths may meet a new one.

        Args:
          truncate: also the programs for top-k, top-p and min-p.

        Raises:
          ValueError: without weights, or while requests are in progress.
        """
        if self.has_work:
            raise ValueError("engine.warm_up: got requests in progress, expected an idle engine")
        variants = (False, True) if truncate else (False,)
        buckets = (0, *self.config.batch_buckets)
        drafter = self._rounds.drafter
        self._device.warm_up(
            lambda num_rows: host_rows([None] * num_rows, self.model.vocab_size),
            variants,
            lambda num_rows: self._rounds.shapes(num_rows, buckets[buckets.index(num_rows) - 1]),
            None if drafter is None else drafter.params,
            self._loaded().params,
        )
        return len(self.pool)

    def progress(self) -> Progress:
        s = self._scheduler
        num_tokens = self.stats.tokens - self._num_tokens_before
        return Progress(done=self._num_done, live=len(s.live), waiting=len(s.waiting), tokens=num_tokens)

    def step(self) -> list[Completion]:
        """One turn of the engine; returns the responses that finished in the previous one."""
        finished = self._collect()
        if self._scheduler.has_work:
            self._schedule()
            self._dispatch()
        else:
            self._device.release()  # an idle worker leaves its memory to the learner
        return [self._complete(a) for a in finished]

    def _loaded(self) -> Versioned:
        if self._weights is None:
            raise ValueError("engine: got no weights, expected load(...) before the first request")
        return self._weights

    def check(self, r: Request) -> None:
        """Raises ValueError where `submit` would refuse the request by itself."""
        check_request(r, self.model, self.config, has_text=self._decode_text is not None)

    # 1. collect

    def _collect(self) -> list[Active]:
        if self._in_flight is None:
            return []
        done = self._rounds.finish(self._in_flight)
        self._in_flight = None
        now_s = time.perf_counter() - self._start_s
        for row, active in enumerate(self._scheduler.rows):
            if active is not None:
                self._commit(active, done, row)
                active.end_s = now_s
        num_rounds, name = len(done.counts), done.strategy.name
        self.stats.rounds += num_rounds
        self.stats.row_rounds += num_rounds * len(self._scheduler.rows)
        self.stats.arm_rounds[name] += num_rounds
        self.stats.arm_row_rounds[name] += int(np.count_nonzero(done.counts))
        self.stats.arm_tokens[name] += int(done.counts.sum())
        self._trace()
        return self._scheduler.retire()

    def _commit(self, active: Active, done: Committed, row: int) -> None:
        counts, drafted = done.counts[:, row], done.drafted[:, row]
        num_rounds, num_before = int(np.count_nonzero(counts)), len(active.token_ids)
        num_accepted = int(np.sum(np.maximum(counts - 1, 0)))
        active.commit(*done.of_row(row))
        self._stop_at_string(active, num_before)
        active.rounds += num_rounds
        active.drafted += int(drafted.sum())
        active.accepted += num_accepted
        if done.drafter is not None and num_rounds:  # the last round's tokens are pending
            is_current = done.drafter is self._rounds.drafter
            active.num_ingested = active.length - int(counts[counts > 0][-1]) if is_current else 0
        self.stats.tokens += len(active.token_ids) - num_before
        self.stats.drafted += int(drafted.sum())
        self.stats.accepted += num_accepted
        if self._ngram is not None:
            self._ngram.append(active.request.request_id, active.token_ids[num_before:])
            if active.finish_reason:
                self._ngram.finish(active.request.request_id)

    def _trace(self) -> None:
        """Hands over the features of the responses that have just finished."""
        if not self._is_tracing or self._trace_sink is None:
            return
        for row, a in enumerate(self._scheduler.rows):
            if a is not None and a.finish_reason:
                features = np.asarray(self._device.read_features(row))
                self._trace_sink(make_trace(a, features, self.model, self._step, self.policy_version))

    def _stop_at_string(self, active: Active, num_checked: int) -> None:
        if active.request.sampling.stop and self._decode_text is not None:
            num_tokens = find_stop(self._decode_text, active.token_ids, num_checked, active.request.sampling.stop)
            if num_tokens is not None:
                active.cut(num_tokens)

    def _complete(self, active: Active) -> Completion:
        self._num_done += 1
        r = active.request
        self._ids.discard(r.request_id)
        return Completion(
            request_id=r.request_id,
            prompt_id=r.prompt_id,
            sample=r.sample,
            prompt_ids=r.prompt_ids,
            token_ids=np.asarray(active.token_ids, np.int32),
            logprobs=np.asarray(active.logprobs, np.float32),
            finish_reason=active.finish_reason or FINISH_LENGTH,
            policy_version=self.policy_version,
            worker=self.worker,
            rounds=active.rounds,
            drafted=active.drafted,
            accepted=active.accepted,
            start_s=active.start_s,
            end_s=active.end_s,
        )

    # 2. schedule

    def _schedule(self) -> None:
        s = self._scheduler
        num_rows = s.wanted_rows()
        source = s.place(num_rows)
        admitted = self._assign_rows()
        capacity = s.wanted_capacity(self._rounds.max_advance, self._scratch)
        had_live = len(s.live) > len(admitted)
        resizes = self.stats.resizes
        self._device.fit(num_rows, capacity, source if had_live else None)
        prompts = {row: a.request.prompt_ids for row in admitted if (a := s.rows[row]) is not None}
        self._device.fill(prompts, self._loaded().params)
        self._is_clean = not admitted and resizes == self.stats.resizes
        # Kept for requests that are next in line: siblings wait side by side, and memory stays bounded if they do not.
        self._device.keep(r.prompt_ids for r in itertools.islice(s.waiting, self.config.batch_buckets[-1]))

    def _assign_rows(self) -> list[int]:
        """Puts waiting requests into free rows; returns those rows."""
        s = self._scheduler
        now_s = time.perf_counter() - self._start_s
        taken = []
        for row in s.free_rows():
            if not s.waiting:
                break
            r = s.waiting.popleft()
            key = request_key(self.seed, r.request_id)
            s.rows[row] = Active(request=r, stop_ids=stop_ids(r, self.model), key=key, start_s=now_s)
            if self._ngram is not None:
                self._ngram.start(r.request_id, r.prompt_ids)
            taken.append(row)
        return taken

    # 3. dispatch

    def _dispatch(self) -> None:
        s, weights = self._scheduler, self._loaded()
        self._in_flight = self._rounds.start(
            s.rows,
            host_rows(s.rows, self.model.vocab_size),
            self._exit_live(),
            params=weights.params,
            policy_version=weights.version,
            is_clean=self._is_clean,
        )
        self.stats.dispatches += 1

    def _exit_live(self) -> int:
        """Live rows at which a call ends early: to refill finished rows, or to compact the tail."""
        s = self._scheduler
        num_live = len(s.live)
        if s.waiting:
            return num_live - max(1, round(self.config.refill_frac * len(s.rows)))
        smaller = [b for b in s.batch_buckets if b < num_live]
        return smaller[-1] if smaller else 0
