"""Costs of executables: medians where measured, bounded predictions elsewhere."""

import json

import numpy as np
import pytest

from tlt_jax.bandit.costs import (
    CostShape,
    cell_of,
    costs_from_json,
    costs_to_json,
    init_costs,
    observe_cost,
    predict_costs,
)
from tlt_jax.strategy import PLAIN, Situation, chain, ngram, tree

SHAPE = CostShape(free_tokens=13.0, draft_step_frac=0.06)


def cell(strategy, batch=1, kv=256):
    return cell_of(strategy, Situation(live_batch=batch, batch_bucket=batch, kv_bucket=kv))


def measured(costs, strategy, *seconds, **kw):
    for s in seconds:
        costs = observe_cost(costs, cell(strategy, **kw), s)
    return costs


def estimate(costs, *strategies, **kw):
    return predict_costs(costs, [cell(s, **kw) for s in strategies], SHAPE)


def test_measured_cell_answers_with_its_running_median():
    costs = measured(init_costs(), chain(3), 0.4, 0.03, 0.032)  # the first held a warm-up
    round_s, least_s = estimate(costs, chain(3))
    assert round_s[0] == 0.032
    assert least_s[0] < 0.032
    costs = measured(costs, chain(3), *[0.04] * 31)
    assert estimate(costs, chain(3))[0][0] == 0.04
    assert len(costs.seconds[0]) == 31


def test_live_batches_of_one_bucket_share_their_executable():
    three, four = (
        cell_of(chain(3), Situation(live_batch=b, batch_bucket=4, kv_bucket=256, drafter_version=0)) for b in (3, 4)
    )
    assert three == four


def test_arms_of_equal_width_learn_from_each_other():
    """One measurement of each drafter tells the cost of all arms of V = 8, in a world of another scale than guessed."""
    plain_s, token_s, step_s = 0.1, 0.004, 0.012

    def true_s(s):
        return plain_s + token_s * s.verify_width + step_s * s.draft_steps

    costs = init_costs()
    for s in (PLAIN, ngram(7), chain(3), chain(7)):
        costs = measured(costs, s, true_s(s))
    unseen = (tree(3, 2, 8), chain(5), tree(6, 4, 16))
    assert estimate(costs, *unseen)[0] == pytest.approx([true_s(s) for s in unseen], rel=0.12)


def test_predictions_keep_the_order_of_sizes():
    costs = measured(init_costs(), chain(7), 0.050, batch=2)
    costs = measured(costs, chain(7), 0.060, batch=8)
    # Between 2 and 8 rows the cost lies between theirs, and nothing smaller costs more.
    assert 0.050 <= estimate(costs, chain(7), batch=4)[0][0] <= 0.060
    assert (estimate(costs, PLAIN, ngram(7), chain(3), chain(7), batch=1)[0] <= 0.050).all()
    assert estimate(costs, chain(15), batch=8)[0][0] >= 0.060


def test_one_slow_measurement_does_not_settle_the_matter():
    costs = measured(init_costs(), PLAIN, 0.027, 0.027, 0.027)
    costs = measured(costs, ngram(3), 0.028, 0.028, 0.028)
    costs = measured(costs, chain(3), 0.500)
    round_s, least_s = estimate(costs, chain(3))
    assert round_s[0] == 0.5
    assert 0.028 <= least_s[0] < 0.05
    round_s, _ = estimate(measured(costs, chain(7), 0.045), chain(3))
    assert round_s[0] == 0.045  # a larger executable was faster


def test_the_machines_noise_says_how_much_a_median_is_worth():
    """Few measurements on a noisy machine leave room for less, many hardly any, on a quiet machine none."""
    quiet = measured(init_costs(), chain(3), 0.03, 0.03, 0.03)
    assert estimate(quiet, chain(3))[1][0] == 0.03
    noisy = measured(init_costs(), PLAIN, *[0.024, 0.030, 0.036] * 10)
    noisy = measured(noisy, chain(3), 0.03, 0.03, 0.03)
    # Median distance 0.006 / 0.030 in 30 of 33 measurements.
    room = 1.25 * 1.48 * 0.2 * 30 / 33
    _, least_s = estimate(noisy, PLAIN, chain(3))
    assert least_s == pytest.approx([0.03 * (1 - room / 30**0.5), 0.03 * (1 - room / 3**0.5)])


def test_without_measurements_costs_are_relative_to_a_read_of_the_weights():
    round_s, least_s = estimate(init_costs(), PLAIN, ngram(7), chain(7), kv=64)
    assert round_s == pytest.approx(
        [1 + 1 / 13 + 64e-5, 1 + 8 / 13 + 64e-5 + 0.01, 1 + 8 / 13 + 64e-5 + 0.06 * 7 * (1 + 1 / 13)]
    )
    assert least_s == pytest.approx(0.8 * round_s)


def test_json_round_trip_is_exact():
    costs = measured(init_costs(), chain(3), 0.1, 1.0 / 3.0)
    costs = measured(costs, PLAIN, 2.0 / 7.0, batch=4)
    restored = costs_from_json(json.loads(json.dumps(costs_to_json(costs))))
    assert (restored.rows, restored.seconds) == (costs.rows, costs.seconds)
    assert np.array_equal(restored.medians, costs.medians)
    assert np.array_equal(restored.cells, costs.cells)
