"""The arm model: ranking, probes and their account, new weights, stragglers, saving."""

import dataclasses
import json

import numpy as np
import pytest

from tests.bandit.simulator import World, play, steady
from tlt_jax.bandit.arm_model import make_arm_model, probe_frac
from tlt_jax.bandit.policy import BanditConfig
from tlt_jax.bandit.strategies import parse_arms
from tlt_jax.strategy import Choice, Outcome, Situation, parse

TAIL = [(b, 400.0) for b in (32, 16, 8, 4, 2, 1)]


def make(arms="cpu", **kw):
    table = parse_arms(arms)
    return make_arm_model(BanditConfig(**kw), table, "cpu"), table


def situation(live_batch=1, **kw):
    return Situation(
        **{"live_batch": live_batch, "batch_bucket": live_batch, "kv_bucket": 256, "drafter_version": 0, **kw}
    )


def report(policy, state, name, committed, elapsed_s, **kw):
    committed = np.asarray(committed)
    where = kw.pop("where", situation(committed.shape[1] or 1))
    return policy.update(
        state,
        Outcome(situation=where, choice=Choice(parse(name)), committed=committed, elapsed_s=elapsed_s, **kw),
    )


def test_faster_token_wins_over_higher_acceptance_rate():
    """A39: k = 2 commits 2.6 in 10 ms, k = 8 commits 4.0 in 12 ms: 3.8 against 3.0 ms per token."""
    policy, _ = make("1: chain_2, chain_8")
    state = policy.init()
    for _ in range(20):
        state = report(policy, state, "chain_2", [[3], [3], [3], [2], [2]], 0.05)
        state = report(policy, state, "chain_8", [[4]] * 5, 0.06)
    names = set()
    for _ in range(10):
        choice, state = policy.select(state, situation())
        names.add((choice.strategy.name, choice.is_probe))
    assert names == {("chain_8", False)}


def test_select_and_update_leave_the_state_alone():
    policy, _ = make()
    state = report(policy, policy.init(), "chain_3", [[2], [1]], 0.06)
    before = json.dumps(policy.to_json(state))
    first = policy.select(state, situation())[0]
    report(policy, state, "chain_3", [[4], [4]], 0.06)
    assert json.dumps(policy.to_json(state)) == before
    assert policy.select(state, situation())[0] == first


def test_hopeless_drafter_is_dropped_within_a_few_rounds():
    """F11: nothing is ever accepted; at live batch 8 the second choice is plain already."""
    policy, table = make(explore_frac=0.0)
    rng, world, state = np.random.default_rng(0), World(steady(0.0, 0.0)), policy.init()
    names = []
    for _ in range(60):
        choice, state = policy.select(state, situation(8))
        committed, elapsed_s = world.sample(choice.strategy, 8, 0.0, 4, rng)
        names.append(choice.strategy.name)
        state = policy.update(
            state, Outcome(situation=situation(8), choice=choice, committed=committed, elapsed_s=elapsed_s)
        )
    assert sum(n != "plain" for n in names) <= 2
    assert set(names[3:]) == {"plain"}
    assert parse(names[0]) in table.arms[table.bucket(8)]


def test_hopeless_drafter_over_a_rollout():
    """F11: under 3 % of rounds speculate, under 3 % of plain decoding's time is lost, probes under 2 %."""
    policy, table = make()
    for seed in range(3):
        played, state = play(
            policy, policy.init(), World(steady(0.0, 0.0)), table, TAIL, rng=np.random.default_rng(seed)
        )
        assert sum(played.rounds.values()) > 2000
        assert played.spec_frac < 0.03
        assert played.seconds < 1.03 * played.plain_s
        assert probe_frac(state) < 0.02


def test_a_drafter_that_became_good_is_used_again():
    policy, table = make()
    rng = np.random.default_rng(0)
    _, state = play(policy, policy.init(), World(steady(0.0, 0.0)), table, TAIL, rng=rng)
    played, _ = play(policy, state, World(steady(0.8, 0.0)), table, TAIL, rng=rng, versions=(1, 1))
    assert played.regret_frac < 0.06
    tail, _ = play(policy, state, World(steady(0.8, 0.0)), table, TAIL[3:], rng=rng, versions=(1, 1))
    assert tail.spec_frac > 0.9


def test_new_weights_cut_what_was_learnt_of_their_drafter():
    policy, table = make("1: plain, ngram_3, chain_3")
    state = policy.init()
    for name in ("ngram_3", "chain_3"):
        state = report(policy, state, name, np.full((50, 1), 4), 1.0)
    layer, copies = table.strategies.index(parse("chain_3")), table.strategies.index(parse("ngram_3"))
    _, after = policy.select(state, situation(drafter_version=1))
    assert after.evidence.trials[layer, 0] == pytest.approx(12.0)
    assert after.evidence.trials[copies, 0] > 40.0
    _, after = policy.select(state, situation(policy_version=1))
    assert after.evidence.trials[:, 0] == pytest.approx([0.0, 12.0, 12.0])


