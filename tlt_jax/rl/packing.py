"""Rows of uneven length packed into bins of a few widths, and the arrays of each micro-batch.

Widths are powers of two. Bins wider than their rows hold several, with segment ids keeping them apart, so padding is
small; narrow bins keep attention short. `plan_bins` tries each width as the smallest one used and takes the cheapest
plan, counting the padding of the last micro-batch too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tlt_jax.rl.batch import MicroBatch, PackConfig, TrainBatch

Bin = list[int]  # row indices, in the order they lie in the bin


def plan_bins(
    lengths: Sequence[int] | np.ndarray, config: PackConfig, num_shards: int = 1
) -> list[tuple[int, list[Bin]]]:
    """Packs rows of the given lengths into micro-batches.

    Args:
      lengths: tokens of each row, prompt and response.
      config: token budget and widths.
      num_shards: the number of bins of a micro-batch is a multiple of it.
    Returns:
      (width, bins) for each micro-batch, narrow ones first; fewer bins than `config.num_rows` in the last of a width.
    """
    lengths = np.asarray(lengths, np.int64)
    if not len(lengths):
        return []
    widths = [config.min_width]
    while widths[-1] < lengths.max():
        widths.append(2 * widths[-1])
    if not config.share_bins:
        return _cut(_one_bin_each(lengths, widths), config, num_shards)
    # Wider bins than the longest row may still pack tighter: two rows of 0.6 fit in no bin of 1, three in one of 2.
    widths += [2 * widths[-1], 4 * widths[-1]]
    plans = [_pack(lengths, base, widths) for base in widths]
    return min((_cut(plan, config, num_shards) for plan in plans), key=lambda cut: _cost(cut, config, num_shards))


def _pack(lengths: np.ndarray, base: int, widths: Sequence[int]) -> dict[int, list[Bin]]:
    """Best-fit decreasing: each row goes to the open bin it fills best, or opens one at least `base` wide."""
    bins: list[tuple[int, Bin]] = []
    free = np.zeros(len(lengths), np.int64)  # free[i]: tokens left in bin i
    for row in np.argsort(-lengths, kind="stable"):
        need = lengths[row]
        left = np.where(free[: len(bins)] >= need, free[: len(bins)], np.iinfo(np.int64).max)
        if len(bins) and left.min() < np.iinfo(np.int64).max:
            target = int(left.argmin())
        else:
            target = len(bins)
            width = next(w for w in widths if w >= max(need, base))
            bins.append((width, []))
            free[target] = width
        bins[target][1].append(int(row))
        free[target] -= need
    by_width: dict[int, list[Bin]] = {}
    for width, rows in bins:
        by_width.setdefault(width, []).append(rows)
    return by_width


def _one_bin_each(lengths: np.ndarray, widths: Sequence[int]) -> dict[int, list[Bin]]:
    """Each row alone in the narrowest bin that holds it."""
    by_width: dict[int, list[Bin]] = {}
    for row, need in enumerate(lengths):
        by_width.setdefault(next(w for w in widths if w >= need), []).append([row])
    return by_width


def _cut(by_width: dict[int, list[Bin]], config: PackConfig, num_shards: int) -> list[tuple[int, list[Bin]]]:
    cut = []
    for width in sorted(by_width):
        num_rows = config.num_rows(width, num_shards)
        bins = by_width[width]
        cut += [(width, bins[i : i + num_rows]) for i in range(0, len(bins), num_rows)]
    return cut


def _cost(cut: list[tuple[int, list[Bin]]], config: PackConfig, num_shards: int) -> float:
    """Work of a plan in token slots, attention included."""
    return sum(config.num_rows(w, num_shards) * w * (1.0 + w / config.attention_len) for w, _ in cut)


def make_micro_batches(
    batch: TrainBatch, rows: np.ndarray, weights: np.ndarray, config: PackConfig, num_shards: int = 1
) -> list[MicroBatch]:
    """The micro-batches of some rows.

    Args:
      batch: the rollout.
      rows: i[n] indices of the rows that take part.
      weights: f32[n] weight of each token of those rows.
      config: layout.
      num_shards: devices over which rows are split.
    """
    lengths = [len(batch.tokens[row]) for row in rows]
    micros = []
    for width, bins in plan_bins(lengths, config, num_shards):
        micro = empty_micro_batch(config.num_rows(width, num_shards), width)
        for b, members in enumerate(bins):
            _fill_bin(micro, b, batch, [(int(rows[i]), weights[i]) for i in members])
        micros.append(micro)
    return micros


def empty_micro_batch(num_rows: int, width: int) -> MicroBatch:
    """A micro-batch without any response: a legal no-op of the same shape, for hosts that have run out of work."""
    shape = (num_rows, width)
    ints = {
        name: np.zeros(shape, np.int32)
        for name in ("tokens", "positions", "segment_ids", "slots", "targets", "segments")
    }
    floats = {name: np.zeros(shape, np.float32) for name in ("behaviour_logprobs", "advantages", "weights")}
    return MicroBatch(**ints, **floats, mask=np.zeros(shape, bool), row_index=np.full(shape, -1, np.int32))


def _fill_bin(micro: MicroBatch, b: int, batch: TrainBatch, members: list[tuple[int, float]]) -> None:
    """Writes rows one after the other into bin `b`, and their responses into its slots."""
    start = slot = 0
    for segment, (row, weight) in enumerate(members):
        tokens, prompt_len = batch.tokens[row], int(batch.prompt_lens[row])
        at = slice(start, start + len(tokens))
        micro.tokens[b, at] = tokens
        micro.positions[b, at] = np.arange(len(tokens))
        micro.segment_ids[b, at] = segment + 1
        num_slots = len(tokens) - prompt_len
        to = slice(slot, slot + num_slots)
        micro.slots[b, to] = start + prompt_len - 1 + np.arange(num_slots)
        micro.targets[b, to] = tokens[prompt_len:]
        micro.mask[b, to] = True
        micro.segments[b, to] = segment
        micro.row_index[b, to] = row
        micro.behaviour_logprobs[b, to] = batch.behaviour_logprobs[row]
        micro.advantages[b, to] = batch.advantages[row]
        micro.weights[b, to] = weight
        start, slot = at.stop, to.stop


def scatter_rows(parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], num_rows: int) -> list[np.ndarray]:
    """Slot values back in rows.

    Args:
      parts: (values, mask, row_index), each [B,T], for each micro-batch.
      num_rows: rows of the TrainBatch.
    Returns:
      Entry i is f32[response] of row i, f32[0] for rows that no micro-batch holds.
    """
    rows = [np.zeros(0, np.float32)] * num_rows
    for value_BT, mask_BT, row_index_BT in parts:
        index, flat = row_index_BT[mask_BT], value_BT[mask_BT]
        # The slots of a response are side by side, so each row is one run of `index`.
        starts = np.flatnonzero(np.diff(index, prepend=-1))
        for row, run in zip(index[starts], np.split(flat, starts[1:]), strict=True):
            rows[row] = run
    return rows
