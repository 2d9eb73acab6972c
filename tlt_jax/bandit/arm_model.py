"""A strategy policy that models what it chooses between: seconds of a round, and tokens that a round commits.

BEG-MAB learns one number per (bucket, arm) and has to play an arm to learn it. But the number is a quotient of two
things that arms share: the cost of an executable does not depend on the drafter's quality, and acceptance does not
depend on the batch. Learnt apart (`costs`, `acceptance`), a few rounds of any arm inform all others, in every bucket.

1. `select` ranks the bucket's arms by expected seconds per committed token and takes the best.
2. If another arm could be better, at the optimistic end of what is known, it is probed for a few rounds instead, but
   only while the seconds lost to probes stay under `explore_frac` of all seconds. A probe is charged its pessimistic
   loss at once and settled when its outcome is known.
3. `update` adds the cost to the executable's cell and the acceptance to the drafter's evidence.
4. When weights change (policy or drafter version) the evidence is cut to a few trials: an arm that was hopeless gets
   its chance soon.
5. In the tail, with reward "straggler", acceptance is shifted (in log-odds, one number per drafter) to what the
   straggler itself shows, for the given share of the score.

`plain` costs least of all executables and commits one token; when no arm beats it, it is simply the best arm.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from tlt_jax.bandit import acceptance, costs
from tlt_jax.bandit.policy import BanditConfig, check_saved_by
from tlt_jax.bandit.strategies import ArmTable
from tlt_jax.strategy import (
    LAYER_DRAFTER,
    NGRAM_DRAFTER,
    PLAIN,
    Choice,
    JsonDict,
    Outcome,
    Policy,
    Situation,
    Strategy,
)

NAME = "model"
_KNOWN_TRIALS = 32.0  # first-level trials after which an arm is played without asking again soon


class Straggler(NamedTuple):
    """What one request's own rows showed."""

    request_id: int | None
    odds: acceptance.OddsCounts


class ArmModelState(NamedTuple):
    costs: costs.Costs
    evidence: acceptance.Evidence
    straggler: Straggler
    versions: tuple[int, int | None] | None  # policy, drafter; None before the first round
    played_s: float  # seconds of all outcomes
    probe_s: float  # of those, lost to probes; and what running probes were charged


class Fixed(NamedTuple):
    """What does not change over a run."""

    config: BanditConfig
    table: ArmTable
    arms: acceptance.Arms
    shape: costs.CostShape


class Ranking(NamedTuple):
    """The allowed arms of one situation; all arrays f64[arms]."""

    round_s: np.ndarray
    token_s: np.ndarray  # expected seconds per committed token and row
    best_token_s: np.ndarray  # the optimistic end
    worst_len: np.ndarray  # tokens per round, the pessimistic end


def make_arm_model(config: BanditConfig, table: ArmTable, platform: str) -> Policy:
    """The policy over `table`."""
    # About 13 f32 tokens on two CPU cores, and the ridge of current accelerators in bf16.
    free_tokens = config.free_tokens or (13.0 if platform == "cpu" else 300.0)
    shape = costs.CostShape(free_tokens, config.draft_step_frac)
    fixed = Fixed(config, table, acceptance.describe_arms(table.strategies), shape)
    return Policy(
        arms=table.at,
        init=functools.partial(_init, fixed),
        select=functools.partial(_select, fixed),
        update=functools.partial(_update, fixed),
        to_json=functools.partial(_to_json, fixed),
        from_json=functools.partial(_from_json, fixed),
    )


def probe_frac(state: ArmModelState) -> float:
    """Share of the seconds played that probes lost."""
    return state.probe_s / max(state.played_s, 1e-12)


def _init(fixed: Fixed) -> ArmModelState:
    return ArmModelState(costs.init_costs(), acceptance.init_evidence(fixed.arms), Straggler(None, {}), None, 0.0, 0.0)


def _select(fixed: Fixed, state: ArmModelState, situation: Situation) -> tuple[Choice, ArmModelState]:
    config, table, arms, _ = fixed
    state = _follow_versions(fixed, state, situation)
    allowed = tuple(s for s in table.arms[table.bucket(situation.live_batch)] if situation.allows(s)) or (PLAIN,)
    if len(allowed) == 1:
        return Choice(allowed[0]), state
    ranking = _rank(fixed, state, situation, allowed)
    best = int(ranking.token_s.argmin())
    token_s = float(ranking.token_s[best])
    # What each arm may lose against the best in a probe, at the pessimistic end.
    charged_s = config.probe_rounds * np.maximum(ranking.round_s - token_s * ranking.worst_len, 0.0)
    affordable = state.probe_s + charged_s <= config.explore_frac * state.played_s
    promising = np.where(affordable, ranking.best_token_s, np.inf)
    promising[best] = token_s
    other = int(promising.argmin())
    if promising[other] < token_s:
        choice = Choice(allowed[other], config.probe_rounds, True, float(charged_s[other]), token_s)
        return choice, state._replace(probe_s=state.probe_s + choice.charged_s)
    is_known = allowed[best] == PLAIN or state.evidence.trials[arms.index[allowed[best]], 0] >= _KNOWN_TRIALS
    return Choice(allowed[best], None if is_known else config.probe_rounds), state