def test_probes_are_charged_at_once_and_settled_later():
    """Several choices may be under way: what they might cost never exceeds the allowance."""
    policy, _ = make("1: plain, chain_7", explore_frac=0.02)
    state = policy.init()
    for _ in range(200):  # 27 s of plain decoding, so that probes may lose 0.54 s
        state = report(policy, state, "plain", np.ones((5, 1), int), 5 * 0.027)
    for _ in range(3):
        state = report(policy, state, "chain_7", np.zeros((4, 0), int), 4 * 0.070)
    charged = []
    for _ in range(20):
        choice, state = policy.select(state, situation())
        charged += [choice] if choice.is_probe else []
    assert 1 <= len(charged) < 20
    assert (charged[0].strategy.name, charged[0].max_rounds) == ("chain_7", 4)
    assert state.probe_s == pytest.approx(sum(c.charged_s for c in charged))
    assert 0.01 < probe_frac(state) <= 0.02
    # Three tokens a round in 70 ms beat plain's 81 ms: nothing lost.
    outcome = Outcome(situation=situation(), choice=charged[0], committed=np.full((4, 1), 3), elapsed_s=4 * 0.070)
    assert policy.update(state, outcome).probe_s == pytest.approx(state.probe_s - charged[0].charged_s)
    # One token a round lost 43 ms each.
    outcome = dataclasses.replace(outcome, committed=np.ones((4, 1), int))
    lost_s = policy.update(state, outcome).probe_s - (state.probe_s - charged[0].charged_s)
    assert lost_s == pytest.approx(4 * 0.043)


def test_little_known_arms_are_asked_about_again_soon():
    policy, _ = make("1: plain, chain_3")
    choice, state = policy.select(policy.init(), situation())
    assert (choice.strategy.name, choice.max_rounds) == ("chain_3", 4)
    for _ in range(20):
        state = report(policy, state, "chain_3", np.full((4, 1), 4), 0.12)
    choice, _ = policy.select(state, situation())
    assert (choice.strategy.name, choice.max_rounds) == ("chain_3", None)


def test_warm_up_teaches_costs_alone():
    policy, _ = make("1: plain, chain_3")
    state = policy.init()
    for name, elapsed_s in (("plain", 0.3), ("chain_3", 3.0)):
        for _ in range(3):
            state = report(policy, state, name, np.zeros((10, 0), int), elapsed_s)
    assert (state.played_s, state.evidence.trials.sum()) == (0.0, 0.0)
    assert policy.select(state, situation())[0].strategy.name == "plain"  # 30 against 300 ms, before any token


def test_the_straggler_decides_in_the_tail_where_it_is_asked_to():
    """Three rows accept everything, the straggler nothing: drafting helps the batch, not the end of the rollout."""
    arms = "1: plain, chain_3"
    committed = np.full((8, 4), 4)
    committed[:, 2] = 1

    def choose(**kw):
        policy, _ = make(arms, explore_frac=0.0, **kw)
        where = situation(4, straggler_id=17)
        state = policy.init()
        for _ in range(12):
            state = report(policy, state, "plain", np.ones((8, 4), int), 8 * 0.04, where=where, straggler_row=2)
            state = report(policy, state, "chain_3", committed, 8 * 0.07, where=where, straggler_row=2)
        names = [policy.select(state, situation(4, straggler_id=i))[0].strategy.name for i in (17, 18)]
        return names

    assert choose() == ["chain_3", "chain_3"]
    # Another straggler has shown nothing yet, so the batch speaks for it.
    assert choose(reward="straggler", straggler_weight=1.0) == ["plain", "chain_3"]
    assert choose(reward="straggler", straggler_weight=1.0, tail_batch=3) == ["chain_3", "chain_3"]


def test_without_a_drafter_only_the_arms_that_need_none():
    policy, table = make()
    played, _ = play(
        policy,
        policy.init(),
        World(steady(0.9, 0.6)),
        table,
        TAIL[2:],
        rng=np.random.default_rng(0),
        versions=(0, None),
    )
    assert {parse(name).kind for name in played.rounds} == {"plain", "ngram"}
    policy, _ = make("paper")
    choice, state = policy.select(policy.init(), situation(drafter_version=None))
    assert choice.strategy.name == "plain"
    assert report(policy, state, "plain", [[1]], 0.03).played_s == pytest.approx(0.03)


def test_saved_in_the_middle_goes_on_the_same():
    policy, table = make()
    world = World(steady(0.6, 0.3))
    _, middle = play(policy, policy.init(), world, table, TAIL[:3], rng=np.random.default_rng(1))
    restored = policy.from_json(json.loads(json.dumps(policy.to_json(middle))))
    ends = [play(policy, s, world, table, TAIL[3:], rng=np.random.default_rng(2)) for s in (middle, restored)]
    assert ends[0][0] == ends[1][0]
    assert policy.to_json(ends[0][1]) == policy.to_json(ends[1][1])


def test_saved_state_of_other_arms_keeps_what_fits():
    policy, _ = make("1: plain, chain_3")
    state = report(policy, policy.init(), "chain_3", [[3], [2]], 0.06)
    other, _ = make("1: plain, chain_7, chain_3")
    restored = other.from_json(policy.to_json(state))
    assert restored.evidence.trials[2, :3].tolist() == [2.0, 2.0, 1.0]
    assert restored.evidence.trials[1].sum() == 0.0
    with pytest.raises(ValueError, match="got one saved by policy 'beg_mab', expected 'model'"):
        policy.from_json({"policy": "beg_mab"})


def test_outcome_of_a_strange_arm_is_refused():
    policy, _ = make("1: plain, chain_3")
    with pytest.raises(ValueError, match=r"got strategy chain_7, expected one of \['plain', 'chain_3'\]"):
        report(policy, policy.init(), "chain_7", [[1]], 0.03)
