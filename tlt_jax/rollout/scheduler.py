"""Which request sits in which row, and how large the batch and the cache are. Host only, no arrays of the device.

Invariants:
  - Requests are admitted in the order they were submitted.
  - `num_rows` and `capacity` are always bucket values; live rows fit both.
  - A row's bookkeeping (tokens, length, limit) changes here and nowhere else.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from tlt_jax.types import FINISH_LENGTH, FINISH_STOP, Request


@dataclasses.dataclass
class Active:
    """A response in progress."""

    request: Request
    stop_ids: tuple[int, ...]
    key: np.ndarray  # u32[2]
    start_s: float
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    num_ingested: int = 0  # positions that the drafter's cache holds, from true features
    finish_reason: str | None = None
    end_s: float = 0.0

    @property
    def length(self) -> int:
        """Tokens in the cache: everything but the newest."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    @property
    def newest(self) -> int:
        return self.token_ids[-1] if self.token_ids else self.request.prompt_ids[-1]

    def tokens_from(self, position: int) -> list[int]:
        """Tokens of the prompt and the response from `position` on."""
        prompt = self.request.prompt_ids
        if position >= len(prompt):
            return self.token_ids[position - len(prompt) :]
        return [*prompt[position:], *self.token_ids]

    @property
    def limit(self) -> int:
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens

    def commit(self, token_ids: Iterable[int], logprobs: Iterable[float]) -> None:
        """Appends tokens up to the first stop id or the cap, whichever is earlier; a stop at the cap is a stop."""
        for token, logprob in zip(token_ids, logprobs, strict=True):
            self.token_ids.append(int(token))
            self.logprobs.append(float(logprob))
            if token in self.stop_ids:
                self.finish_reason = FINISH_STOP
                return
            if len(self.token_ids) >= self.request.sampling.max_tokens:
                self.finish_reason = FINISH_LENGTH
                return

    def cut(self, num_tokens: int) -> None:
        """Ends the response after its first `num_tokens` tokens (a stop string was completed there).

        Raises:
          ValueError: it has fewer.
        """
        if not 0 <= num_tokens <= len(self.token_ids):
            raise ValueError(f"cut: got {num_tokens}, expected 0 to {len(self.token_ids)}, the tokens that there are")
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:]
        self.finish_reason = FINISH_STOP


def bucket(buckets: Sequence[int], need: int) -> int:
    """The smallest bucket that holds `need`; the largest if none does."""
    return buckets[min(bisect.bisect_left(buckets, need), len(buckets) - 1)]


def bucket_path(
    old: tuple[int, int], new: tuple[int, int], row_buckets: Sequence[int], kv_buckets: Sequence[int]
) -> list[tuple[int, int]]:
    """(rows, slots) from `old` (not in it) to `new`, one bucket at a time, rows first.

    Moves between neighbours alone keep the number of distinct moves linear in the number of buckets.
    """

    def walk(buckets: Sequence[int], start: int, end: int) -> list[int]:
        i, j = buckets.index(start), buckets.index(end)
        return list(buckets[i + 1 : j + 1] if j > i else buckets[j:i][::-1])

    path = [(rows, old[1]) for rows in walk(row_buckets, old[0], new[0])]
    path += [(new[0], slots) for slots in walk(kv_buckets, old[1], new[1])]
    return path or [new]


class Scheduler:
    """A queue of waiting requests, and rows."""

    def __init__(self, batch_buckets: Sequence[int], kv_buckets: Sequence[int]):
        self.batch_buckets = tuple(batch_buckets)
        self.kv_buckets = tuple(kv_buckets)
        self.waiting: collections.deque[Request] = collections.deque()
        self.rows: list[Active | None] = []
        self.capacity = self.kv_buckets[0]

    @property
    def live(self) -> list[Active]:
        return [a for a in self.rows if a is not None]

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or any(a is not None for a in self.rows)

    def wanted_rows(self) -> int:
        """Batch bucket for what is alive and waiting now."""
        return bucket(self.batch_buckets, min(len(self.live) + len(self.waiting), self.batch_buckets[-1]))

    def wanted_capacity(self, num_tokens: int, scratch: int = 0) -> int:
        """Cache bucket with `scratch` slots left when every live row has grown by `num_tokens`, or to its own end."""
        need = max((min(a.length + num_tokens, a.limit) for a in self.live), default=0)
        return bucket(self.kv_buckets, need + scratch)

    def place(self, num_rows: int) -> list[int]:
        """Compacts to `num_rows` rows; returns the old row of each new row (0 where the new row is empty)."""
        kept = [i for i, a in enumerate(self.rows) if a is not None]
        if len(kept) > num_rows:
            raise ValueError(f"rows: got {len(kept)} live rows for {num_rows}, expected at most as many")
        if num_rows >= len(self.rows):  # growing keeps rows where they are
            source = list(range(len(self.rows))) + [0] * (num_rows - len(self.rows))
            self.rows += [None] * (num_rows - len(self.rows))
            return source
        self.rows = [self.rows[i] for i in kept] + [None] * (num_rows - len(kept))
        return kept + [0] * (num_rows - len(kept))

    def free_rows(self) -> list[int]:
        return [i for i, a in enumerate(self.rows) if a is None]

    def retire(self) -> list[Active]:
        """Takes finished responses out of their rows."""
        done = [a for a in self.rows if a is not None and a.finish_reason]
        self.rows = [None if a is not None and a.finish_reason else a for a in self.rows]
        return done
