"""From requests to the arrays that programs take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tlt_jax.models.config import ModelConfig
from tlt_jax.rollout import steps
from tlt_jax.rollout.config import RolloutConfig
from tlt_jax.rollout.sampling import SamplingArrays
from tlt_jax.rollout.scheduler import Active
from tlt_jax.types import Request


def check_request(r: Request, model: ModelConfig, config: RolloutConfig, *, has_text: bool) -> None:
    """Raises ValueError, with request id, got and expected, for a request that cannot be generated.

    Args:
      r: the request.
      model: the target's configuration.
      config: the engine's.
      has_text: whether the engine can turn tokens into text, as stop strings need.
    """
    if not r.prompt_ids:
        raise ValueError(f"request {r.request_id}: got an empty prompt, expected at least one token")
    if min(r.prompt_ids) < 0 or max(r.prompt_ids) >= model.vocab_size:
        raise ValueError(
            f"request {r.request_id}: got token ids {min(r.prompt_ids)}..{max(r.prompt_ids)}, expected ids in "
            f"[0, {model.vocab_size}); tokenize with this model's tokenizer"
        )
    if len(r.prompt_ids) + r.sampling.max_tokens > config.max_len:
        raise ValueError(
            f"request {r.request_id}: got {len(r.prompt_ids)} prompt tokens and max_tokens "
            f"{r.sampling.max_tokens}, expected at most {config.max_len} in all; raise "
            "rollout.max_len, lower sampling.max_tokens or shorten the prompt"
        )
    num_stop_ids = len(stop_ids(r, model))
    if num_stop_ids > steps.MAX_STOP_IDS:
        raise ValueError(f"request {r.request_id}: got {num_stop_ids} stop ids, expected at most {steps.MAX_STOP_IDS}")
    if r.sampling.stop and not (has_text and all(r.sampling.stop)):
        raise ValueError(
            f"request {r.request_id}: got stop strings {r.sampling.stop}, expected non-empty strings and an engine "
            "made with decode_text"
        )


def stop_ids(r: Request, model: ModelConfig) -> tuple[int, ...]:
    """Ids that end the response: the model's own, unless they are to be ignored, and the request's."""
    own = () if r.sampling.ignore_eos else model.eos_token_ids
    return tuple(dict.fromkeys((*own, *r.sampling.stop_token_ids)))


def host_rows(active: Sequence[Active | None], vocab_size: int) -> steps.Rows:
    """Who sits where, as host arrays; None is a row that is not alive."""

    def column(get: Callable[[Active], Any], empty: Any, dtype: Any) -> Any:
        return np.asarray([empty if a is None else get(a) for a in active], dtype)

    ids: Any = np.full((len(active), steps.MAX_STOP_IDS), -1, np.int32)
    for row, a in enumerate(active):
        if a is not None:
            ids[row, : len(a.stop_ids)] = a.stop_ids
    sampling = SamplingArrays(
        key=column(lambda a: a.key, np.zeros(2, np.uint32), np.uint32),
        temperature=column(lambda a: a.request.sampling.temperature, 0.0, np.float32),
        top_k=column(lambda a: min(a.request.sampling.top_k, vocab_size), 0, np.int32),
        top_p=column(lambda a: a.request.sampling.top_p, 1.0, np.float32),
        min_p=column(lambda a: a.request.sampling.min_p, 0.0, np.float32),
    )
    return steps.Rows(
        token=column(lambda a: a.newest, 0, np.int32),
        length=column(lambda a: a.length, 0, np.int32),
        limit=column(lambda a: a.limit, 0, np.int32),
        live=column(lambda a: True, False, np.bool_),
        stop_ids=ids,
        sampling=sampling,
    )
