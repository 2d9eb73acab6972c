import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tlt_jax.rollout.prefix import PrefillGroup, chunk_widths, group_prompts


def _prompt(length, first=1):
    return tuple(range(first, first + length))


def test_groups_hold_distinct_prompts_of_one_bucket():
    short, other, long = _prompt(5), _prompt(6, first=50), _prompt(65)
    groups = group_prompts([short, long, short, other, (9,), _prompt(66)], (64, 128), (1, 2, 4))
    assert [(g.prompts, g.num_rows, g.capacity) for g in groups] == [
        ((short, long, other), 4, 64),  # 64 tokens of the long one go into the cache
        ((_prompt(66),), 1, 128),
    ]
    assert group_prompts([(9,), (8,)], (64,), (1, 2)) == []  # nothing to prefill


def test_no_group_is_larger_than_the_largest_bucket():
    prompts = [_prompt(4, first=i) for i in range(11)]
    groups = group_prompts(prompts, (64,), (1, 2, 4))
    assert [len(g.prompts) for g in groups] == [4, 4, 3]
    assert [g.num_rows for g in groups] == [4, 4, 4]
    assert [p for g in groups for p in g.prompts] == prompts


@pytest.mark.parametrize(
    "chunk_len, lengths, starts, width",
    [
        (16, (5,), [0], 16),
        (16, (17,), [0], 16),  # 16 tokens, all but the last
        (16, (18, 3), [0, 16], 16),
        (48, (60,), [0, 16], 48),  # 48 would reach past the capacity of 64
        (48, (49,), [0], 48),
        (512, (65,), [0], 64),
        (1, (4,), [0, 1, 2], 1),
        (512, (33, 9), [0], 32),  # half the capacity will do
    ],
)
def test_chunks_by_hand(chunk_len, lengths, starts, width):
    group = PrefillGroup(prompts=tuple(_prompt(n) for n in lengths), num_rows=2, capacity=64)
    chunks = group.chunks(chunk_len)
    assert [start.tolist() for _, start in chunks] == [[s, s] for s in starts]
    assert {tokens.shape for tokens, _ in chunks} == {(2, width)}
    assert {(tokens.dtype.name, start.dtype.name) for tokens, start in chunks} == {("int32", "int32")}


def test_the_last_chunk_is_as_narrow_as_it_can_be():
    assert chunk_widths(512, 4096) == [32, 64, 128, 256, 512]
    assert (
        chunk_widths(512, 192) == [48, 96, 192] and chunk_widths(16, 64) == [16] and chunk_widths(100, 64) == [32, 64]
    )
    group = PrefillGroup(prompts=(_prompt(331),), num_rows=1, capacity=512)
    assert [(tokens.shape[1], start[0]) for tokens, start in group.chunks(128)] == [(128, 0), (128, 128), (128, 256)]
    group = PrefillGroup(prompts=(_prompt(300),), num_rows=1, capacity=512)
    assert [(tokens.shape[1], start[0]) for tokens, start in group.chunks(128)] == [(128, 0), (128, 128), (64, 256)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(2, 97), min_size=1, max_size=4),
    chunk_len=st.integers(1, 120),
    spare=st.integers(0, 40),
)
def test_chunks_write_every_token_at_its_slot_and_none_outside(lengths, chunk_len, spare):
    """A19's kind: no block reaches past the cache, where the write would shift over older entries."""
    capacity = max(lengths) - 1 + spare
    group = PrefillGroup(prompts=tuple(_prompt(n) for n in lengths), num_rows=4, capacity=capacity)
    slots = np.full((4, capacity), -1)
    for tokens, start in group.chunks(chunk_len):
        end = start[0] + tokens.shape[1]
        assert end <= capacity
        slots[:, start[0] : end] = tokens
        assert (slots[0, : start[0]] >= 0).all()  # everything before the block is there already
    for row, prompt in enumerate(group.prompts):
        assert slots[row, : len(prompt) - 1].tolist() == list(prompt[:-1])
