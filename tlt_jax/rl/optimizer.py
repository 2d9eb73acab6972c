"""AdamW with global-norm clipping and a schedule, and the update that survives a bad gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from tlt_jax.types import Params

SCHEDULES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW.

    Attributes:
      learning_rate: peak, after warm-up.
      schedule: `constant`, or `linear` / `cosine` decay to `learning_rate * end_factor` at `total_steps`.
      warmup_steps: optimizer steps of linear growth from 0; the first step has a rate above 0.
      total_steps: optimizer steps, warm-up included; needed by a schedule that decays.
      end_factor: share of the peak left at the end of the decay.
      b1, b2, eps: of Adam.
      weight_decay: decoupled, on matrices only: norms and biases are left alone.
      max_grad_norm: the gradient is scaled down to this global norm; 0 is off.
    """

    learning_rate: float = 1e-6
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    end_factor: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self):
        decays = self.schedule != "constant"
        checks = (
            ("learning_rate", self.learning_rate >= 0.0, ">= 0"),
            ("schedule", self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}"),
            ("warmup_steps", self.warmup_steps >= 0, ">= 0 optimizer steps"),
            ("total_steps", not decays or self.total_steps > self.warmup_steps, "more than warmup_steps, to decay"),
            ("end_factor", 0.0 <= self.end_factor <= 1.0, "in [0, 1]"),
            ("b1", 0.0 <= self.b1 < 1.0, "in [0, 1)"),
            ("b2", 0.0 <= self.b2 < 1.0, "in [0, 1)"),
            ("eps", self.eps > 0.0, "> 0"),
            ("weight_decay", self.weight_decay >= 0.0, ">= 0"),
            ("max_grad_norm", self.max_grad_norm >= 0.0, ">= 0 (0 is off)"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise ValueError(f"optimizer.{name}: got {getattr(self, name)!r}, expected {expected}")


@flax.struct.dataclass(kw_only=True)
class LearnerState:
    """What an optimizer step changes, and all that a checkpoint of the learner needs."""

    params: Params  # f32 master weights
    opt_state: Any  # optax state
    step: jax.Array  # i32[] optimizer steps applied; equal to optax's own count


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate by optimizer step, counted from 0."""
    peak, end = config.learning_rate, config.learning_rate * config.end_factor
    decay_steps = max(config.total_steps - config.warmup_steps, 1)
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, end, decay_steps)
    else:
        after = optax.cosine_decay_schedule(peak, decay_steps, alpha=config.end_factor)
    if not config.warmup_steps:
        return after
    # Step i of n has (i + 1) / n of the peak: a first step at rate 0 would change nothing.
    warmup = optax.linear_schedule(peak / config.warmup_steps, peak, max(config.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Global-norm clip, then AdamW."""
    adamw = optax.adamw(
        make_schedule(config),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim >= 2, params),
    )
    if config.max_grad_norm == 0.0:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adamw)


def apply_gradients(
    optimizer: optax.GradientTransformation, state: LearnerState, grads: Params
) -> tuple[LearnerState, dict[str, jax.Array]]:
    """One optimizer step, or none at all where the gradient is not finite.

    Returns:
      The new state, and f32[] `grad_norm` (before clipping) and `is_applied` (1 or 0).
    """
    grad_norm = optax.global_norm(grads)
    is_finite = jnp.isfinite(grad_norm)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    # A select is fused into the update's own loops; a conditional would copy the donated state.
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(is_finite, new, old), (params, opt_state), (state.params, state.opt_state)
    )
    new_state = LearnerState(params=params, opt_state=opt_state, step=state.step + is_finite.astype(jnp.int32))
    return new_state, {"grad_norm": grad_norm, "is_applied": is_finite.astype(jnp.float32)}
