"""Held-out evaluation: mean@k and pass@k of the current weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tlt_jax.coordinator.driver import OnProgress
from tlt_jax.coordinator.runtime import WorkerPool
from tlt_jax.processes import Group
from tlt_jax.rl.experience import EVAL_REQUEST_ID, Scored, collect, make_requests
from tlt_jax.rl.rewards import RewardPool
from tlt_jax.rl.tasks import Prompt
from tlt_jax.types import FINISH_LENGTH, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How held-out prompts are evaluated.

    Attributes:
      every: RL steps between evaluations; 0 evaluates never.
      num_samples: k, responses per prompt.
      temperature: of evaluation; 0 with one sample is greedy.
      max_tokens: most new tokens; 0 takes the training cap.
      pass_score: a response with at least this reward counts as right.
    """

    every: int = 0
    num_samples: int = 1
    temperature: float = 0.0
    max_tokens: int = 0
    pass_score: float = 1.0

    def __post_init__(self):
        checks = (
            ("every", self.every >= 0, ">= 0 (0 never)"),
            ("num_samples", self.num_samples >= 1, ">= 1"),
            ("temperature", self.temperature >= 0.0, ">= 0"),
            ("temperature", self.temperature > 0.0 or self.num_samples == 1, "> 0 with more than one sample"),
            ("max_tokens", self.max_tokens >= 0, ">= 0 (0 takes the training cap)"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise ValueError(f"eval.{name}: got {getattr(self, name)!r}, expected {expected}")

    def sampling(self, training: SamplingParams) -> SamplingParams:
        """The training parameters with this temperature and cap, and nothing truncated."""
        return dataclasses.replace(
            training,
            temperature=self.temperature,
            max_tokens=self.max_tokens or training.max_tokens,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
        )


def evaluate(
    workers: WorkerPool,
    rewards: RewardPool,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    config: EvalConfig,
    decode_text: Callable[[Sequence[int]], str],
    on_progress: OnProgress | None = None,
    group: Group | None = None,
) -> tuple[Scored, dict[str, float]]:
    """Responses to all `prompts` and their scores.

    The noise depends on the prompt's place only, so evaluations of two policies differ by the policies alone.

    Returns:
      The scored responses, and metrics `eval/mean_at_k` (mean reward), `eval/pass_at_1` (share of right responses),
      `eval/pass_at_k` (share of prompts with a right one), `eval/len_mean`, `eval/truncated_frac`.
    """
    requests = make_requests(prompts, config.num_samples, config.sampling(sampling), EVAL_REQUEST_ID)
    scored = collect(workers, rewards, prompts, requests, decode_text, on_progress, group=group)
    right_PR = scored.rewards_PR >= config.pass_score
    lengths = [len(c.token_ids) for c in scored.completions]
    return scored, {
        "eval/mean_at_k": float(scored.rewards.mean()),
        "eval/pass_at_1": float(right_PR.mean()),
        "eval/pass_at_k": float(right_PR.any(axis=1).mean()),
        "eval/len_mean": float(np.mean(lengths)),
        "eval/truncated_frac": float(np.mean([c.finish_reason == FINISH_LENGTH for c in scored.completions])),
        "eval/num_responses": len(scored.completions),
    }