def _rank(fixed: Fixed, state: ArmModelState, situation: Situation, allowed: tuple[Strategy, ...]) -> Ranking:
    config, _, arms, shape = fixed
    estimate = acceptance.estimate_accepted(state.evidence, arms)
    rows = [arms.index[s] for s in allowed]
    mean = acceptance.expected_len(estimate.rate)
    share = config.straggler_share(situation.live_batch)
    if share > 0.0 and situation.straggler_id is not None and situation.straggler_id == state.straggler.request_id:
        own_rate = acceptance.shift_odds(estimate.rate, arms, state.straggler.odds)
        mean = (1.0 - share) * mean + share * acceptance.expected_len(own_rate)
    mean, sd = mean[rows], config.optimism * acceptance.sd_len(estimate)[rows]
    round_s, least_s = costs.predict_costs(state.costs, [costs.cell_of(s, situation) for s in allowed], shape)
    return Ranking(
        round_s=round_s,
        token_s=round_s / mean,
        best_token_s=least_s / (mean + sd),
        worst_len=np.maximum(mean - sd, 1.0),
    )


def _update(fixed: Fixed, state: ArmModelState, outcome: Outcome) -> ArmModelState:
    arms = fixed.arms
    choice, situation = outcome.choice, outcome.situation
    round_s = outcome.elapsed_s / outcome.num_rounds
    state = state._replace(costs=costs.observe_cost(state.costs, costs.cell_of(choice.strategy, situation), round_s))
    if outcome.committed.shape[1] == 0:
        return state
    if choice.strategy not in arms.index and choice.strategy != PLAIN:
        raise ValueError(
            f"outcome: got strategy {choice.strategy.name}, expected one of {[s.name for s in arms.strategies]}; "
            "report the choice that select returned"
        )
    state = _follow_versions(fixed, state, situation)
    state = _settle(state, outcome)
    return _learn_acceptance(fixed, state, outcome)


def _learn_acceptance(fixed: Fixed, state: ArmModelState, outcome: Outcome) -> ArmModelState:
    arms, memory_rounds = fixed.arms, fixed.config.memory_rounds
    strategy, committed, request_id = outcome.choice.strategy, outcome.committed, outcome.situation.straggler_id
    straggler = state.straggler if request_id == state.straggler.request_id else Straggler(request_id, {})
    if request_id is not None and outcome.straggler_row is not None:
        own = committed[:, outcome.straggler_row : outcome.straggler_row + 1]
        usual = acceptance.estimate_accepted(state.evidence, arms).rate
        odds = acceptance.add_odds(straggler.odds, arms, usual, strategy, own, memory_rounds)
        straggler = Straggler(request_id, odds)
    evidence = acceptance.observe_accepted(state.evidence, arms, strategy, committed, memory_rounds)
    return state._replace(evidence=evidence, straggler=straggler)


def _settle(state: ArmModelState, outcome: Outcome) -> ArmModelState:
    """Books the seconds; a probe's charge becomes what it really lost against the best arm."""
    choice, lost_s = outcome.choice, 0.0
    if choice.is_probe:
        per_row = float(outcome.committed.sum()) / outcome.situation.live_batch
        lost_s = max(outcome.elapsed_s - choice.token_s * per_row, 0.0)
    return state._replace(
        played_s=state.played_s + outcome.elapsed_s, probe_s=max(state.probe_s - choice.charged_s + lost_s, 0.0)
    )


def _follow_versions(fixed: Fixed, state: ArmModelState, situation: Situation) -> ArmModelState:
    """Cuts the evidence of a drafter whose weights, or whose target's, changed."""
    arms, max_trials = fixed.arms, fixed.config.version_trials
    versions = (situation.policy_version, situation.drafter_version)
    if versions == state.versions:
        return state
    if state.versions is None:
        return state._replace(versions=versions)
    rows = arms.of_drafter[LAYER_DRAFTER]
    if versions[0] != state.versions[0]:
        rows = rows | arms.of_drafter[NGRAM_DRAFTER]
    return state._replace(versions=versions, evidence=acceptance.forget_weights(state.evidence, rows, max_trials))


def _to_json(fixed: Fixed, state: ArmModelState) -> JsonDict:
    evidence = {
        s.name: {"trials": state.evidence.trials[i].tolist(), "hits": state.evidence.hits[i].tolist()}
        for i, s in enumerate(fixed.arms.strategies)
    }
    return {
        "policy": NAME,
        "costs": costs.costs_to_json(state.costs),
        "evidence": evidence,
        "straggler": {"request_id": state.straggler.request_id, "odds": state.straggler.odds},
        "versions": state.versions,
        "played_s": state.played_s,
        "probe_s": state.probe_s,
    }


def _from_json(fixed: Fixed, saved: JsonDict) -> ArmModelState:
    """Evidence of strategies that the table no longer has is dropped, new ones start with the common part."""
    arms = fixed.arms
    check_saved_by(NAME, saved)
    evidence = acceptance.init_evidence(arms)
    for i, s in enumerate(arms.strategies):
        row = saved["evidence"].get(s.name, {"trials": [], "hits": []})
        evidence.trials[i, : s.depth] = (row["trials"] + [0.0] * s.depth)[: s.depth]
        evidence.hits[i, : s.depth] = (row["hits"] + [0.0] * s.depth)[: s.depth]
    odds = {d: (float(n), float(hits), float(usual)) for d, (n, hits, usual) in saved["straggler"]["odds"].items()}
    return ArmModelState(
        costs=costs.costs_from_json(saved["costs"]),
        evidence=evidence,
        straggler=Straggler(saved["straggler"]["request_id"], odds),
        versions=None if saved["versions"] is None else tuple(saved["versions"]),
        played_s=float(saved["played_s"]),
        probe_s=float(saved["probe_s"]),
    )
