"""Dimension key, and the plain messages that packages exchange.

Dimension key. In traced code an array of known rank ends in its letters, as in `logits_BTV`:

    B  sequences (rows)          T  query positions        S  cache positions
    D  model width               N  query heads            K  key/value heads
    G  query heads per kv head   H  head width             F  feed-forward width
    V  vocabulary                L  layers                 W  draft-tree nodes
    P  prompts                   R  rollouts per prompt    A  bandit arms
    U  unroll steps of a drafter

Scalars, pytrees, host lists and dataclass fields carry no suffix; a field says its shape in a comment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Params = dict[str, Any]  # nested dict of jax.Array, weights as [out, in]

FINISH_STOP = "stop"
FINISH_LENGTH = "length"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
      temperature: divides the logits; 0 is plain arg-max. Otherwise in [1e-4, 1e4], so that f32 logits stay finite
        and masked ones stay masked.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of most likely tokens whose mass reaches `top_p`; 1.0 keeps all.
      min_p: keep tokens with probability at least `min_p` times the largest; 0.0 keeps all.
      max_tokens: most new tokens, the stop token included.
      stop_token_ids: ids that end the response besides the model's own; the id is kept as the last token.
      stop: strings that end the response; the response is cut after the token that completes one.
      ignore_eos: the model's own stop ids do not end the response.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        checks = (
            ("temperature", self.temperature == 0.0 or 1e-4 <= self.temperature <= 1e4, "0 or in [1e-4, 1e4]"),
            ("top_k", self.top_k >= 0, ">= 0 (0 keeps all)"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("min_p", 0.0 <= self.min_p < 1.0, "in [0, 1)"),
            ("max_tokens", self.max_tokens >= 1, ">= 1"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise ValueError(f"sampling.{name}: got {getattr(self, name)}, expected {expected}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)  # "ab" is one string, not two
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def truncates(self) -> bool:
        """True where top-k, top-p or min-p cut the law that tokens are drawn from."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One response to generate.

    `request_id` in [0, 2^64) seeds the request's noise together with the run's seed, so equal ids give equal tokens
    whatever else is in the batch. Requests of equal `prompt_ids` share their prefill.
    """

    request_id: int
    prompt_id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    sample: int = 0

    def __post_init__(self):
        if not 0 <= self.request_id < 2**64:
            raise ValueError(f"request_id: got {self.request_id}, expected 0 <= id < 2^64 (it seeds the noise)")
        object.__setattr__(self, "prompt_ids", tuple(self.prompt_ids))  # hashable: it names the shared prefill


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished response.

    `logprobs` are natural-log probabilities of the emitted tokens under the law they were drawn from
    (temperature and truncation applied; at temperature 0, the law at temperature 1).
    """

    request_id: int
    prompt_id: int
    sample: int
    prompt_ids: tuple[int, ...]
    token_ids: np.ndarray  # i32[n]
    logprobs: np.ndarray  # f32[n]
    finish_reason: str  # "stop" or "length"
    policy_version: int = 0
    worker: int = 0
    rounds: int = 0  # target forwards that this response took part in
    drafted: int = 0  # tokens proposed by a drafter
    accepted: int = 0  # of those, tokens that were committed
    start_s: float = 0.0  # since the start of the rollout
    end_s: float = 0.0

    @property
    def accept_len(self) -> float:
        """Tokens committed per target forward, bonus token included."""
        return len(self.token_ids) / max(self.rounds, 1)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FeatureTrace:
    """Target features of a response's committed tokens, on the host: what a drafter is trained on.

    Feature t is the target's state after reading token t; the last token of a response was never read and has none.
    `features` are the last hidden states after the final norm, or the concatenated outputs of the drafter's feature
    layers; in the second case `hidden` holds the former as well.
    """

    request_id: int
    token_ids: np.ndarray  # i32[n] prompt, then response
    prompt_len: int
    features: np.ndarray  # bf16[m,feature_size] of positions start ... start+m-1
    start: int = 0
    hidden: np.ndarray | None = None  # bf16[m,D]
    step: int = 0  # RL step of the rollout
    policy_version: int = 0  # of the weights that made the features

    def __post_init__(self):
        last = self.start + len(self.features)
        if not 0 <= self.start <= last <= len(self.token_ids) or not 0 < self.prompt_len <= len(self.token_ids):
            raise ValueError(
                f"feature trace: got features of positions {self.start} to {last - 1} and a prompt of "
                f"{self.prompt_len} for {len(self.token_ids)} tokens, expected both inside the sequence"
            )
        if self.hidden is not None and len(self.hidden) != len(self.features):
            raise ValueError(
                f"feature trace: got {len(self.hidden)} hidden states and {len(self.features)} features, expected "
                "as many of both"
            )

    @property
    def response_len(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - self.prompt_len

    @property
    def num_bytes(self) -> int:
        """Host memory of the arrays."""
        return sum(x.nbytes for x in (self.token_ids, self.features, self.hidden) if x is not None)


class DraftModel(NamedTuple):
    """A drafter as the rollout engine sees it: pure functions of arrays, whatever is behind them.

    `weights` is the drafter's own pytree, `params` the target's live parameters.

    Attributes:
      forward: (weights, params, features [B,T,D'], tokens [B,T], start [B], layer cache, positions [B,T] | None,
        block mask | None) -> (h [B,T,D], layer cache). Row t takes the feature of position t and token t+1; its output
        predicts token t+2, and stands in for the feature of t+1 when several tokens are drafted.
      logits: (weights, params, h [B,T,D]) -> f32[B,T,Vd] over the draft vocabulary.
      target_ids: draft ids -> target ids.
      vocab_size: Vd.
      init_cache: (rows, slots, dtype) -> an empty layer cache.
      feature_layers: target layers whose outputs, side by side, are the features; empty for the final hidden state.
    """

    forward: Callable[..., tuple[Any, Any]]
    logits: Callable[[Any, Params, Any], Any]
    target_ids: Callable[[Any], Any]
    vocab_size: int
    init_cache: Callable[[int, int, str], Any]
    feature_layers: tuple[int, ...] = ()
