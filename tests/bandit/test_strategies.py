"""Tables of arms, and the buckets that live batches fall into."""

import pytest

from tlt_jax.bandit.strategies import CPU_ARMS, GPU_ARMS, ArmTable, group_by_verify_width, parse_arms
from tlt_jax.strategy import PLAIN, parse


def test_paper_table_gives_larger_batches_smaller_trees():
    table = parse_arms("paper")
    assert table.thresholds == (1, 2, 5, 21)
    names = {b: [s.name for s in table.arms[table.bucket(b)]] for b in (1, 2, 4, 5, 20, 21, 500)}
    assert names == {
        1: ["8_4_48"],
        2: ["8_4_32"],
        4: ["8_4_32"],
        5: ["8_4_16"],
        20: ["8_4_16"],
        21: ["8_4_8"],
        500: ["8_4_8"],
    }


def test_live_batch_below_the_first_threshold_is_an_error():
    table = parse_arms("4: plain, ngram_3; 9: plain")
    assert [table.bucket(b) for b in (4, 8, 9)] == [0, 0, 1]
    with pytest.raises(ValueError, match="live batch: got 3, expected at least 4"):
        table.bucket(3)


def test_grouping_by_width_wants_one_threshold_per_width():
    strategies = [parse(n) for n in ("8_4_8", "4_4_8", "8_4_32")]
    table = group_by_verify_width(strategies, (1, 5))
    assert table.text == "1: 8_4_32; 5: 8_4_8, 4_4_8"
    with pytest.raises(ValueError, match=r"got 3 thresholds \[1, 2, 5\] for the verify widths \[32, 8\]"):
        group_by_verify_width(strategies, (1, 2, 5))


@pytest.mark.parametrize("text", [CPU_ARMS, GPU_ARMS])
def test_default_arms_always_offer_plain_and_ngram(text):
    table = parse_arms(text)
    widest = []
    for arms in table.arms:
        assert arms[0] == PLAIN
        assert sum(s.kind == "ngram" for s in arms) >= 1
        widest.append(max(s.verify_width for s in arms))
    assert widest == sorted(widest, reverse=True)
    assert len({len(arms) for arms in table.arms}) > 1  # several arms per bucket
    assert parse_arms(table.text) == table


def test_cpu_arms_verify_up_to_sixteen_tokens_per_forward():
    table = parse_arms("cpu")
    tokens = {b: sorted({b * s.verify_width for s in table.arms[table.bucket(b)] if s != PLAIN}) for b in (1, 2, 4, 8)}
    assert tokens == {1: [4, 8, 16], 2: [4, 8, 16], 4: [8, 16], 8: [16]}


def test_buffers_are_sized_by_the_largest_arm():
    """A38: a switch from k = 2 to k = 8 must fit, so sizes come from all arms of all buckets."""
    table = parse_arms("1: plain, chain_8, 4_4_32; 9: plain, chain_2")
    assert (table.max_verify_width, table.max_depth) == (32, 8)
    assert [s.name for s in table.strategies] == ["plain", "chain_8", "4_4_32", "chain_2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpu", r"got 'tpu', expected one of \['cpu', 'gpu', 'paper'\] or groups"),
        ("plain, chain_3", "each led by its smallest live batch"),
        ("1: plain; 4: chain_x", "arms from live batch 4: strategy: got 'chain_x'"),
        ("4: plain; 2: plain", r"got thresholds \[4, 2\], expected increasing"),
        ("1: plain, plain", r"arms from live batch 1: got \['plain', 'plain'\], expected one or more, each once"),
        ("", "got 0 thresholds"),
    ],
)
def test_bad_arm_tables_name_the_group(text, message):
    with pytest.raises(ValueError, match=message):
        parse_arms(text)


def test_table_needs_a_threshold_per_group():
    with pytest.raises(ValueError, match="got 2 thresholds for 1 groups"):
        ArmTable((1, 2), ((PLAIN,),))
