"""Supervised learning on prompts with given responses: a warm start before RL.

Maximum likelihood is the on-policy gradient at advantage 1: with the ratio 1 to the bit, the gradient of -ratio is that
of -log p. So the learner of `update.py` does the work, and its guarantees hold here too: exact under micro-batching and
sharding, f32 log-probs, and a gradient that is not finite changes nothing.

The loss of a step is the mean over its response tokens of -log p(token | prompt and the response so far), in nats.
Prompts are conditioned on, never learnt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from tlt_jax.models.config import ModelConfig
from tlt_jax.rl.algorithms import AlgorithmConfig
from tlt_jax.rl.batch import TrainBatch
from tlt_jax.rl.optimizer import LearnerState, OptimizerConfig
from tlt_jax.rl.steps import LearnerConfig
from tlt_jax.rl.update import make_learner
from tlt_jax.types import Params

_MAXIMUM_LIKELIHOOD = AlgorithmConfig(aggregation="token_mean")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt and the response to learn, which ends with a stop id where the policy should stop."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]

    def __post_init__(self):
        if not self.prompt_ids or not self.response_ids:
            raise ValueError(
                f"example: got {len(self.prompt_ids)} prompt tokens and {len(self.response_ids)} response tokens, "
                "expected at least one of each; drop the example, or start the prompt with a BOS id"
            )


class SupervisedLearner(NamedTuple):
    """Functions around a `LearnerState`, as `update.Learner` has them.

    Attributes:
      init: params -> state; copies, in f32, onto the mesh.
      update: (state, examples) -> (state, metrics): one optimizer step; donates the state. Metrics: `sft/loss` (nats
        per response token, before the step; a token counts 20 at most), `sft/tokens` (response tokens),
        `sft/grad_norm` (before clipping), `sft/learning_rate` and `sft/skipped_updates`.
    """

    init: Callable[[Params], LearnerState]
    update: Callable[[LearnerState, Sequence[Example]], tuple[LearnerState, dict[str, float]]]


def make_supervised_learner(
    model: ModelConfig, optim: OptimizerConfig, config: LearnerConfig | None = None, mesh: Mesh | None = None
) -> SupervisedLearner:
    """Builds the learner; nothing is compiled before first use. Arguments as of `make_learner`."""
    learner = make_learner(model, _MAXIMUM_LIKELIHOOD, optim, config, mesh)

    def update(state: LearnerState, examples: Sequence[Example]):
        state, learnt = learner.update(state, make_supervised_batch(examples))
        # The rollout's log-probs are set to 0, so the gap from them is -log p.
        metrics = {"sft/loss": learnt["rl/logprob_gap"], "sft/tokens": learnt["rl/valid_tokens"]}
        return state, metrics | {
            f"sft/{name}": learnt[f"rl/{name}"] for name in ("grad_norm", "learning_rate", "skipped_updates")
        }

    return SupervisedLearner(init=learner.init, update=update)


def make_supervised_batch(examples: Sequence[Example]) -> TrainBatch:
    """The examples as rows of advantage 1, at temperature 1.

    Raises:
      ValueError: no examples.
    """
    if not examples:
        raise ValueError("examples: got none, expected at least one")
    num_rows = len(examples)
    return TrainBatch(
        row_ids=np.arange(num_rows, dtype=np.int32),
        prompt_ids=np.arange(num_rows, dtype=np.int32),
        tokens=tuple(np.array([*e.prompt_ids, *e.response_ids], np.int32) for e in examples),
        prompt_lens=np.array([len(e.prompt_ids) for e in examples], np.int32),
        behaviour_logprobs=tuple(np.zeros(len(e.response_ids), np.float32) for e in examples),
        is_truncated=np.zeros(num_rows, bool),
        advantages=np.ones(num_rows, np.float32),
        is_trained=np.ones(num_rows, bool),
        temperature=1.0,
        max_tokens=max(len(e.response_ids) for e in examples),
    )
