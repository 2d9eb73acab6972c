"""Rows, groups, drop rules and token weights."""

import dataclasses

import numpy as np
import pytest

from tests.rl import tiny
from tlt_jax.rl.algorithms import AlgorithmConfig, preset
from tlt_jax.rl.batch import PackConfig, assign_advantages, make_batch, row_weights, split_minibatches
from tlt_jax.types import SamplingParams

SAMPLING = SamplingParams(max_tokens=11)


def test_sampled_ids_reach_the_batch_untouched():
    """B13, B20: rows are prompt and sampled ids; a truncated row keeps its last token and its flag."""
    rows = tiny.completions(max_len=4, seed=3)
    batch = make_batch(rows, SAMPLING)
    for tokens, c in zip(batch.tokens, rows, strict=True):
        assert tokens.tolist() == [*c.prompt_ids, *c.token_ids]
        assert tokens[-1] == c.token_ids[-1]
    assert batch.is_truncated.tolist() == [len(c.token_ids) == 4 for c in rows]
    assert batch.is_truncated.any() and not batch.is_truncated.all()
    assert batch.response_lens.tolist() == [len(c.token_ids) for c in rows]


def test_temperature_zero_is_scored_at_one():
    """B1: the law at temperature 0 is recorded, and recomputed, at temperature 1."""
    assert make_batch(tiny.completions(), SamplingParams(temperature=0.0)).temperature == 1.0
    assert make_batch(tiny.completions(), SamplingParams(temperature=0.6)).temperature == 0.6


def test_rows_keep_their_ids_and_advantages():
    """B23: advantage i belongs to row i."""
    batch = tiny.batch(preset("grpo"), rewards=[0, 1, 1, 0, 5, 5])
    np.testing.assert_allclose(batch.advantages, [-1, 1, 1, -1, 0, 0])
    assert batch.row_ids.tolist() == [0, 1, 100, 101, 200, 201]
    assert batch.is_trained.all()


def test_zero_std_groups_are_dropped_on_request():
    """B18: with the filter on, rows without signal leave the loss and its denominator."""
    rewards = [0, 1, 1, 0, 5, 5]
    batch = make_batch(tiny.completions(), SAMPLING)
    batch, metrics = assign_advantages(batch, rewards, 2, AlgorithmConfig(zero_std="drop"))
    assert batch.is_trained.tolist() == [True] * 4 + [False] * 2
    assert (metrics["rl/dropped_groups"], metrics["rl/dropped_rows"]) == (1.0, 2.0)
    assert [part.tolist() for part in split_minibatches(batch, 2)] == [[0, 1], [2, 3]]


def test_reward_metrics_tell_batch_from_group_deviation():
    """B17: the deviation over the batch and the mean deviation inside groups are two metrics."""
    _, metrics = assign_advantages(make_batch(tiny.completions(), SAMPLING), [0, 0, 1, 1, 2, 2], 2, preset("grpo"))
    np.testing.assert_allclose(metrics["rl/reward_mean"], 1.0)
    np.testing.assert_allclose(metrics["rl/reward_std"], np.std([0, 0, 1, 1, 2, 2]), rtol=1e-6)
    assert metrics["rl/reward_group_std"] == 0.0


def test_overlong_rows_leave_the_loss_but_not_their_group():
    rows = tiny.completions()
    rows[0] = dataclasses.replace(rows[0], finish_reason="length")
    batch, _ = assign_advantages(
        make_batch(rows, SAMPLING), [0, 1, 0, 1, 0, 1], 2, AlgorithmConfig(overlong_filter=True)
    )
    assert batch.is_trained.tolist() == [c.finish_reason == "stop" for c in rows]
    assert batch.advantages[:2].tolist() == [-1.0, 1.0]


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("seq_mean", 2.0), ("token_mean", 1.0), ("constant", 0.5), ("seq_sum", 2.0)]
)
def test_aggregation_by_value(aggregation, expected):
    """B7: rows of length 1 with loss 4 and length 3 with loss 0: each name has one formula."""
    weights = row_weights(np.array([1, 3]), AlgorithmConfig(aggregation=aggregation), max_tokens=4)
    loss = weights[0] * 4.0 + 3 * weights[1] * 0.0
    np.testing.assert_allclose(loss, expected)


def test_constant_divisor_may_be_given():
    """B7: `constant_len` overrides the rollout's cap."""
    weights = row_weights(np.array([1, 3]), AlgorithmConfig(aggregation="constant", constant_len=2), max_tokens=4)
    np.testing.assert_allclose(weights, [0.25, 0.25])


def test_denominators_are_of_the_optimizer_step():
    """B5: 8 rows of loss 1 in 4 optimizer steps of 2 rows: loss 1 in each."""
    batch = tiny.batch(preset("grpo"), prompt_lens=(3, 4, 5, 6))
    parts = split_minibatches(batch, 4)
    assert [len(part) for part in parts] == [2, 2, 2, 2]
    for aggregation in ("seq_mean", "token_mean"):
        for part in parts:
            lens = batch.response_lens[part]
            weights = row_weights(lens, AlgorithmConfig(aggregation=aggregation), max_tokens=11)
            np.testing.assert_allclose((weights * lens).sum(), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("rewards", "group_size", "match"),
    [
        ([0.0] * 5, 2, r"rewards: got shape \(5,\), expected \(6,\)"),
        ([0.0] * 6, 4, "group_size: got 4 for 6 responses, expected a divisor"),
        ([0.0] * 6, 3, "several prompts inside a group of 3"),
    ],
)
def test_bad_groups_are_refused(rewards, group_size, match):
    with pytest.raises(ValueError, match=match):
        assign_advantages(make_batch(tiny.completions(), SAMPLING), rewards, group_size, preset("grpo"))


def test_bad_completions_are_named():
    rows = tiny.completions()
    rows[2] = dataclasses.replace(rows[2], logprobs=rows[2].logprobs[:-1])
    with pytest.raises(ValueError, match="completion 100: got 9 prompt tokens"):
        make_batch(rows, SAMPLING)
    with pytest.raises(ValueError, match="completions: got none"):
        make_batch([], SAMPLING)


def test_pack_config_is_checked():
    with pytest.raises(ValueError, match=r"pack.min_width: got 48, expected a power of two"):
        PackConfig(min_width=48)
    assert PackConfig(micro_batch_tokens=4096).num_rows(256, 1) == 16
    assert PackConfig(micro_batch_tokens=100).num_rows(256, 8) == 8
