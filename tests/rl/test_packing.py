"""Packing: nothing lost, nothing mixed, few shapes, little padding."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from tests.rl import tiny
from tlt_jax.rl.algorithms import preset
from tlt_jax.rl.batch import PackConfig
from tlt_jax.rl.packing import empty_micro_batch, make_micro_batches, plan_bins, scatter_rows

PACK = PackConfig(micro_batch_tokens=64, min_width=16)


def _micros(batch, num_shards=1):
    rows = np.flatnonzero(batch.is_trained)
    return make_micro_batches(batch, rows, 1.0 + rows.astype(np.float32), PACK, num_shards)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=40),
    budget=st.integers(1, 2048),
    num_shards=st.sampled_from([1, 2, 8]),
)
def test_every_row_is_packed_once_and_fits(lengths, budget, num_shards):
    config = PackConfig(micro_batch_tokens=budget)
    cut = plan_bins(lengths, config, num_shards)
    rows = [row for _, bins in cut for members in bins for row in members]
    assert sorted(rows) == list(range(len(lengths)))
    for width, bins in cut:
        assert width >= 64 and width & (width - 1) == 0
        assert 1 <= len(bins) <= config.num_rows(width, num_shards)
        assert all(sum(lengths[row] for row in members) <= width for members in bins)


def test_shapes_are_few_and_padding_is_small_on_long_tails():
    """H4: whatever the lengths of a step, micro-batches have one of a few shapes."""
    rng = np.random.default_rng(0)
    shapes = set()
    for _ in range(10):
        lengths = np.minimum(60 + rng.geometric(1 / 120, 64), 600)
        cut = plan_bins(lengths, PackConfig(micro_batch_tokens=2048))
        shapes |= {width for width, _ in cut}
        slots = sum(PackConfig(micro_batch_tokens=2048).num_rows(w, 1) * w for w, _ in cut)
        assert lengths.sum() / slots > 0.75
    assert len(shapes) <= 4


def test_equal_rows_fill_their_bins():
    """16 rows of 256 tokens with a budget of 4,096: one micro-batch without padding."""
    assert plan_bins([256] * 16, PackConfig(micro_batch_tokens=4096)) == [(256, [[i] for i in range(16)])]


def test_rows_may_have_bins_of_their_own():
    config = PackConfig(micro_batch_tokens=128, share_bins=False)
    assert plan_bins([10, 100, 20, 65], config) == [(64, [[0], [2]]), (128, [[1]]), (128, [[3]])]


def test_plan_of_nothing_is_empty():
    assert plan_bins([], PACK) == []


def test_slots_point_at_the_position_before_their_token():
    """B15, B20: slot i holds response token i and the position that predicts it; ids are those sampled."""
    batch = tiny.batch(preset("grpo"))
    seen = {}
    for micro in _micros(batch):
        for b, s in zip(*np.nonzero(micro.mask), strict=True):
            row, at = int(micro.row_index[b, s]), int(micro.slots[b, s])
            seen.setdefault(row, []).append(int(micro.targets[b, s]))
            i = len(seen[row]) - 1
            assert micro.positions[b, at] == batch.prompt_lens[row] - 1 + i
            assert micro.tokens[b, at] == batch.tokens[row][batch.prompt_lens[row] - 1 + i]
            assert micro.segment_ids[b, at] == micro.segments[b, s] + 1
    assert {row: batch.tokens[row][batch.prompt_lens[row] :].tolist() for row in seen} == seen
    assert sorted(seen) == list(range(6))


def test_row_tags_follow_their_values():
    """B23: advantages, weights and rollout log-probs of a slot are those of the row whose tag it carries."""
    batch = tiny.batch(preset("grpo"), rewards=np.arange(6) ** 2)
    for num_shards in (1, 4):
        micros = _micros(batch, num_shards)
        for micro in micros:
            rows = micro.row_index[micro.mask]
            np.testing.assert_array_equal(micro.advantages[micro.mask], batch.advantages[rows])
            np.testing.assert_array_equal(micro.weights[micro.mask], 1.0 + rows)
            assert (micro.row_index[~micro.mask] == -1).all() and not micro.weights[~micro.mask].any()
        back = scatter_rows([(m.behaviour_logprobs, m.mask, m.row_index) for m in micros], 6)
        for row, expected in zip(back, batch.behaviour_logprobs, strict=True):
            np.testing.assert_array_equal(row, expected)


def test_rows_are_a_multiple_of_the_shards():
    """E1: every shard gets the same number of rows, empty ones included."""
    for micro in _micros(tiny.batch(preset("grpo")), num_shards=8):
        assert micro.tokens.shape[0] % 8 == 0


def test_empty_micro_batch_has_no_slots():
    """E2: a no-op of the same shape."""
    micro = empty_micro_batch(4, 16)
    assert micro.tokens.shape == (4, 16)
    assert not micro.mask.any() and not micro.weights.any() and not micro.segment_ids.any()
