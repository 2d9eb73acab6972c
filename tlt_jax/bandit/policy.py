"""Settings of strategy choice, and what both policies count by."""

from __future__ import annotations

import dataclasses

from tlt_jax.bandit.strategies import ArmTable, parse_arms
from tlt_jax.strategy import JsonDict, Outcome


@dataclasses.dataclass(frozen=True, kw_only=True)
class BanditConfig:
    """Settings of strategy choice.

    Attributes:
      policy: "model" (acceptance and cost learnt apart, `arm_model`) or "beg_mab" (the paper's bandit).
      arms: "auto" (by platform), "cpu", "gpu", "paper", or a text for `strategies.parse_arms`.
      seed: of the exploration draws of "beg_mab"; give each worker its own.
      reward: "tokens", committed tokens per second of the worker; or "straggler", which in the tail weighs in the
        straggler's own rate, since its end is the rollout's end.
      straggler_weight: share of the straggler's own rate in the tail, in [0, 1].
      tail_batch: the tail is where at most so many rows live.
      epsilon: "beg_mab": share of random choices.
      window: "beg_mab": rewards kept per arm.
      explore_frac: "model": most seconds lost to probes, as a share of the seconds played.
      probe_rounds: "model": rounds of a probe, and of any arm that little is known about.
      optimism: "model": standard deviations added to an arm's rate when asking whether it deserves a probe.
      memory_rounds: "model": half life of acceptance evidence, in rounds of the same drafter.
      version_trials: "model": evidence kept per arm and level when the weights change, in trials.
      free_tokens: "model": tokens per forward whose arithmetic takes as long as reading the weights; only a first guess
        of costs that are then measured. 0 takes the platform's.
      draft_step_frac: "model": first guess of one drafter step's cost, as a share of a plain round.
    """

    policy: str = "model"
    arms: str = "auto"
    seed: int = 0
    reward: str = "tokens"
    straggler_weight: float = 0.5
    tail_batch: int = 4
    epsilon: float = 0.1
    window: int = 300
    explore_frac: float = 0.015
    probe_rounds: int = 4
    optimism: float = 1.0
    memory_rounds: float = 64.0
    version_trials: float = 12.0
    free_tokens: float = 0.0
    draft_step_frac: float = 0.06

    def __post_init__(self):
        checks = (
            ("policy", self.policy in ("model", "beg_mab"), "'model' or 'beg_mab'"),
            ("seed", self.seed >= 0, ">= 0"),
            ("reward", self.reward in ("tokens", "straggler"), "'tokens' or 'straggler'"),
            ("straggler_weight", 0.0 <= self.straggler_weight <= 1.0, "in [0, 1]"),
            ("tail_batch", self.tail_batch >= 1, ">= 1"),
            ("epsilon", 0.0 <= self.epsilon <= 1.0, "in [0, 1]"),
            ("window", self.window >= 1, ">= 1"),
            ("explore_frac", 0.0 <= self.explore_frac < 1.0, "in [0, 1)"),
            ("probe_rounds", self.probe_rounds >= 1, ">= 1"),
            ("optimism", self.optimism >= 0.0, ">= 0"),
            ("memory_rounds", self.memory_rounds > 0.0, "> 0"),
            ("version_trials", self.version_trials >= 0.0, ">= 0"),
            ("free_tokens", self.free_tokens >= 0.0, ">= 0 (0 takes the platform's)"),
            ("draft_step_frac", self.draft_step_frac >= 0.0, ">= 0"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise ValueError(f"bandit.{name}: got {getattr(self, name)!r}, expected {expected}")
        if self.arms != "auto":
            parse_arms(self.arms)

    def table(self, platform: str) -> ArmTable:
        """The arms on a platform, "cpu" or "gpu"."""
        return parse_arms(("cpu" if platform == "cpu" else "gpu") if self.arms == "auto" else self.arms)

    def straggler_share(self, live_batch: int) -> float:
        """Weight of the straggler's own rate at a live batch."""
        in_tail = self.reward == "straggler" and live_batch <= self.tail_batch
        return self.straggler_weight if in_tail else 0.0


def reward_tokens_per_s(outcome: Outcome, config: BanditConfig) -> float:
    """Mean committed tokens x live batch / seconds of a round; in the tail the mean may weigh in the straggler's own.

    References:
      arXiv 2511.16665: the reward of BEG-MAB. The straggler's share is ours.
    """
    per_row = float(outcome.committed.sum()) / (outcome.num_rounds * outcome.situation.live_batch)
    share = config.straggler_share(outcome.situation.live_batch)
    if share > 0.0 and outcome.straggler_row is not None:
        own = float(outcome.committed[:, outcome.straggler_row].mean())
        per_row = (1.0 - share) * per_row + share * own
    return per_row * outcome.situation.live_batch * outcome.num_rounds / outcome.elapsed_s


def check_saved_by(name: str, saved: JsonDict) -> None:
    """Raises ValueError if a saved state is another policy's."""
    if saved.get("policy") != name:
        raise ValueError(
            f"bandit state: got one saved by policy {saved.get('policy')!r}, expected {name!r}; set bandit.policy to "
            "the one that the run was started with"
        )
