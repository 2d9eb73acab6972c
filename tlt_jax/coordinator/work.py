"""Who decodes what: groups of requests are pulled, longest first, and waiting requests change hands in the tail.

Every process knows all requests of a rollout and sorts their groups alike, so the store holds counters, not requests:
  1. `take_group`: the next group nobody has; a counter gives each to one worker.
  2. A worker that has run dry makes a `promise` to take the next gift, again by a counter.
  3. A worker with requests that wait for a row sees that more gifts were promised than given, and gives some.
  4. `gift` of the promised number tells the dry worker what it has got.

A gift that nobody was promised goes to the next worker that runs dry, the giver perhaps, so no request is lost. Tokens
do not depend on who decodes a request.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

from tlt_jax.types import Request

if TYPE_CHECKING:
    from tlt_jax.coordinator.store import Store


def make_groups(requests: Sequence[Request], expected_lens: Mapping[int, float] | None = None) -> list[list[Request]]:
    """Requests of one prompt together, the groups that are expected to take longest first.

    Args:
      requests: those of one prompt next to each other.
      expected_lens: tokens of a response by `prompt_id`, where known; other groups stand as the average of those.
    """
    groups = [list(g) for _, g in itertools.groupby(requests, key=lambda r: r.prompt_id)]
    if not expected_lens:
        return groups
    average = statistics.fmean(expected_lens.values())
    return sorted(groups, key=lambda g: -expected_lens.get(g[0].prompt_id, average))


class LengthHistory:
    """How long responses to a prompt were when it was last drawn."""

    def __init__(self) -> None:
        self._lens: dict[Hashable, float] = {}

    def add(self, prompt: Hashable, lens: Sequence[int]) -> None:
        """Takes the lengths of a prompt's responses, in tokens; they replace older ones."""
        # The longest of a group decides when its worker is free.
        self._lens[prompt] = float(max(lens))

    def expected(self, prompts: Sequence[Hashable]) -> dict[int, float]:
        """By place in `prompts`, for those that were drawn before."""
        return {i: self._lens[prompt] for i, prompt in enumerate(prompts) if prompt in self._lens}


class WorkQueue:
    """The requests of one rollout, as one process sees them. Methods may be called from several workers' threads."""

    def __init__(self, store: Store, root: str, groups: Sequence[Sequence[Request]]):
        """Makes the queue; every process makes one with the same groups.

        Args:
          store: shared by all processes.
          root: of this rollout's keys.
          groups: from `make_groups`.
        """
        self._store, self._root = store, root
        self._groups = [list(g) for g in groups]
        self._by_id = {r.request_id: r for g in groups for r in g}
        self._num_taken = 0  # groups known to be taken, by whom ever

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def take_group(self) -> list[Request] | None:
        """A group nobody else has; None once all are taken."""
        if self._num_taken >= len(self._groups):
            return None
        number = self._store.add(f"{self._root}/groups", 1)
        self._num_taken = max(self._num_taken, min(number, len(self._groups)))
        return self._groups[number - 1] if number <= len(self._groups) else None

    def num_untaken(self) -> int:
        """Requests of groups that nobody had taken when this process last asked."""
        return sum(len(g) for g in self._groups[self._num_taken :])

    def promise(self) -> int:
        """The number of the gift that the caller will take."""
        return self._store.add(f"{self._root}/promised", 1)

    def gift(self, number: int) -> list[Request] | None:
        """The gift of that number; None while nobody has given it."""
        text = self._store.get(f"{self._root}/gift/{number}")
        return None if text is None else [self._by_id[i] for i in json.loads(text)]

    def num_wanted(self) -> int:
        """Gifts promised but not given."""
        return self._store.add(f"{self._root}/promised", 0) - self._store.add(f"{self._root}/given", 0)

    def give(self, requests: Sequence[Request]) -> None:
        """Requests that the caller has withdrawn from its engine."""
        number = self._store.add(f"{self._root}/given", 1)
        self._store.set(f"{self._root}/gift/{number}", json.dumps([r.request_id for r in requests]))
