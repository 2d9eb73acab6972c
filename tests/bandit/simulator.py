"""A rollout engine that exists only as time and luck: what a policy is judged against.

Costs follow a decoder on two CPU cores (a read of the weights plus a share per token), with noise and now and then a
spike. Acceptance per level depends on the drafter and drifts with the tokens generated; widths help by another law than
the one that the policy under test assumes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from tlt_jax.bandit.strategies import ArmTable
from tlt_jax.strategy import LAYER_DRAFTER, NGRAM_DRAFTER, PLAIN, Outcome, Policy, Situation, Strategy


@dataclasses.dataclass(frozen=True)
class World:
    """Laws of one machine and one text.

    Attributes:
      accept: (drafter, tokens so far) -> acceptance of one branch at any level.
      read_s, token_s, step_s: seconds to read the weights, per token verified, per drafter step.
      noise: standard deviation of the log of a round's time.
      spike_frac: share of calls that take `spike` times as long.
    """

    accept: Callable[[str, float], float]
    read_s: float = 0.027
    token_s: float = 0.002
    step_s: float = 0.0015
    noise: float = 0.05
    spike_frac: float = 0.01
    spike: float = 4.0

    def round_s(self, s: Strategy, batch: int) -> float:
        step_s = self.step_s * (1.0 + batch * s.topk / 16.0)
        return self.read_s + self.token_s * batch * s.verify_width + s.draft_steps * step_s

    def level_rates(self, s: Strategy, tokens: float) -> np.ndarray:
        if s.depth == 0:
            return np.zeros(0)
        width = (s.verify_width - 1) / s.depth
        one = self.accept(s.drafter, tokens)
        return np.full(s.depth, 1.0 - (1.0 - one) ** (width**0.5))

    def mean_len(self, s: Strategy, tokens: float) -> float:
        return 1.0 + float(np.cumprod(self.level_rates(s, tokens)).sum())

    def token_row_s(self, s: Strategy, batch: int, tokens: float) -> float:
        """Expected seconds per committed token of a row."""
        return self.round_s(s, batch) / self.mean_len(s, tokens)

    def sample(
        self, s: Strategy, batch: int, tokens: float, num_rounds: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, float]:
        """Committed tokens i32[rounds, rows] and seconds of a call."""
        rates = self.level_rates(s, tokens)
        accepted = np.cumprod(rng.random((num_rounds, batch, s.depth)) < rates, axis=-1).sum(-1)
        factor = np.exp(self.noise * rng.standard_normal()) * (self.spike if rng.random() < self.spike_frac else 1.0)
        return 1 + accepted.astype(np.int32), num_rounds * self.round_s(s, batch) * factor


@dataclasses.dataclass
class Played:
    """What a policy did over a rollout."""

    seconds: float = 0.0
    ideal_s: float = 0.0  # of the best fixed arm of each phase
    plain_s: float = 0.0  # of plain decoding
    rounds: dict[str, int] = dataclasses.field(default_factory=dict)
    phases: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)  # live batch, seconds, ideal_s

    @property
    def regret_frac(self) -> float:
        return self.seconds / self.ideal_s - 1.0

    @property
    def spec_frac(self) -> float:
        return 1.0 - self.rounds.get("plain", 0) / sum(self.rounds.values())


def play(
    policy: Policy,
    state: Any,
    world: World,
    table: ArmTable,
    phases: list[tuple[int, float]],
    *,
    rng: np.random.Generator,
    rounds_per_call: int = 8,
    versions: tuple[int, int | None] = (0, 0),
) -> tuple[Played, Any]:
    """Runs phases of (live batch, tokens per row).

    Returns:
      (what was played, state). The policy sees drawn times and tokens; what is counted are their expectations.
    """
    played, position = Played(), 0.0
    for batch, num_tokens in phases:
        bucket = 1 << (batch - 1).bit_length()
        end, phase_s = position + num_tokens, 0.0
        grid = np.linspace(position, end, 33)
        arms = [s for s in table.arms[table.bucket(batch)] if versions[1] is not None or s.drafter != LAYER_DRAFTER]
        ideal_s = num_tokens * min(np.mean([world.token_row_s(s, bucket, t) for t in grid]) for s in arms)
        played.plain_s += num_tokens * world.round_s(PLAIN, bucket)
        while position < end:
            situation = Situation(
                live_batch=batch,
                batch_bucket=bucket,
                kv_bucket=256 if position < 600 else 1024,
                policy_version=versions[0],
                drafter_version=versions[1],
            )
            choice, state = policy.select(state, situation)
            num_rounds = min(rounds_per_call, choice.max_rounds or rounds_per_call)
            committed, elapsed_s = world.sample(choice.strategy, batch, position, num_rounds, rng)
            state = policy.update(
                state, Outcome(situation=situation, choice=choice, committed=committed, elapsed_s=elapsed_s)
            )
            name = choice.strategy.name
            played.rounds[name] = played.rounds.get(name, 0) + num_rounds
            phase_s += num_rounds * world.round_s(choice.strategy, bucket)
            position += num_rounds * world.mean_len(choice.strategy, position)
        # A call may run past the end of its phase: count the tokens it made.
        ideal_s *= (position - (end - num_tokens)) / num_tokens
        played.phases.append((batch, phase_s, ideal_s))
        played.seconds, played.ideal_s = played.seconds + phase_s, played.ideal_s + ideal_s
    return played, state


def steady(layer: float, ngram: float) -> Callable[[str, float], float]:
    """Acceptance that does not drift."""
    return lambda drafter, tokens: {LAYER_DRAFTER: layer, NGRAM_DRAFTER: ngram}[drafter]
