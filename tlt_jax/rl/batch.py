"""From finished responses to fixed-shape micro-batches, on the host.

Life of a rollout batch:
  1. `make_batch` takes completions as they are: the ids that were sampled, untouched, one row each, in order.
  2. `assign_advantages` compares rewards inside each prompt's group and decides which rows take part.
  3. `split_minibatches` cuts the rows that take part into the optimizer steps of one pass.
  4. `plan_bins` packs the rows of an optimizer step into bins of a few power-of-two widths, and `make_micro_batches`
     writes the arrays: rows x width tokens with segment ids, and the response tokens as compacted slots.

Invariants:
  - Token weights are those of the whole optimizer step, so the sum over micro-batches is exact whatever the cut.
  - Slot i of a response is its i-th token: its log-prob is read from the position before it, the first from the last
    prompt position.
  - A micro-batch has one of few shapes: (rows(width), width) for powers of two, so few programs are compiled. Missing
    bins are empty rows of weight 0.
  - Everything is a function of the batch alone: the same rollout gives the same cut on every host and after a resume.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct
import numpy as np

from tlt_jax.rl.advantages import group_advantages, shape_rewards
from tlt_jax.rl.algorithms import AlgorithmConfig
from tlt_jax.types import FINISH_LENGTH, Completion, SamplingParams

Array = Any  # numpy while it is being filled, jax.Array once it is on the device


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackConfig:
    """How rows are laid out.

    Attributes:
      micro_batch_tokens: token slots of a micro-batch over all devices; longer rows get micro-batches of their width.
      min_width: the narrowest bin, a power of two.
      share_bins: several rows in a bin, kept apart by segment ids. False gives each row a bin of its own: more padding,
        but attention without segments, which runs in cuDNN's flash kernel on GPU.
      attention_len: context length in tokens at which attention costs as much as the rest of the network; wider bins
        waste less padding and more attention.
    """

    micro_batch_tokens: int = 4096
    min_width: int = 64
    share_bins: bool = True
    attention_len: int = 2048

    def __post_init__(self):
        if self.min_width < 1 or self.min_width & (self.min_width - 1):
            raise ValueError(f"pack.min_width: got {self.min_width}, expected a power of two")
        for name in ("micro_batch_tokens", "attention_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"pack.{name}: got {getattr(self, name)}, expected >= 1 token")

    def num_rows(self, width: int, num_shards: int) -> int:
        """Bins of `width` in one micro-batch, a multiple of `num_shards`."""
        return max(1, self.micro_batch_tokens // (width * num_shards)) * num_shards


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """Responses of one rollout, row by row; B rows, the responses to one prompt side by side."""

    row_ids: np.ndarray  # i64[B] request ids
    prompt_ids: np.ndarray  # i64[B]
    tokens: tuple[np.ndarray, ...]  # B arrays i32[prompt + response]
    prompt_lens: np.ndarray  # i32[B]
    behaviour_logprobs: tuple[np.ndarray, ...]  # B arrays f32[response]
    is_truncated: np.ndarray  # bool[B] cut at the length cap
    advantages: np.ndarray  # f32[B]
    is_trained: np.ndarray  # bool[B] rows that take part in the loss
    temperature: float
    max_tokens: int

    @property
    def response_lens(self) -> np.ndarray:
        """i32[B] tokens of each response."""
        return np.array([len(row) for row in self.tokens], np.int32) - self.prompt_lens


@flax.struct.dataclass(kw_only=True)
class MicroBatch:
    """One fixed shape of work: B rows of width T, the response tokens of each row compacted to its first slots."""

    tokens: Array  # i32[B,T]
    positions: Array  # i32[B,T] from 0 in each segment
    segment_ids: Array  # i32[B,T] from 1; 0 is padding
    slots: Array  # i32[B,T] position whose hidden state predicts the slot's token
    targets: Array  # i32[B,T] the slot's token
    mask: Array  # bool[B,T] slots in use
    segments: Array  # i32[B,T] which response of the row the slot belongs to, from 0
    row_index: Array  # i32[B,T] row of the TrainBatch the slot belongs to; -1 where not in use
    behaviour_logprobs: Array  # f32[B,T]
    advantages: Array  # f32[B,T]
    weights: Array  # f32[B,T]


def make_batch(completions: Sequence[Completion], sampling: SamplingParams) -> TrainBatch:
    """Rows of a rollout in the given order, without advantages yet.

    Args:
      completions: the responses to each prompt side by side.
      sampling: the law they were drawn from; temperature 0 is scored at temperature 1.
    Raises:
      ValueError: no completions, an empty prompt or response, or log-probs that do not match the tokens.
    """
    if not completions:
        raise ValueError("completions: got none, expected at least one")
    for c in completions:
        if not len(c.prompt_ids) or not len(c.token_ids) or len(c.logprobs) != len(c.token_ids):
            raise ValueError(
                f"completion {c.request_id}: got {len(c.prompt_ids)} prompt tokens, {len(c.token_ids)} response tokens "
                f"and {len(c.logprobs)} log-probs, expected at least one of each and a log-prob per response token"
            )
    return TrainBatch(
        row_ids=np.array([c.request_id for c in completions], np.int64),
        prompt_ids=np.array([c.prompt_id for c in completions], np.int64),
        tokens=tuple(np.concatenate([c.prompt_ids, c.token_ids]).astype(np.int32) for c in completions),
        prompt_lens=np.array([len(c.prompt_ids) for c in completions], np.int32),
        behaviour_logprobs=tuple(np.asarray(c.logprobs, np.float32) for c in completions),
        is_truncated=np.array([c.finish_reason == FINISH_LENGTH for c in completions], bool),
        advantages=np.zeros(len(completions), np.float32),
        is_trained=np.ones(len(completions), bool),
        temperature=sampling.temperature or 1.0,
        max_tokens=sampling.max_tokens,
    )


def assign_advantages(
    batch: TrainBatch,
    rewards: Sequence[float] | np.ndarray,
    group_size: int,
    algo: AlgorithmConfig,
    kl_sums: np.ndarray | None = None,
) -> tuple[TrainBatch, dict[str, float]]:
    """The batch with advantages and with the rows that take part, and metrics of the rewards.

    Args:
      batch: from `make_batch`.
      rewards: one per row.
      group_size: responses per prompt, side by side.
      algo: formulas and drop rules.
      kl_sums: f32[B] KL per response where `algo.kl_in` is `reward`.
    Returns:
      The new batch, and `rl/reward_mean`, `rl/reward_std` (over the batch), `rl/reward_group_std` (mean over groups),
      `rl/dropped_groups`, `rl/dropped_rows`. Reward metrics are of the task's rewards, before penalties.
    Raises:
      ValueError: a number of rewards other than of rows, or rows that do not form groups of one prompt each.
    """
    rewards_B = np.asarray(rewards, np.float32)
    num_rows = len(batch.tokens)
    if rewards_B.shape != (num_rows,):
        raise ValueError(f"rewards: got shape {rewards_B.shape}, expected ({num_rows},), one per response")
    if group_size < 1 or num_rows % group_size:
        raise ValueError(f"group_size: got {group_size} for {num_rows} responses, expected a divisor of their number")
    groups_PR = batch.prompt_ids.reshape(-1, group_size)
    if (groups_PR != groups_PR[:, :1]).any():
        raise ValueError(
            f"completions: got several prompts inside a group of {group_size}, expected the responses to each prompt "
            "side by side; sort them by prompt and sample"
        )
    rewards_PR = rewards_B.reshape(groups_PR.shape)
    kl_sums_PR = None if kl_sums is None else kl_sums.reshape(groups_PR.shape)
    lens_PR = batch.response_lens.reshape(groups_PR.shape)
    shaped_PR = shape_rewards(rewards_PR, lens_PR, batch.max_tokens, algo, kl_sums_PR)
    advantages = group_advantages(shaped_PR, algo)
    is_trained_B = np.ones(num_rows, bool)
    if algo.zero_std == "drop":
        is_trained_B &= np.repeat(~advantages.is_constant, group_size)
    if algo.overlong_filter:
        is_trained_B &= ~batch.is_truncated
    metrics = {
        "rl/reward_mean": float(rewards_PR.mean()),
        "rl/reward_std": float(rewards_PR.std()),
        "rl/reward_group_std": float(rewards_PR.std(axis=1).mean()),
        "rl/dropped_groups": float(advantages.is_constant.sum()) if algo.zero_std == "drop" else 0.0,
        "rl/dropped_rows": float(num_rows - is_trained_B.sum()),
    }
    new_batch = dataclasses.replace(batch, advantages=advantages.values.reshape(-1), is_trained=is_trained_B)
    return new_batch, metrics


def row_weights(response_lens: np.ndarray, algo: AlgorithmConfig, max_tokens: int) -> np.ndarray:
    """f32[B] weight of each token of a row, over the rows of one optimizer step; formulas in `algorithms.py`."""
    lens_B = np.asarray(response_lens, np.float64)
    num_rows = max(len(lens_B), 1)
    if algo.aggregation == "seq_mean":
        weights_B = 1.0 / (num_rows * lens_B)
    elif algo.aggregation == "token_mean":
        weights_B = np.full(len(lens_B), 1.0 / max(lens_B.sum(), 1.0))
    elif algo.aggregation == "constant":
        weights_B = np.full(len(lens_B), 1.0 / (num_rows * (algo.constant_len or max_tokens)))
    else:
        weights_B = np.full(len(lens_B), 1.0 / num_rows)
    return weights_B.astype(np.float32)


def split_minibatches(batch: TrainBatch, num_minibatches: int) -> list[np.ndarray]:
    """Indices of the rows of each optimizer step: those that take part, in order, in runs of nearly equal size."""
    parts = np.array_split(np.flatnonzero(batch.is_trained), num_minibatches)
    return [part for part in parts if len(part)]
