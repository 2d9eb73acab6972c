import pytest
from hypothesis import given, settings, strategies as st

from tlt_jax.rollout.stop_strings import find_stop

PIECES = ["", "a", "b", "ab", "User", ":", "\n", " ", "\n\n", "Us", "er", "<|end|>"]


def pieces(token_ids) -> str:
    return "".join(PIECES[t] for t in token_ids)


def utf8(token_ids) -> str:
    """One byte per token, as byte-level vocabularies have; an unfinished character shows as U+FFFD."""
    return bytes(token_ids).decode(errors="replace")


def _first(decode, ids, stops):
    """By definition: the shortest prefix whose text holds a stop string."""
    return next((n for n in range(1, len(ids) + 1) if any(s in decode(ids[:n]) for s in stops)), None)


@pytest.mark.parametrize(
    "ids, num_checked, stops, expected",
    [
        ([1, 9, 10, 5], 0, ("User:",), 4),  # over three tokens
        ([1, 9, 10, 5], 3, ("User:",), 4),  # of which two came before
        ([1, 9, 10, 5, 2, 2], 0, ("User:",), 4),  # tokens after it are cut
        ([3, 3], 0, ("ba",), 2),  # from the middle of a token to the middle of the next
        ([3, 3], 0, ("a", "ba"), 1),  # whichever is complete first
        ([1, 2, 1], 0, ("User:", "bb"), None),
        ([6, 6], 0, ("\n\n",), 2),
        ([8, 1], 0, ("\n\n",), 1),
        ([11], 0, ("<|end|>",), 1),
        ([4, *[0] * 40, 5], 41, ("User:",), 42),  # tokens without text in between
        ([0, 0, 0], 1, ("a",), None),
    ],
)
def test_find_stop_by_hand(ids, num_checked, stops, expected):
    assert find_stop(pieces, ids, num_checked, stops) == expected


def test_a_string_of_several_bytes_per_character():
    text = "x " + "né漢🙂" * 3
    ids = list(text.encode())
    for stop in ("né", "漢", "🙂n", "é漢🙂"):
        end = len(text[: text.index(stop) + len(stop)].encode())
        for num_checked in range(end):
            assert find_stop(utf8, ids, num_checked, (stop,)) == end
    assert find_stop(utf8, ids[:-1], 20, ("🙂x",)) is None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=40),
    stops=st.lists(st.sampled_from(["a", "bb", "aba", "User:", "r:\n", "\n\n", " U", "d|>a"]), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=40),
)
def test_found_the_same_whatever_the_dispatches_were(ids, stops, sizes):
    """Tokens come in runs; the answer is that of looking at every prefix from its start."""
    found, num_checked = None, 0
    for size in (*sizes, len(ids)):
        end = min(num_checked + size, len(ids))
        if end > num_checked and found is None:
            found = find_stop(pieces, ids[:end], num_checked, stops)
        num_checked = end
    assert found == _first(pieces, ids, stops)
