"""From rewards to advantages, on the host.

Life of a batch of P prompts with R responses each: `shape_rewards` takes the soft length penalty and the KL off the
rewards; `group_advantages` compares each response with its group. Groups without signal are found by comparing the
rewards themselves, never by dividing by a tiny deviation: eight f32 rewards of 0.1 have a standard deviation of 7.5e-9,
and dividing by it makes noise the size of a signal. Inputs are small, so sums are in f64 and results in f32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tlt_jax.rl.algorithms import AlgorithmConfig

_CONSTANT_TOLERANCE = 1e-6  # rewards closer than this, relative to max(1, |reward|), are equal


class Advantages(NamedTuple):
    """Advantages of a batch, and which groups carry no signal."""

    values: np.ndarray  # f32[P,R]
    is_constant: np.ndarray  # bool[P]: all rewards of the group equal


def find_constant_groups(rewards_PR: np.ndarray) -> np.ndarray:
    """bool[P]: groups whose rewards are all equal up to rounding; a group of one response is constant."""
    rewards_PR = _check_rewards(rewards_PR)
    range_P = rewards_PR.max(axis=1) - rewards_PR.min(axis=1)
    return range_P <= _CONSTANT_TOLERANCE * np.maximum(1.0, np.abs(rewards_PR).max(axis=1))


def shape_rewards(
    rewards_PR: np.ndarray,
    response_lens_PR: np.ndarray,
    max_tokens: int,
    algo: AlgorithmConfig,
    kl_sums_PR: np.ndarray | None = None,
) -> np.ndarray:
    """Rewards less the soft length penalty and less the KL where `algo` puts it in the reward.

    Args:
      rewards_PR: f32[P,R] task rewards.
      response_lens_PR: i32[P,R] tokens, stop token included.
      max_tokens: the length cap of the rollout.
      algo: `overlong_*` and `kl_*` fields.
      kl_sums_PR: f32[P,R] KL estimates summed over the response's tokens; needed where kl_in is `reward`.
    Returns:
      f32[P,R].
    References:
      DAPO, arXiv 2503.14476, eq. 13: 0 up to max_tokens - buffer, then linear to -overlong_penalty at the cap.
    """
    shaped_PR = _check_rewards(rewards_PR)
    if algo.overlong_buffer > 0.0:
        buffer_tokens = algo.overlong_buffer * max_tokens
        over_PR = (np.asarray(response_lens_PR, np.float64) - (max_tokens - buffer_tokens)) / buffer_tokens
        shaped_PR = shaped_PR - algo.overlong_penalty * np.clip(over_PR, 0.0, 1.0)
    if algo.needs_reference and algo.kl_in == "reward":
        if kl_sums_PR is None:
            raise ValueError("kl_sums_PR: got None, expected f32[P,R] since algorithm.kl_in is 'reward'")
        shaped_PR = shaped_PR - algo.kl_coef * np.asarray(kl_sums_PR, np.float64)
    return shaped_PR.astype(np.float32)


def group_advantages(rewards_PR: np.ndarray, algo: AlgorithmConfig) -> Advantages:
    """Advantage of each response over its group or batch.

    Standard deviations have ddof 0 and no epsilon: a group that is not constant has a deviation to divide by. Constant
    groups get exactly 0 in every group-relative mode, groups of one response included. `batch_norm` has no group
    baseline, so there only a batch of equal rewards gives 0.

    Args:
      rewards_PR: f32[P,R], one row per prompt.
      algo: its `advantage` names the formula.
    Raises:
      ValueError: rewards not [P,R], empty, or not finite.
    """
    rewards_PR = _check_rewards(rewards_PR)
    is_constant_P = find_constant_groups(rewards_PR)
    if algo.advantage == "batch_norm":
        values_PR = _normalise(rewards_PR - rewards_PR.mean(), rewards_PR)
        return Advantages(values_PR.astype(np.float32), is_constant_P)
    centred_PR = rewards_PR - rewards_PR.mean(axis=1, keepdims=True)
    centred_PR = np.where(is_constant_P[:, None], 0.0, centred_PR)
    if algo.advantage == "group_norm":
        std_P1 = np.where(is_constant_P, 1.0, rewards_PR.std(axis=1))[:, None]
        centred_PR = centred_PR / std_P1
    elif algo.advantage == "rloo":
        # r_i - mean of the others = R / (R - 1) (r_i - mean of all)
        num_responses = rewards_PR.shape[1]
        centred_PR = centred_PR * (num_responses / max(num_responses - 1, 1))
    elif algo.advantage == "group_mean_batch_norm":
        centred_PR = _normalise(centred_PR, centred_PR)
    return Advantages(centred_PR.astype(np.float32), is_constant_P)


def _normalise(centred_PR: np.ndarray, samples_PR: np.ndarray) -> np.ndarray:
    """`centred_PR` over the deviation of `samples_PR` in the whole batch; 0 where the batch is constant."""
    if find_constant_groups(samples_PR.reshape(1, -1))[0]:
        return np.zeros_like(centred_PR)
    return centred_PR / samples_PR.std()


def _check_rewards(rewards_PR: np.ndarray) -> np.ndarray:
    rewards_PR = np.asarray(rewards_PR, np.float64)
    if rewards_PR.ndim != 2 or rewards_PR.size == 0:
        raise ValueError(f"rewards: got shape {rewards_PR.shape}, expected [prompts, responses per prompt]")
    if not np.isfinite(rewards_PR).all():
        row, column = np.argwhere(~np.isfinite(rewards_PR))[0]
        raise ValueError(
            f"rewards: got {rewards_PR[row, column]} for prompt {row}, response {column}, expected finite numbers; "
            "check the reward function"
        )
    return rewards_PR
