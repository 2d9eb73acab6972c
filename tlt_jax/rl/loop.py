"""The training loop: rollout, reward, update, publish, and what is written down about each.

Life of step s (1, 2, ...):
  1. Draw P prompts; make P x R requests. Their ids, and so their noise, depend on s alone.
  2. Workers decode with policy version s-1; rewards are computed meanwhile, and workers that have run dry train the
     drafter; what they have learnt is merged at the end. With dynamic sampling, batches are drawn
     until P groups have a signal, or the limit of batches is reached.
  3. Advantages, log-probs and update on the learner's mesh.
  4. The new weights become version s and are copied to the workers.
  5. Metrics, rollouts, evaluation and checkpoint, all under the number s.

In a job of several processes each runs this loop. All draw the same prompts, each decodes and scores its share, and
after the exchange of shares all hold the same responses: what follows is the same everywhere, on one mesh over all
their devices. Process 0 writes for people.

Invariants:
  - Collectives are entered by the loop's thread alone, in the order of the steps above.
  - A run that was stopped anywhere and resumed continues token for token: everything that step s depends on is either
    derived from (config, s) or in the checkpoint of s-1.
  - The sum of the phases of a step is its wall time, `time/other_s` included. A step begins where the one before ended:
    what it takes to write a step's metrics down is in the next one's `time/other_s`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from tlt_jax.checkpoint import CheckpointStore
from tlt_jax.coordinator.messages import Change
from tlt_jax.coordinator.online import OnlineDrafter
from tlt_jax.coordinator.runtime import WorkerPool, worker_metrics
from tlt_jax.coordinator.work import LengthHistory
from tlt_jax.metrics import CompileCounter, MetricsWriter, RolloutWriter, TimelineWriter, memory_metrics
from tlt_jax.processes import Group
from tlt_jax.rl.advantages import find_constant_groups
from tlt_jax.rl.algorithms import AlgorithmConfig
from tlt_jax.rl.batch import assign_advantages, make_batch
from tlt_jax.rl.evaluate import EvalConfig, evaluate
from tlt_jax.rl.exchange import sum_over_processes
from tlt_jax.rl.experience import Scored, collect, concat, make_requests, rollout_metrics, take_groups
from tlt_jax.rl.lengths import LAWS, cut_to_law
from tlt_jax.rl.optimizer import LearnerState
from tlt_jax.rl.rewards import RewardPool
from tlt_jax.rl.tasks import Prompt, TrainIterator
from tlt_jax.rl.update import Learner
from tlt_jax.rollout.engine import Progress
from tlt_jax.sharding import Versioned
from tlt_jax.types import Params, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Sizes and cadence of the loop.

    Attributes:
      num_steps: RL steps of the whole run; raising it later continues the run.
      prompts_per_step: P.
      group_size: R, responses per prompt.
      max_batches: with dynamic sampling, most batches of P prompts drawn in a step.
      seed: of the run: noise, order of prompts, random weights.
      length_law: "" leaves the length of a response to the model; a name of `lengths.LAWS` draws it from a law.
    """

    num_steps: int = 100
    prompts_per_step: int = 8
    group_size: int = 8
    max_batches: int = 4
    seed: int = 0
    length_law: str = ""

    def __post_init__(self):
        checks = (
            ("length_law", self.length_law in ("", *LAWS), f"'' or one of {list(LAWS)}"),
            ("num_steps", self.num_steps >= 1, ">= 1"),
            ("prompts_per_step", self.prompts_per_step >= 1, ">= 1"),
            ("group_size", self.group_size >= 1, ">= 1"),
            ("max_batches", self.max_batches >= 1, ">= 1"),
            ("seed", 0 <= self.seed < 1 << 63, "in [0, 2^63)"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise ValueError(f"rl.{name}: got {getattr(self, name)!r}, expected {expected}")

    def check_algorithm(self, algo: AlgorithmConfig) -> None:
        """Raises ValueError where the batch cannot be cut as the algorithm wants, or a group is too small for it."""
        num_rows = self.prompts_per_step * self.group_size
        if num_rows % algo.num_minibatches:
            raise ValueError(
                f"loop: got {self.prompts_per_step} prompts x {self.group_size} responses = {num_rows} rows for "
                f"{algo.num_minibatches} minibatches, expected a multiple; change rl.prompts_per_step, rl.group_size "
                "or rl.num_minibatches"
            )
        if self.group_size == 1 and algo.advantage not in ("batch_norm",):
            raise ValueError(
                f"rl.group_size: got 1 with advantage {algo.advantage!r}, which compares the responses to one prompt; "
                "expected at least 2"
            )


class Reporter(Protocol):
    """Shows a person what the loop does. Called from the loop's thread, and `progress` from workers' threads too."""

    def phase(self, step: int, name: str) -> None: ...
    def progress(self, progress: Progress) -> None: ...
    def done(self, step: int, metrics: dict[str, float]) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class _PhaseClock:
    """Seconds spent in each phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str):
        start_s = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start_s


@dataclasses.dataclass(kw_only=True)
class TrainLoop:
    """Holds the parts of a run and drives them; the parts do the maths."""

    config: LoopConfig
    algo: AlgorithmConfig
    sampling: SamplingParams
    eval_config: EvalConfig
    learner: Learner
    state: LearnerState
    ref_params: Params | None
    workers: WorkerPool
    publish: Callable[[Params, int], list[Versioned]]
    publish_drafter: Callable[[], None] | None  # of a drafter that stays as it is
    online: OnlineDrafter | None  # a drafter that idle workers train
    prompts: TrainIterator
    eval_prompts: Sequence[Prompt]
    rewards: RewardPool
    decode_text: Callable[[Sequence[int]], str]
    store: CheckpointStore | None
    checkpoint_every: int
    metrics: MetricsWriter
    rollouts: RolloutWriter
    timeline: TimelineWriter
    reporter: Reporter
    group: Group = dataclasses.field(default_factory=Group)
    first_step: int = 1  # 1 + the step restored from
    step: int = 0  # the step in progress, or the last one; 0 before the first

    def __post_init__(self):
        self._compiles = CompileCounter()
        self._lengths = LengthHistory()
        self._start_s = self._begun_s = time.perf_counter()
        if self.workers.coordinator is not None:
            self.workers.coordinator.on_change = self._on_change

    def run(self) -> dict[str, float]:
        """Trains up to `config.num_steps`; returns the last step's metrics."""
        self.group.agree("first step", str(self.first_step))
        self._publish(self.first_step - 1)
        if self.online is not None:
            self.online.warm_up()
        last: dict[str, float] = {}
        self.step = self.first_step - 1
        if self.first_step == 1 and self._evaluates(0):
            self.metrics.write(0, self._evaluate(0))
        self._begun_s = time.perf_counter()
        for step in range(self.first_step, self.config.num_steps + 1):
            self.step = step
            last = self._step(step)
        if self.store is not None:
            self.store.wait()
        return last

    def _step(self, step: int) -> dict[str, float]:
        clock, start_s = _PhaseClock(), self._begun_s
        before, arms, seconds = self._compiles.read(), self.workers.arm_counts(), dict(self.workers.seconds)
        poll_s, driver_s = self.workers.poll_s, self.workers.driver_s
        self._phase(step, "rollout")
        scored = self._rollout(step)
        out = rollout_metrics(scored) | worker_metrics(seconds, self.workers.seconds)
        if self.online is not None:
            self.group.enter(f"step {step}, merge")
            with clock.phase("merge"):
                out |= self.online.finish_step()
        groups = self._groups_to_keep(scored)
        kept = take_groups(scored, groups)
        self._phase(step, "update")
        with clock.phase("update"):
            learn, kept_advantages = self._update(kept)
            advantages = np.zeros((len(scored.prompts), self.config.group_size), np.float32)  # 0 where not kept
            advantages[groups] = kept_advantages.reshape(-1, self.config.group_size)
        out |= learn | {"rl/reward_mean": out["rl/reward_mean"]}
        out["rl/dropped_groups"] += len(scored.prompts) - len(kept.prompts)
        self._phase(step, "publish")
        with clock.phase("publish"):
            self._publish(step)
        with clock.phase("write"):
            self.rollouts.write(step, scored.completions, scored.texts, scored.rewards, advantages.reshape(-1))
        if self._evaluates(step):
            with clock.phase("eval"):
                out |= self._evaluate(step)
        self._phase(step, "checkpoint")
        with clock.phase("checkpoint"):
            self._checkpoint(step, out)
        counts = {name: n - arms.get(name, 0) for name, n in self.workers.arm_counts().items()}
        counts |= {name: value - before[name] for name, value in self._compiles.read().items()}
        counts |= {"poll_s": self.workers.poll_s - poll_s, "driver_s": self.workers.driver_s - driver_s}
        out |= sum_over_processes(counts | memory_metrics(), self.group)
        out["worker/poll_frac"] = out.pop("poll_s") / max(out.pop("driver_s"), 1e-9)
        self._begun_s = time.perf_counter()
        out |= self._times(out, clock, self._begun_s - start_s)
        self.metrics.write(step, out)
        self.reporter.done(step, out)
        return out

    def _phase(self, step: int, name: str) -> None:
        self.reporter.phase(step, name)
        self.group.enter(f"step {step}, {name}")

    def _publish(self, version: int) -> None:
        """Weights of the learner, and the drafter with them, to the workers."""
        self.workers.load(self.publish(self.state.params, version))
        if self.online is not None:
            self.online.publish()
        elif self.publish_drafter is not None:
            self.publish_drafter()

    def _times(self, out: dict[str, float], clock: _PhaseClock, step_s: float) -> dict[str, float]:
        """`time/*_s` that add up to `time/step_s`."""
        times = {f"time/{name}_s": seconds for name, seconds in clock.seconds.items()}
        times["time/update_s"] -= out["time/logprob_s"]  # measured inside the update
        for name in ("rollout", "reward", "logprob"):
            times[f"time/{name}_s"] = out[f"time/{name}_s"]
        return times | {"time/step_s": step_s, "time/other_s": step_s - sum(times.values())}

    def _rollout(self, step: int) -> Scored:
        """Scored responses of one batch; with dynamic sampling, of as many as it takes."""
        size = self.config.prompts_per_step * self.config.group_size
        if self.online is not None:
            self.online.start_step(step)
        parts: list[Scored] = []
        num_kept = 0
        for batch in range(self.config.max_batches if self.algo.dynamic_sampling else 1):
            prompts = next(self.prompts)
            first_id = (step * self.config.max_batches + batch) * size
            requests = make_requests(prompts, self.config.group_size, self.sampling, first_id)
            requests = cut_to_law(requests, self.config.length_law, self.config.seed)
            part = collect(
                self.workers,
                self.rewards,
                prompts,
                requests,
                self.decode_text,
                self.reporter.progress,
                step=step,
                train=True,
                expected_lens=self._lengths.expected([p.prompt_id for p in prompts]),
                group=self.group,
            )
            parts.append(part)
            for i, prompt in enumerate(prompts):
                group = part.completions[i * self.config.group_size : (i + 1) * self.config.group_size]
                self._lengths.add(prompt.prompt_id, [len(c.token_ids) for c in group])
            if not self.algo.dynamic_sampling:
                break
            num_kept += int(np.sum(~find_constant_groups(part.rewards_PR)))
            if num_kept >= self.config.prompts_per_step:
                break
        self._report_failures(step, parts)
        return concat(parts)

    def _on_change(self, change: Change) -> None:
        self.timeline.write(
            change.time_s - self._start_s,
            worker=change.worker,
            state=change.state,
            step=self.step,
            window_id=change.window_id,
        )

    def _report_failures(self, step: int, parts: Sequence[Scored]) -> None:
        for message in [m for part in parts for m in part.reward_messages][:3]:
            self.reporter.note(f"step {step}: a reward failed and scored as failed: {message}")

    def _groups_to_keep(self, scored: Scored) -> list[int]:
        """With dynamic sampling, the first P groups with a signal; the first P of all if none has."""
        groups = np.arange(len(scored.prompts))
        if self.algo.dynamic_sampling and not (is_constant := find_constant_groups(scored.rewards_PR)).all():
            groups = groups[~is_constant]
        return groups[: self.config.prompts_per_step].tolist()

    def _update(self, scored: Scored) -> tuple[dict[str, float], np.ndarray]:
        batch = make_batch(scored.completions, self.sampling)
        kl_sums, kl_s = None, 0.0
        if self.algo.needs_reference and self.algo.kl_in == "reward":
            assert self.ref_params is not None
            start_s = time.perf_counter()
            kl_sums = self.learner.kl_sums(self.state.params, self.ref_params, batch)
            kl_s = time.perf_counter() - start_s
        batch, shaped = assign_advantages(batch, scored.rewards, self.config.group_size, self.algo, kl_sums)
        self.state, learnt = self.learner.update(self.state, batch, self.ref_params)
        learnt["time/logprob_s"] += kl_s
        if kl_sums is not None:
            learnt["rl/kl"] = float(kl_sums.sum() / batch.response_lens.sum())
        return shaped | learnt, batch.advantages

    def _evaluates(self, step: int) -> bool:
        every = self.eval_config.every
        return bool(every and self.eval_prompts) and (step % every == 0 or step == self.config.num_steps)

    def _evaluate(self, step: int) -> dict[str, float]:
        self._phase(step, "eval")
        _, metrics = evaluate(
            self.workers,
            self.rewards,
            self.eval_prompts,
            self.sampling,
            self.eval_config,
            self.decode_text,
            self.reporter.progress,
            self.group,
        )
        return metrics

    def _checkpoint(self, step: int, metrics: dict[str, Any]) -> None:
        is_due = self.checkpoint_every and step % self.checkpoint_every == 0
        if self.store is None or not (is_due or step == self.config.num_steps):
            return
        self.store.save(step, self.checkpoint_items(), metrics=metrics, summary=self.checkpoint_summary())
        if self.online is not None:
            self.online.save_data(step, keep=self.store.steps())

    def close(self) -> None:
        """Waits for the checkpoint being written, and closes what the loop writes to.

        Raises:
          CheckpointError: that checkpoint could not be written.
        """
        self._compiles.close()
        self.reporter.close()
        self.metrics.close()
        self.timeline.close()
        if self.online is not None:
            self.online.close()
        if self.store is not None:
            self.store.close()

    def checkpoint_items(self) -> dict[str, Any]:
        """Everything that the next step depends on besides the configuration."""
        items = {"learner": self.state, "data": self.prompts.get_state(), "bandit": self._bandits()}
        if self.online is not None:
            items["drafter"], items["online"] = self.online.get_state()
        return items

    def _bandits(self) -> list[Any]:
        """What every worker's policy has learnt, worker after worker over all processes."""
        own = json.dumps(self.workers.save_bandits()).encode()
        return [bandit for data in self.group.gather("bandits", own) for bandit in json.loads(data)]

    def checkpoint_summary(self) -> dict[str, Any]:
        """What a person wants to see of a checkpoint after a resume."""
        return {
            "optimizer_steps": int(self.state.step),
            "data_position": self.prompts.get_state()["position"],
            "seed": self.config.seed,
        }
