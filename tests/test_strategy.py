"""Names and verify widths of strategies, and the messages about them."""

import dataclasses

import numpy as np
import pytest

from tlt_jax.strategy import PLAIN, Choice, Outcome, Situation, Strategy, chain, ngram, num_candidates, parse, tree

SITUATION = Situation(live_batch=2, batch_bucket=2, kv_bucket=128)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("plain", Strategy("plain", 0, 0, 1)),
        ("ngram_7", Strategy("ngram", 7, 1, 8)),
        ("chain_3", Strategy("chain", 3, 1, 4)),
        ("8_4_48", Strategy("tree", 8, 4, 48)),
        ("8_4_8", Strategy("tree", 8, 4, 8)),
    ],
)
def test_name_and_strategy_are_each_others_inverse(name, strategy):
    assert parse(name) == strategy
    assert strategy.name == name


def test_one_beam_triple_is_a_chain():
    assert parse("8_1_9") == chain(8)
    assert parse("8_1_9").name == "chain_8"


def test_who_drafts_and_how_many_steps():
    drafters = [(s.drafter, s.draft_steps) for s in (PLAIN, ngram(7), chain(7), tree(8, 4, 48))]
    assert drafters == [("none", 0), ("ngram", 0), ("layer", 7), ("layer", 8)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fast", "got 'fast', expected 'plain', 'ngram_K', 'chain_K' or 'DEPTH_TOPK_VERIFY'"),
        ("chain_0", "got 'chain_0'"),
        ("ngram_07", "without leading zeros"),
        ("8_4", "got '8_4'"),
        ("Plain", "got 'Plain'"),
        ("8_1_48", "got verify width 48 for one beam of depth 8, expected 9; use chain_8"),
        ("2_2_8", "got verify width 8, expected 2 to 7: depth 2 with topk 2 drafts 6 nodes"),
        ("8_4_1", "got verify width 1, expected 2 to 117"),
    ],
)
def test_bad_names_say_what_is_expected(name, message):
    with pytest.raises(ValueError) as e:
        parse(name)
    assert message in str(e.value)


def test_inconsistent_fields_are_refused():
    with pytest.raises(ValueError, match=r"chain: got depth 3, topk 1, verify width 8.*use chain\(3\)"):
        Strategy("chain", 3, 1, 8)
    with pytest.raises(ValueError, match="with one beam use chain_K"):
        Strategy("tree", 3, 1, 4)
    with pytest.raises(ValueError, match="kind: got 'beam'"):
        Strategy("beam", 3, 1, 4)
    with pytest.raises(ValueError, match="use PLAIN"):
        Strategy("plain", 1, 1, 2)


def test_widest_tree_is_what_the_beams_draft():
    assert num_candidates(1, 4) == 4
    assert num_candidates(8, 4) == 4 + 7 * 16
    assert tree(8, 4, 117).verify_width == 117


def test_no_chain_or_tree_without_a_drafter():
    assert [SITUATION.allows(s) for s in (ngram(3), chain(3))] == [True, False]
    assert dataclasses.replace(SITUATION, drafter_version=0).allows(chain(3))


def test_bad_messages_are_refused():
    outcome = Outcome(situation=SITUATION, choice=Choice(PLAIN), committed=np.ones((3, 2), np.int32), elapsed_s=0.1)
    assert outcome.num_rounds == 3
    with pytest.raises(ValueError, match="got live batch 3 in batch bucket 2"):
        dataclasses.replace(SITUATION, live_batch=3)
    with pytest.raises(ValueError, match=r"expected integers \[rounds, rows\]"):
        dataclasses.replace(outcome, committed=np.ones(2))
    with pytest.raises(ValueError, match=r"outcome.elapsed_s: got 0.0"):
        dataclasses.replace(outcome, elapsed_s=0.0)
