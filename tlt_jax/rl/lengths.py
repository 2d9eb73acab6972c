"""Response lengths drawn from a law instead of left to the model: for measuring rollouts with a given tail.

The law "reasoning" has the quantiles of output lengths of a reasoning model in production (half under 792 tokens, a
tenth over 3,432, a hundredth over 12,607, at most 32,768), log-linear in between, scaled so that the longest is the
cap of a run. A length belongs to the run's seed and the request's id, as the request's noise does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tlt_jax.types import Request

# Share of responses -> tokens as a share of the longest.
LAWS = {"reasoning": ((0.0, 0.5, 0.9, 0.99, 1.0), tuple(n / 32_768 for n in (64, 792, 3_432, 12_607, 32_768)))}


def draw_len(law: str, max_tokens: int, seed: int, request_id: int) -> int:
    """Tokens of one response, in [1, max_tokens]."""
    shares, lens = LAWS[law]
    share = np.random.default_rng([seed, request_id]).random()
    return max(1, round(max_tokens * math.exp(np.interp(share, shares, np.log(lens)))))


def cut_to_law(requests: Sequence[Request], law: str, seed: int) -> list[Request]:
    """The same requests, each to stop at its drawn length and no earlier; as they are where `law` is empty."""
    if not law:
        return list(requests)

    def cut(request: Request) -> Request:
        max_tokens = draw_len(law, request.sampling.max_tokens, seed, request.request_id)
        sampling = dataclasses.replace(request.sampling, max_tokens=max_tokens, ignore_eos=True, stop=())
        return dataclasses.replace(request, sampling=dataclasses.replace(sampling, stop_token_ids=()))

    return [cut(request) for request in requests]
