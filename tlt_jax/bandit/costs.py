"""What a round costs, per executable: measured where it has run, predicted where it has not.

A cell is what a round's time depends on: batch bucket, cache bucket, verify width V, drafter, its steps and beams. A
cell keeps its newest seconds per round and answers with their median. A cell without measurements is predicted, so that
arms of equal V, which run the same verification, do not each have to be measured:

1. a linear law of seconds (read the weights + tokens verified + drafter steps + cache read) is fitted to all measured
   cells, by relative error, with a first guess of its terms as prior;
2. what that law misses at the cells nearby is added;
3. the result is held between what it must exceed and what must exceed it: a round never gets cheaper with more rows,
   cache, nodes or drafter steps.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tlt_jax.strategy import NGRAM_DRAFTER, NO_DRAFTER, JsonDict, Situation, Strategy

_DRAFTER_RANK = {NO_DRAFTER: 0, NGRAM_DRAFTER: 1}  # the trained drafter's rank is 2
_WINDOW = 31  # measurements kept per cell; odd, so that the median is one of them
_TRUSTED = 3  # measurements after which a cell is believed; fewer may be all warm-up
_NGRAM_FRAC = 0.01  # first guess of an n-gram lookup, reading the weights being 1
_CACHE_FRAC = 1e-5  # first guess of reading one position of one row's cache
_LAW_ERROR = 0.1  # relative error of the linear law, against a prior that may be off by 100 %
_LEAST_FACTOR = 0.05  # no term is fitted below this share of its first guess
_LAW_WEIGHT = 0.5  # weight of the law against what it misses at cells nearby
_UNSURE = 0.8  # how much cheaper than predicted a cell may turn out to be


class Cell(NamedTuple):
    """One executable, as far as its time goes."""

    batch_bucket: int
    kv_bucket: int
    verify_width: int
    drafter: int  # rank: none 0, n-gram 1, trained 2
    draft_steps: int
    topk: int  # beams of the trained drafter, else 0


class Costs(NamedTuple):
    """Measurements by cell."""

    rows: dict[Cell, int]  # row of a cell in what follows
    seconds: tuple[tuple[float, ...], ...]  # newest seconds per round of each cell
    cells: np.ndarray  # f64[cells, 6], the keys as numbers
    medians: np.ndarray  # f64[cells], seconds per round
    counts: np.ndarray  # i64[cells], measurements kept
    spreads: np.ndarray  # f64[cells], median relative distance of the measurements from their median


@dataclasses.dataclass(frozen=True)
class CostShape:
    """First guess of relative costs; reading the weights once costs 1.

    Attributes:
      free_tokens: tokens per forward whose arithmetic takes as long as reading the weights.
      draft_step_frac: one drafter step as a share of reading the weights.
    """

    free_tokens: float
    draft_step_frac: float

    def terms(self, cells: np.ndarray) -> np.ndarray:
        """The guess by term, f64[n, 6], for cells f64[n, 6]: weights, tokens, steps, drafted tokens, cache, n-gram."""
        batch, kv, width, drafter, steps, topk = cells.T
        guess = (
            np.ones_like(batch),
            batch * width / self.free_tokens,
            self.draft_step_frac * steps,
            self.draft_step_frac * steps * batch * topk / self.free_tokens,
            _CACHE_FRAC * batch * kv,
            _NGRAM_FRAC * (drafter == 1),
        )
        return np.stack(guess, axis=1)


def cell_of(strategy: Strategy, situation: Situation) -> Cell:
    """The cell that a strategy runs in."""
    drafter = _DRAFTER_RANK.get(strategy.drafter, 2)
    topk = strategy.topk if drafter == 2 else 0
    return Cell(situation.batch_bucket, situation.kv_bucket, strategy.verify_width, drafter, strategy.draft_steps, topk)


def init_costs() -> Costs:
    return _costs((), ())


def _costs(cells: Sequence[Cell], seconds: Sequence[tuple[float, ...]]) -> Costs:
    return Costs(
        rows={cell: i for i, cell in enumerate(cells)},
        seconds=tuple(seconds),
        cells=np.asarray(cells, float).reshape(len(cells), len(Cell._fields)),
        medians=np.asarray([statistics.median(v) for v in seconds], float),
        counts=np.asarray([len(v) for v in seconds], int),
        spreads=np.asarray([_spread(v) for v in seconds], float),
    )


def observe_cost(costs: Costs, cell: Cell, round_s: float) -> Costs:
    """Adds one measurement, seconds per round."""
    row = costs.rows.get(cell)
    if row is None:
        return _costs((*costs.rows, cell), (*costs.seconds, (round_s,)))
    values = (costs.seconds[row] + (round_s,))[-_WINDOW:]
    medians, counts, spreads = costs.medians.copy(), costs.counts.copy(), costs.spreads.copy()
    medians[row], counts[row], spreads[row] = statistics.median(values), len(values), _spread(values)
    seconds = costs.seconds[:row] + (values,) + costs.seconds[row + 1 :]
    return costs._replace(seconds=seconds, medians=medians, counts=counts, spreads=spreads)


def _spread(values: tuple[float, ...]) -> float:
    middle = statistics.median(values)
    return statistics.median(abs(v - middle) for v in values) / middle


def predict_costs(costs: Costs, cells: Sequence[Cell], shape: CostShape) -> tuple[np.ndarray, np.ndarray]:
    """Seconds per round of cells: the estimates, and the least that each may turn out to be; both f64[n].

    A trusted cell may turn out one standard error cheaper, the error being taken from the spread that all cells show.
    Without any measurement both are relative, reading the weights once being 1.
    """
    targets = np.asarray(cells, float)
    if not costs.rows:
        estimate = shape.terms(targets).sum(1)
        return estimate, _UNSURE * estimate
    rows = np.asarray([costs.rows.get(cell, -1) for cell in cells])
    own = np.where(rows >= 0, costs.medians[rows], np.inf)
    counts = np.where(rows >= 0, costs.counts[rows], 0)
    least_own = own * (1.0 - np.minimum(_median_error(costs) / np.sqrt(np.maximum(counts, 1)), 0.5))
    if counts.min() >= _TRUSTED:
        return own, least_own
    predicted, least_above = _predict_from_others(costs, targets, rows, shape)
    # A few values of its own may be all warm-up: they are believed, but what the others say is still possible.
    estimate = np.where(counts >= _TRUSTED, own, np.where(counts > 0, np.minimum(own, least_above), predicted))
    possible = np.where(counts > 0, predicted, _UNSURE * predicted)
    return estimate, np.where(counts >= _TRUSTED, least_own, np.minimum(estimate, possible))


def _median_error(costs: Costs) -> float:
    """Relative standard error of a median, times the root of its measurements; what all trusted cells show."""
    trusted = costs.counts >= _TRUSTED
    if not trusted.any():
        return 0.0
    sd = 1.48 * float(np.average(costs.spreads[trusted], weights=costs.counts[trusted]))
    return 1.25 * sd


def _predict_from_others(
    costs: Costs, targets: np.ndarray, rows: np.ndarray, shape: CostShape
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds per round without a cell's own measurements, and the least of what must cost more; f64[n] each."""
    is_own = np.arange(len(costs.medians)) == rows[:, None]
    difference = costs.cells - targets[:, None]  # [n, cells, 6]
    below, above = (difference <= 0).all(2) & ~is_own, (difference >= 0).all(2) & ~is_own
    low = np.where(below, costs.medians, 0.0).max(1)
    high = np.where(above, costs.medians, np.inf).min(1)
    terms = shape.terms(costs.cells)
    law = _fit(terms, costs.medians)
    missed = np.log(costs.medians / (terms @ law))
    weight = np.where(is_own, 0.0, np.exp(-_distance(costs.cells, targets)))
    correction = np.exp((weight * missed).sum(1) / (weight.sum(1) + _LAW_WEIGHT))
    return np.minimum(np.maximum((shape.terms(targets) @ law) * correction, low), high), high


