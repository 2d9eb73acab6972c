"""The rollout engine of one worker: continuous batching over static shapes.

The life of a step:
  1. collect: wait for the call in flight; commit its tokens; take finished rows out.
  2. schedule: pick batch and cache buckets, move rows, admit waiting requests (prefill once per prompt, then copy).
  3. dispatch: start the next several rounds.
  4. return the completions of 1; whatever the caller does with them runs while the device works on 3.

Invariants:
  - A request's tokens depend on (weights, seed, request id, prompt, sampling) alone, up to floating-point ties.
  - Every program comes from the pool; once its buckets have been seen a rollout compiles nothing.
  - The cache is donated to every call; `length + rounds <= capacity` holds for every live row.
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

from tlt_jax.models.config import ModelConfig
from tlt_jax.rollout import steps
from tlt_jax.rollout.config import RolloutConfig
from tlt_jax.rollout.device_rows import DeviceRows, EngineStats
from tlt_jax.rollout.executables import ExecutablePool
from tlt_jax.rollout.noise import request_key
from tlt_jax.rollout.sampling import SamplingArrays
from tlt_jax.rollout.scheduler import Active, Scheduler
from tlt_jax.rollout.stop_strings import find_stop
from tlt_jax.sharding import MeshConfig, Versioned, make_mesh
from tlt_jax.types import FINISH_LENGTH, Completion, Request


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
        """
        request_key(seed, 0)  # refuses a bad seed before any work
        self.model, self.config, self.seed, self.worker = model, config, seed, worker
        self.mesh = mesh or make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
        self.pool = ExecutablePool(config.max_programs) if pool is None else pool
        self.stats = EngineStats()
        self._decode_text = decode_text
        self._scheduler = Scheduler(config.batch_buckets, config.kv_buckets)
        self._device = DeviceRows(model, config, self.mesh, self.pool, self.stats)
        self._in_flight: steps.DecodeOut | None = None
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
    def policy_version(self) -> int:
        return self._loaded().version

    def load(self, weights: Versioned) -> None:
        """Takes new weights (a copy of its own: see `sharding.publish`); cached prefixes are dropped.

        Raises:
          ValueError: while requests are in progress.
        """
        if self.has_work:
            raise ValueError("engine.load: got new weights with requests in progress, expected an idle engine")
        self._weights = weights
        self._device.release()

    def begin(self, start_s: float | None = None) -> None:
        """Starts a rollout: its clock and the counts of `progress` begin at 0.

        Args:
          start_s: on the clock of `time.perf_counter`, for workers that start together; default: now.
        """
        self._start_s = time.perf_counter() if start_s is None else start_s
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

    def abort(self) -> None:
        """Drops every request in progress and the cache; the engine is idle afterwards, with weights and programs."""
        self._scheduler = Scheduler(self.config.batch_buckets, self.config.kv_buckets)
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
        self._device.warm_up(lambda num_rows: self._host_rows([None] * num_rows), variants, self._loaded().params)
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
        if not r.prompt_ids:
            raise ValueError(f"request {r.request_id}: got an empty prompt, expected at least one token")
        if min(r.prompt_ids) < 0 or max(r.prompt_ids) >= self.model.vocab_size:
            raise ValueError(
                f"request {r.request_id}: got token ids {min(r.prompt_ids)}..{max(r.prompt_ids)}, expected ids in "
                f"[0, {self.model.vocab_size}); tokenize with this model's tokenizer"
            )
        if len(r.prompt_ids) + r.sampling.max_tokens > self.config.max_len:
            raise ValueError(
                f"request {r.request_id}: got {len(r.prompt_ids)} prompt tokens and max_tokens "
                f"{r.sampling.max_tokens}, expected at most {self.config.max_len} in all; raise "
                "rollout.max_len, lower sampling.max_tokens or shorten the prompt"
            )
        if len(self._stop_ids(r)) > steps.MAX_STOP_IDS:
            raise ValueError(
                f"request {r.request_id}: got {len(self._stop_ids(r))} stop ids, expected at most {steps.MAX_STOP_IDS}"
            )
        if r.sampling.stop and (self._decode_text is None or not all(r.sampling.stop)):
            raise ValueError(
                f"request {r.request_id}: got stop strings {r.sampling.stop}, expected non-empty strings and an engine "
                "made with decode_text"
            )

    def _stop_ids(self, r: Request) -> tuple[int, ...]:
        own = () if r.sampling.ignore_eos else self.model.eos_token_ids
        return tuple(dict.fromkeys((*own, *r.sampling.stop_token_ids)))

    # 1. collect

    def _collect(self) -> list[Active]:
        if self._in_flight is None:
            return []
        out = jax.device_get(self._in_flight)
        self._in_flight = None
        num_rounds = int(out.num_rounds)
        now_s = time.perf_counter() - self._start_s
        for row, active in enumerate(self._scheduler.rows):
            if active is None:
                continue
            num_new = int(np.count_nonzero(out.tokens[:num_rounds, row] >= 0))
            num_before = len(active.token_ids)
            active.rounds += num_new
            active.commit(out.tokens[:num_new, row].tolist(), out.logprobs[:num_new, row].tolist())
            self._stop_at_string(active, num_before)
            self.stats.tokens += len(active.token_ids) - num_before
            active.end_s = now_s
        self.stats.rounds += num_rounds
        self.stats.row_rounds += num_rounds * len(self._scheduler.rows)
        return self._scheduler.retire()

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
            start_s=active.start_s,
            end_s=active.end_s,
        )

    # 2. schedule

    def _schedule(self) -> None:
        s = self._scheduler
        num_rows = s.wanted_rows()
        source = s.place(num_rows)
        admitted = self._assign_rows()
        capacity = s.wanted_capacity(self.config.rounds_per_dispatch)
        had_live = len(s.live) > len(admitted)
        self._device.fit(num_rows, capacity, source if had_live else None)
        prompts = {row: a.request.prompt_ids for row in admitted if (a := s.rows[row]) is not None}
        self._device.fill(prompts, self._loaded().params)
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
            s.rows[row] = Active(request=r, stop_ids=self._stop_ids(r), key=key, start_s=now_s)
            taken.append(row)
        return taken

    # 3. dispatch

    def _dispatch(self) -> None:
        s, params = self._scheduler, self._loaded().params
        truncate = any(a.request.sampling.truncates for a in s.live)
        self._in_flight = self._device.decode(self._host_rows(s.rows), truncate, self._exit_live(), params)
        self.stats.dispatches += 1

    def _exit_live(self) -> int:
        """Live rows at which a call ends early: to refill finished rows, or to compact the tail."""
        s = self._scheduler
        num_live = len(s.live)
        if s.waiting:
            return num_live - max(1, round(self.config.refill_frac * len(s.rows)))
        smaller = [b for b in s.batch_buckets if b < num_live]
        return smaller[-1] if smaller else 0

    def _host_rows(self, active: Sequence[Active | None]) -> steps.Rows:
        def column(get: Callable[[Active], Any], empty: Any, dtype: Any) -> Any:
            return np.asarray([empty if a is None else get(a) for a in active], dtype)

        stop_ids: Any = np.full((len(active), steps.MAX_STOP_IDS), -1, np.int32)
        for row, a in enumerate(active):
            if a is not None:
                stop_ids[row, : len(a.stop_ids)] = a.stop_ids
        sampling = SamplingArrays(
            key=column(lambda a: a.key, np.zeros(2, np.uint32), np.uint32),
            temperature=column(lambda a: a.request.sampling.temperature, 0.0, np.float32),
            top_k=column(lambda a: min(a.request.sampling.top_k, self.model.vocab_size), 0, np.int32),
            top_p=column(lambda a: a.request.sampling.top_p, 1.0, np.float32),
            min_p=column(lambda a: a.request.sampling.min_p, 0.0, np.float32),
        )
        return steps.Rows(
            token=column(lambda a: a.newest, 0, np.int32),
            length=column(lambda a: a.length, 0, np.int32),
            limit=column(lambda a: a.limit, 0, np.int32),
            live=column(lambda a: True, False, np.bool_),
            stop_ids=stop_ids,
            sampling=sampling,
        )
