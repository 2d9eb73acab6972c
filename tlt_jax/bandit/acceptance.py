"""How many tokens a round of each strategy commits, learnt with few rounds because strategies teach one another.

A round of depth d commits 1 + (accepted levels) tokens per row. Level i is accepted with probability p_i, given that
level i-1 was. Evidence is kept per strategy and level as (trials, hits). What strategies of one drafter have in common
is the miss rate of a single branch at each level: w branches miss with (1 - alpha_i) to the power w^0.6, w being the
mean number of nodes per level. So a chain that fails tells every tree that it would fail too, and a strategy never
played has an expectation. A strategy's own evidence overrules the common part as it grows.

Evidence fades with the rounds of its drafter, faster than it fades while the drafter rests, and is cut to a few trials
when weights change: then the old rates are the first guess and quickly overruled.

Rounds cut short by a stop token or a cap count as they are: a strategy that drafts past the end of responses does
deliver less.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tlt_jax.strategy import LAYER_DRAFTER, NGRAM_DRAFTER, Strategy

# Four shared-noise branches miss about as often as 2.3-2.5 independent single ones would all miss.
_BRANCH_POWER = 0.6
_FIRST_GUESS = {LAYER_DRAFTER: 0.6, NGRAM_DRAFTER: 0.4}  # acceptance of one branch before anything is known
_LEVEL_TRIALS = 4.0  # weight of the level above as a guess of the next
_ARM_TRIALS = 16.0  # most weight of the common part against a strategy's own evidence
_ODDS_TRIALS = 16.0  # levels reached that count for the usual acceptance, where it is shifted to what was shown
_REST_RATIO = 32.0  # how much slower evidence fades while its drafter rests


class Evidence(NamedTuple):
    """Per strategy (in the table's order) and level."""

    trials: np.ndarray  # f64[A, levels], rows and rounds in which the level was reached
    hits: np.ndarray  # f64[A, levels], of those, accepted


# By drafter: levels reached, of those accepted, and how many the estimate had expected.
OddsCounts = dict[str, tuple[float, float, float]]


class Arms(NamedTuple):
    """What the estimate needs to know of the strategies; fixed for a table."""

    strategies: tuple[Strategy, ...]
    index: dict[Strategy, int]
    power: np.ndarray  # f64[A], branches per level to the power of 0.6
    in_depth: np.ndarray  # bool[A, levels]
    of_drafter: dict[str, np.ndarray]  # bool[A]


class AcceptEstimate(NamedTuple):
    rate: np.ndarray  # f64[A, levels], acceptance of a level given the one before; 0 beyond the depth
    trials: np.ndarray  # f64[A, levels], what the rate is worth


def describe_arms(strategies: tuple[Strategy, ...]) -> Arms:
    depth = np.asarray([s.depth for s in strategies])
    width = np.asarray([(s.verify_width - 1) / max(s.depth, 1) for s in strategies])
    drafters = {d: np.asarray([s.drafter == d for s in strategies]) for d in (LAYER_DRAFTER, NGRAM_DRAFTER)}
    return Arms(
        strategies=strategies,
        index={s: i for i, s in enumerate(strategies)},
        power=np.maximum(width, 1e-9) ** _BRANCH_POWER,
        in_depth=np.arange(max(int(depth.max()), 1))[None] < depth[:, None],
        of_drafter=drafters,
    )


def init_evidence(arms: Arms) -> Evidence:
    return Evidence(np.zeros(arms.in_depth.shape), np.zeros(arms.in_depth.shape))


def observe_accepted(
    evidence: Evidence, arms: Arms, strategy: Strategy, committed: np.ndarray, memory_rounds: float
) -> Evidence:
    """Fades old evidence by these rounds and adds what they showed.

    Args:
      evidence: so far.
      arms: of the table.
      strategy: that was played.
      committed: i32[rounds, rows] as in `Outcome`.
      memory_rounds: half life of evidence in rounds of its drafter.
    """
    num_rounds = committed.shape[0]
    keep = np.full(len(arms.strategies), 0.5 ** (num_rounds / (_REST_RATIO * memory_rounds)))
    if strategy.depth == 0:
        return Evidence(evidence.trials * keep[:, None], evidence.hits * keep[:, None])
    keep[arms.of_drafter[strategy.drafter]] = 0.5 ** (num_rounds / memory_rounds)
    trials, hits = evidence.trials * keep[:, None], evidence.hits * keep[:, None]
    reached, accepted = count_levels(committed, strategy.depth)
    row = arms.index[strategy]
    trials[row, : strategy.depth] += reached
    hits[row, : strategy.depth] += accepted
    return Evidence(trials, hits)


def count_levels(committed: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each level was reached and accepted, i64[depth] each, over all rounds of live rows."""
    accepted = np.clip(committed[committed > 0] - 1, 0, depth)
    at_least = np.bincount(accepted, minlength=depth + 1)[::-1].cumsum()[::-1]
    return at_least[:depth], at_least[1 : depth + 1]


def forget_weights(evidence: Evidence, rows: np.ndarray, max_trials: float) -> Evidence:
    """Cuts the evidence of some strategies to `max_trials` per level, its rates unchanged.

    Args:
      evidence: so far.
      rows: bool[A], strategies whose weights changed.
      max_trials: of the first level; deeper levels shrink alike.
    """
    first = np.maximum(evidence.trials[:, :1], 1e-12)
    keep = np.where(rows[:, None], np.minimum(1.0, max_trials / first), 1.0)
    return Evidence(evidence.trials * keep, evidence.hits * keep)


def estimate_accepted(evidence: Evidence, arms: Arms) -> AcceptEstimate:
    """Acceptance per strategy and level, with the doubt about it."""
    shape = evidence.trials.shape
    prior, prior_trials = np.zeros(shape), np.ones(shape)
    own = np.minimum((evidence.hits + 0.5) / (evidence.trials + 1.0), 1.0 - 1e-6)
    branch = 1.0 - (1.0 - own) ** (1.0 / arms.power[:, None])
    for drafter, rows in arms.of_drafter.items():
        if not rows.any():
            continue
        weight = evidence.trials[rows]
        total, pooled = weight.sum(0), (weight * branch[rows]).sum(0)
        alpha, guess = [], _FIRST_GUESS[drafter]
        for num_trials, num_hits in zip(total.tolist(), pooled.tolist(), strict=True):
            guess = (_LEVEL_TRIALS * guess + num_hits) / (_LEVEL_TRIALS + num_trials)
            alpha.append(guess)
        prior[rows] = 1.0 - (1.0 - np.asarray(alpha)) ** arms.power[rows, None]
        prior_trials[rows] = np.minimum(_ARM_TRIALS, _LEVEL_TRIALS + total)
    num_trials = prior_trials + evidence.trials
    rate = np.where(arms.in_depth, (prior_trials * prior + evidence.hits) / num_trials, 0.0)
    return AcceptEstimate(rate, num_trials)


def add_odds(
    odds: OddsCounts, arms: Arms, rate: np.ndarray, strategy: Strategy, committed: np.ndarray, memory_rounds: float
) -> OddsCounts:
    """Adds what rows showed and what `rate` f64[A, levels] had expected of them; arguments as in `observe_accepted`."""
    reached, accepted = count_levels(committed, strategy.depth)
    if strategy.depth == 0 or reached[0] == 0:
        return odds
    usual = rate[arms.index[strategy], : strategy.depth]
    new = (float(reached.sum()), float(accepted.sum()), float((reached * usual).sum()))
    keep = 0.5 ** (committed.shape[0] / memory_rounds)
    old = odds.get(strategy.drafter, (0.0, 0.0, 0.0))
    return {**odds, strategy.drafter: (keep * old[0] + new[0], keep * old[1] + new[1], keep * old[2] + new[2])}


def shift_odds(rate: np.ndarray, arms: Arms, odds: OddsCounts) -> np.ndarray:
    """Acceptance f64[A, levels] shifted in log-odds, by one number per drafter, to what was shown."""
    rate = np.where(arms.in_depth, np.clip(rate, 1e-6, 1.0 - 1e-6), 0.0)
    shifted = rate.copy()
    for drafter, (trials, hits, expected) in odds.items():
        rows = arms.of_drafter[drafter]
        usual = np.clip(expected / trials, 1e-6, 1.0 - 1e-6)
        shown = np.clip((_ODDS_TRIALS * usual + hits) / (_ODDS_TRIALS + trials), 1e-6, 1.0 - 1e-6)
        factor = shown * (1.0 - usual) / ((1.0 - shown) * usual)
        shifted[rows] = factor * rate[rows] / (1.0 - rate[rows] + factor * rate[rows])
    return shifted


def expected_len(rate: np.ndarray) -> np.ndarray:
    """Tokens committed per row and round, f64[A], for acceptance f64[A, levels]."""
    return 1.0 + np.cumprod(rate, axis=1).sum(1)


def sd_len(estimate: AcceptEstimate) -> np.ndarray:
    """Standard deviation of `expected_len`, f64[A], to first order and with levels taken as independent."""
    rate = estimate.rate
    sd = np.sqrt(rate * (1.0 - rate) / (estimate.trials + 1.0))
    reach = np.cumprod(rate, axis=1)
    tail = reach[:, ::-1].cumsum(1)[:, ::-1]  # tokens that a level and those beyond it bring
    return np.sqrt((tail / np.maximum(rate, 1e-9) * sd) ** 2 @ np.ones(rate.shape[1]))
