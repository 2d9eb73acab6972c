"""Target features of finished responses, for whoever trains the drafter."""

from __future__ import annotations

import numpy as np

from tlt_jax.models.config import ModelConfig
from tlt_jax.rollout.scheduler import Active
from tlt_jax.types import FeatureTrace


def make_trace(
    active: Active, features_SD: np.ndarray, model: ModelConfig, step: int, policy_version: int
) -> FeatureTrace:
    """The trace of a finished response.

    Args:
      active: the response.
      features_SD: bf16, its row of the feature buffer (`memory.features_of`); slots past its length are cut off.
      model: the target.
      step: RL step of the rollout.
      policy_version: of the weights that made the features.
    """
    D, features = model.hidden_size, features_SD[: active.length]
    is_fused = features.shape[1] > D  # then the last hidden state follows what the drafter reads
    return FeatureTrace(
        request_id=active.request.request_id,
        token_ids=np.asarray([*active.request.prompt_ids, *active.token_ids], np.int32),
        prompt_len=len(active.request.prompt_ids),
        features=features[:, :-D] if is_fused else features,
        hidden=features[:, -D:] if is_fused else None,
        step=step,
        policy_version=policy_version,
    )
