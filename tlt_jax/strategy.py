"""Strategies of a decoding round, and what the engine and whoever chooses between them say to each other.

A strategy says who drafts, how deep and how wide, and how many nodes the target verifies:

    plain      the target alone, one token per round
    ngram_k    k tokens copied from earlier text, verified as a chain
    chain_k    k tokens of the drafter, one beam
    d_k_v      the triple depth_topk_verify, `8_4_48` say: a draft tree of depth d, k children per beam, the best v - 1
               nodes verified together with the root

The verify width V counts the root, so a chain of k has V = k + 1.

The life of a round, or of several rounds in one device call:
  1. `select(state, situation) -> (choice, state)` before the call;
  2. the engine runs at most `choice.max_rounds` rounds of `choice.strategy`;
  3. `update(state, outcome) -> state` once the call has been collected. Calls may overlap: `select` may come again
     before the `update` of the call in flight.

A policy is a NamedTuple of pure functions over a NamedTuple state; equal calls give equal choices, on every machine.
Its input holds wall-clock times, so where several hosts share one engine, one of them decides and tells the others.
What it chooses never changes a token, only when the token comes.

References:
  Li et al., "EAGLE-2", EMNLP 2024 (trees). "Taming the Long Tail", arXiv 2511.16665 (triples).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

State = Any  # a NamedTuple of the policy's own
JsonDict = dict[str, Any]

PLAIN_KIND, NGRAM_KIND, CHAIN_KIND, TREE_KIND = "plain", "ngram", "chain", "tree"
# What a strategy drafts with.
NO_DRAFTER, NGRAM_DRAFTER, LAYER_DRAFTER = "none", "ngram", "layer"
_DRAFTER = {
    PLAIN_KIND: NO_DRAFTER,
    NGRAM_KIND: NGRAM_DRAFTER,
    CHAIN_KIND: LAYER_DRAFTER,
    TREE_KIND: LAYER_DRAFTER,
}
_NAMES = "'plain', 'ngram_K', 'chain_K' or 'DEPTH_TOPK_VERIFY' (8_4_48 say), numbers >= 1 without leading zeros"
_NUMBER = "([1-9][0-9]*)"


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How one round drafts and verifies.

    Attributes:
      kind: "plain", "ngram", "chain" or "tree".
      depth: most tokens that a round can accept; 0 for plain.
      topk: children drafted per beam; 0 for plain, 1 for n-gram and chain.
      verify_width: V, nodes of the target's forward, root included.
    """

    kind: str
    depth: int
    topk: int
    verify_width: int

    def __post_init__(self):
        d, k, v = self.depth, self.topk, self.verify_width
        if self.kind == PLAIN_KIND:
            if (d, k, v) != (0, 0, 1):
                raise ValueError(f"plain: got depth {d}, topk {k}, verify width {v}, expected 0, 0, 1; use PLAIN")
        elif self.kind in (NGRAM_KIND, CHAIN_KIND):
            if d < 1 or k != 1 or v != d + 1:
                raise ValueError(
                    f"{self.kind}: got depth {d}, topk {k}, verify width {v}, expected depth >= 1, topk 1 and verify "
                    f"width depth + 1; use {self.kind}({max(d, 1)})"
                )
        elif self.kind == TREE_KIND:
            _check_tree(d, k, v)
        else:
            raise ValueError(f"kind: got {self.kind!r}, expected 'plain', 'ngram', 'chain' or 'tree'")

    @property
    def name(self) -> str:
        """The canonical name; `parse` inverts it."""
        if self.kind == PLAIN_KIND:
            return PLAIN_KIND
        if self.kind == TREE_KIND:
            return f"{self.depth}_{self.topk}_{self.verify_width}"
        return f"{self.kind}_{self.depth}"

    @property
    def drafter(self) -> str:
        """Who drafts: "none", "ngram" or "layer" (the trained one)."""
        return _DRAFTER[self.kind]

    @property
    def draft_steps(self) -> int:
        """Forward passes of the trained drafter in one round."""
        return self.depth if self.drafter == LAYER_DRAFTER else 0


def _check_tree(depth: int, topk: int, verify_width: int) -> None:
    name = f"{depth}_{topk}_{verify_width}"
    if depth < 1 or topk < 2:
        raise ValueError(
            f"tree {name}: got depth {depth}, topk {topk}, expected depth >= 1 and topk >= 2; with one beam use chain_K"
        )
    reachable = num_candidates(depth, topk)
    if not 2 <= verify_width <= reachable + 1:
        raise ValueError(
            f"tree {name}: got verify width {verify_width}, expected 2 to {reachable + 1}: depth {depth} with topk "
            f"{topk} drafts {reachable} nodes, and the root is one more; raise depth or topk, or lower verify"
        )


