"""Acceptance per level: counts, what arms teach one another, forgetting."""

import numpy as np
import pytest

from tlt_jax.bandit.acceptance import (
    add_odds,
    count_levels,
    describe_arms,
    estimate_accepted,
    expected_len,
    forget_weights,
    init_evidence,
    observe_accepted,
    sd_len,
    shift_odds,
)
from tlt_jax.strategy import PLAIN, chain, ngram, parse

STRATEGIES = (PLAIN, ngram(3), chain(3), chain(7), parse("8_4_32"))
ARMS = describe_arms(STRATEGIES)


def played(strategy, committed, evidence=None, memory_rounds=1e9):
    return observe_accepted(
        init_evidence(ARMS) if evidence is None else evidence, ARMS, strategy, np.asarray(committed), memory_rounds
    )


def lengths(evidence):
    return dict(zip(STRATEGIES, expected_len(estimate_accepted(evidence, ARMS).rate), strict=True))


def test_levels_are_counted_over_live_rows():
    # Accepted 0, 1, 3, 3; the 0 is a row that was not alive.
    reached, accepted = count_levels(np.asarray([[1, 2, 0], [4, 4, 0]]), 3)
    assert (reached.tolist(), accepted.tolist()) == ([4, 3, 2], [3, 2, 2])


def test_expected_length_is_one_plus_the_reached_levels():
    assert expected_len(np.asarray([[0.5, 0.5], [0.0, 0.9]])) == pytest.approx([1.75, 1.0])


def test_many_rounds_give_the_mean_committed_tokens():
    committed = 1 + np.minimum(np.random.default_rng(0).geometric(0.3, (400, 8)) - 1, 3)
    assert lengths(played(chain(3), committed))[chain(3)] == pytest.approx(committed.mean(), rel=0.005)


def test_plain_commits_one_whatever_happens():
    length = lengths(played(chain(7), np.full((9, 4), 8)))[PLAIN]
    assert length == 1.0


def test_a_failing_chain_tells_the_tree():
    before, after = lengths(init_evidence(ARMS)), lengths(played(chain(3), np.ones((16, 4), int)))
    assert before[parse("8_4_32")] > 4.0
    assert after[parse("8_4_32")] < 1.25
    assert after[chain(7)] < 1.1
    assert after[ngram(3)] == before[ngram(3)]  # another drafter


def test_own_evidence_overrules_the_common_part():
    evidence = played(chain(3), np.ones((50, 4), int))
    evidence = played(parse("8_4_32"), np.full((50, 4), 9), evidence)
    after = lengths(evidence)
    assert after[parse("8_4_32")] > 7.5
    assert after[chain(3)] < 1.2


def test_doubt_shrinks_with_evidence():
    few, many = (estimate_accepted(played(chain(3), np.tile([1, 2, 3, 4], (n, 1))), ARMS) for n in (2, 200))
    doubt = [sd_len(e)[2] for e in (few, many)]
    assert doubt[1] < 0.2 * doubt[0]
    assert sd_len(few)[0] == 0.0


def test_evidence_halves_after_its_memory_and_slower_at_rest():
    evidence = played(chain(3), np.full((10, 4), 4), memory_rounds=100.0)
    evidence = played(chain(7), np.ones((100, 1), int), evidence, memory_rounds=100.0)
    assert evidence.trials[2, 0] == pytest.approx(20.0)
    evidence = played(PLAIN, np.ones((3200, 1), int), evidence, memory_rounds=100.0)
    assert evidence.trials[2, 0] == pytest.approx(10.0)


def test_new_weights_keep_the_rates_but_few_trials():
    evidence = played(chain(3), np.tile([1, 4], (50, 1)))
    evidence = played(ngram(3), np.tile([1, 4], (50, 1)), evidence)
    cut = forget_weights(evidence, ARMS.of_drafter["layer"], 12.0)
    assert (cut.trials[2, 0], cut.hits[2, 0]) == (12.0, 6.0)
    assert np.array_equal(cut.trials[1], evidence.trials[1])
    assert np.array_equal(cut.trials[3], np.zeros(8))


def test_odds_move_all_arms_of_a_drafter_towards_one_row():
    rate = estimate_accepted(played(chain(3), np.tile([1, 4], (200, 1))), ARMS).rate
    odds = add_odds({}, ARMS, rate, chain(3), np.ones((64, 1), int), 1e9)
    assert odds["layer"] == pytest.approx((64.0, 0.0, 64 * rate[2, 0]))
    shifted = shift_odds(rate, ARMS, odds)
    assert expected_len(shifted)[2] < 1.35 < 2.4 < expected_len(rate)[2]
    assert expected_len(shifted)[4] < expected_len(rate)[4]
    assert np.allclose(shifted[1], rate[1], atol=1e-6)
    assert add_odds({}, ARMS, rate, chain(3), np.zeros((4, 1), int), 1e9) == {}  # a row that was not alive
