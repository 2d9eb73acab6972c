import numpy as np
import pytest

from tests.drafter.shapes import make
from tlt_jax.drafter import vocab


def test_offsets_of_kept_ids():
    """F3: kept tokens [0, 5, 9] -> [0, 4, 7]; the whole vocabulary -> zeros; the round trip gives all ids back."""
    assert vocab.ids_to_map([0, 5, 9]).tolist() == [0, 4, 7]
    assert vocab.map_to_ids(np.array([0, 4, 7])).tolist() == [0, 5, 9]
    assert vocab.ids_to_map(np.arange(50)).tolist() == [0] * 50
    assert vocab.map_to_ids(np.zeros(50, np.int32)).tolist() == list(range(50))
    assert np.flatnonzero(vocab.target_mask(np.array([0, 4, 7]), 12)).tolist() == [0, 5, 9]


def test_the_most_frequent_ids_are_kept_and_the_required_ones():
    counts = vocab.count_tokens([np.array([5, 5, 5, 9, 9, 2]), np.array([2, 7, 7, 7, 7])], 12)
    assert counts.tolist() == [0, 0, 2, 0, 0, 3, 0, 4, 0, 2, 0, 0]
    assert vocab.map_to_ids(vocab.frequent_map(counts, 3)).tolist() == [2, 5, 7]  # 2 before 9: the lower id
    assert vocab.map_to_ids(vocab.frequent_map(counts, 3, required=(11, 0))).tolist() == [0, 7, 11]
    assert vocab.coverage(counts, vocab.frequent_map(counts, 2)) == 7 / 11


def test_rows_that_are_no_tokens_are_never_kept():
    """D9."""
    counts = np.arange(12)
    assert vocab.map_to_ids(vocab.frequent_map(counts, 3, num_valid=10)).tolist() == [7, 8, 9]
    with pytest.raises(ValueError, match="to 10"):
        vocab.frequent_map(counts, 11, num_valid=10)


def test_a_map_of_another_model_is_refused():
    """F4."""
    config = make(draft_vocab_size=3)[0]
    vocab.check_fits(config, np.array([0, 4, 7]))
    with pytest.raises(ValueError, match="another model"):
        vocab.check_fits(config, np.array([0, 4, 94]))
    with pytest.raises(ValueError, match="another model"):
        vocab.check_fits(config, np.array([0, 4]))
    with pytest.raises(ValueError, match="ascending"):
        vocab.ids_to_map([3, 1])
