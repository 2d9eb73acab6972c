"""Which prompts are prefilled together, and in which chunks. Host only.

A prompt is prefilled once for all its requests, all its tokens but the last: in groups of one length bucket, into a
small cache of their own, from which rows of the decode cache are then filled by copying.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tlt_jax.rollout.scheduler import bucket

Prompt = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PrefillGroup:
    """Prompts that are prefilled together."""

    prompts: tuple[Prompt, ...]
    num_rows: int  # bucket, >= len(prompts)
    capacity: int  # bucket, >= the longest prompt less its last token

    def chunks(self, chunk_len: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(tokens i32[rows,chunk], start i32[rows]) pairs that fill the cache from left to right.

        Only as many chunks as the longest prompt needs, the last one of the narrowest of `chunk_widths` that will do.
        A last chunk that would reach past the capacity starts earlier instead and writes some tokens again. Tokens past
        a prompt's end are 0; their cache entries lie beyond the row's length and are never read.
        """
        widths = chunk_widths(chunk_len, self.capacity)
        longest = max(len(p) - 1 for p in self.prompts)
        tokens = np.zeros((self.num_rows, self.capacity), np.int32)
        for i, prompt in enumerate(self.prompts):
            tokens[i, : len(prompt) - 1] = prompt[:-1]
        chunks = []
        for first in range(0, longest, widths[-1]):
            width = bucket(widths, longest - first)
            start = min(first, self.capacity - width)
            chunks.append((tokens[:, start : start + width], np.full(self.num_rows, start, np.int32)))
        return chunks


def chunk_widths(chunk_len: int, capacity: int) -> list[int]:
    """Widths of prefill chunks: the longest that there may be, and its halves down to 32 tokens or so."""
    widths = [min(chunk_len, capacity)]
    while widths[0] >= 64:
        widths.insert(0, -(-widths[0] // 2))
    return widths


def group_prompts(
    prompts: Sequence[Prompt], kv_buckets: Sequence[int], row_buckets: Sequence[int]
) -> list[PrefillGroup]:
    """Groups distinct prompts by cache bucket, at most `row_buckets[-1]` to a group, in order of arrival."""
    by_capacity: dict[int, list[Prompt]] = {}
    for prompt in dict.fromkeys(prompts):
        if len(prompt) > 1:
            by_capacity.setdefault(bucket(kv_buckets, len(prompt) - 1), []).append(prompt)
    groups = []
    for capacity, members in by_capacity.items():
        for i in range(0, len(members), row_buckets[-1]):
            part = tuple(members[i : i + row_buckets[-1]])
            groups.append(PrefillGroup(prompts=part, num_rows=bucket(row_buckets, len(part)), capacity=capacity))
    return groups