def num_candidates(depth: int, topk: int) -> int:
    """Nodes that a draft tree proposes: topk under the root, then topk children of each of topk beams per level."""
    return topk + (depth - 1) * topk * topk


PLAIN = Strategy(PLAIN_KIND, 0, 0, 1)


def ngram(num_tokens: int) -> Strategy:
    return Strategy(NGRAM_KIND, num_tokens, 1, num_tokens + 1)


def chain(num_tokens: int) -> Strategy:
    return Strategy(CHAIN_KIND, num_tokens, 1, num_tokens + 1)


def tree(depth: int, topk: int, verify_width: int) -> Strategy:
    return Strategy(TREE_KIND, depth, topk, verify_width)


def parse(name: str) -> Strategy:
    """The strategy of a name. `8_1_9` is the chain of 8 and gets its name.

    Raises:
      ValueError: on a name of no known form, or one whose numbers make no strategy.
    """
    if name == PLAIN_KIND:
        return PLAIN
    if m := re.fullmatch(f"(ngram|chain)_{_NUMBER}", name):
        num_tokens = int(m[2])
        return Strategy(m[1], num_tokens, 1, num_tokens + 1)
    if m := re.fullmatch("_".join([_NUMBER] * 3), name):
        depth, topk, verify_width = (int(x) for x in m.groups())
        if topk > 1:
            return tree(depth, topk, verify_width)
        if verify_width != depth + 1:
            raise ValueError(
                f"strategy {name!r}: got verify width {verify_width} for one beam of depth {depth}, expected "
                f"{depth + 1}; use chain_{depth}"
            )
        return chain(depth)
    raise ValueError(f"strategy: got {name!r}, expected {_NAMES}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Situation:
    """What is known when a strategy is to be chosen.

    Attributes:
      live_batch: rows alive.
      batch_bucket: rows of the executable, at least `live_batch`.
      kv_bucket: cache positions of the executable.
      policy_version: of the target's weights.
      drafter_version: of the drafter's weights; None while there is no drafter, and then no chain or tree is chosen.
      straggler_id: request id of the row that is expected to finish last, where that is known.
    """

    live_batch: int
    batch_bucket: int
    kv_bucket: int
    policy_version: int = 0
    drafter_version: int | None = None
    straggler_id: int | None = None

    def __post_init__(self):
        if not 1 <= self.live_batch <= self.batch_bucket:
            raise ValueError(
                f"situation: got live batch {self.live_batch} in batch bucket {self.batch_bucket}, expected "
                "1 <= live <= bucket"
            )

    def allows(self, strategy: Strategy) -> bool:
        return self.drafter_version is not None or strategy.drafter != LAYER_DRAFTER


@dataclasses.dataclass(frozen=True)
class Choice:
    """What to run next.

    Attributes:
      strategy: the arm.
      max_rounds: ask again after at most this many rounds; None leaves it to the engine.
      is_probe: True where the arm is played to learn about it rather than because it is thought best.
      charged_s: seconds that the exploration account was charged for a probe, until its outcome is known.
      token_s: seconds per round and token that the best arm was expected to need, for a probe.
    """

    strategy: Strategy
    max_rounds: int | None = None
    is_probe: bool = False
    charged_s: float = 0.0
    token_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What running a choice gave.

    Attributes:
      situation: as given to `select`.
      choice: as returned by it.
      committed: i32[rounds, rows], tokens committed by each row in each round, bonus token included; 0 where the row
        was not alive. Without rows (i32[rounds, 0], a warm-up) only the cost is learnt.
      elapsed_s: wall-clock seconds of all these rounds.
      straggler_row: column of the straggler in `committed`, if it was in this call.
    """

    situation: Situation
    choice: Choice
    committed: np.ndarray
    elapsed_s: float
    straggler_row: int | None = None

    def __post_init__(self):
        if self.committed.ndim != 2 or self.committed.shape[0] < 1 or self.committed.dtype.kind not in "iu":
            raise ValueError(
                f"outcome.committed: got {self.committed.dtype}{list(self.committed.shape)}, expected integers "
                "[rounds, rows] with at least one round"
            )
        if not self.elapsed_s > 0.0:
            raise ValueError(
                f"outcome.elapsed_s: got {self.elapsed_s}, expected seconds > 0; leave out calls without rounds"
            )

    @property
    def num_rounds(self) -> int:
        return self.committed.shape[0]


class Policy(NamedTuple):
    """Pure functions of one policy."""

    arms: Callable[[int], tuple[Strategy, ...]]  # what may be chosen at a live batch, with a drafter or without
    init: Callable[[], State]
    select: Callable[[State, Situation], tuple[Choice, State]]
    update: Callable[[State, Outcome], State]
    to_json: Callable[[State], JsonDict]  # plain dicts, lists, numbers, strings; floats survive json exactly
    from_json: Callable[[JsonDict], State]
