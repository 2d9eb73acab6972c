import numpy as np
import pytest

from tests.rollout.tiny import request
from tlt_jax.rollout.scheduler import Active, Scheduler, bucket, bucket_path

ROWS, SLOTS = (1, 2, 4, 8), (64, 128, 256)


def _active(prompt_len=3, max_tokens=12, stop_ids=(), request_id=0) -> Active:
    r = request(request_id, tuple(range(4, 4 + prompt_len)), max_tokens=max_tokens)
    return Active(request=r, stop_ids=stop_ids, key=np.zeros(2, np.uint32), start_s=0.0)


@pytest.mark.parametrize("need, expected", [(0, 64), (1, 64), (64, 64), (65, 128), (256, 256), (999, 256)])
def test_bucket_is_the_smallest_that_fits_or_the_largest(need, expected):
    assert bucket(SLOTS, need) == expected


def test_lengths_of_a_row():
    a = _active(prompt_len=3, max_tokens=5)
    assert (a.length, a.newest, a.limit) == (2, 6, 8)  # the newest token is not in the cache
    a.commit([9, 10], [-0.5, -0.25])
    assert (a.length, a.newest, a.limit) == (4, 10, 8)


@pytest.mark.parametrize(
    "tokens, max_tokens, kept, reason",
    [
        ([10, 11, 2, 20, 21, 22], 5, 3, "stop"),
        ([10, 11, 12, 13, 14, 2], 5, 5, "length"),
        ([10, 11, 12, 13, 2, 14], 5, 5, "stop"),  # a stop at the cap is a stop
        ([10, 11, 12], 5, 3, None),
        ([2], 1, 1, "stop"),
        ([10], 1, 1, "length"),
        ([], 5, 0, None),
    ],
)
def test_commit_ends_at_the_first_stop_or_the_cap(tokens, max_tokens, kept, reason):
    """A2: the earliest of stop and cap wins, and nothing after it is kept."""
    a = _active(max_tokens=max_tokens, stop_ids=(2, 3))
    a.commit(tokens, [-float(i) for i in range(len(tokens))])
    assert (a.token_ids, a.finish_reason) == (tokens[:kept], reason)
    assert a.logprobs == [-float(i) for i in range(kept)]


def test_cut_takes_tokens_and_logprobs():
    """A21: to nothing, to all there is; more than that is an error, not a stale token."""
    a = _active(max_tokens=3)
    a.commit([10, 11, 12], [-1.0, -2.0, -3.0])
    assert a.finish_reason == "length"
    a.cut(2)
    assert (a.token_ids, a.logprobs, a.finish_reason) == ([10, 11], [-1.0, -2.0], "stop")
    with pytest.raises(ValueError, match="cut: got 4, expected 0 to 2"):
        a.cut(4)
    a.cut(2)
    assert a.token_ids == [10, 11]
    a.cut(0)
    assert (a.token_ids, a.length) == ([], len(a.request.prompt_ids) - 1)


def test_rows_wanted_follow_what_is_alive_and_waits():
    s = Scheduler(ROWS, SLOTS)
    assert (s.wanted_rows(), s.has_work) == (1, False)
    s.waiting.extend(request(i, (4,)) for i in range(3))
    assert (s.wanted_rows(), s.has_work) == (4, True)
    s.waiting.extend(request(i, (4,)) for i in range(3, 30))
    assert s.wanted_rows() == 8


def test_place_compacts_only_where_it_shrinks():
    """A29: a row's new place and the old one it came from."""
    s = Scheduler(ROWS, SLOTS)
    assert s.place(4) == [0, 0, 0, 0]
    a, b = _active(request_id=1), _active(request_id=2)
    s.rows = [None, a, None, b]
    assert s.place(4) == [0, 1, 2, 3]  # stays
    assert s.rows == [None, a, None, b] and s.free_rows() == [0, 2]
    assert s.place(8) == [0, 1, 2, 3, 0, 0, 0, 0]
    assert s.rows == [None, a, None, b, None, None, None, None]
    assert s.place(2) == [1, 3]
    assert s.rows == [a, b]
    with pytest.raises(ValueError, match="got 2 live rows for 1, expected at most as many"):
        s.place(1)


def test_capacity_covers_the_rounds_of_one_call_or_the_rows_end():
    s = Scheduler(ROWS, SLOTS)
    assert s.wanted_capacity(16) == 64
    s.rows = [_active(prompt_len=50, max_tokens=100)]
    assert s.wanted_capacity(15) == 64
    assert s.wanted_capacity(16) == 128
    s.rows = [_active(prompt_len=50, max_tokens=14)]
    assert s.wanted_capacity(1000) == 64


def test_retire_frees_rows_of_finished_responses():
    s = Scheduler(ROWS, SLOTS)
    s.rows = [_active(max_tokens=1, request_id=7), _active(request_id=8), None]
    s.rows[0].commit([5], [0.0])
    assert [a.request.request_id for a in s.retire()] == [7]
    assert [a and a.request.request_id for a in s.rows] == [None, 8, None]
    assert s.retire() == []


@pytest.mark.parametrize(
    "old, new, path",
    [
        ((8, 64), (1, 64), [(4, 64), (2, 64), (1, 64)]),
        ((1, 256), (4, 64), [(2, 256), (4, 256), (4, 128), (4, 64)]),
        ((4, 64), (4, 256), [(4, 128), (4, 256)]),
        ((2, 64), (1, 128), [(1, 64), (1, 128)]),
        ((2, 64), (2, 64), [(2, 64)]),
    ],
)
def test_shapes_change_one_bucket_at_a_time(old, new, path):
    assert bucket_path(old, new, ROWS, SLOTS) == path
