"""Which strategies are arms at which live batch.

An `ArmTable` groups strategies by live batch: bucket i holds live batches from `thresholds[i]` up to the next
threshold, the last one has no upper end.

References:
  "Taming the Long Tail", arXiv 2511.16665 (buckets).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import re
from collections.abc import Iterable

from tlt_jax.strategy import Strategy, parse


@dataclasses.dataclass(frozen=True)
class ArmTable:
    """Arms by live batch.

    Buffers are to be sized by `max_verify_width` and `max_depth`, the largest over all arms: a switch may come at any
    round, the last before the end of the cache included.
    """

    thresholds: tuple[int, ...]  # smallest live batch of each bucket, increasing
    arms: tuple[tuple[Strategy, ...], ...]  # of each bucket, in the order that ties prefer

    def __post_init__(self):
        t = self.thresholds
        if not t or len(t) != len(self.arms):
            raise ValueError(
                f"arms: got {len(t)} thresholds for {len(self.arms)} groups of strategies, expected one threshold per "
                "group"
            )
        if t[0] < 1 or any(a >= b for a, b in itertools.pairwise(t)):
            raise ValueError(f"arms: got thresholds {list(t)}, expected increasing live batches from 1 on")
        for threshold, arms in zip(t, self.arms, strict=True):
            names = [a.name for a in arms]
            if not arms or len(set(names)) != len(names):
                raise ValueError(f"arms from live batch {threshold}: got {names}, expected one or more, each once")

    def bucket(self, live_batch: int) -> int:
        """Index of the bucket that holds `live_batch`.

        Raises:
          ValueError: below the first threshold.
        """
        if live_batch < self.thresholds[0]:
            raise ValueError(
                f"live batch: got {live_batch}, expected at least {self.thresholds[0]}, the first threshold of the "
                f"arms {self.text!r}; add a group for smaller batches"
            )
        return bisect.bisect_right(self.thresholds, live_batch) - 1

    def at(self, live_batch: int) -> tuple[Strategy, ...]:
        """The arms at a live batch."""
        return self.arms[self.bucket(live_batch)]

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """Every strategy once."""
        return tuple(dict.fromkeys(s for arms in self.arms for s in arms))

    @property
    def max_verify_width(self) -> int:
        return max(s.verify_width for s in self.strategies)

    @property
    def max_depth(self) -> int:
        return max(s.depth for s in self.strategies)

    @property
    def text(self) -> str:
        """The form that `parse_arms` reads."""
        groups = zip(self.thresholds, self.arms, strict=True)
        return "; ".join(f"{threshold}: {', '.join(s.name for s in arms)}" for threshold, arms in groups)


def group_by_verify_width(strategies: Iterable[Strategy], thresholds: Iterable[int]) -> ArmTable:
    """The paper's table: one bucket per verify width, the widest at the smallest live batch.

    Raises:
      ValueError: when there are not as many widths as thresholds.
    """
    by_width: dict[int, list[Strategy]] = {}
    for s in strategies:
        by_width.setdefault(s.verify_width, []).append(s)
    widths, thresholds = sorted(by_width, reverse=True), tuple(thresholds)
    if len(widths) != len(thresholds):
        raise ValueError(
            f"arms: got {len(thresholds)} thresholds {list(thresholds)} for the verify widths {widths}, expected one "
            "each; add or remove thresholds"
        )
    return ArmTable(thresholds, tuple(tuple(by_width[v]) for v in widths))


# One arm per bucket: what the authors release.
PAPER_ARMS = group_by_verify_width(map(parse, ("8_4_48", "8_4_32", "8_4_16", "8_4_8")), (1, 2, 5, 21)).text
# Verifying rides on the read of the weights while batch bucket x V is at most about 16, so it is 4, 8 or 16; where even
# V = 2 is above that, the shortest drafts stay as arms, for text that is all copies.
CPU_ARMS = (
    "1: plain, ngram_3, ngram_7, ngram_15, chain_3, chain_7, 4_2_8, 6_4_16; "
    "2: plain, ngram_1, ngram_3, ngram_7, chain_1, chain_3, chain_7, 3_2_8; "
    "3: plain, ngram_1, ngram_3, chain_1, chain_3, 2_2_4; "
    "5: plain, ngram_1, chain_1; "
    "9: plain, ngram_1, chain_1; "
    "17: plain, ngram_1"
)
# The paper's thresholds and widths, with the neighbouring widths that its own measurements show to win on some models.
GPU_ARMS = (
    "1: plain, ngram_7, ngram_15, chain_7, 8_4_32, 8_4_48, 8_4_64; "
    "2: plain, ngram_7, ngram_15, chain_7, 8_4_16, 8_4_32, 8_4_48; "
    "5: plain, ngram_3, ngram_7, chain_3, chain_7, 8_4_8, 8_4_16, 8_4_32; "
    "21: plain, ngram_3, chain_3, 8_4_8, 8_4_16; "
    "65: plain, ngram_1, chain_1, chain_3"
)
PRESETS = {"cpu": CPU_ARMS, "gpu": GPU_ARMS, "paper": PAPER_ARMS}


def parse_arms(text: str) -> ArmTable:
    """The table of a preset's name ("cpu", "gpu", "paper") or of a text such as `1: plain, 8_4_48; 9: plain, ngram_3`.

    Raises:
      ValueError: on an unknown preset, a group without threshold, or a bad strategy name (the group is named).
    """
    text = PRESETS.get(text.strip(), text)
    thresholds, arms = [], []
    for group in filter(None, (g.strip() for g in text.split(";"))):
        threshold, colon, names = group.partition(":")
        if not colon or not re.fullmatch("[1-9][0-9]*", threshold.strip()):
            raise ValueError(
                f"arms: got {group!r}, expected one of {sorted(PRESETS)} or groups such as '1: plain, 8_4_48; "
                "9: plain, ngram_3', each led by its smallest live batch"
            )
        thresholds.append(int(threshold))
        try:
            arms.append(tuple(parse(name.strip()) for name in names.split(",")))
        except ValueError as e:
            raise ValueError(f"arms from live batch {threshold.strip()}: {e}") from e
    return ArmTable(tuple(thresholds), tuple(arms))
