"""BEG-MAB as the paper has it."""

import json

import numpy as np
import pytest

from tlt_jax.bandit.beg_mab import make_beg_mab, uniform
from tlt_jax.bandit.policy import BanditConfig
from tlt_jax.bandit.strategies import parse_arms
from tlt_jax.strategy import Choice, Outcome, Situation, parse

ARMS = "1: plain, chain_3, 8_4_8; 5: plain, chain_3"


def situation(live_batch, drafter_version=0):
    return Situation(live_batch=live_batch, batch_bucket=64, kv_bucket=128, drafter_version=drafter_version)


def make(arms=ARMS, **kw):
    return make_beg_mab(BanditConfig(policy="beg_mab", **kw), parse_arms(arms))


def reward(policy, state, live_batch, name, tokens_per_s):
    """Reports one round of one row that gives this reward."""
    committed = np.ones((1, live_batch), np.int32)
    return policy.update(
        state,
        Outcome(
            situation=situation(live_batch),
            choice=Choice(parse(name)),
            committed=committed,
            elapsed_s=live_batch / tokens_per_s,
        ),
    )


def best(policy, state, live_batch=1, **kw):
    return policy.select(state, situation(live_batch, **kw))[0].strategy.name


def test_a_bucket_of_one_arm_returns_it_without_a_draw():
    policy = make("paper", epsilon=1.0)
    state = policy.init()
    for live_batch, name in ((1, "8_4_48"), (4, "8_4_32"), (20, "8_4_16"), (64, "8_4_8")):
        choice, state = policy.select(state, situation(live_batch))
        assert (choice.strategy.name, choice.max_rounds, state.num_choices) == (name, None, 0)


def test_live_batch_outside_all_buckets_is_an_error():
    policy = make("2: plain, chain_3")
    with pytest.raises(ValueError, match="live batch: got 1, expected at least 2"):
        policy.select(policy.init(), situation(1))


def test_unplayed_arms_come_first_in_order_then_the_best_median():
    policy = make(epsilon=0.0)
    state = policy.init()
    order = []
    for tokens_per_s in (50.0, 90.0, 70.0):
        order.append(best(policy, state))
        state = reward(policy, state, 1, order[-1], tokens_per_s)
    assert order == ["plain", "chain_3", "8_4_8"]
    assert best(policy, state) == "chain_3"


def test_ties_go_to_the_first_arm():
    policy = make(epsilon=0.0)
    state = policy.init()
    for name in ("8_4_8", "chain_3", "plain"):
        state = reward(policy, state, 1, name, 80.0)
    assert best(policy, state) == "plain"


def test_median_of_the_window_not_mean_and_not_history():
    policy = make("1: plain, chain_3", epsilon=0.0, window=4)
    state = policy.init()
    for tokens_per_s in (10.0, 10.0, 1000.0):  # median 10, mean 340
        state = reward(policy, state, 1, "chain_3", tokens_per_s)
    state = reward(policy, state, 1, "plain", 50.0)
    assert best(policy, state) == "plain"
    for _ in range(2):  # the window is now 10, 1000, 60, 60: median 60
        state = reward(policy, state, 1, "chain_3", 60.0)
    assert state.windows[0][1].rewards == pytest.approx((10.0, 1000.0, 60.0, 60.0))
    assert state.windows[0][1].median == pytest.approx(60.0)
    assert best(policy, state) == "chain_3"


def test_buckets_learn_apart():
    policy = make(epsilon=0.0)
    state = policy.init()
    for live_batch, plain, chained in ((1, 50.0, 90.0), (8, 90.0, 50.0)):
        state = reward(policy, state, live_batch, "plain", plain)
        state = reward(policy, state, live_batch, "chain_3", chained)
    state = reward(policy, state, 1, "8_4_8", 10.0)
    assert [best(policy, state, b) for b in (1, 4, 5, 64)] == ["chain_3", "chain_3", "plain", "plain"]


