"""Feature traces from a plain forward of the target over prompt and response.

For responses whose rollout kept no features: texts from a file, or of an engine that had tracing off. Life of `read`:
1. Sequences are packed, longest first, into rows of one power-of-two length, apart by segment ids.
2. Each group of rows is one forward of fixed shape; features become bf16 on the device and come to the host.
3. Every sequence gets its positions cut out; a copy, so that no trace keeps a whole batch alive.

Any forward over packed rows can be cut up the same way: `cut_traces`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.drafter.packing import first_fit
from tlt_jax.models.config import ModelConfig
from tlt_jax.models.transformer import forward
from tlt_jax.types import FeatureTrace, Params

_MIN_ROW_LEN = 128


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """A prompt and its response, without features yet."""

    request_id: int
    token_ids: np.ndarray  # i32[n] prompt, then response
    prompt_len: int
    step: int = 0


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a sequence lies in packed rows: positions 0 ... n-1 at `row`, from `offset` on."""

    sequence: Recorded
    row: int
    offset: int


Read = Callable[..., Iterator[FeatureTrace]]


def make_reader(
    model: ModelConfig,
    feature_layers: Sequence[int] = (),
    *,
    batch_tokens: int = 4096,
    context_len: int | None = None,
) -> Read:
    """Returns `read(params, sequences, policy_version=0)`, an iterator over their traces, longest first.

    Args:
      model: the target.
      feature_layers: as in `DraftConfig`; empty for the last hidden state.
      batch_tokens: token slots of a forward; a longer sequence has a forward of its own.
      context_len: positions kept before the last one of the prompt; None keeps all.
    """
    taps = tuple(feature_layers)

    @jax.jit
    def run(params: Params, tokens_BT, positions_BT, segment_ids_BT):
        out = forward(params, model, tokens_BT, positions_BT, segment_ids_BT=segment_ids_BT, feature_layers=taps)
        hidden_BTD = out.hidden.astype(jnp.bfloat16)
        if not taps:
            return hidden_BTD, None
        return jnp.concatenate(out.features, axis=-1).astype(jnp.bfloat16), hidden_BTD

    def read(params: Params, sequences: Sequence[Recorded], policy_version: int = 0) -> Iterator[FeatureTrace]:
        for arrays, places in _pack(sequences, batch_tokens):
            features_BTD, hidden_BTD = jax.device_get(run(params, *arrays))
            yield from cut_traces(features_BTD, hidden_BTD, places, policy_version, context_len)

    return read


def cut_traces(
    features_BTD: np.ndarray,
    hidden_BTD: np.ndarray | None,
    places: Sequence[Place],
    policy_version: int,
    context_len: int | None = None,
) -> Iterator[FeatureTrace]:
    """Traces of the sequences that lie in packed rows.

    Args:
      features_BTD: bf16, what the drafter reads.
      hidden_BTD: bf16, last hidden states where the features are something else.
      places: of the sequences.
      policy_version: of the weights that made the features.
      context_len: as in `make_reader`.
    """
    for place in places:
        sequence = place.sequence
        start = 0 if context_len is None else max(sequence.prompt_len - 1 - context_len, 0)
        # The last token was never read by the rollout either.
        at = slice(place.offset + start, place.offset + len(sequence.token_ids) - 1)
        yield FeatureTrace(
            request_id=sequence.request_id,
            token_ids=sequence.token_ids,
            prompt_len=sequence.prompt_len,
            features=features_BTD[place.row, at].copy(),
            hidden=None if hidden_BTD is None else hidden_BTD[place.row, at].copy(),
            start=start,
            step=sequence.step,
            policy_version=policy_version,
        )


def _pack(
    sequences: Sequence[Recorded], batch_tokens: int
) -> Iterator[tuple[tuple[np.ndarray, np.ndarray, np.ndarray], list[Place]]]:
    """(tokens, positions, segment ids), each i32[B,T], and what lies where; few different shapes."""
    groups: dict[int, list[Recorded]] = {}
    for sequence in sorted(sequences, key=lambda s: -len(s.token_ids)):
        longest = max(batch_tokens // 8, _MIN_ROW_LEN)  # short sequences share rows of this length
        row_len = _power_of_two(max(len(sequence.token_ids), longest))
        groups.setdefault(row_len, []).append(sequence)
    for row_len, members in groups.items():
        num_rows = max(batch_tokens // row_len, 1)
        bins = first_fit([len(s.token_ids) for s in members], row_len)
        for i in range(0, len(bins), num_rows):
            yield _fill([[members[j] for j in row] for row in bins[i : i + num_rows]], num_rows, row_len)


def _fill(rows: list[list[Recorded]], num_rows: int, row_len: int):
    tokens, positions, segment_ids = (np.zeros((num_rows, row_len), np.int32) for _ in range(3))
    places = []
    for b, row in enumerate(rows):
        t = 0
        for segment, sequence in enumerate(row, 1):
            at = slice(t, t + len(sequence.token_ids))
            tokens[b, at], positions[b, at] = sequence.token_ids, np.arange(len(sequence.token_ids))
            segment_ids[b, at] = segment
            places.append(Place(sequence, b, t))
            t = at.stop
    return (tokens, positions, segment_ids), places


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