def _fit(terms: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Seconds per unit of each term, f64[terms]: ridge regression of relative errors around a scaled first guess."""
    scale = float(np.median(seconds / terms.sum(1)))
    relative = terms * (scale / seconds[:, None] / _LAW_ERROR)
    num_terms = terms.shape[1]
    gram = relative.T @ relative + np.eye(num_terms)
    factors = np.linalg.solve(gram, relative.sum(0) / _LAW_ERROR + np.ones(num_terms))
    return scale * np.maximum(factors, _LEAST_FACTOR)


def _distance(cells: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """How unlike cells f64[cells, 6] are to targets f64[n, 6]; buckets and widths count in doublings."""
    doublings = np.abs(np.log2(cells[:, :3]) - np.log2(targets[:, None, :3])) @ np.asarray([1.0, 0.5, 1.0])
    difference = cells[:, 3:] - targets[:, None, 3:]
    return doublings + (difference[..., 0] != 0) + 0.25 * np.abs(difference[..., 1:]).sum(2)


def costs_to_json(costs: Costs) -> list[JsonDict]:
    return [{"cell": list(cell), "seconds": list(costs.seconds[row])} for cell, row in costs.rows.items()]


def costs_from_json(saved: list[JsonDict]) -> Costs:
    cells = [Cell(*(int(x) for x in row["cell"])) for row in saved]
    return _costs(cells, [tuple(float(x) for x in row["seconds"]) for row in saved])
