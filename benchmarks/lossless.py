"""`launch.bench lossless`: tokens with speculation against tokens without, and every difference looked into.

A difference is harmless if it is a tie that rounding decides: the scores (log-probability plus noise) of the two tokens
in question, from one forward over the common prefix, lie within `NEAR_TIE` of each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.models.config import ModelConfig
from tlt_jax.models.transformer import compute_logits, forward
from tlt_jax.rollout.noise import gumbel, request_key
from tlt_jax.types import Completion, Params, Request

NEAR_TIE = 1e-4


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two responses to one request part, and how far apart the scores of their tokens are there."""

    request_id: int
    position: int  # in the response
    gap: float


def compare(
    plain: Sequence[Completion],
    other: Sequence[Completion],
    requests: Sequence[Request],
    model: ModelConfig,
    params: Params,
    seed: int,
) -> list[Difference]:
    """The first difference of every response that has one.

    Raises:
      ValueError: a request with truncated sampling, whose scores are not looked into here.
    """
    found = []
    for a, b, request in zip(plain, other, requests, strict=True):
        if a.token_ids.tolist() == b.token_ids.tolist():
            continue
        if request.sampling.truncates:
            raise ValueError(f"request {a.request_id}: got truncated sampling with different tokens, expected none")
        n = min(len(a.token_ids), len(b.token_ids))
        unequal = np.flatnonzero(a.token_ids[:n] != b.token_ids[:n])
        if not len(unequal):  # one goes on where the other ended: not a matter of rounding
            found.append(Difference(a.request_id, n, float("inf")))
            continue
        at = int(unequal[0])
        score = _scores(model, params, [*a.prompt_ids, *a.token_ids[:at].tolist()], request, seed)
        gap = abs(float(score[a.token_ids[at]] - score[b.token_ids[at]]))
        found.append(Difference(a.request_id, at, gap))
    return found


def _scores(model: ModelConfig, params: Params, prefix: list[int], request: Request, seed: int) -> np.ndarray:
    """f32[V], what the next token is the arg-max of."""
    tokens = jnp.asarray(prefix)[None]
    hidden = forward(params, model, tokens, jnp.arange(len(prefix))[None]).hidden[0, -1]
    logits = compute_logits(params, model, hidden)
    if request.sampling.temperature == 0:
        return np.asarray(logits)
    key = jnp.asarray(request_key(seed, request.request_id))
    noise = gumbel(key, jnp.int32(len(prefix)), model.vocab_size)
    return np.asarray(jax.nn.log_softmax(logits / request.sampling.temperature) + noise)


def summary(num_tokens: int, differences: Sequence[Difference]) -> dict[str, Any]:
    """Counts, and the differences themselves."""
    return {
        "num_tokens": num_tokens,
        "num_differences": len(differences),
        "per_100k_tokens": 1e5 * len(differences) / max(num_tokens, 1),
        "all_near_ties": all(d.gap < NEAR_TIE for d in differences),
        "differences": [dataclasses.asdict(d) for d in differences],
    }
