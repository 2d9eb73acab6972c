"""An engine with drafters generates what an engine without them does, whatever it plays, and keeps its books."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from benchmarks import lossless
from tests.rollout import drafters, tiny
from tlt_jax.models.transformer import forward
from tlt_jax.rollout.ngram import NgramConfig
from tlt_jax.sharding import Versioned

LAYER = ("chain_1", "chain_3", "2_2_4")
SAMPLING = ({"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0})


def requests(num=6, max_tokens=24, **sampling):
    lengths = (1, 7, 12, 30, 5, 18)
    return [
        tiny.request(
            i,
            tiny.prompt(i, lengths[i % 6]),
            prompt_id=i,
            **({"max_tokens": max_tokens - 2 * (i % 4)} | SAMPLING[i % 4] | sampling),
        )
        for i in range(num)
    ]


@functools.cache
def plain(num=6):
    return tiny.make_engine().generate(requests(num))


def make(*names, max_rounds=None, drafter=None, weights=None, trace_sink=None, **config):
    parts = {
        "drafter": drafter or drafters.eagle_model(),
        "bandit": drafters.playing(*names, max_rounds=max_rounds),
        "ngram": NgramConfig(min_n=1),
        "trace_sink": trace_sink,
    }
    # Few shapes, since each compiles: two rows, so that rows still move and the batch still shrinks, and one capacity.
    engine = tiny.make_engine(parts=parts, **({"max_live": 2, "min_kv": 128} | config))
    engine.load_drafter(weights or drafters.eagle_weights())
    return engine


def same_as_plain(completions, num=6):
    tiny.check(completions, requests(num))
    assert tiny.tokens_of(completions) == tiny.tokens_of(plain(num))


@pytest.mark.parametrize(
    "names", [("ngram_1", "ngram_3"), pytest.param(("plain", *LAYER, "ngram_3"), marks=pytest.mark.slow)], ids="-".join
)
def test_every_strategy_in_turn_gives_the_plain_tokens(names):
    """A1, A2, A5, A6, A10, A11, A12, A26, A28, A29, A31: rows move and are refilled."""
    engine = make(*names, max_rounds=2)
    completions = engine.generate(requests())
    same_as_plain(completions)
    assert set(engine.stats.arm_rounds) == set(names)
    assert sum(engine.stats.arm_rounds.values()) == engine.stats.rounds
    assert sum(engine.stats.arm_row_rounds.values()) == sum(c.rounds for c in completions)
    assert sum(engine.stats.arm_tokens.values()) == engine.stats.tokens


def oracle_engine(*names, max_rounds=None, **config):
    asked = requests(4, max_tokens=76, ignore_eos=True, temperature=1.0, top_p=1.0)[1:4]
    answers = tiny.make_engine(max_len=100).generate(asked)
    model = drafters.oracle(answers)
    engine = make(
        *names, max_rounds=max_rounds, drafter=model, weights=Versioned({}, 1), max_live=4, max_len=100, **config
    )
    return engine, asked, answers


def test_an_oracle_never_loses_a_token():
    """A23, A24, A25: an oracle's chain is accepted whole, round after round, to the end of every response."""
    engine, asked, answers = oracle_engine("chain_1")
    got = engine.generate(asked)
    assert tiny.tokens_of(got) == tiny.tokens_of(answers)
    for c in got:
        assert c.rounds == -(-len(c.token_ids) // 2)  # two tokens a round
        assert c.accept_len == pytest.approx(2.0, rel=0.04)
    assert engine.stats.arm_rounds == {"chain_1": 37}


@pytest.mark.slow
@pytest.mark.parametrize("other", ["plain", "ngram_3"])
def test_an_oracle_is_right_at_once_after_other_strategies(other):
    """A23: five rounds of something else leave the drafter's cache current without a prefill."""
    engine, asked, answers = oracle_engine(*[other] * 5, "chain_3", max_rounds=1)
    prefilled = sum(len(r.prompt_ids) - 1 for r in asked)
    assert tiny.tokens_of(engine.generate(asked)) == tiny.tokens_of(answers)
    assert engine.stats.prefill_tokens == prefilled
    outcomes = engine._rounds._state["outcomes"]
    chains = [o for o in outcomes if o.choice.strategy.name == "chain_3" and o.situation.live_batch == 3][:-1]
    assert len(chains) >= 4
    for o in chains:  # of four rows, three alive and none near its end
        assert sorted(o.committed[0].tolist()) == [0, 4, 4, 4]


@pytest.mark.slow
def test_a_drafter_is_swapped_in_the_middle_of_a_rollout():
    """A29: and taken away, and given back; every response stays the same, and the new drafter's cache is its own."""
    engine = make("chain_3", "plain", max_rounds=1)
    engine.submit(requests())
    done, swaps = [], [drafters.eagle_weights(6), None, drafters.eagle_weights(7)]
    while engine.has_work:
        done += engine.step()
        if engine.stats.dispatches % 4 == 3 and swaps:
            engine.load_drafter(swaps.pop(0))
    assert not swaps
    same_as_plain(sorted(done, key=lambda c: c.request_id))
    engine, asked, answers = oracle_engine("chain_3", max_rounds=1)
    engine.submit(asked)
    done = []
    while engine.has_work:
        done += engine.step()
        engine.load_drafter(Versioned({}, engine.stats.dispatches))
    assert tiny.tokens_of(done) == tiny.tokens_of(answers)
    assert all(c.accept_len > 3.4 for c in done)


def test_without_weights_for_the_drafter_only_the_others_are_played():
    engine = make("chain_3", "ngram_3")
    engine.load_drafter(None)
    same_as_plain(engine.generate(requests()))
    assert set(engine.stats.arm_rounds) == {"ngram_3"}
    assert engine.stats.ingested == 0
    with pytest.raises(ValueError, match=r"engine\.load_drafter: got weights, expected an engine .* with a drafter"):
        tiny.make_engine().load_drafter(drafters.eagle_weights())


def test_new_target_weights_put_the_old_drafter_away():
    engine = make("chain_3")
    engine.load(Versioned(tiny.tiny_params(), 2))
    engine.generate(requests(2))
    assert set(engine.stats.arm_rounds) == {"plain"}


@pytest.mark.slow
def test_rows_that_end_at_the_end_of_the_cache():
    """A19, A38: every cap up to the longest response, a switch from narrow to wide in the last slots."""
    for max_len in (63, 64):
        asked = [
            tiny.request(i, tiny.prompt(i, 20), prompt_id=i, max_tokens=max_len - 20 - i, ignore_eos=True)
            for i in range(4)
        ]
        right = tiny.make_engine(max_len=max_len).generate(asked)
        engine = make("chain_1", "2_2_4", "plain", "ngram_3", max_rounds=1, max_len=max_len)
        got = engine.generate(asked)
        assert tiny.tokens_of(got) == tiny.tokens_of(right)
        assert [len(c.token_ids) for c in got] == [max_len - 20 - i for i in range(4)]


@pytest.mark.slow
def test_traces_are_the_targets_features():
    """One trace per response, of every token but the last, equal to one full forward up to bf16."""
    traces = []
    engine = make("plain", "chain_3", "2_2_4", "ngram_3", max_rounds=1, trace_sink=traces.append)
    engine.begin(step=7, trace=True)
    engine.submit(requests())
    done = {}
    while engine.has_work:
        done |= {c.request_id: c for c in engine.step()}
    assert sorted(t.request_id for t in traces) == sorted(done)
    for t in traces:
        c = done[t.request_id]
        assert t.token_ids.tolist() == [*c.prompt_ids, *c.token_ids]
        assert (t.prompt_len, t.step, t.policy_version, t.start) == (len(c.prompt_ids), 7, 1, 0)
        assert t.features.dtype == jnp.bfloat16 and len(t.features) == len(t.token_ids) - 1 and t.hidden is None
        positions = np.arange(len(t.token_ids))[None]
        right = forward(tiny.tiny_params(), tiny.MODEL, t.token_ids[None], positions).hidden[0, :-1]
        np.testing.assert_allclose(t.features.astype(np.float32), right, rtol=2e-2, atol=2e-2)
    engine.begin()
    engine.submit(requests(2))
    while engine.has_work:
        engine.step()
    assert len(traces) == 6


@pytest.mark.slow
def test_counts_of_drafts():
    """The parts of a completion add up: tokens = rounds + accepted, and accepted <= drafted."""
    engine, asked, _ = oracle_engine("chain_3", "plain", max_rounds=1)
    done = engine.generate(asked)
    for c in done:
        # The cap may cut a round behind an accepted draft, never in front of one.
        assert len(c.token_ids) == c.rounds + c.accepted
        assert 0 < c.accepted <= c.drafted
    assert engine.stats.drafted == sum(c.drafted for c in done)
    assert engine.stats.accepted == sum(c.accepted for c in done)


@pytest.mark.slow
def test_nothing_compiles_after_the_warm_up():
    """Every strategy at every batch, drafter catch-up and traces included."""
    engine = make(
        "plain", "chain_3", "2_2_4", "ngram_3", max_rounds=1, trace_sink=[].append, fresh_pool=True, max_live=2
    )
    engine.warm_up(truncate=True)
    engine.load_drafter(drafters.eagle_weights(6))
    compiled = engine.pool.stats.num_compiled
    engine.begin(trace=True)
    engine.submit(requests())
    while engine.has_work:
        engine.step()
    assert engine.pool.stats.num_compiled == compiled
    assert len(engine.pool) == compiled
    widths = {key[3] for key in engine.pool._programs if key[0] == "verify"}
    assert widths == {4}  # chain_3, 2_2_4 and ngram_3 share their verification


@pytest.mark.slow
def test_the_bandit_goes_on_where_it_was():
    engine = make("plain", "chain_3", max_rounds=1)
    engine.generate(requests(2))
    saved = engine.save_bandit()
    assert saved == {"calls": engine.stats.dispatches}
    other = make("plain", "chain_3", max_rounds=1)
    other.restore_bandit(saved)
    assert other.save_bandit() == saved
    assert tiny.make_engine().save_bandit() is None


NAMES = ("plain", "ngram_1", "ngram_3", *LAYER)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_schedule_gives_the_same_tokens(data):
    """Random strategies, call lengths, caps, stop ids and orders against the plain engine."""
    asked = [
        dataclasses.replace(
            r,
            sampling=dataclasses.replace(
                r.sampling,
                max_tokens=data.draw(st.integers(1, 40), label="cap"),
                stop_token_ids=tuple(data.draw(st.lists(st.integers(4, 89), max_size=3, unique=True), label="stops")),
            ),
        )
        for r in requests()
    ]
    names = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5), label="names")
    max_rounds = data.draw(st.sampled_from([1, 2, 3]), label="max_rounds")
    order = data.draw(st.permutations(range(len(asked))), label="order")
    engine = make(*names, max_rounds=max_rounds)
    got = engine.generate([asked[i] for i in order])
    right = tiny.make_engine().generate(asked)
    assert tiny.tokens_of(got) == tiny.tokens_of(right)
    by_id = {c.request_id: c for c in got}
    for c in right:
        assert by_id[c.request_id].finish_reason == c.finish_reason
        np.testing.assert_allclose(by_id[c.request_id].logprobs, c.logprobs, atol=1e-4)


