"""Values of each advantage formula, constant groups, and reward shaping."""

import numpy as np
import pytest

from tlt_jax.rl.advantages import find_constant_groups, group_advantages, shape_rewards
from tlt_jax.rl.algorithms import AlgorithmConfig, preset


def _values(rewards, advantage):
    return group_advantages(np.asarray(rewards, np.float32), AlgorithmConfig(advantage=advantage)).values


def test_group_norm_is_per_prompt():
    """B16: normalised over the prompt's group with ddof 0, not over the batch."""
    np.testing.assert_array_equal(_values([[1, 0], [1, 1]], "group_norm"), [[1, -1], [0, 0]])


@pytest.mark.parametrize("advantage", ["group_norm", "group_mean", "rloo", "batch_norm", "group_mean_batch_norm"])
@pytest.mark.parametrize("rewards", [[[0.1] * 8], [[3.7]], [[-5.0, -5.0 - 1e-7]], [[1e4] * 3]])
def test_constant_groups_have_advantage_exactly_zero(advantage, rewards):
    """B17: equal rewards and groups of one give 0, not noise over a tiny deviation and not NaN."""
    advantages = group_advantages(np.asarray(rewards, np.float32), AlgorithmConfig(advantage=advantage))
    assert not advantages.values.any()
    assert advantages.values.dtype == np.float32
    assert advantages.is_constant.tolist() == [True]


def test_small_but_real_differences_are_a_signal():
    """B17: the tolerance does not swallow rewards that differ."""
    np.testing.assert_allclose(_values([[0.1, 0.1001]], "group_norm"), [[-1, 1]], rtol=1e-6)


def test_formulas_by_value():
    rewards = [[1, 0, 0, 0], [1, 1, 0, 0]]
    np.testing.assert_allclose(_values(rewards, "group_norm")[0], np.array([3, -1, -1, -1]) / np.sqrt(3), rtol=1e-6)
    np.testing.assert_allclose(_values(rewards, "group_mean"), [[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5]])
    np.testing.assert_allclose(_values(rewards, "rloo")[0], [1, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)
    std = np.std(rewards)
    np.testing.assert_allclose(_values(rewards, "batch_norm")[1], (np.array([1, 1, 0, 0]) - 0.375) / std, rtol=1e-6)


def test_group_mean_batch_norm_divides_by_the_batch_deviation():
    values = _values([[1, 0], [3, 1]], "group_mean_batch_norm")
    np.testing.assert_allclose(values, np.array([[0.5, -0.5], [1, -1]]) / np.sqrt(0.625), rtol=1e-6)


def test_constant_groups_are_found():
    np.testing.assert_array_equal(find_constant_groups(np.array([[1, 1], [0, 1], [0, 1e-9]])), [True, False, True])


@pytest.mark.parametrize("rewards", [np.zeros(3), np.zeros((0, 4)), np.array([[0.0, np.nan]])])
def test_bad_rewards_are_refused(rewards):
    with pytest.raises(ValueError, match="rewards: got"):
        group_advantages(rewards, preset("grpo"))


def test_soft_overlong_penalty_is_linear_up_to_the_cap():
    lengths = np.array([[10, 80, 90, 100]])
    shaped = shape_rewards(np.ones((1, 4)), lengths, max_tokens=100, algo=preset("dapo"))
    np.testing.assert_allclose(shaped, [[1.0, 1.0, 0.5, 0.0]], rtol=1e-6)


def test_kl_in_the_reward():
    algo = preset("rloo", kl_coef=0.5)
    shaped = shape_rewards(np.ones((1, 2)), np.ones((1, 2)), 8, algo, kl_sums_PR=np.array([[0.2, -0.4]]))
    np.testing.assert_allclose(shaped, [[0.9, 1.2]], rtol=1e-6)
    with pytest.raises(ValueError, match="kl_sums_PR"):
        shape_rewards(np.ones((1, 2)), np.ones((1, 2)), 8, algo)
