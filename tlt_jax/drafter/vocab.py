"""The reduced draft vocabulary: the most frequent ids, and the map that names them.

The map is an array of offsets, as serving engines store it: draft id i stands for target id i + d2t[i]. Draft ids
follow the order of target ids, so offsets never fall, and the map of the whole vocabulary is all zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tlt_jax.drafter.config import DraftConfig


def count_tokens(sequences: Iterable[np.ndarray], vocab_size: int) -> np.ndarray:
    """i64[V], how often each id occurs."""
    counts = np.zeros(vocab_size, np.int64)
    for ids in sequences:
        counts += np.bincount(np.asarray(ids), minlength=vocab_size)
    return counts


def frequent_map(
    counts: np.ndarray, size: int, required: Sequence[int] = (), num_valid: int | None = None
) -> np.ndarray:
    """The map i32[size] of the `size` most frequent ids; of equal counts the lower id.

    Args:
      counts: i64[V] from `count_tokens`, of responses as the policy writes them.
      size: ids to keep.
      required: ids kept however rare they are, such as the stop ids.
      num_valid: ids from here on are no tokens and are never kept.

    Raises:
      ValueError: more ids wanted than there are, or fewer than are required.
    """
    num_valid = len(counts) if num_valid is None else num_valid
    required = sorted(set(required))
    if not len(required) <= size <= num_valid:
        raise ValueError(
            f"draft vocabulary: got size {size}, expected {len(required)} (required ids) to {num_valid} (all tokens)"
        )
    rank = counts[:num_valid].astype(np.int64)
    rank[required] = np.iinfo(np.int64).max
    ids = np.sort(np.argsort(-rank, kind="stable")[:size])
    return ids_to_map(ids)


def ids_to_map(ids: np.ndarray) -> np.ndarray:
    """Offsets i32 of kept target ids in ascending order."""
    ids = np.asarray(ids, np.int32)
    if np.any(np.diff(ids) <= 0) or np.any(ids < 0):
        raise ValueError(f"draft vocabulary: got ids {ids[:8]}..., expected them ascending, each once, from 0")
    return ids - np.arange(len(ids), dtype=np.int32)


def map_to_ids(d2t: np.ndarray) -> np.ndarray:
    """Target ids i32 of all draft ids."""
    return np.asarray(d2t, np.int32) + np.arange(len(d2t), dtype=np.int32)


def target_mask(d2t: np.ndarray, vocab_size: int) -> np.ndarray:
    """bool[V], target ids that the drafter can propose: `t2d` of serving engines."""
    mask = np.zeros(vocab_size, bool)
    mask[map_to_ids(d2t)] = True
    return mask


def coverage(counts: np.ndarray, d2t: np.ndarray) -> float:
    """Share of counted tokens that the drafter can propose."""
    return float(counts[map_to_ids(d2t)].sum() / max(counts.sum(), 1))


def check_fits(config: DraftConfig, d2t: np.ndarray) -> None:
    """Refuses a map whose ids the target does not have."""
    ids = map_to_ids(d2t)
    limit = config.target.num_valid_tokens or config.target.vocab_size
    if len(ids) != config.draft_vocab_size or ids.min() < 0 or ids.max() >= limit:
        raise ValueError(
            f"draft vocabulary: got a map of {len(ids)} ids from {ids.min()} to {ids.max()}, expected "
            f"{config.draft_vocab_size} ids below {limit}: the map of another model"
        )
