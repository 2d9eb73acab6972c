"""Model-free drafts: what followed the same n-gram earlier, in this response or in another one to the same prompt.

Rollouts of one prompt repeat themselves and each other. The texts of a prompt's requests share an index from every
n-gram to the token that followed its latest occurrence; finished responses stay in it for later epochs. A draft is
the continuation of the longest suffix that occurs with a follower; among occurrences of equal length the latest wins,
whosever text it is in. Drafts are only ever proposals: verification decides, so neither rule changes a token.

Host only. `propose` changes nothing.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

Prompt = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NgramConfig:
    """Which n-grams are looked up, and how much is remembered.

    Attributes:
      max_n: longest suffix looked up, in tokens.
      min_n: shortest.
      max_prompts: prompts whose texts are kept once no request of theirs is running; the least recently used go first.
      max_responses: finished responses kept per prompt; the oldest go first.
    """

    max_n: int = 4
    min_n: int = 2
    max_prompts: int = 4096
    max_responses: int = 16

    def __post_init__(self):
        checks = (
            ("min_n", self.min_n >= 1, ">= 1"),
            ("max_n", self.max_n >= self.min_n, f">= min_n {self.min_n}"),
            ("max_prompts", self.max_prompts >= 1, ">= 1"),
            ("max_responses", self.max_responses >= 1, ">= 1"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise ValueError(f"ngram.{name}: got {getattr(self, name)}, expected {expected}")


class _Group:
    """The texts of one prompt, and where each n-gram was followed by something last."""

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}  # request id -> prompt and response so far
        self.finished: collections.deque[int] = collections.deque()
        self.latest: dict[Prompt, tuple[int, int]] = {}  # n-gram -> request id, place of the follower

    def drop(self, request_id: int) -> None:
        """Forgets a text and what points into it."""
        del self.texts[request_id]
        self.latest = {gram: place for gram, place in self.latest.items() if place[0] != request_id}


class NgramDrafter:
    """Indexes the texts of running and finished requests, and proposes continuations."""

    def __init__(self, config: NgramConfig):
        self.config = config
        self._groups: collections.OrderedDict[Prompt, _Group] = collections.OrderedDict()
        self._prompt_of: dict[int, Prompt] = {}  # running requests

    def start(self, request_id: int, prompt_ids: Prompt) -> None:
        """A request begins; its prompt's n-grams are indexed with its text.

        A finished request of the same id and prompt is forgotten: it is being generated again.

        Raises:
          ValueError: a request of that id is running.
        """
        if request_id in self._prompt_of:
            raise ValueError(f"ngram: got request {request_id} twice, expected distinct ids")
        group = self._groups.setdefault(prompt_ids, _Group())
        if request_id in group.texts:
            group.drop(request_id)
            group.finished.remove(request_id)
        self._groups.move_to_end(prompt_ids)
        self._prompt_of[request_id] = prompt_ids
        group.texts[request_id] = []
        self.append(request_id, prompt_ids)

    def append(self, request_id: int, token_ids: Iterable[int]) -> None:
        """Committed tokens of a running request."""
        group = self._groups[self._prompt_of[request_id]]
        text = group.texts[request_id]
        for token in token_ids:
            end = len(text)
            for n in range(self.config.min_n, min(self.config.max_n, end) + 1):
                group.latest[tuple(text[end - n :])] = (request_id, end)
            text.append(token)

    def finish(self, request_id: int) -> None:
        """The request is over; its text stays, within the bounds of the configuration."""
        group = self._groups[self._prompt_of.pop(request_id)]
        group.finished.append(request_id)
        if len(group.finished) > self.config.max_responses:
            group.drop(group.finished.popleft())
        running = set(self._prompt_of.values())
        for prompt_ids in [p for p in self._groups if p not in running][: -self.config.max_prompts]:
            del self._groups[prompt_ids]

    def propose(self, request_id: int, max_tokens: int) -> Sequence[int]:
        """At most `max_tokens` tokens that may follow the request's text; empty where nothing matches."""
        group = self._groups[self._prompt_of[request_id]]
        text = group.texts[request_id]
        for n in range(min(self.config.max_n, len(text)), self.config.min_n - 1, -1):
            place = group.latest.get(tuple(text[-n:]))
            if place is not None:
                owner, follower = place
                return group.texts[owner][follower : follower + max(max_tokens, 0)]
        return []
