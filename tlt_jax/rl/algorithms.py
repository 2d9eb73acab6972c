"""Which policy-gradient algorithm: one frozen config, and the published algorithms as named presets.

Every preset is a point of one family. With advantage A of a row, log-probs `new`, `old`, `ref`, `behaviour` of a token
(all at the sampling temperature), and token weights w fixed by `aggregation`, the loss of an optimizer step is

    ratio = exp(new - old)                                      token level, or of the row's mean (`ratio_level`)
    pg    = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))
    pg    = min(pg, -A dual_clip)                               where A < 0 and dual_clip > 0
    pg    = pg min(exp(old - behaviour), tis_cap)               where tis_cap > 0
    loss  = sum_t w_t (pg_t + kl_coef kl_t - entropy_coef entropy_t)

Token weights, over the rows and tokens *of the optimizer step* that take part (B rows, n_i tokens each):

    seq_mean    1 / (B n_i)          GRPO: mean over rows of the row's mean
    token_mean  1 / sum_i n_i        DAPO: every token alike
    constant    1 / (B constant_len) Dr. GRPO: no length bias; constant_len 0 means the rollout's max_tokens
    seq_sum     1 / B                REINFORCE on whole responses

Rows that are dropped (`zero_std='drop'`, `overlong_filter`) leave the numerator and the denominator alike, and the KL
and entropy terms share the policy term's weights, so no mode mixes two normalisations.

References:
  grpo          Shao et al., DeepSeekMath, arXiv 2402.03300, eq. 3 and 4.
  dr_grpo       Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.2.
  dapo          Yu et al., DAPO, arXiv 2503.14476, eq. 8 to 13.
  rloo          Ahmadian et al., Back to Basics, arXiv 2402.14740, eq. 8. Departure: token ratios with a PPO clip, which
                equal the paper's REINFORCE on the first, on-policy, optimizer step.
  gspo          Zheng et al., Group Sequence Policy Optimization, arXiv 2507.18071, eq. 5 to 7.
  reinforce_pp  Hu et al., REINFORCE++, arXiv 2501.03262, the variant with group baseline.
  dual_clip     Ye et al., Mastering Complex Control in MOBA Games, arXiv 1912.09729, eq. 5.
  tis_cap       Truncated importance sampling: Ionides 2008; for rollout against learner, Yao et al. 2025.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from tlt_jax.types import SamplingParams

_CHOICES = {
    "advantage": ("group_norm", "group_mean", "rloo", "batch_norm", "group_mean_batch_norm"),
    "aggregation": ("seq_mean", "token_mean", "constant", "seq_sum"),
    "ratio_level": ("token", "sequence"),
    "kl_estimator": ("none", "k1", "k2", "k3"),
    "kl_in": ("loss", "reward"),
    "zero_std": ("keep", "drop"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """One policy-gradient algorithm; the module docstring has the formulas. `preset` gives the published ones.

    Attributes:
      advantage: `group_norm` (r - mean) / std over the prompt's group, ddof 0; `group_mean` r - mean; `rloo` r - mean
        of the others; `batch_norm` (r - mean) / std over the batch; `group_mean_batch_norm` r - group mean, then
        divided by the batch's std.
      aggregation: token weights, see the module docstring.
      constant_len: tokens, the divisor of `aggregation='constant'`; 0 means the rollout's max_tokens.
      ratio_level: `token`, or `sequence` for the geometric mean over the row (GSPO).
      clip_low: the ratio is clipped below at 1 - clip_low.
      clip_high: the ratio is clipped above at 1 + clip_high.
      dual_clip: bound of ratio * |A| for negative advantages, above 1; 0 is off.
      kl_coef: weight of the KL to the reference; 0 needs no reference.
      kl_estimator: `k1` new - ref, `k2` (new - ref)^2 / 2, `k3` exp(ref - new) - (ref - new) - 1. The gradient of k1 as
        a loss is zero in expectation: use k1 in the reward, k2 or k3 in the loss.
      kl_in: `loss` per token; `reward` takes kl_coef * sum_t kl_t off the row's reward before advantages.
      entropy_coef: weight of the entropy bonus; 0 is off.
      tis_cap: cap of exp(learner - behaviour), the weight that corrects for a rollout that samples from another law
        than the learner computes; 0 is off.
      num_iterations: passes over one rollout batch.
      num_minibatches: optimizer steps per pass.
      zero_std: rows of groups with constant reward: `keep` (advantage 0, they count in denominators, KL acts on them)
        or `drop`.
      dynamic_sampling: the loop samples prompts again until the batch is full of groups with signal.
      overlong_filter: rows cut at the length cap take no part in the loss; their rewards still count in their group.
      overlong_buffer: share of max_tokens over which the soft length penalty grows from 0 to 1; 0 is off.
      overlong_penalty: reward taken off at the cap.
    """

    advantage: str = "group_norm"
    aggregation: str = "seq_mean"
    constant_len: int = 0
    ratio_level: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_in: str = "loss"
    entropy_coef: float = 0.0
    tis_cap: float = 0.0
    num_iterations: int = 1
    num_minibatches: int = 1
    zero_std: str = "keep"
    dynamic_sampling: bool = False
    overlong_filter: bool = False
    overlong_buffer: float = 0.0
    overlong_penalty: float = 1.0

    def __post_init__(self):
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"algorithm.{name}: got {getattr(self, name)!r}, expected one of {', '.join(choices)}")
        checks = (
            ("constant_len", self.constant_len >= 0, ">= 0 tokens (0: the rollout's max_tokens)"),
            ("clip_low", 0.0 < self.clip_low < 1.0, "in (0, 1)"),
            ("clip_high", self.clip_high > 0.0, "> 0"),
            ("dual_clip", self.dual_clip == 0.0 or self.dual_clip > 1.0, "0 (off) or > 1; 3 is usual"),
            ("kl_coef", self.kl_coef >= 0.0, ">= 0"),
            ("kl_estimator", self.kl_coef == 0.0 or self.kl_estimator != "none", "k1, k2 or k3 with kl_coef > 0"),
            ("entropy_coef", self.entropy_coef >= 0.0, ">= 0"),
            ("tis_cap", self.tis_cap == 0.0 or self.tis_cap >= 1.0, "0 (off) or >= 1; 2 is usual"),
            ("num_iterations", self.num_iterations >= 1, ">= 1"),
            ("num_minibatches", self.num_minibatches >= 1, ">= 1"),
            ("dynamic_sampling", not self.dynamic_sampling or self.zero_std == "drop", "zero_std='drop' beside it"),
            ("overlong_buffer", 0.0 <= self.overlong_buffer <= 1.0, "in [0, 1], a share of max_tokens"),
            ("overlong_penalty", self.overlong_penalty >= 0.0, ">= 0"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise ValueError(f"algorithm.{name}: got {getattr(self, name)!r}, expected {expected}")

    @property
    def needs_reference(self) -> bool:
        """True where a frozen reference policy has to be kept."""
        return self.kl_coef > 0.0

    @property
    def num_updates(self) -> int:
        """Optimizer steps per rollout batch."""
        return self.num_iterations * self.num_minibatches


PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coef": 0.04},
    "dr_grpo": {"advantage": "group_mean", "aggregation": "constant"},
    "dapo": {
        "aggregation": "token_mean",
        "clip_high": 0.28,
        "zero_std": "drop",
        "dynamic_sampling": True,
        "overlong_filter": True,
        "overlong_buffer": 0.2,
    },
    "rloo": {"advantage": "rloo", "aggregation": "seq_sum", "kl_coef": 0.05, "kl_estimator": "k1", "kl_in": "reward"},
    "gspo": {"ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "reinforce_pp": {
        "advantage": "group_mean_batch_norm",
        "aggregation": "token_mean",
        "kl_coef": 1e-5,
        "kl_estimator": "k2",
    },
}


def preset(name: str, **overrides) -> AlgorithmConfig:
    """The published algorithm `name` with some fields changed.

    Raises:
      ValueError: unknown name or field, or a value out of range.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"algorithm: got {name!r}, expected one of {', '.join(PRESETS)}{hint}")
    known = {field.name for field in dataclasses.fields(AlgorithmConfig)}
    for key in overrides:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"algorithm.{key}: unknown field, expected one of {', '.join(sorted(known))}{hint}")
    return AlgorithmConfig(**{**PRESETS[name], **overrides})


def check_sampling(algo: AlgorithmConfig, sampling: SamplingParams) -> None:
    """Refuses a rollout law that the algorithm cannot correct for.

    Top-k, top-p and min-p make the rollout sample from a truncated, renormalised law, while the learner computes the
    full softmax at the sampling temperature. Only truncated importance sampling accounts for the difference.

    Raises:
      ValueError: the law is truncated and `tis_cap` is 0.
    """
    if sampling.truncates and algo.tis_cap == 0.0:
        raise ValueError(
            f"sampling: got top_k={sampling.top_k}, top_p={sampling.top_p}, min_p={sampling.min_p}, expected top_k=0, "
            "top_p=1, min_p=0 for training, since the learner's log-probs are of the full softmax; or set "
            "algorithm.tis_cap (2.0 is usual), which weighs tokens by learner / rollout probability"
        )