def test_epsilon_of_the_choices_are_uniform_over_the_bucket():
    policy = make(epsilon=0.3)
    state = policy.init()
    for name, tokens_per_s in (("plain", 50.0), ("chain_3", 90.0), ("8_4_8", 70.0)):
        state = reward(policy, state, 1, name, tokens_per_s)
    names = []
    for _ in range(3000):
        choice, state = policy.select(state, situation(1))
        names.append(choice.strategy.name)
    fracs = [names.count(n) / 3000 for n in ("plain", "chain_3", "8_4_8")]
    assert fracs == pytest.approx([0.1, 0.8, 0.1], abs=0.02)  # 3 sigma is 0.017
    assert state.num_choices == 3000


def test_draws_are_the_same_everywhere():
    assert [uniform(0, 0, 0), uniform(7, 123, 1)] == [0.13870941014555427, 0.8809906353781962]
    draws = np.asarray([uniform(3, n, 0) for n in range(4000)])
    assert abs(draws.mean() - 0.5) < 0.014  # 3 sigma
    assert (draws.min() >= 0.0, draws.max() < 1.0) == (True, True)


def test_saved_in_the_middle_goes_on_the_same():
    policy = make(epsilon=0.5, seed=4)

    def run(state, rounds):
        names = []
        for n in rounds:
            choice, state = policy.select(state, situation(1 + n % 9))
            names.append(choice.strategy.name)
            state = reward(policy, state, 1 + n % 9, names[-1], 50.0 + (37 * n) % 41)
        return names, state

    whole, end = run(policy.init(), range(40))
    first, middle = run(policy.init(), range(17))
    restored = policy.from_json(json.loads(json.dumps(policy.to_json(middle))))
    assert restored == middle
    second, restored_end = run(restored, range(17, 40))
    assert first + second == whole
    assert restored_end == end
    assert len(set(whole)) == 3


def test_saved_state_of_other_arms_keeps_what_fits():
    policy = make(epsilon=0.0)
    state = reward(policy, policy.init(), 1, "chain_3", 90.0)
    other = make("1: plain, chain_3, chain_7", epsilon=0.0)
    restored = other.from_json(policy.to_json(state))
    assert [w.rewards for w in restored.windows[0]] == [(), (pytest.approx(90.0),), ()]
    with pytest.raises(ValueError, match="got one saved by policy 'model', expected 'beg_mab'"):
        policy.from_json({"policy": "model"})


def test_faster_token_wins_over_higher_acceptance_rate():
    """A39: k = 2 commits 2.6 in 10 ms, k = 8 commits 4.0 in 12 ms: 3.8 against 3.0 ms per token."""
    policy = make("1: chain_2, chain_8", epsilon=0.0)
    state = policy.init()
    for name, committed, elapsed_s in (("chain_2", [3, 3, 3, 2, 2], 0.05), ("chain_8", [4] * 5, 0.06)):
        o = Outcome(
            situation=situation(1),
            choice=Choice(parse(name)),
            committed=np.asarray(committed)[:, None],
            elapsed_s=elapsed_s,
        )
        state = policy.update(state, o)
    assert [1e3 / w.median for w in state.windows[0]] == pytest.approx([3.846, 3.0], abs=1e-3)
    assert best(policy, state) == "chain_8"


def test_without_a_drafter_only_the_arms_that_need_none():
    policy = make("1: plain, ngram_3, chain_3", epsilon=1.0)
    state, names = policy.init(), set()
    for _ in range(50):
        choice, state = policy.select(state, situation(1, drafter_version=None))
        names.add(choice.strategy.name)
    assert names == {"plain", "ngram_3"}
    policy = make("paper")
    state = policy.init()
    assert best(policy, state, drafter_version=None) == "plain"
    assert reward(policy, state, 1, "plain", 50.0) == state


def test_outcome_of_a_strange_arm_is_refused():
    policy = make()
    with pytest.raises(ValueError, match=r"got 8_4_8, expected one of its arms \['plain', 'chain_3'\]"):
        reward(policy, policy.init(), 8, "8_4_8", 50.0)
