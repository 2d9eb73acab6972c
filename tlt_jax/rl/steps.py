"""The learner's jitted programs, with shardings where there is a mesh.

    init        params -> state                        copies, f32
    zeros       -> gradients and metric sums at zero
    score       params, micro-batch -> log-probs
    accumulate  adds one micro-batch's gradient and sums; donates them
    apply       one optimizer step; donates the state
    kl          log-probs of two policies -> KL estimates
    gather      arrays split over the mesh -> the whole of them in every process

Each is traced once per shape; `trace_counts` says how often.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from tlt_jax.models.config import ModelConfig
from tlt_jax.models.transformer import param_shapes
from tlt_jax.rl.algorithms import AlgorithmConfig
from tlt_jax.rl.batch import MicroBatch, PackConfig
from tlt_jax.rl.grpo import TokenTerms, kl_estimate, policy_loss
from tlt_jax.rl.logprobs import response_logprobs
from tlt_jax.rl.optimizer import LearnerState, OptimizerConfig, apply_gradients, make_optimizer, make_schedule
from tlt_jax.sharding import BATCH, param_shardings, replicated
from tlt_jax.types import Params

Sums = dict[str, jax.Array]

_SUM_NAMES = ("tokens", "loss", "policy_loss", "kl", "entropy", "ratio", "clip", "dual_clip", "gap", "tis")
METRIC_KEYS = (*(f"sum/{name}" for name in _SUM_NAMES), "max/ratio", "max/gap")  # as `policy_loss` returns them


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """How the learner computes; none of it changes what is learnt beyond rounding.

    Attributes:
      pack: layout of micro-batches.
      head_tokens: rows of f32 logits held at a time, over all devices.
      compute_dtype: dtype of activations and products; "" takes the model's.
      remat: recompute each layer in the backward pass: a fraction of the memory for a few percent of time.
    """

    pack: PackConfig = dataclasses.field(default_factory=PackConfig)
    head_tokens: int = 2048
    compute_dtype: str = ""
    remat: bool = True

    def __post_init__(self):
        if self.head_tokens < 1:
            raise ValueError(f"learner.head_tokens: got {self.head_tokens}, expected >= 1")
        if self.compute_dtype not in ("", "float32", "bfloat16"):
            raise ValueError(
                f"learner.compute_dtype: got {self.compute_dtype!r}, expected float32, bfloat16 or '' (model's)"
            )


class Steps(NamedTuple):
    """The jitted programs; `lower` them with `state_shapes` to compile from shapes alone."""

    init: Callable[[Params], LearnerState]
    zeros: Callable[[], tuple[Params, Sums]]
    score: Callable[..., jax.Array]  # (params, micro, temperature) -> f32[B,T]
    accumulate: Callable[..., tuple[Params, Sums]]  # (params, grads, sums, micro, old, ref, is_on_policy, temperature)
    apply: Callable[[LearnerState, Params], tuple[LearnerState, Sums]]
    kl: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # (logprobs, ref_logprobs, mask), each [B,T] -> f32[B,T]
    gather: Callable[[Any], Any]
    state_shapes: LearnerState
    trace_counts: collections.Counter


def make_steps(
    model: ModelConfig, algo: AlgorithmConfig, optim: OptimizerConfig, config: LearnerConfig, mesh: Mesh | None
) -> Steps:
    """The programs for one device, or for a mesh with axes `data`, `fsdp` and `tensor`."""
    if config.compute_dtype:
        model = dataclasses.replace(model, dtype=config.compute_dtype)
    optimizer = make_optimizer(optim)
    traces: collections.Counter = collections.Counter()
    programs = _forward_programs(model, algo, config) | _state_programs(model, optim, optimizer)
    state_shapes = jax.eval_shape(programs["init"], param_shapes(model))
    programs = {name: _counted(program, name, traces) for name, program in programs.items()}
    donated = {"accumulate": (1, 2), "apply": (0,)}
    shardings: dict[str, dict[str, Any]] = {}
    if mesh is not None:
        at = state_shardings(state_shapes, optimizer, mesh, model.num_kv_heads)
        shardings = _program_shardings(at, mesh)
        state_shapes = jax.tree.map(lambda s, to: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=to), state_shapes, at)
    jitted = {
        name: jax.jit(program, donate_argnums=donated.get(name, ()), **shardings.get(name, {}))
        for name, program in programs.items()
    }
    return Steps(**jitted, state_shapes=state_shapes, trace_counts=traces)


def _forward_programs(model: ModelConfig, algo: AlgorithmConfig, config: LearnerConfig) -> dict[str, Callable]:
    """Programs that look at tokens."""

    logprobs_of = functools.partial(response_logprobs, head_tokens=config.head_tokens, is_packed=config.pack.share_bins)

    def score(params, micro: MicroBatch, temperature):
        return logprobs_of(params, model, micro, temperature)[0]

    def accumulate(params, grads, sums, micro: MicroBatch, old_BT, ref_BT, is_on_policy, temperature):
        def loss(params):
            logprobs_BT, entropies_BT = logprobs_of(
                params, model, micro, temperature, remat=config.remat, entropy_grad=algo.entropy_coef > 0.0
            )
            # On policy the old log-probs are these very numbers: recomputed ones differ by rounding.
            current_BT = jax.lax.stop_gradient(logprobs_BT)
            old = jnp.where(is_on_policy, current_BT, old_BT)
            return policy_loss(_token_terms(micro, logprobs_BT, entropies_BT, old, ref_BT), algo)

        new_grads, new_sums = jax.grad(loss, has_aux=True)(params)
        grads = jax.tree.map(lambda total, new: total + new.astype(jnp.float32), grads, new_grads)
        return grads, {k: (jnp.maximum if k.startswith("max/") else jnp.add)(sums[k], new_sums[k]) for k in METRIC_KEYS}

    def kl(logprobs_BT, ref_BT, mask_BT):
        return kl_estimate(logprobs_BT, ref_BT, mask_BT, algo.kl_estimator)

    return {"score": score, "accumulate": accumulate, "kl": kl, "gather": lambda tree: tree}


def _state_programs(
    model: ModelConfig, optim: OptimizerConfig, optimizer: optax.GradientTransformation
) -> dict[str, Callable]:
    """Programs that look at parameters alone."""
    shapes, schedule = param_shapes(model), make_schedule(optim)

    def init(params: Params) -> LearnerState:
        params = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
        return LearnerState(params=params, opt_state=optimizer.init(params), step=jnp.int32(0))

    def zeros() -> tuple[Params, Sums]:
        grads = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), shapes)
        return grads, {key: jnp.float32(0) for key in METRIC_KEYS}

    def apply(state: LearnerState, grads: Params):
        new_state, info = apply_gradients(optimizer, state, grads)
        return new_state, info | {"learning_rate": jnp.asarray(schedule(state.step), jnp.float32)}

    return {"init": init, "zeros": zeros, "apply": apply}


def _token_terms(micro: MicroBatch, logprobs_BT, entropies_BT, old_BT, ref_BT) -> TokenTerms:
    return TokenTerms(
        logprobs=logprobs_BT,
        entropies=entropies_BT,
        old_logprobs=old_BT,
        behaviour_logprobs=micro.behaviour_logprobs,
        ref_logprobs=ref_BT,
        advantages=micro.advantages,
        weights=micro.weights,
        mask=micro.mask,
        segments=micro.segments,
    )


def _counted(program: Callable, name: str, traces: collections.Counter) -> Callable:
    """`program`, counting how often it is traced: the body of a jitted function runs once per trace."""

    def traced(*args):
        traces[name] += 1
        return program(*args)

    traced.__name__ = name
    return traced


def _program_shardings(at: LearnerState, mesh: Mesh) -> dict[str, dict[str, Any]]:
    """Keyword arguments of `jax.jit` for each program."""
    batch, one = NamedSharding(mesh, BATCH), replicated(mesh)
    return {
        "init": {"out_shardings": at},
        "zeros": {"out_shardings": (at.params, one)},
        "score": {"in_shardings": (at.params, batch, one), "out_shardings": batch},
        "accumulate": {
            "in_shardings": (at.params, at.params, one, batch, batch, batch, one, one),
            "out_shardings": (at.params, one),
        },
        "apply": {"in_shardings": (at, at.params), "out_shardings": (at, one)},
        "kl": {"in_shardings": (batch, batch, batch), "out_shardings": batch},
        "gather": {"in_shardings": batch, "out_shardings": one},
    }


def state_shardings(
    shapes: LearnerState, optimizer: optax.GradientTransformation, mesh: Mesh, heads: int
) -> LearnerState:
    """Shardings of a state: moments lie where their parameters lie, counts are everywhere."""
    params = param_shardings(shapes.params, mesh, heads=heads)
    one = replicated(mesh)
    opt_state = optax.tree_map_params(
        optimizer, lambda _, sharding: sharding, shapes.opt_state, params, transform_non_params=lambda _: one
    )
    return dataclasses.replace(shapes, params=params, opt_state=opt_state, step=one)
