"""Settings and the reward."""

import dataclasses

import numpy as np
import pytest

from tlt_jax.bandit.policy import BanditConfig, reward_tokens_per_s
from tlt_jax.strategy import Choice, Outcome, Situation, chain

SITUATION = Situation(live_batch=2, batch_bucket=2, kv_bucket=128)


def outcome(committed, elapsed_s, **kw):
    return Outcome(
        situation=SITUATION, choice=Choice(chain(3)), committed=np.asarray(committed), elapsed_s=elapsed_s, **kw
    )


def test_reward_is_mean_committed_times_batch_over_seconds_of_a_round():
    # Two rounds of 0.25 s, mean (2 + 3 + 1 + 0) / 4 = 1.5 tokens: 1.5 * 2 / 0.25.
    assert reward_tokens_per_s(outcome([[2, 3], [1, 0]], 0.5), BanditConfig()) == pytest.approx(12.0)


def test_straggler_counts_in_the_tail_alone():
    config = BanditConfig(reward="straggler", straggler_weight=0.5, tail_batch=2)
    o = outcome([[1, 4], [1, 4]], 0.5, straggler_row=0)
    assert reward_tokens_per_s(o, config) == pytest.approx((0.5 * 2.5 + 0.5 * 1.0) * 2 / 0.25)
    assert reward_tokens_per_s(o, dataclasses.replace(config, tail_batch=1)) == pytest.approx(20.0)
    assert reward_tokens_per_s(o, dataclasses.replace(config, reward="tokens")) == pytest.approx(20.0)


def test_auto_arms_follow_the_platform():
    assert BanditConfig().table("cpu").max_verify_width == 16
    assert BanditConfig().table("gpu").max_verify_width == 64
    assert BanditConfig(arms="1: plain, ngram_3").table("gpu").max_verify_width == 4


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("policy", "ucb", "bandit.policy: got 'ucb', expected 'model' or 'beg_mab'"),
        ("epsilon", 1.5, r"bandit.epsilon: got 1.5, expected in \[0, 1\]"),
        ("window", 0, "bandit.window: got 0, expected >= 1"),
        ("explore_frac", 1.0, "bandit.explore_frac: got 1.0"),
        ("probe_rounds", 0, "bandit.probe_rounds: got 0"),
        ("reward", "latency", "bandit.reward: got 'latency', expected 'tokens' or 'straggler'"),
        ("arms", "1: chain_0", "arms from live batch 1: strategy: got 'chain_0'"),
    ],
)
def test_bad_settings_name_the_field(field, value, message):
    with pytest.raises(ValueError, match=message):
        BanditConfig(**{field: value})
