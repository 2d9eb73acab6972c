"""What a drafter looks like (its form, its target, the shape of its one decoder layer), and what it is trained for."""

from __future__ import annotations

import dataclasses
from typing import Any

from tlt_jax.drafter.laws import LOSSES
from tlt_jax.models.config import ModelConfig

FORMS = ("eagle", "eagle3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """A one-layer drafter for a target model; hashable, static under `jax.jit`.

    Attributes:
      target: the model that it drafts for.
      form: "eagle" (the target's last hidden state in, the target's head out) or "eagle3" (three layers fused, an
        output norm and a head of its own).
      feature_layers: eagle3: three layers of the target, ascending, whose outputs are the features. Empty takes what
        enters layers 2, L/2 and L-3, that is the outputs of 1, L/2-1 and L-4, which serving engines also default to.
      draft_vocab_size: ids that the drafter can propose, 0 for all; a smaller one needs a map (`drafter/vocab.py`).
      fc_bias: whether the input projection has a bias; some published EAGLE drafters do.
      layer: shape and dtype of the decoder layer. None takes the target's: eagle keeps the biases of its attention,
        eagle3 has none, and neither normalises queries and keys.
    """

    target: ModelConfig
    form: str = "eagle"
    feature_layers: tuple[int, ...] = ()
    draft_vocab_size: int = 0
    fc_bias: bool = False
    layer: ModelConfig = None  # type: ignore[assignment]  # filled in below

    def __post_init__(self):
        if self.form not in FORMS:
            raise ValueError(f"drafter.form: got {self.form!r}, expected one of {', '.join(FORMS)}")
        if not 0 <= self.draft_vocab_size <= self.target.vocab_size:
            raise ValueError(
                f"drafter.draft_vocab_size: got {self.draft_vocab_size}, expected 0 (all) to {self.target.vocab_size}"
            )
        if self.layer is None:
            object.__setattr__(self, "layer", _layer_like(self.target, self.form))
        if self.layer.hidden_size != self.target.hidden_size:
            raise ValueError(
                f"drafter.layer: got hidden size {self.layer.hidden_size}, expected the target's, "
                f"{self.target.hidden_size}: embedding and features are shared with it"
            )
        object.__setattr__(self, "feature_layers", self._check_feature_layers())

    def _check_feature_layers(self) -> tuple[int, ...]:
        num_layers, chosen = self.target.num_layers, tuple(self.feature_layers)
        if self.form == "eagle":
            if chosen:
                raise ValueError(
                    f"drafter.feature_layers: got {chosen}, expected none: eagle reads the last layer only"
                )
            return ()
        chosen = chosen or (1, num_layers // 2 - 1, num_layers - 4)
        ascending = list(chosen) == sorted(set(chosen))
        if len(chosen) != 3 or not ascending or not 0 <= chosen[0] <= chosen[-1] < num_layers:
            raise ValueError(
                f"drafter.feature_layers: got {chosen} for a target of {num_layers} layers, expected three different "
                "layers in ascending order; set them for targets of less than seven layers"
            )
        return chosen

    @property
    def vocab_size(self) -> int:
        """Width of the drafter's logits."""
        return self.draft_vocab_size or self.target.vocab_size

    @property
    def feature_size(self) -> int:
        """Width of the target features that enter the drafter."""
        return self.target.hidden_size * (3 if self.form == "eagle3" else 1)


def _layer_like(target: ModelConfig, form: str) -> ModelConfig:
    is_eagle = form == "eagle"
    return dataclasses.replace(
        target,
        num_layers=1,
        qk_norm=False,
        attention_bias=target.attention_bias and is_eagle,
        output_bias=target.output_bias and is_eagle,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What the drafter is trained for.

    Attributes:
      num_steps: unroll steps; 1 is plain EAGLE, more is training-time test.
      step_decay: weight of step s is `step_decay ** s`.
      feature_weight: of SmoothL1 on features; 0 for the eagle3 form, which has no feature to match.
      logit_loss: one of `laws.LOSSES`.
      logit_weight: of the logit loss.
      temperature: of both laws; that of the rollouts whose drafts are to be accepted.
      full_target: normalise the target over its whole vocabulary where the draft vocabulary is smaller. Costs the
        target's whole head; without it the target's law is that of the ids the drafter can propose.
      chunk_rows: rows whose logits exist at a time.
    """

    num_steps: int = 1
    step_decay: float = 0.8
    feature_weight: float = 1.0
    logit_loss: str = "soft_ce"
    logit_weight: float = 0.1
    temperature: float = 1.0
    full_target: bool = False
    chunk_rows: int = 256

    def __post_init__(self):
        checks = (
            ("num_steps", self.num_steps >= 1, ">= 1"),
            ("step_decay", 0.0 < self.step_decay <= 1.0, "in (0, 1]"),
            ("feature_weight", self.feature_weight >= 0.0, ">= 0"),
            ("logit_loss", self.logit_loss in LOSSES, f"one of {', '.join(LOSSES)}"),
            ("logit_weight", self.logit_weight >= 0.0, ">= 0"),
            ("temperature", self.temperature > 0.0, "> 0: the drafts of a greedy rollout are trained at 1.0 as well"),
            ("chunk_rows", self.chunk_rows >= 1, ">= 1"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise ValueError(f"drafter.loss.{name}: got {getattr(self, name)!r}, expected {expected}")


PRESETS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "hass": {"num_steps": 3},
    "eagle3": {"num_steps": 7, "feature_weight": 0.0, "logit_weight": 1.0},
    "coupled": {"num_steps": 3, "logit_loss": "log_overlap", "logit_weight": 1.0},
}


def loss_preset(name: str, **overrides: Any) -> LossConfig:
    """A named recipe: `eagle`, `hass`, `eagle3`, or `coupled` (for drafter-invariant sampling)."""
    if name not in PRESETS:
        raise ValueError(f"drafter.loss: got preset {name!r}, expected one of {', '.join(PRESETS)}")
    return LossConfig(**(PRESETS[name] | overrides))