@pytest.mark.slow
def test_twenty_thousand_tokens():
    """The tiny model at temperatures 0, 0.6 and 1, a new strategy with every call: every difference is a near-tie, and
    there is less than one in 10,000 tokens."""
    asked = [
        tiny.request(
            i,
            tiny.prompt(i // 4, 3 + i % 29),
            prompt_id=i,
            max_tokens=62,
            temperature=(0.0, 0.6, 1.0)[i % 3],
            ignore_eos=True,
        )
        for i in range(330)
    ]
    right = tiny.make_engine(max_live=4, min_kv=128).generate(asked)
    engine = make("plain", *LAYER, "ngram_3", "ngram_1", max_rounds=1)
    got = engine.generate(asked)
    num_tokens = sum(len(c.token_ids) for c in right)
    assert num_tokens > 20_000
    assert len(engine.stats.arm_rounds) == 6
    differences = lossless.compare(right, got, asked, tiny.MODEL, tiny.tiny_params(), tiny.SEED)
    assert all(d.gap < lossless.NEAR_TIE for d in differences)
    assert len(differences) <= num_tokens // 10_000
    # The check itself sees a difference that is none of rounding.
    wrong = dataclasses.replace(got[0], token_ids=np.asarray([5, *got[0].token_ids[1:]], np.int32))
    (found,) = lossless.compare(right[:1], [wrong], asked[:1], tiny.MODEL, tiny.tiny_params(), tiny.SEED)
    assert found.position == 0 and found.gap > 0.01
