"""Feature traces into training rows of one fixed shape.

1. `cut_windows` cuts a trace into windows of bounded length that together supervise its whole response.
2. `first_fit` puts windows into rows; each window becomes a segment with its own positions.
3. `make_batches` copies them into `DraftBatch`es; what is left of a row is padding.

The shift, once: row t of a window pairs f_t with token_{t+1}, and is supervised if its labels f_{t+1} and token_{t+2}
exist and token_{t+2} is a response token that was drafted, that is t from prompt_len-1 to n-3. The last row of a
window is there for the labels it carries and is not supervised itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from tlt_jax.drafter.loss import DraftBatch
from tlt_jax.types import FeatureTrace


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowConfig:
    """How traces are cut.

    Attributes:
      row_len: rows of a batch row, and of the longest window.
      context_len: rows before the supervised ones of a window, unsupervised: the end of the prompt, or of the window
        before. A drafter in use sees everything before; its attention is local enough for a few hundred rows.
    """

    row_len: int = 1024
    context_len: int = 128

    def __post_init__(self):
        if self.row_len < 3 or not 0 <= self.context_len <= self.row_len - 2:
            raise ValueError(
                f"drafter.batch: got row_len {self.row_len} and context_len {self.context_len}, expected a context "
                "that leaves at least two rows of a row of three or more"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig(WindowConfig):
    """The fixed shape [A,B,T] of an optimizer step, and how traces are cut for it; T is `row_len`.

    Attributes:
      num_rows: B, rows of a micro-batch.
      num_micro: A, micro-batches of an optimizer step.
    """

    num_rows: int = 8
    num_micro: int = 1

    def __post_init__(self):
        super().__post_init__()
        if self.num_rows < 1 or self.num_micro < 1:
            raise ValueError(
                f"drafter.batch: got num_rows {self.num_rows} and num_micro {self.num_micro}, expected both >= 1"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """Rows start ... stop-1 of a trace, of which first ... last-1 are supervised; all are positions of the trace."""

    trace: FeatureTrace
    start: int
    stop: int
    first: int
    last: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


def cut_windows(trace: FeatureTrace, config: WindowConfig) -> list[Window]:
    """Windows whose supervised rows are, together, every row of the trace that can be supervised, each once."""
    begin, end = trace.start, trace.start + len(trace.features)
    first = max(trace.prompt_len - 1, begin)
    last = min(end - 1, len(trace.token_ids) - 2)
    size = config.row_len - config.context_len - 1
    return [
        Window(trace, max(begin, i - config.context_len), min(i + size, last) + 1, i, min(i + size, last))
        for i in range(first, last, size)
    ]


def first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of the items of each bin; an item goes to the first bin with room for it."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i, size in enumerate(sizes):
        if size > capacity:
            raise ValueError(f"packing: got a window of {size} rows, expected at most {capacity}: cut it first")
        j = next((j for j, free in enumerate(room) if free >= size), len(bins))
        if j == len(bins):
            bins.append([])
            room.append(capacity)
        bins[j].append(i)
        room[j] -= size
    return bins


def make_batches(
    windows: Sequence[Window], num_micro: int, num_rows: int, row_len: int, *, packed: bool = True
) -> Iterator[DraftBatch]:
    """Batches [A,B,T] of host arrays, one for each optimizer step; the last is filled up with empty rows.

    Args:
      windows: in the order in which they are to be trained on.
      num_micro: A, micro-batches of an optimizer step.
      num_rows: B, rows of a micro-batch.
      row_len: T.
      packed: False gives every window a row of its own, for comparison.
    """
    bins = first_fit([w.num_rows for w in windows], row_len) if packed else [[i] for i in range(len(windows))]
    per_step = num_micro * num_rows
    for i in range(0, len(bins), per_step):
        rows = [[windows[j] for j in row] for row in bins[i : i + per_step]]
        batch = DraftBatch(**_fill(rows, per_step, row_len))
        yield jax.tree.map(lambda x: x.reshape(num_micro, num_rows, *x.shape[1:]), batch)


def _fill(rows: list[list[Window]], num_rows: int, row_len: int) -> dict[str, Any]:
    trace = rows[0][0].trace
    shape = (num_rows, row_len)
    features = np.zeros((*shape, trace.features.shape[1]), trace.features.dtype)
    hidden = None if trace.hidden is None else np.zeros((*shape, trace.hidden.shape[1]), trace.hidden.dtype)
    tokens, positions, segment_ids = (np.zeros(shape, np.int32) for _ in range(3))
    mask = np.zeros(shape, bool)
    for b, row in enumerate(rows):
        t = 0
        for segment, w in enumerate(row, 1):
            here, there = slice(t, t + w.num_rows), slice(w.start - w.trace.start, w.stop - w.trace.start)
            features[b, here] = w.trace.features[there]
            if hidden is not None:
                assert w.trace.hidden is not None
                hidden[b, here] = w.trace.hidden[there]
            tokens[b, here] = w.trace.token_ids[w.start + 1 : w.stop + 1]
            positions[b, here] = np.arange(w.start, w.stop)
            segment_ids[b, here] = segment
            mask[b, t + w.first - w.start : t + w.last - w.start] = True
            t += w.num_rows
    return dict(
        features=features, hidden=hidden, tokens=tokens, positions=positions, segment_ids=segment_ids, mask=mask
    )


def fill_frac(batch: DraftBatch) -> float:
    """Share of rows that are not padding."""
    return float(np.mean(np.asarray(batch.segment_ids) > 0))
